/* The store half in this process: the arena, the disk roots, the store, its owner thread. A cache
 * in-process has one, and kvtierd is one with a server in front.
 *
 * Lifetime: settings, and what log and stats_ctx point to, outlive it. Threads: open and close from
 * one thread; roots' states under `lock` while it is open.
 */
#ifndef KVT_CLIENT_HOST_H
#define KVT_CLIENT_HOST_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/log.h"
#include "client/settings.h"
#include "io/io.h"
#include "plan/admission.h"
#include "remote/remote.h"
#include "store/owner.h"

#define KVT_HUGE_BYTES (UINT64_C(2) << 20)
#define KVT_HUGE_ARENA_MIN (UINT64_C(64) << 20)
/* Record bytes being encoded at a time where a GPU encodes: it ends whole jobs, and the store's
 * round trips come in between; less than a few jobs' worth leaves the link idle. Nobody fills more
 * at a time; a daemon holds its clients to it, and to an eighth of the arena. */
#define KVT_GPU_ALLOC_WINDOW (UINT64_C(256) << 20)

/* Memory that slots lie in. */
struct kvt_arena_map {
    void *map; /* what was mapped; the arena lies in it */
    uint64_t map_bytes;
    uint8_t *arena;
    uint64_t arena_bytes;
    bool huge; /* huge pages were asked for, and not refused */
    int fd;    /* shared: the memfd; -1: private memory */
};

/* Map the arena as the settings want it; shared: other processes will map its fd. On error a
 * sentence where one helps; what is in *out is to be unmapped in any case. */
__attribute__((warn_unused_result)) int kvt_arena_map(const struct kvt_settings *settings,
                                                      bool shared, struct kvt_arena_map *out,
                                                      char *error, size_t error_len);
void kvt_arena_unmap(struct kvt_arena_map *map);
/* Map `bytes` of a descriptor, shared; where it is large, so that huge pages fit. fd is not kept.
 * 0, -errno. */
__attribute__((warn_unused_result)) int kvt_arena_map_fd(int fd, uint64_t bytes,
                                                         struct kvt_arena_map *out);

struct kvt_root_state {
    const char *path; /* the settings' */
    uint64_t cap_bytes;
    struct kvt_io *io; /* NULL: not in use */
    int error;         /* why not */
    int number;        /* the store's, -1: not in use */
    bool waiting;      /* another process holds it: tried again */
    char state[512];   /* "ok", or the sentence that says why it is off */
    char backend[32];
    char backend_why[256]; /* why this one */
    char why[256];         /* why direct or buffered */
    int direct;
    bool write_left_known; /* of its write budget's bucket, from an earlier life */
    double write_left;
};

#define KVT_HOST_REMOTE_DEADLINE_NS INT64_C(1000000000) /* the most, where the arena is shared */

struct kvt_host {
    const struct kvt_settings *settings;
    struct kvt_log log;
    struct kvt_clock clock;
    bool shared; /* the arena is to be mapped by other processes */
    /* kvt_store_params.stats_lines; optional */
    size_t (*stats_lines)(void *ctx, char *text, size_t room);
    void *stats_ctx;

    struct kvt_arena_map memory;
    struct kvt_owner *owner;
    struct kvt_remote *remote; /* the tier that machines share; NULL: none */
    pthread_t huge_thread;     /* arena_huge.c */
    bool huge_running;
    _Atomic int huge_stop;
    _Atomic uint64_t huge_bytes; /* of the arena, that have been made huge pages */
    pthread_t retry_thread;      /* takes roots over that others let go of (roots.c) */
    bool retry_running;

    pthread_mutex_t lock; /* everything below */
    pthread_cond_t again; /* stop_retry */
    bool ready;           /* the lock and the condition are there */
    bool stop_retry;
    uint32_t roots_used; /* by the store */
    bool chances_known, kept;
    struct kvt_admission_chances chances; /* of an earlier life; at close, of this one */
    double kept_left[KVT_DISKS_MAX];      /* at close: by the store's numbers */
    struct kvt_root_state roots[KVT_DISKS_MAX];
};

/* Map the arena; the fields of the first paragraph are set by the caller, the others are zero.
 * kvt_host_free() is due in any case. error, here and below: a sentence, where one helps. */
__attribute__((warn_unused_result)) int kvt_host_init(struct kvt_host *host, char *error,
                                                      size_t error_len);
/* Open what the settings name and start the thread. A root that cannot be used is left out unless
 * it is required. kvt_host_close() is due in any case. */
__attribute__((warn_unused_result)) int kvt_host_open(struct kvt_host *host, char *error,
                                                      size_t error_len);
/* Whether the shared tier that the settings name could be opened here, with the warnings of its
 * options: files and directories are looked at, nobody is connected to. 0, or as _open(). */
__attribute__((warn_unused_result)) int kvt_host_remote_look(const struct kvt_host *host,
                                                             char *error, size_t error_len);
