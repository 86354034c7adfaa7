/* The log's private state, shared by the l2_*.c files. Nobody else includes this (fsck uses the
 * survey and the scan, which only read).
 *
 * Life of a segment:
 *
 *   ABSENT     no file             -> BLANK      file made, space reserved
 *   BLANK      file without life   -> PREPARING  chosen; -> SEALED found at open with records
 *                                  -> UNREAD     found at open, and could not be read
 *   PREPARING  header on its way   -> READY      header of the new generation is durable
 *                                  -> BLANK      failed
 *   READY      waits               -> OPEN       the first batch is submitted
 *   OPEN       batches appended    -> CLOSING    full, or a batch failed
 *   CLOSING    footer and trailer, -> SEALED     done, or no footer: the next open walks it
 *              fdatasync           -> BLANK      no record in it
 *   SEALED     read only           -> PREPARING  recycled, evicted() is called; when `drained`
 * first
 *                                  -> OPEN       at open: appended to again
 *   UNREAD     kept as it is: what   -> SEALED     it could be read later (l2_again.c)
 *              could be read of it   -> BLANK      and held no record of ours
 *              is served, nothing is written to it but zeros over purged records, it is not
 *              recycled
 *   any file                       -> ABSENT     dropped to keep the cap, or no space for it
 *
 * Invariants
 *  1. At most one segment is PREPARING or READY, one OPEN, one CLOSING.
 *  2. A new life starts with a header of a new generation that is durable before the first batch of
 *     that life is submitted: so a trailer or batch of an earlier life never fits its header.
 *  3. generation and sequence handed out are below what the durable superblock promises (sequences:
 *     as long as the store reserves ahead; recovery also takes the maximum seen).
 *  4. The user's callbacks are called from kvt_l2_run() and kvt_l2_close() only.
 *  5. Completions (finish functions) record; the pumps act.
 * Threads: the owner's only. */
#ifndef KVT_STORE_L2_INTERNAL_H
#define KVT_STORE_L2_INTERNAL_H

#include <errno.h>

#include "base/rng.h"
#include "store/l2.h"
#include "store/l2_scan.h"
#include "store/l2_survey.h"

#define KVT_L2_WRITES 2u          /* batches in flight: rule 4 of l2.h */
#define KVT_L2_BATCH_RECORDS 255u /* their header fits 8 pages */
#define KVT_L2_BATCH_HEADER_PAGES 8u
#define KVT_L2_SEGMENTS_MIN 4u            /* open, ready, and two that hold something */
#define KVT_L2_FREE_SEGMENTS 2u           /* kept for new and moved records ... */
#define KVT_L2_SEGMENTS_FEW 8u            /* ... of roots with more segments; else one */
#define KVT_L2_SEGMENT_NUMBERS (1u << 17) /* 32 TiB of 256 MiB segments */
#define KVT_L2_ERASES 8192u               /* ranges waiting to be erased */
/* One merged read is at most this long: a drive is at full speed with it, and several of them are
 * in flight beside each other; a longer one would only make its first block wait for its last. */
#define KVT_L2_READ_BYTES_MAX (4u << 20)
#define KVT_L2_GENERATION_STRIDE 64u
#define KVT_L2_SEQUENCE_STRIDE (1u << 20)
#define KVT_L2_PAUSE_NS_MIN 1000000000ll    /* after repeated write failures, doubling ... */
#define KVT_L2_PAUSE_NS_MAX 16000000000ll   /* ... up to here */
#define KVT_L2_FAILURE_LOG_NS 10000000000ll /* failed writes are logged that often at most */
#define KVT_L2_RETRY_NS 20000000ll          /* nothing to recycle yet: pinned or being read */
#define KVT_L2_NONE KVT_L2_SEGMENT_NONE

enum kvt_l2_state {
    KVT_L2_ABSENT = 0,
    KVT_L2_BLANK,
    KVT_L2_PREPARING,
    KVT_L2_READY,
    KVT_L2_OPEN,
    KVT_L2_CLOSING,
    KVT_L2_SEALED,
    KVT_L2_UNREAD,
    KVT_L2_STATES
};

/* A SEALED segment whose last sync failed; one (SEALED, UNREAD) that an earlier life may not have
 * made durable. No flush succeeds before a sync of it does. */
