/* On-disk structures (C4, C11, C24 on the structures).
 *
 * Goal:   torn, foreign, misdirected, older-life and newer structures are told apart and refused;
 * no count or offset leads a check outside the bytes that it was given. Method: one good instance
 * of each; every bit flipped; every field set to what hurts under a right checksum; batch headers
 * in buffers that end where they are said to.
 */
#include "format/disk.h"

#include "support/store_help.h"

#include <string.h>
#include <xxhash.h>

#include "base/checked.h"
#include "base/rng.h"
#include "kvtier/error.h"

#define SEGMENT 7u
#define GENERATION 1234567ull
#define SEGMENT_PAGES 256u

static const uint8_t root_id[16] = "root-id-0123456";

static struct kvt_superblock good_superblock(void)
{
    struct kvt_superblock s = {.magic = KVT_SUPERBLOCK_MAGIC,
                               .version = KVT_DISK_VERSION,
                               .copy = 1,
                               .update = 3,
                               .cap_bytes = 1ull << 30,
                               .segment_bytes = 16u << 20,
                               .segment_count = 64,
                               .next_generation = 9,
                               .next_sequence = 1000};

    memcpy(s.root_id, root_id, sizeof root_id);
    kvt_superblock_finish(&s);
    return s;
}

static struct kvt_segment_header good_segment(void)
{
    struct kvt_segment_header h = {.magic = KVT_SEGMENT_MAGIC,
                                   .version = KVT_DISK_VERSION,
                                   .segment = SEGMENT,
                                   .generation = GENERATION,
                                   .segment_bytes = SEGMENT_PAGES * 4096};

    memcpy(h.root_id, root_id, sizeof root_id);
    kvt_segment_header_finish(&h);
    return h;
}

static struct kvt_trailer good_trailer(void)
{
    struct kvt_trailer t = {.magic = KVT_TRAILER_MAGIC,
                            .version = KVT_DISK_VERSION,
                            .segment = SEGMENT,
                            .generation = GENERATION,
                            .footer_page = 200,
                            .footer_count = 100,
                            .footer_checksum = 42};

    kvt_trailer_finish(&t);
    return t;
}

static struct kvt_full_key some_key(uint8_t n)
{
    struct kvt_full_key key = {.hash_len = 32, .group = 0, .shard = n};

    memset(key.ns, 0x11, sizeof key.ns);
    memset(key.hash, n, sizeof key.hash);
    return key;
}

static struct kvt_journal_page good_journal(void)
{
    struct kvt_journal_page p = {.magic = KVT_JOURNAL_MAGIC,
                                 .version = KVT_DISK_VERSION,
                                 .page = 5,
                                 .epoch = 77,
                                 .count = 3};

    p.items[0] = (struct kvt_journal_item){.kind = KVT_JOURNAL_PURGE_NS, .value = 10};
    p.items[1] =
        (struct kvt_journal_item){.kind = KVT_JOURNAL_PURGE_KEY, .key = some_key(3), .value = 11};
    p.items[2] = (struct kvt_journal_item){.kind = KVT_JOURNAL_PURGE_ALL, .value = 12};
    kvt_journal_page_finish(&p);
    return p;
}

/* ---- one-page structures ---- */

typedef int (*check_fn)(const void *page);

static int check_superblock(const void *page)
{
    return kvt_superblock_check(page, 1);
}

static int check_segment(const void *page)
{
    return kvt_segment_header_check(page, SEGMENT, root_id);
}

static int check_trailer(const void *page)
{
    return kvt_trailer_check(page, SEGMENT, GENERATION, SEGMENT_PAGES);
}

static int check_journal(const void *page)
{
    return kvt_journal_page_check(page, 5, 77);
}

