/* The table that GPU kernels walk (src/gpu/plan_table.c).
 *
 * Goal:   every head of a payload is in exactly one unit of one class, where the scalar encoder
 * puts it, and reads the rows that it reads; dense classes have one unit an entry, and keys before
 * values, as their encoder expects; rows that are not dense stay out of them. Method: tables of
 * models' shapes at each level; the units of all spans are laid over a payload of which each byte
 * may be covered once, and must be covered.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/checked.h"
#include "codec/piece.h"
#include "gpu/gpu_internal.h"
#include "kvtier/codec.h"

#define PARTS 6u
#define ENTRIES 512u

struct shape {
    struct kvt_part parts[PARTS];
    struct kvt_part_place places[PARTS];
    struct kvt_layout layout;
    struct kvt_pool_desc pool;
    struct kvt_gpu_map map;
    struct kvt_gpu_source source;
    struct kvt_gpu_part table[ENTRIES];
    struct kvt_gpu_spans spans;
    uint32_t entries;
};

/* Parts K, V, K, V ... of `heads` heads, NHD. */
static void make(struct shape *s, uint32_t tokens, uint32_t heads, uint32_t dim, int dtype,
                 int level)
{
    uint32_t row = dim * kvt_dtype_bytes(dtype);
    memset(s, 0, sizeof(*s));
    for (uint32_t i = 0; i < PARTS; i++) {
        s->parts[i] = (struct kvt_part){.kind = i % 2 ? KVT_PART_V : KVT_PART_K,
                                        .dtype = (uint8_t)dtype,
                                        .heads = heads,
                                        .head_dim = dim};
        s->places[i] = (struct kvt_part_place){
            .base = (void *)((uintptr_t)(i + 1) << 20),
            .stride_block = (int64_t)row * heads * tokens,
            .stride_token = (int64_t)row * heads,
            .stride_head = row,
            .stride_elem = kvt_dtype_bytes(dtype),
        };
    }
    s->layout = (struct kvt_layout){.struct_size = sizeof(s->layout),
                                    .block_tokens = tokens,
                                    .part_count = PARTS,
                                    .parts = s->parts};
    s->pool = (struct kvt_pool_desc){.struct_size = sizeof(s->pool),
                                     .block_count = 4,
                                     .place_count = PARTS,
                                     .places = s->places};
    s->map.level = level;
    s->source = (struct kvt_gpu_source){
        .layout = &s->layout, .map = &s->map, .pool = &s->pool, .part_count = PARTS};
}

static void fill(struct shape *s)
{
    struct kvt_gpu_spans unused;
    s->entries = kvt_gpu_table(&s->source, NULL, 0, 0, &unused);
    assert_in_range(s->entries, 1, ENTRIES);
    assert_int_equal(kvt_gpu_table(&s->source, s->table, 0, 0, &s->spans), s->entries);
}

static uint32_t units_of(const struct shape *s, uint32_t entry)
{
    uint32_t next = entry + 1 < s->entries ? s->table[entry + 1].first_unit : s->spans.end_unit;
    return next - s->table[entry].first_unit;
}

/* All units of the table over a payload: each byte once; and where the rows of each are. */
static void check_cover(const struct shape *s)
{
    uint32_t bytes = 0, entry = 0;
    for (uint32_t i = 0; i < PARTS; i++)
        bytes += kvt_gpu_part_bytes(&s->source, i, &entry);
    uint8_t *seen = calloc(bytes, 1);
    assert_non_null(seen);
    for (uint32_t e = 0; e < s->entries; e++) {
        const struct kvt_gpu_part *part = &s->table[e];
        for (uint32_t u = 0; u < units_of(s, e); u++) {
            uint32_t at = part->payload_at + u * part->unit_bytes;
            assert_true(at + part->unit_bytes <= bytes);
            for (uint32_t b = 0; b < part->unit_bytes; b++)
                assert_int_equal(seen[at + b]++, 0);
            /* part, head and tile by its place in the scalar encoder's walk */
            uint32_t tiles = s->layout.block_tokens / KVT_TILE_TOKENS, heads = s->parts[0].heads;
            uint32_t order = part->order_at + u, index = order / (heads * tiles);
            uint32_t head = order / tiles % heads, tile = order % tiles;
            uint64_t rows = part->base + (uint64_t)(part->stride_head * (u / part->tiles)) +
                            (uint64_t)(part->stride_token * (u % part->tiles) * KVT_TILE_TOKENS);
            const struct kvt_part_place *place = &s->places[index];
            assert_int_equal(part->key, index % 2 == 0);
            assert_int_equal(rows, (uintptr_t)place->base + (uint64_t)place->stride_head * head +
                                       (uint64_t)place->stride_token * tile * KVT_TILE_TOKENS);
        }
    }
    for (uint32_t b = 0; b < bytes; b++)
        assert_int_equal(seen[b], 1);
    free(seen);
}

/* The dense span of a class: so many units, keys first. */
static void check_dense(const struct shape *s, enum kvt_gpu_class class, uint32_t units,
                        uint32_t keys)
{
    const struct kvt_gpu_span *span = &s->spans.gather[class];
    assert_int_equal(span->unit_count, units);
    assert_int_equal(span->part_count, units);
    assert_int_equal(span->key_units, keys);
    for (uint32_t i = 0; i < units; i++) {
        const struct kvt_gpu_part *part = &s->table[span->first_part + i];
        assert_int_equal(part->first_unit, span->first_unit + i);
        assert_int_equal(part->key, i < keys);
        assert_int_equal(part->tiles, 1);
        assert_true(part->vector);
    }
    if (units > 0)
        assert_int_equal(span->units_per_part, 1);
}

