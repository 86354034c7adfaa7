/* The plan: which blocks of a prompt to load.
 *
 * Goal:   by the models no other range of blocks is cheaper; a plan is made in microseconds; a slow
 *         tier is probed, and used again when it has recovered; queries that make no sense are
 *         refused with a plan that loads nothing; every number is finite.
 * Method: every range of small prompts, priced by a second implementation; random queries, of which
 *         many are hostile; seeds are printed.
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
#include "base/clock.h"
#include "base/rng.h"
#include "kvtier/error.h"
#include "plan/decide.h"

#define GB 1e9
#define BLOCKS_MAX 64u

struct world {
    struct kvt_prefill prefill;
    struct kvt_tier_model tiers[KVT_PLAN_TIERS];
    struct kvt_plan_models models;
    struct kvt_decide query;
    enum kvt_tier where[BLOCKS_MAX];
    uint32_t n;
};

/* DRAM at 20 GB/s and 0.1 ms, a drive of `rate`; a 70B model, 86,016 B a token. */
static void make(struct world *w, double rate)
{
    memset(w, 0, sizeof(*w));
    assert_true(kvt_prefill_init(&w->prefill, 55e-6, 1e-9));
    assert_true(kvt_tier_init(&w->tiers[KVT_TIER_DRAM], 0.0001, 20 * GB));
    assert_true(kvt_tier_init(&w->tiers[KVT_TIER_DISK], 0.002, rate));
    w->models.prefill = &w->prefill;
    w->models.tiers[KVT_TIER_DRAM] = &w->tiers[KVT_TIER_DRAM];
    w->models.tiers[KVT_TIER_DISK] = &w->tiers[KVT_TIER_DISK];
    w->query.block_tokens = 16;
    w->query.block_bytes = 16 * 86016;
}

static void place(struct world *w, uint32_t dram, uint32_t disk)
{
    for (w->n = 0; w->n < dram + disk; w->n++)
        w->where[w->n] = w->n < dram ? KVT_TIER_DRAM : KVT_TIER_DISK;
    kvt_decide_runs(&w->query, w->where, NULL, w->n, &w->models);
}

static struct kvt_plan decide(struct world *w)
{
    struct kvt_plan plan = {.struct_size = sizeof(plan)};
    assert_int_equal(kvt_decide(&w->query, &w->models, &plan), 0);
    assert_true(isfinite(plan.ttft_s) && isfinite(plan.load_s) && isfinite(plan.gpu_s));
    return plan;
}

/* The same price by another way: block by block. The class of size is the whole prompt's. */
static double price(const struct world *w, uint32_t from, uint32_t to)
{
    const struct kvt_decide *q = &w->query;
    double a = w->prefill.line.p, b = w->prefill.line.q, load = 0, disk = 0, head = 0, tail = 0;
    uint64_t total = q->prompt_tokens != 0 ? q->prompt_tokens
                                           : q->first_tokens + (uint64_t)w->n * q->block_tokens;
    for (uint64_t at = q->first_tokens; at < total; at++) {
        uint64_t block = (at - q->first_tokens) / q->block_tokens;
        double cost = a + b * (2 * (double)at + 1);
        head += block < from ? cost : 0;
        tail += block >= to ? cost : 0;
    }
    for (uint32_t t = 1; t < KVT_PLAN_TIERS; t++) {
        double all = 0, bytes = 0;
        for (uint32_t i = 0; i < w->n; i++) {
            all += (uint32_t)w->where[i] == t ? q->block_bytes : 0;
            bytes += (uint32_t)w->where[i] == t && i >= from && i < to ? q->block_bytes : 0;
        }
        const struct kvt_fit_line *line = &w->tiers[t].line[kvt_tier_class(all)];
        double seconds = bytes > 0 ? line->p + line->q * (bytes + q->queued[t]) : 0;
        if (t < KVT_TIER_DISK)
            load += seconds;
        else
            disk = fmax(disk, seconds); /* roots work at the same time */
    }
    load += disk;
    double front =
        q->cut == KVT_PLAN_CUT_OVERLAP ? pow(pow(head, 8) + pow(load, 8), 0.125) : head + load;
    return front + tail + q->lambda * (head + tail);
}

