/* One session: tokens and their keys, the pages that the engine fills, the window, going idle.
 *
 * A session holds a node for each full block that is filled, and of each group the cells from
 * `from` on; blocks behind those have pages of the session's own. While it is idle it has no pages:
 * its cells have them, or had.
 * Threads: any; each call takes the manager's lock. Only kvt_session_open() allocates, and hashing.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "client/session_internal.h"
#include "kvtier/key.h"

#define HASH_BATCH 64u /* blocks */

struct kvt_session *kvt_session_enter(struct kvt_session_mgr *mgr, kvt_session_id id, int *code)
{
    uint64_t index = (id & UINT32_MAX) - 1;
    *code = KVT_E_INVAL;
    if (mgr == NULL)
        return NULL;
    *code = KVT_E_CLOSED;
    if (kvt_cache_forked(mgr->ns->cache))
        return NULL;
    pthread_mutex_lock(&mgr->lock);
    (void)kvt_session_poll(mgr);
    *code = KVT_E_NO_SESSION;
    if (index < mgr->opts.sessions_max && mgr->sessions[index].state != 0 &&
        mgr->sessions[index].generation == (uint32_t)(id >> 32)) {
        *code = 0;
        return &mgr->sessions[index];
    }
    pthread_mutex_unlock(&mgr->lock);
    return NULL;
}

/* ---- blocks -------------------------------------------------------------------------------- */

void kvt_session_attach(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t index,
                        uint32_t at)
{
    struct kvt_snode *node = &mgr->nodes[at];
    s->node[index] = at;
    s->blocks = index + 1;
    node->refs++;
    node->stored |= !s->no_store;
    if (index >= s->window_from)
        node->windows++;
    else
        node->beyond = true;
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        struct kvt_scell *cell = kvt_scell_at(mgr, at, g);
        cell->fails = 0;
        if (index < s->from[g])
            continue;
        cell->holders++;
        cell->pinned += s->state != KVT_SESSION_IDLE;
        kvt_scell_lru(mgr, kvt_scell_of(mgr, at, g));
    }
}

void kvt_session_detach_last(struct kvt_session_mgr *mgr, struct kvt_session *s)
{
    uint32_t index = --s->blocks, at = s->node[index];
    struct kvt_snode *node = &mgr->nodes[at];
    bool idle = s->state == KVT_SESSION_IDLE;
    node->refs--;
    if (index >= s->window_from)
        node->windows--;
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        struct kvt_scell *cell = kvt_scell_at(mgr, at, g);
        if (index < s->from[g])
            continue;
        cell->holders--;
        cell->pinned -= !idle;
        if (!idle || !mgr->groups[g].full)
            kvt_scell_lru(mgr, kvt_scell_of(mgr, at, g));
    }
    kvt_session_want_cool_all(mgr, at);
    kvt_snode_settle(mgr, at);
}

void kvt_session_set_window(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t tokens)
{
    uint32_t window = mgr->opts.window_tokens;
    uint32_t from = tokens > window ? (tokens - window) / mgr->block_tokens : 0;
    for (uint32_t i = s->window_from; i < from && i < s->blocks; i++) {
        mgr->nodes[s->node[i]].windows--;
        mgr->nodes[s->node[i]].beyond = true;
        kvt_session_want_cool_all(mgr, s->node[i]);
    }
    for (uint32_t i = from; i < s->window_from && i < s->blocks; i++)
        mgr->nodes[s->node[i]].windows++;
    s->window_from = from;
}

int kvt_session_hash(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t from,
                     uint32_t tokens)
{
    struct kvt_key keys[HASH_BATCH];
    uint32_t unit = mgr->block_tokens, end = tokens / unit;
    while (from < end) {
        uint32_t n = KVT_MIN(end - from, HASH_BATCH);
        long made =
            kvt_key_chain(from ? s->hash[from - 1] : s->root, s->token + (size_t)from * unit,
                          (size_t)n * unit, unit, NULL, 0, 0, 0, keys, n);
        if (made != (long)n)
            return -ENOMEM;
        for (uint32_t i = 0; i < n; i++)
            memcpy(s->hash[from + i], keys[i].hash, KVT_HASH_BYTES_MAX);
        from += n;
    }
    return 0;
}