/* Every bit; then torn at every sector; then a version from the future, checksummed and not. */
static void abuse_page(const void *good, check_fn check)
{
    _Alignas(8) uint8_t page[4096];
    uint32_t version;
    uint64_t checksum;

    memcpy(page, good, sizeof page);
    assert_int_equal(check(page), 0);
    for (uint32_t bit = 0; bit < 4096 * 8; bit++) {
        page[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_int_equal(check(page), KVT_E_CORRUPT);
        page[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    for (uint32_t sector = 0; sector < 8; sector++) {
        memset(page + sector * 512, 0xff, 512);
        assert_int_equal(check(page), KVT_E_CORRUPT);
        memcpy(page + sector * 512, (const uint8_t *)good + sector * 512, 512);
    }
    memset(page, 0, sizeof page);
    assert_int_equal(check(page), KVT_E_CORRUPT);
    memset(page, 0xff, sizeof page);
    assert_int_equal(check(page), KVT_E_CORRUPT);
    /* C24: newer is told from damaged by the checksum; its other bytes may be anything */
    memcpy(page, good, sizeof page);
    version = KVT_DISK_VERSION + 1;
    memcpy(page + 8, &version, sizeof version);
    assert_int_equal(check(page), KVT_E_CORRUPT);
    memset(page + 100, 0x77, 2000);
    checksum = XXH3_64bits(page, 4088);
    memcpy(page + 4088, &checksum, sizeof checksum);
    assert_int_equal(check(page), KVT_E_NEWER);
    page[0] ^= 1; /* foreign */
    checksum = XXH3_64bits(page, 4088);
    memcpy(page + 4088, &checksum, sizeof checksum);
    assert_int_equal(check(page), KVT_E_CORRUPT);
}

static void test_pages(void **state)
{
    struct kvt_superblock superblock = good_superblock();
    struct kvt_segment_header segment = good_segment();
    struct kvt_trailer trailer = good_trailer();
    struct kvt_journal_page journal = good_journal();

    (void)state;
    abuse_page(&superblock, check_superblock);
    abuse_page(&segment, check_segment);
    abuse_page(&trailer, check_trailer);
    abuse_page(&journal, check_journal);
    /* one kind is never taken for another */
    assert_int_equal(check_superblock(&segment), KVT_E_CORRUPT);
    assert_int_equal(check_segment(&trailer), KVT_E_CORRUPT);
    assert_int_equal(check_trailer(&journal), KVT_E_CORRUPT);
    assert_int_equal(check_journal(&superblock), KVT_E_CORRUPT);
}

#define EXPECT(type, make, finish, change, check, code) \
    do {                                                \
        type s = make();                                \
        change;                                         \
        finish(&s);                                     \
        assert_int_equal(check, code);                  \
    } while (0)

#define SUPERBLOCK(change, code)                                                  \
    EXPECT(struct kvt_superblock, good_superblock, kvt_superblock_finish, change, \
           kvt_superblock_check(&s, 1), code)

static void test_superblock_fields(void **state)
{
    (void)state;
    SUPERBLOCK((void)0, 0);
    SUPERBLOCK(s.copy = 0, KVT_E_CORRUPT); /* misdirected: the other copy's place */
    SUPERBLOCK(s.segment_bytes = 0, KVT_E_CORRUPT);
    SUPERBLOCK(s.segment_bytes += 512, KVT_E_CORRUPT);
    SUPERBLOCK(s.segment_bytes = KVT_SEGMENT_BYTES_MIN - 4096, KVT_E_CORRUPT);
    SUPERBLOCK(s.segment_bytes = KVT_SEGMENT_BYTES_MAX + 4096, KVT_E_CORRUPT);
    SUPERBLOCK(s.segment_bytes = KVT_SEGMENT_BYTES_MAX, 0);
    SUPERBLOCK(s.segment_count = 0, KVT_E_CORRUPT);
    SUPERBLOCK(s.zero[0] = 1, KVT_E_CORRUPT);
    SUPERBLOCK(s.zero[sizeof s.zero - 1] = 1, KVT_E_CORRUPT);
    SUPERBLOCK(s.update = UINT64_MAX, 0);
}

#define SEGMENT_HEADER(change, code)                                                   \
    EXPECT(struct kvt_segment_header, good_segment, kvt_segment_header_finish, change, \
           kvt_segment_header_check(&s, SEGMENT, root_id), code)

static void test_segment_fields(void **state)
{
    struct kvt_segment_header any = good_segment();

    (void)state;
    SEGMENT_HEADER((void)0, 0);
    SEGMENT_HEADER(s.segment++, KVT_E_CORRUPT); /* misdirected, or a renamed file */
    SEGMENT_HEADER(s.root_id[15]++, KVT_E_CORRUPT);
    SEGMENT_HEADER(s.segment_bytes = 4096, KVT_E_CORRUPT);
    SEGMENT_HEADER(s.segment_bytes++, KVT_E_CORRUPT);
    SEGMENT_HEADER(s.segment_bytes = 1ull << 32 | 1u << 20, KVT_E_CORRUPT);
    SEGMENT_HEADER(s.zero[3] = 1, KVT_E_CORRUPT);
    SEGMENT_HEADER(s.generation = UINT64_MAX, 0);
    /* "any root": its own id as the expected one, or none */
    any.root_id[0]++;
    kvt_segment_header_finish(&any);
    assert_int_equal(kvt_segment_header_check(&any, SEGMENT, root_id), KVT_E_CORRUPT);
    assert_int_equal(kvt_segment_header_check(&any, SEGMENT, any.root_id), 0);
    assert_int_equal(kvt_segment_header_check(&any, SEGMENT, NULL), 0);
}

#define TRAILER(change, code)                                            \
    EXPECT(struct kvt_trailer, good_trailer, kvt_trailer_finish, change, \
           kvt_trailer_check(&s, SEGMENT, GENERATION, SEGMENT_PAGES), code)

static void test_trailer_fields(void **state)
{
    (void)state;
    TRAILER((void)0, 0);
    TRAILER(s.segment++, KVT_E_CORRUPT);
    TRAILER(s.generation--, KVT_E_CORRUPT); /* an earlier life */
    TRAILER(s.footer_page = 0, KVT_E_CORRUPT);
    TRAILER(s.footer_page = UINT32_MAX, KVT_E_CORRUPT);
    TRAILER(s.footer_count = UINT32_MAX, KVT_E_CORRUPT);
    TRAILER(s.zero[9] = 1, KVT_E_CORRUPT);
    TRAILER(s.footer_count = 0, 0); /* an empty segment */
    /* 100 entries take 4 pages: the last place is 251..254, the trailer is page 255 */
    TRAILER(s.footer_page = 251, 0);
    TRAILER(s.footer_page = 252, KVT_E_CORRUPT);
    TRAILER(s.footer_page = 251; s.footer_count = 129, KVT_E_CORRUPT);
    TRAILER(s.footer_page = 251; s.footer_count = 128, 0);
}

#define JOURNAL(change, code)                                                      \
    EXPECT(struct kvt_journal_page, good_journal, kvt_journal_page_finish, change, \
           kvt_journal_page_check(&s, 5, 77), code)

static void test_journal_fields(void **state)
{
    (void)state;
    JOURNAL((void)0, 0);
    JOURNAL(s.page++, KVT_E_CORRUPT);
    JOURNAL(s.epoch++, KVT_E_CORRUPT);
    JOURNAL(s.reserved = 1, KVT_E_CORRUPT);
    JOURNAL(s.count = 0, KVT_E_CORRUPT);
    JOURNAL(s.count = KVT_JOURNAL_ITEMS_MAX + 1, KVT_E_CORRUPT);
    JOURNAL(s.count = UINT32_MAX, KVT_E_CORRUPT);
    JOURNAL(s.count = 2, KVT_E_CORRUPT); /* an item that does not count */
    JOURNAL(s.items[0].kind = 0, KVT_E_CORRUPT);
    JOURNAL(s.items[0].kind = 5, KVT_E_CORRUPT);
    JOURNAL(s.items[0].reserved = 1, KVT_E_CORRUPT);
    JOURNAL(s.items[1].key.hash_len = 0, KVT_E_CORRUPT);
    JOURNAL(s.items[1].key.hash_len = 40, KVT_E_CORRUPT);
    JOURNAL(s.items[54].value = 1, KVT_E_CORRUPT);
    JOURNAL(s.zero[0] = 1, KVT_E_CORRUPT);
    JOURNAL(for (uint32_t i = 3; i < KVT_JOURNAL_ITEMS_MAX; i++) s.items[i] = s.items[1];
            s.count = KVT_JOURNAL_ITEMS_MAX, 0);
}

/* ---- batches ---- */

/* A batch of `count` records of 1, 2, 3, 1, ... pages at page `page`, in a buffer of exactly its
 * header's size, so that a sanitizer sees any read past it. */
static struct kvt_batch_header *make_batch(uint32_t count, uint32_t page)
{
    uint32_t bytes = kvt_batch_header_bytes(count), next;
    struct kvt_batch_header *batch = aligned_alloc(4096, bytes);

    assert_non_null(batch);
    memset(batch, 0, bytes);
    *batch = (struct kvt_batch_header){.magic = KVT_BATCH_MAGIC,
                                       .version = KVT_DISK_VERSION,
                                       .segment = SEGMENT,
                                       .generation = GENERATION,
                                       .page = page,
                                       .header_pages = bytes / 4096,
                                       .count = count,
                                       .previous = 0xfeedfacecafebeefull};
    next = page + batch->header_pages;
    for (uint32_t i = 0; i < count; i++) {
        struct kvt_entry *entry = &batch->entries[i];

        entry->key = some_key((uint8_t)(i + 1));
        entry->sequence = i;
        entry->page = next;
        entry->pages = i % 3 + 1;
        entry->map = KVT_LEVEL_KV4;
        next += entry->pages;
    }
    batch->pages = next - page;
    kvt_batch_header_finish(batch);
    return batch;
}

static int check_batch(const struct kvt_batch_header *batch, uint32_t count)
{
    return kvt_batch_header_check(batch, kvt_batch_header_bytes(count), SEGMENT, GENERATION, 1,
                                  SEGMENT_PAGES);
}

static void test_batch_sizes(void **state)
{
    (void)state;
    assert_int_equal(kvt_batch_header_bytes(0), 0);
    assert_int_equal(kvt_batch_header_bytes(1), 4096);
    assert_int_equal(kvt_batch_header_bytes(31), 4096); /* 64 + 31 * 128 = 4032 */
    assert_int_equal(kvt_batch_header_bytes(32), 8192);
    assert_int_equal(kvt_batch_header_bytes(63), 8192);
    assert_int_equal(kvt_batch_header_bytes(64), 12288);
    assert_int_equal(kvt_batch_header_bytes(KVT_BATCH_RECORDS_MAX), 2048 * 4096);
    assert_int_equal(kvt_batch_header_bytes(KVT_BATCH_RECORDS_MAX + 1), 0);
    assert_int_equal(kvt_batch_header_bytes(UINT32_MAX), 0);
}

static void test_batch_every_bit(void **state)
{
    static const uint32_t counts[] = {1, 3, 31, 32, 70};

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(counts); i++) {
        struct kvt_batch_header *batch = make_batch(counts[i], 1);
        uint32_t bytes = kvt_batch_header_bytes(counts[i]);

        assert_int_equal(check_batch(batch, counts[i]), 0);
        for (uint32_t bit = 0; bit < bytes * 8; bit += bit < 4096 * 8 ? 1 : 5) {
            uint8_t *byte = (uint8_t *)batch + bit / 8;

            *byte ^= (uint8_t)(1u << bit % 8);
            assert_int_equal(check_batch(batch, counts[i]), KVT_E_CORRUPT);
            *byte ^= (uint8_t)(1u << bit % 8);
        }
        free(batch);
    }
}

/* The checksum's definition, a second time: the 56 bytes before it, then all of the header's pages.
 */
static void test_batch_checksum_definition(void **state)
{
    static const uint32_t counts[] = {1, 31, 32, 70};

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(counts); i++) {
        struct kvt_batch_header *batch = make_batch(counts[i], 1);
        uint32_t bytes = kvt_batch_header_bytes(counts[i]);
        uint8_t *plain = malloc(bytes - 8);

        assert_non_null(plain);
        memcpy(plain, batch, 56);
        memcpy(plain + 56, (const uint8_t *)batch + 64, bytes - 64);
        assert_true(batch->checksum == XXH3_64bits(plain, bytes - 8));
        free(plain);
        free(batch);
    }
}

/* Fewer bytes than the header says: refused, without a look beyond them. */
static void test_batch_short_buffers(void **state)
{
    struct kvt_batch_header *batch = make_batch(70, 1);
    static const size_t lengths[] = {0, 1, 8, 63, 64, 191, 192, 4095, 4096, 8192, 12287};

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(lengths); i++) {
        struct kvt_batch_header *cut = malloc(lengths[i] ? lengths[i] : 1);

        assert_non_null(cut);
        memcpy(cut, batch, lengths[i]);
        assert_int_equal(
            kvt_batch_header_check(cut, lengths[i], SEGMENT, GENERATION, 1, SEGMENT_PAGES),
            KVT_E_CORRUPT);
        free(cut);
    }
    free(batch);
}

