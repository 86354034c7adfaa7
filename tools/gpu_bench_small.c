/* `kvtier bench gpu`: jobs of few blocks on an idle GPU, restored and evicted by the copy engine
 * and by the SMs: which path is the faster one, by number of blocks. See gpu_bench.h.
 *
 * A figure is the median of many runs of one job, from the call to the wake-up of the thread that
 * waits. Threads: one.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/checked.h"
#include "cli.h"
#include "gpu_bench.h"
#include "kvtier/codec.h"

#define CTAS 16u
#define RUNS 25u

static int measure(struct gpu_bench *b, struct kvt_gpu_plan *plan, const struct kvt_gpu_item *items,
                   size_t n, int evict, enum kvt_gpu_path path, double *seconds)
{
    double times[RUNS];
    int rc = gpu_bench_job(b, plan, items, n, evict, path);
    for (size_t i = 0; i < RUNS && rc == 0; i++) {
        double start = gpu_bench_now();
        rc = gpu_bench_job(b, plan, items, n, evict, path);
        times[i] = gpu_bench_now() - start;
    }
    if (rc == 0)
        *seconds = gpu_bench_median(times, RUNS);
    return rc;
}

static int compare(struct gpu_bench *b, struct kvt_gpu_plan *plan, const struct kvt_gpu_item *items,
                   size_t n)
{
    double us[2][2] = {{0}};
    int rc = 0;
    for (int evict = 1; evict >= 0 && rc == 0; evict--)
        for (int sm = 0; sm < 2 && rc == 0; sm++)
            rc = measure(b, plan, items, n, evict, sm ? KVT_GPU_PATH_SM : KVT_GPU_PATH_COPY,
                         &us[evict][sm]);
    if (rc != 0)
        return rc;
    json_array_append_new(b->small,
                          json_pack("{s:s, s:s, s:I, s:I, s:i, s:f, s:f, s:f, s:f}", "geometry",
                                    b->geometry->name, "level", "kv4", "blocks", (json_int_t)n,
                                    "record_bytes", (json_int_t)kvt_gpu_plan_record_bytes(plan),
                                    "ctas", (int)CTAS, "restore_copy_us", 1e6 * us[0][0],
                                    "restore_sm_us", 1e6 * us[0][1], "evict_copy_us",
                                    1e6 * us[1][0], "evict_sm_us", 1e6 * us[1][1]));
    if (!b->json)
        printf("%-7s  %5zu blocks  restore by copy engine %8.1f us, by SMs %8.1f us; evict %8.1f, "
               "%8.1f us\n",
               b->geometry->name, n, 1e6 * us[0][0], 1e6 * us[0][1], 1e6 * us[1][0],
               1e6 * us[1][1]);
    return 0;
}

int gpu_bench_small(struct gpu_bench *b)
{
    static const size_t counts[] = {1, 2, 4, 8, 16, 32, 64, 128};
    struct kvt_gpu_plan *plan;
    if (b->ctas > 0) /* one number of them is what is asked for */
        return 0;
    struct kvt_gpu_item *items = calloc((size_t)b->blocks, sizeof(*items));
    if (items == NULL)
        return gpu_bench_fail(b, -ENOMEM, "host memory");
    int rc = gpu_bench_plan(b, KVT_LEVEL_KV4, CTAS, 1, &plan);
    if (rc == 0) {
        rc = gpu_bench_items(b, kvt_gpu_plan_record_bytes(plan), 0, items);
        for (size_t i = 0; i < KVT_ARRAY_LEN(counts) && rc == 0; i++)
            if (counts[i] <= (size_t)b->blocks && !kvt_cli_interrupted())
                rc = compare(b, plan, items, counts[i]);
        kvt_gpu_plan_free(plan);
    }
    free(items);
    return rc;
}
