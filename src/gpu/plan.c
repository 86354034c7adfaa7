/* Plans: checks, tables, staging memory, streams and events. See gpu.h.
 *
 * One device allocation holds everything on the device, one pinned host allocation everything that
 * the device writes for the CPU; both are laid out here and nowhere else. Threads: one at a time.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "format/record.h"
#include "gpu/gpu_internal.h"
#include "kvtier/codec.h"

#define DEFAULT_CTAS 16u
#define DEFAULT_DEPTH 3u
#define DEFAULT_RECORDS 1024u
#define DEFAULT_JOBS 2u
#define RECORDS_LIMIT (1u << 20)
#define CHECK_CTAS_MAX 4u      /* the page kernel hashes about 25 GB/s with one CTA of an H200 */
#define WAVE_BYTES (11u << 20) /* 0.2 ms of a PCIe 5 link; measured: docs/performance.md */

uint32_t kvt_gpu_plan_record_bytes(const struct kvt_gpu_plan *plan)
{
    return plan->record_bytes;
}

static int fill_defaults(struct kvt_gpu_plan_opts *opts, uint32_t record_bytes)
{
    if (opts->ctas == 0)
        opts->ctas = DEFAULT_CTAS;
    if (opts->move_ctas == 0)
        opts->move_ctas = KVT_MAX(opts->ctas / 4, 1u);
    if (opts->wave == 0)
        opts->wave = KVT_MIN(KVT_MAX(WAVE_BYTES / record_bytes, 1u), KVT_GPU_RECORDS_MAX);
    if (opts->depth == 0)
        opts->depth = DEFAULT_DEPTH;
    if (opts->records_max == 0)
        opts->records_max = DEFAULT_RECORDS;
    if (opts->jobs_max == 0)
        opts->jobs_max = DEFAULT_JOBS;
    if (opts->ctas > 65535 || opts->move_ctas > opts->ctas || opts->wave > KVT_GPU_RECORDS_MAX)
        return KVT_E_INVAL;
    if (opts->depth > KVT_GPU_DEPTH_MAX || opts->records_max > RECORDS_LIMIT ||
        opts->jobs_max > KVT_GPU_JOBS_MAX)
        return KVT_E_LIMIT;
    return 0;
}

/* ---- memory ---- */

static uint64_t take(uint64_t *at, uint64_t bytes, uint64_t align)
{
    *at = kvt_round_up(*at, align);
    uint64_t here = *at;
    *at += bytes;
    return here;
}

/* Offsets into the device allocation; with base 0 the end is its size. */
static uint64_t lay_out_device(struct kvt_gpu_plan *plan, uint32_t part_count, kvt_cu_ptr base)
{
    uint64_t at = base, wave = plan->opts.wave;
    plan->parts = take(&at, part_count * sizeof(struct kvt_gpu_part), 256);
    for (uint32_t i = 0; i < plan->opts.depth; i++) {
        struct kvt_gpu_wave *w = &plan->waves[i];
        w->counters = take(&at, wave * sizeof(uint32_t), 256);
        w->status = take(&at, wave * sizeof(uint32_t), 256);
        w->page_hashes = take(&at, wave * plan->pages * sizeof(uint64_t), 256);
        w->staging = take(&at, wave * plan->record_bytes, KVT_PAGE_BYTES);
    }
    return at - base;
}

static int allocate_device(struct kvt_gpu_plan *plan, const struct kvt_gpu_part *parts,
                           uint32_t part_count)
{
    struct kvt_gpu *gpu = plan->gpu;
    uint64_t bytes = lay_out_device(plan, part_count, 0);
    kvt_cu_result result = gpu->cuda.memory_alloc(&plan->device_memory, bytes);
    if (result != KVT_CU_OK) {
        plan->device_memory = 0;
        return kvt_gpu_check(gpu, result);
    }
    (void)lay_out_device(plan, part_count, plan->device_memory);
    /* On a stream of ours, and waited for: the calls without a stream may return early, and our
     * streams do not wait for theirs. */
    result = gpu->cuda.copy_to_device_async(plan->parts, parts, part_count * sizeof(*parts),
                                            plan->code_stream);
    for (uint32_t i = 0; i < plan->opts.depth && result == KVT_CU_OK; i++)
        result = gpu->cuda.fill_words_async(plan->waves[i].counters, 0, plan->opts.wave,
                                            plan->code_stream);
    kvt_cu_result end = gpu->cuda.stream_sync(plan->code_stream); /* parts is borrowed until here */
    return kvt_gpu_check(gpu, result != KVT_CU_OK ? result : end);
}

