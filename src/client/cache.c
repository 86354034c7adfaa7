/* Opening and closing a cache: arena, roots, store, owner thread, connection, our threads.
 *
 * Everything that the data path uses is allocated here. Closing goes backwards: requests are
 * cancelled and waited for, threads joined, the store writes what is queued, files close.
 * A forked child owns none of this: its calls are refused, its exit disturbs nothing.
 * Threads: kvt_open() and kvt_close() from any one thread; no call may follow kvt_close().
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "client/gpu_lane.h"

#define CLOSE_TIMEOUT_NS INT64_C(30000000000)
#define ALLOC_WINDOW_MAX (UINT64_C(64) << 20) /* record bytes being encoded at a time */

bool kvt_cache_forked(const struct kvt_cache *cache)
{
    return cache->pid != getpid();
}

int kvt_cache_enter(struct kvt_cache *cache)
{
    if (kvt_cache_forked(cache))
        return KVT_E_CLOSED;
    pthread_mutex_lock(&cache->lock);
    if (!cache->closing)
        return 0;
    pthread_mutex_unlock(&cache->lock);
    return KVT_E_CLOSED;
}

int kvt_cache_enter_live(struct kvt_cache *cache)
{
    int rc = kvt_cache_enter(cache);
    if (rc != 0 || !cache->broken)
        return rc;
    pthread_mutex_unlock(&cache->lock);
    return KVT_E_CLOSED;
}

/* pin=required: in memory before the cache is open, or no cache. Without a device, auto pins
 * nothing: locked memory is a scarce right that a CPU gains little from. */
static int arena_pin(struct kvt_cache *cache, char *error, size_t error_len)
{
    const struct kvt_settings *settings = cache->settings;
    const struct kvt_pin_ops *ops = settings->pin_ops ? settings->pin_ops : kvt_pin_host_ops();
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    char text[400];
    kvt_pin_init(&cache->pin, cache->arena, cache->arena_bytes,
                 cache->arena_bytes >= KVT_HUGE_ARENA_MIN ? KVT_HUGE_BYTES : page, &cache->log);
    if (settings->pin != KVT_PIN_SET_REQUIRED)
        return 0;
    int rc = kvt_pin_now(&cache->pin, ops);
    if (rc == 0)
        return 0;
    kvt_pin_describe(ops->name, cache->arena_bytes, rc, text, sizeof(text));
    (void)snprintf(error, error_len, "pin=required: %s; or set pin=auto", text);
    return rc;
}

static void store_params(struct kvt_cache *cache, struct kvt_store_params *params,
                         uint32_t numbers[KVT_DISKS_MAX])
{
    const struct kvt_settings *settings = cache->settings;
    memset(params, 0, sizeof(*params));
    params->arena = cache->arena;
    params->arena_bytes = cache->arena_bytes;
    params->staging_bytes = KVT_MIN(settings->staging, cache->arena_bytes);
    params->write_queue_bytes = settings->write_queue;
    params->write = settings->write;
    params->admit = settings->admission;
    params->token_s = 1 / (double)settings->plan_prefill;
    params->byte_s = 1 / (double)settings->plan_disk;
    params->pin_bytes_max = settings->pin_max;
    params->scrub_bytes_per_s = settings->scrub == KVT_AUTO ? 0 : settings->scrub;
    params->seed = kvt_rng_seed_os();
    params->clock = cache->clock;
    params->log = cache->log;
    params->reply = kvt_owner_reply;
    params->reply_ctx = cache->owner;
    params->stats_lines = kvt_stats_lines;
    params->stats_ctx = cache;
    for (uint32_t i = 0; i < settings->disk_count; i++) {
        params->roots_pending += cache->roots[i].waiting;
        if (cache->roots[i].io == NULL)
            continue;
        cache->roots[i].number = (int)params->root_count;
        numbers[params->root_count] = i;
        params->roots[params->root_count].io = cache->roots[i].io;
        params->roots[params->root_count].cap_bytes = cache->roots[i].cap_bytes;
        params->roots[params->root_count].files_max = kvt_settings_files(settings);
        params->roots[params->root_count].write_bytes_day =
            kvt_settings_root_writes(settings, cache->roots[i].cap_bytes);
        params->root_count++;
    }
}

/* Open the store; a root whose log cannot be opened is left out, unless it is required. */
static int store_open(struct kvt_cache *cache, char *error, size_t error_len)
{
    struct kvt_store_params params;
    struct kvt_store *store;
    uint32_t numbers[KVT_DISKS_MAX], bad;
    int rc;
    for (;;) {
        bad = KVT_NONE;
        store_params(cache, &params, numbers);
        rc = kvt_store_open(&params, &store, &bad);
        if (rc == 0 || bad >= params.root_count)
            break;
        kvt_roots_drop(cache, numbers[bad], rc, 0);
        if (cache->settings->disk_required) {
            (void)snprintf(error, error_len, "%s", cache->roots[numbers[bad]].state);
            return rc;
        }
        kvt_log(&cache->log, KVT_LOG_WARN, "%s (going on without it)",
                cache->roots[numbers[bad]].state);
    }
    cache->roots_used = params.root_count;
    if (rc == 0) {
        rc = kvt_owner_start(cache->owner, store, &params);
        if (rc != 0)
            kvt_store_close(store, 0);
    }
    return rc;
}

