/* Loads inside the store: requests in progress (store_acquire.c, store_load.c), records pinned
 * where they lie on disk (store_direct.c), reads in flight (store_read.c). Threads: the store's
 * owner.
 */
#ifndef KVT_STORE_STORE_LOADS_H
#define KVT_STORE_STORE_LOADS_H

#include <stdbool.h>

#include "format/message.h"
#include "store/l2.h"

struct kvt_store;

enum kvt_item_state { KVT_ITEM_WAIT, KVT_ITEM_READING, KVT_ITEM_READY, KVT_ITEM_MISS };

struct kvt_load_item { /* one key of a load */
    struct kvt_msg_key key;
    uint32_t next;        /* of the request; free list */
    uint32_t waiter_next; /* of the slot */
    uint32_t load;
    uint32_t slot;
    uint32_t direct; /* pin of a record that stays on disk, or KVT_NO_NUMBER */
    uint32_t index;
    uint32_t began_us, ended_us; /* tier DISK: of its read, as a GRANT says it */
    uint8_t state;
    uint8_t tier;
    uint8_t root; /* tier DISK: where it is read from */
};

#define KVT_STORE_DIRECTS 1024u

struct kvt_store_direct { /* a record pinned where it lies on disk (store_direct.c) */
    struct kvt_full_key key;
    struct kvt_l2_where where;
    uint32_t generation; /* of this pin's lives */
    uint32_t client;
    uint32_t record_bytes;
    uint32_t next; /* free list */
    uint8_t root, map, used;
};

struct kvt_load { /* an ACQUIRE or a PREFETCH in progress */
    uint64_t cookie;
    int64_t deadline_ns;
    int64_t blocked_ns; /* since when it lacks a slot; 0: it does not */
    int64_t start_ns;   /* when it came */
    uint32_t client;
    uint32_t ns;
    uint32_t first; /* next item to grant */
    uint32_t start; /* next item to start */
    uint32_t ahead; /* items started from disk and not yet granted */
    uint32_t prev, next;
    uint8_t min_level;
    uint8_t prefetch;
    uint8_t cut; /* a block was missing: nothing more is started */
    uint8_t direct;
};

struct kvt_load_list {
    uint32_t head; /* oldest */
    uint32_t tail;
};

struct kvt_store_read {
    struct kvt_l2_read read;
    struct kvt_store *store;
    struct kvt_store_read *next; /* free list, done list */
    int64_t start_ns;
    uint32_t slot;
    uint8_t root;
    uint8_t prefetch;
};

/* ---- store_acquire.c: how loads begin and end */
__attribute__((warn_unused_result)) int kvt_loads_init(struct kvt_store *store);
void kvt_loads_destroy(struct kvt_store *store);
void kvt_loads_client_gone(struct kvt_store *store, uint32_t client);
void kvt_loads_end_all(struct kvt_store *store, int status);
/* End a load: every key not granted yet gets `status`. silent: nobody is there to hear. */
void kvt_load_end(struct kvt_store *store, uint32_t number, int32_t status, bool silent);
/* Out of its list; it has no items left. */
void kvt_load_free(struct kvt_store *store, uint32_t number);
/* An item lets go of its slot, whether it waits for the read or holds the record. */
void kvt_load_item_let_go(struct kvt_store *store, uint32_t item);
void kvt_load_item_free(struct kvt_store *store, uint32_t item);
/* slot: KVT_SLOT_NONE with a status. from: where it was; NULL: not known. */
void kvt_grant_send(struct kvt_store *store, uint32_t client, uint64_t cookie, uint32_t index,
                    int32_t status, uint32_t slot, const struct kvt_load_item *from);
/* The store's clock as a GRANT has it. */
uint32_t kvt_grant_clock(const struct kvt_store *store);

/* ---- store_load.c */
/* Start reads, grant what is ready, end what is late. Returns the next time to run. */
int64_t kvt_loads_run(struct kvt_store *store);

/* ---- store_direct.c: records pinned on disk */
void kvt_directs_init(struct kvt_store *store);
/* Pin an entry's record on disk for a client. KVT_NO_NUMBER: it cannot be had so (no pin is left,
 * its segment is going): read it. */
uint32_t kvt_direct_take(struct kvt_store *store, uint32_t client, uint32_t entry,
                         const struct kvt_full_key *key);
void kvt_direct_give(struct kvt_store *store, uint32_t direct);
void kvt_direct_grant(struct kvt_store *store, const struct kvt_load *load,
                      const struct kvt_load_item *item);
/* false: this client has no such pin. */
bool kvt_direct_release(struct kvt_store *store, uint32_t client, const struct kvt_slot_ref *ref);
void kvt_directs_client_gone(struct kvt_store *store, uint32_t client);

/* How far the start of one key of a load has come. */
enum kvt_started {
    KVT_STARTED,
    KVT_WAITS_FOR_SLOT,
    KVT_WAITS_FOR_READ,
    KVT_OVER_SHARE,
    KVT_NOT_THERE
};

/* ---- store_read.c */
void kvt_reads_init(struct kvt_store *store);
/* Read an entry's record into a READING slot that is pinned for the read. false: no read node. */
bool kvt_reads_start(struct kvt_store *store, uint32_t entry, uint32_t slot, bool prefetch);
/* Handle the reads that have ended. */
void kvt_reads_run(struct kvt_store *store);
/* Take over what the header in a READING slot says. KVT_E_*: it is not the record asked for. */
__attribute__((warn_unused_result)) int kvt_reads_accept(struct kvt_store *store, uint32_t slot);
/* All loads that wait for the slot learn how it went; on failure they lose their pin. */
void kvt_reads_wake(struct kvt_store *store, uint32_t slot, bool good);

#endif
