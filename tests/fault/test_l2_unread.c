/* L2 log opened on a drive that cannot be read well.
 *
 * Goal: a bad read while a root is opened costs nothing that was durable. One that passes (an
 * error, a flipped bit, a short end, once) costs not even time: it is read again. One that stays
 * costs the blocks concerned for this life only: their segment is kept as it is, neither written
 * nor recycled, and the next open has them. Where nothing can be done without what was not read,
 * the open fails and has changed nothing.
 * Method: a root with sealed segments, an unsealed one and purges; the N-th read of its opening
 * goes bad, N = 1, 2, ...; then new records are written, and a sound drive must hold all, old and
 * new. fault_io over memory. */
#include <errno.h>
#include <string.h>

#include "support/store_help.h"

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/fsck.h"
#include "support/fault_io.h"
#include "support/l2_help.h"

#define CAP (16u << 20)
#define OLD 130u /* ids of the image: three segments and a bit, flushed */
#define PURGED 100u
#define NEW 1000u /* and as many in the life after */
#define PAGES 6u

static struct l2_env env, saved;
static struct kvt_io *image;

static void put_all(uint32_t first)
{
    for (uint32_t i = first; i < first + OLD; i++)
        assert_int_equal(l2_env_put(&env, i, 1, PAGES), 0);
    assert_int_equal(l2_env_flush(&env), 0);
}

static void make_image(void)
{
    assert_int_equal(kvt_io_mem_new(64u << 20, &image), 0);
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, image), 0);
    put_all(0);
    assert_int_equal(l2_env_purge_key(&env, PURGED), 0);
    l2_env_close(&env);
    saved = env; /* with what was put */
}

/* A medium behind faults, opened. */
static int open_bad(const struct kvt_io *medium, const struct fault_rule *rule, struct kvt_io **io)
{
    *io = fault_io_new(l2_clone(medium), 1);
    assert_non_null(*io);
    assert_int_equal(fault_io_rule(*io, rule), 0);
    env = saved;
    return l2_env_open(&env, *io);
}

/* On a sound drive: the old ones but for the purged one, and the new ones when there are any. */
static void expect_all(struct kvt_io *medium, bool with_new)
{
    assert_int_equal(l2_env_open(&env, medium), 0);
    for (uint32_t i = 0; i < OLD; i++) {
        if (l2_env_get(&env, i) != (i == PURGED ? KVT_E_MISS : 0))
            fail_msg("block %u: %d", i, l2_env_get(&env, i));
        if (with_new)
            assert_int_equal(l2_env_get(&env, NEW + i), 0);
    }
    l2_env_close(&env);
    medium->ops->destroy(medium);
}

static uint32_t unread_segments(void)
{
    struct kvt_l2_stats stats;

    kvt_l2_stats(env.l2, &stats);
    return (uint32_t)stats.segments_unread;
}

/* One opening. Returns whether the rule fired. at_once: nothing may be missing even now. */
static bool bad_read(struct fault_rule rule, uint64_t n, bool at_once, uint64_t *aside)
{
    struct kvt_io *io, *after;
    int rc;
    bool fired;

    rule.skip = n;
    rc = open_bad(image, &rule, &io);
    fired = fault_io_rule_state(io, 0)->fired > 0;
    fault_io_clear(io);
    if (rc) {
        assert_false(at_once);
        assert_int_equal(rc, -EIO);
        after = l2_clone(fault_io_inner(io));
        io->ops->destroy(io);
        expect_all(after, false);
        return fired;
    }
    if (at_once) {
        assert_int_equal(unread_segments(), 0);
        assert_int_equal(l2_env_count(&env), OLD - 1);
    }
    *aside += unread_segments();
    assert_int_equal(l2_env_verify(&env), l2_env_count(&env)); /* what is there is exact */
    put_all(NEW);
    assert_int_equal(env.evictions, 0);
    l2_env_close(&env);
    after = l2_clone(fault_io_inner(io));
    io->ops->destroy(io);
    expect_all(after, true);
    return fired;
}