static int locks_init(struct kvt_cache *cache)
{
    pthread_condattr_t attr;
    int rc = pthread_mutex_init(&cache->lock, NULL);
    if (rc == 0)
        rc = pthread_mutex_init(&cache->gpu_lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&cache->idle, &attr);
    pthread_cond_init(&cache->room, &attr);
    pthread_cond_init(&cache->work, &attr);
    pthread_cond_init(&cache->again, &attr);
    pthread_condattr_destroy(&attr);
    return -rc;
}

static void lists_init(struct kvt_cache *cache)
{
    TAILQ_INIT(&cache->free_reqs);
    TAILQ_INIT(&cache->active);
    TAILQ_INIT(&cache->namespaces);
    TAILQ_INIT(&cache->pools);
    for (int kind = 0; kind < 2; kind++) {
        TAILQ_INIT(&cache->asking[kind]);
        kvt_bq_init(&cache->ready[kind]);
        kvt_bq_init(&cache->give_back[kind]);
    }
    kvt_bq_init(&cache->coded);
    kvt_bq_init(&cache->retry);
    for (uint32_t i = 0; i < KVT_FLIGHTS_MAX; i++)
        cache->flights[i].next_free = i + 1 < KVT_FLIGHTS_MAX ? i + 1 : KVT_NONE;
    cache->flight_free = 0;
}

static void settings_log(const struct kvt_cache *cache, int env_applied)
{
    if (env_applied)
        kvt_log(&cache->log, KVT_LOG_INFO, "options of KVTIER_CONFIG are in force");
    if (!cache->settings->enabled)
        kvt_log(&cache->log, KVT_LOG_INFO, "enabled=no: every lookup misses");
}

static int config_take(struct kvt_cache *cache, const struct kvt_config *config, char *error,
                       size_t error_len)
{
    struct kvt_config *copy = NULL;
    int env_applied = 0;
    int rc = config != NULL ? kvt_config_copy(config, &copy) : kvt_config_new(&copy);
    if (rc != 0)
        return rc;
    cache->config = copy;
    cache->settings = &copy->settings;
    cache->log = (struct kvt_log){copy->log_fn, copy->log_arg, KVT_LOG_DEBUG};
    rc = kvt_config_apply_env(copy, &env_applied);
    if (rc == 0)
        rc = kvt_settings_resolve(copy);
    if (rc != 0)
        (void)snprintf(error, error_len, "%s", copy->error);
    else
        settings_log(cache, env_applied);
    return rc;
}

static int threads_start(struct kvt_cache *cache)
{
    int rc = kvt_owner_connect(cache->owner, KVT_CLIENT_RING_BYTES, &cache->channel);
    if (rc != 0)
        return rc;
    cache->connected = true;
    rc = kvt_reply_start(cache);
    if (rc == 0)
        rc = kvt_workers_start(cache);
    return rc != 0 ? rc : kvt_roots_retry_start(cache);
}

/* Undo open, whatever part of it was done. No request is active. */
static void tear_down(struct kvt_cache *cache)
{
    kvt_lanes_close(cache); /* its pins go before the arena does */
    kvt_workers_stop(cache);
    kvt_reply_stop(cache);
    kvt_roots_retry_stop(cache);
    if (cache->connected)
        kvt_owner_disconnect(cache->owner, &cache->channel);
    if (cache->owner != NULL)
        kvt_owner_stop(cache->owner, CLOSE_TIMEOUT_NS);
    kvt_roots_close(cache);
    kvt_pin_stop(&cache->pin);
    if (cache->map != NULL)
        (void)munmap(cache->map, cache->map_bytes);
    kvt_requests_free(cache);
    kvt_shapes_free(cache);
    if (cache->event_fd >= 0)
        (void)close(cache->event_fd);
    if (cache->wake_fd >= 0)
        (void)close(cache->wake_fd);
    pthread_cond_destroy(&cache->idle);
    pthread_cond_destroy(&cache->room);
    pthread_cond_destroy(&cache->work);
    pthread_cond_destroy(&cache->again);
    pthread_mutex_destroy(&cache->lock);
    pthread_mutex_destroy(&cache->gpu_lock);
    kvt_config_free(cache->config);
    free(cache);
}

