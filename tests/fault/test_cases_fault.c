/* Cases from the field once more, on drives that misbehave.
 *
 * Goal:   what these cases demand of a cache on a sound drive holds on a bad one, too, as far as a
 * bad one allows: exact or a miss, each request completes once and in time, nothing stays pinned or
 * held, counters add up, the cap holds; and once the drive is sound, everything works. Method: a
 * whole cache, threads and all, over real files with the fault backend in between (the linker puts
 * it there), for each of the drives below: errors once in a while and for ever, full, slow, lying.
 * C8, C10 and others are run over the fault backend elsewhere (docs/testing.md).
 */
#include "support/rig.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "io/io_posix.h"
#include "support/fault_io.h"

enum { CHAIN = 16, RULES = 4 };

static struct rig rig;
static struct kvt_io *faulty;            /* of the cache that was opened last */
static const struct fault_rule *opening; /* rules from its first operation on */

int __real_kvt_io_files_new(const struct kvt_io_posix_params *params, struct kvt_io **out);
int __wrap_kvt_io_files_new(const struct kvt_io_posix_params *params, struct kvt_io **out);

static void add_rules(const struct fault_rule *rules)
{
    for (int i = 0; rules && i < RULES && rules[i].ops; i++)
        assert_true(fault_io_rule(faulty, &rules[i]) >= 0);
}

int __wrap_kvt_io_files_new(const struct kvt_io_posix_params *params, struct kvt_io **out)
{
    int rc = __real_kvt_io_files_new(params, out);

    if (rc != 0)
        return rc;
    faulty = fault_io_new(*out, 7);
    assert_non_null(faulty);
    add_rules(opening);
    *out = faulty;
    return 0;
}

#define ONCE(bits, after, errno_value)                                                           \
    {                                                                                            \
        .ops = (bits), .skip = (after), .times = 1, .action = FAULT_FAIL, .error = (errno_value) \
    }
static const struct drive {
    const char *name;
    bool lies; /* reports as done what it has not done */
    struct fault_rule rules[RULES];
} drives[] = {
    {"sound", false, {{0}}},
    {"errors now and then",
     false,
     {ONCE(FAULT_DATA, 5, EIO), ONCE(FAULT_DATA, 23, EIO), ONCE(FAULT_DATA, 60, EIO),
      ONCE(FAULT_CONTROL, 9, EIO)}},
    {"no write succeeds", false, {{.ops = FAULT_WRITE, .action = FAULT_FAIL, .error = EIO}}},
    {"no read succeeds", false, {{.ops = FAULT_READ, .action = FAULT_FAIL, .error = EIO}}},
    {"no sync succeeds", false, {{.ops = FAULT_SYNC, .action = FAULT_FAIL, .error = EIO}}},
    {"full",
     false,
     {{.ops = FAULT_WRITE | FAULT_ALLOCATE, .skip = 4, .action = FAULT_FAIL, .error = ENOSPC}}},
    {"short reads", false, {{.ops = FAULT_READ, .action = FAULT_SHORT, .arg = 1}}},
    {"a busy queue", false, {{.ops = FAULT_DATA, .skip = 3, .times = 50, .action = FAULT_BUSY}}},
    {"wrong bits on reading",
     true,
     {{.ops = FAULT_READ, .action = FAULT_FLIP, .arg = FAULT_RANDOM}}},
    {"wrong bits on writing",
     true,
     {{.ops = FAULT_WRITE, .action = FAULT_FLIP, .arg = FAULT_RANDOM}}},
    {"lost writes", true, {{.ops = FAULT_WRITE, .action = FAULT_LOST}}},
    {"misdirected writes", true, {{.ops = FAULT_WRITE, .action = FAULT_MISDIRECT, .arg = 3}}},
    {"torn writes", true, {{.ops = FAULT_WRITE, .action = FAULT_TORN, .arg = 9}}},
};

