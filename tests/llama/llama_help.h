/* Help for the tests of the llama.cpp adapter: tiny models with random weights of any architecture
 * (made in memory, no file), contexts, prompts, logits. Everything in them is the real llama.cpp.
 *
 * Weights are float32, so that a changed cache bit changes a logit by its own size and no more.
 * Work runs on one thread: ggml's barrier spins. Failures are cmocka assertions.
 */
#ifndef KVT_TESTS_LLAMA_HELP_H
#define KVT_TESTS_LLAMA_HELP_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include <gguf.h>
#include <kvtier/kvtier.h>
#include <kvtier/llama.h>
#include <llama.h>

#include "base/rng.h"

#define HELP_VOCAB 256
#define HELP_CTX 512

struct tiny_spec {
    const char *arch;
    uint32_t layers, width, heads, kv_heads;
    uint32_t key_length, value_length;       /* 0: width / heads */
    uint32_t window;                         /* sliding window, 0: none */
    uint64_t seed;                           /* of the weights */
    void (*more)(struct gguf_context *gguf); /* further metadata, or NULL */
    int words; /* 1: with llama.cpp's test tokenizer, else no vocabulary */
};

static const struct tiny_spec tiny_plain = {
    .arch = "llama", .layers = 3, .width = 128, .heads = 4, .kv_heads = 2, .seed = 7};

static inline void tiny_u32(struct gguf_context *gguf, const char *arch, const char *key,
                            uint32_t value)
{
    char name[128];

    snprintf(name, sizeof(name), "%s.%s", arch, key);
    gguf_set_val_u32(gguf, name, value);
}

static inline void tiny_f32(struct gguf_context *gguf, const char *arch, const char *key,
                            float value)
{
    char name[128];

    snprintf(name, sizeof(name), "%s.%s", arch, key);
    gguf_set_val_f32(gguf, name, value);
}

/* Metadata that is enough for every architecture used here; what one does not know it ignores. */
static inline struct gguf_context *tiny_metadata(const struct tiny_spec *spec)
{
    struct gguf_context *gguf = gguf_init_empty();
    const char *arch = spec->arch;
    const uint32_t dim = spec->width / spec->heads;
    uint32_t sections[4] = {dim / 4, dim / 4, dim / 4, dim / 4};
    char name[128];

    assert_non_null(gguf);
    gguf_set_val_str(gguf, "general.architecture", arch);
    gguf_set_val_str(gguf, "general.name", "tiny");
    tiny_u32(gguf, arch, "vocab_size", HELP_VOCAB);
    tiny_u32(gguf, arch, "context_length", 4 * HELP_CTX);
    tiny_u32(gguf, arch, "embedding_length", spec->width);
    tiny_u32(gguf, arch, "block_count", spec->layers);
    tiny_u32(gguf, arch, "leading_dense_block_count", 1);
    tiny_u32(gguf, arch, "feed_forward_length", 2 * spec->width);
    tiny_u32(gguf, arch, "attention.head_count", spec->heads);
    tiny_u32(gguf, arch, "attention.head_count_kv", spec->kv_heads);
    if (spec->key_length != 0)
        tiny_u32(gguf, arch, "attention.key_length", spec->key_length);
    if (spec->value_length != 0)
        tiny_u32(gguf, arch, "attention.value_length", spec->value_length);
    if (spec->window != 0)
        tiny_u32(gguf, arch, "attention.sliding_window", spec->window);
    tiny_f32(gguf, arch, "attention.layer_norm_rms_epsilon", 1e-5f);
    tiny_f32(gguf, arch, "attention.layer_norm_epsilon", 1e-5f);
    tiny_u32(gguf, arch, "ssm.conv_kernel", 4);
    tiny_u32(gguf, arch, "ssm.inner_size", 2 * spec->width);
    tiny_u32(gguf, arch, "ssm.state_size", 16);
    tiny_u32(gguf, arch, "ssm.time_step_rank", 8);
    tiny_u32(gguf, arch, "ssm.group_count", 1);
    snprintf(name, sizeof(name), "%s.rope.dimension_sections", arch);
    gguf_set_arr_data(gguf, name, GGUF_TYPE_UINT32, sections, 4);
    if (spec->more != NULL)
        spec->more(gguf);
    gguf_set_val_str(gguf, "tokenizer.ggml.model", spec->words ? "test" : "no_vocab");
    if (spec->words) {
        static char names[HELP_VOCAB][16];
        static const char *list[HELP_VOCAB];
        static float scores[HELP_VOCAB];
        for (int i = 0; i < HELP_VOCAB; i++) {
            snprintf(names[i], sizeof(names[i]), "tok_%d", i);
            list[i] = names[i];
        }
        gguf_set_arr_str(gguf, "tokenizer.ggml.tokens", list, HELP_VOCAB);
        gguf_set_arr_data(gguf, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores, HELP_VOCAB);
    }
    return gguf;
}

static inline void tiny_weights(struct ggml_tensor *tensor, void *arg)
{
    const struct tiny_spec *spec = arg;
    const size_t count = ggml_nbytes(tensor) / sizeof(float);
    float *values = malloc(count * sizeof(float) + 1);
    struct kvt_rng rng = {spec->seed};

    assert_non_null(values);
    assert_int_equal(tensor->type, GGML_TYPE_F32);
    for (const char *c = tensor->name; *c != '\0'; c++)
        rng.state = (rng.state ^ (uint8_t)*c) * 0x100000001b3u;
    /* sum of four uniforms: near enough to a Gaussian of deviation 0.15 */
    for (size_t i = 0; i < count; i++) {
        double sum = 0;
        for (int k = 0; k < 4; k++)
            sum += (double)(kvt_rng_next(&rng) >> 11) / 9007199254740992.0 - 0.5;
        values[i] = (float)(sum * 0.26);
        if (strstr(tensor->name, "norm") != NULL)
            values[i] += 1.0f;
    }
    ggml_backend_tensor_set(tensor, values, 0, count * sizeof(float));
    free(values);
}

