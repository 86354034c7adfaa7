/* Records: sizes, checksum, verification (C2, C11 on the record).
 *
 * Goal:   any changed byte, any other key, any misdirected record is refused; hostile headers never
 *         lead a check outside the bytes that it was given.
 * Method: a record built by hand; all of its bits flipped one by one; pages swapped; random headers
 *         with all field values that hurt.
 */
#include "format/record.h"

#include "support/store_help.h"

#include <string.h>
#include <xxhash.h>

#include "base/checked.h"
#include "base/rng.h"
#include "format/hash.h"
#include "kvtier/error.h"

static uint8_t *make_record(struct kvt_rng *rng, size_t payload_bytes, uint32_t *bytes)
{
    struct kvt_record_header *header;
    struct kvt_key key = {.hash_len = 20, .group = 2, .shard = 5};
    uint8_t ns[KVT_NS_BYTES], *record;

    *bytes = kvt_record_bytes(payload_bytes);
    record = aligned_alloc(KVT_PAGE_BYTES, *bytes);
    assert_non_null(record);
    memset(record, 0, *bytes);
    header = (struct kvt_record_header *)record;
    for (size_t i = 0; i < sizeof ns; i++)
        ns[i] = (uint8_t)kvt_rng_next(rng);
    for (size_t i = 0; i < sizeof key.hash; i++)
        key.hash[i] = (uint8_t)kvt_rng_next(rng); /* bytes past 20 must not enter */
    header->magic = KVT_RECORD_MAGIC;
    header->version = KVT_RECORD_VERSION;
    header->map = KVT_LEVEL_KV4;
    header->parent_len = 20;
    kvt_full_key_make(&header->key, ns, &key);
    for (size_t i = 0; i < 20; i++)
        header->parent[i] = (uint8_t)kvt_rng_next(rng);
    header->first_pos = 4096;
    header->record_bytes = *bytes;
    header->payload_bytes = (uint32_t)payload_bytes;
    header->sequence = 99;
    for (size_t i = 0; i < payload_bytes; i++)
        record[sizeof *header + i] = (uint8_t)kvt_rng_next(rng);
    header->checksum = kvt_record_checksum(record, *bytes);
    return record;
}

static void test_sizes(void **state)
{
    (void)state;
    assert_int_equal(kvt_record_bytes(0), 4096);
    assert_int_equal(kvt_record_bytes(1), 4096);
    assert_int_equal(kvt_record_bytes(4096 - 128), 4096);
    assert_int_equal(kvt_record_bytes(4096 - 127), 8192);
    assert_int_equal(kvt_record_bytes(1372160), 1376256); /* kv4, 16 tokens of a 70B model */
    assert_int_equal(kvt_record_bytes(KVT_RECORD_BYTES_MAX - 128), KVT_RECORD_BYTES_MAX);
    assert_int_equal(kvt_record_bytes(KVT_RECORD_BYTES_MAX - 127), 0);
    assert_int_equal(kvt_record_bytes(SIZE_MAX), 0);
}

/* The definition, written down a second time with xxhash's own calls. */
static uint64_t plain_checksum(const uint8_t *record, uint32_t bytes)
{
    uint32_t pages = bytes / 4096;
    uint64_t *hashes = calloc(pages, sizeof *hashes), result;
    uint8_t first[4096];

    assert_non_null(hashes);
    memcpy(first, record, 4096);
    memset(first + 120, 0, 8);
    for (uint32_t i = 0; i < pages; i++)
        hashes[i] = XXH3_64bits(i ? record + (size_t)i * 4096 : first, 4096);
    result = XXH3_64bits(hashes, pages * sizeof *hashes);
    free(hashes);
    return result;
}

