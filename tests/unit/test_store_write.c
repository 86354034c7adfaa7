/* When blocks go to disk: write policies, and what is lost when one goes unwritten.
 *
 * Goal:   through, evict, idle and auto write when they say and not before; flush and close write
 * all; an eviction costs nothing that could have been written in time; what is lost nevertheless is
 *         counted by its reason, block for block; a dead disk is not asked all the time.
 * Method: a rig without threads (support/store_rig.h) whose clock is a number and whose disk can be
 *         held back or made to fail; counters and what a restart finds tell what was written.
 */
#include "support/store_rig.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "kvtier/error.h"
#include "support/fault_io.h"

enum { KV4 = 2, RAW = 6 };

static const uint32_t pages[7] = {0, 0, 2, 0, 0, 0, 8};
static struct rig rig;
static uint32_t ns;

static struct rig_options small(int write)
{
    struct rig_options o = rig_defaults();

    o.cache_bytes = 64 * 2 * 4096; /* 64 blocks */
    o.write_queue_bytes = 32 * 2 * 4096;
    o.write = write;
    return o;
}

static void begin(const struct rig_options *o)
{
    rig_open(&rig, o, NULL);
    ns = rig_ns(&rig, 1, pages);
}

/* Blocks first .. first + n - 1, one chain. */
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

static uint32_t found_after_crash(uint64_t first, uint32_t n)
{
    uint32_t found = 0;

    rig_crash(&rig);
    ns = rig_ns(&rig, 1, pages);
    for (uint32_t i = 0; i < n; i++)
        found += get(first + i, 1);
    return found;
}

static void test_through_is_written_at_once(void **state)
{
    struct rig_options o = small(KVT_WRITE_DEFAULT);

    (void)state;
    begin(&o);
    assert_int_equal(put(1, 8), 8);
    assert_int_equal(written(), 8);
    assert_int_equal(rig_stats(&rig).disk_deferred, 0);
    assert_int_equal(found_after_crash(1, 8), 8);
    rig_close(&rig);
}

/* C66: L1 holds half of the set; with write-through the second pass finds everything. */
static void test_c66_write_through_second_pass_hits(void **state)
{
    struct rig_options o = small(KVT_WRITE_THROUGH);

    (void)state;
    begin(&o);
    for (uint64_t c = 0; c < 16; c++)
        assert_int_equal(put(c * 8 + 1, 8), 8);
    for (uint64_t c = 0; c < 16; c++)
        assert_int_equal(get(c * 8 + 1, 8), 8);
    assert_true(rig_stats(&rig).load_granted_disk > 0);
    rig_close(&rig);
}

/* C66: write-back writes nothing until L1 must give something up, and then loses nothing. */
static void test_c66_write_back_writes_on_eviction(void **state)
{
    struct rig_options o = small(KVT_WRITE_EVICT);
    uint64_t bytes_at_open;

    (void)state;
    begin(&o);
    bytes_at_open = rig_stats(&rig).disk_written_bytes;
    for (uint64_t c = 0; c < 7; c++) /* seven eighths of L1 */
        assert_int_equal(put(c * 8 + 1, 8), 8);
    rig_advance(&rig, 60000000000);
    assert_int_equal(written(), 0);
    assert_int_equal(rig_stats(&rig).disk_written_bytes, bytes_at_open);
    assert_int_equal(rig_stats(&rig).disk_deferred, 56);
    assert_int_equal(rig_stats(&rig).disk_unsaved, 56);
    for (uint64_t c = 7; c < 32; c++) /* four times L1 */
        assert_int_equal(put(c * 8 + 1, 8), 8);
    assert_true(written() >= 256 - 64 && written() < 256);
    assert_int_equal(rig_stats(&rig).lost_deferred, 0);
    assert_int_equal(rig_stats(&rig).evict_dram_lost, 0);
    for (uint64_t c = 0; c < 32; c++)
        assert_int_equal(get(c * 8 + 1, 8), 8);
    rig_close(&rig);
}

