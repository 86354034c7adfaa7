/* Sessions: the tiered manager for an engine that has none.
 *
 * Purpose:  a manager owns the pages of one pool (L0). A session is a sequence of tokens; the
 *           manager gives it pages for the engine to fill, shares full blocks between sessions with
 *           the same prefix, stores what leaves the window or goes idle, takes pages back from idle
 *           sessions when they run short, and restores a session that comes back. docs/sessions.md.
 * Threads:  any; one lock per manager. The manager has no thread of its own: work goes on in its
 *           calls, above all kvt_session_mgr_work(). Two calls on one session do not overlap, but
 *           which is first is the caller's business.
 * Errors:   error.h. A session is named by an id; one that was never opened or is closed gives
 *           KVT_E_NO_SESSION, a call that its state does not allow KVT_E_STATE. A refused call
 *           changes nothing.
 * Lifetime: namespace and pool outlive the manager, and nobody else writes the pages that it owns.
 *           kvt_session_open() allocates; afterwards nothing does but the hashing of keys.
 *
 * Groups:   of a group of full attention a session needs all blocks, of a window those that cover
 *           its last tokens, of states the last one. A sequence can come back to where every group
 *           has what it needs: to where it went idle, and to what of other places is still there.
 *
 *   open --> IDLE --resume--> RESTORING --(loads end)--> ACTIVE --idle--> IDLE --close-->
 *                |                `---(meet: by a cut)---^
 *                `------------- nothing to load ---------^
 */
#ifndef KVTIER_SESSION_H
#define KVTIER_SESSION_H

#include <kvtier/cache.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_session_mgr;

/* Names one session of a manager; never 0, never used again. */
typedef uint64_t kvt_session_id;

#define KVT_SESSION_NO_PAGE UINT32_MAX

enum kvt_session_state {
    KVT_SESSION_IDLE = 1,      /* nothing of it is in use; its pages may be taken */
    KVT_SESSION_RESTORING = 2, /* a load is going on: kvt_session_wait(), kvt_session_meet() */
    KVT_SESSION_ACTIVE = 3     /* its pages are there, and stay until kvt_session_idle() */
};

/* The pages of one group of a layout that has several: page 5 of one is not page 5 of another. */
struct kvt_session_group {
    uint16_t group;         /* as in kvt_part.group */
    uint16_t reserved;      /* 0 */
    uint32_t first_page;    /* as in kvt_session_mgr_opts, for this group */
    uint32_t page_count;    /* of a window at least its blocks and 3, of states 3, */
    uint32_t scratch_pages; /* and these */
};

struct kvt_session_mgr_opts {
    size_t struct_size;
    uint32_t window_tokens; /* most recent tokens of a sequence kept at window_level; 0: 4,096 */
    int window_level;       /* KVT_LEVEL_KV8 (DEFAULT) or KVT_LEVEL_RAW */
    int level;              /* what blocks cool to; DEFAULT: the configured level */
    uint32_t sessions_max;  /* 0: 256 */
    uint32_t tokens_max;    /* of one session; 0: 131,072 */
    uint32_t
        blocks_max; /* full blocks that sessions know of; 0: 16 x page_count, 65,536 at least */
    uint32_t first_page;    /* the manager owns pages [first_page, first_page + page_count) */
    uint32_t page_count;    /* 0: all from first_page on; 2^26 at most */
    uint32_t scratch_pages; /* of them, for cooling blocks that are not in L0; 0: 1, or 4 of 64 */
    uint32_t shard;         /* of the keys: the rank */
    const struct kvt_session_group *groups; /* groups with pages of their own choice; the others
                                               have those above. Borrowed until return */
    uint32_t group_count;
    uint32_t reserved; /* 0 */
};
/* struct_size of callers whose struct ends before `groups`. */
#define KVT_SESSION_MGR_OPTS_SIZE_0 48u

/* A manager over a pool. opts NULL: defaults. 0; -ENOMEM; KVT_E_INVAL (a page range that the pool
 * does not have, no page left, a level that is none); KVT_E_VERSION; KVT_E_LAYOUT namespace and
 * pool differ; KVT_E_UNSUPPORTED groups whose blocks are of different lengths. KVT_E_INVAL also
 * when another manager owns one of the pages, a group has too few for one session, or `groups`
 * names one that the layout has not (a log, if set, says which). Blocks never; allocates. */
