/* `kvtier bench gpu`: device, pool, pinned slots. See gpu_bench.h. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "codec/half.h"
#include "gpu/driver.h"
#include "gpu_bench.h"
#include "kvtier/codec.h"

#define SOURCE_BLOCKS 16u         /* distinct pages; the rest are copies of them */
#define SLOT_BYTES_MAX (2u << 20) /* of a record, up to raw of 8B: 2 MiB and its header */

double gpu_bench_now(void)
{
    struct kvt_clock clock = kvt_clock_system();
    return 1e-9 * (double)kvt_clock_now(&clock);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double gpu_bench_median(double *values, size_t n)
{
    qsort(values, n, sizeof(*values), by_value);
    return values[n / 2];
}

int gpu_bench_fail(struct gpu_bench *b, int rc, const char *what)
{
    if (rc != 0 && b->error[0] == '\0')
        snprintf(b->error, sizeof(b->error), "%s: %s", what, kvt_strerror(rc));
    return rc;
}

int gpu_bench_check(struct gpu_bench *b, kvt_cu_result result, const char *what)
{
    int rc = kvt_gpu_check(b->gpu, result);
    if (rc != 0 && b->error[0] == '\0')
        snprintf(b->error, sizeof(b->error), "%s: %s", what,
                 kvt_cuda_error_name(&b->gpu->cuda, result));
    return rc;
}

int gpu_bench_open(struct gpu_bench *b)
{
    struct kvt_gpu_opts opts = {.device = (int)b->device, .library = b->driver};
    int rc = kvt_gpu_open(&opts, &b->gpu, b->error, sizeof(b->error));
    if (rc != 0)
        return rc;
    b->arena_bytes = (size_t)b->blocks * (SLOT_BYTES_MAX + 4096);
    b->arena = mmap(NULL, b->arena_bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (b->arena == MAP_FAILED) {
        b->arena = NULL;
        return gpu_bench_fail(b, -ENOMEM, "host memory");
    }
    rc = gpu_bench_fail(b, kvt_gpu_pin(b->gpu, b->arena, b->arena_bytes), "pinning host memory");
    return rc != 0 ? rc : gpu_bench_fail(b, kvt_gpu_enter(b->gpu), "the device's context");
}

void gpu_bench_close(struct gpu_bench *b)
{
    if (b->gpu == NULL)
        return;
    gpu_bench_pool_free(b);
    if (b->arena != NULL)
        kvt_gpu_unpin(b->gpu, b->arena);
    kvt_gpu_leave(b->gpu);
    kvt_gpu_close(b->gpu);
    if (b->arena != NULL)
        munmap(b->arena, b->arena_bytes);
}

/* ---- pool ---- */

/* Sums of eight bytes, near a Gaussian; keys with tall means in some channels. */
static void fill_source(struct gpu_bench *b, uint16_t *source, size_t elements, int key)
{
    uint32_t dim = b->geometry->head_dim;
    for (size_t i = 0; i < elements; i++) {
        uint64_t r = kvt_rng_next(&b->rng);
        float x = -4.0f;
        for (int k = 0; k < 8; k++)
            x += (float)(r >> (8 * k) & 255u) / 255.0f;
        source[i] = kvt_float_to_bf16(x + (key && i % dim % 19 == 0 ? 8.0f : 0.0f));
    }
}

static int fill_pool(struct gpu_bench *b)
{
    const struct kvt_cuda *cuda = &b->gpu->cuda;
    size_t block = b->pool_bytes / (size_t)b->blocks / b->layout.part_count;
    size_t elements = block / 2 * SOURCE_BLOCKS;
    uint16_t *source = malloc(elements * 2);
    kvt_cu_stream stream;
    if (source == NULL)
        return gpu_bench_fail(b, -ENOMEM, "host memory");
    int rc =
        gpu_bench_check(b, cuda->stream_create(&stream, KVT_CU_STREAM_NON_BLOCKING, 0), "stream");
    for (uint32_t part = 0; part < b->layout.part_count && rc == 0; part++) {
        if (part < 4) /* later parts take the same numbers */
            fill_source(b, source, elements, part % 2 == 0);
        for (int64_t n = 0; n < b->blocks && rc == 0; n += SOURCE_BLOCKS) {
            size_t count = (size_t)(b->blocks - n < SOURCE_BLOCKS ? b->blocks - n : SOURCE_BLOCKS);
            rc = gpu_bench_check(
                b,
                cuda->copy_to_device_async((uintptr_t)b->places[part].base + (size_t)n * block,
                                           source, count * block, stream),
                "filling the pool");
        }
        if (rc == 0)
            rc = gpu_bench_check(b, cuda->stream_sync(stream), "filling the pool");
    }
    (void)cuda->stream_destroy(stream);
    free(source);
    return rc;
}

int gpu_bench_pool(struct gpu_bench *b, const struct gpu_bench_geometry *g)
{
    size_t part_block = (size_t)16 * g->heads * g->head_dim * 2;
    b->geometry = g;
    b->layout = (struct kvt_layout){.struct_size = sizeof(b->layout),
                                    .block_tokens = 16,
                                    .part_count = 2 * g->layers,
                                    .parts = b->parts};
    b->pool_bytes = part_block * (size_t)b->blocks * 2 * g->layers;
    int rc = gpu_bench_check(b, b->gpu->cuda.memory_alloc(&b->pool_memory, b->pool_bytes),
                             "memory for the pool");
    if (rc != 0) {
        b->pool_memory = 0;
        return rc;
    }
    for (uint32_t i = 0; i < b->layout.part_count; i++) {
        b->parts[i] = (struct kvt_part){.kind = (uint8_t)(i % 2 ? KVT_PART_V : KVT_PART_K),
                                        .dtype = KVT_DTYPE_BF16,
                                        .layer = i / 2,
                                        .heads = g->heads,
                                        .head_dim = g->head_dim};
        b->places[i] = (struct kvt_part_place){
            .base = (void *)(uintptr_t)(b->pool_memory + part_block * (size_t)b->blocks * i),
            .stride_block = (int64_t)part_block,
            .stride_head = g->head_dim * 2, /* NHD */
            .stride_token = (int64_t)g->heads * g->head_dim * 2,
            .stride_elem = 2};
    }
    b->pool = (struct kvt_pool_desc){.struct_size = sizeof(b->pool),
                                     .device = (int32_t)b->device,
                                     .block_count = (uint32_t)b->blocks,
                                     .place_count = b->layout.part_count,
                                     .places = b->places};
    return fill_pool(b);
}

void gpu_bench_pool_free(struct gpu_bench *b)
{
    if (b->pool_memory != 0)
        (void)b->gpu->cuda.memory_free(b->pool_memory);
    b->pool_memory = 0;
}

/* ---- jobs ---- */

static void shuffle(struct gpu_bench *b, uint32_t *order)
{
    for (uint32_t i = 0; i < b->blocks; i++)
        order[i] = i;
    for (uint32_t i = (uint32_t)b->blocks - 1; i > 0; i--) {
        uint32_t j = (uint32_t)kvt_rng_below(&b->rng, i + 1), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
}

int gpu_bench_items(struct gpu_bench *b, uint32_t record_bytes, int scattered,
                    struct kvt_gpu_item *items)
{
    size_t gap = scattered ? 2 : 1; /* no two are neighbours */
    uint32_t *slots = malloc((size_t)b->blocks * sizeof(*slots));
    uint32_t *pages = malloc((size_t)b->blocks * sizeof(*pages));
    int rc = slots != NULL && pages != NULL ? 0 : -ENOMEM;
    if (rc == 0 && (size_t)b->blocks * gap * record_bytes > b->arena_bytes)
        rc = KVT_E_LIMIT;
    if (rc == 0) {
        shuffle(b, slots);
        shuffle(b, pages);
        for (int64_t i = 0; i < b->blocks; i++) {
            size_t slot = scattered ? slots[i] * gap : (size_t)i;
            items[i] =
                (struct kvt_gpu_item){.record = b->arena + slot * record_bytes, .block = pages[i]};
        }
    }
    free(slots);
    free(pages);
    return gpu_bench_fail(b, rc, "slots");
}

int gpu_bench_plan(struct gpu_bench *b, int level, uint32_t ctas, uint32_t jobs,
                   struct kvt_gpu_plan **plan)
{
    struct kvt_gpu_stage_opts opts = {.ctas = ctas,
                                      .depth = (uint32_t)b->depth,
                                      .wave_bytes = (uint32_t)b->wave_bytes,
                                      .records_max = (uint32_t)b->blocks,
                                      .jobs_max = jobs};
    int rc = kvt_gpu_plan_new(b->gpu, &b->layout, 0, level, &b->pool, &opts, plan);
    return gpu_bench_fail(b, rc, "plan");
}

int gpu_bench_job(struct gpu_bench *b, struct kvt_gpu_plan *plan, const struct kvt_gpu_item *items,
                  size_t n, int evict, enum kvt_gpu_path path)
{
    struct kvt_gpu_order order = {.path = path, .guard = 1};
    struct kvt_gpu_job *job;
    int rc = evict ? kvt_gpu_evict(plan, items, n, &order, &job)
                   : kvt_gpu_restore(plan, items, n, &order, &job);
    if (rc != 0)
        return gpu_bench_fail(b, rc, "job");
    while ((rc = kvt_gpu_job_poll(job, 1)) == 0) { /* woken early */
    }
    rc = rc < 0 ? rc : 0;
    for (size_t i = 0; i < n && rc == 0; i++)
        rc = kvt_gpu_job_result(job, i, NULL);
    kvt_gpu_job_free(job);
    return gpu_bench_fail(b, rc, evict ? "evict" : "restore");
}

void gpu_bench_report(struct gpu_bench *b, const struct gpu_bench_figure *f)
{
    double copy = b->copy_gbps[f->direction[0] == 'e' ? 0 : 1];
    json_array_append_new(
        b->results,
        json_pack("{s:s, s:s, s:s, s:s, s:s, s:I, s:i, s:f, s:f, s:f, s:f, s:f, s:f}", "direction",
                  f->direction, "path", f->path, "slots", f->scattered ? "scattered" : "adjacent",
                  "level", kvt_level_name(f->level), "geometry", b->geometry->name, "blocks",
                  (json_int_t)b->blocks, "ctas", (int)f->ctas, "seconds", f->seconds,
                  "encoded_gbps", f->encoded_gbps, "equiv_gbps", f->equiv_gbps, "memcpy_gbps", copy,
                  "ratio", f->equiv_gbps / copy, "link", f->encoded_gbps / copy));
    if (!b->json)
        printf(
            "%-7s  %-7s %-6s %-9s %-4s %4u CTAs %8.2f GB/s encoded %8.2f bf16  x%.2f  link %.3f\n",
            b->geometry->name, f->direction, f->path, f->scattered ? "scattered" : "adjacent",
            kvt_level_name(f->level), f->ctas, f->encoded_gbps, f->equiv_gbps, f->equiv_gbps / copy,
            f->encoded_gbps / copy);
    fflush(stdout);
}
