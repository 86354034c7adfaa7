/* L2: one root directory as a log of segments. Appends batches of records, reads records back,
 * recycles the oldest segments, recovers at open. Knows locations, not keys: the index is the
 * store's.
 *
 * Rules
 *  1. Records are reported (done callbacks) in append order. A failed batch ends its segment and
 * all its records are reported failed; a batch already in flight behind it has its own outcome.
 *  2. A location names (segment, page) of one generation: a read that was accepted before its
 *     segment was recycled either returns the old bytes or an error, never the new ones: segments
 *     with reads in flight are not recycled.
 *  3. The byte cap holds at every moment: all files of the root together.
 *  4. Two writes in flight at most. No fsync on the data path; fdatasync at seal, flush and close.
 *  5. ENOSPC (and EDQUOT) fails the batch, is counted by the caller, and is tried again with the
 * next batch after a pause; it never stops reads.
 *  6. The store chooses which segment is recycled next, and may move records out of it before
 *     (kvt_l2_recyclable(), write.moved, kvt_l2_drained()): the log waits for that unless writes
 *     wait for a segment, and makes moved records durable before it overwrites any old segment.
 *     Without a choice the oldest goes first.
 *  7. Callbacks are called from kvt_l2_run() and kvt_l2_close() only, never from the call that
 * queues the work. A callback may queue more work, but not run or close the log. Threads: the
 * store's owner thread only. Allocates at open; not on the data path.
 */
#ifndef KVT_STORE_L2_H
#define KVT_STORE_L2_H

#include <stdbool.h>

#include "base/clock.h"
#include "base/log.h"
#include "format/disk.h"
#include "io/io.h"

struct kvt_l2;

struct kvt_l2_where {
    uint32_t segment;
    uint32_t page;
};

/* One record to append. Owned by the caller from append() until done() is called. */
struct kvt_l2_write {
    const void *record;     /* 4 KiB aligned, immutable until done */
    struct kvt_entry entry; /* key, parent, sequence, checksum, first_pos, map, pages; page is set
                               by append() */
    void (*done)(struct kvt_l2_write *write); /* status and where are set */
    void *user;
    bool moved;                /* a copy of a record whose segment is about to be recycled */
    int status;                /* 0, or why it is not on disk: -EIO, KVT_E_NO_SPACE, ... */
    struct kvt_l2_where where; /* valid when status is 0 */
    struct kvt_l2_write *next; /* the log's, while it owns the write */
};

/* One record (or several adjacent ones) to read. Owned by the caller until done(). Reads that are
 * queued between two runs and lie side by side on disk become one request; each has its own outcome
 * all the same. */
struct kvt_l2_read {
    struct kvt_l2_where where;
    uint32_t pages;
    void *dst; /* 4 KiB aligned */
    void (*done)(struct kvt_l2_read *read);
    void *user;
    int status;
    struct kvt_l2_read *next;
    bool raw;   /* any pages of the segment: footer and trailer too */
    bool alone; /* the log's: not merged with others, because that has failed */
};

#define KVT_L2_FILES_MIN 16u
#define KVT_L2_FILES_MAX 120u

struct kvt_l2_params {
    struct kvt_io *io; /* locked by the caller; borrowed until close */
    const char *name;  /* of the root, in messages; NULL: none. Borrowed until close */
    uint64_t cap_bytes;
    uint64_t seed; /* for root_id of a new root */
    struct kvt_clock clock;
    struct kvt_log log;
    uint32_t batch_bytes_max; /* 16 MiB; one append request is cut at this */
    uint32_t reads_max;       /* reads in flight; more are queued */
    uint32_t files_max;       /* segments open at a time: 16 (also for 0) to 120; others are closed
                                 and opened as needed */
    int drains;               /* the user moves records out of segments: rule 6 */
    int read_only;            /* fsck, stat: recover and visit, write nothing */

