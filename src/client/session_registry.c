/* The registry of a session manager: nodes by hash, the pages of L0 and who has them, and for each
 * group the list of cells by last use. session_internal.h has the rules. Threads: under the
 * manager's lock. Does not: talk to the cache, decide what is stored or evicted.
 */
#include <string.h>

#include "client/session_internal.h"

static uint32_t bucket_of(const struct kvt_session_mgr *mgr, const uint8_t *hash)
{
    uint32_t word; /* of a SHA-256: as good as any */
    memcpy(&word, hash, sizeof(word));
    return word & mgr->bucket_mask;
}

uint32_t kvt_snode_find(const struct kvt_session_mgr *mgr, const uint8_t *hash)
{
    uint32_t at = mgr->buckets[bucket_of(mgr, hash)];
    while (at != KVT_NONE && memcmp(mgr->nodes[at].hash, hash, KVT_HASH_BYTES_MAX) != 0)
        at = mgr->nodes[at].bucket_next;
    return at;
}

uint32_t kvt_snode_room(const struct kvt_session_mgr *mgr)
{
    return mgr->node_max - (uint32_t)mgr->stats.blocks;
}

uint32_t kvt_snode_add(struct kvt_session_mgr *mgr, const uint8_t *hash, uint32_t parent,
                       uint32_t depth, uint32_t tail_of)
{
    uint32_t at = mgr->node_free;
    if (at != KVT_NONE)
        mgr->node_free = mgr->nodes[at].bucket_next;
    else if (mgr->nodes_used < mgr->node_max)
        at = mgr->nodes_used++;
    else
        return KVT_NONE;
    struct kvt_snode *node = &mgr->nodes[at];
    memset(node, 0, sizeof(*node));
    node->parent = parent;
    node->depth = depth;
    node->bucket_next = KVT_NONE;
    node->tail_of = tail_of;
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        struct kvt_scell *cell = kvt_scell_at(mgr, at, g);
        memset(cell, 0, sizeof(*cell));
        cell->page = cell->older = cell->newer = cell->cool_next = KVT_NONE;
    }
    if (hash != NULL) {
        uint32_t *bucket = &mgr->buckets[bucket_of(mgr, hash)];
        memcpy(node->hash, hash, sizeof(node->hash));
        node->bucket_next = *bucket;
        *bucket = at;
    }
    if (parent != KVT_NONE)
        mgr->nodes[parent].children++;
    mgr->stats.blocks++;
    return at;
}

static void unhash(struct kvt_session_mgr *mgr, uint32_t node)
{
    uint32_t *link = &mgr->buckets[bucket_of(mgr, mgr->nodes[node].hash)];
    while (*link != node)
        link = &mgr->nodes[*link].bucket_next;
    *link = mgr->nodes[node].bucket_next;
}

static bool empty(const struct kvt_session_mgr *mgr, uint32_t node)
{
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        const struct kvt_scell *cell = kvt_scell_at(mgr, node, g);
        if (cell->page != KVT_NONE || cell->busy || cell->queued)
            return false;
    }
    return true;
}

void kvt_snode_settle(struct kvt_session_mgr *mgr, uint32_t at)
{
    while (at != KVT_NONE) {
        struct kvt_snode *node = &mgr->nodes[at];
        if (node->refs > 0 || node->children > 0 || !empty(mgr, at))
            return;
        uint32_t parent = node->parent;
        if (node->tail_of == KVT_NONE)
            unhash(mgr, at);
        if (parent != KVT_NONE)
            mgr->nodes[parent].children--;
        node->bucket_next = mgr->node_free;
        mgr->node_free = at;
        mgr->stats.blocks--;
        at = parent;
    }
}

/* ---- the list by last use ------------------------------------------------------------------ */

static void lru_remove(struct kvt_session_mgr *mgr, struct kvt_sgroup *group,
                       struct kvt_scell *cell)
{
    if (cell->older != KVT_NONE)
        mgr->cells[cell->older].newer = cell->newer;
    else
        group->oldest = cell->newer;
    if (cell->newer != KVT_NONE)
        mgr->cells[cell->newer].older = cell->older;
    else
        group->newest = cell->older;
    cell->in_lru = false;
    group->lru_count--;
}

static void lru_insert(struct kvt_session_mgr *mgr, struct kvt_sgroup *group, uint32_t at,
                       uint32_t older, uint32_t newer)
{
    struct kvt_scell *cell = &mgr->cells[at];
    cell->older = older;
    cell->newer = newer;
    if (older != KVT_NONE)
        mgr->cells[older].newer = at;
    else
        group->oldest = at;
    if (newer != KVT_NONE)
        mgr->cells[newer].older = at;
    else
        group->newest = at;
    cell->in_lru = true;
    group->lru_count++;
}

void kvt_scell_lru(struct kvt_session_mgr *mgr, uint32_t at)
{
    struct kvt_scell *cell = &mgr->cells[at];
    struct kvt_sgroup *group = &mgr->groups[kvt_scell_group(mgr, at)];
    if (cell->in_lru)
        lru_remove(mgr, group, cell);
    if (cell->page == KVT_NONE || cell->pinned > 0)
        return;
    if (group->full || cell->holders > 0)
        lru_insert(mgr, group, at, group->newest, KVT_NONE);
    else
        lru_insert(mgr, group, at, KVT_NONE, group->oldest);
}

/* ---- pages --------------------------------------------------------------------------------- */

static struct kvt_scell *parent_cell(const struct kvt_session_mgr *mgr, uint32_t at)
{
    uint32_t parent = mgr->nodes[kvt_scell_node(mgr, at)].parent;
    return parent == KVT_NONE ? NULL : kvt_scell_at(mgr, parent, kvt_scell_group(mgr, at));
}

void kvt_scell_set_page(struct kvt_session_mgr *mgr, uint32_t at, uint32_t page)
{
    struct kvt_scell *parent = parent_cell(mgr, at);
    mgr->cells[at].page = page;
    if (parent != NULL)
        parent->resident++;
    kvt_scell_lru(mgr, at);
}

uint32_t kvt_scell_take_page(struct kvt_session_mgr *mgr, uint32_t at)
{
    struct kvt_scell *parent = parent_cell(mgr, at);
    uint32_t page = mgr->cells[at].page;
    mgr->cells[at].page = KVT_NONE;
    if (parent != NULL)
        parent->resident--;
    kvt_scell_lru(mgr, at);
    return page;
}

uint32_t kvt_spage_take(struct kvt_sgroup *group)
{
    return group->page_stack[--group->pages_free];
}

void kvt_spage_put(struct kvt_sgroup *group, uint32_t page)
{
    group->page_stack[group->pages_free++] = page;
}
