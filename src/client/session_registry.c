/* The registry of a session manager: nodes by hash, the pages of L0 and who has them, and the list
 * of nodes by last use. session_internal.h has the rules. Threads: under the manager's lock.
 * Does not: talk to the cache, decide what is stored or evicted.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
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
    node->page = node->older = node->newer = node->cool_next = node->bucket_next = KVT_NONE;
    node->tail_of = tail_of;
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

void kvt_snode_settle(struct kvt_session_mgr *mgr, uint32_t at)
{
    while (at != KVT_NONE) {
        struct kvt_snode *node = &mgr->nodes[at];
        if (node->refs > 0 || node->page != KVT_NONE || node->children > 0 || node->busy ||
            node->queued)
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

static void lru_remove(struct kvt_session_mgr *mgr, struct kvt_snode *node)
{
    if (node->older != KVT_NONE)
        mgr->nodes[node->older].newer = node->newer;
    else
        mgr->oldest = node->newer;
    if (node->newer != KVT_NONE)
        mgr->nodes[node->newer].older = node->older;
    else
        mgr->newest = node->older;
    node->in_lru = false;
    mgr->lru_count--;
}

void kvt_snode_lru(struct kvt_session_mgr *mgr, uint32_t at)
{
    struct kvt_snode *node = &mgr->nodes[at];
    if (node->in_lru)
        lru_remove(mgr, node);
    if (node->page == KVT_NONE || node->active > 0)
        return;
    node->older = mgr->newest;
    node->newer = KVT_NONE;
    if (mgr->newest != KVT_NONE)
        mgr->nodes[mgr->newest].newer = at;
    else
        mgr->oldest = at;
    mgr->newest = at;
    node->in_lru = true;
    mgr->lru_count++;
}

/* ---- pages --------------------------------------------------------------------------------- */

void kvt_snode_set_page(struct kvt_session_mgr *mgr, uint32_t at, uint32_t page)
{
    struct kvt_snode *node = &mgr->nodes[at];
    node->page = page;
    if (node->parent != KVT_NONE)
        mgr->nodes[node->parent].resident++;
    kvt_snode_lru(mgr, at);
}

uint32_t kvt_snode_take_page(struct kvt_session_mgr *mgr, uint32_t at)
{
    struct kvt_snode *node = &mgr->nodes[at];
    uint32_t page = node->page;
    node->page = KVT_NONE;
    if (node->parent != KVT_NONE)
        mgr->nodes[node->parent].resident--;
    kvt_snode_lru(mgr, at);
    return page;
}

uint32_t kvt_spage_take(struct kvt_session_mgr *mgr)
{
    return mgr->page_stack[--mgr->pages_free];
}

void kvt_spage_put(struct kvt_session_mgr *mgr, uint32_t page)
{
    mgr->page_stack[mgr->pages_free++] = page;
}

/* ---- check --------------------------------------------------------------------------------- */

struct check { /* what the pass over the sessions found, by node; owners, by page */
    uint32_t *refs, *active, *windows, *children, *resident;
    uint8_t *page; /* owners seen */
    char *why;
    size_t why_len;
};

static int wrong(const struct check *check, const char *what, uint32_t number)
{
    (void)snprintf(check->why, check->why_len, "%s (%u)", what, number);
    return KVT_E_CORRUPT;
}

static int check_session(struct kvt_session_mgr *mgr, const struct check *check, uint32_t number)
{
    const struct kvt_session *s = &mgr->sessions[number];
    bool idle = s->state == KVT_SESSION_IDLE;
    uint32_t blocks = (s->tokens + mgr->block_tokens - 1) / mgr->block_tokens;
    if (s->state == 0)
        return 0;
    if (s->filled > s->tokens || s->blocks > s->tokens / mgr->block_tokens)
        return wrong(check, "a session holds more than it has", number);
    for (uint32_t i = 0; i < s->blocks; i++) {
        const struct kvt_snode *node = &mgr->nodes[s->node[i]];
        if (node->depth != i || memcmp(node->hash, s->hash[i], sizeof(node->hash)) != 0 ||
            node->parent != (i ? s->node[i - 1] : KVT_NONE))
            return wrong(check, "a session holds another block", number);
        check->refs[s->node[i]]++;
        check->active[s->node[i]] += !idle;
        check->windows[s->node[i]] += i >= s->window_from;
        if (!s->no_store && !node->stored)
            return wrong(check, "a session's block is not to be stored", s->node[i]);
        if (i < s->window_from && !node->beyond)
            return wrong(check, "a block has left a window unnoticed", s->node[i]);
        if (s->state == KVT_SESSION_ACTIVE && node->page == KVT_NONE)
            return wrong(check, "an active session lacks a page", number);
    }
    for (uint32_t i = 0; !idle && i < blocks; i++)
        if (i >= s->blocks || mgr->nodes[s->node[i]].page != s->page[i])
            check->page[s->page[i] - mgr->opts.first_page]++;
    if (s->tail != KVT_NONE && (!idle || mgr->nodes[s->tail].tail_of != number))
        return wrong(check, "a tail belongs to nobody", number);
    if (s->tail != KVT_NONE)
        check->refs[s->tail]++;
    return 0;
}

