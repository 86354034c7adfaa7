/* Buckets by due epoch over the slots that may leave. See policy.h for the rules.
 *
 * `lowest` only ever rises, so the search for the next bucket that is not empty is paid for by the
 * epochs that pass. What is due before it goes into it; what is due beyond the last bucket, into
 * that. Threads: the store's owner. Does not free anything.
 */
#include "store/policy.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"

#define GHOSTS_MIN 1024u
#define GHOSTS_MAX (1u << 18) /* 2 MiB; one for each page of DRAM, within the two */
#define GHOST_EPOCH_MASK 0x3fffffffu
#define UNIT 256u                    /* of credit */
#define CREDIT_MIN (4u * UNIT)       /* an eighth of a turn for each hit */
#define CREDIT_MAX (64u * UNIT)      /* two turns */
#define TAIL_EARLY KVT_POLICY_EPOCHS /* rule 3: due a turn earlier than others */
#define FAR_MORE 16u                 /* times as often as those without hits: credit rises ... */
#define NOT_MORE 8u                  /* ... and sinks below that */
#define CAME_BACK_MIN 4u             /* fewer tell nothing */
#define COUNT_UNIT 16u               /* of left and came_back, so that they can fade */

int kvt_policy_init(struct kvt_policy *policy, struct kvt_slots *slots, struct kvt_index *index,
                    uint64_t region_bytes)
{
    uint64_t pages = region_bytes / KVT_PAGE_BYTES, ghosts = GHOSTS_MIN;

    memset(policy, 0, sizeof(*policy));
    while (ghosts < GHOSTS_MAX && ghosts < pages)
        ghosts *= 2;
    policy->slots = slots;
    policy->index = index;
    for (uint32_t i = 0; i < KVT_POLICY_BUCKETS; i++)
        kvt_slot_list_init(&policy->buckets[i]);
    policy->epoch_pages = (uint32_t)KVT_MAX(pages / KVT_POLICY_EPOCHS, 1);
    policy->epoch = policy->lowest = TAIL_EARLY; /* so that nothing is due before 0 */
    policy->newest = KVT_SLOT_NONE;
    policy->credit = CREDIT_MIN;
    policy->ghost_mask = (uint32_t)ghosts - 1;
    policy->ghosts = calloc(ghosts, sizeof(*policy->ghosts));
    return policy->ghosts ? 0 : -ENOMEM;
}

void kvt_policy_destroy(struct kvt_policy *policy)
{
    free(policy->ghosts);
    memset(policy, 0, sizeof(*policy));
}

/* Rule 3. */
static bool is_tail(const struct kvt_policy *policy, const struct kvt_slot *s)
{
    const struct kvt_index_entry *e = kvt_index_at(policy->index, s->entry);

    return !s->had_child && !e->freq && e->parent != KVT_INDEX_NONE &&
           kvt_index_at(policy->index, e->parent)->slot != KVT_INDEX_NONE;
}

/* ---- ghosts, and what credit they teach ------------------------------------------------------ */

static uint64_t *ghost_of(const struct kvt_policy *policy, struct kvt_fp fp)
{
    return &policy->ghosts[(uint32_t)fp.word[0] & policy->ghost_mask];
}

static uint32_t ghost_tag(struct kvt_fp fp)
{
    return (uint32_t)(fp.word[0] >> 32) | 1u;
}

/* Hits of a block that left within the last turn; -1: none that is remembered. It is forgotten. */
static int ghost_take(struct kvt_policy *policy, struct kvt_fp fp)
{
    uint64_t *ghost = ghost_of(policy, fp);
    uint32_t age = (policy->epoch - (uint32_t)*ghost) & GHOST_EPOCH_MASK;
    int hits = (int)((uint32_t)*ghost >> 30);

    if ((uint32_t)(*ghost >> 32) != ghost_tag(fp))
        return -1;
    *ghost = 0;
    return age <= KVT_POLICY_EPOCHS ? hits : -1;
}

/* Once an epoch's worth of pages has left: more credit, or less; then the counts fade by 1 in 50.
 */
