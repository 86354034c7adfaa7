/* Measuring paths: see tune.h.
 *
 * Pages of one made-up geometry, records in pinned memory, both of our own. For each size of record
 * jobs of 1, 2, 4 ... blocks by both paths; the SMs get those up to the first number at which they
 * are not FASTER_BY ahead. What is left of an earlier number cannot be seen from a later one.
 */
#include "gpu/tune.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "gpu/gpu_internal.h"
#include "kvtier/codec.h"

#define RUNS 9u
#define RUNS_MAX 99u
#define BLOCKS_MAX 16u
#define FASTER_BY 1.05 /* noise is not a reason to leave the copy engine */
#define HEADS 8u
#define HEAD_DIM 128u
#define TOKENS 16u
#define PART_BYTES (HEADS * HEAD_DIM * TOKENS * 2u) /* of a block */
#define LAYERS_MAX 64u

struct tune {
    struct kvt_gpu *gpu;
    const struct kvt_clock *clock;
    struct kvt_gpu_tune_opts opts;
    struct kvt_part parts[2 * LAYERS_MAX];
    struct kvt_part_place places[2 * LAYERS_MAX];
    struct kvt_layout layout;
    struct kvt_pool_desc pool;
    kvt_cu_ptr memory;
    uint8_t *slots; /* pinned by the driver: known to kvt_gpu_pinned() too */
    size_t slot_bytes;
    struct kvt_gpu_item items[BLOCKS_MAX];
};

static void lay_out(struct tune *t, uint32_t layers)
{
    t->layout = (struct kvt_layout){.struct_size = sizeof(t->layout),
                                    .block_tokens = TOKENS,
                                    .part_count = 2 * layers,
                                    .parts = t->parts};
    for (uint32_t i = 0; i < 2 * layers; i++) {
        t->parts[i] = (struct kvt_part){.kind = (uint8_t)(i % 2 ? KVT_PART_V : KVT_PART_K),
                                        .dtype = KVT_DTYPE_BF16,
                                        .layer = i / 2,
                                        .heads = HEADS,
                                        .head_dim = HEAD_DIM};
        t->places[i] = (struct kvt_part_place){
            .base = (void *)(uintptr_t)(t->memory + (kvt_cu_ptr)PART_BYTES * BLOCKS_MAX * i),
            .stride_block = PART_BYTES,
            .stride_head = HEAD_DIM * 2,
            .stride_token = HEADS * HEAD_DIM * 2,
            .stride_elem = 2};
    }
    t->pool = (struct kvt_pool_desc){.struct_size = sizeof(t->pool),
                                     .device = t->gpu->ordinal,
                                     .block_count = BLOCKS_MAX,
                                     .place_count = 2 * layers,
                                     .places = t->places};
}

static int run_job(struct tune *t, struct kvt_gpu_plan *plan, int evict, enum kvt_gpu_path path,
                   uint32_t blocks)
{
    struct kvt_gpu_order order = {.path = path};
    struct kvt_gpu_job *job;
    int rc = evict ? kvt_gpu_evict(plan, t->items, blocks, &order, &job)
                   : kvt_gpu_restore(plan, t->items, blocks, &order, &job);
    if (rc != 0)
        return rc;
    while ((rc = kvt_gpu_job_poll(job, 1)) == 0) { /* woken early */
    }
    kvt_gpu_job_free(job); /* what the records hold does not matter */
    return rc < 0 ? rc : 0;
}

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int time_path(struct tune *t, struct kvt_gpu_plan *plan, int evict, enum kvt_gpu_path path,
                     uint32_t blocks, int64_t *median)
{
    int64_t times[RUNS_MAX];
    int rc = run_job(t, plan, evict, path, blocks);
    for (uint32_t i = 0; i < t->opts.runs && rc == 0; i++) {
        int64_t start = kvt_clock_now(t->clock);
        rc = run_job(t, plan, evict, path, blocks);
        times[i] = kvt_clock_now(t->clock) - start;
    }
    if (rc != 0)
        return rc;
    qsort(times, t->opts.runs, sizeof(times[0]), by_value);
    *median = times[t->opts.runs / 2];
    return 0;
}

/* One direction and size. */
static int compare(struct tune *t, int evict, struct kvt_gpu_plan *plan, uint32_t *sm_blocks)
{
    int rc = 0;
    *sm_blocks = 0;
    for (uint32_t n = 1; n <= t->opts.blocks_max && rc == 0; n *= 2) {
        int64_t copy = 0, sm = 0;
        rc = time_path(t, plan, evict, KVT_GPU_PATH_COPY, n, &copy);
        if (rc == 0)
            rc = time_path(t, plan, evict, KVT_GPU_PATH_SM, n, &sm);
        if (rc == 0 && (double)sm * FASTER_BY >= (double)copy)
            break;
        if (rc == 0)
            *sm_blocks = n;
    }
    return rc;
}

