/* PURGE: blocks that are gone now and stay gone after a restart.
 *
 *   asked -> named blocks leave DRAM and index, slots being filled are doomed
 *         -> every root journals "records of these keys (this namespace) below sequence s are gone"
 *         -> journal durable: the bytes on that disk are erased
 *         -> all journals durable: a namespace is walked, its blocks leave and are erased
 *         -> answer with the number of blocks removed
 * Bytes are erased after the journal only: a record that is damaged for no reason on disk would be
 * a finding of fsck, and the end of its segment for a walk. A root whose journal cannot be written
 * makes the answer an error; its bytes go when the log has written it after all.
 * A record of a purged block that is on its way to the disk has a sequence below s as well: it does
 * not come back either, and store_write.c erases it when it lands.
 * A namespace is walked in steps (one per run); meanwhile everything in it is a miss and ALLOC in
 * it is refused. One that is named by its id is walked group by group.
 * Threads: the store's owner. Allocates at open only.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"
#include "store/store_recycle.h"

#define BURIED_MAX 256u /* a drive that rots faster must not fill the journal */

int kvt_purges_init(struct kvt_store *store)
{
    store->purge_items =
        calloc((size_t)KVT_STORE_PURGES * KVT_MSG_KEYS_MAX, sizeof(*store->purge_items));
    if (!store->purge_items)
        return -ENOMEM;
    for (uint32_t i = 0; i < KVT_STORE_PURGES; i++)
        store->purges[i].items = store->purge_items + (size_t)i * KVT_MSG_KEYS_MAX;
    return 0;
}

void kvt_purges_destroy(struct kvt_store *store)
{
    free(store->purge_items);
    store->purge_items = NULL;
}

static void remove_block(struct kvt_store *store, struct kvt_store_purge *purge, uint32_t entry)
{
    struct kvt_index_entry *e = kvt_index_at(&store->index, entry);

    if (!kvt_index_present(e))
        return;
    purge->removed++;
    purge->removed_bytes += kvt_entry_bytes(store, entry);
    store->counts.purged_blocks++;
    if (e->slot != KVT_INDEX_NONE) {
        struct kvt_slot *s = kvt_slot_at(&store->slots, e->slot);

        s->purged = s->write == KVT_SLOT_WRITE_GOING;
        kvt_entry_drop_slot(store, entry, false);
    }
    if (e->on_disk) {
        struct kvt_l2_where where = {.segment = e->segment, .page = e->page};
        uint32_t root = e->root;

        kvt_entry_clear_disk(store, entry);
        kvt_drain_purged(&store->disks[root], where);
        kvt_l2_erase(store->disks[root].l2, where, kvt_entry_bytes(store, entry) / KVT_PAGE_BYTES);
    }
    kvt_entry_settle(store, entry);
}

/* Slots that are being filled for what is purged: their COMMIT will be refused. */
static void doom_fills(struct kvt_store *store, const struct kvt_store_purge *purge)
{
    for (uint32_t slot = 0;
         slot < store->slots.arena.touched && store->slots.in_state[KVT_SLOT_FILLING]; slot++) {
        struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
        bool meant = false;

        if (s->state != KVT_SLOT_FILLING)
            continue;
        if (purge->op == KVT_OP_PURGE_NS)
            meant = memcmp(s->key.ns, purge->items[0].key.ns, KVT_NS_BYTES) == 0;
        else if (purge->whole)
            meant = kvt_index_at(&store->index, s->entry)->ns == purge->ns;
        for (uint32_t i = 0; !purge->whole && i < purge->count && !meant; i++)
            meant = memcmp(&s->key, &purge->items[i].key, sizeof(s->key)) == 0;
        if (meant)
            kvt_slot_abandon(store, slot);
    }
}

static void journal_done(void *ctx, int status)
{
    struct kvt_store_purge *purge = *(struct kvt_store_purge **)ctx;
    uint32_t root = (uint32_t)((struct kvt_store_purge **)ctx - purge->self);

    purge->store->again = 1;
    purge->going[root] = 0;
    purge->done[root] = 1;
    if (status && !purge->status)
        purge->status = status;
}

/* It is remembered already: what is purged again and again takes one place. */
static bool is_off(const struct kvt_store *store, const struct kvt_journal_item *item)
{
    for (uint32_t i = 0; i < store->off_purge_count; i++)
        if (store->off_purges[i].kind == item->kind &&
            memcmp(&store->off_purges[i].key, &item->key, sizeof(item->key)) == 0)
            return true;
    return false;
}

