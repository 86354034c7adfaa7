/* Goal:   the block API: sizes, levels, layouts and pools that are refused, every dtype, dimension
 *         and stride order, raw exactness, error codes, and that nothing outside is touched.
 * Method: pools with red zones around them, filled from a seeded generator; payload sizes are
 *         checked against numbers worked out by hand.
 */
#include "unit/codec_support.h"

static void test_level_names(void **state)
{
    (void)state;
    static const char *const names[] = {"int4", "kv4", "kv5", "kv6", "kv8", "raw"};
    for (int i = 0; i < 6; i++) {
        int level = kvt_level_parse(names[i]);
        assert_int_equal(level, KVT_LEVEL_INT4 + i);
        assert_string_equal(kvt_level_name(level), names[i]);
        assert_int_equal(kvt_level_supported(level), 1);
    }
    assert_int_equal(kvt_level_parse("KV4"), KVT_E_INVAL);
    assert_int_equal(kvt_level_parse(""), KVT_E_INVAL);
    assert_int_equal(kvt_level_parse(NULL), KVT_E_INVAL);
    assert_null(kvt_level_name(0));
    assert_null(kvt_level_name(7));
    assert_null(kvt_level_name(-1));
    assert_int_equal(kvt_level_supported(0), 0);
    assert_int_equal(kvt_level_supported(7), 0);
}

static void test_level_for_part(void **state)
{
    (void)state;
    struct kvt_part part = {KVT_PART_K, KVT_DTYPE_BF16, 0, 0, 1, 64};
    assert_int_equal(kvt_level_for_part(KVT_LEVEL_KV4, &part), KVT_LEVEL_KV4);
    part.kind = KVT_PART_MLA;
    assert_int_equal(kvt_level_for_part(KVT_LEVEL_INT4, &part), KVT_LEVEL_KV8);
    assert_int_equal(kvt_level_for_part(KVT_LEVEL_KV8, &part), KVT_LEVEL_KV8);
    assert_int_equal(kvt_level_for_part(KVT_LEVEL_RAW, &part), KVT_LEVEL_RAW);
    part.kind = KVT_PART_OPAQUE;
    assert_int_equal(kvt_level_for_part(KVT_LEVEL_INT4, &part), KVT_LEVEL_RAW);
    part.kind = KVT_PART_V;
    part.dtype = KVT_DTYPE_BYTE;
    assert_int_equal(kvt_level_for_part(KVT_LEVEL_KV4, &part), KVT_LEVEL_RAW);
    assert_int_equal(kvt_level_for_part(0, &part), KVT_E_INVAL);
    assert_int_equal(kvt_level_for_part(7, &part), KVT_E_INVAL);
}

/* Bits an element, by hand: 4 + 16/128 = 4.125 for a 128 row, plus 256/2048 for stored means. */
static void test_bits(void **state)
{
    (void)state;
    static const struct {
        int level;
        uint32_t dim;
        double key, value;
    } table[] = {
        {KVT_LEVEL_RAW, 128, 16, 16},      {KVT_LEVEL_INT4, 128, 4.125, 4.125},
        {KVT_LEVEL_INT4, 64, 4.25, 4.25},  {KVT_LEVEL_KV4, 128, 4.25, 4.125},
        {KVT_LEVEL_KV4, 64, 4.5, 4.25},    {KVT_LEVEL_KV5, 128, 5.25, 4.125},
        {KVT_LEVEL_KV6, 128, 6.25, 6.125}, {KVT_LEVEL_KV8, 128, 8.25, 8.125},
        {KVT_LEVEL_KV8, 64, 8.5, 8.25},    {KVT_LEVEL_KV4, 16, 6, 5},
        {KVT_LEVEL_KV4, 256, 4.25, 4.125}, {KVT_LEVEL_KV4, 96, 4 + 64 / 96.0, 4 + 32 / 96.0},
    };
    for (size_t i = 0; i < KVT_ARRAY_LEN(table); i++) {
        double key = kvt_level_bits(table[i].level, table[i].dim, KVT_DTYPE_BF16, 1);
        double value = kvt_level_bits(table[i].level, table[i].dim, KVT_DTYPE_BF16, 0);
        assert_true(fabs(key - table[i].key) < 1e-12);
        assert_true(fabs(value - table[i].value) < 1e-12);
    }
    assert_true(kvt_level_bits(KVT_LEVEL_RAW, 64, KVT_DTYPE_F32, 1) == 32.0);
    assert_true(kvt_level_bits(KVT_LEVEL_KV4, 64, KVT_DTYPE_BYTE, 1) == 8.0);
    assert_true(kvt_level_bits(KVT_LEVEL_KV4, 24, KVT_DTYPE_BF16, 1) == 0.0);
    assert_true(kvt_level_bits(KVT_LEVEL_KV4, 0, KVT_DTYPE_BF16, 1) == 0.0);
    assert_true(kvt_level_bits(KVT_LEVEL_KV4, 2048, KVT_DTYPE_BF16, 1) == 0.0);
    assert_true(kvt_level_bits(KVT_LEVEL_KV4, 64, 9, 1) == 0.0);
    assert_true(kvt_level_bits(0, 64, KVT_DTYPE_BF16, 1) == 0.0);
}

