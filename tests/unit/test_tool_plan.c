/* Goal: `kvtier plan` says what is right: bytes of a token are those of real records, break-even
 *       and lengths follow from them; the published example comes out as it should have; models
 * come from the data, from a file of the user's, or from a config.json; what is wrong is named.
 * Method: the built binary, its JSON against numbers worked out by hand or by the library.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "plan_data.h"
#include "support/rig.h"
#include "support/run_tool.h"

static struct tool_run run;
static char dir[128];

#define ARGS_MAX 16

static void tool(const char *const *args)
{
    const char *argv[ARGS_MAX] = {KVT_TOOL, "plan"};
    for (size_t i = 0; args[i] != NULL; i++)
        argv[2 + i] = args[i];
    tool_run(&run, KVT_TOOL, argv, NULL, NULL);
}

#define TOOL(...) tool((const char *const[]){__VA_ARGS__, NULL})

static json_t *json(void)
{
    assert_int_equal(run.code, 0);
    json_t *document = json_loads(run.out, 0, NULL);
    assert_non_null(document);
    return document;
}

static double number(const json_t *document, const char *object, const char *key)
{
    const json_t *value = json_object_get(json_object_get(document, object), key);
    assert_true(json_is_number(value));
    return json_number_value(value);
}

static const json_t *tier(const json_t *document, const char *name)
{
    const json_t *entry;
    size_t i;
    json_array_foreach(json_object_get(document, "tiers"), i, entry)
    {
        if (!strcmp(json_string_value(json_object_get(entry, "name")), name))
            return entry;
    }
    fail_msg("no tier %s", name);
    return NULL;
}

static void near(double got, double want)
{
    if (!(fabs(got - want) <= 1e-9 * fabs(want)))
        fail_msg("%.12g, wanted %.12g", got, want);
}

static const char *file(const char *name, const char *text)
{
    static char path[256];
    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    assert_true(fputs(text, out) >= 0);
    assert_int_equal(fclose(out), 0);
    return path;
}

/* The figures of the issue tracker of every KV cache: 327,680 bytes a token, 5.898 GB/s. */
static void seventy_billion(void **state)
{
    (void)state;
    TOOL("--model", "llama-3-70b", "--prefill", "18000", "--json");
    json_t *document = json();
    assert_string_equal(json_string_value(json_object_get(document, "model")), "llama-3-70b");
    near(number(document, "bytes_per_token", "bf16"), 327680);
    near(number(document, "break_even_gbps", "bf16"), 5.89824);
    near(number(document, "bytes_per_token", "kv4"), 1376256 / 16.0);
    near(number(document, "break_even_gbps", "kv4"), 86016 * 18000 * 1e-9);
    /* int4: 1,351,680 of payload, 128 of header, padded to 4 KiB */
    near(number(document, "bytes_per_token", "int4"), 331 * 4096 / 16.0);
    const json_t *slow = tier(document, "sata"), *fast = tier(document, "nvme-gen5");
    assert_true(json_is_null(json_object_get(slow, "pays_from_tokens")));
    /* 1 ms < n (1 / 18,000 - 86,016 / 14e9) */
    int64_t from = json_integer_value(json_object_get(fast, "pays_from_tokens"));
    assert_int_equal(from, (int64_t)floor(0.001 / (1 / 18000.0 - 86016 / 14e9)) + 1);
    json_decref(document);
}

/* Every model of the data has the bytes that its shape gives. */
static void bytes_are_those_of_the_shape(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        double bf16;
    } models[] = {{"smollm2-135m", 23040},     {"llama-3-8b", 131072}, {"mistral-7b", 131072},
                  {"llama-3.1-405b", 516096},  {"qwen2.5-7b", 57344},  {"qwen2.5-14b", 196608},
                  {"qwen3-8b", 147456},        {"qwen3-32b", 262144},  {"qwen3-30b-a3b", 98304},
                  {"qwen3-235b-a22b", 192512}, {"deepseek-v3", 70272}, {"kimi-k2", 70272}};
    for (size_t i = 0; i < sizeof(models) / sizeof(models[0]); i++) {
        TOOL("--model", models[i].name, "--json");
        json_t *document = json();
        near(number(document, "bytes_per_token", "bf16"), models[i].bf16);
        assert_true(number(document, "bytes_per_token", "kv4") < 0.55 * models[i].bf16);
        json_decref(document);
    }
}

/* A record of the library itself, for the level and the block of the question. */
static void records_are_the_librarys(void **state)
{
    (void)state;
    struct rig rig;
    struct rig_shape shape = rig_shape_large(4);
    rig_init(&rig, &shape, "dram=16MiB", NULL);
    rig_open(&rig);
    struct plan_model model = {
        .layers = shape.layers, .kv_heads = shape.heads, .head_dim = shape.dim};
    struct plan_bytes bytes;
    assert_int_equal(plan_token_bytes(&model, shape.tokens, &bytes), 0);
    for (int level = KVT_LEVEL_INT4; level < KVT_LEVEL_RAW; level++)
        near(bytes.full[level] * shape.tokens, (double)kvt_ns_record_bytes(rig.ns, 0, level));
    rig_free(&rig);
}

