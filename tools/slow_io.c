/* See slow_io.h. Reads that the wrapped backend has done wait in a list, in the order of their due
 * times; a timer in the event descriptor says when the next one is due.
 * Threads: the owner's. Does not look at what is read.
 */
#include "slow_io.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/clock.h"

#define DUE_WORD 3 /* of backend_word, which the inner backend is done with when it completes */
#define BATCH 32u
#define NS_PER_S 1e9

struct slow_io {
    struct kvt_io io;
    struct kvt_io *inner;
    struct kvt_slow_speed *speed;
    struct kvt_clock clock;
    struct kvt_io_req *held; /* by due time */
    int64_t busy_until_ns;
    int timer, epoll;
};

static struct slow_io *slow_of(const struct kvt_io *io)
{
    return (struct slow_io *)(uintptr_t)io;
}

/* When a drive of that speed, which does one thing after the other, is done with so many bytes. */
static int64_t due_of(struct slow_io *slow, int64_t bytes, int64_t elapsed_ns)
{
    uint64_t rate = atomic_load_explicit(&slow->speed->bytes_per_s, memory_order_relaxed);
    int64_t now = kvt_clock_now(&slow->clock), asked = now - elapsed_ns;
    if (rate == 0 || bytes <= 0)
        return now;
    int64_t latency = (int64_t)atomic_load_explicit(&slow->speed->latency_ns, memory_order_relaxed);
    int64_t start = KVT_MAX(asked, slow->busy_until_ns);
    slow->busy_until_ns = start + (int64_t)((double)bytes * NS_PER_S / (double)rate);
    return KVT_MAX(now, slow->busy_until_ns + latency);
}

static void hold(struct slow_io *slow, struct kvt_io_req *req, int64_t due)
{
    struct kvt_io_req **link = &slow->held;
    req->backend_word[DUE_WORD] = (uint64_t)due;
    while (*link != NULL && (*link)->backend_word[DUE_WORD] <= (uint64_t)due)
        link = &(*link)->next;
    req->next = *link;
    *link = req;
}

static void arm(struct slow_io *slow)
{
    struct itimerspec at = {{0, 0}, {0, 0}};
    if (slow->held != NULL) {
        uint64_t due = KVT_MAX(slow->held->backend_word[DUE_WORD], 1u);
        at.it_value.tv_sec = (time_t)(due / 1000000000u);
        at.it_value.tv_nsec = (long)(due % 1000000000u);
    }
    (void)timerfd_settime(slow->timer, TFD_TIMER_ABSTIME, &at, NULL); /* also clears what fired */
}

static unsigned slow_reap(struct kvt_io *io, struct kvt_io_req **out, unsigned max)
{
    struct slow_io *slow = slow_of(io);
    struct kvt_io_req *done[BATCH];
    unsigned count = 0, got;
    do {
        got = slow->inner->ops->reap(slow->inner, done, BATCH);
        for (unsigned i = 0; i < got; i++) {
            bool read = done[i]->kind == KVT_IO_READ;
            hold(slow, done[i],
                 read ? due_of(slow, done[i]->result, done[i]->elapsed_ns) : INT64_C(0));
        }
    } while (got == BATCH);
    uint64_t now = (uint64_t)kvt_clock_now(&slow->clock);
    while (count < max && slow->held != NULL && slow->held->backend_word[DUE_WORD] <= now) {
        out[count++] = slow->held;
        slow->held = slow->held->next;
    }
    arm(slow);
    return count;
}

static int slow_submit(struct kvt_io *io, struct kvt_io_req *req)
{
    struct kvt_io *inner = slow_of(io)->inner;
    return inner->ops->submit(inner, req);
}

static int slow_event_fd(struct kvt_io *io)
{
    return slow_of(io)->epoll;
}

static void slow_destroy(struct kvt_io *io)
{
    struct slow_io *slow = slow_of(io);
    slow->inner->ops->destroy(slow->inner);
    close(slow->timer);
    close(slow->epoll);
    free(slow);
}

/* ---- everything else goes through ---------------------------------------------------------- */

