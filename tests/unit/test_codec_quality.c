/* Goal:   the errors that docs/codec.md promises, the guard, and what happens to data at the edges:
 *         cases C67, C69, C70, C73 and the promise of one coarse step.
 * Method: seeded data, errors in float64 against bounds computed here from the payload's own scales
 *         and means. Every set of instructions gives the same bits (test_codec_isa), so one is
 * enough.
 */
#include <float.h>
#include <stdio.h>

#include "codec/guard.h"
#include "unit/codec_support.h"

#define TOKENS KVT_TILE_TOKENS

static uint64_t seed;

/* Squared row error over |r|^2 of the Lloyd-Max coders, at most: docs/codec.md, "Errors". */
static double gauss_bound(uint32_t bits, uint32_t d)
{
    static const double c4[] = {0.10, 0.22, 0.36, 0.50}, c5[] = {0.035, 0.12, 0.24, 0.38};
    uint32_t i = d == 16 ? 0 : d == 32 ? 1 : d == 64 ? 2 : 3;
    return bits == 4 ? c4[i] : c5[i];
}

/* Half a unit in the last place of a decoded element, and of the float before it, at most. */
static double rounding_of(int dtype, double x)
{
    double relative = dtype == KVT_DTYPE_BF16 ? 0x1p-8 : dtype == KVT_DTYPE_F16 ? 0x1p-11 : 0x1p-23;
    double least = dtype == KVT_DTYPE_BF16 ? 0x1p-133 : dtype == KVT_DTYPE_F16 ? 0x1p-25 : 0x1p-149;
    return fabs(x) * relative + least;
}

static double payload_half(const uint8_t *at)
{
    return kvt_bf16_to_float((uint16_t)(at[0] | at[1] << 8));
}

struct tile {
    struct kvt_piece piece;
    double x[TOKENS][KVT_PIECE_DIM_MAX], got[TOKENS][KVT_PIECE_DIM_MAX];
    double means[KVT_PIECE_DIM_MAX];
    uint8_t payload[TOKENS * KVT_PIECE_DIM_MAX + 64];
    char rows[TOKENS * KVT_PIECE_DIM_MAX * 4];
};

static int tile_run(struct tile *tile, int level, int dtype, int key, uint32_t d)
{
    size_t stride = d * kvt_dtype_bytes(dtype);
    float row[KVT_PIECE_DIM_MAX];
    kvt_piece_init(&tile->piece, level, dtype, key, d);
    for (uint32_t t = 0; t < TOKENS; t++) {
        kvt_half_to_floats(dtype, tile->rows + t * stride, d, row);
        for (uint32_t i = 0; i < d; i++)
            tile->x[t][i] = row[i];
    }
    int status = kvt_codec_kernels()->encode(&tile->piece, tile->rows, stride, tile->payload, NULL);
    if (status != 0)
        return status;
    kvt_codec_kernels()->decode(&tile->piece, tile->payload, tile->rows, stride);
    for (uint32_t t = 0; t < TOKENS; t++) {
        kvt_half_to_floats(dtype, tile->rows + t * stride, d, row);
        for (uint32_t i = 0; i < d; i++)
            tile->got[t][i] = row[i];
    }
    memset(tile->means, 0, sizeof(tile->means));
    const uint8_t *offsets = tile->payload + tile->piece.offsets_at;
    for (uint32_t k = 0; k < tile->piece.offsets; k++)
        tile->means[offsets[16 + k]] = payload_half(offsets + 2 * k);
    return 0;
}

static void check_int4_row(const struct tile *tile, uint32_t t)
{
    double scale = payload_half(tile->payload + tile->piece.scales_at + 2 * t);
    for (uint32_t i = 0; i < tile->piece.dim; i++) {
        double x = tile->x[t][i], error = fabs(tile->got[t][i] - x);
        double least = tile->piece.dtype == KVT_DTYPE_F16 ? 0x1p-25 : 0x1p-134;
        assert_true(isfinite(tile->got[t][i]));
        assert_true(error <= 0.51 * scale + fabs(x) / 256 + least);
    }
}

