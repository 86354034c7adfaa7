/* Goal: the queue and the baseline behind `kvtier replay` are right: least recently used is what a
 * list that is searched from end to end gives; requests wait for each other as they would, by hand;
 * the plan finds the hidden rates out: with start values four times off, either way, and times that
 * vary, it is about as good as the better of always loading and never, over a grid of drives; a
 * drive that becomes 20 times slower is left alone within 20 loads, and used again when it is well;
 * blocks that are still being computed are not there yet, those that are when an engine begins are,
 * also when they were evicted for who comes later; a load that is late is cut off, and what
 * came of it used; computing beside the load is faster than either alone.
 * Method: made traces, a naive second implementation, closed formulas. The seed is printed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "kvtier/error.h"
#include "replay_lru.h"
#include "replay_sim.h"

#define SEED 20261129u

static struct replay_world world(void)
{
    return (struct replay_world){.prefill_a = 1e-4,
                                 .prefill_b = 1e-9,
                                 .latency_s = {[KVT_TIER_DRAM] = 1e-4, [KVT_TIER_DISK] = 1e-3},
                                 .rate = {[KVT_TIER_DRAM] = 25e9, [KVT_TIER_DISK] = 5e9},
                                 .block_bytes = 44e6,
                                 .engines = 1,
                                 .seed = SEED};
}

static const struct replay_planner fair = {.priors = 1, .lambda = 1};

/* ---- the baseline ---------------------------------------------------------------------------- */

/* A block's last use, searched from end to end. */
struct naive {
    uint64_t used[4096]; /* 0: not held */
    uint64_t clock, count, room;
};

static void naive_use(struct naive *n, uint32_t block)
{
    if (n->room == 0)
        return;
    if (n->used[block] == 0 && n->count == n->room) {
        uint32_t oldest = 0;
        for (uint32_t i = 0; i < 4096; i++)
            if (n->used[i] != 0 && (n->used[oldest] == 0 || n->used[i] < n->used[oldest]))
                oldest = i;
        n->used[oldest] = 0;
        n->count--;
    }
    n->count += n->used[block] == 0;
    n->used[block] = ++n->clock;
}

static uint64_t naive_hits(const struct replay_trace *trace, uint64_t dram, uint64_t disk)
{
    struct naive *tiers = calloc(2, sizeof(*tiers));
    uint64_t hits = 0;
    assert_non_null(tiers);
    tiers[0].room = dram;
    tiers[1].room = disk;
    for (size_t i = 0; i < trace->count; i++) {
        const struct replay_request *r = &trace->requests[i];
        uint32_t n = 0;
        while (n < r->count && (tiers[0].used[r->ranks[n]] || tiers[1].used[r->ranks[n]]))
            n++;
        hits += n;
        for (uint32_t j = r->count; j-- > 0;)
            for (int t = 0; t < 2; t++)
                naive_use(&tiers[t], r->ranks[j]);
    }
    free(tiers);
    return hits;
}

static void least_recently_used_is_that(void **state)
{
    (void)state;
    static const uint64_t sizes[][2] = {{0, 0},   {1, 0},    {7, 0},     {60, 0},
                                        {200, 0}, {900, 0},  {4096, 0},  {0, 150},
                                        {50, 50}, {40, 400}, {500, 100}, {100, 4096}};
    print_message("           seed %u\n", SEED);
    for (uint64_t seed = SEED; seed < SEED + 3; seed++) {
        struct replay_trace trace;
        assert_int_equal(replay_trace_make(&trace, seed, 400), 0);
        assert_true(trace.distinct < 4096);
        for (size_t i = 0; i < KVT_ARRAY_LEN(sizes); i++) {
            struct replay_hits *hits = calloc(trace.count, sizeof(*hits));
            uint64_t sum = 0;
            assert_non_null(hits);
            assert_int_equal(replay_lru(&trace, sizes[i][0], sizes[i][1], hits),
                             naive_hits(&trace, sizes[i][0], sizes[i][1]));
            for (size_t j = 0; j < trace.count; j++) {
                sum += hits[j].dram + hits[j].disk;
                assert_true(hits[j].front <= hits[j].dram);
            }
            assert_int_equal(sum, naive_hits(&trace, sizes[i][0], sizes[i][1]));
            free(hits);
        }
        replay_trace_free(&trace);
    }
}

