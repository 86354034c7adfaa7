/* AVX2 kernels of int4: uniform on the elements themselves. Same bits as scalar.c.
 *
 * A 4-bit code times a scale has 16 values, so decoding to a 16-bit type is a table look-up: the
 * upper and the lower bytes of the 16 values are two byte shuffles. Encoding divides, as the format
 * says, and lets the conversion round.
 */
#include <string.h>

#include "codec/avx2_encode.h"
#include "codec/half.h"
#include "codec/tables.h"
#include "kvtier/error.h"

#define INLINE KVT_AVX2_INLINE
#define TOKENS ((int)KVT_TILE_TOKENS)

/* ---- decode ---- */

/* Eight floats as eight 16-bit elements. */
INLINE __m128i to_halves(int dtype, __m256 x)
{
    if (dtype == KVT_DTYPE_F16) {
        const __m256 limit = _mm256_set1_ps(KVT_F16_MAX);
        x = _mm256_max_ps(_mm256_min_ps(x, limit), _mm256_sub_ps(_mm256_setzero_ps(), limit));
        return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
    }
    __m256i upper = _mm256_srli_epi32(kvt_avx2_round_bf16(x), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
}

struct byte_table { /* of one row: byte n belongs to code n */
    __m128i lower, upper;
};

INLINE struct byte_table table_of(int dtype, float scale)
{
    const __m256 positive = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256 negative = _mm256_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1);
    const __m128i mask = _mm_set1_epi16(0xff);
    __m256 a = _mm256_set1_ps(scale);
    __m128i low = to_halves(dtype, _mm256_mul_ps(positive, a));
    __m128i high = to_halves(dtype, _mm256_mul_ps(negative, a));
    return (struct byte_table){
        .lower = _mm_packus_epi16(_mm_and_si128(low, mask), _mm_and_si128(high, mask)),
        .upper = _mm_packus_epi16(_mm_srli_epi16(low, 8), _mm_srli_epi16(high, 8)),
    };
}

INLINE __m256i two_lanes(__m128i low, __m128i high)
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

INLINE __m128i load_16(const uint8_t *at)
{
    return _mm_loadu_si128((const __m128i *)(const void *)at);
}

/* 32 elements of two rows: 16 bytes of codes each. */
INLINE void look_up(__m256i bytes, __m256i lower, __m256i upper, char *row0, char *row1)
{
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i even = _mm256_and_si256(bytes, mask);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
    __m256i even_lower = _mm256_shuffle_epi8(lower, even);
    __m256i even_upper = _mm256_shuffle_epi8(upper, even);
    __m256i odd_lower = _mm256_shuffle_epi8(lower, odd);
    __m256i odd_upper = _mm256_shuffle_epi8(upper, odd);
    KVT_AVX2_UNROLL
    for (int half = 0; half < 2; half++) { /* 16 elements each */
        __m256i e = half ? _mm256_unpackhi_epi8(even_lower, even_upper)
                         : _mm256_unpacklo_epi8(even_lower, even_upper);
        __m256i o = half ? _mm256_unpackhi_epi8(odd_lower, odd_upper)
                         : _mm256_unpacklo_epi8(odd_lower, odd_upper);
        __m256i first = _mm256_unpacklo_epi16(e, o), second = _mm256_unpackhi_epi16(e, o);
        _mm256_storeu_si256((__m256i *)(void *)(row0 + 32 * half),
                            _mm256_permute2x128_si256(first, second, 0x20));
        _mm256_storeu_si256((__m256i *)(void *)(row1 + 32 * half),
                            _mm256_permute2x128_si256(first, second, 0x31));
    }
}

/* Rows of 32, 64 or 128 elements of a 16-bit type, two at a time. */
INLINE void decode_by_table(int d, int dtype, const uint8_t *in, const float *scales, char *rows,
                            size_t stride)
{
    for (int token = 0; token < TOKENS; token += 2, rows += 2 * stride, in += d) {
        struct byte_table first = table_of(dtype, scales[token]);
        struct byte_table second = table_of(dtype, scales[token + 1]);
        __m256i lower = two_lanes(first.lower, second.lower);
        __m256i upper = two_lanes(first.upper, second.upper);
        KVT_AVX2_UNROLL
        for (int at = 0; at < d; at += 32) {
            __m256i bytes = two_lanes(load_16(in + at / 2), load_16(in + d / 2 + at / 2));
            look_up(bytes, lower, upper, rows + 2 * at, rows + stride + 2 * at);
            _mm_prefetch(rows + TOKENS * stride + 2 * at, _MM_HINT_T0);
            _mm_prefetch(rows + (TOKENS + 1) * stride + 2 * at, _MM_HINT_T0);
        }
    }
}

