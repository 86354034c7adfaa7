/* Shared by the files of `kvtier bench plan`. One thread beside those of the cache. */
#ifndef KVT_TOOLS_BENCH_PLAN_H
#define KVT_TOOLS_BENCH_PLAN_H

#include "demo.h"
#include "slow_io.h"

#define BENCH_PLAN_LENGTHS 3u
#define BENCH_PLAN_RATES 5u
#define BENCH_PLAN_REPS_MAX 31u
#define BENCH_PLAN_FINISH 2u /* tokens behind the whole blocks of a prompt */

struct bench_plan_cell { /* medians of runs in turn */
    double recompute_s;
    double load_all_s; /* negative: not measured, surely slower than computing */
    double plan_s;
    double regret;  /* medians over the turns: the larger of plan / computed, plan / loaded */
    bool same_work; /* the plan computes everything, and so does the better of the others */
    long restored;
    struct kvt_llama_report report; /* of the median */
};

struct bench_plan {
    const char *model, *dir;
    int64_t tokens, threads, reps;
    int json;
    struct demo_engine engine;
    struct kvt_slow_speed speed;
    struct kvt_cache *cache;
    struct kvt_llama *llama;
    char root[PATH_MAX];
    int32_t *prompts[BENCH_PLAN_LENGTHS];
    size_t lengths[BENCH_PLAN_LENGTHS]; /* tokens of each prompt, rising */
    uint32_t length_count;
    double rates[BENCH_PLAN_RATES]; /* bytes a second; 0: the drive as it is */
    uint32_t rate_count;
    double recompute_s[BENCH_PLAN_LENGTHS]; /* once, to choose rates by */
    double token_bytes;                     /* of a record */
    double break_even_bytes_s;              /* at the middle length */
    struct bench_plan_cell cells[BENCH_PLAN_RATES][BENCH_PLAN_LENGTHS];
    int loads_down,
        loads_up; /* until plans follow a drive that becomes 20 x slower, and back; -1 */
};

/* bench_plan_run.c: everything but the command line and the output. 0; -1 after the reason was
 * printed, or interrupted. Frees nothing. */
int bench_plan_run(struct bench_plan *bench);
void bench_plan_close(struct bench_plan *bench);

#endif
