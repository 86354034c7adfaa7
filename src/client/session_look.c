/* What a resume can have, and what of it pays: how far L0 alone serves every group, how far L0 and
 * the store do together, and what kvt_plan() says of the difference. Changes nothing.
 * Threads: under the manager's lock, also over the round trips of lookups.
 */
#include "base/checked.h"
#include "client/session_internal.h"

/* ---- what is there ------------------------------------------------------------------------- */

static uint32_t leading_run(const struct kvt_resume *r, uint32_t g, uint32_t limit)
{
    uint32_t i = 0;
    while (i < limit && kvt_session_has_page(r->mgr, r->s, kvt_session_node(r->mgr, r->s, i), g, i))
        i++;
    return i;
}

/* Whether block i of group g is used as it is in L0. */
bool kvt_resume_shared(const struct kvt_resume *r, uint32_t g, uint32_t i)
{
    if (r->mgr->groups[g].full)
        return i < r->leading[g];
    return i < r->b && kvt_session_has_page(r->mgr, r->s, kvt_session_node(r->mgr, r->s, i), g, i);
}

static enum kvt_tier *tier_of(const struct kvt_session_mgr *mgr, uint32_t g, uint32_t i)
{
    return &mgr->tiers[(size_t)g * mgr->session_blocks + i];
}

static bool has_any(const struct kvt_session_mgr *mgr, const struct kvt_session *s, uint32_t node,
                    uint32_t g, uint32_t i)
{
    enum kvt_tier tier = *tier_of(mgr, g, i);
    return (tier != KVT_TIER_MISS && tier != KVT_TIER_PENDING) ||
           kvt_session_has_page(mgr, s, node, g, i);
}

/* Ask for blocks [from, from + n) of a group. Full attention: returns the leading run. Of others
 * each block counts for itself; returns n. An error: nothing can be had. */
static uint32_t ask(struct kvt_resume *r, uint32_t g, uint32_t from, uint32_t n)
{
    struct kvt_session_mgr *mgr = r->mgr;
    struct kvt_cache *cache = mgr->ns->cache;
    struct kvt_lookup_opts opts = {.struct_size = sizeof(opts)};
    long found = 0;
    for (uint32_t i = 0; i < n; i++)
        mgr->keys[i] = kvt_session_key(mgr, g, r->s->hash[from + i]);
    if (n == 0)
        return 0;
    if (mgr->groups[g].full) {
        if (g == mgr->main_group)
            opts.roots = mgr->roots;
        else
            opts.flags = KVT_LOOKUP_PROBE; /* the prompt is told once */
        found = kvt_lookup(mgr->ns, mgr->keys, n, &opts, tier_of(mgr, g, from));
        return found > 0 ? (uint32_t)found : 0;
    }
    if (kvt_call_enter(mgr->ns, mgr->keys, n) != 0)
        return n;
    if (atomic_load_explicit(&cache->enabled, memory_order_relaxed) && !cache->settings->shadow)
        found = kvt_call_lookup(mgr->ns, mgr->keys, n, &opts, true, tier_of(mgr, g, from));
    kvt_call_leave(mgr->ns);
    for (uint32_t i = 0; i < n && found < 0; i++)
        *tier_of(mgr, g, from + i) = KVT_TIER_MISS;
    return n;
}

/* How far L0 and the store can serve all groups. Full attention is asked first: it bounds what has
 * to be asked of the others. */
static void look(struct kvt_resume *r, uint32_t limit)
{
    struct kvt_session_mgr *mgr = r->mgr;
    uint32_t most = (uint32_t)mgr->ns->cache->settings->request_blocks_max;
    for (uint32_t g = 0; g < mgr->group_count; g++)
        for (uint32_t i = 0; i < limit; i++)
            *tier_of(mgr, g, i) = KVT_TIER_MISS;
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        uint32_t from = r->leading[g];
        if (mgr->groups[g].full && from < limit)
            limit = from + ask(r, g, from, KVT_MIN(limit - from, most));
    }
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        uint32_t from = kvt_session_needs(mgr, g, r->a);
        if (!mgr->groups[g].full && from < limit)
            (void)ask(r, g, from, KVT_MIN(limit - from, most));
    }
    r->b = mgr->group_count == 1 && mgr->groups[0].full
               ? limit
               : kvt_session_reach(mgr, r->s, limit, has_any);
    if (r->b < r->a)
        r->b = r->a;
}

/* ---- what pays ----------------------------------------------------------------------------- */