/* Any row, 16 elements at a time, by float. */
INLINE void decode_by_product(int dtype, const struct kvt_piece *piece, const uint8_t *in,
                              const float *scales, char *rows, size_t stride)
{
    const __m128i mask = _mm_set1_epi8(15), sign = _mm_set1_epi8(8);
    int d = (int)piece->dim;
    for (int token = 0; token < TOKENS; token++, rows += stride) {
        __m256 a = _mm256_set1_ps(scales[token]);
        for (int at = 0; at < d; at += 16, in += 8) {
            __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)in);
            __m128i even = _mm_and_si128(bytes, mask);
            __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
            __m128i q = _mm_unpacklo_epi8(even, odd);
            q = _mm_sub_epi8(_mm_xor_si128(q, sign), sign);
            __m256 x = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)), a);
            __m256 y =
                _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(q, 8))), a);
            if (dtype == KVT_DTYPE_F32) {
                _mm256_storeu_ps((float *)(void *)rows + at, x);
                _mm256_storeu_ps((float *)(void *)rows + at + 8, y);
            } else {
                _mm_storeu_si128((__m128i *)(void *)(rows + 2 * at), to_halves(dtype, x));
                _mm_storeu_si128((__m128i *)(void *)(rows + 2 * at + 16), to_halves(dtype, y));
            }
        }
    }
}

INLINE void decode_halves(int dtype, const struct kvt_piece *piece, const uint8_t *in,
                          const float *scales, char *rows, size_t stride)
{
    if (piece->dim == 128)
        decode_by_table(128, dtype, in, scales, rows, stride);
    else if (piece->dim == 64)
        decode_by_table(64, dtype, in, scales, rows, stride);
    else if (piece->dim == 32)
        decode_by_table(32, dtype, in, scales, rows, stride);
    else
        decode_by_product(dtype, piece, in, scales, rows, stride);
}

void kvt_avx2_decode_plain(const struct kvt_piece *piece, const uint8_t *in, void *rows,
                           size_t stride_bytes)
{
    float scales[TOKENS];
    for (int t = 0; t < TOKENS; t++) {
        uint16_t half;
        memcpy(&half, in + piece->scales_at + 2 * t, 2);
        scales[t] = kvt_bf16_to_float(kvt_bf16_scale(half));
    }
    if (piece->dtype == KVT_DTYPE_BF16)
        decode_halves(KVT_DTYPE_BF16, piece, in, scales, rows, stride_bytes);
    else if (piece->dtype == KVT_DTYPE_F16)
        decode_halves(KVT_DTYPE_F16, piece, in, scales, rows, stride_bytes);
    else
        decode_by_product(KVT_DTYPE_F32, piece, in, scales, rows, stride_bytes);
}

/* ---- encode ---- */

/* Largest magnitude of a row, as float bits. */
INLINE uint32_t largest_of(int d, int dtype, const char *row)
{
    if (dtype == KVT_DTYPE_F32) {
        const __m256i positive = _mm256_set1_epi32(0x7fffffff);
        __m256i m = _mm256_setzero_si256();
        KVT_AVX2_UNROLL
        for (int i = 0; i < d / 8; i++)
            m = _mm256_max_epu32(
                m,
                _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(const void *)(row + 32 * i)),
                                 positive));
        m = _mm256_max_epu32(m, _mm256_permute2x128_si256(m, m, 1));
        m = _mm256_max_epu32(m, _mm256_shuffle_epi32(m, 0x4e));
        m = _mm256_max_epu32(m, _mm256_shuffle_epi32(m, 0xb1));
        return (uint32_t)_mm256_cvtsi256_si32(m);
    }
    const __m256i positive = _mm256_set1_epi16(0x7fff);
    __m256i m = _mm256_setzero_si256();
    KVT_AVX2_UNROLL
    for (int i = 0; i < d / 16; i++)
        m = _mm256_max_epu16(
            m, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(const void *)(row + 32 * i)),
                                positive));
    __m128i all = _mm_set1_epi16(-1);
    __m128i half = _mm_max_epu16(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    half = _mm_minpos_epu16(_mm_xor_si128(half, all)); /* the minimum of the complements */
    uint16_t largest = (uint16_t)~_mm_extract_epi16(half, 0);
    return kvt_float_bits(dtype == KVT_DTYPE_BF16 ? kvt_bf16_to_float(largest)
                                                  : kvt_f16_to_float(largest));
}

