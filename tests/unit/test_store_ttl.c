/* Time to live, and what a namespace may hold. C79.
 *
 * Goal:   a block lives as long after its last use as was said, and not longer, whatever the clock
 *         does; it is gone for good; pinned ones stay, and the pin budget is kept; a namespace
 *         never holds more than its quota, makes its own room, and takes none from others; both may
 *         be a namespace's own, never beyond the store's, and hold for all its groups; counts hold.
 * Method: the rig without threads, whose clock is a number that goes back as well; every step is
 *         checked; restarts are orderly ones and crashes.
 */
#include "support/store_rig.h"

#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "kvtier/error.h"
#include "store/store_impl.h"
#include "support/fault_io.h"

enum { KV4 = 2, RAW = 6 };

#define BLOCK 8192u
#define SECOND INT64_C(1000000000)

static const uint32_t pages[7] = {0, 0, 2, 0, 0, 0, 8};
static struct rig rig;
static uint32_t ns;

static struct rig_options options(int64_t ttl_ns)
{
    struct rig_options o = rig_defaults();

    o.cache_bytes = 64 * BLOCK;
    o.write_queue_bytes = 64 * BLOCK;
    o.pin_bytes_max = 4 * BLOCK;
    o.ttl_ns = ttl_ns;
    return o;
}

static void begin(const struct rig_options *o)
{
    rig_open(&rig, o, NULL);
    ns = rig_ns(&rig, 1, pages);
}

static uint32_t put_in(uint32_t space, uint64_t first, uint32_t n)
{
    uint64_t numbers[256];

    for (uint32_t i = 0; i < n; i++)
        numbers[i] = first + i;
    return rig_put(&rig, space, numbers, n, 0, KV4, false, NULL);
}

static uint32_t get_in(uint32_t space, uint64_t first, uint32_t n)
{
    uint64_t numbers[256];

    for (uint32_t i = 0; i < n; i++)
        numbers[i] = first + i;
    return rig_get(&rig, space, numbers, n, 0, NULL, NULL);
}

static uint32_t found(uint64_t first, uint32_t n)
{
    uint64_t numbers[256];

    for (uint32_t i = 0; i < n; i++)
        numbers[i] = first + i;
    return rig_lookup(&rig, ns, numbers, n, 0, NULL);
}

/* ---- C79 ----------------------------------------------------------------------------------- */

/* ttl 2 s, refreshed by a hit at 1 s, a miss at 4 s; a clock set back does not revive it. */
static void test_c79_ttl_is_refreshed_by_hits(void **state)
{
    struct rig_options o = options(2 * SECOND);

    (void)state;
    begin(&o);
    assert_int_equal(put_in(ns, 1, 1), 1);
    assert_int_equal(put_in(ns, 101, 1), 1); /* nobody asks for this one */
    rig_advance(&rig, SECOND);
    assert_int_equal(get_in(ns, 1, 1), 1);
    rig_advance(&rig, 3 * SECOND / 2); /* 2.5 s: alive, and looking is no use of it */
    assert_int_equal(found(1, 1), 1);
    assert_int_equal(found(101, 1), 0);
    rig_advance(&rig, 3 * SECOND / 2); /* 4 s */
    assert_int_equal(found(1, 1), 0);
    assert_int_equal(get_in(ns, 1, 1), 0);
    assert_int_equal(rig_stats(&rig).ttl_expired, 2);
    rig.now_ns -= 4 * SECOND;
    rig_settle(&rig);
    assert_int_equal(found(1, 1), 0);
    assert_int_equal(get_in(ns, 1, 1), 0);
    /* what is stored under the old time lives from the latest that was seen */
    assert_int_equal(put_in(ns, 1, 1), 1);
    assert_int_equal(get_in(ns, 1, 1), 1);
    rig_close(&rig);
}

