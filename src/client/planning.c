/* kvt_plan() and what feeds it: prefills told by the engine, loads as they complete.
 *
 * A load is an observation of where its blocks were when it is whole, or was cut off by its
 * deadline (a drive that is too slow must be noticed by just these): of each root, or of DRAM when
 * no root had a part in it. The store says when each read began and ended. The root that was busy
 * the longest is taken to have held the load up, with all that came before and behind its reads;
 * the others to have taken as much less as they were less busy. DRAM's part is taken off first, as
 * it is expected. When time is up, it is the fault of the root that most reads were still under
 * way at, and one that brought nothing in time is taken for all it was asked for, in twice the
 * time. Of a load that waited for a GPU stream only the reads tell something. Loads that were
 * cancelled or met misses tell nothing.
 *
 * Threads: any, under the cache's lock. Allocates, waits: never. Fits nothing: learning.c does.
 */
#include <string.h>

#include "base/checked.h"
#include "client/client.h"

/* Start values for what no option names. Attention costs as much as the rest at this length: 8B on
 * one H100, docs/plan.md. */
#define PREFILL_BALANCE_TOKENS 47000.0
#define DISK_LATENCY_S 0.001
#define DRAM_LATENCY_S 0.0001
#define LATE_FACTOR 2.0
#define RECENT 0.2 /* weight of the newest load in the running means */

void kvt_planning_init(struct kvt_cache *cache)
{
    const struct kvt_settings *settings = cache->settings;
    struct kvt_planning *planning = &cache->planning;
    kvt_plan_file_read(cache);
    for (uint32_t tier = KVT_TIER_DRAM; tier < KVT_PLAN_TIERS; tier++) {
        bool dram = tier == KVT_TIER_DRAM;
        const struct kvt_fit_line *kept =
            &planning->kept_tier[dram ? KVT_TIER_DRAM : KVT_TIER_DISK];
        double latency = dram ? DRAM_LATENCY_S : DISK_LATENCY_S;
        bool remote = tier == KVT_TIER_DISK + KVT_PLAN_ROOT_REMOTE;
        double rate = (double)(dram     ? settings->plan_dram
                               : remote ? settings->plan_remote
                                        : settings->plan_disk);
        if (kept->q > 0 && !remote) {
            latency = kept->p;
            rate = 1 / kept->q;
        }
        /* cannot fail: the options have limits, and so has what was read */
        (void)kvt_tier_init(&planning->models[tier], latency, rate);
        planning->models[tier].fixed = settings->plan == KVT_PLAN_SET_DETERMINISTIC;
        planning->tiers[tier] = planning->models[tier];
    }
}

static struct kvt_kept *kept_of(struct kvt_planning *planning, const uint8_t *id)
{
    for (uint32_t i = 0; i < planning->kept_count; i++)
        if (memcmp(planning->kept[i].id, id, KVT_NS_BYTES) == 0)
            return &planning->kept[i];
    return NULL;
}

void kvt_planning_ns(struct kvt_ns *ns)
{
    const struct kvt_settings *settings = ns->cache->settings;
    double a = 1 / (double)settings->plan_prefill;
    (void)kvt_prefill_init(&ns->prefill, a, a / PREFILL_BALANCE_TOKENS);
    const struct kvt_kept *kept = kept_of(&ns->cache->planning, ns->id);
    if (kept != NULL)
        (void)kvt_prefill_init(&ns->prefill, kept->a, kept->b);
    ns->prefill.fixed = settings->plan == KVT_PLAN_SET_DETERMINISTIC;
}

void kvt_planning_keep(const struct kvt_ns *ns)
{
    struct kvt_planning *planning = &ns->cache->planning;
    struct kvt_kept *kept = kept_of(planning, ns->id);
    if (ns->prefill.fit.count == 0)
        return;
    if (kept == NULL && planning->kept_count == KVT_KEPT_MAX) { /* the oldest goes */
        memmove(&planning->kept[0], &planning->kept[1],
                (KVT_KEPT_MAX - 1) * sizeof(planning->kept[0]));
        planning->kept_count--;
    }
    if (kept == NULL)
        kept = &planning->kept[planning->kept_count++];
    memcpy(kept->id, ns->id, sizeof(kept->id));
    kept->a = ns->prefill.line.p;
    kept->b = ns->prefill.line.q;
    planning->learnt = true;
}

