/* Plans of a pool in GPU memory: one for each group and level, made when the pool is registered,
 * and one for each mixed map, made when the lane meets the first block of it. See gpu_lane.h.
 *
 * Mixed plans are found by the table that their payloads begin with, never by a pointer: maps of
 * namespaces come and go. What a record says of its map is checked before it is believed.
 * Threads: as noted in gpu_lane_impl.h.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "client/gpu_lane_impl.h"

/* Of a record, in one range of layers: shorter copies leave the link idle in between. */
#define RANGE_BYTES (128u << 10)

uint32_t kvt_lane_record_max(const struct kvt_shape *shape)
{
    uint32_t largest = 0;
    for (uint32_t g = 0; g < shape->group_count; g++)
        for (int level = 0; level < KVT_LEVELS; level++)
            if (shape->groups[g].uniform[level] != NULL)
                largest = KVT_MAX(largest, shape->groups[g].uniform[level]->record_bytes);
    return largest;
}

int kvt_lane_plans_make(struct kvt_lane_pool *own)
{
    const struct kvt_shape *shape = own->pool->shape;
    uint32_t table_bytes = 1;
    int rc = 0;
    for (uint32_t g = 0; g < shape->group_count; g++)
        table_bytes = KVT_MAX(table_bytes, kvt_map_table_bytes(&shape->groups[g]));
    own->table = malloc(table_bytes);
    if (own->table == NULL)
        return -ENOMEM;
    for (uint32_t g = 0; g < shape->group_count; g++)
        for (int level = 0; level < KVT_LEVELS && rc == 0; level++) {
            const struct kvt_map *uniform = shape->groups[g].uniform[level];
            if (uniform == NULL || uniform->level != level) /* none, or that of a higher level */
                continue;
            struct kvt_gpu_map map = {.level = level, .range_bytes = RANGE_BYTES};
            rc = kvt_gpu_plan_on(own->stage->stage, &shape->layout, shape->groups[g].group, &map,
                                 &own->pool->desc, &own->uniform[g][level]);
        }
    return rc;
}

void kvt_lane_plans_free(struct kvt_lane_pool *own)
{
    struct kvt_lane_mixed *mixed;
    for (uint32_t g = 0; g < KVT_GROUPS_MAX; g++)
        for (int level = 0; level < KVT_LEVELS; level++)
            kvt_gpu_plan_free(own->uniform[g][level]);
    while ((mixed = own->mixed) != NULL) {
        own->mixed = mixed->next;
        kvt_gpu_plan_free(mixed->plan);
        free(mixed);
    }
    free(own->table);
    own->table = NULL;
}

/* ---- codes --------------------------------------------------------------------------------- */

struct kvt_lane_code kvt_lane_code_of(struct kvt_cache *cache, int kind,
                                      const struct kvt_block *block)
{
    const struct kvt_req *req = kvt_block_req(cache, block);
    struct kvt_lane_code code = {
        .pool = req->pool->gpu,
        .group = kvt_req_group(req),
        .group_index = req->group,
        .level = block->level,
        .record_bytes = block->record_bytes,
    };
    if (kind == KVT_REQ_STORE) {
        code.map = block->map;
        return code;
    }
    code.map_id = block->map_id;
    if (block->map_id >= KVT_MAP_MIXED_FIRST &&
        block->record_bytes >= sizeof(struct kvt_record_header) + kvt_map_table_bytes(code.group))
        code.table = (block->staged ? kvt_lane_head(code.pool->lane, block)
                                    : cache->channel.arena + block->arena_offset) +
                     sizeof(struct kvt_record_header);
    return code;
}

bool kvt_lane_code_same(const struct kvt_lane_code *a, const struct kvt_lane_code *b)
{
    if (a->pool != b->pool || a->group != b->group || a->level != b->level || a->map != b->map ||
        a->map_id != b->map_id || (a->table == NULL) != (b->table == NULL) ||
        a->record_bytes != b->record_bytes)
        return false;
    return a->table == NULL || memcmp(a->table, b->table, kvt_map_table_bytes(a->group)) == 0;
}

/* ---- mixed maps ---------------------------------------------------------------------------- */

