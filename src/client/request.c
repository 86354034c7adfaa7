/* Requests: acceptance of stores and loads, waiting, cancelling, outcomes.
 *
 * Request objects and block entries come from arrays made at open; entries of one request are
 * contiguous, so its statuses are one array. Acceptance is three steps: take (lock), fill (no lock:
 * nobody else knows the request), submit (lock). A refused call leaves nothing behind.
 * Threads: any. Only kvt_req_wait() and kvt_req_free() block.
 */
#include <assert.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "base/checked.h"
#include "client/coding.h"
#include "client/gpu_lane.h"
#include "client/misuse.h"

/* ---- acceptance ---------------------------------------------------------------------------- */

struct ask { /* the arguments that loads and stores share */
    struct kvt_ns *ns;
    struct kvt_pool *pool;
    const struct kvt_key *keys;
    const uint32_t *ids;
    size_t n;
    int kind;
};

static int ask_check(const struct ask *ask)
{
    if (ask->ns == NULL || ask->pool == NULL || ask->ns->cache != ask->pool->cache ||
        ((ask->keys == NULL || ask->ids == NULL) && ask->n != 0))
        return KVT_E_INVAL;
    if (ask->n > ask->ns->cache->settings->request_blocks_max)
        return KVT_E_LIMIT;
    if (ask->ns->shape != ask->pool->shape)
        return KVT_E_LAYOUT;
    for (size_t i = 0; i < ask->n; i++)
        if (ask->ids[i] >= ask->pool->desc.block_count)
            return KVT_E_INVAL;
    return kvt_keys_ok(ask->ns, ask->keys, ask->n, true) ? 0 : KVT_E_INVAL;
}

static int req_take(const struct ask *ask, struct kvt_req **out)
{
    struct kvt_cache *cache = ask->ns->cache;
    int rc = kvt_cache_enter_live(cache);
    if (rc != 0)
        return rc;
    struct kvt_req *req = TAILQ_FIRST(&cache->free_reqs);
    uint32_t first = req == NULL ? KVT_NONE : kvt_entries_take(cache, (uint32_t)ask->n);
    if (first == KVT_NONE) {
        cache->counters.refused_again++;
        pthread_mutex_unlock(&cache->lock);
        return -EAGAIN;
    }
    TAILQ_REMOVE(&cache->free_reqs, req, list);
    cache->held_count++;
    req->state = KVT_R_FILLING;
    req->ns = ask->ns;
    req->pool = ask->pool;
    req->group = ask->n > 0 ? kvt_ns_group_index(ask->ns, ask->keys[0].group) : 0;
    req->kind = (uint8_t)ask->kind;
    req->min_level = 0;
    req->asking = false;
    req->cool = false;
    req->first = first;
    req->n = (uint32_t)ask->n;
    req->cursor = req->done = 0;
    req->first_pos = 0;
    memset(&req->parent, 0, sizeof(req->parent));
    memset(&req->report, 0, sizeof(req->report));
    memset(req->roots, 0, sizeof(req->roots));
    req->deadline_ns = INT64_MAX;
    req->elapsed_ns = 0;
    req->gpu_wait = KVT_WAIT_NONE;
    req->gpu_event = NULL;
    req->layers = false;
    req->layers_ready = req->next_layer = 0;
    atomic_store_explicit(&req->canceled, 0, memory_order_relaxed);
    cache->callers++; /* until submit */
    ask->ns->refs++;
    ask->pool->refs++;
    pthread_mutex_unlock(&cache->lock);
    *out = req;
    return 0;
}

static void key_copy(struct kvt_key *out, const struct kvt_key *key)
{
    memset(out, 0, sizeof(*out));
    memcpy(out->hash, key->hash, key->hash_len);
    out->hash_len = key->hash_len;
    out->group = key->group;
    out->shard = key->shard;
}

static void req_fill(struct kvt_req *req, const struct ask *ask)
{
    struct kvt_block *blocks = &req->cache->blocks[req->first];
    req->start_ns = kvt_clock_now(&req->cache->clock);
    for (uint32_t i = 0; i < req->n; i++) {
        struct kvt_block *block = &blocks[i];
        memset(block, 0, sizeof(*block));
        key_copy(&block->key, &ask->keys[i]);
        block->page = ask->ids[i];
        block->next = KVT_NONE;
        block->req = req->index;
        block->state = KVT_B_QUEUED;
    }
}

