/* Level maps: sizes, sets of maps, payloads of mixed records. See map.h.
 * Threads: any; nothing here has state. Allocates maps and sets only: never on the data path.
 */
#include "client/map.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "codec/piece.h"
#include "format/record.h"

#define HEADER_BYTES ((uint32_t)sizeof(struct kvt_record_header))

static uint32_t packed_bytes(uint32_t entries)
{
    return (entries + 1) / 2;
}

static uint32_t table_bytes(uint32_t entries)
{
    return (uint32_t)kvt_round_up(sizeof(struct kvt_record_map) + packed_bytes(entries), 16);
}

/* ---- shapes -------------------------------------------------------------------------------- */

static struct kvt_map *uniform_new(const struct kvt_shape_group *shape, int level)
{
    size_t payload = kvt_payload_bytes(shape->layout, shape->group, level);
    struct kvt_map *map = calloc(1, sizeof(*map));
    if (map == NULL)
        return NULL;
    map->payload_bytes = map->coded_bytes = (uint32_t)payload;
    map->record_bytes = kvt_record_bytes(payload);
    map->level = (uint8_t)level;
    return map;
}

/* What a level comes to in this group: its lowest over the parts. */
static int effective_level(const struct kvt_shape_group *shape, int level)
{
    int lowest = KVT_LEVEL_RAW;
    for (uint32_t i = 0; i < shape->layout->part_count; i++)
        if (shape->layout->parts[i].group == shape->group)
            lowest = KVT_MIN(lowest, kvt_level_for_part(level, &shape->layout->parts[i]));
    return lowest;
}

static void describe(struct kvt_shape_group *shape)
{
    const struct kvt_layout *layout = shape->layout;
    shape->block_tokens = kvt_group_tokens(layout, shape->group);
    shape->entries = kvt_map_entries(layout, shape->group);
    for (uint32_t i = 0; i < layout->group_count; i++) {
        if (layout->groups[i].group != shape->group)
            continue;
        shape->kind = layout->groups[i].kind;
        shape->window_tokens = layout->groups[i].window_tokens;
    }
    for (uint32_t i = 0; i < layout->part_count; i++) {
        const struct kvt_part *part = &layout->parts[i];
        if (part->group == shape->group)
            shape->block_bytes += (uint64_t)part->heads * part->head_dim * shape->block_tokens *
                                  kvt_dtype_bytes(part->dtype);
    }
}

int kvt_shape_group_init(struct kvt_shape_group *shape, const struct kvt_layout *layout,
                         uint16_t group)
{
    memset(shape, 0, sizeof(*shape));
    shape->layout = layout;
    shape->group = group;
    describe(shape);
    for (int level = KVT_LEVEL_RAW; level >= KVT_LEVEL_INT4; level--) {
        int effective = effective_level(shape, level);
        if (effective != level) { /* higher: made before */
            shape->uniform[level] = shape->uniform[effective];
            continue;
        }
        struct kvt_map *map = uniform_new(shape, level);
        if (map == NULL)
            return -ENOMEM;
        map->next = shape->owned;
        shape->owned = map;
        shape->uniform[level] = map->record_bytes != 0 ? map : NULL;
    }
    return 0;
}

static void maps_free(struct kvt_map *map)
{
    while (map != NULL) {
        struct kvt_map *next = map->next;
        free(map);
        map = next;
    }
}

void kvt_shape_group_free(struct kvt_shape_group *shape)
{
    maps_free(shape->owned);
    shape->owned = NULL;
}

/* ---- mixed maps ---------------------------------------------------------------------------- */

/* A sixty-fourth more at most, so that nearly equal maps have records of one length. */
static uint32_t stretched(uint32_t record_bytes, uint32_t raw_bytes)
{
    uint64_t step = KVT_MAX(record_bytes / 64 / KVT_PAGE_BYTES, 1u) * (uint64_t)KVT_PAGE_BYTES;
    return (uint32_t)KVT_MIN(kvt_round_up(record_bytes, step), KVT_MAX(raw_bytes, record_bytes));
}

