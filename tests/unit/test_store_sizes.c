/* Records that are longer than a root can hold, and roots whose cap has become another one.
 *
 * Goal:   a namespace whose records do not fit into a root's segments, or into the staging memory,
 *         runs with DRAM and with the other roots, and that is counted and told with what would do;
 *         what cannot be loaded is a miss at once; a cap three times as large gives a root segments
 *         of its own, a smaller change keeps what is there; nothing of before comes back when the
 *         cap becomes what it was, not even after an end at any operation of the change, and what
 *         was purged stays purged.
 * Method: the rig without threads over memory disks; every record compared byte for byte; a fault
 *         at operation N of the open, for every N, each followed by a restart.
 */
#include "support/store_rig.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"
#include "support/fault_io.h"

enum { KV4 = 2, RAW = 6, BLOCKS = 24 };

#define SMALL_CAP (16ull << 20) /* segments of 1 MiB: records of 252 KiB at most */
#define LARGE_CAP (256ull << 20)

static const uint32_t pages[7] = {0, 0, 4, 0, 0, 0, 8};
static const uint32_t long_pages[7] = {0, 0, 4, 0, 0, 0, 80};
static char said[512];

static void note(void *ctx, int level, const char *message)
{
    (void)ctx;
    if (level <= KVT_LOG_WARN)
        snprintf(said, sizeof(said), "%s", message);
}

static void listen_to(struct rig *rig)
{
    rig->store->params.log = (struct kvt_log){note, NULL, KVT_LOG_WARN};
    said[0] = '\0';
}

static uint32_t put(struct rig *rig, uint32_t ns, uint64_t first, uint32_t n, uint8_t map)
{
    uint32_t stored = 0;

    for (uint64_t number = first; number < first + n; number++) {
        stored += rig_put(rig, ns, &number, 1, 0, map, 0, NULL);
        rig_settle(rig);
        rig_forget_replies(rig);
    }
    return stored;
}

static uint32_t got(struct rig *rig, uint32_t ns, uint64_t first, uint32_t n)
{
    uint32_t count = 0;

    for (uint64_t number = first; number < first + n; number++) {
        count += rig_get(rig, ns, &number, 1, 0, NULL, NULL);
        rig_forget_replies(rig);
    }
    return count;
}

static struct rig_options options(uint64_t cap)
{
    struct rig_options o = rig_defaults();

    o.cache_bytes = 4u << 20;
    o.staging_bytes = 1u << 20;
    o.write_queue_bytes = 4u << 20;
    o.disk_cap_bytes = cap;
    o.disk_real_bytes = 2 * LARGE_CAP;
    return o;
}

/* ---- records that do not fit ------------------------------------------------------------------
 */

static void dram_goes_on_without_the_disk(void **state)
{
    struct rig_options o = options(SMALL_CAP);
    static struct rig rig;

    (void)state;
    rig_open(&rig, &o, NULL);
    listen_to(&rig);
    uint64_t before = rig_stats(&rig).disk_bytes_used;
    uint32_t ns = rig_ns(&rig, 1, long_pages);
    assert_non_null(strstr(said, "327680 bytes"));
    assert_non_null(strstr(said, "a cap of 82 MiB or more"));
    assert_int_equal(rig_stats(&rig).ns_without_root, 1);
    assert_int_equal(rig_ns(&rig, 1, long_pages), ns); /* said once */
    assert_int_equal(rig_stats(&rig).ns_without_root, 1);
    assert_int_equal(put(&rig, ns, 1, 6, RAW), 6);
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(got(&rig, ns, 1, 6), 6);
    struct kvt_store_stats stats = rig_stats(&rig);
    assert_true(stats.admit_long >= 6);
    assert_int_equal(stats.disk_blocks, 0);
    assert_int_equal(stats.disk_bytes_used, before);
    assert_int_equal(stats.disk_dropped_error + stats.write_fail, 0);
    /* others are written as ever, and more than DRAM holds comes to no harm */
    uint32_t other = rig_ns(&rig, 2, pages);
    assert_int_equal(put(&rig, other, 1, BLOCKS, RAW), BLOCKS);
    assert_int_equal(put(&rig, ns, 100, 30, RAW), 30);
    assert_int_equal(rig_flush(&rig), 0);
    rig_reopen(&rig);
    other = rig_ns(&rig, 2, pages);
    ns = rig_ns(&rig, 1, long_pages);
    assert_int_equal(got(&rig, other, 1, BLOCKS), BLOCKS);
    assert_int_equal(got(&rig, ns, 1, 6), 0);
    rig_close(&rig);
}

