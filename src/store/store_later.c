/* Blocks in DRAM that are not on disk, and when they get there: when an eviction is near, when the
 * store is idle, on flush, at close. Also what is lost when one leaves without having been written.
 * Before a block is queued admission is asked (store_admit.c): what it does not take is not
 * unsaved.
 *
 * Why a block is not on disk is its slot's write state: LATER by policy (enum kvt_write), DROPPED
 * since the queue was full, FAILED since its write failed, AGAIN since the log gave its copy up.
 * All four are "unsaved".
 *
 * Rules
 *  1. ALLOC never waits, so eviction cannot wait for a write either. Instead the blocks that leave
 *     next are written ahead: when less than a WRITE_AHEAD part of the cache region is free, those
 *     unsaved among the next such part of it are queued, with their ancestors as far as these are
 *     due within that part (a chain leaves from its end).
 *  2. An unsaved block that policy names nevertheless is queued and another one is looked for, some
 *     times; then it goes and is counted as lost. So a burst costs old blocks, never a caller.
 *  3. Blocks written ahead come back to the old end of their queue.
 *  4. Deferred blocks are no exception from the bound of the write queue, but for flush and close.
 *  5. AUTO writes at once until the log has begun to recycle. From then on a block waits until it
 *     is about to leave DRAM, which makes its place in the log that of its last use; for half a
 *     minute at most, and in no more than half of the cache region. As much as one request has
 *     taken of late is written ahead then, where that is more than a WRITE_AHEAD part.
 *  6. AGAIN is written when it leaves DRAM, never for a flush: with a disk smaller than DRAM each
 *     flush would push out what the last one wrote.
 * Threads: the store's owner. Allocates nothing; each step is bounded.
 */
#include "base/checked.h"
#include "store/store_impl.h"
#include "store/store_recycle.h"

#define WRITE_AHEAD 8u                  /* an eighth of the cache region, but ... */
#define AHEAD_BURST 2u                  /* AUTO: what one request takes, up to a half; */
#define BURST_FADE 64u                  /* requests in which that is forgotten, about */
#define AHEAD_DISK 16u                  /* ... no more than a sixteenth of the disk */
#define AHEAD_STEPS 512u                /* slots looked at, per run */
#define AHEAD_PAUSE_NS INT64_C(1000000) /* between two runs of a pass */
#define IDLE_STEPS 1024u                /* slots looked at, per run */
#define SAVES_PER_REQUEST 64            /* rule 2 */
#define AUTO_PASS_NS INT64_C(5000000000)
#define AUTO_AGE_MS 25000u /* and the pass after that: half a minute at the latest */
#define AUTO_SHARE 2u      /* of the cache region: no larger part of it is deferred */
#define AUTO_CHAIN 128u    /* blocks queued in the order of their chain */

static bool unsaved(const struct kvt_slot *s)
{
    return s->write == KVT_SLOT_WRITE_LATER || s->write == KVT_SLOT_WRITE_DROPPED ||
           s->write == KVT_SLOT_WRITE_FAILED || s->write == KVT_SLOT_WRITE_AGAIN;
}

static bool waits(const struct kvt_slot *s, enum kvt_write policy)
{
    return s->write == KVT_SLOT_WRITE_LATER && s->policy == policy;
}

static uint32_t now_ms(const struct kvt_store *store)
{
    return (uint32_t)(kvt_store_now(store) / 1000000);
}

void kvt_write_move(struct kvt_store *store, uint32_t slot, enum kvt_slot_write to)
{
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);

    store->unsaved -= unsaved(s);
    store->idle_waiting -= waits(s, KVT_WRITE_IDLE);
    store->auto_waiting -= waits(s, KVT_WRITE_AUTO);
    store->auto_bytes -= waits(s, KVT_WRITE_AUTO) ? s->record_bytes : 0;
    s->write = (unsigned)to & 15u;
    store->unsaved += unsaved(s);
    store->idle_waiting += waits(s, KVT_WRITE_IDLE);
    store->auto_waiting += waits(s, KVT_WRITE_AUTO);
    store->auto_bytes += waits(s, KVT_WRITE_AUTO) ? s->record_bytes : 0;
    if (to == KVT_SLOT_WRITE_LATER)
        s->later_ms = now_ms(store);
}

bool kvt_write_unsaved(const struct kvt_store *store, uint32_t slot)
{
    return unsaved(kvt_slot_at(&store->slots, slot));
}

void kvt_write_again(struct kvt_store *store, uint32_t slot)
{
    const struct kvt_slot *s = kvt_slot_at(&store->slots, slot);

    /* what stands in the staging region is there for a load, and was no use of the disk's */
    if (s->state == KVT_SLOT_VALID && s->cached && s->write == KVT_SLOT_WRITE_CLEAN)
        kvt_write_move(store, slot, KVT_SLOT_WRITE_AGAIN);
    else
        return;
    store->counts.given_up++;
}

