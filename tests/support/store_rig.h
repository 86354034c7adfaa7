/* A store without threads, for tests: messages go in by call, replies are kept, time is a number
 * that the test moves, the disk is memory. Blocks have bytes that follow from (namespace, key,
 * version), so every record can be checked whole.
 *
 * Use: rig_open(), rig_ns(), then rig_put()/rig_get() and the rest; rig_close() or rig_crash() and
 * rig_reopen(). Every helper that talks to the store lets it settle and then checks its invariants
 * (rig->check_each_step).
 */
#ifndef KVT_TESTS_STORE_RIG_H
#define KVT_TESTS_STORE_RIG_H

#include "support/store_help.h"

#include <stdbool.h>

#include "format/message.h"
#include "store/store.h"

#define RIG_REPLIES_MAX 8192u
#define RIG_CHAIN_MAX 1024u
#define RIG_WALL_NS INT64_C(1700000000000000000)
#define RIG_REMOTE_DEADLINE_NS INT64_C(250000000)

struct rig_options {
    uint64_t cache_bytes;
    uint64_t staging_bytes;
    uint64_t disk_cap_bytes;  /* 0: no root */
    uint64_t disk_real_bytes; /* what the medium holds; 0: more than the cap */
    uint64_t write_queue_bytes;
    uint64_t pin_bytes_max;
    uint64_t scrub_bytes_per_s;
    uint32_t blocks_max;
    int write; /* enum kvt_write: the store's own policy */
    int64_t ttl_ns;
    uint64_t ns_bytes_max;
    const struct kvt_ns_rule *ns_rules; /* the test's */
    uint32_t ns_rule_count;
    int admit; /* enum kvt_admit */
    uint32_t admit_permille;
    uint64_t write_bytes_day; /* of each root */
    int collide;
    bool turns_over;             /* for the test's own use */
    uint32_t roots_pending;      /* that the test adds itself */
    bool two_roots;              /* a second one like the first */
    struct kvt_remote *remote;   /* the test's */
    int remote_write;            /* enum kvt_remote_write; 0: SECOND; -1: OFF */
    uint64_t remote_queue_bytes; /* 0: 1 MiB */
};

struct rig {
    struct rig_options options;
    struct kvt_store *store;
    struct kvt_io *io;     /* a fault injector over the medium; survives reopen */
    struct kvt_io *second; /* of two_roots; rig_hold() holds the first only */
    bool swap_roots;       /* the next open gives them in the other order */
    uint8_t *arena;
    uint64_t arena_bytes;
    int64_t now_ns;
    int64_t wall_ahead_ns; /* of the system's clock to now_ns, and RIG_WALL_NS */
    uint64_t cookie;
    bool check_each_step;
    bool patient;   /* a reply may take a minute of the store's time: the drive is failing */
    uint8_t write;  /* of the ALLOCs that follow */
    uint8_t whole;  /* of the LOOKUPs that follow: struct kvt_msg_keys */
    uint16_t group; /* of the namespaces that are opened and the keys that are named from now on */
    uint64_t ns_quota; /* what namespaces that are opened from now on say of themselves */
    int64_t ns_ttl_ns;
    const char *label; /* of namespaces that are opened from now on; NULL: none */
    bool held_io;      /* completions are held back: settle() does not wait for them */
    /* Takes a grant out of the replies: true when it is the test's own business. */
    bool (*on_grant)(void *ctx, uint32_t client, const struct kvt_msg_grant *grant);
    void *on_grant_ctx;
    bool keep;              /* granted slots are kept by rig_get() until rig_release_all() */
    char stats_text[16385]; /* file "stats" as the last close left it */
    struct kvt_msg *replies[RIG_REPLIES_MAX]; /* copies, oldest first */
    uint32_t reply_clients[RIG_REPLIES_MAX];
    uint32_t reply_count;
    struct kvt_slot_ref held[RIG_REPLIES_MAX];
    uint32_t held_count;
    uint8_t ns_ids[16][16]; /* rig_ns_id() */
};

/* What the rig knows of a handle's namespace: of 16 numbers at a time. */
static inline const uint8_t *rig_ns_id(const struct rig *rig, uint32_t ns)
{
    return rig->ns_ids[(ns - 1) % 16];
}

/* Options for a rig with DRAM and disk of a moderate size. */
struct rig_options rig_defaults(void);

/* io: a memory medium to use (owned by the rig from now on), or NULL for a new one. Fails the test
 * when the store does not open; rig_try_open() returns the error instead. */
