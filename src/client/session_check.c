/* Whether the books of a session manager agree: every rule of session_internal.h, looked at from
 * the sessions, the requests and the lists. For tests; slow. Threads: takes the manager's lock.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/session_internal.h"

struct check { /* what the pass over the sessions found: by node, by cell; owners, by page */
    uint32_t *refs, *windows, *children;
    uint32_t *holders, *pinned, *resident;
    uint8_t *page; /* owners seen; pages of group g from page_at[g] on */
    size_t page_at[KVT_GROUPS_MAX];
    char *why;
    size_t why_len;
};

static int wrong(const struct check *check, const char *what, uint32_t number)
{
    (void)snprintf(check->why, check->why_len, "%s (%u)", what, number);
    return KVT_E_CORRUPT;
}

static void own(const struct kvt_session_mgr *mgr, const struct check *check, uint32_t g,
                uint32_t page)
{
    check->page[check->page_at[g] + page - mgr->groups[g].first_page]++;
}

/* ---- sessions ------------------------------------------------------------------------------ */

static int check_blocks(const struct kvt_session_mgr *mgr, const struct check *check,
                        const struct kvt_session *s, uint32_t number)
{
    for (uint32_t i = 0; i < s->blocks; i++) {
        const struct kvt_snode *node = &mgr->nodes[s->node[i]];
        if (node->depth != i || memcmp(node->hash, s->hash[i], sizeof(node->hash)) != 0 ||
            node->parent != (i ? s->node[i - 1] : KVT_NONE))
            return wrong(check, "a session holds another block", number);
        check->refs[s->node[i]]++;
        check->windows[s->node[i]] += i >= s->window_from;
        if (!s->no_store && !node->stored)
            return wrong(check, "a session's block is not to be stored", s->node[i]);
        if (i < s->window_from && !node->beyond)
            return wrong(check, "a block has left a window unnoticed", s->node[i]);
    }
    return 0;
}

static int check_held(const struct kvt_session_mgr *mgr, const struct check *check,
                      const struct kvt_session *s, uint32_t number, uint32_t g)
{
    bool idle = s->state == KVT_SESSION_IDLE, active = s->state == KVT_SESSION_ACTIVE;
    bool states = mgr->groups[g].shape->kind == KVT_GROUP_STATE;
    uint32_t blocks = kvt_session_blocks_of(mgr, s->tokens);
    uint32_t needs = kvt_session_needs(mgr, g, s->filled / mgr->block_tokens);
    for (uint32_t i = s->from[g]; i < s->blocks; i++) {
        uint32_t at = kvt_scell_of(mgr, s->node[i], g);
        check->holders[at]++;
        check->pinned[at] += !idle;
        if (active && !states && i >= needs && mgr->cells[at].page == KVT_NONE)
            return wrong(check, "an active session lacks a page", number);
    }
    for (uint32_t i = 0; !idle && i < blocks; i++) {
        uint32_t page = *kvt_session_page(mgr, s, g, i);
        bool held = i < s->blocks && i >= s->from[g];
        if (page == KVT_NONE) {
            if (active && !states && i >= needs)
                return wrong(check, "an active session has no page for a block", number);
        } else if (!held || kvt_scell_at(mgr, s->node[i], g)->page != page) {
            if (active && i < s->blocks && !held)
                return wrong(check, "a session has a page that it has passed", number);
            own(mgr, check, g, page);
        }
    }
    if (s->tail != KVT_NONE)
        check->holders[kvt_scell_of(mgr, s->tail, g)]++;
    return 0;
}

static int check_session(const struct kvt_session_mgr *mgr, const struct check *check,
                         uint32_t number)
{
    const struct kvt_session *s = &mgr->sessions[number];
    if (s->state == 0)
        return 0;
    if (s->filled > s->tokens || s->blocks > s->tokens / mgr->block_tokens)
        return wrong(check, "a session holds more than it has", number);
    if (s->unwritten && s->state != KVT_SESSION_ACTIVE)
        return wrong(check, "a session that is not active waits for a state", number);
    int rc = check_blocks(mgr, check, s, number);
    if (rc == 0 && s->tail != KVT_NONE &&
        (s->state != KVT_SESSION_IDLE || mgr->nodes[s->tail].tail_of != number))
        rc = wrong(check, "a tail belongs to nobody", number);
    for (uint32_t g = 0; g < mgr->group_count && rc == 0; g++)
        rc = check_held(mgr, check, s, number, g);
    if (rc == 0 && s->tail != KVT_NONE)
        check->refs[s->tail]++;
    return rc;
}