/* A root that somebody else holds now may come later, with records of what is purged here, or has
 * come and is still being taken in. Too many to remember become "everything". */
static void remember_off(struct kvt_store *store, const struct kvt_store_purge *purge)
{
    if (!store->params.roots_pending && !store->joining)
        return;
    for (uint32_t i = 0; i < purge->count; i++) {
        if (store->off_purge_count == KVT_STORE_OFF_PURGES) {
            memset(&store->off_purges[0], 0, sizeof(store->off_purges[0]));
            store->off_purges[0].kind = KVT_JOURNAL_PURGE_ALL;
            store->off_purge_count = 1;
            return;
        }
        if (is_off(store, &purge->items[i]))
            continue;
        if (!store->off_purge_count || store->off_purges[0].kind != KVT_JOURNAL_PURGE_ALL)
            store->off_purges[store->off_purge_count++] = purge->items[i];
    }
}

bool kvt_purges_free(const struct kvt_store *store)
{
    for (uint32_t i = 0; i < KVT_STORE_PURGES; i++)
        if (!store->purges[i].used)
            return true;
    return false;
}

void kvt_purges_off_journal(struct kvt_store *store, uint32_t root)
{
    struct kvt_store_purge *purge = store->purges;
    struct kvt_journal_item *items;

    if (!store->off_purge_count)
        return;
    while (purge->used) /* the caller has made sure that one is free */
        purge++;
    items = purge->items;
    *purge = (struct kvt_store_purge){
        .store = store, .used = 1, .silent = 1, .count = store->off_purge_count, .items = items};
    for (uint32_t i = 0; i < purge->count; i++) {
        items[i] = store->off_purges[i];
        items[i].value = store->sequence_next;
    }
    for (uint32_t i = 0; i < KVT_STORE_ROOTS_MAX; i++) {
        purge->self[i] = purge;
        purge->done[i] = i != root;
    }
}

void kvt_purges_bury(struct kvt_store *store, uint32_t root, const struct kvt_journal_item *items,
                     uint32_t count)
{
    struct kvt_store_purge *purge = store->purges;
    struct kvt_journal_item *own;

    while (purge < store->purges + KVT_STORE_PURGES && purge->used)
        purge++;
    if (purge == store->purges + KVT_STORE_PURGES || store->buried + count > BURIED_MAX)
        return;
    store->buried += count;
    own = purge->items;
    *purge = (struct kvt_store_purge){
        .store = store, .used = 1, .silent = 1, .buried = 1, .count = count, .items = own};
    memcpy(own, items, count * sizeof(*own));
    for (uint32_t i = 0; i < KVT_STORE_ROOTS_MAX; i++) {
        purge->self[i] = purge;
        purge->done[i] = i != root;
    }
}

struct kvt_store_purge *kvt_purges_floor(struct kvt_store *store)
{
    struct kvt_store_purge *purge = NULL;
    struct kvt_journal_item *items;

    for (uint32_t i = 0; i < KVT_STORE_PURGES; i++) {
        if (store->purges[i].used && store->purges[i].floors)
            return NULL;
        if (!store->purges[i].used)
            purge = &store->purges[i];
    }
    if (!purge)
        return NULL;
    items = purge->items;
    *purge = (struct kvt_store_purge){
        .store = store, .used = 1, .silent = 1, .floors = 1, .items = items};
    for (uint32_t i = 0; i < KVT_STORE_ROOTS_MAX; i++)
        purge->self[i] = purge;
    return purge;
}

bool kvt_purges_floor_add(struct kvt_store_purge *purge, const uint8_t *ns, uint64_t value)
{
    struct kvt_journal_item *item;

    if (purge->count == KVT_MSG_KEYS_MAX)
        return false;
    item = &purge->items[purge->count++];
    memset(item, 0, sizeof(*item));
    item->kind = ns ? KVT_JOURNAL_PURGE_NS : KVT_JOURNAL_PURGE_ALL;
    if (ns)
        memcpy(item->key.ns, ns, KVT_NS_BYTES);
    item->value = value;
    return true;
}

/* The first group of the namespace at `from` or behind it. */
static uint32_t group_from(const struct kvt_store *store, const uint8_t id[KVT_NS_BYTES],
                           uint32_t from)
{
    for (; from < store->spaces.touched; from++) {
        const struct kvt_namespace *ns = kvt_namespace_at(&store->spaces, from);

        if (ns->used && memcmp(ns->id, id, KVT_NS_BYTES) == 0)
            return from;
    }
    return KVT_NS_NONE;
}

