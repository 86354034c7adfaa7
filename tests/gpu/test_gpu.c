/* The GPU half on a machine without a GPU, against the fake driver (fake_cuda.c).
 *
 * Goal:   the driver is found or refused with a reason; every call is made in a context and the
 *         caller's context stays; nothing leaks, whatever call fails; blocks come out right by
 *         every path, in any order of the streams; bad input is refused; a fault of the device
 *         takes it offline and nothing else.
 * Method: the fake driver counts and logs calls, fails any of them on demand, and runs the streams
 *         in random order with the scalar codec in place of the kernels.
 */
#include <dlfcn.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/checked.h"
#include "base/rng.h"
#include "client/host.h"
#include "gpu/api_rig.h"
#include "gpu/driver.h"
#include "gpu/fake_cuda.h"
#include "gpu/gpu_internal.h"
#include "gpu/identity.h"

static int open_fake(struct kvt_gpu **gpu, char *reason, size_t len)
{
    struct kvt_gpu_opts opts = {.device = 0, .library = KVT_FAKE_CUDA};
    return kvt_gpu_open(&opts, gpu, reason, len);
}

/* ---- loading ---- */

static void test_no_driver(void **state)
{
    struct kvt_cuda cuda;
    char reason[200];
    (void)state;
    assert_int_equal(kvt_cuda_load(&cuda, "libcuda-that-is-not-there.so", reason, sizeof(reason)),
                     KVT_E_UNSUPPORTED);
    assert_non_null(strstr(reason, "no NVIDIA driver"));
    assert_null(cuda.library);
}

static void test_old_driver(void **state)
{
    struct kvt_cuda cuda;
    char reason[200];
    (void)state;
    assert_int_equal(kvt_cuda_load(&cuda, KVT_FAKE_CUDA_OLD, reason, sizeof(reason)),
                     KVT_E_UNSUPPORTED);
    assert_non_null(strstr(reason, "older than CUDA 12.0"));
}

static void test_load(void **state)
{
    struct kvt_cuda cuda;
    char reason[200] = "x";
    (void)state;
    assert_int_equal(kvt_cuda_load(&cuda, KVT_FAKE_CUDA, reason, sizeof(reason)), 0);
    assert_string_equal(reason, "");
    assert_int_equal(cuda.version, 12040);
    assert_int_equal(fake->pinned_version, 12000);
    assert_int_equal(fake->wrong_version, 0);
    assert_string_equal(fake->log, "cuInit cuDriverGetVersion cuDeviceGetCount ");
    assert_non_null(cuda.copy_batch);
    assert_string_equal(kvt_cuda_error_name(&cuda, 700), "CUDA_ERROR_ILLEGAL_ADDRESS");
    kvt_cuda_unload(&cuda);
    assert_string_equal(kvt_cuda_error_name(&cuda, 700), "unknown CUDA error");
    fake->no_batch = 1; /* a driver from before 12.8 will do */
    assert_int_equal(kvt_cuda_load(&cuda, KVT_FAKE_CUDA, reason, sizeof(reason)), 0);
    assert_null(cuda.copy_batch);
    kvt_cuda_unload(&cuda);
}

/* Each function of the table may be the one that is missing: the reason names it. */
static void test_missing_symbols(void **state)
{
    static const char *const names[] = {
#define KVT_X(member, name, arguments) name,
        KVT_CUDA_FUNCTIONS(KVT_X)
#undef KVT_X
    };
    (void)state;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        struct kvt_cuda cuda;
        char reason[200];
        fake->missing = names[i];
        assert_int_equal(kvt_cuda_load(&cuda, KVT_FAKE_CUDA, reason, sizeof(reason)),
                         KVT_E_UNSUPPORTED);
        assert_non_null(strstr(reason, names[i]));
    }
}

static void test_driver_does_not_start(void **state)
{
    struct kvt_cuda cuda;
    char reason[200];
    (void)state;
    fake->fail = "cuInit";
    fake->fail_result = 999;
    assert_int_equal(kvt_cuda_load(&cuda, KVT_FAKE_CUDA, reason, sizeof(reason)), KVT_E_DEVICE);
    assert_non_null(strstr(reason, "does not start"));
    fake->fail_result = KVT_CU_NO_DEVICE;
    assert_int_equal(kvt_cuda_load(&cuda, KVT_FAKE_CUDA, reason, sizeof(reason)),
                     KVT_E_UNSUPPORTED);
    assert_non_null(strstr(reason, "no GPU"));
    fake->fail = NULL;
    fake->device_count = 0;
    assert_int_equal(kvt_cuda_load(&cuda, KVT_FAKE_CUDA, reason, sizeof(reason)),
                     KVT_E_UNSUPPORTED);
    assert_non_null(strstr(reason, "no GPU"));
}

