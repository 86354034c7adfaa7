/* The session manager as a whole: open and close, work, flush.
 *
 * All memory but that of sessions is taken at open. Threads: any; kvt_session_mgr_close() alone.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "client/misuse.h"
#include "client/session_internal.h"

/* ---- pages are one manager's --------------------------------------------------------------- */

/* The first page of the group that both have, or KVT_NONE. */
static uint32_t overlap(const struct kvt_sgroup *a, const struct kvt_sgroup *b)
{
    uint32_t first = KVT_MAX(a->first_page, b->first_page);
    return first < a->first_page + a->page_count && first < b->first_page + b->page_count
               ? first
               : KVT_NONE;
}

static void say_taken(const struct kvt_session_mgr *mgr, uint32_t g, struct kvt_sgroup other)
{
    const struct kvt_sgroup *group = &mgr->groups[g];
    uint32_t end =
        KVT_MIN(group->first_page + group->page_count, other.first_page + other.page_count);
    char which[32] = "";
    if (mgr->group_count > 1)
        (void)snprintf(which, sizeof(which), " (group %u)", (unsigned)group->shape->group);
    kvt_misuse_say(mgr->ns->cache, KVT_LOG_WARN, "kvt_session_mgr_open",
                   "pages %" PRIu32 " to %" PRIu32 " of the pool%s belong to another session "
                   "manager (it owns %" PRIu32 " to %" PRIu32 "): give each its own first_page and "
                   "page_count, or close the other one first",
                   overlap(group, &other), end - 1, which, other.first_page,
                   other.first_page + other.page_count - 1);
}

/* Two managers that hand out the same page would write over each other's blocks. */
static int claim_pages(struct kvt_session_mgr *mgr)
{
    struct kvt_cache *cache = mgr->ns->cache;
    struct kvt_sgroup theirs = {0};
    uint32_t taken = KVT_NONE;
    pthread_mutex_lock(&cache->lock);
    for (const struct kvt_session_mgr *other = mgr->pool->managers;
         other != NULL && taken == KVT_NONE; other = other->pool_next)
        for (uint32_t g = 0; g < mgr->group_count && taken == KVT_NONE; g++)
            if (overlap(&mgr->groups[g], &other->groups[g]) != KVT_NONE) {
                taken = g;
                theirs = other->groups[g];
            }
    if (taken == KVT_NONE) {
        mgr->pool_next = mgr->pool->managers;
        mgr->pool->managers = mgr;
    }
    pthread_mutex_unlock(&cache->lock);
    if (taken == KVT_NONE)
        return 0;
    say_taken(mgr, taken, theirs);
    return KVT_E_INVAL;
}

static void give_up_pages(struct kvt_session_mgr *mgr)
{
    struct kvt_cache *cache = mgr->ns->cache;
    struct kvt_session_mgr **link = &mgr->pool->managers;
    pthread_mutex_lock(&cache->lock);
    while (*link != mgr)
        link = &(*link)->pool_next;
    *link = mgr->pool_next;
    pthread_mutex_unlock(&cache->lock);
}

/* ---- open and close ------------------------------------------------------------------------ */

static void memory_free(struct kvt_session_mgr *mgr)
{
    free(mgr->nodes);
    free(mgr->cells);
    free(mgr->buckets);
    for (uint32_t g = 0; g < mgr->group_count; g++)
        free(mgr->groups[g].page_stack);
    free(mgr->sessions);
    free(mgr->keys);
    free(mgr->path);
    free(mgr->tiers);
    free(mgr->plan_tiers);
    free(mgr->roots);
    free(mgr);
}

static int memory_make(struct kvt_session_mgr *mgr)
{
    size_t groups = mgr->group_count, blocks = mgr->session_blocks;
    uint32_t buckets = 64;
    bool all = true;
    while (buckets < mgr->node_max)
        buckets *= 2;
    mgr->bucket_mask = buckets - 1;
    mgr->nodes = calloc(mgr->node_max, sizeof(*mgr->nodes));
    mgr->cells = calloc(mgr->node_max * groups, sizeof(*mgr->cells));
    mgr->buckets = malloc(buckets * sizeof(*mgr->buckets));
    for (uint32_t g = 0; g < groups; g++) {
        struct kvt_sgroup *group = &mgr->groups[g];
        group->page_stack = calloc(group->page_count, sizeof(*group->page_stack));
        all = all && group->page_stack != NULL;
    }
    mgr->sessions = calloc(mgr->opts.sessions_max, sizeof(*mgr->sessions));
    mgr->keys = calloc(blocks, sizeof(*mgr->keys));
    mgr->path = calloc(blocks, sizeof(*mgr->path));
    mgr->tiers = calloc(blocks * groups, sizeof(*mgr->tiers));
    mgr->plan_tiers = calloc(blocks, sizeof(*mgr->plan_tiers));
    mgr->roots = calloc(blocks, sizeof(*mgr->roots));
    if (!all || !mgr->nodes || !mgr->cells || !mgr->buckets || !mgr->sessions || !mgr->keys ||
        !mgr->path || !mgr->tiers || !mgr->plan_tiers || !mgr->roots)
        return -ENOMEM;
    memset(mgr->buckets, 0xff, buckets * sizeof(*mgr->buckets)); /* KVT_NONE */
    return 0;
}

