/* Paths of small jobs: measured, kept, and taken.
 *
 * Goal:   the table says what the clock said: the SMs where they are ahead by more than noise, up
 *         to the first number of blocks at which they are not; it is kept for each device and
 *         setting, and measured again when the file is damaged or of another one; small jobs then
 *         go that way, with the same bytes, and large ones by the copy engine; what fails costs
 *         nothing.
 * Method: the fake driver, with a clock that counts its copies and launches instead of time.
 */
#include <errno.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/client.h"
#include "client/gpu_lane_impl.h"
#include "format/hash.h"
#include "gpu/api_rig.h"
#include "gpu/fake_cuda.h"
#include "gpu/tune.h"
#include "support/rig.h"

#define BLOCKS 48u
#define TUNED "dram=16MiB,threads=1,gpu_tune=yes"

static const struct api_shape small = {"small",        2,       2,    64, 16, BLOCKS,
                                       KVT_DTYPE_BF16, API_NHD, false};

/* What a copy and a launch cost, in "time". */
static struct prices {
    int64_t copy, launch;
} prices;

static int64_t count_work(void *ctx)
{
    (void)ctx;
    return prices.copy * (fake->copies + fake->batches) + prices.launch * fake->launches;
}

static struct kvt_clock counting = {count_work, NULL};

static int reset(void **state)
{
    prices = (struct prices){1000, 1};
    return api_fake_reset(state);
}

static struct kvt_gpu *open_gpu(void)
{
    struct kvt_gpu_opts opts = {.library = KVT_FAKE_CUDA};
    struct kvt_gpu *gpu;
    char reason[256];
    if (kvt_gpu_open(&opts, &gpu, reason, sizeof(reason)) != 0)
        fail_msg("%s", reason);
    return gpu;
}

static const struct kvt_gpu_tune_opts little = {.ctas = {4, 4}, .layers = {1, 2, 3}, .runs = 1};

/* ---- the table ---- */

static void test_table(void **state)
{
    struct kvt_gpu_tuned tuned;
    struct kvt_gpu *gpu = open_gpu();
    (void)state;
    assert_int_equal(kvt_gpu_tune(gpu, &counting, &little, &tuned), 0);
    for (uint32_t i = 0; i < KVT_GPU_TUNE_SIZES; i++) {
        assert_true(tuned.record_bytes[i] > (i > 0 ? tuned.record_bytes[i - 1] : 0));
        assert_int_equal(tuned.sm_blocks[0][i], 16); /* copies are dear */
        assert_int_equal(tuned.sm_blocks[1][i], 16);
    }
    prices =
        (struct prices){0, 1000}; /* launches are: the paths differ by one kernel, or by none */
    assert_int_equal(kvt_gpu_tune(gpu, &counting, &little, &tuned), 0);
    prices = (struct prices){0, 0}; /* no difference: the copy engine */
    assert_int_equal(kvt_gpu_tune(gpu, &counting, &little, &tuned), 0);
    for (uint32_t i = 0; i < KVT_GPU_TUNE_SIZES; i++) {
        assert_int_equal(tuned.sm_blocks[0][i], 0);
        assert_int_equal(tuned.sm_blocks[1][i], 0);
    }
    kvt_gpu_close(gpu);
    assert_int_equal(fake->memory, 0);
    assert_int_equal(fake->host_memory, 0);
    assert_int_equal(fake->registered, 0);
    assert_int_equal(fake->streams, 0);
    assert_int_equal(fake->retained, 0);
}

static void test_choice(void **state)
{
    struct kvt_gpu_tuned tuned = {.record_bytes = {1000, 2000, 3000},
                                  .sm_blocks = {{1, 2, 0}, {8, 4, 2}}};
    const struct kvt_gpu_tuned none = {.record_bytes = {0}};
    (void)state;
    assert_int_equal(kvt_gpu_tuned_path(&tuned, 0, 500, 1), KVT_GPU_PATH_SM);
    assert_int_equal(kvt_gpu_tuned_path(&tuned, 0, 500, 2), KVT_GPU_PATH_COPY);
    assert_int_equal(kvt_gpu_tuned_path(&tuned, 0, 1001, 2), KVT_GPU_PATH_SM);
    assert_int_equal(kvt_gpu_tuned_path(&tuned, 0, 2001, 1), KVT_GPU_PATH_COPY);
    assert_int_equal(kvt_gpu_tuned_path(&tuned, 1, 1000, 8), KVT_GPU_PATH_SM);
    assert_int_equal(kvt_gpu_tuned_path(&tuned, 1, 99999, 2), KVT_GPU_PATH_SM);
    assert_int_equal(kvt_gpu_tuned_path(&tuned, 1, 99999, 3), KVT_GPU_PATH_COPY);
    assert_int_equal(kvt_gpu_tuned_path(&none, 1, 1000, 1), KVT_GPU_PATH_COPY);
}

