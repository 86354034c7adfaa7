/* L2 log: what an open makes of a directory.
 *
 * Goal: a root is recognised by any sign of one and by nothing less; damage costs the records it
 * hit and no others; other people's files and newer formats are not touched; the cap may change.
 * Method: roots in memory, damaged by hand (files cut, bytes flipped, structures rewritten), opened
 * again; every read is compared with what was put (support/l2_help.h). */
#include <errno.h>
#include <string.h>

#include "support/store_help.h"

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/l2_layout.h"
#include "store/l2_survey.h"
#include "support/l2_help.h"

#define CAP (8u << 20)
#define MIB (1ull << 20)

static struct l2_env env;
static struct kvt_rng rng;

static struct kvt_io *mem(void)
{
    struct kvt_io *io = NULL;

    assert_int_equal(kvt_io_mem_new(1u << 30, &io), 0);
    return io;
}

static void destroy(struct kvt_io *io)
{
    io->ops->destroy(io);
}

static void *page_of(struct kvt_io *io, const char *name, uint64_t page)
{
    void *bytes = aligned_alloc(KVT_PAGE_BYTES, KVT_PAGE_BYTES);
    int file = io->ops->open(io, name, KVT_IO_OPEN_READ_ONLY);

    assert_true(file >= 0);
    memset(bytes, 0, KVT_PAGE_BYTES);
    assert_true(kvt_io_read_now(io, file, page * KVT_PAGE_BYTES, bytes, KVT_PAGE_BYTES) >= 0);
    io->ops->close(io, file);
    return bytes;
}

static void set_page(struct kvt_io *io, const char *name, uint64_t page, const void *bytes)
{
    int file = io->ops->open(io, name, KVT_IO_OPEN_CREATE);

    assert_true(file >= 0);
    assert_int_equal(kvt_io_write_now(io, file, page * KVT_PAGE_BYTES, bytes, KVT_PAGE_BYTES),
                     KVT_PAGE_BYTES);
    io->ops->close(io, file);
}

static void fill_page(struct kvt_io *io, const char *name, uint64_t page, uint8_t value)
{
    void *bytes = aligned_alloc(KVT_PAGE_BYTES, KVT_PAGE_BYTES);

    memset(bytes, value, KVT_PAGE_BYTES);
    set_page(io, name, page, bytes);
    free(bytes);
}

static void cut(struct kvt_io *io, const char *name, uint64_t bytes)
{
    int file = io->ops->open(io, name, 0);

    assert_true(file >= 0);
    assert_int_equal(io->ops->truncate(io, file, bytes), 0);
    io->ops->close(io, file);
}

static uint64_t size_of(struct kvt_io *io, const char *name)
{
    int file = io->ops->open(io, name, KVT_IO_OPEN_READ_ONLY);
    int64_t bytes = file < 0 ? -1 : io->ops->size(io, file);

    assert_true(bytes >= 0);
    io->ops->close(io, file);
    return (uint64_t)bytes;
}

struct names {
    char name[64][KVT_IO_NAME_MAX];
    uint32_t count;
};

static int add_name(void *arg, const char *name)
{
    struct names *names = arg;

    assert_true(names->count < 64);
    memcpy(names->name[names->count++], name, strlen(name) + 1);
    return 0;
}

static void list(struct kvt_io *io, struct names *names)
{
    names->count = 0;
    assert_int_equal(io->ops->list(io, add_name, names), 0);
}

static bool exists(struct kvt_io *io, const char *name)
{
    struct names names;

    list(io, &names);
    for (uint32_t i = 0; i < names.count; i++)
        if (!strcmp(names.name[i], name))
            return true;
    return false;
}

/* XOR over names and bytes of all files: has anything changed? */
static uint64_t digest(struct kvt_io *io)
{
    struct names names;
    uint64_t sum = 0;

    list(io, &names);
    for (uint32_t i = 0; i < names.count; i++) {
        uint64_t bytes = size_of(io, names.name[i]), h = bytes * 0x9e3779b97f4a7c15u;

        for (uint64_t page = 0; page * KVT_PAGE_BYTES < bytes; page++) {
            uint64_t *words = page_of(io, names.name[i], page);

            for (uint32_t w = 0; w < KVT_PAGE_BYTES / 8; w++)
                h = (h ^ words[w]) * 0x100000001b3u + 1;
            free(words);
        }
        for (const char *p = names.name[i]; *p; p++)
            h = h * 31 + (uint8_t)*p;
        sum ^= h;
    }
    return sum;
}

