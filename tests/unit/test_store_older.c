/* A record that took the place of another one and goes before it is on disk: the other one is back.
 *
 * Goal:   raising or cooling a block that is on disk never makes it a miss: while the new record is
 *         in DRAM it is what is handed out, and when it goes unwritten (evicted, damaged, no room
 * to stay) the record on disk is the block again, at its own level, exact. When the new one has
 *         been written, the old one is forgotten. Purges, recycled segments, pins, restarts and
 *         re-insertion beside it leave nothing wrong. Whichever single write fails, a block that
 * was flushed is there. Method: a rig without threads (support/store_rig.h): bytes follow from
 * (key, map), so an older record of the same key cannot pass for the newer one. The store's
 * invariants are checked after each step. Broken on purpose: without older_is_back() the first test
 * misses.
 */
#include "support/store_rig.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "support/fault_io.h"
#include "support/l2_help.h"

enum { KV4 = 2, KV8 = 5, RAW = 6, CLIENT = 1 };

static const uint32_t pages[7] = {0, 1, 2, 2, 3, 4, 8};
static struct rig rig;
static uint32_t ns;
static uint64_t next_cold;
static unsigned held_points;

static const struct fault_rule no_writes = {
    .ops = FAULT_WRITE, .name = "seg-", .action = FAULT_FAIL, .error = EIO};

static void begin_with(const struct rig_options *o)
{
    rig_open(&rig, o, NULL);
    ns = rig_ns(&rig, 1, pages);
    next_cold = 1000;
}

static void begin(void)
{
    struct rig_options o = rig_defaults();

    o.cache_bytes = 256u << 10; /* 64 pages */
    o.staging_bytes = 128u << 10;
    begin_with(&o);
}

static void put(uint64_t number, uint8_t map, uint8_t replace)
{
    assert_int_equal(rig_put(&rig, ns, &number, 1, 0, map, replace, NULL), 1);
}

/* What a load of the block brings: its map, 0 for a miss. */
static uint8_t get(uint64_t number, uint8_t min)
{
    uint8_t map = 0;

    return rig_get(&rig, ns, &number, 1, min, NULL, &map) == 1 ? map : 0;
}

/* Its record, granted and kept. */
static struct kvt_msg_grant acquire(uint64_t number)
{
    uint64_t cookie;
    const struct kvt_msg *reply;

    rig_forget_replies(&rig);
    cookie = rig_acquire(&rig, CLIENT, ns, &number, 1, 0, INT64_MAX);
    rig_settle(&rig);
    reply = rig_reply(&rig, cookie);
    assert_non_null(reply);
    assert_int_equal(reply->status, 0);
    return *(const struct kvt_msg_grant *)(const void *)reply;
}

static uint8_t tier(uint64_t number)
{
    uint8_t out = 0;

    (void)rig_lookup(&rig, ns, &number, 1, 0, &out);
    return out;
}

/* Other blocks, asked for twice each, push everything out of DRAM. */
static void push_out(void)
{
    for (int i = 0; i < 120; i++) {
        (void)rig_put(&rig, ns, &next_cold, 1, 0, KV4, KVT_REPLACE_NEW, NULL);
        (void)rig_keys(&rig, KVT_OP_TOUCH, ns, &next_cold, 1);
        (void)rig_keys(&rig, KVT_OP_TOUCH, ns, &next_cold, 1);
        next_cold++;
    }
}

/* A block is on disk at one map, and in DRAM at another one that cannot be written. */
static void replaced(uint64_t number, uint8_t from, uint8_t to)
{
    put(number, from, KVT_REPLACE_NEW);
    assert_int_equal(rig_flush(&rig), 0);
    assert_true(fault_io_rule(rig.io, &no_writes) >= 0);
    put(number, to, to > from ? KVT_REPLACE_RAISE : KVT_REPLACE_COOL);
    assert_int_equal(tier(number), KVT_TIER_DRAM);
    assert_int_equal(get(number, 0), to);
}

