/* `kvtier bench gpu` beside a saturating stream of bf16 matrix products (8192 cubed, by cuBLAS,
 * found at run time): how fast restore and evict go, and how much slower the products become.
 *
 * One pair is a window of products alone and one with transfers running all through it, in
 * alternating order; the products are timed by events on their own stream. Slowdown and rate are
 * means over the pairs with a 95 % confidence interval (Student).
 */
#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "cli.h"
#include "gpu_bench.h"
#include "kvtier/codec.h"

#define SIDE 8192
#define WINDOW 30 /* products of a window, some 45 ms of an H200 */
#define JOBS 2u
#define PAIRS_MAX 64

/* cuBLAS and the two driver functions that only this file needs, declared by ourselves. */
enum { OP_N = 0, TYPE_BF16 = 14, COMPUTE_F32 = 68, ALGO_DEFAULT = -1 };
struct products {
    void *library, *handle;
    int (*create)(void **handle);
    int (*destroy)(void *handle);
    int (*set_stream)(void *handle, void *stream);
    int (*gemm)(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha,
                const void *a, int type_a, int lda, const void *b, int type_b, int ldb,
                const void *beta, void *c, int type_c, int ldc, int compute, int algorithm);
    int (*elapsed)(float *ms, void *start, void *end); /* cuEventElapsedTime */
    kvt_cu_ptr memory;                                 /* three matrices */
    kvt_cu_stream stream;
    kvt_cu_event start, end;
};

static int symbol(void *library, const char *name, void *out)
{
    void *address = dlsym(library, name);
    memcpy(out, &address, sizeof(address));
    return address != NULL ? 0 : KVT_E_UNSUPPORTED;
}

static int load_cublas(struct gpu_bench *b, struct products *p)
{
    const char *names[] = {b->cublas, "libcublas.so.13", "libcublas.so.12", "libcublas.so"};
    for (size_t i = b->cublas ? 0 : 1; i < KVT_ARRAY_LEN(names) && p->library == NULL; i++)
        p->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (p->library == NULL)
        return KVT_E_UNSUPPORTED;
    int rc = symbol(p->library, "cublasCreate_v2", &p->create);
    if (rc == 0)
        rc = symbol(p->library, "cublasDestroy_v2", &p->destroy);
    if (rc == 0)
        rc = symbol(p->library, "cublasSetStream_v2", &p->set_stream);
    if (rc == 0)
        rc = symbol(p->library, "cublasGemmEx", &p->gemm);
    if (rc == 0)
        rc = symbol(b->gpu->cuda.library, "cuEventElapsedTime", &p->elapsed);
    if (rc == 0 && p->create(&p->handle) != 0)
        rc = KVT_E_DEVICE;
    return rc;
}

/* Random bf16 near 1: products of zeros run faster than real ones. */
static int fill_matrices(struct gpu_bench *b, struct products *p)
{
    size_t elements = (size_t)SIDE * SIDE;
    uint16_t *source = malloc(elements * 2);
    if (source == NULL)
        return -ENOMEM;
    for (size_t i = 0; i < elements; i += 4) {
        uint64_t r = kvt_rng_next(&b->rng);
        for (size_t k = 0; k < 4; k++)
            source[i + k] = (uint16_t)(0x3f00u | (r >> (16 * k) & 0x80ffu));
    }
    int rc = 0;
    for (size_t m = 0; m < 2 && rc == 0; m++)
        rc = gpu_bench_check(b,
                             b->gpu->cuda.copy_to_device_async(p->memory + m * elements * 2, source,
                                                               elements * 2, p->stream),
                             "matrices");
    if (rc == 0)
        rc = gpu_bench_check(b, b->gpu->cuda.stream_sync(p->stream), "matrices");
    free(source);
    return rc;
}

