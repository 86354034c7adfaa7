/* Stages: streams, events, staging memory and jobs. See gpu.h.
 *
 * One device allocation holds everything on the device, one pinned host allocation everything that
 * the device writes for the CPU; both are laid out here and nowhere else. Threads: one at a time.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/checked.h"
#include "gpu/gpu_internal.h"

#define DEFAULT_CTAS 16u
#define DEFAULT_DEPTH 3u
#define DEFAULT_RECORDS 1024u
#define DEFAULT_JOBS 2u
#define RECORDS_LIMIT (1u << 20)
#define WAVE_BYTES (11u << 20) /* 0.2 ms of a PCIe 5 link; measured: docs/performance.md */
#define WAVE_BYTES_MAX (1u << 30)

static int fill_defaults(struct kvt_gpu_stage_opts *opts)
{
    if (opts->ctas == 0)
        opts->ctas = DEFAULT_CTAS;
    if (opts->move_ctas == 0)
        opts->move_ctas = KVT_MAX(opts->ctas / 4, 1u);
    if (opts->wave == 0)
        opts->wave = KVT_GPU_RECORDS_MAX;
    if (opts->depth == 0)
        opts->depth = DEFAULT_DEPTH;
    if (opts->records_max == 0)
        opts->records_max = DEFAULT_RECORDS;
    if (opts->jobs_max == 0)
        opts->jobs_max = DEFAULT_JOBS;
    if (opts->wave_bytes == 0)
        opts->wave_bytes = WAVE_BYTES;
    opts->wave_bytes = KVT_MAX(opts->wave_bytes, opts->record_bytes);
    if (opts->ctas > 65535 || opts->move_ctas > opts->ctas || opts->wave > KVT_GPU_RECORDS_MAX)
        return KVT_E_INVAL;
    if (opts->depth > KVT_GPU_DEPTH_MAX || opts->records_max > RECORDS_LIMIT ||
        opts->jobs_max > KVT_GPU_JOBS_MAX || opts->wave_bytes > WAVE_BYTES_MAX)
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

/* Records of all jobs. */
static uint64_t layer_records(const struct kvt_gpu_stage *stage)
{
    return (uint64_t)stage->opts.records_max * stage->opts.jobs_max;
}

/* Offsets into the device allocation; with base 0 the end is its size. */
static uint64_t lay_out_device(struct kvt_gpu_stage *stage, kvt_cu_ptr base)
{
    uint64_t at = base, wave = stage->opts.wave;
    for (uint32_t i = 0; i < stage->opts.depth; i++) {
        struct kvt_gpu_wave *w = &stage->waves[i];
        w->counters = take(&at, wave * sizeof(uint32_t), 256);
        w->status = take(&at, (wave + KVT_GPU_TURN_WORDS) * sizeof(uint32_t), 256);
        w->page_hashes = take(&at, stage->pages * sizeof(uint64_t), 256);
        w->staging = take(&at, stage->pages * (uint64_t)KVT_GPU_PAGE_BYTES, KVT_GPU_PAGE_BYTES);
    }
    if (stage->opts.layer_pages > 0) {
        stage->layer_counters = take(&at, layer_records(stage) * sizeof(uint32_t), 256);
        stage->layer_hashes = take(&at, stage->opts.layer_pages * sizeof(uint64_t), 256);
    }
    return at - base;
}

static int allocate_device(struct kvt_gpu_stage *stage)
{
    struct kvt_gpu *gpu = stage->gpu;
    uint64_t bytes = lay_out_device(stage, 0);
    kvt_cu_result result = gpu->cuda.memory_alloc(&stage->device_memory, bytes);
    if (result != KVT_CU_OK) {
        stage->device_memory = 0;
        return kvt_gpu_check(gpu, result);
    }
    (void)lay_out_device(stage, stage->device_memory);
    /* On a stream of ours, and waited for: the calls without a stream may return early, and our
     * streams do not wait for theirs. */
    for (uint32_t i = 0; i < stage->opts.depth && result == KVT_CU_OK; i++)
        result = gpu->cuda.fill_words_async(stage->waves[i].counters, 0, stage->opts.wave,
                                            stage->code_stream);
    if (stage->layer_counters != 0 && result == KVT_CU_OK)
        result = gpu->cuda.fill_words_async(stage->layer_counters, 0, layer_records(stage),
                                            stage->code_stream);
    kvt_cu_result end = gpu->cuda.stream_sync(stage->code_stream);
    return kvt_gpu_check(gpu, result != KVT_CU_OK ? result : end);
}

static int allocate_pinned(struct kvt_gpu_stage *stage)
{
    struct kvt_gpu *gpu = stage->gpu;
    size_t records = stage->opts.records_max;
    size_t one = records * (sizeof(struct kvt_gpu_result) + KVT_GPU_HEADER_BYTES);
    kvt_cu_ptr device = 0;
    kvt_cu_result result = gpu->cuda.host_alloc(&stage->pinned, one * stage->opts.jobs_max,
                                                KVT_CU_HOST_PORTABLE | KVT_CU_HOST_DEVICE_MAP);
    if (result != KVT_CU_OK) {
        stage->pinned = NULL;
        return kvt_gpu_check(gpu, result);
    }
    result = gpu->cuda.host_device_ptr(&device, stage->pinned, 0);
    if (result != KVT_CU_OK)
        return kvt_gpu_check(gpu, result);
    stage->items = calloc(records * stage->opts.jobs_max, sizeof(*stage->items));
    if (stage->items == NULL)
        return -ENOMEM;
    for (uint32_t i = 0; i < stage->opts.jobs_max; i++) {
        struct kvt_gpu_job *job = &stage->jobs[i];
        uint8_t *memory = (uint8_t *)stage->pinned + i * one;
        job->stage = stage;
        job->headers = memory;
        job->headers_device = device + i * one;
        job->results = (struct kvt_gpu_result *)(void *)(memory + records * KVT_GPU_HEADER_BYTES);
        job->results_device = job->headers_device + records * KVT_GPU_HEADER_BYTES;
        job->items = stage->items + i * records;
    }
    return 0;
}

/* ---- streams and events ---- */

static int make_event(struct kvt_gpu *gpu, kvt_cu_event *event)
{
    return kvt_gpu_check(gpu, gpu->cuda.event_create(event, KVT_CU_EVENT_BLOCKING_SYNC |
                                                                KVT_CU_EVENT_DISABLE_TIMING));
}

static int make_streams(struct kvt_gpu_stage *stage)
{
    struct kvt_gpu *gpu = stage->gpu;
    kvt_cu_stream *streams[3] = {&stage->move_stream, &stage->code_stream, &stage->check_stream};
    int status = make_event(gpu, &stage->entry);
    for (int i = 0; i < 3 && status == 0; i++)
        status = kvt_gpu_check(gpu, gpu->cuda.stream_create(streams[i], KVT_CU_STREAM_NON_BLOCKING,
                                                            gpu->least_priority));
    for (uint32_t i = 0; i < stage->opts.depth && status == 0; i++) {
        status = make_event(gpu, &stage->waves[i].ready);
        if (status == 0)
            status = make_event(gpu, &stage->waves[i].checked);
        if (status == 0)
            status = make_event(gpu, &stage->waves[i].empty);
    }
    for (uint32_t i = 0; i < stage->opts.jobs_max && status == 0; i++)
        status = make_event(gpu, &stage->jobs[i].event);
    for (uint32_t i = 0; i < stage->opts.jobs_max && stage->opts.layer_pages > 0; i++)
        for (uint32_t r = 0; r < KVT_GPU_RANGES_MAX && status == 0; r++)
            status = make_event(gpu, &stage->jobs[i].range_events[r]);
    return status;
}

static void free_streams(struct kvt_gpu_stage *stage)
{
    const struct kvt_cuda *cuda = &stage->gpu->cuda;
    kvt_cu_event events[1 + 3 * KVT_GPU_DEPTH_MAX + (1 + KVT_GPU_RANGES_MAX) * KVT_GPU_JOBS_MAX];
    kvt_cu_stream streams[3] = {stage->move_stream, stage->code_stream, stage->check_stream};
    size_t count = 0;
    events[count++] = stage->entry;
    for (uint32_t i = 0; i < KVT_GPU_DEPTH_MAX; i++) {
        events[count++] = stage->waves[i].ready;
        events[count++] = stage->waves[i].checked;
        events[count++] = stage->waves[i].empty;
    }
    for (uint32_t i = 0; i < KVT_GPU_JOBS_MAX; i++) {
        events[count++] = stage->jobs[i].event;
        for (uint32_t r = 0; r < KVT_GPU_RANGES_MAX; r++)
            events[count++] = stage->jobs[i].range_events[r];
    }
    for (size_t i = 0; i < count; i++)
        if (events[i] != NULL)
            (void)cuda->event_destroy(events[i]);
    for (int i = 0; i < 3; i++)
        if (streams[i] != NULL)
            (void)cuda->stream_destroy(streams[i]);
}

void kvt_gpu_stage_sync(struct kvt_gpu_stage *stage)
{
    kvt_cu_stream streams[3] = {stage->move_stream, stage->code_stream, stage->check_stream};
    for (int i = 0; i < 3; i++)
        if (streams[i] != NULL)
            (void)kvt_gpu_check(stage->gpu, stage->gpu->cuda.stream_sync(streams[i]));
}

void kvt_gpu_stage_reset_layers(struct kvt_gpu_stage *stage)
{
    kvt_gpu_stage_sync(stage);
    (void)kvt_gpu_check(stage->gpu, stage->gpu->cuda.fill_words_async(stage->layer_counters, 0,
                                                                      layer_records(stage),
                                                                      stage->check_stream));
    (void)kvt_gpu_check(stage->gpu, stage->gpu->cuda.stream_sync(stage->check_stream));
}

static int build(struct kvt_gpu_stage *stage)
{
    int status = kvt_gpu_enter(stage->gpu);
    if (status != 0)
        return status;
    status = make_streams(stage);
    if (status == 0)
        status = allocate_device(stage);
    if (status == 0)
        status = allocate_pinned(stage);
    kvt_gpu_leave(stage->gpu);
    return status;
}

static void enlist(struct kvt_gpu_stage *stage)
{
    pthread_mutex_lock(&stage->gpu->lock);
    stage->next = stage->gpu->stages;
    stage->gpu->stages = stage;
    pthread_mutex_unlock(&stage->gpu->lock);
}

/* After this nobody waits for its streams (device.c walks the list with queueing held). */
static void delist(struct kvt_gpu_stage *stage)
{
    struct kvt_gpu *gpu = stage->gpu;
    pthread_rwlock_wrlock(&gpu->queueing);
    pthread_mutex_lock(&gpu->lock);
    for (struct kvt_gpu_stage **at = &gpu->stages; *at != NULL; at = &(*at)->next)
        if (*at == stage) {
            *at = stage->next;
            break;
        }
    pthread_mutex_unlock(&gpu->lock);
    pthread_rwlock_unlock(&gpu->queueing);
}

int kvt_gpu_stage_new(struct kvt_gpu *gpu, const struct kvt_gpu_stage_opts *opts,
                      struct kvt_gpu_stage **out)
{
    struct kvt_gpu_stage *stage = calloc(1, sizeof(*stage));
    if (stage == NULL)
        return -ENOMEM;
    stage->gpu = gpu;
    if (opts != NULL)
        stage->opts = *opts;
    int status = fill_defaults(&stage->opts);
    if (status == 0) {
        stage->pages =
            (uint32_t)kvt_round_up(stage->opts.wave_bytes, KVT_GPU_PAGE_BYTES) / KVT_GPU_PAGE_BYTES;
        status = build(stage);
    }
    if (status != 0) {
        kvt_gpu_stage_free(stage);
        return status;
    }
    enlist(stage);
    *out = stage;
    return 0;
}

void kvt_gpu_stage_free(struct kvt_gpu_stage *stage)
{
    if (stage == NULL)
        return;
    struct kvt_gpu *gpu = stage->gpu;
    delist(stage);
    if (kvt_gpu_enter_to_release(gpu) == 0) {
        kvt_gpu_stage_sync(stage);
        free_streams(stage);
        if (stage->device_memory != 0)
            (void)gpu->cuda.memory_free(stage->device_memory);
        if (stage->pinned != NULL)
            (void)gpu->cuda.host_free(stage->pinned);
        kvt_gpu_leave(gpu);
    }
    free(stage->items);
    free(stage);
}

int kvt_gpu_stage_await(struct kvt_gpu_stage *stage, void *event)
{
    struct kvt_gpu *gpu = stage->gpu;
    int status = kvt_gpu_enter(gpu);
    if (status != 0)
        return status;
    status = kvt_gpu_check(gpu, gpu->cuda.stream_wait(stage->code_stream, event, 0));
    if (status == 0)
        status = kvt_gpu_check(gpu, gpu->cuda.stream_wait(stage->move_stream, event, 0));
    kvt_gpu_leave(gpu);
    return status == 0 ? 0 : KVT_E_DEVICE;
}
