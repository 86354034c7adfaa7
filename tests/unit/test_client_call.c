/* Calls that wait for one reply: whoever reads the reply ring, its answer is heard of.
 *
 * Goal:   a caller that gave up reading the ring itself has left nothing behind for which the reply
 *         thread is not rung; nor has a worker, to which the ring was left while it was coding. A
 *         store that answers is not given up.
 * Method: the test takes the store's place at the ring of replies, behind the client's back, and
 *         answers when the caller has stopped leading: once with the ring empty meanwhile, once
 *         with a reply begun at the end of the ring (a filler is there, no frame behind it yet).
 */
#include "support/rig.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "client/client.h"

enum { CAPACITY = KVT_RING_CAPACITY_MIN, FRAME = CAPACITY / 4, ROUNDS = 20 };

static struct rig rig;
static struct kvt_ring theirs, store; /* the client's true end; ours, as producer */
static void *memory;
static sem_t answered;

/* Point the client's end at another ring. The descriptor stays: its thread polls it. */
static void use_ring(const struct kvt_ring *ring)
{
    struct kvt_ring *replies = &rig.cache->channel.replies;

    pthread_mutex_lock(&rig.cache->lock);
    replies->shared = ring->shared;
    replies->data = ring->data;
    replies->capacity = ring->capacity;
    replies->head = ring->head;
    replies->peeked = 0;
    pthread_mutex_unlock(&rig.cache->lock);
    kvt_reply_wake(rig.cache);
}

static void set_up(void)
{
    struct rig_shape shape = rig_shape_small(4);
    struct kvt_ring consumer;
    size_t bytes = kvt_ring_bytes(CAPACITY);

    rig_init(&rig, &shape, "dram=8MiB", NULL);
    rig_open(&rig);
    memory = aligned_alloc(64, bytes);
    assert_non_null(memory);
    memset(memory, 0, bytes);
    theirs = rig.cache->channel.replies;
    assert_int_equal(kvt_ring_init(&store, memory, CAPACITY, theirs.event_fd, 1), 0);
    assert_int_equal(kvt_ring_init(&consumer, memory, CAPACITY, -1, 0), 0);
    use_ring(&consumer);
    assert_int_equal(sem_init(&answered, 0, 0), 0);
}

static int tear_down(void **state)
{
    (void)state;
    use_ring(&theirs);
    rig_free(&rig);
    free(memory);
    return 0;
}

static void *look_up(void *arg)
{
    struct kvt_key key = rig_key(1);

    (void)arg;
    assert_int_equal(kvt_lookup(rig.ns, &key, 1, NULL, NULL), 0);
    sem_post(&answered);
    return NULL;
}

/* The cookie of the only look-up that is under way, 0: none. leading: whether its caller reads. */
static uint64_t asked(bool *leading)
{
    uint64_t cookie = 0;

    pthread_mutex_lock(&rig.cache->lock);
    for (uint32_t i = 0; i < KVT_FLIGHTS_MAX; i++)
        if (rig.cache->flights[i].op == KVT_OP_LOOKUP)
            cookie = kvt_flight_cookie(rig.cache, &rig.cache->flights[i]);
    *leading = rig.cache->lead != NULL;
    pthread_mutex_unlock(&rig.cache->lock);
    return cookie;
}

static void reply_make(struct kvt_msg_lookup_reply *reply, uint64_t cookie)
{
    memset(reply, 0, FRAME);
    reply->msg = (struct kvt_msg){.bytes = FRAME,
                                  .op = KVT_OP_REPLY,
                                  .reply_to = KVT_OP_LOOKUP,
                                  .count = 1,
                                  .cookie = cookie};
}

/* Replies to nobody, until the next one does not fit before the end of the ring. */
static void to_the_end(void)
{
    while ((store.tail & (CAPACITY - 1)) + FRAME + 8 <= CAPACITY) {
        struct kvt_msg_lookup_reply *reply = kvt_ring_reserve(&store, FRAME);

        if (reply == NULL) { /* the reply thread is at it */
            usleep(100);
            continue;
        }
        reply_make(reply, UINT64_MAX);
        kvt_ring_push(&store, FRAME);
    }
}

static void answer_late(bool at_the_end)
{
    struct kvt_msg_lookup_reply *reply = NULL;
    struct timespec limit;
    uint64_t cookie;
    pthread_t thread;
    bool leading = false;

    if (at_the_end)
        to_the_end();
    assert_int_equal(pthread_create(&thread, NULL, look_up, NULL), 0);
    while ((cookie = asked(&leading)) == 0)
        ;
    while (at_the_end && reply == NULL) /* there is a filler now */
        reply = kvt_ring_reserve(&store, FRAME);
    do
        usleep(1000);
    while (asked(&leading) != 0 && leading);
    usleep(3000); /* longer than anybody leads: also for one that had not begun to */
    while (reply == NULL)
        reply = kvt_ring_reserve(&store, FRAME);
    reply_make(reply, cookie);
    kvt_ring_push(&store, FRAME);
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += 20;
    bool heard = sem_timedwait(&answered, &limit) == 0;
    if (!heard)
        kvt_reply_wake(rig.cache);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_true(heard);
}