/* AUTO: until something on disk has had to go, a write takes nothing's place. Then it waits, unless
 * so much does already that a burst would find nothing in DRAM that may leave at once. */
static bool at_once(const struct kvt_store *store, const struct kvt_slot *s)
{
    uint64_t cache = store->slots.arena.regions[KVT_REGION_CACHE].pages * (uint64_t)KVT_PAGE_BYTES;

    if (s->policy != KVT_WRITE_AUTO)
        return s->policy == KVT_WRITE_THROUGH;
    return !store->counts.evict_disk_segments ||
           store->auto_bytes + s->record_bytes > cache / AUTO_SHARE;
}

void kvt_writes_commit(struct kvt_store *store, uint32_t slot)
{
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);

    /* What stands in the staging region cannot stay: it goes to disk at once. */
    if (at_once(store, s) || kvt_slot_region(&store->slots, slot) == KVT_REGION_STAGING) {
        if (kvt_admit_ask(store, slot))
            (void)kvt_writes_queue(store, slot, false);
        return;
    }
    store->counts.disk_deferred++;
    kvt_write_move(store, slot, KVT_SLOT_WRITE_LATER);
}

void kvt_writes_queue_unsaved(struct kvt_store *store)
{
    for (uint32_t slot = 0; slot < store->slots.arena.touched && store->unsaved; slot++) {
        struct kvt_slot *s = kvt_slot_at(&store->slots, slot);

        if (s->state != KVT_SLOT_VALID || !unsaved(s) ||
            (s->write == KVT_SLOT_WRITE_AGAIN && !(store->closing && kvt_recycle_once(store))))
            continue;
        if (kvt_admit_ask(store, slot))
            (void)kvt_writes_queue(store, slot, true);
    }
}

bool kvt_writes_save(struct kvt_store *store, uint32_t slot, int *tries)
{
    if (!store->disk_count || !kvt_write_unsaved(store, slot) || *tries >= SAVES_PER_REQUEST ||
        !kvt_writes_room(store, slot) || !kvt_admit_ask(store, slot))
        return false;
    ++*tries;
    kvt_slot_at(&store->slots, slot)->at_end = 1;
    kvt_slot_leaving(store, slot, true);
    return kvt_writes_queue(store, slot, false);
}

uint32_t kvt_writes_unsave(struct kvt_store *store, uint32_t slot)
{
    if (slot == KVT_SLOT_NONE || kvt_slot_at(&store->slots, slot)->write != KVT_SLOT_WRITE_QUEUED)
        return KVT_SLOT_NONE;
    kvt_writes_unqueue(store, slot);
    kvt_write_move(store, slot, KVT_SLOT_WRITE_LATER);
    return slot;
}

void kvt_writes_lost(struct kvt_store *store, uint32_t slot)
{
    const struct kvt_slot *s = kvt_slot_at(&store->slots, slot);

    store->counts.admit_gone += s->write == KVT_SLOT_WRITE_FILTERED;
    if (!store->disk_count || !unsaved(s))
        return;
    if (s->write == KVT_SLOT_WRITE_AGAIN) { /* it was written once: no flush has promised more */
        store->counts.lost_again++;
        return;
    }
    store->lost_since_flush = 1;
    if (s->write == KVT_SLOT_WRITE_LATER)
        store->counts.lost_deferred++;
    else if (s->write == KVT_SLOT_WRITE_DROPPED)
        store->counts.lost_queue++;
    else
        store->counts.lost_error++;
}

void kvt_writes_lost_all(struct kvt_store *store)
{
    for (uint32_t slot = 0; slot < store->slots.arena.touched && store->unsaved; slot++)
        if (kvt_slot_at(&store->slots, slot)->state == KVT_SLOT_VALID)
            kvt_writes_lost(store, slot);
}

/* ---- writing ahead ---- */

enum ahead_end { AHEAD_DONE, AHEAD_MORE, AHEAD_FULL /* the write queue is */ };

static void set_place(const struct kvt_store *store, uint32_t slot, uint32_t *at, uint32_t *life)
{
    *at = slot;
    *life = slot == KVT_SLOT_NONE ? 0 : kvt_slot_at(&store->slots, slot)->generation;
}

/* Begin with the chain that ends in `slot`. Blocks that are queued leave the policy's order: the
 * one after it is noted first. */