/* Neither DRAM nor a root: that is refused; and so it is when DRAM alone cannot. */
static void what_fits_nowhere_is_refused(void **state)
{
    struct rig_options o = options(SMALL_CAP);
    static struct rig rig;
    uint32_t handle;

    (void)state;
    o.cache_bytes = 256u << 10;
    rig_open(&rig, &o, NULL);
    assert_int_equal(rig_try_ns(&rig, 1, long_pages, &handle), KVT_E_TOO_SMALL);
    rig_close(&rig);
    o.disk_cap_bytes = LARGE_CAP; /* a root does */
    rig_open(&rig, &o, NULL);
    uint32_t ns = rig_ns(&rig, 1, long_pages);
    assert_int_equal(put(&rig, ns, 1, 2, RAW), 2);
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(got(&rig, ns, 1, 2), 2);
    rig_close(&rig);
}

static int add(struct rig *rig, uint64_t cap)
{
    struct kvt_store_root root = {.cap_bytes = cap, .name = "/second"};
    struct kvt_store_joining *joining = NULL;
    int rc;

    assert_int_equal(kvt_io_mem_new(2 * LARGE_CAP, &rig->second), 0);
    root.io = rig->second;
    rc = kvt_store_root_open(rig->store, &root, &joining);
    if (rc == 0)
        rc = kvt_store_root_join(rig->store, joining);
    rig_settle(rig);
    return rc;
}

/* The long ones go to the root that can hold them, the others to both; a root that comes later and
 * is too small is told. */
static void the_other_root_takes_them(void **state)
{
    struct rig_options o = options(LARGE_CAP);
    static struct rig rig;
    uint32_t on[2] = {0, 0};

    (void)state;
    o.roots_pending = 1;
    o.cache_bytes = 2u << 20;
    rig_open(&rig, &o, NULL);
    listen_to(&rig);
    uint32_t ns = rig_ns(&rig, 1, long_pages), other = rig_ns(&rig, 2, pages);
    assert_int_equal(said[0], '\0');
    assert_int_equal(add(&rig, SMALL_CAP), 0);
    assert_non_null(strstr(said, "goes without disk root /second: "));
    assert_int_equal(rig_stats(&rig).ns_without_root, 1);
    for (uint32_t i = 0; i < 12; i++) {
        assert_int_equal(put(&rig, ns, 1 + 2 * i, 1, RAW), 1);
        assert_int_equal(rig_flush(&rig), 0); /* a batch of its own: both roots' turns come */
        assert_int_equal(put(&rig, ns, 2 + 2 * i, 1, RAW), 1);
        assert_int_equal(put(&rig, other, 1 + i, 1, RAW), 1);
        assert_int_equal(rig_flush(&rig), 0);
    }
    for (uint32_t i = 0; i < rig.store->index.touched; i++) {
        const struct kvt_index_entry *e = kvt_index_at(&rig.store->index, i);

        if (!e->used || !e->on_disk)
            continue;
        on[e->root]++;
        if (e->ns == kvt_handle_number(ns))
            assert_int_equal(e->root, 0);
    }
    assert_int_equal(on[0] + on[1], 36);
    assert_true(on[1] >= 3);
    assert_int_equal(got(&rig, ns, 1, 24), 24);
    assert_int_equal(got(&rig, other, 1, 12), 12);
    struct kvt_store_stats stats = rig_stats(&rig);
    assert_int_equal(stats.admit_long + stats.write_fail + stats.disk_dropped_error, 0);
    rig_close(&rig);
}