    /* Recovery: every entry found, in no particular order. Same key twice: the higher sequence
     * wins; equal sequences: the higher generation. Purged entries have been left out. */
    void (*found)(void *ctx, const struct kvt_entry *entry, uint32_t segment, uint64_t generation);
    /* Before segment is recycled: drop every location in it. Called for a segment without reads in
     * flight. */
    void (*evicted)(void *ctx, uint32_t segment);
    /* Asked before recycling: false while a pinned block lives there (the next oldest is taken). */
    bool (*may_evict)(void *ctx, uint32_t segment);
    /* Optional: which one is taken when none is drained and writes wait. */
    uint32_t (*choose)(void *ctx);
    /* Optional, all three or none: segments that could not be read at open are looked at again in
     * the background, one at a time, for as long as there are any. Of one that can be read: room()
     * says whether so many records may be taken in now (false: asked again soon); found_again() for
     * each that no purge covers; then again_over(). */
    bool (*room)(void *ctx, uint32_t records);
    void (*found_again)(void *ctx, const struct kvt_entry *entry, uint32_t segment);
    void (*again_over)(void *ctx);
    void *ctx;
};

/* What is in this directory, before anything (even the lock) is written to it: 0 a root of ours;
 * 1 nothing: a root may be made here; KVT_E_NOT_OURS; KVT_E_NEWER; -errno. Reads only. */
int kvt_l2_probe(struct kvt_io *io);

/* Create or recover a root. Blocks. *next_sequence: no record on disk holds this or more; the
 * store's counter starts at the maximum over its roots.
 * 0; KVT_E_NOT_OURS files that are not ours and no sign of a store; KVT_E_NEWER; KVT_E_TOO_SMALL
 * the cap is under the minimum of 8 segments of 1 MiB; KVT_E_READ_ONLY; -errno; -ENOMEM.
 * Nothing is deleted or changed before all checks have passed. */
int kvt_l2_open(const struct kvt_l2_params *params, struct kvt_l2 **out, uint64_t *next_sequence);

/* Finish writes in flight, seal or leave the open segment walkable, sync, write the superblock,
 * free. Blocks (drives the io itself); done callbacks are called. */
void kvt_l2_close(struct kvt_l2 *l2);

/* The callbacks get this context from now on. */
void kvt_l2_set_ctx(struct kvt_l2 *l2, void *ctx);

/* Segments that could not be read may still come back soon, with parents of what is here. */
bool kvt_l2_may_return(const struct kvt_l2 *l2);

uint32_t kvt_l2_segment_bytes(const struct kvt_l2 *l2);
/* Every segment number in a location or callback is below this; constant while open. */
uint32_t kvt_l2_segment_limit(const struct kvt_l2 *l2);
/* Largest record that this root accepts: a segment holds at least 4 of them. */
uint32_t kvt_l2_record_bytes_max(const struct kvt_l2 *l2);
/* The root's name in messages; never NULL. */
const char *kvt_l2_name(const struct kvt_l2 *l2);
/* The least cap of a new root whose segments hold records of that length, when those of the least
 * size do not; 0: no cap's do. */
uint64_t kvt_l2_cap_for(uint32_t record_bytes);

/* Reserve sequences up to `upto`: the superblock on disk promises more than any sequence in use.
 * The store calls it ahead of need; asynchronous, cheap when nothing is to do. */
void kvt_l2_reserve_sequence(struct kvt_l2 *l2, uint64_t upto);

/* Append a list of records (linked by next), which become one batch, or several. Never blocks.
 * 0 accepted; -EAGAIN two writes are in flight: call again after progress; nothing is taken. */
int kvt_l2_append(struct kvt_l2 *l2, struct kvt_l2_write *list);
bool kvt_l2_can_append(const struct kvt_l2 *l2);
/* Writes have failed repeatedly and are not tried for the moment: what is appended is refused. */
bool kvt_l2_paused(const struct kvt_l2 *l2);

