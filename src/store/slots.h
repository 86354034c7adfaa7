/* Slots: the lives of records in the arena. A slot's number is that of its run (arena.h).
 *
 *            take                          take
 *   FREE ----------> FILLING      FREE ----------> READING
 *                     |  |  \                       |  |  \
 *          abort,     |  |   \ purge    read failed |  |   \ purge
 *          lost race  |  |    \                     |  |    \
 *   FREE <------------+  |     \   FREE <-----------+  |     \
 *                 commit |      \              read ok |      \
 *                        v       v                     v       v
 *                      VALID -> DOOMED               VALID -> DOOMED
 *                        |  removed,  |
 *                        |  pins > 0  | last unpin
 *                        +--> FREE <--+      VALID -> FREE: removed or evicted, pins == 0
 *
 * Rules
 *  1. (slot, generation) names one life. Generations of a slot only rise; a slot whose generation
 *     is used up is retired. So an old reference never meets a new life.
 *  2. pins counts everything that needs the bytes: a client's hold (FILLING or granted), a load
 *     that waits for its turn, a read or write in flight. FREE only at pins == 0.
 *  3. Who holds what is written down (hold records), so that a client that dies loses exactly its
 *     own, and one that releases twice releases nothing of others.
 *  4. The key, checksum and sequence stand here, out of a client's reach.
 *  5. What a client was filling when it was disconnected counts as nobody's: another client has its
 *     place, and the low bits of its number, by then.
 * Threads: the store's owner. Allocates in init and grow only.
 */
#ifndef KVT_STORE_SLOTS_H
#define KVT_STORE_SLOTS_H

#include <assert.h>

#include "format/record.h"
#include "store/arena.h"

#define KVT_SLOT_NONE KVT_RUN_NONE
#define KVT_HOLD_NONE UINT32_MAX
#define KVT_SLOT_CLIENTS 128u /* low bits of a client's number tell live clients apart */

enum kvt_slot_state {
    KVT_SLOT_FREE = 0,
    KVT_SLOT_FILLING,
    KVT_SLOT_READING,
    KVT_SLOT_VALID,
    KVT_SLOT_DOOMED,
    KVT_SLOT_STATES
};

/* Which list the slot's links belong to. */
enum kvt_slot_queue { KVT_QUEUE_NONE = 0, KVT_QUEUE_CACHE, KVT_QUEUE_WRITE };

/* How a VALID record stands towards the disk. */
enum kvt_slot_write {
    KVT_SLOT_WRITE_CLEAN = 0, /* on disk, or there is no disk to write to */
    KVT_SLOT_WRITE_QUEUED,    /* waits in the write queue */
    KVT_SLOT_WRITE_GOING,     /* a write is in flight */
    KVT_SLOT_WRITE_LATER,     /* not on disk: waits for eviction, an idle store or a flush */
    KVT_SLOT_WRITE_DROPPED,   /* not on disk: the queue was full ... */
    KVT_SLOT_WRITE_FAILED,    /* ... or the write failed; eviction or a flush tries again */
    KVT_SLOT_WRITE_FILTERED,  /* not on disk: admission did not take it; asked again when used */
    KVT_SLOT_WRITE_AGAIN      /* not on disk any more: the log gave its copy up. Written again when
                                 it leaves DRAM, not before */
};

struct kvt_slot {
    struct kvt_full_key key;
    uint64_t checksum;
    uint64_t sequence;
    uint32_t generation; /* 0 before the first life */
    uint32_t entry;      /* of the index */
    uint32_t record_bytes;
    uint32_t pins;
    uint32_t holds;   /* first hold record */
    uint32_t waiters; /* first load item that waits for this READING slot */
    uint32_t queue_prev, queue_next;
    union {
        uint32_t ticket;   /* order of queueing for the disk */
        uint32_t since_us; /* FILLING: when it was granted, modulo 2^32 */
        uint32_t later_ms; /* LATER: since when, modulo 2^32 */
    };
    uint32_t due;    /* policy.h: the epoch in which it leaves if nobody asks for it again */
    uint16_t bucket; /* while queued to leave */
    uint8_t state;
    uint8_t map;
    uint8_t queue;       /* enum kvt_slot_queue */
    uint8_t write : 4;   /* enum kvt_slot_write */
    uint8_t policy : 4;  /* enum kvt_write of the ALLOC; DEFAULT: a load brought it */
    uint8_t replace : 2; /* enum kvt_replace of the ALLOC, for its COMMIT */
    uint8_t staged : 1;  /* a store took it from the staging region */
    uint8_t at_end : 1;  /* written because it is next to leave: back to the old end of its queue */
    uint8_t purged : 1;  /* while its write was in flight: what lands is erased */
    uint8_t filler : 1;  /* a client holds it to fill it: FILLING, or DOOMED by a purge meanwhile */
    uint8_t older_map : 4; /* of the record on disk, where the entry says `older` */
    uint8_t cached : 1;    /* VALID in the cache region: the policy's */
    uint8_t had_child : 1; /* its prompt goes on, or went on, behind it */
    uint8_t leaving : 1;   /* among the next to leave DRAM, and not used since that was seen */
    uint8_t parted : 1;    /* its filler has been disconnected, and may still write there */
};

