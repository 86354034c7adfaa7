/* Time to live across restarts: store_marks.c, and its file "ttl". C79.
 *
 * Goal:   a block that nobody uses is gone a time to live after it was stored, however often the
 *         store is opened and closed, or killed, within it, and whatever the system's clock does;
 *         for namespaces with a time of their own, and roots that come later, too. A damaged file
 *         costs the age of what is there, once.
 * Method: the rig, whose clocks are numbers: lives follow each other, the medium stays.
 */
#include "support/store_rig.h"

#include <string.h>

#include "kvtier/error.h"
#include "store/l2_survey.h"
#include "store/store_impl.h"
#include "support/fault_io.h"

enum { KV4 = 2 };

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
    o.ttl_ns = ttl_ns;
    return o;
}

static uint32_t put(uint64_t first, uint32_t n)
{
    uint64_t numbers[64];

    for (uint32_t i = 0; i < n; i++)
        numbers[i] = first + i;
    return rig_put(&rig, ns, numbers, n, 0, KV4, false, NULL);
}

static uint32_t get(uint64_t first, uint32_t n)
{
    uint64_t numbers[64];

    for (uint32_t i = 0; i < n; i++)
        numbers[i] = first + i;
    return rig_get(&rig, ns, numbers, n, 0, NULL, NULL);
}

static void begin(const struct rig_options *o)
{
    rig_open(&rig, o, NULL);
    ns = rig_ns(&rig, 1, pages);
}

static void stop(int64_t ns_down)
{
    kvt_store_close(rig.store, SECOND);
    rig.store = NULL;
    rig.now_ns += ns_down;
}

static void again(void)
{
    rig_start(&rig);
    ns = rig_ns(&rig, 1, pages);
}

/* The store is closed for that long. */
static void down(int64_t ns_down)
{
    stop(ns_down);
    again();
}

/* Blocks 1 to 4, flushed; then it is closed for longer than their time, and not open again. */
static void four_and_stop(const struct rig_options *o)
{
    begin(o);
    assert_int_equal(put(1, 4), 4);
    assert_int_equal(rig_flush(&rig), 0);
    stop(20 * SECOND);
}

static void killed(int64_t ns_down)
{
    rig.now_ns += ns_down; /* what is written now is written before the end */
    rig_crash(&rig);
    ns = rig_ns(&rig, 1, pages);
}

static void test_downtime_counts(void **state)
{
    struct rig_options o = options(2 * SECOND);

    (void)state;
    begin(&o);
    assert_int_equal(put(1, 4), 4);
    assert_int_equal(rig_flush(&rig), 0);
    down(SECOND);
    assert_int_equal(get(1, 2), 2);
    down(5 * SECOND);
    assert_int_equal(get(1, 4), 0);
    assert_true(rig_stats(&rig).ttl_expired > 0); /* the rest goes with the first of its chain */
    assert_int_equal(put(1, 4), 4);               /* and is stored again like a new one */
    down(SECOND);
    assert_int_equal(get(1, 4), 4);
    rig_close(&rig);
}

/* The age goes on in the new life: no second time to live. */
static void test_the_age_goes_on(void **state)
{
    struct rig_options o = options(16 * SECOND);

    (void)state;
    begin(&o);
    assert_int_equal(put(1, 4), 4);
    assert_int_equal(put(101, 4), 4);
    assert_int_equal(rig_flush(&rig), 0);
    down(8 * SECOND);
    rig_advance(&rig, 4 * SECOND);
    assert_int_equal(get(101, 4), 4); /* used in this life */
    rig_advance(&rig, 5 * SECOND);
    assert_int_equal(get(1, 4), 0);
    assert_int_equal(get(101, 4), 4);
    rig_close(&rig);
}