static void the_published_example(void **state)
{
    (void)state;
    TOOL("--example", "--dram", "1TB", "--disk", "7TB", "--json");
    json_t *document = json();
    near(number(document, "sizing", "bytes_bf16"), 100.0 * 262144 * 327680);
    near(number(document, "sizing", "bytes_kv4"), 100.0 * 262144 * 86016);
    near(number(document, "sizing", "in_gpus_without"), 1); /* (4 x 72 - 141) / 85.9 GB */
    near(number(document, "sizing", "kept_with"), 354);
    json_decref(document);
    TOOL("--example");
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "8589.9 GB"));
    assert_non_null(strstr(run.out, "250 times too little"));
}

/* 1 drive write a day of 7.68 TB is 89 MB/s: a drive of 5 years lives 5 years at that rate. */
static void drives_wear_out(void **state)
{
    (void)state;
    TOOL("--model", "llama-3-70b", "--prefill", "18000", "--traffic", "1033", "--json");
    json_t *document = json();
    double life = json_number_value(json_object_get(tier(document, "nvme-gen4"), "life_years"));
    assert_true(life > 4.99 && life < 5.01);
    assert_true(json_is_null(json_object_get(tier(document, "net-10g"), "life_years")));
    json_decref(document);
}

static void a_users_file_adds_and_replaces(void **state)
{
    (void)state;
    const char *path =
        file("mine.json", "{\"models\": [{\"name\": \"mine\", \"layers\": 10, \"kv_heads\": 2,"
                          "\"head_dim\": 64}], \"prefill\": [{\"model\": \"mine\","
                          "\"us_per_token\": 50, \"ns_per_token2\": 1}],"
                          "\"tiers\": [{\"name\": \"sata\", \"gbps\": 99},"
                          "{\"name\": \"tape\", \"gbps\": 0.001, \"latency_us\": 1e6}]}");
    TOOL("--model", "mine", "--data", path, "--json");
    json_t *document = json();
    near(number(document, "bytes_per_token", "bf16"), 2 * 2 * 10 * 2 * 64);
    near(json_number_value(json_object_get(tier(document, "sata"), "gbps")), 99);
    assert_true(json_is_null(json_object_get(tier(document, "tape"), "pays_from_tokens")));
    near(json_number_value(json_object_get(document, "prefill_tok_s")), 1 / (50e-6 + 1e-9));
    json_decref(document);
}

