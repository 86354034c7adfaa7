/* L2 log: power loss and process death after every single I/O operation.
 *
 * Goal: the promises of docs/durability.md. Method: a scripted life of a root (create, fill,
 * recycle, purge, flush, close, reopen) over a drive that can lose power (support/crash_io.h).
 * After each operation that changes a file, the files that a crash would leave are made (all writes
 * kept; only the durable ones; a random part, torn at sectors) and recovered:
 *  - open succeeds, or the root is not there yet;
 *  - every record that is found and verifies has the bytes that were put (the helper checks);
 *  - what a returned flush covered is there, unless its segment was recycled;
 *  - what a returned purge covered is not there;
 *  - recovering a second time finds the same;
 *  - fsck finds nothing that a crash does not explain, before and after. */
#include <string.h>

#include "support/store_help.h"

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/fsck.h"
#include "support/crash_io.h"
#include "support/l2_help.h"

#define CAP (8u << 20)
#define IDS 400u

/* Sanitizers see the same code on every nth operation; a release build takes each one. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define EVERY 7
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define EVERY 7
#endif
#endif
#ifndef EVERY
#define EVERY 1
#endif

static struct l2_env env, other; /* the life, and the one after the crash */
static struct kvt_rng rng;

static struct {
    struct kvt_io *io;
    uint64_t flushed[IDS];  /* sequence that a flush made durable, 0: none, or recycled since */
    uint32_t segments[IDS]; /* where that is */
    uint64_t purging[IDS];  /* a purge of everything below was asked for ... */
    uint64_t purged[IDS];   /* ... and returned */
    enum crash_mode mode;
    uint32_t every; /* recover after every nth operation */
    uint64_t operations, recoveries, kept, lost;
} world;

static void remember_flushed(void)
{
    for (uint32_t i = 0; i < IDS; i++)
        if (env.index[i].present)
            world.flushed[i] = env.index[i].sequence,
            world.segments[i] = env.index[i].where.segment;
}

static void recycled(uint32_t segment)
{
    for (uint32_t i = 0; i < IDS; i++)
        if (world.segments[i] == segment)
            world.flushed[i] = 0;
}

