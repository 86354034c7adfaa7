/* kvtier demo, kvtier quality: the model, its context, tokens in and out.
 *
 * Greedy, one sequence, the context of the supported kind (unified, flash attention). Work stops at
 * an interrupt: between batches here, and within one by llama.cpp's abort callback.
 * Threads: those of llama.cpp.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <ggml-cpu.h>

#include "cli.h"
#include "demo.h"

#define TOKEN_BYTES_GUESS 8

int64_t demo_now_ns(void)
{
    struct timespec at;

    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

/* Keep llama.cpp's last error lines for our own sentence; drop the rest. The very last one often
 * says only that it failed, the one before says why. */
static void keep_error(enum ggml_log_level level, const char *text, void *arg)
{
    struct demo_engine *engine = arg;

    if (level != GGML_LOG_LEVEL_ERROR)
        return;
    const size_t room = sizeof(engine->failure) / 2, len = strcspn(text, "\n");
    size_t used = strlen(engine->failure);
    if (len == 0)
        return;
    if (used >= room) { /* the newer half stays, so that half is free */
        memmove(engine->failure, engine->failure + (used - room / 2), room / 2 + 1);
        used = room / 2;
    }
    snprintf(engine->failure + used, room, "%s%.*s", used > 0 ? "; " : "", (int)len, text);
}

void demo_quiet(enum ggml_log_level level, const char *text, void *arg)
{
    (void)level;
    (void)text;
    (void)arg;
}

static bool abort_work(void *arg)
{
    (void)arg;
    return kvt_cli_interrupted() != 0;
}

static bool load_progress(float done, void *arg)
{
    kvt_progress_update(arg, (uint64_t)(done * 100), 100);
    return kvt_cli_interrupted() == 0;
}

static int load_model(struct demo_engine *engine, const char *path)
{
    struct llama_model_params params = llama_model_default_params();
    struct kvt_progress progress;

    engine->failure[0] = '\0';
    kvt_progress_start(&progress, "loading the model");
    params.n_gpu_layers = 0;
    params.progress_callback = load_progress;
    params.progress_callback_user_data = &progress;
    engine->model = llama_model_load_from_file(path, params);
    kvt_progress_done(&progress);
    if (engine->model == NULL) {
        if (!kvt_cli_interrupted())
            kvt_cli_error(engine->command, "llama.cpp cannot use %s: %s", path, engine->failure);
        return -1;
    }
    engine->vocab = llama_model_get_vocab(engine->model);
    return 0;
}

int demo_engine_open(struct demo_engine *engine, const char *command, const char *model)
{
    char reason[512];

    memset(engine, 0, sizeof(*engine));
    engine->command = command;
    if (kvt_llama_check_file(model, reason, sizeof(reason)) != 0) {
        kvt_cli_error(engine->command, "%s", reason);
        return -1;
    }
    llama_log_set(keep_error, engine);
    llama_backend_init();
    return load_model(engine, model);
}

int demo_engine_context(struct demo_engine *engine, int64_t threads, uint32_t n_ctx)
{
    const int32_t trained = llama_model_n_ctx_train(engine->model);

    if (trained > 0 && n_ctx > (uint32_t)trained) {
        kvt_cli_error(engine->command,
                      "the prompt needs a context of %u tokens, the model has %d; give a "
                      "smaller --tokens",
                      n_ctx, trained);
        return -1;
    }
    engine->params = llama_context_default_params();
    engine->params.n_ctx = n_ctx;
    engine->params.n_batch = DEMO_BATCH_TOKENS;
    engine->params.n_ubatch = DEMO_BATCH_TOKENS;
    engine->params.n_seq_max = 2; /* one to work in, one spare for the adapter */
    engine->params.kv_unified = true;
    engine->params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    engine->params.n_threads = (int32_t)threads;
    engine->params.n_threads_batch = (int32_t)threads;
    engine->params.abort_callback = abort_work;
    engine->failure[0] = '\0';
    engine->ctx = llama_init_from_model(engine->model, engine->params);
    if (engine->ctx == NULL) {
        kvt_cli_error(engine->command, "llama.cpp made no context of %u tokens: %s", n_ctx,
                      engine->failure);
        return -1;
    }
    engine->batch = llama_batch_init(DEMO_BATCH_TOKENS, 0, 1);
    /* By default the threads of llama.cpp spin for tens of milliseconds after each decode, on the
     * processors that are to decode blocks then. Ours sleep between two graphs. */
    struct ggml_threadpool_params pool = ggml_threadpool_params_default((int)threads);
    pool.poll = 0;
    engine->pool = ggml_threadpool_new(&pool);
    if (engine->pool != NULL)
        llama_attach_threadpool(engine->ctx, engine->pool, engine->pool);
    return 0;
}

