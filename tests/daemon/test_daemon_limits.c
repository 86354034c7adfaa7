/* A kvtierd that runs out of something: readers of its log, descriptors.
 *
 * Goal:   it serves on, says what is missing and what helps, and never asks the kernel in a circle.
 * Method: real daemons: one with a log that nobody reads, some under small limits on descriptors,
 *         with programs that connect until there are none left. That nothing goes round is told by
 *         the processor time of a second of waiting, which load elsewhere can only make less.
 */
#include "support/rig.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/sock.h"
#include "client/link.h"
#include "daemon/server_impl.h"
#include "store/owner.h"
#include "support/daemon_rig.h"
#include "support/run_tool.h"

enum { BLOCKS = 8, LINKS = 24, FILES = 64 };

static struct daemon server;
static struct rig rig;
static struct kvt_link links[LINKS];

static int tear_down(void **state)
{
    (void)state;
    rig_close(&rig);
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    daemon_free(&server);
    return 0;
}

static void serves(void)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);

    rig_init(&rig, &shape, server.config, NULL);
    rig_open(&rig);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
    rig_close(&rig);
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
}

/* Connect; a machine that is too busy for two seconds is asked again. */
static int dial_try(struct kvt_link *link, char *why, size_t len)
{
    int rc = -EAGAIN;

    for (int i = 0; i < 20 && (rc == -EAGAIN || rc == -ETIMEDOUT); i++) {
        kvt_link_init(link, server.socket);
        rc = kvt_link_dial(link, why, len);
    }
    return rc;
}

static void dial(struct kvt_link *link)
{
    char why[512];

    if (dial_try(link, why, sizeof(why)) != 0)
        fail_msg("%s", why);
}

/* ---- a log that nobody reads ----------------------------------------------------------------- */

static char text[1 << 17];

static void read_all(int fd)
{
    size_t used = 0;

    assert_int_equal(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
    for (ssize_t n; (n = read(fd, text + used, sizeof(text) - 1 - used)) > 0;)
        used += (size_t)n;
    text[used] = '\0';
}

/* Clients that come and go leave lines, until the pipe is full; everything goes on all the same. */
static void a_log_that_nobody_reads_stops_nobody(void **state)
{
    int fds[2], went = 0;

    (void)state;
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    assert_true(fcntl(fds[1], F_SETPIPE_SZ, 4096) > 0);
    daemon_init(&server, "--dram 16MiB --log-level debug");
    server.log_fd = fds[1];
    daemon_start(&server);
    close(fds[1]);
    for (; went < 2000 && daemon_stat(&server, "daemon.log_lost") < 10; went++) {
        dial(&links[0]);
        kvt_link_hang_up(&links[0]);
    }
    assert_true(daemon_stat(&server, "daemon.log_lost") >= 10);
    serves();
    assert_int_equal(kill(server.pid, SIGHUP), 0); /* another thread writes, too */
    read_all(fds[0]);
    assert_null(strstr(text, "lines of this log were lost"));
    serves();
    read_all(fds[0]);
    assert_non_null(strstr(text, "lines of this log were lost: nobody read them in time\n"));
    print_message("           full after %d clients\n", went);
    for (; went > 0; went--) { /* full again */
        dial(&links[0]);
        kvt_link_hang_up(&links[0]);
    }
    assert_int_equal(daemon_stop(&server), 0);
    close(fds[0]);
}

/* Standard descriptors that are closed are nobody's: not DRAM's, not a root's, not the log's. */
static void closed_standard_descriptors_are_not_taken(void **state)
{
    static struct tool_run run;
    char program[600];

    (void)state;
    daemon_init(&server, "");
    snprintf(program, sizeof(program), "%s", KVT_TOOL);
    snprintf(strrchr(program, '/'), 16, "/kvtierd");
    if (getenv("KVT_DAEMON") != NULL)
        snprintf(program, sizeof(program), "%s", getenv("KVT_DAEMON"));
    /* It is asked for the names of its descriptors while it runs, by who has its process id. */
    tool_run(&run, "/bin/sh",
             (const char *const[]){"sh", "-c",
                                   "\"$1\" --socket \"$2\" --dram 4MiB --disk \"$3:64MiB\" "
                                   "<&- >&- 2>&- & "
                                   "i=0; until [ -S \"$2\" ] || [ $i = 300 ]; do sleep 0.1; "
                                   "i=$((i + 1)); done; "
                                   "for fd in 0 1 2; do readlink /proc/$!/fd/$fd; done; "
                                   "kill $!; wait $!",
                                   "sh", program, server.socket, server.store, NULL},
             NULL, NULL);
    assert_string_equal(run.out, "/dev/null\n/dev/null\n/dev/null\n");
    assert_int_equal(run.code, 0);
}

/* ---- descriptors ----------------------------------------------------------------------------- */

/* Ticks of the processor that the daemon has had. */
static unsigned long ticks(void)
{
    char path[64], line[1024];
    unsigned long user = 0, system = 0;

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)server.pid);
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    assert_non_null(fgets(line, sizeof(line), file));
    (void)fclose(file);
    assert_int_equal(sscanf(strrchr(line, ')') + 1,
                            " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system),
                     2);
    return user + system;
}

