/* Several machines over one shared tier, in one seed. See sim.h.
 *
 *   sim_net.c     which seeds have them; time, turns and ends of all of them together
 *   sim_tier.c    what is on the server: records, what happens to them at rest, what may be there
 *   sim_remote.c  one machine's way to it: the store's backend; what goes wrong on the way
 *
 * A machine is a whole `struct sim`: store, drives, clients, faults, power losses. The server keeps
 * objects byte for byte as a real one does, under the production names, with the production MAC;
 * what comes from there is verified by the production code (remote/remote_seal.h).
 *
 * Origin of a record, for one machine: the operation that stored it, where this machine put it;
 * else the one at which it came to the server. Damage there, another name's bytes too, leaves it as
 * it was. A purge of this machine that was answered with 0 leaves no older one on the server, and
 * none that it got from there. Other machines keep what they have, and may put it again.
 * Threads: one. */
#ifndef KVT_TESTS_SIM_NET_H
#define KVT_TESTS_SIM_NET_H

#include "remote/remote_seal.h"
#include "sim/sim.h"

enum {
    SIM_MACHINES = 3,
    SIM_FLIGHTS = 192, /* more than a store has under way */
    SIM_GHOSTS = 64,
    SIM_NAMES = SIM_NS * SIM_BLOCKS,
};
#define SIM_NOBODY UINT32_MAX

/* What goes wrong on the way, and with what is there. */
enum sim_net_kind {
    NET_SLOW,
    NET_DEADLINE, /* no answer in time */
    NET_HANG,     /* an answer long after it */
    NET_NEVER,
    NET_LOST,   /* the connection; what was put may land later */
    NET_DOWN,   /* nobody there, until it comes back */
    NET_DENIED, /* it says no */
    NET_BUSY,   /* not taken at all */
    NET_FULL,
    NET_FLIP,    /* a bit of the answer */
    NET_CUT,     /* the answer's end is missing */
    NET_FOREIGN, /* another key's record */
    NET_STALE,   /* what was there before */
    NET_HEADER,  /* a header that says another level */
    NET_UNKNOWN, /* of some keys no answer */
    REST_FLIP,
    REST_CUT,
    REST_FOREIGN,
    REST_NEWER,  /* of a later version */
    REST_FORGED, /* by somebody without the key */
    REST_GONE,
    REST_ALL_GONE,
    REST_BACK, /* what was removed or replaced is there again */
    NET_KINDS
};
static_assert((int)NET_KINDS == (int)SIM_NET_KINDS, "counted in sim.h");

struct sim_object {
    uint8_t *bytes; /* record, MAC; NULL: nothing */
    uint32_t len, map, machine;
    const void *owner;       /* the name that it was put under */
    bool good;               /* as it was put */
    uint64_t stored, landed; /* operations: see origin above */
    int64_t until_ns;        /* INT64_MAX: for ever */
};

struct sim_name {
    char text[KVT_REMOTE_NAME_BYTES];
    uint32_t ns, index;
    struct sim_object now, before;
};

struct sim_ghost { /* a put whose connection was lost, and that may still land */
    struct sim_object object;
    struct sim_name *name;
    bool replace;
    int64_t land_ns;
};

struct sim_flight {
    struct kvt_remote_req *req;
    struct sim_name *name; /* GET, PUT */
    int64_t acts_ns, due_ns, sent_ns, jumped_ns;
    uint64_t op;     /* it was sent in */
    uint64_t origin; /* GET: of what it brought. PUT: when that was stored */
    uint32_t kind;   /* NET_KINDS: all is well */
    bool acted, good;
};

struct sim_link { /* one machine's way to the server */
    struct kvt_remote remote;
    struct sim *sim;
    struct sim_flight flights[SIM_FLIGHTS];
    uint32_t count;
    bool quiet;           /* nothing is asked, nothing put: while a recovery is looked at */
    bool cut;             /* the machine is dead */
    uint32_t kind, times; /* what goes wrong; times 0: until something else does */
    int write;
    uint64_t queue_bytes;
    /* of this life: what was sent, by operation; what came back, by meaning */
    uint64_t sent[KVT_REMOTE_DROP_NS + 1], asked, got, got_bytes, gone, bad, late, failed, given_up;
    uint64_t put, put_bytes, exists, full, put_failed;
};

struct sim_net {
    struct sim *machines[SIM_MACHINES];
    struct sim_link links[SIM_MACHINES];
    uint32_t count;
    struct kvt_rng rng;
    uint64_t op;
    struct kvt_remote_mac mac;
    bool replicas; /* answers may be older than the last write */
    bool may_kill; /* a lost connection is ended before a purge */
    int64_t deadline_ns, latency_ns;
    struct sim_name names[SIM_NAMES];
    struct sim_ghost ghosts[SIM_GHOSTS];
    uint32_t ghost_count;
};

/* ---- sim_net.c */
uint32_t sim_net_roll(struct sim_net *net, uint32_t bound);

/* ---- sim_tier.c */
void sim_tier_start(struct sim_net *net);
void sim_tier_stop(struct sim_net *net);
struct sim_name *sim_tier_find(struct sim_net *net, const struct kvt_full_key *key);
/* Times to live, and puts that come late. */
void sim_tier_tick(struct sim_net *net, int64_t now_ns);
int32_t sim_tier_get(struct sim_link *link, struct sim_flight *flight);
void sim_tier_probe(struct sim_link *link, struct sim_flight *flight);
int32_t sim_tier_put(struct sim_link *link, struct sim_flight *flight, bool later);
bool sim_tier_meant(const struct kvt_remote_req *req, const struct sim_name *name); /* DROPs */
int32_t sim_tier_drop(struct sim_link *link, struct sim_flight *flight);
void sim_tier_fault(struct sim_net *net, struct sim *sim, uint32_t kind);
/* Whose life ends: what it had under way is nobody's. */
void sim_tier_orphan(struct sim_net *net, uint32_t machine);

/* ---- sim_remote.c */
const char *sim_net_kind_name(uint32_t kind);
void sim_link_start(struct sim_net *net, uint32_t machine);
void sim_link_heal(struct sim_link *link); /* and all that was late, or never came, comes */
int64_t sim_link_next(const struct sim_link *link);
void sim_link_check(struct sim_link *link);

#endif
