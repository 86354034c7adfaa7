/* Shared by the codec tests: pools with red zones in several stride orders, seeded data, readers.
 * Every helper asserts; nothing is kept between tests. */
#ifndef CODEC_SUPPORT_H
#define CODEC_SUPPORT_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/checked.h"
#include "base/rng.h"
#include "codec/block.h"
#include "codec/half.h"
#include "codec/piece.h"

#define CODEC_RED 4096u /* bytes of red zone before and after the pool */
#define CODEC_RED_BYTE 0xa5

/* A pool of two parts, K and V, in one allocation. */
struct codec_pool {
    struct kvt_part parts[2];
    struct kvt_layout layout;
    struct kvt_part_place places[2];
    struct kvt_pool_desc desc;
    uint8_t *memory; /* with red zones */
    size_t part_bytes;
};

/* Stride orders, outermost first. */
enum {
    CODEC_ORDER_BHTE = 0,   /* plain */
    CODEC_ORDER_BTHE = 1,   /* token rows with all heads */
    CODEC_ORDER_BHET = 2,   /* transposed: token is the contiguous one */
    CODEC_ORDER_TEHB = 3,   /* everything turned around */
    CODEC_ORDER_PADDED = 4, /* plain with gaps between rows, heads and blocks */
    CODEC_ORDERS = 5
};

static inline void codec_place_make(struct kvt_part_place *place, const struct kvt_part *part,
                                    uint32_t tokens, uint32_t blocks, int order, uint8_t *base)
{
    int64_t s = kvt_dtype_bytes(part->dtype), h = part->heads, d = part->head_dim, n = tokens;
    int64_t b = blocks, padded = ((d + 1) * n + 3) * s;
    switch (order) {
    case CODEC_ORDER_BTHE:
        *place = (struct kvt_part_place){base, n * h * d * s, d * s, h * d * s, s};
        break;
    case CODEC_ORDER_BHET:
        *place = (struct kvt_part_place){base, n * h * d * s, n * d * s, s, n * s};
        break;
    case CODEC_ORDER_TEHB:
        *place = (struct kvt_part_place){base, s, b * s, d * h * b * s, h * b * s};
        break;
    case CODEC_ORDER_PADDED:
        *place = (struct kvt_part_place){base, padded * h + 6 * s, padded, (d + 1) * s, s};
        break;
    default:
        *place = (struct kvt_part_place){base, n * h * d * s, n * d * s, d * s, s};
        break;
    }
}

static inline void codec_pool_make(struct codec_pool *pool, int dtype, uint32_t head_dim,
                                   uint32_t heads, uint32_t tokens, uint32_t blocks, int order)
{
    memset(pool, 0, sizeof(*pool));
    size_t block_elements = heads * (size_t)((head_dim + 1) * tokens + 3) + 6;
    pool->part_bytes = kvt_round_up(blocks * block_elements * kvt_dtype_bytes(dtype), 64);
    pool->memory = malloc(2 * pool->part_bytes + 2 * CODEC_RED);
    assert_non_null(pool->memory);
    memset(pool->memory, CODEC_RED_BYTE, 2 * pool->part_bytes + 2 * CODEC_RED);
    for (uint32_t p = 0; p < 2; p++) {
        uint8_t kind = p == 0 ? KVT_PART_K : KVT_PART_V;
        pool->parts[p] = (struct kvt_part){kind, (uint8_t)dtype, 0, 0, heads, head_dim};
        codec_place_make(&pool->places[p], &pool->parts[p], tokens, blocks, order,
                         pool->memory + CODEC_RED + p * pool->part_bytes);
    }
    pool->layout = (struct kvt_layout){sizeof(pool->layout), tokens, 2, pool->parts};
    pool->desc =
        (struct kvt_pool_desc){sizeof(pool->desc), KVT_DEVICE_HOST, blocks, 2, pool->places};
    assert_int_equal(kvt_layout_check(&pool->layout), 0);
    assert_int_equal(kvt_pool_check(&pool->layout, &pool->desc), 0);
}

