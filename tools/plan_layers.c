/* Which layers of a config.json have a cache for all tokens, which for a window of them, which a
 * state instead, and what a state takes.
 *
 * It is said in a dozen ways; those that are known are read, and what is not is named in the note:
 * never a layer counted as less than it may take. Threads: one. Does not print.
 */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/codec.h"
#include "plan_data.h"

#define LAYERS_MAX (KVT_PARTS_MAX / 2)

enum layer_kind {
    LAYER_FULL,
    LAYER_WINDOW,
    LAYER_STATE,
    LAYER_BOTH, /* a state beside a full cache */
    LAYER_NONE, /* no cache at all */
    LAYER_KINDS
};

void plan_tell(struct plan_model *out, const char *what, const char *then)
{
    char note[sizeof(out->note)];
    size_t used = strlen(out->note);

    snprintf(note, sizeof(note), "%.80s: %.150s", what, then);
    if (!strstr(out->note, note) && used + 2 + strlen(note) < sizeof(out->note))
        snprintf(out->note + used, sizeof(out->note) - used, "%s%s", used ? "; " : "", note);
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
                 {"hybrid", LAYER_BOTH},
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
            plan_tell(out, keys[k],
                      "has not as many words as there are layers: all are counted as full");
            return 0;
        }
        json_array_foreach(list, i, word)
        {
            int kind = kind_of(json_string_value(word));
            kinds[i] = kind < 0 ? LAYER_FULL : (uint8_t)kind;
            if (kind < 0)
                plan_tell(out, keys[k],
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
        plan_tell(out, "hybrid_override_pattern",
                  "is not understood: all layers are counted as full");
        return 0;
    }
    for (uint32_t i = 0; i < out->layers; i++)
        kinds[i] = letters[i] == 'M' ? LAYER_STATE : letters[i] == '*' ? LAYER_FULL : LAYER_NONE;
    return 0;
}

/* Indices of the layers with attention, counted from `first`; the others keep a state. */
static int kinds_from_indices(const json_t *list, const char *key, int first, int kind,
                              struct plan_model *out, uint8_t *kinds)
{
    json_t *index;
    size_t i;

    if (!json_is_array(list) || json_array_size(list) == 0)
        return 1;
    memset(kinds, LAYER_STATE, out->layers);
    json_array_foreach(list, i, index)
    {
        json_int_t at = json_is_integer(index) ? json_integer_value(index) - first : -1;
        if (at < 0 || at >= (json_int_t)out->layers) {
            memset(kinds, LAYER_FULL, out->layers);
            plan_tell(out, key, "is not understood: all layers are counted as full");
            return 0;
        }
        kinds[at] = (uint8_t)kind;
    }
    return 0;
}

/* Words that are repeated until all layers have one (recurrent_gemma, whose attention is local). */
static int kinds_from_blocks(const json_t *config, struct plan_model *out, uint8_t *kinds)
{
    const json_t *list = json_object_get(config, "block_types");
    bool local = json_object_get(config, "attention_window_size") != NULL;
    size_t count = json_array_size(list);

    if (count == 0)
        return 1;
    for (uint32_t i = 0; i < out->layers; i++) {
        int kind = kind_of(json_string_value(json_array_get(list, i % count)));
        if (kind < 0)
            plan_tell(out, "block_types",
                      "has words that are not known: those layers are counted as full");
        kinds[i] = kind < 0                      ? LAYER_FULL
                   : kind == LAYER_FULL && local ? LAYER_WINDOW
                                                 : (uint8_t)kind;
    }
    return 0;
}

