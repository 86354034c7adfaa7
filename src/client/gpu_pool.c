/* Devices, stages of pools, and the arena's pinning: the slow half of the GPU lanes (gpu_lane.h).
 *
 * cache->gpu_lock makes opening, closing and the lists of lanes and stages one at a time; it is
 * taken before the cache's lock, never after. The arena is pinned (pin.h) through the first device
 * that asks; jobs run meanwhile, over memory that is pinned or not.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "client/gpu_lane_impl.h"

/* ---- pinning ------------------------------------------------------------------------------- */

static int pin_piece(void *gpu, void *base, uint64_t bytes)
{
    return kvt_gpu_pin(gpu, base, bytes);
}

static void unpin_piece(void *gpu, void *base, uint64_t bytes)
{
    (void)bytes;
    kvt_gpu_unpin(gpu, base);
}

/* The arena for the first device; unpinned memory does for the others. */
static int pin_arena(struct kvt_lane *lane, char *reason, size_t len)
{
    struct kvt_cache *cache = lane->cache;
    struct kvt_pin_ops ops = {"the CUDA driver", pin_piece, unpin_piece, lane->gpu};
    if (cache->settings->pin == KVT_PIN_SET_OFF || cache->arena == NULL)
        return 0;
    if (cache->settings->pin != KVT_PIN_SET_REQUIRED)
        return kvt_pin_start(&cache->pin, &ops);
    int rc = kvt_pin_now(&cache->pin, &ops);
    if (rc != 0)
        kvt_pin_describe(ops.name, cache->arena_bytes, rc, reason, len);
    return rc;
}

/* ---- devices ------------------------------------------------------------------------------- */

static void lane_free(struct kvt_lane *lane)
{
    for (size_t i = 0; lane->events != NULL && i < lane->cache->settings->requests_max; i++)
        kvt_gpu_event_free(lane->gpu, lane->events[i]);
    free(lane->events);
    kvt_gds_close(lane);
    kvt_gpu_close(lane->gpu);
    pthread_cond_destroy(&lane->work);
    free(lane);
}

static struct kvt_lane *lane_make(struct kvt_cache *cache, int device)
{
    struct kvt_lane *lane = calloc(1, sizeof(*lane));
    pthread_condattr_t attr;
    if (lane == NULL)
        return NULL;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&lane->work, &attr);
    pthread_condattr_destroy(&attr);
    lane->cache = cache;
    lane->device = device;
    for (int i = 0; i < KVT_LANE_QUEUES; i++)
        kvt_bq_init(&lane->ready[i]);
    kvt_bq_init(&lane->layered);
    return lane;
}

/* An event for every request that can exist: none is made on the data path. */
static int events_make(struct kvt_lane *lane)
{
    size_t count = lane->cache->settings->requests_max;
    int rc = 0;
    lane->events = calloc(count, sizeof(*lane->events));
    if (lane->events == NULL)
        return -ENOMEM;
    for (size_t i = 0; i < count && rc == 0; i++)
        rc = kvt_gpu_event_new(lane->gpu, &lane->events[i]);
    return rc;
}

static int lane_start(struct kvt_lane *lane)
{
    char name[16];
    (void)snprintf(name, sizeof(name), "kvt-gpu-%d", lane->device % 1000);
    int rc = events_make(lane);
    if (rc == 0)
        rc = kvt_thread_start(&lane->thread, name, kvt_lane_main, lane);
    if (rc != 0)
        return rc;
    lane->thread_runs = true;
    return 0;
}

static void lane_stop(struct kvt_lane *lane)
{
    struct kvt_cache *cache = lane->cache;
    pthread_mutex_lock(&cache->lock);
    lane->stop = true;
    pthread_cond_signal(&lane->work);
    pthread_mutex_unlock(&cache->lock);
    if (lane->thread_runs)
        pthread_join(lane->thread, NULL);
    lane->thread_runs = false;
}

static int lane_open(struct kvt_cache *cache, int device, struct kvt_lane **out, char *reason,
                     size_t len)
{
    struct kvt_gpu_opts opts = {.device = device, .library = cache->gpu_library};
    struct kvt_lane *lane = lane_make(cache, device);
    if (lane == NULL)
        return -ENOMEM;
    int rc = kvt_gpu_open(&opts, &lane->gpu, reason, len);
    if (rc != 0) {
        lane->gpu = NULL;
    } else {
        if (cache->arena != NULL)
            kvt_gpu_pin_grid(lane->gpu, cache->arena, cache->pin.plan.piece_bytes);
        rc = lane_start(lane);
    }
    if (rc == 0)
        rc = kvt_paths_open(lane);
    if (rc == 0)
        rc = kvt_gds_open(lane, reason, len);
    if (rc == 0 && cache->lanes == NULL)
        rc = pin_arena(lane, reason, len);
    if (rc != 0) {
        lane_stop(lane);
        lane_free(lane);
        return rc;
    }
    lane->next = cache->lanes;
    cache->lanes = lane;
    pthread_mutex_lock(&cache->lock);
    cache->alloc_bytes_max = kvt_alloc_window(cache);
    pthread_mutex_unlock(&cache->lock);
    *out = lane;
    return 0;
}

void kvt_lanes_arena(struct kvt_cache *cache, bool there)
{
    char reason[256] = "";
    int rc = 0;
    pthread_mutex_lock(&cache->gpu_lock);
    if (!there)
        kvt_pin_stop(&cache->pin);
    for (struct kvt_lane *lane = cache->lanes; there && lane != NULL; lane = lane->next) {
        kvt_gpu_pin_grid(lane->gpu, cache->arena, cache->pin.plan.piece_bytes);
        if (lane->next == NULL) /* the first one: it pins for all */
            rc = pin_arena(lane, reason, sizeof(reason));
    }
    pthread_mutex_unlock(&cache->gpu_lock);
    if (rc != 0)
        kvt_log(&cache->log, KVT_LOG_WARN, "%s: unpinned memory is used",
                reason[0] ? reason : kvt_strerror(rc));
}

