/* Sending: turns queued blocks and requests into messages, as far as ring space, reply credits and
 * the slot window allow. What cannot go now goes when a reply, a worker or the reply thread pumps
 * again.
 *
 * Order: cancels and slots given back first (they free what others wait for), then commits, then
 * new work; loads before stores. Chains go in order, oldest request first.
 * Threads: any, under the cache's lock. Never waits.
 */
#include <string.h>

#include "base/checked.h"
#include "client/gpu_lane.h"

/* Bytes of a ring frame beyond its message, generously; and the largest filler at its end. */
#define FRAME_EXTRA 16u
#define CREDIT_ALL (KVT_CLIENT_RING_BYTES - KVT_MSG_BYTES_MAX - FRAME_EXTRA)
#define GRANT_CREDIT ((uint32_t)sizeof(struct kvt_msg_grant) + FRAME_EXTRA)
#define SLOTS_PER_MESSAGE 64u                /* of COMMIT, ABORT, RELEASE */
#define GATHER_SLOTS (4 * SLOTS_PER_MESSAGE) /* held back for a while, and so many bytes */
#define GATHER_BYTES (UINT64_C(16) << 20)
#define BLOCKS_PER_ALLOC 32u /* small, so that encoding overlaps with allocation */
#define ACQUIRE_KEYS_MIN 64u /* do not dribble out a long chain when credits are short */

static const uint32_t credit_max[KVT_C_CLASSES] = {
    [KVT_C_LOAD] = CREDIT_ALL / 2, [KVT_C_STORE] = CREDIT_ALL / 4, [KVT_C_CALL] = CREDIT_ALL / 4};
static const uint32_t flights_max[KVT_C_CLASSES] = {[KVT_C_LOAD] = KVT_FLIGHTS_MAX / 2,
                                                    [KVT_C_STORE] = KVT_FLIGHTS_MAX / 4,
                                                    [KVT_C_CALL] = KVT_FLIGHTS_MAX / 4};

static_assert(sizeof(struct kvt_key) == sizeof(struct kvt_msg_key), "keys travel as they are");

struct kvt_flight *kvt_flight_take(struct kvt_cache *cache, enum kvt_credit_class klass,
                                   uint16_t op, uint32_t credit)
{
    uint32_t index = cache->flight_free;
    if (cache->broken || index == KVT_NONE || cache->flight_count[klass] >= flights_max[klass] ||
        credit > credit_max[klass] - cache->credit_used[klass])
        return NULL;
    struct kvt_flight *flight = &cache->flights[index];
    cache->flight_free = flight->next_free;
    cache->flight_count[klass]++;
    cache->credit_used[klass] += credit;
    flight->generation++;
    flight->op = op;
    flight->klass = (uint8_t)klass;
    flight->cancel_wanted = flight->direct = false;
    flight->req = KVT_NONE;
    flight->first = KVT_NONE;
    flight->count = flight->left = 0;
    flight->credit = credit;
    flight->call = NULL;
    return flight;
}

void kvt_flight_put(struct kvt_cache *cache, struct kvt_flight *flight)
{
    cache->credit_used[flight->klass] -= flight->credit;
    cache->flight_count[flight->klass]--;
    if (flight->cancel_wanted)
        cache->cancels_wanted--;
    flight->cancel_wanted = false;
    flight->op = 0;
    flight->next_free = cache->flight_free;
    cache->flight_free = (uint32_t)(flight - cache->flights);
    if (cache->room_waiters > 0)
        pthread_cond_broadcast(&cache->room);
}

/* A cookie is never 0 and names one life of one flight. */
uint64_t kvt_flight_cookie(const struct kvt_cache *cache, const struct kvt_flight *flight)
{
    return (uint64_t)flight->generation << 32 | (uint64_t)(flight - cache->flights + 1);
}

struct kvt_flight *kvt_flight_of(struct kvt_cache *cache, uint64_t cookie)
{
    uint64_t index = (cookie & UINT32_MAX) - 1;
    if (index >= KVT_FLIGHTS_MAX)
        return NULL;
    struct kvt_flight *flight = &cache->flights[index];
    return flight->op != 0 && flight->generation == (uint32_t)(cookie >> 32) ? flight : NULL;
}

