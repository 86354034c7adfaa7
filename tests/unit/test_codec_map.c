/* Goal:   level maps: one level per (part, head). A map's payload is the heads' payloads one after
 *         another, a uniform map is the level itself, every instruction set gives the same bytes,
 *         maps that a part cannot have are refused, fitting raises exactly the heads that must
 * rise. Method: random maps over K, V, MLA and opaque parts, compared head by head with one-head
 * layouts; keys with a few ruined heads. The seed is printed; KVT_TEST_SEED=N repeats a run.
 */
#include <stdio.h>

#include "unit/codec_support.h"

#define TOKENS 32u
#define HEADS 3u
#define DIM 64u
#define PARTS 5u
#define ENTRIES 12u /* K 3, V 3, K 3, MLA 1, opaque 2 */

static uint64_t seed;

struct world {
    struct kvt_part parts[PARTS];
    struct kvt_layout layout;
    struct kvt_part_place places[PARTS];
    struct kvt_pool_desc desc;
    uint8_t *memory[PARTS];
};

static size_t part_bytes(const struct kvt_part *part)
{
    return (size_t)part->heads * TOKENS * part->head_dim * kvt_dtype_bytes(part->dtype);
}

/* Two pages: the first holds Gaussian data, the second is for decoding into. */
static void world_make(struct world *w, struct kvt_rng *rng)
{
    static const struct kvt_part parts[PARTS] = {
        {KVT_PART_K, KVT_DTYPE_BF16, 0, 0, HEADS, DIM},
        {KVT_PART_V, KVT_DTYPE_BF16, 0, 0, HEADS, DIM},
        {KVT_PART_K, KVT_DTYPE_F16, 0, 1, HEADS, 96},
        {KVT_PART_MLA, KVT_DTYPE_BF16, 0, 2, 1, 576},
        {KVT_PART_OPAQUE, KVT_DTYPE_BYTE, 0, 3, 2, 48},
    };
    memset(w, 0, sizeof(*w));
    memcpy(w->parts, parts, sizeof(parts));
    for (uint32_t p = 0; p < PARTS; p++) {
        int64_t size = kvt_dtype_bytes(parts[p].dtype), dim = parts[p].head_dim;
        w->memory[p] = malloc(2 * part_bytes(&parts[p]));
        assert_non_null(w->memory[p]);
        w->places[p] = (struct kvt_part_place){w->memory[p], (int64_t)part_bytes(&parts[p]),
                                               TOKENS * dim * size, dim * size, size};
        for (size_t i = 0; i < 2 * part_bytes(&parts[p]) / (size_t)size; i++) {
            if (parts[p].dtype == KVT_DTYPE_BYTE)
                w->memory[p][i] = (uint8_t)kvt_rng_next(rng);
            else
                codec_store(parts[p].dtype, w->memory[p] + i * (size_t)size,
                            (float)codec_normal(rng));
        }
    }
    w->layout = (struct kvt_layout){sizeof(w->layout), TOKENS, PARTS, w->parts};
    w->desc = (struct kvt_pool_desc){sizeof(w->desc), KVT_DEVICE_HOST, 2, PARTS, w->places};
    assert_int_equal(kvt_layout_check(&w->layout), 0);
    assert_int_equal(kvt_pool_check(&w->layout, &w->desc), 0);
    assert_int_equal(kvt_map_entries(&w->layout, 0), ENTRIES);
}

static void world_free(struct world *w)
{
    for (uint32_t p = 0; p < PARTS; p++)
        free(w->memory[p]);
}

static void uniform_map(const struct world *w, int level, uint8_t *map)
{
    uint32_t entry = 0;
    for (uint32_t p = 0; p < PARTS; p++)
        for (uint32_t h = 0; h < w->parts[p].heads; h++)
            kvt_map_set(map, entry++, kvt_level_for_part(level, &w->parts[p]));
}

