/* Opening and closing a cache: the store (in this process, or the connection to a kvtierd) and our
 * threads.
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
#include "base/fd.h"
#include "client/fsize.h"
#include "client/gpu_lane.h"
#include "client/prompts.h"

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
    if (rc != 0 || !cache->broken || cache->remote)
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

static int locks_init(struct kvt_cache *cache)
{
    pthread_condattr_t attr;
    int rc = pthread_mutex_init(&cache->lock, NULL);
    if (rc == 0)
        rc = pthread_mutex_init(&cache->gpu_lock, NULL);
    if (rc == 0)
        rc = pthread_mutex_init(&cache->planning.fit_lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&cache->idle, &attr);
    pthread_cond_init(&cache->room, &attr);
    pthread_cond_init(&cache->work, &attr);
    pthread_cond_init(&cache->ping.cond, &attr);
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
    kvt_bq_init(&cache->reload);
    for (uint32_t i = 0; i < KVT_FLIGHTS_MAX; i++)
        cache->flights[i].next_free = i + 1 < KVT_FLIGHTS_MAX ? i + 1 : KVT_NONE;
    cache->flight_free = 0;
}

uint64_t kvt_alloc_window(const struct kvt_cache *cache)
{
    return KVT_MIN(cache->arena_bytes / 8,
                   cache->lanes != NULL ? KVT_GPU_ALLOC_WINDOW : ALLOC_WINDOW_MAX);
}

static void settings_log(const struct kvt_cache *cache, int env_applied)
{
    if (env_applied)
        kvt_log(&cache->log, KVT_LOG_INFO, "options of KVTIER_CONFIG are in force");
    if (!cache->settings->enabled)
        kvt_log(&cache->log, KVT_LOG_INFO, "enabled=no: every lookup misses");
    if (cache->remote)
        kvt_remote_elsewhere_tell(cache->settings, &cache->log);
    if (cache->remote && cache->settings->disk_count > 0)
        kvt_log(
            &cache->log, KVT_LOG_INFO,
            "store=unix:%s: dram and disk are the kvtierd's; those of this program are not used",
            cache->settings->socket);
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
    cache->remote = copy->settings.socket[0] != '\0';
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
    int rc = kvt_reply_start(cache);
    return rc != 0 ? rc : kvt_workers_start(cache);
}

/* The store in this process. */
static int store_open(struct kvt_cache *cache, char *error, size_t error_len)
{
    struct kvt_host *host = &cache->host;
    host->settings = cache->settings;
    host->log = cache->log;
    host->clock = cache->clock;
    host->stats_lines = kvt_stats_lines;
    host->stats_ctx = cache;
    int rc = kvt_host_init(host, error, error_len);
    if (rc != 0)
        return rc;
    cache->arena = host->memory.arena;
    cache->arena_bytes = host->memory.arena_bytes;
    cache->alloc_bytes_max = kvt_alloc_window(cache);
    rc = arena_pin(cache, error, error_len);
    if (rc == 0)
        rc = kvt_host_open(host, error, error_len);
    if (rc == 0)
        rc = kvt_owner_connect(host->owner, KVT_CLIENT_RING_BYTES, &cache->channel);
    cache->connected = rc == 0;
    return rc;
}

/* Undo open, whatever part of it was done. No request is active. */
static void tear_down(struct kvt_cache *cache)
{
    kvt_lanes_close(cache); /* its pins go before the arena does */
    kvt_workers_stop(cache);
    kvt_reply_stop(cache);
    if (cache->connected)
        kvt_owner_disconnect(cache->host.owner, &cache->channel);
    kvt_host_close(&cache->host);
    kvt_pin_stop(&cache->pin);
    kvt_host_free(&cache->host);
    if (cache->remote)
        kvt_remote_close(cache);
    kvt_requests_free(cache);
    kvt_shapes_free(cache);
    kvt_prompts_close(cache);
    if (cache->event_fd >= 0)
        (void)close(cache->event_fd);
    if (cache->wake_fd >= 0)
        (void)close(cache->wake_fd);
    pthread_cond_destroy(&cache->idle);
    pthread_cond_destroy(&cache->room);
    pthread_cond_destroy(&cache->work);
    pthread_cond_destroy(&cache->ping.cond);
    pthread_mutex_destroy(&cache->lock);
    pthread_mutex_destroy(&cache->gpu_lock);
    pthread_mutex_destroy(&cache->planning.fit_lock);
    kvt_config_free(cache->config);
    free(cache);
}

static int open_parts(struct kvt_cache *cache, const struct kvt_config *config, char *error,
                      size_t error_len)
{
    int rc = config_take(cache, config, error, error_len);
    if (rc == 0)
        rc = kvt_plan_file_check(cache->settings->plan_file, error, error_len);
    if (rc != 0)
        return rc;
    atomic_store_explicit(&cache->enabled, cache->settings->enabled, memory_order_relaxed);
    cache->event_fd = kvt_fd_high(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    cache->wake_fd = kvt_fd_high(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (cache->event_fd < 0 || cache->wake_fd < 0)
        return -errno;
    kvt_planning_init(cache);
    rc = kvt_prompts_open(cache, error, error_len);
    if (rc == 0)
        rc = kvt_requests_init(cache);
    if (rc == 0 && cache->remote)
        kvt_remote_open(cache, error, error_len);
    else if (rc == 0)
        rc = store_open(cache, error, error_len);
    if (rc == 0)
        kvt_planning_roots(cache);
    return rc != 0 ? rc : threads_start(cache);
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
    kvt_link_init(&cache->link, "");
    (void)snprintf(cache->gpu_state, sizeof(cache->gpu_state), "not asked for");
    (void)snprintf(cache->gds_state, sizeof(cache->gds_state), "off: no pool in GPU memory");
    (void)snprintf(cache->gpu_paths, sizeof(cache->gpu_paths), "all by the copy engine");
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
    if (!cache->remote)
        kvt_roots_tell_missing(&cache->host, error, error_len);
    *out = cache;
    return 0;
}

int kvt_open_at(const char *where, struct kvt_cache **out, char *error, size_t error_len)
{
    struct kvt_config *config = NULL;
    int rc = kvt_config_new(&config);
    if (rc == 0)
        rc = kvt_config_set_all(config, where != NULL ? where : "");
    if (rc == 0)
        rc = kvt_open(config, out, error, error_len);
    else if (error != NULL && error_len > 0)
        (void)snprintf(error, error_len, "%s",
                       config != NULL ? kvt_config_error(config) : kvt_strerror(rc));
    kvt_config_free(config);
    return rc;
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
    if (cache == NULL || kvt_cache_forked(cache))
        return;
    kvt_choices_save(cache);
    if (kvt_cache_enter(cache) != 0)
        return;
    cache->closing = true;
    kvt_requests_cancel_all(cache);
    while (cache->active_count > 0 || cache->callers > 0)
        pthread_cond_wait(&cache->idle, &cache->lock);
    pthread_mutex_unlock(&cache->lock);
    struct kvt_fsize_guard guard;
    kvt_fsize_hold(&guard);
    kvt_plan_file_write(cache);
    free_handles(cache);
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