static void test_status_of_results(void **state)
{
    (void)state;
    assert_int_equal(kvt_cuda_status(KVT_CU_OK), 0);
    assert_int_equal(kvt_cuda_status(KVT_CU_OUT_OF_MEMORY), -ENOMEM);
    assert_int_equal(kvt_cuda_status(KVT_CU_NO_DEVICE), KVT_E_UNSUPPORTED);
    assert_int_equal(kvt_cuda_status(KVT_CU_FIRST_STICKY), KVT_E_DEVICE);
    assert_int_equal(kvt_cuda_status(KVT_CU_INVALID_VALUE), KVT_E_DEVICE);
}

/* ---- devices ---- */

/* Tests from here on need kernels in the build. */
static void need_kernels(void)
{
    if (!kvt_gpu_kernels_built())
        skip();
}

static void test_open_close(void **state)
{
    struct kvt_gpu *gpu;
    struct kvt_gpu_info info;
    char reason[200] = "";
    (void)state;
    need_kernels();
    assert_int_equal(open_fake(&gpu, reason, sizeof(reason)), 0);
    kvt_gpu_info(gpu, &info);
    assert_string_equal(info.name, "Fake GPU");
    assert_int_equal(info.capability, 90);
    assert_int_equal(info.multiprocessors, 132);
    assert_int_equal(fake->context_depth, 0); /* the caller's context is as it was */
    assert_int_equal(fake->modules, KVT_GPU_KERNELS);
    assert_false(kvt_gpu_offline(gpu));
    assert_string_equal(kvt_gpu_offline_reason(gpu), "");
    kvt_gpu_close(gpu);
    kvt_gpu_close(NULL);
    api_fake_nothing_left();
}

static void test_open_refusals(void **state)
{
    struct kvt_gpu *gpu;
    struct kvt_gpu_opts opts = {.device = 3, .library = KVT_FAKE_CUDA};
    char reason[200];
    (void)state;
    need_kernels();
    assert_int_equal(kvt_gpu_open(&opts, &gpu, reason, sizeof(reason)), KVT_E_UNSUPPORTED);
    assert_non_null(strstr(reason, "no CUDA device 3"));
    assert_int_equal(kvt_gpu_open(&opts, &gpu, NULL, 0), KVT_E_UNSUPPORTED);
    fake->capability = 75;
    assert_int_equal(open_fake(&gpu, reason, sizeof(reason)), KVT_E_UNSUPPORTED);
    assert_non_null(strstr(reason, "7.5"));
    api_fake_nothing_left();
}

/* Whatever call of the open fails: a status, a reason, nothing left. */
static void test_open_failures(void **state)
{
    static const char *const names[] = {"cuDeviceGet",
                                        "cuDeviceGetName",
                                        "cuDeviceGetAttribute",
                                        "cuDevicePrimaryCtxRetain",
                                        "cuCtxPushCurrent",
                                        "cuModuleLoadData",
                                        "cuModuleGetFunction",
                                        "cuFuncSetAttribute",
                                        "cuCtxGetStreamPriorityRange"};
    (void)state;
    need_kernels();
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        for (int after = 0; after < 3; after++) {
            struct kvt_gpu *gpu = NULL;
            char reason[200] = "";
            api_fake_reset(NULL);
            fake->fail = names[i];
            fake->fail_after = after;
            fake->fail_result = KVT_CU_OUT_OF_MEMORY;
            int rc = open_fake(&gpu, reason, sizeof(reason));
            if (rc == 0) { /* it is not called so often */
                kvt_gpu_close(gpu);
                continue;
            }
            assert_in_range(strlen(reason), 10, sizeof(reason));
            assert_int_equal(fake->retained, 0);
            if (strcmp(names[i], "cuModuleLoadData") != 0)
                assert_int_equal(fake->modules, 0);
            assert_int_equal(fake->context_depth, 0);
        }
}

