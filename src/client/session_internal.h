/* The session manager's own structures, shared by its files (session*.c) and by nobody else.
 *
 *   session.c          open, append, filled, idle, close    session_registry.c  nodes, pages, LRU
 *   session_mgr.c      manager: open, close, work           session_ask.c       questions
 *   session_opts.c     its options                          session_check.c     every rule below
 *   session_groups.c   what each group needs and has        session_save.c      storing and cooling
 *   session_look.c     what a resume can have, and pays     session_resume.c    plan and restore
 *   session_landed.c   loads that have ended
 *   session_meet.c     loads from the back while the engine computes from the front
 *   session_cut.c      cutting back                         session_evict.c     making room in L0
 *
 * A node is a full block of tokens that some session has filled, found by its hash. A cell is what
 * one group of the layout has of a node: a page in L0 and a record, or neither. Cells of a node
 * come and go each for itself; with one group, cell i is node i. Of each group a session needs the
 * blocks from `from` on (session_groups.c): it holds those cells, and pins them while it is not
 * idle. Rules:
 *  1. A cell's page holds the block whole, and is not written any more.
 *  2. A page of a group belongs to one of: the free list, the scratch pages, a cell, a session
 *     (blocks that are not filled, or that another session filled first).
 *  3. A cell with a page that nobody pins is in its group's LRU list; of full attention after its
 *     children, of other groups at the oldest end when no session holds it.
 *  4. A cell whose page is being read by a store is `busy`: its page stays.
 *  5. A node lives while a session, a page, a child, a request or the cooling queue needs it.
 *  6. A node that no session but those marked "no store" has held is not stored. Where a node may
 *     be stored, so may those before it.
 *  7. Of a group that is not full attention only what some session holds is stored.
 * Threads: everything under the manager's lock, which is taken before the cache's.
 */
#ifndef KVT_CLIENT_SESSION_INTERNAL_H
#define KVT_CLIENT_SESSION_INTERNAL_H

#include "client/client.h"
#include "kvtier/session.h"

#define KVT_SESSION_JOBS 64u       /* requests of one manager in flight */
#define KVT_SESSION_JOB_BLOCKS 64u /* blocks of one store */
#define KVT_SESSION_FAILS_MAX 3u   /* a block that the store refused so often is not tried again */
#define KVT_SESSION_COOL_BATCH 8u  /* blocks that leave windows are stored so many at a time */
#define KVT_SESSION_SCRATCH_MAX 16u

struct kvt_snode {
    uint8_t hash[KVT_HASH_BYTES_MAX];
    uint32_t parent; /* node, or KVT_NONE at the start of a sequence */
    uint32_t depth;  /* number of the block in its sequence */
    uint32_t bucket_next;
    uint32_t refs;     /* sessions that hold it */
    uint32_t windows;  /* of them, those whose window (of quality: window_tokens) it is in */
    uint32_t children; /* nodes whose parent this is */
    uint32_t tail_of; /* session whose partial last block this is (not in the table), or KVT_NONE */
    bool beyond;      /* it has left the window of some session */
    bool stored;      /* it may be: rule 6 */
};

struct kvt_scell { /* number: node * group_count + group */
    uint32_t page;
    uint32_t holders;  /* sessions that need it to come back */
    uint32_t pinned;   /* of them, those that are not idle */
    uint32_t resident; /* children of the node with a page in this group */
    uint32_t older, newer;
    uint32_t cool_next;
    uint8_t record; /* enum kvt_session_record */
    uint8_t fails;  /* stores refused in a row */
    bool in_lru;
    bool busy;   /* a request reads its page or cools its record */
    bool queued; /* in the cooling queue */
};

/* A group of the layout: its pages of L0, and the order in which they go. */
struct kvt_sgroup {
    const struct kvt_shape_group *shape;
    uint32_t first_page, page_count; /* of the pool, for this group, scratch pages included */
    uint32_t scratch_pages;
    bool full;      /* full attention: sessions need all of its blocks, parents before children */
    bool two_steps; /* the window's level is above the final one */
    uint32_t *page_stack;
    uint32_t pages_free;
    uint32_t scratch[KVT_SESSION_SCRATCH_MAX];
    uint32_t scratch_free;
    uint32_t oldest, newest, lru_count; /* cells */
    uint32_t cool_head, cool_tail;
};

