/* The state machine of requests: what each reply of the store and each end of a block means.
 *
 *            ask           grant          worker
 *   QUEUED -------> ASKED -------> READY -------> CODING --.
 *     ^ |             |  \                          |       \ encoded
 *     | | cut, off    |   \ cancelled at grant      |        v
 *     | |             |    \                        |      CODED --> COMMITTING --.
 *     | |             |     `-----> GIVE_BACK <-----'  COMMIT sent   reply        |
 *     | |             |               |   |  (decoded, failed or cancelled)       |
 *     | |             | refused       |   `-----------------.                     |
 *     | `-------------+--> DONE <-----'  RELEASE/ABORT sent  | guard: next level  |
 *     `---------------------^--------------------------------'                    |
 *                            `----------------------------------------------------'
 *
 * Invariants: a block is in exactly one state; DONE is final; a request completes when all its
 * blocks are DONE, once; after that no worker, queue or message refers to it.
 * Threads: any, under the cache's lock. Does not wait, send or touch payload bytes.
 */
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "client/client.h"

#define BIT(state) (1u << (state))

static const uint16_t allowed_moves[KVT_B_STATES] = {
    [KVT_B_IDLE] = BIT(KVT_B_QUEUED),
    [KVT_B_QUEUED] = BIT(KVT_B_ASKED) | BIT(KVT_B_DONE),
    [KVT_B_ASKED] = BIT(KVT_B_READY) | BIT(KVT_B_GIVE_BACK) | BIT(KVT_B_DONE) | BIT(KVT_B_QUEUED),
    [KVT_B_READY] = BIT(KVT_B_CODING),
    [KVT_B_CODING] = BIT(KVT_B_GIVE_BACK) | BIT(KVT_B_CODED),
    [KVT_B_GIVE_BACK] = BIT(KVT_B_QUEUED) | BIT(KVT_B_DONE),
    [KVT_B_CODED] = BIT(KVT_B_COMMITTING) | BIT(KVT_B_DONE),
    [KVT_B_COMMITTING] = BIT(KVT_B_DONE),
    [KVT_B_DONE] = BIT(KVT_B_IDLE),
};

void kvt_engine_move(struct kvt_cache *cache, struct kvt_block *block, enum kvt_block_state to)
{
    if ((allowed_moves[block->state] & BIT(to)) == 0)
        cache->counters.bad_move++;
    block->state = (uint8_t)to;
}

static void count_load(struct kvt_cache *cache, int32_t status)
{
    struct kvt_client_counters *counters = &cache->counters;
    if (status == 0)
        counters->load_blocks_ok++;
    else if (status == KVT_E_MISS)
        counters->load_short_miss++;
    else if (status == KVT_E_DEADLINE)
        counters->load_short_deadline++;
    else if (status == KVT_E_CANCELED)
        counters->load_canceled++;
    else if (status == KVT_E_CORRUPT)
        counters->load_corrupt++;
    else
        counters->load_other++;
}

static void count_store(struct kvt_cache *cache, int32_t status)
{
    struct kvt_client_counters *counters = &cache->counters;
    if (status == 0)
        counters->store_blocks_ok++;
    else if (status == KVT_E_EXISTS)
        counters->store_exists++;
    else if (status == KVT_E_DROPPED)
        counters->store_dropped++;
    else if (status == KVT_E_ORPHAN)
        counters->store_orphan++;
    else if (status == KVT_E_CANCELED)
        counters->store_canceled++;
    else
        counters->store_other++;
}

static void account(struct kvt_cache *cache, struct kvt_req *req, const struct kvt_block *block,
                    int32_t status)
{
    if (req->kind == KVT_REQ_LOAD) {
        count_load(cache, status);
        kvt_planning_block(cache, req);
        if (status != 0)
            return;
        req->report.blocks_ok++;
        if (block->tier == KVT_TIER_DRAM)
            req->report.blocks_dram++;
        else if (block->tier == KVT_TIER_REMOTE)
            req->report.blocks_remote++;
        else
            req->report.blocks_disk++;
        req->report.bytes_moved += block->record_bytes;
        cache->counters.load_bytes += block->record_bytes;
        return;
    }
    count_store(cache, status);
    if (status == 0 || status == KVT_E_EXISTS)
        req->report.blocks_ok++;
    if (status == 0) {
        req->report.bytes_moved += block->record_bytes;
        cache->counters.store_bytes += block->record_bytes;
        cache->counters.store_logical += kvt_req_group(req)->block_bytes;
    }
}

