/* Open addressing with linear probing over 32-bit cells. A cell holds an entry number and, in the
 * bits that numbers of this capacity leave over, a piece of the fingerprint: most probes end
 * without touching an entry. Removal shifts the cluster back, so there are no tombstones and
 * nothing ever has to be rehashed on the data path.
 *
 * The home of a fingerprint is a multiplication (word0 * cells >> 64), so the table need not be a
 * power of two. Zero pages are a valid empty table and untouched entries cost no memory: capacity
 * is an address range until it is used.
 * Invariants: index.h. Threads: the store's owner.
 */
#include "store/index.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_NO_STREAM
#include <xxhash.h>

#include "base/checked.h"
#include "kvtier/error.h"

#define BATCH 16u /* lookups in flight: about the line-fill buffers of a core */

static uint32_t cells_for(uint32_t capacity)
{
    return capacity + capacity / 3 + 16; /* at most 3/4 full */
}

static uint32_t number_mask_for(uint32_t capacity)
{
    uint32_t mask = 1;

    while (mask < capacity + 1u)
        mask = mask << 1 | 1u;
    return mask;
}

static uint32_t home_of(const struct kvt_index *index, struct kvt_fp fp)
{
    if (index->collide != KVT_COLLIDE_NONE)
        return 0;
    return (uint32_t)(((unsigned __int128)fp.word[0] * index->cells) >> 64);
}

static uint32_t tag_of(const struct kvt_index *index, struct kvt_fp fp)
{
    return (uint32_t)(fp.word[1] >> 32) & ~index->number_mask;
}

static bool fp_equal(struct kvt_fp a, struct kvt_fp b)
{
    return a.word[0] == b.word[0] && a.word[1] == b.word[1];
}

static uint32_t step(const struct kvt_index *index, uint32_t cell)
{
    return cell + 1 == index->cells ? 0 : cell + 1;
}

int kvt_index_init(struct kvt_index *index, uint32_t capacity, uint64_t seed, int collide)
{
    memset(index, 0, sizeof(*index));
    index->seed = seed;
    index->collide = collide;
    index->free_first = KVT_INDEX_NONE;
    return kvt_index_grow(index, capacity ? capacity : 1);
}

void kvt_index_destroy(struct kvt_index *index)
{
    free(index->entries);
    free(index->ranks);
    free(index->table);
    memset(index, 0, sizeof(*index));
}

static void place(struct kvt_index *index, uint32_t entry)
{
    struct kvt_fp fp = index->entries[entry].fp;
    uint32_t cell = home_of(index, fp);

    while (index->table[cell])
        cell = step(index, cell);
    index->table[cell] = tag_of(index, fp) | (entry + 1);
}

int kvt_index_grow(struct kvt_index *index, uint32_t capacity)
{
    struct kvt_index_entry *entries;
    uint32_t *table;
    uint8_t *ranks;

    if (capacity <= index->capacity)
        return 0;
    if (capacity > KVT_INDEX_CAPACITY_MAX)
        return KVT_E_LIMIT;
    table = calloc(cells_for(capacity), sizeof(*table));
    if (!table)
        return -ENOMEM;
    ranks = realloc(index->ranks, capacity);
    if (!ranks) {
        free(table);
        return -ENOMEM;
    }
    index->ranks = ranks; /* more of it than entries does no harm */
    entries = realloc(index->entries, (size_t)capacity * sizeof(*entries));
    if (!entries) {
        free(table);
        return -ENOMEM;
    }
    free(index->table);
    index->entries = entries;
    index->table = table;
    index->capacity = capacity;
    index->cells = cells_for(capacity);
    index->number_mask = number_mask_for(capacity);
    for (uint32_t i = 0; i < index->touched; i++)
        if (entries[i].used)
            place(index, i);
    return 0;
}

struct kvt_fp kvt_index_fingerprint(const struct kvt_index *index, const struct kvt_full_key *key)
{
    XXH128_hash_t hash;

    if (index->collide == KVT_COLLIDE_FP)
        return (struct kvt_fp){{1, 1}};
    hash = XXH3_128bits_withSeed(key, sizeof(*key), index->seed);
    return (struct kvt_fp){{hash.low64, hash.high64}};
}