void *kvt_msg_reserve(struct kvt_cache *cache, uint32_t bytes, uint16_t op, uint64_t cookie,
                      uint32_t ns, uint32_t count)
{
    bytes = (uint32_t)kvt_round_up(bytes, 8);
    struct kvt_msg *msg = kvt_ring_reserve(&cache->channel.requests, bytes);
    if (msg == NULL) {
        if (!cache->stuck)
            cache->counters.ring_full++;
        cache->stuck = true;
        return NULL;
    }
    memset(msg, 0, bytes);
    msg->bytes = bytes;
    msg->op = op;
    msg->cookie = cookie;
    msg->ns = ns;
    msg->count = count;
    return msg;
}

void kvt_msg_push(struct kvt_cache *cache, const void *msg)
{
    kvt_ring_push(&cache->channel.requests, ((const struct kvt_msg *)msg)->bytes);
}

static void send_cancels(struct kvt_cache *cache)
{
    for (uint32_t i = 0; i < KVT_FLIGHTS_MAX && cache->cancels_wanted > 0; i++) {
        struct kvt_flight *flight = &cache->flights[i];
        if (flight->op == 0 || !flight->cancel_wanted)
            continue;
        uint32_t ns = kvt_req_handle(&cache->requests[flight->req]);
        struct kvt_msg_cancel *msg = kvt_msg_reserve(cache, sizeof(*msg), KVT_OP_CANCEL, 0, ns, 0);
        if (msg == NULL)
            return;
        msg->target = kvt_flight_cookie(cache, flight);
        kvt_msg_push(cache, msg);
        flight->cancel_wanted = false;
        cache->cancels_wanted--;
    }
}

/* How many blocks at the head of a queue share the first one's handle, at most a message. */
static uint32_t same_ns_run(struct kvt_cache *cache, const struct kvt_block_queue *queue)
{
    const struct kvt_block *block = kvt_bq_peek(cache, queue);
    if (block == NULL)
        return 0;
    uint32_t handle = kvt_req_handle(kvt_block_req(cache, block));
    uint32_t run = 1;
    while (run < SLOTS_PER_MESSAGE && block->next != KVT_NONE) {
        block = &cache->blocks[block->next];
        if (kvt_req_handle(kvt_block_req(cache, block)) != handle)
            break;
        run++;
    }
    return run;
}

/* Whether a is asked for again before b: a parent before its children, which are later in the
 * request or in a later one. The store refuses a child whose parent it does not know. */
static bool retry_before(struct kvt_cache *cache, const struct kvt_block *a,
                         const struct kvt_block *b)
{
    int64_t a_ns = kvt_block_req(cache, a)->start_ns, b_ns = kvt_block_req(cache, b)->start_ns;
    return a->req == b->req ? a < b : a_ns < b_ns;
}

void kvt_retry_push(struct kvt_cache *cache, struct kvt_block *block)
{
    uint32_t *link = &cache->retry.head;
    while (*link != KVT_NONE && !retry_before(cache, block, &cache->blocks[*link]))
        link = &cache->blocks[*link].next;
    block->next = *link;
    *link = (uint32_t)(block - cache->blocks);
    if (block->next == KVT_NONE)
        cache->retry.tail = *link;
    cache->retry.count++;
}

static void gave_back(struct kvt_cache *cache, struct kvt_block *block, int kind)
{
    if (kind == KVT_REQ_STORE)
        cache->alloc_bytes -= block->record_bytes;
    if (block->retry) {
        kvt_engine_move(cache, block, KVT_B_QUEUED);
        block->retry = 0;
        if (kind == KVT_REQ_STORE)
            kvt_retry_push(cache, block);
        else
            kvt_bq_push(cache, &cache->reload, block);
        return;
    }
    kvt_engine_block_done(cache, block, cache->statuses[block - cache->blocks]);
}

/* Slots of loads from DRAM gather while workers have more to do: whoever sends them has to wake the
 * store. Not what came from disk: other reads wait for its slots; nor the last ones of a request.
 */
static bool may_gather(struct kvt_cache *cache, const struct kvt_block_queue *queue)
{
    uint64_t bytes = 0;
    uint32_t run = 0, run_req = KVT_NONE;
    if (queue->count >= GATHER_SLOTS || cache->ready[KVT_REQ_LOAD].count == 0)
        return false;
    for (uint32_t i = queue->head; i != KVT_NONE; i = cache->blocks[i].next) {
        const struct kvt_block *block = &cache->blocks[i];
        const struct kvt_req *req = kvt_block_req(cache, block);
        run = block->req == run_req ? run + 1 : 1;
        run_req = block->req;
        if (block->tier != KVT_TIER_DRAM || req->done + run == req->n)
            return false;
        bytes += block->record_bytes;
    }
    return bytes < KVT_MIN(GATHER_BYTES, cache->arena_bytes / 32);
}