/* One chain as long as half of DRAM: only its end may leave, but what leaves next is behind it. */
static void test_evict_writes_chains_ahead(void **state)
{
    struct rig_options o = small(KVT_WRITE_EVICT);

    (void)state;
    begin(&o);
    assert_int_equal(put(1, 32), 32);
    for (uint64_t i = 0; i < 100; i++)
        assert_int_equal(put(1000 + i, 1), 1);
    assert_int_equal(rig_stats(&rig).lost_deferred, 0);
    assert_int_equal(get(1, 32), 32);
    for (uint64_t i = 0; i < 100; i++)
        assert_int_equal(get(1000 + i, 1), 1);
    rig_close(&rig);
}

/* Chains far longer than one look ahead reaches: what leaves next is written to the whole eighth of
 * DRAM all the same, so a burst as large as that costs nothing while the disk stands still. */
static void test_a_burst_behind_long_chains_loses_nothing(void **state)
{
    enum { BLOCKS = 8192, PIECE = 200 };
    struct rig_options large = small(KVT_WRITE_EVICT);

    (void)state;
    large.cache_bytes = BLOCKS * 2 * 4096;
    large.write_queue_bytes = BLOCKS / 4 * 2 * 4096;
    large.disk_cap_bytes = UINT64_C(4) * BLOCKS * 2 * 4096;
    large.blocks_max = 4 * BLOCKS;
    begin(&large);
    for (uint64_t chain = 0; chain < 2; chain++)
        for (uint64_t i = 0; i < 18; i++) { /* 7,200 blocks: less than an eighth is free */
            uint64_t numbers[PIECE], first = 1 + chain * 100000 + i * PIECE;

            for (uint64_t j = 0; j < PIECE; j++)
                numbers[j] = first + j;
            assert_int_equal(rig_put(&rig, ns, numbers, PIECE, i ? first - 1 : 0, KV4, false, NULL),
                             PIECE);
        }
    rig_advance(&rig, 1000000000);
    assert_true(written() >= BLOCKS / 8);
    assert_true(written() <= BLOCKS / 4); /* and no more than what may leave soon */
    rig_hold(&rig, true);
    for (uint64_t i = 0; i < 9; i++)
        assert_int_equal(put(900000 + i * PIECE, PIECE), PIECE);
    assert_int_equal(rig_stats(&rig).lost_deferred, 0);
    rig_hold(&rig, false);
    assert_int_equal(get(1, PIECE), PIECE);
    rig_close(&rig);
}

/* A disk that does not answer while DRAM overflows: the caller is served, old blocks go, and each
 * of them is counted. */
static void test_a_burst_loses_old_blocks_and_says_so(void **state)
{
    struct rig_options o = small(KVT_WRITE_EVICT);
    struct kvt_store_stats stats;
    uint32_t found = 0, stored = 0;

    (void)state;
    begin(&o);
    rig_hold(&rig, true);
    for (uint64_t i = 0; i < 200; i++)
        stored += put(1 + i, 1);
    rig_hold(&rig, false);
    stats = rig_stats(&rig);
    for (uint64_t i = 0; i < 200; i++)
        found += get(1 + i, 1);
    printf("           %u stored, %u found, %llu lost\n", stored, found,
           (unsigned long long)stats.lost_deferred);
    assert_true(stats.lost_deferred > 0);
    assert_int_equal(found + stats.lost_deferred, stored);
    assert_int_equal(stats.lost_queue + stats.lost_error, 0);
    assert_int_equal(rig_flush(&rig), KVT_E_DROPPED); /* once */
    assert_int_equal(rig_flush(&rig), 0);
    rig_close(&rig);
}

