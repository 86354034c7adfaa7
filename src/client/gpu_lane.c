/* GPU lanes: see gpu_lane.h.
 *
 *   READY blocks --> batch of one plan --> job in flight --> outcome of each block --> pump
 *
 * A batch is what is ready now of one pool, group and map, so that a busy lane makes large jobs by
 * itself. The thread submits while it may, then sleeps until the oldest job is done; it never
 * spins. The cache's lock is not held over a driver call.
 * A job that fails ends its blocks with KVT_E_DEVICE; a device that is lost goes on ending them so,
 * and everything else lives on. Not done here: coding, which src/gpu does; pools and their plans
 * (gpu_pool.c).
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "client/gpu_lane_impl.h"

#define LOAD_STREAK_MAX 16u
/* Bytes of one job: large enough to hide its start and end, small enough that slots come back and
 * other requests get their turn. */
#define JOB_BYTES (UINT64_C(64) << 20)
/* While this many jobs are in flight, more is gathered: many small jobs move less than a few of
 * some size. */
#define BUSY_FLIGHTS 2u
#define GATHER_BYTES (UINT64_C(22) << 20)
#define PACE_SLICES 250u /* a paced job is this part of a second's bytes */

/* ---- batches: locked ----------------------------------------------------------------------- */

/* Loads go before stores, within bounds; of loads, those from DRAM and direct ones in turns. */
static int pick_queue(struct kvt_lane *lane)
{
    bool loads = lane->ready[KVT_REQ_LOAD].count > 0,
         staged = lane->ready[KVT_LANE_STAGED].count > 0;
    bool stores = lane->ready[KVT_REQ_STORE].count > 0;
    if ((loads || staged) && (!stores || lane->load_streak < LOAD_STREAK_MAX)) {
        lane->load_streak++;
        return staged && (!loads || lane->load_streak % 2 == 0) ? KVT_LANE_STAGED : KVT_REQ_LOAD;
    }
    lane->load_streak = 0;
    return KVT_REQ_STORE;
}

static uint64_t job_bytes_max(const struct kvt_lane *lane)
{
    uint64_t pace = lane->cache->settings->gpu_pace;
    return pace == KVT_AUTO ? JOB_BYTES : KVT_MIN(pace / PACE_SLICES, JOB_BYTES);
}

/* Whether the batch can wait for the engine's event of this block's request; it then will. */
bool kvt_lane_take_event(struct kvt_req *req, struct kvt_lane_batch *batch)
{
    if (req->gpu_wait != KVT_WAIT_DUE)
        return true;
    if (batch->waiting_count == KVT_LANE_EVENTS_MAX)
        return false;
    batch->waiting[batch->waiting_count++] = req;
    req->gpu_wait = KVT_WAIT_DONE; /* one wait on the stage's streams holds for all that follows */
    return true;
}

/* Take what is ready and coded as the first block, in order; the others keep theirs. */
static void take_batch(struct kvt_lane *lane, struct kvt_lane_batch *batch)
{
    struct kvt_cache *cache = lane->cache;
    memset(batch, 0, sizeof(*batch));
    kvt_bq_init(&batch->blocks);
    int from = pick_queue(lane);
    batch->staged = from == KVT_LANE_STAGED;
    batch->kind = batch->staged ? KVT_REQ_LOAD : from;
    struct kvt_block_queue *queue = &lane->ready[from];
    const struct kvt_block *head = kvt_bq_peek(cache, queue);
    if (head == NULL)
        return;
    uint64_t bytes_max = job_bytes_max(lane);
    batch->code = kvt_lane_code_of(cache, batch->kind, head);
    bool full = false;
    for (uint32_t left = queue->count; left > 0; left--) {
        struct kvt_block *block = kvt_bq_pop(cache, queue);
        struct kvt_req *req = kvt_block_req(cache, block);
        struct kvt_lane_code code = kvt_lane_code_of(cache, batch->kind, block);
        bool fits = !full && kvt_lane_code_same(&code, &batch->code);
        if (fits && batch->blocks.count > 0 &&
            (batch->bytes + block->record_bytes > bytes_max ||
             batch->blocks.count == KVT_LANE_RECORDS_MAX))
            fits = false, full = true; /* later ones would overtake */
        if (!fits || !kvt_lane_take_event(req, batch)) {
            kvt_bq_push(cache, queue, block);
            continue;
        }
        if (!batch->staged) /* those are, since they are read */
            kvt_engine_move(cache, block, KVT_B_CODING);
        batch->bytes += block->record_bytes;
        kvt_bq_push(cache, &batch->blocks, block);
    }
}

