/* Merging of reads in the L2 log.
 *
 * Goal:   a prefix that was stored together is read in a few large requests; each record has its
 * own outcome: one that is damaged, cut off or on a bad sector costs itself and nothing else.
 * Method: a log over a counting backend over mem, posix and uring; over the fault backend for bad
 *         sectors; random subsets in random order against what was put. The seed is printed.
 */
#include <errno.h>
#include <string.h>

#include "support/store_help.h"

#include "base/checked.h"
#include "io_count.h"
#include "kvtier/error.h"
#include "store/l2_internal.h"
#include "support/fault_io.h"
#include "support/l2_help.h"

#define CAP (64u << 20) /* segments of 1 MiB */
#define SEED 20261129u
#define MANY 64u

static struct l2_env env; /* large: not on the stack */
static char base[256];

struct batch {
    struct kvt_l2_read reads[MANY];
    uint32_t ids[MANY];
    uint32_t count, done;
    uint32_t done_order[MANY];
};

static void read_ended(struct kvt_l2_read *read)
{
    struct batch *batch = read->user;

    batch->done_order[batch->done++] = (uint32_t)(read - batch->reads);
}

/* Queue the reads of ids as one go and wait for them. */
static void read_all(struct batch *batch, const uint32_t *ids, uint32_t count)
{
    memset(batch, 0, sizeof *batch);
    batch->count = count;
    for (uint32_t i = 0; i < count; i++) {
        const struct l2_entry *at = &env.index[ids[i]];

        batch->ids[i] = ids[i];
        batch->reads[i] = (struct kvt_l2_read){
            .where = at->where, .pages = at->pages, .done = read_ended, .user = batch};
        batch->reads[i].dst = aligned_alloc(KVT_PAGE_BYTES, (size_t)at->pages * KVT_PAGE_BYTES);
        assert_non_null(batch->reads[i].dst);
        memset(batch->reads[i].dst, 0xa5, (size_t)at->pages * KVT_PAGE_BYTES);
    }
    for (uint32_t i = 0; i < count; i++)
        kvt_l2_read(env.l2, &batch->reads[i]);
    assert_int_equal(batch->done, 0); /* nothing is reported from within the call */
    for (uint32_t turns = 0; batch->done < count; turns++) {
        l2_env_turn(&env);
        assert_true(turns < 1000000);
    }
}

/* Status of a read: that of the log, or of the record's verification. Frees it. */
static int outcome(struct batch *batch, uint32_t i)
{
    const struct l2_entry *at = &env.index[batch->ids[i]];
    uint32_t bytes = at->pages * KVT_PAGE_BYTES;
    int rc = batch->reads[i].status;
    struct kvt_full_key key;

    l2_key(batch->ids[i], &key);
    if (!rc)
        rc = kvt_record_verify(batch->reads[i].dst, bytes, &key, at->checksum);
    if (!rc) {
        void *want = l2_record(batch->ids[i], at->version, at->pages, at->sequence, NULL);

        assert_memory_equal(want, batch->reads[i].dst, bytes);
        free(want);
    }
    free(batch->reads[i].dst);
    return rc;
}

static void all_good(struct batch *batch)
{
    for (uint32_t i = 0; i < batch->count; i++)
        assert_int_equal(outcome(batch, i), 0);
}

static void open_over(struct kvt_io *io, uint32_t cap)
{
    l2_env_init(&env, cap);
    env.params.reads_max = MANY;
    env.params.batch_bytes_max = 16u << 20;
    assert_int_equal(l2_env_open(&env, io), 0);
}

static void put_together(uint32_t first, uint32_t count, uint32_t pages)
{
    uint32_t ids[MANY];

    for (uint32_t i = 0; i < count; i++)
        ids[i] = first + i;
    assert_int_equal(l2_env_queue(&env, ids, count, 1, pages), 0);
    l2_env_drain(&env);
    assert_int_equal(env.failed, 0);
}

static struct kvt_io *new_mem(void)
{
    struct kvt_io *io = NULL;

    assert_int_equal(kvt_io_mem_new(1u << 30, &io), 0);
    return io;
}

/* ---- */

/* 64 records of 8 pages, stored together: 2 MiB, in segments of 1 MiB. */
static void prefix_over(struct kvt_io *inner)
{
    struct kvt_io *io = kvt_io_count_new(inner);
    const struct kvt_io_counts *reads;
    static struct batch batch;
    uint32_t ids[MANY];

    assert_non_null(io);
    open_over(io, CAP);
    put_together(0, MANY, 8);
    for (uint32_t i = 0; i < MANY; i++)
        ids[i] = i;
    kvt_io_count_reset(io);
    reads = kvt_io_count_of(io, KVT_IO_READ);
    read_all(&batch, ids, MANY);
    print_message("             %u records in %u requests of %u KiB on average\n", MANY,
                  (unsigned)reads->total, (unsigned)(reads->bytes / reads->total / 1024));
    assert_true(reads->total <= 4); /* a segment's end and a batch's header may lie between */
    assert_int_equal(reads->bytes, MANY * 8 * KVT_PAGE_BYTES); /* not a byte more than was asked */
    all_good(&batch);
    /* backwards they cannot be appended to one another, but they are exact */
    for (uint32_t i = 0; i < MANY; i++)
        ids[i] = MANY - 1 - i;
    read_all(&batch, ids, MANY);
    all_good(&batch);
    l2_env_close(&env);
    io->ops->destroy(io);
}

