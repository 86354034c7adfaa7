/* Messages between the client half and the store half: the same bytes in-process and over shared
 * memory. Fixed-width little-endian, multiples of 8 bytes, at most KVT_MSG_BYTES_MAX.
 *
 * Every request but COMMIT/ABORT/RELEASE/TOUCH/CANCEL/NS_CLOSE with cookie 0 gets exactly one
 * reply, except ACQUIRE, which gets exactly one GRANT per key, in chain order.
 * Slots: (slot, generation) names one life of one slot; a reused slot can never satisfy an old
 * reference (KVT_E_STALE).
 *
 *   client                              store
 *   LOOKUP keys                    ->   LOOKUP_REPLY leading run, tier and level of each
 *   ALLOC keys, map                ->   ALLOC_REPLY slot or status for each
 *   (encode into the slots)
 *   COMMIT slots, checksums        ->   COMMIT_REPLY status for each (first one wins for a key)
 *   ABORT slots                    ->   -
 *   ACQUIRE keys, deadline         ->   GRANT (one per key): slot pinned, or a status
 *   (verify, decode)
 *   RELEASE slots, good or bad     ->   -   (bad: the store drops that record, counted)
 *   ACQUIRE direct                 ->   GRANT: a record in DRAM as above; one on disk only stays
 *                                       there, pinned: root, segment, offset
 *   (read the file, verify, decode)
 *   RELEASE direct                 ->   -   (bad: the store drops the disk's copy)
 *   NS_CLOSE                       ->   -   (the client uses its handle no more)
 *   CANCEL cookie of an ACQUIRE    ->   the GRANTs still owed arrive with KVT_E_CANCELED
 */
#ifndef KVT_FORMAT_MESSAGE_H
#define KVT_FORMAT_MESSAGE_H

#include <assert.h>
#include <stdint.h>

#include "base/hist.h"
#include "format/record.h"
#include "kvtier/layout.h"

#define KVT_PROTO_VERSION 3u
#define KVT_MSG_BYTES_MAX (64u << 10)
#define KVT_MSG_KEYS_MAX 1024u /* keys of one message: the client splits longer chains */

enum kvt_op {
    KVT_OP_NS_OPEN = 1,
    KVT_OP_LOOKUP,
    KVT_OP_ALLOC,
    KVT_OP_COMMIT,
    KVT_OP_ABORT,
    KVT_OP_ACQUIRE,
    KVT_OP_CANCEL,
    KVT_OP_RELEASE,
    KVT_OP_TOUCH,
    KVT_OP_PREFETCH,
    KVT_OP_PIN,
    KVT_OP_UNPIN,
    KVT_OP_PURGE,
    KVT_OP_FLUSH,
    KVT_OP_STAT,
    KVT_OP_USAGE,
    KVT_OP_HIST,
    KVT_OP_NS_CLOSE,
    KVT_OP_PURGE_NS,
    KVT_OP_REPLY = 64, /* | with the request's op in kvt_msg.reply_to */
    KVT_OP_GRANT = 65
};

struct kvt_msg {    /* header of every message */
    uint32_t bytes; /* whole message, multiple of 8 */
    uint16_t op;
    uint16_t reply_to; /* replies: the op answered */
    uint64_t cookie;   /* the client's; echoed */
    uint32_t ns;       /* namespace handle from NS_OPEN; 0 where it does not apply */
    uint32_t count;    /* entries after the fixed part */
    int32_t status;    /* replies: 0, a count, or an error */
    uint32_t reserved;
};
static_assert(sizeof(struct kvt_msg) == 32, "message header");

struct kvt_msg_key { /* = struct kvt_key with hash bytes past hash_len zeroed */
    uint8_t hash[KVT_HASH_BYTES_MAX];
    uint8_t hash_len, reserved;
    uint16_t group;
    uint32_t shard;
};
static_assert(sizeof(struct kvt_msg_key) == 40, "wire key");

#define KVT_QUOTA_MIN (UINT64_C(64) << 10)
#define KVT_TTL_MIN_NS INT64_C(1000000000)

/* NS_OPEN: one group of a namespace. record_bytes[map]: bytes of its records under uniform map
 * 1..6; 0: not storable. reply.status >= 0, reply.ns the handle of this group. Errors: KVT_E_LAYOUT
 * records of other sizes exist, KVT_E_LIMIT, KVT_E_TOO_SMALL. */
