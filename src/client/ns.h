/* Layouts with what follows from them, namespaces and pools (shapes.c, ns.c, pool.c).
 * Threads: under the cache's lock, but for what is marked otherwise.
 */
#ifndef KVT_CLIENT_NS_H
#define KVT_CLIENT_NS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/queue.h>

#include "client/choice.h"
#include "client/map.h"
#include "format/message.h"
#include "kvtier/cache.h"
#include "plan/decide.h"

struct kvt_cache;
struct kvt_req;

/* A layout, interned per cache: equal layouts are one object, so that the data path compares
 * pointers. Immutable; freed at close. */
struct kvt_shape {
    struct kvt_shape *next;
    struct kvt_layout layout; /* parts and groups follow the struct */
    uint32_t group_count;     /* at least 1; the order of first appearance in the parts */
    struct kvt_shape_group groups[KVT_GROUPS_MAX];
};

struct kvt_choice_memo; /* choice_memo.c */

struct kvt_ns_group {
    struct kvt_choice choice;
    uint32_t handle;    /* the store's, of this group; 0: it refuses it, or there is none */
    double record_mean; /* bytes of the records loaded lately; 0: none yet */
    /* The newest; released by whoever replaces it, acquired by whoever looks for a map. */
    _Atomic(struct kvt_map_set *) maps;
};

struct kvt_ns {
    struct kvt_cache *cache;
    const struct kvt_shape *shape;
    uint8_t id[KVT_NS_BYTES];
    uint32_t refs; /* active requests and calls */
    struct kvt_prefill prefill;
    uint64_t quota_bytes; /* as a message says them: 0 nothing */
    int64_t ttl_ns;
    bool limiting;                /* somebody is in kvt_ns_limit() */
    char label[64];               /* of the model, for people */
    struct kvt_choice_memo *memo; /* NULL: choices are not remembered */
    /* A group has news; released by who chooses, acquired by who saves. */
    _Atomic int news;
    TAILQ_ENTRY(kvt_ns) list;
    struct kvt_ns_group groups[]; /* as in the shape */
};

struct kvt_lane;      /* gpu_lane.h */
struct kvt_lane_pool; /* a pool's plans on its device */

struct kvt_session_mgr;

struct kvt_pool {
    struct kvt_cache *cache;
    struct kvt_lane_pool *gpu; /* NULL: host memory */
    const struct kvt_shape *shape;
    struct kvt_pool_desc desc; /* places are our copy */
    uint32_t refs;
    struct kvt_session_mgr *managers; /* of its pages, each of a part of its own */
    /* Per group and page: 0 exact, else the lossy level that it was loaded from. Relaxed: the
     * completion of the load orders it before any store that the engine bases on it. */
    _Atomic uint8_t *origin;
    TAILQ_ENTRY(kvt_pool) list;
};

/* shapes.c: kvt_layout_check(), and groups that a shape has room for. */
int kvt_shape_check(const struct kvt_layout *layout);
/* The interned shape of a layout that passed it; NULL: no memory. Lock held. */
const struct kvt_shape *kvt_shape_intern(struct kvt_cache *cache, const struct kvt_layout *layout);
const struct kvt_shape_group *kvt_shape_group_of(const struct kvt_shape *shape, uint16_t group);
void kvt_shapes_free(struct kvt_cache *cache);

/* ns.c: keys that the namespace can take: lengths, groups; one_group: all of the first one's. */
bool kvt_keys_ok(const struct kvt_ns *ns, const struct kvt_key *keys, size_t n, bool one_group);
/* Index of a group that kvt_keys_ok() has found. */
uint8_t kvt_ns_group_index(const struct kvt_ns *ns, uint16_t group);
void kvt_ns_free(struct kvt_ns *ns);
/* The message that opens a group of it; its header is zero. */
void kvt_ns_message(const struct kvt_ns *ns, uint32_t group, struct kvt_msg_ns_open *msg);
/* The map for a block of the request at `level`; lossy: its page is not exact. Never NULL for a
 * level that the group has. */
const struct kvt_map *kvt_ns_map(const struct kvt_req *req, int level, bool lossy);

#endif
