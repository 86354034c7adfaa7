/* Goal: `kvtier top` shows the numbers of a running cache: once, as JSON lines with rates, in a
 *       terminal; it gives the terminal back as it was after 'q', Ctrl-C, a termination and a new
 *       size; numbers that fall give no rates; whatever else is called "stats" is refused.
 * Method: a cache in this process writes real snapshots; for rates and restarts the file is written
 *         by the test. The terminal is a pseudo-terminal whose output is read to the end.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include "stats_file.h"
#include "support/run_tool.h"
#include "support/small_store.h"

static struct small_store store;
static struct tool_run run;

static void tool(const char *const argv[])
{
    tool_run(&run, KVT_TOOL, argv, NULL, NULL);
}
#define TOOL(...) tool((const char *const[]){"kvtier", __VA_ARGS__, NULL})

static int setup(void **state)
{
    (void)state;
    small_store_init(&store);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    small_store_done(&store);
    return 0;
}

static json_t *json_of(const char *text)
{
    json_t *value = json_loads(text, JSON_DISABLE_EOF_CHECK, NULL);

    if (!value)
        fail_msg("no JSON: %s%s", run.out, run.err);
    return value;
}

static double number(const json_t *object, const char *key)
{
    json_t *value = json_object_get(object, key);

    if (!json_is_number(value))
        fail_msg("%s is no number", key);
    return json_number_value(value);
}

static void write_stats(const char *text)
{
    char path[400], fresh[400];

    (void)mkdir(store.dir, 0700);
    snprintf(path, sizeof(path), "%s/stats", store.dir);
    snprintf(fresh, sizeof(fresh), "%s/stats.fresh", store.dir);
    FILE *f = fopen(fresh, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(rename(fresh, path), 0); /* never half of it */
}

/* A cache that has stored 40 blocks, loaded them, and looked 60 up. */
static void make_traffic(void)
{
    small_store_open(&store);
    small_store_put(&store, 0, 40, 0);
    assert_int_equal(small_store_get(&store, 0, 40), 40);
    small_store_wait_stats(&store, "load.granted_dram 40\n");
    assert_int_equal(kvt_lookup(store.ns[0], store.keys[0], 60, NULL, NULL), 40);
    small_store_wait_stats(&store, "lookup.keys 60\n");
}

static void test_once(void **state)
{
    (void)state;
    make_traffic();
    TOOL("top", store.dir, "--once");
    assert_int_equal(run.code, 0);
    char line[64];
    snprintf(line, sizeof(line), "process %d", (int)getpid());
    assert_non_null(strstr(run.out, line));
    /* what was loaded comes first, as a share of what was loaded or computed: 40 of 80 */
    const char *loaded = strstr(run.out, "loaded, not computed");
    const char *asked = strstr(run.out, "looked up (questions: ");
    assert_non_null(loaded);
    assert_true(asked > loaded);
    const char *share = strstr(loaded, "of loaded and stored");
    assert_true(share != NULL && share < asked);
    assert_memory_equal(share + strcspn(share, "0123456789"), "50.0 %", 6);
    const char *there = strstr(asked, "were in dram");
    assert_non_null(there);
    assert_memory_equal(there + strcspn(there, "0123456789"), "66.7 %", 6); /* 40 of 60 */
    assert_null(strstr(run.out, "hits"));
    assert_non_null(strstr(run.out, "write queue"));
    assert_null(strstr(run.out, "too late")); /* troubles that did not happen are left out */
    assert_null(strchr(run.out, '\033'));

    TOOL("top", store.dir, "--once", "--json");
    assert_int_equal(run.code, 0);
    json_t *top = json_of(run.out);
    assert_true(number(top, "owner_pid") == getpid());
    assert_true(number(top, "age_s") >= 0 && number(top, "age_s") < 60);
    assert_true(number(top, "loaded_ratio") == 0.5);
    const json_t *ratio = json_object_get(top, "hit_ratio");
    assert_true(number(ratio, "dram") > 0.66 && number(ratio, "total") < 0.67);
    assert_true(number(json_object_get(top, "counters"), "load.granted_dram") == 40);
    assert_true(json_is_null(json_object_get(top, "per_second")));
    json_decref(top);

    small_store_close(&store);
    TOOL("top", store.dir, "--once");
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "no process"));
}

