/* Reading one segment: see l2_scan.h. A footer counts when its trailer and checksum fit; a walk
 * steps from batch header to batch header as long as each fits generation, place, checksum and the
 * batch before it. Record bytes are not looked at, but for the tail of a segment that was not
 * sealed. Whatever cannot be read or ends the walk is read a second time: one bad read must not
 * cost what is good on the medium. */
#include "store/l2_scan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/l2_survey.h"

#define WINDOW_PAGES 256u /* 1 MiB: many small batches in one read ... */
#define STEP_PAGES 16u    /* ... but only the header when the batch before was larger than that */

int kvt_l2_scan_init(struct kvt_l2_scan *scan, struct kvt_io *io, uint32_t segment_pages)
{
    memset(scan, 0, sizeof *scan);
    scan->io = io;
    scan->segment_pages = segment_pages;
    scan->entries = aligned_alloc(
        KVT_PAGE_BYTES,
        kvt_round_up((uint64_t)segment_pages * sizeof(struct kvt_entry), KVT_PAGE_BYTES));
    scan->window = aligned_alloc(KVT_PAGE_BYTES, (size_t)WINDOW_PAGES * KVT_PAGE_BYTES);
    if (scan->entries && scan->window)
        return 0;
    kvt_l2_scan_free(scan);
    return -ENOMEM;
}

void kvt_l2_scan_free(struct kvt_l2_scan *scan)
{
    free(scan->entries);
    free(scan->window);
    free(scan->large);
    memset(scan, 0, sizeof *scan);
}

void kvt_l2_scan_begin(struct kvt_l2_scan *scan, int file, uint32_t segment, uint64_t generation)
{
    scan->file = file;
    scan->segment = segment;
    scan->generation = generation;
    scan->count = 0;
    scan->batches = 0;
    scan->next_page = 1;
    scan->previous = 0;
    scan->torn = scan->gap = false;
    scan->unread = 0;
    scan->window_pages = 0;
}

/* Bytes read, or -errno; less than asked for only when a second read says so too. */
static int64_t read_twice(struct kvt_l2_scan *scan, uint32_t page, void *buf, size_t bytes)
{
    int64_t got = -EIO;

    for (uint32_t look = 0; look < KVT_L2_LOOKS && got != (int64_t)bytes; look++)
        got = kvt_io_read_now(scan->io, scan->file, page * (uint64_t)KVT_PAGE_BYTES, buf, bytes);
    return got;
}

/* Read pages of the file; 0, KVT_E_CORRUPT past its end, -errno. */
static int read_pages(struct kvt_l2_scan *scan, uint32_t page, uint32_t pages, void *buf)
{
    int64_t bytes = (int64_t)pages * KVT_PAGE_BYTES;
    int64_t got = read_twice(scan, page, buf, (size_t)bytes);

    if (got < 0)
        return (int)got;
    return got == bytes ? 0 : KVT_E_CORRUPT;
}

bool kvt_l2_scan_sealed(const uint8_t *last_page, uint32_t segment, uint64_t generation,
                        uint32_t segment_pages)
{
    return !kvt_trailer_check((const void *)last_page, segment, generation, segment_pages);
}

/* Batches follow each other without a page between them, each a header and its records. Where that
 * does not fit, a batch failed (or records have been left out), and a walk ends there. */
static bool has_gap(const struct kvt_l2_scan *scan)
{
    uint32_t end = 1, next;

    for (uint32_t i = 0; i < scan->count; i = next) {
        uint32_t start = scan->entries[i].page, at = start;

        for (next = i; next < scan->count && scan->entries[next].page == at; next++)
            at += scan->entries[next].pages;
        if (start != end + kvt_batch_header_bytes(next - i) / KVT_PAGE_BYTES)
            return true;
        end = at;
    }
    return false;
}

int kvt_l2_scan_footer(struct kvt_l2_scan *scan, int file, uint32_t segment, uint64_t generation,
                       const uint8_t *tail, uint32_t tail_bytes)
{
    uint32_t last = scan->segment_pages - 1, tail_page, pages;
    const struct kvt_trailer *trailer;
    int rc;

    kvt_l2_scan_begin(scan, file, segment, generation);
    if (!tail) {
        tail_bytes = KVT_PAGE_BYTES;
        rc = read_pages(scan, last, 1, scan->window);
        if (rc)
            return rc;
        tail = scan->window;
    }
    trailer = (const void *)(tail + tail_bytes - KVT_PAGE_BYTES);
    if (kvt_trailer_check(trailer, segment, generation, scan->segment_pages) ||
        trailer->footer_count > scan->segment_pages)
        return KVT_E_CORRUPT;
    tail_page = scan->segment_pages - tail_bytes / KVT_PAGE_BYTES;
    pages =
        (uint32_t)(kvt_round_up(trailer->footer_count * sizeof(struct kvt_entry), KVT_PAGE_BYTES) /
                   KVT_PAGE_BYTES);
    if (trailer->footer_page >= tail_page) {
        memcpy(scan->entries, tail + (size_t)(trailer->footer_page - tail_page) * KVT_PAGE_BYTES,
               (size_t)pages * KVT_PAGE_BYTES);
    } else {
        rc = read_pages(scan, trailer->footer_page, pages, scan->entries);
        if (rc)
            return rc;
    }
    if (kvt_footer_checksum(scan->entries, trailer->footer_count) != trailer->footer_checksum)
        return KVT_E_CORRUPT;
    for (uint32_t i = 0; i < trailer->footer_count; i++)
        if (kvt_entry_check(&scan->entries[i], scan->segment_pages))
            return KVT_E_CORRUPT;
    scan->count = trailer->footer_count;
    scan->next_page = trailer->footer_page;
    scan->gap = has_gap(scan);
    return 0;
}