int kvt_session_mgr_open(struct kvt_ns *ns, struct kvt_pool *pool,
                         const struct kvt_session_mgr_opts *opts, struct kvt_session_mgr **out);

/* Close what is open (kvt_session_close()), wait for what is being stored, and free. NULL is
 * allowed. No other call may be going on. */
void kvt_session_mgr_close(struct kvt_session_mgr *mgr);

/* Let work go on: note what has been stored and loaded, cool what has left its window. When nothing
 * has ended yet, waits up to timeout_ns for something (0: not at all, < 0: for ever). Returns how
 * many requests are in flight or waiting to be made; 0: nothing is left to do; or an error. */
long kvt_session_mgr_work(struct kvt_session_mgr *mgr, int64_t timeout_ns);

/* Store every filled block of every session, active ones too, and flush the cache. Blocks.
 * 0; KVT_E_DROPPED some blocks could not be stored; else as kvt_flush(). */
int kvt_session_mgr_flush(struct kvt_session_mgr *mgr);

/* An empty, idle session. salt: sessions of different salts share nothing (NULL: the common one);
 * images and other things that tokens do not tell go in here. 0; KVT_E_INVAL; -ENOMEM;
 * KVT_E_LIMIT sessions_max are open. */
int kvt_session_open(struct kvt_session_mgr *mgr, const void *salt, size_t salt_len,
                     kvt_session_id *out);

/* Nothing of this session is stored: its blocks are in L0 while there is room, and are computed
 * again after that. It may use what others have stored. What another session without this mark
 * holds as well (the same tokens, the same salt) is stored for that one; a salt of its own keeps
 * it apart. Once, before its first tokens. 0; KVT_E_NO_SESSION; KVT_E_STATE it has tokens. */
int kvt_session_no_store(struct kvt_session_mgr *mgr, kvt_session_id id);

/* Close a session in any state: an active one goes idle first, a load is cancelled and waited for.
 * Its blocks stay in L0 and in the store for others, until they are evicted. 0; KVT_E_NO_SESSION.
 */
int kvt_session_close(struct kvt_session_mgr *mgr, kvt_session_id id);

struct kvt_session_resume_opts {
    size_t struct_size;
    int64_t deadline_ns; /* of the load, from now; 0: the plan's, or the configured default without
                            one; < 0: none */
    int cut;         /* enum kvt_plan_cut: OVERLAP: this engine calls kvt_session_meet(), so that
                        it may compute the beginning while the rest is loaded; NONE: it waits */
    double gpu_busy; /* 0 idle .. 1 requests wait for the GPU, as in kvt_plan_query */
};

struct kvt_session_plan { /* tokens of the sequence, from its start: */
    size_t struct_size;
    uint32_t tokens;    /* all of them */
    uint32_t in_l0;     /* there already */
    uint32_t from_dram; /* being loaded, or loaded */
    uint32_t from_disk;
    uint32_t recompute; /* for the engine: the last `recompute` of `tokens` */
    int32_t reason;     /* why the load was shorter than planned: KVT_E_MISS, DEADLINE, ...; 0 */
    int32_t decision;   /* enum kvt_plan_reason: why so much, or so little, is loaded */
    uint32_t head;      /* not 0: tokens for the engine before those that are being loaded, to be
                           computed meanwhile by kvt_session_meet(); not part of recompute */
};

/* Bring an idle session back, with n more tokens at its end (the next prompt; n may be 0): plan
 * what is in L0, what of the rest is loaded faster than computed (kvt_plan(); plan=off: all of it)
 * and what must be computed, take pages for all of it, and begin the load. With n > 0 at least one
 * token is left to compute, since an engine needs its logits. plan: optional. Afterwards the
 * session is RESTORING, or ACTIVE when nothing is to be loaded. Blocks: for one round trip to the
 * store. 0; KVT_E_NO_SESSION; KVT_E_STATE it is not idle; KVT_E_INVAL; KVT_E_LIMIT more than
 * tokens_max, blocks_max, or pages are short and all others belong to active sessions; -EAGAIN
 * pages are being freed: call kvt_session_mgr_work() and try again. */
int kvt_session_resume(struct kvt_session_mgr *mgr, kvt_session_id id, const uint32_t *tokens,
                       size_t n, const struct kvt_session_resume_opts *opts,
                       struct kvt_session_plan *plan);

