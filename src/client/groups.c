/* Hits over groups: the longest prefix of a prompt that every group of a layout can serve.
 *
 * A hit ends where a block of every group ends. Full attention needs all blocks before it, a window
 * those that cover its last tokens, a state the one that ends there. Groups of full attention are
 * asked first: they bound what has to be asked of the others, block by block.
 * Threads: any. Blocks for round trips; allocates nothing: what is there is kept in the caller's
 * tiers.
 */
#include "base/checked.h"
#include "client/misuse.h"
#include "client/prompts.h"

struct view { /* of one chain */
    const struct kvt_shape_group *shape;
    const enum kvt_tier *tiers;
    size_t n; /* blocks that are known */
};

static bool present(const struct view *view, size_t block)
{
    enum kvt_tier tier = view->tiers[block];
    return tier != KVT_TIER_MISS && tier != KVT_TIER_PENDING;
}

size_t kvt_group_first_needed(const struct kvt_shape_group *shape, uint64_t tokens)
{
    uint64_t end = tokens / shape->block_tokens;
    if (end == 0 || shape->kind == KVT_GROUP_FULL)
        return 0;
    if (shape->kind == KVT_GROUP_STATE)
        return end - 1;
    return tokens <= shape->window_tokens ? 0
                                          : (tokens - shape->window_tokens) / shape->block_tokens;
}

static bool serves(const struct view *view, uint64_t tokens)
{
    size_t end = tokens / view->shape->block_tokens;
    if (end > view->n)
        return false;
    /* Of full attention only the leading run is known, and all of it is there. */
    if (view->shape->kind == KVT_GROUP_FULL)
        return true;
    for (size_t block = end; block > kvt_group_first_needed(view->shape, tokens); block--)
        if (!present(view, block - 1))
            return false;
    return true;
}

static uint64_t gcd(uint64_t a, uint64_t b)
{
    while (b != 0) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Tokens between two places where blocks of all groups end; 0: too far apart to matter. */
static uint64_t common_step(const struct kvt_shape *shape)
{
    uint64_t step = 1;
    for (uint32_t i = 0; i < shape->group_count; i++) {
        uint64_t tokens = shape->groups[i].block_tokens;
        if (tokens == 0) /* no shape has that */
            return 0;
        step = step / gcd(step, tokens) * tokens;
        if (step > UINT32_MAX)
            return 0;
    }
    return step;
}

/* What is wrong with chain i; NULL: nothing. */
static const char *chain_problem(const struct kvt_ns *ns, const struct kvt_group_chain *chains,
                                 size_t i)
{
    const struct kvt_group_chain *chain = &chains[i];
    if (chain->reserved != 0)
        return "reserved is not 0";
    if (kvt_shape_group_of(ns->shape, chain->group) == NULL)
        return "the layout has no such group";
    if (chain->n != 0 && (chain->keys == NULL || chain->tiers == NULL))
        return "keys or tiers is NULL and n is not 0";
    if (!kvt_keys_ok(ns, chain->keys, chain->n, true))
        return "a key is malformed or of another group than the first";
    if (chain->n != 0 && chain->keys[0].group != chain->group)
        return "its keys are of another group";
    for (size_t j = 0; j < i; j++)
        if (chains[j].group == chain->group)
            return "the group stands there twice";
    return NULL;
}

/* Each group of the namespace once, keys of that group, room for tiers. */
static int chains_check(const struct kvt_ns *ns, const struct kvt_group_chain *chains, size_t count)
{
    if (count != ns->shape->group_count) {
        kvt_misuse_say(ns->cache, KVT_LOG_DEBUG, "kvt_lookup_groups",
                       "%zu chains, and the layout has %u groups: one chain for each", count,
                       (unsigned)ns->shape->group_count);
        return KVT_E_INVAL;
    }
    for (size_t i = 0; i < count; i++) {
        const char *problem = chain_problem(ns, chains, i);
        if (problem == NULL)
            continue;
        kvt_misuse_say(ns->cache, KVT_LOG_DEBUG, "kvt_lookup_groups", "chains[%zu], group %u: %s",
                       i, chains[i].group, problem);
        return KVT_E_INVAL;
    }
    return 0;
}

/* Ask for the chains of full attention, or for the others, as far as *limit tokens; *limit sinks to
 * what they can serve at best. 0 or a negative error. */
static long ask(struct kvt_ns *ns, struct kvt_group_chain *chains, size_t count,
                const struct kvt_lookup_opts *opts, bool full, uint64_t *limit, struct view *views)
{
    for (size_t i = 0; i < count; i++) {
        const struct kvt_shape_group *shape = kvt_shape_group_of(ns->shape, chains[i].group);
        if ((shape->kind == KVT_GROUP_FULL) != full)
            continue;
        size_t n = KVT_MIN(chains[i].n, *limit / shape->block_tokens);
        long found = kvt_call_lookup(ns, chains[i].keys, n, opts, !full, chains[i].tiers);
        if (found < 0)
            return found;
        views[i] = (struct view){shape, chains[i].tiers, full ? (size_t)found : n};
        *limit = KVT_MIN(*limit, (uint64_t)views[i].n * shape->block_tokens);
    }
    return 0;
}

static uint64_t longest(const struct view *views, size_t count, uint64_t limit, uint64_t step)
{
    for (uint64_t tokens = limit / step * step; tokens > 0; tokens -= step) {
        bool all = true;
        for (size_t i = 0; i < count && all; i++)
            all = serves(&views[i], tokens);
        if (all)
            return tokens;
    }
    return 0;
}

static long hit(struct kvt_ns *ns, struct kvt_group_chain *chains, size_t count,
                const struct kvt_lookup_opts *opts, size_t max_tokens)
{
    struct view views[KVT_GROUPS_MAX] = {0};
    uint64_t limit = KVT_MIN((uint64_t)max_tokens, (uint64_t)UINT32_MAX);
    uint64_t step = common_step(ns->shape);
    for (size_t i = 0; i < count; i++)
        views[i].shape = kvt_shape_group_of(ns->shape, chains[i].group);
    long rc = step == 0 ? 0 : ask(ns, chains, count, opts, true, &limit, views);
    if (rc == 0 && step != 0)
        rc = ask(ns, chains, count, opts, false, &limit, views);
    if (rc < 0 || step == 0)
        return rc;
    uint64_t tokens = longest(views, count, limit, step);
    for (size_t i = 0; i < count && tokens > 0; i++) {
        chains[i].first = kvt_group_first_needed(views[i].shape, tokens);
        chains[i].count = tokens / views[i].shape->block_tokens - chains[i].first;
    }
    return (long)tokens;
}

static void find_nothing(struct kvt_group_chain *chains, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        chains[i].first = chains[i].count = 0;
        for (size_t j = 0; j < chains[i].n; j++)
            chains[i].tiers[j] = KVT_TIER_MISS;
    }
}

