/* kvtierd and the clients of it: the same API, the same bytes, another process.
 *
 * Goal:   what one process stores another one loads, exactly; DRAM outlives its clients; a cache
 *         whose daemon is away or goes away runs on with misses, says so once and comes back; who
 *         may connect, with which version, to which socket is checked and refused by name.
 * Method: real kvtierd processes on sockets and roots of their own; engines are rigs in this
 *         process or in forked ones; whether blocks are exact is asserted by the rig for each page.
 */
#include "support/rig.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/sock.h"
#include "client/link.h"
#include "format/handshake.h"
#include "format/message.h"
#include "store/counters.h"
#include "support/daemon_rig.h"

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80 /* Linux 5.6 */
#endif

enum { BLOCKS = 24 };

static struct daemon server;
static struct rig rig, other;

static void rig_end(struct rig *one)
{
    rig_close(one);
    rig_free(one);
    memset(one, 0, sizeof(*one));
}

static int tear_down(void **state)
{
    (void)state;
    rig_end(&rig);
    rig_end(&other);
    daemon_free(&server);
    return 0;
}

static void engine_init(struct rig *one)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);

    rig_init(one, &shape, server.config, NULL);
}

static void engine_open(struct rig *one)
{
    engine_init(one);
    rig_open(one);
}

static void begin(const char *options)
{
    daemon_init(&server, options);
    daemon_start(&server);
}

/* Run a function in a process of its own, which may use nothing of this one's caches. */
static void in_process(void (*fn)(void))
{
    int status;
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        memset(&rig, 0, sizeof(rig));
        memset(&other, 0, sizeof(other));
        fn();
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void store_all(void)
{
    engine_open(&rig);
    if (rig_store(&rig, 1, BLOCKS, 0, NULL) != BLOCKS)
        _exit(2);
    rig_close(&rig);
}

/* ---- the plain path ------------------------------------------------------------------------- */

static void a_block_stored_here_is_loaded_there(void **state)
{
    (void)state;
    begin("--dram 16MiB --disk {store}:64MiB");
    in_process(store_all);
    engine_open(&rig);
    assert_int_equal(rig_lookup(&rig, 1, BLOCKS), BLOCKS);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
    assert_int_equal(rig_stat(&rig, "load.granted_dram"), BLOCKS);
    assert_int_equal(rig_stat(&rig, "client.bad_move"), 0);
    assert_int_equal(rig_stat(&rig, "client.bad_reply"), 0);
    assert_int_equal(rig_stat(&rig, "disk.roots"), 1);
}

static void dram_is_warm_without_a_disk_after_the_engine_restarts(void **state)
{
    (void)state;
    begin("--dram 16MiB");
    engine_open(&rig);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    rig_close(&rig);
    daemon_wait_stat(&server, "daemon.clients", 0, 2000);
    assert_int_equal(daemon_stat(&server, "daemon.clients_left"), 1);
    rig_open(&rig);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
    assert_int_equal(rig.warnings, 0);
}

static void what_is_on_disk_outlives_the_daemon(void **state)
{
    (void)state;
    begin("--dram 16MiB --disk {store}:64MiB");
    engine_open(&rig);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig_close(&rig);
    assert_int_equal(daemon_stop(&server), 0);
    assert_int_equal(access(server.socket, F_OK), -1);
    daemon_start(&server);
    rig_open(&rig);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
    assert_int_equal(rig_stat(&rig, "load.granted_disk"), BLOCKS);
}

static void two_engines_share_blocks_and_each_has_its_own_namespaces(void **state)
{
    (void)state;
    begin("--dram 16MiB");
    engine_open(&rig);
    engine_init(&other);
    other.identity.model = "another";
    rig_open(&other);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(rig_lookup(&other, 1, BLOCKS), 0);
    assert_int_equal(rig_store(&other, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
    assert_int_equal(rig_load(&other, 1, BLOCKS, NULL), BLOCKS);
    assert_int_equal(kvt_purge(rig.ns, NULL, 0), BLOCKS);
    assert_int_equal(rig_lookup(&rig, 1, BLOCKS), 0);
    assert_int_equal(rig_load(&other, 1, BLOCKS, NULL), BLOCKS);
}

static void calls_that_spin_get_the_same_answers(void **state)
{
    char config[300];

    (void)state;
    begin("--dram 16MiB --spin 50us");
    engine_init(&rig);
    snprintf(config, sizeof(config), "%s,spin=200us", server.config);
    snprintf(rig.config, sizeof(rig.config), "%s", config);
    rig_open(&rig);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    for (int i = 0; i < 500; i++)
        assert_int_equal(rig_lookup(&rig, 1, BLOCKS), BLOCKS);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
}

/* ---- no daemon ------------------------------------------------------------------------------ */

static void without_a_daemon_everything_misses_and_one_line_says_so(void **state)
{
    char text[512];

    (void)state;
    daemon_init(&server, "--dram 16MiB");
    engine_open(&rig);
    assert_non_null(strstr(rig.error, "no kvtierd at"));
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), 0);
    assert_int_equal(rig_lookup(&rig, 1, BLOCKS), 0);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), 0);
    rig_sleep_ms(300);
    assert_int_equal(rig.warnings, 1);
    assert_true(rig_stat(&rig, "daemon.miss_keys") >= BLOCKS);
    assert_int_equal(rig_stat(&rig, "daemon.miss_blocks"), 2 * BLOCKS);
    rig_stat_text(&rig, "daemon.state", text, sizeof(text));
    assert_non_null(strstr(text, "no kvtierd at"));
    assert_int_equal(kvt_flush(rig.cache), KVT_E_CLOSED); /* nothing is on disk: that is said */
    assert_true(kvt_purge(rig.ns, NULL, 0) < 0);
}

