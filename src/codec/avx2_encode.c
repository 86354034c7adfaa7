/* AVX2 encoder, first half: loading, channel means, transform, energies; then the packing of what
 * the coders make. Same bits as scalar.c: every float operation has the same operands in the same
 * order, lanes only run side by side.
 *
 * A group is 16 consecutive elements of a row. It is loaded as two registers, even elements and odd
 * ones (e0 is the register, e3 e2 e1 the lane), which makes bf16 to float one instruction each and
 * is where the first stage of the transform wants them. Two in-lane shuffles and one across lanes
 * bring e1, e2 and e3 to the register number in turn; then the order is that of memory.
 */
#include <string.h>

#include "codec/avx2_encode.h"
#include "codec/half.h"
#include "codec/tables.h"
#include "kvtier/error.h"

#define INLINE KVT_AVX2_INLINE
#define TOKENS ((int)KVT_TILE_TOKENS)
#define ROWS KVT_AVX2_ROWS

/* ---- signs, in the order of a group ---- */

#define SIGN_HIGH 0x4449d0423ee576b2u /* kvt_sign_bits as two numbers, first bit on top */
#define SIGN_LOW 0x568f0c4daf5e0c9fu
#define SIGN(e) ((((e) < 64 ? SIGN_HIGH : SIGN_LOW) >> (63 - (e) % 64)) & 1 ? 0x8000u : 0u)
#define SIGN_8(e)                                                                       \
    SIGN(e), SIGN((e) + 1), SIGN((e) + 2), SIGN((e) + 3), SIGN((e) + 4), SIGN((e) + 5), \
        SIGN((e) + 6), SIGN((e) + 7)
#define SIGN_32(e) SIGN_8(e), SIGN_8((e) + 8), SIGN_8((e) + 16), SIGN_8((e) + 24)
/* Sign bits of the elements, as 16-bit words in the order of memory. */
static const uint16_t sign_words[KVT_PIECE_DIM_MAX]
    __attribute__((aligned(32))) = {SIGN_32(0), SIGN_32(32), SIGN_32(64), SIGN_32(96)};

/* A group with the signs of the transform. Words are negated before they are taken apart; for
 * floats the same words, spread, do it afterwards. */
INLINE void load_signed_group(int dtype, const char *at, int g, __m256 *even, __m256 *odd)
{
    __m256i signs = _mm256_load_si256((const __m256i *)(const void *)(sign_words + 16 * g));
    if (dtype == KVT_DTYPE_F32) {
        kvt_avx2_load_group(dtype, at, even, odd);
        *even = _mm256_xor_ps(*even, _mm256_castsi256_ps(_mm256_slli_epi32(signs, 16)));
        signs = _mm256_and_si256(signs, _mm256_set1_epi32((int)0xffff0000));
        *odd = _mm256_xor_ps(*odd, _mm256_castsi256_ps(signs));
        return;
    }
    __m256i words = _mm256_loadu_si256((const __m256i *)(const void *)at);
    kvt_avx2_split_words(dtype, _mm256_xor_si256(words, signs), even, odd);
}

/* Channel c stands at this place of an array in group order, and the other way round. */
#define PLACE_OF(c) (((c) & ~15) | ((c)&1) << 3 | ((c)&14) >> 1)
#define CHANNEL_OF(place) (((place) & ~15) | ((place)&7) << 1 | ((place)&8) >> 3)

/* ---- channel means ---- */

struct means {
    float all[KVT_PIECE_DIM_MAX] __attribute__((aligned(32)));     /* in group order */
    float stored[KVT_PIECE_DIM_MAX] __attribute__((aligned(32)));  /* what a decoder adds */
    float negated[KVT_PIECE_DIM_MAX] __attribute__((aligned(32))); /* the same with the signs */
};

