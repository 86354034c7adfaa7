/* What each group of a layout needs of a sequence, what there is of it, and what is held for that.
 *
 *   tokens       0 ............................................ K ..... filled
 *   full         |<----------------- every block ------------------------->|
 *   window                             |<-- those of the window before K ->|
 *   states                                                 |<- the last -->|
 *                                      ^ from
 *
 * K is where a block ends with at least one token behind it: so far a prompt of these very tokens
 * can come back, since the last one has to be computed. What is before `from` the session has
 * passed: it gives the page back, or leaves it to others until it is wanted.
 *
 * A prefix can be had when every group has what it needs: kvt_session_reach() finds the longest one
 * in a single pass, from the run of blocks that are there in each group.
 * Threads: under the manager's lock.
 */
#include "base/checked.h"
#include "client/session_internal.h"

uint32_t kvt_session_needs(const struct kvt_session_mgr *mgr, uint32_t g, uint32_t blocks)
{
    uint64_t tokens = (uint64_t)blocks * mgr->block_tokens;
    return (uint32_t)kvt_group_first_needed(mgr->groups[g].shape, tokens);
}

/* Blocks of K, above. */
static uint32_t comes_back(const struct kvt_session_mgr *mgr, uint32_t tokens)
{
    return tokens == 0 ? 0 : (tokens - 1) / mgr->block_tokens;
}

/* Of states only the last ones are worth a page: where the sequence can come back, and its end. */
bool kvt_session_gives(const struct kvt_session_mgr *mgr, uint32_t g, uint32_t i, uint32_t tokens)
{
    return mgr->groups[g].shape->kind != KVT_GROUP_STATE ||
           i >= kvt_session_needs(mgr, g, comes_back(mgr, tokens));
}

/* ---- holding ------------------------------------------------------------------------------- */

static void pass(struct kvt_session_mgr *mgr, const struct kvt_session *s, uint32_t g, uint32_t i)
{
    uint32_t at = kvt_scell_of(mgr, s->node[i], g), *page = kvt_session_page(mgr, s, g, i);
    struct kvt_scell *cell = &mgr->cells[at];
    cell->holders--;
    if (s->state != KVT_SESSION_IDLE) {
        cell->pinned--;
        if (*page != KVT_NONE && *page != cell->page)
            kvt_spage_put(&mgr->groups[g], *page);
        *page = KVT_NONE;
    }
    kvt_scell_lru(mgr, at);
}

static void hold(struct kvt_session_mgr *mgr, const struct kvt_session *s, uint32_t g, uint32_t i)
{
    uint32_t at = kvt_scell_of(mgr, s->node[i], g);
    mgr->cells[at].holders++;
    if (s->state != KVT_SESSION_IDLE) {
        mgr->cells[at].pinned++;
        *kvt_session_page(mgr, s, g, i) = mgr->cells[at].page;
    }
    kvt_scell_lru(mgr, at);
}

void kvt_session_hold_from(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t g,
                           uint32_t from)
{
    for (uint32_t i = s->from[g]; i < from && i < s->blocks; i++)
        pass(mgr, s, g, i);
    for (uint32_t i = KVT_MIN(s->from[g], s->blocks); i-- > from;)
        hold(mgr, s, g, i);
    s->from[g] = from;
}

/* A state that was never in a page is of no use: the last one that was is kept instead. */
static uint32_t last_state(const struct kvt_session_mgr *mgr, const struct kvt_session *s,
                           uint32_t g, uint32_t want)
{
    while (want > s->from[g]) {
        const struct kvt_scell *cell =
            want < s->blocks ? kvt_scell_at(mgr, s->node[want], g) : NULL;
        if (cell != NULL && (cell->page != KVT_NONE || cell->record != KVT_SESSION_RECORD_NONE))
            break;
        want--;
    }
    return want;
}

void kvt_session_set_needs(struct kvt_session_mgr *mgr, struct kvt_session *s)
{
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        uint32_t from = kvt_session_needs(mgr, g, comes_back(mgr, s->filled));
        if (mgr->groups[g].shape->kind == KVT_GROUP_STATE)
            from = last_state(mgr, s, g, from);
        kvt_session_hold_from(mgr, s, g, from);
    }
}

void kvt_session_pin_tail(struct kvt_session_mgr *mgr, struct kvt_session *s, bool pin)
{
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        kvt_scell_at(mgr, s->tail, g)->pinned = pin;
        kvt_scell_lru(mgr, kvt_scell_of(mgr, s->tail, g));
    }
}

/* ---- what is there ------------------------------------------------------------------------- */

bool kvt_session_has_page(const struct kvt_session_mgr *mgr, const struct kvt_session *s,
                          uint32_t node, uint32_t g, uint32_t i)
{
    (void)s;
    (void)i;
    return node != KVT_NONE && kvt_scell_at(mgr, node, g)->page != KVT_NONE;
}

uint32_t kvt_session_node(const struct kvt_session_mgr *mgr, const struct kvt_session *s,
                          uint32_t i)
{
    return i < s->blocks ? s->node[i] : kvt_snode_find(mgr, s->hash[i]);
}

uint32_t kvt_session_reach(const struct kvt_session_mgr *mgr, const struct kvt_session *s,
                           uint32_t limit, kvt_session_has_fn has)
{
    uint32_t run[KVT_GROUPS_MAX] = {0}, best = 0;
    for (uint32_t i = 0; i < limit; i++) {
        uint32_t node = kvt_session_node(mgr, s, i);
        bool all = true;
        for (uint32_t g = 0; g < mgr->group_count; g++) {
            run[g] = has(mgr, s, node, g, i) ? run[g] + 1 : 0;
            if (run[g] <= i && mgr->groups[g].full)
                return best;
            all = all && run[g] + kvt_session_needs(mgr, g, i + 1) >= i + 1;
        }
        if (all)
            best = i + 1;
    }
    return best;
}

bool kvt_session_serves(const struct kvt_session_mgr *mgr, const struct kvt_session *s,
                        uint32_t blocks, kvt_session_has_fn has)
{
    for (uint32_t g = 0; g < mgr->group_count; g++)
        for (uint32_t i = kvt_session_needs(mgr, g, blocks); i < blocks; i++)
            if (!has(mgr, s, kvt_session_node(mgr, s, i), g, i))
                return false;
    return true;
}

/* ---- pages --------------------------------------------------------------------------------- */

void kvt_session_reset_origin(struct kvt_session_mgr *mgr, uint32_t g, const uint32_t *pages,
                              uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (pages[i] != KVT_NONE) /* they are the pool's */
            (void)kvt_pool_reset_origin_group(mgr->pool, mgr->groups[g].shape->group, &pages[i], 1);
}

uint32_t kvt_session_fresh_page(struct kvt_session_mgr *mgr, uint32_t g)
{
    uint32_t page = kvt_spage_take(&mgr->groups[g]);
    kvt_session_reset_origin(mgr, g, &page, 1);
    return page;
}

void kvt_session_put_pages(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t from,
                           uint32_t to)
{
    for (uint32_t g = 0; g < mgr->group_count; g++)
        for (uint32_t i = from; i < to; i++)
            if (*kvt_session_page(mgr, s, g, i) != KVT_NONE)
                kvt_spage_put(&mgr->groups[g], *kvt_session_page(mgr, s, g, i));
}

uint8_t kvt_session_origin(const struct kvt_session_mgr *mgr, uint32_t g, uint32_t page)
{
    size_t at = (size_t)g * mgr->pool->desc.block_count + page;
    return atomic_load_explicit(&mgr->pool->origin[at], memory_order_relaxed);
}
