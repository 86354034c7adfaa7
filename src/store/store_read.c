/* Reads from disk into slots. A read that ends is only recorded; kvt_reads_run() then checks the
 * record's header and tells the loads that wait.
 *
 * What is checked here: magic, version, full key, map, length and a sequence that this store can
 * have given. Not the payload: its checksum is granted with the slot and the client verifies it
 * while the bytes are on their way through its cache anyway (docs/decisions). A record that fails
 * leaves the index: DRAM and disk (store_suspect.c goes on with it).
 * Threads: the store's owner. Allocates nothing.
 */
#include <string.h>

#include "kvtier/error.h"
#include "store/store_impl.h"

static void read_record_done(struct kvt_l2_read *read)
{
    struct kvt_store_read *r = read->user;

    r->next = r->store->read_done;
    r->store->read_done = r;
    r->store->again = 1;
}

void kvt_reads_init(struct kvt_store *store)
{
    for (uint32_t i = 0; i < KVT_STORE_READS; i++) {
        store->reads[i].store = store;
        store->reads[i].next = store->read_free;
        store->read_free = &store->reads[i];
    }
}

bool kvt_reads_start(struct kvt_store *store, uint32_t entry, uint32_t slot, bool prefetch)
{
    const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    struct kvt_store_read *r = store->read_free;

    if (!r)
        return false;
    store->read_free = r->next;
    store->reads_going++;
    store->prefetch_going += prefetch;
    r->slot = slot;
    r->start_ns = kvt_store_now(store);
    r->root = e->root;
    r->prefetch = prefetch;
    memset(&r->read, 0, sizeof(r->read));
    r->read.where = (struct kvt_l2_where){.segment = e->segment, .page = e->page};
    r->read.pages = kvt_slot_at(&store->slots, slot)->record_bytes / KVT_PAGE_BYTES;
    r->read.dst = kvt_slot_bytes(store, slot);
    r->read.done = read_record_done;
    r->read.user = r;
    kvt_slot_pin(&store->slots, slot);
    kvt_l2_read(store->disks[e->root].l2, &r->read);
    return true;
}

int kvt_reads_accept(struct kvt_store *store, uint32_t slot)
{
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
    struct kvt_record_header header;
    int err;

    memcpy(&header, kvt_slot_bytes(store, slot), sizeof(header));
    err = kvt_record_header_check(&header);
    if (err)
        return err;
    if (memcmp(&header.key, &s->key, sizeof(s->key)) != 0 || header.map != s->map ||
        header.record_bytes != s->record_bytes || header.sequence >= store->sequence_next ||
        header.checksum == 0)
        return KVT_E_CORRUPT;
    s->checksum = header.checksum;
    s->sequence = header.sequence;
    return 0;
}

void kvt_reads_wake(struct kvt_store *store, uint32_t slot, bool good)
{
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
    uint32_t item = s->waiters;
    uint32_t now_us = item != KVT_NO_NUMBER ? kvt_grant_clock(store) : 0;

    s->waiters = KVT_NO_NUMBER;
    while (item != KVT_NO_NUMBER) {
        struct kvt_load_item *i = &store->items[item];
        uint32_t next = i->waiter_next;

        i->waiter_next = KVT_NO_NUMBER;
        i->state = good ? KVT_ITEM_READY : KVT_ITEM_MISS;
        i->ended_us = now_us;
        if (!good) {
            i->slot = KVT_SLOT_NONE;
            kvt_slot_unpin(&store->slots, slot);
        }
        item = next;
    }
}

static void finish(struct kvt_store *store, uint32_t slot, uint32_t root, int status)
{
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
    uint32_t entry = s->entry;
    bool damaged = false;

    if (!status && s->state == KVT_SLOT_READING) {
        status = kvt_reads_accept(store, slot);
        damaged = status != 0;
        store->counts.checksum_fail += damaged;
    } else if (status) {
        store->counts.read_fail++;
        store->disks[root].read_fails++;
    }
    if (s->state == KVT_SLOT_DOOMED) {
        kvt_reads_wake(store, slot, false); /* purged or replaced meanwhile */
    } else if (status) {
        kvt_reads_wake(store, slot, false);
        if (damaged)
            kvt_suspect_entry(store, entry);
        kvt_entry_drop_slot(store, entry, false);
        kvt_entry_clear_disk(store, entry);
        kvt_entry_settle(store, entry);
    } else {
        kvt_slot_move(&store->slots, slot, KVT_SLOT_VALID);
        store->counts.disk_read_blocks++;
        store->counts.disk_read_bytes += s->record_bytes;
        if (kvt_slot_region(&store->slots, slot) == KVT_REGION_CACHE)
            kvt_policy_enter(&store->policy, slot);
        if (!kvt_index_at(&store->index, entry)->on_disk) /* its segment went meanwhile */
            kvt_write_again(store, slot);
        kvt_reads_wake(store, slot, true);
    }
    kvt_slot_unpin(&store->slots, slot);
    kvt_slot_settle(store, slot);
}

void kvt_reads_run(struct kvt_store *store)
{
    while (store->read_done) {
        struct kvt_store_read *r = store->read_done;
        uint32_t slot = r->slot;
        uint32_t root = r->root;
        int status = r->read.status;

        store->read_done = r->next;
        store->reads_going--;
        store->prefetch_going -= r->prefetch;
        r->next = store->read_free;
        store->read_free = r;
        store->activity++;
        if (!status) {
            kvt_hist_time(&store->hists[KVT_HIST_READ_TIME], r->start_ns, kvt_store_now(store));
            kvt_hist_add(&store->hists[KVT_HIST_READ_SIZE], KVT_HIST_SIZE,
                         (uint64_t)r->read.pages * KVT_PAGE_BYTES);
        }
        finish(store, slot, root, status);
    }
}
