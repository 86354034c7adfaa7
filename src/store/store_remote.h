/* What the files store_remote*.c keep of the shared tier and ask of each other. Internal to them:
 * what the store's other files ask is in store_impl.h. Memory: about 6 MiB, where a remote is
 * configured; else nothing.
 */
#ifndef KVT_STORE_STORE_REMOTE_H
#define KVT_STORE_STORE_REMOTE_H

#include "remote/remote.h"
#include "store/store_impl.h"

#define KVT_REMOTE_KNOWN 65536u /* places, a power of two */
#define KVT_REMOTE_LOOKUPS 16u
#define KVT_REMOTE_GETS 64u
#define KVT_REMOTE_PUTS 64u
#define KVT_REMOTE_QUEUE 8192u /* blocks that wait to be put */
/* beyond a request's deadline, before it is given up here */
#define KVT_REMOTE_GRACE_NS INT64_C(100000000)
#define KVT_REMOTE_PAUSE_NS INT64_C(1000000000)

enum kvt_known_state {
    KVT_KNOWN_NOTHING = 0,
    KVT_KNOWN_ABSENT,
    KVT_KNOWN_PRESENT, /* with map and length */
    KVT_KNOWN_DAMAGED, /* what is there is worth nothing: a miss, and ours takes its place */
    KVT_KNOWN_EXISTS,  /* without: it was there when we wanted to put ours */
    KVT_KNOWN_QUEUED   /* ours waits, or is on its way */
};

struct kvt_known {
    struct kvt_fp fp;
    int64_t until_ns;
    uint16_t pages;
    uint8_t map, state;
};

struct kvt_remote_lookup { /* a LOOKUP that waits for a PROBE */
    struct kvt_remote_req req;
    int64_t end_ns;
    uint32_t client;
    uint32_t round;
    bool busy;     /* the backend has it */
    bool answered; /* too late: what it brings is learnt only */
    struct kvt_full_key keys[KVT_MSG_KEYS_MAX];
    struct kvt_remote_found found[KVT_MSG_KEYS_MAX];
    _Alignas(8) uint8_t message[KVT_MSG_BYTES_MAX];
};

struct kvt_remote_get {
    struct kvt_remote_req req;
    struct kvt_full_key key;
    struct kvt_remote_get *next; /* free list */
    uint32_t slot;
    bool busy, given_up, prefetch;
};

struct kvt_remote_put {
    struct kvt_remote_req req;
    struct kvt_full_key key;
    struct kvt_fp fp;
    struct kvt_remote_put *next; /* free list */
    uint32_t slot;
    uint8_t map;
    bool busy;
};

struct kvt_remote_queued {
    uint32_t slot, generation;
    bool replace;
};

enum kvt_drop_state { KVT_DROP_NONE, KVT_DROP_WAITS, KVT_DROP_GOES, KVT_DROP_DONE };

struct kvt_remote_purge {
    struct kvt_remote_req req;
    enum kvt_drop_state state;
    bool busy;     /* the backend has it */
    int refused;   /* DONE without having been carried out; the request may be the one before's */
    uint64_t seen; /* records removed there, when that was looked at last */
    int64_t until_ns; /* given up then, where nothing more is removed */
    struct kvt_full_key keys[KVT_MSG_KEYS_MAX];
};

struct kvt_store_remote {
    struct kvt_known *known;
    struct kvt_remote_lookup *lookups;
    struct kvt_remote_purge *purges; /* one for each of the store's */
    struct kvt_remote_get gets[KVT_REMOTE_GETS];
    struct kvt_remote_get *get_free;
    struct kvt_remote_put puts[KVT_REMOTE_PUTS];
    struct kvt_remote_put *put_free;
    struct kvt_remote_queued queue[KVT_REMOTE_QUEUE];
    uint32_t queue_at, queued;
    uint32_t puts_going;
    uint64_t put_bytes;   /* of the records on their way */
    int64_t put_pause_ns; /* no put before */
    int64_t pause_ns;     /* no look-up before */
};

/* ---- store_remote.c */
bool kvt_l3_paused(struct kvt_store *store);
/* The backend itself does not answer in time: it hangs. Leave it alone for a while. */
void kvt_l3_given_up(struct kvt_store *store);
/* What a namespace says of how long its blocks live; 0: nothing. */
int64_t kvt_l3_ttl(const struct kvt_store *store, uint32_t ns);
/* false: not now. */
__attribute__((warn_unused_result)) bool
kvt_l3_submit(struct kvt_store *store, struct kvt_remote_req *req, int64_t deadline_ns);

/* ---- store_remote_put.c */
/* A purge of it has not got there yet. O(keys of the purges under way). */
bool kvt_l3_dropping(const struct kvt_store *store, const struct kvt_full_key *key);

/* ---- store_remote_known.c */
struct kvt_known *kvt_l3_known_find(struct kvt_store *store, struct kvt_fp fp);
void kvt_l3_known_set(struct kvt_store *store, struct kvt_fp fp, enum kvt_known_state state,
                      uint8_t map, uint32_t pages);
void kvt_l3_known_forget(struct kvt_store *store, struct kvt_fp fp);
void kvt_l3_known_forget_all(struct kvt_store_remote *remote);
/* What a PROBE has found of one key. */
void kvt_l3_learn(struct kvt_store *store, uint32_t ns, const struct kvt_full_key *key,
                  const struct kvt_remote_found *found);

/* ---- what has come back, and what is over; the latter returns the next time to run */
void kvt_l3_probed(struct kvt_store *store, struct kvt_remote_lookup *lookup);
int64_t kvt_l3_lookups_run(struct kvt_store *store, int64_t now);
void kvt_l3_lookup_answer(struct kvt_store *store, struct kvt_remote_lookup *lookup);
void kvt_l3_got(struct kvt_store *store, struct kvt_remote_get *get);
int64_t kvt_l3_gets_run(struct kvt_store *store, int64_t now);
void kvt_l3_was_put(struct kvt_store *store, struct kvt_remote_put *put);
int64_t kvt_l3_puts_run(struct kvt_store *store, int64_t now);

#endif
