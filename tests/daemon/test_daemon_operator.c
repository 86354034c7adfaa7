/* What an operator meets of kvtierd: numbers for Prometheus, a socket that systemd has made, the
 * man page, units, roots and flush as a client sees them, and programs that break off and live on.
 *
 * Goal:   everything docs/daemon.md promises about these; the exposition passes a strict parser.
 * Method: real daemons; the parser is prom_check.py (its own test runs first); sockets are passed
 *         as sd_listen_fds(3) says, and by systemd-socket-activate where there is one.
 */
#include "support/rig.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/sock.h"
#include "client/link.h"
#include "format/message.h"
#include "store/counters.h"
#include "support/daemon_rig.h"
#include "support/run_tool.h"

enum { BLOCKS = 24 };

static struct daemon server, second;
static struct rig rig;
static struct tool_run run;

static int tear_down(void **state)
{
    (void)state;
    rig_close(&rig);
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    daemon_free(&second);
    daemon_free(&server);
    return 0;
}

static void engine_open(const struct daemon *daemon)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);

    rig_init(&rig, &shape, daemon->config, NULL);
    rig_open(&rig);
}

static void begin(const char *options)
{
    daemon_init(&server, options);
    daemon_start(&server);
}

/* Run a shell command with $1 and $2; what it says is in `run`. */
static void shell(const char *command, const char *first, const char *more)
{
    tool_run(&run, "/bin/sh",
             (const char *const[]){"sh", "-c", command, "sh", first, more ? more : "", NULL}, NULL,
             NULL);
}

static void daemon_program(char *path, size_t len)
{
    const char *given = getenv("KVT_DAEMON");
    ssize_t n = readlink("/proc/self/exe", path, len - sizeof("/kvtierd"));

    assert_true(n > 0);
    path[n] = '\0';
    *strrchr(path, '/') = '\0'; /* build/tests */
    *strrchr(path, '/') = '\0';
    memcpy(path + strlen(path), "/kvtierd", sizeof("/kvtierd"));
    if (given != NULL)
        snprintf(path, len, "%s", given);
}

/* ---- metrics -------------------------------------------------------------------------------- */

/* One request; the whole answer. */
static void http(const char *request, char *out, size_t len)
{
    int fd = daemon_scraper(&server);
    size_t used = 0;

    assert_int_equal(send(fd, request, strlen(request), MSG_NOSIGNAL), strlen(request));
    for (ssize_t n; used + 1 < len && (n = recv(fd, out + used, len - 1 - used, 0)) > 0;)
        used += (size_t)n;
    out[used] = '\0';
    close(fd);
}

/* The body passes the strict parser; skipped, and said, where there is no Python. */
static void check_strictly(const char *body)
{
    char file[200];

    snprintf(file, sizeof(file), "%s/metrics", server.dir);
    FILE *out = fopen(file, "we");
    assert_non_null(out);
    assert_true(fputs(body, out) >= 0);
    assert_int_equal(fclose(out), 0);
    shell("command -v python3 >/dev/null || exit 0; python3 \"$1\" --selftest && python3 \"$1\" "
          "\"$2\"",
          KVT_DAEMON_TESTS "/prom_check.py", file);
    if (run.code != 0)
        fail_msg("%s%s", run.out, run.err);
    print_message("           %s", run.out[0] ? run.out : "no python3: not parsed\n");
}

static const char *scrape(void)
{
    static char text[1 << 19];
    char *body;

    http("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", text, sizeof(text));
    assert_non_null(strstr(text, "HTTP/1.1 200 OK"));
    body = strstr(text, "\r\n\r\n");
    assert_non_null(body);
    return body + 4;
}

/* The value of a sample, named with its labels. */
static double sample(const char *body, const char *name)
{
    char line[256];

    snprintf(line, sizeof(line), "\n%s ", name);
    const char *at = strstr(body, line);
    if (at == NULL)
        fail_msg("%s is not there", name);
    return strtod(at + strlen(line), NULL);
}