/* ---- the queue ------------------------------------------------------------------------------- */

/* Requests of `tokens` at these times, blocks of 512, all of them hit where hits says so. */
static void fixed_trace(struct replay_trace *trace, size_t count, const int64_t *at_ms,
                        uint32_t tokens)
{
    memset(trace, 0, sizeof(*trace));
    trace->block_tokens = 512;
    trace->count = trace->room = count;
    trace->requests = calloc(count, sizeof(*trace->requests));
    assert_non_null(trace->requests);
    for (size_t i = 0; i < count; i++) {
        trace->requests[i].at_ms = at_ms[i];
        trace->requests[i].tokens = tokens;
    }
}

static void close_to(double got, double want)
{
    if (!(fabs(got - want) <= 1e-9 + 1e-6 * fabs(want)))
        fail_msg("%.12g, wanted %.12g", got, want);
}

static void requests_wait_for_each_other(void **state)
{
    (void)state;
    static const int64_t at[] = {1000, 1000, 1100, 9000};
    static const struct replay_hits none[4] = {{0, 0, 0}};
    struct replay_trace trace;
    struct replay_outcome out;
    struct replay_world w = world();
    double each = 8000 * w.prefill_a + 8000.0 * 8000.0 * w.prefill_b;
    fixed_trace(&trace, 4, at, 8000);
    assert_int_equal(replay_sim(&trace, none, REPLAY_RECOMPUTE, &w, &fair, &out), 0);
    close_to(out.ttft_s[0], each);
    close_to(out.ttft_s[1], 2 * each);
    close_to(out.ttft_s[2], 3 * each - 0.1);
    close_to(out.ttft_s[3], each);
    close_to(out.engine_s, 4 * each);
    replay_outcome_free(&out);
    w.engines = 2;
    assert_int_equal(replay_sim(&trace, none, REPLAY_RECOMPUTE, &w, &fair, &out), 0);
    close_to(out.ttft_s[1], each);
    close_to(out.ttft_s[2], 2 * each - 0.1);
    replay_outcome_free(&out);
    assert_int_equal(replay_engines(&trace, &w, 0.8), (uint32_t)ceil(4 * each / 8 / 0.8));
    replay_trace_free(&trace);
}

/* Two loads from one drive stand behind each other; one from DRAM passes them, and the engine takes
 * whose load is there. */
static void loads_stand_in_line(void **state)
{
    (void)state;
    static const int64_t at[] = {0, 0, 0};
    static const struct replay_hits hits[3] = {{0, 10, 0}, {0, 10, 0}, {10, 0, 10}};
    struct replay_trace trace;
    struct replay_outcome out;
    struct replay_world w = world();
    double rest = 8000 - 5120,
           compute = rest * w.prefill_a + rest * (rest + 2 * 5120) * w.prefill_b;
    double disk = 440e6 / 5e9, dram = 440e6 / 25e9;
    double first = dram + 1e-4 + compute;
    fixed_trace(&trace, 3, at, 8000);
    assert_int_equal(replay_sim(&trace, hits, REPLAY_ALWAYS_LOAD, &w, &fair, &out), 0);
    close_to(out.ttft_s[2], first);
    close_to(out.ttft_s[0], first + compute);
    close_to(out.ttft_s[1], first + 2 * compute);
    replay_outcome_free(&out);
    w.engines = 3;
    assert_int_equal(replay_sim(&trace, hits, REPLAY_ALWAYS_LOAD, &w, &fair, &out), 0);
    close_to(out.ttft_s[0], disk + 1e-3 + compute);
    close_to(out.ttft_s[1], 2 * disk + 1e-3 + compute);
    close_to(out.ttft_s[2], first);
    assert_int_equal(out.loaded_dram, 10);
    assert_int_equal(out.loaded_disk, 20);
    replay_outcome_free(&out);
    /* a prompt that is stored whole computes one token at least: its last block is not loaded */
    for (size_t i = 0; i < 3; i++)
        trace.requests[i].tokens = 5120;
    assert_int_equal(replay_sim(&trace, hits, REPLAY_ALWAYS_LOAD, &w, &fair, &out), 0);
    assert_int_equal(out.loaded_dram, 9);
    assert_int_equal(out.loaded_disk, 18);
    replay_outcome_free(&out);
    replay_trace_free(&trace);
}