/* The clock goes back before a block has expired: it lives no longer for that than it may. */
static void test_c79_a_clock_set_back_gives_no_time(void **state)
{
    struct rig_options o = options(2 * SECOND);

    (void)state;
    begin(&o);
    assert_int_equal(put_in(ns, 1, 1), 1);
    rig_advance(&rig, 19 * SECOND / 10);
    rig.now_ns -= 100 * SECOND; /* the clock is a second before the store's first, */
    rig_settle(&rig);
    assert_int_equal(found(1, 1), 1);
    rig.now_ns += 101 * SECOND; /* and is set right again */
    rig_settle(&rig);
    assert_int_equal(found(1, 1), 0);
    rig_close(&rig);
}

/* A pinned block survives a flood, and the time to live; the budget of pins is kept. */
static void test_c79_pins_hold_within_their_budget(void **state)
{
    struct rig_options o = options(2 * SECOND);
    uint64_t numbers[6] = {1, 2, 3, 4, 5, 6};

    (void)state;
    begin(&o);
    assert_int_equal(put_in(ns, 1, 6), 6);
    assert_int_equal(rig_keys(&rig, KVT_OP_PIN, ns, numbers, 6), 4);
    assert_int_equal(rig_stats(&rig).pin_refused, 2);
    assert_int_equal(rig_stats(&rig).pinned_bytes, 4 * BLOCK);
    for (uint64_t i = 0; i < 64; i++)
        (void)put_in(ns, 1000 + 16 * i, 16);
    rig_advance(&rig, 10 * SECOND);
    assert_int_equal(found(1, 6), 4);
    assert_int_equal(get_in(ns, 1, 6), 4);
    assert_int_equal(rig_stats(&rig).pinned_blocks, 4);
    assert_int_equal(rig_keys(&rig, KVT_OP_UNPIN, ns, numbers, 4), 4);
    rig_advance(&rig, 3 * SECOND);
    assert_int_equal(found(1, 4), 0);
    assert_int_equal(rig_stats(&rig).pinned_bytes, 0);
    rig_close(&rig);
}

/* ---- for good ------------------------------------------------------------------------------ */

/* No restart brings back what has expired, whether the end was orderly or not. */
static void gone_for_good(bool crash)
{
    struct rig_options o = options(16 * SECOND);

    begin(&o);
    assert_int_equal(put_in(ns, 1, 8), 8);
    assert_int_equal(rig_flush(&rig), 0);
    for (int i = 0; i < 14; i++)
        rig_advance(&rig, SECOND);
    assert_int_equal(put_in(ns, 101, 8), 8);
    assert_int_equal(rig_flush(&rig), 0);
    for (int i = 0; i < 5; i++) /* 1.. have expired, and it has been journaled */
        rig_advance(&rig, SECOND);
    assert_int_equal(found(1, 8), 0);
    assert_int_equal(found(101, 8), 8);
    if (crash)
        rig_crash(&rig);
    else
        rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(found(1, 8), 0);
    assert_int_equal(found(101, 8), 8);
    assert_int_equal(get_in(ns, 101, 8), 8);
    rig_advance(&rig, 20 * SECOND); /* what a restart finds begins anew, and ends */
    assert_int_equal(found(101, 8), 0);
    rig_close(&rig);
}

/* The process slept, or its machine did: what expired meanwhile is gone for good at once, and what
 * is stored afterwards is not taken for it. Found by the simulator (seed 800067883). */
static void test_nobody_ran_while_they_expired(void **state)
{
    struct rig_options o = options(16 * SECOND);

    (void)state;
    begin(&o);
    for (int i = 0; i < 20; i++)
        rig_advance(&rig, SECOND);
    assert_int_equal(put_in(ns, 1, 8), 8);
    assert_int_equal(rig_flush(&rig), 0);
    rig.now_ns += 24 * SECOND;
    assert_int_equal(put_in(ns, 101, 8), 8);
    assert_int_equal(found(1, 8), 0);
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(found(1, 8), 0);
    assert_int_equal(found(101, 8), 8);
    rig_close(&rig);
}

static void test_expired_blocks_do_not_come_back(void **state)
{
    (void)state;
    gone_for_good(false);
    gone_for_good(true);
}

