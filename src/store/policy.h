/* Which block leaves DRAM next: S3-FIFO, leaf first.
 *
 * Rules
 *  1. Only blocks that may leave now stand in a queue: VALID in the cache region, not pinned, not
 *     waiting for the disk, no child in DRAM or being filled. The others are parked: they keep
 * their class and come back when the reason ends (kvt_policy_settle()). So choosing a victim never
 * scans past blocks that cannot leave, and a chain goes from its end to its start.
 *  2. A parent whose last child has left comes back at the old end: it is at least as old as the
 *     child that policy has just chosen.
 *  3. New blocks enter `small`; those that are hit there, or that left it unhit not long ago (the
 *     ghost table), go to `main`. `small` gives while its class holds over a tenth of the region.
 *  4. A choice looks at STEPS_MAX blocks at most; then the oldest goes whatever its hits.
 * Threads: the store's owner. Allocates in init only.
 */
#ifndef KVT_STORE_POLICY_H
#define KVT_STORE_POLICY_H

#include "store/index.h"
#include "store/slots.h"

struct kvt_policy {
    struct kvt_slots *slots;
    struct kvt_index *index;
    struct kvt_slot_list small_list;
    struct kvt_slot_list main_list;
    uint64_t small_bytes; /* of the class, parked ones included */
    uint64_t small_bytes_target;
    uint64_t *ghosts; /* tag << 32 | time of leaving, in evictions */
    uint32_t ghost_mask;
    uint32_t evictions;
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

/* Out of its queue, whatever may be: its links are needed elsewhere. */
void kvt_policy_park(struct kvt_policy *policy, uint32_t slot);

/* The block was asked for. */
void kvt_policy_hit(struct kvt_policy *policy, uint32_t entry);

/* The next to go; it stays where it is until the caller removes it. KVT_SLOT_NONE: none may. */
uint32_t kvt_policy_victim(struct kvt_policy *policy);

__attribute__((warn_unused_result)) int kvt_policy_check(const struct kvt_policy *policy, char *why,
                                                         size_t why_len);

#endif