enum kvt_sjob_kind { KVT_SJOB_FREE = 0, KVT_SJOB_SAVE, KVT_SJOB_RESTORE, KVT_SJOB_FETCH };

struct kvt_sjob {
    struct kvt_req *req;
    uint32_t next_free;
    uint32_t waiters; /* callers inside kvt_req_wait(); the last one frees the request */
    uint32_t session; /* RESTORE */
    uint32_t chunk;   /* RESTORE of a session that meets: which one */
    uint32_t group;   /* index */
    uint32_t count;
    uint32_t scratch; /* page that a FETCH, and the SAVE after it, works in; or KVT_NONE */
    uint8_t kind;     /* enum kvt_sjob_kind */
    uint8_t target;   /* SAVE: enum kvt_session_record */
    bool ended;       /* its outcome was noted; only waiters keep it */
    uint32_t cells[KVT_SESSION_JOB_BLOCKS];
};

/* A piece of what is loaded while the engine computes what is before it (session_meet.c). */
enum kvt_schunk_state {
    KVT_SCHUNK_GOING = 0, /* its load is in flight: nobody else may write its pages */
    KVT_SCHUNK_GOOD,      /* loaded */
    KVT_SCHUNK_LOST       /* the engine computes it */
};

struct kvt_schunk {
    uint32_t from, to; /* blocks */
    uint32_t good;     /* blocks [from, good) are loaded, when it has ended */
    uint32_t job;      /* GOING */
    uint8_t state;     /* enum kvt_schunk_state */
    bool called_off;   /* it has been waited for: the next time it is cancelled */
};

#define KVT_SCHUNKS_MAX 16u

/* Whose a page of a RESTORING session is. */
enum kvt_sgot {
    KVT_SGOT_OWN = 0, /* the engine's to fill, or there is none */
    KVT_SGOT_SHARED,  /* a cell's */
    KVT_SGOT_WANTED,  /* being loaded */
    KVT_SGOT_LOADED
};

struct kvt_session {
    uint8_t state; /* enum kvt_session_state; 0: not in use */
    bool no_store;
    bool unwritten; /* ACTIVE: a cut gave the block that `filled` ends in a page for its state,
                       where there was none: it holds nothing until the next kvt_session_filled() */
    uint32_t generation;
    uint32_t tokens;                      /* length of the sequence */
    uint32_t filled;                      /* tokens whose KV is in pages */
    uint32_t blocks;                      /* full blocks that have a node: node[0 .. blocks) */
    uint32_t window_from;                 /* first block that is in the window */
    uint32_t from[KVT_GROUPS_MAX];        /* of each group: first block that it holds the cell of */
    uint32_t tail;                        /* idle: node of the partial last block, or KVT_NONE */
    uint32_t restore_job[KVT_GROUPS_MAX]; /* of each group, or KVT_NONE */
    uint32_t loads;                       /* of them, in flight */
    uint32_t load_from, load_to;          /* blocks being restored */
    uint32_t front;                       /* RESTORING by a cut: blocks before it are there, */
    uint32_t given;                       /* blocks [front, given) are the engine's to compute, */
    uint32_t chunk_count;                 /* and what is behind them is in pieces; 0: no cut */
    uint32_t chunk_next;                  /* the first that front has not passed */
    uint32_t beside, loaded;              /* blocks computed, and loaded, that front has passed */
    uint32_t got_dram, got_disk;          /* blocks loaded from each */
    double load_s;                        /* seconds that a block is expected to take */
    struct kvt_schunk chunks[KVT_SCHUNKS_MAX];
    uint32_t tail_filled; /* RESTORING: `filled` if all loads succeed */
    uint8_t root[32];
    struct kvt_session_plan plan;
    uint32_t *token;
    uint8_t (*hash)[KVT_HASH_BYTES_MAX]; /* of the full blocks of `tokens` */
    uint32_t *node;
    uint32_t *page; /* not idle: of every block of each group; KVT_NONE: it needs none there */
    uint8_t *got;   /* RESTORING: enum kvt_sgot of each */
};

struct kvt_session_mgr {
    struct kvt_ns *ns;
    struct kvt_pool *pool;
    struct kvt_session_mgr *pool_next; /* another manager of the pool; under the cache's lock */
    struct kvt_session_mgr_opts opts;  /* effective */
    struct kvt_sgroup groups[KVT_GROUPS_MAX]; /* in the order of the shape's */
    uint32_t group_count;
    uint32_t main_group;     /* the first of full attention; 0 without one */
    uint32_t block_tokens;   /* of every group */
    uint32_t session_blocks; /* of one session at most */
    bool states;             /* some group is of states */
    pthread_mutex_t lock;

