/* Maps of the client: sizes and sets, and payloads of mixed records under damage.
 *
 * Method: a layout of K, V, MLA and opaque parts in two groups; sets under random bounds against a
 * plain rule; payloads of random maps decoded whole, cut, and with every byte of the table changed:
 * either the same elements come out or KVT_E_CORRUPT and an untouched page. Seed printed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/checked.h"
#include "base/rng.h"
#include "client/map.h"
#include "format/record.h"

#define TOKENS 16u
#define PARTS 5u
#define ENTRIES 8u /* of group 0 */
#define PAGES 2u

static const struct kvt_part parts[PARTS] = {{KVT_PART_K, KVT_DTYPE_BF16, 0, 0, 2, 64},
                                             {KVT_PART_V, KVT_DTYPE_BF16, 0, 0, 2, 64},
                                             {KVT_PART_K, KVT_DTYPE_BF16, 0, 1, 2, 128},
                                             {KVT_PART_MLA, KVT_DTYPE_BF16, 0, 2, 1, 576},
                                             {KVT_PART_OPAQUE, KVT_DTYPE_BYTE, 0, 3, 1, 64}};
static const struct kvt_part mla = {KVT_PART_MLA, KVT_DTYPE_BF16, 0, 0, 1, 576};
static const struct kvt_part state_part = {KVT_PART_OPAQUE, KVT_DTYPE_BYTE, 0, 0, 1, 1024};

static struct kvt_layout layout = {sizeof(layout), TOKENS, PARTS, parts};
static struct kvt_part_place places[PARTS];
static struct kvt_pool_desc desc = {sizeof(desc), KVT_DEVICE_HOST, PAGES, PARTS, places};
static uint16_t *memory[PARTS];
static size_t page_bytes[PARTS];
static struct kvt_shape_group shape;
static struct kvt_rng rng;

static int setup(void **state)
{
    (void)state;
    for (uint32_t p = 0; p < PARTS; p++) {
        int64_t size = parts[p].dtype == KVT_DTYPE_BYTE ? 1 : 2, dim = parts[p].head_dim;
        page_bytes[p] = (size_t)(parts[p].heads * TOKENS * dim * size);
        memory[p] = malloc(PAGES * page_bytes[p]);
        for (size_t i = 0; i < PAGES * page_bytes[p] / 2; i++)
            memory[p][i] = (uint16_t)(0x3f00 + kvt_rng_below(&rng, 0x100)); /* 0.5 to 2 */
        places[p] = (struct kvt_part_place){memory[p], (int64_t)page_bytes[p],
                                            (int64_t)TOKENS * dim * size, dim * size, size};
    }
    return kvt_shape_group_init(&shape, &layout, 0);
}

static int teardown(void **state)
{
    (void)state;
    kvt_shape_group_free(&shape);
    for (uint32_t p = 0; p < PARTS; p++)
        free(memory[p]);
    return 0;
}

static void uniform_maps_say_what_a_level_comes_to(void **state)
{
    struct kvt_layout only = {sizeof(only), TOKENS, 1, &mla};
    struct kvt_shape_group group;
    (void)state;
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_RAW; level++) {
        assert_int_equal(shape.uniform[level]->level, level);
        assert_int_equal(shape.uniform[level]->table_bytes, 0);
        assert_int_equal(shape.uniform[level]->payload_bytes, kvt_payload_bytes(&layout, 0, level));
        assert_int_equal(shape.uniform[level]->record_bytes,
                         kvt_record_bytes(kvt_payload_bytes(&layout, 0, level)));
    }
    assert_null(shape.uniform[0]);
    assert_int_equal(shape.entries, ENTRIES);
    assert_int_equal(shape.block_bytes,
                     2 * 2 * 2 * 16 * 64 + 2 * 2 * 16 * 128 + 2 * 16 * 576 + 16 * 64);
    /* Rows that are never coded below kv8: kv4 is kv8. State: everything is raw. */
    assert_int_equal(kvt_shape_group_init(&group, &only, 0), 0);
    assert_int_equal(group.uniform[KVT_LEVEL_KV4]->level, KVT_LEVEL_KV8);
    assert_ptr_equal(group.uniform[KVT_LEVEL_KV4], group.uniform[KVT_LEVEL_KV8]);
    kvt_shape_group_free(&group);
    only.parts = &state_part;
    assert_int_equal(kvt_shape_group_init(&group, &only, 0), 0);
    assert_int_equal(group.uniform[KVT_LEVEL_INT4]->level, KVT_LEVEL_RAW);
    kvt_shape_group_free(&group);
}