static void test_flush_and_close_write_all(void **state)
{
    static const int policies[] = {KVT_WRITE_EVICT, KVT_WRITE_IDLE};

    (void)state;
    for (int i = 0; i < 2; i++) {
        struct rig_options o = small(policies[i]);

        begin(&o);
        assert_int_equal(put(1, 40), 40);
        assert_int_equal(written(), 0);
        assert_int_equal(rig_flush(&rig), 0);
        assert_int_equal(written(), 40);
        assert_int_equal(rig_stats(&rig).disk_unsaved, 0);
        assert_int_equal(put(100, 16), 16);
        assert_int_equal(found_after_crash(1, 40), 40); /* without the 16, which nobody flushed */
        assert_int_equal(get(100, 16), 0);
        assert_int_equal(put(200, 16), 16);
        rig_reopen(&rig);
        ns = rig_ns(&rig, 1, pages);
        assert_int_equal(get(200, 16), 16);
        assert_int_equal(rig_filed_stat(&rig, "disk.lost_deferred"), 0);
        rig_close(&rig);
    }
}

static void test_idle_writes_when_nothing_is_asked(void **state)
{
    struct rig_options o = small(KVT_WRITE_IDLE);

    (void)state;
    begin(&o);
    for (uint64_t c = 0; c < 5; c++) {
        assert_int_equal(put(c * 8 + 1, 8), 8);
        rig_advance(&rig, 400000000); /* busy enough */
    }
    assert_int_equal(written(), 0);
    rig_advance(&rig, 70000000);
    assert_int_equal(written(), 0);
    rig_advance(&rig, 30000000);
    assert_int_equal(written(), 40); /* more than the queue takes at a time */
    assert_int_equal(rig_stats(&rig).disk_dropped_queue, 0);
    assert_int_equal(found_after_crash(1, 40), 40);
    rig_close(&rig);
}

/* Until the log has had to recycle a segment. */
static void fill_the_disk(void)
{
    for (uint64_t first = 1u << 20; rig_stats(&rig).evict_disk_segments == 0; first += 100) {
        assert_int_equal(put(first, 8), 8);
        assert_int_equal(rig_flush(&rig), 0);
    }
}

static struct rig_options small_disk(int write)
{
    struct rig_options o = small(write);

    o.disk_cap_bytes = 8u << 20;
    return o;
}

/* A disk that has room is written to at once; one that is full half a minute later. */
static void test_auto_waits_where_a_write_takes_a_place(void **state)
{
    struct rig_options o = small_disk(KVT_WRITE_AUTO);
    uint64_t before, ahead;

    (void)state;
    begin(&o);
    assert_int_equal(put(1, 8), 8);
    assert_int_equal(written(), 8);
    assert_int_equal(rig_stats(&rig).disk_deferred, 0);
    fill_the_disk();
    before = written();
    assert_int_equal(put(101, 8), 8);
    ahead = written() - before; /* DRAM is full: the end of the chain may be about to leave */
    assert_true(ahead <= 2);
    assert_int_equal(rig_stats(&rig).disk_unsaved, 8 - ahead);
    for (int i = 0; i < 24; i++) /* an idle store waits as well */
        rig_advance(&rig, 1000000000);
    assert_int_equal(written(), before + ahead);
    for (int i = 0; i < 6; i++)
        rig_advance(&rig, 1000000000);
    assert_int_equal(written(), before + 8);
    assert_int_equal(rig_stats(&rig).disk_unsaved, 0);
    assert_int_equal(found_after_crash(101, 8), 8);
    rig_close(&rig);
}

/* The clock of each block is its own: what comes all the time does not hold the first ones up. */
static void test_auto_writes_each_block_in_time(void **state)
{
    struct rig_options o = small_disk(KVT_WRITE_AUTO);

    (void)state;
    begin(&o);
    fill_the_disk();
    for (uint64_t second = 0; second < 60; second++) {
        assert_int_equal(put(1000 + second, 1), 1);
        rig_advance(&rig, 1000000000);
        assert_true(rig_stats(&rig).disk_unsaved <= 31);
    }
    assert_int_equal(found_after_crash(1000, 30), 30);
    rig_close(&rig);
}

