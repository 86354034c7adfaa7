/* L2 log: another look at segments that could not be read when the root was opened.
 *
 * Goal: what could not be read at open comes back in the same life once it can be, with all that
 * was durable in it and nothing that was purged meanwhile; a segment that holds nothing of ours is
 * given back; nothing is believed by one read; a drive that stays bad costs a bounded number of
 * reads, and holds nothing up.
 * Method: a root of three sealed segments and one without footer is opened on a drive whose reads
 * of one of them fail; then the drive is sound again, or the looks meet faults of their own: the
 * N-th read fails, comes short, has a wrong bit, is late or never comes. fault_io over memory. */
#include <errno.h>
#include <string.h>

#include "support/store_help.h"

#include "base/checked.h"
#include "kvtier/error.h"
#include "support/fault_io.h"
#include "support/l2_help.h"

#define CAP (16u << 20)
#define OLD 130u /* ids of the image: three segments and a bit, flushed */
#define NEW 1000u
#define PAGES 6u
#define SEGMENTS 4u /* the last one has no footer; */
#define FILES 5u    /* one more was made ready, and holds nothing */
#define EACH 36u    /* records of a full segment */
#define SECOND INT64_C(1000000000)

static struct l2_env env, saved;
static struct kvt_io *image;
static char names[SEGMENTS][KVT_IO_NAME_MAX];
static uint32_t come, over, asked;
static bool refuse;

/* What the store does: nothing that is there already is replaced. */
static void found_again(void *ctx, const struct kvt_entry *entry, uint32_t segment)
{
    struct l2_env *e = ctx;
    struct l2_entry *at;
    uint32_t id;

    memcpy(&id, entry->key.hash, sizeof id);
    assert_true(id < L2_IDS);
    at = &e->index[id];
    if (at->present)
        return;
    come++;
    *at = (struct l2_entry){.present = true,
                            .where = {segment, entry->page},
                            .pages = entry->pages,
                            .sequence = entry->sequence,
                            .checksum = entry->checksum};
}

static bool room(void *ctx, uint32_t records)
{
    (void)ctx;
    (void)records;
    asked++;
    return !refuse;
}

static void again_over(void *ctx)
{
    (void)ctx;
    over++;
}

static int setup(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < SEGMENTS; i++)
        snprintf(names[i], sizeof names[i], "seg-%08x", i);
    assert_int_equal(kvt_io_mem_new(64u << 20, &image), 0);
    l2_env_init(&env, CAP);
    env.params.room = room;
    env.params.found_again = found_again;
    env.params.again_over = again_over;
    assert_int_equal(l2_env_open(&env, image), 0);
    for (uint32_t i = 0; i < OLD; i++)
        assert_int_equal(l2_env_put(&env, i, 1, PAGES), 0);
    assert_int_equal(l2_env_flush(&env), 0);
    l2_env_close(&env);
    saved = env;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    image->ops->destroy(image);
    return 0;
}

static uint32_t unread(void)
{
    struct kvt_l2_stats stats;

    kvt_l2_stats(env.l2, &stats);
    return (uint32_t)stats.segments_unread;
}

static uint64_t live(void)
{
    struct kvt_l2_stats stats;

    kvt_l2_stats(env.l2, &stats);
    return stats.segments_live;
}

/* Opened while no file whose name begins so can be read; the drive is sound from then on. */
static struct kvt_io *open_unread(const struct kvt_io *medium, const char *name)
{
    const struct fault_rule rule = {
        .ops = FAULT_READ, .name = name, .action = FAULT_FAIL, .error = EIO};
    struct kvt_io *io = fault_io_new(l2_clone(medium), 1);

    assert_non_null(io);
    assert_int_equal(fault_io_rule(io, &rule), 0);
    come = over = asked = 0;
    refuse = false;
    env = saved;
    assert_int_equal(l2_env_open(&env, io), 0);
    assert_true(unread() > 0);
    fault_io_clear(io);
    return io;
}

/* Let that much time pass. */
static void wait_ns(int64_t ns)
{
    int64_t end = env.now + ns;

    for (uint32_t turns = 0; env.now < end; turns++) {
        int64_t next = kvt_l2_run(env.l2);

        assert_true(turns < 1000000);
        env.now = next > env.now ? KVT_MIN(next, end) : env.now + 1000;
    }
    (void)kvt_l2_run(env.l2);
}

