/* Shared by the files of `kvtier quality` (cmd_quality*.c). One process, one thread of ours. */
#ifndef KVT_TOOLS_QUALITY_H
#define KVT_TOOLS_QUALITY_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "adapters/llama_internal.h"
#include "demo.h"

#define QUALITY_LEVELS_MAX 8
#define QUALITY_TEXTS_MAX 32
#define QUALITY_BLOCK_TOKENS 16

struct quality_config {
    const char *model;
    const char *texts[QUALITY_TEXTS_MAX]; /* paths; none: the shipped texts */
    size_t text_count;
    int levels[QUALITY_LEVELS_MAX];
    size_t level_count;
    int64_t tokens; /* context before the scored tokens; whole blocks */
    int64_t score;
    int64_t window; /* most recent tokens of the context coded at kv8 */
    int64_t grow;   /* > 0: code after that many tokens, before the next are computed */
    int64_t threads;
    int as_is; /* do not dequantise the weights */
    int alone; /* also code each layer alone at this level; 0: no */
};

/* What one level did, over all texts. */
struct quality_level {
    int level;
    double *kl; /* one per scored token, in nats; room for all texts */
    size_t kl_count;
    double nll; /* sum over the scored tokens */
    size_t top1_same;
    double signal, noise; /* of K, centred, over everything coded */
    double *head_signal;  /* per layer * heads + head */
    double *head_noise;
    uint64_t blocks, blocks_below; /* coded; of them below the guard's threshold of the level */
    uint64_t blocks_raw;           /* not coded: the encoder refused their values */
};

/* One layer at a time, then the keys of one head of the worst one at a time, are coded. */
struct quality_alone {
    uint32_t layers, heads; /* heads: of the worst layer */
    uint32_t worst_layer, worst_head;
    double *layer_kl; /* sums over all scored tokens of all texts */
    double *head_kl;  /* of the last text */
    size_t scored, head_scored;
    struct quality_level one; /* of the state at hand */
};

/* How a state is scored: by the one who has the engine. 0, or -1 (said). */
struct quality_scorer {
    int (*score)(void *run, struct quality_level *level, const uint8_t *blob, const char *what);
    void *run;
    const char *where; /* which text */
};

/* Scores of the uncoded cache of the text at hand. */
struct quality_exact {
    float *logits; /* score * vocab */
    double *lse;   /* log-sum-exp of each row */
    int32_t *best;
    double nll; /* sum over the texts so far */
};

struct quality_text {
    const char *name;
    int32_t *tokens; /* the owner frees them */
    size_t count;
};

/* --- cmd_quality_texts.c --- */
/* Tokens that a text must have. */
size_t quality_wanted(const struct quality_config *config);
/* All texts as tokens, before any work. Returns how many; 0: the reason was said. */
size_t quality_read_texts(const struct quality_config *config, const struct demo_engine *engine,
                          struct quality_text texts[QUALITY_TEXTS_MAX]);

/* --- cmd_quality_model.c --- */
/* The path of the model whose weights are float32: the model itself where they are, else a copy in
 * the cache, made when it is not there. 0, or -1 (said). path: PATH_MAX bytes. */
int quality_model(const struct quality_config *config, const struct demo_paths *paths,
                  char path[PATH_MAX]);

/* --- cmd_quality_code.c --- */
/* Send blocks [from, to) of the state `blob` of `cells` cells through the codec and back, in place:
 * what the store would give. The first block of all stays exact; blocks that reach into the last
 * `window` of `context` tokens are kv8. Adds to level. 0, -ENOMEM or a code of the codec. */
int quality_code(const struct kvt_llama *llama, struct quality_level *level, uint8_t *blob,
                 uint32_t cells, size_t from, size_t to, size_t context, size_t window);
/* Bits of one element of the cache at a level, scales and offsets included. */
double quality_bits(const struct kvt_llama *llama, int level);
/* The (layer, head) with the worst centred SQNR; the value in dB, INFINITY when nothing was coded.
 */
double quality_worst(const struct kvt_llama *llama, const struct quality_level *level,
                     uint32_t *layer, uint32_t *head);

/* --- cmd_quality_score.c --- */
int quality_exact_new(struct quality_exact *exact, size_t rows, int32_t vocab);
void quality_exact_free(struct quality_exact *exact);
/* Take row `row` of the exact cache's logits; next: the token that followed. */
void quality_exact_add(struct quality_exact *exact, size_t row, const float *logits, int32_t vocab,
                       int32_t next);
/* Compare the same row computed over the coded cache. */
void quality_compare(struct quality_level *level, const struct quality_exact *exact, size_t row,
                     const float *logits, int32_t vocab, int32_t next);
/* Mean, and the value that `share` of the rows do not exceed; the rows get sorted. */
double quality_mean(const double *values, size_t count);
double quality_quantile(double *values, size_t count, double share);

/* --- cmd_quality_alone.c --- */
int quality_alone_new(struct quality_alone *alone, int level, const struct kvt_llama *llama,
                      size_t score);
void quality_alone_free(struct quality_alone *alone);
/* One text: its exact state, the same coded as a whole, and room for a third. last: of the texts.
 * 0, or -1 (said). */
int quality_alone_text(struct quality_alone *alone, const struct kvt_llama *llama,
                       const struct quality_scorer *scorer, const uint8_t *exact, uint8_t *coded,
                       uint8_t *blob, uint32_t cells, bool last);
json_t *quality_alone_json(const struct quality_alone *alone, const struct kvt_llama *llama);

/* --- cmd_quality_report.c --- */
/* alone: NULL, or what quality_alone_json() made (taken over). */
json_t *quality_report(const struct quality_config *config, const struct kvt_llama *llama,
                       struct quality_level *levels, double exact_nll, json_t *texts,
                       json_t *alone);
void quality_print(const json_t *report);

#endif
