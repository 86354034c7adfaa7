/* kvt_plan() and what feeds it: prefills told by the engine, loads as they complete.
 *
 * A load is an observation of one tier when it is whole, or was cut off by its deadline (a drive
 * that is too slow must be noticed by just these): the slowest tier that it used, less what the
 * faster one is expected to have taken. One that brought nothing in time is taken for all it asked
 * for, in twice the time. Loads that waited
 * for a GPU stream, were cancelled or met misses tell nothing. The store does not say which root a
 * block came from: all are one tier.
 *
 * Threads: any, under the cache's lock. Allocates, waits: never.
 */
#include <string.h>

#include "base/checked.h"
#include "client/client.h"

/* Start values for what no option names. Attention costs as much as the rest at this length: 8B on
 * one H100, docs/plan.md. */
#define PREFILL_BALANCE_TOKENS 47000.0
#define DISK_LATENCY_S 0.001
#define DRAM_LATENCY_S 0.0001
#define KEPT_CLASS 1u /* of sizes: 1 to 16 MiB, as most loads are */
#define LATE_FACTOR 2.0
#define RECENT 0.2 /* weight of the newest load in the running means */

void kvt_planning_init(struct kvt_cache *cache)
{
    const struct kvt_settings *settings = cache->settings;
    struct kvt_planning *planning = &cache->planning;
    struct kvt_tier_model *dram = &planning->tiers[KVT_TIER_DRAM];
    struct kvt_tier_model *disk = &planning->tiers[KVT_TIER_DISK];
    /* cannot fail: the options have limits */
    (void)kvt_tier_init(dram, DRAM_LATENCY_S, (double)settings->plan_dram);
    (void)kvt_tier_init(disk, DISK_LATENCY_S, (double)settings->plan_disk);
    dram->fixed = disk->fixed = settings->plan == KVT_PLAN_SET_DETERMINISTIC;
    kvt_plan_file_read(cache);
    for (int tier = KVT_TIER_DRAM; tier <= KVT_TIER_DISK; tier++) {
        const struct kvt_fit_line *kept = &planning->kept_tier[tier];
        if (kept->q > 0) /* what was read has limits as well */
            (void)kvt_tier_init(&planning->tiers[tier], kept->p, 1 / kept->q);
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

bool kvt_planning_keep_all(struct kvt_cache *cache)
{
    struct kvt_planning *planning = &cache->planning;
    const struct kvt_ns *ns;
    TAILQ_FOREACH(ns, &cache->namespaces, list)
    kvt_planning_keep(ns);
    for (int tier = KVT_TIER_DRAM; tier <= KVT_TIER_DISK; tier++) {
        const struct kvt_tier_model *model = &planning->tiers[tier];
        if (model->fit.count == 0)
            continue;
        planning->kept_tier[tier] = model->line[KEPT_CLASS];
        planning->learnt = true;
    }
    return planning->learnt;
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

static void remember(struct kvt_planning *planning, struct kvt_req *req)
{
    const struct kvt_req_report *report = &req->report;
    double blocks = (double)report->blocks_ok, disk = (double)report->blocks_disk / blocks;
    double record = (double)report->bytes_moved / blocks;
    double *mean = &req->ns->groups[req->group].record_mean;
    *mean = *mean > 0 ? *mean + RECENT * (record - *mean) : record;
    planning->share[KVT_TIER_DISK] += RECENT * (disk - planning->share[KVT_TIER_DISK]);
    planning->share[KVT_TIER_DRAM] += RECENT * (1 - disk - planning->share[KVT_TIER_DRAM]);
}

void kvt_planning_complete(struct kvt_cache *cache, struct kvt_req *req)
{
    struct kvt_planning *planning = &cache->planning;
    const struct kvt_req_report *report = &req->report;
    bool whole = report->blocks_ok == req->n && req->n > 0;
    bool late = report->blocks_run_ok < req->n &&
                cache->statuses[req->first + report->blocks_run_ok] == KVT_E_DEADLINE;
    if ((!whole && !late) || req->gpu_wait != KVT_WAIT_NONE ||
        atomic_load_explicit(&req->canceled, memory_order_relaxed))
        return;
    double seconds = (double)req->elapsed_ns * 1e-9;
    double bytes = (double)report->bytes_moved, from_disk = bytes;
    if (report->blocks_ok > 0 && cache->settings->plan != KVT_PLAN_SET_DETERMINISTIC)
        remember(planning, req);
    int tier = late || report->blocks_disk > 0 ? KVT_TIER_DISK : KVT_TIER_DRAM;
    if (tier == KVT_TIER_DISK && report->blocks_dram > 0) {
        double dram = bytes * (double)report->blocks_dram / (double)report->blocks_ok;
        if (report->blocks_disk < report->blocks_dram && !late)
            return; /* what is left of the time would be guesswork */
        double took = kvt_tier_seconds(&planning->tiers[KVT_TIER_DRAM], dram, 0);
        seconds -= KVT_MIN(took, seconds / 2);
        from_disk = bytes - dram;
    }
    /* Nothing of it came in time: all that was asked for would have taken that long at least, and
     * as likely more than twice as long as less. */
    if (late && report->blocks_disk == 0) {
        from_disk = (double)req->guess_bytes * (double)(req->n - report->blocks_ok);
        seconds *= LATE_FACTOR;
    }
    double queued = planning->share[tier] * (double)req->queued_bytes;
    /* refused observations are counted by the model */
    int rc =
        kvt_tier_observe(&planning->tiers[tier], (uint64_t)from_disk, (uint64_t)queued, seconds);
    (void)rc;
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

int kvt_planning_weigh(struct kvt_ns *ns, const struct kvt_plan_query *query, struct kvt_plan *plan)
{
    struct kvt_planning *planning = &ns->cache->planning;
    const struct kvt_plan_models models = {
        .prefill = &ns->prefill,
        .tiers = {[KVT_TIER_DRAM] = &planning->tiers[KVT_TIER_DRAM],
                  [KVT_TIER_DISK] = &planning->tiers[KVT_TIER_DISK]}};
    struct kvt_decide decide = {.first_tokens = query->first_tokens,
                                .prompt_tokens = query->prompt_tokens,
                                .cut = query->cut};
    *plan = (struct kvt_plan){.struct_size = sizeof(*plan)};
    kvt_decide_runs(&decide, query->tiers, query->n, &models);
    return weigh(ns, query, &decide, &models, plan);
}

int kvt_plan(struct kvt_ns *ns, const struct kvt_plan_query *query, struct kvt_plan *plan)
{
    if (ns == NULL || query == NULL || plan == NULL)
        return KVT_E_INVAL;
    if (query->struct_size != sizeof(*query) || plan->struct_size != sizeof(*plan))
        return KVT_E_VERSION;
    struct kvt_cache *cache = ns->cache;
    *plan = (struct kvt_plan){.struct_size = sizeof(*plan)};
    bool sane = (query->tiers != NULL || query->n == 0) && query->n <= UINT32_MAX &&
                query->reserved == 0 && query->gpu_busy >= 0 && query->gpu_busy <= 1;
    int rc = kvt_cache_enter(cache);
    if (rc != 0)
        return rc;
    rc = sane ? kvt_planning_weigh(ns, query, plan) : KVT_E_INVAL;
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