static void ask_plan(struct kvt_resume *r, const struct kvt_session_resume_opts *opts,
                     const enum kvt_tier *tiers, const uint8_t *roots)
{
    struct kvt_session_mgr *mgr = r->mgr;
    bool one = mgr->group_count == 1 && mgr->groups[0].full;
    const struct kvt_plan_query query = {.struct_size = sizeof(query),
                                         .tiers = tiers,
                                         .roots = roots,
                                         .n = r->b - r->a,
                                         .first_tokens = (uint64_t)r->a * mgr->block_tokens,
                                         .prompt_tokens = r->total,
                                         .gpu_busy = opts != NULL ? opts->gpu_busy : 0,
                                         .group = mgr->groups[mgr->main_group].shape->group,
                                         .cut = opts != NULL && one ? (uint16_t)opts->cut : 0};
    r->plan = (struct kvt_plan){.struct_size = sizeof(r->plan)};
    if (kvt_plan(mgr->ns, &query, &r->plan) != 0) /* a refused question: "nothing" */
        r->plan = (struct kvt_plan){.reason = KVT_PLAN_NO_BLOCKS};
}

/* What of [a, b) pays. */
static void weigh_one(struct kvt_resume *r, const struct kvt_session_resume_opts *opts)
{
    const enum kvt_tier *tiers = tier_of(r->mgr, 0, r->a);
    ask_plan(r, opts, tiers, r->mgr->roots);
    r->c = r->a + (r->plan.count > 0 ? (uint32_t)r->plan.first : 0);
    r->b = r->c + (uint32_t)r->plan.count;
    for (uint32_t i = r->c - r->a; i < r->b - r->a; i++)
        r->disk += tiers[i] != KVT_TIER_DRAM;
}

bool kvt_resume_to_load(const struct kvt_resume *r, uint32_t g, uint32_t i)
{
    return i >= kvt_session_needs(r->mgr, g, r->b) && i < r->b && !kvt_resume_shared(r, g, i);
}

/* Record bytes of all that a prefix of b blocks lacks, over those of blocks [a, b) of the group
 * that is asked about. */
static double load_ratio(const struct kvt_resume *r)
{
    struct kvt_session_mgr *mgr = r->mgr;
    double bytes = 0, asked = 0;
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        size_t record =
            kvt_ns_record_bytes(mgr->ns, mgr->groups[g].shape->group, KVT_LEVEL_DEFAULT);
        if (g == mgr->main_group)
            asked = (double)record * (r->b - r->a);
        for (uint32_t i = kvt_session_needs(mgr, g, r->b); i < r->b; i++)
            bytes += kvt_resume_to_load(r, g, i) ? (double)record : 0;
    }
    return asked > 0 ? bytes / asked : 1;
}

/* Several groups: all that b needs is loaded, or what the plan's shorter prefix needs, or nothing.
 * The plan knows one group: each of its blocks is said to be where the slowest one of that number
 * is, and the time of the load is counted by the bytes of all groups. */
static void weigh_groups(struct kvt_resume *r, const struct kvt_session_resume_opts *opts)
{
    struct kvt_session_mgr *mgr = r->mgr;
    enum kvt_tier *tiers = mgr->plan_tiers;
    for (uint32_t i = r->a; i < r->b; i++) {
        tiers[i - r->a] = KVT_TIER_DRAM;
        for (uint32_t g = 0; g < mgr->group_count; g++)
            if (kvt_resume_to_load(r, g, i) && *tier_of(mgr, g, i) > tiers[i - r->a])
                tiers[i - r->a] = *tier_of(mgr, g, i);
    }
    ask_plan(r, opts, tiers, NULL);
    double ratio = load_ratio(r), late = r->plan.deadline_s * ratio;
    double expected = r->plan.load_s * ratio + r->plan.gpu_s;
    if (r->plan.count > 0 && r->plan.reason != KVT_PLAN_OFF && r->plan.reason != KVT_PLAN_PROBE &&
        expected > r->plan.recompute_s) {
        r->plan.count = 0;
        r->plan.reason = KVT_PLAN_RECOMPUTE;
    }
    /* what the plan gives the load of one group is too little for all: half of it would be lost */
    late = KVT_MIN(late, r->plan.recompute_s);
    if (r->plan.deadline_s > 0)
        r->plan.deadline_s = KVT_MAX(r->plan.deadline_s, late);
    if (r->plan.count < r->b - r->a) {
        r->b = kvt_session_reach(mgr, r->s, r->a + (uint32_t)r->plan.count, has_any);
        r->b = KVT_MAX(r->b, r->a);
    }
    r->c = r->a;
    for (uint32_t i = r->c; i < r->b; i++)
        r->disk += tiers[i - r->a] != KVT_TIER_DRAM;
}

void kvt_resume_find(struct kvt_resume *r, uint32_t limit,
                     const struct kvt_session_resume_opts *opts)
{
    struct kvt_session_mgr *mgr = r->mgr;
    for (uint32_t g = 0; g < mgr->group_count; g++)
        r->leading[g] = mgr->groups[g].full ? leading_run(r, g, limit) : 0;
    r->a = kvt_session_reach(mgr, r->s, limit, kvt_session_has_page);
    look(r, limit);
    if (mgr->group_count == 1 && mgr->groups[0].full)
        weigh_one(r, opts);
    else
        weigh_groups(r, opts);
    /* a longer one makes the partial block whole */
    r->tail = r->s->tail != KVT_NONE && r->a <= r->before && r->b <= r->before;
}
