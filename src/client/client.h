/* In-memory structures of the client half and the seams between its files.
 *
 * One mutex (kvt_cache.lock) guards everything that is not marked otherwise: requests, block
 * entries, queues, messages in flight, the producer side of the request ring and the counters. It
 * is never held over a codec call, a checksum, a log call or a wait for the store. What takes time
 * (encode, decode, verify) runs on worker threads, which own a block while it is CODING.
 *
 * Threads: API callers; one reply thread (reply.c); `threads` workers (worker.c). All data-path
 * memory is allocated by kvt_open(), kvt_ns_open() and kvt_pool_register().
 */
#ifndef KVT_CLIENT_CLIENT_H
#define KVT_CLIENT_CLIENT_H

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/queue.h>
#include <sys/types.h>

#include "base/clock.h"
#include "base/log.h"
#include "client/client_counters.h"
#include "client/host.h"
#include "client/link.h"
#include "client/map.h"
#include "client/pin.h"
#include "client/settings.h"
#include "format/message.h"
#include "format/record.h"
#include "io/io.h"
#include "kvtier/cache.h"
#include "plan/decide.h"
#include "store/owner.h"

#define KVT_NONE UINT32_MAX
#define KVT_CLIENT_RING_BYTES (1u << 20) /* each way */
#define KVT_FLIGHTS_MAX 1024u            /* messages whose reply is owed */
#define KVT_WORKERS_MAX 64u
/* Record bytes being encoded at a time where a GPU encodes: it ends whole jobs, and the store's
 * round trips come in between; less than a few jobs' worth leaves the link idle. */
#define KVT_GPU_ALLOC_WINDOW (UINT64_C(256) << 20)
#define KVT_GRANULE 16u /* block entries are handed out in runs of this many */

/* ---- blocks -------------------------------------------------------------------------------- */

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

/* ---- requests ------------------------------------------------------------------------------ */

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

/* ---- messages in flight -------------------------------------------------------------------- */

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

/* ---- namespaces and pools ------------------------------------------------------------------ */

/* A layout, interned per cache: equal layouts are one object, so that the data path compares
 * pointers. Immutable; freed at close. */
struct kvt_shape {
    struct kvt_shape *next;
    struct kvt_layout layout; /* parts and groups follow the struct */
    uint32_t group_count;     /* at least 1; the order of first appearance in the parts */
    struct kvt_shape_group groups[KVT_GROUPS_MAX];
};

/* How the maps of a group are chosen (choice.c). */
struct kvt_choice {
    pthread_mutex_t lock; /* everything below that is not atomic or constant */
    _Atomic int judging;  /* relaxed: looked at again under the lock */
    bool watched;         /* constant: there is something to choose */
    uint8_t level;        /* that most heads are stored at, so far */
    uint8_t *bounds;      /* packed: heads that are above it, excluded layers included */
    uint8_t *fits;        /* packed: what the blocks judged so far need */
    uint32_t judged, choices;
    uint32_t coded, failed; /* since the last look */
    bool news;              /* chosen, and not remembered yet */
};

#define KVT_CHOICES_MAX 4u /* of a group; each may take new map ids, of which there are few */
struct kvt_choice_memo;    /* choice_memo.c */

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

/* ---- the cache ----------------------------------------------------------------------------- */

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
    pthread_mutex_t fit_lock; /* what follows; taken before the cache's lock */
    struct kvt_tier_model models[KVT_PLAN_TIERS];
};

struct kvt_cache {
    pid_t pid; /* of the opener: a forked child is refused */
    struct kvt_config *config;
    const struct kvt_settings *settings;
    struct kvt_log log;
    struct kvt_clock clock;
    bool remote;          /* the store is a kvtierd's: link, not host */
    struct kvt_host host; /* the store in this process */
    struct kvt_link link; /* to the store in another one; the reply thread's (link.c) */
    uint8_t *arena;       /* of either; remote: NULL while there is none */
    uint64_t arena_bytes;
    struct kvt_pin pin; /* of the arena; pools of devices start it, under their own lock */
    bool connected;     /* to the host's owner */
    struct kvt_channel channel;
    int event_fd; /* rung at each completion */
    int wake_fd;  /* wakes the reply thread */
    _Atomic int enabled;
    pthread_t workers[KVT_WORKERS_MAX];
    uint32_t worker_count;
    pthread_t reply_thread;
    bool reply_running;
    const char *gpu_library;          /* the CUDA driver; NULL: where it usually is. Set by tests */
    const char *gds_library;          /* cuFile, likewise */
    bool gds_any;                     /* a test's: direct loads by whatever path cuFile takes */
    uint64_t gds_probe_bytes;         /* a test's; 0: as usual */
    uint32_t gpu_tune_runs;           /* a test's; 0: as usual */
    struct kvt_clock *gpu_tune_clock; /* a test's; NULL: ours */
    pthread_mutex_t gpu_lock;         /* lanes and their stages (gpu_pool.c); taken before lock */
    struct kvt_lane *lanes;

