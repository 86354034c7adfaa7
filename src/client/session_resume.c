/* Bringing a session back. The sequence, new tokens included, falls into four pieces:
 *
 *   [0, a) in L0        nodes with pages: used as they are
 *   [a, c)              empty but for a cut: the engine computes it meanwhile (session_meet.c)
 *   [c, b) in the store looked up as one chain, loaded into pages of the session
 *   [b, ..)             pages of the session, for the engine to fill
 *
 * What of the run that the store has is loaded says kvt_plan().
 *
 * When the load ends, its leading run of good blocks becomes nodes like any others; blocks behind
 * the first bad one are the engine's. A partial last block whose page is still there counts as
 * filled if all before it is. A refused call leaves the session as it was.
 * Threads: any; under the manager's lock, also over the round trip of the lookup.
 */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "client/session_internal.h"

struct resume { /* a call in progress */
    struct kvt_session_mgr *mgr;
    struct kvt_session *s;
    uint32_t total;  /* tokens */
    uint32_t before; /* blocks that the session holds already */
    uint32_t a, c, b;
    uint32_t blocks; /* of total, the last one partial or not */
    uint32_t disk;   /* blocks of [c, b) */
    struct kvt_plan plan;
    bool tail; /* the partial last block is in L0, and stays */
};

static uint32_t resident_run(const struct resume *r, uint32_t limit)
{
    const struct kvt_session_mgr *mgr = r->mgr;
    uint32_t i = 0;
    for (; i < limit; i++) {
        uint32_t at = i < r->before ? r->s->node[i] : kvt_snode_find(mgr, r->s->hash[i]);
        if (at == KVT_NONE || mgr->nodes[at].page == KVT_NONE)
            break;
    }
    return i;
}

/* From here on nobody takes the pages of what it holds. */
static void activate(struct resume *r)
{
    struct kvt_session_mgr *mgr = r->mgr;
    r->s->state = KVT_SESSION_RESTORING;
    for (uint32_t i = 0; i < r->before; i++) {
        mgr->nodes[r->s->node[i]].active++;
        mgr->nodes[r->s->node[i]].fails = 0;
        kvt_snode_lru(mgr, r->s->node[i]);
    }
    for (uint32_t i = r->before; i < r->a; i++)
        kvt_session_attach(mgr, r->s, i, kvt_snode_find(mgr, r->s->hash[i]));
    if (r->tail) {
        mgr->nodes[r->s->tail].active = 1;
        kvt_snode_lru(mgr, r->s->tail);
    }
}

static void deactivate(struct resume *r)
{
    struct kvt_session_mgr *mgr = r->mgr;
    while (r->s->blocks > r->before)
        kvt_session_detach_last(mgr, r->s);
    if (r->tail) {
        mgr->nodes[r->s->tail].active = 0;
        kvt_snode_lru(mgr, r->s->tail);
    }
    for (uint32_t i = r->before; i-- > 0;) {
        mgr->nodes[r->s->node[i]].active--;
        kvt_snode_lru(mgr, r->s->node[i]);
    }
    r->s->state = KVT_SESSION_IDLE;
}

/* How many blocks from a on the store has. */
static void look(struct resume *r, uint32_t limit)
{
    struct kvt_session_mgr *mgr = r->mgr;
    uint32_t n = limit > r->a ? limit - r->a : 0;
    const struct kvt_lookup_opts opts = {.struct_size = sizeof(opts), .roots = mgr->roots};
    n = KVT_MIN(n, (uint32_t)mgr->ns->cache->settings->request_blocks_max);
    r->b = r->a;
    for (uint32_t i = 0; i < n; i++)
        mgr->keys[i] = kvt_session_key(mgr, r->s->hash[r->a + i]);
    long found = n == 0 ? 0 : kvt_lookup(mgr->ns, mgr->keys, n, &opts, mgr->tiers);
    r->b += found > 0 ? (uint32_t)found : 0; /* an error: nothing can be had */
}