enum kvt_l2_unsynced {
    KVT_L2_SYNCED = 0,
    KVT_L2_SYNC_AGAIN,
    KVT_L2_SYNC_NEVER /* no footer, which alone knows some of its records: until it is recycled */
};

struct kvt_l2_segment {
    uint64_t generation;
    uint64_t min_sequence; /* of the entries its file may show; UINT64_MAX: none, for certain */
    uint64_t bytes;        /* of its file */
    int64_t retry_ns;      /* ran out of space: not taken again before */
    uint32_t busy;         /* reads accepted, holds, erases queued: not recycled while > 0 */
    uint32_t erases;       /* of them: ranges in the erase queue */
    uint32_t older, newer; /* list of SEALED segments by age */
    int8_t slot;           /* in files[], -1: not open */
    uint8_t state;         /* enum kvt_l2_state */
    uint8_t drained;       /* what is to be kept of it has been moved */
    uint8_t punched;       /* has holes: space is reserved again before reuse */
    uint8_t unsynced;      /* enum kvt_l2_unsynced */
    uint8_t moved;         /* not KVT_L2_SYNCED: among its records are moved ones */
    uint8_t partly;        /* UNREAD: records that could be read have been reported */
};

struct kvt_l2_file {
    int file;
    uint32_t segment;
    uint32_t refs;
    uint64_t used; /* for LRU */
};

/* One I/O request of ours. Always accepted: waits in l2->unsent while the backend is full. */
struct kvt_l2_op {
    struct kvt_io_req req;
    struct kvt_l2 *l2;
    void (*finish)(struct kvt_l2_op *op); /* records the outcome in req.result */
    struct kvt_l2_op *next;
    bool busy;
};

/* Segment being filled, or being closed. */
struct kvt_l2_active {
    struct kvt_entry *entries; /* published ones; capacity segment_pages; 4 KiB aligned */
    uint32_t segment;          /* KVT_L2_NONE: unused */
    int slot;
    uint32_t next_page;
    uint32_t count;     /* published entries */
    uint32_t reserved;  /* published, failed and in flight */
    uint32_t in_flight; /* batches */
    uint64_t previous;  /* checksum of the last batch header */
    uint64_t written;   /* batches that reached the file ... */
    uint64_t synced;    /* ... of which durable */
    uint64_t moved;     /* `written` as of the last batch with a moved record */
    bool failed;        /* a batch failed: nothing more is appended */
    bool gap;           /* a batch behind a failed one is good: only the footer can find it */
};

struct kvt_l2_batch {
    struct kvt_l2_op op;
    struct kvt_batch_header *header; /* KVT_L2_BATCH_HEADER_PAGES pages */
    struct kvt_l2_write *list;
    struct kvt_l2_active *active;
    uint32_t bytes;
    bool moved; /* holds a moved record */
    bool complete;
    int status;
};

enum kvt_l2_step {
    KVT_L2_IDLE = 0,
    KVT_L2_DATA, /* seal: records are being synced, before a footer vouches for them; prepare: moved
                    records are, before an old segment is overwritten */
    KVT_L2_WRITE,
    KVT_L2_SYNC,
    KVT_L2_PREPARED /* prepare: the segment is READY */
};

struct kvt_l2_prepare {
    struct kvt_l2_op op;
    struct kvt_segment_header *page;
    uint32_t segment;
    int slot;
    bool recycled;                 /* it held records before */
    struct kvt_l2_active *syncing; /* DATA: what is being made durable; NULL: a SEALED `segment` */
    uint64_t mark;                 /* up to here */
    enum kvt_l2_step step;
    int64_t retry_ns;
};

struct kvt_l2_seal {
    struct kvt_l2_op op;
    struct kvt_trailer *page;
    enum kvt_l2_step step;
};

struct kvt_l2_super {
    struct kvt_l2_op op;
    struct kvt_superblock *page;
    int file;
    enum kvt_l2_step step;
    bool wanted;
    int64_t retry_ns;
    struct kvt_superblock durable; /* what the disk promises */
    struct kvt_superblock next;    /* what the next write will say */
};