static void test_dense(void **state)
{
    (void)state;
    static const uint32_t tokens[] = {16, 48, 256}, heads[] = {1, 2, 5};
    struct shape *s = malloc(sizeof(*s));
    assert_non_null(s);
    for (size_t t = 0; t < KVT_ARRAY_LEN(tokens); t++)
        for (size_t h = 0; h < KVT_ARRAY_LEN(heads); h++) {
            uint32_t all = PARTS * heads[h] * tokens[t] / 16;
            make(s, tokens[t], heads[h], 128, KVT_DTYPE_BF16, KVT_LEVEL_KV4);
            fill(s);
            check_cover(s);
            check_dense(s, KVT_GPU_CLASS_DENSE_C4, all, all / 2);
            check_dense(s, KVT_GPU_CLASS_DENSE_C5, 0, 0);
            assert_int_equal(s->spans.coded.unit_count, all);
            make(s, tokens[t], heads[h], 128, KVT_DTYPE_BF16, KVT_LEVEL_KV5);
            fill(s);
            check_cover(s);
            check_dense(s, KVT_GPU_CLASS_DENSE_C4, all / 2, 0); /* values */
            check_dense(s, KVT_GPU_CLASS_DENSE_C5, all / 2, all / 2);
            assert_int_equal(s->spans.coded.unit_count, all);
        }
    free(s);
}

/* Other dims, dtypes and levels, and rows that no 16-byte load may touch. */
static void test_not_dense(void **state)
{
    (void)state;
    static const struct {
        uint32_t dim;
        int dtype, level;
        enum kvt_gpu_class class;
    } cases[] = {
        {64, KVT_DTYPE_BF16, KVT_LEVEL_KV4, KVT_GPU_CLASS_C4},
        {256, KVT_DTYPE_BF16, KVT_LEVEL_KV4, KVT_GPU_CLASS_C4},
        {576, KVT_DTYPE_BF16, KVT_LEVEL_KV4, KVT_GPU_CLASS_C4},
        {128, KVT_DTYPE_F16, KVT_LEVEL_KV4, KVT_GPU_CLASS_C4},
        {128, KVT_DTYPE_F32, KVT_LEVEL_KV4, KVT_GPU_CLASS_C4},
        {128, KVT_DTYPE_BF16, KVT_LEVEL_INT4, KVT_GPU_CLASS_UNIFORM},
        {128, KVT_DTYPE_BF16, KVT_LEVEL_KV6, KVT_GPU_CLASS_UNIFORM},
        {128, KVT_DTYPE_BF16, KVT_LEVEL_KV8, KVT_GPU_CLASS_UNIFORM},
        {128, KVT_DTYPE_BF16, KVT_LEVEL_RAW, KVT_GPU_CLASS_RAW},
    };
    struct shape *s = malloc(sizeof(*s));
    assert_non_null(s);
    for (size_t i = 0; i < KVT_ARRAY_LEN(cases); i++) {
        make(s, 32, 2, cases[i].dim, cases[i].dtype, cases[i].level);
        fill(s);
        check_cover(s);
        check_dense(s, KVT_GPU_CLASS_DENSE_C4, 0, 0);
        check_dense(s, KVT_GPU_CLASS_DENSE_C5, 0, 0);
        assert_int_equal(s->spans.gather[cases[i].class].unit_count, PARTS * 2 * 2);
    }
    for (int which = 0; which < 4; which++) { /* of one part of the six */
        make(s, 16, 2, 128, KVT_DTYPE_BF16, KVT_LEVEL_KV4);
        struct kvt_part_place *place = &s->places[3];
        if (which == 0)
            place->base = (char *)place->base + 8;
        place->stride_token += which == 1 ? 8 : 0;
        place->stride_head += which == 2 ? 4 : 0;
        place->stride_elem += which == 3 ? 2 : 0;
        fill(s);
        check_cover(s);
        check_dense(s, KVT_GPU_CLASS_DENSE_C4, 10, 6);
        assert_int_equal(s->spans.gather[KVT_GPU_CLASS_C4].unit_count, 2);
        assert_int_equal(s->spans.coded.unit_count, 12);
    }
    free(s);
}

/* A map of its own for each head. */
static void test_mixed(void **state)
{
    (void)state;
    static const int levels_of[] = {KVT_LEVEL_KV4, KVT_LEVEL_KV5, KVT_LEVEL_KV8, KVT_LEVEL_RAW};
    struct shape *s = malloc(sizeof(*s));
    assert_non_null(s);
    for (uint32_t turn = 0; turn < 4; turn++) {
        uint8_t levels[PARTS * 4 / 2] = {0};
        make(s, 32, 4, 128, KVT_DTYPE_BF16, 0);
        for (uint32_t i = 0; i < PARTS * 4; i++)
            levels[i / 2] |= (uint8_t)(levels_of[(i * 7 + i / 5 + turn) % 4] << (i % 2 * 4));
        s->map.levels = levels;
        fill(s);
        check_cover(s);
        uint32_t units = 0;
        for (int class = 0; class < KVT_GPU_CLASSES; class ++)
            units += s->spans.gather[class].unit_count;
        assert_int_equal(units, PARTS * 4 * 2);
        const struct kvt_gpu_span *c4 = &s->spans.gather[KVT_GPU_CLASS_DENSE_C4];
        check_dense(s, KVT_GPU_CLASS_DENSE_C4, c4->unit_count, c4->key_units);
        assert_in_range(c4->key_units, 1, c4->unit_count - 1);
    }
    free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dense),
        cmocka_unit_test(test_not_dense),
        cmocka_unit_test(test_mixed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
