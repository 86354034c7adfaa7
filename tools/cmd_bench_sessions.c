/* kvtier bench sessions: conversations on one GPU, more of them than its memory holds.
 *
 * Real pages, kernels, records, DRAM and disk, through the session manager; attention is not
 * computed. What computing would take comes from a model, C(n) = a n + b n^2, printed first.
 * First every session prefills its tokens and goes idle; then sessions come back in random order,
 * each with a short new prompt. Time to the first token is measured from kvt_session_resume() to
 * the end of the load, plus the model's time for what is left to compute.
 * Threads: one. Exit 1: no GPU, or a step failed.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "cli.h"
#include "client/client.h"
#include "commands.h"
#include "gpu_bench.h"
#include "kvtier/kvtier.h"
#include "kvtier/session.h"

#define COMMAND "bench sessions"
#define SESSIONS_MAX 1024
#define TURNS_MAX 8192

/* Where a turn's tokens came from: mixed: some from disk, and more from DRAM. */
enum source { FROM_L0, FROM_DRAM, FROM_BOTH, FROM_DISK, FROM_NOWHERE, SOURCES };
static const char *const source_names[SOURCES] = {"l0", "dram", "mixed", "disk", "recomputed"};

struct talks {
    struct gpu_bench gpu;
    /* how */
    int64_t sessions, tokens, turns, prompt, layers, us_linear, ps_square, percent;
    uint64_t pool_bytes, dram, disk;
    const char *dir, *write;
    /* what */
    struct kvt_cache *cache;
    struct kvt_ns *ns;
    struct kvt_pool *pool;
    struct kvt_session_mgr *mgr;
    kvt_session_id ids[SESSIONS_MAX];
    uint32_t lengths[SESSIONS_MAX];
    uint32_t *text;
    double ttft[SOURCES][TURNS_MAX], load[SOURCES][TURNS_MAX], cold[SOURCES][TURNS_MAX];
    uint64_t from_dram[SOURCES], from_disk[SOURCES], recomputed[SOURCES]; /* tokens */
    size_t counts[SOURCES];
    size_t fit, slower;
    double fill_seconds;
};

/* Seconds that the model takes to compute n tokens from the start on. */
static double computing(const struct talks *t, double n)
{
    return 1e-6 * (double)t->us_linear * n + 1e-12 * (double)t->ps_square * n * n;
}

static int fail(struct talks *t, int rc, const char *what)
{
    return gpu_bench_fail(&t->gpu, rc, what);
}

/* ---- open ---- */

static int set_size(struct kvt_config *config, const char *key, const char *dir, uint64_t bytes)
{
    char text[4200];
    int n = dir != NULL ? snprintf(text, sizeof(text), "%s:%llu", dir, (unsigned long long)bytes)
                        : snprintf(text, sizeof(text), "%llu", (unsigned long long)bytes);
    return n < (int)sizeof(text) ? kvt_config_set(config, key, text) : KVT_E_LIMIT;
}

static int open_cache(struct talks *t)
{
    static const char *const fixed[][2] = {{"level", "kv4"}, {"gpu_store_ctas", "96"},
                                           {"write", NULL},  {"request_blocks_max", "262144"},
                                           {"plan", "off"}, /* what loads take is measured */
                                           {"env", "no"}};
    struct kvt_config *config;
    char error[256] = "";
    int rc = kvt_config_new(&config);
    if (rc != 0)
        return fail(t, rc, "configuration");
    for (size_t i = 0; i < KVT_ARRAY_LEN(fixed) && rc == 0; i++)
        rc = kvt_config_set(config, fixed[i][0], fixed[i][1] != NULL ? fixed[i][1] : t->write);
    if (rc == 0)
        rc = set_size(config, "dram", NULL, t->dram);
    if (rc == 0 && t->dir != NULL)
        rc = set_size(config, "disk", t->dir, t->disk);
    if (rc == 0)
        rc = kvt_open(config, &t->cache, error, sizeof(error));
    kvt_config_free(config);
    if (error[0] != '\0')
        kvt_cli_error(COMMAND, "%s", error);
    if (rc == 0)
        t->cache->gpu_library = t->gpu.driver;
    return fail(t, rc, "cache");
}

