/* Cutting a session back: the end of its sequence goes, as when a turn is edited or tried again.
 *
 * What goes is the session's hold on the blocks behind the cut; blocks and records stay for others,
 * and for a session that takes the same way again. A cut inside a full block: the block is shared
 * and read only, so an active session goes on in a page of its own, whose first rows the engine has
 * to fill again, unless nobody else needs the block: then its page is the session's from now on.
 * Threads: any; under the manager's lock.
 */
#include "base/checked.h"
#include "client/session_internal.h"

/* The page that the session uses for its last full block, when the session alone has it: out of the
 * node, and writable. KVT_NONE: others need it, or may; or it came from a coarse record, and the
 * block would become a mixture of that and of what the engine writes. */
static uint32_t page_of_its_own(struct kvt_session_mgr *mgr, const struct kvt_session *s)
{
    uint32_t last = s->blocks - 1;
    struct kvt_snode *node = &mgr->nodes[s->node[last]];
    if (s->page[last] != node->page) /* two computed the block at the same time: this one is ours */
        return s->page[last];
    if (node->refs > 1 || node->resident > 0 || node->busy ||
        atomic_load_explicit(&mgr->pool->origin[node->page], memory_order_relaxed) != 0)
        return KVT_NONE;
    return kvt_snode_take_page(mgr, s->node[last]);
}

/* The last full block of an active session goes; its page too, where that is the session's. */
static void drop_block(struct kvt_session_mgr *mgr, struct kvt_session *s)
{
    uint32_t last = s->blocks - 1;
    if (s->page[last] != mgr->nodes[s->node[last]].page)
        kvt_spage_put(mgr, s->page[last]);
    kvt_session_detach_last(mgr, s);
}

static int cut_active(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t tokens)
{
    uint32_t unit = mgr->block_tokens, keep = tokens / unit;
    uint32_t have = (s->tokens + unit - 1) / unit, want = (tokens + unit - 1) / unit;
    uint32_t page = KVT_NONE;
    bool inside = keep < s->blocks && tokens % unit != 0; /* of a full block */
    if (inside) { /* whatever page it gets in the end, there is one: then nothing can fail */
        int rc = kvt_session_make_room(mgr, 1);
        if (rc != 0)
            return rc;
    }
    for (uint32_t i = KVT_MAX(want, s->blocks); i < have; i++)
        kvt_spage_put(mgr, s->page[i]);
    while (s->blocks > keep + inside)
        drop_block(mgr, s);
    s->filled = KVT_MIN(s->filled, tokens);
    if (inside) {
        page = page_of_its_own(mgr, s);
        kvt_session_detach_last(mgr, s);
        if (page == KVT_NONE) {
            page = kvt_spage_take(mgr);
            (void)kvt_pool_reset_origin(mgr->pool, &page, 1);
            s->filled = keep * unit;
        }
        s->page[keep] = page;
    }
    return 0;
}

/* An idle session has no pages but that of a partial last block. */
static void cut_idle(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t tokens)
{
    uint32_t unit = mgr->block_tokens, keep = tokens / unit;
    if (tokens > s->blocks * unit) { /* inside the partial block, or behind what is kept at all */
        s->filled = KVT_MIN(s->filled, tokens);
        return;
    }
    kvt_session_drop_tail(mgr, s, true);
    while (s->blocks > keep)
        kvt_session_detach_last(mgr, s);
    s->filled = KVT_MIN(s->filled, s->blocks * unit);
}

static int cut(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t tokens)
{
    int rc = 0;
    if (s->state == KVT_SESSION_RESTORING)
        return KVT_E_STATE;
    if (tokens > s->tokens)
        return KVT_E_INVAL;
    if (tokens == s->tokens)
        return 0;
    if (s->state == KVT_SESSION_ACTIVE)
        rc = cut_active(mgr, s, tokens);
    else
        cut_idle(mgr, s, tokens);
    if (rc != 0)
        return rc;
    mgr->stats.truncated_tokens += s->tokens - tokens;
    s->tokens = tokens;
    kvt_session_set_window(mgr, s, tokens);
    kvt_session_cool(mgr, false);
    return 0;
}

int kvt_session_truncate(struct kvt_session_mgr *mgr, kvt_session_id id, uint32_t tokens)
{
    int rc;
    struct kvt_session *s = kvt_session_enter(mgr, id, &rc);
    if (s == NULL)
        return rc;
    rc = cut(mgr, s, tokens);
    pthread_mutex_unlock(&mgr->lock);
    return rc;
}
