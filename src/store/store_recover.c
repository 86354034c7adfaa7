/* Opening the roots: what the logs find becomes the index; what they recycle leaves it.
 *
 * While recovery lasts, each entry's sequence is kept aside (the index has no room for it): of two
 * records of one key the higher sequence counts. A parent that has not been found yet is a ghost
 * entry until it is; parents that never turn up leave their descendants to the sweep.
 * Threads: the store's owner; recovery may allocate, the callbacks afterwards do not.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"
#include "store/store_recycle.h"

#define RECOVER_LINK_STEPS 65536u
#define CAPACITY_FIRST 1024u

static void evicted(void *ctx, uint32_t segment)
{
    struct kvt_store_disk *disk = ctx;
    struct kvt_store *store = disk->store;
    uint32_t entry;

    if (segment >= disk->segments)
        return;
    store->counts.evict_disk_segments++;
    kvt_drain_lost(disk, segment);
    while ((entry = disk->heads[segment]) != KVT_INDEX_NONE) {
        store->counts.evict_disk_blocks++;
        store->sweep_on |= kvt_index_at(&store->index, entry)->children > 0;
        kvt_entry_give_up(store, entry);
        kvt_entry_settle(store, entry);
    }
    disk->filled -= disk->uses[segment].put != 0;
    disk->uses[segment].put = 0;
}

/* Writes wait for a segment and none is drained: what the log takes then. */
static uint32_t choose(void *ctx)
{
    return kvt_recycle_emptiest(ctx);
}

static bool may_evict(void *ctx, uint32_t segment)
{
    const struct kvt_store_disk *disk = ctx;

    if (disk->joining)
        return false; /* what it found there is not in the index yet */
    return segment >= disk->segments || !disk->pinned[segment];
}

static int grow_words(void **array, uint32_t from, uint32_t to, size_t size)
{
    uint8_t *grown = realloc(*array, (size_t)to * size);

    if (!grown)
        return -ENOMEM;
    memset(grown + (size_t)from * size, 0, (size_t)(to - from) * size);
    *array = grown;
    return 0;
}

static int segments_grow(struct kvt_store_disk *disk, uint32_t segments)
{
    if (segments <= disk->segments)
        return 0;
    if (segments > KVT_INDEX_SEGMENT_MAX + 1)
        return KVT_E_LIMIT;
    if (grow_words((void **)&disk->heads, disk->segments, segments, sizeof(uint32_t)) ||
        grow_words((void **)&disk->pinned, disk->segments, segments, sizeof(uint32_t)) ||
        grow_words((void **)&disk->uses, disk->segments, segments, sizeof(*disk->uses)))
        return -ENOMEM;
    for (uint32_t i = disk->segments; i < segments; i++)
        disk->heads[i] = KVT_INDEX_NONE;
    disk->segments = segments;
    return 0;
}

/* Room for one more entry, and for its sequence. */
static int entries_grow(struct kvt_store *store)
{
    uint32_t capacity = store->index.capacity;
    int err = 0;

    if (store->index.used + 1 >= capacity && !store->params.blocks_max) {
        capacity = (uint32_t)KVT_MIN((uint64_t)capacity * 2, (uint64_t)KVT_INDEX_CAPACITY_MAX);
        err = kvt_index_grow(&store->index, capacity);
    }
    if (err || store->recover_capacity >= capacity)
        return err;
    err = grow_words((void **)&store->recover_sequence, store->recover_capacity, capacity,
                     sizeof(uint64_t));
    if (!err)
        err = grow_words((void **)&store->recover_generation, store->recover_capacity, capacity,
                         sizeof(uint64_t));
    if (!err)
        store->recover_capacity = capacity;
    return err;
}

static uint32_t entry_for(struct kvt_store *store, uint32_t ns, const struct kvt_full_key *key)
{
    uint32_t entry = kvt_entry_find(store, key);

    if (entry != KVT_INDEX_NONE)
        return entry;
    if (entries_grow(store))
        return KVT_INDEX_NONE;
    return kvt_entry_get(store, ns, key);
}

static void link_parent(struct kvt_store *store, uint32_t entry, uint32_t ns,
                        const struct kvt_entry *record)
{
    struct kvt_full_key key = record->key;
    uint32_t parent;

    if (!record->parent_len || kvt_index_at(&store->index, entry)->parent != KVT_INDEX_NONE)
        return;
    memcpy(key.hash, record->parent, sizeof(key.hash));
    key.hash_len = record->parent_len;
    parent = entry_for(store, ns, &key);
    if (parent == KVT_INDEX_NONE)
        return;
    if (!kvt_index_link(&store->index, entry, parent, RECOVER_LINK_STEPS))
        kvt_entry_settle(store, parent);
}

static bool newer(const struct kvt_store *store, uint32_t entry, uint64_t sequence,
                  uint64_t generation)
{
    if (sequence != store->recover_sequence[entry])
        return sequence > store->recover_sequence[entry];
    return generation > store->recover_generation[entry];
}

