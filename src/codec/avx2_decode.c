/* AVX2 decoder. Same bits as scalar.c: the transform is exact in 16-bit integers, so its stages may
 * run in any order, and everything after it is the scalar formula on 8 lanes.
 *
 * Registers. Work comes in units of 64 elements of consecutive tokens (half a row of 128, one row
 * of 64, two of 32, four of 16); the two 128-bit lanes hold two units, so nothing ever crosses
 * lanes. Call the bits of an element's number in its unit e5..e0, and e6 the half of a row of 128.
 * The 16 int16 of a register hold three of these bits in their position in the lane (w2 w1 w0), the
 * register number the others:
 *
 *   expand    levels biased to u8, maddubs: stage e0 done       w = e1 e4 e3   registers e5 e2 e0
 *   stages e2, e5 (and e6) between registers
 *   unpack with e2, stage e1                                     w = e4 e3 e2   registers e5 e1 e0
 *   unpack with e1, stage e4                                     w = e3 e2 e1   registers e5 e4 e0
 *   unpack with e5, stage e3                                     w = e2 e1 e5   registers e3 e4 e0
 *   to float in two halves by e5, merged again by e0:            w = e2 e1 e0, the order in memory
 *
 * Rows shorter than the unit leave out the stages of the bits that number tokens.
 * Invariants: 16-byte stores only into the 16 rows; every input byte pattern is valid.
 */
#include <immintrin.h>
#include <string.h>

#include "codec/avx2.h"
#include "codec/half.h"
#include "codec/tables.h"

#define INLINE static inline __attribute__((always_inline))
#define TOKENS KVT_TILE_TOKENS

/* ---- codes to biased levels ---- */

INLINE __m256i load_lanes(const uint8_t *low, const uint8_t *high)
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)low)),
                                   _mm_loadu_si128((const __m128i *)high), 1);
}

INLINE __m256i repeat_lane(const void *table)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
}

