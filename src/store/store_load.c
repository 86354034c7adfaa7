/* The load path: ACQUIRE, PREFETCH, CANCEL, RELEASE.
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
 *  3. A load that has waited SLOT_WAIT for a slot gives up: its clients hold all of them.
 *  4. A chain with a block missing ends there: the keys after it get KVT_E_MISS as well, whatever
 *     is stored of them.
 *  5. A key not granted by the deadline gets KVT_E_DEADLINE; a read that lands later finds no one
 *     waiting, and its slot is kept as a cached copy or freed.
 *  6. PREFETCH is a load without grants that reads into the cache region only.
 * Threads: the store's owner. Allocates at open only.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"

enum started { STARTED, WAITS_FOR_SLOT, WAITS_FOR_READ };

int kvt_loads_init(struct kvt_store *store)
{
    store->items = calloc(KVT_STORE_ITEMS, sizeof(*store->items));
    if (!store->items)
        return -ENOMEM;
    for (uint32_t i = 0; i < KVT_STORE_ITEMS; i++)
        store->items[i].next = i + 1 < KVT_STORE_ITEMS ? i + 1 : KVT_NO_NUMBER;
    for (uint32_t i = 0; i < KVT_STORE_LOADS; i++)
        store->loads[i].next = i + 1 < KVT_STORE_LOADS ? i + 1 : KVT_NO_NUMBER;
    store->acquires = store->prefetches = (struct kvt_load_list){KVT_NO_NUMBER, KVT_NO_NUMBER};
    return 0;
}

void kvt_loads_destroy(struct kvt_store *store)
{
    free(store->items);
    store->items = NULL;
}

static struct kvt_load_list *list_of(struct kvt_store *store, const struct kvt_load *load)
{
    return load->prefetch ? &store->prefetches : &store->acquires;
}

static void load_free(struct kvt_store *store, uint32_t number)
{
    struct kvt_load *load = &store->loads[number];
    struct kvt_load_list *list = list_of(store, load);

    if (load->prev != KVT_NO_NUMBER)
        store->loads[load->prev].next = load->next;
    else
        list->head = load->next;
    if (load->next != KVT_NO_NUMBER)
        store->loads[load->next].prev = load->prev;
    else
        list->tail = load->prev;
    load->next = store->load_free;
    store->load_free = number;
}

static void send_grant(struct kvt_store *store, uint32_t client, uint64_t cookie, uint32_t index,
                       int32_t status, uint32_t slot, uint8_t tier)
{
    struct kvt_msg request = {.op = KVT_OP_ACQUIRE, .cookie = cookie};
    struct kvt_msg_grant *grant =
        (struct kvt_msg_grant *)kvt_reply_begin(store, &request, sizeof(*grant));

    grant->msg.op = KVT_OP_GRANT;
    grant->msg.status = status;
    grant->index = index;
    grant->tier = tier;
    if (slot != KVT_SLOT_NONE) {
        const struct kvt_slot *s = kvt_slot_at(&store->slots, slot);

        grant->slot = slot;
        grant->generation = s->generation;
        grant->record_bytes = s->record_bytes;
        grant->arena_offset = kvt_slot_offset(&store->slots, slot);
        grant->checksum = s->checksum;
        grant->map = s->map;
    }
    kvt_reply_send(store, client, &grant->msg);
}

static void count_status(struct kvt_store *store, int32_t status, uint64_t n)
{
    if (status == KVT_E_MISS)
        store->counts.load_miss += n;
    else if (status == KVT_E_DEADLINE)
        store->counts.load_deadline += n;
    else if (status == KVT_E_DROPPED)
        store->counts.load_no_slot += n;
    else
        store->counts.load_canceled += n;
}

static void item_free(struct kvt_store *store, uint32_t item)
{
    store->items[item].next = store->item_free;
    store->item_free = item;
    store->items_used--;
}

/* An item lets go of its slot, whether it waits for the read or holds the record. */
static void item_let_go(struct kvt_store *store, uint32_t item)
{
    struct kvt_load_item *i = &store->items[item];

    if (i->state == KVT_ITEM_READING) {
        uint32_t *link = &kvt_slot_at(&store->slots, i->slot)->waiters;

        while (*link != item)
            link = &store->items[*link].waiter_next;
        *link = i->waiter_next;
    }
    if (i->slot != KVT_SLOT_NONE) {
        kvt_slot_unpin(&store->slots, i->slot);
        kvt_slot_settle(store, i->slot);
    }
    i->slot = KVT_SLOT_NONE;
}

