/* A journal page of any bytes: what is taken has known kinds and canonical keys only, and belongs
 * to its number and epoch.
 * Input: whether the checksum is made to fit, whether it is asked for at its own place, the page.
 */
#include "format/disk.h"
#include "fuzz/fuzz.h"
#include "kvtier/error.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    uint8_t fit = fuzz_u8(&in), own = fuzz_u8(&in);
    struct kvt_journal_page *page = fuzz_memory(sizeof *page);
    uint32_t number;
    uint64_t epoch;
    int rc;

    fuzz_take(&in, page, sizeof *page);
    if (fit & 1)
        kvt_journal_page_finish(page);
    number = own & 1 ? page->page : own;
    epoch = own & 1 ? page->epoch : 1;
    rc = kvt_journal_page_check(page, number, epoch);
    FUZZ_CHECK(rc == 0 || rc == KVT_E_CORRUPT || rc == KVT_E_NEWER);
    if (rc == 0) {
        FUZZ_CHECK(page->count >= 1 && page->count <= KVT_JOURNAL_ITEMS_MAX);
        for (uint32_t i = 0; i < page->count; i++) {
            FUZZ_CHECK(page->items[i].kind >= KVT_JOURNAL_PURGE_NS &&
                       page->items[i].kind <= KVT_JOURNAL_PURGE_ALL);
            FUZZ_CHECK(page->items[i].kind != KVT_JOURNAL_PURGE_KEY ||
                       kvt_full_key_ok(&page->items[i].key));
        }
        FUZZ_CHECK(kvt_journal_page_check(page, number + 1, epoch) != 0);
        FUZZ_CHECK(kvt_journal_page_check(page, number, epoch + 1) != 0);
        page->items[0].value ^= 1;
        FUZZ_CHECK(kvt_journal_page_check(page, number, epoch) == KVT_E_CORRUPT);
    }
    free(page);
    return 0;
}