static void check_kv_row(const struct tile *tile, uint32_t t)
{
    const struct kvt_piece *piece = &tile->piece;
    double scale = payload_half(tile->payload + piece->scales_at + 2 * t);
    double energy = 0, error = 0, rounding = 0;
    for (uint32_t i = 0; i < piece->dim; i++) {
        double r = tile->x[t][i] - tile->means[i], e = tile->got[t][i] - tile->x[t][i];
        double round = rounding_of(piece->dtype, tile->got[t][i]);
        assert_true(isfinite(tile->got[t][i]));
        energy += r * r;
        error += e * e;
        rounding += round * round;
    }
    double coding = piece->coder == KVT_CODER_GAUSS
                        ? sqrt(gauss_bound(piece->bits, piece->dim) * energy) + 0x1p-60
                        : 0.5 * scale + 0x1p-20 * sqrt(energy) + 0x1p-140;
    assert_true(sqrt(error) <= coding + sqrt(rounding));
}

/* A row of a hostile range: any exponent that the dtype has, some elements far above the others. */
static void hostile_row(struct kvt_rng *rng, int dtype, uint32_t d, char *row)
{
    int range = dtype == KVT_DTYPE_F16 ? 38 : 250, base = dtype == KVT_DTYPE_F16 ? -24 : -149;
    double scale = exp2(base + codec_uniform(rng) * range);
    double spike = exp2(codec_uniform(rng) * 12), limit = dtype == KVT_DTYPE_F16 ? 65504 : 0x1p100;
    for (uint32_t i = 0; i < d; i++) {
        double x = scale * codec_normal(rng);
        if (kvt_rng_below(rng, 40) == 0)
            x *= spike;
        x = x > limit ? limit : x < -limit ? -limit : x;
        codec_store(dtype, row + i * kvt_dtype_bytes(dtype), (float)x);
    }
}

/* 10^5 rows a level; kv levels refuse rows whose squares overflow, nothing else. */
static void test_c70_errors_within_the_bound(void **state)
{
    (void)state;
    static struct tile tile;
    struct kvt_rng rng = {seed};
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_KV8; level++) {
        uint32_t rows = 0, refused = 0;
        while (rows < 100000) {
            int dtype = KVT_DTYPE_BF16 + (int)kvt_rng_below(&rng, 3);
            uint32_t d = 16u << kvt_rng_below(&rng, 4);
            for (uint32_t t = 0; t < TOKENS; t++)
                hostile_row(&rng, dtype, d, tile.rows + (size_t)t * d * kvt_dtype_bytes(dtype));
            rows += TOKENS;
            if (tile_run(&tile, level, dtype, (int)kvt_rng_below(&rng, 2), d) != 0) {
                assert_int_not_equal(level, KVT_LEVEL_INT4);
                refused += TOKENS;
                continue;
            }
            for (uint32_t t = 0; t < TOKENS; t++)
                if (level == KVT_LEVEL_INT4)
                    check_int4_row(&tile, t);
                else
                    check_kv_row(&tile, t);
        }
        assert_true(refused < rows); /* 16 rows of any exponent often hold one too large */
    }
}

/* The worst rows for the Lloyd-Max coders: one large value and the rest just below a threshold, in
 * the transformed domain. They come near the bound, and stay below it. */
static void test_c70_worst_rows(void **state)
{
    (void)state;
    static struct tile tile;
    double worst = 0;
    for (int level = KVT_LEVEL_KV4; level <= KVT_LEVEL_KV5; level++)
        for (uint32_t d = 16; d <= 128; d *= 2)
            for (uint32_t n = 0; n < 400; n++) {
                double spike = 8 + 0.5 * (n % 20) * sqrt(d / 16.0), rest = 0.1 + 0.02 * (n / 20);
                for (uint32_t t = 0; t < TOKENS; t++)
                    for (uint32_t i = 0; i < d; i++) {
                        /* x = s * H y / d for y = (spike, rest, rest, ...) */
                        double h = (spike - rest) / d + (i == 0 ? rest : 0.0);
                        int negative = (i < 64 ? 0x4449d0423ee576b2u >> (63 - i)
                                               : 0x568f0c4daf5e0c9fu >> (127 - i)) &
                                       1;
                        codec_store(KVT_DTYPE_F32, tile.rows + 4 * ((size_t)t * d + i),
                                    (float)(negative ? -h : h));
                    }
                assert_int_equal(tile_run(&tile, level, KVT_DTYPE_F32, level == KVT_LEVEL_KV5, d),
                                 0);
                if (level == KVT_LEVEL_KV4) {
                    double energy = 0, error = 0;
                    for (uint32_t i = 0; i < d; i++) {
                        energy += tile.x[0][i] * tile.x[0][i];
                        error += pow(tile.got[0][i] - tile.x[0][i], 2);
                    }
                    worst = fmax(worst, error / energy);
                }
                for (uint32_t t = 0; t < TOKENS; t++)
                    check_kv_row(&tile, t);
            }
    print_message("largest relative row error %.3f\n", worst);
    assert_true(worst > 0.2); /* else the rows are not that bad */
}