void demo_engine_close(struct demo_engine *engine)
{
    if (engine->batch.token != NULL)
        llama_batch_free(engine->batch);
    if (engine->ctx != NULL)
        llama_free(engine->ctx);
    if (engine->pool != NULL)
        ggml_threadpool_free(engine->pool);
    if (engine->model != NULL)
        llama_model_free(engine->model);
    llama_log_set(demo_quiet, NULL); /* the default prints */
    memset(engine, 0, sizeof(*engine));
}

int32_t *demo_tokenize(const struct demo_engine *engine, const char *text, size_t len, int special,
                       size_t *count)
{
    int32_t room = (int32_t)len + TOKEN_BYTES_GUESS;
    int32_t *tokens = malloc((size_t)room * sizeof(*tokens));

    if (tokens == NULL)
        return NULL;
    int32_t n =
        llama_tokenize(engine->vocab, text, (int32_t)len, tokens, room, special != 0, special != 0);
    if (n < 0) {
        free(tokens);
        return NULL;
    }
    *count = (size_t)n;
    return tokens;
}

char *demo_detokenize(const struct demo_engine *engine, const int32_t *tokens, size_t count)
{
    int32_t room = (int32_t)count * TOKEN_BYTES_GUESS + 1;

    for (int attempt = 0; attempt < 2; attempt++) {
        char *text = malloc((size_t)room + 1);
        if (text == NULL)
            return NULL;
        int32_t n =
            llama_detokenize(engine->vocab, tokens, (int32_t)count, text, room, true, false);
        if (n >= 0) {
            text[n] = '\0';
            return text;
        }
        free(text);
        room = -n + 1;
    }
    return NULL;
}

int demo_decode(struct demo_engine *engine, const int32_t *tokens, size_t from, size_t to,
                int all_logits, const char *what)
{
    struct llama_batch *batch = &engine->batch;
    struct kvt_progress progress;
    int rc = 0;

    if (what != NULL)
        kvt_progress_start(&progress, what);
    for (size_t at = from; rc == 0 && at < to; at += (size_t)batch->n_tokens) {
        size_t n = to - at < DEMO_BATCH_TOKENS ? to - at : DEMO_BATCH_TOKENS;
        batch->n_tokens = (int32_t)n;
        for (size_t i = 0; i < n; i++) {
            batch->token[i] = tokens[at + i];
            batch->pos[i] = (llama_pos)(at + i);
            batch->n_seq_id[i] = 1;
            batch->seq_id[i][0] = 0;
            batch->logits[i] = all_logits || at + i == to - 1;
        }
        if (what != NULL)
            kvt_progress_update(&progress, at - from, to - from);
        rc = kvt_cli_interrupted() ? -1 : llama_decode(engine->ctx, *batch);
    }
    if (what != NULL)
        kvt_progress_done(&progress);
    if (rc != 0 && !kvt_cli_interrupted())
        kvt_cli_error(engine->command, "llama.cpp could not decode (%d): %s", rc, engine->failure);
    return rc == 0 ? 0 : -1;
}

int32_t demo_argmax(const struct demo_engine *engine, int32_t i)
{
    const float *logits = llama_get_logits_ith(engine->ctx, i);
    const int32_t count = llama_vocab_n_tokens(engine->vocab);
    int32_t best = 0;

    for (int32_t t = 1; t < count; t++)
        if (logits[t] > logits[best])
            best = t;
    return best;
}