static void bad_data_is_named(void **state)
{
    (void)state;
    static const struct {
        const char *text, *says;
    } bad[] = {
        {"{\"models\": ", "line 1"},
        {"{\"models\": 3}", "models"},
        {"{\"tiers\": [{\"gbps\": 3}]}", "tiers"},
        {"{\"tiers\": [{\"name\": \"x\"}]}", "tier x"},
        {"{\"tiers\": [{\"name\": \"x\", \"gbps\": -1}]}", "tier x"},
        {"{\"tiers\": [{\"name\": \"x\", \"gbps\": \"fast\"}]}", "tier x"},
        {"{\"models\": [{\"name\": \"llama-3-8b\", \"layers\": 0}]}", "llama-3-8b"},
        {"{\"models\": [{\"name\": \"llama-3-8b\", \"layers\": 9, \"kv_heads\": 8, \"head_dim\": "
         "64, "
         "\"window_layers\": 10, \"window_tokens\": 128}]}",
         "window_layers"},
        {"{\"models\": [{\"name\": \"llama-3-8b\", \"layers\": 9, \"kv_heads\": 8, \"head_dim\": "
         "64, "
         "\"window_layers\": 3}]}",
         "window_tokens"},
        {"{\"tiers\": [{\"name\": \"x\", \"gbps\": 1e999}]}", "line 1"},
        {"{\"tiers\": [{\"name\": \"x\", \"gbps\": 0}]}", "tier x"},
        {"{\"tiers\": [{\"name\": \"x\", \"gbps\": 1, \"latency_us\": \"100\"}]}", "latency_us"},
        {"{\"tiers\": [{\"name\": \"x\", \"gbps\": 1, \"dwpd\": true}]}", "dwpd"},
        {"{\"tiers\": [{\"name\": \"x\", \"gbps\": 1, \"usd_per_gb\": 1e308}]}", "usd_per_gb"},
        {"{\"tiers\": [{\"name\": \"x\", \"gbps\": 1, \"latency\": 5}]}", "latency_us"},
        {"{\"tiers\": [3]}", "entry 1"},
        {"{\"prefill\": [{\"model\": \"llama-3-8b\", \"us_per_token\": \"3\"}]}", "us_per_token"},
        {"{\"prefill\": [{\"model\": \"llama-3-8b\", \"us_per_token\": 0}]}", "us_per_token"},
        {"{\"prefill\": [{\"model\": \"llama-3-8b\", \"us_per_token\": 1e-300}]}", "0.001"},
        {"{\"prefill\": [{\"model\": \"x\"}]}", "needs \"us_per_token\""},
        {"{\"prefill\": [{\"model\": \"x\", \"us_per_token\": 1, \"ns_per_token2\": -5}]}",
         "ns_per_token2"},
        {"{\"models\": [{\"name\": \"x\", \"also\": 5}]}", "also"},
        {"{\"models\": [{\"name\": \"x\", \"layers\": \"8\"}]}", "layers"},
        {"{\"modles\": []}", "did you mean \"models\""},
        {"[]", "no JSON object"},
        {"{\"models\": [{\"name\": \"llama-3-8b\", \"layers\": 9, \"kv_heads\": 8, "
         "\"head_dim\": 100}]}",
         "multiple of 16"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        TOOL("--model", "llama-3-8b", "--data", file("bad.json", bad[i].text), "--json");
        assert_int_not_equal(run.code, 0);
        if (!strstr(run.err, bad[i].says))
            fail_msg("'%s' does not name %s", run.err, bad[i].says);
    }
}

#define SHAPE "\"num_key_value_heads\": 8, \"head_dim\": 128, \"num_attention_heads\": 64"

/* Options that would do nothing, files that are none, and names that would move a cursor. */
static void what_would_do_nothing_is_refused(void **state)
{
    (void)state;
    static const char *const idle[][2] = {{"--dram", "1TB"},
                                          {"--disk", "1TB"},
                                          {"--gpu-memory", "80GB"},
                                          {"--weights", "16GB"},
                                          {"--gpus", "2"}};
    for (size_t i = 0; i < sizeof(idle) / sizeof(idle[0]); i++) {
        TOOL("--model", "llama-3-8b", idle[i][0], idle[i][1]);
        assert_int_equal(run.code, 2);
        assert_non_null(strstr(run.err, idle[i][0]));
        assert_non_null(strstr(run.err, "--sessions"));
        TOOL("--model", "llama-3-8b", "--sessions", "3", idle[i][0], idle[i][1]);
        assert_int_equal(run.code, 0);
    }
    TOOL("--example", "--model", "llama-3-8b");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "--model"));
    TOOL("--model", "llama-3-8b", "--data",
         file("bad.json", "{\"tiers\": [{\"name\": \"x\", \"gbps\": \"1\"}]}"));
    assert_non_null(strstr(run.err, "bad.json: tier x: \"gbps\" is expected to be a number from"));
    TOOL("--example", "--gpus", "2");
    assert_int_equal(run.code, 2);
    TOOL("--config", dir);
    assert_non_null(strstr(run.err, "is a directory"));
    TOOL("--model", "llama-3-8b", "--data", dir);
    assert_non_null(strstr(run.err, "is a directory"));
    TOOL("--model", "llama-3-8b", "--data", "/nonexistent.json");
    assert_non_null(strstr(run.err, "/nonexistent.json: cannot be read: No such file"));
    TOOL("--config",
         file("config.json", "{\"model_type\": \"a\\u001b[31m\\u0007\\n\\u0085\", " SHAPE
                             ", \"num_hidden_layers\": 4}"));
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "a\\x1b[31m\\x07\\x0a\\xc2"));
    assert_null(strchr(run.out, 27));
    TOOL("--config",
         file("config.json", "{\"model_type\": \"\", " SHAPE ", \"num_hidden_layers\": 4}"));
    assert_non_null(strstr(run.out, "config.json: 4 layers"));
    TOOL("--model", "deepseek-v3");
    assert_non_null(strstr(run.out, "A latent is stored at 8 bits"));
    TOOL("--model", "llama-3-8b");
    assert_non_null(strstr(run.out, "int4: plain 4 bits"));
}

#define LLAMA                                                                         \
    "\"hidden_size\": 8192, \"num_attention_heads\": 64, \"num_hidden_layers\": 80, " \
    "\"num_key_value_heads\": 8"

static void a_config_json_is_a_model(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        double bf16;
    } good[] = {
        {"{\"model_type\": \"llama\", " LLAMA "}", 327680},
        {"{\"text_config\": {" LLAMA "}}", 327680},
        {"{\"num_hidden_layers\": 36, \"num_key_value_heads\": 8, \"head_dim\": 128}", 147456},
        {"{\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"hidden_size\": 256}", 2048},
        {"{\"num_hidden_layers\": 61, \"kv_lora_rank\": 512, \"qk_rope_head_dim\": 64}", 70272},
    };
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        TOOL("--config", file("config.json", good[i].text), "--prefill", "9000", "--json");
        json_t *document = json();
        near(number(document, "bytes_per_token", "bf16"), good[i].bf16);
        json_decref(document);
    }
}

/* Layers by kind, and what a session of 32,768 tokens takes: in bytes of bf16 a token and layer,
 * 2 x heads x dim x 2. */