static uint32_t find_from(const struct kvt_index *index, struct kvt_fp fp, uint32_t cell)
{
    uint32_t tag = tag_of(index, fp);
    uint32_t value;

    for (; (value = index->table[cell]) != 0; cell = step(index, cell)) {
        if ((value & ~index->number_mask) != tag)
            continue;
        value = (value & index->number_mask) - 1;
        if (fp_equal(index->entries[value].fp, fp))
            return value;
    }
    return KVT_INDEX_NONE;
}

uint32_t kvt_index_find(const struct kvt_index *index, struct kvt_fp fp)
{
    return find_from(index, fp, home_of(index, fp));
}

void kvt_index_find_batch(const struct kvt_index *index, const struct kvt_fp *fps, size_t n,
                          uint32_t *found)
{
    uint32_t homes[BATCH];

    for (size_t base = 0; base < n; base += BATCH) {
        size_t count = KVT_MIN(n - base, (size_t)BATCH);

        for (size_t i = 0; i < count; i++) {
            homes[i] = home_of(index, fps[base + i]);
            __builtin_prefetch(&index->table[homes[i]]);
        }
        for (size_t i = 0; i < count; i++) {
            uint32_t tag = tag_of(index, fps[base + i]);
            uint32_t cell = homes[i];
            uint32_t value;

            while ((value = index->table[cell]) != 0 && (value & ~index->number_mask) != tag)
                cell = step(index, cell);
            homes[i] = cell;
            if (value)
                __builtin_prefetch(&index->entries[(value & index->number_mask) - 1]);
        }
        for (size_t i = 0; i < count; i++)
            found[base + i] = find_from(index, fps[base + i], homes[i]);
    }
}

uint32_t kvt_index_insert(struct kvt_index *index, struct kvt_fp fp)
{
    struct kvt_index_entry *e;
    uint32_t entry = index->free_first;

    if (entry != KVT_INDEX_NONE)
        index->free_first = index->entries[entry].next;
    else if (index->touched < index->capacity)
        entry = index->touched++;
    else
        return KVT_INDEX_NONE;
    e = &index->entries[entry];
    memset(e, 0, sizeof(*e));
    e->fp = fp;
    e->parent = KVT_INDEX_NONE;
    e->slot = KVT_INDEX_NONE;
    e->next = KVT_INDEX_NONE;
    e->used = 1;
    index->ranks[entry] = 0;
    index->used++;
    place(index, entry);
    return entry;
}

/* Cell of a living entry. */
static uint32_t cell_of(const struct kvt_index *index, uint32_t entry)
{
    uint32_t cell = home_of(index, index->entries[entry].fp);

    while ((index->table[cell] & index->number_mask) != entry + 1)
        cell = step(index, cell);
    return cell;
}

/* Empty a cell and move later members of its cluster back so that each stays reachable. */
static void close_gap(struct kvt_index *index, uint32_t gap)
{
    for (uint32_t cell = step(index, gap);; cell = step(index, cell)) {
        uint32_t value = index->table[cell];
        uint32_t home;
        bool stays;

        if (!value)
            break;
        home = home_of(index, index->entries[(value & index->number_mask) - 1].fp);
        /* It stays when its home lies cyclically in (gap, cell]. */
        stays = gap < cell ? (home > gap && home <= cell) : (home > gap || home <= cell);
        if (stays)
            continue;
        index->table[gap] = value;
        gap = cell;
    }
    index->table[gap] = 0;
}

void kvt_index_remove(struct kvt_index *index, uint32_t entry)
{
    struct kvt_index_entry *e = &index->entries[entry];

    kvt_index_unlink(index, entry);
    close_gap(index, cell_of(index, entry));
    e->used = 0;
    e->next = index->free_first;
    index->free_first = entry;
    index->used--;
}