static void check_one(uint32_t id)
{
    const struct l2_entry *now = &env.index[id];
    bool there = other.index[id].present;
    int rc = there ? l2_env_get(&other, id) : KVT_E_MISS;

    if (there)
        assert_true(other.index[id].sequence >= world.purged[id]);
    world.kept += !rc;
    world.lost += now->present && rc;
    if (world.flushed[id] && world.flushed[id] >= world.purging[id]) {
        assert_int_equal(rc, 0);
        assert_true(other.index[id].sequence >= world.flushed[id]);
    }
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

static void crashed(void *ctx)
{
    uint64_t found;
    struct kvt_io *image;
    int rc;

    (void)ctx;
    if (world.operations++ % world.every)
        return;
    image = crash_io_image(world.io, world.mode, &rng);
    assert_non_null(image);
    check_fsck(image);
    l2_env_init(&other, CAP);
    memcpy(other.puts, env.puts, sizeof other.puts);
    rc = l2_env_open(&other, image);
    assert_int_equal(rc, 0);
    for (uint32_t id = 0; id < IDS; id++)
        check_one(id);
    found = other.found;
    /* the second crash comes at once: nothing may depend on a close */
    {
        struct kvt_io *again = NULL;
        struct l2_env *second = calloc(1, sizeof *second);

        assert_int_equal(kvt_io_mem_clone(image, &again), 0);
        l2_env_init(second, CAP);
        memcpy(second->puts, env.puts, sizeof second->puts);
        assert_int_equal(l2_env_open(second, again), 0);
        assert_int_equal(second->found, found);
        for (uint32_t id = 0; id < IDS; id++)
            if (other.index[id].present)
                assert_int_equal(second->index[id].sequence, other.index[id].sequence);
        /* and the root works */
        assert_int_equal(l2_env_put(second, 7, 1000, 3), 0);
        assert_int_equal(l2_env_get(second, 7), 0);
        l2_env_close(second);
        check_fsck(again);
        again->ops->destroy(again);
        free(second);
    }
    l2_env_close(&other);
    image->ops->destroy(image);
    world.recoveries++;
}

static void put_many(uint32_t count, uint32_t version)
{
    uint32_t ids[16], n = 0;

    for (uint32_t i = 0; i < count; i++) {
        ids[n++] = (uint32_t)kvt_rng_below(&rng, IDS);
        if (n == 16 || i + 1 == count) {
            uint32_t pages = 1 + (uint32_t)kvt_rng_below(&rng, 8);

            while (l2_env_queue(&env, ids, n, version, pages))
                l2_env_turn(&env);
            if (kvt_rng_below(&rng, 2))
                l2_env_drain(&env);
            n = 0;
        }
    }
    l2_env_drain(&env);
}

static void purge_some(void)
{
    uint32_t id = (uint32_t)kvt_rng_below(&rng, IDS), ns = (uint32_t)kvt_rng_below(&rng, 4);

    world.purging[id] = env.sequence;
    assert_int_equal(l2_env_purge_key(&env, id), 0);
    world.purged[id] = world.purging[id];
    if (kvt_rng_below(&rng, 4))
        return;
    for (uint32_t i = ns; i < IDS; i += 4)
        world.purging[i] = env.sequence;
    assert_int_equal(l2_env_purge_ns(&env, ns), 0);
    for (uint32_t i = ns; i < IDS; i += 4)
        world.purged[i] = world.purging[i];
}

static void live(enum crash_mode mode, uint32_t every, uint32_t rounds)
{
    memset(&world, 0, sizeof world);
    world.mode = mode;
    world.every = every;
    world.io = crash_io_new(1u << 30);
    l2_env_init(&env, CAP);
    env.on_evict = recycled;
    world.io->ops->close(world.io, world.io->ops->open(world.io, "lock", KVT_IO_OPEN_CREATE));
    crash_io_hook(world.io, crashed, NULL); /* the lock comes before everything else, as in life */
    for (uint32_t round = 0; round < rounds; round++) {
        assert_int_equal(l2_env_open(&env, world.io), 0);
        if (round)
            assert_true(l2_env_verify(&env) > 0);
        put_many(150, round * 10 + 1);
        assert_int_equal(l2_env_flush(&env), 0);
        remember_flushed();
        put_many(100, round * 10 + 2);
        purge_some();
        put_many(150, round * 10 + 3);
        assert_int_equal(l2_env_flush(&env), 0);
        remember_flushed();
        purge_some();
        put_many(60, round * 10 + 4);
        assert_int_equal(env.failed, 0);
        l2_env_close(&env);
    }
    assert_true(env.evictions > 0);
    crash_io_hook(world.io, NULL, NULL);
    world.io->ops->destroy(world.io);
    print_message("           %llu operations, %llu recoveries, %llu records exact, %llu lost\n",
                  (unsigned long long)world.operations, (unsigned long long)world.recoveries,
                  (unsigned long long)world.kept, (unsigned long long)world.lost);
    assert_true(world.recoveries > 20 && world.kept > 1000);
}

static void test_process_death_loses_nothing_published(void **state)
{
    (void)state;
    live(CRASH_PROCESS, EVERY, 3);
}

static void test_power_loss_keeps_the_durable(void **state)
{
    (void)state;
    live(CRASH_NOTHING, EVERY, 3);
}

static void test_power_loss_with_random_remains(void **state)
{
    (void)state;
    live(CRASH_RANDOM, EVERY, 3);
    for (int i = 0; i < (getenv("KVT_TEST_LONG") ? 50 : 3); i++)
        live(CRASH_RANDOM, 4 + EVERY, 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_process_death_loses_nothing_published),
        cmocka_unit_test(test_power_loss_keeps_the_durable),
        cmocka_unit_test(test_power_loss_with_random_remains),
    };

    rng.state = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
