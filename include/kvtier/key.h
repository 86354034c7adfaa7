/* Chained token keys, for engines that have no block hashes of their own (llama.cpp, transformers).
 *
 * key(block) = SHA-256(tag, parent, n, tokens as little-endian u32, typed extras), chained per
 * block; the root's parent is made from a salt. docs/format.md gives the exact bytes.
 * Thread rule: any. Error rule: error.h. No state; one digest context is allocated and freed per
 * call.
 */
#ifndef KVTIER_KEY_H
#define KVTIER_KEY_H

#include <kvtier/error.h>
#include <kvtier/layout.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Name of this scheme, for kvt_identity.key_scheme. */
#define KVT_KEY_SCHEME "kvt-sha256-v1"

/* An extra that distinguishes blocks with equal tokens: an image digest, an adapter, a prompt
 * template. Sorted by the caller; type and bytes both enter the hash. */
struct kvt_key_extra {
    uint32_t type;
    uint32_t len;
    const void *bytes;
};

/* The 32-byte parent of the first block of a sequence: SHA-256(tag "root", salt).
 * salt: any bytes, NULL when salt_len is 0. Returns 0, KVT_E_INVAL, -ENOMEM. */
int kvt_key_root(const void *salt, size_t salt_len, uint8_t root[32]);

/* Keys of the full blocks of a token list.
 * root:   from kvt_key_root(), or the hash of the block before tokens[0].
 * tokens: n_tokens ids. Only n_tokens / block_tokens blocks get a key; a partial tail has none.
 * extras: per-call extras, the same for every block (0 allowed).
 * keys:   output, room for max_keys; group and shard are copied into each.
 * Returns the number of keys written (min(full blocks, max_keys)), KVT_E_INVAL or -ENOMEM, after
 * which keys holds garbage. */
long kvt_key_chain(const uint8_t root[32], const uint32_t *tokens, size_t n_tokens,
                   uint32_t block_tokens, const struct kvt_key_extra *extras, size_t n_extras,
                   uint16_t group, uint32_t shard, struct kvt_key *keys, size_t max_keys);

/* Zero the identity, set struct_size and tp_size = pp_size = 1. */
void kvt_identity_init(struct kvt_identity *identity);

/* Namespace of a cache: the first 16 bytes of SHA-256 over the canonical, length-prefixed record of
 * the identity, the layout (kinds, dtypes, groups, layers, heads, dims, block tokens) and the codec
 * format version. Returns 0, KVT_E_VERSION, KVT_E_INVAL, -ENOMEM. */
int kvt_namespace_id(const struct kvt_identity *identity, const struct kvt_layout *layout,
                     uint8_t id[KVT_NS_BYTES]);

#ifdef __cplusplus
}
#endif
#endif
