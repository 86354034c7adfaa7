/* llama.cpp adapter (library libkvtier-llama): prompts of a llama_context are remembered.
 *
 * Purpose:  given an unpatched llama_context and a token list, restore the longest stored prefix by
 *           sequence-state calls, and store new full blocks afterwards.
 * Threads:  one thread at a time per kvt_llama, the one that uses the context.
 * Errors:   error.h; kvt_llama_error() has the sentence. Lifetime: the context and the cache
 *           outlive the adapter.
 * Supported: attention-only, unified KV cache (kv_unified), flash attention on, one position per
 *           token, no sliding window, no recurrent state. Anything else is refused with the reason.
 * Limits: a spare sequence id is used for staging: create the context with n_seq_max >= 2.
 */
#ifndef KVTIER_LLAMA_H
#define KVTIER_LLAMA_H

#include <kvtier/cache.h>

#ifdef __cplusplus
extern "C" {
#endif

struct llama_context;
struct kvt_llama;

struct kvt_llama_opts {
    size_t struct_size;
    uint32_t block_tokens;  /* 16 by default; multiple of 16 */
    uint32_t window_tokens; /* most recent tokens kept at kv8; 4096 by default */
    int level;              /* enum kvt_level; DEFAULT: the configured level */
    int32_t staging_seq;    /* spare sequence id; < 0: n_seq_max - 1 */
    const char *model_path; /* file whose digest identifies the weights; required */
    const void *salt;       /* tenant salt, any bytes; optional */
    size_t salt_len;
};
void kvt_llama_opts_init(struct kvt_llama_opts *opts);

/* Attach to a context. Reads the model file once for its digest (cached by size, mtime and inode in
 * memory only). 0; KVT_E_UNSUPPORTED with the reason in error; KVT_E_*; -errno. Owned until
 * kvt_llama_free(). */
int kvt_llama_new(struct kvt_cache *cache, struct llama_context *ctx,
                  const struct kvt_llama_opts *opts, struct kvt_llama **out, char *error,
                  size_t error_len);
void kvt_llama_free(struct kvt_llama *llama);

struct kvt_llama_report {
    size_t struct_size;
    size_t tokens_loaded; /* tokens [0, tokens_loaded) are in the context now */
    size_t blocks_dram;
    size_t blocks_disk;
    uint64_t bytes_moved; /* record bytes */
    int64_t load_ns;      /* store -> host staging, decoded */
    int64_t set_state_ns; /* host staging -> context */
};

/* Restore the longest stored prefix of tokens[0..n) into sequence seq, which must be empty: the
 * caller computes the rest. At least one token is always left to compute.
 * Returns the number of tokens restored (0: nothing found), or a negative error, after which the
 * sequence is empty. report: optional. */
long kvt_llama_restore(struct kvt_llama *llama, int32_t seq, const int32_t *tokens, size_t n,
                       struct kvt_llama_report *report);

/* Store the full blocks of tokens[0..n), which sequence seq holds at positions 0..n-1, that are not
 * yet stored. Blocks for the copy out of the context, not for encoding or the disk.
 * Returns blocks queued, or a negative error. */
long kvt_llama_save(struct kvt_llama *llama, int32_t seq, const int32_t *tokens, size_t n);

/* Wait until everything saved so far has been encoded and committed. 0 or the first error. */
int kvt_llama_sync(struct kvt_llama *llama);

/* Bytes of one token in the engine's cache, and the namespace id (16 bytes, borrowed). */
size_t kvt_llama_token_bytes(const struct kvt_llama *llama);
const uint8_t *kvt_llama_ns_id(const struct kvt_llama *llama);

/* The sentence of the last failure. Borrowed until the next call. */
const char *kvt_llama_error(const struct kvt_llama *llama);

#ifdef __cplusplus
}
#endif
#endif