/* A number for each layer: 0 linear attention, 1 full (minimax). */
static int kinds_from_numbers(const json_t *config, struct plan_model *out, uint8_t *kinds)
{
    const json_t *list = json_object_get(config, "attn_type_list");

    if (!json_is_array(list))
        return 1;
    if (json_array_size(list) != out->layers) {
        plan_tell(out, "attn_type_list",
                  "has not as many numbers as there are layers: all are counted as full");
        return 0;
    }
    for (uint32_t i = 0; i < out->layers; i++) {
        const json_t *type = json_array_get(list, i);
        kinds[i] = json_is_integer(type) && !json_integer_value(type) ? LAYER_STATE : LAYER_FULL;
    }
    return 0;
}

/* An object for each layer (models cut down by search): some have no attention. */
static int kinds_from_configs(const json_t *config, struct plan_model *out, uint8_t *kinds)
{
    const json_t *list = json_object_get(config, "block_configs");

    if (!json_is_array(list))
        return 1;
    if (json_array_size(list) != out->layers) {
        plan_tell(out, "block_configs",
                  "has not as many entries as there are layers: all are counted as full");
        return 0;
    }
    for (uint32_t i = 0; i < out->layers; i++) {
        const json_t *attention = json_object_get(json_array_get(list, i), "attention");
        bool gone = json_is_true(json_object_get(attention, "no_op")) ||
                    json_is_true(json_object_get(attention, "replace_with_linear"));
        kinds[i] = gone ? LAYER_NONE : LAYER_FULL;
    }
    return 0;
}

/* Lists in the words of single families. 0; 1: there is none. */
static int kinds_from_family(const json_t *config, struct plan_model *out, uint8_t *kinds)
{
    const json_t *linear = json_object_get(config, "linear_attn_config");
    static const struct {
        const char *key;
        int kind;
    } lists[] = {{"attn_layer_indices", LAYER_FULL},
                 {"full_attn_idxs", LAYER_FULL},
                 {"hybrid_layer_ids", LAYER_BOTH}};

    for (size_t i = 0; i < KVT_ARRAY_LEN(lists); i++)
        if (!kinds_from_indices(json_object_get(config, lists[i].key), lists[i].key, 0,
                                lists[i].kind, out, kinds))
            return 0;
    if (!kinds_from_indices(json_object_get(linear, "full_attn_layers"), "full_attn_layers", 1,
                            LAYER_FULL, out, kinds))
        return 0;
    return kinds_from_blocks(config, out, kinds) && kinds_from_numbers(config, out, kinds) &&
           kinds_from_configs(config, out, kinds);
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
        if (plan_is_type(config, types[i].type))
            return types[i].pattern;
    return json_object_get(config, "model_type") ? -1 : 0;
}

/* Something is there that is no whole number above 0, and does not say "none" either. */
static bool no_number(const json_t *config, const char *key)
{
    const json_t *value = json_object_get(config, key);

    return plan_whole(config, key, PLAN_WINDOW_MAX) < 0 && !json_is_false(value) &&
           !(json_is_integer(value) && json_integer_value(value) <= 0);
}

/* Rules by numbers, in the words of the models that brought them. 0; 1: there is none. */
static int kinds_from_rules(const json_t *config, struct plan_model *out, uint8_t *kinds)
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
            plan_tell(out, "sliding_window",
                      "which layers have it is not said: all are counted as full");
        else if (pattern > 0)
            every(out, kinds, pattern, pattern - 1, LAYER_WINDOW);
        else
            for (uint32_t i = 0; i < out->layers; i++)
                kinds[i] = json_is_true(use) && (int64_t)i < first ? LAYER_FULL : LAYER_WINDOW;
    } else if (no_number(config, "sliding_window") && !json_is_false(use)) {
        plan_tell(out, "sliding_window",
                  "is no whole number of tokens in range: all layers are counted as full");
    } else if (plan_whole(config, "attention_chunk_size", PLAN_WINDOW_MAX) > 0) {
        plan_tell(out, "attention_chunk_size",
                  "which layers have it is not said: all are counted as full");
    } else {
        return 1;
    }
    return 0;
}

/* ---- what is not understood ------------------------------------------------------------------ */

