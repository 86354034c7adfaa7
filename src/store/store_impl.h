/* The store's own structure, shared by its files (store*.c) and by nobody else. Parts of it have
 * headers of their own: store_loads.h, store_writes.h, store_purges.h, store_ttl.h, store_scrub.h;
 * store_recycle.h is included where segments go.
 *
 *   store.c          open, run, close            store_acquire.c ACQUIRE, CANCEL, RELEASE, PREFETCH
 *   store_handle.c   checks a message, calls     store_load.c    loads in progress
 *   store_entry.c    entry <-> slot <-> disk     store_read.c    reads in flight
 *   store_room.c     makes room: evict, reclaim  store_write.c   write queue, batches
 *   store_query.c    LOOKUP, TOUCH, PIN          store_flush.c   FLUSH; store_purge.c PURGE
 *   store_ns.c       NS_OPEN, NS_CLOSE
 *   store_later.c    writes put off              store_admit.c   which blocks are written
 *   store_ttl.c      time to live                store_quota.c   bytes of a namespace
 *   store_alloc.c    ALLOC, COMMIT, ABORT        store_stats.c   STAT, stats file
 *   store_recover.c  roots at open               store_check.c   every invariant
 *   store_join.c     roots that come later
 *   store_usage.c    bytes by namespace and rank
 *   store_remote*.c  the tier that machines share
 *   store_reinsert.c records move before their   store_direct.c  records pinned on disk
 *                    segment goes                store_recycle.c which segment goes, what stays
 *
 * Rules
 *  1. An entry's slot is VALID or READING and names the entry back; FILLING slots name the entry,
 *     which only counts them.
 *  2. An entry's DRAM copy and disk copy are the same record, unless the entry says `older`: then
 *     the slot is VALID and on no disk yet, and what is on disk is the record whose place it took.
 *     It is the entry's again, with its map, when the slot goes before its own write has ended.
 *  3. Callbacks of the log change index and slots at most; they never call the log.
 *  4. Whatever may change whether a slot can leave or stay ends with kvt_slot_settle().
 */
#ifndef KVT_STORE_STORE_IMPL_H
#define KVT_STORE_STORE_IMPL_H

#include "base/checked.h"
#include "plan/admission.h"
#include "store/l2.h"
#include "store/namespaces.h"
#include "store/pins.h"
#include "store/policy.h"
#include "store/store.h"
#include "store/store_loads.h"
#include "store/store_purges.h"
#include "store/store_scrub.h"
#include "store/store_ttl.h"
#include "store/store_writes.h"

#define KVT_STORE_HOLDS 32768u   /* grants and fills that clients hold at once */
#define KVT_STORE_LOADS 256u     /* ACQUIRE and PREFETCH requests in progress */
#define KVT_STORE_ITEMS 16384u   /* keys of them */
#define KVT_STORE_READS 64u      /* reads in flight, all roots */
#define KVT_STORE_READ_AHEAD 32u /* blocks of one request read and not yet granted */
#define KVT_STORE_PREFETCH_READS 16u
#define KVT_STORE_FLUSHES 64u
#define KVT_STORE_PURGES 8u
#define KVT_STORE_BATCH_RECORDS 256u
#define KVT_STORE_ROOT_WRITES (2 * KVT_STORE_BATCH_RECORDS) /* two batches in flight */
#define KVT_STORE_OFF_PURGES 256u
#define KVT_STORE_BATCH_BYTES_MIN (1u << 20) /* below it a batch waits for more, shortly */
#define KVT_STORE_BATCH_BYTES_MAX (16u << 20)
#define KVT_STORE_BATCH_BYTES_FIRST (4u << 20) /* until the drive's speed is known */
#define KVT_STORE_BATCH_NS \
    100000000ll /* a drive writes one batch in that time; two may be in front of a read */
#define KVT_STORE_GATHER_NS 5000000ll       /* 5 ms: a chain's messages arrive within it */
#define KVT_STORE_SLOT_WAIT_NS 1000000000ll /* a load waits that long for a slot, then drops */
#define KVT_STORE_IDLE_NS 500000000ll       /* without a message for that long, the store is idle */
#define KVT_STORE_WRITE_RETRY_NS                                    \
    1000000000ll /* after a failed write, before blocks are retried \
                  */
#define KVT_STORE_STATS_PERIOD_NS 2000000000ll
#define KVT_STORE_STATS_BYTES 16384u
#define KVT_STORE_SEQUENCE_AHEAD 65536u
#define KVT_STORE_SCAN_ENTRIES 8192u /* index entries looked at by background work per run */
#define KVT_NO_NUMBER UINT32_MAX