enum kvt_l2_flush_step {
    KVT_L2_FLUSH_IDLE = 0,
    KVT_L2_FLUSH_WRITES, /* until every batch accepted before is published */
    KVT_L2_FLUSH_OPEN,   /* the open segment is being synced */
    KVT_L2_FLUSH_SEALS,  /* until the segments closed before are sealed */
    KVT_L2_FLUSH_AGAIN   /* one whose sync had failed is being synced again */
};

struct kvt_l2_flush {
    struct kvt_l2_op op;
    enum kvt_l2_flush_step step;
    int slot;
    struct kvt_l2_active *active;
    uint64_t mark;
    uint64_t writes_target;
    uint64_t seals_target;
    uint32_t cursor; /* AGAIN: over all segments */
    int status;
    void (*done)(void *ctx, int status);
    void *ctx;
};

/* FIFO of writes or reads, linked by next. */
struct kvt_l2_write_list {
    struct kvt_l2_write *head, *tail;
};
struct kvt_l2_read_list {
    struct kvt_l2_read *head, *tail;
};

struct kvt_l2_read_op {
    struct kvt_l2_op op;
    struct kvt_l2_read_list reads; /* in the order of their pages */
    uint32_t count, pages;
    int slot;
    struct kvt_l2_read_op *next_free;
};

struct kvt_l2_erase_range {
    uint32_t segment, page, pages; /* pages 0: forgotten */
};

struct kvt_l2_erase_queue {
    struct kvt_l2_op op; /* the hole, or zeros where punching is not supported */
    struct kvt_l2_erase_range ring[KVT_L2_ERASES];
    uint32_t head, count;
    uint32_t done_pages; /* of the range at head */
    uint32_t holds;      /* nothing is erased while > 0 */
    int slot;
    bool no_punch;
    void *zeros;
};

enum kvt_l2_journal_step {
    KVT_L2_JOURNAL_IDLE = 0,
    KVT_L2_JOURNAL_WRITE,
    KVT_L2_JOURNAL_SYNC,
    KVT_L2_JOURNAL_RENAME, /* a rewrite takes the place of the old file */
    KVT_L2_JOURNAL_SUPER,  /* the superblock learns the new epoch */
    KVT_L2_JOURNAL_REPORT
};

struct kvt_l2_journal {
    struct kvt_l2_op op;
    struct kvt_journal_item *items; /* all that may still matter, in memory */
    uint64_t purging;   /* the lowest value of purges in progress (kvt_l2_purging()); 0: none */
    uint64_t keep_from; /* items of this value and above stay, whatever is on disk; 0: as it is */
    uint32_t count, capacity;
    int file;       /* -1: none */
    uint64_t epoch; /* of the file */
    uint32_t pages; /* in the file */
    uint32_t pages_max;
    bool broken; /* missing, or its end is not certain: rewrite before the next append */
    bool doubt;  /* purges may have been lost: nothing on disk counts until PURGE_ALL is written */
    bool owed;   /* items could not be written: nothing is erased before a rewrite has them */
    int64_t retry_ns; /* of that rewrite */
    enum kvt_l2_journal_step step;
    bool rewriting;
    int next_file; /* of the rewrite */
    uint32_t next_pages;
    struct kvt_journal_page *buffer;
    int status;
    void (*done)(void *ctx, int status);
    void *ctx;
};

/* Reads of one segment out of memory: what is not there is -EAGAIN, and wanted. */
struct kvt_l2_peek {
    struct kvt_io io;
    uint8_t *bytes;
    uint32_t capacity; /* pages */
    uint32_t page, pages;
    uint64_t got; /* bytes of them: fewer where the file ends */
    int status;
    bool wanting;
    uint32_t want_page, want_pages;
    struct kvt_io_req *done;
};

enum kvt_l2_again_step {
    KVT_L2_AGAIN_IDLE = 0,
    KVT_L2_AGAIN_HEADER,
    KVT_L2_AGAIN_TAIL,
    KVT_L2_AGAIN_FOOTER,
    KVT_L2_AGAIN_WALK,
    KVT_L2_AGAIN_VERIFY,
    KVT_L2_AGAIN_TAKE
};

