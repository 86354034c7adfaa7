/* Failures from the field about damaged stores: C2 C4 C8 C10 C12 C24, and the sentences for roots
 * that cannot be used.
 *
 * Method: a root is filled and closed, its files are damaged from outside, and it is opened again.
 * OK-or-MISS everywhere: support/rig.h asserts exact bytes for every block that loads, and
 * untouched pages for every block that does not.
 */
#include "support/rig.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "format/disk.h"

static struct rig rig;

static void init_disk(const char *config, const char *cap)
{
    struct rig_shape shape = rig_shape_small(128);
    rig_init(&rig, &shape, config, cap);
}

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

/* Store n blocks as chains of one, so that each can be lost alone. */
static void put_alone(uint64_t first, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(rig_store(&rig, first + i, 1, 0, NULL), 1);
}

static uint32_t get_alone(uint64_t first, uint32_t n)
{
    uint32_t exact = 0;
    for (uint32_t i = 0; i < n; i++)
        exact += (uint32_t)rig_load(&rig, first + i, 1, NULL);
    return exact;
}

typedef int (*file_fn)(void *arg, const char *path, const char *name);

/* Call fn for each file of the root; returns the sum of its results. */
static int each_file(const char *dir, file_fn fn, void *arg)
{
    struct dirent **names;
    int count = scandir(dir, &names, NULL, alphasort), sum = 0;
    assert_true(count >= 0);
    for (int i = 0; i < count; i++) {
        char path[512];
        snprintf(path, sizeof(path), "%s/%s", dir, names[i]->d_name);
        if (names[i]->d_name[0] != '.')
            sum += fn(arg, path, names[i]->d_name);
        free(names[i]);
    }
    free(names);
    return sum;
}

/* What to do to the records of blocks [first, first + count): flip a bit, or write zeros. */
struct damage {
    uint64_t first;
    uint32_t count;
    bool zero;
    struct kvt_rng rng;
};

static int damage_file(void *arg, const char *path, const char *name)
{
    struct damage *damage = arg;
    struct kvt_record_header header;
    struct stat st;
    int hit = 0;
    if (strncmp(name, "seg-", 4) != 0)
        return 0;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(fstat(fd, &st), 0);
    for (off_t at = 0; at + 4096 <= st.st_size; at += 4096) {
        assert_int_equal(pread(fd, &header, sizeof(header), at), sizeof(header));
        if (header.magic != KVT_RECORD_MAGIC || header.record_bytes > 1 << 20)
            continue;
        for (uint32_t i = 0; i < damage->count; i++) {
            struct kvt_key key = rig_key(damage->first + i);
            if (memcmp(header.key.hash, key.hash, 32) != 0)
                continue;
            uint8_t bytes[64] = {0};
            off_t spot = at + (off_t)sizeof(header) +
                         (off_t)kvt_rng_below(&damage->rng, header.payload_bytes);
            if (damage->zero)
                spot = at;
            else if (pread(fd, bytes, 1, spot) == 1)
                bytes[0] ^= (uint8_t)(1u << kvt_rng_below(&damage->rng, 8));
            size_t len = damage->zero ? sizeof(bytes) : 1;
            assert_int_equal(pwrite(fd, bytes, len, spot), (ssize_t)len);
            hit++;
        }
    }
    assert_int_equal(fsync(fd), 0);
    close(fd);
    return hit;
}

static void test_c2_flipped_payload_bits_are_misses(void **state)
{
    struct damage damage = {.first = 41, .count = 20, .rng = {rig_seed()}};
    (void)state;
    init_disk("dram=4MiB", "32MiB");
    rig_open(&rig);
    put_alone(1, 100);
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig_close(&rig);
    assert_int_equal(each_file(rig.dir, damage_file, &damage), 20);
    rig_open(&rig);
    assert_int_equal(get_alone(41, 20), 0);
    assert_int_equal(get_alone(1, 40) + get_alone(61, 40), 80);
    assert_int_equal(rig_stat(&rig, "verify.checksum_fail"), 20);
    assert_int_equal(get_alone(41, 20), 0);
    assert_int_equal(rig_stat(&rig, "verify.checksum_fail"), 20); /* dropped, not read again */
    put_alone(41, 20);
    assert_int_equal(get_alone(1, 100), 100);
}

