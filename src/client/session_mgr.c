/* The session manager as a whole: options, open and close, work, flush, questions.
 *
 * All memory but that of sessions is taken at open. Threads: any; kvt_session_mgr_close() alone.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "client/misuse.h"
#include "client/session_internal.h"
#include "kvtier/codec.h"

#define WINDOW_TOKENS 4096u
#define SESSIONS 256u
#define SESSIONS_LIMIT 65536u
#define TOKENS 131072u
#define TOKENS_LIMIT (1u << 30)
#define BLOCKS_MIN 65536u
#define BLOCKS_LIMIT (1u << 28)
#define PAGES_LIMIT (1u << 26)
#define SCRATCH_MANY 4u
#define SCRATCH_MANY_FROM 64u /* pages */

/* ---- options ------------------------------------------------------------------------------- */

static int level_check(const struct kvt_shape_group *group, int level)
{
    if (level < KVT_LEVEL_DEFAULT || level > KVT_LEVEL_RAW)
        return KVT_E_INVAL;
    return level == KVT_LEVEL_DEFAULT || group->uniform[level] != NULL ? 0 : KVT_E_UNSUPPORTED;
}

static int refuse_opts(const struct kvt_ns *ns, const char *what)
{
    kvt_misuse_say(ns->cache, KVT_LOG_WARN, "kvt_session_mgr_open", "%s", what);
    return KVT_E_INVAL;
}

static int pages_check(const struct kvt_ns *ns, const struct kvt_pool *pool,
                       struct kvt_session_mgr_opts *opts)
{
    uint32_t have = pool->desc.block_count;
    if (opts->first_page >= have || opts->page_count > have - opts->first_page)
        return refuse_opts(ns, "first_page and page_count reach beyond the pool's blocks");
    if (opts->page_count == 0)
        opts->page_count = have - opts->first_page;
    if (opts->page_count > PAGES_LIMIT)
        return refuse_opts(ns, "page_count is above its limit of 2^26");
    if (opts->scratch_pages == 0)
        opts->scratch_pages = opts->page_count >= SCRATCH_MANY_FROM ? SCRATCH_MANY : 1;
    if (opts->scratch_pages > KVT_SESSION_SCRATCH_MAX || opts->scratch_pages >= opts->page_count)
        return refuse_opts(ns, "scratch_pages is above its limit, or leaves no page");
    return 0;
}

static int opts_read(const struct kvt_session_mgr_opts *from, const struct kvt_ns *ns,
                     const struct kvt_pool *pool, struct kvt_session_mgr_opts *opts)
{
    const struct kvt_shape_group *group = &ns->shape->groups[0];
    memset(opts, 0, sizeof(*opts));
    if (from != NULL && from->struct_size != sizeof(*from))
        return KVT_E_VERSION;
    if (from != NULL)
        *opts = *from;
    opts->struct_size = sizeof(*opts);
    int rc = pages_check(ns, pool, opts);
    if (rc == 0)
        rc = level_check(group, opts->level);
    if (rc != 0)
        return rc;
    if (opts->window_level == KVT_LEVEL_DEFAULT)
        opts->window_level = group->uniform[KVT_LEVEL_KV8] ? KVT_LEVEL_KV8 : KVT_LEVEL_RAW;
    if (opts->window_level != KVT_LEVEL_KV8 && opts->window_level != KVT_LEVEL_RAW)
        return refuse_opts(ns, "window_level is neither kv8 nor raw");
    if (opts->window_tokens == 0)
        opts->window_tokens = WINDOW_TOKENS;
    if (opts->sessions_max == 0)
        opts->sessions_max = SESSIONS;
    if (opts->tokens_max == 0)
        opts->tokens_max = TOKENS;
    if (opts->blocks_max == 0)
        opts->blocks_max = KVT_MAX(BLOCKS_MIN, KVT_MIN(opts->page_count, BLOCKS_LIMIT / 16) * 16);
    if (opts->sessions_max > SESSIONS_LIMIT || opts->tokens_max > TOKENS_LIMIT ||
        opts->blocks_max > BLOCKS_LIMIT)
        return refuse_opts(ns, "sessions_max, tokens_max or blocks_max is above its limit");
    return level_check(group, opts->window_level);
}

static int shape_check(const struct kvt_ns *ns, const struct kvt_pool *pool)
{
    if (ns->cache != pool->cache)
        return KVT_E_INVAL;
    if (ns->shape != pool->shape)
        return KVT_E_LAYOUT;
    return ns->shape->group_count == 1 && ns->shape->groups[0].kind == KVT_GROUP_FULL
               ? 0
               : KVT_E_UNSUPPORTED;
}