/* A root with `count` records of 10 pages (23 fill a segment), closed. */
static struct kvt_io *root_with(uint32_t count)
{
    struct kvt_io *io = mem();

    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(l2_env_put(&env, i, 1, 10), 0);
    assert_int_equal(env.evictions, 0);
    l2_env_close(&env);
    return io;
}

static uint32_t reopen(struct kvt_io *io)
{
    uint32_t count;

    assert_int_equal(l2_env_open(&env, io), 0);
    count = l2_env_verify(&env); /* no read gives other bytes: asserted inside */
    return count;
}

/* Open, count what is exact, put something new, close, open again: nothing is lost on the way. */
static uint32_t survivors(struct kvt_io *io)
{
    uint32_t count = reopen(io);

    assert_int_equal(l2_env_put(&env, 4000, 77, 3), 0);
    l2_env_close(&env);
    assert_true(reopen(io) >= count); /* the new one, and what was there; a segment may have gone */
    assert_int_equal(l2_env_get(&env, 4000), 0);
    l2_env_close(&env);
    env.index[4000].present = false;
    return count;
}

/* C4: each store file cut to 0, 1, 511, 4095 and all but one byte. */
static void test_c4_cut_files(void **state)
{
    struct kvt_io *io = root_with(100);
    struct names names;

    (void)state;
    list(io, &names);
    assert_true(names.count >= 6);
    for (uint32_t i = 0; i < names.count; i++) {
        uint64_t full = size_of(io, names.name[i]);
        uint64_t lengths[] = {0, 1, 511, 4095, full - 1};
        bool segment = !strncmp(names.name[i], "seg-", 4);

        for (uint32_t k = 0; k < KVT_ARRAY_LEN(lengths); k++) {
            struct kvt_io *copy = l2_clone(io);
            uint32_t left;

            cut(copy, names.name[i], lengths[k]);
            left = survivors(copy);
            assert_true(segment ? left >= 100 - 23 : left == 100);
            if (segment && lengths[k] == full - 1)
                assert_int_equal(left, 100); /* the trailer only: its batches are walked */
            destroy(copy);
        }
    }
    destroy(io);
}

static void test_c4_an_empty_root_opens_and_closes(void **state)
{
    struct kvt_io *io = mem();

    (void)state;
    l2_env_init(&env, CAP);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(reopen(io), 0);
        assert_int_equal(l2_env_flush(&env), 0);
        l2_env_close(&env);
    }
    assert_int_equal(l2_files_count(io), 2); /* superblock and journal */
    destroy(io);
}

/* C4: any one sign is enough. */
static void test_c4_ours_by_any_sign(void **state)
{
    struct kvt_io *io = root_with(60), *copy;

    (void)state;
    for (uint64_t bad = 0; bad < 2; bad++) { /* one superblock copy */
        copy = l2_clone(io);
        fill_page(copy, "superblock", bad, 0xee);
        assert_int_equal(survivors(copy), 60);
        destroy(copy);
    }
    copy = l2_clone(io); /* both: rebuilt from the segments, with a warning */
    fill_page(copy, "superblock", 0, 0xee);
    fill_page(copy, "superblock", 1, 0xee);
    env.warnings = 0;
    assert_int_equal(survivors(copy), 60);
    assert_true(env.warnings > 0);
    destroy(copy);
    copy = l2_clone(io); /* no file at all */
    assert_int_equal(copy->ops->unlink(copy, "superblock"), 0);
    assert_int_equal(survivors(copy), 60);
    destroy(copy);
    copy = l2_clone(io); /* the journal alone */
    assert_int_equal(copy->ops->unlink(copy, "superblock"), 0);
    for (uint32_t i = 0; i < 3; i++) {
        char name[KVT_IO_NAME_MAX];

        kvt_l2_segment_name(i, name);
        assert_int_equal(copy->ops->unlink(copy, name), 0);
    }
    assert_int_equal(kvt_l2_probe(copy), 0);
    assert_int_equal(survivors(copy), 0);
    destroy(copy);
    /* superblock and journal gone: ours, but a purge may have been in that journal: all misses */
    copy = l2_clone(io);
    assert_int_equal(copy->ops->unlink(copy, "superblock"), 0);
    assert_int_equal(copy->ops->unlink(copy, "journal"), 0);
    assert_int_equal(kvt_l2_probe(copy), 0);
    assert_int_equal(survivors(copy), 0);
    destroy(copy);
    destroy(io);
}

