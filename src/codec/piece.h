/* A piece: d consecutive elements of a row (16, 32, 64 or 128), for the 16 tokens of a tile. The
 * unit that every instruction set codes, and where its bytes lie. Pure data.
 *
 *   codes   16 rows of d/2 bytes (nibbles) or d bytes (kv8)
 *   plane   kv5: 16 rows of d/8 bytes, kv6: 16 rows of d/4 bytes, else nothing
 *   scales  16 bf16, one per token
 *   offsets keys only, not int4: 8 bf16 values, 8 u8 channel indices, 8 zero bytes
 *
 * Pieces stand one after another; every size is a multiple of 16.
 */
#ifndef KVT_CODEC_PIECE_H
#define KVT_CODEC_PIECE_H

#include <stdint.h>

#include "kvtier/layout.h"

#define KVT_PIECE_DIM_MAX 128u
#define KVT_PIECE_DIM_MIN 16u
#define KVT_OFFSETS_MAX 8u    /* channels with a stored mean, at most d/4 */
#define KVT_OFFSETS_BYTES 32u /* of one piece */
/* Of the largest piece, kv8 keys: codes, scales, offsets. */
#define KVT_PIECE_BYTES_MAX \
    (KVT_TILE_TOKENS * KVT_PIECE_DIM_MAX + KVT_TILE_TOKENS * 2u + KVT_OFFSETS_BYTES)

/* How the numbers of a row are coded. */
enum kvt_coder {
    KVT_CODER_PLAIN = 1,   /* int4: uniform on x itself */
    KVT_CODER_GAUSS = 2,   /* Lloyd-Max levels on the transformed row, scale by search */
    KVT_CODER_UNIFORM = 3, /* uniform on the transformed row */
};

struct kvt_piece {
    uint8_t coder;      /* enum kvt_coder */
    uint8_t bits;       /* per element: 4, 5, 6 or 8 */
    uint8_t dtype;      /* enum kvt_dtype of the pool: BF16, F16 or F32 */
    uint8_t offsets;    /* number of stored channel means: 0, or min(8, d/4) */
    uint32_t dim;       /* d */
    uint32_t plane_at;  /* byte positions within the piece; codes are at 0 */
    uint32_t scales_at; /*                                                 */
    uint32_t offsets_at;
    uint32_t bytes;
};

/* Element bytes of a dtype; 0 when it is none. */
uint32_t kvt_dtype_bytes(int dtype);

/* Describe a piece. level: a coded level, int4 to kv8. key: K or MLA. dim: 16, 32, 64, 128. */
void kvt_piece_init(struct kvt_piece *piece, int level, int dtype, int key, uint32_t dim);

/* The greedy split of a row: the largest power of two <= rest and <= 128. rest: multiple of 16. */
static inline uint32_t kvt_piece_next_dim(uint32_t rest)
{
    uint32_t dim = KVT_PIECE_DIM_MAX;
    while (dim > rest)
        dim >>= 1;
    return dim;
}

/* Whether the codec treats the part as keys: stored channel means, guard. */
static inline int kvt_part_is_key(const struct kvt_part *part)
{
    return part->kind == KVT_PART_K || part->kind == KVT_PART_MLA;
}

/* Bytes of one (part, head) tile coded at `level` (not raw). */
uint32_t kvt_tile_bytes(int level, const struct kvt_part *part);

#endif
