/* What the backends over a directory share, and the posix one's pool: the system calls are a table
 * so that tests can make them fail. Private to src/io and its tests. */
#ifndef KVT_IO_IO_POSIX_H
#define KVT_IO_IO_POSIX_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/clock.h"
#include "io/io.h"

#define KVT_POSIX_RESULT __attribute__((warn_unused_result))

struct kvt_posix_sys { /* as in the manual pages: -1 and errno */
    ssize_t (*preadv)(int fd, const struct iovec *iov, int count, off_t offset);
    ssize_t (*pwritev)(int fd, const struct iovec *iov, int count, off_t offset);
    int (*fdatasync)(int fd);
    int (*fallocate)(int fd, int mode, off_t offset, off_t bytes);
};
extern const struct kvt_posix_sys kvt_posix_sys_real;

/* kvt_io_files_new() with other system calls; sys is borrowed for the instance's life. The uring
 * backend takes only fallocate from it. */
KVT_POSIX_RESULT int kvt_io_files_new_sys(const struct kvt_io_posix_params *params,
                                          const struct kvt_posix_sys *sys, struct kvt_io **out);

/* Open (and make) the root directory; rules in io.h. A descriptor, or an error. */
KVT_POSIX_RESULT int kvt_posix_root_open(const char *path, int read_only,
                                         const struct kvt_log *log);

/* The root's path, absolute, so that a change of the working directory does not matter. malloc()ed;
 * NULL: no memory, or no working directory. */
char *kvt_posix_root_path(const char *path);

/* Whether what is written through dir_fd would be lost to whoever opens path next: the directory
 * was removed, moved or mounted over, or its lock file is not the one that lock_fd holds, so that
 * another owner may be in it. False where that cannot be told. */
bool kvt_posix_root_left(const char *path, int dir_fd, int lock_fd);

/* Open a regular file of the root. A descriptor, or -errno; -EINVAL not a regular file. */
KVT_POSIX_RESULT int kvt_posix_file_open(int dir_fd, const char *name, int flags, bool direct);

#define KVT_POSIX_LOCK_NAME "lock"

/* Take the root's lock; the descriptor that holds it (close it to unlock, never before), or
 * KVT_E_LOCKED, -errno. read_only: a shared lock, and -ENOENT when there is no lock file. */
KVT_POSIX_RESULT int kvt_posix_lock(int dir_fd, int read_only, int64_t *owner_pid);

/* Whether O_DIRECT really works in the directory: 1, 0, or -errno (the directory cannot be
 * written). why gets the reason. */
KVT_POSIX_RESULT int kvt_posix_probe_direct(int dir_fd, char *why, size_t why_len);

/* A file without a name in the directory, for probes; a descriptor, or -errno. */
KVT_POSIX_RESULT int kvt_posix_scratch(int dir_fd);

/* How far one data request has got. Begins as zeros. */
struct kvt_posix_progress {
    uint64_t from;    /* the next transfer begins here, in bytes of the request */
    uint64_t reached; /* the last one ended here */
    unsigned stalls;  /* transfers in a row that got no further */
};
/* Take in the outcome of one transfer from progress->from: bytes, or -errno. True: the request is
 * over and *result is set; false: transfer the rest from progress->from. */
KVT_POSIX_RESULT bool kvt_posix_moved(int fd, bool direct, const struct kvt_io_req *req,
                                      uint64_t bytes, int64_t moved,
                                      struct kvt_posix_progress *progress, int64_t *result);

/* Run one checked data request on fd, to the end: bytes moved, or -errno. Blocks. */
int64_t kvt_posix_transfer(const struct kvt_posix_sys *sys, int fd, bool direct,
                           const struct kvt_io_req *req, uint64_t bytes);

/* Make a range read as zeros without changing the file's size: a hole, or zeros written. */
KVT_POSIX_RESULT int kvt_posix_zero(const struct kvt_posix_sys *sys, int fd, uint64_t offset,
                                    uint64_t bytes);

#define KVT_POSIX_THREADS_MAX 16

struct kvt_posix_queue {
    struct kvt_io_req *first, **end;
};

struct kvt_posix_pool { /* posix_pool.c has the rules */
    const struct kvt_posix_sys *sys;
    bool direct;
    struct kvt_clock clock;
    int event_fd;
    pthread_mutex_t mutex; /* everything below */
    pthread_cond_t work;
    struct kvt_posix_queue reads, writes, done;
    unsigned in_flight; /* accepted, not yet reaped */
    int writing, writing_max;
    unsigned reads_passed; /* since a write began to wait */
    bool stop;
    unsigned thread_count;
    pthread_t threads[KVT_POSIX_THREADS_MAX];
};

/* 0, -errno; nothing is left after an error. */
KVT_POSIX_RESULT int kvt_posix_pool_start(struct kvt_posix_pool *pool,
                                          const struct kvt_posix_sys *sys, bool direct,
                                          int threads);
/* Runs what is queued to its end, then joins and frees. Completions not reaped are forgotten. */
void kvt_posix_pool_stop(struct kvt_posix_pool *pool);

/* Queue a request on fd; bytes < 0: complete it at once with that error. 0, -EAGAIN. */
KVT_POSIX_RESULT int kvt_posix_pool_submit(struct kvt_posix_pool *pool, struct kvt_io_req *req,
                                           int fd, int64_t bytes);
unsigned kvt_posix_pool_reap(struct kvt_posix_pool *pool, struct kvt_io_req **out, unsigned max);

#endif