static void found(void *ctx, const struct kvt_entry *record, uint32_t segment, uint64_t generation)
{
    struct kvt_store_disk *disk = ctx;
    struct kvt_store *store = disk->store;
    struct kvt_l2_where where = {.segment = segment, .page = record->page};
    uint32_t ns = kvt_namespaces_add(&store->spaces, record->key.ns, record->key.group);
    uint32_t entry;

    if (ns == KVT_NS_NONE || kvt_map_id_level(record->map) == 0 ||
        !kvt_namespaces_learn(&store->spaces, ns, record->map, record->pages) ||
        segments_grow(disk, segment + 1)) {
        store->counts.recovered_bad++;
        return;
    }
    entry = entry_for(store, ns, &record->key);
    if (entry == KVT_INDEX_NONE) {
        store->counts.recovered_no_room++;
        return;
    }
    if (kvt_index_at(&store->index, entry)->on_disk) {
        if (!newer(store, entry, record->sequence, generation))
            return;
        store->counts.recovered_blocks--;
    }
    if (!kvt_entry_set_disk(store, entry, disk->number, where)) {
        store->counts.recovered_bad++;
        kvt_entry_settle(store, entry);
        return;
    }
    kvt_entry_set_map(store, entry, record->map);
    store->recover_sequence[entry] = record->sequence;
    store->recover_generation[entry] = generation;
    kvt_ttl_found(store, entry, &disk->marks, record->sequence);
    store->counts.recovered_blocks++;
    link_parent(store, entry, ns, record);
}

static_assert(KVT_STORE_ROOT_FILES_MIN == KVT_L2_FILES_MIN, "as the log says");
static_assert(KVT_STORE_ROOT_FILES_MAX == KVT_L2_FILES_MAX, "as the log says");

struct kvt_l2_params kvt_root_params(const struct kvt_store *store,
                                     const struct kvt_store_root *root)
{
    return (struct kvt_l2_params){
        .io = root->io,
        .cap_bytes = root->cap_bytes,
        .name = root->name,
        .clock = store->params.clock,
        .log = store->params.log,
        .batch_bytes_max = KVT_STORE_BATCH_BYTES_MAX,
        .reads_max = KVT_STORE_READS,
        .files_max = root->files_max,
        .evicted = evicted,
        .may_evict = may_evict,
        .choose = choose,
        .room = kvt_segment_room,
        .found_again = kvt_segment_found,
        .again_over = kvt_segment_over,
        .drains = 1,
    };
}

int kvt_disk_init(struct kvt_store *store, uint32_t number, const struct kvt_store_root *root,
                  struct kvt_l2 *l2)
{
    struct kvt_store_disk *disk = &store->disks[number];
    struct kvt_l2_stats stats;
    int err;

    disk->store = store;
    disk->number = number;
    disk->io = root->io;
    disk->cap_bytes = root->cap_bytes;
    disk->l2 = l2;
    kvt_l2_stats(l2, &stats);
    store->counts.recovered_segments += stats.segments_live;
    store->counts.recovered_bad += stats.recovered_bad;
    err = segments_grow(disk, kvt_l2_segment_limit(l2));
    return err ? err : kvt_drain_init(disk);
}

void kvt_disk_forget(struct kvt_store *store, uint32_t number)
{
    struct kvt_store_disk *disk = &store->disks[number];
    struct kvt_store_write *writes = disk->writes;

    kvt_drain_destroy(disk);
    free(disk->heads);
    free(disk->pinned);
    free(disk->uses);
    memset(disk, 0, sizeof(*disk));
    disk->writes = writes; /* they are in the store's free list: kept until close */
}

static int open_root(struct kvt_store *store, uint32_t number, const struct kvt_store_root *root)
{
    struct kvt_store_disk *disk = &store->disks[number];
    struct kvt_l2_params params = kvt_root_params(store, root);
    uint64_t next = 0;
    int err;

    params.seed = store->params.seed + number;
    params.found = found;
    params.ctx = disk;
    disk->store = store;
    disk->number = number;
    kvt_ttl_marks_read(&disk->marks, root->io, &store->params);
    err = kvt_l2_open(&params, &disk->l2, &next);
    if (err) {
        disk->l2 = NULL;
        return err;
    }
    store->sequence_next = KVT_MAX(store->sequence_next, next);
    kvt_ttl_marks_begin(&disk->marks, &store->params, next, kvt_ttl_wanted(&store->params));
    return kvt_disk_init(store, number, root, disk->l2);
}

static void recover_end(struct kvt_store *store)
{
    free(store->recover_sequence);
    free(store->recover_generation);
    store->recover_sequence = store->recover_generation = NULL;
    store->recover_capacity = 0;
}

int kvt_recover(struct kvt_store *store, uint32_t *bad_root)
{
    int err = kvt_index_grow(&store->index,
                             store->params.blocks_max ? store->params.blocks_max : CAPACITY_FIRST);

    store->sequence_next = 1;
    kvt_ttl_open(store);
    for (uint32_t i = 0; i < store->params.root_count && !err; i++) {
        err = entries_grow(store);
        if (!err)
            err = open_root(store, i, &store->params.roots[i]);
        if (!err)
            err = kvt_writes_add_root(store, &store->disks[i]);
        store->disk_count = i + 1;
        if (err && bad_root)
            *bad_root = i;
    }
    recover_end(store);
    store->sweep_on = store->disk_count > 0;
    return err;
}