static void windows_and_states_are_not_full_attention(void **state)
{
    (void)state;
#define WORDS(a, b) "\"layer_types\": [" a ", " b ", " a ", " b "]"
    static const struct {
        const char *text;
        int full, windows, window, states;
        double state_bytes;
    } cases[] = {
        /* every sixth is full */
        {"{\"num_hidden_layers\": 62, \"sliding_window\": 1024, \"sliding_window_pattern\": "
         "6, " SHAPE "}",
         10, 52, 1024, 0, 0},
        {"{\"text_config\": {\"num_hidden_layers\": 12, \"sliding_window\": 1024, "
         "\"sliding_window_pattern\": 6, " SHAPE "}}",
         2, 10, 1024, 0, 0},
        /* every second one, by the model's type */
        {"{\"model_type\": \"gemma2\", \"num_hidden_layers\": 42, \"sliding_window\": 4096, " SHAPE
         "}",
         21, 21, 4096, 0, 0},
        /* all of them; or none, since it says so; or from a layer on */
        {"{\"num_hidden_layers\": 32, \"sliding_window\": 4096, " SHAPE "}", 0, 32, 4096, 0, 0},
        {"{\"num_hidden_layers\": 32, \"sliding_window\": null, " SHAPE "}", 32, 0, 0, 0, 0},
        {"{\"num_hidden_layers\": 28, \"sliding_window\": 4096, \"use_sliding_window\": false, "
         "\"max_window_layers\": 20, " SHAPE "}",
         28, 0, 0, 0, 0},
        {"{\"num_hidden_layers\": 28, \"sliding_window\": 4096, \"use_sliding_window\": true, "
         "\"max_window_layers\": 20, " SHAPE "}",
         20, 8, 4096, 0, 0},
        /* words for each layer */
        {"{\"num_hidden_layers\": 4, \"sliding_window\": 128, " WORDS(
             "\"sliding_attention\"", "\"full_attention\"") ", " SHAPE "}",
         2, 2, 128, 0, 0},
        {"{\"num_hidden_layers\": 4, \"attention_chunk_size\": 8192, " WORDS(
             "\"chunked_attention\"", "\"full_attention\"") ", " SHAPE "}",
         2, 2, 8192, 0, 0},
        {"{\"num_hidden_layers\": 4, \"linear_num_key_heads\": 16, \"linear_num_value_heads\": 32, "
         "\"linear_key_head_dim\": 128, \"linear_value_head_dim\": 128, "
         "\"linear_conv_kernel_dim\": 4, " WORDS("\"linear_attention\"",
                                                 "\"full_attention\"") ", " SHAPE "}",
         2, 0, 0, 2, 2 * (32 * 128 * 128 * 4.0 + 4 * (2 * 16 * 128 + 32 * 128) * 2.0)},
        /* every fourth is full, the others keep states */
        {"{\"num_hidden_layers\": 48, \"full_attention_interval\": 4, " SHAPE "}", 12, 0, 0, 36, 0},
        {"{\"num_hidden_layers\": 32, \"attn_layer_period\": 8, \"attn_layer_offset\": 4, "
         "\"hidden_size\": 4096, \"mamba_d_state\": 16, \"mamba_d_conv\": 4, \"mamba_expand\": "
         "2, " SHAPE "}",
         4, 0, 0, 28, 28 * (8192 * 16 * 4.0 + 8192 * 4 * 2.0)},
        /* a letter for each layer; those without any cache do not count */
        {"{\"num_hidden_layers\": 8, \"hybrid_override_pattern\": \"M-M*-M-E\", " SHAPE "}", 1, 0,
         0, 3, 0},
        /* the last ones use the cache of others */
        {"{\"num_hidden_layers\": 30, \"num_kv_shared_layers\": 10, " SHAPE "}", 20, 0, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        TOOL("--config", file("config.json", cases[i].text), "--prefill", "9000", "--json");
        json_t *document = json();
        const double layer = 2 * 8 * 128 * 2, context = 32768;
        print_message("           %zu: %s\n", i,
                      json_string_value(json_object_get(document, "note")));
        near(number(document, "layers", "window"), cases[i].windows);
        near(number(document, "layers", "window_tokens"), cases[i].window);
        near(number(document, "layers", "state"), cases[i].states);
        near(number(document, "layers", "all"), cases[i].full + cases[i].windows + cases[i].states);
        near(number(document, "layers", "state_bytes"), cases[i].state_bytes);
        near(number(document, "bytes_per_token", "bf16"),
             (layer * (cases[i].full * context + cases[i].windows * (double)cases[i].window) +
              cases[i].state_bytes) /
                 context);
        json_decref(document);
    }
    /* what is not understood is counted as full, and said */
    static const char *const unsure[][2] = {
        {"{\"num_hidden_layers\": 4, " WORDS("\"new_attention\"", "\"full_attention\"") ", " SHAPE
                                                                                        "}",
         "layer_types"},
        {"{\"num_hidden_layers\": 5, " WORDS("\"full_attention\"", "\"full_attention\"") ", " SHAPE
                                                                                         "}",
         "layer_types"},
        {"{\"num_hidden_layers\": 4, " WORDS("\"sliding_attention\"",
                                             "\"full_attention\"") ", " SHAPE "}",
         "sliding_window"},
        {"{\"num_hidden_layers\": 4, \"hybrid_override_pattern\": \"MM\", " SHAPE "}",
         "hybrid_override_pattern"},
        {"{\"num_hidden_layers\": 4, \"attention_chunk_size\": 8192, " SHAPE "}",
         "attention_chunk_size"}};
    for (size_t i = 0; i < sizeof(unsure) / sizeof(unsure[0]); i++) {
        TOOL("--config", file("config.json", unsure[i][0]), "--prefill", "9000", "--json");
        json_t *document = json();
        near(number(document, "layers", "window") + number(document, "layers", "state"), 0);
        const char *note = json_string_value(json_object_get(document, "note"));
        if (!strstr(note, unsure[i][1]))
            fail_msg("%s: '%s'", unsure[i][1], note);
        json_decref(document);
    }
    TOOL("--config", file("config.json", cases[0].text), "--prefill", "9");
    assert_non_null(strstr(run.out, "52 of the layers see the last 1024 tokens"));
}

/* Models whose layers are not all of full attention, each in its own words. */
static void hybrids_are_counted_by_their_layers(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int full, windows, window, states;
        double layer, state_bytes; /* a token and layer; all states */
    } cases[] = {
        {"{\"model_type\": \"bamba\", \"attn_layer_indices\": [9, 18, 27], "
         "\"hidden_size\": 4096, \"num_attention_heads\": 32, "
         "\"num_hidden_layers\": 32, \"num_key_value_heads\": 8, "
         "\"mamba_d_conv\": 4, \"mamba_d_head\": 64, \"mamba_d_state\": 128, "
         "\"mamba_expand\": 2, \"mamba_n_groups\": 1, \"mamba_n_heads\": 128}",
         3, 0, 0, 29, 4096, 29 * (8192 * 128 * 4.0 + 8192 * 4 * 2)},
        {"{\"model_type\": \"zamba2\", \"hidden_size\": 2560, "
         "\"num_hidden_layers\": 54, \"num_attention_heads\": 32, "
         "\"num_key_value_heads\": 32, \"attention_head_dim\": 160, "
         "\"attention_hidden_size\": 5120, \"hybrid_layer_ids\": [6, 12, 18, "
         "24, 30, 36, 42, 47, 51], \"mamba_d_conv\": 4, \"mamba_d_state\": 64, "
         "\"mamba_expand\": 2, \"mamba_ngroups\": 1, \"n_mamba_heads\": 80}",
         9, 0, 0, 45, 20480, 54 * (5120 * 64 * 4.0 + 5120 * 4 * 2)},
        {"{\"model_type\": \"recurrent_gemma\", \"attention_window_size\": "
         "2048, \"block_types\": [\"recurrent\", \"recurrent\", \"attention\"], "
         "\"head_dim\": 256, \"hidden_size\": 2560, \"lru_width\": 2560, "
         "\"num_attention_heads\": 10, \"num_hidden_layers\": 26, "
         "\"num_key_value_heads\": 1, \"conv1d_width\": 4}",
         0, 8, 2048, 18, 1024, 18 * (2560 * 4.0 + 4 * 2560 * 2)},
        {"{\"model_type\": \"minimax_text_01\", \"hidden_size\": 6144, "
         "\"head_dim\": 128, \"num_attention_heads\": 64, \"num_hidden_layers\": "
         "8, \"num_key_value_heads\": 8, \"attn_type_list\": [0, 0, 0, 0, 0, 0, "
         "0, 1]}",
         1, 0, 0, 7, 4096, 7 * (64 * 128 * 128 * 4.0)},
        {"{\"model_type\": \"lfm2\", \"hidden_size\": 2048, "
         "\"num_attention_heads\": 32, \"num_hidden_layers\": 16, "
         "\"num_key_value_heads\": 8, \"conv_L_cache\": 3, \"full_attn_idxs\": "
         "[2, 5, 8, 10, 12, 14]}",
         6, 0, 0, 10, 2048, 10 * (3 * 2048 * 2.0)},
        {"{\"model_type\": \"kimi_linear\", \"hidden_size\": 2304, \"head_dim\": "
         "72, \"num_attention_heads\": 32, \"num_hidden_layers\": 27, "
         "\"num_key_value_heads\": 32, \"kv_lora_rank\": 512, "
         "\"qk_nope_head_dim\": 128, \"qk_rope_head_dim\": 64, \"v_head_dim\": "
         "128, \"linear_attn_config\": {\"full_attn_layers\": [4, 8, 12, 16, "
         "20, 24, 27], \"head_dim\": 128, \"kda_layers\": [1, 2, 3, 5, 6, 7, 9, "
         "10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26], \"num_heads\": "
         "32, \"short_conv_kernel_size\": 4}}",
         7, 0, 0, 20, 1152, 20 * (4096 * 128 * 4.0 + 3 * 4 * 4096 * 2)},
        {"{\"model_type\": \"nemotron_h\", \"hybrid_override_pattern\": "
         "\"M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-\", "
         "\"hidden_size\": 4096, \"num_hidden_layers\": 52, "
         "\"attention_head_dim\": 128, \"head_dim\": 128, "
         "\"num_attention_heads\": 32, \"num_key_value_heads\": 8, "
         "\"ssm_state_size\": 128, \"mamba_num_heads\": 128, \"mamba_head_dim\": "
         "64, \"n_groups\": 8, \"conv_kernel\": 4}",
         4, 0, 0, 24, 4096, 24 * (8192 * 128 * 4.0 + 4 * (8192 + 2 * 8 * 128) * 2)},
        {"{\"model_type\": \"nemotron-nas\", \"hidden_size\": 8192, "
         "\"num_attention_heads\": 64, \"num_key_value_heads\": null, "
         "\"num_hidden_layers\": 2, \"block_configs\": [{\"attention\": "
         "{\"n_heads_in_group\": 8, \"no_op\": false}}, {\"attention\": "
         "{\"n_heads_in_group\": null, \"no_op\": true}}]}",
         1, 0, 0, 0, 4096, 0},
        {"{\"model_type\": \"falcon\", \"hidden_size\": 4544, \"multi_query\": "
         "true, \"new_decoder_architecture\": false, \"num_attention_heads\": "
         "71, \"num_hidden_layers\": 32, \"num_kv_heads\": 71}",
         32, 0, 0, 0, 256, 0},
        {"{\"model_type\": \"mllama\", \"text_config\": {\"model_type\": "
         "\"mllama_text_model\", \"hidden_size\": 4096, \"num_attention_heads\": "
         "32, \"num_hidden_layers\": 40, \"num_key_value_heads\": 8, "
         "\"cross_attention_layers\": [3, 8, 13, 18, 23, 28, 33, 38]}}",
         32, 0, 0, 0, 4096, 0},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const double context = 32768;
        TOOL("--config", file("config.json", cases[i].text), "--prefill", "9000", "--json");
        json_t *document = json();
        print_message("           %zu: %s\n", i,
                      json_string_value(json_object_get(document, "note")));
        near(number(document, "layers", "all"), cases[i].full + cases[i].windows + cases[i].states);
        near(number(document, "layers", "window"), cases[i].windows);
        near(number(document, "layers", "state"), cases[i].states);
        near(number(document, "layers", "state_bytes"), cases[i].state_bytes);
        near(number(document, "bytes_per_token", "bf16"),
             (cases[i].layer *
                  (cases[i].full * context + cases[i].windows * (double)cases[i].window) +
              cases[i].state_bytes) /
                 context);
        json_decref(document);
    }
}

