/* L2 log: a root with very many small records opens quickly, in bounded memory.
 *
 * Method: sealed segments are written by hand (header, footer, trailer; the records themselves are
 * holes) into a real directory, as many as hold 200,000 records of 4 KiB, or 1,000,000 with
 * KVT_TEST_LONG. The open is timed and its memory measured; figures are printed. What the index
 * adds is in test_index (test_c84_million). */
#include <string.h>

#include "support/store_help.h"

#include "base/checked.h"
#include "base/rng.h"
#include "kvtier/error.h"
#include "store/l2.h"
#include "store/l2_survey.h"
#include "support/l2_help.h"
#include "support/memory_help.h"

#define MIB (1ull << 20)

static char dir[256];
static uint64_t wanted;

static struct {
    uint64_t count;
    uint64_t sequence_sum;
    uint32_t bad;
} seen;

static void found(void *ctx, const struct kvt_entry *entry, uint32_t segment, uint64_t generation)
{
    (void)ctx;
    seen.count++;
    seen.sequence_sum += entry->sequence;
    seen.bad += entry->pages != 1 || generation != segment + 1ull;
}

static struct kvt_io *open_io(void)
{
    struct kvt_io_posix_params params = {.path = dir, .threads = 4, .direct = 0};
    struct kvt_io *io = NULL;

    assert_int_equal(kvt_io_posix_new(&params, &io), 0);
    return io;
}

static struct kvt_l2 *open_log(struct kvt_io *io, uint64_t cap)
{
    const struct kvt_l2_params params = {.io = io,
                                         .cap_bytes = cap,
                                         .seed = 5,
                                         .clock = kvt_clock_system(),
                                         .reads_max = 8,
                                         .found = found};
    struct kvt_l2 *l2 = NULL;
    uint64_t next;

    assert_int_equal(kvt_l2_open(&params, &l2, &next), 0);
    assert_true(next > seen.count);
    return l2;
}

static void write_at(struct kvt_io *io, int file, uint64_t page, const void *bytes, size_t len)
{
    assert_int_equal(kvt_io_write_now(io, file, page * KVT_PAGE_BYTES, bytes, len), (int64_t)len);
}

static void make_entries(struct kvt_entry *entries, uint32_t count, uint64_t sequence)
{
    struct kvt_rng rng = {sequence};

    for (uint32_t i = 0; i < count; i++) {
        struct kvt_entry *entry = &entries[i];

        memset(entry, 0, sizeof *entry);
        memset(entry->key.ns, 1, sizeof entry->key.ns);
        for (uint32_t w = 0; w < 4; w++) {
            uint64_t word = kvt_rng_next(&rng);

            memcpy(entry->key.hash + 8 * w, &word, sizeof word);
        }
        entry->key.hash_len = 32;
        entry->sequence = sequence + i;
        entry->checksum = 1;
        entry->page = 1 + i;
        entry->pages = 1;
        entry->map = KVT_LEVEL_KV4;
    }
}

/* One sealed segment, full of records of one page. Returns how many. */
static uint32_t write_segment(struct kvt_io *io, const struct kvt_superblock *superblock,
                              uint32_t number, uint64_t sequence, struct kvt_entry *entries)
{
    uint32_t pages = superblock->segment_bytes / KVT_PAGE_BYTES;
    uint32_t count = pages * 31 / 32 - 3, footer;
    struct kvt_segment_header *header = aligned_alloc(KVT_PAGE_BYTES, KVT_PAGE_BYTES);
    struct kvt_trailer *trailer = aligned_alloc(KVT_PAGE_BYTES, KVT_PAGE_BYTES);
    size_t padded = kvt_round_up(count * sizeof *entries, KVT_PAGE_BYTES);
    char name[KVT_IO_NAME_MAX];
    int file;

    kvt_l2_segment_name(number, name);
    file = io->ops->open(io, name, KVT_IO_OPEN_CREATE);
    assert_true(file >= 0);
    assert_int_equal(io->ops->truncate(io, file, superblock->segment_bytes), 0);
    memset(header, 0, sizeof *header);
    header->magic = KVT_SEGMENT_MAGIC;
    header->segment = number;
    memcpy(header->root_id, superblock->root_id, sizeof header->root_id);
    header->generation = number + 1;
    header->segment_bytes = superblock->segment_bytes;
    kvt_segment_header_finish(header);
    write_at(io, file, 0, header, sizeof *header);

    memset(entries, 0, padded);
    make_entries(entries, count, sequence);
    footer = pages - 1 - (uint32_t)(padded / KVT_PAGE_BYTES);
    assert_true(1 + count <= footer);
    write_at(io, file, footer, entries, padded);
    memset(trailer, 0, sizeof *trailer);
    trailer->magic = KVT_TRAILER_MAGIC;
    trailer->segment = number;
    trailer->generation = number + 1;
    trailer->footer_page = footer;
    trailer->footer_count = count;
    trailer->footer_checksum = kvt_footer_checksum(entries, count);
    kvt_trailer_finish(trailer);
    write_at(io, file, pages - 1, trailer, sizeof *trailer);
    io->ops->close(io, file);
    free(header);
    free(trailer);
    return count;
}

static uint64_t fill(struct kvt_io *io)
{
    struct kvt_l2_survey survey;
    struct kvt_entry *entries = aligned_alloc(KVT_PAGE_BYTES, 32 * MIB);
    uint64_t count = 0;

    assert_int_equal(kvt_l2_survey(io, &survey), 0);
    for (uint32_t i = 0; count < wanted && i < 63; i++)
        count += write_segment(io, &survey.superblock, i, 1 + count, entries);
    kvt_l2_survey_free(&survey);
    free(entries);
    return count;
}

static int setup(void **state)
{
    (void)state;
    l2_dir_make(dir);
    wanted = getenv("KVT_TEST_LONG") ? 1000000 : 200000;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    l2_dir_remove(dir);
    return 0;
}

static int count_name(void *arg, const char *name)
{
    (void)name;
    ++*(uint32_t *)arg;
    return 0;
}

static void test_c84_many_records_open_quickly(void **state)
{
    uint64_t cap = wanted > 200000 ? 5ull << 30 : 1ull << 30, count, before, after;
    struct kvt_clock clock = kvt_clock_system();
    struct kvt_io *io = open_io();
    struct kvt_l2 *l2 = open_log(io, cap);
    uint32_t files = 0;
    int64_t start, elapsed;

    (void)state;
    kvt_l2_close(l2);
    count = fill(io);
    assert_true(count >= wanted);
    memset(&seen, 0, sizeof seen);
    memory_small_pages();
    before = memory_resident_bytes();
    start = kvt_clock_now(&clock);
    l2 = open_log(io, cap);
    elapsed = kvt_clock_now(&clock) - start;
    after = memory_resident_bytes();
    assert_int_equal(seen.count, count);
    assert_int_equal(seen.bad, 0);
    assert_int_equal(seen.sequence_sum, count * (count + 1) / 2);
    print_message("           %llu records: open %.1f ms, %.1f MiB more resident\n",
                  (unsigned long long)count, (double)elapsed / 1e6,
                  after > before ? (double)(after - before) / (double)MIB : 0.0);
    assert_true(elapsed < 10000000000);
    assert_true(after < before + 64 * MIB);
    assert_int_equal(io->ops->list(io, count_name, &files), 0);
    assert_true(files <= 1000); /* C28 */
    kvt_l2_close(l2);
    io->ops->destroy(io);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_c84_many_records_open_quickly, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