struct kvt_store_batch { /* handed to a root, as one list */
    int64_t begun_ns;
    uint64_t bytes;
    uint32_t left; /* records of it that have not ended */
    int failed;
};

#define KVT_STORE_BATCHES 2u /* of a root in flight: the log's rule */

struct kvt_store_segment { /* records of one segment, by what has become of them */
    uint32_t put;          /* since its life began */
    uint32_t live;         /* of them, those that the index names */
    uint32_t spare;        /* of these, those whose block is in DRAM, and not about to leave it */
    uint8_t born;          /* tick of the log when its life began, or was renewed */
};

struct kvt_store_disk { /* one root */
    struct kvt_store *store;
    struct kvt_l2 *l2;
    struct kvt_io *io;
    uint32_t number;
    uint32_t *heads;  /* first entry of each segment's list */
    uint32_t *pinned; /* entries pinned by kvt_pin in each segment */
    struct kvt_store_segment *uses;
    uint32_t segments;
    uint64_t cap_bytes;
    struct kvt_store_drain *drain;  /* of store_reinsert.c */
    struct kvt_store_write *writes; /* KVT_STORE_ROOT_WRITES, all roots' in one free list */
    uint64_t read_fails;
    struct kvt_store_batch batches[KVT_STORE_BATCHES];
    int64_t batch_end_ns;       /* the last one ended */
    uint64_t write_rate;        /* bytes a second, as measured; 0: not yet */
    uint32_t batch_bytes;       /* most of the next batch, by that */
    bool joining;               /* what it holds is still being taken in (store_join.c) */
    uint32_t lives;             /* of segments that have begun: the time of the log */
    uint32_t filled;            /* segments with records: as many lives are a turn */
    struct kvt_ttl_marks marks; /* of store_marks.c */
};

struct kvt_store {
    struct kvt_store_params params; /* root_count: those at open */
    struct kvt_index index;
    struct kvt_slots slots;
    struct kvt_policy policy;
    struct kvt_namespaces spaces;
    struct kvt_pins pins; /* of kvt_pin: who */
    struct kvt_store_disk disks[KVT_STORE_ROOTS_MAX];
    uint32_t disk_count;
    uint64_t sequence_next;
    uint64_t sequence_reserved;
    uint64_t sequence_floor; /* records numbered below it are numbered anew before they are written:
                                a root that came later has higher numbers */
    uint32_t record_bytes_min; /* smallest and largest of all namespaces opened */
    uint32_t record_bytes_max;
    int enabled;
    int closing;
    int said_namespaces; /* that no more fit: once */
    uint32_t said_roots; /* that one is of no use to a namespace */
    int again;           /* a callback of the log has left work: run again at once */

    uint64_t *recover_sequence; /* by entry, while recovery lasts */
    uint64_t *recover_generation;
    uint32_t recover_capacity;
    struct kvt_store_joining *joining; /* a root whose blocks are being taken in */

    struct kvt_admission admission;
    struct kvt_store_ttl ttl;
    struct kvt_store_quota quota;
    struct kvt_slot_list write_queue; /* oldest at the tail */
    struct kvt_store_write *write_free;
    struct kvt_store_write *write_erase; /* landed after their block had gone */
    uint32_t writes_going;
    uint64_t going_bytes; /* of their records */
    uint32_t ticket_next;
    int64_t gather_since_ns;
    uint32_t write_root;   /* whose turn it is */
    uint64_t staged_bytes; /* of staging slots that stores took */
    int lost_since_flush;
    uint32_t unsaved;      /* slots that hold the only copy, not queued for the disk */
    uint32_t idle_waiting; /* of them, those to be written when the store is idle */
    uint32_t idle_cursor;
    uint32_t auto_waiting; /* of them, those that AUTO has deferred, and their bytes */
    uint64_t auto_bytes;
    uint32_t auto_cursor;
    int64_t auto_next_ns;   /* when the next pass over them begins */
    uint64_t burst_pages;   /* the largest of the stores of late */
    struct kvt_ahead ahead; /* in the policy's order */
    int64_t last_message_ns;
    int64_t write_retry_ns;

    struct kvt_load loads[KVT_STORE_LOADS];
    uint32_t load_free;
    struct kvt_load_list acquires;
    struct kvt_load_list prefetches;
    struct kvt_load_item *items;
    uint32_t item_free;
    uint32_t items_used;
    struct kvt_store_read reads[KVT_STORE_READS];
    struct kvt_store_read *read_free;
    struct kvt_store_read *read_done;
    struct kvt_store_direct directs[KVT_STORE_DIRECTS];
    uint32_t direct_free;
    uint32_t direct_used;
    uint32_t reads_going;
    uint32_t prefetch_going;

