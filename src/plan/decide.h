/* Load, recompute, or both: the plan for one prompt, from the models and where its blocks are.
 *
 * A plan is a range of blocks to load; what is before and behind it is computed. Candidates: all,
 * nothing, the blocks up to where a slower tier begins, and, where the engine can, a cut: compute
 * [0, s), load [s, N). Costs grow faster and faster with the length computed, and in proportion
 * with the length loaded, so within a run of blocks the cost of a cut is convex and its best place
 * is found by bisection.
 *
 *   time to first token:  C(s) then L, or a bit more than the longer of both where they overlap,
 *                         then the rest
 *   objective:            time to first token + lambda x GPU seconds
 *
 * Ties are not loaded, and a cut must gain 2 %. A load comes from DRAM and from roots, each with a
 * model of its own: roots bring their bytes at the same time, DRAM before or after them. So a plan
 * never promises more than each was measured to do. Threads: the owner's of the models. Allocates:
 * never. Microseconds.
 */
#ifndef KVT_PLAN_DECIDE_H
#define KVT_PLAN_DECIDE_H

#include <stddef.h>

#include "kvtier/cache.h"
#include "plan/prefill.h"
#include "plan/tier_model.h"

#define KVT_PLAN_ROOTS 17u
/* Stands for the shared tier: to a plan it is one more root. */
#define KVT_PLAN_ROOT_REMOTE 16u
/* Where blocks can be: KVT_TIER_DRAM, or KVT_TIER_DISK + the number of the root. MISS has no model.
 */
#define KVT_PLAN_TIERS ((unsigned)KVT_TIER_DISK + KVT_PLAN_ROOTS)
#define KVT_PLAN_RUNS 4u /* blocks beyond are one run of mixed tiers */

/* Blocks of one tier (of one root), or, in the last of very many runs, a mixture. */
struct kvt_plan_run {
    uint32_t blocks;
    uint32_t by_tier[KVT_PLAN_TIERS];
};

struct kvt_decide {
    struct kvt_plan_run runs[KVT_PLAN_RUNS];
    uint32_t run_count;
    uint32_t block_tokens;
    uint64_t first_tokens;         /* the engine has them: before the first block */
    uint64_t prompt_tokens;        /* 0: the prompt ends with the last block */
    double block_bytes;            /* of a record */
    double queued[KVT_PLAN_TIERS]; /* bytes that the tier has to bring before */
    double lambda;                 /* seconds that a second of the GPU is worth, >= 0 */
    int cut;                       /* enum kvt_plan_cut */
};

/* NULL: the tier is not there. */
struct kvt_plan_models {
    const struct kvt_prefill *prefill;
    struct kvt_tier_model *tiers[KVT_PLAN_TIERS];
};

/* The leading blocks that a tier with a model has, as runs. roots: of each block on disk, the
 * number of its root; NULL: 0. */
void kvt_decide_runs(struct kvt_decide *query, const enum kvt_tier *tiers, const uint8_t *roots,
                     size_t n, const struct kvt_plan_models *models);
/* Fills everything of *out but struct_size. 0; KVT_E_INVAL, KVT_E_LIMIT a query that makes no
 * sense: *out then says to load nothing. */
int kvt_decide(const struct kvt_decide *query, const struct kvt_plan_models *models,
               struct kvt_plan *out) __attribute__((warn_unused_result));

#endif
