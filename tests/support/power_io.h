/* A drive with a volatile cache, over any other backend: the write list of a power loss.
 *
 * Every change that no sync has covered is kept, with what was there before. When the power goes
 * (power_io_loss()), each of them, on its own, stays whole, is lost, is torn at sectors, or leaves
 * garbage in its sectors; those that stay may land in another order; of the changes of names any
 * leading part stays. What a sync has covered is not touched. A sync covers the changes reported
 * before it was submitted. The backend below then holds what the next process finds.
 *
 * Requests run one by one, inside reap(). Threads: the owner of the instance.
 * Not in the model: a sync that lies (fault_io.h above this), damage to what is durable. */
#ifndef KVT_TESTS_POWER_IO_H
#define KVT_TESTS_POWER_IO_H

#include "base/rng.h"
#include "io/io.h"

enum power_loss {
    POWER_KEEPS = 0, /* the process dies, the machine does not: every change stays */
    POWER_DROPS,     /* only what is durable stays */
    POWER_TEARS,     /* any part of the rest: kept, lost, torn, in any order */
    POWER_GARBLES,   /* the same, and garbage where a write was under way */
    POWER_LOSSES
};

/* Owns inner from now on. NULL without memory. */
struct kvt_io *power_io_new(struct kvt_io *inner);
struct kvt_io *power_io_inner(struct kvt_io *io);
/* Nobody has a file open, requests that were not reaped are forgotten (each may have been done).
 * How many changes were not durable. */
uint32_t power_io_loss(struct kvt_io *io, enum power_loss loss, struct kvt_rng *rng);

#endif
