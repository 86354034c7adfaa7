/* AVX2 encoder, the Lloyd-Max coder (kv4, kv5): scale search and codes of eight rows.
 *
 * A run is 32 elements: one row's, or one group of 16 of two rows when d = 16. Its four vectors of
 * y become t, 16-bit and then bytes, by packs that leave them in the order lane, vector, element;
 * the sums are of integers, so that order never matters until the codes are stored. The three step
 * widths share t; they differ in the thresholds only.
 */
#include <string.h>

#include "codec/avx2_encode.h"
#include "codec/tables.h"
#include "kvtier/error.h"

#define INLINE KVT_AVX2_INLINE
#define ROWS KVT_AVX2_ROWS
#define WIDTHS KVT_SEARCH_COUNT

struct trials { /* eight rows; bytes and words in packed order */
    uint8_t index[WIDTHS][ROWS * KVT_PIECE_DIM_MAX] __attribute__((aligned(32)));
    uint8_t sign[ROWS * KVT_PIECE_DIM_MAX] __attribute__((aligned(32)));       /* bit 7 */
    uint8_t byte[ROWS * KVT_PIECE_DIM_MAX] __attribute__((aligned(32)));       /* min(|t|, 255) */
    uint8_t interval[ROWS * KVT_PIECE_DIM_MAX] __attribute__((aligned(32)));   /* of the byte */
    uint16_t magnitude[ROWS * KVT_PIECE_DIM_MAX] __attribute__((aligned(32))); /* |t| */
    __m256i num[WIDTHS][ROWS], den[WIDTHS][ROWS], energy[ROWS];                /* lane sums */
};

INLINE __m256i load(const void *at)
{
    return _mm256_load_si256((const __m256i *)at);
}

INLINE void store(void *at, __m256i value)
{
    _mm256_store_si256((__m256i *)at, value);
}

INLINE __m256i repeat_lane(const uint8_t *table)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)table));
}

/* The thresholds of kvt_c4_thresholds by intervals of 16 of |t|: each interval has at most one
 * (255: none), and the number of thresholds below it. |t| = 255 must not meet a 255: the last
 * interval has its threshold or starts with one that makes up for a count one lower. */
static const uint8_t c4_threshold[WIDTHS][16] = {
    {255, 24, 255, 49, 75, 255, 102, 255, 133, 255, 171, 255, 255, 223, 255, 240},
    {255, 22, 45, 255, 68, 93, 255, 121, 255, 156, 255, 255, 203, 255, 255, 240},
    {255, 26, 255, 53, 255, 82, 111, 255, 255, 145, 255, 186, 255, 255, 255, 243}};
static const uint8_t c4_below[WIDTHS][16] = {{0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 6, 7, 6},
                                             {0, 0, 1, 2, 2, 3, 4, 4, 5, 5, 6, 6, 6, 7, 7, 6},
                                             {0, 0, 1, 1, 2, 2, 3, 4, 4, 4, 5, 5, 6, 6, 6, 6}};
static const uint8_t c4_level[16] = {6, 18, 31, 44, 58, 75, 96, 127};

/* Likewise kvt_c5_thresholds by intervals of 8. */
static const uint8_t c5_threshold[WIDTHS][2][16] = {
    {{255, 11, 21, 31, 255, 42, 53, 255, 64, 76, 255, 88, 101, 255, 115, 255},
     {131, 255, 149, 255, 255, 169, 255, 255, 195, 255, 255, 255, 255, 232, 255, 248}},
    {{255, 10, 19, 28, 38, 255, 48, 58, 69, 255, 80, 92, 255, 105, 119, 255},
     {255, 136, 255, 154, 255, 255, 177, 255, 255, 255, 211, 255, 255, 255, 255, 248}},
    {{255, 12, 23, 255, 34, 46, 255, 58, 70, 255, 83, 255, 96, 110, 255, 125},
     {255, 143, 255, 255, 162, 255, 255, 184, 255, 255, 213, 255, 255, 255, 255, 253}}};
