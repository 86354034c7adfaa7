/* Failures from the field about requests and concurrency: C50 C53 C54 C60 C80.
 *
 * Method: many threads over few keys and fewer slots, with cancels at every moment; what a block
 * holds follows from its key, so any other byte is found. C50 runs KVT_TEST_SECONDS (3 by default).
 */
#include "support/rig.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"

static struct rig rig;

static int tear_down(void **state)
{
    (void)state;
    if (rig.cache != NULL) {
        assert_int_equal(rig_stat(&rig, "client.bad_move"), 0);
        assert_int_equal(rig_stat(&rig, "client.bad_reply"), 0);
    }
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

/* ---- C50 ----------------------------------------------------------------------------------- */

#define C50_THREADS 16u
#define C50_KEYS 256u
#define C50_RUN 4u /* blocks of one request; each thread has as many pages */

struct c50_job {
    pthread_t thread;
    uint32_t number;
    uint64_t seed, until_ns;
    uint64_t loaded, stored, bad;
};

static void c50_once(struct c50_job *job, struct kvt_rng *rng)
{
    struct kvt_key keys[C50_RUN];
    uint32_t ids[C50_RUN];
    struct kvt_req *req;
    uint64_t first = kvt_rng_below(rng, C50_KEYS - C50_RUN);
    uint32_t n = 1 + (uint32_t)kvt_rng_below(rng, C50_RUN);
    bool load = kvt_rng_below(rng, 2) == 0;
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = rig_key(first + i);
        ids[i] = job->number * C50_RUN + i;
        if (load)
            rig_poison(&rig, ids[i], 0xa5);
        else
            rig_fill(&rig, ids[i], first + i);
    }
    struct kvt_store_opts opts = {.struct_size = sizeof(opts), .exact = 1};
    (void)kvt_pool_reset_origin(rig.pool, ids, n);
    int rc = load ? kvt_load(rig.ns, rig.pool, keys, ids, n, NULL, &req)
                  : kvt_store(rig.ns, rig.pool, keys, ids, n, &opts, &req);
    if (rc != 0) {
        job->bad += rc != -EAGAIN;
        return;
    }
    if (kvt_rng_below(rng, 8) == 0)
        kvt_req_cancel(req);
    job->bad += kvt_req_wait(req, 60000000000) != 1;
    const int32_t *status = kvt_req_status(req, NULL);
    for (uint32_t i = 0; i < n; i++) {
        bool fine = !load || (status[i] == 0 ? rig_same(&rig, ids[i], first + i)
                                             : rig_poisoned(&rig, ids[i], 0xa5));
        if (!fine)
            printf("           block %llu, page %u, status %d: wrong bytes\n",
                   (unsigned long long)(first + i), ids[i], status[i]);
        job->bad += !fine;
        job->loaded += load && status[i] == 0;
        job->stored += !load && status[i] == 0;
    }
    kvt_req_free(req);
    long result = 0;
    if (kvt_rng_below(rng, 64) == 0)
        result = kvt_purge(rig.ns, keys, n);
    if (kvt_rng_below(rng, 16) == 0 && result >= 0)
        result = kvt_lookup(rig.ns, keys, n, NULL, NULL);
    if (result < 0)
        printf("           purge or lookup: %s\n", kvt_strerror((int)result));
    job->bad += result < 0;
}

static void *c50_main(void *arg)
{
    struct c50_job *job = arg;
    struct kvt_rng rng = {job->seed};
    while ((uint64_t)rig_now_ns() < job->until_ns)
        c50_once(job, &rng);
    return NULL;
}