static void test_a_prefix_in_a_few_reads(void **state)
{
    static const int backends[] = {KVT_IO_POSIX, KVT_IO_URING};
    char dir[300], why[160];

    (void)state;
    prefix_over(new_mem());
    for (size_t i = 0; i < KVT_ARRAY_LEN(backends); i++) {
        struct kvt_io_posix_params params = {
            .path = dir, .threads = 3, .direct = -1, .backend = backends[i]};
        struct kvt_io *io = NULL;

        if (backends[i] == KVT_IO_URING && kvt_io_uring_probe(why, sizeof why)) {
            print_message("             without uring: %s\n", why);
            continue;
        }
        snprintf(dir, sizeof dir, "%s/%zu", base, i);
        assert_int_equal(kvt_io_files_new(&params, &io), 0);
        prefix_over(io);
    }
}

/* One request is at most 4 MiB. */
static void test_requests_are_bounded(void **state)
{
    struct kvt_io *io = kvt_io_count_new(new_mem());
    const struct kvt_io_counts *reads;
    static struct batch batch;
    uint32_t ids[MANY];

    (void)state;
    assert_non_null(io);
    open_over(io, 1u << 30); /* segments of 16 MiB */
    put_together(0, 32, 100);
    for (uint32_t i = 0; i < 32; i++)
        ids[i] = i;
    kvt_io_count_reset(io);
    reads = kvt_io_count_of(io, KVT_IO_READ);
    read_all(&batch, ids, 32);
    assert_int_equal(reads->total, 4); /* ten of 100 pages fit 4 MiB */
    for (unsigned size = 0; size < KVT_IO_COUNT_SIZES; size++)
        if (kvt_io_count_size(size) > KVT_L2_READ_BYTES_MAX)
            assert_int_equal(reads->requests[size], 0);
    all_good(&batch);
    l2_env_close(&env);
    io->ops->destroy(io);
}

/* What does not lie side by side is not merged: gaps, other segments, the same record twice. */
static void test_gaps_are_not_read(void **state)
{
    struct kvt_io *io = kvt_io_count_new(new_mem());
    const struct kvt_io_counts *reads;
    static struct batch batch;
    uint32_t ids[MANY];

    (void)state;
    assert_non_null(io);
    open_over(io, CAP);
    put_together(0, 20, 2);
    for (uint32_t i = 0; i < 10; i++)
        ids[i] = 2 * i;
    kvt_io_count_reset(io);
    reads = kvt_io_count_of(io, KVT_IO_READ);
    read_all(&batch, ids, 10);
    assert_int_equal(reads->total, 10);
    all_good(&batch);
    for (uint32_t i = 0; i < 10; i++)
        ids[i] = 7;
    kvt_io_count_reset(io);
    read_all(&batch, ids, 10);
    assert_int_equal(reads->total, 10);
    all_good(&batch);
    l2_env_close(&env);
    io->ops->destroy(io);
}

/* Records of two chains, their reads queued in turns: each chain is merged all the same. */
static void test_two_chains_in_turns(void **state)
{
    struct kvt_io *io = kvt_io_count_new(new_mem());
    static struct batch batch;
    uint32_t ids[MANY];

    (void)state;
    assert_non_null(io);
    open_over(io, CAP);
    put_together(0, 32, 3);
    put_together(32, 32, 3);
    for (uint32_t i = 0; i < MANY; i++)
        ids[i] = i % 2 * 32 + i / 2;
    kvt_io_count_reset(io);
    read_all(&batch, ids, MANY);
    assert_true(kvt_io_count_of(io, KVT_IO_READ)->total <= 3);
    all_good(&batch);
    l2_env_close(&env);
    io->ops->destroy(io);
}

/* ---- what goes wrong with one record stays with it ---- */