/* C10: rig_load() poisons pages with 0xa5 and asserts that a failed block leaves them so. */
static void test_c10_a_corrupt_block_leaves_the_page_alone(void **state)
{
    struct damage damage = {.first = 5, .count = 1, .rng = {rig_seed()}};
    int32_t status;
    (void)state;
    init_disk("dram=0,staging=1MiB", "32MiB");
    rig_open(&rig);
    put_alone(1, 10);
    assert_int_equal(kvt_flush(rig.cache), 0);
    assert_int_equal(each_file(rig.dir, damage_file, &damage), 1);
    assert_int_equal(rig_load(&rig, 5, 1, &status), 0);
    assert_true(status == KVT_E_CORRUPT || status == KVT_E_MISS);
    assert_true(rig_poisoned(&rig, 0, 0xa5));
    assert_int_equal(rig_load(&rig, 6, 1, NULL), 1); /* the next good one, into the same page */
}

static void test_c8_a_record_removed_behind_the_index(void **state)
{
    struct damage damage = {.first = 3, .count = 1, .zero = true, .rng = {rig_seed()}};
    (void)state;
    init_disk("dram=0,staging=1MiB", "32MiB");
    rig_open(&rig);
    put_alone(1, 10);
    assert_int_equal(kvt_flush(rig.cache), 0);
    assert_int_equal(each_file(rig.dir, damage_file, &damage), 1);
    uint64_t tries = rig_stat(&rig, "verify.checksum_fail");
    assert_int_equal(rig_load(&rig, 3, 1, NULL), 0);
    tries = rig_stat(&rig, "verify.checksum_fail") - tries;
    assert_true(tries == 1 || tries == 2); /* and not again and again */
    if (rig_lookup(&rig, 3, 1) != 0)       /* two attempts at most */
        assert_int_equal(rig_load(&rig, 3, 1, NULL), 0);
    assert_int_equal(rig_lookup(&rig, 3, 1), 0);
    put_alone(3, 1);
    assert_int_equal(rig_lookup(&rig, 3, 1), 1);
    assert_int_equal(get_alone(1, 10), 10);
}

/* ---- what stands in a record --------------------------------------------------------------- */

/* The entries that recovery reads name the same parents. */
static void check_entries(const struct kvt_batch_header *batch)
{
    for (uint32_t i = 0; i < batch->count && i < 31; i++) { /* those on the first page */
        const struct kvt_entry *entry = &batch->entries[i];
        uint64_t number = entry->first_pos / 16;
        struct kvt_key key = rig_key(number), parent = rig_key(number - 1);
        if (memcmp(entry->key.hash, key.hash, 32) != 0)
            continue;
        assert_int_equal(entry->parent_len, number ? 32 : 0);
        if (number > 0)
            assert_memory_equal(entry->parent, parent.hash, 32);
    }
}

static int check_records(void *arg, const char *path, const char *name)
{
    static _Alignas(8) uint8_t record[1 << 16];
    struct kvt_record_header header;
    struct stat st;
    int found = 0;
    if (strncmp(name, "seg-", 4) != 0)
        return 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(fstat(fd, &st), 0);
    for (off_t at = 0; at + 4096 <= st.st_size; at += 4096) {
        assert_int_equal(pread(fd, record, 4096, at), 4096);
        memcpy(&header, record, sizeof(header));
        if (((const struct kvt_batch_header *)(const void *)record)->magic == KVT_BATCH_MAGIC)
            check_entries((const struct kvt_batch_header *)(const void *)record);
        if (header.magic != KVT_RECORD_MAGIC || header.record_bytes > sizeof(record))
            continue;
        assert_int_equal(pread(fd, record, header.record_bytes, at), header.record_bytes);
        assert_int_equal(kvt_record_verify(record, header.record_bytes, NULL, 0), 0);
        assert_memory_equal(header.key.ns, kvt_ns_id(rig.ns), KVT_NS_BYTES);
        assert_int_equal(header.first_pos % 16, 0);
        uint64_t number = header.first_pos / 16; /* the chain of block numbers 0, 1, ... */
        struct kvt_key key = rig_key(number), parent = rig_key(number - 1);
        if (memcmp(header.key.hash, key.hash, 32) != 0)
            continue; /* one of those purged before */
        assert_int_equal(header.parent_len, number ? 32 : 0);
        if (number > 0)
            assert_memory_equal(header.parent, parent.hash, 32);
        assert_int_equal(header.map, number ? KVT_LEVEL_KV8 : KVT_LEVEL_RAW);
        assert_int_equal(header.record_bytes, kvt_ns_record_bytes(rig.ns, 0, header.map));
        assert_int_equal(header.payload_bytes, kvt_payload_bytes(&rig.layout, 0, header.map));
        assert_true(header.sequence > 0);
        for (uint32_t i = (uint32_t)sizeof(header) + header.payload_bytes; i < header.record_bytes;
             i++)
            assert_int_equal(record[i], 0);
        ((bool *)arg)[number] = true;
        found++;
    }
    close(fd);
    return found;
}

