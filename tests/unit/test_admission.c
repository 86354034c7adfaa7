/* Admission alone: who is remembered, what is learnt, what the buckets hold.
 *
 * Goal:   uses are counted across sets that overflow, as far as there is room; chances follow what
 *         happened, class by class, and follow a change; the bucket neither leaks nor grows, and
 * time that goes back gives nothing; the threshold takes the better half when half may be written;
 *         nonsense is refused.
 * Method: streams with known shares; the clock is a number. Seeds are fixed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>

#include "base/rng.h"
#include "kvtier/error.h"
#include "plan/admission.h"

#define DAY_NS INT64_C(86400000000000)
#define SECOND_NS INT64_C(1000000000)
#define BYTES 65536u

static struct kvt_admission admission;

static struct kvt_admission_params params(int admit, uint64_t bytes_a_day)
{
    struct kvt_admission_params p = {.admit = admit,
                                     .seed = 3,
                                     .token_s = 1e-4,
                                     .byte_s = 1e-9,
                                     .remember = 1u << 16,
                                     .root_count = 1};
    p.bytes_a_day[0] = bytes_a_day;
    return p;
}

static void begin(int admit, uint64_t bytes_a_day)
{
    struct kvt_admission_params p = params(admit, bytes_a_day);
    assert_int_equal(kvt_admission_init(&admission, &p, SECOND_NS), 0);
}

/* Numbers as the fingerprints are: evenly spread. */
static struct kvt_admission_block block(uint64_t number, uint32_t first_pos)
{
    struct kvt_rng rng = {number * 977 + 5};
    return (struct kvt_admission_block){kvt_rng_next(&rng), first_pos, 16, BYTES};
}

static uint32_t use(uint64_t number, uint32_t first_pos, int64_t now)
{
    struct kvt_admission_block b = block(number, first_pos);
    return kvt_admission_use(&admission, &b, false, now);
}

static enum kvt_verdict ask(uint64_t number, uint32_t first_pos, uint64_t committed, int64_t now)
{
    struct kvt_admission_block b = block(number, first_pos);
    return kvt_admission_ask(&admission, &b, committed, now);
}

static void uses_are_remembered(void **state)
{
    (void)state;
    begin(KVT_ADMIT_SECOND, 0);
    for (uint64_t i = 0; i < 30000; i++)
        assert_int_equal(use(i, 0, SECOND_NS), 1);
    uint32_t known = 0;
    for (uint64_t i = 0; i < 30000; i++)
        known += use(i, 0, 2 * SECOND_NS) == 2;
    printf("%u of 30,000 blocks known in a table of 65,536\n", known);
    assert_true(known > 29500);
    /* far too many: the newest are known, the oldest are not */
    for (uint64_t i = 0; i < 1000000; i++)
        (void)use(1000000 + i, 0, (int64_t)i * SECOND_NS);
    uint32_t newest = 0, oldest = 0;
    for (uint64_t i = 0; i < 10000; i++) {
        newest += ask(1000000 + 999999 - i, 0, 0, 1000000 * SECOND_NS) == KVT_VERDICT_FIRST_USE &&
                  use(1000000 + 999999 - i, 0, 1000000 * SECOND_NS) == 2;
        oldest += use(i, 0, 1000001 * SECOND_NS) > 1;
    }
    assert_true(newest > 9500);
    assert_true(oldest < 100);
    for (int i = 0; i < 200; i++) /* the count does not run over */
        assert_true(use(7, 0, 1000002 * SECOND_NS) >= 1);
    assert_int_equal(use(7, 0, 1000002 * SECOND_NS), 63);
    kvt_admission_destroy(&admission);
}