struct kvt_msg_ns_open {
    struct kvt_msg msg;
    uint8_t id[KVT_NS_BYTES];
    uint32_t block_tokens;
    uint16_t group;
    uint8_t loose; /* 1: a block is of use without the ones before it: no chain is kept */
    uint8_t reserved;
    uint32_t record_bytes[8]; /* index = map id; [0] and [7] unused */
    /* Of the namespace, all its groups together. 0: nothing is said, it stays as it is; INT64_MAX:
     * what the store's options say. Never more than those. */
    uint64_t quota_bytes;
    int64_t ttl_ns;
    char label[64]; /* model name for people, printable ASCII, zero-terminated */
};

/* LOOKUP, TOUCH, PREFETCH, PIN, UNPIN, PURGE: keys follow. PURGE with count 0: the namespace. */
struct kvt_msg_keys {
    struct kvt_msg msg;
    uint8_t min_level; /* LOOKUP, PREFETCH */
    uint8_t each;      /* LOOKUP: 1: look at every key, also behind an absent one */
    uint8_t whole;     /* LOOKUP: 1: what precedes is there: ask for all of it at once */
    uint8_t reserved[5];
    struct kvt_msg_key keys[];
};

/* PURGE_NS: a namespace by its id, all groups of it, opened or not, also where the store knows none
 * of its blocks: a shared tier may hold some. msg.status of the reply: 0, or an error as PURGE has
 * them; what was removed is told in either case. */
struct kvt_msg_purge_ns {
    struct kvt_msg msg;
    uint8_t id[KVT_NS_BYTES];
};

struct kvt_msg_purge_ns_reply {
    struct kvt_msg msg;      /* count: groups of it that the store knew */
    uint64_t blocks, bytes;  /* of the store */
    uint64_t remote_records; /* of the shared tier, by all machines */
};

struct kvt_msg_lookup_reply { /* msg.status: the leading run (each: hits); msg.count entries */
    struct kvt_msg msg;
    struct kvt_lookup_entry {
        uint8_t tier;  /* enum kvt_tier */
        uint8_t level; /* lowest level of its map */
        uint8_t map;
        uint8_t root; /* tier DISK: the number of the disk; else 0 */
    } entries[];      /* padded to 8 bytes */
};

/* What an ALLOC wants when a record is present. The COMMIT decides once more: of two that race, a
 * present record gives way to a higher level, and to a lower one only by COOL. */
enum kvt_replace {
    KVT_REPLACE_NEW = 0,   /* nothing: KVT_E_EXISTS, whatever its level */
    KVT_REPLACE_RAISE = 1, /* take the place of one of a lower level */
    KVT_REPLACE_COOL = 2   /* take the place of one of a higher level; a lower one stays */
};

/* ALLOC. keys: one chain, parents first. Behind a block that is neither stored nor being stored
 * (the named parent, or a key that was dropped) the rest is dropped: no lookup would reach it.
 * map 0: a mixed one of `level` and `record_bytes`; the reply tells the id that it has, or
 * KVT_E_LIMIT for the whole message when no id is left. */
struct kvt_msg_alloc {
    struct kvt_msg msg;
    uint8_t map;
    uint8_t parent_len;    /* 0: keys[0] starts the sequence */
    uint8_t replace;       /* enum kvt_replace */
    uint8_t level;         /* map 0: its lowest level */
    uint32_t record_bytes; /* map 0 */
    uint32_t first_pos;    /* of keys[0], tokens */
    uint32_t block_tokens; /* position step */
    uint8_t write;         /* enum kvt_write */
    uint8_t reserved[7];
    uint8_t parent[KVT_HASH_BYTES_MAX];
    struct kvt_msg_key keys[];
};

struct kvt_msg_alloc_reply { /* msg.count entries, in order */
    struct kvt_msg msg;
    uint8_t map; /* id to be written into the records */
    uint8_t reserved[7];
    struct kvt_alloc_entry {
        int32_t status; /* 0; KVT_E_EXISTS; KVT_E_DROPPED no slot; KVT_E_MISS switched off;
                           KVT_E_CANCELED the namespace is being purged */
        uint32_t slot;
        uint32_t generation;
        uint32_t record_bytes;
        uint64_t arena_offset; /* 4 KiB aligned */
        uint64_t sequence;
    } entries[];
};

struct kvt_slot_ref {
    uint32_t slot;
    uint32_t generation;
    uint64_t checksum; /* COMMIT: the record's checksum; else 0 */
    int32_t status;    /* RELEASE: 0 good, KVT_E_CORRUPT bad; COMMIT_REPLY: outcome */
    uint32_t direct;   /* RELEASE: 1: of a direct GRANT */
};

struct kvt_msg_slots { /* COMMIT, ABORT, RELEASE, and the reply of COMMIT */
    struct kvt_msg msg;
    struct kvt_slot_ref slots[];
};

