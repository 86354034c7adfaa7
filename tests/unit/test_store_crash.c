/* The store over a drive that loses power, or a process that is killed, after any I/O operation.
 *
 * Goal:   what the store does beside itself (purges beside stores, evictions, flushes) keeps the
 *         promises of docs/durability.md and leaves nothing that fsck would call damage.
 * Method: a random life of a store (support/store_rig.h) over support/crash_io.h. After every nth
 *         operation that changes a file, the files that a crash would leave are checked by fsck and
 *         opened by a second store:
 *          - fsck finds no problem, before and after;
 *          - every block that is found has exactly the bytes that were put;
 *          - what a returned purge covered is not there, unless it was put again;
 *          - what a returned flush covered is there, unless its segment was recycled;
 *          - and even then, if it was asked for: such records are moved, and are durable before
 *            their old segment is overwritten.
 */
#include "support/store_rig.h"

#include <string.h>

#include "base/rng.h"
#include "kvtier/error.h"
#include "store/fsck.h"
#include "support/crash_io.h"

enum { BLOCKS = 160, CHAIN = 8, MAP = 6, CLIENT = 1, HOT = 16, COLD = 100000 };

/* Sanitizers see the same code on fewer operations. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define EVERY 12
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define EVERY 12
#endif
#endif
#ifndef EVERY
#define EVERY 2
#endif

static const uint32_t pages[7] = {0, 0, 2, 0, 0, 4, 8};

struct known {
    bool put;     /* committed since it was last purged: it may be found */
    bool flushed; /* it must be found, unless `lossy` */
    bool purging; /* a purge was asked for and has not returned */
};

static struct {
    struct rig rig, after;
    struct kvt_io *medium;
    struct kvt_rng rng;
    enum crash_mode mode;
    struct known known[BLOCKS + 1];
    uint32_t ns;
    uint64_t operations, recoveries, exact, every;
    uint64_t recycled; /* segments, as of the last step */
    uint64_t moved, next_cold;
} world;

static uint32_t roll(uint32_t bound)
{
    return (uint32_t)kvt_rng_below(&world.rng, bound);
}

static struct rig_options options(void)
{
    struct rig_options o = rig_defaults();

    o.cache_bytes = 512u << 10;
    o.staging_bytes = 64u << 10;
    o.disk_cap_bytes = 8u << 20;
    return o;
}

static void show_finding(void *ctx, bool problem, const char *text)
{
    (void)ctx;
    if (problem)
        print_message("fsck: %s\n", text);
}

static void check_fsck(struct kvt_io *io)
{
    struct kvt_fsck_params params = {.io = io, .found = show_finding};
    struct kvt_fsck_report report;
    int rc = kvt_fsck(&params, &report);

    assert_true(rc == 0 || rc == 1); /* 1: empty */
    assert_int_equal(report.problems, 0);
}

/* Flushed with all its ancestors: a chain ends at its first absent block. */
static bool must_be_there(uint64_t number)
{
    for (uint64_t at = (number - 1) / CHAIN * CHAIN + 1; at <= number; at++)
        if (!world.known[at].flushed || world.known[at].purging)
            return false;
    return true;
}

/* What the crash left, seen by the next process. */
static void check_after(void)
{
    bool lossy = rig_stats(&world.rig).evict_disk_segments != world.recycled;

    for (uint64_t number = 1; number <= BLOCKS; number++) {
        const struct known *known = &world.known[number];
        uint32_t got = rig_get(&world.after, 1, &number, 1, 0, NULL, NULL);

        world.exact += got;
        if (got)
            assert_true(known->put || known->purging);
        else if (must_be_there(number) && !lossy)
            fail_msg("block %llu was flushed and is gone", (unsigned long long)number);
    }
    assert_int_equal(rig_stats(&world.after).checksum_fail, 0);
}

