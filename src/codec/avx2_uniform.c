/* AVX2 encoder, the uniform coder (kv6, kv8): scale and codes of eight rows.
 *
 * Runs and their packed order are those of avx2_gauss.c. Same bits as scalar.c: one IEEE division
 * an element, rounded to nearest even by the conversion.
 */
#include "codec/avx2_encode.h"
#include "codec/tables.h"
#include "kvtier/error.h"

#define INLINE KVT_AVX2_INLINE
#define ROWS KVT_AVX2_ROWS

/* Largest magnitudes of eight rows, as float bits. */
INLINE __m256i largest_magnitudes(int d, const float *y)
{
    const __m256i positive = _mm256_set1_epi32(0x7fffffff);
    uint32_t largest[ROWS] __attribute__((aligned(32)));
    for (int row = 0; row < ROWS; row++) {
        const __m256i *at = (const __m256i *)(const void *)(y + d * row);
        __m256i m = _mm256_and_si256(_mm256_load_si256(at), positive);
        KVT_AVX2_UNROLL
        for (int i = 1; i < d / 8; i++)
            m = _mm256_max_epu32(m, _mm256_and_si256(_mm256_load_si256(at + i), positive));
        m = _mm256_max_epu32(m, _mm256_permute2x128_si256(m, m, 1));
        m = _mm256_max_epu32(m, _mm256_shuffle_epi32(m, 0x4e));
        m = _mm256_max_epu32(m, _mm256_shuffle_epi32(m, 0xb1));
        largest[row] = (uint32_t)_mm256_cvtsi256_si32(m);
    }
    return _mm256_load_si256((const __m256i *)(const void *)largest);
}

/* Four vectors of one run, quotients rounded; and the sum of squared errors of each. */
INLINE void code_run(int high, int want_noise, const float *y, const __m256 *divisor,
                     const __m256 *scale, uint8_t *codes, __m256 *squares)
{
    const __m256 top = _mm256_set1_ps((float)high), bottom = _mm256_set1_ps(-(float)high);
    __m256i q[4];
    KVT_AVX2_UNROLL
    for (int i = 0; i < 4; i++) {
        __m256 v = _mm256_load_ps(y + 8 * i);
        q[i] = _mm256_cvtps_epi32(_mm256_div_ps(v, divisor[i / 2]));
        if (want_noise) {
            __m256 level = _mm256_cvtepi32_ps(q[i]);
            level = _mm256_max_ps(_mm256_min_ps(level, top), bottom);
            __m256 error = _mm256_sub_ps(v, _mm256_mul_ps(scale[i / 2], level));
            squares[i] = _mm256_mul_ps(error, error);
        }
    }
    __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    bytes = _mm256_max_epi8(bytes, _mm256_set1_epi8((char)-high));
    if (high < 127)
        bytes = _mm256_min_epi8(bytes, _mm256_set1_epi8((char)high));
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_store_si256((__m256i *)(void *)codes, bytes);
}

INLINE void code_row(int d, int high, int want_noise, const float *y, float divisor, float scale,
                     uint8_t *codes, __m256 *noise)
{
    __m256 divisors[2] = {_mm256_set1_ps(divisor), _mm256_set1_ps(divisor)};
    __m256 scales[2] = {_mm256_set1_ps(scale), _mm256_set1_ps(scale)};
    __m256 squares[16];
    KVT_AVX2_UNROLL
    for (int run = 0; run < d / 32; run++)
        code_run(high, want_noise, y + 32 * run, divisors, scales, codes + 32 * run,
                 squares + 4 * run);
    if (!want_noise)
        return;
    *noise = kvt_avx2_sum_registers(squares, d / 8);
}

INLINE void code_two_rows(int high, int want_noise, const float *y, const float *divisor,
                          const float *scale, uint8_t *codes, __m256 *noise)
{
    __m256 divisors[2] = {_mm256_set1_ps(divisor[0]), _mm256_set1_ps(divisor[1])};
    __m256 scales[2] = {_mm256_set1_ps(scale[0]), _mm256_set1_ps(scale[1])};
    __m256 squares[4];
    code_run(high, want_noise, y, divisors, scales, codes, squares);
    if (want_noise) {
        noise[0] = _mm256_add_ps(squares[0], squares[1]);
        noise[1] = _mm256_add_ps(squares[2], squares[3]);
    }
}

INLINE int code_rows(int d, int high, int want_noise, struct kvt_avx2_batch *batch)
{
    float divisors[ROWS] __attribute__((aligned(32))), scales[ROWS] __attribute__((aligned(32)));
    __m256 noise[ROWS];
    __m256i largest = largest_magnitudes(d, batch->y);
    const __m256i limit = _mm256_set1_epi32((int)KVT_MAGNITUDE_LIMIT);
    if (_mm256_movemask_epi8(_mm256_cmpgt_epi32(limit, largest)) != -1)
        return KVT_E_NONFINITE;
    __m256 amax = _mm256_castsi256_ps(largest);
    __m256 a = kvt_avx2_uniform_scale(amax, (float)high);
    __m256 is_zero = _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_EQ_OQ);
    kvt_avx2_store_bf16(batch->scales, _mm256_castps_si256(a));
    _mm256_store_ps(scales, a);
    _mm256_store_ps(divisors, _mm256_blendv_ps(a, _mm256_set1_ps(1.0f), is_zero)); /* y is 0 */
    if (d == 16)
        for (int row = 0; row < ROWS; row += 2)
            code_two_rows(high, want_noise, batch->y + 16 * row, divisors + row, scales + row,
                          batch->codes + 16 * row, noise + row);
    else
        for (int row = 0; row < ROWS; row++)
            code_row(d, high, want_noise, batch->y + d * row, divisors[row], scales[row],
                     batch->codes + d * row, noise + row);
    if (want_noise)
        _mm256_store_ps(batch->noise,
                        _mm256_mul_ps(kvt_avx2_sum8(noise), _mm256_set1_ps(1.0f / (float)d)));
    return 0;
}

#define CODE_DIMS(name, high)                                                                    \
    static int name(int d, int want_noise, struct kvt_avx2_batch *batch)                         \
    {                                                                                            \
        switch (d) {                                                                             \
        case 128:                                                                                \
            return want_noise ? code_rows(128, high, 1, batch) : code_rows(128, high, 0, batch); \
        case 64:                                                                                 \
            return want_noise ? code_rows(64, high, 1, batch) : code_rows(64, high, 0, batch);   \
        case 32:                                                                                 \
            return want_noise ? code_rows(32, high, 1, batch) : code_rows(32, high, 0, batch);   \
        default:                                                                                 \
            return want_noise ? code_rows(16, high, 1, batch) : code_rows(16, high, 0, batch);   \
        }                                                                                        \
    }

CODE_DIMS(code_u6, 31)
CODE_DIMS(code_u8, 127)

int kvt_avx2_code_uniform(const struct kvt_piece *piece, struct kvt_avx2_batch *batch,
                          int want_noise)
{
    if (piece->bits == 6)
        return code_u6((int)piece->dim, want_noise, batch);
    return code_u8((int)piece->dim, want_noise, batch);
}