static int measure_size(struct tune *t, uint32_t size, struct kvt_gpu_tuned *out)
{
    int rc = 0;
    lay_out(t, t->opts.layers[size]);
    for (int evict = 1; evict >= 0 && rc == 0; evict--) {
        struct kvt_gpu_stage_opts opts = {
            .ctas = t->opts.ctas[evict], .records_max = BLOCKS_MAX, .jobs_max = 1};
        struct kvt_gpu_plan *plan;
        rc = kvt_gpu_plan_new(t->gpu, &t->layout, 0, KVT_LEVEL_KV4, &t->pool, &opts, &plan);
        if (rc != 0)
            return rc;
        out->record_bytes[size] = kvt_gpu_plan_record_bytes(plan);
        for (uint32_t i = 0; i < BLOCKS_MAX; i++)
            t->items[i] = (struct kvt_gpu_item){
                .record = t->slots + (size_t)i * out->record_bytes[size], .block = i};
        rc = compare(t, evict, plan, &out->sm_blocks[evict][size]);
        kvt_gpu_plan_free(plan);
    }
    return rc;
}

/* Pages of ordinary numbers, and slots as large as the largest raw record. */
static int take_memory(struct tune *t, uint32_t layers)
{
    struct kvt_gpu *gpu = t->gpu;
    size_t bytes = (size_t)PART_BYTES * BLOCKS_MAX * 2 * layers;
    kvt_cu_stream stream;
    int rc = kvt_gpu_enter(gpu);
    if (rc != 0)
        return rc;
    rc = kvt_gpu_check(gpu, gpu->cuda.memory_alloc(&t->memory, bytes));
    if (rc != 0)
        t->memory = 0;
    if (rc == 0)
        rc = kvt_gpu_check(
            gpu, gpu->cuda.stream_create(&stream, KVT_CU_STREAM_NON_BLOCKING, gpu->least_priority));
    if (rc == 0) {
        kvt_cu_result result =
            gpu->cuda.fill_words_async(t->memory, 0x3f803f00u, bytes / 4, stream);
        kvt_cu_result end = gpu->cuda.stream_sync(stream);
        (void)gpu->cuda.stream_destroy(stream);
        rc = kvt_gpu_check(gpu, result != KVT_CU_OK ? result : end);
    }
    kvt_gpu_leave(gpu);
    t->slot_bytes = (size_t)kvt_round_up(bytes, 4096);
    t->slots = rc == 0 ? aligned_alloc(4096, t->slot_bytes) : NULL;
    if (rc == 0 && t->slots == NULL)
        return -ENOMEM;
    if (rc != 0)
        return rc;
    memset(t->slots, 0, t->slot_bytes);
    return kvt_gpu_pin(gpu, t->slots, t->slot_bytes);
}

static void give_back(struct tune *t)
{
    if (t->slots != NULL)
        kvt_gpu_unpin(t->gpu, t->slots);
    free(t->slots);
    if (t->memory != 0 && kvt_gpu_enter_to_release(t->gpu) == 0) {
        (void)t->gpu->cuda.memory_free(t->memory);
        kvt_gpu_leave(t->gpu);
    }
}

int kvt_gpu_tune(struct kvt_gpu *gpu, const struct kvt_clock *clock,
                 const struct kvt_gpu_tune_opts *opts, struct kvt_gpu_tuned *out)
{
    static const uint32_t usual[KVT_GPU_TUNE_SIZES] = {2, 16, 32};
    struct tune *t = calloc(1, sizeof(*t));
    uint32_t layers = 0;
    memset(out, 0, sizeof(*out));
    if (t == NULL)
        return -ENOMEM;
    t->gpu = gpu;
    t->clock = clock;
    t->opts = *opts;
    if (t->opts.layers[0] == 0)
        memcpy(t->opts.layers, usual, sizeof(usual));
    t->opts.runs = t->opts.runs == 0 ? RUNS : KVT_MIN(t->opts.runs, RUNS_MAX);
    t->opts.blocks_max =
        t->opts.blocks_max == 0 ? BLOCKS_MAX : KVT_MIN(t->opts.blocks_max, BLOCKS_MAX);
    for (uint32_t i = 0; i < KVT_GPU_TUNE_SIZES; i++) {
        t->opts.layers[i] = KVT_MIN(t->opts.layers[i], LAYERS_MAX);
        layers = KVT_MAX(layers, t->opts.layers[i]);
    }
    int rc = take_memory(t, layers);
    for (uint32_t i = 0; i < KVT_GPU_TUNE_SIZES && rc == 0; i++)
        rc = measure_size(t, i, out);
    if (rc != 0)
        memset(out, 0, sizeof(*out));
    give_back(t);
    free(t);
    return rc;
}

enum kvt_gpu_path kvt_gpu_tuned_path(const struct kvt_gpu_tuned *tuned, int evict,
                                     uint32_t record_bytes, size_t blocks)
{
    uint32_t size = 0; /* the first that is no smaller, else the largest */
    while (size + 1 < KVT_GPU_TUNE_SIZES && tuned->record_bytes[size] < record_bytes)
        size++;
    return blocks <= tuned->sm_blocks[evict != 0][size] ? KVT_GPU_PATH_SM : KVT_GPU_PATH_COPY;
}