static void count_off(struct kvt_cache *cache, const struct kvt_req *req)
{
    if (req->kind == KVT_REQ_LOAD)
        cache->counters.off_load += req->n;
    else
        cache->counters.off_store += req->n;
}

static void req_submit(struct kvt_req *req)
{
    struct kvt_cache *cache = req->cache;
    pthread_mutex_lock(&cache->lock);
    cache->callers--;
    if (req->kind == KVT_REQ_LOAD) {
        cache->counters.load_requests++;
        kvt_planning_submit(cache, req);
    } else {
        cache->counters.store_requests++;
    }
    req->state = KVT_R_ACTIVE;
    TAILQ_INSERT_TAIL(&cache->active, req, list);
    cache->active_count++;
    bool on = atomic_load_explicit(&cache->enabled, memory_order_relaxed) != 0;
    if (req->n == 0) {
        kvt_engine_complete(cache, req);
    } else if (!on) {
        count_off(cache, req);
        kvt_engine_end_unasked(cache, req, KVT_E_MISS);
    } else if (cache->settings->shadow && req->kind == KVT_REQ_LOAD) {
        cache->counters.shadow_loads += req->n;
        kvt_engine_end_unasked(cache, req, KVT_E_MISS);
    } else if (cache->closing || (cache->broken && !cache->remote)) {
        kvt_engine_end_unasked(cache, req, KVT_E_CLOSED);
    } else if (cache->broken || kvt_req_handle(req) == 0) { /* no daemon, or it refused this one */
        cache->counters.daemon_blocks += req->n;
        kvt_engine_end_unasked(cache, req, KVT_E_MISS);
    } else if (kvt_lane_offline(req->pool)) {
        cache->counters.gpu_failed_blocks += req->n;
        kvt_engine_end_unasked(cache, req, KVT_E_DEVICE);
    } else {
        TAILQ_INSERT_TAIL(&cache->asking[req->kind], req, asklist);
        req->asking = true;
        kvt_pump(cache);
    }
    pthread_mutex_unlock(&cache->lock);
}

static int refuse(const struct ask *ask, const struct kvt_store_opts *store,
                  const struct kvt_load_opts *load, int code)
{
    struct kvt_cache *cache = ask->ns->cache;
    const struct kvt_misuse_request misuse = {ask->kind == KVT_REQ_STORE ? "kvt_store" : "kvt_load",
                                              ask->ns,
                                              ask->pool,
                                              ask->keys,
                                              ask->ids,
                                              ask->n,
                                              store,
                                              load};
    if (kvt_cache_enter(cache) != 0)
        return KVT_E_CLOSED;
    cache->counters.refused_bad++;
    pthread_mutex_unlock(&cache->lock);
    kvt_misuse_request(&misuse, code);
    return code;
}

/* ---- stores and loads ---------------------------------------------------------------------- */

/* A request that was taken and shall not be: nobody knows it yet. */
static void req_untake(struct kvt_req *req)
{
    struct kvt_cache *cache = req->cache;
    pthread_mutex_lock(&cache->lock);
    cache->callers--;
    req->ns->refs--;
    req->pool->refs--;
    kvt_req_put(cache, req);
    pthread_cond_broadcast(&cache->idle);
    pthread_mutex_unlock(&cache->lock);
}

static int wait_check(const struct kvt_pool *pool, int wait)
{
    if (wait < KVT_WAIT_FOR_NOTHING || wait > KVT_WAIT_FOR_EVENT)
        return KVT_E_INVAL;
    return wait != KVT_WAIT_FOR_NOTHING && pool->gpu == NULL ? KVT_E_INVAL : 0;
}

