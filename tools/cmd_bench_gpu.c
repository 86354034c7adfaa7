/* kvtier bench gpu: rates of blocks between pinned DRAM and a pool in GPU memory, on an idle GPU
 * and beside a stream of matrix products, against plain copies of the same link in the same run.
 *
 * Not done here: measuring (gpu_bench_*.c). Without a GPU it says why and exits 1. Threads: one.
 */
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "cli.h"
#include "commands.h"
#include "gpu_bench.h"
#include "kvtier/version.h"

#define COMMAND "bench gpu"

static const struct gpu_bench_geometry geometries[] = {{"70b-tp4", 80, 2, 128}, {"8b", 32, 8, 128}};

static int measure(struct gpu_bench *b, const char *only)
{
    int rc = 0;
    for (size_t i = 0; i < KVT_ARRAY_LEN(geometries) && rc == 0 && !kvt_cli_interrupted(); i++) {
        if (only != NULL && strcmp(only, geometries[i].name) != 0)
            continue;
        rc = gpu_bench_pool(b, &geometries[i]);
        if (rc == 0)
            rc = gpu_bench_link(b);
        if (rc == 0)
            rc = gpu_bench_small(b);
        if (rc == 0)
            rc = gpu_bench_layers(b);
        if (rc == 0 && !b->no_cache)
            rc = gpu_bench_cache(b);
        if (rc == 0 && b->dir != NULL)
            rc = gpu_bench_disk(b);
        if (rc == 0 && !b->no_gemm)
            rc = gpu_bench_gemm(b);
        gpu_bench_pool_free(b);
    }
    return rc;
}

static int print_json(struct gpu_bench *b)
{
    struct kvt_gpu_info info;
    kvt_gpu_info(b->gpu, &info);
    return kvt_cli_json(json_pack(
        "{s:s, s:i, s:i, s:i, s:i, s:s, s:i, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o}", "device",
        info.name, "capability", info.capability, "cuda_driver", info.driver_version,
        "multiprocessors", info.multiprocessors, "copy_engines", info.copy_engines, "build",
        kvt_build_info(), "block_tokens", 16, "blocks", (json_int_t)b->blocks, "reps",
        (json_int_t)b->reps, "copies", json_incref(b->pieces), "results", json_incref(b->results),
        "layers", json_incref(b->layers), "small", json_incref(b->small), "disks",
        json_incref(b->disks), "gemm", json_incref(b->gemm)));
}

static int run(struct gpu_bench *b, const char *only)
{
    int rc = gpu_bench_open(b);
    if (rc == 0)
        rc = measure(b, only);
    if (rc != 0)
        kvt_cli_error(COMMAND, "%s", b->error[0] != '\0' ? b->error : kvt_strerror(rc));
    else if (kvt_cli_interrupted())
        rc = -1;
    if (rc == 0 && b->json)
        rc = print_json(b);
    gpu_bench_close(b);
    return rc == 0 ? KVT_EXIT_OK : KVT_EXIT_PROBLEM;
}

int kvt_cmd_bench_gpu(int argc, char **argv)
{
    static struct gpu_bench bench = {.blocks = 1000, .reps = 7, .pairs = 20};
    const char *geometry = NULL;
    const struct kvt_cli_option options[] = {
        {"blocks", "N", "blocks of 16 tokens of a job (1000)", .number = &bench.blocks, .min = 16,
         .max = 65536},
        {"reps", "N", "runs of each measurement, of which the median counts (7)",
         .number = &bench.reps, .min = 1, .max = GPU_BENCH_REPS_MAX},
        {"pairs", "N", "windows of matrix products with and without transfers (20)",
         .number = &bench.pairs, .min = 1, .max = 64},
        {"geometry", "NAME", "only 8b, or only 70b-tp4", .text = &geometry},
        {"ctas", "N", "only this number of thread blocks, only kv4 by copy engine",
         .number = &bench.ctas, .min = 1, .max = 1024},
        {"wave-bytes", "N", "bytes of one wave of staging memory", .number = &bench.wave_bytes,
         .min = 1 << 20, .max = 1 << 28},
        {"depth", "N", "waves of staging memory", .number = &bench.depth, .min = 1, .max = 8},
        {"dir", "DIR", "directory on a drive: loads from it are measured too", .text = &bench.dir},
        {"config", "K=V,...", "options of the cache that loads from the drive, as staging=256MiB",
         .text = &bench.config},
        {"device", "N", "CUDA device (0)", .number = &bench.device, .min = 0, .max = 63},
        {"driver", "FILE", "the CUDA driver's library", .text = &bench.driver},
        {"cublas", "FILE", "the cuBLAS library", .text = &bench.cublas},
        {"quick", NULL, "few numbers of thread blocks", .flag = &bench.quick},
        {"no-gemm", NULL, "nothing beside matrix products", .flag = &bench.no_gemm},
        {"no-cache", NULL, "nothing through kvt_store() and kvt_load()", .flag = &bench.no_cache},
        {"json", NULL, "one JSON document", .flag = &bench.json},
    };
    int rc = kvt_cli_parse(COMMAND, "[options]", options, KVT_ARRAY_LEN(options), NULL, 0, 0, NULL,
                           argc, argv);
    if (rc != 0)
        return rc == 1 ? KVT_EXIT_OK : KVT_EXIT_USAGE;
    if (geometry != NULL && strcmp(geometry, "8b") != 0 && strcmp(geometry, "70b-tp4") != 0) {
        kvt_cli_error(COMMAND, "--geometry: \"%.64s\" is neither 8b nor 70b-tp4", geometry);
        return KVT_EXIT_USAGE;
    }
    kvt_cli_catch_interrupt();
    bench.rng.state = 42;
    bench.results = json_array();
    bench.gemm = json_array();
    bench.pieces = json_array();
    bench.layers = json_array();
    bench.small = json_array();
    bench.disks = json_array();
    rc = run(&bench, geometry);
    json_decref(bench.results);
    json_decref(bench.gemm);
    json_decref(bench.pieces);
    json_decref(bench.layers);
    json_decref(bench.small);
    json_decref(bench.disks);
    return rc;
}