/* Of first blocks one in two comes back, of blocks at 4,096 one in eight. */
static void chances_are_learnt_and_unlearnt(void **state)
{
    (void)state;
    struct kvt_rng rng = {17};
    begin(KVT_ADMIT_VALUE, 0);
    assert_true(fabs(kvt_admission_chance(&admission, 1, 0) - 0.5) < 1e-9);
    for (uint64_t i = 0; i < 20000; i++) {
        uint32_t pos = i % 2 ? 4096 : 0;
        (void)use(i, pos, SECOND_NS);
        if (kvt_rng_below(&rng, pos ? 8 : 2) == 0)
            (void)use(i, pos, SECOND_NS);
    }
    double front = kvt_admission_chance(&admission, 1, 0);
    double deep = kvt_admission_chance(&admission, 1, 4096);
    printf("chances of a second use: %.3f and %.3f\n", front, deep);
    assert_true(fabs(front - 0.5) < 0.03 && fabs(deep - 0.125) < 0.02);
    assert_true(kvt_admission_chance(&admission, 2, 0) < 0.01); /* nobody came a third time */
    /* the habit changes: nobody comes back any more */
    for (uint64_t i = 0; i < 600000; i++)
        (void)use(100000 + i, 0, 2 * SECOND_NS);
    assert_true(kvt_admission_chance(&admission, 1, 0) < 0.05);
    assert_true(kvt_admission_chance(&admission, 0, UINT32_MAX) <=
                1); /* any question is answered */
    kvt_admission_destroy(&admission);
}

static void the_bucket_holds_what_it_says(void **state)
{
    (void)state;
    const uint64_t day = 24u << 20; /* an hour's worth is 1 MiB */
    int64_t now = SECOND_NS;
    uint64_t written = 0, count = 0;
    begin(KVT_ADMIT_ALL, day);
    assert_int_equal(kvt_admission_left(&admission), 3 << 18); /* three quarters of it */
    assert_int_equal(ask(1, 0, 0, now), KVT_VERDICT_YES);
    assert_int_equal(ask(1, 0, (3 << 18) - BYTES, now), KVT_VERDICT_YES);
    assert_int_equal(ask(1, 0, (3 << 18) - BYTES + 1, now), KVT_VERDICT_BUDGET);
    (void)ask(1, 0, 0, now + 10 * DAY_NS);
    assert_int_equal(kvt_admission_left(&admission), 1 << 20); /* and no more, however long */
    (void)ask(1, 0, 0, now); /* time that goes back gives nothing, now or later */
    assert_int_equal(kvt_admission_left(&admission), 1 << 20);
    now += 10 * DAY_NS;
    for (int64_t i = 0; i < 5 * 24 * 60; i++, now += 60 * SECOND_NS) { /* five days, each minute */
        while (ask(1, 0, 0, now) == KVT_VERDICT_YES) {
            written += BYTES;
            count++;
            kvt_admission_written(&admission, 0, written, now);
        }
        assert_true(kvt_admission_left(&admission) < (int64_t)BYTES);
    }
    assert_true(fabs((double)written / (5.0 * (double)day) - 1) < 0.02);
    /* overdrawn: nothing, until it has been paid back */
    kvt_admission_written(&admission, 0, written + (2 << 20), now);
    assert_false(kvt_admission_root_may(&admission, 0));
    assert_int_equal(ask(1, 0, 0, now + 3600 * SECOND_NS), KVT_VERDICT_BUDGET);
    assert_int_equal(ask(1, 0, 0, now + 3 * 3600 * SECOND_NS), KVT_VERDICT_YES);
    assert_true(kvt_admission_root_may(&admission, 0));
    /* a root without a limit: no limit */
    kvt_admission_root(&admission, 1, 0);
    assert_int_equal(kvt_admission_left(&admission), INT64_MAX);
    assert_int_equal(ask(1, 0, UINT64_MAX / 2, now), KVT_VERDICT_YES);
    assert_true(kvt_admission_root_may(&admission, 1) && kvt_admission_root_may(&admission, 99));
    kvt_admission_root(&admission, 99, 5); /* there is no such root */
    kvt_admission_written(&admission, 99, 5, now);
    kvt_admission_destroy(&admission);
}

