/* Drives kvt_store_handle() and kvt_store_run(), as a client does, by messages.
 *
 * Every record is a page, or a few: the store never looks into a payload, so caps scaled by the
 * same factor give the same decisions. A few where the disk is so small that its log would have
 * less than 64 segments, which a drive never has: such a log turns over in steps of some per cent.
 * It takes that much memory for each block held. Time is that of the trace; within a request it
 * moves only as far as the store's timers ask. Threads: one.
 */
#include "replay_store.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/checked.h"
#include "format/disk.h"
#include "format/record.h"
#include "kvtier/error.h"
#include "store/l2_layout.h"

#define CHUNK 128u /* keys of a message */
#define STAGING_BLOCKS 1024u
#define LOG_PAGES (64u * (KVT_SEGMENT_BYTES_MIN / KVT_PAGE_BYTES)) /* 64 segments' worth */
#define RECORD_PAGES_MAX 16u
#define MEMORY_PAGES (UINT64_C(1) << 18) /* 1 GiB: no longer records where that is more */
/* What a real drive does not notice, and one of such short records would: a batch's header is as
 * long as a record, and a record's line in the footer a 32nd of it; four of some 64 segments are at
 * hand for what comes, being filled, or being drained, where a drive has thousands. */
#define BATCH_BLOCKS 32u
#define FOOTER_BLOCKS 32u
#define SEGMENTS_AT_HAND 2u
#define STEPS_MAX 1000000u
#define LEVEL KVT_LEVEL_KV4
#define CLIENT 1u

struct replay_store {
    struct kvt_store *store;
    struct kvt_io *io;
    uint8_t *arena;
    uint64_t arena_bytes;
    int64_t now_ns;
    uint64_t cookie;
    uint32_t ns;
    uint32_t record_bytes;
    uint8_t ns_id[KVT_NS_BYTES];
    uint32_t grants_left;
    struct kvt_msg_grant grants[CHUNK];
    _Alignas(8) uint8_t reply[KVT_MSG_BYTES_MAX];
    _Alignas(8) uint8_t ask[KVT_MSG_BYTES_MAX];
};

static int64_t now(void *ctx)
{
    const struct replay_store *s = ctx;

    return s->now_ns;
}

static void take_reply(void *ctx, uint32_t client, const struct kvt_msg *msg)
{
    struct replay_store *s = ctx;

    (void)client;
    if (msg->op == KVT_OP_GRANT) {
        const struct kvt_msg_grant *grant = (const struct kvt_msg_grant *)msg;
        if (grant->index < CHUNK && s->grants_left > 0) {
            s->grants[grant->index] = *grant;
            s->grants_left--;
        }
    } else if (msg->bytes <= sizeof(s->reply)) {
        memcpy(s->reply, msg, msg->bytes);
    }
}

/* Let the store work: until grants have come, or until it would sleep. */
static int work(struct replay_store *s)
{
    unsigned quiet = 0;

    for (uint32_t step = 0; step < STEPS_MAX; step++) {
        int64_t next = kvt_store_run(s->store);
        quiet = next > s->now_ns ? quiet + 1 : 0;
        if (s->grants_left == 0 && quiet >= 2)
            return 0;
        if (s->grants_left > 0 && quiet >= 4) {
            if (next == INT64_MAX)
                return KVT_E_CLOSED;
            s->now_ns = next;
        }
    }
    return KVT_E_CLOSED;
}

/* What the store does between two requests, when its timers say. */
static void pass_time(struct replay_store *s, int64_t until)
{
    for (uint32_t step = 0; step < STEPS_MAX && s->now_ns < until; step++) {
        int64_t next = kvt_store_run(s->store);

        if (next > s->now_ns)
            s->now_ns = KVT_MIN(next, until);
    }
    s->now_ns = KVT_MAX(s->now_ns, until);
}

static void *request(struct replay_store *s, uint16_t op, size_t bytes, uint32_t count)
{
    struct kvt_msg *msg = (struct kvt_msg *)s->ask;

    bytes = (size_t)kvt_round_up(bytes, 8);
    memset(s->ask, 0, bytes);
    msg->bytes = (uint32_t)bytes;
    msg->op = op;
    msg->cookie = ++s->cookie;
    msg->ns = s->ns;
    msg->count = count;
    return msg;
}

static int send(struct replay_store *s)
{
    int rc = kvt_store_handle(s->store, CLIENT, (const struct kvt_msg *)s->ask);

    return rc ? rc : work(s);
}

static struct kvt_msg_key key_of(uint64_t id)
{
    struct kvt_msg_key key = {.hash_len = sizeof(id)};

    memcpy(key.hash, &id, sizeof(id));
    return key;
}

