/* The search for the cheapest range of blocks to load. See decide.h for what it minimises.
 *
 * Invariants: the answer is never worse, by the models, than loading all and than loading nothing,
 * a probe apart, which takes 4 % of the recompute time, half of it when long overdue. Every
 * number of a plan is finite. Threads: the owner's of the models. Does not look at the clock.
 */
#include "plan/decide.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"

/* A cut trusts both models to the last per cent, where all or nothing needs the sign alone. */
#define CUT_WORTH 0.98
#define PROBE_BYTES_MAX 0x1p26 /* enough to measure any drive */
#define LATE_FACTOR 2.0        /* a load that takes twice as long is not the one that was planned */
#define LATE_SHARE 0.5         /* of the recompute time: what is not there then has cost enough */
#define LATE_SHARE_PROBE 0.05
#define LATE_SLACK_S 0.002 /* a scheduler's whim is no change of the drive */
#define TOKENS_MAX (UINT64_C(1) << 30)

/* The query as numbers that a candidate is priced with in a few multiplications. */
struct search {
    const struct kvt_decide *query;
    const struct kvt_plan_models *models;
    double tokens;                                    /* of a block */
    double start[KVT_PLAN_RUNS + 1];                  /* first block of each run */
    double before[KVT_PLAN_RUNS + 1][KVT_PLAN_TIERS]; /* bytes in the runs before it */
    double latency[KVT_PLAN_TIERS], per_byte[KVT_PLAN_TIERS];
    uint32_t used[KVT_PLAN_TIERS], used_count; /* tiers that have blocks of it */
};

struct candidate {
    uint32_t from, to; /* blocks to load */
    double objective, ttft, load, gpu;
};

/* How many of n > 0 are like the first; sixteen at a time, since runs are long. roots: NULL where
 * they do not matter. */
static size_t same_from(const enum kvt_tier *tiers, const uint8_t *roots, size_t n)
{
    size_t i = 1;
    for (; i + 16 <= n; i += 16) {
        unsigned differ = 0;
        for (size_t j = 0; j < 16; j++)
            differ |= (unsigned)tiers[i + j] ^ (unsigned)tiers[0];
        for (size_t j = 0; j < 16 && roots != NULL; j++)
            differ |= (unsigned)roots[i + j] ^ (unsigned)roots[0];
        if (differ != 0)
            break;
    }
    while (i < n && tiers[i] == tiers[0] && (roots == NULL || roots[i] == roots[0]))
        i++;
    return i;
}

void kvt_decide_runs(struct kvt_decide *query, const enum kvt_tier *tiers, const uint8_t *roots,
                     size_t n, const struct kvt_plan_models *models)
{
    struct kvt_plan_run *run = NULL;
    query->run_count = 0;
    for (size_t i = 0, end; i < n; i = end) {
        unsigned tier = (unsigned)tiers[i];
        const uint8_t *of = tier == KVT_TIER_DISK && roots != NULL ? &roots[i] : NULL;
        if (tier == KVT_TIER_MISS || tier > KVT_TIER_REMOTE)
            break;
        end = i + same_from(&tiers[i], of, n - i);
        if (tier == KVT_TIER_REMOTE)
            tier = (unsigned)KVT_TIER_DISK + KVT_PLAN_ROOT_REMOTE;
        else
            tier += of != NULL ? *of : 0;
        if (tier >= KVT_PLAN_TIERS || models->tiers[tier] == NULL)
            break;
        if (run == NULL || query->run_count < KVT_PLAN_RUNS) {
            run = &query->runs[query->run_count++];
            memset(run, 0, sizeof(*run));
        }
        run->blocks += (uint32_t)(end - i);
        run->by_tier[tier] += (uint32_t)(end - i);
    }
}

