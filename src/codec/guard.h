/* The quality guard of one (part, head, tile) of keys. docs/codec.md, "Guard".
 *
 * It compares the coding error with the tile's energy around its own mean, since whole-tensor error
 * hides the ruin of what attention looks at; and row by row, so that one wild token cannot hide the
 * others. Pure functions; energies are summed over the pieces of the row.
 */
#ifndef KVT_CODEC_GUARD_H
#define KVT_CODEC_GUARD_H

#include "codec/kernel.h"

/* Smallest centred signal-to-noise ratio (power) at a level; 0 where there is no guard. */
float kvt_guard_ratio(int level);

struct kvt_guard_verdict {
    int pass;            /* 1: certainly; 0: ask kvt_guard_appeal() */
    float signal, noise; /* of the tile */
};

/* Judge a tile by what the encoder knows anyway. */
struct kvt_guard_verdict kvt_guard_judge(int level, const struct kvt_tile_energy *energy);

/* The full rule. centred: sum of (x - mean)^2 of each token's row; square_sums: sum of x*x.
 * Returns 1 pass, 0 not. Whatever passes kvt_guard_judge() passes here. */
int kvt_guard_appeal(int level, int dtype, const struct kvt_tile_energy *energy,
                     const float *centred, const float *square_sums);

#endif