static void expect_all(uint32_t but)
{
    for (uint32_t i = 0; i < OLD; i++)
        if (l2_env_get(&env, i) != (i == but ? KVT_E_MISS : 0))
            fail_msg("block %u: %d", i, l2_env_get(&env, i));
}

/* The life ends as in a crash; a sound drive must hold all but `but`. */
static void reopen(struct kvt_io *io, uint32_t but)
{
    struct kvt_io *after = l2_clone(fault_io_inner(io));

    l2_env_close(&env);
    io->ops->destroy(io);
    assert_int_equal(l2_env_open(&env, after), 0);
    assert_int_equal(unread(), 0);
    expect_all(but);
    l2_env_close(&env);
    after->ops->destroy(after);
}

static void test_each_segment_comes_back(void **state)
{
    (void)state;
    for (uint32_t i = 0; i <= SEGMENTS; i++) {
        struct kvt_io *io = open_unread(image, i < SEGMENTS ? names[i] : "seg-");
        uint32_t before = l2_env_count(&env);

        assert_int_equal(unread(), i < SEGMENTS ? 1 : FILES);
        assert_true(before < OLD);
        assert_true(kvt_l2_may_return(env.l2));
        wait_ns(SECOND / 2);
        assert_int_equal(come, 0); /* not at once: what has just failed is not asked again */
        wait_ns(2 * SECOND);
        assert_int_equal(unread(), 0);
        assert_false(kvt_l2_may_return(env.l2));
        assert_int_equal(come, OLD - before);
        assert_int_equal(over, i < SEGMENTS ? 1 : FILES);
        assert_int_equal(live(), SEGMENTS);
        expect_all(OLD);
        reopen(io, OLD);
    }
}

/* It takes part again: it is recycled in its turn, and first, as it is the oldest. */
static void test_it_is_recycled_in_its_turn(void **state)
{
    struct kvt_io *io = open_unread(image, names[0]);
    uint32_t oldest = 0, youngest = 0;

    (void)state;
    wait_ns(2 * SECOND);
    for (uint32_t i = 0; !env.evictions; i++) {
        assert_int_equal(l2_env_put(&env, NEW + i, 1, PAGES), 0);
        assert_true(i < 2000);
    }
    assert_int_equal(env.evictions, 1);
    for (uint32_t i = 0; i < EACH; i++) {
        oldest += env.index[i].present;
        youngest += env.index[OLD - 1 - i].present;
    }
    assert_int_equal(oldest, 0);
    assert_int_equal(youngest, EACH);
    for (uint32_t i = 0; i < 1000; i++)
        assert_int_equal(l2_env_put(&env, NEW + 2000 + i % 1000, 2, PAGES), 0);
    (void)l2_env_verify(&env);
    l2_env_close(&env);
    io->ops->destroy(io);
}

static void test_what_was_purged_meanwhile_does_not_come(void **state)
{
    static _Alignas(4096) uint8_t bytes[PAGES * 4096];
    static const uint8_t zeros[sizeof bytes];

    (void)state;
    for (uint32_t i = 0; i < SEGMENTS; i++) {
        struct kvt_io *io = open_unread(image, names[i]);
        uint32_t id = i * EACH + 5;
        struct kvt_l2_where where;
        int file;

        assert_false(env.index[id].present);
        assert_int_equal(l2_env_purge_key(&env, id), 0);
        assert_int_equal(l2_env_put(&env, id + 1, 2, PAGES), 0); /* a newer one of another */
        wait_ns(3 * SECOND);
        assert_int_equal(unread(), 0);
        assert_int_equal(l2_env_get(&env, id), KVT_E_MISS);
        assert_int_equal(env.index[id + 1].version, 2); /* what was here stays */
        assert_int_equal(l2_env_get(&env, id + 1), 0);
        where = env.index[id - 1].where;
        assert_int_equal(where.segment, i);
        where.page += PAGES + 1; /* a header of one page, and the record of `id`: erased */
        file = io->ops->open(io, names[i], KVT_IO_OPEN_READ_ONLY);
        assert_true(file >= 0);
        assert_int_equal(kvt_io_read_now(io, file, where.page * 4096ull, bytes, sizeof bytes),
                         sizeof bytes);
        assert_memory_equal(bytes, zeros, sizeof zeros);
        io->ops->close(io, file);
        reopen(io, id);
    }
}

