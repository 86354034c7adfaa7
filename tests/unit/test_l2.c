/* L2 log: append, read back, recover, recycle, flush.
 *
 * Method: a small store (support/l2_help.h) over the memory, posix and uring backends; every
 * record is made from its id and version, every read is compared with that. Time is the test's. */
#include <errno.h>
#include <string.h>

#include "support/store_help.h"

#include "base/checked.h"
#include "kvtier/error.h"
#include "support/l2_help.h"

#define CAP (8u << 20)

static struct l2_env env; /* large: not on the stack */

static int medium = -1; /* memory, or enum kvt_io_backend */
static char base[256], dir[300];

static struct kvt_io *new_io(void)
{
    struct kvt_io_posix_params params = {
        .path = dir, .threads = 3, .direct = -1, .backend = medium};
    struct kvt_io *io = NULL;

    if (medium < 0)
        assert_int_equal(kvt_io_mem_new(1u << 30, &io), 0);
    else
        assert_int_equal(kvt_io_files_new(&params, &io), 0);
    return io;
}

static int setup(void **state)
{
    static uint32_t roots;

    (void)state;
    snprintf(dir, sizeof dir, "%s/%u", base, (unsigned)roots++);
    return 0;
}

static void test_append_and_read_back(void **state)
{
    struct kvt_io *io = new_io();
    uint32_t ids[40];

    (void)state;
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    assert_int_equal(kvt_l2_segment_bytes(env.l2), 1u << 20);
    for (uint32_t i = 0; i < 40; i++)
        ids[i] = i;
    assert_int_equal(l2_env_queue(&env, ids, 40, 1, 3), 0);
    assert_true(env.in_flight == 40); /* nothing is reported from within append */
    l2_env_drain(&env);
    assert_int_equal(env.failed, 0);
    for (uint32_t i = 0; i < 40; i++)
        assert_int_equal(l2_env_get(&env, i), 0);
    assert_int_equal(l2_env_get(&env, 40), KVT_E_MISS);
    l2_env_close(&env);
    io->ops->destroy(io);
}

static void test_reopen_finds_everything_and_goes_on(void **state)
{
    struct kvt_io *io = new_io();
    uint64_t last;

    (void)state;
    l2_env_init(&env, CAP);
    for (uint32_t round = 0; round < 10; round++) { /* ten short lives fill one segment together */
        assert_int_equal(l2_env_open(&env, io), 0);
        assert_int_equal(l2_env_count(&env), round * 5);
        assert_int_equal(l2_env_verify(&env), round * 5);
        for (uint32_t i = 0; i < 5; i++)
            assert_int_equal(l2_env_put(&env, round * 5 + i, round, 2), 0);
        last = env.sequence;
        l2_env_close(&env);
        assert_int_equal(l2_env_open(&env, io), 0);
        assert_true(env.next_sequence >= last);
        l2_env_close(&env);
    }
    assert_int_equal(env.evictions, 0);
    assert_true(l2_files_count(io) <= 4); /* superblock, journal, and one segment or two */
    io->ops->destroy(io);
}

static void test_recycles_oldest_first_within_the_cap(void **state)
{
    struct kvt_io *io = new_io();
    uint32_t newest = 0;

    (void)state;
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    for (uint32_t i = 0; i < 1000; i++) { /* 1000 * 10 pages: five times the cap */
        assert_int_equal(l2_env_put(&env, i, 1, 10), 0);
        assert_true(l2_files_bytes(io) <= CAP);
        newest = i;
    }
    assert_true(env.evictions > 20);
    for (uint32_t i = newest - 99; i <= newest; i++) /* at least half the cap is the newest */
        assert_int_equal(l2_env_get(&env, i), 0);
    assert_int_equal(l2_env_get(&env, 0), KVT_E_MISS);
    uint32_t before = l2_env_count(&env);
    assert_int_equal(l2_env_verify(&env), before);
    l2_env_close(&env);
    assert_int_equal(l2_env_open(&env, io), 0); /* no evicted record comes back */
    assert_int_equal(l2_env_count(&env), before);
    assert_int_equal(l2_env_verify(&env), before);
    l2_env_close(&env);
    io->ops->destroy(io);
}

static void test_higher_sequence_wins_after_reopen(void **state)
{
    struct kvt_io *io = new_io();

    (void)state;
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    for (uint32_t version = 1; version <= 5; version++)
        assert_int_equal(l2_env_put(&env, 7, version, 4), 0);
    l2_env_close(&env);
    assert_int_equal(l2_env_open(&env, io), 0);
    assert_int_equal(env.found, 5);
    assert_int_equal(env.index[7].sequence, env.puts[7][0].sequence);
    assert_int_equal(l2_env_get(&env, 7), 0);
    l2_env_close(&env);
    io->ops->destroy(io);
}