static void sets_follow_their_bounds(void **state)
{
    uint8_t bounds[(ENTRIES + 1) / 2] = {0};
    (void)state;
    for (int round = 0; round < 300; round++) {
        for (uint32_t i = 0; i < ENTRIES; i++)
            kvt_map_set(bounds, i,
                        kvt_rng_below(&rng, 3) ? KVT_LEVEL_INT4
                                               : KVT_LEVEL_INT4 + (int)kvt_rng_below(&rng, 6));
        if (round == 0)
            memset(bounds, KVT_LEVEL_INT4 * 17, sizeof(bounds));
        struct kvt_map_set *set = kvt_map_set_new(&shape, bounds);
        assert_non_null(set);
        for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_RAW; level++) {
            const struct kvt_map *map = set->at[level];
            uint32_t entry = 0;
            assert_true(map->level >= level);
            assert_true(map->record_bytes <= shape.uniform[KVT_LEVEL_RAW]->record_bytes);
            assert_true(map->record_bytes >= shape.uniform[level]->record_bytes);
            assert_true(round > 0 || map == shape.uniform[level]);
            if (map->table_bytes == 0)
                continue;
            assert_int_equal(map->record_bytes, map->payload_bytes + 128);
            assert_true(map->table_bytes + map->coded_bytes <= map->payload_bytes);
            for (uint32_t p = 0; p < PARTS; p++)
                for (uint32_t h = 0; h < parts[p].heads; h++, entry++) {
                    int own = kvt_level_for_part(level, &parts[p]);
                    int want = KVT_MAX(own, kvt_map_get(bounds, entry));
                    assert_int_equal(kvt_map_get(map->levels, entry), want);
                }
        }
        kvt_map_set_free(set);
    }
}

/* Where nearly everything is raw a mixed record saves no page: the raw one is taken, without a
 * table.
 */
static void a_mixed_record_is_shorter_than_a_raw_one(void **state)
{
    const struct kvt_map *raw = shape.uniform[KVT_LEVEL_RAW];
    unsigned gained = 0, taken = 0;
    (void)state;
    for (uint32_t coded = 0; coded < ENTRIES; coded++) {
        uint8_t bounds[(ENTRIES + 1) / 2];
        memset(bounds, KVT_LEVEL_RAW * 17, sizeof(bounds));
        kvt_map_set(bounds, coded, KVT_LEVEL_INT4);
        struct kvt_map_set *set = kvt_map_set_new(&shape, bounds);
        assert_non_null(set);
        const struct kvt_map *map = set->at[KVT_LEVEL_KV4];
        if (map != raw)
            assert_true(map->record_bytes < raw->record_bytes);
        gained += map != raw;
        taken += map == raw;
        kvt_map_set_free(set);
    }
    assert_true(gained > 0 && taken > 0);
}

static void excluded_layers_become_bounds(void **state)
{
    struct kvt_settings settings = {.exclude_count = 2,
                                    .exclude = {{0, 0}, {KVT_LAYER_LAST, KVT_LAYER_LAST}}};
    uint8_t bounds[(ENTRIES + 1) / 2] = {0};
    static const int want[ENTRIES] = {6, 6, 6, 6, 1, 1, 1, 6};
    (void)state;
    kvt_map_bounds(&shape, &settings, bounds);
    for (uint32_t i = 0; i < ENTRIES; i++)
        assert_int_equal(kvt_map_get(bounds, i), want[i]);
    settings.exclude_count = 1;
    settings.exclude[0] = (struct kvt_layer_range){1, 2};
    kvt_map_bounds(&shape, &settings, bounds);
    for (uint32_t i = 0; i < ENTRIES; i++)
        assert_int_equal(kvt_map_get(bounds, i), i >= 4 && i < 7 ? 6 : 1);
}

/* Decode into page 1 and say whether all of it was touched (1), nothing (0) or something (-1). */
static int touched(uint8_t id, const uint8_t *payload, uint32_t bytes, int *rc)
{
    bool some = false;
    for (uint32_t p = 0; p < PARTS; p++)
        memset((uint8_t *)memory[p] + page_bytes[p], 0x5a, page_bytes[p]);
    *rc = kvt_map_decode(&shape, id, payload, bytes, &desc, 1);
    for (uint32_t p = 0; p < PARTS; p++)
        for (size_t i = 0; i < page_bytes[p]; i++)
            some = some || ((uint8_t *)memory[p])[page_bytes[p] + i] != 0x5a;
    return some;
}

static struct kvt_map *random_mixed(void)
{
    uint8_t levels[(ENTRIES + 1) / 2] = {0};
    uint32_t entry = 0;
    for (uint32_t p = 0; p < PARTS; p++)
        for (uint32_t h = 0; h < parts[p].heads; h++)
            kvt_map_set(
                levels, entry++,
                kvt_level_for_part(KVT_LEVEL_INT4 + (int)kvt_rng_below(&rng, 6), &parts[p]));
    struct kvt_map *map = kvt_map_new(&shape, levels);
    assert_non_null(map);
    return map;
}

/* An id of that lowest level. */
static uint8_t id_for(int level)
{
    for (uint8_t id = KVT_MAP_MIXED_FIRST; id < KVT_MAP_IDS; id++)
        if (kvt_map_id_level(id) == level)
            return id;
    return 0;
}

