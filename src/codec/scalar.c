/* Scalar kernels: the reference. Every other instruction set must give the same bits, and
 * docs/codec.md says in words what is written here, step by step.
 *
 * Written to be read: arrays of one tile, one loop per step. The order of every floating-point
 * addition is part of the format.
 */
#include <math.h>
#include <string.h>

#include "codec/half.h"
#include "codec/kernel.h"
#include "codec/tables.h"
#include "kvtier/error.h"

#define TOKENS KVT_TILE_TOKENS
#define DIM_MAX KVT_PIECE_DIM_MAX

/* Sum of n values (a power of two): adds i and i + n/2, then i and i + n/4, ... Destroys them. */
static float tree_sum(float *values, uint32_t n)
{
    for (uint32_t half = n / 2; half > 0; half /= 2)
        for (uint32_t i = 0; i < half; i++)
            values[i] = values[i] + values[i + half];
    return values[0];
}

static float sum_of_squares(const float *values, uint32_t n)
{
    float squares[DIM_MAX];
    for (uint32_t i = 0; i < n; i++)
        squares[i] = values[i] * values[i];
    return tree_sum(squares, n);
}

/* Largest magnitude as float bits: integer order is float order, and NaN ends up on top. */
static uint32_t largest_magnitude(const float *values, uint32_t n)
{
    uint32_t largest = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t magnitude = kvt_float_bits(values[i]) & 0x7fffffffu;
        if (magnitude > largest)
            largest = magnitude;
    }
    return largest;
}

static int sign_is_negative(uint32_t i)
{
    return (kvt_sign_bits[i / 8] >> (7 - i % 8)) & 1;
}

static void store_row(const struct kvt_piece *piece, const float *x, void *row)
{
    for (uint32_t i = 0; i < piece->dim; i++) {
        if (piece->dtype == KVT_DTYPE_F32) {
            memcpy((char *)row + 4 * (size_t)i, &x[i], 4);
            continue;
        }
        uint16_t half =
            piece->dtype == KVT_DTYPE_BF16 ? kvt_float_to_bf16(x[i]) : kvt_float_to_f16(x[i]);
        memcpy((char *)row + 2 * (size_t)i, &half, 2);
    }
}

/* Codes of one row into the nibble rows (or byte rows) and the plane. */
static void pack_codes(const struct kvt_piece *piece, uint32_t token, const uint8_t *codes,
                       uint8_t *out)
{
    uint32_t d = piece->dim;
    if (piece->bits == 8) {
        memcpy(out + (size_t)token * d, codes, d);
        return;
    }
    uint8_t *nibbles = out + (size_t)token * (d / 2);
    for (uint32_t i = 0; i < d; i += 2)
        nibbles[i / 2] = (uint8_t)((codes[i] & 15) | (codes[i + 1] & 15) << 4);
    uint32_t extra = piece->bits - 4u; /* bits per element in the plane: 0, 1 or 2 */
    if (extra == 0)
        return;
    uint8_t *plane = out + piece->plane_at + (size_t)token * (d * extra / 8);
    memset(plane, 0, d * extra / 8);
    for (uint32_t i = 0; i < d; i++)
        plane[i * extra / 8] |= (uint8_t)((codes[i] >> 4) << (i * extra % 8));
}

static void unpack_codes(const struct kvt_piece *piece, uint32_t token, const uint8_t *in,
                         uint8_t *codes)
{
    uint32_t d = piece->dim;
    if (piece->bits == 8) {
        memcpy(codes, in + (size_t)token * d, d);
        return;
    }
    const uint8_t *nibbles = in + (size_t)token * (d / 2);
    for (uint32_t i = 0; i < d; i++)
        codes[i] = (nibbles[i / 2] >> (i % 2 * 4)) & 15;
    uint32_t extra = piece->bits - 4u;
    if (extra == 0)
        return;
    const uint8_t *plane = in + piece->plane_at + (size_t)token * (d * extra / 8);
    for (uint32_t i = 0; i < d; i++) {
        uint32_t upper = (plane[i * extra / 8] >> (i * extra % 8)) & ((1u << extra) - 1u);
        codes[i] = (uint8_t)(codes[i] | upper << 4);
    }
}

