/* Storing and cooling: the requests of a session manager, what their ends mean, and the queue of
 * blocks that have left every window.
 *
 *   NONE --save--> WINDOW --cool--> FINAL     from the page: SAVE
 *      `------------cool-----------^          without a page: FETCH into a scratch page, then SAVE
 *
 * A block in a window is stored when its session goes idle, on flush or on eviction; one that has
 * left every window is stored at the final level at once. The first block is raw, so final.
 * Threads: under the manager's lock; kvt_sjob_wait() gives it up while it waits.
 */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "client/session_internal.h"

/* ---- requests ------------------------------------------------------------------------------ */

void kvt_sjobs_init(struct kvt_session_mgr *mgr)
{
    mgr->job_free = KVT_NONE;
    for (uint32_t i = KVT_SESSION_JOBS; i-- > 0;) {
        mgr->jobs[i].next_free = mgr->job_free;
        mgr->job_free = i;
    }
}

struct kvt_sjob *kvt_sjob_take(struct kvt_session_mgr *mgr, enum kvt_sjob_kind kind)
{
    if (mgr->job_free == KVT_NONE)
        return NULL;
    struct kvt_sjob *job = &mgr->jobs[mgr->job_free];
    mgr->job_free = job->next_free;
    mgr->jobs_used++;
    memset(job, 0, sizeof(*job));
    job->kind = (uint8_t)kind;
    job->session = job->scratch = KVT_NONE;
    return job;
}

void kvt_sjob_put(struct kvt_session_mgr *mgr, struct kvt_sjob *job)
{
    kvt_req_free(job->req);
    job->req = NULL;
    job->kind = KVT_SJOB_FREE;
    job->next_free = mgr->job_free;
    mgr->job_free = (uint32_t)(job - mgr->jobs);
    mgr->jobs_used--;
}

int kvt_sjob_wait(struct kvt_session_mgr *mgr, struct kvt_sjob *job, int64_t timeout_ns)
{
    struct kvt_req *req = job->req;
    job->waiters++;
    pthread_mutex_unlock(&mgr->lock);
    int rc = kvt_req_wait(req, timeout_ns);
    pthread_mutex_lock(&mgr->lock);
    job->waiters--;
    if (job->ended && job->waiters == 0)
        kvt_sjob_put(mgr, job);
    return rc;
}

struct kvt_key kvt_session_key(const struct kvt_session_mgr *mgr, uint32_t g, const uint8_t *hash)
{
    struct kvt_key key = {.hash_len = KVT_HASH_BYTES_MAX, .shard = mgr->opts.shard};
    memcpy(key.hash, hash, sizeof(key.hash));
    key.group = mgr->groups[g].shape->group;
    return key;
}

/* ---- what a record is ---------------------------------------------------------------------- */

static uint8_t record_after(const struct kvt_session_mgr *mgr, uint32_t at, uint8_t target)
{
    return target == KVT_SESSION_RECORD_WINDOW && mgr->groups[kvt_scell_group(mgr, at)].two_steps &&
                   mgr->nodes[kvt_scell_node(mgr, at)].depth > 0
               ? KVT_SESSION_RECORD_WINDOW
               : KVT_SESSION_RECORD_FINAL;
}

uint8_t kvt_session_record_of(const struct kvt_session_mgr *mgr, uint32_t g, uint32_t depth,
                              uint32_t page)
{
    uint8_t origin = kvt_session_origin(mgr, g, page);
    if (!mgr->groups[g].two_steps || depth == 0 || (origin != 0 && origin < KVT_LEVEL_KV8))
        return KVT_SESSION_RECORD_FINAL;
    return KVT_SESSION_RECORD_WINDOW;
}

bool kvt_session_wanted(const struct kvt_session_mgr *mgr, uint32_t at)
{
    return mgr->groups[kvt_scell_group(mgr, at)].full || mgr->cells[at].holders > 0;
}

static bool may_be_stored(const struct kvt_session_mgr *mgr, uint32_t at)
{
    const struct kvt_snode *node = &mgr->nodes[kvt_scell_node(mgr, at)];
    return node->tail_of == KVT_NONE && node->stored && kvt_session_wanted(mgr, at) &&
           mgr->cells[at].fails < KVT_SESSION_FAILS_MAX;
}

static bool must_cool(const struct kvt_session_mgr *mgr, uint32_t at)
{
    const struct kvt_snode *node = &mgr->nodes[kvt_scell_node(mgr, at)];
    const struct kvt_scell *cell = &mgr->cells[at];
    return node->beyond && node->windows == 0 && may_be_stored(mgr, at) &&
           cell->record != KVT_SESSION_RECORD_FINAL &&
           (cell->page != KVT_NONE || cell->record == KVT_SESSION_RECORD_WINDOW);
}

