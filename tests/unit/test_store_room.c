/* Making room in DRAM for records of mixed lengths, and in the index.
 *
 * Goal:   a raw first block, four times as long as what fills the cache, always gets its slot when
 *         blocks may leave; it costs about its own size in others; nothing that is in use leaves; a
 *         full index gives up the least useful leaf, never a parent or a pinned one.
 * Method: a rig without threads (support/store_rig.h). Chains of a raw block, kv4 blocks and a kv8
 *         window, stored and read again in random order, with the store's invariants checked after
 *         each step; the costs come from its counters. The worst map of the arena is built by hand.
 */
#include "support/store_rig.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "kvtier/error.h"
#include "support/fault_io.h"

enum { KV4 = 2, KV8 = 5, RAW = 6, CLIENT = 1 };

/* pages of a record by map: as they are for large blocks */
static const uint32_t pages[7] = {0, 0, 4, 0, 0, 8, 16};

static uint64_t rng_seed(void)
{
    const char *text = getenv("KVT_TEST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 0) : 20261129;

    printf("           seed %llu\n", (unsigned long long)seed);
    return seed;
}

/* Chain c: raw, `mid` kv4, `window` kv8. Returns how many blocks were stored. */
static uint32_t put_chain(struct rig *rig, uint32_t ns, uint64_t c, uint32_t mid, uint32_t window)
{
    uint64_t numbers[64];
    uint32_t stored;

    for (uint32_t i = 0; i < 1 + mid + window; i++)
        numbers[i] = c * 1000 + i;
    stored = rig_put(rig, ns, numbers, 1, 0, RAW, false, NULL);
    if (stored == 1 && mid)
        stored += rig_put(rig, ns, numbers + 1, mid, numbers[0], KV4, false, NULL);
    if (stored == 1 + mid && window)
        stored += rig_put(rig, ns, numbers + 1 + mid, window, numbers[mid], KV8, false, NULL);
    return stored;
}

static uint32_t get_chain(struct rig *rig, uint32_t ns, uint64_t c, uint32_t n)
{
    uint64_t numbers[64];

    for (uint32_t i = 0; i < n; i++)
        numbers[i] = c * 1000 + i;
    return rig_get(rig, ns, numbers, n, 0, NULL, NULL);
}

static void mixed(uint64_t disk_bytes, uint32_t cache_pages)
{
    struct rig_options options = rig_defaults();
    struct kvt_rng rng = {rng_seed() ^ cache_pages};
    uint32_t cut = 0, sinks_lost = 0, blocks = 0, pages_stored = 0;
    struct kvt_store_stats stats;
    struct rig rig;
    uint32_t ns;

    options.cache_bytes = (uint64_t)cache_pages * 4096;
    options.disk_cap_bytes = disk_bytes;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    for (uint64_t c = 1; c <= 400; c++) {
        uint32_t mid = (uint32_t)(kvt_rng_next(&rng) % 8), window = kvt_rng_next(&rng) % 3;
        uint32_t stored = put_chain(&rig, ns, c, mid, window);

        sinks_lost += stored == 0;
        cut += stored < 1 + mid + window;
        blocks += stored;
        pages_stored += 16 + 4 * mid + 8 * window;
        for (int i = 0; i < 3; i++)
            (void)get_chain(&rig, ns, c - kvt_rng_next(&rng) % KVT_MIN(c, 8u), 4);
        rig_forget_replies(&rig);
    }
    stats = rig_stats(&rig);
    printf("           %u pages, disk %llu MiB: %u blocks stored, %u chains cut, %u first blocks"
           " lost, %llu evicted\n",
           cache_pages, (unsigned long long)disk_bytes >> 20, blocks, cut, sinks_lost,
           (unsigned long long)stats.evict_dram_blocks);
    assert_int_equal(sinks_lost, 0);
    assert_int_equal(cut, 0);
    assert_int_equal(stats.dram_pins, 0);
    rig_close(&rig);
}

static void test_mixed_lengths(void **state)
{
    static const uint32_t sizes[] = {128, 256, 1000};

    (void)state;
    for (unsigned i = 0; i < KVT_ARRAY_LEN(sizes); i++) {
        mixed(0, sizes[i]);
        mixed(64u << 20, sizes[i]);
    }
}

/* The worst map: short records, every second of which was asked for often; then a long one. Its
 * length of the others has to go, hardly more. */
static void test_long_among_short(void **state)
{
    struct rig_options options = rig_defaults();
    struct kvt_store_stats before, after;
    struct rig rig;
    uint64_t number;
    uint32_t ns;

    (void)state;
    options.cache_bytes = 256 * 4 * 4096;
    options.disk_cap_bytes = 0;
    rig_open(&rig, &options, NULL);
    rig.check_each_step = false;
    ns = rig_ns(&rig, 1, pages);
    for (number = 1; number <= 256; number++)
        assert_int_equal(rig_put(&rig, ns, &number, 1, 0, KV4, false, NULL), 1);
    for (int round = 0; round < 3; round++)
        for (number = 1; number <= 256; number += 2)
            assert_int_equal(rig_get(&rig, ns, &number, 1, 0, NULL, NULL), 1);
    for (uint64_t c = 10; c < 20; c++) {
        before = rig_stats(&rig);
        assert_int_equal(put_chain(&rig, ns, c, 0, 0), 1);
        after = rig_stats(&rig);
        printf("           a record of 16 pages pushed out %llu of 4\n",
               (unsigned long long)(after.evict_dram_blocks - before.evict_dram_blocks));
        assert_true(after.evict_dram_blocks - before.evict_dram_blocks <= 4);
        rig_forget_replies(&rig);
    }
    rig_check(&rig);
    rig_close(&rig);
}

/* More blocks than the index has entries: the least used leaves give theirs up; what is pinned and
 * the start of its chain stay, and no block is there without the ones before it. */
static void test_full_index(void **state)
{
    struct rig_options options = rig_defaults();
    struct kvt_store_stats stats;
    uint64_t numbers[8];
    struct rig rig;
    uint32_t ns, whole = 0;

    (void)state;
    options.blocks_max = 64;
    options.cache_bytes = 16 * 4 * 4096;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    for (uint64_t c = 1; c <= 40; c++) {
        for (uint32_t i = 0; i < 8; i++)
            numbers[i] = c * 1000 + i;
        assert_int_equal(rig_put(&rig, ns, numbers, 8, 0, KV4, false, NULL), 8);
        assert_int_equal(rig_flush(&rig), 0);
        if (c == 1)
            assert_int_equal(rig_keys(&rig, KVT_OP_PIN, ns, numbers, 8), 8);
        assert_true(rig_stats(&rig).blocks <= 64);
        rig_forget_replies(&rig);
    }
    stats = rig_stats(&rig);
    printf("           %llu entries given up\n", (unsigned long long)stats.evict_index_blocks);
    assert_true(stats.evict_index_blocks > 100);
    for (uint64_t c = 1; c <= 40; c++) {
        uint8_t tiers[8];
        uint32_t run;

        for (uint32_t i = 0; i < 8; i++)
            numbers[i] = c * 1000 + i;
        run = rig_lookup(&rig, ns, numbers, 8, 0, tiers);
        whole += run == 8;
        if (c == 1)
            assert_int_equal(run, 8);      /* pinned */
        for (uint32_t i = run; i < 8; i++) /* leaf first: the end of a chain went, not its middle */
            assert_int_equal(rig_lookup(&rig, ns, &numbers[i], 1, 0, NULL), 0);
    }
    assert_true(whole >= 2);
    rig_close(&rig);
}

/* A chain that is longer than DRAM, without a disk, committed in no particular order by several
 * hands: what stays is its start. A parent whose child is still being filled is no leaf. */
static void test_parents_of_fills_stay(void **state)
{
    struct rig_options options = rig_defaults();
    struct kvt_rng rng = {rng_seed()};
    struct kvt_alloc_entry entries[4];
    uint64_t numbers[64], other;
    uint32_t ns, done = 0, run;
    struct rig rig;

    (void)state;
    options.cache_bytes = 16 * 4 * 4096;
    options.disk_cap_bytes = 0;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    for (uint64_t i = 0; i < 64; i++)
        numbers[i] = 1000 + i;
    while (done < 64) {
        rig_alloc(&rig, CLIENT, ns, numbers + done, 4, done ? numbers[done - 1] : 0, KV4, false,
                  entries);
        if (entries[0].status)
            break;
        for (uint32_t i = 0; i < 4; i++) { /* the last one ends last: it is filled meanwhile */
            uint32_t at = i < 3 ? (i + (uint32_t)kvt_rng_below(&rng, 3)) % 3 : 3;

            for (uint32_t k = 0; i < 3 && entries[at].status; k++)
                at = k; /* each once */
            if (entries[at].status)
                continue;
            assert_int_equal(
                rig_commit(&rig, CLIENT, &entries[at],
                           rig_fill(&rig, ns, numbers[done + at],
                                    done + at ? numbers[done + at - 1] : 0, KV4, &entries[at])),
                0);
            entries[at].status = KVT_E_EXISTS;
            other = 5000 + done * 4 + i; /* somebody else needs room in between */
            (void)rig_put(&rig, ns, &other, 1, 0, KV4, false, NULL);
        }
        run = rig_lookup(&rig, ns, numbers, 64, 0, NULL);
        assert_true(run > done);
        done += 4;
    }
    run = rig_lookup(&rig, ns, numbers, 64, 0, NULL);
    printf("           %u of a chain of 64 in DRAM for 16\n", run);
    assert_true(run >= 8);
    for (uint32_t i = run; i < 64; i++)
        assert_int_equal(rig_lookup(&rig, ns, &numbers[i], 1, 0, NULL), 0);
    rig_close(&rig);
}

/* The block that is being filled gives its parent free again when the client gives up or dies, and
 * a parent that is on disk as well may leave DRAM for the sake of its child. */
static void test_fills_protect_only_while_they_last(void **state)
{
    struct rig_options options = rig_defaults();
    struct kvt_alloc_entry entry;
    static const uint32_t short_pages[7] = {0, 0, 4};
    uint64_t parent = 1, child = 2, other;
    struct rig rig;
    uint32_t ns;

    (void)state;
    options.cache_bytes = 4 * 4 * 4096;
    options.disk_cap_bytes = 0;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    for (int way = 0; way < 3; way++) {
        assert_int_equal(rig_put(&rig, ns, &parent, 1, 0, KV4, false, NULL), 1);
        rig_alloc(&rig, 7, ns, &child, 1, parent, KV4, false, &entry);
        assert_int_equal(entry.status, 0);
        for (other = 100; other < 110; other++)
            (void)rig_put(&rig, ns, &other, 1, 0, KV4, false, NULL);
        assert_int_equal(rig_lookup(&rig, ns, &parent, 1, 0, NULL), 1);
        if (way == 0)
            rig_abort(&rig, 7, &entry);
        else if (way == 1)
            kvt_store_client_gone(rig.store, 7);
        else
            assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, &child, 1), 0);
        for (other = 200; other < 210; other++)
            (void)rig_put(&rig, ns, &other, 1, 0, KV4, false, NULL);
        assert_int_equal(rig_lookup(&rig, ns, &parent, 1, 0, NULL), 0);
    }
    rig_close(&rig);
    options.cache_bytes = 4 * 4096;   /* one record */
    options.staging_bytes = 4 * 4096; /* too small to give stores a share */
    options.disk_cap_bytes = 64u << 20;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, short_pages);
    for (other = 300; other < 310; other++) {
        assert_int_equal(
            rig_put(&rig, ns, &other, 1, other > 300 ? other - 1 : 0, KV4, false, NULL), 1);
        rig_settle(&rig);
    }
    for (other = 300; other < 310; other++)
        assert_int_equal(rig_lookup(&rig, ns, &other, 1, 0, NULL), 1);
    rig_close(&rig);
}