void kvt_engine_complete(struct kvt_cache *cache, struct kvt_req *req)
{
    const int32_t *status = &cache->statuses[req->first];
    size_t run = 0;
    while (run < req->n &&
           (status[run] == 0 || (req->kind == KVT_REQ_STORE && status[run] == KVT_E_EXISTS)))
        run++;
    req->report.blocks_run_ok = run;
    req->elapsed_ns = kvt_clock_now(&cache->clock) - req->start_ns;
    req->report.elapsed_ns = req->elapsed_ns;
    if (req->kind == KVT_REQ_LOAD)
        kvt_planning_complete(cache, req);
    if (req->asking)
        TAILQ_REMOVE(&cache->asking[req->kind], req, asklist);
    req->asking = false;
    TAILQ_REMOVE(&cache->active, req, list);
    cache->active_count--;
    req->ns->refs--;
    req->pool->refs--;
    req->state = KVT_R_COMPLETE;
    cache->counters.completed++;
    uint64_t one = 1;
    /* Cannot fail but by overflow of a counter that nobody reads: then it is readable anyway. */
    ssize_t written = write(cache->event_fd, &one, sizeof(one));
    (void)written;
    pthread_cond_broadcast(&req->cond);
    pthread_cond_broadcast(&cache->idle);
}

void kvt_engine_block_done(struct kvt_cache *cache, struct kvt_block *block, int32_t status)
{
    struct kvt_req *req = kvt_block_req(cache, block);
    kvt_engine_move(cache, block, KVT_B_DONE);
    cache->statuses[block - cache->blocks] = status;
    account(cache, req, block, status);
    req->done++;
    if (req->done == req->n)
        kvt_engine_complete(cache, req);
}

void kvt_engine_end_unasked(struct kvt_cache *cache, struct kvt_req *req, int32_t status)
{
    uint32_t from = req->cursor;
    req->cursor = req->n;
    if (req->asking)
        TAILQ_REMOVE(&cache->asking[req->kind], req, asklist);
    req->asking = false;
    for (uint32_t i = from; i < req->n; i++)
        kvt_engine_block_done(cache, &cache->blocks[req->first + i], status);
}

/* The slot of a block goes back to the store; `status` is the block's outcome once it has. */
static void give_back(struct kvt_cache *cache, struct kvt_block *block, int32_t status,
                      int32_t release_status)
{
    struct kvt_req *req = kvt_block_req(cache, block);
    kvt_engine_move(cache, block, KVT_B_GIVE_BACK);
    block->retry = 0;
    block->release_status = release_status;
    cache->statuses[block - cache->blocks] = status;
    kvt_bq_push(cache, &cache->give_back[req->kind], block);
}

static bool slot_sane(const struct kvt_cache *cache, uint64_t offset, uint32_t record_bytes,
                      uint32_t expected)
{
    return expected != 0 && record_bytes == expected && offset % KVT_PAGE_BYTES == 0 &&
           offset <= cache->channel.arena_bytes &&
           record_bytes <= cache->channel.arena_bytes - offset;
}

/* The same of a place in a file. */
static bool place_sane(uint64_t offset, uint32_t record_bytes, uint32_t expected)
{
    return expected != 0 && record_bytes == expected && record_bytes % KVT_PAGE_BYTES == 0 &&
           offset % KVT_PAGE_BYTES == 0 && offset <= (uint64_t)INT64_MAX - record_bytes;
}