static void every_read(struct fault_rule rule, bool at_once)
{
    uint64_t n = 0, aside = 0;

    while (bad_read(rule, n, at_once, &aside))
        n++;
    print_message("           %llu reads, %llu segments kept aside\n", (unsigned long long)n,
                  (unsigned long long)aside);
    assert_true(n >= 15);
    assert_true(at_once || aside > 0);
}

static void test_a_read_that_fails_once_costs_nothing(void **state)
{
    const struct fault_rule rule = {
        .ops = FAULT_READ, .times = 1, .action = FAULT_FAIL, .error = EIO};

    (void)state;
    every_read(rule, true);
}

static void test_a_flipped_bit_once_costs_nothing(void **state)
{
    const struct fault_rule rule = {
        .ops = FAULT_READ, .times = 1, .action = FAULT_FLIP, .arg = FAULT_RANDOM};

    (void)state;
    every_read(rule, true);
}

static void test_a_short_read_once_costs_nothing(void **state)
{
    const struct fault_rule rule = {.ops = FAULT_READ, .times = 1, .action = FAULT_SHORT, .arg = 1};

    (void)state;
    every_read(rule, true);
}

static void test_reads_that_fail_twice_cost_this_life_only(void **state)
{
    const struct fault_rule rule = {
        .ops = FAULT_READ, .times = 2, .action = FAULT_FAIL, .error = EIO};

    (void)state;
    every_read(rule, false);
}

static void test_reads_that_fail_until_the_root_is_open(void **state)
{
    const struct fault_rule rule = {
        .ops = FAULT_READ, .name = "seg-", .times = 0, .action = FAULT_FAIL, .error = EIO};

    (void)state;
    every_read(rule, false);
}

static void test_files_that_cannot_be_opened_for_a_while(void **state)
{
    const struct fault_rule rule = {
        .ops = FAULT_OPEN, .times = 2, .action = FAULT_FAIL, .error = EIO};
    uint64_t aside = 0;

    (void)state;
    for (uint64_t n = 0; n < 40; n++)
        (void)bad_read(rule, n, false, &aside);
    assert_true(aside > 0);
}

static void read_file(struct kvt_io *io, const char *name, void *bytes, size_t count)
{
    int file = io->ops->open(io, name, KVT_IO_OPEN_READ_ONLY);

    assert_true(file >= 0);
    assert_int_equal(kvt_io_read_now(io, file, 0, bytes, count), count);
    io->ops->close(io, file);
}

/* A segment that stays unreadable while the log turns over three times: not one byte of its file
 * changes, the cap holds (l2_env checks), it is said, and a purge of those days counts later. */
static void test_kept_aside_while_the_log_turns_over(void **state)
{
    static _Alignas(4096) uint8_t before[1u << 20], now[1u << 20];
    const struct fault_rule rule = {
        .ops = FAULT_READ, .name = "seg-00000001", .times = 0, .action = FAULT_FAIL, .error = EIO};
    struct kvt_io *io, *after;
    uint32_t there = 0;

    (void)state;
    assert_int_equal(open_bad(image, &rule, &io), 0);
    assert_int_equal(unread_segments(), 1);
    assert_true(l2_env_count(&env) < OLD - 1);
    assert_non_null(strstr(env.last_message, "cannot be read"));
    read_file(image, "seg-00000001", before, sizeof before);
    for (uint32_t i = 0; i < 2000; i++)
        assert_int_equal(l2_env_put(&env, NEW + i, 1, PAGES), 0);
    assert_true(env.evictions > 30);
    assert_int_equal(l2_env_purge_key(&env, 50), 0); /* of which nobody knows where it lies */
    fault_io_clear(io);
    read_file(io, "seg-00000001", now, sizeof now);
    assert_memory_equal(before, now, sizeof now);
    l2_env_close(&env);
    after = l2_clone(fault_io_inner(io));
    io->ops->destroy(io);
    assert_int_equal(l2_env_open(&env, after), 0);
    assert_int_equal(unread_segments(), 0);
    for (uint32_t i = 0; i < OLD; i++)
        there += l2_env_get(&env, i) == 0;
    assert_true(there >= 30); /* what that segment held */
    assert_int_equal(l2_env_get(&env, 50), KVT_E_MISS);
    l2_env_close(&env);
    after->ops->destroy(after);
}