/* Every range that the engine could do, ends within a tier included. */
static double cheapest(const struct world *w)
{
    double best = price(w, 0, 0);
    for (uint32_t from = 0; from < w->n; from++)
        for (uint32_t to = from + 1; to <= w->n; to++)
            if (from == 0 || w->query.cut != KVT_PLAN_CUT_NONE)
                best = fmin(best, price(w, from, to));
    return best;
}

static void test_no_other_range_is_cheaper(void **state)
{
    (void)state;
    struct kvt_rng rng = {20261129};
    int reasons[KVT_PLAN_OFF + 1] = {0};
    for (int i = 0; i < 1500; i++) {
        struct world w;
        make(&w, 0.1 * GB * exp2((double)kvt_rng_below(&rng, 80) / 10));
        uint32_t dram = (uint32_t)kvt_rng_below(&rng, 24), disk = (uint32_t)kvt_rng_below(&rng, 24);
        place(&w, dram, disk);
        w.query.cut = (int)kvt_rng_below(&rng, 3);
        w.query.first_tokens = kvt_rng_below(&rng, 2) * kvt_rng_below(&rng, 20000);
        w.query.lambda = (double)kvt_rng_below(&rng, 3) / 2;
        w.query.queued[KVT_TIER_DISK] = (double)kvt_rng_below(&rng, 3) * 1e7;
        if (kvt_rng_below(&rng, 2))
            w.query.prompt_tokens =
                w.query.first_tokens + 16 * (uint64_t)w.n + 1 + kvt_rng_below(&rng, 500);
        struct kvt_plan plan = decide(&w);
        uint32_t to = (uint32_t)(plan.first + plan.count);
        assert_true(to <= w.n);
        double got = price(&w, (uint32_t)plan.first, to), best = cheapest(&w);
        /* a cut has to gain 2 % */
        double slack = w.query.cut == KVT_PLAN_CUT_NONE ? 1 + 1e-9 : 1 / 0.98 + 1e-9;
        if (got > best * slack)
            fail_msg("blocks %zu+%zu of %u+%u cost %g, best %g", plan.first, plan.count, dram, disk,
                     got, best);
        assert_true(got <= price(&w, 0, 0) * (1 + 1e-9));
        assert_true(got <= price(&w, 0, w.n) * (1 + 1e-9));
        assert_true(fabs(plan.ttft_s + w.query.lambda * plan.gpu_s - got) <= 1e-9 * got);
        reasons[plan.reason]++;
    }
    for (int reason = KVT_PLAN_LOAD; reason <= KVT_PLAN_PREFIX; reason++)
        assert_true(reasons[reason] > 10);
}

static void test_a_slow_tier_behind_a_fast_one(void **state)
{
    (void)state;
    struct world w;
    make(&w, 0.3 * GB);
    place(&w, 20, 20);
    struct kvt_plan plan = decide(&w);
    assert_int_equal(plan.reason, KVT_PLAN_PREFIX);
    assert_int_equal(plan.first, 0);
    assert_int_equal(plan.count, 20);
    assert_true(plan.ttft_s < plan.recompute_s && plan.ttft_s < plan.load_all_s);
}

static void test_a_busy_gpu_makes_loading_worth_more(void **state)
{
    (void)state;
    struct world w;
    make(&w, 1.4 * GB);
    place(&w, 0, 60);
    assert_int_equal(decide(&w).reason, KVT_PLAN_RECOMPUTE);
    w.query.lambda = 0.5;
    assert_int_equal(decide(&w).reason, KVT_PLAN_LOAD);
}

/* Blocks of a slow drive take more than half of their recompute time even one by one: so one is
 * probed when it is long overdue, and cut off at half. A long prompt pays for it. */
