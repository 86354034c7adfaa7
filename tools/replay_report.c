/* Tables and JSON of replay_report.h. Threads: one. Computes nothing but ratios.
 */
#include "replay_report.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "cli.h"

static const char *const way_names[REPLAY_WAYS] = {"kvtier", "recompute", "always_load"};

const char *replay_admission_name(int policy)
{
    static const char *const names[] = {[KVT_ADMIT_ALL] = "all",
                                        [KVT_ADMIT_SECOND] = "second_use",
                                        [KVT_ADMIT_VALUE] = "value",
                                        [KVT_ADMIT_CONTINUED] = "continued",
                                        [KVT_ADMIT_RANDOM] = "random"};

    return policy >= 0 && (size_t)policy < KVT_ARRAY_LEN(names) ? names[policy] : "?";
}

static double ratio(const struct replay_report *report, uint64_t blocks)
{
    uint64_t all = report->base->trace->blocks;

    return all ? (double)blocks / (double)all : 0;
}

static double saved_s(const struct replay_result *result)
{
    return result->engine_s[REPLAY_RECOMPUTE] - result->engine_s[REPLAY_KVTIER];
}

static const char *size_text(uint64_t bytes, char *buffer, size_t len)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
    double value = (double)bytes;
    size_t unit = 0;

    if (bytes == REPLAY_UNLIMITED || bytes == 0) {
        (void)snprintf(buffer, len, "%s", bytes ? "unlimited" : "none");
        return buffer;
    }
    while (value >= 1000 && unit + 1 < KVT_ARRAY_LEN(units)) {
        value /= 1000;
        unit++;
    }
    (void)snprintf(buffer, len, "%.3g %s", value, units[unit]);
    return buffer;
}

/* ---- the answer ------------------------------------------------------------------------------ */

/* What stands before the answer: it is of engines that do not keep up, or of times that were not
 * the trace's. */
static void reserve_text(const struct replay_report *report, const struct replay_result *result,
                         char *text, size_t len)
{
    const struct replay_base *base = report->base;
    size_t used = 0;

    text[0] = '\0';
    if (replay_overloaded(base, result))
        used = (size_t)snprintf(text, len,
                                "The engines fall behind: each has %.0f s to compute of prompts "
                                "that come within %.0f s, and who comes later waits longer; give "
                                "more --engines. ",
                                result->engine_s[REPLAY_KVTIER] / base->world.engines,
                                replay_span_s(base->trace));
    if (base->trace->reordered)
        (void)snprintf(text + used, len - used,
                       "Timestamps are out of order (see the note): first tokens and money say "
                       "little. ");
}

static void answer_text(const struct replay_report *report, char *text, size_t len)
{
    size_t best = replay_best(report->results, report->count);
    size_t show = best < report->count ? best : 0;
    const struct replay_result *result = &report->results[show];
    const struct replay_case *of = &report->cases[show];
    const struct replay_spread *with = &result->ttft[REPLAY_KVTIER];
    const struct replay_spread *without = &result->ttft[REPLAY_RECOMPUTE];
    char dram[32], disk[32], numbers[256], reserve[320];

    reserve_text(report, result, reserve, sizeof(reserve));
    (void)snprintf(numbers, sizeof(numbers),
                   "first token after %.0f ms on average instead of %.0f, %.0f %% of the engines' "
                   "time saved: $%.2f a day, against $%.2f of hardware",
                   with->mean, without->mean,
                   result->engine_s[REPLAY_RECOMPUTE] > 0
                       ? 100 * saved_s(result) / result->engine_s[REPLAY_RECOMPUTE]
                       : 0,
                   result->usd_saved, result->usd_cost);
    if (best < report->count)
        (void)snprintf(text, len, "%sIt would have paid%s %s of DRAM and %s of disk%s%s: %s.",
                       reserve, report->count > 1 ? ", most of all with" : ":",
                       size_text(of->dram_bytes, dram, sizeof(dram)),
                       size_text(of->disk_bytes, disk, sizeof(disk)),
                       of->disk_bytes ? ", admission " : "",
                       of->disk_bytes ? replay_admission_name(of->admission.policy) : "", numbers);
    else
        (void)snprintf(text, len, "%sIt would not have paid%s: %s%s.", reserve,
                       report->count > 1 ? " with any of these sizes" : "", numbers,
                       report->count > 1 ? " (first row)" : "");
}

static json_t *answer_json(const struct replay_report *report)
{
    size_t best = replay_best(report->results, report->count);
    int pays = best < report->count;
    char text[960];

    answer_text(report, text, sizeof(text));
    return json_pack("{s:b, s:o, s:b, s:s}", "pays", pays, "row",
                     pays ? json_integer((json_int_t)best) : json_null(), "overloaded",
                     replay_overloaded(report->base, &report->results[pays ? best : 0]), "text",
                     text);
}

