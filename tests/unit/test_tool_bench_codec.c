/* Goal: `kvtier bench codec` measures what was asked for and never prints an empty table: rows of
 *       576 are MLA at kv8 and raw, rows of K and V at lower levels when these are asked for; bits
 *       an element are those of the format; wrong words are refused with the right ones.
 * Method: the built binary on a small pool, one round; figures are checked to be figures.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <math.h>
#include <string.h>

#include "support/run_tool.h"

static struct tool_run run;

static void tool(const char *const argv[])
{
    tool_run(&run, KVT_TOOL, argv, NULL, NULL);
}
#define BENCH(...)                                                                            \
    tool((const char *const[]){"kvtier", "bench", "codec", "--size", "1MiB", "--rounds", "1", \
                               __VA_ARGS__, NULL})

static json_t *results(size_t count)
{
    json_t *report = json_loads(run.out, 0, NULL);

    if (run.code || !report)
        fail_msg("%d\n%s%s", run.code, run.out, run.err);
    json_t *list = json_incref(json_object_get(report, "results"));
    json_decref(report);
    if (json_array_size(list) != count)
        fail_msg("%zu results instead of %zu", json_array_size(list), count);
    return list;
}

static void check_one(const json_t *result, const char *level, int dim, const char *rows,
                      double bits)
{
    assert_string_equal(json_string_value(json_object_get(result, "level")), level);
    assert_int_equal(json_integer_value(json_object_get(result, "dim")), dim);
    assert_string_equal(json_string_value(json_object_get(result, "rows")), rows);
    assert_true(fabs(json_real_value(json_object_get(result, "bits_per_element")) - bits) < 0.07);
    for (const char *const *name =
             (const char *const[]){"encode_gbps", "decode_gbps", "memcpy_gbps", NULL};
         *name; name++)
        assert_true(json_real_value(json_object_get(result, *name)) > 0);
    /* a row whose rounds disagree says so */
    const double spread = json_real_value(json_object_get(result, "spread"));
    assert_true(spread >= 0);
    assert_true(json_is_true(json_object_get(result, "noisy")) == (spread > 0.15));
}

static void test_levels(void **state)
{
    static const struct {
        const char *level;
        double bits; /* of docs/codec.md at d = 128, K and V in equal parts */
    } levels[] = {{"int4", 4.125}, {"kv4", 4.19}, {"kv5", 4.69},
                  {"kv6", 6.19},   {"kv8", 8.19}, {"raw", 16}};

    (void)state;
    BENCH("--dim", "128", "--dtype", "bf16", "--json");
    json_t *list = results(6);
    for (size_t i = 0; i < 6; i++)
        check_one(json_array_get(list, i), levels[i].level, 128, "kv", levels[i].bits);
    json_decref(list);
    BENCH("--dim", "128", "--dtype", "f16", "--level", "kv4", "--isa", "scalar");
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "one core, scalar"));
    assert_non_null(strstr(run.out, "spread"));
    assert_non_null(strstr(run.out, "kv4    f16     128"));
}

static void test_mla(void **state)
{
    (void)state;
    BENCH("--dim", "576", "--dtype", "bf16", "--json"); /* what is stored */
    json_t *list = results(2);
    check_one(json_array_get(list, 0), "kv8", 576, "mla", 8.25);
    check_one(json_array_get(list, 1), "raw", 576, "mla", 16);
    json_decref(list);
    BENCH("--dim", "576", "--dtype", "bf16", "--level", "kv4", "--json"); /* what was asked for */
    list = results(1);
    check_one(json_array_get(list, 0), "kv4", 576, "kv", 4.25);
    json_decref(list);
    BENCH("--dim", "576", "--dtype", "bf16", "--level", "kv4");
    assert_non_null(strstr(run.out, "MLA latents are never stored below kv8"));
    BENCH("--dim", "576", "--dtype", "bf16", "--level", "kv8");
    assert_int_equal(run.code, 0);
    assert_null(strstr(run.out, "rows of K and V"));
}

static void test_refusals(void **state)
{
    static const char *const words[][3] = {
        {"--level", "kv3", "not one of int4, kv4"}, {"--dtype", "f8", "not one of bf16"},
        {"--dim", "100", "not a multiple of 16"},   {"--dim", "2048", "outside 16..1024"},
        {"--isa", "mmx", "not one of scalar"},      {"--rounds", "0", "outside 1..99"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        BENCH(words[i][0], words[i][1]);
        assert_int_equal(run.code, 2);
        assert_string_equal(run.out, "");
        if (!strstr(run.err, words[i][2]))
            fail_msg("%s %s: %s", words[i][0], words[i][1], run.err);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_levels),
        cmocka_unit_test(test_mla),
        cmocka_unit_test(test_refusals),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
