/* A distribution of times or sizes: counts in buckets whose bounds double, and the sum of all
 * values. Threads: one at a time per distribution. Never allocates.
 */
#ifndef KVT_BASE_HIST_H
#define KVT_BASE_HIST_H

#include <stdint.h>

enum kvt_hist_unit { KVT_HIST_TIME, KVT_HIST_SIZE };

#define KVT_HIST_BOUNDS 25u /* 1 us to 17 s; 4 KiB to 64 GiB */

struct kvt_hist {
    uint64_t sum;                          /* nanoseconds or bytes */
    uint64_t buckets[KVT_HIST_BOUNDS + 1]; /* the last: beyond all bounds */
};

/* The upper bound of bucket i, which is part of it: i < KVT_HIST_BOUNDS. */
uint64_t kvt_hist_bound(enum kvt_hist_unit unit, uint32_t i);
void kvt_hist_add(struct kvt_hist *hist, enum kvt_hist_unit unit, uint64_t value);
/* Of a time that a clock measured; one that runs backwards counts as 0. */
void kvt_hist_time(struct kvt_hist *hist, int64_t from_ns, int64_t to_ns);

#endif