static double record_bytes(const struct kvt_ns *ns, uint32_t index)
{
    double mean = ns->groups[index].record_mean;
    if (mean > 0)
        return mean;
    const struct kvt_shape_group *group = &ns->shape->groups[index];
    size_t bytes = kvt_ns_record_bytes(ns, group->group, KVT_LEVEL_DEFAULT);
    return bytes > 0 ? (double)bytes : (double)group->uniform[KVT_LEVEL_RAW]->record_bytes;
}

void kvt_planning_submit(struct kvt_cache *cache, struct kvt_req *req)
{
    req->guess_bytes = (uint32_t)record_bytes(req->ns, req->group);
    req->queued_bytes = cache->planning.queued_bytes;
    cache->planning.queued_bytes += (uint64_t)req->guess_bytes * req->n;
}

void kvt_planning_block(struct kvt_cache *cache, const struct kvt_req *req)
{
    cache->planning.queued_bytes -= req->guess_bytes;
}

void kvt_planning_grant(struct kvt_req *req, const struct kvt_msg_grant *grant)
{
    bool remote = grant->tier == KVT_TIER_REMOTE;
    if (!remote && (grant->tier != KVT_TIER_DISK || grant->root >= KVT_PLAN_ROOT_REMOTE))
        return;
    struct kvt_req_root *root = &req->roots[remote ? KVT_PLAN_ROOT_REMOTE : grant->root];
    root->late += grant->msg.status == KVT_E_DEADLINE;
    if (grant->msg.status != 0)
        return;
    /* Reads of a load are granted in the order in which they began, about. */
    uint32_t from = grant->began_us;
    if (root->blocks > 0 && (int32_t)(root->until_us - from) > 0)
        from = root->until_us;
    if (root->blocks == 0 || (int32_t)(grant->ended_us - from) > 0)
        root->until_us = grant->ended_us;
    if ((int32_t)(grant->ended_us - from) > 0)
        root->busy_us += grant->ended_us - from;
    root->blocks++;
    root->bytes += grant->record_bytes;
}

static void remember(struct kvt_planning *planning, struct kvt_req *req)
{
    const struct kvt_req_report *report = &req->report;
    double blocks = (double)report->blocks_ok;
    double record = (double)report->bytes_moved / blocks;
    double *mean = &req->ns->groups[req->group].record_mean;
    *mean = *mean > 0 ? *mean + RECENT * (record - *mean) : record;
    for (uint32_t tier = KVT_TIER_DRAM; tier < KVT_PLAN_TIERS; tier++) {
        double now = tier == KVT_TIER_DRAM ? (double)report->blocks_dram
                                           : (double)req->roots[tier - KVT_TIER_DISK].blocks;
        planning->share[tier] += RECENT * (KVT_MIN(now / blocks, 1) - planning->share[tier]);
    }
}

/* The root that kept a late load waiting: where reads were still under way; none were: where most
 * blocks are. */
static uint32_t culprit_of(const struct kvt_planning *planning, const struct kvt_req *req)
{
    uint32_t most = 0, usual = 0;
    for (uint32_t root = 1; root < KVT_PLAN_ROOTS; root++) {
        most = req->roots[root].late > req->roots[most].late ? root : most;
        usual = planning->share[KVT_TIER_DISK + root] > planning->share[KVT_TIER_DISK + usual]
                    ? root
                    : usual;
    }
    return req->roots[most].late > 0 ? most : usual;
}

/* What a load that took `seconds`, DRAM's part apart, tells of its roots. culprit: KVT_PLAN_ROOTS
 * unless it was late. */
