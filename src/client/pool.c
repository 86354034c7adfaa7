/* Pools: engine memory registered once, with the origin of every page.
 *
 * Origin (the "one coarse step at most" promise): a page that was loaded from a lossy record holds
 * what the codec made of it. Storing it again as if it were exact would add a second error that
 * nobody counted, so the pool remembers the level each page was loaded from until the engine says
 * that the page was computed anew. Threads: any. The memory itself is the engine's.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/gpu_lane.h"
#include "client/misuse.h"
#include "kvtier/codec.h"

static struct kvt_pool *pool_make(struct kvt_cache *cache, const struct kvt_pool_desc *desc)
{
    size_t places_bytes = desc->place_count * sizeof(struct kvt_part_place);
    struct kvt_pool *pool = calloc(1, sizeof(*pool) + places_bytes);
    if (pool == NULL)
        return NULL;
    struct kvt_part_place *places = (struct kvt_part_place *)(pool + 1);
    memcpy(places, desc->places, places_bytes);
    pool->cache = cache;
    pool->desc = *desc;
    pool->desc.struct_size = sizeof(pool->desc);
    pool->desc.places = places;
    return pool;
}

static void pool_free(struct kvt_pool *pool)
{
    free(pool->origin);
    free(pool);
}

int kvt_pool_register(struct kvt_cache *cache, const struct kvt_layout *layout,
                      const struct kvt_pool_desc *desc, struct kvt_pool **out)
{
    if (cache == NULL || layout == NULL || desc == NULL || out == NULL)
        return KVT_E_INVAL;
    int rc = kvt_shape_check(layout);
    if (rc == 0)
        rc = kvt_pool_check(layout, desc);
    if (rc == 0 && desc->device < KVT_DEVICE_HOST)
        rc = KVT_E_INVAL;
    if (rc != 0) {
        kvt_misuse_setup(cache, "kvt_pool_register", rc, NULL, layout, desc);
        return rc;
    }
    struct kvt_pool *pool = pool_make(cache, desc);
    if (pool == NULL)
        return -ENOMEM;
    rc = kvt_cache_enter(cache);
    if (rc != 0) {
        pool_free(pool);
        return rc;
    }
    pool->shape = kvt_shape_intern(cache, layout);
    cache->callers++; /* until the pool stands in the list, or does not */
    pthread_mutex_unlock(&cache->lock);
    rc = pool->shape == NULL ? -ENOMEM : 0;
    if (rc == 0) {
        pool->origin =
            calloc((size_t)pool->shape->group_count * desc->block_count, sizeof(*pool->origin));
        rc = pool->origin == NULL ? -ENOMEM : 0;
    }
    if (rc == 0 && desc->device != KVT_DEVICE_HOST)
        rc = kvt_lane_pool_new(cache, pool);
    pthread_mutex_lock(&cache->lock);
    if (rc == 0)
        TAILQ_INSERT_TAIL(&cache->pools, pool, list);
    cache->callers--;
    pthread_cond_broadcast(&cache->idle);
    pthread_mutex_unlock(&cache->lock);
    if (rc != 0) {
        pool_free(pool);
        return rc;
    }
    *out = pool;
    return 0;
}

void kvt_pool_unregister(struct kvt_pool *pool)
{
    if (pool == NULL || kvt_cache_enter(pool->cache) != 0)
        return;
    struct kvt_cache *cache = pool->cache;
    cache->callers++;
    while (pool->refs > 0)
        pthread_cond_wait(&cache->idle, &cache->lock);
    TAILQ_REMOVE(&cache->pools, pool, list);
    pthread_mutex_unlock(&cache->lock);
    kvt_lane_pool_free(pool);
    pool_free(pool);
    pthread_mutex_lock(&cache->lock);
    cache->callers--;
    pthread_cond_broadcast(&cache->idle);
    pthread_mutex_unlock(&cache->lock);
}

static int reset_origins(struct kvt_pool *pool, uint32_t from, uint32_t to, const uint32_t *ids,
                         size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (ids[i] >= pool->desc.block_count) {
            kvt_misuse_say(pool->cache, KVT_LOG_DEBUG, "kvt_pool_reset_origin",
                           "ids[%zu] is %" PRIu32 ", and the pool has %" PRIu32 " blocks", i,
                           ids[i], pool->desc.block_count);
            return KVT_E_INVAL;
        }
    for (uint32_t group = from; group < to; group++)
        for (size_t i = 0; i < n; i++)
            atomic_store_explicit(&pool->origin[(size_t)group * pool->desc.block_count + ids[i]], 0,
                                  memory_order_relaxed);
    return 0;
}

int kvt_pool_reset_origin(struct kvt_pool *pool, const uint32_t *ids, size_t n)
{
    if (pool == NULL || (ids == NULL && n != 0))
        return KVT_E_INVAL;
    return reset_origins(pool, 0, pool->shape->group_count, ids, n);
}

int kvt_pool_reset_origin_group(struct kvt_pool *pool, uint16_t group, const uint32_t *ids,
                                size_t n)
{
    if (pool == NULL || (ids == NULL && n != 0))
        return KVT_E_INVAL;
    const struct kvt_shape_group *shape = kvt_shape_group_of(pool->shape, group);
    if (shape == NULL)
        return KVT_E_INVAL;
    uint32_t index = (uint32_t)(shape - pool->shape->groups);
    return reset_origins(pool, index, index + 1, ids, n);
}