/* What the plans of one case said. */
static json_t *plans_json(const struct replay_result *result)
{
    static const char *const names[] = {
        [KVT_PLAN_NO_BLOCKS] = "no_blocks", [KVT_PLAN_LOAD] = "load",
        [KVT_PLAN_RECOMPUTE] = "recompute", [KVT_PLAN_CUT] = "cut",
        [KVT_PLAN_PREFIX] = "prefix",       [KVT_PLAN_PROBE] = "probe"};
    json_t *plans = json_object();

    for (size_t i = 0; i < KVT_ARRAY_LEN(names); i++)
        json_object_set_new(plans, names[i], json_integer((json_int_t)result->reasons[i]));
    json_object_set_new(plans, "late", json_integer((json_int_t)result->late));
    return plans;
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static json_t *size_json(uint64_t bytes)
{
    return bytes == REPLAY_UNLIMITED ? json_string("unlimited") : json_integer((json_int_t)bytes);
}

static json_t *row_json(const struct replay_report *report, size_t i)
{
    const struct replay_result *result = &report->results[i];
    const struct replay_case *of = &report->cases[i];
    json_t *ttft = json_object(), *engine = json_object();

    for (size_t way = 0; way < REPLAY_WAYS; way++) {
        const struct replay_spread *ms = &result->ttft[way];
        json_object_set_new(
            ttft, way_names[way],
            json_pack("{s:f, s:f, s:f}", "p50", ms->p50, "p99", ms->p99, "mean", ms->mean));
        json_object_set_new(engine, way_names[way], json_real(result->engine_s[way]));
    }
    return json_pack(
        "{s:o, s:o, s:s, s:f, s:I, s:{s:f, s:f, s:f, s:f, s:f}, s:f, s:o, s:o, s:f, s:o, s:f, s:f, "
        "s:f, "
        "s:f}",
        "dram_bytes", size_json(of->dram_bytes), "disk_bytes", size_json(of->disk_bytes),
        "admission", replay_admission_name(of->admission.policy), "admission_share",
        of->admission.share, "budget_blocks_per_day", (json_int_t)of->admission.blocks_per_day,
        "hit_ratio", "dram", ratio(report, result->hit_dram), "disk",
        ratio(report, result->hit_disk), "total",
        ratio(report, result->hit_dram + result->hit_disk), "lru", ratio(report, result->hit_lru),
        "lru_sum", ratio(report, result->hit_lru_sum), "still_computed",
        ratio(report, result->pending), "plans", plans_json(result), "ttft_ms", ttft,
        "gpu_seconds_saved", saved_s(result), "gpu_seconds", engine, "bytes_written",
        (double)result->written * report->base->world.block_bytes, "dwpd", result->dwpd,
        "usd_a_day_saved", result->usd_saved, "usd_a_day_cost", result->usd_cost);
}

int replay_report_json(const struct replay_report *report)
{
    const struct replay_trace *trace = report->base->trace;
    json_t *document =
        json_pack("{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I}", "scaled",
                  "records of one page, caps scaled by the same factor", "model", report->model,
                  "requests", (json_int_t)trace->count, "blocks", (json_int_t)trace->blocks,
                  "block_tokens", (json_int_t)trace->block_tokens, "distinct_blocks",
                  (json_int_t)trace->distinct, "reordered", (json_int_t)trace->reordered, "engines",
                  (json_int_t)report->base->world.engines);

    if (!report->table) {
        json_t *row = row_json(report, 0);
        json_object_update(document, row);
        json_decref(row);
    } else {
        json_t *rows = json_array();
        for (size_t i = 0; i < report->count; i++)
            json_array_append_new(rows, row_json(report, i));
        json_object_set_new(document, "rows", rows);
    }
    json_object_set_new(document, "answer", answer_json(report));
    return kvt_cli_json(document);
}

/* ---- text ------------------------------------------------------------------------------------ */

static void print_head(const struct replay_report *report)
{
    const struct replay_trace *trace = report->base->trace;
    char bytes[32];

    printf("simulated: %s at kv4, %" PRIu32 " engines; times computed, records scaled to a page\n",
           report->model, report->base->world.engines);
    printf("%zu requests, %" PRIu64 " blocks of %" PRIu32 " tokens, %" PRIu64
           " different: %s together\n",
           trace->count, trace->blocks, trace->block_tokens, trace->distinct,
           size_text((uint64_t)((double)trace->distinct * report->base->world.block_bytes), bytes,
                     sizeof(bytes)));
    if (trace->reordered)
        printf("note: %" PRIu64 " requests have a timestamp before that of a line above them, and "
               "are taken to come\n      at that later moment, all at once. Sort the file by "
               "timestamp, or replay joined files one by one.\n",
               trace->reordered);
    if (trace->short_chains)
        printf("note: %" PRIu64 " requests have fewer hash_ids than their input_length has blocks: "
               "what is beyond is always computed\n",
               trace->short_chains);
}

static void print_one(const struct replay_report *report)
{
    const struct replay_result *result = &report->results[0];
    char bytes[32];

    printf("hits          %.1f %%: DRAM %.1f %%, disk %.1f %%; least recently used: %.1f %%, "
           "one list of both sizes: %.1f %%\n",
           100 * ratio(report, result->hit_dram + result->hit_disk),
           100 * ratio(report, result->hit_dram), 100 * ratio(report, result->hit_disk),
           100 * ratio(report, result->hit_lru), 100 * ratio(report, result->hit_lru_sum));
    if (result->pending)
        printf("              of these %.1f %% were still being computed when an engine was free: "
               "computed again\n",
               100 * ratio(report, result->pending));
    for (size_t i = 0; i < REPLAY_WAYS; i++)
        printf("%-12s  first token after %.0f ms (p50), %.0f ms (p99), %.0f ms (mean)\n",
               way_names[i], result->ttft[i].p50, result->ttft[i].p99, result->ttft[i].mean);
    printf("GPU           %.0f s of %.0f s saved\n", saved_s(result),
           result->engine_s[REPLAY_RECOMPUTE]);
    if (report->cases[0].disk_bytes)
        printf("written       %s, %.2f drive writes a day\n",
               size_text((uint64_t)((double)result->written * report->base->world.block_bytes),
                         bytes, sizeof(bytes)),
               result->dwpd);
}

/* The policy, with what tells its rows apart: a share, or bytes that it may write a day. */
static const char *admission_text(const struct replay_report *report, const struct replay_case *of,
                                  char *text, size_t len)
{
    const char *name = of->disk_bytes ? replay_admission_name(of->admission.policy) : "-";
    double budget = (double)of->admission.blocks_per_day * report->base->world.block_bytes;
    char bytes[32];

    if (of->admission.share > 0)
        (void)snprintf(text, len, "%s %.0f %%", name, 100 * of->admission.share);
    else if (budget > 0)
        (void)snprintf(text, len, "%s %s/day", name,
                       size_text((uint64_t)budget, bytes, sizeof(bytes)));
    else
        (void)snprintf(text, len, "%s", name);
    return text;
}

static void print_rows(const struct replay_report *report)
{
    printf("\n%9s  %9s  %-17s  %6s  %6s  %6s  %8s  %8s  %8s  %7s  %9s  %7s\n", "DRAM", "disk",
           "admission", "hits", "LRU", "sum", "mean ms", "p99 ms", "always", "saved", "written",
           "writes/d");
    for (size_t i = 0; i < report->count; i++) {
        const struct replay_result *result = &report->results[i];
        const struct replay_case *of = &report->cases[i];
        char dram[32], disk[32], bytes[32], admission[64];
        printf("%9s  %9s  %-17s  %4.1f %%  %4.1f %%  %4.1f %%  %8.0f  %8.0f  %8.0f  %5.1f %%  %9s"
               "  %7.2f\n",
               size_text(of->dram_bytes, dram, sizeof(dram)),
               size_text(of->disk_bytes, disk, sizeof(disk)),
               admission_text(report, of, admission, sizeof(admission)),
               100 * ratio(report, result->hit_dram + result->hit_disk),
               100 * ratio(report, result->hit_lru), 100 * ratio(report, result->hit_lru_sum),
               result->ttft[REPLAY_KVTIER].mean, result->ttft[REPLAY_KVTIER].p99,
               result->ttft[REPLAY_ALWAYS_LOAD].mean,
               result->engine_s[REPLAY_RECOMPUTE] > 0
                   ? 100 * saved_s(result) / result->engine_s[REPLAY_RECOMPUTE]
                   : 0,
               size_text((uint64_t)((double)result->written * report->base->world.block_bytes),
                         bytes, sizeof(bytes)),
               result->dwpd);
    }
    printf("without a cache: %.0f ms (mean), %.0f ms (p99)\n"
           "LRU: hits of two lists, least recently used, of DRAM's and the disk's size, which both "
           "take every block:\nthose of one list of the larger size; sum: hits of one list as "
           "large as DRAM and disk together;\nalways: mean ms when everything that is there is "
           "loaded\n",
           report->results[0].ttft[REPLAY_RECOMPUTE].mean,
           report->results[0].ttft[REPLAY_RECOMPUTE].p99);
}

void replay_report_text(const struct replay_report *report)
{
    char text[960];

    print_head(report);
    if (report->table)
        print_rows(report);
    else
        print_one(report);
    answer_text(report, text, sizeof(text));
    printf("%s\nPrices are assumptions: --engine-hour, --years, and those of DRAM and disk in the "
           "data of 'kvtier plan'.\n",
           text);
}
