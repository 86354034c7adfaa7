/* Cutting a session back: the end of its sequence goes, as when a turn is edited or tried again.
 *
 * What goes is the session's hold on the blocks behind the cut; blocks and records stay for others,
 * and for a session that takes the same way again. A cut inside a full block: the block is shared
 * and read only, so an active session goes on in pages of its own, whose first rows the engine has
 * to fill again, unless nobody else needs the block: then its pages are the session's from now on.
 * A window group, or one of states, has passed what is far behind: where it is not in L0 any more,
 * an active session cannot be cut; an idle one can, and its resume finds what there is.
 * Threads: any; under the manager's lock.
 */
#include "base/checked.h"
#include "client/session_internal.h"

/* Whether the session alone has the pages of its last full block, and they may be written. Not when
 * others need them, or may; nor when one came from a coarse record: the block would become a
 * mixture of that and of what the engine writes; nor can a state be taken back. */
static bool its_own(const struct kvt_session_mgr *mgr, const struct kvt_session *s)
{
    uint32_t last = s->blocks - 1;
    const struct kvt_snode *node = &mgr->nodes[s->node[last]];
    if (mgr->states)
        return false;
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        const struct kvt_scell *cell = kvt_scell_at(mgr, s->node[last], g);
        uint32_t page = *kvt_session_page(mgr, s, g, last);
        if (last < s->from[g] || page == KVT_NONE)
            return false;
        if (page != cell->page) /* two computed the block at the same time: this one is ours */
            continue;
        if (node->refs > 1 || cell->resident > 0 || cell->busy ||
            kvt_session_origin(mgr, g, page) != 0)
            return false;
    }
    return true;
}

/* The pages of the last full block become the session's, out of its cells. */
static void take_its_own(struct kvt_session_mgr *mgr, struct kvt_session *s)
{
    uint32_t last = s->blocks - 1;
    for (uint32_t g = 0; g < mgr->group_count; g++)
        if (*kvt_session_page(mgr, s, g, last) == kvt_scell_at(mgr, s->node[last], g)->page)
            (void)kvt_scell_take_page(mgr, kvt_scell_of(mgr, s->node[last], g));
}

/* The last full block of an active session goes; its pages too, where they are the session's. */
static void drop_block(struct kvt_session_mgr *mgr, struct kvt_session *s)
{
    uint32_t last = s->blocks - 1;
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        uint32_t page = *kvt_session_page(mgr, s, g, last);
        if (page != KVT_NONE && page != kvt_scell_at(mgr, s->node[last], g)->page)
            kvt_spage_put(&mgr->groups[g], page);
    }
    kvt_session_detach_last(mgr, s);
}

/* Whether block i of group g gets a page now that it had none: a state is kept there from now on.
 */
static bool lacks(const struct kvt_session_mgr *mgr, const struct kvt_session *s, uint32_t g,
                  uint32_t i, uint32_t tokens)
{
    return *kvt_session_page(mgr, s, g, i) == KVT_NONE && kvt_session_gives(mgr, g, i, tokens);
}

/* Pages that the engine has to get: one of each group for a cut inside a full block, and those that
 * it lacks. */
static void pages_wanted(const struct kvt_session_mgr *mgr, const struct kvt_session *s,
                         uint32_t tokens, bool inside, uint32_t *need)
{
    uint32_t want = kvt_session_blocks_of(mgr, tokens);
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        need[g] = inside;
        for (uint32_t i = s->blocks; i < want; i++)
            need[g] += lacks(mgr, s, g, i, tokens);
    }
}

/* The block that `filled` ends in may be among them: the engine has that state, its page not yet.
 */
static void fill_gaps(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t tokens)
{
    uint32_t want = kvt_session_blocks_of(mgr, tokens);
    for (uint32_t g = 0; g < mgr->group_count; g++)
        for (uint32_t i = s->blocks; i < want; i++)
            if (lacks(mgr, s, g, i, tokens)) {
                *kvt_session_page(mgr, s, g, i) = kvt_session_fresh_page(mgr, g);
                s->unwritten = s->unwritten || i * mgr->block_tokens < s->filled;
            }
}

static int cut_active(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t tokens)
{
    uint32_t unit = mgr->block_tokens, keep = tokens / unit;
    uint32_t have = kvt_session_blocks_of(mgr, s->tokens);
    uint32_t want = kvt_session_blocks_of(mgr, tokens);
    uint32_t need[KVT_GROUPS_MAX];
    bool inside = keep < s->blocks && tokens % unit != 0; /* of a full block */
    if (tokens < s->filled && !kvt_session_serves(mgr, s, keep, kvt_session_has_page))
        return KVT_E_STATE;
    pages_wanted(mgr, s, tokens, inside, need); /* there are some: then nothing can fail */
    int rc = kvt_session_make_room(mgr, need);
    if (rc != 0)
        return rc;
    if (tokens < s->filled && !kvt_session_serves(mgr, s, keep, kvt_session_has_page))
        return KVT_E_STATE; /* room was made just there */
    fill_gaps(mgr, s, tokens);
    kvt_session_put_pages(mgr, s, KVT_MAX(want, s->blocks), have);
    while (s->blocks > keep + inside)
        drop_block(mgr, s);
    if (tokens < s->filled && mgr->states && tokens % unit != 0)
        s->filled = keep * unit; /* a state cannot be taken back */
    s->filled = KVT_MIN(s->filled, tokens);
    if (inside && its_own(mgr, s)) {
        take_its_own(mgr, s);
        kvt_session_detach_last(mgr, s);
    } else if (inside) {
        drop_block(mgr, s);
        for (uint32_t g = 0; g < mgr->group_count; g++)
            *kvt_session_page(mgr, s, g, keep) = kvt_session_fresh_page(mgr, g);
        s->filled = keep * unit;
    }
    return 0;
}

/* A cell that the session holds, and that had no page, may have got one since from somebody else:
 * now that the session needs it, that is its page too. */
static void see_pages(struct kvt_session_mgr *mgr, const struct kvt_session *s)
{
    for (uint32_t g = 0; g < mgr->group_count; g++)
        for (uint32_t i = s->from[g]; i < s->blocks && !mgr->groups[g].full; i++)
            if (*kvt_session_page(mgr, s, g, i) == KVT_NONE)
                *kvt_session_page(mgr, s, g, i) = kvt_scell_at(mgr, s->node[i], g)->page;
}

/* An idle session has no pages but that of a partial last block. */
static void cut_idle(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t tokens)
{
    uint32_t unit = mgr->block_tokens, keep = tokens / unit;
    if (mgr->states && tokens < s->filled)
        kvt_session_drop_tail(mgr, s, true); /* a state cannot be taken back */
    else if (tokens > s->blocks * unit) {    /* inside the partial block, or behind what is kept */
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
    kvt_session_set_needs(mgr, s);
    if (s->state == KVT_SESSION_ACTIVE)
        see_pages(mgr, s);
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
