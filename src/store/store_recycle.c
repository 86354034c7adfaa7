/* Which segment of a root goes next, and which of its records stay.
 *
 *   CLEAN  the segment of which least is of use, when at least a half is of none (an eighth, where
 *          DRAM and disk hold a block once): the rest is moved whole, that half is room won. It
 *          also makes young again what nobody has asked for, so a smaller share costs hits.
 *   SWEEP  there is none: the oldest one. What was asked for since it was written is moved, the
 *          rest goes. Where that is nearly all of it, nothing is written: the segment counts as the
 *          newest one instead, and what is in it as not asked for yet.
 *
 * What is moved stays for a whole turn of the log, however long ago it was asked for. So in SWEEP
 * what is asked for in the first three tenths of a turn after its segment was begun does not count
 * (not where a block is held once: what is asked for is in DRAM there). Time is that of the log.
 *
 * Of use is a record that the index names; and, where DRAM and disk hold a block once, only if its
 * block is not in DRAM, or is about to leave it. Copies of others are given up when their segment
 * is drained: the block in DRAM is the only one from then on, and is written again when it leaves.
 *
 * Invariants: a block that is given up stands in the cache region, VALID and not marked as leaving,
 * so that no copy is given up that was written for the eviction which is about to come (that would
 * write it over and over).
 * Threads: the store's owner. Allocates nothing; a choice looks at every segment of the root once.
 */
#include "store/store_recycle.h"
#include "base/checked.h"
#include "store/store_impl.h"

#define CLEAN_WON 2u  /* one in so many of its records, or more, is of no use; ... */
#define ONCE_WON 8u   /* ... where DRAM and disk hold a block once */
#define ONCE_PART 16u /* DRAM is that part of the disk, or more */
#define RENEW_PART 8u /* at most one in so many records put there has not been asked for */
#define RENEWS 16u    /* in a row; then the next one goes, whatever it holds */
#define EARLY_TENTHS \
    3u              /* of a turn after a segment's birth: what is asked for then does not count */
#define TURN_MIN 4u /* ticks; in less, a part of a life is no time at all */
#define TURN_TICKS 64u

uint8_t kvt_recycle_tick(const struct kvt_store_disk *disk)
{
    return (uint8_t)(disk->lives / KVT_MAX(disk->segments / TURN_TICKS, 1u));
}

bool kvt_recycle_once(const struct kvt_store *store)
{
    uint64_t dram = store->slots.arena.regions[KVT_REGION_CACHE].pages, disk = 0;

    if (store->params.write != KVT_WRITE_EVICT)
        return false; /* a copy on disk is wanted of what is in DRAM, for the next start */
    for (uint32_t i = 0; i < store->disk_count; i++)
        disk += store->disks[i].cap_bytes / KVT_PAGE_BYTES;
    return dram * ONCE_PART >= disk;
}

/* The segment of which least is of use, if that is little enough. */
static uint32_t emptiest(const struct kvt_store_disk *disk, bool once)
{
    uint32_t best = KVT_L2_SEGMENT_NONE, best_put = 0, best_need = 0;

    for (uint32_t i = kvt_l2_recyclable(disk->l2, best); i != KVT_L2_SEGMENT_NONE;
         i = kvt_l2_recyclable(disk->l2, i)) {
        const struct kvt_store_segment *uses = &disk->uses[i];
        uint32_t need = uses->live - (once ? uses->spare : 0);

        if (!need)
            return i;
        if ((uint64_t)(uses->put - need) * (once ? ONCE_WON : CLEAN_WON) < uses->put)
            continue;
        if (best == KVT_L2_SEGMENT_NONE ||
            (uint64_t)need * best_put < (uint64_t)best_need * uses->put) {
            best = i;
            best_put = uses->put;
            best_need = need;
        }
    }
    return best;
}

bool kvt_recycle_late(const struct kvt_store_disk *disk, uint32_t segment)
{
    const unsigned turn = disk->filled / KVT_MAX(disk->segments / TURN_TICKS, 1u);
    const unsigned age = (uint8_t)(kvt_recycle_tick(disk) - disk->uses[segment].born);

    return turn < TURN_MIN || age * 10 > turn * EARLY_TENTHS || kvt_recycle_once(disk->store);
}

static bool nearly_all_used(const struct kvt_store_disk *disk, uint32_t segment)
{
    uint32_t put = disk->uses[segment].put, used = 0;

    if ((uint64_t)(put - disk->uses[segment].live) * RENEW_PART > put)
        return false;
    for (uint32_t i = disk->heads[segment]; i != KVT_INDEX_NONE;
         i = kvt_index_at(&disk->store->index, i)->next)
        used += kvt_index_at(&disk->store->index, i)->hit;
    return (uint64_t)(put - used) * RENEW_PART <= put;
}

static void renew(struct kvt_store_disk *disk, uint32_t segment)
{
    for (uint32_t i = disk->heads[segment]; i != KVT_INDEX_NONE;
         i = kvt_index_at(&disk->store->index, i)->next)
        kvt_index_at(&disk->store->index, i)->hit = 0;
    disk->uses[segment].born = kvt_recycle_tick(disk);
    kvt_l2_renew(disk->l2, segment);
    disk->store->counts.renewed++;
}

uint32_t kvt_recycle_emptiest(const struct kvt_store_disk *disk)
{
    return emptiest(disk, kvt_recycle_once(disk->store));
}

bool kvt_recycle_choose(struct kvt_store_disk *disk, struct kvt_recycle *out)
{
    out->segment = kvt_recycle_emptiest(disk);
    out->clean = out->segment != KVT_L2_SEGMENT_NONE;
    for (uint32_t i = 0; !out->clean; i++) {
        out->segment = kvt_l2_recyclable(disk->l2, KVT_L2_SEGMENT_NONE);
        if (out->segment >= disk->segments || i == RENEWS || !nearly_all_used(disk, out->segment))
            break;
        renew(disk, out->segment);
    }
    return out->segment < disk->segments;
}

/* DRAM has it, and keeps it for now; nobody asked for a copy on disk besides. */
static bool superfluous(const struct kvt_store *store, uint32_t entry)
{
    const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    const struct kvt_slot *s;

    if (e->slot == KVT_INDEX_NONE || e->older)
        return false;
    s = kvt_slot_at(&store->slots, e->slot);
    return s->state == KVT_SLOT_VALID && s->cached && !s->leaving &&
           s->write == KVT_SLOT_WRITE_CLEAN &&
           (s->policy == KVT_WRITE_DEFAULT || s->policy == KVT_WRITE_EVICT);
}

void kvt_recycle_begin(struct kvt_store_disk *disk, const struct kvt_recycle *recycle)
{
    if (kvt_recycle_once(disk->store))
        kvt_entries_give_up(disk, recycle->segment, superfluous);
}

bool kvt_recycle_keeps(const struct kvt_store_disk *disk, const struct kvt_recycle *recycle,
                       uint32_t entry)
{
    const struct kvt_index_entry *e = kvt_index_at(&disk->store->index, entry);

    if (e->older)
        return false; /* a newer record is on its way */
    return recycle->clean || e->hit;
}