/* Many lives, each shorter than a sixteenth or longer, orderly or not. */
static void short_lives(int64_t life_ns, bool crash)
{
    struct rig_options o = options(16 * SECOND);
    int64_t spent = 0;

    begin(&o);
    assert_int_equal(put(1, 8), 8);
    assert_int_equal(rig_flush(&rig), 0);
    for (uint64_t life = 1; spent < 13 * SECOND; life++, spent += life_ns) {
        if (crash)
            killed(0);
        else
            down(0);
        assert_int_equal(put(100 * life, 2), 2);
        assert_int_equal(rig_flush(&rig), 0);
        rig_advance(&rig, life_ns);
    }
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    uint64_t numbers[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    assert_int_equal(rig_lookup(&rig, ns, numbers, 8, 0, NULL), 8);
    for (; spent < 18 * SECOND; spent += life_ns) {
        if (crash)
            killed(0);
        else
            down(0);
        rig_advance(&rig, life_ns);
    }
    assert_int_equal(rig_lookup(&rig, ns, numbers, 8, 0, NULL), 0);
    rig_close(&rig);
}

static void test_many_short_lives(void **state)
{
    (void)state;
    short_lives(3 * SECOND, false);
    short_lives(3 * SECOND, true);
    short_lives(SECOND / 2, false);
    short_lives(SECOND / 2, true);
}

/* Marks are not renewed while nothing is stored; what comes after that does not count from then. */
static void test_killed_after_a_rest(void **state)
{
    struct rig_options o = options(16 * SECOND);

    (void)state;
    begin(&o);
    assert_int_equal(put(1, 4), 4);
    assert_int_equal(rig_flush(&rig), 0);
    rig_advance(&rig, 2 * SECOND); /* the mark of that is written */
    rig_advance(&rig, 40 * SECOND);
    assert_int_equal(put(101, 4), 4);
    assert_int_equal(rig_flush(&rig), 0);
    killed(12 * SECOND);
    assert_int_equal(get(101, 4), 4);
    rig_close(&rig);
}

static void test_the_clock_goes_back_and_forth(void **state)
{
    struct rig_options o = options(16 * SECOND);

    (void)state;
    begin(&o);
    assert_int_equal(put(1, 4), 4);
    assert_int_equal(rig_flush(&rig), 0);
    rig_advance(&rig, 10 * SECOND);
    rig.wall_ahead_ns -= 1000000 * SECOND; /* set back: the age of 10 s stays */
    down(0);
    assert_int_equal(get(1, 0), 0);
    rig_advance(&rig, 4 * SECOND);
    rig.wall_ahead_ns -= 1000000 * SECOND;
    down(0);
    rig_advance(&rig, 4 * SECOND);
    assert_int_equal(get(1, 4), 0);
    assert_int_equal(put(1, 4), 4);
    assert_int_equal(rig_flush(&rig), 0);
    rig.wall_ahead_ns += 2000000 * SECOND; /* within a life nobody looks at it */
    rig_advance(&rig, SECOND);
    assert_int_equal(get(1, 4), 4);
    down(0); /* too early, but gone */
    assert_int_equal(get(1, 4), 0);
    assert_int_equal(put(1, 4), 4);
    rig.wall_ahead_ns = 0; /* and set right: time goes on from there */
    down(SECOND);
    assert_int_equal(get(1, 4), 4);
    down(20 * SECOND);
    assert_int_equal(get(1, 4), 0);
    rig_close(&rig);
}

/* All times of one page lie in the future: it would look right, but for its checksum. */
static void spoil(uint64_t page)
{
    for (uint64_t mark = 0; mark < KVT_TTL_FILE_MARKS; mark++)
        assert_int_equal(fault_io_corrupt(rig.io, KVT_L2_NAME_TTL,
                                          page * KVT_PAGE_BYTES + 32 + mark * 16 + 15, 5),
                         0);
}

/* The file is not there, or no good: what is found lives anew, once. */
static void test_a_damaged_file(void **state)
{
    struct rig_options o = options(16 * SECOND);

    (void)state;
    for (int how = 0; how < 2; how++) {
        four_and_stop(&o);
        if (how)
            assert_int_equal(rig.io->ops->unlink(rig.io, KVT_L2_NAME_TTL), 0);
        for (uint64_t page = 0; !how && page < 2; page++)
            spoil(page);
        again();
        rig_advance(&rig, 12 * SECOND);
        down(5 * SECOND);
        assert_int_equal(get(1, 4), 0);
        rig_close(&rig);
    }
}

/* One page of two is torn: the other one has the marks but for the last. */
static void test_a_torn_page(void **state)
{
    struct rig_options o = options(16 * SECOND);

    (void)state;
    for (uint64_t page = 0; page < 2; page++) {
        four_and_stop(&o);
        spoil(page);
        again();
        assert_int_equal(get(1, 4), 0);
        rig_close(&rig);
    }
}

/* ns_limit, and what a program says after the open. */
static void a_time_of_its_own(int64_t store_ns, bool by_rule)
{
    struct rig_options o = options(store_ns);
    struct kvt_ns_rule rule = {.by_id = true, .ttl_ns = 4 * SECOND};

    begin(&o);
    memcpy(rule.id, rig_ns_id(&rig, ns), sizeof(rule.id));
    rig_close(&rig);
    if (by_rule) {
        o.ns_rules = &rule;
        o.ns_rule_count = 1;
    } else {
        rig.ns_ttl_ns = 4 * SECOND;
    }
    begin(&o);
    if (!by_rule)
        rig.ns_ttl_ns = 4 * SECOND;
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(put(1, 4), 4);
    assert_int_equal(rig_flush(&rig), 0);
    for (int i = 0; i < 6; i++)
        down(SECOND);
    assert_int_equal(get(1, 4), 0);
    rig.ns_ttl_ns = 0;
    rig_close(&rig);
}

static void test_namespaces_with_a_time_of_their_own(void **state)
{
    (void)state;
    a_time_of_its_own(0, true);
    a_time_of_its_own(0, false);
    a_time_of_its_own(1000 * SECOND, true);
    a_time_of_its_own(1000 * SECOND, false);
}

/* Nobody has a time to live: no file; and one that is said later holds from then on. */
static void test_a_time_that_is_said_later(void **state)
{
    struct rig_options o = options(0);

    (void)state;
    begin(&o);
    assert_int_equal(put(1, 4), 4);
    assert_int_equal(rig_flush(&rig), 0);
    down(20 * SECOND);
    assert_true(rig.io->ops->open(rig.io, KVT_L2_NAME_TTL, 0) < 0);
    rig.options.ttl_ns = 16 * SECOND;
    down(20 * SECOND);
    assert_int_equal(rig_stats(&rig).ttl_expired, 0);
    down(10 * SECOND);
    assert_int_equal(rig_stats(&rig).ttl_expired, 0);
    down(10 * SECOND);
    assert_int_equal(get(1, 4), 0);
    rig_close(&rig);
}

/* ---- the marks ------------------------------------------------------------------------------ */

/* Very many marks: a record's age is never too small, and not much too large. */
static void test_marks_are_never_too_young(void **state)
{
    static struct kvt_ttl_marks m;
    enum { N = 20000 };
    int64_t now = N * SECOND;
    double worst = 0;

    (void)state;
    memset(&m, 0, sizeof(m));
    assert_true(kvt_ttl_mark_of(&m, 5) == INT64_MAX);
    for (uint64_t i = 1; i <= N; i++)
        kvt_ttl_mark_add(&m, 10 * i, (int64_t)i * SECOND);
    assert_int_equal(m.count, KVT_TTL_FILE_MARKS);
    for (uint64_t i = 1; i < N; i++) {
        int64_t stored = (int64_t)i * SECOND, said = kvt_ttl_mark_of(&m, 10 * i + 5);

        assert_true(said <= stored);
        if ((double)(stored - said) / (double)(now - stored) > worst && now - stored > 50 * SECOND)
            worst = (double)(stored - said) / (double)(now - stored);
    }
    assert_true(worst < 0.15);
    kvt_ttl_mark_add(&m, 10 * N, now - SECOND); /* a clock that goes back */
    assert_true(kvt_ttl_mark_of(&m, 10 * N + 1) == now);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_downtime_counts),
        cmocka_unit_test(test_the_age_goes_on),
        cmocka_unit_test(test_many_short_lives),
        cmocka_unit_test(test_killed_after_a_rest),
        cmocka_unit_test(test_the_clock_goes_back_and_forth),
        cmocka_unit_test(test_a_damaged_file),
        cmocka_unit_test(test_a_torn_page),
        cmocka_unit_test(test_namespaces_with_a_time_of_their_own),
        cmocka_unit_test(test_a_time_that_is_said_later),
        cmocka_unit_test(test_marks_are_never_too_young),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
