/* The store half: places bytes. Index, L1 slots, L2 roots, eviction, deadlines, counters.
 *
 * One owner calls everything; there is no thread, clock, randomness or file of its own in here, so
 * the simulator runs this very code. Messages go in through kvt_store_handle(), replies come out
 * through params.reply, time passes in kvt_store_run(). owner.h puts it on a thread.
 * It never looks inside a payload.
 */
#ifndef KVT_STORE_STORE_H
#define KVT_STORE_STORE_H

#include <stdbool.h>

#include "base/clock.h"
#include "base/log.h"
#include "format/message.h"
#include "format/ns_rules.h"
#include "io/io.h"
#include "remote/remote.h"
#include "store/counters.h"

struct kvt_store;
struct kvt_admission; /* plan/admission.h */
struct kvt_admission_chances;

#define KVT_STORE_ROOTS_MAX 16u
/* Descriptors of a root: segments, as many as its files_max says, and besides its directory, lock,
 * event descriptor, ring, superblock, "stats", and two journals or one and "ttl". */
#define KVT_STORE_ROOT_FILES_MIN 16u
#define KVT_STORE_ROOT_FILES_MAX 120u
#define KVT_STORE_ROOT_FDS_OTHER 8u

struct kvt_store_root {
    struct kvt_io *io; /* locked; the store closes its log, the caller destroys the io after */
    uint64_t cap_bytes;
    uint32_t files_max;       /* segments open at a time; 0: the least */
    uint64_t write_bytes_day; /* bytes that may be written to it in a day; 0: any */
    bool write_left_known;    /* of its bucket, from an earlier life: ... */
    double write_left;        /* ... that many bytes are left, at most what it holds */
    const char *name;         /* in messages; NULL: none. Borrowed, as the io */
};

/* What STAT says of each root, behind the numbers of counters.h. */
struct kvt_store_root_state {
    int32_t failing; /* why its writes fail at present; 0: they do not */
    uint32_t reserved;
    uint64_t read_fails;
    uint64_t bytes_used;
};

struct kvt_store_params {
    void *arena; /* 4 KiB aligned; borrowed until close; clients map the same bytes */
    uint64_t arena_bytes;
    uint64_t staging_bytes;     /* part of the arena for loads (and for stores when DRAM is 0) */
    uint64_t write_queue_bytes; /* blocks waiting for L2; more are dropped and counted */
    int write;                  /* enum kvt_write for stores that do not say; 0: through */
    int64_t ttl_ns;             /* blocks not used for so long are gone; 0: never */
    uint64_t ns_bytes_max;      /* of the records of one namespace and group; 0: any */
    const struct kvt_ns_rule *ns_rules; /* what the operator says of single ones; borrowed */
    uint32_t ns_rule_count;
    int admit;               /* enum kvt_admit (plan/admission.h): which blocks are written */
    uint32_t admit_permille; /* KVT_ADMIT_RANDOM only: the share of them */
    double token_s, byte_s;  /* KVT_ADMIT_VALUE: seconds to compute a token, to load a byte; 0: as
                                plan_prefill and plan_disk are by default */
    const struct kvt_admission_chances *chances; /* of an earlier life; NULL: none. Borrowed by open
                                                  */
    /* What admission has learnt, and what its buckets hold, at close. Optional. */
    void (*admission_kept)(void *ctx, const struct kvt_admission *admission);
    void *admission_ctx;
    uint64_t pin_bytes_max;
    uint64_t client_bytes_max;  /* that one client may hold in slots; 0: all of them. One record
                                   always  goes */
    uint64_t client_fill_max;   /* of them, in slots that it has not committed; 0: all the same */
    uint64_t scrub_bytes_per_s; /* of cold records read back and verified when idle; 0: none */
    uint32_t blocks_max;        /* index capacity, L1 and L2 together; 0: derived from the caps as
                                   namespaces open (the index grows at open time only) */
    uint32_t root_count;
    struct kvt_store_root roots[KVT_STORE_ROOTS_MAX];
    uint32_t roots_pending; /* roots that may still come by kvt_store_root_join() */
    int32_t no_root_status; /* what FLUSH answers while no root is in use; 0: nothing was wanted */
    uint64_t seed;          /* fingerprint secret and others */
    int test_collide; /* enum kvt_index_collide: tests force collisions of the index; else 0 */
    /* The tier that machines share; NULL: none. The caller's, and in use until close has returned:
     * nothing of the store is touched by it from then on. */
    struct kvt_remote *remote;
    int64_t remote_deadline_ns;  /* of one look-up or one read there */
    uint64_t remote_queue_bytes; /* records on their way there at a time */
    int remote_write;            /* enum kvt_remote_write */
    struct kvt_clock clock;
    struct kvt_clock wall; /* nanoseconds since 1970, however wrong: how old blocks of an earlier
                              life are. None: what a restart finds begins to live anew */
    struct kvt_log log;
    /* Deliver a reply to a client. The message is borrowed during the call. Clients reserve room
     * for every reply they can be owed, so this never blocks or fails; a client that does not is
     * the transport's problem. */
    void (*reply)(void *ctx, uint32_t client, const struct kvt_msg *msg);
    void *reply_ctx;
    /* Lines "name value\n" of the client half for the statistics file; returns their bytes, less
     * than room. Called by the owner, which must not wait in it. Optional. */
    size_t (*stats_lines)(void *ctx, char *text, size_t room);
    void *stats_ctx;
};