    struct kvt_snode *nodes;
    struct kvt_scell *cells;
    uint32_t *buckets;
    uint32_t bucket_mask;
    uint32_t node_free, nodes_used, node_max;
    uint32_t cool_count; /* cells that wait to be cooled */

    struct kvt_session *sessions;

    struct kvt_sjob jobs[KVT_SESSION_JOBS];
    uint32_t job_free, jobs_used;

    struct kvt_key *keys; /* scratch, session_blocks of each */
    uint32_t *path;
    enum kvt_tier *tiers;      /* of each group */
    enum kvt_tier *plan_tiers; /* of several groups: the slowest */
    uint8_t *roots;
    struct kvt_session_stats stats;
    struct kvt_session_stats published; /* what of them the cache's counters have */
};

/* ---- session_registry.c */
uint32_t kvt_snode_find(const struct kvt_session_mgr *mgr, const uint8_t *hash);
/* A new node; hash NULL: the partial last block of session tail_of. KVT_NONE: the table is full. */
uint32_t kvt_snode_add(struct kvt_session_mgr *mgr, const uint8_t *hash, uint32_t parent,
                       uint32_t depth, uint32_t tail_of);
/* Free the node, and its ancestors, as far as nothing needs them. */
void kvt_snode_settle(struct kvt_session_mgr *mgr, uint32_t node);
/* Put a cell into its group's LRU list, or take it out, as it must be: at the newest end, or at the
 * oldest when no session needs it (rule 3). */
void kvt_scell_lru(struct kvt_session_mgr *mgr, uint32_t cell);
void kvt_scell_set_page(struct kvt_session_mgr *mgr, uint32_t cell, uint32_t page);
/* Returns the page, which belongs to the caller. */
uint32_t kvt_scell_take_page(struct kvt_session_mgr *mgr, uint32_t cell);
uint32_t kvt_spage_take(struct kvt_sgroup *group); /* there is one */
void kvt_spage_put(struct kvt_sgroup *group, uint32_t page);
/* Full blocks that sessions may still make nodes of. */
uint32_t kvt_snode_room(const struct kvt_session_mgr *mgr);
/* ---- session_check.c */
/* Every rule above. 0, or KVT_E_CORRUPT with a sentence. For tests. */
int kvt_session_mgr_check(struct kvt_session_mgr *mgr, char *why, size_t why_len);

static inline struct kvt_snode *kvt_snode_at(const struct kvt_session_mgr *mgr, uint32_t node)
{
    return &mgr->nodes[node];
}

static inline uint32_t kvt_scell_of(const struct kvt_session_mgr *mgr, uint32_t node, uint32_t g)
{
    return node * mgr->group_count + g;
}

static inline struct kvt_scell *kvt_scell_at(const struct kvt_session_mgr *mgr, uint32_t node,
                                             uint32_t g)
{
    return &mgr->cells[kvt_scell_of(mgr, node, g)];
}

static inline uint32_t kvt_scell_node(const struct kvt_session_mgr *mgr, uint32_t cell)
{
    return cell / mgr->group_count;
}

static inline uint32_t kvt_scell_group(const struct kvt_session_mgr *mgr, uint32_t cell)
{
    return cell % mgr->group_count;
}

/* A session's page of block i of group g. */
static inline uint32_t *kvt_session_page(const struct kvt_session_mgr *mgr,
                                         const struct kvt_session *s, uint32_t g, uint32_t i)
{
    return &s->page[(size_t)g * mgr->session_blocks + i];
}

static inline uint8_t *kvt_session_got(const struct kvt_session_mgr *mgr,
                                       const struct kvt_session *s, uint32_t g, uint32_t i)
{
    return &s->got[(size_t)g * mgr->session_blocks + i];
}

static inline uint32_t kvt_session_blocks_of(const struct kvt_session_mgr *mgr, uint32_t tokens)
{
    return (tokens + mgr->block_tokens - 1) / mgr->block_tokens;
}

/* ---- session_opts.c */
/* The options that are in force, and what they make of each group (pages, levels). */
int kvt_session_opts_read(const struct kvt_session_mgr_opts *from, const struct kvt_ns *ns,
                          const struct kvt_pool *pool, struct kvt_session_mgr *mgr);