static void test_a_corrupt_one_in_the_middle(void **state)
{
    struct kvt_io *io = fault_io_new(new_mem(), SEED);
    static struct batch batch;
    uint32_t ids[MANY];
    char name[KVT_IO_NAME_MAX];

    (void)state;
    open_over(io, CAP);
    put_together(0, MANY, 2);
    snprintf(name, sizeof name, "seg-%08x", (unsigned)env.index[31].where.segment);
    assert_int_equal(
        fault_io_corrupt(io, name, env.index[31].where.page * (uint64_t)KVT_PAGE_BYTES + 5000, 3),
        0);
    for (uint32_t i = 0; i < MANY; i++)
        ids[i] = i;
    read_all(&batch, ids, MANY);
    for (uint32_t i = 0; i < MANY; i++)
        assert_int_equal(outcome(&batch, i), i == 31 ? KVT_E_CORRUPT : 0);
    l2_env_close(&env);
    io->ops->destroy(io);
}

/* The merged request fails; read alone, only those on the bad sector do. */
static void test_a_failed_request_is_split(void **state)
{
    static const int actions[] = {FAULT_FAIL, FAULT_SHORT};
    static struct batch batch;

    (void)state;
    for (size_t a = 0; a < KVT_ARRAY_LEN(actions); a++) {
        for (uint64_t times = 1; times <= 3; times++) {
            struct kvt_io *io = fault_io_new(new_mem(), SEED);
            struct fault_rule rule = {
                .ops = FAULT_READ, .times = times, .action = actions[a], .error = EIO, .arg = 1};
            uint32_t ids[MANY], failed = 0;

            open_over(io, CAP);
            put_together(0, 40, 3);
            for (uint32_t i = 0; i < 40; i++)
                ids[i] = i;
            assert_int_equal(fault_io_rule(io, &rule), 0);
            read_all(&batch, ids, 40);
            for (uint32_t i = 0; i < 40; i++) {
                int rc = outcome(&batch, i);

                failed += rc != 0;
                assert_true(rc == 0 || rc == (a ? KVT_E_CORRUPT : -EIO));
            }
            assert_int_equal(failed, times - 1); /* the first failure was the merged request */
            l2_env_close(&env);
            io->ops->destroy(io);
        }
    }
}

/* A drive that is gone: every read fails once, nothing hangs, and closing works. */
static void test_all_fail(void **state)
{
    struct kvt_io *io = fault_io_new(new_mem(), SEED);
    struct fault_rule rule = {.ops = FAULT_READ, .action = FAULT_FAIL, .error = EIO};
    static struct batch batch;
    uint32_t ids[MANY];

    (void)state;
    open_over(io, CAP);
    put_together(0, MANY, 1);
    for (uint32_t i = 0; i < MANY; i++)
        ids[i] = i;
    assert_int_equal(fault_io_rule(io, &rule), 0);
    read_all(&batch, ids, MANY);
    for (uint32_t i = 0; i < MANY; i++)
        assert_int_equal(outcome(&batch, i), -EIO);
    assert_int_equal(fault_io_rule_state(io, 0)->fired, MANY + 1);
    fault_io_clear(io);
    read_all(&batch, ids, MANY);
    all_good(&batch);
    l2_env_close(&env);
    io->ops->destroy(io);
}

/* Random lengths, subsets and orders, some reads failing once; the log's counts come out even. */
static void test_random_reads(void **state)
{
    struct kvt_io *io = fault_io_new(new_mem(), SEED);
    struct kvt_rng rng = {SEED};
    struct kvt_l2_stats stats;
    static struct batch batch;
    uint32_t stored = 0;

    (void)state;
    print_message("seed %u\n", SEED);
    open_over(io, CAP);
    for (uint32_t round = 0; round < 12; round++) {
        uint32_t count = 1 + (uint32_t)(kvt_rng_next(&rng) % 20);

        put_together(stored, count, 1 + (uint32_t)(kvt_rng_next(&rng) % 30));
        stored += count;
    }
    for (uint32_t round = 0; round < 300; round++) {
        uint32_t ids[MANY], count = 1 + (uint32_t)(kvt_rng_next(&rng) % MANY);
        uint32_t from = (uint32_t)(kvt_rng_next(&rng) % stored);
        bool fail = kvt_rng_next(&rng) % 3 == 0;
        struct fault_rule rule = {
            .ops = FAULT_READ, .times = 1, .action = FAULT_FAIL, .error = EIO};
        uint32_t bad = 0;

        for (uint32_t i = 0; i < count; i++) /* runs with jumps */
            ids[i] = (kvt_rng_next(&rng) % 4 ? from + i : (uint32_t)kvt_rng_next(&rng)) % stored;
        fault_io_clear(io);
        rule.skip = kvt_rng_next(&rng) % 4;
        if (fail)
            assert_int_equal(fault_io_rule(io, &rule), 0);
        read_all(&batch, ids, count);
        for (uint32_t i = 0; i < count; i++)
            bad += outcome(&batch, i) != 0;
        assert_true(bad <= fail);
        kvt_l2_stats(env.l2, &stats);
        assert_int_equal(stats.reads_in_flight, 0);
        for (uint32_t i = 0; i < env.l2->limit; i++)
            assert_int_equal(env.l2->segments[i].busy, 0);
    }
    l2_env_close(&env);
    io->ops->destroy(io);
}