static void test_size_limits(void **state)
{
    struct kvt_io *io = new_io();
    uint32_t max, id = 1;

    (void)state;
    l2_env_init(&env, CAP);
    env.cap = CAP - 1;
    assert_int_equal(l2_env_open(&env, io), KVT_E_TOO_SMALL);
    assert_int_equal(l2_files_count(io), 0);
    env.cap = CAP;
    assert_int_equal(l2_env_open(&env, io), 0);
    max = kvt_l2_record_bytes_max(env.l2) / KVT_PAGE_BYTES;
    assert_true(max >= 60);
    for (uint32_t i = 0; i < 4; i++) /* four of the largest fit one segment */
        assert_int_equal(l2_env_put(&env, i, 1, max), 0);
    assert_int_equal(env.index[3].where.segment, env.index[0].where.segment);
    assert_int_equal(l2_env_queue(&env, &id, 1, 1, max + 1), 0);
    l2_env_drain(&env);
    assert_int_equal(env.last_status, KVT_E_TOO_SMALL);
    assert_int_equal(l2_env_get(&env, 1), 0); /* the version before */
    l2_env_close(&env);
    io->ops->destroy(io);
}

static void test_long_lists_become_several_batches(void **state)
{
    struct kvt_io *io = new_io();
    uint32_t ids[500];
    struct kvt_l2_stats stats;

    (void)state;
    l2_env_init(&env, 32u << 20);
    assert_int_equal(l2_env_open(&env, io), 0);
    for (uint32_t i = 0; i < 500; i++)
        ids[i] = i;
    assert_int_equal(l2_env_queue(&env, ids, 500, 9, 1), 0);
    assert_false(kvt_l2_can_append(env.l2));
    assert_int_equal(l2_env_queue(&env, ids, 1, 9, 1), -EAGAIN);
    l2_env_drain(&env);
    assert_int_equal(env.failed, 0);
    assert_int_equal(l2_env_verify(&env), 500);
    kvt_l2_stats(env.l2, &stats);
    assert_true(stats.bytes_written > 500u * KVT_PAGE_BYTES);
    l2_env_close(&env);
    assert_int_equal(l2_env_open(&env, io), 0);
    assert_int_equal(l2_env_verify(&env), 500);
    l2_env_close(&env);
    io->ops->destroy(io);
}

static void count_read(struct kvt_l2_read *read)
{
    ++*(uint32_t *)read->user;
}

static void test_reads_are_bounded_queued_and_answered(void **state)
{
    struct kvt_io *io = new_io();
    struct kvt_l2_read reads[100];
    uint32_t done = 0;
    uint8_t *dst = aligned_alloc(KVT_PAGE_BYTES, 100 * 4 * KVT_PAGE_BYTES);

    (void)state;
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    assert_int_equal(l2_env_put(&env, 1, 1, 4), 0);
    for (uint32_t i = 0; i < 100; i++) {
        reads[i] = (struct kvt_l2_read){.where = env.index[1].where,
                                        .pages = 4,
                                        .dst = dst + (size_t)i * 4 * KVT_PAGE_BYTES,
                                        .done = count_read,
                                        .user = &done,
                                        .status = 99};
        kvt_l2_read(env.l2, &reads[i]);
    }
    assert_int_equal(done, 0);
    while (done < 100)
        (void)kvt_l2_run(env.l2);
    for (uint32_t i = 0; i < 100; i++)
        assert_int_equal(reads[i].status, 0);
    /* places that are none: an answer, never bytes */
    reads[0].where = (struct kvt_l2_where){env.index[1].where.segment, 0};
    reads[1].where = (struct kvt_l2_where){99999, 1};
    reads[2].where = (struct kvt_l2_where){env.index[1].where.segment, 254};
    reads[3].where = (struct kvt_l2_where){5, 1}; /* a segment that does not exist yet */
    for (uint32_t i = 0; i < 4; i++)
        kvt_l2_read(env.l2, &reads[i]);
    while (done < 104)
        (void)kvt_l2_run(env.l2);
    assert_int_equal(reads[0].status, KVT_E_INVAL);
    assert_int_equal(reads[1].status, KVT_E_INVAL);
    assert_int_equal(reads[2].status, KVT_E_INVAL);
    assert_int_equal(reads[3].status, KVT_E_STALE);
    l2_env_close(&env);
    free(dst);
    io->ops->destroy(io);
}

