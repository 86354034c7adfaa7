/* What was hit outlives its segment: re-insertion when the log turns over.
 *
 * Goal:   blocks in use stay on disk through any number of turn-overs while the others go in the
 *         order of their age; never more than seven eighths of a segment are moved; the cap is
 *         held at every moment; pinned segments stay; a chain whose start went is dropped whole;
 *         purges and replacements beside it win; damaged records are not moved; a drive that
 *         cannot read or write costs the move, nothing else.
 * Method: a rig without threads over a small root (support/store_rig.h): streams of blocks that are
 *         never asked for push the log around. The bytes of the files are summed after every step.
 */
#include "support/store_rig.h"

#include <errno.h>
#include <string.h>

#include "base/rng.h"
#include "kvtier/error.h"
#include "support/fault_io.h"
#include "support/l2_help.h"

enum { KV4 = 2, KV8 = 5, PAGES = 8 };
#define CAP (16u << 20) /* 15 segments of 1 MiB, of about 31 records each */

static const uint32_t pages[7] = {0, 0, PAGES, 0, 0, 2 * PAGES, 0};
static struct rig rig;
static uint32_t ns;
static uint64_t next_cold;

static struct rig_options options(void)
{
    struct rig_options o = rig_defaults();

    o.cache_bytes = 16 * PAGES * 4096;
    o.staging_bytes = 4 * PAGES * 4096;
    o.write_queue_bytes = 16 * PAGES * 4096;
    o.disk_cap_bytes = CAP;
    return o;
}

static void begin(const struct rig_options *o)
{
    rig_open(&rig, o, NULL);
    ns = rig_ns(&rig, 1, pages);
    next_cold = 100000;
}

static void check_cap(void)
{
    assert_true(l2_files_bytes(rig.io) <= CAP);
}

/* Store n blocks that nobody will ask for. */
static void cold(uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(rig_put(&rig, ns, &next_cold, 1, 0, KV4, false, NULL), 1);
        next_cold++;
        check_cap();
    }
}

static void put_chain(uint64_t first, uint32_t n)
{
    uint64_t numbers[64];

    for (uint32_t i = 0; i < n; i++)
        numbers[i] = first + i;
    assert_int_equal(rig_put(&rig, ns, numbers, n, 0, KV4, false, NULL), n);
}

static uint32_t get_chain(uint64_t first, uint32_t n)
{
    uint64_t numbers[64];

    for (uint32_t i = 0; i < n; i++)
        numbers[i] = first + i;
    return rig_get(&rig, ns, numbers, n, 0, NULL, NULL);
}

static uint32_t lookup_chain(uint64_t first, uint32_t n)
{
    uint64_t numbers[64];

    for (uint32_t i = 0; i < n; i++)
        numbers[i] = first + i;
    return rig_lookup(&rig, ns, numbers, n, 0, NULL);
}

static void test_what_is_hit_stays(void **state)
{
    struct rig_options o = options();
    struct kvt_store_stats stats;

    (void)state;
    begin(&o);
    put_chain(1, 8);
    put_chain(101, 8); /* never asked for */
    for (int turn = 0; turn < 40; turn++) {
        cold(100);
        assert_int_equal(get_chain(1, 8), 8);
    }
    stats = rig_stats(&rig);
    printf("           %llu segments recycled, %llu blocks evicted, %llu moved\n",
           (unsigned long long)stats.evict_disk_segments,
           (unsigned long long)stats.evict_disk_blocks, (unsigned long long)stats.reinserted);
    assert_true(stats.evict_disk_segments > 100);
    assert_true(stats.reinserted >= 8 * 5 && stats.reinserted <= 8 * 20);
    assert_int_equal(stats.reinsert_failed, 0);
    assert_int_equal(lookup_chain(101, 8), 0);
    rig_reopen(&rig); /* and they are where a restart finds them */
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(get_chain(1, 8), 8);
    for (int turn = 0; turn < 15; turn++)
        cold(100);
    rig_crash(&rig); /* without what DRAM remembers */
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(lookup_chain(1, 8), 0); /* asked for no more, so it went */
    rig_close(&rig);
}