struct kvt_map *kvt_map_new(const struct kvt_shape_group *shape, const uint8_t *levels)
{
    int level;
    size_t coded = kvt_map_payload_bytes(shape->layout, shape->group, levels, &level);
    uint32_t table = table_bytes(shape->entries);
    uint32_t record = coded == 0 ? 0 : kvt_record_bytes(coded + table);
    if (record == 0)
        return NULL;
    struct kvt_map *map = calloc(1, sizeof(*map) + packed_bytes(shape->entries));
    if (map == NULL)
        return NULL;
    const struct kvt_map *raw = shape->uniform[KVT_LEVEL_RAW];
    map->record_bytes = stretched(record, raw != NULL ? raw->record_bytes : 0);
    map->payload_bytes = map->record_bytes - HEADER_BYTES;
    map->table_bytes = table;
    map->coded_bytes = (uint32_t)coded;
    map->level = (uint8_t)level;
    memcpy(map->levels, levels, packed_bytes(shape->entries));
    return map;
}

/* The levels of `level` under the bounds; true when no bound shows. */
static bool bounded_levels(const struct kvt_shape_group *shape, int level, const uint8_t *bounds,
                           uint8_t *levels)
{
    uint32_t entry = 0;
    bool uniform = true;
    for (uint32_t i = 0; i < shape->layout->part_count; i++) {
        const struct kvt_part *part = &shape->layout->parts[i];
        if (part->group != shape->group)
            continue;
        int own = kvt_level_for_part(level, part);
        for (uint32_t head = 0; head < part->heads; head++, entry++) {
            int bound = kvt_map_get(bounds, entry);
            kvt_map_set(levels, entry, KVT_MAX(own, bound));
            uniform = uniform && bound <= own;
        }
    }
    return uniform;
}

/* 0, -ENOMEM. */
static int set_level(struct kvt_map_set *set, const struct kvt_shape_group *shape, int level,
                     const uint8_t *bounds, uint8_t *levels)
{
    const struct kvt_map *raw = shape->uniform[KVT_LEVEL_RAW];
    set->at[level] = shape->uniform[level];
    if (set->at[level] == NULL || bounded_levels(shape, level, bounds, levels))
        return 0;
    struct kvt_map *map = kvt_map_new(shape, levels);
    if (map == NULL)
        return -ENOMEM;
    if (map->level == KVT_LEVEL_RAW || map->record_bytes >= raw->record_bytes) {
        free(map);
        set->at[level] = raw;
        return 0;
    }
    map->next = set->owned;
    set->owned = map;
    set->at[level] = map;
    return 0;
}

struct kvt_map_set *kvt_map_set_new(const struct kvt_shape_group *shape, const uint8_t *bounds)
{
    struct kvt_map_set *set = calloc(1, sizeof(*set));
    uint8_t *levels = calloc(1, packed_bytes(shape->entries));
    int rc = set == NULL || levels == NULL ? -ENOMEM : 0;
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_RAW && rc == 0; level++)
        rc = set_level(set, shape, level, bounds, levels);
    free(levels);
    if (rc == 0)
        return set;
    kvt_map_set_free(set);
    return NULL;
}

void kvt_map_set_free(struct kvt_map_set *set)
{
    while (set != NULL) {
        struct kvt_map_set *next = set->next;
        maps_free(set->owned);
        free(set);
        set = next;
    }
}

static bool layer_excluded(const struct kvt_settings *settings, uint32_t layer, uint32_t last)
{
    for (uint32_t i = 0; i < settings->exclude_count; i++) {
        uint32_t from = settings->exclude[i].from, to = settings->exclude[i].to;
        if (layer >= (from == KVT_LAYER_LAST ? last : from) &&
            layer <= (to == KVT_LAYER_LAST ? last : to))
            return true;
    }
    return false;
}