static void c50_run(const char *config, const char *disk)
{
    static struct c50_job jobs[C50_THREADS];
    const char *seconds = getenv("KVT_TEST_SECONDS");
    uint64_t ns = (seconds ? strtoull(seconds, NULL, 10) : 3) * 1000000000u, seed = rig_seed();
    struct rig_shape shape = rig_shape_small(C50_THREADS * C50_RUN);
    uint64_t loaded = 0, stored = 0;
    rig_init(&rig, &shape, config, disk);
    rig_open(&rig);
    for (uint32_t i = 0; i < C50_THREADS; i++) {
        jobs[i] = (struct c50_job){
            .number = i, .seed = seed + i, .until_ns = (uint64_t)rig_now_ns() + ns};
        assert_int_equal(pthread_create(&jobs[i].thread, NULL, c50_main, &jobs[i]), 0);
    }
    for (uint32_t i = 0; i < C50_THREADS; i++) {
        pthread_join(jobs[i].thread, NULL);
        assert_int_equal(jobs[i].bad, 0);
        loaded += jobs[i].loaded;
        stored += jobs[i].stored;
    }
    printf("           %llu loaded, %llu stored\n", (unsigned long long)loaded,
           (unsigned long long)stored);
    assert_true(loaded > 0 && stored > 0);
    int rc = kvt_flush(rig.cache); /* writes hold slots too */
    assert_true(rc == 0 || rc == KVT_E_DROPPED);
    assert_int_equal(rig_stat(&rig, "dram.pins"), 0);
    assert_int_equal(rig_stat(&rig, "verify.checksum_fail"), 0);
    assert_int_equal(rig_stat(&rig, "client.requests_held"), 0);
}

static void test_c50_sixteen_threads_over_64_slots(void **state)
{
    (void)state;
    c50_run("dram=832KiB,staging=64KiB,threads=4", NULL); /* 64 records of 12 KiB, and staging */
}

static void test_c50_the_same_with_a_disk(void **state)
{
    (void)state;
    c50_run("dram=832KiB,staging=256KiB,threads=2", "8MiB");
}

/* ---- C53 ----------------------------------------------------------------------------------- */

static void test_c53_cancel_at_any_moment_completes_once(void **state)
{
    struct rig_shape shape = rig_shape_small(64);
    struct kvt_rng rng = {rig_seed()};
    struct kvt_key keys[64];
    uint32_t ids[64];
    uint64_t requests = 0, events = 0, value;
    (void)state;
    rig_init(&rig, &shape, "dram=4MiB,staging=512KiB", "32MiB");
    rig_open(&rig);
    for (uint32_t i = 0; i < 64; i++) {
        keys[i] = rig_key(i);
        ids[i] = i;
        rig_fill(&rig, i, i);
    }
    for (int round = 0; round < 2000; round++) {
        struct kvt_store_opts opts = {.struct_size = sizeof(opts), .exact = 1};
        bool load = round % 2 != 0;
        struct kvt_req *req;
        if (!load) {
            for (uint32_t i = 0; i < 64; i++)
                rig_fill(&rig, i, i);
            assert_int_equal(kvt_pool_reset_origin(rig.pool, ids, 64), 0);
        }
        int rc = load ? kvt_load(rig.ns, rig.pool, keys, ids, 64, NULL, &req)
                      : kvt_store(rig.ns, rig.pool, keys, ids, 64, &opts, &req);
        assert_int_equal(rc, 0);
        requests++;
        uint64_t when = kvt_rng_below(&rng, 4);
        if (when == 0)
            kvt_req_cancel(req); /* before */
        else if (when < 3)
            (void)kvt_req_wait(req, (int64_t)kvt_rng_below(&rng, 400000)); /* during */
        else
            (void)kvt_req_wait(req, -1); /* after */
        kvt_req_cancel(req);
        kvt_req_cancel(req);
        assert_int_equal(kvt_req_wait(req, 60000000000), 1);
        size_t n;
        const int32_t *status = kvt_req_status(req, &n);
        for (size_t i = 0; i < n; i++) {
            bool fine = status[i] == 0 || status[i] == KVT_E_CANCELED ||
                        status[i] == KVT_E_EXISTS || status[i] == KVT_E_MISS;
            if (!fine)
                fail_msg("status %d", status[i]);
            if (load && status[i] == 0)
                assert_true(rig_same(&rig, (uint32_t)i, i));
        }
        if (load) /* after completion no byte is written */
            rig_poison(&rig, 0, 0xa5);
        kvt_req_free(req);
        if (load && round % 50 == 1) {
            rig_sleep_ms(2);
            assert_true(rig_poisoned(&rig, 0, 0xa5));
        }
        if (round % 16 == 0)
            assert_true(kvt_purge(rig.ns, keys + 32, 32) >= 0);
    }
    if (read(kvt_event_fd(rig.cache), &value, sizeof(value)) == (ssize_t)sizeof(value))
        events += value;
    assert_int_equal(events, requests); /* exactly one completion each */
    assert_int_equal(rig_stat(&rig, "client.completed"), requests);
    assert_int_equal(rig_stat(&rig, "client.requests_active"), 0);
    assert_int_equal(kvt_flush(rig.cache), 0); /* writes hold slots too */
    assert_int_equal(rig_stat(&rig, "dram.pins"), 0);
}