static void begin_chain(const struct kvt_store *store, struct kvt_ahead *pass, uint32_t slot)
{
    uint32_t next = slot == KVT_SLOT_NONE ? slot : kvt_policy_after(&store->policy, slot);

    set_place(store, slot, &pass->at, &pass->at_life);
    set_place(store, next, &pass->next, &pass->next_life);
}

/* The block before this one in its chain, while it is in DRAM. */
static uint32_t parent_slot(const struct kvt_store *store, const struct kvt_slot *s)
{
    uint32_t parent;

    if (s->state == KVT_SLOT_DOOMED) /* purged or replaced while somebody holds it: no entry */
        return KVT_SLOT_NONE;
    parent = kvt_index_at(&store->index, s->entry)->parent;
    return parent == KVT_INDEX_NONE ? KVT_SLOT_NONE : kvt_index_at(&store->index, parent)->slot;
}

static bool may_leave(const struct kvt_store *store, uint32_t slot, uint32_t life)
{
    return kvt_slots_alive(&store->slots, slot, life) &&
           kvt_slot_at(&store->slots, slot)->queue == KVT_QUEUE_CACHE;
}

/* Whether the slot is due within the pass's reach: a block whose child is about to leave may itself
 * have been used since, or belong to a prompt of which only the last block goes early. */
static bool within(const struct kvt_store *store, struct kvt_ahead *pass, uint32_t slot)
{
    uint32_t due = kvt_policy_due(&store->policy, slot);
    uint32_t after = due > pass->base ? due - pass->base : 0;

    if (after > pass->reach) {
        pass->cut = true;
        return false;
    }
    pass->far = KVT_MAX(pass->far, after);
    return true;
}

static void begin_pass(const struct kvt_store *store, struct kvt_ahead *pass)
{
    uint32_t first = kvt_policy_first(&store->policy);

    begin_chain(store, pass, first);
    pass->base = first == KVT_SLOT_NONE ? 0 : kvt_policy_due(&store->policy, first);
    pass->seen_bytes = 0;
    pass->far = 0;
    pass->cut = false;
}

/* All within reach was looked at, and that is not enough: once more, and further. */
static bool reach_further(const struct kvt_store *store, struct kvt_ahead *pass, uint64_t bytes)
{
    if (!pass->cut || pass->seen_bytes >= bytes) {
        pass->reach = pass->far;
        return false;
    }
    pass->reach++;
    begin_pass(store, pass);
    return true;
}

/* Go on with a pass: queue what is unsaved among the next `bytes` to leave. It stands where it
 * stopped, so that a long chain is looked at to its end in several runs. */
static enum ahead_end go_ahead(struct kvt_store *store, struct kvt_ahead *pass, uint64_t bytes)
{
    for (uint32_t steps = 0; steps < AHEAD_STEPS; steps++) {
        struct kvt_slot *s;

        if (pass->at == KVT_SLOT_NONE && may_leave(store, pass->next, pass->next_life))
            begin_chain(store, pass, pass->next);
        if (pass->seen_bytes >= bytes || !kvt_slots_alive(&store->slots, pass->at, pass->at_life)) {
            if (!reach_further(store, pass, bytes))
                return AHEAD_DONE;
            continue;
        }
        if (!within(store, pass,
                    pass->at)) { /* nor are its ancestors, or what comes after a leaf */
            set_place(store, KVT_SLOT_NONE, &pass->at, &pass->at_life);
            continue;
        }
        s = kvt_slot_at(&store->slots, pass->at);
        if (s->state == KVT_SLOT_VALID && unsaved(s) && !kvt_writes_room(store, pass->at))
            return AHEAD_FULL;
        kvt_slot_leaving(store, pass->at, true);
        if (s->state == KVT_SLOT_VALID && unsaved(s)) {
            if (kvt_admit_ask(store, pass->at)) {
                s->at_end = 1;
                (void)kvt_writes_queue(store, pass->at, false);
            }
        }
        pass->seen_bytes += s->record_bytes;
        set_place(store, parent_slot(store, s), &pass->at, &pass->at_life);
    }
    return AHEAD_MORE;
}

/* The next blocks to leave, and their chains. A new pass begins only when something has
 * changed since the last one. Returns whether it wants to go on. */
static bool save_ahead(struct kvt_store *store, uint64_t bytes)
{
    struct kvt_ahead *pass = &store->ahead;
    enum ahead_end end;

    if (!kvt_slots_alive(&store->slots, pass->at, pass->at_life)) {
        if (pass->unsaved == store->unsaved && pass->evicted == store->counts.evict_dram_blocks)
            return false;
        begin_pass(store, pass);
    }
    end = go_ahead(store, pass, bytes);
    if (end == AHEAD_DONE) {
        set_place(store, KVT_SLOT_NONE, &pass->at, &pass->at_life);
        pass->unsaved = store->unsaved;
        pass->evicted = store->counts.evict_dram_blocks;
    }
    return end == AHEAD_MORE;
}

