/* kvtier replay: would it have paid, and with which sizes?
 *
 * A trace of requests goes through the production store (index, eviction, admission, log) with a
 * drive in memory and the trace's own clock: what it would have found, and where. Then a queue of
 * these requests before engines with rates that the plan has to find out: when each first token
 * would have come, beside computing everything and loading everything.
 * Threads: one. Does not model decoding: engines here compute prompts, one at a time.
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/parse.h"
#include "cli.h"
#include "commands.h"
#include "kvtier/error.h"
#include "plan_data.h"
#include "replay_report.h"

#define COMMAND "replay"
#define GENERATE_SEED 20261129u
#define DRAM_LATENCY_S 0.0001
#define DISK_LATENCY_S 0.001
#define CASES_MAX 512u
#define DISK_BLOCKS_MIN 1024u
#define LIST_MAX 32u
#define BUCKET_DAYS (0.5 / 24)
#define ENGINES_BUSY 0.8     /* without a cache, of those that are counted out by themselves */
#define PREFILL_ASSUMED 1e-4 /* seconds a token, where the data has no rate of the model */

struct replay {
    const char *trace_path, *dram_text, *disk_text, *model_name, *admission_text, *data_path;
    const char *priors_text, *engine_hour_text, *budget_text, *share_text, *years_text;
    const char *write_text;
    uint64_t dram_rate, disk_rate;
    int64_t prefill_rate, generate, seed, engines, jitter;
    int json, sweep, curve, both_ends, whole_blocks;
    int write;             /* enum kvt_write */
    const char *too_small; /* the option */
    uint64_t dram[LIST_MAX], disk[LIST_MAX];
    int admission[LIST_MAX];
    size_t dram_count, disk_count, admission_count;
    double budget, share;
    struct replay_trace trace;
    struct replay_base base;
    struct replay_common common;
    struct replay_case cases[CASES_MAX];
    struct replay_result results[CASES_MAX];
    size_t count;
};

/* ---- the cases ------------------------------------------------------------------------------- */

static int add_case(struct replay *r, uint64_t dram, uint64_t disk,
                    struct replay_admission admission)
{
    if (r->count == CASES_MAX)
        return KVT_E_LIMIT;
    if (replay_case_blocks(&r->base, dram) == 0)
        r->too_small = "--dram";
    else if (disk && replay_case_blocks(&r->base, disk) < DISK_BLOCKS_MIN)
        r->too_small = "--disk";
    if (r->too_small)
        return KVT_E_TOO_SMALL;
    admission.write = r->write;
    r->cases[r->count] = (struct replay_case){dram, disk, admission};
    int rc = replay_case_run(&r->base, &r->cases[r->count], &r->common, &r->results[r->count]);
    if (!rc)
        r->count++;
    return rc;
}

/* A budget of drive writes a day, in blocks. */
static uint64_t budget_blocks(const struct replay *r, uint64_t disk)
{
    double blocks = r->budget * (double)replay_case_blocks(&r->base, disk);

    return blocks > 0 ? (uint64_t)fmax(blocks, 1) : 0;
}

static int run_lists(struct replay *r)
{
    int rc = 0;

    for (size_t i = 0; i < r->dram_count && !rc; i++) {
        for (size_t j = 0; j < r->disk_count && !rc; j++) {
            size_t policies = r->disk[j] ? r->admission_count : 1;
            for (size_t k = 0; k < policies && !rc; k++) {
                struct replay_admission admission = {.policy = r->disk[j] ? r->admission[k] : 0};
                if (admission.policy == KVT_ADMIT_RANDOM)
                    admission.share = r->share;
                admission.blocks_per_day = r->disk[j] ? budget_blocks(r, r->disk[j]) : 0;
                rc = add_case(r, r->dram[i], r->disk[j], admission);
            }
        }
    }
    return rc;
}

/* Shares of what the trace has in different blocks. */
static void sweep_sizes(struct replay *r)
{
    static const double dram[] = {0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1};
    static const double disk[] = {0, 0.1, 0.2, 0.5, 1};
    double all = (double)r->trace.distinct * r->base.world.block_bytes;

    r->dram_count = KVT_ARRAY_LEN(dram);
    for (size_t i = 0; i < KVT_ARRAY_LEN(dram); i++)
        r->dram[i] = (uint64_t)fmax(dram[i] * all, r->base.world.block_bytes);
    r->disk_count = 0;
    for (size_t i = 0; i < KVT_ARRAY_LEN(disk); i++)
        if (disk[i] == 0 || disk[i] * (double)r->trace.distinct > DISK_BLOCKS_MIN)
            r->disk[r->disk_count++] = (uint64_t)(disk[i] * all);
}

