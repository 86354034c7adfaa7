/* Single-producer single-consumer ring: see ring.h for layout, memory order and sleeping.
 *
 * Invariants: positions only grow; an offset is position modulo capacity; every frame is an 8-byte
 * frame word and its bytes, contiguous; what does not fit before the end is skipped by a filler
 * that ends exactly at the end. Each side keeps its own position privately, so a peer that
 * scribbles over shared memory can stop the traffic, but not make this side read or write out of
 * bounds. Threads: one producer, one consumer. It does not protect frame contents against a hostile
 * peer that rewrites them after publication: consumers copy what they check.
 */
#include "base/ring.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdbool.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "kvtier/error.h"

/* Frame word: low half the bytes that follow, high half what it is. */
#define FRAME_MESSAGE 0x4b564652u /* "KVFR" */
#define FRAME_FILLER 0x4b564649u  /* "KVFI" */
#define FRAME_WORD_BYTES 8u

static uint64_t frame_word(uint32_t kind, uint32_t bytes)
{
    return (uint64_t)kind << 32 | bytes;
}

static bool capacity_ok(uint64_t capacity)
{
    return capacity >= KVT_RING_CAPACITY_MIN && capacity <= KVT_RING_CAPACITY_MAX &&
           (capacity & (capacity - 1)) == 0;
}

size_t kvt_ring_bytes(uint64_t capacity)
{
    return capacity_ok(capacity) ? sizeof(struct kvt_ring_shared) + (size_t)capacity : 0;
}

int kvt_ring_init(struct kvt_ring *ring, void *memory, uint64_t capacity, int event_fd, int init)
{
    if (!memory || (uintptr_t)memory % 64 || !capacity_ok(capacity))
        return KVT_E_INVAL;
    *ring = (struct kvt_ring){
        .shared = memory,
        .data = (uint8_t *)memory + sizeof(struct kvt_ring_shared),
        .capacity = capacity,
        .event_fd = event_fd,
    };
    if (init) {
        atomic_init(&ring->shared->head, 0);
        atomic_init(&ring->shared->tail, 0);
        atomic_init(&ring->shared->sleeping, 0);
        atomic_init(&ring->shared->closed, 0);
    } else {
        /* acquire: pairs with the peer's release of its position */
        ring->head = atomic_load_explicit(&ring->shared->head, memory_order_acquire);
        ring->tail = atomic_load_explicit(&ring->shared->tail, memory_order_acquire);
        if (ring->head % 8 || ring->tail % 8 || ring->tail - ring->head > capacity)
            return KVT_E_CORRUPT;
    }
    return 0;
}

