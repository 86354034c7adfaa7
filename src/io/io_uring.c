/* The uring engine: data requests through a ring of the kernel (io_uring), one ring per instance.
 *
 *   owner: submit -> reads | writes -> ring -> kernel -> completion -> next step | done -> reap
 *
 * A request may take several trips: the rest of a short transfer; buffered, two more that start
 * the write-back and drop the pages (posix_transfer.c says why).
 *
 * Invariants
 *  1. Exactly one completion per accepted request. The event fd is readable whenever reap() has
 *     something to give or to do; it may be readable without.
 *  2. Requests in flight may run in any order. Reads go to the kernel at once; of writes and syncs
 *     at most WRITES_MAX are there at a time, so that a queue of them does not stand before a read.
 *  3. At most KVT_IO_FLIGHT_MAX requests between submit and reap; the completion ring has room for
 *     all of them, so it never overflows.
 *  4. No kernel thread spins for us (no SQPOLL), and nothing polls a device (no IOPOLL).
 * Threads: the owner calls everything. Allocates at creation only. ThreadSanitizer sees nothing of
 * what the kernel does to our memory: it proves nothing about this file.
 */
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/fd.h"
#include "io/io_common.h"
#include "io/io_engine.h"

#define SQ_ENTRIES 256u
#define WRITES_MAX 4u
/* Tries of one trip that failed for a passing reason; all but the first by a thread of the kernel's
 * own, which may wait. */
#define AGAIN_MAX 8u
/* Tries, a millisecond apart, to get what is queued into the kernel before it is given up. */
#define STOP_TRIES_MAX 2000u
/* One buffer of the kernel's table is at most this long. */
#define FIXED_BYTES_MAX (1ull << 30)
#define FIXED_MAX 64u
/* The kernel moves less than 2 GiB at once. */
#define PIECE_BYTES_MAX (1u << 30)

enum step {
    STEP_MOVE,  /* transfer or sync */
    STEP_START, /* buffered write: start the write-back */
    STEP_DROP   /* buffered: drop the pages */
};

struct uring_op {
    struct kvt_io_req *req;
    int fd;
    enum step step;
    uint64_t bytes;
    struct kvt_posix_progress progress;
    unsigned again; /* failures for a passing reason, in a row */
    int64_t submitted_ns;
    struct uring_op *next;
};

struct op_queue {
    struct uring_op *first, **end;
};

struct uring {
    struct kvt_io_engine engine;
    const struct kvt_uring_sys *sys;
    struct io_uring ring;
    bool direct;
    struct kvt_clock clock;
    unsigned in_flight; /* accepted, not yet reaped */
    unsigned in_kernel; /* of the ops */
    unsigned unsent;    /* in the submission ring, not taken by the kernel yet */
    unsigned writing;   /* writes and syncs with the kernel, or in its ring */
    struct op_queue reads, writes;
    struct kvt_posix_queue done;
    struct iovec fixed[FIXED_MAX]; /* registered pieces, in order of address */
    unsigned fixed_count;
    struct uring_op *free_ops;
    struct uring_op ops[KVT_IO_FLIGHT_MAX];
};

static struct uring *uring_of(struct kvt_io_engine *engine)
{
    return (struct uring *)engine;
}

static void queue_put(struct op_queue *queue, struct uring_op *op)
{
    op->next = NULL;
    *queue->end = op;
    queue->end = &op->next;
}

static struct uring_op *queue_take(struct op_queue *queue)
{
    struct uring_op *op = queue->first;

    queue->first = op->next;
    if (!queue->first)
        queue->end = &queue->first;
    return op;
}

