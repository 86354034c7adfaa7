/* Re-insertion: before a segment is recycled, the records in it that are worth it (store_recycle.c)
 * are appended again, so that what is in use outlives the log's turn-over.
 *
 *   IDLE    the segment that goes next is chosen -> its entries that are kept, by place
 *   READING records come into the buffer, each is verified whole
 *   WRITING they are appended like new ones; each that is on disk changes its entry's place
 *           -> the next ones, until seven eighths of a segment have been moved -> the log may have
 *           the segment
 *
 * Rules
 *  1. At most seven eighths of each segment, parents first (places rise along a chain).
 *     What was moved counts as not asked for yet.
 *  2. A moved record keeps its bytes and with them its sequence: where a crash leaves both copies,
 *     recovery takes the one in the younger segment, and if that is torn, the old one. The log
 *     makes moved records durable before the old segment's header is overwritten (l2.h).
 *  3. A record that does not verify, or whose block has gone or been replaced meanwhile, is not
 *     moved; one that was purged meanwhile is erased where it landed.
 *  4. The log may take the segment before all is moved, when writes wait for it: then the rest goes
 *     with it. Pinned segments are not asked about.
 * Threads: the store's owner. Allocates at open and when a namespace opens.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"
#include "store/store_recycle.h"

#define ITEMS 64u               /* records moved at a time */
#define BUFFER_BYTES (1u << 20) /* or one record, if that is longer */
#define KEEP_NEW 8u             /* an eighth of each segment is for what is new, at least */
#define SEGMENTS_PER_RUN 4u     /* of which nothing is kept */

enum drain_state { DRAIN_IDLE, DRAIN_READING, DRAIN_READ, DRAIN_WRITING };

struct drain_item {
    struct kvt_l2_read read;
    struct kvt_l2_write write;
    struct kvt_store_disk *disk;
    struct kvt_fp fp;
    uint32_t entry;
    uint32_t page;  /* where it is */
    uint8_t on;     /* part of the present step */
    uint8_t purged; /* meanwhile */
    uint8_t erase;  /* it landed nevertheless */
};

struct kvt_store_drain {
    enum drain_state state;
    uint32_t segment;
    uint32_t pages; /* of a segment */
    uint32_t next_page;
    uint32_t budget_pages;
    uint32_t count, going;
    bool lost; /* the log has taken the segment */
    uint8_t *buffer;
    uint64_t buffer_bytes;
    uint32_t *entries; /* by page: what is kept; UINT32_MAX: nothing */
    struct drain_item items[ITEMS];
};

int kvt_drain_init(struct kvt_store_disk *disk)
{
    struct kvt_store_drain *drain = calloc(1, sizeof(*drain));

    disk->drain = drain;
    if (!drain)
        return -ENOMEM;
    drain->pages = kvt_l2_segment_bytes(disk->l2) / KVT_PAGE_BYTES;
    drain->entries = malloc(drain->pages * sizeof(*drain->entries));
    drain->buffer_bytes = BUFFER_BYTES;
    drain->buffer = aligned_alloc(KVT_PAGE_BYTES, BUFFER_BYTES);
    for (uint32_t i = 0; i < ITEMS; i++)
        drain->items[i].disk = disk;
    return drain->entries && drain->buffer ? 0 : -ENOMEM;
}

void kvt_drain_destroy(struct kvt_store_disk *disk)
{
    if (!disk->drain)
        return;
    free(disk->drain->buffer);
    free(disk->drain->entries);
    free(disk->drain);
    disk->drain = NULL;
}

int kvt_drains_grow(struct kvt_store *store, uint32_t record_bytes)
{
    for (uint32_t i = 0; i < store->disk_count; i++) {
        struct kvt_store_drain *drain = store->disks[i].drain;
        uint8_t *grown;

        if (!drain || drain->buffer_bytes >= record_bytes || drain->state != DRAIN_IDLE)
            continue; /* longer records are not moved: no harm done */
        grown = aligned_alloc(KVT_PAGE_BYTES, record_bytes);
        if (!grown)
            return -ENOMEM;
        free(drain->buffer);
        drain->buffer = grown;
        drain->buffer_bytes = record_bytes;
    }
    return 0;
}

/* The entry is still what was found in the segment. */
static bool still_there(const struct kvt_store_disk *disk, uint32_t entry, uint32_t page)
{
    const struct kvt_index_entry *e = kvt_index_at(&disk->store->index, entry);

    return e->used && e->on_disk && !e->older && e->root == disk->number &&
           e->segment == disk->drain->segment && e->page == page;
}

