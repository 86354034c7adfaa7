/* kvtier plan: will a cache pay, before one is bought?
 *
 * Bytes of a token at each level (the real record: header and padding included), the bandwidth from
 * which loading beats computing, and for each tier the length from which it pays, what a million
 * cached tokens cost, and how long a drive lives at a given traffic; sessions with and without. By
 * the models that kvt_plan() uses. Asks no machine: it is arithmetic over plan_data.h.
 * Threads: one.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "cli.h"
#include "commands.h"
#include "kvtier/codec.h"
#include "plan/prefill.h"
#include "plan/tier_model.h"
#include "plan_data.h"

#define COMMAND "plan"
#define TIERS_MAX 64u
#define TOKENS_MAX (1u << 20) /* a prompt from which nobody computes */
#define PREFILL_ASSUMED 10000
#define DAY_S 86400.0
#define HBM_USABLE 0.9 /* of GPU memory: what engines take by default */

struct plan {
    const char *model_name, *config, *data_path;
    int64_t rate, block, gpus, context, sessions, traffic;
    uint64_t gpu_memory, weights, dram, disk;
    int json, example;
    struct plan_model model;
    struct plan_bytes parts;
    double bytes[PLAN_LEVELS];  /* of a token, on average over a session of `context` */
    double stored[PLAN_LEVELS]; /* of a token as it is stored: windows are stored as they pass */
    struct kvt_prefill prefill;
    int assumed; /* the prefill rate is nobody's */
    struct plan_tier tiers[TIERS_MAX];
    size_t tier_count;
};

static const int level_order[] = {KVT_LEVEL_RAW, KVT_LEVEL_KV8, KVT_LEVEL_KV6,
                                  KVT_LEVEL_KV5, KVT_LEVEL_KV4, KVT_LEVEL_INT4};

static const char *level_name(int level)
{
    return level == KVT_LEVEL_RAW ? "bf16" : kvt_level_name(level);
}

/* GB/s from which long loads beat computing short prompts: attention makes computing dearer. */
static double break_even(const struct plan *p, int level)
{
    return p->bytes[level] / kvt_prefill_seconds(&p->prefill, 1, 0) * 1e-9;
}

static int pays(const struct plan *p, const struct plan_tier *tier, int level, double n)
{
    double bytes = plan_session_bytes(&p->model, &p->parts, level, n);
    double load = tier->latency_s + bytes / (tier->gbps * 1e9);

    return load < kvt_prefill_seconds(&p->prefill, n, 0);
}

/* The shortest prompt that is loaded faster than computed; 0: none up to TOKENS_MAX. With b = 0 the
 * difference is a line, else a parabola that opens upwards: once it pays, it goes on to pay. */
static uint32_t pays_from(const struct plan *p, const struct plan_tier *tier, int level)
{
    uint32_t low = 0, high = TOKENS_MAX;

    if (p->bytes[level] <= 0 || !pays(p, tier, level, high))
        return 0;
    while (high - low > 1) {
        uint32_t mid = low + (high - low) / 2;
        if (pays(p, tier, level, mid))
            high = mid;
        else
            low = mid;
    }
    return high;
}

static double usd_per_million(const struct plan *p, const struct plan_tier *tier, int level)
{
    return p->stored[level] * 1e6 * 1e-9 * tier->usd_per_gb;
}

/* Years that a drive lives when that many tokens a second are stored on it; 0: not known. */
static double life_years(const struct plan *p, const struct plan_tier *tier, int level)
{
    double writes = (double)p->traffic * p->stored[level] * DAY_S / 1e9;

    if (!(writes > 0) || !(tier->capacity_gb > 0) || !(tier->dwpd > 0) || !(tier->years > 0))
        return 0;
    return tier->dwpd * tier->capacity_gb * tier->years / writes;
}

/* ---- sessions ------------------------------------------------------------------------------ */

/* How many sessions of the context fit into that many bytes. */
static int64_t sessions_in(const struct plan *p, double bytes, int level)
{
    double each = p->bytes[level] * (double)p->context;

    return bytes > 0 && each > 0 ? (int64_t)(bytes / each) : 0;
}