static void test_pin(void **state)
{
    static _Alignas(4096) char memory[8192];
    struct kvt_gpu *gpu;
    (void)state;
    need_kernels();
    assert_int_equal(open_fake(&gpu, NULL, 0), 0);
    assert_int_equal(kvt_gpu_pin(gpu, NULL, 4096), KVT_E_INVAL);
    assert_int_equal(kvt_gpu_pin(gpu, memory, 0), KVT_E_INVAL);
    assert_int_equal(kvt_gpu_pin(gpu, memory + 1, 4096), KVT_E_INVAL);
    assert_int_equal(kvt_gpu_pin(gpu, memory, sizeof(memory)), 0);
    assert_true(kvt_gpu_pinned(gpu, memory, 8192) != 0);
    assert_true(kvt_gpu_pinned(gpu, memory + 4096, 4096) != 0);
    assert_true(kvt_gpu_pinned(gpu, memory + 4096, 4097) == 0);
    assert_true(kvt_gpu_pinned(gpu, (void *)((uintptr_t)memory - 1), 1) == 0);
    kvt_gpu_unpin(gpu, memory);
    kvt_gpu_unpin(gpu, memory);
    assert_true(kvt_gpu_pinned(gpu, memory, 1) == 0);
    assert_int_equal(fake->registered, 0);
    fake->fail = "cuMemHostGetDevicePointer";
    fake->fail_result = 1;
    assert_int_equal(kvt_gpu_pin(gpu, memory, sizeof(memory)), KVT_E_DEVICE);
    fake->fail = NULL;
    for (uint32_t i = 0; i < KVT_GPU_REGIONS_MAX; i++)
        assert_int_equal(kvt_gpu_pin(gpu, memory, 4096), 0);
    assert_int_equal(kvt_gpu_pin(gpu, memory, 4096), KVT_E_LIMIT);
    kvt_gpu_close(gpu);
    api_fake_nothing_left();
}

/* ---- plans and jobs ---- */

struct rig {
    struct kvt_gpu *gpu;
    kvt_cu_ptr memory;
    struct kvt_part part;
    struct kvt_part_place place;
    struct kvt_layout layout;
    struct kvt_pool_desc pool;
    uint8_t *records;
    struct kvt_gpu_item items[4];
};

static void rig_open(struct rig *rig)
{
    memset(rig, 0, sizeof(*rig));
    assert_int_equal(open_fake(&rig->gpu, NULL, 0), 0);
    assert_int_equal(kvt_gpu_enter(rig->gpu), 0);
    assert_int_equal(rig->gpu->cuda.memory_alloc(&rig->memory, 4 * 16 * 64 * 2), 0);
    memset((void *)(uintptr_t)rig->memory, 0, 4 * 16 * 64 * 2);
    kvt_gpu_leave(rig->gpu);
    rig->part =
        (struct kvt_part){.kind = KVT_PART_K, .dtype = KVT_DTYPE_BF16, .heads = 1, .head_dim = 64};
    rig->place = (struct kvt_part_place){(void *)(uintptr_t)rig->memory, 2048, 2048, 128, 2};
    rig->layout = (struct kvt_layout){sizeof(rig->layout), 16, 1, &rig->part};
    rig->pool = (struct kvt_pool_desc){sizeof(rig->pool), 0, 4, 1, &rig->place};
    rig->records = aligned_alloc(4096, 4 * 4096);
    assert_non_null(rig->records);
    memset(rig->records, 0, 4 * 4096);
    for (uint32_t i = 0; i < 4; i++)
        rig->items[i] = (struct kvt_gpu_item){.record = rig->records + 4096 * i, .block = i};
}

static void rig_close(struct rig *rig)
{
    if (kvt_gpu_enter(rig->gpu) == 0) {
        (void)rig->gpu->cuda.memory_free(rig->memory);
        kvt_gpu_leave(rig->gpu);
    }
    kvt_gpu_close(rig->gpu);
    free(rig->records);
}

static int rig_plan(struct rig *rig, struct kvt_gpu_plan **plan)
{
    struct kvt_gpu_stage_opts opts = {.wave = 2, .depth = 2, .records_max = 4, .jobs_max = 2};
    return kvt_gpu_plan_new(rig->gpu, &rig->layout, 0, KVT_LEVEL_KV4, &rig->pool, &opts, plan);
}

