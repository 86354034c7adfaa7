/* Requests, their blocks, and messages whose reply is owed; what moves them: engine.c (the state
 * machine), pump.c (sending), entries.c (the arrays they live in), request.c.
 * Threads: under the cache's lock, but for what is marked otherwise. A block that is CODING belongs
 * to the worker or the lane that codes it.
 */
#ifndef KVT_CLIENT_REQUESTS_H
#define KVT_CLIENT_REQUESTS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/queue.h>

#include "client/map.h"
#include "format/message.h"
#include "kvtier/cache.h"
#include "plan/decide.h"

struct kvt_cache;
struct kvt_call;

#define KVT_NONE UINT32_MAX
#define KVT_FLIGHTS_MAX 1024u /* messages whose reply is owed */
#define KVT_GRANULE 16u       /* block entries are handed out in runs of this many */

/* Life of one block of one request. engine.c has the table of allowed moves and the picture. */
enum kvt_block_state {
    KVT_B_IDLE = 0,
    KVT_B_QUEUED,     /* not yet asked for */
    KVT_B_ASKED,      /* ALLOC or ACQUIRE sent */
    KVT_B_READY,      /* slot granted, waiting for a worker */
    KVT_B_CODING,     /* a worker owns the entry */
    KVT_B_GIVE_BACK,  /* RELEASE or ABORT to be sent */
    KVT_B_CODED,      /* COMMIT to be sent */
    KVT_B_COMMITTING, /* COMMIT sent */
    KVT_B_DONE,
    KVT_B_STATES
};

struct kvt_block {
    struct kvt_key key; /* hash bytes past hash_len are zero */
    uint32_t page;      /* in the pool */
    uint32_t next;      /* in the queue it stands in, or KVT_NONE */
    uint32_t req;       /* index of its request */
    uint32_t slot;
    uint32_t generation;
    uint32_t record_bytes;
    uint64_t arena_offset; /* direct: offset in the segment's file */
    uint64_t sequence;
    uint64_t checksum;
    uint32_t segment;          /* direct: number of the file */
    uint32_t chunk;            /* staged: where it is in the device's buffer */
    const struct kvt_map *map; /* store: to encode with; lives as long as the namespace */
    int32_t release_status;    /* GIVE_BACK: 0 good, KVT_E_CORRUPT bad */
    uint8_t state;             /* enum kvt_block_state */
    uint8_t level;             /* lowest of the map: store: to encode at; load: of the record */
    uint8_t map_id;            /* what the record's header says */
    uint8_t lossy;             /* store: the page is of lossy origin */
    uint8_t recode;            /* store: it cools from kv8, so kv8 is the best it can be */
    uint8_t retry;             /* GIVE_BACK: ask again (store: at `level`) instead of ending */
    uint8_t tier;              /* load: where it was */
    uint8_t direct;            /* load: granted where it lies on disk, (slot, generation) a pin */
    uint8_t root;              /* direct: number of the disk */
    uint8_t staged;            /* direct: it has been read into the device's buffer */
};

struct kvt_block_queue {
    uint32_t head, tail, count;
};

enum kvt_req_kind { KVT_REQ_LOAD = 0, KVT_REQ_STORE = 1 };
enum kvt_req_state { KVT_R_FREE = 0, KVT_R_FILLING, KVT_R_ACTIVE, KVT_R_COMPLETE };

/* What a load had from one root (planning.c). */
struct kvt_req_root {
    uint64_t bytes;
    uint32_t blocks;
    uint32_t late;     /* blocks that it was being read from when time was up */
    uint32_t busy_us;  /* while a read of this load at least was under way there */
    uint32_t until_us; /* the end of what was counted; the store's clock, modulo 2^32 */
};

enum kvt_wait { KVT_WAIT_NONE = 0, KVT_WAIT_DUE, KVT_WAIT_DONE, KVT_WAIT_FAILED };