/* Never silently: what hints at other layers, at a cache on top, or is of a wrong kind. */
static void what_a_config_hints_at_is_named(void **state)
{
    (void)state;
#define FOUR "{\"num_hidden_layers\": 4, " SHAPE ", "
    static const char *const hints[][2] = {
        {FOUR "\"mamba_d_state\": 16}", "mamba"},
        {FOUR "\"ssm_cfg\": {\"a\": 1}}", "ssm_"},
        {FOUR "\"conv_kernel_size\": 4}", "conv_"},
        {FOUR "\"linear_num_heads\": 4}", "linear_"},
        {FOUR "\"attention_types\": [[\"global\", \"local\"]]}", "attention_type"},
        {FOUR "\"attn_layer_indices\": [7]}", "attn_layer_indices"},
        {FOUR "\"block_types\": [\"new\"]}", "block_types"},
        {FOUR "\"attn_type_list\": [1]}", "attn_type_list"},
        {FOUR "\"block_configs\": [{}]}", "block_configs"},
        {FOUR "\"model_type\": \"brand_new\"}", "model_type"},
        {FOUR "\"index_head_dim\": 128}", "indexer"},
        {FOUR "\"cross_attention_layers\": [3]}", "images"},
        {FOUR "\"sliding_window\": \"8\"}", "sliding_window"},
        {FOUR "\"sliding_window\": 8.5}", "sliding_window"},
        {FOUR "\"sliding_window\": true}", "sliding_window"},
        {FOUR "\"sliding_window\": 1000000000000000000}", "sliding_window"},
    };
    static const char *const quiet[] = {
        FOUR "\"model_type\": \"llama\", \"sliding_window\": null}",
        FOUR "\"model_type\": \"qwen3\", \"sliding_window\": 0, \"conv_size\": 0}",
        FOUR "\"model_type\": \"glm4\", \"linear_attn\": false, \"block_types\": []}"};
    for (size_t i = 0; i < sizeof(hints) / sizeof(hints[0]); i++) {
        TOOL("--config", file("config.json", hints[i][0]), "--json");
        json_t *document = json();
        const char *note = json_string_value(json_object_get(document, "note"));
        if (!strstr(note, hints[i][1]))
            fail_msg("%s: '%s'", hints[i][0], note);
        near(number(document, "layers", "state") + number(document, "layers", "window"), 0);
        json_decref(document);
    }
    for (size_t i = 0; i < sizeof(quiet) / sizeof(quiet[0]); i++) {
        TOOL("--config", file("config.json", quiet[i]));
        assert_null(strstr(run.out, "note:"));
    }
}

