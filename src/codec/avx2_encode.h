/* Between the two halves of the AVX2 encoder: rows in, transformed rows out (avx2_encode.c), and
 * transformed rows in, codes and scales out (avx2_gauss.c, avx2_uniform.c).
 *
 * Rows are worked on eight at a time, so that what is one number per row fits one register, and
 * sums over a row end in one eight-way reduction. Include after AVX2 is on; no state.
 */
#ifndef KVT_CODEC_AVX2_ENCODE_H
#define KVT_CODEC_AVX2_ENCODE_H

#include <immintrin.h>

#include "codec/avx2.h"

#define KVT_AVX2_ROWS 8 /* of a batch: half a tile */
#define KVT_AVX2_INLINE static inline __attribute__((always_inline))

struct kvt_avx2_batch {
    float y[KVT_AVX2_ROWS * KVT_PIECE_DIM_MAX] __attribute__((aligned(32))); /* row after row */
    uint8_t codes[KVT_AVX2_ROWS * KVT_PIECE_DIM_MAX] __attribute__((aligned(32)));
    float square_sums[KVT_AVX2_ROWS] __attribute__((aligned(32))); /* tree(y*y) */
    float noise[KVT_AVX2_ROWS] __attribute__((aligned(32)));       /* error energy / d */
    uint16_t scales[KVT_AVX2_ROWS] __attribute__((aligned(16)));
};

/* y to codes, scales and noise. Return 0 or KVT_E_NONFINITE. */
int kvt_avx2_code_gauss(const struct kvt_piece *piece, struct kvt_avx2_batch *batch,
                        int want_noise);
int kvt_avx2_code_uniform(const struct kvt_piece *piece, struct kvt_avx2_batch *batch,
                          int want_noise);

/* 16 bf16 or f16 words as floats, even ones and odd ones: lane i has element 2i, or 2i + 1. */
KVT_AVX2_INLINE void kvt_avx2_split_words(int dtype, __m256i w, __m256 *even, __m256 *odd)
{
    if (dtype == KVT_DTYPE_BF16) {
        *even = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
        *odd = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int)0xffff0000)));
        return;
    }
    w = _mm256_permute4x64_epi64(w, 0xd8);
    __m256 first = _mm256_cvtph_ps(_mm256_castsi256_si128(w));       /* elements 0-3 and 8-11 */
    __m256 second = _mm256_cvtph_ps(_mm256_extracti128_si256(w, 1)); /* 4-7 and 12-15 */
    *even = _mm256_shuffle_ps(first, second, 0x88);
    *odd = _mm256_shuffle_ps(first, second, 0xdd);
}

/* The same for 16 elements in memory, of any dtype. */
KVT_AVX2_INLINE void kvt_avx2_load_group(int dtype, const char *at, __m256 *even, __m256 *odd)
{
    if (dtype != KVT_DTYPE_F32) {
        kvt_avx2_split_words(dtype, _mm256_loadu_si256((const __m256i *)(const void *)at), even,
                             odd);
        return;
    }
    const float *x = (const float *)(const void *)at;
    __m256 first =
        _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(x)), _mm_loadu_ps(x + 8), 1);
    __m256 second =
        _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(x + 4)), _mm_loadu_ps(x + 12), 1);
    *even = _mm256_shuffle_ps(first, second, 0x88);
    *odd = _mm256_shuffle_ps(first, second, 0xdd);
}

KVT_AVX2_INLINE void kvt_avx2_add_upper(__m256 *r, int half)
{
    KVT_AVX2_UNROLL
    for (int i = 0; i < half; i++)
        r[i] = _mm256_add_ps(r[i], r[i + half]);
}

/* Sum count registers (a power of two, at most 16) in tree order. Destroys them. */
KVT_AVX2_INLINE __m256 kvt_avx2_sum_registers(__m256 *r, int count)
{
    if (count >= 16)
        kvt_avx2_add_upper(r, 8);
    if (count >= 8)
        kvt_avx2_add_upper(r, 4);
    if (count >= 4)
        kvt_avx2_add_upper(r, 2);
    if (count >= 2)
        kvt_avx2_add_upper(r, 1);
    return r[0];
}

/* Eight sums over the lanes of eight vectors, in tree order: lane i with i+4, then +2, then +1. */
KVT_AVX2_INLINE __m256 kvt_avx2_sum8(const __m256 *v)
{
    __m256 half[4], quarter[2];
    KVT_AVX2_UNROLL
    for (int i = 0; i < 4; i++) /* rows i and i + 4 side by side */
        half[i] = _mm256_add_ps(_mm256_permute2f128_ps(v[i], v[i + 4], 0x20),
                                _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));
    KVT_AVX2_UNROLL
    for (int i = 0; i < 2; i++) /* rows i, i + 2 in a lane */
        quarter[i] = _mm256_add_ps(_mm256_shuffle_ps(half[i], half[i + 2], 0x44),
                                   _mm256_shuffle_ps(half[i], half[i + 2], 0xee));
    __m256 even = _mm256_shuffle_ps(quarter[0], quarter[1], 0x88);
    __m256 odd = _mm256_shuffle_ps(quarter[0], quarter[1], 0xdd);
    /* lanes: rows 0 2 1 3 | 4 6 5 7 */
    __m256 sums = _mm256_add_ps(even, odd);
    return _mm256_permute_ps(sums, 0xd8);
}

/* The same for integers, where order does not matter. */
KVT_AVX2_INLINE __m256i kvt_avx2_sum8_integers(const __m256i *v)
{
    __m256i pairs[4], fours[2];
    KVT_AVX2_UNROLL
    for (int i = 0; i < 4; i++)
        pairs[i] = _mm256_hadd_epi32(v[2 * i], v[2 * i + 1]);
    fours[0] = _mm256_hadd_epi32(pairs[0], pairs[1]);
    fours[1] = _mm256_hadd_epi32(pairs[2], pairs[3]);
    return _mm256_add_epi32(_mm256_permute2x128_si256(fours[0], fours[1], 0x20),
                            _mm256_permute2x128_si256(fours[0], fours[1], 0x31));
}

/* Nearest even bf16 of eight floats, as float bits with a zero lower half. */
KVT_AVX2_INLINE __m256i kvt_avx2_round_bf16(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_and_si256(bits, _mm256_set1_epi32((int)0xffff0000));
}

/* bf16(largest / q), a step up where q + 0.5 steps would not reach the largest. */
KVT_AVX2_INLINE __m256 kvt_avx2_uniform_scale(__m256 largest, float q)
{
    __m256i scale = kvt_avx2_round_bf16(_mm256_div_ps(largest, _mm256_set1_ps(q)));
    __m256 reach = _mm256_mul_ps(_mm256_castsi256_ps(scale), _mm256_set1_ps(q + 0.5f));
    __m256 is_short = _mm256_cmp_ps(reach, largest, _CMP_LT_OQ);
    __m256i step_up = _mm256_and_si256(_mm256_castps_si256(is_short), _mm256_set1_epi32(0x10000));
    return _mm256_castsi256_ps(_mm256_add_epi32(scale, step_up));
}

/* Eight floats whose lower halves are zero, as bf16. */
KVT_AVX2_INLINE void kvt_avx2_store_bf16(uint16_t *to, __m256i bits)
{
    __m256i upper = _mm256_srli_epi32(bits, 16);
    upper = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0xd8);
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_castsi256_si128(upper));
}

#endif