/* Tree over the tokens: t with t+8, then t+4, t+2, t+1; depth first, to stay in registers. */
INLINE void add_tokens(int dtype, const char *at, size_t stride, int first, int step, __m256 *even,
                       __m256 *odd)
{
    __m256 e[4], o[4]; /* partial sums of 2, then 4 tokens */
    KVT_AVX2_UNROLL
    for (int i = 0; i < 4; i++) {
        /* tokens first + {0, 8}, {4, 12}, {2, 10}, {6, 14} for step 1 */
        int t = first + step * ((i & 1) * 4 + (i & 2));
        __m256 upper_even, upper_odd;
        kvt_avx2_load_group(dtype, at + stride * (size_t)t, &e[i], &o[i]);
        kvt_avx2_load_group(dtype, at + stride * (size_t)(t + 8), &upper_even, &upper_odd);
        e[i] = _mm256_add_ps(e[i], upper_even);
        o[i] = _mm256_add_ps(o[i], upper_odd);
    }
    *even = _mm256_add_ps(_mm256_add_ps(e[0], e[1]), _mm256_add_ps(e[2], e[3]));
    *odd = _mm256_add_ps(_mm256_add_ps(o[0], o[1]), _mm256_add_ps(o[2], o[3]));
}

INLINE void channel_means(int d, int dtype, const char *rows, size_t stride, float *means)
{
    const __m256 sixteenth = _mm256_set1_ps(0.0625f);
    size_t element = dtype == KVT_DTYPE_F32 ? 4 : 2;
    for (int group = 0; group < d / 16; group++) {
        const char *at = rows + 16 * element * (size_t)group;
        __m256 even[2], odd[2];
        add_tokens(dtype, at, stride, 0, 1, &even[0], &odd[0]);
        add_tokens(dtype, at, stride, 1, 1, &even[1], &odd[1]);
        _mm256_store_ps(means + 16 * group,
                        _mm256_mul_ps(_mm256_add_ps(even[0], even[1]), sixteenth));
        _mm256_store_ps(means + 16 * group + 8,
                        _mm256_mul_ps(_mm256_add_ps(odd[0], odd[1]), sixteenth));
    }
}

/* Places of the channels with the largest |mean|, ties to the lower channel: one at a time. */
static void largest_slowly(const uint32_t *magnitudes, int d, int count, uint8_t *places)
{
    uint8_t taken[KVT_PIECE_DIM_MAX] = {0};
    for (int k = 0; k < count; k++) {
        int best = -1;
        for (int c = 0; c < d; c++) {
            int place = PLACE_OF(c);
            if (!taken[place] && (best < 0 || magnitudes[place] > magnitudes[best]))
                best = place;
        }
        taken[best] = 1;
        places[k] = (uint8_t)best;
    }
}

/* The same by ranks among few candidates: the smallest of the eight lane maxima is a bound that at
 * least eight channels reach. Equal magnitudes are left to the slow way (0). wanted <= 8. */
static int largest_by_rank(const uint32_t *magnitudes, int d, int wanted, uint8_t *places)
{
    uint32_t keys[KVT_PIECE_DIM_MAX + 8] __attribute__((aligned(32)));
    uint8_t at[KVT_PIECE_DIM_MAX + 8];
    const __m256i *all = (const __m256i *)(const void *)magnitudes;
    __m256i bound = _mm256_load_si256(all);
    for (int i = 1; i < d / 8; i++)
        bound = _mm256_max_epu32(bound, _mm256_load_si256(all + i));
    bound = _mm256_min_epu32(bound, _mm256_permute2x128_si256(bound, bound, 1));
    bound = _mm256_min_epu32(bound, _mm256_shuffle_epi32(bound, 0x4e));
    bound = _mm256_min_epu32(bound, _mm256_shuffle_epi32(bound, 0xb1));
    int count = 0;
    for (int i = 0; i < d / 8; i++) {
        __m256i reach = _mm256_cmpeq_epi32(_mm256_max_epu32(_mm256_load_si256(all + i), bound),
                                           _mm256_load_si256(all + i));
        uint32_t mask = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(reach));
        for (; mask != 0; mask &= mask - 1, count++) {
            at[count] = (uint8_t)(8 * i + __builtin_ctz(mask));
            keys[count] = magnitudes[at[count]];
        }
    }
    _mm256_storeu_si256((__m256i *)(void *)(keys + count), _mm256_setzero_si256());
    uint32_t filled = 0;
    for (int k = 0; k < count; k++) {
        __m256i key = _mm256_set1_epi32((int)keys[k]);
        int rank = 0;
        for (int i = 0; i < count; i += 8) { /* below 2^31, so signed order is right */
            __m256i above =
                _mm256_cmpgt_epi32(_mm256_load_si256((const __m256i *)(void *)(keys + i)), key);
            rank += __builtin_popcount((uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(above)));
        }
        if (rank >= wanted)
            continue;
        if (filled & (1u << rank))
            return 0; /* a tie */
        filled |= 1u << rank;
        places[rank] = at[k];
    }
    return 1;
}