static int check(const struct kvt_decide *query)
{
    uint64_t tokens = query->first_tokens;
    if (query->block_tokens == 0 || !isfinite(query->block_bytes) || !(query->block_bytes > 0) ||
        !isfinite(query->lambda) || query->lambda < 0 || query->run_count > KVT_PLAN_RUNS ||
        query->cut < KVT_PLAN_CUT_NONE || query->cut > KVT_PLAN_CUT_OVERLAP)
        return KVT_E_INVAL;
    for (uint32_t i = 0; i < KVT_PLAN_TIERS; i++)
        if (!isfinite(query->queued[i]) || query->queued[i] < 0)
            return KVT_E_INVAL;
    if (tokens > TOKENS_MAX || query->prompt_tokens > TOKENS_MAX)
        return KVT_E_LIMIT;
    for (uint32_t i = 0; i < query->run_count; i++)
        tokens += (uint64_t)query->runs[i].blocks * query->block_tokens;
    if (tokens > TOKENS_MAX)
        return KVT_E_LIMIT;
    return query->prompt_tokens == 0 || query->prompt_tokens >= tokens ? 0 : KVT_E_INVAL;
}

static void search_init(struct search *search, const struct kvt_decide *query,
                        const struct kvt_plan_models *models)
{
    memset(search, 0, sizeof(*search));
    search->query = query;
    search->models = models;
    search->tokens = query->block_tokens;
    for (uint32_t r = 0; r < query->run_count; r++) {
        search->start[r + 1] = search->start[r] + query->runs[r].blocks;
        for (uint32_t t = 0; t < KVT_PLAN_TIERS; t++)
            search->before[r + 1][t] =
                search->before[r][t] + query->runs[r].by_tier[t] * query->block_bytes;
    }
    for (uint32_t t = 0; t < KVT_PLAN_TIERS; t++) {
        double bytes = search->before[query->run_count][t];
        if (bytes > 0 && models->tiers[t] != NULL) {
            const struct kvt_fit_line *line = &models->tiers[t]->line[kvt_tier_class(bytes)];
            search->latency[t] = line->p;
            search->per_byte[t] = line->q;
            search->used[search->used_count++] = t;
        }
    }
}

/* Seconds until blocks [from, end of run `last`) are there; `from` lies in run `run`. */
static double load_seconds(const struct search *search, uint32_t run, double from, uint32_t last)
{
    const struct kvt_plan_run *at = &search->query->runs[run];
    double into = at->blocks > 0 ? (from - search->start[run]) / at->blocks : 0;
    double dram = 0, disk = 0;
    for (uint32_t i = 0; i < search->used_count; i++) {
        uint32_t t = search->used[i];
        double within = search->before[run + 1][t] - search->before[run][t];
        double bytes = search->before[last + 1][t] - search->before[run][t] - into * within;
        if (!(bytes > 0))
            continue;
        double seconds =
            search->latency[t] + search->per_byte[t] * (bytes + search->query->queued[t]);
        if (t < KVT_TIER_DISK)
            dram += seconds;
        else
            disk = fmax(disk, seconds);
    }
    return dram + disk;
}

/* When both of two things that take about a and b seconds are done: a little later than the longer
 * one, since neither is known exactly (9 % when they are equal). Convex, so that a cut is. */
static double both(double a, double b)
{
    double high = fmax(a, b), low = fmin(a, b);
    if (!(high > 0))
        return 0;
    double share = low / high;
    share *= share;
    share *= share;
    return high * sqrt(sqrt(sqrt(1 + share * share)));
}

/* Price of: compute [0, from), load [from, to), compute the rest of the prompt. */
static struct candidate price(const struct search *search, double from, double to, double load)
{
    const struct kvt_decide *query = search->query;
    const struct kvt_prefill *prefill = search->models->prefill;
    double all = search->start[query->run_count] * search->tokens,
           first = (double)query->first_tokens;
    if (query->prompt_tokens != 0)
        all = (double)query->prompt_tokens - first;
    double head = kvt_prefill_seconds(prefill, from * search->tokens, first);
    double behind = to * search->tokens;
    double tail = kvt_prefill_seconds(prefill, all - behind, first + behind);
    struct candidate out = {.from = (uint32_t)from, .to = (uint32_t)to, .load = load};
    out.gpu = head + tail;
    out.ttft = query->cut == KVT_PLAN_CUT_OVERLAP ? both(head, load) + tail : head + load + tail;
    out.objective = out.ttft + query->lambda * out.gpu;
    return out;
}