/* A 16-token block of Llama-3-70B: 80 layers, K and V of 8 heads of 128. */
static void test_payload_bytes(void **state)
{
    (void)state;
    struct kvt_part parts[160];
    for (uint32_t i = 0; i < 160; i++) {
        uint8_t kind = i % 2 ? KVT_PART_V : KVT_PART_K;
        parts[i] = (struct kvt_part){kind, KVT_DTYPE_BF16, 0, i / 2, 8, 128};
    }
    struct kvt_layout layout = {sizeof(layout), 16, 160, parts};
    assert_int_equal(kvt_layout_check(&layout), 0);
    assert_int_equal(kvt_payload_bytes(&layout, 0, KVT_LEVEL_RAW), 5242880);
    assert_int_equal(kvt_payload_bytes(&layout, 0, KVT_LEVEL_INT4), 1351680);
    assert_int_equal(kvt_payload_bytes(&layout, 0, KVT_LEVEL_KV4), 1372160);
    assert_int_equal(kvt_payload_bytes(&layout, 1, KVT_LEVEL_KV4), 0);
    assert_int_equal(kvt_payload_bytes(&layout, 0, 0), 0);
    assert_int_equal(kvt_payload_bytes(&layout, 0, 7), 0);
}

static void test_layout_check(void **state)
{
    (void)state;
    struct kvt_part good = {KVT_PART_K, KVT_DTYPE_BF16, 0, 0, 2, 64};
    struct kvt_part part = good;
    struct kvt_layout layout = {sizeof(layout), 16, 1, &part};
    assert_int_equal(kvt_layout_check(NULL), KVT_E_INVAL);
    assert_int_equal(kvt_layout_check(&layout), 0);
    layout.struct_size--;
    assert_int_equal(kvt_layout_check(&layout), KVT_E_VERSION);
    layout.struct_size++;
    static const struct {
        uint32_t tokens;
        int want;
    } tokens[] = {{0, KVT_E_INVAL}, {8, KVT_E_INVAL},    {24, KVT_E_INVAL},
                  {4096, 0},        {4112, KVT_E_LIMIT}, {UINT32_MAX - 15, KVT_E_LIMIT}};
    for (size_t i = 0; i < KVT_ARRAY_LEN(tokens); i++) {
        layout.block_tokens = tokens[i].tokens;
        assert_int_equal(kvt_layout_check(&layout), tokens[i].want);
    }
    layout.block_tokens = 16;
    layout.part_count = 0;
    assert_int_equal(kvt_layout_check(&layout), KVT_E_INVAL);
    layout.part_count = KVT_PARTS_MAX + 1;
    assert_int_equal(kvt_layout_check(&layout), KVT_E_LIMIT);
    layout.part_count = 1;
    layout.parts = NULL;
    assert_int_equal(kvt_layout_check(&layout), KVT_E_INVAL);
}

