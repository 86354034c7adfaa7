/* S3-FIFO over the slots that may leave. See policy.h for the rules.
 * Threads: the store's owner. Does not free anything.
 */
#include "store/policy.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier/error.h"

#define STEPS_MAX 128u
#define SMALL_SHARE 10u /* one tenth of the region, as S3-FIFO's authors found best */
#define GHOSTS_MIN 1024u
#define GHOSTS_MAX (1u << 18)          /* 2 MiB */
#define GHOST_RECORD_BYTES (64u << 10) /* one ghost per this much DRAM, within the two above */

int kvt_policy_init(struct kvt_policy *policy, struct kvt_slots *slots, struct kvt_index *index,
                    uint64_t region_bytes)
{
    uint64_t ghosts = GHOSTS_MIN;

    memset(policy, 0, sizeof(*policy));
    while (ghosts < GHOSTS_MAX && ghosts * GHOST_RECORD_BYTES < region_bytes)
        ghosts *= 2;
    policy->slots = slots;
    policy->index = index;
    kvt_slot_list_init(&policy->small_list);
    kvt_slot_list_init(&policy->main_list);
    policy->small_bytes_target = region_bytes / SMALL_SHARE;
    policy->ghost_mask = (uint32_t)ghosts - 1;
    policy->ghosts = calloc(ghosts, sizeof(*policy->ghosts));
    return policy->ghosts ? 0 : -ENOMEM;
}

void kvt_policy_destroy(struct kvt_policy *policy)
{
    free(policy->ghosts);
    memset(policy, 0, sizeof(*policy));
}

static uint64_t *ghost_of(const struct kvt_policy *policy, struct kvt_fp fp)
{
    return &policy->ghosts[(uint32_t)fp.word[0] & policy->ghost_mask];
}

static uint32_t ghost_tag(struct kvt_fp fp)
{
    return (uint32_t)(fp.word[0] >> 32) | 1u;
}

/* Left `small` unhit within the last ghost_mask evictions. */
static bool ghost_remembers(const struct kvt_policy *policy, struct kvt_fp fp)
{
    uint64_t ghost = *ghost_of(policy, fp);

    return (uint32_t)(ghost >> 32) == ghost_tag(fp) &&
           policy->evictions - (uint32_t)ghost <= policy->ghost_mask;
}

static struct kvt_slot_list *list_of(struct kvt_policy *policy, uint8_t queue)
{
    return queue == KVT_QUEUE_SMALL ? &policy->small_list : &policy->main_list;
}

static bool may_leave(const struct kvt_policy *policy, const struct kvt_slot *s)
{
    const struct kvt_index_entry *e = kvt_index_at(policy->index, s->entry);

    return s->state == KVT_SLOT_VALID && !s->pins && s->write != KVT_SLOT_WRITE_QUEUED &&
           s->write != KVT_SLOT_WRITE_GOING && !e->pinned && !e->dram_children;
}

void kvt_policy_enter(struct kvt_policy *policy, uint32_t slot)
{
    struct kvt_slot *s = kvt_slot_at(policy->slots, slot);
    bool known = ghost_remembers(policy, kvt_index_at(policy->index, s->entry)->fp);

    s->chosen = known ? KVT_QUEUE_MAIN : KVT_QUEUE_SMALL;
    if (!known)
        policy->small_bytes += s->record_bytes;
}

void kvt_policy_park(struct kvt_policy *policy, uint32_t slot)
{
    struct kvt_slot *s = kvt_slot_at(policy->slots, slot);

    if (s->queue == KVT_QUEUE_SMALL || s->queue == KVT_QUEUE_MAIN)
        kvt_slot_list_remove(policy->slots, list_of(policy, s->queue), slot);
}

void kvt_policy_leave(struct kvt_policy *policy, uint32_t slot)
{
    struct kvt_slot *s = kvt_slot_at(policy->slots, slot);

    kvt_policy_park(policy, slot);
    if (s->chosen == KVT_QUEUE_SMALL)
        policy->small_bytes -= s->record_bytes;
    s->chosen = KVT_QUEUE_NONE;
}