bool kvt_index_link(struct kvt_index *index, uint32_t entry, uint32_t parent, uint32_t steps_max)
{
    struct kvt_index_entry *e = &index->entries[entry];
    struct kvt_index_entry *p = &index->entries[parent];

    if (entry == parent || p->children == KVT_INDEX_CHILDREN_MAX)
        return false;
    if (e->children) { /* only then can the entry be among its parent's ancestors */
        uint32_t up = p->parent;

        for (; up != KVT_INDEX_NONE; up = index->entries[up].parent)
            if (up == entry || steps_max-- == 0)
                return false;
    }
    e->parent = parent;
    p->children++;
    if (kvt_index_in_dram(e))
        p->dram_children++;
    return true;
}

void kvt_index_unlink(struct kvt_index *index, uint32_t entry)
{
    struct kvt_index_entry *e = &index->entries[entry];

    if (e->parent == KVT_INDEX_NONE)
        return;
    index->entries[e->parent].children--;
    if (kvt_index_in_dram(e))
        index->entries[e->parent].dram_children--;
    e->parent = KVT_INDEX_NONE;
}

static void in_dram_changed(struct kvt_index *index, const struct kvt_index_entry *e, bool had)
{
    bool has = kvt_index_in_dram(e);

    if (e->parent != KVT_INDEX_NONE && had != has)
        index->entries[e->parent].dram_children += has ? 1 : -1;
}

void kvt_index_set_slot(struct kvt_index *index, uint32_t entry, uint32_t slot)
{
    struct kvt_index_entry *e = &index->entries[entry];
    bool had = kvt_index_in_dram(e);

    e->slot = slot & KVT_INDEX_NONE;
    in_dram_changed(index, e, had);
}

void kvt_index_set_filling(struct kvt_index *index, uint32_t entry, uint32_t filling)
{
    struct kvt_index_entry *e = &index->entries[entry];
    bool had = kvt_index_in_dram(e);

    e->filling = filling & KVT_INDEX_FILLING_MAX;
    in_dram_changed(index, e, had);
}

uint64_t kvt_index_bytes(const struct kvt_index *index)
{
    return (uint64_t)index->touched * (sizeof(*index->entries) + sizeof(*index->ranks)) +
           (uint64_t)index->cells * sizeof(*index->table);
}

static int check_entry(const struct kvt_index *index, uint32_t i, const uint32_t *children,
                       const uint32_t *dram_children, char *why, size_t why_len)
{
    const struct kvt_index_entry *e = &index->entries[i];

    if (kvt_index_find(index, e->fp) != i)
        snprintf(why, why_len, "entry %u is not found under its fingerprint", i);
    else if (e->children != children[i] || e->dram_children != dram_children[i])
        snprintf(why, why_len, "entry %u counts %u/%u children, there are %u/%u", i,
                 (unsigned)e->children, (unsigned)e->dram_children, children[i], dram_children[i]);
    else
        return 0;
    return KVT_E_CORRUPT;
}

int kvt_index_check(const struct kvt_index *index, char *why, size_t why_len)
{
    uint32_t *children = calloc((size_t)index->touched * 2 + 1, sizeof(*children));
    uint32_t *dram_children = children ? children + index->touched : NULL;
    uint32_t used = 0;
    int err = 0;

    if (!children)
        return -ENOMEM;
    for (uint32_t i = 0; i < index->touched && !err; i++) {
        const struct kvt_index_entry *e = &index->entries[i];

        if (!e->used)
            continue;
        used++;
        if (e->parent == KVT_INDEX_NONE)
            continue;
        if (e->parent >= index->touched || !index->entries[e->parent].used) {
            snprintf(why, why_len, "entry %u has a parent that is not there", i);
            err = KVT_E_CORRUPT;
            break;
        }
        children[e->parent]++;
        dram_children[e->parent] += kvt_index_in_dram(e);
    }
    if (!err && used != index->used) {
        snprintf(why, why_len, "index counts %u entries, there are %u", index->used, used);
        err = KVT_E_CORRUPT;
    }
    for (uint32_t i = 0; i < index->touched && !err; i++)
        if (index->entries[i].used)
            err = check_entry(index, i, children, dram_children, why, why_len);
    free(children);
    return err;
}