static void test_failures(void **state)
{
    static const char *const calls[] = {"cuMemAlloc", "cuMemHostRegister", "cuLaunchKernel",
                                        "cuStreamCreateWithPriority", "cuMemsetD32Async"};
    struct kvt_gpu_tuned tuned;
    (void)state;
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        struct kvt_gpu *gpu = open_gpu();
        fake->fail = calls[i];
        fake->fail_result = KVT_CU_OUT_OF_MEMORY;
        assert_int_equal(kvt_gpu_tune(gpu, &counting, &little, &tuned), -ENOMEM);
        fake->fail = NULL;
        assert_int_equal(kvt_gpu_tuned_path(&tuned, 1, 1000, 1), KVT_GPU_PATH_COPY);
        kvt_gpu_close(gpu);
        assert_int_equal(fake->memory, 0);
        assert_int_equal(fake->registered, 0);
        assert_int_equal(fake->streams, 0);
    }
}

/* ---- in a cache ---- */

static void start(struct api *api, const char *config, bool disk)
{
    assert_true(api_init(api, KVT_FAKE_CUDA, &small, config, disk));
    api->tune_runs = 1;
    api->tune_clock = &counting;
}

static bool paths_begin(struct api *api, const char *how)
{
    char text[256];
    api_stat_text(api, "gpu.paths", text, sizeof(text));
    return strncmp(text, how, strlen(how)) == 0;
}

static void wait_pinned(struct api *api)
{
    for (int i = 0; i < 10000 && api_stat(api, "dram.pinned_bytes") < (16u << 20); i++)
        rig_sleep_ms(5);
    assert_int_equal(api_stat(api, "dram.pinned_bytes"), 16u << 20);
}

/* Stored and loaded block by block: no copies. As one chain: copies. The same bytes either way. */
static void test_small_jobs_take_it(void **state)
{
    struct api api;
    (void)state;
    start(&api, TUNED, false);
    api_open(&api);
    assert_true(paths_begin(&api, "measured: by the SMs up to 4, 4, 4 blocks of a load"));
    wait_pinned(&api);
    for (uint32_t i = 0; i < BLOCKS; i++)
        api_fill(&api, i, i + 1, API_SMOOTH);
    api_upload(&api);
    int copies = fake->copies + fake->batches;
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(api_store(&api, 100 + i, 1, i, 16 * i, NULL), 1);
    assert_int_equal(fake->copies + fake->batches, copies);
    assert_int_equal(api_store(&api, 104, BLOCKS - 4, 4, 64, NULL), BLOCKS - 4);
    assert_true(fake->copies + fake->batches > copies);
    api_poison(&api);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        api_fill(&api, i, i + 1, API_SMOOTH);
        (void)api_coded(&api, i, i == 0 ? KVT_LEVEL_RAW : KVT_LEVEL_KV4);
    }
    copies = fake->copies + fake->batches;
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(api_load(&api, 100 + i, 1, i, NULL), 1);
    assert_int_equal(fake->copies + fake->batches, copies);
    assert_int_equal(api_load(&api, 104, BLOCKS - 4, 4, NULL), BLOCKS - 4);
    assert_true(api_same(&api));
    api_free(&api);
}

static void reopen(struct api *api, const char *how)
{
    api_close(api);
    api_open(api);
    if (!paths_begin(api, how))
        fail_msg("not %s", how);
}

static void put_bytes(const struct api *api, const char *bytes, size_t len)
{
    char path[200];
    snprintf(path, sizeof(path), "%s/gpu-paths", api->dir);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, len, file), len);
    fclose(file);
}

/* Lines, and the hash that belongs to them. */
static size_t with_hash(const char *lines, char *text, size_t room)
{
    return (size_t)snprintf(text, room, "%send %016" PRIx64 "\n", lines,
                            kvt_hash64(lines, strlen(lines)));
}

static void put_lines(const struct api *api, const char *lines)
{
    char text[512];
    put_bytes(api, text, with_hash(lines, text, sizeof(text)));
}

#define VERSION "kvtier-gpu-paths 2\n"