/* The options as this version knows them: a caller's shorter struct is filled up with zeroes. */
static int store_opts_read(const struct kvt_store_opts *from, struct kvt_store_opts *opts)
{
    static_assert(offsetof(struct kvt_store_opts, cool) <= KVT_STORE_OPTS_SIZE_0 &&
                      sizeof(struct kvt_store_opts) > KVT_STORE_OPTS_SIZE_0,
                  "the first version ended there");
    memset(opts, 0, sizeof(*opts));
    opts->struct_size = sizeof(*opts);
    if (from == NULL)
        return 0;
    if (from->struct_size == sizeof(*opts))
        *opts = *from;
    else if (from->struct_size == KVT_STORE_OPTS_SIZE_0)
        memcpy(opts, from, offsetof(struct kvt_store_opts, cool));
    else
        return KVT_E_VERSION;
    opts->struct_size = sizeof(*opts);
    return 0;
}

static int store_opts_check(const struct ask *ask, const struct kvt_store_opts *opts)
{
    const struct kvt_shape_group *group =
        &ask->ns->shape->groups[ask->n > 0 ? kvt_ns_group_index(ask->ns, ask->keys[0].group) : 0];
    if (opts->level < KVT_LEVEL_DEFAULT || opts->level > KVT_LEVEL_RAW)
        return KVT_E_INVAL;
    if (opts->level != KVT_LEVEL_DEFAULT && group->uniform[opts->level] == NULL)
        return KVT_E_UNSUPPORTED;
    if (opts->write < KVT_WRITE_DEFAULT || opts->write > KVT_WRITE_AUTO)
        return KVT_E_INVAL;
    if (opts->parent != NULL && opts->first_pos == 0)
        return KVT_E_INVAL;
    if (opts->first_pos % group->block_tokens != 0)
        return KVT_E_INVAL;
    if (opts->parent != NULL &&
        (!kvt_keys_ok(ask->ns, opts->parent, 1, true) || opts->parent->group != group->group))
        return KVT_E_INVAL;
    uint64_t end = opts->first_pos + (uint64_t)ask->n * group->block_tokens;
    return end <= UINT32_MAX ? 0 : KVT_E_INVAL;
}

/* The level each block is stored at: exact ones and the first of a sequence raw, pages of lossy
 * origin at kv8 at best, the others as asked. */
static void set_levels(struct kvt_req *req, const struct kvt_store_opts *opts)
{
    struct kvt_block *blocks = &req->cache->blocks[req->first];
    int wanted = opts->level != KVT_LEVEL_DEFAULT ? opts->level : req->cache->settings->level;
    if (opts->exact || kvt_req_group(req)->uniform[wanted] == NULL)
        wanted = KVT_LEVEL_RAW;
    for (uint32_t i = 0; i < req->n; i++) {
        int level = i == 0 && opts->first_pos == 0 ? KVT_LEVEL_RAW : wanted;
        uint8_t origin =
            atomic_load_explicit(kvt_req_origin(req, blocks[i].page), memory_order_relaxed);
        /* A page of lossy origin is coded again only to cool from kv8. */
        blocks[i].recode = req->cool && origin == KVT_LEVEL_KV8 && level < KVT_LEVEL_KV8;
        if (origin != 0 && !blocks[i].recode) {
            blocks[i].lossy = 1;
            level = KVT_LEVEL_KV8;
        }
        kvt_coding_map(req, &blocks[i], level);
    }
}

int kvt_store(struct kvt_ns *ns, struct kvt_pool *pool, const struct kvt_key *keys,
              const uint32_t *ids, size_t n, const struct kvt_store_opts *opts,
              struct kvt_req **out)
{
    struct kvt_store_opts use;
    struct ask ask = {ns, pool, keys, ids, n, KVT_REQ_STORE};
    struct kvt_req *req;
    if (ns == NULL || out == NULL)
        return KVT_E_INVAL;
    int rc = ask_check(&ask);
    if (rc == 0)
        rc = store_opts_read(opts, &use);
    if (rc == 0)
        rc = store_opts_check(&ask, &use);
    if (rc == 0)
        rc = wait_check(pool, use.wait);
    if (rc != 0)
        return refuse(&ask, &use, NULL, rc);
    rc = req_take(&ask, &req);
    if (rc != 0)
        return rc;
    req_fill(req, &ask);
    rc = kvt_lane_wait_for(req, use.wait, use.wait_for);
    if (rc != 0) {
        req_untake(req);
        return rc;
    }
    req->first_pos = use.first_pos;
    req->cool = use.cool != 0;
    req->write = (uint8_t)use.write;
    if (use.parent != NULL)
        key_copy(&req->parent, use.parent);
    set_levels(req, &use);
    *out = req;
    req_submit(req);
    if (atomic_load_explicit(&ns->news, memory_order_relaxed)) /* looked at again there */
        kvt_choice_save(ns, false);
    return 0;
}