static void random_map(const struct world *w, struct kvt_rng *rng, uint8_t *map)
{
    uint32_t entry = 0;
    for (uint32_t p = 0; p < PARTS; p++)
        for (uint32_t h = 0; h < w->parts[p].heads; h++) {
            int level = KVT_LEVEL_INT4 + (int)kvt_rng_below(rng, 6);
            kvt_map_set(map, entry++, kvt_level_for_part(level, &w->parts[p]));
        }
}

static void entries_are_packed_two_a_byte(void **state)
{
    uint8_t map[3] = {0xff, 0xff, 0xff};
    (void)state;
    for (uint32_t i = 0; i < 6; i++)
        kvt_map_set(map, i, (int)i + 1);
    const uint8_t want[3] = {0x21, 0x43, 0x65};
    assert_memory_equal(map, want, 3);
    kvt_map_set(map, 2, 6);
    assert_int_equal(map[1], 0x46);
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(kvt_map_get(map, i), i == 2 ? 6 : (int)i + 1);
}

static void a_uniform_map_is_the_level(void **state)
{
    struct world w;
    struct kvt_rng rng = {seed};
    (void)state;
    world_make(&w, &rng);
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_RAW; level++) {
        uint8_t map[(ENTRIES + 1) / 2] = {0};
        size_t bytes = kvt_payload_bytes(&w.layout, 0, level);
        uint8_t *a = malloc(bytes), *b = malloc(bytes);
        int floor = 0;
        uniform_map(&w, level, map);
        assert_int_equal(kvt_map_payload_bytes(&w.layout, 0, map, &floor), bytes);
        assert_int_equal(floor, level);
        assert_int_equal(kvt_encode_block(&w.layout, 0, level, &w.desc, 0, a, bytes, 0, NULL), 0);
        assert_int_equal(kvt_encode_map(&w.layout, 0, map, &w.desc, 0, b, bytes, 0, NULL), 0);
        assert_memory_equal(a, b, bytes);
        free(a);
        free(b);
    }
    world_free(&w);
}

/* The bytes of one head, by a layout that has nothing else. */
static size_t one_head(const struct world *w, uint32_t part, uint32_t head, int level,
                       uint8_t *payload, size_t room)
{
    struct kvt_part only = w->parts[part];
    struct kvt_part_place place = w->places[part];
    only.heads = 1;
    place.base = (uint8_t *)place.base + place.stride_head * head;
    struct kvt_layout layout = {sizeof(layout), TOKENS, 1, &only};
    struct kvt_pool_desc desc = {sizeof(desc), KVT_DEVICE_HOST, 2, 1, &place};
    size_t bytes = kvt_payload_bytes(&layout, 0, level);
    assert_true(bytes <= room);
    assert_int_equal(kvt_encode_block(&layout, 0, level, &desc, 0, payload, bytes, 0, NULL), 0);
    return bytes;
}