static void test_layout_parts(void **state)
{
    (void)state;
    static const struct {
        struct kvt_part part;
        int want;
    } parts[] = {
        {{0, KVT_DTYPE_BF16, 0, 0, 2, 64}, KVT_E_INVAL},
        {{5, KVT_DTYPE_BF16, 0, 0, 2, 64}, KVT_E_INVAL},
        {{KVT_PART_K, 0, 0, 0, 2, 64}, KVT_E_INVAL},
        {{KVT_PART_K, 5, 0, 0, 2, 64}, KVT_E_INVAL},
        {{KVT_PART_K, KVT_DTYPE_F16, 0, 0, 0, 64}, KVT_E_INVAL},
        {{KVT_PART_K, KVT_DTYPE_F16, 0, 0, 1024, 64}, 0},
        {{KVT_PART_K, KVT_DTYPE_F16, 0, 0, 1025, 64}, KVT_E_LIMIT},
        {{KVT_PART_K, KVT_DTYPE_F16, 0, 0, 2, 0}, KVT_E_INVAL},
        {{KVT_PART_K, KVT_DTYPE_F16, 0, 0, 2, 8}, KVT_E_INVAL},
        {{KVT_PART_K, KVT_DTYPE_F16, 0, 0, 2, 72}, KVT_E_INVAL},
        {{KVT_PART_K, KVT_DTYPE_F16, 0, 0, 2, 1024}, 0},
        {{KVT_PART_K, KVT_DTYPE_F16, 0, 0, 2, 1040}, KVT_E_LIMIT},
        {{KVT_PART_MLA, KVT_DTYPE_F16, 0, 0, 1, 576}, 0},
        {{KVT_PART_MLA, KVT_DTYPE_F16, 0, 0, 2, 576}, KVT_E_INVAL},
        {{KVT_PART_OPAQUE, KVT_DTYPE_BYTE, 0, 0, 1, 16}, 0},
    };
    for (size_t i = 0; i < KVT_ARRAY_LEN(parts); i++) {
        struct kvt_layout layout = {sizeof(layout), 16, 1, &parts[i].part};
        assert_int_equal(kvt_layout_check(&layout), parts[i].want);
    }
}

/* 256 MiB less the header's page is the largest record of a group; groups count on their own. */
static void test_layout_record_limit(void **state)
{
    (void)state;
    struct kvt_part parts[3];
    for (uint32_t i = 0; i < 3; i++)
        parts[i] = (struct kvt_part){KVT_PART_V, KVT_DTYPE_BYTE, (uint16_t)i, 0, 64, 1008};
    struct kvt_layout layout = {sizeof(layout), 4096, 3, parts};
    assert_int_equal(kvt_layout_check(&layout), 0); /* 3 groups of 252 MiB */
    parts[2].group = 0;
    assert_int_equal(kvt_layout_check(&layout), KVT_E_LIMIT);
    parts[2].group = 2;
    parts[1].head_dim = 1024;
    assert_int_equal(kvt_layout_check(&layout), KVT_E_LIMIT);
}

/* A page of 2 heads x 16 tokens x 64 elements of 2 bytes, 4 pages. */
static void test_pool_strides(void **state)
{
    (void)state;
    struct kvt_part part = {KVT_PART_K, KVT_DTYPE_BF16, 0, 0, 2, 64};
    struct kvt_layout layout = {sizeof(layout), 16, 1, &part};
    char memory[64];
    static const struct {
        int64_t block, head, token, elem;
        int want;
    } strides[] = {
        {4096, 2048, 128, 2, 0},
        {4096, 2048, 2, 32, 0},                         /* K transposed */
        {128, 16384, 512, 2, 0},                        /* blocks inside tokens */
        {4096, 2048, 128, 1, KVT_E_INVAL},              /* not a multiple of the element */
        {4096, 2048, 128, 0, KVT_E_INVAL},              /* elements on top of each other */
        {4096, 2048, 126, 2, KVT_E_INVAL},              /* rows overlap */
        {4096, 2046, 128, 2, KVT_E_INVAL},              /* heads overlap */
        {4094, 2048, 128, 2, KVT_E_INVAL},              /* blocks overlap */
        {-4096, 2048, 128, 2, KVT_E_INVAL},             /* negative */
        {INT64_MAX - 1, 2048, 128, 2, KVT_E_INVAL},     /* overflow of the product */
        {INT64_MAX / 3 - 1, 2048, 128, 2, KVT_E_INVAL}, /* overflow of the sum */
        {INT64_MAX / 4 - 1, 2048, 128, 2, 0},           /* large, but fits */
    };
    for (size_t i = 0; i < KVT_ARRAY_LEN(strides); i++) {
        struct kvt_part_place place = {memory, strides[i].block, strides[i].head, strides[i].token,
                                       strides[i].elem};
        struct kvt_pool_desc pool = {sizeof(pool), KVT_DEVICE_HOST, 4, 1, &place};
        assert_int_equal(kvt_pool_check(&layout, &pool), strides[i].want);
    }
}

