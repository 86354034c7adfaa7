/* Goal: the arithmetic of `kvtier quality`: KL, perplexity, quantiles against sums by hand; the
 * cache through the codec: which blocks change, which do not, and which head is called the worst.
 * Method: the tool's own sources compiled in, on distributions and a cache made here.
 */
#include "llama_help.h"

#include <math.h>

#include "../../tools/cmd_quality_code.c"
#include "../../tools/cmd_quality_score.c"

#define VOCAB 5
#define LAYERS 3
#define HEADS 2
#define DIM 64
#define BLOCKS 6
#define CELLS (BLOCKS * QUALITY_BLOCK_TOKENS)
#define SEED 11

/* ---- scores -------------------------------------------------------------------------------- */

static void softmax(const float *logits, long double *p)
{
    long double sum = 0;

    for (int t = 0; t < VOCAB; t++)
        sum += p[t] = expl((long double)logits[t]);
    for (int t = 0; t < VOCAB; t++)
        p[t] /= sum;
}

static void test_kl_by_hand(void **state)
{
    (void)state;
    const float exact[2][VOCAB] = {{1, 2, 3, 4, 0}, {0, 0, 0, -3, 9}};
    const float coded[2][VOCAB] = {{1.5f, 2, 2, 4, -1}, {1, 0, 7, -3, 8}};
    const int32_t next[2] = {2, 4};
    long double p[VOCAB], q[VOCAB], nll = 0, nll_exact = 0;
    double kls[2];
    struct quality_exact scores = {NULL, NULL, NULL, 0};
    struct quality_level level = {.kl = kls};

    assert_int_equal(quality_exact_new(&scores, 2, VOCAB), 0);
    for (size_t row = 0; row < 2; row++) {
        quality_exact_add(&scores, row, exact[row], VOCAB, next[row]);
        quality_compare(&level, &scores, row, coded[row], VOCAB, next[row]);
        softmax(exact[row], p);
        softmax(coded[row], q);
        long double kl = 0;
        for (int t = 0; t < VOCAB; t++)
            kl += p[t] * logl(p[t] / q[t]);
        nll -= logl(q[next[row]]);
        nll_exact -= logl(p[next[row]]);
        assert_true(fabsl(kl - (long double)kls[row]) < 1e-12L);
    }
    assert_true(fabsl(nll - (long double)level.nll) < 1e-12L);
    assert_true(fabsl(nll_exact - (long double)scores.nll) < 1e-12L);
    assert_int_equal(level.kl_count, 2);
    assert_int_equal(level.top1_same, 2);
    /* the same distribution costs nothing at all */
    level.kl_count = 0;
    quality_compare(&level, &scores, 0, exact[0], VOCAB, next[0]);
    assert_true(kls[0] == 0);
    /* a different choice is one */
    quality_compare(&level, &scores, 0, exact[1], VOCAB, next[0]);
    assert_int_equal(level.top1_same, 3);
    assert_true(kls[1] > 0);
    quality_exact_free(&scores);
    assert_null(scores.logits);
}

/* Logits of any size and offset: sums do not overflow, and an offset changes nothing. */
static void test_large_logits(void **state)
{
    (void)state;
    const float exact[VOCAB] = {30000, 30001, 29990, -30000, 30002};
    const float moved[VOCAB] = {-30002, -30001, -30012, -90002, -30000};
    double kls[1];
    struct quality_exact scores = {NULL, NULL, NULL, 0};
    struct quality_level level = {.kl = kls};

    assert_int_equal(quality_exact_new(&scores, 1, VOCAB), 0);
    quality_exact_add(&scores, 0, exact, VOCAB, 4);
    quality_compare(&level, &scores, 0, moved, VOCAB, 4);
    assert_true(fabs(kls[0]) < 1e-9);
    assert_true(fabs(level.nll - scores.nll) < 1e-9 && level.nll > 0 && level.nll < 1);
    quality_exact_free(&scores);
}

static void test_mean_and_quantile(void **state)
{
    (void)state;
    double values[200];

    for (int i = 0; i < 200; i++)
        values[i] = (i * 37) % 200 + 1; /* 1..200 in disorder */
    assert_true(quality_mean(values, 200) == 100.5);
    assert_true(quality_quantile(values, 200, 0.99) == 198);
    assert_true(quality_quantile(values, 200, 1.0) == 200);
    assert_true(quality_quantile(values, 200, 0.0) == 1);
    assert_true(quality_quantile(values, 1, 0.99) == 1);
    assert_true(quality_quantile(values, 0, 0.99) == 0);
    assert_true(quality_mean(values, 0) == 0);
}

