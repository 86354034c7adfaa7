/* Pinning: keeps the arena in physical memory, piece by piece, in the background.
 *
 *            start              last piece pinned
 *   OFF ------------> PINNING -------------------> READY
 *    ^                  |  a piece was refused: all pieces are let go
 *    |                  v
 *    `----- stop ---- FAILED (one warning; pinned_bytes is 0; everything runs on unpinned memory)
 *
 * Invariants: a piece is pinned by one hook at most; after kvt_pin_stop() none is. Pieces are whole
 * rows (huge pages), at most KVT_PIN_PIECE_BYTES, so that a close waits for one piece at most.
 * Threads: start, now and stop from one thread at a time (open, close, or under the caller's own
 * lock); state, text and bytes from any. Does not know what the memory holds.
 */
#ifndef KVT_CLIENT_PIN_H
#define KVT_CLIENT_PIN_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/log.h"

#define KVT_PIN_PIECE_BYTES (UINT64_C(1) << 30)

/* How memory is pinned. pin: 0, -EPERM, -ENOMEM, KVT_E_UNSUPPORTED, ...; it is all or nothing for
 * the range. unpin cannot fail: it is called for ranges that pin took. Both may take long. */
struct kvt_pin_ops {
    const char *name; /* for people: "mlock" */
    int (*pin)(void *ctx, void *base, uint64_t bytes);
    void (*unpin)(void *ctx, void *base, uint64_t bytes);
    void *ctx;
};

/* mlock(2): held in memory by the kernel, within RLIMIT_MEMLOCK. */
const struct kvt_pin_ops *kvt_pin_host_ops(void);

/* How a range is cut. Pure functions. */
struct kvt_pin_plan {
    uint64_t bytes;
    uint64_t piece_bytes; /* of each piece but the last */
    uint64_t count;
};
/* Pieces of at most max_bytes, no row of row_bytes cut in two: false when one row is larger than
 * max_bytes, or a number is 0. The last piece takes what is left. */
bool kvt_pin_plan(uint64_t bytes, uint64_t row_bytes, uint64_t max_bytes,
                  struct kvt_pin_plan *plan);
void kvt_pin_piece(const struct kvt_pin_plan *plan, uint64_t i, uint64_t *offset, uint64_t *bytes);
/* How much of [offset, offset + bytes) lies in the piece of offset: a copy by a device must not
 * cross from one pinned piece into the next. */
uint64_t kvt_pin_cut(const struct kvt_pin_plan *plan, uint64_t offset, uint64_t bytes);

enum kvt_pin_state { KVT_PIN_OFF = 0, KVT_PIN_PINNING, KVT_PIN_READY, KVT_PIN_FAILED };

struct kvt_pin {
    uint8_t *base;
    struct kvt_pin_plan plan;
    struct kvt_log log;
    struct kvt_pin_ops ops; /* name NULL: none so far */
    pthread_t thread;
    bool running;                  /* thread is to be joined */
    bool huge;                     /* shared memory: huge pages are made before it is pinned */
    _Atomic int stop;              /* relaxed: only a wish; the join orders the rest */
    _Atomic int state;             /* release by who pins, acquire by readers: orders error */
    _Atomic uint64_t pinned_bytes; /* relaxed: a number for people */
    _Atomic int error;             /* of the piece that was refused */
};

/* Over bytes at base, rows of row_bytes. Nothing is pinned yet; needs no undoing. Where the memory
 * is shared and whoever made it wants huge pages, `huge` is set after it: pages that a device has
 * pinned stay as small as they are. */
void kvt_pin_init(struct kvt_pin *pin, void *base, uint64_t bytes, uint64_t row_bytes,
                  const struct kvt_log *log);

/* Pin in the background. With the hook that is at work, or has failed, nothing happens; another
 * one takes over: what the first has pinned is let go before. 0; a negative error: no thread. */
__attribute__((warn_unused_result)) int kvt_pin_start(struct kvt_pin *pin,
                                                      const struct kvt_pin_ops *ops);
/* The same, here and now. 0, or why it is not pinned; no warning is logged. */
__attribute__((warn_unused_result)) int kvt_pin_now(struct kvt_pin *pin,
                                                    const struct kvt_pin_ops *ops);
/* Wait for the thread (one piece at most) and let go of everything. Idempotent. */
void kvt_pin_stop(struct kvt_pin *pin);

enum kvt_pin_state kvt_pin_state(const struct kvt_pin *pin);
uint64_t kvt_pin_bytes(const struct kvt_pin *pin);
/* "off", "pinning", "ready", "failed: ..." in buffer. */
const char *kvt_pin_text(const struct kvt_pin *pin, char *buffer, size_t len);

/* Why `bytes` could not be pinned by a hook, and what to do about it: one sentence. */
void kvt_pin_describe(const char *name, uint64_t bytes, int error, char *text, size_t len);

#endif