static void test_plan_refusals(void **state)
{
    struct rig rig;
    struct kvt_gpu_plan *plan;
    struct kvt_gpu_stage_opts opts = {0};
    (void)state;
    need_kernels();
    rig_open(&rig);
    rig.pool.device = 1;
    assert_int_equal(rig_plan(&rig, &plan), KVT_E_INVAL);
    rig.pool.device = 0;
    rig.pool.place_count = 2;
    assert_int_equal(rig_plan(&rig, &plan), KVT_E_LAYOUT);
    rig.pool.place_count = 1;
    rig.layout.block_tokens = 15;
    assert_int_equal(rig_plan(&rig, &plan), KVT_E_INVAL);
    rig.layout.block_tokens = 16;
    assert_int_equal(
        kvt_gpu_plan_new(rig.gpu, &rig.layout, 9, KVT_LEVEL_KV4, &rig.pool, NULL, &plan),
        KVT_E_INVAL); /* no part in the group */
    assert_int_equal(kvt_gpu_plan_new(rig.gpu, &rig.layout, 0, 77, &rig.pool, NULL, &plan),
                     KVT_E_INVAL);
    fake->pointer_ordinal = 1; /* memory of another device */
    assert_int_equal(rig_plan(&rig, &plan), KVT_E_INVAL);
    fake->pointer_ordinal = 0;
    rig.place.base = rig.records; /* host memory */
    assert_int_equal(rig_plan(&rig, &plan), KVT_E_INVAL);
    rig.place.base = (void *)(uintptr_t)rig.memory;
    opts.wave = KVT_GPU_RECORDS_MAX + 1;
    assert_int_equal(
        kvt_gpu_plan_new(rig.gpu, &rig.layout, 0, KVT_LEVEL_KV4, &rig.pool, &opts, &plan),
        KVT_E_INVAL);
    opts.wave = 0;
    opts.depth = 99;
    assert_int_equal(
        kvt_gpu_plan_new(rig.gpu, &rig.layout, 0, KVT_LEVEL_KV4, &rig.pool, &opts, &plan),
        KVT_E_LIMIT);
    assert_int_equal(
        kvt_gpu_plan_new(rig.gpu, &rig.layout, 0, KVT_LEVEL_KV4, &rig.pool, NULL, &plan), 0);
    kvt_gpu_plan_free(plan);
    kvt_gpu_plan_free(NULL);
    rig_close(&rig);
    api_fake_nothing_left();
}

static void test_plan_failures(void **state)
{
    static const char *const names[] = {
        "cuMemAlloc",    "cuMemcpyHtoDAsync",          "cuMemsetD32Async",
        "cuEventCreate", "cuStreamCreateWithPriority", "cuMemHostGetDevicePointer",
        "cuMemHostAlloc"};
    (void)state;
    need_kernels();
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        for (int after = 0; after < 8; after++) {
            struct rig rig;
            struct kvt_gpu_plan *plan;
            api_fake_reset(NULL);
            rig_open(&rig);
            fake->fail = names[i];
            fake->fail_after = after;
            fake->fail_result = KVT_CU_OUT_OF_MEMORY;
            int rc = rig_plan(&rig, &plan);
            fake->fail = NULL;
            if (rc == 0)
                kvt_gpu_plan_free(plan);
            else
                assert_int_equal(rc, -ENOMEM);
            assert_false(kvt_gpu_offline(rig.gpu)); /* a full device is not a broken one */
            rig_close(&rig);
            api_fake_nothing_left();
        }
}

static void test_job_refusals(void **state)
{
    struct rig rig;
    struct kvt_gpu_plan *plan;
    struct kvt_gpu_job *jobs[3];
    struct kvt_gpu_order order = {.path = KVT_GPU_PATH_COPY};
    (void)state;
    need_kernels();
    rig_open(&rig);
    assert_int_equal(rig_plan(&rig, &plan), 0);
    assert_int_equal(kvt_gpu_plan_record_bytes(plan), 4096);
    assert_int_equal(kvt_gpu_evict(plan, rig.items, 0, &order, &jobs[0]), KVT_E_INVAL);
    assert_int_equal(kvt_gpu_evict(plan, rig.items, 5, &order, &jobs[0]), KVT_E_INVAL);
    rig.items[1].block = 4;
    assert_int_equal(kvt_gpu_evict(plan, rig.items, 2, &order, &jobs[0]), KVT_E_INVAL);
    rig.items[1].block = 1;
    rig.items[1].record = rig.records + 8;
    assert_int_equal(kvt_gpu_evict(plan, rig.items, 2, &order, &jobs[0]), KVT_E_INVAL);
    rig.items[1].record = rig.records + 4096;
    order.path = KVT_GPU_PATH_DIRECT; /* slots are not pinned; and never for evict */
    assert_int_equal(kvt_gpu_restore(plan, rig.items, 2, &order, &jobs[0]), KVT_E_INVAL);
    assert_int_equal(kvt_gpu_evict(plan, rig.items, 2, &order, &jobs[0]), KVT_E_INVAL);
    order.path = 9;
    assert_int_equal(kvt_gpu_evict(plan, rig.items, 2, &order, &jobs[0]), KVT_E_INVAL);
    assert_int_equal(fake->launches, 0);
    int copies = fake->copies;
    order.path = KVT_GPU_PATH_SM; /* not pinned: the copy engine does it */
    assert_int_equal(kvt_gpu_evict(plan, rig.items, 4, &order, &jobs[0]), 0);
    assert_int_equal(fake->copies, copies + 2); /* neighbours in memory go together, by wave */
    assert_int_equal(kvt_gpu_evict(plan, rig.items, 1, &order, &jobs[1]), 0);
    assert_int_equal(kvt_gpu_evict(plan, rig.items, 1, &order, &jobs[2]), -EAGAIN);
    assert_int_equal(kvt_gpu_job_result(jobs[0], 0, NULL), KVT_E_INVAL); /* not done */
    assert_int_equal(kvt_gpu_job_poll(jobs[0], 1), 1);
    assert_int_equal(kvt_gpu_job_poll(jobs[0], 0), 1);
    assert_int_equal(kvt_gpu_job_result(jobs[0], 4, NULL), KVT_E_INVAL);
    assert_int_equal(kvt_gpu_job_result(jobs[0], 3, NULL), 0);
    kvt_gpu_job_free(jobs[0]);
    kvt_gpu_job_free(jobs[1]);
    kvt_gpu_job_free(NULL);
    kvt_gpu_plan_free(plan);
    rig_close(&rig);
    api_fake_nothing_left();
}