/* C12: unfinished files of ours are reclaimed, others stay. */
static void test_c12_temporary_and_foreign_files(void **state)
{
    struct kvt_io *io = root_with(10);
    struct kvt_l2_stats before, after;

    (void)state;
    assert_int_equal(reopen(io), 10);
    kvt_l2_stats(env.l2, &before);
    l2_env_close(&env);
    fill_page(io, "journal.tmp", 0, 1);
    fill_page(io, "seg-00000005.tmp", 3, 2);
    fill_page(io, "stats.tmp", 0, 3);
    fill_page(io, "notes.txt", 0, 4);
    fill_page(io, "notes.tmp", 0, 5); /* not a name of ours */
    fill_page(io, "seg-5", 0, 6);
    assert_int_equal(reopen(io), 10);
    kvt_l2_stats(env.l2, &after);
    assert_int_equal(after.bytes_used, before.bytes_used);
    l2_env_close(&env);
    assert_false(exists(io, "journal.tmp") || exists(io, "seg-00000005.tmp") ||
                 exists(io, "stats.tmp"));
    assert_true(exists(io, "notes.txt") && exists(io, "notes.tmp") && exists(io, "seg-5"));
    assert_int_equal(size_of(io, "notes.txt"), KVT_PAGE_BYTES);
    destroy(io);
}

static void test_foreign_directories_are_refused(void **state)
{
    static const char *const names[] = {
        "notes.txt", "superblock", "seg-00000000",    "journal",
        "lock",      "stats",      "journal.tmp",     "superblock.tmp",
        "stats.tmp", "lock.tmp",   "seg-00000001.tmp"};

    (void)state;
    l2_env_init(&env, CAP);
    for (uint32_t i = 0; i < KVT_ARRAY_LEN(names); i++) {
        struct kvt_io *io = mem();
        uint64_t before;

        fill_page(io, names[i], 0, 0x5a);
        before = digest(io);
        assert_int_equal(kvt_l2_probe(io), KVT_E_NOT_OURS);
        assert_int_equal(l2_env_open(&env, io), KVT_E_NOT_OURS);
        assert_true(digest(io) == before);
        destroy(io);
    }
    /* empty files with our names, and a lock: an open that was interrupted at once */
    struct kvt_io *io = mem();
    int file = io->ops->open(io, "superblock", KVT_IO_OPEN_CREATE);

    io->ops->close(io, file);
    fill_page(io, "journal.tmp", 0, 0x5a);
    assert_int_equal(kvt_l2_probe(io), KVT_E_NOT_OURS); /* we lock before we write */
    fill_page(io, "lock", 0, 0x31);
    assert_int_equal(kvt_l2_probe(io), 1);
    assert_int_equal(reopen(io), 0);
    l2_env_close(&env);
    destroy(io);
}

/* C24: a newer version of any structure that decides: nothing is touched. */
static void test_c24_newer_version_is_left_alone(void **state)
{
    struct kvt_io *io = root_with(30), *copy = l2_clone(io);
    struct kvt_superblock *superblock;
    struct kvt_segment_header *header;
    uint64_t before;

    (void)state;
    for (uint32_t i = 0; i < 2; i++) {
        superblock = page_of(copy, "superblock", i);
        superblock->version = KVT_DISK_VERSION + 1;
        kvt_superblock_finish(superblock);
        set_page(copy, "superblock", i, superblock);
        free(superblock);
        before = digest(copy);
        assert_int_equal(l2_env_open(&env, copy), KVT_E_NEWER);
        assert_int_equal(kvt_l2_probe(copy), KVT_E_NEWER);
        assert_true(digest(copy) == before);
    }
    destroy(copy);
    copy = l2_clone(io);
    struct kvt_journal_page *journal = aligned_alloc(KVT_PAGE_BYTES, sizeof *journal);
    assert_non_null(journal);
    memset(journal, 0, sizeof *journal);
    journal->magic = KVT_JOURNAL_MAGIC;
    journal->version = KVT_DISK_VERSION + 1;
    kvt_journal_page_finish(journal);
    set_page(copy, "journal", 0, journal);
    free(journal);
    before = digest(copy);
    assert_int_equal(l2_env_open(&env, copy), KVT_E_NEWER);
    assert_int_equal(kvt_l2_probe(copy), KVT_E_NEWER);
    assert_true(digest(copy) == before);
    destroy(copy);
    copy = l2_clone(io);
    header = page_of(copy, "seg-00000001", 0);
    header->version = KVT_DISK_VERSION + 7;
    kvt_segment_header_finish(header);
    set_page(copy, "seg-00000001", 0, header);
    free(header);
    before = digest(copy);
    assert_int_equal(l2_env_open(&env, copy), KVT_E_NEWER);
    assert_true(digest(copy) == before);
    destroy(copy);
    destroy(io);
}

