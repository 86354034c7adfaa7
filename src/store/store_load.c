/* Loads in progress: what ACQUIRE and PREFETCH have asked for is started, granted, ended when late.
 * How a load begins and ends by message: store_acquire.c.
 *
 * A load is a list of keys, parents first. `start` walks ahead of `first`: starting a key pins its
 * slot (DRAM) or reads it into one (disk); granting hands slots out strictly in chain order, one
 * GRANT per key, always.
 *
 * Rules
 *  1. Keys are started in chain order too, and a key that gets no slot stops the walk. So what a
 *     load holds while it waits for a slot is granted or being read: it drains by itself.
 *  2. When the oldest load that wants a slot gets none, younger ones start no read before it did.
 *     So it gets the whole staging region in the end, and loads cannot lock each other out.
 *  3. A load that has waited SLOT_WAIT for a slot gives up: its clients hold all of them. So does
 * one whose own client holds its share and releases nothing (it is stopped, or dying).
 *  4. A chain with a block missing ends there: the keys after it get KVT_E_MISS as well, whatever
 *     is stored of them.
 *  5. A key not granted by the deadline gets KVT_E_DEADLINE; a read that lands later finds no one
 *     waiting, and its slot is kept as a cached copy or freed.
 *  6. PREFETCH is a load without grants that reads into the cache region only.
 * Threads: the store's owner. Allocates nothing.
 */
#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"

#define GRANT_PIECE 32u /* keys */

/* Why a key cannot be had, counted; or its entry. */
static uint32_t wanted_entry(struct kvt_store *store, const struct kvt_load *load,
                             const struct kvt_full_key *full)
{
    uint32_t entry = kvt_ttl_find(store, full);
    const struct kvt_index_entry *e;

    if (entry == KVT_INDEX_NONE || kvt_namespace_at(&store->spaces, load->ns)->purging)
        return KVT_INDEX_NONE;
    e = kvt_index_at(&store->index, entry);
    if (!kvt_index_present(e)) {
        store->counts.load_miss_pending += e->filling > 0;
        return KVT_INDEX_NONE;
    }
    if (!kvt_entry_is(store, entry, full)) {
        store->counts.index_collision++;
        return KVT_INDEX_NONE;
    }
    if (kvt_entry_too_long(store, e, kvt_entry_bytes(store, entry)))
        return KVT_INDEX_NONE;
    if (kvt_map_id_level(e->map) < load->min_level) {
        store->counts.load_miss_level++;
        return KVT_INDEX_NONE;
    }
    return entry;
}

/* A slot for a record on disk, with its read under way. */
static enum kvt_started start_read(struct kvt_store *store, const struct kvt_load *load,
                                   uint32_t entry, const struct kvt_full_key *full, uint32_t *out)
{
    enum kvt_room room = load->prefetch ? KVT_ROOM_PREFETCH : KVT_ROOM_LOAD;
    struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    uint32_t bytes = kvt_entry_bytes(store, entry);
    uint32_t slot;
    struct kvt_slot *s;

    if (!store->read_free ||
        (load->prefetch && store->prefetch_going >= KVT_STORE_PREFETCH_READS) ||
        load->ahead >= KVT_STORE_READ_AHEAD)
        return KVT_WAITS_FOR_READ;
    slot = kvt_room_slot(store, bytes, room);
    if (slot == KVT_SLOT_NONE)
        return KVT_WAITS_FOR_SLOT;
    s = kvt_slot_at(&store->slots, slot);
    s->key = *full;
    s->map = e->map;
    kvt_entry_attach(store, entry, slot);
    if (!kvt_reads_start(store, entry, slot, load->prefetch)) {
        kvt_entry_drop_slot(store, entry, false);
        return KVT_WAITS_FOR_READ;
    }
    *out = slot;
    return KVT_STARTED;
}

static enum kvt_started missing(struct kvt_load *load, struct kvt_load_item *i)
{
    i->state = KVT_ITEM_MISS;
    load->cut = 1;
    return KVT_STARTED;
}