    struct kvt_store_scrub scrub;
    struct kvt_store_suspects suspects;
    struct kvt_store_flush flushes[KVT_STORE_FLUSHES];
    struct kvt_store_purge purges[KVT_STORE_PURGES];
    struct kvt_journal_item off_purges[KVT_STORE_OFF_PURGES]; /* for roots that are still to come */
    uint32_t off_purge_count;
    struct kvt_journal_item *purge_items;
    uint32_t buried; /* records that kvt_purges_bury() has taken in this life */
    uint32_t sweep_cursor;
    uint32_t sweep_found; /* orphans of this pass */
    int sweep_on;
    uint32_t clock_cursor; /* reclaiming index entries */
    uint64_t pinned_bytes;
    uint64_t pinned_blocks;
    uint64_t disk_blocks;

    struct kvt_store_stats counts; /* counters only; gauges are computed */
    struct kvt_hist hists[KVT_HIST_KINDS];
    int64_t turn_ns;                 /* when the turn of the loads began */
    uint64_t activity;               /* anything that may have changed a number */
    struct kvt_store_stats at_close; /* gauges of the roots, from just before they closed */
    struct kvt_store_statfile *statfile;
    struct kvt_store_remote *remote; /* store_remote.c; NULL: there is none */

    struct kvt_fp fps[KVT_MSG_KEYS_MAX];
    uint32_t found[KVT_MSG_KEYS_MAX];
    _Alignas(8) uint8_t reply[KVT_MSG_BYTES_MAX];
};

/* ---- store_handle.c */
/* A zeroed reply of `bytes` (rounded up to 8) in store->reply, header filled from the request. */
struct kvt_msg *kvt_reply_begin(struct kvt_store *store, const struct kvt_msg *msg, size_t bytes);
void kvt_reply_send(struct kvt_store *store, uint32_t client, struct kvt_msg *reply);
/* A reply of the header alone. */
void kvt_reply_status(struct kvt_store *store, uint32_t client, uint16_t op, uint64_t cookie,
                      int32_t status);
void kvt_key_full(const struct kvt_store *store, uint32_t ns, const struct kvt_msg_key *key,
                  struct kvt_full_key *out);

static inline int64_t kvt_store_now(const struct kvt_store *store)
{
    return kvt_clock_now(&store->params.clock);
}

/* Whether a client that is stopped, or slow, holds as much as it may: others need slots too. ahead:
 * bytes that it is about to hold besides. */
static inline bool kvt_client_full(const struct kvt_store *store, uint32_t client, uint64_t ahead,
                                   uint32_t more)
{
    uint64_t held = kvt_slots_client_bytes(&store->slots, client) + ahead;

    return store->params.client_bytes_max != 0 && held != 0 &&
           held + more > store->params.client_bytes_max;
}

/* The same for slots to fill, which it keeps longer than others when it breaks the protocol. What
 * is kept so already makes it less for everybody: all of that together stays below half of DRAM. */
static inline bool kvt_client_fills(const struct kvt_store *store, uint32_t client, uint32_t more)
{
    uint64_t fills = kvt_slots_client_fills(&store->slots, client);
    uint64_t most = store->params.client_fill_max, parted = store->slots.parted_bytes;
    uint64_t half = store->params.arena_bytes / 2;

    if (parted)
        most = KVT_MIN(most, (half > parted ? half - parted : 0) / 4);
    return kvt_client_full(store, client, 0, more) ||
           (store->params.client_fill_max != 0 && fills != 0 && fills + more > most);
}

static inline uint8_t *kvt_slot_bytes(const struct kvt_store *store, uint32_t slot)
{
    return (uint8_t *)store->params.arena + kvt_slot_offset(&store->slots, slot);
}