/* All requests are of the same blocks. */
static void one_prompt(struct replay_trace *trace, uint32_t *ranks, uint32_t blocks)
{
    trace->distinct = blocks;
    for (uint32_t i = 0; i < blocks; i++)
        ranks[i] = i;
    for (size_t i = 0; i < trace->count; i++) {
        trace->requests[i].ranks = ranks;
        trace->requests[i].count = blocks;
    }
}

/* Four requests of the same 16 blocks and another one that has them no longer. */
static void what_is_being_computed_is_not_there_yet(void **state)
{
    (void)state;
    enum { COUNT = 5, BLOCKS = 16 };
    static const int64_t at[COUNT] = {0, 100, 5000, 9000, 9100};
    /* the store, in the order of arrival: the last but one finds nothing, they had been evicted */
    static const struct replay_hits hits[COUNT] = {
        {0, 0, 0}, {BLOCKS, 0, BLOCKS}, {BLOCKS, 0, BLOCKS}, {4, 0, 4}, {BLOCKS, 0, BLOCKS}};
    static uint32_t ranks[BLOCKS];
    struct replay_trace trace;
    struct replay_outcome out;
    struct replay_world w = world();
    double n = BLOCKS * 512, rest = 100;
    double whole = (n + rest) * w.prefill_a + (n + rest) * (n + rest) * w.prefill_b;
    double tail = rest * w.prefill_a + rest * (rest + 2 * n) * w.prefill_b;
    fixed_trace(&trace, COUNT, at, BLOCKS * 512 + 100);
    one_prompt(&trace, ranks, BLOCKS);
    w.engines = COUNT;
    assert_int_equal(replay_sim(&trace, hits, REPLAY_ALWAYS_LOAD, &w, &fair, &out), 0);
    double load = BLOCKS * w.block_bytes / w.rate[KVT_TIER_DRAM] + w.latency_s[KVT_TIER_DRAM];
    close_to(out.ttft_s[0], whole);
    close_to(out.ttft_s[1], whole); /* the first one is at it */
    close_to(out.ttft_s[2], load + tail);
    assert_true(out.ttft_s[3] > load + tail && out.ttft_s[3] < whole);
    /* four of them had been there all the time */
    close_to(out.ttft_s[4], out.ttft_s[3]);
    assert_int_equal(out.pending, BLOCKS + BLOCKS - 4);
    replay_outcome_free(&out);
    for (size_t i = 0; i < COUNT; i++)
        trace.requests[i].ranks = NULL; /* not of the heap */
    replay_trace_free(&trace);
}

/* Three requests of the same 16 blocks before one engine, which begins the second one when the
 * first has ended. For the third the store had lost them: the second one is not concerned. */
