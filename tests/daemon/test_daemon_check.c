/* kvtierd --check: what would not come into force here and now.
 *
 * Goal:   what the start refuses, or goes on without, --check says in the same sentence, with exit
 *         code 1; a configuration that works is good, also beside a kvtierd that runs with it;
 *         nothing is made, changed or removed.
 * Method: each case is given to --check and to a start; the lines are compared.
 */
#include "support/rig.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/daemon_rig.h"
#include "support/fake_redis.h"
#include "support/loopback.h"
#include "support/redis_rig.h"
#include "support/run_tool.h"

static struct daemon server;
static struct tool_run run;

static int tear_down(void **state)
{
    (void)state;
    daemon_free(&server);
    return 0;
}

static void program_path(char *path, size_t len)
{
    snprintf(path, len, "%s", KVT_TOOL);
    assert_non_null(strrchr(path, '/'));
    snprintf(strrchr(path, '/'), len - strlen(path), "/kvtierd");
    if (getenv("KVT_DAEMON") != NULL)
        snprintf(path, len, "%s", getenv("KVT_DAEMON"));
}

/* --check of what a start of the daemon would be given. */
static void check(const struct daemon *daemon)
{
    char program[600], options[1024], *rest;
    const char *words[40] = {"kvtierd", "--check", "--socket", daemon->socket};
    size_t count = 4;

    program_path(program, sizeof(program));
    snprintf(options, sizeof(options), "%s", daemon->options);
    for (char *word = strtok_r(options, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        assert_true(count < 39);
        words[count++] = word;
    }
    words[count] = NULL;
    tool_run(&run, program, words, NULL, NULL);
}

/* The sentence of the first line, without the program's name. */
static const char *first_sentence(void)
{
    static char text[1024];
    const size_t name = strlen("kvtierd: ");

    assert_memory_equal(run.err, "kvtierd: ", name);
    snprintf(text, sizeof(text), "%.*s", (int)(strcspn(run.err, "\n") - name), run.err + name);
    return text;
}

/* --check says it, and the start says the same; stops: it also ends. */
static void both_say(const char *says, bool stops)
{
    check(&server);
    if (run.code != 1 || strstr(run.err, says) == NULL)
        fail_msg("%s: %d: %s%s", says, run.code, run.out, run.err);
    assert_null(strstr(run.out, "the configuration is good"));
    assert_non_null(strstr(run.err, "1 thing would not work here"));
    int code = daemon_try(&server);
    assert_int_equal(code, stops ? 1 : -1);
    if (!daemon_said(&server, first_sentence()))
        fail_msg("the start did not say: %s", first_sentence());
    if (!stops)
        assert_int_equal(daemon_stop(&server), 0);
}

static void memory_that_is_not_there(void **state)
{
    (void)state;
    daemon_init(&server, "--dram 60TiB");
    both_say("is more than the memory of this machine", true);
}

/* The limit counts the whole of it; nothing is touched to find that out. */
static void memory_that_may_not_be_locked(void **state)
{
    (void)state;
    daemon_init(&server, "--dram 64MiB --pin required");
    check(&server);
    if (run.code == 0) { /* it may be locked here: by root, or a high limit */
        assert_non_null(strstr(run.out, "the configuration is good"));
        return;
    }
    assert_non_null(strstr(run.err, "pin=required: 64MiB of DRAM cannot be pinned"));
    both_say("pin=required: ", true);
}

/* The same as another user under a limit, where that can be played. */
static void memory_that_another_user_may_not_lock(void **state)
{
    char program[600], socket[200];
    int fds[2], status;

    (void)state;
    if (geteuid() != 0) {
        print_message("not root: other users cannot be played\n");
        skip();
    }
    daemon_init(&server, "");
    assert_int_equal(chmod(server.dir, 0777), 0);
    program_path(program, sizeof(program));
    snprintf(socket, sizeof(socket), "%s", server.socket);
    assert_int_equal(pipe(fds), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        const struct rlimit limit = {65536, 65536};

        (void)dup2(fds[1], 2);
        (void)dup2(fds[1], 1);
        if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0 || setgid(65534) != 0 || setuid(65534) != 0)
            _exit(99);
        execl(program, "kvtierd", "--check", "--socket", socket, "--dram", "64MiB", "--pin",
              "required", NULL);
        _exit(98); /* this user may not reach the program */
    }
    close(fds[1]);
    size_t used = 0;
    for (ssize_t n; (n = read(fds[0], run.err + used, sizeof(run.err) - 1 - used)) > 0;)
        used += (size_t)n;
    run.err[used] = '\0';
    close(fds[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (WEXITSTATUS(status) == 98)
        skip();
    assert_int_equal(WEXITSTATUS(status), 1);
    assert_non_null(strstr(run.err, "RLIMIT_MEMLOCK) is 64KiB"));
    assert_non_null(strstr(run.err, "1 thing would not work here"));
}

static void places_where_no_socket_can_be(void **state)
{
    int fd;

    (void)state;
    daemon_init(&server, "--dram 4MiB");
    snprintf(server.socket, sizeof(server.socket), "%s/absent/s", server.dir);
    both_say("absent/s does not exist: create it first", true);
    snprintf(server.socket, sizeof(server.socket), "%s/file", server.dir);
    fd = open(server.socket, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_int_equal(write(fd, "precious", 8), 8);
    both_say("is there and is no socket: nothing was touched", true);
    snprintf(server.socket, sizeof(server.socket), "%s/other", server.dir);
    char lock[220];
    struct stat st;
    snprintf(lock, sizeof(lock), "%s.lock", server.socket);
    assert_int_equal(symlink("file", lock), 0);
    both_say("is no lock of kvtierd's", true);
    assert_int_equal(fstat(fd, &st), 0);
    assert_int_equal(st.st_size, 8);
    close(fd);
}

static void roots_that_cannot_be(void **state)
{
    char options[400];

    (void)state;
    daemon_init(&server, "");
    snprintf(options, sizeof(options), "--dram 4MiB --disk %s/absent/root:64MiB", server.dir);
    snprintf(server.options, sizeof(server.options), "%s", options);
    both_say("its parent directory does not exist", false);
    snprintf(server.options, sizeof(server.options), "%s --disk-required yes", options);
    both_say("its parent directory does not exist", true);
}

/* ---- the shared tier's server ---- */

static void remote_begin(const char *url, const char *more)
{
    char options[700];

    snprintf(options, sizeof(options), "--dram 4MiB --fds-max 64 --remote %s%s", url, more);
    daemon_init(&server, options);
}

/* What answers is told, and what is in the way, with the remedy; asked for by nobody --offline. */
static void a_server_is_asked(void **state)
{
    static struct redis_rig redis;
    char url[128], out[64];

    (void)state;
    if (!redis_rig_able())
        return;
    redis_rig_start(&redis, "");
    redis_rig_url(&redis, url, sizeof(url));
    remote_begin(url, "");
    check(&server);
    if (run.code != 0 || !strstr(run.out, " answers: Redis ") || !strstr(run.out, "one server"))
        fail_msg("%d: %s%s", run.code, run.out, run.err);
    assert_int_equal(redis_rig_number(&redis, 0, "DBSIZE"), 0); /* nothing was put */
    redis_rig_cli(&redis, 0, "CONFIG SET requirepass first", out, sizeof(out));
    check(&server);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "NOAUTH"));
    assert_non_null(strstr(run.err, "set remote_auth=FILE"));
    daemon_free(&server);
    redis_rig_stop(&redis);
    remote_begin(url, "");
    check(&server);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "Connection refused"));
    daemon_free(&server);
    remote_begin(url, " --offline");
    check(&server);
    assert_int_equal(run.code, 0);
    assert_null(strstr(run.out, "answers"));
}

