/* L2 log over a bad drive: failed, short, lost and misdirected operations, full file systems, slow
 * completions.
 *
 * Goal: every write and read is answered once, with its own outcome; the neighbours of a failure
 * are unharmed; space and drives that come back are used again; nothing is evicted in vain. Method:
 * the fault injector (support/fault_io.h) over memory; the test's clock. */
#include <errno.h>
#include <string.h>

#include "support/store_help.h"

#include "base/checked.h"
#include "kvtier/error.h"
#include "support/fault_io.h"
#include "support/l2_help.h"

#define CAP (8u << 20)
#define MIB (1ull << 20)

static struct l2_env env;
static int medium = -1; /* memory, or enum kvt_io_backend */
static char base[256];

static struct kvt_io *faulty(uint64_t capacity)
{
    struct kvt_io *io = NULL, *wrapped;
    static unsigned roots;
    char dir[300];
    struct kvt_io_posix_params params = {
        .path = dir, .threads = 3, .direct = -1, .backend = medium};

    snprintf(dir, sizeof dir, "%s/%u", base, roots++);
    if (medium < 0)
        assert_int_equal(kvt_io_mem_new(capacity, &io), 0);
    else
        assert_int_equal(kvt_io_files_new(&params, &io), 0);
    wrapped = fault_io_new(io, 1);
    assert_non_null(wrapped);
    return wrapped;
}

static void open_env(struct kvt_io *io, uint64_t cap)
{
    l2_env_init(&env, cap);
    assert_int_equal(l2_env_open(&env, io), 0);
}

static void done(struct kvt_io *io)
{
    fault_io_clear(io);
    l2_env_close(&env);
    io->ops->destroy(io);
}

/* C5: the 7th of 20 writes fails. */
static void test_c5_one_failed_write(void **state)
{
    for (int torn = 0; torn < 2; torn++) {
        struct kvt_io *io = faulty(1u << 30);
        /* the segment's header is the first write, so record 7 is the write after 7 others */
        const struct fault_rule rule = {.ops = FAULT_WRITE,
                                        .name = "seg-",
                                        .skip = 7,
                                        .times = 1,
                                        .action = torn ? FAULT_TORN : FAULT_FAIL,
                                        .error = EIO,
                                        .arg = 20};

        (void)state;
        open_env(io, CAP);
        fault_io_rule(io, &rule);
        for (uint32_t i = 0; i < 20; i++)
            assert_int_equal(l2_env_put(&env, i, 1, 4), i == 6 ? -EIO : 0);
        for (int life = 0; life < 2; life++) {
            assert_int_equal(l2_env_get(&env, 6), KVT_E_MISS);
            assert_int_equal(l2_env_verify(&env), 19);
            l2_env_close(&env);
            assert_int_equal(l2_env_open(&env, io), 0);
        }
        assert_int_equal(l2_env_put(&env, 6, 2, 4), 0);
        assert_int_equal(l2_env_get(&env, 6), 0);
        done(io);
    }
}

/* The batch behind a failed one was in flight: it is good, now and after a restart. */
static void test_a_batch_behind_a_failed_one(void **state)
{
    struct kvt_io *io = faulty(1u << 30);
    const struct fault_rule rule = {.ops = FAULT_WRITE,
                                    .name = "seg-",
                                    .skip = 1,
                                    .times = 1,
                                    .action = FAULT_FAIL,
                                    .error = EIO};
    uint32_t ids[2] = {1, 2};

    (void)state;
    open_env(io, CAP);
    assert_int_equal(l2_env_put(&env, 0, 1, 4), 0);
    fault_io_hold(io, 1);
    fault_io_rule(io, &rule);
    /* the rule counts from here: the write of 1 passes, 2 fails, 3 is behind it */
    assert_int_equal(l2_env_queue(&env, &ids[0], 1, 1, 4), 0);
    while (env.in_flight) {
        fault_io_release(io, 10, 0);
        l2_env_turn(&env);
    }
    assert_int_equal(l2_env_queue(&env, &ids[1], 1, 1, 4), 0);
    ids[0] = 3;
    assert_int_equal(l2_env_queue(&env, &ids[0], 1, 1, 4), 0);
    while (env.in_flight) {
        fault_io_release(io, 10, 1); /* the later one completes first */
        l2_env_turn(&env);
    }
    fault_io_hold(io, 0);
    assert_int_equal(env.failed, 1);
    for (int life = 0; life < 2; life++) {
        assert_int_equal(l2_env_get(&env, 2), KVT_E_MISS);
        assert_int_equal(l2_env_get(&env, 1), 0);
        assert_int_equal(l2_env_get(&env, 3), 0);
        assert_int_equal(l2_env_flush(&env), 0);
        l2_env_close(&env);
        assert_int_equal(l2_env_open(&env, io), 0);
    }
    done(io);
}

