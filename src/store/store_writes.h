/* Writes inside the store: queue and batches (store_write.c), what is not on disk yet
 * (store_later.c), what is worth it (store_admit.c), FLUSH (store_flush.c).
 * Threads: the store's owner.
 */
#ifndef KVT_STORE_STORE_WRITES_H
#define KVT_STORE_STORE_WRITES_H

#include <stdbool.h>

#include "store/l2.h"
#include "store/slots.h"
#include "store/store.h"

struct kvt_store_disk;

struct kvt_store_write {
    struct kvt_l2_write write;
    struct kvt_store *store;
    struct kvt_store_write *next; /* free list, erase list */
    uint32_t slot;
    uint32_t root;
    uint32_t ticket;
    uint8_t busy;
    uint8_t batch; /* of its root */
};

struct kvt_store_flush {
    struct kvt_store *store;
    uint64_t cookie;
    uint32_t client;
    uint32_t ticket; /* everything queued up to it must be done */
    uint32_t syncs;  /* roots still to sync */
    int status;
    uint8_t state; /* 0 free, 1 waits for writes, 2 waits for syncs */
    uint8_t asked[KVT_STORE_ROOTS_MAX];
};

/* A pass over the blocks that leave next, to write them ahead (store_later.c). */
struct kvt_ahead {
    uint32_t at, at_life;     /* the slot to look at; KVT_SLOT_NONE: no pass is under way */
    uint32_t next, next_life; /* the end of the chain after this one */
    uint64_t seen_bytes;
    uint32_t base;    /* when the first of them is due */
    uint32_t reach;   /* epochs from there on that hold what is looked at, as far as is known */
    uint32_t far;     /* of them, those that were needed so far */
    bool cut;         /* there is more beyond */
    uint32_t unsaved; /* of the store, and its evictions, when the last pass ended */
    uint64_t evicted;
};

/* ---- store_write.c */
__attribute__((warn_unused_result)) int kvt_writes_add_root(struct kvt_store *store,
                                                            struct kvt_store_disk *disk);
/* Queue a block for the disk. false: there is no room, it is DROPPED. */
bool kvt_writes_queue(struct kvt_store *store, uint32_t slot, bool beyond_bound);
/* Whether the queue takes it now, and it is of use to try. */
bool kvt_writes_room(const struct kvt_store *store, uint32_t slot);
void kvt_writes_unqueue(struct kvt_store *store, uint32_t slot);
int64_t kvt_writes_run(struct kvt_store *store);

/* ---- store_later.c: blocks that are not on disk */
/* The one place where a slot's write state changes. */
void kvt_write_move(struct kvt_store *store, uint32_t slot, enum kvt_slot_write to);
bool kvt_write_unsaved(const struct kvt_store *store, uint32_t slot);
/* What was on disk is not any more: it is written again when it leaves the cache region. */
void kvt_write_again(struct kvt_store *store, uint32_t slot);
/* A block has been committed: queue it, put it off, or note that it was dropped. */
void kvt_writes_commit(struct kvt_store *store, uint32_t slot);
/* Everything that has no copy on disk is queued, whatever the bound. */
void kvt_writes_queue_unsaved(struct kvt_store *store);
/* A block is about to be evicted: write it rather. false: let it go. tries: of this request. */
bool kvt_writes_save(struct kvt_store *store, uint32_t slot, int *tries);
/* There was nothing else to evict: take the block that was saved last out of the queue again and
 * return it; KVT_SLOT_NONE: none was. */
uint32_t kvt_writes_unsave(struct kvt_store *store, uint32_t slot);
/* A block, or all that are left at close, go unwritten: counted by reason. */
void kvt_writes_lost(struct kvt_store *store, uint32_t slot);
void kvt_writes_lost_all(struct kvt_store *store);
int64_t kvt_later_run(struct kvt_store *store);
/* One request has taken that much room: as much is to be had without waiting for the next one. */
void kvt_later_burst(struct kvt_store *store, uint64_t bytes);

/* ---- store_admit.c: which blocks are written */
__attribute__((warn_unused_result)) int kvt_admit_init(struct kvt_store *store);
/* A root's bucket begins with what was left in an earlier life, where that is known. */
void kvt_admit_root_left(struct kvt_store *store, uint32_t number,
                         const struct kvt_store_root *root);
/* At close, while the logs are open: hand over what outlives the process. */
void kvt_admit_keep(struct kvt_store *store);
/* A block was used. One that admission had not taken is asked about again. */
void kvt_admit_use(struct kvt_store *store, uint32_t entry);
/* The same for a block that has just been committed. */
void kvt_admit_first(struct kvt_store *store, uint32_t slot);
/* May an unsaved block be written? false: it is FILTERED now, and counted. */
bool kvt_admit_ask(struct kvt_store *store, uint32_t slot);
/* The entry has a child now: it is the last of its prompt no longer. */
void kvt_admit_continued(struct kvt_store *store, uint32_t entry);
/* What the roots have written since. */
void kvt_admit_run(struct kvt_store *store);

/* ---- store_flush.c */
void kvt_flushes_run(struct kvt_store *store);
bool kvt_flushes_waiting(const struct kvt_store *store); /* for writes: batches go out at once */
void kvt_flushes_end_all(struct kvt_store *store, int status);
void kvt_flushes_note(struct kvt_store *store, uint32_t ticket, int status);

#endif