static void payloads_decode_alone_or_not_at_all(void **state)
{
    (void)state;
    for (int round = 0; round < 40; round++) {
        struct kvt_map *map = random_mixed();
        uint8_t id = id_for(map->level), *payload = malloc(map->payload_bytes);
        int rc;
        if (id == 0) { /* nothing is coded: no record of that kind */
            free(map);
            free(payload);
            continue;
        }
        memset(payload, 0xee, map->payload_bytes);
        assert_int_equal(kvt_map_encode(map, &shape, &desc, 0, payload, 0), 0);
        for (uint32_t i = map->table_bytes + map->coded_bytes; i < map->payload_bytes; i++)
            assert_int_equal(payload[i], 0);
        assert_int_equal(touched(id, payload, map->payload_bytes, &rc), 1);
        assert_int_equal(rc, 0);

        /* Another lowest level than the id says; cut short; every byte of the table changed. */
        uint8_t other = id_for(map->level == KVT_LEVEL_KV4 ? KVT_LEVEL_KV8 : KVT_LEVEL_KV4);
        assert_int_equal(touched(other, payload, map->payload_bytes, &rc), 0);
        assert_int_equal(rc, KVT_E_CORRUPT);
        assert_int_equal(touched(id, payload, map->table_bytes + map->coded_bytes - 1, &rc), 0);
        assert_int_equal(rc, KVT_E_CORRUPT);
        assert_int_equal(touched(id, payload, 8, &rc), 0);
        assert_int_equal(rc, KVT_E_CORRUPT);
        for (uint32_t i = 0; i < 16 + (ENTRIES + 1) / 2; i++) {
            uint8_t good = payload[i];
            payload[i] ^= (uint8_t)(1 + kvt_rng_below(&rng, 255));
            int any = touched(id, payload, map->payload_bytes, &rc);
            assert_true(rc == 0 || rc == KVT_E_CORRUPT);
            assert_int_equal(any, rc == 0); /* levels of equal lengths may have changed places */
            assert_true(rc == KVT_E_CORRUPT || i >= 16);
            payload[i] = good;
        }
        free(payload);
        free(map);
    }
}

static void uniform_payloads_too(void **state)
{
    (void)state;
    for (uint8_t level = KVT_LEVEL_INT4; level <= KVT_LEVEL_RAW; level++) {
        const struct kvt_map *map = shape.uniform[level];
        uint8_t *payload = malloc(map->payload_bytes);
        int rc;
        assert_int_equal(kvt_map_encode(map, &shape, &desc, 0, payload, 0), 0);
        assert_int_equal(touched(level, payload, map->payload_bytes, &rc), 1);
        assert_int_equal(rc, 0);
        assert_int_equal(touched(level, payload, map->payload_bytes - 16, &rc), 0);
        assert_int_equal(rc, KVT_E_CORRUPT);
        assert_int_equal(touched(0, payload, map->payload_bytes, &rc), 0);
        assert_int_equal(rc, KVT_E_CORRUPT);
        assert_int_equal(touched(16, payload, map->payload_bytes, &rc), 0);
        assert_int_equal(rc, KVT_E_CORRUPT);
        free(payload);
    }
}

static void nearly_equal_maps_share_a_length(void **state)
{
    static const struct kvt_part many[2] = {{KVT_PART_K, KVT_DTYPE_BF16, 0, 0, 512, 128},
                                            {KVT_PART_V, KVT_DTYPE_BF16, 0, 0, 512, 128}};
    struct kvt_layout big = {sizeof(big), TOKENS, 2, many};
    struct kvt_shape_group group;
    uint8_t levels[512];
    uint32_t lengths[3];
    (void)state;
    assert_int_equal(kvt_shape_group_init(&group, &big, 0), 0);
    for (uint32_t raised = 1; raised <= 3; raised++) {
        memset(levels, KVT_LEVEL_KV4 * 17, sizeof(levels));
        for (uint32_t i = 0; i < raised; i++)
            kvt_map_set(levels, i, KVT_LEVEL_KV5);
        struct kvt_map *map = kvt_map_new(&group, levels);
        lengths[raised - 1] = map->record_bytes;
        assert_true(map->record_bytes <=
                    kvt_record_bytes(map->coded_bytes + map->table_bytes) / 64 * 65 + 4096);
        free(map);
    }
    assert_int_equal(lengths[0], lengths[1]);
    assert_int_equal(lengths[1], lengths[2]);
    kvt_shape_group_free(&group);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(uniform_maps_say_what_a_level_comes_to),
        cmocka_unit_test(sets_follow_their_bounds),
        cmocka_unit_test(a_mixed_record_is_shorter_than_a_raw_one),
        cmocka_unit_test(excluded_layers_become_bounds),
        cmocka_unit_test(payloads_decode_alone_or_not_at_all),
        cmocka_unit_test(uniform_payloads_too),
        cmocka_unit_test(nearly_equal_maps_share_a_length),
    };
    const char *text = getenv("KVT_TEST_SEED");
    rng.state = text ? strtoull(text, NULL, 0) : 20261129;
    printf("seed %llu\n", (unsigned long long)rng.state);
    return cmocka_run_group_tests(tests, setup, teardown);
}
