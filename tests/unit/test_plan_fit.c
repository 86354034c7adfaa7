/* The fits under the plan: prefill time and load time.
 *
 * Goal:   the parameters behind noisy observations are found, whatever the start values were; a
 *         fifth of nonsense in either direction, a single one of any size, a jump of 20 times, and
 *         observations at one size only do not lead the fit astray; what is no observation is
 *         refused and changes nothing.
 * Method: hidden parameters, random sizes, jitter; seeds are printed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "kvtier/error.h"
#include "plan/prefill.h"
#include "plan/tier_model.h"

#define A 22e-6 /* an 8B model on one H100, as published */
#define B 0.467e-9
#define GB 1e9

static double uniform(struct kvt_rng *rng)
{
    return (double)(kvt_rng_next(rng) >> 11) * 0x1p-53;
}

/* Up to `jitter` times more or less, the same chance for both. */
static double around(struct kvt_rng *rng, double value, double jitter)
{
    return value * exp((2 * uniform(rng) - 1) * log(jitter));
}

static uint64_t any_length(struct kvt_rng *rng)
{
    return (uint64_t)(64 * exp2(11 * uniform(rng)));
}

static double truth(double m, double n)
{
    return A * m + B * m * (m + 2 * n);
}

static void assert_near(double got, double want, double share)
{
    if (!(fabs(got - want) <= share * want))
        fail_msg("%g, wanted %g within %g %%", got, want, 100 * share);
}

static struct kvt_prefill prefill(double a, double b)
{
    struct kvt_prefill model;
    assert_true(kvt_prefill_init(&model, a, b));
    return model;
}

static struct kvt_tier_model tier(double latency, double bandwidth)
{
    struct kvt_tier_model model;
    assert_true(kvt_tier_init(&model, latency, bandwidth));
    return model;
}

static void feed_prefill(struct kvt_prefill *model, struct kvt_rng *rng, int count, double slow)
{
    for (int i = 0; i < count; i++) {
        uint64_t m = any_length(rng), n = kvt_rng_below(rng, 2) ? any_length(rng) : 0;
        double seconds = around(rng, slow * truth((double)m, (double)n), 1.1);
        assert_int_equal(kvt_prefill_observe(model, m, n, seconds), 0);
    }
}

static void assert_prefill(const struct kvt_prefill *model, double slow, double share)
{
    for (double m = 256; m <= 131072; m *= 2)
        for (double n = 0; n <= 65536; n += 32768)
            assert_near(kvt_prefill_seconds(model, m, n), slow * truth(m, n), share);
}

static void test_start_values_rule_without_observations(void **state)
{
    (void)state;
    struct kvt_prefill p = prefill(1.0 / 8000, 0);
    struct kvt_tier_model t = tier(0.005, 3 * GB);
    assert_true(kvt_prefill_seconds(&p, 8000, 123456) == 8000 * (1.0 / 8000));
    assert_near(kvt_tier_seconds(&t, 3e9, 6e9), 3.005, 1e-12);
    assert_false(kvt_prefill_unsure(&p));
    assert_false(kvt_tier_unsure(&t, 1e9));
}

static void test_chunks_add_up(void **state)
{
    (void)state;
    struct kvt_prefill p = prefill(A, B);
    double sum = 0;
    for (double at = 0; at < 32768; at += 2048)
        sum += kvt_prefill_seconds(&p, 2048, at);
    assert_near(sum, kvt_prefill_seconds(&p, 32768, 0), 1e-12);
    assert_near(32768 / sum, 1 / (A + B * 32768), 1e-12);
}

static void test_prefill_is_found_whatever_the_start(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        for (double wrong_a = 0.25; wrong_a <= 4; wrong_a *= 16) {
            for (double wrong_b = 0.25; wrong_b <= 4; wrong_b *= 16) {
                struct kvt_rng rng = {seed};
                struct kvt_prefill p = prefill(A * wrong_a, B * wrong_b);
                feed_prefill(&p, &rng, 40, 1);
                assert_prefill(&p, 1, 0.12);
            }
        }
    }
}

