/* Goal: `kvtier bench remote` measures both sides in one run or says why not; addresses that
 *       redis-benchmark cannot reach are refused.
 * Method: the built binary with few small records, over a redis-server of its own and over one that
 *         is given; skipped where there is none. Speeds are only checked to be figures.
 */
#include "support/rig.h"

#include <jansson.h>
#include <string.h>
#include <sys/stat.h>

#include "support/redis_rig.h"
#include "support/run_tool.h"

static struct tool_run run;

#define BENCH(...)           \
    tool_run(&run, KVT_TOOL, \
             (const char *const[]){"kvtier", "bench", "remote", __VA_ARGS__, NULL}, NULL, NULL)
#define SMALL "--records", "8", "--rounds", "3", "--size", "60KiB"

static void check_json(void)
{
    json_t *out = json_loads(run.out, 0, NULL);

    if (run.code != 0 || out == NULL)
        fail_msg("exit %d: %s%s", run.code, run.out, run.err);
    assert_int_equal(json_integer_value(json_object_get(out, "value_bytes")), 60 * 1024);
    assert_int_equal(json_integer_value(json_object_get(out, "rounds")), 3);
    for (int way = 0; way < 2; way++) {
        const json_t *row = json_object_get(out, way ? "get" : "put");

        assert_true(json_real_value(json_object_get(row, "kvtier_mb_per_s")) > 0);
        assert_true(json_real_value(json_object_get(row, "redis_benchmark_mb_per_s")) > 0);
        assert_true(json_real_value(json_object_get(row, "ratio")) > 0);
    }
    json_decref(out);
}

static void test_a_server_of_its_own(void **state)
{
    (void)state;
    if (!redis_rig_able())
        return;
    BENCH(SMALL, "--json");
    check_json();
    BENCH(SMALL);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "redis-benchm."));
}

static void test_a_server_that_is_given(void **state)
{
    static struct redis_rig redis;
    char url[128];

    (void)state;
    if (!redis_rig_able())
        return;
    redis_rig_start(&redis, "");
    redis_rig_url(&redis, url, sizeof(url));
    assert_int_equal(redis_rig_cli(&redis, 0, "SET key:mine 1", run.out, sizeof(run.out)), 0);
    BENCH(SMALL, "--json", "--url", url);
    check_json();
    assert_int_equal(redis_rig_number(&redis, 0, "DBSIZE"), 1); /* as it was before */
    redis_rig_kill(&redis, 0);
    BENCH(SMALL, "--url", url);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "does not answer"));
    redis_rig_stop(&redis);
}

/* Without a server, that is said at once. */
static void test_no_server_can_be_started(void **state)
{
    (void)state;
    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", "bench", "remote", SMALL, NULL}, NULL,
             "PATH=/nonexistent");
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "redis-server cannot be started"));
    assert_non_null(strstr(run.err, "has ended"));
}

static void test_addresses(void **state)
{
    (void)state;
    BENCH("--url", "dir:/tmp");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "redis://HOST:PORT"));
    BENCH("--url", "rediss://127.0.0.1");
    assert_int_equal(run.code, 2);
    BENCH("--url", "nonsense");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "nonsense"));
}

/* Another program of that name, that somebody kills: the signal is told. */
static void test_redis_benchmark_is_killed(void **state)
{
    char dir[128], path[192], env[256];
    FILE *file;

    (void)state;
    if (!redis_rig_able())
        return;
    rig_dir_make(dir, sizeof(dir));
    snprintf(path, sizeof(path), "%s/redis-benchmark", dir);
    file = fopen(path, "w");
    assert_non_null(file);
    fputs("#!/bin/sh\nkill -9 $$\n", file);
    fclose(file);
    assert_int_equal(chmod(path, 0700), 0);
    snprintf(env, sizeof(env), "PATH=%s:/usr/local/bin:/usr/bin:/bin", dir);
    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", "bench", "remote", SMALL, NULL}, NULL,
             env);
    rig_dir_remove(dir);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "ended by signal 9"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_server_of_its_own),
        cmocka_unit_test(test_a_server_that_is_given),
        cmocka_unit_test(test_no_server_can_be_started),
        cmocka_unit_test(test_addresses),
        cmocka_unit_test(test_redis_benchmark_is_killed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