static void put_scale(const struct kvt_piece *piece, uint32_t token, uint16_t scale, uint8_t *out)
{
    out[piece->scales_at + 2 * token] = (uint8_t)scale;
    out[piece->scales_at + 2 * token + 1] = (uint8_t)(scale >> 8);
}

static uint16_t get_half(const uint8_t *at)
{
    return (uint16_t)(at[0] | at[1] << 8);
}

/* ---- stored channel means ---- */

/* Mean of each channel over the tile. */
static void channel_means(float (*x)[DIM_MAX], uint32_t d, float *means)
{
    for (uint32_t c = 0; c < d; c++) {
        float column[TOKENS];
        for (uint32_t t = 0; t < TOKENS; t++)
            column[t] = x[t][c];
        means[c] = tree_sum(column, TOKENS) * 0.0625f;
    }
}

/* Store the channels with the largest |mean| and return what a decoder will add back. */
static void choose_offsets(const struct kvt_piece *piece, const float *means, uint8_t *out,
                           float *stored)
{
    uint8_t *at = out + piece->offsets_at;
    memset(at, 0, KVT_OFFSETS_BYTES);
    memset(stored, 0, piece->dim * sizeof(*stored));
    uint8_t taken[DIM_MAX] = {0};
    for (uint32_t k = 0; k < piece->offsets; k++) {
        uint32_t best = 0, best_magnitude = 0;
        int found = 0;
        for (uint32_t c = 0; c < piece->dim; c++) {
            uint32_t magnitude = kvt_float_bits(means[c]) & 0x7fffffffu;
            if (!taken[c] && (!found || magnitude > best_magnitude)) {
                best = c;
                best_magnitude = magnitude;
                found = 1;
            }
        }
        taken[best] = 1;
        uint16_t half = kvt_float_to_bf16(means[best]);
        at[2 * k] = (uint8_t)half;
        at[2 * k + 1] = (uint8_t)(half >> 8);
        at[16 + k] = (uint8_t)best;
        stored[best] = kvt_bf16_to_float(half);
    }
}

static void read_offsets(const struct kvt_piece *piece, const uint8_t *in, float *stored)
{
    const uint8_t *at = in + piece->offsets_at;
    memset(stored, 0, piece->dim * sizeof(*stored));
    for (uint32_t k = 0; k < piece->offsets; k++)
        stored[at[16 + k] & (piece->dim - 1)] =
            kvt_bf16_to_float(kvt_bf16_finite(get_half(at + 2 * k)));
}

/* ---- one row ---- */

struct row_result { /* energies in the domain of y, not yet divided by d */
    uint16_t scale;
    float energy; /* of y; uniform and gauss */
    float noise;  /* of the error */
};

static void transform(float *y, uint32_t d)
{
    for (uint32_t i = 0; i < d; i++)
        if (sign_is_negative(i))
            y[i] = -y[i];
    for (uint32_t h = 1; h < d; h *= 2)
        for (uint32_t i = 0; i < d; i += 2 * h)
            for (uint32_t j = i; j < i + h; j++) {
                float u = y[j], v = y[j + h];
                y[j] = u + v;
                y[j + h] = u - v;
            }
}

/* bf16(largest / q), one step up where the coarse steps of subnormals would let the largest
 * element fall more than half a step outside. */
static uint16_t uniform_scale(float largest, float q)
{
    uint16_t scale = kvt_float_to_bf16(largest / q);
    if (kvt_bf16_to_float(scale) * (q + 0.5f) < largest)
        scale++;
    return scale;
}

static int clamp(int value, int low, int high)
{
    return value < low ? low : value > high ? high : value;
}

static int code_uniform(const struct kvt_piece *piece, const float *y, uint8_t *codes,
                        struct row_result *result)
{
    int high = piece->bits == 4 ? 7 : piece->bits == 6 ? 31 : 127;
    int low = piece->coder == KVT_CODER_PLAIN ? -8 : -high;
    uint32_t mask = (1u << piece->bits) - 1u;
    uint32_t largest = largest_magnitude(y, piece->dim);
    if (largest >= KVT_MAGNITUDE_LIMIT)
        return KVT_E_NONFINITE;
    result->scale = uniform_scale(kvt_bits_float(largest), (float)high);
    float a = kvt_bf16_to_float(result->scale);
    float squares[DIM_MAX];
    for (uint32_t i = 0; i < piece->dim; i++) {
        int q = a == 0.0f ? 0 : clamp((int)lrintf(y[i] / a), low, high);
        codes[i] = (uint8_t)((uint32_t)q & mask);
        float error = y[i] - a * (float)q;
        squares[i] = error * error;
    }
    result->noise = tree_sum(squares, piece->dim);
    result->energy = sum_of_squares(y, piece->dim);
    return 0;
}

