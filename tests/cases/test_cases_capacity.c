/* Failures from the field about restarts, caps and resources: C22 C26 C29 C31 C33 C34 C49.
 *
 * Method: the real store on a directory of its own; what the process holds (descriptors, resident
 * memory, bytes on disk) is read from the system, not from our own counters.
 */
#include "support/rig.h"

#include <pthread.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "support/memory_help.h"

static struct rig rig;
static const char *self;

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>

/* Children of C49 leave by exit() with threads of a parent that does not exist in them: leaks are
 * looked for at the end of main() only. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "leak_check_at_exit=0";
}

static int leaks(void)
{
    return __lsan_do_recoverable_leak_check();
}
#else
static int leaks(void)
{
    return 0;
}
#endif

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

/* Run this program again with arguments, in directory "/", with an empty environment. */
static int run_again(const char *word, const char *dir)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        char *const argv[] = {(char *)(uintptr_t)self, (char *)(uintptr_t)word,
                              (char *)(uintptr_t)dir, NULL};
        char *const envp[] = {NULL};
        if (chdir("/") == 0)
            execve("/proc/self/exe", argv, envp);
        _exit(99);
    }
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (WIFSIGNALED(status))
        fail_msg("%s: signal %d", word, WTERMSIG(status));
    return WEXITSTATUS(status);
}

static void open_dir(const struct rig_shape *shape, const char *config, const char *dir,
                     const char *cap)
{
    rig_init(&rig, shape, config, NULL);
    snprintf(rig.dir, sizeof(rig.dir), "%s", dir);
    snprintf(rig.disk_cap, sizeof(rig.disk_cap), "%s", cap);
    rig_open(&rig);
}

/* In the child: 0 when all 500 blocks are exact. */
static int child_load_500(const char *dir)
{
    struct rig_shape shape = rig_shape_small(500);
    open_dir(&shape, "dram=16MiB", dir, "64MiB");
    return rig_load(&rig, 1, 500, NULL) == 500 ? 0 : 1;
}

static void test_c22_all_is_there_after_a_restart_elsewhere(void **state)
{
    struct rig_shape shape = rig_shape_small(500);
    (void)state;
    rig_init(&rig, &shape, "dram=16MiB", "64MiB");
    rig_open(&rig);
    assert_int_equal(rig_store(&rig, 1, 500, 0, NULL), 500);
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig_close(&rig);
    assert_int_equal(run_again("load-500", rig.dir), 0);
    rig_open(&rig);
    assert_int_equal(rig_stat(&rig, "disk.blocks"), 500);
    uint64_t accounted = rig_stat(&rig, "disk.bytes_used");
    uint64_t actual = rig_dir_bytes(rig.dir, NULL);
    if (accounted > actual + actual / 100 || actual > accounted + accounted / 100)
        fail_msg("accounted %llu, actual %llu", (unsigned long long)accounted,
                 (unsigned long long)actual);
}

static void test_c26_larger_than_the_cap_is_refused(void **state)
{
    struct rig_shape shape = rig_shape_large(4); /* 256 KiB a block */
    struct kvt_ns *ns = NULL;
    (void)state;
    /* DRAM: the arena is smaller than one raw record */
    rig_init(&rig, &shape, "dram=128KiB,staging=64KiB", NULL);
    assert_int_equal(rig_try_open(&rig), 0);
    assert_int_equal(kvt_ns_open(rig.cache, &rig.identity, &rig.layout, &ns), KVT_E_TOO_SMALL);
    assert_int_equal(rig_stat(&rig, "dram.bytes_used"), 0);
    kvt_close(rig.cache);
    rig.cache = NULL;
    tear_down(NULL);
    /* disk: segments of 1 MiB cannot hold four records of 260 KiB; DRAM goes on without it */
    rig_init(&rig, &shape, "dram=16MiB", "8MiB");
    assert_int_equal(rig_try_open(&rig), 0);
    uint64_t before = rig_stat(&rig, "disk.bytes_used");
    assert_int_equal(kvt_ns_open(rig.cache, &rig.identity, &rig.layout, &ns), 0);
    assert_int_equal(rig_stat(&rig, "index.namespaces_without_root"), 1);
    assert_int_equal(kvt_flush(rig.cache), 0);
    assert_int_equal(rig_stat(&rig, "disk.bytes_used"), before);
    kvt_close(rig.cache);
    rig.cache = NULL;
}

/* ---- C29 ----------------------------------------------------------------------------------- */