static void choose_offsets(const struct kvt_piece *piece, struct means *means, uint8_t *out)
{
    uint32_t magnitudes[KVT_PIECE_DIM_MAX] __attribute__((aligned(32)));
    uint8_t places[KVT_OFFSETS_MAX];
    uint8_t *at = out + piece->offsets_at;
    int d = (int)piece->dim, count = piece->offsets;
    const __m256i positive = _mm256_set1_epi32(0x7fffffff);
    for (int i = 0; i < d; i += 8)
        _mm256_store_si256(
            (__m256i *)(void *)(magnitudes + i),
            _mm256_and_si256(_mm256_load_si256((const __m256i *)(const void *)(means->all + i)),
                             positive));
    if (!largest_by_rank(magnitudes, d, count, places))
        largest_slowly(magnitudes, d, count, places);
    memset(at, 0, KVT_OFFSETS_BYTES);
    memset(means->stored, 0, (size_t)d * sizeof(float));
    memset(means->negated, 0, (size_t)d * sizeof(float));
    for (int k = 0; k < count; k++) {
        uint16_t half = kvt_float_to_bf16(means->all[places[k]]);
        memcpy(at + 2 * k, &half, 2);
        at[16 + k] = (uint8_t)CHANNEL_OF(places[k]);
        means->stored[places[k]] = kvt_bf16_to_float(half);
        means->negated[places[k]] = kvt_bf16_to_float(half ^ sign_words[at[16 + k]]);
    }
}

/* ---- transform ---- */

INLINE void butterfly(__m256 *u, __m256 *v)
{
    __m256 sum = _mm256_add_ps(*u, *v);
    *v = _mm256_sub_ps(*u, *v);
    *u = sum;
}

/* Stages e0 to e3 of one group; the result is in the order of memory. */
INLINE void transform_group(__m256 *even, __m256 *odd)
{
    butterfly(even, odd);
    __m256 u = _mm256_shuffle_ps(*even, *odd, 0x88), v = _mm256_shuffle_ps(*even, *odd, 0xdd);
    butterfly(&u, &v); /* e1; lanes hold e0 e2 */
    *even = _mm256_shuffle_ps(u, v, 0x88);
    *odd = _mm256_shuffle_ps(u, v, 0xdd);
    butterfly(even, odd); /* e2; lanes hold e1 e0 */
    u = _mm256_permute2f128_ps(*even, *odd, 0x20);
    v = _mm256_permute2f128_ps(*even, *odd, 0x31);
    butterfly(&u, &v); /* e3; lanes hold e2 e1 e0 */
    *even = u;
    *odd = v;
}

/* One stage between registers r[0] to r[count - 1]; nothing when there are too few. */
INLINE void stage(__m256 *r, int count, int step)
{
    if (count < 2 * step)
        return;
    KVT_AVX2_UNROLL
    for (int i = 0; i < count / 2; i++) {
        int u = (i & (step - 1)) | (i & ~(step - 1)) << 1; /* a zero put in at the step's bit */
        butterfly(&r[u], &r[u + step]);
    }
}