/* One entry of an ALLOC reply. */
static void alloc_entry(struct kvt_cache *cache, struct kvt_req *req, struct kvt_block *block,
                        const struct kvt_alloc_entry *entry)
{
    if (entry->status != 0) {
        cache->alloc_bytes -= block->record_bytes;
        kvt_engine_block_done(cache, block, entry->status);
        return;
    }
    block->slot = entry->slot;
    block->generation = entry->generation;
    block->arena_offset = entry->arena_offset;
    block->sequence = entry->sequence;
    if (!slot_sane(cache, entry->arena_offset, entry->record_bytes, block->record_bytes)) {
        cache->counters.bad_reply++;
        give_back(cache, block, KVT_E_CORRUPT, 0);
        return;
    }
    if (block->lossy)
        cache->counters.reorigin++;
    if (atomic_load_explicit(&req->canceled, memory_order_relaxed)) {
        give_back(cache, block, KVT_E_CANCELED, 0);
        return;
    }
    kvt_ready_push(cache, block, KVT_REQ_STORE);
}

/* A block that could not get a slot makes the ones after it unreachable: they are not tried. */
static void cut_chain(struct kvt_cache *cache, struct kvt_req *req, int32_t status)
{
    if (kvt_req_group(req)->kind != KVT_GROUP_FULL)
        return;
    uint32_t cut = req->n - req->cursor;
    cache->counters.store_cut += cut;
    kvt_engine_end_unasked(cache, req, status);
}

/* No id is left for a mixed map of that length: raw is at least as good. */
static void alloc_raw_instead(struct kvt_cache *cache, struct kvt_flight *flight)
{
    struct kvt_req *req = &cache->requests[flight->req];
    uint32_t first = flight->first, count = flight->count;
    kvt_flight_put(cache, flight);
    cache->counters.map_full += count;
    for (uint32_t i = 0; i < count; i++) {
        struct kvt_block *block = &cache->blocks[first + i];
        cache->alloc_bytes -= block->record_bytes;
        block->map = kvt_req_group(req)->uniform[KVT_LEVEL_RAW];
        block->level = KVT_LEVEL_RAW;
        kvt_engine_move(cache, block, KVT_B_QUEUED);
        kvt_retry_push(cache, block);
    }
}

static void on_alloc(struct kvt_cache *cache, struct kvt_flight *flight, const struct kvt_msg *msg)
{
    const struct kvt_msg_alloc_reply *reply = (const struct kvt_msg_alloc_reply *)(const void *)msg;
    struct kvt_req *req = &cache->requests[flight->req];
    uint32_t first = flight->first, count = flight->count;
    if (msg->status == KVT_E_LIMIT && cache->blocks[first].map->table_bytes != 0) {
        alloc_raw_instead(cache, flight);
        return;
    }
    struct kvt_alloc_entry failed = {.status = msg->status < 0 ? msg->status : KVT_E_CORRUPT};
    bool fits = msg->status >= 0 && msg->count == count &&
                msg->bytes >= sizeof(*reply) + count * sizeof(reply->entries[0]);
    if (msg->status >= 0 && !fits)
        cache->counters.bad_reply++;
    kvt_flight_put(cache, flight);
    /* Ending the last block completes the request, so the cut comes first. */
    bool cut = false;
    int32_t cut_status = 0;
    for (uint32_t i = 0; i < count && !cut; i++) {
        const struct kvt_alloc_entry *entry = fits ? &reply->entries[i] : &failed;
        cut = entry->status != 0 && entry->status != KVT_E_EXISTS;
        cut_status = entry->status;
    }
    if (cut)
        cut_chain(cache, req, cut_status == KVT_E_DROPPED ? KVT_E_ORPHAN : cut_status);
    for (uint32_t i = 0; i < count; i++) {
        cache->blocks[first + i].map_id = fits ? reply->map : 0;
        alloc_entry(cache, req, &cache->blocks[first + i], fits ? &reply->entries[i] : &failed);
    }
    kvt_workers_wake(cache);
}

static void on_commit(struct kvt_cache *cache, struct kvt_flight *flight, const struct kvt_msg *msg)
{
    const struct kvt_msg_slots *reply = (const struct kvt_msg_slots *)(const void *)msg;
    uint32_t index = flight->first, count = flight->count;
    bool fits = msg->status >= 0 && msg->count == count &&
                msg->bytes >= sizeof(*reply) + count * sizeof(reply->slots[0]);
    if (msg->status >= 0 && !fits)
        cache->counters.bad_reply++;
    int32_t failed = msg->status < 0 ? msg->status : KVT_E_CORRUPT;
    kvt_flight_put(cache, flight);
    for (uint32_t i = 0; i < count && index != KVT_NONE; i++) {
        struct kvt_block *block = &cache->blocks[index];
        index = block->next;
        cache->alloc_bytes -= block->record_bytes;
        kvt_engine_block_done(cache, block, fits ? reply->slots[i].status : failed);
    }
}