/* Rows of the tier that machines share are there where there is one; trouble with it too. */
static void test_a_shared_tier(void **state)
{
    static const char *const rows[] = {"were in shared tier",     "1 down",
                                       "blocks from shared tier", "10.0 %",
                                       "not put: failed",         "damaged"};

    (void)state;
    small_store_close(&store);
    write_stats("lookup.keys 100\nlookup.hits_dram 50\n");
    TOOL("top", store.dir, "--once");
    assert_int_equal(run.code, 0);
    assert_null(strstr(run.out, "shared tier"));
    write_stats("lookup.keys 100\nlookup.hits_dram 50\nlookup.hits_remote 10\nremote.nodes 1\n"
                "remote.nodes_down 1\nremote.put_fail 8\nremote.bad 2\nload.granted_remote 10\n");
    TOOL("top", store.dir, "--once");
    assert_int_equal(run.code, 0);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        if (!strstr(run.out, rows[i]))
            fail_msg("no \"%s\" in %s", rows[i], run.out);
    assert_null(strstr(run.out, "not put: no room")); /* that did not happen */
    TOOL("top", store.dir, "--once", "--json");
    json_t *top = json_of(run.out);
    const json_t *ratio = json_object_get(top, "hit_ratio");
    assert_true(number(ratio, "remote") > 0.09 && number(ratio, "remote") < 0.11);
    assert_true(number(ratio, "total") > 0.59 && number(ratio, "total") < 0.61);
    json_decref(top);
}

static void test_refusals(void **state)
{
    char path[400];

    (void)state;
    TOOL("top", store.base, "--once");
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "no statistics there"));
    TOOL("top");
    assert_int_equal(run.code, 2);
    /* what is no directory is named as what it is, with what to say instead; also to root */
    TOOL("top", "/etc/passwd", "--once");
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "/etc/passwd is neither a store directory nor a socket"));
    assert_non_null(strstr(run.err, "unix:SOCKET"));
    TOOL("top", "/nonexistent", "--once");
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "/nonexistent: No such file"));
    struct sockaddr_un where = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_true(fd >= 0);
    assert_in_range(snprintf(where.sun_path, sizeof(where.sun_path), "%s/s", store.base), 1,
                    sizeof(where.sun_path) - 1);
    assert_int_equal(bind(fd, (struct sockaddr *)&where, sizeof(where)), 0);
    TOOL("top", where.sun_path, "--once");
    close(fd);
    assert_int_equal(run.code, 1);
    snprintf(path, sizeof(path), "kvtier top unix:%s", where.sun_path);
    assert_non_null(strstr(run.err, path));
    TOOL("top", store.dir, "--interval", "0");
    assert_int_equal(run.code, 2);
    /* a FIFO and a link are not what an owner writes, and nobody waits for them */
    assert_int_equal(mkdir(store.dir, 0700), 0);
    snprintf(path, sizeof(path), "%s/stats", store.dir);
    assert_int_equal(mkfifo(path, 0600), 0);
    TOOL("top", store.dir, "--once");
    assert_int_equal(run.code, 1);
    unlink(path);
    assert_int_equal(symlink("/proc/self/stat", path), 0);
    TOOL("top", store.dir, "--once");
    assert_int_equal(run.code, 1);
}

static void test_reader(void **state)
{
    double age = -1;

    (void)state;
    assert_null(kvt_stats_read(store.dir, &age));
    write_stats("a.b 12\nno-number x y\nlonely\nbig 99999999999999999999\nneg -3\n\n\n\n");
    json_t *counters = kvt_stats_read(store.dir, &age);
    assert_non_null(counters);
    assert_true(age >= -1 && age < 60);
    assert_int_equal(kvt_stats_value(counters, "a.b"), 12);
    assert_int_equal(kvt_stats_value(counters, "absent"), 0);
    assert_string_equal(json_string_value(json_object_get(counters, "no-number")), "x y");
    assert_true(json_is_string(json_object_get(counters, "big")));
    assert_true(json_is_string(json_object_get(counters, "neg")));
    assert_int_equal(json_object_size(counters), 4);
    json_decref(counters);
    assert_true(kvt_stats_percent(1, 4) == 25 && kvt_stats_percent(3, 0) == 0);
}