int kvt_session_put_tokens(struct kvt_session_mgr *mgr, struct kvt_session *s,
                           const uint32_t *tokens, size_t n)
{
    if (tokens == NULL && n != 0)
        return KVT_E_INVAL;
    if (n > mgr->opts.tokens_max - s->tokens) {
        mgr->stats.refused_limit++;
        return KVT_E_LIMIT;
    }
    uint32_t total = s->tokens + (uint32_t)n, unit = mgr->block_tokens;
    if (total / unit + 1 - s->blocks > kvt_snode_room(mgr)) { /* 1: the last block, when idle */
        mgr->stats.refused_limit++;
        return KVT_E_LIMIT;
    }
    if (n != 0)
        memcpy(s->token + s->tokens, tokens, n * sizeof(*tokens));
    return kvt_session_hash(mgr, s, s->tokens / unit, total);
}

/* ---- appending ----------------------------------------------------------------------------- */

static int append(struct kvt_session_mgr *mgr, struct kvt_session *s, const uint32_t *tokens,
                  size_t n)
{
    uint32_t need[KVT_GROUPS_MAX] = {0};
    if (s->state != KVT_SESSION_ACTIVE)
        return KVT_E_STATE;
    if (n == 0)
        return KVT_E_INVAL;
    int rc = kvt_session_put_tokens(mgr, s, tokens, n);
    if (rc != 0)
        return rc;
    uint32_t total = s->tokens + (uint32_t)n;
    uint32_t have = kvt_session_blocks_of(mgr, s->tokens), want = kvt_session_blocks_of(mgr, total);
    for (uint32_t g = 0; g < mgr->group_count; g++)
        for (uint32_t i = have; i < want; i++)
            need[g] += kvt_session_gives(mgr, g, i, total);
    rc = kvt_session_make_room(mgr, need);
    if (rc != 0)
        return rc;
    for (uint32_t g = 0; g < mgr->group_count; g++)
        for (uint32_t i = have; i < want; i++)
            *kvt_session_page(mgr, s, g, i) =
                kvt_session_gives(mgr, g, i, total) ? kvt_session_fresh_page(mgr, g) : KVT_NONE;
    s->tokens = total;
    kvt_session_set_window(mgr, s, s->tokens);
    kvt_session_cool(mgr, false);
    return 0;
}

int kvt_session_append(struct kvt_session_mgr *mgr, kvt_session_id id, const uint32_t *tokens,
                       size_t n)
{
    int rc;
    struct kvt_session *s = kvt_session_enter(mgr, id, &rc);
    if (s == NULL)
        return rc;
    rc = append(mgr, s, tokens, n);
    pthread_mutex_unlock(&mgr->lock);
    return rc;
}

/* A block has been filled: the cells of its node get the pages, unless they have some already. */
static void block_filled(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t i)
{
    uint32_t at = kvt_snode_find(mgr, s->hash[i]);
    bool twice = false;
    if (at == KVT_NONE)
        at = kvt_snode_add(mgr, s->hash[i], i ? s->node[i - 1] : KVT_NONE, i, KVT_NONE);
    kvt_session_attach(mgr, s, i, at);
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        uint32_t page = *kvt_session_page(mgr, s, g, i);
        if (page == KVT_NONE) /* a state that is not kept */
            continue;
        if (kvt_scell_at(mgr, at, g)->page == KVT_NONE)
            kvt_scell_set_page(mgr, kvt_scell_of(mgr, at, g), page);
        else
            twice = true; /* both are used until this session goes idle */
    }
    mgr->stats.duplicates += twice;
    kvt_session_want_cool_all(mgr, at);
}

static int filled(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t tokens)
{
    if (s->state != KVT_SESSION_ACTIVE)
        return KVT_E_STATE;
    if (tokens < s->filled || tokens > s->tokens)
        return KVT_E_INVAL;
    uint32_t end = tokens / mgr->block_tokens;
    if (end - s->blocks > kvt_snode_room(mgr)) {
        mgr->stats.refused_limit++;
        return KVT_E_LIMIT;
    }
    for (uint32_t i = s->blocks; i < end; i++)
        block_filled(mgr, s, i);
    s->filled = tokens;
    s->unwritten = false;
    kvt_session_set_needs(mgr, s);
    kvt_session_cool(mgr, false);
    return 0;
}