/* What is asked for in the first three tenths of its segment's life only goes like the rest,
 * however often; later it counts. */
static void test_early_hits_do_not_count(void **state)
{
    struct rig_options o = options();
    uint64_t early = 1, often = 2, late = 3, never = 4;

    (void)state;
    begin(&o);
    cold(1200); /* the log turns over: 15 segments of 31 records */
    for (uint64_t n = 1; n <= 4; n++)
        assert_int_equal(rig_put(&rig, ns, &n, 1, 0, KV4, false, NULL), 1);
    cold(20);
    (void)rig_keys(&rig, KVT_OP_TOUCH, ns, &early, 1);
    (void)rig_keys(&rig, KVT_OP_TOUCH, ns, &often, 1);
    (void)rig_keys(&rig, KVT_OP_TOUCH, ns, &often, 1);
    cold(200);
    (void)rig_keys(&rig, KVT_OP_TOUCH, ns, &late, 1);
    cold(300);
    assert_int_equal(lookup_chain(late, 1), 1);
    assert_int_equal(lookup_chain(often, 1), 0);
    assert_int_equal(lookup_chain(early, 1), 0);
    assert_int_equal(lookup_chain(never, 1), 0);
    cold(1000);
    assert_int_equal(lookup_chain(late, 1), 0);
    rig_close(&rig);
}

/* A third of each segment is hit: it is moved; never more than seven eighths are, and the log turns
 * over. */
static void test_at_most_seven_eighths(void **state)
{
    struct rig_options o = options();
    struct kvt_store_stats before, after;

    (void)state;
    begin(&o);
    cold(900);
    for (int round = 0; round < 400; round++) {
        for (uint64_t n = (next_cold - 420) / 3 * 3; n < next_cold; n += 3)
            (void)rig_keys(&rig, KVT_OP_TOUCH, ns, &n, 1);
        before = rig_stats(&rig);
        cold(4);
        after = rig_stats(&rig);
        assert_true(after.reinserted - before.reinserted <=
                    (after.evict_disk_segments - before.evict_disk_segments + 2) * 28);
        assert_true(after.alloc_dropped_dram == 0);
    }
    assert_true(after.reinserted > 100);
    printf("           %llu moved, %llu segments\n", (unsigned long long)after.reinserted,
           (unsigned long long)after.evict_disk_segments);
    rig_close(&rig);
}

/* All of a segment is in use: it stays as it is, nothing is written for that. */
static void test_what_is_all_used_is_not_rewritten(void **state)
{
    struct rig_options o = options();
    struct kvt_store_stats stats;

    (void)state;
    begin(&o);
    for (uint64_t c = 0; c < 16; c++) /* four segments */
        put_chain(c * 8 + 1, 8);
    for (int turn = 0; turn < 40; turn++) {
        for (uint64_t c = 0; c < 16; c++)
            assert_int_equal(get_chain(c * 8 + 1, 8), 8);
        cold(60);
    }
    stats = rig_stats(&rig);
    printf("           %llu segments kept as they are, %llu blocks moved\n",
           (unsigned long long)stats.renewed, (unsigned long long)stats.reinserted);
    assert_true(stats.renewed >= 8);
    assert_true(stats.reinserted < 8 * 31);
    for (int turn = 0; turn < 3; turn++) /* it is not asked for any more: it goes like others */
        cold(450);
    assert_int_equal(lookup_chain(1, 8), 0);
    rig_close(&rig);
}