static void check_map(const struct world *w, const uint8_t *map)
{
    int floor = 0, lowest = KVT_LEVEL_RAW;
    size_t bytes = kvt_map_payload_bytes(&w->layout, 0, map, &floor), at = 0;
    uint8_t *payload = malloc(bytes), *want = malloc(bytes), *scalar = malloc(bytes);
    uint32_t entry = 0;
    assert_true(bytes > 0 && bytes % 16 == 0);
    assert_int_equal(kvt_encode_map(&w->layout, 0, map, &w->desc, 0, payload, bytes, 0, NULL), 0);
    for (uint32_t p = 0; p < PARTS; p++)
        for (uint32_t h = 0; h < w->parts[p].heads; h++) {
            int level = kvt_map_get(map, entry++);
            lowest = KVT_MIN(lowest, level);
            at += one_head(w, p, h, level, want + at, bytes - at);
        }
    assert_int_equal(floor, lowest);
    assert_int_equal(at, bytes);
    assert_memory_equal(payload, want, bytes);
    assert_int_equal(kvt_encode_map_by(&kvt_codec_scalar, &w->layout, 0, map, &w->desc, 0, scalar,
                                       bytes, 0, NULL),
                     0);
    assert_memory_equal(payload, scalar, bytes);

    /* Decoding into page 1 and coding that again at the same map gives back raw parts exactly. */
    assert_int_equal(kvt_decode_map(&w->layout, 0, map, payload, bytes, &w->desc, 1), 0);
    entry = 0;
    for (uint32_t p = 0; p < PARTS; p++) {
        size_t head_bytes = part_bytes(&w->parts[p]) / w->parts[p].heads;
        for (uint32_t h = 0; h < w->parts[p].heads; h++) {
            const uint8_t *from = w->memory[p] + h * head_bytes;
            const uint8_t *to = from + part_bytes(&w->parts[p]);
            int raw = kvt_map_get(map, entry++) == KVT_LEVEL_RAW;
            assert_int_equal(memcmp(from, to, head_bytes) == 0, raw);
        }
    }
    uint8_t *pages[PARTS];
    for (uint32_t p = 0; p < PARTS; p++) {
        pages[p] = malloc(part_bytes(&w->parts[p]));
        memcpy(pages[p], w->memory[p] + part_bytes(&w->parts[p]), part_bytes(&w->parts[p]));
    }
    assert_int_equal(
        kvt_decode_map_by(&kvt_codec_scalar, &w->layout, 0, map, payload, bytes, &w->desc, 1), 0);
    for (uint32_t p = 0; p < PARTS; p++) {
        assert_memory_equal(pages[p], w->memory[p] + part_bytes(&w->parts[p]),
                            part_bytes(&w->parts[p]));
        free(pages[p]);
    }
    free(payload);
    free(want);
    free(scalar);
}

static void a_map_is_its_heads_one_after_another(void **state)
{
    struct world w;
    struct kvt_rng rng = {seed + 1};
    (void)state;
    world_make(&w, &rng);
    for (int round = 0; round < 60; round++) {
        uint8_t map[(ENTRIES + 1) / 2] = {0};
        random_map(&w, &rng, map);
        check_map(&w, map);
    }
    world_free(&w);
}

static void maps_that_a_part_cannot_have_are_refused(void **state)
{
    struct world w;
    struct kvt_rng rng = {seed + 2};
    static const struct {
        uint32_t entry;
        int level;
    } bad[] = {{0, 0},  {0, 7},  {5, 15}, {9, KVT_LEVEL_KV6}, {9, KVT_LEVEL_INT4},
               {10, 5}, {11, 1}, {8, 8}};
    uint8_t payload[4096] __attribute__((aligned(16)));
    (void)state;
    world_make(&w, &rng);
    for (size_t i = 0; i < KVT_ARRAY_LEN(bad); i++) {
        uint8_t map[(ENTRIES + 1) / 2] = {0};
        uniform_map(&w, KVT_LEVEL_KV8, map);
        kvt_map_set(map, bad[i].entry, bad[i].level);
        assert_int_equal(kvt_map_payload_bytes(&w.layout, 0, map, NULL), 0);
        assert_int_equal(
            kvt_encode_map(&w.layout, 0, map, &w.desc, 0, payload, sizeof(payload), 0, NULL),
            KVT_E_INVAL);
        assert_int_equal(kvt_decode_map(&w.layout, 0, map, payload, sizeof(payload), &w.desc, 1),
                         KVT_E_INVAL);
        assert_int_equal(kvt_map_fit(&w.layout, 0, map, &w.desc, 0), KVT_E_INVAL);
    }
    world_free(&w);
}