static void test_evicted_unwritten(void **state)
{
    static const uint8_t moves[][2] = {{KV4, RAW}, {KV4, KV8}, {RAW, KV4}, {KV8, KV4}};

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(moves); i++) {
        uint8_t from = moves[i][0], to = moves[i][1];
        struct kvt_store_stats stats;

        begin();
        replaced(1, from, to);
        push_out();
        assert_int_equal(tier(1), KVT_TIER_DISK);
        assert_int_equal(get(1, 0), from);
        assert_int_equal(get(1, RAW), from == RAW ? RAW : 0); /* its own level, not the other's */
        stats = rig_stats(&rig);
        assert_int_equal(stats.older_back, 1);
        assert_true(stats.lost_error + stats.lost_queue + stats.lost_deferred > 0);
        assert_int_equal(rig_flush(&rig), KVT_E_DROPPED); /* the newer one was lost */
        fault_io_clear(rig.io);
        rig_crash(&rig);
        ns = rig_ns(&rig, 1, pages);
        assert_int_equal(get(1, 0), from);
        rig_close(&rig);
    }
}

static void test_written_after_all(void **state)
{
    (void)state;
    begin();
    replaced(1, KV4, RAW);
    assert_int_equal(rig_stats(&rig).disk_blocks, 1);
    fault_io_clear(rig.io);
    rig_advance(&rig, 20000000000);
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(rig_stats(&rig).disk_blocks, 1);
    push_out();
    assert_int_equal(get(1, 0), RAW);
    assert_int_equal(rig_stats(&rig).older_back, 0);
    rig_crash(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(get(1, 0), RAW);
    rig_close(&rig);
}

/* Twice replaced before anything is written: what is on disk is still the first. */
static void test_replaced_twice(void **state)
{
    (void)state;
    begin();
    replaced(1, KV4, KV8);
    put(1, RAW, KVT_REPLACE_RAISE);
    put(1, KV8, KVT_REPLACE_COOL);
    assert_int_equal(get(1, 0), KV8);
    push_out();
    assert_int_equal(get(1, 0), KV4);
    rig_close(&rig);
}

/* A write is in flight when its block is replaced: it lands for nobody, the first one stays. */
static void test_replaced_while_it_is_written(void **state)
{
    (void)state;
    begin();
    put(1, KV4, KVT_REPLACE_NEW);
    assert_int_equal(rig_flush(&rig), 0);
    rig_hold(&rig, true);
    put(1, KV8, KVT_REPLACE_RAISE);
    rig_advance(&rig, 10000000); /* on its way */
    rig.write = KVT_WRITE_EVICT;
    put(1, RAW, KVT_REPLACE_RAISE);
    rig.write = 0;
    rig_hold(&rig, false);
    assert_int_equal(get(1, 0), RAW);
    assert_true(fault_io_rule(rig.io, &no_writes) >= 0);
    push_out();
    assert_int_equal(get(1, 0), KV4);
    fault_io_clear(rig.io);
    rig_crash(&rig); /* the one that landed has the higher number */
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(get(1, 0), KV8);
    rig_close(&rig);
}

static void test_purged(void **state)
{
    uint64_t number = 1;

    (void)state;
    begin();
    replaced(1, KV4, RAW);
    fault_io_clear(rig.io);
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, &number, 1), 1);
    assert_int_equal(get(1, 0), 0);
    assert_int_equal(tier(1), KVT_TIER_MISS);
    assert_int_equal(rig_stats(&rig).blocks, 0);
    assert_int_equal(rig_stats(&rig).older_back, 0); /* it was not: both went */
    rig_crash(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(get(1, 0), 0);
    rig_close(&rig);
}

