/* Loads by message: ACQUIRE and PREFETCH make them, CANCEL and a client's death end them, RELEASE
 * gives back what they granted. What happens in between: store_load.c.
 *
 * Invariants: a load stands in one list, oldest first; each of its items is in it until it has been
 * granted or the load has ended; an ACQUIRE is answered by exactly one GRANT per key, whatever
 * happens. Threads: the store's owner. Allocates at open only.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"

int kvt_loads_init(struct kvt_store *store)
{
    store->items = calloc(KVT_STORE_ITEMS, sizeof(*store->items));
    if (!store->items)
        return -ENOMEM;
    for (uint32_t i = 0; i < KVT_STORE_ITEMS; i++)
        store->items[i].next = i + 1 < KVT_STORE_ITEMS ? i + 1 : KVT_NO_NUMBER;
    for (uint32_t i = 0; i < KVT_STORE_LOADS; i++)
        store->loads[i].next = i + 1 < KVT_STORE_LOADS ? i + 1 : KVT_NO_NUMBER;
    kvt_directs_init(store);
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

void kvt_load_free(struct kvt_store *store, uint32_t number)
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

uint32_t kvt_grant_clock(const struct kvt_store *store)
{
    return (uint32_t)((uint64_t)kvt_store_now(store) / 1000);
}

void kvt_grant_send(struct kvt_store *store, uint32_t client, uint64_t cookie, uint32_t index,
                    int32_t status, uint32_t slot, const struct kvt_load_item *from)
{
    struct kvt_msg request = {.op = KVT_OP_ACQUIRE, .cookie = cookie};
    struct kvt_msg_grant *grant =
        (struct kvt_msg_grant *)kvt_reply_begin(store, &request, sizeof(*grant));

    grant->msg.op = KVT_OP_GRANT;
    grant->msg.status = status;
    grant->index = index;
    grant->tier = from ? from->tier : KVT_TIER_MISS;
    if (from && from->tier == KVT_TIER_DISK) {
        grant->root = from->root;
        grant->began_us = from->began_us;
        grant->ended_us = from->ended_us;
    }
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

void kvt_load_item_free(struct kvt_store *store, uint32_t item)
{
    store->items[item].next = store->item_free;
    store->item_free = item;
    store->items_used--;
}

void kvt_load_item_let_go(struct kvt_store *store, uint32_t item)
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
    if (i->direct != KVT_NO_NUMBER)
        kvt_direct_give(store, i->direct);
    i->slot = KVT_SLOT_NONE;
    i->direct = KVT_NO_NUMBER;
}

void kvt_load_end(struct kvt_store *store, uint32_t number, int32_t status, bool silent)
{
    struct kvt_load *load = &store->loads[number];
    uint64_t count = 0;

    while (load->first != KVT_NO_NUMBER) {
        uint32_t item = load->first;
        const struct kvt_load_item *it = &store->items[item];

        load->first = it->next;
        kvt_load_item_let_go(store, item);
        if (!silent && !load->prefetch)
            kvt_grant_send(store, load->client, load->cookie, it->index, status, KVT_SLOT_NONE,
                           it->state == KVT_ITEM_READING ? it : NULL);
        kvt_load_item_free(store, item);
        count++;
    }
    if (!load->prefetch)
        count_status(store, status, count);
    kvt_load_free(store, number);
}

void kvt_loads_client_gone(struct kvt_store *store, uint32_t client)
{
    for (int i = 0; i < 2; i++) {
        uint32_t at = i ? store->prefetches.head : store->acquires.head;

        while (at != KVT_NO_NUMBER) {
            uint32_t next = store->loads[at].next;

            if (store->loads[at].client == client)
                kvt_load_end(store, at, KVT_E_CANCELED, true);
            at = next;
        }
    }
}

void kvt_loads_end_all(struct kvt_store *store, int status)
{
    while (store->acquires.head != KVT_NO_NUMBER)
        kvt_load_end(store, store->acquires.head, status, false);
    while (store->prefetches.head != KVT_NO_NUMBER)
        kvt_load_end(store, store->prefetches.head, status, true);
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
    load->start_ns = store->last_message_ns;
    load->ns = kvt_handle_number(msg->ns);
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
                                     .direct = KVT_NO_NUMBER,
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
    struct kvt_load like = {.deadline_ns = request->deadline_ns,
                            .min_level = request->min_level,
                            .direct = request->direct};
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
        kvt_grant_send(store, client, msg->cookie, i, status, KVT_SLOT_NONE, NULL);
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
                kvt_load_end(store, at, KVT_E_CANCELED, false);
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
    bool older;

    store->counts.checksum_fail++;
    if (s->state != KVT_SLOT_VALID)
        return;
    older = kvt_index_at(&store->index, entry)->older;
    kvt_suspect_entry(store, entry);
    kvt_entry_lose_slot(store, entry, false);
    if (!older) /* that is another record: it is verified when it is loaded */
        kvt_entry_clear_disk(store, entry);
    kvt_entry_settle(store, entry);
}

void kvt_handle_release(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    const struct kvt_msg_slots *request = (const struct kvt_msg_slots *)msg;

    for (uint32_t i = 0; i < msg->count; i++) {
        const struct kvt_slot_ref *ref = &request->slots[i];

        if (ref->direct) {
            store->counts.commit_stale += !kvt_direct_release(store, client, ref);
            continue;
        }
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