/* Hits against bytes written: every policy, value with budgets, random admission of shares that
 * write as much. A budget's bucket holds half an hour's bytes when it begins. */
static int run_curve(struct replay *r)
{
    static const double budgets[] = {0.125, 0.25, 0.5, 0.75};
    static const double shares[] = {0.5, 0.9, 0.95, 0.97, 0.99};
    uint64_t dram = r->dram[0], disk = r->disk[0];
    int rc = add_case(r, dram, disk, (struct replay_admission){.policy = KVT_ADMIT_ALL});
    double all = rc ? 0 : (double)r->results[0].written;
    double days = replay_days(&r->trace) + BUCKET_DAYS;

    if (!rc)
        rc = add_case(r, dram, disk, (struct replay_admission){.policy = KVT_ADMIT_SECOND});
    if (!rc) { /* as many bytes as second_use took */
        struct replay_admission value = {.policy = KVT_ADMIT_VALUE};
        value.blocks_per_day = (uint64_t)fmax((double)r->results[1].written / days, 1);
        rc = add_case(r, dram, disk, value);
    }
    for (size_t i = 0; i < KVT_ARRAY_LEN(budgets) && !rc; i++) {
        struct replay_admission value = {.policy = KVT_ADMIT_VALUE};
        value.blocks_per_day = (uint64_t)fmax(budgets[i] * all / days, 1);
        rc = add_case(r, dram, disk, value);
    }
    for (size_t i = 0; i < KVT_ARRAY_LEN(shares) && !rc; i++)
        rc = add_case(r, dram, disk,
                      (struct replay_admission){.policy = KVT_ADMIT_RANDOM, .share = shares[i]});
    if (!rc)
        rc = add_case(r, dram, disk, (struct replay_admission){.policy = KVT_ADMIT_CONTINUED});
    return rc;
}

/* ---- input ----------------------------------------------------------------------------------- */

/* A plain decimal above 0. */
static int take_decimal(const char *name, const char *text, double max, double *out, char *error,
                        size_t len)
{
    char *end;
    double value;

    errno = 0;
    value = strtod(text, &end);
    if (*end == '\0' && end != text && !errno && isfinite(value) && value > 0 && value <= max &&
        strspn(text, "0123456789.") == strlen(text)) {
        *out = value;
        return 0;
    }
    snprintf(error, len, "--%s: '%.40s' is no number above 0, up to %g", name, text, max);
    return -1;
}

/* The next word of a list with commas; NULL: none is left. */
static char *next_word(char **rest)
{
    char *word = *rest;

    if (!word)
        return NULL;
    char *comma = strchr(word, ',');
    if (comma)
        *comma++ = '\0';
    *rest = comma;
    return word;
}

static int take_sizes(const char *name, const char *text, const char *special, uint64_t meaning,
                      uint64_t *out, size_t *count, char *error, size_t len)
{
    char words[1024], *rest = words, *word;

    *count = 0;
    snprintf(words, sizeof(words), "%s", text);
    while ((word = next_word(&rest))) {
        if (*count == LIST_MAX) {
            snprintf(error, len, "--%s: at most %u sizes", name, LIST_MAX);
            return -1;
        }
        if (!strcmp(word, special))
            out[*count] = meaning;
        else if (kvt_parse_size(word, &out[*count]) || (out[*count] == 0 && meaning != 0)) {
            snprintf(error, len, "--%s: '%.40s' is no size, nor %s", name, word, special);
            return -1;
        }
        ++*count;
    }
    return 0;
}

