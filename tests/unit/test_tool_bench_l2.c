/* Goal: `kvtier bench l2` measures a drive or says that it did not: backend, sizes of requests and
 *       the share of the page cache are told, records are verified, nothing is left behind, and a
 *       run that never read the lower tier fails (C85).
 * Method: the built binary on small logs: in a directory of the build, and on a file system in
 *         memory, where nothing ever comes from a drive. fio is a script of the test that answers
 * as fio does, so the figures of that side are known. Speeds are only checked to be figures.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bench_l2.h"
#include "kvtier/error.h"
#include "support/run_tool.h"

static char base[256];
static struct tool_run run;

static void tool(const char *env, const char *const argv[])
{
    tool_run(&run, KVT_TOOL, argv, NULL, env);
}
#define BENCH_ENV(env, ...) \
    tool(env, (const char *const[]){"kvtier", "bench", "l2", __VA_ARGS__, NULL})
#define BENCH(...) BENCH_ENV(NULL, __VA_ARGS__)
#define SMALL "--size", "32MiB", "--block", "1MiB", "--pairs", "2"

static int setup(void **state)
{
    (void)state;
    snprintf(base, sizeof(base), "bench-l2-test-XXXXXX"); /* on the drive of the build */
    return mkdtemp(base) ? 0 : -1;
}

static int teardown(void **state)
{
    char path[300];

    (void)state;
    snprintf(path, sizeof(path), "%s/fio", base);
    (void)unlink(path);
    return rmdir(base); /* nothing else may be left */
}

static int entries_in(const char *path)
{
    struct dirent *entry;
    DIR *dir = opendir(path);
    int n = 0;

    assert_non_null(dir);
    while ((entry = readdir(dir)))
        n += strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..");
    closedir(dir);
    return n;
}

static json_t *report(void)
{
    json_error_t error;
    json_t *document = json_loads(run.out, 0, &error);

    if (!document)
        fail_msg("no JSON (%s): %s%s", error.text, run.out, run.err);
    return document;
}

static double number(json_t *document, const char *name)
{
    json_t *value = json_object_get(document, name);

    if (!json_is_number(value))
        fail_msg("%s is no number: %s", name, run.out);
    return json_number_value(value);
}

/* Bytes at most that the requests of a histogram can have moved, and their number. */
static uint64_t histogram(json_t *document, const char *name, uint64_t *requests)
{
    json_t *sizes = json_object_get(document, name), *count;
    uint64_t bytes = 0;
    const char *size;

    *requests = 0;
    json_object_foreach(sizes, size, count)
    {
        *requests += (uint64_t)json_integer_value(count);
        bytes += strtoull(size, NULL, 10) * (uint64_t)json_integer_value(count);
    }
    return bytes;
}

static void test_c85_says_what_it_measured(void **state)
{
    uint64_t reads, writes, bytes;

    (void)state;
    BENCH("--dir", base, "--json", SMALL);
    json_t *document = report();
    double drive = number(document, "bytes_from_drive");

    assert_int_equal(run.code, drive > 0 ? 0 : 1); /* the build may lie on a tmpfs */
    assert_true(number(document, "read_gbps") > 0 && number(document, "write_gbps") > 0);
    assert_true(json_is_boolean(json_object_get(document, "direct_io")));
    assert_true(strlen(json_string_value(json_object_get(document, "backend"))) > 3);
    assert_true(strlen(json_string_value(json_object_get(document, "backend_why"))) > 3);
    assert_null(json_object_get(document, "fio_read_gbps")); /* not asked for */
    bytes = histogram(document, "read_sizes", &reads);
    assert_true(bytes >= 2 * (32u << 20));
    assert_true(reads <= 2 * 3 * 32); /* of eight records each, but where a segment ends */
    (void)histogram(document, "write_sizes", &writes);
    assert_true(writes >= 2 * 32);
    if (json_is_true(json_object_get(document, "direct_io"))) {
        assert_true(drive >= 2 * (32u << 20));
        assert_true(number(document, "page_cache_share") < 0.01);
    }
    json_decref(document);
    assert_int_equal(entries_in(base), 0);
    BENCH("--dir", base, SMALL);
    assert_non_null(strstr(run.out, "backend "));
    assert_non_null(strstr(run.out, "read sizes "));
    assert_non_null(strstr(run.out, "page cache "));
    assert_int_equal(entries_in(base), 0);
}

