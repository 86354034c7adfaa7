/* The probe of the direct path, and cuFile by dlopen, against a fake cuFile over the fake driver.
 *
 * Goal:   "direct" is said only when the library's own counters prove it; compat mode, an old or
 *         absent library, refusals, errors, short reads and wrong bytes each get their own
 * sentence, and nothing is left behind: file, registration, memory, driver, log. Method:
 * fake_cufile.c counts reads by the path that the test names and fails on demand; files are real
 * ones. The fake's statistics have the layouts of 1.15 and 1.20.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "base/rng.h"
#include "gpu/fake_cuda.h"
#include "gpu/fake_cufile.h"
#include "gpu/gds.h"
#include "support/run_tool.h"

static struct fake_cuda *cuda;
static struct fake_cufile *cufile, *old_cufile;
static struct kvt_gpu *gpu;
static char dir[64];

static void *fake_of(const char *library, const char *symbol)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    return handle != NULL ? dlsym(handle, symbol) : NULL;
}

static int load_fakes(void **state)
{
    (void)state;
    /* Where the build is: /tmp may be a file system without O_DIRECT. */
    snprintf(dir, sizeof(dir), "./test-gds-XXXXXX");
    if (mkdtemp(dir) == NULL)
        return -1;
    cuda = fake_of(KVT_FAKE_CUDA, "fake_cuda");
    cufile = fake_of(KVT_FAKE_CUFILE, "fake_cufile");
    old_cufile = fake_of(KVT_FAKE_CUFILE_OLD, "fake_cufile");
    return cuda != NULL && cufile != NULL && old_cufile != NULL ? 0 : -1;
}

static int unload(void **state)
{
    (void)state;
    return rmdir(dir);
}

static int reset(void **state)
{
    char reason[256] = "";
    struct kvt_gpu_opts opts = {.device = 0, .library = KVT_FAKE_CUDA};
    (void)state;
    memset(cuda, 0, sizeof(*cuda));
    cuda->version = 13000;
    cuda->device_count = 1;
    cuda->capability = 90;
    cuda->seed = 7;
    memset(cufile, 0, sizeof(*cufile));
    cufile->version = 1200;
    cufile->path = FAKE_P2P;
    unsetenv("CUFILE_LOGFILE_PATH");
    unsetenv("CUFILE_FORCE_COMPAT_MODE");
    if (kvt_gpu_open(&opts, &gpu, reason, sizeof(reason)) != 0) {
        print_message("%s\n", reason);
        return -1;
    }
    return 0;
}

static size_t files_left(void)
{
    size_t count = 0;
    const struct dirent *entry;
    DIR *d = opendir(dir);
    assert_non_null(d);
    while ((entry = readdir(d)) != NULL)
        count += entry->d_name[0] != '.' || entry->d_name[1] == 'k';
    closedir(d);
    return count;
}

/* Whatever a test did, nothing is left. */
static int check(void **state)
{
    (void)state;
    kvt_gpu_close(gpu);
    gpu = NULL;
    assert_int_equal(files_left(), 0);
    assert_int_equal(cufile->opened, 0);
    assert_int_equal(cufile->handles, 0);
    assert_int_equal(cufile->buffers, 0);
    assert_int_equal(cufile->started, 0);
    assert_int_equal(cufile->misaligned, 0);
    assert_int_equal(cuda->memory, 0);
    assert_int_equal(cuda->host_memory, 0);
    assert_int_equal(cuda->streams, 0);
    assert_int_equal(cuda->retained, 0);
    assert_int_equal(cuda->context_depth, 0);
    assert_int_equal(cuda->out_of_context, 0);
    assert_int_not_equal(access("cufile.log", F_OK), 0);
    return 0;
}

static struct kvt_gds_report probe_with(const char *library)
{
    struct kvt_gds_report report;
    struct kvt_gds_opts opts = {.dir = dir, .library = library, .bytes = 4u << 20};
    assert_int_equal(kvt_gds_probe(gpu, &opts, &report), 0);
    assert_int_not_equal(report.reason[0], '\0');
    return report;
}

static struct kvt_gds_report probe(void)
{
    return probe_with(KVT_FAKE_CUFILE);
}

