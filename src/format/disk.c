/* On-disk structures: checksums and validation. See disk.h and docs/format.md. Pure functions, any
 * thread, no allocation. A structure is accepted only when every byte of it is what the writer of
 * this version would have written: magic, version, place, checksum, zero padding, sane counts. */
#include "format/disk.h"

#include <stdbool.h>
#include <string.h>

#include "base/checked.h"
#include "format/hash.h"
#include "kvtier/error.h"

#define CHECKED_BYTES (KVT_PAGE_BYTES - sizeof(uint64_t)) /* of a page, before its checksum */
#define BATCH_FIXED_BYTES (sizeof(struct kvt_batch_header) - sizeof(uint64_t))

static uint64_t page_checksum(const void *page)
{
    return kvt_hash64(page, CHECKED_BYTES);
}

/* What all one-page structures share. 0; KVT_E_CORRUPT; KVT_E_NEWER. */
static int page_check(const void *page, uint64_t want_magic)
{
    const uint8_t *bytes = page;
    uint64_t magic, checksum;
    uint32_t version;

    memcpy(&magic, bytes, sizeof magic);
    memcpy(&version, bytes + sizeof magic, sizeof version);
    memcpy(&checksum, bytes + CHECKED_BYTES, sizeof checksum);
    if (magic != want_magic || checksum != page_checksum(page))
        return KVT_E_CORRUPT;
    return version > KVT_DISK_VERSION ? KVT_E_NEWER : 0;
}

static bool all_zero(const void *bytes, size_t count)
{
    const uint8_t *p = bytes;

    for (size_t i = 0; i < count; i++)
        if (p[i])
            return false;
    return true;
}

static bool segment_bytes_ok(uint64_t bytes)
{
    return bytes % KVT_PAGE_BYTES == 0 && bytes >= KVT_SEGMENT_BYTES_MIN &&
           bytes <= KVT_SEGMENT_BYTES_MAX;
}

void kvt_superblock_finish(struct kvt_superblock *superblock)
{
    superblock->checksum = page_checksum(superblock);
}

void kvt_segment_header_finish(struct kvt_segment_header *header)
{
    header->checksum = page_checksum(header);
}

void kvt_trailer_finish(struct kvt_trailer *trailer)
{
    trailer->checksum = page_checksum(trailer);
}

void kvt_journal_page_finish(struct kvt_journal_page *page)
{
    page->checksum = page_checksum(page);
}

int kvt_superblock_check(const struct kvt_superblock *superblock, uint32_t copy)
{
    int rc = page_check(superblock, KVT_SUPERBLOCK_MAGIC);

    if (rc)
        return rc;
    if (superblock->copy != copy || !all_zero(superblock->zero, sizeof superblock->zero))
        return KVT_E_CORRUPT;
    if (!segment_bytes_ok(superblock->segment_bytes) || !superblock->segment_count)
        return KVT_E_CORRUPT;
    return 0;
}

int kvt_segment_header_check(const struct kvt_segment_header *header, uint32_t segment,
                             const uint8_t root_id[16])
{
    int rc = page_check(header, KVT_SEGMENT_MAGIC);

    if (rc)
        return rc;
    if (header->segment != segment || (root_id && memcmp(header->root_id, root_id, 16)) ||
        !segment_bytes_ok(header->segment_bytes) || !all_zero(header->zero, sizeof header->zero))
        return KVT_E_CORRUPT;
    return 0;
}

int kvt_trailer_check(const struct kvt_trailer *trailer, uint32_t segment, uint64_t generation,
                      uint32_t segment_pages)
{
    int rc = page_check(trailer, KVT_TRAILER_MAGIC);
    uint64_t footer_pages;

    if (rc)
        return rc;
    if (trailer->segment != segment || trailer->generation != generation ||
        !all_zero(trailer->zero, sizeof trailer->zero))
        return KVT_E_CORRUPT;
    footer_pages =
        kvt_round_up((uint64_t)trailer->footer_count * sizeof(struct kvt_entry), KVT_PAGE_BYTES) /
        KVT_PAGE_BYTES;
    /* page 0 is the segment header, the last page this trailer */
    if (!trailer->footer_page || trailer->footer_page + footer_pages + 1 > segment_pages)
        return KVT_E_CORRUPT;
    return 0;
}

int kvt_journal_page_check(const struct kvt_journal_page *page, uint32_t number, uint64_t epoch)
{
    int rc = page_check(page, KVT_JOURNAL_MAGIC);

    if (rc)
        return rc;
    if (page->page != number || page->epoch != epoch || page->reserved || !page->count ||
        page->count > KVT_JOURNAL_ITEMS_MAX || !all_zero(page->zero, sizeof page->zero))
        return KVT_E_CORRUPT;
    for (uint32_t i = 0; i < page->count; i++) {
        const struct kvt_journal_item *item = &page->items[i];

        if (item->reserved || item->kind < KVT_JOURNAL_PURGE_NS ||
            item->kind > KVT_JOURNAL_PURGE_ALL)
            return KVT_E_CORRUPT;
        if (item->kind == KVT_JOURNAL_PURGE_KEY && !kvt_full_key_ok(&item->key))
            return KVT_E_CORRUPT;
    }
    if (!all_zero(&page->items[page->count],
                  (KVT_JOURNAL_ITEMS_MAX - page->count) * sizeof page->items[0]))
        return KVT_E_CORRUPT;
    return 0;
}

