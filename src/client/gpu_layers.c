/* Loads by layers: the first layers of all blocks of a request come before the last ones of any, so
 * that an engine computes while it loads (kvt_req_wait_layer()). See gpu_lane.h.
 *
 *   READY blocks gather --> up to four jobs, one for each plan --> ranges of layers, the jobs in
 * turn each range: next_layer of the request --> all: outcomes
 *
 * The checksum of a record covers all layers, so nothing is verified before the last of them; that
 * one is never announced but by the end of the request, which has the verdict.
 * Such a load waits until its last block is READY, or none has come for a while (blocks on disk
 * come in turns, through a few slots); it has the device for itself. What does not fit into the
 * jobs comes after, and then no layer is announced early. Threads: the lane's, under the cache's
 * lock but where noted.
 */
#include <string.h>

#include "base/checked.h"
#include "client/gpu_lane_impl.h"

#define GATHER_NS INT64_C(1000000) /* without a new block, after which there is no more waiting */

struct layers {
    struct kvt_req *req;
    struct kvt_lane_batch batches[KVT_LANE_FLIGHTS];
    struct kvt_lane_flight flights[KVT_LANE_FLIGHTS];
    struct kvt_block_queue ended[KVT_LANE_FLIGHTS];
    size_t ended_at[KVT_LANE_FLIGHTS]; /* their outcomes in the lane's */
    size_t count;
    bool whole; /* the request has no other blocks under way */
};

void kvt_layers_push(struct kvt_lane *lane, struct kvt_block *block)
{
    struct kvt_cache *cache = lane->cache;
    kvt_bq_push(cache, &lane->layered, block);
    kvt_block_req(cache, block)->layers_ready++;
    lane->layered_ns = kvt_clock_now(&cache->clock);
}

bool kvt_layers_due(struct kvt_lane *lane, int64_t *until)
{
    const struct kvt_block *block = kvt_bq_peek(lane->cache, &lane->layered);
    if (block == NULL)
        return false;
    const struct kvt_req *req = kvt_block_req(lane->cache, block);
    *until = lane->layered_ns + GATHER_NS;
    return req->done + req->layers_ready == req->n || kvt_clock_now(&lane->cache->clock) >= *until;
}

/* The batch that a block can go into; NULL: there is no room. */
static struct kvt_lane_batch *batch_for(struct layers *group, const struct kvt_lane_code *code)
{
    for (size_t i = 0; i < group->count; i++)
        if (kvt_lane_code_same(&group->batches[i].code, code))
            return &group->batches[i];
    if (group->count == KVT_LANE_FLIGHTS)
        return NULL;
    struct kvt_lane_batch *batch = &group->batches[group->count++];
    memset(batch, 0, sizeof(*batch));
    kvt_bq_init(&batch->blocks);
    batch->kind = KVT_REQ_LOAD;
    batch->code = *code;
    return batch;
}

/* Take the READY blocks of the oldest request. */
static void take(struct kvt_lane *lane, struct layers *group)
{
    struct kvt_cache *cache = lane->cache;
    struct kvt_req *req = kvt_block_req(cache, kvt_bq_peek(cache, &lane->layered));
    uint64_t pages = 0, taken = 0;
    group->count = 0;
    group->req = req;
    for (uint32_t left = lane->layered.count; left > 0; left--) {
        struct kvt_block *block = kvt_bq_pop(cache, &lane->layered);
        struct kvt_lane_batch *batch = NULL;
        uint64_t more = pages + block->record_bytes / KVT_PAGE_BYTES;
        struct kvt_lane_code code = kvt_lane_code_of(cache, KVT_REQ_LOAD, block);
        if (kvt_block_req(cache, block) == req && taken < KVT_LANE_LAYER_RECORDS &&
            more <= KVT_LANE_LAYER_PAGES)
            batch = batch_for(group, &code);
        if (batch == NULL || !kvt_lane_take_event(req, batch)) {
            kvt_bq_push(cache, &lane->layered, block);
            continue;
        }
        kvt_engine_move(cache, block, KVT_B_CODING);
        kvt_bq_push(cache, &batch->blocks, block);
        batch->bytes += block->record_bytes;
        req->layers_ready--;
        pages = more;
        taken++;
    }
    group->whole = taken + req->done == req->n;
}

