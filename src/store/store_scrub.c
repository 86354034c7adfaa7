/* Scrub: reads cold records back at a set rate while nobody asks for anything, and drops those
 * whose bytes no longer match, so that a rotten record becomes a miss before a load has waited for
 * it.
 *
 *   WAITING --idle, due--> READING --the read has ended--> verified | dropped --> WAITING
 *
 * Invariants
 *  1. One record at a time, and none while a message came lately or anything is being loaded,
 *     written, flushed or purged: a load waits for one read of one record at most.
 *  2. Over any time, no more bytes than the rate gives, one record aside.
 *  3. What has changed its place, its level or its life while the read was under way is left alone.
 *  4. Records that are in DRAM as well are skipped: they are not cold. A pass is one walk over the
 *     index, and begins once a day at most.
 * A record carries all that is needed: its key must have the entry's fingerprint, its length and
 * map must be the entry's, its checksum must fit. Threads: the store's owner. Allocates when a
 * namespace opens. It repairs nothing.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"

#define IDLE_NS (2 * KVT_STORE_IDLE_NS)
#define PASS_NS 86400000000000ll
#define SCAN_STEPS 4096u /* entries looked at in one run */

int kvt_scrub_grow(struct kvt_store *store, uint32_t record_bytes)
{
    struct kvt_store_scrub *scrub = &store->scrub;
    uint8_t *grown;

    if (!store->params.scrub_bytes_per_s || !store->disk_count || scrub->busy ||
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

static bool same_place(const struct kvt_store *store, const struct kvt_store_scrub *scrub)
{
    const struct kvt_index_entry *e = kvt_index_at(&store->index, scrub->entry);

    return e->used && e->on_disk && e->root == scrub->root &&
           e->segment == scrub->read.where.segment && e->page == scrub->read.where.page &&
           e->fp.word[0] == scrub->fp.word[0] && e->fp.word[1] == scrub->fp.word[1];
}

/* 0 when the bytes are a whole record of the entry's key and shape. */
static int verify(const struct kvt_store *store, const struct kvt_store_scrub *scrub)
{
    const struct kvt_record_header *header = (const struct kvt_record_header *)scrub->buffer;
    const struct kvt_index_entry *e = kvt_index_at(&store->index, scrub->entry);
    uint32_t bytes = scrub->read.pages * KVT_PAGE_BYTES;
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

    store->scrub.ended = true;
    store->again = 1;
}

static void finish(struct kvt_store *store)
{
    struct kvt_store_scrub *scrub = &store->scrub;
    int status = scrub->read.status;

    scrub->busy = scrub->ended = false;
    if (!same_place(store, scrub))
        return;
    store->counts.scrub_records++;
    store->counts.scrub_bytes += scrub->read.pages * (uint64_t)KVT_PAGE_BYTES;
    if (status)
        store->counts.scrub_read_fail++;
    else
        status = verify(store, scrub);
    if (!status)
        return;
    store->counts.scrub_bad++;
    store->activity++;
    kvt_entry_clear_disk(store, scrub->entry);
    kvt_entry_settle(store, scrub->entry);
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

/* Move the cursor to the next entry to read. False: there was none so far. */
static bool find_next(struct kvt_store *store, int64_t now)
{
    struct kvt_store_scrub *scrub = &store->scrub;

    for (uint32_t i = 0; i < SCAN_STEPS; i++, scrub->cursor++) {
        if (scrub->cursor >= store->index.touched) {
            scrub->cursor = 0;
            scrub->due_ns = KVT_MAX(now, scrub->pass_ns + PASS_NS);
            store->counts.scrub_passes++;
            store->activity++;
            return false;
        }
        if (wanted(store, scrub->cursor))
            return true;
    }
    return false;
}

static void start(struct kvt_store *store, int64_t now)
{
    struct kvt_store_scrub *scrub = &store->scrub;
    const struct kvt_index_entry *e = kvt_index_at(&store->index, scrub->cursor);
    uint32_t bytes = kvt_entry_bytes(store, scrub->cursor);

    scrub->entry = scrub->cursor++;
    scrub->fp = e->fp;
    scrub->root = e->root;
    scrub->busy = true;
    scrub->read = (struct kvt_l2_read){.where = {.segment = e->segment, .page = e->page},
                                       .pages = bytes / KVT_PAGE_BYTES,
                                       .dst = scrub->buffer,
                                       .done = scrub_read_done,
                                       .user = store};
    kvt_l2_read(store->disks[e->root].l2, &scrub->read);
    /* seconds and the rest apart: bytes * 10^9 could overflow */
    scrub->due_ns = now + (int64_t)(bytes / store->params.scrub_bytes_per_s) * 1000000000 +
                    (int64_t)(bytes % store->params.scrub_bytes_per_s * UINT64_C(1000000000) /
                              store->params.scrub_bytes_per_s);
}

int64_t kvt_scrub_run(struct kvt_store *store)
{
    struct kvt_store_scrub *scrub = &store->scrub;
    int64_t now = kvt_store_now(store);

    if (scrub->ended)
        finish(store);
    if (!scrub->buffer_bytes || scrub->busy || store->closing)
        return INT64_MAX;
    if (!store->disk_blocks)
        return INT64_MAX; /* the write that changes it runs the store */
    if (now < scrub->due_ns)
        return scrub->due_ns;
    if (!idle(store, now))
        return KVT_MAX(now, store->last_message_ns) + IDLE_NS;
    if (!scrub->cursor)
        scrub->pass_ns = now;
    if (find_next(store, now)) {
        start(store, now);
        return INT64_MAX; /* the read's end runs the store */
    }
    return KVT_MAX(now, scrub->due_ns);
}
