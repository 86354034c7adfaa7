/* A session brought back from both ends: the engine computes from the front while blocks are loaded
 * from the back, in pieces, all asked for at once, the last one first.
 *
 *   0 ...... front | given ......... | chunk | chunk | ........ chunk | load_to
 *   there          | the engine's    | GOING, GOOD or LOST            |
 *
 * A page has one writer: the load of its chunk, or the engine. So before the engine gets the blocks
 * of a chunk that is still in flight, that load is called off and waited for; what it has brought
 * until then, from its front on, is kept. A chunk that did not come (deadline, miss, damage) is
 * the engine's too: what is behind it stays of use.
 *
 *            load ended whole             front passes
 *   GOING ------------------> GOOD -----------------------> nodes
 *     |  called off, late, missing            computed
 *     `---------------------> LOST -------------------------> nodes
 *
 * Layouts of one group of full attention only: page, cell and node numbers are those of group 0.
 * Threads: any; under the manager's lock, which is given up while a load is waited for.
 */
#include <errno.h>

#include "base/checked.h"
#include "client/session_internal.h"

#define CHUNK_BLOCKS 4u /* at least: a request has a price */
#define PATIENCE 0.5    /* of what computing a chunk takes, for the last load in flight */
#define HURRY 0.8       /* of it, that all loads in flight are expected to take, to be waited for */

static void cut_into_chunks(struct kvt_session *s)
{
    uint32_t blocks = s->load_to - s->load_from;
    uint32_t size = KVT_MAX((blocks + KVT_SCHUNKS_MAX - 1) / KVT_SCHUNKS_MAX, CHUNK_BLOCKS);
    s->chunk_count = s->chunk_next = s->beside = s->loaded = s->got_dram = s->got_disk = 0;
    for (uint32_t at = s->load_from; at < s->load_to; at += size)
        s->chunks[s->chunk_count++] =
            (struct kvt_schunk){.from = at, .to = KVT_MIN(at + size, s->load_to), .good = at};
}

static int ask(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t number,
               const struct kvt_key *keys, int64_t deadline_ns)
{
    struct kvt_schunk *chunk = &s->chunks[number];
    struct kvt_load_opts opts = {.struct_size = sizeof(opts), .deadline_ns = deadline_ns};
    struct kvt_sjob *job = kvt_sjob_take(mgr, KVT_SJOB_RESTORE);
    if (job == NULL)
        return -EAGAIN;
    int rc = kvt_load(mgr->ns, mgr->pool, keys + (chunk->from - s->load_from),
                      s->page + chunk->from, chunk->to - chunk->from, &opts, &job->req);
    if (rc != 0) {
        kvt_sjob_put(mgr, job);
        return rc;
    }
    job->session = (uint32_t)(s - mgr->sessions);
    job->chunk = number;
    chunk->job = (uint32_t)(job - mgr->jobs);
    return 0;
}

int kvt_session_meet_begin(struct kvt_session_mgr *mgr, struct kvt_session *s,
                           const struct kvt_key *keys, int64_t deadline_ns)
{
    int rc = 0;
    cut_into_chunks(s);
    for (uint32_t i = s->chunk_count; i-- > 0;) {
        if (rc == 0)
            rc = ask(mgr, s, i, keys, deadline_ns);
        if (rc == 0)
            continue;
        if (i + 1 == s->chunk_count) {
            s->chunk_count = 0;
            mgr->stats.refused_busy += rc == -EAGAIN;
            return rc;
        }
        s->chunks[i].state = KVT_SCHUNK_LOST; /* what could be asked for is worth having */
    }
    return 0;
}