/* No more than half of DRAM is deferred; what comes then is written at once, and nothing is lost:
 * not by bursts, nor by a stream of four times DRAM. A flush writes what waits. */
static void test_auto_loses_nothing(void **state)
{
    struct rig_options o = small_disk(KVT_WRITE_AUTO);

    (void)state;
    begin(&o);
    fill_the_disk();
    assert_int_equal(put(1, 50), 50);
    assert_in_range(rig_stats(&rig).disk_unsaved, 24, 32);
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(rig_stats(&rig).disk_unsaved, 0);
    for (uint64_t c = 0; c < 32; c++)
        assert_int_equal(put(10000 + c * 8, 8), 8);
    for (uint64_t c = 0; c < 8; c++)
        assert_int_equal(put(20000 + c * 32, 32), 32);
    assert_int_equal(rig_stats(&rig).lost_deferred, 0);
    assert_int_equal(rig_stats(&rig).evict_dram_lost, 0);
    for (uint64_t c = 0; c < 8; c++)
        assert_int_equal(get(20000 + c * 32, 32), 32);
    rig_close(&rig);
}

/* Each request may say when; evict stays where idle goes. */
static void test_requests_choose(void **state)
{
    struct rig_options o = small(KVT_WRITE_EVICT);

    (void)state;
    begin(&o);
    rig.write = KVT_WRITE_THROUGH;
    assert_int_equal(put(1, 4), 4);
    assert_int_equal(written(), 4);
    rig.write = KVT_WRITE_IDLE;
    assert_int_equal(put(11, 4), 4);
    rig.write = KVT_WRITE_DEFAULT;
    assert_int_equal(put(21, 4), 4);
    assert_int_equal(written(), 4);
    rig_advance(&rig, 1000000000);
    assert_int_equal(written(), 8);
    assert_int_equal(rig_stats(&rig).disk_unsaved, 4);
    rig.write = 5;
    {
        struct kvt_msg_alloc msg = {
            .msg = {.bytes = sizeof(msg), .op = KVT_OP_ALLOC, .cookie = 9999, .ns = ns},
            .map = KV4,
            .write = 5};

        rig_forget_replies(&rig);
        assert_int_equal(rig_send(&rig, 1, &msg), 0);
        assert_int_equal(rig_reply(&rig, 9999)->status, KVT_E_INVAL);
    }
    rig_close(&rig);
}

/* Without DRAM there is no place to wait in. */
static void test_no_dram_writes_through(void **state)
{
    struct rig_options o = small(KVT_WRITE_EVICT);

    (void)state;
    o.cache_bytes = 0;
    begin(&o);
    for (uint64_t i = 1; i <= 50; i++)
        assert_int_equal(put(i, 1), 1);
    assert_int_equal(written(), 50);
    for (uint64_t i = 1; i <= 50; i++)
        assert_int_equal(get(i, 1), 1);
    rig_close(&rig);
}

/* What was dropped for a full queue is written when its turn to leave comes: a moment's shortage
 * costs nothing. */
static void test_dropped_blocks_get_another_chance(void **state)
{
    struct rig_options o = small(KVT_WRITE_THROUGH);

    (void)state;
    o.write_queue_bytes = 8 * 2 * 4096;
    begin(&o);
    rig_hold(&rig, true);
    for (uint64_t i = 0; i < 32; i++)
        assert_int_equal(put(1 + i, 1), 1);
    assert_true(rig_stats(&rig).disk_dropped_queue > 0);
    rig_hold(&rig, false);
    assert_true(rig_stats(&rig).disk_unsaved > 0);
    for (uint64_t i = 100; i < 300; i++)
        assert_int_equal(put(i, 1), 1);
    assert_int_equal(rig_stats(&rig).evict_dram_lost, 0);
    for (uint64_t i = 0; i < 32; i++)
        assert_int_equal(get(1 + i, 1), 1);
    rig_close(&rig);
}

