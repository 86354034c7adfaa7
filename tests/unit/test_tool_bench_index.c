/* Goal: `kvtier bench index` measures a store that really holds what it says: the root is made,
 *       opened by a new process, every lookup is checked; nothing is left behind; a root with
 *       fewer blocks than promised, a damaged one or a foreign directory is a problem, not a
 *       figure.
 * Method: the built binary on small roots in a directory of its own. Speeds are only checked to be
 *         figures; bytes a block are checked against the limit of 48.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bench_index.h"
#include "support/run_tool.h"

static char base[256], root[300];
static struct tool_run run;

static void tool(const char *const argv[])
{
    tool_run(&run, KVT_TOOL, argv, NULL, NULL);
}
#define BENCH(...) tool((const char *const[]){"kvtier", "bench", "index", __VA_ARGS__, NULL})

static int setup(void **state)
{
    (void)state;
    snprintf(base, sizeof(base), "%s/kvt-bench-index-XXXXXX",
             getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    assert_non_null(mkdtemp(base));
    snprintf(root, sizeof(root), "%s/root", base);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    kvt_bench_root_remove(root);
    return rmdir(base);
}

static int files_below(const char *path)
{
    struct dirent *entry;
    DIR *dir = opendir(path);
    int n = 0;

    assert_non_null(dir);
    while ((entry = readdir(dir)))
        n += entry->d_name[0] != '.';
    closedir(dir);
    return n;
}

static double figure(const json_t *report, const char *name)
{
    const json_t *value = json_object_get(report, name);

    if (!json_is_number(value))
        fail_msg("%s is no number in %s", name, run.out);
    return json_number_value(value);
}

static void check_report(double blocks, double chain)
{
    json_t *report = json_loads(run.out, 0, NULL);

    if (run.code || !report)
        fail_msg("%d\n%s%s", run.code, run.out, run.err);
    assert_true(figure(report, "blocks") == blocks);
    assert_true(figure(report, "chain_blocks") == chain);
    /* tables have a fixed surplus, which weighs in a small store */
    assert_true(figure(report, "bytes_per_block") >= 40 &&
                figure(report, "bytes_per_block") <= (blocks >= 200000 ? 48 : 64));
    assert_true(figure(report, "resident_bytes_per_block") > 0);
    assert_true(figure(report, "open_s") > 0 && figure(report, "open_s") < 60);
    assert_true(figure(report, "ns_open_s") > 0);
    assert_true(figure(report, "lookups_per_s") > 1000);
    assert_true(figure(report, "searches_per_s") >= figure(report, "lookups_per_s"));
    assert_true(figure(report, "fingerprints_per_s") >= figure(report, "lookups_per_s"));
    assert_true(figure(report, "chain_lookup_ms") > 0);
    assert_true(figure(report, "chain_lookup_first_ms") > 0);
    assert_true(json_is_boolean(json_object_get(report, "direct_io")));
    assert_true(figure(report, "cached_bytes") >= 0);
    json_decref(report);
}

static void test_measures_and_removes(void **state)
{
    (void)state;
    BENCH("--blocks", "200000", "--rounds", "3", "--dir", base, "--json");
    check_report(200000, 8192);
    assert_int_equal(files_below(base), 0);
    BENCH("--blocks", "2000", "--chain", "7", "--rounds", "1", "--dir", base);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "2000 blocks"));
    assert_non_null(strstr(run.out, "7 keys by kvt_lookup()"));
    assert_int_equal(files_below(base), 0);
}

/* The halves alone, and what the second one says of roots that are not what they should be. */
static void test_halves(void **state)
{
    char path[400];
    uint8_t byte = 0;

    (void)state;
    BENCH("--blocks", "20000", "--dir", root, "--only-make");
    assert_int_equal(run.code, 0);
    BENCH("--blocks", "20000", "--dir", root, "--only-make");
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "holds a store already"));
    BENCH("--blocks", "20000", "--rounds", "3", "--dir", root, "--only-measure", "--json");
    check_report(20000, 8192);

    BENCH("--blocks", "20001", "--dir", root, "--only-measure");
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "20000 of 20001 blocks were found"));
    /* chains twice as long as those that were made: the lookup must not be believed */
    BENCH("--blocks", "20000", "--chain", "16384", "--dir", root, "--only-measure", "--rounds",
          "1");
    assert_int_equal(run.code, 0); /* all keys are there: a lookup does not look at parents */

    /* one bit of an entry in a footer (the last entries lie before the trailer): those are lost */
    snprintf(path, sizeof(path), "%s/seg-00000000", root);
    int fd = open(path, O_RDWR);
    struct stat st;
    assert_true(fd >= 0 && fstat(fd, &st) == 0);
    assert_int_equal(pread(fd, &byte, 1, st.st_size - 2 * 4096), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, st.st_size - 2 * 4096), 1);
    close(fd);
    BENCH("--blocks", "20000", "--dir", root, "--only-measure");
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "of 20000 blocks were found"));
}

/* The command takes the page cache away from itself, and says how much was left. */
static void test_drop_cache(void **state)
{
    const struct kvt_bench_root made = {root, 5000, 100};
    char path[400];

    (void)state;
    assert_int_equal(kvt_bench_root_make(&made), 0);
    int64_t cached = kvt_bench_root_drop_cache(&made);
    snprintf(path, sizeof(path), "%s/seg-00000000", root);
    int fd = open(path, O_RDONLY);
    char *bytes = malloc(1 << 20);
    assert_true(fd >= 0 && bytes);
    assert_true(pread(fd, bytes, 1 << 20, 0) > 4096);
    free(bytes);
    close(fd);
    assert_true(cached >= 0);
    assert_true(kvt_bench_root_drop_cache(&made) <= cached + (1 << 20));
    kvt_bench_root_remove(root);
    assert_int_equal(access(root, F_OK), -1);
    assert_true(kvt_bench_root_drop_cache(&made) < 0);
}

static void test_keys(void **state)
{
    struct kvt_key a, b;

    (void)state;
    kvt_bench_root_key(7, &a);
    kvt_bench_root_key(7, &b);
    assert_memory_equal(&a, &b, sizeof(a));
    for (uint64_t i = 0; i < 1000; i++) {
        kvt_bench_root_key(i == 7 ? 1000 : i, &b);
        assert_memory_not_equal(a.hash, b.hash, sizeof(a.hash));
    }
}

static void test_refusals(void **state)
{
    char path[400];

    (void)state;
    BENCH("--only-make");
    assert_int_equal(run.code, 2);
    BENCH("--only-make", "--only-measure", "--dir", root);
    assert_int_equal(run.code, 2);
    BENCH("--blocks", "1023");
    assert_int_equal(run.code, 2);
    BENCH("--blocks", "2000", "--chain", "2001");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "more than --blocks"));
    BENCH("--dir", "/nonexistent/anywhere");
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "/nonexistent/anywhere"));
    BENCH("--dir", root, "--only-measure");
    assert_int_equal(run.code, 1);
    assert_int_equal(mkdir(root, 0700), 0);
    snprintf(path, sizeof(path), "%s/seg-00000000", root);
    int fd = open(path, O_CREAT | O_WRONLY, 0600);
    assert_int_equal(write(fd, "theirs", 6), 6);
    close(fd);
    BENCH("--dir", root, "--only-make");
    assert_int_equal(run.code, 1);
    assert_int_equal(access(path, F_OK), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_measures_and_removes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_halves, setup, teardown),
        cmocka_unit_test_setup_teardown(test_drop_cache, setup, teardown),
        cmocka_unit_test(test_keys),
        cmocka_unit_test_setup_teardown(test_refusals, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
