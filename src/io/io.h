/* The I/O seam: every byte that the store half reads or writes goes through one of these.
 *
 * An instance is bound to one root directory. Names are short file names inside it, made by us; a
 * name with '/' is refused. Control calls (open, list, lock, ...) are synchronous; data calls are
 * queued by submit() and reported by reap(). Completions only record; the owner's loop acts.
 * Threads: one owner thread calls everything; a backend may use threads of its own inside.
 * Errors: -errno in results. Short transfers: the backend continues until the request is whole, at
 * end of file, or failed; EINTR is retried inside; `result` is bytes moved or -errno. A malformed
 * request (kind, file, alignment) is accepted and completes with -EINVAL or -EBADF.
 * Order: requests in flight may run in any order.
 * Backends: posix (thread pool), uring (a ring), mem (tests, simulator); fault wraps any.
 */
#ifndef KVT_IO_IO_H
#define KVT_IO_IO_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/log.h"

#define KVT_IO_ALIGN 4096u  /* offset, size and address alignment of every data request */
#define KVT_IO_IOV_MAX 64u  /* pieces of one request */
#define KVT_IO_NAME_MAX 64u /* bytes of a file name, with the terminator */

struct kvt_io;

enum kvt_io_kind {
    KVT_IO_READ = 1,
    KVT_IO_WRITE = 2,
    KVT_IO_SYNC = 3, /* fdatasync */
    KVT_IO_PUNCH = 4 /* punch() below, without waiting: one piece, whose length alone counts. 0,
                        -EOPNOTSUPP: neither holes nor zeros by the backend; -errno */
};

/* One data request. Owned by the submitter, untouched by it until reaped. */
struct kvt_io_req {
    /* in */
    int kind;        /* enum kvt_io_kind */
    int file;        /* from open() */
    uint64_t offset; /* bytes, multiple of KVT_IO_ALIGN */
    uint32_t iov_count;
    struct iovec iov[KVT_IO_IOV_MAX];     /* base and len multiples of KVT_IO_ALIGN */
    void *user;                           /* the submitter's */
    void (*done)(struct kvt_io_req *req); /* the submitter's; called by whoever reaps, never by
                                             the backend */
    /* out */
    int64_t result; /* bytes moved (less than asked only at end of file), or -errno */
    int64_t elapsed_ns;
    /* the backend's */
    struct kvt_io_req *next;
    uint64_t backend_word[4];
};

enum { KVT_IO_OPEN_CREATE = 1, KVT_IO_OPEN_READ_ONLY = 2, KVT_IO_OPEN_EXCLUSIVE = 4 };

struct kvt_io_info {
    const char *backend;     /* "posix", "mem", ... static */
    const char *why;         /* why direct or buffered; borrowed while the instance lives */
    const char *backend_why; /* why this backend; borrowed as well; NULL: there was no choice */
    int direct;              /* 1: O_DIRECT proved by writing and reading written data */
    uint64_t free_bytes;     /* of the file system */
    uint64_t total_bytes;
};

struct kvt_io_ops {
    const char *name;
    void (*destroy)(struct kvt_io *io); /* waits for requests in flight */

    /* Control. Files are small non-negative numbers of this instance. 0600. */
    int (*open)(struct kvt_io *io, const char *name, int flags); /* file, or -errno */
    void (*close)(struct kvt_io *io, int file);
    int64_t (*size)(struct kvt_io *io, int file);
    int (*truncate)(struct kvt_io *io, int file, uint64_t bytes);
    /* Reserve space for [0, bytes) and grow the file to at least that, reading as zeros. After an
     * error (-ENOSPC; -EOPNOTSUPP: callers go on without) the size is what it was. */
    int (*allocate)(struct kvt_io *io, int file, uint64_t bytes);
    /* Make a range (multiples of KVT_IO_ALIGN) read as zeros; never grows the file. */
    int (*punch)(struct kvt_io *io, int file, uint64_t offset, uint64_t bytes);
    int (*unlink)(struct kvt_io *io, const char *name);
    int (*rename)(struct kvt_io *io, const char *from, const char *to);
    int (*sync_dir)(struct kvt_io *io);
    /* Call fn for every entry but "." and ".."; a non-zero return of fn stops and is returned. */
    int (*list)(struct kvt_io *io, int (*fn)(void *arg, const char *name), void *arg);
    /* Take the exclusive lock of the root (a lock file); 0, KVT_E_LOCKED, -errno. Held until
     * destroy. owner_pid: optional, who holds it when locked, 0 when that is not known. A read-only
     * instance takes a shared lock, or none where no owner has ever been. */
    int (*lock)(struct kvt_io *io, int64_t *owner_pid);
    void (*info)(struct kvt_io *io, struct kvt_io_info *info);

