/* AVX2 encoder, the Lloyd-Max coder (kv4, kv5): scale search and codes of eight rows.
 *
 * A run is 32 elements: one row's, or one group of 16 of two rows when d = 16. Its four vectors of
 * y become 32 bytes by two packs, which leaves them in the order lane, vector, element; products go
 * back to float from there by byte shuffles, so the order never matters until the codes are stored.
 * num = tree(c*y) is summed in the scalar order, scaled by 2^24 (levels sit in the top byte of a
 * 32-bit lane), which changes no rounding: nothing here is near overflow, and scaling up cannot
 * underflow.
 */
#include <string.h>

#include "codec/avx2_encode.h"
#include "codec/tables.h"
#include "kvtier/error.h"

#define INLINE KVT_AVX2_INLINE
#define ROWS KVT_AVX2_ROWS

struct trial { /* one factor of the search, eight rows */
    uint8_t index[ROWS * KVT_PIECE_DIM_MAX] __attribute__((aligned(32))); /* packed order */
    uint8_t sign[ROWS * KVT_PIECE_DIM_MAX] __attribute__((aligned(32)));  /* bit 7 */
    __m256 num[ROWS];                                                     /* before the lane sum */
    __m256i den[ROWS];
};

INLINE __m256i repeat_lane(const uint8_t *table)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)table));
}

/* C4: each interval of 32 of |t| has one threshold, the last one none: 255 stands there, and index
 * 8, which |t| = 255 then gets, is 7 again. */
static const uint8_t c4_threshold[16] = {24, 49, 75, 102, 133, 171, 223, 255};
static const uint8_t c4_level[16] = {6, 18, 31, 44, 58, 75, 96, 127, 127};
/* C5: each interval of 8 has at most one threshold (255: none), and the index below it. The last
 * one's is its own beginning, so that 255 is never compared with itself. */
static const uint8_t c5_threshold[2][16] = {
    {255, 11, 21, 31, 255, 42, 53, 255, 64, 76, 255, 88, 101, 255, 115, 255},
    {131, 255, 149, 255, 255, 169, 255, 255, 195, 255, 255, 255, 255, 232, 255, 248}};
static const uint8_t c5_below[2][16] = {
    {0, 0, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8, 9, 9, 10},
    {10, 11, 11, 12, 12, 12, 13, 13, 13, 14, 14, 14, 14, 14, 15, 14}};

/* Number of thresholds <= u, for 32 bytes u = min(|t|, 255). */
INLINE __m256i index_of(int bits, __m256i u)
{
    if (bits == 4) {
        __m256i interval = _mm256_and_si256(_mm256_srli_epi16(u, 5), _mm256_set1_epi8(7));
        __m256i threshold = _mm256_shuffle_epi8(repeat_lane(c4_threshold), interval);
        __m256i reached = _mm256_cmpeq_epi8(_mm256_max_epu8(u, threshold), u);
        return _mm256_sub_epi8(interval, reached);
    }
    __m256i interval = _mm256_and_si256(_mm256_srli_epi16(u, 3), _mm256_set1_epi8(15));
    __m256i threshold =
        _mm256_blendv_epi8(_mm256_shuffle_epi8(repeat_lane(c5_threshold[0]), interval),
                           _mm256_shuffle_epi8(repeat_lane(c5_threshold[1]), interval), u);
    __m256i below = _mm256_blendv_epi8(_mm256_shuffle_epi8(repeat_lane(c5_below[0]), interval),
                                       _mm256_shuffle_epi8(repeat_lane(c5_below[1]), interval), u);
    return _mm256_sub_epi8(below, _mm256_cmpeq_epi8(_mm256_max_epu8(u, threshold), u));
}

/* Byte 4k+j of a lane to the top of 32-bit word j: the levels of vector k, times 2^24. */
#define SPREAD(k)                                                                               \
    _mm256_broadcastsi128_si256(_mm_setr_epi8(-1, -1, -1, 4 * (k), -1, -1, -1, 4 * (k) + 1, -1, \
                                              -1, -1, 4 * (k) + 2, -1, -1, -1, 4 * (k) + 3))

INLINE __m256 product(__m256i levels, __m256i spread, const float *y)
{
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_shuffle_epi8(levels, spread)),
                         _mm256_load_ps(y));
}

INLINE __m256i rounded(const float *y, __m256 factor)
{
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(y), factor));
}

/* One run: codes, products (four vectors) and squares of levels added to den. |t| < 2^15: the
 * largest |y| is at most sqrt(d) sigma but for the rounding of tiny squares. */