/* ---- the cache ----------------------------------------------------------------------------- */

struct cache {
    struct kvt_llama llama;
    struct kvt_blob_row rows[2 * LAYERS];
    struct kvt_part parts[2 * LAYERS];
    uint8_t *was, *now;
    size_t bytes;
    double signal[LAYERS * HEADS], noise[LAYERS * HEADS];
    struct quality_level level;
};

static uint8_t *row_at(struct cache *cache, uint8_t *blob, uint32_t part, uint32_t cell)
{
    return blob + kvt_blob_rows_offset(&cache->llama.shape, part, CELLS) +
           (size_t)cell * cache->rows[part].bytes;
}

static void open_cache(struct cache *cache, int dtype)
{
    const uint32_t size = dtype == KVT_DTYPE_F32 ? 4 : 2;
    struct kvt_rng rng = {SEED};

    memset(cache, 0, sizeof(*cache));
    for (uint32_t p = 0; p < 2 * LAYERS; p++) {
        cache->rows[p] = (struct kvt_blob_row){GGML_TYPE_F16, HEADS * DIM * size};
        cache->parts[p] = (struct kvt_part){.kind = p % 2 ? KVT_PART_V : KVT_PART_K,
                                            .dtype = (uint8_t)dtype,
                                            .layer = p / 2,
                                            .heads = HEADS,
                                            .head_dim = DIM};
    }
    cache->llama.shape =
        (struct kvt_blob_shape){LAYERS, (size_t)2 * LAYERS * HEADS * DIM * size, cache->rows};
    cache->llama.parts = cache->parts;
    cache->llama.block_tokens = QUALITY_BLOCK_TOKENS;
    cache->bytes = kvt_blob_bytes(&cache->llama.shape, CELLS);
    cache->was = calloc(1, cache->bytes);
    cache->now = calloc(1, cache->bytes);
    assert_non_null(cache->was);
    assert_non_null(cache->now);
    kvt_blob_write_headers(&cache->llama.shape, 0, 0, CELLS, cache->was);
    for (uint32_t p = 0; p < 2 * LAYERS; p++)
        for (uint32_t c = 0; c < CELLS; c++)
            for (uint32_t e = 0; e < HEADS * DIM; e++) {
                const float value = (float)(kvt_rng_next(&rng) >> 40) * 0x1p-23f - 1.0f;
                const uint16_t half =
                    dtype == KVT_DTYPE_F16 ? kvt_float_to_f16(value) : kvt_float_to_bf16(value);
                uint8_t *at = row_at(cache, cache->was, p, c) + (size_t)e * size;
                if (dtype == KVT_DTYPE_F32)
                    memcpy(at, &value, 4);
                else
                    memcpy(at, &half, 2);
            }
    cache->level.head_signal = cache->signal;
    cache->level.head_noise = cache->noise;
}

static void code_cache(struct cache *cache, int level, size_t from, size_t to, size_t window)
{
    memset(cache->signal, 0, sizeof(cache->signal));
    memset(cache->noise, 0, sizeof(cache->noise));
    cache->level.blocks = cache->level.blocks_below = cache->level.blocks_raw = 0;
    cache->level.level = level;
    memcpy(cache->now, cache->was, cache->bytes);
    assert_int_equal(
        quality_code(&cache->llama, &cache->level, cache->now, CELLS, from, to, CELLS, window), 0);
}

static void close_cache(struct cache *cache)
{
    free(cache->was);
    free(cache->now);
}

/* Whether block b of all parts is the same before and after; the header always must be. */
static int same_block(struct cache *cache, size_t b)
{
    assert_memory_equal(cache->was, cache->now,
                        kvt_blob_rows_offset(&cache->llama.shape, 0, CELLS));
    for (uint32_t p = 0; p < 2 * LAYERS; p++)
        for (size_t t = 0; t < QUALITY_BLOCK_TOKENS; t++) {
            const uint32_t cell = (uint32_t)(b * QUALITY_BLOCK_TOKENS + t);
            if (memcmp(row_at(cache, cache->was, p, cell), row_at(cache, cache->now, p, cell),
                       cache->rows[p].bytes) != 0)
                return 0;
        }
    return 1;
}

