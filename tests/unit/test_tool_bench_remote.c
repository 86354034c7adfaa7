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

/* Neither redis-benchmark nor the server is to blame. */
static void test_interrupted(void **state)
{
    static const char *const after[] = {"0.3", "0.6", "1", "1.5"};

    (void)state;
    if (!redis_rig_able())
        return;
    for (size_t i = 0; i < 4; i++) {
        tool_run(&run, "/bin/sh",
                 (const char *const[]){"sh", "-c",
                                       "timeout --preserve-status -s INT $1 \"$0\" bench remote "
                                       "--records 20000 --size 4KiB --rounds 31 >/dev/null; "
                                       "echo code $?",
                                       KVT_TOOL, after[i], NULL},
                 NULL, NULL);
        if (strcmp(run.out, "code 130\n") == 0)
            continue; /* before the work */
        assert_string_equal(run.out, "code 1\n");
        assert_string_equal(run.err, "kvtier: interrupted\n");
    }
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

/* With another program of that name: a script of the shell. */
static void bench_with(const char *script)
{
    char dir[128], path[192], env[256];
    FILE *file;

    rig_dir_make(dir, sizeof(dir));
    snprintf(path, sizeof(path), "%s/redis-benchmark", dir);
    file = fopen(path, "w");
    assert_non_null(file);
    fprintf(file, "#!/bin/sh\n%s\n", script);
    fclose(file);
    assert_int_equal(chmod(path, 0700), 0);
    snprintf(env, sizeof(env), "PATH=%s:/usr/local/bin:/usr/bin:/bin", dir);
    tool_run(&run, KVT_TOOL,
             (const char *const[]){"kvtier", "bench", "remote", SMALL, "--json", NULL}, NULL, env);
    rig_dir_remove(dir);
}

/* Somebody kills it: the signal is told. */
static void test_redis_benchmark_is_killed(void **state)
{
    (void)state;
    if (!redis_rig_able())
        return;
    bench_with("kill -9 $$");
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "ended by signal 9"));
}

/* It counts milliseconds, and less than one is an infinite rate: then there is more to do. And it
 * takes it badly when its number is not one of whole pipelines. */
static void test_redis_benchmark_is_too_fast_to_tell(void **state)
{
    (void)state;
    if (!redis_rig_able())
        return;
    bench_with("while [ $# -gt 1 ]; do\n"
               "case $1 in -t) what=$2 ;; -n) number=$2 ;; -P) pipeline=$2 ;; esac; shift; done\n"
               "[ $((number % pipeline)) = 0 ] || exit 1\n"
               "rate=inf; [ $number -lt 800 ] || rate=5000.00\n"
               "what=$(echo $what | tr a-z A-Z); echo \"\\\"$what\\\",\\\"$rate\\\"\"");
    check_json();
    json_t *out = json_loads(run.out, 0, NULL);
    assert_non_null(out);
    assert_true(json_real_value(json_object_get(json_object_get(out, "put"),
                                                "redis_benchmark_mb_per_s")) == 5000 * 0.06144);
    json_decref(out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_server_of_its_own),
        cmocka_unit_test(test_a_server_that_is_given),
        cmocka_unit_test(test_no_server_can_be_started),
        cmocka_unit_test(test_interrupted),
        cmocka_unit_test(test_addresses),
        cmocka_unit_test(test_redis_benchmark_is_killed),
        cmocka_unit_test(test_redis_benchmark_is_too_fast_to_tell),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