static void test_checksum_definition(void **state)
{
    static const uint32_t pages[] = {1, 2, 3, 16, 31, 336, 511, 512, 513, 1024, 1025, 3000};
    struct kvt_rng rng = {test_seed()};

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(pages); i++) {
        size_t len = (size_t)pages[i] * 4096;
        uint8_t *bytes = aligned_alloc(4096, len);
        uint64_t first;

        assert_non_null(bytes);
        for (size_t j = 0; j < len; j += 8) {
            uint64_t word = kvt_rng_next(&rng);
            memcpy(bytes + j, &word, 8);
        }
        first = kvt_record_checksum(bytes, (uint32_t)len);
        assert_true(first == plain_checksum(bytes, (uint32_t)len));
        memset(bytes + 120, 0xee, 8); /* the field itself does not count */
        assert_true(kvt_record_checksum(bytes, (uint32_t)len) == first);
        for (uint32_t page = 0; page < pages[i]; page += 1 + pages[i] / 50) { /* each page does */
            uint8_t *byte = bytes + (size_t)page * 4096 + (page ? 0 : 200);

            *byte ^= 1;
            assert_true(kvt_record_checksum(bytes, (uint32_t)len) != first);
            *byte ^= 1;
        }
        free(bytes);
    }
}

static void test_hash_stream(void **state)
{
    struct kvt_rng rng = {test_seed()};
    static uint8_t bytes[100000];
    struct kvt_hash_stream stream;

    (void)state;
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)kvt_rng_next(&rng);
    for (int round = 0; round < 300; round++) {
        size_t len = kvt_rng_below(&rng, sizeof bytes), at = 0;

        kvt_hash_start(&stream);
        while (at < len) {
            size_t part = 1 + kvt_rng_below(&rng, 5000);

            part = KVT_MIN(part, len - at);
            kvt_hash_more(&stream, bytes + at, part);
            at += part;
        }
        assert_true(kvt_hash_end(&stream) == kvt_hash64(bytes, len));
        assert_true(kvt_hash64(bytes, len) == XXH3_64bits(bytes, len));
    }
}

static void test_verify(void **state)
{
    struct kvt_rng rng = {test_seed()};
    uint32_t bytes;
    uint8_t *record = make_record(&rng, 9000, &bytes);
    struct kvt_record_header *header = (struct kvt_record_header *)record;
    struct kvt_full_key key = header->key;

    (void)state;
    assert_int_equal(kvt_record_verify(record, bytes, NULL, 0), 0);
    assert_int_equal(kvt_record_verify(record, bytes, &key, 0), 0);
    assert_int_equal(kvt_record_verify(record, bytes, &key, header->checksum), 0);
    /* the store keeps another checksum: an older record of the same key and place */
    assert_int_equal(kvt_record_verify(record, bytes, &key, header->checksum ^ 1), KVT_E_CORRUPT);
    /* sizes that the caller got wrong */
    assert_int_equal(kvt_record_verify(record, bytes - 4096, &key, 0), KVT_E_CORRUPT);
    assert_int_equal(kvt_record_verify(record, 4096, &key, 0), KVT_E_CORRUPT);
    assert_int_equal(kvt_record_verify(record, 0, &key, 0), KVT_E_CORRUPT);
    assert_int_equal(kvt_record_verify(record, 100, &key, 0), KVT_E_CORRUPT);
    assert_int_equal(kvt_record_verify(record, UINT32_MAX, &key, 0), KVT_E_CORRUPT);
    for (size_t i = 0; i < sizeof key; i++) { /* another key in any byte */
        struct kvt_full_key other = key;
        ((uint8_t *)&other)[i] ^= 1;
        assert_int_equal(kvt_record_verify(record, bytes, &other, header->checksum), KVT_E_CORRUPT);
    }
    free(record);
}