#define FD_THREADS 32
#define FD_BLOCKS 10000u

struct fd_job {
    pthread_t thread;
    uint32_t number;
    int bad;
};

/* Each thread: its share of the blocks in, its share of 1,000 gets of absent ones. */
static void *fd_main(void *arg)
{
    struct fd_job *job = arg;
    uint32_t page = job->number;
    for (uint32_t i = job->number; i < FD_BLOCKS + 1000; i += FD_THREADS) {
        struct kvt_key key = rig_key(i < FD_BLOCKS ? i : 1000000 + i);
        struct kvt_req *req = NULL;
        int rc = i < FD_BLOCKS ? kvt_store(rig.ns, rig.pool, &key, &page, 1, NULL, &req)
                               : kvt_load(rig.ns, rig.pool, &key, &page, 1, NULL, &req);
        if (rc != 0) {
            job->bad++;
            continue;
        }
        job->bad += kvt_req_wait(req, 60000000000) != 1;
        job->bad += i >= FD_BLOCKS && kvt_req_status(req, NULL)[0] != KVT_E_MISS;
        kvt_req_free(req);
    }
    return NULL;
}

static void test_c29_few_descriptors_many_threads(void **state)
{
    static struct fd_job jobs[FD_THREADS];
    struct rlimit old, low;
    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    low = old;
    low.rlim_cur = 64;
    unsigned fds = rig_open_fds();
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    struct rig_shape shape = rig_shape_small(FD_THREADS);
    rig_init(&rig, &shape, "dram=8MiB", "96MiB");
    rig_open(&rig);
    unsigned fds_open = rig_open_fds();
    for (uint32_t i = 0; i < FD_THREADS; i++) {
        rig_fill(&rig, i, i);
        jobs[i] = (struct fd_job){.number = i};
        assert_int_equal(pthread_create(&jobs[i].thread, NULL, fd_main, &jobs[i]), 0);
    }
    for (uint32_t i = 0; i < FD_THREADS; i++) {
        pthread_join(jobs[i].thread, NULL);
        assert_int_equal(jobs[i].bad, 0);
    }
    int rc = kvt_flush(rig.cache); /* as fast as that, some may go before the disk takes them */
    uint64_t lost = rig_stat(&rig, "disk.lost_queue") + rig_stat(&rig, "disk.lost_deferred");
    assert_int_equal(rc, lost ? KVT_E_DROPPED : 0);
    assert_int_equal(rig_stat(&rig, "client.load_miss"), 1000);
    assert_int_equal(rig_stat(&rig, "disk.write_fail"), 0);
    assert_true(rig_open_fds() <= 64);
    assert_true(fds_open <= 64);
    rig_close(&rig);
    assert_int_equal(rig_open_fds(), fds);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
}

/* ---- C31 ----------------------------------------------------------------------------------- */

static void test_c31_resident_memory_stays_within_the_cap(void **state)
{
    struct rig_shape shape = rig_shape_small(64);
    (void)state;
    memory_small_pages();
    rig_init(&rig, &shape, "dram=70MiB,requests_max=16,request_blocks_max=256", NULL);
    rig_open(&rig);
    /* warm what is not the arena: the rings (they go round), stacks, the codec */
    for (uint64_t i = 0; i < 4000; i++) {
        struct kvt_key key = rig_key(1);
        assert_true(kvt_lookup(rig.ns, &key, 1, NULL, NULL) >= 0);
        if (i % 4 == 0)
            assert_true(rig_load(&rig, 1, 8, NULL) <= 8);
    }
    uint64_t before = memory_resident_bytes();
    for (uint64_t seed = 1000; seed < 1000 + 64 * 300; seed += 64) /* 230 MB */
        (void)rig_store(&rig, seed, 64, 0, NULL);
    uint64_t growth = memory_resident_bytes() - before;
    printf("           growth %.1f MiB\n", (double)growth / 1048576);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_true(growth <= UINT64_C(714) * 1048576 / 10);
#endif
    /* It did fill up. Asked of the store: the kernel may join an arena's pages to huge ones, and
     * then counts them again only as they are touched. */
    assert_true(rig_stat(&rig, "dram.bytes_used") > 50u << 20);
}

/* Of this process: on a busy machine others have the processor in between. */
static int64_t processor_ns(void)
{
    struct timespec used;
    assert_int_equal(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used), 0);
    return used.tv_sec * INT64_C(1000000000) + used.tv_nsec;
}

