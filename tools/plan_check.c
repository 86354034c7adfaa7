/* What a user's files hold, before it is used: `--data` entry by entry, so that a number written as
 * a text, a misspelt field or a price of 1e308 is an error with its place, never silently nothing.
 * Threads: one. Does not print.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/checked.h"
#include "base/parse.h"
#include "kvtier/codec.h"
#include "plan_data.h"

enum kind { KIND_TEXT, KIND_TEXTS, KIND_WHOLE, KIND_NUMBER };

struct field {
    const char *key;
    enum kind kind;
    double min, max; /* of numbers */
};

struct list {
    const char *key, *one, *name; /* an entry is called one; the field that names it */
    struct field fields[10];
};

static const struct list lists[] = {
    {"models",
     "model",
     "name",
     {{"name", KIND_TEXT, 0, 0},
      {"also", KIND_TEXTS, 0, 0},
      {"source", KIND_TEXT, 0, 0},
      {"layers", KIND_WHOLE, 1, KVT_PARTS_MAX * 0.5},
      {"kv_heads", KIND_WHOLE, 1, KVT_HEADS_MAX},
      {"head_dim", KIND_WHOLE, 1, KVT_HEAD_DIM_MAX},
      {"latent_dim", KIND_WHOLE, 1, KVT_HEAD_DIM_MAX},
      {"window_layers", KIND_WHOLE, 1, KVT_PARTS_MAX * 0.5},
      {"window_tokens", KIND_WHOLE, 1, PLAN_WINDOW_MAX}}},
    {"prefill",
     "prefill of",
     "model",
     {{"model", KIND_TEXT, 0, 0},
      {"on", KIND_TEXT, 0, 0},
      {"source", KIND_TEXT, 0, 0},
      {"us_per_token", KIND_NUMBER, 1e-3, 1e9},
      {"ns_per_token2", KIND_NUMBER, 0, 1e9}}},
    {"tiers",
     "tier",
     "name",
     {{"name", KIND_TEXT, 0, 0},
      {"source", KIND_TEXT, 0, 0},
      {"gbps", KIND_NUMBER, 1e-6, 1e6},
      {"latency_us", KIND_NUMBER, 0, 3.6e9},
      {"capacity_gb", KIND_NUMBER, 0, 1e9},
      {"dwpd", KIND_NUMBER, 0, 1000},
      {"years", KIND_NUMBER, 0, 1000},
      {"usd_per_gb", KIND_NUMBER, 0, 1e6}}},
};

void plan_printable(char *out, size_t len, const char *text)
{
    size_t used = 0;

    out[0] = '\0';
    for (const unsigned char *at = (const unsigned char *)text; *at && used + 5 <= len; at++) {
        int control = *at < 0x20 || *at == 0x7f || (*at == 0xc2 && at[1] >= 0x80 && at[1] < 0xa0);
        used += (size_t)snprintf(out + used, len - used, control ? "\\x%02x" : "%c", *at);
    }
}

json_t *plan_json_load(const char *path, char *error, size_t len)
{
    FILE *in = fopen(path, "re");
    char words[JSON_ERROR_TEXT_LENGTH * 4];
    struct stat st;
    json_error_t why;

    if (!in || fstat(fileno(in), &st)) {
        snprintf(error, len, "%s: cannot be read: %s", path, strerror(errno));
        if (in)
            fclose(in);
        return NULL;
    }
    json_t *root = S_ISDIR(st.st_mode) ? NULL : json_loadf(in, 0, &why);
    fclose(in);
    if (S_ISDIR(st.st_mode)) {
        snprintf(error, len, "%s: is a directory: a file of JSON is expected", path);
    } else if (!root) {
        plan_printable(words, sizeof(words), why.text);
        snprintf(error, len, "%s, line %d: %s", path, why.line, words);
    } else if (!json_is_object(root)) {
        snprintf(error, len, "%s: holds no JSON object ({...})", path);
        json_decref(root);
        root = NULL;
    }
    return root;
}