uint32_t kvt_batch_header_bytes(uint32_t count)
{
    if (!count || count > KVT_BATCH_RECORDS_MAX)
        return 0;
    return (uint32_t)kvt_round_up(sizeof(struct kvt_batch_header) +
                                      (uint64_t)count * sizeof(struct kvt_entry),
                                  KVT_PAGE_BYTES);
}

/* The header before its checksum field, then the entries, then the padding to the page's end. */
static uint64_t batch_checksum(const struct kvt_batch_header *batch, uint32_t header_bytes)
{
    struct kvt_hash_stream state;

    kvt_hash_start(&state);
    kvt_hash_more(&state, batch, BATCH_FIXED_BYTES);
    kvt_hash_more(&state, batch->entries, header_bytes - sizeof *batch);
    return kvt_hash_end(&state);
}

void kvt_batch_header_finish(struct kvt_batch_header *batch)
{
    batch->checksum = batch_checksum(batch, kvt_batch_header_bytes(batch->count));
}

int kvt_entry_check(const struct kvt_entry *entry, uint32_t segment_pages)
{
    if (!kvt_full_key_ok(&entry->key) || !kvt_parent_ok(entry->parent, entry->parent_len))
        return KVT_E_CORRUPT;
    if (kvt_map_id_level(entry->map) == 0 || entry->reserved[0] || entry->reserved[1] ||
        entry->zero)
        return KVT_E_CORRUPT;
    /* page 0 is the segment header; the last page is kept for the trailer */
    if (!entry->page || !entry->pages || entry->pages > KVT_RECORD_BYTES_MAX / KVT_PAGE_BYTES ||
        (uint64_t)entry->page + entry->pages + 1 > segment_pages)
        return KVT_E_CORRUPT;
    return 0;
}

/* Entries in order, filling the batch without gap or overlap. */
static int batch_entries_check(const struct kvt_batch_header *batch, uint32_t segment_pages)
{
    uint64_t next = (uint64_t)batch->page + batch->header_pages;

    for (uint32_t i = 0; i < batch->count; i++) {
        const struct kvt_entry *entry = &batch->entries[i];
        int rc = kvt_entry_check(entry, segment_pages);

        if (rc)
            return rc;
        if (entry->page != next)
            return KVT_E_CORRUPT;
        next += entry->pages;
    }
    return next == (uint64_t)batch->page + batch->pages ? 0 : KVT_E_CORRUPT;
}

int kvt_batch_header_check(const struct kvt_batch_header *batch, size_t bytes, uint32_t segment,
                           uint64_t generation, uint32_t page, uint32_t segment_pages)
{
    uint32_t header_bytes;
    size_t used;

    if (bytes < sizeof *batch || batch->magic != KVT_BATCH_MAGIC)
        return KVT_E_CORRUPT;
    header_bytes = kvt_batch_header_bytes(batch->count);
    if (!header_bytes || header_bytes > bytes ||
        batch->checksum != batch_checksum(batch, header_bytes))
        return KVT_E_CORRUPT;
    if (batch->version > KVT_DISK_VERSION)
        return KVT_E_NEWER;
    if (batch->segment != segment || batch->generation != generation || batch->page != page ||
        batch->zero)
        return KVT_E_CORRUPT;
    if (batch->header_pages != header_bytes / KVT_PAGE_BYTES || !page ||
        batch->pages <= batch->header_pages || (uint64_t)page + batch->pages + 1 > segment_pages)
        return KVT_E_CORRUPT;
    used = sizeof *batch + (size_t)batch->count * sizeof(struct kvt_entry);
    if (!all_zero((const uint8_t *)batch + used, header_bytes - used))
        return KVT_E_CORRUPT;
    return batch_entries_check(batch, segment_pages);
}

uint64_t kvt_footer_checksum(const struct kvt_entry *entries, uint32_t count)
{
    return kvt_hash64(entries, (size_t)count * sizeof *entries);
}

uint32_t kvt_segment_bytes_for(uint64_t cap_bytes)
{
    uint64_t bytes = cap_bytes / KVT_SEGMENTS_OF_CAP;

    bytes = KVT_MAX(bytes, (uint64_t)KVT_SEGMENT_BYTES_MIN);
    bytes = KVT_MIN(bytes, (uint64_t)KVT_SEGMENT_BYTES_MAX);
    return (uint32_t)(bytes & ~(uint64_t)(KVT_PAGE_BYTES - 1));
}