/* ---- C67 ---- */

static double relative_error(const struct codec_pool *pool, uint32_t skip)
{
    double error = 0, energy = 0;
    struct kvt_rng rng = {seed};
    CODEC_EACH(pool, p, b, h, t, e)
    {
        float x = kvt_f16_to_float(kvt_float_to_f16((float)codec_normal(&rng)));
        if (p == 0 && e != skip) {
            error += pow((double)codec_get(pool, p, b, h, t, e) - x, 2);
            energy += (double)x * x;
        }
    }
    return sqrt(error / energy);
}

/* K channel 7 +600 in every token: the other 127 keep their values. int4 is the failure itself. */
static void test_c67_one_channel_far_off(void **state)
{
    (void)state;
    struct codec_pool pool;
    double errors[KVT_LEVEL_RAW + 1];
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_RAW; level++) {
        size_t n;
        codec_pool_make(&pool, KVT_DTYPE_F16, 128, 1, 256, 1, 0);
        codec_pool_fill_normal(&pool, seed, 1.0);
        for (uint32_t t = 0; t < 256; t++)
            codec_set(&pool, 0, 0, 0, t, 7, codec_get(&pool, 0, 0, 0, t, 7) + 600.0f);
        uint8_t *payload = codec_encode(&pool, level, 0, &n);
        assert_int_equal(kvt_decode_block(&pool.layout, 0, level, payload, n, &pool.desc, 0), 0);
        errors[level] = relative_error(&pool, 7);
        free(payload);
        codec_pool_free(&pool);
    }
    print_message("relative errors: int4 %.3f kv4 %.4f kv5 %.4f kv6 %.4f kv8 %.5f\n",
                  errors[KVT_LEVEL_INT4], errors[KVT_LEVEL_KV4], errors[KVT_LEVEL_KV5],
                  errors[KVT_LEVEL_KV6], errors[KVT_LEVEL_KV8]);
    assert_true(errors[KVT_LEVEL_KV4] <= 0.12);
    assert_true(errors[KVT_LEVEL_KV5] <= 0.06);
    assert_true(errors[KVT_LEVEL_KV6] <= 0.03);
    assert_true(errors[KVT_LEVEL_KV8] <= 0.008);
    assert_true(errors[KVT_LEVEL_RAW] == 0);
    assert_true(errors[KVT_LEVEL_INT4] > 0.4);
}

/* ---- C69 ---- */

static int fill_and_code(struct codec_pool *pool, int level, const float *values, uint32_t count)
{
    uint32_t n = 0;
    CODEC_EACH(pool, p, b, h, t, e)
    {
        codec_set(pool, p, b, h, t, e, values[n++ % count]);
    }
    size_t bytes = kvt_payload_bytes(&pool->layout, 0, level);
    uint8_t *payload = malloc(bytes);
    int status = kvt_encode_block(&pool->layout, 0, level, &pool->desc, 0, payload, bytes, 0, NULL);
    if (status == 0)
        assert_int_equal(kvt_decode_block(&pool->layout, 0, level, payload, bytes, &pool->desc, 0),
                         0);
    free(payload);
    return status;
}

