/* Goal: the sequence-state blob of llama.cpp, another project's format, is taken only when every
 * field is what the context's shape and the request say; what is composed is what would be parsed.
 * Method: blobs made here by hand with rows of known bytes; round trips, permuted cells, shrinking;
 * every truncation, every single-byte change of every header field, counts up to 2^32-1, and random
 * mutations, each in a heap block of exactly its size (so that a sanitizer sees any read past it).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <kvtier/error.h>

#include "base/rng.h"
#include "llama_blob.h"

#define SEED 20261129u
#define SEQ 3

static struct kvt_blob_row plain_rows[] = {{1, 24}, {1, 24}, {1, 24}, {1, 40}, {1, 40}, {30, 40}};
static const struct kvt_blob_shape plain = {3, 192, plain_rows};

static uint8_t row_byte(uint32_t part, int32_t pos, uint32_t at)
{
    return (uint8_t)(part * 31 + (uint32_t)pos * 7 + at);
}

/* A blob whose cells hold positions first + perm[i]; perm NULL: in order. */
static uint8_t *make(const struct kvt_blob_shape *shape, int32_t first, uint32_t cells,
                     const uint32_t *perm, size_t *len)
{
    *len = kvt_blob_bytes(shape, cells);
    uint8_t *blob = malloc(*len);
    assert_non_null(blob);
    memset(blob, 0xa5, *len);
    kvt_blob_write_headers(shape, SEQ, first, cells, blob);
    for (uint32_t i = 0; i < cells; i++) {
        int32_t pos = first + (int32_t)(perm != NULL ? perm[i] : i);
        memcpy(blob + 16 + 12 * (size_t)i, &pos, 4);
        for (uint32_t p = 0; p < 2 * shape->layers; p++) {
            uint8_t *row =
                blob + kvt_blob_rows_offset(shape, p, cells) + (size_t)i * shape->rows[p].bytes;
            for (uint32_t b = 0; b < shape->rows[p].bytes; b++)
                row[b] = row_byte(p, pos, b);
        }
    }
    return blob;
}

static void check_rows(const struct kvt_blob_shape *shape, int32_t first, uint32_t cells,
                       const uint8_t *blob)
{
    for (uint32_t p = 0; p < 2 * shape->layers; p++)
        for (uint32_t i = 0; i < cells; i++)
            for (uint32_t b = 0; b < shape->rows[p].bytes; b++)
                assert_int_equal(blob[kvt_blob_rows_offset(shape, p, cells) +
                                      (size_t)i * shape->rows[p].bytes + b],
                                 row_byte(p, first + (int32_t)i, b));
}

static void test_bytes_by_hand(void **state)
{
    (void)state;
    struct kvt_blob_row rows[] = {{1, 4}, {0, 8}};
    const struct kvt_blob_shape shape = {1, 12, rows};
    uint8_t blob[16 + 2 * 12 + 8 + 2 * 12 + 2 * 12];
    const uint8_t want_head[] = {0xd8, 0x3c, 0x14, 0xaf, 3, 0, 0, 0, 1, 0, 0, 0, 2, 0,    0,
                                 0,    0x20, 0,    0,    0, 1, 0, 0, 0, 3, 0, 0, 0, 0x21, 0,
                                 0,    0,    1,    0,    0, 0, 3, 0, 0, 0, 0, 0, 0, 0,    1,
                                 0,    0,    0,    1,    0, 0, 0, 4, 0, 0, 0, 0, 0, 0,    0};
    const uint8_t want_v[] = {0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0};

    assert_int_equal(kvt_blob_bytes(&shape, 2), sizeof(blob));
    kvt_blob_write_headers(&shape, 3, 32, 2, blob);
    assert_memory_equal(blob, want_head, sizeof(want_head));
    assert_int_equal(kvt_blob_rows_offset(&shape, 0, 2), sizeof(want_head));
    assert_memory_equal(blob + sizeof(want_head) + 8, want_v, sizeof(want_v));
    assert_int_equal(kvt_blob_rows_offset(&shape, 1, 2), sizeof(want_head) + 8 + sizeof(want_v));
}

static void test_parse_in_order(void **state)
{
    (void)state;
    const char *why = NULL;
    uint32_t order[48];
    int sorted = 0;
    size_t len;
    uint8_t *blob = make(&plain, 64, 48, NULL, &len);

    assert_int_equal(kvt_blob_parse(&plain, SEQ, 64, 48, blob, len, order, &sorted, &why), 0);
    assert_int_equal(sorted, 1);
    for (uint32_t i = 0; i < 48; i++)
        assert_int_equal(order[i], i);
    check_rows(&plain, 64, 48, blob);
    free(blob);
}

