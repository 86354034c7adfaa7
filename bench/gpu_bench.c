/* gpu_bench [--library PATH] [--blocks N] [--reps N] [--commit HASH] [--quick]: rates of restore
 * and evict over the link, as JSON on stdout and one line per measurement on stderr.
 *
 * Every figure is the median of some runs of one job over N scattered blocks, timed from the call
 * to the wake-up of the waiting thread; checksums are computed in all but "direct". Records lie in
 * shuffled slots of pinned memory, pages are shuffled too. memcpy_gbps is the pinned copy of the
 * same arena in one piece, same direction, same run. equiv_gbps counts bf16 bytes of the pool.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "base/rng.h"
#include "codec/half.h"
#include "format/record.h"
#include "gpu/gpu_internal.h"
#include "kvtier/codec.h"

#define REPS_MAX 21
#define SOURCE_BLOCKS 16u /* distinct pages; the rest are copies of them */

struct geometry {
    const char *name;
    uint32_t layers, heads, head_dim;
};

struct bench {
    struct kvt_gpu *gpu;
    struct kvt_rng rng;
    uint32_t blocks, reps, wave, depth;
    uint32_t only_ctas;
    int first; /* of the JSON array */
    struct kvt_layout layout;
    struct kvt_part parts[256];
    struct kvt_part_place places[256];
    struct kvt_pool_desc pool;
    const struct geometry *geometry;
    kvt_cu_ptr pool_memory;
    size_t pool_bytes;
    uint8_t *arena; /* pinned */
    size_t arena_bytes;
    double copy_gbps[2]; /* to host, to device */
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void die(const char *what, int rc)
{
    fprintf(stderr, "gpu_bench: %s: %s\n", what, kvt_strerror(rc));
    exit(1);
}

static void check(const struct bench *b, kvt_cu_result result, const char *what)
{
    if (kvt_gpu_check(b->gpu, result) != 0)
        die(what, kvt_gpu_check(b->gpu, result));
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *values, uint32_t n)
{
    qsort(values, n, sizeof(*values), by_value);
    return values[n / 2];
}

/* ---- pool and arena ---- */

static void fill_pool(struct bench *b)
{
    size_t block = b->pool_bytes / b->blocks / b->layout.part_count;
    size_t elements = block / 2 * SOURCE_BLOCKS;
    uint16_t *source = malloc(elements * 2);
    kvt_cu_stream stream;
    if (source == NULL)
        die("memory", -1);
    check(b, b->gpu->cuda.stream_create(&stream, KVT_CU_STREAM_NON_BLOCKING, 0), "stream");
    for (uint32_t part = 0; part < b->layout.part_count; part++) {
        uint32_t dim = b->geometry->head_dim;
        for (size_t i = 0; part < 4 && i < elements; i++) { /* later parts take the same numbers */
            uint64_t r = kvt_rng_next(&b->rng);
            float x = -4.0f;
            for (int k = 0; k < 8; k++)
                x += (float)(r >> (8 * k) & 255u) / 255.0f;
            source[i] = kvt_float_to_bf16(x + (part % 2 == 0 && i % dim % 19 == 0 ? 8.0f : 0.0f));
        }
        for (uint32_t n = 0; n < b->blocks; n += SOURCE_BLOCKS) {
            uint32_t count = b->blocks - n < SOURCE_BLOCKS ? b->blocks - n : SOURCE_BLOCKS;
            check(b,
                  b->gpu->cuda.copy_to_device_async((uintptr_t)b->places[part].base + n * block,
                                                    source, count * block, stream),
                  "fill");
        }
        check(b, b->gpu->cuda.stream_sync(stream), "fill");
    }
    (void)b->gpu->cuda.stream_destroy(stream);
    free(source);
}

static void open_pool(struct bench *b, const struct geometry *g)
{
    size_t part_block = (size_t)16 * g->heads * g->head_dim * 2;
    b->geometry = g;
    b->layout = (struct kvt_layout){sizeof(b->layout), 16, 2 * g->layers, b->parts};
    b->pool_bytes = part_block * b->blocks * 2 * g->layers;
    check(b, b->gpu->cuda.memory_alloc(&b->pool_memory, b->pool_bytes), "pool");
    for (uint32_t i = 0; i < b->layout.part_count; i++) {
        b->parts[i] = (struct kvt_part){.kind = (uint8_t)(i % 2 ? KVT_PART_V : KVT_PART_K),
                                        .dtype = KVT_DTYPE_BF16,
                                        .layer = i / 2,
                                        .heads = g->heads,
                                        .head_dim = g->head_dim};
        b->places[i] = (struct kvt_part_place){
            .base = (void *)(uintptr_t)(b->pool_memory + part_block * b->blocks * i),
            .stride_block = (int64_t)part_block,
            .stride_head = g->head_dim * 2, /* NHD */
            .stride_token = (int64_t)g->heads * g->head_dim * 2,
            .stride_elem = 2};
    }
    b->pool = (struct kvt_pool_desc){.struct_size = sizeof(b->pool),
                                     .block_count = b->blocks,
                                     .place_count = b->layout.part_count,
                                     .places = b->places};
    fill_pool(b);
}

static double copy_rate(struct bench *b, int to_device)
{
    double times[REPS_MAX];
    kvt_cu_stream stream;
    kvt_cu_ptr target;
    check(b, b->gpu->cuda.stream_create(&stream, KVT_CU_STREAM_NON_BLOCKING, 0), "stream");
    check(b, b->gpu->cuda.memory_alloc(&target, b->arena_bytes), "copy target");
    for (uint32_t i = 0; i < b->reps; i++) {
        double start = now();
        check(b,
              to_device
                  ? b->gpu->cuda.copy_to_device_async(target, b->arena, b->arena_bytes, stream)
                  : b->gpu->cuda.copy_to_host_async(b->arena, target, b->arena_bytes, stream),
              "copy");
        check(b, b->gpu->cuda.stream_sync(stream), "copy");
        times[i] = now() - start;
    }
    (void)b->gpu->cuda.memory_free(target);
    (void)b->gpu->cuda.stream_destroy(stream);
    return 1e-9 * (double)b->arena_bytes / median(times, b->reps);
}

/* bf16 pages in pieces of 64 KiB, one call each: what an engine without kernels does. */
static double piece_rate(struct bench *b)
{
    double times[REPS_MAX];
    kvt_cu_stream stream;
    size_t piece = 65536;
    size_t bytes =
        (b->arena_bytes < b->pool_bytes ? b->arena_bytes : b->pool_bytes) / piece * piece;
    check(b, b->gpu->cuda.stream_create(&stream, KVT_CU_STREAM_NON_BLOCKING, 0), "stream");
    for (uint32_t i = 0; i < b->reps; i++) {
        double start = now();
        for (size_t at = 0; at < bytes; at += piece)
            check(b,
                  b->gpu->cuda.copy_to_device_async(b->pool_memory +
                                                        (at * 7) % (bytes / piece * piece),
                                                    b->arena + at, piece, stream),
                  "piece");
        check(b, b->gpu->cuda.stream_sync(stream), "piece");
        times[i] = now() - start;
    }
    (void)b->gpu->cuda.stream_destroy(stream);
    return 1e-9 * (double)bytes / median(times, b->reps);
}

/* ---- jobs ---- */

static void shuffle(struct bench *b, uint32_t *order, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        order[i] = i;
    for (uint32_t i = n - 1; i > 0; i--) {
        uint32_t j = (uint32_t)kvt_rng_below(&b->rng, i + 1), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
}

static void make_items(struct bench *b, uint32_t record_bytes, struct kvt_gpu_item *items)
{
    uint32_t *slots = malloc(b->blocks * sizeof(*slots)),
             *pages = malloc(b->blocks * sizeof(*pages));
    if (slots == NULL || pages == NULL)
        die("memory", -1);
    shuffle(b, slots, b->blocks);
    shuffle(b, pages, b->blocks);
    for (uint32_t i = 0; i < b->blocks; i++)
        items[i] = (struct kvt_gpu_item){b->arena + (size_t)slots[i] * record_bytes, pages[i]};
    free(slots);
    free(pages);
}

static double run_job(struct bench *b, struct kvt_gpu_plan *plan, const struct kvt_gpu_item *items,
                      int evict, enum kvt_gpu_path path)
{
    struct kvt_gpu_order order = {.path = path, .guard = 1};
    struct kvt_gpu_job *job;
    double start = now();
    int rc = evict ? kvt_gpu_evict(plan, items, b->blocks, &order, &job)
                   : kvt_gpu_restore(plan, items, b->blocks, &order, &job);
    if (rc != 0)
        die("job", rc);
    rc = kvt_gpu_job_poll(job, 1);
    double seconds = now() - start;
    for (uint32_t i = 0; i < b->blocks && rc == 1; i++) {
        int status = kvt_gpu_job_result(job, i, NULL);
        if (status != 0)
            rc = status;
    }
    kvt_gpu_job_free(job);
    if (rc != 1)
        die(evict ? "evict" : "restore", rc);
    return seconds;
}

static void measure(struct bench *b, int level, int evict, enum kvt_gpu_path path, uint32_t ctas,
                    uint32_t move_ctas)
{
    static const char *const paths[] = {"", "copy", "sm", "direct"};
    struct kvt_gpu_stage_opts opts = {.ctas = ctas,
                                      .move_ctas = move_ctas,
                                      .wave = b->wave,
                                      .depth = b->depth,
                                      .records_max = b->blocks,
                                      .jobs_max = 1};
    struct kvt_gpu_plan *plan;
    double times[REPS_MAX];
    int rc = kvt_gpu_plan_new(b->gpu, &b->layout, 0, level, &b->pool, &opts, &plan);
    if (rc != 0)
        die("plan", rc);
    uint32_t record_bytes = kvt_gpu_plan_record_bytes(plan);
    struct kvt_gpu_item *items = calloc(b->blocks, sizeof(*items));
    if (items == NULL)
        die("memory", -1);
    make_items(b, record_bytes, items);
    if (!evict) /* records to restore */
        (void)run_job(b, plan, items, 1, KVT_GPU_PATH_COPY);
    (void)run_job(b, plan, items, evict, path);
    for (uint32_t i = 0; i < b->reps; i++)
        times[i] = run_job(b, plan, items, evict, path);
    double seconds = median(times, b->reps);
    double encoded = 1e-9 * (double)record_bytes * b->blocks / seconds;
    double equiv = 1e-9 * (double)b->pool_bytes / seconds;
    double copy = b->copy_gbps[evict ? 0 : 1];
    printf("%s\n  {\"direction\":\"%s\",\"path\":\"%s\",\"level\":\"%s\",\"geometry\":\"%s\","
           "\"blocks\":%u,\"ctas\":%u,\"move_ctas\":%u,\"seconds\":%.6f,\"encoded_gbps\":%.2f,"
           "\"equiv_gbps\":%.2f,\"memcpy_gbps\":%.2f,\"ratio\":%.3f,\"link\":%.3f}",
           b->first ? "" : ",", evict ? "evict" : "restore", paths[path], kvt_level_name(level),
           b->geometry->name, b->blocks, ctas, path == KVT_GPU_PATH_SM ? move_ctas : 0, seconds,
           encoded, equiv, copy, equiv / copy, encoded / copy);
    fprintf(stderr, "%-7s %-6s %-4s %-7s ctas %3u/%2u  %6.2f enc  %7.2f equiv  x%.2f  link %.3f\n",
            evict ? "evict" : "restore", paths[path], kvt_level_name(level), b->geometry->name,
            ctas, path == KVT_GPU_PATH_SM ? move_ctas : 0, encoded, equiv, equiv / copy,
            encoded / copy);
    b->first = 0;
    fflush(stdout);
    free(items);
    kvt_gpu_plan_free(plan);
}

static void measure_geometry(struct bench *b, const struct geometry *g, int quick)
{
    static const uint32_t ctas[] = {1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 132};
    static const int others[] = {KVT_LEVEL_INT4, KVT_LEVEL_KV5, KVT_LEVEL_KV6, KVT_LEVEL_KV8};
    open_pool(b, g);
    b->copy_gbps[0] = copy_rate(b, 0);
    b->copy_gbps[1] = copy_rate(b, 1);
    fprintf(stderr, "%s: memcpy to host %.2f, to device %.2f, 64 KiB pieces to device %.2f GB/s\n",
            g->name, b->copy_gbps[0], b->copy_gbps[1], piece_rate(b));
    fill_pool(b);
    if (b->only_ctas > 0) {
        measure(b, KVT_LEVEL_KV4, 0, KVT_GPU_PATH_COPY, b->only_ctas, 1);
        measure(b, KVT_LEVEL_KV4, 1, KVT_GPU_PATH_COPY, b->only_ctas, 1);
        (void)b->gpu->cuda.memory_free(b->pool_memory);
        return;
    }
    for (size_t i = 0; i < sizeof(ctas) / sizeof(ctas[0]); i++) {
        if (quick && i % 5 != 0)
            continue;
        uint32_t move = ctas[i] >= 4 ? ctas[i] / 4 : 1;
        measure(b, KVT_LEVEL_KV4, 0, KVT_GPU_PATH_COPY, ctas[i], move);
        measure(b, KVT_LEVEL_KV4, 0, KVT_GPU_PATH_DIRECT, ctas[i], move);
        if (ctas[i] > 1)
            measure(b, KVT_LEVEL_KV4, 0, KVT_GPU_PATH_SM, ctas[i], move);
        measure(b, KVT_LEVEL_KV4, 1, KVT_GPU_PATH_COPY, ctas[i], move);
        if (ctas[i] > 1)
            measure(b, KVT_LEVEL_KV4, 1, KVT_GPU_PATH_SM, ctas[i], move);
    }
    measure(b, KVT_LEVEL_KV4, 0, KVT_GPU_PATH_SM, 16, 8);
    measure(b, KVT_LEVEL_KV4, 1, KVT_GPU_PATH_SM, 64, 8);
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        measure(b, others[i], 0, KVT_GPU_PATH_COPY, 16, 4);
        measure(b, others[i], 1, KVT_GPU_PATH_COPY, 64, 16);
    }
    (void)b->gpu->cuda.memory_free(b->pool_memory);
}

int main(int argc, char **argv)
{
    static const struct geometry geometries[] = {{"70b-tp4", 80, 2, 128}, {"8b", 32, 8, 128}};
    static struct bench bench;
    struct bench *b = &bench;
    struct kvt_gpu_opts opts = {0};
    const char *commit = "";
    char reason[256];
    int quick = 0;
    b->blocks = 1000;
    b->reps = 7;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--library") == 0)
            opts.library = value, i++;
        else if (strcmp(argv[i], "--blocks") == 0)
            b->blocks = (uint32_t)atoi(value), i++;
        else if (strcmp(argv[i], "--reps") == 0)
            b->reps = (uint32_t)atoi(value), i++;
        else if (strcmp(argv[i], "--wave") == 0) /* see struct kvt_gpu_stage_opts */
            b->wave = (uint32_t)atoi(value), i++;
        else if (strcmp(argv[i], "--depth") == 0)
            b->depth = (uint32_t)atoi(value), i++;
        else if (strcmp(argv[i], "--ctas") == 0) /* only this number, only kv4 by copy engine */
            b->only_ctas = (uint32_t)atoi(value), i++;
        else if (strcmp(argv[i], "--commit") == 0)
            commit = value, i++;
        else if (strcmp(argv[i], "--quick") == 0)
            quick = 1;
    }
    if (b->reps < 1 || b->reps > REPS_MAX || b->blocks < 1)
        return 2;
    int rc = kvt_gpu_open(&opts, &b->gpu, reason, sizeof(reason));
    if (rc != 0) {
        fprintf(stderr, "gpu_bench: %s\n", reason);
        return 1;
    }
    b->rng.state = 42;
    b->first = 1;
    b->arena_bytes = (size_t)b->blocks * (2u << 20);
    b->arena = mmap(NULL, b->arena_bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (b->arena == MAP_FAILED || (rc = kvt_gpu_pin(b->gpu, b->arena, b->arena_bytes)) != 0)
        die("pin", rc);
    if (kvt_gpu_enter(b->gpu) != 0)
        die("context", KVT_E_DEVICE);
    struct kvt_gpu_info info;
    kvt_gpu_info(b->gpu, &info);
    printf("{\"device\":\"%s\",\"cuda_driver\":%d,\"multiprocessors\":%d,\"copy_engines\":%d,"
           "\"commit\":\"%s\",\"block_tokens\":16,\"reps\":%u,\"results\":[",
           info.name, info.driver_version, info.multiprocessors, info.copy_engines, commit,
           b->reps);
    for (size_t i = 0; i < 2; i++)
        measure_geometry(b, &geometries[i], quick);
    printf("\n]}\n");
    kvt_gpu_leave(b->gpu);
    kvt_gpu_close(b->gpu);
    munmap(b->arena, b->arena_bytes);
    return 0;
}
