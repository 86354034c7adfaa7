/* The posix backend's threads: run data requests, and hand them back through a list and an event
 * fd.
 *
 *   owner: submit -> reads | writes -> thread: transfer -> done list, event fd -> owner: reap
 *
 * Invariants
 *  1. Exactly one completion per accepted request; the event fd is readable if and only if the done
 *     list is not empty.
 *  2. Requests in flight may run in any order. Reads go before writes, but at most READS_PASS_MAX
 *     of them pass a waiting write; writes leave one thread to reads (when there are two).
 *  3. At most KVT_IO_FLIGHT_MAX requests between submit and reap.
 * Threads: the owner calls everything; pool threads touch only queues (under the mutex), the
 * request that they run and its descriptor.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/fd.h"
#include "io/io_common.h"
#include "io/io_engine.h"

#define READS_PASS_MAX 16u

/* Words that a request carries while it is ours. */
enum { WORD_FD, WORD_SUBMITTED_NS, WORD_BYTES };

static void queue_init(struct kvt_posix_queue *queue)
{
    queue->first = NULL;
    queue->end = &queue->first;
}

static void queue_put(struct kvt_posix_queue *queue, struct kvt_io_req *req)
{
    req->next = NULL;
    *queue->end = req;
    queue->end = &req->next;
}

static struct kvt_io_req *queue_take(struct kvt_posix_queue *queue)
{
    struct kvt_io_req *req = queue->first;

    if (req) {
        queue->first = req->next;
        if (!queue->first)
            queue->end = &queue->first;
    }
    return req;
}

/* With the mutex: append to the done list, and make the event fd say so. */
static void complete(struct kvt_posix_pool *pool, struct kvt_io_req *req)
{
    uint64_t one = 1;

    if (!pool->done.first)
        while (write(pool->event_fd, &one, sizeof one) < 0 && errno == EINTR)
            ;
    queue_put(&pool->done, req);
}

int kvt_posix_pool_submit(struct kvt_posix_pool *pool, struct kvt_io_req *req, int fd,
                          int64_t bytes)
{
    pthread_mutex_lock(&pool->mutex);
    if (pool->in_flight >= KVT_IO_FLIGHT_MAX) {
        pthread_mutex_unlock(&pool->mutex);
        return -EAGAIN;
    }
    pool->in_flight++;
    if (bytes < 0) {
        req->result = bytes;
        req->elapsed_ns = 0;
        complete(pool, req);
    } else {
        req->backend_word[WORD_FD] = (uint64_t)fd;
        req->backend_word[WORD_SUBMITTED_NS] = (uint64_t)kvt_clock_now(&pool->clock);
        req->backend_word[WORD_BYTES] = (uint64_t)bytes;
        queue_put(req->kind == KVT_IO_READ ? &pool->reads : &pool->writes, req);
        pthread_cond_signal(&pool->work);
    }
    pthread_mutex_unlock(&pool->mutex);
    return 0;
}

unsigned kvt_posix_pool_reap(struct kvt_posix_pool *pool, struct kvt_io_req **out, unsigned max)
{
    unsigned count = 0;
    uint64_t drained;

    pthread_mutex_lock(&pool->mutex);
    while (count < max && pool->done.first)
        out[count++] = queue_take(&pool->done);
    pool->in_flight -= count;
    if (count && !pool->done.first)
        while (read(pool->event_fd, &drained, sizeof drained) < 0 && errno == EINTR)
            ;
    pthread_mutex_unlock(&pool->mutex);
    return count;
}

/* With the mutex: the next request to run by rule 2, or NULL. */
static struct kvt_io_req *pick(struct kvt_posix_pool *pool)
{
    bool write_may = pool->writes.first && pool->writing < pool->writing_max;

    if (pool->reads.first && (!write_may || pool->reads_passed < READS_PASS_MAX)) {
        pool->reads_passed += write_may;
        return queue_take(&pool->reads);
    }
    if (!write_may)
        return NULL;
    pool->reads_passed = 0;
    pool->writing++;
    return queue_take(&pool->writes);
}