/* A block that has expired is stored again like a new one, while its old record is still about; and
 * the chain behind it is no use without it. */
static void test_expired_blocks_are_stored_anew(void **state)
{
    struct rig_options o = options(2 * SECOND);

    (void)state;
    begin(&o);
    for (int round = 0; round < 6; round++) {
        assert_int_equal(put_in(ns, 1, 8), 8);
        assert_int_equal(get_in(ns, 1, 8), 8);
        rig_advance(&rig, 3 * SECOND);
        assert_int_equal(rig_stats(&rig).ttl_expired, 8u * (unsigned)(round + 1));
        assert_int_equal(rig_stats(&rig).blocks, 0);
    }
    rig_close(&rig);
}

/* Blocks in use while they expire: being filled, held by a reader, on their way to disk. */
static void test_expiry_in_the_middle_of_things(void **state)
{
    struct rig_options o = options(2 * SECOND);
    uint64_t one = 1, two = 201;
    struct kvt_alloc_entry entry;

    (void)state;
    begin(&o);
    assert_int_equal(put_in(ns, 1, 1), 1);
    rig.keep = true;
    assert_int_equal(get_in(ns, 1, 1), 1); /* held */
    rig_alloc(&rig, 1, ns, &two, 1, 0, KV4, 0, &entry);
    assert_int_equal(entry.status, 0);
    rig_advance(&rig, 5 * SECOND);
    assert_int_equal(rig_lookup(&rig, ns, &one, 1, 0, NULL), 0);
    uint64_t sum = rig_fill(&rig, ns, two, 0, KV4, &entry);
    assert_int_equal(rig_commit(&rig, 1, &entry, sum), 0); /* it begins to live now */
    rig_release_all(&rig, 1);
    rig.keep = false;
    assert_int_equal(found(201, 1), 1);
    rig_advance(&rig, 5 * SECOND);
    rig_hold(&rig, true); /* writes hang while their blocks expire */
    assert_int_equal(put_in(ns, 301, 4), 4);
    rig_advance(&rig, 5 * SECOND);
    assert_int_equal(found(301, 4), 0);
    rig_hold(&rig, false);
    rig_settle(&rig);
    assert_int_equal(found(301, 4), 0);
    rig_close(&rig);
}

/* Stamps of two bytes come round after 1,024 times the time to live: nothing lives again then. */
static void test_stamps_that_come_round(void **state)
{
    struct rig_options o = options(SECOND);

    (void)state;
    begin(&o);
    rig.check_each_step = false;
    assert_int_equal(put_in(ns, 1, 4), 4);
    for (int i = 0; i < 1030; i++) {
        rig_advance(&rig, SECOND);
        if (i == 0)
            assert_int_equal(put_in(ns, 101, 1), 1);
        else
            assert_int_equal(get_in(ns, 101, 1), 1); /* kept alive all the time */
    }
    assert_int_equal(found(1, 4), 0);
    rig_check(&rig);
    rig_advance(&rig, 3000 * SECOND); /* a machine that slept */
    assert_int_equal(found(101, 1), 0);
    rig_close(&rig);
}

/* ---- quotas -------------------------------------------------------------------------------- */

static void test_a_namespace_keeps_to_its_quota(void **state)
{
    struct rig_options o = options(0);
    uint32_t other;

    (void)state;
    o.ns_bytes_max = 24 * BLOCK;
    begin(&o);
    other = rig_ns(&rig, 2, pages);
    assert_int_equal(put_in(other, 1, 16), 16);
    for (uint64_t i = 0; i < 40; i++) {
        (void)put_in(ns, 1000 + 8 * i, 8);
        assert_int_equal(get_in(ns, 1000 + 8 * i, 8), 8); /* the newest is there */
    }
    assert_true(rig_stats(&rig).quota_evicted >= 40 * 8 - 24);
    assert_int_equal(rig_stats(&rig).quota_refused, 0);
    assert_int_equal(get_in(other, 1, 16), 16); /* a flood next door is none of its business */
    uint32_t left = 0;
    for (uint64_t i = 0; i < 40; i++)
        left += found(1000 + 8 * i, 8);
    assert_true(left <= 24 && left >= 16);
    rig_close(&rig);
}

