/* Shared by the files of the llama.cpp adapter; nothing here is exported.
 * One struct kvt_llama has one owner at a time; no locks. */
#ifndef KVT_ADAPTERS_LLAMA_INTERNAL_H
#define KVT_ADAPTERS_LLAMA_INTERNAL_H

#include <kvtier/kvtier.h>
#include <kvtier/llama.h>
#include <llama.h>

#include "llama_blob.h"
#include "llama_origin.h"

#define KVT_LLAMA_ERROR_BYTES 512
#define KVT_LLAMA_SAVES_MAX 4 /* copies of states being encoded at one time */
#define KVT_LLAMA_RUNS_MAX 16 /* kvt_store() requests of one save */

/* X(field, "dotted.name", "help"): what kvt_llama_stats_each() lists. */
#define KVT_LLAMA_COUNTERS(X)                                                                    \
    X(restores, "llama.restores", "calls of kvt_llama_restore")                                  \
    X(restored_tokens, "llama.restored_tokens", "tokens put into contexts")                      \
    X(restore_short_prompt, "llama.restore_short_prompt", "prompts too short for one block")     \
    X(restore_none, "llama.restore_none", "prompts of which nothing was stored")                 \
    X(restore_cut_room, "llama.restore_cut_room", "restores cut to the context's size")          \
    X(restore_cut_load, "llama.restore_cut_load", "restores cut because a block did not load")   \
    X(restore_refused, "llama.restore_refused", "states that llama.cpp refused")                 \
    X(restore_bad_range, "llama.restore_bad_range", "states that came out with other positions") \
    X(restore_recompute, "llama.restore_recompute",                                              \
      "restores that computing was to be faster than")                                           \
    X(restore_late, "llama.restore_late", "loads that fell behind their plan and were cut off")  \
    X(hybrids, "llama.hybrids", "restores that computed the beginning while the end was loaded") \
    X(hybrid_computed, "llama.hybrid_computed", "tokens that these computed")                    \
    X(hybrid_failed, "llama.hybrid_failed", "of them, restores that llama.cpp did not decode")   \
    X(prefetched_blocks, "llama.prefetched_blocks", "blocks asked for before their restore")     \
    X(saves, "llama.saves", "calls of kvt_llama_save")                                           \
    X(saved_blocks, "llama.saved_blocks", "blocks handed to the store")                          \
    X(save_present, "llama.save_present", "blocks found stored already")                         \
    X(save_again, "llama.save_again", "blocks of lossy origin stored again, at kv8")             \
    X(save_failed_blocks, "llama.save_failed_blocks", "blocks that the store did not take")      \
    X(save_busy, "llama.save_busy", "blocks dropped: too many saves in flight or queue full")    \
    X(save_refused, "llama.save_refused", "states that were not what was asked for")             \
    X(origin_forgotten, "llama.origin_forgotten", "keys whose lossy origin was forgotten")

struct kvt_llama_counters {
#define KVT_X(field, name, help) uint64_t field;
    KVT_LLAMA_COUNTERS(KVT_X)
#undef KVT_X
};

/* Host memory for one state blob. */
struct kvt_staging {
    uint8_t *bytes;
    size_t capacity;
};

/* One kvt_llama_save() whose blocks are being encoded: owns the rows until its requests end. */
struct kvt_llama_saving {
    struct kvt_staging rows;
    struct kvt_pool *pool;
    struct kvt_req *reqs[KVT_LLAMA_RUNS_MAX];
    size_t req_count; /* 0: the slot is free */
};

struct kvt_llama {
    struct kvt_cache *cache;   /* borrowed */
    struct llama_context *ctx; /* borrowed */
    struct kvt_ns *ns;
    struct kvt_blob_shape shape;
    struct kvt_part *parts; /* K and V of every layer, alternating: the order in a record */
    uint32_t block_tokens;
    uint32_t window_tokens;
    int level, window_level, min_level;
    int32_t staging_seq;
    int cut; /* enum kvt_plan_cut */
    uint8_t root[32];