static void pages_init(struct kvt_sgroup *group)
{
    uint32_t end = group->first_page + group->page_count;
    group->oldest = group->newest = group->cool_head = group->cool_tail = KVT_NONE;
    while (group->scratch_free < group->scratch_pages)
        group->scratch[group->scratch_free++] = --end;
    while (end > group->first_page) /* the lowest is taken first */
        kvt_spage_put(group, --end);
}

int kvt_session_mgr_open(struct kvt_ns *ns, struct kvt_pool *pool,
                         const struct kvt_session_mgr_opts *opts, struct kvt_session_mgr **out)
{
    if (ns == NULL || pool == NULL || out == NULL)
        return KVT_E_INVAL;
    if (kvt_cache_forked(ns->cache))
        return KVT_E_CLOSED;
    struct kvt_session_mgr *mgr = calloc(1, sizeof(*mgr));
    if (mgr == NULL)
        return -ENOMEM;
    mgr->ns = ns;
    mgr->pool = pool;
    int rc = kvt_session_opts_read(opts, ns, pool, mgr);
    if (rc == 0)
        rc = memory_make(mgr);
    if (rc == 0)
        rc = claim_pages(mgr);
    if (rc != 0) {
        memory_free(mgr);
        return rc;
    }
    for (uint32_t g = 0; g < mgr->group_count; g++)
        pages_init(&mgr->groups[g]);
    kvt_sjobs_init(mgr);
    pthread_mutex_init(&mgr->lock, NULL);
    *out = mgr;
    return 0;
}

static struct kvt_sjob *any_job(struct kvt_session_mgr *mgr)
{
    for (uint32_t i = 0; i < KVT_SESSION_JOBS; i++)
        if (mgr->jobs[i].kind != KVT_SJOB_FREE && !mgr->jobs[i].ended)
            return &mgr->jobs[i];
    return NULL;
}

void kvt_session_mgr_close(struct kvt_session_mgr *mgr)
{
    struct kvt_sjob *job;
    if (mgr == NULL || kvt_cache_forked(mgr->ns->cache))
        return;
    for (uint32_t i = 0; i < mgr->opts.sessions_max; i++)
        if (mgr->sessions[i].state != 0)
            (void)kvt_session_close(mgr, (uint64_t)mgr->sessions[i].generation << 32 | (i + 1));
    pthread_mutex_lock(&mgr->lock);
    while ((job = any_job(mgr)) != NULL) {
        (void)kvt_sjob_wait(mgr, job, -1);
        (void)kvt_session_poll(mgr);
    }
    kvt_session_publish(mgr);
    pthread_mutex_unlock(&mgr->lock);
    give_up_pages(mgr);
    pthread_mutex_destroy(&mgr->lock);
    memory_free(mgr);
}

/* ---- work ---------------------------------------------------------------------------------- */

long kvt_session_mgr_work(struct kvt_session_mgr *mgr, int64_t timeout_ns)
{
    if (mgr == NULL)
        return KVT_E_INVAL;
    if (kvt_cache_forked(mgr->ns->cache))
        return KVT_E_CLOSED;
    pthread_mutex_lock(&mgr->lock);
    uint32_t ended = kvt_session_poll(mgr);
    kvt_session_cool(mgr, true);
    struct kvt_sjob *job = any_job(mgr);
    if (ended == 0 && job != NULL && timeout_ns != 0) {
        (void)kvt_sjob_wait(mgr, job, timeout_ns);
        (void)kvt_session_poll(mgr);
        kvt_session_cool(mgr, true);
    }
    long left = (long)mgr->jobs_used + (long)mgr->cool_count;
    pthread_mutex_unlock(&mgr->lock);
    return left;
}

/* Begin to store what of a session is not stored. Returns how many blocks are not, and could be. */
static uint32_t save_session(struct kvt_session_mgr *mgr, const struct kvt_session *s)
{
    uint32_t left = 0;
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        for (uint32_t b = s->state == 0 ? 0 : s->blocks; b-- > s->from[g];) {
            uint32_t at = kvt_scell_of(mgr, s->node[b], g);
            const struct kvt_scell *cell = &mgr->cells[at];
            (void)kvt_session_save_chain(mgr, at); /* again when something has ended */
            left += mgr->nodes[s->node[b]].stored && cell->record == KVT_SESSION_RECORD_NONE &&
                    cell->page != KVT_NONE;
        }
    }
    return left;
}

static uint32_t save_all(struct kvt_session_mgr *mgr)
{
    uint32_t left = 0;
    kvt_session_cool(mgr, true);
    for (uint32_t i = 0; i < mgr->opts.sessions_max; i++)
        left += save_session(mgr, &mgr->sessions[i]);
    return left;
}

int kvt_session_mgr_flush(struct kvt_session_mgr *mgr)
{
    struct kvt_sjob *job;
    if (mgr == NULL)
        return KVT_E_INVAL;
    if (kvt_cache_forked(mgr->ns->cache))
        return KVT_E_CLOSED;
    pthread_mutex_lock(&mgr->lock);
    (void)kvt_session_poll(mgr);
    uint32_t left = save_all(mgr);
    while ((job = any_job(mgr)) != NULL) {
        (void)kvt_sjob_wait(mgr, job, -1);
        (void)kvt_session_poll(mgr);
        left = save_all(mgr);
    }
    pthread_mutex_unlock(&mgr->lock);
    int rc = kvt_flush(mgr->ns->cache);
    return rc == 0 && left > 0 ? KVT_E_DROPPED : rc;
}