static void wait_connected(struct rig *one)
{
    char text[512] = "";

    for (int i = 0; i < 6000 && strcmp(text, "connected") != 0; i++) {
        rig_sleep_ms(10);
        rig_stat_text(one, "daemon.state", text, sizeof(text));
    }
    assert_string_equal(text, "connected");
}

static void a_daemon_that_comes_later_is_used(void **state)
{
    (void)state;
    daemon_init(&server, "--dram 16MiB");
    engine_open(&rig);
    daemon_start(&server);
    wait_connected(&rig);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
}

static void a_daemon_that_is_killed_and_started_again_is_found_again(void **state)
{
    (void)state;
    begin("--dram 16MiB --disk {store}:64MiB");
    engine_open(&rig);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(kvt_flush(rig.cache), 0);
    for (int round = 0; round < 3; round++) {
        daemon_kill(&server);
        assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), 0);
        assert_int_equal(rig_lookup(&rig, 1, BLOCKS), 0);
        daemon_start(&server); /* replaces the stale socket */
        wait_connected(&rig);
        assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
    }
    assert_int_equal(rig.warnings, 3);
    assert_int_equal(rig_stat(&rig, "daemon.reconnects"), 3);
}

/* What a namespace said of itself is said again to a daemon that knows nothing of it. */
static void limits_of_a_namespace_outlive_the_daemon(void **state)
{
    struct kvt_ns_limits limits = {.struct_size = sizeof(limits), .quota_bytes = 64u << 10};
    (void)state;
    begin("--dram 16MiB");
    engine_open(&rig);
    assert_int_equal(kvt_ns_limit(rig.ns, &limits), 0);
    const size_t held = rig_store(&rig, 1, BLOCKS, 0, NULL);
    assert_true(held > 0 && held < BLOCKS);
    daemon_kill(&server);
    assert_int_equal(rig_lookup(&rig, 1, BLOCKS), 0);
    daemon_start(&server);
    wait_connected(&rig);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), held);
}

static void *limit_again(void *quota)
{
    struct kvt_ns_limits limits = {.struct_size = sizeof(limits),
                                   .quota_bytes = *(uint64_t *)quota};

    for (int i = 0; i < 20; i++)
        if (kvt_ns_limit(rig.ns, &limits) != 0)
            return quota;
    return NULL;
}