/* Whether a block is stored twice: at the window's level, then at a coarser one. (Of a group of MLA
 * rows kv4 comes to kv8.) */
static bool two_steps(const struct kvt_ns *ns, const struct kvt_session_mgr_opts *opts)
{
    int level = opts->level != KVT_LEVEL_DEFAULT ? opts->level : ns->cache->settings->level;
    const struct kvt_map *map = ns->shape->groups[0].uniform[level];
    return map != NULL && map->level < opts->window_level;
}

/* ---- pages are one manager's --------------------------------------------------------------- */

/* Two managers that hand out the same page would write over each other's blocks. */
static int claim_pages(struct kvt_session_mgr *mgr)
{
    struct kvt_cache *cache = mgr->ns->cache;
    uint32_t first = mgr->opts.first_page, end = first + mgr->opts.page_count;
    const struct kvt_session_mgr *other;
    uint32_t other_first = 0, other_end = 0;
    pthread_mutex_lock(&cache->lock);
    for (other = mgr->pool->managers; other != NULL; other = other->pool_next) {
        other_first = other->opts.first_page;
        other_end = other_first + other->opts.page_count;
        if (first < other_end && other_first < end)
            break;
    }
    if (other == NULL) {
        mgr->pool_next = mgr->pool->managers;
        mgr->pool->managers = mgr;
    }
    pthread_mutex_unlock(&cache->lock);
    if (other == NULL)
        return 0;
    kvt_misuse_say(cache, KVT_LOG_WARN, "kvt_session_mgr_open",
                   "pages %" PRIu32 " to %" PRIu32 " of the pool belong to another session manager "
                   "(it owns %" PRIu32 " to %" PRIu32 "): give each its own first_page and "
                   "page_count, or close the other one first",
                   KVT_MAX(first, other_first), KVT_MIN(end, other_end) - 1, other_first,
                   other_end - 1);
    return KVT_E_INVAL;
}

static void give_up_pages(struct kvt_session_mgr *mgr)
{
    struct kvt_cache *cache = mgr->ns->cache;
    struct kvt_session_mgr **link = &mgr->pool->managers;
    pthread_mutex_lock(&cache->lock);
    while (*link != mgr)
        link = &(*link)->pool_next;
    *link = mgr->pool_next;
    pthread_mutex_unlock(&cache->lock);
}

/* ---- open and close ------------------------------------------------------------------------ */

static void memory_free(struct kvt_session_mgr *mgr)
{
    free(mgr->nodes);
    free(mgr->buckets);
    free(mgr->page_stack);
    free(mgr->sessions);
    free(mgr->keys);
    free(mgr->path);
    free(mgr->tiers);
    free(mgr->roots);
    free(mgr);
}

static int memory_make(struct kvt_session_mgr *mgr)
{
    uint32_t buckets = 64;
    while (buckets < mgr->node_max)
        buckets *= 2;
    mgr->bucket_mask = buckets - 1;
    mgr->nodes = calloc(mgr->node_max, sizeof(*mgr->nodes));
    mgr->buckets = malloc(buckets * sizeof(*mgr->buckets));
    mgr->page_stack = calloc(mgr->opts.page_count, sizeof(*mgr->page_stack));
    mgr->sessions = calloc(mgr->opts.sessions_max, sizeof(*mgr->sessions));
    mgr->keys = calloc(mgr->session_blocks, sizeof(*mgr->keys));
    mgr->path = calloc(mgr->session_blocks, sizeof(*mgr->path));
    mgr->tiers = calloc(mgr->session_blocks, sizeof(*mgr->tiers));
    mgr->roots = calloc(mgr->session_blocks, sizeof(*mgr->roots));
    if (!mgr->nodes || !mgr->buckets || !mgr->page_stack || !mgr->sessions || !mgr->keys ||
        !mgr->path || !mgr->tiers || !mgr->roots)
        return -ENOMEM;
    memset(mgr->buckets, 0xff, buckets * sizeof(*mgr->buckets)); /* KVT_NONE */
    return 0;
}

static void pages_init(struct kvt_session_mgr *mgr)
{
    uint32_t end = mgr->opts.first_page + mgr->opts.page_count;
    while (mgr->scratch_free < mgr->opts.scratch_pages)
        mgr->scratch[mgr->scratch_free++] = --end;
    while (end > mgr->opts.first_page) /* the lowest is taken first */
        kvt_spage_put(mgr, --end);
}

