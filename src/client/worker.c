/* Worker threads: encode pages into slots, verify and decode slots into pages.
 *
 * A worker takes a few READY blocks of one request, works on them without the lock, and hands the
 * outcomes back under it. While a block is CODING the worker alone touches its entry.
 * Rules: a granted record is verified (checksum, full key, sizes) before a page is written; a block
 * whose request was cancelled or is past its deadline touches no page; a page of lossy origin is
 * never encoded as raw. Loads go before stores, but every 16th job may be a store's.
 * Waking: one at a time. Who comes awake and finds more than its batch wakes the next one, from the
 * processor that it runs on by then; several woken at once by a thread that goes on running are
 * queued behind each other on one processor while another one is idle.
 */
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "client/coding.h"
#include "client/gpu_lane.h"
#include "kvtier/codec.h"

#define BATCH_MAX 16u
#define BATCH_BYTES (512u << 10) /* enough to hide the lock and a message behind the work */
#define LOAD_STREAK_MAX 16u

/* ---- stores -------------------------------------------------------------------------------- */

static struct kvt_outcome encode_block(struct kvt_cache *cache, const struct kvt_req *req,
                                       struct kvt_block *block)
{
    struct kvt_outcome out = {.kind = KVT_OUT_END};
    uint8_t *record = cache->channel.arena + block->arena_offset;
    uint8_t *payload = record + sizeof(struct kvt_record_header);
    uint32_t payload_bytes = block->map->payload_bytes;
    int rc = kvt_map_encode(block->map, kvt_req_group(req), &req->pool->desc, block->page, payload,
                            cache->settings->guard);
    if (block->level < KVT_LEVEL_RAW && rc != KVT_E_NONFINITE)
        kvt_choice_watch(req, rc == KVT_E_GUARD);
    if (rc == KVT_E_GUARD || rc == KVT_E_NONFINITE)
        return kvt_coding_escalate(req, block, rc);
    if (rc != 0) {
        out.status = rc;
        return out;
    }
    struct kvt_record_header *header = (struct kvt_record_header *)(void *)record;
    kvt_coding_header(cache, req, block, header);
    memset(payload + payload_bytes, 0,
           block->record_bytes - sizeof(struct kvt_record_header) - payload_bytes);
    block->checksum = kvt_record_checksum(record, block->record_bytes);
    header->checksum = block->checksum;
    out.kind = KVT_OUT_COMMIT;
    return out;
}

static struct kvt_outcome store_block(struct kvt_cache *cache, const struct kvt_req *req,
                                      struct kvt_block *block)
{
    struct kvt_outcome out;
    struct kvt_chosen chosen;
    if (!kvt_coding_begin(cache, req, &out))
        return out;
    kvt_choice_judge(req, block, &chosen);
    out = encode_block(cache, req, block);
    out.chosen = chosen;
    return out;
}

/* ---- loads --------------------------------------------------------------------------------- */

static bool record_ok(const struct kvt_cache *cache, const struct kvt_req *req,
                      const struct kvt_block *block)
{
    const uint8_t *record = cache->channel.arena + block->arena_offset;
    const struct kvt_record_header *header = (const struct kvt_record_header *)(const void *)record;
    struct kvt_full_key key;
    kvt_full_key_make(&key, req->ns->id, &block->key);
    return kvt_record_verify(record, block->record_bytes, &key, block->checksum) == 0 &&
           header->map == block->map_id;
}

static struct kvt_outcome load_block(struct kvt_cache *cache, const struct kvt_req *req,
                                     struct kvt_block *block)
{
    struct kvt_outcome out;
    if (!kvt_coding_begin(cache, req, &out))
        return out;
    if (!record_ok(cache, req, block)) {
        out.status = out.release_status = KVT_E_CORRUPT;
        return out;
    }
    const uint8_t *record = cache->channel.arena + block->arena_offset;
    const struct kvt_record_header *header = (const struct kvt_record_header *)(const void *)record;
    out.status = kvt_map_decode(kvt_req_group(req), block->map_id, record + sizeof(*header),
                                header->payload_bytes, &req->pool->desc, block->page);
    if (out.status == KVT_E_CORRUPT)
        out.release_status = KVT_E_CORRUPT;
    if (out.status == 0)
        kvt_coding_origin(req, block);
    return out;
}

/* ---- the loop ------------------------------------------------------------------------------ */

static int pick_kind(struct kvt_cache *cache)
{
    bool loads = cache->ready[KVT_REQ_LOAD].count > 0;
    bool stores = cache->ready[KVT_REQ_STORE].count > 0;
    if (loads && (!stores || cache->load_streak < LOAD_STREAK_MAX)) {
        cache->load_streak++;
        return KVT_REQ_LOAD;
    }
    cache->load_streak = 0;
    return KVT_REQ_STORE;
}