/* The engine's stream comes first, and what it does later can wait for us. */
/* Copies of a job over 40 records, adjacent or with a gap between all of them. */
static int copies_of(struct kvt_gpu_plan *plan, uint8_t *memory, size_t gap, int evict)
{
    struct kvt_gpu_order order = {.path = KVT_GPU_PATH_COPY};
    struct kvt_gpu_item items[40];
    struct kvt_gpu_job *job;
    int before = fake->copies;
    for (uint32_t i = 0; i < 40; i++)
        items[i] = (struct kvt_gpu_item){.record = memory + i * gap * 4096, .block = i % 4};
    assert_int_equal(evict ? kvt_gpu_evict(plan, items, 40, &order, &job)
                           : kvt_gpu_restore(plan, items, 40, &order, &job),
                     0);
    assert_int_equal(kvt_gpu_job_poll(job, 1), 1);
    for (size_t i = 0; i < 40; i++)
        assert_int_equal(kvt_gpu_job_result(job, i, NULL), 0);
    kvt_gpu_job_free(job);
    return fake->copies - before;
}

/* An eviction starts with small waves, a restore ends with them; neighbours are one copy a wave. */
static void test_waves(void **state)
{
    struct rig rig;
    struct kvt_gpu_plan *plan;
    struct kvt_gpu_stage_opts opts = {.wave = 32, .depth = 3, .records_max = 40, .jobs_max = 2};
    uint8_t *memory = aligned_alloc(4096, 80 * 4096);
    (void)state;
    need_kernels();
    assert_non_null(memory);
    memset(memory, 0, 80 * 4096);
    rig_open(&rig);
    assert_int_equal(
        kvt_gpu_plan_new(rig.gpu, &rig.layout, 0, KVT_LEVEL_KV4, &rig.pool, &opts, &plan), 0);
    assert_int_equal(copies_of(plan, memory, 1, 1), 4); /* 8, 12, 18, 2 */
    assert_int_equal(copies_of(plan, memory, 1, 0), 5); /* 20, 10, 5, 3, 2 */
    assert_int_equal(copies_of(plan, memory, 2, 1), 40);
    assert_int_equal(copies_of(plan, memory, 2, 0), 40);
    kvt_gpu_plan_free(plan);
    rig_close(&rig);
    free(memory);
}

