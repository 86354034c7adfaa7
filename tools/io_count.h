/* An I/O backend over another one that counts what passes: requests and bytes by size. Tools and
 * tests only. Threads: the owner of the instance. */
#ifndef KVT_TOOLS_IO_COUNT_H
#define KVT_TOOLS_IO_COUNT_H

#include "io/io.h"

/* Sizes by powers of two: [0] 4 KiB and less, [1] to 8 KiB, ... [14] 64 MiB and more. */
#define KVT_IO_COUNT_SIZES 15u

struct kvt_io_counts {
    uint64_t requests[KVT_IO_COUNT_SIZES];
    uint64_t total;
    uint64_t bytes;
};

/* Wrap `inner`, which is owned from then on. NULL without memory: inner is left alone. */
struct kvt_io *kvt_io_count_new(struct kvt_io *inner);
/* What was submitted so far; kind: KVT_IO_READ or KVT_IO_WRITE. */
const struct kvt_io_counts *kvt_io_count_of(const struct kvt_io *io, int kind);
void kvt_io_count_reset(struct kvt_io *io);
/* The upper bound of a size class in bytes. */
uint64_t kvt_io_count_size(unsigned size);

#endif