static void test_batch_place_and_life(void **state)
{
    struct kvt_batch_header *batch = make_batch(3, 1);
    uint32_t bytes = kvt_batch_header_bytes(3);

    (void)state;
#define AT(segment, generation, page, pages) \
    kvt_batch_header_check(batch, bytes, segment, generation, page, pages)
    assert_int_equal(AT(SEGMENT, GENERATION, 1, SEGMENT_PAGES), 0);
    assert_int_equal(AT(SEGMENT + 1, GENERATION, 1, SEGMENT_PAGES), KVT_E_CORRUPT);
    assert_int_equal(AT(SEGMENT, GENERATION + 1, 1, SEGMENT_PAGES), KVT_E_CORRUPT);
    assert_int_equal(AT(SEGMENT, GENERATION - 1, 1, SEGMENT_PAGES), KVT_E_CORRUPT);
    assert_int_equal(AT(SEGMENT, GENERATION, 2, SEGMENT_PAGES), KVT_E_CORRUPT);
    /* 1 header page, 6 pages of records, from page 1 to 7; the trailer needs one more */
    assert_int_equal(AT(SEGMENT, GENERATION, 1, 9), 0);
    assert_int_equal(AT(SEGMENT, GENERATION, 1, 8), KVT_E_CORRUPT);
    assert_int_equal(AT(SEGMENT, GENERATION, 1, 0), KVT_E_CORRUPT);
#undef AT
    free(batch);
}