static enum kvt_started start_item(struct kvt_store *store, struct kvt_load *load, uint32_t item,
                                   bool may_read, uint64_t *ahead)
{
    struct kvt_load_item *i = &store->items[item];
    struct kvt_full_key full;
    uint32_t entry, bytes = 0;
    struct kvt_slot *s;

    kvt_key_full(store, load->ns, &i->key, &full);
    entry = wanted_entry(store, load, &full);
    if (entry != KVT_INDEX_NONE)
        bytes = kvt_entry_bytes(store, entry);
    else if (!kvt_l3_has(store, load, &full, &bytes))
        return missing(load, i);
    if (!load->prefetch && kvt_client_full(store, load->client, *ahead, bytes))
        return KVT_OVER_SHARE;
    if (entry == KVT_INDEX_NONE) {
        enum kvt_started started = kvt_l3_read(store, load, &full, may_read, &i->slot);

        if (started == KVT_NOT_THERE)
            return missing(load, i);
        if (started != KVT_STARTED)
            return started;
        entry = kvt_slot_at(&store->slots, i->slot)->entry;
    }
    *ahead += bytes;
    i->slot = kvt_index_at(&store->index, entry)->slot;
    i->tier = KVT_TIER_DRAM;
    if (i->slot == KVT_SLOT_NONE && load->direct)
        i->direct = kvt_direct_take(store, load->client, entry, &full);
    if (i->direct != KVT_NO_NUMBER) {
        kvt_entry_used(store, entry);
        kvt_admit_use(store, entry);
        i->state = KVT_ITEM_READY;
        i->tier = KVT_TIER_DISK;
        load->ahead++;
        return KVT_STARTED;
    }
    if (i->slot == KVT_SLOT_NONE) {
        enum kvt_started started =
            may_read ? start_read(store, load, entry, &full, &i->slot) : KVT_WAITS_FOR_READ;

        if (started != KVT_STARTED)
            return started;
    }
    kvt_entry_used(store, entry);
    if (!load->prefetch) /* the load that it is for is the use */
        kvt_admit_use(store, entry);
    kvt_slot_pin(&store->slots, i->slot);
    kvt_slot_settle(store, i->slot);
    s = kvt_slot_at(&store->slots, i->slot);
    if (s->state == KVT_SLOT_VALID) {
        i->state = KVT_ITEM_READY;
        return KVT_STARTED;
    }
    i->state = KVT_ITEM_READING;
    i->tier = kvt_index_at(&store->index, entry)->on_disk ? KVT_TIER_DISK : KVT_TIER_REMOTE;
    i->root = (uint8_t)kvt_index_at(&store->index, entry)->root;
    i->began_us = kvt_grant_clock(store);
    i->waiter_next = s->waiters;
    s->waiters = item;
    load->ahead++;
    return KVT_STARTED;
}

/* Start what can be started, at most `max` keys. ahead: bytes pinned in this turn that are still to
 * be granted. Returns KVT_STARTED, or what the load waits for. */
static enum kvt_started load_start(struct kvt_store *store, struct kvt_load *load, bool may_read,
                                   uint32_t max, uint64_t *ahead)
{
    for (uint32_t i = 0; i < max && load->start != KVT_NO_NUMBER && !load->cut; i++) {
        uint32_t item = load->start;
        enum kvt_started started = start_item(store, load, item, may_read, ahead);

        if (started != KVT_STARTED) {
            store->items[item].slot = KVT_SLOT_NONE;
            return started;
        }
        load->start = store->items[item].next;
    }
    return KVT_STARTED;
}

static void count_grant(struct kvt_store *store, const struct kvt_load *load, uint32_t slot,
                        uint8_t tier)
{
    bool disk = tier == KVT_TIER_DISK;

    if (tier == KVT_TIER_REMOTE) {
        store->counts.load_granted_remote++;
        return;
    }
    if (disk)
        store->counts.load_granted_disk++;
    else
        store->counts.load_granted_dram++;
    kvt_hist_time(&store->hists[disk ? KVT_HIST_LOAD_DISK_TIME : KVT_HIST_LOAD_DRAM_TIME],
                  load->start_ns, store->turn_ns);
    kvt_hist_add(&store->hists[disk ? KVT_HIST_LOAD_DISK_SIZE : KVT_HIST_LOAD_DRAM_SIZE],
                 KVT_HIST_SIZE, kvt_slot_at(&store->slots, slot)->record_bytes);
}

/* Hand one READY record to the client. */
static int32_t grant(struct kvt_store *store, struct kvt_load *load, struct kvt_load_item *i)
{
    uint32_t slot = i->slot;

    if (i->direct != KVT_NO_NUMBER) {
        kvt_direct_grant(store, load, i);
        i->direct = KVT_NO_NUMBER; /* the client's now */
        return 0;
    }
    if (kvt_slot_at(&store->slots, slot)->state != KVT_SLOT_VALID)
        return KVT_E_MISS; /* purged or replaced since it was started */
    if (!kvt_slot_hold(&store->slots, slot, load->client))
        return KVT_E_DROPPED;
    kvt_slot_unpin(&store->slots, slot);
    i->slot = KVT_SLOT_NONE;
    count_grant(store, load, slot, i->tier);
    if (i->tier == KVT_TIER_DISK) /* what was read counts as used now */
        kvt_l3_offer(store, slot, false);
    kvt_grant_send(store, load->client, load->cookie, i->index, 0, slot, i);
    return 0;
}