/* ---- jobs: not locked ---------------------------------------------------------------------- */

/* A block's record in host memory; of one that is in the device's, its head. */
static uint8_t *record_of(const struct kvt_lane *lane, const struct kvt_block *block)
{
    return block->staged ? kvt_lane_head(lane, block)
                         : lane->cache->channel.arena + block->arena_offset;
}

/* The header of a granted record is what the store said; its checksum is the GPU's to verify. */
static bool header_ok(const struct kvt_lane *lane, const struct kvt_req *req,
                      const struct kvt_block *block, uint32_t payload_bytes)
{
    const uint8_t *record = record_of(lane, block);
    const struct kvt_record_header *header = (const struct kvt_record_header *)(const void *)record;
    struct kvt_full_key key;
    kvt_full_key_make(&key, req->ns->id, &block->key);
    return kvt_record_header_check(header) == 0 && header->record_bytes == block->record_bytes &&
           memcmp(&key, &header->key, sizeof(key)) == 0 && header->map == block->map_id &&
           header->payload_bytes == payload_bytes &&
           (block->checksum == 0 || header->checksum == block->checksum);
}

/* A record with other bytes than were granted. Where it was read from disk by the device, nobody
 * knows whose fault that is: it is loaded through DRAM. */
static void end_corrupt(const struct kvt_block *block, struct kvt_outcome *out)
{
    if (block->staged) {
        out->kind = KVT_OUT_RETRY;
        return;
    }
    out->status = KVT_E_CORRUPT;
    out->release_status = KVT_E_CORRUPT;
}

/* What can be said of a block before it is sent; false: *out is its end. */
static bool begin(struct kvt_lane *lane, const struct kvt_lane_batch *batch,
                  struct kvt_block *block, struct kvt_outcome *out)
{
    struct kvt_cache *cache = lane->cache;
    bool load = batch->kind == KVT_REQ_LOAD;
    const struct kvt_req *req = kvt_block_req(cache, block);
    if (!kvt_coding_begin(cache, req, out))
        return false;
    if (req->gpu_wait == KVT_WAIT_FAILED) { /* its pages may not be what they should be */
        out->status = KVT_E_DEVICE;
        return false;
    }
    int rc = batch->rc;
    if (rc == 0 && load && !header_ok(lane, req, block, batch->payload_bytes))
        rc = KVT_E_CORRUPT;
    if (rc != 0) {
        out->status = rc;
        if (load && rc == KVT_E_CORRUPT)
            end_corrupt(block, out);
        return false;
    }
    if (load)
        return true;
    uint8_t *record = cache->channel.arena + block->arena_offset;
    kvt_coding_header(cache, req, block, (struct kvt_record_header *)(void *)record);
    return true;
}

/* What is queued from here on waits for the engines' events. A request whose event is refused ends:
 * nobody knows when its pages are ready. */
static void await_engines(const struct kvt_lane_batch *batch)
{
    for (size_t i = 0; i < batch->waiting_count; i++)
        if (kvt_gpu_stage_await(batch->code.pool->stage->stage, batch->waiting[i]->gpu_event) != 0)
            batch->waiting[i]->gpu_wait = KVT_WAIT_FAILED;
}