/* ---- C54 ----------------------------------------------------------------------------------- */

static void test_c54_pending_until_committed_then_exact(void **state)
{
    struct rig_shape shape = rig_shape_large(64);
    struct kvt_key keys[32];
    uint32_t ids[32];
    enum kvt_tier tiers[32];
    unsigned pending = 0;
    (void)state;
    rig_init(&rig, &shape, "dram=256MiB,threads=1", NULL);
    rig_open(&rig);
    for (uint64_t round = 0; round < 20; round++) {
        struct kvt_store_opts opts = {.struct_size = sizeof(opts), .exact = 1};
        struct kvt_req *req;
        for (uint32_t i = 0; i < 32; i++) {
            keys[i] = rig_key(round * 32 + i);
            ids[i] = 32 + i; /* rig_load() below uses pages from 0 on */
            rig_fill(&rig, ids[i], round * 32 + i);
        }
        assert_int_equal(kvt_pool_reset_origin(rig.pool, ids, 32), 0);
        assert_int_equal(kvt_store(rig.ns, rig.pool, keys, ids, 32, &opts, &req), 0);
        long last = 0;
        do {
            long run = kvt_lookup(rig.ns, keys, 32, NULL, tiers);
            assert_in_range(run, last, 32); /* blocks appear one by one and stay */
            for (long i = 0; i < 32; i++) {
                assert_true(i < run ? tiers[i] == KVT_TIER_DRAM
                                    : tiers[i] == KVT_TIER_MISS || tiers[i] == KVT_TIER_PENDING);
                pending += tiers[i] == KVT_TIER_PENDING;
            }
            assert_int_equal(rig_load(&rig, round * 32, (uint32_t)run, NULL), run);
            last = run;
        } while (kvt_req_wait(req, 0) == 0);
        kvt_req_free(req);
        assert_int_equal(kvt_lookup(rig.ns, keys, 32, NULL, NULL), 32);
    }
    printf("           PENDING seen %u times\n", pending);
    assert_true(pending > 0);
}

/* A committed block stays in DRAM until the disk has it: with a small DRAM, everything that lookup
 * promises can be loaded, also what the write queue had no room for: a load pushes nothing out that
 * is on no disk. Excepted is what a slow disk kept waiting for a slot, which is counted. */
static void test_c54_the_upper_copy_stays_until_the_lower_is_there(void **state)
{
    struct rig_shape shape = rig_shape_small(16);
    uint64_t lacking = 0;
    (void)state;
    rig_init(&rig, &shape, "dram=1MiB,staging=256KiB", "64MiB");
    rig_open(&rig);
    for (uint64_t seed = 0; seed < 100 * 16; seed += 16) {
        assert_true(rig_store(&rig, seed, 16, 0, NULL) <= 16);
        long run = rig_lookup(&rig, seed, 16);
        long loaded = rig_load(&rig, seed, (uint32_t)run, NULL);
        assert_in_range(loaded, 0, run);
        lacking += loaded < run;
    }
    printf("           %llu of 100 chains not whole, %llu blocks waited in vain for a slot\n",
           (unsigned long long)lacking, (unsigned long long)rig_stat(&rig, "load.no_slot"));
    assert_true(lacking <= rig_stat(&rig, "load.no_slot"));
}

static void test_c60_one_token_is_left_to_compute(void **state)
{
    (void)state;
    assert_int_equal(kvt_usable_blocks(16, 100) * 16, 96);
    assert_int_equal(kvt_usable_blocks(16, 97) * 16, 96);
    assert_int_equal(kvt_usable_blocks(16, 96) * 16, 80);
    assert_int_equal(kvt_usable_blocks(16, 16), 0);
    assert_int_equal(kvt_usable_blocks(16, 15), 0);
    assert_int_equal(kvt_usable_blocks(16, 1), 0);
    assert_int_equal(kvt_usable_blocks(16, 0), 0);
    assert_int_equal(kvt_usable_blocks(0, 100), 0);
    assert_int_equal(kvt_usable_blocks(1, SIZE_MAX), SIZE_MAX - 1);
}

