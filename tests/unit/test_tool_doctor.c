/* Goal: `kvtier doctor` tells the truth about this machine, fails exactly when something asked for
 *       does not work, and leaves nothing behind in the directory that it probed.
 * Method: the built binary is run with --json; its figures are compared with what the test reads
 *         itself; every refusal of a directory is provoked.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <jansson.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/checked.h"
#include "doctor.h"
#include "io/io.h"
#include "kvtier/cache.h"
#include "kvtier/config.h"
#include "support/run_tool.h"

static struct tool_run run;
static char dir[256];

static json_t *doctor_env(const char *env, const char *const argv[])
{
    json_error_t error;

    tool_run(&run, KVT_TOOL, argv, NULL, env);
    json_t *report = json_loads(run.out, 0, &error);
    if (!report)
        fail_msg("no JSON (%s): %s%s", error.text, run.out, run.err);
    return report;
}
#define DOCTOR_ENV(env, ...) \
    doctor_env(env, (const char *const[]){"kvtier", "doctor", "--json", __VA_ARGS__, NULL})
#define DOCTOR(...) DOCTOR_ENV(NULL, __VA_ARGS__)

/* The check of that name; the last one counts. */
static json_t *find(json_t *report, const char *name)
{
    json_t *check, *found = NULL;
    size_t i;

    json_array_foreach(json_object_get(report, "checks"), i, check)
    {
        assert_non_null(json_object_get(check, "detail"));
        if (!strcmp(json_string_value(json_object_get(check, "name")), name))
            found = check;
    }
    if (!found)
        fail_msg("no check '%s' in %s", name, run.out);
    return found;
}

static const char *text(json_t *check, const char *key)
{
    const char *value = json_string_value(json_object_get(check, key));
    return value ? value : "";
}

static int entries(const char *path)
{
    DIR *d = opendir(path);
    int n = 0;

    assert_non_null(d);
    while (readdir(d))
        n++;
    closedir(d);
    return n - 2;
}

static void test_machine(void **state)
{
    cpu_set_t set;
    struct rlimit limit;

    (void)state;
    json_t *report = DOCTOR(NULL);
    assert_int_equal(run.code, 0);
    assert_true(json_is_true(json_object_get(report, "ok")));
    assert_int_equal(sched_getaffinity(0, sizeof(set), &set), 0);
    assert_int_equal(json_integer_value(json_object_get(find(report, "cpu"), "cpus")),
                     CPU_COUNT(&set));
    json_t *memory = find(report, "memory");
    int64_t total = json_integer_value(json_object_get(memory, "total_bytes"));
    int64_t pages = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    assert_true(total > pages / 2 && total < pages * 2);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    if (limit.rlim_cur != RLIM_INFINITY)
        assert_int_equal(json_integer_value(json_object_get(find(report, "files"), "files_max")),
                         limit.rlim_cur);
    assert_string_equal(text(find(report, "disk"), "state"), "off"); /* nobody asked */
    const char *gpu = text(find(report, "gpu"), "state");
    if (!strcmp(gpu, "off")) /* with the reason, and what works without */
        assert_non_null(strstr(text(find(report, "gpu"), "detail"), "; pools in host memory work"));
    else
        assert_string_equal(gpu, "ok");
    assert_non_null(strstr(text(find(report, "io_uring"), "detail"), "threads"));
    json_decref(report);
}

/* Options that the machine cannot give are warned of before a cache is opened with them. */
static void test_options_that_do_not_fit(void **state)
{
    char config[600];

    (void)state;
    snprintf(config, sizeof(config), "dram=60TiB,disk=%s/new:900TiB", dir);
    json_t *report = DOCTOR("--config", config);
    assert_int_equal(run.code, 0); /* a warning is no failure */
    assert_string_equal(text(find(report, "dram"), "state"), "warn");
    assert_string_equal(text(find(report, "root"), "state"), "warn");
    assert_non_null(strstr(text(find(report, "root"), "detail"), "more than there is room for"));
    json_decref(report);
    struct statvfs fs;
    assert_int_equal(statvfs(dir, &fs), 0);
    uint64_t block = fs.f_frsize, gap = ((fs.f_blocks - fs.f_bavail) * block) >> 20;
    if (gap > 2048) { /* others write meanwhile */
        snprintf(config, sizeof(config), "disk=%s/new:%lluMiB", dir,
                 (unsigned long long)(((fs.f_bavail * block) >> 20) + gap / 2));
        report = DOCTOR("--config", config);
        assert_int_equal(run.code, 0);
        assert_string_equal(text(find(report, "root"), "state"), "warn");
        assert_non_null(
            strstr(text(find(report, "root"), "detail"), "more than there is room for"));
        json_decref(report);
    }
    snprintf(config, sizeof(config), "disk=/proc/nowhere/at/all:64MiB");
    report = DOCTOR("--config", config);
    assert_int_equal(run.code, 1);
    assert_string_equal(text(find(report, "root"), "state"), "fail");
    json_decref(report);
    assert_int_equal(entries(dir), 0);
}