/* ---- a child that goes on ------------------------------------------------------------------ */

struct child {
    pid_t pid;
    int fd; /* what it prints; for a terminal: the terminal's other side */
    char out[262144];
    size_t used;
};

static struct child child;

/* Read until `want` occurs, or the other side closes (want NULL), or ten seconds pass. */
static int read_until(const char *want)
{
    for (int i = 0; i < 1000; i++) {
        struct pollfd pfd = {.fd = child.fd, .events = POLLIN};
        ssize_t n = 0;
        if (want && strstr(child.out, want))
            return 1;
        if (poll(&pfd, 1, 10) > 0) {
            n = read(child.fd, child.out + child.used, sizeof(child.out) - child.used - 1);
            if (n <= 0)
                return want == NULL; /* EIO: the terminal's side is closed */
            child.used += (size_t)n;
            child.out[child.used] = '\0';
        }
    }
    return 0;
}

static int wait_child(void)
{
    int status;

    assert_int_equal(waitpid(child.pid, &status, 0), child.pid);
    close(child.fd);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void start_piped(const char *const argv[])
{
    int ends[2];

    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    memset(&child, 0, sizeof(child));
    child.pid = fork();
    assert_true(child.pid >= 0);
    if (child.pid == 0) {
        dup2(ends[1], STDOUT_FILENO);
        execv(KVT_TOOL, (char *const *)argv);
        _exit(127);
    }
    close(ends[1]);
    child.fd = ends[0];
}

/* The first line that holds `want`, as JSON; lines before it are of looks that saw nothing new. */
static json_t *line_with(const char *want)
{
    assert_true(read_until(want));
    char *at = strstr(child.out, want), *start = at;
    while (start > child.out && start[-1] != '\n')
        start--;
    assert_true(read_until("}}\n"));
    return json_of(start);
}

/* Lines with rates; a restart of the cache (numbers fall) and a file that goes away in between. */
static void test_json_lines(void **state)
{
    const char *const argv[] = {"kvtier", "top", store.dir, "--json", "--interval", "1", NULL};

    (void)state;
    write_stats("lookup.keys 100\nlookup.hits_dram 50\nlookup.hits_disk 25\n");
    start_piped(argv);
    assert_true(read_until("}\n"));
    json_t *line = json_of(child.out);
    assert_true(json_is_null(json_object_get(line, "per_second")));
    assert_true(number(json_object_get(line, "hit_ratio"), "total") == 0.75);
    json_decref(line);
    child.used = 0;
    child.out[0] = '\0';
    usleep(200000);
    write_stats("lookup.keys 300\nlookup.hits_dram 50\nlookup.hits_disk 25\nnew.thing 4\n");
    line = line_with("\"per_second\":{");
    const json_t *rates = json_object_get(line, "per_second");
    double period = number(line, "period_s");
    assert_true(period > 0.1 && period < 30);
    assert_true(number(rates, "lookup.keys") * period > 199 &&
                number(rates, "lookup.keys") * period < 201);
    assert_true(number(rates, "lookup.hits_dram") == 0);
    json_decref(line);
    child.used = 0;
    child.out[0] = '\0';
    usleep(200000);
    write_stats("lookup.keys 7\n"); /* started anew */
    assert_true(read_until("\"lookup.keys\":7}"));
    assert_true(read_until("\"per_second\":{\"lookup.keys\":0.0}"));
    kill(child.pid, SIGTERM);
    assert_true(read_until(NULL));
    assert_int_equal(wait_child(), 0);
}

static void start_terminal(const char *term)
{
    struct winsize size = {.ws_row = 40, .ws_col = 100};

    memset(&child, 0, sizeof(child));
    child.pid = forkpty(&child.fd, NULL, NULL, &size);
    assert_true(child.pid >= 0);
    if (child.pid == 0) {
        setenv("TERM", term, 1);
        execl(KVT_TOOL, "kvtier", "top", store.dir, "--interval", "1", (char *)NULL);
        _exit(127);
    }
}

static const char stats_text[] = "lookup.keys 100\nlookup.hits_dram 50\nload.deadline 3\n"
                                 "disk.queue_blocks 17\n";

#define LEAVE "\033[?1049l" /* what xterm is told when its own screen is wanted back */

/* The terminal must be as it was: its modes, and its own screen. */
static void check_left(const struct termios *before)
{
    struct termios after;

    assert_int_equal(tcgetattr(child.fd, &after), 0);
    assert_int_equal(after.c_lflag, before->c_lflag);
    assert_int_equal(after.c_iflag, before->c_iflag);
    assert_int_equal(after.c_oflag, before->c_oflag);
    assert_non_null(strstr(child.out, LEAVE));
}

/* The modes that a terminal begins with: those of another one, since who runs on ours may have
 * changed them before we look. */
static struct termios fresh_modes(void)
{
    struct termios modes;
    int ours, its;

    assert_int_equal(openpty(&ours, &its, NULL, NULL, NULL), 0);
    assert_int_equal(tcgetattr(its, &modes), 0);
    close(ours);
    close(its);
    return modes;
}

static void end_by(int how)
{
    struct termios before = fresh_modes();
    struct winsize size = {.ws_row = 12, .ws_col = 50};

    start_terminal("xterm");
    if (!read_until("too late")) {
        if (strstr(child.out, "\033[?1049h") == NULL) {
            kill(child.pid, SIGTERM);
            (void)read_until(NULL);
            (void)wait_child();
            skip(); /* this build has no ncurses */
        }
        fail_msg("no screen: %s", child.out);
    }
    assert_non_null(strstr(child.out, "blocks from dram"));
    assert_int_equal(ioctl(child.fd, TIOCSWINSZ, &size), 0); /* the kernel sends SIGWINCH */
    child.used = 0;
    child.out[0] = '\0';
    assert_true(read_until("blocks from dram")); /* drawn again */
    if (how == 0)
        assert_int_equal(write(child.fd, "q", 1), 1);
    else if (how == SIGINT)
        assert_int_equal(write(child.fd, "\003", 1), 1); /* Ctrl-C, typed */
    else
        kill(child.pid, how);
    assert_true(read_until(LEAVE));
    int status;
    assert_int_equal(waitpid(child.pid, &status, 0), child.pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check_left(&before);
    close(child.fd);
}

static void test_terminal(void **state)
{
    (void)state;
    write_stats(stats_text);
    end_by(0);
    end_by(SIGINT);
    end_by(SIGTERM);
}

/* A terminal that ncurses does not know: plain lines, no control characters. */
static void test_unknown_terminal(void **state)
{
    (void)state;
    write_stats(stats_text);
    start_terminal("no-such-terminal");
    assert_true(read_until("space"));
    assert_null(strchr(child.out, '\033'));
    assert_int_equal(write(child.fd, "\003", 1), 1);
    (void)read_until(NULL);
    assert_int_equal(wait_child(), 0);
}

/* The terminal is closed under it: it ends, and does not spin. */
static void test_terminal_gone(void **state)
{
    int status = -1;

    (void)state;
    write_stats(stats_text);
    start_terminal("xterm");
    assert_true(read_until("blocks from dram"));
    close(child.fd);
    for (int i = 0; i < 1000 && waitpid(child.pid, &status, WNOHANG) == 0; i++)
        usleep(10000);
    assert_true(status != -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_once, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_shared_tier, setup, teardown),
        cmocka_unit_test_setup_teardown(test_refusals, setup, teardown),
        cmocka_unit_test_setup_teardown(test_reader, setup, teardown),
        cmocka_unit_test_setup_teardown(test_json_lines, setup, teardown),
        cmocka_unit_test_setup_teardown(test_terminal, setup, teardown),
        cmocka_unit_test_setup_teardown(test_unknown_terminal, setup, teardown),
        cmocka_unit_test_setup_teardown(test_terminal_gone, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
