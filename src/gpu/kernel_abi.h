/* What the host tells the kernels: plain structs, the same in C and in CUDA C++.
 *
 * Everything is passed by value in the launch but the table of parts, which lies in device memory
 * and does not change during the life of a plan. All addresses are device addresses (pinned host
 * memory has one too). Sizes are asserted on both sides of the seam by kvt_gpu_abi checks below.
 */
#ifndef KVT_GPU_KERNEL_ABI_H
#define KVT_GPU_KERNEL_ABI_H

#include <stdint.h>

#define KVT_GPU_RECORDS_MAX 160u /* of one launch: their addresses fit a 4 KiB parameter */
#define KVT_GPU_WARPS 16u        /* of every CTA, but for */
#define KVT_GPU_ENCODE_WARPS 24u /* those of the encoders */
#define KVT_GPU_PAGE_BYTES 4096u
#define KVT_GPU_HEADER_BYTES 128u /* of a record */
#define KVT_GPU_CHECKSUM_AT 120u  /* within the header */
#define KVT_GPU_STATUS_OK 0xffffffffu
#define KVT_GPU_STATUS_GUARD 0u     /* low bit of a status word; the rest is the unit's place */
#define KVT_GPU_STATUS_NONFINITE 1u /* in the walk of the scalar encoder: the first one counts */

/* Shared memory of the encoders, bytes: at most 99 KiB (compute capability 8.6, 8.9, 12.0). The
 * level table holds one copy of each entry per lane, so that 32 random lookups never meet in one
 * bank. */
#define KVT_GPU_LEVELS 513u /* entries of -256 to 256: beyond all thresholds */
#define KVT_GPU_LEVELS_BYTES (KVT_GPU_LEVELS * 128u)
#define KVT_GPU_SIGNS_BYTES 256u
#define KVT_GPU_TURNS_BYTES 16u           /* of the dense encoders, before the stages */
#define KVT_GPU_C4_STAGE_BYTES 1088u      /* a piece of 128, keys */
#define KVT_GPU_C5_STAGE_BYTES 1344u      /* and its plane */
#define KVT_GPU_UNIFORM_STAGE_BYTES 2112u /* 8 bits */
#define KVT_GPU_ENCODE_C4_SHARED \
    (KVT_GPU_LEVELS_BYTES + KVT_GPU_SIGNS_BYTES + KVT_GPU_ENCODE_WARPS * KVT_GPU_C4_STAGE_BYTES)
#define KVT_GPU_ENCODE_C5_SHARED \
    (KVT_GPU_LEVELS_BYTES + KVT_GPU_SIGNS_BYTES + KVT_GPU_ENCODE_WARPS * KVT_GPU_C5_STAGE_BYTES)
#define KVT_GPU_ENCODE_UNIFORM_SHARED \
    (KVT_GPU_SIGNS_BYTES + KVT_GPU_ENCODE_WARPS * KVT_GPU_UNIFORM_STAGE_BYTES)
#define KVT_GPU_DENSE_C4_SHARED (KVT_GPU_ENCODE_C4_SHARED + KVT_GPU_TURNS_BYTES)
#define KVT_GPU_DENSE_C5_SHARED (KVT_GPU_ENCODE_C5_SHARED + KVT_GPU_TURNS_BYTES)

/* One part of the group, as the kernels walk it. A unit is one (head, tile) of a part: what one
 * warp does at a time. */
struct kvt_gpu_part {
    uint64_t base; /* pool address of block 0 */
    int64_t stride_block, stride_head, stride_token, stride_elem;
    uint32_t payload_at; /* of the part's first unit, from the payload's start */
    uint32_t unit_bytes; /* coded tile, or 16 raw rows */
    uint32_t first_unit; /* in the plan's own order: parts sorted by class */
    uint32_t order_at;   /* in the order of the payload */
    uint32_t tiles;      /* of a block */
    uint32_t head_dim;
    float guard_ratio; /* 0: not judged */
    uint8_t coder, bits, dtype, key;
    uint8_t element_bytes;
    uint8_t vector; /* rows can be read and written 16 bytes at a time */
    uint8_t reserved[6];
};

/* Encode and decode: units of records. */
struct kvt_gpu_coding {
    uint64_t parts;  /* device array of struct kvt_gpu_part, of this launch's class */
    uint64_t status; /* device array of uint32_t, one per record; encode only */
    uint32_t part_count;
    uint32_t first_unit;     /* of parts[0] */
    uint32_t unit_count;     /* of one record */
    uint32_t units_per_part; /* when all parts have the same number, else 0 */
    uint32_t records;
    uint32_t guard; /* judge keys */
    /* Of the dense encoders: so many units of keys come first; and a word on the device, all ones,
     * that counts the turns taken. */
    uint32_t key_units;
    uint32_t reserved;
    uint64_t turns;
    uint64_t payload[KVT_GPU_RECORDS_MAX];
    uint32_t block[KVT_GPU_RECORDS_MAX];
};

struct kvt_gpu_result { /* one per record, written by the kernel into pinned host memory */
    uint64_t checksum;
    uint32_t status; /* status word of the encoder, KVT_GPU_STATUS_OK when there was none */
    uint32_t done;   /* 1 */
};

/* Pages of records: checksum, and optionally header, padding and a copy. */
struct kvt_gpu_paging {
    uint64_t counters;    /* device array of uint32_t, one per record, zero before and after */
    uint64_t page_hashes; /* device array of uint64_t, total_pages per record */
    uint64_t status;      /* device array of uint32_t, or 0 */
    uint64_t results;     /* device address of an array of struct kvt_gpu_result */
    uint32_t records;
    uint32_t pages;      /* at from[] */
    uint32_t used_bytes; /* header and payload; what follows is zero (make) or hashed (check) */
    uint32_t make;       /* 1: put header, padding and checksum in place; 0: only look */
    /* Of `total_pages` of each record, those from first_page on are at from[] now (make: all). The
     * record is done when all have been seen, in any number of launches. */
    uint32_t first_page, total_pages;
    uint64_t from[KVT_GPU_RECORDS_MAX];
    uint64_t to[KVT_GPU_RECORDS_MAX];     /* equal to from: in place */
    uint64_t header[KVT_GPU_RECORDS_MAX]; /* make: where the 128 header bytes are */
};

#ifdef __cplusplus
#define KVT_GPU_ASSERT static_assert
#else
#define KVT_GPU_ASSERT _Static_assert
#endif
KVT_GPU_ASSERT(sizeof(struct kvt_gpu_part) == 80, "part");
KVT_GPU_ASSERT(sizeof(struct kvt_gpu_coding) == 56 + 12 * KVT_GPU_RECORDS_MAX, "coding");
KVT_GPU_ASSERT(sizeof(struct kvt_gpu_result) == 16, "result");
KVT_GPU_ASSERT(sizeof(struct kvt_gpu_paging) == 56 + 24 * KVT_GPU_RECORDS_MAX, "paging");

#endif