/* ---- storing ------------------------------------------------------------------------------- */

/* The cell of the same group before it, in its chain; KVT_NONE: it is the first. */
static uint32_t cell_before(const struct kvt_session_mgr *mgr, uint32_t at)
{
    uint32_t parent = mgr->nodes[kvt_scell_node(mgr, at)].parent;
    return parent == KVT_NONE ? KVT_NONE : kvt_scell_of(mgr, parent, kvt_scell_group(mgr, at));
}

/* Store cells, a piece of one chain, out of their pages, or the only one out of a scratch page. */
static int submit(struct kvt_session_mgr *mgr, const uint32_t *cells, uint32_t n, uint8_t target,
                  uint32_t scratch)
{
    struct kvt_key keys[KVT_SESSION_JOB_BLOCKS], parent;
    uint32_t ids[KVT_SESSION_JOB_BLOCKS], g = kvt_scell_group(mgr, cells[0]);
    struct kvt_store_opts opts = {.struct_size = sizeof(opts), .level = mgr->opts.level};
    const struct kvt_sgroup *group = &mgr->groups[g];
    const struct kvt_snode *first = &mgr->nodes[kvt_scell_node(mgr, cells[0])];
    struct kvt_sjob *job = kvt_sjob_take(mgr, KVT_SJOB_SAVE);
    if (job == NULL)
        return -EAGAIN;
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = kvt_session_key(mgr, g, mgr->nodes[kvt_scell_node(mgr, cells[i])].hash);
        ids[i] = scratch != KVT_NONE ? scratch : mgr->cells[cells[i]].page;
        job->cells[i] = cells[i];
    }
    if (first->parent != KVT_NONE && group->full) { /* the others need no predecessor */
        parent = kvt_session_key(mgr, g, mgr->nodes[first->parent].hash);
        opts.parent = &parent;
    }
    opts.first_pos = first->depth * mgr->block_tokens;
    if (group->two_steps && target == KVT_SESSION_RECORD_WINDOW)
        opts.level = mgr->opts.window_level;
    opts.cool = group->two_steps && target == KVT_SESSION_RECORD_FINAL;
    job->count = n;
    job->target = target;
    job->group = g;
    int rc = kvt_store(mgr->ns, mgr->pool, keys, ids, n, &opts, &job->req);
    if (rc != 0) {
        kvt_sjob_put(mgr, job);
        return rc;
    }
    job->scratch = scratch;
    for (uint32_t i = 0; i < n; i++)
        mgr->cells[cells[i]].busy = true;
    return 0;
}

static bool unsaved(const struct kvt_session_mgr *mgr, uint32_t at)
{
    const struct kvt_scell *cell = &mgr->cells[at];
    return cell->record == KVT_SESSION_RECORD_NONE && !cell->busy && cell->page != KVT_NONE &&
           may_be_stored(mgr, at);
}

static uint8_t target_of(const struct kvt_session_mgr *mgr, uint32_t at)
{
    return must_cool(mgr, at) ? KVT_SESSION_RECORD_FINAL : KVT_SESSION_RECORD_WINDOW;
}

int kvt_session_save_chain(struct kvt_session_mgr *mgr, uint32_t cell)
{
    uint32_t *path = mgr->path, n = 0;
    for (uint32_t at = cell; at != KVT_NONE && unsaved(mgr, at); n++) {
        path[mgr->session_blocks - 1 - n] = at;
        at = cell_before(mgr, at);
    }
    path += mgr->session_blocks - n;
    for (uint32_t at = 0; at < n;) {
        uint8_t target = target_of(mgr, path[at]);
        uint32_t run = 1;
        while (run < KVT_SESSION_JOB_BLOCKS && at + run < n &&
               target_of(mgr, path[at + run]) == target)
            run++;
        int rc = submit(mgr, path + at, run, target, KVT_NONE);
        if (rc != 0)
            return rc;
        at += run;
    }
    return 0;
}

static void scratch_put(struct kvt_session_mgr *mgr, struct kvt_sjob *job)
{
    struct kvt_sgroup *group = &mgr->groups[job->group];
    group->scratch[group->scratch_free++] = job->scratch;
    job->scratch = KVT_NONE;
}