struct gauss_book {
    const uint8_t *levels;
    const uint8_t *thresholds; /* KVT_SEARCH_COUNT sets of count - 1 */
    uint32_t count;
    float twice_unit;
};

static struct gauss_book book_of(const struct kvt_piece *piece)
{
    if (piece->bits == 4)
        return (struct gauss_book){kvt_c4_levels, kvt_c4_thresholds[0], KVT_C4_COUNT,
                                   KVT_C4_TWICE_UNIT};
    return (struct gauss_book){kvt_c5_levels, kvt_c5_thresholds[0], KVT_C5_COUNT,
                               KVT_C5_TWICE_UNIT};
}

struct trial { /* one step width: the codes, sum of c*t and of c*c */
    uint8_t codes[DIM_MAX];
    int32_t num, den;
};

static void try_width(const struct gauss_book *book, int width, const int32_t *t, uint32_t d,
                      struct trial *trial)
{
    const uint8_t *thresholds = book->thresholds + (uint32_t)width * (book->count - 1);
    trial->num = 0;
    trial->den = 0;
    for (uint32_t i = 0; i < d; i++) {
        int32_t magnitude = t[i] < 0 ? -t[i] : t[i];
        uint32_t index = 0;
        while (index < book->count - 1 && thresholds[index] <= magnitude)
            index++;
        trial->codes[i] = (uint8_t)(index | (t[i] < 0 ? book->count : 0));
        trial->num += book->levels[index] * magnitude;
        trial->den += book->levels[index] * book->levels[index];
    }
}

/* Error of the chosen codes: of t in integers, as few roundings as possible, then back to y. */
static float gauss_noise(const struct trial *best, const int32_t *t, uint32_t d, float a,
                         float factor)
{
    int32_t energy = 0;
    for (uint32_t i = 0; i < d; i++)
        energy += t[i] * t[i];
    float step = a * factor, cross = step * (float)best->num;
    float noise = ((float)energy - cross) + (step * step * (float)best->den - cross);
    return noise > 0.0f ? noise / factor / factor : 0.0f;
}

static int code_gauss(const struct kvt_piece *piece, const float *y, uint8_t *codes,
                      struct row_result *result)
{
    struct gauss_book book = book_of(piece);
    uint32_t d = piece->dim;
    int32_t t[DIM_MAX];
    float square_sum = sum_of_squares(y, d);
    if ((kvt_float_bits(square_sum) & 0x7fffffffu) >= 0x7f800000u)
        return KVT_E_NONFINITE;
    float sigma = sqrtf(square_sum / (float)d);
    result->energy = square_sum;
    result->scale = 0;
    result->noise = square_sum;
    memset(codes, 0, d);
    if (sigma == 0.0f)
        return 0;
    float factor = book.twice_unit / sigma;
    for (uint32_t i = 0; i < d; i++)
        t[i] = (int32_t)lrintf(y[i] * factor);
    struct trial best = {.num = 0}, trial;
    float best_score = -1.0f;
    for (int width = 0; width < KVT_SEARCH_COUNT; width++) {
        try_width(&book, width, t, d, &trial);
        float score = (float)trial.num * (float)trial.num / (float)trial.den;
        if (score > best_score) {
            best_score = score;
            best = trial;
        }
    }
    result->scale = kvt_float_to_bf16((float)best.num / (float)best.den / factor);
    result->noise = gauss_noise(&best, t, d, kvt_bf16_to_float(result->scale), factor);
    memcpy(codes, best.codes, d);
    return 0;
}

/* ---- the tile ---- */

/* Sum of (a - b)^2. */
static float distance(const float *a, const float *b, uint32_t d)
{
    float left[DIM_MAX];
    for (uint32_t i = 0; i < d; i++)
        left[i] = a[i] - b[i];
    return sum_of_squares(left, d);
}

