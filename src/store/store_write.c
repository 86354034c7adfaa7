/* The way to disk: a bounded queue of committed blocks, batches of consecutive ones, and what
 * becomes of a block when its write has ended.
 *
 * Rules
 *  1. store_later.c decides when a block is queued: at COMMIT, or later by its write policy.
 *  2. The queue is bounded in bytes; a block that does not fit is not written now, counted, and
 *     stays in DRAM as long as it can. COMMIT never waits.
 *  3. A queued block cannot be evicted before its write has ended: the upper copy stays until the
 *     lower one is there.
 *  4. A batch takes the oldest of the queue: 16 MiB at most, and no more than the drive writes in
 *     BATCH_NS at the speed measured so far, so that two of them do not hold a read up for longer.
 *     A batch of less than 1 MiB waits GATHER for company, unless somebody flushes. At most two
 *     batches of a root are in flight (the log's rule). None is more than a quarter of a segment:
 *     the log would have to take segments before what is to be kept of them has been moved.
 *  5. A record older than a root that came later is numbered anew before it is written.
 *  6. A record that lands after its block has gone (purged, replaced) is not published; a purged
 *     one is erased, as soon as the journal explains why.
 * Threads: the store's owner. Allocates at open only.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"

#define SEGMENT_BATCHES 4u /* at least, in each segment */

int kvt_writes_add_root(struct kvt_store *store, struct kvt_store_disk *disk)
{
    disk->batch_bytes = KVT_STORE_BATCH_BYTES_FIRST;
    if (disk->writes)
        return 0; /* of a root that was refused */
    disk->writes = calloc(KVT_STORE_ROOT_WRITES, sizeof(*disk->writes));
    if (!disk->writes)
        return -ENOMEM;
    for (uint32_t i = 0; i < KVT_STORE_ROOT_WRITES; i++) {
        disk->writes[i].store = store;
        disk->writes[i].next = store->write_free;
        store->write_free = &disk->writes[i];
    }
    return 0;
}

bool kvt_writes_room(const struct kvt_store *store, uint32_t slot)
{
    return store->write_queue.bytes + kvt_slot_at(&store->slots, slot)->record_bytes <=
               store->params.write_queue_bytes &&
           kvt_store_now(store) >= store->write_retry_ns;
}

bool kvt_writes_queue(struct kvt_store *store, uint32_t slot, bool beyond_bound)
{
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);

    if (!beyond_bound &&
        store->write_queue.bytes + s->record_bytes > store->params.write_queue_bytes) {
        kvt_write_move(store, slot, KVT_SLOT_WRITE_DROPPED);
        store->counts.disk_dropped_queue++;
        return false;
    }
    if (!store->write_queue.count)
        store->gather_since_ns = kvt_store_now(store);
    kvt_policy_park(&store->policy, slot);
    kvt_write_move(store, slot, KVT_SLOT_WRITE_QUEUED);
    s->ticket = store->ticket_next++;
    kvt_slot_list_push(&store->slots, &store->write_queue, slot, KVT_QUEUE_WRITE, false);
    return true;
}

void kvt_writes_unqueue(struct kvt_store *store, uint32_t slot)
{
    kvt_slot_list_remove(&store->slots, &store->write_queue, slot);
    kvt_write_move(store, slot, KVT_SLOT_WRITE_CLEAN);
}

static void count_failure(struct kvt_store *store, int status)
{
    if (status == KVT_E_NO_SPACE || status == -ENOSPC) {
        store->counts.disk_dropped_space++; /* the log counts why: "disk.enospc" */
    } else {
        store->counts.write_fail++;
        store->counts.disk_dropped_error++;
    }
    store->write_retry_ns = kvt_store_now(store) + KVT_STORE_WRITE_RETRY_NS;
}

/* A batch has ended: what it says of the drive's speed. Behind another one it had to wait for that.
 * A small one measures how long any request takes, not how many bytes go through in a second,
 * unless that is long. */