/* What outlives a process: levels and counts go out and in as they are, and no nonsense does. */
static void an_earlier_life_goes_on(void **state)
{
    (void)state;
    struct kvt_admission_chances chances, back;
    const double nonsense[] = {-1, NAN, INFINITY, 1e9};
    begin(KVT_ADMIT_VALUE, 24u << 20);
    for (uint64_t i = 0; i < 3000; i++) {
        (void)use(i, 0, SECOND_NS);
        if (i % 4 == 0)
            (void)use(i, 0, SECOND_NS);
    }
    kvt_admission_written(&admission, 0, 1 << 18, SECOND_NS);
    double chance = kvt_admission_chance(&admission, 1, 0);
    double left = kvt_admission_left_in(&admission, 0);
    assert_true(fabs(left - (1 << 19)) < 1 && fabs(chance - 0.25) < 0.02);
    kvt_admission_chances_get(&admission, &chances);
    kvt_admission_destroy(&admission);
    begin(KVT_ADMIT_VALUE, 24u << 20);
    assert_true(kvt_admission_chances_set(&admission, &chances));
    kvt_admission_left_set(&admission, 0, left);
    assert_true(fabs(kvt_admission_chance(&admission, 1, 0) - chance) < 1e-9);
    assert_true(fabs(kvt_admission_left_in(&admission, 0) - left) < 1e-9);
    for (size_t i = 0; i < sizeof(nonsense) / sizeof(nonsense[0]); i++) {
        back = chances;
        back.again[0][0] = nonsense[i];
        assert_false(kvt_admission_chances_set(&admission, &back));
        assert_true(fabs(kvt_admission_chance(&admission, 1, 0) - chance) < 1e-9);
    }
    kvt_admission_left_set(&admission, 0, NAN);
    assert_true(fabs(kvt_admission_left_in(&admission, 0) - left) < 1e-9);
    kvt_admission_left_set(&admission, 0, 1e18); /* at most what it holds */
    assert_true(fabs(kvt_admission_left_in(&admission, 0) - (1 << 20)) < 1e-9);
    kvt_admission_left_set(&admission, 0, -5000);
    assert_false(kvt_admission_root_may(&admission, 0));
    kvt_admission_left_set(&admission, 1, 5000); /* there is no such root */
    assert_true(fabs(kvt_admission_left_in(&admission, 1)) < 1e-9);
    kvt_admission_destroy(&admission);
}

/* What was used twice takes the whole budget when it needs it, whatever first uses promise; what it
 * leaves goes to first uses. */
static void second_uses_come_first(void **state)
{
    (void)state;
    for (uint64_t each = 1; each <= 4; each *= 4) { /* every second, every fourth */
        int64_t now = SECOND_NS;
        uint64_t first = 0, again = 0, asked = 0, written = 0;
        begin(KVT_ADMIT_VALUE, (uint64_t)BYTES * 86400); /* one block a second */
        for (uint64_t i = 0; i < 20000; i++, now += SECOND_NS) {
            bool come = i % each == 0;
            if (come) {
                (void)use(i, 0, now);
                (void)use(i, 0, now);
                asked++;
            }
            if (come && ask(i, 0, 0, now) == KVT_VERDICT_YES)
                again++, written += BYTES;
            if (ask(1000000 + i, 0, 0, now) == KVT_VERDICT_YES)
                first++, written += BYTES;
            kvt_admission_written(&admission, 0, written, now);
        }
        printf("%u of %u second uses taken, and %u first ones\n", (unsigned)again, (unsigned)asked,
               (unsigned)first);
        assert_true(again >= asked * 98 / 100);
        assert_true(each == 1 ? first < 2000 : first > 8000);
        kvt_admission_destroy(&admission);
    }
}

