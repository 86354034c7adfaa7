/* Which block leaves DRAM next: the one that was not asked for for the longest time, where each hit
 * before counts as a bit less time; a chain from its end.
 *
 * Time is what has entered the cache: an epoch is a 32nd of the region. A block is due at the epoch
 * of its last use plus a credit for each of its hits (three at most), and stands in the bucket of
 * that epoch; the oldest bucket gives first.
 *
 * Rules
 *  1. Only blocks that may leave now stand in a bucket: VALID in the cache region, not pinned, not
 *     waiting for the disk, no child in DRAM or being filled. The others are parked: they keep when
 *     they are due and come back when the reason ends (kvt_policy_settle()). So choosing a victim
 *     never scans past blocks that cannot leave, and a chain goes from its end to its start.
 *  2. A parent whose last child has left comes back at the old end of its bucket.
 *  3. The last block of a prompt, as long as nothing continues it and nobody has asked for it, goes
 *     first: it is where the next prompt of a conversation differs most often, and as a leaf it is
 *     the cheapest to lose.
 *  4. Blocks that left are remembered for a turn of the region, with their hits (ghosts). When
 *     those with hits come back far more often than those without, hits were given too little
 *     credit, and it rises, up to twice the region; else it sinks to an eighth. So a stream of
 *     prompts that are never asked for again does not wash out what is.
 *  5. The block that has just come is not the one to go, when there is another.
 * Threads: the store's owner. Allocates in init only. Every call is O(1), or amortised so.
 */
#ifndef KVT_STORE_POLICY_H
#define KVT_STORE_POLICY_H

#include "store/index.h"
#include "store/slots.h"

#define KVT_POLICY_BUCKETS 512u
#define KVT_POLICY_EPOCHS 32u /* that the region turns over in */

struct kvt_policy {
    struct kvt_slots *slots;
    struct kvt_index *index;
    struct kvt_slot_list buckets[KVT_POLICY_BUCKETS]; /* by due epoch, modulo */
    uint32_t lowest;                                  /* no block is due before; its bucket gives */
    uint32_t epoch;
    uint32_t epoch_pages;           /* pages that make an epoch */
    uint32_t pages_entered;         /* in this epoch */
    uint32_t queued;                /* blocks in buckets */
    uint32_t newest;                /* slot that entered last; KVT_SLOT_NONE */
    uint32_t credit;                /* for each hit, in 256ths of an epoch */
    uint32_t left_since;            /* pages that left since credit was looked at */
    uint32_t left[2], came_back[2]; /* of late, without and with hits, in 16ths */
    uint64_t *ghosts;               /* tag << 32 | hits << 30 | epoch of leaving */
    uint32_t ghost_mask;
};

__attribute__((warn_unused_result)) int kvt_policy_init(struct kvt_policy *policy,
                                                        struct kvt_slots *slots,
                                                        struct kvt_index *index,
                                                        uint64_t region_bytes);
void kvt_policy_destroy(struct kvt_policy *policy);

/* A block has become VALID in the cache region / ceases to be. */
void kvt_policy_enter(struct kvt_policy *policy, uint32_t slot);
void kvt_policy_leave(struct kvt_policy *policy, uint32_t slot);

/* Something that decides whether the slot may leave has changed: queue it or park it.
 * at_tail: rule 2. Slots outside the cache region are ignored. */
void kvt_policy_settle(struct kvt_policy *policy, uint32_t slot, bool at_tail);

/* Out of its bucket, whatever may be: its links are needed elsewhere. */
void kvt_policy_park(struct kvt_policy *policy, uint32_t slot);

/* The block was asked for. */
void kvt_policy_hit(struct kvt_policy *policy, uint32_t entry);

/* The next to go; it stays where it is until the caller removes it. KVT_SLOT_NONE: none may. */
uint32_t kvt_policy_victim(struct kvt_policy *policy);
/* The slot evicted now was the policy's choice, or stood beside it: what is learnt from it. Before
 * kvt_policy_leave(). */
void kvt_policy_evicted(struct kvt_policy *policy, uint32_t slot);

/* The epoch in which a cached slot is due: of its bucket, or what it would have if it could leave.
 */
uint32_t kvt_policy_due(const struct kvt_policy *policy, uint32_t slot);

/* The blocks in the order in which they would leave: the first one, and the one after a slot that
 * is queued. KVT_SLOT_NONE: no more. */
uint32_t kvt_policy_first(const struct kvt_policy *policy);
uint32_t kvt_policy_after(const struct kvt_policy *policy, uint32_t slot);

__attribute__((warn_unused_result)) int kvt_policy_check(const struct kvt_policy *policy, char *why,
                                                         size_t why_len);

#endif