static int open_sessions(struct talks *t)
{
    struct gpu_bench *b = &t->gpu;
    struct kvt_identity identity;
    uint32_t longest = (uint32_t)(t->tokens + t->prompt * (t->turns + 1));
    struct kvt_session_mgr_opts opts = {.struct_size = sizeof(opts),
                                        .sessions_max = (uint32_t)t->sessions,
                                        .tokens_max = longest,
                                        .blocks_max =
                                            (uint32_t)t->sessions * (longest / 16 + 1) + 65536u};
    kvt_identity_init(&identity);
    identity.engine = COMMAND;
    identity.model = b->geometry->name;
    int rc = kvt_ns_open(t->cache, &identity, &b->layout, &t->ns);
    if (rc == 0)
        rc = kvt_pool_register(t->cache, &b->layout, &b->pool, &t->pool);
    if (rc == 0)
        rc = kvt_session_mgr_open(t->ns, t->pool, &opts, &t->mgr);
    for (int64_t i = 0; i < t->sessions && rc == 0; i++)
        rc = kvt_session_open(t->mgr, NULL, 0, &t->ids[i]);
    t->text = calloc(longest, sizeof(*t->text));
    return fail(t, rc == 0 && t->text == NULL ? -ENOMEM : rc, "sessions");
}

static void wait_pinned(struct talks *t)
{
    struct timespec pause = {.tv_nsec = 20000000};
    while (kvt_pin_state(&t->cache->pin) == KVT_PIN_PINNING && !kvt_cli_interrupted())
        nanosleep(&pause, NULL);
}

static void close_all(struct talks *t)
{
    kvt_session_mgr_close(t->mgr);
    kvt_pool_unregister(t->pool);
    kvt_ns_close(t->ns);
    kvt_close(t->cache);
    gpu_bench_close(&t->gpu);
    free(t->text);
}

/* ---- turns ---- */

/* The words of a session: its own from the first on. */
static const uint32_t *words(struct talks *t, int64_t session, uint32_t from, size_t n)
{
    for (size_t i = 0; i < n; i++)
        t->text[i] = (uint32_t)(session * 1000003 + (from + (uint32_t)i) * 7) & 0x7fffffffu;
    return t->text;
}

static enum source source_of(const struct kvt_session_plan *plan, int64_t prompt)
{
    if (plan->recompute > prompt + 16) /* a partial block may have gone with its page */
        return FROM_NOWHERE;
    if (plan->from_disk > 0)
        return plan->from_disk < plan->from_dram ? FROM_BOTH : FROM_DISK;
    return plan->from_dram > 0 ? FROM_DRAM : FROM_L0;
}

static void note(struct talks *t, const struct kvt_session_plan *plan, int64_t prompt,
                 double seconds)
{
    enum source source = source_of(plan, prompt);
    double n = plan->tokens, left = plan->recompute;
    double ttft = seconds + computing(t, n) - computing(t, n - left);
    size_t i = t->counts[source];
    if (i == TURNS_MAX)
        return;
    t->counts[source]++;
    t->from_dram[source] += plan->from_dram;
    t->from_disk[source] += plan->from_disk;
    t->recomputed[source] += plan->recompute;
    t->ttft[source][i] = ttft;
    t->load[source][i] = seconds;
    t->cold[source][i] = computing(t, n);
    t->fit += source != FROM_NOWHERE;
    t->slower += ttft > computing(t, n);
}

/* One turn: n new tokens. *seconds: until the pages are there. */
static int turn(struct talks *t, int64_t session, int64_t n, struct kvt_session_plan *plan,
                double *seconds)
{
    kvt_session_id id = t->ids[session];
    const uint32_t *text = words(t, session, t->lengths[session], (size_t)n);
    double start = gpu_bench_now();
    int rc;
    plan->struct_size = sizeof(*plan);
    while ((rc = kvt_session_resume(t->mgr, id, text, (size_t)n, NULL, NULL)) == -EAGAIN) {
        long left = kvt_session_mgr_work(t->mgr, -1); /* pages of others are being stored */
        if (left < 0)
            return fail(t, (int)left, "work");
    }
    if (rc == 0)
        rc = kvt_session_wait(t->mgr, id, -1) < 0 ? KVT_E_STATE : 0;
    *seconds = gpu_bench_now() - start;
    if (rc == 0)
        rc = kvt_session_get_plan(t->mgr, id, plan);
    if (rc == 0)
        rc = kvt_session_filled(t->mgr, id, plan->tokens);
    if (rc == 0)
        rc = kvt_session_idle(t->mgr, id);
    t->lengths[session] += (uint32_t)n;
    return fail(t, rc, "a turn");
}

/* The engine computes: part of the time that it would take passes, the manager works. */
static int compute(struct talks *t, double seconds)
{
    double until = gpu_bench_now() + seconds * (double)t->percent / 100;
    struct timespec pause = {.tv_nsec = 1000000};
    long left = 0;
    while (gpu_bench_now() < until && left >= 0 && !kvt_cli_interrupted()) {
        left = kvt_session_mgr_work(t->mgr, 0);
        nanosleep(&pause, NULL);
    }
    return fail(t, left < 0 ? (int)left : 0, "work");
}

