/* A concurrent history, checked: sixteen threads store, load, cancel, purge, prefetch, pin and
 * flush over few keys and fewer slots, so that blocks are evicted all the time.
 *
 * Goal:   a load answers with whole bytes of one store of that key that had begun, was not refused
 *         and was not purged before the load began; or with a miss.
 * Method: no two stores write the same bytes; a page begins with its version and continues with
 *         what follows from it. support/history.h decides; the first test shows that it can say no.
 *         An operation is one block stored, loaded or purged. KVT_HISTORY_OPS of them, or as many
 *         as KVT_SOAK_SECONDS has time for (of both the fewer); with DRAM alone, with a disk, and
 *         with a small disk whose segments are recycled. The thread sanitizer's build is the one
 *         that counts.
 */
#include "support/rig.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "support/history.h"
#include "support/tally.h"

enum {
    RUN = 8,   /* blocks of a request; each thread has as many pages */
    FEW = 5000 /* operations: of so few none need have been a load that found something */
};

#if defined(__SANITIZE_ADDRESS__)
#define OPERATIONS 300000u
#else
#define OPERATIONS 1000000u
#endif

static struct rig rig;
static struct history *history;
static _Atomic uint64_t operations, wrong;
static uint64_t tried, failed;

/* ---- the checker can say no ---- */

static void test_the_checker_says_no(void **state)
{
    struct history *h = history_new();
    uint64_t one, two, barrier, purge;

    (void)state;
    assert_non_null(h);
    barrier = history_load_begin(h, 5);
    one = history_store_begin(h, 3, 5);
    assert_int_equal(history_load_check(h, 5, barrier, one), HISTORY_FINE); /* not ended yet */
    history_store_end(h, one, true);
    assert_int_equal(history_load_check(h, 5, barrier, one), HISTORY_FINE);
    assert_int_equal(history_load_check(h, 6, barrier, one), HISTORY_OTHER_KEY);
    assert_int_equal(history_load_check(h, 5, barrier, 0), HISTORY_OTHER_KEY);
    assert_int_equal(history_load_check(h, 5, barrier, one + 1), HISTORY_NEVER_BEGUN);
    two = history_store_begin(h, 3, 5);
    history_store_end(h, two, false);
    assert_int_equal(history_load_check(h, 5, barrier, two), HISTORY_NOT_TAKEN);
    purge = history_purge_begin(h);
    barrier = history_load_begin(h, 5); /* the purge has not returned */
    two = history_store_begin(h, 4, 5);
    history_store_end(h, two, true); /* during the purge: may be gone or not */
    history_purge_end(h, 5, purge);
    assert_int_equal(history_load_check(h, 5, barrier, one), HISTORY_FINE);
    barrier = history_load_begin(h, 5);
    assert_int_equal(history_load_check(h, 5, barrier, one), HISTORY_PURGED);
    assert_int_equal(history_load_check(h, 5, barrier, two), HISTORY_FINE);
    assert_int_equal(history_load_check(h, 6, history_load_begin(h, 6), one), HISTORY_OTHER_KEY);
    for (int i = 0; i < HISTORY_RING; i++) /* the first store is forgotten, and still purged */
        history_store_end(h, history_store_begin(h, 3, 7), true);
    assert_int_equal(history_load_check(h, 5, barrier, one), HISTORY_FINE); /* milder, ... */
    purge = history_purge_begin(h);
    history_purge_end(h, 5, purge);
    barrier = history_load_begin(h, 5); /* ... but not blind */
    assert_int_equal(history_load_check(h, 5, barrier, one), HISTORY_PURGED);
    history_free(h);
}

/* ---- the threads ---- */

struct job {
    pthread_t thread;
    uint32_t number;
    struct kvt_rng rng;
    uint64_t until_ns, limit;
    uint64_t loaded, stored, purged, canceled, refused;
    struct kvt_key keys[RUN];
    uint32_t ids[RUN], first, n;
};

/* Where a page's version stands: its first bytes. */
static uint8_t *head_of(uint32_t page)
{
    return rig.memory[0] + page * (size_t)rig.places[0].stride_block;
}

static void write_page(uint32_t page, uint64_t version)
{
    rig_fill(&rig, page, version);
    memcpy(head_of(page), &version, sizeof(version));
}

/* The version of a page whose every byte is as it was written; 0: it is not. */
static uint64_t read_page(uint32_t page)
{
    uint64_t version, word;
    struct kvt_rng rng;

    memcpy(&version, head_of(page), sizeof(version));
    rng.state = version;
    word = kvt_rng_next(&rng);
    memcpy(head_of(page), &word, sizeof(word));
    return rig_same(&rig, page, version) ? version : 0;
}

