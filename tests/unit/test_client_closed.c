/* What becomes of a client that the store disconnects: everything that waits ends, with
 * KVT_E_CLOSED, and so does what comes later.
 *
 * Method: the test breaks the protocol itself, behind the client's back: it pushes nonsense into
 * the request ring, or asks for more replies than the reply ring holds while nobody drains it. The
 * owner logs before it tells the client; the log callback keeps it there until requests and calls
 * of every kind are in flight, so that each of them is cut off at a known point.
 */
#include "support/rig.h"

#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "client/client.h"

#define BLOCKS 64u
#define CALLS 6u

static struct rig rig;
static sem_t at_log, go_on;
static _Atomic int errors_logged;
static _Atomic int pausing;

static void pause_at_error(void *arg, int level, const char *message)
{
    (void)arg;
    (void)message;
    if (level > KVT_LOG_ERROR)
        return;
    atomic_fetch_add(&errors_logged, 1);
    if (!atomic_load(&pausing))
        return;
    sem_post(&at_log);
    sem_wait(&go_on);
}

static void open_paused(const char *text, const char *disk_cap, bool pause)
{
    struct rig_shape shape = rig_shape_small(4 * BLOCKS);
    struct kvt_config *config;
    char disk[512];

    rig_init(&rig, &shape, text, disk_cap);
    assert_int_equal(kvt_config_new(&config), 0);
    assert_int_equal(kvt_config_set_all(config, text), 0);
    if (disk_cap != NULL) {
        snprintf(disk, sizeof(disk), "%s:%s", rig.dir, disk_cap);
        assert_int_equal(kvt_config_set(config, "disk", disk), 0);
    }
    kvt_config_log(config, pause_at_error, NULL);
    assert_int_equal(kvt_open(config, &rig.cache, rig.error, sizeof(rig.error)), 0);
    kvt_config_free(config);
    assert_int_equal(kvt_ns_open(rig.cache, &rig.identity, &rig.layout, &rig.ns), 0);
    assert_int_equal(kvt_pool_register(rig.cache, &rig.layout, &rig.desc, &rig.pool), 0);
    sem_init(&at_log, 0, 0);
    sem_init(&go_on, 0, 0);
    atomic_store(&errors_logged, 0);
    atomic_store(&pausing, pause);
}

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

/* A message that says it is longer than its frame. */
static void push_nonsense(void)
{
    pthread_mutex_lock(&rig.cache->lock);
    struct kvt_msg *msg = kvt_msg_reserve(rig.cache, sizeof(*msg), KVT_OP_STAT, 0, 0, 0);
    assert_non_null(msg);
    msg->bytes = 4096;
    kvt_ring_push(&rig.cache->channel.requests, sizeof(*msg));
    pthread_mutex_unlock(&rig.cache->lock);
}

struct call {
    pthread_t thread;
    unsigned kind;
    long result;
};

static void *call_main(void *arg)
{
    struct call *call = arg;
    struct kvt_key key = rig_key(1);
    struct kvt_ns *ns;

    if (call->kind == 0)
        call->result = kvt_lookup(rig.ns, &key, 1, NULL, NULL);
    else if (call->kind == 1)
        call->result = kvt_prefetch(rig.ns, &key, 1, NULL);
    else if (call->kind == 2)
        call->result = kvt_pin(rig.ns, &key, 1);
    else if (call->kind == 3)
        call->result = kvt_purge(rig.ns, NULL, 0);
    else if (call->kind == 4)
        call->result = kvt_flush(rig.cache);
    else
        call->result = kvt_ns_open(rig.cache, &rig.identity, &rig.layout, &ns);
    return NULL;
}

static struct kvt_req *submit(bool load, uint64_t seed, uint32_t first_page)
{
    struct kvt_key keys[BLOCKS];
    uint32_t ids[BLOCKS];
    struct kvt_req *req;

    for (uint32_t i = 0; i < BLOCKS; i++) {
        keys[i] = rig_key(seed + i);
        ids[i] = first_page + i;
    }
    assert_int_equal(load ? kvt_load(rig.ns, rig.pool, keys, ids, BLOCKS, NULL, &req)
                          : kvt_store(rig.ns, rig.pool, keys, ids, BLOCKS, NULL, &req),
                     0);
    return req;
}

static void ends_closed(struct kvt_req *req)
{
    size_t n;

    assert_int_equal(kvt_req_wait(req, INT64_C(20000000000)), 1);
    const int32_t *status = kvt_req_status(req, &n);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(status[i], KVT_E_CLOSED);
    kvt_req_free(req);
}