static void test_batch_fields(void **state)
{
    (void)state;
#define BATCH(change, code)                            \
    do {                                               \
        struct kvt_batch_header *b = make_batch(3, 1); \
        change;                                        \
        kvt_batch_header_finish(b);                    \
        assert_int_equal(check_batch(b, 3), code);     \
        free(b);                                       \
    } while (0)
    BATCH((void)0, 0);
    BATCH(b->previous = 0, 0); /* the chain is recovery's business */
    BATCH(b->version++, KVT_E_NEWER);
    BATCH(b->zero = 1, KVT_E_CORRUPT);
    BATCH(b->header_pages = 0, KVT_E_CORRUPT);
    BATCH(b->header_pages = 2, KVT_E_CORRUPT);
    BATCH(b->pages = 0, KVT_E_CORRUPT);
    BATCH(b->pages = 1, KVT_E_CORRUPT);
    BATCH(b->pages--, KVT_E_CORRUPT);
    BATCH(b->pages++, KVT_E_CORRUPT);
    BATCH(b->pages = UINT32_MAX, KVT_E_CORRUPT);
    BATCH(b->count = 2, KVT_E_CORRUPT); /* the third entry is not padding */
    BATCH(b->count = 4, KVT_E_CORRUPT);
    BATCH(b->entries[0].page--, KVT_E_CORRUPT); /* overlaps the header */
    BATCH(b->entries[1].page++, KVT_E_CORRUPT); /* a gap */
    BATCH(b->entries[1].page--, KVT_E_CORRUPT);
    BATCH(b->entries[2].pages++, KVT_E_CORRUPT);
    BATCH(b->entries[2].pages = 0, KVT_E_CORRUPT);
    BATCH(b->entries[2].pages = UINT32_MAX, KVT_E_CORRUPT);
    BATCH(b->entries[0].page = UINT32_MAX, KVT_E_CORRUPT);
    BATCH(b->entries[1].key.hash_len = 0, KVT_E_CORRUPT);
    BATCH(b->entries[1].parent_len = 1, 0); /* one zero byte: odd, but canonical */
    BATCH(b->entries[1].parent_len = 33, KVT_E_CORRUPT);
    BATCH(b->entries[1].parent[5] = 1, KVT_E_CORRUPT);
#undef BATCH
}