/* From both ends: after a resume whose plan has a head. The engine computes from the front, blocks
 * are loaded from the back, and they stop where they meet:
 *
 *     for (at = 0; (rc = kvt_session_meet(mgr, id, at, &from, &at)) == 0;)
 *         compute tokens [from, at) into their pages (kvt_session_pages());
 *
 * computed: how far the range that the last call gave has been computed, a multiple of the block; 0
 * at the first call. 0: compute [*from, *until) next, or its beginning; nobody else writes these
 * pages. 1: they have met, the session is ACTIVE, and what is left is at its end, as ever. Blocks:
 * for a load that is about to end, at most half as long as computing its blocks would take, and for
 * the end of one that is called off. KVT_E_NO_SESSION; KVT_E_STATE it is not RESTORING by a cut;
 * KVT_E_INVAL; KVT_E_LIMIT as kvt_session_filled(). */
int kvt_session_meet(struct kvt_session_mgr *mgr, kvt_session_id id, uint32_t computed,
                     uint32_t *from, uint32_t *until);

/* Wait until a session is no longer RESTORING. timeout_ns as in kvt_req_wait(). 1 it is not, 0 it
 * still is; KVT_E_NO_SESSION; KVT_E_STATE the engine has to compute: kvt_session_meet(). Layouts of
 * several groups: when a load came short and there are no pages to compute what it should have
 * brought, the session is IDLE again, with what it has, and plan.reason is KVT_E_LIMIT or -EAGAIN:
 * look at kvt_session_get_info(), and resume it with the rest. */
int kvt_session_wait(struct kvt_session_mgr *mgr, kvt_session_id id, int64_t timeout_ns);

/* What became of the last resume; while RESTORING what is planned. 0; KVT_E_NO_SESSION;
 * KVT_E_VERSION. */
int kvt_session_get_plan(struct kvt_session_mgr *mgr, kvt_session_id id,
                         struct kvt_session_plan *plan);

/* Add n tokens (> 0) to an active session, and pages for them. Errors as kvt_session_resume(). A
 * window group gives pages for all of them, so a long prompt may have to be handed over in pieces,
 * each filled before the next one. */
int kvt_session_append(struct kvt_session_mgr *mgr, kvt_session_id id, const uint32_t *tokens,
                       size_t n);

/* Page numbers of blocks [first, first + n) of a session that is active, or RESTORING by a cut, as
 * many as there are; of the layout's first group. They stay the same until it goes idle. Pages of
 * blocks before `filled` of kvt_session_get_info() are read only: other sessions may use them.
 * Returns the number written; KVT_E_NO_SESSION; KVT_E_STATE. */
long kvt_session_pages(struct kvt_session_mgr *mgr, kvt_session_id id, size_t first,
                       uint32_t *pages, size_t n);

/* The same for a group of the layout; KVT_E_INVAL: it has no such group. KVT_SESSION_NO_PAGE: the
 * session needs none there. Of a window that is what lies before it; what the last
 * kvt_session_filled() has moved out of it has no page any more. Of states only the last block of
 * the sequence has a page, full or not, and those at whose ends it may have to come back: there the
 * engine keeps the state after the block's last token (of a partial last block: after the last one
 * that is filled), and goes on from it in the next page. */
long kvt_session_group_pages(struct kvt_session_mgr *mgr, kvt_session_id id, uint16_t group,
                             size_t first, uint32_t *pages, size_t n);

/* Say that the pages of every group hold the KV, or the state, of the first `tokens` tokens. Full
 * blocks may from now on be shared and stored. 0; KVT_E_NO_SESSION; KVT_E_STATE; KVT_E_INVAL fewer
 * than before, or more than there are. */
int kvt_session_filled(struct kvt_session_mgr *mgr, kvt_session_id id, uint32_t tokens);

/* Cut the sequence of an active or idle session back to its first `tokens` tokens: to edit a turn,
 * or to sample it again. Blocks behind the cut stay for others, and for a session that goes the
 * same way again. Afterwards kvt_session_get_info() says how many of the tokens are filled: all,
 * or, when the cut is inside a block that others use too or that is not exact, those before it; the
 * engine fills the rest again, in a page that kvt_session_pages() names. Of an active session of
 * states that was not filled as far as the cut, the block that it is filled to may get a page that
 * it had not: the engine writes its state there before the next kvt_session_filled(), and a session
 * that goes idle before that comes back to a state before it.
 * 0; KVT_E_NO_SESSION; KVT_E_STATE it is RESTORING, or active, and a window or state that the cut
 * needs is not in L0 any more: go idle, cut, resume; KVT_E_INVAL more than there are; -EAGAIN and
 * KVT_E_LIMIT as kvt_session_resume(): a block in use needs pages of its own. */