/* The same, and the footer that was to remember the batch behind the failed one cannot be written:
 * a restart will not find it, so a flush must not say that it is safe. */
static void test_no_footer_for_a_batch_behind_a_failed_one(void **state)
{
    struct kvt_io *io = faulty(1u << 30);
    const struct fault_rule second = {.ops = FAULT_WRITE,
                                      .name = "seg-",
                                      .skip = 1,
                                      .times = 1,
                                      .action = FAULT_FAIL,
                                      .error = EIO};
    const struct fault_rule footer = {
        .ops = FAULT_WRITE, .name = "seg-00000000", .times = 1, .action = FAULT_FAIL, .error = EIO};
    uint32_t ids[3] = {1, 2, 3};
    int rc, number;

    (void)state;
    open_env(io, CAP);
    assert_int_equal(l2_env_put(&env, 0, 1, 4), 0);
    fault_io_hold(io, 1);
    fault_io_rule(io, &second);
    for (uint32_t i = 0; i < 2; i++) { /* 1 passes, 2 fails ... */
        assert_int_equal(l2_env_queue(&env, &ids[i], 1, 1, 4), 0);
        if (i == 1)
            assert_int_equal(l2_env_queue(&env, &ids[2], 1, 1, 4), 0); /* ... 3 is behind it */
        while (env.in_flight && i == 0) {
            fault_io_release(io, 10, 0);
            l2_env_turn(&env);
        }
    }
    fault_io_release(io, 10, 1); /* the later one first, and no turn: no footer yet */
    number = fault_io_rule(io, &footer);
    fault_io_hold(io, 0);
    while (env.in_flight)
        l2_env_turn(&env);
    rc = l2_env_flush(&env);
    assert_int_equal(fault_io_rule_state(io, number)->fired, 1);
    assert_int_equal(rc, -EIO);
    assert_int_equal(l2_env_flush(&env), -EIO); /* as long as the segment is there */
    l2_env_close(&env);
    assert_int_equal(l2_env_open(&env, io), 0);
    assert_int_equal(l2_env_get(&env, 0), 0);
    assert_int_equal(l2_env_get(&env, 1), 0);
    assert_int_equal(l2_env_get(&env, 2), KVT_E_MISS);
    done(io);
}

/* A scripted life; returns false when the root could not even be opened. */
static bool life(struct kvt_io *io)
{
    uint32_t ids[8];

    l2_env_init(&env, CAP);
    if (l2_env_open(&env, io))
        return false;
    for (uint32_t i = 0; i < 60; i++) {
        for (uint32_t k = 0; k < 8; k++)
            ids[k] = (i * 8 + k) % 300;
        for (uint32_t tries = 0; l2_env_queue(&env, ids, 8, i + 1, 5) && tries < 20; tries++)
            l2_env_turn(&env);
        if (i % 3 == 0)
            l2_env_drain(&env);
        if (i % 16 == 5)
            (void)l2_env_purge_key(&env, i);
        if (i % 20 == 7)
            (void)l2_env_flush(&env);
    }
    l2_env_drain(&env);
    return true;
}

/* Every operation in turn fails once; then everything after it. Nothing hangs, nothing is answered
 * twice, no read gives other bytes, and the next open works. */