static int products_open(struct gpu_bench *b, struct products *p)
{
    const struct kvt_cuda *cuda = &b->gpu->cuda;
    int rc = gpu_bench_check(b, cuda->stream_create(&p->stream, KVT_CU_STREAM_NON_BLOCKING, 0),
                             "stream");
    if (rc == 0)
        rc =
            gpu_bench_check(b, cuda->memory_alloc(&p->memory, (size_t)SIDE * SIDE * 6), "matrices");
    if (rc == 0)
        rc = gpu_bench_check(b, cuda->event_create(&p->start, 0), "event");
    if (rc == 0)
        rc = gpu_bench_check(b, cuda->event_create(&p->end, 0), "event");
    if (rc == 0)
        rc = fill_matrices(b, p);
    if (rc == 0 && p->set_stream(p->handle, p->stream) != 0)
        rc = gpu_bench_fail(b, KVT_E_DEVICE, "cuBLAS");
    return rc;
}

static void products_close(struct gpu_bench *b, struct products *p)
{
    const struct kvt_cuda *cuda = &b->gpu->cuda;
    if (p->handle != NULL)
        (void)p->destroy(p->handle);
    if (p->start != NULL)
        (void)cuda->event_destroy(p->start);
    if (p->end != NULL)
        (void)cuda->event_destroy(p->end);
    if (p->memory != 0)
        (void)cuda->memory_free(p->memory);
    if (p->stream != NULL)
        (void)cuda->stream_destroy(p->stream);
    if (p->library != NULL)
        dlclose(p->library);
}

static int queue_window(struct gpu_bench *b, struct products *p)
{
    static const float one = 1.0f, zero = 0.0f;
    size_t matrix = (size_t)SIDE * SIDE * 2;
    int rc = gpu_bench_check(b, b->gpu->cuda.event_record(p->start, p->stream), "event");
    for (int i = 0; i < WINDOW && rc == 0; i++)
        if (p->gemm(p->handle, OP_N, OP_N, SIDE, SIDE, SIDE, &one, (void *)(uintptr_t)p->memory,
                    TYPE_BF16, SIDE, (void *)(uintptr_t)(p->memory + matrix), TYPE_BF16, SIDE,
                    &zero, (void *)(uintptr_t)(p->memory + 2 * matrix), TYPE_BF16, SIDE,
                    COMPUTE_F32, ALGO_DEFAULT) != 0)
            rc = gpu_bench_fail(b, KVT_E_DEVICE, "cublasGemmEx");
    return rc != 0 ? rc : gpu_bench_check(b, b->gpu->cuda.event_record(p->end, p->stream), "event");
}

static int window_tflops(struct gpu_bench *b, struct products *p, double *tflops)
{
    float ms = 0;
    int rc = gpu_bench_check(b, b->gpu->cuda.event_sync(p->end), "products");
    if (rc == 0)
        rc = gpu_bench_check(b, p->elapsed(&ms, p->start, p->end), "products");
    *tflops = 2.0 * SIDE * SIDE * (double)SIDE * WINDOW / (1e-3 * (double)ms) * 1e-12;
    return rc;
}

/* ---- transfers beside it ---- */

struct traffic {
    struct kvt_gpu_plan *plan;
    struct kvt_gpu_item *items;
    size_t slice; /* records of a job */
    int evict;
    size_t at;
    struct kvt_gpu_job *jobs[JOBS];
    size_t oldest, flying;
};

static int traffic_send(struct gpu_bench *b, struct traffic *t)
{
    struct kvt_gpu_order order = {.path = KVT_GPU_PATH_COPY, .guard = 1};
    struct kvt_gpu_job **job = &t->jobs[(t->oldest + t->flying) % JOBS];
    int rc = t->evict ? kvt_gpu_evict(t->plan, t->items + t->at, t->slice, &order, job)
                      : kvt_gpu_restore(t->plan, t->items + t->at, t->slice, &order, job);
    t->at = (t->at + t->slice) % ((size_t)b->blocks / t->slice * t->slice);
    t->flying += rc == 0;
    return gpu_bench_fail(b, rc, "transfer");
}

static int traffic_wait(struct gpu_bench *b, struct traffic *t)
{
    int rc;
    struct kvt_gpu_job *job = t->jobs[t->oldest];
    while ((rc = kvt_gpu_job_poll(job, 1)) == 0) { /* woken early */
    }
    kvt_gpu_job_free(job);
    t->oldest = (t->oldest + 1) % JOBS;
    t->flying--;
    return gpu_bench_fail(b, rc < 0 ? rc : 0, "transfer");
}

