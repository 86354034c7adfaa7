/* How long blocks live (store_ttl.c), and how much of a namespace may (store_quota.c).
 * Threads: the store's owner.
 */
#ifndef KVT_STORE_STORE_TTL_H
#define KVT_STORE_STORE_TTL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "io/io.h"
#include "kvtier/layout.h"

struct kvt_full_key;
struct kvt_store;
struct kvt_store_params;

/* Ticks that a time to live is divided into; stamps are the last 16 bits of their number. */
#define KVT_TTL_TICKS 64u
#define KVT_TTL_MARKS 128u

struct kvt_ttl_clock { /* of one time to live; unit_ns 0: blocks live for ever */
    struct kvt_ttl_clock *next;
    int64_t ttl_ns, unit_ns; /* unit: of a tick */
    uint64_t tick;
    uint64_t marks[KVT_TTL_MARKS]; /* by tick: sequences below were given out before it */
    uint64_t pass_tick;            /* when the last pass began */
    uint64_t floor;                /* journaled: sequences below it do not come back */
    uint64_t due;                  /* floor that covers all that has expired so far */
    uint8_t ns[KVT_NS_BYTES];      /* whose it is; not the store's */
};

#define KVT_TTL_FILE_MARKS 250u

struct kvt_ttl_mark { /* records of sequences below were stored before that time */
    uint64_t sequence;
    int64_t wall_ns;
};

struct kvt_ttl_marks { /* of a root: store_marks.c. buffer NULL: not in use */
    struct kvt_io *io;
    void *buffer;  /* a page on its way */
    uint64_t turn; /* of the page that was written last */
    uint32_t count;
    bool there;         /* there was a file, damaged or not */
    bool going;         /* and a journal that wants to be written waits for that */
    int *again;         /* the store is to run again */
    int64_t written_ns; /* the last one, by the system's time */
    uint64_t written_sequence;
    bool unnamed; /* the file is new: a power failure may take its name */
    struct kvt_io_req req;
    struct kvt_ttl_mark marks[KVT_TTL_FILE_MARKS]; /* sequences and times rise */
};

struct kvt_store_ttl { /* store_ttl.c; stamps NULL: blocks live for ever */
    uint16_t *stamps;  /* by entry: the tick of its last use, by its namespace's clock */
    uint32_t capacity;
    uint32_t *born; /* by entry: of an earlier life, and not used in this one: its age at the
                       start, in 16ths of a second, + 1; else 0 */
    uint32_t born_capacity;
    int64_t open_ns;             /* the store's start, by its clock */
    int64_t wall_ns, wall_at_ns; /* the latest of kvt_ttl_wall(), and when that was */
    int64_t now_ns;              /* the latest time seen */
    int64_t tick_ns;             /* when the next tick of any clock is */
    int64_t pass_ns;             /* when the next pass is due */
    int64_t pass_every_ns;       /* a sixteenth of the shortest time to live */
    bool owes;                   /* something may have to be journaled as gone */
    uint32_t cursor;             /* of the pass */
    struct kvt_ttl_clock store;  /* of namespaces that have none of their own */
    struct kvt_ttl_clock *own;   /* those that have */
};

struct kvt_quota_link { /* of an entry, in the ring of its namespace */
    uint32_t after, before;
};

struct kvt_store_quota { /* store_quota.c; links NULL: nobody has a quota */
    struct kvt_quota_link *links;
    uint32_t capacity;
    bool said; /* a namespace has had one of its own */
};

/* ---- store_ttl.c: time to live */
__attribute__((warn_unused_result)) int kvt_ttl_init(struct kvt_store *store);
void kvt_ttl_destroy(struct kvt_store *store);
/* As many stamps as the index has entries. */
__attribute__((warn_unused_result)) int kvt_ttl_grow(struct kvt_store *store);
void kvt_ttl_touch(struct kvt_store *store, uint32_t entry);
/* The entry of a key, or NONE: one that has expired is gone. */
uint32_t kvt_ttl_find(struct kvt_store *store, const struct kvt_full_key *key);
/* The entry itself, or NONE when it has expired: it is gone then. */
uint32_t kvt_ttl_alive(struct kvt_store *store, uint32_t entry);
/* What a namespace says of itself: 0 nothing, INT64_MAX that the store's holds; never longer than
 * that. 0, -ENOMEM. */
