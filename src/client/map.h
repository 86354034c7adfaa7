/* Level maps of the client: how the blocks of a group are coded, and what their records measure.
 *
 * A uniform map is a level; a mixed one has a level for each (part, head) and travels at the front
 * of its records' payload (format/record.h), so decoding needs nothing but the record.
 * Maps are immutable. A namespace has, for each group, a set of them, one for each level that a
 * store may ask for; a set is replaced as a whole when levels rise, and the old one stays until the
 * namespace is closed, for blocks that are under way. Threads: any.
 */
#ifndef KVT_CLIENT_MAP_H
#define KVT_CLIENT_MAP_H

#include <stdbool.h>
#include <stdint.h>

#include "client/settings.h"
#include "kvtier/codec.h"

#define KVT_LEVELS (KVT_LEVEL_RAW + 1)

struct kvt_map {
    struct kvt_map *next; /* whoever owns it */
    uint32_t payload_bytes;
    uint32_t record_bytes;
    uint32_t table_bytes; /* of the payload, before the heads; 0: uniform */
    uint32_t coded_bytes; /* of the heads */
    uint8_t level;        /* the lowest of the parts coded; RAW: none is */
    uint8_t levels[];     /* mixed: packed as for kvt_map_get() */
};

/* A group of a shape. Immutable. */
struct kvt_shape_group {
    uint16_t group;
    uint8_t kind; /* enum kvt_group_kind */
    uint32_t block_tokens;
    uint32_t window_tokens;
    uint32_t entries;     /* (part, head) */
    uint64_t block_bytes; /* in the engine */
    const struct kvt_layout *layout;
    struct kvt_map *owned;
    /* By level. What a level really comes to: for a group of MLA rows kv4 is the map of kv8. NULL:
     * a record would be too large. */
    const struct kvt_map *uniform[KVT_LEVELS];
};

struct kvt_map_set {
    struct kvt_map_set *next; /* the one before it */
    struct kvt_map *owned;    /* mixed maps made for it */
    const struct kvt_map *at[KVT_LEVELS];
};

/* Fill in everything that follows from layout and group. 0, -ENOMEM. Undone by _free(), also after
 * an error. */
__attribute__((warn_unused_result)) int kvt_shape_group_init(struct kvt_shape_group *shape,
                                                             const struct kvt_layout *layout,
                                                             uint16_t group);
void kvt_shape_group_free(struct kvt_shape_group *shape);

/* groups.c: the first block of the group that a hit of `tokens` needs. */
size_t kvt_group_first_needed(const struct kvt_shape_group *shape, uint64_t tokens);

/* A mixed map of these levels (packed, `entries` of them); NULL: no memory, or not a map of this
 * group. A record of it may be larger than a raw one: then raw is better in every way. */
struct kvt_map *kvt_map_new(const struct kvt_shape_group *shape, const uint8_t *levels);

/* The maps of a group under these lower bounds (packed): at[L] codes each head at L, or higher
 * where its bound is. NULL: no memory. */
struct kvt_map_set *kvt_map_set_new(const struct kvt_shape_group *shape, const uint8_t *bounds);
void kvt_map_set_free(struct kvt_map_set *set); /* and those before it */

/* Bounds of the layers that the settings exclude: raw there, else int4. */
void kvt_map_bounds(const struct kvt_shape_group *shape, const struct kvt_settings *settings,
                    uint8_t *bounds);

/* Encode a page of a host pool as the payload of a record: all payload_bytes are written. Errors of
 * kvt_encode_block(). */
int kvt_map_encode(const struct kvt_map *map, const struct kvt_shape_group *shape,
                   const struct kvt_pool_desc *pool, uint32_t page, uint8_t *payload, int guard);

/* What a mixed record says of itself. */
struct kvt_map_view {
    const uint8_t *levels; /* packed, in the payload */
    uint32_t table_bytes;
    uint32_t coded_bytes; /* of the heads, right behind the table */
};

/* Bytes before the heads in a mixed payload of the group. */
uint32_t kvt_map_table_bytes(const struct kvt_shape_group *shape);
/* The table that the payloads of a mixed map begin with; out: map->table_bytes. */
void kvt_map_table(const struct kvt_map *map, const struct kvt_shape_group *shape, uint8_t *out);
/* Read the table of a payload with that map id (mixed). 0; KVT_E_CORRUPT it is not a payload of
 * this group and id. */
int kvt_map_read(const struct kvt_shape_group *shape, uint8_t map_id, const uint8_t *payload,
                 uint32_t payload_bytes, struct kvt_map_view *out);

/* Decode the payload of a record with that map id. 0; KVT_E_CORRUPT it is not a payload of this
 * group and id: no page was touched; KVT_E_INVAL. */
int kvt_map_decode(const struct kvt_shape_group *shape, uint8_t map_id, const uint8_t *payload,
                   uint32_t payload_bytes, const struct kvt_pool_desc *pool, uint32_t page);

#endif
