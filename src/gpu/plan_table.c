/* The table of parts that the kernels walk, made of a layout and a pool. Pure functions.
 *
 * Parts are sorted by class (which encoder takes them), so that each launch covers consecutive
 * parts; payload_at and order_at keep where a part stands in the payload. Layout and pool have
 * passed their checks.
 */
#include <string.h>

#include "codec/guard.h"
#include "codec/piece.h"
#include "gpu/gpu_internal.h"
#include "kvtier/codec.h"

static enum kvt_gpu_class class_of(const struct kvt_part *part, int level)
{
    struct kvt_piece piece;
    if (level == KVT_LEVEL_RAW)
        return KVT_GPU_CLASS_RAW;
    kvt_piece_init(&piece, level, part->dtype, kvt_part_is_key(part), KVT_PIECE_DIM_MAX);
    if (piece.coder != KVT_CODER_GAUSS)
        return KVT_GPU_CLASS_UNIFORM;
    return piece.bits == 4 ? KVT_GPU_CLASS_C4 : KVT_GPU_CLASS_C5;
}

/* Rows of the part can be touched 16 bytes at a time: every address that starts a row, or a piece
 * of it, is a multiple of 16. */
static int is_vector(const struct kvt_part_place *place, uint32_t element_bytes)
{
    return place->stride_elem == (int64_t)element_bytes && (uintptr_t)place->base % 16 == 0 &&
           place->stride_block % 16 == 0 && place->stride_head % 16 == 0 &&
           place->stride_token % 16 == 0;
}

static struct kvt_gpu_part part_of(const struct kvt_part *part, const struct kvt_part_place *place,
                                   uint32_t block_tokens, int level)
{
    uint32_t element_bytes = kvt_dtype_bytes(part->dtype);
    struct kvt_gpu_part out = {
        .base = (uintptr_t)place->base,
        .stride_block = place->stride_block,
        .stride_head = place->stride_head,
        .stride_token = place->stride_token,
        .stride_elem = place->stride_elem,
        .unit_bytes = KVT_TILE_TOKENS * part->head_dim * element_bytes,
        .tiles = block_tokens / KVT_TILE_TOKENS,
        .head_dim = part->head_dim,
        .dtype = part->dtype,
        .key = (uint8_t)kvt_part_is_key(part),
        .element_bytes = (uint8_t)element_bytes,
        .vector = (uint8_t)is_vector(place, element_bytes),
    };
    if (level != KVT_LEVEL_RAW) {
        struct kvt_piece piece;
        kvt_piece_init(&piece, level, part->dtype, out.key, KVT_PIECE_DIM_MAX);
        out.unit_bytes = kvt_tile_bytes(level, part);
        out.coder = piece.coder;
        out.bits = piece.bits;
        out.guard_ratio = out.key ? kvt_guard_ratio(level) : 0.0f;
    }
    return out;
}

static struct kvt_gpu_span span_of(const struct kvt_gpu_part *parts, const uint32_t *units,
                                   uint32_t first, uint32_t count)
{
    struct kvt_gpu_span span = {.first_part = first, .part_count = count};
    if (count == 0)
        return span;
    span.first_unit = parts[first].first_unit;
    span.units_per_part = units[first];
    for (uint32_t i = first; i < first + count; i++) {
        span.unit_count += units[i];
        if (units[i] != units[first])
            span.units_per_part = 0;
    }
    return span;
}

uint32_t kvt_gpu_table(const struct kvt_layout *layout, uint16_t group, int level,
                       const struct kvt_pool_desc *pool, struct kvt_gpu_part *parts,
                       struct kvt_gpu_span classes[KVT_GPU_CLASSES], struct kvt_gpu_span *coded)
{
    uint32_t units[KVT_PARTS_MAX], count = 0, first_unit = 0;
    for (int class = 0; class < KVT_GPU_CLASSES; class ++) {
        uint32_t payload_at = 0, order_at = 0, first = count;
        for (uint32_t i = 0; i < layout->part_count; i++) {
            const struct kvt_part *part = &layout->parts[i];
            if (part->group != group)
                continue;
            int part_level = kvt_level_for_part(level, part);
            struct kvt_gpu_part entry =
                part_of(part, &pool->places[i], layout->block_tokens, part_level);
            uint32_t part_units = part->heads * entry.tiles;
            if ((int)class_of(part, part_level) == class) {
                entry.payload_at = payload_at;
                entry.order_at = order_at;
                entry.first_unit = first_unit;
                units[count] = part_units;
                parts[count++] = entry;
                first_unit += part_units;
            }
            payload_at += part_units * entry.unit_bytes;
            order_at += part_units;
        }
        classes[class] = span_of(parts, units, first, count - first);
    }
    *coded = span_of(parts, units, 0, count - classes[KVT_GPU_CLASS_RAW].part_count);
    return count;
}