static int load_opts_read(const struct kvt_load_opts *from, struct kvt_load_opts *opts)
{
    static_assert(offsetof(struct kvt_load_opts, wait) <= KVT_LOAD_OPTS_SIZE_0 &&
                      offsetof(struct kvt_load_opts, layers) == KVT_LOAD_OPTS_SIZE_1,
                  "earlier versions ended there");
    memset(opts, 0, sizeof(*opts));
    if (from == NULL)
        return 0;
    if (from->struct_size == sizeof(*opts))
        *opts = *from;
    else if (from->struct_size == KVT_LOAD_OPTS_SIZE_0)
        memcpy(opts, from, offsetof(struct kvt_load_opts, wait));
    else if (from->struct_size == KVT_LOAD_OPTS_SIZE_1)
        memcpy(opts, from, offsetof(struct kvt_load_opts, layers));
    else
        return KVT_E_VERSION;
    return 0;
}

static int64_t deadline_at(const struct kvt_req *req, int64_t from_now)
{
    int64_t at;
    if (from_now == 0 && req->cache->settings->load_deadline != KVT_AUTO)
        from_now = (int64_t)req->cache->settings->load_deadline;
    if (from_now <= 0 || !kvt_add_ok(req->start_ns, from_now, &at))
        return INT64_MAX;
    return at;
}

int kvt_load(struct kvt_ns *ns, struct kvt_pool *pool, const struct kvt_key *keys,
             const uint32_t *ids, size_t n, const struct kvt_load_opts *opts, struct kvt_req **out)
{
    struct kvt_load_opts use;
    struct ask ask = {ns, pool, keys, ids, n, KVT_REQ_LOAD};
    struct kvt_req *req;
    if (ns == NULL || out == NULL)
        return KVT_E_INVAL;
    int rc = ask_check(&ask);
    if (rc == 0)
        rc = load_opts_read(opts, &use);
    if (rc == 0 && (use.min_level < KVT_LEVEL_DEFAULT || use.min_level > KVT_LEVEL_RAW))
        rc = KVT_E_INVAL;
    if (rc == 0 && ((use.layers != 0 && use.layers != 1) || use.reserved != 0))
        rc = KVT_E_INVAL;
    if (rc == 0)
        rc = wait_check(pool, use.wait);
    if (rc != 0)
        return refuse(&ask, NULL, opts, rc);
    rc = req_take(&ask, &req);
    if (rc != 0)
        return rc;
    req_fill(req, &ask);
    rc = kvt_lane_wait_for(req, use.wait, use.wait_for);
    if (rc != 0) {
        req_untake(req);
        return rc;
    }
    req->deadline_ns = deadline_at(req, use.deadline_ns);
    req->min_level = (uint8_t)use.min_level;
    req->layers = use.layers != 0 && pool->gpu != NULL;
    *out = req;
    req_submit(req);
    return 0;
}

/* ---- after acceptance ---------------------------------------------------------------------- */

static struct timespec after(const struct kvt_cache *cache, int64_t timeout_ns)
{
    int64_t now = kvt_clock_now(&cache->clock), at;
    if (!kvt_add_ok(now, timeout_ns, &at))
        at = INT64_MAX;
    return (struct timespec){.tv_sec = at / 1000000000, .tv_nsec = at % 1000000000};
}

/* Whether everything before `next` of a request by layers is in its pages. */
static bool is_there(const struct kvt_req *req, uint32_t layer)
{
    return req->state == KVT_R_COMPLETE || req->state == KVT_R_FREE || req->next_layer > layer;
}

int kvt_req_wait(struct kvt_req *req, int64_t timeout_ns)
{
    return kvt_req_wait_layer(req, UINT32_MAX, timeout_ns);
}