static void observe_roots(struct kvt_cache *cache, const struct kvt_req *req, double seconds,
                          uint32_t culprit)
{
    const bool waited = req->gpu_wait != KVT_WAIT_NONE;
    uint32_t longest = 0, known = 0;
    for (uint32_t i = 0; i < KVT_PLAN_ROOTS; i++) {
        known += req->roots[i].blocks + req->roots[i].late > 0;
        longest = KVT_MAX(longest, req->roots[i].busy_us);
    }
    for (uint32_t i = 0; i < KVT_PLAN_ROOTS; i++) {
        const struct kvt_req_root *root = &req->roots[i];
        double bytes = (double)root->bytes, busy = root->busy_us * 1e-6, took = seconds;
        if (root->blocks == 0 && i != culprit)
            continue;
        if (waited)
            took = busy;
        else if (i != culprit)
            took = KVT_MAX(seconds - (longest * 1e-6 - busy), busy);
        /* Nothing of it came in time: all that was asked for would have taken that long at least,
         * and as likely more than twice as long as less. */
        if (root->blocks == 0) {
            size_t blocks = known > 1 ? root->late : req->n - req->report.blocks_ok;
            bytes = (double)req->guess_bytes * (double)blocks;
            took = LATE_FACTOR * seconds;
        }
        if (!waited || took > 0)
            kvt_planning_saw(cache, KVT_TIER_DISK + i, bytes,
                             cache->planning.share[KVT_TIER_DISK + i] * (double)req->queued_bytes,
                             took);
    }
}

void kvt_planning_complete(struct kvt_cache *cache, struct kvt_req *req)
{
    struct kvt_planning *planning = &cache->planning;
    const struct kvt_req_report *report = &req->report;
    bool whole = report->blocks_ok == req->n && req->n > 0;
    bool late = report->blocks_run_ok < req->n &&
                cache->statuses[req->first + report->blocks_run_ok] == KVT_E_DEADLINE;
    bool waited = req->gpu_wait != KVT_WAIT_NONE;
    if ((!whole && (!late || waited)) || atomic_load_explicit(&req->canceled, memory_order_relaxed))
        return;
    double seconds = (double)req->elapsed_ns * 1e-9, bytes = (double)report->bytes_moved;
    if (report->blocks_ok > 0 && cache->settings->plan != KVT_PLAN_SET_DETERMINISTIC)
        remember(planning, req);
    const size_t below = report->blocks_disk + report->blocks_remote;
    if (!late && below == 0) {
        if (!waited)
            kvt_planning_saw(cache, KVT_TIER_DRAM, bytes,
                             planning->share[KVT_TIER_DRAM] * (double)req->queued_bytes, seconds);
        return;
    }
    if (report->blocks_dram > 0) {
        if (below < report->blocks_dram && !late)
            return; /* what is left of the time would be guesswork */
        double dram = bytes * (double)report->blocks_dram / (double)report->blocks_ok;
        double took = kvt_tier_seconds(&planning->tiers[KVT_TIER_DRAM], dram, 0);
        seconds -= KVT_MIN(took, seconds / 2);
    }
    observe_roots(cache, req, seconds, late ? culprit_of(planning, req) : KVT_PLAN_ROOTS);
}

/* ---- the calls ----------------------------------------------------------------------------- */

static void count_plan(struct kvt_client_counters *counters, const struct kvt_plan *plan)
{
    uint64_t *const by_reason[] = {[KVT_PLAN_NO_BLOCKS] = &counters->plan_no_blocks,
                                   [KVT_PLAN_LOAD] = &counters->plan_load,
                                   [KVT_PLAN_RECOMPUTE] = &counters->plan_recompute,
                                   [KVT_PLAN_CUT] = &counters->plan_cut,
                                   [KVT_PLAN_PREFIX] = &counters->plan_prefix,
                                   [KVT_PLAN_PROBE] = &counters->plan_probe,
                                   [KVT_PLAN_OFF] = &counters->plan_off};
    ++*by_reason[plan->reason];
    counters->plan_unsure += plan->unsure != 0;
}

/* Lock held. */
static int weigh(struct kvt_ns *ns, const struct kvt_plan_query *query, struct kvt_decide *decide,
                 const struct kvt_plan_models *models, struct kvt_plan *plan)
{
    const struct kvt_settings *settings = ns->cache->settings;
    const struct kvt_planning *planning = &ns->cache->planning;
    const struct kvt_shape_group *group = kvt_shape_group_of(ns->shape, query->group);
    if (group == NULL)
        return KVT_E_INVAL;
    decide->block_tokens = group->block_tokens;
    decide->block_bytes = record_bytes(ns, kvt_ns_group_index(ns, query->group));
    decide->lambda = query->gpu_busy * (double)settings->plan_lambda / 100;
    if (settings->plan != KVT_PLAN_SET_DETERMINISTIC)
        for (uint32_t tier = 1; tier < KVT_PLAN_TIERS; tier++)
            decide->queued[tier] = planning->share[tier] * (double)planning->queued_bytes;
    int rc = kvt_decide(decide, models, plan);
    if (rc != 0 || settings->plan != KVT_PLAN_SET_OFF)
        return rc;
    size_t size = plan->struct_size;
    *plan = (struct kvt_plan){.struct_size = size, .reason = KVT_PLAN_OFF};
    for (uint32_t run = 0; run < decide->run_count; run++)
        plan->count += decide->runs[run].blocks;
    return 0;
}