/* The life before: its trailer, put back into the recycled segment, is not believed. */
static void test_an_earlier_life_does_not_come_back(void **state)
{
    struct kvt_io *io = root_with(50), *copy;
    uint32_t segment = env.index[0].where.segment, last = 255;
    char name[KVT_IO_NAME_MAX];
    void *trailer, *footer;

    (void)state;
    kvt_l2_segment_name(segment, name);
    trailer = page_of(io, name, last);
    footer = page_of(io, name, last - 1);
    assert_int_equal(((struct kvt_trailer *)trailer)->magic, KVT_TRAILER_MAGIC);
    assert_int_equal(reopen(io), 50);
    for (uint32_t i = 100; env.index[0].present; i++) /* until that segment is in its next life */
        assert_int_equal(l2_env_put(&env, i, 2, 10), 0);
    for (uint32_t i = 1000; i < 1026; i++)
        assert_int_equal(l2_env_put(&env, i, 2, 10), 0);
    l2_env_close(&env);
    copy = l2_clone(io);
    set_page(copy, name, last - 1, footer);
    set_page(copy, name, last, trailer);
    assert_int_equal(l2_env_open(&env, copy), 0);
    assert_false(env.index[0].present);
    assert_int_equal(l2_env_count(&env), l2_env_verify(&env));
    l2_env_close(&env);
    destroy(copy);
    free(trailer);
    free(footer);
    destroy(io);
}

/* A batch of the same life that does not follow from the one before is stale. */
static void test_a_stale_batch_is_not_walked(void **state)
{
    struct kvt_io *io = mem(), *longer;
    struct kvt_l2_where where;
    char name[KVT_IO_NAME_MAX];

    (void)state;
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    assert_int_equal(l2_env_put(&env, 1, 1, 2), 0);
    longer = l2_clone(io); /* here the first life goes on: two more batches */
    assert_int_equal(l2_env_put(&env, 2, 1, 2), 0);
    assert_int_equal(l2_env_put(&env, 3, 1, 2), 0);
    where = env.index[3].where;
    l2_env_close(&env);
    /* the second batch is lost in a crash, another one is written in its place, and what followed
     * the lost one is still there */
    struct kvt_l2_where second = env.index[2].where;
    void *stale[3];

    kvt_l2_segment_name(where.segment, name);
    for (uint32_t i = 0; i < 3; i++)
        stale[i] = page_of(io, name, where.page - 1 + i);
    assert_int_equal(l2_env_open(&env, longer), 0);
    assert_int_equal(l2_env_count(&env), 1);
    assert_int_equal(l2_env_put(&env, 9, 1, 2), 0);
    assert_int_equal(env.index[9].where.page, second.page);
    l2_env_close(&env);
    for (uint32_t i = 0; i < 3; i++) {
        set_page(longer, name, where.page - 1 + i, stale[i]);
        free(stale[i]);
    }
    assert_int_equal(l2_env_open(&env, longer), 0);
    assert_true(env.index[1].present && env.index[9].present && !env.index[3].present);
    l2_env_close(&env);
    destroy(longer);
    destroy(io);
}

/* A segment under another number, or of another root, is not ours to read. */
static void test_misplaced_segments(void **state)
{
    struct kvt_io *io = root_with(60), *other, *copy = l2_clone(io);
    uint32_t inside = 0;

    (void)state;
    for (uint32_t i = 0; i < 60; i++)
        inside += env.index[i].where.segment == 0;
    assert_int_equal(copy->ops->rename(copy, "seg-00000000", "seg-00000006"), 0);
    assert_int_equal(survivors(copy), 60 - inside);
    destroy(copy);

    other = mem();
    env.params.seed = 99;
    assert_int_equal(l2_env_open(&env, other), 0);
    assert_int_equal(l2_env_put(&env, 200, 1, 10), 0);
    l2_env_close(&env);
    copy = l2_clone(io);
    for (uint64_t page = 0; page < 256; page++) {
        void *bytes = page_of(other, "seg-00000000", page);

        set_page(copy, "seg-00000000", page, bytes);
        free(bytes);
    }
    assert_int_equal(l2_env_open(&env, copy), 0);
    assert_false(env.index[200].present);
    l2_env_close(&env);
    destroy(copy);
    destroy(other);
    destroy(io);
}