static void test_engine_stream(void **state)
{
    struct rig rig;
    struct kvt_gpu_plan *plan;
    struct kvt_gpu_job *job;
    kvt_cu_stream engine;
    (void)state;
    need_kernels();
    rig_open(&rig);
    assert_int_equal(rig_plan(&rig, &plan), 0);
    const struct kvt_cuda *cuda = &rig.gpu->cuda;
    uint8_t page[2048];
    assert_int_equal(kvt_gpu_enter(rig.gpu), 0);
    assert_int_equal(cuda->stream_create(&engine, 1, 0), 0);
    /* The engine writes the page late: 1.0 everywhere. */
    for (size_t i = 0; i < sizeof(page); i += 2)
        memcpy(page + i, "\x80\x3f", 2);
    assert_int_equal(cuda->copy_to_device_async(rig.memory, page, sizeof(page), engine), 0);
    struct kvt_gpu_order order = {.path = KVT_GPU_PATH_COPY, .stream = engine, .has_stream = 1};
    assert_int_equal(kvt_gpu_evict(plan, rig.items, 1, &order, &job), 0);
    assert_int_equal(kvt_gpu_job_join(job, engine), 0);
    uint8_t copy[4096] = {0};
    assert_int_equal(cuda->fill_words_async((uintptr_t)copy, 1, 1, engine), 0);
    assert_int_equal(cuda->stream_sync(engine), 0);
    uint64_t checksum = 0;
    assert_int_equal(kvt_gpu_job_poll(job, 0), 1); /* the join made the engine wait for it */
    assert_int_equal(kvt_gpu_job_result(job, 0, &checksum), 0);
    uint8_t zeros[4096];
    memcpy(zeros, rig.records, sizeof(zeros));
    kvt_gpu_job_free(job);
    /* Without the engine's page the record would be that of zeros: not so. */
    assert_int_equal(kvt_gpu_evict(plan, rig.items + 1, 1, &order, &job), 0);
    assert_int_equal(kvt_gpu_job_poll(job, 1), 1);
    kvt_gpu_job_free(job);
    assert_memory_not_equal(zeros + 128, rig.records + 4096 + 128, 600);
    (void)cuda->stream_destroy(engine);
    kvt_gpu_leave(rig.gpu);
    kvt_gpu_plan_free(plan);
    rig_close(&rig);
    api_fake_nothing_left();
}