/* What of [a, b) pays. A question that is refused is answered "nothing". */
static void weigh(struct resume *r, const struct kvt_session_resume_opts *opts)
{
    struct kvt_session_mgr *mgr = r->mgr;
    const struct kvt_plan_query query = {.struct_size = sizeof(query),
                                         .tiers = mgr->tiers,
                                         .roots = mgr->roots,
                                         .n = r->b - r->a,
                                         .first_tokens = (uint64_t)r->a * mgr->block_tokens,
                                         .prompt_tokens = r->total,
                                         .gpu_busy = opts != NULL ? opts->gpu_busy : 0,
                                         .group = mgr->ns->shape->groups[0].group,
                                         .cut = opts != NULL ? (uint16_t)opts->cut : 0};
    struct kvt_plan plan = {.struct_size = sizeof(plan)};
    if (kvt_plan(mgr->ns, &query, &plan) != 0)
        plan = (struct kvt_plan){.reason = KVT_PLAN_NO_BLOCKS};
    r->plan = plan;
    r->c = r->a + (plan.count > 0 ? plan.first : 0);
    r->b = r->c + plan.count;
    for (uint32_t i = r->c - r->a; i < r->b - r->a; i++)
        r->disk += mgr->tiers[i] != KVT_TIER_DRAM;
}

void kvt_session_drop_tail(struct kvt_session_mgr *mgr, struct kvt_session *s, bool free_page)
{
    if (s->tail == KVT_NONE)
        return;
    uint32_t page = kvt_snode_take_page(mgr, s->tail);
    if (free_page)
        kvt_spage_put(mgr, page);
    mgr->nodes[s->tail].refs = 0;
    kvt_snode_settle(mgr, s->tail);
    s->tail = KVT_NONE;
}

static int take_pages(struct resume *r)
{
    struct kvt_session_mgr *mgr = r->mgr;
    int rc = kvt_session_make_room(mgr, r->blocks - r->a - r->tail);
    if (rc != 0)
        return rc;
    for (uint32_t i = 0; i < r->blocks; i++)
        r->s->page[i] = i < r->a                    ? mgr->nodes[r->s->node[i]].page
                        : r->tail && i == r->before ? mgr->nodes[r->s->tail].page
                                                    : kvt_spage_take(mgr);
    return kvt_pool_reset_origin(mgr->pool, r->s->page + r->a, r->blocks - r->a);
}

static void give_pages(struct resume *r)
{
    for (uint32_t i = r->a; i < r->blocks; i++)
        if (!r->tail || i != r->before)
            kvt_spage_put(r->mgr, r->s->page[i]);
}

/* Absent: the plan's, so that a load that is too slow costs little. */
static int64_t deadline(const struct resume *r, const struct kvt_session_resume_opts *opts)
{
    if (opts != NULL && opts->deadline_ns != 0)
        return opts->deadline_ns;
    return r->plan.deadline_s > 0 ? (int64_t)(r->plan.deadline_s * 1e9) + 1 : 0;
}

static int load(struct resume *r, const struct kvt_session_resume_opts *opts)
{
    struct kvt_session_mgr *mgr = r->mgr;
    struct kvt_load_opts load = {.struct_size = sizeof(load)};
    if (r->c > r->a) {
        /* beside the engine: they are of use as long as it computes */
        int64_t late = opts != NULL && opts->deadline_ns != 0 ? opts->deadline_ns
                       : r->plan.deadline_s > 0 ? (int64_t)(r->plan.recompute_s * 1e9) + 1
                                                : 0;
        r->s->load_from = r->c;
        r->s->load_to = r->b;
        r->s->load_s = r->plan.load_s / (r->b - r->c);
        return kvt_session_meet_begin(mgr, r->s, mgr->keys + (r->c - r->a), late);
    }
    struct kvt_sjob *job = kvt_sjob_take(mgr, KVT_SJOB_RESTORE);
    if (job == NULL) {
        mgr->stats.refused_busy++;
        return -EAGAIN;
    }
    load.deadline_ns = deadline(r, opts);
    int rc =
        kvt_load(mgr->ns, mgr->pool, mgr->keys, r->s->page + r->a, r->b - r->a, &load, &job->req);
    if (rc != 0) {
        mgr->stats.refused_busy += rc == -EAGAIN;
        kvt_sjob_put(mgr, job);
        return rc;
    }
    job->session = (uint32_t)(r->s - mgr->sessions);
    r->s->restore_job = (uint32_t)(job - mgr->jobs);
    return 0;
}

