/* A record of any bytes: what is verified has a header within bounds, and no other bytes pass for
 * it. Input: pages, whether the checksum is made to fit, the bytes. */
#include "format/record.h"
#include "fuzz/fuzz.h"
#include "kvtier/error.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    uint32_t pages = 1u + fuzz_u8(&in) % 4u, bytes = pages * KVT_PAGE_BYTES;
    uint8_t fit = fuzz_u8(&in);
    uint8_t *record = fuzz_memory(bytes);
    struct kvt_record_header *header = (struct kvt_record_header *)record;
    struct kvt_full_key key;
    int rc;

    fuzz_take(&in, record, bytes);
    if (fit & 1)
        header->checksum = kvt_record_checksum(record, bytes);
    rc = kvt_record_verify(record, bytes, NULL, 0);
    FUZZ_CHECK(rc == 0 || rc == KVT_E_CORRUPT || rc == KVT_E_NEWER);
    if (rc == 0) {
        FUZZ_CHECK(header->record_bytes == bytes);
        FUZZ_CHECK(header->payload_bytes + sizeof *header <= bytes && header->payload_bytes);
        FUZZ_CHECK(header->parent_len <= KVT_HASH_BYTES_MAX && kvt_full_key_ok(&header->key));
        FUZZ_CHECK(kvt_map_id_level(header->map) != 0);
        FUZZ_CHECK(kvt_record_verify(record, bytes, NULL, header->checksum + 1) != 0);
        key = header->key;
        FUZZ_CHECK(kvt_record_verify(record, bytes, &key, header->checksum) == 0);
        key.ns[0] ^= 1;
        FUZZ_CHECK(kvt_record_verify(record, bytes, &key, 0) != 0);
        record[bytes - 1 - size % (bytes - 128)] ^= 0x10; /* any bit of the payload */
        FUZZ_CHECK(kvt_record_verify(record, bytes, NULL, 0) == KVT_E_CORRUPT);
    }
    free(record);
    return 0;
}