/* Make the event fd readable: the owner is to call reap(). */
static void ring_bell(struct uring *uring)
{
    uint64_t one = 1;

    while (write(uring->engine.event_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static void done_put(struct uring *uring, struct kvt_io_req *req)
{
    req->next = NULL;
    *uring->done.end = req;
    uring->done.end = &req->next;
}

/* ---- into the ring ---- */

/* Number of the registered buffer that holds all of the piece, or -1. */
static int fixed_of(const struct uring *uring, const struct iovec *piece)
{
    uintptr_t at = (uintptr_t)piece->iov_base;

    for (unsigned i = 0; i < uring->fixed_count; i++) {
        uintptr_t base = (uintptr_t)uring->fixed[i].iov_base;

        if (at >= base && at - base + piece->iov_len <= uring->fixed[i].iov_len)
            return (int)i;
    }
    return -1;
}

static void prepare_piece(const struct uring *uring, const struct uring_op *op,
                          struct io_uring_sqe *sqe, uint8_t *at, size_t len, uint64_t offset)
{
    struct iovec piece = {at, KVT_MIN(len, (size_t)PIECE_BYTES_MAX)};
    int fixed = fixed_of(uring, &piece);
    unsigned bytes = (unsigned)piece.iov_len;

    if (op->req->kind == KVT_IO_READ && fixed >= 0)
        io_uring_prep_read_fixed(sqe, op->fd, at, bytes, offset, fixed);
    else if (op->req->kind == KVT_IO_READ)
        io_uring_prep_read(sqe, op->fd, at, bytes, offset);
    else if (fixed >= 0)
        io_uring_prep_write_fixed(sqe, op->fd, at, bytes, offset, fixed);
    else
        io_uring_prep_write(sqe, op->fd, at, bytes, offset);
}

/* The rest of the transfer. Where it begins inside a piece, that piece alone: the list of pieces is
 * the submitter's, and is not changed. */
static void prepare_move(const struct uring *uring, const struct uring_op *op,
                         struct io_uring_sqe *sqe)
{
    const struct kvt_io_req *req = op->req;
    const struct iovec *piece = req->iov;
    uint64_t skip = op->progress.from, offset = req->offset + skip;
    unsigned left;

    while (skip >= piece->iov_len)
        skip -= piece++->iov_len;
    left = req->iov_count - (unsigned)(piece - req->iov);
    if (skip || left == 1)
        prepare_piece(uring, op, sqe, (uint8_t *)piece->iov_base + skip, piece->iov_len - skip,
                      offset);
    else if (req->kind == KVT_IO_READ)
        io_uring_prep_readv(sqe, op->fd, piece, left, offset);
    else
        io_uring_prep_writev(sqe, op->fd, piece, left, offset);
}

static void prepare(const struct uring *uring, struct uring_op *op, struct io_uring_sqe *sqe)
{
    const struct kvt_io_req *req = op->req;

    if (op->step == STEP_START)
        io_uring_prep_sync_file_range(sqe, op->fd, (unsigned)op->bytes, req->offset,
                                      SYNC_FILE_RANGE_WRITE);
    else if (op->step == STEP_DROP)
        io_uring_prep_fadvise(sqe, op->fd, req->offset, (off_t)op->bytes, POSIX_FADV_DONTNEED);
    else if (req->kind == KVT_IO_SYNC)
        io_uring_prep_fsync(sqe, op->fd, IORING_FSYNC_DATASYNC);
    else if (req->kind == KVT_IO_PUNCH)
        io_uring_prep_fallocate(sqe, op->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                req->offset, op->bytes);
    else
        prepare_move(uring, op, sqe);
    if (op->again)
        sqe->flags |= IOSQE_ASYNC;
    io_uring_sqe_set_data(sqe, op);
}

/* Next op by rule 2, or NULL. */
static struct uring_op *pick(struct uring *uring)
{
    if (uring->reads.first)
        return queue_take(&uring->reads);
    if (!uring->writes.first || uring->writing == WRITES_MAX)
        return NULL;
    uring->writing++;
    return queue_take(&uring->writes);
}

/* Hand over to the kernel what may go. */
static void pump(struct uring *uring)
{
    while (io_uring_sq_space_left(&uring->ring)) {
        struct uring_op *op = pick(uring);

        if (!op)
            break;
        prepare(uring, op, io_uring_get_sqe(&uring->ring));
        uring->unsent++;
    }
    while (uring->unsent) {
        int taken = io_uring_submit(&uring->ring);

        if (taken == -EINTR)
            continue;
        if (taken <= 0)
            break;
        uring->unsent -= KVT_MIN((unsigned)taken, uring->unsent);
        uring->in_kernel += (unsigned)taken;
    }
    /* not taken (the kernel lacks memory): the next completion tries again; where none is to come,
     * the bell does */
    if (uring->unsent && !uring->in_kernel)
        ring_bell(uring);
}

/* ---- out of the ring ---- */

static void finish(struct uring *uring, struct uring_op *op)
{
    struct kvt_io_req *req = op->req;

    req->elapsed_ns = kvt_clock_now(&uring->clock) - op->submitted_ns;
    uring->writing -= req->kind != KVT_IO_READ;
    op->next = uring->free_ops;
    uring->free_ops = op;
    done_put(uring, req);
}

/* Whether the same trip may well succeed now. EAGAIN: the kernel lacked memory. ECANCELED and
 * EFAULT: the thread that submitted it has ended, the kernel took back what was not finished, or
 * went on without that thread's memory map; the instance lives on in another thread (the store is
 * closed by another one than ran it). A pointer that is really bad fails again. */
static bool orphaned_or_again(int32_t result)
{
    return result == -EAGAIN || result == -ECANCELED || result == -EFAULT;
}

/* One trip has ended with result. True: the op is over. */
static bool advance(struct uring *uring, struct uring_op *op, int32_t result)
{
    struct kvt_io_req *req = op->req;

    if (op->step == STEP_DROP)
        return true;
    if (op->step == STEP_START) {
        op->step = STEP_DROP;
        return false;
    }
    if (result == -EINTR || (op->again < AGAIN_MAX && orphaned_or_again(result))) {
        op->again += result != -EINTR;
        return false;
    }
    op->again = 0;
    if (req->kind == KVT_IO_SYNC || req->kind == KVT_IO_PUNCH) {
        req->result = result;
        return true;
    }
    if (!kvt_posix_moved(op->fd, uring->direct, req, op->bytes, result, &op->progress,
                         &req->result))
        return false;
    if (uring->direct || req->result <= 0)
        return true;
    op->step = req->kind == KVT_IO_WRITE ? STEP_START : STEP_DROP;
    op->bytes = (uint64_t)req->result;
    return false;
}

/* Put an op that is not over back at the head of its queue; it keeps its place among the writes. */
static void again(struct uring *uring, struct uring_op *op)
{
    struct op_queue *queue = op->req->kind == KVT_IO_READ ? &uring->reads : &uring->writes;

    uring->writing -= op->req->kind != KVT_IO_READ;
    op->next = queue->first;
    queue->first = op;
    if (!op->next)
        queue->end = &op->next;
}

static void collect(struct uring *uring)
{
    struct io_uring_cqe *cqe;

    while (!io_uring_peek_cqe(&uring->ring, &cqe)) {
        struct uring_op *op = io_uring_cqe_get_data(cqe);
        int32_t result = cqe->res;

        io_uring_cqe_seen(&uring->ring, cqe);
        uring->in_kernel--;
        if (uring->sys && op->step == STEP_MOVE)
            result = uring->sys->outcome(op->req, result);
        if (advance(uring, op, result))
            finish(uring, op);
        else
            again(uring, op);
    }
}

/* ---- the engine's functions ---- */

static int uring_submit(struct kvt_io_engine *engine, struct kvt_io_req *req, int fd, int64_t bytes)
{
    struct uring *uring = uring_of(engine);
    struct uring_op *op = uring->free_ops;

    if (uring->in_flight >= KVT_IO_FLIGHT_MAX)
        return -EAGAIN;
    uring->in_flight++;
    if (bytes < 0) {
        req->result = bytes;
        req->elapsed_ns = 0;
        done_put(uring, req);
        ring_bell(uring);
        return 0;
    }
    uring->free_ops = op->next;
    *op = (struct uring_op){.req = req, .fd = fd, .bytes = (uint64_t)bytes};
    op->submitted_ns = kvt_clock_now(&uring->clock);
    queue_put(req->kind == KVT_IO_READ ? &uring->reads : &uring->writes, op);
    pump(uring);
    return 0;
}

static unsigned uring_reap(struct kvt_io_engine *engine, struct kvt_io_req **out, unsigned max)
{
    struct uring *uring = uring_of(engine);
    unsigned count = 0;
    uint64_t drained;

    /* before the completions are looked at: what comes later rings again */
    while (read(engine->event_fd, &drained, sizeof drained) < 0 && errno == EINTR)
        ;
    collect(uring);
    pump(uring);
    while (count < max && uring->done.first) {
        out[count++] = uring->done.first;
        uring->done.first = uring->done.first->next;
    }
    if (!uring->done.first)
        uring->done.end = &uring->done.first;
    else
        ring_bell(uring);
    uring->in_flight -= count;
    return count;
}

/* Until the kernel has nothing of ours: it writes into our memory. */
static void drain(struct uring *uring)
{
    struct timespec pause = {.tv_nsec = 1000000};
    unsigned tries = 0;

    for (;;) {
        struct io_uring_cqe *cqe;

        collect(uring);
        pump(uring);
        if (uring->in_kernel)
            (void)io_uring_wait_cqe(&uring->ring, &cqe); /* EINTR: collect() decides */
        else if (!uring->unsent && !uring->reads.first && !uring->writes.first)
            return;
        else if (++tries == STOP_TRIES_MAX)
            return;
        else
            (void)nanosleep(&pause, NULL);
    }
}

static void release(struct kvt_io_engine *engine)
{
    struct uring *uring = uring_of(engine);

    io_uring_queue_exit(&uring->ring);
    close(engine->event_fd);
    free(uring);
}

static void uring_stop(struct kvt_io_engine *engine)
{
    drain(uring_of(engine));
    release(engine);
}

static const struct kvt_io_engine_ops uring_ops = {
    .name = "uring",
    .stop = uring_stop,
    /* the ring lives on in the parent; the child gives back its mapping and descriptor */
    .abandon = release,
    .submit = uring_submit,
    .reap = uring_reap,
};

/* ---- life ---- */

#ifndef IORING_SETUP_COOP_TASKRUN /* liburing before 2.2, as in Ubuntu 22.04 */
#define IORING_SETUP_COOP_TASKRUN (1u << 8)
#endif

/* Set the ring up. 0, -errno. */
static int open_ring(struct io_uring *ring, unsigned completions, char *why, size_t why_len)
{
    struct io_uring_params params = {.flags = IORING_SETUP_CQSIZE | IORING_SETUP_COOP_TASKRUN,
                                     .cq_entries = completions};
    int held[KVT_FD_LEAST], rc;

    kvt_fd_hold(held);
    rc = io_uring_queue_init_params(SQ_ENTRIES, ring, &params);
    if (rc == -EINVAL) { /* a kernel before 5.19 */
        params = (struct io_uring_params){.flags = IORING_SETUP_CQSIZE, .cq_entries = completions};
        rc = io_uring_queue_init_params(SQ_ENTRIES, ring, &params);
    }
    kvt_fd_release(held);
    if (!rc && !(params.features & IORING_FEAT_RW_CUR_POS)) {
        io_uring_queue_exit(ring);
        snprintf(why, why_len, "io_uring of this kernel is too old (before 5.6)");
        return -ENOSYS;
    }
    if (rc)
        snprintf(why, why_len, "io_uring_setup: %s%s", strerrordesc_np(-rc),
                 rc == -EPERM    ? " (a seccomp profile or kernel.io_uring_disabled forbids it)"
                 : rc == -ENOMEM ? " (RLIMIT_MEMLOCK or the control group is too small)"
                 : rc == -ENOSYS ? " (the kernel has none, or a sandbox hides it)"
                                 : "");
    else
        snprintf(why, why_len, "the kernel allows io_uring");
    return rc;
}

int kvt_io_uring_probe(char *why, size_t why_len)
{
    struct io_uring ring;
    int rc = open_ring(&ring, 2 * SQ_ENTRIES, why, why_len);

    if (!rc)
        io_uring_queue_exit(&ring);
    return rc;
}

int kvt_uring_engine_new(bool direct, const struct kvt_uring_sys *sys, struct kvt_io_engine **out,
                         char *why, size_t why_len)
{
    struct uring *uring = calloc(1, sizeof *uring);
    int rc;

    if (!uring) {
        snprintf(why, why_len, "out of memory");
        return -ENOMEM;
    }
    rc = open_ring(&uring->ring, 2 * KVT_IO_FLIGHT_MAX, why, why_len);
    if (rc) {
        free(uring);
        return rc;
    }
    uring->engine.ops = &uring_ops;
    uring->engine.event_fd = kvt_fd_high(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    rc = uring->engine.event_fd < 0
             ? -errno
             : io_uring_register_eventfd(&uring->ring, uring->engine.event_fd);
    if (rc) {
        snprintf(why, why_len, "no event descriptor for the ring: %s", strerrordesc_np(-rc));
        if (uring->engine.event_fd >= 0)
            close(uring->engine.event_fd);
        io_uring_queue_exit(&uring->ring);
        free(uring);
        return rc;
    }
    uring->sys = sys;
    uring->direct = direct;
    uring->clock = kvt_clock_system();
    uring->reads.end = &uring->reads.first;
    uring->writes.end = &uring->writes.first;
    uring->done.end = &uring->done.first;
    for (unsigned i = KVT_IO_FLIGHT_MAX; i--;) {
        uring->ops[i].next = uring->free_ops;
        uring->free_ops = &uring->ops[i];
    }
    *out = &uring->engine;
    return 0;
}

uint64_t kvt_uring_engine_register(struct kvt_io_engine *engine, void *base, uint64_t bytes)
{
    struct uring *uring = uring_of(engine);
    uint64_t taken = 0;
    unsigned count = 0;

    if (engine->ops != &uring_ops || uring->fixed_count)
        return 0;
    for (uint64_t at = 0; at < bytes && count < FIXED_MAX; at += uring->fixed[count++].iov_len)
        uring->fixed[count] = (struct iovec){
            (uint8_t *)base + at, (size_t)KVT_MIN(bytes - at, (uint64_t)FIXED_BYTES_MAX)};
    /* The table is taken whole or not at all (the limit on locked memory): half as often until it
     * fits. */
    while (count) {
        int rc = io_uring_register_buffers(&uring->ring, uring->fixed, count);

        if (!rc)
            break;
        if (count > 1)
            count /= 2;
        else if (rc == -ENOMEM && uring->fixed[0].iov_len > KVT_IO_ALIGN)
            uring->fixed[0].iov_len =
                (size_t)kvt_round_up(uring->fixed[0].iov_len / 2, KVT_IO_ALIGN);
        else
            count = 0;
    }
    uring->fixed_count = count;
    for (unsigned i = 0; i < count; i++)
        taken += uring->fixed[i].iov_len;
    return taken;
}
