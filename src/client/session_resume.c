/* Bringing a session back. The sequence, new tokens included, falls into four pieces:
 *
 *   [0, a) in L0        nodes with pages: used as they are
 *   [a, c)              empty but for a cut: the engine computes it meanwhile (session_meet.c)
 *   [c, b) in the store looked up, loaded into pages of the session
 *   [b, ..)             pages of the session, for the engine to fill
 *
 * With several groups a is how far L0 alone can serve every group, and b how far L0 and the store
 * can together: a block of any group that such a prefix needs is shared where L0 has it, and loaded
 * where it does not, also before a. What of the run that the store has is loaded says kvt_plan();
 * of several groups all that a prefix needs is, or nothing.
 *
 * A partial last block whose pages are still there counts as filled if all before it is. A refused
 * call leaves the session as it was, but for blocks behind b whose pages it needed.
 * session_look.c finds a, b and c, session_landed.c has what becomes of the loads.
 * Threads: any; under the manager's lock, also over the round trips of lookups.
 */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "client/session_internal.h"

/* ---- holding what is there ----------------------------------------------------------------- */

void kvt_session_drop_tail(struct kvt_session_mgr *mgr, struct kvt_session *s, bool free_pages)
{
    if (s->tail == KVT_NONE)
        return;
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        uint32_t page = kvt_scell_take_page(mgr, kvt_scell_of(mgr, s->tail, g));
        if (free_pages)
            kvt_spage_put(&mgr->groups[g], page);
    }
    mgr->nodes[s->tail].refs = 0;
    kvt_snode_settle(mgr, s->tail);
    s->tail = KVT_NONE;
}

/* From here on nobody takes the pages of what a prefix of a blocks needs, nor of what is used of
 * the others. */
static void activate(struct kvt_resume *r)
{
    struct kvt_session_mgr *mgr = r->mgr;
    struct kvt_session *s = r->s;
    uint32_t end = r->a;
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        r->old_from[g] = s->from[g];
        kvt_session_hold_from(mgr, s, g, kvt_session_needs(mgr, g, r->a));
        for (uint32_t i = r->b; i > end; i--)
            if (kvt_resume_shared(r, g, i - 1))
                end = i;
    }
    s->state = KVT_SESSION_RESTORING;
    for (uint32_t i = 0; i < r->before; i++) {
        for (uint32_t g = 0; g < mgr->group_count; g++) {
            kvt_scell_at(mgr, s->node[i], g)->fails = 0;
            if (i < s->from[g])
                continue;
            kvt_scell_at(mgr, s->node[i], g)->pinned++;
            kvt_scell_lru(mgr, kvt_scell_of(mgr, s->node[i], g));
        }
    }
    for (uint32_t i = r->before; i < end; i++)
        kvt_session_attach(mgr, s, i, kvt_snode_find(mgr, s->hash[i]));
    if (r->tail)
        kvt_session_pin_tail(mgr, s, true);
}

static void deactivate(struct kvt_resume *r)
{
    struct kvt_session_mgr *mgr = r->mgr;
    struct kvt_session *s = r->s;
    while (s->blocks > r->before)
        kvt_session_detach_last(mgr, s);
    if (r->tail)
        kvt_session_pin_tail(mgr, s, false);
    for (uint32_t i = r->before; i-- > 0;) {
        for (uint32_t g = 0; g < mgr->group_count; g++) {
            if (i < s->from[g])
                continue;
            kvt_scell_at(mgr, s->node[i], g)->pinned--;
            kvt_scell_lru(mgr, kvt_scell_of(mgr, s->node[i], g));
        }
    }
    s->state = KVT_SESSION_IDLE;
    for (uint32_t g = 0; g < mgr->group_count; g++)
        kvt_session_hold_from(mgr, s, g, r->old_from[g]);
}

/* ---- pages --------------------------------------------------------------------------------- */

/* What the session's page of block i of group g is to be. */
enum source { NO_PAGE, SHARED_PAGE, TAIL_PAGE, LOADED_PAGE, FRESH_PAGE };

static enum source source_of(const struct kvt_resume *r, uint32_t g, uint32_t i)
{
    if (i < r->s->from[g])
        return NO_PAGE;
    if (i < r->b && kvt_resume_shared(r, g, i))
        return SHARED_PAGE;
    if (i < r->c) /* the engine's, by a cut */
        return FRESH_PAGE;
    if (i < r->b)
        return kvt_resume_to_load(r, g, i) ? LOADED_PAGE : NO_PAGE;
    if (r->tail && i == r->before)
        return TAIL_PAGE;
    return kvt_session_gives(r->mgr, g, i, r->total) ? FRESH_PAGE : NO_PAGE;
}