/* A fifth of the observations is nonsense: a GPU shared with others, a clock that stopped. */
static void test_prefill_survives_outliers(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        for (double wrong = 0.02; wrong <= 50; wrong *= 2500) {
            struct kvt_rng rng = {seed};
            struct kvt_prefill p = prefill(A, B);
            for (int i = 0; i < 100; i++) {
                uint64_t m = any_length(&rng);
                double seconds = around(&rng, truth((double)m, 0), 1.1);
                if (i % 5 == 1)
                    seconds *= wrong;
                assert_int_equal(kvt_prefill_observe(&p, m, 0, seconds), 0);
            }
            assert_prefill(&p, 1, 0.35);
        }
    }
}

static const double odd_seconds[] = {86400, 3600, 600, 5, 0.001, 1e-9, 1e-320};

/* A machine that slept for a night: one observation among many good ones, however far off. */
static void test_one_outlier_changes_nothing(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        for (size_t i = 0; i < KVT_ARRAY_LEN(odd_seconds); i++) {
            struct kvt_rng rng = {seed};
            struct kvt_prefill p = prefill(1.0 / 8000, 0);
            feed_prefill(&p, &rng, 60, 1);
            assert_int_equal(kvt_prefill_observe(&p, 1000, 0, odd_seconds[i]), 0);
            for (int after = 0; after <= 25; after++) {
                assert_prefill(&p, 1, 0.35);
                assert_false(kvt_prefill_unsure(&p));
                feed_prefill(&p, &rng, 1, 1);
            }
        }
    }
}

/* The first observation is one of those: it is not believed alone, and forgotten beside good ones;
 * a second one of its kind is believed. */
static void test_an_absurd_first_one_waits(void **state)
{
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(odd_seconds); i++) {
        struct kvt_rng rng = {13};
        struct kvt_prefill p = prefill(A, B);
        double ratio = odd_seconds[i] / truth(1000, 0);
        bool far = ratio > 1000 || ratio < 0.001;
        assert_int_equal(kvt_prefill_observe(&p, 1000, 0, odd_seconds[i]), 0);
        if (far)
            assert_near(kvt_prefill_seconds(&p, 1000, 0), truth(1000, 0), 1e-6);
        assert_true(!far || kvt_prefill_unsure(&p));
        for (int after = 0; after < 25; after++) {
            feed_prefill(&p, &rng, 1, 1);
            assert_near(kvt_prefill_seconds(&p, 1000, 0), truth(1000, 0), after < 3 ? 2 : 0.35);
        }
    }
    struct kvt_prefill slow = prefill(A, B);
    for (int i = 0; i < 2; i++)
        assert_int_equal(kvt_prefill_observe(&slow, 1000, 0, 5000 * truth(1000, 0)), 0);
    assert_near(kvt_prefill_seconds(&slow, 1000, 0), 5000 * truth(1000, 0), 0.1);
}

/* Launches of a few tokens take what a launch takes: they would hide what a token costs. */
static void test_short_launches_are_not_fitted(void **state)
{
    (void)state;
    struct kvt_rng rng = {9};
    struct kvt_prefill p = prefill(A, B);
    feed_prefill(&p, &rng, 40, 1);
    struct kvt_fit_line before = p.line;
    for (uint64_t i = 0; i < 100; i++)
        assert_int_equal(kvt_prefill_observe(&p, 1 + i % (KVT_PREFILL_TOKENS_MIN - 1), 5000, 0.02),
                         0);
    assert_memory_equal(&p.line, &before, sizeof(before));
    assert_int_equal(p.taken, 140);
}

static void test_prefill_follows_a_change(void **state)
{
    (void)state;
    struct kvt_rng rng = {7};
    struct kvt_prefill p = prefill(A, B);
    feed_prefill(&p, &rng, 100, 1);
    feed_prefill(&p, &rng, 20, 3);
    assert_prefill(&p, 3, 0.15);
    feed_prefill(&p, &rng, 20, 1);
    assert_prefill(&p, 1, 0.15);
}