/* Who does not say which root has which block: as lately. Of blocks in the shared tier it is known:
 * they stay there. */
static void spread_over_roots(const struct kvt_planning *planning, struct kvt_decide *decide)
{
    const uint32_t end = KVT_TIER_DISK + KVT_PLAN_ROOT_REMOTE;
    double disk = 0;
    for (uint32_t tier = KVT_TIER_DISK; tier < end; tier++)
        disk += planning->share[tier];
    for (uint32_t r = 0; r < decide->run_count && disk > 0; r++) {
        uint32_t *by_tier = decide->runs[r].by_tier, all = by_tier[KVT_TIER_DISK];
        for (uint32_t tier = KVT_TIER_DISK + 1; tier < end; tier++) {
            double part = (double)all * planning->share[tier] / disk;
            by_tier[tier] = KVT_MIN((uint32_t)(part + 0.5), by_tier[KVT_TIER_DISK]);
            by_tier[KVT_TIER_DISK] -= by_tier[tier];
        }
    }
}

int kvt_planning_weigh(struct kvt_ns *ns, const struct kvt_plan_query *query, struct kvt_plan *plan)
{
    struct kvt_planning *planning = &ns->cache->planning;
    struct kvt_plan_models models = {.prefill = &ns->prefill};
    struct kvt_decide decide = {.first_tokens = query->first_tokens,
                                .prompt_tokens = query->prompt_tokens,
                                .cut = query->cut};
    for (uint32_t tier = KVT_TIER_DRAM; tier < KVT_PLAN_TIERS; tier++)
        models.tiers[tier] = &planning->tiers[tier];
    *plan = (struct kvt_plan){.struct_size = sizeof(*plan)};
    kvt_decide_runs(&decide, query->tiers, query->roots, query->n, &models);
    if (query->roots == NULL)
        spread_over_roots(planning, &decide);
    return weigh(ns, query, &decide, &models, plan);
}

int kvt_plan(struct kvt_ns *ns, const struct kvt_plan_query *query, struct kvt_plan *plan)
{
    struct kvt_plan_query use = {.struct_size = sizeof(use)};
    if (ns == NULL || query == NULL || plan == NULL)
        return KVT_E_INVAL;
    if ((query->struct_size != sizeof(use) && query->struct_size != KVT_PLAN_QUERY_SIZE_0) ||
        plan->struct_size != sizeof(*plan))
        return KVT_E_VERSION;
    memcpy(&use, query, query->struct_size);
    struct kvt_cache *cache = ns->cache;
    *plan = (struct kvt_plan){.struct_size = sizeof(*plan)};
    bool sane = (use.tiers != NULL || use.n == 0) && use.n <= UINT32_MAX && use.reserved == 0 &&
                use.gpu_busy >= 0 && use.gpu_busy <= 1;
    int rc = kvt_cache_enter(cache);
    if (rc != 0)
        return rc;
    kvt_planning_learn(cache);
    rc = sane ? kvt_planning_weigh(ns, &use, plan) : KVT_E_INVAL;
    if (rc == 0)
        count_plan(&cache->counters, plan);
    else
        cache->counters.plan_refused++;
    pthread_mutex_unlock(&cache->lock);
    return rc;
}

int kvt_observe_prefill(struct kvt_ns *ns, uint64_t new_tokens, uint64_t cached_tokens,
                        double seconds)
{
    if (ns == NULL)
        return KVT_E_INVAL;
    struct kvt_cache *cache = ns->cache;
    int rc = kvt_cache_enter(cache);
    if (rc != 0)
        return rc;
    rc = kvt_prefill_observe(&ns->prefill, new_tokens, cached_tokens, seconds);
    cache->counters.prefills++;
    cache->counters.prefills_refused += rc != 0;
    pthread_mutex_unlock(&cache->lock);
    return rc;
}
