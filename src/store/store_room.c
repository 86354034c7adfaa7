/* Making room: slots by eviction from DRAM, index entries by giving up the least useful block, and
 * a slow sweep for blocks on disk that no chain reaches any more.
 *
 * Policy names the block that leaves. When it is shorter than the record that wants its place, the
 * blocks beside it go too, the less used side first, if together they make a run that is long
 * enough: so a long record costs its own length among short ones, wherever the old ones stand.
 * Threads: the store's owner. Every step is bounded. Does not recycle segments: that is the log's.
 */
#include "store/store_impl.h"

/* One request may push out this many times its own size while the neighbours of what leaves are in
 * use; beyond it the request is refused rather than the cache emptied. */
#define EVICT_FACTOR 16u
#define CLOCK_STEPS 1024u /* entries looked at to free one */

static void evict(struct kvt_store *store, uint32_t slot)
{
    uint32_t entry = kvt_slot_at(&store->slots, slot)->entry;

    store->counts.evict_dram_blocks++;
    kvt_policy_evicted(&store->policy, slot);
    kvt_writes_lost(store, slot);
    if (!kvt_index_at(&store->index, entry)->on_disk) /* nor an older record of it */
        store->counts.evict_dram_lost++;
    kvt_entry_lose_slot(store, entry, true);
    kvt_entry_settle(store, entry);
}

/* A row of runs, side by side, that are free or may leave. */
struct row {
    uint32_t left, right; /* runs at its ends */
    uint32_t pages;
    uint32_t taken; /* of them, those to evict */
};

/* How unwelcome it is to extend a row over this run. UINT32_MAX: it may not leave. */
static uint32_t cost_of(const struct kvt_store *store, uint32_t run, bool lossless)
{
    const struct kvt_slot *s;

    if (run == KVT_RUN_NONE)
        return UINT32_MAX;
    if (store->slots.arena.runs[run].state == KVT_RUN_FREE)
        return 0;
    s = kvt_slot_at(&store->slots, run);
    if (s->queue != KVT_QUEUE_CACHE)
        return UINT32_MAX;
    if (store->disk_count && kvt_write_unsaved(store, run))
        return lossless ? UINT32_MAX : 2u + KVT_INDEX_FREQ_MAX;
    return 1u + kvt_index_at(&store->index, s->entry)->freq;
}

/* The row of at least `pages` around a victim. false: its neighbours cannot leave. */
static bool row_around(const struct kvt_store *store, uint32_t victim, uint32_t pages,
                       bool lossless, struct row *row)
{
    const struct kvt_run *runs = store->slots.arena.runs;

    *row = (struct row){victim, victim, runs[victim].pages, 1};
    while (row->pages < pages) {
        uint32_t left = runs[row->left].prev, right = runs[row->right].next;
        uint32_t left_cost = cost_of(store, left, lossless);
        uint32_t right_cost = cost_of(store, right, lossless);

        if (left_cost == UINT32_MAX && right_cost == UINT32_MAX)
            return false;
        if (left_cost < right_cost)
            row->left = left;
        else
            row->right = right;
        left = left_cost < right_cost ? left : right;
        row->pages += runs[left].pages;
        row->taken += runs[left].state == KVT_RUN_TAKEN;
    }
    return true;
}

static uint32_t next_taken(const struct kvt_store *store, uint32_t run)
{
    do
        run = store->slots.arena.runs[run].next;
    while (run != KVT_RUN_NONE && store->slots.arena.runs[run].state == KVT_RUN_FREE);
    return run;
}

/* Evict a victim, with its neighbours when that makes a run of `pages`. Returns bytes evicted. */
static uint64_t evict_row(struct kvt_store *store, uint32_t victim, uint32_t pages, bool lossless)
{
    uint64_t bytes = 0;
    struct row row;
    uint32_t slot = victim;

    if (!row_around(store, victim, pages, lossless, &row))
        row.taken = 1;
    else if (store->slots.arena.runs[row.left].state == KVT_RUN_TAKEN)
        slot = row.left;
    else
        slot = next_taken(store, row.left);
    while (row.taken--) {
        uint32_t next = next_taken(store, slot); /* free runs merge and lose their numbers */

        bytes += kvt_slot_at(&store->slots, slot)->record_bytes;
        evict(store, slot);
        slot = next;
    }
    return bytes;
}

