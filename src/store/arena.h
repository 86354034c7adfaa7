/* Run allocator: carves two regions of the arena into runs of 4 KiB pages with exact lengths.
 *
 * Rules
 *  1. Everything it knows stands in its own table of runs, never in the arena: clients write there.
 *  2. A run is free or allocated; neighbours of a free run are allocated (freeing coalesces).
 *  3. A request takes the smallest size class that surely fits, after a short look into its own
 *     class, where runs of exactly its length gather when records have few lengths.
 *  4. When the table has no node left to split with, the whole run is given: never a failure.
 *  5. A run number is a name that lives from alloc to free; its node may then name another run.
 * Threads: the store's owner. Allocates in init and grow only. Does not know what runs hold.
 */
#ifndef KVT_STORE_ARENA_H
#define KVT_STORE_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVT_RUN_NONE 0x0fffffffu
#define KVT_ARENA_CLASSES 256u /* 32 powers of two, 8 steps each */

enum { KVT_REGION_CACHE = 0, KVT_REGION_STAGING = 1, KVT_REGIONS = 2 };
enum { KVT_RUN_UNUSED = 0, KVT_RUN_FREE = 1, KVT_RUN_TAKEN = 2 };

struct kvt_run {
    uint32_t page; /* first page, of the whole arena */
    uint32_t pages;
    uint32_t prev, next;           /* physical neighbours in the region */
    uint32_t free_prev, free_next; /* list of its class when FREE; free_next also when UNUSED */
    uint8_t state;
    uint8_t region;
    uint8_t retired; /* the node may never name a run again */
};

struct kvt_region {
    uint32_t pages;
    uint32_t free_pages;
    uint32_t taken; /* runs allocated */
    uint32_t first; /* run at the region's start */
    uint32_t level_bits;
    uint8_t step_bits[32];
    uint32_t heads[KVT_ARENA_CLASSES];
};

struct kvt_arena {
    struct kvt_run *runs;
    uint32_t capacity;
    uint32_t touched;
    uint32_t unused_first;
    struct kvt_region regions[KVT_REGIONS];
};

/* Two regions side by side; either may have no page. nodes: at least 2 per region.
 * 0, -ENOMEM, KVT_E_LIMIT. */
__attribute__((warn_unused_result)) int kvt_arena_init(struct kvt_arena *arena,
                                                       uint32_t cache_pages, uint32_t staging_pages,
                                                       uint32_t nodes);
void kvt_arena_destroy(struct kvt_arena *arena);
__attribute__((warn_unused_result)) int kvt_arena_grow(struct kvt_arena *arena, uint32_t nodes);

/* A run of at least `pages`, or KVT_RUN_NONE. */
uint32_t kvt_arena_alloc(struct kvt_arena *arena, int region, uint32_t pages);
void kvt_arena_free(struct kvt_arena *arena, uint32_t run);

/* Whether an allocation would succeed now. */
bool kvt_arena_fits(const struct kvt_arena *arena, int region, uint32_t pages);

__attribute__((warn_unused_result)) int kvt_arena_check(const struct kvt_arena *arena, char *why,
                                                        size_t why_len);

#endif
