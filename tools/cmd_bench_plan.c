/* kvtier bench plan: does the plan pay, on a live llama.cpp and a drive of a known speed?
 *
 * Prompts of some lengths, a drive slowed down to rates around the one where loading takes as long
 * as computing: the time to the first token when everything is computed, when everything is loaded,
 * and when the plan decides (load, compute, or both from both ends). Regret is the plan's time over
 * the better of the other two, turn by turn. Where the plan computes everything and that is the
 * better of the two, both sides do the same work and what is above or below 1 is the machine's:
 * such a cell counts like the others, and is marked. Then the drive becomes 20 times slower, and
 * recovers: after how many loads do the plans know it? Threads: one. The measuring is in
 * bench_plan_run.c.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "bench_plan.h"
#include "cli.h"
#include "commands.h"
#include "kvtier/version.h"

#define COMMAND "bench plan"
#define REGRET_MAX 1.10

/* same_work: of cells where both sides did the same; else of the others. 0: there are none. */
static double worst_of(const struct bench_plan *b, bool same_work)
{
    double worst = 0;
    for (uint32_t r = 0; r < b->rate_count; r++)
        for (uint32_t i = 0; i < b->length_count; i++)
            if (b->cells[r][i].same_work == same_work)
                worst = KVT_MAX(worst, b->cells[r][i].regret);
    return worst;
}

static const char *reason_name(int reason)
{
    static const char *const names[] = {"none",   "load",  "recompute", "cut",
                                        "prefix", "probe", "off"};
    return reason >= 0 && reason < (int)KVT_ARRAY_LEN(names) ? names[reason] : "?";
}

static json_t *cell_json(const struct bench_plan *b, uint32_t r, uint32_t i)
{
    const struct bench_plan_cell *cell = &b->cells[r][i];
    json_t *out = json_pack(
        "{s:I, s:f, s:f, s:f, s:f, s:b, s:s, s:I, s:I, s:b}", "tokens", (json_int_t)b->lengths[i],
        "bytes_per_s", b->rates[r], "recompute_ms", cell->recompute_s * 1e3, "plan_ms",
        cell->plan_s * 1e3, "regret", cell->regret, "same_work", (int)cell->same_work, "reason",
        reason_name(cell->report.plan_reason), "loaded_tokens",
        (json_int_t)(cell->restored - (long)cell->report.tokens_computed), "computed_beside",
        (json_int_t)cell->report.tokens_computed, "late", cell->report.late);
    json_object_set_new(out, "expected_ms",
                        json_pack("{s:f, s:f, s:f}", "plan", cell->report.plan_ttft_s * 1e3,
                                  "recompute", cell->report.plan_recompute_s * 1e3, "load_all",
                                  cell->report.plan_load_all_s * 1e3));
    if (cell->load_all_s >= 0)
        json_object_set_new(out, "load_all_ms", json_real(cell->load_all_s * 1e3));
    return out;
}

static int print_json(const struct bench_plan *b)
{
    json_t *cells = json_array();
    for (uint32_t r = 0; r < b->rate_count; r++)
        for (uint32_t i = 0; i < b->length_count; i++)
            json_array_append_new(cells, cell_json(b, r, i));
    return kvt_cli_json(json_pack(
        "{s:s, s:I, s:I, s:f, s:f, s:o, s:f, s:f, s:f, s:{s:f, s:i, s:i}}", "build",
        kvt_build_info(), "threads", (json_int_t)b->threads, "reps", (json_int_t)b->reps,
        "bytes_per_token", b->token_bytes, "break_even_bytes_per_s", b->break_even_bytes_s, "cells",
        cells, "worst_regret", KVT_MAX(worst_of(b, false), worst_of(b, true)),
        "worst_regret_same_work", worst_of(b, true), "regret_max", REGRET_MAX, "collapse", "factor",
        20.0, "loads_down", b->loads_down, "loads_up", b->loads_up));
}

