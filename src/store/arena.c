/* Two-level segregated fit over runs of pages. Class c holds free runs of pages in
 * [floor(c), floor(c + 1)); two bitmap levels find the next class that is not empty.
 * Invariants: arena.h. Threads: the store's owner.
 */
#include "store/arena.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"

/* Runs of the request's own class that are tried before a larger one. */
#define OWN_CLASS_LOOKS 16u

static uint32_t level_of(uint32_t pages)
{
    return 31u - (uint32_t)__builtin_clz(pages);
}

static uint32_t class_of(uint32_t pages)
{
    uint32_t level = level_of(pages);
    uint32_t step = level >= 3 ? (pages >> (level - 3)) & 7u : (pages << (3 - level)) & 7u;

    return level * 8u + step;
}

static uint32_t node_take(struct kvt_arena *arena)
{
    uint32_t run = arena->unused_first;

    if (run != KVT_RUN_NONE)
        arena->unused_first = arena->runs[run].free_next;
    else if (arena->touched < arena->capacity) {
        run = arena->touched++;
        memset(&arena->runs[run], 0, sizeof(arena->runs[run]));
    }
    return run;
}

static void node_put(struct kvt_arena *arena, uint32_t run)
{
    struct kvt_run *r = &arena->runs[run];

    r->state = KVT_RUN_UNUSED;
    if (r->retired)
        return;
    r->free_next = arena->unused_first;
    arena->unused_first = run;
}

static void free_insert(struct kvt_arena *arena, uint32_t run)
{
    struct kvt_run *r = &arena->runs[run];
    struct kvt_region *region = &arena->regions[r->region];
    uint32_t c = class_of(r->pages);

    r->state = KVT_RUN_FREE;
    r->free_prev = KVT_RUN_NONE;
    r->free_next = region->heads[c];
    if (r->free_next != KVT_RUN_NONE)
        arena->runs[r->free_next].free_prev = run;
    region->heads[c] = run;
    region->step_bits[c / 8] |= (uint8_t)(1u << (c % 8));
    region->level_bits |= 1u << (c / 8);
}

static void free_remove(struct kvt_arena *arena, uint32_t run)
{
    struct kvt_run *r = &arena->runs[run];
    struct kvt_region *region = &arena->regions[r->region];
    uint32_t c = class_of(r->pages);

    if (r->free_next != KVT_RUN_NONE)
        arena->runs[r->free_next].free_prev = r->free_prev;
    if (r->free_prev != KVT_RUN_NONE) {
        arena->runs[r->free_prev].free_next = r->free_next;
        return;
    }
    region->heads[c] = r->free_next;
    if (r->free_next != KVT_RUN_NONE)
        return;
    region->step_bits[c / 8] &= (uint8_t) ~(1u << (c % 8));
    if (!region->step_bits[c / 8])
        region->level_bits &= ~(1u << (c / 8));
}

static void region_init(struct kvt_arena *arena, int number, uint32_t first_page, uint32_t pages)
{
    struct kvt_region *region = &arena->regions[number];
    struct kvt_run *r;

    region->pages = pages;
    region->free_pages = pages;
    region->first = KVT_RUN_NONE;
    for (unsigned i = 0; i < KVT_ARENA_CLASSES; i++)
        region->heads[i] = KVT_RUN_NONE;
    if (!pages)
        return;
    region->first = node_take(arena);
    r = &arena->runs[region->first];
    r->page = first_page;
    r->pages = pages;
    r->prev = r->next = KVT_RUN_NONE;
    r->region = (uint8_t)number;
    free_insert(arena, region->first);
}

int kvt_arena_init(struct kvt_arena *arena, uint32_t cache_pages, uint32_t staging_pages,
                   uint32_t nodes)
{
    int err;

    memset(arena, 0, sizeof(*arena));
    arena->unused_first = KVT_RUN_NONE;
    err = kvt_arena_grow(arena, KVT_MAX(nodes, 4u));
    if (err)
        return err;
    region_init(arena, KVT_REGION_CACHE, 0, cache_pages);
    region_init(arena, KVT_REGION_STAGING, cache_pages, staging_pages);
    return 0;
}

void kvt_arena_destroy(struct kvt_arena *arena)
{
    free(arena->runs);
    memset(arena, 0, sizeof(*arena));
}

int kvt_arena_grow(struct kvt_arena *arena, uint32_t nodes)
{
    struct kvt_run *runs;

    if (nodes <= arena->capacity)
        return 0;
    if (nodes >= KVT_RUN_NONE)
        return KVT_E_LIMIT;
    runs = realloc(arena->runs, (size_t)nodes * sizeof(*runs));
    if (!runs)
        return -ENOMEM;
    arena->runs = runs;
    arena->capacity = nodes;
    return 0;
}

