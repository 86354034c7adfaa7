/* DRAM and disk hold a block once: what they hold together is nearly their sum.
 *
 * Goal:   sessions that come back in turn, in random order and in the order of their last use, find
 *         every block as long as all of them fit into DRAM and disk together; what does not fit is
 *         lost from the oldest end, not everywhere; a block whose copy on disk was given up is
 *         written again when it leaves DRAM and not before: no flush, and no time that passes,
 * writes it; nothing is written over and over, whatever the sizes; a copy that was written for an
 *         eviction to come is not given up for it; a restart finds what was in DRAM.
 * Method: a rig without threads (support/store_rig.h), bytes verified by every load; the store's
 *         counters, and the files of its disk.
 */
#include "support/store_rig.h"

#include <string.h>

#include "base/checked.h"
#include "base/rng.h"

enum { KV4 = 2, PAGES = 2, SESSION = 128, SESSIONS_MAX = 512 };

static const uint32_t pages[7] = {0, 0, PAGES, 0, 0, 0, 4 * PAGES};
static struct rig rig;
static uint32_t ns;

static struct rig_options sizes(uint32_t dram_blocks, uint32_t disk_mib, int write)
{
    struct rig_options o = rig_defaults();

    o.cache_bytes = (uint64_t)dram_blocks * PAGES * 4096;
    o.disk_cap_bytes = (uint64_t)disk_mib << 20;
    o.write_queue_bytes = 4 * SESSION * PAGES * 4096;
    o.write = write;
    return o;
}

static void begin(const struct rig_options *o)
{
    rig_open(&rig, o, NULL);
    rig.check_each_step = false; /* the table is long: after each round instead */
    ns = rig_ns(&rig, 1, pages);
}

static void numbers_of(uint32_t session, uint64_t numbers[SESSION])
{
    for (uint32_t i = 0; i < SESSION; i++)
        numbers[i] = 1 + (uint64_t)session * SESSION + i;
}

/* A session comes back: what is missing of it is stored anew. Returns how many blocks were. */
static uint32_t turn(uint32_t session)
{
    uint64_t numbers[SESSION];
    uint32_t found;

    numbers_of(session, numbers);
    found = rig_get(&rig, ns, numbers, SESSION, 0, NULL, NULL);
    if (found < SESSION)
        assert_int_equal(rig_put(&rig, ns, numbers + found, SESSION - found,
                                 found ? numbers[found - 1] : 0, KV4, false, NULL),
                         SESSION - found);
    return SESSION - found;
}

static uint64_t written(void)
{
    struct kvt_store_stats stats = rig_stats(&rig);

    return stats.disk_written_blocks + stats.reinserted;
}

/* Blocks that records of this size find room for in a root, without the segments that stand ready.
 */
static uint32_t disk_blocks(uint32_t mib)
{
    return (mib - 1 - 4) * (256 - 4 - 4) / PAGES;
}

/* The same where each block is written by itself, behind a page of its batch's header. */
static uint32_t disk_blocks_alone(uint32_t mib)
{
    return (mib - 1 - 4) * (256 - 4 - 4) / (PAGES + 1);
}

enum order { IN_TURN, AT_RANDOM };

/* Rounds over n sessions; the blocks lost in all but the first, per mille of those asked for. */
static uint32_t rounds(uint32_t n, uint32_t count, enum order order, uint64_t seed)
{
    struct kvt_rng rng = {seed};
    uint32_t list[SESSIONS_MAX];
    uint64_t lost = 0;

    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(turn(i), SESSION);
    for (uint32_t round = 0; round < count; round++) {
        for (uint32_t i = 0; i < n; i++) {
            uint32_t j = order == AT_RANDOM ? (uint32_t)kvt_rng_below(&rng, i + 1) : i;

            list[i] = list[j];
            list[j] = i;
        }
        for (uint32_t i = 0; i < n; i++)
            lost += turn(list[i]);
        rig_check(&rig);
    }
    return (uint32_t)(lost * 1000 / ((uint64_t)n * SESSION * count));
}

static void report(const char *what, uint32_t n, uint32_t lost)
{
    struct kvt_store_stats stats = rig_stats(&rig);

    printf("           %-28s %3u sessions: %3u in 1,000 lost; written %llu, moved %llu, given up "
           "%llu, lost again %llu deferred %llu, read %llu\n",
           what, n, lost, (unsigned long long)stats.disk_written_blocks,
           (unsigned long long)stats.reinserted, (unsigned long long)stats.given_up,
           (unsigned long long)stats.lost_again, (unsigned long long)stats.lost_deferred,
           (unsigned long long)stats.disk_read_blocks);
}

/* DRAM is larger than the disk, as large, and a fifth of it; 85 % of what fits into both. */
static void test_the_sum_is_held(void **state)
{
    static const struct {
        uint32_t dram, mib;
    } cases[] = {{6144, 40}, {4608, 54}, {1536, 66}};

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(cases); i++)
        for (enum order order = IN_TURN; order <= AT_RANDOM; order++) {
            struct rig_options o = sizes(cases[i].dram, cases[i].mib, KVT_WRITE_EVICT);
            uint32_t n = (cases[i].dram + disk_blocks(cases[i].mib)) * 17 / 20 / SESSION, lost;
            struct kvt_store_stats stats;

            begin(&o);
            lost = rounds(n, 4, order, 7 + i);
            report(order == IN_TURN ? "in turn" : "at random", n, lost);
            stats = rig_stats(&rig);
            assert_true(lost <= 10);                                      /* one in a hundred */
            assert_true(stats.disk_blocks + cases[i].dram > n * SESSION); /* both are needed */
            /* no more is written than is read, and moved for it */
            assert_true(stats.disk_written_blocks <= n * SESSION + stats.disk_read_blocks);
            assert_true(stats.reinserted <= stats.disk_written_blocks);
            rig_close(&rig);
        }
}

