/* A queue of requests before engines with a cache behind them: when does each first token come?
 *
 * Requests arrive at the times of the trace. Each is planned when it arrives: what it loads stands
 * in the queue of a tier (one drive, a link to DRAM for each engine), and once that is there the
 * first engine that is free computes the rest. A load has the plan's deadline: what has come by
 * then is used, and the drive turns to the next one. Where engines can, they compute the beginning
 * while the end is loaded. Blocks that another request is still computing are not there yet: who
 * needs them is planned when an engine is free for it, with what is there by then. The
 * world's rates are hidden from the plan: its models begin with wrong start values and learn from
 * what loads and prefills took, as those of the library do. Tools only. Threads: one.
 */
#ifndef KVT_TOOLS_REPLAY_SIM_H
#define KVT_TOOLS_REPLAY_SIM_H

#include "plan/decide.h"
#include "replay_store.h"
#include "replay_trace.h"

enum replay_way { REPLAY_KVTIER, REPLAY_RECOMPUTE, REPLAY_ALWAYS_LOAD, REPLAY_WAYS };

struct replay_world {
    double prefill_a, prefill_b;                            /* seconds of n tokens: a n + b n^2 */
    double latency_s[KVT_PLAN_TIERS], rate[KVT_PLAN_TIERS]; /* rate: bytes a second */
    double jitter;                                          /* 0.2: times vary by 20 % either way */
    double block_bytes;
    uint32_t engines; /* each computes one prompt at a time */
    uint64_t seed;
    /* Between these seconds the drive is slower by that factor; slow 0: never. */
    double slow_from_s, slow_to_s, slow;
};

struct replay_planner {
    double priors; /* start values: tiers so many times too fast, computing as much too slow */
    double lambda; /* seconds of waiting that a second of a busy engine is worth */
    int cut;       /* enum kvt_plan_cut: NONE, or OVERLAP: engines compute beside the load */
};

struct replay_outcome {
    double *ttft_s;       /* of each request; owned */
    double engine_s;      /* computed, all engines together */
    uint64_t loaded_dram; /* blocks */
    uint64_t loaded_disk;
    uint64_t pending; /* blocks that the store would have had, and that were still being computed */
    uint64_t late;    /* loads that were cut off */
    uint64_t reasons[KVT_PLAN_OFF + 1]; /* plans, by enum kvt_plan_reason */
    /* For tests: of each request, blocks loaded from disk, and those that were to be; owned. */
    uint32_t *from_disk, *asked_disk;
};

/* hits: of each request of the trace. 0; -1 no memory; KVT_E_INVAL a world that makes no
 * sense; KVT_E_CANCELED interrupted. */
int replay_sim(const struct replay_trace *trace, const struct replay_hits *hits,
               enum replay_way way, const struct replay_world *world,
               const struct replay_planner *planner, struct replay_outcome *out);
void replay_outcome_free(struct replay_outcome *outcome);

/* Engines that keep the share of `busy` for computing everything: at least 1. */
uint32_t replay_engines(const struct replay_trace *trace, const struct replay_world *world,
                        double busy);

#endif