static void test_parse_any_cell_order(void **state)
{
    (void)state;
    struct kvt_rng rng = {SEED};
    uint32_t perm[32], order[32];
    const char *why = NULL;
    int sorted;
    size_t len;

    for (int round = 0; round < 50; round++) {
        for (uint32_t i = 0; i < 32; i++)
            perm[i] = i;
        for (uint32_t i = 31; i > 0; i--) {
            uint32_t k = (uint32_t)kvt_rng_below(&rng, i + 1), t = perm[i];
            perm[i] = perm[k];
            perm[k] = t;
        }
        uint8_t *blob = make(&plain, 16, 32, perm, &len);
        assert_int_equal(kvt_blob_parse(&plain, SEQ, 16, 32, blob, len, order, &sorted, &why), 0);
        assert_int_equal(sorted, 0);
        uint8_t *out = malloc(len);
        assert_non_null(out);
        kvt_blob_sort_rows(&plain, 32, order, blob, out);
        check_rows(&plain, 16, 32, out);
        free(out);
        free(blob);
    }
}

static void test_shrink(void **state)
{
    (void)state;
    const char *why = NULL;
    uint32_t order[64];
    int sorted;

    for (uint32_t keep = 1; keep <= 64; keep++) {
        size_t len;
        uint8_t *blob = make(&plain, 0, 64, NULL, &len);
        size_t less = kvt_blob_shrink(&plain, SEQ, 0, 64, keep, blob);
        assert_int_equal(less, kvt_blob_bytes(&plain, keep));
        assert_int_equal(kvt_blob_parse(&plain, SEQ, 0, keep, blob, less, order, &sorted, &why), 0);
        assert_int_equal(sorted, 1);
        check_rows(&plain, 0, keep, blob);
        free(blob);
    }
}

/* Every prefix of a blob, each in a block of its own size, is refused by both parsers. */
static void test_truncations(void **state)
{
    (void)state;
    const char *why = NULL;
    struct kvt_blob_shape learnt;
    uint32_t order[2];
    int sorted;
    size_t len, one_len;
    uint8_t *blob = make(&plain, 0, 2, NULL, &len), *one = make(&plain, 0, 1, NULL, &one_len);

    for (size_t cut = 0; cut < len; cut++) {
        uint8_t *part = malloc(cut > 0 ? cut : 1);
        assert_non_null(part);
        memcpy(part, blob, cut);
        assert_int_equal(kvt_blob_parse(&plain, SEQ, 0, 2, part, cut, order, &sorted, &why),
                         KVT_E_ENGINE);
        free(part);
    }
    for (size_t cut = 0; cut < one_len; cut++) {
        uint8_t *part = malloc(cut > 0 ? cut : 1);
        assert_non_null(part);
        memcpy(part, one, cut);
        why = NULL;
        assert_true(kvt_blob_learn(part, cut, SEQ, 0, &learnt, &why) < 0);
        assert_non_null(why);
        assert_null(learnt.rows);
        free(part);
    }
    free(one);
    free(blob);
}

static int is_row_byte(const struct kvt_blob_shape *shape, uint32_t cells, size_t at)
{
    for (uint32_t p = 0; p < 2 * shape->layers; p++) {
        size_t from = kvt_blob_rows_offset(shape, p, cells);
        if (at >= from && at < from + (size_t)cells * shape->rows[p].bytes)
            return 1;
    }
    return 0;
}

/* A change of any header byte to any other value is refused: nothing is ignored. */
static void test_every_header_byte(void **state)
{
    (void)state;
    const char *why = NULL;
    struct kvt_blob_shape learnt;
    uint32_t order[3], changed = 0;
    int sorted;
    size_t len, one_len;
    uint8_t *blob = make(&plain, 5, 3, NULL, &len), *one = make(&plain, 5, 1, NULL, &one_len);

    for (size_t at = 0; at < len; at++) {
        if (is_row_byte(&plain, 3, at))
            continue;
        for (uint32_t x = 1; x < 256; x++) {
            blob[at] ^= (uint8_t)x;
            assert_int_equal(kvt_blob_parse(&plain, SEQ, 5, 3, blob, len, order, &sorted, &why),
                             KVT_E_ENGINE);
            blob[at] ^= (uint8_t)x;
            changed++;
        }
    }
    assert_int_equal(changed, 255 * (16 + 3 * 12 + 8 + 6 * 12));
    /* learning knows no types and sizes yet, but no change of the rest may pass or crash */
    for (size_t at = 0; at < 16 + 12 + 8; at++)
        for (uint32_t x = 1; x < 256; x++) {
            one[at] ^= (uint8_t)x;
            int rc = kvt_blob_learn(one, one_len, SEQ, 5, &learnt, &why);
            assert_true(rc < 0);
            one[at] ^= (uint8_t)x;
        }
    assert_int_equal(kvt_blob_learn(one, one_len, SEQ, 5, &learnt, &why), 0);
    kvt_blob_shape_free(&learnt);
    free(one);
    free(blob);
}