/* Until nothing is left to store. */
static int settle(struct talks *t)
{
    long left;
    while ((left = kvt_session_mgr_work(t->mgr, -1)) > 0) {
    }
    return fail(t, (int)left, "work");
}

static int run_turns(struct talks *t)
{
    struct kvt_session_plan plan;
    uint32_t order[SESSIONS_MAX];
    double seconds, start = gpu_bench_now();
    int rc = 0;
    for (int64_t i = 0; i < t->sessions && rc == 0 && !kvt_cli_interrupted(); i++)
        if ((rc = turn(t, i, t->tokens, &plan, &seconds)) == 0)
            rc = compute(t, computing(t, (double)t->tokens));
    if (rc == 0)
        rc = settle(t);
    t->fill_seconds = gpu_bench_now() - start;
    for (int64_t round = 0; round < t->turns && rc == 0 && !kvt_cli_interrupted(); round++) {
        for (int64_t i = 0; i < t->sessions; i++) {
            int64_t j = (int64_t)kvt_rng_below(&t->gpu.rng, (uint64_t)i + 1);
            order[i] = order[j];
            order[j] = (uint32_t)i;
        }
        for (int64_t i = 0; i < t->sessions && rc == 0 && !kvt_cli_interrupted(); i++) {
            rc = turn(t, order[i], t->prompt, &plan, &seconds);
            if (rc == 0)
                note(t, &plan, t->prompt, seconds);
            if (rc == 0) /* an engine computes here, and the manager works */
                rc = settle(t);
        }
    }
    return rc;
}

/* ---- results ---- */

static double quantile(const double *sorted, size_t n, double q)
{
    size_t at = (size_t)ceil(q * (double)n);
    return sorted[at > 0 ? KVT_MIN(at, n) - 1 : 0];
}

static json_t *summary(struct talks *t, enum source source)
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
static json_t *counters(struct talks *t)
{
    static const char *const names[] = {
        "store.dropped_dram", "store.dropped_chain", "disk.dropped_queue",   "disk.dropped_space",
        "disk.lost_deferred", "disk.lost_queue",     "dram.evicted",         "dram.evicted_lost",
        "disk.evicted",       "disk.orphans",        "client.store_orphans", "gpu.failed_blocks"};
    json_t *all = json_object();
    uint64_t value;
    for (size_t i = 0; i < KVT_ARRAY_LEN(names); i++)
        if (kvt_stats_get(t->cache, names[i], &value) == 0)
            json_object_set_new(all, names[i], json_integer((json_int_t)value));
    return all;
}

static json_t *results(struct talks *t)
{
    struct kvt_gpu_info info;
    struct kvt_session_stats stats = {.struct_size = sizeof(stats)};
    uint64_t page = t->gpu.pool_bytes / (uint64_t)t->gpu.blocks;
    uint64_t alone = t->gpu.pool_bytes / (page * (((uint64_t)t->tokens + 15) / 16));
    double fit = t->turns > 0 ? (double)t->fit / (double)t->turns : 0;
    json_t *turns = json_object();
    kvt_gpu_info(t->gpu.gpu, &info);
    if (kvt_session_mgr_stats(t->mgr, &stats) != 0)
        memset(&stats, 0, sizeof(stats));
    for (int source = 0; source < SOURCES; source++)
        json_object_set_new(turns, source_names[source], summary(t, (enum source)source));
    return json_pack(
        "{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:I, "
        "s:I, s:I, s:s, s:o, "
        "s:o}",
        "device", info.name, "geometry", t->gpu.geometry->name, "layers",
        (json_int_t)t->gpu.geometry->layers, "tokens", (json_int_t)t->tokens, "new_tokens",
        (json_int_t)t->prompt, "prefill_time_percent", (json_int_t)t->percent, "pool_bytes",
        (json_int_t)t->gpu.pool_bytes, "dram_bytes", (json_int_t)t->dram, "disk_bytes",
        (json_int_t)(t->dir != NULL ? t->disk : 0), "sessions", (json_int_t)t->sessions,
        "hbm_only_bf16", (json_int_t)alone, "held", fit, "held_ratio",
        alone > 0 ? fit / (double)alone : 0, "fill_seconds", t->fill_seconds,
        "turns_slower_than_recompute", (json_int_t)t->slower, "evicted_unsaved",
        (json_int_t)stats.evicted_unsaved, "store_failed", (json_int_t)stats.store_failed, "write",
        t->write, "turns", turns, "counters", counters(t));
}

