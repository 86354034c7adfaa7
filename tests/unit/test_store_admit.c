/* Which blocks a store writes: admission policies and the write budget.
 *
 * Goal:   each policy writes what it says and nothing else; what is not taken stays usable in DRAM,
 *         is asked about again when it is used, is counted by reason, and is no loss for a flush; a
 *         budget holds over days, over both roots, whatever the policy; no chain on disk has a
 * hole. Method: the rig without threads; its clock is a number, so days pass in a call. Written
 * blocks are counted by the store and found again after a crash.
 */
#include "support/store_rig.h"

#include <string.h>

#include "base/rng.h"
#include "kvtier/error.h"
#include "plan/admission.h"
#include "support/fault_io.h"

enum { KV4 = 2, RAW = 6 };

#define BLOCK 8192u
#define DAY_NS INT64_C(86400000000000)
#define HOUR_NS INT64_C(3600000000000)

static const uint32_t pages[7] = {0, 0, 2, 0, 0, 0, 8};
static struct rig rig;
static uint32_t ns;

static struct rig_options options(int admit, int write)
{
    struct rig_options o = rig_defaults();

    o.cache_bytes = 64 * BLOCK;
    o.write_queue_bytes = 64 * BLOCK;
    o.admit = admit;
    o.write = write;
    return o;
}

static void begin(const struct rig_options *o)
{
    rig_open(&rig, o, NULL);
    ns = rig_ns(&rig, 1, pages);
}

/* One chain of n blocks. */
static uint32_t put(uint64_t first, uint32_t n)
{
    uint64_t numbers[256];

    for (uint32_t i = 0; i < n; i++)
        numbers[i] = first + i;
    return rig_put(&rig, ns, numbers, n, 0, KV4, false, NULL);
}

static uint32_t get(uint64_t first, uint32_t n)
{
    uint64_t numbers[256];

    for (uint32_t i = 0; i < n; i++)
        numbers[i] = first + i;
    return rig_get(&rig, ns, numbers, n, 0, NULL, NULL);
}

static uint64_t written(void)
{
    return rig_stats(&rig).disk_written_blocks;
}

/* ---- C65 ----------------------------------------------------------------------------------- */

/* admission=all: one put reaches L2. */
static void test_c65_all_writes_the_first_put(void **state)
{
    struct rig_options o = options(KVT_ADMIT_ALL, KVT_WRITE_THROUGH);

    (void)state;
    begin(&o);
    assert_int_equal(put(1, 1), 1);
    assert_int_equal(written(), 1);
    assert_int_equal(rig_stats(&rig).admit_yes, 1);
    rig_close(&rig);
}

