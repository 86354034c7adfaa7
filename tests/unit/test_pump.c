/* Paying for replies in advance.
 *
 * Goal:   whatever is in flight, the replies owed fit into the reply ring, from any position of it;
 *         no class takes another's share; a cookie names one life of one flight; blocks asked for
 *         again go parents first.
 * Method: flights taken at random until each class refuses, then the replies they paid for written
 *         into a real ring as frames of that size; all of it again from every start of the ring.
 */
#include "support/rig.h"

#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "client/client.h"

#define FRAME_EXTRA 16u /* as the pump counts it */

static struct kvt_cache *cache;
static uint8_t *memory;
static struct kvt_ring producer, consumer;

static int setup(void **state)
{
    size_t bytes = kvt_round_up(kvt_ring_bytes(KVT_CLIENT_RING_BYTES), 64);

    (void)state;
    cache = calloc(1, sizeof(*cache));
    memory = aligned_alloc(64, bytes);
    if (cache == NULL || memory == NULL)
        return -1;
    memset(memory, 0, bytes);
    pthread_cond_init(&cache->room, NULL);
    for (uint32_t i = 0; i < KVT_FLIGHTS_MAX; i++)
        cache->flights[i].next_free = i + 1 < KVT_FLIGHTS_MAX ? i + 1 : KVT_NONE;
    if (kvt_ring_init(&producer, memory, KVT_CLIENT_RING_BYTES, -1, 1) != 0)
        return -1;
    return kvt_ring_init(&consumer, memory, KVT_CLIENT_RING_BYTES, -1, 0);
}

static int teardown(void **state)
{
    (void)state;
    pthread_cond_destroy(&cache->room);
    free(cache);
    free(memory);
    return 0;
}

static void owed_fits_the_ring(void **state)
{
    struct kvt_rng rng = {rig_seed()};
    uint64_t most = 0;
    const void *frame;

    (void)state;
    for (unsigned round = 0; round < 300; round++) {
        uint32_t sizes[KVT_FLIGHTS_MAX], count = 0, refused = 0;
        uint32_t largest = round % 3 == 0 ? KVT_MSG_BYTES_MAX : 64u << round % 7;

        while (refused < 64) {
            uint32_t bytes = 8 * (1 + (uint32_t)(kvt_rng_next(&rng) % (largest / 8)));
            enum kvt_credit_class klass = kvt_rng_next(&rng) % KVT_C_CLASSES;
            struct kvt_flight *flight =
                kvt_flight_take(cache, klass, KVT_OP_STAT, bytes + FRAME_EXTRA);

            if (flight != NULL)
                sizes[count++] = bytes;
            refused += flight == NULL;
        }
        for (uint32_t i = 0; i < count; i++) {
            if (kvt_ring_reserve(&producer, sizes[i]) == NULL)
                fail_msg("round %u: reply %u of %u has no room", round, i, count);
            kvt_ring_push(&producer, sizes[i]);
        }
        most = KVT_MAX(most, (uint64_t)count);
        while (kvt_ring_peek(&consumer, &frame) > 0)
            kvt_ring_pop(&consumer);
        for (uint32_t i = 0; i < KVT_FLIGHTS_MAX; i++)
            if (cache->flights[i].op != 0)
                kvt_flight_put(cache, &cache->flights[i]);
        for (int i = 0; i < KVT_C_CLASSES; i++)
            assert_true(cache->flight_count[i] == 0 && cache->credit_used[i] == 0);
    }
    printf("           at most %llu replies owed\n", (unsigned long long)most);
}

/* Loads that take all they can leave stores and calls their share, and the other way round. */
static void classes_have_shares(void **state)
{
    (void)state;
    for (int greedy = 0; greedy < KVT_C_CLASSES; greedy++) {
        for (unsigned size = 0; size < 2; size++) { /* runs out of bytes, or of flights */
            struct kvt_flight *flight;

            while (kvt_flight_take(cache, greedy, KVT_OP_STAT, size ? 4096 : 16) != NULL)
                ;
            for (int other = 0; other < KVT_C_CLASSES; other++) {
                flight = kvt_flight_take(cache, other, KVT_OP_STAT,
                                         other == greedy && size == 0 ? 1 : KVT_MSG_BYTES_MAX);
                assert_true((flight != NULL) == (other != greedy));
            }
            for (uint32_t i = 0; i < KVT_FLIGHTS_MAX; i++)
                if (cache->flights[i].op != 0)
                    kvt_flight_put(cache, &cache->flights[i]);
        }
    }
}

