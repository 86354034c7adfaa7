/* The table of parts that the kernels walk, made of a layout, a map and a pool. Pure functions.
 *
 * An entry is a run of heads of one part that are coded alike. Entries are sorted by class (which
 * encoder takes them), so that each launch covers consecutive ones; payload_at and order_at keep
 * where a head stands in the payload. Layout, map and pool have passed their checks.
 */
#include <string.h>

#include "base/checked.h"
#include "codec/guard.h"
#include "codec/piece.h"
#include "gpu/gpu_internal.h"
#include "kvtier/codec.h"

/* Rows of the entry can be touched 16 bytes at a time: every address that starts a row, or a piece
 * of it, is a multiple of 16. */
static uint8_t is_vector(const struct kvt_gpu_part *entry)
{
    return entry->stride_elem == entry->element_bytes && entry->base % 16 == 0 &&
           entry->stride_block % 16 == 0 && entry->stride_head % 16 == 0 &&
           entry->stride_token % 16 == 0 && entry->head_dim * entry->element_bytes % 16 == 0;
}

static enum kvt_gpu_class class_of(const struct kvt_gpu_part *entry)
{
    int dense =
        entry->vector && entry->dtype == KVT_DTYPE_BF16 && entry->head_dim == KVT_PIECE_DIM_MAX;
    if (entry->coder == 0)
        return KVT_GPU_CLASS_RAW;
    if (entry->coder != KVT_CODER_GAUSS)
        return KVT_GPU_CLASS_UNIFORM;
    if (entry->bits == 4)
        return dense ? KVT_GPU_CLASS_DENSE_C4 : KVT_GPU_CLASS_C4;
    return dense ? KVT_GPU_CLASS_DENSE_C5 : KVT_GPU_CLASS_C5;
}

/* ---- entries ---- */

struct builder {
    const struct kvt_gpu_source *source;
    struct kvt_gpu_part *parts; /* NULL: only counted */
    uint32_t count, first_unit;
    uint32_t tokens; /* of a block */
    enum kvt_gpu_class class;
    int key; /* of a dense class: keys, or what is not */
};

/* Where the walk over the payload stands. */
struct place {
    uint32_t entry; /* of the map */
    uint32_t payload_at, order_at;
};

static void push(struct builder *b, struct kvt_gpu_part *entry, uint32_t units)
{
    entry->vector = is_vector(entry);
    entry->first_unit = b->first_unit;
    if (b->parts != NULL)
        b->parts[b->count] = *entry;
    b->count++;
    b->first_unit += units;
}

/* Raw rows of a group whose blocks are not whole tiles (states): a row is cut into 16, which the
 * kernels take for the tokens of a tile. */
static void push_rows(struct builder *b, const struct kvt_gpu_part *head, uint32_t heads,
                      uint32_t row_bytes)
{
    uint32_t runs = b->tokens == 1 ? 1 : heads, units = b->tokens == 1 ? heads : 1;
    for (uint32_t h = 0; h < runs; h++)
        for (uint32_t t = 0; t < b->tokens; t++) {
            struct kvt_gpu_part row = *head;
            row.base += (uint64_t)(head->stride_head * h + head->stride_token * t);
            row.payload_at += (h * b->tokens + t) * row_bytes;
            row.order_at += h * b->tokens + t;
            row.head_dim = head->head_dim / KVT_TILE_TOKENS;
            row.stride_token = head->stride_elem * row.head_dim;
            row.unit_bytes = row_bytes;
            row.tiles = 1;
            push(b, &row, units);
        }
}

/* An entry for each unit. */
static void push_units(struct builder *b, const struct kvt_gpu_part *all, uint32_t heads)
{
    for (uint32_t i = 0; i < heads * all->tiles; i++) {
        struct kvt_gpu_part unit = *all;
        unit.base += (uint64_t)(all->stride_head * (i / all->tiles) +
                                all->stride_token * (i % all->tiles) * KVT_TILE_TOKENS);
        unit.payload_at += i * all->unit_bytes;
        unit.order_at += i;
        unit.tiles = 1;
        push(b, &unit, 1);
    }
}

/* Heads [head, head + heads) of a layout's part, all at `level`. Moves the place. */
static void add_heads(struct builder *b, uint32_t index, uint32_t head, uint32_t heads, int level,
                      struct place *at)
{
    const struct kvt_part *part = &b->source->layout->parts[index];
    const struct kvt_part_place *place = &b->source->pool->places[index];
    uint32_t element_bytes = kvt_dtype_bytes(part->dtype);
    uint32_t row_bytes = part->head_dim * element_bytes;
    struct kvt_gpu_part entry = {
        .base = (uintptr_t)place->base + (uint64_t)(place->stride_head * head),
        .stride_block = place->stride_block,
        .stride_head = place->stride_head,
        .stride_token = place->stride_token,
        .stride_elem = place->stride_elem,
        .payload_at = at->payload_at,
        .order_at = at->order_at,
        .unit_bytes = KVT_TILE_TOKENS * row_bytes,
        .tiles = b->tokens / KVT_TILE_TOKENS,
        .head_dim = part->head_dim,
        .dtype = part->dtype,
        .key = (uint8_t)kvt_part_is_key(part),
        .element_bytes = (uint8_t)element_bytes,
    };
    if (level != KVT_LEVEL_RAW) {
        struct kvt_piece piece;
        kvt_piece_init(&piece, level, part->dtype, entry.key, KVT_PIECE_DIM_MAX);
        entry.unit_bytes = kvt_tile_bytes(level, part);
        entry.coder = piece.coder;
        entry.bits = piece.bits;
        entry.guard_ratio = entry.key ? kvt_guard_ratio(level) : 0.0f;
    }
    entry.vector = is_vector(&entry);
    int whole = b->tokens % KVT_TILE_TOKENS == 0, dense = b->class <= KVT_GPU_CLASS_DENSE_C5;
    int wanted = class_of(&entry) == b->class && (!dense || entry.key == b->key) &&
                 index >= b->source->first_part &&
                 index - b->source->first_part < b->source->part_count;
    if (wanted && dense)
        push_units(b, &entry, heads);
    else if (wanted && whole)
        push(b, &entry, heads * entry.tiles);
    else if (wanted)
        push_rows(b, &entry, heads, row_bytes);
    at->payload_at += heads * (whole ? entry.tiles * entry.unit_bytes : b->tokens * row_bytes);
    at->order_at += heads * (whole ? entry.tiles : b->tokens);
}

