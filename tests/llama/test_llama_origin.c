/* Goal: what was noted as lossy is found again, what was not is not, in bounded memory; what had to
 * be forgotten is the oldest, and is counted.
 * Method: random keys against a plain list; growth to the limit and beyond it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "llama_origin.h"

#define SEED 4711u

static struct kvt_key key_of(uint64_t number)
{
    struct kvt_rng rng = {number};
    struct kvt_key key = {.hash_len = 32};

    for (size_t i = 0; i < 4; i++) {
        uint64_t part = kvt_rng_next(&rng);
        memcpy(key.hash + 8 * i, &part, 8);
    }
    return key;
}

static void add(struct kvt_origin *origin, uint64_t number)
{
    struct kvt_key key = key_of(number);

    assert_int_equal(kvt_origin_reserve(origin, 1), 0);
    kvt_origin_add(origin, &key);
}

static int has(const struct kvt_origin *origin, uint64_t number)
{
    struct kvt_key key = key_of(number);

    return kvt_origin_has(origin, &key);
}

static void test_empty(void **state)
{
    (void)state;
    struct kvt_origin origin;

    kvt_origin_init(&origin);
    assert_int_equal(has(&origin, 1), 0);
    assert_int_equal(kvt_origin_reserve(&origin, 0), 0);
    assert_int_equal(has(&origin, 1), 0);
    kvt_origin_free(&origin);
    kvt_origin_free(&origin);
}

static void test_against_a_list(void **state)
{
    (void)state;
    struct kvt_rng rng = {SEED};
    static uint8_t in[20000];
    struct kvt_origin origin;
    size_t distinct = 0;

    printf("seed %u\n", SEED);
    memset(in, 0, sizeof(in));
    kvt_origin_init(&origin);
    for (int i = 0; i < 30000; i++) {
        uint64_t number = kvt_rng_below(&rng, 20000);
        distinct += !in[number];
        in[number] = 1;
        add(&origin, number);
        assert_int_equal(origin.used, distinct);
        assert_true(origin.used * 2 <= origin.slots);
    }
    for (uint64_t number = 0; number < 20000; number++)
        assert_int_equal(has(&origin, number), in[number]);
    assert_int_equal(origin.forgotten, 0);
    kvt_origin_free(&origin);
}

/* A hash whose first bytes are zero is a key like any other. */
static void test_zero_hash(void **state)
{
    (void)state;
    struct kvt_origin origin;
    struct kvt_key zero = {.hash_len = 32};

    kvt_origin_init(&origin);
    add(&origin, 1);
    assert_int_equal(kvt_origin_has(&origin, &zero), 0);
    assert_int_equal(kvt_origin_reserve(&origin, 1), 0);
    kvt_origin_add(&origin, &zero);
    assert_int_equal(kvt_origin_has(&origin, &zero), 1);
    assert_int_equal(has(&origin, 1), 1);
    kvt_origin_free(&origin);
}

static void test_bounded(void **state)
{
    (void)state;
    struct kvt_origin origin;
    const uint64_t count = KVT_ORIGIN_MAX + 1000;

    kvt_origin_init(&origin);
    for (uint64_t number = 0; number < count; number++)
        add(&origin, number);
    assert_true(origin.slots <= 2 * KVT_ORIGIN_MAX);
    assert_true(origin.forgotten > 0 && origin.forgotten + origin.used == count);
    assert_int_equal(has(&origin, 0), 0); /* the oldest went */
    for (uint64_t number = count - KVT_ORIGIN_MAX / 2; number < count; number++)
        assert_int_equal(has(&origin, number), 1);
    /* the same keys over and over: ages move on, nothing else is lost */
    const uint64_t forgotten = origin.forgotten;
    for (int round = 0; round < 3; round++)
        for (uint64_t number = count - 1000; number < count; number++)
            add(&origin, number);
    assert_int_equal(origin.forgotten, forgotten);
    assert_int_not_equal(kvt_origin_reserve(&origin, KVT_ORIGIN_MAX), 0); /* more than a context */
    assert_int_equal(kvt_origin_reserve(&origin, KVT_ORIGIN_MAX / 4), 0);
    kvt_origin_free(&origin);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_against_a_list),
        cmocka_unit_test(test_zero_hash),
        cmocka_unit_test(test_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