void kvt_session_chunk_done(struct kvt_session_mgr *mgr, struct kvt_sjob *job,
                            const int32_t *status)
{
    struct kvt_session *s = &mgr->sessions[job->session];
    struct kvt_schunk *chunk = &s->chunks[job->chunk];
    struct kvt_req_report report = {.struct_size = sizeof(report)};
    uint32_t n = chunk->to - chunk->from, run = 0;
    while (run < n && status[run] == 0)
        run++;
    chunk->good = chunk->from + run;
    chunk->state = run == n ? KVT_SCHUNK_GOOD : KVT_SCHUNK_LOST;
    if (kvt_req_report(job->req, &report) == 0) {
        uint32_t dram = KVT_MIN((uint32_t)report.blocks_dram, run);
        s->got_dram += dram;
        s->got_disk += run - dram;
    }
    if (run == n || status[run] == KVT_E_CANCELED)
        return;
    mgr->stats.load_short += n - run;
    if (s->plan.reason == 0)
        s->plan.reason = status[run];
    for (uint32_t i = run; i < n; i++) {
        uint32_t at = kvt_snode_find(mgr, s->hash[chunk->from + i]);
        if (at != KVT_NONE && status[i] == KVT_E_MISS && !mgr->cells[at].busy)
            mgr->cells[at].record = KVT_SESSION_RECORD_NONE;
    }
}

bool kvt_session_meet_wait(struct kvt_session_mgr *mgr, struct kvt_session *s, int64_t timeout_ns)
{
    for (uint32_t i = s->chunk_count; i-- > 0;) {
        if (s->chunks[i].state != KVT_SCHUNK_GOING)
            continue;
        (void)kvt_sjob_wait(mgr, &mgr->jobs[s->chunks[i].job], timeout_ns);
        return true;
    }
    return false;
}

void kvt_session_meet_cancel(struct kvt_session_mgr *mgr, struct kvt_session *s)
{
    for (uint32_t i = 0; i < s->chunk_count; i++)
        if (s->chunks[i].state == KVT_SCHUNK_GOING)
            kvt_req_cancel(mgr->jobs[s->chunks[i].job].req);
}

/* Block i, the next one, is whole in the session's page. Its number may be in the engine's table,
 * so that page stays the session's although another session may have been faster. false: no node is
 * left. */
static bool put_block(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t i, bool loaded)
{
    if (i >= s->blocks) {
        uint32_t at = kvt_snode_find(mgr, s->hash[i]);
        if (at == KVT_NONE)
            at = kvt_snode_add(mgr, s->hash[i], i ? s->node[i - 1] : KVT_NONE, i, KVT_NONE);
        if (at == KVT_NONE)
            return false;
        kvt_session_attach(mgr, s, i, at);
    }
    struct kvt_scell *cell = &mgr->cells[s->node[i]];
    if (cell->page != KVT_NONE) {
        mgr->stats.duplicates++;
    } else {
        if (loaded)
            cell->record = kvt_session_record_of(mgr, 0, i, s->page[i]);
        kvt_scell_set_page(mgr, s->node[i], s->page[i]);
    }
    kvt_session_want_cool(mgr, s->node[i]);
    return true;
}

/* Blocks up to `end` are there. */
static int pass(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t end, bool loaded)
{
    for (; s->front < end; s->front++) {
        if (!loaded) /* a load that was called off may have been here */
            (void)kvt_pool_reset_origin(mgr->pool, &s->page[s->front], 1);
        if (!put_block(mgr, s, s->front, loaded)) {
            mgr->stats.refused_limit++;
            return KVT_E_LIMIT;
        }
        s->loaded += loaded;
        s->beside += !loaded;
    }
    return 0;
}

enum next { NEXT_MET, NEXT_COMPUTE, NEXT_WAIT };

/* Pass what is loaded; what is to be done then. */
static int advance(struct kvt_session_mgr *mgr, struct kvt_session *s, enum next *next)
{
    *next = NEXT_COMPUTE;
    for (; s->chunk_next < s->chunk_count; s->chunk_next++) {
        struct kvt_schunk *chunk = &s->chunks[s->chunk_next];
        s->given = chunk->from;
        if (s->front < chunk->from)
            return 0;
        if (chunk->state == KVT_SCHUNK_GOING) {
            *next = NEXT_WAIT;
            return 0;
        }
        int rc = pass(mgr, s, chunk->good, true);
        s->given = chunk->to;
        if (rc != 0 || s->front < chunk->to)
            return rc;
    }
    *next = NEXT_MET;
    return 0;
}

