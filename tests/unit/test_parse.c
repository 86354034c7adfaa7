/* Strict parsing and suggestions.
 *
 * Goal:   every accepted text has one exact value; everything else is refused and leaves the output
 *         alone (C82: bad unit, string for a bool).
 * Method: tables of texts with their values, and of refusals; round trips of random numbers.
 */
#include "base/parse.h"

#include "support/store_help.h"

#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "kvtier/error.h"

#define UNTOUCHED 0x5a5a5a5a5a5a5a5a

static const struct {
    const char *text;
    uint64_t bytes;
} sizes[] = {
    {"0", 0},
    {"1", 1},
    {"4096", 4096},
    {"007", 7},
    {"4096B", 4096},
    {"64GiB", 64ull << 30},
    {"4MB", 4000000},
    {"1KiB", 1024},
    {"1kB", 1000},
    {"1MiB", 1 << 20},
    {"1GB", 1000000000},
    {"1TB", 1000000000000},
    {"1TiB", 1ull << 40},
    {"1.5GiB", 3ull << 29},
    {"0.5KiB", 512},
    {"7.68TB", 7680000000000},
    {"0.001KiB", 1}, /* 1.024 bytes: cut */
    {"1.000000001GB", 1000000001},
    {"0.0MiB", 0},
    {"16777215TiB", 16777215ull << 40},
    {"18446744073709551615", UINT64_MAX},
};

static const struct {
    const char *text;
    int error;
} bad_sizes[] = {
    {"", KVT_E_CONFIG_VALUE},
    {NULL, KVT_E_CONFIG_VALUE},
    {"GiB", KVT_E_CONFIG_VALUE},
    {" 1", KVT_E_CONFIG_VALUE},
    {"1 ", KVT_E_CONFIG_VALUE},
    {"1 GiB", KVT_E_CONFIG_VALUE},
    {"1GiB ", KVT_E_CONFIG_VALUE},
    {"64G", KVT_E_CONFIG_VALUE},
    {"64gib", KVT_E_CONFIG_VALUE},
    {"64GIB", KVT_E_CONFIG_VALUE},
    {"64GiBs", KVT_E_CONFIG_VALUE},
    {"64GiB64", KVT_E_CONFIG_VALUE},
    {"-1", KVT_E_CONFIG_VALUE},
    {"+1", KVT_E_CONFIG_VALUE},
    {"0x10", KVT_E_CONFIG_VALUE},
    {"1e9", KVT_E_CONFIG_VALUE},
    {"1,5GiB", KVT_E_CONFIG_VALUE},
    {"1.5", KVT_E_CONFIG_VALUE},
    {"1.5B", KVT_E_CONFIG_VALUE},
    {".5GiB", KVT_E_CONFIG_VALUE},
    {"1.GiB", KVT_E_CONFIG_VALUE},
    {"1.2.3GiB", KVT_E_CONFIG_VALUE},
    {"1.0000000001GiB", KVT_E_CONFIG_VALUE},
    {"inf", KVT_E_CONFIG_VALUE},
    {"nan", KVT_E_CONFIG_VALUE},
    {"18446744073709551616", KVT_E_LIMIT},
    {"99999999999999999999999999", KVT_E_LIMIT},
    {"16777216TiB", KVT_E_LIMIT},
    {"99999999999999999999999999GiB", KVT_E_LIMIT},
    {"99999999999999999999999999XiB", KVT_E_CONFIG_VALUE},
};

static void test_size(void **state)
{
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(sizes); i++) {
        uint64_t value = UNTOUCHED;

        assert_int_equal(kvt_parse_size(sizes[i].text, &value), 0);
        assert_int_equal(value, sizes[i].bytes);
    }
    for (size_t i = 0; i < KVT_ARRAY_LEN(bad_sizes); i++) {
        uint64_t value = UNTOUCHED;
        int rc = kvt_parse_size(bad_sizes[i].text, &value);

        if (rc != bad_sizes[i].error)
            print_message("'%s' gave %d\n", bad_sizes[i].text, rc);
        assert_int_equal(rc, bad_sizes[i].error);
        assert_int_equal(value, UNTOUCHED);
    }
}

static void test_size_random(void **state)
{
    static const char *const units[] = {"", "B", "KiB", "MiB", "GiB", "TiB"};
    static const int shifts[] = {0, 0, 10, 20, 30, 40};
    struct kvt_rng rng = {test_seed()};

    (void)state;
    for (int i = 0; i < 100000; i++) {
        size_t unit = kvt_rng_below(&rng, KVT_ARRAY_LEN(units));
        uint64_t number = kvt_rng_next(&rng) >> kvt_rng_below(&rng, 64), value = UNTOUCHED;
        int fits = number <= UINT64_MAX >> shifts[unit], rc;
        char text[40];

        snprintf(text, sizeof text, "%llu%s", (unsigned long long)number, units[unit]);
        rc = kvt_parse_size(text, &value);
        assert_int_equal(rc, fits ? 0 : KVT_E_LIMIT);
        assert_int_equal(value, fits ? number << shifts[unit] : UNTOUCHED);
    }
}