static void late_answers_reach_the_caller(void **state)
{
    (void)state;
    set_up();
    for (unsigned i = 0; i < ROUNDS; i++)
        answer_late(false);
}

static void so_do_those_begun_when_it_stops_reading(void **state)
{
    (void)state;
    set_up();
    for (unsigned i = 0; i < ROUNDS; i++)
        answer_late(true);
}

/* All workers are coding, as far as the cache knows, and a load is under way: the ring is left to
 * them. (The real ones sleep all the time.) */
static void workers_busy(bool busy)
{
    struct kvt_cache *cache = rig.cache;

    pthread_mutex_lock(&cache->lock);
    while (busy && cache->workers_idle < cache->worker_count) { /* they have just been started */
        pthread_mutex_unlock(&cache->lock);
        usleep(1000);
        pthread_mutex_lock(&cache->lock);
    }
    cache->workers_idle = busy ? 0 : cache->worker_count;
    cache->active_count = busy ? 1 : 0; /* nobody leads */
    kvt_reply_busy(cache);
    pthread_mutex_unlock(&cache->lock);
}

static uint32_t announced(void)
{
    return atomic_load(&store.shared->sleeping);
}

/* Nobody is rung for what all workers will see soon; but for a call, which waits. */
static void a_call_is_heard_while_the_ring_is_left_to_workers(void **state)
{
    struct kvt_msg_lookup_reply *reply;
    struct timespec limit;
    pthread_t thread;
    uint64_t cookie;
    bool leading;

    (void)state;
    set_up();
    for (unsigned i = 0; i < ROUNDS; i++) {
        workers_busy(true);
        assert_int_equal(announced(), KVT_RING_AWAKE);
        kvt_reply_wake(rig.cache); /* nor does the thread announce itself */
        usleep(2000);
        assert_int_equal(announced(), KVT_RING_AWAKE);
        assert_int_equal(pthread_create(&thread, NULL, look_up, NULL), 0);
        while ((cookie = asked(&leading)) == 0)
            usleep(100);
        while (announced() != KVT_RING_BY_EVENT)
            usleep(100);
        assert_false(leading);
        while ((reply = kvt_ring_reserve(&store, FRAME)) == NULL)
            usleep(100);
        reply_make(reply, cookie);
        kvt_ring_push(&store, FRAME);
        clock_gettime(CLOCK_REALTIME, &limit);
        limit.tv_sec += 20;
        assert_int_equal(sem_timedwait(&answered, &limit), 0);
        assert_int_equal(pthread_join(thread, NULL), 0);
        workers_busy(false);
        assert_int_equal(announced(), KVT_RING_BY_EVENT);
    }
}

/* A worker that runs out of work leaves the ring to the reply thread: what comes then is heard. */
static void the_thread_hears_what_comes_after_the_workers(void **state)
{
    struct rig_shape shape = rig_shape_small(32);

    (void)state;
    rig_init(&rig, &shape, "dram=8MiB,threads=2", NULL);
    rig_open(&rig);
    store = rig.cache->channel.replies; /* to look at, no more */
    assert_int_equal(rig_store(&rig, 1, 32, 0, NULL), 32);
    for (unsigned i = 0; i < 50 * ROUNDS; i++) {
        assert_int_equal(rig_load(&rig, 1, 1 + i % 32, NULL), 1 + i % 32);
        if (i % 50 != 0)
            continue;
        for (unsigned tries = 0; announced() != KVT_RING_BY_EVENT; tries++) {
            assert_true(tries < 20000);
            usleep(1000);
        }
    }
}

/* A load may wait for a drive for long: a store that answers each ping meanwhile is there. */
static void a_store_that_answers_is_not_given_up(void **state)
{
    struct rig_shape shape = rig_shape_small(4);

    (void)state;
    rig_init(&rig, &shape, "dram=8MiB", NULL);
    rig_open(&rig);
    struct kvt_cache *cache = rig.cache;
    pthread_mutex_lock(&cache->lock);
    struct kvt_flight *flight = kvt_flight_take(cache, KVT_C_LOAD, KVT_OP_ACQUIRE, 64);
    bool there = flight != NULL;
    for (int i = 0; i < 5 && there; i++) {
        cache->heard_ns = kvt_clock_now(&cache->clock) - INT64_C(3000000000);
        there = kvt_remote_watch(cache) > 0 && cache->pinged && !cache->broken;
        while (there && !cache->ping.done) {
            pthread_mutex_unlock(&cache->lock);
            usleep(1000);
            pthread_mutex_lock(&cache->lock);
        }
    }
    if (there)
        kvt_flight_put(cache, flight);
    pthread_mutex_unlock(&cache->lock);
    assert_true(there);
}

static int free_only(void **state)
{
    (void)state;
    rig_free(&rig);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(late_answers_reach_the_caller, tear_down),
        cmocka_unit_test_teardown(so_do_those_begun_when_it_stops_reading, tear_down),
        cmocka_unit_test_teardown(a_call_is_heard_while_the_ring_is_left_to_workers, tear_down),
        cmocka_unit_test_teardown(the_thread_hears_what_comes_after_the_workers, free_only),
        cmocka_unit_test_teardown(a_store_that_answers_is_not_given_up, free_only),
    };

    return cmocka_run_group_tests_name("client_call", tests, NULL, NULL);
}