struct kvt_req {
    struct kvt_cache *cache;
    struct kvt_ns *ns; /* not followed after completion */
    struct kvt_pool *pool;
    uint8_t group; /* of its keys: index in shape->groups and ns->groups */
    uint8_t kind;  /* enum kvt_req_kind */
    uint8_t state; /* enum kvt_req_state */
    uint8_t min_level;
    bool asking;          /* stands in the asking list of its kind */
    bool cool;            /* store: blocks take the place of better records */
    uint8_t write;        /* store: enum kvt_write */
    _Atomic int canceled; /* read by workers without the lock (relaxed: only a hint to stop early;
                             the lock orders everything that matters) */
    uint32_t index;
    uint32_t first; /* its block entries and statuses: [first, first + n) */
    uint32_t n;
    uint32_t cursor; /* blocks before it have been asked for, or ended */
    uint32_t done;   /* blocks in state DONE */
    uint32_t first_pos;
    struct kvt_key parent; /* hash_len 0: none */
    uint8_t gpu_wait;      /* enum kvt_wait; the lane's once the request is submitted */
    bool layers;           /* load: by layers, on a device */
    uint32_t layers_ready; /* of its blocks, those that wait for the lane */
    uint32_t next_layer;   /* layers before it are in the pages, unverified */
    void *gpu_event;       /* of the engine: pages are ready after it */
    int64_t deadline_ns;   /* absolute; INT64_MAX none */
    int64_t start_ns, elapsed_ns;
    uint64_t queued_bytes; /* load: of loads under way when it came, as expected */
    uint32_t guess_bytes;  /* load: of each record, as expected */
    struct kvt_req_root roots[KVT_PLAN_ROOTS];
    struct kvt_req_report report;
    pthread_cond_t cond;       /* completion */
    TAILQ_ENTRY(kvt_req) list; /* free list, or active list */
    TAILQ_ENTRY(kvt_req) asklist;
};
TAILQ_HEAD(kvt_req_list, kvt_req);

/* Replies owed are paid for in advance: a class may not be owed more bytes than its share of the
 * reply ring, so the store never finds the ring full. Loads wait for disks while stores hold
 * slots, and the other way round: separate shares keep them from blocking each other. */
enum kvt_credit_class { KVT_C_LOAD = 0, KVT_C_STORE, KVT_C_CALL, KVT_C_CLASSES };

struct kvt_flight {
    uint32_t generation; /* of this entry; half of the cookie */
    uint16_t op;         /* enum kvt_op; 0: free */
    uint8_t klass;       /* enum kvt_credit_class */
    bool cancel_wanted;  /* ACQUIRE: a CANCEL is to be sent */
    bool direct;         /* ACQUIRE: grants may say where blocks lie on disk */
    uint32_t req;        /* request index, or KVT_NONE */
    uint32_t first;      /* ALLOC, ACQUIRE: first block entry; COMMIT: head of the list */
    uint32_t count;      /* blocks asked for */
    uint32_t left;       /* ACQUIRE: grants still owed */
    uint32_t credit;     /* reply bytes still owed */
    struct kvt_call *call;
    uint32_t next_free;
};

/* engine.c: lock held in all of them. */
void kvt_engine_move(struct kvt_cache *cache, struct kvt_block *block, enum kvt_block_state to);
void kvt_engine_block_done(struct kvt_cache *cache, struct kvt_block *block, int32_t status);
void kvt_engine_complete(struct kvt_cache *cache, struct kvt_req *req);
void kvt_engine_end_unasked(struct kvt_cache *cache, struct kvt_req *req, int32_t status);
void kvt_engine_reply(struct kvt_cache *cache, const struct kvt_msg *msg);
void kvt_engine_fail_all(struct kvt_cache *cache);

/* pump.c: send what can be sent. Lock held. */
void kvt_pump(struct kvt_cache *cache);
/* Ask for a block of a store again, one by one, in the order of chains. Lock held. */
void kvt_retry_push(struct kvt_cache *cache, struct kvt_block *block);
/* A free flight with `credit` reply bytes reserved, or NULL. */
struct kvt_flight *kvt_flight_take(struct kvt_cache *cache, enum kvt_credit_class klass,
                                   uint16_t op, uint32_t credit);
void kvt_flight_put(struct kvt_cache *cache, struct kvt_flight *flight);
struct kvt_flight *kvt_flight_of(struct kvt_cache *cache, uint64_t cookie);
uint64_t kvt_flight_cookie(const struct kvt_cache *cache, const struct kvt_flight *flight);
/* Reserve a message with its header filled in; NULL: the ring is full (counted). */
void *kvt_msg_reserve(struct kvt_cache *cache, uint32_t bytes, uint16_t op, uint64_t cookie,
                      uint32_t ns, uint32_t count);
void kvt_msg_push(struct kvt_cache *cache, const void *msg);

/* entries.c */
int kvt_requests_init(struct kvt_cache *cache);
void kvt_requests_free(struct kvt_cache *cache);
/* The first of n entries in a row, or KVT_NONE; lock held. */
uint32_t kvt_entries_take(struct kvt_cache *cache, uint32_t n);
/* A request and its entries are free again; lock held. */
void kvt_req_put(struct kvt_cache *cache, struct kvt_req *req);

/* request.c */
void kvt_requests_cancel_all(struct kvt_cache *cache); /* lock held */

#endif