static void test_duration(void **state)
{
    static const struct {
        const char *text;
        int64_t ns;
    } good[] = {
        {"0", 0},
        {"1ns", 1},
        {"250us", 250000},
        {"250ms", 250000000},
        {"1.5s", 1500000000},
        {"2min", 120000000000},
        {"1h", 3600000000000},
        {"7d", 604800000000000},
        {"0s", 0},
        {"0.000000001s", 1},
        {"9223372036s", 9223372036000000000},
    };
    static const struct {
        const char *text;
        int error;
    } bad[] = {
        {"", KVT_E_CONFIG_VALUE},
        {"1", KVT_E_CONFIG_VALUE},
        {"100", KVT_E_CONFIG_VALUE},
        {"-1s", KVT_E_CONFIG_VALUE},
        {"1sec", KVT_E_CONFIG_VALUE},
        {"1S", KVT_E_CONFIG_VALUE},
        {"1m", KVT_E_CONFIG_VALUE},
        {"1 s", KVT_E_CONFIG_VALUE},
        {"1.5ns", KVT_E_CONFIG_VALUE},
        {"GiB", KVT_E_CONFIG_VALUE},
        {"9223372037s", KVT_E_LIMIT},
        {"106752d", KVT_E_LIMIT},
        {"99999999999999999999d", KVT_E_LIMIT},
        {NULL, KVT_E_CONFIG_VALUE},
    };

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(good); i++) {
        int64_t value = UNTOUCHED;

        assert_int_equal(kvt_parse_duration(good[i].text, &value), 0);
        assert_int_equal(value, good[i].ns);
    }
    for (size_t i = 0; i < KVT_ARRAY_LEN(bad); i++) {
        int64_t value = UNTOUCHED;

        assert_int_equal(kvt_parse_duration(bad[i].text, &value), bad[i].error);
        assert_int_equal(value, UNTOUCHED);
    }
}

static void test_bool(void **state)
{
    static const char *const yes[] = {"yes", "true", "on", "1"};
    static const char *const no[] = {"no", "false", "off", "0"};
    static const char *const bad[] = {"", "Yes", "TRUE", "y", "2", " 1", "1 ", "maybe", "nope"};
    int value;

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(yes); i++) {
        value = 7;
        assert_int_equal(kvt_parse_bool(yes[i], &value), 0);
        assert_int_equal(value, 1);
        assert_int_equal(kvt_parse_bool(no[i], &value), 0);
        assert_int_equal(value, 0);
    }
    value = 7;
    for (size_t i = 0; i < KVT_ARRAY_LEN(bad); i++)
        assert_int_equal(kvt_parse_bool(bad[i], &value), KVT_E_CONFIG_VALUE);
    assert_int_equal(kvt_parse_bool(NULL, &value), KVT_E_CONFIG_VALUE);
    assert_int_equal(value, 7);
}

static void test_int(void **state)
{
    int64_t v = 7;

    (void)state;
    assert_int_equal(kvt_parse_int("42", 0, 100, &v), 0);
    assert_int_equal(v, 42);
    assert_int_equal(kvt_parse_int("-42", -100, 100, &v), 0);
    assert_int_equal(v, -42);
    assert_int_equal(kvt_parse_int("9223372036854775807", INT64_MIN, INT64_MAX, &v), 0);
    assert_true(v == INT64_MAX);
    assert_int_equal(kvt_parse_int("-9223372036854775808", INT64_MIN, INT64_MAX, &v), 0);
    assert_true(v == INT64_MIN);
    v = 7;
    assert_int_equal(kvt_parse_int("9223372036854775808", INT64_MIN, INT64_MAX, &v), KVT_E_LIMIT);
    assert_int_equal(kvt_parse_int("-9223372036854775809", INT64_MIN, INT64_MAX, &v), KVT_E_LIMIT);
    assert_int_equal(kvt_parse_int("101", 0, 100, &v), KVT_E_LIMIT);
    assert_int_equal(kvt_parse_int("-1", 0, 100, &v), KVT_E_LIMIT);
    assert_int_equal(kvt_parse_int("", 0, 100, &v), KVT_E_CONFIG_VALUE);
    assert_int_equal(kvt_parse_int("-", 0, 100, &v), KVT_E_CONFIG_VALUE);
    assert_int_equal(kvt_parse_int("--1", -9, 100, &v), KVT_E_CONFIG_VALUE);
    assert_int_equal(kvt_parse_int("+1", 0, 100, &v), KVT_E_CONFIG_VALUE);
    assert_int_equal(kvt_parse_int("1.0", 0, 100, &v), KVT_E_CONFIG_VALUE);
    assert_int_equal(kvt_parse_int("1x", 0, 100, &v), KVT_E_CONFIG_VALUE);
    assert_int_equal(kvt_parse_int(" 1", 0, 100, &v), KVT_E_CONFIG_VALUE);
    assert_int_equal(kvt_parse_int("0x1", 0, 100, &v), KVT_E_CONFIG_VALUE);
    assert_int_equal(kvt_parse_int(NULL, 0, 100, &v), KVT_E_CONFIG_VALUE);
    assert_int_equal(v, 7);
}