static void test_c85_memory_is_no_lower_tier(void **state)
{
    char dir[] = "/dev/shm/bench-l2-test-XXXXXX";

    (void)state;
    if (!mkdtemp(dir)) {
        print_message("[   SKIP   ] no tmpfs on /dev/shm\n");
        skip();
    }
    BENCH("--dir", dir, "--json", SMALL);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "never read"));
    json_t *document = report();
    assert_true(number(document, "bytes_from_drive") == 0);
    assert_true(number(document, "page_cache_share") == 1);
    assert_true(json_is_false(json_object_get(document, "direct_io")));
    json_decref(document);
    assert_int_equal(entries_in(dir), 0);
    assert_int_equal(rmdir(dir), 0);
}

/* ---- several roots ---- */

static void test_beside_one_root(void **state)
{
    (void)state;
    BENCH("--dir", base, "--json", "--roots", "3", "--size", "64MiB", "--block", "1MiB", "--pairs",
          "2", "--depth", "2");
    json_t *document = report(), *sides = json_object_get(document, "roots"), *side;
    static const int roots[] = {1, 3};
    size_t i;

    assert_int_equal(json_array_size(sides), 2);
    json_array_foreach(sides, i, side)
    {
        assert_true(number(side, "roots") == roots[i]);
        assert_true(number(side, "read_gbps") > 0 && number(side, "write_gbps") > 0);
        assert_true(number(side, "disk_share") > 0.5 && number(side, "disk_share") <= 1);
    }
    side = json_array_get(sides, 1);
    for (i = 0; i < 2; i++) { /* two pairs: between the smallest and the largest of both sides */
        double ratio = number(side, i ? "read_ratio" : "write_ratio");

        assert_true(ratio > 0.001 && ratio < 1000);
    }
    json_decref(document);
    assert_int_equal(entries_in(base), 0);
    BENCH("--dir", base, "--roots", "2", SMALL, "--depth", "1");
    assert_non_null(strstr(run.out, "read  store   one root "));
    assert_non_null(strstr(run.out, "   2 roots "));
    assert_int_equal(entries_in(base), 0);
    BENCH("--dir", base, "--roots", "1", SMALL);
    assert_int_equal(run.code, 2);
    BENCH("--dir", base, "--roots", "17", SMALL);
    assert_int_equal(run.code, 2);
}

/* ---- fio ---- */

/* A fio that notes nothing and answers with fixed figures; `says` is a shell command. */
static const char *fake_fio(const char *says)
{
    static char env[600];
    char path[300], cwd[256];
    FILE *f;

    snprintf(path, sizeof(path), "%s/fio", base);
    f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f, "#!/bin/sh\n%s\n", says);
    fclose(f);
    assert_int_equal(chmod(path, 0700), 0);
    assert_non_null(getcwd(cwd, sizeof(cwd)));
    snprintf(env, sizeof(env), "PATH=%s/%s:/usr/bin:/bin", cwd, base);
    return env;
}

static void test_beside_fio(void **state)
{
    const char *env = fake_fio(
        "case \"$*\" in *--ioengine=io_uring*) ;; *) exit 1;; esac\n"
        "case \"$*\" in *--bs=1048576*) ;; *) exit 1;; esac\n"
        "case \"$*\" in *--iodepth=8*) ;; *) exit 1;; esac\n"
        "case \"$*\" in *--size=33554432*) ;; *) exit 1;; esac\n"
        "echo 'fio: a note'\n"
        "echo '{\"jobs\":[{\"read\":{\"io_bytes\":9,\"runtime\":1,\"bw_bytes\":2000000000},"
        "\"write\":{\"io_bytes\":9,\"runtime\":1,\"bw_bytes\":1000000000}}]}'");

    (void)state;
    BENCH_ENV(env, "--dir", base, "--json", "--fio", SMALL);
    json_t *document = report();

    assert_true(number(document, "fio_read_gbps") == 2.0);
    assert_true(number(document, "fio_write_gbps") == 1.0);
    assert_int_equal(json_array_size(json_object_get(document, "each_pair")), 2);
    /* two pairs: the median of the ratios is their mean, and fio's figure is the same in both */
    assert_true(fabs(number(document, "read_ratio") - number(document, "read_gbps") / 2) < 1e-6);
    assert_true(fabs(number(document, "write_ratio") - number(document, "write_gbps")) < 1e-6);
    json_decref(document);
    BENCH_ENV(env, "--dir", base, "--fio", SMALL);
    assert_non_null(strstr(run.out, "fio 2.00 GB/s"));
    assert_int_equal(entries_in(base), 1); /* the script */
}