/* A user who may not ask what it is, or another kind of server. */
static void answer_little(void *ctx, unsigned at, const char *words, char *out, size_t len)
{
    const char *info = ctx;

    (void)at;
    if (strncmp(words, "PING", 4) == 0)
        snprintf(out, len, "+PONG\r\n");
    else if (strncmp(words, "INFO server", 11) == 0 && info[0])
        snprintf(out, len, "$%zu\r\n%s\r\n", strlen(info), info);
    else if (strncmp(words, "INFO", 4) == 0)
        snprintf(out, len, "-NOPERM this user has no permissions to run the 'info' command\r\n");
    else if (strncmp(words, "GETRANGE", 8) == 0)
        snprintf(out, len, "$0\r\n\r\n");
    else
        snprintf(out, len, "-ERR This instance has cluster support disabled\r\n");
}

static void servers_that_tell_little_or_other_things(void **state)
{
    static char infos[][200] = {
        "",
        "# Server\r\nredis_version:7.2.4\r\nvalkey_version:8.0.1\r\nredis_mode:standalone\r\n",
        "# Server\r\nxredis_version:1\r\n",
    };
    static const char *const says[] = {"it does not tell what it is", "Valkey 8.0.1, one server",
                                       "it does not tell what it is"};
    char url[64];

    (void)state;
    for (size_t i = 0; i < sizeof(says) / sizeof(says[0]); i++) {
        struct fake_redis *fake = fake_redis_start(1, answer_little, infos[i]);

        snprintf(url, sizeof(url), "redis://127.0.0.1:%d", fake_redis_port(fake, 0));
        remote_begin(url, "");
        check(&server);
        if (run.code != 0 || !strstr(run.out, says[i]))
            fail_msg("%zu: %d: %s%s", i, run.code, run.out, run.err);
        daemon_free(&server);
        fake_redis_stop(fake);
    }
}

