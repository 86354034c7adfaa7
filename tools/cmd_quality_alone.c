/* kvtier quality --alone: what a level does when only one layer is coded with it, then only the
 * keys of one head. The rows of that layer or head are taken from the coded state, all others from
 * the exact one; nothing is coded here. Which layer hurts most is found over all texts, its heads
 * are looked at on the last one.
 */
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "quality.h"

/* The rows of one head of a part. */
static void take_head(const struct kvt_part *part, const struct kvt_part_place *to,
                      const struct kvt_part_place *from, uint32_t head, uint32_t cells)
{
    const size_t element = part->dtype == KVT_DTYPE_F32 ? 4 : 2;

    for (uint32_t t = 0; t < cells; t++) {
        const size_t row =
            (size_t)head * (size_t)to->stride_head + (size_t)t * (size_t)to->stride_token;
        for (uint32_t e = 0; e < part->head_dim; e++) {
            const size_t at = row + (size_t)e * (size_t)to->stride_elem;
            memcpy((uint8_t *)to->base + at, (const uint8_t *)from->base + at, element);
        }
    }
}

static void take_part(const struct kvt_llama *llama, uint32_t part, uint8_t *blob, uint8_t *coded,
                      uint32_t cells, int head)
{
    const uint32_t parts = 2 * llama->shape.layers;
    struct kvt_part_place *to = calloc(parts, sizeof(*to)), *from = calloc(parts, sizeof(*from));

    if (to != NULL && from != NULL) {
        kvt_llama_places(llama, blob, cells, to);
        kvt_llama_places(llama, coded, cells, from);
        for (uint32_t h = 0; h < llama->parts[part].heads; h++)
            if (head < 0 || (uint32_t)head == h)
                take_head(&llama->parts[part], &to[part], &from[part], h, cells);
    }
    free(to);
    free(from);
}

int quality_alone_new(struct quality_alone *alone, int level, const struct kvt_llama *llama,
                      size_t score)
{
    uint32_t heads = 0;

    for (uint32_t p = 0; p < 2 * llama->shape.layers; p++)
        heads = llama->parts[p].heads > heads ? llama->parts[p].heads : heads;
    *alone = (struct quality_alone){.layers = llama->shape.layers, .one = {.level = level}};
    alone->layer_kl = calloc(llama->shape.layers + 1, sizeof(*alone->layer_kl));
    alone->head_kl = calloc(heads + 1, sizeof(*alone->head_kl));
    alone->one.kl = calloc(score, sizeof(*alone->one.kl));
    return alone->layer_kl != NULL && alone->head_kl != NULL && alone->one.kl != NULL ? 0 : -1;
}

void quality_alone_free(struct quality_alone *alone)
{
    free(alone->layer_kl);
    free(alone->head_kl);
    free(alone->one.kl);
}

/* Score with what `blob` is now; adds the sum of KL to *sum. */
static int one(struct quality_alone *alone, const struct quality_scorer *scorer, uint8_t *blob,
               const char *what, double *sum)
{
    alone->one.kl_count = 0;
    if (scorer->score(scorer->run, &alone->one, blob, what) != 0)
        return -1;
    for (size_t i = 0; i < alone->one.kl_count; i++)
        *sum += alone->one.kl[i];
    return 0;
}

int quality_alone_text(struct quality_alone *alone, const struct kvt_llama *llama,
                       const struct quality_scorer *scorer, const uint8_t *exact, uint8_t *coded,
                       uint8_t *blob, uint32_t cells, bool last)
{
    const size_t bytes = kvt_blob_bytes(&llama->shape, cells);
    char what[160];

    for (uint32_t layer = 0; layer < alone->layers; layer++) {
        memcpy(blob, exact, bytes);
        take_part(llama, 2 * layer, blob, coded, cells, -1);
        take_part(llama, 2 * layer + 1, blob, coded, cells, -1);
        snprintf(what, sizeof(what), "%s, layer %u of %u alone", scorer->where, layer + 1,
                 alone->layers);
        if (one(alone, scorer, blob, what, &alone->layer_kl[layer]) != 0)
            return -1;
    }
    alone->scored += alone->one.kl_count;
    for (uint32_t layer = 0; layer < alone->layers; layer++) /* the worst of all texts so far */
        if (alone->layer_kl[layer] > alone->layer_kl[alone->worst_layer])
            alone->worst_layer = layer;
    alone->heads = llama->parts[2 * alone->worst_layer].heads;
    for (uint32_t head = 0; last && head < alone->heads; head++) {
        memcpy(blob, exact, bytes);
        take_part(llama, 2 * alone->worst_layer, blob, coded, cells, (int)head);
        snprintf(what, sizeof(what), "%s, layer %u, keys of head %u alone", scorer->where,
                 alone->worst_layer, head);
        if (one(alone, scorer, blob, what, &alone->head_kl[head]) != 0)
            return -1;
        if (alone->head_kl[head] > alone->head_kl[alone->worst_head])
            alone->worst_head = head;
    }
    alone->head_scored = alone->one.kl_count;
    return 0;
}

json_t *quality_alone_json(const struct quality_alone *alone, const struct kvt_llama *llama)
{
    json_t *layers = json_array(), *heads = json_array();

    for (uint32_t i = 0; i < alone->layers; i++)
        json_array_append_new(layers, json_real(alone->layer_kl[i] / (double)alone->scored));
    for (uint32_t i = 0; i < alone->heads; i++)
        json_array_append_new(heads, json_real(alone->head_kl[i] / (double)alone->head_scored));
    return json_pack("{s:s, s:I, s:I, s:o, s:o}", "level", kvt_level_name(alone->one.level),
                     "layer", (json_int_t)llama->parts[2 * alone->worst_layer].layer, "head",
                     (json_int_t)alone->worst_head, "layers_kl", layers, "heads_kl", heads);
}