/* Store blocks [from, to) of the chain at kv8. */
static void put_chain(uint32_t from, uint32_t to)
{
    struct kvt_key keys[64], parent = rig_key((uint64_t)from - 1);
    uint32_t ids[64];
    struct kvt_store_opts opts = {.struct_size = sizeof(opts),
                                  .first_pos = from * 16,
                                  .parent = from ? &parent : NULL,
                                  .level = KVT_LEVEL_KV8};
    struct kvt_req *req;
    for (uint32_t i = from; i < to; i++) {
        keys[i - from] = rig_key(i);
        ids[i - from] = i;
        rig_fill(&rig, i, 0xffff); /* so that an unwritten padding byte would show */
        rig_fill_smooth(&rig, i, i);
    }
    assert_int_equal(kvt_store(rig.ns, rig.pool, keys, ids, to - from, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    for (uint32_t i = 0; i < to - from; i++)
        assert_int_equal(kvt_req_status(req, NULL)[i], 0);
    kvt_req_free(req);
}

static void records_say_whose_they_are_and_end_in_zeros(void **state)
{
    bool seen[60] = {false};
    (void)state;
    init_disk("dram=768KiB,staging=64KiB", "32MiB");
    rig_open(&rig);
    for (uint64_t seed = 5000; seed < 5100; seed += 20) { /* slots that held other bytes */
        assert_int_equal(rig_store(&rig, seed, 20, 0, NULL), 20);
        assert_int_equal(kvt_purge(rig.ns, NULL, 0), 20);
    }
    put_chain(0, 30);
    put_chain(30, 60);
    assert_int_equal(kvt_flush(rig.cache), 0);
    /* purged records may still stand in the files: only the chain's are looked at */
    assert_true(each_file(rig.dir, check_records, seen) >= 60);
    for (int i = 0; i < 60; i++)
        assert_true(seen[i]);
}

/* ---- truncation ---------------------------------------------------------------------------- */

static int copy_file(void *arg, const char *path, const char *name)
{
    char to[512], buffer[65536];
    size_t n;
    snprintf(to, sizeof(to), "%s/%s", (const char *)arg, name);
    FILE *in = fopen(path, "rb"), *out = fopen(to, "wb");
    assert_non_null(in);
    assert_non_null(out);
    while ((n = fread(buffer, 1, sizeof(buffer), in)) > 0)
        assert_int_equal(fwrite(buffer, 1, n, out), n);
    fclose(in);
    fclose(out);
    return 1;
}

static int truncate_and_open(void *arg, const char *path, const char *name)
{
    static const long sizes[] = {0, 1, 511, 4095, -1};
    char original[128], victim[512];
    struct stat st;
    (void)arg;
    if (strcmp(name, "lock") == 0)
        return 0;
    assert_int_equal(stat(path, &st), 0);
    snprintf(original, sizeof(original), "%s", rig.dir);
    for (size_t i = 0; i < KVT_ARRAY_LEN(sizes); i++) {
        off_t size = sizes[i] < 0 ? st.st_size - 1 : sizes[i];
        if (size < 0 || size > st.st_size)
            continue;
        rig_dir_make(rig.dir, sizeof(rig.dir));
        (void)each_file(original, copy_file, rig.dir);
        snprintf(victim, sizeof(victim), "%s/%s", rig.dir, name);
        assert_int_equal(truncate(victim, size), 0);
        rig_open(&rig);
        char state_text[512];
        rig_stat_text(&rig, "disk.state", state_text, sizeof(state_text));
        if (strcmp(state_text, "ok") != 0)
            fail_msg("%s cut to %ld: %s", name, (long)size, state_text);
        uint32_t exact = get_alone(1, 50);
        if (strncmp(name, "seg-", 4) != 0 && exact != 50)
            fail_msg("%s cut to %ld: %u of 50 blocks left", name, (long)size, exact);
        put_alone(1, 50);
        assert_int_equal(get_alone(1, 50), 50);
        rig_close(&rig);
        rig_dir_remove(rig.dir);
    }
    snprintf(rig.dir, sizeof(rig.dir), "%s", original);
    return 1;
}

static void test_c4_truncated_files_open_and_stay_right(void **state)
{
    (void)state;
    init_disk("dram=4MiB", "16MiB");
    rig_open(&rig);
    assert_int_equal(rig_store(&rig, 1000, 0, 0, NULL), 0); /* an empty set saves and loads */
    assert_int_equal(rig_load(&rig, 1000, 0, NULL), 0);
    put_alone(1, 50);
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig_close(&rig);
    assert_true(each_file(rig.dir, truncate_and_open, NULL) >= 2);
}

static void write_text(const char *name, const char *text, size_t bytes)
{
    char path[512];
    snprintf(path, sizeof(path), "%s/%s", rig.dir, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, bytes, file), bytes);
    fclose(file);
}

static bool exists(const char *name)
{
    char path[512];
    snprintf(path, sizeof(path), "%s/%s", rig.dir, name);
    return access(path, F_OK) == 0;
}

static void test_c12_unfinished_segments_are_reclaimed_and_strangers_left(void **state)
{
    static char garbage[3 * 4096];
    (void)state;
    init_disk("dram=4MiB", "16MiB");
    rig_open(&rig);
    put_alone(1, 20);
    rig_close(&rig);
    memset(garbage, 0x5a, sizeof(garbage));
    /* what a crash while making a segment leaves: no header, half a header, garbage */
    write_text("seg-0000000d", garbage, 0);
    write_text("seg-0000000e", garbage, 100);
    write_text("seg-0000000f", garbage, sizeof(garbage));
    write_text("notes.txt", "mine", 4);
    rig_open(&rig);
    char state_text[512];
    rig_stat_text(&rig, "disk.state", state_text, sizeof(state_text));
    assert_string_equal(state_text, "ok");
    assert_int_equal(rig_stat(&rig, "disk.blocks"), 20);
    assert_int_equal(get_alone(1, 20), 20);
    for (uint64_t seed = 100; seed < 3000; seed += 100) { /* 35 MB through a cap of 16 MiB */
        assert_int_equal(rig_store(&rig, seed, 100, 0, NULL), 100);
        assert_int_equal(kvt_flush(rig.cache), 0);
    }
    assert_true(rig_dir_bytes(rig.dir, NULL) <= 16u << 20);
    assert_true(exists("notes.txt"));
    rig_close(&rig);
    assert_true(exists("notes.txt"));
}

/* ---- roots that cannot be used ------------------------------------------------------------- */

static int make_newer(void *arg, const char *path, const char *name)
{
    struct kvt_superblock superblock;
    (void)arg;
    if (strcmp(name, "superblock") != 0)
        return 0;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    for (uint32_t copy = 0; copy < 2; copy++) {
        off_t at = copy * 4096;
        if (pread(fd, &superblock, sizeof(superblock), at) != (ssize_t)sizeof(superblock))
            break;
        superblock.version = KVT_DISK_VERSION + 1;
        kvt_superblock_finish(&superblock);
        assert_int_equal(pwrite(fd, &superblock, sizeof(superblock), at), sizeof(superblock));
    }
    close(fd);
    return 1;
}

static void check_off(const char *word, int code)
{
    char text[512];
    int32_t status[4];
    rig_open(&rig); /* goes on without it */
    if (rig.warnings != 1)
        fail_msg("%d warnings: %s", rig.warnings, rig.log);
    assert_non_null(strstr(rig.log, rig.dir));
    assert_non_null(strstr(rig.log, word));
    rig_stat_text(&rig, "disk.state", text, sizeof(text));
    assert_non_null(strstr(text, word));
    assert_int_equal(rig_stat(&rig, "disk.roots"), 0);
    assert_int_equal(rig_load(&rig, 1, 4, status), 0);
    assert_int_equal(rig_store(&rig, 1, 4, 0, NULL), 4); /* DRAM serves */
    assert_int_equal(rig_load(&rig, 1, 4, NULL), 4);
    rig_close(&rig);
    snprintf(rig.config, sizeof(rig.config), "dram=4MiB,disk_required=yes");
    assert_int_equal(rig_try_open(&rig), code);
    assert_null(rig.cache);
    assert_non_null(strstr(rig.error, rig.dir));
    assert_non_null(strstr(rig.error, word));
}

static void test_c24_a_newer_format_is_left_alone(void **state)
{
    (void)state;
    init_disk("dram=4MiB", "16MiB");
    rig_open(&rig);
    put_alone(1, 4);
    rig_close(&rig);
    assert_int_equal(each_file(rig.dir, make_newer, NULL), 1);
    unsigned files_before, files_after;
    uint64_t before = rig_dir_bytes(rig.dir, &files_before);
    check_off("newer", KVT_E_NEWER);
    assert_int_equal(rig_dir_bytes(rig.dir, &files_after), before);
    assert_int_equal(files_after, files_before);
}

static void a_directory_of_somebody_else_is_left_alone(void **state)
{
    (void)state;
    init_disk("dram=4MiB", "16MiB");
    write_text("thesis.tex", "mine", 4);
    check_off("not a kvtier store", KVT_E_NOT_OURS);
    assert_true(exists("thesis.tex"));
    assert_false(exists("superblock"));
}

static void a_locked_root_names_the_owner(void **state)
{
    struct rig other;
    char pid[32];
    (void)state;
    init_disk("dram=4MiB", "16MiB");
    rig_init(&other, &rig.shape, "dram=4MiB", NULL);
    snprintf(other.dir, sizeof(other.dir), "%s", rig.dir);
    snprintf(other.disk_cap, sizeof(other.disk_cap), "16MiB");
    rig_open(&other);
    snprintf(pid, sizeof(pid), "process %d", (int)getpid());
    check_off(pid, KVT_E_LOCKED);
    other.dir[0] = '\0';
    rig_free(&other);
    rig_open(&rig); /* free again */
}

static void a_missing_parent_a_file_and_a_small_cap_are_said(void **state)
{
    static const struct {
        const char *suffix, *cap, *word;
        int code;
    } cases[] = {{"/a/b", "16MiB", "parent directory", -ENOENT},
                 {"/file", "16MiB", "not a directory", -ENOTDIR},
                 {"/small", "1MiB", "too small", KVT_E_TOO_SMALL}};
    char base[128];
    (void)state;
    init_disk("dram=4MiB", "16MiB");
    snprintf(base, sizeof(base), "%s", rig.dir);
    write_text("file", "x", 1);
    for (size_t i = 0; i < KVT_ARRAY_LEN(cases); i++) {
        snprintf(rig.config, sizeof(rig.config), "dram=4MiB");
        snprintf(rig.dir, sizeof(rig.dir), "%.100s%s", base, cases[i].suffix);
        snprintf(rig.disk_cap, sizeof(rig.disk_cap), "%s", cases[i].cap);
        check_off(cases[i].word, cases[i].code);
    }
    snprintf(rig.dir, sizeof(rig.dir), "%s", base);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_c2_flipped_payload_bits_are_misses, tear_down),
        cmocka_unit_test_teardown(test_c10_a_corrupt_block_leaves_the_page_alone, tear_down),
        cmocka_unit_test_teardown(test_c8_a_record_removed_behind_the_index, tear_down),
        cmocka_unit_test_teardown(records_say_whose_they_are_and_end_in_zeros, tear_down),
        cmocka_unit_test_teardown(test_c4_truncated_files_open_and_stay_right, tear_down),
        cmocka_unit_test_teardown(test_c12_unfinished_segments_are_reclaimed_and_strangers_left,
                                  tear_down),
        cmocka_unit_test_teardown(test_c24_a_newer_format_is_left_alone, tear_down),
        cmocka_unit_test_teardown(a_directory_of_somebody_else_is_left_alone, tear_down),
        cmocka_unit_test_teardown(a_locked_root_names_the_owner, tear_down),
        cmocka_unit_test_teardown(a_missing_parent_a_file_and_a_small_cap_are_said, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