/* Configurations as they are published, cut down to what is read. */
static void families_of_models(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int full, windows;
        double window, layer; /* tokens; bytes a token and layer */
    } cases[] = {
        {"{\"model_type\": \"llama\", \"hidden_size\": 4096, \"num_attention_heads\": 32, "
         "\"num_hidden_layers\": 32, \"num_key_value_heads\": 8}",
         32, 0, 0, 4096},
        {"{\"model_type\": \"qwen3\", \"head_dim\": 128, \"hidden_size\": 5120, "
         "\"max_window_layers\": 64, \"num_attention_heads\": 64, \"num_hidden_layers\": 64, "
         "\"num_key_value_heads\": 8, \"sliding_window\": null, \"use_sliding_window\": false}",
         64, 0, 0, 4096},
        {"{\"model_type\": \"qwen2\", \"hidden_size\": 3584, \"max_window_layers\": 28, "
         "\"num_attention_heads\": 28, \"num_hidden_layers\": 28, \"num_key_value_heads\": 4, "
         "\"sliding_window\": 131072, \"use_sliding_window\": false}",
         28, 0, 0, 2048},
        {"{\"model_type\": \"gemma3\", \"text_config\": {\"model_type\": \"gemma3_text\", "
         "\"head_dim\": 128, \"hidden_size\": 5376, \"num_attention_heads\": 32, "
         "\"num_hidden_layers\": 62, \"num_key_value_heads\": 16, \"sliding_window\": 1024}}",
         10, 52, 1024, 8192},
        {"{\"model_type\": \"gemma3\", \"text_config\": {\"model_type\": \"gemma3_text\", "
         "\"hidden_size\": 2560, \"num_hidden_layers\": 34, \"sliding_window\": 1024}}",
         5, 29, 1024, 4096},
        {"{\"model_type\": \"gemma3_text\", \"_sliding_window_pattern\": 6, \"head_dim\": 256, "
         "\"num_attention_heads\": 4, \"num_hidden_layers\": 26, \"num_key_value_heads\": 1, "
         "\"sliding_window\": 512}",
         4, 22, 512, 1024},
        {"{\"model_type\": \"deepseek_v3\", \"kv_lora_rank\": 512, \"num_attention_heads\": 128, "
         "\"num_hidden_layers\": 61, \"num_key_value_heads\": 128, \"qk_nope_head_dim\": 128, "
         "\"qk_rope_head_dim\": 64, \"v_head_dim\": 128}",
         61, 0, 0, 1152},
        {"{\"model_type\": \"gpt_oss\", \"head_dim\": 64, \"hidden_size\": 2880, "
         "\"layer_types\": [\"sliding_attention\", \"full_attention\", \"sliding_attention\", "
         "\"full_attention\", \"sliding_attention\", \"full_attention\"], "
         "\"num_attention_heads\": 64, \"num_hidden_layers\": 6, \"num_key_value_heads\": 8, "
         "\"sliding_window\": 128}",
         3, 3, 128, 2048},
        {"{\"model_type\": \"mistral\", \"hidden_size\": 4096, \"num_attention_heads\": 32, "
         "\"num_hidden_layers\": 32, \"num_key_value_heads\": 8, \"sliding_window\": 4096}",
         0, 32, 4096, 4096},
        {"{\"model_type\": \"mistral\", \"head_dim\": 128, \"hidden_size\": 5120, "
         "\"num_attention_heads\": 32, \"num_hidden_layers\": 40, \"num_key_value_heads\": 8, "
         "\"sliding_window\": null}",
         40, 0, 0, 4096},
        {"{\"model_type\": \"cohere2\", \"head_dim\": 128, \"num_attention_heads\": 32, "
         "\"num_hidden_layers\": 32, \"num_key_value_heads\": 8, \"sliding_window\": 4096}",
         8, 24, 4096, 4096},
        {"{\"model_type\": \"exaone4\", \"head_dim\": 128, \"num_attention_heads\": 40, "
         "\"num_hidden_layers\": 64, \"num_key_value_heads\": 8, \"sliding_window\": 4096, "
         "\"sliding_window_pattern\": \"LLLG\"}",
         16, 48, 4096, 4096},
        /* a type that nobody knows: never less than it may take */
        {"{\"model_type\": \"brand_new\", \"head_dim\": 128, \"num_hidden_layers\": 8, "
         "\"num_key_value_heads\": 8, \"sliding_window\": 4096}",
         8, 0, 0, 4096},
        {"{\"head_dim\": 128, \"num_hidden_layers\": 8, \"num_key_value_heads\": 8, "
         "\"sliding_window\": 4096, \"sliding_window_pattern\": \"GLX\"}",
         8, 0, 0, 4096},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const double context = 32768;
        TOOL("--config", file("config.json", cases[i].text), "--prefill", "9000", "--json");
        json_t *document = json();
        print_message("           %zu: %s\n", i,
                      json_string_value(json_object_get(document, "note")));
        near(number(document, "layers", "all"), cases[i].full + cases[i].windows);
        near(number(document, "layers", "window"), cases[i].windows);
        near(number(document, "bytes_per_token", "bf16"),
             cases[i].layer * (cases[i].full * context + cases[i].windows * cases[i].window) /
                 context);
        json_decref(document);
    }
}

