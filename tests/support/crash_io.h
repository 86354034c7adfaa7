/* A drive that can lose power: wraps a memory backend and keeps, beside the live files, what a sync
 * has made durable.
 *
 * Model: a completed write, truncation, reservation or hole is durable after a sync of its file;
 * names (creation, removal, renaming) are durable in order, after a sync of the directory. A crash
 * keeps what is durable and, of the rest, anything: each write whole, torn at 512 B sectors, or not
 * at all, in any order; names up to a random point. crash_io_image() makes the files that the next
 * process would see, as a fresh memory backend; it may be asked any number of times, at any moment.
 * Threads: the owner of the instance. */
#ifndef KVT_TESTS_CRASH_IO_H
#define KVT_TESTS_CRASH_IO_H

#include "base/rng.h"
#include "io/io.h"

enum crash_mode {
    CRASH_PROCESS = 0, /* everything that was written survives */
    CRASH_NOTHING,     /* only what is durable */
    CRASH_RANDOM       /* any part of the rest */
};

struct kvt_io *crash_io_new(uint64_t capacity_bytes);
/* Called after every operation that changed something. */
void crash_io_hook(struct kvt_io *io, void (*fn)(void *ctx), void *ctx);
struct kvt_io *crash_io_image(struct kvt_io *io, enum crash_mode mode, struct kvt_rng *rng);

#endif
