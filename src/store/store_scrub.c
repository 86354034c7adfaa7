/* Scrub: reads cold records back at a set rate while nobody asks for anything, and drops those
 * whose bytes no longer match, so that a rotten record becomes a miss before a load has waited for
 * it, and for good: the journal says that what has its key, up to its number, is gone.
 *
 *   WAITING --idle, due--> READING --all reads have ended--> verified | dropped --> WAITING
 *
 * Invariants
 *  1. One batch at a time (records in index order, which is mostly that of the disk, so that the
 * log reads them in one request), and none while a message came lately or anything is being loaded,
 *     written, flushed or purged: a load waits for one batch at most.
 *  2. Over any time, no more bytes than the rate gives, one batch aside.
 *  3. What has changed its place, its level or its life while the read was under way is left alone.
 *  4. Records that are in DRAM as well are skipped: they are not cold. A pass is one walk over the
 *     index, and begins once a day at most.
 *  5. What is damaged leaves the index; store_suspect.c takes a second look and sees to it that no
 *     restart brings it back. What cannot be read leaves the index only.
 * A record carries all that is needed: its key must have the entry's fingerprint, its length and
 * map must be the entry's, its checksum must fit. Threads: the store's owner. Allocates when a
 * namespace opens. It repairs nothing.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"

#define IDLE_NS (2 * KVT_STORE_IDLE_NS)
#define PASS_NS 86400000000000ll
#define SCAN_STEPS 4096u         /* entries looked at in one run */
#define BATCH_BYTES (512u << 10) /* or one record, where that is longer */

int kvt_scrub_grow(struct kvt_store *store, uint32_t record_bytes)
{
    struct kvt_store_scrub *scrub = &store->scrub;
    uint8_t *grown;

    record_bytes = KVT_MAX(record_bytes, BATCH_BYTES);
    if (!store->disk_count || scrub->count || store->suspects.reading ||
        scrub->buffer_bytes >= record_bytes)
        return 0; /* longer records are skipped: no harm done */
    grown = aligned_alloc(KVT_PAGE_BYTES, record_bytes);
    if (!grown)
        return -ENOMEM;
    free(scrub->buffer);
    scrub->buffer = grown;
    scrub->buffer_bytes = record_bytes;
    return 0;
}

void kvt_scrub_destroy(struct kvt_store *store)
{
    free(store->scrub.buffer);
}

static bool same_place(const struct kvt_store *store, const struct kvt_store_scrub_item *item)
{
    const struct kvt_index_entry *e = kvt_index_at(&store->index, item->entry);

    return e->used && e->on_disk && !e->older && e->root == item->root &&
           e->segment == item->read.where.segment && e->page == item->read.where.page &&
           e->fp.word[0] == item->fp.word[0] && e->fp.word[1] == item->fp.word[1];
}

/* 0 when the bytes are a whole record of the entry's key and shape. */
static int verify(const struct kvt_store *store, const struct kvt_store_scrub_item *item)
{
    const struct kvt_record_header *header = item->read.dst;
    const struct kvt_index_entry *e = kvt_index_at(&store->index, item->entry);
    uint32_t bytes = item->read.pages * KVT_PAGE_BYTES;
    struct kvt_fp fp;
    int rc = kvt_record_header_check(header);

    if (rc)
        return rc;
    fp = kvt_index_fingerprint(&store->index, &header->key);
    if (fp.word[0] != e->fp.word[0] || fp.word[1] != e->fp.word[1] || header->map != e->map ||
        header->record_bytes != bytes)
        return KVT_E_CORRUPT;
    return kvt_record_verify(header, bytes, &header->key, header->checksum);
}

static void scrub_read_done(struct kvt_l2_read *read)
{
    struct kvt_store *store = read->user;

    store->scrub.left--;
    store->again = 1;
}

static void judge(struct kvt_store *store, const struct kvt_store_scrub_item *item)
{
    int status = item->read.status;

    if (!same_place(store, item))
        return;
    store->counts.scrub_records++;
    store->counts.scrub_bytes += item->read.pages * (uint64_t)KVT_PAGE_BYTES;
    if (status)
        store->counts.scrub_read_fail++;
    else
        status = verify(store, item);
    if (!status)
        return;
    store->counts.scrub_bad++;
    store->activity++;
    if (!item->read.status)
        kvt_suspect_entry(store, item->entry);
    kvt_entry_give_up(store, item->entry);
    kvt_entry_settle(store, item->entry);
}

