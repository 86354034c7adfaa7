/* Goal: every message of the store does what message.h says, and the reported cases hold.
 * Method: a rig without threads (support/store_rig.h): messages by call, time by hand, disk in
 * memory; each load is compared byte for byte, and the store's invariants are checked after each
 * step. CASES C2 C8 C9 C10 (store part) C22 C25 C26 C31 (accounting) C33 C34 C52 C54 C58 C59.
 */
#include "support/store_rig.h"

#include <malloc.h>
#include <string.h>

#include "base/rng.h"
#include "kvtier/error.h"
#include "store/index.h"

/* pages of a record by map: 2 kv4, 5 kv8, 6 raw */
static const uint32_t pages[7] = {0, 0, 4, 0, 0, 8, 16};
enum { KV4 = 2, KV8 = 5, RAW = 6 };

static void numbers_from(uint64_t *numbers, uint32_t n, uint64_t first)
{
    for (uint32_t i = 0; i < n; i++)
        numbers[i] = first + i;
}

static void test_put_get(void **state)
{
    struct rig_options options = rig_defaults();
    int32_t statuses[12];
    uint64_t n[12];
    uint8_t tiers[12];
    struct rig rig;
    uint32_t ns;

    (void)state;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    numbers_from(n, 12, 100);
    assert_int_equal(rig_lookup(&rig, ns, n, 12, 0, tiers), 0);
    assert_int_equal(tiers[0], KVT_TIER_MISS);
    assert_int_equal(rig_put(&rig, ns, n, 10, 0, KV4, false, statuses), 10);
    assert_int_equal(rig_lookup(&rig, ns, n, 12, 0, tiers), 10);
    assert_int_equal(tiers[9], KVT_TIER_DRAM);
    assert_int_equal(tiers[10], KVT_TIER_MISS);
    assert_int_equal(rig_get(&rig, ns, n, 12, 0, statuses, NULL), 10);
    assert_int_equal(statuses[10], KVT_E_MISS);
    assert_int_equal(statuses[11], KVT_E_MISS);
    assert_int_equal(rig_put(&rig, ns, n, 12, 0, KV4, false, statuses), 2);
    assert_int_equal(statuses[0], KVT_E_EXISTS);
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(rig_stats(&rig).disk_blocks, 12);
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(rig_lookup(&rig, ns, n, 12, 0, tiers), 12);
    assert_int_equal(tiers[0], KVT_TIER_DISK);
    assert_int_equal(rig_get(&rig, ns, n, 12, 0, statuses, NULL), 12);
    assert_int_equal(rig_stats(&rig).load_granted_disk, 12);
    assert_int_equal(rig_lookup(&rig, ns, n, 12, 0, tiers), 12);
    assert_int_equal(tiers[0], KVT_TIER_DRAM); /* promoted */
    assert_int_equal(rig_stats(&rig).dram_pins, 0);
    rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_put_get),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
