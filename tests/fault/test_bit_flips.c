/* Every bit that rots, every record that lies where another belongs.
 *
 * Goal: no flipped bit of any structure on disk is overlooked, and none costs more than what it
 * hit; a record that was swapped with another, written elsewhere, or is of an earlier version, is a
 * miss. Method: a golden root made by the log; every bit of superblock, segment header, batch
 * header, footer, trailer, journal page and of a record's header, and 100,000 bits of payloads are
 * flipped one at a time (KVT_BIT_FLIPS=n), looked at, and flipped back. Some roots are opened with
 * the bit. KVT_SOAK_SECONDS=n: payload bits for that long. */
#include <string.h>

#include "support/store_help.h"

#include "base/checked.h"
#include "kvtier/error.h"
#include "support/l2_help.h"
#include "support/practice.h"

#define CAP (8u << 20)
#define IDS 120u
#define PAGES 6u

static struct l2_env env, saved;
static struct kvt_io *image;
static struct kvt_rng rng;

static int setup(void **state)
{
    (void)state;
    assert_int_equal(kvt_io_mem_new(64u << 20, &image), 0);
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, image), 0);
    for (uint32_t id = 0; id < IDS; id++)
        assert_int_equal(l2_env_put(&env, id, 1, PAGES), 0);
    assert_int_equal(l2_env_purge_key(&env, IDS - 1), 0);
    assert_int_equal(l2_env_flush(&env), 0);
    l2_env_close(&env);
    saved = env;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    image->ops->destroy(image);
    return 0;
}

/* Pages of a file of `io`; free() them. */
static uint8_t *pages_of(struct kvt_io *io, const char *name, uint64_t page, uint64_t count)
{
    uint8_t *bytes = aligned_alloc(KVT_PAGE_BYTES, count * KVT_PAGE_BYTES);
    int file = io->ops->open(io, name, KVT_IO_OPEN_READ_ONLY);

    assert_non_null(bytes);
    assert_true(file >= 0);
    assert_int_equal(
        kvt_io_read_now(io, file, page * KVT_PAGE_BYTES, bytes, count * KVT_PAGE_BYTES),
        count * KVT_PAGE_BYTES);
    io->ops->close(io, file);
    return bytes;
}

static void set_pages(struct kvt_io *io, const char *name, uint64_t page, const void *bytes,
                      uint64_t count)
{
    int file = io->ops->open(io, name, 0);

    assert_true(file >= 0);
    assert_int_equal(
        kvt_io_write_now(io, file, page * KVT_PAGE_BYTES, bytes, count * KVT_PAGE_BYTES),
        count * KVT_PAGE_BYTES);
    io->ops->close(io, file);
}

static void flip(uint8_t *bytes, uint64_t bit)
{
    bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
}

/* good: says 0 for what is whole. */
static void every_bit(uint8_t *bytes, uint64_t count, int (*good)(const void *bytes))
{
    assert_int_equal(good(bytes), 0);
    for (uint64_t bit = 0; bit < count * 8; bit++) {
        practice_point();
        flip(bytes, bit);
        if (!good(bytes))
            fail_msg("bit %llu is overlooked", (unsigned long long)bit);
        flip(bytes, bit);
        practice_passed();
    }
    assert_int_equal(good(bytes), 0);
    free(bytes);
}

static uint32_t copy_number, journal_pages;
static struct kvt_trailer *trailer;

static int superblock_good(const void *bytes)
{
    return kvt_superblock_check(bytes, copy_number);
}

static int header_good(const void *bytes)
{
    const struct kvt_segment_header *header = bytes;

    return kvt_segment_header_check(header, 0, header->root_id);
}

static int batch_good(const void *bytes)
{
    return kvt_batch_header_check(bytes, KVT_PAGE_BYTES, 0, 1, 1, 256);
}

static int trailer_good(const void *bytes)
{
    return kvt_trailer_check(bytes, 0, 1, 256);
}

static int footer_good(const void *bytes)
{
    return kvt_footer_checksum(bytes, trailer->footer_count) != trailer->footer_checksum;
}

static int journal_good(const void *bytes)
{
    return kvt_journal_page_check(bytes, 0, journal_pages);
}

static void test_every_bit_of_every_structure(void **state)
{
    struct kvt_journal_page *page;

    (void)state;
    for (copy_number = 0; copy_number < 2; copy_number++)
        every_bit(pages_of(image, "superblock", copy_number, 1), KVT_PAGE_BYTES, superblock_good);
    every_bit(pages_of(image, "seg-00000000", 0, 1), KVT_PAGE_BYTES, header_good);
    every_bit(pages_of(image, "seg-00000000", 1, 1), KVT_PAGE_BYTES, batch_good);
    trailer = (void *)pages_of(image, "seg-00000000", 255, 1);
    every_bit(pages_of(image, "seg-00000000", trailer->footer_page, 255 - trailer->footer_page),
              trailer->footer_count * sizeof(struct kvt_entry), footer_good);
    every_bit((uint8_t *)trailer, KVT_PAGE_BYTES, trailer_good);
    page = (void *)pages_of(image, "journal", 0, 1);
    journal_pages = (uint32_t)page->epoch;
    every_bit((uint8_t *)page, KVT_PAGE_BYTES, journal_good);
}