/* Rows of one batch through stages e0 to e3, stored to y. Groups do not depend on each other. */
INLINE void transform_groups(int d, int dtype, int has_means, const char *rows, size_t stride,
                             const struct means *means, float *y)
{
    size_t element = dtype == KVT_DTYPE_F32 ? 4 : 2;
    for (int row = 0; row < ROWS; row++, rows += stride, y += d) {
        KVT_AVX2_UNROLL
        for (int g = 0; g < d / 16; g++) {
            __m256 even, odd;
            if (g * 16 * element % 64 == 0)
                _mm_prefetch(rows + TOKENS * stride + 16 * element * (size_t)g, _MM_HINT_T0);
            load_signed_group(dtype, rows + 16 * element * (size_t)g, g, &even, &odd);
            if (has_means) {
                even = _mm256_sub_ps(even, _mm256_load_ps(means->negated + 16 * g));
                odd = _mm256_sub_ps(odd, _mm256_load_ps(means->negated + 16 * g + 8));
            }
            transform_group(&even, &odd);
            _mm256_store_ps(y + 16 * g, even);
            _mm256_store_ps(y + 16 * g + 8, odd);
        }
    }
}

/* Stages e4 to e6 of the vectors of one row with the same e3, in place; returns their part of
 * tree(y*y). */
INLINE __m256 transform_across(int d, float *y)
{
    int groups = d / 16;
    __m256 r[8];
    KVT_AVX2_UNROLL
    for (int g = 0; g < groups; g++)
        r[g] = _mm256_load_ps(y + 16 * g);
    stage(r, groups, 1);
    stage(r, groups, 2);
    stage(r, groups, 4);
    KVT_AVX2_UNROLL
    for (int g = 0; g < groups; g++) {
        _mm256_store_ps(y + 16 * g, r[g]);
        r[g] = _mm256_mul_ps(r[g], r[g]);
    }
    return kvt_avx2_sum_registers(r, groups);
}

INLINE void transform_batch(int d, int dtype, int has_means, const char *rows, size_t stride,
                            const struct means *means, struct kvt_avx2_batch *batch)
{
    __m256 sums[ROWS];
    transform_groups(d, dtype, has_means, rows, stride, means, batch->y);
    for (int row = 0; row < ROWS; row++) {
        float *y = batch->y + d * row;
        __m256 low = transform_across(d, y), high = transform_across(d, y + 8);
        sums[row] = _mm256_add_ps(low, high);
    }
    _mm256_store_ps(batch->square_sums, kvt_avx2_sum8(sums));
}

/* ---- packing: codes of consecutive rows are consecutive, whatever d ---- */

/* Lower four bits of count codes, a multiple of 64. */
static void pack_nibbles(const uint8_t *codes, int count, uint8_t *out)
{
    const __m256i mask = _mm256_set1_epi8(15), weights = _mm256_set1_epi16(0x1001);
    for (int i = 0; i < count; i += 64, out += 32) {
        const __m256i *from = (const __m256i *)(const void *)(codes + i);
        __m256i a = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_load_si256(from), mask), weights);
        __m256i b =
            _mm256_maddubs_epi16(_mm256_and_si256(_mm256_load_si256(from + 1), mask), weights);
        _mm256_storeu_si256((__m256i *)(void *)out,
                            _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8));
    }
}

/* Bit 4 of count codes, a multiple of 32, one bit each. */
static void pack_bits(const uint8_t *codes, int count, uint8_t *out)
{
    for (int i = 0; i < count; i += 32, out += 4) {
        __m256i c = _mm256_load_si256((const __m256i *)(const void *)(codes + i));
        uint32_t bits = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(c, 3));
        memcpy(out, &bits, 4);
    }
}

/* Bits 4 and 5 of count codes, a multiple of 32, two bits each. */
static void pack_pairs(const uint8_t *codes, int count, uint8_t *out)
{
    for (int i = 0; i < count; i += 32, out += 8) {
        __m256i c = _mm256_load_si256((const __m256i *)(const void *)(codes + i));
        c = _mm256_and_si256(_mm256_srli_epi16(c, 4), _mm256_set1_epi8(3));
        c = _mm256_maddubs_epi16(c, _mm256_set1_epi16(0x0401));
        c = _mm256_madd_epi16(c, _mm256_set1_epi32(0x00100001)); /* a byte in each 32 bits */
        c = _mm256_packus_epi32(c, c);
        c = _mm256_packus_epi16(c, c);
        uint32_t words[2] = {(uint32_t)_mm256_cvtsi256_si32(c),
                             (uint32_t)_mm256_extract_epi32(c, 4)};
        memcpy(out, words, 8);
    }
}