static int take_admission(struct replay *r, char *error, size_t len)
{
    static const char *const names[] = {"all", "second_use", "value", "continued", "random"};
    char words[256], *rest = words, *word;

    snprintf(words, sizeof(words), "%s", r->admission_text);
    while ((word = next_word(&rest)) && r->admission_count < LIST_MAX) {
        int policy = 0;
        while (policy <= KVT_ADMIT_RANDOM && strcmp(word, replay_admission_name(policy)) != 0)
            policy++;
        if (policy > KVT_ADMIT_RANDOM) {
            const char *nearest = kvt_nearest(word, names, KVT_ARRAY_LEN(names));
            snprintf(error, len,
                     "--admission: '%.40s' is not one of all, second_use, value, continued, "
                     "random%s%s%s",
                     word, nearest ? "; did you mean '" : "", nearest ? nearest : "",
                     nearest ? "'?" : "");
            return -1;
        }
        r->admission[r->admission_count++] = policy;
    }
    return 0;
}

static int take_write(struct replay *r, char *error, size_t len)
{
    static const char *const words[] = {"through", "evict", "idle", "auto"};

    for (size_t i = 0; i < KVT_ARRAY_LEN(words); i++) {
        if (!strcmp(r->write_text, words[i])) {
            r->write = KVT_WRITE_THROUGH + (int)i;
            return 0;
        }
    }
    snprintf(error, len, "--write: '%.40s' is not one of through, evict, idle, auto",
             r->write_text);
    return -1;
}

/* Prices of tiers and rates of the model, from the data of `kvtier plan`. */
static int take_data(struct replay *r, struct plan_model *model, char *error, size_t len)
{
    struct replay_prices *prices = &r->base.prices;
    struct replay_world *world = &r->base.world;
    struct plan_bytes bytes;
    json_t *data = plan_data_load(r->data_path, error, len);
    int rc = data ? plan_data_model(data, r->model_name, model, error, len) : -1;
    struct plan_tier tier;

    for (size_t i = 0; !rc && !(rc = plan_data_tier(data, i, &tier, error, len)); i++) {
        if (!strncmp(tier.name, "dram", 4) && !(prices->dram_gb > 0))
            prices->dram_gb = tier.usd_per_gb;
        if (!strncmp(tier.name, "nvme-gen4", 9)) {
            prices->disk_gb = tier.usd_per_gb;
            prices->disk_dwpd = tier.dwpd;
            prices->disk_years = tier.years;
        }
    }
    rc = rc == 1 ? 0 : rc;
    if (!rc && r->prefill_rate) {
        world->prefill_a = 1 / (double)r->prefill_rate;
    } else if (!rc &&
               plan_data_prefill(data, model->first_name, &world->prefill_a, &world->prefill_b)) {
        world->prefill_a = PREFILL_ASSUMED;
        world->prefill_b = 0;
    }
    json_decref(data);
    if (!rc && plan_token_bytes(model, KVT_TILE_TOKENS, &bytes)) {
        snprintf(error, len, "model %.60s has no record", model->name);
        rc = -1;
    }
    world->block_bytes =
        rc ? 0 : (bytes.full[KVT_LEVEL_KV4] + bytes.window[KVT_LEVEL_KV4]) * r->trace.block_tokens;
    return rc;
}

static int take_numbers(struct replay *r, char *error, size_t len)
{
    struct replay_base *base = &r->base;
    int rc = take_decimal("priors", r->priors_text, 1000, &base->planner.priors, error, len);

    if (!rc)
        rc = take_decimal("engine-hour", r->engine_hour_text, 1e6, &base->prices.engine_hour, error,
                          len);
    if (!rc)
        rc = take_decimal("years", r->years_text, 100, &base->prices.years, error, len);
    if (!rc && r->budget_text)
        rc = take_decimal("budget", r->budget_text, 1e6, &r->budget, error, len);
    if (!rc)
        rc = take_decimal("share", r->share_text, 100, &r->share, error, len);
    r->share /= 100;
    if (!rc)
        rc = take_sizes("dram", r->dram_text, "unlimited", REPLAY_UNLIMITED, r->dram,
                        &r->dram_count, error, len);
    if (!rc)
        rc = take_sizes("disk", r->disk_text, "none", 0, r->disk, &r->disk_count, error, len);
    if (!rc)
        rc = take_admission(r, error, len);
    return rc ? rc : take_write(r, error, len);
}