static void metrics_are_told_to_prometheus(void **state)
{
    static char text[1 << 16];
    const char *body;

    (void)state;
    begin("--dram 16MiB --disk {store}:64MiB --metrics 127.0.0.1:0");
    check_strictly(scrape()); /* of a store that nothing has happened in */
    engine_open(&server);
    rig_close(&rig);
    rig.identity.model = "a \"model\" \\ of\nours";
    rig_open(&rig);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(kvt_flush(rig.cache), 0);
    assert_int_equal(rig_lookup(&rig, 1, BLOCKS), BLOCKS);
    assert_int_equal(rig_lookup(&rig, 1000, BLOCKS), 0);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
    assert_int_equal(rig_load(&rig, 1000, BLOCKS, NULL), 0);
    body = scrape();
    check_strictly(body);
    assert_int_equal(sample(body, "kvtier_commits_total{outcome=\"ok\"}"), BLOCKS);
    assert_int_equal(sample(body, "kvtier_dram_blocks"), BLOCKS);
    assert_int_equal(sample(body, "kvtier_daemon_clients"), 1);
    assert_int_equal(sample(body, "kvtier_daemon_clients_ended_total{reason=\"left\"}"), 1);
    assert_int_equal(sample(body, "kvtier_lookup_keys_total"), 2 * BLOCKS);
    assert_int_equal(sample(body, "kvtier_lookup_hits_total{tier=\"dram\"}"), BLOCKS);
    assert_int_equal(sample(body, "kvtier_lookup_runs_ended_total{reason=\"absent\"}"), 1);
    assert_int_equal(sample(body, "kvtier_load_blocks_total{tier=\"dram\",outcome=\"granted\"}"),
                     BLOCKS);
    assert_int_equal(sample(body, "kvtier_load_blocks_total{tier=\"none\",outcome=\"miss\"}"),
                     BLOCKS);
    assert_int_equal(sample(body, "kvtier_op_seconds_count{op=\"load\",tier=\"dram\"}"), BLOCKS);
    assert_int_equal(sample(body, "kvtier_op_seconds_count{op=\"lookup\",tier=\"index\"}"), 2);
    assert_true(sample(body, "kvtier_op_seconds_count{op=\"write\",tier=\"disk\"}") >= 1);
    assert_true(sample(body, "kvtier_op_seconds_sum{op=\"write\",tier=\"disk\"}") > 0);
    assert_int_equal(sample(body, "kvtier_op_bytes_count{op=\"store\",tier=\"dram\"}"), BLOCKS);
    assert_int_equal(sample(body, "kvtier_op_bytes_sum{op=\"store\",tier=\"dram\"}"),
                     BLOCKS * 12288);
    assert_int_equal(sample(body, "kvtier_op_bytes_bucket{op=\"load\",tier=\"dram\",le=\"8192\"}"),
                     0);
    assert_int_equal(sample(body, "kvtier_op_bytes_bucket{op=\"load\",tier=\"dram\",le=\"16384\"}"),
                     BLOCKS);
    assert_non_null(strstr(body, "kvtier_root_up{root=\"0\","));
    assert_non_null(strstr(body, "rank=\"0\",tier=\"dram\"} 294912\n"));
    http("GET /other HTTP/1.1\r\n\r\n", text, sizeof(text));
    assert_non_null(strstr(text, "404"));
    http("POST /metrics HTTP/1.1\r\n\r\n", text, sizeof(text));
    assert_non_null(strstr(text, "405"));
}

/* True: a scrape was answered before a peer that says nothing, there before it, was given up. */
static bool answered_first(const char *words)
{
    static const char get[] = "GET /metrics HTTP/1.1\r\n\r\n";
    struct pollfd fds[2] = {{.fd = daemon_scraper(&server), .events = POLLIN}};

    assert_true(send(fds[0].fd, words, strlen(words), MSG_NOSIGNAL) >= 0);
    fds[1] = (struct pollfd){.fd = daemon_scraper(&server), .events = POLLIN};
    assert_int_equal(send(fds[1].fd, get, strlen(get), MSG_NOSIGNAL), strlen(get));
    assert_true(poll(fds, 2, 60000) > 0);
    close(fds[0].fd);
    close(fds[1].fd);
    return fds[0].revents == 0;
}

/* Peers that say nothing or half a line take nobody's turn (on a machine that stands still for
 * seconds: in one of several tries); more of them than there are places push each other out. */