/* What is open: stop the thread, write what is queued, close the roots. No client is attached any
 * more. The arena stays mapped until kvt_host_free(): who has pinned it lets go of it in between.
 */
void kvt_host_close(struct kvt_host *host);
void kvt_host_free(struct kvt_host *host);

/* remote_unused.c: warn of options of the shared tier that have no effect: where the store is ours,
 * and where it is a kvtierd's. */
void kvt_remote_unused_tell(const struct kvt_settings *settings, bool shared,
                            const struct kvt_log *log);
void kvt_remote_elsewhere_tell(const struct kvt_settings *settings, const struct kvt_log *log);

/* quota_unused.c: warn of an ns_quota or ns_limit that something smaller keeps from coming into
 * force. */
void kvt_quota_unused_tell(const struct kvt_settings *settings, const struct kvt_log *log);

/* arena_huge.c: make huge pages of a shared arena, in the background. */
void kvt_huge_start(struct kvt_host *host);
void kvt_huge_stop(struct kvt_host *host);
/* The same for a piece of shared memory, here and now, for who is about to pin it; contents stay.
 * stop: ends it early when it is not 0. false: no more are to be had. */
bool kvt_huge_make(uint8_t *base, uint64_t bytes, const _Atomic int *stop);

/* reply.c: start a thread of ours: all signals blocked, named. */
__attribute__((warn_unused_result)) int kvt_thread_start(pthread_t *thread, const char *name,
                                                         void *(*fn)(void *), void *arg);

/* arena_room.c: whether `bytes` of shared memory can be had here at all: what the container, the
 * machine and the limits of the process allow. KVT_E_LIMIT and a sentence with both numbers. */
__attribute__((warn_unused_result)) int kvt_arena_room(uint64_t bytes, char *error,
                                                       size_t error_len);

/* The least memory limit of the control groups that the file `groups` (as /proc/self/cgroup) names
 * below `dir`, and of those above them; UINT64_MAX: none. */
uint64_t kvt_cgroup_limit(const char *groups, const char *dir);
/* What this process may have at most: the machine's memory, or its control group's where that is
 * less; UINT64_MAX: not known. */
uint64_t kvt_memory_allowed(void);
/* `percent` of `allowed` bytes, shared out among `ranks` processes, in whole MiB. Pure. */
uint64_t kvt_memory_share(uint64_t allowed, uint64_t percent, uint64_t ranks);

/* admission_file.c: what is left of a root's write budget, and what admission has learnt, from the
 * root's file; once the root is in use, that nothing is left, until it is written at close, by what
 * kvt_store_params.admission_kept has told. */
void kvt_admission_file_read(struct kvt_host *host, uint32_t disk, struct kvt_root_state *root);
void kvt_admission_file_mark(struct kvt_host *host, uint32_t disk);
void kvt_admission_kept(void *ctx, const struct kvt_admission *admission);
void kvt_admission_files_write(struct kvt_host *host);

/* roots.c: open and lock the roots; fill in states. Fails only when disk_required. */
__attribute__((warn_unused_result)) int kvt_roots_open(struct kvt_host *host, char *error,
                                                       size_t error_len);
void kvt_roots_close(struct kvt_host *host);
/* Roots are configured and none is in use: why the first one is not; else 0. */
int kvt_roots_missing(struct kvt_host *host);
/* Try again, in the background, to take the roots that another process holds. */
__attribute__((warn_unused_result)) int kvt_roots_retry_start(struct kvt_host *host);
void kvt_roots_retry_stop(struct kvt_host *host);
/* What an open host has to do without: "a (going on without it); b (...)". */
void kvt_roots_tell_missing(struct kvt_host *host, char *text, size_t len);
/* Why a root cannot be used, in one sentence: the path, what is wrong, the remedy. code: what
 * opening or locking it returned; owner_pid: 0 when not known. */
void kvt_root_describe(const char *path, uint64_t cap_bytes, int code, int64_t owner_pid,
                       char *text, size_t len);
/* root_room.c: does a cap fit the file system? */
struct kvt_root_room {
    uint64_t cap_bytes;
    uint64_t used_bytes; /* by the store; 0 also: its directory is not there, or may not be read */
    uint64_t free_bytes; /* of the file system, for users */
};
/* Of a root, or of the one that would be made at path. 0, or -errno: it cannot be told. */
__attribute__((warn_unused_result)) int kvt_root_room(const char *path, uint64_t cap_bytes,
                                                      struct kvt_root_room *out);
/* Whether the cap is more than what is used and free together; text: a sentence with the remedy. */
__attribute__((warn_unused_result)) bool
kvt_root_room_short(const struct kvt_root_room *room, const char *path, char *text, size_t len);
/* Note that root `number` failed to open with `code`: it is closed and its state says why. */
void kvt_roots_drop(struct kvt_host *host, uint32_t number, int code, int64_t owner_pid);

#endif