static int allocate_pinned(struct kvt_gpu_plan *plan)
{
    struct kvt_gpu *gpu = plan->gpu;
    size_t records = plan->opts.records_max;
    size_t one = records * (sizeof(struct kvt_gpu_result) + KVT_GPU_HEADER_BYTES);
    kvt_cu_ptr device = 0;
    kvt_cu_result result = gpu->cuda.host_alloc(&plan->pinned, one * plan->opts.jobs_max,
                                                KVT_CU_HOST_PORTABLE | KVT_CU_HOST_DEVICE_MAP);
    if (result != KVT_CU_OK) {
        plan->pinned = NULL;
        return kvt_gpu_check(gpu, result);
    }
    result = gpu->cuda.host_device_ptr(&device, plan->pinned, 0);
    if (result != KVT_CU_OK)
        return kvt_gpu_check(gpu, result);
    plan->items = calloc(records * plan->opts.jobs_max, sizeof(*plan->items));
    if (plan->items == NULL)
        return -ENOMEM;
    for (uint32_t i = 0; i < plan->opts.jobs_max; i++) {
        struct kvt_gpu_job *job = &plan->jobs[i];
        uint8_t *memory = (uint8_t *)plan->pinned + i * one;
        job->plan = plan;
        job->headers = memory;
        job->headers_device = device + i * one;
        job->results = (struct kvt_gpu_result *)(void *)(memory + records * KVT_GPU_HEADER_BYTES);
        job->results_device = job->headers_device + records * KVT_GPU_HEADER_BYTES;
        job->items = plan->items + i * records;
    }
    return 0;
}

/* ---- streams and events ---- */

static int make_event(struct kvt_gpu *gpu, kvt_cu_event *event)
{
    return kvt_gpu_check(gpu, gpu->cuda.event_create(event, KVT_CU_EVENT_BLOCKING_SYNC |
                                                                KVT_CU_EVENT_DISABLE_TIMING));
}

static int make_streams(struct kvt_gpu_plan *plan)
{
    struct kvt_gpu *gpu = plan->gpu;
    kvt_cu_stream *streams[3] = {&plan->move_stream, &plan->code_stream, &plan->check_stream};
    int status = make_event(gpu, &plan->entry);
    for (int i = 0; i < 3 && status == 0; i++)
        status = kvt_gpu_check(gpu, gpu->cuda.stream_create(streams[i], KVT_CU_STREAM_NON_BLOCKING,
                                                            gpu->least_priority));
    for (uint32_t i = 0; i < plan->opts.depth && status == 0; i++) {
        status = make_event(gpu, &plan->waves[i].ready);
        if (status == 0)
            status = make_event(gpu, &plan->waves[i].checked);
        if (status == 0)
            status = make_event(gpu, &plan->waves[i].empty);
    }
    for (uint32_t i = 0; i < plan->opts.jobs_max && status == 0; i++)
        status = make_event(gpu, &plan->jobs[i].event);
    return status;
}

static void free_streams(struct kvt_gpu_plan *plan)
{
    const struct kvt_cuda *cuda = &plan->gpu->cuda;
    kvt_cu_event events[1 + 3 * KVT_GPU_DEPTH_MAX + KVT_GPU_JOBS_MAX];
    kvt_cu_stream streams[3] = {plan->move_stream, plan->code_stream, plan->check_stream};
    size_t count = 0;
    events[count++] = plan->entry;
    for (uint32_t i = 0; i < KVT_GPU_DEPTH_MAX; i++) {
        events[count++] = plan->waves[i].ready;
        events[count++] = plan->waves[i].checked;
        events[count++] = plan->waves[i].empty;
    }
    for (uint32_t i = 0; i < KVT_GPU_JOBS_MAX; i++)
        events[count++] = plan->jobs[i].event;
    for (size_t i = 0; i < count; i++)
        if (events[i] != NULL)
            (void)cuda->event_destroy(events[i]);
    for (int i = 0; i < 3; i++)
        if (streams[i] != NULL)
            (void)cuda->stream_destroy(streams[i]);
}

