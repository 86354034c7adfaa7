/* fsck over memory: what is healthy has no problem, each kind of damage has one that names its
 * file, and nothing is written.
 *
 * Method: a root with sealed, open and recycled segments and purges; one thing is damaged in a
 * copy; the findings are compared. tests/unit/test_l2_crash.c checks that crashes leave no
 * problems. */
#include <string.h>

#include "support/store_help.h"

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/fsck.h"
#include "support/l2_help.h"

#define CAP (8u << 20)

static struct l2_env env;

static struct {
    struct kvt_fsck_report report;
    char problems[32][256];
    char notes[32][256];
    uint32_t problem_count, note_count;
    uint64_t last_done, last_total;
    uint64_t stop_at;
} seen;

static void found(void *ctx, bool problem, const char *text)
{
    (void)ctx;
    if (problem && seen.problem_count < 32)
        snprintf(seen.problems[seen.problem_count++], 256, "%s", text);
    if (!problem && seen.note_count < 32)
        snprintf(seen.notes[seen.note_count++], 256, "%s", text);
}

static int progress(void *ctx, uint64_t done, uint64_t total)
{
    (void)ctx;
    assert_true(done >= seen.last_done && done <= total);
    seen.last_done = done;
    seen.last_total = total;
    return seen.stop_at && done >= seen.stop_at;
}

static int check_with(struct kvt_io *io, bool quick, uint64_t stop_at)
{
    struct kvt_fsck_params params = {
        .io = io, .quick = quick, .found = found, .progress = progress};

    memset(&seen, 0, sizeof seen);
    seen.stop_at = stop_at;
    return kvt_fsck(&params, &seen.report);
}

static void check(struct kvt_io *io)
{
    assert_int_equal(check_with(io, false, 0), 0);
    assert_int_equal(KVT_MIN(seen.report.problems, 32), seen.problem_count);
}

static void page_io(struct kvt_io *io, const char *name, uint64_t page, void *bytes, bool write)
{
    int file = io->ops->open(io, name, write ? KVT_IO_OPEN_CREATE : KVT_IO_OPEN_READ_ONLY);

    assert_true(file >= 0);
    if (write)
        assert_int_equal(kvt_io_write_now(io, file, page * 4096, bytes, 4096), 4096);
    else
        assert_int_equal(kvt_io_read_now(io, file, page * 4096, bytes, 4096), 4096);
    io->ops->close(io, file);
}

static void flip(struct kvt_io *io, const char *name, uint64_t page, uint32_t byte)
{
    uint8_t *bytes = aligned_alloc(4096, 4096);

    page_io(io, name, page, bytes, false);
    bytes[byte] ^= 0x10;
    page_io(io, name, page, bytes, true);
    free(bytes);
}

static struct kvt_io *healthy;
static char first[KVT_IO_NAME_MAX]; /* the segment of record 201, sealed */

static int setup(void **state)
{
    (void)state;
    assert_int_equal(kvt_io_mem_new(1u << 30, &healthy), 0);
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, healthy), 0);
    for (uint32_t i = 0; i < 300; i++) /* goes round twice */
        assert_int_equal(l2_env_put(&env, i, 1, 10), 0);
    for (uint32_t i = 300; i < 310; i++)
        assert_int_equal(l2_env_put(&env, i % 305, 2, 10), 0); /* five keys twice */
    assert_int_equal(l2_env_purge_key(&env, 299), 0);
    assert_int_equal(l2_env_purge_key(&env, 200), 0);
    for (int i = 0; i < 50; i++)
        l2_env_turn(&env);
    assert_true(env.index[201].present);
    snprintf(first, sizeof first, "seg-%08x", (unsigned)env.index[201].where.segment);
    l2_env_close(&env);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    healthy->ops->destroy(healthy);
    return 0;
}

static struct kvt_io *copy_of_healthy(void)
{
    struct kvt_io *copy = NULL;

    assert_int_equal(kvt_io_mem_clone(healthy, &copy), 0);
    return copy;
}

static void destroy(struct kvt_io *io)
{
    io->ops->destroy(io);
}

