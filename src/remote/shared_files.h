/* One file for each record in a directory that machines share: what a request does there. Blocks as
 * the file system does. Threads: any, at a time. Allocates nothing. */
#ifndef KVT_REMOTE_SHARED_FILES_H
#define KVT_REMOTE_SHARED_FILES_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "remote/remote.h"
#include "remote/remote_seal.h"
#include "remote/shared_path.h"

#define KVT_SHARED_NOTES 64u

/* What this process knows of a namespace that it puts to. */
struct kvt_shared_note {
    char ns[2 * KVT_NS_BYTES + 1];
    bool said; /* how long its records live: in its file "ttl" */
    bool far;  /* a mount of its own: nothing can be linked there from kvt0/tmp */
    int64_t ttl_ns;
};

struct kvt_shared_files {
    struct kvt_remote_mac mac;
    struct kvt_clock clock;
    _Atomic int64_t skew_ns; /* the file server's clock - ours, where they differ by seconds */
    _Atomic int64_t link_tell_ns, foreign_tell_ns; /* no warning of that before */
    _Atomic bool ttl_said; /* a namespace of this process has one: the cleaner has work */
    pthread_mutex_t notes_lock;
    struct kvt_shared_note notes[KVT_SHARED_NOTES]; /* under it; by first bytes */
    int64_t ttl_ns;            /* what was written before that is not there; 0: for ever */
    int root;                  /* descriptor of ROOT/kvt0; its number stays the same */
    char path[1024];           /* ROOT */
    bool mounted;              /* ROOT was a mount of its own at open */
    pthread_mutex_t root_lock; /* while it is opened again; made by who opens */
    bool again_told;           /* under the lock */
    _Atomic int64_t look_ns;   /* when its name is to be looked at next */
    _Atomic bool away;         /* it was not there, or not ours, when that was done last */
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
 * where nothing has the name. 0; KVT_E_MISS nothing has it, so nothing is there; -errno what has it
 * cannot be used. */
__attribute__((warn_unused_result)) int kvt_shared_root_look(struct kvt_shared_files *shared,
                                                             enum kvt_remote_op op);
void kvt_shared_files_close(struct kvt_shared_files *shared);

/* What time it is for the file server; a file's time, whatever it says; the distance of two, in
 * either direction: of a time that lies ahead all that is known is that somebody's clock was wrong.
 */
int64_t kvt_shared_now_ns(const struct kvt_shared_files *shared);
int64_t kvt_shared_time_ns(struct timespec time);
int64_t kvt_shared_age_ns(int64_t now_ns, int64_t time_ns);
/* The server's clock - ours, from the time that a file got which was made between the two: 0 where
 * less than two seconds are to be explained. Pure. */
int64_t kvt_shared_skew_ns(int64_t before_ns, int64_t got_ns, int64_t after_ns);

/* A directory on the way to records is a symbolic link, or (met) there is something among records
 * that is none of ours: told once in ten minutes. below, name: NULL where it is not as deep. */
void kvt_shared_link_met(struct kvt_shared_files *shared, const char *ns, const char *below);
void kvt_shared_foreign_met(struct kvt_shared_files *shared, const char *ns, const char *below,
                            const char *name);

/* ---- shared_put.c */
/* A file made for writing, by a name of ours; the clock is looked at. A descriptor; KVT_E_NO_SPACE,
 * -errno. */
__attribute__((warn_unused_result)) int kvt_shared_create(struct kvt_shared_files *shared, int dir,
                                                          const char *name);
__attribute__((warn_unused_result)) int kvt_shared_put(struct kvt_shared_files *shared,
                                                       const struct kvt_remote_req *req);
/* What is known of a namespace is out of date: it is being removed. */
void kvt_shared_forget(struct kvt_shared_files *shared, const char *ns);
/* Of a look-up too: older than it may be. */
bool kvt_shared_expired(const struct kvt_shared_files *shared, const struct kvt_remote_req *req,
                        const struct stat *st);

/* ---- shared_drop.c */
__attribute__((warn_unused_result)) int kvt_shared_drop(struct kvt_shared_files *shared,
                                                        struct kvt_remote_req *req);
__attribute__((warn_unused_result)) int kvt_shared_drop_ns(struct kvt_shared_files *shared,
                                                           struct kvt_remote_req *req);

/* The status that the request ends with. */
__attribute__((warn_unused_result)) int kvt_shared_files_do(struct kvt_shared_files *shared,
                                                            struct kvt_remote_req *req);

#endif