/* It takes connections, and that is all: the check ends. */
static void a_server_that_says_nothing(void **state)
{
    int port, fd = loopback_bind(&port);
    char url[64];

    (void)state;
    assert_int_equal(listen(fd, 16), 0);
    snprintf(url, sizeof(url), "redis://127.0.0.1:%d", port);
    remote_begin(url, "");
    check(&server);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, url));
    close(fd);
}

static void offline_is_of_a_check(void **state)
{
    char program[600];

    (void)state;
    program_path(program, sizeof(program));
    tool_run(&run, program, (const char *const[]){"kvtierd", "--offline", NULL}, NULL, NULL);
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "--offline is for --check"));
}

/* Files that options of the shared tier name, and its directory. */
static void a_shared_tier_that_cannot_be(void **state)
{
    static const char *const cases[][2] = {
        {"--remote redis://127.0.0.1:1 --remote-auth {store}/nope", "remote_auth: "},
        {"--remote redis://127.0.0.1:1 --remote-mac {store}/nope", "remote_mac: "},
        {"--remote dir:{store}/nope", "must be there"},
        {"--remote rediss://127.0.0.1:1 --remote-ca {store}/nope", "remote_ca: "},
    };
    char options[600], shared[128];
    struct stat st;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        snprintf(options, sizeof(options), "--dram 4MiB --fds-max 64 %s", cases[i][0]);
        daemon_init(&server, options);
        both_say(cases[i][1], true);
        daemon_free(&server);
    }
    rig_dir_make(shared, sizeof(shared));
    snprintf(options, sizeof(options), "--dram 4MiB --fds-max 64 --remote dir:%s", shared);
    daemon_init(&server, options);
    check(&server);
    assert_int_equal(run.code, 0);
    snprintf(options, sizeof(options), "%s/kvt0", shared);
    assert_int_equal(stat(options, &st), -1); /* nothing was made */
    daemon_free(&server);
    rig_dir_remove(shared);
    daemon_init(&server, "--dram 4MiB --fds-max 64 --remote-ttl 3s");
    check(&server);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.err, "no effect"));
}

