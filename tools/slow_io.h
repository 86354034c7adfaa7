/* A drive that is slower than the real one: wraps an I/O backend and holds the completions of reads
 * back until a drive of the given rate and latency would have served them, one after the other.
 * Writes pass as they are. For benchmarks and tests of what is decided by measured speed.
 * Threads: one instance has the owner of the backend; the speed may be changed by any other.
 */
#ifndef KVT_TOOLS_SLOW_IO_H
#define KVT_TOOLS_SLOW_IO_H

#include <stdatomic.h>

#include "io/io.h"

/* Shared by all instances that are made with it; outlives them. */
struct kvt_slow_speed {
    _Atomic uint64_t bytes_per_s; /* 0: as fast as it is */
    _Atomic uint64_t latency_ns;
};

/* For kvt_settings.io_wrap: arg is a struct kvt_slow_speed. Takes inner over; NULL: no memory, or
 * no timer, and inner stays the caller's. */
struct kvt_io *kvt_slow_io_new(void *arg, struct kvt_io *inner);

#endif