static bool is_idle(void)
{
    const unsigned long before = ticks(), second = (unsigned long)sysconf(_SC_CLK_TCK);

    rig_sleep_ms(1000);
    return ticks() - before < second / 4;
}

static void begin_scarce(const char *options)
{
    daemon_init(&server, options);
    server.files = FILES;
    daemon_start(&server);
}

/* Programs that connect, until one is refused; how many are connected. */
static int take_all(char *why, size_t len)
{
    int rc = 0, count = 0;

    for (; count < LINKS; count++) {
        rc = dial_try(&links[count], why, len);
        if (rc != 0)
            break;
    }
    assert_true(count < LINKS);
    assert_int_equal(rc, KVT_E_LIMIT);
    return count;
}

static unsigned said_times(const char *what)
{
    FILE *log = fopen(server.log, "re");
    char line[2048];
    unsigned count = 0;

    assert_non_null(log);
    while (fgets(line, sizeof(line), log) != NULL)
        count += strstr(line, what) != NULL;
    (void)fclose(log);
    return count;
}

/* Who is refused learns why; who asks for numbers gets them; who let go makes room. */
static void without_descriptors_programs_are_told_why(void **state)
{
    char why[512] = "";

    (void)state;
    begin_scarce("--dram 16MiB");
    assert_true(daemon_said(&server, "descriptors: "));
    assert_true(daemon_said(&server, " of 127 programs can be connected"));
    int count = take_all(why, sizeof(why));
    print_message("           %d programs of %d descriptors\n", count, FILES);
    assert_non_null(strstr(why, "no descriptors left"));
    assert_non_null(strstr(why, "LimitNOFILE"));
    for (int i = 0; i < 4; i++) /* again and again */
        assert_int_equal(dial_try(&links[count], why, sizeof(why)), KVT_E_LIMIT);
    assert_int_equal(daemon_stat(&server, "daemon.clients"), count);
    assert_true(daemon_stat(&server, "daemon.refused_full") >= 5);
    assert_true(is_idle());
    assert_true(said_times("no descriptors left") + said_times("no descriptors are left") > 0);
    for (int i = 0; i < count; i++)
        kvt_link_hang_up(&links[i]);
    daemon_wait_stat(&server, "daemon.clients", 0, 10000);
    serves();
}

/* Connections that say nothing take the last ones, also those that were kept: the listening socket
 * stays readable, and is left alone until somebody has gone. */
static void silent_connections_do_not_make_it_go_round(void **state)
{
    enum { MORE = 64 };
    static int more[MORE];
    char why[512] = "";

    (void)state;
    begin_scarce("--dram 16MiB");
    int count = take_all(why, sizeof(why));
    /* it may have been said already, when the last one that was refused took what was left */
    const unsigned before = said_times("no descriptors are left");
    const int64_t start = rig_now_ns();
    for (int i = 0; i < MORE; i++)
        assert_int_equal(kvt_sock_connect(server.socket, 5000, &more[i]), 0);
    assert_true(is_idle());
    /* Once. But who says nothing for two seconds is let go: then there are some again, and it is
     * said anew when those are taken. */
    const unsigned said = said_times("no descriptors are left");
    assert_true(said >= 1 && said <= before + MORE);
    if (rig_now_ns() - start < KVT_HELLO_NS)
        assert_true(said <= before + 1);
    for (int i = 0; i < MORE; i++)
        close(more[i]);
    for (int i = 0; i < count; i++)
        kvt_link_hang_up(&links[i]);
    daemon_wait_stat(&server, "daemon.clients", 0, 20000);
    serves();
    assert_int_equal(daemon_stop(&server), 0);
}

