/* The small modules of base: errors, version, clock, seeds, log, checked arithmetic.
 *
 * Goal:   codes are unique, in their range and all have text; the rest does what its header says.
 * Method: direct calls; the error list is walked by its own X-macro.
 */
#include "support/store_help.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/rng.h"
#include "kvtier/error.h"
#include "kvtier/version.h"

static const struct {
    const char *name;
    int value;
    const char *text;
} errors[] = {
#define KVT_X(name, value, text) {#name, value, text},
    KVT_ERRORS(KVT_X)
#undef KVT_X
};

static void test_error_list(void **state)
{
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(errors); i++) {
        assert_true(errors[i].value < -5000 && errors[i].value > -6000);
        assert_string_equal(kvt_strerror(errors[i].value), errors[i].text);
        assert_string_equal(kvt_error_name(errors[i].value), errors[i].name);
        assert_int_equal(strncmp(errors[i].name, "KVT_E_", 6), 0);
        assert_true(strlen(errors[i].text) >= 10);
        for (size_t j = 0; j < i; j++) {
            assert_int_not_equal(errors[i].value, errors[j].value);
            assert_string_not_equal(errors[i].name, errors[j].name);
            assert_string_not_equal(errors[i].text, errors[j].text);
        }
    }
}

static void test_strerror(void **state)
{
    static const int odd[] = {-1073741824, -2147483647 - 1, -5000, -5999, -4096, -4095, -200};

    (void)state;
    assert_string_equal(kvt_strerror(0), "success");
    assert_string_equal(kvt_strerror(7), "success");
    assert_string_equal(kvt_strerror(2147483647), "success");
    assert_string_equal(kvt_strerror(-ENOENT), strerrordesc_np(ENOENT));
    assert_string_equal(kvt_strerror(-ENOSPC), strerrordesc_np(ENOSPC));
    for (size_t i = 0; i < KVT_ARRAY_LEN(odd); i++) {
        assert_non_null(kvt_strerror(odd[i]));
        assert_true(strlen(kvt_strerror(odd[i])) > 0);
        assert_null(kvt_error_name(odd[i]));
    }
    assert_null(kvt_error_name(0));
    assert_null(kvt_error_name(-ENOENT));
}

static void *other_thread(void *arg)
{
    (void)arg;
    (void)kvt_strerror(-1234); /* formats into this thread's buffer */
    return NULL;
}

static void test_strerror_threads(void **state)
{
    const char *mine = kvt_strerror(-999);
    char copy[128];
    pthread_t thread;

    (void)state;
    snprintf(copy, sizeof copy, "%s", mine);
    assert_int_equal(pthread_create(&thread, NULL, other_thread, NULL), 0);
    pthread_join(thread, NULL);
    assert_string_equal(mine, copy);
}

static void test_version(void **state)
{
    char text[32];

    (void)state;
    snprintf(text, sizeof text, "%d.%d.%d", KVT_VERSION_MAJOR, KVT_VERSION_MINOR,
             KVT_VERSION_PATCH);
    assert_string_equal(kvt_version(), text);
    assert_string_equal(KVT_VERSION_STRING, text);
    assert_non_null(strstr(kvt_build_info(), text));
    assert_null(strchr(kvt_build_info(), '\n'));
    print_message("             %s\n", kvt_build_info());
}

static void test_clock(void **state)
{
    struct kvt_clock clock = kvt_clock_system();
    struct timespec nap = {.tv_nsec = 2000000};
    int64_t before = kvt_clock_now(&clock), last = before;

    (void)state;
    for (int i = 0; i < 1000; i++) {
        int64_t now = kvt_clock_now(&clock);
        assert_true(now >= last);
        last = now;
    }
    nanosleep(&nap, NULL);
    assert_true(kvt_clock_now(&clock) - before >= 2000000);
}

static void test_rng(void **state)
{
    struct kvt_rng a = {42}, b = {42}, zero = {0};
    unsigned counts[10] = {0};

    (void)state;
    /* splitmix64's published first outputs for seed 0 */
    assert_true(kvt_rng_next(&zero) == 0xe220a8397b1dcdafu);
    assert_true(kvt_rng_next(&zero) == 0x6e789e6aa1b965f4u);
    assert_true(kvt_rng_next(&zero) == 0x06c45d188009454fu);
    for (int i = 0; i < 100000; i++) {
        assert_true(kvt_rng_next(&a) == kvt_rng_next(&b));
        counts[kvt_rng_below(&zero, 10)]++;
    }
    for (int i = 0; i < 10; i++)
        assert_in_range(counts[i], 9500, 10500);
    assert_int_equal(kvt_rng_below(&a, 1), 0);
    assert_true(kvt_rng_seed_os() != kvt_rng_seed_os());
}

struct sink {
    int calls, level;
    char last[600];
};

static void sink_line(void *arg, int level, const char *message)
{
    struct sink *sink = arg;

    sink->calls++;
    sink->level = level;
    snprintf(sink->last, sizeof sink->last, "%s", message);
}

static void test_log(void **state)
{
    struct sink sink = {0};
    struct kvt_log log = {.fn = sink_line, .arg = &sink, .level_max = KVT_LOG_INFO};
    struct kvt_log silent = {.level_max = KVT_LOG_DEBUG};
    char longer[2000];

    (void)state;
    kvt_log(&log, KVT_LOG_WARN, "%s holds %d", "root", 7);
    assert_int_equal(sink.calls, 1);
    assert_int_equal(sink.level, KVT_LOG_WARN);
    assert_string_equal(sink.last, "root holds 7");
    kvt_log(&log, KVT_LOG_DEBUG, "not wanted");
    assert_int_equal(sink.calls, 1);
    kvt_log(&silent, KVT_LOG_ERROR, "nobody listens");
    kvt_log(NULL, KVT_LOG_ERROR, "nobody at all");
    memset(longer, 'x', sizeof longer);
    longer[sizeof longer - 1] = 0;
    kvt_log(&log, KVT_LOG_ERROR, "%s", longer);
    assert_int_equal(strlen(sink.last), 511);
}

static void test_checked(void **state)
{
    uint64_t u;
    uint32_t w;

    (void)state;
    assert_true(kvt_add_ok((uint64_t)1, (uint64_t)2, &u) && u == 3);
    assert_false(kvt_add_ok(UINT64_MAX, (uint64_t)1, &u));
    assert_false(kvt_mul_ok((uint64_t)1 << 63, (uint64_t)2, &u));
    assert_false(kvt_mul_ok(65536u, 65536u, &w));
    assert_true(kvt_mul_ok(65535u, 65537u, &w) && w == UINT32_MAX);
    assert_int_equal(kvt_round_up(0, 4096), 0);
    assert_int_equal(kvt_round_up(1, 4096), 4096);
    assert_int_equal(kvt_round_up(4096, 4096), 4096);
    assert_int_equal(kvt_round_up(4097, 4096), 8192);
    assert_int_equal(KVT_MIN(3, 4), 3);
    assert_int_equal(KVT_MAX(3, 4), 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_error_list),
        cmocka_unit_test(test_strerror),
        cmocka_unit_test(test_strerror_threads),
        cmocka_unit_test(test_version),
        cmocka_unit_test(test_clock),
        cmocka_unit_test(test_rng),
        cmocka_unit_test(test_log),
        cmocka_unit_test(test_checked),
    };

    return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