/* When nothing may go the store is refused, and the chain behind it is not stored either. */
static void test_a_quota_full_of_pins_refuses(void **state)
{
    struct rig_options o = options(0);
    uint64_t numbers[4] = {1, 2, 3, 4};

    (void)state;
    o.ns_bytes_max = 4 * BLOCK;
    begin(&o);
    assert_int_equal(put_in(ns, 1, 4), 4);
    assert_int_equal(rig_keys(&rig, KVT_OP_PIN, ns, numbers, 4), 4);
    assert_int_equal(put_in(ns, 101, 3), 0);
    assert_int_equal(rig_stats(&rig).quota_refused, 1);
    assert_int_equal(rig_stats(&rig).alloc_dropped_chain, 2);
    assert_int_equal(rig_keys(&rig, KVT_OP_UNPIN, ns, numbers, 4), 4);
    assert_int_equal(put_in(ns, 101, 3), 3);
    rig_close(&rig);
}

/* ---- what a namespace says of itself ------------------------------------------------------- */

static uint32_t open_with(uint8_t name, uint16_t group, uint64_t quota, int64_t ttl_ns)
{
    uint32_t handle;

    rig.group = group;
    rig.ns_quota = quota;
    rig.ns_ttl_ns = ttl_ns;
    handle = rig_ns(&rig, name, pages);
    rig.group = 0;
    rig.ns_quota = 0;
    rig.ns_ttl_ns = 0;
    return handle;
}

static uint32_t put_group(uint16_t group, uint32_t space, uint64_t first, uint32_t n)
{
    rig.group = group;
    n = put_in(space, first, n);
    rig.group = 0;
    return n;
}

static uint32_t get_group(uint16_t group, uint32_t space, uint64_t first, uint32_t n)
{
    rig.group = group;
    n = get_in(space, first, n);
    rig.group = 0;
    return n;
}

/* Two groups, 24 blocks between them: what one stores, the other gives. */
static void test_groups_share_a_quota(void **state)
{
    struct rig_options o = options(0);
    uint32_t other, second;

    (void)state;
    o.ns_bytes_max = 24 * BLOCK;
    begin(&o);
    second = open_with(1, 5, 0, 0);
    other = rig_ns(&rig, 2, pages);
    assert_int_equal(put_in(other, 1, 16), 16);
    assert_int_equal(put_in(ns, 1, 20), 20);
    assert_int_equal(put_group(5, second, 1, 20), 20);
    assert_int_equal(rig_stats(&rig).quota_evicted, 16);
    assert_int_equal(get_group(5, second, 1, 20), 20);
    assert_int_equal(get_in(ns, 1, 20), 4);
    assert_int_equal(get_in(other, 1, 16), 16);
    rig_close(&rig);
}

static void test_a_quota_of_its_own(void **state)
{
    struct rig_options o = options(0);
    uint32_t other, second;

    (void)state;
    begin(&o);
    assert_int_equal(open_with(1, 0, 8 * BLOCK, 0), ns);
    other = rig_ns(&rig, 2, pages);
    assert_int_equal(put_in(ns, 1, 16), 8); /* a chain cannot give up what it stands on */
    assert_int_equal(put_in(other, 1, 16), 16);
    assert_int_equal(rig_ns(&rig, 1, pages), ns); /* who says nothing changes nothing */
    assert_int_equal(put_in(ns, 101, 8), 8);
    assert_int_equal(get_in(ns, 1, 8), 0);
    second = open_with(1, 5, 0, 0); /* a group that comes later has it too */
    assert_int_equal(put_group(5, second, 1, 8), 8);
    assert_int_equal(get_in(ns, 101, 8), 0);
    assert_int_equal(open_with(1, 0, INT64_MAX, 0), ns); /* lifted */
    assert_int_equal(put_in(ns, 201, 16), 16);
    assert_int_equal(get_group(5, second, 1, 8), 8);
    assert_int_equal(get_in(other, 1, 16), 16);
    rig_close(&rig);
}