static struct candidate price_cut(const struct search *search, uint32_t run, double from,
                                  uint32_t last)
{
    return price(search, from, search->start[last + 1], load_seconds(search, run, from, last));
}

/* The best start within `run` of a load that ends with run `last`. */
static struct candidate best_in_run(const struct search *search, uint32_t run, uint32_t last)
{
    double low = search->start[run], high = search->start[run + 1] - 1;
    while (low < high) {
        double mid = floor((low + high) / 2);
        if (price_cut(search, run, mid, last).objective <=
            price_cut(search, run, mid + 1, last).objective)
            high = mid;
        else
            low = mid + 1;
    }
    return price_cut(search, run, low, last);
}

static bool unsure(const struct search *search)
{
    uint32_t runs = search->query->run_count;
    bool any = kvt_prefill_unsure(search->models->prefill);
    for (uint32_t i = 0; i < search->used_count; i++) {
        uint32_t t = search->used[i];
        any |= kvt_tier_unsure(search->models->tiers[t], search->before[runs][t]);
    }
    return any;
}

/* Loads from the front: as much as there is, or up to where a tier ends. */
static struct candidate best_plain(const struct search *search, struct candidate best)
{
    for (uint32_t last = 0; last < search->query->run_count; last++) {
        struct candidate next = price_cut(search, 0, 0, last);
        if (next.objective < best.objective)
            best = next;
    }
    return best;
}

static struct candidate best_cut(const struct search *search, struct candidate best)
{
    struct candidate plain = best;
    for (uint32_t last = 0; last < search->query->run_count; last++) {
        for (uint32_t run = 0; run <= last; run++) {
            struct candidate next = best_in_run(search, run, last);
            if (next.objective < best.objective)
                best = next;
        }
    }
    return best.objective < CUT_WORTH * plain.objective ? best : plain;
}

static uint32_t run_at(const struct search *search, uint32_t block)
{
    uint32_t run = 0;
    while (run + 1 < search->query->run_count && search->start[run + 1] <= block)
        run++;
    return run;
}

/* Blocks that can be had from a tier in that many seconds; at most `most`. */
static double blocks_within(const struct search *search, uint32_t tier, double seconds, double most)
{
    const struct kvt_decide *query = search->query;
    double bytes = PROBE_BYTES_MAX, room = seconds - search->latency[tier];
    if (search->per_byte[tier] > 0)
        bytes = fmin(bytes, room / search->per_byte[tier]);
    return room > 0 ? fmin(floor(bytes / query->block_bytes), most) : 0;
}

/* Of what a run has blocks on, the slowest: what made the plan leave it aside. */
static uint32_t slowest_of(const struct search *search, const struct kvt_plan_run *run)
{
    uint32_t slowest = KVT_TIER_MISS;
    for (uint32_t i = 0; i < search->used_count; i++) {
        uint32_t t = search->used[i];
        if (run->by_tier[t] > 0 &&
            (slowest == KVT_TIER_MISS || search->per_byte[t] > search->per_byte[slowest]))
            slowest = t;
    }
    return slowest;
}

/* Say to the tier that was left aside behind the load, if there is one, and load a little of it
 * when it is due to be measured and this prompt is long enough to pay for that. With bytes queued
 * it is being measured by others. */