static inline void help_log(enum ggml_log_level level, const char *text, void *arg)
{
    (void)arg;
    if (level == GGML_LOG_LEVEL_ERROR && getenv("KVT_TEST_VERBOSE") != NULL)
        fputs(text, stderr);
}

static inline struct llama_model *tiny_model(const struct tiny_spec *spec)
{
    struct llama_model_params params = llama_model_default_params();
    struct gguf_context *gguf = tiny_metadata(spec);

    llama_log_set(help_log, NULL);
    params.n_gpu_layers = 0;
    struct llama_model *model =
        llama_model_init_from_user(gguf, tiny_weights, (void *)(uintptr_t)spec, params);
    gguf_free(gguf);
    assert_non_null(model);
    return model;
}

static inline struct llama_context_params help_params(void)
{
    struct llama_context_params params = llama_context_default_params();

    params.n_ctx = HELP_CTX;
    params.n_batch = HELP_CTX;
    params.n_ubatch = 256;
    params.n_seq_max = 4;
    params.kv_unified = true;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.n_threads = 1;
    params.n_threads_batch = 1;
    return params;
}

static inline void help_tokens(uint64_t seed, int32_t *tokens, size_t n)
{
    struct kvt_rng rng = {seed};

    for (size_t i = 0; i < n; i++)
        tokens[i] = (int32_t)kvt_rng_below(&rng, HELP_VOCAB);
}

/* Compute tokens[from..to) of a sequence in one batch; logits of the last. */
static inline void help_decode(struct llama_context *ctx, int32_t seq, const int32_t *tokens,
                               size_t from, size_t to)
{
    struct llama_batch batch = llama_batch_init((int32_t)(to - from), 0, 1);

    batch.n_tokens = (int32_t)(to - from);
    for (size_t i = from; i < to; i++) {
        batch.token[i - from] = tokens[i];
        batch.pos[i - from] = (llama_pos)i;
        batch.n_seq_id[i - from] = 1;
        batch.seq_id[i - from][0] = seq;
        batch.logits[i - from] = i == to - 1;
    }
    assert_int_equal(llama_decode(ctx, batch), 0);
    llama_batch_free(batch);
}

/* The usual prompt: whole usable blocks in one batch, the rest in another. */
static inline void help_prefill(struct llama_context *ctx, int32_t seq, const int32_t *tokens,
                                size_t n)
{
    const size_t split = 16 * kvt_usable_blocks(16, n);

    if (split > 0)
        help_decode(ctx, seq, tokens, 0, split);
    help_decode(ctx, seq, tokens, split, n);
}

static inline void help_logits(struct llama_context *ctx, float logits[HELP_VOCAB])
{
    const float *last = llama_get_logits_ith(ctx, -1);

    assert_non_null(last);
    memcpy(logits, last, HELP_VOCAB * sizeof(float));
}

static inline float help_distance(const float *a, const float *b)
{
    float most = 0;

    for (int i = 0; i < HELP_VOCAB; i++) {
        const float d = a[i] > b[i] ? a[i] - b[i] : b[i] - a[i];
        if (d > most)
            most = d;
    }
    return most;
}

/* A cache; dir NULL: DRAM alone. */
static inline struct kvt_cache *help_cache(const char *dir)
{
    struct kvt_config *config = NULL;
    struct kvt_cache *cache = NULL;
    char error[256] = "", root[4200];

    assert_int_equal(kvt_config_new(&config), 0);
    assert_int_equal(kvt_config_set(config, "dram", "32MiB"), 0);
    /* tests of what is loaded must not depend on how fast: test_llama_plan is about that */
    assert_int_equal(kvt_config_set(config, "plan", "off"), 0);
    if (dir != NULL) {
        snprintf(root, sizeof(root), "%s:64MiB", dir);
        assert_int_equal(kvt_config_set(config, "disk", root), 0);
    }
    int rc = kvt_open(config, &cache, error, sizeof(error));
    if (rc != 0)
        fail_msg("kvt_open: %s (%s)", error, kvt_strerror(rc));
    kvt_config_free(config);
    return cache;
}

/* Any file's digest can stand for a model's: the adapter only hashes it. */
static inline void help_file(char path[64], const char *content)
{
    snprintf(path, 64, "/tmp/kvt-test-model-XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, content, strlen(content)), (ssize_t)strlen(content));
    close(fd);
}

/* Remove a directory of plain files. */
static inline void help_remove(const char *dir)
{
    char path[4200];
    DIR *list = opendir(dir);
    struct dirent *entry;

    assert_non_null(list);
    while ((entry = readdir(list)) != NULL) {
        snprintf(path, sizeof(path), "%s/%s", dir, entry->d_name);
        (void)unlink(path);
    }
    closedir(list);
    assert_int_equal(rmdir(dir), 0);
}

struct help_value {
    const char *name;
    uint64_t value;
    int found;
};

static inline void help_find(void *arg, const char *name, uint64_t value, const char *text,
                             const char *help)
{
    struct help_value *want = arg;

    (void)text;
    assert_non_null(help);
    if (strcmp(name, want->name) == 0) {
        want->value = value;
        want->found = 1;
    }
}

static inline uint64_t help_counter(const struct kvt_llama *llama, const char *name)
{
    struct help_value want = {name, 0, 0};

    kvt_llama_stats_each(llama, help_find, &want);
    assert_true(want.found);
    return want.value;
}

#endif