static void test_each_operation_fails(void **state)
{
    struct kvt_io *io = faulty(1u << 30);
    uint64_t operations;
    uint32_t clean;

    (void)state;
    assert_true(life(io));
    operations = fault_io_count(io, FAULT_ALL);
    clean = l2_env_count(&env);
    done(io);
    assert_true(operations > 100);
    for (uint64_t n = 0; n < operations; n += 1 + n / 40) {
        for (int sticky = 0; sticky < 2; sticky++) {
            const struct fault_rule rule = {.ops = FAULT_ALL,
                                            .skip = n,
                                            .times = sticky ? 0 : 1,
                                            .action = FAULT_FAIL,
                                            .error = n % 2 ? EIO : ENOSPC};
            bool opened;

            io = faulty(1u << 30);
            io->ops->close(io, io->ops->open(io, "lock", KVT_IO_OPEN_CREATE)); /* as in life */
            fault_io_rule(io, &rule);
            opened = life(io);
            fault_io_clear(io);
            if (opened) {
                if (!sticky && n % 2) { /* no lack of space: nothing is recycled for it */
                    assert_true(env.failed <= 16);
                    assert_true(l2_env_count(&env) > clean - 60);
                }
                (void)l2_env_verify(&env);
                l2_env_close(&env);
            }
            assert_int_equal(l2_env_open(&env, io), 0);
            assert_int_equal(l2_env_verify(&env) > 0, l2_env_count(&env) > 0);
            assert_int_equal(l2_env_put(&env, 9, 99, 5), 0);
            assert_int_equal(l2_env_get(&env, 9), 0);
            done(io);
        }
    }
}

/* A drive that fails every write evicts a segment or two, not the whole cache; it recovers. */
static void test_dead_drive_does_not_evict_everything(void **state)
{
    struct kvt_io *io = faulty(1u << 30);
    const struct fault_rule rule = {
        .ops = FAULT_WRITE, .name = "seg-", .times = 0, .action = FAULT_FAIL, .error = EIO};
    uint32_t refused = 0, id = 5;
    int64_t began;

    (void)state;
    open_env(io, CAP);
    for (uint32_t i = 0; i < 300; i++)
        assert_int_equal(l2_env_put(&env, i, 1, 10), 0);
    env.evictions = 0;
    fault_io_rule(io, &rule);
    began = env.now;
    for (uint32_t i = 0; i < 1000 && env.now - began < 500000000; i++)
        if (!l2_env_queue(&env, &id, 1, 2, 10)) {
            l2_env_drain(&env);
            refused += env.last_status == -EIO;
        } else {
            l2_env_turn(&env);
        }
    assert_true(refused > 100); /* answered at once, not kept waiting */
    assert_true(env.evictions <= 3);
    assert_true(l2_env_verify(&env) > 50); /* reads go on */
    fault_io_clear(io);
    env.now += 20000000000; /* the pause is over */
    assert_int_equal(l2_env_put(&env, 5, 3, 10), 0);
    assert_int_equal(l2_env_get(&env, 5), 0);
    done(io);
}

/* C27, the log's part: a file system smaller than the cap. */
static void fill_small_file_system(bool reserve)
{
    struct kvt_io *io = faulty(5 * MIB), *inner = fault_io_inner(io);
    const struct fault_rule no_reserve = {
        .ops = FAULT_ALLOCATE, .action = FAULT_FAIL, .error = EOPNOTSUPP};
    struct kvt_l2_stats stats;
    uint32_t ok = 0;
    int file;
    uint8_t *bytes = aligned_alloc(4096, MIB);

    if (!reserve)
        fault_io_rule(io, &no_reserve);
    memset(bytes, 1, MIB);
    file = inner->ops->open(inner, "somebody-elses-file", KVT_IO_OPEN_CREATE);
    assert_int_equal(kvt_io_write_now(inner, file, 0, bytes, MIB), MIB);
    inner->ops->close(inner, file);
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), KVT_E_NOT_OURS); /* not beside a stranger */
    assert_int_equal(inner->ops->unlink(inner, "somebody-elses-file"), 0);
    assert_int_equal(l2_env_open(&env, io), 0);
    file = inner->ops->open(inner, "somebody-elses-file", KVT_IO_OPEN_CREATE);
    assert_int_equal(kvt_io_write_now(inner, file, 0, bytes, MIB), MIB);
    for (uint32_t i = 0; i < 1000; i++) /* 40 MiB into less than 4 */
        ok += !l2_env_put(&env, i, 1, 10);
    assert_true(ok > 900);
    assert_true(env.evictions > 5);
    kvt_l2_stats(env.l2, &stats);
    assert_true(stats.enospc > 0);
    if (reserve) { /* else files are as long as they should be, and writes find no room */
        assert_true(stats.short_bytes >= 4 * MIB && stats.short_bytes % MIB == 0);
        assert_true(stats.bytes_used + stats.short_bytes <= CAP);
    }
    assert_true(l2_env_verify(&env) > 20);
    /* space comes back: the root grows to its cap without a restart */
    inner->ops->close(inner, file);
    assert_int_equal(inner->ops->unlink(inner, "somebody-elses-file"), 0);
    env.now += 60000000000;
    ok = 0;
    for (uint32_t i = 1000; i < 1200; i++)
        ok += !l2_env_put(&env, i, 1, 10);
    assert_true(reserve ? ok == 200 : ok > 190); /* 5 MiB are still less than the cap of 8 */
    assert_true(l2_env_verify(&env) > 50);
    free(bytes);
    done(io);
}