/* Another look at segments that could not be read at open. */
struct kvt_l2_again {
    struct kvt_l2_op op;
    struct kvt_l2_peek peek;
    struct kvt_l2_scan scan;
    enum kvt_l2_again_step step;
    uint8_t *tail;
    uint32_t segment;
    uint64_t generation;
    int slot;
    bool fetching; /* the peek's range is being read */
    bool sealed;   /* found by its footer */
    uint32_t looks, passes, fetches;
    uint32_t at, kept;
    uint32_t items;             /* of the journal, when it was last sorted */
    uint64_t mark, mark_before; /* what a walk has found */
    uint32_t fails;             /* looks in a row that were of no use */
    int64_t due_ns, pause_ns;
};

struct kvt_l2 {
    struct kvt_l2_params params;
    struct kvt_io *io;
    uint8_t root_id[16];
    uint32_t segment_bytes, segment_pages;
    uint32_t segment_count; /* files that may exist */
    uint32_t segment_files; /* that do */
    uint32_t limit;         /* segments[] has this many: numbers may exceed the count */
    struct kvt_l2_segment *segments;
    uint32_t oldest, newest; /* SEALED list */
    uint32_t in_state[KVT_L2_STATES];
    uint32_t drained; /* SEALED ones that are */
    uint64_t generation_next;
    uint64_t sequence_upto; /* in use or promised to the store */
    bool closing;

    struct kvt_l2_file *files; /* descriptors of segments kept open: params.files_max of them */
    uint64_t file_clock;
    struct kvt_l2_op *unsent_head, *unsent_tail;
    uint32_t ops_in_flight;

    struct kvt_l2_active actives[2];
    struct kvt_l2_active *open, *closed; /* into actives[], or NULL */
    struct kvt_l2_batch batches[KVT_L2_WRITES];
    uint32_t batch_head, batch_count; /* ring in append order */
    struct kvt_l2_write_list pending, refused;
    uint64_t writes_accepted, writes_reported;
    struct kvt_l2_prepare prepare;
    struct kvt_l2_seal seal;
    uint64_t seals_started, seals_done;
    uint32_t unsynced; /* segments that are not KVT_L2_SYNCED */

    uint32_t fail_streak, create_fails;
    bool short_told; /* stats.short_bytes has been said in the log */
    int64_t pause_until_ns, pause_ns, create_retry_ns;
    int pause_status;
    int64_t failure_log_ns;
    uint32_t failures_unlogged;

    struct kvt_l2_super super;
    struct kvt_l2_flush flush;
    struct kvt_l2_journal journal;
    struct kvt_l2_read_op *read_ops;
    struct kvt_l2_read_op *read_free;
    struct kvt_l2_read_list read_queue, read_done;
    uint32_t reads_in_flight;
    struct kvt_l2_erase_queue erase;
    struct kvt_l2_again again;
    struct kvt_l2_stats stats;
};

/* l2.c */
void kvt_l2_submit(struct kvt_l2 *l2, struct kvt_l2_op *op);
int64_t kvt_l2_now(const struct kvt_l2 *l2);
int kvt_l2_wait(struct kvt_l2 *l2); /* blocks briefly for a completion: open and close only */
void *kvt_l2_pages_alloc(size_t bytes);

/* l2_segment.c: files, states, preparing */
void kvt_l2_segment_move(struct kvt_l2 *l2, uint32_t segment, enum kvt_l2_state to);
void kvt_l2_segment_renew(struct kvt_l2 *l2, uint32_t segment);  /* to the young end of the list */
void kvt_l2_segment_by_age(struct kvt_l2 *l2, uint32_t segment); /* ahead of younger generations */
void kvt_l2_segment_synced(struct kvt_l2 *l2, uint32_t segment, enum kvt_l2_unsynced state);
/* What a process that died wrote, or moved there, may not be durable: it is synced by the next
 * flush, and before anything old is overwritten. */
void kvt_l2_segment_inherited(struct kvt_l2 *l2, uint32_t segment);
int kvt_l2_file_get(struct kvt_l2 *l2, uint32_t segment, bool create); /* slot, -EAGAIN, -errno */
void kvt_l2_file_put(struct kvt_l2 *l2, int slot);
void kvt_l2_file_forget(struct kvt_l2 *l2, uint32_t segment);
void kvt_l2_files_close(struct kvt_l2 *l2);
int kvt_l2_segment_space(struct kvt_l2 *l2, uint32_t segment, int file);
int kvt_l2_segment_unlink(struct kvt_l2 *l2, uint32_t segment);

