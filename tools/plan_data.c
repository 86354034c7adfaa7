/* Models, prefill rates and tiers: shipped, from the user's file, or from a model's config.json.
 *
 * Numbers from outside are checked here: a shape or a rate that makes no sense is an error with its
 * name, never a table of nonsense. Threads: one. Does not print.
 */
#include "plan_data.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/parse.h"
#include "format/record.h"
#include "kvtier/codec.h"
#include "plan_shipped.h"

#define NAMES_MAX 512u

/* Index of the entry of the same name; the list's size: there is none. */
static size_t place_of(const json_t *list, const char *key, const json_t *entry)
{
    const char *name = json_string_value(json_object_get(entry, key));
    size_t i = 0;

    for (; i < json_array_size(list); i++) {
        const char *has = json_string_value(json_object_get(json_array_get(list, i), key));
        if (name && has && !strcmp(name, has))
            break;
    }
    return i;
}

/* Entries of `more` take the place of those of the same name, or go behind. */
static int merge(json_t *data, json_t *more, const char *list, const char *key)
{
    json_t *to = json_object_get(data, list), *from = json_object_get(more, list), *entry;
    size_t i;

    if (!from)
        return 0;
    if (!json_is_array(from))
        return -1;
    json_array_foreach(from, i, entry)
    {
        if (!json_is_string(json_object_get(entry, key)))
            return -1;
        size_t at = place_of(to, key, entry);
        int rc =
            at < json_array_size(to) ? json_array_set(to, at, entry) : json_array_append(to, entry);
        if (rc)
            return -1;
    }
    return 0;
}

json_t *plan_data_load(const char *path, char *error, size_t len)
{
    static const char *const lists[][2] = {
        {"models", "name"}, {"prefill", "model"}, {"tiers", "name"}};
    json_error_t why;
    json_t *data = json_loads(plan_shipped, 0, &why), *more = NULL;

    if (data && path) {
        more = plan_json_load(path, error, len);
        if (!more || plan_data_check(path, more, error, len)) {
            json_decref(more);
            json_decref(data);
            return NULL;
        }
        for (size_t i = 0; i < 3; i++) {
            if (merge(data, more, lists[i][0], lists[i][1])) {
                snprintf(error, len, "%s: \"%s\" is not a list of objects with \"%s\"", path,
                         lists[i][0], lists[i][1]);
                json_decref(data);
                data = NULL;
                break;
            }
        }
        json_decref(more);
    } else if (!data) {
        snprintf(error, len, "shipped data, line %d: %s", why.line, why.text);
    }
    return data;
}

json_t *plan_data_names(const json_t *data)
{
    json_t *names = json_array(), *entry;
    size_t i;

    json_array_foreach(json_object_get(data, "models"), i, entry)
    {
        json_array_append(names, json_object_get(entry, "name"));
        json_array_extend(names, json_object_get(entry, "also"));
    }
    return names;
}

void plan_data_words(char *text, size_t len)
{
    json_t *data = plan_data_load(NULL, text, len), *names = plan_data_names(data), *name;
    size_t i, used = 0;

    text[0] = '\0';
    json_array_foreach(names, i, name)
    {
        const char *word = json_string_value(name);
        if (word && used + strlen(word) + 2 <= len)
            used += (size_t)snprintf(text + used, len - used, "%s%s", used ? " " : "", word);
    }
    json_decref(names);
    json_decref(data);
}

int64_t plan_whole(const json_t *object, const char *key, int64_t max)
{
    const json_t *value = json_object_get(object, key);

    if (!value || json_is_null(value))
        return 0;
    int64_t number = json_is_integer(value) ? json_integer_value(value) : -1;
    return number >= 1 && number <= max ? number : -1;
}