static void blame(uint32_t key, const char *what)
{
    if (atomic_fetch_add(&wrong, 1) < 20)
        printf("           key %u: %s\n", key, what);
}

static void wait_for(struct job *job, struct kvt_req *req)
{
    if (kvt_rng_below(&job->rng, 8) == 0) {
        (void)kvt_req_wait(req, (int64_t)kvt_rng_below(&job->rng, 200000));
        kvt_req_cancel(req);
    }
    if (kvt_req_wait(req, INT64_C(120000000000)) != 1)
        blame(job->first, "a request that does not end");
}

static void store(struct job *job)
{
    struct kvt_store_opts opts = {.struct_size = sizeof(opts), .exact = 1};
    uint64_t versions[RUN];
    struct kvt_req *req;
    int rc;

    for (uint32_t i = 0; i < job->n; i++) {
        versions[i] = history_store_begin(history, job->number, job->first + i);
        write_page(job->ids[i], versions[i]);
    }
    if (kvt_pool_reset_origin(rig.pool, job->ids, job->n) != 0)
        blame(job->first, "reset_origin");
    rc = kvt_store(rig.ns, rig.pool, job->keys, job->ids, job->n, &opts, &req);
    if (rc == 0)
        wait_for(job, req);
    else if (rc != -EAGAIN)
        blame(job->first, "a store that was refused");
    for (uint32_t i = 0; i < job->n; i++) {
        int32_t status = rc ? rc : kvt_req_status(req, NULL)[i];

        /* of a cancelled one it is not told whether it came before or after its commit */
        history_store_end(history, versions[i], status == 0 || status == KVT_E_CANCELED);
        job->stored += status == 0;
        job->canceled += status == KVT_E_CANCELED;
    }
    if (rc == 0)
        kvt_req_free(req);
}

static void load(struct job *job)
{
    uint64_t begun[RUN];
    struct kvt_req *req;

    for (uint32_t i = 0; i < job->n; i++) {
        rig_poison(&rig, job->ids[i], 0xa5);
        begun[i] = history_load_begin(history, job->first + i);
    }
    if (kvt_load(rig.ns, rig.pool, job->keys, job->ids, job->n, NULL, &req) != 0)
        return;
    wait_for(job, req);
    for (uint32_t i = 0; i < job->n; i++) {
        int32_t status = kvt_req_status(req, NULL)[i];
        uint64_t version;
        enum history_verdict verdict;

        if (status != 0) {
            if (!rig_poisoned(&rig, job->ids[i], 0xa5))
                blame(job->first + i, "a page that was touched by a miss");
            continue;
        }
        job->loaded++;
        version = read_page(job->ids[i]);
        verdict = history_load_check(history, job->first + i, begun[i], version);
        if (verdict != HISTORY_FINE)
            blame(job->first + i, version ? history_verdict_name(verdict) : "torn bytes");
    }
    kvt_req_free(req);
}

static void purge(struct job *job)
{
    bool all = kvt_rng_below(&job->rng, 256) == 0;
    uint64_t begun = history_purge_begin(history);

    if (kvt_purge(rig.ns, all ? NULL : job->keys, all ? 0 : job->n) < 0) {
        blame(job->first, "a purge that failed");
        return;
    }
    for (uint32_t key = 0; key < HISTORY_KEYS; key++)
        if (all || (key >= job->first && key < job->first + job->n))
            history_purge_end(history, key, begun);
    job->purged += job->n;
}

static void step(struct job *job)
{
    uint64_t what = kvt_rng_below(&job->rng, 1000);

    job->n = 1 + (uint32_t)kvt_rng_below(&job->rng, RUN);
    job->first = (uint32_t)kvt_rng_below(&job->rng, HISTORY_KEYS - RUN);
    for (uint32_t i = 0; i < job->n; i++)
        job->keys[i] = rig_key(1 + job->first + i);
    if (what < 450)
        load(job);
    else if (what < 850)
        store(job);
    else if (what < 890)
        purge(job);
    else if (what < 940)
        job->refused += kvt_prefetch(rig.ns, job->keys, job->n, NULL) < 0;
    else if (what < 999)
        job->refused +=
            kvt_pin(rig.ns, job->keys, job->n) < 0 || kvt_unpin(rig.ns, job->keys, job->n) < 0;
    else
        job->refused += kvt_flush(rig.cache) == KVT_E_CLOSED;
    if (what < 890)
        atomic_fetch_add_explicit(&operations, job->n, memory_order_relaxed);
}