/* The store's own limits hold whatever a namespace says. */
static void test_nothing_said_gives_more(void **state)
{
    struct rig_options o = options(2 * SECOND);
    uint32_t handle;

    (void)state;
    o.ns_bytes_max = 8 * BLOCK;
    begin(&o);
    assert_int_equal(open_with(1, 0, 1000 * BLOCK, 1000 * SECOND), ns);
    assert_int_equal(put_in(ns, 1, 16), 8);
    rig_advance(&rig, 3 * SECOND);
    assert_int_equal(found(1, 8), 0);
    rig.ns_ttl_ns = SECOND - 1; /* ticks of nanoseconds would keep the store busy */
    assert_int_equal(rig_try_ns(&rig, 1, pages, &handle), KVT_E_INVAL);
    rig.ns_ttl_ns = -1;
    assert_int_equal(rig_try_ns(&rig, 1, pages, &handle), KVT_E_INVAL);
    rig.ns_ttl_ns = 0;
    rig.ns_quota = KVT_QUOTA_MIN - 1;
    assert_int_equal(rig_try_ns(&rig, 1, pages, &handle), KVT_E_INVAL);
    rig.ns_quota = 0;
    rig_close(&rig);
}

/* Of its own, with or without one of the store's; changed and lifted. */
static void a_time_of_its_own(int64_t of_store)
{
    struct rig_options o = options(of_store);
    uint32_t other, second;

    begin(&o);
    other = rig_ns(&rig, 2, pages);
    assert_int_equal(put_in(ns, 1, 4), 4); /* there before anything is said */
    assert_int_equal(open_with(1, 0, 0, 2 * SECOND), ns);
    second = open_with(1, 5, 0, 0);
    assert_int_equal(put_in(other, 1, 4), 4);
    assert_int_equal(put_group(5, second, 1, 4), 4);
    rig_advance(&rig, SECOND);
    assert_int_equal(get_in(ns, 1, 2), 2);
    rig_advance(&rig, 3 * SECOND / 2);
    assert_int_equal(found(1, 4), 2);
    assert_int_equal(get_group(5, second, 1, 4), 0);
    assert_int_equal(get_in(other, 1, 4), 4);
    assert_int_equal(rig_ns(&rig, 1, pages), ns); /* nothing is said: it stays */
    rig_advance(&rig, SECOND);
    assert_int_equal(found(1, 4), 0);
    assert_int_equal(put_in(ns, 1, 4), 4);
    assert_int_equal(open_with(1, 0, 0, 4 * SECOND), ns);
    rig_advance(&rig, 3 * SECOND);
    assert_int_equal(found(1, 4), 4);
    rig_advance(&rig, 3 * SECOND / 2);
    assert_int_equal(found(1, 4), 0);
    assert_int_equal(put_in(ns, 1, 4), 4);
    assert_int_equal(open_with(1, 0, 0, INT64_MAX), ns); /* lifted: the store's */
    rig_advance(&rig, 5 * SECOND);
    assert_int_equal(found(1, 4), 4);
    rig_advance(&rig, 40 * SECOND);
    assert_int_equal(found(1, 4), of_store ? 0 : 4);
    rig_close(&rig);
}

static void test_a_time_of_its_own(void **state)
{
    (void)state;
    a_time_of_its_own(0);
    a_time_of_its_own(32 * SECOND);
}