/* NULL: as it should be; else what is expected. */
static const char *expected(const struct field *field, const json_t *value, char *text, size_t len)
{
    double number = json_number_value(value);
    json_t *word;
    size_t i;

    switch (field->kind) {
    case KIND_TEXT:
        return json_is_string(value) && json_string_length(value) ? NULL : "a text";
    case KIND_TEXTS:
        if (!json_is_array(value))
            return "a list of texts";
        json_array_foreach(value, i, word)
        {
            if (!json_is_string(word))
                return "a list of texts";
        }
        return NULL;
    case KIND_WHOLE:
    case KIND_NUMBER:
        break;
    }
    if ((field->kind == KIND_WHOLE ? json_is_integer(value) : json_is_number(value)) &&
        number >= field->min && number <= field->max)
        return NULL;
    snprintf(text, len, "a %s from %.9g to %.9g, without quotes",
             field->kind == KIND_WHOLE ? "whole number" : "number", field->min, field->max);
    return text;
}

static int entry_check(const char *path, const struct list *list, json_t *entry, char *error,
                       size_t len)
{
    const char *names[KVT_ARRAY_LEN(list->fields)], *key;
    char text[96], name[128], word[128];
    size_t count = 0;
    json_t *value;

    plan_printable(name, sizeof(name), json_string_value(json_object_get(entry, list->name)));
    for (; count < KVT_ARRAY_LEN(list->fields) && list->fields[count].key; count++)
        names[count] = list->fields[count].key;
    json_object_foreach(entry, key, value)
    {
        size_t i = 0;
        while (i < count && strcmp(names[i], key))
            i++;
        plan_printable(word, sizeof(word), key);
        if (i == count) {
            const char *nearest = kvt_nearest(key, names, count);
            snprintf(error, len, "%s: %s %.60s: unknown field \"%.60s\"%s%s%s", path, list->one,
                     name, word, nearest ? "; did you mean \"" : "", nearest ? nearest : "",
                     nearest ? "\"?" : "");
            return -1;
        }
        const char *want =
            json_is_null(value) ? NULL : expected(&list->fields[i], value, text, sizeof(text));
        if (want) {
            snprintf(error, len, "%s: %s %.60s: \"%s\" is expected to be %s", path, list->one, name,
                     key, want);
            return -1;
        }
    }
    if (!strcmp(list->key, "prefill") && !json_is_number(json_object_get(entry, "us_per_token"))) {
        snprintf(error, len, "%s: prefill of %.60s: needs \"us_per_token\"", path, name);
        return -1;
    }
    return 0;
}

static int list_check(const char *path, const struct list *list, const json_t *entries, char *error,
                      size_t len)
{
    json_t *entry;
    size_t i;

    if (!json_is_array(entries)) {
        snprintf(error, len, "%s: \"%s\" is not a list of objects with \"%s\"", path, list->key,
                 list->name);
        return -1;
    }
    json_array_foreach(entries, i, entry)
    {
        const json_t *name = json_object_get(entry, list->name);
        if (!json_is_string(name) || !json_string_length(name)) {
            snprintf(error, len, "%s: \"%s\", entry %zu: is no object with \"%s\", a text", path,
                     list->key, i + 1, list->name);
            return -1;
        }
        if (entry_check(path, list, entry, error, len))
            return -1;
    }
    return 0;
}

int plan_data_check(const char *path, json_t *more, char *error, size_t len)
{
    static const char *const names[] = {"models", "prefill", "tiers"};
    char word[128];
    const char *key;
    json_t *value;

    json_object_foreach(more, key, value)
    {
        size_t i = 0;
        while (i < KVT_ARRAY_LEN(lists) && strcmp(lists[i].key, key))
            i++;
        if (i == KVT_ARRAY_LEN(lists)) {
            const char *nearest = kvt_nearest(key, names, KVT_ARRAY_LEN(names));
            plan_printable(word, sizeof(word), key);
            snprintf(error, len, "%s: unknown list \"%.60s\"%s%s%s (models, prefill, tiers)", path,
                     word, nearest ? "; did you mean \"" : "", nearest ? nearest : "",
                     nearest ? "\"?" : "");
            return -1;
        }
        if (list_check(path, &lists[i], value, error, len))
            return -1;
    }
    return 0;
}