/* One length only: the shape stays the start values', the size is what was seen. */
static void test_one_length_keeps_the_shape(void **state)
{
    (void)state;
    struct kvt_prefill p = prefill(A, B);
    for (int i = 0; i < 40; i++)
        assert_int_equal(kvt_prefill_observe(&p, 8192, 0, 2 * truth(8192, 0)), 0);
    assert_near(kvt_prefill_seconds(&p, 8192, 0), 2 * truth(8192, 0), 0.001);
    assert_near(kvt_prefill_seconds(&p, 131072, 0), 2 * truth(131072, 0), 0.05);
}

/* Times that fall with length have no such model: the fit stays finite and never negative. */
static void test_contradictions_are_told(void **state)
{
    (void)state;
    struct kvt_rng rng = {3};
    struct kvt_prefill p = prefill(A, B);
    struct kvt_tier_model t = tier(0.001, GB);
    for (int i = 0; i < 200; i++) {
        uint64_t m = any_length(&rng);
        assert_int_equal(kvt_prefill_observe(&p, m, 0, i % 2 ? 1e-4 : 1e3 / (double)m), 0);
        assert_int_equal(kvt_tier_observe(&t, m * 131072, 0, i % 2 ? 1e-5 : 100), 0);
        double line[2] = {p.line.p, p.line.q};
        assert_true(isfinite(line[0]) && isfinite(line[1]) && line[0] >= 0 && line[1] >= 0);
        assert_true(kvt_prefill_seconds(&p, 1, 0) >= 0);
        assert_true(kvt_tier_seconds(&t, 1e6, 0) > 0);
    }
    assert_true(kvt_prefill_unsure(&p));
    assert_true(kvt_tier_unsure(&t, 1e9));
    feed_prefill(&p, &rng, 40, 1);
    assert_false(kvt_prefill_unsure(&p));
}

static void test_nonsense_is_refused(void **state)
{
    (void)state;
    static const double seconds[] = {0, -1, 1e6, INFINITY, -INFINITY, NAN};
    struct kvt_prefill p = prefill(A, B), q = p;
    struct kvt_tier_model t = tier(0.001, GB), u = t;
    for (size_t i = 0; i < KVT_ARRAY_LEN(seconds); i++) {
        assert_int_equal(kvt_prefill_observe(&p, 100, 0, seconds[i]), KVT_E_INVAL);
        assert_int_equal(kvt_tier_observe(&t, 100, 0, seconds[i]), KVT_E_INVAL);
    }
    assert_int_equal(kvt_prefill_observe(&p, 0, 100, 1), KVT_E_INVAL);
    assert_int_equal(kvt_prefill_observe(&p, UINT64_MAX, 0, 1), KVT_E_INVAL);
    assert_int_equal(kvt_prefill_observe(&p, 1, UINT64_MAX, 1), KVT_E_INVAL);
    assert_int_equal(kvt_tier_observe(&t, 0, 0, 1), KVT_E_INVAL);
    assert_int_equal(kvt_tier_observe(&t, UINT64_MAX, 0, 1), KVT_E_INVAL);
    assert_int_equal(kvt_tier_observe(&t, 1, UINT64_MAX, 1), KVT_E_INVAL);
    assert_int_equal(p.refused, KVT_ARRAY_LEN(seconds) + 3);
    assert_int_equal(t.refused, KVT_ARRAY_LEN(seconds) + 3);
    p.refused = t.refused = 0;
    assert_memory_equal(&p, &q, sizeof(p));
    assert_memory_equal(&t, &u, sizeof(t));
}