static void count_problem(void *ctx, bool problem, const char *text)
{
    *(uint32_t *)ctx += problem && strstr(text, "cannot be read") != NULL;
}

static void test_fsck_says_so(void **state)
{
    const struct fault_rule rule = {
        .ops = FAULT_READ, .name = "seg-00000001", .times = 0, .action = FAULT_FAIL, .error = EIO};
    struct kvt_io *io = fault_io_new(l2_clone(image), 1);
    uint32_t said = 0;
    struct kvt_fsck_params params = {.io = io, .found = count_problem, .ctx = &said};
    struct kvt_fsck_report report;

    (void)state;
    fault_io_rule(io, &rule);
    assert_int_equal(kvt_fsck(&params, &report), 0);
    assert_int_equal(said, 1);
    io->ops->destroy(io);
}

/* Every segment unreadable: nothing is written for lack of room, nothing is lost. */
static void test_no_segment_can_be_read(void **state)
{
    const struct fault_rule rule = {
        .ops = FAULT_READ, .name = "seg-", .times = 0, .action = FAULT_FAIL, .error = EIO};
    struct kvt_io *io, *after;

    (void)state;
    assert_int_equal(open_bad(image, &rule, &io), 0);
    assert_true(unread_segments() >= 3);
    assert_int_equal(l2_env_count(&env), 0);
    (void)l2_env_put(&env, NEW, 1, PAGES); /* there is room for other segments */
    assert_int_equal(env.evictions, 0);
    l2_env_close(&env);
    after = l2_clone(fault_io_inner(io));
    io->ops->destroy(io);
    expect_all(after, false);
}

/* Neither copy of the superblock nor a header: whose root it is cannot be told. Refused. */
static void test_nothing_can_be_read(void **state)
{
    const struct fault_rule rule = {.ops = FAULT_READ, .action = FAULT_FAIL, .error = EIO};
    struct kvt_io *io, *after;

    (void)state;
    assert_int_equal(open_bad(image, &rule, &io), -EIO);
    assert_int_equal(fault_io_count(io, FAULT_WRITE | FAULT_UNLINK | FAULT_RENAME), 0);
    fault_io_clear(io);
    after = l2_clone(fault_io_inner(io));
    io->ops->destroy(io);
    expect_all(after, false);
}

/* The cap is lowered while a segment cannot be read: of unknown age, it goes first. */
static void test_a_lower_cap_takes_it(void **state)
{
    const struct fault_rule rule = {
        .ops = FAULT_READ, .name = "seg-00000002", .times = 0, .action = FAULT_FAIL, .error = EIO};
    struct kvt_io *io, *full = l2_clone(image);

    (void)state;
    env = saved;
    assert_int_equal(l2_env_open(&env, full), 0);
    for (uint32_t i = 0; i < 400; i++)
        assert_int_equal(l2_env_put(&env, NEW + i, 1, PAGES), 0);
    l2_env_close(&env);
    io = fault_io_new(l2_clone(full), 1);
    fault_io_rule(io, &rule);
    env.cap = 8u << 20;
    assert_int_equal(l2_env_open(&env, io), 0);
    assert_int_equal(io->ops->open(io, "seg-00000002", KVT_IO_OPEN_READ_ONLY), -ENOENT);
    (void)l2_env_verify(&env);
    l2_env_close(&env);
    io->ops->destroy(io);
    full->ops->destroy(full);
}

static int setup(void **state)
{
    (void)state;
    make_image();
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    image->ops->destroy(image);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_read_that_fails_once_costs_nothing),
        cmocka_unit_test(test_a_flipped_bit_once_costs_nothing),
        cmocka_unit_test(test_a_short_read_once_costs_nothing),
        cmocka_unit_test(test_reads_that_fail_twice_cost_this_life_only),
        cmocka_unit_test(test_reads_that_fail_until_the_root_is_open),
        cmocka_unit_test(test_files_that_cannot_be_opened_for_a_while),
        cmocka_unit_test(test_kept_aside_while_the_log_turns_over),
        cmocka_unit_test(test_fsck_says_so),
        cmocka_unit_test(test_no_segment_can_be_read),
        cmocka_unit_test(test_nothing_can_be_read),
        cmocka_unit_test(test_a_lower_cap_takes_it),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