/* Segments of which little is left are taken first, and what is left of them stays. */
static void test_the_emptiest_goes_first(void **state)
{
    struct rig_options o = options();
    struct kvt_store_stats stats;

    (void)state;
    begin(&o);
    cold(150);
    for (uint64_t c = 0; c < 10; c++) /* two segments or three, in the middle */
        put_chain(c * 8 + 1, 8);
    cold(150);
    for (uint64_t c = 0; c < 10; c++)
        for (uint64_t n = c * 8 + 3; n <= c * 8 + 8; n++)
            assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, &n, 1), 1);
    cold(100);
    stats = rig_stats(&rig);
    assert_true(stats.evict_disk_segments >= 2);
    assert_true(stats.reinserted >= 10);
    for (uint64_t c = 0; c < 10; c++)
        assert_int_equal(lookup_chain(c * 8 + 1, 8), 2);
    rig_close(&rig);
}

/* The start of a chain goes, its end was moved: nothing reaches it, so it is dropped. */
static void test_unreachable_ends_are_dropped(void **state)
{
    struct rig_options o = options();
    uint64_t end = 8;

    (void)state;
    o.cache_bytes = 0; /* on disk only */
    o.staging_bytes = 32 * PAGES * 4096;
    begin(&o);
    put_chain(1, 7);
    cold(200); /* the end of the chain stands in a later segment */
    assert_int_equal(rig_put(&rig, ns, &end, 1, 7, KV4, false, NULL), 1);
    for (int turn = 0; turn < 8 && lookup_chain(1, 8) == 8; turn++)
        for (int i = 0; i < 10; i++) {
            assert_true(rig_keys(&rig, KVT_OP_TOUCH, ns, &end, 1) >= 0); /* the end only */
            cold(10);
        }
    assert_int_equal(lookup_chain(1, 8), 0);
    assert_int_equal(lookup_chain(end, 1), 0);
    assert_true(rig_stats(&rig).orphan_dropped >= 1);
    rig_close(&rig);
}

static void test_pinned_segments_are_skipped(void **state)
{
    struct rig_options o = options();
    uint64_t pin = 3;

    (void)state;
    begin(&o);
    put_chain(1, 4);
    assert_int_equal(rig_keys(&rig, KVT_OP_PIN, ns, &pin, 1), 1);
    cold(2000);
    assert_true(lookup_chain(3, 1) == 1);
    assert_int_equal(rig_stats(&rig).reinserted, 0); /* nobody asked */
    rig_crash(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(get_chain(1, 4), 4); /* with its whole segment */
    rig_close(&rig);
}

/* Blocks are purged, replaced, put again and asked for while the log turns and I/O is held back and
 * released in any order: what a purge covered never comes back, what is found is exact. */
static void test_beside_purges_and_replacements(void **state)
{
    struct rig_options o = options();
    struct kvt_rng rng = {test_seed()};
    uint8_t may[65] = {0}; /* maps that may be seen */
    uint64_t found = 0, moved = 0, segments = 0;

    (void)state;
    o.disk_cap_bytes = 8u << 20;
    begin(&o);
    for (int step = 0; step < 6000; step++) {
        uint64_t n = 1 + kvt_rng_below(&rng, 64);
        uint8_t map = kvt_rng_below(&rng, 2) ? KV4 : KV8;
        int32_t status;
        uint8_t seen = 0;

        switch (kvt_rng_below(&rng, 10)) {
        case 0:
            if (rig.held_io)
                rig_hold(&rig, false);
            assert_true(rig_keys(&rig, KVT_OP_PURGE, ns, &n, 1) >= 0);
            may[n] = 0;
            break;
        case 1:
        case 2:
            (void)rig_put(&rig, ns, &n, 1, 0, map, true, &status);
            may[n] |= status == 0 ? (uint8_t)(1u << map) : 0;
            break;
        case 3:
            if (kvt_rng_below(&rng, 4) == 0)
                rig_hold(&rig, true);
            break;
        case 4:
            rig_release_io(&rig, 3, kvt_rng_below(&rng, 2));
            if (kvt_rng_below(&rng, 8) == 0)
                rig_hold(&rig, false);
            break;
        case 5:
            if (kvt_rng_below(&rng, 40) == 0) {
                if (rig.held_io)
                    rig_hold(&rig, false);
                moved += rig_stats(&rig).reinserted;
                segments += rig_stats(&rig).evict_disk_segments;
                rig_crash(&rig);
                ns = rig_ns(&rig, 1, pages);
            }
            break;
        case 6:
            if (rig.held_io)
                rig_hold(&rig, false);
            if (rig_get(&rig, ns, &n, 1, 0, NULL, &seen)) {
                assert_true(may[n] >> seen & 1);
                found++;
            }
            break;
        default:
            for (int i = 0; i < 3; i++) {
                (void)rig_put(&rig, ns, &next_cold, 1, 0, KV4, false, NULL);
                next_cold++;
            }
            if (!rig.held_io)
                check_cap();
        }
    }
    rig_hold(&rig, false);
    moved += rig_stats(&rig).reinserted;
    segments += rig_stats(&rig).evict_disk_segments;
    printf("           %llu found, %llu moved, %llu segments\n", (unsigned long long)found,
           (unsigned long long)moved, (unsigned long long)segments);
    assert_true(found > 100 && moved > 0 && segments > 0);
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, NULL, 0) >= 0, 1);
    rig_crash(&rig);
    ns = rig_ns(&rig, 1, pages);
    for (uint64_t n = 1; n <= 64; n++)
        assert_int_equal(lookup_chain(n, 1), 0);
    rig_close(&rig);
}