/* Bytes flipped anywhere: opens, and every record is exact or a miss. */
static void test_random_damage(void **state)
{
    struct kvt_io *io = root_with(100);
    struct names names;
    uint32_t lost = 0;

    (void)state;
    assert_int_equal(reopen(io), 100);
    assert_int_equal(l2_env_purge_key(&env, 3), 0);
    l2_env_close(&env);
    list(io, &names);
    for (uint32_t round = 0; round < 150; round++) {
        struct kvt_io *copy = l2_clone(io);
        uint32_t left;

        for (uint32_t hits = 0; hits < 4; hits++) {
            const char *name = names.name[kvt_rng_below(&rng, names.count)];
            uint64_t pages = size_of(copy, name) / KVT_PAGE_BYTES;
            /* structures live at the ends and in batch headers: prefer the first pages */
            uint64_t page =
                kvt_rng_below(&rng, kvt_rng_below(&rng, 2) ? KVT_MIN(pages, 3u) : pages);
            uint8_t *bytes = page_of(copy, name, page);

            for (uint32_t n = 1 + (uint32_t)kvt_rng_below(&rng, 64); n; n--)
                bytes[kvt_rng_below(&rng, KVT_PAGE_BYTES)] ^=
                    (uint8_t)(1 + kvt_rng_below(&rng, 255));
            set_page(copy, name, page, bytes);
            free(bytes);
        }
        left = reopen(copy);
        assert_false(env.index[3].present); /* purged: whatever was damaged */
        l2_env_close(&env);
        lost += 99 - left;
        destroy(copy);
    }
    assert_true(lost > 0);
    destroy(io);
}

/* The footer of a sealed segment is damaged: the batches say the same, and it is sealed again. */
static void test_damaged_footer_is_walked_and_healed(void **state)
{
    struct kvt_io *io = root_with(50);

    (void)state;
    fill_page(io, "seg-00000000", 254, 0x77);
    assert_int_equal(reopen(io), 50);
    l2_env_close(&env);
    struct kvt_trailer *trailer = page_of(io, "seg-00000000", 255);
    struct kvt_entry *entries = page_of(io, "seg-00000000", trailer->footer_page);

    assert_int_equal(kvt_footer_checksum(entries, trailer->footer_count), trailer->footer_checksum);
    free(entries);
    free(trailer);
    assert_int_equal(reopen(io), 50);
    l2_env_close(&env);
    destroy(io);
}

static void test_smaller_cap_drops_the_oldest(void **state)
{
    struct kvt_io *io = mem();

    (void)state;
    l2_env_init(&env, 32 * MIB);
    assert_int_equal(l2_env_open(&env, io), 0);
    for (uint32_t i = 0; i < 700; i++) /* 28 of 31 segments */
        assert_int_equal(l2_env_put(&env, i, 1, 10), 0);
    l2_env_close(&env);
    assert_true(l2_files_bytes(io) > 16 * MIB);
    env.cap = 16 * MIB;
    assert_int_equal(l2_env_open(&env, io), 0);
    assert_true(l2_files_bytes(io) <= 16 * MIB);
    assert_false(env.index[0].present);
    for (uint32_t i = 700 - 300; i < 700; i++)
        assert_int_equal(l2_env_get(&env, i), 0);
    for (uint32_t i = 700; i < 1200; i++) { /* and the smaller cap holds from then on */
        assert_int_equal(l2_env_put(&env, i, 1, 10), 0);
        assert_true(l2_files_bytes(io) <= 16 * MIB);
    }
    l2_env_close(&env);
    env.cap = 64 * MIB; /* larger again: room is used */
    assert_true(reopen(io) >= 300);
    env.evictions = 0;
    for (uint32_t i = 0; i < 700; i++)
        assert_int_equal(l2_env_put(&env, i, 5, 10), 0);
    assert_int_equal(env.evictions, 0);
    l2_env_close(&env);
    destroy(io);
}