/* A second use: the first eviction writes nothing and says why; after one reuse the next writes. */
static void test_c65_second_use_filters_the_first(void **state)
{
    struct rig_options o = options(KVT_ADMIT_SECOND, KVT_WRITE_EVICT);
    uint64_t at_open, next = 1000;

    (void)state;
    begin(&o);
    at_open = rig_stats(&rig).disk_written_bytes;
    assert_int_equal(put(1, 1), 1);
    while (rig_lookup(&rig, ns, (uint64_t[]){1}, 1, 0, NULL) == 1 && next < 2000)
        assert_int_equal(put(next++, 1), 1);
    assert_true(next < 2000);
    assert_int_equal(written(), 0);
    assert_int_equal(rig_stats(&rig).disk_written_bytes, at_open);
    assert_true(rig_stats(&rig).admit_first >= 1);
    assert_int_equal(rig_stats(&rig).admit_gone, rig_stats(&rig).evict_dram_blocks);
    assert_int_equal(rig_stats(&rig).lost_deferred, 0);

    assert_int_equal(put(1, 1), 1); /* it comes back: that is the second use */
    for (uint32_t i = 0; i < 200; i++)
        assert_int_equal(put(next++, 1), 1);
    assert_int_equal(written(), 1);
    rig_crash(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(get(1, 1), 1);
    assert_int_equal(rig_stats(&rig).load_granted_disk, 1);
    rig_close(&rig);
}

/* Until a segment has had to go. Returns what was written by then. */
static uint64_t fill_the_disk(void)
{
    for (uint64_t first = 1u << 20; rig_stats(&rig).evict_disk_segments == 0; first += 100) {
        assert_int_equal(put(first, 8), 8);
        assert_int_equal(rig_flush(&rig), 0);
    }
    return written();
}

/* While there is room on disk every block is written. */
static void test_last_blocks_are_written_while_there_is_room(void **state)
{
    struct rig_options o = options(KVT_ADMIT_CONTINUED, KVT_WRITE_THROUGH);

    (void)state;
    begin(&o);
    assert_int_equal(put(1, 8), 8);
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(written(), 8);
    assert_int_equal(rig_stats(&rig).admit_last, 0);
    rig_close(&rig);
}

/* Continued: all but the last block of a prompt, which follows when something continues it, or when
 * it is asked for. A flush does not wait for it, and it is no loss. */
static void test_the_last_block_waits(void **state)
{
    struct rig_options o = options(KVT_ADMIT_CONTINUED, KVT_WRITE_THROUGH);

    (void)state;
    o.disk_cap_bytes = 8u << 20;
    begin(&o);
    uint64_t before = fill_the_disk();
    assert_int_equal(put(1, 8), 8);
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(written() - before, 7);
    assert_true(rig_stats(&rig).admit_last >= 1);
    assert_int_equal(put(101, 1), 1); /* a prompt of one block: nothing is before it */
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(written() - before, 8);
    uint64_t more[] = {9, 10, 11};
    assert_int_equal(rig_put(&rig, ns, more, 3, 8, KV4, false, NULL), 3); /* it goes on */
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(written() - before, 11); /* 8, 9, 10 */
    assert_int_equal(get(1, 11), 11);         /* the last one was asked for */
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(written() - before, 12);
    rig_crash(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(get(1, 11), 11);
    rig_close(&rig);
}

/* Evicted before anything came of it: gone, counted, and no chain has a hole. */
static void test_a_last_block_may_go_unwritten(void **state)
{
    struct rig_options o = options(KVT_ADMIT_CONTINUED, KVT_WRITE_EVICT);

    (void)state;
    o.disk_cap_bytes = 8u << 20;
    begin(&o);
    (void)fill_the_disk();
    for (uint64_t i = 0; i < 60; i++)
        assert_int_equal(put(1 + 100 * i, 8), 8);
    assert_int_equal(rig_flush(&rig), 0);
    assert_true(rig_stats(&rig).admit_gone >= 40);
    assert_int_equal(rig_stats(&rig).lost_deferred, 0);
    rig_crash(&rig);
    ns = rig_ns(&rig, 1, pages);
    for (uint64_t i = 0; i < 60; i++)
        assert_int_equal(get(1 + 100 * i, 8), 7);
    rig_close(&rig);
}

/* With write-through it goes out the moment it is used again, by a load as by a store. */
static void test_second_use_through(void **state)
{
    struct rig_options o = options(KVT_ADMIT_SECOND, KVT_WRITE_THROUGH);

    (void)state;
    begin(&o);
    assert_int_equal(put(1, 8), 8);
    assert_int_equal(written(), 0);
    assert_int_equal(rig_stats(&rig).admit_first, 1);
    assert_int_equal(rig_stats(&rig).admit_chain, 7); /* behind one that is not there */
    assert_int_equal(rig_stats(&rig).disk_unsaved, 0);
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(written(), 0);
    assert_int_equal(get(1, 5), 5);
    rig_advance(&rig, 1000000000);
    assert_int_equal(written(), 5);
    assert_int_equal(put(1, 8), 0); /* exists */
    rig_advance(&rig, 1000000000);
    assert_int_equal(written(), 8);
    /* looking is no use, bringing into DRAM neither */
    assert_int_equal(put(101, 1), 1);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(rig_lookup(&rig, ns, (uint64_t[]){101}, 1, 0, NULL), 1);
        (void)rig_keys(&rig, KVT_OP_PREFETCH, ns, (uint64_t[]){101}, 1);
    }
    rig_advance(&rig, 1000000000);
    assert_int_equal(written(), 8);
    assert_int_equal(rig_keys(&rig, KVT_OP_TOUCH, ns, (uint64_t[]){101}, 1), 1);
    rig_advance(&rig, 1000000000);
    assert_int_equal(written(), 9);
    rig_close(&rig);
}

/* No DRAM to stay in: a block that is not taken goes, and is no error of anybody. */
static void test_filtered_without_dram(void **state)
{
    struct rig_options o = options(KVT_ADMIT_SECOND, KVT_WRITE_THROUGH);

    (void)state;
    o.cache_bytes = 0;
    begin(&o);
    assert_int_equal(put(1, 1), 1);
    assert_int_equal(rig_lookup(&rig, ns, (uint64_t[]){1}, 1, 0, NULL), 0);
    assert_int_equal(rig_stats(&rig).lost_no_dram, 0);
    assert_int_equal(put(1, 1), 1);
    assert_int_equal(get(1, 1), 1);
    rig_close(&rig);
}

/* ---- budget -------------------------------------------------------------------------------- */

/* Whatever asks for writes, in any day no more than the day's bytes and an hour's worth more are
 * written; what is refused is counted, and after the night there is room again. */
static void budget_holds(int admit, int write, bool two_roots)
{
    struct rig_options o = options(admit, write);
    struct kvt_rng rng = {5};
    uint64_t day_bytes = 4u << 20, next = 1, last = 0, most = 0, roots = two_roots ? 2 : 1;

    o.two_roots = two_roots;
    o.write_bytes_day = day_bytes;
    o.admit_permille = 900;
    rig_open(&rig, &o, NULL);
    ns = rig_ns(&rig, 1, pages);
    rig.check_each_step = false;
    for (int day = 0; day < 6; day++) {
        last = rig_stats(&rig).disk_written_bytes;
        for (int i = 0; i < 48; i++) {
            uint32_t n = 16 + (uint32_t)kvt_rng_below(&rng, 32);
            (void)put(next, n); /* three times what the budget of one root lets through */
            if (kvt_rng_below(&rng, 2))
                (void)get(next, n);
            next += n;
            rig_advance(&rig, DAY_NS / 48);
        }
        uint64_t today = rig_stats(&rig).disk_written_bytes - last;
        most = today > most ? today : most;
        /* footers and the like are counted when they have been written: a batch more at most */
        assert_true(today < roots * (day_bytes + day_bytes / 24) + 64 * BLOCK);
        assert_true(day == 0 || today > day_bytes / 2); /* and it is no standstill */
    }
    assert_true(rig_stats(&rig).admit_budget + rig_stats(&rig).admit_value > 0);
    printf(
        "admit %d, write %d, %d roots: at most %.2f of the budget in a day; refused %llu for the "
        "budget, %llu for their value\n",
        admit, write, (int)roots, (double)most / (double)(roots * day_bytes),
        (unsigned long long)rig_stats(&rig).admit_budget,
        (unsigned long long)rig_stats(&rig).admit_value);
    rig_check(&rig);
    rig_close(&rig);
}

static void test_a_budget_holds(void **state)
{
    (void)state;
    budget_holds(KVT_ADMIT_ALL, KVT_WRITE_THROUGH, false);
    budget_holds(KVT_ADMIT_ALL, KVT_WRITE_EVICT, true);
    budget_holds(KVT_ADMIT_SECOND, KVT_WRITE_THROUGH, true);
    budget_holds(KVT_ADMIT_VALUE, KVT_WRITE_THROUGH, false);
    budget_holds(KVT_ADMIT_VALUE, KVT_WRITE_IDLE, false);
    budget_holds(KVT_ADMIT_RANDOM, KVT_WRITE_THROUGH, false);
}

/* Under a budget that is far too small VALUE spends it on what comes back. */
static void test_value_takes_what_comes_back(void **state)
{
    struct rig_options o = options(KVT_ADMIT_VALUE, KVT_WRITE_THROUGH);
    struct kvt_rng rng = {11};
    uint64_t next = 100000, hot_on_disk = 0;

    (void)state;
    o.write_bytes_day = 96u << 20;
    begin(&o);
    rig.check_each_step = false;
    for (int minute = 0; minute < 360; minute++) {
        (void)put(1000 * (1 + kvt_rng_below(&rng, 30)), 4); /* 30 prompts that return */
        for (int i = 0; i < 8; i++, next += 4)
            (void)put(next, 4); /* and many that never do */
        rig_advance(&rig, 60000000000);
    }
    for (uint64_t hot = 1; hot <= 30; hot++)
        hot_on_disk += get(1000 * hot, 4);
    printf("%llu of 120 blocks that return are there; written %llu of %llu\n",
           (unsigned long long)hot_on_disk, (unsigned long long)written(),
           (unsigned long long)rig_stats(&rig).commit_ok);
    assert_true(hot_on_disk >= 108);
    assert_true(written() < rig_stats(&rig).commit_ok / 2);
    rig_check(&rig);
    rig_close(&rig);
}

/* RANDOM: the share that is asked for, the same blocks each time. */
static void test_random_takes_its_share(void **state)
{
    struct rig_options o = options(KVT_ADMIT_RANDOM, KVT_WRITE_THROUGH);

    (void)state;
    o.admit_permille = 250;
    begin(&o);
    rig.check_each_step = false;
    for (uint64_t i = 0; i < 2000; i++)
        assert_int_equal(put(1 + i, 1), 1);
    assert_true(written() > 400 && written() < 600);
    assert_int_equal(rig_stats(&rig).admit_random, 2000 - rig_stats(&rig).admit_yes);
    rig_close(&rig);
}

/* Whatever is taken, a chain on disk has no hole: after a crash what is there is a leading run. */
static void test_no_chain_has_a_hole(void **state)
{
    struct kvt_rng rng = {23};

    (void)state;
    for (int admit = KVT_ADMIT_ALL; admit <= KVT_ADMIT_RANDOM; admit++) {
        struct rig_options o = options(admit, KVT_WRITE_THROUGH);
        o.admit_permille = 700;
        o.write_bytes_day = admit == KVT_ADMIT_VALUE ? 48u << 20 : 0;
        begin(&o);
        for (int i = 0; i < 300; i++) {
            (void)put(1000 * (1 + kvt_rng_below(&rng, 12)), 1 + (uint32_t)kvt_rng_below(&rng, 8));
            rig_advance(&rig, 10000000000);
        }
        rig_crash(&rig);
        ns = rig_ns(&rig, 1, pages);
        rig_advance(&rig, 60000000000); /* orphans would be swept by now */
        assert_int_equal(rig_stats(&rig).orphan_dropped, 0);
        uint64_t reached = 0;
        for (uint64_t chain = 1; chain <= 12; chain++)
            reached += get(1000 * chain, 8);
        assert_int_equal(reached, rig_stats(&rig).recovered_blocks);
        assert_true(reached > 0);
        rig_close(&rig);
    }
}

/* Nonsense in the parameters is refused at open. */
static void test_bad_parameters(void **state)
{
    struct rig_options o = options(9, KVT_WRITE_THROUGH);

    (void)state;
    assert_int_equal(rig_try_open(&rig, &o, NULL), KVT_E_INVAL);
    rig_close(&rig);
    o = options(KVT_ADMIT_RANDOM, KVT_WRITE_THROUGH);
    o.admit_permille = 1001;
    assert_int_equal(rig_try_open(&rig, &o, NULL), KVT_E_INVAL);
    rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_c65_all_writes_the_first_put),
        cmocka_unit_test(test_c65_second_use_filters_the_first),
        cmocka_unit_test(test_second_use_through),
        cmocka_unit_test(test_last_blocks_are_written_while_there_is_room),
        cmocka_unit_test(test_the_last_block_waits),
        cmocka_unit_test(test_a_last_block_may_go_unwritten),
        cmocka_unit_test(test_filtered_without_dram),
        cmocka_unit_test(test_a_budget_holds),
        cmocka_unit_test(test_value_takes_what_comes_back),
        cmocka_unit_test(test_random_takes_its_share),
        cmocka_unit_test(test_no_chain_has_a_hole),
        cmocka_unit_test(test_bad_parameters),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