/* The staging memory is smaller than when they were written: a miss at once, no load that waits. */
static void what_staging_cannot_hold_is_a_miss(void **state)
{
    struct rig_options o = options(LARGE_CAP);
    static struct rig rig;
    const uint64_t number = 1;
    int32_t status;

    (void)state;
    rig_open(&rig, &o, NULL);
    uint32_t ns = rig_ns(&rig, 1, long_pages);
    assert_int_equal(put(&rig, ns, 1, 4, RAW), 4);
    assert_int_equal(rig_flush(&rig), 0);
    rig.options.staging_bytes = 256u << 10;
    rig_reopen(&rig);
    listen_to(&rig);
    ns = rig_ns(&rig, 1, long_pages);
    assert_non_null(strstr(said, "give staging 327680 or more"));
    assert_int_equal(rig_lookup(&rig, ns, &number, 1, 0, NULL), 0);
    int64_t began = rig.now_ns;
    assert_int_equal(rig_get(&rig, ns, &number, 1, 0, &status, NULL), 0);
    assert_int_equal(status, KVT_E_MISS);
    assert_true(rig.now_ns - began < 100000000);
    assert_int_equal(rig_stats(&rig).load_no_slot, 0);
    assert_int_equal(put(&rig, ns, 100, 4, RAW), 4);
    assert_int_equal(got(&rig, ns, 100, 4), 4);
    rig.options.staging_bytes = 1u << 20;
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, long_pages);
    assert_int_equal(got(&rig, ns, 1, 4), 4); /* it was there all the time */
    rig_close(&rig);
}

/* ---- another cap ------------------------------------------------------------------------------
 */

static uint32_t segment_bytes(const struct rig *rig)
{
    return kvt_l2_segment_bytes(rig->store->disks[0].l2);
}

static void again_with(struct rig *rig, uint64_t cap)
{
    rig->options.disk_cap_bytes = cap;
    rig_reopen(rig);
}

static void a_larger_cap_does(void **state)
{
    struct rig_options o = options(SMALL_CAP);
    static struct rig rig;

    (void)state;
    rig_open(&rig, &o, NULL);
    uint32_t ns = rig_ns(&rig, 2, pages);
    assert_int_equal(put(&rig, ns, 1, BLOCKS, RAW), BLOCKS);
    assert_int_equal(rig_flush(&rig), 0);
    again_with(&rig, 128u << 20); /* twice the length: what is there stays */
    assert_int_equal(segment_bytes(&rig), 1u << 20);
    ns = rig_ns(&rig, 2, pages);
    assert_int_equal(got(&rig, ns, 1, BLOCKS), BLOCKS);
    again_with(&rig, LARGE_CAP);
    assert_int_equal(segment_bytes(&rig), 4u << 20);
    ns = rig_ns(&rig, 2, pages);
    uint32_t big = rig_ns(&rig, 1, long_pages);
    assert_int_equal(got(&rig, ns, 1, BLOCKS), 0);
    assert_int_equal(put(&rig, ns, 500, BLOCKS, RAW), BLOCKS);
    assert_int_equal(put(&rig, big, 1, 6, RAW), 6);
    assert_int_equal(rig_flush(&rig), 0);
    rig_crash(&rig);
    ns = rig_ns(&rig, 2, pages);
    big = rig_ns(&rig, 1, long_pages);
    assert_int_equal(got(&rig, ns, 500, BLOCKS), BLOCKS);
    assert_int_equal(got(&rig, big, 1, 6), 6);
    assert_int_equal(rig_stats(&rig).ns_without_root, 0);
    rig_close(&rig);
}

/* The cap becomes larger, and what it was, with everything purged in between: nothing of the old
 * segments is found again. */