/* What a quota gives up while it is being moved is no purge: no journal tells of it, so its bytes
 * stay, and what a restart finds of it is whole. */
static void test_beside_a_quota(void **state)
{
    struct rig_options o = options();
    struct kvt_rng rng = {test_seed()};
    uint64_t moved = 0, given_up = 0, back = 0;
    uint32_t other;

    (void)state;
    o.disk_cap_bytes = 8u << 20;
    begin(&o);
    rig.ns_quota = 20 * PAGES * 4096; /* of 64 blocks */
    ns = rig_ns(&rig, 1, pages);
    rig.ns_quota = 0;
    other = rig_ns(&rig, 2, pages);
    for (int round = 1; round <= 1000; round++) {
        rig_hold(&rig, true); /* the move of a segment waits for the drive at any of its steps */
        for (int i = 0; i < 8; i++, next_cold++) {
            uint64_t n = 1 + kvt_rng_below(&rng, 64);

            (void)rig_put(&rig, other, &next_cold, 1, 0, KV4, true, NULL);
            (void)rig_put(&rig, ns, &n, 1, 0, KV4, true, NULL);
            n = 1 + kvt_rng_below(&rng, 64);
            (void)rig_keys(&rig, KVT_OP_TOUCH, ns, &n, 1);
            rig_release_io(&rig, kvt_rng_below(&rng, 3), false);
        }
        rig_hold(&rig, false);
        if (round % 3)
            continue;
        moved += rig_stats(&rig).reinserted;
        given_up += rig_stats(&rig).quota_evicted;
        rig_crash(&rig);
        rig.ns_quota = 64 * PAGES * 4096; /* room for all of them, while they are looked at */
        ns = rig_ns(&rig, 1, pages);
        for (uint64_t n = 1; n <= 64; n++)
            if (lookup_chain(n, 1) == 1) {
                assert_int_equal(get_chain(n, 1), 1);
                back++;
            }
        assert_int_equal(rig_stats(&rig).checksum_fail, 0);
        rig.ns_quota = 20 * PAGES * 4096;
        ns = rig_ns(&rig, 1, pages);
        rig.ns_quota = 0;
        other = rig_ns(&rig, 2, pages);
    }
    rig_hold(&rig, false);
    printf("           %llu moved, %llu given up, %llu found by restarts\n",
           (unsigned long long)moved, (unsigned long long)given_up, (unsigned long long)back);
    assert_true(moved > 0 && given_up > 0 && back > 0);
    rig_close(&rig);
}