/* End a load: every key not granted yet gets `status`. silent: nobody is there to hear. */
static void load_end(struct kvt_store *store, uint32_t number, int32_t status, bool silent)
{
    struct kvt_load *load = &store->loads[number];
    uint64_t count = 0;

    while (load->first != KVT_NO_NUMBER) {
        uint32_t item = load->first;

        load->first = store->items[item].next;
        item_let_go(store, item);
        if (!silent && !load->prefetch)
            send_grant(store, load->client, load->cookie, store->items[item].index, status,
                       KVT_SLOT_NONE, KVT_TIER_MISS);
        item_free(store, item);
        count++;
    }
    if (!load->prefetch)
        count_status(store, status, count);
    load_free(store, number);
}

/* Why a key cannot be had, counted; or its entry. */
static uint32_t wanted_entry(struct kvt_store *store, const struct kvt_load *load,
                             const struct kvt_full_key *full)
{
    uint32_t entry = kvt_entry_find(store, full);
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
    if (kvt_level_of_map(e->map) < load->min_level) {
        store->counts.load_miss_level++;
        return KVT_INDEX_NONE;
    }
    return entry;
}

/* A slot for a record on disk, with its read under way. */
static enum started start_read(struct kvt_store *store, const struct kvt_load *load, uint32_t entry,
                               const struct kvt_full_key *full, uint32_t *out)
{
    enum kvt_room room = load->prefetch ? KVT_ROOM_PREFETCH : KVT_ROOM_LOAD;
    struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    uint32_t bytes = kvt_entry_bytes(store, entry);
    uint32_t slot;
    struct kvt_slot *s;

    if (!store->read_free ||
        (load->prefetch && store->prefetch_going >= KVT_STORE_PREFETCH_READS) ||
        load->ahead >= KVT_STORE_READ_AHEAD)
        return WAITS_FOR_READ;
    slot = kvt_room_slot(store, bytes, room);
    if (slot == KVT_SLOT_NONE)
        return WAITS_FOR_SLOT;
    s = kvt_slot_at(&store->slots, slot);
    s->key = *full;
    s->map = e->map;
    kvt_entry_attach(store, entry, slot);
    if (!kvt_reads_start(store, entry, slot, load->prefetch)) {
        kvt_entry_drop_slot(store, entry, false);
        return WAITS_FOR_READ;
    }
    *out = slot;
    return STARTED;
}

static enum started start_item(struct kvt_store *store, struct kvt_load *load, uint32_t item,
                               bool may_read)
{
    struct kvt_load_item *i = &store->items[item];
    struct kvt_full_key full;
    uint32_t entry;
    struct kvt_slot *s;

    kvt_key_full(store, load->ns, &i->key, &full);
    entry = wanted_entry(store, load, &full);
    if (entry == KVT_INDEX_NONE) {
        i->state = KVT_ITEM_MISS;
        load->cut = 1;
        return STARTED;
    }
    i->slot = kvt_index_at(&store->index, entry)->slot;
    i->tier = KVT_TIER_DRAM;
    if (i->slot == KVT_SLOT_NONE) {
        enum started started =
            may_read ? start_read(store, load, entry, &full, &i->slot) : WAITS_FOR_READ;

        if (started != STARTED)
            return started;
    }
    kvt_policy_hit(&store->policy, entry);
    kvt_slot_pin(&store->slots, i->slot);
    kvt_slot_settle(store, i->slot);
    s = kvt_slot_at(&store->slots, i->slot);
    if (s->state == KVT_SLOT_VALID) {
        i->state = KVT_ITEM_READY;
        return STARTED;
    }
    i->state = KVT_ITEM_READING;
    i->tier = KVT_TIER_DISK;
    i->waiter_next = s->waiters;
    s->waiters = item;
    load->ahead++;
    return STARTED;
}

/* Start what can be started. Returns whether the load lacks a slot. */
static bool load_start(struct kvt_store *store, struct kvt_load *load, bool may_read)
{
    while (load->start != KVT_NO_NUMBER && !load->cut) {
        uint32_t item = load->start;
        enum started started = start_item(store, load, item, may_read);

        if (started != STARTED) {
            store->items[item].slot = KVT_SLOT_NONE;
            return started == WAITS_FOR_SLOT;
        }
        load->start = store->items[item].next;
    }
    return false;
}