static void weigh_credit(struct kvt_policy *policy)
{
    uint64_t with = (uint64_t)policy->came_back[1] * policy->left[0];
    uint64_t without = (uint64_t)policy->came_back[0] * policy->left[1];
    uint32_t back = policy->came_back[0] + policy->came_back[1];

    if (policy->left[0] && policy->left[1] && back >= CAME_BACK_MIN * COUNT_UNIT) {
        if (with > FAR_MORE * without)
            policy->credit += policy->credit / 10;
        else if (with < NOT_MORE * without)
            policy->credit -= policy->credit / 11;
        policy->credit = KVT_MIN(KVT_MAX(policy->credit, CREDIT_MIN), CREDIT_MAX);
    }
    for (int i = 0; i < 2; i++) {
        policy->left[i] -= policy->left[i] / 50;
        policy->came_back[i] -= policy->came_back[i] / 50;
    }
}

void kvt_policy_evicted(struct kvt_policy *policy, uint32_t slot)
{
    const struct kvt_slot *s = kvt_slot_at(policy->slots, slot);
    const struct kvt_index_entry *e = kvt_index_at(policy->index, s->entry);

    *ghost_of(policy, e->fp) = (uint64_t)ghost_tag(e->fp) << 32 | (uint64_t)e->freq << 30 |
                               (policy->epoch & GHOST_EPOCH_MASK);
    if (!is_tail(policy, s)) /* those leave early on purpose */
        policy->left[e->freq > 0] += COUNT_UNIT;
    policy->left_since += s->record_bytes / KVT_PAGE_BYTES;
    if (policy->left_since < policy->epoch_pages)
        return;
    policy->left_since = 0;
    weigh_credit(policy);
}

/* ---- buckets ----------------------------------------------------------------------------------
 */

static bool queued(const struct kvt_slot *s)
{
    return s->queue == KVT_QUEUE_CACHE;
}

static bool may_leave(const struct kvt_policy *policy, const struct kvt_slot *s)
{
    const struct kvt_index_entry *e = kvt_index_at(policy->index, s->entry);

    return s->state == KVT_SLOT_VALID && !s->pins && s->write != KVT_SLOT_WRITE_QUEUED &&
           s->write != KVT_SLOT_WRITE_GOING && !e->pinned && !e->dram_children;
}

static void push(struct kvt_policy *policy, uint32_t slot, bool at_tail)
{
    struct kvt_slot *s = kvt_slot_at(policy->slots, slot);
    uint32_t due = s->due - (is_tail(policy, s) ? TAIL_EARLY : 0);

    due = KVT_MAX(due, policy->lowest);
    due = KVT_MIN(due, policy->lowest + KVT_POLICY_BUCKETS - 1);
    s->bucket = (uint16_t)(due % KVT_POLICY_BUCKETS);
    kvt_slot_list_push(policy->slots, &policy->buckets[s->bucket], slot, KVT_QUEUE_CACHE, at_tail);
    policy->queued++;
}

static void use(struct kvt_policy *policy, struct kvt_slot *s)
{
    uint32_t hits = kvt_index_at(policy->index, s->entry)->freq;

    s->due = policy->epoch + hits * policy->credit / UNIT;
}

void kvt_policy_enter(struct kvt_policy *policy, uint32_t slot)
{
    struct kvt_slot *s = kvt_slot_at(policy->slots, slot);
    struct kvt_index_entry *e = kvt_index_at(policy->index, s->entry);
    int before = ghost_take(policy, e->fp);

    if (before >= 0) {
        policy->came_back[before > 0] += COUNT_UNIT;
        e->freq = KVT_MAX(e->freq, KVT_MIN((uint32_t)before + 1, KVT_INDEX_FREQ_MAX)) &
                  KVT_INDEX_FREQ_MAX;
    }
    policy->pages_entered += s->record_bytes / KVT_PAGE_BYTES;
    policy->epoch += policy->pages_entered / policy->epoch_pages;
    policy->pages_entered %= policy->epoch_pages;
    policy->newest = slot;
    s->cached = 1;
    s->had_child = 0;
    use(policy, s);
}

void kvt_policy_park(struct kvt_policy *policy, uint32_t slot)
{
    struct kvt_slot *s = kvt_slot_at(policy->slots, slot);

    if (!queued(s))
        return;
    kvt_slot_list_remove(policy->slots, &policy->buckets[s->bucket], slot);
    policy->queued--;
}