static void test_batch_at_page_zero(void **state)
{
    struct kvt_batch_header *batch = make_batch(1, 0);

    (void)state;
    /* page 0 belongs to the segment header */
    assert_int_equal(kvt_batch_header_check(batch, 4096, SEGMENT, GENERATION, 0, SEGMENT_PAGES),
                     KVT_E_CORRUPT);
    free(batch);
}

static void test_entry_fields(void **state)
{
    struct kvt_entry good = {.key = some_key(1),
                             .page = 10,
                             .pages = 3,
                             .first_pos = 64,
                             .map = KVT_LEVEL_KV8,
                             .parent_len = 32};

    (void)state;
    memset(good.parent, 9, sizeof good.parent);
#define ENTRY(change, code)                                         \
    do {                                                            \
        struct kvt_entry e = good;                                  \
        change;                                                     \
        assert_int_equal(kvt_entry_check(&e, SEGMENT_PAGES), code); \
    } while (0)
    ENTRY((void)0, 0);
    ENTRY(e.key.hash_len = 33, KVT_E_CORRUPT);
    ENTRY(e.key.reserved = 1, KVT_E_CORRUPT);
    ENTRY(e.parent_len = 255, KVT_E_CORRUPT);
    ENTRY(e.map = 0, KVT_E_CORRUPT);
    ENTRY(e.map = 15, 0);
    ENTRY(e.map = 16, KVT_E_CORRUPT);
    ENTRY(e.reserved[0] = 1, KVT_E_CORRUPT);
    ENTRY(e.reserved[1] = 1, KVT_E_CORRUPT);
    ENTRY(e.zero = 1, KVT_E_CORRUPT);
    ENTRY(e.page = 0, KVT_E_CORRUPT);
    ENTRY(e.pages = 0, KVT_E_CORRUPT);
    ENTRY(e.page = SEGMENT_PAGES - 4, 0);
    ENTRY(e.page = SEGMENT_PAGES - 3, KVT_E_CORRUPT);
    ENTRY(e.page = UINT32_MAX, KVT_E_CORRUPT);
    ENTRY(e.pages = UINT32_MAX, KVT_E_CORRUPT);
    ENTRY(e.page = UINT32_MAX - 1; e.pages = 2, KVT_E_CORRUPT);
#undef ENTRY
}