static void ring_event(int fd)
{
    uint64_t one = 1;

    if (fd < 0)
        return;
    /* EAGAIN: the counter is full, so the fd is readable anyway */
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

void kvt_ring_word_wake(_Atomic uint32_t *word)
{
    uint32_t asleep = KVT_RING_BY_WORD;

    /* one that is about to sleep finds another value; an announcement for the event fd stays */
    (void)atomic_compare_exchange_strong_explicit(word, &asleep, KVT_RING_AWAKE,
                                                  memory_order_seq_cst, memory_order_seq_cst);
    /* Not private: the other side may be another process. It fails when nobody has it mapped. */
    (void)syscall(SYS_futex, (void *)word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

void kvt_ring_word_wait(_Atomic uint32_t *word, int64_t timeout_ns)
{
    struct timespec limit = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};

    /* any end will do: the caller looks at everything again */
    (void)syscall(SYS_futex, (void *)word, FUTEX_WAIT, KVT_RING_BY_WORD, &limit, NULL, 0);
}

void kvt_ring_bell(struct kvt_ring *ring)
{
    struct kvt_ring_shared *shared = ring->shared;

    if (atomic_load_explicit(&shared->sleeping, memory_order_seq_cst)) {
        /* one ring per sleep is enough; the consumer's kvt_ring_awake() is the partner */
        uint32_t how =
            atomic_exchange_explicit(&shared->sleeping, KVT_RING_AWAKE, memory_order_seq_cst);

        if (how == KVT_RING_BY_WORD)
            kvt_ring_word_wake(&shared->sleeping);
        else if (how != KVT_RING_AWAKE)
            ring_event(ring->event_fd);
    }
}

void kvt_ring_close(struct kvt_ring *ring)
{
    /* seq_cst: the same handshake as a push's; acquire: what follows stays behind it and pairs with
     * kvt_ring_closed() */
    atomic_exchange_explicit(&ring->shared->closed, 1, memory_order_seq_cst);
    kvt_ring_bell(ring);
}

int kvt_ring_closed(struct kvt_ring *ring)
{
    /* An add of nothing instead of a load: its release half keeps earlier reads before it. */
    return atomic_fetch_add_explicit(&ring->shared->closed, 0, memory_order_seq_cst) != 0;
}

void *kvt_ring_reserve(struct kvt_ring *ring, uint32_t bytes)
{
    uint64_t head, used, offset, need, to_end;

    if (!bytes || bytes % 8 || bytes > ring->capacity / 4)
        return NULL;
    /* acquire: pairs with pop()'s release, so the consumer is done with the space */
    head = atomic_load_explicit(&ring->shared->head, memory_order_acquire);
    used = ring->tail - head;
    if (used > ring->capacity)
        return NULL; /* a peer's nonsense: looks full for ever */
    offset = ring->tail & (ring->capacity - 1);
    to_end = ring->capacity - offset;
    need = FRAME_WORD_BYTES + bytes;
    if (need > to_end) {
        if (to_end + need > ring->capacity - used)
            return NULL;
        uint64_t word = frame_word(FRAME_FILLER, (uint32_t)(to_end - FRAME_WORD_BYTES));
        memcpy(ring->data + offset, &word, sizeof word);
        ring->tail += to_end;
        /* release: the filler word before the position that shows it */
        atomic_store_explicit(&ring->shared->tail, ring->tail, memory_order_release);
        offset = 0;
    } else if (need > ring->capacity - used) {
        return NULL;
    }
    return ring->data + offset + FRAME_WORD_BYTES;
}

void kvt_ring_push_quiet(struct kvt_ring *ring, uint32_t bytes)
{
    uint64_t offset = ring->tail & (ring->capacity - 1);
    uint64_t word = frame_word(FRAME_MESSAGE, bytes);

    memcpy(ring->data + offset, &word, sizeof word);
    ring->tail += FRAME_WORD_BYTES + bytes;
    /* seq_cst (and so release): Dekker with kvt_ring_sleep(), which stores sleeping, loads tail */
    atomic_store_explicit(&ring->shared->tail, ring->tail, memory_order_seq_cst);
}

void kvt_ring_push(struct kvt_ring *ring, uint32_t bytes)
{
    kvt_ring_push_quiet(ring, bytes);
    kvt_ring_bell(ring);
}

static void give_back(struct kvt_ring *ring, uint64_t bytes)
{
    ring->head += bytes;
    /* release: our reads of the frame before the producer may overwrite it */
    atomic_store_explicit(&ring->shared->head, ring->head, memory_order_release);
}

int kvt_ring_peek(struct kvt_ring *ring, const void **frame)
{
    for (;;) {
        /* acquire: pairs with kvt_ring_push_quiet() */
        uint64_t tail = atomic_load_explicit(&ring->shared->tail, memory_order_acquire);
        uint64_t used = tail - ring->head;
        uint64_t offset = ring->head & (ring->capacity - 1);
        uint64_t to_end = ring->capacity - offset;
        uint64_t word;
        uint32_t bytes;

        if (!used)
            return 0;
        if (used > ring->capacity || used % 8)
            return KVT_E_CORRUPT;
        memcpy(&word, ring->data + offset, sizeof word);
        bytes = (uint32_t)word;
        if (word >> 32 == FRAME_FILLER) {
            if (bytes + (uint64_t)FRAME_WORD_BYTES != to_end || to_end > used)
                return KVT_E_CORRUPT;
            give_back(ring, to_end);
            continue;
        }
        if (word >> 32 != FRAME_MESSAGE || !bytes || bytes % 8 || bytes > ring->capacity / 4 ||
            bytes + (uint64_t)FRAME_WORD_BYTES > KVT_MIN(to_end, used))
            return KVT_E_CORRUPT;
        ring->peeked = FRAME_WORD_BYTES + bytes;
        *frame = ring->data + offset + FRAME_WORD_BYTES;
        return (int)bytes;
    }
}

void kvt_ring_pop(struct kvt_ring *ring)
{
    uint64_t bytes = ring->peeked;

    ring->peeked = 0;
    if (bytes)
        give_back(ring, bytes);
}

static bool announce(struct kvt_ring *ring, uint32_t how)
{
    /* seq_cst on all: Dekker with kvt_ring_push_quiet() and kvt_ring_close() */
    atomic_store_explicit(&ring->shared->sleeping, how, memory_order_seq_cst);
    if (atomic_load_explicit(&ring->shared->tail, memory_order_seq_cst) == ring->head &&
        !atomic_load_explicit(&ring->shared->closed, memory_order_seq_cst))
        return true;
    kvt_ring_awake(ring);
    return false;
}

int kvt_ring_sleep(struct kvt_ring *ring)
{
    return announce(ring, KVT_RING_BY_EVENT);
}

_Atomic uint32_t *kvt_ring_sleep_word(struct kvt_ring *ring)
{
    return announce(ring, KVT_RING_BY_WORD) ? &ring->shared->sleeping : NULL;
}

void kvt_ring_awake(struct kvt_ring *ring)
{
    /* relaxed: a producer that still sees 1 rings once too often, which is harmless */
    atomic_store_explicit(&ring->shared->sleeping, KVT_RING_AWAKE, memory_order_relaxed);
}
