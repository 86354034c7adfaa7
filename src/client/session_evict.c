/* Making room in L0: pages are taken from idle sessions, least recently used first, children before
 * parents. A block without a record is stored first; one that the store will not take loses its
 * page all the same, counted: a page that is needed now goes before one that may be needed again.
 * Pages of active sessions are never taken. Threads: under the manager's lock. Never waits.
 */
#include <errno.h>

#include "client/session_internal.h"

static void evict(struct kvt_session_mgr *mgr, uint32_t at)
{
    struct kvt_snode *node = &mgr->nodes[at];
    kvt_spage_put(mgr, kvt_snode_take_page(mgr, at));
    mgr->stats.evicted++;
    if (node->tail_of != KVT_NONE) {
        struct kvt_session *s = &mgr->sessions[node->tail_of];
        mgr->stats.tails_lost++;
        s->tail = KVT_NONE;
        s->filled = s->blocks * mgr->block_tokens;
        node->refs = 0;
    } else {
        mgr->stats.evicted_unsaved += node->record == KVT_SESSION_RECORD_NONE;
        kvt_session_want_cool(mgr, at);
    }
    kvt_snode_settle(mgr, at);
}

/* Free the page, or begin to store the block. false: its page comes free later. */
static bool take(struct kvt_session_mgr *mgr, uint32_t at)
{
    struct kvt_snode *node = &mgr->nodes[at];
    if (node->busy || node->resident > 0) /* its children are on their way */
        return false;
    if (node->tail_of == KVT_NONE && node->stored && node->record == KVT_SESSION_RECORD_NONE) {
        int rc = kvt_session_save_chain(mgr, at);
        if (node->busy || (rc == -EAGAIN && mgr->jobs_used > 0))
            return false;
    }
    evict(mgr, at);
    return true;
}

int kvt_session_make_room(struct kvt_session_mgr *mgr, uint32_t need)
{
    uint32_t coming = 0, at = mgr->oldest;
    if (need > mgr->pages_free + mgr->lru_count) {
        mgr->stats.refused_limit++;
        return KVT_E_LIMIT;
    }
    while (at != KVT_NONE && mgr->pages_free + coming < need) {
        uint32_t next = mgr->nodes[at].newer; /* has a page, so it outlives this step */
        coming += !take(mgr, at);
        at = next;
    }
    if (mgr->pages_free >= need)
        return 0;
    mgr->stats.refused_busy++;
    return -EAGAIN;
}
