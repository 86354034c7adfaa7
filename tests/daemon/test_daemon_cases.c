/* Cases from the field that are about a daemon's memory, files and processes. Others run over a
 * daemon as they are: see tests/CMakeLists.txt and KVT_RIG_DAEMON in support/rig.h.
 *
 * Goal:   what cannot be had is refused at the start, with both numbers; what fails later is
 * counted and said; processes and daemons that die lose nothing of others. Method: real daemons
 * under limits of their own; engines are rigs, or processes of this program.
 */
#include "support/rig.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/client.h"
#include "support/daemon_rig.h"

enum { BLOCKS = 32, PROCESSES = 4, CHAINS = 60 };

static struct daemon server, second;
static struct rig rig;

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

static void engine_open(struct rig *one, const char *config)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);

    rig_init(one, &shape, config, NULL);
    rig_open(one);
}

/* What the children that have ended have had of the processors: on a busy machine others have them
 * in between. */
static int64_t children_ns(void)
{
    struct rusage used;

    assert_int_equal(getrusage(RUSAGE_CHILDREN, &used), 0);
    return (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * INT64_C(1000000000) +
           (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * INT64_C(1000);
}

static void test_c36_memory_that_cannot_be_had_is_refused_at_the_start(void **state)
{
    int64_t start = children_ns();

    (void)state;
    daemon_init(&server, "--dram 64MiB");
    server.fsize = 16u << 20;
    assert_int_equal(daemon_try(&server), 1); /* it ends, instead of getting ready */
    assert_true(children_ns() - start < INT64_C(1000000000));
    assert_true(daemon_said(&server, "dram=64MiB"));
    assert_true(daemon_said(&server, "16MiB"));
    assert_int_equal(access(server.socket, F_OK), -1); /* no leftover */
    snprintf(server.options, sizeof(server.options), "--dram 16MiB");
    daemon_start(&server);
    engine_open(&rig, server.config);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
}

static void more_than_the_machine_has_is_refused_with_both_numbers(void **state)
{
    (void)state;
    daemon_init(&server, "--dram 60TiB");
    assert_int_equal(daemon_try(&server), 1);
    assert_true(daemon_said(&server, "dram=60TiB is more than"));
}

static int refuse_pin(void *ctx, void *base, uint64_t bytes)
{
    (void)base;
    (void)bytes;
    return *(int *)ctx;
}

static void no_unpin(void *ctx, void *base, uint64_t bytes)
{
    (void)ctx;
    (void)base;
    (void)bytes;
}

/* The arena is shared, and this client cannot pin its mapping. */
static void test_c37_a_client_that_cannot_pin_runs_unpinned(void **state)
{
    int errors[] = {-EPERM, -ENOMEM, KVT_E_UNSUPPORTED};

    (void)state;
    daemon_init(&server, "--dram 16MiB");
    daemon_start(&server);
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
        struct kvt_pin_ops ops = {"test hook", refuse_pin, no_unpin, &errors[i]};

        engine_open(&rig, server.config);
        assert_int_equal(kvt_pin_start(&rig.cache->pin, &ops), 0);
        while (kvt_pin_state(&rig.cache->pin) == KVT_PIN_PINNING)
            rig_sleep_ms(1);
        assert_int_equal(rig_stat(&rig, "dram.pinned_bytes"), 0);
        assert_true(rig_store(&rig, 1, BLOCKS, 0, NULL) == BLOCKS);
        assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
        rig_close(&rig); /* the thread that warns has ended */
        assert_int_equal(rig.warnings, 1);
        rig_free(&rig);
        memset(&rig, 0, sizeof(rig));
    }
}

/* One process of four; it ends by itself with 0 when all that it loaded was right. */
static int worker(const char *config, uint64_t seed)
{
    const int64_t end = rig_now_ns() + INT64_C(3000000000);
    uint64_t at = seed;

    engine_open(&rig, config);
    while (rig_now_ns() < end) {
        uint64_t first = 1 + (at++ % 6) * BLOCKS;

        (void)rig_store(&rig, first, BLOCKS, 0, NULL);
        (void)rig_load(&rig, first, BLOCKS, NULL);
    }
    rig_close(&rig);
    return 0;
}

static pid_t worker_start(uint64_t seed)
{
    char seed_text[32];
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        snprintf(seed_text, sizeof(seed_text), "%llu", (unsigned long long)seed);
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* also when a test fails */
        execl("/proc/self/exe", "worker", "--worker", server.config, seed_text, (char *)NULL);
        _exit(127);
    }
    return pid;
}