static uint32_t flights_of(uint16_t op)
{
    uint32_t count = 0;

    pthread_mutex_lock(&rig.cache->lock);
    for (uint32_t i = 0; i < KVT_FLIGHTS_MAX; i++)
        count += rig.cache->flights[i].op == op;
    pthread_mutex_unlock(&rig.cache->lock);
    return count;
}

/* Nothing is owed, held or used any more. */
static void nothing_left(void)
{
    struct kvt_cache *cache = rig.cache;

    pthread_mutex_lock(&cache->lock);
    bool broken = cache->broken;
    uint64_t bad_move = cache->counters.bad_move;
    uint64_t left[] = {cache->active_count, cache->held_count,   cache->held_blocks,
                       cache->callers,      cache->room_waiters, cache->cancels_wanted,
                       cache->alloc_bytes};
    uint64_t owed = 0;
    for (int i = 0; i < KVT_C_CLASSES; i++)
        owed += cache->flight_count[i] + cache->credit_used[i];
    pthread_mutex_unlock(&cache->lock);
    assert_true(broken);
    assert_int_equal(bad_move, 0);
    assert_int_equal(owed, 0);
    for (unsigned i = 0; i < KVT_ARRAY_LEN(left); i++)
        if (left[i] != 0)
            fail_msg("number %u is still %llu", i, (unsigned long long)left[i]);
}

static void later_calls_are_refused(void)
{
    struct kvt_key key = rig_key(1);
    uint32_t id = 0;
    struct kvt_req *req = NULL;
    struct kvt_ns *ns;

    assert_int_equal(kvt_store(rig.ns, rig.pool, &key, &id, 1, NULL, &req), KVT_E_CLOSED);
    assert_int_equal(kvt_load(rig.ns, rig.pool, &key, &id, 1, NULL, &req), KVT_E_CLOSED);
    assert_null(req);
    assert_int_equal(kvt_lookup(rig.ns, &key, 1, NULL, NULL), KVT_E_CLOSED);
    assert_int_equal(kvt_prefetch(rig.ns, &key, 1, NULL), KVT_E_CLOSED);
    assert_int_equal(kvt_pin(rig.ns, &key, 1), KVT_E_CLOSED);
    assert_int_equal(kvt_unpin(rig.ns, &key, 1), KVT_E_CLOSED);
    assert_int_equal(kvt_purge(rig.ns, &key, 1), KVT_E_CLOSED);
    assert_int_equal(kvt_purge(rig.ns, NULL, 0), KVT_E_CLOSED);
    assert_int_equal(kvt_flush(rig.cache), KVT_E_CLOSED);
    assert_int_equal(kvt_ns_open(rig.cache, &rig.identity, &rig.layout, &ns), KVT_E_CLOSED);
}

/* Requests and calls of every kind wait when the store disconnects. */
static void broken_protocol_ends_all(void **state)
{
    struct call calls[CALLS];
    struct kvt_req *reqs[4];
    uint64_t rung;

    (void)state;
    open_paused("dram=8MiB,threads=2", "64MiB", true);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    push_nonsense();
    sem_wait(&at_log); /* from here on nothing is answered */
    assert_true(read(kvt_event_fd(rig.cache), &rung, sizeof(rung)) > 0);
    reqs[0] = submit(false, 1000, 0);
    reqs[1] = submit(true, 1, BLOCKS);
    reqs[2] = submit(false, 2000, 2 * BLOCKS);
    reqs[3] = submit(true, 1, 3 * BLOCKS);
    kvt_req_cancel(reqs[3]); /* a cancelled one waits for its grants as well */
    for (unsigned i = 0; i < CALLS; i++) {
        calls[i].kind = i;
        assert_int_equal(pthread_create(&calls[i].thread, NULL, call_main, &calls[i]), 0);
    }
    while (flights_of(KVT_OP_FLUSH) + flights_of(KVT_OP_NS_OPEN) + flights_of(KVT_OP_LOOKUP) +
               flights_of(KVT_OP_PREFETCH) + flights_of(KVT_OP_PIN) + flights_of(KVT_OP_PURGE) <
           CALLS)
        rig_sleep_ms(1);
    assert_true(flights_of(KVT_OP_ACQUIRE) == 2 && flights_of(KVT_OP_ALLOC) > 0);
    for (unsigned i = 0; i < 4; i++)
        assert_int_equal(kvt_req_wait(reqs[i], 0), 0);
    sem_post(&go_on);
    for (unsigned i = 0; i < CALLS; i++) {
        pthread_join(calls[i].thread, NULL);
        assert_int_equal(calls[i].result, KVT_E_CLOSED);
    }
    for (unsigned i = 0; i < 4; i++)
        ends_closed(reqs[i]);
    assert_int_equal(read(kvt_event_fd(rig.cache), &rung, sizeof(rung)), sizeof(rung));
    assert_int_equal(rung, 4); /* each completion rang */
    nothing_left();
    later_calls_are_refused();
    assert_int_equal(atomic_load(&errors_logged), 1);
    rig_close(&rig); /* ends */
    assert_int_equal(atomic_load(&errors_logged), 1);
    rig_open(&rig); /* what was committed is there */
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
}