    /* Data. submit() never blocks; 0; -EAGAIN when the backend's queue is full; -EIO in a forked
     * child, which has none of the backend's threads. */
    int (*submit)(struct kvt_io *io, struct kvt_io_req *req);
    /* Move up to max completed requests into out; returns how many. Never blocks. */
    unsigned (*reap)(struct kvt_io *io, struct kvt_io_req **out, unsigned max);
    /* Readable when reap() may return something; -1 when the backend completes inside reap(). */
    int (*event_fd)(struct kvt_io *io);
};

struct kvt_io { /* first member of every backend's own struct */
    const struct kvt_io_ops *ops;
};

/* Synchronous helpers over submit/reap, for open and recovery (no other request may be in flight).
 * Return bytes moved or -errno. buf, len, offset multiples of KVT_IO_ALIGN. */
int64_t kvt_io_read_now(struct kvt_io *io, int file, uint64_t offset, void *buf, size_t len);
int64_t kvt_io_write_now(struct kvt_io *io, int file, uint64_t offset, const void *buf, size_t len);
int kvt_io_sync_now(struct kvt_io *io, int file);

/* Backends over a directory. path: the root directory, created 0700 (one level) if absent unless
 * read_only; refused when it is a symlink (KVT_E_SYMLINK), not a directory (-ENOTDIR), or not
 * writable (KVT_E_READ_ONLY). threads: 1..16, of the posix backend. direct: -1 auto (probe), 0 off,
 * 1 required (KVT_E_UNSUPPORTED when the probe fails; info.why has the reason otherwise, and one
 * warning is logged). Read-only instances are buffered. */
enum kvt_io_backend {
    KVT_IO_POSIX = 0, /* threads; always there */
    KVT_IO_URING,     /* a ring; KVT_E_UNSUPPORTED where kvt_io_uring_probe() says no */
    KVT_IO_AUTO       /* the faster one, by a short probe; info.backend_why has the figures */
};

struct kvt_io_posix_params {
    const char *path;
    int threads;
    int direct;
    int read_only;      /* 1: nothing is created or written (fsck, stat) */
    int backend;        /* enum kvt_io_backend; heeded by kvt_io_files_new() */
    uint64_t cap_bytes; /* what will be kept in the root; auto does not probe for a tiny one. 0:
                           not known */
    /* uring only, optional: memory whose pages are to be registered with the ring, so that the
     * kernel need not look them up at each request. As much as it takes; none is no error. The
     * memory is borrowed until destroy(). */
    void *fixed;
    uint64_t fixed_bytes;
    struct kvt_log log;
};
int kvt_io_files_new(const struct kvt_io_posix_params *params, struct kvt_io **out);
/* The same with the posix backend, whatever params->backend says. */
int kvt_io_posix_new(const struct kvt_io_posix_params *params, struct kvt_io **out);

/* Whether the uring backend can be had in this process: 0, or -errno (-EOPNOTSUPP: not built in);
 * why gets a sentence either way. Nothing is left open. */
int kvt_io_uring_probe(char *why, size_t why_len);

/* Whether somebody holds the lock of the root at path now: 1, 0, or -errno. Starts nothing, makes
 * nothing, takes nothing. */
int kvt_io_posix_held(const char *path);

/* Files in memory; completions happen inside reap(). capacity_bytes bounds all files (ENOSPC).
 * kvt_io_mem_clone() copies the files of an instance (what a crash would leave behind when every
 * write reached the disk): the model test and the simulator reopen from it. */
int kvt_io_mem_new(uint64_t capacity_bytes, struct kvt_io **out);
int kvt_io_mem_clone(const struct kvt_io *from, struct kvt_io **out);

#endif