/* Transfers until the window is over; GB/s of records between the first and the last end in it. */
static int window_with(struct gpu_bench *b, struct products *p, struct traffic *t, double *tflops,
                       double *gbps)
{
    size_t ended = 0;
    double first = 0, last = 0;
    int rc = 0, over = 0;
    while (t->flying < JOBS && rc == 0) /* running before the products start */
        rc = traffic_send(b, t);
    if (rc == 0)
        rc = queue_window(b, p);
    while (!over && rc == 0) {
        rc = traffic_wait(b, t);
        last = gpu_bench_now();
        first = ended == 0 ? last : first;
        ended++;
        over = b->gpu->cuda.event_query(p->end) != KVT_CU_NOT_READY;
        if (!over && rc == 0)
            rc = traffic_send(b, t);
    }
    while (t->flying > 0)
        if (traffic_wait(b, t) != 0)
            rc = KVT_E_DEVICE;
    if (rc == 0)
        rc = window_tflops(b, p, tflops);
    *gbps = ended > 1 ? 1e-9 * (double)(ended - 1) * (double)t->slice *
                            kvt_gpu_plan_record_bytes(t->plan) / (last - first)
                      : 0;
    return rc;
}

static int window_alone(struct gpu_bench *b, struct products *p, double *tflops)
{
    int rc = queue_window(b, p);
    return rc == 0 ? window_tflops(b, p, tflops) : rc;
}

/* ---- figures ---- */

struct estimate {
    double mean, ci95;
};

/* Student's t for 95 % and n - 1 degrees of freedom: a fit, within 1 % from n = 4 on. */
static struct estimate estimate(const double *values, size_t n)
{
    double sum = 0, squares = 0;
    for (size_t i = 0; i < n; i++)
        sum += values[i];
    double mean = sum / (double)n;
    for (size_t i = 0; i < n; i++)
        squares += (values[i] - mean) * (values[i] - mean);
    if (n < 2)
        return (struct estimate){mean, INFINITY};
    double f = (double)(n - 1), t = 1.96 + 2.4 / f + 2.9 / (f * f) + 5.5 / (f * f * f);
    return (struct estimate){mean, t * sqrt(squares / f / (double)n)};
}

static void report(struct gpu_bench *b, int evict, uint32_t ctas, const double *alone,
                   const double *with, const double *slowdown, const double *gbps)
{
    size_t n = (size_t)b->pairs;
    struct estimate before = estimate(alone, n), beside = estimate(with, n);
    struct estimate slower = estimate(slowdown, n), rate = estimate(gbps, n);
    double record = (double)kvt_payload_bytes(&b->layout, 0, KVT_LEVEL_KV4) + 128;
    double factor = (double)b->pool_bytes / (double)b->blocks / (ceil(record / 4096) * 4096);
    double copy = b->copy_gbps[evict ? 0 : 1];
    json_array_append_new(
        b->gemm,
        json_pack("{s:s, s:s, s:s, s:I, s:i, s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}",
                  "direction", evict ? "evict" : "restore", "geometry", b->geometry->name, "level",
                  "kv4", "wave_bytes", (json_int_t)b->wave_bytes, "ctas", (int)ctas, "pairs",
                  (int)n, "alone", before.mean, "with", beside.mean, "slowdown_pct", slower.mean,
                  "slowdown_ci95", slower.ci95, "encoded_gbps", rate.mean, "encoded_ci95",
                  rate.ci95, "equiv_gbps", rate.mean * factor, "memcpy_gbps", copy, "ratio",
                  rate.mean * factor / copy));
    if (!b->json)
        printf("%-7s  %-7s beside products, waves of %2lld MB, %3u CTAs  slowdown %5.2f +- %.2f %% "
               " %7.2f +- %.2f "
               "GB/s "
               "bf16  x%.2f\n",
               b->geometry->name, evict ? "evict" : "restore", (long long)b->wave_bytes / 1000000,
               ctas, slower.mean, slower.ci95, rate.mean * factor, rate.ci95 * factor,
               rate.mean * factor / copy);
    fflush(stdout);
}

