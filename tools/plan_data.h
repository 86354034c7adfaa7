/* The data behind `kvtier plan`: shapes of models, prefill rates, tiers. Tools only.
 * Errors are sentences in `error`; functions return 0 or -1. */
#ifndef KVT_TOOLS_PLAN_DATA_H
#define KVT_TOOLS_PLAN_DATA_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

#include "kvtier/layout.h"

#define PLAN_LEVELS (KVT_LEVEL_RAW + 1)

struct plan_model {
    char name[64];
    char first_name[64]; /* of its entry: what prefill rates go by */
    uint32_t layers, kv_heads, head_dim;
    uint32_t latent_dim; /* MLA: instead of heads */
    char note[160];      /* what was not looked at; "" none */
};

struct plan_tier {
    const char *name, *source; /* borrowed from the data */
    double gbps, latency_s;
    double capacity_gb, dwpd, years, usd_per_gb; /* 0: not known */
};

/* The shipped data with what `path` (NULL: nothing) adds. Owned: json_decref(). NULL: error. */
json_t *plan_data_load(const char *path, char *error, size_t len);
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
 * disk, header and padding included. 0: the level is not for this model. -1: no such layout. */
int plan_token_bytes(const struct plan_model *model, uint32_t block, double bytes[PLAN_LEVELS]);

#endif