static void assert_says(const struct kvt_gds_report *report, enum kvt_gds_verdict verdict,
                        const char *words)
{
    if (report->verdict != verdict || strstr(report->reason, words) == NULL)
        fail_msg("%s: %s; wanted %s: %s", kvt_gds_name(report->verdict), report->reason,
                 kvt_gds_name(verdict), words);
}

/* ---- the library --------------------------------------------------------------------------- */

static void test_absent(void **state)
{
    (void)state;
    struct kvt_gds_report report = probe_with("libcufile-that-is-not-there.so");
    assert_says(&report, KVT_GDS_ABSENT, "no libcufile on this machine");
    assert_non_null(strstr(report.remedy, "install libcufile"));
    assert_int_equal(report.version, 0);
    assert_int_equal(report.has_proof, 0);
}

static void test_too_old(void **state)
{
    (void)state;
    old_cufile->version = 1130;
    struct kvt_gds_report report = probe_with(KVT_FAKE_CUFILE_OLD);
    assert_says(&report, KVT_GDS_ABSENT, "has no cuFileDriverClose_v2: 1.15");
    cufile->version = 1140;
    report = probe();
    assert_says(&report, KVT_GDS_ABSENT, "is version 1.14: 1.15");
    assert_int_equal(cufile->opened, 0);
    assert_int_equal(cufile->reads, 0);
}

static void test_refuses_to_start(void **state)
{
    (void)state;
    cufile->open_code = 5001;
    struct kvt_gds_report report = probe();
    assert_says(&report, KVT_GDS_ABSENT, "1.20 refuses to start: nvidia-fs is not loaded");
    assert_non_null(strstr(report.reason, "5001"));
}

/* Without a CUDA driver cuFile 1.20 spins for ever when it is started. */
static void test_no_device_no_start(void **state)
{
    struct kvt_cufile one;
    struct kvt_cufile_opts opts = {.library = KVT_FAKE_CUFILE};
    char reason[256];
    (void)state;
    assert_int_equal(kvt_cufile_open(&one, NULL, &opts, reason, sizeof(reason)), KVT_E_INVAL);
    assert_string_equal(cufile->log_path, "");
}

/* Its log goes where we say, or where the user said, never into the current directory. */
static void test_log(void **state)
{
    struct kvt_gds_report report;
    struct kvt_gds_opts opts = {
        .dir = dir, .library = KVT_FAKE_CUFILE, .log = "some.log", .bytes = 1u << 20};
    (void)state;
    report = probe();
    assert_string_equal(cufile->log_path, "/dev/null");
    assert_null(getenv("CUFILE_LOGFILE_PATH"));
    assert_int_equal(kvt_gds_probe(gpu, &opts, &report), 0);
    assert_string_equal(cufile->log_path, "some.log");
    setenv("CUFILE_LOGFILE_PATH", "/tmp/mine.log", 1);
    assert_int_equal(kvt_gds_probe(gpu, &opts, &report), 0);
    assert_string_equal(cufile->log_path, "/tmp/mine.log");
    assert_string_equal(getenv("CUFILE_LOGFILE_PATH"), "/tmp/mine.log");
}

/* ---- verdicts ------------------------------------------------------------------------------ */

static void test_direct(void **state)
{
    static const struct {
        int path;
        const char *words;
    } paths[] = {{FAKE_P2P, "PCI P2PDMA"}, {FAKE_NVFS, "nvidia-fs"}};
    (void)state;
    for (int old = 0; old < 2; old++)
        for (size_t i = 0; i < 2; i++) {
            cufile->path = paths[i].path;
            cufile->old_statistics = old;
            cufile->version = old ? 1150 : 1200;
            cufile->gpu = old ? 0 : 15;
            struct kvt_gds_report report = probe();
            assert_says(&report, KVT_GDS_DIRECT, paths[i].words);
            assert_int_equal(report.has_proof, 1);
            assert_int_equal(report.after.reads - report.before.reads, 1);
            assert_int_equal(report.after.bytes - report.before.bytes, KVT_GDS_READ_BYTES);
            assert_int_equal(report.after.posix, report.before.posix);
            assert_true(report.read_gbps > 0 && report.ordinary_gbps > 0);
            assert_string_equal(report.remedy, "");
        }
    assert_string_equal(kvt_gds_name(KVT_GDS_DIRECT), "direct");
}