static void test_c27_small_file_system(void **state)
{
    (void)state;
    fill_small_file_system(true);
}

static void test_c27_small_file_system_without_reservation(void **state)
{
    (void)state;
    fill_small_file_system(false);
}

/* C44, the log's part. */
static void test_c44_no_reservation(void **state)
{
    struct kvt_io *io = faulty(1u << 30);
    const struct fault_rule rule = {
        .ops = FAULT_ALLOCATE, .action = FAULT_FAIL, .error = EOPNOTSUPP};

    (void)state;
    fault_io_rule(io, &rule);
    open_env(io, CAP);
    for (uint32_t i = 0; i < 400; i++)
        assert_int_equal(l2_env_put(&env, i, 1, 10), 0);
    assert_true(env.evictions > 0);
    assert_int_equal(l2_env_count(&env), l2_env_verify(&env));
    done(io);
}

/* C25, the log's part: model A fills the cap, model B takes over; the cap holds at every step. */
static void test_c25_one_model_yields_to_another(void **state)
{
    struct kvt_io *io = faulty(1u << 30);
    uint32_t a = 0, b = 0;

    (void)state;
    open_env(io, 45 * MIB);
    for (uint32_t i = 0; i < 1200; i++) { /* 46 MiB of namespace 1 */
        assert_int_equal(l2_env_put(&env, i * 4 % 2000 / 4 * 4, i, 10), 0);
        assert_true(l2_files_bytes(io) <= 45 * MIB);
    }
    for (uint32_t i = 0; i < 1200; i++) {
        assert_int_equal(l2_env_put(&env, 2001 + i % 500 * 4, i, 10), 0);
        assert_true(l2_files_bytes(io) <= 45 * MIB);
    }
    for (uint32_t i = 0; i < L2_IDS; i++) {
        a += env.index[i].present && i < 2000;
        b += env.index[i].present && i >= 2000;
    }
    assert_true(b == 500);
    assert_true(a < 100);
    done(io);
}

/* Reads: errors and short ends are statuses; what follows works. */
static void test_read_errors(void **state)
{
    static const struct {
        struct fault_rule rule;
        int status;
    } cases[] = {
        {{.ops = FAULT_READ, .times = 1, .action = FAULT_FAIL, .error = EIO}, -EIO},
        {{.ops = FAULT_READ, .times = 1, .action = FAULT_SHORT, .arg = 2}, KVT_E_CORRUPT},
        {{.ops = FAULT_READ, .times = 1, .action = FAULT_FLIP, .arg = FAULT_RANDOM}, KVT_E_CORRUPT},
    };
    struct kvt_io *io = faulty(1u << 30);

    (void)state;
    open_env(io, CAP);
    assert_int_equal(l2_env_put(&env, 1, 1, 6), 0);
    for (uint32_t i = 0; i < KVT_ARRAY_LEN(cases); i++) {
        fault_io_rule(io, &cases[i].rule);
        assert_int_equal(l2_env_get(&env, 1), cases[i].status);
        fault_io_clear(io);
        for (uint32_t k = 0; k < 50; k++)
            assert_int_equal(l2_env_get(&env, 1), 0);
    }
    done(io);
}

