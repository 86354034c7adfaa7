/* The shape of a KV cache: blocks, parts, pools, levels and keys. Plain data, no functions that
 * need a cache.
 *
 * Words: a token block is block_tokens consecutive tokens of one sequence; a part is one tensor
 * slice of it (layer, K or V or MLA latent or opaque); a pool is engine memory that holds many
 * blocks ("pages") and is described by one base address and byte strides per part.
 * Thread rule: any thread, plain data. Error rule: see error.h.
 * Lifetime: arrays that a struct points to are copied by every function that takes it, and may be
 * freed on return.
 */
#ifndef KVTIER_LAYOUT_H
#define KVTIER_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Hard limits. They bound every size that comes from a file or a peer. */
#define KVT_HASH_BYTES_MAX 32u     /* engine hash in a key */
#define KVT_NS_BYTES 16u           /* namespace: first 16 bytes of a SHA-256 */
#define KVT_PARTS_MAX 4096u        /* parts of a layout */
#define KVT_HEADS_MAX 1024u        /* KV heads of a part */
#define KVT_HEAD_DIM_MAX 1024u     /* elements of a row; multiple of 16 */
#define KVT_BLOCK_TOKENS_MAX 4096u /* tokens of a block; multiple of 16 */
#define KVT_TILE_TOKENS 16u        /* tokens of a tile: what the codec works on */
#define KVT_GROUPS_MAX 16u         /* groups of a layout */
#define KVT_RECORD_BYTES_MAX (256u << 20)

/* Element type of a part in the pool. */
enum kvt_dtype {
    KVT_DTYPE_BF16 = 1,
    KVT_DTYPE_F16 = 2,
    KVT_DTYPE_F32 = 3,
    KVT_DTYPE_BYTE = 4 /* opaque or already 8-bit pages: stored raw, never coded */
};

enum kvt_part_kind {
    KVT_PART_K = 1,
    KVT_PART_V = 2,
    KVT_PART_MLA = 3,   /* one latent row per token (heads = 1); never below kv8 */
    KVT_PART_OPAQUE = 4 /* SSM/conv state and the like; always raw */
};

/* Levels, in order of quality: a larger number is never worse. A stored block satisfies a request
 * when its level is at or above the request's minimum. docs/codec.md defines each one. */
enum kvt_level {
    KVT_LEVEL_DEFAULT = 0, /* what the configuration says */
    KVT_LEVEL_INT4 = 1,
    KVT_LEVEL_KV4 = 2,
    KVT_LEVEL_KV5 = 3,
    KVT_LEVEL_KV6 = 4,
    KVT_LEVEL_KV8 = 5,
    KVT_LEVEL_RAW = 6
};

/* One part of a block, in the order in which parts stand in a record. */
struct kvt_part {
    uint8_t kind;      /* enum kvt_part_kind */
    uint8_t dtype;     /* enum kvt_dtype */
    uint16_t group;    /* block-table group; 0 for plain full attention */
    uint32_t layer;    /* engine layer index, for people and statistics */
    uint32_t heads;    /* KV heads of this shard */
    uint32_t head_dim; /* elements per (token, head) row: 16..1024, multiple of 16 */
};

/* What a hit of n tokens needs of a group: layers that share a block table. */
enum kvt_group_kind {
    KVT_GROUP_FULL = 0,   /* every block of [0, n): full attention */
    KVT_GROUP_WINDOW = 1, /* the blocks that cover the last window_tokens before n */
    KVT_GROUP_STATE = 2   /* the block that ends at n: state that sums up all before it (SSM) */
};

/* A group whose blocks are not those of the layout, or which is not full attention. */
struct kvt_group {
    uint16_t group; /* as in kvt_part.group */
    uint8_t kind;   /* enum kvt_group_kind */
    uint8_t reserved;
    uint32_t block_tokens;  /* 1..4096; a multiple of 16 unless all its parts are stored raw
                               (opaque or byte); 0: the layout's */
    uint32_t window_tokens; /* WINDOW: more than 0; else 0 */
};

struct kvt_layout {
    size_t struct_size;    /* sizeof(struct kvt_layout) */
    uint32_t block_tokens; /* 16..4096, multiple of 16 */
    uint32_t part_count;
    const struct kvt_part *parts;
    uint32_t group_count; /* groups that stand in the list; the others are full, of block_tokens */
    const struct kvt_group *groups;
};

/* Where one part lies in a pool. The element (block b, head h, token t, index e) is at
 *   base + b*stride_block + h*stride_head + t*stride_token + e*stride_elem      (all bytes).
 * Strides may be in any order; each is a non-negative multiple of the element size. */
struct kvt_part_place {
    void *base;
    int64_t stride_block;
    int64_t stride_head;
    int64_t stride_token;
    int64_t stride_elem;
};

#define KVT_DEVICE_HOST (-1)

struct kvt_pool_desc {
    size_t struct_size;
    int32_t device;       /* KVT_DEVICE_HOST, or a CUDA device ordinal */
    uint32_t block_count; /* pages; block ids are < block_count */
    uint32_t place_count; /* equals the layout's part_count */
    const struct kvt_part_place *places;
};

/* Key of a block within a namespace: the engine's own hash, taken as it is. */
struct kvt_key {
    uint8_t hash[KVT_HASH_BYTES_MAX]; /* bytes after hash_len are ignored */
    uint8_t hash_len;                 /* 1..32 */
    uint8_t reserved;                 /* 0 */
    uint16_t group;
    uint32_t shard; /* rank; 0 where ranks hold the same bytes */
};

/* Where a block was found. */
enum kvt_tier {
    KVT_TIER_MISS = 0,
    KVT_TIER_DRAM = 1,
    KVT_TIER_DISK = 2,
    KVT_TIER_REMOTE = 3,
    KVT_TIER_PENDING = 4 /* being stored by somebody now: neither hit nor empty */
};

/* When a stored block is written to disk. */
enum kvt_write {
    KVT_WRITE_DEFAULT = 0, /* as configured ("write") */
    KVT_WRITE_THROUGH = 1, /* at once */
    KVT_WRITE_EVICT = 2,   /* when DRAM runs short of room, or on flush */
    KVT_WRITE_IDLE = 3,    /* when the store has nothing else to do, and as with EVICT */
    KVT_WRITE_AUTO = 4     /* at once while the disk has room; then when a block is about to leave
                              DRAM, half a minute after it was stored at the latest */
};

/* Everything that makes two KV caches incompatible. Strings are UTF-8 or arbitrary bytes given by
 * length through the *_len fields where present; NULL means empty. They never enter a path.
 * kvt_identity_init() zeroes the struct and sets struct_size. */
struct kvt_identity {
    size_t struct_size;
    const char *engine;     /* "llama.cpp", "vllm", ... */
    const char *key_scheme; /* how keys are made: "kvt-sha256-v1", "vllm-sha256-cbor", ... */
    const char *model;      /* model id */
    const char *revision;   /* revision, or weights digest in hex */
    const char *adapter;    /* LoRA weights digest, "" without */
    const char *layout;     /* engine's page layout name where it changes the bytes */
    const char *rope;       /* RoPE scaling, canonical text */
    const char *rotation;   /* cache rotation, canonical text */
    const char *extra;      /* anything else of the engine that changes KV bytes */
    const void *salt;       /* tenant salt: any bytes */
    size_t salt_len;
    uint32_t tp_size, pp_size, pp_rank; /* the TP rank is the key's shard */
};

#ifdef __cplusplus
}
#endif
#endif