int kvt_session_filled(struct kvt_session_mgr *mgr, kvt_session_id id, uint32_t tokens)
{
    int rc;
    struct kvt_session *s = kvt_session_enter(mgr, id, &rc);
    if (s == NULL)
        return rc;
    rc = filled(mgr, s, tokens);
    pthread_mutex_unlock(&mgr->lock);
    return rc;
}

/* ---- idle ---------------------------------------------------------------------------------- */

/* The pages of a partial last block stay in L0 while there is room, where every group has one, and
 * that of a state has been written. */
static void keep_tail(struct kvt_session_mgr *mgr, struct kvt_session *s)
{
    uint32_t last = s->blocks, at = KVT_NONE;
    bool whole = !s->unwritten;
    if (s->filled % mgr->block_tokens == 0)
        return;
    for (uint32_t g = 0; g < mgr->group_count; g++)
        whole = whole && *kvt_session_page(mgr, s, g, last) != KVT_NONE;
    if (whole)
        at = kvt_snode_add(mgr, NULL, last ? s->node[last - 1] : KVT_NONE, last,
                           (uint32_t)(s - mgr->sessions));
    if (at == KVT_NONE) {
        kvt_session_put_pages(mgr, s, last, last + 1);
        mgr->stats.tails_lost++;
        s->filled = last * mgr->block_tokens;
        return;
    }
    mgr->nodes[at].refs = 1;
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        kvt_scell_at(mgr, at, g)->holders = 1;
        kvt_scell_set_page(mgr, kvt_scell_of(mgr, at, g), *kvt_session_page(mgr, s, g, last));
    }
    s->tail = at;
}

static void let_go(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t g, uint32_t i)
{
    struct kvt_scell *cell = kvt_scell_at(mgr, s->node[i], g);
    uint32_t page = *kvt_session_page(mgr, s, g, i);
    if (page != KVT_NONE && page != cell->page)
        kvt_spage_put(&mgr->groups[g], page);
    cell->pinned--;
    kvt_scell_lru(mgr, kvt_scell_of(mgr, s->node[i], g));
}

void kvt_session_go_idle(struct kvt_session_mgr *mgr, struct kvt_session *s)
{
    mgr->stats.cut_tokens += s->tokens - s->filled;
    kvt_session_put_pages(mgr, s, kvt_session_blocks_of(mgr, s->filled),
                          kvt_session_blocks_of(mgr, s->tokens));
    s->tokens = s->filled;
    kvt_session_set_window(mgr, s, s->tokens);
    keep_tail(mgr, s);
    s->unwritten = false;
    kvt_session_set_needs(mgr, s);
    for (uint32_t i = s->blocks; i-- > 0;) /* children first: they are older in the list */
        for (uint32_t g = 0; g < mgr->group_count; g++)
            if (i >= s->from[g])
                let_go(mgr, s, g, i);
    s->state = KVT_SESSION_IDLE;
    kvt_session_cool(mgr, true);
    for (uint32_t g = 0; g < mgr->group_count; g++)
        for (uint32_t i = s->blocks; i-- > s->from[g];)
            if (kvt_session_save_chain(mgr, kvt_scell_of(mgr, s->node[i], g)) != 0)
                break; /* tried again when its pages are wanted */
}

int kvt_session_idle(struct kvt_session_mgr *mgr, kvt_session_id id)
{
    int rc;
    struct kvt_session *s = kvt_session_enter(mgr, id, &rc);
    if (s == NULL)
        return rc;
    if (s->state != KVT_SESSION_ACTIVE)
        rc = KVT_E_STATE;
    else
        kvt_session_go_idle(mgr, s);
    pthread_mutex_unlock(&mgr->lock);
    return rc;
}

/* ---- open and close ------------------------------------------------------------------------ */

static void arrays_free(struct kvt_session *s)
{
    free(s->token);
    free(s->hash);
    free(s->node);
    free(s->page);
    free(s->got);
    s->token = s->node = s->page = NULL;
    s->hash = NULL;
    s->got = NULL;
}