static void on_grant(struct kvt_cache *cache, struct kvt_flight *flight,
                     const struct kvt_msg_grant *grant)
{
    struct kvt_req *req = &cache->requests[flight->req];
    struct kvt_block *block = NULL;
    if (grant->index < flight->count)
        block = &cache->blocks[flight->first + grant->index];
    if (block == NULL || block->state != KVT_B_ASKED) {
        cache->counters.bad_reply++;
        return;
    }
    bool direct = flight->direct;
    uint32_t credit = flight->credit / flight->left;
    flight->credit -= credit;
    cache->credit_used[flight->klass] -= credit;
    if (--flight->left == 0)
        kvt_flight_put(cache, flight);
    kvt_planning_grant(req, grant);
    if (grant->msg.status != 0) {
        kvt_engine_block_done(cache, block, grant->msg.status);
        return;
    }
    block->slot = grant->slot;
    block->generation = grant->generation;
    block->record_bytes = grant->record_bytes;
    block->arena_offset = grant->arena_offset;
    block->checksum = grant->checksum;
    block->map_id = grant->map;
    block->level = (uint8_t)kvt_map_id_level(grant->map);
    block->tier = grant->tier;
    block->direct = grant->direct != 0;
    block->root = grant->root;
    block->segment = grant->segment;
    const struct kvt_map *uniform = kvt_req_group(req)->uniform[block->level];
    uint32_t expected = uniform == NULL ? 0 : uniform->record_bytes;
    if (expected != 0 && grant->map >= KVT_MAP_MIXED_FIRST)
        expected = grant->record_bytes; /* the record itself says whether that is right */
    bool sane = block->direct
                    ? direct && place_sane(grant->arena_offset, grant->record_bytes, expected)
                    : slot_sane(cache, grant->arena_offset, grant->record_bytes, expected);
    if (!sane) {
        cache->counters.bad_reply++;
        give_back(cache, block, KVT_E_CORRUPT, KVT_E_CORRUPT);
    } else if (atomic_load_explicit(&req->canceled, memory_order_relaxed)) {
        give_back(cache, block, KVT_E_CANCELED, 0);
    } else {
        kvt_ready_push(cache, block, KVT_REQ_LOAD);
        kvt_workers_wake(cache);
    }
}

/* The store refused a whole ACQUIRE: every grant still owed becomes this status. */
static void on_acquire_refused(struct kvt_cache *cache, struct kvt_flight *flight, int32_t status)
{
    uint32_t first = flight->first, count = flight->count;
    kvt_flight_put(cache, flight);
    for (uint32_t i = 0; i < count; i++)
        if (cache->blocks[first + i].state == KVT_B_ASKED)
            kvt_engine_block_done(cache, &cache->blocks[first + i],
                                  status < 0 ? status : KVT_E_CORRUPT);
}

static void lookup_tiers(const struct kvt_msg *msg, struct kvt_call *call)
{
    const struct kvt_msg_lookup_reply *reply =
        (const struct kvt_msg_lookup_reply *)(const void *)msg;
    uint32_t run = msg->status < 0 ? 0 : (uint32_t)msg->status;
    for (uint32_t i = 0; call->roots != NULL && i < call->count; i++)
        call->roots[i] = reply->entries[i].root;
    if (call->tiers == NULL)
        return;
    for (uint32_t i = 0; i < call->count; i++) {
        enum kvt_tier tier = (enum kvt_tier)reply->entries[i].tier;
        if (i >= run && !call->each && tier != KVT_TIER_PENDING)
            tier = KVT_TIER_MISS;
        call->tiers[i] = tier;
    }
}