static double gpu_room(const struct plan *p)
{
    return (double)p->gpus * HBM_USABLE * (double)p->gpu_memory - (double)p->weights;
}

static void print_sessions(const struct plan *p)
{
    double bf16 = p->bytes[KVT_LEVEL_RAW] * (double)p->context * (double)p->sessions;
    double kv4 = p->bytes[KVT_LEVEL_KV4] * (double)p->context * (double)p->sessions;

    printf("\n%" PRId64 " sessions of %" PRId64 " tokens: %.2f GB each, %.1f GB together in bf16; "
           "%.1f GB at kv4\n",
           p->sessions, p->context, bf16 * 1e-9 / (double)p->sessions, bf16 * 1e-9, kv4 * 1e-9);
    if (p->gpu_memory > 0)
        printf("without a cache: %" PRId64 " of them fit into %" PRId64
               " GPUs beside %.0f GB of weights; every other one is computed anew, %.1f s each\n",
               KVT_MIN(sessions_in(p, gpu_room(p), KVT_LEVEL_RAW), p->sessions), p->gpus,
               (double)p->weights * 1e-9, kvt_prefill_seconds(&p->prefill, (double)p->context, 0));
    if (p->dram + p->disk > 0)
        printf(
            "with one: %" PRId64 " of them are kept in %.0f GB of DRAM and %.0f GB of disk\n",
            KVT_MIN(sessions_in(p, (double)p->dram + (double)p->disk, KVT_LEVEL_KV4), p->sessions),
            (double)p->dram * 1e-9, (double)p->disk * 1e-9);
    printf("to bring one back at kv4:");
    for (size_t i = 0; i < p->tier_count; i++)
        printf("%s %s %.1f s", i ? "," : "", p->tiers[i].name,
               p->tiers[i].latency_s + kv4 / (double)p->sessions / (p->tiers[i].gbps * 1e9));
    printf("\n");
    if (p->example)
        printf("A widely copied article gives 1,310 bytes a token for this example, 34 GB for the "
               "100 sessions: %.0f times too little.\n",
               p->bytes[KVT_LEVEL_RAW] / 1310);
}

/* ---- output -------------------------------------------------------------------------------- */

static void print_tokens(uint32_t tokens)
{
    if (tokens)
        printf("  %9" PRIu32, tokens);
    else
        printf("  %9s", "never");
}

static void print_tiers(const struct plan *p)
{
    printf("\n%-14s %8s  %9s  %9s  %9s  %10s%s\n", "tier", "GB/s", "bf16 from", "kv8 from",
           "kv4 from", "$/M tokens", p->traffic ? "  drive life" : "");
    for (size_t i = 0; i < p->tier_count; i++) {
        const struct plan_tier *tier = &p->tiers[i];
        double life = life_years(p, tier, KVT_LEVEL_KV4);
        printf("%-14s %8.2f", tier->name, tier->gbps);
        print_tokens(pays_from(p, tier, KVT_LEVEL_RAW));
        print_tokens(pays_from(p, tier, KVT_LEVEL_KV8));
        print_tokens(pays_from(p, tier, KVT_LEVEL_KV4));
        if (tier->usd_per_gb > 0)
            printf("  %10.2f", usd_per_million(p, tier, KVT_LEVEL_KV4));
        else
            printf("  %10s", "-");
        if (life > 0)
            printf("  %6.1f years", life);
        printf("\n");
    }
    printf(
        "\"from\": the shortest prompt in tokens that is loaded faster than computed, on an idle "
        "tier. Prices are\nassumptions (share/kvtier/plan.json); cost%s at kv4.\n",
        p->traffic ? " and drive life" : "");
}

