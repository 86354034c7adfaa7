/* Goal: `kvtier bench sessions` says what it did: every session is held when DRAM and disk are
 * large enough, the classes of its turns add up, and without a GPU it exits 1 with a reason.
 *
 * Method: the built tool over the fake driver, a small model, pages for a third of the sessions.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <string.h>

#include "gpu/gpu.h"
#include "support/run_tool.h"

static struct tool_run run;

static long long number(const json_t *object, const char *name)
{
    const json_t *value = json_object_get(object, name);
    assert_true(json_is_integer(value));
    return json_integer_value(value);
}

/* Other tests of the fake driver bring a table of kernels along (CMakeLists.txt). */
static void test_build_without_kernels(void **state)
{
    struct kvt_gpu *gpu;
    struct kvt_gpu_opts opts = {.library = KVT_FAKE_CUDA};
    char reason[200];
    (void)state;
    if (kvt_gpu_kernels_built())
        skip();
    assert_int_equal(kvt_gpu_open(&opts, &gpu, reason, sizeof(reason)), KVT_E_UNSUPPORTED);
    assert_non_null(strstr(reason, "no GPU kernels in this build"));
}

static void test_sessions(void **state)
{
    static const char *const names[] = {"l0", "dram", "mixed", "disk", "recomputed"};
    const char *const argv[] = {"kvtier",    "bench",      "sessions", "--driver", KVT_FAKE_CUDA,
                                "--layers",  "2",          "--pool",   "16MiB",    "--dram",
                                "96MiB",     "--json",     "--tokens", "512",      "--prompt",
                                "32",        "--sessions", "12",       "--turns",  "2",
                                "--percent", "10",         NULL};
    long long turns = 0;
    (void)state;
    if (!kvt_gpu_kernels_built())
        skip();
    tool_run(&run, KVT_TOOL, argv, NULL, NULL);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.err, "C(512) = 0.012 s"));
    json_t *all = json_loads(run.out, 0, NULL);
    assert_non_null(all);
    for (size_t i = 0; i < 5; i++)
        turns += number(json_object_get(json_object_get(all, "turns"), names[i]), "turns");
    assert_int_equal(turns, 24);
    assert_int_equal(number(all, "hbm_only_bf16"), 4);
    assert_true(json_is_true(json_object_get(all, "complete")));
    assert_int_equal(number(all, "turns_taken"), 24);
    assert_true(number(all, "hbm_pages_used_after_fill") > number(all, "hbm_pages_used_before"));
    assert_float_equal(json_real_value(json_object_get(all, "held")), 12.0, 0.01);
    assert_float_equal(json_real_value(json_object_get(all, "held_ratio")), 3.0, 0.01);
    assert_int_equal(number(all, "evicted_unsaved"), 0);
    assert_true(number(json_object_get(json_object_get(all, "turns"), "dram"), "turns") > 0);
    json_decref(all);
}

/* A run that has no time for all its turns says so, with what it has seen. */
static void test_sessions_cut_short(void **state)
{
    const char *const argv[] = {"kvtier",      "bench",   "sessions",    "--driver",  KVT_FAKE_CUDA,
                                "--layers",    "2",       "--pool",      "16MiB",     "--dram",
                                "96MiB",       "--json",  "--tokens",    "512",       "--sessions",
                                "12",          "--turns", "64",          "--seconds", "1",
                                "--us-linear", "1000000", "--ps-square", "0",         NULL};
    (void)state;
    if (!kvt_gpu_kernels_built())
        skip();
    tool_run(&run, KVT_TOOL, argv, NULL, NULL);
    assert_int_equal(run.code, 0);
    json_t *all = json_loads(run.out, 0, NULL);
    assert_non_null(all);
    assert_true(json_is_false(json_object_get(all, "complete")));
    assert_true(number(all, "sessions_filled") <= 12);
    assert_true(number(all, "turns_taken") < 12LL * 64);
    assert_true(json_real_value(json_object_get(all, "held")) <=
                (double)number(all, "sessions_filled"));
    json_decref(all);
}

/* Loads by layers in the bench: one range is a load as a whole, more come first. */
static void test_bench_layers(void **state)
{
    const char *const argv[] = {"kvtier",     "bench",  "gpu",    "--driver", KVT_FAKE_CUDA,
                                "--blocks",   "16",     "--reps", "1",        "--geometry",
                                "8b",         "--json", "--ctas", "4",        "--no-gemm",
                                "--no-cache", NULL};
    size_t i;
    long long before = 0;
    json_t *one, *all;
    (void)state;
    if (!kvt_gpu_kernels_built())
        skip();
    tool_run(&run, KVT_TOOL, argv, NULL, NULL);
    assert_int_equal(run.code, 0);
    all = json_loads(run.out, 0, NULL);
    assert_non_null(all);
    assert_int_equal(json_array_size(json_object_get(all, "layers")), 5);
    json_array_foreach(json_object_get(all, "layers"), i, one)
    {
        assert_true(i > 0 || number(one, "ranges") == 1);
        assert_true(number(one, "ranges") >= before);
        before = number(one, "ranges");
        assert_true(json_real_value(json_object_get(one, "first_seconds")) <=
                    json_real_value(json_object_get(one, "seconds")));
    }
    assert_true(before > 4);
    json_decref(all);
}

static void test_no_gpu(void **state)
{
    const char *const argv[] = {"kvtier", "bench", "sessions", "--driver", "/nonexistent.so", NULL};
    (void)state;
    tool_run(&run, KVT_TOOL, argv, NULL, NULL);
    assert_int_equal(run.code, 1);
    assert_true(strlen(run.err) > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_build_without_kernels), cmocka_unit_test(test_sessions),
        cmocka_unit_test(test_sessions_cut_short), cmocka_unit_test(test_bench_layers),
        cmocka_unit_test(test_no_gpu)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
