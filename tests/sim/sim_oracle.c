/* What may and what must be seen: see sim.h. Bytes of a block follow from (namespace, key, map). */
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "sim/sim.h"
#include "support/fault_io.h"

const uint8_t sim_maps[3] = {KVT_LEVEL_KV4, KVT_LEVEL_KV8, KVT_LEVEL_RAW};

uint32_t sim_map_index(uint8_t map)
{
    uint32_t i = 0;

    while (i < 3 && sim_maps[i] != map)
        i++;
    return i;
}

#define POOL_BYTES (1u << 16)

static uint64_t mix(uint64_t x)
{
    struct kvt_rng rng = {x};

    return kvt_rng_next(&rng);
}

struct kvt_msg_key sim_key(uint32_t ns, uint32_t index)
{
    struct kvt_msg_key key = {.hash_len = 8};
    uint64_t word = mix((uint64_t)ns << 32 | (index + 1));

    memcpy(key.hash, &word, sizeof word);
    return key;
}

/* Chains 3 and up branch off chain 0 behind its fifth block. */
uint32_t sim_parent(uint32_t index)
{
    if (index % SIM_DEPTH)
        return index - 1;
    return index / SIM_DEPTH >= 3 ? 4 : UINT32_MAX;
}

/* Random bytes made once; a payload is a stretch of them that its number chooses. */
static const uint8_t *pool(void)
{
    static uint8_t bytes[2 * POOL_BYTES];

    if (!bytes[0]) {
        struct kvt_rng rng = {4711};

        for (size_t i = 0; i < sizeof bytes; i += 8) {
            uint64_t word = kvt_rng_next(&rng);

            memcpy(bytes + i, &word, sizeof word);
        }
        bytes[0] = 1;
    }
    return bytes;
}

struct content {
    uint64_t number;
    size_t start;
};

static struct content content_of(uint32_t ns, uint32_t index, uint32_t map)
{
    uint64_t number = mix((uint64_t)map << 48 | (uint64_t)ns << 32 | index);

    return (struct content){number, (number >> 20) % POOL_BYTES};
}

static void content_write(uint32_t ns, uint32_t index, uint32_t map, uint8_t *out, uint32_t bytes)
{
    struct content content = content_of(ns, index, map);
    uint32_t done = sizeof content.number;

    memcpy(out, &content.number, sizeof content.number);
    while (done < bytes) {
        uint32_t piece = KVT_MIN(bytes - done, POOL_BYTES);

        memcpy(out + done, pool() + content.start, piece);
        done += piece;
    }
}

static bool content_is(uint32_t ns, uint32_t index, uint32_t map, const uint8_t *in, uint32_t bytes)
{
    struct content content = content_of(ns, index, map);
    uint32_t done = sizeof content.number;

    if (memcmp(in, &content.number, sizeof content.number))
        return false;
    while (done < bytes) {
        uint32_t piece = KVT_MIN(bytes - done, POOL_BYTES);

        if (memcmp(in + done, pool() + content.start, piece))
            return false;
        done += piece;
    }
    return true;
}

void sim_full_key(uint32_t ns, uint32_t index, struct kvt_full_key *full)
{
    struct kvt_msg_key key = sim_key(ns, index);
    struct kvt_key plain = {.hash_len = key.hash_len};
    uint8_t id[KVT_NS_BYTES];

    memset(id, (int)ns + 1, sizeof id);
    memcpy(plain.hash, key.hash, sizeof key.hash);
    kvt_full_key_make(full, id, &plain);
}

void sim_fill_record(struct sim *sim, const struct sim_fill *fill, uint64_t *checksum)
{
    uint8_t *record = sim->arena + fill->entry.arena_offset;
    struct kvt_record_header *header = (struct kvt_record_header *)record;
    uint32_t parent = sim_parent(fill->index);

    memset(header, 0, sizeof *header);
    header->magic = KVT_RECORD_MAGIC;
    header->version = KVT_RECORD_VERSION;
    header->map = sim_maps[fill->map];
    sim_full_key(fill->ns, fill->index, &header->key);
    if (parent != UINT32_MAX) {
        struct kvt_msg_key key = sim_key(fill->ns, parent);

        header->parent_len = key.hash_len;
        memcpy(header->parent, key.hash, sizeof header->parent);
    }
    header->record_bytes = fill->entry.record_bytes;
    header->payload_bytes = fill->entry.record_bytes - (uint32_t)sizeof *header;
    header->sequence = fill->entry.sequence;
    content_write(fill->ns, fill->index, fill->map, record + sizeof *header, header->payload_bytes);
    header->checksum = kvt_record_checksum(record, fill->entry.record_bytes);
    *checksum = header->checksum;
}