static const uint8_t c5_below[WIDTHS][2][16] = {
    {{0, 0, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8, 9, 9, 10},
     {10, 11, 11, 12, 12, 12, 13, 13, 13, 14, 14, 14, 14, 14, 15, 14}},
    {{0, 0, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 9, 10, 11},
     {11, 11, 12, 12, 13, 13, 13, 14, 14, 14, 14, 15, 15, 15, 15, 14}},
    {{0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 7, 8, 9, 9},
     {10, 10, 11, 11, 11, 12, 12, 12, 13, 13, 13, 14, 14, 14, 14, 14}}};

INLINE __m256i interval_of(int bits, __m256i u)
{
    return _mm256_and_si256(_mm256_srli_epi16(u, bits == 4 ? 4 : 3), _mm256_set1_epi8(15));
}

/* Number of thresholds <= u, for 32 bytes u = min(|t|, 255). */
INLINE __m256i index_of(int bits, int width, __m256i u, __m256i interval)
{
    __m256i threshold, below;
    if (bits == 4) {
        threshold = _mm256_shuffle_epi8(repeat_lane(c4_threshold[width]), interval);
        below = _mm256_shuffle_epi8(repeat_lane(c4_below[width]), interval);
    } else { /* bit 7 of u chooses the half of the table */
        threshold = _mm256_blendv_epi8(
            _mm256_shuffle_epi8(repeat_lane(c5_threshold[width][0]), interval),
            _mm256_shuffle_epi8(repeat_lane(c5_threshold[width][1]), interval), u);
        below =
            _mm256_blendv_epi8(_mm256_shuffle_epi8(repeat_lane(c5_below[width][0]), interval),
                               _mm256_shuffle_epi8(repeat_lane(c5_below[width][1]), interval), u);
    }
    return _mm256_sub_epi8(below, _mm256_cmpeq_epi8(_mm256_max_epu8(u, threshold), u));
}

INLINE __m256i rounded(const float *y, __m256 factor)
{
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(y), factor));
}

INLINE __m256i sum_products(__m256i sum, __m256i a, __m256i b)
{
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}

/* t of one run at `at` of the batch: factor_a for its first two vectors, factor_b for the others.
 * |t| is far below 2^15: |y| <= sqrt(d) sigma, but for the rounding of subnormal squares. */
INLINE void round_run(int bits, const float *y, __m256 factor_a, __m256 factor_b,
                      struct trials *trials, int at)
{
    __m256i t01 = _mm256_packs_epi32(rounded(y, factor_a), rounded(y + 8, factor_a));
    __m256i t23 = _mm256_packs_epi32(rounded(y + 16, factor_b), rounded(y + 24, factor_b));
    __m256i m01 = _mm256_abs_epi16(t01), m23 = _mm256_abs_epi16(t23);
    __m256i u = _mm256_packus_epi16(m01, m23);
    store(trials->sign + at, _mm256_packs_epi16(t01, t23));
    store(trials->magnitude + at, m01);
    store(trials->magnitude + at + 16, m23);
    store(trials->byte + at, u);
    store(trials->interval + at, interval_of(bits, u));
}

/* Index and levels of one run; adds to num and den, one each, or two when the run has two rows. */
INLINE void try_run(int bits, int width, int two, struct trials *trials, int at, __m256i *num,
                    __m256i *den)
{
    const __m256i zero = _mm256_setzero_si256(), ones = _mm256_set1_epi16(1);
    __m256i index = index_of(bits, width, load(trials->byte + at), load(trials->interval + at));
    __m256i level = _mm256_shuffle_epi8(repeat_lane(bits == 4 ? c4_level : kvt_c5_levels), index);
    __m256i low = _mm256_unpacklo_epi8(level, zero), high = _mm256_unpackhi_epi8(level, zero);
    store(trials->index[width] + at, index);
    num[0] = sum_products(num[0], low, load(trials->magnitude + at));
    num[two] = sum_products(num[two], high, load(trials->magnitude + at + 16));
    if (two) {
        den[0] = sum_products(den[0], low, low);
        den[1] = sum_products(den[1], high, high);
    } else {
        den[0] = sum_products(den[0], _mm256_maddubs_epi16(level, level), ones);
    }
}

