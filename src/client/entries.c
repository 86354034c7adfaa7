/* The arrays that requests live in: requests, their block entries and statuses. Entries are handed
 * out in runs of whole granules, first fit.
 *
 * Invariants: a granule belongs to one request at a time; a request's entries and statuses follow
 * each other. Threads: init and free from kvt_open() and kvt_close(); the rest under the cache's
 * lock. Allocates in init only.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/checked.h"
#include "client/client.h"

int kvt_requests_init(struct kvt_cache *cache)
{
    size_t requests = cache->settings->requests_max;
    cache->granule_count =
        (uint32_t)((cache->settings->request_blocks_max + KVT_GRANULE - 1) / KVT_GRANULE);
    size_t blocks = (size_t)cache->granule_count * KVT_GRANULE;
    cache->blocks = calloc(blocks, sizeof(*cache->blocks));
    cache->statuses = calloc(blocks, sizeof(*cache->statuses));
    cache->granule_bits = calloc((cache->granule_count + 63) / 64, sizeof(uint64_t));
    cache->requests = calloc(requests, sizeof(*cache->requests));
    if (!cache->blocks || !cache->statuses || !cache->granule_bits || !cache->requests)
        return -ENOMEM;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    for (size_t i = 0; i < requests; i++) {
        struct kvt_req *req = &cache->requests[i];
        req->cache = cache;
        req->index = (uint32_t)i;
        pthread_cond_init(&req->cond, &attr);
        TAILQ_INSERT_TAIL(&cache->free_reqs, req, list);
    }
    pthread_condattr_destroy(&attr);
    return 0;
}

void kvt_requests_free(struct kvt_cache *cache)
{
    for (size_t i = 0; cache->requests != NULL && i < cache->settings->requests_max; i++)
        pthread_cond_destroy(&cache->requests[i].cond);
    free(cache->requests);
    free(cache->granule_bits);
    free(cache->statuses);
    free(cache->blocks);
}

static bool granule_used(const struct kvt_cache *cache, uint32_t i)
{
    return (cache->granule_bits[i / 64] >> (i % 64) & 1) != 0;
}

static void granules_mark(struct kvt_cache *cache, uint32_t from, uint32_t count, bool used)
{
    for (uint32_t i = from; i < from + count; i++) {
        uint64_t bit = UINT64_C(1) << (i % 64);
        if (used)
            cache->granule_bits[i / 64] |= bit;
        else
            cache->granule_bits[i / 64] &= ~bit;
    }
}

/* First fit within [from, to): the first granule of a free run, or KVT_NONE. */
static uint32_t granules_find(const struct kvt_cache *cache, uint32_t from, uint32_t to,
                              uint32_t count)
{
    uint32_t run = 0;
    for (uint32_t i = from; i < to; i++) {
        if (i % 64 == 0 && cache->granule_bits[i / 64] == UINT64_MAX) {
            run = 0;
            i += 63;
            continue;
        }
        run = granule_used(cache, i) ? 0 : run + 1;
        if (run == count)
            return i + 1 - count;
    }
    return KVT_NONE;
}

static uint32_t granules_for(uint32_t n)
{
    return n == 0 ? 0 : (n + KVT_GRANULE - 1) / KVT_GRANULE;
}

uint32_t kvt_entries_take(struct kvt_cache *cache, uint32_t n)
{
    uint32_t count = granules_for(n);
    if (count == 0)
        return 0;
    uint32_t at = granules_find(cache, cache->granule_hint, cache->granule_count, count);
    if (at == KVT_NONE)
        at = granules_find(cache, 0, cache->granule_count, count);
    if (at == KVT_NONE)
        return KVT_NONE;
    granules_mark(cache, at, count, true);
    cache->granule_hint = at + count < cache->granule_count ? at + count : 0;
    cache->held_blocks += count * KVT_GRANULE;
    return at * KVT_GRANULE;
}

void kvt_req_put(struct kvt_cache *cache, struct kvt_req *req)
{
    uint32_t count = granules_for(req->n);
    for (uint32_t i = 0; i < req->n; i++)
        cache->blocks[req->first + i].state = KVT_B_IDLE;
    if (count > 0)
        granules_mark(cache, req->first / KVT_GRANULE, count, false);
    cache->held_blocks -= count * KVT_GRANULE;
    cache->held_count--;
    req->state = KVT_R_FREE;
    TAILQ_INSERT_TAIL(&cache->free_reqs, req, list); /* reused late: a second free finds it free */
}
