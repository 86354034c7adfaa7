/* The log of a kvtierd: lines to a descriptor, by whoever has one to write, and nobody waits for
 * who reads them. What the descriptor does not take at once is lost and counted, and the next line
 * that it takes is preceded by one that says how many were.
 * Threads: any; _init() before the others.
 */
#ifndef KVT_DAEMON_LOG_OUT_H
#define KVT_DAEMON_LOG_OUT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/log.h"

enum kvt_log_way {
    KVT_LOG_PLAIN,  /* a file: writes take as long as they take */
    KVT_LOG_REOPEN, /* a pipe or a terminal, opened anew: O_NONBLOCK is ours alone there */
    KVT_LOG_SOCKET, /* what each write may say for itself */
    KVT_LOG_POLLED  /* a pipe that cannot be opened anew: it is asked before each write */
};

struct kvt_log_out {
    int fd;                /* the caller's */
    int own;               /* KVT_LOG_REOPEN: ours; -1: none */
    int way;               /* enum kvt_log_way */
    bool journal;          /* journald reads it: "<3>", and no time */
    _Atomic int level;     /* lines above it are not written */
    _Atomic uint64_t lost; /* lines, in all */
    pthread_mutex_t lock;  /* what follows */
    uint64_t untold;       /* of those lost */
    bool torn;             /* the last line was taken in part */
};

/* Lines go to fd, which stays the caller's and stays as it is. */
void kvt_log_out_init(struct kvt_log_out *out, int fd);
void kvt_log_out_free(struct kvt_log_out *out);
/* A line with its time, or as journald wants it. As kvt_log.fn, out its arg. */
void kvt_log_out_line(void *out, int level, const char *message);
/* A line as it is: "kvtierd: ..." */
void kvt_log_out_text(struct kvt_log_out *out, const char *text);

#endif
