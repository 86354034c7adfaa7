/* Failures from the field about loads that do not pay: C63 C64.
 *
 * Method: the plan over models whose numbers are those of the reports; the border is found token by
 * token and compared with the one worked out by hand.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "plan/decide.h"

#define GB 1e9
#define TOKEN_BYTES 131072.0
#define TOKEN_BYTES_INT4 36864.0

struct rig {
    struct kvt_prefill prefill;
    struct kvt_tier_model disk;
    struct kvt_plan_models models;
};

/* 5 ms fixed, prefill at 8,000 tokens a second whatever the length. */
static void make(struct rig *rig, double rate)
{
    memset(rig, 0, sizeof(*rig));
    assert_true(kvt_prefill_init(&rig->prefill, 1.0 / 8000, 0));
    assert_true(kvt_tier_init(&rig->disk, 0.005, rate));
    rig->models.prefill = &rig->prefill;
    rig->models.tiers[KVT_TIER_DISK] = &rig->disk;
}

static int loads(struct rig *rig, uint32_t tokens, double token_bytes, double queued)
{
    struct kvt_decide query = {.run_count = 1,
                               .runs = {{tokens, {[KVT_TIER_DISK] = tokens}}},
                               .block_tokens = 1,
                               .block_bytes = token_bytes,
                               .queued = {[KVT_TIER_DISK] = queued}};
    struct kvt_plan plan = {.struct_size = sizeof(plan)};
    rig->disk.left_aside = 0; /* no probes: this is about the border */
    assert_int_equal(kvt_decide(&query, &rig->models, &plan), 0);
    assert_true(plan.reason == KVT_PLAN_LOAD || plan.reason == KVT_PLAN_RECOMPUTE);
    assert_true(plan.count == (plan.reason == KVT_PLAN_LOAD ? tokens : 0));
    return plan.reason == KVT_PLAN_LOAD;
}

/* The first length that is loaded; every longer one must be, every shorter one not. */
static uint32_t border(struct rig *rig, double token_bytes, double queued)
{
    uint32_t first = 0;
    for (uint32_t n = 1; n <= 20000; n++) {
        int load = loads(rig, n, token_bytes, queued);
        if (load && first == 0)
            first = n;
        assert_int_equal(load, first != 0);
    }
    return first;
}

static void test_c63_worked_example_to_the_token(void **state)
{
    (void)state;
    struct rig rig;
    make(&rig, 3 * GB);
    assert_int_equal(border(&rig, TOKEN_BYTES, 0), 62);
    assert_int_equal(border(&rig, TOKEN_BYTES, 2e9), 8261);
    assert_int_equal(border(&rig, TOKEN_BYTES_INT4, 0), 45);
}

static void test_c63_never_at_a_drive_below_the_break_even(void **state)
{
    (void)state;
    struct rig rig;
    for (double rate = 0.05; rate <= 1.0401; rate += 0.09) {
        make(&rig, rate * GB);
        for (uint32_t n = 1; n <= 1u << 24; n += 1 + n / 8)
            assert_false(loads(&rig, n, TOKEN_BYTES, 0));
    }
    make(&rig, 1.06 * GB); /* 131,072 x 8,000 is 1.0486 GB/s: above it some length does */
    assert_true(loads(&rig, 1u << 20, TOKEN_BYTES, 0));
}

static void test_c64_twenty_loads_change_the_plan(void **state)
{
    (void)state;
    struct rig rig;
    uint64_t bytes = 1000 * (uint64_t)TOKEN_BYTES;
    make(&rig, 3 * GB);
    assert_true(loads(&rig, 1000, TOKEN_BYTES, 0));
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < 20; i++)
            assert_int_equal(kvt_tier_observe(&rig.disk, bytes, 0, (double)bytes / (0.2 * GB)), 0);
        assert_false(loads(&rig, 1000, TOKEN_BYTES, 0));
        for (int i = 0; i < 20; i++)
            assert_int_equal(kvt_tier_observe(&rig.disk, bytes, 0, (double)bytes / (3 * GB)), 0);
        assert_true(loads(&rig, 1000, TOKEN_BYTES, 0));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_c63_worked_example_to_the_token),
        cmocka_unit_test(test_c63_never_at_a_drive_below_the_break_even),
        cmocka_unit_test(test_c64_twenty_loads_change_the_plan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
