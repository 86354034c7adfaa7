/* Goal: what the adapter cannot serve is refused with a reason that names the remedy or the kind,
 * before anything is stored; what it can serve is taken, whatever its shape.
 * Method: real contexts over tiny random models of many architectures: plain, grouped heads, other
 * value width, sliding window, M-RoPE, recurrent, hybrid, latent rows, encoder; and wrong options.
 */
#include "llama_help.h"

static struct kvt_cache *cache;
static char model_path[64];

static int setup(void **state)
{
    (void)state;
    cache = help_cache(NULL);
    help_file(model_path, "weights");
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    kvt_close(cache);
    unlink(model_path);
    return 0;
}

static void options(struct kvt_llama_opts *opts, const struct llama_context_params *params)
{
    kvt_llama_opts_init(opts);
    opts->context_params = params;
    opts->model_path = model_path;
}

/* Attach to a context of the spec and parameters; want 0 or an error whose sentence has `word`. */
static void attach(const struct tiny_spec *spec, const struct llama_context_params *params,
                   int want, const char *word)
{
    struct kvt_llama_opts opts;
    struct kvt_llama *llama = NULL;
    char error[512] = "";
    struct llama_model *model = tiny_model(spec);
    struct llama_context *ctx = llama_init_from_model(model, *params);

    assert_non_null(ctx);
    options(&opts, params);
    int rc = kvt_llama_new(cache, ctx, &opts, &llama, error, sizeof(error));
    if (rc != want || (word != NULL && strstr(error, word) == NULL))
        fail_msg("%s: got %d '%s', wanted %d '%s'", spec->arch, rc, error, want,
                 word != NULL ? word : "");
    assert_true((llama != NULL) == (want == 0));
    if (want == 0) { /* attaching leaves nothing behind */
        llama_memory_t memory = llama_get_memory(ctx);
        for (int32_t seq = 0; seq < (int32_t)llama_n_seq_max(ctx); seq++)
            assert_int_equal(llama_memory_seq_pos_max(memory, seq), -1);
    }
    kvt_llama_free(llama);
    llama_free(ctx);
    llama_model_free(model);
}

static void test_plain_shapes(void **state)
{
    (void)state;
    struct llama_context_params params = help_params();
    struct tiny_spec spec = tiny_plain;

    attach(&spec, &params, 0, NULL);
    spec.kv_heads = 4;
    attach(&spec, &params, 0, NULL);
    spec.kv_heads = 1;
    spec.layers = 1;
    attach(&spec, &params, 0, NULL);
    spec = tiny_plain;
    spec.arch = "qwen3";
    spec.key_length = 64;
    spec.value_length = 64;
    attach(&spec, &params, 0, NULL);
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_AUTO;
    attach(&tiny_plain, &params, 0, NULL);
}

static void test_cache_types(void **state)
{
    (void)state;
    struct llama_context_params params = help_params();

    params.type_k = GGML_TYPE_BF16;
    params.type_v = GGML_TYPE_BF16;
    attach(&tiny_plain, &params, 0, NULL);
    params.type_k = GGML_TYPE_F32;
    params.type_v = GGML_TYPE_F32;
    attach(&tiny_plain, &params, 0, NULL);
    params.type_k = GGML_TYPE_Q8_0;
    params.type_v = GGML_TYPE_Q8_0;
    attach(&tiny_plain, &params, KVT_E_UNSUPPORTED, "q8_0");
}

static void test_context_modes(void **state)
{
    (void)state;
    struct llama_context_params params = help_params();

    params.kv_unified = false;
    attach(&tiny_plain, &params, KVT_E_UNSUPPORTED, "kv_unified");
    params.n_seq_max = 1; /* one stream then, whatever it is called */
    attach(&tiny_plain, &params, 0, NULL);
    params = help_params();
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    attach(&tiny_plain, &params, KVT_E_UNSUPPORTED, "flash");
    params = help_params();
    params.attention_type = LLAMA_ATTENTION_TYPE_NON_CAUSAL;
    attach(&tiny_plain, &params, KVT_E_UNSUPPORTED, "causal");
}

static void test_sliding_window(void **state)
{
    (void)state;
    struct llama_context_params params = help_params();
    struct tiny_spec spec = tiny_plain;

    spec.arch = "gemma2";
    spec.window = 64;
    spec.key_length = spec.value_length = 32;
    attach(&spec, &params, KVT_E_UNSUPPORTED, "sliding");
    params.swa_full = true;
    attach(&spec, &params, KVT_E_UNSUPPORTED, "sliding");
}

static void test_multi_position(void **state)
{
    (void)state;
    struct llama_context_params params = help_params();
    struct tiny_spec spec = tiny_plain;

    spec.arch = "qwen2vl";
    attach(&spec, &params, KVT_E_UNSUPPORTED, "M-RoPE");
}

static void test_recurrent(void **state)
{
    (void)state;
    struct llama_context_params params = help_params();
    struct tiny_spec spec = tiny_plain;

    spec.arch = "mamba";
    attach(&spec, &params, KVT_E_UNSUPPORTED, "recurrent");
}