static void test_a_slow_tier_is_probed_and_comes_back(void **state)
{
    (void)state;
    struct world w;
    int probes = 0, plans = 0;
    make(&w, 0.02 * GB);
    place(&w, 0, 64);
    for (int i = 0; i < 2 * (int)KVT_PROBE_OVERDUE; i++) {
        struct kvt_plan plan = decide(&w);
        probes += plan.reason == KVT_PLAN_PROBE;
        assert_true(plan.reason == KVT_PLAN_PROBE ? plan.count >= 1 && plan.first == 0
                                                  : plan.reason == KVT_PLAN_RECOMPUTE);
        assert_true(plan.ttft_s <= 1.5 * plan.recompute_s);
        if (plan.reason == KVT_PLAN_PROBE) {
            assert_int_equal(plan.count, 1);
            assert_true(plan.deadline_s < 0.51 * plan.recompute_s + 0.002);
        }
    }
    assert_int_equal(probes, 2);
    w.tiers[KVT_TIER_DISK].left_aside = KVT_PROBE_OVERDUE;
    w.query.prompt_tokens = 4000;
    assert_int_equal(decide(&w).reason, KVT_PLAN_PROBE); /* overdue */
    w.query.prompt_tokens = 65536;
    for (int i = 0; i < 10 * (int)KVT_PROBE_EVERY; i++) {
        struct kvt_plan plan = decide(&w);
        probes += plan.reason == KVT_PLAN_PROBE;
        assert_true(plan.ttft_s < 1.05 * plan.recompute_s);
    }
    assert_int_equal(probes, 2 + 10);
    w.query.queued[KVT_TIER_DISK] = 1; /* others are loading from it */
    for (int i = 0; i < 2 * (int)KVT_PROBE_OVERDUE; i++)
        assert_int_equal(decide(&w).reason, KVT_PLAN_RECOMPUTE);
    w.query.queued[KVT_TIER_DISK] = 0;
    for (; plans < 200; plans++) {
        struct kvt_plan plan = decide(&w);
        uint64_t bytes = plan.count * (uint64_t)w.query.block_bytes;
        if (plan.reason == KVT_PLAN_LOAD)
            break;
        if (plan.count > 0)
            assert_int_equal(kvt_tier_observe(&w.tiers[KVT_TIER_DISK], bytes, 0,
                                              0.0005 + (double)bytes / (7 * GB)),
                             0);
    }
    print_message("           recovered after %d plans\n", plans);
    assert_in_range(plans, 1, 40);
}

static void test_blocks_that_cannot_be_loaded_end_the_run(void **state)
{
    (void)state;
    static const enum kvt_tier ends[] = {KVT_TIER_MISS, KVT_TIER_PENDING, KVT_TIER_REMOTE,
                                         (enum kvt_tier)77};
    for (size_t i = 0; i < KVT_ARRAY_LEN(ends); i++) {
        struct world w;
        make(&w, 10 * GB);
        place(&w, 10, 10);
        w.where[5] = ends[i];
        kvt_decide_runs(&w.query, w.where, NULL, w.n, &w.models);
        assert_int_equal(w.query.run_count, 1);
        assert_int_equal(w.query.runs[0].blocks, 5);
        w.where[0] = ends[i];
        kvt_decide_runs(&w.query, w.where, NULL, w.n, &w.models);
        assert_int_equal(decide(&w).reason, KVT_PLAN_NO_BLOCKS);
    }
}

static void test_contradictions_leave_all_or_nothing(void **state)
{
    (void)state;
    struct world w;
    make(&w, 3 * GB);
    place(&w, 0, 64);
    w.query.cut = KVT_PLAN_CUT_OVERLAP;
    assert_int_equal(decide(&w).reason, KVT_PLAN_CUT);
    for (int i = 0; i < 60; i++)
        assert_int_equal(kvt_tier_observe(&w.tiers[KVT_TIER_DISK], 50000000 + (uint64_t)i * 1000000,
                                          0, i % 2 ? 1.0 : 0.001),
                         0);
    struct kvt_plan plan = decide(&w);
    assert_int_equal(plan.unsure, 1);
    assert_true(plan.first == 0 &&
                (plan.count == 0 || plan.count == 64 || plan.reason == KVT_PLAN_PROBE));
}

/* Blocks on root 0, which is fast, and on root 1, of a given speed. */
static void two_roots(struct world *w, double second, const uint8_t *roots, uint32_t n)
{
    static enum kvt_tier where[BLOCKS_MAX];
    make(w, 10 * GB);
    assert_true(kvt_tier_init(&w->tiers[KVT_TIER_DISK + 1], 0.002, second));
    w->models.tiers[KVT_TIER_DISK + 1] = &w->tiers[KVT_TIER_DISK + 1];
    w->query.block_bytes = 1e8;
    w->query.block_tokens = 512;
    for (uint32_t i = 0; i < n; i++)
        where[i] = KVT_TIER_DISK;
    kvt_decide_runs(&w->query, where, roots, n, &w->models);
    w->query.prompt_tokens = 20000;
}