/* ---- store_entry.c: coupling of entries, slots and places on disk */
uint32_t kvt_entry_find(const struct kvt_store *store, const struct kvt_full_key *key);
/* Find or insert, reclaiming when the index is full. KVT_INDEX_NONE: no room. */
uint32_t kvt_entry_get(struct kvt_store *store, uint32_t ns, const struct kvt_full_key *key);
uint32_t kvt_entry_get_fp(struct kvt_store *store, uint32_t ns, struct kvt_fp fp, uint8_t rank);
/* The shard of a key as usage counts it: 255 stands for all from there on. */
static inline uint8_t kvt_rank_of(const struct kvt_full_key *key)
{
    return key->shard < UINT8_MAX ? (uint8_t)key->shard : UINT8_MAX;
}
/* On disk only, of a time when the staging memory was larger: it cannot be loaded. */
static inline bool kvt_entry_too_long(const struct kvt_store *store,
                                      const struct kvt_index_entry *e, uint32_t bytes)
{
    return e->slot == KVT_INDEX_NONE && bytes > store->params.staging_bytes;
}
/* false: the entry's slot proves that it belongs to another key of the same fingerprint. */
bool kvt_entry_is(const struct kvt_store *store, uint32_t entry, const struct kvt_full_key *key);
/* Remove the entry, and its ancestors, as far as they have neither copy nor children. */
void kvt_entry_settle(struct kvt_store *store, uint32_t entry);
uint32_t kvt_entry_bytes(const struct kvt_store *store, uint32_t entry);
void kvt_entry_set_map(struct kvt_store *store, uint32_t entry, unsigned map);
void kvt_entry_attach(struct kvt_store *store, uint32_t entry, uint32_t slot);
/* Take the slot out of its entry: freed, or doomed while pinned. An older record on disk is the
 * entry's again. The entry is not settled. */
void kvt_entry_drop_slot(struct kvt_store *store, uint32_t entry, bool evicting);
/* The same, and an older record that is back is counted: nobody asked for this. */
void kvt_entry_lose_slot(struct kvt_store *store, uint32_t entry, bool evicting);
/* The record is at that place now, wherever an older one was. false: the index cannot name it. */
bool kvt_entry_set_disk(struct kvt_store *store, uint32_t entry, uint32_t root,
                        struct kvt_l2_where where);
void kvt_entry_clear_disk(struct kvt_store *store, uint32_t entry);
/* The log has given up the copy of a block that may be in DRAM: it is the only one there now. */
void kvt_entry_give_up(struct kvt_store *store, uint32_t entry);
/* The same for all of a segment's entries that `may` names, in O(entries). The list is in the order
 * of pages afterwards, when it was in the order of writing. */
void kvt_entries_give_up(struct kvt_store_disk *disk, uint32_t segment,
                         bool (*may)(const struct kvt_store *store, uint32_t entry));
/* Somebody asked for the block. */
void kvt_entry_used(struct kvt_store *store, uint32_t entry);
/* The slot is among the next to leave DRAM, or no longer. */
void kvt_slot_leaving(struct kvt_store *store, uint32_t slot, bool leaving);
void kvt_entry_set_pinned(struct kvt_store *store, uint32_t entry, bool pinned);
/* Pins or queues of a slot have changed: free it, queue it for eviction, or park it. */
void kvt_slot_settle(struct kvt_store *store, uint32_t slot);
void kvt_slot_free(struct kvt_store *store, uint32_t slot);
/* One client more, or less, is filling for this entry. The entry is not settled. */
void kvt_entry_fill_begin(struct kvt_store *store, uint32_t entry);
void kvt_entry_fill_end(struct kvt_store *store, uint32_t entry);
/* A FILLING slot ends without COMMIT (the hold is released by the caller). */
void kvt_slot_abandon(struct kvt_store *store, uint32_t slot);

/* ---- store_room.c: making room */
enum kvt_room { KVT_ROOM_STORE, KVT_ROOM_LOAD, KVT_ROOM_PREFETCH };
/* A slot in state FILLING or READING, evicting as needed; KVT_SLOT_NONE. */
uint32_t kvt_room_slot(struct kvt_store *store, uint32_t record_bytes, enum kvt_room purpose);
/* Free one index entry. false: nothing may go. */
bool kvt_room_entry(struct kvt_store *store);
/* A bounded step of dropping blocks that no chain reaches any more. */
void kvt_room_sweep(struct kvt_store *store);

