/* L2 log: what an earlier life wrote, and did not make durable.
 *
 * Goal: what is found when a root is opened counts as durable only when it is: a flush makes it so
 * first, or says that it could not; so does a close. That goes for a segment that could be read in
 * part only, for one whose footer alone tells of some records and was never synced, and for one
 * whose sync has failed.
 * Method: a process dies, and the next one opens the root from the cache of the drive; then the
 * power goes, and nothing stays of what no sync has covered. fault_io over power_io over memory.
 * Broken on purpose: the planted bugs unread_segments_are_not_flushed, footers_are_durable,
 * footers_that_come_back_are_durable and close_leaves_failed_syncs. */
#include <errno.h>
#include <string.h>

#include "support/store_help.h"

#include "base/rng.h"
#include "kvtier/error.h"
#include "support/fault_io.h"
#include "support/l2_help.h"
#include "support/power_io.h"

#define CAP (16u << 20)
#define PAGES 6u
#define FIRST "seg-00000000"
#define SECOND INT64_C(1000000000)

static struct l2_env env;
static struct kvt_rng rng = {20261129};

static void found_again(void *ctx, const struct kvt_entry *entry, uint32_t segment)
{
    env.params.found(ctx, entry, segment, 0);
}

static bool room(void *ctx, uint32_t records)
{
    (void)ctx;
    (void)records;
    return true;
}

static void again_over(void *ctx)
{
    (void)ctx;
}

static struct kvt_io *first_life(void)
{
    struct kvt_io *memory = NULL, *power, *io;

    assert_int_equal(kvt_io_mem_new(64u << 20, &memory), 0);
    power = power_io_new(memory);
    assert_non_null(power);
    io = fault_io_new(power, 1);
    assert_non_null(io);
    l2_env_init(&env, CAP);
    env.params.found_again = found_again;
    env.params.room = room;
    env.params.again_over = again_over;
    assert_int_equal(l2_env_open(&env, io), 0);
    return io;
}

/* The process ends without a word, or the power goes; the drive is sound again. */
static void die(struct kvt_io *io, enum power_loss loss)
{
    fault_io_clear(io);
    fault_io_pull_the_plug(io);
    l2_env_close(&env);
    (void)power_io_loss(fault_io_inner(io), loss, &rng);
    fault_io_plug_in(io);
}

static void done(struct kvt_io *io)
{
    l2_env_close(&env);
    io->ops->destroy(io);
}

static uint32_t unread(void)
{
    struct kvt_l2_stats stats;

    kvt_l2_stats(env.l2, &stats);
    return (uint32_t)stats.segments_unread;
}

static void fault(struct kvt_io *io, unsigned ops, uint64_t skip, uint64_t times)
{
    const struct fault_rule rule = {.ops = ops,
                                    .name = FIRST,
                                    .skip = skip,
                                    .times = times,
                                    .action = FAULT_FAIL,
                                    .error = EIO};

    assert_true(fault_io_rule(io, &rule) >= 0);
}

/* Reads fail from the n-th on while the root is opened. True: a part was read. */
static bool part_of_it(struct kvt_io *io, uint64_t n)
{
    fault(io, FAULT_READ, n, 0);
    assert_int_equal(l2_env_open(&env, io), 0);
    fault_io_clear(io);
    return unread() && l2_env_count(&env);
}

/* What was read of it is durable when a flush has returned. */
static void test_flush_covers_what_could_be_read(void **state)
{
    uint32_t parts = 0;

    (void)state;
    for (uint64_t n = 0; n < 40; n++) {
        struct kvt_io *io = first_life();
        bool there[30];

        for (uint32_t i = 0; i < 30; i++)
            assert_int_equal(l2_env_put(&env, i, 1, PAGES), 0);
        die(io, POWER_KEEPS);
        parts += part_of_it(io, n);
        for (uint32_t i = 0; i < 30; i++)
            there[i] = env.index[i].present;
        if (l2_env_count(&env)) {
            fault(io, FAULT_SYNC, 0, 1);
            assert_int_equal(l2_env_flush(&env), -EIO);
        }
        assert_int_equal(l2_env_flush(&env), 0);
        die(io, POWER_DROPS);
        assert_int_equal(l2_env_open(&env, io), 0);
        for (uint32_t i = 0; i < 30; i++)
            if (there[i])
                assert_int_equal(l2_env_get(&env, i), 0);
        done(io);
    }
    print_message("           %u segments read in part\n", parts);
    assert_true(parts > 0);
}