static int encode(const struct kvt_piece *piece, const void *rows, size_t stride_bytes,
                  uint8_t *out, struct kvt_tile_energy *energy)
{
    uint32_t d = piece->dim;
    float x[TOKENS][DIM_MAX], means[DIM_MAX] = {0}, stored[DIM_MAX] = {0};
    for (uint32_t t = 0; t < TOKENS; t++)
        kvt_half_to_floats(piece->dtype, (const char *)rows + t * stride_bytes, d, x[t]);
    if (piece->offsets > 0) {
        channel_means(x, d, means);
        choose_offsets(piece, means, out, stored);
    }
    if (energy != NULL)
        energy->residue = distance(means, stored, d);
    for (uint32_t t = 0; t < TOKENS; t++) {
        float y[DIM_MAX];
        uint8_t codes[DIM_MAX];
        struct row_result result;
        for (uint32_t i = 0; i < d; i++)
            y[i] = x[t][i] - stored[i];
        if (piece->coder != KVT_CODER_PLAIN)
            transform(y, d);
        int status = piece->coder == KVT_CODER_GAUSS ? code_gauss(piece, y, codes, &result)
                                                     : code_uniform(piece, y, codes, &result);
        if (status != 0)
            return status;
        pack_codes(piece, t, codes, out);
        put_scale(piece, t, result.scale, out);
        if (energy != NULL) {
            energy->rows[t] = result.energy / (float)d;
            energy->noise[t] = result.noise / (float)d;
        }
    }
    return 0;
}

static void centred(const struct kvt_piece *piece, const void *rows, size_t stride_bytes,
                    float *signal)
{
    uint32_t d = piece->dim;
    float x[TOKENS][DIM_MAX], means[DIM_MAX];
    for (uint32_t t = 0; t < TOKENS; t++)
        kvt_half_to_floats(piece->dtype, (const char *)rows + t * stride_bytes, d, x[t]);
    channel_means(x, d, means);
    for (uint32_t t = 0; t < TOKENS; t++)
        signal[t] = distance(x[t], means, d);
}

static int level_of_code(const struct kvt_piece *piece, uint8_t code)
{
    if (piece->coder == KVT_CODER_GAUSS) {
        struct gauss_book book = book_of(piece);
        int level = book.levels[code & (book.count - 1)];
        return code & book.count ? -level : level;
    }
    int sign = 1 << (piece->bits - 1);
    return (code ^ sign) - sign; /* two's complement of `bits` bits */
}

static void decode(const struct kvt_piece *piece, const uint8_t *in, void *rows,
                   size_t stride_bytes)
{
    uint32_t d = piece->dim;
    float stored[DIM_MAX] = {0};
    if (piece->offsets > 0)
        read_offsets(piece, in, stored);
    for (uint32_t t = 0; t < TOKENS; t++) {
        uint8_t codes[DIM_MAX];
        int32_t w[DIM_MAX];
        float x[DIM_MAX];
        float a =
            kvt_bf16_to_float(kvt_bf16_scale(get_half(in + piece->scales_at + 2 * (size_t)t)));
        unpack_codes(piece, t, in, codes);
        for (uint32_t i = 0; i < d; i++)
            w[i] = level_of_code(piece, codes[i]);
        if (piece->coder == KVT_CODER_PLAIN) {
            for (uint32_t i = 0; i < d; i++)
                x[i] = (float)w[i] * a;
            store_row(piece, x, (char *)rows + t * stride_bytes);
            continue;
        }
        for (uint32_t h = 1; h < d; h *= 2)
            for (uint32_t i = 0; i < d; i++)
                if ((i & h) == 0) {
                    int32_t u = w[i], v = w[i + h];
                    w[i] = u + v;
                    w[i + h] = u - v;
                }
        float step = a / (float)d;
        for (uint32_t i = 0; i < d; i++) {
            float r = (float)(sign_is_negative(i) ? -w[i] : w[i]) * step;
            x[i] = stored[i] + r;
        }
        store_row(piece, x, (char *)rows + t * stride_bytes);
    }
}

const struct kvt_codec_kernels kvt_codec_scalar = {
    .name = "scalar",
    .encode = encode,
    .centred = centred,
    .decode = decode,
};
