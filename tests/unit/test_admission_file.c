/* What admission knows, across restarts: the file "admission" of a root.
 *
 * Goal:   a write budget holds over restarts: what was left is left, and drips on while nobody
 * runs; a process that did not close leaves an empty bucket; what admission=value has learnt is
 *         there again, after a crash too; a damaged file, one of another version, or one with
 *         numbers that make no sense is ignored as a whole, said, and replaced; without a budget
 *         there is no file. Method: a real cache over a directory; files are cut off, changed byte
 *         by byte, and made by hand with the hash that belongs to them. The budget is so small
 *         beside what is tested for that the test's own time does not count, however slow it is.
 */
#include "support/rig.h"
#include "support/state_help.h"

#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "client/client.h"
#include "store/l2_survey.h"

#define N 32u
#define MIB (UINT64_C(1) << 20)
#define BUDGET "dram=16MiB,write_budget=240MiB" /* 10 MiB an hour, 2.8 KiB a second */
#define MOST (10 * MIB)
#define FIRST (MOST / 4 * 3)
#define SLACK (2 * MIB) /* ten minutes */
#define VERSION "kvtier-admission 1\n"

static struct rig rig;

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    return 0;
}

static void open_rig(const char *config)
{
    struct rig_shape shape = rig_shape_small(N);
    rig_init(&rig, &shape, config, "64MiB");
    rig_open(&rig);
}

static const char *path_of(const char *name)
{
    static char path[300];
    snprintf(path, sizeof(path), "%s/%s", rig.dir, name);
    return path;
}

static uint64_t left(void)
{
    return rig_stat(&rig, "admission.budget_left");
}

/* As much as was there at the start, and no more than the test's own time has brought. */
static void assert_left(uint64_t want)
{
    uint64_t got = left();
    if (got + MIB / 2 < want || got > want + SLACK)
        fail_msg("%llu bytes are left, and not about %llu", (unsigned long long)got,
                 (unsigned long long)want);
}

/* Store new chains until `bytes` of the budget have been written. */
static void spend(uint64_t bytes, uint64_t seed)
{
    uint64_t start = left();
    for (uint64_t i = 0; i < 10000 && left() + bytes > start; i++) {
        (void)rig_store(&rig, seed + i * N, N, 0, NULL);
        assert_int_equal(kvt_flush(rig.cache), 0);
    }
    assert_true(left() + bytes <= start);
}

