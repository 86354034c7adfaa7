/* The codec alone: blocks of a pool <-> payload bytes. For people who only want the compression,
 * and for everything above it in kvtier.
 *
 * docs/codec.md defines the arithmetic and the layout bit by bit; every instruction set gives the
 * same bytes. Nothing here allocates, blocks, prints or keeps state.
 * Thread rule: any thread. Error rule: error.h. Lifetime: no object outlives a call.
 * The instruction set is chosen at first use; KVTIER_CODEC_ISA=scalar|avx2 forces one.
 */
#ifndef KVTIER_CODEC_H
#define KVTIER_CODEC_H

#include <kvtier/error.h>
#include <kvtier/layout.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of the coded bytes; part of every namespace. 0 until the GPU kernels agree with it. */
#define KVT_CODEC_FORMAT_VERSION 0u

/* Name of the instruction set in force: "scalar", "avx2". Static string. */
const char *kvt_codec_isa(void);

/* Parse "raw", "int4", "kv4", "kv5", "kv6", "kv8"; returns the level, or KVT_E_INVAL.
 * kvt_level_name() is the inverse; NULL for a number that is no level. */
int kvt_level_parse(const char *name);
const char *kvt_level_name(int level);

/* Whether this build can code and decode the level (1) or not (0). */
int kvt_level_supported(int level);

/* The level a part really gets in a uniform map of `level`: MLA is never below kv8; opaque and
 * byte parts are raw. */
int kvt_level_for_part(int level, const struct kvt_part *part);

/* Bits per element of one (token, head) row of head_dim elements, scales and offsets included,
 * record header and padding not. key: 1 for K (offsets are stored), 0 for V. */
double kvt_level_bits(int level, uint32_t head_dim, int dtype, int key);

/* Tokens of a block of the group; the layout's when it is not listed. */
uint32_t kvt_group_tokens(const struct kvt_layout *layout, uint16_t group);

/* Check a layout: struct_size, limits, multiples. 0, KVT_E_VERSION, KVT_E_INVAL, KVT_E_LIMIT. */
int kvt_layout_check(const struct kvt_layout *layout);

/* Check that a pool can serve the layout: place count, strides, extents that do not overflow.
 * 0, KVT_E_VERSION, KVT_E_LAYOUT, KVT_E_INVAL. */
int kvt_pool_check(const struct kvt_layout *layout, const struct kvt_pool_desc *pool);

/* Bytes of the payload of one block of `group` coded by the uniform map `level` (no record header,
 * no padding to 4 KiB). Multiple of 16. 0 when the layout has no part in the group or the level is
 * unsupported. layout must have passed kvt_layout_check(). */
size_t kvt_payload_bytes(const struct kvt_layout *layout, uint16_t group, int level);

/* What the guard saw while encoding; all fields are outputs. */
struct kvt_encode_report {
    float sqnr_db_min; /* worst centred K SQNR over (part, head, tile); +inf when none coded */
    uint32_t part;     /* where the worst was */
    uint32_t head;
    uint32_t tile;
};

/* Encode page `block` of a host pool into payload (kvt_payload_bytes() bytes, 16-byte aligned;
 * every byte of it is written).
 * guard:  0 skips the quality guard, 1 applies it.
 * report: optional.
 * Returns 0; KVT_E_GUARD a (part, head, tile) of K is worse than the level's threshold;
 *         KVT_E_NONFINITE NaN, Inf or an overflowing scale: store the block at raw;
 *         KVT_E_INVAL block out of range or payload_len too small. On error payload is undefined.
 * layout and pool must have passed kvt_layout_check() and kvt_pool_check(). */
int kvt_encode_block(const struct kvt_layout *layout, uint16_t group, int level,
                     const struct kvt_pool_desc *pool, uint32_t block, void *payload,
                     size_t payload_len, int guard, struct kvt_encode_report *report);

/* Decode a payload into page `block` of a host pool: every element of the group's parts is written.
 * The payload is trusted to be what the encoder made (checksums are the caller's business), yet no
 * payload, however hostile, makes it read or write out of bounds.
 * Returns 0; KVT_E_INVAL block out of range or payload_len wrong. */
int kvt_decode_block(const struct kvt_layout *layout, uint16_t group, int level,
                     const void *payload, size_t payload_len, const struct kvt_pool_desc *pool,
                     uint32_t block);

/* ---- level maps: one level per (part, head) ----
 * A map is an array of 4-bit enum kvt_level, two per byte, the first in the low bits: one for each
 * head of each part of the group, in the order of parts and heads. Opaque and byte parts are raw,
 * MLA is kv8 or raw. A uniform map is the level itself: the functions above. */

/* Entries of a map of the group: the sum of heads over its parts. A map has (entries + 1) / 2
 * bytes. */
uint32_t kvt_map_entries(const struct kvt_layout *layout, uint16_t group);

static inline int kvt_map_get(const uint8_t *map, uint32_t entry)
{
    return map[entry / 2] >> (entry % 2 * 4) & 15;
}
static inline void kvt_map_set(uint8_t *map, uint32_t entry, int level)
{
    map[entry / 2] = (uint8_t)((map[entry / 2] & (entry % 2 ? 0x0f : 0xf0)) |
                               (unsigned)level << (entry % 2 * 4));
}

/* Bytes of the payload of one block under the map; 0 when a level of it is not one that its part
 * can have. *floor (optional): the lowest level of the parts that are coded, RAW when none is. */
size_t kvt_map_payload_bytes(const struct kvt_layout *layout, uint16_t group, const uint8_t *map,
                             int *floor);

/* kvt_encode_block() and kvt_decode_block() under a map; the same bytes where it is uniform. */
int kvt_encode_map(const struct kvt_layout *layout, uint16_t group, const uint8_t *map,
                   const struct kvt_pool_desc *pool, uint32_t block, void *payload,
                   size_t payload_len, int guard, struct kvt_encode_report *report);
int kvt_decode_map(const struct kvt_layout *layout, uint16_t group, const uint8_t *map,
                   const void *payload, size_t payload_len, const struct kvt_pool_desc *pool,
                   uint32_t block);

/* Raise each entry of a key whose data in page `block` its level cannot hold (guard) to the lowest
 * level that can, raw at worst; data with NaN or Inf is passed over. Nothing is lowered. Slower
 * than encoding. Returns the entries raised; KVT_E_INVAL. */
long kvt_map_fit(const struct kvt_layout *layout, uint16_t group, uint8_t *map,
                 const struct kvt_pool_desc *pool, uint32_t block);

#ifdef __cplusplus
}
#endif
#endif