static int slow_open(struct kvt_io *io, const char *name, int flags)
{
    struct kvt_io *inner = slow_of(io)->inner;
    return inner->ops->open(inner, name, flags);
}

static void slow_close(struct kvt_io *io, int file)
{
    struct kvt_io *inner = slow_of(io)->inner;
    inner->ops->close(inner, file);
}

static int64_t slow_size(struct kvt_io *io, int file)
{
    struct kvt_io *inner = slow_of(io)->inner;
    return inner->ops->size(inner, file);
}

static int slow_truncate(struct kvt_io *io, int file, uint64_t bytes)
{
    struct kvt_io *inner = slow_of(io)->inner;
    return inner->ops->truncate(inner, file, bytes);
}

static int slow_allocate(struct kvt_io *io, int file, uint64_t bytes)
{
    struct kvt_io *inner = slow_of(io)->inner;
    return inner->ops->allocate(inner, file, bytes);
}

static int slow_punch(struct kvt_io *io, int file, uint64_t offset, uint64_t bytes)
{
    struct kvt_io *inner = slow_of(io)->inner;
    return inner->ops->punch(inner, file, offset, bytes);
}

static int slow_unlink(struct kvt_io *io, const char *name)
{
    struct kvt_io *inner = slow_of(io)->inner;
    return inner->ops->unlink(inner, name);
}

static int slow_rename(struct kvt_io *io, const char *from, const char *to)
{
    struct kvt_io *inner = slow_of(io)->inner;
    return inner->ops->rename(inner, from, to);
}

static int slow_sync_dir(struct kvt_io *io)
{
    struct kvt_io *inner = slow_of(io)->inner;
    return inner->ops->sync_dir(inner);
}

static int slow_list(struct kvt_io *io, int (*fn)(void *arg, const char *name), void *arg)
{
    struct kvt_io *inner = slow_of(io)->inner;
    return inner->ops->list(inner, fn, arg);
}

static int slow_lock(struct kvt_io *io, int64_t *owner_pid)
{
    struct kvt_io *inner = slow_of(io)->inner;
    return inner->ops->lock(inner, owner_pid);
}

static void slow_info(struct kvt_io *io, struct kvt_io_info *info)
{
    struct kvt_io *inner = slow_of(io)->inner;
    inner->ops->info(inner, info);
}

static const struct kvt_io_ops slow_ops = {.name = "slow",
                                           .destroy = slow_destroy,
                                           .open = slow_open,
                                           .close = slow_close,
                                           .size = slow_size,
                                           .truncate = slow_truncate,
                                           .allocate = slow_allocate,
                                           .punch = slow_punch,
                                           .unlink = slow_unlink,
                                           .rename = slow_rename,
                                           .sync_dir = slow_sync_dir,
                                           .list = slow_list,
                                           .lock = slow_lock,
                                           .info = slow_info,
                                           .submit = slow_submit,
                                           .reap = slow_reap,
                                           .event_fd = slow_event_fd};

struct kvt_io *kvt_slow_io_new(void *arg, struct kvt_io *inner)
{
    struct slow_io *slow = calloc(1, sizeof(*slow));
    struct epoll_event timer = {.events = EPOLLIN}, done = {.events = EPOLLIN};
    int inner_fd = inner->ops->event_fd(inner);
    if (slow == NULL)
        return NULL;
    slow->io.ops = &slow_ops;
    slow->inner = inner;
    slow->speed = arg;
    slow->clock = kvt_clock_system();
    slow->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    slow->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (slow->timer >= 0 && slow->epoll >= 0 && inner_fd >= 0 &&
        epoll_ctl(slow->epoll, EPOLL_CTL_ADD, slow->timer, &timer) == 0 &&
        epoll_ctl(slow->epoll, EPOLL_CTL_ADD, inner_fd, &done) == 0)
        return &slow->io;
    if (slow->timer >= 0)
        close(slow->timer);
    if (slow->epoll >= 0)
        close(slow->epoll);
    free(slow);
    return NULL;
}