/* Nobody has asked for anything lately, and nothing is under way. */
static bool idle(const struct kvt_store *store, int64_t now)
{
    bool busy = store->closing || store->reads_going || store->writes_going ||
                store->write_queue.count || store->items_used ||
                now < store->last_message_ns + IDLE_NS || kvt_flushes_waiting(store);

    for (uint32_t i = 0; i < KVT_STORE_PURGES; i++)
        busy = busy || store->purges[i].used;
    return !busy;
}

static bool wanted(const struct kvt_store *store, uint32_t entry)
{
    const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    uint32_t bytes;

    if (!e->used || !e->on_disk || e->slot != KVT_INDEX_NONE || e->filling)
        return false;
    bytes = kvt_entry_bytes(store, entry);
    return bytes && bytes <= store->scrub.buffer_bytes;
}

/* A pass has come to its end. */
static void pass_over(struct kvt_store *store, int64_t now)
{
    store->scrub.cursor = 0;
    store->scrub.due_ns = KVT_MAX(now, store->scrub.pass_ns + PASS_NS);
    store->counts.scrub_passes++;
    store->activity++;
}

/* Queue the read of the entry at the cursor behind `used` bytes of the buffer. */
static void start(struct kvt_store *store, uint32_t used)
{
    struct kvt_store_scrub *scrub = &store->scrub;
    struct kvt_store_scrub_item *item = &scrub->items[scrub->count++];
    const struct kvt_index_entry *e = kvt_index_at(&store->index, scrub->cursor);

    item->entry = scrub->cursor;
    item->fp = e->fp;
    item->root = e->root;
    item->read =
        (struct kvt_l2_read){.where = {.segment = e->segment, .page = e->page},
                             .pages = kvt_entry_bytes(store, scrub->cursor) / KVT_PAGE_BYTES,
                             .dst = scrub->buffer + used,
                             .done = scrub_read_done,
                             .user = store};
    scrub->left++;
    kvt_l2_read(store->disks[e->root].l2, &item->read);
}

/* Start the next batch, or only move the cursor on where nothing is wanted. */
static void start_batch(struct kvt_store *store, int64_t now)
{
    struct kvt_store_scrub *scrub = &store->scrub;
    uint64_t rate = store->params.scrub_bytes_per_s;
    uint32_t used = 0;

    scrub->count = 0;
    for (uint32_t i = 0; i < SCAN_STEPS && scrub->cursor < store->index.touched; i++) {
        if (wanted(store, scrub->cursor)) {
            uint32_t bytes = kvt_entry_bytes(store, scrub->cursor);

            if (scrub->count == KVT_STORE_SCRUB_ITEMS ||
                (scrub->count && used + bytes > BATCH_BYTES))
                break;
            start(store, used);
            used += bytes;
        }
        scrub->cursor++;
    }
    /* seconds and the rest apart: bytes * 10^9 could overflow */
    scrub->due_ns = now + (int64_t)(used / rate) * 1000000000 +
                    (int64_t)(used % rate * UINT64_C(1000000000) / rate);
}

int64_t kvt_scrub_run(struct kvt_store *store)
{
    struct kvt_store_scrub *scrub = &store->scrub;
    int64_t now = kvt_store_now(store);

    if (scrub->count && !scrub->left) {
        for (uint32_t i = 0; i < scrub->count; i++)
            judge(store, &scrub->items[i]);
        scrub->count = 0;
    }
    if (!scrub->buffer_bytes || scrub->count || store->closing || kvt_suspects_run(store))
        return INT64_MAX; /* the reads' end runs the store */
    if (!store->params.scrub_bytes_per_s)
        return INT64_MAX;
    if (!store->disk_blocks)
        return INT64_MAX; /* the write that changes it runs the store */
    if (now < scrub->due_ns)
        return scrub->due_ns;
    if (!idle(store, now))
        return KVT_MAX(now, store->last_message_ns) + IDLE_NS;
    if (!scrub->cursor)
        scrub->pass_ns = now;
    if (scrub->cursor >= store->index.touched)
        pass_over(store, now);
    else
        start_batch(store, now);
    return scrub->count ? INT64_MAX : scrub->due_ns;
}
