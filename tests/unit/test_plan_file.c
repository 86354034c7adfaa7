/* What plans have learnt, across restarts: the file "plan".
 *
 * Goal:   what was learnt is the start value of the next process, per namespace; a damaged file,
 * one of another version, or one with numbers that make no sense is ignored as a whole, counted,
 * and replaced; deterministic plans have none of it; nothing learnt, nothing written. Method: a
 * real cache over a directory; every byte of the file is changed, and it is cut off at every
 * length; files with a right hash and wrong lines are made by hand.
 */
#include "support/rig.h"
#include "support/state_help.h"

#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "client/client.h"
#include "store/l2_survey.h"

#define N 32u

static struct rig rig;
static enum kvt_tier tiers[N];

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
    for (uint32_t i = 0; i < N; i++)
        tiers[i] = KVT_TIER_DISK;
}

static const char *path_of(const char *name)
{
    static char path[300];
    snprintf(path, sizeof(path), "%s/%s", rig.dir, name);
    return path;
}

static struct kvt_plan ask(void)
{
    struct kvt_plan plan = {.struct_size = sizeof(plan)};
    struct kvt_plan_query query = {.struct_size = sizeof(query), .tiers = tiers, .n = N};
    assert_int_equal(kvt_plan(rig.ns, &query, &plan), 0);
    return plan;
}

/* An engine of `us` microseconds a token, and some loads from disk. */
static void learn(double us)
{
    for (uint64_t i = 0; i < 40; i++)
        assert_int_equal(kvt_observe_prefill(rig.ns, 500 + 100 * (i % 7), 0,
                                             (double)(500 + 100 * (i % 7)) * us * 1e-6),
                         0);
    pthread_mutex_lock(&rig.cache->lock);
    for (int i = 0; i < 40; i++) {
        kvt_planning_saw(rig.cache, KVT_TIER_DISK, (double)((uint64_t)(1 + i % 5) << 20), 0,
                         0.02 + (1 + i % 5) * 0.01);
        kvt_planning_learn(rig.cache);
    }
    pthread_mutex_unlock(&rig.cache->lock);
}

static bool near(double a, double b)
{
    return fabs(a / b - 1) < 0.05;
}

