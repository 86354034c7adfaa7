/* Shadow mode: the engine stores as it would, loads nothing, and the statistics say what loading
 * would have saved, by the plan that would have been made.
 *
 * Every lookup of a prompt finds nothing, so the engine computes it; what is there is touched, so
 * that eviction goes on as if it had been loaded (from disk it is not brought back to DRAM, which
 * a load would do). Prefills are learnt from; tiers are not, since nothing is loaded: for them the
 * start values rule. Threads: any, under the cache's lock. Allocates: never.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/checked.h"
#include "client/prompts.h"
#include "client/trace_log.h"

#define US 1e6

int kvt_prompts_open(struct kvt_cache *cache, char *error, size_t error_len)
{
    const struct kvt_settings *settings = cache->settings;
    if (settings->shadow) {
        cache->prompts = calloc(1, sizeof(*cache->prompts));
        cache->shadow_room = (uint32_t)settings->request_blocks_max;
        cache->shadow_tiers = calloc(cache->shadow_room, sizeof(*cache->shadow_tiers));
        if (cache->prompts == NULL || cache->shadow_tiers == NULL)
            return -ENOMEM;
        kvt_log(&cache->log, KVT_LOG_INFO, "shadow=yes: nothing is loaded");
    }
    if (settings->trace[0] == '\0')
        return 0;
    return kvt_trace_open(settings->trace, settings->trace_max, &cache->clock, &cache->log,
                          &cache->trace, error, error_len);
}

void kvt_prompts_close(struct kvt_cache *cache)
{
    kvt_trace_close(cache->trace);
    free(cache->shadow_tiers);
    free(cache->prompts);
}

static uint64_t prompt_id(const struct kvt_ns *ns, const struct kvt_key *key, size_t n)
{
    uint64_t id = 14695981039346656037u ^ n; /* FNV-1a: told apart from others of this second */
    for (size_t i = 0; i < sizeof(ns->id); i++)
        id = (id ^ ns->id[i]) * 1099511628211u;
    for (size_t i = 0; i < key->hash_len; i++)
        id = (id ^ key->hash[i]) * 1099511628211u;
    id ^= id >> 32; /* the last bytes have not reached the low bits well */
    return id != 0 ? id : 1;
}

static bool is_new(struct kvt_ns *ns, const struct kvt_key *keys, size_t n)
{
    struct kvt_cache *cache = ns->cache;
    return !kvt_recent_again(&cache->prompts->recent, prompt_id(ns, &keys[n - 1], n),
                             kvt_clock_now(&cache->clock));
}

void kvt_prompts_record(struct kvt_ns *ns, const struct kvt_key *keys, size_t n,
                        uint64_t prompt_tokens)
{
    struct kvt_cache *cache = ns->cache;
    if (cache->trace == NULL || n == 0)
        return;
    const struct kvt_shape_group *group = kvt_shape_group_of(ns->shape, keys[0].group);
    const struct kvt_trace_prompt prompt = {.ns_id = ns->id,
                                            .keys = keys,
                                            .n = n,
                                            .block_tokens = group ? group->block_tokens : 0,
                                            .tokens = prompt_tokens};
    pthread_mutex_unlock(&cache->lock); /* the caller is counted: nothing goes away */
    enum kvt_trace_noted noted = kvt_trace_note(cache->trace, &prompt);
    pthread_mutex_lock(&cache->lock);
    cache->counters.trace_written += noted == KVT_TRACE_WRITTEN;
    cache->counters.trace_repeated += noted == KVT_TRACE_REPEATED;
    cache->counters.trace_dropped += noted == KVT_TRACE_DROPPED;
}

/* What the plan would have made of it. */
static void account(struct kvt_ns *ns, uint16_t group, const enum kvt_tier *tiers, size_t n,
                    uint64_t prompt_tokens)
{
    struct kvt_client_counters *counters = &ns->cache->counters;
    const struct kvt_plan_query query = {.struct_size = sizeof(query),
                                         .tiers = tiers,
                                         .n = n,
                                         .prompt_tokens = prompt_tokens,
                                         .group = group};
    struct kvt_plan plan;
    uint64_t disk = 0, remote = 0;
    if (kvt_planning_weigh(ns, &query, &plan) != 0)
        return;
    for (size_t i = plan.first; i < plan.first + plan.count; i++) {
        remote += tiers[i] == KVT_TIER_REMOTE;
        disk += tiers[i] != KVT_TIER_DRAM && tiers[i] != KVT_TIER_REMOTE;
    }
    counters->shadow_hits += plan.count > 0;
    counters->shadow_blocks_disk += disk;
    counters->shadow_blocks_remote += remote;
    counters->shadow_blocks_dram += plan.count - disk - remote;
    counters->shadow_tokens += plan.count * kvt_shape_group_of(ns->shape, group)->block_tokens;
    if (plan.recompute_s > 0)
        counters->shadow_prefill_us += (uint64_t)(plan.recompute_s * US);
    if (plan.recompute_s > plan.ttft_s)
        counters->shadow_ttft_us += (uint64_t)((plan.recompute_s - plan.ttft_s) * US);
    if (plan.recompute_s > plan.gpu_s)
        counters->shadow_gpu_us += (uint64_t)((plan.recompute_s - plan.gpu_s) * US);
}

/* At least the blocks that were asked for. */
static uint64_t tokens_of(const struct kvt_ns *ns, uint16_t group, size_t n, uint64_t prompt_tokens)
{
    uint64_t tokens = (uint64_t)n * kvt_shape_group_of(ns->shape, group)->block_tokens;
    return KVT_MAX(tokens, prompt_tokens);
}

long kvt_shadow_lookup(struct kvt_ns *ns, const struct kvt_key *keys, size_t n,
                       const struct kvt_lookup_opts *opts)
{
    struct kvt_cache *cache = ns->cache;
    uint32_t room = cache->shadow_room;
    if (n == 0)
        return 0;
    /* One at a time has the memory for tiers; another one at the same time is not counted. */
    enum kvt_tier *tiers = cache->shadow_tiers;
    bool count = tiers != NULL && is_new(ns, keys, n);
    cache->shadow_tiers = count ? NULL : tiers;
    size_t look = count ? KVT_MIN(n, room) : 0;
    struct kvt_lookup_opts find = *opts;
    find.roots = NULL; /* the caller is told that nothing is there */
    long run = kvt_call_lookup(ns, keys, look, &find, false, count ? tiers : NULL);
    long touched = run > 0 && opts->shards <= 1 ? kvt_call_touch_held(ns, keys, (size_t)run) : 0;
    if (count) {
        cache->counters.shadow_prompts++;
        if (run >= 0)
            account(ns, keys[0].group, tiers, (size_t)run,
                    tokens_of(ns, keys[0].group, n, opts->prompt_tokens));
        cache->shadow_tiers = tiers;
    }
    return run < 0 ? run : touched < 0 ? touched : 0;
}

void kvt_shadow_groups(struct kvt_ns *ns, const struct kvt_group_chain *chain, uint64_t tokens,
                       uint64_t prompt_tokens)
{
    const struct kvt_shape_group *group = kvt_shape_group_of(ns->shape, chain->group);
    size_t n = (size_t)(tokens / group->block_tokens);
    if (chain->n == 0 || !is_new(ns, chain->keys, chain->n))
        return;
    ns->cache->counters.shadow_prompts++;
    account(ns, chain->group, chain->tiers, n,
            tokens_of(ns, chain->group, chain->n, prompt_tokens));
    if (n > 0)
        (void)kvt_call_touch_held(ns, chain->keys, n); /* eviction alone is the worse for it */
}