static int64_t idle_turn(struct kvt_store *store, int64_t now)
{
    int64_t due = store->last_message_ns + KVT_STORE_IDLE_NS;

    if (!store->idle_waiting)
        return INT64_MAX;
    if (now < due)
        return due;
    for (uint32_t i = 0; i < IDLE_STEPS && store->idle_waiting; i++) {
        uint32_t slot = store->idle_cursor;
        struct kvt_slot *s = kvt_slot_at(&store->slots, slot);

        if (slot >= store->slots.arena.touched) {
            store->idle_cursor = 0;
            continue;
        }
        if (s->state == KVT_SLOT_VALID && s->write == KVT_SLOT_WRITE_LATER &&
            s->policy == KVT_WRITE_IDLE) {
            if (!kvt_writes_room(store, slot))
                return now + KVT_STORE_GATHER_NS;
            if (kvt_admit_ask(store, slot))
                (void)kvt_writes_queue(store, slot, false);
        }
        store->idle_cursor++;
    }
    return store->idle_waiting ? now : INT64_MAX;
}

/* Queue the slot and what of its chain before it waits as well, parents first: neighbours in a
 * chain that are neighbours on disk are read at one go. false: the queue is full. */
static bool queue_chain(struct kvt_store *store, uint32_t slot)
{
    uint32_t chain[AUTO_CHAIN], count = 0;

    while (slot != KVT_SLOT_NONE && count < AUTO_CHAIN) {
        const struct kvt_slot *s = kvt_slot_at(&store->slots, slot);

        if (s->state != KVT_SLOT_VALID || !waits(s, KVT_WRITE_AUTO))
            break;
        chain[count++] = slot;
        slot = parent_slot(store, s);
    }
    while (count--) {
        if (!kvt_writes_room(store, chain[count]))
            return false;
        if (kvt_admit_ask(store, chain[count]))
            (void)kvt_writes_queue(store, chain[count], false);
    }
    return true;
}

/* Passes over all slots: what AUTO has deferred for long enough is queued. */
static int64_t auto_turn(struct kvt_store *store, int64_t now)
{
    if (!store->auto_waiting)
        return INT64_MAX;
    if (now < store->auto_next_ns)
        return store->auto_next_ns;
    for (uint32_t i = 0; i < IDLE_STEPS; i++) {
        uint32_t slot = store->auto_cursor;
        const struct kvt_slot *s = kvt_slot_at(&store->slots, slot);

        if (slot >= store->slots.arena.touched) {
            store->auto_cursor = 0;
            store->auto_next_ns = now + AUTO_PASS_NS;
            return store->auto_next_ns;
        }
        if (s->state == KVT_SLOT_VALID && waits(s, KVT_WRITE_AUTO) &&
            now_ms(store) - s->later_ms >= AUTO_AGE_MS && !queue_chain(store, slot))
            return now + KVT_STORE_GATHER_NS;
        store->auto_cursor++;
    }
    return now;
}

/* What is written ahead stands in DRAM and on disk for a while: no large part of either. */
static uint64_t ahead_pages(const struct kvt_store *store)
{
    uint64_t cache = store->slots.arena.regions[KVT_REGION_CACHE].pages, disk = 0;
    uint64_t burst = store->auto_waiting ? KVT_MIN(store->burst_pages, cache / AHEAD_BURST) : 0;

    for (uint32_t i = 0; i < store->disk_count; i++)
        disk += store->disks[i].cap_bytes / KVT_PAGE_BYTES;
    return KVT_MIN(KVT_MAX(cache / WRITE_AHEAD, burst), disk / AHEAD_DISK);
}

void kvt_later_burst(struct kvt_store *store, uint64_t bytes)
{
    store->burst_pages =
        KVT_MAX(bytes / KVT_PAGE_BYTES, store->burst_pages - store->burst_pages / BURST_FADE);
}

int64_t kvt_later_run(struct kvt_store *store)
{
    const struct kvt_region *region = &store->slots.arena.regions[KVT_REGION_CACHE];
    uint64_t share = ahead_pages(store);
    int64_t now = kvt_store_now(store), next;
    bool more = false;

    if (!store->disk_count || !store->unsaved)
        return INT64_MAX;
    if (region->free_pages < share)
        more = save_ahead(store, share * KVT_PAGE_BYTES);
    next = KVT_MIN(idle_turn(store, now), auto_turn(store, now));
    return more ? KVT_MIN(next, now + AHEAD_PAUSE_NS) : next;
}