int kvt_session_mgr_open(struct kvt_ns *ns, struct kvt_pool *pool,
                         const struct kvt_session_mgr_opts *opts, struct kvt_session_mgr **out)
{
    struct kvt_session_mgr_opts use;
    if (ns == NULL || pool == NULL || out == NULL)
        return KVT_E_INVAL;
    if (kvt_cache_forked(ns->cache))
        return KVT_E_CLOSED;
    int rc = shape_check(ns, pool);
    if (rc == 0)
        rc = opts_read(opts, ns, pool, &use);
    if (rc != 0)
        return rc;
    struct kvt_session_mgr *mgr = calloc(1, sizeof(*mgr));
    if (mgr == NULL)
        return -ENOMEM;
    mgr->ns = ns;
    mgr->pool = pool;
    mgr->opts = use;
    mgr->block_tokens = ns->shape->groups[0].block_tokens;
    mgr->session_blocks = (use.tokens_max + mgr->block_tokens - 1) / mgr->block_tokens;
    mgr->two_steps = two_steps(ns, &use);
    mgr->node_max = use.blocks_max;
    mgr->node_free = mgr->oldest = mgr->newest = mgr->cool_head = mgr->cool_tail = KVT_NONE;
    rc = memory_make(mgr);
    if (rc == 0)
        rc = claim_pages(mgr);
    if (rc != 0) {
        memory_free(mgr);
        return rc;
    }
    pages_init(mgr);
    kvt_sjobs_init(mgr);
    pthread_mutex_init(&mgr->lock, NULL);
    *out = mgr;
    return 0;
}

static struct kvt_sjob *any_job(struct kvt_session_mgr *mgr)
{
    for (uint32_t i = 0; i < KVT_SESSION_JOBS; i++)
        if (mgr->jobs[i].kind != KVT_SJOB_FREE && !mgr->jobs[i].ended)
            return &mgr->jobs[i];
    return NULL;
}

void kvt_session_mgr_close(struct kvt_session_mgr *mgr)
{
    struct kvt_sjob *job;
    if (mgr == NULL || kvt_cache_forked(mgr->ns->cache))
        return;
    for (uint32_t i = 0; i < mgr->opts.sessions_max; i++)
        if (mgr->sessions[i].state != 0)
            (void)kvt_session_close(mgr, (uint64_t)mgr->sessions[i].generation << 32 | (i + 1));
    pthread_mutex_lock(&mgr->lock);
    while ((job = any_job(mgr)) != NULL) {
        (void)kvt_sjob_wait(mgr, job, -1);
        (void)kvt_session_poll(mgr);
    }
    kvt_session_publish(mgr);
    pthread_mutex_unlock(&mgr->lock);
    give_up_pages(mgr);
    pthread_mutex_destroy(&mgr->lock);
    memory_free(mgr);
}

/* ---- work ---------------------------------------------------------------------------------- */

long kvt_session_mgr_work(struct kvt_session_mgr *mgr, int64_t timeout_ns)
{
    if (mgr == NULL)
        return KVT_E_INVAL;
    if (kvt_cache_forked(mgr->ns->cache))
        return KVT_E_CLOSED;
    pthread_mutex_lock(&mgr->lock);
    uint32_t ended = kvt_session_poll(mgr);
    kvt_session_cool(mgr, true);
    struct kvt_sjob *job = any_job(mgr);
    if (ended == 0 && job != NULL && timeout_ns != 0) {
        (void)kvt_sjob_wait(mgr, job, timeout_ns);
        (void)kvt_session_poll(mgr);
        kvt_session_cool(mgr, true);
    }
    long left = (long)mgr->jobs_used + (long)mgr->cool_count;
    pthread_mutex_unlock(&mgr->lock);
    return left;
}

/* Begin to store what is not stored. Returns how many blocks are not, and could be. */
static uint32_t save_all(struct kvt_session_mgr *mgr)
{
    uint32_t left = 0;
    kvt_session_cool(mgr, true);
    for (uint32_t i = 0; i < mgr->opts.sessions_max; i++) {
        struct kvt_session *s = &mgr->sessions[i];
        for (uint32_t b = s->state == 0 ? 0 : s->blocks; b-- > 0;) {
            const struct kvt_snode *node = &mgr->nodes[s->node[b]];
            (void)kvt_session_save_chain(mgr, s->node[b]); /* again when something has ended */
            left +=
                node->stored && node->record == KVT_SESSION_RECORD_NONE && node->page != KVT_NONE;
        }
    }
    return left;
}