    pthread_mutex_t lock; /* everything below */
    bool closing, stop_workers, stop_reply;
    char daemon_state[512];      /* remote: "connected", or why not */
    bool daemon_told;            /* that it is away */
    bool pinged;                 /* and no reply since */
    int64_t heard_ns;            /* of the last reply, or since nothing is owed */
    uint32_t link_lives;         /* connections so far: handles are of one of them */
    struct kvt_call ping;        /* asked to see whether the daemon lives */
    struct kvt_call *lead;       /* its caller sleeps on the reply ring itself; NULL: nobody does */
    _Atomic uint32_t *lead_word; /* where */
    bool stuck;                  /* a message waits for room in the request ring */
    bool broken;         /* disconnected, or the reply ring is malformed: nothing more is asked;
                            remote: until the next connection */
    uint32_t callers;    /* API calls that may touch the cache after unlocking */
    pthread_cond_t idle; /* callers, refs or active requests went down */
    pthread_cond_t room; /* credits, flights or ring space came back */
    pthread_cond_t work; /* a block is READY */
    uint32_t workers_idle, room_waiters;
    uint32_t purges; /* calls in kvt_purge() */

    struct kvt_block *blocks;
    int32_t *statuses;
    uint64_t *granule_bits; /* 1: in use */
    uint32_t granule_count, granule_hint;
    struct kvt_req *requests;
    struct kvt_req_list free_reqs, active;
    struct kvt_req_list asking[2]; /* by kind */
    uint32_t active_count, held_count, held_blocks;

    struct kvt_block_queue ready[2]; /* by kind */
    struct kvt_block_queue give_back[2];
    struct kvt_block_queue coded;          /* to be COMMITted */
    struct kvt_block_queue retry;          /* to be ALLOCed one by one */
    struct kvt_block_queue reload;         /* to be ACQUIREd one by one, not direct */
    uint32_t load_streak;                  /* load jobs since the last store job */
    uint64_t alloc_bytes, alloc_bytes_max; /* in slots allocated and not yet committed */

    struct kvt_flight flights[KVT_FLIGHTS_MAX];
    uint32_t flight_free;
    uint32_t flight_count[KVT_C_CLASSES];
    uint32_t credit_used[KVT_C_CLASSES];
    uint32_t cancels_wanted;

    struct kvt_planning planning;
    struct kvt_trace_log *trace; /* NULL: nothing is recorded; locked by itself */
    struct kvt_prompts *prompts; /* of the last second; shadow mode only */
    enum kvt_tier *shadow_tiers; /* NULL: somebody is using it */
    uint32_t shadow_room;        /* entries of it; 0: no shadow mode */
    struct kvt_shape *shapes;
    TAILQ_HEAD(, kvt_ns) namespaces;
    TAILQ_HEAD(, kvt_pool) pools;
    struct kvt_client_counters counters;
    struct kvt_client_counters counters_seen; /* the owner's copy, for the file "stats" */
    char gpu_state[256]; /* of the last pool registered in GPU memory, as a sentence */
    char gds_state[512]; /* of direct loads into the device opened last */
    char gpu_paths[256]; /* how small jobs go on it */
};

/* cache.c: take the lock for an API call. 0 with the lock held; KVT_E_CLOSED without (closing, or
 * this is a forked child; _enter_live: or the store of this process has disconnected us). */
int kvt_cache_enter(struct kvt_cache *cache);
int kvt_cache_enter_live(struct kvt_cache *cache);
bool kvt_cache_forked(const struct kvt_cache *cache);
/* Record bytes that may be in slots being filled. */
uint64_t kvt_alloc_window(const struct kvt_cache *cache);

/* remote.c: the store is a kvtierd's. _open: never fails, error says what is missing; _restore: the
 * reply thread's, comes back connected, or when the cache closes; _watch: gives up a daemon that
 * says nothing (lock held); returns for how long to sleep at most (ms). */
void kvt_remote_open(struct kvt_cache *cache, char *error, size_t error_len);
void kvt_remote_close(struct kvt_cache *cache);
void kvt_remote_restore(struct kvt_cache *cache);
int kvt_remote_watch(struct kvt_cache *cache);

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