/* One width after another, so that its tables and sums stay in registers. */
INLINE void try_width(int d, int bits, int width, struct trials *trials)
{
    int two = d == 16;
    for (int row = 0; row < ROWS; row += two ? 2 : 1) {
        __m256i num[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        __m256i den[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        KVT_AVX2_UNROLL
        for (int at = 0; at < d; at += 32)
            try_run(bits, width, two, trials, d * row + at, num, den);
        trials->num[width][row] = num[0];
        trials->den[width][row] = den[0];
        if (two) {
            trials->num[width][row + 1] = num[1];
            trials->den[width][row + 1] = den[1];
        }
    }
}

/* sum t*t of each row. In packed order a row of 16 has its words in one register, too. */
INLINE void measure_energy(int d, struct trials *trials)
{
    for (int row = 0; row < ROWS; row++) {
        __m256i sum = _mm256_setzero_si256();
        KVT_AVX2_UNROLL
        for (int at = 0; at < d; at += 16) {
            __m256i m = load(trials->magnitude + d * row + at);
            sum = sum_products(sum, m, m);
        }
        trials->energy[row] = sum;
    }
}

INLINE void try_rows(int d, int bits, int want_noise, const float *y, const float *factors,
                     struct trials *trials)
{
    for (int row = 0; row < ROWS; row += d == 16 ? 2 : 1) {
        __m256 factor_a = _mm256_broadcast_ss(&factors[row]);
        __m256 factor_b = d == 16 ? _mm256_broadcast_ss(&factors[row + 1]) : factor_a;
        KVT_AVX2_UNROLL
        for (int at = 0; at < d; at += 32)
            round_run(bits, y + d * row + at, factor_a, factor_b, trials, d * row + at);
    }
    try_width(d, bits, 0, trials);
    try_width(d, bits, 1, trials);
    try_width(d, bits, 2, trials);
    if (want_noise)
        measure_energy(d, trials);
}

struct choice { /* of eight rows */
    __m256 score, num, den;
    __m256 which; /* width as int bits */
};

/* Keep the width where its score is larger. */
INLINE void compare_width(struct choice *best, const struct trials *trials, int width)
{
    __m256 num = _mm256_cvtepi32_ps(kvt_avx2_sum8_integers(trials->num[width]));
    __m256 den = _mm256_cvtepi32_ps(kvt_avx2_sum8_integers(trials->den[width]));
    __m256 score = _mm256_div_ps(_mm256_mul_ps(num, num), den);
    __m256 better = _mm256_cmp_ps(score, best->score, _CMP_GT_OQ);
    __m256 number = _mm256_castsi256_ps(_mm256_set1_epi32(width));
    best->score = _mm256_blendv_ps(best->score, score, better);
    best->num = _mm256_blendv_ps(best->num, num, better);
    best->den = _mm256_blendv_ps(best->den, den, better);
    best->which = _mm256_blendv_ps(best->which, number, better);
}

/* The codes of the chosen widths, in the order of memory. live: 0 or -1 for each row. */
INLINE void gather_codes(int d, int bits, const struct trials *trials, const int32_t *which,
                         const int32_t *live, uint8_t *codes)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i top = _mm256_set1_epi8((char)0x80);
    for (int at = 0; at < ROWS * d; at += 32) {
        int row = at / d;
        const uint8_t *from = trials->index[which[row]] + at;
        __m256i index = load(from);
        __m256i sign = load(trials->sign + at);
        __m256i mask = _mm256_set1_epi32(live[row]);
        if (d == 16) {
            from = trials->index[which[row + 1]] + at;
            index = _mm256_blend_epi32(index, load(from), 0xcc);
            mask = _mm256_blend_epi32(mask, _mm256_set1_epi32(live[row + 1]), 0xcc);
        }
        sign = _mm256_srli_epi16(_mm256_and_si256(sign, top), bits == 4 ? 4 : 3);
        index = _mm256_and_si256(_mm256_or_si256(index, sign), mask);
        store(codes + at, _mm256_permutevar8x32_epi32(index, order));
    }
}

/* Energy of the errors, of y over d, as scalar.c has it. alive: rows that have codes. */
INLINE __m256 noise_of(const struct trials *trials, const struct choice *best, __m256 a,
                       __m256 factor, __m256 alive, __m256 square_sums, __m256 inverse_d)
{
    __m256 energy = _mm256_cvtepi32_ps(kvt_avx2_sum8_integers(trials->energy));
    __m256 step = _mm256_mul_ps(a, factor), cross = _mm256_mul_ps(step, best->num);
    __m256 coded = _mm256_mul_ps(_mm256_mul_ps(step, step), best->den);
    __m256 noise = _mm256_add_ps(_mm256_sub_ps(energy, cross), _mm256_sub_ps(coded, cross));
    noise = _mm256_max_ps(noise, _mm256_setzero_ps());
    noise = _mm256_div_ps(_mm256_div_ps(noise, factor), factor);
    return _mm256_mul_ps(_mm256_blendv_ps(square_sums, noise, alive), inverse_d);
}

INLINE int code_rows(int d, int bits, int want_noise, struct kvt_avx2_batch *batch)
{
    const __m256 zero = _mm256_setzero_ps(), inverse_d = _mm256_set1_ps(1.0f / (float)d);
    const __m256 twice_unit = _mm256_set1_ps(bits == 4 ? KVT_C4_TWICE_UNIT : KVT_C5_TWICE_UNIT);
    const __m256i exponent = _mm256_set1_epi32(0x7f800000);
    int32_t which[ROWS] __attribute__((aligned(32))), live[ROWS] __attribute__((aligned(32)));
    float factors[ROWS] __attribute__((aligned(32)));
    struct trials trials;
    struct choice best = {_mm256_set1_ps(-1.0f), zero, zero, zero};
    __m256 square_sums = _mm256_load_ps(batch->square_sums);
    __m256i bits_of_sums = _mm256_and_si256(_mm256_castps_si256(square_sums), exponent);
    if (_mm256_movemask_epi8(_mm256_cmpeq_epi32(bits_of_sums, exponent)) != 0)
        return KVT_E_NONFINITE;
    __m256 sigma = _mm256_sqrt_ps(_mm256_mul_ps(square_sums, inverse_d));
    __m256 alive = _mm256_cmp_ps(sigma, zero, _CMP_NEQ_OQ);
    __m256 factor = _mm256_and_ps(_mm256_div_ps(twice_unit, sigma), alive);
    _mm256_store_ps(factors, factor);
    try_rows(d, bits, want_noise, batch->y, factors, &trials);
    KVT_AVX2_UNROLL
    for (int width = 0; width < WIDTHS; width++)
        compare_width(&best, &trials, width);
    __m256 quotient = _mm256_div_ps(_mm256_div_ps(best.num, best.den), factor);
    __m256i scale = kvt_avx2_round_bf16(_mm256_and_ps(quotient, alive));
    kvt_avx2_store_bf16(batch->scales, scale);
    if (want_noise)
        _mm256_store_ps(batch->noise, noise_of(&trials, &best, _mm256_castsi256_ps(scale), factor,
                                               alive, square_sums, inverse_d));
    store(which, _mm256_castps_si256(best.which));
    store(live, _mm256_castps_si256(alive));
    gather_codes(d, bits, &trials, which, live, batch->codes);
    return 0;
}

#define CODE_DIMS(name, bits, want_noise)                   \
    static int name(int d, struct kvt_avx2_batch *batch)    \
    {                                                       \
        switch (d) {                                        \
        case 128:                                           \
            return code_rows(128, bits, want_noise, batch); \
        case 64:                                            \
            return code_rows(64, bits, want_noise, batch);  \
        case 32:                                            \
            return code_rows(32, bits, want_noise, batch);  \
        default:                                            \
            return code_rows(16, bits, want_noise, batch);  \
        }                                                   \
    }

CODE_DIMS(code_c4, 4, 0)
CODE_DIMS(code_c4_noise, 4, 1)
CODE_DIMS(code_c5, 5, 0)
CODE_DIMS(code_c5_noise, 5, 1)

int kvt_avx2_code_gauss(const struct kvt_piece *piece, struct kvt_avx2_batch *batch, int want_noise)
{
    int d = (int)piece->dim;
    if (piece->bits == 4)
        return want_noise ? code_c4_noise(d, batch) : code_c4(d, batch);
    return want_noise ? code_c5_noise(d, batch) : code_c5(d, batch);
}
