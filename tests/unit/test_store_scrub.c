/* Scrub: cold records are read back and verified when nobody asks for anything.
 *
 * Goal:   every damaged record that is not in DRAM is found, dropped and counted, and no good one
 * is; the rate holds; a store that is asked for anything is left alone; a record that changed
 *         meanwhile is not judged.
 * Method: the store without threads on a fault injector over memory, its clock moved by the test:
 *         time and bytes are exact. Damage is bits flipped on the medium.
 */
#include "support/store_rig.h"

#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "support/fault_io.h"

#define BLOCKS 40u
#define PAGES 4u /* of a record */
#define RECORD (PAGES * 4096ull)
#define BATCH (512ull << 10) /* read at once */
#define SECOND 1000000000ll
#define RATE (64u << 10) /* four records a second */

static struct rig rig;
static const uint32_t pages[7] = {0, PAGES, PAGES, PAGES, PAGES, PAGES, PAGES};
#define MANY 200u
static uint64_t numbers[MANY];
static uint32_t ns;

/* Chains on disk; after a reopen none of them is in DRAM. */
static void begin_with(uint32_t blocks, uint64_t rate, bool cold)
{
    uint32_t chain = blocks == MANY ? 10 : 1; /* stored together: side by side on disk */
    struct rig_options o = rig_defaults();

    o.scrub_bytes_per_s = rate;
    rig_open(&rig, &o, NULL);
    ns = rig_ns(&rig, 1, pages);
    for (uint32_t i = 0; i < blocks; i++)
        numbers[i] = 1 + i;
    for (uint32_t i = 0; i < blocks; i += chain) {
        rig_hold(&rig, chain > 1); /* the first two writes; the rest of the chain gathers */
        assert_int_equal(rig_put(&rig, ns, &numbers[i], chain, 0, KVT_LEVEL_KV4, 0, NULL), chain);
        if (chain > 1)
            rig_hold(&rig, false);
    }
    assert_int_equal(rig_flush(&rig), 0);
    if (!cold)
        return;
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
}

static void begin(uint64_t rate, bool cold)
{
    begin_with(BLOCKS, rate, cold);
}

/* Flip a bit in `count` records on the medium, one of every `step`. Returns how many were found. */
static uint32_t damage(uint32_t count, uint32_t step, uint64_t byte)
{
    static _Alignas(4096) uint8_t page[4096];
    uint32_t done = 0, seen = 0;

    for (uint32_t segment = 0; segment < 64 && done < count; segment++) {
        char name[32];
        int file;
        int64_t size;

        snprintf(name, sizeof(name), "seg-%08x", segment);
        file = rig.io->ops->open(rig.io, name, KVT_IO_OPEN_READ_ONLY);
        if (file < 0)
            continue;
        size = rig.io->ops->size(rig.io, file);
        for (int64_t at = 0; at + 4096 <= size && done < count; at += 4096) {
            uint32_t magic;

            assert_int_equal(kvt_io_read_now(rig.io, file, (uint64_t)at, page, 4096), 4096);
            memcpy(&magic, page, 4);
            if (magic != KVT_RECORD_MAGIC || seen++ % step)
                continue;
            assert_int_equal(fault_io_corrupt(rig.io, name, (uint64_t)at + byte, 3), 0);
            done++;
        }
        rig.io->ops->close(rig.io, file);
    }
    return done;
}

/* Let time pass in steps of ten milliseconds, as an owner that sleeps would see it. */
static void pass_time(int64_t ns_of_time)
{
    int64_t end = rig.now_ns + ns_of_time;

    while (rig.now_ns < end)
        rig_advance(&rig, KVT_MIN(end - rig.now_ns, 10000000));
}

static uint32_t present(void)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < BLOCKS; i++)
        count += rig_lookup(&rig, ns, &numbers[i], 1, 0, NULL);
    return count;
}

/* ---- */

static void test_good_records_stay(void **state)
{
    struct kvt_store_stats stats;

    (void)state;
    begin(RATE, true);
    pass_time(20 * SECOND);
    stats = rig_stats(&rig);
    assert_int_equal(stats.scrub_records, BLOCKS);
    assert_int_equal(stats.scrub_bytes, BLOCKS * RECORD);
    assert_int_equal(stats.scrub_bad, 0);
    assert_int_equal(stats.scrub_passes, 1);
    assert_int_equal(stats.disk_read_bytes, 0); /* loads have their own counter */
    assert_int_equal(present(), BLOCKS);
    assert_int_equal(rig_get(&rig, ns, numbers, 1, 0, NULL, NULL), 1);
    rig_close(&rig);
}