/* Compat mode is the library's silent way out: no flag tells, the counters do. */
static void test_c46_compat_is_never_direct(void **state)
{
    (void)state;
    cufile->path = FAKE_POSIX;
    struct kvt_gds_report report = probe();
    assert_says(&report, KVT_GDS_COMPAT, "nvidia-fs is not loaded, and there is no PCI P2PDMA");
    assert_int_equal(report.has_proof, 1);
    assert_int_equal(report.after.posix - report.before.posix, 1);
    assert_int_equal(report.after.p2p + report.after.nvfs, report.before.p2p + report.before.nvfs);
    assert_non_null(strstr(report.remedy, "load nvidia-fs"));
    cufile->nvfs_version = 2; /* every flag promises a direct path: they are not believed */
    cufile->features = KVT_CF_FEATURE_P2P;
    report = probe();
    assert_says(&report, KVT_GDS_COMPAT, "does not serve this file system");
    cufile->nvfs_version = 0;
    report = probe();
    assert_says(&report, KVT_GDS_COMPAT, "P2PDMA does not serve");
    setenv("CUFILE_FORCE_COMPAT_MODE", "true", 1);
    report = probe();
    assert_says(&report, KVT_GDS_COMPAT, "CUFILE_FORCE_COMPAT_MODE=true asks for it");
    assert_string_equal(report.remedy, "unset CUFILE_FORCE_COMPAT_MODE");
    assert_string_equal(kvt_gds_name(report.verdict), "compat");
}

/* A read of which one part went through the CPU is not direct. */
static void test_mixed(void **state)
{
    (void)state;
    cufile->path = FAKE_MIXED;
    struct kvt_gds_report report = probe();
    assert_says(&report, KVT_GDS_COMPAT, "posix");
    assert_int_equal(report.after.p2p - report.before.p2p, 1);
    assert_int_equal(report.after.posix - report.before.posix, 1);
}

/* Counters that do not move, are refused, or lie elsewhere, prove nothing. */
static void test_no_proof(void **state)
{
    (void)state;
    cufile->path = FAKE_SILENT;
    struct kvt_gds_report report = probe();
    assert_says(&report, KVT_GDS_COMPAT, "direct is not proved");
    assert_int_equal(report.has_proof, 0);
    cufile->path = FAKE_P2P;
    cufile->stats_code = 5030;
    report = probe();
    assert_says(&report, KVT_GDS_COMPAT, "direct is not proved");
    cufile->stats_code = 0;
}

/* Words at random never look like a read of the right size. */
static void test_unknown_layout(void **state)
{
    struct kvt_rng rng = {.state = 46};
    struct kvt_cufile_stats before, after;
    struct kvt_cufile_paths from, to;
    (void)state;
    print_message("seed 46\n");
    for (int round = 0; round < 10000; round++) {
        memset(&before, 0, sizeof(before));
        for (size_t i = 0; i < 1024; i++)
            before.words[i] = kvt_rng_below(&rng, 4);
        after = before;
        size_t changed = kvt_rng_below(&rng, 20);
        for (size_t i = 0; i < changed; i++)
            after.words[kvt_rng_below(&rng, 700)] += kvt_rng_below(&rng, 3);
        assert_int_equal(kvt_cufile_understand(&before, &after, 1u << 20, &from, &to), 0);
    }
    /* A read whose paths do not add up to it. */
    memset(&before, 0, sizeof(before));
    after = before;
    after.words[129 + KVT_CF_READ_BYTES] = 1u << 20;
    after.words[129 + KVT_CF_READS] = 2;
    after.words[129 + KVT_CF_P2P_READS] = 1;
    assert_int_equal(kvt_cufile_understand(&before, &after, 1u << 20, &from, &to), 0);
    after.words[129 + KVT_CF_P2P_READS] = 2;
    assert_int_equal(kvt_cufile_understand(&before, &after, 1u << 20, &from, &to), 1);
    assert_int_equal(to.p2p, 2);
    assert_int_equal(kvt_cufile_understand(&before, &after, 2u << 20, &from, &to), 0);
}

/* ---- refusals and errors ------------------------------------------------------------------- */