static void lengths_and_pages_are_checked(void **state)
{
    struct world w;
    struct kvt_rng rng = {seed + 3};
    uint8_t map[(ENTRIES + 1) / 2] = {0};
    (void)state;
    world_make(&w, &rng);
    uniform_map(&w, KVT_LEVEL_KV4, map);
    kvt_map_set(map, 0, KVT_LEVEL_RAW);
    size_t bytes = kvt_map_payload_bytes(&w.layout, 0, map, NULL);
    uint8_t *payload = malloc(bytes + 16);
    assert_int_equal(kvt_encode_map(&w.layout, 0, map, &w.desc, 0, payload, bytes - 1, 0, NULL),
                     KVT_E_INVAL);
    assert_int_equal(kvt_encode_map(&w.layout, 0, map, &w.desc, 2, payload, bytes, 0, NULL),
                     KVT_E_INVAL);
    assert_int_equal(kvt_encode_map(&w.layout, 0, map, &w.desc, 0, payload, bytes, 0, NULL), 0);
    assert_int_equal(kvt_decode_map(&w.layout, 0, map, payload, bytes + 16, &w.desc, 1),
                     KVT_E_INVAL);
    assert_int_equal(kvt_decode_map(&w.layout, 0, map, payload, bytes - 16, &w.desc, 1),
                     KVT_E_INVAL);
    assert_int_equal(kvt_decode_map(&w.layout, 0, map, payload, bytes, &w.desc, 2), KVT_E_INVAL);
    assert_int_equal(kvt_map_entries(&w.layout, 1), 0);
    assert_int_equal(kvt_map_payload_bytes(&w.layout, 1, map, NULL), 0);
    free(payload);
    world_free(&w);
}

/* Offsets in more channels than means are stored for: they drown what the head says. */
static void ruin_head(const struct world *w, uint32_t part, uint32_t head, float offset)
{
    const struct kvt_part_place *place = &w->places[part];
    uint8_t *base = (uint8_t *)place->base + place->stride_head * head;
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t e = 0; e < 24; e++) {
            void *at = base + t * place->stride_token + e * place->stride_elem;
            float value;
            kvt_half_to_floats(w->parts[part].dtype, at, 1, &value);
            codec_store(w->parts[part].dtype, at, value + offset);
        }
}

static void fitting_raises_the_heads_that_must_rise(void **state)
{
    struct world w;
    struct kvt_rng rng = {seed + 4};
    (void)state;
    world_make(&w, &rng);
    uint8_t map[(ENTRIES + 1) / 2] = {0}, before[sizeof(map)], again[sizeof(map)];
    uniform_map(&w, KVT_LEVEL_KV4, map);
    memcpy(before, map, sizeof(map));
    assert_int_equal(kvt_map_fit(&w.layout, 0, map, &w.desc, 0), 0);
    assert_memory_equal(map, before, sizeof(map));

    ruin_head(&w, 0, 1, 5.0f);  /* entry 1 */
    ruin_head(&w, 2, 2, 30.0f); /* entry 8 */
    ruin_head(&w, 1, 0, 30.0f); /* a value head: not guarded */
    assert_int_equal(kvt_map_fit(&w.layout, 0, map, &w.desc, 0), 2);
    for (uint32_t i = 0; i < ENTRIES; i++)
        assert_int_equal(kvt_map_get(map, i) > kvt_map_get(before, i), i == 1 || i == 8);
    assert_true(kvt_map_get(map, 1) < kvt_map_get(map, 8)); /* each as far as it must */

    /* The fitted map passes the guard, the one before does not; one level less would not either. */
    size_t bytes = kvt_map_payload_bytes(&w.layout, 0, map, NULL);
    uint8_t *payload = malloc(bytes);
    assert_int_equal(kvt_encode_map(&w.layout, 0, map, &w.desc, 0, payload, bytes, 1, NULL), 0);
    assert_int_equal(kvt_encode_map(&w.layout, 0, before, &w.desc, 0, payload, bytes, 1, NULL),
                     KVT_E_GUARD);
    for (uint32_t i = 1; i <= 8; i += 7) {
        memcpy(again, map, sizeof(map));
        kvt_map_set(again, i, kvt_map_get(map, i) - 1);
        assert_int_equal(kvt_encode_map(&w.layout, 0, again, &w.desc, 0, payload, bytes, 1, NULL),
                         KVT_E_GUARD);
    }
    memcpy(again, map, sizeof(map));
    assert_int_equal(kvt_map_fit(&w.layout, 0, again, &w.desc, 0), 0); /* and it stays */
    assert_memory_equal(again, map, sizeof(map));

    /* NaN says nothing about a head. */
    ruin_head(&w, 0, 0, NAN);
    assert_int_equal(kvt_map_fit(&w.layout, 0, again, &w.desc, 0), 0);
    free(payload);
    world_free(&w);
}