static inline void codec_pool_free(struct codec_pool *pool)
{
    for (size_t i = 0; i < CODEC_RED; i++) {
        assert_int_equal(pool->memory[i], CODEC_RED_BYTE);
        assert_int_equal(pool->memory[CODEC_RED + 2 * pool->part_bytes + i], CODEC_RED_BYTE);
    }
    free(pool->memory);
}

static inline void *codec_element(const struct codec_pool *pool, uint32_t part, uint32_t block,
                                  uint32_t head, uint32_t token, uint32_t e)
{
    const struct kvt_part_place *place = &pool->places[part];
    return (uint8_t *)place->base + place->stride_block * block + place->stride_head * head +
           place->stride_token * token + place->stride_elem * e;
}

static inline float codec_get(const struct codec_pool *pool, uint32_t part, uint32_t block,
                              uint32_t head, uint32_t token, uint32_t e)
{
    float value;
    kvt_half_to_floats(pool->parts[part].dtype, codec_element(pool, part, block, head, token, e), 1,
                       &value);
    return value;
}

/* Any float, infinities and NaN too, as an element of the dtype. */
static inline void codec_store(int dtype, void *at, float value)
{
    uint16_t half = kvt_float_to_bf16(value);
    if (dtype == KVT_DTYPE_F16)
        half = isnan(value)   ? 0x7e00
               : isinf(value) ? (value > 0 ? 0x7c00 : 0xfc00)
                              : kvt_float_to_f16(value);
    else if (isnan(value))
        half = 0x7fc0;
    if (dtype == KVT_DTYPE_F32)
        memcpy(at, &value, 4);
    else
        memcpy(at, &half, 2);
}

static inline void codec_set(const struct codec_pool *pool, uint32_t part, uint32_t block,
                             uint32_t head, uint32_t token, uint32_t e, float value)
{
    codec_store(pool->parts[part].dtype, codec_element(pool, part, block, head, token, e), value);
}

/* Visit every element of a pool. */
#define CODEC_EACH(pool, p, b, h, t, e)                                    \
    for (uint32_t p = 0; p < (pool)->layout.part_count; p++)               \
        for (uint32_t b = 0; b < (pool)->desc.block_count; b++)            \
            for (uint32_t h = 0; h < (pool)->parts[p].heads; h++)          \
                for (uint32_t t = 0; t < (pool)->layout.block_tokens; t++) \
                    for (uint32_t e = 0; e < (pool)->parts[p].head_dim; e++)

/* In (0, 1). */
static inline double codec_uniform(struct kvt_rng *rng)
{
    return ((double)(kvt_rng_next(rng) >> 11) + 0.5) * 0x1p-53;
}

static inline double codec_normal(struct kvt_rng *rng)
{
    double radius = sqrt(-2.0 * log(codec_uniform(rng)));
    return radius * cos(6.283185307179586 * codec_uniform(rng));
}

static inline void codec_pool_fill_random_bits(struct codec_pool *pool, uint64_t seed)
{
    struct kvt_rng rng = {seed};
    CODEC_EACH(pool, p, b, h, t, e)
    {
        uint64_t bits = kvt_rng_next(&rng);
        memcpy(codec_element(pool, p, b, h, t, e), &bits, kvt_dtype_bytes(pool->parts[p].dtype));
    }
}

/* N(0, sigma), the same values whatever the strides. */
static inline void codec_pool_fill_normal(struct codec_pool *pool, uint64_t seed, double sigma)
{
    struct kvt_rng rng = {seed};
    CODEC_EACH(pool, p, b, h, t, e)
    {
        codec_set(pool, p, b, h, t, e, (float)(sigma * codec_normal(&rng)));
    }
}

static inline uint8_t *codec_encode(const struct codec_pool *pool, int level, uint32_t block,
                                    size_t *bytes)
{
    *bytes = kvt_payload_bytes(&pool->layout, 0, level);
    uint8_t *payload = malloc(*bytes);
    assert_non_null(payload);
    assert_int_equal(
        kvt_encode_block(&pool->layout, 0, level, &pool->desc, block, payload, *bytes, 0, NULL), 0);
    return payload;
}

#endif
