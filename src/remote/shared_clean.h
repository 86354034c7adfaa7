/* Keeping a shared directory within a size and an age: one process of all that use it cleans,
 * elected by a lease (a file). Threads: one of its own. */
#ifndef KVT_REMOTE_SHARED_CLEAN_H
#define KVT_REMOTE_SHARED_CLEAN_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "remote/shared_files.h"

struct kvt_shared_clean {
    struct kvt_shared_files *files;
    uint64_t cap_bytes, ns_cap_bytes; /* of all of it, of each namespace; 0: any */
    int64_t period_ns;
    char token[128]; /* what the lease says when it is ours */
    pthread_t thread;
    bool running;
    pthread_mutex_t lock;
    pthread_cond_t again;
    bool stopping; /* under the lock */
    /* the thread's: somebody's lease as it was seen last, and since when */
    int64_t seen_ns, since_ns;
    ino_t seen_ino;
    bool told;
    _Atomic uint64_t passes, removed; /* of this process */
};

/* Without caps and a time to live (the option's, or a namespace's that this process puts to)
 * nothing is cleaned. A pass every ten seconds (params->clean_period_ns: a test's). The lease is
 * lost when it has not been renewed for six of them. 0, -errno. stop() is due in any case. */
__attribute__((warn_unused_result)) int
kvt_shared_clean_start(struct kvt_shared_clean *clean, struct kvt_shared_files *files,
                       const struct kvt_remote_params *params);
void kvt_shared_clean_stop(struct kvt_shared_clean *clean);

#endif