static void test_start_values_are_checked(void **state)
{
    (void)state;
    static const double bad[] = {0, -1, INFINITY, -INFINITY, NAN};
    struct kvt_prefill p = prefill(A, B), q = p;
    struct kvt_tier_model t = tier(0, GB), u = t;
    for (size_t i = 0; i < KVT_ARRAY_LEN(bad); i++) {
        assert_false(kvt_prefill_init(&p, bad[i], 0));
        assert_false(kvt_tier_init(&t, 0, bad[i]));
        if (i > 0) {
            assert_false(kvt_prefill_init(&p, A, bad[i]));
            assert_false(kvt_tier_init(&t, bad[i], GB));
        }
    }
    assert_false(kvt_tier_init(&t, 0, 1e-320));
    assert_memory_equal(&p, &q, sizeof(p));
    assert_memory_equal(&t, &u, sizeof(t));
}

static void feed_tier(struct kvt_tier_model *t, struct kvt_rng *rng, int count, double latency,
                      double rate)
{
    for (int i = 0; i < count; i++) {
        uint64_t bytes = any_length(rng) * 34560;
        uint64_t queued = kvt_rng_below(rng, 3) ? 0 : kvt_rng_below(rng, UINT64_C(1) << 30);
        double seconds = latency + (double)(bytes + queued) / rate;
        assert_int_equal(kvt_tier_observe(t, bytes, queued, around(rng, seconds, 1.1)), 0);
    }
}

/* A dozen observations of 10 % jitter count: most answers are near, none is far off. */
static void test_tier_is_found_whatever_the_start(void **state)
{
    (void)state;
    int near = 0, all = 0;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        for (double wrong = 0.25; wrong <= 4; wrong *= 16) {
            for (double rate = 0.05 * GB; rate < 51 * GB; rate *= 10) {
                struct kvt_rng rng = {seed};
                struct kvt_tier_model t = tier(0.001, 2 * GB * wrong);
                feed_tier(&t, &rng, 40, 0.0005, rate);
                for (double bytes = 2e6; bytes < 5e9; bytes *= 8) {
                    double want = 0.0005 + (bytes + 1e8) / rate;
                    double got = kvt_tier_seconds(&t, bytes, 1e8);
                    assert_near(got, want, 0.5);
                    near += fabs(got - want) <= 0.1 * want;
                    all++;
                }
            }
        }
    }
    print_message("           %d of %d within 10 %%\n", near, all);
    assert_true(near >= 0.95 * all);
}

/* A drive whose small reads are slow beyond their latency: 16 KiB at 0.2 GB/s, large ones at 2. */
static void test_classes_of_size(void **state)
{
    (void)state;
    struct kvt_rng rng = {11};
    struct kvt_tier_model t = tier(0.0001, GB);
    for (int i = 0; i < 64; i++) {
        double small = 65536 * (1 + uniform(&rng)), large = 5e8 * (1 + uniform(&rng));
        assert_int_equal(kvt_tier_observe(&t, (uint64_t)small, 0, small / 0.2e9), 0);
        assert_int_equal(kvt_tier_observe(&t, (uint64_t)large, 0, large / 2e9), 0);
    }
    assert_near(kvt_tier_seconds(&t, 100000, 0), 100000 / 0.2e9, 0.1);
    assert_near(kvt_tier_seconds(&t, 8e8, 0), 8e8 / 2e9, 0.1);
}

/* The figure of the plan: 20 times slower is noticed within 20 loads, and so is the way back. */
static void test_collapse_and_recovery(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 50; seed++) {
        struct kvt_rng rng = {seed};
        struct kvt_tier_model t = tier(0.001, 2 * GB);
        feed_tier(&t, &rng, 50, 0.001, 3 * GB);
        feed_tier(&t, &rng, 20, 0.001, 3 * GB / 20);
        assert_near(kvt_tier_seconds(&t, 1e9, 0), 0.001 + 20 * 1e9 / (3 * GB), 0.15);
        feed_tier(&t, &rng, 20, 0.001, 3 * GB);
        assert_near(kvt_tier_seconds(&t, 1e9, 0), 0.001 + 1e9 / (3 * GB), 0.15);
    }
}