static void store_batch(const struct kvt_piece *piece, const struct kvt_avx2_batch *batch,
                        int first, uint8_t *out)
{
    int count = ROWS * (int)piece->dim, done = first * (int)piece->dim;
    memcpy(out + piece->scales_at + 2 * first, batch->scales, 2 * ROWS);
    if (piece->bits == 8) {
        memcpy(out + done, batch->codes, (size_t)count);
        return;
    }
    pack_nibbles(batch->codes, count, out + done / 2);
    if (piece->bits == 5)
        pack_bits(batch->codes, count, out + piece->plane_at + done / 8);
    else if (piece->bits == 6)
        pack_pairs(batch->codes, count, out + piece->plane_at + done / 4);
}

/* ---- energies ---- */

/* Sum over the lanes of one vector, in tree order. */
static float sum_lanes(__m256 v)
{
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}

INLINE float residue_of(int d, const struct means *means)
{
    __m256 even[8], odd[8];
    KVT_AVX2_UNROLL
    for (int g = 0; g < d / 16; g++) {
        const float *all = means->all + 16 * g, *stored = means->stored + 16 * g;
        even[g] = _mm256_sub_ps(_mm256_load_ps(all), _mm256_load_ps(stored));
        odd[g] = _mm256_sub_ps(_mm256_load_ps(all + 8), _mm256_load_ps(stored + 8));
        even[g] = _mm256_mul_ps(even[g], even[g]);
        odd[g] = _mm256_mul_ps(odd[g], odd[g]);
    }
    return sum_lanes(kvt_avx2_sum_registers(even, d / 16)) +
           sum_lanes(kvt_avx2_sum_registers(odd, d / 16));
}

/* Energy of eight rows around the mean; seldom wanted. */
INLINE void measure_centred(int d, int dtype, const char *rows, size_t stride, const float *means,
                            float *signal)
{
    size_t element = dtype == KVT_DTYPE_F32 ? 4 : 2;
    __m256 even_sums[ROWS], odd_sums[ROWS];
    for (int row = 0; row < ROWS; row++, rows += stride) {
        __m256 even[8], odd[8];
        KVT_AVX2_UNROLL
        for (int g = 0; g < d / 16; g++) {
            kvt_avx2_load_group(dtype, rows + 16 * element * (size_t)g, &even[g], &odd[g]);
            even[g] = _mm256_sub_ps(even[g], _mm256_load_ps(means + 16 * g));
            odd[g] = _mm256_sub_ps(odd[g], _mm256_load_ps(means + 16 * g + 8));
            even[g] = _mm256_mul_ps(even[g], even[g]);
            odd[g] = _mm256_mul_ps(odd[g], odd[g]);
        }
        even_sums[row] = kvt_avx2_sum_registers(even, d / 16);
        odd_sums[row] = kvt_avx2_sum_registers(odd, d / 16);
    }
    _mm256_storeu_ps(signal, _mm256_add_ps(kvt_avx2_sum8(even_sums), kvt_avx2_sum8(odd_sums)));
}

INLINE void centred_piece(int d, int dtype, const char *rows, size_t stride, float *signal)
{
    float means[KVT_PIECE_DIM_MAX] __attribute__((aligned(32)));
    channel_means(d, dtype, rows, stride, means);
    measure_centred(d, dtype, rows, stride, means, signal);
    measure_centred(d, dtype, rows + stride * ROWS, stride, means, signal + ROWS);
}

/* ---- pieces ---- */