/* Plain recursive definition of the distance (optimal string alignment), for short words. */
static unsigned slow_distance(const char *a, size_t n, const char *b, size_t m)
{
    unsigned best, other;

    if (!n || !m)
        return (unsigned)(n + m);
    best = slow_distance(a, n - 1, b, m - 1) + (a[n - 1] != b[m - 1]);
    other = slow_distance(a, n - 1, b, m) + 1;
    best = KVT_MIN(best, other);
    other = slow_distance(a, n, b, m - 1) + 1;
    best = KVT_MIN(best, other);
    if (n > 1 && m > 1 && a[n - 1] == b[m - 2] && a[n - 2] == b[m - 1]) {
        other = slow_distance(a, n - 2, b, m - 2) + 1;
        best = KVT_MIN(best, other);
    }
    return best;
}

static void test_edit_distance(void **state)
{
    struct kvt_rng rng = {test_seed()};
    char longer[200], longest[200];

    (void)state;
    assert_int_equal(kvt_edit_distance("", ""), 0);
    assert_int_equal(kvt_edit_distance("abc", ""), 3);
    assert_int_equal(kvt_edit_distance("", "abc"), 3);
    assert_int_equal(kvt_edit_distance("dram", "darm"), 1);
    assert_int_equal(kvt_edit_distance("DRAM", "dram"), 0);
    assert_int_equal(kvt_edit_distance("pin-max", "pin_max"), 0);
    assert_int_equal(kvt_edit_distance("kitten", "sitting"), 3);
    for (int i = 0; i < 3000; i++) {
        char a[8] = {0}, b[8] = {0};
        size_t n = kvt_rng_below(&rng, 7), m = kvt_rng_below(&rng, 7);

        for (size_t j = 0; j < n; j++)
            a[j] = (char)('a' + kvt_rng_below(&rng, 3));
        for (size_t j = 0; j < m; j++)
            b[j] = (char)('a' + kvt_rng_below(&rng, 3));
        assert_int_equal(kvt_edit_distance(a, b), slow_distance(a, n, b, m));
    }
    memset(longer, 'x', sizeof longer);
    memset(longest, 'y', sizeof longest);
    longer[150] = longest[199] = 0;
    assert_int_equal(kvt_edit_distance(longer, longest), 63); /* no more is looked at */
}

static void test_nearest(void **state)
{
    static const char *const keys[] = {"dram", "disk", "level", "pin_max", "write_queue"};
    size_t n = KVT_ARRAY_LEN(keys);

    (void)state;
    assert_string_equal(kvt_nearest("dram", keys, n), "dram");
    assert_string_equal(kvt_nearest("darm", keys, n), "dram");
    assert_string_equal(kvt_nearest("drams", keys, n), "dram");
    assert_string_equal(kvt_nearest("Disk", keys, n), "disk");
    assert_string_equal(kvt_nearest("levle", keys, n), "level");
    assert_string_equal(kvt_nearest("pin-max", keys, n), "pin_max");
    assert_string_equal(kvt_nearest("write_queu", keys, n), "write_queue");
    assert_string_equal(kvt_nearest("writequeue", keys, n), "write_queue");
    assert_null(kvt_nearest("colour", keys, n));
    assert_null(kvt_nearest("", keys, n));
    assert_null(kvt_nearest("dram", keys, 0));
    assert_string_equal(kvt_nearest_size_unit("64gib"), "GiB");
    assert_string_equal(kvt_nearest_size_unit("64G"), "GB");
    assert_string_equal(kvt_nearest_size_unit("1.5gb"), "GB");
    assert_string_equal(kvt_nearest_size_unit("12 MiB"), "MiB");
    assert_null(kvt_nearest_size_unit("12 parsec"));
    assert_null(kvt_nearest_size_unit(NULL));
    /* nothing to do with the unit, or another one */
    assert_null(kvt_nearest_size_unit("-1"));
    assert_null(kvt_nearest_size_unit(""));
    assert_null(kvt_nearest_size_unit("0"));
    assert_null(kvt_nearest_size_unit("-1GiB"));
    assert_null(kvt_nearest_size_unit("16EiB"));
    assert_null(kvt_nearest_size_unit("2PB"));
    assert_string_equal(kvt_nearest_duration_unit("3S"), "s");
    assert_string_equal(kvt_nearest_duration_unit("3mins"), "min");
    assert_null(kvt_nearest_duration_unit("3 fortnights"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_size),     cmocka_unit_test(test_size_random),
        cmocka_unit_test(test_duration), cmocka_unit_test(test_bool),
        cmocka_unit_test(test_int),      cmocka_unit_test(test_edit_distance),
        cmocka_unit_test(test_nearest),
    };

    return cmocka_run_group_tests_name("parse", tests, NULL, NULL);
}
