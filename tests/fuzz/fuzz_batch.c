/* Segment header, batch header, trailer and footer entries of any bytes: what is taken stays inside
 * its segment, entries do not overlap, and nothing is read past the bytes given.
 * Input: what it is, whether the checksum is made to fit, the size of the segment, the bytes. */
#include "format/disk.h"
#include "fuzz/fuzz.h"
#include "kvtier/error.h"

static void check_batch(struct fuzz_input *in, int fit, uint32_t segment_pages)
{
    /* exactly what the input has: a count that asks for more must be refused */
    size_t bytes = in->size;
    struct kvt_batch_header *batch = fuzz_memory(bytes);
    uint64_t next;
    int rc;

    fuzz_take(in, batch, bytes);
    if (fit && bytes >= sizeof *batch && kvt_batch_header_bytes(batch->count) &&
        kvt_batch_header_bytes(batch->count) <= bytes)
        kvt_batch_header_finish(batch);
    rc = bytes < sizeof *batch
             ? kvt_batch_header_check(batch, bytes, 0, 0, 0, segment_pages)
             : kvt_batch_header_check(batch, bytes, batch->segment, batch->generation, batch->page,
                                      segment_pages);
    FUZZ_CHECK(rc == 0 || rc == KVT_E_CORRUPT || rc == KVT_E_NEWER);
    if (rc == 0) {
        FUZZ_CHECK(batch->page >= 1 && (uint64_t)batch->page + batch->pages < segment_pages);
        next = (uint64_t)batch->page + batch->header_pages;
        for (uint32_t i = 0; i < batch->count; i++) {
            FUZZ_CHECK(kvt_entry_check(&batch->entries[i], segment_pages) == 0);
            FUZZ_CHECK(batch->entries[i].page == next && batch->entries[i].pages);
            next += batch->entries[i].pages;
        }
        FUZZ_CHECK(next == (uint64_t)batch->page + batch->pages);
        FUZZ_CHECK(kvt_batch_header_check(batch, bytes, batch->segment, batch->generation + 1,
                                          batch->page, segment_pages) != 0);
        FUZZ_CHECK(kvt_batch_header_check(batch, bytes, batch->segment, batch->generation,
                                          batch->page + 1, segment_pages) != 0);
    }
    free(batch);
}

static void check_trailer(struct fuzz_input *in, int fit, uint32_t segment_pages)
{
    struct kvt_trailer *page = fuzz_memory(sizeof *page);
    int rc;

    fuzz_take(in, page, sizeof *page);
    if (fit)
        kvt_trailer_finish(page);
    rc = kvt_trailer_check(page, page->segment, page->generation, segment_pages);
    FUZZ_CHECK(rc == 0 || rc == KVT_E_CORRUPT || rc == KVT_E_NEWER);
    if (rc == 0)
        FUZZ_CHECK(page->footer_page >= 1 &&
                   (uint64_t)page->footer_page * KVT_PAGE_BYTES +
                           (uint64_t)page->footer_count * sizeof(struct kvt_entry) <=
                       (uint64_t)(segment_pages - 1) * KVT_PAGE_BYTES);
    free(page);
}

static void check_segment_header(struct fuzz_input *in, int fit)
{
    struct kvt_segment_header *page = fuzz_memory(sizeof *page);
    uint8_t other[16];
    int rc;

    fuzz_take(in, page, sizeof *page);
    if (fit)
        kvt_segment_header_finish(page);
    rc = kvt_segment_header_check(page, page->segment, NULL);
    FUZZ_CHECK(rc == 0 || rc == KVT_E_CORRUPT || rc == KVT_E_NEWER);
    if (rc == 0) {
        memcpy(other, page->root_id, sizeof other);
        FUZZ_CHECK(kvt_segment_header_check(page, page->segment, other) == 0);
        other[7] ^= 1;
        FUZZ_CHECK(kvt_segment_header_check(page, page->segment, other) != 0);
        FUZZ_CHECK(kvt_segment_header_check(page, page->segment + 1, NULL) != 0);
    }
    free(page);
}

static void check_footer(struct fuzz_input *in, uint32_t segment_pages)
{
    struct kvt_entry *entry = fuzz_memory(sizeof *entry);

    while (fuzz_take(in, entry, sizeof *entry) == sizeof *entry)
        if (kvt_entry_check(entry, segment_pages) == 0) {
            FUZZ_CHECK(kvt_full_key_ok(&entry->key));
            FUZZ_CHECK(entry->page >= 1 && entry->pages >= 1 &&
                       (uint64_t)entry->page + entry->pages < segment_pages);
            FUZZ_CHECK(kvt_map_id_level(entry->map) != 0);
        }
    free(entry);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    uint8_t what = fuzz_u8(&in), fit = fuzz_u8(&in);
    uint32_t segment_pages = 256u + fuzz_u8(&in) * 256u;

    if (what % 4 == 0)
        check_batch(&in, fit & 1, segment_pages);
    else if (what % 4 == 1)
        check_trailer(&in, fit & 1, segment_pages);
    else if (what % 4 == 2)
        check_segment_header(&in, fit & 1);
    else
        check_footer(&in, segment_pages);
    return 0;
}