int sim_judge(struct sim *sim, uint32_t ns, uint32_t index, uint32_t map, const uint8_t *record,
              uint32_t bytes, uint64_t checksum)
{
    const struct kvt_record_header *header = (const struct kvt_record_header *)record;
    struct kvt_full_key full;

    sim_full_key(ns, index, &full);
    if (kvt_record_verify(record, bytes, &full, checksum))
        return KVT_E_CORRUPT;
    if (header->map != sim_maps[map] || bytes != sim->shape.pages[ns][map] * KVT_PAGE_BYTES ||
        !content_is(ns, index, map, record + sizeof *header, header->payload_bytes))
        sim_fail(sim, "other bytes: namespace %u, block %u, map %u", ns, index, sim_maps[map]);
    return 0;
}

void sim_seen(struct sim *sim, uint32_t ns, uint32_t index, uint32_t map, uint8_t min)
{
    const struct sim_block *block = &sim->blocks[ns][index];

    if (!(block->may >> map & 1) || sim_maps[map] < min)
        sim_fail(sim, "namespace %u, block %u came with map %u: may be seen %x, minimum %u", ns,
                 index, sim_maps[map], block->may, min);
    sim->counts.good++;
}

void sim_committed(struct sim *sim, const struct sim_fill *fill)
{
    struct sim_block *block = &sim->blocks[fill->ns][fill->index];

    block->may |= (uint8_t)(1u << fill->map);
    block->ever |= block->may;
    block->committed[fill->map] = block->arrived[fill->map] = block->last_commit = sim->op;
    block->gone = false;
    if (!block->first_ns)
        block->first_ns = fill->since_ns;
    block->stored_ns = sim->now_ns;
    sim_used(sim, fill->ns, fill->index);
    sim_tell(sim, "committed: namespace %u, block %u, map %u", fill->ns, fill->index,
             sim_maps[fill->map]);
    sim->counts.commits++;
}

void sim_fetched(struct sim *sim, uint32_t ns, uint32_t index, uint32_t map, uint64_t origin,
                 uint64_t asked, int64_t asked_ns)
{
    struct sim_block *block = &sim->blocks[ns][index];
    bool had = block->may >> map & 1;

    block->committed[map] = had ? KVT_MAX(block->committed[map], origin) : origin;
    block->arrived[map] = had ? KVT_MAX(block->arrived[map], asked) : asked;
    block->may |= (uint8_t)(1u << map);
    block->ever |= block->may;
    block->last_commit = sim->op;
    block->gone = false;
    if (!block->first_ns)
        block->first_ns = asked_ns;
    block->stored_ns = sim->now_ns;
    sim_used(sim, ns, index);
    sim_tell(sim, "fetched: namespace %u, block %u, map %u, of operation %llu", ns, index,
             sim_maps[map], (unsigned long long)origin);
    sim->counts.fetched++;
}

static uint32_t covered(const struct sim_wait *wait, uint32_t i)
{
    return wait->n ? wait->index[i] : i;
}

/* From its sending on, nothing that was durable need be there. */
void sim_purge_sent(struct sim *sim, const struct sim_wait *wait)
{
    for (uint32_t i = 0; i < (wait->n ? wait->n : SIM_BLOCKS); i++) {
        struct sim_block *block = &sim->blocks[wait->ns][covered(wait, i)];

        block->durable = block->last_commit = 0;
        block->purges++;
        block->purging++;
    }
}

void sim_purge_refused(struct sim *sim, const struct sim_wait *wait)
{
    for (uint32_t i = 0; i < (wait->n ? wait->n : SIM_BLOCKS); i++) {
        struct sim_block *block = &sim->blocks[wait->ns][covered(wait, i)];

        block->purges--;
        block->purging--;
    }
}

/* No answer comes any more: the purge may go on, so it counts as under way for the rest of the
 * life. */
static void purge_ended(struct sim *sim, const struct sim_wait *wait)
{
    for (uint32_t i = 0; i < (wait->n ? wait->n : SIM_BLOCKS); i++) {
        struct sim_block *block = &sim->blocks[wait->ns][covered(wait, i)];

        block->purging--;
        block->purged = sim->op;
    }
}

void sim_purge_done(struct sim *sim, const struct sim_wait *wait, int32_t status)
{
    if (status != KVT_E_CLOSED)
        purge_ended(sim, wait);
    if (status < 0 && !sim_net_failed(sim, status))
        return;
    sim->counts.purges += status >= 0;
    for (uint32_t i = 0; i < (wait->n ? wait->n : SIM_BLOCKS); i++) {
        struct sim_block *block = &sim->blocks[wait->ns][covered(wait, i)];
        uint8_t before = block->may;

        for (uint32_t map = 0; map < 3; map++)
            if ((status < 0 ? block->arrived : block->committed)[map] < wait->sent)
                block->may &= (uint8_t) ~(1u << map);
        if (status >= 0)
            sim_tier_purged(sim, wait->sent, wait->ns, covered(wait, i));
        sim_late_purged(sim, block, before);
        if (!block->may && !block->absent)
            block->first_ns = block->age_ns = 0;
    }
}