static void test_fio_that_fails(void **state)
{
    static const struct {
        const char *script, *words;
    } cases[] = {{"echo 'no such engine'; exit 1", "no such engine"},
                 {"echo nothing", "cannot be read"},
                 {"echo '{\"jobs\":[]}'", "cannot be read"},
                 {"kill -9 $$", "fio failed"}};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        BENCH_ENV(fake_fio(cases[i].script), "--dir", base, "--fio", SMALL);
        assert_int_equal(run.code, 1);
        if (!strstr(run.err, cases[i].words))
            fail_msg("%s: %s", cases[i].words, run.err);
        assert_int_equal(entries_in(base), 1);
    }
    BENCH_ENV("PATH=/nonexistent", "--dir", base, "--fio", SMALL);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "package \"fio\""));
}

/* ---- usage ---- */

static void test_usage(void **state)
{
    (void)state;
    BENCH("--json");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "--dir"));
    BENCH("--dir", base, "--io", "io_uring");
    assert_int_equal(run.code, 2);
    BENCH("--dir", base, "--block", "1MiB", "--record", "96KiB");
    assert_int_equal(run.code, 2);
    BENCH("--dir", base, "--block", "1MiB", "--record", "8KiB");
    assert_int_equal(run.code, 2);
    BENCH("--dir", base, "--block", "4MiB", "--size", "8MiB");
    assert_int_equal(run.code, 2);
    BENCH("--dir", "/nonexistent/at/all", SMALL);
    assert_int_equal(run.code, 1);
    BENCH("--dir", base, "--size", "32MiB"); /* segments of 1 MiB, records of 512 KiB */
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "--record"));
    assert_int_equal(entries_in(base), 0);
}

/* ---- the halves by themselves ---- */

/* A damaged record is an error of the pass, not a figure. */
static void test_reads_are_verified(void **state)
{
    struct kvt_bench_l2_shape shape = {
        .bytes = 16 << 20, .block = 512 << 10, .record = 64 << 10, .depth = 2, .direct = -1};
    struct kvt_bench_log *log = NULL;
    char why[256], path[400];
    int64_t ns = 0;

    (void)state;
    assert_int_equal(kvt_bench_log_open(base, &shape, &log, why, sizeof(why)), 0);
    assert_int_equal(kvt_bench_log_read(log, &ns), 0);
    assert_true(ns > 0);
    assert_int_equal(kvt_bench_log_write(log, &ns), 0);
    assert_int_equal(kvt_bench_log_read(log, &ns), 0);
    for (unsigned segment = 0; segment < 24; segment++) { /* wherever the records are */
        static char zeros[256 << 10];

        snprintf(path, sizeof(path), "%s/log/seg-%08x", base, segment);
        int fd = open(path, O_WRONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        assert_int_equal(pwrite(fd, zeros, sizeof(zeros), 300 << 10), sizeof(zeros));
        close(fd);
    }
    assert_int_equal(kvt_bench_log_read(log, &ns), KVT_E_CORRUPT);
    kvt_bench_log_close(log);
    assert_int_equal(entries_in(base), 0);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_c85_says_what_it_measured),
        T(test_c85_memory_is_no_lower_tier),
        T(test_beside_fio),
        T(test_beside_one_root),
        T(test_fio_that_fails),
        T(test_usage),
        T(test_reads_are_verified),
    };
#undef T

    return cmocka_run_group_tests_name("tool_bench_l2", tests, NULL, NULL);
}