static void nothing_comes_back_with_the_old_cap(void **state)
{
    struct rig_options o = options(SMALL_CAP);
    static struct rig rig;

    (void)state;
    rig_open(&rig, &o, NULL);
    uint32_t ns = rig_ns(&rig, 2, pages);
    assert_int_equal(put(&rig, ns, 1, BLOCKS, RAW), BLOCKS);
    assert_int_equal(rig_flush(&rig), 0);
    again_with(&rig, LARGE_CAP); /* there and back: what is gone is gone */
    again_with(&rig, SMALL_CAP);
    assert_int_equal(segment_bytes(&rig), 1u << 20);
    ns = rig_ns(&rig, 2, pages);
    assert_int_equal(got(&rig, ns, 1, BLOCKS), 0);
    assert_int_equal(put(&rig, ns, 1, BLOCKS, RAW), BLOCKS);
    assert_int_equal(rig_flush(&rig), 0);
    again_with(&rig, LARGE_CAP);
    ns = rig_ns(&rig, 2, pages);
    (void)rig_keys(&rig, KVT_OP_PURGE, ns, NULL, 0);
    for (int i = 0; i < 3; i++) { /* journals forget purges of records that are nowhere */
        rig_reopen(&rig);
        ns = rig_ns(&rig, 2, pages);
    }
    again_with(&rig, SMALL_CAP);
    ns = rig_ns(&rig, 2, pages);
    assert_int_equal(got(&rig, ns, 1, BLOCKS), 0);
    assert_int_equal(put(&rig, ns, 1, BLOCKS, RAW), BLOCKS);
    assert_int_equal(rig_flush(&rig), 0);
    rig_reopen(&rig);
    ns = rig_ns(&rig, 2, pages);
    assert_int_equal(got(&rig, ns, 1, BLOCKS), BLOCKS);
    rig_close(&rig);
}

/* The drive goes at operation N of the open that changes the length, for every N; the next open has
 * either cap. */
static void an_end_in_the_middle(void **state)
{
    struct rig_options o = options(SMALL_CAP);
    bool whole = false;
    uint32_t n = 0;

    (void)state;
    for (; !whole; n++) {
        const struct fault_rule rule = {
            .ops = FAULT_ALL, .skip = n, .action = FAULT_FAIL, .error = EIO};
        static struct rig rig;

        assert_true(n < 2000);
        rig_open(&rig, &o, NULL);
        uint32_t ns = rig_ns(&rig, 2, pages);
        assert_int_equal(put(&rig, ns, 1, BLOCKS, RAW), BLOCKS);
        const uint64_t gone = 3;
        assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, &gone, 1), 1);
        assert_int_equal(rig_flush(&rig), 0);
        struct kvt_store_params params = rig.store->params;
        params.roots[0].cap_bytes = LARGE_CAP;
        kvt_store_close(rig.store, 1000000000);
        rig.store = NULL;
        int number = fault_io_rule(rig.io, &rule);
        struct kvt_store *store = NULL;
        int rc = kvt_store_open(&params, &store, NULL);
        whole = fault_io_rule_state(rig.io, number)->fired == 0;
        if (whole)
            assert_int_equal(rc, 0);
        if (rc == 0)
            kvt_store_close(store, 0);
        fault_io_clear(rig.io);
        rig.options.disk_cap_bytes = n % 2 ? SMALL_CAP : LARGE_CAP;
        rig_start(&rig);
        ns = rig_ns(&rig, 2, pages);
        uint32_t left = got(&rig, ns, 1, BLOCKS);
        if (n % 2 == 0)
            assert_int_equal(left, 0);
        assert_int_equal(got(&rig, ns, gone, 1), 0);
        assert_int_equal(put(&rig, ns, 100, 4, RAW), 4);
        assert_int_equal(rig_flush(&rig), 0);
        rig_crash(&rig);
        ns = rig_ns(&rig, 2, pages);
        assert_int_equal(got(&rig, ns, 100, 4), 4);
        assert_int_equal(got(&rig, ns, 1, BLOCKS), left);
        rig_close(&rig);
    }
    printf("           %u operations\n", n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dram_goes_on_without_the_disk),
        cmocka_unit_test(what_fits_nowhere_is_refused),
        cmocka_unit_test(the_other_root_takes_them),
        cmocka_unit_test(what_staging_cannot_hold_is_a_miss),
        cmocka_unit_test(a_larger_cap_does),
        cmocka_unit_test(nothing_comes_back_with_the_old_cap),
        cmocka_unit_test(an_end_in_the_middle),
    };

    return cmocka_run_group_tests_name("store_sizes", tests, NULL, NULL);
}