#define KVT_L2_SEGMENT_NONE UINT32_MAX
/* Fewer than two segments are at hand for new records: one should be drained. Cheap. */
bool kvt_l2_drain_wanted(const struct kvt_l2 *l2);
/* Segments that may be recycled and are not drained yet, oldest first: the one after `after`, or
 * the first for KVT_L2_SEGMENT_NONE, which is also the answer when there is none. */
uint32_t kvt_l2_recyclable(const struct kvt_l2 *l2, uint32_t after);
/* Such a segment is worth keeping as it is: it counts as the newest one from now on. */
void kvt_l2_renew(struct kvt_l2 *l2, uint32_t segment);
/* Everything that is worth it has been moved out of the segment; until it is recycled, the rest can
 * still be read. */
void kvt_l2_drained(struct kvt_l2 *l2, uint32_t segment);

/* Queue a read; the next run starts it. Never refuses. */
void kvt_l2_read(struct kvt_l2 *l2, struct kvt_l2_read *read);

/* Keep a record's segment from being recycled while somebody else reads it there. 0; KVT_E_STALE it
 * is being recycled; KVT_E_CLOSED; KVT_E_INVAL. unhold: once for each. Holds left at close are
 * void.
 */
int kvt_l2_hold(struct kvt_l2 *l2, struct kvt_l2_where where, uint32_t pages);
void kvt_l2_unhold(struct kvt_l2 *l2, struct kvt_l2_where where);

/* Write a list of journal items, fdatasync, then done(ctx, status). One at a time: -EAGAIN. */
int kvt_l2_journal(struct kvt_l2 *l2, const struct kvt_journal_item *items, uint32_t count,
                   void (*done)(void *ctx, int status), void *ctx);

/* Two journals are open at present. */
bool kvt_l2_journal_rewrites(const struct kvt_l2 *l2);
/* The lowest value of the items of purges that are in progress, for the next kvt_l2_journal():
 * blocks that they purge may still be appended, so their items are kept even when nothing on disk
 * is that old. 0: of none but those that are journaled. */
void kvt_l2_purging(struct kvt_l2 *l2, uint64_t from);

/* Overwrite the bytes of a purged record (punch or zeros), best effort, in the background. */
void kvt_l2_erase(struct kvt_l2 *l2, struct kvt_l2_where where, uint32_t pages);
/* Nothing is erased while anybody holds: what is queued waits for the journal page that explains
 * why its bytes are gone. Holds are counted; those left at close leave the bytes as they are. While
 * a journal page could not be written nothing is erased either: that is tried again every second.
 */
void kvt_l2_erase_hold(struct kvt_l2 *l2, bool on);
/* A good time to queue more of them. */
bool kvt_l2_erase_room(const struct kvt_l2 *l2);

/* fdatasync everything appended so far (and published), then done(ctx, status). */
int kvt_l2_flush(struct kvt_l2 *l2, void (*done)(void *ctx, int status), void *ctx);

/* Handle I/O completions and timers; calls done callbacks. Returns the next time (clock ns) at
 * which it wants to run, or INT64_MAX. */
int64_t kvt_l2_run(struct kvt_l2 *l2);

struct kvt_l2_stats {
    uint64_t bytes_used;    /* all files of the root, as allocated by us */
    uint64_t bytes_written; /* since open */
    uint64_t bytes_read;
    uint64_t segments_live;
    uint64_t segments_recycled;
    uint64_t recovered_bad;
    uint64_t segments_unread; /* kept aside: they could not be read at open, nor since */
    uint64_t enospc;
    uint64_t short_bytes; /* of the cap, that the file system had no room for */
    uint64_t writes_in_flight;
    uint64_t reads_in_flight;
    int failing;            /* why writes fail: 0 once one has worked again */
    uint64_t erases_queued; /* purged ranges whose bytes have not been overwritten yet */
};
void kvt_l2_stats(const struct kvt_l2 *l2, struct kvt_l2_stats *stats);

#endif
