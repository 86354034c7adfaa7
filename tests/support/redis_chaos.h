/* A cluster under load while its nodes die and its slots move: a thread that reads, writes, asks
 * for and removes records without a pause and compares every byte, and the events, one at a time,
 * by whoever has the rig. The thread asserts nothing: it counts, and the test looks at the counts.
 */
#ifndef KVT_TESTS_REDIS_CHAOS_H
#define KVT_TESTS_REDIS_CHAOS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/rng.h"
#include "support/redis_rig.h"

struct redis_load_counts {
    uint64_t got, missed, put, exists, found, dropped, failed;
    uint64_t wrong;   /* bytes, keys or headers that are not what was put */
    uint64_t touched; /* memory of a request that was written to after it had come back */
    int64_t late_ns;  /* the longest time that one came back after its deadline */
};

struct redis_load;

/* Opens a backend of its own on `url`; fails the test where that fails. */
struct redis_load *redis_load_start(const char *url, uint64_t seed);
/* Ends it, frees it. */
struct redis_load_counts redis_load_stop(struct redis_load *load);

/* All nodes find the cluster whole, and fail over after a second of silence from now on. */
void redis_chaos_ready(const struct redis_rig *rig);
/* SIGKILL for a master, or for any node, and start it again: at once, or when another node has its
 * slots (or seconds have passed). Waits until the cluster is whole again. */
void redis_chaos_kill(struct redis_rig *rig, struct kvt_rng *rng, bool master, bool at_once);
/* Move the slot of one of the load's keys, with all keys in it, to another master. false: it did
 * not come to its end. */
bool redis_chaos_move(const struct redis_rig *rig, struct kvt_rng *rng);

#endif