static void what_was_learnt_is_kept(void **state)
{
    (void)state;
    struct stat st;
    open_rig("dram=16MiB");
    struct kvt_plan fresh = ask();
    rig_reopen(&rig); /* nothing learnt: nothing written */
    assert_int_not_equal(stat(path_of("plan"), &st), 0);
    learn(1234);
    struct kvt_plan before = ask();
    assert_true(near(before.recompute_s, 1234e-6 * 16 * N));
    rig_reopen(&rig);
    assert_int_equal(stat(path_of("plan"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(rig_stat(&rig, "plan.file_read"), 1);
    assert_int_equal(rig_stat(&rig, "plan.file_bad"), 0);
    struct kvt_plan after = ask();
    assert_true(near(after.recompute_s, before.recompute_s));
    assert_true(!near(after.recompute_s, fresh.recompute_s));
    assert_true(near(after.load_all_s, before.load_all_s));
    /* another namespace starts from the options; this one is remembered beside it, and through
     * a life in which nobody opened it */
    rig_close(&rig);
    rig.identity.model = "another model";
    rig_open(&rig);
    assert_true(near(ask().recompute_s, fresh.recompute_s));
    learn(77);
    rig_reopen(&rig);
    assert_true(near(ask().recompute_s, 77e-6 * 16 * N));
    rig_close(&rig);
    rig.identity.model = "model";
    rig_open(&rig);
    assert_true(near(ask().recompute_s, before.recompute_s));
    /* measurements go first */
    learn(5);
    assert_true(near(ask().recompute_s, 5e-6 * 16 * N));
}

static void a_namespace_that_was_closed_is_kept(void **state)
{
    (void)state;
    open_rig("dram=16MiB");
    learn(900);
    kvt_pool_unregister(rig.pool);
    kvt_ns_close(rig.ns);
    rig.pool = NULL;
    rig.ns = NULL;
    rig_close(&rig);
    rig_open(&rig);
    assert_true(near(ask().recompute_s, 900e-6 * 16 * N));
}

static void damage_is_ignored_and_counted(void **state)
{
    (void)state;
    char good[20000], bad[20000];
    open_rig("dram=4MiB");
    struct kvt_plan fresh = ask();
    learn(1234);
    rig_close(&rig);
    size_t len = state_get(path_of("plan"), good, sizeof(good));
    assert_true(len > 100);
    for (size_t i = 0; i < 2 * len; i += 7) { /* a byte changed, or all from there on gone */
        size_t at = i / 2, keep = i % 2 ? at : len;
        memcpy(bad, good, len);
        bad[at] ^= 1 << at % 8;
        state_put(path_of("plan"), bad, keep);
        rig_open(&rig);
        assert_int_equal(rig_stat(&rig, "plan.file_bad"), 1);
        assert_int_equal(rig_stat(&rig, "plan.file_read"), 0);
        assert_true(near(ask().recompute_s, fresh.recompute_s));
        assert_true(near(ask().load_all_s, fresh.load_all_s));
        rig_close(&rig);
    }
    rig_open(&rig);
    learn(1234); /* and replaced */
    rig_reopen(&rig);
    assert_int_equal(rig_stat(&rig, "plan.file_read"), 1);
    rig_close(&rig);
    assert_int_equal(state_get(path_of("plan"), good, sizeof(good)), len);
    rig_open(&rig);
}

static void numbers_that_make_no_sense_are_ignored(void **state)
{
    (void)state;
#define NS "00112233445566778899aabbccddeeff"
    static const char *const bodies[] = {
        "kvtier-plan 2\n",
        "kvtier-plan 1\ntier 2 -1 1e-9\n",
        "kvtier-plan 1\ntier 2 nan 1e-9\n",
        "kvtier-plan 1\ntier 2 0.001 inf\n",
        "kvtier-plan 1\ntier 2 0.001 0\n",
        "kvtier-plan 1\ntier 2 0.001 1e-30\n",
        "kvtier-plan 1\ntier 2 1e9 1e-9\n",
        "kvtier-plan 1\ntier 7 0.001 1e-9\n",
        "kvtier-plan 1\ntier 0 0.001 1e-9\n",
        "kvtier-plan 1\ntier 2 0.001\n",
        "kvtier-plan 1\ntier 2 0.001 1e-9 5\n",
        "kvtier-plan 1\ntier 2  0.001 1e-9\n",
        "kvtier-plan 1\ntier 2 0.001 1e-9x\n",
        "kvtier-plan 1\nroot 0011223344556677 -1 1e-9\n",
        "kvtier-plan 1\nroot 0011223344556677 0.001 inf\n",
        "kvtier-plan 1\nroot 0011223344556677 0.001\n",
        "kvtier-plan 1\nroot 001122334455667 0.001 1e-9\n",
        "kvtier-plan 1\nroot 001122334455667g 0.001 1e-9\n",
        "kvtier-plan 1\nroot\n",
        "kvtier-plan 1\nprefill " NS " 0 0\n",
        "kvtier-plan 1\nprefill " NS " -1e-4 0\n",
        "kvtier-plan 1\nprefill " NS " 1e-4 -1\n",
        "kvtier-plan 1\nprefill " NS " 1e-4 nan\n",
        "kvtier-plan 1\nprefill 0011 1e-4 0\n",
        "kvtier-plan 1\nprefill 0011223344556677889gaabbccddeeff 1e-4 0\n",
        "kvtier-plan 1\nprefill\n",
        "kvtier-plan 1\nsomething else\n",
        "kvtier-plan 1\n\n",
    };
    open_rig("dram=4MiB");
    struct kvt_plan fresh = ask();
    rig_close(&rig);
    for (size_t i = 0; i < KVT_ARRAY_LEN(bodies); i++) {
        state_put_lines(path_of("plan"), bodies[i]);
        rig_open(&rig);
        if (rig_stat(&rig, "plan.file_bad") != 1)
            fail_msg("taken: %s", bodies[i]);
        struct kvt_plan plan = ask();
        assert_true(near(plan.recompute_s, fresh.recompute_s));
        assert_true(near(plan.load_all_s, fresh.load_all_s));
        rig_close(&rig);
    }
    char many[20000] = "kvtier-plan 1\n"; /* one more than there is room for */
    for (uint32_t i = 0; i <= KVT_KEPT_MAX; i++)
        snprintf(many + strlen(many), sizeof(many) - strlen(many), "prefill %032x 0x1p-13 0\n", i);
    state_put_lines(path_of("plan"), many);
    rig_open(&rig);
    assert_int_equal(rig_stat(&rig, "plan.file_bad"), 1);
    rig_close(&rig);
    snprintf(many, sizeof(many), "kvtier-plan 1\n");
    for (uint32_t i = 0; i <= KVT_KEPT_ROOTS_MAX; i++)
        snprintf(many + strlen(many), sizeof(many) - strlen(many), "root %016x 0 1e-9\n", i);
    state_put_lines(path_of("plan"), many);
    rig_open(&rig);
    assert_int_equal(rig_stat(&rig, "plan.file_bad"), 1);
    rig_close(&rig);
    state_put(path_of("plan"), "", 0);
    rig_open(&rig);
    assert_int_equal(rig_stat(&rig, "plan.file_bad"), 1);
    rig_close(&rig);
    state_put_lines(path_of("plan"), "kvtier-plan 1\n"); /* nothing in it is no fault */
    rig_open(&rig);
    assert_int_equal(rig_stat(&rig, "plan.file_read"), 1);
}

/* Equal questions get equal answers, whatever was learnt before. */
static void deterministic_plans_have_none_of_it(void **state)
{
    (void)state;
    char before[20000], after[20000];
    open_rig("dram=4MiB,plan=deterministic");
    struct kvt_plan fresh = ask();
    rig_close(&rig);
    snprintf(rig.config, sizeof(rig.config), "dram=4MiB");
    rig_open(&rig);
    learn(1234);
    rig_close(&rig);
    size_t len = state_get(path_of("plan"), before, sizeof(before));
    snprintf(rig.config, sizeof(rig.config), "dram=4MiB,plan=deterministic");
    rig_open(&rig);
    assert_int_equal(rig_stat(&rig, "plan.file_read"), 0);
    assert_true(ask().recompute_s == fresh.recompute_s && ask().load_all_s == fresh.load_all_s);
    (void)kvt_observe_prefill(rig.ns, 500, 0, 1);
    rig_close(&rig);
    assert_int_equal(state_get(path_of("plan"), after, sizeof(after)), len);
    assert_memory_equal(before, after, len);
    rig_open(&rig);
}

/* What an interrupted close leaves behind; a file that cannot be written; a name that is ours. */
static void what_is_in_the_way(void **state)
{
    (void)state;
    uint32_t segment;
    open_rig("dram=4MiB");
    learn(1234);
    rig_close(&rig);
    FILE *file = fopen(path_of("plan.tmp"), "wb");
    assert_non_null(file);
    fputs("half of a fi", file);
    fclose(file);
    rig_open(&rig);
    assert_int_equal(rig_stat(&rig, "plan.file_read"), 1);
    learn(55);
    assert_int_equal(mkdir(path_of("plan.tmp"), 0700), 0);
    rig_close(&rig); /* says so, and the old one stays */
    assert_non_null(strstr(rig.log, "was not written"));
    assert_int_equal(rmdir(path_of("plan.tmp")), 0);
    rig_open(&rig);
    assert_true(near(ask().recompute_s, 1234e-6 * 16 * N));
    rig_close(&rig);
    assert_int_equal(unlink(path_of("plan")), 0); /* pipes that nobody else has open: no waiting */
    assert_int_equal(mkfifo(path_of("plan"), 0600), 0);
    rig_open(&rig);
    assert_int_equal(rig_stat(&rig, "plan.file_read"), 0);
    learn(55);
    assert_int_equal(mkfifo(path_of("plan.tmp"), 0600), 0); /* an open would have removed it */
    rig_reopen(&rig);
    assert_int_equal(rig_stat(&rig, "plan.file_read"), 0);
    assert_int_equal(kvt_l2_name_kind("plan", &segment), KVT_L2_NAME_IS_STATS);
    assert_int_equal(kvt_l2_name_kind("plan.tmp", &segment), KVT_L2_NAME_IS_TEMP);
    assert_int_equal(kvt_l2_name_kind("plan2", &segment), KVT_L2_NAME_IS_FOREIGN);
    assert_int_equal(kvt_l2_name_kind("gpu-paths", &segment), KVT_L2_NAME_IS_STATS);
    assert_int_equal(kvt_l2_name_kind("gpu-paths.tmp", &segment), KVT_L2_NAME_IS_TEMP);
}

/* The option names a directory: refused with the reason, not only said to a log. */
static void a_directory_is_no_plan_file(void **state)
{
    (void)state;
    struct kvt_config *config;
    struct kvt_cache *cache = NULL;
    char error[512] = "", said[512];
    open_rig("dram=4MiB");
    (void)snprintf(said, sizeof(said), "plan_file: %s is a directory", rig.dir);
    assert_int_equal(kvt_config_new(&config), 0);
    assert_int_equal(kvt_config_set(config, "dram", "4MiB"), 0);
    assert_int_equal(kvt_config_set(config, "plan_file", rig.dir), 0);
    assert_int_equal(kvt_open(config, &cache, error, sizeof(error)), KVT_E_CONFIG_VALUE);
    assert_null(cache);
    if (!strstr(error, said))
        fail_msg("'%s', not '%s'", error, said);
    kvt_config_free(config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(what_was_learnt_is_kept, tear_down),
        cmocka_unit_test_teardown(a_namespace_that_was_closed_is_kept, tear_down),
        cmocka_unit_test_teardown(damage_is_ignored_and_counted, tear_down),
        cmocka_unit_test_teardown(numbers_that_make_no_sense_are_ignored, tear_down),
        cmocka_unit_test_teardown(deterministic_plans_have_none_of_it, tear_down),
        cmocka_unit_test_teardown(what_is_in_the_way, tear_down),
        cmocka_unit_test_teardown(a_directory_is_no_plan_file, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