/* C54: a load makes no room with the only copy of a block, least of all of one of its own chain.
 * The last block of the chain was dropped by the write queue; its first ones are on disk only. */
static void test_c54_loads_push_out_nothing_unsaved(void **state)
{
    struct rig_options o = small(KVT_WRITE_THROUGH);
    uint64_t last = 16;

    (void)state;
    o.cache_bytes = 24 * 2 * 4096;
    o.staging_bytes = 32 * 2 * 4096;
    o.write_queue_bytes = 8 * 2 * 4096;
    begin(&o);
    for (uint64_t c = 0; c < 2; c++)
        assert_int_equal(put(c * 100 + 1, c ? 24 : 15), c ? 24 : 15); /* the second pushes out */
    rig_hold(&rig, true);
    for (uint64_t i = 200; i < 216; i++) /* fills the queue, and what was dropped fills DRAM */
        (void)put(i, 1);
    assert_int_equal(rig_put(&rig, ns, &last, 1, 15, KV4, false, NULL), 1);
    assert_true(rig_stats(&rig).disk_dropped_queue > 0 && rig_stats(&rig).disk_unsaved > 0);
    rig_hold(&rig, false);
    {
        uint64_t before = rig_stats(&rig).evict_dram_lost, numbers[16];

        for (uint64_t i = 0; i < 16; i++)
            numbers[i] = i + 1;
        assert_int_equal(rig_lookup(&rig, ns, numbers, 16, 0, NULL), 16);
        assert_int_equal(get(1, 16), 16);
        assert_int_equal(rig_stats(&rig).evict_dram_lost, before);
    }
    rig_close(&rig);
}

/* C81: the target is full. Blocks lost are counted by reason, each once, also by the close. */
static void test_c81_a_full_target_counts_what_is_lost(void **state)
{
    static const int policies[] = {KVT_WRITE_THROUGH, KVT_WRITE_EVICT};

    (void)state;
    for (int i = 0; i < 2; i++) {
        struct rig_options o = small(policies[i]);
        struct fault_rule full = {.ops = FAULT_WRITE | FAULT_ALLOCATE,
                                  .name = "seg-",
                                  .action = FAULT_FAIL,
                                  .error = ENOSPC};
        uint32_t found = 0, stored = 0;
        uint64_t lost;

        begin(&o);
        assert_int_equal(put(1, 16), 16);
        assert_int_equal(rig_flush(&rig), 0);
        assert_true(fault_io_rule(rig.io, &full) >= 0);
        for (uint64_t n = 0; n < 300; n++) {
            stored += put(100 + n, 1);
            rig_advance(&rig, 30000000);
        }
        assert_true(rig_stats(&rig).enospc > 0);
        assert_true(rig_stats(&rig).evict_dram_lost > 0);
        rig_reopen(&rig);
        fault_io_clear(rig.io);
        ns = rig_ns(&rig, 1, pages);
        for (uint64_t n = 0; n < 300; n++)
            found += get(100 + n, 1);
        found += get(1, 16);
        lost = rig_filed_stat(&rig, "disk.lost_error") +
               rig_filed_stat(&rig, "disk.lost_deferred") + rig_filed_stat(&rig, "disk.lost_queue");
        printf("           %u stored, %u found, %llu lost unwritten, %llu with recycled segments\n",
               16 + stored, found, (unsigned long long)lost,
               (unsigned long long)rig_filed_stat(&rig, "disk.evicted"));
        assert_true(lost > 0);
        assert_int_equal(16 + stored - found, lost + rig_filed_stat(&rig, "disk.evicted"));
        rig_close(&rig);
    }
}

