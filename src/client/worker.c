/* Worker threads: encode pages into slots, verify and decode slots into pages.
 *
 * A worker takes a few READY blocks of one request, works on them without the lock, and hands the
 * outcomes back under it. While a block is CODING the worker alone touches its entry.
 * Rules: a granted record is verified (checksum, full key, sizes) before a page is written; a block
 * whose request was cancelled or is past its deadline touches no page; a page of lossy origin is
 * never encoded as raw. Loads go before stores, but every 16th job may be a store's.
 */
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "client/client.h"
#include "kvtier/codec.h"

#define BATCH_MAX 16u
#define BATCH_BYTES (512u << 10) /* enough to hide the lock and a message behind the work */
#define LOAD_STREAK_MAX 16u

enum outcome_kind { OUT_COMMIT, OUT_END, OUT_RETRY };

struct outcome {
    enum outcome_kind kind;
    int32_t status;         /* OUT_END: the block's */
    int32_t release_status; /* loads */
    bool nonfinite;
    bool reorigin_dropped;
    bool late;
};

static bool canceled(const struct kvt_req *req)
{
    return atomic_load_explicit(&req->canceled, memory_order_relaxed) != 0;
}

/* ---- stores -------------------------------------------------------------------------------- */

static void fill_header(struct kvt_cache *cache, const struct kvt_req *req,
                        const struct kvt_block *block, struct kvt_record_header *header)
{
    const struct kvt_shape *shape = req->ns->shape;
    uint32_t index = (uint32_t)(block - cache->blocks) - req->first;
    const struct kvt_key *parent = index == 0 ? &req->parent : &(block - 1)->key;
    memset(header, 0, sizeof(*header));
    header->magic = KVT_RECORD_MAGIC;
    header->version = KVT_RECORD_VERSION;
    header->map = block->level;
    header->parent_len = parent->hash_len;
    kvt_full_key_make(&header->key, req->ns->id, &block->key);
    memcpy(header->parent, parent->hash, sizeof(header->parent));
    header->first_pos = req->first_pos + index * shape->layout.block_tokens;
    header->record_bytes = block->record_bytes;
    header->payload_bytes = shape->payload_bytes[block->level];
    header->sequence = block->sequence;
}

/* The next level above that this shape has; RAW ends the ladder. */
static uint8_t level_above(const struct kvt_shape *shape, uint8_t level)
{
    do {
        level++;
    } while (level < KVT_LEVEL_RAW && shape->record_bytes[level] == 0);
    return level;
}

/* What to do about a block that its level cannot hold. */
static struct outcome escalate(const struct kvt_shape *shape, struct kvt_block *block, int code)
{
    struct outcome out = {.kind = OUT_RETRY, .nonfinite = code == KVT_E_NONFINITE};
    if (block->lossy || block->level == KVT_LEVEL_RAW) {
        out.kind = OUT_END;
        out.status = code;
        out.reorigin_dropped = block->lossy != 0;
        return out;
    }
    block->level = code == KVT_E_NONFINITE ? KVT_LEVEL_RAW : level_above(shape, block->level);
    return out;
}

static struct outcome store_block(struct kvt_cache *cache, const struct kvt_req *req,
                                  struct kvt_block *block)
{
    struct outcome out = {.kind = OUT_END, .status = KVT_E_CANCELED};
    if (canceled(req))
        return out;
    const struct kvt_shape *shape = req->ns->shape;
    uint8_t *record = cache->channel.arena + block->arena_offset;
    uint8_t *payload = record + sizeof(struct kvt_record_header);
    size_t payload_bytes = shape->payload_bytes[block->level];
    int rc = kvt_encode_block(&shape->layout, block->key.group, block->level, &req->pool->desc,
                              block->page, payload, payload_bytes, cache->settings->guard, NULL);
    if (rc == KVT_E_GUARD || rc == KVT_E_NONFINITE)
        return escalate(shape, block, rc);
    if (rc != 0) {
        out.status = rc;
        return out;
    }
    struct kvt_record_header *header = (struct kvt_record_header *)(void *)record;
    fill_header(cache, req, block, header);
    memset(payload + payload_bytes, 0,
           block->record_bytes - sizeof(struct kvt_record_header) - payload_bytes);
    block->checksum = kvt_record_checksum(record, block->record_bytes);
    header->checksum = block->checksum;
    out.kind = OUT_COMMIT;
    return out;
}

