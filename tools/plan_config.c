/* A model's shape from its config.json, as Hugging Face's transformers writes it.
 *
 * Which layers have a cache for all tokens, which for a window of them, which a state instead, is
 * said in a dozen ways; those that are known are read, and what is not is named in the note: never
 * a layer counted as less than it may take. Threads: one. Does not print.
 */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/codec.h"
#include "plan_data.h"

#define LAYERS_MAX (KVT_PARTS_MAX / 2)

enum layer_kind { LAYER_FULL, LAYER_WINDOW, LAYER_STATE, LAYER_NONE /* no cache at all */ };

static int missing(const char *path, const char *what, char *error, size_t len)
{
    snprintf(error, len, "%s: \"%s\" is missing, or no positive whole number in range", path, what);
    return -1;
}

static int mla_from(const char *path, const json_t *config, struct plan_model *out, char *error,
                    size_t len)
{
    int64_t rank = plan_whole(config, "kv_lora_rank", KVT_HEAD_DIM_MAX);
    int64_t rope = plan_whole(config, "qk_rope_head_dim", KVT_HEAD_DIM_MAX);

    if (rank < 1)
        return missing(path, "kv_lora_rank", error, len);
    if (rope < 1)
        return missing(path, "qk_rope_head_dim", error, len);
    out->kv_heads = 1;
    out->latent_dim = (uint32_t)(rank + rope);
    return 0;
}

static bool is_type(const json_t *config, const char *prefix)
{
    const char *type = json_string_value(json_object_get(config, "model_type"));

    return type && !strncmp(type, prefix, strlen(prefix));
}

static void tell(struct plan_model *out, const char *what, const char *then)
{
    snprintf(out->note, sizeof(out->note), "%.80s: %.150s", what, then);
}

static int heads_from(const char *path, const json_t *config, struct plan_model *out, char *error,
                      size_t len)
{
    int64_t heads = plan_whole(config, "num_attention_heads", 65536);
    int64_t kv_heads = plan_whole(config, "num_key_value_heads", KVT_HEADS_MAX);
    int64_t dim = plan_whole(config, "head_dim", KVT_HEAD_DIM_MAX);
    int64_t hidden = plan_whole(config, "hidden_size", 1 << 24);

    if (is_type(config, "gemma3_text") && kv_heads == 0 && heads == 0 && dim == 0) {
        /* the small ones are published without: transformers' Gemma3TextConfig fills them in */
        kv_heads = 4;
        dim = 256;
        tell(out, "heads", "not in the configuration: 4 of 256, as transformers fills them in");
    }
    if (kv_heads == 0) /* as transformers has it: without groups, as many as there are heads */
        kv_heads = heads <= KVT_HEADS_MAX ? heads : -1;
    if (kv_heads < 1)
        return missing(path, "num_key_value_heads", error, len);
    if (dim == 0 && heads < 1)
        return missing(path, "num_attention_heads", error, len);
    if (dim == 0 && hidden < 1)
        return missing(path, "hidden_size", error, len);
    if (dim == 0)
        dim = hidden / heads;
    if (dim < 1)
        return missing(path, "head_dim", error, len);
    out->kv_heads = (uint32_t)kv_heads;
    out->head_dim = (uint32_t)dim;
    return 0;
}

/* ---- kinds of layers ------------------------------------------------------------------------- */

/* -1: a word that is not known. */
static int kind_of(const char *word)
{
    static const struct {
        const char *word;
        int kind;
    } words[] = {{"full_attention", LAYER_FULL},
                 {"attention", LAYER_FULL},
                 {"global_attention", LAYER_FULL},
                 {"hybrid", LAYER_FULL},
                 {"sliding_attention", LAYER_WINDOW},
                 {"chunked_attention", LAYER_WINDOW},
                 {"local_attention", LAYER_WINDOW},
                 {"linear_attention", LAYER_STATE},
                 {"mamba", LAYER_STATE},
                 {"mamba2", LAYER_STATE},
                 {"conv", LAYER_STATE},
                 {"recurrent", LAYER_STATE},
                 {"mlp", LAYER_NONE},
                 {"moe", LAYER_NONE}};

    for (size_t i = 0; word && i < KVT_ARRAY_LEN(words); i++)
        if (!strcmp(word, words[i].word))
            return words[i].kind;
    return -1;
}

