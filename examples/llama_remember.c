/* A prompt that llama.cpp does not compute twice:   llama_remember MODEL.gguf DIR TEXT-FILE
 *
 * The first run computes the whole prompt and stores it below DIR; the next one, in a new process,
 * loads it. Build it against your own llama.cpp:
 *   cc llama_remember.c $(pkg-config --cflags --libs kvtier-llama) -lllama -lggml -lggml-base
 */
#include <kvtier/kvtier.h>
#include <kvtier/llama.h>
#include <llama.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CONTEXT 8192
#define BATCH 512

static double now(void)
{
    struct timespec at;

    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

static void quiet(enum ggml_log_level level, const char *text, void *arg)
{
    (void)arg;
    if (level == GGML_LOG_LEVEL_ERROR)
        fputs(text, stderr);
}

static struct kvt_cache *open_cache(const char *dir)
{
    struct kvt_config *config = NULL;
    struct kvt_cache *cache = NULL;
    char disk[4096], error[512];

    snprintf(disk, sizeof(disk), "%s:4GiB", dir);
    if (kvt_config_new(&config) != 0)
        return NULL;
    if (kvt_config_set(config, "dram", "256MiB") != 0 || kvt_config_set(config, "disk", disk) != 0)
        fprintf(stderr, "%s\n", kvt_config_error(config));
    else if (kvt_open(config, &cache, error, sizeof(error)) != 0 || error[0] != '\0')
        fprintf(stderr, "%s\n", error); /* also when it runs without its disk */
    kvt_config_free(config);
    return cache;
}

/* Tokens of a file, at most CONTEXT; 0 when it cannot be read. */
static int read_prompt(const struct llama_vocab *vocab, const char *path, llama_token *tokens)
{
    static char text[1 << 20];
    FILE *file = fopen(path, "rb");
    size_t len = file != NULL ? fread(text, 1, sizeof(text), file) : 0;

    if (file != NULL)
        fclose(file);
    int n = len > 0 ? llama_tokenize(vocab, text, (int)len, tokens, CONTEXT, true, false) : 0;
    return n < 0 ? 0 : n;
}

int main(int argc, char **argv)
{
    static llama_token tokens[CONTEXT];
    struct kvt_llama_opts opts;
    struct kvt_llama *remember = NULL;
    char error[512];

    if (argc != 4) {
        fprintf(stderr, "usage: llama_remember MODEL.gguf DIR TEXT-FILE\n");
        return 2;
    }
    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (model == NULL)
        return 1;
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = CONTEXT;
    params.n_batch = BATCH;
    params.n_threads = params.n_threads_batch = 2; /* never more than free processors: it spins */
    params.n_seq_max = 2;                          /* sequence 0 for us, 1 spare for the adapter */
    params.kv_unified = true;                      /* needed with more than one sequence */
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED; /* needed: V row by row */
    struct llama_context *ctx = llama_init_from_model(model, params);
    struct kvt_cache *cache = open_cache(argv[2]);
    int n = read_prompt(llama_model_get_vocab(model), argv[3], tokens);
    if (ctx == NULL || cache == NULL || n == 0) {
        fprintf(stderr, "no context, no cache, or no prompt of 1 to %d tokens\n", CONTEXT);
        return 1;
    }

    kvt_llama_opts_init(&opts);
    opts.context_params = &params;
    opts.model_path = argv[1];
    if (kvt_llama_new(cache, ctx, &opts, &remember, error, sizeof(error)) != 0) {
        fprintf(stderr, "%s\n", error);
        return 1;
    }
    double start = now();
    long loaded = kvt_llama_restore(remember, 0, tokens, (size_t)n, NULL);
    if (loaded < 0)
        loaded = 0; /* whatever the reason: the sequence is empty, compute everything */
    /* llama_decode() as usual would do; this also tells the plan how fast this engine computes */
    if (kvt_llama_compute(remember, 0, tokens, (size_t)loaded, (size_t)n) != 0)
        return 1;
    printf("loaded %ld of %d tokens, ready after %.0f ms\n", loaded, n, (now() - start) * 1e3);

    if (kvt_llama_save(remember, 0, tokens, (size_t)n) < 0 || kvt_llama_sync(remember) != 0)
        fprintf(stderr, "not saved: %s\n", kvt_llama_error(remember));
    kvt_llama_free(remember);
    kvt_close(cache); /* writes what is queued */
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