static void print(const json_t *all)
{
    const char *name;
    json_t *one;
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

static int run(struct talks *t)
{
    static struct gpu_bench_geometry geometry = {"8b", 32, 8, 128};
    struct gpu_bench *b = &t->gpu;
    geometry.layers = (uint32_t)t->layers;
    b->blocks = 1; /* of the bench's own slots, which are not used */
    int rc = gpu_bench_open(b);
    b->blocks = (int64_t)(t->pool_bytes / ((uint64_t)t->layers * 2 * 16 * 8 * 128 * 2));
    if (rc == 0)
        rc = gpu_bench_pool(b, &geometry);
    if (rc == 0)
        rc = open_cache(t);
    if (rc == 0)
        rc = open_sessions(t);
    if (rc == 0) {
        wait_pinned(t);
        rc = run_turns(t);
    }
    if (rc != 0)
        kvt_cli_error(COMMAND, "%s", b->error[0] != '\0' ? b->error : kvt_strerror(rc));
    else if (kvt_cli_interrupted())
        rc = -1;
    if (rc == 0) {
        json_t *all = results(t);
        if (b->json)
            rc = kvt_cli_json(all);
        else
            print(all), json_decref(all);
    }
    close_all(t);
    return rc == 0 ? KVT_EXIT_OK : KVT_EXIT_PROBLEM;
}

int kvt_cmd_bench_sessions(int argc, char **argv)
{
    static struct talks talks = {.sessions = 64,
                                 .tokens = 65536,
                                 .turns = 2,
                                 .prompt = 128,
                                 .layers = 32,
                                 .us_linear = 23,
                                 .ps_square = 430,
                                 .percent = 100,
                                 .write = "evict",
                                 .pool_bytes = UINT64_C(56000000000),
                                 .dram = UINT64_C(96) << 30,
                                 .disk = UINT64_C(40000000000)};
    struct talks *t = &talks;
    const struct kvt_cli_option options[] = {
        {"sessions", "N", "sessions (64)", .number = &t->sessions, .min = 1, .max = SESSIONS_MAX},
        {"tokens", "N", "tokens of a session (65536)", .number = &t->tokens, .min = 32,
         .max = 1 << 20},
        {"turns", "N", "times that every session comes back (2)", .number = &t->turns, .min = 1,
         .max = 64},
        {"prompt", "N", "new tokens of a turn (128)", .number = &t->prompt, .min = 1, .max = 65536},
        {"layers", "N", "layers of 8 KV heads of 128 (32: an 8B model)", .number = &t->layers,
         .min = 1, .max = 120},
        {"pool", "SIZE", "pages in GPU memory (56GB)", .size = &t->pool_bytes},
        {"dram", "SIZE", "DRAM (96GiB)", .size = &t->dram},
        {"dir", "DIR", "directory on a drive; without it there is no disk tier", .text = &t->dir},
        {"disk", "SIZE", "of the drive (40GB)", .size = &t->disk},
        {"write", "WHEN", "blocks go to the drive: through, evict, idle (evict)",
         .text = &t->write},
        {"us-linear", "N", "a of the computing model, microseconds a token (23)",
         .number = &t->us_linear, .min = 0, .max = 1000000},
        {"ps-square", "N", "b of the computing model, picoseconds a token squared (430)",
         .number = &t->ps_square, .min = 0, .max = 1000000000},
        {"percent", "N", "how much of the time of a prefill really passes (100)",
         .number = &t->percent, .min = 0, .max = 100},
        {"device", "N", "CUDA device (0)", .number = &t->gpu.device, .min = 0, .max = 63},
        {"driver", "FILE", "the CUDA driver's library", .text = &t->gpu.driver},
        {"json", NULL, "one JSON document", .flag = &t->gpu.json},
    };
    int rc = kvt_cli_parse(COMMAND, "[options]", options, KVT_ARRAY_LEN(options), NULL, 0, 0, NULL,
                           argc, argv);
    if (rc != 0)
        return rc == 1 ? KVT_EXIT_OK : KVT_EXIT_USAGE;
    kvt_cli_catch_interrupt();
    t->gpu.rng.state = 42;
    fprintf(t->gpu.json ? stderr : stdout,
            "computing n tokens is taken to be C(n) = %lld us n + %.3f ns n^2: C(%lld) = %.3f s\n",
            (long long)t->us_linear, 1e-3 * (double)t->ps_square, (long long)t->tokens,
            computing(t, (double)t->tokens));
    return run(t);
}