/* Writes that the drive loses or puts elsewhere, silently: never other bytes. */
static void test_lost_and_misdirected_writes(void **state)
{
    static const int actions[] = {FAULT_LOST, FAULT_MISDIRECT, FAULT_TORN};

    (void)state;
    for (uint32_t a = 0; a < KVT_ARRAY_LEN(actions); a++)
        for (uint64_t skip = 0; skip < 40; skip += 3) {
            struct kvt_io *io = faulty(1u << 30);
            const struct fault_rule rule = {
                .ops = FAULT_WRITE, .skip = skip, .times = 2, .action = actions[a], .arg = 3};
            uint32_t exact;

            fault_io_rule(io, &rule);
            l2_env_init(&env, CAP);
            if (l2_env_open(&env, io)) {
                io->ops->destroy(io);
                continue;
            }
            for (uint32_t i = 0; i < 200; i++)
                (void)l2_env_put(&env, i % 150, i, 6);
            exact = l2_env_verify(&env);
            assert_true(exact >= 140);
            fault_io_clear(io);
            l2_env_close(&env);
            assert_int_equal(l2_env_open(&env, io), 0);
            (void)l2_env_verify(&env);
            done(io);
        }
}

static void mark(struct kvt_l2_read *read)
{
    *(int *)read->user = read->status ? -1 : 1;
}

/* Rule 2: a segment that is being read is not recycled, however long the read takes. */
static void test_a_slow_read_keeps_its_segment(void **state)
{
    struct kvt_io *io = faulty(1u << 30);
    struct kvt_l2_read read;
    struct kvt_full_key key;
    struct l2_entry at;
    int answer = 0;

    (void)state;
    open_env(io, CAP);
    for (uint32_t i = 0; i < 30; i++)
        assert_int_equal(l2_env_put(&env, i, 1, 10), 0);
    at = env.index[0];
    read = (struct kvt_l2_read){.where = at.where,
                                .pages = at.pages,
                                .dst = aligned_alloc(4096, 10 * 4096),
                                .done = mark,
                                .user = &answer};
    fault_io_hold(io, 1);
    kvt_l2_read(env.l2, &read);
    for (uint32_t i = 100; i < 400; i++) { /* everything else goes round */
        assert_int_equal(l2_env_queue(&env, &i, 1, 1, 10), 0);
        while (env.in_flight) {
            fault_io_release(io, 1, 1); /* newest first: the read stays back as long as it can */
            l2_env_turn(&env);
            if (answer)
                break;
        }
        if (answer)
            break;
        assert_true(env.index[0].present);
    }
    fault_io_hold(io, 0);
    while (!answer)
        l2_env_turn(&env);
    l2_env_drain(&env);
    assert_int_equal(answer, 1);
    l2_key(0, &key);
    assert_int_equal(kvt_record_verify(read.dst, 10 * 4096, &key, at.checksum), 0);
    free(read.dst);
    done(io);
}

/* A sync that fails while a segment is sealed: the next flush says so, once. */
static void test_failed_sync_is_reported(void **state)
{
    struct kvt_io *io = faulty(1u << 30);
    const struct fault_rule rule = {
        .ops = FAULT_SYNC, .name = "seg-", .times = 1, .action = FAULT_FAIL, .error = EIO};

    (void)state;
    open_env(io, CAP);
    assert_int_equal(l2_env_put(&env, 1, 1, 10), 0);
    fault_io_rule(io, &rule);
    assert_int_equal(l2_env_flush(&env), -EIO);
    assert_int_equal(l2_env_flush(&env), 0);
    fault_io_clear(io);
    for (uint32_t i = 0; i < 20; i++)
        assert_int_equal(l2_env_put(&env, i, 1, 10), 0);
    /* the next sync of a segment is that of the second one's header or the first one's seal */
    fault_io_rule(io, &rule);
    for (uint32_t i = 20; i < 60; i++)
        assert_int_equal(l2_env_put(&env, i, 1, 10), 0);
    (void)l2_env_flush(&env);
    assert_int_equal(l2_env_flush(&env), 0);
    assert_int_equal(l2_env_verify(&env), 60);
    done(io);
}

