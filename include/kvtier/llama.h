/* llama.cpp adapter (library libkvtier-llama): prompts of a llama_context are remembered.
 *
 * Purpose:  given an unpatched llama_context and a token list, restore the longest stored prefix by
 *           sequence-state calls, and store new full blocks afterwards.
 * Threads:  one thread at a time per kvt_llama, the one that uses the context.
 * Errors:   error.h; kvt_llama_error() has the sentence. Doubt about a state is a miss, counted
 *           (kvt_llama_stats_each()). Lifetime: the context and the cache outlive the adapter.
 * Supported: decoder-only attention models with a unified KV cache of F16, BF16 or F32 (one
 *           sequence, or kv_unified = true), flash attention on, one position per token, no sliding
 *           window, no recurrent state, no latent (MLA) rows. Anything else is refused with the
 *           reason.
 * Sharing:  any number of adapters, each with its own context and thread, may use one kvt_cache:
 *           what one saves another restores, when their contexts would compute the same bytes.
 * The caller's side of the bargain: the tokens are what the sequence holds; after the adapter was
 *           attached, LoRA adapters, control vectors and causal attention are not changed; text
 *           only, no embeddings as input.
 * Linking:  libkvtier-llama leaves the symbols of llama.cpp undefined, so that it works on the
 *           program's own copy; docs/llama.md.
 */
#ifndef KVTIER_LLAMA_H
#define KVTIER_LLAMA_H

#include <kvtier/cache.h>

