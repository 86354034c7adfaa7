/* Constants of the codec, shared by all instruction sets. docs/codec.md lists them in hex. */
#ifndef KVT_CODEC_TABLES_H
#define KVT_CODEC_TABLES_H

#include <stdint.h>

/* Lloyd-Max levels of a Gaussian as int8 magnitudes, and the thresholds between them on a grid of
 * half that step. The level index of t is the number of thresholds <= |t|. */
#define KVT_C4_COUNT 8u
#define KVT_C5_COUNT 16u
extern const uint8_t kvt_c4_levels[KVT_C4_COUNT];
extern const uint8_t kvt_c5_levels[KVT_C5_COUNT];
extern const uint8_t kvt_c4_thresholds[KVT_C4_COUNT - 1];
extern const uint8_t kvt_c5_thresholds[KVT_C5_COUNT - 1];
#define KVT_C4_TWICE_UNIT 0x1.73cedap+6f /* 2 * 46.476f */
#define KVT_C5_TWICE_UNIT 0x1.379582p+6f /* 2 * 38.948f */

/* Factors on sigma that the scale search tries, in this order. */
#define KVT_SEARCH_COUNT 3
#define KVT_SEARCH_0 1.0f
#define KVT_SEARCH_1 0x1.d1eb86p-1f /* 0.91f */
#define KVT_SEARCH_2 0x1.170a3ep+0f /* 1.09f */

/* Signs of the transform: element i of a piece is negated where bit i is set, bit 0 being the most
 * significant bit of the first byte. */
extern const uint8_t kvt_sign_bits[16];

/* Rows whose largest magnitude is not below 2^126 are refused, so that no decoded value overflows.
 * As float bits. */
#define KVT_MAGNITUDE_LIMIT 0x7e800000u

#endif