static void store_outcome(struct kvt_cache *cache, struct kvt_block *block,
                          const struct outcome *out)
{
    struct kvt_client_counters *counters = &cache->counters;
    counters->nonfinite += out->nonfinite && !block->lossy;
    counters->reorigin_dropped += out->reorigin_dropped;
    if (out->kind == OUT_COMMIT) {
        kvt_engine_move(cache, block, KVT_B_CODED);
        kvt_bq_push(cache, &cache->coded, block);
        return;
    }
    block->retry = out->kind == OUT_RETRY;
    if (block->retry && !out->nonfinite) {
        counters->escalated++;
        counters->escalated_raw += block->level == KVT_LEVEL_RAW;
    }
    cache->statuses[block - cache->blocks] = out->status;
    kvt_engine_move(cache, block, KVT_B_GIVE_BACK);
    kvt_bq_push(cache, &cache->give_back[KVT_REQ_STORE], block);
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
           header->map == block->level &&
           header->payload_bytes == req->ns->shape->payload_bytes[block->level];
}

static struct outcome load_block(struct kvt_cache *cache, const struct kvt_req *req,
                                 struct kvt_block *block)
{
    struct outcome out = {.kind = OUT_END, .status = KVT_E_CANCELED};
    if (canceled(req))
        return out;
    if (req->deadline_ns != INT64_MAX && kvt_clock_now(&cache->clock) >= req->deadline_ns) {
        out.status = KVT_E_DEADLINE;
        out.late = true;
        return out;
    }
    if (!record_ok(cache, req, block)) {
        out.status = out.release_status = KVT_E_CORRUPT;
        return out;
    }
    const struct kvt_shape *shape = req->ns->shape;
    const uint8_t *payload =
        cache->channel.arena + block->arena_offset + sizeof(struct kvt_record_header);
    out.status =
        kvt_decode_block(&shape->layout, block->key.group, block->level, payload,
                         shape->payload_bytes[block->level], &req->pool->desc, block->page);
    if (out.status == 0)
        atomic_store_explicit(&req->pool->origin[block->page],
                              block->level == KVT_LEVEL_RAW ? 0 : block->level,
                              memory_order_relaxed);
    return out;
}

static void load_outcome(struct kvt_cache *cache, struct kvt_block *block,
                         const struct outcome *out)
{
    /* The store takes slots back after it has closed the ring: then the page may be anything. */
    bool ours = !kvt_ring_closed(&cache->channel.replies);
    cache->counters.load_late += out->late;
    block->retry = 0;
    block->release_status = out->release_status;
    cache->statuses[block - cache->blocks] = out->status == 0 && !ours ? KVT_E_CLOSED : out->status;
    kvt_engine_move(cache, block, KVT_B_GIVE_BACK);
    kvt_bq_push(cache, &cache->give_back[KVT_REQ_LOAD], block);
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
    struct outcome outcomes[BATCH_MAX];
    int kind = pick_kind(cache);
    uint32_t count = take_batch(cache, kind, batch);
    if (count == 0) /* another worker was faster */
        return;
    const struct kvt_req *req = kvt_block_req(cache, batch[0]);
    pthread_mutex_unlock(&cache->lock);
    for (uint32_t i = 0; i < count; i++)
        outcomes[i] = kind == KVT_REQ_LOAD ? load_block(cache, req, batch[i])
                                           : store_block(cache, req, batch[i]);
    pthread_mutex_lock(&cache->lock);
    for (uint32_t i = 0; i < count; i++) {
        if (kind == KVT_REQ_LOAD)
            load_outcome(cache, batch[i], &outcomes[i]);
        else
            store_outcome(cache, batch[i], &outcomes[i]);
    }
    kvt_pump(cache);
}

static void *worker_main(void *arg)
{
    struct kvt_cache *cache = arg;
    pthread_mutex_lock(&cache->lock);
    while (!cache->stop_workers) {
        if (cache->ready[KVT_REQ_LOAD].count + cache->ready[KVT_REQ_STORE].count > 0) {
            work_once(cache);
            continue;
        }
        cache->workers_idle++;
        pthread_cond_wait(&cache->work, &cache->lock);
        cache->workers_idle--;
    }
    pthread_mutex_unlock(&cache->lock);
    return NULL;
}

void kvt_workers_wake(struct kvt_cache *cache)
{
    uint32_t ready = cache->ready[KVT_REQ_LOAD].count + cache->ready[KVT_REQ_STORE].count;
    uint32_t wake = KVT_MIN(ready, cache->workers_idle);
    for (uint32_t i = 0; i < wake; i++)
        pthread_cond_signal(&cache->work);
}

int kvt_workers_start(struct kvt_cache *cache)
{
    uint32_t want = (uint32_t)cache->settings->threads;
    cache->worker_count = want; /* before the first thread reads it */
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
    cache->worker_count = 0;
}
