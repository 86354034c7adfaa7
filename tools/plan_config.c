/* A model's shape from its config.json, as Hugging Face's transformers writes it: its name, layers
 * and heads. What kinds of layers they are: plan_layers.c. Threads: one. Does not print.
 */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/codec.h"
#include "plan_data.h"

#define LAYERS_MAX (KVT_PARTS_MAX / 2)

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

bool plan_is_type(const json_t *config, const char *prefix)
{
    const char *type = json_string_value(json_object_get(config, "model_type"));

    return type && !strncmp(type, prefix, strlen(prefix));
}

static bool is_falcon(const json_t *config)
{
    return plan_is_type(config, "falcon") || plan_is_type(config, "RefinedWeb");
}

/* KV heads in the words of single families. 0: as usual; -1: no number in range. */
static int64_t family_heads(const json_t *config, int64_t heads, struct plan_model *out)
{
    const json_t *list = json_object_get(config, "block_configs"), *entry;
    int64_t most = 0;
    size_t i;

    if (is_falcon(config) && !json_is_true(json_object_get(config, "new_decoder_architecture")) &&
        !json_is_false(json_object_get(config, "multi_query")))
        return 1;
    if (is_falcon(config))
        return plan_whole(config, "num_kv_heads", KVT_HEADS_MAX);
    json_array_foreach((json_t *)list, i, entry)
    {
        int64_t group = plan_whole(json_object_get(entry, "attention"), "n_heads_in_group", 65536);
        int64_t has = group > 0 ? heads / group : 0;
        if (most > 0 && has > 0 && has != most)
            plan_tell(out, "block_configs",
                      "layers differ in KV heads: the most of them are counted for all");
        most = has > most ? has : most;
    }
    return most > KVT_HEADS_MAX ? -1 : most;
}

static int heads_from(const char *path, const json_t *config, struct plan_model *out, char *error,
                      size_t len)
{
    int64_t heads = plan_whole(config, "num_attention_heads", 65536);
    int64_t kv_heads = plan_whole(config, "num_key_value_heads", KVT_HEADS_MAX);
    int64_t dim = plan_whole(config, "head_dim", KVT_HEAD_DIM_MAX);
    int64_t hidden = plan_whole(config, "hidden_size", 1 << 24);
    int64_t family = family_heads(config, heads, out);

    if (family != 0)
        kv_heads = family;
    if (dim == 0)
        dim = plan_whole(config, "attention_head_dim", KVT_HEAD_DIM_MAX);
    if (plan_is_type(config, "gemma3_text") && kv_heads == 0 && heads == 0 && dim == 0) {
        /* the small ones are published without: transformers' Gemma3TextConfig fills them in */
        kv_heads = 4;
        dim = 256;
        plan_tell(out, "heads",
                  "not in the configuration: 4 of 256, as transformers fills them in");
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

int plan_config_model(const char *path, struct plan_model *out, char *error, size_t len)
{
    json_t *root = plan_json_load(path, error, len);
    json_t *config = root;

    if (!root)
        return -1;
    if (json_is_object(json_object_get(root, "text_config"))) /* models that also see or hear */
        config = json_object_get(root, "text_config");
    const char *name = json_string_value(json_object_get(root, "_name_or_path"));
    if (!name || !*name)
        name = json_string_value(json_object_get(root, "model_type"));
    *out = (struct plan_model){.layers = 0};
    plan_printable(out->name, sizeof(out->name), name && *name ? name : path);
    int64_t layers = plan_whole(config, "num_hidden_layers", LAYERS_MAX);
    int rc = layers < 1 ? missing(path, "num_hidden_layers", error, len) : 0;
    out->layers = rc ? 0 : (uint32_t)layers;
    if (!rc && json_object_get(config, "kv_lora_rank"))
        rc = mla_from(path, config, out, error, len);
    else if (!rc)
        rc = heads_from(path, config, out, error, len);
    if (!rc)
        plan_layers(config, out);
    if (!rc)
        rc = plan_shape_check(out, path, error, len);
    json_decref(root);
    return rc;
}