static void test_one_odd_load_changes_nothing(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        for (size_t i = 0; i < KVT_ARRAY_LEN(odd_seconds); i++) {
            struct kvt_rng rng = {seed};
            struct kvt_tier_model t = tier(0.001, 2 * GB), first = t;
            feed_tier(&t, &rng, 60, 0.001, 3 * GB);
            assert_int_equal(kvt_tier_observe(&t, 32 << 20, 0, odd_seconds[i]), 0);
            assert_int_equal(kvt_tier_observe(&first, 32 << 20, 0, odd_seconds[i]), 0);
            for (int after = 0; after <= 25; after++) {
                assert_near(kvt_tier_seconds(&t, 1e8, 0), 0.001 + 1e8 / (3 * GB), 0.35);
                feed_tier(&t, &rng, 1, 0.001, 3 * GB);
                feed_tier(&first, &rng, 1, 0.001, 3 * GB);
                if (after >= 3 || odd_seconds[i] > 100)
                    assert_near(kvt_tier_seconds(&first, 1e8, 0), 0.001 + 1e8 / (3 * GB),
                                after < 3 ? 2 : 0.35);
            }
        }
    }
}

static void test_probes_have_a_floor(void **state)
{
    (void)state;
    struct kvt_tier_model t = tier(0.001, GB);
    for (uint32_t i = 1; i < 2 * KVT_PROBE_OVERDUE; i++) {
        double share = kvt_tier_refused(&t);
        assert_true(i < KVT_PROBE_EVERY     ? share == 0
                    : i < KVT_PROBE_OVERDUE ? share > 0 && share <= 0.05
                                            : share > 0.05 && share <= 0.5);
    }
    kvt_tier_used(&t);
    assert_true(kvt_tier_refused(&t) == 0);
    /* faster than thought: again, at once */
    assert_int_equal(kvt_tier_observe(&t, 100000000, 0, 0.01), 0);
    assert_true(kvt_tier_refused(&t) > 0);
    kvt_tier_used(&t);
    assert_true(kvt_tier_refused(&t) == 0);
    t.fixed = true;
    for (uint32_t i = 0; i < 8 * KVT_PROBE_EVERY; i++)
        assert_true(kvt_tier_refused(&t) == 0);
}

static void test_fixed_models_stay(void **state)
{
    (void)state;
    struct kvt_rng rng = {5};
    struct kvt_prefill p = prefill(A, B);
    struct kvt_tier_model t = tier(0.001, GB);
    p.fixed = t.fixed = true;
    feed_prefill(&p, &rng, 32, 3);
    feed_tier(&t, &rng, 32, 0.001, 5 * GB);
    assert_true(kvt_prefill_seconds(&p, 100, 0) == A * 100 + B * 100 * 100.0);
    assert_true(kvt_tier_seconds(&t, 1e9, 0) == 0.001 + 1 / GB * 1e9);
    assert_int_equal(p.taken, 32);
    assert_int_equal(t.taken, 32);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_start_values_rule_without_observations),
        cmocka_unit_test(test_chunks_add_up),
        cmocka_unit_test(test_prefill_is_found_whatever_the_start),
        cmocka_unit_test(test_prefill_survives_outliers),
        cmocka_unit_test(test_one_outlier_changes_nothing),
        cmocka_unit_test(test_an_absurd_first_one_waits),
        cmocka_unit_test(test_short_launches_are_not_fitted),
        cmocka_unit_test(test_prefill_follows_a_change),
        cmocka_unit_test(test_one_length_keeps_the_shape),
        cmocka_unit_test(test_contradictions_are_told),
        cmocka_unit_test(test_nonsense_is_refused),
        cmocka_unit_test(test_start_values_are_checked),
        cmocka_unit_test(test_tier_is_found_whatever_the_start),
        cmocka_unit_test(test_classes_of_size),
        cmocka_unit_test(test_collapse_and_recovery),
        cmocka_unit_test(test_one_odd_load_changes_nothing),
        cmocka_unit_test(test_probes_have_a_floor),
        cmocka_unit_test(test_fixed_models_stay),
    };
    printf("seeds: in each test, fixed\n");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