static void hybrid(struct gguf_context *gguf)
{
    const uint32_t heads[3] = {4, 0, 4};

    gguf_set_arr_data(gguf, "jamba.attention.head_count_kv", GGUF_TYPE_UINT32, heads, 3);
}

static void test_hybrid(void **state)
{
    (void)state;
    struct llama_context_params params = help_params();
    struct tiny_spec spec = tiny_plain;

    spec.arch = "jamba";
    spec.more = hybrid;
    attach(&spec, &params, KVT_E_UNSUPPORTED, "hybrid");
}

static void latent(struct gguf_context *gguf)
{
    tiny_u32(gguf, "deepseek2", "attention.kv_lora_rank", 64);
    tiny_u32(gguf, "deepseek2", "attention.q_lora_rank", 64);
    tiny_u32(gguf, "deepseek2", "attention.key_length_mla", 48);
    tiny_u32(gguf, "deepseek2", "attention.value_length_mla", 32);
    tiny_u32(gguf, "deepseek2", "rope.dimension_count", 16);
    tiny_u32(gguf, "deepseek2", "leading_dense_block_count", 3);
    tiny_u32(gguf, "deepseek2", "expert_feed_forward_length", 64);
    tiny_u32(gguf, "deepseek2", "expert_count", 2);
    tiny_u32(gguf, "deepseek2", "expert_used_count", 2);
    tiny_u32(gguf, "deepseek2", "expert_shared_count", 1);
    tiny_u32(gguf, "deepseek2", "expert_gating_func", 2);
}

static void test_latent_rows(void **state)
{
    (void)state;
    struct llama_context_params params = help_params();
    struct tiny_spec spec = tiny_plain;

    spec.arch = "deepseek2";
    spec.kv_heads = 1;
    spec.key_length = 80;
    spec.value_length = 64;
    spec.more = latent;
    attach(&spec, &params, KVT_E_UNSUPPORTED, "MLA");
}

static void bert(struct gguf_context *gguf)
{
    gguf_set_val_bool(gguf, "bert.attention.causal", false);
    gguf_set_val_u32(gguf, "tokenizer.ggml.token_type_count", 1);
}

static void test_not_causal(void **state)
{
    (void)state;
    struct llama_context_params params = help_params();
    struct tiny_spec spec = tiny_plain;

    spec.arch = "bert";
    spec.more = bert;
    attach(&spec, &params, KVT_E_UNSUPPORTED, "causal");
}

/* llama_decode reads a block of 16 rows or nothing: odd head sizes are refused, never rounded. */
static void test_head_sizes(void **state)
{
    (void)state;
    struct llama_context_params params = help_params();
    struct tiny_spec spec = tiny_plain;

    spec.width = 120; /* heads of 40 */
    spec.heads = 3;
    spec.kv_heads = 3;
    struct llama_model *model = tiny_model(&spec);
    struct llama_context *ctx = llama_init_from_model(model, params);
    struct kvt_llama_opts opts;
    struct kvt_llama *llama = NULL;
    char error[512] = "";
    if (ctx != NULL) { /* flash attention may refuse it first */
        options(&opts, &params);
        assert_true(kvt_llama_new(cache, ctx, &opts, &llama, error, sizeof(error)) < 0);
        assert_true(error[0] != '\0');
        llama_free(ctx);
    }
    llama_model_free(model);
}

static void test_options(void **state)
{
    (void)state;
    struct llama_context_params params = help_params();
    struct kvt_llama_opts opts;
    struct kvt_llama *llama = NULL;
    char error[512] = "";
    struct llama_model *model = tiny_model(&tiny_plain);
    struct llama_context *ctx = llama_init_from_model(model, params);

    assert_non_null(ctx);
    options(&opts, &params);
    opts.struct_size = 8;
    assert_int_equal(kvt_llama_new(cache, ctx, &opts, &llama, error, sizeof(error)), KVT_E_VERSION);
    options(&opts, &params);
    opts.model_path = NULL;
    assert_int_equal(kvt_llama_new(cache, ctx, &opts, &llama, error, sizeof(error)), KVT_E_INVAL);
    options(&opts, NULL);
    assert_int_equal(kvt_llama_new(cache, ctx, &opts, &llama, NULL, 0), KVT_E_INVAL);
    options(&opts, &params);
    opts.block_tokens = 24;
    assert_int_equal(kvt_llama_new(cache, ctx, &opts, &llama, error, sizeof(error)), KVT_E_INVAL);
    assert_non_null(strstr(error, "multiple of 16"));
    options(&opts, &params);
    opts.staging_seq = 4;
    assert_int_equal(kvt_llama_new(cache, ctx, &opts, &llama, error, sizeof(error)), KVT_E_INVAL);
    assert_non_null(strstr(error, "n_seq_max"));
    options(&opts, &params);
    opts.level = 77;
    assert_int_equal(kvt_llama_new(cache, ctx, &opts, &llama, error, sizeof(error)), KVT_E_INVAL);
    options(&opts, &params);
    opts.model_path = "/nonexistent/model.gguf";
    assert_int_equal(kvt_llama_new(cache, ctx, &opts, &llama, error, sizeof(error)), -ENOENT);
    assert_non_null(strstr(error, "/nonexistent/model.gguf"));
    /* the parameters of another context */
    struct llama_context_params other = params;
    other.type_k = GGML_TYPE_F32;
    options(&opts, &other);
    assert_int_equal(kvt_llama_new(cache, ctx, &opts, &llama, error, sizeof(error)), KVT_E_INVAL);
    assert_non_null(strstr(error, "not those of this context"));
    other = params;
    other.n_seq_max = 2;
    options(&opts, &other);
    assert_int_equal(kvt_llama_new(cache, ctx, &opts, &llama, error, sizeof(error)),
                     KVT_E_UNSUPPORTED);
    assert_null(llama);
    llama_free(ctx);
    llama_model_free(model);
}