INLINE void try_run(int bits, const float *y, __m256 factor_a, __m256 factor_b, uint8_t *index,
                    uint8_t *sign, __m256 *products, __m256i *den)
{
    __m256i t01 = _mm256_packs_epi32(rounded(y, factor_a), rounded(y + 8, factor_a));
    __m256i t23 = _mm256_packs_epi32(rounded(y + 16, factor_b), rounded(y + 24, factor_b));
    __m256i u = _mm256_packus_epi16(_mm256_abs_epi16(t01), _mm256_abs_epi16(t23));
    __m256i s = _mm256_packs_epi16(t01, t23);
    __m256i i = index_of(bits, u);
    __m256i level = _mm256_shuffle_epi8(repeat_lane(bits == 4 ? c4_level : kvt_c5_levels), i);
    _mm256_store_si256((__m256i *)(void *)index, i);
    _mm256_store_si256((__m256i *)(void *)sign, s);
    __m256i squares = _mm256_madd_epi16(_mm256_maddubs_epi16(level, level), _mm256_set1_epi16(1));
    *den = _mm256_add_epi32(*den, squares);
    level = _mm256_sign_epi8(level, _mm256_or_si256(s, _mm256_set1_epi8(1)));
    products[0] = product(level, SPREAD(0), y);
    products[1] = product(level, SPREAD(1), y + 8);
    products[2] = product(level, SPREAD(2), y + 16);
    products[3] = product(level, SPREAD(3), y + 24);
}

INLINE void add_run(__m256 *to, const __m256 *from)
{
    KVT_AVX2_UNROLL
    for (int i = 0; i < 4; i++)
        to[i] = _mm256_add_ps(to[i], from[i]);
}

/* A row of 32 or more; runs in the order of the tree. */
INLINE void try_row(int d, int bits, const float *y, float factor, struct trial *trial, int row)
{
    __m256 f = _mm256_set1_ps(factor), p[4], q[4], r[4];
    __m256i den = _mm256_setzero_si256();
    uint8_t *index = trial->index + d * row, *sign = trial->sign + d * row;
    try_run(bits, y, f, f, index, sign, p, &den);
    if (d == 128) {
        try_run(bits, y + 64, f, f, index + 64, sign + 64, q, &den);
        add_run(p, q);
        try_run(bits, y + 32, f, f, index + 32, sign + 32, q, &den);
        try_run(bits, y + 96, f, f, index + 96, sign + 96, r, &den);
        add_run(q, r);
        add_run(p, q);
    } else if (d == 64) {
        try_run(bits, y + 32, f, f, index + 32, sign + 32, q, &den);
        add_run(p, q);
    }
    trial->num[row] = _mm256_add_ps(_mm256_add_ps(p[0], p[2]), _mm256_add_ps(p[1], p[3]));
    trial->den[row] = den;
}

/* Two rows of 16. */
INLINE void try_two_rows(int bits, const float *y, const float *factors, struct trial *trial,
                         int row)
{
    const __m256i first = _mm256_broadcastsi128_si256(_mm_setr_epi32(-1, -1, 0, 0));
    __m256 p[4];
    __m256i den = _mm256_setzero_si256();
    try_run(bits, y, _mm256_set1_ps(factors[0]), _mm256_set1_ps(factors[1]),
            trial->index + 16 * row, trial->sign + 16 * row, p, &den);
    trial->num[row] = _mm256_add_ps(p[0], p[1]);
    trial->num[row + 1] = _mm256_add_ps(p[2], p[3]);
    trial->den[row] = _mm256_and_si256(den, first);
    trial->den[row + 1] = _mm256_andnot_si256(first, den);
}

struct choice {                    /* of eight rows */
    __m256 score, num, den, which; /* which: trial number as int bits */
};

/* Keep the trial where its score is larger. */
INLINE void compare_trial(struct choice *best, const struct trial *trial, int which)
{
    __m256 den[ROWS];
    KVT_AVX2_UNROLL
    for (int i = 0; i < ROWS; i++)
        den[i] = _mm256_cvtepi32_ps(trial->den[i]);
    __m256 energy = kvt_avx2_sum8(den); /* integers below 2^24: exact */
    __m256 num = _mm256_mul_ps(kvt_avx2_sum8(trial->num), _mm256_set1_ps(0x1p-24f));
    __m256 score = _mm256_div_ps(_mm256_mul_ps(num, num), energy);
    __m256 better = _mm256_cmp_ps(score, best->score, _CMP_GT_OQ);
    __m256 number = _mm256_castsi256_ps(_mm256_set1_epi32(which));
    best->score = _mm256_blendv_ps(best->score, score, better);
    best->num = _mm256_blendv_ps(best->num, num, better);
    best->den = _mm256_blendv_ps(best->den, energy, better);
    best->which = _mm256_blendv_ps(best->which, number, better);
}