static void what_is_there_when_an_engine_begins_is_found(void **state)
{
    (void)state;
    enum { COUNT = 3, BLOCKS = 16 };
    static const int64_t at[COUNT] = {0, 1, 2};
    static const struct replay_hits hits[COUNT] = {{0, 0, 0}, {BLOCKS, 0, BLOCKS}, {0, 0, 0}};
    static uint32_t ranks[BLOCKS];
    struct replay_trace trace;
    struct replay_outcome out;
    struct replay_world w = world();
    double n = BLOCKS * 512, rest = 100;
    double whole = (n + rest) * w.prefill_a + (n + rest) * (n + rest) * w.prefill_b;
    double tail = rest * w.prefill_a + rest * (rest + 2 * n) * w.prefill_b;
    double load = BLOCKS * w.block_bytes / w.rate[KVT_TIER_DRAM] + w.latency_s[KVT_TIER_DRAM];
    fixed_trace(&trace, COUNT, at, BLOCKS * 512 + 100);
    one_prompt(&trace, ranks, BLOCKS);
    assert_int_equal(replay_sim(&trace, hits, REPLAY_ALWAYS_LOAD, &w, &fair, &out), 0);
    close_to(out.ttft_s[0], whole);
    close_to(out.ttft_s[2],
             2 * whole - 0.002); /* passes while the second one's load is under way */
    close_to(out.ttft_s[1], 2 * whole + tail - 0.001);
    assert_int_equal(out.loaded_dram, BLOCKS);
    assert_int_equal(out.pending, 0);
    replay_outcome_free(&out);
    trace.count = 2;
    assert_int_equal(replay_sim(&trace, hits, REPLAY_KVTIER, &w, &fair, &out), 0);
    close_to(out.ttft_s[1], whole + load + tail - 0.001);
    close_to(out.engine_s, whole + tail);
    assert_int_equal(out.pending, 0);
    replay_outcome_free(&out);
    w.engines = 2; /* the other one begins it at once, and computes it again */
    assert_int_equal(replay_sim(&trace, hits, REPLAY_KVTIER, &w, &fair, &out), 0);
    close_to(out.ttft_s[1], whole);
    assert_int_equal(out.pending, BLOCKS);
    replay_outcome_free(&out);
    for (size_t i = 0; i < COUNT; i++)
        trace.requests[i].ranks = NULL; /* not of the heap */
    replay_trace_free(&trace);
}

/* ---- the plan -------------------------------------------------------------------------------- */

static double mean(const struct replay_outcome *out, size_t from, size_t count)
{
    double sum = 0;
    for (size_t i = from; i < count; i++)
        sum += out->ttft_s[i];
    return sum / (double)(count - from);
}

/* Hits of an endless store with everything on disk, or in DRAM where a coin says so. */
static struct replay_hits *endless(const struct replay_trace *trace, int dram_percent)
{
    struct replay_hits *hits = calloc(trace->count, sizeof(*hits));
    struct kvt_rng rng = {SEED};
    assert_non_null(hits);
    assert_true(replay_lru(trace, 0, trace->distinct + 1, hits) > 0);
    for (size_t i = 0; i < trace->count; i++)
        if ((int)kvt_rng_below(&rng, 100) < dram_percent)
            hits[i] = (struct replay_hits){hits[i].disk, 0, hits[i].disk};
    return hits;
}

static void hidden_rates_are_found_out(void **state)
{
    (void)state;
    static const double drives[] = {0.05e9, 0.3e9, 1e9, 3e9, 12e9, 50e9};
    static const double priors[] = {0.25, 1, 4};
    struct replay_trace trace;
    double worst = 0;
    assert_int_equal(replay_trace_make(&trace, SEED, 3000), 0);
    struct replay_hits *hits = endless(&trace, 30);
    for (size_t d = 0; d < KVT_ARRAY_LEN(drives); d++) {
        for (size_t p = 0; p < KVT_ARRAY_LEN(priors); p++) {
            struct replay_planner planner = {.priors = priors[p], .lambda = 1};
            struct replay_world w = world();
            struct replay_outcome out[REPLAY_WAYS];
            double means[REPLAY_WAYS];
            w.rate[KVT_TIER_DISK] = drives[d];
            w.jitter = 0.2;
            w.engines = replay_engines(&trace, &w, 0.5);
            for (int way = 0; way < REPLAY_WAYS; way++) {
                assert_int_equal(
                    replay_sim(&trace, hits, (enum replay_way)way, &w, &planner, &out[way]), 0);
                means[way] = mean(&out[way], 300, trace.count); /* once warm */
                replay_outcome_free(&out[way]);
            }
            double best = fmin(means[REPLAY_RECOMPUTE], means[REPLAY_ALWAYS_LOAD]);
            worst = fmax(worst, means[REPLAY_KVTIER] / best);
            print_message("           drive %6.2f GB/s, start values x %.2f: kvtier %.3f s, "
                          "recompute %.3f, always %.3f\n",
                          drives[d] * 1e-9, priors[p], means[0], means[1], means[2]);
        }
    }
    print_message("           worst: %.3f of the better of both\n", worst);
    assert_true(worst <= 1.05);
    free(hits);
    replay_trace_free(&trace);
}