/* A list with a word for each layer. 0; 1: there is none. */
static int kinds_from_list(const json_t *config, struct plan_model *out, uint8_t *kinds)
{
    static const char *const keys[] = {"layer_types", "layers_block_type"};
    json_t *word;
    size_t i;

    for (size_t k = 0; k < KVT_ARRAY_LEN(keys); k++) {
        const json_t *list = json_object_get(config, keys[k]);
        if (!json_is_array(list))
            continue;
        if (json_array_size(list) != out->layers) {
            tell(out, keys[k],
                 "has not as many words as there are layers: all are counted as full");
            return 0;
        }
        json_array_foreach(list, i, word)
        {
            int kind = kind_of(json_string_value(word));
            kinds[i] = kind < 0 ? LAYER_FULL : (uint8_t)kind;
            if (kind < 0)
                tell(out, keys[k],
                     "has words that are not known: those layers are counted as full");
        }
        return 0;
    }
    return 1;
}

/* One letter a layer: M a state, * attention, - and E neither. 0; 1: there is none. */
static int kinds_from_letters(const json_t *config, struct plan_model *out, uint8_t *kinds)
{
    const char *letters = json_string_value(json_object_get(config, "hybrid_override_pattern"));

    if (!letters)
        return 1;
    if (strlen(letters) != out->layers || strspn(letters, "M*-E") != strlen(letters)) {
        tell(out, "hybrid_override_pattern", "is not understood: all layers are counted as full");
        return 0;
    }
    for (uint32_t i = 0; i < out->layers; i++)
        kinds[i] = letters[i] == 'M' ? LAYER_STATE : letters[i] == '*' ? LAYER_FULL : LAYER_NONE;
    return 0;
}

/* Every n-th layer is full, the others are `other`. */
static void every(const struct plan_model *out, uint8_t *kinds, int64_t n, int64_t offset,
                  enum layer_kind other)
{
    for (uint32_t i = 0; i < out->layers; i++)
        kinds[i] = (int64_t)i % n == offset ? LAYER_FULL : (uint8_t)other;
}

/* Every how many-th layer is full, where the others have a window: by the configuration, or, since
 * many leave it to the program, by the model's type. 0: all have the window; -1: not known. */
static int64_t window_pattern(const json_t *config)
{
    static const struct {
        const char *type;
        int64_t pattern;
    } types[] = {{"gemma2", 2},  {"gemma3", 6}, {"cohere2", 4}, {"mistral", 0},
                 {"mixtral", 0}, {"phi3", 0},   {"phimoe", 0},  {"starcoder2", 0},
                 {"qwen2", 0},   {"qwen3", 0},  {"llama", 0},   {"ministral", 0}};
    static const char *const keys[] = {"sliding_window_pattern", "_sliding_window_pattern"};

    for (size_t i = 0; i < KVT_ARRAY_LEN(keys); i++) {
        const char *letters = json_string_value(json_object_get(config, keys[i]));
        int64_t pattern = plan_whole(config, keys[i], LAYERS_MAX);
        size_t local = letters ? strspn(letters, "L") : 0;
        if (letters && local > 0 && !strcmp(letters + local, "G")) /* LLLG */
            return (int64_t)local + 1;
        if (letters)
            return -1;
        if (pattern > 0)
            return pattern;
    }
    for (size_t i = 0; i < KVT_ARRAY_LEN(types); i++)
        if (is_type(config, types[i].type))
            return types[i].pattern;
    return json_object_get(config, "model_type") ? -1 : 0;
}

/* Rules by numbers, in the words of the models that brought them. */
static void kinds_from_rules(const json_t *config, struct plan_model *out, uint8_t *kinds)
{
    const json_t *use = json_object_get(config, "use_sliding_window");
    int64_t window = plan_whole(config, "sliding_window", PLAN_WINDOW_MAX);
    int64_t pattern = window_pattern(config);
    int64_t interval = plan_whole(config, "full_attention_interval", LAYERS_MAX);
    int64_t period = plan_whole(config, "attn_layer_period", LAYERS_MAX);
    int64_t first = plan_whole(config, "max_window_layers", 1 << 20);
    const json_t *offset = json_object_get(config, "attn_layer_offset");

    if (interval > 0) {
        every(out, kinds, interval, interval - 1, LAYER_STATE);
    } else if (period > 0 && json_is_integer(offset) && json_integer_value(offset) >= 0 &&
               json_integer_value(offset) < period) {
        every(out, kinds, period, json_integer_value(offset), LAYER_STATE);
    } else if (window > 0 && !json_is_false(use)) {
        if (pattern < 0)
            tell(out, "sliding_window",
                 "which layers have it is not said: all are counted as full");
        else if (pattern > 0)
            every(out, kinds, pattern, pattern - 1, LAYER_WINDOW);
        else
            for (uint32_t i = 0; i < out->layers; i++)
                kinds[i] = json_is_true(use) && (int64_t)i < first ? LAYER_FULL : LAYER_WINDOW;
    } else if (plan_whole(config, "attention_chunk_size", PLAN_WINDOW_MAX) > 0) {
        tell(out, "attention_chunk_size",
             "which layers have it is not said: all are counted as full");
    }
}