/* A disk that fails for ever is asked about once a second for what waits, not in a loop. */
static void test_a_dead_disk_is_left_in_peace(void **state)
{
    struct rig_options o = small(KVT_WRITE_EVICT);
    struct fault_rule dead = {
        .ops = FAULT_WRITE, .name = "seg-", .action = FAULT_FAIL, .error = EIO};
    uint64_t before;

    (void)state;
    begin(&o);
    assert_true(fault_io_rule(rig.io, &dead) >= 0);
    for (uint64_t i = 0; i < 300; i++)
        assert_int_equal(put(1 + i, 1), 1); /* DRAM goes on as a cache */
    assert_true(rig_stats(&rig).write_fail > 0);
    before = fault_io_count(rig.io, FAULT_WRITE);
    for (int i = 0; i < 100; i++)
        rig_advance(&rig, 100000000);
    assert_true(fault_io_count(rig.io, FAULT_WRITE) - before < 40);
    fault_io_clear(rig.io);
    rig_advance(&rig, 20000000000);
    assert_true(put(1000, 1) == 1);
    assert_int_equal(get(1000, 1), 1);
    (void)rig_flush(&rig);
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(found_after_crash(1000, 1), 1);
    rig_close(&rig);
}

/* Purged, replaced and unpinned blocks that were never written leave the sums in order. */
static void test_unsaved_blocks_come_and_go(void **state)
{
    struct rig_options o = small(KVT_WRITE_IDLE);
    struct kvt_rng rng = {test_seed()};
    uint64_t n;

    (void)state;
    o.pin_bytes_max = 16 * 2 * 4096;
    begin(&o);
    for (int i = 0; i < 3000; i++) { /* the rig checks every sum after each of them */
        n = 1 + kvt_rng_below(&rng, 120);
        rig.write = (uint8_t)kvt_rng_below(&rng, 5);
        switch (kvt_rng_below(&rng, 8)) {
        case 0:
            assert_true(rig_keys(&rig, KVT_OP_PURGE, ns, &n, 1) >= 0);
            break;
        case 1:
            assert_true(rig_keys(&rig, KVT_OP_PIN, ns, &n, 1) >= 0);
            break;
        case 2:
            assert_true(rig_keys(&rig, KVT_OP_UNPIN, ns, &n, 1) >= 0);
            break;
        case 3:
            (void)rig_put(&rig, ns, &n, 1, 0, RAW, true, NULL);
            break;
        case 4:
            rig_advance(&rig, (int64_t)kvt_rng_below(&rng, 700000000));
            break;
        case 5:
            (void)get(n, 1);
            break;
        default:
            (void)put(n, (uint32_t)(1 + kvt_rng_below(&rng, 6)));
        }
    }
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, NULL, 0) >= 0, 1);
    assert_int_equal(rig_stats(&rig).disk_unsaved, 0);
    rig_close(&rig);
}

/* What is in front of a read: no more than the drive writes in a fifth of a second, as it has been
 * measured, and 16 MiB however fast it is. */
static void test_batches_follow_the_drive(void **state)
{
    static const uint32_t long_pages[7] = {0, 0, 64, 0, 0, 0, 64};
    struct rig_options o = rig_defaults();
    uint64_t numbers[256], before;
    int64_t speeds[] = {1000000000, 1000000, 25000000}; /* ns for a batch */
    uint64_t most[] = {1u << 20, 16u << 20, 0};

    (void)state;
    for (uint64_t i = 0; i < 256; i++)
        numbers[i] = 1 + i;
    o.cache_bytes = 128u << 20;
    o.write_queue_bytes = 96u << 20;
    o.disk_cap_bytes = 1u << 30;
    for (int s = 0; s < 3; s++) {
        rig_open(&rig, &o, NULL);
        ns = rig_ns(&rig, 1, long_pages);
        assert_int_equal(rig_stats(&rig).disk_batch_bytes, 4u << 20); /* nothing is known */
        rig_hold(&rig, true);
        assert_int_equal(rig_put(&rig, ns, numbers, 256, 0, KV4, false, NULL), 256); /* 64 MiB */
        rig_advance(&rig, 10000000);
        before = rig_stats(&rig).disk_queue_bytes;
        assert_true(before >= (64u << 20) - (8u << 20) && before < 64u << 20);
        for (int i = 0; rig_stats(&rig).disk_queue_bytes; i++) {
            uint64_t bound = rig_stats(&rig).disk_batch_bytes;

            assert_true(i < 1000);
            before = rig_stats(&rig).disk_queue_bytes;
            rig.now_ns += speeds[s];
            rig_release_io(&rig, 1, false);
            assert_true(before - rig_stats(&rig).disk_queue_bytes <=
                        KVT_MAX(bound, rig_stats(&rig).disk_batch_bytes));
        }
        printf("           a batch in %lld ms: at most %llu KiB\n", (long long)speeds[s] / 1000000,
               (unsigned long long)rig_stats(&rig).disk_batch_bytes >> 10);
        if (most[s])
            assert_int_equal(rig_stats(&rig).disk_batch_bytes, most[s]);
        rig_hold(&rig, false);
        assert_int_equal(rig_flush(&rig), 0);
        rig_close(&rig);
    }
}

