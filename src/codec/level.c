/* Levels: names, which coder a level means, and how many bytes things take. Pure functions. */
#include <string.h>

#include "base/checked.h"
#include "codec/piece.h"
#include "kvtier/codec.h"

static const char *const level_names[] = {
    [KVT_LEVEL_INT4] = "int4", [KVT_LEVEL_KV4] = "kv4", [KVT_LEVEL_KV5] = "kv5",
    [KVT_LEVEL_KV6] = "kv6",   [KVT_LEVEL_KV8] = "kv8", [KVT_LEVEL_RAW] = "raw",
};

static int is_level(int level)
{
    return level >= KVT_LEVEL_INT4 && level <= KVT_LEVEL_RAW;
}

int kvt_level_parse(const char *name)
{
    for (int level = KVT_LEVEL_INT4; name != NULL && level <= KVT_LEVEL_RAW; level++)
        if (strcmp(name, level_names[level]) == 0)
            return level;
    return KVT_E_INVAL;
}

const char *kvt_level_name(int level)
{
    return is_level(level) ? level_names[level] : NULL;
}

int kvt_level_supported(int level)
{
    return is_level(level);
}

int kvt_level_for_part(int level, const struct kvt_part *part)
{
    if (!is_level(level))
        return KVT_E_INVAL;
    if (part->kind == KVT_PART_OPAQUE || part->dtype == KVT_DTYPE_BYTE)
        return KVT_LEVEL_RAW;
    if (part->kind == KVT_PART_MLA && level < KVT_LEVEL_KV8)
        return KVT_LEVEL_KV8;
    return level;
}

uint32_t kvt_dtype_bytes(int dtype)
{
    switch (dtype) {
    case KVT_DTYPE_BF16:
    case KVT_DTYPE_F16:
        return 2;
    case KVT_DTYPE_F32:
        return 4;
    case KVT_DTYPE_BYTE:
        return 1;
    default:
        return 0;
    }
}

void kvt_piece_init(struct kvt_piece *piece, int level, int dtype, int key, uint32_t dim)
{
    memset(piece, 0, sizeof(*piece));
    switch (level) {
    case KVT_LEVEL_INT4:
        piece->coder = KVT_CODER_PLAIN;
        piece->bits = 4;
        break;
    case KVT_LEVEL_KV4:
        piece->coder = KVT_CODER_GAUSS;
        piece->bits = 4;
        break;
    case KVT_LEVEL_KV5: /* the fifth bit goes to keys only: they are what hurts */
        piece->coder = KVT_CODER_GAUSS;
        piece->bits = key ? 5 : 4;
        break;
    case KVT_LEVEL_KV6:
        piece->coder = KVT_CODER_UNIFORM;
        piece->bits = 6;
        break;
    default:
        piece->coder = KVT_CODER_UNIFORM;
        piece->bits = 8;
        break;
    }
    piece->dtype = (uint8_t)dtype;
    piece->dim = dim;
    if (key && piece->coder != KVT_CODER_PLAIN)
        piece->offsets = (uint8_t)(dim / 4 < KVT_OFFSETS_MAX ? dim / 4 : KVT_OFFSETS_MAX);
    uint32_t bits_in_rows = piece->bits == 8 ? 8 : 4;
    piece->plane_at = KVT_TILE_TOKENS * dim * bits_in_rows / 8;
    piece->scales_at = KVT_TILE_TOKENS * dim * piece->bits / 8;
    piece->offsets_at = piece->scales_at + KVT_TILE_TOKENS * 2;
    piece->bytes = piece->offsets_at + (piece->offsets > 0 ? KVT_OFFSETS_BYTES : 0);
}

static uint32_t row_tile_bytes(int level, int dtype, int key, uint32_t head_dim)
{
    uint32_t bytes = 0;
    for (uint32_t rest = head_dim, dim; rest > 0; rest -= dim) {
        struct kvt_piece piece;
        dim = kvt_piece_next_dim(rest);
        kvt_piece_init(&piece, level, dtype, key, dim);
        bytes += piece.bytes;
    }
    return bytes;
}

uint32_t kvt_tile_bytes(int level, const struct kvt_part *part)
{
    return row_tile_bytes(level, part->dtype, kvt_part_is_key(part), part->head_dim);
}

double kvt_level_bits(int level, uint32_t head_dim, int dtype, int key)
{
    if (!is_level(level) || kvt_dtype_bytes(dtype) == 0 || head_dim < KVT_PIECE_DIM_MIN ||
        head_dim > KVT_HEAD_DIM_MAX || head_dim % KVT_PIECE_DIM_MIN != 0)
        return 0.0;
    if (level == KVT_LEVEL_RAW || dtype == KVT_DTYPE_BYTE)
        return 8.0 * kvt_dtype_bytes(dtype);
    return 8.0 * row_tile_bytes(level, dtype, key, head_dim) / ((double)KVT_TILE_TOKENS * head_dim);
}

uint32_t kvt_group_tokens(const struct kvt_layout *layout, uint16_t group)
{
    for (uint32_t i = 0; i < layout->group_count; i++)
        if (layout->groups[i].group == group && layout->groups[i].block_tokens != 0)
            return layout->groups[i].block_tokens;
    return layout->block_tokens;
}

/* Of one head of a block. */
static size_t head_bytes(int level, const struct kvt_part *part, uint32_t tokens)
{
    if (level == KVT_LEVEL_RAW)
        return (size_t)tokens * part->head_dim * kvt_dtype_bytes(part->dtype);
    return (size_t)(tokens / KVT_TILE_TOKENS) * kvt_tile_bytes(level, part);
}

size_t kvt_payload_bytes(const struct kvt_layout *layout, uint16_t group, int level)
{
    size_t bytes = 0;
    uint32_t tokens = kvt_group_tokens(layout, group);
    if (!is_level(level))
        return 0;
    for (uint32_t i = 0; i < layout->part_count; i++) {
        const struct kvt_part *part = &layout->parts[i];
        if (part->group == group)
            bytes += head_bytes(kvt_level_for_part(level, part), part, tokens) * part->heads;
    }
    return bytes;
}

uint32_t kvt_map_entries(const struct kvt_layout *layout, uint16_t group)
{
    uint32_t entries = 0;
    for (uint32_t i = 0; i < layout->part_count; i++)
        if (layout->parts[i].group == group)
            entries += layout->parts[i].heads;
    return entries;
}

size_t kvt_map_payload_bytes(const struct kvt_layout *layout, uint16_t group, const uint8_t *map,
                             int *floor)
{
    size_t bytes = 0;
    uint32_t entry = 0, tokens = kvt_group_tokens(layout, group);
    int lowest = KVT_LEVEL_RAW;
    for (uint32_t i = 0; i < layout->part_count; i++) {
        const struct kvt_part *part = &layout->parts[i];
        for (uint32_t head = 0; part->group == group && head < part->heads; head++) {
            int level = kvt_map_get(map, entry++);
            if (kvt_level_for_part(level, part) != level)
                return 0;
            bytes += head_bytes(level, part, tokens);
            lowest = KVT_MIN(lowest, level);
        }
    }
    if (floor != NULL)
        *floor = lowest;
    return bytes;
}
