/* Slot table: states, pins, holds, lists. See slots.h for the diagram and the rules.
 * Threads: the store's owner. Does not know the index, clients' messages or eviction policy.
 */
#include "store/slots.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"

#define TO(state) (1u << KVT_SLOT_##state)

static const uint8_t allowed_moves[KVT_SLOT_STATES] = {
    [KVT_SLOT_FREE] = TO(FILLING) | TO(READING),
    [KVT_SLOT_FILLING] = TO(VALID) | TO(DOOMED) | TO(FREE),
    [KVT_SLOT_READING] = TO(VALID) | TO(DOOMED) | TO(FREE),
    [KVT_SLOT_VALID] = TO(DOOMED) | TO(FREE),
    [KVT_SLOT_DOOMED] = TO(FREE),
};

/* Zero the slots of runs that the arena has named for the first time. */
static void touch(struct kvt_slots *slots)
{
    uint32_t count = slots->arena.touched - slots->touched;

    if (count)
        memset(&slots->slots[slots->touched], 0, count * sizeof(*slots->slots));
    slots->touched = slots->arena.touched;
}

int kvt_slots_init(struct kvt_slots *slots, uint32_t cache_pages, uint32_t staging_pages,
                   uint32_t nodes, uint32_t holds)
{
    int err;

    memset(slots, 0, sizeof(*slots));
    err = kvt_arena_init(&slots->arena, cache_pages, staging_pages, nodes);
    if (err)
        return err;
    slots->slots = malloc(slots->arena.capacity * sizeof(*slots->slots));
    slots->holds = malloc((size_t)KVT_MAX(holds, 1u) * sizeof(*slots->holds));
    if (!slots->slots || !slots->holds) {
        kvt_slots_destroy(slots);
        return -ENOMEM;
    }
    touch(slots);
    slots->hold_capacity = holds;
    slots->hold_free = holds ? 0 : KVT_HOLD_NONE;
    for (uint32_t i = 0; i < holds; i++)
        slots->holds[i].next = i + 1 < holds ? i + 1 : KVT_HOLD_NONE;
    return 0;
}

void kvt_slots_destroy(struct kvt_slots *slots)
{
    kvt_arena_destroy(&slots->arena);
    free(slots->slots);
    free(slots->holds);
    memset(slots, 0, sizeof(*slots));
}

int kvt_slots_grow(struct kvt_slots *slots, uint32_t nodes)
{
    struct kvt_slot *grown;

    if (nodes <= slots->arena.capacity)
        return 0;
    if (nodes >= KVT_SLOT_NONE)
        return KVT_E_LIMIT;
    grown = realloc(slots->slots, (size_t)nodes * sizeof(*grown));
    if (!grown)
        return -ENOMEM;
    slots->slots = grown;
    return kvt_arena_grow(&slots->arena, nodes);
}

uint32_t kvt_slots_take(struct kvt_slots *slots, int region, uint32_t record_bytes,
                        enum kvt_slot_state to)
{
    uint32_t slot = kvt_arena_alloc(&slots->arena, region, record_bytes / KVT_PAGE_BYTES);
    struct kvt_slot *s;
    uint32_t generation;

    if (slot == KVT_SLOT_NONE)
        return slot;
    touch(slots);
    s = &slots->slots[slot];
    generation = s->generation + 1;
    memset(s, 0, sizeof(*s));
    s->generation = generation;
    s->record_bytes = record_bytes;
    s->entry = UINT32_MAX;
    s->holds = KVT_HOLD_NONE;
    s->waiters = UINT32_MAX;
    s->queue_prev = s->queue_next = KVT_SLOT_NONE;
    slots->arena.runs[slot].retired = generation == UINT32_MAX;
    kvt_slot_move(slots, slot, to);
    return slot;
}

bool kvt_slot_move(struct kvt_slots *slots, uint32_t slot, enum kvt_slot_state to)
{
    struct kvt_slot *s = &slots->slots[slot];

    if (!(allowed_moves[s->state] >> to & 1) ||
        (to == KVT_SLOT_FREE && (s->pins || s->queue != KVT_QUEUE_NONE))) {
        slots->bad_moves++;
        return false;
    }
    if (s->state != KVT_SLOT_FREE)
        slots->in_state[s->state]--;
    s->state = (uint8_t)to;
    if (to == KVT_SLOT_FREE)
        kvt_arena_free(&slots->arena, slot);
    else
        slots->in_state[to]++;
    return true;
}