/* C60: only the pages named by a load are written. */
static void test_c60_resident_blocks_are_not_overwritten(void **state)
{
    struct rig_shape shape = rig_shape_small(12);
    struct kvt_key keys[4];
    const uint32_t ids[4] = {9, 1, 6, 4};
    struct kvt_req *req;
    (void)state;
    rig_init(&rig, &shape, "dram=4MiB", NULL);
    rig_open(&rig);
    assert_int_equal(rig_store(&rig, 1, 4, 0, NULL), 4);
    for (uint32_t i = 0; i < 12; i++)
        rig_fill(&rig, i, 500 + i);
    for (uint64_t i = 0; i < 4; i++)
        keys[i] = rig_key(1 + i);
    assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, 4, NULL, &req), 0);
    kvt_req_free(req);
    for (uint32_t page = 0; page < 12; page++) {
        uint64_t want = 500 + page;
        for (uint32_t i = 0; i < 4; i++)
            want = ids[i] == page ? 1 + i : want;
        assert_true(rig_same(&rig, page, want));
    }
}

/* ---- C80 ----------------------------------------------------------------------------------- */

static void test_c80_counters_add_up_and_only_rise(void **state)
{
    struct rig_shape shape = rig_shape_small(8);
    struct kvt_rng rng = {rig_seed()};
    struct kvt_key keys[8];
    uint64_t asked = 0, hits = 0, short_runs = 0, last_loaded = 0;
    (void)state;
    rig_init(&rig, &shape, "dram=512KiB,staging=64KiB", "8MiB");
    rig_open(&rig);
    for (uint32_t op = 0; op < 10000; op++) {
        uint64_t first = kvt_rng_below(&rng, 200);
        uint32_t n = 1 + (uint32_t)kvt_rng_below(&rng, 8);
        switch (kvt_rng_below(&rng, 8)) {
        case 0:
            (void)rig_store(&rig, first, n, 0, NULL);
            break;
        case 1:
            (void)rig_load(&rig, first, n, NULL);
            break;
        default:
            for (uint32_t i = 0; i < n; i++)
                keys[i] = rig_key(first + i);
            long run = kvt_lookup(rig.ns, keys, n, NULL, NULL);
            assert_in_range(run, 0, n);
            asked += n;
            hits += (uint64_t)run;
            short_runs += (uint32_t)run < n;
        }
        if (op % 1000 == 0) {
            uint64_t loaded = rig_stat(&rig, "client.load_blocks");
            assert_true(loaded >= last_loaded);
            last_loaded = loaded;
        }
    }
    assert_int_equal(rig_stat(&rig, "lookup.keys"), asked);
    assert_int_equal(rig_stat(&rig, "lookup.hits_dram") + rig_stat(&rig, "lookup.hits_disk"), hits);
    assert_int_equal(rig_stat(&rig, "lookup.miss_absent") + rig_stat(&rig, "lookup.miss_level") +
                         rig_stat(&rig, "lookup.miss_pending"),
                     short_runs);
    /* what the store granted is what the client decoded or said why not */
    assert_int_equal(rig_stat(&rig, "load.granted_dram") + rig_stat(&rig, "load.granted_disk"),
                     rig_stat(&rig, "client.load_blocks") + rig_stat(&rig, "client.load_late") +
                         rig_stat(&rig, "client.load_canceled") +
                         rig_stat(&rig, "client.load_corrupt"));
    assert_int_equal(rig_stat(&rig, "store.committed"), rig_stat(&rig, "client.store_blocks"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_c50_sixteen_threads_over_64_slots, tear_down),
        cmocka_unit_test_teardown(test_c50_the_same_with_a_disk, tear_down),
        cmocka_unit_test_teardown(test_c53_cancel_at_any_moment_completes_once, tear_down),
        cmocka_unit_test_teardown(test_c54_pending_until_committed_then_exact, tear_down),
        cmocka_unit_test_teardown(test_c54_the_upper_copy_stays_until_the_lower_is_there,
                                  tear_down),
        cmocka_unit_test_teardown(test_c60_one_token_is_left_to_compute, tear_down),
        cmocka_unit_test_teardown(test_c60_resident_blocks_are_not_overwritten, tear_down),
        cmocka_unit_test_teardown(test_c80_counters_add_up_and_only_rise, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