static int level_at(const struct kvt_gpu_source *source, const struct kvt_part *part,
                    uint32_t entry)
{
    const struct kvt_gpu_map *map = source->map;
    return map->levels != NULL ? kvt_map_get(map->levels, entry)
                               : kvt_level_for_part(map->level, part);
}

uint32_t kvt_gpu_part_bytes(const struct kvt_gpu_source *source, uint32_t index, uint32_t *entry)
{
    const struct kvt_part *part = &source->layout->parts[index];
    uint32_t tokens = kvt_group_tokens(source->layout, source->group), bytes = 0;
    if (part->group != source->group)
        return 0;
    for (uint32_t head = 0; head < part->heads; head++) {
        int level = level_at(source, part, (*entry)++);
        bytes += level == KVT_LEVEL_RAW ? tokens * part->head_dim * kvt_dtype_bytes(part->dtype)
                                        : tokens / KVT_TILE_TOKENS * kvt_tile_bytes(level, part);
    }
    return bytes;
}

static void add_class(struct builder *b)
{
    const struct kvt_layout *layout = b->source->layout;
    struct place at = {.payload_at = b->source->map->lead_bytes};
    for (uint32_t i = 0; i < layout->part_count; i++) {
        const struct kvt_part *part = &layout->parts[i];
        if (part->group != b->source->group)
            continue;
        for (uint32_t head = 0, run; head < part->heads; head += run, at.entry += run) {
            int level = level_at(b->source, part, at.entry);
            run = 1;
            while (head + run < part->heads && level_at(b->source, part, at.entry + run) == level)
                run++;
            add_heads(b, i, head, run, level, &at);
        }
    }
}

/* The lead of a mixed payload, as raw rows that are the same for every block. */
static void add_lead(struct builder *b)
{
    const struct kvt_gpu_map *map = b->source->map;
    struct kvt_gpu_part entry = {
        .base = b->source->lead,
        .unit_bytes = map->lead_bytes,
        .tiles = 1,
        .head_dim = map->lead_bytes / KVT_TILE_TOKENS,
        .dtype = KVT_DTYPE_BYTE,
        .element_bytes = 1,
        .stride_elem = 1,
        .stride_token = map->lead_bytes / KVT_TILE_TOKENS,
    };
    push(b, &entry, 1);
}

/* ---- spans ---- */

/* Entries [first, end) of a table whose units end at `units`. */
static struct kvt_gpu_span span_of(const struct builder *b, uint32_t first, uint32_t end)
{
    struct kvt_gpu_span span = {.first_part = first, .part_count = end - first};
    if (b->parts == NULL || first == end)
        return span;
    span.first_unit = b->parts[first].first_unit;
    for (uint32_t i = first; i < end; i++) {
        uint32_t next = i + 1 < b->count ? b->parts[i + 1].first_unit : b->first_unit;
        uint32_t units = next - b->parts[i].first_unit;
        if (i == first)
            span.units_per_part = units;
        else if (units != span.units_per_part)
            span.units_per_part = 0;
        if (b->parts[i].key && span.key_units == span.unit_count)
            span.key_units += units;
        span.unit_count += units;
    }
    return span;
}

uint32_t kvt_gpu_table(const struct kvt_gpu_source *source, struct kvt_gpu_part *parts,
                       uint32_t first_entry, uint32_t first_unit, struct kvt_gpu_spans *spans)
{
    struct builder b = {
        .source = source,
        .parts = parts,
        .count = first_entry,
        .first_unit = first_unit,
        .tokens = kvt_group_tokens(source->layout, source->group),
    };
    uint32_t from[KVT_GPU_CLASSES + 1];
    for (int class = 0; class < KVT_GPU_CLASSES; class ++) {
        from[class] = b.count;
        b.class = (enum kvt_gpu_class) class;
        for (b.key = class <= KVT_GPU_CLASS_DENSE_C5; b.key >= 0; b.key--)
            add_class(&b);
    }
    from[KVT_GPU_CLASSES] = b.count;
    if (source->map->lead_bytes > 0 && source->first_part == 0)
        add_lead(&b);
    for (int class = 0; class < KVT_GPU_CLASSES; class ++)
        spans->gather[class] = span_of(&b, from[class], from[class + 1]);
    spans->coded = span_of(&b, from[0], from[KVT_GPU_CLASS_RAW]);
    spans->scatter = spans->gather[KVT_GPU_CLASS_RAW];
    spans->gather[KVT_GPU_CLASS_RAW] = span_of(&b, from[KVT_GPU_CLASS_RAW], b.count);
    spans->end_unit = b.first_unit;
    return b.count - first_entry;
}