/* Take blocks of one request, in order: few enough that the other workers get some too. */
static uint32_t take_batch(struct kvt_cache *cache, int kind, struct kvt_block **batch)
{
    struct kvt_block_queue *queue = &cache->ready[kind];
    uint32_t share = (queue->count + cache->worker_count - 1) / cache->worker_count;
    uint32_t limit = KVT_MIN(share, BATCH_MAX), count = 0;
    uint64_t bytes = 0;
    struct kvt_block *block;
    while (count < limit && (block = kvt_bq_peek(cache, queue)) != NULL) {
        if (count > 0 && (block->req != batch[0]->req || bytes + block->record_bytes > BATCH_BYTES))
            break;
        batch[count++] = kvt_bq_pop(cache, queue);
        bytes += block->record_bytes;
        kvt_engine_move(cache, block, KVT_B_CODING);
    }
    return count;
}

static void work_once(struct kvt_cache *cache)
{
    struct kvt_block *batch[BATCH_MAX];
    struct kvt_outcome outcomes[BATCH_MAX];
    int kind = pick_kind(cache);
    uint32_t count = take_batch(cache, kind, batch);
    if (count == 0) /* another worker was faster */
        return;
    kvt_workers_wake(cache);
    kvt_reply_busy(cache);
    const struct kvt_req *req = kvt_block_req(cache, batch[0]);
    pthread_mutex_unlock(&cache->lock);
    for (uint32_t i = 0; i < count; i++)
        outcomes[i] = kind == KVT_REQ_LOAD ? load_block(cache, req, batch[i])
                                           : store_block(cache, req, batch[i]);
    pthread_mutex_lock(&cache->lock);
    for (uint32_t i = 0; i < count; i++)
        kvt_coding_end(cache, kind, batch[i], &outcomes[i]);
    if (kvt_reply_drain(cache) == 0) /* pumps when there are any */
        kvt_pump(cache);
}

static void *worker_main(void *arg)
{
    struct kvt_cache *cache = arg;
    pthread_mutex_lock(&cache->lock);
    while (!cache->stop_workers) {
        if (cache->ready[KVT_REQ_LOAD].count + cache->ready[KVT_REQ_STORE].count > 0) {
            work_once(cache);
            if (cache->planning.seen_count > 0) /* what another one is learning is not waited for */
                kvt_planning_learn(cache);
            continue;
        }
        if (kvt_reply_listen(cache) > 0)
            continue;
        cache->workers_idle++;
        pthread_cond_wait(&cache->work, &cache->lock);
        cache->workers_idle--;
        cache->worker_waking = false;
    }
    pthread_mutex_unlock(&cache->lock);
    return NULL;
}

void kvt_ready_push(struct kvt_cache *cache, struct kvt_block *block, int kind)
{
    kvt_engine_move(cache, block, KVT_B_READY);
    if (kvt_block_req(cache, block)->pool->gpu != NULL)
        kvt_lane_push(cache, block, kind);
    else
        kvt_bq_push(cache, &cache->ready[kind], block);
}

void kvt_workers_wake(struct kvt_cache *cache)
{
    uint32_t ready = cache->ready[KVT_REQ_LOAD].count + cache->ready[KVT_REQ_STORE].count;
    if (ready == 0 || cache->workers_idle == 0 || cache->worker_waking)
        return;
    cache->worker_waking = true; /* it wakes the next one */
    pthread_cond_signal(&cache->work);
}

int kvt_workers_start(struct kvt_cache *cache)
{
    uint32_t want = (uint32_t)cache->settings->threads;
    pthread_mutex_lock(&cache->lock);
    cache->worker_count = want; /* before the first thread reads it */
    pthread_mutex_unlock(&cache->lock);
    for (uint32_t i = 0; i < want; i++) {
        char name[16];
        (void)snprintf(name, sizeof(name), "kvt-work-%u", i % 1000);
        int rc = kvt_thread_start(&cache->workers[i], name, worker_main, cache);
        if (rc != 0) {
            pthread_mutex_lock(&cache->lock);
            cache->worker_count = i;
            pthread_mutex_unlock(&cache->lock);
            kvt_workers_stop(cache);
            return rc;
        }
    }
    return 0;
}

void kvt_workers_stop(struct kvt_cache *cache)
{
    pthread_mutex_lock(&cache->lock);
    uint32_t count = cache->worker_count;
    cache->stop_workers = true;
    pthread_cond_broadcast(&cache->work);
    pthread_mutex_unlock(&cache->lock);
    for (uint32_t i = 0; i < count; i++)
        pthread_join(cache->workers[i], NULL);
    pthread_mutex_lock(&cache->lock);
    cache->worker_count = 0;
    pthread_mutex_unlock(&cache->lock);
}
