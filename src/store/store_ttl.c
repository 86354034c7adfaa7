/* Time to live: blocks that nobody has used for that long are gone, from DRAM, from the index, and
 * for good: a restart brings none of them back.
 *
 * Two bytes an entry say when it was last used, in 64ths of the time to live. Whoever looks an
 * entry up asks here first, so a block is a miss the moment it expires; a pass over the index every
 * sixteenth of the time finds those that nobody asks for, long before the two bytes come round.
 * Then the roots journal "what was stored before this sequence is gone", where the sequence is the
 * first that was given out within the time to live. So a block that was kept alive by its uses for
 * longer than that does not survive a restart either: the disk does not know of its uses. What a
 * restart finds starts to live anew.
 *
 * The clock never goes back here. Pinned blocks do not expire; they begin anew when they are let
 * go. Bytes on disk stay until their segment is recycled: a purge is for what must not. Threads:
 * the store's owner. Allocates at open and when the index grows.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "store/store_impl.h"
#include "store/store_recycle.h"

#define PASS_TICKS (KVT_TTL_TICKS / 16u)

int kvt_ttl_init(struct kvt_store *store)
{
    struct kvt_store_ttl *ttl = &store->ttl;

    if (!store->params.ttl_ns)
        return 0;
    ttl->unit_ns = KVT_MAX(store->params.ttl_ns / KVT_TTL_TICKS, INT64_C(1));
    ttl->now_ns = kvt_store_now(store);
    ttl->tick = (uint64_t)(KVT_MAX(ttl->now_ns, INT64_C(0)) / ttl->unit_ns);
    ttl->pass_tick = ttl->tick;
    ttl->marks[ttl->tick % KVT_TTL_MARKS] = store->sequence_next;
    /* What is here now was stored before: nothing is known to be older than the time to live. */
    return kvt_ttl_grow(store);
}

void kvt_ttl_destroy(struct kvt_store *store)
{
    free(store->ttl.stamps);
    store->ttl.stamps = NULL;
}

int kvt_ttl_grow(struct kvt_store *store)
{
    struct kvt_store_ttl *ttl = &store->ttl;
    uint32_t capacity = store->index.capacity;
    uint16_t *stamps;

    if (!ttl->unit_ns || ttl->capacity >= capacity)
        return 0;
    stamps = realloc(ttl->stamps, (size_t)capacity * sizeof(*stamps));
    if (!stamps)
        return -ENOMEM;
    for (uint32_t i = ttl->capacity; i < capacity; i++)
        stamps[i] = (uint16_t)ttl->tick;
    ttl->stamps = stamps;
    ttl->capacity = capacity;
    return 0;
}

void kvt_ttl_touch(struct kvt_store *store, uint32_t entry)
{
    if (entry < store->ttl.capacity)
        store->ttl.stamps[entry] = (uint16_t)store->ttl.tick;
}

void kvt_ttl_tick(struct kvt_store *store)
{
    struct kvt_store_ttl *ttl = &store->ttl;
    uint64_t tick, last;

    if (!ttl->stamps)
        return;
    ttl->now_ns = KVT_MAX(ttl->now_ns, kvt_store_now(store));
    tick = (uint64_t)ttl->now_ns / (uint64_t)ttl->unit_ns;
    if (tick == ttl->tick)
        return;
    /* What was given out since the last tick may be of any of those that passed unseen. */
    last = ttl->marks[ttl->tick % KVT_TTL_MARKS];
    for (uint64_t t = KVT_MAX(ttl->tick + 1, tick - KVT_MIN(tick, KVT_TTL_MARKS - 1)); t < tick;
         t++)
        ttl->marks[t % KVT_TTL_MARKS] = last;
    ttl->marks[tick % KVT_TTL_MARKS] = store->sequence_next;
    ttl->tick = tick;
}

static bool expired(const struct kvt_store *store, uint32_t entry)
{
    const struct kvt_store_ttl *ttl = &store->ttl;
    const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);

    return entry < ttl->capacity && kvt_index_present(e) && !e->pinned &&
           (uint16_t)(ttl->tick - ttl->stamps[entry]) > KVT_TTL_TICKS;
}

static void expire(struct kvt_store *store, uint32_t entry)
{
    struct kvt_index_entry *e = kvt_index_at(&store->index, entry);

    store->counts.ttl_expired++;
    store->sweep_on |= e->children > 0;
    store->ttl.due = store->sequence_next;
    if (e->slot != KVT_INDEX_NONE)
        kvt_entry_drop_slot(store, entry, false);
    if (e->on_disk) {
        struct kvt_l2_where where = {.segment = e->segment, .page = e->page};

        kvt_drain_purged(&store->disks[e->root], where);
        kvt_entry_clear_disk(store, entry);
    }
    kvt_entry_settle(store, entry);
}

uint32_t kvt_ttl_alive(struct kvt_store *store, uint32_t entry)
{
    if (entry == KVT_INDEX_NONE || !store->ttl.stamps || !expired(store, entry))
        return entry;
    expire(store, entry);
    return KVT_INDEX_NONE;
}

uint32_t kvt_ttl_find(struct kvt_store *store, const struct kvt_full_key *key)
{
    uint32_t entry = kvt_entry_find(store, key);

    /* the entry may live on as somebody's parent, or because it is being filled */
    return kvt_ttl_alive(store, entry) == entry ? entry : kvt_entry_find(store, key);
}

/* Once a pass has seen everything: what is older than the time to live is gone for good. Goes on
 * until that covers whatever has expired: a time to live later at the latest. */
static void journal(struct kvt_store *store)
{
    struct kvt_store_ttl *ttl = &store->ttl;
    uint64_t floor;

    if (!store->disk_count || ttl->floor >= ttl->due || ttl->tick < KVT_TTL_TICKS)
        return;
    floor = ttl->marks[(ttl->tick - KVT_TTL_TICKS) % KVT_TTL_MARKS];
    if (floor > ttl->floor && kvt_purges_floor(store, floor))
        ttl->floor = floor;
}

int64_t kvt_ttl_run(struct kvt_store *store)
{
    struct kvt_store_ttl *ttl = &store->ttl;
    uint32_t end;

    if (!ttl->stamps)
        return INT64_MAX;
    kvt_ttl_tick(store);
    if (store->closing)
        ttl->due = store->sequence_next;
    if (store->closing || !ttl->cursor)
        journal(store);
    if (!ttl->cursor && ttl->tick - ttl->pass_tick < PASS_TICKS)
        return store->index.used ? (int64_t)(ttl->pass_tick + PASS_TICKS) * ttl->unit_ns
                                 : INT64_MAX;
    if (!ttl->cursor)
        ttl->pass_tick = ttl->tick;
    end = KVT_MIN(store->index.touched, ttl->cursor + KVT_STORE_SCAN_ENTRIES);
    for (; ttl->cursor < end; ttl->cursor++)
        if (kvt_index_at(&store->index, ttl->cursor)->used && expired(store, ttl->cursor))
            expire(store, ttl->cursor);
    if (ttl->cursor >= store->index.touched)
        ttl->cursor = 0;
    return kvt_store_now(store);
}