void sim_purges_forgotten(struct sim *sim)
{
    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        for (uint32_t i = 0; i < SIM_BLOCKS; i++)
            sim->blocks[ns][i].purging = 0;
}

static bool may_have_gone(const struct kvt_store_stats *stats)
{
    return stats->evict_disk_blocks || stats->given_up || stats->evict_index_blocks ||
           stats->orphan_dropped || stats->checksum_fail || stats->read_fail || stats->scrub_bad ||
           stats->evict_dram_lost || stats->lost_no_dram || stats->recovered_no_room ||
           stats->ttl_expired || stats->quota_evicted;
}

/* Flushed with an answer of 0: what was committed before it was sent is on a drive, unless a purge
 * of it has not been answered. */
void sim_flush_done(struct sim *sim, const struct sim_wait *wait, int32_t status)
{
    struct kvt_store_stats stats;

    if (status || !sim->shape.disks)
        return;
    sim->counts.flushes++;
    kvt_store_stats(sim->store, &stats);
    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        for (uint32_t i = 0; i < SIM_BLOCKS; i++) {
            struct sim_block *block = &sim->blocks[ns][i];
            struct kvt_msg_key key = sim_key(ns, i);
            struct place place;

            if (!block->may || block->last_commit <= block->purged ||
                block->last_commit >= wait->sent || block->purging)
                continue;
            place = place_of(sim->store, sim->ns[ns], &key);
            if (place.known) {
                block->durable = wait->sent;
                block->place = place;
            } else if (block->last_commit > sim->life_op && !may_have_gone(&stats)) {
                sim_fail(sim, "namespace %u, block %u was flushed and is on no drive", ns, i);
            }
        }
}

static bool same_place(const struct place *a, const struct place *b)
{
    return a->root == b->root && a->segment == b->segment && a->generation == b->generation;
}

/* In a life in which the log gave copies up, what stands elsewhere now may have been written anew
 * from DRAM, after its flush: nothing is demanded of it (decision 0029). */
void sim_note_places(struct sim *sim)
{
    struct kvt_store_stats stats;

    kvt_store_stats(sim->store, &stats);
    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        for (uint32_t i = 0; i < SIM_BLOCKS; i++) {
            struct sim_block *block = &sim->blocks[ns][i];
            struct kvt_msg_key key = sim_key(ns, i);
            struct place place;

            if (!block->durable || block->last_commit >= block->durable)
                continue;
            place = place_of(sim->store, sim->ns[ns], &key);
            if (!place.known)
                continue;
            if (stats.given_up && !same_place(&place, &block->place))
                block->durable = 0;
            block->place = place;
        }
}

/* A power loss may have undone a move, so places are taken anew after a recovery. Where a block was
 * stored again after its flush, and another record than the flushed one has been found, that one
 * need not be durable, and the flushed one may go with its segment: nothing is demanded. */
void sim_places_again(struct sim *sim)
{
    sim_note_places(sim);
    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        for (uint32_t i = 0; i < SIM_BLOCKS; i++) {
            struct sim_block *block = &sim->blocks[ns][i];
            struct kvt_msg_key key = sim_key(ns, i);
            struct place place;

            if (!block->durable || block->last_commit < block->durable)
                continue;
            place = place_of(sim->store, sim->ns[ns], &key);
            if (place.known && !same_place(&place, &block->place))
                block->durable = 0;
        }
}

void sim_forget_durable(struct sim *sim)
{
    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        for (uint32_t i = 0; i < SIM_BLOCKS; i++)
            sim->blocks[ns][i].durable = 0;
}

void sim_expect(struct sim *sim, bool must[SIM_NS][SIM_BLOCKS])
{
    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        for (uint32_t i = 0; i < SIM_BLOCKS; i++) { /* parents have lower numbers */
            struct sim_block *block = &sim->blocks[ns][i];
            uint32_t parent = sim_parent(i);

            block->may |= sim->lied ? block->ever : 0;
            must[ns][i] = !sim->lied && block->durable &&
                          (parent == UINT32_MAX || must[ns][parent]) &&
                          !place_recycled(sim_medium(sim, block->place.root), &block->place);
            sim->counts.evicted += block->durable && !must[ns][i] && !sim->lied;
            sim->counts.durable += must[ns][i];
            if (!must[ns][i])
                block->durable = 0;
        }
}