static void test_refuses_registration(void **state)
{
    (void)state;
    cufile->handle_code = 5027;
    struct kvt_gds_report report = probe();
    assert_says(&report, KVT_GDS_ABSENT, "refuses to register a file");
    assert_non_null(strstr(report.reason, "5027"));
    assert_non_null(strstr(report.remedy, "ext4 or xfs"));
    assert_int_equal(cufile->reads, 0);
    cufile->handle_code = 0;
    cufile->buffer_code = 5036;
    report = probe();
    assert_says(&report, KVT_GDS_ABSENT, "refuses to register GPU memory: no pinned GPU memory");
    assert_int_equal(cufile->reads, 0);
}

static void test_read_errors(void **state)
{
    (void)state;
    cufile->read_code = EIO;
    struct kvt_gds_report report = probe();
    assert_says(&report, KVT_GDS_ABSENT, "refuses to read: Input/output error");
    cufile->read_code = 5011;
    report = probe();
    assert_says(&report, KVT_GDS_ABSENT, "the CUDA driver failed (error 5011)");
    cufile->read_code = 5999; /* one that nobody knows */
    report = probe();
    assert_says(&report, KVT_GDS_ABSENT, "an error of cuFile (error 5999)");
    /* The proof is there, the figures are not. */
    cufile->read_code = EIO;
    cufile->reads = 0;
    cufile->reads_good = 1;
    report = probe();
    assert_says(&report, KVT_GDS_DIRECT, "P2PDMA");
    assert_true(report.read_gbps == 0 && report.ordinary_gbps > 0);
}

static void test_short_read(void **state)
{
    (void)state;
    cufile->short_by = 4096;
    struct kvt_gds_report report = probe();
    assert_says(&report, KVT_GDS_ABSENT, "read 1044480 of 1048576 bytes");
}

static void test_wrong_bytes(void **state)
{
    (void)state;
    cufile->wrong = 1;
    struct kvt_gds_report report = probe();
    assert_says(&report, KVT_GDS_ABSENT, "other bytes than were written");
    cufile->wrong = 0;
    cufile->does_nothing = 1;
    report = probe();
    assert_says(&report, KVT_GDS_ABSENT, "other bytes than were written");
}

/* More bytes than asked for would be a defect of the library: an error, not a count. */
static void test_too_many_bytes(void **state)
{
    (void)state;
    cufile->short_by = -4096;
    struct kvt_gds_report report = probe();
    assert_says(&report, KVT_GDS_ABSENT, "refuses to read");
}

/* ---- kvtier doctor ------------------------------------------------------------------------- */

static struct tool_run run;

static json_t *doctor_gds(const char *const argv[], const char *env)
{
    json_error_t error;
    json_t *check, *found = NULL;
    size_t i;
    tool_run(&run, KVT_TOOL, argv, NULL, env);
    json_t *report = json_loads(run.out, 0, &error);
    if (report == NULL)
        fail_msg("no JSON (%s): %s%s", error.text, run.out, run.err);
    json_array_foreach(json_object_get(report, "checks"), i, check)
    {
        if (strcmp(json_string_value(json_object_get(check, "name")), "gds") == 0)
            found = json_incref(check);
    }
    json_decref(report);
    assert_non_null(found);
    return found;
}

static json_int_t moved(json_t *check, const char *counter)
{
    return json_integer_value(json_object_get(json_object_get(check, "after"), counter)) -
           json_integer_value(json_object_get(json_object_get(check, "before"), counter));
}

/* The verdict with its proof, by the tool itself, which finds the fakes where it looks for the real
 * libraries. */
