/* Which path is the faster one for jobs of few blocks on this device: measured, and kept as a small
 * table. Large jobs go by the copy engine; a job of one or a few blocks pays for its start, and the
 * SMs, which move and hash at once, may be done before a copy has begun.
 * Threads: kvt_gpu_tune() one at a time; the rest is pure. */
#ifndef KVT_GPU_TUNE_H
#define KVT_GPU_TUNE_H

#include "base/clock.h"
#include "gpu/gpu.h"

#define KVT_GPU_TUNE_SIZES 3u

struct kvt_gpu_tune_opts {
    uint32_t ctas[2];                    /* of restores and of evictions, as they will be used */
    uint32_t layers[KVT_GPU_TUNE_SIZES]; /* of 8 heads of 128, kv4: sizes of records, rising; 0, 0,
                                            0: 36 KiB, 0.27 MiB, 0.53 MiB */
    uint32_t runs;                       /* of each measurement, of which the median counts; 0: 9 */
    uint32_t blocks_max;                 /* the largest job that is looked at; 0: 16 */
};

struct kvt_gpu_tuned {
    uint32_t record_bytes[KVT_GPU_TUNE_SIZES];
    /* [restore, evict][size]: jobs of at most so many blocks go by the SMs; 0: none. */
    uint32_t sm_blocks[2][KVT_GPU_TUNE_SIZES];
};

/* Measure. 0; -ENOMEM; KVT_E_DEVICE. Blocks, for a tenth of a second; takes 45 MiB of the device
 * for as long. */
KVT_GPU_RESULT int kvt_gpu_tune(struct kvt_gpu *gpu, const struct kvt_clock *clock,
                                const struct kvt_gpu_tune_opts *opts, struct kvt_gpu_tuned *out);

/* The path for a job: COPY or SM. A table that is all zero says COPY. */
enum kvt_gpu_path kvt_gpu_tuned_path(const struct kvt_gpu_tuned *tuned, int evict,
                                     uint32_t record_bytes, size_t blocks);

#endif