/* A free run of at least `pages`, not yet removed from its list. */
static uint32_t find_free(const struct kvt_arena *arena, int number, uint32_t pages)
{
    const struct kvt_region *region = &arena->regions[number];
    uint32_t c = class_of(pages);
    uint32_t run = region->heads[c];
    uint32_t bits;

    for (unsigned i = 0; run != KVT_RUN_NONE && i < OWN_CLASS_LOOKS; i++) {
        if (arena->runs[run].pages >= pages)
            return run;
        run = arena->runs[run].free_next;
    }
    bits = region->step_bits[c / 8] & (0xffu << (c % 8 + 1)) & 0xffu;
    if (bits)
        return region->heads[c / 8 * 8 + (uint32_t)__builtin_ctz(bits)];
    bits = c / 8 == 31 ? 0 : region->level_bits & (~0u << (c / 8 + 1));
    if (bits) {
        uint32_t level = (uint32_t)__builtin_ctz(bits);

        return region->heads[level * 8 + (uint32_t)__builtin_ctz(region->step_bits[level])];
    }
    for (; run != KVT_RUN_NONE; run = arena->runs[run].free_next)
        if (arena->runs[run].pages >= pages)
            return run;
    return KVT_RUN_NONE;
}

bool kvt_arena_fits(const struct kvt_arena *arena, int region, uint32_t pages)
{
    return find_free(arena, region, pages) != KVT_RUN_NONE;
}

uint32_t kvt_arena_alloc(struct kvt_arena *arena, int region, uint32_t pages)
{
    uint32_t run = find_free(arena, region, pages);
    struct kvt_run *r;

    if (run == KVT_RUN_NONE)
        return run;
    free_remove(arena, run);
    r = &arena->runs[run];
    if (r->pages > pages) {
        uint32_t rest = node_take(arena);

        if (rest != KVT_RUN_NONE) {
            struct kvt_run *q = &arena->runs[rest];

            q->page = r->page + pages;
            q->pages = r->pages - pages;
            q->region = r->region;
            q->prev = run;
            q->next = r->next;
            if (q->next != KVT_RUN_NONE)
                arena->runs[q->next].prev = rest;
            r->next = rest;
            r->pages = pages;
            free_insert(arena, rest);
        }
    }
    r->state = KVT_RUN_TAKEN;
    arena->regions[region].free_pages -= r->pages;
    arena->regions[region].taken++;
    return run;
}

/* Append the run behind `run` to it. */
static void swallow_next(struct kvt_arena *arena, uint32_t run)
{
    struct kvt_run *r = &arena->runs[run];
    uint32_t gone = r->next;
    struct kvt_run *q = &arena->runs[gone];

    r->pages += q->pages;
    r->next = q->next;
    if (r->next != KVT_RUN_NONE)
        arena->runs[r->next].prev = run;
    node_put(arena, gone);
}

void kvt_arena_free(struct kvt_arena *arena, uint32_t run)
{
    struct kvt_run *r = &arena->runs[run];
    struct kvt_region *region = &arena->regions[r->region];

    region->free_pages += r->pages;
    region->taken--;
    if (r->next != KVT_RUN_NONE && arena->runs[r->next].state == KVT_RUN_FREE) {
        free_remove(arena, r->next);
        swallow_next(arena, run);
    }
    if (r->prev != KVT_RUN_NONE && arena->runs[r->prev].state == KVT_RUN_FREE) {
        run = r->prev;
        free_remove(arena, run);
        swallow_next(arena, run);
    }
    free_insert(arena, run);
}

static int check_region(const struct kvt_arena *arena, int number, char *why, size_t why_len)
{
    const struct kvt_region *region = &arena->regions[number];
    uint32_t page = number == KVT_REGION_CACHE ? 0 : arena->regions[KVT_REGION_CACHE].pages;
    uint32_t end = page + region->pages;
    uint32_t free_pages = 0, taken = 0, free_runs = 0, listed = 0;
    uint32_t prev = KVT_RUN_NONE;

    for (uint32_t i = region->first; i != KVT_RUN_NONE; prev = i, i = arena->runs[i].next) {
        const struct kvt_run *r = &arena->runs[i];
        bool free_now = r->state == KVT_RUN_FREE;

        if (r->prev != prev || r->page != page || r->state == KVT_RUN_UNUSED ||
            r->region != number || !r->pages ||
            (free_now && prev != KVT_RUN_NONE && arena->runs[prev].state == KVT_RUN_FREE)) {
            snprintf(why, why_len, "run %u of region %d is out of place", i, number);
            return KVT_E_CORRUPT;
        }
        page += r->pages;
        free_pages += free_now ? r->pages : 0;
        free_runs += free_now;
        taken += !free_now;
    }
    for (uint32_t c = 0; c < KVT_ARENA_CLASSES; c++) {
        bool bit = region->step_bits[c / 8] >> (c % 8) & 1;

        for (uint32_t i = region->heads[c]; i != KVT_RUN_NONE; i = arena->runs[i].free_next) {
            if (arena->runs[i].state != KVT_RUN_FREE || class_of(arena->runs[i].pages) != c)
                free_runs = UINT32_MAX;
            listed++;
        }
        if (bit != (region->heads[c] != KVT_RUN_NONE) ||
            (bit && !(region->level_bits >> (c / 8) & 1)))
            free_runs = UINT32_MAX;
    }
    if (page != end || free_pages != region->free_pages || taken != region->taken ||
        free_runs != listed) {
        snprintf(why, why_len, "region %d: sums or free lists do not agree", number);
        return KVT_E_CORRUPT;
    }
    return 0;
}

int kvt_arena_check(const struct kvt_arena *arena, char *why, size_t why_len)
{
    for (int i = 0; i < KVT_REGIONS; i++) {
        int err = check_region(arena, i, why, why_len);

        if (err)
            return err;
    }
    return 0;
}