/* Small batches say how long a request takes, not how fast the drive is; a failed one says nothing.
 */
static void test_small_batches_teach_nothing(void **state)
{
    struct rig_options o = small(KVT_WRITE_DEFAULT);
    struct fault_rule rule = {
        .ops = FAULT_WRITE, .name = "seg-", .times = 1, .action = FAULT_FAIL, .error = EIO};

    (void)state;
    begin(&o);
    for (uint64_t n = 1; n <= 20; n++) {
        rig_hold(&rig, true);
        assert_int_equal(put(n, 1), 1);
        rig_advance(&rig, 10000000);
        rig.now_ns += 20000000; /* 8 KiB in 20 ms */
        rig_hold(&rig, false);
    }
    assert_int_equal(rig_stats(&rig).disk_batch_bytes, 4u << 20);
    assert_true(fault_io_rule(rig.io, &rule) >= 0);
    rig_hold(&rig, true);
    assert_int_equal(put(100, 1), 1);
    rig_advance(&rig, 10000000);
    rig.now_ns += 5000000000;
    rig_hold(&rig, false);
    assert_int_equal(rig_stats(&rig).disk_batch_bytes, 4u << 20);
    rig_hold(&rig, true); /* even 8 KiB in three seconds say a lot */
    assert_int_equal(put(101, 1), 1);
    rig_advance(&rig, 10000000);
    rig.now_ns += 3000000000;
    rig_hold(&rig, false);
    assert_int_equal(rig_stats(&rig).disk_batch_bytes, 1u << 20);
    rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_through_is_written_at_once),
        cmocka_unit_test(test_c66_write_through_second_pass_hits),
        cmocka_unit_test(test_c66_write_back_writes_on_eviction),
        cmocka_unit_test(test_evict_writes_chains_ahead),
        cmocka_unit_test(test_a_burst_behind_long_chains_loses_nothing),
        cmocka_unit_test(test_a_burst_loses_old_blocks_and_says_so),
        cmocka_unit_test(test_flush_and_close_write_all),
        cmocka_unit_test(test_idle_writes_when_nothing_is_asked),
        cmocka_unit_test(test_auto_waits_where_a_write_takes_a_place),
        cmocka_unit_test(test_auto_writes_each_block_in_time),
        cmocka_unit_test(test_auto_loses_nothing),
        cmocka_unit_test(test_requests_choose),
        cmocka_unit_test(test_no_dram_writes_through),
        cmocka_unit_test(test_dropped_blocks_get_another_chance),
        cmocka_unit_test(test_c54_loads_push_out_nothing_unsaved),
        cmocka_unit_test(test_c81_a_full_target_counts_what_is_lost),
        cmocka_unit_test(test_a_dead_disk_is_left_in_peace),
        cmocka_unit_test(test_unsaved_blocks_come_and_go),
        cmocka_unit_test(test_batches_follow_the_drive),
        cmocka_unit_test(test_small_batches_teach_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