/* Purges lie in the order in which they came, behind those of former lives. */
static void test_many_purges(void **state)
{
    (void)state;
    for (uint32_t n = 2; n < 30; n++) { /* the journal is rewritten, and sorted, now and then */
        struct kvt_io *io = open_unread(image, "seg-");
        static bool gone[OLD];

        memset(gone, 0, sizeof gone);
        refuse = true; /* time passes while the journal is written */
        for (uint32_t i = 0; i < n; i++) {
            assert_int_equal(l2_env_purge_key(&env, i * 37 % OLD), 0);
            gone[i * 37 % OLD] = true;
        }
        refuse = false;
        wait_ns(2 * SECOND);
        assert_int_equal(unread(), 0);
        for (uint32_t i = 0; i < OLD; i++)
            if (l2_env_get(&env, i) != (gone[i] ? KVT_E_MISS : 0))
                fail_msg("block %u after %u purges: %d", i, n, l2_env_get(&env, i));
        l2_env_close(&env);
        io->ops->destroy(io);
    }
}

/* A block was written twice into one segment: the younger record is the one that comes back. */
static void test_the_younger_of_two_records(void **state)
{
    struct kvt_io *medium, *io;

    (void)state;
    assert_int_equal(kvt_io_mem_new(64u << 20, &medium), 0);
    env = saved;
    assert_int_equal(l2_env_open(&env, medium), 0);
    for (uint32_t version = 1; version <= 3; version++)
        for (uint32_t i = 0; i < 10; i++)
            assert_int_equal(l2_env_put(&env, i, version, PAGES), 0);
    assert_int_equal(l2_env_flush(&env), 0);
    l2_env_close(&env);
    saved = env;
    io = open_unread(medium, names[0]);
    wait_ns(2 * SECOND);
    assert_int_equal(unread(), 0);
    for (uint32_t i = 0; i < 10; i++) {
        assert_int_equal(l2_env_get(&env, i), 0);
        assert_int_equal(env.index[i].sequence, env.puts[i][0].sequence);
    }
    l2_env_close(&env);
    io->ops->destroy(io);
    medium->ops->destroy(medium);
}

/* No purge is between the store and its journal: until then nothing is reported. */
static void test_waits_until_there_is_room(void **state)
{
    struct kvt_io *io = open_unread(image, names[1]);

    (void)state;
    refuse = true;
    wait_ns(5 * SECOND);
    assert_true(asked > 10);
    assert_int_equal(come, 0);
    assert_int_equal(unread(), 1);
    refuse = false;
    wait_ns(SECOND);
    assert_int_equal(unread(), 0);
    expect_all(OLD);
    reopen(io, OLD);
}

/* A header that is damaged, not just unreadable: the segment is there to be written again. */
static void test_a_segment_that_holds_nothing_is_given_back(void **state)
{
    struct kvt_io *medium = l2_clone(image), *io;
    int file = medium->ops->open(medium, names[1], 0);
    static _Alignas(4096) uint8_t junk[4096];
    uint32_t reused = 0;

    (void)state;
    memset(junk, 0x5a, sizeof junk);
    assert_true(file >= 0);
    assert_int_equal(kvt_io_write_now(medium, file, 0, junk, sizeof junk), sizeof junk);
    medium->ops->close(medium, file);
    io = open_unread(medium, names[1]);
    wait_ns(2 * SECOND);
    assert_int_equal(unread(), 0);
    assert_int_equal(come, 0);
    assert_int_equal(live(), SEGMENTS - 1);
    for (uint32_t i = 0; i < 100; i++) /* the open one, the one made ready, then this one */
        assert_int_equal(l2_env_put(&env, NEW + i, 1, PAGES), 0);
    for (uint32_t i = 0; i < 100; i++) {
        assert_int_equal(l2_env_get(&env, NEW + i), 0);
        reused += env.index[NEW + i].where.segment == 1;
    }
    assert_true(reused > 0);
    assert_int_equal(env.evictions, 0);
    l2_env_close(&env);
    io->ops->destroy(io);
    medium->ops->destroy(medium);
}

/* Every read of a look goes bad once: the next look, or the second glance, has everything. */
static void looks_meet(struct fault_rule rule)
{
    uint64_t n = 0;
    bool fired = true;

    for (; fired; n++) {
        struct kvt_io *io = open_unread(image, "seg-");

        rule.skip = n;
        assert_int_equal(fault_io_rule(io, &rule), 0);
        wait_ns(30 * SECOND);
        fired = fault_io_rule_state(io, 0)->fired > 0;
        fault_io_clear(io);
        wait_ns(60 * SECOND);
        assert_int_equal(unread(), 0);
        expect_all(OLD);
        reopen(io, OLD);
    }
    print_message("           %llu reads\n", (unsigned long long)n);
    assert_true(n > 12);
}