int plan_shape_check(const struct plan_model *model, const char *where, char *error, size_t len)
{
    struct plan_bytes bytes;

    if (!plan_token_bytes(model, KVT_TILE_TOKENS, &bytes))
        return 0;
    snprintf(
        error, len,
        "%s: no KV layout has %u layers of %u heads of %u elements (rows are a multiple of 16, "
        "at most %u)",
        where, model->layers, model->kv_heads, model->head_dim, KVT_HEAD_DIM_MAX);
    return -1;
}

static int model_from(const json_t *entry, const char *name, const char *first_name,
                      struct plan_model *out, char *error, size_t len)
{
    int64_t layers = plan_whole(entry, "layers", KVT_PARTS_MAX / 2);
    int64_t latent = plan_whole(entry, "latent_dim", KVT_HEAD_DIM_MAX);
    int64_t heads = plan_whole(entry, "kv_heads", KVT_HEADS_MAX);
    int64_t dim = plan_whole(entry, "head_dim", KVT_HEAD_DIM_MAX);
    int64_t window_layers = plan_whole(entry, "window_layers", KVT_PARTS_MAX / 2);
    int64_t window = plan_whole(entry, "window_tokens", PLAN_WINDOW_MAX);

    if (layers < 1 || latent < 0 || (latent == 0 && (heads < 1 || dim < 1))) {
        snprintf(error, len,
                 "model %.60s: needs whole \"layers\", and \"kv_heads\" with \"head_dim\" or "
                 "\"latent_dim\"",
                 name);
        return -1;
    }
    if (window_layers < 0 || window < 0 || (window_layers > 0) != (window > 0) ||
        window_layers > layers) {
        snprintf(error, len,
                 "model %.60s: \"window_layers\" are some of the \"layers\", and need whole "
                 "\"window_tokens\"",
                 name);
        return -1;
    }
    *out = (struct plan_model){.layers = (uint32_t)layers,
                               .kv_heads = latent ? 1 : (uint32_t)heads,
                               .head_dim = latent ? 0 : (uint32_t)dim,
                               .latent_dim = (uint32_t)latent,
                               .window_layers = (uint32_t)window_layers,
                               .window_tokens = (uint32_t)window};
    snprintf(out->name, sizeof(out->name), "%.60s", name);
    snprintf(out->first_name, sizeof(out->first_name), "%.60s", first_name);
    return plan_shape_check(out, out->name, error, len);
}

int plan_data_model(const json_t *data, const char *name, struct plan_model *out, char *error,
                    size_t len)
{
    const char *names[NAMES_MAX];
    size_t count = 0, i, j;
    json_t *entry, *other;

    json_array_foreach(json_object_get(data, "models"), i, entry)
    {
        const char *own = json_string_value(json_object_get(entry, "name"));
        if (count < NAMES_MAX)
            names[count++] = own;
        if (!kvt_edit_distance(own, name))
            return model_from(entry, own, own, out, error, len);
        json_array_foreach(json_object_get(entry, "also"), j, other)
        {
            const char *also = json_string_value(other);
            if (!also)
                continue;
            if (count < NAMES_MAX)
                names[count++] = also;
            if (!kvt_edit_distance(also, name))
                return model_from(entry, also, own, out, error, len);
        }
    }
    const char *nearest = kvt_nearest(name, names, count);
    snprintf(error, len,
             "unknown model '%.60s'%s%s%s 'kvtier plan' lists those that are known, --data FILE "
             "adds some; 'kvtier plan --config FILE' reads a model's config.json",
             name, nearest ? "; did you mean '" : ";", nearest ? nearest : "", nearest ? "'?" : "");
    return -1;
}

/* ---- rates ---------------------------------------------------------------------------------- */

static double number(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);

    return json_is_number(value) ? json_number_value(value) : 0;
}

int plan_data_prefill(const json_t *data, const char *model, double *a, double *b)
{
    json_t *entry;
    size_t i;

    json_array_foreach(json_object_get(data, "prefill"), i, entry)
    {
        const char *name = json_string_value(json_object_get(entry, "model"));
        *a = number(entry, "us_per_token") * 1e-6;
        *b = number(entry, "ns_per_token2") * 1e-9;
        if (name && !strcmp(name, model) && *a > 0 && *b >= 0)
            return 0;
    }
    return -1;
}