#ifdef __cplusplus
extern "C" {
#endif

struct llama_context;
struct llama_context_params;
struct kvt_llama;

struct kvt_llama_opts {
    size_t struct_size;
    /* The parameters the context was made from; required, borrowed during the call: they hold the
     * RoPE scaling and cache types, which a context does not tell. */
    const struct llama_context_params *context_params;
    const char *model_path; /* the (first) file of the model; its digest names it; required */
    const char *lora;       /* digest and scale of every LoRA adapter or control vector set on
                               the context, any canonical text; NULL without */
    const char *digest_dir; /* where digests of model files are remembered; NULL: nowhere, the
                               whole file is read by every kvt_llama_new() */
    const void *salt;       /* tenant salt, any bytes; optional */
    size_t salt_len;
    uint32_t block_tokens;  /* 16 by default; multiple of 16; part of the namespace. Larger blocks
                               cost less index and time a token, and leave more to compute */
    uint32_t window_tokens; /* most recent tokens of a saved prompt kept at kv8; default 4096 */
    int level;              /* enum kvt_level of blocks outside the window; DEFAULT: kv4 */
    int min_level;          /* enum kvt_level that a restored block must have; DEFAULT: any */
    int32_t staging_seq;    /* spare sequence id; < 0: n_seq_max - 1 */
    int cut;                /* enum kvt_plan_cut: OVERLAP (default): where that is faster, a restore
                               computes the beginning of the prompt itself, by llama_decode() in the
                               context, while the rest is loaded; NONE: it only loads */
    const char *engine_build; /* which build of llama.cpp computes, where it is not the one that the
                                 library was made for: any text, such as a digest of its libraries;
                                 enters the identity. NULL: the library's own */
};
void kvt_llama_opts_init(struct kvt_llama_opts *opts);

/* Check that a GGUF file is whole: magic, version, and every tensor within the file; cheap, no
 * tensor is read. 0; -errno; KVT_E_UNSUPPORTED or KVT_E_CORRUPT with the reason in error. */
int kvt_llama_check_file(const char *model_path, char *error, size_t error_len);

/* Attach to a context: decodes one token in the spare sequence to see what its state looks like
 * (the logits of the last decode are lost), and removes it again. The spare sequence must be empty
 * now and whenever the adapter is called; with n_seq_max = 1 sequence 0 is used, must be empty now,
 * and a save copies the whole sequence.
 * 0; KVT_E_UNSUPPORTED, KVT_E_ENGINE, KVT_E_INVAL with the reason in error; other codes of
 * kvt_ns_open(); -errno. Owned until kvt_llama_free(), which waits for saves. */
int kvt_llama_new(struct kvt_cache *cache, struct llama_context *ctx,
                  const struct kvt_llama_opts *opts, struct kvt_llama **out, char *error,
                  size_t error_len);
void kvt_llama_free(struct kvt_llama *llama); /* NULL is allowed */

/* Begin to bring the stored blocks of tokens[0..n), a prompt or the beginning of one, from disk
 * into DRAM. For the time before the restore: call it as tokens become known (while a prompt is
 * tokenised, or waits in a queue), as often as there are more: a block is read once. A hint: no
 * restore need follow, and a restore need not wait for it. All keys are made anew: 0.5 us a token.
 * Blocks: for two round trips to the store, not for the disk. Allocates: 60 bytes a block, kept.
 * Returns blocks asked for (0: nothing of it is on disk alone), or a negative error. */
long kvt_llama_prefetch(struct kvt_llama *llama, const int32_t *tokens, size_t n);

struct kvt_llama_report {
    size_t struct_size;
    size_t tokens_usable; /* of whole blocks, one token left to compute */
    size_t tokens_found;  /* leading run that the store had */
    size_t tokens_loaded; /* tokens [0, tokens_loaded) are in the context now */
    size_t blocks_dram;   /* loaded from each tier */
    size_t blocks_disk;
    uint64_t bytes_moved; /* record bytes */
    int64_t lookup_ns;
    int64_t load_ns;        /* store -> host staging, decoded */
    int64_t set_state_ns;   /* host staging -> context */
    int plan_reason;        /* enum kvt_plan_reason: why so much, or so little, was loaded */
    int plan_unsure;        /* as in struct kvt_plan */
    int late;               /* 1: the load fell behind and was cut off; what had come is used */
    size_t tokens_planned;  /* to be loaded, by the plan */
    size_t tokens_computed; /* of tokens_loaded, those that the restore computed */
    int64_t compute_ns;
    double plan_ttft_s, plan_recompute_s, plan_load_all_s; /* as expected; struct kvt_plan */
    size_t blocks_remote; /* loaded from the tier that machines share */
};
/* struct_size of callers whose struct ends before `blocks_remote`: blocks_disk has those, too. */
#define KVT_LLAMA_REPORT_SIZE_0 144u

/* Restore of the longest stored prefix of tokens[0..n) what is loaded faster than computed
 * (kvt_plan(); option plan=off: all of it) into sequence seq, which must be empty: the caller
 * computes the rest. At least one token is always left to compute.
 * The plan goes by what was measured: tell it by kvt_llama_compute(), or by kvt_observe_prefill()
 * with kvt_llama_ns(), what prompts took. A load that falls behind is cut off, and what has come of
 * it from the front on is used. Where opts.cut allows it the beginning may be computed here while
 * the end is loaded (the logits of the last decode are lost then).
 * Blocks: while blocks are read and decoded, or computed. Allocates: staging memory as large as the
 * restored state, kept for the next call; the copy of a finished save serves as well. Returns the
 * number of tokens restored (0: nothing found, or a state that was not beyond doubt), or a negative
 * error; after 0 and after an error the sequence is empty. report: optional, struct_size set by the
 * caller. */
long kvt_llama_restore(struct kvt_llama *llama, int32_t seq, const int32_t *tokens, size_t n,
                       struct kvt_llama_report *report);

/* Compute tokens[first..n) of a sequence that holds positions 0..first-1, by llama_decode() in
 * batches of n_batch, with logits for the last one, and tell the plan what it took: the rest of a
 * prompt after a restore. 0; KVT_E_INVAL; KVT_E_ENGINE llama.cpp did not decode it (the positions
 * that it did are in the sequence); -ENOMEM. */
int kvt_llama_compute(struct kvt_llama *llama, int32_t seq, const int32_t *tokens, size_t first,
                      size_t n);

/* Tell the plan how fast this engine computes before there is any prompt: prompts of up to
 * tokens_max tokens are computed in the spare sequence, which must be empty, and removed again.
 * Takes about twice the time of a prompt of tokens_max. 0, or as kvt_llama_compute(). */
int kvt_llama_calibrate(struct kvt_llama *llama, size_t tokens_max);

/* Store the full blocks of tokens[0..n), which sequence seq holds at positions 0..n-1, that are not
 * yet stored. Blocks for the copy out of the context, not for encoding or the disk. Blocks of a
 * sequence that were restored from a lossy record and are gone from the store are stored at kv8.
 * Returns blocks queued (0: all there, or dropped because four saves are in flight), or a negative
 * error. */
long kvt_llama_save(struct kvt_llama *llama, int32_t seq, const int32_t *tokens, size_t n);

/* Wait until everything saved so far has been encoded and committed. 0, or the first error of a
 * block since the last call. */
int kvt_llama_sync(struct kvt_llama *llama);

/* Bytes of one token in the engine's cache, and the namespace (for kvt_purge(), kvt_pin()) and its
 * id (16 bytes); borrowed while llama lives. */
size_t kvt_llama_token_bytes(const struct kvt_llama *llama);
struct kvt_ns *kvt_llama_ns(struct kvt_llama *llama);
const uint8_t *kvt_llama_ns_id(const struct kvt_llama *llama);

/* The adapter's own counters, like kvt_stats_each(). */
void kvt_llama_stats_each(const struct kvt_llama *llama, kvt_stats_fn fn, void *arg);

/* The sentence of the last failure; "" before the first. Borrowed until the next call. */
const char *kvt_llama_error(const struct kvt_llama *llama);

#ifdef __cplusplus
}
#endif
#endif