/* Not locked. *loads: those batches that have something for the device. */
static size_t begin(struct kvt_lane *lane, struct layers *group, struct kvt_gpu_load *loads)
{
    size_t items = 0, outcomes = 0, count = 0;
    for (size_t i = 0; i < group->count; i++) {
        group->ended_at[i] = outcomes;
        kvt_lane_begin(lane, &group->batches[i], &group->flights[i], &lane->items[items],
                       &group->ended[i], &lane->outcomes[outcomes]);
        outcomes += group->ended[i].count;
        if (group->flights[i].blocks.count == 0)
            continue;
        loads[count++] = (struct kvt_gpu_load){.plan = group->batches[i].plan,
                                               .items = &lane->items[items],
                                               .n = group->flights[i].blocks.count};
        items += group->flights[i].blocks.count;
    }
    return count;
}

/* Locked. Blocks that ended before they were sent. */
static void end_early(struct kvt_lane *lane, struct layers *group)
{
    struct kvt_cache *cache = lane->cache;
    struct kvt_block *block;
    for (size_t i = 0; i < group->count; i++) {
        if (group->batches[i].rc == KVT_E_DEVICE)
            kvt_lane_count_errors(lane, group->ended[i].count);
        for (size_t at = group->ended_at[i]; (block = kvt_bq_pop(cache, &group->ended[i])) != NULL;
             at++)
            kvt_coding_end(cache, KVT_REQ_LOAD, block, &lane->outcomes[at]);
    }
}

/* Not locked. Announce the layers as they come, but never the last: that is for the verdict. */
static void announce(struct kvt_lane *lane, const struct layers *group,
                     const struct kvt_gpu_load *loads, size_t count)
{
    uint32_t ranges = 1;
    for (size_t i = 0; i < count; i++)
        ranges = KVT_MAX(ranges, kvt_gpu_job_ranges(loads[i].job));
    for (uint32_t range = 0; range + 1 < ranges && group->whole; range++) {
        uint32_t next = UINT32_MAX;
        for (size_t i = 0; i < count; i++) {
            uint32_t own;
            if (kvt_gpu_job_await_range(loads[i].job, range, &own) != 0)
                return; /* the end of the jobs says it too */
            next = KVT_MIN(next, own);
        }
        if (next == UINT32_MAX)
            return;
        pthread_mutex_lock(&lane->cache->lock);
        group->req->next_layer = KVT_MAX(group->req->next_layer, next);
        lane->cache->counters.gpu_layers++;
        pthread_cond_broadcast(&group->req->cond);
        pthread_mutex_unlock(&lane->cache->lock);
    }
}

void kvt_layers_run(struct kvt_lane *lane)
{
    struct kvt_cache *cache = lane->cache;
    struct kvt_gpu_load loads[KVT_LANE_FLIGHTS];
    struct kvt_gpu_order order = {.path = KVT_GPU_PATH_COPY,
                                  .ctas = (uint32_t)cache->settings->gpu_ctas};
    struct layers group;
    take(lane, &group);
    pthread_mutex_unlock(&cache->lock);
    size_t count = begin(lane, &group, loads);
    int rc = count > 0 ? kvt_gpu_restore_layers(loads, count, &order) : 0;
    pthread_mutex_lock(&cache->lock);
    end_early(lane, &group);
    if (rc == 0 && count > 0) {
        cache->counters.gpu_jobs += count;
        pthread_mutex_unlock(&cache->lock);
        announce(lane, &group, loads, count);
        pthread_mutex_lock(&cache->lock);
    }
    for (size_t i = 0, load = 0; i < group.count; i++) {
        struct kvt_lane_flight *flight = &group.flights[i];
        if (flight->blocks.count == 0)
            continue;
        flight->job = loads[load++].job;
        if (rc == 0) {
            kvt_lane_finish(lane, flight);
            continue;
        }
        if (rc == KVT_E_DEVICE)
            kvt_lane_count_errors(lane, flight->blocks.count);
        kvt_lane_end_all(cache, KVT_REQ_LOAD, &flight->blocks, rc);
    }
    kvt_pump(cache);
}
