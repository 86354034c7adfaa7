/* Parts of the AVX2 kernels, one file each; avx2.c makes the table of them. Only files compiled
 * with -mavx2 -mf16c include this. No FMA: the bits are scalar.c's. */
#ifndef KVT_CODEC_AVX2_H
#define KVT_CODEC_AVX2_H

#include "codec/kernel.h"

/* Loops over registers must disappear, or the registers live in memory. */
#if !defined(__OPTIMIZE__)
#define KVT_AVX2_UNROLL
#elif defined(__clang__)
#define KVT_AVX2_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KVT_AVX2_UNROLL _Pragma("GCC unroll 16")
#endif

/* kv4 nibble -> signed level + 128. */
extern const uint8_t kvt_avx2_c4_biased[16];

/* avx2_decode.c: kv4, kv5, kv6, kv8 (hands int4 on). */
void kvt_avx2_decode(const struct kvt_piece *piece, const uint8_t *in, void *rows,
                     size_t stride_bytes);
/* avx2_encode.c: likewise. */
void kvt_avx2_centred(const struct kvt_piece *piece, const void *rows, size_t stride_bytes,
                      float *signal);
int kvt_avx2_encode(const struct kvt_piece *piece, const void *rows, size_t stride_bytes,
                    uint8_t *out, struct kvt_tile_energy *energy);

/* avx2_output.c: w as avx2_decode.c leaves it, 32-byte aligned. */
struct kvt_avx2_target {
    char *rows;
    size_t stride_bytes;
    const float *steps; /* a / d / 65536 of each token */
    const float
        *means; /* KVT_AVX2_MEANS in the order of KVT_AVX2_MEAN_PLACE(), or NULL: all zero */
};

/* Where the mean of element e of a row stands: floats come in groups of four (e2 e1), each twice,
 * once for either lane. The second copy is 4 further on. */
#define KVT_AVX2_MEAN_PLACE(e) \
    (((e)&64) << 1 | ((e)&8) << 3 | ((e)&16) << 1 | ((e)&1) << 4 | ((e)&32) >> 2 | ((e)&6) >> 1)
#define KVT_AVX2_MEANS (2 * KVT_PIECE_DIM_MAX)

void kvt_avx2_output(uint32_t dim, int dtype, const int16_t *w, const struct kvt_avx2_target *to);

/* avx2_plain.c: int4. */
void kvt_avx2_decode_plain(const struct kvt_piece *piece, const uint8_t *in, void *rows,
                           size_t stride_bytes);
int kvt_avx2_encode_plain(const struct kvt_piece *piece, const void *rows, size_t stride_bytes,
                          uint8_t *out);

#endif
