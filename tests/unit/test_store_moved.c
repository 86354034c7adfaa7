/* Moved records and power: what was flushed once and is in use is never lost between its old place
 * and its new one.
 *
 * Goal:   no segment is overwritten before the records that were moved out of old ones are durable:
 *         not right after a start, when several segments are drained at once; not when the sync of
 *         the segment that they were moved to fails, as often as it may; not when the process died
 *         after moving them and before syncing them, also where the segment that they were moved to
 *         can be read in part only when the root is opened again.
 * Method: a rig without threads over support/power_io.h: at the moment that counts the power goes,
 *         and nothing stays of what no sync has covered. Broken on purpose: the planted bugs
 *         moved_records_not_synced, moved_records_of_a_full_segment_forgotten,
 *         moved_records_of_a_dead_process_forgotten and moved_records_that_wait_forgotten.
 */
#include "support/store_rig.h"

#include <errno.h>
#include <string.h>

#include "base/rng.h"
#include "kvtier/error.h"
#include "store/l2_internal.h"
#include "store/store_impl.h"
#include "support/fault_io.h"
#include "support/power_io.h"

enum { KV4 = 2, PAGES = 8, CHAIN = 8, FIRST_COLD = 100000 };
#define CAP (16u << 20) /* 15 segments of 1 MiB, of about 31 records each */

static const uint32_t pages[7] = {0, 0, PAGES, 0, 0, 0, 0};
static struct rig rig;
static struct kvt_rng rng = {20261129};
static uint32_t ns;
static uint64_t next_cold;
static const struct fault_rule *next_life; /* of the drive, from its start on; or NULL */

static struct rig_options options(void)
{
    struct rig_options o = rig_defaults();

    o.cache_bytes = 16 * PAGES * 4096;
    o.staging_bytes = 4 * PAGES * 4096;
    o.write_queue_bytes = 16 * PAGES * 4096;
    o.disk_cap_bytes = CAP;
    return o;
}

/* Store n blocks that nobody will ask for. */
static void cold(uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        (void)rig_put(&rig, ns, &next_cold, 1, 0, KV4, 0, NULL);
        next_cold++;
    }
}

static uint32_t get_chain(void)
{
    uint64_t numbers[CHAIN];

    for (uint32_t i = 0; i < CHAIN; i++)
        numbers[i] = 1 + i;
    return rig_get(&rig, ns, numbers, CHAIN, 0, NULL, NULL);
}

/* The process ends without a word, and what power_io_loss() leaves is opened. */
static void die(enum power_loss loss)
{
    struct kvt_io *power = fault_io_inner(rig.io), *next = NULL;
    struct rig_options o = options();

    fault_io_clear(rig.io);
    fault_io_pull_the_plug(rig.io);
    kvt_store_close(rig.store, 0);
    rig.store = NULL;
    (void)power_io_loss(power, loss, &rng);
    if (loss != POWER_KEEPS)
        assert_int_equal(kvt_io_mem_clone(power_io_inner(power), &next), 0);
    if (next) {
        rig_close(&rig);
        rig_open(&rig, &o, power_io_new(next));
    } else { /* what is not durable is still to be lost */
        fault_io_plug_in(rig.io);
        if (next_life)
            assert_true(fault_io_rule(rig.io, next_life) >= 0);
        rig_start(&rig);
    }
    ns = rig_ns(&rig, 1, pages);
}

/* A full root whose oldest segment holds the chain, just opened; the chain is asked for. False: the
 * log has turned over already. */
static bool begin(uint32_t fill)
{
    struct rig_options o = options();
    struct kvt_io *mem = NULL;
    uint64_t numbers[CHAIN];

    assert_int_equal(kvt_io_mem_new(2 * CAP, &mem), 0);
    rig_open(&rig, &o, power_io_new(mem));
    ns = rig_ns(&rig, 1, pages);
    next_cold = FIRST_COLD;
    for (uint32_t i = 0; i < CHAIN; i++)
        numbers[i] = 1 + i;
    assert_int_equal(rig_put(&rig, ns, numbers, CHAIN, 0, KV4, 0, NULL), CHAIN);
    assert_int_equal(rig_flush(&rig), 0);
    cold(fill);
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    return get_chain() == CHAIN;
}

/* Until the chain has been moved. False: it was not, or a segment has been recycled before. */
static bool move_chain(void)
{
    for (int i = 0; i < 100 && rig_stats(&rig).reinserted < CHAIN; i++)
        cold(1);
    return rig_stats(&rig).reinserted >= CHAIN;
}