void kvt_lane_begin(struct kvt_lane *lane, struct kvt_lane_batch *batch,
                    struct kvt_lane_flight *flight, struct kvt_gpu_item *items,
                    struct kvt_block_queue *ended, struct kvt_outcome *outcomes)
{
    struct kvt_cache *cache = lane->cache;
    struct kvt_block *block;
    flight->job = NULL;
    flight->kind = batch->kind;
    kvt_bq_init(&flight->blocks);
    kvt_bq_init(ended);
    batch->rc = kvt_lane_plan_of(&batch->code, &batch->plan, &batch->payload_bytes);
    await_engines(batch);
    while ((block = kvt_bq_pop(cache, &batch->blocks)) != NULL) {
        struct kvt_outcome *out = &outcomes[ended->count];
        if (begin(lane, batch, block, out)) {
            items[flight->blocks.count] = (struct kvt_gpu_item){
                .record = record_of(lane, block),
                .block = block->page,
                .staged = block->staged ? kvt_lane_address(lane, block) : 0,
            };
            kvt_bq_push(cache, &flight->blocks, block);
        } else {
            kvt_bq_push(cache, ended, block);
        }
    }
}

static int submit(struct kvt_lane *lane, struct kvt_lane_batch *batch,
                  struct kvt_lane_flight *flight)
{
    const struct kvt_settings *settings = lane->cache->settings;
    uint32_t record_bytes = flight->blocks.count > 0
                                ? (uint32_t)(batch->bytes / flight->blocks.count)
                                : 0; /* nearly: some may have ended */
    struct kvt_gpu_order order = {
        .path = batch->staged ? KVT_GPU_PATH_STAGED
                              : kvt_gpu_tuned_path(&lane->tuned, batch->kind == KVT_REQ_STORE,
                                                   record_bytes, flight->blocks.count),
        .guard = settings->guard,
        .ctas =
            (uint32_t)(batch->kind == KVT_REQ_LOAD ? settings->gpu_ctas : settings->gpu_store_ctas),
    };
    int rc = 0;
    if (flight->blocks.count > 0)
        rc = batch->kind == KVT_REQ_LOAD
                 ? kvt_gpu_restore(batch->plan, lane->items, flight->blocks.count, &order,
                                   &flight->job)
                 : kvt_gpu_evict(batch->plan, lane->items, flight->blocks.count, &order,
                                 &flight->job);
    return rc;
}

/* The outcome of one block of a job that is over. */
static struct kvt_outcome result_of(const struct kvt_lane_flight *flight, size_t index,
                                    const struct kvt_req *req, struct kvt_block *block)
{
    struct kvt_outcome out = {.kind = KVT_OUT_END};
    uint64_t checksum;
    out.status = kvt_gpu_job_result(flight->job, index, &checksum);
    if (flight->kind == KVT_REQ_LOAD) {
        if (out.status == 0 && block->checksum != 0 && checksum != block->checksum)
            out.status = KVT_E_CORRUPT;
        if (out.status == KVT_E_CORRUPT)
            end_corrupt(block, &out);
        else if (out.status == 0)
            kvt_coding_origin(req, block);
        return out;
    }
    if (out.status == KVT_E_GUARD || out.status == KVT_E_NONFINITE)
        return kvt_coding_escalate(req, block, out.status);
    if (out.status == 0) {
        block->checksum = checksum;
        out.kind = KVT_OUT_COMMIT;
    }
    return out;
}

/* ---- the loop: locked ---------------------------------------------------------------------- */

void kvt_lane_count_errors(struct kvt_lane *lane, uint64_t blocks)
{
    struct kvt_cache *cache = lane->cache;
    cache->counters.gpu_failed_blocks += blocks;
    if (!kvt_gpu_offline(lane->gpu) || lane->offline)
        return;
    lane->offline = true;
    cache->counters.gpu_lost++;
    pthread_mutex_unlock(&cache->lock);
    kvt_log(&cache->log, KVT_LOG_WARN,
            "CUDA device %d is lost (%s): loads and stores of its pools end with KVT_E_DEVICE",
            lane->device, kvt_gpu_offline_reason(lane->gpu));
    pthread_mutex_lock(&cache->lock);
}

