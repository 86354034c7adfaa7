/* Which segment of a root goes next and what of it stays (store_recycle.c), and the moves of that
 * before it goes (store_reinsert.c).
 * Threads: the store's owner.
 */
#ifndef KVT_STORE_STORE_RECYCLE_H
#define KVT_STORE_STORE_RECYCLE_H

#include <stdbool.h>

#include "store/l2.h"

struct kvt_store;
struct kvt_store_disk;

/* ---- store_recycle.c: which segment goes next, and what of it stays */
struct kvt_recycle {
    uint32_t segment;
    bool clean; /* enough of it is of no use: the rest is kept whole; else what was asked for is */
};
/* The time of a root's log, in 64ths of a turn or single segments, modulo 256. */
uint8_t kvt_recycle_tick(const struct kvt_store_disk *disk);
/* Whether what is asked for now in the segment counts when its turn comes. */
bool kvt_recycle_late(const struct kvt_store_disk *disk, uint32_t segment);
/* Whether DRAM and disk hold a block once: then copies of what stays in DRAM are given up. */
bool kvt_recycle_once(const struct kvt_store *store);
/* The segment of which least is of use, if that is little: else KVT_L2_SEGMENT_NONE. */
uint32_t kvt_recycle_emptiest(const struct kvt_store_disk *disk);
/* false: none may go. */
bool kvt_recycle_choose(struct kvt_store_disk *disk, struct kvt_recycle *out);
/* Give up the copies in a segment that DRAM makes superfluous. */
void kvt_recycle_begin(struct kvt_store_disk *disk, const struct kvt_recycle *recycle);
/* Whether a record of it is worth another place in the log. */
bool kvt_recycle_keeps(const struct kvt_store_disk *disk, const struct kvt_recycle *recycle,
                       uint32_t entry);

/* ---- store_reinsert.c */
__attribute__((warn_unused_result)) int kvt_drain_init(struct kvt_store_disk *disk);
void kvt_drain_destroy(struct kvt_store_disk *disk);
/* Records may be that long now. */
__attribute__((warn_unused_result)) int kvt_drains_grow(struct kvt_store *store,
                                                        uint32_t record_bytes);
void kvt_drains_run(struct kvt_store *store);
/* The log takes the segment; the record there is purged: by a purge that is in the journal, since
 * the bytes of what has been moved meanwhile are overwritten. */
void kvt_drain_lost(struct kvt_store_disk *disk, uint32_t segment);
void kvt_drain_purged(struct kvt_store_disk *disk, struct kvt_l2_where where);

#endif