void kvt_policy_leave(struct kvt_policy *policy, uint32_t slot)
{
    struct kvt_slot *s = kvt_slot_at(policy->slots, slot);

    kvt_policy_park(policy, slot);
    s->cached = 0;
    if (policy->newest == slot)
        policy->newest = KVT_SLOT_NONE;
}

void kvt_policy_settle(struct kvt_policy *policy, uint32_t slot, bool at_tail)
{
    struct kvt_slot *s = kvt_slot_at(policy->slots, slot);

    if (!s->cached || s->queue == KVT_QUEUE_WRITE)
        return;
    if (kvt_index_at(policy->index, s->entry)->dram_children)
        s->had_child = 1;
    if (!may_leave(policy, s))
        kvt_policy_park(policy, slot);
    else if (s->queue == KVT_QUEUE_NONE)
        push(policy, slot, at_tail);
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
    s = kvt_slot_at(policy->slots, e->slot);
    if (!s->cached)
        return;
    use(policy, s);
    if (queued(s)) {
        kvt_policy_park(policy, e->slot);
        push(policy, e->slot, false);
    }
}

/* ---- the order --------------------------------------------------------------------------------
 */

/* The oldest slot of the first bucket that has one, from `due` on. */
static uint32_t oldest_from(const struct kvt_policy *policy, uint32_t due, uint32_t *found)
{
    for (; policy->queued && due - policy->lowest < KVT_POLICY_BUCKETS; due++) {
        uint32_t slot = policy->buckets[due % KVT_POLICY_BUCKETS].tail;

        if (slot == KVT_SLOT_NONE)
            continue;
        *found = due;
        return slot;
    }
    return KVT_SLOT_NONE;
}

uint32_t kvt_policy_due(const struct kvt_policy *policy, uint32_t slot)
{
    const struct kvt_slot *s = kvt_slot_at(policy->slots, slot);

    return queued(s) ? policy->lowest + (s->bucket - policy->lowest) % KVT_POLICY_BUCKETS
                     : KVT_MAX(s->due, policy->lowest);
}

uint32_t kvt_policy_first(const struct kvt_policy *policy)
{
    uint32_t due;

    return oldest_from(policy, policy->lowest, &due);
}

uint32_t kvt_policy_after(const struct kvt_policy *policy, uint32_t slot)
{
    const struct kvt_slot *s = kvt_slot_at(policy->slots, slot);
    uint32_t due = kvt_policy_due(policy, slot);

    if (!queued(s))
        return KVT_SLOT_NONE;
    return s->queue_prev != KVT_SLOT_NONE ? s->queue_prev : oldest_from(policy, due + 1, &due);
}

uint32_t kvt_policy_victim(struct kvt_policy *policy)
{
    uint32_t lowest = policy->lowest, slot = oldest_from(policy, lowest, &lowest), other;

    policy->lowest = lowest;
    if (slot == KVT_SLOT_NONE || slot != policy->newest)
        return slot;
    other = kvt_policy_after(policy, slot);
    return other == KVT_SLOT_NONE ? slot : other;
}

int kvt_policy_check(const struct kvt_policy *policy, char *why, size_t why_len)
{
    const struct kvt_slots *slots = policy->slots;
    uint32_t in_buckets = 0, in_slots = 0;
    int err = 0;

    for (uint32_t i = 0; i < KVT_POLICY_BUCKETS && !err; i++) {
        err = kvt_slot_list_check(slots, &policy->buckets[i], KVT_QUEUE_CACHE, why, why_len);
        in_buckets += policy->buckets[i].count;
    }
    for (uint32_t i = 0; i < slots->arena.touched && !err; i++) {
        const struct kvt_slot *s = kvt_slot_at(slots, i);

        if (s->state == KVT_SLOT_FREE)
            continue;
        in_slots += queued(s);
        if (queued(s) && !s->cached)
            err = KVT_E_CORRUPT;
        else if (s->cached && queued(s) != may_leave(policy, s))
            err = KVT_E_CORRUPT;
        if (err)
            snprintf(why, why_len, "slot %u (state %u, write %u, pins %u) queue %u, cached %u", i,
                     s->state, s->write, s->pins, s->queue, s->cached);
    }
    if (!err && (in_buckets != policy->queued || in_slots != policy->queued)) {
        snprintf(why, why_len, "policy: numbers of queued blocks do not agree");
        err = KVT_E_CORRUPT;
    }
    return err;
}