static void a_collapse_is_noticed_and_so_is_its_end(void **state)
{
    (void)state;
    enum { COUNT = 1500 };
    int64_t at[COUNT];
    struct replay_hits hits[COUNT];
    struct replay_trace trace;
    struct replay_outcome out;
    struct replay_world w = world();
    const struct replay_planner planner = {.priors = 4, .lambda = 1};
    for (size_t i = 0; i < COUNT; i++) {
        at[i] = (int64_t)i * 3000;
        hits[i] = (struct replay_hits){0, 16, 0};
    }
    fixed_trace(&trace, COUNT, at, 16 * 512 + 100);
    w.jitter = 0.1;
    w.slow = 20;
    w.slow_from_s = 500 * 3.0;
    w.slow_to_s = 1000 * 3.0;
    assert_int_equal(replay_sim(&trace, hits, REPLAY_KVTIER, &w, &planner, &out), 0);
    /* 16 blocks take 0.14 s, 2.8 s while it is slow; computing them 0.9 s */
    size_t loads = 0, back = 0, last = 0, fast = 0;
    for (size_t i = 400; i < 500; i++)
        fast += out.asked_disk[i] == 16;
    for (size_t i = 500; i < 1000; i++) {
        loads += out.asked_disk[i] == 16;
        last = out.asked_disk[i] == 16 ? i : last;
    }
    for (size_t i = 1000; i < COUNT; i++)
        if (out.asked_disk[i] == 16)
            back = back ? back : i;
    size_t probes = 0;
    for (size_t i = 1000; i < back; i++)
        probes += out.from_disk[i] > 0;
    print_message("           %zu whole loads from the slow drive, the last one the %zu. request; "
                  "back after %zu probes, %zu requests\n",
                  loads, last - 499, probes, back - 1000);
    assert_int_equal(fast, 100);
    assert_true(loads <= 20);
    assert_true(back > 0 && probes <= 20);
    assert_int_equal(out.from_disk[COUNT - 1], 16);
    replay_outcome_free(&out);
    replay_trace_free(&trace);
}

/* A plan that believes a drive to be four times as fast as it is, and the engine to be four times
 * as slow: the deadline bounds what that costs, and the drive is free for the next one. */
static void what_is_late_is_cut_off(void **state)
{
    (void)state;
    static const int64_t at[] = {0, 3600};
    static const struct replay_hits hits[] = {{0, 16, 0}, {0, 1, 0}};
    const struct replay_planner wrong = {.priors = 4, .lambda = 1};
    struct replay_trace trace;
    struct replay_outcome out;
    struct replay_world w = world();
    w.rate[KVT_TIER_DISK] = 1e8;
    w.engines = 2;
    fixed_trace(&trace, 2, at, 16 * 512 + 100);
    assert_int_equal(replay_sim(&trace, hits, REPLAY_ALWAYS_LOAD, &w, &wrong, &out), 0);
    double waited = out.ttft_s[0], queued = out.ttft_s[1];
    assert_int_equal(out.late, 0);
    replay_outcome_free(&out);
    assert_int_equal(replay_sim(&trace, hits, REPLAY_KVTIER, &w, &wrong, &out), 0);
    print_message("           %.3f s instead of %.3f s, %u of 16 blocks had come\n", out.ttft_s[0],
                  waited, out.from_disk[0]);
    assert_int_equal(out.late, 1);
    assert_true(out.from_disk[0] > 4 && out.from_disk[0] < 16);
    double rest = 16 * 512 + 100 - 512.0 * out.from_disk[0];
    double compute =
        rest * w.prefill_a + rest * (rest + 2 * 512.0 * out.from_disk[0]) * w.prefill_b;
    double there = out.ttft_s[0] - compute; /* the deadline: no block more would have come */
    assert_true(there >= out.from_disk[0] * 0.44);
    assert_true(there < (out.from_disk[0] + 1) * 0.44 + 0.002);
    assert_true(out.ttft_s[0] < waited && out.ttft_s[1] < queued);
    replay_outcome_free(&out);
    replay_trace_free(&trace);
}