/* Blocks [load_from, end) are in the session's pages: make them nodes. Returns their end. */
static uint32_t adopt(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t end)
{
    for (uint32_t i = s->load_from; i < end; i++) {
        if (i >= s->blocks) {
            uint32_t at = kvt_snode_find(mgr, s->hash[i]);
            if (at == KVT_NONE)
                at = kvt_snode_add(mgr, s->hash[i], i ? s->node[i - 1] : KVT_NONE, i, KVT_NONE);
            if (at == KVT_NONE)
                return i;
            kvt_session_attach(mgr, s, i, at);
        }
        struct kvt_snode *node = &mgr->nodes[s->node[i]];
        if (node->page != KVT_NONE) { /* another session was faster */
            kvt_spage_put(mgr, s->page[i]);
            s->page[i] = node->page;
            mgr->stats.shared++;
            continue;
        }
        node->record = kvt_session_record_of(mgr, i, s->page[i]);
        kvt_snode_set_page(mgr, s->node[i], s->page[i]);
    }
    return end;
}

void kvt_session_activate(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t end,
                          uint32_t loaded)
{
    uint32_t unit = mgr->block_tokens, blocks = (s->tokens + unit - 1) / unit;
    bool all = end == s->load_to;
    while (s->blocks > end)
        kvt_session_detach_last(mgr, s);
    (void)kvt_pool_reset_origin(mgr->pool, s->page + end, blocks - end); /* the engine's now */
    s->filled = all && s->tail_filled > end * unit ? s->tail_filled : end * unit;
    s->state = KVT_SESSION_ACTIVE;
    s->restore_job = KVT_NONE;
    s->chunk_count = 0;
    s->plan.recompute = s->tokens - s->filled;
    mgr->stats.resumed++;
    mgr->stats.blocks_loaded += loaded;
    kvt_session_set_window(mgr, s, s->tokens);
    for (uint32_t i = 0; i < s->blocks; i++)
        kvt_session_want_cool(mgr, s->node[i]);
    kvt_session_cool(mgr, false);
}

/* The load of [load_from, load_to) has ended; blocks up to `end` came. */
static void finish(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t end)
{
    end = adopt(mgr, s, end);
    mgr->stats.load_short += s->load_to - end;
    kvt_session_activate(mgr, s, end, end - s->load_from);
}

void kvt_session_restore_done(struct kvt_session_mgr *mgr, struct kvt_sjob *job,
                              const int32_t *status)
{
    struct kvt_session *s = &mgr->sessions[job->session];
    struct kvt_req_report report = {.struct_size = sizeof(report)};
    uint32_t n = s->load_to - s->load_from, run = 0;
    while (run < n && status[run] == 0)
        run++;
    s->plan.reason = run < n ? status[run] : 0;
    for (uint32_t i = run; i < n; i++) {
        uint32_t at = kvt_snode_find(mgr, s->hash[s->load_from + i]);
        if (at != KVT_NONE && status[i] == KVT_E_MISS && !mgr->nodes[at].busy)
            mgr->nodes[at].record = KVT_SESSION_RECORD_NONE;
    }
    if (kvt_req_report(job->req, &report) == 0) {
        s->plan.from_dram = KVT_MIN((uint32_t)report.blocks_dram, run) * mgr->block_tokens;
        s->plan.from_disk = run * mgr->block_tokens - s->plan.from_dram;
    }
    finish(mgr, s, s->load_from + run);
}

static void planned(struct resume *r)
{
    struct kvt_session *s = r->s;
    uint32_t unit = r->mgr->block_tokens;
    bool tail = r->tail && r->b == r->before;
    s->tail_filled = tail ? s->filled : 0;
    s->plan = (struct kvt_session_plan){.struct_size = sizeof(s->plan),
                                        .tokens = r->total,
                                        .in_l0 = r->a * unit,
                                        .from_dram = (r->b - r->c - r->disk) * unit,
                                        .from_disk = r->disk * unit,
                                        .decision = r->plan.reason,
                                        .head = (r->c - r->a) * unit};
    if (tail)
        s->plan.in_l0 += s->filled - r->before * unit;
    s->plan.recompute = r->total - s->plan.in_l0 - (r->b - r->a) * unit;
    s->tokens = r->total;
    s->filled = r->a * unit;
    s->load_from = r->c;
    s->load_to = r->b;
    s->front = r->a;
    s->given = r->c;
    r->mgr->stats.blocks_l0 += r->a;
    if (r->a > r->before)
        r->mgr->stats.shared += r->a - r->before;
}