/* Blocks that come back (one in two) and blocks that do not (one in forty), as many of each, and
 * room for half: the good ones are taken. */
static void value_takes_the_better_half(void **state)
{
    (void)state;
    struct kvt_rng rng = {29};
    int64_t now = SECOND_NS;
    uint64_t good = 0, bad = 0, asked = 0, written = 0;
    begin(KVT_ADMIT_VALUE, (uint64_t)BYTES * 43200);         /* one block in two seconds */
    for (uint64_t i = 0; i < 40000; i++, now += SECOND_NS) { /* one asked for in each */
        bool front = i % 2;
        uint32_t pos = front ? 0 : 65536;
        (void)use(i, pos, now);
        if (kvt_rng_below(&rng, front ? 2 : 40) == 0)
            (void)use(i, pos, now);
        if (ask(1000000 + i, pos, 0, now) == KVT_VERDICT_YES) {
            written += BYTES;
            kvt_admission_written(&admission, 0, written, now);
            good += i > 10000 && front;
            bad += i > 10000 && !front;
        }
        asked += i > 10000 && front;
    }
    printf("taken: %.1f %% of those that come back, %.1f %% of the others\n",
           100.0 * (double)good / (double)asked, 100.0 * (double)bad / (double)asked);
    assert_true(good > asked * 9 / 10);
    assert_true(bad < asked / 5);
    kvt_admission_destroy(&admission);
}

/* What costs as much to load as to compute is never written for its value. */
static void what_saves_nothing_is_not_written(void **state)
{
    (void)state;
    struct kvt_admission_params p = params(KVT_ADMIT_VALUE, 0);
    p.byte_s = 1e-6; /* 65 ms to load what takes 1.6 ms to compute */
    assert_int_equal(kvt_admission_init(&admission, &p, SECOND_NS), 0);
    for (int i = 0; i < 10; i++)
        (void)use(1, 0, SECOND_NS);
    assert_int_equal(ask(1, 0, 0, SECOND_NS), KVT_VERDICT_VALUE);
    kvt_admission_destroy(&admission);
}

static void nonsense_is_refused(void **state)
{
    (void)state;
    struct kvt_admission_params p;
    const double bad[] = {0, -1, NAN};
    for (size_t i = 0; i < 3; i++) {
        p = params(KVT_ADMIT_VALUE, 0);
        p.token_s = bad[i];
        assert_int_equal(kvt_admission_init(&admission, &p, 0), KVT_E_INVAL);
    }
    p = params(KVT_ADMIT_VALUE, 0);
    p.byte_s = NAN;
    assert_int_equal(kvt_admission_init(&admission, &p, 0), KVT_E_INVAL);
    p = params(-1, 0);
    assert_int_equal(kvt_admission_init(&admission, &p, 0), KVT_E_INVAL);
    p = params(KVT_ADMIT_RANDOM, 0);
    p.permille = 1001;
    assert_int_equal(kvt_admission_init(&admission, &p, 0), KVT_E_INVAL);
    p = params(KVT_ADMIT_ALL, 0);
    p.root_count = KVT_ADMISSION_ROOTS + 1;
    assert_int_equal(kvt_admission_init(&admission, &p, 0), KVT_E_INVAL);
    begin(KVT_ADMIT_ALL, 0); /* asks nothing, so remembers nothing */
    assert_null(admission.seen);
    assert_int_equal(use(1, 0, 0), 1);
    kvt_admission_destroy(&admission);
    kvt_admission_destroy(&admission);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(uses_are_remembered),
        cmocka_unit_test(chances_are_learnt_and_unlearnt),
        cmocka_unit_test(the_bucket_holds_what_it_says),
        cmocka_unit_test(an_earlier_life_goes_on),
        cmocka_unit_test(second_uses_come_first),
        cmocka_unit_test(value_takes_the_better_half),
        cmocka_unit_test(what_saves_nothing_is_not_written),
        cmocka_unit_test(nonsense_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
