/* Distributions of times and sizes.
 *
 * Goal:   every value lies in the bucket whose bounds hold it, sums are exact, nothing is lost at
 *         the ends of the range.
 * Method: each bound and its neighbours, random values against a search through the bounds.
 */
#include "base/hist.h"

#include "support/store_help.h"

#include <string.h>

#include "base/rng.h"

static uint32_t bucket_by_search(enum kvt_hist_unit unit, uint64_t value)
{
    uint32_t i = 0;

    while (i < KVT_HIST_BOUNDS && value > kvt_hist_bound(unit, i))
        i++;
    return i;
}

static void add_one(enum kvt_hist_unit unit, uint64_t value)
{
    struct kvt_hist hist = {0};
    const uint32_t want = bucket_by_search(unit, value);

    kvt_hist_add(&hist, unit, value);
    for (uint32_t i = 0; i <= KVT_HIST_BOUNDS; i++)
        if (hist.buckets[i] != (i == want))
            fail_msg("%llu: bucket %u, not %u", (unsigned long long)value, i, want);
    assert_int_equal(hist.sum, value);
}

static void test_bounds(void **state)
{
    (void)state;
    assert_int_equal(kvt_hist_bound(KVT_HIST_TIME, 0), 1000);
    assert_int_equal(kvt_hist_bound(KVT_HIST_SIZE, 0), 4096);
    for (int unit = KVT_HIST_TIME; unit <= KVT_HIST_SIZE; unit++) {
        for (uint32_t i = 0; i < KVT_HIST_BOUNDS; i++) {
            const uint64_t bound = kvt_hist_bound((enum kvt_hist_unit)unit, i);

            add_one((enum kvt_hist_unit)unit, bound - 1);
            add_one((enum kvt_hist_unit)unit, bound);
            add_one((enum kvt_hist_unit)unit, bound + 1);
        }
        add_one((enum kvt_hist_unit)unit, 0);
        add_one((enum kvt_hist_unit)unit, UINT64_MAX);
    }
}

static void test_random(void **state)
{
    struct kvt_rng rng = {20261130};
    struct kvt_hist hist = {0};
    uint64_t sum = 0, counted = 0;

    (void)state;
    for (int i = 0; i < 100000; i++) {
        uint64_t value = kvt_rng_next(&rng) >> kvt_rng_below(&rng, 64);

        add_one(KVT_HIST_TIME, value);
        kvt_hist_add(&hist, KVT_HIST_SIZE, value >> 20);
        sum += value >> 20;
    }
    for (uint32_t i = 0; i <= KVT_HIST_BOUNDS; i++)
        counted += hist.buckets[i];
    assert_int_equal(counted, 100000);
    assert_int_equal(hist.sum, sum);
}

static void test_times(void **state)
{
    struct kvt_hist hist = {0};

    (void)state;
    kvt_hist_time(&hist, 5000, 7500);
    assert_int_equal(hist.sum, 2500);
    assert_int_equal(hist.buckets[bucket_by_search(KVT_HIST_TIME, 2500)], 1);
    kvt_hist_time(&hist, 7500, 5000); /* a clock that ran backwards */
    assert_int_equal(hist.sum, 2500);
    assert_int_equal(hist.buckets[0], 1);
    kvt_hist_time(&hist, INT64_MIN / 4, INT64_MAX / 4);
    assert_int_equal(hist.buckets[KVT_HIST_BOUNDS], 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bounds), cmocka_unit_test(test_random),
                                       cmocka_unit_test(test_times)};

    return cmocka_run_group_tests_name("hist", tests, NULL, NULL);
}