static void put_u32(uint8_t *at, uint32_t value)
{
    memcpy(at, &value, 4);
}

static void test_hostile_counts(void **state)
{
    (void)state;
    const uint32_t values[] = {0, 2, 4, 5, 4096, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff};
    const char *why = NULL;
    uint32_t order[3];
    int sorted;
    size_t len, row_head;
    uint8_t *blob = make(&plain, 0, 3, NULL, &len);
    const size_t fields[] = {8, 12, 16 + 4, 16 + 3 * 12, 16 + 3 * 12 + 4};

    for (size_t f = 0; f < sizeof(fields) / sizeof(fields[0]); f++)
        for (size_t v = 0; v < sizeof(values) / sizeof(values[0]); v++) {
            uint8_t *copy = malloc(len);
            assert_non_null(copy);
            memcpy(copy, blob, len);
            uint32_t was;
            memcpy(&was, copy + fields[f], 4);
            put_u32(copy + fields[f], values[v]);
            if (was != values[v])
                assert_int_equal(kvt_blob_parse(&plain, SEQ, 0, 3, copy, len, order, &sorted, &why),
                                 KVT_E_ENGINE);
            free(copy);
        }
    row_head = kvt_blob_rows_offset(&plain, 2, 3) - 8;
    const uint64_t sizes[] = {0, 23, 25, 1u << 31, UINT64_MAX, UINT64_MAX / 3, 1ull << 63};
    for (size_t v = 0; v < sizeof(sizes) / sizeof(sizes[0]); v++) {
        memcpy(blob + row_head, &sizes[v], 8);
        assert_int_equal(kvt_blob_parse(&plain, SEQ, 0, 3, blob, len, order, &sorted, &why),
                         KVT_E_ENGINE);
    }
    free(blob);
}

static void test_positions(void **state)
{
    (void)state;
    const char *why = NULL;
    uint32_t order[8];
    int sorted;
    size_t len;
    uint8_t *blob = make(&plain, 8, 8, NULL, &len);
    const int32_t twice = 9, outside = 16, before = 7, negative = -1;
    const int32_t bad[] = {twice, outside, before, negative, INT32_MAX, INT32_MIN};

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        memcpy(blob + 16 + 12 * 4, &bad[i], 4);
        assert_int_equal(kvt_blob_parse(&plain, SEQ, 8, 8, blob, len, order, &sorted, &why),
                         KVT_E_ENGINE);
    }
    free(blob);
    /* other requests for the same bytes */
    blob = make(&plain, 8, 8, NULL, &len);
    assert_int_equal(kvt_blob_parse(&plain, SEQ, 7, 8, blob, len, order, &sorted, &why),
                     KVT_E_ENGINE);
    assert_int_equal(kvt_blob_parse(&plain, SEQ, 8, 7, blob, len, order, &sorted, &why),
                     KVT_E_ENGINE);
    assert_int_equal(kvt_blob_parse(&plain, SEQ + 1, 8, 8, blob, len, order, &sorted, &why),
                     KVT_E_ENGINE);
    assert_int_equal(kvt_blob_parse(&plain, SEQ, 8, 0, blob, len, order, &sorted, &why),
                     KVT_E_ENGINE);
    free(blob);
}

static void test_learn(void **state)
{
    (void)state;
    const char *why = NULL;
    struct kvt_blob_shape learnt;
    size_t len;
    uint8_t *blob = make(&plain, 0, 1, NULL, &len);

    assert_int_equal(kvt_blob_learn(blob, len, SEQ, 0, &learnt, &why), 0);
    assert_int_equal(learnt.layers, plain.layers);
    assert_int_equal(learnt.token_bytes, plain.token_bytes);
    for (uint32_t p = 0; p < 6; p++) {
        assert_int_equal(learnt.rows[p].type, plain.rows[p].type);
        assert_int_equal(learnt.rows[p].bytes, plain.rows[p].bytes);
    }
    kvt_blob_shape_free(&learnt);
    free(blob);
}