static void print_text(const struct bench_plan *b)
{
    char bytes[32];
    printf("%d threads, %.0f bytes a token (raw), loading takes as long as computing at %s/s; "
           "medians of %d\n\n",
           (int)b->threads, b->token_bytes, kvt_human_bytes((uint64_t)b->break_even_bytes_s, bytes),
           (int)b->reps);
    printf("%7s %12s %10s %10s %10s %7s  %s\n", "tokens", "drive", "compute", "load all", "plan",
           "regret", "what it did");
    for (uint32_t r = 0; r < b->rate_count; r++) {
        for (uint32_t i = 0; i < b->length_count; i++) {
            const struct bench_plan_cell *cell = &b->cells[r][i];
            char rate[48] = "as it is", load[32] = "(longer)";
            if (b->rates[r] > 0)
                snprintf(rate, sizeof(rate), "%s/s", kvt_human_bytes((uint64_t)b->rates[r], bytes));
            if (cell->load_all_s >= 0)
                snprintf(load, sizeof(load), "%.0f ms", cell->load_all_s * 1e3);
            printf("%7zu %12s %7.0f ms %10s %7.0f ms %7.3f  %s", b->lengths[i], rate,
                   cell->recompute_s * 1e3, load, cell->plan_s * 1e3, cell->regret,
                   reason_name(cell->report.plan_reason));
            if (cell->report.tokens_computed > 0)
                printf(", %zu tokens computed beside the load", cell->report.tokens_computed);
            printf("%s%s\n", cell->report.late ? ", late" : "",
                   cell->same_work ? " (as the better of the others)" : "");
        }
    }
    printf("\nworst regret %.3f where the plan does something else than the better of the others, "
           "%.3f where it does the same (goal: %.2f)\n",
           worst_of(b, false), worst_of(b, true), REGRET_MAX);
    printf("a drive that becomes 20 times slower is known after %d loads, its recovery after %d "
           "(-1: not within 20)\n",
           b->loads_down, b->loads_up);
}

int kvt_cmd_bench_plan(int argc, char **argv)
{
    static struct demo_paths paths;
    static struct bench_plan bench = {.dir = "/var/tmp", .tokens = 512, .threads = 1, .reps = 3};
    const struct kvt_cli_option options[] = {
        {"model", "FILE", "GGUF file (default: the downloaded SmolLM2)", .text = &bench.model},
        {"dir", "DIR", "where a directory is made for the store, and removed (default /var/tmp)",
         .text = &bench.dir},
        {"tokens", "N",
         "the longest prompt (512); also a quarter and a sixteenth of it, 64 at least",
         .number = &bench.tokens, .min = 64, .max = 1 << 17},
        {"threads", "N", "threads of llama.cpp (1: they spin, and loads need a processor)",
         .number = &bench.threads, .min = 1, .max = 512},
        {"reps", "N",
         "runs of each cell, in turn with computing and loading all, of which the median counts "
         "(3)",
         .number = &bench.reps, .min = 1, .max = BENCH_PLAN_REPS_MAX},
        {"json", NULL, "one JSON document", .flag = &bench.json},
    };
    int rc = kvt_cli_parse(COMMAND, "[options]", options, KVT_ARRAY_LEN(options), NULL, 0, 0, NULL,
                           argc, argv);
    if (rc != 0)
        return rc == 1 ? KVT_EXIT_OK : KVT_EXIT_USAGE;
    if (bench.model == NULL && demo_cache_paths(&paths) == 0)
        bench.model = paths.model;
    if (bench.model == NULL || access(bench.model, R_OK) != 0) {
        kvt_cli_error(COMMAND,
                      "there is no model at %s; scripts/fetch-model.sh downloads one, or "
                      "give one with --model",
                      bench.model != NULL ? bench.model : "(no HOME)");
        return KVT_EXIT_PROBLEM;
    }
    kvt_cli_catch_interrupt();
    rc = bench_plan_run(&bench);
    if (rc == 0)
        rc = bench.json ? print_json(&bench) : (print_text(&bench), KVT_EXIT_OK);
    else
        rc = KVT_EXIT_PROBLEM;
    bench_plan_close(&bench);
    return rc;
}