/* 0, or a sentence in error. */
static int gather(struct replay *r, struct plan_model *model, char *error, size_t len)
{
    struct replay_world *world = &r->base.world;
    int rc = r->generate ? replay_trace_make(&r->trace, (uint64_t)r->seed, (size_t)r->generate)
                         : replay_trace_read(&r->trace, r->trace_path, error, len);

    if (!rc && r->whole_blocks && replay_trace_whole_blocks(&r->trace)) {
        snprintf(error, len, "no memory");
        rc = -1;
    }

    if (!rc)
        rc = take_data(r, model, error, len);
    if (rc)
        return rc;
    world->latency_s[KVT_TIER_DRAM] = DRAM_LATENCY_S;
    world->latency_s[KVT_TIER_DISK] = DISK_LATENCY_S;
    world->rate[KVT_TIER_DRAM] = (double)r->dram_rate;
    world->rate[KVT_TIER_DISK] = (double)r->disk_rate;
    world->jitter = (double)r->jitter / 100;
    world->seed = GENERATE_SEED;
    world->engines =
        r->engines ? (uint32_t)r->engines : replay_engines(&r->trace, world, ENGINES_BUSY);
    r->base.planner.lambda = 1;
    r->base.planner.cut = r->both_ends ? KVT_PLAN_CUT_OVERLAP : KVT_PLAN_CUT_NONE;
    r->base.trace = &r->trace;
    if (r->sweep)
        sweep_sizes(r);
    return 0;
}

/* Why there is no row. Who interrupted knows it. */
static void say_failed(const struct replay *r, int rc)
{
    const double block = r->base.world.block_bytes;

    if (kvt_cli_interrupted())
        return;
    if (r->too_small && !strcmp(r->too_small, "--dram"))
        kvt_cli_error(COMMAND, "--dram: too small: a block takes %.1f MB", block * 1e-6);
    else if (rc == KVT_E_TOO_SMALL || rc == KVT_E_CONFIG_VALUE)
        kvt_cli_error(COMMAND, "--disk: too small: give it %.1fGB at least (%u blocks of %.1f MB)",
                      DISK_BLOCKS_MIN * block * 1e-9 + 0.05, DISK_BLOCKS_MIN, block * 1e-6);
    else
        kvt_cli_error(COMMAND, "%s", rc == -1 ? "no memory" : kvt_strerror(rc));
}

static int replay(struct replay *r)
{
    char error[512] = "no memory";
    struct plan_model model;
    int code = KVT_EXIT_PROBLEM;

    if (gather(r, &model, error, sizeof(error))) {
        if (!kvt_cli_interrupted())
            kvt_cli_error(COMMAND, "%s", error);
    } else {
        int rc = r->curve ? run_curve(r) : run_lists(r);
        struct replay_report report = {.base = &r->base,
                                       .model = model.name,
                                       .cases = r->cases,
                                       .results = r->results,
                                       .count = r->count,
                                       .table = r->count > 1};
        if (rc)
            say_failed(r, rc);
        else if (r->json)
            code = replay_report_json(&report);
        else {
            replay_report_text(&report);
            code = KVT_EXIT_OK;
        }
    }
    replay_trace_free(&r->trace);
    return code;
}

/* What cannot be together; 0: nothing. */
static int check_together(struct replay *r)
{
    const char *wrong = NULL;

    if (!r->trace_path == !r->generate)
        wrong = "give either --trace FILE or --generate N";
    else if (r->sweep && r->curve)
        wrong = "give either --sweep or --curve";
    else if (r->curve && (r->disk_count != 1 || r->dram_count != 1 || r->disk[0] == 0))
        wrong = "--curve takes one --dram SIZE and one --disk SIZE";
    else if (!r->curve && !r->sweep &&
             r->dram_count * r->disk_count * r->admission_count > CASES_MAX)
        wrong = "more than 512 combinations of sizes";
    if (wrong)
        kvt_cli_error(COMMAND, "%s", wrong);
    return wrong ? KVT_EXIT_USAGE : 0;
}

static struct replay given; /* as the command line has it */