static int arrays_make(const struct kvt_session_mgr *mgr, struct kvt_session *s)
{
    size_t blocks = mgr->session_blocks;
    s->token = calloc(mgr->opts.tokens_max, sizeof(*s->token));
    s->hash = calloc(blocks, sizeof(*s->hash));
    s->node = calloc(blocks, sizeof(*s->node));
    s->page = calloc(blocks * mgr->group_count, sizeof(*s->page));
    s->got = calloc(blocks * mgr->group_count, sizeof(*s->got));
    if (s->token != NULL && s->hash != NULL && s->node != NULL && s->page != NULL && s->got != NULL)
        return 0;
    arrays_free(s);
    return -ENOMEM;
}

static int session_make(struct kvt_session_mgr *mgr, const uint8_t root[32], kvt_session_id *out)
{
    uint32_t index = 0;
    while (index < mgr->opts.sessions_max && mgr->sessions[index].state != 0)
        index++;
    if (index == mgr->opts.sessions_max) {
        mgr->stats.refused_limit++;
        return KVT_E_LIMIT;
    }
    struct kvt_session *s = &mgr->sessions[index];
    uint32_t generation = s->generation + 1;
    memset(s, 0, sizeof(*s));
    s->generation = generation;
    if (arrays_make(mgr, s) != 0)
        return -ENOMEM;
    memcpy(s->root, root, sizeof(s->root));
    s->tail = KVT_NONE;
    memset(s->restore_job, 0xff, sizeof(s->restore_job)); /* KVT_NONE */
    s->plan.struct_size = sizeof(s->plan);
    s->state = KVT_SESSION_IDLE;
    mgr->stats.sessions++;
    *out = (uint64_t)generation << 32 | (index + 1);
    return 0;
}

int kvt_session_open(struct kvt_session_mgr *mgr, const void *salt, size_t salt_len,
                     kvt_session_id *out)
{
    uint8_t root[32];
    if (mgr == NULL || out == NULL)
        return KVT_E_INVAL;
    if (kvt_cache_forked(mgr->ns->cache))
        return KVT_E_CLOSED;
    int rc = kvt_key_root(salt, salt_len, root);
    if (rc != 0)
        return rc;
    pthread_mutex_lock(&mgr->lock);
    (void)kvt_session_poll(mgr);
    rc = session_make(mgr, root, out);
    pthread_mutex_unlock(&mgr->lock);
    return rc;
}

int kvt_session_no_store(struct kvt_session_mgr *mgr, kvt_session_id id)
{
    int rc;
    struct kvt_session *s = kvt_session_enter(mgr, id, &rc);
    if (s == NULL)
        return rc;
    if (s->state == KVT_SESSION_IDLE && s->tokens == 0)
        s->no_store = true;
    else
        rc = KVT_E_STATE;
    pthread_mutex_unlock(&mgr->lock);
    return rc;
}

int kvt_session_close(struct kvt_session_mgr *mgr, kvt_session_id id)
{
    int rc;
    struct kvt_session *s = kvt_session_enter(mgr, id, &rc);
    if (s == NULL)
        return rc;
    while (s->state == KVT_SESSION_RESTORING) {
        if (s->chunk_count > 0) {
            kvt_session_meet_cancel(mgr, s);
            if (!kvt_session_meet_wait(mgr, s, -1))
                break;
        } else {
            struct kvt_sjob *job = kvt_session_a_load(mgr, s);
            kvt_req_cancel(job->req);
            (void)kvt_sjob_wait(mgr, job, -1);
        }
        pthread_mutex_unlock(&mgr->lock);
        s = kvt_session_enter(mgr, id, &rc); /* somebody else may have closed it meanwhile */
        if (s == NULL)
            return rc;
    }
    if (s->state == KVT_SESSION_RESTORING) /* by a cut, and nobody computes: what is there counts */
        kvt_session_activate(mgr, s, s->front, 0);
    if (s->state == KVT_SESSION_ACTIVE)
        kvt_session_go_idle(mgr, s);
    kvt_session_drop_tail(mgr, s, true);
    while (s->blocks > 0)
        kvt_session_detach_last(mgr, s);
    arrays_free(s);
    s->state = 0;
    mgr->stats.sessions--;
    kvt_session_cool(mgr, false);
    pthread_mutex_unlock(&mgr->lock);
    return 0;
}
