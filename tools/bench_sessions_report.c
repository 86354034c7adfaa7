/* `kvtier bench sessions`: the report, also of a run that was cut short. See bench_sessions.h. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "bench_sessions.h"
#include "kvtier/kvtier.h"

static const char *const source_names[BENCH_SOURCES] = {"l0", "dram", "mixed", "disk",
                                                        "recomputed"};

static double quantile(const double *sorted, size_t n, double q)
{
    size_t at = (size_t)ceil(q * (double)n);
    return sorted[at > 0 ? KVT_MIN(at, n) - 1 : 0];
}

static json_t *summary(struct bench_talks *t, enum bench_source source)
{
    size_t n = t->counts[source];
    if (n == 0)
        return json_pack("{s:i}", "turns", 0);
    double cold = gpu_bench_median(t->cold[source], n);
    double load = gpu_bench_median(t->load[source], n); /* sorts */
    double ttft = gpu_bench_median(t->ttft[source], n);
    return json_pack("{s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f}", "turns", (json_int_t)n,
                     "tokens_dram", (json_int_t)(t->from_dram[source] / n), "tokens_disk",
                     (json_int_t)(t->from_disk[source] / n), "tokens_recomputed",
                     (json_int_t)(t->recomputed[source] / n), "load_p50_ms", 1e3 * load,
                     "load_p99_ms", 1e3 * quantile(t->load[source], n, 0.99), "ttft_p50_ms",
                     1e3 * ttft, "ttft_p99_ms", 1e3 * quantile(t->ttft[source], n, 0.99),
                     "ttft_max_ms", 1e3 * t->ttft[source][n - 1], "recompute_ms", 1e3 * cold);
}

/* What became of blocks that the store did not keep. */
static json_t *counters(struct bench_talks *t)
{
    static const char *const names[] = {
        "store.dropped_dram", "store.dropped_chain", "disk.dropped_queue",   "disk.dropped_space",
        "disk.lost_deferred", "disk.lost_queue",     "dram.evicted",         "dram.evicted_lost",
        "disk.evicted",       "disk.orphans",        "client.store_orphans", "gpu.failed_blocks",
        "disk.lost_again",    "disk.lost_error",     "disk.written_bytes",   "disk.read_bytes",
        "disk.given_up",      "disk.blocks",         "dram.blocks",          "dram.bytes_used"};
    json_t *all = json_object();
    uint64_t value;
    for (size_t i = 0; i < KVT_ARRAY_LEN(names); i++)
        if (kvt_stats_get(t->cache, names[i], &value) == 0)
            json_object_set_new(all, names[i], json_integer((json_int_t)value));
    return all;
}

/* How it ran: sizes, and how long each part took. */
static void describe(const struct bench_talks *t, json_t *all)
{
    const struct {
        const char *name;
        uint64_t value;
    } numbers[] = {
        {"layers", t->gpu.geometry->layers},
        {"tokens", (uint64_t)t->tokens},
        {"new_tokens", (uint64_t)t->prompt},
        {"prefill_time_percent", (uint64_t)t->percent},
        {"gap_ms", (uint64_t)t->gap_ms},
        {"pool_bytes", t->gpu.pool_bytes},
        {"dram_bytes", t->dram},
        {"disk_bytes", t->dir != NULL ? t->disk : 0},
        {"sessions", (uint64_t)t->sessions},
        {"rounds", (uint64_t)t->turns},
        {"sessions_filled", (uint64_t)t->filled},
        {"turns_taken", t->noted},
        {"turns_held", t->fit},
        {"turns_slower_than_recompute", t->slower},
        {"hbm_pages_used_before", t->pool_used_before},
        {"hbm_pages_used_after_fill", t->pool_used_after},
    };
    for (size_t i = 0; i < KVT_ARRAY_LEN(numbers); i++)
        json_object_set_new(all, numbers[i].name, json_integer((json_int_t)numbers[i].value));
    json_object_set_new(all, "touch_seconds", json_real(t->touch_seconds));
    json_object_set_new(all, "pin_seconds", json_real(t->pin_seconds));
    json_object_set_new(all, "fill_seconds", json_real(t->fill_seconds));
    json_object_set_new(all, "turn_seconds", json_real(t->turn_seconds));
    json_object_set_new(all, "write", json_string(t->write));
}

json_t *bench_sessions_results(struct bench_talks *t)
{
    struct kvt_gpu_info info;
    struct kvt_session_stats stats = {.struct_size = sizeof(stats)};
    uint64_t page = t->gpu.pool_bytes / (uint64_t)t->gpu.blocks;
    uint64_t alone = t->gpu.pool_bytes / (page * (((uint64_t)t->tokens + 15) / 16));
    size_t wanted = (size_t)(t->sessions * t->turns);
    double held = t->noted > 0 ? (double)t->fit / (double)t->noted * (double)t->filled : 0;
    json_t *turns = json_object(), *all = json_object();
    kvt_gpu_info(t->gpu.gpu, &info);
    if (kvt_session_mgr_stats(t->mgr, &stats) != 0)
        memset(&stats, 0, sizeof(stats));
    for (int source = 0; source < BENCH_SOURCES; source++)
        json_object_set_new(turns, source_names[source], summary(t, (enum bench_source)source));
    json_object_set_new(all, "device", json_string(info.name));
    json_object_set_new(all, "geometry", json_string(t->gpu.geometry->name));
    json_object_set_new(all, "complete", json_boolean(t->noted == wanted));
    describe(t, all);
    json_object_set_new(all, "hbm_only_bf16", json_integer((json_int_t)alone));
    json_object_set_new(all, "held", json_real(held));
    json_object_set_new(all, "held_ratio", json_real(alone > 0 ? held / (double)alone : 0));
    json_object_set_new(all, "evicted_unsaved", json_integer((json_int_t)stats.evicted_unsaved));
    json_object_set_new(all, "store_failed", json_integer((json_int_t)stats.store_failed));
    json_object_set_new(all, "turns", turns);
    json_object_set_new(all, "counters", counters(t));
    return all;
}

void bench_sessions_print(const json_t *all)
{
    const char *name;
    json_t *one;
    if (!json_is_true(json_object_get(all, "complete")))
        printf("cut short: %lld sessions were filled, and came back %lld times in all\n",
               (long long)json_integer_value(json_object_get(all, "sessions_filled")),
               (long long)json_integer_value(json_object_get(all, "turns_taken")));
    printf("%.1f of %lld sessions are held; HBM alone holds %lld in bf16: %.1f times as many\n",
           json_real_value(json_object_get(all, "held")),
           (long long)json_integer_value(json_object_get(all, "sessions")),
           (long long)json_integer_value(json_object_get(all, "hbm_only_bf16")),
           json_real_value(json_object_get(all, "held_ratio")));
    json_object_foreach(json_object_get(all, "turns"), name, one)
    {
        if (json_integer_value(json_object_get(one, "turns")) == 0)
            continue;
        printf("%-10s %4lld turns  load p50 %8.1f p99 %8.1f ms  first token p50 %8.1f p99 %8.1f ms"
               "  recompute %8.1f ms\n",
               name, (long long)json_integer_value(json_object_get(one, "turns")),
               json_real_value(json_object_get(one, "load_p50_ms")),
               json_real_value(json_object_get(one, "load_p99_ms")),
               json_real_value(json_object_get(one, "ttft_p50_ms")),
               json_real_value(json_object_get(one, "ttft_p99_ms")),
               json_real_value(json_object_get(one, "recompute_ms")));
    }
}