/* Hand one READY record to the client. */
static int32_t grant(struct kvt_store *store, struct kvt_load *load, struct kvt_load_item *i)
{
    uint32_t slot = i->slot;

    if (kvt_slot_at(&store->slots, slot)->state != KVT_SLOT_VALID)
        return KVT_E_MISS; /* purged or replaced since it was started */
    if (!kvt_slot_hold(&store->slots, slot, load->client))
        return KVT_E_DROPPED;
    kvt_slot_unpin(&store->slots, slot);
    i->slot = KVT_SLOT_NONE;
    if (i->tier == KVT_TIER_DISK)
        store->counts.load_granted_disk++;
    else
        store->counts.load_granted_dram++;
    send_grant(store, load->client, load->cookie, i->index, 0, slot, i->tier);
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
            item_let_go(store, item); /* the read goes on, and its slot is kept */
        else
            status = grant(store, load, i);
        if (status) {
            load_end(store, number, status, false);
            return true;
        }
        load->ahead -= i->tier == KVT_TIER_DISK;
        load->first = i->next;
        item_free(store, item);
    }
    if (load->first != KVT_NO_NUMBER)
        return false;
    load_free(store, number);
    return true;
}

/* One load's turn. blocked: an older one lacks a slot. Returns when it wants its next turn. */
static int64_t load_turn(struct kvt_store *store, uint32_t number, int64_t now, bool *blocked)
{
    struct kvt_load *load = &store->loads[number];
    uint32_t before = load->start;
    bool lacks;

    if (now >= load->deadline_ns) {
        load_end(store, number, KVT_E_DEADLINE, false);
        return INT64_MAX;
    }
    lacks = load_start(store, load, !*blocked);
    if (load->start != before)
        load->blocked_ns = 0;
    if (load_grant(store, number))
        return INT64_MAX;
    if (!lacks) {
        load->blocked_ns = 0;
        return load->deadline_ns;
    }
    *blocked = true;
    if (load->prefetch) { /* the cache region is full of blocks in use: not worth waiting for */
        load_end(store, number, KVT_E_DROPPED, true);
        return INT64_MAX;
    }
    if (!load->blocked_ns)
        load->blocked_ns = now;
    if (now - load->blocked_ns >= KVT_STORE_SLOT_WAIT_NS) {
        load_end(store, number, KVT_E_DROPPED, false);
        return INT64_MAX;
    }
    return KVT_MIN(load->deadline_ns, load->blocked_ns + KVT_STORE_SLOT_WAIT_NS);
}