static void test_damaged_records_go(void **state)
{
    static const uint64_t bytes[] = {1,   9,   40,
                                     121, 200, 4096 * PAGES - 1}; /* headers, payload, end */

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(bytes); i++) {
        struct kvt_store_stats stats;

        begin(RATE, true);
        /* bytes 0 to 3 are how damage() finds them */
        assert_int_equal(damage(8, 5, KVT_MAX(bytes[i], 4u)), 8);
        pass_time(20 * SECOND);
        stats = rig_stats(&rig);
        assert_int_equal(stats.scrub_records, BLOCKS);
        assert_int_equal(stats.scrub_bad, 8);
        assert_int_equal(stats.scrub_read_fail, 0);
        assert_int_equal(stats.checksum_fail, 0); /* no load has met them */
        assert_int_equal(present(), BLOCKS - 8);
        for (uint32_t k = 0; k < BLOCKS; k++)
            (void)rig_get(&rig, ns, &numbers[k], 1, 0, NULL, NULL); /* the others are exact */
        assert_int_equal(rig_stats(&rig).checksum_fail, 0);
        rig_close(&rig);
    }
}

/* What was found stays found: the next open does not bring it back. A newer record of the same key
 * is another matter. */
static void test_damaged_records_stay_away(void **state)
{
    uint32_t gone = 0;

    (void)state;
    begin(RATE, true);
    assert_int_equal(damage(8, 5, 200), 8);
    pass_time(20 * SECOND);
    assert_int_equal(rig_stats(&rig).scrub_bad, 8);
    assert_int_equal(rig_stats(&rig).scrub_buried, 8);
    for (int life = 0; life < 2; life++) {
        rig_crash(&rig);
        ns = rig_ns(&rig, 1, pages);
        assert_int_equal(present(), BLOCKS - 8);
        pass_time(20 * SECOND);
        assert_int_equal(rig_stats(&rig).scrub_bad, 0);
        assert_int_equal(rig_stats(&rig).scrub_buried, 0);
    }
    for (uint32_t i = 0; i < BLOCKS; i++) {
        if (rig_lookup(&rig, ns, &numbers[i], 1, 0, NULL))
            continue;
        gone++;
        assert_int_equal(rig_put(&rig, ns, &numbers[i], 1, 0, KVT_LEVEL_KV4, 0, NULL), 1);
    }
    assert_int_equal(gone, 8);
    assert_int_equal(rig_flush(&rig), 0);
    rig_crash(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(present(), BLOCKS);
    for (uint32_t i = 0; i < BLOCKS; i++)
        assert_int_equal(rig_get(&rig, ns, &numbers[i], 1, 0, NULL, NULL), 1);
    rig_close(&rig);
}

/* Without a header to tell what it was, or without a journal, the index forgets it alone. */
static void test_what_cannot_be_journaled_comes_back(void **state)
{
    static const struct fault_rule no_journal = {
        .ops = FAULT_WRITE | FAULT_OPEN, .name = "journal", .action = FAULT_FAIL, .error = 5};

    (void)state;
    for (int i = 0; i < 2; i++) {
        begin(RATE, true);
        assert_int_equal(damage(8, 5, i ? 200 : 4), 8);
        if (i)
            assert_true(fault_io_rule(rig.io, &no_journal) >= 0);
        pass_time(20 * SECOND);
        assert_int_equal(rig_stats(&rig).scrub_bad, 8);
        assert_int_equal(rig_stats(&rig).scrub_buried, 0);
        assert_int_equal(present(), BLOCKS - 8);
        fault_io_clear(rig.io);
        rig_crash(&rig);
        ns = rig_ns(&rig, 1, pages);
        pass_time(20 * SECOND); /* found again */
        assert_int_equal(rig_stats(&rig).scrub_bad, 8);
        assert_int_equal(present(), BLOCKS - 8);
        rig_close(&rig);
    }
}

/* A drive that rots away does not fill the journal. */
static void test_a_life_buries_so_many(void **state)
{
    uint64_t more[100];
    struct kvt_store_stats stats;

    (void)state;
    begin_with(MANY, 1u << 30, true);
    for (uint32_t i = 0; i < 100; i++)
        more[i] = 1000 + i;
    for (uint32_t i = 0; i < 100; i += 20)
        assert_int_equal(rig_put(&rig, ns, &more[i], 20, 0, KVT_LEVEL_KV4, 0, NULL), 20);
    assert_int_equal(rig_flush(&rig), 0);
    rig_crash(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(damage(MANY + 100, 1, 200), MANY + 100);
    pass_time(5 * SECOND);
    stats = rig_stats(&rig);
    assert_int_equal(stats.scrub_bad, MANY + 100);
    assert_int_equal(stats.blocks, 0);
    assert_true(stats.scrub_buried > 128 && stats.scrub_buried <= 256);
    rig_crash(&rig); /* the next life goes on with the rest */
    ns = rig_ns(&rig, 1, pages);
    assert_true(rig_stats(&rig).recovered_blocks > 0 &&
                rig_stats(&rig).recovered_blocks <= MANY + 100 - stats.scrub_buried);
    pass_time(5 * SECOND);
    assert_true(rig_stats(&rig).scrub_buried > 0);
    assert_int_equal(rig_stats(&rig).blocks, 0);
    rig_close(&rig);
}

static void test_records_that_cannot_be_read(void **state)
{
    struct fault_rule rule = {
        .ops = FAULT_READ, .name = "seg-", .times = 3, .action = FAULT_FAIL, .error = 5};
    struct kvt_store_stats stats;

    (void)state;
    begin(RATE, true);
    assert_int_equal(fault_io_rule(rig.io, &rule), 0);
    pass_time(20 * SECOND);
    stats = rig_stats(&rig);
    assert_int_equal(stats.scrub_bad, 3);
    assert_int_equal(stats.scrub_read_fail, 3);
    assert_int_equal(present(), BLOCKS - 3);
    rig_close(&rig);
}

/* Never faster than the rate, and not much slower, a batch aside. */
static void test_the_rate_holds(void **state)
{
    static const uint64_t rates[] = {256 << 10, 1 << 20, 700000};

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(rates); i++) {
        int64_t start;

        begin_with(MANY, rates[i], true);
        pass_time(SECOND); /* until it counts as idle */
        start = rig.now_ns;
        for (int step = 0; step < 24; step++) {
            double moved, due;

            pass_time(SECOND / 4);
            moved = (double)rig_stats(&rig).scrub_bytes;
            due = (double)rates[i] * (double)(rig.now_ns - start) * 1e-9;
            assert_true(moved <= due + (double)BATCH);
            assert_true(moved + (double)BATCH >= KVT_MIN(due * 0.9, (double)(MANY * RECORD)));
        }
        rig_close(&rig);
    }
}

/* Small records are read many at a time: an idle cache wakes seldom for them. */
static void test_few_requests(void **state)
{
    uint64_t reads;

    (void)state;
    begin_with(MANY, 1 << 20, true);
    reads = fault_io_count(rig.io, FAULT_READ);
    pass_time(20 * SECOND);
    assert_int_equal(rig_stats(&rig).scrub_records, MANY);
    printf("           %u records in %llu requests\n", MANY,
           (unsigned long long)(fault_io_count(rig.io, FAULT_READ) - reads));
    assert_true(fault_io_count(rig.io, FAULT_READ) - reads <= MANY / 2);
    rig_close(&rig);
}

static void test_off_reads_nothing(void **state)
{
    uint64_t reads;

    (void)state;
    begin(0, true);
    reads = fault_io_count(rig.io, FAULT_READ);
    pass_time(100 * SECOND);
    assert_int_equal(fault_io_count(rig.io, FAULT_READ), reads);
    assert_int_equal(rig_stats(&rig).scrub_passes, 0);
    rig_close(&rig);
}

/* Any message makes it wait for a second of silence. */
static void test_a_busy_store_is_left_alone(void **state)
{
    (void)state;
    begin(RATE, true);
    for (int i = 0; i < 100; i++) {
        pass_time(SECOND * 9 / 10);
        (void)rig_lookup(&rig, ns, numbers, 1, 0, NULL);
    }
    assert_int_equal(rig_stats(&rig).scrub_records, 0);
    pass_time(3 * SECOND);
    assert_true(rig_stats(&rig).scrub_records > 4);
    rig_close(&rig);
}

/* Somebody who reads the statistics all the time does not count. */
static void test_watching_does_not_disturb(void **state)
{
    struct kvt_msg stat = {.bytes = sizeof(stat), .op = KVT_OP_STAT};

    (void)state;
    begin(RATE, true);
    for (int i = 0; i < 40; i++) {
        pass_time(SECOND / 2);
        stat.cookie = 1000u + (uint64_t)i;
        assert_int_equal(rig_send(&rig, 1, &stat), 0);
        rig_settle(&rig);
        assert_non_null(rig_reply(&rig, stat.cookie));
        rig_forget_replies(&rig);
    }
    assert_int_equal(rig_stats(&rig).scrub_records, BLOCKS);
    rig_close(&rig);
}

/* A load that comes while a record is being scrubbed is served; the scrub waits again after it. */
static void test_loads_go_first(void **state)
{
    struct kvt_store_stats before, after;
    uint64_t reads;

    (void)state;
    begin(RATE, true);
    pass_time(2 * SECOND);
    before = rig_stats(&rig); /* is a message as well */
    assert_true(before.scrub_records > 0 && before.scrub_records < BLOCKS);
    reads = fault_io_count(rig.io, FAULT_READ);
    for (uint32_t i = 0; i < BLOCKS; i++)
        assert_int_equal(rig_get(&rig, ns, &numbers[i], 1, 0, NULL, NULL), 1);
    after = rig_stats(&rig);
    assert_int_equal(after.load_granted_disk, BLOCKS);
    assert_int_equal(after.scrub_records, before.scrub_records);
    assert_true(fault_io_count(rig.io, FAULT_READ) <= reads + BLOCKS);
    rig_close(&rig);
}

/* What DRAM holds too is not cold. */
static void test_blocks_in_dram_are_skipped(void **state)
{
    struct kvt_store_stats stats;

    (void)state;
    begin(RATE, false);
    assert_int_equal(rig_stats(&rig).dram_blocks, BLOCKS);
    assert_int_equal(damage(4, 3, 3000), 4);
    pass_time(20 * SECOND);
    stats = rig_stats(&rig);
    assert_int_equal(stats.scrub_records, 0);
    assert_int_equal(stats.scrub_passes, 1);
    assert_int_equal(present(), BLOCKS);
    rig_close(&rig);
}

/* One pass a day: a store that is at rest is not read over and over. */
static void test_one_pass_a_day(void **state)
{
    (void)state;
    begin(RATE, true);
    pass_time(20 * SECOND);
    assert_int_equal(rig_stats(&rig).scrub_passes, 1);
    for (int hour = 0; hour < 23; hour++) {
        rig_advance(&rig, 3600 * SECOND);
        pass_time(5 * SECOND);
    }
    assert_int_equal(rig_stats(&rig).scrub_records, BLOCKS);
    assert_int_equal(damage(1, 1, 500), 1);
    rig_advance(&rig, 3600 * SECOND);
    pass_time(30 * SECOND);
    assert_int_equal(rig_stats(&rig).scrub_passes, 2);
    assert_int_equal(rig_stats(&rig).scrub_records, 2 * BLOCKS);
    assert_int_equal(rig_stats(&rig).scrub_bad, 1);
    rig_close(&rig);
}

/* Purged, and stored again, while its old bytes are being read: not judged by them. */
static void test_what_changed_is_left_alone(void **state)
{
    struct kvt_store_stats stats;

    (void)state;
    begin(RATE, true);
    assert_int_equal(damage(BLOCKS, 1, 3000), BLOCKS);
    rig_hold(&rig, true);
    for (int i = 0; i < 150; i++) { /* the first read of the scrub is on its way */
        rig.now_ns += 10000000;
        (void)kvt_store_run(rig.store);
    }
    for (uint32_t i = 0; i < BLOCKS; i++)
        assert_int_equal(
            rig_put(&rig, ns, &numbers[i], 1, 0, KVT_LEVEL_RAW, KVT_REPLACE_RAISE, NULL), 1);
    rig_hold(&rig, false);
    assert_int_equal(rig_flush(&rig), 0);
    pass_time(SECOND / 2);
    stats = rig_stats(&rig);
    assert_int_equal(stats.scrub_bad, 0);
    assert_int_equal(present(), BLOCKS);
    rig_check(&rig);
    rig_close(&rig);
}

/* Closed, and crashed, in the middle of a read. */
static void test_close_in_the_middle(void **state)
{
    (void)state;
    for (int crash = 0; crash < 2; crash++) {
        begin(RATE, true);
        rig_hold(&rig, true);
        for (int i = 0; i < 150; i++) {
            rig.now_ns += 10000000;
            (void)kvt_store_run(rig.store);
        }
        rig_hold(&rig, false);
        if (crash)
            rig_crash(&rig);
        else
            rig_reopen(&rig);
        ns = rig_ns(&rig, 1, pages);
        assert_int_equal(present(), BLOCKS);
        rig_close(&rig);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good_records_stay),
        cmocka_unit_test(test_damaged_records_go),
        cmocka_unit_test(test_damaged_records_stay_away),
        cmocka_unit_test(test_what_cannot_be_journaled_comes_back),
        cmocka_unit_test(test_a_life_buries_so_many),
        cmocka_unit_test(test_records_that_cannot_be_read),
        cmocka_unit_test(test_the_rate_holds),
        cmocka_unit_test(test_few_requests),
        cmocka_unit_test(test_off_reads_nothing),
        cmocka_unit_test(test_a_busy_store_is_left_alone),
        cmocka_unit_test(test_watching_does_not_disturb),
        cmocka_unit_test(test_loads_go_first),
        cmocka_unit_test(test_blocks_in_dram_are_skipped),
        cmocka_unit_test(test_one_pass_a_day),
        cmocka_unit_test(test_what_changed_is_left_alone),
        cmocka_unit_test(test_close_in_the_middle),
    };

    return cmocka_run_group_tests_name("store_scrub", tests, NULL, NULL);
}