/* What is in a root's directory, before anything (even the lock) is written to it: 0 a store; 1
 * nothing: a store may be made here; KVT_E_NOT_OURS; KVT_E_NEWER; -errno. Reads only; blocks. */
int kvt_store_root_probe(struct kvt_io *io);

/* Recover the roots and start. Blocks. 0, -ENOMEM, KVT_E_*; a root that fails to open fails all
 * (the caller decides whether to try without it); *bad_root, optional, is its number. */
int kvt_store_open(const struct kvt_store_params *params, struct kvt_store **out,
                   uint32_t *bad_root);

/* One more root for a store that runs. Blocks that are here already stay what they are; purges
 * since open count for its records too. open: recovers it, on any thread, the owner goes on
 * meanwhile; blocks as kvt_store_open() does, and returns the same. join: the owner's; the root is
 * in use from 0 on, and what it holds is found by and by, in the runs that follow (joining() says
 * whether all of it is). 0; -EAGAIN not now; KVT_E_LIMIT; -ENOMEM. discard: what
 * join refused; any thread, blocks. The io stays the caller's in any case, and is in use until
 * discard, or close of the store. */
struct kvt_store_joining;
__attribute__((warn_unused_result)) int kvt_store_root_open(const struct kvt_store *store,
                                                            const struct kvt_store_root *root,
                                                            struct kvt_store_joining **out);
__attribute__((warn_unused_result)) int kvt_store_root_join(struct kvt_store *store,
                                                            struct kvt_store_joining *joining);
bool kvt_store_root_joining(const struct kvt_store *store);
void kvt_store_root_discard(struct kvt_store_joining *joining);

/* Write what is queued (bounded by timeout_ns), seal, sync, free. Replies still owed are sent. */
void kvt_store_close(struct kvt_store *store, int64_t timeout_ns);

/* Handle one request. msg is checked (sizes, counts, handles): a malformed one is answered with
 * KVT_E_INVAL when it can be, and ignored otherwise. Returns 0; 1 for a malformed one that was
 * answered; KVT_E_INVAL for a message so broken that the transport must disconnect the client. */
int kvt_store_handle(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);

/* A client that may still write into what it was filling has been disconnected: its loads end, its
 * pins and grants are freed. */
void kvt_store_client_stop(struct kvt_store *store, uint32_t client);
/* A client died or left: its pins and uncommitted slots are freed. */
void kvt_store_client_gone(struct kvt_store *store, uint32_t client);

/* Handle completions, timers and background work. Returns the clock time at which it wants to run
 * again at the latest, or INT64_MAX. Bounded work per call. */
int64_t kvt_store_run(struct kvt_store *store);

/* Everything off: lookups miss, allocs are refused (counted). */
void kvt_store_enable(struct kvt_store *store, int on);

void kvt_store_stats(const struct kvt_store *store, struct kvt_store_stats *stats);

/* For tests and fsck: check every internal invariant (lists, counts, sums); 0 or KVT_E_CORRUPT,
 * with a sentence in why. */
int kvt_store_check(const struct kvt_store *store, char *why, size_t why_len);

#endif