static int ns_open(struct replay_store *s)
{
    struct kvt_msg_ns_open *msg = request(s, KVT_OP_NS_OPEN, sizeof(*msg), 0);

    memcpy(msg->id, s->ns_id, sizeof(msg->id));
    msg->block_tokens = 512;
    for (int map = KVT_LEVEL_INT4; map <= KVT_LEVEL_RAW; map++)
        msg->record_bytes[map] = s->record_bytes;
    int rc = send(s);
    const struct kvt_msg *reply = (const struct kvt_msg *)s->reply;
    if (!rc && reply->status < 0)
        rc = reply->status;
    s->ns = reply->ns;
    return rc;
}

/* Pages of a record. */
static uint32_t record_pages(uint64_t dram_blocks, uint64_t disk_blocks)
{
    uint32_t pages = 1;

    while (disk_blocks && pages < RECORD_PAGES_MAX && disk_blocks * pages < LOG_PAGES &&
           (dram_blocks + disk_blocks) * pages * 2 <= MEMORY_PAGES)
        pages *= 2;
    return pages;
}

/* The smallest cap of a root that holds so many records, and what they need besides. */
static uint64_t cap_for(uint64_t blocks, uint32_t record_pages)
{
    uint64_t pages = blocks * record_pages + blocks / BATCH_BLOCKS + blocks / FOOTER_BLOCKS;
    uint64_t cap = pages * KVT_PAGE_BYTES;

    for (;; cap += KVT_SEGMENT_BYTES_MIN / 4) {
        struct kvt_l2_layout layout = kvt_l2_layout_for(cap, 0);
        uint64_t each = layout.segment_bytes / KVT_PAGE_BYTES - 2; /* header and trailer */

        if (layout.segment_count > SEGMENTS_AT_HAND &&
            (layout.segment_count - SEGMENTS_AT_HAND) * each >= pages)
            return cap;
    }
}