static void test_c69_edges(void **state)
{
    (void)state;
    static const float zero[] = {0.0f}, constant[] = {3.5f}, extreme[] = {65504.0f, -65504.0f};
    static const float subnormal[] = {0x1p-24f, -0x1p-23f, 0x1.8p-20f, 0.0f, 0x1p-24f};
    static const float bad[][3] = {{1.0f, NAN, 2.0f}, {1.0f, INFINITY, 2.0f}, {-INFINITY, 0, 0}};
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_RAW; level++)
        for (int dtype = KVT_DTYPE_BF16; dtype <= KVT_DTYPE_F32; dtype++) {
            struct codec_pool pool;
            codec_pool_make(&pool, dtype, 80, 1, 16, 1, 0);
            assert_int_equal(fill_and_code(&pool, level, zero, 1), 0);
            CODEC_EACH(&pool, p, b, h, t, e)
            {
                assert_true(codec_get(&pool, p, b, h, t, e) == 0.0f);
            }
            assert_int_equal(fill_and_code(&pool, level, constant, 1), 0);
            CODEC_EACH(&pool, p, b, h, t, e)
            {
                assert_true(fabsf(codec_get(&pool, p, b, h, t, e) - 3.5f) < 2.5f);
            }
            assert_int_equal(fill_and_code(&pool, level, extreme, 2), 0);
            CODEC_EACH(&pool, p, b, h, t, e)
            {
                assert_true(isfinite(codec_get(&pool, p, b, h, t, e)));
            }
            assert_int_equal(fill_and_code(&pool, level, subnormal, 5), 0);
            CODEC_EACH(&pool, p, b, h, t, e)
            {
                assert_true(fabsf(codec_get(&pool, p, b, h, t, e)) < 0x1p-18f);
            }
            for (size_t i = 0; i < KVT_ARRAY_LEN(bad); i++)
                assert_int_equal(fill_and_code(&pool, level, bad[i], 3),
                                 level == KVT_LEVEL_RAW ? 0 : KVT_E_NONFINITE);
            codec_pool_free(&pool);
        }
}

/* Too large to code, though finite: refused, not turned into infinity. Just below: coded. */
static void test_c69_magnitude_limits(void **state)
{
    (void)state;
    static const struct {
        int level;
        float refused, coded;
    } limits[] = {
        {KVT_LEVEL_INT4, 0x1p126f, 0x1.fep125f}, {KVT_LEVEL_KV4, 0x1p64f, 0x1p56f},
        {KVT_LEVEL_KV5, 0x1p64f, 0x1p56f},       {KVT_LEVEL_KV6, 0x1p126f, 0x1p118f},
        {KVT_LEVEL_KV8, 0x1p126f, 0x1p118f},
    };
    for (size_t i = 0; i < KVT_ARRAY_LEN(limits); i++)
        for (int dtype = KVT_DTYPE_BF16; dtype <= KVT_DTYPE_F32; dtype += 2) {
            struct codec_pool pool;
            float values[] = {limits[i].refused, -limits[i].refused, 1.0f};
            codec_pool_make(&pool, dtype, 128, 1, 16, 1, 0);
            assert_int_equal(fill_and_code(&pool, limits[i].level, values, 3), KVT_E_NONFINITE);
            values[0] = limits[i].coded;
            values[1] = -limits[i].coded;
            assert_int_equal(fill_and_code(&pool, limits[i].level, values, 3), 0);
            CODEC_EACH(&pool, p, b, h, t, e)
            {
                assert_true(isfinite(codec_get(&pool, p, b, h, t, e)));
            }
            codec_pool_free(&pool);
        }
}

/* ---- C73 and the one coarse step ---- */

/* Ten times: the page is overwritten and decoded again. Raw keeps every bit, NaN and all. */
static void test_c73_cycles_are_identical(void **state)
{
    (void)state;
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_RAW; level++) {
        struct codec_pool pool;
        size_t n;
        codec_pool_make(&pool, KVT_DTYPE_F16, 128, 2, 32, 1, 0);
        if (level == KVT_LEVEL_RAW)
            codec_pool_fill_random_bits(&pool, seed);
        else
            codec_pool_fill_normal(&pool, seed, 1.0);
        uint8_t *payload = codec_encode(&pool, level, 0, &n), *first = malloc(2 * pool.part_bytes);
        uint8_t *values = pool.memory + CODEC_RED;
        memcpy(first, values, 2 * pool.part_bytes);
        for (int cycle = 0; cycle < 10; cycle++) {
            if (cycle == 1 && level != KVT_LEVEL_RAW)
                memcpy(first, values, 2 * pool.part_bytes);
            memset(values, CODEC_RED_BYTE, 2 * pool.part_bytes);
            assert_int_equal(kvt_decode_block(&pool.layout, 0, level, payload, n, &pool.desc, 0),
                             0);
            if (cycle > 0 || level == KVT_LEVEL_RAW)
                CODEC_EACH(&pool, p, b, h, t, e)
                {
                    uint8_t *at = codec_element(&pool, p, b, h, t, e);
                    assert_memory_equal(at, first + (at - values), 2);
                }
        }
        free(payload);
        free(first);
        codec_pool_free(&pool);
    }
}