/* All of the namespace that has the id. */
static void name_whole(struct kvt_store *store, struct kvt_store_purge *purge,
                       const uint8_t id[KVT_NS_BYTES])
{
    memset(&purge->items[0], 0, sizeof(purge->items[0]));
    purge->items[0].kind = KVT_JOURNAL_PURGE_NS;
    memcpy(purge->items[0].key.ns, id, KVT_NS_BYTES);
    purge->items[0].value = store->sequence_next;
    purge->count = 1;
}

static void name_keys(struct kvt_store *store, struct kvt_store_purge *purge,
                      const struct kvt_msg_keys *request)
{
    for (uint32_t i = 0; i < request->msg.count; i++) {
        struct kvt_journal_item *item = &purge->items[i];

        memset(item, 0, sizeof(*item));
        item->kind = KVT_JOURNAL_PURGE_KEY;
        kvt_key_full(store, purge->ns, &request->keys[i], &item->key);
        item->value = store->sequence_next;
        purge->count++;
    }
}

/* What is to go has been named. */
static void begin(struct kvt_store *store, struct kvt_store_purge *purge)
{
    purge->whole = purge->items[0].kind == KVT_JOURNAL_PURGE_NS && purge->ns != KVT_NS_NONE;
    if (purge->whole) {
        kvt_namespace_at(&store->spaces, purge->ns)->purging++;
        purge->groups = 1;
    }
    remember_off(store, purge);
    kvt_l3_purge(store, purge);
    for (uint32_t root = 0; root < store->disk_count; root++) {
        purge->held[root] = 1;
        kvt_l2_erase_hold(store->disks[root].l2, true);
    }
    doom_fills(store, purge);
    for (uint32_t i = 0; i < purge->count && purge->items[i].kind == KVT_JOURNAL_PURGE_KEY; i++) {
        uint32_t entry = kvt_entry_find(store, &purge->items[i].key);

        if (entry != KVT_INDEX_NONE && kvt_entry_is(store, entry, &purge->items[i].key))
            remove_block(store, purge, entry);
    }
}

/* A place for what was asked for. NULL: all are taken, which was answered. */
static struct kvt_store_purge *place_take(struct kvt_store *store, uint32_t client,
                                          const struct kvt_msg *msg)
{
    struct kvt_store_purge *purge = store->purges;
    struct kvt_journal_item *items;

    while (purge < store->purges + KVT_STORE_PURGES && purge->used)
        purge++;
    if (purge == store->purges + KVT_STORE_PURGES) {
        kvt_reply_status(store, client, msg->op, msg->cookie, -EAGAIN);
        return NULL;
    }
    items = purge->items;
    *purge = (struct kvt_store_purge){.store = store,
                                      .cookie = msg->cookie,
                                      .client = client,
                                      .ns = kvt_handle_number(msg->ns),
                                      .op = msg->op,
                                      .used = 1,
                                      .items = items};
    for (uint32_t i = 0; i < KVT_STORE_ROOTS_MAX; i++)
        purge->self[i] = purge;
    return purge;
}

void kvt_handle_purge(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    struct kvt_store_purge *purge = place_take(store, client, msg);

    if (!purge)
        return;
    if (msg->count == 0)
        name_whole(store, purge, kvt_namespace_at(&store->spaces, purge->ns)->id);
    else
        name_keys(store, purge, (const struct kvt_msg_keys *)msg);
    begin(store, purge);
}

void kvt_handle_purge_ns(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    const struct kvt_msg_purge_ns *request = (const struct kvt_msg_purge_ns *)msg;
    struct kvt_store_purge *purge = place_take(store, client, msg);

    if (!purge)
        return;
    name_whole(store, purge, request->id);
    purge->ns = group_from(store, request->id, 0);
    begin(store, purge);
}

static bool erase_room(const struct kvt_store *store)
{
    for (uint32_t root = 0; root < store->disk_count; root++)
        if (!kvt_l2_erase_room(store->disks[root].l2))
            return false;
    return true;
}