/* Threads that say different things at a time are heard one after the other, also by a daemon that
 * comes meanwhile; who says something last has it. */
static void limits_are_said_one_after_the_other(void **state)
{
    uint64_t quotas[4] = {64u << 10, 1u << 20, 2u << 20, KVT_LIMIT_NONE};
    pthread_t threads[4];
    void *failed;

    (void)state;
    begin("--dram 16MiB");
    engine_open(&rig);
    daemon_freeze(&server);
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, limit_again, &quotas[i]), 0);
    rig_sleep_ms(20);
    daemon_kill(&server);
    daemon_start(&server);
    wait_connected(&rig);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_join(threads[i], &failed), 0);
        assert_null(failed);
    }
    assert_null(limit_again(&quotas[0]));
    assert_true(rig_store(&rig, 1, BLOCKS, 0, NULL) < BLOCKS);
    assert_null(limit_again(&quotas[3]));
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
}

/* ---- clocks --------------------------------------------------------------------------------- */

/* Load within a deadline, in a time namespace whose clock is behind by half of its age. Its first
 * process is the next child. 77: not permitted here. */
static int load_in_the_past(const char *config)
{
    char text[64];
    int status;
    const int fd = unshare(CLONE_NEWTIME) == 0 ? open("/proc/self/timens_offsets", O_WRONLY) : -1;

    snprintf(text, sizeof(text), "monotonic -%" PRId64 " 0", rig_now_ns() / 2000000000);
    if (fd < 0 || write(fd, text, strlen(text)) < 0)
        return 77;
    close(fd);
    const pid_t pid = fork();
    if (pid == 0) {
        struct rig_shape shape = rig_shape_small(BLOCKS);

        rig_init(&rig, &shape, config, NULL);
        rig_open(&rig);
        _exit(rig_load(&rig, 1, BLOCKS, NULL) == BLOCKS ? 0 : 2);
    }
    return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status)
                                                                           : 3;
}

static void deadlines_hold_across_time_namespaces(void **state)
{
    char config[300];
    int status;

    (void)state;
    begin("--dram 16MiB");
    in_process(store_all);
    snprintf(config, sizeof(config), "%s,load_deadline=60s", server.config);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        _exit(load_in_the_past(config));
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        skip();
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void the_same_clock_is_known_from_another(void **state)
{
    (void)state;
    assert_int_equal(kvt_link_shift(100, 100, 100), 0);
    assert_int_equal(kvt_link_shift(100, 150, 200), 0);
    assert_int_equal(kvt_link_shift(100, 200, 200), 0);
    assert_int_equal(kvt_link_shift(100, 0, 200), 0); /* it does not say */
    assert_int_equal(kvt_link_shift(100, 99, 200), -51);
    assert_int_equal(kvt_link_shift(100, 1150, 200), 1000);
    assert_int_equal(kvt_link_shift(5000, 150, 5100), -4900);
    assert_int_equal(kvt_link_shift(100, INT64_MIN, 200), 0); /* nonsense: no sum may overflow */
    assert_int_equal(kvt_link_shift(100, -1, 200), 0);
    assert_int_equal(kvt_link_shift(100, INT64_MAX, 200), 0);
}

/* Requests of every kind are under way when the daemon is stopped and then killed. */
static void requests_under_way_end_as_misses_when_the_daemon_dies(void **state)
{
    struct kvt_key keys[BLOCKS];
    uint32_t ids[BLOCKS];
    struct kvt_req *reqs[16];

    (void)state;
    begin("--dram 16MiB --disk {store}:64MiB");
    engine_open(&rig);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        keys[i] = rig_key(1 + i);
        ids[i] = i;
    }
    daemon_freeze(&server);
    for (int i = 0; i < 16; i++)
        assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, BLOCKS, NULL, &reqs[i]), 0);
    daemon_kill(&server);
    for (int i = 0; i < 16; i++) {
        size_t n;
        const int32_t *status;

        assert_int_equal(kvt_req_wait(reqs[i], 5000000000), 1);
        status = kvt_req_status(reqs[i], &n);
        assert_int_equal(n, BLOCKS);
        for (size_t j = 0; j < n; j++)
            assert_int_equal(status[j], KVT_E_MISS);
        kvt_req_free(reqs[i]);
    }
    daemon_start(&server);
    wait_connected(&rig);
    (void)rig_load(&rig, 1, BLOCKS, NULL); /* exact or a miss: the rig asserts it */
}