/* Numbers are told, which is when they are wanted most; scrapers that say nothing cost no time. */
static void numbers_are_told_without_descriptors(void **state)
{
    static const char request[] = "GET /metrics HTTP/1.1\r\n\r\n";
    enum { MORE = 40 };
    int more[MORE];
    char why[512] = "";
    size_t used = 0;

    (void)state;
    text[0] = '\0';
    begin_scarce("--dram 16MiB --metrics 127.0.0.1:0");
    (void)take_all(why, sizeof(why));
    for (int i = 0; i < 30 && strstr(text, "200 OK") == NULL; i++) { /* it may be busy */
        int fd = daemon_scraper(&server);

        assert_int_equal(send(fd, request, strlen(request), MSG_NOSIGNAL), strlen(request));
        used = 0;
        for (ssize_t n; (n = recv(fd, text + used, sizeof(text) - 1 - used, 0)) > 0;)
            used += (size_t)n;
        text[used] = '\0';
        close(fd);
    }
    if (strstr(text, "200 OK") == NULL)
        fail_msg("%.200s", text);
    assert_non_null(strstr(text, "\nkvtier_daemon_log_lines_lost_total 0\n"));
    for (int i = 0; i < MORE; i++)
        more[i] = daemon_scraper(&server);
    assert_true(is_idle());
    for (int i = 0; i < MORE; i++)
        close(more[i]);
    assert_int_equal(daemon_stop(&server), 0);
}

/* Too few to serve anybody at all: not a daemon that says that it serves; and enough: one that is
 * ready says so, however few are left. */
static void a_limit_that_serves_nobody_is_said_at_the_start(void **state)
{
    (void)state;
    for (uint64_t files = 6; files <= 20; files++) {
        daemon_init(&server, "--dram 4MiB");
        server.files = files;
        int code = daemon_try(&server);
        if (code >= 0) { /* the loader of a sanitizer ends it before we can say a word */
            assert_true(code != 0);
            if (daemon_said(&server, "kvtierd: "))
                assert_true(daemon_said(&server, "descriptors are left") ||
                            daemon_said(&server, "LimitNOFILE"));
        } else {
            assert_true(daemon_said(&server, " of 127 programs can be connected"));
            assert_int_equal(daemon_stop(&server), 0);
        }
        daemon_free(&server);
    }
}

/* A question of any length has an answer in words. */
static void a_question_that_is_too_long_is_told_so(void **state)
{
    static char question[3000];
    char *answer = NULL, why[512];

    (void)state;
    daemon_init(&server, "--dram 4MiB");
    daemon_start(&server);
    memset(question, 'x', sizeof(question) - 1);
    assert_int_equal(kvt_link_ask(server.socket, question, &answer, why, sizeof(why)), 0);
    assert_string_equal(answer, "error: questions have at most 511 bytes\n");
    free(answer);
    question[100] = '\0';
    assert_int_equal(kvt_link_ask(server.socket, question, &answer, why, sizeof(why)), 0);
    assert_non_null(strstr(answer, "error: unknown question; known: "));
    free(answer);
}

static void the_defaults_are_no_reason_for_a_warning(void **state)
{
    (void)state;
    daemon_init(&server, "--dram 16MiB --fds-max 64");
    server.files = 2048;
    daemon_start(&server);
    assert_false(daemon_said(&server, "descriptors: "));
    assert_int_equal(daemon_stop(&server), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_log_that_nobody_reads_stops_nobody, tear_down),
        cmocka_unit_test_teardown(closed_standard_descriptors_are_not_taken, tear_down),
        cmocka_unit_test_teardown(without_descriptors_programs_are_told_why, tear_down),
        cmocka_unit_test_teardown(silent_connections_do_not_make_it_go_round, tear_down),
        cmocka_unit_test_teardown(numbers_are_told_without_descriptors, tear_down),
        cmocka_unit_test_teardown(a_limit_that_serves_nobody_is_said_at_the_start, tear_down),
        cmocka_unit_test_teardown(a_question_that_is_too_long_is_told_so, tear_down),
        cmocka_unit_test_teardown(the_defaults_are_no_reason_for_a_warning, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