/* ---- messages; checked by store_handle.c */
void kvt_handle_ns_open(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
void kvt_handle_ns_close(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
void kvt_handle_lookup(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
void kvt_handle_touch(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
void kvt_handle_pin(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
void kvt_handle_alloc(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
void kvt_handle_commit(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
void kvt_handle_abort(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
void kvt_handle_acquire(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
void kvt_handle_cancel(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
void kvt_handle_release(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
void kvt_handle_prefetch(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
void kvt_handle_purge(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
void kvt_handle_purge_ns(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
void kvt_handle_flush(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
/* store_usage.c */
void kvt_handle_usage(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
void kvt_handle_stat(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
void kvt_handle_hist(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
/* store_query.c: what the client had pinned by PIN is nobody's, unless others pinned it too. */
void kvt_pins_client_gone(struct kvt_store *store, uint32_t client);

/* ---- store_remote*.c: the tier that machines share; every call does nothing where there is none
 */
__attribute__((warn_unused_result)) int kvt_l3_init(struct kvt_store *store);
void kvt_l3_close(struct kvt_store *store); /* look-ups are answered, the backend stops */
void kvt_l3_destroy(struct kvt_store *store);
/* Returns the next time to run. */
int64_t kvt_l3_run(struct kvt_store *store);
/* Nothing that close would wait for. */
bool kvt_l3_idle(const struct kvt_store *store);
void kvt_l3_stats(const struct kvt_store *store, struct kvt_store_stats *stats);
/* A LOOKUP has to ask there first: it is answered later. false: answer it now. */
bool kvt_l3_lookup(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
/* One of a namespace is waited for. */
bool kvt_l3_looking(const struct kvt_store *store, uint32_t ns);
/* A record of that level at least is known to be there. */
bool kvt_l3_known(struct kvt_store *store, struct kvt_fp fp, uint8_t min_level, uint8_t *map);
/* A key of a load is not here but there, so long. read: a slot for it, with its read under way;
 * has() must have said so. */
bool kvt_l3_has(struct kvt_store *store, const struct kvt_load *load,
                const struct kvt_full_key *full, uint32_t *bytes);
enum kvt_started kvt_l3_read(struct kvt_store *store, const struct kvt_load *load,
                             const struct kvt_full_key *full, bool may_read, uint32_t *out);
/* A block in DRAM was used; first: it has just been stored. It may be worth putting there. */
void kvt_l3_offer(struct kvt_store *store, uint32_t slot, bool first);
/* A purge reaches there too: begun; whether that is done with. */
void kvt_l3_purge(struct kvt_store *store, const struct kvt_store_purge *purge);
bool kvt_l3_purged(struct kvt_store *store, struct kvt_store_purge *purge);

/* ---- store_stats.c */
__attribute__((warn_unused_result)) int kvt_statfile_open(struct kvt_store *store);
void kvt_statfile_close(struct kvt_store *store); /* after the log has closed */
int64_t kvt_statfile_run(struct kvt_store *store);

/* ---- store_query.c */
/* Fingerprints of a message's keys and what the index has under them: store->fps, store->found. */
void kvt_find_keys(struct kvt_store *store, uint32_t ns, const struct kvt_msg_key *keys,
                   uint32_t count);
/* Answer a LOOKUP by what is known now. */
void kvt_lookup_answer(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);

/* ---- store_ns.c */
/* Tables that hold what all caps can, with the records of the namespaces opened. */
__attribute__((warn_unused_result)) int kvt_tables_grow(struct kvt_store *store);
/* Records of that length can be kept on a root, and loaded from it; on any. */
bool kvt_root_holds(const struct kvt_store *store, uint32_t root, uint32_t record_bytes);
bool kvt_roots_hold(const struct kvt_store *store, uint32_t record_bytes);
/* A root has come: namespaces that it is of no use to are told. */
void kvt_ns_root_joined(struct kvt_store *store);
/* The table of namespaces asks here before it gives a number back. */
void kvt_ns_init(struct kvt_store *store);

/* ---- store_recover.c */
__attribute__((warn_unused_result)) int kvt_recover(struct kvt_store *store, uint32_t *bad_root);
/* Parameters of a root's log, but for found(), the context and the seed. Any thread. */
struct kvt_l2_params kvt_root_params(const struct kvt_store *store,
                                     const struct kvt_store_root *root);
/* Tables of an opened log's root; forget: of one that is not used after all, without its log. */
__attribute__((warn_unused_result)) int kvt_disk_init(struct kvt_store *store, uint32_t number,
                                                      const struct kvt_store_root *root,
                                                      struct kvt_l2 *l2);
void kvt_disk_forget(struct kvt_store *store, uint32_t number);

/* ---- store_join.c */
/* Take in some more of what a root that came later has. Returns whether there is more. */
bool kvt_join_run(struct kvt_store *store);
void kvt_join_close(struct kvt_store *store);
/* Parents may still come: what lies behind them is not swept. */
bool kvt_sweep_waits(const struct kvt_store *store);
/* Callbacks of the log (l2.h: room, found_again, again_over). ctx: a disk. */
bool kvt_segment_room(void *ctx, uint32_t records);
void kvt_segment_found(void *ctx, const struct kvt_entry *record, uint32_t segment);
void kvt_segment_over(void *ctx);

#endif
