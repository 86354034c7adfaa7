/* `kvtier bench gpu` on an idle GPU: copies of the same arena in one piece, in pieces of 64 KiB one
 * by one and in one batch; records alone, scattered; then restore and evict by every path.
 *
 * A figure is the median of some runs of one job over all blocks, from the call to the wake-up of
 * the waiting thread. Pages are shuffled, slots adjacent (as
 * a store hands them out) or scattered; checksums are computed in all but "direct".
 */
#include <errno.h>
#include <stdlib.h>

#include "base/checked.h"
#include "cli.h"
#include "gpu_bench.h"
#include "kvtier/codec.h"

#define PIECE_BYTES 65536u

struct copies { /* pieces of one size between the arena and device memory */
    kvt_cu_ptr *host, *device;
    size_t *bytes;
    size_t count;
};

static int copies_make(struct gpu_bench *b, size_t piece, size_t limit, struct copies *copies)
{
    size_t bytes = KVT_MIN(limit, KVT_MIN(b->arena_bytes, b->pool_bytes));
    size_t n = bytes / piece;
    copies->count = n;
    copies->host = calloc(3 * n + 1, sizeof(kvt_cu_ptr));
    if (copies->host == NULL)
        return gpu_bench_fail(b, -ENOMEM, "host memory");
    copies->device = copies->host + n;
    copies->bytes = (size_t *)(copies->device + n);
    for (size_t i = 0; i < n; i++) {
        copies->host[i] = (uintptr_t)b->arena + i * piece;
        copies->device[i] = b->pool_memory + i * piece;
        copies->bytes[i] = piece;
    }
    for (size_t i = n; i > 1; i--) { /* scattered on both sides */
        size_t j = (size_t)kvt_rng_below(&b->rng, i);
        kvt_cu_ptr swap = copies->host[i - 1];
        copies->host[i - 1] = copies->host[j];
        copies->host[j] = swap;
    }
    return 0;
}

static int copies_run(struct gpu_bench *b, const struct copies *copies, int to_device, int batch,
                      kvt_cu_stream stream)
{
    const struct kvt_cuda *cuda = &b->gpu->cuda;
    kvt_cu_result result = KVT_CU_OK;
    if (batch) {
        struct kvt_cu_copy_attributes attributes = {.source_order = 1, .flags = 1};
        size_t start = 0, failed = 0;
        result = cuda->copy_batch(to_device ? copies->device : copies->host,
                                  to_device ? copies->host : copies->device, copies->bytes,
                                  copies->count, &attributes, &start, 1, &failed, stream);
    } else {
        for (size_t i = 0; i < copies->count && result == KVT_CU_OK; i++) {
            void *host = (void *)(uintptr_t)copies->host[i];
            result =
                to_device
                    ? cuda->copy_to_device_async(copies->device[i], host, copies->bytes[i], stream)
                    : cuda->copy_to_host_async(host, copies->device[i], copies->bytes[i], stream);
        }
    }
    if (result == KVT_CU_OK)
        result = cuda->stream_sync(stream);
    return gpu_bench_check(b, result, "copies");
}

/* GB/s of `limit` bytes in pieces of one size. */
static int copies_rate(struct gpu_bench *b, size_t piece, size_t limit, int to_device, int batch,
                       double *gbps)
{
    double times[GPU_BENCH_REPS_MAX];
    struct copies copies = {0};
    kvt_cu_stream stream;
    int rc = gpu_bench_check(b, b->gpu->cuda.stream_create(&stream, KVT_CU_STREAM_NON_BLOCKING, 0),
                             "stream");
    if (rc != 0)
        return rc;
    rc = copies_make(b, piece, limit, &copies);
    for (int64_t i = -1; i < b->reps && rc == 0; i++) {
        double start = gpu_bench_now();
        rc = copies_run(b, &copies, to_device, batch, stream);
        times[i < 0 ? 0 : i] = gpu_bench_now() - start;
    }
    if (rc == 0)
        *gbps = 1e-9 * (double)(copies.count * piece) / gpu_bench_median(times, (size_t)b->reps);
    free(copies.host);
    (void)b->gpu->cuda.stream_destroy(stream);
    return rc;
}

/* What an engine without kernels gets, and what a link allows for records of this size. */
static int measure_copies(struct gpu_bench *b)
{
    uint32_t record = 128 + 4095 + (uint32_t)kvt_payload_bytes(&b->layout, 0, KVT_LEVEL_KV4);
    struct {
        const char *name;
        size_t piece;
        int batch;
        double gbps[2];
    } kinds[] = {{"one", KVT_MIN(b->arena_bytes, b->pool_bytes), 0, {0}},
                 {"64KiB", PIECE_BYTES, 0, {0}},
                 {"64KiB_batch", PIECE_BYTES, 1, {0}},
                 {"record", record / 4096 * 4096, 0, {0}},
                 {"record_batch", record / 4096 * 4096, 1, {0}}};
    int rc = 0;
    for (size_t k = 0; k < KVT_ARRAY_LEN(kinds) && rc == 0; k++) {
        if (kinds[k].batch && b->gpu->cuda.copy_batch == NULL)
            continue;
        /* Pieces of 64 KiB are bf16 pages, of which there are more bytes. */
        size_t limit =
            kinds[k].piece == PIECE_BYTES || k == 0 ? SIZE_MAX : (size_t)b->blocks * kinds[k].piece;
        for (int to_device = 0; to_device < 2 && rc == 0; to_device++)
            rc = copies_rate(b, kinds[k].piece, limit, to_device, kinds[k].batch,
                             &kinds[k].gbps[to_device]);
        if (rc != 0)
            break;
        json_array_append_new(b->pieces,
                              json_pack("{s:s, s:s, s:I, s:f, s:f}", "geometry", b->geometry->name,
                                        "copies", kinds[k].name, "piece_bytes",
                                        (json_int_t)kinds[k].piece, "to_host_gbps",
                                        kinds[k].gbps[0], "to_device_gbps", kinds[k].gbps[1]));
        if (!b->json)
            printf("%-7s  copies  %-13s to host %6.2f  to device %6.2f GB/s\n", b->geometry->name,
                   kinds[k].name, kinds[k].gbps[0], kinds[k].gbps[1]);
    }
    b->copy_gbps[0] = kinds[0].gbps[0];
    b->copy_gbps[1] = kinds[0].gbps[1];
    return rc;
}

