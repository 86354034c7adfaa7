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
    float square_sums[KVT_AVX2_ROWS] __attribute__((aligned(32))); /* gauss: tree(y*y) */
    float noise[KVT_AVX2_ROWS] __attribute__((aligned(32)));       /* error energy / d */
    uint16_t scales[KVT_AVX2_ROWS] __attribute__((aligned(16)));
};

/* y to codes, scales and noise. Return 0 or KVT_E_NONFINITE. */
int kvt_avx2_code_gauss(const struct kvt_piece *piece, struct kvt_avx2_batch *batch);
int kvt_avx2_code_uniform(const struct kvt_piece *piece, struct kvt_avx2_batch *batch,
                          int want_noise);

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

/* Nearest even bf16 of eight floats, as float bits with a zero lower half. */
KVT_AVX2_INLINE __m256i kvt_avx2_round_bf16(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_and_si256(bits, _mm256_set1_epi32((int)0xffff0000));
}

/* Eight floats whose lower halves are zero, as bf16. */
KVT_AVX2_INLINE void kvt_avx2_store_bf16(uint16_t *to, __m256i bits)
{
    __m256i upper = _mm256_srli_epi32(bits, 16);
    upper = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0xd8);
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_castsi256_si128(upper));
}

#endif