static void test_roots_have_models_of_their_own(void **state)
{
    (void)state;
    uint8_t halves[32] = {0}, turns[32];
    struct world w;
    for (uint32_t i = 0; i < 32; i++) {
        halves[i] = i >= 16;
        turns[i] = i % 2;
    }
    /* equal ones bring their halves at the same time */
    two_roots(&w, 10 * GB, halves, 32);
    assert_int_equal(w.query.run_count, 2);
    struct kvt_plan plan = decide(&w);
    double tail = plan.load_all_s - plan.load_s;
    assert_int_equal(plan.reason, KVT_PLAN_LOAD);
    assert_true(fabs(plan.load_s - (0.002 + 1.6e9 / (10 * GB))) < 1e-9);
    uint8_t one[32] = {0};
    two_roots(&w, 10 * GB, one, 32);
    assert_true(fabs(decide(&w).load_s - (0.002 + 3.2e9 / (10 * GB))) < 1e-9);
    /* a slow one behind a fast one: the fast one's part */
    two_roots(&w, 0.02 * GB, halves, 32);
    plan = decide(&w);
    assert_int_equal(plan.reason, KVT_PLAN_PREFIX);
    assert_int_equal(plan.count, 16);
    assert_true(plan.load_all_s - tail > 79);
    /* where every other block is on the slow one there is nothing to be had */
    two_roots(&w, 0.02 * GB, turns, 32);
    assert_int_equal(w.query.run_count, KVT_PLAN_RUNS);
    plan = decide(&w);
    assert_true(plan.count <= 1);
    /* the slow one is left aside, and probed in its turn: not the fast one */
    two_roots(&w, 0.02 * GB, halves, 32);
    for (uint32_t i = 0; i < 200; i++)
        (void)decide(&w);
    assert_int_equal(w.tiers[KVT_TIER_DISK].left_aside, 0);
    assert_true(w.tiers[KVT_TIER_DISK + 1].left_aside > 0);
    /* a root that has no model cannot be loaded from */
    turns[0] = 0;
    turns[1] = 7;
    two_roots(&w, 10 * GB, turns, 32);
    assert_int_equal(w.query.run_count, 1);
    assert_int_equal(w.query.runs[0].blocks, 1);
    turns[0] = 255;
    two_roots(&w, 10 * GB, turns, 32);
    assert_int_equal(w.query.run_count, 0);
}

static void assert_refused(struct world *w, int code)
{
    struct kvt_plan plan = {.struct_size = sizeof(plan), .count = 7};
    assert_int_equal(kvt_decide(&w->query, &w->models, &plan), code);
    assert_int_equal(plan.count, 0);
    assert_int_equal(plan.reason, KVT_PLAN_NO_BLOCKS);
    make(w, GB);
    place(w, 4, 4);
}

static void test_nonsense_is_refused(void **state)
{
    (void)state;
    static const double bad[] = {-1, INFINITY, -INFINITY, NAN};
    struct world w;
    make(&w, GB);
    place(&w, 4, 4);
    for (size_t i = 0; i < KVT_ARRAY_LEN(bad); i++) {
        w.query.lambda = bad[i];
        assert_refused(&w, KVT_E_INVAL);
        w.query.block_bytes = bad[i];
        assert_refused(&w, KVT_E_INVAL);
        w.query.queued[KVT_TIER_DISK] = bad[i];
        assert_refused(&w, KVT_E_INVAL);
    }
    w.query.block_bytes = 0;
    assert_refused(&w, KVT_E_INVAL);
    w.query.block_tokens = 0;
    assert_refused(&w, KVT_E_INVAL);
    w.query.cut = 3;
    assert_refused(&w, KVT_E_INVAL);
    w.query.prompt_tokens = 127; /* 8 blocks are 128 */
    assert_refused(&w, KVT_E_INVAL);
    w.query.first_tokens = UINT64_MAX;
    assert_refused(&w, KVT_E_LIMIT);
    w.query.prompt_tokens = UINT64_MAX;
    assert_refused(&w, KVT_E_LIMIT);
    w.query.runs[0].blocks = UINT32_MAX;
    assert_refused(&w, KVT_E_LIMIT);
}