static void batch_ended(struct kvt_store *store, struct kvt_store_disk *disk,
                        const struct kvt_store_batch *batch)
{
    int64_t now = kvt_store_now(store);
    int64_t took = KVT_MAX(now - KVT_MAX(batch->begun_ns, disk->batch_end_ns), 1);
    uint64_t rate, bytes;

    disk->batch_end_ns = now;
    if (!batch->failed) {
        kvt_hist_time(&store->hists[KVT_HIST_WRITE_TIME], batch->begun_ns, now);
        kvt_hist_add(&store->hists[KVT_HIST_WRITE_SIZE], KVT_HIST_SIZE, batch->bytes);
    }
    if (batch->failed || (batch->bytes < KVT_STORE_BATCH_BYTES_MIN && took < KVT_STORE_BATCH_NS))
        return;
    rate = (uint64_t)((double)batch->bytes * 1e9 / (double)took);
    disk->write_rate = disk->write_rate ? disk->write_rate / 4 * 3 + rate / 4 : rate;
    bytes = (uint64_t)((double)disk->write_rate * (double)KVT_STORE_BATCH_NS / 1e9);
    disk->batch_bytes = (uint32_t)KVT_MIN(KVT_MAX(bytes, (uint64_t)KVT_STORE_BATCH_BYTES_MIN),
                                          (uint64_t)KVT_STORE_BATCH_BYTES_MAX);
}

static void batch_note(struct kvt_store *store, const struct kvt_store_write *w, int status)
{
    struct kvt_store_disk *disk = &store->disks[w->root];
    struct kvt_store_batch *batch = &disk->batches[w->batch];

    batch->failed |= status;
    if (--batch->left == 0)
        batch_ended(store, disk, batch);
}

/* Called by the log while it handles completions. */
static void write_record_done(struct kvt_l2_write *write)
{
    struct kvt_store_write *w = write->user;
    struct kvt_store *store = w->store;
    uint32_t slot = w->slot;
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
    int status = write->status;

    store->activity++;
    store->again = 1;
    store->writes_going--;
    store->going_bytes -= s->record_bytes;
    w->busy = 0;
    batch_note(store, w, status);
    if (!status && s->state == KVT_SLOT_VALID &&
        !kvt_entry_set_disk(store, s->entry, w->root, write->where))
        status = KVT_E_CORRUPT; /* a place that the index cannot name: as if it had failed */
    if (status)
        count_failure(store, status);
    else
        store->counts.disk_written_blocks++;
    kvt_flushes_note(store, w->ticket, status);
    /* one that was purged or replaced meanwhile is nobody's: it is not unsaved either */
    kvt_write_move(store, slot,
                   status && s->state == KVT_SLOT_VALID ? KVT_SLOT_WRITE_FAILED
                                                        : KVT_SLOT_WRITE_CLEAN);
    if (!status && s->purged) {
        w->next = store->write_erase;
        store->write_erase = w;
    } else {
        w->next = store->write_free;
        store->write_free = w;
    }
    kvt_slot_unpin(&store->slots, slot);
    kvt_slot_settle(store, slot);
    s->at_end = 0;
}

/* A record that was begun before a root came has a number from before that root's: recovery would
 * take an older record of its key for the newer one, or an earlier purge for a later one. It gets a
 * number of now; nobody reads the slot meanwhile (false: somebody does, later then). Nor while its
 * namespace is purged: the purge has its bound, and the block, not to be above it, goes soon. A
 * record that is not what was committed is left as it is: no load will take it. */
static bool number_anew(struct kvt_store *store, uint32_t slot)
{
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
    struct kvt_record_header *header = (struct kvt_record_header *)kvt_slot_bytes(store, slot);

    if (s->sequence >= store->sequence_floor)
        return true;
    if (s->pins ||
        kvt_namespace_at(&store->spaces, kvt_index_at(&store->index, s->entry)->ns)->purging)
        return false;
    if (kvt_record_verify(header, s->record_bytes, &s->key, s->checksum) == 0) {
        header->sequence = store->sequence_next;
        header->checksum = kvt_record_checksum(header, s->record_bytes);
        s->checksum = header->checksum;
    }
    s->sequence = store->sequence_next++;
    return true;
}

/* What the log needs to know of a record. The parent comes from the header in the slot; it only
 * ever orders eviction, so a client that changes it after COMMIT harms its own chain. */
static void write_fill(struct kvt_store *store, struct kvt_store_write *w, uint32_t slot)
{
    const struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
    struct kvt_record_header header;
    struct kvt_entry *entry = &w->write.entry;

    memcpy(&header, kvt_slot_bytes(store, slot), sizeof(header));
    memset(&w->write, 0, sizeof(w->write));
    w->write.record = kvt_slot_bytes(store, slot);
    w->write.done = write_record_done;
    w->write.user = w;
    entry->key = s->key;
    if (kvt_parent_ok(header.parent, header.parent_len)) {
        memcpy(entry->parent, header.parent, sizeof(entry->parent));
        entry->parent_len = header.parent_len;
    }
    entry->sequence = s->sequence;
    entry->checksum = s->checksum;
    entry->pages = s->record_bytes / KVT_PAGE_BYTES;
    entry->first_pos = header.first_pos;
    entry->map = s->map;
    w->slot = slot;
    w->ticket = s->ticket;
    w->busy = 1;
}