/* A restart brings back what lives on in others, and nothing of what has expired here. */
static void own_time_for_good(bool crash)
{
    struct rig_options o = options(0);
    uint32_t other;

    begin(&o);
    other = rig_ns(&rig, 2, pages);
    assert_int_equal(open_with(1, 0, 0, 16 * SECOND), ns);
    assert_int_equal(put_in(ns, 1, 8), 8);
    assert_int_equal(put_in(other, 1, 8), 8);
    assert_int_equal(rig_flush(&rig), 0);
    for (int i = 0; i < 14; i++)
        rig_advance(&rig, SECOND);
    assert_int_equal(put_in(ns, 101, 8), 8);
    assert_int_equal(rig_flush(&rig), 0);
    for (int i = 0; i < 5; i++)
        rig_advance(&rig, SECOND);
    if (crash)
        rig_crash(&rig);
    else
        rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    other = rig_ns(&rig, 2, pages);
    assert_int_equal(found(1, 8), 0);
    assert_int_equal(get_in(ns, 101, 8), 8);
    assert_int_equal(get_in(other, 1, 8), 8);
    rig_close(&rig);
}

static void test_its_own_time_is_for_good(void **state)
{
    (void)state;
    own_time_for_good(false);
    own_time_for_good(true);
}

/* More namespaces with a time of their own than the store has places for purges: one journal entry
 * is of all, so none is forgotten at close, and a caller's purge finds a place. */
static void test_many_times_of_their_own(void **state)
{
    enum { SPACES = 12 };
    struct rig_options o = options(0);
    uint32_t spaces[SPACES];

    (void)state;
    begin(&o);
    for (uint32_t i = 0; i < SPACES; i++) {
        spaces[i] = open_with((uint8_t)(10 + i), 0, 0, 16 * SECOND);
        assert_int_equal(put_in(spaces[i], 1, 2), 2);
    }
    assert_int_equal(rig_flush(&rig), 0);
    for (int i = 0; i < 14; i++)
        rig_advance(&rig, SECOND);
    for (uint32_t i = 0; i < SPACES; i++) /* alive by their uses, of which the disk does not know */
        assert_int_equal(get_in(spaces[i], 1, 2), 2);
    for (int i = 0; i < 4; i++)
        rig_advance(&rig, SECOND);
    assert_int_equal(rig_stats(&rig).ttl_expired, 0);
    rig_reopen(&rig);
    for (uint32_t i = 0; i < SPACES; i++) {
        spaces[i] = open_with((uint8_t)(10 + i), 0, 0, 16 * SECOND);
        assert_int_equal(get_in(spaces[i], 1, 2), 0);
        assert_int_equal(put_in(spaces[i], 1, 2), 2);
    }
    assert_int_equal(rig_flush(&rig), 0);
    rig_hold(&rig, true); /* what is journaled takes its time */
    rig_advance(&rig, 18 * SECOND);
    assert_int_equal(rig_stats(&rig).ttl_expired, 2 * SPACES);
    assert_true(kvt_purges_free(rig.store));
    rig_hold(&rig, false);
    for (uint32_t i = 0; i < SPACES; i++)
        assert_int_equal(get_in(spaces[i], 1, 2), 0);
    rig_close(&rig);
}

/* A time that falls due while the journal is still busy with another one is owed, also at close. */
static void test_a_time_that_waits_for_another(void **state)
{
    struct rig_options o = options(0);
    uint32_t soon, late;

    (void)state;
    begin(&o);
    soon = open_with(10, 0, 0, 8 * SECOND);
    late = open_with(11, 0, 0, 16 * SECOND);
    assert_int_equal(put_in(soon, 1, 2), 2);
    assert_int_equal(put_in(late, 1, 2), 2);
    assert_int_equal(rig_flush(&rig), 0);
    rig_hold(&rig, true);
    for (int i = 0; i < 10; i++)
        rig_advance(&rig, SECOND);
    assert_int_equal(rig_stats(&rig).ttl_expired, 2);
    assert_false(kvt_ttl_owes(rig.store));
    for (int i = 0; i < 8; i++)
        rig_advance(&rig, SECOND);
    assert_int_equal(rig_stats(&rig).ttl_expired, 4);
    assert_true(kvt_ttl_owes(rig.store));
    rig_hold(&rig, false);
    rig_reopen(&rig);
    soon = open_with(10, 0, 0, 8 * SECOND);
    late = open_with(11, 0, 0, 16 * SECOND);
    assert_int_equal(get_in(soon, 1, 2), 0);
    assert_int_equal(get_in(late, 1, 2), 0);
    rig_close(&rig);
}