static void save_done(struct kvt_session_mgr *mgr, struct kvt_sjob *job, const int32_t *status)
{
    for (uint32_t i = 0; i < job->count; i++) {
        struct kvt_scell *cell = &mgr->cells[job->cells[i]];
        uint8_t record = record_after(mgr, job->cells[i], job->target);
        cell->busy = false;
        if (status[i] == 0 || status[i] == KVT_E_EXISTS) {
            mgr->stats.stored_window += job->target == KVT_SESSION_RECORD_WINDOW;
            mgr->stats.stored_final += job->target == KVT_SESSION_RECORD_FINAL;
            mgr->stats.cooled_record += job->scratch != KVT_NONE;
            cell->record = KVT_MAX(cell->record, record);
            cell->fails = 0;
        } else {
            mgr->stats.store_failed++;
            cell->fails++;
        }
        kvt_session_want_cool(mgr, job->cells[i]);
        kvt_snode_settle(mgr, kvt_scell_node(mgr, job->cells[i]));
    }
    if (job->scratch != KVT_NONE)
        scratch_put(mgr, job);
}

/* ---- cooling ------------------------------------------------------------------------------- */

void kvt_session_want_cool(struct kvt_session_mgr *mgr, uint32_t at)
{
    struct kvt_scell *cell = &mgr->cells[at];
    struct kvt_sgroup *group = &mgr->groups[kvt_scell_group(mgr, at)];
    if (cell->queued || cell->busy || !must_cool(mgr, at))
        return;
    cell->queued = true;
    cell->cool_next = KVT_NONE;
    if (group->cool_tail == KVT_NONE)
        group->cool_head = at;
    else
        mgr->cells[group->cool_tail].cool_next = at;
    group->cool_tail = at;
    mgr->cool_count++;
}

void kvt_session_want_cool_all(struct kvt_session_mgr *mgr, uint32_t node)
{
    for (uint32_t g = 0; g < mgr->group_count; g++)
        kvt_session_want_cool(mgr, kvt_scell_of(mgr, node, g));
}

static void cool_pop(struct kvt_session_mgr *mgr, struct kvt_sgroup *group)
{
    uint32_t at = group->cool_head;
    struct kvt_scell *cell = &mgr->cells[at];
    group->cool_head = cell->cool_next;
    if (group->cool_head == KVT_NONE)
        group->cool_tail = KVT_NONE;
    mgr->cool_count--;
    cell->queued = false;
    kvt_snode_settle(mgr, kvt_scell_node(mgr, at));
}

/* The record of a block that is not in L0 goes into a scratch page, to be coded from there. */
static int fetch(struct kvt_session_mgr *mgr, uint32_t at)
{
    static const struct kvt_load_opts opts = {.struct_size = sizeof(opts), .deadline_ns = -1};
    uint32_t g = kvt_scell_group(mgr, at);
    struct kvt_sgroup *group = &mgr->groups[g];
    struct kvt_key key = kvt_session_key(mgr, g, mgr->nodes[kvt_scell_node(mgr, at)].hash);
    if (group->scratch_free == 0)
        return -EAGAIN;
    struct kvt_sjob *job = kvt_sjob_take(mgr, KVT_SJOB_FETCH);
    if (job == NULL)
        return -EAGAIN;
    uint32_t page = group->scratch[group->scratch_free - 1];
    int rc = kvt_load(mgr->ns, mgr->pool, &key, &page, 1, &opts, &job->req);
    if (rc != 0) {
        kvt_sjob_put(mgr, job);
        return rc;
    }
    group->scratch_free--;
    job->scratch = page;
    job->group = g;
    job->cells[0] = at;
    job->count = 1;
    mgr->cells[at].busy = true;
    return 0;
}

static void fetch_done(struct kvt_session_mgr *mgr, struct kvt_sjob *job, const int32_t *status)
{
    uint32_t at = job->cells[0], node = kvt_scell_node(mgr, at);
    struct kvt_scell *cell = &mgr->cells[at];
    int rc = status[0];
    cell->busy = false;
    if (rc == 0)
        cell->record = kvt_session_record_of(mgr, job->group, mgr->nodes[node].depth, job->scratch);
    else if (rc == KVT_E_MISS)
        cell->record = KVT_SESSION_RECORD_NONE;
    if (rc == 0 && must_cool(mgr, at)) {
        rc = submit(mgr, &at, 1, KVT_SESSION_RECORD_FINAL, job->scratch);
        if (rc == 0) {
            job->scratch = KVT_NONE;
            return;
        }
    }
    scratch_put(mgr, job);
    if (rc != 0) {
        mgr->stats.cool_failed++;
        cell->fails++;
    }
    kvt_session_want_cool(mgr, at);
    kvt_snode_settle(mgr, node);
}

