/* What the two halves of `kvtier bench sessions` share: how it runs, and what it has seen. Tools
 * only. Threads: one, but for the touching of memory (cmd_bench_sessions.c). */
#ifndef KVT_TOOLS_BENCH_SESSIONS_H
#define KVT_TOOLS_BENCH_SESSIONS_H

#include <jansson.h>

#include "gpu_bench.h"
#include "kvtier/session.h"

#define BENCH_SESSIONS_MAX 1024
#define BENCH_TURNS_MAX 8192

/* Where a turn's tokens came from: mixed: some from disk, and more from DRAM. */
enum bench_source { FROM_L0, FROM_DRAM, FROM_BOTH, FROM_DISK, FROM_NOWHERE, BENCH_SOURCES };

struct bench_talks {
    struct gpu_bench gpu;
    /* how */
    int64_t sessions, tokens, turns, prompt, layers, us_linear, ps_square, percent;
    int64_t gap_ms, seconds; /* after a turn, at most; of the whole run, 0: no limit */
    uint64_t pool_bytes, dram, disk;
    const char *dir, *write;
    double start, deadline; /* of gpu_bench_now(); 0: none */
    /* what */
    struct kvt_cache *cache;
    struct kvt_ns *ns;
    struct kvt_pool *pool;
    struct kvt_session_mgr *mgr;
    kvt_session_id ids[BENCH_SESSIONS_MAX];
    uint32_t lengths[BENCH_SESSIONS_MAX];
    uint32_t *text;
    double ttft[BENCH_SOURCES][BENCH_TURNS_MAX], load[BENCH_SOURCES][BENCH_TURNS_MAX];
    double cold[BENCH_SOURCES][BENCH_TURNS_MAX];
    uint64_t from_dram[BENCH_SOURCES], from_disk[BENCH_SOURCES], recomputed[BENCH_SOURCES];
    size_t counts[BENCH_SOURCES]; /* turns; the arrays above are in tokens */
    size_t noted, fit, slower;
    int64_t filled; /* sessions */
    uint64_t pool_used_before, pool_used_after;
    double touch_seconds, pin_seconds, fill_seconds, turn_seconds;
};

/* Seconds that the model takes to compute n tokens from the start on. */
double bench_sessions_computing(const struct bench_talks *t, double n);

/* bench_sessions_report.c: also of a run that was cut short ("complete": false). */
json_t *bench_sessions_results(struct bench_talks *t);
void bench_sessions_print(const json_t *all);

#endif
