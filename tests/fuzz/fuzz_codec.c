/* Decoding payloads of any bytes, by layouts of any shape: no byte outside payload and page is
 * touched, every set of instructions gives the same bytes, and the map at the front of a mixed
 * record is believed only where it fits.
 * Input: tokens, level, parts with their shape, whether the record names a mixed map; then the
 * payload, filled up by repeating what there is. */
#include "client/map.h"
#include "codec/block.h"
#include "format/record.h"
#include "fuzz/fuzz.h"

#define PARTS 3u

struct shape {
    struct kvt_part parts[PARTS];
    struct kvt_layout layout;
    struct kvt_part_place places[PARTS];
    struct kvt_pool_desc pool;
    size_t part_bytes[PARTS];
};

static void read_shape(struct fuzz_input *in, struct shape *shape)
{
    static const uint8_t sizes[] = {0, 2, 2, 4, 1};

    memset(shape, 0, sizeof *shape);
    shape->layout = (struct kvt_layout){.struct_size = sizeof shape->layout,
                                        .block_tokens = 16u * (1u + fuzz_u8(in) % 3u),
                                        .part_count = 1u + fuzz_u8(in) % PARTS,
                                        .parts = shape->parts};
    for (uint32_t i = 0; i < shape->layout.part_count; i++) {
        struct kvt_part *part = &shape->parts[i];

        part->kind = (uint8_t)(1 + fuzz_u8(in) % 4);
        part->dtype = (uint8_t)(1 + fuzz_u8(in) % 4);
        part->heads = part->kind == KVT_PART_MLA ? 1 : 1u + fuzz_u8(in) % 3u;
        part->head_dim = 16u * (1u + fuzz_u8(in) % 9u);
        shape->part_bytes[i] =
            (size_t)shape->layout.block_tokens * part->heads * part->head_dim * sizes[part->dtype];
        shape->places[i] =
            (struct kvt_part_place){.stride_elem = sizes[part->dtype],
                                    .stride_token = (int64_t)part->head_dim * sizes[part->dtype],
                                    .stride_head = (int64_t)shape->layout.block_tokens *
                                                   part->head_dim * sizes[part->dtype],
                                    .stride_block = (int64_t)shape->part_bytes[i]};
    }
    shape->pool = (struct kvt_pool_desc){.struct_size = sizeof shape->pool,
                                         .device = KVT_DEVICE_HOST,
                                         .block_count = 1,
                                         .place_count = shape->layout.part_count,
                                         .places = shape->places};
}

static void pages_make(struct shape *shape)
{
    for (uint32_t i = 0; i < shape->layout.part_count; i++)
        shape->places[i].base = fuzz_memory(shape->part_bytes[i]);
}

static void pages_free(struct shape *shape)
{
    for (uint32_t i = 0; i < shape->layout.part_count; i++)
        free(shape->places[i].base);
}

static uint8_t *payload_of(const struct fuzz_input *in, size_t bytes)
{
    uint8_t *payload = fuzz_memory(bytes);

    for (size_t i = 0; i < bytes && in->size; i++)
        payload[i] = in->data[i % in->size];
    return payload;
}

/* The same payload by every set; the pages must come out alike. */
static void decode_by_all(struct shape *shape, int level, const uint8_t *payload, size_t bytes)
{
    const struct kvt_codec_kernels *sets[8];
    size_t count = kvt_codec_kernels_all(sets, 8);
    struct shape first = *shape;

    first.pool.places = first.places;
    first.layout.parts = first.parts;
    for (size_t set = 0; set < count; set++) {
        pages_make(set ? shape : &first);
        if (!set) {
            FUZZ_CHECK(kvt_decode_block_by(sets[0], &first.layout, 0, level, payload, bytes,
                                           &first.pool, 0) == 0);
            continue;
        }
        FUZZ_CHECK(kvt_decode_block_by(sets[set], &shape->layout, 0, level, payload, bytes,
                                       &shape->pool, 0) == 0);
        for (uint32_t i = 0; i < shape->layout.part_count; i++)
            FUZZ_CHECK(memcmp(first.places[i].base, shape->places[i].base, shape->part_bytes[i]) ==
                       0);
        pages_free(shape);
    }
    pages_free(&first);
}

/* The payload of a record of a mixed map: its own map stands in front. */
static void decode_mixed(struct shape *shape, const struct fuzz_input *in, uint8_t id,
                         uint32_t bytes)
{
    struct kvt_shape_group group;
    uint8_t *payload = payload_of(in, bytes);
    int rc;

    FUZZ_CHECK(kvt_shape_group_init(&group, &shape->layout, 0) == 0);
    if (id & 0x80 && bytes >= sizeof(struct kvt_record_map)) { /* past the first test */
        struct kvt_record_map *map = (struct kvt_record_map *)payload;

        map->entries = group.entries;
        map->zero = 0;
        if (id & 0x40)
            map->coded_bytes %= bytes;
    }
    pages_make(shape);
    rc = kvt_map_decode(&group, id & 15u, payload, bytes, &shape->pool, 0);
    FUZZ_CHECK(rc == 0 || rc == KVT_E_CORRUPT || rc == KVT_E_INVAL);
    pages_free(shape);
    kvt_shape_group_free(&group);
    free(payload);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    struct shape shape;
    uint8_t mixed = fuzz_u8(&in), id = fuzz_u8(&in);
    int level = 1 + id % KVT_LEVEL_RAW;
    uint32_t mixed_bytes = fuzz_u16(&in) % 32768u / 16u * 16u;
    size_t bytes;
    uint8_t *payload;

    read_shape(&in, &shape);
    if (kvt_layout_check(&shape.layout) != 0)
        return 0;
    if (mixed & 1) {
        decode_mixed(&shape, &in, id, mixed_bytes);
        return 0;
    }
    bytes = kvt_payload_bytes(&shape.layout, 0, level);
    if (!bytes)
        return 0;
    payload = payload_of(&in, bytes);
    decode_by_all(&shape, level, payload, bytes);
    pages_make(&shape);
    FUZZ_CHECK(kvt_decode_block(&shape.layout, 0, level, payload, bytes - 16, &shape.pool, 0) != 0);
    pages_free(&shape);
    free(payload);
    return 0;
}
