/* What workers and GPU lanes share: what becomes of a block that was coded, and its header.
 *
 * Whoever codes a block owns its entry while it is CODING. He begins with kvt_coding_begin(), and
 * ends, under the lock, with kvt_coding_end(). Threads: any; kvt_coding_end() under the cache's
 * lock. Touches no page and no payload.
 */
#include <string.h>

#include "base/checked.h"
#include "client/coding.h"
#include "client/gpu_lane.h"

bool kvt_coding_begin(const struct kvt_cache *cache, const struct kvt_req *req,
                      struct kvt_outcome *out)
{
    memset(out, 0, sizeof(*out));
    out->kind = KVT_OUT_END;
    if (atomic_load_explicit(&req->canceled, memory_order_relaxed) != 0)
        out->status = KVT_E_CANCELED;
    else if (req->deadline_ns != INT64_MAX && kvt_clock_now(&cache->clock) >= req->deadline_ns)
        out->status = KVT_E_DEADLINE;
    out->late = out->status == KVT_E_DEADLINE;
    return out->status == 0;
}

void kvt_coding_header(const struct kvt_cache *cache, const struct kvt_req *req,
                       const struct kvt_block *block, struct kvt_record_header *header)
{
    const struct kvt_shape_group *group = kvt_req_group(req);
    uint32_t index = (uint32_t)(block - cache->blocks) - req->first;
    const struct kvt_key *parent = index == 0 ? &req->parent : &(block - 1)->key;
    memset(header, 0, sizeof(*header));
    header->magic = KVT_RECORD_MAGIC;
    header->version = KVT_RECORD_VERSION;
    header->map = block->map_id;
    kvt_full_key_make(&header->key, req->ns->id, &block->key);
    if (group->kind == KVT_GROUP_FULL) { /* the others need no predecessor */
        header->parent_len = parent->hash_len;
        memcpy(header->parent, parent->hash, sizeof(header->parent));
    }
    header->first_pos = req->first_pos + index * group->block_tokens;
    header->record_bytes = block->record_bytes;
    header->payload_bytes = block->map->payload_bytes;
    header->sequence = block->sequence;
}

/* The next level above that this group has; RAW ends the ladder. */
static int level_above(const struct kvt_shape_group *group, int level)
{
    do {
        level++;
    } while (level < KVT_LEVEL_RAW && group->uniform[level] == NULL);
    return level;
}

void kvt_coding_map(const struct kvt_req *req, struct kvt_block *block, int level)
{
    block->map = kvt_ns_map(req, level, block->lossy != 0);
    if (block->recode && block->map->level >= KVT_LEVEL_KV8) { /* it cannot cool */
        block->recode = 0;
        block->lossy = 1;
        block->map = kvt_ns_map(req, KVT_LEVEL_KV8, true);
    }
    block->level = block->map->level;
}

struct kvt_outcome kvt_coding_escalate(const struct kvt_req *req, struct kvt_block *block, int code)
{
    struct kvt_outcome out = {.kind = KVT_OUT_RETRY, .nonfinite = code == KVT_E_NONFINITE};
    if (block->lossy || block->level == KVT_LEVEL_RAW) {
        out.kind = KVT_OUT_END;
        out.status = code;
        out.reorigin_dropped = block->lossy != 0;
        return out;
    }
    int level =
        code == KVT_E_NONFINITE ? KVT_LEVEL_RAW : level_above(kvt_req_group(req), block->level);
    kvt_coding_map(req, block, level);
    return out;
}

void kvt_coding_origin(const struct kvt_req *req, const struct kvt_block *block)
{
    atomic_store_explicit(kvt_req_origin(req, block->page),
                          block->level == KVT_LEVEL_RAW ? 0 : block->level, memory_order_relaxed);
}

static void store_end(struct kvt_cache *cache, struct kvt_block *block,
                      const struct kvt_outcome *out)
{
    struct kvt_client_counters *counters = &cache->counters;
    counters->nonfinite += out->nonfinite && !block->lossy;
    counters->judged += out->chosen.judged;
    counters->chosen_heads += out->chosen.heads;
    counters->chosen_levels += out->chosen.level != 0;
    counters->reorigin_dropped += out->reorigin_dropped;
    if (out->kind == KVT_OUT_COMMIT) {
        kvt_engine_move(cache, block, KVT_B_CODED);
        kvt_bq_push(cache, &cache->coded, block);
        return;
    }
    block->retry = out->kind == KVT_OUT_RETRY;
    if (block->retry && !out->nonfinite) {
        counters->escalated++;
        counters->escalated_raw += block->level == KVT_LEVEL_RAW;
    }
    cache->statuses[block - cache->blocks] = out->status;
    kvt_engine_move(cache, block, KVT_B_GIVE_BACK);
    kvt_bq_push(cache, &cache->give_back[KVT_REQ_STORE], block);
}

static void load_end(struct kvt_cache *cache, struct kvt_block *block,
                     const struct kvt_outcome *out)
{
    /* The store takes slots back after it has closed the ring: then the page may be anything. */
    bool ours = !kvt_ring_closed(&cache->channel.replies);
    cache->counters.load_late += out->late;
    kvt_lane_let_go(cache, block);
    block->retry = out->kind == KVT_OUT_RETRY;
    block->release_status = out->release_status;
    cache->statuses[block - cache->blocks] =
        out->status == 0 && !ours ? kvt_lost_status(cache) : out->status;
    kvt_engine_move(cache, block, KVT_B_GIVE_BACK);
    kvt_bq_push(cache, &cache->give_back[KVT_REQ_LOAD], block);
}

void kvt_coding_end(struct kvt_cache *cache, int kind, struct kvt_block *block,
                    const struct kvt_outcome *out)
{
    if (kind == KVT_REQ_LOAD)
        load_end(cache, block, out);
    else
        store_end(cache, block, out);
}