/* What was flushed once and asked for in every turn of the log is there after any crash. */
static void check_hot_after(void)
{
    for (uint64_t number = 1; number <= HOT; number++) {
        if (!world.known[number].flushed)
            continue;
        if (rig_get(&world.after, 1, &number, 1, 0, NULL, NULL) != 1)
            fail_msg("block %llu was moved and is gone", (unsigned long long)number);
        world.exact++;
    }
    for (uint64_t number = world.next_cold - 40; number < world.next_cold; number++)
        world.exact += rig_get(&world.after, 1, &number, 1, 0, NULL, NULL);
    assert_int_equal(rig_stats(&world.after).checksum_fail, 0);
}

static void crashed(void *ctx)
{
    struct rig_options o = options();
    struct kvt_io *image;
    uint32_t ns;

    (void)ctx;
    if (world.operations++ % world.every)
        return;
    image = crash_io_image(world.medium, world.mode, &world.rng);
    assert_non_null(image);
    check_fsck(image);
    rig_open(&world.after, &o, image);
    ns = rig_ns(&world.after, 1, pages);
    assert_int_equal(ns, 1);
    if (world.next_cold)
        check_hot_after();
    else
        check_after();
    check_fsck(image);
    rig_close(&world.after);
    world.recoveries++;
}

static uint64_t chain_of(uint64_t *numbers)
{
    uint64_t first = roll(BLOCKS / CHAIN) * (uint64_t)CHAIN + 1;

    for (uint32_t i = 0; i < CHAIN; i++)
        numbers[i] = first + i;
    return first;
}

static void put_chain(void)
{
    int32_t statuses[CHAIN];
    uint64_t numbers[CHAIN];

    (void)chain_of(numbers);
    for (uint32_t i = 0; i < CHAIN; i++) /* it may be on disk before the reply is seen */
        world.known[numbers[i]].put = true;
    (void)rig_put(&world.rig, world.ns, numbers, CHAIN, 0, MAP, false, statuses);
}

static void flush(void)
{
    if (rig_flush(&world.rig) != 0)
        return;
    for (uint64_t number = 1; number <= BLOCKS; number++)
        world.known[number].flushed = rig_lookup(&world.rig, world.ns, &number, 1, 0, NULL) == 1;
}

/* What went with a recycled segment needs not be there any more. */
static void note_recycled(void)
{
    uint64_t now = rig_stats(&world.rig).evict_disk_segments;

    for (uint64_t number = 1; number <= BLOCKS && now != world.recycled; number++)
        world.known[number].flushed = false; /* DRAM may hide what has left the disk */
    world.recycled = now;
}

/* Purge some blocks while others are on their way to the disk. */
static void purge_beside_stores(void)
{
    uint64_t numbers[CHAIN];
    struct kvt_msg_keys *msg = calloc(1, sizeof(*msg) + CHAIN * sizeof(msg->keys[0]));
    uint32_t n = roll(6) ? 1 + roll(CHAIN) : 0;

    assert_non_null(msg);
    put_chain();
    (void)chain_of(numbers);
    msg->msg = (struct kvt_msg){.bytes = (uint32_t)(sizeof(*msg) + n * sizeof(msg->keys[0])),
                                .op = KVT_OP_PURGE,
                                .cookie = 1u << 30,
                                .ns = world.ns,
                                .count = n};
    for (uint32_t i = 0; i < n; i++)
        msg->keys[i] = rig_key(numbers[i]);
    for (uint64_t number = 1; number <= BLOCKS; number++)
        if (!n || (number >= numbers[0] && number < numbers[0] + n))
            world.known[number] = (struct known){.put = world.known[number].put, .purging = true};
    assert_int_equal(rig_send(&world.rig, CLIENT, msg), 0);
    free(msg);
    rig_settle(&world.rig);
    assert_non_null(rig_reply(&world.rig, 1u << 30));
    assert_true(rig_reply(&world.rig, 1u << 30)->status >= 0);
    rig_forget_replies(&world.rig);
    for (uint64_t number = 1; number <= BLOCKS; number++)
        if (world.known[number].purging)
            world.known[number] = (struct known){0};
}

