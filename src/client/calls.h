/* Calls that wait for one reply of the store (call.c), and what waits.
 * Threads: callers of the API; nothing here is called by the reply thread.
 */
#ifndef KVT_CLIENT_CALLS_H
#define KVT_CLIENT_CALLS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/message.h"
#include "kvtier/cache.h"

/* A caller that waits for one reply; lives on its stack. */
struct kvt_call {
    pthread_cond_t cond;
    bool done;
    int32_t status;
    uint32_t ns;
    uint32_t count;       /* entries or values in the reply */
    enum kvt_tier *tiers; /* LOOKUP: optional output, `count` entries as asked */
    uint8_t *roots;       /* LOOKUP: the same */
    bool each;            /* LOOKUP: hits may follow misses */
    uint64_t *values;     /* STAT: output */
    uint32_t values_max;
};

/* call.c: one round trip. The caller holds the lock; it is released while waiting. */
/* Between _enter() (errors as of kvt_cache_enter_live(); KVT_E_INVAL) and _leave() the lock is held
 * and the namespace stays. */
int kvt_call_enter(struct kvt_ns *ns, const struct kvt_key *keys, size_t n);
void kvt_call_leave(struct kvt_ns *ns);
/* How many of the keys are there; they count as used. Takes the lock. */
long kvt_call_touch(struct kvt_ns *ns, const struct kvt_key *keys, size_t n);
long kvt_call_touch_held(struct kvt_ns *ns, const struct kvt_key *keys, size_t n); /* lock held */
/* Keys of one group that are there: the leading run, or, each: all of them. tiers: optional. */
long kvt_call_lookup(struct kvt_ns *ns, const struct kvt_key *keys, size_t n,
                     const struct kvt_lookup_opts *opts, bool each, enum kvt_tier *tiers);
/* What a caller's options say, filled up with zeroes. 0, KVT_E_VERSION, KVT_E_INVAL. */
int kvt_lookup_opts_read(const struct kvt_lookup_opts *from, struct kvt_lookup_opts *opts);
/* *handle: 0 where a remote store is away for now; the next connection opens it. */
int kvt_call_ns_open(struct kvt_cache *cache, const struct kvt_msg_ns_open *msg, uint32_t *handle);
/* Until credits, flights or ring space may have come back. Lock held, released meanwhile. */
void kvt_call_wait_room(struct kvt_cache *cache);
/* Ask something for which nobody waits. false: no room for it. Lock held. */
bool kvt_call_ping(struct kvt_cache *cache);
int kvt_call_stat(struct kvt_cache *cache, uint64_t *values, uint32_t values_max, uint32_t *count);

#endif