/* A step through the index. Returns whether all of it has been seen. */
static bool walk(struct kvt_store *store, struct kvt_store_purge *purge)
{
    struct kvt_namespace *ns = kvt_namespace_at(&store->spaces, purge->ns);
    uint32_t end;

    if (!purge->whole)
        return true;
    end = KVT_MIN(store->index.touched, purge->cursor + KVT_STORE_SCAN_ENTRIES);
    for (; purge->cursor < end && erase_room(store); purge->cursor++) {
        const struct kvt_index_entry *e = kvt_index_at(&store->index, purge->cursor);

        if (e->used && e->ns == purge->ns)
            remove_block(store, purge, purge->cursor);
    }
    if (purge->cursor < store->index.touched)
        return false;
    ns->purging--;
    if (purge->op == KVT_OP_PURGE_NS)
        purge->ns = group_from(store, ns->id, purge->ns + 1);
    else
        purge->ns = KVT_NS_NONE;
    if (purge->ns == KVT_NS_NONE) {
        purge->whole = 0;
        return true;
    }
    kvt_namespace_at(&store->spaces, purge->ns)->purging++;
    purge->groups++;
    purge->cursor = 0;
    return false;
}

/* The lowest sequence that a purge in progress has for its bound. */
static uint64_t lowest_value(const struct kvt_store *store)
{
    uint64_t lowest = UINT64_MAX;

    for (uint32_t i = 0; i < KVT_STORE_PURGES; i++) {
        const struct kvt_store_purge *purge = &store->purges[i];

        for (uint32_t k = 0; purge->used && k < purge->count; k++)
            lowest = KVT_MIN(lowest, purge->items[k].value);
    }
    return lowest;
}

static bool journaled(struct kvt_store *store, struct kvt_store_purge *purge)
{
    bool all = true;

    for (uint32_t root = 0; root < store->disk_count; root++) {
        int err;

        if (purge->done[root]) {
            if (purge->held[root])
                kvt_l2_erase_hold(store->disks[root].l2, false);
            purge->held[root] = 0;
            continue;
        }
        all = false;
        if (purge->going[root] || store->disks[root].marks.going)
            continue;
        purge->going[root] = 1;
        kvt_l2_purging(store->disks[root].l2, lowest_value(store));
        err = kvt_l2_journal(store->disks[root].l2, purge->items, purge->count, journal_done,
                             &purge->self[root]);
        if (err == -EAGAIN)
            purge->going[root] = 0; /* another purge's turn */
        else if (err)
            journal_done(&purge->self[root], err);
    }
    return all;
}

static void answer(struct kvt_store *store, const struct kvt_store_purge *purge)
{
    const struct kvt_msg request = {.op = purge->op, .cookie = purge->cookie};
    struct kvt_msg_purge_ns_reply *reply;

    if (purge->op != KVT_OP_PURGE_NS) {
        kvt_reply_status(store, purge->client, purge->op, purge->cookie,
                         purge->status ? purge->status
                                       : (int32_t)KVT_MIN(purge->removed, (uint64_t)INT32_MAX));
        return;
    }
    reply = (struct kvt_msg_purge_ns_reply *)kvt_reply_begin(store, &request, sizeof(*reply));
    reply->msg.status = purge->status;
    reply->msg.count = purge->groups;
    reply->blocks = purge->removed;
    reply->bytes = purge->removed_bytes;
    reply->remote_records = purge->remote_removed;
    kvt_reply_send(store, purge->client, &reply->msg);
}

bool kvt_purges_run(struct kvt_store *store)
{
    bool again = false;

    for (uint32_t i = 0; i < KVT_STORE_PURGES; i++) {
        struct kvt_store_purge *purge = &store->purges[i];
        const uint32_t before = purge->cursor, ns_before = purge->ns;

        if (!purge->used || !journaled(store, purge))
            continue;
        if (!walk(store, purge)) {
            again = again || purge->cursor != before || purge->ns != ns_before;
            continue;
        }
        if (!kvt_l3_purged(store, purge))
            continue;
        purge->used = 0;
        store->counts.scrub_buried += purge->buried && !purge->status ? purge->count : 0;
        if (purge->silent)
            continue;
        answer(store, purge);
    }
    return again;
}

void kvt_purges_end_all(struct kvt_store *store, int status)
{
    for (uint32_t i = 0; i < KVT_STORE_PURGES; i++) {
        struct kvt_store_purge *purge = &store->purges[i];

        if (purge->used && !purge->silent)
            kvt_reply_status(store, purge->client, purge->op, purge->cookie, status);
        purge->used = 0;
    }
}