/* A store that is there: who has it, and what its numbers complain of. */
static void test_store_that_is_there(void **state)
{
    char path[400];

    (void)state;
    snprintf(path, sizeof(path), "%s/stats", dir);
    for (int bad = 0; bad < 2; bad++) {
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        fprintf(f, "lookup.keys 10\nlookup.hits_dram 5\nverify.checksum_fail %d\n", 3 * bad);
        assert_int_equal(fclose(f), 0);
        json_t *report = DOCTOR("--dir", dir, "--probe", "1MiB");
        json_t *store = find(report, "store");
        assert_string_equal(text(store, "state"), bad ? "warn" : "ok");
        assert_int_equal(json_integer_value(json_object_get(store, "warnings")), bad);
        assert_non_null(strstr(text(store, "detail"), "no process owns it"));
        if (bad)
            assert_non_null(strstr(text(store, "detail"), "3 records did not verify"));
        json_decref(report);
    }
    assert_int_equal(unlink(path), 0);
}

static void test_io_uring_is_probed(void **state)
{
    char why[160];
    int rc = kvt_io_uring_probe(why, sizeof(why));

    (void)state;
    json_t *report = DOCTOR(NULL);
    assert_int_equal(strcmp(text(find(report, "io_uring"), "state"), "ok") == 0, rc == 0);
    assert_non_null(strstr(text(find(report, "io_uring"), "detail"), why));
    json_decref(report);
}

static void test_codec(void **state)
{
    char why[200];

    (void)state;
    json_t *report = DOCTOR(NULL);
    json_t *codec = find(report, "codec");
    assert_string_equal(text(codec, "state"), "ok");
    assert_non_null(strstr(text(codec, "detail"), "kv4"));
    assert_non_null(strstr(text(codec, "detail"), "raw"));
    json_decref(report);
    report = DOCTOR_ENV("KVTIER_CODEC_ISA=scalar", NULL);
    assert_int_equal(run.code, 0);
    assert_string_equal(text(find(report, "codec"), "isa"), "scalar");
    json_decref(report);
    assert_int_equal(kvt_doctor_codec(why, sizeof(why)), 0);
    assert_int_equal(kvt_doctor_codec(why, 8), 0); /* a short buffer cuts the sentence, no more */
    assert_true(strlen(why) < 8);
}

static void test_forced_isa_that_is_not_there(void **state)
{
    (void)state;
    json_t *report = DOCTOR_ENV("KVTIER_CODEC_ISA=abacus", NULL);
    assert_int_equal(run.code, 1);
    assert_true(json_is_false(json_object_get(report, "ok")));
    assert_non_null(strstr(run.out, "KVTIER_CODEC_ISA=abacus cannot be had here"));
    json_decref(report);
}

static void test_directory(void **state)
{
    (void)state;
    json_t *report = DOCTOR("--dir", dir, "--probe", "4MiB");
    json_t *disk = find(report, "disk");
    assert_int_equal(run.code, 0);
    assert_string_equal(text(disk, "dir"), dir);
    assert_true(!strcmp(text(disk, "backend"), "posix") || !strcmp(text(disk, "backend"), "uring"));
    assert_true(strlen(text(disk, "backend_why")) > 5);
    assert_true(strlen(text(disk, "why")) > 0);
    assert_int_equal(json_integer_value(json_object_get(disk, "probe_bytes")), 4 << 20);
    assert_true(json_real_value(json_object_get(disk, "write_gbps")) > 0.0);
    assert_true(json_real_value(json_object_get(disk, "read_gbps")) > 0.0);
    /* buffered is a remark, never called direct */
    int direct = json_is_true(json_object_get(disk, "direct"));
    assert_string_equal(text(disk, "state"), direct ? "ok" : "warn");
    assert_int_equal(strstr(text(disk, "detail"), "page cache") != NULL, !direct);
    json_decref(report);
    assert_int_equal(entries(dir), 0);
}