/* However the tiers alternate, a plan looks at KVT_PLAN_RUNS runs at most, and at every block in
 * one of them: that is what keeps it at microseconds. The time is printed (goal: 8,192 blocks in
 * less than 20 us), not demanded, since machines differ. */
static void test_a_plan_looks_at_few_runs(void **state)
{
    (void)state;
    static enum kvt_tier where[8192];
    struct kvt_clock clock = kvt_clock_system();
    for (uint32_t period = 8192; period >= 1; period /= 32) {
        int64_t best = INT64_MAX;
        struct world w;
        make(&w, 3 * GB);
        w.query.cut = KVT_PLAN_CUT_OVERLAP;
        w.query.lambda = 0.5;
        for (uint32_t i = 0; i < 8192; i++)
            where[i] = i / period % 2 ? KVT_TIER_DISK : KVT_TIER_DRAM;
        for (int round = 0; round < 200; round++) {
            int64_t start = kvt_clock_now(&clock);
            kvt_decide_runs(&w.query, where, NULL, 8192, &w.models);
            (void)decide(&w);
            best = KVT_MIN(best, kvt_clock_now(&clock) - start);
        }
        print_message("           runs of %u blocks: %.1f us\n", period, (double)best / 1e3);
        uint64_t blocks = 0, by_tier = 0;
        for (uint32_t r = 0; r < w.query.run_count; r++) {
            blocks += w.query.runs[r].blocks;
            by_tier += (uint64_t)w.query.runs[r].by_tier[KVT_TIER_DRAM] +
                       w.query.runs[r].by_tier[KVT_TIER_DISK];
        }
        assert_int_equal(w.query.run_count, KVT_MIN(8192 / period, KVT_PLAN_RUNS));
        assert_int_equal(blocks, 8192);
        assert_int_equal(by_tier, 8192);
    }
}

/* A load has time for twice what is expected, or half of what computing takes, whichever is longer,
 * and never much more than computing; a probe little; no load, no deadline. */
static void test_a_load_has_a_deadline(void **state)
{
    (void)state;
    struct kvt_rng rng = {7};
    int probes = 0;
    for (int i = 0; i < 4000; i++) {
        struct world w;
        make(&w, 0.05 * GB * exp2((double)kvt_rng_below(&rng, 100) / 10));
        place(&w, (uint32_t)kvt_rng_below(&rng, 24), (uint32_t)kvt_rng_below(&rng, 24));
        w.query.cut = (int)kvt_rng_below(&rng, 3);
        w.query.lambda = (double)kvt_rng_below(&rng, 3);
        w.tiers[KVT_TIER_DISK].left_aside = (uint32_t)kvt_rng_below(&rng, 80);
        struct kvt_plan plan = decide(&w);
        double most = fmax(plan.recompute_s, 1.25 * plan.load_s) + 0.0021;
        assert_true(isfinite(plan.deadline_s));
        assert_true((plan.count == 0) == (plan.deadline_s == 0));
        if (plan.count == 0)
            continue;
        if (plan.reason == KVT_PLAN_PROBE) {
            probes++;
            assert_true(plan.deadline_s <= 0.5 * plan.recompute_s + 0.0021);
            assert_true(plan.deadline_s < 2 * plan.load_s + 0.06 * plan.recompute_s + 0.0021);
        } else {
            assert_true(plan.deadline_s > plan.load_s);
            assert_true(plan.deadline_s <= most);
            assert_true(plan.deadline_s >= 0.5 * plan.recompute_s);
        }
    }
    assert_true(probes > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_other_range_is_cheaper),
        cmocka_unit_test(test_a_load_has_a_deadline),
        cmocka_unit_test(test_a_slow_tier_behind_a_fast_one),
        cmocka_unit_test(test_a_busy_gpu_makes_loading_worth_more),
        cmocka_unit_test(test_a_slow_tier_is_probed_and_comes_back),
        cmocka_unit_test(test_blocks_that_cannot_be_loaded_end_the_run),
        cmocka_unit_test(test_roots_have_models_of_their_own),
        cmocka_unit_test(test_contradictions_leave_all_or_nothing),
        cmocka_unit_test(test_nonsense_is_refused),
        cmocka_unit_test(test_a_plan_looks_at_few_runs),
    };
    printf("seeds: in each test, fixed\n");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
