/* kvtier replay: would it have paid?
 *
 * A trace of requests goes through the production store (index, eviction, log) with a drive in
 * memory and the trace's own clock: what it would have found, and where. Times are computed, not
 * measured: each request alone, by the rates given, with what kvt_plan() would have done, beside
 * computing everything and loading everything.
 * Threads: one. Does not model requests that wait for each other.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/parse.h"
#include "cli.h"
#include "commands.h"
#include "kvtier/error.h"
#include "plan/decide.h"
#include "plan_data.h"
#include "replay_store.h"
#include "replay_trace.h"

#define COMMAND "replay"
#define GENERATE_SEED 20261129u
#define DAY_MS 86400000.0
#define DRAM_LATENCY_S 0.0001
#define DISK_LATENCY_S 0.001

struct replay {
    const char *trace_path, *dram_text, *model_name;
    uint64_t disk_bytes, dram_rate, disk_rate;
    int64_t prefill_rate, generate;
    int json;
    struct replay_trace trace;
    double block_bytes;
    uint64_t dram_blocks, disk_blocks;
    struct kvt_prefill prefill;
    struct kvt_tier_model tiers[KVT_PLAN_TIERS];
    struct kvt_plan_models models;
    uint64_t hit_dram, hit_disk, written;
    double gpu_saved_s;
    double *ttft[3]; /* of each request: kvtier, recompute, always_load */
};

static const char *const ways[3] = {"kvtier", "recompute", "always_load"};

/* What the request takes, three ways. The planner knows the rates: it is about the trace. */
static int price(struct replay *r, size_t i, const struct replay_hits *hits)
{
    const struct replay_request *request = &r->trace.requests[i];
    uint32_t usable = (request->tokens - 1) / REPLAY_BLOCK_TOKENS;
    uint32_t dram = KVT_MIN(hits->dram, usable);
    uint32_t disk = KVT_MIN(hits->disk, usable - dram);
    struct kvt_decide query = {.run_count = dram + disk > 0,
                               .block_tokens = REPLAY_BLOCK_TOKENS,
                               .prompt_tokens = request->tokens,
                               .block_bytes = r->block_bytes,
                               .cut = KVT_PLAN_CUT_NONE};
    struct kvt_plan plan = {.struct_size = sizeof(plan)};

    /* what is loaded from disk comes in between as often as behind: one run of both */
    query.runs[0] = (struct kvt_plan_run){
        .blocks = dram + disk, .by_tier = {[KVT_TIER_DRAM] = dram, [KVT_TIER_DISK] = disk}};
    int rc = kvt_decide(&query, &r->models, &plan);
    r->ttft[0][i] = plan.ttft_s;
    r->ttft[1][i] = plan.recompute_s;
    r->ttft[2][i] = dram + disk > 0 ? plan.load_all_s : plan.recompute_s;
    r->gpu_saved_s += plan.recompute_s - plan.gpu_s;
    return rc;
}

static int run_all(struct replay *r)
{
    struct replay_store *store;
    struct kvt_progress progress;
    int rc = replay_store_open(r->dram_blocks, r->disk_blocks, &store);

    kvt_progress_start(&progress, "replaying");
    for (size_t i = 0; i < r->trace.count && !rc; i++) {
        const struct replay_request *request = &r->trace.requests[i];
        struct replay_hits hits;
        rc = replay_store_prompt(store, request->at_ms, request->ids, request->count, &hits);
        r->hit_dram += hits.dram;
        r->hit_disk += hits.disk;
        if (!rc)
            rc = price(r, i, &hits);
        if (!rc && kvt_cli_interrupted())
            rc = KVT_E_CANCELED;
        kvt_progress_update(&progress, i, r->trace.count);
    }
    kvt_progress_done(&progress);
    if (!rc)
        r->written = replay_store_written(store);
    replay_store_close(store);
    return rc;
}

