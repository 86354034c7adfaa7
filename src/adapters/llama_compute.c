/* Computing tokens in the context, and telling the plan what that took: the rest of a prompt after
 * a restore, the beginning of one in a hybrid restore, and a calibration run.
 *
 * The engine's work is waited for before the clock is read: llama.cpp may compute in the
 * background. Threads: one at a time. It knows nothing of blocks.
 */
#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "llama_internal.h"

#define NS_PER_S 1000000000
#define WARM_TOKENS 64u    /* the first batch of a context pays for its buffers */
#define CALIBRATE_STEPS 4u /* prompts of an eighth, a quarter, a half and all of tokens_max */
#define TOKEN_STRIDE 7919  /* different tokens, one after the other */

int64_t kvt_llama_now_ns(void)
{
    struct timespec at;

    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * NS_PER_S + at.tv_nsec;
}

/* At most n_batch tokens. */
static int decode_batch(struct kvt_llama *llama, int32_t seq, const int32_t *tokens, size_t first,
                        size_t n, int logits)
{
    const int32_t count = (int32_t)(n - first);
    struct llama_batch batch = llama_batch_init(count, 0, 1);

    if (batch.token == NULL || batch.pos == NULL || batch.n_seq_id == NULL ||
        batch.seq_id == NULL || batch.logits == NULL) {
        llama_batch_free(batch);
        return -ENOMEM;
    }
    batch.n_tokens = count;
    for (int32_t i = 0; i < count; i++) {
        batch.token[i] = tokens[first + (size_t)i];
        batch.pos[i] = (llama_pos)(first + (size_t)i);
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i] = logits && i == count - 1;
    }
    int64_t start = kvt_llama_now_ns();
    const int rc = llama_decode(llama->ctx, batch);
    llama_synchronize(llama->ctx);
    const double seconds = (double)(kvt_llama_now_ns() - start) * 1e-9;
    llama_batch_free(batch);
    if (rc != 0) {
        kvt_llama_fail(llama, "llama.cpp did not decode tokens %zu to %zu (%d)", first, n - 1, rc);
        return KVT_E_ENGINE;
    }
    /* what is no observation is counted by the cache, and changes nothing */
    (void)kvt_observe_prefill(llama->ns, (uint64_t)count, first, seconds);
    return 0;
}

int kvt_llama_decode(struct kvt_llama *llama, int32_t seq, const int32_t *tokens, size_t first,
                     size_t n, int logits)
{
    const size_t most = llama_n_batch(llama->ctx);
    int rc = 0;

    for (size_t end; first < n && rc == 0; first = end) {
        end = n - first > most ? first + most : n;
        rc = decode_batch(llama, seq, tokens, first, end, logits && end == n);
    }
    return rc;
}

int kvt_llama_compute(struct kvt_llama *llama, int32_t seq, const int32_t *tokens, size_t first,
                      size_t n)
{
    if (llama == NULL || tokens == NULL || first >= n || n > INT32_MAX)
        return KVT_E_INVAL;
    if (seq < 0 || (uint32_t)seq >= llama_n_seq_max(llama->ctx) ||
        llama_memory_seq_pos_max(llama_get_memory(llama->ctx), seq) != (llama_pos)first - 1) {
        kvt_llama_fail(llama, "sequence %d does not end before token %zu", seq, first);
        return KVT_E_INVAL;
    }
    return kvt_llama_decode(llama, seq, tokens, first, n, 1);
}

int kvt_llama_calibrate(struct kvt_llama *llama, size_t tokens_max)
{
    if (llama == NULL || tokens_max == 0)
        return KVT_E_INVAL;
    llama_memory_t memory = llama_get_memory(llama->ctx);
    const struct llama_vocab *vocab = llama_model_get_vocab(llama_get_model(llama->ctx));
    const int32_t words = llama_vocab_n_tokens(vocab);
    const size_t room = llama_n_ctx_seq(llama->ctx);
    int rc = 0;

    if (llama_memory_seq_pos_max(memory, llama->staging_seq) != -1) {
        kvt_llama_fail(llama, "the spare sequence %d is in use", llama->staging_seq);
        return KVT_E_INVAL;
    }
    tokens_max = tokens_max > room ? room : tokens_max;
    int32_t *tokens = calloc(tokens_max, sizeof(*tokens));
    if (tokens == NULL)
        return -ENOMEM;
    for (size_t i = 0; i < tokens_max; i++)
        tokens[i] = (int32_t)((i * TOKEN_STRIDE + 1) % (size_t)(words > 0 ? words : 1));
    const size_t warm = tokens_max < WARM_TOKENS ? tokens_max : WARM_TOKENS;
    /* below the least that is fitted: it is counted and no more */
    rc = kvt_llama_decode(llama, llama->staging_seq, tokens, 0, warm - (warm > 1), 0);
    llama_memory_seq_rm(memory, llama->staging_seq, -1, -1);
    for (size_t step = CALIBRATE_STEPS; step-- > 0 && rc == 0;) {
        const size_t n = tokens_max >> step;
        if (n == 0)
            continue;
        rc = kvt_llama_decode(llama, llama->staging_seq, tokens, 0, n, 0);
        llama_memory_seq_rm(memory, llama->staging_seq, -1, -1);
    }
    free(tokens);
    return rc;
}