static int check_node(struct kvt_session_mgr *mgr, const struct check *check, uint32_t at)
{
    const struct kvt_snode *node = &mgr->nodes[at];
    if (node->refs != check->refs[at] || node->active != check->active[at] ||
        node->windows != check->windows[at])
        return wrong(check, "a node's counts are not the sessions'", at);
    if (node->children != check->children[at] || node->resident != check->resident[at])
        return wrong(check, "a node's children are miscounted", at);
    if (node->in_lru != (node->page != KVT_NONE && node->active == 0))
        return wrong(check, "a node is in the list by last use and should not be, or lacks", at);
    if (node->refs == 0 && node->page == KVT_NONE && node->children == 0 && !node->busy &&
        !node->queued)
        return wrong(check, "a node that nobody needs", at);
    if (node->stored && node->parent != KVT_NONE && !mgr->nodes[node->parent].stored)
        return wrong(check, "a node may be stored, and the one before it may not", at);
    if (node->page != KVT_NONE)
        check->page[node->page - mgr->opts.first_page]++;
    return 0;
}

/* Rule 4, and the pages of requests. */
static int check_jobs(const struct kvt_session_mgr *mgr, const struct check *check)
{
    for (uint32_t i = 0; i < KVT_SESSION_JOBS; i++) {
        const struct kvt_sjob *job = &mgr->jobs[i];
        if (job->kind == KVT_SJOB_FREE || job->ended)
            continue;
        if (job->scratch != KVT_NONE)
            check->page[job->scratch - mgr->opts.first_page]++;
        for (uint32_t n = 0; n < job->count; n++) {
            const struct kvt_snode *node = &mgr->nodes[job->nodes[n]];
            if (job->kind == KVT_SJOB_SAVE && !node->stored)
                return wrong(check, "what is not to be stored is being stored", job->nodes[n]);
            if (!node->busy || (job->scratch == KVT_NONE && node->page == KVT_NONE))
                return wrong(check, "a page was taken that is being stored", job->nodes[n]);
        }
    }
    return 0;
}

static int check_lists(const struct kvt_session_mgr *mgr, const struct check *check)
{
    uint32_t count = 0;
    for (uint32_t at = mgr->oldest; at != KVT_NONE; at = mgr->nodes[at].newer, count++) {
        uint32_t parent = mgr->nodes[at].parent;
        if (count > mgr->lru_count || !mgr->nodes[at].in_lru)
            return wrong(check, "the list by last use is broken", at);
        /* rule 3: a parent stands after its children, so none is passed already */
        if (parent != KVT_NONE && mgr->nodes[parent].in_lru) {
            uint32_t next = mgr->nodes[at].newer;
            while (next != KVT_NONE && next != parent)
                next = mgr->nodes[next].newer;
            if (next != parent)
                return wrong(check, "a parent is older than its child", at);
        }
    }
    if (count != mgr->lru_count)
        return wrong(check, "the list by last use is miscounted", count);
    for (uint32_t i = 0; i < mgr->pages_free; i++)
        check->page[mgr->page_stack[i] - mgr->opts.first_page]++;
    for (uint32_t i = 0; i < mgr->scratch_free; i++)
        check->page[mgr->scratch[i] - mgr->opts.first_page]++;
    return 0;
}

static int check_pages(const struct kvt_session_mgr *mgr, const struct check *check)
{
    for (uint32_t i = 0; i < mgr->opts.page_count; i++)
        if (check->page[i] != 1)
            return wrong(check, check->page[i] ? "a page has two owners" : "a page is lost", i);
    return 0;
}

static int check_all(struct kvt_session_mgr *mgr, const struct check *check, uint8_t *used)
{
    int rc = 0;
    memset(used, 1, mgr->nodes_used);
    for (uint32_t at = mgr->node_free; at != KVT_NONE; at = mgr->nodes[at].bucket_next)
        used[at] = 0;
    for (uint32_t i = 0; i < mgr->nodes_used; i++) {
        if (!used[i] || mgr->nodes[i].parent == KVT_NONE)
            continue;
        check->children[mgr->nodes[i].parent]++;
        check->resident[mgr->nodes[i].parent] += mgr->nodes[i].page != KVT_NONE;
    }
    for (uint32_t i = 0; i < mgr->opts.sessions_max && rc == 0; i++)
        rc = check_session(mgr, check, i);
    for (uint32_t i = 0; i < mgr->nodes_used && rc == 0; i++)
        if (used[i])
            rc = check_node(mgr, check, i);
    if (rc == 0)
        rc = check_jobs(mgr, check);
    if (rc == 0)
        rc = check_lists(mgr, check);
    return rc ? rc : check_pages(mgr, check);
}

int kvt_session_mgr_check(struct kvt_session_mgr *mgr, char *why, size_t why_len)
{
    pthread_mutex_lock(&mgr->lock);
    size_t n = mgr->nodes_used + 1;
    uint32_t *counts = calloc(n * 5, sizeof(*counts));
    uint8_t *bytes = calloc(n + mgr->opts.page_count, 1);
    int rc = -ENOMEM;
    if (counts != NULL && bytes != NULL) {
        struct check check = {counts,    counts + n, counts + 2 * n, counts + 3 * n, counts + 4 * n,
                              bytes + n, why,        why_len};
        rc = check_all(mgr, &check, bytes);
    }
    free(counts);
    free(bytes);
    pthread_mutex_unlock(&mgr->lock);
    return rc;
}