/* The plug is pulled in the middle: every request in flight is answered; close returns. */
static void test_pulled_plug(void **state)
{
    struct kvt_io *io = faulty(1u << 30);
    uint32_t ids[60];

    (void)state;
    open_env(io, CAP);
    for (uint32_t i = 0; i < 60; i++)
        ids[i] = i;
    assert_int_equal(l2_env_queue(&env, ids, 60, 1, 8), 0);
    l2_env_turn(&env);
    fault_io_pull_the_plug(io);
    l2_env_drain(&env);
    assert_true(env.failed > 0);
    assert_int_not_equal(l2_env_purge_key(&env, 1), 0);
    l2_env_close(&env);
    io->ops->destroy(io);
}

/* C81: a drive whose writes fail for minutes is a line every ten seconds, with the errno and how
 * many failures there were in between. */
static void test_c81_failures_are_logged_once_an_interval(void **state)
{
    const struct fault_rule dead = {
        .ops = FAULT_WRITE, .name = "seg-", .action = FAULT_FAIL, .error = EIO};
    struct kvt_io *io = faulty(1u << 30);
    uint32_t before, lines;

    (void)state;
    open_env(io, CAP);
    assert_int_equal(l2_env_put(&env, 1, 1, 4), 0);
    before = env.warnings;
    assert_true(fault_io_rule(io, &dead) >= 0);
    for (uint32_t i = 0; i < 600; i++) { /* ten minutes */
        (void)l2_env_put(&env, 2 + i % 100, i, 4);
        env.now += 1000000000;
    }
    lines = env.warnings - before;
    print_message("           %u failed, %u lines\n", (unsigned)env.failed, (unsigned)lines);
    assert_true(env.failed >= 600);
    assert_in_range(lines, 10, 62);
    assert_non_null(strstr(env.last_message, "(-5)"));
    assert_non_null(strstr(env.last_message, "more since"));
    fault_io_clear(io);
    env.now += 60000000000;
    assert_int_equal(l2_env_put(&env, 500, 1, 4), 0);
    assert_int_equal(l2_env_get(&env, 1), 0);
    done(io);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_c5_one_failed_write),
        cmocka_unit_test(test_a_batch_behind_a_failed_one),
        cmocka_unit_test(test_no_footer_for_a_batch_behind_a_failed_one),
        cmocka_unit_test(test_each_operation_fails),
        cmocka_unit_test(test_dead_drive_does_not_evict_everything),
        cmocka_unit_test(test_c27_small_file_system),
        cmocka_unit_test(test_c27_small_file_system_without_reservation),
        cmocka_unit_test(test_c44_no_reservation),
        cmocka_unit_test(test_c25_one_model_yields_to_another),
        cmocka_unit_test(test_read_errors),
        cmocka_unit_test(test_lost_and_misdirected_writes),
        cmocka_unit_test(test_a_slow_read_keeps_its_segment),
        cmocka_unit_test(test_failed_sync_is_reported),
        cmocka_unit_test(test_pulled_plug),
        cmocka_unit_test(test_c81_failures_are_logged_once_an_interval),
    };

    const struct CMUnitTest on_files[] = {/* what needs no full medium and no copy of one */
                                          cmocka_unit_test(test_c5_one_failed_write),
                                          cmocka_unit_test(test_a_batch_behind_a_failed_one),
                                          cmocka_unit_test(test_read_errors),
                                          cmocka_unit_test(test_lost_and_misdirected_writes),
                                          cmocka_unit_test(test_a_slow_read_keeps_its_segment),
                                          cmocka_unit_test(test_failed_sync_is_reported)};
    char why[160];
    int failed;

    (void)test_seed();
    failed = cmocka_run_group_tests_name("l2 fault", tests, NULL, NULL);
    l2_dir_make(base);
    medium = KVT_IO_POSIX;
    failed += cmocka_run_group_tests_name("l2 fault over posix", on_files, NULL, NULL);
    medium = KVT_IO_URING;
    if (kvt_io_uring_probe(why, sizeof why))
        print_message("not run over uring: %s\n", why);
    else
        failed += cmocka_run_group_tests_name("l2 fault over uring", on_files, NULL, NULL);
    l2_dir_remove(base);
    return failed;
}