/* Pages [page, page + pages) of the segment through the window; NULL: *rc says why. */
static const uint8_t *window_at(struct kvt_l2_scan *scan, uint32_t page, uint32_t pages, int *rc)
{
    uint32_t want, room = scan->segment_pages - page;
    int64_t got;

    *rc = 0;
    if (page < scan->window_page || page + pages > scan->window_page + scan->window_pages) {
        bool near = scan->window_pages && page >= scan->window_page &&
                    page < scan->window_page + scan->window_pages + STEP_PAGES;

        want = KVT_MIN(room, KVT_MAX(pages, near ? WINDOW_PAGES : STEP_PAGES));
        want = KVT_MIN(want, WINDOW_PAGES);
        got = read_twice(scan, page, scan->window, (size_t)want * KVT_PAGE_BYTES);
        if (got < 0) {
            scan->window_pages = 0;
            *rc = (int)got;
            return NULL;
        }
        scan->window_page = page;
        scan->window_pages = (uint32_t)(got / KVT_PAGE_BYTES);
        if (pages > scan->window_pages)
            return NULL;
    }
    return scan->window + (size_t)(page - scan->window_page) * KVT_PAGE_BYTES;
}

/* The batch at scan->next_page: 1 taken, 0 the walk ends here, -errno. */
static int take_batch(struct kvt_l2_scan *scan)
{
    const struct kvt_batch_header *batch;
    uint32_t bytes;
    int rc;

    batch = (const void *)window_at(scan, scan->next_page, 1, &rc);
    if (!batch)
        return rc;
    if (batch->magic != KVT_BATCH_MAGIC || batch->generation != scan->generation)
        return 0; /* an earlier life, or never written */
    scan->torn = true;
    bytes = kvt_batch_header_bytes(batch->count);
    if (!bytes || bytes / KVT_PAGE_BYTES > WINDOW_PAGES ||
        bytes / KVT_PAGE_BYTES >= scan->segment_pages - scan->next_page ||
        batch->count > scan->segment_pages - scan->count)
        return 0;
    batch = (const void *)window_at(scan, scan->next_page, bytes / KVT_PAGE_BYTES, &rc);
    if (!batch)
        return rc;
    if (kvt_batch_header_check(batch, bytes, scan->segment, scan->generation, scan->next_page,
                               scan->segment_pages) ||
        batch->previous != scan->previous)
        return 0;
    scan->torn = false;
    memcpy(scan->entries + scan->count, batch->entries, batch->count * sizeof(struct kvt_entry));
    scan->count += batch->count;
    scan->batches++;
    scan->previous = batch->checksum;
    scan->next_page += batch->pages;
    return 1;
}

static int walk_step(struct kvt_l2_scan *scan)
{
    int rc = 0;

    if (scan->next_page + 2 >= scan->segment_pages)
        return 0;
    for (uint32_t look = 0; look < KVT_L2_LOOKS && rc != 1; look++) {
        scan->torn = false;
        scan->window_pages = look ? 0 : scan->window_pages;
        rc = take_batch(scan);
    }
    return rc;
}

int kvt_l2_scan_walk_on(struct kvt_l2_scan *scan)
{
    int rc;

    do {
        rc = walk_step(scan);
    } while (rc == 1);
    return rc;
}

int kvt_l2_scan_walk(struct kvt_l2_scan *scan, int file, uint32_t segment, uint64_t generation)
{
    kvt_l2_scan_begin(scan, file, segment, generation);
    return kvt_l2_scan_walk_on(scan);
}

/* Pages of a record that is larger than the window. */
static const uint8_t *large_at(struct kvt_l2_scan *scan, uint32_t page, uint32_t pages, int *rc)
{
    if (pages > scan->large_pages) {
        free(scan->large);
        scan->large = aligned_alloc(KVT_PAGE_BYTES, (size_t)pages * KVT_PAGE_BYTES);
        scan->large_pages = scan->large ? pages : 0;
        if (!scan->large) {
            *rc = -ENOMEM;
            return NULL;
        }
    }
    *rc = read_pages(scan, page, pages, scan->large);
    return *rc ? NULL : scan->large;
}

int kvt_l2_scan_record(struct kvt_l2_scan *scan, const struct kvt_entry *entry)
{
    const uint8_t *record;
    int rc = 0;

    record = entry->pages > WINDOW_PAGES ? large_at(scan, entry->page, entry->pages, &rc)
                                         : window_at(scan, entry->page, entry->pages, &rc);
    if (!record)
        return rc ? rc : KVT_E_CORRUPT;
    return kvt_record_verify(record, entry->pages * KVT_PAGE_BYTES, &entry->key, entry->checksum);
}

int kvt_l2_scan_verify(struct kvt_l2_scan *scan, uint64_t from_page,
                       bool (*skip)(void *ctx, const struct kvt_entry *entry), void *ctx)
{
    uint32_t kept = 0;
    int removed;

    scan->window_pages = 0;
    for (uint32_t i = 0; i < scan->count; i++) {
        const struct kvt_entry *entry = &scan->entries[i];

        if (entry->page >= from_page && !(skip && skip(ctx, entry))) {
            int rc = kvt_l2_scan_record(scan, entry);

            if (rc && rc != -ENOMEM) {
                scan->window_pages = 0;
                rc = kvt_l2_scan_record(scan, entry);
            }
            if (rc == -ENOMEM)
                return rc;
            scan->unread += kvt_l2_unread(rc);
            if (rc)
                continue;
        }
        scan->entries[kept++] = *entry;
    }
    removed = (int)(scan->count - kept);
    scan->count = kept;
    return removed;
}
