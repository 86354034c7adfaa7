/* One file for each record in a directory that machines share: what a request does there. Blocks as
 * the file system does. Threads: any, at a time. Allocates nothing. */
#ifndef KVT_REMOTE_SHARED_FILES_H
#define KVT_REMOTE_SHARED_FILES_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/clock.h"
#include "remote/remote.h"
#include "remote/remote_seal.h"

struct kvt_shared_files {
    struct kvt_remote_mac mac;
    struct kvt_clock clock;
    int64_t ttl_ns;            /* what was written before that is not there; 0: for ever */
    int root;                  /* descriptor of ROOT/kvt0; its number stays the same */
    char path[1024];           /* ROOT */
    bool mounted;              /* ROOT was a mount of its own at open */
    pthread_mutex_t root_lock; /* while it is opened again; made by who opens */
    bool again_told;           /* under the lock */
    _Atomic int64_t look_ns;   /* when its name is to be looked at next */
    struct kvt_log log;
    char node[65];
    _Atomic uint64_t number; /* of temporary files */
};

/* ROOT/kvt0 and what is always in it. ROOT itself must be there: a mount that is missing is not to
 * be filled with a directory on the drive below it. 0; -errno with a sentence. */
__attribute__((warn_unused_result)) int kvt_shared_files_open(struct kvt_shared_files *shared,
                                                              const char *path, char *error,
                                                              size_t error_len);
/* clock is set. */
__attribute__((warn_unused_result)) int kvt_shared_root_open(struct kvt_shared_files *shared,
                                                             const char *path, char *error,
                                                             size_t error_len);
/* ROOT/kvt0 once more, made where it is not there: somebody has removed it, or what was in it. 0,
 * -errno. */
__attribute__((warn_unused_result)) int kvt_shared_root_again(struct kvt_shared_files *shared);
/* Once a second, or for a purge now: whether the name is still the descriptor's. A put makes it
 * where nothing has the name. */
void kvt_shared_root_look(struct kvt_shared_files *shared, enum kvt_remote_op op);
void kvt_shared_files_close(struct kvt_shared_files *shared);

/* The status that the request ends with. */
__attribute__((warn_unused_result)) int kvt_shared_files_do(struct kvt_shared_files *shared,
                                                            struct kvt_remote_req *req);

#endif