/* Segments too large for the new cap: the root starts anew instead of exceeding it. */
static void test_much_smaller_cap_starts_anew(void **state)
{
    struct kvt_io *io = mem();

    (void)state;
    l2_env_init(&env, 512 * MIB); /* segments of 8 MiB */
    assert_int_equal(l2_env_open(&env, io), 0);
    assert_int_equal(kvt_l2_segment_bytes(env.l2), 8 * MIB);
    for (uint32_t i = 0; i < 20; i++)
        assert_int_equal(l2_env_put(&env, i, 1, 100), 0);
    l2_env_close(&env);
    env.cap = 10 * MIB;
    assert_int_equal(l2_env_open(&env, io), 0);
    assert_int_equal(kvt_l2_segment_bytes(env.l2), MIB);
    assert_true(l2_files_bytes(io) <= env.cap);
    assert_int_equal(l2_env_count(&env), 0);
    for (uint32_t i = 0; i < 300; i++)
        assert_int_equal(l2_env_put(&env, i, 2, 10), 0);
    l2_env_close(&env);
    assert_true(reopen(io) > 150);
    l2_env_close(&env);
    destroy(io);
}

/* An unused root takes the segment size of its new cap. */
static void test_unused_root_follows_the_cap(void **state)
{
    struct kvt_io *io = root_with(0);

    (void)state;
    env.cap = 256 * MIB;
    assert_int_equal(l2_env_open(&env, io), 0);
    assert_int_equal(kvt_l2_segment_bytes(env.l2), 4 * MIB);
    l2_env_close(&env);
    destroy(io);
}

/* C28: few files whatever the cap; and the division never exceeds it. */
static void test_c28_layout(void **state)
{
    (void)state;
    for (uint64_t cap = 8 * MIB; cap <= 32ull << 40; cap += cap / 7) {
        struct kvt_l2_layout layout = kvt_l2_layout_for(cap, 0);
        uint64_t segments = (uint64_t)layout.segment_count * layout.segment_bytes;
        uint64_t journal = layout.journal_pages_max * 3ull / 2 * KVT_PAGE_BYTES;

        assert_true(layout.segment_count >= 7);
        assert_true(segments + journal + 19 * KVT_PAGE_BYTES <= cap);
        assert_true(segments >= cap - cap / 7 - MIB || layout.segment_count == 1u << 17);
        if (cap <= 16ull << 30)
            assert_true(layout.segment_count <= 64);
        if (cap <= 250ull << 30)
            assert_true(layout.segment_count <= 1000);
    }
}

static void test_read_only_changes_nothing(void **state)
{
    struct kvt_io *io = root_with(60);
    uint32_t id = 1;
    uint64_t before;

    (void)state;
    fill_page(io, "seg-00000000", 255, 0x11); /* something to heal, if it dared */
    fill_page(io, "journal.tmp", 0, 0x22);
    before = digest(io);
    env.params.read_only = 1;
    assert_int_equal(reopen(io), 60);
    assert_int_equal(l2_env_queue(&env, &id, 1, 1, 1), KVT_E_READ_ONLY);
    assert_int_equal(l2_env_purge_key(&env, 1), KVT_E_READ_ONLY);
    kvt_l2_erase(env.l2, env.index[1].where, 10);
    l2_env_close(&env);
    assert_true(digest(io) == before);
    destroy(io);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_c4_cut_files),
        cmocka_unit_test(test_c4_an_empty_root_opens_and_closes),
        cmocka_unit_test(test_c4_ours_by_any_sign),
        cmocka_unit_test(test_c12_temporary_and_foreign_files),
        cmocka_unit_test(test_foreign_directories_are_refused),
        cmocka_unit_test(test_c24_newer_version_is_left_alone),
        cmocka_unit_test(test_an_earlier_life_does_not_come_back),
        cmocka_unit_test(test_a_stale_batch_is_not_walked),
        cmocka_unit_test(test_misplaced_segments),
        cmocka_unit_test(test_random_damage),
        cmocka_unit_test(test_damaged_footer_is_walked_and_healed),
        cmocka_unit_test(test_smaller_cap_drops_the_oldest),
        cmocka_unit_test(test_much_smaller_cap_starts_anew),
        cmocka_unit_test(test_unused_root_follows_the_cap),
        cmocka_unit_test(test_c28_layout),
        cmocka_unit_test(test_read_only_changes_nothing),
    };

    rng.state = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