/* The prompt goes to the trace, and to the account of shadow mode, by its chain of full attention;
 * there nothing is found. Returns the hit to tell. */
static long tell(struct kvt_ns *ns, struct kvt_group_chain *chains, size_t count, long tokens,
                 uint64_t prompt_tokens)
{
    size_t full = 0;
    while (full < count &&
           kvt_shape_group_of(ns->shape, chains[full].group)->kind != KVT_GROUP_FULL)
        full++;
    if (full < count)
        kvt_prompts_record(ns, chains[full].keys, chains[full].n, prompt_tokens);
    if (!ns->cache->settings->shadow || tokens < 0)
        return tokens;
    if (full < count)
        kvt_shadow_groups(ns, &chains[full], (uint64_t)tokens, prompt_tokens);
    find_nothing(chains, count);
    return 0;
}

long kvt_lookup_groups(struct kvt_ns *ns, struct kvt_group_chain *chains, size_t count,
                       size_t max_tokens, const struct kvt_lookup_opts *opts)
{
    struct kvt_lookup_opts use;
    int rc = kvt_lookup_opts_read(opts, &use);
    if (rc != 0)
        return rc;
    if (ns == NULL || chains == NULL || use.roots != NULL || chains_check(ns, chains, count) != 0)
        return KVT_E_INVAL;
    rc = kvt_call_enter(ns, NULL, 0);
    if (rc != 0)
        return rc;
    find_nothing(chains, count);
    long tokens = 0;
    if (atomic_load_explicit(&ns->cache->enabled, memory_order_relaxed)) {
        tokens = hit(ns, chains, count, &use, max_tokens);
        if ((use.flags & KVT_LOOKUP_PROBE) == 0)
            tokens = tell(ns, chains, count, tokens, use.prompt_tokens);
    } else {
        for (size_t i = 0; i < count; i++)
            ns->cache->counters.off_lookup += chains[i].n;
    }
    kvt_call_leave(ns);
    return tokens;
}