/* Errors of the drive while records are moved: a miss or the exact bytes, and the log goes on. */
static void test_a_bad_drive_costs_the_move(void **state)
{
    static const struct fault_rule rules[] = {
        {.ops = FAULT_READ,
         .name = "seg-",
         .skip = 5,
         .times = 40,
         .action = FAULT_FAIL,
         .error = EIO},
        {.ops = FAULT_READ, .name = "seg-", .times = 0, .action = FAULT_FLIP, .arg = FAULT_RANDOM},
        {.ops = FAULT_WRITE,
         .name = "seg-",
         .skip = 20,
         .times = 3,
         .action = FAULT_FAIL,
         .error = EIO},
        {.ops = FAULT_SYNC, .name = "seg-", .times = 4, .action = FAULT_FAIL, .error = EIO},
    };

    (void)state;
    for (unsigned i = 0; i < sizeof(rules) / sizeof(rules[0]); i++) {
        struct rig_options o = options();
        uint64_t failed;

        begin(&o);
        for (uint64_t c = 0; c < 8; c++)
            put_chain(c * 10 + 1, 8);
        cold(216);
        for (uint64_t n = 1; n <= 78; n++)
            (void)rig_keys(&rig, KVT_OP_TOUCH, ns, &n, 1);
        assert_true(fault_io_rule(rig.io, &rules[i]) >= 0);
        for (int turn = 0; turn < 4; turn++) {
            for (uint32_t k = 0; k < 100; k++) {
                (void)rig_put(&rig, ns, &next_cold, 1, 0, KV4, false, NULL);
                next_cold++;
            }
            rig_advance(&rig, 3000000000);
        }
        failed = rig_stats(&rig).reinsert_failed;
        printf("           rule %u: %llu moved, %llu failed, %llu segments\n", i,
               (unsigned long long)rig_stats(&rig).reinserted, (unsigned long long)failed,
               (unsigned long long)rig_stats(&rig).evict_disk_segments);
        fault_io_clear(rig.io);
        rig_advance(&rig, 30000000000);
        if (i < 2)
            assert_true(failed > 0);
        for (uint64_t c = 0; c < 8; c++)
            (void)get_chain(c * 10 + 1, 8); /* exact or a miss: the rig compares */
        cold(200);
        assert_int_equal(get_chain(next_cold - 1, 1), 1);
        rig_crash(&rig);
        ns = rig_ns(&rig, 1, pages);
        for (uint64_t c = 0; c < 8; c++)
            (void)get_chain(c * 10 + 1, 8);
        rig_close(&rig);
    }
}

/* No place for new files: the log lives in those it has, and still keeps what is in use. */
static void test_full_file_system_keeps_what_is_used(void **state)
{
    struct rig_options o = options();

    (void)state;
    o.disk_real_bytes = 7u << 20;
    begin(&o);
    put_chain(1, 8);
    for (int turn = 0; turn < 30; turn++) {
        for (uint32_t k = 0; k < 40; k++) {
            (void)rig_put(&rig, ns, &next_cold, 1, 0, KV4, false, NULL);
            next_cold++;
        }
        rig_advance(&rig, 100000000);
        assert_int_equal(get_chain(1, 8), 8);
    }
    assert_true(rig_stats(&rig).reinserted > 8);
    rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_hit_stays),
        cmocka_unit_test(test_early_hits_do_not_count),
        cmocka_unit_test(test_at_most_seven_eighths),
        cmocka_unit_test(test_what_is_all_used_is_not_rewritten),
        cmocka_unit_test(test_the_emptiest_goes_first),
        cmocka_unit_test(test_unreachable_ends_are_dropped),
        cmocka_unit_test(test_pinned_segments_are_skipped),
        cmocka_unit_test(test_beside_purges_and_replacements),
        cmocka_unit_test(test_beside_a_quota),
        cmocka_unit_test(test_a_bad_drive_costs_the_move),
        cmocka_unit_test(test_full_file_system_keeps_what_is_used),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