/* A window's blocks are stored as they pass: drives and prices see all layers. */
static void what_is_stored_is_all_of_it(void **state)
{
    (void)state;
    TOOL("--config",
         file("config.json", "{\"num_hidden_layers\": 12, \"sliding_window\": 1024, "
                             "\"sliding_window_pattern\": 6, " SHAPE "}"),
         "--prefill", "9000", "--traffic", "1000", "--json");
    json_t *windowed = json();
    TOOL("--config", file("config.json", "{\"num_hidden_layers\": 12, " SHAPE "}"), "--prefill",
         "9000", "--traffic", "1000", "--json");
    json_t *full = json();
    double life[2], usd[2];
    for (int i = 0; i < 2; i++) {
        const json_t *drive = tier(i ? full : windowed, "nvme-gen4");
        life[i] = json_number_value(json_object_get(drive, "life_years"));
        usd[i] = json_number_value(json_object_get(drive, "usd_per_million_tokens"));
    }
    /* a record of 2 layers and one of 10 have more padding than one of 12 */
    assert_true(life[0] <= life[1] && life[0] > 0.9 * life[1]);
    assert_true(usd[0] >= usd[1] && usd[0] < 1.1 * usd[1]);
    /* but a long session is loaded with less */
    assert_true(number(windowed, "break_even_gbps", "kv4") <
                0.3 * number(full, "break_even_gbps", "kv4"));
    json_decref(windowed);
    json_decref(full);
}

