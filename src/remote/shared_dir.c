/* A directory that machines share, as a shared tier: one file for each record.
 *
 *   ROOT/kvt0/NAMESPACE/HH/HASH.GROUP.SHARD   and what else is there: shared_path.h
 *
 * Rules
 *  1. A file is written under a name of its writer's, then linked to its own name: it is there
 *     whole or not at all, and who comes second finds that it exists. Nothing is changed in place.
 *  2. Nothing is synced: a file that a crash has torn fails its checksum, and is a miss.
 *  3. ENOENT, ESTALE, ENOTDIR are misses: somebody has removed it. Every other error is one, and is
 *     told once in ten minutes. Anybody may remove anything, ROOT/kvt0 too: shared_root.c.
 *  4. Directories that we make are 0700, files 0600; below ROOT/kvt0 no link is followed.
 *  5. A request that is over before its turn is not begun; one that the file server holds up ends
 *     late, and the store has given up on it by then (remote.h, rule 1). stop() waits for those.
 * Threads: THREADS of its own, one request each. Allocates at open only. The directory's
 * size is bounded by one of all that use it: shared_clean.c.
 */
#include "remote/shared_dir.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/fd.h"
#include "kvtier/error.h"
#include "remote/shared_clean.h"
#include "remote/shared_files.h"

#define THREADS 8u
#define TELL_NS INT64_C(600000000000) /* one warning in ten minutes */

struct shared_dir {
    struct kvt_remote remote;
    struct kvt_shared_files files;
    struct kvt_shared_clean clean;
    _Atomic uint64_t failing; /* requests in a row that failed for the file system's reasons */
    _Atomic int64_t tell_ns;  /* no warning of that before */
    pthread_t threads[THREADS];
    uint32_t thread_count;
    pthread_mutex_t lock; /* everything below */
    pthread_cond_t more;
    struct kvt_remote_req *queue, *queue_last, *done, *done_last;
    bool stopping;
    int done_fd;
};

/* ---- threads ------------------------------------------------------------------------------- */

/* What a request's end says of the directory itself. */
static void note_health(struct shared_dir *shared, const struct kvt_remote_req *req)
{
    int64_t now_ns = kvt_clock_now(&shared->files.clock);
    int64_t tell_ns = atomic_load_explicit(&shared->tell_ns, memory_order_relaxed);

    if (req->status == -ELOOP)
        return; /* one namespace's trouble, and told */
    /* -EIO, -ETIMEDOUT and such; what we say ourselves is below -5000 */
    if (req->status != KVT_E_NO_SPACE && (req->status >= 0 || req->status <= -5000)) {
        atomic_store_explicit(&shared->failing, 0, memory_order_relaxed);
        return;
    }
    if (req->status != KVT_E_NO_SPACE)
        (void)atomic_fetch_add_explicit(&shared->failing, 1, memory_order_relaxed);
    if (now_ns < tell_ns ||
        !atomic_compare_exchange_strong_explicit(&shared->tell_ns, &tell_ns, now_ns + TELL_NS,
                                                 memory_order_relaxed, memory_order_relaxed))
        return;
    kvt_log(&shared->files.log, KVT_LOG_WARN,
            "remote: the directory %s: blocks cannot be %s there: %s (trying again; it must be "
            "there, and its files be readable and writable by this user)",
            shared->files.path,
            req->op == KVT_REMOTE_PUT                                     ? "put"
            : req->op == KVT_REMOTE_DROP || req->op == KVT_REMOTE_DROP_NS ? "purged"
                                                                          : "read",
            req->status == KVT_E_NO_SPACE ? "no room, or a quota is used up"
                                          : strerror(-req->status));
}

static void hand_out(struct shared_dir *shared, struct kvt_remote_req *req)
{
    uint64_t one = 1;

    req->next = NULL;
    if (shared->done)
        shared->done_last->next = req;
    else
        shared->done = req;
    shared->done_last = req;
    if (write(shared->done_fd, &one, sizeof(one)) < 0)
        return; /* it is readable already */
}

static void *dir_thread(void *arg)
{
    struct shared_dir *shared = arg;

    pthread_mutex_lock(&shared->lock);
    while (!shared->stopping) {
        struct kvt_remote_req *req = shared->queue;

        if (!req) {
            pthread_cond_wait(&shared->more, &shared->lock);
            continue;
        }
        shared->queue = req->next;
        pthread_mutex_unlock(&shared->lock);
        req->status = kvt_shared_files_do(&shared->files, req);
        note_health(shared, req);
        pthread_mutex_lock(&shared->lock);
        hand_out(shared, req);
    }
    pthread_mutex_unlock(&shared->lock);
    return NULL;
}

/* ---- the vtable ---------------------------------------------------------------------------- */