/* End a block that came as far as the device. */
static void end_block(struct kvt_lane *lane, int kind, struct kvt_block *block,
                      const struct kvt_outcome *out)
{
    if (block->staged && (out->kind == KVT_OUT_RETRY || out->status == 0))
        kvt_lane_judged(lane, block, out->kind != KVT_OUT_RETRY);
    kvt_coding_end(lane->cache, kind, block, out);
}

/* End all blocks of a queue alike. */
void kvt_lane_end_all(struct kvt_cache *cache, int kind, struct kvt_block_queue *blocks, int status)
{
    struct kvt_outcome out = {.kind = KVT_OUT_END, .status = status};
    struct kvt_block *block;
    while ((block = kvt_bq_pop(cache, blocks)) != NULL)
        kvt_coding_end(cache, kind, block, &out);
}

void kvt_lane_finish(struct kvt_lane *lane, struct kvt_lane_flight *flight)
{
    struct kvt_cache *cache = lane->cache;
    struct kvt_block *block;
    size_t index = 0;
    int rc;
    pthread_mutex_unlock(&cache->lock);
    while ((rc = kvt_gpu_job_poll(flight->job, 1)) == 0) { /* woken early: ask again */
    }
    for (uint32_t at = flight->blocks.head; at != KVT_NONE; at = cache->blocks[at].next, index++) {
        block = &cache->blocks[at];
        lane->outcomes[index] = result_of(flight, index, kvt_block_req(cache, block), block);
    }
    kvt_gpu_job_free(flight->job);
    pthread_mutex_lock(&cache->lock);
    if (rc < 0)
        kvt_lane_count_errors(lane, flight->blocks.count);
    for (index = 0; (block = kvt_bq_pop(cache, &flight->blocks)) != NULL; index++)
        end_block(lane, flight->kind, block, &lane->outcomes[index]);
    kvt_pump(cache);
}

static void finish_oldest(struct kvt_lane *lane)
{
    struct kvt_lane_flight flight = lane->flights[lane->flight_first];
    lane->flight_first = (lane->flight_first + 1) % KVT_LANE_FLIGHTS; /* the lane's thread alone */
    lane->flight_count--;
    kvt_lane_finish(lane, &flight);
}

/* Send one batch. The job's place in the ring is taken before the lock goes. */
static void start_batch(struct kvt_lane *lane, struct kvt_lane_batch *batch)
{
    struct kvt_cache *cache = lane->cache;
    uint32_t at = (lane->flight_first + lane->flight_count) % KVT_LANE_FLIGHTS;
    struct kvt_lane_flight *flight = &lane->flights[at];
    struct kvt_block_queue ended;
    struct kvt_block *block;
    pthread_mutex_unlock(&cache->lock);
    kvt_lane_begin(lane, batch, flight, lane->items, &ended, lane->outcomes);
    int rc = submit(lane, batch, flight);
    int64_t now = kvt_clock_now(&cache->clock);
    pthread_mutex_lock(&cache->lock);
    if (batch->rc == KVT_E_DEVICE)
        kvt_lane_count_errors(lane, ended.count);
    for (size_t i = 0; (block = kvt_bq_pop(cache, &ended)) != NULL; i++)
        end_block(lane, batch->kind, block, &lane->outcomes[i]);
    if (rc != 0) {
        if (rc == KVT_E_DEVICE)
            kvt_lane_count_errors(lane, flight->blocks.count);
        kvt_lane_end_all(cache, batch->kind, &flight->blocks, rc);
    } else if (flight->job != NULL) {
        cache->counters.gpu_jobs++;
        lane->stage = batch->code.pool->stage;
        lane->flight_count++;
        uint64_t pace = cache->settings->gpu_pace;
        if (pace != KVT_AUTO)
            lane->next_ns =
                KVT_MAX(now, lane->next_ns) + (int64_t)((double)batch->bytes / (double)pace * 1e9);
    }
    kvt_pump(cache);
}

/* The pool of the next batch has another stage than the jobs in flight: the limit on CTAs holds for
 * the device, so they must be over first. */