int kvt_session_truncate(struct kvt_session_mgr *mgr, kvt_session_id id, uint32_t tokens);

/* The engine is done with the session for now. Tokens that were not filled are cut off its end. Its
 * blocks are stored in the background; its pages may be taken from now on. 0; KVT_E_NO_SESSION;
 * KVT_E_STATE it is not active (a second idle, too). */
int kvt_session_idle(struct kvt_session_mgr *mgr, kvt_session_id id);

struct kvt_session_info {
    size_t struct_size;
    int state;       /* enum kvt_session_state */
    uint32_t tokens; /* of the sequence */
    uint32_t filled; /* of them, with KV in the pages (active), or kept by resume from L0 at best */
    uint32_t blocks; /* full blocks that are filled */
};
int kvt_session_get_info(struct kvt_session_mgr *mgr, kvt_session_id id,
                         struct kvt_session_info *info);

/* What the manager believes of a record; the store may have evicted it. */
enum kvt_session_record {
    KVT_SESSION_RECORD_NONE = 0,
    KVT_SESSION_RECORD_WINDOW = 1, /* at the window's level */
    KVT_SESSION_RECORD_FINAL = 2   /* as coarse as it gets */
};

struct kvt_session_block {
    size_t struct_size;
    uint32_t page;     /* L0, or KVT_SESSION_NO_PAGE */
    uint32_t sessions; /* open sessions that hold it */
    int page_level; /* of the bytes in the page: KVT_LEVEL_RAW exact, else where they came from */
    int record;     /* enum kvt_session_record */
    int tier;       /* enum kvt_tier of the record: the store is asked */
};
/* Where block `index` of a session is. Blocks: for one round trip. 0; KVT_E_NO_SESSION;
 * KVT_E_INVAL no such full block; KVT_E_VERSION. */
int kvt_session_get_block(struct kvt_session_mgr *mgr, kvt_session_id id, size_t index,
                          struct kvt_session_block *block);

/* The same for a group of the layout. KVT_E_INVAL also: it has no such group. */
int kvt_session_get_group_block(struct kvt_session_mgr *mgr, kvt_session_id id, uint16_t group,
                                size_t index, struct kvt_session_block *block);

/* Counters, but for the first five; pages, and blocks that are loaded, stored or evicted, are those
 * of all groups. kvt_stats_each() has their sums over all managers of a cache,
 * as "session.*". */
struct kvt_session_stats {
    size_t struct_size;
    uint64_t sessions, pages, pages_free, blocks, in_flight;
    uint64_t resumed;          /* sessions brought back */
    uint64_t blocks_l0;        /* of them, blocks that were in L0 */
    uint64_t blocks_loaded;    /* loaded */
    uint64_t load_short;       /* planned to be loaded, and not there when it came to it */
    uint64_t met;              /* sessions brought back from both ends */
    uint64_t blocks_beside;    /* blocks that their engines computed beside the load */
    uint64_t shared;           /* blocks of a session that L0 held for another one */
    uint64_t duplicates;       /* computed although another session had just done so */
    uint64_t stored_window;    /* stored at the window's level */
    uint64_t stored_final;     /* stored at the final level, or found there */
    uint64_t cooled_record;    /* of them, from their record and not from a page */
    uint64_t store_failed;     /* blocks that the store did not take (tried again later) */
    uint64_t cool_failed;      /* blocks whose record could not be loaded to cool it */
    uint64_t evicted;          /* pages taken from idle sessions */
    uint64_t evicted_unsaved;  /* of them, without a record: to be computed again */
    uint64_t tails_lost;       /* partial blocks evicted: they have no record */
    uint64_t cut_tokens;       /* tokens that were not filled when a session went idle */
    uint64_t refused_busy;     /* calls that ended with -EAGAIN */
    uint64_t refused_limit;    /* calls that ended with KVT_E_LIMIT */
    uint64_t truncated_tokens; /* cut off by kvt_session_truncate() */
};
int kvt_session_mgr_stats(struct kvt_session_mgr *mgr, struct kvt_session_stats *stats);

#ifdef __cplusplus
}
#endif
#endif