static int tear_down(void **state)
{
    (void)state;
    opening = NULL;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

/* A cache on a sound root; the rules of the drive hold from now on. */
static void begin(const struct drive *drive, const char *config, const char *cap, uint32_t pages)
{
    struct rig_shape shape = rig_shape_small(pages);

    printf("           %s\n", drive->name);
    rig_init(&rig, &shape, config, cap);
    rig_open(&rig);
    add_rules(drive->rules);
}

/* What must hold whatever the drive has done, and that it works again when the drive does. Where it
 * has lied, the segment in use may be one that no restart can read: a restart finds that out. */
static void finish(const struct drive *drive)
{
    fault_io_clear(faulty);
    for (int i = 0; i < 6000 && rig_stat(&rig, "dram.pins") != 0; i++)
        rig_sleep_ms(10);       /* prefetches and writes end by themselves */
    (void)kvt_flush(rig.cache); /* says what went wrong before */
    assert_int_equal(rig_stat(&rig, "dram.pins"), 0);
    assert_int_equal(rig_stat(&rig, "client.requests_held"), 0);
    assert_int_equal(rig_stat(&rig, "client.blocks_held"), 0);
    if (drive->lies)
        rig_reopen(&rig);
    for (int i = 0; i < 400; i++) { /* a pause after errors takes up to 16 s */
        (void)rig_store(&rig, 900001, CHAIN, 0, NULL);
        if (kvt_flush(rig.cache) == 0)
            break;
        rig_sleep_ms(50);
    }
    rig_reopen(&rig);
    assert_int_equal(rig_stat(&rig, "disk.roots"), 1);
    assert_int_equal(rig_load(&rig, 900001, CHAIN, NULL), CHAIN);
    tear_down(NULL);
}

static void store_chains(uint64_t chains)
{
    for (uint64_t chain = 0; chain < chains; chain++) {
        (void)rig_store(&rig, 1 + chain * CHAIN, CHAIN, 0, NULL);
        if (chain % 4 == 3)
            (void)kvt_flush(rig.cache);
    }
}

static uint64_t load_chains(uint64_t chains)
{
    uint64_t got = 0;

    for (uint64_t chain = 0; chain < chains; chain++)
        got += rig_load(&rig, 1 + chain * CHAIN, CHAIN, NULL);
    return got;
}

/* C9: more keys than staging has room for, the drive being what it is: statuses, no hang. */
static void test_c9_staging_on_bad_drives(void **state)
{
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(drives); i++) {
        begin(&drives[i], "dram=1MiB,staging=64KiB", "32MiB", 4 * CHAIN);
        store_chains(16);
        for (uint64_t first = 1; first < 16 * CHAIN; first += 4 * CHAIN) {
            int64_t start = rig_now_ns();

            (void)rig_load(&rig, first, 4 * CHAIN, NULL);
            assert_true(rig_now_ns() - start < INT64_C(20000000000));
        }
        finish(&drives[i]);
    }
}

/* C22, C25: after a restart what is found is exact, the bytes accounted are those on disk, and they
 * have never been more than the cap. */
static void test_c22_c25_restart_and_cap_on_bad_drives(void **state)
{
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(drives); i++) {
        uint64_t accounted, actual;

        begin(&drives[i], "dram=2MiB", "8MiB", CHAIN);
        for (uint64_t chain = 0; chain < 60; chain++) {
            (void)rig_store(&rig, 1 + chain * CHAIN, CHAIN, 0, NULL);
            assert_true(rig_dir_bytes(rig.dir, NULL) <= 8u << 20);
        }
        (void)kvt_flush(rig.cache);
        (void)load_chains(60);
        fault_io_clear(faulty);
        rig_reopen(&rig);
        (void)load_chains(60);
        accounted = rig_stat(&rig, "disk.bytes_used");
        actual = rig_dir_bytes(rig.dir, NULL);
        if (accounted > actual + actual / 100 || actual > accounted + accounted / 100 + 65536)
            fail_msg("accounted %llu, actual %llu", (unsigned long long)accounted,
                     (unsigned long long)actual);
        finish(&drives[i]);
    }
}

/* C7, C22: the root is opened on the bad drive itself. */
static void test_c22_opened_on_bad_drives(void **state)
{
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(drives); i++) {
        begin(&drives[0], "dram=2MiB", "32MiB", CHAIN);
        store_chains(32);
        assert_int_equal(kvt_flush(rig.cache), 0);
        rig_close(&rig);
        printf("           %s, while it is opened\n", drives[i].name);
        opening = drives[i].rules;
        rig_open(&rig);
        (void)load_chains(32);
        (void)rig_store(&rig, 5001, CHAIN, 0, NULL);
        opening = NULL;
        rig_reopen(&rig);
        if (!drives[i].lies) /* only late, or not at all: what was durable is still there */
            assert_int_equal(load_chains(32), 32 * CHAIN);
        else
            (void)load_chains(32);
        finish(&drives[i]);
    }
}

