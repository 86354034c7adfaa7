/* AVX2 decoder, second half: transformed integers to the engine's type, row by row.
 *
 * x = mean + sign * w * (a / d), rounded to nearest even, for int16 w in the register order that
 * avx2_decode.c leaves (avx2.h draws it). Same bits as scalar.c: w * (a / d) is exact, the addition
 * rounds once, the conversion once.
 * Invariants: writes 16 rows of d elements, 16 bytes at a time, and nothing else.
 */
#include <immintrin.h>

#include "codec/avx2.h"
#include "codec/half.h"

#define INLINE static inline __attribute__((always_inline))
#define TOKENS KVT_TILE_TOKENS

/* ---- signs of the transform, in the order of the registers after the last unpack ---- */

#define SIGN_HIGH 0x4449d0423ee576b2u /* kvt_sign_bits as two numbers, first bit on top */
#define SIGN_LOW 0x568f0c4daf5e0c9fu
#define SIGN(e) ((((e) < 64 ? SIGN_HIGH : SIGN_LOW) >> (63 - (e) % 64)) & 1 ? -1 : 1)
/* One lane: w0 = e5, w1 = e1, w2 = e2; mask keeps the bits that number elements of a row. */
#define SIGN_LANE(base, mask)                                                                    \
    SIGN(((base) + 0) & (mask)), SIGN(((base) + 32) & (mask)), SIGN(((base) + 2) & (mask)),      \
        SIGN(((base) + 34) & (mask)), SIGN(((base) + 4) & (mask)), SIGN(((base) + 36) & (mask)), \
        SIGN(((base) + 6) & (mask)), SIGN(((base) + 38) & (mask))
#define SIGN_ROW(base, mask)                         \
    {                                                \
        SIGN_LANE(base, mask), SIGN_LANE(base, mask) \
    }
/* Register number: e0 + 2*e3 + 4*e4. */
#define SIGN_HALF(half, mask)                                                                     \
    {                                                                                             \
        SIGN_ROW((half) + 0, mask), SIGN_ROW((half) + 1, mask), SIGN_ROW((half) + 8, mask),       \
            SIGN_ROW((half) + 9, mask), SIGN_ROW((half) + 16, mask), SIGN_ROW((half) + 17, mask), \
            SIGN_ROW((half) + 24, mask), SIGN_ROW((half) + 25, mask)                              \
    }

static const int16_t signs_128[2][8][16]
    __attribute__((aligned(32))) = {SIGN_HALF(0, 127), SIGN_HALF(64, 127)};
static const int16_t signs_32[8][16] __attribute__((aligned(32))) = SIGN_HALF(0, 31);
static const int16_t signs_16[8][16] __attribute__((aligned(32))) = SIGN_HALF(0, 15);

INLINE const int16_t (*signs_of(int d, int half))[16]
{
    return d >= 64 ? signs_128[half] : d == 32 ? signs_32 : signs_16;
}

/* ---- to the engine's type ---- */

/* Round two vectors of float bits to bf16, low in the even words and high in the odd ones. */
INLINE __m256i merge_bf16(__m256 low, __m256 high)
{
    __m256i f = _mm256_castps_si256(low), g = _mm256_castps_si256(high);
    __m256i upper = _mm256_blend_epi16(_mm256_srli_epi32(f, 16), g, 0xaa);
    __m256i lower = _mm256_blend_epi16(f, _mm256_slli_epi32(g, 16), 0xaa);
    /* up by one where lower + (upper & 1) > 0x8000 */
    __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi16(1));
    lower = _mm256_xor_si256(lower, _mm256_set1_epi16((short)0x8000));
    __m256i up = _mm256_cmpgt_epi16(_mm256_adds_epi16(lower, odd), _mm256_setzero_si256());
    return _mm256_sub_epi16(upper, up);
}

INLINE __m256 clamp_f16(__m256 x)
{
    const __m256 limit = _mm256_set1_ps(KVT_F16_MAX);
    return _mm256_max_ps(_mm256_min_ps(x, limit), _mm256_sub_ps(_mm256_setzero_ps(), limit));
}

/* Sixteen elements of each lane's row, in two groups of eight: even elements, odd elements. One
 * store takes as long as another, so 32 bytes at a time where that costs no more. */
INLINE void store_sixteen(int dtype, const __m256 *even, const __m256 *odd, char *row0, char *row1)
{
    if (dtype == KVT_DTYPE_BF16) {
        __m256i first = merge_bf16(even[0], odd[0]), second = merge_bf16(even[1], odd[1]);
        _mm256_storeu_si256((__m256i *)row0, _mm256_permute2x128_si256(first, second, 0x20));
        _mm256_storeu_si256((__m256i *)row1, _mm256_permute2x128_si256(first, second, 0x31));
        return;
    }
    KVT_AVX2_UNROLL
    for (int i = 0; i < 2;
         i++, row0 += dtype == KVT_DTYPE_F32 ? 32 : 16, row1 += dtype == KVT_DTYPE_F32 ? 32 : 16) {
        if (dtype == KVT_DTYPE_F16) {
            __m128i e = _mm256_cvtps_ph(clamp_f16(even[i]), _MM_FROUND_TO_NEAREST_INT);
            __m128i o = _mm256_cvtps_ph(clamp_f16(odd[i]), _MM_FROUND_TO_NEAREST_INT);
            _mm_storeu_si128((__m128i *)row0, _mm_unpacklo_epi16(e, o));
            _mm_storeu_si128((__m128i *)row1, _mm_unpackhi_epi16(e, o));
        } else {
            __m256 low = _mm256_unpacklo_ps(even[i], odd[i]);
            __m256 high = _mm256_unpackhi_ps(even[i], odd[i]);
            _mm256_storeu_ps((float *)(void *)row0, _mm256_permute2f128_ps(low, high, 0x20));
            _mm256_storeu_ps((float *)(void *)row1, _mm256_permute2f128_ps(low, high, 0x31));
        }
    }
}