/* Many pieces on a fast file system finish in any order; a probe that mixed them up would report
 * corruption that is its own. */
static void test_pieces_out_of_order(void **state)
{
    struct kvt_doctor_io io;

    (void)state;
    if (access("/dev/shm", W_OK))
        skip();
    for (int i = 0; i < 6; i++)
        if (kvt_doctor_io("/dev/shm", UINT64_C(32) << 20, &io))
            fail_msg("round %d: %s", i, io.why);
}

static void refused(const char *path, const char *sentence)
{
    json_t *report = DOCTOR("--dir", path, "--probe", "1MiB");
    json_t *disk = find(report, "disk");

    assert_int_equal(run.code, 1);
    assert_string_equal(text(disk, "state"), "fail");
    if (!strstr(text(disk, "detail"), sentence) || !strstr(text(disk, "detail"), path))
        fail_msg("%s: %s", path, text(disk, "detail"));
    json_decref(report);
}

/* What kvt_open() refuses is refused here, and left as it was. */
static void test_foreign_directory(void **state)
{
    char name[300];

    (void)state;
    snprintf(name, sizeof(name), "%s/notes.txt", dir);
    int fd = open(name, O_CREAT | O_WRONLY, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "x", 1), 1);
    close(fd);
    refused(dir, "not a kvtier store");
    assert_int_equal(entries(dir), 1);
    assert_int_equal(unlink(name), 0);
}

/* The right reason: /proc is there, and takes no directory. */
static void test_a_place_without_directories(void **state)
{
    (void)state;
    refused("/proc/kvtier", geteuid() == 0 ? "takes no new directories" : "does not exist, and");
}

static void test_owned_directory(void **state)
{
    struct kvt_config *config;
    struct kvt_cache *cache;
    char path[300], value[400], pid[40];

    (void)state;
    snprintf(path, sizeof(path), "%s/store", dir);
    snprintf(value, sizeof(value), "dram=8MiB,direct=off,disk=%s:16MiB", path);
    assert_int_equal(kvt_config_new(&config), 0);
    assert_int_equal(kvt_config_set_all(config, value), 0);
    assert_int_equal(kvt_open(config, &cache, NULL, 0), 0);
    kvt_config_free(config);
    snprintf(pid, sizeof(pid), "process %d", (int)getpid());
    refused(path, pid);
    kvt_close(cache);
    json_t *report = DOCTOR("--dir", path, "--probe", "1MiB"); /* a store of ours that nobody has */
    assert_int_equal(run.code, 0);
    json_decref(report);
    tool_run(&run, "/bin/rm", (const char *const[]){"rm", "-r", path, NULL}, NULL, NULL);
    assert_int_equal(run.code, 0);
}

/* The same sentence from kvt_open(); a cap that is no whole MiB is named as it was given. */
static void test_refusal_names_the_cap(void **state)
{
    struct kvt_config *config;
    struct kvt_cache *cache;
    char value[400], error[512];

    (void)state;
    snprintf(value, sizeof(value), "dram=8MiB,disk_required=yes,disk=%s/small:1KiB", dir);
    assert_int_equal(kvt_config_new(&config), 0);
    assert_int_equal(kvt_config_set_all(config, value), 0);
    assert_true(kvt_open(config, &cache, error, sizeof(error)) < 0);
    kvt_config_free(config);
    if (!strstr(error, "a cap of 1024 bytes is too small: give it 8MiB"))
        fail_msg("%s", error);
    snprintf(value, sizeof(value), "%s/small", dir);
    tool_run(&run, "/bin/rm", (const char *const[]){"rm", "-rf", value, NULL}, NULL, NULL);
}

static void test_new_directory(void **state)
{
    char name[300], link[300], below[320];

    (void)state;
    snprintf(name, sizeof(name), "%s/new/", dir);
    json_t *report = DOCTOR("--dir", name, "--probe", "1MiB");
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(text(find(report, "disk"), "detail"), "will be created"));
    assert_true(json_is_false(json_object_get(find(report, "disk"), "exists")));
    json_decref(report);
    assert_int_equal(entries(dir), 0);            /* a question makes no directory */
    snprintf(link, sizeof(link), "%s/link", dir); /* a parent may be a link, a root may not */
    assert_int_equal(symlink(dir, link), 0);
    snprintf(below, sizeof(below), "%s/new", link);
    json_decref(DOCTOR("--dir", below, "--probe", "1MiB"));
    assert_int_equal(run.code, 0);
    assert_int_equal(unlink(link), 0);
}