static const struct kvt_cli_option options[] = {
    {.name = "trace",
     .metavar = "FILE",
     .help = "lines of JSON: timestamp, input_length, hash_ids",
     .text = &given.trace_path},
    {.name = "generate",
     .metavar = "N",
     .help = "instead: a made trace of N requests",
     .number = &given.generate,
     .min = 1,
     .max = 1000000},
    {.name = "seed",
     .metavar = "N",
     .help = "of the made trace",
     .number = &given.seed,
     .min = 0,
     .max = INT64_MAX},
    {.name = "whole-blocks",
     .help = "a prompt's last block counts only if its tokens fill it, as a live cache stores them",
     .flag = &given.whole_blocks},
    {.name = "dram",
     .metavar = "SIZES",
     .help = "DRAM for blocks, or unlimited; several: 50GB,200GB (unlimited)",
     .text = &given.dram_text},
    {.name = "disk",
     .metavar = "SIZES",
     .help = "disk for blocks, or none; several: none,2TB,8TB (none)",
     .text = &given.disk_text},
    {.name = "sweep", .help = "sizes of 1 to 100 % of the trace's blocks", .flag = &given.sweep},
    {.name = "curve",
     .help = "hits against bytes written, for every admission policy",
     .flag = &given.curve},
    {.name = "admission",
     .metavar = "WORDS",
     .help =
         "what goes to disk: all, continued, second_use, value, random; several with commas (all)",
     .text = &given.admission_text},
    {.name = "write",
     .metavar = "WORD",
     .help = "when it goes there: through, evict, idle, auto, as the option (auto)",
     .text = &given.write_text},
    {.name = "budget",
     .metavar = "N",
     .help = "drive writes a day that may be written, 0.5 for one",
     .text = &given.budget_text},
    {.name = "share",
     .metavar = "N",
     .help = "per cent of the blocks that random takes (50)",
     .text = &given.share_text},
    {.name = "model",
     .metavar = "NAME",
     .help = "whose blocks (llama-3-70b), at kv4",
     .text = &given.model_name},
    {.name = "prefill",
     .metavar = "N",
     .help = "tokens a second that an engine computes (the data's, else 10000)",
     .number = &given.prefill_rate,
     .min = 1,
     .max = 1000000000},
    {.name = "engines",
     .metavar = "N",
     .help = "engines that take requests (as many as are 80 % busy without a cache)",
     .number = &given.engines,
     .min = 1,
     .max = 4096},
    {.name = "both-ends",
     .help = "engines compute the beginning of a prompt while its end is loaded",
     .flag = &given.both_ends},
    {.name = "dram-rate",
     .metavar = "SIZE",
     .help = "bytes a second from DRAM to each engine (25GB)",
     .size = &given.dram_rate,
     .min = 1000000,
     .max = INT64_MAX},
    {.name = "disk-rate",
     .metavar = "SIZE",
     .help = "bytes a second from disk, for all of them (6.8GB)",
     .size = &given.disk_rate,
     .min = 1000000,
     .max = INT64_MAX},
    {.name = "priors",
     .metavar = "N",
     .help = "the plan begins with tiers N times too fast and computing N times too slow; "
             "below 1: the other way (4)",
     .text = &given.priors_text},
    {.name = "jitter",
     .metavar = "N",
     .help = "per cent that times vary by, either way (20)",
     .number = &given.jitter,
     .min = 0,
     .max = 90},
    {.name = "engine-hour",
     .metavar = "N",
     .help = "dollars that an engine costs an hour (5)",
     .text = &given.engine_hour_text},
    {.name = "years",
     .metavar = "N",
     .help = "years over which DRAM and disk are written off (3)",
     .text = &given.years_text},
    {.name = "data",
     .metavar = "FILE",
     .help = "more models, rates and prices, as for 'kvtier plan'",
     .text = &given.data_path},
    {.name = "json", .help = "one JSON object", .flag = &given.json},
};

int kvt_cmd_replay(int argc, char **argv)
{
    struct replay *r = &given;

    given = (struct replay){.dram_text = "unlimited",
                            .disk_text = "none",
                            .admission_text = "all",
                            .write_text = "auto",
                            .model_name = "llama-3-70b",
                            .priors_text = "4",
                            .engine_hour_text = "5",
                            .years_text = "3",
                            .share_text = "50",
                            .jitter = 20,
                            .seed = GENERATE_SEED,
                            .dram_rate = 25000000000,
                            .disk_rate = 6800000000};
    char error[512];
    int rc = kvt_cli_parse(COMMAND, "--trace FILE [--dram SIZES] [--disk SIZES] [options]", options,
                           KVT_ARRAY_LEN(options), NULL, 0, 0, NULL, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    if (take_numbers(r, error, sizeof(error))) {
        kvt_cli_error(COMMAND, "%s", error);
        return KVT_EXIT_USAGE;
    }
    rc = check_together(r);
    if (rc)
        return rc;
    kvt_cli_catch_interrupt();
    return replay(r);
}