/* Elements of one w0 (= e5) of a register, as float: w << 16 as an int, so the step has 2^-16. */
INLINE __m256 scaled(__m256i w, int e5, __m256 step, const float *means)
{
    __m256i wide =
        e5 ? _mm256_and_si256(w, _mm256_set1_epi32((int)0xffff0000)) : _mm256_slli_epi32(w, 16);
    __m256 x = _mm256_mul_ps(_mm256_cvtepi32_ps(wide), step);
    if (means != NULL)
        x = _mm256_add_ps(x, _mm256_load_ps(means));
    return x;
}

/* Two units, of the tokens from `token` on. Everything that the loop needs is in locals: stores
 * through char pointers would make the compiler read it again. The next tile's rows are likely to
 * follow, in another page: their first lines are asked for early. */
INLINE void output_units(int d, int dtype, int has_means, const int16_t *w,
                         const struct kvt_avx2_target *to, int token)
{
    size_t element = dtype == KVT_DTYPE_F32 ? 4 : 2;
    int per_unit = d < 64 ? 64 / d : 1; /* tokens of a unit; the other lane's follow */
    int quads = d == 128 ? 4 : 2;
    const float *means = to->means;
    size_t stride = to->stride_bytes, lane = stride * (size_t)per_unit;
    char *rows = to->rows + stride * (size_t)token;
    __m256 steps[4];
    KVT_AVX2_UNROLL
    for (int row = 0; row < per_unit; row++)
        steps[row] =
            _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_broadcast_ss(&to->steps[token + row])),
                                 _mm_broadcast_ss(&to->steps[token + row + per_unit]), 1);
    KVT_AVX2_UNROLL
    for (int i = 0; i < quads; i++, w += 64) { /* bits of i: e4, e6 */
        const int16_t(*signs)[16] = signs_of(d, i >> 1) + 4 * (i & 1);
        __m256i r[4]; /* e0 + 2*e3 */
        KVT_AVX2_UNROLL
        for (int k = 0; k < 4; k++)
            r[k] = _mm256_sign_epi16(_mm256_load_si256((const __m256i *)(const void *)(w + 16 * k)),
                                     _mm256_load_si256((const __m256i *)(const void *)signs[k]));
        KVT_AVX2_UNROLL
        for (int e5 = 0; e5 < 2; e5++) {
            int e = 64 * (i >> 1) + 32 * e5 + 16 * (i & 1);
            int row = d < 64 ? e / d : 0, column = e & (d - 1);
            const float *at_means = has_means ? means + KVT_AVX2_MEAN_PLACE(column) : NULL;
            char *at = rows + stride * (size_t)row + element * (size_t)column;
            __m256 even[2], odd[2];
            KVT_AVX2_UNROLL
            for (int e3 = 0; e3 < 2; e3++) {
                const float *mean = has_means ? at_means + 64 * e3 : NULL;
                even[e3] = scaled(r[2 * e3], e5, steps[row], mean);
                odd[e3] = scaled(r[2 * e3 + 1], e5, steps[row], has_means ? mean + 16 : NULL);
            }
            store_sixteen(dtype, even, odd, at, at + lane);
            if (element * (size_t)column % 64 == 0) {
                _mm_prefetch(at + TOKENS * stride, _MM_HINT_T0);
                _mm_prefetch(at + lane + TOKENS * stride, _MM_HINT_T0);
            }
        }
    }
}

INLINE void output(int d, int dtype, int has_means, const int16_t *w,
                   const struct kvt_avx2_target *to)
{
    int step = d < 64 ? 128 / d : 2; /* tokens of two units */
    for (int token = 0; token < (int)TOKENS; token += step, w += step * d)
        output_units(d, dtype, has_means, w, to, token);
}

#define OUTPUT_DIMS(dtype, has_means)         \
    switch (dim) {                            \
    case 128:                                 \
        output(128, dtype, has_means, w, to); \
        break;                                \
    case 64:                                  \
        output(64, dtype, has_means, w, to);  \
        break;                                \
    case 32:                                  \
        output(32, dtype, has_means, w, to);  \
        break;                                \
    default:                                  \
        output(16, dtype, has_means, w, to);  \
        break;                                \
    }

static void output_bf16(uint32_t dim, const int16_t *w, const struct kvt_avx2_target *to)
{
    if (to->means != NULL)
        OUTPUT_DIMS(KVT_DTYPE_BF16, 1)
    else
        OUTPUT_DIMS(KVT_DTYPE_BF16, 0)
}

static void output_f16(uint32_t dim, const int16_t *w, const struct kvt_avx2_target *to)
{
    if (to->means != NULL)
        OUTPUT_DIMS(KVT_DTYPE_F16, 1)
    else
        OUTPUT_DIMS(KVT_DTYPE_F16, 0)
}

static void output_f32(uint32_t dim, const int16_t *w, const struct kvt_avx2_target *to)
{
    if (to->means != NULL)
        OUTPUT_DIMS(KVT_DTYPE_F32, 1)
    else
        OUTPUT_DIMS(KVT_DTYPE_F32, 0)
}

void kvt_avx2_output(uint32_t dim, int dtype, const int16_t *w, const struct kvt_avx2_target *to)
{
    if (dtype == KVT_DTYPE_BF16)
        output_bf16(dim, w, to);
    else if (dtype == KVT_DTYPE_F16)
        output_f16(dim, w, to);
    else
        output_f32(dim, w, to);
}