static void test_c31_a_large_cache_opens_at_once(void **state)
{
    struct rig_shape shape = rig_shape_small(4);
    (void)state;
    memory_small_pages();
    rig_init(&rig, &shape, "dram=4GiB", NULL);
    uint64_t before = memory_resident_bytes();
    int64_t start = processor_ns();
    rig_open(&rig);
    int64_t took_ns = processor_ns() - start;
#if defined(__SANITIZE_THREAD__)
    took_ns = 0; /* its shadow memory takes the time */
#endif
    assert_true(took_ns < 1000000000);
    assert_int_equal(rig_stat(&rig, "client.arena_bytes"), UINT64_C(4) << 30);
    printf("           resident after open: %.1f MiB\n",
           (double)(memory_resident_bytes() - before) / 1048576);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_true(memory_resident_bytes() - before < 32u << 20); /* all is touched as it fills */
#endif
}

/* ---- C33, C34 ------------------------------------------------------------------------------ */

static void test_c33_lookups_and_pins_hold_nothing_in_the_end(void **state)
{
    struct rig_shape shape = rig_shape_small(250);
    static struct kvt_key keys[1000];
    (void)state;
    rig_init(&rig, &shape, "dram=32MiB,pin_max=16MiB", NULL);
    rig_open(&rig);
    for (uint32_t i = 0; i < 1000; i += 250)
        assert_int_equal(rig_store(&rig, i, 250, i * 16, NULL), 250);
    for (uint64_t i = 0; i < 1000; i++)
        keys[i] = rig_key(i);
    assert_int_equal(kvt_lookup(rig.ns, keys, 1000, NULL, NULL), 1000);
    assert_int_equal(rig_stat(&rig, "dram.pins"), 0); /* a lookup holds nothing */
    assert_int_equal(kvt_pin(rig.ns, keys, 1000), 1000);
    assert_int_equal(rig_stat(&rig, "pin.blocks"), 1000);
    assert_int_equal(kvt_unpin(rig.ns, keys, 1000), 1000);
    assert_int_equal(rig_stat(&rig, "pin.blocks"), 0);
    assert_int_equal(rig_stat(&rig, "dram.pins"), 0);
    for (uint64_t seed = 10000; seed < 10000 + 250 * 14; seed += 250)
        assert_int_equal(rig_store(&rig, seed, 250, 0, NULL), 250);
    for (uint64_t i = 0; i < 1000; i++) /* all of them could be evicted */
        assert_int_equal(rig_lookup(&rig, i, 1), 0);
}

static void test_c34_cancelled_loads_and_prefetches_give_everything_back(void **state)
{
    struct rig_shape shape = rig_shape_small(32);
    struct kvt_rng rng = {rig_seed()};
    struct kvt_key keys[32];
    uint32_t ids[32];
    (void)state;
    rig_init(&rig, &shape, "dram=2MiB,staging=512KiB", "32MiB");
    rig_open(&rig);
    for (uint64_t seed = 0; seed < 1024; seed += 32) {
        assert_int_equal(rig_store(&rig, seed, 32, 0, NULL), 32);
        assert_int_equal(kvt_flush(rig.cache), 0);
    }
    for (uint32_t i = 0; i < 10000; i++) {
        uint64_t first = kvt_rng_below(&rng, 1024);
        uint32_t n = 1 + (uint32_t)kvt_rng_below(&rng, 32);
        struct kvt_req *req;
        for (uint32_t j = 0; j < n; j++) {
            keys[j] = rig_key(first + j);
            ids[j] = j;
        }
        if (i % 4 == 0) {
            assert_true(kvt_prefetch(rig.ns, keys, n, NULL) >= 0);
            continue;
        }
        assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, n, NULL, &req), 0);
        if (kvt_rng_below(&rng, 3) == 0)
            (void)kvt_req_wait(req, (int64_t)kvt_rng_below(&rng, 200000));
        kvt_req_cancel(req);
        kvt_req_free(req);
    }
    for (int i = 0; i < 6000 && rig_stat(&rig, "dram.pins") != 0; i++)
        rig_sleep_ms(10); /* prefetches end by themselves */
    assert_int_equal(rig_stat(&rig, "dram.pins"), 0);
    assert_int_equal(rig_stat(&rig, "client.requests_held"), 0);
    assert_int_equal(rig_stat(&rig, "client.blocks_held"), 0);
    assert_int_equal(rig_stat(&rig, "verify.checksum_fail"), 0);
    for (uint64_t seed = 0; seed < 1024; seed += 32) /* a full load still fits */
        assert_int_equal(rig_load(&rig, seed, 32, NULL), 32);
}