/* More replies than the ring holds, which nobody drains because the test has the lock. */
static void full_ring_ends_all(void **state)
{
    struct kvt_cache *cache;
    struct kvt_req *req;

    (void)state;
    open_paused("dram=8MiB,threads=1", NULL, false);
    cache = rig.cache;
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    pthread_mutex_lock(&cache->lock);
    for (unsigned sent = 0; !kvt_ring_closed(&cache->channel.replies); sent++) {
        struct kvt_msg *msg = kvt_msg_reserve(cache, sizeof(*msg), KVT_OP_STAT, 0, 0, 0);

        assert_true(sent < 1000000);
        if (msg == NULL)
            rig_sleep_ms(1);
        else
            kvt_msg_push(cache, msg);
    }
    pthread_mutex_unlock(&cache->lock);
    struct kvt_key key = rig_key(1);
    uint32_t id = 0;
    /* Quicker than the news, perhaps. */
    int rc = kvt_load(rig.ns, rig.pool, &key, &id, 1, NULL, &req);
    if (rc == 0)
        ends_closed(req);
    else
        assert_int_equal(rc, KVT_E_CLOSED);
    while (kvt_flush(cache) != KVT_E_CLOSED)
        rig_sleep_ms(1);
    later_calls_are_refused();
    nothing_left();
    assert_int_equal(atomic_load(&errors_logged), 1);
}

/* Disconnected at any moment of work in progress: every request ends, none with other bytes. */
static void any_moment_ends_all(void **state)
{
    (void)state;
    for (unsigned round = 0; round < 20; round++) {
        struct kvt_req *reqs[4];

        open_paused("dram=8MiB,threads=2", NULL, false);
        assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
        for (uint32_t page = 0; page < BLOCKS; page++)
            rig_fill(&rig, page, 1000 + page);
        for (unsigned i = 0; i < 4; i++)
            reqs[i] = submit(i > 0, i == 0 ? 1000 : 1, i * BLOCKS);
        for (unsigned i = 0; i < round * 50; i++)
            (void)kvt_req_wait(reqs[0], 0);
        push_nonsense();
        for (unsigned i = 0; i < 4; i++) {
            assert_int_equal(kvt_req_wait(reqs[i], INT64_C(20000000000)), 1);
            for (uint32_t b = 0; b < BLOCKS; b++) {
                int32_t status = kvt_req_status(reqs[i], NULL)[b];
                assert_true(status == 0 || status == KVT_E_CLOSED);
                if (i > 0 && status == 0)
                    assert_true(rig_same(&rig, i * BLOCKS + b, 1 + b));
            }
            kvt_req_free(reqs[i]);
        }
        while (kvt_flush(rig.cache) != KVT_E_CLOSED)
            rig_sleep_ms(1);
        nothing_left();
        assert_int_equal(atomic_load(&errors_logged), 1);
        tear_down(NULL);
    }
}

/* A store that writes nonsense into the reply ring: the same, and the client says so. */
static void malformed_replies_end_all(void **state)
{
    (void)state;
    struct kvt_key key = rig_key(1);
    long run = 0;

    open_paused("dram=8MiB,threads=1", NULL, false);
    while (run == 0) { /* the store's answer may mend the ring before anybody looks */
        atomic_store(&rig.cache->channel.replies.shared->tail, UINT64_MAX);
        run = kvt_lookup(rig.ns, &key, 1, NULL, NULL);
    }
    assert_int_equal(run, KVT_E_CLOSED);
    later_calls_are_refused();
    nothing_left();
    for (int i = 0; i < 2000 && atomic_load(&errors_logged) == 0; i++)
        rig_sleep_ms(1);
    assert_int_equal(atomic_load(&errors_logged), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(broken_protocol_ends_all, tear_down),
        cmocka_unit_test_teardown(full_ring_ends_all, tear_down),
        cmocka_unit_test_teardown(any_moment_ends_all, tear_down),
        cmocka_unit_test_teardown(malformed_replies_end_all, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