static void test_directories_refused(void **state)
{
    char name[300];

    (void)state;
    snprintf(name, sizeof(name), "%s/absent/deep", dir);
    refused(name, "parent directory does not exist");
    assert_int_equal(entries(dir), 0);
    snprintf(name, sizeof(name), "%s/link", dir);
    assert_int_equal(symlink(dir, name), 0);
    refused(name, "symbolic link");
    assert_int_equal(unlink(name), 0);
    snprintf(name, sizeof(name), "%s/file", dir);
    int fd = open(name, O_CREAT | O_WRONLY, 0600);
    assert_true(fd >= 0);
    close(fd);
    refused(name, "is not a directory");
    snprintf(name, sizeof(name), "%s/file/below", dir);
    refused(name, "is not a directory");
    snprintf(name, sizeof(name), "%s/file", dir);
    assert_int_equal(unlink(name), 0);
    refused("/proc/self", ""); /* nothing can be made there */
}

static void test_probe_larger_than_the_disk(void **state)
{
    struct kvt_doctor_io io;

    (void)state;
    int rc = kvt_doctor_io(dir, UINT64_C(1) << 60, &io);
    assert_true(rc < 0);
    assert_non_null(strstr(io.why, "No space"));
    assert_int_equal(entries(dir), 0);
}

static void count_option(void *arg, const char *key, const char *value, const char *default_value,
                         const char *help)
{
    (void)key;
    (void)value;
    (void)default_value;
    (void)help;
    ++*(size_t *)arg;
}

static void test_options(void **state)
{
    struct kvt_config *config;
    size_t count = 0, i;
    json_t *option;
    int seen = 0;

    (void)state;
    assert_int_equal(kvt_config_new(&config), 0);
    kvt_config_each(config, count_option, &count);
    kvt_config_free(config);
    json_t *report = DOCTOR("--config", "dram=3GiB");
    json_t *options = json_object_get(report, "config");
    assert_int_equal(json_array_size(options), count);
    json_array_foreach(options, i, option)
    {
        if (strcmp(text(option, "key"), "dram") != 0)
            continue;
        assert_string_equal(text(option, "value"), "3GiB");
        seen++;
    }
    assert_int_equal(seen, 1);
    json_decref(report);
    tool_run(&run, KVT_TOOL,
             (const char *const[]){"kvtier", "doctor", "--config", "drum=1GiB", NULL}, NULL, NULL);
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "drum"));
    assert_non_null(strstr(run.err, "dram"));
    tool_run(&run, KVT_TOOL,
             (const char *const[]){"kvtier", "doctor", "--config", "dram=much", NULL}, NULL, NULL);
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "dram"));
}

static void test_text(void **state)
{
    (void)state;
    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", "doctor", NULL}, NULL, NULL);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "codec"));
    assert_non_null(strstr(run.out, "options in force"));
    assert_non_null(strstr(run.out, "dram"));
    assert_string_equal(run.err, "");
}

static void test_limits_are_read(void **state)
{
    struct kvt_doctor_memory memory;
    struct rlimit old, low = {.rlim_cur = 40};

    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    low.rlim_max = old.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    kvt_doctor_memory(&memory);
    assert_int_equal(memory.files_max, 40);
    json_t *report = DOCTOR(NULL); /* the limit is inherited */
    assert_string_equal(text(find(report, "files"), "state"), "warn");
    assert_int_equal(run.code, 0); /* a remark is no failure */
    json_decref(report);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
}

static int make_dir(void **state)
{
    (void)state;
    snprintf(dir, sizeof(dir), "%s/kvtier-doctor-XXXXXX",
             getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_dir(void **state)
{
    (void)state;
    return rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_machine),
        cmocka_unit_test(test_options_that_do_not_fit),
        cmocka_unit_test(test_store_that_is_there),
        cmocka_unit_test(test_io_uring_is_probed),
        cmocka_unit_test(test_codec),
        cmocka_unit_test(test_forced_isa_that_is_not_there),
        cmocka_unit_test(test_directory),
        cmocka_unit_test(test_pieces_out_of_order),
        cmocka_unit_test(test_foreign_directory),
        cmocka_unit_test(test_a_place_without_directories),
        cmocka_unit_test(test_owned_directory),
        cmocka_unit_test(test_new_directory),
        cmocka_unit_test(test_refusal_names_the_cap),
        cmocka_unit_test(test_directories_refused),
        cmocka_unit_test(test_probe_larger_than_the_disk),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_limits_are_read),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
