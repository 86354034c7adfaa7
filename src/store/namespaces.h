/* Namespaces that the store knows: those opened by clients and those whose records recovery found.
 * What has a number here is one group of a namespace: groups have records of their own lengths.
 * Those of one id are in a ring: quota and time to live are the namespace's, and one of them leads:
 * it keeps what is the namespace's alone.
 *
 * Rules
 *  1. A map of a namespace has one record length. Whoever says it first (an open, a record on disk)
 *     fixes it; a record of another length is refused.
 *  2. A handle (number and life) is given out by open. Its number is another namespace's only after
 *     every client that opened it has closed it or gone, when nothing is left of it (no block in
 *     DRAM, on disk, being filled or written; no pin; no load, purge or look-up under way), and
 *     when room is needed: the one that was closed first goes. A handle of an earlier life of its
 *     number is refused, so a late message never meets another namespace.
 * Threads: the store's owner. A fixed table: at most KVT_NAMESPACES_MAX.
 */
#ifndef KVT_STORE_NAMESPACES_H
#define KVT_STORE_NAMESPACES_H

#include <stdbool.h>

#include "format/message.h"

struct kvt_ttl_clock;

#define KVT_NAMESPACES_MAX 4096u /* 12 bits of an index entry */
#define KVT_NS_NONE UINT32_MAX
#define KVT_NS_MAPS KVT_MAP_IDS
#define KVT_NS_CLIENTS 128u     /* low bits of a client's number tell live clients apart */
#define KVT_NS_LIVES (1u << 19) /* of a number, then they begin anew */

struct kvt_namespace {
    uint8_t id[KVT_NS_BYTES];
    uint16_t group;
    uint32_t record_pages[KVT_NS_MAPS]; /* 0: not known */
    uint32_t block_tokens;              /* 0 until opened */
    uint64_t blocks;                    /* entries of the index */
    uint64_t bytes;                     /* of the records of those that are present */
    uint64_t filling_bytes;             /* of records that clients are filling */
    uint64_t quota_bytes;               /* of all groups together; 0: the store's */
    int64_t ttl_ns;                     /* what programs said of it; 0: nothing */
    uint64_t rule_quota_bytes;          /* what the operator says of it (ns_limit); 0: nothing */
    int64_t rule_ttl_ns;                /* likewise */
    struct kvt_ttl_clock *ttl;          /* of all groups; NULL: the store's. store_ttl.c owns it */
    uint32_t next_group;                /* ring of the groups of one id */
    uint32_t leader;                    /* of them; it is forgotten last */
    uint32_t quota_hand;                /* leader: the entry that is looked at next for room ... */
    uint32_t quota_climb;               /* ... unless this one is: the parent of what went last */
    uint32_t quota_listed;              /* leader: entries in its list; store_quota.c */
    uint32_t life;                      /* of the number: handles of others are refused */
    uint64_t closed;                    /* greater: closed later; 0: never */
    uint64_t clients[KVT_NS_CLIENTS / 64]; /* that have it open */
    uint8_t used;
    uint8_t opened;         /* in this life */
    uint8_t loose;          /* blocks are of use without the ones before them */
    uint16_t without_roots; /* bits: those that cannot hold its longest records, as was said */
    uint8_t purging;        /* everything in it is a miss until the purge has ended */
    char label[64];
};

/* What else knows of numbers. NULL: nothing does. */
struct kvt_namespaces_user {
    bool (*busy)(void *ctx, uint32_t ns); /* something that is under way names it */
    void (*forget)(void *ctx, uint32_t ns);
    void *ctx;
};

struct kvt_namespaces {
    struct kvt_namespace *table;
    uint32_t touched;
    uint32_t used;
    uint16_t *hash; /* id -> number + 1, open addressing */
    uint64_t closings;
    uint64_t given_back;                /* numbers of namespaces that had been opened */
    uint32_t client_of[KVT_NS_CLIENTS]; /* whose bit it is in `clients` */
    struct kvt_namespaces_user user;
};

__attribute__((warn_unused_result)) int kvt_namespaces_init(struct kvt_namespaces *spaces);
void kvt_namespaces_destroy(struct kvt_namespaces *spaces);

uint32_t kvt_namespaces_find(const struct kvt_namespaces *spaces, const uint8_t id[KVT_NS_BYTES],
                             uint16_t group);
/* Find or add. KVT_NS_NONE when the table is full of namespaces in use. */
uint32_t kvt_namespaces_add(struct kvt_namespaces *spaces, const uint8_t id[KVT_NS_BYTES],
                            uint16_t group);

/* Open by message: checks lengths against what is known. The number, KVT_E_LAYOUT, KVT_E_LIMIT,
 * KVT_E_INVAL. */
long kvt_namespaces_open(struct kvt_namespaces *spaces, const struct kvt_msg_ns_open *open);

static inline uint32_t kvt_handle_number(uint32_t handle)
{
    return (handle - 1) % KVT_NAMESPACES_MAX;
}
/* Of a number's present life; never 0. */
uint32_t kvt_namespaces_handle(const struct kvt_namespaces *spaces, uint32_t ns);
/* A handle that open gave out, of a namespace that has not been given back since. */
bool kvt_namespaces_valid(const struct kvt_namespaces *spaces, uint32_t handle);
/* The client has it open, or no longer; clients are counted once. */
void kvt_namespaces_enter(struct kvt_namespaces *spaces, uint32_t ns, uint32_t client);
void kvt_namespaces_leave(struct kvt_namespaces *spaces, uint32_t ns, uint32_t client);
/* It has ended: it has nothing open. */
void kvt_namespaces_client_gone(struct kvt_namespaces *spaces, uint32_t client);

/* The id of the mixed map of that lowest level and length: the one that has it, else a new one.
 * 0: all ids of the level have other lengths, or the length is not one that a record can have. */
uint8_t kvt_namespaces_mixed(struct kvt_namespaces *spaces, uint32_t ns, int level,
                             uint32_t record_bytes);

/* Learn the length of a record found on disk: false when it contradicts what is known. */
bool kvt_namespaces_learn(struct kvt_namespaces *spaces, uint32_t ns, uint8_t map, uint32_t pages);

static inline struct kvt_namespace *kvt_namespace_at(const struct kvt_namespaces *spaces,
                                                     uint32_t ns)
{
    return &spaces->table[ns];
}

static inline uint32_t kvt_namespace_record_bytes(const struct kvt_namespaces *spaces, uint32_t ns,
                                                  uint32_t map)
{
    return spaces->table[ns].record_pages[map] * KVT_PAGE_BYTES;
}

/* Bytes of the records of all groups of the namespace that number `ns` is of, present or being
 * filled. */
uint64_t kvt_namespaces_held(const struct kvt_namespaces *spaces, uint32_t ns);
/* The number that keeps what is the namespace's alone. */
static inline struct kvt_namespace *kvt_namespace_lead(const struct kvt_namespaces *spaces,
                                                       uint32_t ns)
{
    return &spaces->table[spaces->table[ns].leader];
}
/* Two numbers are groups of one namespace. */
bool kvt_namespaces_same(const struct kvt_namespaces *spaces, uint32_t one, uint32_t other);

/* Bytes of the longest record of those opened; 0: none. */
uint32_t kvt_namespaces_largest(const struct kvt_namespaces *spaces);

#endif