/* ---- groups -------------------------------------------------------------------------------- */

static void groups_have_blocks_of_their_own(void **state)
{
    static const struct kvt_part parts[] = {{KVT_PART_K, KVT_DTYPE_BF16, 0, 0, 2, 64},
                                            {KVT_PART_V, KVT_DTYPE_BF16, 0, 0, 2, 64},
                                            {KVT_PART_OPAQUE, KVT_DTYPE_BYTE, 1, 1, 1, 32},
                                            {KVT_PART_K, KVT_DTYPE_BF16, 2, 2, 2, 64}};
    struct kvt_group groups[] = {{0, KVT_GROUP_FULL, 0, 3584, 0},
                                 {1, KVT_GROUP_STATE, 0, 4, 0},
                                 {2, KVT_GROUP_WINDOW, 0, 64, 128}};
    struct kvt_layout layout = {sizeof(layout), 16, 4, parts, 3, groups};
    (void)state;
    assert_int_equal(kvt_layout_check(&layout), 0);
    assert_int_equal(kvt_group_tokens(&layout, 0), 3584);
    assert_int_equal(kvt_group_tokens(&layout, 1), 4);
    assert_int_equal(kvt_group_tokens(&layout, 2), 64);
    assert_int_equal(kvt_payload_bytes(&layout, 1, KVT_LEVEL_KV4), 4 * 32);
    assert_int_equal(kvt_payload_bytes(&layout, 2, KVT_LEVEL_RAW), 64 * 2 * 64 * 2);
    assert_int_equal(kvt_payload_bytes(&layout, 0, KVT_LEVEL_RAW), 2 * 3584 * 2 * 64 * 2);
    layout.group_count = 1;
    assert_int_equal(kvt_group_tokens(&layout, 1), 16);
    layout.group_count = 3;

#define REFUSED(change, code)                                \
    do {                                                     \
        struct kvt_group saved[3];                           \
        memcpy(saved, groups, sizeof(saved));                \
        change;                                              \
        assert_int_equal(kvt_layout_check(&layout), (code)); \
        memcpy(groups, saved, sizeof(saved));                \
    } while (0)
    REFUSED(groups[2].block_tokens = 4, KVT_E_INVAL); /* coded parts have tiles of 16 tokens */
    REFUSED(groups[2].window_tokens = 0, KVT_E_INVAL);
    REFUSED(groups[0].window_tokens = 5, KVT_E_INVAL);
    REFUSED(groups[1].kind = 3, KVT_E_INVAL);
    REFUSED(groups[1].reserved = 1, KVT_E_INVAL);
    REFUSED(groups[1].group = 0, KVT_E_INVAL); /* twice */
    REFUSED(groups[1].group = 9, KVT_E_INVAL); /* no part */
    REFUSED(groups[0].block_tokens = 4112, KVT_E_LIMIT);
    assert_int_equal(kvt_layout_check(&layout), 0);
    layout.group_count = KVT_GROUPS_MAX + 1;
    assert_int_equal(kvt_layout_check(&layout), KVT_E_LIMIT);
    layout.group_count = 3;
    layout.groups = NULL;
    assert_int_equal(kvt_layout_check(&layout), KVT_E_INVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(entries_are_packed_two_a_byte),
        cmocka_unit_test(a_uniform_map_is_the_level),
        cmocka_unit_test(a_map_is_its_heads_one_after_another),
        cmocka_unit_test(maps_that_a_part_cannot_have_are_refused),
        cmocka_unit_test(lengths_and_pages_are_checked),
        cmocka_unit_test(fitting_raises_the_heads_that_must_rise),
        cmocka_unit_test(groups_have_blocks_of_their_own),
    };
    const char *text = getenv("KVT_TEST_SEED");
    seed = text ? strtoull(text, NULL, 0) : 77;
    printf("seed %llu\n", (unsigned long long)seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