static double noise_after(const int *levels, int count)
{
    struct codec_pool pool;
    double error = 0, energy = 0;
    codec_pool_make(&pool, KVT_DTYPE_BF16, 128, 2, 64, 1, 0);
    codec_pool_fill_normal(&pool, seed, 1.0);
    for (int i = 0; i < count; i++) {
        size_t n;
        uint8_t *payload = codec_encode(&pool, levels[i], 0, &n);
        assert_int_equal(kvt_decode_block(&pool.layout, 0, levels[i], payload, n, &pool.desc, 0),
                         0);
        free(payload);
    }
    struct kvt_rng rng = {seed};
    CODEC_EACH(&pool, p, b, h, t, e)
    {
        double x = kvt_bf16_to_float(kvt_float_to_bf16((float)codec_normal(&rng)));
        error += pow(codec_get(&pool, p, b, h, t, e) - x, 2);
        energy += x * x;
    }
    codec_pool_free(&pool);
    return 10 * log10(energy / error);
}

static void test_one_coarse_step(void **state)
{
    (void)state;
    const int direct[] = {KVT_LEVEL_KV4}, cooled[] = {KVT_LEVEL_KV8, KVT_LEVEL_KV4};
    const int eight[] = {KVT_LEVEL_KV8};
    double kv4 = noise_after(direct, 1), both = noise_after(cooled, 2), kv8 = noise_after(eight, 1);
    print_message("kv4 %.2f dB, kv8 then kv4 %.2f dB, kv8 %.2f dB\n", kv4, both, kv8);
    assert_true(kv8 > kv4 + 20);
    assert_true(fabs(both - kv4) < 0.1);
}

/* ---- guard ---- */

static int guarded(struct codec_pool *pool, int level, struct kvt_encode_report *report)
{
    size_t n = kvt_payload_bytes(&pool->layout, 0, level);
    uint8_t *payload = malloc(n);
    int status = kvt_encode_block(&pool->layout, 0, level, &pool->desc, 0, payload, n, 1, report);
    free(payload);
    return status;
}

static void test_guard_passes_plain_keys(void **state)
{
    (void)state;
    struct kvt_encode_report report;
    static const double least[] = {0, 0, 18, 23, 28, 40}; /* dB by level */
    for (int level = KVT_LEVEL_KV4; level <= KVT_LEVEL_KV8; level++) {
        struct codec_pool pool;
        codec_pool_make(&pool, KVT_DTYPE_BF16, 128, 2, 32, 1, 0);
        codec_pool_fill_normal(&pool, seed, 1.0);
        assert_int_equal(guarded(&pool, level, &report), 0);
        assert_true(report.sqnr_db_min > least[level] && report.sqnr_db_min < least[level] + 8);
        assert_int_equal(report.part, 0);
        codec_pool_free(&pool);
    }
}

/* More channels off than means are stored: the guard names the tile, a level up may pass. */
static void test_guard_names_the_tile(void **state)
{
    (void)state;
    struct codec_pool pool;
    struct kvt_encode_report report;
    codec_pool_make(&pool, KVT_DTYPE_BF16, 128, 2, 48, 1, 0);
    codec_pool_fill_normal(&pool, seed, 1.0);
    for (uint32_t t = 16; t < 32; t++)
        for (uint32_t e = 0; e < 64; e++)
            codec_set(&pool, 0, 0, 1, t, e, codec_get(&pool, 0, 0, 1, t, e) + 4.0f);
    assert_int_equal(guarded(&pool, KVT_LEVEL_KV4, &report), KVT_E_GUARD);
    assert_int_equal(report.part, 0);
    assert_int_equal(report.head, 1);
    assert_int_equal(report.tile, 1);
    assert_true(report.sqnr_db_min < 15);
    assert_int_equal(guarded(&pool, KVT_LEVEL_KV6, &report), 0);
    for (uint32_t t = 16; t < 32; t++) /* the same in values is nobody's business */
        for (uint32_t e = 0; e < 64; e++) {
            codec_set(&pool, 0, 0, 1, t, e, codec_get(&pool, 0, 0, 1, t, e) - 4.0f);
            codec_set(&pool, 1, 0, 1, t, e, codec_get(&pool, 1, 0, 1, t, e) + 4.0f);
        }
    assert_int_equal(guarded(&pool, KVT_LEVEL_KV4, &report), 0);
    assert_int_equal(guarded(&pool, KVT_LEVEL_INT4, &report), 0); /* no guard there */
    assert_true(isinf(report.sqnr_db_min));
    codec_pool_free(&pool);
}