int kvt_req_wait_layer(struct kvt_req *req, uint32_t layer, int64_t timeout_ns)
{
    if (req == NULL)
        return KVT_E_INVAL;
    struct kvt_cache *cache = req->cache;
    if (kvt_cache_forked(cache))
        return KVT_E_CLOSED;
    struct timespec until = {0};
    if (timeout_ns > 0)
        until = after(cache, timeout_ns);
    pthread_mutex_lock(&cache->lock);
    cache->callers++;
    int rc = 0;
    while (!is_there(req, layer) && timeout_ns != 0 && rc == 0)
        rc = timeout_ns < 0 ? pthread_cond_wait(&req->cond, &cache->lock)
                            : pthread_cond_timedwait(&req->cond, &cache->lock, &until);
    int complete = req->state == KVT_R_FREE ? KVT_E_INVAL : is_there(req, layer);
    cache->callers--;
    if (cache->closing)
        pthread_cond_broadcast(&cache->idle);
    pthread_mutex_unlock(&cache->lock);
    return complete;
}

static void cancel_locked(struct kvt_cache *cache, struct kvt_req *req)
{
    if (req->state != KVT_R_ACTIVE || atomic_load_explicit(&req->canceled, memory_order_relaxed))
        return;
    atomic_store_explicit(&req->canceled, 1, memory_order_relaxed);
    cache->counters.canceled++;
    for (uint32_t i = 0; i < KVT_FLIGHTS_MAX; i++) {
        struct kvt_flight *flight = &cache->flights[i];
        if (flight->op == KVT_OP_ACQUIRE && flight->req == req->index && !flight->cancel_wanted) {
            flight->cancel_wanted = true;
            cache->cancels_wanted++;
        }
    }
    kvt_engine_end_unasked(cache, req, KVT_E_CANCELED); /* may complete it */
    kvt_pump(cache);
}

void kvt_req_cancel(struct kvt_req *req)
{
    if (req == NULL || kvt_cache_forked(req->cache))
        return;
    pthread_mutex_lock(&req->cache->lock);
    cancel_locked(req->cache, req);
    pthread_mutex_unlock(&req->cache->lock);
}

void kvt_requests_cancel_all(struct kvt_cache *cache)
{
    for (size_t i = 0; i < cache->settings->requests_max; i++)
        cancel_locked(cache, &cache->requests[i]);
}

const int32_t *kvt_req_status(const struct kvt_req *req, size_t *n)
{
    if (n != NULL)
        *n = req->n;
    return &req->cache->statuses[req->first];
}

static_assert(offsetof(struct kvt_req_report, blocks_remote) == KVT_REQ_REPORT_SIZE_0,
              "what old callers have");

int kvt_req_report(const struct kvt_req *req, struct kvt_req_report *report)
{
    if (req == NULL || report == NULL)
        return KVT_E_INVAL;
    const size_t size = report->struct_size;
    if (size != sizeof(*report) && size != KVT_REQ_REPORT_SIZE_0)
        return KVT_E_VERSION;
    if (kvt_cache_forked(req->cache))
        return KVT_E_CLOSED;
    pthread_mutex_lock(&req->cache->lock);
    int rc = req->state == KVT_R_COMPLETE ? 0 : -EAGAIN;
    if (rc == 0)
        memcpy(report, &req->report, size);
    if (rc == 0 && size == KVT_REQ_REPORT_SIZE_0)
        report->blocks_disk += req->report.blocks_remote;
    report->struct_size = size;
    pthread_mutex_unlock(&req->cache->lock);
    return rc;
}

void kvt_req_free(struct kvt_req *req)
{
    if (req == NULL || kvt_cache_forked(req->cache))
        return;
    struct kvt_cache *cache = req->cache;
    (void)kvt_req_wait(req, -1);
    pthread_mutex_lock(&cache->lock);
    bool again = req->state == KVT_R_FREE;
    if (req->state == KVT_R_COMPLETE)
        kvt_req_put(cache, req);
    cache->counters.freed_twice += again;
    pthread_mutex_unlock(&cache->lock);
    if (again)
        kvt_log(&cache->log, KVT_LOG_ERROR,
                "kvt_req_free: the request has been freed already: free each one once");
}

size_t kvt_usable_blocks(uint32_t block_tokens, size_t n_tokens)
{
    return block_tokens == 0 || n_tokens == 0 ? 0 : (n_tokens - 1) / block_tokens;
}