/* A fault of the device: the job says so, the device is offline, later calls are refused. */
static void test_device_fault(void **state)
{
    struct rig rig;
    struct kvt_gpu_plan *plan;
    struct kvt_gpu_job *job, *other;
    struct kvt_gpu_order order = {.path = KVT_GPU_PATH_COPY};
    (void)state;
    need_kernels();
    rig_open(&rig);
    assert_int_equal(rig_plan(&rig, &plan), 0);
    assert_int_equal(kvt_gpu_evict(plan, rig.items, 2, &order, &job), 0);
    fake->fail = "cuEventSynchronize";
    fake->fail_result = 700;
    assert_int_equal(kvt_gpu_job_poll(job, 1), KVT_E_DEVICE);
    assert_int_equal(kvt_gpu_job_poll(job, 1), KVT_E_DEVICE);
    assert_int_equal(kvt_gpu_job_result(job, 0, NULL), KVT_E_DEVICE);
    assert_true(kvt_gpu_offline(rig.gpu));
    assert_string_equal(kvt_gpu_offline_reason(rig.gpu), "CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_int_equal(kvt_gpu_evict(plan, rig.items, 2, &order, &other), KVT_E_DEVICE);
    assert_int_equal(rig_plan(&rig, &plan), KVT_E_DEVICE);
    kvt_gpu_job_free(job);
    kvt_gpu_plan_free(plan);
    fake->fail = NULL;
    assert_int_equal(kvt_gpu_enter_to_release(rig.gpu), 0); /* the rig's own memory */
    (void)rig.gpu->cuda.memory_free(rig.memory);
    kvt_gpu_leave(rig.gpu);
    kvt_gpu_close(rig.gpu);
    free(rig.records);
    api_fake_nothing_left();
}

/* The device was reset by somebody else: not one call is made with what was in the old context,
 * also when the device has a context again. */
static void context_goes(int gone, unsigned long long resets)
{
    struct rig rig;
    struct kvt_gpu_plan *plan;
    struct kvt_gpu_job *job, *other;
    struct kvt_gpu_order order = {.path = KVT_GPU_PATH_COPY};
    api_fake_reset(NULL);
    rig_open(&rig);
    assert_int_equal(rig_plan(&rig, &plan), 0);
    assert_int_equal(kvt_gpu_evict(plan, rig.items, 2, &order, &job), 0);
    fake->context_gone = gone;
    fake->resets = resets;
    fake->log[0] = '\0';
    assert_int_equal(kvt_gpu_job_poll(job, 1), KVT_E_DEVICE);
    assert_int_equal(kvt_gpu_job_result(job, 0, NULL), KVT_E_DEVICE);
    assert_true(kvt_gpu_offline(rig.gpu));
    assert_string_equal(kvt_gpu_offline_reason(rig.gpu), "CUDA_ERROR_CONTEXT_IS_DESTROYED");
    assert_int_equal(kvt_gpu_evict(plan, rig.items, 2, &order, &other), KVT_E_DEVICE);
    assert_int_equal(kvt_gpu_enter_to_release(rig.gpu), KVT_E_DEVICE);
    char *rest = NULL;
    for (const char *call = strtok_r(fake->log, " ", &rest); call != NULL;
         call = strtok_r(NULL, " ", &rest))
        assert_true(strcmp(call, "cuDevicePrimaryCtxGetState") == 0 ||
                    strcmp(call, "cuCtxGetId") == 0 || strcmp(call, "cuGetErrorName") == 0);
    fake->context_gone = 0; /* the fake driver's objects are still there, and go in order */
    fake->resets = 0;
    atomic_store(&rig.gpu->context_gone, 0);
    kvt_gpu_job_free(job);
    kvt_gpu_plan_free(plan);
    assert_int_equal(kvt_gpu_enter_to_release(rig.gpu), 0); /* the rig's own memory */
    (void)rig.gpu->cuda.memory_free(rig.memory);
    kvt_gpu_leave(rig.gpu);
    kvt_gpu_close(rig.gpu);
    free(rig.records);
    api_fake_nothing_left();
}

static void test_context_destroyed_under_us(void **state)
{
    (void)state;
    need_kernels();
    context_goes(1, 0);
    context_goes(0, 1);
}

/* What the kernel says of three devices: nodes 1 and 0, and one of which the firmware says nothing.
 */
static void write_nodes(const char *dir, bool there)
{
    static const char *const folders[] = {"", "/bus", "/bus/pci", "/bus/pci/devices"};
    char path[160];
    for (size_t i = 0; i < KVT_ARRAY_LEN(folders) && there; i++) {
        snprintf(path, sizeof(path), "%s%s", dir, folders[i]);
        assert_int_equal(mkdir(path, 0700), 0);
    }
    for (int device = 0; device < 3; device++) {
        int len = snprintf(path, sizeof(path), "%s/bus/pci/devices/0000:ab:%02x.0", dir,
                           (unsigned)device);
        if (there)
            assert_int_equal(mkdir(path, 0700), 0);
        snprintf(path + len, sizeof(path) - (size_t)len, "/numa_node");
        if (there) {
            FILE *file = fopen(path, "we");
            assert_non_null(file);
            (void)fprintf(file, "%d\n", device == 2 ? -1 : 1 - device);
            assert_int_equal(fclose(file), 0);
            continue;
        }
        assert_int_equal(unlink(path), 0);
        path[len] = '\0';
        assert_int_equal(rmdir(path), 0);
    }
    for (size_t i = KVT_ARRAY_LEN(folders); i > 0 && !there; i--) {
        snprintf(path, sizeof(path), "%s%s", dir, folders[i - 1]);
        assert_int_equal(rmdir(path), 0);
    }
}

/* C38: two ranks in a control group of 512 MiB on a host of 64 GiB get at most 204 MiB each, on the
 * node of their device. */
static void test_c38_ranks_share_a_control_group(void **state)
{
    static const uint64_t mib = 1u << 20;
    char dir[64];
    (void)state;
    uint64_t group = 512 * mib, host = 65536 * mib;
    assert_int_equal(kvt_memory_share(KVT_MIN(group, host), 80, 2), 204 * mib);
    assert_int_equal(kvt_memory_share(host, 80, 1), 52428 * mib);
    assert_int_equal(kvt_memory_share(UINT64_MAX, 80, 2), 0); /* not known: nothing is taken */
    assert_int_equal(kvt_memory_share(group, 1, 1024), 0);
    snprintf(dir, sizeof(dir), "/tmp/kvt-node-%ld", (long)getpid());
    write_nodes(dir, true);
    fake->device_count = 4;
    assert_int_equal(kvt_gpu_node(KVT_FAKE_CUDA, 0, dir), 1);
    assert_int_equal(kvt_gpu_node(KVT_FAKE_CUDA, 1, dir), 0);
    assert_int_equal(kvt_gpu_node(KVT_FAKE_CUDA, 2, dir), -1); /* the firmware does not say */
    assert_int_equal(kvt_gpu_node(KVT_FAKE_CUDA, 3, dir), -1); /* nor does the kernel */
    assert_int_equal(kvt_gpu_node(KVT_FAKE_CUDA, 4, dir), -1);
    assert_int_equal(kvt_gpu_node(KVT_FAKE_CUDA, -1, dir), -1);
    assert_int_equal(kvt_gpu_node(KVT_FAKE_CUDA_OLD, 0, dir), -1);
    assert_int_equal(kvt_gpu_node("libcuda-that-is-not-there.so", 0, dir), -1);
    fake->fail = "cuDeviceGetPCIBusId";
    fake->fail_result = 1;
    assert_int_equal(kvt_gpu_node(KVT_FAKE_CUDA, 0, dir), -1);
    fake->fail = NULL;
    write_nodes(dir, false);
    api_fake_nothing_left();
}

/* A call that fails while a job is queued: the job is refused, the plan works again after. */
static void test_queueing_failures(void **state)
{
    static const char *const names[] = {"cuLaunchKernel",   "cuMemcpyDtoHAsync",
                                        "cuEventRecord",    "cuStreamWaitEvent",
                                        "cuMemsetD32Async", "cuMemcpyHtoDAsync"};
    (void)state;
    need_kernels();
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        for (int after = 0; after < 6; after++) {
            struct rig rig;
            struct kvt_gpu_plan *plan;
            struct kvt_gpu_job *job;
            struct kvt_gpu_order order = {.path = KVT_GPU_PATH_COPY};
            api_fake_reset(NULL);
            rig_open(&rig);
            assert_int_equal(rig_plan(&rig, &plan), 0);
            fake->fail = names[i];
            fake->fail_after = after;
            fake->fail_result = KVT_CU_OUT_OF_MEMORY;
            int rc = i < 5 ? kvt_gpu_evict(plan, rig.items, 4, &order, &job)
                           : kvt_gpu_restore(plan, rig.items, 4, &order, &job);
            assert_true(rc == -ENOMEM || rc == 0);
            if (rc == 0)
                kvt_gpu_job_free(job);
            fake->fail = NULL;
            assert_int_equal(kvt_gpu_evict(plan, rig.items, 4, &order, &job), 0);
            assert_int_equal(kvt_gpu_job_poll(job, 1), 1);
            assert_int_equal(kvt_gpu_job_result(job, 3, NULL), 0);
            kvt_gpu_job_free(job);
            kvt_gpu_plan_free(plan);
            rig_close(&rig);
            api_fake_nothing_left();
        }
}

/* Random shapes by every path, streams in random order. */
static void test_identity(void **state)
{
    struct kvt_gpu *gpu;
    struct identity_counts counts = {0};
    char message[1024];
    uint64_t seed = 20240607;
    (void)state;
    need_kernels();
    print_message("seed %llu\n", (unsigned long long)seed);
    assert_int_equal(open_fake(&gpu, NULL, 0), 0);
    struct identity *identity = identity_new(gpu);
    kvt_cu_copy_batch_fn batch = gpu->cuda.copy_batch;
    assert_non_null(identity);
    assert_non_null(batch);
    for (uint64_t i = 0; i < 150; i++) {
        fake->log[0] = '\0';
        gpu->cuda.copy_batch = i % 2 ? batch : NULL; /* drivers with it and without */
        if (identity_case(identity, seed + i, &counts, message, sizeof(message)) != 0)
            fail_msg("case %llu: %s", (unsigned long long)(seed + i), message);
    }
    assert_true(counts.guard > 0 && counts.nonfinite > 0 && counts.hostile > 0);
    assert_true(counts.levels[0] > 30); /* mixed maps */
    assert_true(counts.ranges > 50);
    assert_true(fake->batches > 0 && fake->copies > fake->batches);
    identity_free(identity);
    kvt_gpu_close(gpu);
    api_fake_nothing_left();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_no_driver, api_fake_reset),
        cmocka_unit_test_setup(test_old_driver, api_fake_reset),
        cmocka_unit_test_setup(test_load, api_fake_reset),
        cmocka_unit_test_setup(test_missing_symbols, api_fake_reset),
        cmocka_unit_test_setup(test_driver_does_not_start, api_fake_reset),
        cmocka_unit_test_setup(test_status_of_results, api_fake_reset),
        cmocka_unit_test_setup(test_open_close, api_fake_reset),
        cmocka_unit_test_setup(test_open_refusals, api_fake_reset),
        cmocka_unit_test_setup(test_open_failures, api_fake_reset),
        cmocka_unit_test_setup(test_pin, api_fake_reset),
        cmocka_unit_test_setup(test_plan_refusals, api_fake_reset),
        cmocka_unit_test_setup(test_plan_failures, api_fake_reset),
        cmocka_unit_test_setup(test_job_refusals, api_fake_reset),
        cmocka_unit_test_setup(test_waves, api_fake_reset),
        cmocka_unit_test_setup(test_engine_stream, api_fake_reset),
        cmocka_unit_test_setup(test_device_fault, api_fake_reset),
        cmocka_unit_test_setup(test_c38_ranks_share_a_control_group, api_fake_reset),
        cmocka_unit_test_setup(test_queueing_failures, api_fake_reset),
        cmocka_unit_test_setup(test_context_destroyed_under_us, api_fake_reset),
        cmocka_unit_test_setup(test_identity, api_fake_reset),
    };
    return cmocka_run_group_tests(tests, api_fake_load, NULL);
}