INLINE int encode_piece(int d, int dtype, const struct kvt_piece *piece, const char *rows,
                        size_t stride, uint8_t *out, struct kvt_tile_energy *energy)
{
    const __m256 inverse_d = _mm256_set1_ps(1.0f / (float)d);
    struct kvt_avx2_batch batch;
    struct means means;
    if (piece->offsets > 0) {
        channel_means(d, dtype, rows, stride, means.all);
        choose_offsets(piece, &means, out);
    }
    if (energy != NULL)
        energy->residue = residue_of(d, &means);
    for (int first = 0; first < TOKENS; first += ROWS) {
        const char *at = rows + stride * (size_t)first;
        if (piece->offsets > 0)
            transform_batch(d, dtype, 1, at, stride, &means, &batch);
        else
            transform_batch(d, dtype, 0, at, stride, &means, &batch);
        int status = piece->coder == KVT_CODER_GAUSS
                         ? kvt_avx2_code_gauss(piece, &batch, energy != NULL)
                         : kvt_avx2_code_uniform(piece, &batch, energy != NULL);
        if (status != 0)
            return status;
        store_batch(piece, &batch, first, out);
        if (energy == NULL)
            continue;
        memcpy(energy->noise + first, batch.noise, sizeof(batch.noise));
        _mm256_storeu_ps(energy->rows + first,
                         _mm256_mul_ps(_mm256_load_ps(batch.square_sums), inverse_d));
    }
    return 0;
}

#define ENCODE_DIMS(name, dtype)                                                                  \
    static int name(const struct kvt_piece *piece, const char *rows, size_t stride, uint8_t *out, \
                    struct kvt_tile_energy *energy)                                               \
    {                                                                                             \
        switch (piece->dim) {                                                                     \
        case 128:                                                                                 \
            return encode_piece(128, dtype, piece, rows, stride, out, energy);                    \
        case 64:                                                                                  \
            return encode_piece(64, dtype, piece, rows, stride, out, energy);                     \
        case 32:                                                                                  \
            return encode_piece(32, dtype, piece, rows, stride, out, energy);                     \
        default:                                                                                  \
            return encode_piece(16, dtype, piece, rows, stride, out, energy);                     \
        }                                                                                         \
    }

ENCODE_DIMS(encode_bf16, KVT_DTYPE_BF16)
ENCODE_DIMS(encode_f16, KVT_DTYPE_F16)
ENCODE_DIMS(encode_f32, KVT_DTYPE_F32)

#define CENTRED_DIMS(dtype)                                    \
    switch (piece->dim) {                                      \
    case 128:                                                  \
        centred_piece(128, dtype, rows, stride_bytes, signal); \
        break;                                                 \
    case 64:                                                   \
        centred_piece(64, dtype, rows, stride_bytes, signal);  \
        break;                                                 \
    case 32:                                                   \
        centred_piece(32, dtype, rows, stride_bytes, signal);  \
        break;                                                 \
    default:                                                   \
        centred_piece(16, dtype, rows, stride_bytes, signal);  \
        break;                                                 \
    }

void kvt_avx2_centred(const struct kvt_piece *piece, const void *rows, size_t stride_bytes,
                      float *signal)
{
    if (piece->dtype == KVT_DTYPE_BF16)
        CENTRED_DIMS(KVT_DTYPE_BF16)
    else if (piece->dtype == KVT_DTYPE_F16)
        CENTRED_DIMS(KVT_DTYPE_F16)
    else
        CENTRED_DIMS(KVT_DTYPE_F32)
}

int kvt_avx2_encode(const struct kvt_piece *piece, const void *rows, size_t stride_bytes,
                    uint8_t *out, struct kvt_tile_energy *energy)
{
    if (piece->coder == KVT_CODER_PLAIN)
        return kvt_avx2_encode_plain(piece, rows, stride_bytes, out);
    if (piece->dtype == KVT_DTYPE_BF16)
        return encode_bf16(piece, rows, stride_bytes, out, energy);
    if (piece->dtype == KVT_DTYPE_F16)
        return encode_f16(piece, rows, stride_bytes, out, energy);
    return encode_f32(piece, rows, stride_bytes, out, energy);
}