static void test_pool_check(void **state)
{
    (void)state;
    struct kvt_part part = {KVT_PART_K, KVT_DTYPE_BF16, 0, 0, 2, 64};
    struct kvt_layout layout = {sizeof(layout), 16, 1, &part};
    char memory[64];
    struct kvt_part_place place = {memory, 4096, 2048, 128, 2};
    struct kvt_pool_desc pool = {sizeof(pool), KVT_DEVICE_HOST, 4, 1, &place};
    assert_int_equal(kvt_pool_check(&layout, &pool), 0);
    assert_int_equal(kvt_pool_check(NULL, &pool), KVT_E_INVAL);
    assert_int_equal(kvt_pool_check(&layout, NULL), KVT_E_INVAL);
    place.base = NULL;
    assert_int_equal(kvt_pool_check(&layout, &pool), KVT_E_INVAL);
    place.base = (void *)(UINTPTR_MAX - 100); /* the range wraps */
    assert_int_equal(kvt_pool_check(&layout, &pool), KVT_E_INVAL);
    place.base = memory;
    pool.place_count = 2;
    assert_int_equal(kvt_pool_check(&layout, &pool), KVT_E_LAYOUT);
    pool.place_count = 1;
    pool.block_count = 0;
    assert_int_equal(kvt_pool_check(&layout, &pool), KVT_E_INVAL);
    pool.block_count = 4;
    pool.places = NULL;
    assert_int_equal(kvt_pool_check(&layout, &pool), KVT_E_INVAL);
    pool.places = &place;
    pool.struct_size++;
    assert_int_equal(kvt_pool_check(&layout, &pool), KVT_E_VERSION);
}

/* Raw: [part][head][token][element], whatever the order of the strides; and back, bit for bit. */
static void test_raw_order(void **state)
{
    (void)state;
    for (int order = 0; order < CODEC_ORDERS; order++) {
        struct codec_pool pool;
        size_t bytes;
        codec_pool_make(&pool, KVT_DTYPE_F32, 48, 3, 32, 2, order);
        codec_pool_fill_random_bits(&pool, 7);
        uint8_t *payload = codec_encode(&pool, KVT_LEVEL_RAW, 1, &bytes);
        assert_int_equal(bytes, 2 * 3 * 32 * 48 * 4);
        assert_int_equal(
            kvt_decode_block(&pool.layout, 0, KVT_LEVEL_RAW, payload, bytes, &pool.desc, 0), 0);
        const uint8_t *at = payload;
        for (uint32_t p = 0; p < 2; p++)
            for (uint32_t h = 0; h < 3; h++)
                for (uint32_t t = 0; t < 32; t++)
                    for (uint32_t e = 0; e < 48; e++, at += 4) {
                        assert_memory_equal(at, codec_element(&pool, p, 1, h, t, e), 4);
                        assert_memory_equal(at, codec_element(&pool, p, 0, h, t, e), 4);
                    }
        free(payload);
        codec_pool_free(&pool);
    }
}

/* After a decode into page 0 of a poisoned pool: the plain pool's values there, poison elsewhere.
 * Every byte of the part area is counted once, as an element or as a gap. */
static void check_decoded(const struct codec_pool *pool, const struct codec_pool *plain)
{
    static const uint8_t red[4] = {CODEC_RED_BYTE, CODEC_RED_BYTE, CODEC_RED_BYTE, CODEC_RED_BYTE};
    size_t size = kvt_dtype_bytes(pool->parts[0].dtype), changed = 0, differing = 0;
    CODEC_EACH(pool, p, b, h, t, e)
    {
        const uint8_t *at = codec_element(pool, p, b, h, t, e);
        assert_memory_equal(at, b == 1 ? red : codec_element(plain, p, b, h, t, e), size);
        for (size_t i = 0; i < size; i++)
            changed += at[i] != CODEC_RED_BYTE;
    }
    for (size_t i = 0; i < 2 * pool->part_bytes; i++)
        differing += pool->memory[CODEC_RED + i] != CODEC_RED_BYTE;
    assert_int_equal(changed, differing);
}

static void check_orders(int level, int dtype, uint32_t head_dim)
{
    struct codec_pool plain, pool;
    size_t bytes;
    codec_pool_make(&plain, dtype, head_dim, 2, 32, 2, CODEC_ORDER_BHTE);
    codec_pool_fill_normal(&plain, 11, 1.0);
    uint8_t *want = codec_encode(&plain, level, 1, &bytes);
    assert_int_equal(kvt_decode_block(&plain.layout, 0, level, want, bytes, &plain.desc, 0), 0);
    for (int order = 1; order < CODEC_ORDERS; order++) {
        codec_pool_make(&pool, dtype, head_dim, 2, 32, 2, order);
        codec_pool_fill_normal(&pool, 11, 1.0);
        uint8_t *got = codec_encode(&pool, level, 1, &bytes);
        assert_memory_equal(got, want, bytes);
        memset(pool.memory + CODEC_RED, CODEC_RED_BYTE, 2 * pool.part_bytes);
        assert_int_equal(kvt_decode_block(&pool.layout, 0, level, got, bytes, &pool.desc, 0), 0);
        check_decoded(&pool, &plain);
        codec_pool_free(&pool);
        free(got);
    }
    codec_pool_free(&plain);
    free(want);
}