static void test_spare_sequence_in_use(void **state)
{
    (void)state;
    struct llama_context_params params = help_params();
    struct kvt_llama_opts opts;
    struct kvt_llama *llama = NULL;
    char error[512] = "";
    int32_t tokens[20];
    struct llama_model *model = tiny_model(&tiny_plain);
    struct llama_context *ctx = llama_init_from_model(model, params);

    assert_non_null(ctx);
    help_tokens(1, tokens, 20);
    help_decode(ctx, 3, tokens, 0, 20);
    options(&opts, &params);
    assert_int_equal(kvt_llama_new(cache, ctx, &opts, &llama, error, sizeof(error)), KVT_E_INVAL);
    assert_non_null(strstr(error, "sequence 3"));
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(ctx), 3), 19); /* untouched */
    opts.staging_seq = 2;
    assert_int_equal(kvt_llama_new(cache, ctx, &opts, &llama, error, sizeof(error)), 0);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(ctx), 3), 19);
    kvt_llama_free(llama);
    llama_free(ctx);
    llama_model_free(model);
}

/* Files that are not whole models are named before anything is loaded. */
static void test_check_file(void **state)
{
    (void)state;
    char path[64], error[512], cut[64];
    struct gguf_context *gguf = tiny_metadata(&tiny_plain);
    struct ggml_init_params init = {.mem_size = 1 << 20};
    struct ggml_context *ggml = ggml_init(init);
    struct ggml_tensor *tensor = ggml_new_tensor_1d(ggml, GGML_TYPE_F32, 1000);

    memset(tensor->data, 0, 4000);
    ggml_set_name(tensor, "token_embd.weight");
    gguf_add_tensor(gguf, tensor);
    help_file(path, "");
    assert_true(gguf_write_to_file(gguf, path, false));
    gguf_free(gguf);
    ggml_free(ggml);
    assert_int_equal(kvt_llama_check_file(path, error, sizeof(error)), 0);
    assert_string_equal(error, "");

    FILE *file = fopen(path, "rb");
    static char bytes[1 << 20];
    size_t len = fread(bytes, 1, sizeof(bytes), file);
    fclose(file);
    const size_t lengths[] = {0, 3, 4, 8, 24, len / 4, len / 2, len - 4000, len - 1};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        help_file(cut, "");
        assert_int_equal(truncate(cut, 0), 0);
        file = fopen(cut, "wb");
        assert_int_equal(fwrite(bytes, 1, lengths[i], file), lengths[i]);
        fclose(file);
        assert_true(kvt_llama_check_file(cut, error, sizeof(error)) < 0);
        assert_non_null(strstr(error, cut));
        unlink(cut);
    }
    unlink(path);
    assert_int_equal(kvt_llama_check_file(model_path, error, sizeof(error)), KVT_E_UNSUPPORTED);
    assert_non_null(strstr(error, "not a GGUF"));
    assert_int_equal(kvt_llama_check_file("/tmp", error, sizeof(error)), KVT_E_UNSUPPORTED);
    assert_int_equal(kvt_llama_check_file("/nonexistent", error, sizeof(error)), -ENOENT);
    assert_int_equal(kvt_llama_check_file(NULL, NULL, 0), KVT_E_INVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain_shapes),   cmocka_unit_test(test_cache_types),
        cmocka_unit_test(test_context_modes),  cmocka_unit_test(test_sliding_window),
        cmocka_unit_test(test_multi_position), cmocka_unit_test(test_recurrent),
        cmocka_unit_test(test_hybrid),         cmocka_unit_test(test_latent_rows),
        cmocka_unit_test(test_not_causal),     cmocka_unit_test(test_head_sizes),
        cmocka_unit_test(test_options),        cmocka_unit_test(test_spare_sequence_in_use),
        cmocka_unit_test(test_check_file),
    };
    llama_backend_init();
    return cmocka_run_group_tests(tests, setup, teardown);
}
