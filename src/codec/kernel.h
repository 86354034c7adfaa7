/* The seam between the block loop and the instruction sets: code and decode one piece of a tile.
 *
 * Rules for every implementation (docs/codec.md has the arithmetic):
 * 1. Same bits as scalar.c for every input, energies included.
 * 2. Reads 16 rows of piece->dim elements, writes exactly piece->bytes (encode) or those elements
 *    (decode); no alignment is assumed beyond the element's own.
 * 3. No state, no allocation. The caller has put the FPU into the mode of fpmode.h.
 */
#ifndef KVT_CODEC_KERNEL_H
#define KVT_CODEC_KERNEL_H

#include <stddef.h>

#include "codec/piece.h"

/* What the guard needs of a piece. */
struct kvt_tile_energy {
    float rows[KVT_TILE_TOKENS];  /* sum of (x - stored mean)^2 of each token */
    float noise[KVT_TILE_TOKENS]; /* sum of squared coding errors, before output rounding */
    float residue;                /* sum over the channels of (mean - stored mean)^2 */
};

struct kvt_codec_kernels {
    const char *name;
    /* rows: element 0 of token 0, elements contiguous; stride_bytes from token to token.
     * energy: NULL, or filled in (pieces of keys with offsets only).
     * Returns 0 or KVT_E_NONFINITE (out is then undefined). */
    int (*encode)(const struct kvt_piece *piece, const void *rows, size_t stride_bytes,
                  uint8_t *out, struct kvt_tile_energy *energy);
    /* Sum of (x - mean)^2 of each token, the mean being the channel's over the tile. */
    void (*centred)(const struct kvt_piece *piece, const void *rows, size_t stride_bytes,
                    float *signal);
    /* rows: where to write; every byte pattern of `in` is allowed. */
    void (*decode)(const struct kvt_piece *piece, const uint8_t *in, void *rows,
                   size_t stride_bytes);
};

extern const struct kvt_codec_kernels kvt_codec_scalar;
#if defined(__x86_64__)
extern const struct kvt_codec_kernels kvt_codec_avx2;
#endif

/* The kernels in force: the best that the CPU has, or what KVTIER_CODEC_ISA names (an unknown or
 * unavailable name falls back to scalar). Decided once, at first use. */
const struct kvt_codec_kernels *kvt_codec_kernels(void);

/* Every set that this machine can run, for tests and benchmarks; returns how many (at most max). */
size_t kvt_codec_kernels_all(const struct kvt_codec_kernels **sets, size_t max);

#endif
