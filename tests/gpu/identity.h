/* Random shapes, pools and values through kvt_gpu_evict() and kvt_gpu_restore(), against the scalar
 * codec and kvt_record_checksum(). The same code runs on a GPU and on the fake drivers. */
#ifndef KVT_TESTS_IDENTITY_H
#define KVT_TESTS_IDENTITY_H

#include <stddef.h>
#include <stdint.h>

#include "gpu/gpu.h"

struct identity_counts {
    uint64_t cases, blocks, coded_elements, guard, nonfinite, excused_or_fine, hostile;
    uint64_t ranges; /* of layers, but the last of each record */
    uint64_t levels[8] /* 0: mixed */, dtypes[4];
};

struct identity;

/* Device memory for pools is allocated once. NULL: no memory. */
struct identity *identity_new(struct kvt_gpu *gpu);
void identity_free(struct identity *identity);

/* From now on only shapes whose pool takes at most so many bytes (and 64 KiB at least). */
void identity_limit(struct identity *identity, size_t pool_bytes);

/* One case. 0, or -1 with a sentence in message (first difference, and the case's shape). */
int identity_case(struct identity *identity, uint64_t seed, struct identity_counts *counts,
                  char *message, size_t message_len);

#endif