static bool says_something(const json_t *value)
{
    return !(json_is_null(value) || json_is_false(value) ||
             (json_is_number(value) && json_number_value(value) <= 0) ||
             (json_is_string(value) && !json_string_length(value)) ||
             (json_is_array(value) && !json_array_size(value)));
}

/* Fields that tell of other layers than those of full attention, where none of the rules applied;
 * and models that nobody looked at. */
static void name_the_rest(json_t *config, struct plan_model *out)
{
    static const char *const hints[] = {"mamba",
                                        "ssm_",
                                        "conv_",
                                        "recurrent",
                                        "linear_",
                                        "lru_",
                                        "rwkv",
                                        "hybrid",
                                        "attn_layer",
                                        "attn_type",
                                        "full_attn",
                                        "block_types",
                                        "layer_type",
                                        "layers_block",
                                        "local_attention",
                                        "attention_window",
                                        "attention_type"};
    static const char *const known[] = {"llama",     "mistral",
                                        "mixtral",   "ministral",
                                        "qwen2",     "qwen3",
                                        "gemma",     "phi",
                                        "cohere",    "command",
                                        "falcon",    "gpt",
                                        "starcoder", "olmo",
                                        "granite",   "deepseek",
                                        "glm",       "stablelm",
                                        "intern",    "baichuan",
                                        "yi",        "exaone",
                                        "smollm",    "ernie4",
                                        "hunyuan",   "minicpm",
                                        "kimi",      "seed_oss",
                                        "arcee",     "opt",
                                        "bloom",     "mpt",
                                        "jamba",     "bamba",
                                        "zamba2",    "lfm2",
                                        "nemotron",  "recurrent_gemma",
                                        "minimax",   "mllama",
                                        "dots1",     "mimo"};
    const char *type = json_string_value(json_object_get(config, "model_type")), *key;
    json_t *value;
    bool is_known = !type;

    json_object_foreach(config, key, value)
    {
        for (size_t i = 0; i < KVT_ARRAY_LEN(hints); i++) {
            if (!strncmp(key, hints[i], strlen(hints[i])) && says_something(value)) {
                plan_tell(out, hints[i],
                          "fields of this kind are not understood: all layers are counted as full "
                          "attention");
                return;
            }
        }
    }
    for (size_t i = 0; i < KVT_ARRAY_LEN(known); i++)
        is_known |= plan_is_type(config, known[i]);
    if (!is_known)
        plan_tell(out, "model_type", "is not known here: all layers are counted as full attention");
}

/* Caches of another kind beside those of the layers. */
static void name_extras(const json_t *config, struct plan_model *out, uint8_t *kinds)
{
    const json_t *cross = json_object_get(config, "cross_attention_layers");
    json_t *index;
    size_t i;

    json_array_foreach(cross, i, index)
    {
        json_int_t at = json_is_integer(index) ? json_integer_value(index) : -1;
        if (at >= 0 && at < (json_int_t)out->layers)
            kinds[at] = LAYER_NONE;
        plan_tell(out, "cross_attention_layers",
                  "their cache is of images, not of tokens: it is not counted");
    }
    if (says_something(json_object_get(config, "index_head_dim")) &&
        json_object_get(config, "index_head_dim"))
        plan_tell(out, "index_head_dim", "the indexer's keys come on top: they are not counted");
}

/* ---- states ---------------------------------------------------------------------------------- */

static double field(const json_t *config, const char *key)
{
    int64_t value = plan_whole(config, key, 1 << 24);

    return value > 0 ? (double)value : 0;
}