/* Grant in chain order until a read is still under way. Returns whether the load has ended. */
static bool load_grant(struct kvt_store *store, uint32_t number)
{
    struct kvt_load *load = &store->loads[number];

    while (load->first != KVT_NO_NUMBER && load->first != load->start) {
        uint32_t item = load->first;
        struct kvt_load_item *i = &store->items[item];
        int32_t status = 0;

        if (i->state == KVT_ITEM_READING && !load->prefetch)
            return false;
        if (i->state == KVT_ITEM_MISS)
            status = KVT_E_MISS;
        else if (load->prefetch)
            kvt_load_item_let_go(store, item); /* the read goes on, and its slot is kept */
        else
            status = grant(store, load, i);
        if (status) {
            kvt_load_end(store, number, status, false);
            return true;
        }
        load->ahead -= i->tier != KVT_TIER_DRAM;
        load->first = i->next;
        kvt_load_item_free(store, item);
    }
    if (load->first != KVT_NO_NUMBER)
        return false;
    kvt_load_free(store, number);
    return true;
}

/* Start and grant, piece by piece as long as everything is in DRAM: the client decodes the first
 * records while the last ones are looked up. Returns whether the load has ended; *waits: what for,
 * if not. */
static bool load_go(struct kvt_store *store, uint32_t number, bool may_read,
                    enum kvt_started *waits)
{
    struct kvt_load *load = &store->loads[number];
    uint32_t piece = GRANT_PIECE;
    uint64_t ahead = 0;

    for (;;) {
        *waits = load_start(store, load, may_read, piece, &ahead);
        if (load_grant(store, number))
            return true;
        if (*waits != KVT_STARTED || load->start == KVT_NO_NUMBER || load->cut)
            return false;
        if (load->first == load->start)
            ahead = 0;
        else
            piece = UINT32_MAX; /* reads are under way: all that may be are asked for together */
    }
}

/* One load's turn. blocked: an older one lacks a slot. Returns when it wants its next turn. */
static int64_t load_turn(struct kvt_store *store, uint32_t number, int64_t now, bool *blocked)
{
    struct kvt_load *load = &store->loads[number];
    uint32_t before = load->start;
    enum kvt_started waits;

    if (now >= load->deadline_ns) {
        kvt_load_end(store, number, KVT_E_DEADLINE, false);
        return INT64_MAX;
    }
    if (load_go(store, number, !*blocked, &waits))
        return INT64_MAX;
    if (load->start != before)
        load->blocked_ns = 0;
    if (waits != KVT_WAITS_FOR_SLOT && waits != KVT_OVER_SHARE) {
        load->blocked_ns = 0;
        return load->deadline_ns;
    }
    if (waits == KVT_WAITS_FOR_SLOT) /* a client that holds its share blocks itself alone */
        *blocked = true;
    if (load->prefetch) { /* the cache region is full of blocks in use: not worth waiting for */
        kvt_load_end(store, number, KVT_E_DROPPED, true);
        return INT64_MAX;
    }
    if (!load->blocked_ns)
        load->blocked_ns = now;
    if (now - load->blocked_ns >= KVT_STORE_SLOT_WAIT_NS) {
        kvt_load_end(store, number, KVT_E_DROPPED, false);
        return INT64_MAX;
    }
    return KVT_MIN(load->deadline_ns, load->blocked_ns + KVT_STORE_SLOT_WAIT_NS);
}

static int64_t list_turn(struct kvt_store *store, uint32_t head, bool blocked)
{
    int64_t now = kvt_store_now(store);
    int64_t next_run = INT64_MAX;

    store->turn_ns = now;
    while (head != KVT_NO_NUMBER) {
        uint32_t next = store->loads[head].next;
        int64_t wants = load_turn(store, head, now, &blocked);

        next_run = KVT_MIN(next_run, wants);
        head = next;
    }
    return next_run;
}

int64_t kvt_loads_run(struct kvt_store *store)
{
    int64_t next_run = list_turn(store, store->acquires.head, false);

    /* Loads that somebody waits for come first. */
    list_turn(store, store->prefetches.head, false);
    return next_run;
}
