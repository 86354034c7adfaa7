/* Questions to a session manager: pages, plans, blocks, counters. Nothing here changes anything.
 * Threads: any; each call takes the manager's lock.
 */
#include "base/checked.h"
#include "client/session_internal.h"

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

/* Index of a group of the layout; KVT_NONE: it has no such group. */
static uint32_t index_of(const struct kvt_session_mgr *mgr, uint16_t group)
{
    for (uint32_t g = 0; g < mgr->group_count; g++)
        if (mgr->groups[g].shape->group == group)
            return g;
    return KVT_NONE;
}

static long pages_of(struct kvt_session_mgr *mgr, kvt_session_id id, uint32_t g, size_t first,
                     uint32_t *pages, size_t n)
{
    int rc;
    long count = KVT_E_STATE;
    struct kvt_session *s = kvt_session_enter(mgr, id, &rc);
    if (s == NULL)
        return rc;
    if (s->state == KVT_SESSION_ACTIVE ||
        (s->state == KVT_SESSION_RESTORING && s->chunk_count > 0)) {
        size_t have = kvt_session_blocks_of(mgr, s->tokens);
        count = first >= have ? 0 : (long)KVT_MIN(n, have - first);
        for (long i = 0; i < count; i++)
            pages[i] = *kvt_session_page(mgr, s, g, (uint32_t)first + (uint32_t)i);
    }
    pthread_mutex_unlock(&mgr->lock);
    return count;
}

long kvt_session_pages(struct kvt_session_mgr *mgr, kvt_session_id id, size_t first,
                       uint32_t *pages, size_t n)
{
    if (mgr == NULL || (pages == NULL && n != 0))
        return KVT_E_INVAL;
    return pages_of(mgr, id, 0, first, pages, n);
}

long kvt_session_group_pages(struct kvt_session_mgr *mgr, kvt_session_id id, uint16_t group,
                             size_t first, uint32_t *pages, size_t n)
{
    uint32_t g = mgr == NULL ? KVT_NONE : index_of(mgr, group);
    if (g == KVT_NONE || (pages == NULL && n != 0))
        return KVT_E_INVAL;
    return pages_of(mgr, id, g, first, pages, n);
}

static int describe(struct kvt_session_mgr *mgr, uint32_t node, uint32_t g,
                    struct kvt_session_block *block)
{
    const struct kvt_lookup_opts look = {.struct_size = sizeof(look), .flags = KVT_LOOKUP_PROBE};
    const struct kvt_scell *cell = kvt_scell_at(mgr, node, g);
    struct kvt_key key = kvt_session_key(mgr, g, mgr->nodes[node].hash);
    enum kvt_tier tier = KVT_TIER_MISS;
    uint8_t origin = cell->page != KVT_NONE ? kvt_session_origin(mgr, g, cell->page) : 0;
    block->page = cell->page;
    block->sessions = mgr->nodes[node].refs;
    block->record = cell->record;
    block->page_level = origin ? origin : KVT_LEVEL_RAW;
    long run = kvt_lookup(mgr->ns, &key, 1, &look, &tier);
    block->tier = (int)tier;
    return run < 0 ? (int)run : 0;
}

static int block_of(struct kvt_session_mgr *mgr, kvt_session_id id, uint32_t g, size_t index,
                    struct kvt_session_block *block)
{
    int rc;
    if (block == NULL)
        return KVT_E_INVAL;
    if (block->struct_size != sizeof(*block))
        return KVT_E_VERSION;
    struct kvt_session *s = kvt_session_enter(mgr, id, &rc);
    if (s == NULL)
        return rc;
    rc = index < s->blocks ? describe(mgr, s->node[index], g, block) : KVT_E_INVAL;
    pthread_mutex_unlock(&mgr->lock);
    return rc;
}

int kvt_session_get_block(struct kvt_session_mgr *mgr, kvt_session_id id, size_t index,
                          struct kvt_session_block *block)
{
    return block_of(mgr, id, 0, index, block);
}

int kvt_session_get_group_block(struct kvt_session_mgr *mgr, kvt_session_id id, uint16_t group,
                                size_t index, struct kvt_session_block *block)
{
    uint32_t g = mgr == NULL ? KVT_NONE : index_of(mgr, group);
    return g == KVT_NONE ? KVT_E_INVAL : block_of(mgr, id, g, index, block);
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
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        stats->pages += mgr->groups[g].page_count - mgr->groups[g].scratch_pages;
        stats->pages_free += mgr->groups[g].pages_free;
    }
    stats->in_flight = mgr->jobs_used;
    pthread_mutex_unlock(&mgr->lock);
    return 0;
}