    struct kvt_key *keys; /* scratch: keys, page ids, cell order */
    uint32_t *ids;
    uint32_t *order;
    enum kvt_tier *tiers;
    uint8_t *roots;
    size_t scratch_blocks;
    struct kvt_staging load;
    struct kvt_llama_saving saving[KVT_LLAMA_SAVES_MAX];
    int save_error; /* first failure since the last sync */

    struct kvt_origin origin;
    struct kvt_llama_counters counters;
    char error[KVT_LLAMA_ERROR_BYTES];
};

/* llama_identity.c */
/* Refuse what the adapter cannot serve, by what the model and the parameters say. */
__attribute__((warn_unused_result)) int kvt_llama_check_model(const struct llama_context *ctx,
                                                              const struct kvt_llama_opts *opts,
                                                              char *error, size_t error_len);
/* Fill llama->parts from the shape and the model's head size. */
__attribute__((warn_unused_result)) int kvt_llama_make_parts(struct kvt_llama *llama, char *error,
                                                             size_t error_len);
/* Open the namespace. */
__attribute__((warn_unused_result)) int kvt_llama_open_ns(struct kvt_llama *llama,
                                                          const struct kvt_llama_opts *opts,
                                                          char *error, size_t error_len);

/* llama_adapter.c */
void kvt_llama_fail(struct kvt_llama *llama, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Scratch for that many blocks of keys, ids and cell order. 0 or -ENOMEM. */
__attribute__((warn_unused_result)) int kvt_llama_scratch(struct kvt_llama *llama, size_t blocks);
__attribute__((warn_unused_result)) int kvt_staging_reserve(struct kvt_staging *staging,
                                                            size_t bytes);
void kvt_staging_free(struct kvt_staging *staging);
/* Where the rows of a blob of `cells` cells in position order lie, part by part. */
void kvt_llama_places(const struct kvt_llama *llama, uint8_t *blob, uint32_t cells,
                      struct kvt_part_place *places);
/* A pool over the rows of a blob of `cells` cells in position order: page i is the i-th block. */
__attribute__((warn_unused_result)) int kvt_llama_pool(struct kvt_llama *llama, uint8_t *blob,
                                                       uint32_t cells, struct kvt_pool **out);

/* llama_compute.c */
int64_t kvt_llama_now_ns(void);
/* Compute tokens[first..n) of a sequence in batches of n_batch, and tell the plan what each took.
 * logits: of the last one. 0; KVT_E_ENGINE; -ENOMEM. */
__attribute__((warn_unused_result)) int kvt_llama_decode(struct kvt_llama *llama, int32_t seq,
                                                         const int32_t *tokens, size_t first,
                                                         size_t n, int logits);

/* llama_hybrid.c */
/* Compute blocks from the front on while blocks [plan->first, plan->first + plan->count) arrive
 * from the back, until they meet; the load staging then holds the rows of all. Returns how many
 * blocks from the first on it holds (0: nothing that is of use), *loaded_from: of them, the first
 * that was not computed here. Whatever the sequence held is removed. Or a negative error. */
long kvt_llama_hybrid(struct kvt_llama *llama, int32_t seq, const int32_t *tokens,
                      const struct kvt_plan *plan, struct kvt_llama_report *report,
                      size_t *loaded_from);

/* llama_save.c */
/* Copy positions [first, first + cells) of a sequence out of the context, in position order, into
 * rows. 0; KVT_E_ENGINE (counted); -ENOMEM. */
__attribute__((warn_unused_result)) int kvt_llama_copy_rows(struct kvt_llama *llama, int32_t seq,
                                                            uint32_t first, uint32_t cells,
                                                            struct kvt_staging *rows);
/* Free what has ended; wait != 0: wait for all of it. */
void kvt_llama_reap(struct kvt_llama *llama, int wait);

#endif