static int64_t list_turn(struct kvt_store *store, uint32_t head, bool blocked)
{
    int64_t now = kvt_store_now(store);
    int64_t next_run = INT64_MAX;

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

void kvt_loads_client_gone(struct kvt_store *store, uint32_t client)
{
    for (int i = 0; i < 2; i++) {
        uint32_t at = i ? store->prefetches.head : store->acquires.head;

        while (at != KVT_NO_NUMBER) {
            uint32_t next = store->loads[at].next;

            if (store->loads[at].client == client)
                load_end(store, at, KVT_E_CANCELED, true);
            at = next;
        }
    }
}

void kvt_loads_end_all(struct kvt_store *store, int status)
{
    while (store->acquires.head != KVT_NO_NUMBER)
        load_end(store, store->acquires.head, status, false);
    while (store->prefetches.head != KVT_NO_NUMBER)
        load_end(store, store->prefetches.head, status, true);
}

/* Queue a request's keys as a load. 0, or why not. */
static int32_t load_new(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg,
                        const struct kvt_msg_key *keys, const struct kvt_load *like)
{
    uint32_t number = store->load_free;
    struct kvt_load *load;
    struct kvt_load_list *list;
    uint32_t *link;

    if (number == KVT_NO_NUMBER || msg->count > KVT_STORE_ITEMS - store->items_used)
        return KVT_E_DROPPED;
    load = &store->loads[number];
    link = &load->first;
    store->load_free = load->next;
    *load = *like;
    load->client = client;
    load->cookie = msg->cookie;
    load->ns = msg->ns - 1;
    for (uint32_t i = 0; i < msg->count; i++) {
        uint32_t item = store->item_free;
        struct kvt_load_item *it = &store->items[item];

        store->item_free = it->next;
        store->items_used++;
        *it = (struct kvt_load_item){.key = keys[i],
                                     .next = KVT_NO_NUMBER,
                                     .waiter_next = KVT_NO_NUMBER,
                                     .load = number,
                                     .slot = KVT_SLOT_NONE,
                                     .index = i};
        *link = item;
        link = &it->next;
    }
    *link = KVT_NO_NUMBER;
    load->start = load->first;
    list = list_of(store, load);
    load->prev = list->tail;
    load->next = KVT_NO_NUMBER;
    if (list->tail != KVT_NO_NUMBER)
        store->loads[list->tail].next = number;
    else
        list->head = number;
    list->tail = number;
    return 0;
}

void kvt_handle_acquire(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    const struct kvt_msg_acquire *request = (const struct kvt_msg_acquire *)msg;
    struct kvt_load like = {.deadline_ns = request->deadline_ns, .min_level = request->min_level};
    int32_t status = 0;

    if (!store->enabled) {
        store->counts.off_requests++;
        status = KVT_E_MISS;
    } else {
        status = load_new(store, client, msg, request->keys, &like);
    }
    if (!status)
        return; /* the loop goes on with it */
    count_status(store, status, msg->count);
    for (uint32_t i = 0; i < msg->count; i++)
        send_grant(store, client, msg->cookie, i, status, KVT_SLOT_NONE, KVT_TIER_MISS);
}

void kvt_handle_prefetch(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    const struct kvt_msg_keys *request = (const struct kvt_msg_keys *)msg;
    struct kvt_load like = {
        .deadline_ns = INT64_MAX, .min_level = request->min_level, .prefetch = 1};
    int32_t queued = 0;

    /* Loads come first: prefetches may use half of the items. */
    if (!store->enabled)
        store->counts.off_requests++;
    else if (store->items_used + msg->count > KVT_STORE_ITEMS / 2 ||
             load_new(store, client, msg, request->keys, &like))
        store->counts.prefetch_dropped += msg->count;
    else
        queued = (int32_t)msg->count;
    kvt_reply_status(store, client, msg->op, msg->cookie, queued);
}

void kvt_handle_cancel(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    const struct kvt_msg_cancel *request = (const struct kvt_msg_cancel *)msg;

    for (int i = 0; i < 2; i++) {
        uint32_t at = i ? store->prefetches.head : store->acquires.head;

        while (at != KVT_NO_NUMBER) {
            uint32_t next = store->loads[at].next;

            if (store->loads[at].client == client && store->loads[at].cookie == request->target)
                load_end(store, at, KVT_E_CANCELED, false);
            at = next;
        }
    }
    if (msg->cookie)
        kvt_reply_status(store, client, msg->op, msg->cookie, 0);
}

/* The client found bytes that do not match: no copy of this record is to be trusted. */
static void drop_bad(struct kvt_store *store, uint32_t slot)
{
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
    uint32_t entry = s->entry;

    store->counts.checksum_fail++;
    if (s->state != KVT_SLOT_VALID)
        return;
    kvt_entry_drop_slot(store, entry, false);
    kvt_entry_clear_disk(store, entry);
    kvt_entry_settle(store, entry);
}

void kvt_handle_release(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    const struct kvt_msg_slots *request = (const struct kvt_msg_slots *)msg;

    for (uint32_t i = 0; i < msg->count; i++) {
        const struct kvt_slot_ref *ref = &request->slots[i];

        if (!kvt_slots_alive(&store->slots, ref->slot, ref->generation) ||
            kvt_slot_at(&store->slots, ref->slot)->filler ||
            !kvt_slot_unhold(&store->slots, ref->slot, client)) {
            store->counts.commit_stale++;
            continue;
        }
        if (ref->status == KVT_E_CORRUPT) {
            /* One pin keeps the slot's name valid while its entry lets go of it. */
            kvt_slot_pin(&store->slots, ref->slot);
            drop_bad(store, ref->slot);
            kvt_slot_unpin(&store->slots, ref->slot);
        }
        kvt_slot_settle(store, ref->slot);
    }
    if (msg->cookie)
        kvt_reply_status(store, client, msg->op, msg->cookie, 0);
}
