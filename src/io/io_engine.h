/* What moves the data of a directory's files: the seam between io_files.c and its two engines, and
 * the choice between them. Private to src/io and its tests.
 *
 * An engine knows descriptors, not files. Its owner thread calls everything; the rules of submit()
 * and reap() are those of io.h. */
#ifndef KVT_IO_IO_ENGINE_H
#define KVT_IO_IO_ENGINE_H

#include <stdbool.h>

#include "io/io_posix.h"

struct kvt_io_engine;

struct kvt_io_engine_ops {
    const char *name;
    /* Run what was accepted to its end, then free. Completions not reaped are forgotten. */
    void (*stop)(struct kvt_io_engine *engine);
    /* In a forked child: free what the child has of it, and leave the parent's alone. */
    void (*abandon)(struct kvt_io_engine *engine);
    /* bytes: of the request, or the error that it is to complete with. 0, -EAGAIN. */
    int (*submit)(struct kvt_io_engine *engine, struct kvt_io_req *req, int fd, int64_t bytes);
    unsigned (*reap)(struct kvt_io_engine *engine, struct kvt_io_req **out, unsigned max);
};

struct kvt_io_engine { /* first member of every engine's own struct */
    const struct kvt_io_engine_ops *ops;
    int event_fd;
};

/* posix_pool.c. 0, -errno. */
KVT_POSIX_RESULT int kvt_posix_engine_new(const struct kvt_posix_sys *sys, bool direct, int threads,
                                          struct kvt_io_engine **out);

/* How a ring lies, for tests. outcome: what the kernel said about one transfer or sync of req, to
 * be replaced by the returned value. */
struct kvt_uring_sys {
    int32_t (*outcome)(const struct kvt_io_req *req, int32_t result);
};

/* io_uring.c, or uring_none.c in a build without liburing. sys: NULL, or borrowed. 0, -errno with
 * a sentence in why. */
KVT_POSIX_RESULT int kvt_uring_engine_new(bool direct, const struct kvt_uring_sys *sys,
                                          struct kvt_io_engine **out, char *why, size_t why_len);
/* Register memory with the ring. Returns how many bytes were; 0 is no error. */
uint64_t kvt_uring_engine_register(struct kvt_io_engine *engine, void *base, uint64_t bytes);

/* io_choose.c: the engine that params ask for; why gets the reason. 0; KVT_E_UNSUPPORTED a ring was
 * required and cannot be had; -errno. */
KVT_POSIX_RESULT int kvt_io_choose(const struct kvt_io_posix_params *params,
                                   const struct kvt_posix_sys *sys, int dir_fd, bool direct,
                                   struct kvt_io_engine **out, char *why, size_t why_len);

/* Best of a few passes of large reads of a scratch file by each of two engines, in turns; of writes
 * too, where the reads do not tell them apart. Writes and reads `bytes` (a multiple of 1 MiB) in
 * dir_fd, and stops after budget_ns with what it has, writes after as much again. 0 with both times
 * of reads set; -ETIME not one pass each within the budget; -errno. */
struct kvt_io_race {
    struct kvt_io_engine *engines[2];
    int64_t best_ns[2];
    int64_t write_ns[2]; /* 0: not compared */
};
/* Which of them is the faster one: by reads, which somebody waits for; by writes when those tie;
 * the first when these do, too. */
unsigned kvt_io_race_winner(const struct kvt_io_race *race);
KVT_POSIX_RESULT int kvt_io_race(struct kvt_io_race *race, int dir_fd, bool direct, uint64_t bytes,
                                 int64_t budget_ns);

#endif