/* The root opens whatever bit of a superblock copy is wrong, and has everything. */
static void test_roots_with_a_bit_of_the_superblock(void **state)
{
    struct kvt_io *io = l2_clone(image);

    (void)state;
    for (uint64_t bit = 0; bit < 2u * KVT_PAGE_BYTES * 8; bit += 97) {
        uint8_t *page = pages_of(image, "superblock", bit / (KVT_PAGE_BYTES * 8), 1);

        practice_point();
        flip(page, bit % (KVT_PAGE_BYTES * 8));
        set_pages(io, "superblock", bit / (KVT_PAGE_BYTES * 8), page, 1);
        free(page);
        env = saved;
        assert_int_equal(l2_env_open(&env, io), 0);
        assert_int_equal(l2_env_count(&env), IDS - 1);
        l2_env_close(&env);
        io->ops->destroy(io);
        io = l2_clone(image);
        practice_passed();
    }
    io->ops->destroy(io);
}

static void segment_name(uint32_t segment, char name[KVT_IO_NAME_MAX])
{
    snprintf(name, KVT_IO_NAME_MAX, "seg-%08x", segment);
}

/* One bit of a record on the medium: it is a miss, and exact again when it is flipped back. */
static void flip_record(struct kvt_io *io, uint32_t id, uint64_t bit)
{
    const struct l2_entry *at = &env.index[id];
    uint64_t page = at->where.page + bit / (KVT_PAGE_BYTES * 8);
    char name[KVT_IO_NAME_MAX];
    uint8_t *bytes;

    practice_point();
    segment_name(at->where.segment, name);
    bytes = pages_of(io, name, page, 1);
    flip(bytes, bit % (KVT_PAGE_BYTES * 8));
    set_pages(io, name, page, bytes, 1);
    if (l2_env_get(&env, id) == 0)
        fail_msg("bit %llu of record %u is overlooked", (unsigned long long)bit, id);
    flip(bytes, bit % (KVT_PAGE_BYTES * 8));
    set_pages(io, name, page, bytes, 1);
    free(bytes);
    practice_passed();
}

static void test_every_bit_of_a_record_header_and_many_of_payloads(void **state)
{
    const char *text = getenv("KVT_BIT_FLIPS");
    uint64_t count = text ? strtoull(text, NULL, 0) : 100000;
    struct kvt_io *io = l2_clone(image);

    (void)state;
    env = saved;
    assert_int_equal(l2_env_open(&env, io), 0);
    for (uint64_t bit = 0; bit < sizeof(struct kvt_record_header) * 8; bit++)
        flip_record(io, 7, bit);
    for (uint64_t i = 0; i < count || practice_goes_on(); i++)
        flip_record(io, (uint32_t)kvt_rng_below(&rng, IDS - 1),
                    kvt_rng_below(&rng, PAGES * KVT_PAGE_BYTES * 8));
    assert_int_equal(l2_env_verify(&env), IDS - 1);
    l2_env_close(&env);
    io->ops->destroy(io);
}

/* Put the bytes of one place over another; `id` is what the log believes to be there. */
static void copy_over(struct kvt_io *io, const struct l2_entry *from, const struct l2_entry *to)
{
    char source[KVT_IO_NAME_MAX], target[KVT_IO_NAME_MAX];
    uint8_t *bytes;

    segment_name(from->where.segment, source);
    segment_name(to->where.segment, target);
    bytes = pages_of(io, source, from->where.page, PAGES);
    set_pages(io, target, to->where.page, bytes, PAGES);
    free(bytes);
}

/* Swapped, misdirected by a page or to another place, and stale (an earlier version of the same
 * block): never other bytes than those of the newest version. */
static void test_records_in_each_others_place(void **state)
{
    struct kvt_io *io = l2_clone(image);

    (void)state;
    env = saved;
    assert_int_equal(l2_env_open(&env, io), 0);
    for (uint32_t id = 0; id < 60; id++) {
        struct l2_entry old = env.index[id];
        uint32_t other = 60 + id % 58;
        uint8_t *kept;
        char name[KVT_IO_NAME_MAX];

        segment_name(old.where.segment, name);
        kept = pages_of(io, name, old.where.page, PAGES);
        practice_point();
        copy_over(io, &env.index[other], &old); /* misdirected: the other's lies here */
        assert_int_not_equal(l2_env_get(&env, id), 0);
        assert_int_equal(l2_env_get(&env, other), 0);
        practice_passed();
        practice_point();
        set_pages(io, name, old.where.page + 1, kept, PAGES - 1); /* a page further on */
        assert_int_not_equal(l2_env_get(&env, id), 0);
        set_pages(io, name, old.where.page, kept, PAGES);
        assert_int_equal(l2_env_get(&env, id), 0);
        practice_passed();
        practice_point();
        assert_int_equal(l2_env_put(&env, id, 2, PAGES), 0);
        assert_int_equal(l2_env_get(&env, id), 0);
        copy_over(io, &old, &env.index[id]); /* stale */
        assert_int_not_equal(l2_env_get(&env, id), 0);
        practice_passed();
        free(kept);
    }
    l2_env_close(&env);
    io->ops->destroy(io);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_bit_of_every_structure),
        cmocka_unit_test(test_roots_with_a_bit_of_the_superblock),
        cmocka_unit_test(test_every_bit_of_a_record_header_and_many_of_payloads),
        cmocka_unit_test(test_records_in_each_others_place),
    };

    rng.state = test_seed();
    practice_begin("bit_flips");
    return cmocka_run_group_tests(tests, setup, teardown);
}