static void print_text(const struct plan *p)
{
    const struct plan_model *m = &p->model;
    double rate = 1 / kvt_prefill_seconds(&p->prefill, 1, 0);

    if (m->latent_dim)
        printf("%s: %u layers of %u latent elements a token", m->name, m->layers, m->latent_dim);
    else
        printf("%s: %u layers x %u KV heads x %u", m->name, m->layers, m->kv_heads, m->head_dim);
    printf("; prefill %.0f tok/s%s\n", rate,
           p->assumed ? " (assumed: give yours by --prefill)" : "");
    if (m->window_layers)
        printf("%u of the layers see the last %u tokens\n", m->window_layers, m->window_tokens);
    if (m->state_layers)
        printf("%u of the layers keep a state instead of a cache, %.1f MB together\n",
               m->state_layers, m->state_bytes * 1e-6);
    if (m->note[0])
        printf("note: %s\n", m->note);
    printf("\n%-6s %12s %16s", "level", "bytes/token", "break-even GB/s");
    if (m->window_layers || m->state_layers)
        printf("  (mean of %" PRId64 " tokens: --context)", p->context);
    printf("\n");
    for (size_t i = 0; i < KVT_ARRAY_LEN(level_order); i++)
        if (p->bytes[level_order[i]] > 0)
            printf("%-6s %12.0f %16.3f\n", level_name(level_order[i]), p->bytes[level_order[i]],
                   break_even(p, level_order[i]));
    if (m->latent_dim)
        printf("A latent is stored at 8 bits at least: kv6, kv5, kv4 and int4 are kv8 here.\n");
    else
        printf("kv8 to kv4: coded after a transform; int4: plain 4 bits, for comparison.\n");
    print_tiers(p);
    if (p->sessions)
        print_sessions(p);
}

static json_t *tier_json(const struct plan *p, const struct plan_tier *tier)
{
    uint32_t from = pays_from(p, tier, KVT_LEVEL_KV4);
    uint32_t raw = pays_from(p, tier, KVT_LEVEL_RAW);
    double life = life_years(p, tier, KVT_LEVEL_KV4);
    double usd = usd_per_million(p, tier, KVT_LEVEL_KV4);

    return json_pack("{s:s, s:f, s:o, s:o, s:o, s:o}", "name", tier->name, "gbps", tier->gbps,
                     "pays_from_tokens", from ? json_integer(from) : json_null(),
                     "pays_from_tokens_bf16", raw ? json_integer(raw) : json_null(),
                     "usd_per_million_tokens", usd > 0 ? json_real(usd) : json_null(), "life_years",
                     life > 0 ? json_real(life) : json_null());
}

static json_t *sessions_json(const struct plan *p)
{
    double each = (double)p->context * (double)p->sessions;

    if (!p->sessions)
        return json_null();
    return json_pack(
        "{s:I, s:I, s:f, s:f, s:o, s:o}", "sessions", (json_int_t)p->sessions, "context",
        (json_int_t)p->context, "bytes_bf16", each * p->bytes[KVT_LEVEL_RAW], "bytes_kv4",
        each * p->bytes[KVT_LEVEL_KV4], "in_gpus_without",
        p->gpu_memory ? json_integer(sessions_in(p, gpu_room(p), KVT_LEVEL_RAW)) : json_null(),
        "kept_with",
        p->dram + p->disk > 0
            ? json_integer(sessions_in(p, (double)p->dram + (double)p->disk, KVT_LEVEL_KV4))
            : json_null());
}

static int print_json(const struct plan *p)
{
    json_t *bytes = json_object(), *even = json_object(), *tiers = json_array();

    for (size_t i = 0; i < KVT_ARRAY_LEN(level_order); i++) {
        int level = level_order[i];
        if (p->bytes[level] <= 0)
            continue;
        double whole = p->bytes[level];
        json_object_set_new(bytes, level_name(level),
                            whole == floor(whole) ? json_integer((json_int_t)whole)
                                                  : json_real(whole));
        json_object_set_new(even, level_name(level), json_real(break_even(p, level)));
    }
    for (size_t i = 0; i < p->tier_count; i++)
        json_array_append_new(tiers, tier_json(p, &p->tiers[i]));
    return kvt_cli_json(json_pack(
        "{s:s, s:f, s:b, s:I, s:{s:I, s:I, s:I, s:I, s:f}, s:o, s:o, s:o, s:o, s:s}", "model",
        p->model.name, "prefill_tok_s", 1 / kvt_prefill_seconds(&p->prefill, 1, 0),
        "prefill_assumed", p->assumed, "block_tokens", (json_int_t)p->block, "layers", "all",
        (json_int_t)p->model.layers, "window", (json_int_t)p->model.window_layers, "window_tokens",
        (json_int_t)p->model.window_tokens, "state", (json_int_t)p->model.state_layers,
        "state_bytes", p->model.state_bytes, "bytes_per_token", bytes, "break_even_gbps", even,
        "tiers", tiers, "sizing", sessions_json(p), "note", p->model.note));
}