/* engine.c: lock held in all of them. */
void kvt_engine_move(struct kvt_cache *cache, struct kvt_block *block, enum kvt_block_state to);
void kvt_engine_block_done(struct kvt_cache *cache, struct kvt_block *block, int32_t status);
void kvt_engine_complete(struct kvt_cache *cache, struct kvt_req *req);
void kvt_engine_end_unasked(struct kvt_cache *cache, struct kvt_req *req, int32_t status);
void kvt_engine_reply(struct kvt_cache *cache, const struct kvt_msg *msg);
void kvt_engine_fail_all(struct kvt_cache *cache);

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

/* plan_file.c: what plans have learnt, from and to the first root. */
void kvt_plan_file_read(struct kvt_cache *cache);
void kvt_plan_file_write(struct kvt_cache *cache);

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

/* coding.c: what workers and GPU lanes share. */
/* choice.c. A namespace's group; takes the bounds over, also when it fails (no memory). */
bool kvt_choice_init(struct kvt_ns *ns, uint32_t index, uint8_t *bounds);
void kvt_choice_free(struct kvt_ns *ns, uint32_t index);

struct kvt_chosen { /* what came of looking at a block */
    bool judged;
    uint8_t level;  /* of most heads, when it rose; else 0 */
    uint32_t heads; /* raised alone */
};
/* Look at a block that is about to be coded, while maps are being chosen. No lock held. */
void kvt_choice_judge(const struct kvt_req *req, const struct kvt_block *block,
                      struct kvt_chosen *out);
/* A block was coded at a guarded level, or failed its map. */
void kvt_choice_watch(const struct kvt_req *req, bool failed);
/* What was chosen in an earlier life is in force. */
void kvt_choice_adopt(struct kvt_ns *ns, uint32_t index, uint8_t level, uint8_t choices,
                      const uint8_t *bounds);
/* Whether there is something to remember; then read takes it. No lock held. */
bool kvt_choice_news(struct kvt_ns *ns, uint32_t index);
void kvt_choice_read(struct kvt_ns *ns, uint32_t index, uint8_t *level, uint8_t *choices,
                     uint8_t *bounds);

/* choice_memo.c. No lock held in any of them. */
/* Find what was chosen before, when the namespace has just been opened. Blocks. */
void kvt_choice_recall(struct kvt_ns *ns);
/* Store what is new; wait: until it is stored. */
void kvt_choice_save(struct kvt_ns *ns, bool wait);
void kvt_choices_save(struct kvt_cache *cache); /* of every namespace; waits */
void kvt_choice_forget(struct kvt_ns *ns);      /* with the rest of a purged namespace */
/* Before the namespace is taken out of the cache; free: its memory, in the end. */
void kvt_choice_memo_close(struct kvt_ns *ns);
void kvt_choice_memo_free(struct kvt_ns *ns);

enum kvt_outcome_kind { KVT_OUT_COMMIT, KVT_OUT_END, KVT_OUT_RETRY };

struct kvt_outcome {
    enum kvt_outcome_kind kind;
    int32_t status;         /* KVT_OUT_END: the block's */
    int32_t release_status; /* loads */
    bool nonfinite;
    bool reorigin_dropped;
    bool late;
    struct kvt_chosen chosen;
};

/* Whether the block may be coded now: *out is all zero but its kind. false: *out says why not
 * (cancelled, past the deadline). */
bool kvt_coding_begin(const struct kvt_cache *cache, const struct kvt_req *req,
                      struct kvt_outcome *out);
/* The header of a block about to be stored; its checksum is 0. */
void kvt_coding_header(const struct kvt_cache *cache, const struct kvt_req *req,
                       const struct kvt_block *block, struct kvt_record_header *header);
/* Choose the map of a block that is asked for at `level`. One that cools from a page of kv8 origin
 * and finds no map below kv8 becomes lossy: it stays as it is, or is stored again at kv8. */
void kvt_coding_map(const struct kvt_req *req, struct kvt_block *block, int level);
/* What to do about a block that its level cannot hold (KVT_E_GUARD, KVT_E_NONFINITE). */
struct kvt_outcome kvt_coding_escalate(const struct kvt_req *req, struct kvt_block *block,
                                       int code);
/* Remember what a page was loaded from. */
void kvt_coding_origin(const struct kvt_req *req, const struct kvt_block *block);
/* Hand a coded block on; lock held. kvt_pump() is due after it. */
void kvt_coding_end(struct kvt_cache *cache, int kind, struct kvt_block *block,
                    const struct kvt_outcome *out);