/* What the engine says it has computed. */
static int take_in(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t computed)
{
    uint32_t unit = mgr->block_tokens, end = computed / unit;
    if (s->state != KVT_SESSION_RESTORING || s->chunk_count == 0)
        return KVT_E_STATE;
    if (computed == 0)
        return 0;
    if (computed % unit != 0 || end < s->front || end > s->given)
        return KVT_E_INVAL;
    return pass(mgr, s, end, false);
}

static void meet_ends(struct kvt_session_mgr *mgr, struct kvt_session *s)
{
    uint32_t unit = mgr->block_tokens;
    s->plan.from_dram = s->got_dram * unit;
    s->plan.from_disk = s->got_disk * unit;
    s->plan.head = s->beside * unit;
    mgr->stats.met++;
    mgr->stats.blocks_beside += s->beside;
    kvt_session_activate(mgr, s, s->front, s->loaded);
}

/* The engine has come to a chunk that is in flight. When it is the last one it may be about to
 * land; where all that are in flight will be there sooner than this one is computed, they are
 * waited for; any other is behind those, and is called off. Waits without the lock. */
static void wait_for(struct kvt_session_mgr *mgr, struct kvt_session *s)
{
    const struct kvt_schunk *chunk = &s->chunks[s->chunk_next];
    struct kvt_sjob *job = &mgr->jobs[chunk->job];
    struct kvt_cache *cache = mgr->ns->cache;
    uint32_t going = 0, blocks = 0;
    for (uint32_t i = s->chunk_next; i < s->chunk_count; i++) {
        bool is = s->chunks[i].state == KVT_SCHUNK_GOING;
        going += is;
        blocks += is ? s->chunks[i].to - s->chunks[i].from : 0;
    }
    if (!chunk->called_off) {
        pthread_mutex_lock(&cache->lock);
        double seconds = kvt_prefill_seconds(&mgr->ns->prefill,
                                             (double)(chunk->to - chunk->from) * mgr->block_tokens,
                                             (double)chunk->from * mgr->block_tokens);
        pthread_mutex_unlock(&cache->lock);
        s->chunks[s->chunk_next].called_off = true;
        bool soon = s->load_s * blocks < HURRY * seconds;
        if (going == 1 || soon) {
            (void)kvt_sjob_wait(mgr, job, (int64_t)((soon ? 1 : PATIENCE) * seconds * 1e9));
            return;
        }
    }
    kvt_req_cancel(job->req);
    (void)kvt_sjob_wait(mgr, job, -1);
}

int kvt_session_meet(struct kvt_session_mgr *mgr, kvt_session_id id, uint32_t computed,
                     uint32_t *from, uint32_t *until)
{
    int rc;
    enum next next = NEXT_COMPUTE;
    if (from == NULL || until == NULL)
        return KVT_E_INVAL;
    struct kvt_session *s = kvt_session_enter(mgr, id, &rc);
    if (s == NULL)
        return rc;
    rc = take_in(mgr, s, computed);
    while (rc == 0) {
        rc = advance(mgr, s, &next);
        if (rc != 0 || next != NEXT_WAIT)
            break;
        wait_for(mgr, s);
        pthread_mutex_unlock(&mgr->lock);
        s = kvt_session_enter(mgr, id, &rc); /* notes what has ended; it may be closed by now */
        if (s == NULL)
            return rc;
        rc = take_in(mgr, s, 0);
    }
    if (rc == 0 && next == NEXT_MET) {
        meet_ends(mgr, s);
        rc = 1;
    } else if (rc == 0) {
        *from = s->front * mgr->block_tokens;
        *until = s->given * mgr->block_tokens;
    }
    pthread_mutex_unlock(&mgr->lock);
    return rc;
}