static void send_give_back(struct kvt_cache *cache, int kind)
{
    struct kvt_block_queue *queue = &cache->give_back[kind];
    uint16_t op = kind == KVT_REQ_LOAD ? KVT_OP_RELEASE : KVT_OP_ABORT;
    uint32_t count;
    if (kind == KVT_REQ_LOAD && may_gather(cache, queue))
        return;
    while ((count = same_ns_run(cache, queue)) > 0) {
        uint32_t ns = kvt_req_handle(kvt_block_req(cache, kvt_bq_peek(cache, queue)));
        struct kvt_msg_slots *msg = kvt_msg_reserve(
            cache, (uint32_t)(sizeof(*msg) + count * sizeof(msg->slots[0])), op, 0, ns, count);
        if (msg == NULL)
            return;
        uint32_t index = queue->head;
        for (uint32_t i = 0; i < count; i++, index = cache->blocks[index].next) {
            const struct kvt_block *block = &cache->blocks[index];
            msg->slots[i].slot = block->slot;
            msg->slots[i].generation = block->generation;
            msg->slots[i].status = kind == KVT_REQ_LOAD ? block->release_status : 0;
            msg->slots[i].direct = block->direct;
        }
        kvt_msg_push(cache, msg);
        for (uint32_t i = 0; i < count; i++)
            gave_back(cache, kvt_bq_pop(cache, queue), kind);
    }
}

static void send_commits(struct kvt_cache *cache)
{
    uint32_t count;
    while ((count = same_ns_run(cache, &cache->coded)) > 0) {
        uint32_t bytes =
            (uint32_t)(sizeof(struct kvt_msg_slots) + count * sizeof(struct kvt_slot_ref));
        struct kvt_flight *flight =
            kvt_flight_take(cache, KVT_C_STORE, KVT_OP_COMMIT, bytes + FRAME_EXTRA);
        if (flight == NULL)
            return;
        uint32_t ns = kvt_req_handle(kvt_block_req(cache, kvt_bq_peek(cache, &cache->coded)));
        struct kvt_msg_slots *msg = kvt_msg_reserve(cache, bytes, KVT_OP_COMMIT,
                                                    kvt_flight_cookie(cache, flight), ns, count);
        if (msg == NULL) {
            kvt_flight_put(cache, flight);
            return;
        }
        struct kvt_block_queue sent;
        kvt_bq_init(&sent);
        for (uint32_t i = 0; i < count; i++) {
            struct kvt_block *block = kvt_bq_pop(cache, &cache->coded);
            msg->slots[i].slot = block->slot;
            msg->slots[i].generation = block->generation;
            msg->slots[i].checksum = block->checksum;
            kvt_engine_move(cache, block, KVT_B_COMMITTING);
            kvt_bq_push(cache, &sent, block);
        }
        flight->first = sent.head;
        flight->count = count;
        kvt_msg_push(cache, msg);
    }
}

static void set_parent(const struct kvt_cache *cache, const struct kvt_req *req, uint32_t index,
                       struct kvt_msg_alloc *msg)
{
    const struct kvt_key *parent =
        index == 0 ? &req->parent : &cache->blocks[req->first + index - 1].key;
    msg->parent_len = parent->hash_len;
    memcpy(msg->parent, parent->hash, sizeof(msg->parent));
}

