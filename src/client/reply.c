/* The reply thread: drains the reply ring into the state machine and pumps.
 *
 * It sleeps in poll() on the ring's event fd, on a wake fd of ours and on the socket of a remote
 * store; it never spins. A remote store that is gone is looked for here (remote.c). While a
 * message waits for room in the request ring and no reply is due that would announce it, it looks
 * again every millisecond.
 * While all workers decode, grants that come are of use to nobody before one of them is done: the
 * ring is left to them, and the store rings no one. A load from DRAM then costs one wake-up of this
 * thread instead of one for each handful of grants.
 * Invariant: a ring in which no sleep is announced is read by somebody who is awake, and who
 * announces this thread's before he stops.
 * Threads: this file is one thread, but for start, stop, wake, and what says so.
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "client/client.h"

#define BURST 64 /* replies handled in one hold of the lock */
#define STUCK_POLL_MS 1

int kvt_thread_start(pthread_t *thread, const char *name, void *(*fn)(void *), void *arg)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* signals are the program's business */
    int rc = pthread_create(thread, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc == 0)
        (void)pthread_setname_np(*thread, name);
    return -rc;
}

/* Handle what is there, at most a burst. Returns replies handled. */
static int drain(struct kvt_cache *cache)
{
    struct kvt_ring *ring = &cache->channel.replies;
    int handled = 0;
    while (handled < BURST && !cache->broken) {
        const void *frame;
        if (kvt_ring_closed(ring)) { /* grants in it name slots that are not ours any more */
            kvt_engine_fail_all(cache);
            break;
        }
        int bytes = kvt_ring_peek(ring, &frame);
        if (bytes == 0)
            break;
        const struct kvt_msg *msg = frame;
        if (bytes < (int)sizeof(*msg) || msg->bytes > (uint32_t)bytes ||
            msg->bytes < sizeof(*msg)) {
            cache->counters.bad_reply++;
            kvt_engine_fail_all(cache);
            break;
        }
        kvt_engine_reply(cache, msg);
        kvt_ring_pop(ring);
        handled++;
    }
    return handled;
}

static void drain_fd(int fd)
{
    uint64_t value;
    ssize_t n;
    do {
        n = read(fd, &value, sizeof(value));
    } while (n < 0 && errno == EINTR);
}

/* Whether the workers read the ring: all of them are coding, so each looks at it when it is done
 * with its batch. Not where somebody waits for a reply: calls, ends of stores, lanes of devices. */
static bool workers_read(const struct kvt_cache *cache)
{
    const struct kvt_pool *pool;
    if (cache->worker_count == 0 || cache->workers_idle > 0 || cache->stop_workers ||
        cache->flight_count[KVT_C_STORE] + cache->flight_count[KVT_C_CALL] > 0)
        return false;
    TAILQ_FOREACH(pool, &cache->pools, list)
    {
        if (pool->gpu != NULL)
            return false;
    }
    return true;
}

void kvt_reply_busy(struct kvt_cache *cache)
{
    if (cache->broken || cache->lead != NULL) /* who leads has announced its sleep, or is awake */
        return;
    if (workers_read(cache))
        kvt_ring_awake(&cache->channel.replies);
    else
        (void)kvt_reply_listen(cache);
}

/* The thread slept meanwhile, since nobody rings it while the ring says that nobody sleeps, or
 * somebody else. That may be the ring of another connection than before by now. */
int kvt_reply_listen(struct kvt_cache *cache)
{
    int handled = 0;
    /* a filler whose frame is still being written keeps us awake, and is no reply: once more */
    while (!cache->broken && cache->lead == NULL && !kvt_ring_sleep(&cache->channel.replies))
        handled += kvt_reply_drain(cache);
    return handled;
}

/* Announce sleep, unless there is something to do. Under the lock: callers that spin read the ring
 * too. false: look again. */
static bool fall_asleep(struct kvt_cache *cache, int *limit_ms)
{
    pthread_mutex_lock(&cache->lock);
    *limit_ms = cache->stuck ? STUCK_POLL_MS : -1;
    if (cache->remote && !cache->broken) {
        int watch = kvt_remote_watch(cache);
        if (watch >= 0 && (*limit_ms < 0 || watch < *limit_ms))
            *limit_ms = watch;
    }
    /* who leads has announced it already, and wakes us by announcing ours when it is done */
    bool asleep = cache->broken || cache->lead != NULL || workers_read(cache) ||
                  kvt_ring_sleep(&cache->channel.replies);
    pthread_mutex_unlock(&cache->lock);
    return asleep;
}

static void sleep_for_work(struct kvt_cache *cache, bool broken)
{
    struct kvt_ring *ring = &cache->channel.replies;
    struct pollfd fds[3] = {{.fd = cache->wake_fd, .events = POLLIN},
                            {.fd = broken ? -1 : ring->event_fd, .events = POLLIN},
                            {.fd = cache->remote ? cache->link.sock : -1, .events = POLLIN}};
    int limit_ms;
    if (!fall_asleep(cache, &limit_ms))
        return;
    (void)poll(fds, 3, limit_ms);
    if (fds[0].revents & POLLIN)
        drain_fd(fds[0].fd);
    if (fds[1].revents & POLLIN)
        drain_fd(fds[1].fd);
    if (fds[2].revents != 0) { /* the daemon has nothing to say there but that it is gone */
        pthread_mutex_lock(&cache->lock);
        if (!cache->broken)
            kvt_engine_fail_all(cache);
        pthread_mutex_unlock(&cache->lock);
    }
}

int kvt_reply_drain(struct kvt_cache *cache)
{
    int handled = drain(cache);
    if (handled > 0)
        cache->heard_ns = kvt_clock_now(&cache->clock);
    if (handled > 0 || cache->stuck || cache->broken)
        kvt_pump(cache);
    if (handled > 0 && cache->room_waiters > 0)
        pthread_cond_broadcast(&cache->room);
    return handled;
}

static void *reply_main(void *arg)
{
    struct kvt_cache *cache = arg;
    bool said = false;
    for (;;) {
        pthread_mutex_lock(&cache->lock);
        int handled = kvt_reply_drain(cache);
        bool stop = cache->stop_reply, broken = cache->broken;
        pthread_mutex_unlock(&cache->lock);
        /* Whoever has found it out; a store that disconnects us has said so itself. */
        if (!cache->remote && broken && !said && !kvt_ring_closed(&cache->channel.replies))
            kvt_log(&cache->log, KVT_LOG_ERROR,
                    "the store sends replies that are malformed: the cache is closed");
        said = broken;
        if (stop)
            return NULL;
        if (broken && cache->remote)
            kvt_remote_restore(cache);
        else if (handled < BURST)
            sleep_for_work(cache, broken);
    }
}

void kvt_reply_wake(struct kvt_cache *cache)
{
    uint64_t one = 1;
    ssize_t n = write(cache->wake_fd, &one, sizeof(one)); /* full means already awake */
    (void)n;
}

int kvt_reply_start(struct kvt_cache *cache)
{
    int rc = kvt_thread_start(&cache->reply_thread, "kvt-reply", reply_main, cache);
    cache->reply_running = rc == 0;
    return rc;
}

void kvt_reply_stop(struct kvt_cache *cache)
{
    if (!cache->reply_running)
        return;
    pthread_mutex_lock(&cache->lock);
    cache->stop_reply = true;
    pthread_cond_broadcast(&cache->idle);
    pthread_mutex_unlock(&cache->lock);
    kvt_reply_wake(cache);
    pthread_join(cache->reply_thread, NULL);
    cache->reply_running = false;
}
