/* kvtier quality: the cache through the codec and back, and what that does to its keys.
 *
 * The rows of a sequence state are coded by the library's own kvt_encode_block() and
 * kvt_decode_block(), block by block as the store does it; only the guard does not raise a level
 * here (the table is about one level), it is asked and counted. The signal of a key is measured
 * around the mean of its 16-token tile, as the guard does: offsets carry no information.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codec/half.h"
#include "quality.h"

/* A pool over the rows of a blob. */
struct rows {
    struct kvt_layout layout;
    struct kvt_pool_desc desc;
    struct kvt_part_place *places;
};

static int open_rows(const struct kvt_llama *llama, uint8_t *blob, uint32_t cells,
                     struct rows *rows)
{
    const uint32_t parts = 2 * llama->shape.layers;

    rows->places = calloc(parts, sizeof(*rows->places));
    if (rows->places == NULL)
        return -ENOMEM;
    kvt_llama_places(llama, blob, cells, rows->places);
    rows->layout =
        (struct kvt_layout){sizeof(rows->layout), llama->block_tokens, parts, llama->parts};
    rows->desc = (struct kvt_pool_desc){.struct_size = sizeof(rows->desc),
                                        .device = KVT_DEVICE_HOST,
                                        .block_count = cells / llama->block_tokens,
                                        .place_count = parts,
                                        .places = rows->places};
    return kvt_pool_check(&rows->layout, &rows->desc);
}

static float element(int dtype, const uint8_t *row, uint32_t e)
{
    uint16_t half;
    float value;

    if (dtype == KVT_DTYPE_F32) {
        memcpy(&value, row + (size_t)e * 4, 4);
        return value;
    }
    memcpy(&half, row + (size_t)e * 2, 2);
    return dtype == KVT_DTYPE_F16 ? kvt_f16_to_float(half) : kvt_bf16_to_float(half);
}

/* Energy around the tile's mean and of the error, of one head of 16 tokens. was, is: first rows. */
static void tile_energy(const struct kvt_part *part, const struct kvt_part_place *place,
                        const uint8_t *was, const uint8_t *is, double *signal, double *noise)
{
    for (uint32_t e = 0; e < part->head_dim; e++) {
        double mean = 0, values[KVT_TILE_TOKENS];

        for (uint32_t t = 0; t < KVT_TILE_TOKENS; t++) {
            const size_t at = (size_t)t * (size_t)place->stride_token;
            values[t] = element(part->dtype, was + at, e);
            mean += values[t] / KVT_TILE_TOKENS;
            const double error = values[t] - element(part->dtype, is + at, e);
            *noise += error * error;
        }
        for (uint32_t t = 0; t < KVT_TILE_TOKENS; t++)
            *signal += (values[t] - mean) * (values[t] - mean);
    }
}

/* Keys of blocks [from, to) before (was) and after coding (now). */
static void add_energy(struct quality_level *level, const struct rows *was, const struct rows *now,
                       size_t from, size_t to)
{
    size_t base = 0;

    for (uint32_t p = 0; p < now->layout.part_count; p += 2) { /* K parts */
        const struct kvt_part *part = &now->layout.parts[p];
        const struct kvt_part_place *place = &now->places[p];
        const size_t tiles = now->layout.block_tokens / KVT_TILE_TOKENS;
        const size_t tile_bytes = (size_t)place->stride_token * KVT_TILE_TOKENS;
        for (uint32_t h = 0; h < part->heads; h++) {
            const size_t in_row = (size_t)h * (size_t)place->stride_head;
            double signal = 0, noise = 0;
            for (size_t tile = from * tiles; tile < to * tiles; tile++) {
                const size_t at = in_row + tile * tile_bytes;
                tile_energy(part, place, (const uint8_t *)was->places[p].base + at,
                            (const uint8_t *)place->base + at, &signal, &noise);
            }
            level->head_signal[base + h] += signal;
            level->head_noise[base + h] += noise;
        }
        base += part->heads;
    }
}

/* One block to bytes and back. The guard is asked first; what it refuses is coded all the same. */
static int code_block(const struct rows *rows, int code, size_t block, uint8_t *payload,
                      size_t payload_bytes, struct quality_level *level)
{
    const uint32_t page = (uint32_t)block;

    int rc = kvt_encode_block(&rows->layout, 0, code, &rows->desc, page, payload, payload_bytes, 1,
                              NULL);
    if (rc == KVT_E_GUARD) {
        level->blocks_below++;
        rc = kvt_encode_block(&rows->layout, 0, code, &rows->desc, page, payload, payload_bytes, 0,
                              NULL);
    }
    if (rc == KVT_E_NONFINITE) { /* such a block is stored raw */
        level->blocks_raw++;
        return 0;
    }
    level->blocks++;
    return rc != 0 ? rc
                   : kvt_decode_block(&rows->layout, 0, code, payload, payload_bytes, &rows->desc,
                                      page);
}

int quality_code(const struct kvt_llama *llama, struct quality_level *level, uint8_t *blob,
                 uint32_t cells, size_t from, size_t to, size_t context, size_t window)
{
    const size_t bytes = kvt_blob_bytes(&llama->shape, cells);
    struct rows was = {.places = NULL}, now = {.places = NULL};
    uint8_t *copy = malloc(bytes), *payload = NULL;
    size_t room = 0;

    if (from == 0)
        from = 1;
    int rc = copy != NULL ? 0 : -ENOMEM;
    if (rc == 0)
        rc = open_rows(llama, blob, cells, &now);
    if (rc == 0)
        rc = open_rows(llama, copy, cells, &was);
    if (rc != 0)
        goto out;
    memcpy(copy, blob, bytes);
    room = kvt_payload_bytes(&now.layout, 0, KVT_LEVEL_RAW);
    payload = aligned_alloc(64, (room + 63) & ~(size_t)63);
    if (payload == NULL) {
        rc = -ENOMEM;
        goto out;
    }
    for (size_t block = from; rc == 0 && block < to; block++) {
        const int recent = (block + 1) * llama->block_tokens + window > context;
        const int code = recent && level->level < KVT_LEVEL_KV8 ? KVT_LEVEL_KV8 : level->level;
        rc = code_block(&now, code, block, payload, kvt_payload_bytes(&now.layout, 0, code), level);
    }
    if (rc == 0 && to > from)
        add_energy(level, &was, &now, from, to);
out:
    free(payload);
    free(copy);
    free(was.places);
    free(now.places);
    return rc;
}

double quality_bits(const struct kvt_llama *llama, int level)
{
    double bits = 0, elements = 0;

    for (uint32_t p = 0; p < 2 * llama->shape.layers; p++) {
        const struct kvt_part *part = &llama->parts[p];
        const double count = (double)part->heads * part->head_dim;
        bits += count * kvt_level_bits(kvt_level_for_part(level, part), part->head_dim, part->dtype,
                                       part->kind == KVT_PART_K);
        elements += count;
    }
    return elements > 0 ? bits / elements : 0;
}

double quality_worst(const struct kvt_llama *llama, const struct quality_level *level,
                     uint32_t *layer, uint32_t *head)
{
    double worst = INFINITY;
    size_t at = 0;

    *layer = *head = 0;
    for (uint32_t p = 0; p < 2 * llama->shape.layers; p += 2) {
        for (uint32_t h = 0; h < llama->parts[p].heads; h++, at++) {
            const double db = 10 * log10(level->head_signal[at] / level->head_noise[at]);
            if (!(level->head_noise[at] > 0) || !(db < worst))
                continue;
            worst = db;
            *layer = llama->parts[p].layer;
            *head = h;
        }
    }
    return worst;
}