static int resume(struct kvt_session_mgr *mgr, struct kvt_session *s, const uint32_t *tokens,
                  size_t n, const struct kvt_session_resume_opts *opts)
{
    struct resume r = {.mgr = mgr, .s = s, .before = s->blocks};
    if (s->state != KVT_SESSION_IDLE)
        return KVT_E_STATE;
    int rc = kvt_session_put_tokens(mgr, s, tokens, n);
    if (rc != 0)
        return rc;
    r.total = s->tokens + (uint32_t)n;
    r.blocks = (r.total + mgr->block_tokens - 1) / mgr->block_tokens;
    uint32_t limit = n > 0 ? (uint32_t)kvt_usable_blocks(mgr->block_tokens, r.total)
                           : r.total / mgr->block_tokens;
    r.a = resident_run(&r, limit);
    r.tail = s->tail != KVT_NONE && r.a <= r.before;
    activate(&r);
    look(&r, limit);
    weigh(&r, opts);
    if (r.tail && r.b > r.before) { /* the store has the block whole */
        r.tail = false;
        mgr->nodes[s->tail].active = 0;
        kvt_snode_lru(mgr, s->tail);
    }
    rc = take_pages(&r);
    if (rc == 0 && r.b > r.a) {
        rc = load(&r, opts);
        if (rc != 0)
            give_pages(&r);
    }
    if (rc != 0) {
        deactivate(&r);
        return rc;
    }
    planned(&r);
    kvt_session_drop_tail(mgr, s, !r.tail);
    if (r.b == r.a)
        finish(mgr, s, r.a);
    return 0;
}

int kvt_session_resume(struct kvt_session_mgr *mgr, kvt_session_id id, const uint32_t *tokens,
                       size_t n, const struct kvt_session_resume_opts *opts,
                       struct kvt_session_plan *plan)
{
    int rc;
    if ((opts != NULL && opts->struct_size != sizeof(*opts)) ||
        (plan != NULL && plan->struct_size != sizeof(*plan)))
        return KVT_E_VERSION;
    if (opts != NULL && ((opts->cut != KVT_PLAN_CUT_NONE && opts->cut != KVT_PLAN_CUT_OVERLAP) ||
                         !(opts->gpu_busy >= 0 && opts->gpu_busy <= 1)))
        return KVT_E_INVAL;
    struct kvt_session *s = kvt_session_enter(mgr, id, &rc);
    if (s == NULL)
        return rc;
    rc = resume(mgr, s, tokens, n, opts);
    if (rc == 0 && plan != NULL)
        *plan = s->plan;
    pthread_mutex_unlock(&mgr->lock);
    return rc;
}

int kvt_session_wait(struct kvt_session_mgr *mgr, kvt_session_id id, int64_t timeout_ns)
{
    int rc;
    struct kvt_session *s = kvt_session_enter(mgr, id, &rc);
    if (s == NULL)
        return rc;
    if (s->state == KVT_SESSION_RESTORING && s->chunk_count > 0) {
        bool going = kvt_session_meet_wait(mgr, s, timeout_ns);
        pthread_mutex_unlock(&mgr->lock);
        if (!going)
            return KVT_E_STATE;
        s = kvt_session_enter(mgr, id, &rc);
        if (s == NULL)
            return rc;
    } else if (s->state == KVT_SESSION_RESTORING && timeout_ns != 0) {
        rc = kvt_sjob_wait(mgr, &mgr->jobs[s->restore_job], timeout_ns);
        pthread_mutex_unlock(&mgr->lock);
        if (rc < 0)
            return rc;
        s = kvt_session_enter(mgr, id, &rc); /* notes the end */
        if (s == NULL)
            return rc;
    }
    rc = s->state != KVT_SESSION_RESTORING;
    pthread_mutex_unlock(&mgr->lock);
    return rc;
}