static void a_daemon_that_is_stopped_is_given_up(void **state)
{
    int64_t start;

    (void)state;
    begin("--dram 16MiB");
    engine_open(&rig);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    daemon_freeze(&server);
    start = rig_now_ns();
    assert_int_equal(rig_lookup(&rig, 1, BLOCKS), 0);
    assert_true(rig_now_ns() - start < INT64_C(8000000000));
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), 0);
    assert_int_equal(kill(server.pid, SIGCONT), 0);
    wait_connected(&rig);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
    daemon_wait_stat(&server, "daemon.clients", 1, 4000);
}

/* ---- who may connect ------------------------------------------------------------------------ */

/* One greeting: what it is answered with, and that the daemon closes behind a refusal. */
static void greet(const struct kvt_hello *hello, struct kvt_welcome *welcome)
{
    char more[8];
    int fd;

    assert_int_equal(kvt_sock_connect(server.socket, 5000, &fd), 0);
    assert_int_equal(kvt_sock_send(fd, hello, sizeof(*hello), NULL, 0), 0);
    assert_int_equal(kvt_sock_recv(fd, welcome, sizeof(*welcome), NULL, 0, NULL), sizeof(*welcome));
    if (welcome->status != 0)
        assert_int_equal(kvt_sock_recv(fd, more, sizeof(more), NULL, 0, NULL), 0);
    close(fd);
}

/* Each number alone, of engines and of tools, newer and older. */
static void other_versions_are_refused_by_name(void **state)
{
    const struct kvt_hello good = {.magic = KVT_HANDSHAKE_MAGIC,
                                   .bytes = sizeof(good),
                                   .handshake = KVT_HANDSHAKE_VERSION,
                                   .proto = KVT_PROTO_VERSION,
                                   .record = KVT_RECORD_VERSION,
                                   .stats = KVT_STORE_STAT_COUNT,
                                   .version = "9.9.9\n\x1b[2J"};
    static const char *const names[] = {"handshake", "protocol", "records", NULL};
    struct kvt_welcome welcome;
    uint64_t refused = 0;

    (void)state;
    begin("--dram 16MiB");
    for (uint32_t kind = KVT_HELLO_ENGINE; kind <= KVT_HELLO_CONTROL; kind++) {
        struct kvt_hello hello = good;

        hello.kind = kind;
        greet(&hello, &welcome);
        assert_int_equal(welcome.status, 0);
        for (uint32_t field = 0; field < 4; field++) {
            for (int step = -1; step <= 7; step += 8) {
                char says[64];

                hello = good;
                hello.kind = kind;
                uint32_t *number = field == 0   ? &hello.handshake
                                   : field == 1 ? &hello.proto
                                   : field == 2 ? &hello.record
                                                : &hello.stats;
                *number += (uint32_t)step;
                greet(&hello, &welcome);
                assert_int_equal(welcome.status, KVT_E_VERSION);
                assert_non_null(strstr(welcome.text, "9.9.9??[2J")); /* no lines of its own */
                assert_non_null(strstr(welcome.text, "run the same version of both"));
                if (names[field] != NULL)
                    snprintf(says, sizeof(says), "%s %u", names[field], *number);
                else
                    snprintf(says, sizeof(says), "%u numbers", *number);
                if (strstr(welcome.text, says) == NULL)
                    fail_msg("\"%s\" is not in \"%s\"", says, welcome.text);
                refused++;
            }
        }
    }
    assert_int_equal(daemon_stat(&server, "daemon.refused_version"), refused);
    FILE *log = fopen(server.log, "re"); /* it comes again and again: said once */
    char line[1024];
    unsigned lines = 0;
    assert_non_null(log);
    while (fgets(line, sizeof(line), log) != NULL)
        lines += strstr(line, "was refused") != NULL;
    (void)fclose(log);
    assert_int_equal(lines, 1);
}