/* A third more than fits: what comes back soon is found all the same. */
static void test_more_than_the_sum_is_lost_in_part(void **state)
{
    struct rig_options o = sizes(2048, 20, KVT_WRITE_EVICT);
    uint32_t n = (2048 + disk_blocks(20)) * 4 / 3 / SESSION, lost;

    (void)state;
    begin(&o);
    lost = rounds(n, 4, AT_RANDOM, 3);
    report("a third too many, at random", n, lost);
    assert_true(lost < 650); /* least recently used: 600 */
    rig_close(&rig);
}

/* Where a copy on disk is wanted of all (write=through), what is used stays on disk. */
static void test_through_keeps_its_copies(void **state)
{
    struct rig_options o = sizes(1536, 50, KVT_WRITE_THROUGH);
    uint32_t n = disk_blocks_alone(50) * 8 / 10 / SESSION, found = 0;

    (void)state;
    begin(&o);
    assert_true(rounds(n, 3, AT_RANDOM, 5) <= 10);
    rig_crash(&rig);
    ns = rig_ns(&rig, 1, pages);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t numbers[SESSION];

        numbers_of(i, numbers);
        found += rig_get(&rig, ns, numbers, SESSION, 0, NULL, NULL);
    }
    printf("           %u of %u blocks after a crash\n", found, n * SESSION);
    assert_true(found >= n * SESSION * 9 / 10);
    rig_close(&rig);
}

/* Flushes, idle time and look-ups of a set larger than the disk: after the first flush nothing is
 * written until something leaves DRAM. */
static void nothing_is_written_over_and_over(int write)
{
    struct rig_options o = sizes(2048, 9, write); /* some 400 blocks on disk */
    uint64_t before;

    begin(&o);
    for (uint32_t i = 0; i < 12; i++) /* 1,536 blocks: three quarters of DRAM */
        assert_int_equal(turn(i), SESSION);
    (void)rig_flush(&rig);
    before = written();
    for (uint32_t i = 0; i < 20; i++) {
        (void)rig_flush(&rig);
        rig_advance(&rig, 10000000000);
        assert_int_equal(turn(i % 12), 0);
    }
    assert_int_equal(written(), before);
    for (uint32_t i = 12; i < 15; i++) /* less than an eighth is free now */
        assert_int_equal(turn(i), SESSION);
    (void)rig_flush(&rig);
    rig_advance(&rig, 10000000000);
    before = written();
    for (int i = 0; i < 20; i++) {
        (void)rig_flush(&rig);
        rig_advance(&rig, 10000000000);
    }
    assert_int_equal(written(), before);
    rig_check(&rig);
    rig_close(&rig);
}

static void test_no_endless_writing(void **state)
{
    (void)state;
    nothing_is_written_over_and_over(KVT_WRITE_EVICT);
    nothing_is_written_over_and_over(KVT_WRITE_THROUGH);
    nothing_is_written_over_and_over(KVT_WRITE_IDLE);
}

/* The log turns over under blocks that are in DRAM: they are on no disk then, and leave DRAM
 * through it all the same. */
static void test_what_the_log_dropped_is_written_again(void **state)
{
    struct rig_options o = sizes(2048, 17, KVT_WRITE_THROUGH);
    struct kvt_store_stats stats;
    uint32_t found = 0;

    (void)state;
    begin(&o);
    for (uint32_t i = 0; i < 16; i++) /* 2,048 blocks: DRAM; half of them fit on disk */
        assert_int_equal(turn(i), SESSION);
    stats = rig_stats(&rig);
    assert_true(stats.given_up > 64);
    assert_true(stats.disk_unsaved > 64);
    for (uint32_t i = 16; i < 21; i++) /* the first ones leave DRAM */
        assert_int_equal(turn(i), SESSION);
    stats = rig_stats(&rig);
    assert_int_equal(stats.lost_again, 0);
    assert_int_equal(stats.evict_dram_lost, 0);
    for (uint32_t i = 0; i < 21; i++) {
        uint64_t numbers[SESSION];

        numbers_of(i, numbers);
        found += rig_lookup(&rig, ns, numbers, SESSION, 0, NULL);
    }
    printf("           %u of %u blocks found, %llu written\n", found, 21 * SESSION,
           (unsigned long long)written());
    assert_true(found >= 21 * SESSION * 9 / 10);
    rig_check(&rig);
    rig_close(&rig);
}

/* Given up on disk, then the process ends in order: the next one finds it. */
static void test_a_restart_finds_what_was_given_up(void **state)
{
    struct rig_options o = sizes(1536, 50, KVT_WRITE_EVICT);
    uint32_t n = (1536 + disk_blocks(50)) * 9 / 10 / SESSION, found = 0;

    (void)state;
    begin(&o);
    (void)rounds(n, 3, AT_RANDOM, 11);
    assert_true(rig_stats(&rig).given_up > 0);
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t numbers[SESSION];

        numbers_of(i, numbers);
        found += rig_get(&rig, ns, numbers, SESSION, 0, NULL, NULL);
    }
    printf("           %u of %u blocks after a restart\n", found, n * SESSION);
    assert_true(found >= disk_blocks(50) * 8 / 10);
    rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_sum_is_held),
        cmocka_unit_test(test_more_than_the_sum_is_lost_in_part),
        cmocka_unit_test(test_through_keeps_its_copies),
        cmocka_unit_test(test_no_endless_writing),
        cmocka_unit_test(test_what_the_log_dropped_is_written_again),
        cmocka_unit_test(test_a_restart_finds_what_was_given_up),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