static void *thread_main(void *arg)
{
    struct job *job = arg;

    while (atomic_load_explicit(&operations, memory_order_relaxed) < job->limit &&
           (uint64_t)rig_now_ns() < job->until_ns)
        step(job);
    return NULL;
}

/* Nothing stays pinned. What was prefetched, and loads that were cancelled while the drive reads
 * for them, hold slots until that read has ended: a pin that is lost holds one for ever. */
static void pins_end(void)
{
    int64_t until_ns = rig_now_ns() + INT64_C(60000000000);

    while (rig_stat(&rig, "dram.pins") > 0 && rig_now_ns() < until_ns)
        (void)usleep(1000);
    assert_int_equal(rig_stat(&rig, "dram.pins"), 0);
}

/* percent: of the time, or of the operations. */
static void run_history(const char *config, const char *disk, uint32_t percent)
{
    static struct job jobs[HISTORY_THREADS];
    const char *seconds = getenv("KVT_SOAK_SECONDS"), *ops = getenv("KVT_HISTORY_OPS");
    uint64_t seed = rig_seed(), before = atomic_load(&operations), until_ns = UINT64_MAX;
    uint64_t limit = ops ? strtoull(ops, NULL, 10) : OPERATIONS;
    uint64_t loaded = 0, stored = 0, purged = 0, canceled = 0;
    struct rig_shape shape = rig_shape_small(HISTORY_THREADS * RUN);

    if (seconds) {
        until_ns = (uint64_t)rig_now_ns() + strtoull(seconds, NULL, 10) * percent * 10000000u;
        limit = ops ? limit : UINT64_C(1) << 60;
    }
    history = history_new();
    assert_non_null(history);
    rig_init(&rig, &shape, config, disk);
    rig_open(&rig);
    for (uint32_t i = 0; i < HISTORY_THREADS; i++) {
        jobs[i] = (struct job){.number = i, .rng = {seed + i}, .until_ns = until_ns};
        jobs[i].limit = before + limit / 100 * percent + 1;
        for (uint32_t j = 0; j < RUN; j++)
            jobs[i].ids[j] = i * RUN + j;
        assert_int_equal(pthread_create(&jobs[i].thread, NULL, thread_main, &jobs[i]), 0);
    }
    for (uint32_t i = 0; i < HISTORY_THREADS; i++) {
        pthread_join(jobs[i].thread, NULL);
        loaded += jobs[i].loaded;
        stored += jobs[i].stored;
        purged += jobs[i].purged;
        canceled += jobs[i].canceled;
        assert_int_equal(jobs[i].refused, 0);
    }
    tried = atomic_load(&operations);
    failed = atomic_load(&wrong);
    printf("           %llu operations: %llu loaded, %llu stored, %llu purged, %llu cancelled\n",
           (unsigned long long)(tried - before), (unsigned long long)loaded,
           (unsigned long long)stored, (unsigned long long)purged, (unsigned long long)canceled);
    assert_int_equal(failed, 0);
    assert_true(tried - before < FEW || (loaded > 0 && stored > 0 && purged > 0));
    (void)kvt_flush(rig.cache); /* writes hold slots too */
    pins_end();
    assert_int_equal(rig_stat(&rig, "verify.checksum_fail"), 0);
    assert_int_equal(rig_stat(&rig, "client.requests_held"), 0);
}

static void test_history_in_dram(void **state)
{
    (void)state;
    run_history("dram=4MiB,staging=64KiB,threads=2", NULL, 60); /* a third of the keys */
}

static void test_history_with_a_disk(void **state)
{
    (void)state;
    run_history("dram=2MiB,staging=256KiB,threads=2", "64MiB", 20);
}

static void test_history_with_a_small_disk(void **state)
{
    (void)state;
    run_history("dram=1MiB,staging=256KiB,threads=2,write=evict,io=posix", "12MiB", 20);
}

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    history_free(history);
    history = NULL;
    return 0;
}

static int tell(void **state)
{
    (void)state;
    tally_print("history", tried, failed);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_checker_says_no),
        cmocka_unit_test_teardown(test_history_in_dram, tear_down),
        cmocka_unit_test_teardown(test_history_with_a_disk, tear_down),
        cmocka_unit_test_teardown(test_history_with_a_small_disk, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, tell);
}