void kvt_gpu_plan_sync(struct kvt_gpu_plan *plan)
{
    kvt_cu_stream streams[3] = {plan->move_stream, plan->code_stream, plan->check_stream};
    for (int i = 0; i < 3; i++)
        if (streams[i] != NULL)
            (void)kvt_gpu_check(plan->gpu, plan->gpu->cuda.stream_sync(streams[i]));
}

/* ---- plan ---- */

/* Every part of the group lies in memory of our device. */
static int check_pool_memory(struct kvt_gpu *gpu, const struct kvt_gpu_part *parts, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        int ordinal = -1;
        unsigned type = 0;
        if (gpu->cuda.pointer_attribute(&type, KVT_CU_POINTER_MEMORY_TYPE, parts[i].base) !=
                KVT_CU_OK ||
            type != KVT_CU_MEMORY_TYPE_DEVICE ||
            gpu->cuda.pointer_attribute(&ordinal, KVT_CU_POINTER_DEVICE_ORDINAL, parts[i].base) !=
                KVT_CU_OK ||
            ordinal != gpu->ordinal)
            return KVT_E_INVAL;
    }
    return 0;
}

static int build(struct kvt_gpu_plan *plan, const struct kvt_layout *layout, uint16_t group,
                 int level, const struct kvt_pool_desc *pool)
{
    struct kvt_gpu_part *parts = calloc(layout->part_count, sizeof(*parts));
    if (parts == NULL)
        return -ENOMEM;
    uint32_t count = kvt_gpu_table(layout, group, level, pool, parts, plan->classes, &plan->coded);
    int status = kvt_gpu_enter(plan->gpu);
    if (status == 0) {
        status = check_pool_memory(plan->gpu, parts, count);
        if (status == 0)
            status = make_streams(plan);
        if (status == 0)
            status = allocate_device(plan, parts, count);
        if (status == 0)
            status = allocate_pinned(plan);
        kvt_gpu_leave(plan->gpu);
    }
    free(parts);
    return status;
}

int kvt_gpu_plan_new(struct kvt_gpu *gpu, const struct kvt_layout *layout, uint16_t group,
                     int level, const struct kvt_pool_desc *pool,
                     const struct kvt_gpu_plan_opts *opts, struct kvt_gpu_plan **out)
{
    int status = kvt_layout_check(layout);
    if (status == 0)
        status = kvt_pool_check(layout, pool);
    if (status != 0)
        return status;
    size_t payload = kvt_payload_bytes(layout, group, level);
    if (payload == 0 || pool->device != gpu->ordinal)
        return KVT_E_INVAL;
    struct kvt_gpu_plan *plan = calloc(1, sizeof(*plan));
    if (plan == NULL)
        return -ENOMEM;
    plan->gpu = gpu;
    plan->block_count = pool->block_count;
    plan->payload_bytes = (uint32_t)payload;
    plan->record_bytes = kvt_record_bytes(payload);
    plan->pages = plan->record_bytes / KVT_PAGE_BYTES;
    if (opts != NULL)
        plan->opts = *opts;
    status = fill_defaults(&plan->opts, plan->record_bytes);
    if (status == 0) {
        plan->check_ctas =
            plan->opts.ctas < 8 ? 0 : KVT_MIN((3 * plan->opts.ctas + 8) / 16, CHECK_CTAS_MAX);
        status = build(plan, layout, group, level, pool);
    }
    if (status != 0) {
        kvt_gpu_plan_free(plan);
        return status;
    }
    *out = plan;
    return 0;
}

void kvt_gpu_plan_free(struct kvt_gpu_plan *plan)
{
    if (plan == NULL)
        return;
    struct kvt_gpu *gpu = plan->gpu;
    if (kvt_gpu_enter_to_release(gpu) == 0) {
        kvt_gpu_plan_sync(plan);
        free_streams(plan);
        if (plan->device_memory != 0)
            (void)gpu->cuda.memory_free(plan->device_memory);
        if (plan->pinned != NULL)
            (void)gpu->cuda.host_free(plan->pinned);
        kvt_gpu_leave(gpu);
    }
    free(plan->items);
    free(plan);
}