static void test_doctor(void **state)
{
    char links[] = "./test-gds-links-XXXXXX", cuda_link[64], cufile_link[64], env[256];
    char here[128];
    (void)state;
    assert_non_null(mkdtemp(links));
    assert_non_null(getcwd(here, sizeof(here)));
    snprintf(cuda_link, sizeof(cuda_link), "%s/libcuda.so.1", links);
    snprintf(cufile_link, sizeof(cufile_link), "%s/libcufile.so.0", links);
    assert_int_equal(symlink(KVT_FAKE_CUDA, cuda_link), 0);
    assert_int_equal(symlink(KVT_FAKE_CUFILE, cufile_link), 0);
    snprintf(env, sizeof(env), "LD_LIBRARY_PATH=%s/%s", here, links);
    const char *with[] = {"kvtier", "doctor", "--json", "--dir", dir, "--probe", "2MiB", NULL};
    const char *without[] = {"kvtier", "doctor", "--json", NULL};
    json_t *check = doctor_gds(with, env);
    print_message("%s\n", json_string_value(json_object_get(check, "detail")));
    assert_string_equal(json_string_value(json_object_get(check, "verdict")), "compat");
    assert_int_equal(moved(check, "n_posix_reads"), 1);
    assert_int_equal(moved(check, "n_p2p_reads"), 0);
    assert_int_equal(moved(check, "n_nvfs_reads"), 0);
    assert_int_equal(moved(check, "read_bytes"), KVT_GDS_READ_BYTES);
    assert_true(json_real_value(json_object_get(check, "read_gbps")) > 0);
    assert_non_null(strstr(run.out, "for a direct path"));
    json_decref(check);
    check = doctor_gds(without, env);
    assert_non_null(strstr(json_string_value(json_object_get(check, "detail")), "--dir DIR"));
    json_decref(check);
    assert_int_equal(unlink(cufile_link), 0);
    assert_int_equal(unlink(cuda_link), 0);
    assert_int_equal(rmdir(links), 0);
}

/* ---- bad input ----------------------------------------------------------------------------- */

static void test_bad_input(void **state)
{
    struct kvt_gds_report report;
    struct kvt_gds_opts opts = {.dir = NULL, .library = KVT_FAKE_CUFILE, .bytes = 1u << 20};
    (void)state;
    assert_int_equal(kvt_gds_probe(gpu, &opts, &report), KVT_E_INVAL);
    opts.dir = dir;
    opts.bytes = 0;
    assert_int_equal(kvt_gds_probe(gpu, &opts, &report), KVT_E_INVAL);
    opts.bytes = 4096;
    assert_int_equal(kvt_gds_probe(gpu, &opts, &report), KVT_E_INVAL);
    opts.bytes = 1u << 20;
    opts.dir = "./not-there";
    assert_int_equal(kvt_gds_probe(gpu, &opts, &report), -ENOENT);
    assert_non_null(strstr(report.reason, "./not-there"));
    char long_name[5000];
    memset(long_name, 'a', sizeof(long_name));
    long_name[sizeof(long_name) - 1] = '\0';
    opts.dir = long_name;
    assert_int_equal(kvt_gds_probe(gpu, &opts, &report), -ENAMETOOLONG);
    assert_int_not_equal(report.reason[0], '\0');
}

/* Every call to the GPU may be the one that fails. */
static void test_gpu_fails(void **state)
{
    static const char *const calls[] = {"cuMemAlloc", "cuMemHostAlloc",
                                        "cuStreamCreateWithPriority", "cuMemsetD32Async",
                                        "cuMemcpyDtoHAsync"};
    struct kvt_gds_opts opts = {.dir = dir, .library = KVT_FAKE_CUFILE, .bytes = 1u << 20};
    (void)state;
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        struct kvt_gds_report report;
        cuda->fail = calls[i];
        cuda->fail_result = 2;
        assert_int_equal(kvt_gds_probe(gpu, &opts, &report), -ENOMEM);
        assert_int_not_equal(report.reason[0], '\0');
        assert_int_equal(report.verdict, KVT_GDS_ABSENT);
    }
    cuda->fail = NULL;
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, reset, check)
    const struct CMUnitTest tests[] = {
        T(test_absent),
        T(test_too_old),
        T(test_refuses_to_start),
        T(test_no_device_no_start),
        T(test_log),
        T(test_direct),
        T(test_c46_compat_is_never_direct),
        T(test_mixed),
        T(test_no_proof),
        T(test_unknown_layout),
        T(test_refuses_registration),
        T(test_read_errors),
        T(test_short_read),
        T(test_wrong_bytes),
        T(test_too_many_bytes),
        T(test_doctor),
        T(test_bad_input),
        T(test_gpu_fails),
    };
#undef T
    if (!kvt_gpu_kernels_built()) {
        print_message("skipped: no GPU kernels in this build, so no device opens\n");
        return 77;
    }
    return cmocka_run_group_tests(tests, load_fakes, unload);
}
