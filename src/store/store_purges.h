/* PURGE inside the store, and what else is journaled as gone (store_purge.c).
 * Threads: the store's owner.
 */
#ifndef KVT_STORE_STORE_PURGES_H
#define KVT_STORE_STORE_PURGES_H

#include <stdbool.h>

#include "store/l2.h"
#include "store/store.h"

struct kvt_store_purge {
    struct kvt_store *store;
    uint64_t cookie;
    uint64_t removed, removed_bytes;
    uint64_t remote_removed; /* records of the shared tier */
    uint32_t client;
    uint32_t ns;     /* the group that is walked; KVT_NS_NONE: none of it is known */
    uint32_t groups; /* PURGE_NS: walked so far, or being walked */
    uint16_t op;     /* asked by: KVT_OP_PURGE, KVT_OP_PURGE_NS */
    uint32_t cursor; /* next index entry to look at; namespace purges only */
    uint32_t count;  /* journal items */
    uint8_t done[KVT_STORE_ROOTS_MAX]; /* journaled there */
    uint8_t going[KVT_STORE_ROOTS_MAX];
    uint8_t held[KVT_STORE_ROOTS_MAX];                 /* erasing waits there for the journal */
    struct kvt_store_purge *self[KVT_STORE_ROOTS_MAX]; /* callback contexts, one per root */
    int status;
    uint8_t used;
    uint8_t whole;  /* namespace */
    uint8_t silent; /* nobody asked: for a root that came later, or records that scrub found bad */
    uint8_t buried; /* the latter */
    uint8_t floors; /* silent: of times to live */
    struct kvt_journal_item *items;
};

/* ---- store_purge.c */
__attribute__((warn_unused_result)) int kvt_purges_init(struct kvt_store *store);
void kvt_purges_destroy(struct kvt_store *store);
/* Returns whether it wants to run again at once. */
bool kvt_purges_run(struct kvt_store *store);
void kvt_purges_end_all(struct kvt_store *store, int status);
bool kvt_purges_free(const struct kvt_store *store);
/* Journal everywhere, unasked, that records below some sequences are gone: what is to be filled
 * before the store runs on. NULL: not now; one is under way, or callers' purges take all places. */
struct kvt_store_purge *kvt_purges_floor(struct kvt_store *store);
/* Records of sequences below `value`: all (ns NULL), or those of a namespace. false: it is full. */
bool kvt_purges_floor_add(struct kvt_store_purge *purge, const uint8_t *ns, uint64_t value);
/* Purges of the time before a root came: journal them there. */
void kvt_purges_off_journal(struct kvt_store *store, uint32_t root);
/* Records of one root that are damaged are not to be found at the next open either: journal that.
 * Nothing happens when purges keep the journal busy, or after too many: they are found again. */
void kvt_purges_bury(struct kvt_store *store, uint32_t root, const struct kvt_journal_item *items,
                     uint32_t count);

#endif