/* ---- states ---------------------------------------------------------------------------------- */

/* Bytes of one layer's state: float32, with 16-bit columns for the convolution; 0: not known. */
static double state_of(const json_t *config)
{
    double hidden = (double)plan_whole(config, "hidden_size", 1 << 24);
    double k_heads = (double)plan_whole(config, "linear_num_key_heads", 4096);
    double v_heads = (double)plan_whole(config, "linear_num_value_heads", 4096);
    double k_dim = (double)plan_whole(config, "linear_key_head_dim", 4096);
    double v_dim = (double)plan_whole(config, "linear_value_head_dim", 4096);
    double taps = (double)plan_whole(config, "linear_conv_kernel_dim", 64);
    double d_state = (double)plan_whole(config, "mamba_d_state", 65536);
    double d_conv = (double)plan_whole(config, "mamba_d_conv", 64);
    double expand = (double)plan_whole(config, "mamba_expand", 64);

    if (v_heads > 0 && k_heads > 0 && k_dim > 0 && v_dim > 0)
        return v_heads * k_dim * v_dim * 4 +
               (taps > 0 ? taps * (2 * k_heads * k_dim + v_heads * v_dim) * 2 : 0);
    if (hidden > 0 && d_state > 0 && expand > 0)
        return expand * hidden * d_state * 4 + (d_conv > 0 ? expand * hidden * d_conv * 2 : 0);
    return 0;
}

static void count_kinds(const json_t *config, struct plan_model *out, const uint8_t *kinds)
{
    uint32_t of[LAYER_NONE + 1] = {0};
    int64_t window = plan_whole(config, "sliding_window", PLAN_WINDOW_MAX);
    int64_t chunk = plan_whole(config, "attention_chunk_size", PLAN_WINDOW_MAX);
    int64_t shared = plan_whole(config, "num_kv_shared_layers", LAYERS_MAX);

    for (uint32_t i = 0; i < out->layers; i++) /* the last ones use the cache of others */
        of[shared > 0 && (int64_t)i >= (int64_t)out->layers - shared ? LAYER_NONE : kinds[i]]++;
    window = window > 0 ? window : chunk;
    if (of[LAYER_WINDOW] > 0 && window <= 0) {
        tell(out, "sliding_window", "is missing: layers with a window are counted as full");
        of[LAYER_FULL] += of[LAYER_WINDOW];
        of[LAYER_WINDOW] = 0;
    }
    if (of[LAYER_FULL] + of[LAYER_WINDOW] == 0) {
        tell(out, "no layer", "of this model has a cache that grows: all are counted as full");
        return;
    }
    out->layers -= of[LAYER_NONE];
    out->window_layers = of[LAYER_WINDOW];
    out->window_tokens = of[LAYER_WINDOW] ? (uint32_t)window : 0;
    out->state_layers = of[LAYER_STATE];
    out->state_bytes = of[LAYER_STATE] * state_of(config);
    if (of[LAYER_STATE] && out->state_bytes <= 0 && !out->note[0])
        tell(out, "states",
             "their size cannot be told from the configuration: they are not counted");
}

int plan_config_model(const char *path, struct plan_model *out, char *error, size_t len)
{
    uint8_t kinds[LAYERS_MAX] = {LAYER_FULL};
    json_error_t why;
    json_t *root = json_load_file(path, 0, &why);
    const json_t *config = root;

    if (!root) {
        if (why.line > 0)
            snprintf(error, len, "%s, line %d: %s", path, why.line, why.text);
        else
            snprintf(error, len, "%s: no configuration of a model: %s", path, why.text);
        return -1;
    }
    if (json_is_object(json_object_get(root, "text_config"))) /* models that also see or hear */
        config = json_object_get(root, "text_config");
    const char *name = json_string_value(json_object_get(root, "_name_or_path"));
    if (!name || !*name)
        name = json_string_value(json_object_get(root, "model_type"));
    *out = (struct plan_model){.layers = 0};
    snprintf(out->name, sizeof(out->name), "%.60s", name ? name : path);
    int64_t layers = plan_whole(config, "num_hidden_layers", LAYERS_MAX);
    int rc = layers < 1 ? missing(path, "num_hidden_layers", error, len) : 0;
    out->layers = rc ? 0 : (uint32_t)layers;
    if (!rc && json_object_get(config, "kv_lora_rank"))
        rc = mla_from(path, config, out, error, len);
    else if (!rc)
        rc = heads_from(path, config, out, error, len);
    if (!rc && kinds_from_list(config, out, kinds) && kinds_from_letters(config, out, kinds))
        kinds_from_rules(config, out, kinds);
    if (!rc)
        count_kinds(config, out, kinds);
    if (!rc)
        rc = plan_shape_check(out, path, error, len);
    json_decref(root);
    return rc;
}