static struct shared_dir *of(struct kvt_remote *remote)
{
    return (struct shared_dir *)(void *)remote;
}

static int dir_submit(struct kvt_remote *remote, struct kvt_remote_req *req)
{
    struct shared_dir *shared = of(remote);

    req->next = NULL;
    pthread_mutex_lock(&shared->lock);
    if (shared->queue)
        shared->queue_last->next = req;
    else
        shared->queue = req;
    shared->queue_last = req;
    pthread_cond_signal(&shared->more);
    pthread_mutex_unlock(&shared->lock);
    return 0;
}

static uint32_t dir_reap(struct kvt_remote *remote, struct kvt_remote_req **done, uint32_t max)
{
    struct shared_dir *shared = of(remote);
    uint32_t count = 0;
    uint64_t rung;

    pthread_mutex_lock(&shared->lock);
    while (count < max && shared->done) {
        done[count++] = shared->done;
        shared->done = shared->done->next;
    }
    if (!shared->done && read(shared->done_fd, &rung, sizeof(rung)) < 0)
        rung = 0; /* nobody has rung */
    pthread_mutex_unlock(&shared->lock);
    return count;
}

static int dir_event_fd(struct kvt_remote *remote)
{
    return of(remote)->done_fd;
}

static void dir_stats(struct kvt_remote *remote, struct kvt_remote_stats *stats)
{
    uint64_t failing = atomic_load_explicit(&of(remote)->failing, memory_order_relaxed);

    *stats = (struct kvt_remote_stats){.nodes = 1, .nodes_down = failing > 0};
}

static void dir_stop(struct kvt_remote *remote)
{
    struct shared_dir *shared = of(remote);

    pthread_mutex_lock(&shared->lock);
    shared->stopping = true;
    pthread_cond_broadcast(&shared->more);
    pthread_mutex_unlock(&shared->lock);
    kvt_shared_clean_stop(&shared->clean);
    while (shared->thread_count)
        (void)pthread_join(shared->threads[--shared->thread_count], NULL);
}

static void dir_destroy(struct kvt_remote *remote)
{
    struct shared_dir *shared = of(remote);

    dir_stop(remote);
    kvt_shared_files_close(&shared->files);
    if (shared->done_fd >= 0)
        (void)close(shared->done_fd);
    (void)pthread_cond_destroy(&shared->more);
    (void)pthread_mutex_destroy(&shared->lock);
    free(shared);
}

static const struct kvt_remote_ops dir_ops = {.name = "dir",
                                              .submit = dir_submit,
                                              .reap = dir_reap,
                                              .event_fd = dir_event_fd,
                                              .stats = dir_stats,
                                              .stop = dir_stop,
                                              .destroy = dir_destroy};

static int threads_start(struct shared_dir *shared)
{
    sigset_t all, before;
    int err = 0;

    /* The program's signals are for the program's threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (uint32_t i = 0; i < THREADS && !err; i++) {
        err = pthread_create(&shared->threads[i], NULL, dir_thread, shared);
        shared->thread_count += err == 0;
        if (!err)
            pthread_setname_np(shared->threads[i], "kvt-remote");
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return -err;
}

int kvt_shared_dir_open(const struct kvt_remote_params *params, const struct kvt_remote_url *url,
                        struct kvt_remote **out, char *error, size_t error_len)
{
    struct shared_dir *shared = calloc(1, sizeof(*shared));
    int rc;

    *out = NULL;
    if (!shared)
        return -ENOMEM;
    shared->remote.ops = &dir_ops;
    shared->files.root = shared->done_fd = -1;
    shared->files.ttl_ns = params->ttl_ns;
    shared->files.log = params->log;
    /* none of them can fail with these arguments */
    (void)pthread_mutex_init(&shared->files.root_lock, NULL);
    (void)pthread_mutex_init(&shared->files.notes_lock, NULL);
    (void)pthread_mutex_init(&shared->lock, NULL);
    (void)pthread_cond_init(&shared->more, NULL);
    rc = kvt_remote_mac_read(params->mac_file, &shared->files.mac, error, error_len);
    if (rc || (params->look && faccessat(AT_FDCWD, url->path, W_OK | X_OK, AT_EACCESS) == 0)) {
        dir_destroy(&shared->remote); /* what cannot be reached has its sentence below */
        return rc;
    }
    if (!rc)
        rc = kvt_shared_files_open(&shared->files, url->path, error, error_len);
    if (!rc) {
        shared->done_fd = kvt_fd_high(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        rc = shared->done_fd < 0 ? -errno : threads_start(shared);
    }
    if (!rc)
        rc = kvt_shared_clean_start(&shared->clean, &shared->files, params);
    if (rc) {
        dir_destroy(&shared->remote);
        return rc;
    }
    *out = &shared->remote;
    return 0;
}