/* lossless: nothing that is on no disk goes for it. */
static uint32_t take_cached(struct kvt_store *store, uint32_t bytes, enum kvt_slot_state state,
                            bool lossless)
{
    const struct kvt_region *region = &store->slots.arena.regions[KVT_REGION_CACHE];
    uint64_t budget = (uint64_t)bytes * EVICT_FACTOR;
    uint64_t evicted = 0;
    uint32_t slot, victim, saved = KVT_SLOT_NONE;
    int saves = 0;

    if (region->pages < bytes / KVT_PAGE_BYTES)
        return KVT_SLOT_NONE;
    for (;;) {
        slot = kvt_slots_take(&store->slots, KVT_REGION_CACHE, bytes, state);
        if (slot != KVT_SLOT_NONE || evicted > budget)
            return slot;
        victim = kvt_policy_victim(&store->policy);
        if (victim == KVT_SLOT_NONE)
            victim = lossless ? victim : kvt_writes_unsave(store, saved);
        else if (kvt_writes_save(store, victim, &saves)) {
            saved = victim;
            continue;
        }
        saved = KVT_SLOT_NONE;
        if (victim == KVT_SLOT_NONE)
            return victim;
        if (lossless && store->disk_count && kvt_write_unsaved(store, victim))
            return KVT_SLOT_NONE;
        evicted += evict_row(store, victim, bytes / KVT_PAGE_BYTES, lossless);
    }
}

/* Staging is for loads; stores may use half of it while they wait for the disk. */
static uint32_t take_staged(struct kvt_store *store, uint32_t bytes)
{
    uint64_t staging =
        (uint64_t)store->slots.arena.regions[KVT_REGION_STAGING].pages * KVT_PAGE_BYTES;
    uint64_t share = staging / 2;
    uint32_t slot;

    if (share < bytes && !store->slots.arena.regions[KVT_REGION_CACHE].pages)
        share = bytes; /* no DRAM and little staging: one at a time */
    if (!store->disk_count || store->staged_bytes + bytes > share)
        return KVT_SLOT_NONE;
    slot = kvt_slots_take(&store->slots, KVT_REGION_STAGING, bytes, KVT_SLOT_FILLING);
    if (slot == KVT_SLOT_NONE)
        return slot;
    kvt_slot_at(&store->slots, slot)->staged = 1;
    store->staged_bytes += bytes;
    return slot;
}

uint32_t kvt_room_slot(struct kvt_store *store, uint32_t record_bytes, enum kvt_room purpose)
{
    enum kvt_slot_state state = purpose == KVT_ROOM_STORE ? KVT_SLOT_FILLING : KVT_SLOT_READING;
    /* A copy for reading is not worth the only copy of something else: loads have the staging part.
     */
    uint32_t slot = take_cached(store, record_bytes, state, purpose != KVT_ROOM_STORE);

    if (slot != KVT_SLOT_NONE || purpose == KVT_ROOM_PREFETCH)
        return slot;
    if (purpose == KVT_ROOM_STORE)
        return take_staged(store, record_bytes);
    return kvt_slots_take(&store->slots, KVT_REGION_STAGING, record_bytes, state);
}

bool kvt_room_entry(struct kvt_store *store)
{
    struct kvt_index *index = &store->index;
    uint32_t victim;

    for (uint32_t step = 0; step < CLOCK_STEPS && index->touched; step++) {
        uint32_t entry = store->clock_cursor++ % index->touched;
        struct kvt_index_entry *e = kvt_index_at(index, entry);

        if (!e->used || !e->on_disk || e->slot != KVT_INDEX_NONE || e->children || e->filling ||
            e->pinned)
            continue;
        if (e->freq) {
            e->freq--;
            continue;
        }
        store->counts.evict_index_blocks++;
        kvt_entry_clear_disk(store, entry);
        kvt_entry_settle(store, entry);
        return true;
    }
    victim = kvt_policy_victim(&store->policy);
    if (victim != KVT_SLOT_NONE) {
        uint32_t before = index->used;

        evict(store, victim);
        return index->used < before;
    }
    return false;
}

static bool is_orphan(const struct kvt_store *store, const struct kvt_index_entry *e)
{
    const struct kvt_index_entry *parent;

    if (!e->used || !e->on_disk || e->slot != KVT_INDEX_NONE || e->filling || e->pinned ||
        e->parent == KVT_INDEX_NONE)
        return false;
    parent = kvt_index_at(&store->index, e->parent);
    return !kvt_index_present(parent) && !parent->filling;
}

void kvt_room_sweep(struct kvt_store *store)
{
    if (!store->sweep_on || kvt_sweep_waits(store))
        return;
    for (uint32_t i = 0; i < KVT_STORE_SCAN_ENTRIES; i++) {
        uint32_t entry = store->sweep_cursor++;

        if (entry >= store->index.touched) {
            store->sweep_cursor = 0;
            store->sweep_on = store->sweep_found > 0; /* grandchildren: another pass */
            store->sweep_found = 0;
            return;
        }
        if (!is_orphan(store, kvt_index_at(&store->index, entry)))
            continue;
        store->sweep_found++;
        store->counts.orphan_dropped++;
        kvt_entry_clear_disk(store, entry);
        kvt_entry_settle(store, entry);
    }
}