/* ---- C49 ----------------------------------------------------------------------------------- */

/* In the child: leave by exit() with stores and loads in flight, without closing. */
static int child_exit_busy(const char *dir)
{
    static struct kvt_key keys[256];
    static uint32_t ids[256];
    struct rig_shape shape = rig_shape_small(256);
    struct kvt_req *req;
    open_dir(&shape, "dram=16MiB", dir, "64MiB");
    for (uint32_t i = 0; i < 256; i++) {
        rig_fill(&rig, i, 1 + i);
        keys[i] = rig_key(1 + i);
        ids[i] = i;
    }
    struct kvt_store_opts opts = {.struct_size = sizeof(opts), .exact = 1};
    if (kvt_store(rig.ns, rig.pool, keys, ids, 256, &opts, &req) != 0)
        return 1;
    rig_sleep_ms(3);
    if (kvt_load(rig.ns, rig.pool, keys, ids, 256, NULL, &req) != 0)
        return 1;
    exit(0);
}

static void test_c49_exit_with_io_in_flight(void **state)
{
    struct rig_shape shape = rig_shape_small(256);
    (void)state;
    rig_init(&rig, &shape, "dram=16MiB", "64MiB");
    for (int i = 0; i < 10; i++) {
        assert_int_equal(run_again("exit-busy", rig.dir), 0);
        rig_open(&rig);
        (void)rig_load(&rig, 1, 256, NULL); /* exact or missing */
        rig_close(&rig);
    }
}

static void test_c49_a_child_exits_with_io_in_flight(void **state)
{
    static struct kvt_key keys[256];
    static uint32_t ids[256];
    struct rig_shape shape = rig_shape_small(256);
    (void)state;
    rig_init(&rig, &shape, "dram=16MiB", "64MiB");
    rig_open(&rig);
    for (uint32_t i = 0; i < 256; i++)
        ids[i] = i;
    for (uint64_t round = 0; round < 10; round++) {
        struct kvt_req *req;
        struct kvt_store_opts opts = {.struct_size = sizeof(opts), .exact = 1};
        uint64_t first = 1 + round * 256;
        for (uint32_t i = 0; i < 256; i++) {
            rig_fill(&rig, i, first + i);
            keys[i] = rig_key(first + i);
        }
        assert_int_equal(kvt_pool_reset_origin(rig.pool, ids, 256), 0);
        assert_int_equal(kvt_store(rig.ns, rig.pool, keys, ids, 256, &opts, &req), 0);
        fflush(NULL);
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0)
            exit(7); /* runs destructors and exit handlers */
        int status = 0;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 7);
        assert_int_equal(kvt_req_wait(req, 60000000000), 1);
        for (uint32_t i = 0; i < 256; i++)
            assert_int_equal(kvt_req_status(req, NULL)[i], 0);
        kvt_req_free(req);
        assert_int_equal(rig_load(&rig, first, 256, NULL), 256);
        assert_int_equal(kvt_flush(rig.cache), 0);
    }
    rig_reopen(&rig);
    assert_int_equal(rig_load(&rig, 1 + 9 * 256, 256, NULL), 256);
}

int main(int argc, char **argv)
{
    self = argv[0];
    if (argc == 3 && strcmp(argv[1], "load-500") == 0)
        return child_load_500(argv[2]);
    if (argc == 3 && strcmp(argv[1], "exit-busy") == 0)
        return child_exit_busy(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_c22_all_is_there_after_a_restart_elsewhere, tear_down),
        cmocka_unit_test_teardown(test_c26_larger_than_the_cap_is_refused, tear_down),
        cmocka_unit_test_teardown(test_c29_few_descriptors_many_threads, tear_down),
        cmocka_unit_test_teardown(test_c31_resident_memory_stays_within_the_cap, tear_down),
        cmocka_unit_test_teardown(test_c31_a_large_cache_opens_at_once, tear_down),
        cmocka_unit_test_teardown(test_c33_lookups_and_pins_hold_nothing_in_the_end, tear_down),
        cmocka_unit_test_teardown(test_c34_cancelled_loads_and_prefetches_give_everything_back,
                                  tear_down),
        cmocka_unit_test_teardown(test_c49_exit_with_io_in_flight, tear_down),
        cmocka_unit_test_teardown(test_c49_a_child_exits_with_io_in_flight, tear_down),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed != 0 ? failed : leaks();
}
