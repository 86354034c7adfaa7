/* Checks of layouts and pools: everything that the block loop takes for granted afterwards.
 *
 * Invariants given to the rest: all counts lie within the limits of layout.h, every byte offset of
 * a pool fits int64_t and the address range does not wrap, and no two elements of a part share a
 * byte. Not checked: that the memory exists, and that parts do not overlap each other (engines
 * interleave K and V).
 */
#include <stdint.h>

#include "base/checked.h"
#include "codec/piece.h"
#include "kvtier/codec.h"

static int part_check(const struct kvt_part *part)
{
    if (part->kind < KVT_PART_K || part->kind > KVT_PART_OPAQUE)
        return KVT_E_INVAL;
    if (kvt_dtype_bytes(part->dtype) == 0)
        return KVT_E_INVAL;
    if (part->heads == 0 || part->head_dim == 0 || part->head_dim % KVT_PIECE_DIM_MIN != 0)
        return KVT_E_INVAL;
    if (part->kind == KVT_PART_MLA && part->heads != 1)
        return KVT_E_INVAL;
    if (part->heads > KVT_HEADS_MAX || part->head_dim > KVT_HEAD_DIM_MAX)
        return KVT_E_LIMIT;
    return 0;
}

/* The raw record of each group must fit: no level is larger than raw, and 4 KiB are left for the
 * header. */
static int group_sizes_check(const struct kvt_layout *layout)
{
    for (uint32_t i = 0; i < layout->part_count; i++) {
        uint16_t group = layout->parts[i].group;
        uint32_t first = 0;
        while (layout->parts[first].group != group)
            first++;
        if (first != i)
            continue;
        if (kvt_payload_bytes(layout, group, KVT_LEVEL_RAW) > KVT_RECORD_BYTES_MAX - 4096u)
            return KVT_E_LIMIT;
    }
    return 0;
}

/* Whether every part of the group is stored as it is; -1: the group has no part. */
static int group_is_raw(const struct kvt_layout *layout, uint16_t group)
{
    int raw = -1;
    for (uint32_t i = 0; i < layout->part_count; i++) {
        if (layout->parts[i].group != group)
            continue;
        raw = raw != 0;
        if (kvt_level_for_part(KVT_LEVEL_INT4, &layout->parts[i]) != KVT_LEVEL_RAW)
            raw = 0;
    }
    return raw;
}

static int group_check(const struct kvt_layout *layout, uint32_t index)
{
    const struct kvt_group *group = &layout->groups[index];
    int raw = group_is_raw(layout, group->group);
    if (group->kind > KVT_GROUP_STATE || group->reserved != 0 || raw < 0)
        return KVT_E_INVAL;
    if ((group->kind == KVT_GROUP_WINDOW) != (group->window_tokens != 0))
        return KVT_E_INVAL;
    if (group->block_tokens % KVT_TILE_TOKENS != 0 && !raw)
        return KVT_E_INVAL;
    if (group->block_tokens > KVT_BLOCK_TOKENS_MAX)
        return KVT_E_LIMIT;
    for (uint32_t i = 0; i < index; i++)
        if (layout->groups[i].group == group->group)
            return KVT_E_INVAL;
    return 0;
}

int kvt_layout_check(const struct kvt_layout *layout)
{
    if (layout == NULL)
        return KVT_E_INVAL;
    if (layout->struct_size != sizeof(*layout))
        return KVT_E_VERSION;
    if (layout->block_tokens == 0 || layout->block_tokens % KVT_TILE_TOKENS != 0 ||
        layout->part_count == 0 || layout->parts == NULL)
        return KVT_E_INVAL;
    if (layout->block_tokens > KVT_BLOCK_TOKENS_MAX || layout->part_count > KVT_PARTS_MAX)
        return KVT_E_LIMIT;
    for (uint32_t i = 0; i < layout->part_count; i++) {
        int status = part_check(&layout->parts[i]);
        if (status != 0)
            return status;
    }
    if (layout->group_count > KVT_GROUPS_MAX)
        return KVT_E_LIMIT;
    if (layout->group_count != 0 && layout->groups == NULL)
        return KVT_E_INVAL;
    for (uint32_t i = 0; i < layout->group_count; i++) {
        int status = group_check(layout, i);
        if (status != 0)
            return status;
    }
    return group_sizes_check(layout);
}

struct axis {
    int64_t stride;
    int64_t count;
};

/* Elements lie apart: each stride, from the smallest up, steps over everything inside it. */
static int place_check(const struct kvt_part *part, uint32_t block_tokens, uint32_t block_count,
                       const struct kvt_part_place *place)
{
    int64_t element = kvt_dtype_bytes(part->dtype);
    struct axis axes[4] = {{place->stride_block, block_count},
                           {place->stride_head, part->heads},
                           {place->stride_token, block_tokens},
                           {place->stride_elem, part->head_dim}};
    if (place->base == NULL)
        return KVT_E_INVAL;
    for (int i = 0; i < 4; i++)
        if (axes[i].stride < 0 || axes[i].stride % element != 0)
            return KVT_E_INVAL;
    for (int i = 1; i < 4; i++)
        for (int j = i; j > 0 && axes[j].stride < axes[j - 1].stride; j--) {
            struct axis swap = axes[j];
            axes[j] = axes[j - 1];
            axes[j - 1] = swap;
        }
    int64_t extent = element; /* bytes from the first to past the last element so far */
    for (int i = 0; i < 4; i++) {
        int64_t reach;
        if (axes[i].count == 1)
            continue;
        if (axes[i].stride < extent)
            return KVT_E_INVAL;
        if (!kvt_mul_ok(axes[i].stride, axes[i].count - 1, &reach) ||
            !kvt_add_ok(extent, reach, &extent))
            return KVT_E_INVAL;
    }
    uintptr_t end;
    if (!kvt_add_ok((uintptr_t)place->base, (uintptr_t)extent, &end))
        return KVT_E_INVAL;
    return 0;
}

int kvt_pool_check(const struct kvt_layout *layout, const struct kvt_pool_desc *pool)
{
    if (layout == NULL || pool == NULL)
        return KVT_E_INVAL;
    if (pool->struct_size != sizeof(*pool))
        return KVT_E_VERSION;
    if (pool->block_count == 0 || pool->places == NULL)
        return KVT_E_INVAL;
    if (pool->place_count != layout->part_count)
        return KVT_E_LAYOUT;
    for (uint32_t i = 0; i < layout->part_count; i++) {
        uint32_t tokens = kvt_group_tokens(layout, layout->parts[i].group);
        int status = place_check(&layout->parts[i], tokens, pool->block_count, &pool->places[i]);
        if (status != 0)
            return status;
    }
    return 0;
}
