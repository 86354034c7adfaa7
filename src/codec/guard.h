/* The quality guard of one (part, head, tile) of keys. docs/codec.md, "Guard".
 *
 * It compares the coding error with the tile's energy around its own mean, since whole-tensor error
 * hides the ruin of what attention looks at; and row by row, so that one wild token cannot hide the
 * others. Pure functions.
 */
#ifndef KVT_CODEC_GUARD_H
#define KVT_CODEC_GUARD_H

#include "codec/kernel.h"

/* Smallest centred signal-to-noise ratio (power) at a level; 0 where there is no guard. */
float kvt_guard_ratio(int level);

struct kvt_guard_verdict {
    int pass;            /* by the ratio alone; else ask kvt_guard_excused() */
    float signal, noise; /* of the tile */
};

/* Judge a tile by its energies, summed over the row's pieces. */
struct kvt_guard_verdict kvt_guard_judge(int level, const struct kvt_tile_energy *energy);

/* Second chance: an error within the input's own rounding passes. square_sums: sum of x*x of each
 * token's row. */
int kvt_guard_excused(int level, int dtype, const struct kvt_tile_energy *energy,
                      const float *square_sums);

#endif
