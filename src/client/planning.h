/* What kvt_plan() goes by: what loads and prefills have told (planning.c), the fits behind it
 * (learning.c), and what of them outlives the process (plan_file.c).
 * Threads: under the cache's lock, but for what is marked otherwise.
 */
#ifndef KVT_CLIENT_PLANNING_H
#define KVT_CLIENT_PLANNING_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "format/message.h"
#include "kvtier/cache.h"
#include "plan/decide.h"

struct kvt_cache;
struct kvt_ns;
struct kvt_req;

#define KVT_KEPT_MAX 64u

struct kvt_kept { /* a prefill model of another time */
    uint8_t id[KVT_NS_BYTES];
    double a, b;
};

#define KVT_KEPT_ROOTS_MAX 32u
#define KVT_KEPT_PER_BYTE_MIN 1e-15 /* seconds; less is nonsense */

struct kvt_kept_root { /* a root's model of another time */
    uint64_t key;      /* of its path */
    struct kvt_fit_line line;
};

#define KVT_SEEN_MAX 32u

struct kvt_seen_load { /* an observation that nothing has been learnt from yet */
    uint32_t tier;     /* index in tiers */
    uint64_t bytes, queued;
    double seconds;
};

/* What kvt_plan() knows of the tiers (planning.c, learning.c). Loads are noted where they complete;
 * fitting takes longer than the cache's lock is to be held, so it is done on models of its own,
 * whose results are then copied to where plans look. */
struct kvt_planning {
    struct kvt_fit_line kept_tier[KVT_TIER_DISK + 1]; /* of another time; q 0: none */
    struct kvt_kept kept[KVT_KEPT_MAX];
    uint32_t kept_count;
    struct kvt_kept_root kept_roots[KVT_KEPT_ROOTS_MAX];
    uint32_t kept_roots_count;
    bool learnt; /* something since open */
    struct kvt_tier_model tiers[KVT_PLAN_TIERS];
    double share[KVT_PLAN_TIERS]; /* of the blocks loaded lately */
    uint64_t queued_bytes;        /* of loads under way, as expected */
    struct kvt_seen_load seen[KVT_SEEN_MAX];
    uint32_t seen_count;
    bool learning;            /* some were taken from there, and are not in tiers[] yet */
    pthread_mutex_t fit_lock; /* what follows; taken before the cache's lock */
    struct kvt_tier_model models[KVT_PLAN_TIERS];
};

/* planning.c: lock held, but in _init. */
void kvt_planning_init(struct kvt_cache *cache);
void kvt_planning_ns(struct kvt_ns *ns);
/* kvt_plan() for a query that makes sense; *plan is filled whole. Counts nothing. */
int kvt_planning_weigh(struct kvt_ns *ns, const struct kvt_plan_query *query,
                       struct kvt_plan *plan);
/* A namespace ends: its model is remembered. */
void kvt_planning_keep(const struct kvt_ns *ns);
/* A load was accepted; a block of it has ended; all have. */
void kvt_planning_submit(struct kvt_cache *cache, struct kvt_req *req);
void kvt_planning_block(struct kvt_cache *cache, const struct kvt_req *req);
void kvt_planning_complete(struct kvt_cache *cache, struct kvt_req *req);
/* The store answered for a block. */
void kvt_planning_grant(struct kvt_req *req, const struct kvt_msg_grant *grant);

/* learning.c */
/* Note an observation. Lock held. */
void kvt_planning_saw(struct kvt_cache *cache, uint32_t tier, double bytes, double queued,
                      double seconds);
/* Learn from what was noted. Lock held, and let go meanwhile. */
void kvt_planning_learn(struct kvt_cache *cache);
/* The roots are open: their models begin with what was kept of them. No lock is held. */
void kvt_planning_roots(struct kvt_cache *cache);
/* It is closing: take over what has been learnt since. false: nothing has. No lock is held. */
bool kvt_planning_keep_all(struct kvt_cache *cache);

/* plan_file.c: what plans have learnt, from and to the first root. The option's file (path; ""
 * none) is refused where a directory is: KVT_E_CONFIG_VALUE, a sentence in error. */
int kvt_plan_file_check(const char *path, char *error, size_t error_len)
    __attribute__((warn_unused_result));
void kvt_plan_file_read(struct kvt_cache *cache);
void kvt_plan_file_write(struct kvt_cache *cache);

#endif
