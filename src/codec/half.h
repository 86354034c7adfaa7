/* float <-> bf16 and f16, in integer arithmetic: the same bits on every machine.
 *
 * Rounding is to nearest, ties to even. Subnormals are kept. Converting to bf16 does not look for
 * NaN (callers refuse non-finite data before it matters); converting to f16 saturates at +-65504,
 * so a decoded value is always finite.
 */
#ifndef KVT_CODEC_HALF_H
#define KVT_CODEC_HALF_H

#include <stdint.h>
#include <string.h>

#include "kvtier/layout.h"

#define KVT_F16_MAX 65504.0f /* 0x7bff */

static inline uint32_t kvt_float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float kvt_bits_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline float kvt_bf16_to_float(uint16_t half)
{
    return kvt_bits_float((uint32_t)half << 16);
}

static inline uint16_t kvt_float_to_bf16(float value)
{
    uint32_t bits = kvt_float_bits(value);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float kvt_f16_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t exponent = (half >> 10) & 31u;
    uint32_t fraction = half & 0x3ffu;
    if (exponent == 31u)
        return kvt_bits_float(sign | 0x7f800000u | (fraction << 13));
    if (exponent == 0u) { /* zero or subnormal: fraction * 2^-24, exact */
        float magnitude = (float)fraction * 0x1p-24f;
        return kvt_bits_float(sign | kvt_float_bits(magnitude));
    }
    return kvt_bits_float(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

static inline uint16_t kvt_float_to_f16(float value)
{
    uint32_t bits = kvt_float_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude < 0x38800000u) { /* below 2^-14: the ulp of 0.5 is 2^-24, so the sum rounds */
        uint32_t rounded = kvt_float_bits(kvt_bits_float(magnitude) + 0.5f) - 0x3f000000u;
        return (uint16_t)(sign | rounded);
    }
    magnitude += 0xfffu + ((magnitude >> 13) & 1u);
    uint32_t half = (magnitude - 0x38000000u) >> 13;
    return (uint16_t)(sign | (half > 0x7bffu ? 0x7bffu : half));
}

/* count elements of dtype BF16, F16 or F32 at `from` (any alignment) to float. */
static inline void kvt_half_to_floats(int dtype, const void *from, uint32_t count, float *to)
{
    for (uint32_t i = 0; i < count; i++) {
        uint16_t half;
        if (dtype == KVT_DTYPE_F32) {
            memcpy(&to[i], (const char *)from + 4 * (size_t)i, 4);
            continue;
        }
        memcpy(&half, (const char *)from + 2 * (size_t)i, 2);
        to[i] = dtype == KVT_DTYPE_BF16 ? kvt_bf16_to_float(half) : kvt_f16_to_float(half);
    }
}

/* What a decoder makes of a stored offset or scale, so that a damaged payload never gives NaN:
 * non-finite ones count as zero, and a scale has no sign. */
static inline uint16_t kvt_bf16_finite(uint16_t half)
{
    return (half & 0x7f80u) == 0x7f80u ? 0 : half;
}

static inline uint16_t kvt_bf16_scale(uint16_t half)
{
    return kvt_bf16_finite(half) & 0x7fffu;
}

#endif
