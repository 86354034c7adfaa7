/* Record: one block encoded. 128 B header, payload, zero padding to 4 KiB. The same bytes in DRAM,
 * on disk and on a shared store, so any one record can be verified alone. Pure functions.
 *
 * Checksum: XXH3-64 over the array of XXH3-64 of the record's 4 KiB pages, the checksum field of
 * page 0 taken as zero. Pages hash independently, so a GPU can compute it in parallel.
 */
#ifndef KVT_FORMAT_RECORD_H
#define KVT_FORMAT_RECORD_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvtier/layout.h"

#define KVT_RECORD_MAGIC 0x5254564bu /* "KVTR" */
#define KVT_RECORD_VERSION 0u        /* 1 once the GPU kernels agree with the codec */
#define KVT_PAGE_BYTES 4096u

/* Map ids (4 bits). 1..6 are the uniform maps of enum kvt_level; 7..15 are mixed: the payload
 * begins with its own map (struct kvt_record_map), and the id tells only the lowest level and,
 * within one (namespace, group), the length. So a record can be decoded alone, and a store need not
 * know what is in a map. */
#define KVT_MAP_IDS 16u
#define KVT_MAP_MIXED_FIRST 7u

/* The lowest level of the parts coded; 0: no such id. */
static inline int kvt_map_id_level(unsigned map)
{
    static const uint8_t levels[KVT_MAP_IDS] = {0,
                                                KVT_LEVEL_INT4,
                                                KVT_LEVEL_KV4,
                                                KVT_LEVEL_KV5,
                                                KVT_LEVEL_KV6,
                                                KVT_LEVEL_KV8,
                                                KVT_LEVEL_RAW,
                                                KVT_LEVEL_INT4,
                                                KVT_LEVEL_KV4,
                                                KVT_LEVEL_KV4,
                                                KVT_LEVEL_KV4,
                                                KVT_LEVEL_KV5,
                                                KVT_LEVEL_KV5,
                                                KVT_LEVEL_KV6,
                                                KVT_LEVEL_KV8,
                                                KVT_LEVEL_KV8};
    return map < KVT_MAP_IDS ? levels[map] : 0;
}

/* Start of a mixed record's payload; the levels follow, 4 bits each (kvt_map_get()), then zeros to
 * a multiple of 16 bytes, then the heads' bytes, then zeros to payload_bytes. */
struct kvt_record_map {
    uint32_t entries;     /* (part, head) of the group */
    uint32_t coded_bytes; /* of the heads, together */
    uint64_t zero;
};
static_assert(sizeof(struct kvt_record_map) == 16, "map header is 16 bytes");

/* A block's full key, as it stands in records, footers and messages. Compared as bytes: hash bytes
 * past hash_len are zero. */
struct kvt_full_key {
    uint8_t ns[KVT_NS_BYTES];
    uint8_t hash[KVT_HASH_BYTES_MAX];
    uint16_t group;
    uint8_t hash_len;
    uint8_t reserved;
    uint32_t shard;
};
static_assert(sizeof(struct kvt_full_key) == 56, "full key is 56 bytes");

/* On-disk header, little-endian. A parent has the same namespace, group and shard. */
struct kvt_record_header {
    uint32_t magic;                     /*   0 */
    uint16_t version;                   /*   4 */
    uint8_t map;                        /*   6 level map id */
    uint8_t parent_len;                 /*   7 0: no parent */
    struct kvt_full_key key;            /*   8 */
    uint8_t parent[KVT_HASH_BYTES_MAX]; /* 64 */
    uint32_t first_pos;                 /*  96 position of the block's first token */
    uint32_t record_bytes;              /* 100 whole record, multiple of 4096 */
    uint32_t payload_bytes;             /* 104 */
    uint32_t flags;                     /* 108 0 */
    uint64_t sequence;                  /* 112 store-wide, given at ALLOC; higher wins */
    uint64_t checksum;                  /* 120 */
};
static_assert(sizeof(struct kvt_record_header) == 128, "record header is 128 bytes");
static_assert(offsetof(struct kvt_record_header, checksum) == 120, "checksum is last");

#define KVT_RECORD_RESULT __attribute__((warn_unused_result))

/* Bytes of a record with that payload. 0 when it would exceed KVT_RECORD_BYTES_MAX. */
uint32_t kvt_record_bytes(size_t payload_bytes);

/* Checksum of a whole record in memory; the field itself is skipped, so it may hold anything. */
uint64_t kvt_record_checksum(const void *record, uint32_t record_bytes);

/* Header fields that are plausible on their own: magic, version, sizes, lengths. 0, KVT_E_CORRUPT,
 * KVT_E_NEWER. */
KVT_RECORD_RESULT int kvt_record_header_check(const struct kvt_record_header *header);

/* Header check, expected key (optional) and checksum. want_checksum: the value that the store keeps
 * for this record, or 0 to trust the header's. 0; KVT_E_CORRUPT; KVT_E_NEWER (the checksum fits and
 * the version is newer). */
KVT_RECORD_RESULT int kvt_record_verify(const void *record, uint32_t record_bytes,
                                        const struct kvt_full_key *key, uint64_t want_checksum);

/* Canonical form: lengths in range, bytes past them and reserved ones zero. */
bool kvt_full_key_ok(const struct kvt_full_key *key);
bool kvt_parent_ok(const uint8_t parent[KVT_HASH_BYTES_MAX], uint8_t parent_len);

void kvt_full_key_make(struct kvt_full_key *out, const uint8_t ns[KVT_NS_BYTES],
                       const struct kvt_key *key);

#endif