int kvt_session_mgr_flush(struct kvt_session_mgr *mgr)
{
    struct kvt_sjob *job;
    if (mgr == NULL)
        return KVT_E_INVAL;
    if (kvt_cache_forked(mgr->ns->cache))
        return KVT_E_CLOSED;
    pthread_mutex_lock(&mgr->lock);
    (void)kvt_session_poll(mgr);
    uint32_t left = save_all(mgr);
    while ((job = any_job(mgr)) != NULL) {
        (void)kvt_sjob_wait(mgr, job, -1);
        (void)kvt_session_poll(mgr);
        left = save_all(mgr);
    }
    pthread_mutex_unlock(&mgr->lock);
    int rc = kvt_flush(mgr->ns->cache);
    return rc == 0 && left > 0 ? KVT_E_DROPPED : rc;
}

/* ---- questions ----------------------------------------------------------------------------- */

int kvt_session_get_plan(struct kvt_session_mgr *mgr, kvt_session_id id,
                         struct kvt_session_plan *plan)
{
    int rc;
    if (plan == NULL)
        return KVT_E_INVAL;
    if (plan->struct_size != sizeof(*plan))
        return KVT_E_VERSION;
    struct kvt_session *s = kvt_session_enter(mgr, id, &rc);
    if (s == NULL)
        return rc;
    *plan = s->plan;
    pthread_mutex_unlock(&mgr->lock);
    return 0;
}

int kvt_session_get_info(struct kvt_session_mgr *mgr, kvt_session_id id,
                         struct kvt_session_info *info)
{
    int rc;
    if (info == NULL)
        return KVT_E_INVAL;
    if (info->struct_size != sizeof(*info))
        return KVT_E_VERSION;
    struct kvt_session *s = kvt_session_enter(mgr, id, &rc);
    if (s == NULL)
        return rc;
    info->state = s->state;
    info->tokens = s->tokens;
    info->filled = s->filled;
    info->blocks = s->blocks;
    pthread_mutex_unlock(&mgr->lock);
    return 0;
}

int kvt_session_get_block(struct kvt_session_mgr *mgr, kvt_session_id id, size_t index,
                          struct kvt_session_block *block)
{
    int rc;
    enum kvt_tier tier = KVT_TIER_MISS;
    if (block == NULL)
        return KVT_E_INVAL;
    if (block->struct_size != sizeof(*block))
        return KVT_E_VERSION;
    struct kvt_session *s = kvt_session_enter(mgr, id, &rc);
    if (s == NULL)
        return rc;
    rc = KVT_E_INVAL;
    if (index < s->blocks) {
        const struct kvt_snode *node = &mgr->nodes[s->node[index]];
        uint8_t origin = 0;
        struct kvt_key key = kvt_session_key(mgr, node->hash);
        block->page = node->page;
        block->sessions = node->refs;
        block->record = node->record;
        if (node->page != KVT_NONE)
            origin = atomic_load_explicit(&mgr->pool->origin[node->page], memory_order_relaxed);
        block->page_level = origin ? origin : KVT_LEVEL_RAW;
        const struct kvt_lookup_opts look = {.struct_size = sizeof(look),
                                             .flags = KVT_LOOKUP_PROBE};
        long run = kvt_lookup(mgr->ns, &key, 1, &look, &tier);
        block->tier = (int)tier;
        rc = run < 0 ? (int)run : 0;
    }
    pthread_mutex_unlock(&mgr->lock);
    return rc;
}

int kvt_session_mgr_stats(struct kvt_session_mgr *mgr, struct kvt_session_stats *stats)
{
    if (mgr == NULL || stats == NULL)
        return KVT_E_INVAL;
    if (stats->struct_size != sizeof(*stats))
        return KVT_E_VERSION;
    if (kvt_cache_forked(mgr->ns->cache))
        return KVT_E_CLOSED;
    pthread_mutex_lock(&mgr->lock);
    kvt_session_publish(mgr);
    *stats = mgr->stats;
    stats->struct_size = sizeof(*stats);
    stats->pages = mgr->opts.page_count - mgr->opts.scratch_pages;
    stats->pages_free = mgr->pages_free;
    stats->in_flight = mgr->jobs_used;
    pthread_mutex_unlock(&mgr->lock);
    return 0;
}