/* A drive smaller than its cap: the log goes on in the segments that it has, and says that the
 * drive is full, by its number, now and in the file "stats". */
static void test_a_full_drive_is_counted(void **state)
{
    struct rig_options options = rig_defaults();
    struct kvt_store_stats stats;
    struct rig rig;
    uint32_t ns;

    (void)state;
    options.disk_cap_bytes = 64u << 20;
    options.disk_real_bytes = 12u << 20; /* a dozen segments fewer than the cap has */
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    stats = rig_stats(&rig);
    assert_int_equal(stats.enospc, 0);
    for (uint64_t i = 1; i <= 1500; i++) { /* 24 MiB */
        (void)rig_put(&rig, ns, &i, 1, 0, KV4, false, NULL);
        rig_settle(&rig);
    }
    stats = rig_stats(&rig);
    assert_true(stats.evict_disk_segments > 0);
    assert_true(stats.enospc > 0);
    assert_int_equal(stats.disk_dropped_space + stats.disk_dropped_error, 0); /* early recycling */
    assert_in_range(stats.disk_segments, 4, 12);
    assert_true(stats.disk_bytes_used < options.disk_real_bytes);
    rig_reopen(&rig);
    assert_true(rig_filed_stat(&rig, "disk.enospc") >= stats.enospc);
    assert_true(rig_filed_stat(&rig, "disk.segments") > 0);
    rig_close(&rig);
}