/* Two wild tokens have nearly all the energy, so the tile's ratio is fine; the others differ little
 * from each other, and the coding error of what they share drowns the difference. */
static void test_guard_sees_ruined_rows(void **state)
{
    (void)state;
    struct codec_pool pool;
    struct kvt_encode_report report;
    codec_pool_make(&pool, KVT_DTYPE_F32, 128, 1, 16, 1, 0);
    codec_pool_fill_normal(&pool, seed, 1.0);
    for (uint32_t t = 0; t < 16; t++)
        for (uint32_t e = 0; e < 128; e++) {
            float wild = codec_get(&pool, 0, 0, 0, 5, e) * (t == 5 ? 1.0f : -4000.0f);
            float tame = 0.02f * codec_get(&pool, 0, 0, 0, t, e) + (e % 2 ? 3.0f : -3.0f);
            codec_set(&pool, 0, 0, 0, t, e, t == 5 || t == 6 ? wild : tame);
        }
    for (uint32_t e = 0; e < 128; e++)
        codec_set(&pool, 0, 0, 0, 5, e, 4000.0f * codec_get(&pool, 0, 0, 0, 5, e));
    assert_int_equal(guarded(&pool, KVT_LEVEL_KV4, &report), KVT_E_GUARD);
    assert_true(report.sqnr_db_min > 15); /* the tile alone would have passed */
    codec_pool_free(&pool);
}

/* Large constants that bf16 holds exactly: no centred energy at all. An error passes only within
 * the input's own rounding, so kv8 fails and the block goes to raw. */
static void test_guard_rounding_excuse(void **state)
{
    (void)state;
    struct codec_pool pool;
    struct kvt_encode_report report;
    codec_pool_make(&pool, KVT_DTYPE_BF16, 64, 1, 16, 1, 0);
    CODEC_EACH(&pool, p, b, h, t, e)
    {
        codec_set(&pool, p, b, h, t, e, e < 8 ? 100.0f + (float)e : 0.0f);
    }
    assert_int_equal(guarded(&pool, KVT_LEVEL_KV4, &report), 0); /* all in the stored means */
    CODEC_EACH(&pool, p, b, h, t, e)
    {
        codec_set(&pool, p, b, h, t, e, 100.0f + (float)e);
    }
    assert_int_equal(guarded(&pool, KVT_LEVEL_KV8, &report), KVT_E_GUARD);
    /* tiny centred energy on top of a large one: an error far below bf16's step */
    struct kvt_tile_energy energy = {.residue = 0};
    float centred[TOKENS], squares[TOKENS];
    for (uint32_t t = 0; t < TOKENS; t++) {
        energy.rows[t] = centred[t] = 1e-6f;
        energy.noise[t] = 1e-6f;
        squares[t] = 1.0f; /* bf16 allows 3.8e-6 */
    }
    assert_false(kvt_guard_judge(KVT_LEVEL_KV4, &energy).pass);
    assert_true(kvt_guard_appeal(KVT_LEVEL_KV4, KVT_DTYPE_BF16, &energy, centred, squares));
    assert_false(kvt_guard_appeal(KVT_LEVEL_KV4, KVT_DTYPE_F16, &energy, centred, squares));
    energy.noise[3] = 1e-5f;
    assert_false(kvt_guard_appeal(KVT_LEVEL_KV4, KVT_DTYPE_BF16, &energy, centred, squares));
    energy.noise[3] = NAN;
    assert_false(kvt_guard_judge(KVT_LEVEL_KV4, &energy).pass);
    assert_false(kvt_guard_appeal(KVT_LEVEL_KV4, KVT_DTYPE_BF16, &energy, centred, squares));
    codec_pool_free(&pool);
}

/* The report's figure is what the definition gives in float64, over all pieces of the row. It is
 * measured on rounded t, hence 0.3 dB. */