/* Same bytes and values whatever the strides, and only the named page is touched. */
static void test_stride_orders_agree(void **state)
{
    (void)state;
    static const uint32_t dims[] = {16, 64, 80, 128, 576};
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_RAW; level++)
        for (size_t i = 0; i < KVT_ARRAY_LEN(dims); i++)
            for (int dtype = KVT_DTYPE_BF16; dtype <= KVT_DTYPE_F32; dtype++)
                check_orders(level, dtype, dims[i]);
}

static void test_errors(void **state)
{
    (void)state;
    struct codec_pool pool;
    codec_pool_make(&pool, KVT_DTYPE_BF16, 64, 2, 16, 2, 0);
    codec_pool_fill_normal(&pool, 3, 1.0);
    size_t n = kvt_payload_bytes(&pool.layout, 0, KVT_LEVEL_KV4);
    uint8_t payload[8192];
    assert_true(n < sizeof(payload));
    const struct kvt_layout *layout = &pool.layout;
    struct kvt_pool_desc desc = pool.desc;
    assert_int_equal(kvt_encode_block(layout, 0, 2, &desc, 2, payload, n, 0, NULL), KVT_E_INVAL);
    assert_int_equal(kvt_encode_block(layout, 0, 2, &desc, 0, payload, n - 1, 0, NULL),
                     KVT_E_INVAL);
    assert_int_equal(kvt_encode_block(layout, 1, 2, &desc, 0, payload, n, 0, NULL), KVT_E_INVAL);
    assert_int_equal(kvt_encode_block(layout, 0, 0, &desc, 0, payload, n, 0, NULL), KVT_E_INVAL);
    assert_int_equal(kvt_encode_block(layout, 0, 2, &desc, 0, payload, sizeof(payload), 0, NULL),
                     0);
    assert_int_equal(kvt_decode_block(layout, 0, 2, payload, n - 1, &desc, 0), KVT_E_INVAL);
    assert_int_equal(kvt_decode_block(layout, 0, 2, payload, n + 1, &desc, 0), KVT_E_INVAL);
    assert_int_equal(kvt_decode_block(layout, 0, 2, payload, n, &desc, 2), KVT_E_INVAL);
    assert_int_equal(kvt_decode_block(layout, 0, 9, payload, n, &desc, 0), KVT_E_INVAL);
    desc.device = 0;
    assert_int_equal(kvt_encode_block(layout, 0, 2, &desc, 0, payload, n, 0, NULL), KVT_E_INVAL);
    assert_int_equal(kvt_decode_block(layout, 0, 2, payload, n, &desc, 0), KVT_E_INVAL);
    codec_pool_free(&pool);
}

/* Every payload byte is written: two encodes into differently filled buffers agree. */
static void test_payload_is_fully_written(void **state)
{
    (void)state;
    static const uint32_t dims[] = {16, 48, 64, 128, 192};
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_RAW; level++)
        for (size_t i = 0; i < KVT_ARRAY_LEN(dims); i++) {
            struct codec_pool pool;
            codec_pool_make(&pool, KVT_DTYPE_F16, dims[i], 1, 16, 1, 0);
            codec_pool_fill_normal(&pool, 5, 3.0);
            size_t n = kvt_payload_bytes(&pool.layout, 0, level);
            uint8_t *a = malloc(n + 16), *b = malloc(n + 16);
            memset(a, 0, n + 16);
            memset(b, 0xff, n + 16);
            assert_int_equal(
                kvt_encode_block(&pool.layout, 0, level, &pool.desc, 0, a, n + 16, 1, NULL), 0);
            assert_int_equal(
                kvt_encode_block(&pool.layout, 0, level, &pool.desc, 0, b, n + 16, 1, NULL), 0);
            assert_memory_equal(a, b, n);
            for (int k = 0; k < 16; k++) {
                assert_int_equal(a[n + k], 0);
                assert_int_equal(b[n + k], 0xff);
            }
            free(a);
            free(b);
            codec_pool_free(&pool);
        }
}