/* Levels that rise and cool, restarts, expiry, quotas and evictions at random: bytes of namespaces
 * are added up again after every step. */
static void test_bytes_hold_through_everything(void **state)
{
    struct kvt_rng rng = {41};
    struct rig_options o = options(8 * SECOND);
    uint64_t expired = 0, seen = 0;

    (void)state;
    o.ns_bytes_max = 40 * BLOCK;
    o.disk_cap_bytes = 8u << 20;
    begin(&o);
    for (int i = 0; i < 600; i++) {
        uint64_t chain = 100 * (1 + kvt_rng_below(&rng, 12));
        uint64_t numbers[8];
        uint32_t n = 1 + (uint32_t)kvt_rng_below(&rng, 8);
        for (uint32_t k = 0; k < n; k++)
            numbers[k] = chain + k;
        switch (kvt_rng_below(&rng, 9)) {
        case 8: /* longer and shorter than the store's, or none of its own */
            assert_int_equal(open_with(1, 0, (8 + kvt_rng_below(&rng, 64)) * BLOCK,
                                       kvt_rng_below(&rng, 4)
                                           ? SECOND + (int64_t)kvt_rng_below(&rng, 12) * SECOND
                                           : INT64_MAX),
                             ns);
            break;
        case 0:
        case 1:
            (void)rig_put(&rig, ns, numbers, n, 0, KV4, 1, NULL);
            break;
        case 2:
            (void)rig_put(&rig, ns, numbers, n, 0, RAW, 1, NULL);
            break;
        case 3: /* cool */
            (void)rig_put(&rig, ns, numbers, n, 0, KV4, 2, NULL);
            break;
        case 4:
            (void)rig_keys(&rig, KVT_OP_PURGE, ns, numbers, n);
            break;
        case 5:
            rig_advance(&rig, (int64_t)kvt_rng_below(&rng, 15) * SECOND);
            break;
        case 6:
            if (kvt_rng_below(&rng, 10) == 0) {
                seen = 0;
                rig_crash(&rig);
                ns = rig_ns(&rig, 1, pages);
            }
            break;
        default:
            (void)get_in(ns, chain, n);
        }
        rig_check(&rig);
        expired += rig_stats(&rig).ttl_expired - seen;
        seen = rig_stats(&rig).ttl_expired;
    }
    assert_true(expired > 20);
    printf("expired %llu, given up %llu, refused %llu\n", (unsigned long long)expired,
           (unsigned long long)rig_stats(&rig).quota_evicted,
           (unsigned long long)rig_stats(&rig).quota_refused);
    rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_c79_ttl_is_refreshed_by_hits),
        cmocka_unit_test(test_c79_a_clock_set_back_gives_no_time),
        cmocka_unit_test(test_c79_pins_hold_within_their_budget),
        cmocka_unit_test(test_expired_blocks_do_not_come_back),
        cmocka_unit_test(test_nobody_ran_while_they_expired),
        cmocka_unit_test(test_expired_blocks_are_stored_anew),
        cmocka_unit_test(test_expiry_in_the_middle_of_things),
        cmocka_unit_test(test_stamps_that_come_round),
        cmocka_unit_test(test_a_namespace_keeps_to_its_quota),
        cmocka_unit_test(test_a_quota_full_of_pins_refuses),
        cmocka_unit_test(test_groups_share_a_quota),
        cmocka_unit_test(test_a_quota_of_its_own),
        cmocka_unit_test(test_nothing_said_gives_more),
        cmocka_unit_test(test_a_time_of_its_own),
        cmocka_unit_test(test_its_own_time_is_for_good),
        cmocka_unit_test(test_many_times_of_their_own),
        cmocka_unit_test(test_a_time_that_waits_for_another),
        cmocka_unit_test(test_bytes_hold_through_everything),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
