/* The data behind `kvtier plan`: shapes of models, prefill rates, tiers. Tools only.
 * Errors are sentences in `error`; functions return 0 or -1. */
#ifndef KVT_TOOLS_PLAN_DATA_H
#define KVT_TOOLS_PLAN_DATA_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvtier/layout.h"

#define PLAN_LEVELS (KVT_LEVEL_RAW + 1)

struct plan_model {
    char name[64];
    char first_name[64]; /* of its entry: what prefill rates go by */
    uint32_t layers, kv_heads, head_dim;
    uint32_t latent_dim; /* MLA: instead of heads */
    /* Of the layers: those that see the last window_tokens alone, and those that keep a state of
     * fixed size instead of a cache. */
    uint32_t window_layers, window_tokens, state_layers;
    double state_bytes; /* of all of them together, as the engine keeps it; 0: not known */
    char note[512];     /* what was not looked at; "" none */
};

/* Bytes a token takes in the layers of full attention, and in those with a window. */
struct plan_bytes {
    double full[PLAN_LEVELS], window[PLAN_LEVELS];
};

#define PLAN_WINDOW_MAX (1 << 24)

struct plan_tier {
    const char *name, *source; /* borrowed from the data */
    double gbps, latency_s;
    double capacity_gb, dwpd, years, usd_per_gb; /* 0: not known */
};

/* The shipped data with what `path` (NULL: nothing) adds. Owned: json_decref(). NULL: error. */
json_t *plan_data_load(const char *path, char *error, size_t len);
/* Names of the data's models, other ones included. Owned. */
json_t *plan_data_names(const json_t *data);
/* Those of the shipped data, a space between, as many as fit: for completion. */
void plan_data_words(char *text, size_t len);
/* A model by name, or by one of its other names; the sentence names the nearest. */
int plan_data_model(const json_t *data, const char *name, struct plan_model *out, char *error,
                    size_t len);
/* A model from a config.json of Hugging Face. The sentence names what is missing. */
int plan_config_model(const char *path, struct plan_model *out, char *error, size_t len);
/* Seconds of n tokens are a n + b n^2. -1: the data has none for the model. */
int plan_data_prefill(const json_t *data, const char *model, double *a, double *b);
/* Tier i. 0; 1 past the end; -1 a tier whose numbers make no sense. */
int plan_data_tier(const json_t *data, size_t i, struct plan_tier *out, char *error, size_t len);

/* Bytes a token takes: at RAW in the engine, at the other levels as records of `block` tokens on
 * disk, header and padding included; 0: the level is not for this model. -1: no such layout. */
int plan_token_bytes(const struct plan_model *model, uint32_t block, struct plan_bytes *bytes);
/* What a session of that many tokens needs to go on: all of full attention, the windows' last
 * tokens, the states. */
double plan_session_bytes(const struct plan_model *model, const struct plan_bytes *bytes, int level,
                          double tokens);

/* A file that holds an object of JSON. Owned. NULL: error. */
json_t *plan_json_load(const char *path, char *error, size_t len);
/* Whether all of a user's data is known and in range; the sentence names file, entry and field. */
int plan_data_check(const char *path, json_t *more, char *error, size_t len);
/* Text of others for a terminal: control characters as \xNN; cut to len. */
void plan_printable(char *out, size_t len, const char *text);

/* For plan_config.c: counts out->layers by kind, with states and windows; what is not understood
 * goes to the note, as what plan_tell() says of a field. Whether the type begins so. */
void plan_layers(json_t *config, struct plan_model *out);
void plan_tell(struct plan_model *out, const char *what, const char *then);
bool plan_is_type(const json_t *config, const char *prefix);
/* For plan_config.c and plan_layers.c: a whole number from 1 to max, 0: not there, -1: there, and
 * none; whether there is a layout of that shape. */
int64_t plan_whole(const json_t *object, const char *key, int64_t max);
int plan_shape_check(const struct plan_model *model, const char *where, char *error, size_t len);

#endif