/* No room: the file system is full, or the quota of this user is. Both pass when something is
 * deleted, so both are waited out alike. */
static inline bool kvt_l2_full(int64_t status)
{
    return status == -ENOSPC || status == -EDQUOT;
}

/* l2_prepare.c */
void kvt_l2_prepare_pump(struct kvt_l2 *l2, int64_t now);
void kvt_l2_failed(struct kvt_l2 *l2, int status, int64_t now);
void kvt_l2_log_failure(struct kvt_l2 *l2, const char *what, uint32_t segment, int status);
void kvt_l2_worked(struct kvt_l2 *l2);

/* l2_append.c */
void kvt_l2_active_reset(struct kvt_l2_active *active, uint32_t segment, int slot);
void kvt_l2_append_pump(struct kvt_l2 *l2);
bool kvt_l2_append_report(struct kvt_l2 *l2, int64_t now);
void kvt_l2_refuse_pending(struct kvt_l2 *l2, int status);

/* l2_seal.c: sealing and flush */
void kvt_l2_close_open(struct kvt_l2 *l2);
void kvt_l2_seal_pump(struct kvt_l2 *l2);
void kvt_l2_flush_pump(struct kvt_l2 *l2);
/* Write footer and trailer of a recovered segment. Blocks: open only. */
int kvt_l2_seal_now(struct kvt_l2 *l2, uint32_t segment, const struct kvt_l2_active *active);
/* Trailer of `count` entries (whose last page is zero-padded here); returns the footer's page. */
uint32_t kvt_l2_trailer_make(const struct kvt_l2 *l2, uint32_t segment, struct kvt_entry *entries,
                             uint32_t count, struct kvt_trailer *trailer);

/* l2_read.c */
void kvt_l2_read_pump(struct kvt_l2 *l2);
bool kvt_l2_read_report(struct kvt_l2 *l2);
void kvt_l2_erase_pump(struct kvt_l2 *l2);
/* The segment is recycled: what was to be erased there is overwritten in time. */
void kvt_l2_erase_forget(struct kvt_l2 *l2, uint32_t segment);

/* l2_superblock.c */
void kvt_l2_super_pump(struct kvt_l2 *l2, int64_t now);
int kvt_l2_super_write_now(struct kvt_l2 *l2); /* blocks: open and close only */

/* l2_journal.c; l2_purge.c: the set of items */
void kvt_l2_journal_pump(struct kvt_l2 *l2, int64_t now);
bool kvt_l2_journal_purged(const struct kvt_l2 *l2, const struct kvt_entry *entry);
/* Read it, decide what a damaged one means. Blocks: open only. */
int kvt_l2_journal_load(struct kvt_l2 *l2, const struct kvt_l2_survey *survey);
/* Rewrite it when it is missing, damaged, or holds items that no longer matter. Blocks: open. */
int kvt_l2_journal_tidy_now(struct kvt_l2 *l2);

/* Sort, merge and drop items that no entry below `min_live` can need. */
void kvt_l2_purge_merge(struct kvt_l2_journal *journal, uint64_t min_live);
/* Fewer items by purging more than was asked for, so that at most `max` are left. */
void kvt_l2_purge_coarsen(struct kvt_l2_journal *journal, uint32_t max);

/* l2_recover.c */
int kvt_l2_recover(struct kvt_l2 *l2, uint64_t *next_sequence);

/* l2_peek.c */
void kvt_l2_peek_init(struct kvt_l2_peek *peek);
void kvt_l2_peek_forget(struct kvt_l2_peek *peek); /* what was fetched, to read it anew */

/* l2_again.c */
void kvt_l2_again_start(struct kvt_l2 *l2); /* after open */
void kvt_l2_again_pump(struct kvt_l2 *l2, int64_t now);
int64_t kvt_l2_again_next(const struct kvt_l2 *l2); /* when it wants to run; INT64_MAX */
void kvt_l2_again_end(struct kvt_l2 *l2);           /* nothing of it is in flight */

#endif
