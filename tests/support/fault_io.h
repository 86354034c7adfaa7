/* An I/O backend that lies: wraps any other and makes chosen operations go wrong.
 *
 * Goal:  every reaction of the store to a bad drive can be provoked at will, one operation at a
 * time. Use:   fault_io_new() over a mem or posix instance (owned from then on); fault_io_rule() as
 * often as needed; drive the store; read the counts. Rules are tried in the order in which they
 * were added, the first that fires wins. Threads: the owner of the instance; rules may be added and
 * cleared by another.
 *
 * The fault budget: what this can do to the store, and what must hold all the same.
 *
 *   honest (an operation that was not done says so; no byte that was durable changes)
 *     any operation fails, with any errno, once, for a while, for ever, at the N-th
 *     data: the queue is full; short reads; a completion is late, all of them stall, one never
 * comes
 *     => exact or miss; what a flush or a purge acknowledged holds after any crash
 *   power loss (power_io.h, below this): any part of what no sync has covered
 *     => as honest
 *   lying (reported as done)
 *     a write is lost, torn at 512 B or at pages, lands elsewhere, has a wrong bit
 *     a read has a wrong bit, comes from elsewhere, brings what was there before (stale)
 *     a sync is lost
 *     => exact or miss; nothing else is promised of what the lie was about
 *
 * Not in the budget: names that change, files that grow or appear by themselves, locks that lie.
 */
#ifndef KVT_TESTS_FAULT_IO_H
#define KVT_TESTS_FAULT_IO_H

#include "base/clock.h"
#include "io/io.h"

/* Operations, as bits of a rule's mask. */
enum fault_op {
    FAULT_READ = 1,
    FAULT_WRITE = 2,
    FAULT_SYNC = 4,
    FAULT_DATA = 7,
    FAULT_OPEN = 8,
    FAULT_ALLOCATE = 16,
    FAULT_TRUNCATE = 32,
    FAULT_PUNCH = 64,
    FAULT_UNLINK = 128,
    FAULT_RENAME = 256,
    FAULT_SYNC_DIR = 512,
    FAULT_LIST = 1024,
    FAULT_CONTROL = 2040,
    FAULT_ALL = 2047
};

enum fault_action {
    FAULT_FAIL = 1, /* not done; result is -error */
    FAULT_SHORT,    /* read: `arg` pages fewer than asked for, as at an end of file */
    FAULT_FLIP,     /* bit `arg` of the bytes read or written is flipped (FAULT_RANDOM: any one) */
    FAULT_LOST,     /* write: reported done, never made; sync: reported done, not passed on */
    FAULT_TORN,     /* write: only the first `arg` sectors of 512 B reach the file, the rest of that
                       page is zeros; punch: only the whole pages among them; reported done, or
                       -error when error is set */
    FAULT_MISDIRECT, /* write: lands `arg` pages further on, read: comes from there; reported done
                      */
    FAULT_BUSY,      /* data: submit() refuses it, as with a full queue */
    FAULT_STALE,     /* read: brings what fault_io_remember() saw */
    FAULT_LATE,      /* data: done, but reported `arg` ns later (of fault_io_clock()) */
    FAULT_STALL,     /* data: so is everything from now on for `arg` ns */
    FAULT_NEVER /* data: done, but not reported until the plug is pulled or rules are cleared */
};
#define FAULT_RANDOM UINT64_MAX

struct fault_rule {
    unsigned ops;     /* enum fault_op, or'ed */
    const char *name; /* only files whose names begin so; NULL: all. Borrowed. */
    uint64_t skip;    /* matching operations that pass first */
    uint64_t times;   /* how often it fires; 0: for ever (sticky) */
    int action;       /* enum fault_action */
    int error;        /* positive errno of FAULT_FAIL, FAULT_TORN */
    uint64_t arg;
    /* out */
    uint64_t seen, fired;
};

#define FAULT_RULES_MAX 16

/* Wrap `inner`; seed for FAULT_RANDOM. NULL without memory. destroy() also destroys inner. */
struct kvt_io *fault_io_new(struct kvt_io *inner, uint64_t seed);
struct kvt_io *fault_io_inner(struct kvt_io *io);

/* Add a rule (copied). Its number; -1 when there are FAULT_RULES_MAX. Clear forgets all of them. */
int fault_io_rule(struct kvt_io *io, const struct fault_rule *rule);
const struct fault_rule *fault_io_rule_state(const struct kvt_io *io, int rule);
void fault_io_clear(struct kvt_io *io);

/* Everything fails with -EIO from now on: the drive is gone. What was done stays in inner. What is
 * late, stalled or held back comes at once. */
void fault_io_pull_the_plug(struct kvt_io *io);
void fault_io_plug_in(struct kvt_io *io); /* again, with nothing in flight */

/* Time, for what is late; and how long every data operation takes, at least and at most. */
void fault_io_clock(struct kvt_io *io, struct kvt_clock clock);
void fault_io_latency(struct kvt_io *io, int64_t min_ns, int64_t max_ns);
/* When the next late completion is due; INT64_MAX: none is. */
int64_t fault_io_next(const struct kvt_io *io);
/* Take a picture of the files for FAULT_STALE; memory: where they are, a memory backend (inner, or
 * what is below it). */
void fault_io_remember(struct kvt_io *io, const struct kvt_io *memory);
/* Reads to which FAULT_STALE has brought other bytes than are there now. */
uint64_t fault_io_stale_reads(const struct kvt_io *io);

/* Hold completions back: operations run, nothing is reaped until released. */
void fault_io_hold(struct kvt_io *io, int on);
/* How many are held back. */
unsigned fault_io_held(struct kvt_io *io);
/* Let up to `count` held completions go; newest first when backwards. Returns how many went. */
unsigned fault_io_release(struct kvt_io *io, unsigned count, int backwards);

/* Operations of the mask so far (data operations count when submitted). */
uint64_t fault_io_count(const struct kvt_io *io, unsigned ops);

/* Damage what is stored: flip one bit of a file. No request may be in flight. 0, -errno. */
int fault_io_corrupt(struct kvt_io *io, const char *name, uint64_t byte, unsigned bit);

#endif