/* The namespace as a whole, with a write of the newer record under way. */
static void test_purged_whole(void **state)
{
    (void)state;
    begin();
    put(1, KV4, KVT_REPLACE_NEW);
    assert_int_equal(rig_flush(&rig), 0);
    rig_hold(&rig, true);
    put(1, RAW, KVT_REPLACE_RAISE);
    rig_advance(&rig, 10000000);
    rig_hold(&rig, false);
    assert_true(rig_keys(&rig, KVT_OP_PURGE, ns, NULL, 0) >= 1);
    assert_int_equal(get(1, 0), 0);
    rig_crash(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(get(1, 0), 0);
    rig_close(&rig);
}

/* The client says that the newer one is damaged: the older one is another record. */
static void test_damaged(void **state)
{
    struct kvt_msg_grant copy;

    (void)state;
    begin();
    replaced(1, KV4, RAW);
    copy = acquire(1);
    assert_int_equal(copy.map, RAW);
    rig_release(&rig, CLIENT, &copy, KVT_E_CORRUPT);
    rig_settle(&rig);
    assert_int_equal(get(1, 0), KV4);
    rig_close(&rig);
}

/* The newer one stays in DRAM while the older one's segment is recycled; then it is the only one.
 */
static void test_segment_recycled(void **state)
{
    struct rig_options o = rig_defaults();
    uint64_t number = 1;
    struct kvt_msg_grant held;

    (void)state;
    o.cache_bytes = 512u << 10;
    o.disk_cap_bytes = 8u << 20;
    begin_with(&o);
    put(1, KV4, KVT_REPLACE_NEW);
    assert_int_equal(rig_flush(&rig), 0);
    rig.write = KVT_WRITE_EVICT;
    put(1, RAW, KVT_REPLACE_RAISE);
    rig.write = 0;
    held = acquire(1); /* in use: neither evicted nor written ahead */
    for (int i = 0; i < 3000 && rig_stats(&rig).evict_disk_segments < 3; i++) {
        (void)rig_keys(&rig, KVT_OP_TOUCH, ns, &number, 1);
        (void)rig_put(&rig, ns, &next_cold, 1, 0, KV4, KVT_REPLACE_NEW, NULL);
        next_cold++;
    }
    assert_true(rig_stats(&rig).evict_disk_segments >= 3);
    assert_int_equal(rig_stats(&rig).reinserted, 0); /* an older one is not worth it */
    assert_int_equal(get(1, 0), RAW);
    rig_release(&rig, CLIENT, &held, 0);
    assert_true(fault_io_rule(rig.io, &no_writes) >= 0);
    for (int i = 0; i < 4; i++)
        push_out();
    assert_int_equal(get(1, 0), 0); /* nothing to fall back on: a miss, no other bytes */
    assert_int_equal(rig_stats(&rig).older_back, 0);
    rig_close(&rig);
}

/* A pin is of the block, whichever record it is; its bytes are those of the record. */
static void test_pinned(void **state)
{
    uint64_t number = 1;
    struct kvt_msg_grant copy;

    (void)state;
    begin();
    put(1, KV4, KVT_REPLACE_NEW);
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(rig_keys(&rig, KVT_OP_PIN, ns, &number, 1), 1);
    assert_int_equal(rig_stats(&rig).pinned_bytes, pages[KV4] * 4096);
    assert_true(fault_io_rule(rig.io, &no_writes) >= 0);
    put(1, RAW, KVT_REPLACE_RAISE);
    assert_int_equal(rig_stats(&rig).pinned_bytes, pages[RAW] * 4096);
    push_out();
    assert_int_equal(get(1, 0), RAW); /* pinned: stays */
    copy = acquire(1);
    rig_release(&rig, CLIENT, &copy, KVT_E_CORRUPT);
    rig_settle(&rig);
    assert_int_equal(rig_stats(&rig).pinned_bytes, pages[KV4] * 4096);
    assert_int_equal(get(1, 0), KV4);
    assert_int_equal(rig_keys(&rig, KVT_OP_UNPIN, ns, &number, 1), 1);
    assert_int_equal(rig_stats(&rig).pinned_bytes, 0);
    rig_close(&rig);
}

/* Without DRAM the newer record stands in the staging region and goes when its write has failed. */
static void test_no_dram(void **state)
{
    struct rig_options o = rig_defaults();

    (void)state;
    o.cache_bytes = 0;
    begin_with(&o);
    put(1, KV4, KVT_REPLACE_NEW);
    assert_int_equal(rig_flush(&rig), 0);
    assert_true(fault_io_rule(rig.io, &no_writes) >= 0);
    rig.patient = true;
    put(1, RAW, KVT_REPLACE_RAISE);
    rig_advance(&rig, 1000000000);
    assert_int_equal(get(1, 0), KV4);
    assert_int_equal(rig_stats(&rig).older_back, 1);
    fault_io_clear(rig.io);
    rig_advance(&rig, 20000000000);
    assert_int_equal(rig_flush(&rig), KVT_E_DROPPED); /* says so once */
    put(1, RAW, KVT_REPLACE_RAISE);
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(get(1, 0), RAW);
    rig_close(&rig);
}

/* The old record is being read when the new one comes; the read ends well, or badly. */
static void test_replaced_or_purged_while_it_is_read(void **state)
{
    static const struct fault_rule bad_read = {
        .ops = FAULT_READ, .name = "seg-", .times = 1, .action = FAULT_FAIL, .error = EIO};

    (void)state;
    for (int i = 0; i < 4; i++) {
        uint64_t number = 1;
        bool purge = i & 1, fails = i & 2;

        begin();
        put(1, KV4, KVT_REPLACE_NEW);
        assert_int_equal(rig_flush(&rig), 0);
        push_out();
        assert_int_equal(tier(1), KVT_TIER_DISK);
        if (fails)
            assert_true(fault_io_rule(rig.io, &bad_read) >= 0);
        rig_hold(&rig, true);
        (void)rig_acquire(&rig, CLIENT, ns, &number, 1, 0, INT64_MAX);
        rig_settle(&rig);
        rig.write = KVT_WRITE_EVICT;
        if (purge) { /* is answered when its journal is written */
            union {
                struct kvt_msg_keys msg;
                uint8_t room[sizeof(struct kvt_msg_keys) + sizeof(struct kvt_msg_key)];
            } u;

            memset(&u, 0, sizeof(u));
            u.msg.msg.bytes = (uint32_t)kvt_round_up(sizeof(u), 8);
            u.msg.msg.op = KVT_OP_PURGE;
            u.msg.msg.ns = ns;
            u.msg.msg.count = 1;
            u.msg.msg.cookie = ++rig.cookie;
            u.msg.keys[0] = rig_key(1);
            assert_int_equal(rig_send(&rig, CLIENT, &u.msg.msg), 0);
        } else {
            put(1, RAW, KVT_REPLACE_RAISE);
        }
        rig.write = 0;
        rig_hold(&rig, false);
        assert_int_equal(get(1, 0), purge ? 0 : RAW);
        assert_int_equal(rig_stats(&rig).read_fail, fails);
        rig_close(&rig);
    }
}

/* Whichever operation on segments fails from the raise on, once or for ever: a block that was
 * flushed is there, at the one map or the other, now and after a crash on a sound drive. */
static bool raise_at(uint64_t n, bool sticky, int error)
{
    struct fault_rule rule = {.ops = FAULT_WRITE | FAULT_SYNC | FAULT_ALLOCATE,
                              .skip = n - 1,
                              .times = !sticky,
                              .action = FAULT_FAIL,
                              .error = error};
    bool fired, recycled;
    int number;

    begin();
    rig.patient = true;
    for (uint64_t i = 1; i <= 6; i++)
        put(i, i & 1 ? KV4 : KV8, KVT_REPLACE_NEW);
    assert_int_equal(rig_flush(&rig), 0);
    number = fault_io_rule(rig.io, &rule);
    for (uint64_t i = 1; i <= 6; i++) {
        rig.write = (uint8_t)(i % 3 ? 0 : KVT_WRITE_EVICT);
        put(i, i & 1 ? RAW : KV4, i & 1 ? KVT_REPLACE_RAISE : KVT_REPLACE_COOL);
        rig_advance(&rig, 30000000);
    }
    rig.write = 0;
    push_out();
    fired = fault_io_rule_state(rig.io, number)->fired > 0;
    /* where no new segment is to be had, the only one is recycled: that is no loss of ours */
    recycled = rig_stats(&rig).evict_disk_segments > 0;
    held_points += !recycled;
    for (int life = 0; life < 2 && !recycled; life++) {
        for (uint64_t i = 1; i <= 6; i++) {
            uint8_t map = get(i, 0);

            if (map != (i & 1 ? KV4 : KV8) && map != (i & 1 ? RAW : KV4))
                fail_msg("N = %llu, life %d: block %llu has map %u", (unsigned long long)n, life,
                         (unsigned long long)i, map);
        }
        if (life)
            break;
        fault_io_clear(rig.io);
        rig_crash(&rig);
        ns = rig_ns(&rig, 1, pages);
    }
    rig_close(&rig);
    return fired;
}

static void test_every_write_may_fail(void **state)
{
    static const int errors[] = {EIO, ENOSPC, EDQUOT};
    uint64_t points = 0;

    (void)state;
    for (size_t e = 0; e < KVT_ARRAY_LEN(errors); e++)
        for (int sticky = 0; sticky < 2; sticky++) {
            for (uint64_t n = 1; raise_at(n, sticky, errors[e]); n++)
                points++;
        }
    printf("           %llu points, %u of them without a recycled segment\n",
           (unsigned long long)points, held_points);
    assert_true(points > 200 && held_points > 100);
}

/* A quota that is used up is a full disk, not a failing one. */
static void test_quota_is_a_full_disk(void **state)
{
    static const int errors[] = {ENOSPC, EDQUOT};
    struct kvt_store_stats seen[2];

    (void)state;
    for (int i = 0; i < 2; i++) {
        struct fault_rule rule = {.ops = FAULT_WRITE | FAULT_ALLOCATE | FAULT_TRUNCATE,
                                  .action = FAULT_FAIL,
                                  .error = errors[i]};

        begin();
        assert_true(fault_io_rule(rig.io, &rule) >= 0);
        for (uint64_t n = 1; n <= 8; n++)
            put(n, KV4, KVT_REPLACE_NEW);
        assert_int_not_equal(rig_flush(&rig), 0);
        seen[i] = rig_stats(&rig);
        assert_true(seen[i].enospc > 0 && seen[i].disk_dropped_space > 0);
        assert_int_equal(seen[i].write_fail, 0);
        assert_int_equal(seen[i].disk_dropped_error, 0);
        fault_io_clear(rig.io); /* somebody has made room: it recovers by itself */
        rig_advance(&rig, 20000000000);
        assert_int_equal(rig_flush(&rig), 0);
        rig_crash(&rig);
        ns = rig_ns(&rig, 1, pages);
        assert_int_equal(get(8, 0), KV4);
        rig_close(&rig);
    }
    assert_int_equal(seen[0].enospc, seen[1].enospc);
    assert_int_equal(seen[0].disk_dropped_space, seen[1].disk_dropped_space);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_evicted_unwritten),
        cmocka_unit_test(test_written_after_all),
        cmocka_unit_test(test_replaced_twice),
        cmocka_unit_test(test_replaced_while_it_is_written),
        cmocka_unit_test(test_purged),
        cmocka_unit_test(test_purged_whole),
        cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_segment_recycled),
        cmocka_unit_test(test_pinned),
        cmocka_unit_test(test_no_dram),
        cmocka_unit_test(test_replaced_or_purged_while_it_is_read),
        cmocka_unit_test(test_every_write_may_fail),
        cmocka_unit_test(test_quota_is_a_full_disk),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