/* Byte j of a chunk holds elements 2j and 2j+1, j = e4 e3 e2 e1; here it moves to e2 e1 e4 e3. */
static const uint8_t nibble_order[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
/* Byte e3 e2 e1 e0 of a chunk of bytes moves to e2 e1 e3 e0. */
static const uint8_t byte_order[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};

/* Even and odd elements (biased levels, in nibble_order) to the four registers of one chunk. */
INLINE void first_stage(__m256i even, __m256i odd, __m256i *r)
{
    const __m256i plus = _mm256_set1_epi16(0x0101), minus = _mm256_set1_epi16((short)0xff01);
    __m256i low = _mm256_unpacklo_epi8(even, odd), high = _mm256_unpackhi_epi8(even, odd);
    r[0] = _mm256_maddubs_epi16(low, plus);
    r[1] = _mm256_maddubs_epi16(low, minus);
    r[2] = _mm256_maddubs_epi16(high, plus);
    r[3] = _mm256_maddubs_epi16(high, minus);
}

struct source { /* where the codes of the two units lie */
    const uint8_t *codes[2];
    const uint8_t *plane[2];
};

INLINE void split_nibbles(__m256i bytes, __m256i *even, __m256i *odd)
{
    const __m256i mask = _mm256_set1_epi8(15);
    *even = _mm256_and_si256(bytes, mask);
    *odd = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
}

/* kv5: 4 bytes of sign bits for the 32 elements of a chunk; level + 128 or 128 - level. */
INLINE __m256i signed_level(__m256i magnitude, __m256i plane, __m256i bit)
{
    __m256i negative = _mm256_cmpeq_epi8(_mm256_and_si256(plane, bit), bit);
    __m256i level = _mm256_sub_epi8(_mm256_xor_si256(magnitude, negative), negative);
    return _mm256_xor_si256(level, _mm256_set1_epi8((char)0x80));
}

/* One chunk: 32 elements of each unit to registers r[0..3], number e0 + 2*e2. Returns nothing; the
 * bias of the levels is bias_of(bits). */
INLINE void expand_chunk(int bits, int gauss, const struct source *from, int chunk, __m256i *r)
{
    if (bits == 8) {
        const __m256i order = repeat_lane(byte_order), flip = _mm256_set1_epi8((char)0x80);
        __m256i a = load_lanes(from->codes[0] + 32 * chunk, from->codes[1] + 32 * chunk);
        __m256i b = load_lanes(from->codes[0] + 32 * chunk + 16, from->codes[1] + 32 * chunk + 16);
        const __m256i plus = _mm256_set1_epi16(0x0101), minus = _mm256_set1_epi16((short)0xff01);
        a = _mm256_shuffle_epi8(_mm256_xor_si256(a, flip), order);
        b = _mm256_shuffle_epi8(_mm256_xor_si256(b, flip), order);
        __m256i low = _mm256_unpacklo_epi32(a, b), high = _mm256_unpackhi_epi32(a, b);
        r[0] = _mm256_maddubs_epi16(low, plus);
        r[1] = _mm256_maddubs_epi16(low, minus);
        r[2] = _mm256_maddubs_epi16(high, plus);
        r[3] = _mm256_maddubs_epi16(high, minus);
        return;
    }
    __m256i even, odd;
    __m256i bytes = load_lanes(from->codes[0] + 16 * chunk, from->codes[1] + 16 * chunk);
    bytes = _mm256_shuffle_epi8(bytes, repeat_lane(nibble_order));
    split_nibbles(bytes, &even, &odd);
    if (bits == 4) {
        const __m256i table = repeat_lane(kvt_avx2_c4_biased);
        even = _mm256_shuffle_epi8(table, even);
        odd = _mm256_shuffle_epi8(table, odd);
    } else if (gauss) { /* kv5: bit e%8 of byte e/8; byte j in place p needs plane byte j/4 */
        int32_t words[2];
        memcpy(&words[0], from->plane[0] + 4 * chunk, 4);
        memcpy(&words[1], from->plane[1] + 4 * chunk, 4);
        __m256i plane = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_cvtsi32_si128(words[0])),
                                                _mm_cvtsi32_si128(words[1]), 1);
        plane = _mm256_shuffle_epi8(plane, _mm256_set1_epi32(0x03020100)); /* j/4 = e4 e3 */
        const __m256i bit = _mm256_broadcastsi128_si256(
            _mm_setr_epi32(0x01010101, 0x04040404, 0x10101010, 0x40404040)); /* 2*(j%4) */
        const __m256i table = repeat_lane(kvt_c5_levels);
        even = signed_level(_mm256_shuffle_epi8(table, even), plane, bit);
        odd = signed_level(_mm256_shuffle_epi8(table, odd), plane, _mm256_add_epi8(bit, bit));
    } else { /* kv6: bits 2*(e%4) of byte e/4; byte j in place p needs plane byte j/2 */
        int64_t words[2];
        memcpy(&words[0], from->plane[0] + 8 * chunk, 8);
        memcpy(&words[1], from->plane[1] + 8 * chunk, 8);
        __m256i plane = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_cvtsi64_si128(words[0])),
                                                _mm_cvtsi64_si128(words[1]), 1);
        /* place e2 e1 e4 e3: byte j/2 = e4 e3 e2 */
        plane = _mm256_shuffle_epi8(plane, _mm256_broadcastsi128_si256(_mm_setr_epi8(
                                               0, 2, 4, 6, 0, 2, 4, 6, 1, 3, 5, 7, 1, 3, 5, 7)));
        /* j odd (e1): the upper four bits; moved down where set */
        const __m256i is_odd = _mm256_broadcastsi128_si256(_mm_setr_epi32(0, -1, 0, -1));
        const __m256i two = _mm256_set1_epi8(0x30), flip = _mm256_set1_epi8(0x20);
        __m256i pair = _mm256_blendv_epi8(_mm256_slli_epi16(plane, 4), plane, is_odd);
        /* pair: bits 5..4 the even element, bits 7..6 the odd one */
        __m256i even_top = _mm256_and_si256(pair, two);
        __m256i odd_top = _mm256_and_si256(_mm256_srli_epi16(pair, 2), two);
        even = _mm256_xor_si256(_mm256_or_si256(even, even_top), flip);
        odd = _mm256_xor_si256(_mm256_or_si256(odd, odd_top), flip);
    }
    first_stage(even, odd, r);
}

/* ---- transform ---- */

INLINE void butterfly(__m256i *u, __m256i *v)
{
    __m256i sum = _mm256_add_epi16(*u, *v);
    *v = _mm256_sub_epi16(*u, *v);
    *u = sum;
}

INLINE void unpack(__m256i *u, __m256i *v)
{
    __m256i low = _mm256_unpacklo_epi16(*u, *v);
    *v = _mm256_unpackhi_epi16(*u, *v);
    *u = low;
}