/* 0 and 1 are written, the write of 2 fails, that of 3 behind it does not: the footer alone knows
 * it, and has not been synced when the process dies. */
static struct kvt_io *footer_not_synced(void)
{
    struct kvt_io *io = first_life();
    uint32_t ids[2] = {2, 3};

    assert_int_equal(l2_env_put(&env, 0, 1, PAGES), 0);
    assert_int_equal(l2_env_put(&env, 1, 1, PAGES), 0);
    fault(io, FAULT_WRITE, 0, 1);
    fault(io, FAULT_SYNC, 1, 0); /* that of the records passes */
    fault_io_hold(io, 1);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(l2_env_queue(&env, &ids[i], 1, 1, PAGES), 0);
    (void)fault_io_release(io, 10, 1);
    fault_io_hold(io, 0);
    l2_env_drain(&env);
    assert_int_equal(l2_env_put(&env, 4, 1, PAGES), 0);
    assert_int_equal(fault_io_rule_state(io, 0)->fired, 1);
    assert_int_equal(fault_io_rule_state(io, 1)->fired, 1);
    assert_int_equal(l2_env_get(&env, 3), 0);
    die(io, POWER_KEEPS);
    return io;
}

static void flushed_is_durable(struct kvt_io *io)
{
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(l2_env_get(&env, i), i == 2 ? KVT_E_MISS : 0);
    assert_int_equal(l2_env_flush(&env), 0);
    die(io, POWER_DROPS);
    assert_int_equal(l2_env_open(&env, io), 0);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(l2_env_get(&env, i), i == 2 ? KVT_E_MISS : 0);
    done(io);
}

static void test_a_footer_that_was_not_synced(void **state)
{
    struct kvt_io *io = footer_not_synced();

    (void)state;
    assert_int_equal(l2_env_open(&env, io), 0);
    flushed_is_durable(io);
}

static void test_a_footer_that_was_not_synced_comes_back(void **state)
{
    struct kvt_io *io = footer_not_synced();

    (void)state;
    (void)part_of_it(io, 0);
    assert_int_equal(unread(), 1);
    for (uint32_t turns = 0; unread(); turns++) {
        assert_true(turns < 1000);
        env.now += SECOND / 10;
        (void)kvt_l2_run(env.l2);
    }
    flushed_is_durable(io);
}

/* The sync of a full segment fails, and nobody flushes: a close makes it durable all the same. */
static void test_close_syncs_what_failed(void **state)
{
    struct kvt_io *io = first_life();

    (void)state;
    assert_int_equal(l2_env_put(&env, 0, 1, PAGES), 0);
    fault(io, FAULT_SYNC, 0, 0);
    for (uint32_t i = 1; i < 60; i++)
        assert_int_equal(l2_env_put(&env, i, 1, PAGES), 0);
    assert_true(fault_io_rule_state(io, 0)->fired > 0);
    fault_io_clear(io);
    l2_env_close(&env);
    (void)power_io_loss(fault_io_inner(io), POWER_DROPS, &rng);
    assert_int_equal(l2_env_open(&env, io), 0);
    for (uint32_t i = 0; i < 60; i++)
        assert_int_equal(l2_env_get(&env, i), 0);
    done(io);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_flush_covers_what_could_be_read),
        cmocka_unit_test(test_a_footer_that_was_not_synced),
        cmocka_unit_test(test_a_footer_that_was_not_synced_comes_back),
        cmocka_unit_test(test_close_syncs_what_failed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