/* Too few descriptors for any program; for some of them only, which is worth knowing. */
static void descriptors_that_are_too_few(void **state)
{
    char program[600];

    (void)state;
    daemon_init(&server, "");
    program_path(program, sizeof(program));
    for (int i = 0; i < 2; i++) {
        tool_run(&run, "/bin/sh",
                 (const char *const[]){"sh", "-c",
                                       "ulimit -n \"$1\"; exec \"$2\" --check --socket \"$3\" "
                                       "--dram 4MiB --fds-max 32",
                                       "sh", i ? "256" : "40", program, server.socket, NULL},
                 NULL, NULL);
        assert_int_equal(run.code, i ? 0 : 1);
        assert_non_null(strstr(i ? run.out : run.err, "of 127 programs can be connected"));
    }
}

static void addresses_that_are_taken(void **state)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    (void)state;
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof(at)), 0);
    assert_int_equal(listen(fd, 1), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&at, &len), 0);
    daemon_init(&server, "");
    snprintf(server.options, sizeof(server.options), "--dram 4MiB --metrics 127.0.0.1:%u",
             ntohs(at.sin_port));
    both_say("metrics: cannot listen at 127.0.0.1:", false);
    snprintf(server.options, sizeof(server.options), "--dram 4MiB --metrics localhost:1");
    both_say("not a numeric address", false);
    close(fd);
}

/* The configuration of a kvtierd that runs is good, whatever it holds; nothing is left behind. */
static void a_running_kvtierd_is_no_problem(void **state)
{
    struct stat st;

    (void)state;
    daemon_init(&server, "--dram 4MiB --disk {store}:64MiB --metrics 127.0.0.1:0 --fds-max 64");
    check(&server);
    assert_int_equal(run.code, 0);
    assert_string_equal(run.out, "the configuration is good\n");
    assert_string_equal(run.err, "");
    assert_int_equal(stat(server.store, &st), -1);
    assert_int_equal(stat(server.socket, &st), -1);
    daemon_start(&server);
    check(&server);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "note: somebody listens at "));
    assert_non_null(strstr(run.out, "is in use by process"));
    assert_non_null(strstr(run.out, "the configuration is good\n"));
    assert_int_equal(daemon_stat(&server, "daemon.bad_hello"), 0);
    assert_int_equal(daemon_stop(&server), 0);
    daemon_start(&server);
    daemon_kill(&server); /* its socket is stale, and may be replaced */
    check(&server);
    assert_int_equal(run.code, 0);
    assert_string_equal(run.out, "the configuration is good\n");
    assert_int_equal(stat(server.socket, &st), 0); /* by a start, not by us */
}

static void what_is_wrong_is_another_code(void **state)
{
    (void)state;
    daemon_init(&server, "--drum 4MiB");
    check(&server);
    assert_int_equal(run.code, 2);
    daemon_free(&server);
    daemon_init(&server, "--dram 4MiB --socket-mode 0666");
    check(&server);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.err, "allow_uid names nobody"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(memory_that_is_not_there, tear_down),
        cmocka_unit_test_teardown(memory_that_may_not_be_locked, tear_down),
        cmocka_unit_test_teardown(memory_that_another_user_may_not_lock, tear_down),
        cmocka_unit_test_teardown(places_where_no_socket_can_be, tear_down),
        cmocka_unit_test_teardown(roots_that_cannot_be, tear_down),
        cmocka_unit_test_teardown(a_shared_tier_that_cannot_be, tear_down),
        cmocka_unit_test_teardown(a_server_is_asked, tear_down),
        cmocka_unit_test_teardown(servers_that_tell_little_or_other_things, tear_down),
        cmocka_unit_test_teardown(a_server_that_says_nothing, tear_down),
        cmocka_unit_test(offline_is_of_a_check),
        cmocka_unit_test_teardown(descriptors_that_are_too_few, tear_down),
        cmocka_unit_test_teardown(addresses_that_are_taken, tear_down),
        cmocka_unit_test_teardown(a_running_kvtierd_is_no_problem, tear_down),
        cmocka_unit_test_teardown(what_is_wrong_is_another_code, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
