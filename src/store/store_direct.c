/* Direct loads: records that a client reads from disk itself, pinned where they lie.
 *
 *   FREE --take--> USED (a load's, then the client's) --give: release, cancel, client gone--> FREE
 *
 * Invariants: a pin in use counts in its segment (kvt_l2_hold), which is not recycled meanwhile;
 * (number, generation) names one life of a pin, so that an old reference never meets a new one.
 * What is not promised: a purge erases the bytes under a pin, and the index knows fingerprints
 * only. The client compares the header's key and the checksum; that they differ is a miss.
 * Threads: the store's owner. Allocates nothing.
 */
#include "kvtier/error.h"
#include "store/store_impl.h"

void kvt_directs_init(struct kvt_store *store)
{
    for (uint32_t i = 0; i < KVT_STORE_DIRECTS; i++)
        store->directs[i].next = i + 1 < KVT_STORE_DIRECTS ? i + 1 : KVT_NO_NUMBER;
}

uint32_t kvt_direct_take(struct kvt_store *store, uint32_t client, uint32_t entry,
                         const struct kvt_full_key *key)
{
    const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    struct kvt_l2_where where = {.segment = e->segment, .page = e->page};
    uint32_t number = store->direct_free;
    uint32_t bytes = kvt_entry_bytes(store, entry);
    struct kvt_store_direct *d;

    if (number == KVT_NO_NUMBER || !e->on_disk)
        return KVT_NO_NUMBER;
    if (kvt_l2_hold(store->disks[e->root].l2, where, bytes / KVT_PAGE_BYTES))
        return KVT_NO_NUMBER;
    d = &store->directs[number];
    store->direct_free = d->next;
    store->direct_used++;
    *d = (struct kvt_store_direct){.key = *key,
                                   .where = where,
                                   .generation = d->generation + 1,
                                   .client = client,
                                   .record_bytes = bytes,
                                   .root = e->root,
                                   .map = e->map,
                                   .used = 1};
    return number;
}

void kvt_direct_give(struct kvt_store *store, uint32_t direct)
{
    struct kvt_store_direct *d = &store->directs[direct];

    kvt_l2_unhold(store->disks[d->root].l2, d->where);
    d->used = 0;
    store->direct_used--;
    if (d->generation == UINT32_MAX)
        return; /* its names are used up */
    d->next = store->direct_free;
    store->direct_free = direct;
}

void kvt_direct_grant(struct kvt_store *store, const struct kvt_load *load,
                      const struct kvt_load_item *item)
{
    const struct kvt_store_direct *d = &store->directs[item->direct];
    struct kvt_msg request = {.op = KVT_OP_ACQUIRE, .cookie = load->cookie};
    struct kvt_msg_grant *grant =
        (struct kvt_msg_grant *)kvt_reply_begin(store, &request, sizeof(*grant));

    grant->msg.op = KVT_OP_GRANT;
    grant->index = item->index;
    grant->tier = item->tier;
    grant->slot = item->direct;
    grant->generation = d->generation;
    grant->record_bytes = d->record_bytes;
    grant->arena_offset = d->where.page * (uint64_t)KVT_PAGE_BYTES;
    grant->map = d->map;
    grant->direct = 1;
    grant->root = d->root;
    grant->segment = d->where.segment;
    store->counts.load_granted_direct++;
    kvt_reply_send(store, load->client, &grant->msg);
}

/* The client found other bytes there: if the index still points at them, it no longer does. A copy
 * that was read into DRAM meanwhile is verified by whoever loads it. */
static void drop_bad(struct kvt_store *store, const struct kvt_store_direct *d)
{
    uint32_t entry = kvt_entry_find(store, &d->key);
    const struct kvt_index_entry *e;

    store->counts.checksum_fail++;
    if (entry == KVT_INDEX_NONE)
        return;
    e = kvt_index_at(&store->index, entry);
    if (e->slot != KVT_SLOT_NONE || !e->on_disk || e->root != d->root ||
        e->segment != d->where.segment || e->page != d->where.page)
        return;
    kvt_suspect_entry(store, entry);
    kvt_entry_clear_disk(store, entry);
    kvt_entry_settle(store, entry);
}

bool kvt_direct_release(struct kvt_store *store, uint32_t client, const struct kvt_slot_ref *ref)
{
    const struct kvt_store_direct *d = &store->directs[ref->slot % KVT_STORE_DIRECTS];

    if (ref->slot >= KVT_STORE_DIRECTS || !d->used || d->generation != ref->generation ||
        d->client != client)
        return false;
    if (ref->status == KVT_E_CORRUPT)
        drop_bad(store, d);
    kvt_direct_give(store, ref->slot);
    return true;
}

void kvt_directs_client_gone(struct kvt_store *store, uint32_t client)
{
    for (uint32_t i = 0; i < KVT_STORE_DIRECTS && store->direct_used; i++)
        if (store->directs[i].used && store->directs[i].client == client)
            kvt_direct_give(store, i);
}