static void scrapers_do_not_wait_for_those_who_say_nothing(void **state)
{
    int silent[60], tries = 0;

    (void)state;
    begin("--dram 16MiB --metrics 127.0.0.1:0");
    while (!answered_first(tries % 2 ? "GET /me" : "") && tries < 5)
        tries++;
    assert_true(tries < 5);
    for (size_t i = 0; i < 60; i++)
        silent[i] = daemon_scraper(&server);
    (void)scrape();
    for (size_t i = 0; i < 60; i++)
        close(silent[i]);
}

static void requests_of_other_kinds_are_answered(void **state)
{
    static char request[80000], text[1 << 17];

    (void)state;
    begin("--dram 16MiB --metrics 127.0.0.1:0");
    http("HEAD /metrics HTTP/1.1\r\n\r\n", text, sizeof(text));
    assert_non_null(strstr(text, "200 OK"));
    assert_string_equal(strstr(text, "\r\n\r\n"), "\r\n\r\n");
    int n =
        snprintf(request, sizeof(request), "GET /metrics HTTP/1.1\r\nCookie: %020000d\r\n\r\n", 0);
    assert_true(n > 20000 && (size_t)n < sizeof(request));
    http(request, text, sizeof(text));
    assert_non_null(strstr(text, "200 OK"));
    memset(request, 'x', 70000);
    request[70000] = '\0';
    http(request, text, sizeof(text));
    assert_non_null(strstr(text, "431"));
}

/* What was read from disk is told apart, also after a restart. */
static void reads_from_disk_have_their_own_times(void **state)
{
    const char *body;

    (void)state;
    begin("--dram 16MiB --disk {store}:64MiB --metrics 127.0.0.1:0");
    engine_open(&server);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig_close(&rig);
    assert_int_equal(daemon_stop(&server), 0);
    daemon_start(&server);
    rig_open(&rig);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
    body = scrape();
    check_strictly(body);
    assert_int_equal(sample(body, "kvtier_op_seconds_count{op=\"load\",tier=\"disk\"}"), BLOCKS);
    assert_int_equal(sample(body, "kvtier_op_seconds_count{op=\"load\",tier=\"dram\"}"), 0);
    assert_int_equal(sample(body, "kvtier_op_seconds_count{op=\"read\",tier=\"disk\"}"), BLOCKS);
    assert_true(sample(body, "kvtier_op_seconds_sum{op=\"load\",tier=\"disk\"}") > 0);
    assert_int_equal(sample(body, "kvtier_op_bytes_sum{op=\"read\",tier=\"disk\"}"),
                     BLOCKS * 12288);
}

static void by_default_nobody_listens_for_scrapers(void **state)
{
    (void)state;
    begin("--dram 16MiB");
    assert_false(daemon_said(&server, "metrics"));
}

static void metrics_for_other_machines_are_warned_about(void **state)
{
    (void)state;
    begin("--dram 16MiB --metrics 0.0.0.0:0");
    assert_true(daemon_said(&server, "open to other machines"));
    daemon_free(&server);
    begin("--dram 16MiB --metrics 127.0.0.9:0");
    assert_false(daemon_said(&server, "open to other machines"));
}

/* ---- systemd -------------------------------------------------------------------------------- */

static int socket_made(int type, const char *path)
{
    struct sockaddr_un address;
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);

    assert_true(fd >= 0);
    assert_int_equal(kvt_sock_address(path, &address), 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(fd, 16), 0);
    return fd;
}

/* A socket that somebody else has made is served, also for the metrics, and stays when the daemon
 * ends: who waits there meanwhile is served by the next one. */
static void a_passed_socket_is_served_and_left_alone(void **state)
{
    char path[sizeof(server.socket)], own[200];
    struct stat st;

    (void)state;
    daemon_init(&server, "--dram 16MiB --metrics 127.0.0.1:0 --socket-mode 0660 --allow-uid 65534");
    snprintf(path, sizeof(path), "%s/made", server.dir);
    snprintf(own, sizeof(own), "%s", server.socket);
    server.passed_fd = socket_made(SOCK_SEQPACKET, path);
    assert_int_equal(chmod(path, 0600), 0);
    daemon_start(&server);
    assert_true(daemon_said(&server, "socket_mode has no effect on a socket that was passed"));
    assert_true(daemon_said(&server, "unit 0600 keeps them from the socket"));
    assert_int_equal(access(own, F_OK), -1); /* --socket is not made beside it */
    assert_true(daemon_said(&server, "/made"));
    snprintf(server.socket, sizeof(server.socket), "%s", path);
    snprintf(server.config, sizeof(server.config), "unix:%s", path);
    engine_open(&server);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(sample(scrape(), "kvtier_daemon_clients"), 1);
    rig_close(&rig);
    assert_int_equal(daemon_stop(&server), 0);
    assert_int_equal(stat(path, &st), 0);
    assert_true(S_ISSOCK(st.st_mode));
    daemon_start(&server); /* the same socket once more: what systemd does at a restart */
    rig_open(&rig);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    close(server.passed_fd);
    server.passed_fd = 0;
}