static void test_guard_measures_every_piece(void **state)
{
    (void)state;
    static const uint32_t dims[] = {16, 64, 80, 192, 256};
    for (int level = KVT_LEVEL_KV4; level <= KVT_LEVEL_KV8; level++)
        for (size_t i = 0; i < KVT_ARRAY_LEN(dims); i++) {
            struct codec_pool pool;
            struct kvt_encode_report report;
            uint32_t d = dims[i];
            codec_pool_make(&pool, KVT_DTYPE_F32, d, 1, 16, 1, 0);
            codec_pool_fill_normal(&pool, seed, 1.0);
            for (uint32_t t = 0; t < 16; t++)
                for (uint32_t e = d / 2; e < d; e++)
                    codec_set(&pool, 0, 0, 0, t, e,
                              codec_get(&pool, 0, 0, 0, t, e) + 0.7f * (float)(e % 3));
            double x[16][256], signal = 0, noise = 0;
            for (uint32_t t = 0; t < 16; t++)
                for (uint32_t e = 0; e < d; e++)
                    x[t][e] = codec_get(&pool, 0, 0, 0, t, e);
            size_t n = kvt_payload_bytes(&pool.layout, 0, level);
            uint8_t *payload = malloc(n);
            assert_int_equal(
                kvt_encode_block(&pool.layout, 0, level, &pool.desc, 0, payload, n, 0, &report), 0);
            assert_int_equal(kvt_decode_block(&pool.layout, 0, level, payload, n, &pool.desc, 0),
                             0);
            for (uint32_t e = 0; e < d; e++) {
                double mean = 0;
                for (uint32_t t = 0; t < 16; t++)
                    mean += x[t][e] / 16;
                for (uint32_t t = 0; t < 16; t++) {
                    signal += pow(x[t][e] - mean, 2);
                    noise += pow(x[t][e] - codec_get(&pool, 0, 0, 0, t, e), 2);
                }
            }
            assert_true(fabs(10 * log10(signal / noise) - report.sqnr_db_min) < 0.3);
            free(payload);
            codec_pool_free(&pool);
        }
}

/* The quick judgement never passes what the full rule refuses. */
static void test_guard_bound_is_safe(void **state)
{
    (void)state;
    struct kvt_rng rng = {seed};
    uint32_t passed = 0, appealed = 0;
    for (uint32_t n = 0; n < 4000; n++) {
        static char rows[TOKENS * 64 * 4];
        uint8_t payload[2048];
        struct kvt_piece piece;
        struct kvt_tile_energy energy;
        float centred[TOKENS], squares[TOKENS] = {0};
        double offset = 3 * codec_uniform(&rng), wild = exp2(8 * codec_uniform(&rng));
        int level = KVT_LEVEL_KV4 + (int)kvt_rng_below(&rng, 4);
        kvt_piece_init(&piece, level, KVT_DTYPE_F32, 1, 64);
        for (uint32_t t = 0; t < TOKENS; t++)
            for (uint32_t i = 0; i < 64; i++)
                codec_store(
                    KVT_DTYPE_F32, rows + 4 * (64 * t + i),
                    (float)(codec_normal(&rng) * (t == 2 ? wild : 1) + (i % 2 ? offset : -offset)));
        assert_int_equal(kvt_codec_kernels()->encode(&piece, rows, 256, payload, &energy), 0);
        kvt_codec_kernels()->centred(&piece, rows, 256, centred);
        int quick = kvt_guard_judge(level, &energy).pass;
        int full = kvt_guard_appeal(level, KVT_DTYPE_F32, &energy, centred, squares);
        assert_true(full || !quick);
        passed += (uint32_t)quick;
        appealed += (uint32_t)(full && !quick);
    }
    assert_true(passed > 400); /* both sides are exercised */
    print_message("%u passed at once, %u on appeal\n", passed, appealed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_c67_one_channel_far_off),
        cmocka_unit_test(test_c69_edges),
        cmocka_unit_test(test_c69_magnitude_limits),
        cmocka_unit_test(test_c70_errors_within_the_bound),
        cmocka_unit_test(test_c70_worst_rows),
        cmocka_unit_test(test_c73_cycles_are_identical),
        cmocka_unit_test(test_one_coarse_step),
        cmocka_unit_test(test_guard_passes_plain_keys),
        cmocka_unit_test(test_guard_names_the_tile),
        cmocka_unit_test(test_guard_sees_ruined_rows),
        cmocka_unit_test(test_guard_rounding_excuse),
        cmocka_unit_test(test_guard_measures_every_piece),
        cmocka_unit_test(test_guard_bound_is_safe),
    };
    const char *fixed = getenv("KVT_TEST_SEED");
    seed = fixed != NULL ? strtoull(fixed, NULL, 0) : kvt_rng_seed_os();
    print_message("seed %#llx\n", (unsigned long long)seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