void kvt_lanes_close(struct kvt_cache *cache)
{
    struct kvt_lane *lane;
    if (cache->lanes != NULL)
        kvt_pin_stop(&cache->pin); /* through a device that is still open */
    while ((lane = cache->lanes) != NULL) {
        cache->lanes = lane->next;
        lane_stop(lane);
        lane_free(lane);
    }
}

/* ---- pools --------------------------------------------------------------------------------- */

static int stage_take(struct kvt_lane *lane, uint32_t record_bytes, struct kvt_lane_stage **out)
{
    const struct kvt_settings *settings = lane->cache->settings;
    struct kvt_lane_stage *stage;
    for (stage = lane->stages; stage != NULL; stage = stage->next) {
        if (stage->record_bytes >= record_bytes) {
            stage->refs++;
            *out = stage;
            return 0;
        }
    }
    struct kvt_gpu_stage_opts opts = {
        .ctas = (uint32_t)settings->gpu_ctas,
        .records_max = KVT_LANE_LAYER_RECORDS,
        .layer_pages = KVT_LANE_LAYER_PAGES,
        .jobs_max = KVT_LANE_FLIGHTS,
        .record_bytes = record_bytes,
        .wave_bytes = (uint32_t)settings->gpu_wave,
    };
    stage = calloc(1, sizeof(*stage));
    if (stage == NULL)
        return -ENOMEM;
    int rc = kvt_gpu_stage_new(lane->gpu, &opts, &stage->stage);
    if (rc != 0) {
        free(stage);
        return rc;
    }
    stage->record_bytes = record_bytes;
    stage->refs = 1;
    stage->next = lane->stages;
    lane->stages = stage;
    *out = stage;
    return 0;
}

static void stage_drop(struct kvt_lane *lane, struct kvt_lane_stage *stage)
{
    if (--stage->refs > 0)
        return;
    struct kvt_lane_stage **at = &lane->stages;
    while (*at != stage)
        at = &(*at)->next;
    *at = stage->next;
    kvt_gpu_stage_free(stage->stage);
    free(stage);
}

static void own_free(struct kvt_lane_pool *own)
{
    kvt_lane_plans_free(own);
    if (own->stage != NULL)
        stage_drop(own->lane, own->stage);
    free(own);
}

static int own_make(struct kvt_lane *lane, const struct kvt_pool *pool, struct kvt_lane_pool **out)
{
    struct kvt_lane_pool *own = calloc(1, sizeof(*own));
    if (own == NULL)
        return -ENOMEM;
    own->lane = lane;
    own->pool = pool;
    int rc = stage_take(lane, kvt_lane_record_max(pool->shape), &own->stage);
    if (rc == 0)
        rc = kvt_lane_plans_make(own);
    if (rc != 0) {
        own_free(own);
        return rc;
    }
    *out = own;
    return 0;
}

static int pool_prepare(struct kvt_cache *cache, struct kvt_pool *pool, char *reason, size_t len)
{
    int device = pool->desc.device;
    struct kvt_lane *lane = cache->lanes;
    while (lane != NULL && lane->device != device)
        lane = lane->next;
    int rc = lane != NULL ? 0 : lane_open(cache, device, &lane, reason, len);
    if (rc != 0)
        return rc;
    rc = own_make(lane, pool, &pool->gpu);
    if (rc == KVT_E_DEVICE && kvt_gpu_offline(lane->gpu))
        (void)snprintf(reason, len, "CUDA device %d is lost (%s)", device,
                       kvt_gpu_offline_reason(lane->gpu));
    else if (rc == KVT_E_INVAL)
        (void)snprintf(reason, len, "the pool's memory is not memory of CUDA device %d", device);
    else if (rc == -ENOMEM)
        (void)snprintf(reason, len, "CUDA device %d has no memory left for staging", device);
    else if (rc != 0)
        (void)snprintf(reason, len, "the pool cannot be prepared for CUDA device %d: %s", device,
                       kvt_strerror(rc));
    return rc;
}

static void note_state(struct kvt_cache *cache, const struct kvt_pool *pool, const char *reason)
{
    struct kvt_gpu_info info;
    if (pool->gpu == NULL) {
        (void)snprintf(cache->gpu_state, sizeof(cache->gpu_state), "%s", reason);
        return;
    }
    kvt_gpu_info(pool->gpu->lane->gpu, &info);
    (void)snprintf(cache->gpu_state, sizeof(cache->gpu_state), "ok: device %d, %s",
                   pool->desc.device, info.name);
}

int kvt_lane_pool_new(struct kvt_cache *cache, struct kvt_pool *pool)
{
    char reason[256] = "out of memory";
    pthread_mutex_lock(&cache->gpu_lock);
    int rc = pool_prepare(cache, pool, reason, sizeof(reason));
    pthread_mutex_lock(&cache->lock);
    cache->counters.gpu_refused += rc != 0;
    note_state(cache, pool, reason);
    pthread_mutex_unlock(&cache->lock);
    pthread_mutex_unlock(&cache->gpu_lock);
    if (rc != 0)
        kvt_log(&cache->log, KVT_LOG_WARN, "a pool in GPU memory is refused: %s", reason);
    return rc;
}

void kvt_lane_pool_free(struct kvt_pool *pool)
{
    if (pool->gpu == NULL)
        return;
    pthread_mutex_lock(&pool->cache->gpu_lock);
    own_free(pool->gpu);
    pthread_mutex_unlock(&pool->cache->gpu_lock);
    pool->gpu = NULL;
}