/* ---- output -------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

struct spread {
    double p50, p99, mean;
};

static struct spread spread_ms(double *values, size_t n)
{
    struct spread out = {0, 0, 0};

    qsort(values, n, sizeof(*values), by_value);
    for (size_t i = 0; i < n; i++)
        out.mean += values[i] * 1e3 / (double)n;
    out.p50 = values[n / 2] * 1e3;
    out.p99 = values[n * 99 / 100] * 1e3;
    return out;
}

static double writes_a_day(const struct replay *r)
{
    double days = (double)r->trace.requests[r->trace.count - 1].at_ms / DAY_MS;

    return days > 0 && r->disk_blocks > 0 ? (double)r->written / (double)r->disk_blocks / days : 0;
}

static int print_json(struct replay *r)
{
    double all = r->trace.blocks ? (double)r->trace.blocks : 1;
    json_t *ttft = json_object();

    for (size_t i = 0; i < 3; i++) {
        struct spread ms = spread_ms(r->ttft[i], r->trace.count);
        json_object_set_new(
            ttft, ways[i],
            json_pack("{s:f, s:f, s:f}", "p50", ms.p50, "p99", ms.p99, "mean", ms.mean));
    }
    return kvt_cli_json(
        json_pack("{s:s, s:I, s:I, s:{s:f, s:f, s:f}, s:o, s:f, s:f, s:f, s:I}", "scaled",
                  "records of one page, caps scaled by the same factor", "requests",
                  (json_int_t)r->trace.count, "blocks", (json_int_t)r->trace.blocks, "hit_ratio",
                  "dram", (double)r->hit_dram / all, "disk", (double)r->hit_disk / all, "total",
                  (double)(r->hit_dram + r->hit_disk) / all, "ttft_ms", ttft, "gpu_seconds_saved",
                  r->gpu_saved_s, "bytes_written", (double)r->written * r->block_bytes, "dwpd",
                  writes_a_day(r), "reordered", (json_int_t)r->trace.reordered));
}

static void print_text(struct replay *r)
{
    double all = r->trace.blocks ? (double)r->trace.blocks : 1;
    char bytes[32];

    printf("simulated: records of one page with caps scaled by the same factor, times computed\n");
    printf("%zu requests, %" PRIu64 " blocks of %u tokens, %" PRIu64 " different\n", r->trace.count,
           r->trace.blocks, REPLAY_BLOCK_TOKENS, r->trace.distinct);
    if (r->trace.reordered)
        printf("note: %" PRIu64 " requests stood before an earlier one\n", r->trace.reordered);
    printf("hits          %.1f %%: DRAM %.1f %%, disk %.1f %%\n",
           100 * (double)(r->hit_dram + r->hit_disk) / all, 100 * (double)r->hit_dram / all,
           100 * (double)r->hit_disk / all);
    for (size_t i = 0; i < 3; i++) {
        struct spread ms = spread_ms(r->ttft[i], r->trace.count);
        printf("%-12s  first token after %.0f ms (p50), %.0f ms (p99), %.0f ms (mean)\n", ways[i],
               ms.p50, ms.p99, ms.mean);
    }
    printf("GPU           %.0f s saved\n", r->gpu_saved_s);
    if (r->disk_blocks)
        printf("written       %s, %.2f drive writes a day\n",
               kvt_human_bytes((uint64_t)((double)r->written * r->block_bytes), bytes),
               writes_a_day(r));
}

/* ---- input --------------------------------------------------------------------------------- */

static int gather(struct replay *r, char *error, size_t len)
{
    struct plan_model model;
    double bytes[PLAN_LEVELS];
    uint64_t dram = 0;
    json_t *data = plan_data_load(NULL, error, len);
    int rc = data ? plan_data_model(data, r->model_name, &model, error, len) : -1;

    json_decref(data);
    if (rc || plan_token_bytes(&model, REPLAY_BLOCK_TOKENS, bytes))
        return -1;
    r->block_bytes = bytes[KVT_LEVEL_KV4] * REPLAY_BLOCK_TOKENS;
    int unlimited = !strcmp(r->dram_text, "unlimited");
    if (!unlimited && kvt_parse_size(r->dram_text, &dram)) {
        snprintf(error, len, "--dram: '%.40s' is no size, nor unlimited", r->dram_text);
        return -1;
    }
    rc = r->generate ? replay_trace_make(&r->trace, GENERATE_SEED, (size_t)r->generate)
                     : replay_trace_read(&r->trace, r->trace_path, error, len);
    if (rc)
        return rc;
    /* some more than needed: what is unlimited must not be evicted for want of a free page */
    r->dram_blocks = unlimited ? r->trace.distinct + r->trace.distinct / 16 + 4096
                               : (uint64_t)((double)dram / r->block_bytes);
    r->disk_blocks = (uint64_t)((double)r->disk_bytes / r->block_bytes);
    for (size_t i = 0; i < 3 && !rc; i++)
        rc = (r->ttft[i] = calloc(r->trace.count, sizeof(double))) ? 0 : -1;
    if (!kvt_prefill_init(&r->prefill, 1 / (double)r->prefill_rate, 0) ||
        !kvt_tier_init(&r->tiers[KVT_TIER_DRAM], DRAM_LATENCY_S, (double)r->dram_rate) ||
        !kvt_tier_init(&r->tiers[KVT_TIER_DISK], DISK_LATENCY_S, (double)r->disk_rate))
        rc = -1;
    r->prefill.fixed = true;
    r->models.prefill = &r->prefill;
    for (uint32_t t = KVT_TIER_DRAM; t <= KVT_TIER_DISK; t++) {
        r->tiers[t].fixed = true;
        r->models.tiers[t] = &r->tiers[t];
    }
    return rc;
}