/* The oldest segment is pinned: the next oldest goes, and the pinned one stays readable. */
static void test_pinned_segments_are_skipped(void **state)
{
    struct kvt_io *io = new_io();

    (void)state;
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    assert_int_equal(l2_env_put(&env, 0, 1, 10), 0);
    env.pinned_segments[env.index[0].where.segment] = true;
    for (uint32_t i = 1; i < 500; i++)
        assert_int_equal(l2_env_put(&env, i, 1, 10), 0);
    assert_true(env.evictions > 5);
    assert_int_equal(l2_env_get(&env, 0), 0);
    l2_env_close(&env);
    io->ops->destroy(io);
}

/* Everything pinned: writes wait; they go on when a pin goes. */
static void test_all_pinned_waits(void **state)
{
    struct kvt_io *io = new_io();
    uint32_t i = 0, id = 4000;

    (void)state;
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    memset(env.pinned_segments, 1, sizeof env.pinned_segments);
    for (i = 0; i < 400; i++) {
        uint32_t turns = 0;

        if (l2_env_queue(&env, &i, 1, 1, 10))
            break;
        while (env.in_flight && turns++ < 300)
            l2_env_turn(&env);
        if (env.in_flight)
            break;
    }
    assert_int_equal(env.evictions, 0);
    assert_true(i > 100 && i < 400);
    assert_int_equal(env.in_flight, 1);
    assert_int_equal(l2_env_queue(&env, &id, 1, 1, 1), -EAGAIN);
    memset(env.pinned_segments, 0, sizeof env.pinned_segments);
    l2_env_drain(&env);
    assert_int_equal(env.failed, 0);
    assert_true(env.evictions >= 1);
    l2_env_close(&env);
    io->ops->destroy(io);
}

static void test_flush(void **state)
{
    struct kvt_io *io = new_io();
    uint32_t ids[64];

    (void)state;
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    assert_int_equal(l2_env_flush(&env), 0); /* of nothing */
    for (uint32_t i = 0; i < 64; i++)
        ids[i] = i;
    assert_int_equal(l2_env_queue(&env, ids, 64, 1, 9), 0); /* spans segments */
    assert_int_equal(l2_env_flush(&env), 0);
    assert_int_equal(env.in_flight, 0); /* flush waits for what was accepted before */
    assert_int_equal(l2_env_verify(&env), 64);
    l2_env_close(&env);
    io->ops->destroy(io);
}

static void test_close_finishes_what_was_accepted(void **state)
{
    struct kvt_io *io = new_io();
    uint32_t ids[300];

    (void)state;
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    for (uint32_t i = 0; i < 300; i++)
        ids[i] = i;
    assert_int_equal(l2_env_queue(&env, ids, 300, 1, 2), 0);
    l2_env_close(&env); /* asserts that nothing is in flight after */
    assert_int_equal(env.failed, 0);
    assert_int_equal(l2_env_open(&env, io), 0);
    assert_int_equal(l2_env_verify(&env), 300);
    l2_env_close(&env);
    io->ops->destroy(io);
}

static int make_base(void **state)
{
    (void)state;
    l2_dir_make(base);
    return 0;
}

static int remove_base(void **state)
{
    (void)state;
    l2_dir_remove(base);
    return 0;
}

#define TEST(function) cmocka_unit_test_setup(function, setup)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_append_and_read_back),
        TEST(test_reopen_finds_everything_and_goes_on),
        TEST(test_recycles_oldest_first_within_the_cap),
        TEST(test_higher_sequence_wins_after_reopen),
        TEST(test_size_limits),
        TEST(test_long_lists_become_several_batches),
        TEST(test_reads_are_bounded_queued_and_answered),
        TEST(test_pinned_segments_are_skipped),
        TEST(test_all_pinned_waits),
        TEST(test_flush),
        TEST(test_close_finishes_what_was_accepted),
    };
    char why[160];
    int failed;

    (void)test_seed();
    failed = cmocka_run_group_tests_name("l2 over memory", tests, NULL, NULL);
    medium = KVT_IO_POSIX;
    failed += cmocka_run_group_tests_name("l2 over files", tests, make_base, remove_base);
    medium = KVT_IO_URING;
    if (kvt_io_uring_probe(why, sizeof why))
        print_message("not run over uring: %s\n", why);
    else
        failed += cmocka_run_group_tests_name("l2 over uring", tests, make_base, remove_base);
    return failed;
}