static void a_budget_holds_over_restarts(void **state)
{
    (void)state;
    struct stat st;
    open_rig(BUDGET);
    assert_left(FIRST); /* nothing is known: three quarters */
    spend(3 * MIB, 1);
    uint64_t before = left();
    assert_true(before < FIRST - 2 * MIB);
    for (int i = 0; i < 3; i++) { /* however often it is opened and closed */
        rig_reopen(&rig);
        assert_left(before);
    }
    rig_close(&rig);
    assert_int_equal(stat(path_of("admission"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(stat(path_of("admission.tmp"), &st), -1);
    rig_open(&rig);
    spend(2 * MIB, 1000000);
    before = left();
    rig_reopen(&rig);
    assert_left(before);
}

static void who_does_not_close_leaves_nothing(void **state)
{
    (void)state;
    char alive[4096], closed[4096];
    open_rig(BUDGET);
    size_t alive_len = state_get(path_of("admission"), alive,
                                 sizeof(alive)); /* what a crash would leave, from now on */
    assert_true(alive_len > 0);
    assert_left(FIRST);
    rig_close(&rig);
    assert_true(state_get(path_of("admission"), closed, sizeof(closed)) > 0);
    assert_string_not_equal(alive, closed);
    state_put(path_of("admission"), alive, alive_len);
    rig_open(&rig);
    assert_left(0);
    rig_reopen(&rig); /* closed this time */
    assert_left(0);
}

static void put_left(double bytes, double seconds_ago)
{
    char lines[200];
    snprintf(lines, sizeof(lines), VERSION "left %a %.0f\n", bytes,
             (double)time(NULL) - seconds_ago);
    state_put_lines(path_of("admission"), lines);
}

static void time_passes_while_nobody_runs(void **state)
{
    (void)state;
    static const struct {
        double left, ago;
        uint64_t want;
    } cases[] = {
        {1 * MIB, 0, 1 * MIB},
        {1 * MIB, 1800, 6 * MIB},
        {1 * MIB, 365 * 86400.0, MOST}, /* and no more than it holds */
        {1 * MIB, -7200, 1 * MIB},      /* a clock that went back gives nothing */
        {1e15, 0, MOST},
        {-6.0 * MIB, 3600, 4 * MIB}, /* overdrawn: it is paid back first */
        {-60.0 * MIB, 3600, 0},
    };
    open_rig(BUDGET);
    for (size_t i = 0; i < KVT_ARRAY_LEN(cases); i++) {
        rig_close(&rig);
        put_left(cases[i].left, cases[i].ago);
        rig_open(&rig);
        assert_left(cases[i].want);
    }
}

static void another_budget_has_another_bucket(void **state)
{
    (void)state;
    open_rig(BUDGET);
    rig_close(&rig);
    put_left(8.0 * MIB, 0);
    snprintf(rig.config, sizeof(rig.config), "dram=16MiB,write_budget=48MiB");
    rig_open(&rig);
    assert_left(2 * MIB);
}

static void damage_is_ignored_and_said(void **state)
{
    (void)state;
    char good[4096], bad[4096];
    open_rig(BUDGET);
    rig_close(&rig);
    put_left(1.0 * MIB, 0);
    size_t len = state_get(path_of("admission"), good, sizeof(good));
    for (size_t i = 0; i < len; i += 13) {
        memcpy(bad, good, len);
        bad[i] = (char)(bad[i] ^ (1 << i % 7));
        state_put(path_of("admission"), bad, len);
        rig_open(&rig);
        assert_left(FIRST);
        rig_close(&rig);
        state_put(path_of("admission"), good, i); /* cut off */
        rig_open(&rig);
        assert_left(FIRST);
        rig_close(&rig);
    }
    assert_non_null(strstr(rig.log, "is damaged"));
    state_put(path_of("admission"), good, len);
    rig_open(&rig);
    assert_left(1 * MIB);
}

static void lines_that_make_no_sense_are_ignored(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "",
        "left\n",
        "left 1\n",
        "left nan 1\n",
        "left 1 inf\n",
        "left 1 -1\n",
        "left 1e300 1\n",
        "left 1 1 1\n",
        "left  1 1\n",
        "left 1 1\nleft 1 1\n",
        "left x y\n",
        "right 1 1\n",
        "left 1 1\nchance 0 0 1\n",
        "left 1 1\nchance 4 0 1 1\n",
        "left 1 1\nchance 0 8 1 1\n",
        "left 1 1\nchance -1 0 1 1\n",
        "left 1 1\nchance 0 0 1 nan\n",
        "left 1 1\nchance 0 0 1 1 1\n",
        "chance 0 0 1 1\n",
    };
    open_rig(BUDGET);
    for (size_t i = 0; i < KVT_ARRAY_LEN(bad); i++) {
        char lines[300];
        rig_close(&rig);
        snprintf(lines, sizeof(lines), VERSION "%s", bad[i]);
        state_put_lines(path_of("admission"), lines);
        rig_open(&rig);
        if (left() < FIRST || left() > FIRST + SLACK)
            fail_msg("'%s' was believed", bad[i]);
    }
    rig_close(&rig);
    state_put_lines(path_of("admission"), "kvtier-admission 2\nleft 0x1p+20 1\n");
    rig_open(&rig);
    assert_left(FIRST);
}

/* The lines of a kind, in their order. */
static void lines_of(const char *kind, char *out, size_t room)
{
    char text[8192], *at = text;
    out[0] = '\0';
    assert_true(state_get(path_of("admission"), text, sizeof(text)) > 0);
    for (char *end; (end = strchr(at, '\n')) != NULL; at = end + 1) {
        *end = '\0';
        if (strncmp(at, kind, strlen(kind)) == 0)
            snprintf(out + strlen(out), room - strlen(out), "%s\n", at);
    }
}

static void what_was_learnt_is_there_again(void **state)
{
    (void)state;
    char learnt[4096], again[4096];
    open_rig("dram=16MiB,admission=value");
    for (int round = 0; round < 3; round++)
        for (uint64_t chain = 0; chain < 8; chain++)
            (void)rig_store(&rig, 1 + chain * N, N, 0, NULL);
    rig_close(&rig);
    lines_of("chance", learnt, sizeof(learnt));
    assert_non_null(strstr(learnt, "chance 0 0 "));
    rig_open(&rig);
    lines_of("chance", again, sizeof(again)); /* a crash leaves these */
    assert_string_equal(again, learnt);
    rig_close(&rig);
    lines_of("chance", again, sizeof(again));
    assert_string_equal(again, learnt);
    /* more wanted again than were there: the store takes none of it, and goes on */
    state_put_lines(path_of("admission"), VERSION "left 0x1p+20 1\nchance 0 0 0x1p+2 0x1p+3\n");
    rig_open(&rig);
    assert_non_null(strstr(rig.log, "what admission had learnt makes no sense"));
    rig_close(&rig);
    lines_of("chance", again, sizeof(again));
    assert_string_equal(again, "");
}

static void there_is_no_file_without_a_budget(void **state)
{
    (void)state;
    struct stat st;
    uint32_t segment;
    open_rig("dram=16MiB,admission=second_use");
    rig_reopen(&rig);
    assert_int_not_equal(stat(path_of("admission"), &st), 0);
    rig_close(&rig);
    assert_int_equal(mkdir(path_of("admission"), 0700), 0); /* something in the way */
    snprintf(rig.config, sizeof(rig.config), BUDGET);
    rig_open(&rig); /* says so, and works */
    assert_non_null(strstr(rig.log, "was not written"));
    spend(MIB, 1);
    rig_close(&rig);
    assert_int_equal(rmdir(path_of("admission")), 0);
    rig_open(&rig);
    assert_left(FIRST);
    assert_int_equal(kvt_l2_name_kind("admission", &segment), KVT_L2_NAME_IS_STATS);
    assert_int_equal(kvt_l2_name_kind("admission.tmp", &segment), KVT_L2_NAME_IS_TEMP);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_budget_holds_over_restarts, tear_down),
        cmocka_unit_test_teardown(who_does_not_close_leaves_nothing, tear_down),
        cmocka_unit_test_teardown(time_passes_while_nobody_runs, tear_down),
        cmocka_unit_test_teardown(another_budget_has_another_bucket, tear_down),
        cmocka_unit_test_teardown(damage_is_ignored_and_said, tear_down),
        cmocka_unit_test_teardown(lines_that_make_no_sense_are_ignored, tear_down),
        cmocka_unit_test_teardown(what_was_learnt_is_there_again, tear_down),
        cmocka_unit_test_teardown(there_is_no_file_without_a_budget, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