static int replay(struct replay *r)
{
    char error[512] = "no memory";
    int code = KVT_EXIT_PROBLEM;

    if (gather(r, error, sizeof(error))) {
        kvt_cli_error(COMMAND, "%s", error);
    } else {
        int rc = run_all(r);
        if (rc == KVT_E_TOO_SMALL || rc == KVT_E_CONFIG_VALUE)
            kvt_cli_error(COMMAND, "--disk: too small: %s", kvt_strerror(rc));
        else if (rc)
            kvt_cli_error(COMMAND, "%s", kvt_strerror(rc));
        else if (r->json)
            code = print_json(r);
        else {
            print_text(r);
            code = KVT_EXIT_OK;
        }
    }
    for (size_t i = 0; i < 3; i++)
        free(r->ttft[i]);
    replay_trace_free(&r->trace);
    return code;
}

int kvt_cmd_replay(int argc, char **argv)
{
    struct replay r = {.dram_text = "unlimited",
                       .model_name = "llama-3-70b",
                       .prefill_rate = 10000,
                       .dram_rate = 25000000000,
                       .disk_rate = 6800000000};
    const struct kvt_cli_option options[] = {
        {.name = "trace",
         .metavar = "FILE",
         .help = "lines of JSON, see below",
         .text = &r.trace_path},
        {.name = "generate",
         .metavar = "N",
         .help = "instead: a made trace of N requests",
         .number = &r.generate,
         .min = 1,
         .max = 1000000},
        {.name = "dram",
         .metavar = "SIZE",
         .help = "DRAM for blocks, or unlimited",
         .text = &r.dram_text},
        {.name = "disk",
         .metavar = "SIZE",
         .help = "disk for blocks",
         .size = &r.disk_bytes,
         .min = 1,
         .max = INT64_MAX},
        {.name = "model",
         .metavar = "NAME",
         .help = "whose blocks (llama-3-70b), at kv4",
         .text = &r.model_name},
        {.name = "prefill",
         .metavar = "N",
         .help = "tokens a second computed (10000)",
         .number = &r.prefill_rate,
         .min = 1,
         .max = 1000000000},
        {.name = "dram-rate",
         .metavar = "SIZE",
         .help = "bytes a second from DRAM (25GB)",
         .size = &r.dram_rate,
         .min = 1000000,
         .max = INT64_MAX},
        {.name = "disk-rate",
         .metavar = "SIZE",
         .help = "bytes a second from disk (6.8GB)",
         .size = &r.disk_rate,
         .min = 1000000,
         .max = INT64_MAX},
        {.name = "json", .help = "one JSON object", .flag = &r.json},
    };
    int rc = kvt_cli_parse(COMMAND, "--trace FILE [--dram SIZE|unlimited] [--disk SIZE] [options]",
                           options, KVT_ARRAY_LEN(options), NULL, 0, 0, NULL, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    if (!r.trace_path == !r.generate) {
        kvt_cli_error(COMMAND, "give either --trace FILE or --generate N");
        return KVT_EXIT_USAGE;
    }
    kvt_cli_catch_interrupt();
    return replay(&r);
}