/* Records that a write found no room for are drops with their own reason. */
static void test_a_write_without_room_is_a_drop_for_space(void **state)
{
    const struct fault_rule full = {
        .ops = FAULT_WRITE, .name = "seg-", .skip = 3, .action = FAULT_FAIL, .error = ENOSPC};
    struct rig_options options = rig_defaults();
    struct kvt_store_stats stats;
    struct rig rig;
    uint32_t ns;

    (void)state;
    options.disk_cap_bytes = 64u << 20;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    fault_io_rule(rig.io, &full);
    for (uint64_t i = 1; i <= 20; i++) {
        (void)rig_put(&rig, ns, &i, 1, 0, KV4, false, NULL);
        rig_settle(&rig);
    }
    stats = rig_stats(&rig);
    assert_true(stats.disk_dropped_space > 0);
    assert_true(stats.enospc > 0);
    assert_int_equal(stats.disk_dropped_error + stats.write_fail, 0);
    fault_io_clear(rig.io);
    rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mixed_lengths),
        cmocka_unit_test(test_long_among_short),
        cmocka_unit_test(test_full_index),
        cmocka_unit_test(test_parents_of_fills_stay),
        cmocka_unit_test(test_fills_protect_only_while_they_last),
        cmocka_unit_test(test_a_full_drive_is_counted),
        cmocka_unit_test(test_a_write_without_room_is_a_drop_for_space),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