/* ---- input --------------------------------------------------------------------------------- */

static int list_models(const struct plan *p, const json_t *data)
{
    json_t *entry, *list = plan_data_names(data);
    size_t i;

    if (p->json)
        return kvt_cli_json(json_pack("{s:o}", "models", list));
    json_array_foreach(list, i, entry) printf("%s\n", json_string_value(entry));
    printf("Choose one: kvtier plan --model NAME --prefill TOKENS_A_SECOND\n");
    json_decref(list);
    return KVT_EXIT_OK;
}

/* 0, or a sentence in error. */
static int gather(struct plan *p, const json_t *data, char *error, size_t len)
{
    double a, b;
    int rc = p->config ? plan_config_model(p->config, &p->model, error, len)
                       : plan_data_model(data, p->model_name, &p->model, error, len);
    if (rc)
        return rc;
    if (p->rate) {
        a = 1 / (double)p->rate;
        b = 0;
    } else if (plan_data_prefill(data, p->model.first_name, &a, &b)) {
        a = 1.0 / PREFILL_ASSUMED;
        b = 0;
        p->assumed = 1;
    }
    if (!kvt_prefill_init(&p->prefill, a, b) ||
        plan_token_bytes(&p->model, (uint32_t)p->block, &p->parts)) {
        snprintf(error, len, "--block %" PRId64 ": a block has 16 to 4096 tokens, a multiple of 16",
                 p->block);
        return -1;
    }
    for (int level = 0; level < PLAN_LEVELS; level++) {
        double all = plan_session_bytes(&p->model, &p->parts, level, (double)p->context);
        p->stored[level] = p->parts.full[level] + p->parts.window[level];
        p->bytes[level] = p->stored[level] > 0 ? all / (double)p->context : 0;
    }
    while (p->tier_count < TIERS_MAX &&
           !(rc = plan_data_tier(data, p->tier_count, &p->tiers[p->tier_count], error, len)))
        p->tier_count++;
    return rc < 0 ? rc : 0;
}

/* 100 sessions of 256K tokens of Llama-3.3-70B on 4 GPUs of 80 GB, as published. */
static void set_example(struct plan *p)
{
    p->model_name = "llama-3.3-70b";
    p->rate = p->rate ? p->rate : 18000;
    p->sessions = 100;
    p->context = 262144;
    p->gpus = 4;
    p->gpu_memory = 80ull * 1000 * 1000 * 1000;
    p->weights = 141ull * 1000 * 1000 * 1000; /* 70.6e9 parameters in bf16 */
}

static int plan_run(struct plan *p)
{
    char error[512] = "";
    json_t *data = plan_data_load(p->data_path, error, sizeof(error));
    int code = KVT_EXIT_USAGE;

    if (!data) {
        kvt_cli_error(COMMAND, "%s", error);
        return KVT_EXIT_PROBLEM;
    }
    if (!p->model_name && !p->config)
        code = list_models(p, data);
    else if (gather(p, data, error, sizeof(error)))
        kvt_cli_error(COMMAND, "%s", error);
    else if (p->json)
        code = print_json(p);
    else {
        print_text(p);
        code = KVT_EXIT_OK;
    }
    json_decref(data);
    return code;
}