int plan_data_tier(const json_t *data, size_t i, struct plan_tier *out, char *error, size_t len)
{
    const json_t *entry = json_array_get(json_object_get(data, "tiers"), i);

    if (!entry)
        return 1;
    *out = (struct plan_tier){.name = json_string_value(json_object_get(entry, "name")),
                              .source = json_string_value(json_object_get(entry, "source")),
                              .gbps = number(entry, "gbps"),
                              .latency_s = number(entry, "latency_us") * 1e-6,
                              .capacity_gb = number(entry, "capacity_gb"),
                              .dwpd = number(entry, "dwpd"),
                              .years = number(entry, "years"),
                              .usd_per_gb = number(entry, "usd_per_gb")};
    if (out->gbps > 0 && out->gbps < 1e6 && out->latency_s >= 0 && out->latency_s < 3600 &&
        out->capacity_gb >= 0 && out->dwpd >= 0 && out->years >= 0 && out->usd_per_gb >= 0)
        return 0;
    snprintf(error, len, "tier %.60s: needs \"gbps\" above 0, and no number below 0", out->name);
    return -1;
}

/* ---- bytes ---------------------------------------------------------------------------------- */

/* Of so many layers, in records of their own. */
static int layers_bytes(const struct plan_model *model, uint32_t layers, uint32_t block,
                        double bytes[PLAN_LEVELS])
{
    uint32_t per_layer = model->latent_dim ? 1 : 2, count = layers * per_layer;
    struct kvt_part *parts = calloc(count ? count : 1, sizeof(*parts));
    int rc = parts ? 0 : -1;

    for (int level = 0; level < PLAN_LEVELS; level++)
        bytes[level] = 0;
    for (uint32_t i = 0; i < count && !rc; i++)
        parts[i] =
            (struct kvt_part){.kind = model->latent_dim ? KVT_PART_MLA
                                      : i % 2           ? KVT_PART_V
                                                        : KVT_PART_K,
                              .dtype = KVT_DTYPE_BF16,
                              .layer = i / per_layer,
                              .heads = model->kv_heads,
                              .head_dim = model->latent_dim ? model->latent_dim : model->head_dim};
    struct kvt_layout layout = {
        .struct_size = sizeof(layout), .block_tokens = block, .part_count = count, .parts = parts};
    if (!rc && count && kvt_layout_check(&layout))
        rc = -1;
    for (int level = KVT_LEVEL_INT4; level < KVT_LEVEL_RAW && !rc && count; level++) {
        size_t payload = kvt_payload_bytes(&layout, 0, level);
        uint32_t record = payload && payload < UINT32_MAX ? kvt_record_bytes(payload) : 0;
        bytes[level] = (double)record / block;
    }
    uint64_t row = model->latent_dim ? model->latent_dim : 2ull * model->kv_heads * model->head_dim;
    bytes[KVT_LEVEL_RAW] = 2.0 * (double)row * layers;
    free(parts);
    return rc;
}

int plan_token_bytes(const struct plan_model *model, uint32_t block, struct plan_bytes *bytes)
{
    uint32_t others = model->window_layers + model->state_layers;

    if (model->layers == 0 || others > model->layers)
        return -1;
    if (layers_bytes(model, model->layers - others, block, bytes->full) ||
        layers_bytes(model, model->window_layers, block, bytes->window))
        return -1;
    return 0;
}

double plan_session_bytes(const struct plan_model *model, const struct plan_bytes *bytes, int level,
                          double tokens)
{
    double window = tokens < model->window_tokens ? tokens : model->window_tokens;

    return bytes->full[level] * tokens + bytes->window[level] * window + model->state_bytes;
}