/* ---- nodes and cells ----------------------------------------------------------------------- */

static int check_cell(const struct kvt_session_mgr *mgr, const struct check *check, uint32_t at)
{
    const struct kvt_scell *cell = &mgr->cells[at];
    uint32_t node = kvt_scell_node(mgr, at);
    if (cell->holders != check->holders[at] || cell->pinned != check->pinned[at])
        return wrong(check, "a cell's counts are not the sessions'", node);
    if (cell->resident != check->resident[at])
        return wrong(check, "a cell's children are miscounted", node);
    if (cell->in_lru != (cell->page != KVT_NONE && cell->pinned == 0))
        return wrong(check, "a cell is in the list by last use and should not be, or lacks", node);
    if (mgr->nodes[node].tail_of != KVT_NONE && cell->page == KVT_NONE)
        return wrong(check, "a tail lacks a page", node);
    if (cell->page != KVT_NONE)
        own(mgr, check, kvt_scell_group(mgr, at), cell->page);
    return 0;
}

static int check_node(const struct kvt_session_mgr *mgr, const struct check *check, uint32_t at)
{
    const struct kvt_snode *node = &mgr->nodes[at];
    bool empty = true;
    int rc = 0;
    if (node->refs != check->refs[at] || node->windows != check->windows[at])
        return wrong(check, "a node's counts are not the sessions'", at);
    if (node->children != check->children[at])
        return wrong(check, "a node's children are miscounted", at);
    for (uint32_t g = 0; g < mgr->group_count && rc == 0; g++) {
        const struct kvt_scell *cell = kvt_scell_at(mgr, at, g);
        empty = empty && cell->page == KVT_NONE && !cell->busy && !cell->queued;
        rc = check_cell(mgr, check, kvt_scell_of(mgr, at, g));
    }
    if (rc == 0 && node->refs == 0 && node->children == 0 && empty)
        return wrong(check, "a node that nobody needs", at);
    if (rc == 0 && node->stored && node->parent != KVT_NONE && !mgr->nodes[node->parent].stored)
        return wrong(check, "a node may be stored, and the one before it may not", at);
    return rc;
}

/* Rule 4, and the pages of requests. */
static int check_jobs(const struct kvt_session_mgr *mgr, const struct check *check)
{
    for (uint32_t i = 0; i < KVT_SESSION_JOBS; i++) {
        const struct kvt_sjob *job = &mgr->jobs[i];
        if (job->kind == KVT_SJOB_FREE || job->ended)
            continue;
        if (job->scratch != KVT_NONE)
            own(mgr, check, job->group, job->scratch);
        for (uint32_t n = 0; n < job->count; n++) {
            const struct kvt_scell *cell = &mgr->cells[job->cells[n]];
            uint32_t node = kvt_scell_node(mgr, job->cells[n]);
            if (job->kind == KVT_SJOB_SAVE && !mgr->nodes[node].stored)
                return wrong(check, "what is not to be stored is being stored", node);
            if (!cell->busy || (job->scratch == KVT_NONE && cell->page == KVT_NONE))
                return wrong(check, "a page was taken that is being stored", node);
        }
    }
    return 0;
}

/* ---- lists --------------------------------------------------------------------------------- */

/* Rule 3: a parent stands after its children, so none is passed already. */
static bool before_parent(const struct kvt_session_mgr *mgr, uint32_t at, uint32_t g)
{
    uint32_t parent = mgr->nodes[kvt_scell_node(mgr, at)].parent, next = mgr->cells[at].newer;
    if (!mgr->groups[g].full || parent == KVT_NONE || !kvt_scell_at(mgr, parent, g)->in_lru)
        return true;
    while (next != KVT_NONE && next != kvt_scell_of(mgr, parent, g))
        next = mgr->cells[next].newer;
    return next != KVT_NONE;
}