static void test_blocks_that_change(void **state)
{
    (void)state;
    const int dtypes[] = {KVT_DTYPE_F16, KVT_DTYPE_BF16, KVT_DTYPE_F32};
    struct cache cache;

    for (int d = 0; d < 3; d++) {
        open_cache(&cache, dtypes[d]);
        code_cache(&cache, KVT_LEVEL_KV4, 0, BLOCKS, 0);
        assert_true(same_block(&cache, 0)); /* the first stays exact */
        for (size_t b = 1; b < BLOCKS; b++)
            assert_false(same_block(&cache, b));
        assert_int_equal(cache.level.blocks, BLOCKS - 1);
        code_cache(&cache, KVT_LEVEL_KV4, 2, 4, 0);
        for (size_t b = 0; b < BLOCKS; b++)
            assert_int_equal(same_block(&cache, b), b != 2 && b != 3);
        code_cache(&cache, KVT_LEVEL_RAW, 0, BLOCKS, 0);
        assert_memory_equal(cache.was, cache.now, cache.bytes);
        uint32_t layer, head;
        assert_true(isinf(quality_worst(&cache.llama, &cache.level, &layer, &head)));
        close_cache(&cache);
    }
}

/* What the tool codes is what the codec gives for a lone block. */
static void test_same_as_the_codec(void **state)
{
    (void)state;
    struct cache cache;
    struct rows rows;
    uint32_t layer, head;

    open_cache(&cache, KVT_DTYPE_F16);
    code_cache(&cache, KVT_LEVEL_KV5, 0, BLOCKS, 0);
    const double all = quality_worst(&cache.llama, &cache.level, &layer, &head);
    uint8_t *again = malloc(cache.bytes);
    assert_non_null(again);
    memcpy(again, cache.was, cache.bytes);
    assert_int_equal(open_rows(&cache.llama, again, CELLS, &rows), 0);
    const size_t bytes = kvt_payload_bytes(&rows.layout, 0, KVT_LEVEL_KV5);
    uint8_t *payload = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    assert_non_null(payload);
    for (uint32_t b = 1; b < BLOCKS; b++) {
        assert_int_equal(kvt_encode_block(&rows.layout, 0, KVT_LEVEL_KV5, &rows.desc, b, payload,
                                          bytes, 0, NULL),
                         0);
        assert_int_equal(
            kvt_decode_block(&rows.layout, 0, KVT_LEVEL_KV5, payload, bytes, &rows.desc, b), 0);
    }
    assert_memory_equal(again, cache.now, cache.bytes);
    assert_true(all > 15 && all < 40);
    free(rows.places);
    free(payload);
    free(again);
    close_cache(&cache);
}

static void test_window_is_kv8(void **state)
{
    (void)state;
    struct cache cache;

    open_cache(&cache, KVT_DTYPE_F16);
    code_cache(&cache, KVT_LEVEL_KV8, 0, BLOCKS, 0);
    uint8_t *kv8 = malloc(cache.bytes);
    assert_non_null(kv8);
    memcpy(kv8, cache.now, cache.bytes);
    code_cache(&cache, KVT_LEVEL_INT4, 0, BLOCKS, CELLS);
    assert_memory_equal(cache.now, kv8, cache.bytes);
    code_cache(&cache, KVT_LEVEL_INT4, 0, BLOCKS, 17); /* reaches into the last two blocks */
    const size_t last_two = (BLOCKS - 2) * QUALITY_BLOCK_TOKENS;
    for (uint32_t p = 0; p < 2 * LAYERS; p++) {
        const size_t tail = (CELLS - last_two) * cache.rows[p].bytes;
        const size_t at = (size_t)(row_at(&cache, cache.now, p, last_two) - cache.now);
        assert_memory_equal(cache.now + at, kv8 + at, tail);
        const size_t before = at - cache.rows[p].bytes;
        assert_memory_not_equal(cache.now + before, kv8 + before, cache.rows[p].bytes);
    }
    free(kv8);
    close_cache(&cache);
}

