/* `kvtier bench gpu`: loads by layers on an idle GPU: how much slower they are as a whole than
 * loads of whole records, and when the first layers are there. kv4, adjacent slots, shuffled pages.
 * Threads: one. */
#include <errno.h>
#include <stdlib.h>

#include "base/checked.h"
#include "cli.h"
#include "format/record.h"
#include "gpu_bench.h"
#include "kvtier/codec.h"

#define CTAS 16u

struct layers {
    struct gpu_bench *bench;
    struct kvt_gpu_stage *stage;
    struct kvt_gpu_plan *plan;
    struct kvt_gpu_item *items;
    uint32_t range_bytes, ranges;
};

static uint32_t ctas_of(const struct gpu_bench *b)
{
    return b->ctas > 0 ? (uint32_t)b->ctas : CTAS;
}

static int prepare(struct layers *l)
{
    struct gpu_bench *b = l->bench;
    uint32_t record = kvt_record_bytes(kvt_payload_bytes(&b->layout, 0, KVT_LEVEL_KV4));
    struct kvt_gpu_map map = {.level = KVT_LEVEL_KV4, .range_bytes = l->range_bytes};
    struct kvt_gpu_stage_opts opts = {
        .ctas = ctas_of(b),
        .records_max = (uint32_t)b->blocks,
        .record_bytes = record,
        .layer_pages = (uint32_t)b->blocks * (record / KVT_PAGE_BYTES),
    };
    int rc = kvt_gpu_stage_new(b->gpu, &opts, &l->stage);
    if (rc == 0)
        rc = kvt_gpu_plan_on(l->stage, &b->layout, 0, &map, &b->pool, &l->plan);
    l->items = calloc((size_t)b->blocks, sizeof(*l->items));
    if (rc == 0 && l->items == NULL)
        rc = -ENOMEM;
    if (rc == 0)
        rc = gpu_bench_items(b, record, 0, l->items);
    if (rc == 0) /* records to load */
        rc = gpu_bench_job(b, l->plan, l->items, (size_t)b->blocks, 1, KVT_GPU_PATH_COPY);
    return gpu_bench_fail(b, rc, "layers");
}

/* One load: seconds until the first range, and until all is verified. */
static int run_once(struct layers *l, double *first, double *all)
{
    struct kvt_gpu_load load = {.plan = l->plan, .items = l->items, .n = (size_t)l->bench->blocks};
    struct kvt_gpu_order order = {.path = KVT_GPU_PATH_COPY};
    double start = gpu_bench_now();
    uint32_t next;
    int rc = kvt_gpu_restore_layers(&load, 1, &order);
    if (rc != 0)
        return gpu_bench_fail(l->bench, rc, "load by layers");
    l->ranges = kvt_gpu_job_ranges(load.job);
    rc = kvt_gpu_job_await_range(load.job, 0, &next);
    *first = gpu_bench_now() - start;
    for (int done = 0; rc == 0 && done == 0;) {
        done = kvt_gpu_job_poll(load.job, 1);
        rc = done < 0 ? done : 0;
    }
    *all = gpu_bench_now() - start;
    for (size_t i = 0; i < load.n && rc == 0; i++)
        rc = kvt_gpu_job_result(load.job, i, NULL);
    kvt_gpu_job_free(load.job);
    return gpu_bench_fail(l->bench, rc, "load by layers");
}

static void report(struct layers *l, double first, double all)
{
    struct gpu_bench *b = l->bench;
    double equiv = 1e-9 * (double)b->pool_bytes / all;
    json_array_append_new(
        b->layers,
        json_pack("{s:s, s:I, s:I, s:I, s:i, s:f, s:f, s:f, s:f}", "geometry", b->geometry->name,
                  "blocks", (json_int_t)b->blocks, "range_bytes", (json_int_t)l->range_bytes,
                  "ranges", (json_int_t)l->ranges, "ctas", (int)ctas_of(b), "first_seconds", first,
                  "seconds", all, "equiv_gbps", equiv, "ratio", equiv / b->copy_gbps[1]));
    if (!b->json)
        printf("%-7s  layers   %2u ranges  first after %.2f ms, all after %.2f ms  x%.2f\n",
               b->geometry->name, l->ranges, 1e3 * first, 1e3 * all, equiv / b->copy_gbps[1]);
}

static int measure(struct gpu_bench *b, uint32_t range_bytes)
{
    struct layers l = {.bench = b, .range_bytes = range_bytes};
    double first[GPU_BENCH_REPS_MAX], all[GPU_BENCH_REPS_MAX];
    int rc = prepare(&l);
    for (int64_t i = -1; i < b->reps && rc == 0; i++)
        rc = run_once(&l, &first[i < 0 ? 0 : i], &all[i < 0 ? 0 : i]);
    if (rc == 0)
        report(&l, gpu_bench_median(first, (size_t)b->reps),
               gpu_bench_median(all, (size_t)b->reps));
    kvt_gpu_plan_free(l.plan);
    kvt_gpu_stage_free(l.stage);
    free(l.items);
    return rc;
}

int gpu_bench_layers(struct gpu_bench *b)
{
    static const uint32_t ranges[] = {1u << 30, 256u << 10, 128u << 10, 64u << 10, 32u << 10};
    int rc = 0;
    for (size_t i = 0; i < KVT_ARRAY_LEN(ranges) && rc == 0 && !kvt_cli_interrupted(); i++)
        rc = measure(b, ranges[i]);
    return rc;
}