static void start(enum crash_mode mode, uint32_t every)
{
    struct rig_options o = options();

    memset(&world.known, 0, sizeof(world.known));
    world.mode = mode;
    world.every = every;
    world.operations = world.recoveries = world.exact = world.recycled = world.next_cold = 0;
    world.medium = crash_io_new(1u << 30);
    assert_non_null(world.medium);
    world.medium->ops->close(world.medium,
                             world.medium->ops->open(world.medium, "lock", KVT_IO_OPEN_CREATE));
    rig_open(&world.rig, &o, world.medium);
    world.ns = rig_ns(&world.rig, 1, pages);
    crash_io_hook(world.medium, crashed, NULL);
}

static void stop(void)
{
    crash_io_hook(world.medium, NULL, NULL);
    print_message("           %llu operations, %llu recoveries, %llu blocks exact\n",
                  (unsigned long long)world.operations, (unsigned long long)world.recoveries,
                  (unsigned long long)world.exact);
    assert_true(world.recoveries > 20 && world.exact > 500);
    rig_close(&world.rig);
}

static void live(enum crash_mode mode, uint32_t every, uint32_t steps)
{
    start(mode, every);
    for (uint32_t step = 0; step < steps; step++) {
        uint32_t dice = roll(20);

        if (dice < 14)
            put_chain();
        else if (dice < 17)
            purge_beside_stores();
        else
            flush();
        note_recycled();
    }
    stop();
}

/* The log turns over and over; a few chains are asked for in each turn. */
static void turn_over(enum crash_mode mode, uint32_t every, uint32_t turns)
{
    uint64_t numbers[CHAIN];

    start(mode, every);
    world.next_cold = COLD;
    for (uint64_t first = 1; first <= HOT; first += CHAIN) {
        for (uint32_t i = 0; i < CHAIN; i++)
            numbers[i] = first + i;
        assert_int_equal(rig_put(&world.rig, world.ns, numbers, CHAIN, 0, MAP, false, NULL), CHAIN);
    }
    assert_int_equal(rig_flush(&world.rig), 0);
    for (uint64_t number = 1; number <= HOT; number++)
        world.known[number].flushed = true;
    for (uint32_t turn = 0; turn < turns; turn++) {
        for (uint64_t number = 1; number <= HOT; number++)
            assert_true(rig_keys(&world.rig, KVT_OP_TOUCH, world.ns, &number, 1) >= 0);
        for (uint32_t i = 0; i < 40; i++) {
            assert_int_equal(
                rig_put(&world.rig, world.ns, &world.next_cold, 1, 0, MAP, false, NULL), 1);
            world.next_cold++;
        }
    }
    world.moved = rig_stats(&world.rig).reinserted;
    print_message("           %llu blocks moved, %llu segments recycled\n",
                  (unsigned long long)world.moved,
                  (unsigned long long)rig_stats(&world.rig).evict_disk_segments);
    assert_true(world.moved >= 2 * HOT);
    stop();
}

static void test_moved_and_killed(void **state)
{
    (void)state;
    turn_over(CRASH_PROCESS, EVERY, 24);
}

static void test_moved_and_power_lost(void **state)
{
    (void)state;
    turn_over(CRASH_NOTHING, EVERY, 24);
}

static void test_moved_and_power_lost_with_random_remains(void **state)
{
    (void)state;
    turn_over(CRASH_RANDOM, EVERY, 24);
}

static void test_killed(void **state)
{
    (void)state;
    live(CRASH_PROCESS, EVERY, 100);
}

static void test_power_lost(void **state)
{
    (void)state;
    live(CRASH_NOTHING, EVERY, 100);
}

static void test_power_lost_with_random_remains(void **state)
{
    (void)state;
    live(CRASH_RANDOM, EVERY, 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_power_lost),
        cmocka_unit_test(test_power_lost_with_random_remains),
        cmocka_unit_test(test_moved_and_killed),
        cmocka_unit_test(test_moved_and_power_lost),
        cmocka_unit_test(test_moved_and_power_lost_with_random_remains),
    };

    world.rng.state = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
