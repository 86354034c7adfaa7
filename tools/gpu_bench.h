/* What the parts of `kvtier bench gpu` share: a pool of a model's geometry in GPU memory, pinned
 * slots, and the figures. Tools only. Threads: one. Every function returns 0 or a negative error,
 * after which gpu_bench.error has a sentence. */
#ifndef KVT_TOOLS_GPU_BENCH_H
#define KVT_TOOLS_GPU_BENCH_H

#include <jansson.h>
#include <stdint.h>

#include "base/rng.h"
#include "gpu/gpu_internal.h"
#include "kvtier/kvtier.h"

#define GPU_BENCH_REPS_MAX 99

struct gpu_bench_geometry {
    const char *name;
    uint32_t layers, heads, head_dim;
};

struct gpu_bench {
    /* how */
    int64_t blocks, reps, pairs, ctas; /* ctas: only this number; 0: a list */
    int64_t wave_bytes, depth;         /* of the staging memory; 0: the library's */
    int64_t device;
    const char *driver; /* NULL: libcuda.so.1 */
    const char *cublas; /* NULL: where it usually is */
    const char *dir;    /* on a drive; NULL: none is measured */
    const char *config; /* options of the cache that loads from it; NULL: none */
    int quick, json, no_gemm, no_cache;
    /* what */
    struct kvt_gpu *gpu;
    struct kvt_rng rng;
    const struct gpu_bench_geometry *geometry;
    struct kvt_layout layout;
    struct kvt_part parts[256];
    struct kvt_part_place places[256];
    struct kvt_pool_desc pool;
    kvt_cu_ptr pool_memory;
    size_t pool_bytes;
    uint8_t *arena; /* pinned */
    size_t arena_bytes;
    double copy_gbps[2]; /* one piece, to host and to device */
    json_t *results, *gemm, *pieces, *layers, *small, *disks;
    char error[512];
};

struct gpu_bench_figure {
    const char *direction, *path;
    int level, scattered;
    uint32_t ctas;
    double seconds, encoded_gbps, equiv_gbps;
};

/* A cache that the pool is registered with. */
struct gpu_bench_target {
    struct kvt_cache *cache;
    struct kvt_ns *ns;
    struct kvt_pool *pool;
};

double gpu_bench_now(void);
double gpu_bench_median(double *values, size_t n); /* sorts them */

/* gpu_bench_rig.c */
int gpu_bench_open(struct gpu_bench *b);
void gpu_bench_close(struct gpu_bench *b);
int gpu_bench_pool(struct gpu_bench *b, const struct gpu_bench_geometry *geometry);
void gpu_bench_pool_free(struct gpu_bench *b);
int gpu_bench_fail(struct gpu_bench *b, int rc, const char *what);
/* Turn a driver's result into a status, with its sentence. */
int gpu_bench_check(struct gpu_bench *b, kvt_cu_result result, const char *what);
/* Slots for shuffled pages, b->blocks of them: one after the other, as a store hands them out, or
 * shuffled with gaps between all of them. */
int gpu_bench_items(struct gpu_bench *b, uint32_t record_bytes, int scattered,
                    struct kvt_gpu_item *items);
int gpu_bench_plan(struct gpu_bench *b, int level, uint32_t ctas, uint32_t jobs,
                   struct kvt_gpu_plan **plan);
/* One job over items, to its end; every block must be good. */
int gpu_bench_job(struct gpu_bench *b, struct kvt_gpu_plan *plan, const struct kvt_gpu_item *items,
                  size_t n, int evict, enum kvt_gpu_path path);
void gpu_bench_report(struct gpu_bench *b, const struct gpu_bench_figure *figure);

/* gpu_bench_link.c: rates on an idle GPU. */
int gpu_bench_link(struct gpu_bench *b);
/* gpu_bench_small.c: jobs of few blocks, by both paths. */
int gpu_bench_small(struct gpu_bench *b);
/* gpu_bench_layers.c: loads by layers. */
int gpu_bench_layers(struct gpu_bench *b);
/* gpu_bench_cache.c: the same through kvt_store() and kvt_load(). */
int gpu_bench_cache(struct gpu_bench *b);
/* Open a cache, register the pool with it, and wait until its arena is pinned, or clearly will not
 * be. _close() also after an error, with target all zero before. */
int gpu_bench_target_open(struct gpu_bench *b, const struct kvt_config *config,
                          struct gpu_bench_target *target);
void gpu_bench_target_close(struct gpu_bench_target *target);
/* Wait for a request, and free it: its report, or the first error of its n blocks. */
int gpu_bench_finish(struct kvt_req *req, size_t n, struct kvt_req_report *report);
/* gpu_bench_disk.c: from the drive of b->dir. */
int gpu_bench_disk(struct gpu_bench *b);
/* gpu_bench_gemm.c: beside a saturating stream of matrix products. */
int gpu_bench_gemm(struct gpu_bench *b);

#endif