static void on_call(struct kvt_cache *cache, struct kvt_flight *flight, const struct kvt_msg *msg)
{
    struct kvt_call *call = flight->call;
    uint16_t op = flight->op;
    kvt_flight_put(cache, flight);
    call->status = msg->status;
    call->ns = msg->ns;
    if (op == KVT_OP_LOOKUP && msg->status >= 0) {
        if (msg->count != call->count || (uint32_t)msg->status > call->count ||
            msg->bytes < sizeof(*msg) + call->count * sizeof(struct kvt_lookup_entry)) {
            cache->counters.bad_reply++;
            call->status = KVT_E_CORRUPT;
        } else {
            lookup_tiers(msg, call);
        }
    }
    if (op == KVT_OP_STAT && msg->status >= 0) {
        uint32_t room = (uint32_t)((msg->bytes - sizeof(*msg)) / sizeof(uint64_t));
        call->count = KVT_MIN(KVT_MIN(msg->count, call->values_max), room);
        const struct kvt_msg_stat_reply *reply =
            (const struct kvt_msg_stat_reply *)(const void *)msg;
        if (call->count > 0) /* a ping wants none */
            memcpy(call->values, reply->values, call->count * sizeof(uint64_t));
    }
    call->done = true;
    if (call == cache->lead)
        kvt_ring_word_wake(cache->lead_word);
    else if (call != &cache->ping) /* nobody waits for that one */
        pthread_cond_signal(&call->cond);
}

void kvt_engine_reply(struct kvt_cache *cache, const struct kvt_msg *msg)
{
    struct kvt_flight *flight = kvt_flight_of(cache, msg->cookie);
    if (flight == NULL) {
        cache->counters.bad_reply++;
        return;
    }
    if (msg->op == KVT_OP_GRANT) {
        if (flight->op == KVT_OP_ACQUIRE && msg->bytes >= sizeof(struct kvt_msg_grant))
            on_grant(cache, flight, (const struct kvt_msg_grant *)(const void *)msg);
        else
            cache->counters.bad_reply++;
    } else if (msg->op != KVT_OP_REPLY || msg->reply_to != flight->op) {
        cache->counters.bad_reply++;
    } else if (flight->op == KVT_OP_ALLOC) {
        on_alloc(cache, flight, msg);
    } else if (flight->op == KVT_OP_COMMIT) {
        on_commit(cache, flight, msg);
    } else if (flight->op == KVT_OP_ACQUIRE) {
        on_acquire_refused(cache, flight, msg->status);
    } else {
        on_call(cache, flight, msg);
    }
}

/* The store is gone, or has disconnected us: everything that is owed ends with KVT_E_CLOSED (a
 * remote one: with KVT_E_MISS, and another connection will come). Blocks
 * that workers hold end when the workers are done with them. */
void kvt_engine_fail_all(struct kvt_cache *cache)
{
    cache->broken = true;
    for (uint32_t i = 0; i < KVT_FLIGHTS_MAX; i++) {
        struct kvt_flight *flight = &cache->flights[i];
        struct kvt_msg msg = {.bytes = sizeof(msg), .op = KVT_OP_REPLY, .status = KVT_E_CLOSED};
        if (flight->op == 0)
            continue;
        if (flight->klass != KVT_C_CALL)
            msg.status = kvt_lost_status(cache);
        msg.cookie = kvt_flight_cookie(cache, flight);
        msg.reply_to = flight->op;
        kvt_engine_reply(cache, &msg);
    }
    struct kvt_req *req, *next;
    for (req = TAILQ_FIRST(&cache->active); req != NULL; req = next) {
        next = TAILQ_NEXT(req, list);
        if (req->state == KVT_R_ACTIVE)
            kvt_engine_end_unasked(cache, req, kvt_lost_status(cache));
    }
    struct kvt_block *block;
    while ((block = kvt_bq_pop(cache, &cache->retry)) != NULL)
        kvt_engine_block_done(cache, block, kvt_lost_status(cache));
    while ((block = kvt_bq_pop(cache, &cache->reload)) != NULL)
        kvt_engine_block_done(cache, block, kvt_lost_status(cache));
    pthread_cond_broadcast(&cache->room);
    kvt_reply_wake(cache); /* it connects again, and may not be who found out */
}
