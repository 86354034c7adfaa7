/* The seam between the store half and a tier that other machines share (L3): records by their full
 * key on a server, or in a directory, that is not ours. The store hands requests in and takes
 * completions out, and never waits: a backend has threads of its own.
 *
 * Rules
 *  1. Exactly one completion per accepted request, at its deadline or soon after at the latest. A
 *     backend that hangs in a system call may be later: who needs a bound keeps one of his own.
 *  2. Until a request is reaped its memory is the backend's, and so is the record it reads into or
 *     writes from. After stop() nothing is.
 *  3. What GET brings has been verified as what is read from disk is (format/record.h): magic,
 *     version, full key, length, checksum; and its MAC where a key is given. Anything else is
 *     KVT_E_CORRUPT, and the bytes in the record are worth nothing.
 *  4. Nothing is ever assumed to be there, or to stay: every answer is a hint but the bytes.
 * Threads: the store's owner calls everything but stats(). Calls never block, but stop() and
 * destroy(). Does not: decide what is worth the network; remember what is there (the store does).
 */
#ifndef KVT_REMOTE_REMOTE_H
#define KVT_REMOTE_REMOTE_H

#include <stdatomic.h>
#include <stdint.h>

#include "base/log.h"
#include "format/record.h"

enum kvt_remote_op {
    KVT_REMOTE_PROBE = 1, /* which of many records are there: their headers */
    KVT_REMOTE_GET,
    KVT_REMOTE_PUT,    /* unless a record of the key is there already */
    KVT_REMOTE_DROP,   /* remove records by key */
    KVT_REMOTE_DROP_NS /* remove a whole namespace */
};

/* What a PROBE found of one key. */
struct kvt_remote_found {
    struct kvt_record_header header; /* status 0: as it is there, not verified */
    /* 0; KVT_E_MISS it is not there; KVT_E_CORRUPT what is there is no record; else it is not known
     * whether: as below */
    int32_t status;
    uint32_t reserved;
};

/* Which blocks are put to a shared tier. */
enum kvt_remote_write {
    KVT_REMOTE_WRITE_OFF = 0,
    KVT_REMOTE_WRITE_SECOND, /* what is used a second time */
    KVT_REMOTE_WRITE_ALL     /* what is stored */
};

struct kvt_remote_req {
    enum kvt_remote_op op;
    uint32_t count;                  /* keys; 1 for GET and PUT */
    const struct kvt_full_key *keys; /* DROP_NS: of the first one the namespace */
    struct kvt_remote_found *found;  /* PROBE: count of them */
    void *record;                    /* GET: read into; PUT: written from */
    uint32_t record_bytes;
    /* GET: number and map id that the record gets in place of the writer's, with a new checksum:
     * both have a meaning in one store only. sequence 0: it keeps its number. */
    uint64_t sequence;
    uint8_t map;
    uint8_t replace; /* PUT: take the place of what is there */
    /* PUT: the record lives so long; PROBE, GET in a directory: what was written before that is not
     * there. Of params.ttl_ns and this the shorter one holds; 0: nothing is said. */
    int64_t ttl_ns;
    int64_t deadline_ns; /* of CLOCK_MONOTONIC */
    /* 0; KVT_E_MISS; KVT_E_EXISTS (PUT); KVT_E_STALE a whole record of another length is there;
     * KVT_E_CORRUPT what is there is damaged, or no record; KVT_E_DEADLINE; KVT_E_NO_SPACE the
     * server takes nothing; -EHOSTDOWN nobody answers there at present; -EACCES; -EAGAIN too much
     * is under way; -EPERM (DROP, DROP_NS) done, but a put of a lost connection of ours may still
     * land behind it; -EIO */
    int32_t status;
    /* DROP, DROP_NS: records. Looked at by the store while the backend has it: as long as it grows
     * a purge is not given up on. */
    _Atomic uint64_t removed;
    void *user;
    struct kvt_remote_req *next; /* the backend's, from here on */
    uint32_t left;
};

struct kvt_remote_stats {
    uint64_t connects;  /* connections made */
    uint64_t losses;    /* connections lost, refused, or given up because nobody answered */
    uint64_t redirects; /* answers "it is elsewhere" */
    uint64_t auth_fails;
    uint64_t nodes;      /* known now */
    uint64_t nodes_down; /* of them, those that do not answer */
};

struct kvt_remote;

struct kvt_remote_ops {
    const char *name;
    /* 0; -EAGAIN: not now, nothing was accepted. */
    int (*submit)(struct kvt_remote *remote, struct kvt_remote_req *req);
    uint32_t (*reap)(struct kvt_remote *remote, struct kvt_remote_req **done, uint32_t max);
    int (*event_fd)(struct kvt_remote *remote); /* readable when there is something to reap; -1 */
    void (*stats)(struct kvt_remote *remote, struct kvt_remote_stats *stats); /* any thread */
    /* What answers there, for people, where params.about asked for it: "Redis 7.0.15, one server".
     * "": it has not told. NULL: there is nothing to tell. Any thread. */
    void (*about)(struct kvt_remote *remote, char *text, size_t len);
    /* Everything under way ends now, and is not to be reaped. Blocks until nothing of the store's
     * is touched any more. */
    void (*stop)(struct kvt_remote *remote);
    void (*destroy)(struct kvt_remote *remote);
};

struct kvt_remote {
    const struct kvt_remote_ops *ops;
};

/* The shorter of two times to live, where 0 is for ever. */
static inline int64_t kvt_remote_ttl(int64_t a, int64_t b)
{
    return !a || (b && b < a) ? b : a;
}

/* A backend has removed so many more records for a request. */
static inline void kvt_remote_removed(struct kvt_remote_req *req, uint64_t count)
{
    (void)atomic_fetch_add_explicit(&req->removed, count, memory_order_relaxed);
}

#define KVT_REMOTE_NAME_BYTES 128u /* of a key as text, with its final zero */

/* What an option says: where, and how. Strings are borrowed until kvt_remote_tier_open() returns.
 */
struct kvt_remote_params {
    const char *where;       /* "redis://host:port,host:port" and so on: remote_url.h */
    const char *auth_file;   /* "password" or "user password" in one line; NULL: none */
    const char *mac_file;    /* key of the MAC, 32 bytes at least; NULL: no MAC */
    const char *ca_file;     /* certificates trusted, PEM; NULL: the system's */
    uint64_t cap_bytes;      /* of a shared directory; 0: whatever there is room for */
    uint64_t ns_cap_bytes;   /* of each namespace in it; 0: any */
    int64_t clean_period_ns; /* a test's hook; 0: as ever */
    int64_t ttl_ns;          /* records live so long; 0: as the server thinks, or for ever */
    bool about;              /* ask a server what it is */
    bool look;               /* only look whether it could be opened here: nobody is connected to,
                                nothing is made, *out stays NULL */
    struct kvt_log log;
};

/* Start a backend; it connects in the background. 0; KVT_E_CONFIG_VALUE, -errno, with a sentence
 * in error. */
__attribute__((warn_unused_result)) int kvt_remote_tier_open(const struct kvt_remote_params *params,
                                                             struct kvt_remote **out, char *error,
                                                             size_t error_len);

/* Whether `where` can be read at all. 0, or KVT_E_CONFIG_VALUE and a sentence. Pure. */
__attribute__((warn_unused_result)) int kvt_remote_where_check(const char *where, char *error,
                                                               size_t error_len);

#endif