static int take_pages(struct kvt_resume *r)
{
    struct kvt_session_mgr *mgr = r->mgr;
    struct kvt_session *s = r->s;
    uint32_t need[KVT_GROUPS_MAX] = {0};
    for (uint32_t g = 0; g < mgr->group_count; g++)
        for (uint32_t i = 0; i < r->blocks; i++)
            need[g] += source_of(r, g, i) >= LOADED_PAGE;
    int rc = kvt_session_make_room(mgr, need);
    if (rc != 0)
        return rc;
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        for (uint32_t i = 0; i < r->blocks; i++) {
            enum source source = source_of(r, g, i);
            uint32_t *page = kvt_session_page(mgr, s, g, i);
            *kvt_session_got(mgr, s, g, i) = source == SHARED_PAGE   ? KVT_SGOT_SHARED
                                             : source == LOADED_PAGE ? KVT_SGOT_WANTED
                                                                     : KVT_SGOT_OWN;
            *page = source == NO_PAGE       ? KVT_NONE
                    : source == SHARED_PAGE ? kvt_scell_at(mgr, s->node[i], g)->page
                    : source == TAIL_PAGE   ? kvt_scell_at(mgr, s->tail, g)->page
                                            : kvt_session_fresh_page(mgr, g);
        }
    }
    return 0;
}

/* Hold what is there and take pages for the rest; or nothing. */
static int claim(struct kvt_resume *r)
{
    activate(r);
    int rc = take_pages(r);
    if (rc != 0)
        deactivate(r);
    return rc;
}

/* Where a group has lost what the others still have, these have pages behind b: of no use to what
 * can be had, and the session itself would keep them from being taken for the same blocks. It lets
 * go of them. false: there are none. */
static bool let_go_behind(struct kvt_resume *r)
{
    struct kvt_session_mgr *mgr = r->mgr;
    struct kvt_session *s = r->s;
    bool any = false;
    for (uint32_t i = r->b; i < s->blocks && !any; i++)
        for (uint32_t g = 0; g < mgr->group_count; g++)
            any = any || kvt_session_has_page(mgr, s, s->node[i], g, i);
    if (!any)
        return false;
    kvt_session_drop_tail(mgr, s, true);
    while (s->blocks > r->b)
        kvt_session_detach_last(mgr, s);
    s->filled = KVT_MIN(s->filled, s->blocks * mgr->block_tokens);
    kvt_session_set_needs(mgr, s);
    mgr->stats.refused_limit--; /* the call is not refused yet */
    r->before = s->blocks;
    r->tail = false;
    return true;
}

static void give_pages(struct kvt_resume *r)
{
    for (uint32_t g = 0; g < r->mgr->group_count; g++)
        for (uint32_t i = 0; i < r->blocks; i++)
            if (source_of(r, g, i) >= LOADED_PAGE)
                kvt_spage_put(&r->mgr->groups[g], *kvt_session_page(r->mgr, r->s, g, i));
}

/* ---- loading ------------------------------------------------------------------------------- */

/* Absent: the plan's, so that a load that is too slow costs little. */
static int64_t deadline(const struct kvt_resume *r, const struct kvt_session_resume_opts *opts)
{
    if (opts != NULL && opts->deadline_ns != 0)
        return opts->deadline_ns;
    return r->plan.deadline_s > 0 ? (int64_t)(r->plan.deadline_s * 1e9) + 1 : 0;
}

static int load_cut(struct kvt_resume *r, const struct kvt_session_resume_opts *opts)
{
    struct kvt_session_mgr *mgr = r->mgr;
    /* beside the engine: they are of use as long as it computes */
    int64_t late = opts != NULL && opts->deadline_ns != 0 ? opts->deadline_ns
                   : r->plan.deadline_s > 0               ? (int64_t)(r->plan.recompute_s * 1e9) + 1
                                                          : 0;
    for (uint32_t i = r->c; i < r->b; i++)
        mgr->keys[i - r->c] = kvt_session_key(mgr, 0, r->s->hash[i]);
    r->s->load_from = r->c;
    r->s->load_to = r->b;
    r->s->load_s = r->plan.load_s / (r->b - r->c);
    return kvt_session_meet_begin(mgr, r->s, mgr->keys, late);
}

static int load_group(struct kvt_resume *r, uint32_t g, int64_t deadline_ns)
{
    struct kvt_session_mgr *mgr = r->mgr;
    struct kvt_session *s = r->s;
    struct kvt_load_opts opts = {.struct_size = sizeof(opts), .deadline_ns = deadline_ns};
    uint32_t n = 0, *ids = mgr->path;
    for (uint32_t i = s->from[g]; i < r->b; i++) {
        if (*kvt_session_got(mgr, s, g, i) != KVT_SGOT_WANTED)
            continue;
        mgr->keys[n] = kvt_session_key(mgr, g, s->hash[i]);
        ids[n++] = *kvt_session_page(mgr, s, g, i);
    }
    if (n == 0)
        return 0;
    struct kvt_sjob *job = kvt_sjob_take(mgr, KVT_SJOB_RESTORE);
    if (job == NULL)
        return -EAGAIN;
    int rc = kvt_load(mgr->ns, mgr->pool, mgr->keys, ids, n, &opts, &job->req);
    if (rc != 0) {
        kvt_sjob_put(mgr, job);
        return rc;
    }
    job->session = (uint32_t)(s - mgr->sessions);
    job->group = g;
    s->restore_job[g] = (uint32_t)(job - mgr->jobs);
    s->loads++;
    return 0;
}