/* Cache kinds that exist in llama.cpp and that we must refuse, each with its own sentence. */
static void test_learn_refusals(void **state)
{
    (void)state;
    const char *why = NULL;
    struct kvt_blob_shape learnt;
    size_t len;
    uint8_t *blob = make(&plain, 0, 1, NULL, &len);

    put_u32(blob + 8, 4); /* one stream per sequence */
    assert_int_equal(kvt_blob_learn(blob, len, SEQ, 0, &learnt, &why), KVT_E_UNSUPPORTED);
    assert_non_null(strstr(why, "kv_unified"));
    put_u32(blob + 8, 1);
    put_u32(blob + 16 + 12, 1); /* V transposed */
    assert_int_equal(kvt_blob_learn(blob, len, SEQ, 0, &learnt, &why), KVT_E_UNSUPPORTED);
    assert_non_null(strstr(why, "flash attention"));
    put_u32(blob + 16 + 12, 0);
    /* latent rows: K alone */
    size_t latent = kvt_blob_rows_offset(&plain, 3, 1) - 12;
    assert_int_equal(kvt_blob_learn(blob, latent, SEQ, 0, &learnt, &why), KVT_E_UNSUPPORTED);
    assert_non_null(strstr(why, "MLA"));
    /* a second cache behind the first (sliding window) */
    uint8_t *two = calloc(1, 2 * len);
    assert_non_null(two);
    memcpy(two, blob, len);
    memcpy(two + len, blob + 8, len - 8);
    assert_int_equal(kvt_blob_learn(two, 2 * len - 8, SEQ, 0, &learnt, &why), KVT_E_UNSUPPORTED);
    assert_non_null(strstr(why, "sliding window"));
    free(two);
    /* wider cells: 12 bytes of extension behind the sequence count (M-RoPE) */
    uint8_t *wide = calloc(1, len + 12);
    assert_non_null(wide);
    memcpy(wide, blob, 24);
    memset(wide + 24, 9, 12);
    memcpy(wide + 36, blob + 24, len - 24);
    assert_int_equal(kvt_blob_learn(wide, len + 12, SEQ, 0, &learnt, &why), KVT_E_UNSUPPORTED);
    assert_non_null(strstr(why, "M-RoPE"));
    free(wide);
    free(blob);
}

/* Case C11 for this format: 10,000 random mutations, no fault, no large allocation, and what passes
 * is byte for byte a valid header. */
static void test_c11_random_mutations(void **state)
{
    (void)state;
    struct kvt_rng rng = {SEED};
    const char *why = NULL;
    struct kvt_blob_shape learnt;
    uint32_t order[4];
    int sorted, passed = 0;
    size_t len, one_len;
    uint8_t *blob = make(&plain, 0, 4, NULL, &len), *one = make(&plain, 0, 1, NULL, &one_len);

    printf("seed %u\n", SEED);
    for (int round = 0; round < 10000; round++) {
        uint8_t *copy = malloc(len), *small = malloc(one_len);
        assert_non_null(copy);
        assert_non_null(small);
        memcpy(copy, blob, len);
        memcpy(small, one, one_len);
        int header_hit = 0;
        for (int i = 0; i < 4; i++) {
            size_t at = kvt_rng_below(&rng, len);
            uint8_t x = (uint8_t)(1 + kvt_rng_below(&rng, 255));
            copy[at] ^= x;
            small[kvt_rng_below(&rng, one_len)] ^= x;
        }
        for (size_t at = 0; at < len; at++)
            header_hit |= copy[at] != blob[at] && !is_row_byte(&plain, 4, at);
        int rc = kvt_blob_parse(&plain, SEQ, 0, 4, copy, len, order, &sorted, &why);
        assert_int_equal(rc, header_hit ? KVT_E_ENGINE : 0);
        passed += rc == 0;
        if (kvt_blob_learn(small, one_len, SEQ, 0, &learnt, &why) == 0)
            kvt_blob_shape_free(&learnt);
        free(small);
        free(copy);
    }
    assert_in_range(passed, 1, 9999);
    free(one);
    free(blob);
}

static void test_overflow(void **state)
{
    (void)state;
    struct kvt_blob_row rows[] = {{1, 8}, {1, 8}};
    const struct kvt_blob_shape huge = {1, SIZE_MAX / 4, rows};

    assert_int_equal(kvt_blob_bytes(&huge, 16), 0);
    assert_int_not_equal(kvt_blob_bytes(&huge, 1), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes_by_hand),
        cmocka_unit_test(test_parse_in_order),
        cmocka_unit_test(test_parse_any_cell_order),
        cmocka_unit_test(test_shrink),
        cmocka_unit_test(test_truncations),
        cmocka_unit_test(test_every_header_byte),
        cmocka_unit_test(test_hostile_counts),
        cmocka_unit_test(test_positions),
        cmocka_unit_test(test_learn),
        cmocka_unit_test(test_learn_refusals),
        cmocka_unit_test(test_c11_random_mutations),
        cmocka_unit_test(test_overflow),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
