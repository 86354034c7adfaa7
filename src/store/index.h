/* Index: which blocks exist, where they are, and who their parent is. One entry of 40 bytes per
 * block, one byte beside it, and 4 bytes per cell of an open-addressing table that is three
 * quarters full at most: 46.4 bytes a block.
 *
 * Rules
 *  1. A block is named by a keyed 16-byte fingerprint of its 56-byte full key. The seed is secret,
 *     so equal fingerprints of different keys do not happen by themselves; yet every slot and every
 *     record on disk carries the full key, and that is compared before bytes are handed out.
 *  2. Capacity changes in kvt_index_init() and kvt_index_grow() only; inserting never allocates.
 *  3. Entry numbers are stable while the entry lives, also when the index grows.
 *  4. Parent links never form a cycle: kvt_index_link() refuses the one that would close it.
 *  5. An entry without copy (slot, disk or somebody filling it) stays as a ghost while it has
 *     children, so that their parent link keeps its meaning.
 * Threads: the store's owner. Does not: count bytes, know segments or slots (it only holds their
 * numbers), decide what to evict.
 */
#ifndef KVT_STORE_INDEX_H
#define KVT_STORE_INDEX_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/record.h"

#define KVT_INDEX_NONE 0x0fffffffu /* 28 bits: no entry, no slot */
#define KVT_INDEX_CAPACITY_MAX 0x0ffffff0u
#define KVT_INDEX_SEGMENT_MAX ((1u << 20) - 1)
#define KVT_INDEX_PAGE_MAX ((1u << 16) - 1)
#define KVT_INDEX_FILLING_MAX 15u
#define KVT_INDEX_FREQ_MAX 3u
#define KVT_INDEX_CHILDREN_MAX ((1u << 20) - 1)

struct kvt_fp {
    uint64_t word[2];
};

struct kvt_index_entry {
    struct kvt_fp fp;
    uint64_t parent : 28; /* entry, or NONE */
    uint64_t slot : 28;   /* VALID or READING slot, or NONE */
    uint64_t filling : 4; /* slots that clients are filling for this key */
    uint64_t used : 1;
    uint64_t on_disk : 1; /* root, segment, page hold */
    uint64_t pinned : 1;  /* by kvt_pin */
    uint64_t raced : 1; /* a COMMIT came while others were filling: their sequences may be older */

    uint64_t next : 28; /* on disk: the next entry of its segment; free: the next free entry */
    uint64_t segment : 20;
    uint64_t page : 16;

    uint64_t ns : 12;
    uint64_t map : 4;
    uint64_t freq : 2; /* recent hits, saturating */
    uint64_t root : 4;
    uint64_t hit : 1;       /* asked for since its record was written to disk */
    uint64_t older : 1;     /* the record on disk is the one that the slot's took the place of */
    uint64_t children : 20; /* entries whose parent this is */
    uint64_t dram_children : 20; /* of them, those with a slot, or being filled */
};
static_assert(sizeof(struct kvt_index_entry) == 40, "40 bytes an entry");

/* Test switch: force what a good hash never does. */
enum kvt_index_collide {
    KVT_COLLIDE_NONE = 0,
    KVT_COLLIDE_HOME = 1, /* every key has the same place in the table */
    KVT_COLLIDE_FP = 2    /* every key has the same fingerprint */
};

struct kvt_index {
    struct kvt_index_entry *entries;
    uint8_t *ranks;       /* by entry: shard of its key, for kvt_handle_usage() */
    uint32_t *table;      /* 0 empty, else tag bits | (entry + 1) */
    uint32_t capacity;    /* entries */
    uint32_t cells;       /* of the table */
    uint32_t number_mask; /* bits of a cell that hold entry + 1 */
    uint32_t used;
    uint32_t touched; /* entries ever used: memory beyond is untouched */
    uint32_t free_first;
    uint64_t seed;
    int collide;
};

/* An index for `capacity` blocks. 0, -ENOMEM, KVT_E_LIMIT. */
__attribute__((warn_unused_result)) int kvt_index_init(struct kvt_index *index, uint32_t capacity,
                                                       uint64_t seed, int collide);
void kvt_index_destroy(struct kvt_index *index);

/* Make room for `capacity` blocks at least; smaller than now: nothing. On error nothing changed. */
__attribute__((warn_unused_result)) int kvt_index_grow(struct kvt_index *index, uint32_t capacity);

struct kvt_fp kvt_index_fingerprint(const struct kvt_index *index, const struct kvt_full_key *key);

/* Entry of a fingerprint, or KVT_INDEX_NONE. */
uint32_t kvt_index_find(const struct kvt_index *index, struct kvt_fp fp);

/* The same for n of them, the memory of later ones fetched while earlier ones are compared. */
void kvt_index_find_batch(const struct kvt_index *index, const struct kvt_fp *fps, size_t n,
                          uint32_t *found);

/* A new, zeroed entry for a fingerprint that is not there; no parent, no slot, not on disk.
 * KVT_INDEX_NONE when the index is full. */
uint32_t kvt_index_insert(struct kvt_index *index, struct kvt_fp fp);

/* Remove an entry without children, slot or disk place. Its parent link is undone. */
void kvt_index_remove(struct kvt_index *index, uint32_t entry);

/* Set the parent of an entry that has none. false (and no link) when it would close a cycle, the
 * walk to the root exceeds steps_max, or the parent has too many children: the block then lives
 * without its parent's protection. */
bool kvt_index_link(struct kvt_index *index, uint32_t entry, uint32_t parent, uint32_t steps_max);
void kvt_index_unlink(struct kvt_index *index, uint32_t entry);

/* Set or clear the slot of an entry, or the number of clients that fill it; both keep the parent's
 * dram_children. */
void kvt_index_set_slot(struct kvt_index *index, uint32_t entry, uint32_t slot);
void kvt_index_set_filling(struct kvt_index *index, uint32_t entry, uint32_t filling);

/* Memory that is really used: touched entries and the table. */
uint64_t kvt_index_bytes(const struct kvt_index *index);

/* Every entry is found under its fingerprint, counts and links agree. 0 or KVT_E_CORRUPT. */
__attribute__((warn_unused_result)) int kvt_index_check(const struct kvt_index *index, char *why,
                                                        size_t why_len);

static inline struct kvt_index_entry *kvt_index_at(const struct kvt_index *index, uint32_t entry)
{
    return &index->entries[entry];
}

/* It is in DRAM, or about to be: its parent stays there too. */
static inline bool kvt_index_in_dram(const struct kvt_index_entry *entry)
{
    return entry->slot != KVT_INDEX_NONE || entry->filling;
}

/* A block that can be handed out, now or after a read. */
static inline bool kvt_index_present(const struct kvt_index_entry *entry)
{
    return entry->slot != KVT_INDEX_NONE || entry->on_disk;
}

#endif