static void both_ends_are_faster_than_one(void **state)
{
    (void)state;
    static const int64_t at[] = {0};
    static const struct replay_hits hits[] = {{0, 16, 0}};
    const struct replay_planner both = {.priors = 1, .lambda = 0, .cut = KVT_PLAN_CUT_OVERLAP};
    struct replay_trace trace;
    struct replay_outcome out[REPLAY_WAYS];
    struct replay_world w = world();
    double tokens = 16 * 512 + 100;
    w.rate[KVT_TIER_DISK] = 16 * 44e6 / (tokens * w.prefill_a + tokens * tokens * w.prefill_b);
    fixed_trace(&trace, 1, at, 16 * 512 + 100);
    for (int way = 0; way < REPLAY_WAYS; way++)
        assert_int_equal(replay_sim(&trace, hits, (enum replay_way)way, &w, &both, &out[way]), 0);
    double best = fmin(out[REPLAY_RECOMPUTE].ttft_s[0], out[REPLAY_ALWAYS_LOAD].ttft_s[0]);
    print_message("           %.3f s, the better of both alone %.3f s\n", out[0].ttft_s[0], best);
    assert_int_equal(out[0].reasons[KVT_PLAN_CUT], 1);
    assert_true(out[0].ttft_s[0] < 0.65 * best);
    assert_true(out[0].from_disk[0] > 4 && out[0].from_disk[0] < 12);
    assert_true(out[0].engine_s < out[REPLAY_RECOMPUTE].engine_s);
    /* a drive that stands still: the engine has computed all by itself, no later */
    w.slow = 1000;
    w.slow_to_s = 1000;
    struct replay_outcome slow;
    assert_int_equal(replay_sim(&trace, hits, REPLAY_KVTIER, &w, &both, &slow), 0);
    close_to(slow.ttft_s[0], out[REPLAY_RECOMPUTE].ttft_s[0]);
    replay_outcome_free(&slow);
    for (int way = 0; way < REPLAY_WAYS; way++)
        replay_outcome_free(&out[way]);
    replay_trace_free(&trace);
}

static void worlds_that_make_no_sense_are_refused(void **state)
{
    (void)state;
    static const int64_t at[] = {0};
    static const struct replay_hits none[1] = {{0, 0, 0}};
    struct replay_trace trace;
    struct replay_outcome out;
    fixed_trace(&trace, 1, at, 1000);
    for (int i = 0; i < 12; i++) {
        struct replay_world w = world();
        struct replay_planner planner = fair;
        switch (i) {
        case 0:
            w.prefill_a = 0;
            break;
        case 1:
            w.prefill_a = -1;
            break;
        case 2:
            w.prefill_a = NAN;
            break;
        case 3:
            w.prefill_b = -1;
            break;
        case 4:
            w.rate[KVT_TIER_DISK] = 0;
            break;
        case 5:
            w.rate[KVT_TIER_DRAM] = NAN;
            break;
        case 6:
            w.latency_s[KVT_TIER_DISK] = -1;
            break;
        case 7:
            w.jitter = 1;
            break;
        case 8:
            w.block_bytes = 0;
            break;
        case 9:
            w.engines = 0;
            break;
        case 10:
            planner.priors = 0;
            break;
        default:
            planner.priors = INFINITY;
            break;
        }
        assert_int_equal(replay_sim(&trace, none, REPLAY_KVTIER, &w, &planner, &out), KVT_E_INVAL);
        replay_outcome_free(&out);
    }
    replay_trace_free(&trace);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(least_recently_used_is_that),
        cmocka_unit_test(requests_wait_for_each_other),
        cmocka_unit_test(loads_stand_in_line),
        cmocka_unit_test(what_is_being_computed_is_not_there_yet),
        cmocka_unit_test(what_is_there_when_an_engine_begins_is_found),
        cmocka_unit_test(what_is_late_is_cut_off),
        cmocka_unit_test(both_ends_are_faster_than_one),
        cmocka_unit_test(hidden_rates_are_found_out),
        cmocka_unit_test(a_collapse_is_noticed_and_so_is_its_end),
        cmocka_unit_test(worlds_that_make_no_sense_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