/* worker.c and reply.c */
int kvt_workers_start(struct kvt_cache *cache);
void kvt_workers_stop(struct kvt_cache *cache);
/* A block is READY: to the workers, or to its GPU's lane. Lock held; _wake() is due after it. */
void kvt_ready_push(struct kvt_cache *cache, struct kvt_block *block, int kind);
void kvt_workers_wake(struct kvt_cache *cache); /* blocks became READY; lock held */
int kvt_reply_start(struct kvt_cache *cache);
/* Handle replies that are there, pump and wake who waits; lock held. Returns replies handled. */
int kvt_reply_drain(struct kvt_cache *cache);
void kvt_reply_stop(struct kvt_cache *cache);
void kvt_reply_wake(struct kvt_cache *cache); /* any thread */

/* fsize.c: while the caller's thread writes files for us, a limit on their size is an error of the
 * write (EFBIG) and not a signal that ends the process. */
struct kvt_fsize_guard {
    sigset_t before;
    bool held;
};
void kvt_fsize_hold(struct kvt_fsize_guard *guard);
void kvt_fsize_release(struct kvt_fsize_guard *guard);

/* entries.c */
int kvt_requests_init(struct kvt_cache *cache);
void kvt_requests_free(struct kvt_cache *cache);
/* The first of n entries in a row, or KVT_NONE; lock held. */
uint32_t kvt_entries_take(struct kvt_cache *cache, uint32_t n);
/* A request and its entries are free again; lock held. */
void kvt_req_put(struct kvt_cache *cache, struct kvt_req *req);

/* request.c */
void kvt_requests_cancel_all(struct kvt_cache *cache); /* lock held */

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
/* Ask something for which nobody waits. false: no room for it. Lock held. */
bool kvt_call_ping(struct kvt_cache *cache);
int kvt_call_stat(struct kvt_cache *cache, uint64_t *values, uint32_t values_max, uint32_t *count);

/* ---- client_stats.c ------------------------------------------------------------------------ */

/* kvt_store_params.stats_lines: our counters for the file "stats". Owner thread; never waits. */
size_t kvt_stats_lines(void *cache, char *text, size_t room);

/* ---- block queues -------------------------------------------------------------------------- */

static inline void kvt_bq_init(struct kvt_block_queue *queue)
{
    queue->head = queue->tail = KVT_NONE;
    queue->count = 0;
}

static inline void kvt_bq_push(struct kvt_cache *cache, struct kvt_block_queue *queue,
                               struct kvt_block *block)
{
    uint32_t index = (uint32_t)(block - cache->blocks);
    block->next = KVT_NONE;
    if (queue->tail == KVT_NONE)
        queue->head = index;
    else
        cache->blocks[queue->tail].next = index;
    queue->tail = index;
    queue->count++;
}

static inline struct kvt_block *kvt_bq_peek(struct kvt_cache *cache,
                                            const struct kvt_block_queue *queue)
{
    return queue->head == KVT_NONE ? NULL : &cache->blocks[queue->head];
}

static inline struct kvt_block *kvt_bq_pop(struct kvt_cache *cache, struct kvt_block_queue *queue)
{
    struct kvt_block *block = kvt_bq_peek(cache, queue);
    if (block == NULL)
        return NULL;
    queue->head = block->next;
    if (queue->head == KVT_NONE)
        queue->tail = KVT_NONE;
    queue->count--;
    block->next = KVT_NONE;
    return block;
}

static inline const struct kvt_shape_group *kvt_req_group(const struct kvt_req *req)
{
    return &req->ns->shape->groups[req->group];
}

static inline uint32_t kvt_req_handle(const struct kvt_req *req)
{
    return req->ns->groups[req->group].handle;
}

/* Where the pool remembers what a page of the request was loaded from. */
static inline _Atomic uint8_t *kvt_req_origin(const struct kvt_req *req, uint32_t page)
{
    return &req->pool->origin[(size_t)req->group * req->pool->desc.block_count + page];
}

/* How a block ends whose store has gone: without one there is nothing but misses. */
static inline int32_t kvt_lost_status(const struct kvt_cache *cache)
{
    return cache->remote ? KVT_E_MISS : KVT_E_CLOSED;
}

static inline struct kvt_req *kvt_block_req(struct kvt_cache *cache, const struct kvt_block *block)
{
    return &cache->requests[block->req];
}

#endif