static void test_c56_processes_of_one_daemon_and_one_is_killed(void **state)
{
    pid_t pids[PROCESSES];
    int status;

    (void)state;
    daemon_init(&server, "--dram 2MiB --disk {store}:64MiB");
    daemon_start(&server);
    for (uint64_t i = 0; i < PROCESSES; i++)
        pids[i] = worker_start(i);
    rig_sleep_ms(1000);
    assert_int_equal(kill(pids[0], SIGKILL), 0);
    for (int i = 0; i < PROCESSES; i++) {
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        if (i > 0)
            assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    daemon_wait_stat(&server, "daemon.clients", 0, 2000);
    daemon_wait_stat(&server, "dram.pins", 0, 2000);
    assert_int_equal(daemon_stat(&server, "daemon.clients_broken"), 0);
}

/* Two daemons on one directory: the second one waits, serves from DRAM, and takes over. */
static void test_c56_a_second_daemon_takes_the_root_over(void **state)
{
    char text[600];
    int64_t killed;

    (void)state;
    daemon_init(&server, "--dram 2MiB --disk {store}:64MiB");
    daemon_start(&server);
    engine_open(&rig, server.config);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig_close(&rig);
    daemon_init(&second, "");
    snprintf(second.options, sizeof(second.options), "%s", server.options);
    daemon_start(&second);
    daemon_stat_text(&second, "disk.0.state", text, sizeof(text));
    assert_non_null(strstr(text, "in use by process"));
    assert_int_equal(daemon_stat(&second, "disk.roots"), 0);
    daemon_kill(&server);
    killed = rig_now_ns();
    daemon_wait_stat(&second, "disk.roots", 1, 60000);
    print_message("           taken over after %lld ms\n",
                  (long long)((rig_now_ns() - killed) / 1000000));
    snprintf(rig.config, sizeof(rig.config), "%s", second.config);
    rig_open(&rig);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
}

/* Files may not grow: writes to disk fail, and what is lost by that is counted. */
static void test_c81_writes_that_fail_are_counted_and_said_once(void **state)
{
    uint64_t lost = 0, present = 0;
    unsigned lines = 0;
    char line[1024];

    (void)state;
    daemon_init(&server, "--dram 1MiB --disk {store}:512MiB");
    server.fsize = 3u << 20; /* the rings of a client take two */
    daemon_start(&server);
    engine_open(&rig, server.config);
    for (uint64_t chain = 0; chain < CHAINS; chain++) {
        (void)rig_store(&rig, 1 + chain * BLOCKS, BLOCKS, 0, NULL);
        (void)kvt_flush(rig.cache);
    }
    for (uint64_t chain = 0; chain < CHAINS; chain++)
        present += (uint64_t)rig_lookup(&rig, 1 + chain * BLOCKS, BLOCKS);
    if (daemon_stat(&server, "disk.write_fail") + daemon_stat(&server, "disk.enospc") == 0)
        fail_msg("no write failed: %llu bytes written, %llu blocks dropped",
                 (unsigned long long)daemon_stat(&server, "disk.written_bytes"),
                 (unsigned long long)daemon_stat(&server, "store.dropped_dram"));
    lost = daemon_stat(&server, "dram.evicted_lost") + daemon_stat(&server, "store.dropped_dram") +
           daemon_stat(&server, "store.lost");
    assert_true(present < (uint64_t)CHAINS * BLOCKS);
    if (lost == 0)
        fail_msg("nothing is counted as lost");
    FILE *file = fopen(server.log, "re");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file) != NULL)
        lines += strstr(line, "writ") != NULL || strstr(line, "no new segment") != NULL;
    (void)fclose(file);
    if (lines == 0 || lines > 20)
        fail_msg("%u lines; %llu failed, %llu without room", lines,
                 (unsigned long long)daemon_stat(&server, "disk.write_fail"),
                 (unsigned long long)daemon_stat(&server, "disk.enospc"));
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_c36_memory_that_cannot_be_had_is_refused_at_the_start,
                                  tear_down),
        cmocka_unit_test_teardown(more_than_the_machine_has_is_refused_with_both_numbers,
                                  tear_down),
        cmocka_unit_test_teardown(test_c37_a_client_that_cannot_pin_runs_unpinned, tear_down),
        cmocka_unit_test_teardown(test_c56_processes_of_one_daemon_and_one_is_killed, tear_down),
        cmocka_unit_test_teardown(test_c56_a_second_daemon_takes_the_root_over, tear_down),
        cmocka_unit_test_teardown(test_c81_writes_that_fail_are_counted_and_said_once, tear_down),
    };

    if (argc == 4 && strcmp(argv[1], "--worker") == 0)
        return worker(argv[2], strtoull(argv[3], NULL, 10));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