/* C33, C34, C53: cancelled at any moment, loads and prefetches complete once and hold nothing. */
static void test_c34_c53_cancelled_on_bad_drives(void **state)
{
    struct kvt_rng rng = {rig_seed()};

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(drives); i++) {
        struct kvt_key keys[CHAIN];
        uint32_t ids[CHAIN];

        begin(&drives[i], "dram=1MiB,staging=256KiB", "32MiB", CHAIN);
        store_chains(16);
        for (int round = 0; round < 300; round++) {
            uint64_t first = 1 + kvt_rng_below(&rng, 16) * CHAIN;
            struct kvt_req *req;

            for (uint32_t j = 0; j < CHAIN; j++) {
                keys[j] = rig_key(first + j);
                ids[j] = j;
            }
            if (round % 4 == 0) {
                assert_true(kvt_prefetch(rig.ns, keys, CHAIN, NULL) >= 0);
                continue;
            }
            assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, CHAIN, NULL, &req), 0);
            if (kvt_rng_below(&rng, 2))
                (void)kvt_req_wait(req, (int64_t)kvt_rng_below(&rng, 300000));
            kvt_req_cancel(req);
            assert_int_equal(kvt_req_wait(req, INT64_C(60000000000)), 1);
            for (uint32_t j = 0; j < CHAIN; j++)
                if (kvt_req_status(req, NULL)[j] == 0)
                    assert_true(rig_same(&rig, j, first + j));
            kvt_req_free(req);
        }
        finish(&drives[i]);
    }
}

/* ---- C50 ---- */

struct job {
    pthread_t thread;
    uint32_t number;
    uint64_t seed, bad;
};

static void *thread_main(void *arg)
{
    struct job *job = arg;
    struct kvt_rng rng = {job->seed};
    struct kvt_store_opts opts = {.struct_size = sizeof(opts), .exact = 1};

    for (int round = 0; round < 60; round++) {
        uint64_t first = 1 + kvt_rng_below(&rng, 32) * 4;
        bool load = kvt_rng_below(&rng, 2) == 0;
        struct kvt_key keys[4];
        uint32_t ids[4];
        struct kvt_req *req;
        int rc;

        for (uint32_t i = 0; i < 4; i++) {
            keys[i] = rig_key(first + i);
            ids[i] = job->number * 4 + i;
            rig_fill(&rig, ids[i], load ? 0 : first + i);
        }
        job->bad += kvt_pool_reset_origin(rig.pool, ids, 4) != 0;
        rc = load ? kvt_load(rig.ns, rig.pool, keys, ids, 4, NULL, &req)
                  : kvt_store(rig.ns, rig.pool, keys, ids, 4, &opts, &req);
        if (rc != 0)
            continue;
        job->bad += kvt_req_wait(req, INT64_C(60000000000)) != 1;
        for (uint32_t i = 0; load && i < 4; i++)
            job->bad += !rig_same(&rig, ids[i], kvt_req_status(req, NULL)[i] ? 0 : first + i);
        kvt_req_free(req);
        if (round % 20 == 19)
            (void)kvt_purge(rig.ns, keys, 4); /* its journal may fail */
    }
    return NULL;
}

static void test_c50_many_threads_on_bad_drives(void **state)
{
    static struct job jobs[16];

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(drives); i++) {
        begin(&drives[i], "dram=832KiB,staging=64KiB,threads=2", "8MiB", 64);
        for (uint32_t j = 0; j < 16; j++) {
            jobs[j] = (struct job){.number = j, .seed = 1 + j};
            assert_int_equal(pthread_create(&jobs[j].thread, NULL, thread_main, &jobs[j]), 0);
        }
        for (uint32_t j = 0; j < 16; j++) {
            pthread_join(jobs[j].thread, NULL);
            assert_int_equal(jobs[j].bad, 0);
        }
        finish(&drives[i]);
    }
}

/* C80: what the store granted is what the client decoded, or said why not. */
static void test_c80_counters_on_bad_drives(void **state)
{
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(drives); i++) {
        begin(&drives[i], "dram=512KiB,staging=64KiB", "8MiB", CHAIN);
        store_chains(20);
        (void)load_chains(20);
        assert_int_equal(rig_stat(&rig, "load.granted_dram") + rig_stat(&rig, "load.granted_disk"),
                         rig_stat(&rig, "client.load_blocks") + rig_stat(&rig, "client.load_late") +
                             rig_stat(&rig, "client.load_canceled") +
                             rig_stat(&rig, "client.load_corrupt"));
        assert_int_equal(rig_stat(&rig, "store.committed"), rig_stat(&rig, "client.store_blocks"));
        finish(&drives[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_c9_staging_on_bad_drives, tear_down),
        cmocka_unit_test_teardown(test_c22_c25_restart_and_cap_on_bad_drives, tear_down),
        cmocka_unit_test_teardown(test_c22_opened_on_bad_drives, tear_down),
        cmocka_unit_test_teardown(test_c34_c53_cancelled_on_bad_drives, tear_down),
        cmocka_unit_test_teardown(test_c50_many_threads_on_bad_drives, tear_down),
        cmocka_unit_test_teardown(test_c80_counters_on_bad_drives, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