/* An option that would do nothing. */
static int options_refused(const struct plan *p)
{
    const char *of_sessions = p->dram         ? "--dram"
                              : p->disk       ? "--disk"
                              : p->gpu_memory ? "--gpu-memory"
                              : p->weights    ? "--weights"
                              : p->gpus       ? "--gpus"
                                              : NULL;

    if (p->example && (p->model_name || p->config)) {
        kvt_cli_error(COMMAND, "--example is of llama-3.3-70b: it takes no %s",
                      p->model_name ? "--model" : "--config");
        return 1;
    }
    if (p->example && (p->sessions || p->gpus || p->gpu_memory || p->weights)) {
        kvt_cli_error(COMMAND, "--example has sessions and GPUs of its own: leave out %s",
                      p->sessions ? "--sessions" : of_sessions);
        return 1;
    }
    if (!p->example && !p->sessions && of_sessions) {
        kvt_cli_error(COMMAND, "%s does nothing without --sessions N: how many are to be kept",
                      of_sessions);
        return 1;
    }
    return 0;
}

int kvt_cmd_plan(int argc, char **argv)
{
    struct plan p = {.block = 16, .context = 32768};
    char models[1024];
    const uint64_t pib = 1ull << 50;
    const struct kvt_cli_option options[] = {
        {.name = "model",
         .metavar = "NAME",
         .help = "a model of the data",
         .text = &p.model_name,
         .words = models},
        {.name = "config", .metavar = "FILE", .help = "a model's config.json", .text = &p.config},
        {.name = "prefill",
         .metavar = "N",
         .help = "tokens a second that the engine computes",
         .number = &p.rate,
         .min = 1,
         .max = 1000000000},
        {.name = "block",
         .metavar = "N",
         .help = "tokens of a block (16)",
         .number = &p.block,
         .min = 16,
         .max = KVT_BLOCK_TOKENS_MAX},
        {.name = "sessions",
         .metavar = "N",
         .help = "sessions to be kept",
         .number = &p.sessions,
         .min = 1,
         .max = 1000000000},
        {.name = "context",
         .metavar = "N",
         .help = "tokens of a session (32768)",
         .number = &p.context,
         .min = 1,
         .max = 1 << 30},
        {.name = "gpus",
         .metavar = "N",
         .help = "GPUs that share the model (1)",
         .number = &p.gpus,
         .min = 1,
         .max = 100000},
        {.name = "gpu-memory",
         .metavar = "SIZE",
         .help = "memory of a GPU",
         .size = &p.gpu_memory,
         .min = 1,
         .max = (int64_t)pib},
        {.name = "weights",
         .metavar = "SIZE",
         .help = "weights on all of them together",
         .size = &p.weights,
         .min = 0,
         .max = (int64_t)pib},
        {.name = "dram",
         .metavar = "SIZE",
         .help = "DRAM for the cache",
         .size = &p.dram,
         .min = 1,
         .max = (int64_t)pib},
        {.name = "disk",
         .metavar = "SIZE",
         .help = "disk for the cache",
         .size = &p.disk,
         .min = 1,
         .max = (int64_t)pib},
        {.name = "traffic",
         .metavar = "N",
         .help = "tokens a second stored on a drive, on average: how long does it live?",
         .number = &p.traffic,
         .min = 1,
         .max = 1000000000},
        {.name = "data",
         .metavar = "FILE",
         .help = "more models, prefill rates and tiers",
         .text = &p.data_path},
        {.name = "example",
         .help = "100 sessions of 256K tokens, Llama-3.3-70B, 4 GPUs",
         .flag = &p.example},
        {.name = "json", .help = "one JSON object", .flag = &p.json},
    };
    plan_data_words(models, sizeof(models));
    int rc = kvt_cli_parse(COMMAND, "--model NAME | --config FILE [--prefill N] [options]", options,
                           KVT_ARRAY_LEN(options), NULL, 0, 0, NULL, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    if (options_refused(&p))
        return KVT_EXIT_USAGE;
    if (p.model_name && p.config) {
        kvt_cli_error(COMMAND, "give either --model NAME or --config FILE");
        return KVT_EXIT_USAGE;
    }
    p.gpus = p.gpus ? p.gpus : 1;
    if (p.example)
        set_example(&p);
    return plan_run(&p);
}