static void test_reads_of_a_look_fail(void **state)
{
    const struct fault_rule rule = {
        .ops = FAULT_READ, .name = "seg-", .times = 1, .action = FAULT_FAIL, .error = EIO};

    (void)state;
    looks_meet(rule);
}

static void test_reads_of_a_look_are_short(void **state)
{
    const struct fault_rule rule = {
        .ops = FAULT_READ, .name = "seg-", .times = 1, .action = FAULT_SHORT, .arg = 1};

    (void)state;
    looks_meet(rule);
}

static void test_reads_of_a_look_have_a_wrong_bit(void **state)
{
    const struct fault_rule rule = {
        .ops = FAULT_READ, .name = "seg-", .times = 1, .action = FAULT_FLIP, .arg = FAULT_RANDOM};

    (void)state;
    looks_meet(rule);
}

/* The drive never gets better: pauses double, and what is asked of it is bounded. */
static void test_a_drive_that_stays_bad(void **state)
{
    const struct fault_rule rule = {
        .ops = FAULT_READ, .name = "seg-", .action = FAULT_FAIL, .error = EIO};
    struct kvt_io *io = open_unread(image, "seg-");
    uint64_t reads;

    (void)state;
    assert_int_equal(fault_io_rule(io, &rule), 0);
    reads = fault_io_count(io, FAULT_READ);
    wait_ns(16 * SECOND);
    assert_false(kvt_l2_may_return(env.l2)); /* nobody waits for it any more */
    wait_ns(3600 * SECOND);
    reads = fault_io_count(io, FAULT_READ) - reads;
    assert_true(reads >= 8 && reads <= 40);
    assert_int_equal(come, 0);
    assert_int_equal(unread(), FILES);
    for (uint32_t i = 0; i < 20; i++)
        assert_int_equal(l2_env_put(&env, NEW + i, 1, PAGES), 0);
    assert_int_equal(env.evictions, 0);
    fault_io_clear(io);
    wait_ns(700 * SECOND);
    assert_int_equal(unread(), 0);
    expect_all(OLD);
    reopen(io, OLD);
}

/* Closed at any moment of a look, also while its read has not come back. */
static void test_closed_in_the_midst_of_a_look(void **state)
{
    (void)state;
    for (unsigned releases = 0; releases < 40; releases++) {
        struct kvt_io *io = open_unread(image, "seg-");

        fault_io_hold(io, 1);
        env.now += 2 * SECOND;
        for (unsigned i = 0; i < releases; i++) {
            (void)kvt_l2_run(env.l2);
            (void)fault_io_release(io, 1, 0);
        }
        (void)kvt_l2_run(env.l2);
        fault_io_hold(io, 0);
        reopen(io, OLD);
    }
}

/* Without the callbacks nothing is looked at: fsck, and whoever does not want it. */
static void test_nobody_asks(void **state)
{
    struct kvt_io *io = open_unread(image, names[2]);
    struct kvt_io *medium = l2_clone(fault_io_inner(io));
    uint64_t reads;

    (void)state;
    l2_env_close(&env);
    io->ops->destroy(io);
    saved.params.found_again = NULL;
    io = open_unread(medium, names[2]);
    saved.params.found_again = found_again;
    reads = fault_io_count(io, FAULT_READ);
    wait_ns(100 * SECOND);
    assert_int_equal(fault_io_count(io, FAULT_READ), reads);
    assert_int_equal(unread(), 1);
    assert_false(kvt_l2_may_return(env.l2));
    reopen(io, OLD);
    medium->ops->destroy(medium);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_segment_comes_back),
        cmocka_unit_test(test_it_is_recycled_in_its_turn),
        cmocka_unit_test(test_what_was_purged_meanwhile_does_not_come),
        cmocka_unit_test(test_many_purges),
        cmocka_unit_test(test_waits_until_there_is_room),
        cmocka_unit_test(test_a_segment_that_holds_nothing_is_given_back),
        cmocka_unit_test(test_reads_of_a_look_fail),
        cmocka_unit_test(test_reads_of_a_look_are_short),
        cmocka_unit_test(test_reads_of_a_look_have_a_wrong_bit),
        cmocka_unit_test(test_a_drive_that_stays_bad),
        cmocka_unit_test(test_closed_in_the_midst_of_a_look),
        cmocka_unit_test(test_nobody_asks),
        cmocka_unit_test(test_the_younger_of_two_records), /* last: makes another image */
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