static int open_parts(struct kvt_cache *cache, const struct kvt_config *config, char *error,
                      size_t error_len)
{
    int rc = config_take(cache, config, error, error_len);
    if (rc != 0)
        return rc;
    atomic_store_explicit(&cache->enabled, cache->settings->enabled, memory_order_relaxed);
    cache->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    cache->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (cache->event_fd < 0 || cache->wake_fd < 0)
        return -errno;
    kvt_planning_init(cache);
    rc = kvt_requests_init(cache);
    if (rc == 0)
        rc = kvt_arena_map(cache, error, error_len);
    if (rc == 0)
        rc = arena_pin(cache, error, error_len);
    if (rc != 0)
        return rc;
    cache->alloc_bytes_max = KVT_MIN(cache->arena_bytes / 8, ALLOC_WINDOW_MAX);
    rc = kvt_roots_open(cache, error, error_len);
    if (rc == 0)
        rc = kvt_owner_new(&cache->owner);
    if (rc == 0)
        rc = store_open(cache, error, error_len);
    if (rc != 0)
        return rc;
    return threads_start(cache);
}

/* What an open cache has to do without, for callers that have no log callback. */
static void tell_missing_roots(const struct kvt_cache *cache, char *error, size_t error_len)
{
    size_t used = 0;
    for (uint32_t i = 0; i < cache->settings->disk_count && used < error_len; i++) {
        if (cache->roots[i].io != NULL)
            continue;
        int n = snprintf(error + used, error_len - used, "%s%s (going on without it)",
                         used ? "; " : "", cache->roots[i].state);
        used += n > 0 ? (size_t)n : 0;
    }
}

/* What to do about what the system has refused. */
static const char *remedy(int code)
{
    switch (code) {
    case -EMFILE:
        return "; raise this process's limit of open files (ulimit -n)";
    case -ENFILE:
        return "; the whole machine has no file descriptor left (fs.file-max)";
    case -EAGAIN:
        return "; a thread cannot be started: raise the limits of processes (ulimit -u) and memory";
    case -ENOMEM:
        return "; make dram smaller, or raise the limit of memory (ulimit -v)";
    default:
        return "";
    }
}

int kvt_open(const struct kvt_config *config, struct kvt_cache **out, char *error, size_t error_len)
{
    char ignored[8];
    if (error == NULL || error_len == 0) {
        error = ignored;
        error_len = sizeof(ignored);
    }
    error[0] = '\0';
    if (out == NULL)
        return KVT_E_INVAL;
    struct kvt_cache *cache = calloc(1, sizeof(*cache));
    if (cache == NULL)
        return -ENOMEM;
    cache->pid = getpid();
    cache->clock = kvt_clock_system();
    cache->event_fd = cache->wake_fd = -1;
    (void)snprintf(cache->gpu_state, sizeof(cache->gpu_state), "not asked for");
    lists_init(cache);
    struct kvt_fsize_guard guard;
    kvt_fsize_hold(&guard);
    int rc = locks_init(cache);
    if (rc == 0)
        rc = open_parts(cache, config, error, error_len);
    if (rc != 0) {
        if (error[0] == '\0')
            (void)snprintf(error, error_len, "the cache cannot be opened: %s%s", kvt_strerror(rc),
                           remedy(rc));
        tear_down(cache);
        kvt_fsize_release(&guard);
        return rc;
    }
    kvt_fsize_release(&guard);
    tell_missing_roots(cache, error, error_len);
    *out = cache;
    return 0;
}

static void free_handles(struct kvt_cache *cache)
{
    struct kvt_ns *ns;
    struct kvt_pool *pool;
    while ((ns = TAILQ_FIRST(&cache->namespaces)) != NULL) {
        TAILQ_REMOVE(&cache->namespaces, ns, list);
        kvt_ns_free(ns);
    }
    while ((pool = TAILQ_FIRST(&cache->pools)) != NULL) {
        TAILQ_REMOVE(&cache->pools, pool, list);
        kvt_lane_pool_free(pool);
        free(pool->origin);
        free(pool);
    }
}

void kvt_close(struct kvt_cache *cache)
{
    if (cache == NULL || kvt_cache_enter(cache) != 0)
        return;
    cache->closing = true;
    kvt_requests_cancel_all(cache);
    while (cache->active_count > 0 || cache->callers > 0)
        pthread_cond_wait(&cache->idle, &cache->lock);
    pthread_mutex_unlock(&cache->lock);
    free_handles(cache);
    struct kvt_fsize_guard guard;
    kvt_fsize_hold(&guard);
    tear_down(cache);
    kvt_fsize_release(&guard);
}

int kvt_event_fd(struct kvt_cache *cache)
{
    return cache == NULL ? KVT_E_INVAL : cache->event_fd;
}

void kvt_enable(struct kvt_cache *cache, int on)
{
    if (cache == NULL || kvt_cache_enter(cache) != 0)
        return;
    /* Ours alone: other clients of the store keep theirs. Relaxed: it orders nothing. */
    atomic_store_explicit(&cache->enabled, on != 0, memory_order_relaxed);
    pthread_mutex_unlock(&cache->lock);
}
