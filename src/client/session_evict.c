/* Making room in L0: of each group pages are taken that nobody pins, least recently used first; of
 * full attention children before parents, of windows and states first what no session needs any
 * more. A block without a record is stored first; one that the store will not take loses its page
 * all the same, counted: a page that is needed now goes before one that may be needed again. What
 * no session needs of a window is not stored.
 * Pages of active sessions are never taken. Threads: under the manager's lock. Never waits.
 */
#include <errno.h>

#include "client/session_internal.h"

/* A partial last block is of use in all groups or in none. */
static void evict_tail(struct kvt_session_mgr *mgr, uint32_t at)
{
    struct kvt_snode *node = &mgr->nodes[at];
    struct kvt_session *s = &mgr->sessions[node->tail_of];
    mgr->stats.evicted += mgr->group_count;
    mgr->stats.tails_lost++;
    s->filled = s->blocks * mgr->block_tokens;
    kvt_session_drop_tail(mgr, s, true);
}

static void evict(struct kvt_session_mgr *mgr, uint32_t at)
{
    const struct kvt_scell *cell = &mgr->cells[at];
    uint32_t node = kvt_scell_node(mgr, at);
    if (mgr->nodes[node].tail_of != KVT_NONE) {
        evict_tail(mgr, node);
        return;
    }
    kvt_spage_put(&mgr->groups[kvt_scell_group(mgr, at)], kvt_scell_take_page(mgr, at));
    mgr->stats.evicted++;
    mgr->stats.evicted_unsaved +=
        cell->record == KVT_SESSION_RECORD_NONE && kvt_session_wanted(mgr, at);
    kvt_session_want_cool(mgr, at);
    kvt_snode_settle(mgr, node);
}

/* Free the page, or begin to store the block. false: its page comes free later. */
static bool take(struct kvt_session_mgr *mgr, uint32_t at)
{
    const struct kvt_scell *cell = &mgr->cells[at];
    const struct kvt_snode *node = &mgr->nodes[kvt_scell_node(mgr, at)];
    if (cell->busy)
        return false;
    if (cell->resident > 0 && mgr->groups[kvt_scell_group(mgr, at)].full)
        return false; /* its children are on their way */
    if (node->tail_of == KVT_NONE && node->stored && kvt_session_wanted(mgr, at) &&
        cell->record == KVT_SESSION_RECORD_NONE) {
        int rc = kvt_session_save_chain(mgr, at);
        if (cell->busy || (rc == -EAGAIN && mgr->jobs_used > 0))
            return false;
    }
    evict(mgr, at);
    return true;
}

static bool make_room_in(struct kvt_session_mgr *mgr, const struct kvt_sgroup *group, uint32_t need)
{
    uint32_t coming = 0, at = group->oldest;
    while (at != KVT_NONE && group->pages_free + coming < need) {
        uint32_t next = mgr->cells[at].newer; /* has a page, so it outlives this step */
        coming += !take(mgr, at);
        at = next;
    }
    return group->pages_free >= need;
}

int kvt_session_make_room(struct kvt_session_mgr *mgr, const uint32_t *need)
{
    bool there = true;
    for (uint32_t g = 0; g < mgr->group_count; g++)
        if (need[g] > mgr->groups[g].pages_free + mgr->groups[g].lru_count) {
            mgr->stats.refused_limit++;
            return KVT_E_LIMIT;
        }
    for (uint32_t g = 0; g < mgr->group_count; g++)
        there = make_room_in(mgr, &mgr->groups[g], need[g]) && there;
    if (there)
        return 0;
    mgr->stats.refused_busy++;
    return -EAGAIN;
}