/* The same in the words of single families; 0: none of them. */
static double state_of_family(const json_t *config)
{
    const json_t *linear = json_object_get(config, "linear_attn_config");
    double heads = field(config, "mamba_num_heads"), dim = field(config, "mamba_head_dim");
    double size = field(config, "ssm_state_size"), hidden = field(config, "hidden_size");
    double wide = field(linear, "num_heads") * field(linear, "head_dim");
    double lru = field(config, "lru_width");

    if (heads * dim * size > 0) /* nemotron_h */
        return heads * dim * size * 4 + field(config, "conv_kernel") *
                                            (heads * dim + 2 * field(config, "n_groups") * size) *
                                            2;
    if (wide > 0) /* kimi_linear: a matrix a head, three convolutions */
        return wide * field(linear, "head_dim") * 4 +
               3 * field(linear, "short_conv_kernel_size") * wide * 2;
    if (lru > 0) /* recurrent_gemma */
        return lru * 4 + field(config, "conv1d_width") * lru * 2;
    if (field(config, "conv_L_cache") > 0) /* lfm2 */
        return field(config, "conv_L_cache") * hidden * 2;
    if (json_is_array(json_object_get(config, "attn_type_list"))) /* minimax: a matrix a head */
        return field(config, "num_attention_heads") * field(config, "head_dim") *
               field(config, "head_dim") * 4;
    return 0;
}

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
    double other = state_of_family(config);

    if (other > 0)
        return other;
    if (v_heads > 0 && k_heads > 0 && k_dim > 0 && v_dim > 0)
        return v_heads * k_dim * v_dim * 4 +
               (taps > 0 ? taps * (2 * k_heads * k_dim + v_heads * v_dim) * 2 : 0);
    if (hidden > 0 && d_state > 0 && expand > 0)
        return expand * hidden * d_state * 4 + (d_conv > 0 ? expand * hidden * d_conv * 2 : 0);
    return 0;
}

static void count_kinds(const json_t *config, struct plan_model *out, const uint8_t *kinds)
{
    uint32_t of[LAYER_KINDS] = {0};
    int64_t window = plan_whole(config, "sliding_window", PLAN_WINDOW_MAX);
    int64_t chunk = plan_whole(config, "attention_chunk_size", PLAN_WINDOW_MAX);
    int64_t shared = plan_whole(config, "num_kv_shared_layers", LAYERS_MAX);

    for (uint32_t i = 0; i < out->layers; i++) /* the last ones use the cache of others */
        of[shared > 0 && (int64_t)i >= (int64_t)out->layers - shared ? LAYER_NONE : kinds[i]]++;
    window = window > 0  ? window
             : chunk > 0 ? chunk
                         : (int64_t)field(config, "attention_window_size");
    of[LAYER_FULL] += of[LAYER_BOTH];
    if (of[LAYER_WINDOW] > 0 && window <= 0) {
        plan_tell(out, "sliding_window",
                  "is missing, or no whole number: layers with a window are counted as full");
        of[LAYER_FULL] += of[LAYER_WINDOW];
        of[LAYER_WINDOW] = 0;
    }
    if (of[LAYER_FULL] + of[LAYER_WINDOW] == 0) {
        plan_tell(out, "no layer", "of this model has a cache that grows: all are counted as full");
        return;
    }
    out->layers -= of[LAYER_NONE];
    out->window_layers = of[LAYER_WINDOW];
    out->window_tokens = of[LAYER_WINDOW] ? (uint32_t)window : 0;
    out->state_layers = of[LAYER_STATE];
    out->state_bytes = (of[LAYER_STATE] + of[LAYER_BOTH]) * state_of(config);
    if (of[LAYER_STATE] && out->state_bytes <= 0)
        plan_tell(out, "states",
                  "their size cannot be told from the configuration: they are not counted");
}

void plan_layers(json_t *config, struct plan_model *out)
{
    uint8_t kinds[LAYERS_MAX] = {LAYER_FULL};

    if (kinds_from_list(config, out, kinds) && kinds_from_letters(config, out, kinds) &&
        kinds_from_family(config, out, kinds) && kinds_from_rules(config, out, kinds))
        name_the_rest(config, out);
    name_extras(config, out, kinds);
    count_kinds(config, out, kinds);
}