/* ---- session_groups.c */
/* The first block of group g that a prefix of so many blocks needs. */
uint32_t kvt_session_needs(const struct kvt_session_mgr *mgr, uint32_t g, uint32_t blocks);
/* Whether block i of group g gets a page when the engine computes a sequence of `tokens` tokens. */
bool kvt_session_gives(const struct kvt_session_mgr *mgr, uint32_t g, uint32_t i, uint32_t tokens);
/* From now on the session holds the cells of group g from block `from` on. */
void kvt_session_hold_from(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t g,
                           uint32_t from);
/* `filled` tokens are filled: what is needed to go on, and to come back, is held, the rest not. */
void kvt_session_set_needs(struct kvt_session_mgr *mgr, struct kvt_session *s);
/* The node of its block i, which it holds or that others may have made; or KVT_NONE. */
uint32_t kvt_session_node(const struct kvt_session_mgr *mgr, const struct kvt_session *s,
                          uint32_t i);
/* Whether block i of group g, which has that node or KVT_NONE, counts. */
typedef bool (*kvt_session_has_fn)(const struct kvt_session_mgr *mgr, const struct kvt_session *s,
                                   uint32_t node, uint32_t g, uint32_t i);
/* The longest prefix, in blocks up to `limit`, of which every group has what it needs. */
uint32_t kvt_session_reach(const struct kvt_session_mgr *mgr, const struct kvt_session *s,
                           uint32_t limit, kvt_session_has_fn has);
bool kvt_session_has_page(const struct kvt_session_mgr *mgr, const struct kvt_session *s,
                          uint32_t node, uint32_t g, uint32_t i);
/* The same for one length. */
bool kvt_session_serves(const struct kvt_session_mgr *mgr, const struct kvt_session *s,
                        uint32_t blocks, kvt_session_has_fn has);
void kvt_session_pin_tail(struct kvt_session_mgr *mgr, struct kvt_session *s, bool pin);
/* Take a page for the engine, or for a load: exact from now on. */
uint32_t kvt_session_fresh_page(struct kvt_session_mgr *mgr, uint32_t g);
void kvt_session_reset_origin(struct kvt_session_mgr *mgr, uint32_t g, const uint32_t *pages,
                              uint32_t n);
/* Pages of blocks [from, to) in every group come free: they are the session's own. */
void kvt_session_put_pages(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t from,
                           uint32_t to);
uint8_t kvt_session_origin(const struct kvt_session_mgr *mgr, uint32_t g, uint32_t page);

/* ---- session.c */
/* The session of an id, with the lock held; NULL without it, and *code says why. */
struct kvt_session *kvt_session_enter(struct kvt_session_mgr *mgr, kvt_session_id id, int *code);
/* Session i holds node as block number `index`. */
void kvt_session_attach(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t index,
                        uint32_t node);
/* The last block goes. */
void kvt_session_detach_last(struct kvt_session_mgr *mgr, struct kvt_session *s);
/* The window of a sequence of so many tokens. */
void kvt_session_set_window(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t tokens);
/* Hashes of the full blocks from `from` on, in a sequence of `tokens` tokens. 0, -ENOMEM. */
int kvt_session_hash(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t from,
                     uint32_t tokens);
/* Add n tokens behind the sequence's end, without changing its length. 0; KVT_E_INVAL; KVT_E_LIMIT;
 * -ENOMEM. */
int kvt_session_put_tokens(struct kvt_session_mgr *mgr, struct kvt_session *s,
                           const uint32_t *tokens, size_t n);
void kvt_session_go_idle(struct kvt_session_mgr *mgr, struct kvt_session *s);

/* ---- session_evict.c */
/* Make sure that need[g] pages of each group are free. 0; -EAGAIN; KVT_E_LIMIT (counted). */
int kvt_session_make_room(struct kvt_session_mgr *mgr, const uint32_t *need);