static bool mentions(char (*list)[256], uint32_t count, const char *a, const char *b)
{
    for (uint32_t i = 0; i < count; i++)
        if (strstr(list[i], a) && strstr(list[i], b))
            return true;
    return false;
}

#define problem(a, b) mentions(seen.problems, seen.problem_count, a, b)
#define note(a, b) mentions(seen.notes, seen.note_count, a, b)

static void test_healthy_root(void **state)
{
    uint32_t count = l2_env_count(&env);

    (void)state;
    check(healthy);
    assert_int_equal(seen.problem_count, 0);
    assert_int_equal(seen.report.records, count);
    assert_int_equal(seen.report.bytes, count * 40960ull);
    assert_int_equal(seen.report.purged, 2);
    assert_int_equal(seen.report.superseded, 0);
    assert_true(seen.report.segments >= 4 && seen.report.segments <= 7);
    assert_int_equal(seen.report.file_bytes, l2_files_bytes(healthy));
    assert_int_equal(seen.report.cap_bytes, CAP);
    assert_int_equal(seen.last_done, seen.last_total);
}

static void test_older_versions_are_counted(void **state)
{
    struct kvt_io *io = copy_of_healthy();

    (void)state;
    assert_int_equal(l2_env_open(&env, io), 0);
    uint32_t before = l2_env_count(&env);
    for (uint32_t version = 3; version < 6; version++)
        assert_int_equal(l2_env_put(&env, 250, version, 1), 0);
    l2_env_close(&env);
    check(io);
    assert_int_equal(seen.problem_count, 0);
    assert_int_equal(seen.report.records, before);
    assert_int_equal(seen.report.superseded, 3);
    destroy(io);
}

static void test_empty_and_foreign(void **state)
{
    struct kvt_io *io = NULL;
    uint8_t *bytes = aligned_alloc(4096, 4096);

    (void)state;
    assert_int_equal(kvt_io_mem_new(1u << 20, &io), 0);
    assert_int_equal(check_with(io, false, 0), 1);
    memset(bytes, 3, 4096);
    page_io(io, "notes.txt", 0, bytes, true);
    assert_int_equal(check_with(io, false, 0), KVT_E_NOT_OURS);
    destroy(io);
    io = copy_of_healthy();
    page_io(io, "notes.txt", 0, bytes, true);
    page_io(io, "journal.tmp", 0, bytes, true);
    check(io);
    assert_int_equal(seen.problem_count, 0);
    assert_true(note("notes.txt", "not a file of ours") && note("journal.tmp", "interrupted"));
    destroy(io);
    free(bytes);
}

static void test_damaged_record(void **state)
{
    struct kvt_io *io = copy_of_healthy();
    uint32_t count;

    (void)state;
    check(io);
    count = (uint32_t)seen.report.records;
    flip(io, first, env.index[201].where.page + 3, 100);
    check(io);
    assert_int_equal(seen.problem_count, 1);
    assert_true(problem(first, "record at page"));
    assert_int_equal(seen.report.records, count - 1);
    assert_int_equal(check_with(io, true, 0), 0); /* quick does not look there */
    assert_int_equal(seen.problem_count, 0);
    destroy(io);
}

static void test_damaged_structures(void **state)
{
    struct kvt_io *io = copy_of_healthy();
    uint32_t inside = 0;

    (void)state;
    flip(io, first, 0, 2000);
    check(io);
    assert_true(problem(first, "header is damaged"));
    destroy(io);

    io = copy_of_healthy();
    flip(io, first, 255, 30);
    check(io);
    assert_int_equal(seen.problem_count, 0);
    assert_true(note(first, "trailer"));
    destroy(io);

    io = copy_of_healthy();
    flip(io, first, 254, 30);
    check(io);
    assert_true(note(first, "footer"));
    destroy(io);

    io = copy_of_healthy(); /* a batch header of a sealed segment: the footer has the rest */
    flip(io, first, 1, 70);
    check(io);
    for (uint32_t i = 0; i < seen.note_count; i++)
        inside += strstr(seen.notes[i], "known by the footer only") != NULL;
    assert_int_equal(inside, 1);
    destroy(io);

    io = copy_of_healthy(); /* header and footer of the first batch disagree, both valid */
    uint8_t *bytes = aligned_alloc(4096, 4096);
    struct kvt_batch_header *batch = (void *)bytes;

    page_io(io, first, 1, bytes, false);
    batch->entries[0].first_pos ^= 5;
    kvt_batch_header_finish(batch);
    page_io(io, first, 1, bytes, true);
    check(io);
    assert_true(problem(first, "are in no batch header"));
    free(bytes);
    destroy(io);
}