/* Store the run of resident blocks that the queue begins with. */
static int cool_run(struct kvt_session_mgr *mgr, struct kvt_sgroup *group)
{
    uint32_t cells[KVT_SESSION_JOB_BLOCKS] = {group->cool_head}, n = 1;
    uint32_t before = cell_before(mgr, group->cool_head);
    if (before != KVT_NONE && unsaved(mgr, before)) {
        int rc = kvt_session_save_chain(mgr, before); /* else the store would not take the child */
        if (rc != 0)
            return rc;
    }
    for (uint32_t at = mgr->cells[group->cool_head].cool_next;
         at != KVT_NONE && n < KVT_SESSION_JOB_BLOCKS; at = mgr->cells[at].cool_next) {
        const struct kvt_scell *cell = &mgr->cells[at];
        if (cell->page == KVT_NONE || cell->busy || !must_cool(mgr, at) ||
            cell_before(mgr, at) != cells[n - 1])
            break;
        cells[n++] = at;
    }
    int rc = submit(mgr, cells, n, KVT_SESSION_RECORD_FINAL, KVT_NONE);
    for (uint32_t i = 0; i < n && rc == 0; i++)
        cool_pop(mgr, group);
    return rc;
}

static void cool_group(struct kvt_session_mgr *mgr, struct kvt_sgroup *group)
{
    while (group->cool_head != KVT_NONE) {
        uint32_t at = group->cool_head;
        struct kvt_scell *cell = &mgr->cells[at];
        if (cell->busy || !must_cool(mgr, at)) { /* busy: looked at again when that has ended */
            cool_pop(mgr, group);
            continue;
        }
        bool resident = cell->page != KVT_NONE;
        int rc = resident ? cool_run(mgr, group) : fetch(mgr, at);
        if (rc == -EAGAIN)
            return;
        if (rc == 0 && resident)
            continue;
        if (rc != 0) { /* the cache is closed, or will not have it */
            mgr->stats.store_failed++;
            cell->fails = KVT_SESSION_FAILS_MAX;
        }
        cool_pop(mgr, group);
    }
}

void kvt_session_cool(struct kvt_session_mgr *mgr, bool all)
{
    if (!all && mgr->cool_count < KVT_SESSION_COOL_BATCH)
        return;
    for (uint32_t g = 0; g < mgr->group_count; g++)
        cool_group(mgr, &mgr->groups[g]);
}

/* ---- ends ---------------------------------------------------------------------------------- */

static void job_end(struct kvt_session_mgr *mgr, struct kvt_sjob *job)
{
    const int32_t *status = kvt_req_status(job->req, NULL);
    switch (job->kind) {
    case KVT_SJOB_SAVE:
        save_done(mgr, job, status);
        break;
    case KVT_SJOB_FETCH:
        fetch_done(mgr, job, status);
        break;
    default:
        if (mgr->sessions[job->session].chunk_count > 0)
            kvt_session_chunk_done(mgr, job, status);
        else
            kvt_session_restore_done(mgr, job, status);
        break;
    }
    job->ended = true;
    if (job->waiters == 0)
        kvt_sjob_put(mgr, job);
}

void kvt_session_publish(struct kvt_session_mgr *mgr)
{
    struct kvt_client_counters *counters = &mgr->ns->cache->counters;
    if (memcmp(&mgr->stats, &mgr->published, sizeof(mgr->stats)) == 0)
        return;
    pthread_mutex_lock(&mgr->ns->cache->lock);
#define ADD(field) (counters->session_##field += mgr->stats.field - mgr->published.field)
    ADD(resumed);
    ADD(blocks_l0);
    ADD(blocks_loaded);
    ADD(load_short);
    ADD(met);
    ADD(blocks_beside);
    ADD(shared);
    ADD(duplicates);
    ADD(stored_window);
    ADD(stored_final);
    ADD(cooled_record);
    ADD(store_failed);
    ADD(cool_failed);
    ADD(evicted);
    ADD(evicted_unsaved);
    ADD(tails_lost);
    ADD(cut_tokens);
    ADD(refused_busy);
    ADD(refused_limit);
    ADD(truncated_tokens);
#undef ADD
    pthread_mutex_unlock(&mgr->ns->cache->lock);
    mgr->published = mgr->stats;
}

uint32_t kvt_session_poll(struct kvt_session_mgr *mgr)
{
    uint32_t ended = 0;
    for (uint32_t i = 0; i < KVT_SESSION_JOBS && mgr->jobs_used > 0; i++) {
        struct kvt_sjob *job = &mgr->jobs[i];
        if (job->kind == KVT_SJOB_FREE || job->ended || kvt_req_wait(job->req, 0) != 1)
            continue;
        job_end(mgr, job);
        ended++;
    }
    kvt_session_cool(mgr, false);
    kvt_session_publish(mgr);
    return ended;
}