static void garbage_instead_of_a_greeting_is_refused(void **state)
{
    struct kvt_welcome welcome;
    char junk[300];
    int fd;

    (void)state;
    begin("--dram 16MiB");
    memset(junk, 0x5a, sizeof(junk));
    for (size_t bytes = 1; bytes <= sizeof(junk); bytes += 23) {
        assert_int_equal(kvt_sock_connect(server.socket, 5000, &fd), 0);
        assert_int_equal(kvt_sock_send(fd, junk, bytes, NULL, 0), 0);
        assert_int_equal(kvt_sock_recv(fd, &welcome, sizeof(welcome), NULL, 0, NULL),
                         sizeof(welcome));
        assert_int_equal(welcome.status, KVT_E_VERSION);
        close(fd);
    }
    /* One that says nothing is let go of after a while, and blocks nobody. */
    assert_int_equal(kvt_sock_connect(server.socket, 5000, &fd), 0);
    engine_open(&rig);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(kvt_sock_recv(fd, &welcome, sizeof(welcome), NULL, 0, NULL), 0);
    close(fd);
}

static void the_socket_is_private_and_so_is_what_is_around_it(void **state)
{
    struct stat st;
    mode_t before = umask(0);

    (void)state;
    begin("--dram 16MiB --disk {store}:64MiB");
    umask(before);
    assert_int_equal(stat(server.socket, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(stat(server.store, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
}

static void try_as_somebody_else(void)
{
    if (setgid(65534) != 0 || setuid(65534) != 0)
        _exit(3);
    engine_init(&rig);
    int rc = rig_try_open(&rig);
    if (rc != 0 || strstr(rig.error, "user 65534 is not allowed") == NULL) {
        fprintf(stderr, "%d: %s\n", rc, rig.error);
        _exit(4);
    }
    kvt_close(rig.cache);
    rig.cache = NULL;
}

static void try_as_somebody_allowed(void)
{
    if (setgid(65534) != 0 || setuid(65534) != 0)
        _exit(3);
    engine_open(&rig);
    if (rig_store(&rig, 1, BLOCKS, 0, NULL) != BLOCKS)
        _exit(4);
    rig_close(&rig);
}

static void other_users_are_refused_unless_allowed(void **state)
{
    (void)state;
    if (geteuid() != 0) {
        print_message("not root: other users cannot be played\n");
        skip();
    }
    begin("--dram 16MiB --socket-mode 0666");
    assert_int_equal(chmod(server.dir, 0755), 0);
    in_process(try_as_somebody_else);
    assert_true(daemon_stat(&server, "daemon.refused_peer") >= 1); /* it tries again */
    assert_int_equal(daemon_stop(&server), 0);
    snprintf(server.options, sizeof(server.options),
             "--dram 16MiB --socket-mode 0666 --allow-uid 12+65534");
    daemon_start(&server);
    in_process(try_as_somebody_allowed);
}

/* ---- the socket's name ---------------------------------------------------------------------- */

static void a_stale_socket_is_replaced_a_live_one_never(void **state)
{
    struct daemon second;
    char name[200];
    struct stat before, after;

    (void)state;
    begin("--dram 16MiB");
    daemon_kill(&server);
    assert_int_equal(access(server.socket, F_OK), 0); /* left behind */
    daemon_start(&server);
    assert_int_equal(stat(server.socket, &before), 0);

    second = server;
    second.pid = 0;
    assert_int_equal(daemon_try(&second), 1);
    assert_true(daemon_said(&server, "another kvtierd, or another program, listens at"));
    assert_int_equal(stat(server.socket, &after), 0);
    assert_int_equal(before.st_ino, after.st_ino);
    engine_open(&rig);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    rig_close(&rig);

    assert_int_equal(daemon_stop(&server), 0);
    snprintf(name, sizeof(name), "%s.lock", server.socket);
    assert_int_equal(access(name, F_OK), -1);
    int fd = open(server.socket, O_CREAT | O_WRONLY, 0600); /* no socket: not ours to remove */
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(daemon_try(&server), 1);
    assert_true(daemon_said(&server, "is no socket"));
    assert_int_equal(access(server.socket, F_OK), 0);

    assert_int_equal(unlink(server.socket), 0); /* somebody else, who holds no lock of ours */
    struct sockaddr_un address;
    assert_int_equal(kvt_sock_address(server.socket, &address), 0);
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(fd, 4), 0);
    assert_int_equal(stat(server.socket, &before), 0);
    assert_int_equal(daemon_try(&server), 1);
    assert_int_equal(stat(server.socket, &after), 0);
    assert_int_equal(before.st_ino, after.st_ino);
    close(fd);
}

static void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "we");

    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

/* A lock file with something in it is somebody's file: neither used nor removed. */
static void what_has_the_name_of_the_lock_stays(void **state)
{
    char name[200], text[8] = "";

    (void)state;
    daemon_init(&server, "--dram 16MiB");
    snprintf(name, sizeof(name), "%s.lock", server.socket);
    write_file(name, "mine");
    assert_int_equal(daemon_try(&server), 1);
    assert_true(daemon_said(&server, "is no lock of kvtierd's"));
    int fd = open(name, O_RDONLY | O_CLOEXEC);
    assert_int_equal(read(fd, text, sizeof(text)), 4);
    close(fd);
    assert_int_equal(unlink(name), 0);
    assert_int_equal(mkfifo(name, 0600), 0);
    assert_int_equal(daemon_try(&server), 1);
    assert_int_equal(unlink(name), 0);
    daemon_start(&server);
}

/* Of a limit of 1,024, as it usually is, 127 programs and full roots would need more. */
static void descriptors_are_as_many_as_may_be(void **state)
{
    struct rlimit before, less, now;

    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    less = (struct rlimit){.rlim_cur = 256, .rlim_max = before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &less), 0);
    begin("--dram 16MiB");
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(prlimit(server.pid, RLIMIT_NOFILE, NULL, &now), 0);
    assert_true(now.rlim_cur == before.rlim_max);
}

/* ---- configuration -------------------------------------------------------------------------- */

static void what_is_wrong_in_a_configuration_is_named(void **state)
{
    static const struct {
        const char *options, *says;
    } cases[] = {
        {"--dram 16Mib", "16Mib"},
        {"--drum 16MiB", "did you mean \"dram\"?"},
        {"--level kv8", "an option of the programs that connect"},
        {"--socket-mode 999", "octal"},
        {"--socket-mode 0", "let this user in"},
        {"--allow-uid bob", "user ids"},
        {"--log-level loud", "error, warn, info, debug"},
        {"--metrics here", "ADDRESS:PORT"},
        {"--config /nonexistent/file", "/nonexistent/file"},
        {"--json", "unknown key \"json\""}, /* not: it needs a value */
        {"--log-level", "--log-level needs a value"},
        {"--config", "--config needs a value"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        daemon_init(&server, cases[i].options);
        assert_int_equal(daemon_try(&server), 2);
        if (!daemon_said(&server, cases[i].says))
            fail_msg("%s: \"%s\" was not said", cases[i].options, cases[i].says);
        daemon_free(&server);
    }
}

static void wait_said(const char *text)
{
    for (int i = 0; i < 6000 && !daemon_said(&server, text); i++)
        rig_sleep_ms(10);
    if (!daemon_said(&server, text))
        fail_msg("\"%s\" was not said", text);
}

/* Lines of a file: what people write by habit is taken, or refused with what to write instead. */
static void files_are_read_as_people_write_them(void **state)
{
    static const struct {
        const char *text, *says; /* says NULL: it is good */
    } cases[] = {
        {"dram = 16MiB  # a comment\n#\n\t# another\n  log_level=debug\t#x\n", NULL},
        {"dram = 16MiB\r\nlog_level = info\r\n", NULL},
        {"dram = \"16MiB\"\n", ":1: dram: values are written without quotes"},
        {"\n[store]\ndram = 16MiB\n", ":2: \"[store]\": there are no sections"},
        {"dram 16MiB\n", "is not of the form key = value"},
        {"dram = 16MiB#x\n", "16MiB#x"},
        {"disk = /nowhere#1:64MiB # a path may hold one\ndram = x\n", ":2: dram"},
    };
    char file[200];

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        daemon_init(&server, "");
        snprintf(file, sizeof(file), "%s/conf", server.dir);
        snprintf(server.options, sizeof(server.options), "--config %s --check", file);
        write_file(file, cases[i].text);
        assert_int_equal(daemon_try(&server), cases[i].says ? 2 : 0);
        if (!daemon_said(&server, cases[i].says ? cases[i].says : "the configuration is good"))
            fail_msg("case %zu: \"%s\" was not said", i, cases[i].says);
        daemon_free(&server);
    }
    daemon_init(&server, "--config /tmp");
    assert_int_equal(daemon_try(&server), 2);
    assert_true(daemon_said(&server, "Is a directory"));
    daemon_free(&server);

    daemon_init(&server, "");
    snprintf(file, sizeof(file), "%s/conf", server.dir);
    snprintf(server.options, sizeof(server.options), "--config %s --check", file);
    static const char nuls[][19] = {"dram = 16MiB\0junk\n", "dram = 16MiB\n\0\0\0\0\0", ""};
    for (size_t i = 0; i < sizeof(nuls) / sizeof(nuls[0]);
         i++) { /* also what a crash leaves of a file */
        FILE *out = fopen(file, "we");
        assert_non_null(out);
        assert_int_equal(fwrite(nuls[i], 1, 18, out), 18);
        assert_int_equal(fclose(out), 0);
        assert_int_equal(daemon_try(&server), 2);
        assert_true(
            daemon_said(&server, i == 1 ? ":2: the line holds a NUL" : ":1: the line holds a NUL"));
    }
}

static void sighup_takes_what_can_change_and_names_what_cannot(void **state)
{
    char file[200], options[400];

    (void)state;
    daemon_init(&server, "");
    snprintf(file, sizeof(file), "%s/conf", server.dir);
    snprintf(options, sizeof(options), "--config %s", file);
    snprintf(server.options, sizeof(server.options), "%s", options);
    write_file(file, "# a store\ndram = 16MiB\nlog_level = info\n\n");
    daemon_start(&server);
    write_file(file, "dram = 32MiB\nlog_level=debug\nallow_uid = 1+2\n");
    assert_int_equal(kill(server.pid, SIGHUP), 0);
    wait_said("reload: done");
    wait_said("log_level is now debug");
    wait_said("allow_uid is now 1+2");
    wait_said("dram = 32MiB takes a restart; 16MiB stays");
    assert_false(daemon_said(&server, "staging")); /* follows from dram: nobody has set it */
    assert_false(daemon_said(&server, "pin_max"));
    write_file(file, "dram = 32MiB\nstaging = 4MiB\n");
    assert_int_equal(kill(server.pid, SIGHUP), 0);
    wait_said("staging = 4MiB takes a restart");
    write_file(file, "dram = 32MiB\nlog_level=quiet\n");
    assert_int_equal(kill(server.pid, SIGHUP), 0);
    wait_said("conf:2: log_level: \"quiet\"");
    assert_int_equal(unlink(file), 0); /* nobody will ever write into it */
    assert_int_equal(mkfifo(file, 0600), 0);
    assert_int_equal(kill(server.pid, SIGHUP), 0);
    wait_said("it is no regular file");
    engine_open(&rig); /* it still serves */
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
}

/* As another user: store, say so, and look the blocks up until they are misses. */
static void look_until_disconnected(int said)
{
    long found = BLOCKS;

    if (setgid(65534) != 0 || setuid(65534) != 0)
        _exit(3);
    engine_open(&rig);
    if (rig_store(&rig, 1, BLOCKS, 0, NULL) != BLOCKS || write(said, "s", 1) != 1)
        _exit(4);
    for (int i = 0; i < 3000 && found > 0; i++) {
        rig_sleep_ms(10);
        found = rig_lookup(&rig, 1, BLOCKS);
    }
    _exit(found == 0 ? 0 : 5);
}

/* Who is taken out of allow_uid is disconnected, and others are not. */
static void a_user_who_is_not_allowed_any_more_is_disconnected(void **state)
{
    char file[200], byte;
    int fds[2], status;

    (void)state;
    if (geteuid() != 0) {
        print_message("not root: other users cannot be played\n");
        skip();
    }
    daemon_init(&server, "");
    snprintf(file, sizeof(file), "%s/conf", server.dir);
    snprintf(server.options, sizeof(server.options), "--config %s", file);
    write_file(file, "dram = 16MiB\nsocket_mode = 0666\nallow_uid = 12+65534\n");
    assert_int_equal(chmod(server.dir, 0755), 0);
    daemon_start(&server);
    assert_int_equal(pipe(fds), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        look_until_disconnected(fds[1]);
    close(fds[1]);
    assert_int_equal(read(fds[0], &byte, 1), 1);
    close(fds[0]);
    engine_open(&rig);
    assert_int_equal(rig_lookup(&rig, 1, BLOCKS), BLOCKS);
    write_file(file, "dram = 16MiB\nsocket_mode = 0666\nallow_uid = 12\n");
    assert_int_equal(kill(server.pid, SIGHUP), 0);
    wait_said("user 65534 is not allowed any more: ");
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
    daemon_wait_stat(&server, "daemon.clients", 1, 20000);
    assert_int_equal(daemon_stat(&server, "daemon.clients_broken"), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_block_stored_here_is_loaded_there, tear_down),
        cmocka_unit_test_teardown(dram_is_warm_without_a_disk_after_the_engine_restarts, tear_down),
        cmocka_unit_test_teardown(what_is_on_disk_outlives_the_daemon, tear_down),
        cmocka_unit_test_teardown(two_engines_share_blocks_and_each_has_its_own_namespaces,
                                  tear_down),
        cmocka_unit_test_teardown(calls_that_spin_get_the_same_answers, tear_down),
        cmocka_unit_test_teardown(without_a_daemon_everything_misses_and_one_line_says_so,
                                  tear_down),
        cmocka_unit_test_teardown(a_daemon_that_comes_later_is_used, tear_down),
        cmocka_unit_test_teardown(a_daemon_that_is_killed_and_started_again_is_found_again,
                                  tear_down),
        cmocka_unit_test_teardown(limits_of_a_namespace_outlive_the_daemon, tear_down),
        cmocka_unit_test_teardown(limits_are_said_one_after_the_other, tear_down),
        cmocka_unit_test_teardown(deadlines_hold_across_time_namespaces, tear_down),
        cmocka_unit_test(the_same_clock_is_known_from_another),
        cmocka_unit_test_teardown(requests_under_way_end_as_misses_when_the_daemon_dies, tear_down),
        cmocka_unit_test_teardown(a_daemon_that_is_stopped_is_given_up, tear_down),
        cmocka_unit_test_teardown(other_versions_are_refused_by_name, tear_down),
        cmocka_unit_test_teardown(garbage_instead_of_a_greeting_is_refused, tear_down),
        cmocka_unit_test_teardown(the_socket_is_private_and_so_is_what_is_around_it, tear_down),
        cmocka_unit_test_teardown(other_users_are_refused_unless_allowed, tear_down),
        cmocka_unit_test_teardown(a_stale_socket_is_replaced_a_live_one_never, tear_down),
        cmocka_unit_test_teardown(what_has_the_name_of_the_lock_stays, tear_down),
        cmocka_unit_test_teardown(descriptors_are_as_many_as_may_be, tear_down),
        cmocka_unit_test_teardown(what_is_wrong_in_a_configuration_is_named, tear_down),
        cmocka_unit_test_teardown(files_are_read_as_people_write_them, tear_down),
        cmocka_unit_test_teardown(sighup_takes_what_can_change_and_names_what_cannot, tear_down),
        cmocka_unit_test_teardown(a_user_who_is_not_allowed_any_more_is_disconnected, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
