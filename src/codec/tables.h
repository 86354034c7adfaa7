/* Constants of the codec, shared by all instruction sets. docs/codec.md lists them in hex. */
#ifndef KVT_CODEC_TABLES_H
#define KVT_CODEC_TABLES_H

#include <stdint.h>

/* Lloyd-Max levels of a Gaussian as int8 magnitudes. Thresholds lie on a grid of half the levels'
 * step, one set for each step width that the search tries: the middle one, 0.91 and 1.09 of it. The
 * level index of t is the number of thresholds <= |t|. */
#define KVT_SEARCH_COUNT 3
#define KVT_C4_COUNT 8u
#define KVT_C5_COUNT 16u
extern const uint8_t kvt_c4_levels[KVT_C4_COUNT];
extern const uint8_t kvt_c5_levels[KVT_C5_COUNT];
extern const uint8_t kvt_c4_thresholds[KVT_SEARCH_COUNT][KVT_C4_COUNT - 1];
extern const uint8_t kvt_c5_thresholds[KVT_SEARCH_COUNT][KVT_C5_COUNT - 1];
#define KVT_C4_TWICE_UNIT 0x1.73cedap+6f /* 2 * 46.476f: grid steps of one sigma */
#define KVT_C5_TWICE_UNIT 0x1.379582p+6f /* 2 * 38.948f */

/* Signs of the transform: element i of a piece is negated where bit i is set, bit 0 being the most
 * significant bit of the first byte. */
extern const uint8_t kvt_sign_bits[16];

/* Rows whose largest magnitude is not below 2^126 are refused, so that no decoded value overflows.
 * As float bits. */
#define KVT_MAGNITUDE_LIMIT 0x7e800000u

#endif