/* One load for each group. What one group cannot be asked for after another has been is as if it
 * had not come. */
static int load(struct kvt_resume *r, const struct kvt_session_resume_opts *opts)
{
    struct kvt_session_mgr *mgr = r->mgr;
    int rc = 0;
    r->s->loads = 0;
    if (r->c > r->a)
        return load_cut(r, opts);
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        rc = load_group(r, g, deadline(r, opts));
        if (rc == 0)
            continue;
        mgr->stats.refused_busy += rc == -EAGAIN;
        if (r->s->loads == 0)
            return rc;
        r->refused = rc;
        for (uint32_t i = r->s->from[g]; i < r->b; i++)
            if (*kvt_session_got(mgr, r->s, g, i) == KVT_SGOT_WANTED)
                *kvt_session_got(mgr, r->s, g, i) = KVT_SGOT_OWN;
    }
    return 0;
}

/* ---- the call ------------------------------------------------------------------------------ */

static void planned(struct kvt_resume *r)
{
    struct kvt_session_mgr *mgr = r->mgr;
    struct kvt_session *s = r->s;
    uint32_t unit = mgr->block_tokens;
    bool tail = r->tail && r->b == r->before;
    s->tail_filled = tail ? s->filled : 0;
    s->plan = (struct kvt_session_plan){.struct_size = sizeof(s->plan),
                                        .tokens = r->total,
                                        .in_l0 = r->a * unit,
                                        .from_dram = (r->b - r->c - r->disk) * unit,
                                        .from_disk = r->disk * unit,
                                        .reason = r->refused,
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
    s->got_disk = 0;
    mgr->stats.blocks_l0 += r->a;
    if (r->a > r->before)
        mgr->stats.shared += r->a - r->before;
}

static int resume(struct kvt_session_mgr *mgr, struct kvt_session *s, const uint32_t *tokens,
                  size_t n, const struct kvt_session_resume_opts *opts)
{
    struct kvt_resume r = {.mgr = mgr, .s = s, .before = s->blocks};
    if (s->state != KVT_SESSION_IDLE)
        return KVT_E_STATE;
    int rc = kvt_session_put_tokens(mgr, s, tokens, n);
    if (rc != 0)
        return rc;
    r.total = s->tokens + (uint32_t)n;
    r.blocks = kvt_session_blocks_of(mgr, r.total);
    kvt_resume_find(&r,
                    n > 0 ? (uint32_t)kvt_usable_blocks(mgr->block_tokens, r.total)
                          : r.total / mgr->block_tokens,
                    opts);
    rc = claim(&r);
    if (rc == KVT_E_LIMIT && let_go_behind(&r))
        rc = claim(&r);
    if (rc != 0)
        return rc;
    if (r.b > r.a) {
        rc = load(&r, opts);
        if (rc != 0) {
            give_pages(&r);
            deactivate(&r);
            return rc;
        }
    }
    planned(&r);
    kvt_session_drop_tail(mgr, s, !r.tail);
    if (s->chunk_count == 0 && s->loads == 0)
        kvt_session_landed(mgr, s);
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

/* Wait for one load after the other. Entered and left with the lock, but for an error. */
static int wait_for_loads(struct kvt_session_mgr *mgr, kvt_session_id id, struct kvt_session **s,
                          int64_t timeout_ns)
{
    const struct kvt_clock *clock = &mgr->ns->cache->clock;
    int64_t begun = kvt_clock_now(clock), left = timeout_ns;
    while ((*s)->state == KVT_SESSION_RESTORING && (*s)->loads > 0) {
        int rc = kvt_sjob_wait(mgr, kvt_session_a_load(mgr, *s), left);
        pthread_mutex_unlock(&mgr->lock);
        if (rc < 0)
            return rc;
        *s = kvt_session_enter(mgr, id, &rc); /* notes the end */
        if (*s == NULL)
            return rc;
        if (timeout_ns > 0) {
            left = timeout_ns - (kvt_clock_now(clock) - begun);
            if (left <= 0)
                break;
        }
    }
    return 0;
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
        rc = wait_for_loads(mgr, id, &s, timeout_ns);
        if (rc < 0)
            return rc;
    }
    rc = s->state != KVT_SESSION_RESTORING;
    pthread_mutex_unlock(&mgr->lock);
    return rc;
}