/* ALLOC blocks [index, index + count) of a request: one map, one origin. */
static bool send_alloc(struct kvt_cache *cache, struct kvt_req *req, uint32_t index, uint32_t count)
{
    struct kvt_block *blocks = &cache->blocks[req->first + index];
    uint32_t credit =
        (uint32_t)(sizeof(struct kvt_msg_alloc_reply) + count * sizeof(struct kvt_alloc_entry)) +
        FRAME_EXTRA;
    struct kvt_flight *flight = kvt_flight_take(cache, KVT_C_STORE, KVT_OP_ALLOC, credit);
    if (flight == NULL)
        return false;
    struct kvt_msg_alloc *msg =
        kvt_msg_reserve(cache, (uint32_t)(sizeof(*msg) + count * sizeof(msg->keys[0])),
                        KVT_OP_ALLOC, kvt_flight_cookie(cache, flight), kvt_req_handle(req), count);
    if (msg == NULL) {
        kvt_flight_put(cache, flight);
        return false;
    }
    uint32_t block_tokens = kvt_req_group(req)->block_tokens;
    const struct kvt_map *map = blocks[0].map;
    msg->map = map->table_bytes == 0 ? map->level : 0;
    msg->level = map->level;
    msg->record_bytes = map->record_bytes;
    msg->replace = blocks[0].lossy ? KVT_REPLACE_NEW
                   : req->cool     ? KVT_REPLACE_COOL
                                   : KVT_REPLACE_RAISE;
    msg->write = req->write;
    msg->first_pos = req->first_pos + index * block_tokens;
    msg->block_tokens = block_tokens;
    if (kvt_req_group(req)->kind == KVT_GROUP_FULL)
        set_parent(cache, req, index, msg);
    for (uint32_t i = 0; i < count; i++) {
        memcpy(&msg->keys[i], &blocks[i].key, sizeof(msg->keys[i]));
        blocks[i].record_bytes = map->record_bytes;
        cache->alloc_bytes += blocks[i].record_bytes;
        kvt_engine_move(cache, &blocks[i], KVT_B_ASKED);
    }
    flight->req = req->index;
    flight->first = req->first + index;
    flight->count = count;
    kvt_msg_push(cache, msg);
    return true;
}

/* Whether `bytes` more may be allocated: always when nothing is, so that a record larger than the
 * window still goes. */
static bool window_open(const struct kvt_cache *cache, uint64_t bytes)
{
    return cache->alloc_bytes == 0 || cache->alloc_bytes + bytes <= cache->alloc_bytes_max;
}

static void send_retries(struct kvt_cache *cache)
{
    struct kvt_block *block;
    while ((block = kvt_bq_peek(cache, &cache->retry)) != NULL) {
        struct kvt_req *req = kvt_block_req(cache, block);
        if (atomic_load_explicit(&req->canceled, memory_order_relaxed)) {
            (void)kvt_bq_pop(cache, &cache->retry);
            kvt_engine_block_done(cache, block, KVT_E_CANCELED);
            continue;
        }
        if (!window_open(cache, block->map->record_bytes) ||
            !send_alloc(cache, req, (uint32_t)(block - cache->blocks) - req->first, 1))
            return;
        (void)kvt_bq_pop(cache, &cache->retry);
    }
}

/* Blocks from the cursor on that one ALLOC can carry now; 0: the window is closed. */
static uint32_t alloc_run(const struct kvt_cache *cache, const struct kvt_req *req)
{
    const struct kvt_block *blocks = &cache->blocks[req->first + req->cursor];
    uint32_t left = KVT_MIN(req->n - req->cursor, BLOCKS_PER_ALLOC);
    uint64_t record_bytes = blocks[0].map->record_bytes;
    uint32_t run = 0;
    while (run < left && blocks[run].map == blocks[0].map && blocks[run].lossy == blocks[0].lossy) {
        if (!window_open(cache, (run + 1) * record_bytes) ||
            (cache->alloc_bytes == 0 && run > 0 &&
             (run + 1) * record_bytes > cache->alloc_bytes_max))
            break;
        run++;
    }
    return run;
}

static void asked(struct kvt_cache *cache, struct kvt_req *req, uint32_t count)
{
    req->cursor += count;
    if (req->cursor < req->n)
        return;
    TAILQ_REMOVE(&cache->asking[req->kind], req, asklist);
    req->asking = false;
}

static void ask_stores(struct kvt_cache *cache)
{
    struct kvt_req *req;
    while ((req = TAILQ_FIRST(&cache->asking[KVT_REQ_STORE])) != NULL) {
        uint32_t run = alloc_run(cache, req);
        if (run == 0 || !send_alloc(cache, req, req->cursor, run))
            return;
        asked(cache, req, run);
    }
}

/* A deadline by the clock of the store, which may live in another time namespace. */
static int64_t store_deadline(const struct kvt_cache *cache, int64_t deadline_ns)
{
    int64_t at;
    if (deadline_ns == INT64_MAX || !kvt_add_ok(deadline_ns, cache->link.clock_shift_ns, &at))
        return INT64_MAX;
    return at;
}