/* Append the oldest of the queue to a root as one batch. false: the root does not take it now. */
static bool batch_out(struct kvt_store *store, uint32_t root)
{
    struct kvt_store_disk *disk = &store->disks[root];
    uint8_t number = disk->batches[0].left != 0;
    struct kvt_store_batch *batch = &disk->batches[number];
    struct kvt_l2_write *list = NULL;
    struct kvt_l2_write **link = &list;
    uint64_t most = KVT_MIN(disk->batch_bytes, kvt_l2_segment_bytes(disk->l2) / SEGMENT_BATCHES);
    uint64_t bytes = 0;
    uint32_t count = 0;

    if (batch->left)
        return false; /* cannot be: the log takes no third one */
    for (uint32_t slot = store->write_queue.tail;
         slot != KVT_SLOT_NONE && store->write_free && count < KVT_STORE_BATCH_RECORDS;
         slot = kvt_slot_at(&store->slots, slot)->queue_prev) {
        struct kvt_store_write *w = store->write_free;

        if (!kvt_root_holds(store, root, kvt_slot_at(&store->slots, slot)->record_bytes) ||
            !number_anew(store, slot))
            continue;
        if (count && bytes + kvt_slot_at(&store->slots, slot)->record_bytes > most)
            break;
        bytes += kvt_slot_at(&store->slots, slot)->record_bytes;
        store->write_free = w->next;
        write_fill(store, w, slot);
        w->root = root;
        w->batch = number;
        *link = &w->write;
        link = &w->write.next;
        count++;
    }
    if (!count)
        return false;
    *batch =
        (struct kvt_store_batch){.begun_ns = kvt_store_now(store), .bytes = bytes, .left = count};
    store->writes_going += count;
    /* Taken off the queue and pinned first: the log may report at once. */
    for (struct kvt_l2_write *write = list; write; write = write->next) {
        uint32_t slot = ((struct kvt_store_write *)write->user)->slot;

        kvt_writes_unqueue(store, slot);
        kvt_write_move(store, slot, KVT_SLOT_WRITE_GOING);
        kvt_slot_pin(&store->slots, slot);
        store->going_bytes += kvt_slot_at(&store->slots, slot)->record_bytes;
    }
    if (kvt_l2_append(store->disks[root].l2, list) == 0)
        return true;
    /* Not taken although it said that it could: as if the write had failed. */
    while (list) {
        struct kvt_l2_write *write = list;

        list = write->next;
        write->status = -EAGAIN;
        write_record_done(write);
    }
    return false;
}

static void erase_landed(struct kvt_store *store)
{
    while (store->write_erase) {
        struct kvt_store_write *w = store->write_erase;

        store->write_erase = w->next;
        kvt_l2_erase(store->disks[w->root].l2, w->write.where, w->write.entry.pages);
        w->next = store->write_free;
        store->write_free = w;
    }
}

static bool wanting(const struct kvt_store *store, uint32_t root)
{
    return kvt_l2_paused(store->disks[root].l2) || !kvt_admission_root_may(&store->admission, root);
}

/* A root whose writes fail, or whose day's bytes are used up, is left out while another one works.
 */
static bool passed_over(const struct kvt_store *store, uint32_t root)
{
    if (!wanting(store, root))
        return false;
    /* what only this one can hold would wait for as long as it is left out */
    for (uint32_t i = 0; i < store->disk_count; i++)
        if (!wanting(store, i) && (kvt_root_holds(store, i, store->record_bytes_max) ||
                                   !kvt_root_holds(store, root, store->record_bytes_max)))
            return true;
    return false;
}

int64_t kvt_writes_run(struct kvt_store *store)
{
    int64_t now = kvt_store_now(store);
    uint32_t refused = 0;

    erase_landed(store);
    while (store->write_queue.count && refused < store->disk_count) {
        uint32_t root = store->write_root % store->disk_count;
        bool hurry = store->closing || kvt_flushes_waiting(store);

        if (!hurry && store->write_queue.bytes < KVT_STORE_BATCH_BYTES_MIN &&
            now < store->gather_since_ns + KVT_STORE_GATHER_NS)
            return store->gather_since_ns + KVT_STORE_GATHER_NS;
        if (passed_over(store, root) || !kvt_l2_can_append(store->disks[root].l2) ||
            !batch_out(store, root))
            refused++;
        else
            refused = 0;
        store->gather_since_ns = now;
        store->write_root++; /* striped by batch */
    }
    return INT64_MAX;
}