static int measure_pairs(struct gpu_bench *b, struct products *p, struct traffic *t, uint32_t ctas)
{
    double alone[PAIRS_MAX], with[PAIRS_MAX], slowdown[PAIRS_MAX], gbps[PAIRS_MAX];
    int rc = 0;
    for (int64_t i = 0; i < b->pairs && rc == 0; i++) {
        if (i % 2 == 0)
            rc = window_alone(b, p, &alone[i]);
        if (rc == 0)
            rc = window_with(b, p, t, &with[i], &gbps[i]);
        if (i % 2 != 0 && rc == 0)
            rc = window_alone(b, p, &alone[i]);
        slowdown[i] = rc == 0 ? 100 * (alone[i] / with[i] - 1) : 0;
    }
    if (rc == 0)
        report(b, t->evict, ctas, alone, with, slowdown, gbps);
    return rc;
}

static int measure(struct gpu_bench *b, struct products *p, int evict, uint32_t ctas)
{
    struct traffic t = {.evict = evict};
    t.items = calloc((size_t)b->blocks, sizeof(*t.items));
    int rc = t.items != NULL ? gpu_bench_plan(b, KVT_LEVEL_KV4, ctas, JOBS, &t.plan) : -ENOMEM;
    if (rc == 0) {
        t.slice = KVT_MIN(2u * t.plan->whole.wave, (size_t)b->blocks);
        rc = gpu_bench_items(b, kvt_gpu_plan_record_bytes(t.plan), 0, t.items);
        if (rc == 0) /* records to restore */
            rc = gpu_bench_job(b, t.plan, t.items, (size_t)b->blocks, 1, KVT_GPU_PATH_COPY);
        if (rc == 0)
            rc = measure_pairs(b, p, &t, ctas);
        kvt_gpu_plan_free(t.plan);
    }
    free(t.items);
    return gpu_bench_fail(b, rc, "transfer");
}

int gpu_bench_gemm(struct gpu_bench *b)
{
    /* Engines that run one long kernel after another let ours start in between only: then the size
     * of a launch counts as much as its width. */
    static const struct {
        uint32_t ctas, wave_mb;
    } points[] = {{1, 11},  {4, 11},  {8, 11},   {16, 11}, {32, 11}, {8, 22},  {16, 22},
                  {32, 22}, {64, 22}, {96, 22},  {16, 33}, {32, 33}, {64, 33}, {96, 33},
                  {64, 38}, {96, 38}, {132, 38}, {32, 44}, {64, 44}, {96, 44}, {132, 44}};
    int64_t wave_bytes = b->wave_bytes;
    struct products p = {0};
    double warm;
    int rc = load_cublas(b, &p);
    if (rc == KVT_E_UNSUPPORTED) {
        products_close(b, &p);
        if (!b->json)
            printf("no cuBLAS on this machine: nothing was measured beside matrix products\n");
        return 0; /* "gemm" stays empty */
    }
    if (rc == 0)
        rc = products_open(b, &p);
    for (int i = 0; i < 3 && rc == 0; i++)
        rc = window_alone(b, &p, &warm);
    for (size_t i = 0; i < KVT_ARRAY_LEN(points); i++)
        for (int evict = 0; evict < 2 && rc == 0 && !kvt_cli_interrupted(); evict++) {
            uint32_t ctas = b->ctas > 0 ? (uint32_t)b->ctas : points[i].ctas;
            b->wave_bytes = wave_bytes > 0 ? wave_bytes : points[i].wave_mb * 1000000;
            if (b->ctas > 0 || wave_bytes > 0 ? i == 0 : !b->quick || points[i].ctas == 16)
                rc = measure(b, &p, evict, ctas);
        }
    b->wave_bytes = wave_bytes;
    products_close(b, &p);
    return gpu_bench_fail(b, rc, "matrix products");
}