static bool recycle_one(void)
{
    uint64_t before = rig_stats(&rig).evict_disk_segments;

    for (int i = 0; i < 200 && rig_stats(&rig).evict_disk_segments == before; i++)
        cold(1);
    return rig_stats(&rig).evict_disk_segments > before;
}

static uint32_t open_segment(void)
{
    const struct kvt_l2 *l2 = rig.store->disks[0].l2;

    assert_non_null(l2->open);
    return l2->open->segment;
}

/* The chain is there after a power loss that follows the moves and what `goes` does: false, where
 * it has not come to that. */
static void survives(bool (*goes)(void))
{
    uint32_t tried = 0;

    for (uint32_t fill = 364; fill < 400; fill += 2) {
        if (begin(fill) && move_chain() && goes()) {
            die(POWER_DROPS);
            assert_int_equal(get_chain(), CHAIN);
            tried++;
        }
        rig_close(&rig);
    }
    printf("           %u power losses\n", tried);
    assert_true(tried >= 5);
}

static void test_synced_before_the_old_place_goes(void **state)
{
    (void)state;
    survives(recycle_one);
}

/* The segment that the records were moved to is full, and its sync fails. */
static void test_a_sync_that_fails(void **state)
{
    uint32_t tried = 0;

    (void)state;
    for (uint32_t fill = 364; fill < 400; fill += 3) {
        char name[32];
        struct fault_rule rule = {
            .ops = FAULT_SYNC, .name = name, .action = FAULT_FAIL, .error = EIO};
        uint64_t recycled;

        if (!begin(fill) || !move_chain()) {
            rig_close(&rig);
            continue;
        }
        snprintf(name, sizeof(name), "seg-%08x", open_segment());
        recycled = rig_stats(&rig).evict_disk_segments;
        assert_true(fault_io_rule(rig.io, &rule) >= 0);
        for (int i = 0; i < 30; i++) { /* several segments' worth, and time to try again */
            cold(10);
            rig_advance(&rig, 2000000000);
        }
        if (fill % 2) {
            fault_io_clear(rig.io); /* the drive is well again: so is the log */
            rig_advance(&rig, 20000000000);
            assert_true(recycle_one());
            assert_true(rig_stats(&rig).evict_disk_segments > recycled);
        }
        die(POWER_DROPS);
        assert_int_equal(get_chain(), CHAIN);
        rig_close(&rig);
        tried++;
    }
    printf("           %u power losses\n", tried);
    assert_true(tried >= 3);
}

/* Nothing of the oldest segment is of use any more, so that recycling it moves nothing else. */
static void purge_the_rest(void)
{
    uint64_t numbers[31 - CHAIN];

    for (uint32_t i = 0; i < 31 - CHAIN; i++)
        numbers[i] = FIRST_COLD + i;
    assert_true(rig_keys(&rig, KVT_OP_PURGE, ns, numbers, 31 - CHAIN) >= 0);
}

static bool die_and_recycle_one(void)
{
    die(POWER_KEEPS);
    purge_the_rest();
    return recycle_one();
}

/* The process dies when they have been moved; the next one recycles, then the power goes. */
static void test_a_process_that_died(void **state)
{
    (void)state;
    survives(die_and_recycle_one);
}

/* The same, and the segment that they were moved to can be read up to them, and no further. */
static bool die_unread_and_recycle_one(void)
{
    static uint64_t turn;
    const struct kvt_l2 *l2;
    char name[32];
    const struct fault_rule rule = {.ops = FAULT_READ,
                                    .name = name,
                                    .skip = 2 + turn++ % 6,
                                    .action = FAULT_FAIL,
                                    .error = EIO};
    uint32_t to = open_segment();

    snprintf(name, sizeof name, "seg-%08x", to);
    next_life = &rule;
    die(POWER_KEEPS);
    next_life = NULL;
    l2 = rig.store->disks[0].l2;
    if (l2->segments[to].state != KVT_L2_UNREAD || !l2->segments[to].partly)
        return false;
    purge_the_rest();
    return recycle_one() && l2->segments[to].state == KVT_L2_UNREAD;
}

static void test_a_process_that_died_and_bad_reads(void **state)
{
    (void)state;
    survives(die_unread_and_recycle_one);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_synced_before_the_old_place_goes),
        cmocka_unit_test(test_a_sync_that_fails),
        cmocka_unit_test(test_a_process_that_died),
        cmocka_unit_test(test_a_process_that_died_and_bad_reads),
    };

    return cmocka_run_group_tests_name("store_moved", tests, NULL, NULL);
}