void kvt_map_bounds(const struct kvt_shape_group *shape, const struct kvt_settings *settings,
                    uint8_t *bounds)
{
    const struct kvt_layout *layout = shape->layout;
    uint32_t last = 0, entry = 0;
    for (uint32_t i = 0; i < layout->part_count; i++)
        last = KVT_MAX(last, layout->parts[i].layer);
    for (uint32_t i = 0; i < layout->part_count; i++) {
        const struct kvt_part *part = &layout->parts[i];
        if (part->group != shape->group)
            continue;
        int bound = layer_excluded(settings, part->layer, last) ? KVT_LEVEL_RAW : KVT_LEVEL_INT4;
        for (uint32_t head = 0; head < part->heads; head++)
            kvt_map_set(bounds, entry++, bound);
    }
}

/* ---- payloads ------------------------------------------------------------------------------ */

uint32_t kvt_map_table_bytes(const struct kvt_shape_group *shape)
{
    return table_bytes(shape->entries);
}

void kvt_map_table(const struct kvt_map *map, const struct kvt_shape_group *shape, uint8_t *out)
{
    struct kvt_record_map head = {.entries = shape->entries, .coded_bytes = map->coded_bytes};
    memset(out, 0, map->table_bytes);
    memcpy(out, &head, sizeof(head));
    memcpy(out + sizeof(head), map->levels, packed_bytes(shape->entries));
}

int kvt_map_read(const struct kvt_shape_group *shape, uint8_t map_id, const uint8_t *payload,
                 uint32_t payload_bytes, struct kvt_map_view *out)
{
    struct kvt_record_map head;
    uint32_t table = table_bytes(shape->entries);
    int lowest;
    if (payload_bytes < table)
        return KVT_E_CORRUPT;
    memcpy(&head, payload, sizeof(head));
    *out = (struct kvt_map_view){payload + sizeof(head), table, head.coded_bytes};
    if (head.entries != shape->entries || head.zero != 0 ||
        head.coded_bytes > payload_bytes - table || head.coded_bytes == 0 ||
        kvt_map_payload_bytes(shape->layout, shape->group, out->levels, &lowest) !=
            head.coded_bytes ||
        lowest != kvt_map_id_level(map_id))
        return KVT_E_CORRUPT;
    return 0;
}

int kvt_map_encode(const struct kvt_map *map, const struct kvt_shape_group *shape,
                   const struct kvt_pool_desc *pool, uint32_t page, uint8_t *payload, int guard)
{
    if (map->table_bytes == 0)
        return kvt_encode_block(shape->layout, shape->group, map->level, pool, page, payload,
                                map->payload_bytes, guard, NULL);
    uint32_t used = map->table_bytes + map->coded_bytes;
    kvt_map_table(map, shape, payload);
    memset(payload + used, 0, map->payload_bytes - used);
    return kvt_encode_map(shape->layout, shape->group, map->levels, pool, page,
                          payload + map->table_bytes, map->coded_bytes, guard, NULL);
}

int kvt_map_decode(const struct kvt_shape_group *shape, uint8_t map_id, const uint8_t *payload,
                   uint32_t payload_bytes, const struct kvt_pool_desc *pool, uint32_t page)
{
    int level = kvt_map_id_level(map_id);
    if (map_id < KVT_MAP_MIXED_FIRST) {
        const struct kvt_map *map = level != 0 ? shape->uniform[level] : NULL;
        if (map == NULL || map->payload_bytes != payload_bytes)
            return KVT_E_CORRUPT;
        return kvt_decode_block(shape->layout, shape->group, map->level, payload, payload_bytes,
                                pool, page);
    }
    struct kvt_map_view view;
    int rc = kvt_map_read(shape, map_id, payload, payload_bytes, &view);
    if (rc != 0)
        return rc;
    return kvt_decode_map(shape->layout, shape->group, view.levels, payload + view.table_bytes,
                          view.coded_bytes, pool, page);
}
