/* Records read back when nobody asks for them (store_scrub.c), and a second look at those that were
 * found damaged (store_suspect.c).
 * Threads: the store's owner.
 */
#ifndef KVT_STORE_STORE_SCRUB_H
#define KVT_STORE_STORE_SCRUB_H

#include <stdbool.h>

#include "store/index.h"
#include "store/l2.h"

struct kvt_store;

#define KVT_STORE_SCRUB_ITEMS 64u

struct kvt_store_scrub_item { /* one record being read: its entry as it was at the start */
    struct kvt_l2_read read;
    struct kvt_fp fp;
    uint32_t entry;
    uint32_t root;
};

struct kvt_store_scrub { /* store_scrub.c */
    struct kvt_store_scrub_item items[KVT_STORE_SCRUB_ITEMS];
    uint32_t count; /* of this batch */
    uint32_t left;  /* of them, not read yet */
    uint8_t *buffer;
    uint32_t buffer_bytes;
    uint32_t cursor; /* next entry to look at; 0: a pass is about to begin */
    int64_t due_ns;  /* not before */
    int64_t pass_ns; /* the pass began */
};

#define KVT_STORE_SUSPECTS 64u

struct kvt_store_suspect { /* a place on disk whose record was found damaged */
    struct kvt_fp fp;
    struct kvt_l2_where where;
    uint32_t root, pages;
};

enum kvt_suspect_step {
    KVT_SUSPECT_NONE = 0,
    KVT_SUSPECT_RECORD,
    KVT_SUSPECT_TRAILER,
    KVT_SUSPECT_FOOTER
};

struct kvt_store_suspects { /* store_suspect.c */
    struct kvt_store_suspect ring[KVT_STORE_SUSPECTS];
    uint32_t head, count;
    enum kvt_suspect_step step; /* of the one at head */
    uint32_t looks;             /* its record has been read that often */
    bool reading;
    struct kvt_l2_read read;
    uint32_t footer_count;
    uint64_t footer_checksum;
    struct kvt_journal_item bad[KVT_STORE_SUSPECTS]; /* to be journaled ... */
    uint8_t bad_root[KVT_STORE_SUSPECTS];            /* ... there */
    uint32_t bad_count;
};

/* ---- store_scrub.c */
/* Records may be that long now. */
__attribute__((warn_unused_result)) int kvt_scrub_grow(struct kvt_store *store,
                                                       uint32_t record_bytes);
void kvt_scrub_destroy(struct kvt_store *store);
/* Returns the next time to run. */
int64_t kvt_scrub_run(struct kvt_store *store);

/* ---- store_suspect.c */
/* A record on disk was found damaged: look again, and see to it that it stays away. Before the
 * entry loses its place. */
void kvt_suspect_entry(struct kvt_store *store, uint32_t entry);
void kvt_suspect_place(struct kvt_store *store, uint32_t root, struct kvt_l2_where where,
                       uint32_t pages, struct kvt_fp fp);
/* True: a read is under way, into the buffer of scrub. */
bool kvt_suspects_run(struct kvt_store *store);

#endif