static void *pool_thread(void *arg)
{
    struct kvt_posix_pool *pool = arg;

    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        struct kvt_io_req *req = pick(pool);

        if (!req) {
            if (pool->stop)
                break; /* a write that is left is picked by a thread that is writing now */
            pthread_cond_wait(&pool->work, &pool->mutex);
            continue;
        }
        pthread_mutex_unlock(&pool->mutex);
        req->result = kvt_posix_transfer(pool->sys, (int)req->backend_word[WORD_FD], pool->direct,
                                         req, req->backend_word[WORD_BYTES]);
        req->elapsed_ns =
            kvt_clock_now(&pool->clock) - (int64_t)req->backend_word[WORD_SUBMITTED_NS];
        pthread_mutex_lock(&pool->mutex);
        pool->writing -= req->kind != KVT_IO_READ;
        complete(pool, req);
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

/* Start the threads; fewer than asked for will do, none will not. */
static int start_threads(struct kvt_posix_pool *pool, unsigned threads)
{
    sigset_t all, old;
    int rc = 0;

    /* the user's signal handlers run on the user's threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    for (unsigned i = 0; i < threads; i++) {
        char name[24];

        rc = pthread_create(&pool->threads[i], NULL, pool_thread, pool);
        if (rc)
            break;
        snprintf(name, sizeof name, "kvt-io-%u", i % 100);
        (void)pthread_setname_np(pool->threads[i], name);
        pool->thread_count++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return pool->thread_count ? 0 : -rc;
}

int kvt_posix_pool_start(struct kvt_posix_pool *pool, const struct kvt_posix_sys *sys, bool direct,
                         int threads)
{
    int rc;

    *pool = (struct kvt_posix_pool){.sys = sys, .direct = direct, .clock = kvt_clock_system()};
    pool->writing_max = KVT_MAX(threads - 1, 1);
    queue_init(&pool->reads);
    queue_init(&pool->writes);
    queue_init(&pool->done);
    pool->event_fd = kvt_fd_high(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (pool->event_fd < 0)
        return -errno;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work, NULL);
    rc = start_threads(pool, (unsigned)threads);
    if (rc)
        kvt_posix_pool_stop(pool);
    return rc;
}

void kvt_posix_pool_stop(struct kvt_posix_pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    pool->stop = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    for (unsigned i = 0; i < pool->thread_count; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->mutex);
    close(pool->event_fd);
}

/* ---- as an engine ---- */

struct posix_engine {
    struct kvt_io_engine engine;
    struct kvt_posix_pool pool;
};

static struct kvt_posix_pool *pool_of(struct kvt_io_engine *engine)
{
    return &((struct posix_engine *)engine)->pool;
}

static void posix_stop(struct kvt_io_engine *engine)
{
    kvt_posix_pool_stop(pool_of(engine));
    free(engine);
}

/* The child has no threads, and its copy of the mutex may be locked for ever. */
static void posix_abandon(struct kvt_io_engine *engine)
{
    close(engine->event_fd);
    free(engine);
}

static int posix_submit(struct kvt_io_engine *engine, struct kvt_io_req *req, int fd, int64_t bytes)
{
    return kvt_posix_pool_submit(pool_of(engine), req, fd, bytes);
}

static unsigned posix_reap(struct kvt_io_engine *engine, struct kvt_io_req **out, unsigned max)
{
    return kvt_posix_pool_reap(pool_of(engine), out, max);
}

static const struct kvt_io_engine_ops posix_ops = {
    .name = "posix",
    .stop = posix_stop,
    .abandon = posix_abandon,
    .submit = posix_submit,
    .reap = posix_reap,
};

int kvt_posix_engine_new(const struct kvt_posix_sys *sys, bool direct, int threads,
                         struct kvt_io_engine **out)
{
    struct posix_engine *posix = malloc(sizeof *posix);
    int rc;

    if (!posix)
        return -ENOMEM;
    posix->engine.ops = &posix_ops;
    rc = kvt_posix_pool_start(&posix->pool, sys, direct, threads);
    if (rc) {
        free(posix);
        return rc;
    }
    posix->engine.event_fd = posix->pool.event_fd;
    *out = &posix->engine;
    return 0;
}