/* Blocks that are asked for again stand in the order of their chains, however the workers ended. */
static void retries_go_parents_first(void **state)
{
    enum { REQUESTS = 3, EACH = 5, ALL = REQUESTS * EACH };
    struct kvt_rng rng = {rig_seed()};
    uint32_t order[ALL], at = 0;

    (void)state;
    cache->blocks = calloc(ALL, sizeof(*cache->blocks));
    cache->requests = calloc(REQUESTS, sizeof(*cache->requests));
    for (uint32_t i = 0; i < ALL; i++) {
        order[i] = i;
        cache->blocks[i].req = i / EACH;
        cache->requests[i / EACH].start_ns = REQUESTS - i / EACH; /* the last one came first */
    }
    for (uint32_t i = ALL - 1; i > 0; i--) {
        uint32_t j = (uint32_t)kvt_rng_below(&rng, i + 1), moved = order[i];
        order[i] = order[j];
        order[j] = moved;
    }
    kvt_bq_init(&cache->retry);
    for (uint32_t i = 0; i < ALL; i++)
        kvt_retry_push(cache, &cache->blocks[order[i]]);
    assert_int_equal(cache->retry.count, ALL);
    for (uint32_t r = REQUESTS; r-- > 0;)
        for (uint32_t i = 0; i < EACH; i++, at++)
            assert_ptr_equal(kvt_bq_pop(cache, &cache->retry), &cache->blocks[r * EACH + i]);
    assert_null(kvt_bq_pop(cache, &cache->retry));
    kvt_retry_push(cache, &cache->blocks[0]); /* the tail is right, also when it was emptied */
    kvt_bq_push(cache, &cache->retry, &cache->blocks[1]);
    assert_ptr_equal(kvt_bq_pop(cache, &cache->retry), &cache->blocks[0]);
    assert_ptr_equal(kvt_bq_pop(cache, &cache->retry), &cache->blocks[1]);
    free(cache->blocks);
    free(cache->requests);
}

static void cookies_name_one_life(void **state)
{
    struct kvt_flight *flight = kvt_flight_take(cache, KVT_C_CALL, KVT_OP_STAT, 64);
    uint64_t old = kvt_flight_cookie(cache, flight), cookie;

    (void)state;
    assert_true(old != 0);
    assert_ptr_equal(kvt_flight_of(cache, old), flight);
    kvt_flight_put(cache, flight);
    assert_null(kvt_flight_of(cache, old));
    assert_ptr_equal(kvt_flight_take(cache, KVT_C_CALL, KVT_OP_STAT, 64), flight);
    cookie = kvt_flight_cookie(cache, flight);
    assert_true(cookie != old);
    assert_null(kvt_flight_of(cache, old));
    assert_ptr_equal(kvt_flight_of(cache, cookie), flight);
    assert_null(kvt_flight_of(cache, 0));
    assert_null(kvt_flight_of(cache, UINT64_MAX));
    assert_null(kvt_flight_of(cache, (cookie & ~(uint64_t)UINT32_MAX) | (KVT_FLIGHTS_MAX + 1)));
    kvt_flight_put(cache, flight);
}

static void nothing_goes_when_broken(void **state)
{
    (void)state;
    cache->broken = true;
    for (int i = 0; i < KVT_C_CLASSES; i++)
        assert_null(kvt_flight_take(cache, i, KVT_OP_STAT, 16));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(owed_fits_the_ring, setup, teardown),
        cmocka_unit_test_setup_teardown(classes_have_shares, setup, teardown),
        cmocka_unit_test_setup_teardown(retries_go_parents_first, setup, teardown),
        cmocka_unit_test_setup_teardown(cookies_name_one_life, setup, teardown),
        cmocka_unit_test_setup_teardown(nothing_goes_when_broken, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