static void a_passed_socket_of_another_kind_is_refused(void **state)
{
    char path[sizeof(server.socket)];

    (void)state;
    daemon_init(&server, "--dram 16MiB");
    snprintf(path, sizeof(path), "%s/made", server.dir);
    server.passed_fd = socket_made(SOCK_STREAM, path);
    assert_int_equal(daemon_try(&server), 1);
    assert_true(daemon_said(&server, "ListenSequentialPacket="));
    close(server.passed_fd);
    assert_int_equal(unlink(path), 0);
    server.passed_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    assert_int_equal(daemon_try(&server), 1);
    close(server.passed_fd);
    server.passed_fd = 0;
}

/* systemd's own side of the protocol, where it is installed: the first connection starts us. */
static void systemd_socket_activate_starts_it(void **state)
{
    char program[600], socket[200], why[512], *text = NULL;
    int status, rc = -1;

    (void)state;
    shell("command -v systemd-socket-activate", "", NULL);
    if (run.code != 0) {
        print_message("           no systemd-socket-activate\n");
        skip();
    }
    daemon_init(&server, "");
    daemon_program(program, sizeof(program));
    snprintf(socket, sizeof(socket), "%s/activated", server.dir);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)freopen("/dev/null", "w", stderr);
        execlp("systemd-socket-activate", "systemd-socket-activate", "--seqpacket", "-l", socket,
               program, "--dram", "16MiB", (char *)NULL);
        _exit(127);
    }
    for (int i = 0; i < 1000 && rc != 0; i++) {
        rc = kvt_link_ask(socket, "stat", &text, why, sizeof(why));
        rig_sleep_ms(20);
    }
    if (rc != 0)
        fail_msg("%s", why);
    assert_non_null(strstr(text, "daemon.version"));
    free(text);
    assert_int_equal(kill(pid, SIGTERM), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* The units as they are installed, below a root directory of their own. */
static void units_are_what_systemd_takes(void **state)
{
    char program[600];

    (void)state;
    shell("command -v systemd-analyze", "", NULL);
    if (run.code != 0) {
        print_message("           no systemd-analyze\n");
        skip();
    }
    daemon_init(&server, "");
    daemon_program(program, sizeof(program));
    *strrchr(program, '/') = '\0';
    shell("cd \"$1\" && sed \"s|@KVT_BIN_DIR@|$2|\" " KVT_DAEMON_TESTS
          "/../../share/kvtierd/kvtierd.service >kvtierd.service && cp " KVT_DAEMON_TESTS
          "/../../share/kvtierd/kvtierd.socket . && "
          "systemd-analyze verify --man=no --recursive-errors=no ./kvtierd.service "
          "./kvtierd.socket 2>&1",
          server.dir, program);
    if (run.code != 0 || strstr(run.out, "kvtierd") != NULL)
        fail_msg("%d: %s", run.code, run.out);
}

/* ---- the man page ---------------------------------------------------------------------------- */

/* There is one shared tier: the second one does not win in silence. */
static void one_shared_tier_is_given(void **state)
{
    char program[600];

    (void)state;
    daemon_program(program, sizeof(program));
    tool_run(&run, program,
             (const char *const[]){"kvtierd", "--check", "--remote", "redis://a", "--remote",
                                   "redis://b", NULL},
             NULL, NULL);
    assert_int_not_equal(run.code, 0);
    assert_non_null(strstr(run.err, "given twice"));
    tool_run(&run, program,
             (const char *const[]){"kvtierd", "--check", "--offline", "--remote", "redis://a+b",
                                   "--remote-ns-cap", "1GiB", NULL},
             NULL, NULL);
    assert_int_equal(run.code, 0);
}

static void the_man_page_has_all_that_help_has(void **state)
{
    static char page[sizeof(run.out)];
    char program[600], key[64], line[80];
    unsigned keys = 0;

    (void)state;
    daemon_program(program, sizeof(program));
    tool_run(&run, program, (const char *const[]){"kvtierd", "--man", NULL}, NULL, NULL);
    assert_int_equal(run.code, 0);
    memcpy(page, run.out, sizeof(page));
    assert_memory_equal(page, ".TH KVTIERD 8 \"20", 17);
    assert_non_null(strstr(page, "SIGHUP"));
    tool_run(&run, program, (const char *const[]){"kvtierd", "--help", NULL}, NULL, NULL);
    assert_int_equal(run.code, 0);
    for (const char *at = strstr(run.out, "\n  --"); at != NULL; at = strstr(at + 1, "\n  --")) {
        assert_int_equal(
            sscanf(at, "\n  --%63[a-z_]", key) == 1 || strncmp(at, "\n  --KEY", 8) == 0, 1);
        snprintf(line, sizeof(line), "%s\n", key);
        if (strncmp(at, "\n  --KEY", 8) != 0 && strstr(page, line) == NULL &&
            strstr(page, key) == NULL)
            fail_msg("%s is not in the man page", key);
        keys++;
    }
    assert_true(keys > 30);
    shell("command -v mandoc >/dev/null || exit 0; "
          "\"$1\" --man | mandoc -T lint -W warning | grep -v 'missing date'; true",
          program, NULL);
    if (run.out[0] || run.err[0])
        fail_msg("%s%s", run.out, run.err);
}

/* ---- what a client sees ---------------------------------------------------------------------- */

static void a_client_lists_the_roots_of_the_daemon(void **state)
{
    char text[512];

    (void)state;
    begin("--dram 16MiB --disk {store}:64MiB --disk {store}2:32MiB");
    engine_open(&server);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig_stat_text(&rig, "disk.0.path", text, sizeof(text));
    assert_string_equal(text, server.store);
    rig_stat_text(&rig, "disk.1.state", text, sizeof(text));
    assert_string_equal(text, "ok");
    rig_stat_text(&rig, "disk.state", text, sizeof(text));
    assert_string_equal(text, "ok");
    rig_stat_text(&rig, "disk.0.backend", text, sizeof(text));
    assert_true(text[0] != '\0' && strcmp(text, "none") != 0);
    assert_int_equal(rig_stat(&rig, "disk.0.cap_bytes"), 64u << 20);
    assert_int_equal(rig_stat(&rig, "disk.1.cap_bytes"), 32u << 20);
    assert_true(rig_stat(&rig, "disk.0.bytes_used") + rig_stat(&rig, "disk.1.bytes_used") > 0);
    assert_int_equal(rig_stat(&rig, "disk.1.read_fail"), 0);
    snprintf(text, sizeof(text), "%s2", server.store);
    rig_close(&rig);
    assert_int_equal(daemon_stop(&server), 0);
    rig_dir_remove(text);
}

/* A flush that wrote nothing says so, whoever owns the store. */
static void a_flush_over_a_daemon_without_its_disk_says_why(void **state)
{
    char text[600];

    (void)state;
    begin("--dram 16MiB --disk {store}:64MiB");
    daemon_init(&second, "");
    snprintf(second.options, sizeof(second.options), "%s", server.options);
    daemon_start(&second); /* waits for the root that the first one holds */
    engine_open(&second);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(kvt_flush(rig.cache), KVT_E_LOCKED);
    rig_stat_text(&rig, "disk.state", text, sizeof(text));
    assert_non_null(strstr(text, "in use by process"));
    assert_int_equal(daemon_stop(&server), 0);
    daemon_wait_stat(&second, "disk.roots", 1, 10000);
    assert_int_equal(kvt_flush(rig.cache), 0);
    for (int i = 0; i < 1000 && strcmp(text, "ok") != 0; i++) { /* the text comes a little later */
        rig_sleep_ms(10);
        rig_stat_text(&rig, "disk.state", text, sizeof(text));
    }
    assert_string_equal(text, "ok");
}

static uint64_t stat_of(struct kvt_cache *cache, const char *name)
{
    uint64_t value = UINT64_MAX;

    assert_int_equal(kvt_stats_get(cache, name, &value), 0);
    return value;
}

/* One text is enough to open a cache, over a daemon and without one. */
static void a_cache_opens_by_one_text(void **state)
{
    char where[240], error[512];
    struct kvt_cache *cache = NULL;

    (void)state;
    begin("--dram 16MiB");
    snprintf(where, sizeof(where), "unix:%s", server.socket);
    assert_int_equal(kvt_open_at(where, &cache, error, sizeof(error)), 0);
    assert_string_equal(error, "");
    assert_int_equal(daemon_stat(&server, "daemon.clients"), 1);
    assert_int_equal(stat_of(cache, "dram.bytes_max"), 16u << 20);
    kvt_close(cache);
    snprintf(where, sizeof(where), " unix:%s , spin=50us", server.socket);
    assert_int_equal(kvt_open_at(where, &cache, NULL, 0), 0);
    assert_int_equal(daemon_stat(&server, "daemon.clients"), 1);
    kvt_close(cache);
    assert_int_equal(kvt_open_at("dram=8MiB", &cache, error, sizeof(error)), 0);
    assert_int_equal(stat_of(cache, "dram.bytes_max"), 8u << 20);
    kvt_close(cache);
    assert_int_equal(kvt_open_at(NULL, &cache, error, sizeof(error)), 0);
    kvt_close(cache);
    assert_int_equal(kvt_open_at("unix:", &cache, error, sizeof(error)), KVT_E_CONFIG_VALUE);
    assert_non_null(strstr(error, "unix:/path"));
    assert_int_equal(kvt_open_at("drum=8MiB", &cache, error, sizeof(error)), KVT_E_CONFIG_KEY);
    assert_non_null(strstr(error, "dram"));
    assert_int_equal(kvt_open_at("unix:/nonexistent/x", &cache, error, sizeof(error)), 0);
    assert_non_null(strstr(error, "no kvtierd at /nonexistent/x"));
    kvt_close(cache);
}

/* What the daemon tells programs that pin its memory: whether they are to make huge pages first. */
static bool huge_wanted(void)
{
    struct kvt_link link;
    char text[512];

    kvt_link_init(&link, server.socket);
    assert_int_equal(kvt_link_dial(&link, text, sizeof(text)), 0);
    const bool wanted = link.memory.huge;
    kvt_link_hang_up(&link);
    return wanted;
}

/* Huge pages come in the background, under blocks that are stored and loaded meanwhile; a kernel
 * that has none leaves a line in the log. */
static void shared_memory_gets_huge_pages(void **state)
{
    uint64_t huge = 0;

    (void)state;
    begin("--dram 96MiB");
    engine_open(&server);
    for (uint64_t i = 0; i < 2000 && huge < 96u << 20 && !daemon_said(&server, "huge pages:");
         i++) {
        const uint64_t first = 1 + i % 200 * BLOCKS; /* they fit into DRAM */

        assert_int_equal(rig_store(&rig, first, BLOCKS, 0, NULL), BLOCKS);
        assert_int_equal(rig_load(&rig, first, BLOCKS, NULL), BLOCKS);
        huge = daemon_stat(&server, "dram.huge_bytes");
    }
    print_message("           %llu of 96 MiB\n", (unsigned long long)huge >> 20);
    assert_true(huge > 0 || daemon_said(&server, "huge pages:"));
    assert_int_equal(huge % (2u << 20), 0);
    assert_true(huge_wanted());
    rig_close(&rig);
    assert_int_equal(daemon_stop(&server), 0);
    snprintf(server.options, sizeof(server.options), "--dram 96MiB --huge-pages off");
    daemon_start(&server);
    rig_open(&rig);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(daemon_stat(&server, "dram.huge_bytes"), 0);
    assert_false(huge_wanted());
}

/* ---- programs that break off and live on ----------------------------------------------------- */

static void wait_broken(uint64_t count)
{
    daemon_wait_stat(&server, "daemon.clients_broken", count, 10000);
}

/* Connect, and write a frame that is no message. */
static void link_break(struct kvt_link *link)
{
    struct kvt_channel channel = {0};
    char text[512];

    kvt_link_init(link, server.socket);
    assert_int_equal(kvt_link_dial(link, text, sizeof(text)), 0);
    assert_int_equal(kvt_channel_attach(&channel, &link->wire), 0);
    struct kvt_msg *msg = kvt_ring_reserve(&channel.requests, sizeof(*msg));
    assert_non_null(msg);
    memset(msg, 0, sizeof(*msg));
    msg->bytes = 4096;
    kvt_ring_push(&channel.requests, sizeof(*msg));
}

/* They cost no place of others, and their process gets no third one before it has let go. */
static void a_client_that_broke_off_frees_its_place(void **state)
{
    struct kvt_link broken[2], third;
    char text[512];

    (void)state;
    begin("--dram 16MiB");
    for (uint64_t i = 0; i < 2; i++) {
        link_break(&broken[i]);
        wait_broken(i + 1);
    }
    kvt_link_init(&third, server.socket);
    assert_int_equal(kvt_link_dial(&third, text, sizeof(text)), KVT_E_LIMIT);
    assert_non_null(strstr(text, "end the process"));
    assert_int_equal(daemon_stat(&server, "daemon.clients"), 2);
    kvt_link_hang_up(&broken[0]); /* says BYE: it will write no byte more */
    daemon_wait_stat(&server, "daemon.clients", 1, 10000);
    assert_int_equal(kvt_link_dial(&third, text, sizeof(text)), 0);
    daemon_wait_stat(&server, "daemon.clients", 2, 10000);
    kvt_link_hang_up(&third);
    kvt_link_hang_up(&broken[1]);
    daemon_wait_stat(&server, "daemon.clients", 0, 10000);
    engine_open(&server);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
}

/* Every place can be had, and one more is refused with the number. */
static void all_places_can_be_had(void **state)
{
    enum { PLACES = KVT_OWNER_CLIENTS_MAX - 1 };
    static struct kvt_link links[PLACES + 1];
    char text[512], says[64];

    (void)state;
    begin("--dram 16MiB");
    for (int i = 0; i < PLACES; i++) {
        kvt_link_init(&links[i], server.socket);
        if (kvt_link_dial(&links[i], text, sizeof(text)) != 0)
            fail_msg("%d: %s", i, text);
    }
    kvt_link_init(&links[PLACES], server.socket);
    assert_int_equal(kvt_link_dial(&links[PLACES], text, sizeof(text)), KVT_E_LIMIT);
    snprintf(says, sizeof(says), "%d clients", PLACES);
    assert_non_null(strstr(text, says));
    assert_int_equal(daemon_stat(&server, "daemon.refused_full"), 1);
    for (int i = 0; i < PLACES; i++)
        kvt_link_hang_up(&links[i]);
    daemon_wait_stat(&server, "daemon.clients", 0, 20000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(metrics_are_told_to_prometheus, tear_down),
        cmocka_unit_test_teardown(scrapers_do_not_wait_for_those_who_say_nothing, tear_down),
        cmocka_unit_test_teardown(requests_of_other_kinds_are_answered, tear_down),
        cmocka_unit_test_teardown(reads_from_disk_have_their_own_times, tear_down),
        cmocka_unit_test_teardown(by_default_nobody_listens_for_scrapers, tear_down),
        cmocka_unit_test_teardown(metrics_for_other_machines_are_warned_about, tear_down),
        cmocka_unit_test_teardown(a_passed_socket_is_served_and_left_alone, tear_down),
        cmocka_unit_test_teardown(a_passed_socket_of_another_kind_is_refused, tear_down),
        cmocka_unit_test_teardown(systemd_socket_activate_starts_it, tear_down),
        cmocka_unit_test_teardown(units_are_what_systemd_takes, tear_down),
        cmocka_unit_test_teardown(the_man_page_has_all_that_help_has, tear_down),
        cmocka_unit_test_teardown(one_shared_tier_is_given, tear_down),
        cmocka_unit_test_teardown(a_client_lists_the_roots_of_the_daemon, tear_down),
        cmocka_unit_test_teardown(a_flush_over_a_daemon_without_its_disk_says_why, tear_down),
        cmocka_unit_test_teardown(a_cache_opens_by_one_text, tear_down),
        cmocka_unit_test_teardown(shared_memory_gets_huge_pages, tear_down),
        cmocka_unit_test_teardown(a_client_that_broke_off_frees_its_place, tear_down),
        cmocka_unit_test_teardown(all_places_can_be_had, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