/* A channel of one head that jumps within every tile drowns the others: that head is the worst. */
static void test_worst_head_is_found(void **state)
{
    (void)state;
    struct cache cache;
    uint32_t layer, head;

    open_cache(&cache, KVT_DTYPE_F16);
    code_cache(&cache, KVT_LEVEL_INT4, 0, BLOCKS, 0);
    const double before = quality_worst(&cache.llama, &cache.level, &layer, &head);
    for (uint32_t c = 0; c < CELLS; c++) { /* K of layer 2, head 1: offset 30 in channel 5 */
        const uint16_t offset = kvt_float_to_f16(30.0f + (float)(c % 3));
        memcpy(row_at(&cache, cache.was, 2, c) + (DIM + 5) * 2, &offset, 2);
    }
    code_cache(&cache, KVT_LEVEL_INT4, 0, BLOCKS, 0);
    const double after = quality_worst(&cache.llama, &cache.level, &layer, &head);
    assert_int_equal(layer, 2);
    assert_int_equal(head, 1);
    assert_true(after < before - 6);
    close_cache(&cache);
    /* values are not keys: the same in V changes nothing */
    open_cache(&cache, KVT_DTYPE_F16);
    for (uint32_t c = 0; c < CELLS; c++) {
        const uint16_t offset = kvt_float_to_f16(30.0f);
        memcpy(row_at(&cache, cache.was, LAYERS + 2, c) + 10, &offset, 2);
    }
    code_cache(&cache, KVT_LEVEL_INT4, 0, BLOCKS, 0);
    assert_true(fabs(quality_worst(&cache.llama, &cache.level, &layer, &head) - before) < 1e-9);
    close_cache(&cache);
}

/* Values that no level codes stay as they are, counted; blocks below the guard are counted too. */
static void test_refused_and_guarded(void **state)
{
    (void)state;
    struct cache cache;
    const uint16_t infinite = 0x7c00;

    open_cache(&cache, KVT_DTYPE_F16);
    memcpy(row_at(&cache, cache.was, 0, 2 * QUALITY_BLOCK_TOKENS), &infinite, 2);
    code_cache(&cache, KVT_LEVEL_KV4, 0, BLOCKS, 0);
    assert_true(same_block(&cache, 2));
    assert_int_equal(cache.level.blocks_raw, 1);
    assert_int_equal(cache.level.blocks, BLOCKS - 2);
    close_cache(&cache);

    open_cache(&cache, KVT_DTYPE_F16);
    for (uint32_t t = 0; t < QUALITY_BLOCK_TOKENS; t++) { /* more offsets than are kept */
        uint8_t *row = row_at(&cache, cache.was, 1, 3 * QUALITY_BLOCK_TOKENS + t);
        for (uint32_t e = 0; e < DIM; e++) {
            const uint16_t value =
                kvt_float_to_f16((e % 2 ? 30.0f : -30.0f) + 0.1f * (float)(t * e % 5));
            memcpy(row + (size_t)e * 2, &value, 2);
        }
    }
    code_cache(&cache, KVT_LEVEL_KV4, 0, BLOCKS, 0);
    assert_int_equal(cache.level.blocks, BLOCKS - 1);
    assert_true(cache.level.blocks_below >= 1);
    assert_false(same_block(&cache, 3)); /* coded all the same */
    close_cache(&cache);
}

static void test_bits(void **state)
{
    (void)state;
    struct cache cache;

    open_cache(&cache, KVT_DTYPE_F16);
    assert_true(quality_bits(&cache.llama, KVT_LEVEL_RAW) == 16);
    assert_true(fabs(quality_bits(&cache.llama, KVT_LEVEL_INT4) - 4.25) < 1e-9);
    assert_true(fabs(quality_bits(&cache.llama, KVT_LEVEL_KV4) - 4.375) < 1e-9);
    assert_true(fabs(quality_bits(&cache.llama, KVT_LEVEL_KV8) - 8.375) < 1e-9);
    close_cache(&cache);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kl_by_hand),
        cmocka_unit_test(test_large_logits),
        cmocka_unit_test(test_mean_and_quantile),
        cmocka_unit_test(test_blocks_that_change),
        cmocka_unit_test(test_same_as_the_codec),
        cmocka_unit_test(test_window_is_kv8),
        cmocka_unit_test(test_worst_head_is_found),
        cmocka_unit_test(test_refused_and_guarded),
        cmocka_unit_test(test_bits),
    };
    printf("seed %d\n", SEED);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