static bool reachable(const struct kvt_store *store, const struct kvt_index_entry *e)
{
    const struct kvt_index_entry *parent;

    if (e->parent == KVT_INDEX_NONE)
        return true;
    parent = kvt_index_at(&store->index, e->parent);
    return kvt_index_present(parent) || parent->filling;
}

/* What is kept of the segment that goes next. Returns whether there is anything. */
static bool begin(struct kvt_store_disk *disk, const struct kvt_recycle *recycle)
{
    struct kvt_store_drain *drain = disk->drain;
    bool any = false;

    kvt_recycle_begin(disk, recycle);
    drain->segment = recycle->segment;
    drain->next_page = 1;
    drain->budget_pages = drain->pages - drain->pages / KEEP_NEW;
    drain->lost = false;
    memset(drain->entries, 0xff, drain->pages * sizeof(*drain->entries));
    for (uint32_t i = disk->heads[recycle->segment]; i != KVT_INDEX_NONE;
         i = kvt_index_at(&disk->store->index, i)->next) {
        const struct kvt_index_entry *e = kvt_index_at(&disk->store->index, i);

        if (e->page >= drain->pages || !kvt_recycle_keeps(disk, recycle, i))
            continue;
        drain->entries[e->page] = i;
        any = true;
    }
    return any;
}

static void read_done(struct kvt_l2_read *read)
{
    struct drain_item *item = read->user;

    item->disk->drain->going--;
    item->disk->store->again = 1;
}

/* Read the next records into the buffer. false: there are none. */
static bool read_next(struct kvt_store_disk *disk)
{
    struct kvt_store_drain *drain = disk->drain;
    uint64_t used = 0;

    drain->count = 0;
    for (; drain->next_page < drain->pages && drain->count < ITEMS; drain->next_page++) {
        uint32_t entry = drain->entries[drain->next_page], bytes;
        struct drain_item *item = &drain->items[drain->count];

        if (entry == UINT32_MAX || !still_there(disk, entry, drain->next_page) ||
            !reachable(disk->store, kvt_index_at(&disk->store->index, entry)))
            continue;
        bytes = kvt_entry_bytes(disk->store, entry);
        if (bytes / KVT_PAGE_BYTES > drain->budget_pages || bytes > drain->buffer_bytes)
            continue;
        if (used + bytes > drain->buffer_bytes)
            break;
        *item = (struct drain_item){.disk = disk,
                                    .entry = entry,
                                    .page = drain->next_page,
                                    .on = 1,
                                    .fp = kvt_index_at(&disk->store->index, entry)->fp};
        item->read.where = (struct kvt_l2_where){drain->segment, drain->next_page};
        item->read.pages = bytes / KVT_PAGE_BYTES;
        item->read.dst = drain->buffer + used;
        item->read.done = read_done;
        item->read.user = item;
        used += bytes;
        drain->budget_pages -= bytes / KVT_PAGE_BYTES;
        drain->count++;
    }
    drain->going = drain->count;
    for (uint32_t i = 0; i < drain->count; i++)
        kvt_l2_read(disk->l2, &drain->items[i].read);
    return drain->count > 0;
}

/* The entry moves to the record's new place. Called by the log. */
static void write_done(struct kvt_l2_write *write)
{
    struct drain_item *item = write->user;
    struct kvt_store_disk *disk = item->disk;
    struct kvt_store *store = disk->store;
    bool same = !disk->drain->lost && still_there(disk, item->entry, item->page);

    disk->drain->going--;
    store->again = 1;
    store->activity++;
    if (write->status) {
        store->counts.reinsert_failed++;
    } else if (item->purged) {
        item->erase = 1;
    } else if (same && memcmp(&kvt_index_at(&store->index, item->entry)->fp, &item->fp,
                              sizeof(item->fp)) == 0) {
        if (kvt_entry_set_disk(store, item->entry, disk->number, write->where))
            store->counts.reinserted++;
        else
            kvt_entry_settle(store, item->entry);
    }
}

