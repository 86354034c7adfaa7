/* One set of sizes and an admission policy of `kvtier replay`: the trace through the store, through
 * the baseline, and through the queue, three ways; and whether that would have paid. Tools only. */
#ifndef KVT_TOOLS_REPLAY_CASE_H
#define KVT_TOOLS_REPLAY_CASE_H

#include "replay_sim.h"

#define REPLAY_UNLIMITED UINT64_MAX

struct replay_case {
    uint64_t dram_bytes; /* REPLAY_UNLIMITED: never short of room */
    uint64_t disk_bytes; /* 0: none */
    struct replay_admission admission;
};

struct replay_spread {
    double p50, p99, mean; /* ms */
};

struct replay_result {
    uint64_t hit_dram, hit_disk;   /* blocks */
    uint64_t hit_lru, hit_lru_sum; /* of lists of the same sizes; of one of their sum */
    uint64_t written;              /* blocks */
    double dwpd;                   /* times the disk's size that was written in a day */
    struct replay_spread ttft[REPLAY_WAYS];
    double engine_s[REPLAY_WAYS];
    uint64_t pending;                   /* blocks of hits that were still being computed */
    uint64_t late;                      /* loads that were cut off */
    uint64_t reasons[KVT_PLAN_OFF + 1]; /* plans, by enum kvt_plan_reason */
    double usd_saved, usd_cost;         /* a day */
};

/* Assumptions, all of them options or data of the user's. */
struct replay_prices {
    double engine_hour; /* what an engine costs an hour */
    double dram_gb, disk_gb;
    double years;                 /* over which DRAM and disk are written off */
    double disk_dwpd, disk_years; /* what the drive's maker promises */
};

struct replay_base {
    const struct replay_trace *trace;
    struct replay_world world;
    struct replay_planner planner;
    struct replay_prices prices;
};

/* What several cases of one base have in common, so that it is simulated once. Begins as zeroes. */
struct replay_common {
    int recompute, lru; /* 1: known */
    struct replay_spread ttft;
    double engine_s;
    uint64_t dram_bytes, disk_bytes; /* of lru */
    uint64_t hit_lru, hit_lru_sum;
};

/* 0; -1 no memory; what replay_store_open() and replay_sim() return. */
int replay_case_run(const struct replay_base *base, const struct replay_case *of,
                    struct replay_common *common, struct replay_result *out);

/* Blocks that fit: records of `block_bytes`. */
uint64_t replay_case_blocks(const struct replay_base *base, uint64_t bytes);
/* Seconds between the first and the last arrival. */
double replay_span_s(const struct replay_trace *trace);
/* Days between the first and the last arrival; at least a second. */
double replay_days(const struct replay_trace *trace);
/* The engines had more to compute than there was time for between the first arrival and the last:
 * who comes later waits longer. Never so for traces shorter than a minute. */
int replay_overloaded(const struct replay_base *base, const struct replay_result *result);
/* First tokens come sooner on average, and what is saved is worth more than what it costs. */
int replay_pays(const struct replay_result *result);
/* The case that leaves the most money among those that are not slower; count: none pays. */
size_t replay_best(const struct replay_result *results, size_t count);

#endif