/* ---- session_save.c */
void kvt_sjobs_init(struct kvt_session_mgr *mgr);
struct kvt_sjob *kvt_sjob_take(struct kvt_session_mgr *mgr, enum kvt_sjob_kind kind);
void kvt_sjob_put(struct kvt_session_mgr *mgr, struct kvt_sjob *job);
/* Note what has ended, and begin what waits. Returns how many requests ended. */
uint32_t kvt_session_poll(struct kvt_session_mgr *mgr);
/* Add what has been counted to the cache's counters. */
void kvt_session_publish(struct kvt_session_mgr *mgr);
/* Wait, without the lock, for one request. Returns what kvt_req_wait() does. */
int kvt_sjob_wait(struct kvt_session_mgr *mgr, struct kvt_sjob *job, int64_t timeout_ns);
/* Queue a cell for cooling if it has to be; each cell of a node. */
void kvt_session_want_cool(struct kvt_session_mgr *mgr, uint32_t cell);
void kvt_session_want_cool_all(struct kvt_session_mgr *mgr, uint32_t node);
/* Begin to cool what is queued; all: however little. */
void kvt_session_cool(struct kvt_session_mgr *mgr, bool all);
/* Rule 7: whether a cell is to be stored at all. */
bool kvt_session_wanted(const struct kvt_session_mgr *mgr, uint32_t cell);
/* Store what of a chain that ends at the cell's node is not stored in its group. 0 something was
 * begun, or nothing was to be done; -EAGAIN no request is free; else an error of kvt_store(). */
int kvt_session_save_chain(struct kvt_session_mgr *mgr, uint32_t cell);
struct kvt_key kvt_session_key(const struct kvt_session_mgr *mgr, uint32_t g, const uint8_t *hash);
/* What a page's origin says about the record that it was loaded from. */
uint8_t kvt_session_record_of(const struct kvt_session_mgr *mgr, uint32_t g, uint32_t depth,
                              uint32_t page);

/* ---- session_meet.c */
/* Begin to load blocks [load_from, load_to) in pieces, the last one first; keys: of them. 0, or why
 * not one could be begun. */
int kvt_session_meet_begin(struct kvt_session_mgr *mgr, struct kvt_session *s,
                           const struct kvt_key *keys, int64_t deadline_ns);
void kvt_session_chunk_done(struct kvt_session_mgr *mgr, struct kvt_sjob *job,
                            const int32_t *status);
/* Wait for one of its loads, without the lock. false: none is in flight. */
bool kvt_session_meet_wait(struct kvt_session_mgr *mgr, struct kvt_session *s, int64_t timeout_ns);
/* It is given up: cancel what is in flight. */
void kvt_session_meet_cancel(struct kvt_session_mgr *mgr, struct kvt_session *s);

/* ---- session_look.c */
struct kvt_resume { /* a call in progress */
    struct kvt_session_mgr *mgr;
    struct kvt_session *s;
    uint32_t total;  /* tokens */
    uint32_t before; /* blocks that the session holds already */
    uint32_t a, c, b;
    uint32_t blocks;                   /* of total, the last one partial or not */
    uint32_t disk;                     /* blocks of [c, b) */
    uint32_t leading[KVT_GROUPS_MAX];  /* full attention: the run of blocks with pages */
    uint32_t old_from[KVT_GROUPS_MAX]; /* what it held before */
    struct kvt_plan plan;
    int refused; /* why a load could not be begun */
    bool tail;   /* the partial last block is in L0, and stays */
};

/* Fill in leading, a, b, c, disk, plan and tail. limit: blocks that may be had. */
void kvt_resume_find(struct kvt_resume *r, uint32_t limit,
                     const struct kvt_session_resume_opts *opts);
/* Whether block i of group g is used as it is in L0; whether it is to be loaded. */
bool kvt_resume_shared(const struct kvt_resume *r, uint32_t g, uint32_t i);
bool kvt_resume_to_load(const struct kvt_resume *r, uint32_t g, uint32_t i);

/* ---- session_resume.c */
/* The partial last block of an idle session goes; its pages come free, or are the caller's. */
void kvt_session_drop_tail(struct kvt_session_mgr *mgr, struct kvt_session *s, bool free_pages);

/* ---- session_landed.c */
/* Everything up to block `end` is there, of which `loaded` came from the store: it is ACTIVE. */
void kvt_session_activate(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t end,
                          uint32_t loaded);
void kvt_session_restore_done(struct kvt_session_mgr *mgr, struct kvt_sjob *job,
                              const int32_t *status);
/* One of its loads in flight; it is RESTORING, and not by a cut. */
struct kvt_sjob *kvt_session_a_load(struct kvt_session_mgr *mgr, const struct kvt_session *s);
/* All loads have ended, or none was needed: ACTIVE, or IDLE when it lacks pages to go on. */
void kvt_session_landed(struct kvt_session_mgr *mgr, struct kvt_session *s);

#endif