static void test_kept(void **state)
{
    static const char *const bad[] = {
        "",
        "nonsense",
        "kvtier-gpu-paths 1\nFake GPU|12040|90|16|32 1 2 3 4 5 6 7 8 9\n",
        VERSION "Fake GPU|12040|90|16|32 1 2 3 4 5 6 7 8\n",
        VERSION "Fake GPU|12040|90|16|32 1 2 3 4 5 6 7 8 9 10\n",
        VERSION "Fake GPU|12040|90|16|32 3 2 1 4 5 6 7 8 9\n",
        VERSION "Fake GPU|12040|90|16|32 1 2 3 4 5 6 7 8 99999\n",
        VERSION "Fake GPU|12040|90|16|32 1 2 3 4 5 6 7 8 99999999999999999999\n",
        VERSION "Fake GPU|12040|90|16|32 1 2 3 4 5 6 7 8 -1\n",
        VERSION "Fake GPU|12040|90|16|32 1 2 3 4 5 6 7 8  9\n",
        VERSION "Fake GPU|12040|90|16|32 1 2 3 4 5 6 7 8 9",
        VERSION "Fake GPU|12030|90|16|32 1 2 3 4 5 6 7 8 9\n",
    };
    struct api api;
    (void)state;
    start(&api, TUNED, true);
    api_open(&api);
    assert_true(paths_begin(&api, "measured"));
    int launches = fake->launches;
    reopen(&api, "kept: by the SMs up to 4, 4, 4 blocks");
    assert_int_equal(fake->launches, launches);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        api_close(&api);
        put_lines(&api, bad[i]);
        api_open(&api);
        if (!paths_begin(&api, "measured"))
            fail_msg("%s", bad[i]);
    }
    /* The last one was another driver's: both are in the file now. */
    fake->version = 12030;
    reopen(&api, "kept: by the SMs up to 4, 5, 6 blocks of a load and 7, 8, 9");
    /* A setting whose name begins as ours does is another one: its line stays too. */
    put_lines(&api, VERSION "Fake GPU|12030|90|16|320 1 2 3 4 5 6 7 8 9\n");
    reopen(&api, "measured");
    snprintf(api.config, sizeof(api.config), "%s", TUNED ",gpu_store_ctas=320");
    reopen(&api, "kept: by the SMs up to 4, 5, 6 blocks of a load and 7, 8, 9");
    api_free(&api);
}

/* A file that says something sensible, and is not what was written: it is not believed. */
static void test_damaged(void **state)
{
    static const char lines[] = VERSION "Fake GPU|12040|90|16|32 1 2 3 4 5 6 7 8 9\n";
    char good[512], text[512];
    size_t len = with_hash(lines, good, sizeof(good));
    struct api api;
    (void)state;
    start(&api, TUNED, true);
    api_open(&api);
    api_close(&api);
    put_bytes(&api, good, len);
    api_open(&api);
    assert_true(paths_begin(&api, "kept: by the SMs up to 4, 5, 6 blocks"));
    char *number = strstr(good, " 4 5 6") + 1;
    for (int i = 0; i < 4; i++) {
        memcpy(text, good, len);
        if (i == 0)
            text[number - good] = '5'; /* a number is another one */
        else if (i == 1)
            text[len - 2] = text[len - 2] == '0' ? '1' : '0'; /* the hash is */
        else if (i == 2)
            text[len++] = '\n'; /* it goes on */
        api_close(&api);
        put_bytes(&api, text, i == 3 ? sizeof(lines) - 1 : len); /* its end is not there */
        api_open(&api);
        if (!paths_begin(&api, "measured"))
            fail_msg("case %d", i);
    }
    api_free(&api);
}

static void test_off(void **state)
{
    struct api api;
    (void)state;
    start(&api, "dram=16MiB,threads=1", true);
    api_open(&api);
    assert_true(paths_begin(&api, "all by the copy engine"));
    assert_int_equal(fake->launches, 0);
    api_free(&api);
    start(&api, TUNED, false);
    fake->fail = "cuMemsetD32Async"; /* no memory to measure with: not a reason to refuse */
    fake->fail_result = KVT_CU_OUT_OF_MEMORY;
    (void)api_try_register(&api);
    fake->fail = NULL;
    assert_true(paths_begin(&api, "all by the copy engine"));
    api_free(&api);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_table, reset),
        cmocka_unit_test_setup(test_choice, reset),
        cmocka_unit_test_setup(test_failures, reset),
        cmocka_unit_test_setup(test_small_jobs_take_it, reset),
        cmocka_unit_test_setup(test_kept, reset),
        cmocka_unit_test_setup(test_damaged, reset),
        cmocka_unit_test_setup(test_off, reset),
    };
    if (!kvt_gpu_kernels_built()) {
        print_message("skipped: no GPU kernels in this build, so no device opens\n");
        return 77;
    }
    return cmocka_run_group_tests(tests, api_fake_load, NULL);
}