static bool other_stage(struct kvt_lane *lane)
{
    for (int i = 0; i < KVT_LANE_QUEUES; i++) {
        const struct kvt_block *block = kvt_bq_peek(lane->cache, &lane->ready[i]);
        if (block != NULL && kvt_block_req(lane->cache, block)->pool->gpu->stage != lane->stage)
            return true;
    }
    return false;
}

static bool ready(const struct kvt_lane *lane)
{
    uint32_t count = 0;
    for (int i = 0; i < KVT_LANE_QUEUES; i++)
        count += lane->ready[i].count;
    return count > 0;
}

/* Enough for a job of some size, going by the first block. */
static bool gathered(struct kvt_lane *lane)
{
    for (int i = 0; i < KVT_LANE_QUEUES; i++) {
        const struct kvt_block *block = kvt_bq_peek(lane->cache, &lane->ready[i]);
        if (block != NULL && (uint64_t)block->record_bytes * lane->ready[i].count >= GATHER_BYTES)
            return true;
    }
    return false;
}

static bool may_start(struct kvt_lane *lane)
{
    if (!ready(lane) || lane->flight_count == KVT_LANE_FLIGHTS)
        return false;
    if (lane->flight_count >= BUSY_FLIGHTS && !gathered(lane))
        return false;
    if (lane->flight_count > 0 && other_stage(lane))
        return false;
    return lane->next_ns <= kvt_clock_now(&lane->cache->clock);
}

/* until: when a load by layers asks again; INT64_MAX: there is none. */
static void sleep_a_while(struct kvt_lane *lane, int64_t until)
{
    struct kvt_cache *cache = lane->cache;
    if (ready(lane)) /* paced */
        until = KVT_MIN(until, lane->next_ns);
    if (until == INT64_MAX) {
        pthread_cond_wait(&lane->work, &cache->lock);
        return;
    }
    struct timespec at = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
    (void)pthread_cond_timedwait(&lane->work, &cache->lock, &at);
}

void *kvt_lane_main(void *arg)
{
    struct kvt_lane *lane = arg;
    struct kvt_lane_batch batch;
    pthread_mutex_lock(&lane->cache->lock);
    while (!lane->stop || lane->flight_count > 0) {
        int64_t until = INT64_MAX;
        bool layers = kvt_layers_due(lane, &until); /* it has the device for itself */
        if (layers && lane->flight_count == 0) {
            kvt_layers_run(lane);
        } else if (!layers && may_start(lane)) {
            take_batch(lane, &batch);
            if (batch.blocks.count > 0)
                start_batch(lane, &batch);
        } else if (lane->flight_count > 0) {
            finish_oldest(lane);
        } else {
            sleep_a_while(lane, until);
        }
    }
    pthread_mutex_unlock(&lane->cache->lock);
    return NULL;
}

void kvt_lane_push(struct kvt_cache *cache, struct kvt_block *block, int kind)
{
    const struct kvt_req *req = kvt_block_req(cache, block);
    struct kvt_lane *lane = req->pool->gpu->lane;
    if (kind == KVT_REQ_LOAD && req->layers)
        kvt_layers_push(lane, block);
    else if (kind == KVT_REQ_LOAD && block->direct)
        kvt_gds_push(lane, block);
    else
        kvt_bq_push(cache, &lane->ready[kind], block);
    pthread_cond_signal(&lane->work);
}

int kvt_lane_wait_for(struct kvt_req *req, int wait, void *handle)
{
    if (wait == KVT_WAIT_FOR_NOTHING)
        return 0;
    struct kvt_lane *lane = req->pool->gpu->lane;
    req->gpu_event = handle;
    if (wait == KVT_WAIT_FOR_STREAM) {
        req->gpu_event = lane->events[req->index];
        int rc = kvt_gpu_event_record(lane->gpu, req->gpu_event, handle);
        if (rc != 0)
            return rc;
    }
    req->gpu_wait = KVT_WAIT_DUE;
    return 0;
}

bool kvt_lane_offline(const struct kvt_pool *pool)
{
    return pool->gpu != NULL && kvt_gpu_offline(pool->gpu->lane->gpu) != 0;
}