void rig_open(struct rig *rig, const struct rig_options *options, struct kvt_io *io);
int rig_try_open(struct rig *rig, const struct rig_options *options, struct kvt_io *io);
void rig_close(struct rig *rig);  /* orderly; the medium goes too */
void rig_reopen(struct rig *rig); /* orderly close, then open on the same medium */
void rig_crash(struct rig *rig);  /* what the medium holds now, without close; then open */
/* Open on the same medium a store that the test itself has closed (rig->store is NULL). */
void rig_start(struct rig *rig);

/* Hold completions back, or let them come again (and settle). */
void rig_hold(struct rig *rig, bool on);
/* Let up to `count` held completions come, newest first when backwards. */
void rig_release_io(struct rig *rig, unsigned count, bool backwards);

/* Let the store work until nothing is left to do; time moves by what its timers ask for. */
void rig_settle(struct rig *rig);
void rig_advance(struct rig *rig, int64_t ns);
void rig_check(struct rig *rig);

/* Messages. The reply is borrowed until the next rig call. */
int rig_send(struct rig *rig, uint32_t client, const void *msg);
const struct kvt_msg *rig_reply(struct rig *rig, uint64_t cookie);
void rig_forget_replies(struct rig *rig);

/* A namespace whose id is made of `name`; pages[map] = pages of a record, 0 none. */
uint32_t rig_ns(struct rig *rig, uint8_t name, const uint32_t pages[7]);
int rig_try_ns(struct rig *rig, uint8_t name, const uint32_t pages[7], uint32_t *handle);

/* Key number i (any number) of a namespace. */
struct kvt_msg_key rig_key(uint64_t number);

/* Store a chain: numbers[0..n), parent number or 0. Allocates, fills and commits as one client.
 * replace: enum kvt_replace.
 * statuses: optional. Returns how many were committed. */
uint32_t rig_put(struct rig *rig, uint32_t ns, const uint64_t *numbers, uint32_t n, uint64_t parent,
                 uint8_t map, uint8_t replace, int32_t *statuses);
/* The parts of it. entries: n replies of ALLOC. */
void rig_alloc(struct rig *rig, uint32_t client, uint32_t ns, const uint64_t *numbers, uint32_t n,
               uint64_t parent, uint8_t map, uint8_t replace, struct kvt_alloc_entry *entries);
uint64_t rig_fill(struct rig *rig, uint32_t ns, uint64_t number, uint64_t parent, uint8_t map,
                  const struct kvt_alloc_entry *entry);
int32_t rig_commit(struct rig *rig, uint32_t client, const struct kvt_alloc_entry *entry,
                   uint64_t checksum);
void rig_abort(struct rig *rig, uint32_t client, const struct kvt_alloc_entry *entry);

/* Load a chain, verify each granted record whole (fails the test on other bytes), release. A record
 * whose checksum does not fit is released as bad and reported as KVT_E_CORRUPT. maps: optional.
 * Returns the leading run of good ones. */
uint32_t rig_get(struct rig *rig, uint32_t ns, const uint64_t *numbers, uint32_t n, uint8_t min,
                 int32_t *statuses, uint8_t *maps);
uint64_t rig_acquire(struct rig *rig, uint32_t client, uint32_t ns, const uint64_t *numbers,
                     uint32_t n, uint8_t min, int64_t deadline_ns);
/* 0 when the granted record is what was put; KVT_E_CORRUPT when its checksum says that it is not.
 * Fails the test when the checksum fits and the bytes are others. */
int rig_verify(struct rig *rig, uint32_t ns, uint64_t number, const struct kvt_msg_grant *grant);
void rig_release(struct rig *rig, uint32_t client, const struct kvt_msg_grant *grant, int status);
void rig_release_all(struct rig *rig, uint32_t client);

/* Leading run, and the tier of each of n keys (optional). */
uint32_t rig_lookup(struct rig *rig, uint32_t ns, const uint64_t *numbers, uint32_t n, uint8_t min,
                    uint8_t *tiers);
/* TOUCH, PREFETCH, PIN, UNPIN, PURGE by op; the reply's status. n == 0 and PURGE: the namespace. */
int32_t rig_keys(struct rig *rig, int op, uint32_t ns, const uint64_t *numbers, uint32_t n);
int32_t rig_flush(struct rig *rig);
void rig_cancel(struct rig *rig, uint32_t client, uint64_t target);
struct kvt_store_stats rig_stats(struct rig *rig);
/* A number of the file "stats" that the last rig_reopen() found; fails the test when absent. */
uint64_t rig_filed_stat(const struct rig *rig, const char *name);

#endif