static bool probe(const struct search *search, struct candidate *best, double recompute)
{
    const struct kvt_decide *query = search->query;
    if (best->to >= search->start[query->run_count])
        return false;
    uint32_t run = run_at(search, best->to), tier = slowest_of(search, &query->runs[run]);
    if (tier == KVT_TIER_MISS)
        return false;
    double share = kvt_tier_refused(search->models->tiers[tier]);
    double blocks =
        blocks_within(search, tier, share * recompute, search->start[run + 1] - best->to);
    /* What is believed of a tier may say that not even one block fits (loads of one size look like
     * latency): it would never be measured again. The deadline bounds what that costs. */
    if (blocks < 1 && share > KVT_PROBE_SHARE)
        blocks = 1;
    if (blocks < 1 || query->queued[tier] > 0)
        return false;
    double load = best->load + search->latency[tier];
    load += search->per_byte[tier] * blocks * query->block_bytes;
    load = fmin(load, fmax(best->load, LATE_SHARE * recompute)); /* it is cut off then */
    *best = price(search, best->from, best->to + blocks, load);
    kvt_tier_used(search->models->tiers[tier]);
    return true;
}

static void mark_used(const struct search *search, const struct candidate *best)
{
    if (best->to == best->from)
        return;
    uint32_t first = run_at(search, best->from), last = run_at(search, best->to - 1);
    for (uint32_t run = first; run <= last; run++)
        for (uint32_t t = 1; t < KVT_PLAN_TIERS; t++)
            if (search->query->runs[run].by_tier[t] > 0)
                kvt_tier_used(search->models->tiers[t]);
}

static int reason_of(const struct candidate *best, uint32_t blocks)
{
    if (best->from == best->to)
        return KVT_PLAN_RECOMPUTE;
    if (best->from > 0)
        return KVT_PLAN_CUT;
    return best->to == blocks ? KVT_PLAN_LOAD : KVT_PLAN_PREFIX;
}

static void report(struct kvt_plan *out, const struct candidate *best)
{
    out->first = best->from;
    out->count = best->to - best->from;
    out->ttft_s = best->ttft;
    out->load_s = best->load;
    out->gpu_s = best->gpu;
}

/* When to cut the load off. What has arrived by then is used, so waiting is not lost: up to half of
 * the recompute time bounds the loss when nothing more arrives. A load that is worth more than that
 * (the GPU is busy) may take a quarter longer than expected. */
static double deadline_of(const struct kvt_plan *plan)
{
    double twice = LATE_FACTOR * plan->load_s, half = LATE_SHARE * plan->recompute_s;
    if (plan->count == 0)
        return 0;
    if (plan->reason == KVT_PLAN_PROBE)
        return fmin(twice + LATE_SHARE_PROBE * plan->recompute_s, half) + LATE_SLACK_S;
    double most = fmax(plan->recompute_s, 1.25 * plan->load_s);
    return fmax(half, fmin(twice, most)) + LATE_SLACK_S;
}

int kvt_decide(const struct kvt_decide *query, const struct kvt_plan_models *models,
               struct kvt_plan *out)
{
    struct search search;
    size_t size = out->struct_size;
    memset(out, 0, sizeof(*out));
    out->struct_size = size;
    out->reason = KVT_PLAN_NO_BLOCKS;
    int rc = check(query);
    if (rc != 0)
        return rc;
    search_init(&search, query, models);
    struct candidate best = price(&search, 0, 0, 0);
    out->recompute_s = best.ttft;
    report(out, &best);
    if (query->run_count == 0)
        return 0;
    uint32_t blocks = (uint32_t)search.start[query->run_count];
    struct candidate all = price_cut(&search, 0, 0, query->run_count - 1);
    out->load_all_s = all.ttft;
    out->unsure = unsure(&search);
    bool cuts = query->cut != KVT_PLAN_CUT_NONE && !out->unsure;
    double recompute = best.ttft;
    best = best_plain(&search, best);
    /* a cut between things that contradict each other would be precision without meaning */
    if (cuts)
        best = best_cut(&search, best);
    out->reason = reason_of(&best, blocks);
    mark_used(&search, &best);
    if (probe(&search, &best, recompute))
        out->reason = KVT_PLAN_PROBE;
    report(out, &best);
    out->deadline_s = deadline_of(out);
    return 0;
}
