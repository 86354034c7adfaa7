/* `kvtier bench gpu` through the public API: the pool is registered with a cache in DRAM, its
 * blocks are stored as one chain and loaded again. Rates count the whole call, from kvt_store() or
 * kvt_load() to the completion of the request: index, slots, messages, jobs.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "gpu_bench.h"
#include "kvtier/kvtier.h"

#define PIN_WAIT_SECONDS 60.0

struct run {
    struct gpu_bench_target target;
    struct kvt_key *keys;
    uint32_t *ids;
};

/* ---- shared with gpu_bench_disk.c ---- */

static void wait_pinned(struct kvt_cache *cache)
{
    double until = gpu_bench_now() + PIN_WAIT_SECONDS;
    struct timespec pause = {.tv_nsec = 5000000};
    while (kvt_pin_state(&cache->pin) == KVT_PIN_PINNING && gpu_bench_now() < until)
        nanosleep(&pause, NULL);
}

int gpu_bench_target_open(struct gpu_bench *b, const struct kvt_config *config,
                          struct gpu_bench_target *target)
{
    struct kvt_identity identity;
    char error[256] = "";
    int rc = kvt_open(config, &target->cache, error, sizeof(error));
    if (rc != 0)
        return gpu_bench_fail(b, rc, error[0] ? error : "cache");
    target->cache->gpu_library = b->driver;
    kvt_identity_init(&identity);
    identity.engine = "bench";
    identity.model = b->geometry->name;
    rc = kvt_ns_open(target->cache, &identity, &b->layout, &target->ns);
    if (rc == 0)
        rc = kvt_pool_register(target->cache, &b->layout, &b->pool, &target->pool);
    if (rc == 0)
        wait_pinned(target->cache);
    return gpu_bench_fail(b, rc, "registering the pool");
}

void gpu_bench_target_close(struct gpu_bench_target *target)
{
    kvt_pool_unregister(target->pool);
    kvt_ns_close(target->ns);
    kvt_close(target->cache);
    memset(target, 0, sizeof(*target));
}

int gpu_bench_finish(struct kvt_req *req, size_t n, struct kvt_req_report *report)
{
    report->struct_size = sizeof(*report);
    (void)kvt_req_wait(req, -1);
    int rc = kvt_req_report(req, report);
    const int32_t *status = kvt_req_status(req, NULL);
    for (size_t i = 0; i < n && rc == 0; i++)
        rc = status[i];
    kvt_req_free(req);
    return rc;
}

/* ---- the whole pool as one chain in DRAM ---- */

static int open_cache(struct gpu_bench *b, struct run *run)
{
    struct kvt_config *config;
    char dram[32];
    size_t raw = kvt_payload_bytes(&b->layout, 0, KVT_LEVEL_RAW);
    int rc = kvt_config_new(&config);
    if (rc != 0)
        return gpu_bench_fail(b, rc, "configuration");
    /* Every record of two chains, and room to spare. */
    snprintf(dram, sizeof(dram), "%zuMiB", ((size_t)b->blocks * raw * 2 / 3 >> 20) + 256);
    rc = kvt_config_set(config, "dram", dram);
    if (rc == 0)
        rc = kvt_config_set_all(config, "gpu_store_ctas=64,env=no");
    rc = rc == 0 ? gpu_bench_target_open(b, config, &run->target)
                 : gpu_bench_fail(b, rc, "configuration");
    kvt_config_free(config);
    return rc;
}

static void make_keys(struct gpu_bench *b, struct run *run, uint64_t chain)
{
    for (int64_t i = 0; i < b->blocks; i++) {
        memset(&run->keys[i], 0, sizeof(run->keys[i]));
        memcpy(run->keys[i].hash, &chain, sizeof(chain));
        memcpy(run->keys[i].hash + 8, &i, sizeof(i));
        run->keys[i].hash_len = 16;
        run->ids[i] = (uint32_t)i;
    }
}

static int request(struct gpu_bench *b, struct run *run, int store, double *seconds)
{
    struct kvt_store_opts opts = {.struct_size = sizeof(opts)};
    struct kvt_req_report report = {0};
    struct kvt_req *req;
    size_t n = (size_t)b->blocks;
    double start = gpu_bench_now();
    const struct gpu_bench_target *t = &run->target;
    int rc = store ? kvt_store(t->ns, t->pool, run->keys, run->ids, n, &opts, &req)
                   : kvt_load(t->ns, t->pool, run->keys, run->ids, n, NULL, &req);
    if (rc != 0)
        return rc;
    (void)kvt_req_wait(req, -1);
    *seconds = gpu_bench_now() - start;
    return gpu_bench_finish(req, n, &report);
}

static int measure(struct gpu_bench *b, struct run *run, int store)
{
    double times[GPU_BENCH_REPS_MAX];
    int64_t reps = b->reps < 7 ? b->reps : 7;
    int rc = 0;
    for (int64_t i = -1; i < reps && rc == 0; i++) {
        if (store) { /* a chain that is not there yet; the one before makes room */
            make_keys(b, run, (uint64_t)(i + 2));
            rc = i >= 0 ? (int)kvt_purge(run->target.ns, NULL, 0) : 0;
            rc = rc > 0 ? 0 : rc;
        }
        if (rc == 0)
            rc = request(b, run, store, &times[i < 0 ? 0 : i]);
    }
    if (rc != 0)
        return gpu_bench_fail(b, rc, store ? "kvt_store" : "kvt_load");
    double seconds = gpu_bench_median(times, (size_t)reps);
    double bytes =
        (double)kvt_ns_record_bytes(run->target.ns, 0, KVT_LEVEL_KV4) * (double)b->blocks;
    gpu_bench_report(
        b, &(struct gpu_bench_figure){.direction = store ? "evict" : "restore",
                                      .path = "cache",
                                      .level = KVT_LEVEL_KV4,
                                      .ctas = store ? 64 : 16,
                                      .seconds = seconds,
                                      .encoded_gbps = 1e-9 * bytes / seconds,
                                      .equiv_gbps = 1e-9 * (double)b->pool_bytes / seconds});
    return 0;
}

int gpu_bench_cache(struct gpu_bench *b)
{
    struct run run = {0};
    run.keys = calloc((size_t)b->blocks, sizeof(*run.keys));
    run.ids = calloc((size_t)b->blocks, sizeof(*run.ids));
    int rc = run.keys != NULL && run.ids != NULL ? open_cache(b, &run)
                                                 : gpu_bench_fail(b, -ENOMEM, "host memory");
    if (rc == 0)
        rc = measure(b, &run, 1);
    if (rc == 0)
        rc = measure(b, &run, 0);
    gpu_bench_target_close(&run.target);
    free(run.keys);
    free(run.ids);
    return rc;
}