static int measure_slots(struct gpu_bench *b, int level, int evict, enum kvt_gpu_path path,
                         uint32_t ctas, int scattered)
{
    static const char *const paths[] = {"", "copy", "sm", "direct"};
    double times[GPU_BENCH_REPS_MAX];
    struct kvt_gpu_plan *plan;
    struct kvt_gpu_item *items = calloc((size_t)b->blocks, sizeof(*items));
    if (items == NULL)
        return gpu_bench_fail(b, -ENOMEM, "host memory");
    int rc = gpu_bench_plan(b, level, ctas, 1, &plan);
    if (rc != 0) {
        free(items);
        return rc;
    }
    uint32_t record_bytes = kvt_gpu_plan_record_bytes(plan);
    size_t n = (size_t)b->blocks;
    rc = gpu_bench_items(b, record_bytes, scattered, items);
    if (rc == 0 && !evict) /* records to restore */
        rc = gpu_bench_job(b, plan, items, n, 1, KVT_GPU_PATH_COPY);
    if (rc == 0)
        rc = gpu_bench_job(b, plan, items, n, evict, path);
    for (int64_t i = 0; i < b->reps && rc == 0; i++) {
        double start = gpu_bench_now();
        rc = gpu_bench_job(b, plan, items, n, evict, path);
        times[i] = gpu_bench_now() - start;
    }
    if (rc == 0) {
        double seconds = gpu_bench_median(times, (size_t)b->reps);
        gpu_bench_report(b, &(struct gpu_bench_figure){
                                .direction = evict ? "evict" : "restore",
                                .path = paths[path],
                                .level = level,
                                .scattered = scattered,
                                .ctas = ctas,
                                .seconds = seconds,
                                .encoded_gbps = 1e-9 * (double)record_bytes * (double)n / seconds,
                                .equiv_gbps = 1e-9 * (double)b->pool_bytes / seconds});
    }
    kvt_gpu_plan_free(plan);
    free(items);
    return rc;
}

static int measure(struct gpu_bench *b, int level, int evict, enum kvt_gpu_path path, uint32_t ctas)
{
    return measure_slots(b, level, evict, path, ctas, 0);
}

static int measure_ctas(struct gpu_bench *b, uint32_t ctas, int all)
{
    int rc = measure(b, KVT_LEVEL_KV4, 0, KVT_GPU_PATH_COPY, ctas);
    if (rc == 0)
        rc = measure(b, KVT_LEVEL_KV4, 1, KVT_GPU_PATH_COPY, ctas);
    if (rc == 0 && ctas >= 16)
        rc = measure_slots(b, KVT_LEVEL_KV4, 0, KVT_GPU_PATH_COPY, ctas, 1);
    if (rc == 0 && ctas >= 16)
        rc = measure_slots(b, KVT_LEVEL_KV4, 1, KVT_GPU_PATH_COPY, ctas, 1);
    if (rc == 0 && all)
        rc = measure(b, KVT_LEVEL_KV4, 0, KVT_GPU_PATH_DIRECT, ctas);
    if (rc == 0 && all && ctas > 1)
        rc = measure(b, KVT_LEVEL_KV4, 0, KVT_GPU_PATH_SM, ctas);
    if (rc == 0 && all && ctas > 1)
        rc = measure(b, KVT_LEVEL_KV4, 1, KVT_GPU_PATH_SM, ctas);
    return rc;
}

int gpu_bench_link(struct gpu_bench *b)
{
    static const uint32_t ctas[] = {1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 132};
    static const int others[] = {KVT_LEVEL_INT4, KVT_LEVEL_KV5, KVT_LEVEL_KV6, KVT_LEVEL_KV8};
    int rc = measure_copies(b);
    if (b->ctas > 0 && rc == 0)
        return measure_ctas(b, (uint32_t)b->ctas, 0);
    for (size_t i = 0; i < KVT_ARRAY_LEN(ctas) && rc == 0; i++)
        if (!kvt_cli_interrupted() && (!b->quick || ctas[i] == 16 || ctas[i] == 64))
            rc = measure_ctas(b, ctas[i], !b->quick && (ctas[i] == 16 || ctas[i] == 132));
    for (size_t i = 0; i < KVT_ARRAY_LEN(others) && rc == 0 && !b->quick; i++) {
        rc = measure(b, others[i], 0, KVT_GPU_PATH_COPY, 16);
        if (rc == 0)
            rc = measure(b, others[i], 1, KVT_GPU_PATH_COPY, 64);
    }
    return rc;
}
