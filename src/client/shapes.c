/* Shapes: layouts with what follows from them, one object per distinct layout and cache, so that
 * the data path compares pointers. Immutable once made; freed when the cache closes.
 * Threads: under the cache's lock. Allocates.
 */
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "kvtier/codec.h"

static bool layouts_equal(const struct kvt_layout *a, const struct kvt_layout *b)
{
    if (a->block_tokens != b->block_tokens || a->part_count != b->part_count ||
        a->group_count != b->group_count)
        return false;
    for (uint32_t i = 0; i < a->part_count; i++) {
        const struct kvt_part *x = &a->parts[i], *y = &b->parts[i];
        if (x->kind != y->kind || x->dtype != y->dtype || x->group != y->group ||
            x->layer != y->layer || x->heads != y->heads || x->head_dim != y->head_dim)
            return false;
    }
    for (uint32_t i = 0; i < a->group_count; i++) {
        const struct kvt_group *x = &a->groups[i], *y = &b->groups[i];
        if (x->group != y->group || x->kind != y->kind || x->block_tokens != y->block_tokens ||
            x->window_tokens != y->window_tokens)
            return false;
    }
    return true;
}

static void shape_free(struct kvt_shape *shape)
{
    for (uint32_t i = 0; i < shape->group_count; i++)
        kvt_shape_group_free(&shape->groups[i]);
    free(shape);
}

static struct kvt_shape *shape_make(const struct kvt_layout *layout)
{
    size_t parts_bytes = layout->part_count * sizeof(struct kvt_part);
    size_t groups_bytes = layout->group_count * sizeof(struct kvt_group);
    struct kvt_shape *shape = calloc(1, sizeof(*shape) + parts_bytes + groups_bytes);
    if (shape == NULL)
        return NULL;
    struct kvt_part *parts = (struct kvt_part *)(shape + 1);
    struct kvt_group *groups = (struct kvt_group *)(parts + layout->part_count);
    memcpy(parts, layout->parts, parts_bytes);
    if (groups_bytes != 0)
        memcpy(groups, layout->groups, groups_bytes);
    shape->layout = *layout;
    shape->layout.struct_size = sizeof(shape->layout);
    shape->layout.parts = parts;
    shape->layout.groups = groups;
    for (uint32_t i = 0; i < layout->part_count; i++) {
        if (kvt_shape_group_of(shape, parts[i].group) != NULL)
            continue;
        if (kvt_shape_group_init(&shape->groups[shape->group_count++], &shape->layout,
                                 parts[i].group) != 0) {
            shape_free(shape);
            return NULL;
        }
    }
    return shape;
}

const struct kvt_shape_group *kvt_shape_group_of(const struct kvt_shape *shape, uint16_t group)
{
    for (uint32_t i = 0; i < shape->group_count; i++)
        if (shape->groups[i].group == group)
            return &shape->groups[i];
    return NULL;
}

int kvt_shape_check(const struct kvt_layout *layout)
{
    uint16_t seen[KVT_GROUPS_MAX];
    uint32_t count = 0;
    int rc = kvt_layout_check(layout);
    if (rc != 0)
        return rc;
    for (uint32_t i = 0; i < layout->part_count; i++) {
        uint32_t at = 0;
        while (at < count && seen[at] != layout->parts[i].group)
            at++;
        if (at < count)
            continue;
        if (count == KVT_GROUPS_MAX)
            return KVT_E_LIMIT;
        seen[count++] = layout->parts[i].group;
    }
    return 0;
}

const struct kvt_shape *kvt_shape_intern(struct kvt_cache *cache, const struct kvt_layout *layout)
{
    struct kvt_shape *shape;
    for (shape = cache->shapes; shape != NULL; shape = shape->next)
        if (layouts_equal(&shape->layout, layout))
            return shape;
    shape = shape_make(layout);
    if (shape == NULL)
        return NULL;
    shape->next = cache->shapes;
    cache->shapes = shape;
    return shape;
}

void kvt_shapes_free(struct kvt_cache *cache)
{
    struct kvt_shape *shape;
    while ((shape = cache->shapes) != NULL) {
        cache->shapes = shape->next;
        shape_free(shape);
    }
}