/* The record in the buffer is what the index says, whole; fill what the log wants to know. */
static bool verify(const struct kvt_store *store, struct drain_item *item)
{
    const struct kvt_index_entry *e = kvt_index_at(&store->index, item->entry);
    const struct kvt_record_header *header = item->read.dst;
    struct kvt_entry *entry = &item->write.entry;
    uint32_t bytes = item->read.pages * KVT_PAGE_BYTES;
    struct kvt_fp fp;

    if (kvt_record_header_check(header) || header->record_bytes != bytes || header->map != e->map ||
        !header->checksum || header->sequence >= store->sequence_next)
        return false;
    fp = kvt_index_fingerprint(&store->index, &header->key);
    if (memcmp(&fp, &item->fp, sizeof(fp)) != 0 ||
        kvt_record_verify(item->read.dst, bytes, &header->key, header->checksum))
        return false;
    memset(&item->write, 0, sizeof(item->write));
    entry->key = header->key;
    if (kvt_parent_ok(header->parent, header->parent_len)) {
        memcpy(entry->parent, header->parent, sizeof(entry->parent));
        entry->parent_len = header->parent_len;
    }
    entry->sequence = header->sequence;
    entry->checksum = header->checksum;
    entry->pages = item->read.pages;
    entry->first_pos = header->first_pos;
    entry->map = header->map;
    item->write.record = item->read.dst;
    item->write.done = write_done;
    item->write.user = item;
    item->write.moved = true;
    return true;
}

/* Append what was read and is still wanted. false: the log takes nothing now. */
static bool write_out(struct kvt_store_disk *disk)
{
    struct kvt_store_drain *drain = disk->drain;
    struct kvt_l2_write *list = NULL, **link = &list;

    if (!kvt_l2_can_append(disk->l2))
        return false;
    drain->going = 0;
    for (uint32_t i = 0; i < drain->count; i++) {
        struct drain_item *item = &drain->items[i];

        item->on = 0;
        if (drain->lost || item->purged || !still_there(disk, item->entry, item->page))
            continue;
        if (item->read.status || !verify(disk->store, item)) {
            disk->store->counts.reinsert_failed++;
            continue; /* a reader finds out what is wrong with it */
        }
        item->on = 1;
        *link = &item->write;
        link = &item->write.next;
        drain->going++;
    }
    drain->state = DRAIN_WRITING;
    if (drain->going && kvt_l2_append(disk->l2, list)) {
        disk->store->counts.reinsert_failed += drain->going; /* cannot be: it said that it could */
        drain->going = 0;
    }
    return true;
}

/* One step has ended: what was purged meanwhile is erased where it landed, then the next. */
static void next_step(struct kvt_store_disk *disk)
{
    struct kvt_store_drain *drain = disk->drain;

    for (uint32_t i = 0; i < drain->count; i++)
        if (drain->items[i].erase)
            kvt_l2_erase(disk->l2, drain->items[i].write.where, drain->items[i].read.pages);
    drain->count = 0;
    drain->state = DRAIN_IDLE;
    if (drain->lost)
        return;
    if (!disk->store->closing && read_next(disk))
        drain->state = DRAIN_READING;
    else
        kvt_l2_drained(disk->l2, drain->segment);
}

static void drain_run(struct kvt_store_disk *disk)
{
    struct kvt_store_drain *drain = disk->drain;
    struct kvt_recycle recycle;

    if (drain->state == DRAIN_READING && !drain->going)
        drain->state = DRAIN_READ;
    if (drain->state == DRAIN_READ && !write_out(disk))
        return;
    if (drain->state == DRAIN_WRITING && !drain->going)
        next_step(disk);
    for (uint32_t i = 0;
         drain->state == DRAIN_IDLE && !disk->store->closing && i < SEGMENTS_PER_RUN; i++) {
        if (!kvt_l2_drain_wanted(disk->l2) || !kvt_recycle_choose(disk, &recycle))
            return;
        if (begin(disk, &recycle) && read_next(disk))
            drain->state = DRAIN_READING;
        else
            kvt_l2_drained(disk->l2, recycle.segment);
    }
}

void kvt_drains_run(struct kvt_store *store)
{
    for (uint32_t i = 0; i < store->disk_count; i++)
        drain_run(&store->disks[i]);
}

void kvt_drain_lost(struct kvt_store_disk *disk, uint32_t segment)
{
    if (disk->drain && disk->drain->segment == segment)
        disk->drain->lost = true;
}

void kvt_drain_purged(struct kvt_store_disk *disk, struct kvt_l2_where where)
{
    struct kvt_store_drain *drain = disk->drain;

    if (!drain || drain->state == DRAIN_IDLE || drain->segment != where.segment)
        return;
    for (uint32_t i = 0; i < drain->count; i++)
        if (drain->items[i].on && drain->items[i].page == where.page)
            drain->items[i].purged = 1;
}