bool kvt_slots_alive(const struct kvt_slots *slots, uint32_t slot, uint32_t generation)
{
    return slot < slots->arena.touched && slots->slots[slot].state != KVT_SLOT_FREE &&
           slots->slots[slot].generation == generation;
}

void kvt_slot_pin(struct kvt_slots *slots, uint32_t slot)
{
    slots->slots[slot].pins++;
    slots->pins++;
}

void kvt_slot_unpin(struct kvt_slots *slots, uint32_t slot)
{
    slots->slots[slot].pins--;
    slots->pins--;
}

bool kvt_slot_hold(struct kvt_slots *slots, uint32_t slot, uint32_t client)
{
    uint32_t hold = slots->hold_free;

    if (hold == KVT_HOLD_NONE)
        return false;
    slots->hold_free = slots->holds[hold].next;
    slots->hold_used++;
    slots->holds[hold].client = client;
    slots->holds[hold].next = slots->slots[slot].holds;
    slots->slots[slot].holds = hold;
    slots->client_bytes[client % KVT_SLOT_CLIENTS] += slots->slots[slot].record_bytes;
    if (slots->slots[slot].filler)
        slots->client_fills[client % KVT_SLOT_CLIENTS] += slots->slots[slot].record_bytes;
    kvt_slot_pin(slots, slot);
    return true;
}

/* A hold no longer counts as its client's. */
static void uncount(struct kvt_slots *slots, const struct kvt_slot *s, uint32_t client)
{
    if (s->parted) {
        slots->parted_bytes -= s->record_bytes;
        return;
    }
    slots->client_bytes[client % KVT_SLOT_CLIENTS] -= s->record_bytes;
    if (s->filler)
        slots->client_fills[client % KVT_SLOT_CLIENTS] -= s->record_bytes;
}

bool kvt_slot_part(struct kvt_slots *slots, uint32_t slot, uint32_t client)
{
    struct kvt_slot *s = &slots->slots[slot];

    if (!s->filler || s->parted || s->holds == KVT_HOLD_NONE ||
        slots->holds[s->holds].client != client)
        return false;
    uncount(slots, s, client);
    s->parted = 1;
    slots->parted_bytes += s->record_bytes;
    return true;
}

bool kvt_slot_unhold(struct kvt_slots *slots, uint32_t slot, uint32_t client)
{
    uint32_t *link = &slots->slots[slot].holds;

    for (; *link != KVT_HOLD_NONE; link = &slots->holds[*link].next) {
        uint32_t hold = *link;

        if (slots->holds[hold].client != client)
            continue;
        *link = slots->holds[hold].next;
        slots->holds[hold].next = slots->hold_free;
        slots->hold_free = hold;
        slots->hold_used--;
        uncount(slots, &slots->slots[slot], client);
        kvt_slot_unpin(slots, slot);
        return true;
    }
    return false;
}

void kvt_slot_list_init(struct kvt_slot_list *list)
{
    *list = (struct kvt_slot_list){.head = KVT_SLOT_NONE, .tail = KVT_SLOT_NONE};
}

void kvt_slot_list_push(struct kvt_slots *slots, struct kvt_slot_list *list, uint32_t slot,
                        enum kvt_slot_queue queue, bool at_tail)
{
    struct kvt_slot *s = &slots->slots[slot];

    s->queue = (uint8_t)queue;
    s->queue_prev = at_tail ? list->tail : KVT_SLOT_NONE;
    s->queue_next = at_tail ? KVT_SLOT_NONE : list->head;
    if (s->queue_prev != KVT_SLOT_NONE)
        slots->slots[s->queue_prev].queue_next = slot;
    else
        list->head = slot;
    if (s->queue_next != KVT_SLOT_NONE)
        slots->slots[s->queue_next].queue_prev = slot;
    else
        list->tail = slot;
    list->count++;
    list->bytes += s->record_bytes;
}