static void test_superblock_and_journal(void **state)
{
    struct kvt_io *io = copy_of_healthy();

    (void)state;
    flip(io, "superblock", 1, 50);
    check(io);
    assert_int_equal(seen.problem_count, 0);
    assert_true(note("superblock", "copy 1"));
    flip(io, "superblock", 0, 50);
    check(io);
    assert_true(problem("superblock", "neither copy"));
    assert_true(seen.report.records > 50);
    assert_int_equal(seen.report.cap_bytes, 0);
    destroy(io);

    io = copy_of_healthy();
    flip(io, "journal", 0, 50);
    check(io);
    assert_true(problem("journal", "damaged"));
    assert_int_equal(seen.report.records, 0);
    destroy(io);

    io = copy_of_healthy();
    assert_int_equal(io->ops->unlink(io, "journal"), 0);
    check(io);
    assert_true(problem("journal", "damaged"));
    destroy(io);
}

static void test_sizes_and_places(void **state)
{
    struct kvt_io *io = copy_of_healthy();
    uint8_t *bytes = aligned_alloc(4096, 4096);
    struct kvt_superblock *superblock = (void *)bytes;
    int file;

    (void)state;
    file = io->ops->open(io, first, 0);
    assert_int_equal(io->ops->truncate(io, file, 600000), 0);
    io->ops->close(io, file);
    check(io);
    assert_true(problem(first, "should be 1048576"));
    assert_true(problem(first, "record at page") || seen.note_count > 0);
    destroy(io);

    io = copy_of_healthy();
    assert_int_equal(io->ops->rename(io, first, "seg-00000040"), 0);
    check(io);
    assert_true(problem("seg-00000040", "header is damaged"));
    destroy(io);

    io = copy_of_healthy(); /* counters that promise less than what is there */
    for (uint32_t copy = 0; copy < 2; copy++) {
        page_io(io, "superblock", copy, bytes, false);
        superblock->next_generation = 3;
        superblock->next_sequence = 100;
        superblock->cap_bytes = 2 << 20;
        kvt_superblock_finish(superblock);
        page_io(io, "superblock", copy, bytes, true);
    }
    check(io);
    assert_true(problem("generation", "never given out"));
    assert_true(problem("sequence", "never given out"));
    assert_true(problem("all files together", "more than the cap"));
    free(bytes);
    destroy(io);
}

static void test_newer_is_refused(void **state)
{
    struct kvt_io *io = copy_of_healthy();
    uint8_t *bytes = aligned_alloc(4096, 4096);
    struct kvt_superblock *superblock = (void *)bytes;

    (void)state;
    page_io(io, "superblock", 0, bytes, false);
    superblock->version++;
    kvt_superblock_finish(superblock);
    page_io(io, "superblock", 0, bytes, true);
    assert_int_equal(check_with(io, false, 0), KVT_E_NEWER);
    free(bytes);
    destroy(io);
}

static void test_can_be_interrupted(void **state)
{
    (void)state;
    assert_int_equal(check_with(healthy, false, 1 << 20), KVT_E_CANCELED);
    assert_true(seen.last_done < seen.last_total);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_healthy_root),
        cmocka_unit_test(test_older_versions_are_counted),
        cmocka_unit_test(test_empty_and_foreign),
        cmocka_unit_test(test_damaged_record),
        cmocka_unit_test(test_damaged_structures),
        cmocka_unit_test(test_superblock_and_journal),
        cmocka_unit_test(test_sizes_and_places),
        cmocka_unit_test(test_newer_is_refused),
        cmocka_unit_test(test_can_be_interrupted),
    };

    (void)test_seed();
    return cmocka_run_group_tests(tests, setup, teardown);
}