/* ACQUIRE blocks [index, index + count) of a request. */
static bool send_acquire(struct kvt_cache *cache, struct kvt_req *req, uint32_t index,
                         uint32_t count, bool direct)
{
    struct kvt_flight *flight =
        kvt_flight_take(cache, KVT_C_LOAD, KVT_OP_ACQUIRE, count * GRANT_CREDIT);
    if (flight == NULL)
        return false;
    struct kvt_msg_acquire *msg = kvt_msg_reserve(
        cache, (uint32_t)(sizeof(*msg) + count * sizeof(msg->keys[0])), KVT_OP_ACQUIRE,
        kvt_flight_cookie(cache, flight), kvt_req_handle(req), count);
    if (msg == NULL) {
        kvt_flight_put(cache, flight);
        return false;
    }
    msg->deadline_ns = store_deadline(cache, req->deadline_ns);
    msg->min_level = req->min_level;
    msg->direct = direct;
    struct kvt_block *blocks = &cache->blocks[req->first + index];
    for (uint32_t i = 0; i < count; i++) {
        memcpy(&msg->keys[i], &blocks[i].key, sizeof(msg->keys[i]));
        kvt_engine_move(cache, &blocks[i], KVT_B_ASKED);
    }
    flight->req = req->index;
    flight->direct = direct;
    flight->first = req->first + index;
    flight->count = flight->left = count;
    kvt_msg_push(cache, msg);
    return true;
}

/* Blocks that could not be read where they lie: through DRAM. */
static void send_reloads(struct kvt_cache *cache)
{
    struct kvt_block *block;
    while ((block = kvt_bq_peek(cache, &cache->reload)) != NULL) {
        struct kvt_req *req = kvt_block_req(cache, block);
        bool canceled = atomic_load_explicit(&req->canceled, memory_order_relaxed) != 0;
        if (!canceled &&
            !send_acquire(cache, req, (uint32_t)(block - cache->blocks) - req->first, 1, false))
            return;
        (void)kvt_bq_pop(cache, &cache->reload);
        if (canceled)
            kvt_engine_block_done(cache, block, KVT_E_CANCELED);
    }
}

static void ask_loads(struct kvt_cache *cache)
{
    struct kvt_req *req;
    while ((req = TAILQ_FIRST(&cache->asking[KVT_REQ_LOAD])) != NULL) {
        uint32_t left = req->n - req->cursor;
        uint32_t afford = (credit_max[KVT_C_LOAD] - cache->credit_used[KVT_C_LOAD]) / GRANT_CREDIT;
        uint32_t count = KVT_MIN(KVT_MIN(left, KVT_MSG_KEYS_MAX), afford);
        bool direct = !req->layers && kvt_lane_direct(req->pool);
        if (count < KVT_MIN(left, ACQUIRE_KEYS_MIN) ||
            !send_acquire(cache, req, req->cursor, count, direct))
            return;
        asked(cache, req, count);
    }
}

/* Nothing can be sent any more: slots die with the store. */
static void drain_broken(struct kvt_cache *cache)
{
    struct kvt_block *block;
    for (int kind = 0; kind < 2; kind++) {
        while ((block = kvt_bq_pop(cache, &cache->give_back[kind])) != NULL) {
            if (kind == KVT_REQ_STORE)
                cache->alloc_bytes -= block->record_bytes;
            kvt_engine_block_done(cache, block,
                                  block->retry ? kvt_lost_status(cache)
                                               : cache->statuses[block - cache->blocks]);
        }
    }
    while ((block = kvt_bq_pop(cache, &cache->coded)) != NULL) {
        cache->alloc_bytes -= block->record_bytes;
        kvt_engine_block_done(cache, block, kvt_lost_status(cache));
    }
}

void kvt_pump(struct kvt_cache *cache)
{
    bool was_stuck = cache->stuck;
    cache->stuck = false;
    if (cache->broken) {
        drain_broken(cache);
        return;
    }
    send_cancels(cache);
    send_give_back(cache, KVT_REQ_LOAD);
    send_give_back(cache, KVT_REQ_STORE);
    send_commits(cache);
    send_retries(cache);
    send_reloads(cache);
    ask_loads(cache);
    if (cache->retry.count == 0) /* blocks that come after those in a chain wait for them */
        ask_stores(cache);
    if (cache->stuck && !was_stuck)
        kvt_reply_wake(cache);
}