static struct kvt_lane_mixed *find_mixed(const struct kvt_lane_code *code, const uint8_t *table,
                                         uint32_t payload_bytes)
{
    struct kvt_lane_mixed *mixed;
    for (mixed = code->pool->mixed; mixed != NULL; mixed = mixed->next)
        if (mixed->group == code->group && mixed->payload_bytes == payload_bytes &&
            memcmp(mixed->table, table, kvt_map_table_bytes(code->group)) == 0)
            return mixed;
    return NULL;
}

static int add_mixed(const struct kvt_lane_code *code, const uint8_t *table, uint32_t payload_bytes,
                     struct kvt_lane_mixed **out)
{
    struct kvt_lane_pool *own = code->pool;
    uint32_t bytes = kvt_map_table_bytes(code->group);
    if (own->mixed_count == KVT_LANE_MIXED_MAX)
        return KVT_E_UNSUPPORTED;
    struct kvt_lane_mixed *mixed = calloc(1, sizeof(*mixed) + bytes);
    if (mixed == NULL)
        return -ENOMEM;
    memcpy(mixed->table, table, bytes);
    mixed->group = code->group;
    mixed->payload_bytes = payload_bytes;
    struct kvt_gpu_map map = {
        .levels = mixed->table + sizeof(struct kvt_record_map),
        .lead = mixed->table,
        .lead_bytes = bytes,
        .payload_bytes = payload_bytes,
        .range_bytes = RANGE_BYTES,
    };
    int rc = kvt_gpu_plan_on(own->stage->stage, &own->pool->shape->layout, code->group->group, &map,
                             &own->pool->desc, &mixed->plan);
    if (rc != 0) {
        free(mixed);
        return rc == KVT_E_INVAL || rc == KVT_E_LIMIT ? KVT_E_CORRUPT : rc;
    }
    mixed->next = own->mixed;
    own->mixed = mixed;
    own->mixed_count++;
    *out = mixed;
    return 0;
}

static int mixed_plan(const struct kvt_lane_code *code, const uint8_t *table,
                      uint32_t payload_bytes, struct kvt_gpu_plan **plan)
{
    struct kvt_lane_mixed *mixed = find_mixed(code, table, payload_bytes);
    int rc = mixed != NULL ? 0 : add_mixed(code, table, payload_bytes, &mixed);
    if (rc == 0)
        *plan = mixed->plan;
    return rc;
}

/* Of a record that was granted: what its header and its table say, if they can be true. */
static int loaded_plan(const struct kvt_lane_code *code, struct kvt_gpu_plan **plan,
                       uint32_t *payload_bytes)
{
    struct kvt_record_header header;
    struct kvt_map_view view;
    if (code->table == NULL)
        return KVT_E_CORRUPT;
    memcpy(&header, code->table - sizeof(header), sizeof(header));
    if (kvt_record_bytes(header.payload_bytes) != code->record_bytes ||
        kvt_map_read(code->group, code->map_id, code->table, header.payload_bytes, &view) != 0)
        return KVT_E_CORRUPT;
    *payload_bytes = header.payload_bytes;
    return mixed_plan(code, code->table, *payload_bytes, plan);
}

static int stored_plan(const struct kvt_lane_code *code, struct kvt_gpu_plan **plan,
                       uint32_t *payload_bytes)
{
    kvt_map_table(code->map, code->group, code->pool->table);
    *payload_bytes = code->map->payload_bytes;
    return mixed_plan(code, code->pool->table, *payload_bytes, plan);
}

int kvt_lane_plan_of(const struct kvt_lane_code *code, struct kvt_gpu_plan **plan,
                     uint32_t *payload_bytes)
{
    if (code->map_id >= KVT_MAP_MIXED_FIRST)
        return loaded_plan(code, plan, payload_bytes);
    if (code->map != NULL && code->map->table_bytes > 0)
        return stored_plan(code, plan, payload_bytes);
    *plan = code->pool->uniform[code->group_index][code->level];
    if (*plan == NULL)
        return KVT_E_UNSUPPORTED;
    *payload_bytes = code->group->uniform[code->level]->payload_bytes;
    return 0;
}
