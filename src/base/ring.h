/* Single-producer single-consumer ring of framed messages in plain memory (private, or shared
 * between two processes). Frames are multiples of 8 bytes and never wrap: a filler frame skips the
 * end of the buffer.
 *
 * Memory order: the producer publishes `tail` with release after the frame's bytes; the consumer
 * reads it with acquire, and gives space back by a release store to `head`.
 * Sleeping: the consumer sets `sleeping`, rechecks, and waits on its event fd; the producer rings
 * the event fd only when `sleeping` is set (seq_cst on both sides: it is a Dekker handshake).
 * Who waits for nothing else sleeps on the word itself (a futex) and is woken without a descriptor.
 * Trust: sizes read from the ring are checked; a malformed ring gives KVT_E_CORRUPT.
 */
#ifndef KVT_BASE_RING_H
#define KVT_BASE_RING_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

struct kvt_ring_shared { /* lives in the (shared) mapping, 64-byte aligned, followed by data */
    _Alignas(64) _Atomic uint64_t head;     /* consumer position, bytes, monotonic */
    _Alignas(64) _Atomic uint64_t tail;     /* producer position */
    _Alignas(64) _Atomic uint32_t sleeping; /* enum kvt_ring_sleeping */
    _Atomic uint32_t closed;
    uint32_t reserved[14];
};

enum kvt_ring_sleeping { KVT_RING_AWAKE = 0, KVT_RING_BY_EVENT = 1, KVT_RING_BY_WORD = 2 };

struct kvt_ring { /* each side's private view */
    struct kvt_ring_shared *shared;
    uint8_t *data;
    uint64_t capacity; /* bytes, power of two */
    uint64_t head;     /* consumer's own position: never read back from shared memory */
    uint64_t tail;     /* producer's own position */
    uint64_t peeked;   /* bytes that pop() will give back; 0 when nothing was peeked */
    int event_fd;      /* rung by the producer, waited on by the consumer; borrowed; -1: none */
};

#define KVT_RING_CAPACITY_MIN 4096u
#define KVT_RING_CAPACITY_MAX (1u << 30)

/* Bytes of memory for a ring of `capacity` data bytes (a power of two in the range above); 0 when
 * the capacity is not one. */
size_t kvt_ring_bytes(uint64_t capacity);
/* Lay a ring out in zeroed memory (64-byte aligned), or attach to one already laid out (init = 0).
 * 0; KVT_E_INVAL. */
__attribute__((warn_unused_result)) int kvt_ring_init(struct kvt_ring *ring, void *memory,
                                                      uint64_t capacity, int event_fd, int init);

/* Producer: space for a frame of `bytes` (multiple of 8, > 0, <= capacity/4); NULL when full or
 * when `bytes` is not such a number. The frame becomes visible at kvt_ring_push(), which also rings
 * the consumer if it sleeps; it may push fewer bytes than were reserved, never more.
 * kvt_ring_push_quiet() shows the frame to a consumer that is awake and rings nobody: whoever has
 * more to push rings once for all of it, by kvt_ring_bell(), before it does anything else. */
void *kvt_ring_reserve(struct kvt_ring *ring, uint32_t bytes);
void kvt_ring_push(struct kvt_ring *ring, uint32_t bytes);
void kvt_ring_push_quiet(struct kvt_ring *ring, uint32_t bytes);
void kvt_ring_bell(struct kvt_ring *ring);

/* Consumer: the next frame (borrowed until kvt_ring_pop()). Returns its bytes, 0 when empty, or
 * KVT_E_CORRUPT. */
int kvt_ring_peek(struct kvt_ring *ring, const void **frame);
void kvt_ring_pop(struct kvt_ring *ring);

/* Producer: say that nothing in the ring counts any more and that nothing will come. Wakes the
 * consumer. */
void kvt_ring_close(struct kvt_ring *ring);
/* Consumer: whether it has been closed. When it says no, all that this thread has read so far was
 * read before anything that the producer writes after closing. */
int kvt_ring_closed(struct kvt_ring *ring);

/* Consumer: announce sleep; returns 1 when it is safe to wait on event_fd, 0 when a frame arrived
 * meanwhile or the ring is closed. kvt_ring_awake() ends it; it does not read event_fd (several
 * rings may share one): whoever waits on the fd empties it, before it looks into the rings. */
int kvt_ring_sleep(struct kvt_ring *ring);
void kvt_ring_awake(struct kvt_ring *ring);

/* Consumer: announce sleep on the word. NULL: a frame arrived meanwhile or the ring is closed.
 * kvt_ring_word_wait() then sleeps until the producer, or kvt_ring_word_wake(), ends it, or for
 * timeout_ns; it may end earlier, and uses no ring: its memory may be unmapped meanwhile. */
_Atomic uint32_t *kvt_ring_sleep_word(struct kvt_ring *ring);
void kvt_ring_word_wait(_Atomic uint32_t *word, int64_t timeout_ns);
void kvt_ring_word_wake(_Atomic uint32_t *word);

#endif