INLINE int row_scales(int d, int dtype, const char *rows, size_t stride, uint16_t *scales,
                      float *divisors)
{
    uint32_t bits[TOKENS] __attribute__((aligned(32)));
    for (int t = 0; t < TOKENS; t++)
        bits[t] = largest_of(d, dtype, rows + stride * (size_t)t);
    for (int t = 0; t < TOKENS; t += 8) {
        __m256i largest = _mm256_load_si256((const __m256i *)(const void *)(bits + t));
        const __m256i limit = _mm256_set1_epi32((int)KVT_MAGNITUDE_LIMIT);
        if (_mm256_movemask_epi8(_mm256_cmpgt_epi32(limit, largest)) != -1)
            return KVT_E_NONFINITE;
        __m256 a = kvt_avx2_uniform_scale(_mm256_castsi256_ps(largest), 7.0f);
        __m256 is_zero = _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_EQ_OQ);
        kvt_avx2_store_bf16(scales + t, _mm256_castps_si256(a));
        _mm256_storeu_ps(divisors + t, _mm256_blendv_ps(a, _mm256_set1_ps(1.0f), is_zero));
    }
    return 0;
}

/* Two groups to 16 words that hold a byte of codes each. |x / a| <= 7.5, so q >= -8. */
INLINE __m256i code_groups(int dtype, const char *at0, const char *at1, __m256 a0, __m256 a1)
{
    const __m256i seven = _mm256_set1_epi16(7), low = _mm256_set1_epi16(15);
    __m256 e0, o0, e1, o1;
    kvt_avx2_load_group(dtype, at0, &e0, &o0);
    kvt_avx2_load_group(dtype, at1, &e1, &o1);
    __m256i even = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_div_ps(e0, a0)),
                                      _mm256_cvtps_epi32(_mm256_div_ps(e1, a1)));
    __m256i odd = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_div_ps(o0, a0)),
                                     _mm256_cvtps_epi32(_mm256_div_ps(o1, a1)));
    even = _mm256_and_si256(_mm256_min_epi16(even, seven), low);
    odd = _mm256_and_si256(_mm256_min_epi16(odd, seven), low);
    return _mm256_or_si256(even, _mm256_slli_epi16(odd, 4));
}

/* Codes of consecutive rows are consecutive: 64 elements at a time, of one row or several. */
INLINE int encode_rows(int d, int dtype, const struct kvt_piece *piece, const char *rows,
                       size_t stride, uint8_t *out)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    size_t element = dtype == KVT_DTYPE_F32 ? 4 : 2;
    uint16_t scales[TOKENS];
    float divisors[TOKENS];
    int status = row_scales(d, dtype, rows, stride, scales, divisors);
    if (status != 0)
        return status;
    memcpy(out + piece->scales_at, scales, sizeof(scales));
    for (int unit = 0; unit < TOKENS * d; unit += 64, out += 32) {
        const char *at[4];
        __m256 a[4];
        KVT_AVX2_UNROLL
        for (int g = 0; g < 4; g++) {
            int row = (unit + 16 * g) / d, column = (unit + 16 * g) & (d - 1);
            at[g] = rows + stride * (size_t)row + element * (size_t)column;
            a[g] = _mm256_broadcast_ss(&divisors[row]);
        }
        __m256i low = code_groups(dtype, at[0], at[1], a[0], a[1]);
        __m256i high = code_groups(dtype, at[2], at[3], a[2], a[3]);
        __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
        _mm256_storeu_si256((__m256i *)(void *)out, bytes);
        _mm_prefetch(at[0] + TOKENS * stride, _MM_HINT_T0);
        _mm_prefetch(at[2] + TOKENS * stride, _MM_HINT_T0);
    }
    return 0;
}

#define ENCODE_DIMS(name, dtype)                                                                  \
    static int name(const struct kvt_piece *piece, const char *rows, size_t stride, uint8_t *out) \
    {                                                                                             \
        switch (piece->dim) {                                                                     \
        case 128:                                                                                 \
            return encode_rows(128, dtype, piece, rows, stride, out);                             \
        case 64:                                                                                  \
            return encode_rows(64, dtype, piece, rows, stride, out);                              \
        case 32:                                                                                  \
            return encode_rows(32, dtype, piece, rows, stride, out);                              \
        default:                                                                                  \
            return encode_rows(16, dtype, piece, rows, stride, out);                              \
        }                                                                                         \
    }

ENCODE_DIMS(encode_bf16, KVT_DTYPE_BF16)
ENCODE_DIMS(encode_f16, KVT_DTYPE_F16)
ENCODE_DIMS(encode_f32, KVT_DTYPE_F32)

int kvt_avx2_encode_plain(const struct kvt_piece *piece, const void *rows, size_t stride_bytes,
                          uint8_t *out)
{
    if (piece->dtype == KVT_DTYPE_BF16)
        return encode_bf16(piece, rows, stride_bytes, out);
    if (piece->dtype == KVT_DTYPE_F16)
        return encode_f16(piece, rows, stride_bytes, out);
    return encode_f32(piece, rows, stride_bytes, out);
}