int replay_store_open(uint64_t dram_blocks, uint64_t disk_blocks,
                      const struct replay_admission *admission, struct replay_store **out)
{
    struct replay_store *s = calloc(1, sizeof(*s));
    uint32_t pages = record_pages(dram_blocks, disk_blocks);
    uint64_t cap = cap_for(disk_blocks, pages);
    int rc = s ? 0 : -ENOMEM;

    *out = s;
    if (rc)
        return rc;
    memset(s->ns_id, 'r', sizeof(s->ns_id));
    s->now_ns = 1000000000;
    s->record_bytes = pages * KVT_PAGE_BYTES;
    s->arena_bytes = (dram_blocks + STAGING_BLOCKS) * s->record_bytes;
    s->arena = mmap(NULL, s->arena_bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (s->arena == MAP_FAILED) {
        s->arena = NULL;
        return -ENOMEM;
    }
    struct kvt_store_params params = {.arena = s->arena,
                                      .arena_bytes = s->arena_bytes,
                                      .staging_bytes = (uint64_t)STAGING_BLOCKS * s->record_bytes,
                                      .write_queue_bytes = s->arena_bytes / 2,
                                      .seed = 1,
                                      .clock = {now, s},
                                      .reply = take_reply,
                                      .reply_ctx = s};
    if (admission) {
        params.admit = admission->policy;
        params.write = admission->write;
        params.admit_permille = (uint32_t)(admission->share * 1000 + 0.5);
        params.token_s = admission->token_s;
        params.byte_s = admission->block_s / s->record_bytes;
        params.roots[0].write_bytes_day = admission->blocks_per_day * s->record_bytes;
    }
    if (disk_blocks) {
        rc = kvt_io_mem_new(cap + cap / 4 + (64u << 20), &s->io);
        if (!rc)
            rc = s->io->ops->lock(s->io, NULL);
        params.root_count = 1;
        params.roots[0].io = s->io;
        params.roots[0].cap_bytes = cap;
    }
    if (!rc)
        rc = kvt_store_open(&params, &s->store, NULL);
    return rc ? rc : ns_open(s);
}

void replay_store_close(struct replay_store *s)
{
    if (!s)
        return;
    if (s->store)
        kvt_store_close(s->store, 0);
    if (s->io)
        s->io->ops->destroy(s->io);
    if (s->arena)
        munmap(s->arena, s->arena_bytes);
    free(s);
}

/* Load up to CHUNK blocks; *ran: how many of them in a row were there. */
static int load(struct replay_store *s, const uint64_t *ids, uint32_t count, uint32_t *ran,
                struct replay_hits *hits)
{
    struct kvt_msg_acquire *msg =
        request(s, KVT_OP_ACQUIRE, sizeof(*msg) + count * sizeof(msg->keys[0]), count);

    msg->deadline_ns = INT64_MAX;
    for (uint32_t i = 0; i < count; i++)
        msg->keys[i] = key_of(ids[i]);
    s->grants_left = count;
    int rc = send(s);
    *ran = 0;
    while (!rc && *ran < count && s->grants[*ran].msg.status == 0) {
        if (s->grants[*ran].tier == KVT_TIER_DRAM) {
            hits->dram++;
            hits->front += hits->disk == 0;
        } else {
            hits->disk++;
        }
        ++*ran;
    }
    uint32_t held = 0;
    struct kvt_msg_slots *back =
        request(s, KVT_OP_RELEASE, sizeof(*back) + count * sizeof(back->slots[0]), 0);
    for (uint32_t i = 0; i < count && !rc; i++)
        if (s->grants[i].msg.status == 0)
            back->slots[held++] = (struct kvt_slot_ref){.slot = s->grants[i].slot,
                                                        .generation = s->grants[i].generation};
    if (rc || held == 0)
        return rc;
    back->msg.count = held;
    back->msg.cookie = 0;
    back->msg.bytes = (uint32_t)(sizeof(*back) + held * sizeof(back->slots[0]));
    return send(s);
}

/* The header, which COMMIT, recovery and reinsertion look at; the payload is zeroes. */
static uint64_t fill(struct replay_store *s, const struct kvt_alloc_entry *entry, uint64_t id,
                     uint64_t parent, bool first, uint32_t position)
{
    struct kvt_record_header *header = (struct kvt_record_header *)(s->arena + entry->arena_offset);
    struct kvt_key key = {.hash_len = sizeof(id)};

    memset(header, 0, sizeof(*header));
    memcpy(key.hash, &id, sizeof(id));
    header->magic = KVT_RECORD_MAGIC;
    header->version = KVT_RECORD_VERSION;
    header->map = LEVEL;
    kvt_full_key_make(&header->key, s->ns_id, &key);
    header->parent_len = first ? 0 : sizeof(parent);
    if (!first)
        memcpy(header->parent, &parent, sizeof(parent));
    header->first_pos = position;
    header->record_bytes = entry->record_bytes;
    header->payload_bytes = entry->record_bytes - (uint32_t)sizeof(*header);
    header->sequence = entry->sequence;
    header->checksum = kvt_record_checksum(header, entry->record_bytes);
    return header->checksum;
}

static int store(struct replay_store *s, const uint64_t *ids, uint32_t from, uint32_t count)
{
    struct kvt_msg_alloc *msg =
        request(s, KVT_OP_ALLOC, sizeof(*msg) + count * sizeof(msg->keys[0]), count);
    struct kvt_alloc_entry entries[CHUNK];
    uint32_t taken = 0;

    msg->map = LEVEL;
    msg->first_pos = from * 512;
    msg->block_tokens = 512;
    if (from > 0) {
        msg->parent_len = sizeof(ids[0]);
        memcpy(msg->parent, &ids[from - 1], sizeof(ids[0]));
    }
    for (uint32_t i = 0; i < count; i++)
        msg->keys[i] = key_of(ids[from + i]);
    int rc = send(s);
    const struct kvt_msg_alloc_reply *reply = (const struct kvt_msg_alloc_reply *)s->reply;
    if (rc || reply->msg.status < 0 || reply->msg.count != count)
        return rc ? rc : reply->msg.status;
    memcpy(entries, reply->entries, count * sizeof(entries[0]));
    struct kvt_msg_slots *commit =
        request(s, KVT_OP_COMMIT, sizeof(*commit) + count * sizeof(commit->slots[0]), 0);
    for (uint32_t i = 0; i < count; i++) {
        if (entries[i].status != 0)
            continue;
        uint32_t at = from + i;
        uint64_t sum = fill(s, &entries[i], ids[at], at ? ids[at - 1] : 0, at == 0, at * 512);
        commit->slots[taken++] = (struct kvt_slot_ref){
            .slot = entries[i].slot, .generation = entries[i].generation, .checksum = sum};
    }
    if (taken == 0)
        return 0;
    commit->msg.count = taken;
    commit->msg.bytes = (uint32_t)(sizeof(*commit) + taken * sizeof(commit->slots[0]));
    return send(s);
}

int replay_store_prompt(struct replay_store *s, int64_t at_ms, const uint64_t *ids, uint32_t count,
                        struct replay_hits *hits)
{
    int64_t at = 1000000000 + at_ms * 1000000;
    uint32_t have = 0, ran = CHUNK;
    int rc = 0;

    *hits = (struct replay_hits){0, 0, 0};
    pass_time(s, at);
    while (!rc && have < count && ran == CHUNK) {
        rc = load(s, ids + have, KVT_MIN(count - have, CHUNK), &ran, hits);
        have += ran;
    }
    for (uint32_t n; !rc && have < count; have += n) {
        n = KVT_MIN(count - have, CHUNK);
        rc = store(s, ids, have, n);
    }
    return rc;
}

uint64_t replay_store_on_disk(const struct replay_store *s)
{
    struct kvt_store_stats stats;

    kvt_store_stats(s->store, &stats);
    return stats.disk_blocks;
}

uint64_t replay_store_written(const struct replay_store *s)
{
    struct kvt_store_stats stats;

    kvt_store_stats(s->store, &stats);
    return stats.disk_written_blocks + stats.reinserted;
}