/* The codes of the chosen trials, in the order of memory. live: 0 or -1 for each row. */
INLINE void gather_codes(int d, int bits, const struct trial *trials, const int32_t *which,
                         const int32_t *live, uint8_t *codes)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int at = 0; at < ROWS * d; at += 32) {
        int row = at / d;
        const struct trial *trial = &trials[which[row]];
        __m256i index = _mm256_load_si256((const __m256i *)(const void *)(trial->index + at));
        __m256i sign = _mm256_load_si256((const __m256i *)(const void *)(trial->sign + at));
        __m256i mask = _mm256_set1_epi32(live[row]);
        if (d == 16) {
            trial = &trials[which[row + 1]];
            index = _mm256_blend_epi32(
                index, _mm256_load_si256((const __m256i *)(const void *)(trial->index + at)), 0xcc);
            sign = _mm256_blend_epi32(
                sign, _mm256_load_si256((const __m256i *)(const void *)(trial->sign + at)), 0xcc);
            mask = _mm256_blend_epi32(mask, _mm256_set1_epi32(live[row + 1]), 0xcc);
        }
        if (bits == 4)
            index = _mm256_min_epu8(index, _mm256_set1_epi8(7));
        sign = _mm256_and_si256(sign, _mm256_set1_epi8((char)0x80));
        sign = _mm256_srli_epi16(sign, bits == 4 ? 4 : 3);
        index = _mm256_and_si256(_mm256_or_si256(index, sign), mask);
        _mm256_store_si256((__m256i *)(void *)(codes + at),
                           _mm256_permutevar8x32_epi32(index, order));
    }
}

INLINE int code_rows(int d, int bits, struct kvt_avx2_batch *batch)
{
    static const float search[KVT_SEARCH_COUNT] = {KVT_SEARCH_0, KVT_SEARCH_1, KVT_SEARCH_2};
    const __m256 zero = _mm256_setzero_ps(), inverse_d = _mm256_set1_ps(1.0f / (float)d);
    const __m256 twice_unit = _mm256_set1_ps(bits == 4 ? KVT_C4_TWICE_UNIT : KVT_C5_TWICE_UNIT);
    const __m256i exponent = _mm256_set1_epi32(0x7f800000);
    struct trial trials[KVT_SEARCH_COUNT];
    struct choice best = {_mm256_set1_ps(-1.0f), zero, _mm256_set1_ps(1.0f), zero};
    __m256 square_sums = _mm256_load_ps(batch->square_sums);
    __m256i bits_of_sums = _mm256_and_si256(_mm256_castps_si256(square_sums), exponent);
    if (_mm256_movemask_epi8(_mm256_cmpeq_epi32(bits_of_sums, exponent)) != 0)
        return KVT_E_NONFINITE;
    __m256 sigma = _mm256_sqrt_ps(_mm256_mul_ps(square_sums, inverse_d));
    __m256 alive = _mm256_cmp_ps(sigma, zero, _CMP_NEQ_OQ);
    for (int k = 0; k < KVT_SEARCH_COUNT; k++) {
        float factors[ROWS] __attribute__((aligned(32)));
        __m256 factor = _mm256_div_ps(twice_unit, _mm256_mul_ps(_mm256_set1_ps(search[k]), sigma));
        _mm256_store_ps(factors, _mm256_and_ps(factor, alive));
        if (d == 16)
            for (int row = 0; row < ROWS; row += 2)
                try_two_rows(bits, batch->y + 16 * row, factors + row, &trials[k], row);
        else
            for (int row = 0; row < ROWS; row++)
                try_row(d, bits, batch->y + d * row, factors[row], &trials[k], row);
        compare_trial(&best, &trials[k], k);
    }
    __m256 num = _mm256_and_ps(best.num, alive);
    __m256i scale = kvt_avx2_round_bf16(_mm256_div_ps(num, best.den));
    __m256 a = _mm256_castsi256_ps(scale), cross = _mm256_mul_ps(a, num);
    __m256 coded = _mm256_mul_ps(_mm256_mul_ps(a, a), best.den);
    __m256 noise = _mm256_add_ps(_mm256_sub_ps(square_sums, cross), _mm256_sub_ps(coded, cross));
    _mm256_store_ps(batch->noise, _mm256_mul_ps(_mm256_max_ps(noise, zero), inverse_d));
    kvt_avx2_store_bf16(batch->scales, scale);
    int32_t which[ROWS] __attribute__((aligned(32))), live[ROWS] __attribute__((aligned(32)));
    _mm256_store_si256((__m256i *)(void *)which, _mm256_castps_si256(best.which));
    _mm256_store_si256((__m256i *)(void *)live,
                       _mm256_castps_si256(_mm256_cmp_ps(a, zero, _CMP_NEQ_OQ)));
    gather_codes(d, bits, trials, which, live, batch->codes);
    return 0;
}

#define CODE_DIMS(name, bits)                            \
    static int name(int d, struct kvt_avx2_batch *batch) \
    {                                                    \
        switch (d) {                                     \
        case 128:                                        \
            return code_rows(128, bits, batch);          \
        case 64:                                         \
            return code_rows(64, bits, batch);           \
        case 32:                                         \
            return code_rows(32, bits, batch);           \
        default:                                         \
            return code_rows(16, bits, batch);           \
        }                                                \
    }

CODE_DIMS(code_c4, 4)
CODE_DIMS(code_c5, 5)

int kvt_avx2_code_gauss(const struct kvt_piece *piece, struct kvt_avx2_batch *batch)
{
    if (piece->bits == 4)
        return code_c4((int)piece->dim, batch);
    return code_c5((int)piece->dim, batch);
}