static int check_list(const struct kvt_session_mgr *mgr, const struct check *check, uint32_t g)
{
    const struct kvt_sgroup *group = &mgr->groups[g];
    bool held = false;
    uint32_t count = 0;
    for (uint32_t at = group->oldest; at != KVT_NONE; at = mgr->cells[at].newer, count++) {
        if (count > group->lru_count || !mgr->cells[at].in_lru || kvt_scell_group(mgr, at) != g)
            return wrong(check, "the list by last use is broken", at);
        if (!before_parent(mgr, at, g))
            return wrong(check, "a parent is older than its child", at);
        held = held || mgr->cells[at].holders > 0;
        if (!group->full && held && mgr->cells[at].holders == 0)
            return wrong(check, "what nobody needs would outlive what somebody does", at);
    }
    if (count != group->lru_count)
        return wrong(check, "the list by last use is miscounted", count);
    for (uint32_t i = 0; i < group->pages_free; i++)
        own(mgr, check, g, group->page_stack[i]);
    for (uint32_t i = 0; i < group->scratch_free; i++)
        own(mgr, check, g, group->scratch[i]);
    for (uint32_t i = 0; i < group->page_count; i++) {
        uint8_t owners = check->page[check->page_at[g] + i];
        if (owners != 1)
            return wrong(check, owners ? "a page has two owners" : "a page is lost", i);
    }
    return 0;
}

static void count_children(const struct kvt_session_mgr *mgr, const struct check *check,
                           uint32_t node)
{
    uint32_t parent = mgr->nodes[node].parent;
    if (parent == KVT_NONE)
        return;
    check->children[parent]++;
    for (uint32_t g = 0; g < mgr->group_count; g++)
        check->resident[kvt_scell_of(mgr, parent, g)] +=
            kvt_scell_at(mgr, node, g)->page != KVT_NONE;
}

static int check_all(const struct kvt_session_mgr *mgr, const struct check *check, uint8_t *used)
{
    int rc = 0;
    memset(used, 1, mgr->nodes_used);
    for (uint32_t at = mgr->node_free; at != KVT_NONE; at = mgr->nodes[at].bucket_next)
        used[at] = 0;
    for (uint32_t i = 0; i < mgr->nodes_used; i++)
        if (used[i])
            count_children(mgr, check, i);
    for (uint32_t i = 0; i < mgr->opts.sessions_max && rc == 0; i++)
        rc = check_session(mgr, check, i);
    for (uint32_t i = 0; i < mgr->nodes_used && rc == 0; i++)
        if (used[i])
            rc = check_node(mgr, check, i);
    if (rc == 0)
        rc = check_jobs(mgr, check);
    for (uint32_t g = 0; g < mgr->group_count && rc == 0; g++)
        rc = check_list(mgr, check, g);
    return rc;
}

int kvt_session_mgr_check(struct kvt_session_mgr *mgr, char *why, size_t why_len)
{
    pthread_mutex_lock(&mgr->lock);
    size_t n = mgr->nodes_used + 1, cells = n * mgr->group_count, pages = 0;
    struct check check = {.why = why, .why_len = why_len};
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        check.page_at[g] = n + pages;
        pages += mgr->groups[g].page_count;
    }
    uint32_t *counts = calloc((n + cells) * 3, sizeof(*counts));
    uint8_t *bytes = calloc(n + pages, 1);
    int rc = -ENOMEM;
    if (counts != NULL && bytes != NULL) {
        check.refs = counts;
        check.windows = counts + n;
        check.children = counts + 2 * n;
        check.holders = counts + 3 * n;
        check.pinned = check.holders + cells;
        check.resident = check.pinned + cells;
        check.page = bytes;
        rc = check_all(mgr, &check, bytes);
    }
    free(counts);
    free(bytes);
    pthread_mutex_unlock(&mgr->lock);
    return rc;
}