/* C2: every single bit of header, payload and padding counts. */
static void test_every_bit(void **state)
{
    struct kvt_rng rng = {test_seed()};
    uint32_t bytes;
    uint8_t *record = make_record(&rng, 5000, &bytes);
    const struct kvt_record_header *header = (const struct kvt_record_header *)record;
    struct kvt_full_key key = header->key;
    uint64_t checksum = header->checksum;

    (void)state;
    for (uint32_t bit = 0; bit < bytes * 8; bit += bit < 4096 * 8 ? 1 : 7) {
        record[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_int_equal(kvt_record_verify(record, bytes, &key, checksum), KVT_E_CORRUPT);
        assert_int_equal(kvt_record_verify(record, bytes, NULL, 0), KVT_E_CORRUPT);
        record[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    assert_int_equal(kvt_record_verify(record, bytes, &key, checksum), 0);
    free(record);
}

static void test_torn_and_misdirected(void **state)
{
    struct kvt_rng rng = {test_seed()};
    uint32_t bytes, other_bytes;
    uint8_t *record = make_record(&rng, 5 * 4096, &bytes);
    uint8_t *other = make_record(&rng, 5 * 4096, &other_bytes), page[4096];
    struct kvt_full_key key = ((struct kvt_record_header *)record)->key;

    (void)state;
    assert_int_equal(bytes, other_bytes);
    assert_int_equal(kvt_record_verify(other, bytes, NULL, 0), 0); /* good, but not this one */
    assert_int_equal(kvt_record_verify(other, bytes, &key, 0), KVT_E_CORRUPT);
    for (uint32_t i = 0; i < bytes / 4096; i++) { /* torn: some pages are of another record */
        memcpy(page, record + i * 4096, 4096);
        memcpy(record + i * 4096, other + i * 4096, 4096);
        assert_int_equal(kvt_record_verify(record, bytes, &key, 0), KVT_E_CORRUPT);
        memset(record + i * 4096, 0, 4096);
        assert_int_equal(kvt_record_verify(record, bytes, &key, 0), KVT_E_CORRUPT);
        memcpy(record + i * 4096, page, 4096);
    }
    /* two payload pages swapped */
    memcpy(page, record + 4096, 4096);
    memcpy(record + 4096, record + 8192, 4096);
    memcpy(record + 8192, page, 4096);
    assert_int_equal(kvt_record_verify(record, bytes, &key, 0), KVT_E_CORRUPT);
    free(record);
    free(other);
}

/* A wrong field under a right checksum: a writer's bug, or an attacker. */
static void test_header_fields(void **state)
{
    struct kvt_rng rng = {test_seed()};
    uint32_t bytes;
    uint8_t *record = make_record(&rng, 9000, &bytes);
    struct kvt_record_header *header = (struct kvt_record_header *)record, good = *header;

    (void)state;
#define EXPECT(change, code)                                               \
    do {                                                                   \
        *header = good;                                                    \
        change;                                                            \
        header->checksum = kvt_record_checksum(record, bytes);             \
        assert_int_equal(kvt_record_header_check(header), code);           \
        assert_int_equal(kvt_record_verify(record, bytes, NULL, 0), code); \
    } while (0)
    EXPECT((void)0, 0);
    EXPECT(header->parent_len = 0; memset(header->parent, 0, 32), 0);
    EXPECT(header->map = KVT_LEVEL_RAW, 0);
    EXPECT(header->magic++, KVT_E_CORRUPT);
    EXPECT(header->version++, KVT_E_NEWER);
    EXPECT(header->version = UINT16_MAX, KVT_E_NEWER);
    EXPECT(header->map = 0, KVT_E_CORRUPT);
    EXPECT(header->map = 15, 0);
    EXPECT(header->map = 16, KVT_E_CORRUPT);
    EXPECT(header->flags = 1, KVT_E_CORRUPT);
    EXPECT(header->parent_len = 33, KVT_E_CORRUPT);
    EXPECT(header->parent_len = 19; header->parent[19] = 1, KVT_E_CORRUPT);
    EXPECT(header->key.hash_len = 0, KVT_E_CORRUPT);
    EXPECT(header->key.hash_len = 33, KVT_E_CORRUPT);
    EXPECT(header->key.hash[20] = 1, KVT_E_CORRUPT);
    EXPECT(header->key.reserved = 1, KVT_E_CORRUPT);
    EXPECT(header->payload_bytes = 0, KVT_E_CORRUPT);
    EXPECT(header->payload_bytes = UINT32_MAX, KVT_E_CORRUPT);
    EXPECT(header->payload_bytes = bytes, KVT_E_CORRUPT);
    EXPECT(header->payload_bytes = 100, KVT_E_CORRUPT);
    EXPECT(header->record_bytes = 0, KVT_E_CORRUPT);
    EXPECT(header->record_bytes += 4096, KVT_E_CORRUPT);
    EXPECT(header->record_bytes = UINT32_MAX, KVT_E_CORRUPT);
#undef EXPECT
    free(record);
}

/* C11 on headers: 10,000 mutations with hurting values; sanitizers watch the reads. */
static void test_c11_mutated_headers(void **state)
{
    static const uint64_t hurting[] = {0,          1,          0x7f,          0x80,
                                       0xff,       0x7fff,     0x8000,        0xffff,
                                       0x7fffffff, 0x80000000, 0xffffffff,    0xfffffff0,
                                       1ull << 63, UINT64_MAX, INT64_MAX - 1, 0x1000};
    struct kvt_rng rng = {test_seed()};
    uint32_t bytes;
    uint8_t *record = make_record(&rng, 9000, &bytes), good[128];
    unsigned accepted = 0;

    (void)state;
    memcpy(good, record, sizeof good);
    for (int i = 0; i < 10000; i++) {
        size_t width = 1u << kvt_rng_below(&rng, 4), at;
        uint64_t value = hurting[kvt_rng_below(&rng, KVT_ARRAY_LEN(hurting))];

        memcpy(record, good, sizeof good);
        for (uint64_t n = 1 + kvt_rng_below(&rng, 4); n; n--) {
            at = kvt_rng_below(&rng, 120 / width) * width;
            memcpy(record + at, &value, width);
        }
        if (i % 2)
            ((struct kvt_record_header *)record)->checksum = kvt_record_checksum(record, bytes);
        accepted += !kvt_record_verify(record, bytes, NULL, 0);
        if (i % 2 == 0 && memcmp(record, good, sizeof good) != 0)
            assert_int_not_equal(kvt_record_verify(record, bytes, NULL, 0), 0);
    }
    assert_true(accepted < 5000);
    free(record);
}

static void test_full_key(void **state)
{
    struct kvt_key key = {.hash_len = 3, .group = 7, .shard = 9, .hash = {1, 2, 3, 4, 5}};
    uint8_t ns[KVT_NS_BYTES] = "0123456789abcde";
    struct kvt_full_key full;

    (void)state;
    kvt_full_key_make(&full, ns, &key);
    assert_memory_equal(full.ns, ns, sizeof ns);
    assert_memory_equal(full.hash, ((uint8_t[32]){1, 2, 3}), 32);
    assert_int_equal(full.hash_len, 3);
    assert_int_equal(full.group, 7);
    assert_int_equal(full.shard, 9);
    assert_int_equal(full.reserved, 0);
    assert_true(kvt_full_key_ok(&full));
    key.hash_len = 200; /* nothing is read past the array */
    kvt_full_key_make(&full, ns, &key);
    assert_int_equal(full.hash_len, 32);
    assert_true(kvt_parent_ok(full.hash, 32));
    assert_false(kvt_parent_ok(full.hash, 33));
    assert_true(kvt_parent_ok((uint8_t[32]){0}, 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),         cmocka_unit_test(test_checksum_definition),
        cmocka_unit_test(test_hash_stream),   cmocka_unit_test(test_verify),
        cmocka_unit_test(test_every_bit),     cmocka_unit_test(test_torn_and_misdirected),
        cmocka_unit_test(test_header_fields), cmocka_unit_test(test_c11_mutated_headers),
        cmocka_unit_test(test_full_key),
    };

    return cmocka_run_group_tests_name("record", tests, NULL, NULL);
}