struct kvt_msg_acquire {
    struct kvt_msg msg;
    int64_t deadline_ns; /* absolute, the store's clock (CLOCK_MONOTONIC); INT64_MAX: none */
    uint8_t min_level;
    uint8_t direct; /* 1: what is on disk only need not be read into DRAM */
    uint8_t reserved[6];
    struct kvt_msg_key keys[];
};

struct kvt_msg_grant {
    struct kvt_msg msg; /* cookie of the ACQUIRE; status 0, KVT_E_MISS, KVT_E_DEADLINE, ... */
    uint32_t index;     /* of the key in the ACQUIRE */
    uint32_t slot;
    uint32_t generation;
    uint32_t record_bytes;
    uint64_t arena_offset; /* direct: offset in the segment's file */
    uint64_t checksum;     /* what the record must hash to; direct: 0, the header says it, and the
                              header's key must be compared too */
    uint8_t map;
    uint8_t tier;   /* where it was when asked: enum kvt_tier */
    uint8_t direct; /* 1: not in the arena; (slot, generation) names the pin */
    uint8_t root;   /* tier DISK: number of the disk */
    uint32_t segment;
    /* tier DISK and not direct: when its read was asked for, and when it was there: microseconds of
     * the store's clock, modulo 2^32. Status KVT_E_DEADLINE: tier and root of a read that was under
     * way then. */
    uint32_t began_us, ended_us;
};
static_assert(sizeof(struct kvt_msg_grant) == 80, "wire grant");

struct kvt_msg_cancel {
    struct kvt_msg msg; /* cookie 0 */
    uint64_t target;    /* cookie of the ACQUIRE */
};

/* USAGE: what each namespace and rank holds, a part of the index at a time: who asks adds up the
 * rows of all parts. `from`: 0 at first, then what the reply before said. Blocks that come, go or
 * move meanwhile may be counted twice or not at all. */
struct kvt_msg_usage {
    struct kvt_msg msg;
    uint32_t from;
    uint32_t reserved;
};

struct kvt_msg_usage_reply {
    struct kvt_msg msg; /* count: rows */
    uint32_t next;      /* 0: that was all */
    uint32_t reserved;
    struct kvt_usage_row {
        uint8_t ns[KVT_NS_BYTES];
        uint16_t group;
        uint16_t rank;         /* shard of the keys; 255: 255 and above */
        uint32_t block_tokens; /* 0: nobody has opened it since the start */
        uint64_t dram_blocks, dram_bytes, disk_blocks, disk_bytes;
        char label[64];
    } rows[];
};
static_assert(sizeof(struct kvt_usage_row) == 120, "wire row");

/* NS_CLOSE: header only. A client has a namespace open once, however often it opened it: closed is
 * closed.
 * FLUSH: header only; reply.status. STAT: header only; the reply carries the counters of
 * store/counters.h in their order, then for each root a struct kvt_store_root_state (store.h). */
struct kvt_msg_stat_reply {
    struct kvt_msg msg; /* count: number of values */
    uint64_t values[];
};

/* HIST: header only; the reply carries these distributions in their order, each a struct kvt_hist
 * (base/hist.h): a sum and its buckets. X(name, op, tier, unit, help); unit TIME: nanoseconds;
 * SIZE: bytes. */
#define KVT_STORE_HISTS(X)                                                              \
    X(LOOKUP_TIME, "lookup", "index", TIME, "a lookup message, from arrival to reply")  \
    X(LOAD_DRAM_TIME, "load", "dram", TIME, "a block of a load, from arrival to grant") \
    X(LOAD_DISK_TIME, "load", "disk", TIME, "")                                         \
    X(STORE_TIME, "store", "dram", TIME, "a block, from its slot to its commit")        \
    X(READ_TIME, "read", "disk", TIME, "a record, from asking the drive to its bytes")  \
    X(WRITE_TIME, "write", "disk", TIME, "a batch, from asking the drive to its end")   \
    X(LOAD_DRAM_SIZE, "load", "dram", SIZE, "a record granted")                         \
    X(LOAD_DISK_SIZE, "load", "disk", SIZE, "")                                         \
    X(STORE_SIZE, "store", "dram", SIZE, "a record committed")                          \
    X(READ_SIZE, "read", "disk", SIZE, "a record read")                                 \
    X(WRITE_SIZE, "write", "disk", SIZE, "a batch of records")

enum kvt_hist_kind {
#define KVT_X(name, op, tier, unit, help) KVT_HIST_##name,
    KVT_STORE_HISTS(KVT_X)
#undef KVT_X
        KVT_HIST_KINDS
};

#endif