void kvt_slot_list_remove(struct kvt_slots *slots, struct kvt_slot_list *list, uint32_t slot)
{
    struct kvt_slot *s = &slots->slots[slot];

    if (s->queue_prev != KVT_SLOT_NONE)
        slots->slots[s->queue_prev].queue_next = s->queue_next;
    else
        list->head = s->queue_next;
    if (s->queue_next != KVT_SLOT_NONE)
        slots->slots[s->queue_next].queue_prev = s->queue_prev;
    else
        list->tail = s->queue_prev;
    s->queue = KVT_QUEUE_NONE;
    s->queue_prev = s->queue_next = KVT_SLOT_NONE;
    list->count--;
    list->bytes -= s->record_bytes;
}

int kvt_slots_check(const struct kvt_slots *slots, char *why, size_t why_len)
{
    uint32_t in_state[KVT_SLOT_STATES] = {0};
    uint64_t pins = 0, held_bytes = 0, fills = 0, parted = 0;
    uint32_t holds = 0;
    int err = kvt_arena_check(&slots->arena, why, why_len);

    for (uint32_t i = 0; i < slots->arena.touched && !err; i++) {
        const struct kvt_slot *s = &slots->slots[i];
        const struct kvt_run *r = &slots->arena.runs[i];
        uint32_t held = 0;

        if ((s->state == KVT_SLOT_FREE) != (r->state != KVT_RUN_TAKEN)) {
            snprintf(why, why_len, "slot %u is in state %u, its run in %u", i, s->state, r->state);
            return KVT_E_CORRUPT;
        }
        if (s->state == KVT_SLOT_FREE)
            continue;
        for (uint32_t h = s->holds; h != KVT_HOLD_NONE; h = slots->holds[h].next)
            held++;
        in_state[s->state]++;
        pins += s->pins;
        holds += held;
        parted += s->parted ? s->record_bytes : 0;
        fills += s->filler && !s->parted ? (uint64_t)held * s->record_bytes : 0;
        held_bytes += s->parted ? 0 : (uint64_t)held * s->record_bytes;
        if (held > s->pins || s->record_bytes > (uint64_t)r->pages * KVT_PAGE_BYTES) {
            snprintf(why, why_len, "slot %u has %u holds and %u pins", i, held, s->pins);
            err = KVT_E_CORRUPT;
        }
    }
    for (uint32_t i = 0; i < KVT_SLOT_CLIENTS; i++) {
        held_bytes -= slots->client_bytes[i];
        fills -= slots->client_fills[i];
    }
    if (!err && (held_bytes != 0 || fills != 0 || parted != slots->parted_bytes)) {
        snprintf(why, why_len, "slots: bytes that clients hold do not add up");
        err = KVT_E_CORRUPT;
    }
    if (!err && (pins != slots->pins || holds != slots->hold_used ||
                 memcmp(in_state, slots->in_state, sizeof(in_state)) != 0 || slots->bad_moves)) {
        snprintf(why, why_len, "slots: sums of pins, holds or states do not agree");
        err = KVT_E_CORRUPT;
    }
    return err;
}

int kvt_slot_list_check(const struct kvt_slots *slots, const struct kvt_slot_list *list,
                        enum kvt_slot_queue queue, char *why, size_t why_len)
{
    uint32_t prev = KVT_SLOT_NONE, count = 0;
    uint64_t bytes = 0;

    for (uint32_t i = list->head; i != KVT_SLOT_NONE; prev = i, i = slots->slots[i].queue_next) {
        if (slots->slots[i].queue != queue || slots->slots[i].queue_prev != prev ||
            count++ > slots->arena.touched) {
            snprintf(why, why_len, "list %d breaks at slot %u", (int)queue, i);
            return KVT_E_CORRUPT;
        }
        bytes += slots->slots[i].record_bytes;
    }
    if (prev == list->tail && count == list->count && bytes == list->bytes)
        return 0;
    snprintf(why, why_len, "list %d: sums do not agree", (int)queue);
    return KVT_E_CORRUPT;
}
