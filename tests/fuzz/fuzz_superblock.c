/* A superblock page of any bytes: never taken unless every field is within its bounds.
 * Input: copy number, whether the checksum is made to fit, then the page. */
#include "format/disk.h"
#include "fuzz/fuzz.h"
#include "kvtier/error.h"
#include "store/l2_layout.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    uint8_t copy = fuzz_u8(&in), fit = fuzz_u8(&in);
    struct kvt_superblock *page = fuzz_memory(sizeof *page);
    struct kvt_l2_layout layout;
    int rc;

    fuzz_take(&in, page, sizeof *page);
    if (fit & 1)
        kvt_superblock_finish(page);
    rc = kvt_superblock_check(page, copy & 1u);
    FUZZ_CHECK(rc == 0 || rc == KVT_E_CORRUPT || rc == KVT_E_NEWER);
    if (rc == 0) {
        FUZZ_CHECK(page->magic == KVT_SUPERBLOCK_MAGIC && page->version <= KVT_DISK_VERSION);
        FUZZ_CHECK(page->copy == (copy & 1u) && page->segment_count);
        FUZZ_CHECK(page->segment_bytes >= KVT_SEGMENT_BYTES_MIN &&
                   page->segment_bytes <= KVT_SEGMENT_BYTES_MAX);
        FUZZ_CHECK(page->segment_bytes % KVT_PAGE_BYTES == 0);
        FUZZ_CHECK(kvt_superblock_check(page, !(copy & 1u)) != 0);
        layout = kvt_l2_layout_for(page->cap_bytes, page->segment_bytes);
        FUZZ_CHECK(layout.segment_bytes == page->segment_bytes);
        FUZZ_CHECK((uint64_t)layout.segment_count * layout.segment_bytes <= page->cap_bytes);
        page->update ^= 1; /* one bit off: no longer valid */
        FUZZ_CHECK(kvt_superblock_check(page, copy & 1u) == KVT_E_CORRUPT);
    }
    free(page);
    return 0;
}