/* The process is out of descriptors: one that rests is given up, and nothing is lost. */
static void test_out_of_descriptors(void **state)
{
    static const int errors[] = {EMFILE, ENFILE};
    struct kvt_io *io = fault_io_new(new_mem(), SEED);
    static struct batch batch;
    uint32_t ids[MANY];

    (void)state;
    open_over(io, CAP);
    for (uint32_t i = 0; i < 80; i++) /* four fill a segment */
        put_together(i, 1, 60);
    for (size_t e = 0; e < KVT_ARRAY_LEN(errors); e++) {
        for (uint32_t i = 0; i < 80; i++) {
            struct fault_rule rule = {
                .ops = FAULT_OPEN, .times = 1, .action = FAULT_FAIL, .error = errors[e]};

            fault_io_clear(io);
            assert_int_equal(fault_io_rule(io, &rule), 0);
            ids[0] = i * 7 % 80;
            read_all(&batch, ids, 1);
            all_good(&batch);
        }
    }
    fault_io_clear(io);
    struct fault_rule rule = {.ops = FAULT_OPEN, .action = FAULT_FAIL, .error = EMFILE};
    uint32_t failed = 0;
    assert_int_equal(fault_io_rule(io, &rule), 0); /* for good: an error, not a hang */
    for (ids[0] = 0; ids[0] < 80; ids[0]++) {
        read_all(&batch, ids, 1);
        failed += outcome(&batch, 0) == -EMFILE;
    }
    assert_true(failed > 5);
    l2_env_close(&env);
    io->ops->destroy(io);
}

/* As many segments open as params.files_max says, never fewer than 16. */
static void test_descriptors_are_capped(void **state)
{
    static const uint32_t wanted[] = {0, 16, 40, 5000};
    static const uint32_t caps[] = {16, 16, 40, KVT_L2_FILES_MAX};

    (void)state;
    for (size_t w = 0; w < KVT_ARRAY_LEN(wanted); w++) {
        struct kvt_io *io = new_mem();
        static struct batch batch;
        uint32_t ids[MANY], open = 0;

        l2_env_init(&env, CAP);
        env.params.reads_max = MANY;
        env.params.files_max = wanted[w];
        assert_int_equal(l2_env_open(&env, io), 0);
        for (uint32_t i = 0; i < 240; i++)
            put_together(i, 1, 60);
        for (uint32_t turn = 0; turn < 240; turn++) {
            ids[0] = turn * 37 % 240;
            read_all(&batch, ids, 1);
            all_good(&batch);
            open = 0;
            for (uint32_t i = 0; i < env.l2->params.files_max; i++)
                open += env.l2->files[i].file >= 0;
            assert_true(open <= caps[w]);
        }
        assert_true(open > KVT_MIN(caps[w], 60u) / 2);
        l2_env_close(&env);
        io->ops->destroy(io);
    }
}

/* Reads that were accepted finish when the log closes, each once. */
static void test_close_finishes_merged_reads(void **state)
{
    struct kvt_io *io = new_mem();
    static struct batch batch;

    (void)state;
    open_over(io, CAP);
    put_together(0, MANY, 2);
    memset(&batch, 0, sizeof batch);
    batch.count = MANY;
    for (uint32_t i = 0; i < MANY; i++) {
        batch.ids[i] = i;
        batch.reads[i] = (struct kvt_l2_read){.where = env.index[i].where,
                                              .pages = 2,
                                              .done = read_ended,
                                              .user = &batch,
                                              .dst = aligned_alloc(KVT_PAGE_BYTES, 8192)};
        kvt_l2_read(env.l2, &batch.reads[i]);
    }
    l2_env_close(&env);
    assert_int_equal(batch.done, MANY);
    all_good(&batch);
    io->ops->destroy(io);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_prefix_in_a_few_reads),
        cmocka_unit_test(test_requests_are_bounded),
        cmocka_unit_test(test_gaps_are_not_read),
        cmocka_unit_test(test_two_chains_in_turns),
        cmocka_unit_test(test_a_corrupt_one_in_the_middle),
        cmocka_unit_test(test_a_failed_request_is_split),
        cmocka_unit_test(test_all_fail),
        cmocka_unit_test(test_random_reads),
        cmocka_unit_test(test_out_of_descriptors),
        cmocka_unit_test(test_descriptors_are_capped),
        cmocka_unit_test(test_close_finishes_merged_reads),
    };
    int failed;

    l2_dir_make(base);
    failed = cmocka_run_group_tests_name("l2_read", tests, NULL, NULL);
    l2_dir_remove(base);
    return failed;
}