/* Registers numbered e0 + 2*e2 + 4*e5 to e0 + 2*e4 + 4*e3, all stages below e6 done. */
INLINE void transform_half(__m256i *r, int d)
{
    KVT_AVX2_UNROLL
    for (int i = 0; i < 8; i += 4) { /* e2 */
        butterfly(&r[i], &r[i + 2]);
        butterfly(&r[i + 1], &r[i + 3]);
    }
    KVT_AVX2_UNROLL
    for (int i = 0; i < 4 && d >= 64; i++) /* e5 */
        butterfly(&r[i], &r[i + 4]);
    KVT_AVX2_UNROLL
    for (int k = 0; k < 4; k++) { /* e1 */
        int i = (k & 1) + 2 * (k & 2);
        unpack(&r[i], &r[i + 2]);
        butterfly(&r[i], &r[i + 2]);
    }
    KVT_AVX2_UNROLL
    for (int k = 0; k < 4; k++) { /* e4 */
        int i = (k & 1) + 2 * (k & 2);
        unpack(&r[i], &r[i + 2]);
        if (d >= 32)
            butterfly(&r[i], &r[i + 2]);
    }
    KVT_AVX2_UNROLL
    for (int i = 0; i < 4; i++) { /* e3 */
        unpack(&r[i], &r[i + 4]);
        butterfly(&r[i], &r[i + 4]);
    }
}

/* The levels were biased by `bias`, which ends up as bias * d in element 0 of each row. */
INLINE void remove_bias(__m256i *r, int d, int bias)
{
    short first = (short)(bias * d), second = d >= 64 ? 0 : first; /* w0 = e5: below 64 a token */
    const __m256i excess =
        _mm256_setr_epi16(first, second, 0, 0, 0, 0, 0, 0, first, second, 0, 0, 0, 0, 0, 0);
    r[0] = _mm256_sub_epi16(r[0], excess);
    if (d == 16) /* e4 numbers tokens, too */
        r[2] = _mm256_sub_epi16(r[2], excess);
}

/* ---- pieces ---- */

/* Eight registers e0 + 2*e4 + 4*e3, e3 before e4: 16 elements of a row then come together. */
INLINE void store_registers(const __m256i *r, int16_t *w)
{
    KVT_AVX2_UNROLL
    for (int i = 0; i < 8; i++) {
        int from = (i & 1) | (i & 2) << 1 | (i & 4) >> 1;
        _mm256_store_si256((__m256i *)(void *)(w + 16 * i), r[from]);
    }
}

/* All units of a piece to w, 8 registers after another (16 for d = 128). */
INLINE void transform_units(int d, int bits, int gauss, const struct kvt_piece *piece,
                            const uint8_t *in, int16_t *w)
{
    int bias = bits == 6 ? 32 : 128, count = d == 128 ? 16 : 8;
    int row_codes = bits == 8 ? d : d / 2, row_plane = bits == 8 ? 0 : d * (bits - 4) / 8;
    int per_unit = d < 64 ? 64 / d : 1;
    for (int token = 0; token < (int)TOKENS; token += 2 * per_unit) {
        struct source from;
        for (int lane = 0; lane < 2; lane++) {
            int first = token + lane * per_unit;
            from.codes[lane] = in + first * row_codes;
            from.plane[lane] = in + piece->plane_at + first * row_plane;
        }
        __m256i r[16];
        KVT_AVX2_UNROLL
        for (int chunk = 0; chunk < count / 4; chunk++)
            expand_chunk(bits, gauss, &from, chunk, &r[4 * chunk]);
        KVT_AVX2_UNROLL
        for (int i = 0; i < count - 8; i++) /* e6 */
            butterfly(&r[i], &r[i + 8]);
        transform_half(r, d);
        remove_bias(r, d, bias);
        if (d == 128)
            transform_half(r + 8, d);
        store_registers(r, w);
        if (d == 128)
            store_registers(r + 8, w + 128);
        w += 16 * count;
    }
}

INLINE __m256i without_infinities(__m256i halves)
{
    const __m256i exponent = _mm256_set1_epi16(0x7f80);
    return _mm256_andnot_si256(_mm256_cmpeq_epi16(_mm256_and_si256(halves, exponent), exponent),
                               halves);
}

enum step_kind { STEPS_PLAIN, STEPS_WITH_ZERO, STEPS_TINY };

/* Steps of the 16 tokens: a / d / 65536. Tiny: the extra 2^-16 would lose bits of one. */
static enum step_kind read_steps(const struct kvt_piece *piece, const uint8_t *in, float *steps)
{
    const __m256i none = _mm256_setzero_si256(), least = _mm256_set1_epi16(0x0d80); /* 2^-100 */
    const __m256 scale = _mm256_set1_ps(1.0f / (float)piece->dim / 65536.0f);
    __m256i halves = _mm256_loadu_si256((const __m256i *)(const void *)(in + piece->scales_at));
    halves = _mm256_and_si256(without_infinities(halves), _mm256_set1_epi16(0x7fff));
    __m256i is_zero = _mm256_cmpeq_epi16(halves, none);
    __m256i is_tiny = _mm256_andnot_si256(is_zero, _mm256_cmpgt_epi16(least, halves));
    halves = _mm256_permute4x64_epi64(halves, 0xd8); /* so that unpacking keeps the order */
    __m256 first = _mm256_castsi256_ps(_mm256_unpacklo_epi16(none, halves));
    __m256 second = _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, halves));
    _mm256_storeu_ps(steps, _mm256_mul_ps(first, scale));
    _mm256_storeu_ps(steps + 8, _mm256_mul_ps(second, scale));
    if (!_mm256_testz_si256(is_tiny, is_tiny))
        return STEPS_TINY;
    return _mm256_testz_si256(is_zero, is_zero) ? STEPS_PLAIN : STEPS_WITH_ZERO;
}