/* C11: wild values under a right checksum never lead outside the buffer. */
static void test_c11_mutated_batches(void **state)
{
    static const uint32_t hurting[] = {
        0, 1, 2, 0x7fffffff, 0x80000000, UINT32_MAX, UINT32_MAX - 1, 65535, 65536, 4096};
    struct kvt_rng rng = {test_seed()};
    struct kvt_batch_header *batch = make_batch(40, 1);
    uint32_t bytes = kvt_batch_header_bytes(40);
    uint8_t *copy = malloc(bytes);
    struct kvt_batch_header *mutant;

    (void)state;
    assert_non_null(copy);
    for (int i = 0; i < 20000; i++) {
        mutant = aligned_alloc(4096, bytes);
        assert_non_null(mutant);
        memcpy(mutant, batch, bytes);
        for (uint64_t n = 1 + kvt_rng_below(&rng, 3); n; n--)
            memcpy((uint8_t *)mutant + 4 * kvt_rng_below(&rng, i % 2 ? 14 : bytes / 4),
                   &hurting[kvt_rng_below(&rng, KVT_ARRAY_LEN(hurting))], 4);
        /* finish() trusts its caller's count: only ours may be checksummed */
        if (kvt_batch_header_bytes(mutant->count) && kvt_batch_header_bytes(mutant->count) <= bytes)
            kvt_batch_header_finish(mutant);
        (void)!kvt_batch_header_check(mutant, bytes, SEGMENT, GENERATION, 1, SEGMENT_PAGES);
        free(mutant);
    }
    free(copy);
    free(batch);
}

static void test_footer(void **state)
{
    struct kvt_entry entries[40];

    (void)state;
    memset(entries, 3, sizeof entries);
    assert_true(kvt_footer_checksum(entries, 40) == XXH3_64bits(entries, sizeof entries));
    assert_true(kvt_footer_checksum(entries, 0) == XXH3_64bits(NULL, 0));
    assert_true(kvt_footer_checksum(entries, 39) != kvt_footer_checksum(entries, 40));
}

static void test_segment_rule(void **state)
{
    static const struct {
        uint64_t cap;
        uint32_t bytes;
    } rules[] = {
        {0, 1u << 20},
        {64ull << 20, 1u << 20},
        {128ull << 20, 2u << 20},
        {(128ull << 20) + 4096 * 63, 2u << 20},
        {(128ull << 20) + 4096 * 64, (2u << 20) + 4096},
        {1ull << 30, 16u << 20},
        {16ull << 30, 256u << 20},
        {7680000000000, 256u << 20},
        {UINT64_MAX, 256u << 20},
    };

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(rules); i++)
        assert_int_equal(kvt_segment_bytes_for(rules[i].cap), rules[i].bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pages),
        cmocka_unit_test(test_superblock_fields),
        cmocka_unit_test(test_segment_fields),
        cmocka_unit_test(test_trailer_fields),
        cmocka_unit_test(test_journal_fields),
        cmocka_unit_test(test_batch_sizes),
        cmocka_unit_test(test_batch_every_bit),
        cmocka_unit_test(test_batch_checksum_definition),
        cmocka_unit_test(test_batch_short_buffers),
        cmocka_unit_test(test_batch_place_and_life),
        cmocka_unit_test(test_batch_fields),
        cmocka_unit_test(test_batch_at_page_zero),
        cmocka_unit_test(test_entry_fields),
        cmocka_unit_test(test_c11_mutated_batches),
        cmocka_unit_test(test_footer),
        cmocka_unit_test(test_segment_rule),
    };

    return cmocka_run_group_tests_name("disk", tests, NULL, NULL);
}