static void what_a_config_lacks_is_named(void **state)
{
    (void)state;
    static const struct {
        const char *text, *says;
    } bad[] = {
        {"{}", "num_hidden_layers"},
        {"{\"num_hidden_layers\": -3}", "num_hidden_layers"},
        {"{\"num_hidden_layers\": 1e9}", "num_hidden_layers"},
        {"{\"num_hidden_layers\": 3}", "num_key_value_heads"},
        {"{\"num_hidden_layers\": 3, \"num_key_value_heads\": 8}", "num_attention_heads"},
        {"{\"num_hidden_layers\": 3, \"num_attention_heads\": 8}", "hidden_size"},
        {"{\"num_hidden_layers\": 3, \"num_attention_heads\": 8, \"hidden_size\": 4}", "head_dim"},
        {"{\"num_hidden_layers\": 3, \"kv_lora_rank\": 512}", "qk_rope_head_dim"},
        {"{\"num_hidden_layers\": 3, \"num_key_value_heads\": 8, \"head_dim\": 72}", "multiple"},
        {"[1, 2", "line 1"},
        {"[1, 2]", "no JSON object"},
        {"{\"num_hidden_layers\": null}", "num_hidden_layers"},
        {"{\"num_hidden_layers\": 99999999}", "num_hidden_layers"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        TOOL("--config", file("config.json", bad[i].text));
        assert_int_equal(run.code, 2);
        if (!strstr(run.err, bad[i].says))
            fail_msg("'%s' does not name %s", run.err, bad[i].says);
    }
}

static void wrong_words_get_the_nearest(void **state)
{
    (void)state;
    TOOL("--model", "lama-3-70b");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "did you mean 'llama-3-70b'"));
    TOOL("--model", "llama-3-8b", "--prefill", "0");
    assert_int_equal(run.code, 2);
    TOOL("--model", "llama-3-8b", "--block", "20");
    assert_int_equal(run.code, 2);
    TOOL("--model", "llama-3-8b", "--config", "x");
    assert_int_equal(run.code, 2);
    TOOL("--json");
    json_t *document = json();
    assert_true(json_array_size(json_object_get(document, "models")) > 15);
    json_decref(document);
}

static int make_dir(void **state)
{
    (void)state;
    rig_dir_make(dir, sizeof(dir));
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    rig_dir_remove(dir);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(seventy_billion),
        cmocka_unit_test(bytes_are_those_of_the_shape),
        cmocka_unit_test(records_are_the_librarys),
        cmocka_unit_test(the_published_example),
        cmocka_unit_test(drives_wear_out),
        cmocka_unit_test(a_users_file_adds_and_replaces),
        cmocka_unit_test(bad_data_is_named),
        cmocka_unit_test(what_would_do_nothing_is_refused),
        cmocka_unit_test(a_config_json_is_a_model),
        cmocka_unit_test(families_of_models),
        cmocka_unit_test(windows_and_states_are_not_full_attention),
        cmocka_unit_test(hybrids_are_counted_by_their_layers),
        cmocka_unit_test(what_a_config_hints_at_is_named),
        cmocka_unit_test(what_is_stored_is_all_of_it),
        cmocka_unit_test(what_a_config_lacks_is_named),
        cmocka_unit_test(wrong_words_get_the_nearest),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