/* Parts of one group follow each other; another group has its own payload; MLA, opaque and byte
 * parts get the level they must have. */
static void test_mixed_parts(void **state)
{
    (void)state;
    struct kvt_part parts[] = {
        {KVT_PART_K, KVT_DTYPE_BF16, 0, 0, 2, 64},
        {KVT_PART_OPAQUE, KVT_DTYPE_F32, 0, 0, 1, 32},
        {KVT_PART_MLA, KVT_DTYPE_BF16, 1, 0, 1, 576},
        {KVT_PART_V, KVT_DTYPE_BYTE, 0, 0, 2, 64},
    };
    struct kvt_layout layout = {sizeof(layout), 16, 4, parts};
    static uint8_t memory[4][32768], back[4][32768];
    struct kvt_part_place from[4], to[4];
    for (uint32_t i = 0; i < 4; i++) {
        codec_place_make(&from[i], &parts[i], 16, 1, 0, memory[i]);
        codec_place_make(&to[i], &parts[i], 16, 1, 0, back[i]);
    }
    struct kvt_pool_desc pool = {sizeof(pool), KVT_DEVICE_HOST, 1, 4, from};
    struct kvt_pool_desc target = {sizeof(pool), KVT_DEVICE_HOST, 1, 4, to};
    struct kvt_rng rng = {21};
    for (uint32_t i = 0; i < 16 * 64 * 2; i++) {
        codec_store(KVT_DTYPE_BF16, &memory[0][2 * i], (float)codec_normal(&rng));
        memory[3][i] = (uint8_t)kvt_rng_next(&rng);
        memory[1][i] = (uint8_t)kvt_rng_next(&rng);
    }
    for (uint32_t i = 0; i < 16 * 576; i++)
        codec_store(KVT_DTYPE_BF16, &memory[2][2 * i], (float)codec_normal(&rng));
    size_t n = kvt_payload_bytes(&layout, 0, KVT_LEVEL_KV4);
    assert_int_equal(n, 2 * (16 * 32 + 32 + 32) + 16 * 32 * 4 + 2 * 16 * 64);
    size_t m = kvt_payload_bytes(&layout, 1, KVT_LEVEL_KV4);
    assert_int_equal(m, 4 * (16 * 128 + 64) + 16 * 64 + 64);
    uint8_t payload[32768];
    assert_int_equal(kvt_encode_block(&layout, 0, KVT_LEVEL_KV4, &pool, 0, payload, n, 1, NULL), 0);
    assert_int_equal(kvt_decode_block(&layout, 0, KVT_LEVEL_KV4, payload, n, &target, 0), 0);
    assert_memory_equal(memory[1], back[1], 16 * 32 * 4);
    assert_memory_equal(memory[3], back[3], 2 * 16 * 64);
    for (uint32_t i = 0; i < 2 * 16 * 576; i++)
        assert_int_equal(back[2][i], 0); /* the other group's part is not touched */
    assert_int_equal(kvt_encode_block(&layout, 1, KVT_LEVEL_KV4, &pool, 0, payload, m, 1, NULL), 0);
    assert_int_equal(kvt_decode_block(&layout, 1, KVT_LEVEL_KV4, payload, m, &target, 0), 0);
    double error = 0, energy = 0;
    for (uint32_t i = 0; i < 16 * 576; i++) {
        float x[2];
        kvt_half_to_floats(KVT_DTYPE_BF16, &memory[2][2 * i], 1, &x[0]);
        kvt_half_to_floats(KVT_DTYPE_BF16, &back[2][2 * i], 1, &x[1]);
        error += (x[0] - x[1]) * (x[0] - x[1]);
        energy += x[0] * x[0];
    }
    assert_true(error < 1e-4 * energy); /* 40 dB: kv8, not kv4 */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_level_names),
        cmocka_unit_test(test_level_for_part),
        cmocka_unit_test(test_bits),
        cmocka_unit_test(test_payload_bytes),
        cmocka_unit_test(test_layout_check),
        cmocka_unit_test(test_layout_parts),
        cmocka_unit_test(test_layout_record_limit),
        cmocka_unit_test(test_pool_strides),
        cmocka_unit_test(test_pool_check),
        cmocka_unit_test(test_raw_order),
        cmocka_unit_test(test_stride_orders_agree),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_payload_is_fully_written),
        cmocka_unit_test(test_mixed_parts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