__attribute__((warn_unused_result)) int kvt_ttl_of(struct kvt_store *store, uint32_t ns,
                                                   int64_t ttl_ns);
/* What programs and the operator say of a namespace holds from now on. 0, -ENOMEM. */
__attribute__((warn_unused_result)) int kvt_ttl_apply(struct kvt_store *store, uint32_t ns);
/* Some of it has expired, and the disks have not heard of it yet. */
bool kvt_ttl_waits(const struct kvt_store *store, uint32_t ns);
/* The number `ns` is given back; the last of its namespace takes its clock with it. */
void kvt_ttl_forget(struct kvt_store *store, uint32_t ns);
/* Time passes: before each message and in each run. Returns the next time to run. */
int64_t kvt_ttl_run(struct kvt_store *store);
void kvt_ttl_tick(struct kvt_store *store);
/* Something that has expired is still to be journaled. */
bool kvt_ttl_owes(const struct kvt_store *store);

/* Before anything is found. A record that was found in a root of these marks is this entry. */
void kvt_ttl_open(struct kvt_store *store);
void kvt_ttl_found(struct kvt_store *store, uint32_t entry, const struct kvt_ttl_marks *marks,
                   uint64_t sequence);
/* The system's time; goes on as the store's does at least. */
int64_t kvt_ttl_wall(struct kvt_store *store);
/* The operator has said some time to live. */
bool kvt_ttl_wanted(const struct kvt_store_params *params);

/* ---- store_marks.c: how old what a restart finds is */
/* Read a root's marks, before its log is opened; blocks. The log is open: a mark of that, with the
 * next sequence; blocks. wanted: also where there is no file. */
void kvt_ttl_marks_read(struct kvt_ttl_marks *m, struct kvt_io *io,
                        const struct kvt_store_params *params);
void kvt_ttl_marks_begin(struct kvt_ttl_marks *m, const struct kvt_store_params *params,
                         uint64_t sequence, bool wanted);
/* Time for a mark: it is written by and by. pass: once more, also where the last one is young. */
void kvt_ttl_marks_note(struct kvt_store *store, uint32_t root, bool pass);
/* The log has closed: nothing is on its way any more. The last one, after that; both block. */
void kvt_ttl_marks_wait(struct kvt_ttl_marks *m);
void kvt_ttl_marks_close(struct kvt_store *store, struct kvt_ttl_marks *m, bool last);
void kvt_ttl_mark_add(struct kvt_ttl_marks *m, uint64_t sequence, int64_t wall_ns);
/* When a record of this sequence was stored, or some time before; INT64_MAX: not known. */
int64_t kvt_ttl_mark_of(const struct kvt_ttl_marks *m, uint64_t sequence);

/* ---- store_quota.c: bytes of a namespace */
/* What a namespace says of itself: 0 nothing, INT64_MAX that the others hold. 0, -ENOMEM. */
__attribute__((warn_unused_result)) int kvt_quota_of(struct kvt_store *store, uint32_t ns,
                                                     uint64_t bytes);
/* What the operator says of a namespace, quota and time to live; of all that are known. A label is
 * looked at once the namespace has been opened. 0, -ENOMEM. */
__attribute__((warn_unused_result)) int kvt_rules_apply(struct kvt_store *store, uint32_t ns);
__attribute__((warn_unused_result)) int kvt_rules_apply_all(struct kvt_store *store);
void kvt_quota_destroy(struct kvt_store *store);
/* As many links as the index has entries. */
__attribute__((warn_unused_result)) int kvt_quota_grow(struct kvt_store *store);
/* An entry has come, with its namespace; is about to be removed. */
void kvt_quota_enter(struct kvt_store *store, uint32_t entry);
void kvt_quota_leave(struct kvt_store *store, uint32_t entry);
__attribute__((warn_unused_result)) int kvt_quota_check(const struct kvt_store *store, char *why,
                                                        size_t why_len);
/* Make room for a record in its namespace, by giving up others of it; keep: not this entry. */
bool kvt_quota_room(struct kvt_store *store, uint32_t ns, uint32_t bytes, uint32_t keep);

#endif