static_assert(sizeof(struct kvt_slot) == 120, "one for each run of the arena");

struct kvt_slot_list {
    uint32_t head; /* newest */
    uint32_t tail; /* oldest */
    uint32_t count;
    uint64_t bytes;
};

struct kvt_hold {
    uint32_t next;
    uint32_t client;
};

struct kvt_slots {
    struct kvt_arena arena;
    struct kvt_slot *slots; /* as many as the arena has runs */
    uint32_t touched;       /* of them, those that are initialised: memory beyond is untouched */
    struct kvt_hold *holds;
    uint32_t hold_capacity;
    uint32_t hold_free;
    uint32_t hold_used;
    uint64_t client_bytes[KVT_SLOT_CLIENTS]; /* held by each client, by its number modulo that */
    uint64_t client_fills[KVT_SLOT_CLIENTS]; /* of them, in slots that it is filling */
    uint64_t parted_bytes; /* being filled by clients that have been disconnected */
    uint64_t pins;         /* sum over all slots */
    uint32_t in_state[KVT_SLOT_STATES];
    uint64_t bad_moves; /* transitions refused: a defect of ours */
};

/* cache + staging pages, room for `nodes` runs and `holds` holds. 0, -ENOMEM, KVT_E_LIMIT. */
__attribute__((warn_unused_result)) int kvt_slots_init(struct kvt_slots *slots,
                                                       uint32_t cache_pages, uint32_t staging_pages,
                                                       uint32_t nodes, uint32_t holds);
void kvt_slots_destroy(struct kvt_slots *slots);
__attribute__((warn_unused_result)) int kvt_slots_grow(struct kvt_slots *slots, uint32_t nodes);

/* Begin a life in state `to` (FILLING or READING). KVT_SLOT_NONE when the region has no such run.
 */
uint32_t kvt_slots_take(struct kvt_slots *slots, int region, uint32_t record_bytes,
                        enum kvt_slot_state to);

/* The one place where a state changes. false: the move is not in the table, or FREE with pins or
 * with links; nothing changed, counted in bad_moves. FREE gives the run back. */
bool kvt_slot_move(struct kvt_slots *slots, uint32_t slot, enum kvt_slot_state to);

/* Whether (slot, generation) names a life that goes on. Any numbers may be asked. */
bool kvt_slots_alive(const struct kvt_slots *slots, uint32_t slot, uint32_t generation);

void kvt_slot_pin(struct kvt_slots *slots, uint32_t slot);
void kvt_slot_unpin(struct kvt_slots *slots, uint32_t slot);

/* Note that a client holds the slot, one pin each; `filler`, which says why, is set before it and
 * cleared after. false: no hold record left. unhold false: the client does not hold it. */
bool kvt_slot_hold(struct kvt_slots *slots, uint32_t slot, uint32_t client);
bool kvt_slot_unhold(struct kvt_slots *slots, uint32_t slot, uint32_t client);
/* The slot's filler is `client`, which has been disconnected: it still holds it. false: it is not.
 */
bool kvt_slot_part(struct kvt_slots *slots, uint32_t slot, uint32_t client);

/* Record bytes that a client holds, each hold counted; and what of them it is filling. */
static inline uint64_t kvt_slots_client_bytes(const struct kvt_slots *slots, uint32_t client)
{
    return slots->client_bytes[client % KVT_SLOT_CLIENTS];
}
static inline uint64_t kvt_slots_client_fills(const struct kvt_slots *slots, uint32_t client)
{
    return slots->client_fills[client % KVT_SLOT_CLIENTS];
}

/* Lists over the slots' queue links. */
void kvt_slot_list_init(struct kvt_slot_list *list);
void kvt_slot_list_push(struct kvt_slots *slots, struct kvt_slot_list *list, uint32_t slot,
                        enum kvt_slot_queue queue, bool at_tail);
void kvt_slot_list_remove(struct kvt_slots *slots, struct kvt_slot_list *list, uint32_t slot);

__attribute__((warn_unused_result)) int kvt_slots_check(const struct kvt_slots *slots, char *why,
                                                        size_t why_len);
__attribute__((warn_unused_result)) int kvt_slot_list_check(const struct kvt_slots *slots,
                                                            const struct kvt_slot_list *list,
                                                            enum kvt_slot_queue queue, char *why,
                                                            size_t why_len);

static inline struct kvt_slot *kvt_slot_at(const struct kvt_slots *slots, uint32_t slot)
{
    return &slots->slots[slot];
}

static inline int kvt_slot_region(const struct kvt_slots *slots, uint32_t slot)
{
    return slots->arena.runs[slot].region;
}

static inline uint64_t kvt_slot_offset(const struct kvt_slots *slots, uint32_t slot)
{
    return (uint64_t)slots->arena.runs[slot].page * KVT_PAGE_BYTES;
}

#endif