/* KVT_AVX2_MEAN_PLACE() of every element. */
#define PLACES_8(e)                                                                               \
    KVT_AVX2_MEAN_PLACE((e)), KVT_AVX2_MEAN_PLACE((e) + 1), KVT_AVX2_MEAN_PLACE((e) + 2),         \
        KVT_AVX2_MEAN_PLACE((e) + 3), KVT_AVX2_MEAN_PLACE((e) + 4), KVT_AVX2_MEAN_PLACE((e) + 5), \
        KVT_AVX2_MEAN_PLACE((e) + 6), KVT_AVX2_MEAN_PLACE((e) + 7)

static void read_means(const struct kvt_piece *piece, const uint8_t *in, float *means)
{
    static const uint8_t places[KVT_PIECE_DIM_MAX] = {
        PLACES_8(0),  PLACES_8(8),   PLACES_8(16),  PLACES_8(24), PLACES_8(32), PLACES_8(40),
        PLACES_8(48), PLACES_8(56),  PLACES_8(64),  PLACES_8(72), PLACES_8(80), PLACES_8(88),
        PLACES_8(96), PLACES_8(104), PLACES_8(112), PLACES_8(120)};
    const uint8_t *at = in + piece->offsets_at;
    uint16_t values[16];
    memset(means, 0, (piece->dim == 128 ? 256 : 128) * sizeof(*means));
    if (piece->offsets == 0)
        return;
    __m256i halves = _mm256_loadu_si256((const __m256i *)(const void *)at);
    _mm256_storeu_si256((__m256i *)(void *)values, without_infinities(halves));
    for (uint32_t k = 0; k < piece->offsets; k++) {
        float *mean = means + places[at[16 + k] & (piece->dim - 1)];
        mean[0] = mean[4] = kvt_bf16_to_float(values[k]);
    }
}

#define TRANSFORM_DIMS(name, bits, gauss)                                          \
    static void name(const struct kvt_piece *piece, const uint8_t *in, int16_t *w) \
    {                                                                              \
        switch (piece->dim) {                                                      \
        case 128:                                                                  \
            transform_units(128, bits, gauss, piece, in, w);                       \
            break;                                                                 \
        case 64:                                                                   \
            transform_units(64, bits, gauss, piece, in, w);                        \
            break;                                                                 \
        case 32:                                                                   \
            transform_units(32, bits, gauss, piece, in, w);                        \
            break;                                                                 \
        default:                                                                   \
            transform_units(16, bits, gauss, piece, in, w);                        \
            break;                                                                 \
        }                                                                          \
    }

TRANSFORM_DIMS(transform_c4, 4, 1)
TRANSFORM_DIMS(transform_c5, 5, 1)
TRANSFORM_DIMS(transform_u6, 6, 0)
TRANSFORM_DIMS(transform_u8, 8, 0)

void kvt_avx2_decode(const struct kvt_piece *piece, const uint8_t *in, void *rows,
                     size_t stride_bytes)
{
    int16_t w[TOKENS * KVT_PIECE_DIM_MAX] __attribute__((aligned(32)));
    float steps[TOKENS], means[KVT_AVX2_MEANS] __attribute__((aligned(32)));
    struct kvt_avx2_target to = {rows, stride_bytes, steps, NULL};
    if (piece->coder == KVT_CODER_PLAIN) {
        kvt_avx2_decode_plain(piece, in, rows, stride_bytes);
        return;
    }
    enum step_kind kind = read_steps(piece, in, steps);
    if (kind == STEPS_TINY) {
        kvt_codec_scalar.decode(piece, in, rows, stride_bytes);
        return;
    }
    if (piece->offsets > 0 ||
        kind == STEPS_WITH_ZERO) { /* 0 + -0 is +0, as in the scalar formula */
        read_means(piece, in, means);
        to.means = means;
    }
    if (piece->coder == KVT_CODER_GAUSS && piece->bits == 4)
        transform_c4(piece, in, w);
    else if (piece->coder == KVT_CODER_GAUSS)
        transform_c5(piece, in, w);
    else if (piece->bits == 6)
        transform_u6(piece, in, w);
    else
        transform_u8(piece, in, w);
    kvt_avx2_output(piece->dim, piece->dtype, w, &to);
}