void kvt_policy_settle(struct kvt_policy *policy, uint32_t slot, bool at_tail)
{
    struct kvt_slot *s = kvt_slot_at(policy->slots, slot);

    if (s->chosen == KVT_QUEUE_NONE || s->queue == KVT_QUEUE_WRITE)
        return;
    if (!may_leave(policy, s))
        kvt_policy_park(policy, slot);
    else if (s->queue == KVT_QUEUE_NONE)
        kvt_slot_list_push(policy->slots, list_of(policy, s->chosen), slot, s->chosen, at_tail);
}

static void promote(struct kvt_policy *policy, struct kvt_slot *s)
{
    policy->small_bytes -= s->record_bytes;
    s->chosen = KVT_QUEUE_MAIN;
}

void kvt_policy_hit(struct kvt_policy *policy, uint32_t entry)
{
    struct kvt_index_entry *e = kvt_index_at(policy->index, entry);
    struct kvt_slot *s;

    if (e->freq < KVT_INDEX_FREQ_MAX)
        e->freq++;
    e->hit = e->on_disk;
    if (e->slot == KVT_INDEX_NONE)
        return;
    /* A parked block has no turn in `small` at which its hit would be seen: promote it now. */
    s = kvt_slot_at(policy->slots, e->slot);
    if (s->chosen == KVT_QUEUE_SMALL && s->queue != KVT_QUEUE_SMALL)
        promote(policy, s);
}

uint32_t kvt_policy_victim(struct kvt_policy *policy)
{
    for (uint32_t steps = 0;; steps++) {
        bool small = policy->small_list.count &&
                     (policy->small_bytes > policy->small_bytes_target || !policy->main_list.count);
        struct kvt_slot_list *list = small ? &policy->small_list : &policy->main_list;
        uint32_t slot = list->tail;
        struct kvt_slot *s;
        struct kvt_index_entry *e;

        if (slot == KVT_SLOT_NONE)
            return slot;
        s = kvt_slot_at(policy->slots, slot);
        e = kvt_index_at(policy->index, s->entry);
        if (!e->freq || steps >= STEPS_MAX) {
            policy->evictions++;
            if (small)
                *ghost_of(policy, e->fp) = (uint64_t)ghost_tag(e->fp) << 32 | policy->evictions;
            return slot;
        }
        kvt_slot_list_remove(policy->slots, list, slot);
        if (small) {
            promote(policy, s);
            e->freq = 0;
        } else {
            e->freq--;
        }
        kvt_slot_list_push(policy->slots, &policy->main_list, slot, KVT_QUEUE_MAIN, false);
    }
}

int kvt_policy_check(const struct kvt_policy *policy, char *why, size_t why_len)
{
    const struct kvt_slots *slots = policy->slots;
    uint64_t small_bytes = 0;
    int err = kvt_slot_list_check(slots, &policy->small_list, KVT_QUEUE_SMALL, why, why_len);

    if (!err)
        err = kvt_slot_list_check(slots, &policy->main_list, KVT_QUEUE_MAIN, why, why_len);
    for (uint32_t i = 0; i < slots->arena.touched && !err; i++) {
        const struct kvt_slot *s = kvt_slot_at(slots, i);
        bool queued = s->queue == KVT_QUEUE_SMALL || s->queue == KVT_QUEUE_MAIN;

        if (s->state == KVT_SLOT_FREE)
            continue;
        small_bytes += s->chosen == KVT_QUEUE_SMALL ? s->record_bytes : 0;
        if (queued && s->queue != s->chosen)
            err = KVT_E_CORRUPT;
        else if (s->chosen != KVT_QUEUE_NONE && queued != may_leave(policy, s))
            err = KVT_E_CORRUPT;
        if (err)
            snprintf(why, why_len, "slot %u (state %u, write %u, pins %u) queue %u, class %u", i,
                     s->state, s->write, s->pins, s->queue, s->chosen);
    }
    if (!err && small_bytes != policy->small_bytes) {
        snprintf(why, why_len, "policy: bytes of class small do not agree");
        err = KVT_E_CORRUPT;
    }
    return err;
}
