/* A root that joins a store that runs: somebody else held it when the store was opened.
 *
 *   kvt_store_root_open()  on any thread: the log is recovered; what it finds is kept in a list
 *   kvt_store_root_join()  on the owner's: the root is in use from here on, for reads and writes
 *   kvt_join_run()         on the owner's, a slice a run: the list becomes index entries
 *
 * So requests are served all the while: those of blocks not taken in yet are misses.
 *
 * Rules
 *  1. What the store has already stays what it is, whatever the root has of it: the same block is
 *     never in two places. Of two records of one key in the root the later one counts; the list is
 *     rid of the others before it is handed over, since entry numbers change hands meanwhile.
 *  2. Purges of the time before, and of the time until the list has been taken in, hold for its
 *     records: they are not taken in, and erased. Nothing is taken in while the root's journal has
 *     yet to say so.
 *  3. No segment of the root is recycled before the list has been taken in: its places would be
 *     those of other records.
 *  4. Numbers that were given before are older than those of the root: sequence_floor.
 * Memory: 72 B a record of the root, in pieces that are freed as they are taken in. Threads: see
 * above; what is opened belongs to one thread at a time.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"

#define LINK_STEPS 4096u
#define PIECE_RECORDS 8192u
#define SLICE_RECORDS 4096u /* taken in by one run: a few milliseconds */

struct found {
    struct kvt_fp fp;
    struct kvt_fp parent;
    uint64_t sequence;
    uint64_t generation;
    uint32_t segment;
    uint32_t page;
    uint32_t pages;
    uint16_t ns;     /* of joining->spaces */
    uint8_t map : 4; /* 0: not to be taken in */
    uint8_t has_parent : 1;
    uint8_t rank;
};

struct piece {
    struct piece *next;
    uint32_t count;
    struct found records[PIECE_RECORDS];
};

struct kvt_store_joining {
    const struct kvt_store *store; /* what of it never changes: parameters, secret of the index */
    struct kvt_store_root root;
    struct kvt_l2 *l2;
    uint64_t next_sequence;
    struct kvt_ttl_marks marks;
    struct kvt_namespaces spaces; /* of the list's records */
    struct piece *first, *last;
    uint64_t count, bad;
    int err;
    /* the owner's */
    uint32_t number;      /* of the root */
    uint32_t at;          /* in the first piece */
    uint32_t purge_count; /* fingerprints known of off_purges[] */
    struct kvt_fp purge_fps[KVT_STORE_OFF_PURGES];
};

/* ---- on the opener's thread ---------------------------------------------------------------- */

static struct found *found_new(struct kvt_store_joining *joining)
{
    struct piece *piece = joining->last;

    if (!piece || piece->count == PIECE_RECORDS) {
        piece = malloc(sizeof(*piece));
        if (!piece)
            return NULL;
        piece->next = NULL;
        piece->count = 0;
        if (joining->last)
            joining->last->next = piece;
        else
            joining->first = piece;
        joining->last = piece;
    }
    joining->count++;
    return &piece->records[piece->count++];
}

/* What is kept of a record; ns: of a table of the caller's choice. */
static struct found describe(const struct kvt_store *store, const struct kvt_entry *record,
                             uint32_t segment, uint64_t generation, uint32_t ns)
{
    struct kvt_full_key parent = record->key;
    struct found f = {.fp = kvt_index_fingerprint(&store->index, &record->key),
                      .sequence = record->sequence,
                      .generation = generation,
                      .segment = segment,
                      .page = record->page,
                      .pages = record->pages,
                      .ns = (uint16_t)ns,
                      .map = record->map & 0xfu,
                      .has_parent = record->parent_len > 0,
                      .rank = kvt_rank_of(&record->key)};

    if (!f.has_parent)
        return f;
    memcpy(parent.hash, record->parent, sizeof(parent.hash));
    parent.hash_len = record->parent_len;
    f.parent = kvt_index_fingerprint(&store->index, &parent);
    return f;
}

static void record_found(void *ctx, const struct kvt_entry *record, uint32_t segment,
                         uint64_t generation)
{
    struct kvt_store_joining *joining = ctx;
    uint32_t ns = kvt_namespaces_add(&joining->spaces, record->key.ns, record->key.group);
    struct found *f;

    if (ns == KVT_NS_NONE || kvt_map_id_level(record->map) == 0) {
        joining->bad++;
        return;
    }
    kvt_namespace_at(&joining->spaces, ns)->blocks++; /* its number stays its own */
    f = joining->err ? NULL : found_new(joining);
    if (!f) {
        joining->err = -ENOMEM;
        return;
    }
    *f = describe(joining->store, record, segment, generation, ns);
}

static int compare_found(const void *a, const void *b)
{
    const struct found *x = *(struct found *const *)a, *y = *(struct found *const *)b;
    int c = memcmp(&x->fp, &y->fp, sizeof(x->fp));

    if (c)
        return c;
    if (x->sequence != y->sequence)
        return x->sequence > y->sequence ? -1 : 1;
    return (x->generation < y->generation) - (x->generation > y->generation);
}

/* Of several records of one key only the latest one is left. */
static int drop_doubles(struct kvt_store_joining *joining)
{
    struct found **all;
    uint64_t n = 0;

    if (joining->count < 2)
        return 0;
    all = malloc(joining->count * sizeof(struct found *));
    if (!all)
        return -ENOMEM;
    for (struct piece *piece = joining->first; piece; piece = piece->next)
        for (uint32_t i = 0; i < piece->count; i++)
            all[n++] = &piece->records[i];
    qsort(all, n, sizeof(struct found *), compare_found);
    for (uint64_t i = 1; i < n; i++)
        if (memcmp(&all[i]->fp, &all[i - 1]->fp, sizeof(all[i]->fp)) == 0)
            all[i]->map = 0;
    free(all);
    return 0;
}

static void list_free(struct kvt_store_joining *joining)
{
    while (joining->first) {
        struct piece *next = joining->first->next;

        free(joining->first);
        joining->first = next;
    }
    kvt_namespaces_destroy(&joining->spaces);
}

void kvt_store_root_discard(struct kvt_store_joining *joining)
{
    if (!joining)
        return;
    if (joining->l2)
        kvt_l2_close(joining->l2);
    list_free(joining);
    free(joining->marks.buffer);
    free(joining);
}

int kvt_store_root_open(const struct kvt_store *store, const struct kvt_store_root *root,
                        struct kvt_store_joining **out)
{
    struct kvt_store_joining *joining = calloc(1, sizeof(*joining));
    struct kvt_l2_params params = kvt_root_params(store, root);
    int err;

    *out = NULL;
    if (!joining)
        return -ENOMEM;
    joining->store = store;
    joining->root = *root;
    params.seed = store->params.seed + (uint64_t)kvt_store_now(store); /* names a new root */
    params.found = record_found;
    params.ctx = joining;
    err = kvt_namespaces_init(&joining->spaces);
    kvt_ttl_marks_read(&joining->marks, root->io, &store->params);
    if (!err)
        err = kvt_l2_open(&params, &joining->l2, &joining->next_sequence);
    if (!err)
        kvt_ttl_marks_begin(&joining->marks, &store->params, joining->next_sequence,
                            kvt_ttl_wanted(&store->params));
    if (!err)
        err = joining->err;
    if (!err)
        err = drop_doubles(joining);
    if (err) {
        kvt_store_root_discard(joining);
        return err;
    }
    *out = joining;
    return 0;
}

/* ---- on the owner's ------------------------------------------------------------------------ */

/* Blocks that had no disk to go to have one now: they are written when they leave DRAM. */
static void note_unsaved(struct kvt_store *store)
{
    for (uint32_t slot = 0; slot < store->slots.arena.touched; slot++) {
        const struct kvt_slot *s = kvt_slot_at(&store->slots, slot);

        if (s->state == KVT_SLOT_VALID && s->write == KVT_SLOT_WRITE_CLEAN &&
            !kvt_index_at(&store->index, s->entry)->on_disk)
            kvt_write_move(store, slot, KVT_SLOT_WRITE_LATER);
    }
}

/* Room for all that the list may bring, parents that are not in it included, at once: an index that
 * grows step by step is built anew at each. */
static int index_room(struct kvt_store *store, uint64_t count)
{
    uint64_t want = (uint64_t)store->index.used + count + count / 8 + 64;

    if (store->params.blocks_max)
        return 0;
    int err =
        kvt_index_grow(&store->index, (uint32_t)KVT_MIN(want, (uint64_t)KVT_INDEX_CAPACITY_MAX));

    if (!err)
        err = kvt_ttl_grow(store);
    return err ? err : kvt_quota_grow(store);
}

int kvt_store_root_join(struct kvt_store *store, struct kvt_store_joining *joining)
{
    uint32_t number = store->disk_count;
    struct kvt_store_disk *disk = &store->disks[number];
    int err;

    if (number == KVT_STORE_ROOTS_MAX || store->closing)
        return KVT_E_LIMIT;
    if (!kvt_purges_free(store) || store->joining)
        return -EAGAIN;
    err = index_room(store, joining->count);
    if (!err)
        err = kvt_disk_init(store, number, &joining->root, joining->l2);
    if (!err)
        err = kvt_writes_add_root(store, disk);
    store->disk_count += !err;
    if (!err)
        err = kvt_tables_grow(store);
    if (err) { /* the write nodes, in the free list already, serve the other roots */
        store->disk_count = number;
        kvt_disk_forget(store, number);
        return err;
    }
    kvt_l2_set_ctx(joining->l2, disk);
    joining->l2 = NULL; /* the store's */
    disk->marks = joining->marks;
    joining->marks.buffer = NULL;
    joining->number = number;
    disk->joining = true;
    store->joining = joining;
    kvt_admission_root(&store->admission, number, joining->root.write_bytes_day);
    kvt_admit_root_left(store, number, &joining->root);
    store->counts.recovered_bad += joining->bad;
    store->params.roots_pending -= store->params.roots_pending > 0;
    store->sequence_next = KVT_MAX(store->sequence_next, joining->next_sequence);
    store->sequence_floor = store->sequence_next;
    store->activity++;
    note_unsaved(store);
    kvt_ns_root_joined(store);
    kvt_purges_off_journal(store, number);
    if (kvt_statfile_open(store)) /* the root is in use all the same */
        kvt_log(&store->params.log, KVT_LOG_WARN, "no memory for the file stats");
    return 0;
}

bool kvt_store_root_joining(const struct kvt_store *store)
{
    return store->joining != NULL;
}

/* Whether a record is covered by a purge that was asked for before it was taken in. */
static bool purged(const struct kvt_store *store, struct kvt_store_joining *joining,
                   const struct found *f, const struct kvt_namespace *ns)
{
    const struct kvt_journal_item *items = store->off_purges;

    if (joining->purge_count > store->off_purge_count)
        joining->purge_count = 0; /* they became one that covers everything */
    while (joining->purge_count < store->off_purge_count) {
        joining->purge_fps[joining->purge_count] =
            kvt_index_fingerprint(&store->index, &items[joining->purge_count].key);
        joining->purge_count++;
    }
    for (uint32_t i = 0; i < joining->purge_count; i++) {
        if (items[i].kind == KVT_JOURNAL_PURGE_ALL)
            return true;
        if (items[i].kind == KVT_JOURNAL_PURGE_NS
                ? memcmp(items[i].key.ns, ns->id, KVT_NS_BYTES) == 0
                : memcmp(&joining->purge_fps[i], &f->fp, sizeof(f->fp)) == 0)
            return true;
    }
    return false;
}

static void link_found(struct kvt_store *store, uint32_t entry, uint32_t ns, const struct found *f)
{
    uint32_t parent;

    if (!f->has_parent || kvt_index_at(&store->index, entry)->parent != KVT_INDEX_NONE)
        return;
    parent = kvt_entry_get_fp(store, ns, f->parent, f->rank);
    if (parent == KVT_INDEX_NONE)
        return;
    if (!kvt_index_link(&store->index, entry, parent, LINK_STEPS))
        kvt_entry_settle(store, parent);
}

/* A record of a namespace of that id, at its place on a root: rule 1. */
static void put_in(struct kvt_store *store, uint32_t root, const struct found *f,
                   const uint8_t id[KVT_NS_BYTES], uint32_t group)
{
    struct kvt_l2_where where = {.segment = f->segment, .page = f->page};
    uint32_t ns = kvt_namespaces_add(&store->spaces, id, group), entry;
    struct kvt_index_entry *e;

    if (ns == KVT_NS_NONE || !kvt_namespaces_learn(&store->spaces, ns, f->map, f->pages)) {
        store->counts.recovered_bad++;
        return;
    }
    entry = kvt_entry_get_fp(store, ns, f->fp, f->rank);
    if (entry == KVT_INDEX_NONE) {
        store->counts.recovered_no_room++;
        return;
    }
    e = kvt_index_at(&store->index, entry);
    if (kvt_index_present(e))
        return;                 /* rule 1 */
    e->raced |= e->filling > 0; /* what is being stored may be no better: it is dropped */
    if (!kvt_entry_set_disk(store, entry, root, where)) {
        store->counts.recovered_bad++;
        kvt_entry_settle(store, entry);
        return;
    }
    kvt_entry_set_map(store, entry, f->map);
    store->counts.recovered_blocks++;
    kvt_ttl_found(store, entry, &store->disks[root].marks, f->sequence);
    link_found(store, entry, ns, f);
}

static void take_in(struct kvt_store *store, struct kvt_store_joining *joining,
                    const struct found *f)
{
    const struct kvt_namespace *own = kvt_namespace_at(&joining->spaces, f->ns);
    struct kvt_l2_where where = {.segment = f->segment, .page = f->page};

    if (!f->map)
        return;
    if (purged(store, joining, f, own))
        kvt_l2_erase(store->disks[joining->number].l2, where, f->pages);
    else
        put_in(store, joining->number, f, own->id, own->group);
}

static void limits_again(struct kvt_store *store)
{
    store->sweep_on = 1;
    store->activity++;
    if (kvt_rules_apply_all(store))
        kvt_log(&store->params.log, KVT_LOG_WARN,
                "no memory for the limits of namespaces that a root has brought: they hold once "
                "the namespaces are opened");
}

static void join_end(struct kvt_store *store)
{
    struct kvt_store_joining *joining = store->joining;

    store->disks[joining->number].joining = false;
    store->joining = NULL;
    if (!store->params.roots_pending)
        store->off_purge_count = 0;
    limits_again(store);
    list_free(joining);
    free(joining);
}

/* A purge is not in the root's journal yet: its end runs the store. */
static bool journal_owes(const struct kvt_store *store, uint32_t root)
{
    for (uint32_t i = 0; i < KVT_STORE_PURGES; i++)
        if (store->purges[i].used && !store->purges[i].done[root])
            return true;
    return false;
}

bool kvt_join_run(struct kvt_store *store)
{
    struct kvt_store_joining *joining = store->joining;

    if (!joining || journal_owes(store, joining->number))
        return false;
    for (uint32_t n = 0; n < SLICE_RECORDS && joining->first; n++) {
        struct piece *piece = joining->first;

        if (joining->at < piece->count) {
            take_in(store, joining, &piece->records[joining->at++]);
            continue;
        }
        joining->first = piece->next;
        joining->at = 0;
        free(piece);
    }
    if (joining->first)
        return true;
    join_end(store);
    return false;
}

/* ---- a segment that could not be read at open, and can be now (l2_again.c) ---- */

bool kvt_segment_room(void *ctx, uint32_t records)
{
    const struct kvt_store_disk *disk = ctx;

    if (disk->joining || disk->store->closing || journal_owes(disk->store, disk->number))
        return false;
    if (index_room(disk->store, records))
        kvt_log(&disk->store->params.log, KVT_LOG_WARN,
                "no memory for all blocks of a segment that can be read again");
    return true; /* what finds no room is counted */
}

void kvt_segment_found(void *ctx, const struct kvt_entry *record, uint32_t segment)
{
    const struct kvt_store_disk *disk = ctx;
    struct found f = describe(disk->store, record, segment, 0, 0);

    if (kvt_map_id_level(record->map) == 0)
        disk->store->counts.recovered_bad++;
    else
        put_in(disk->store, disk->number, &f, record->key.ns, record->key.group);
}

void kvt_segment_over(void *ctx)
{
    limits_again(((const struct kvt_store_disk *)ctx)->store);
}

bool kvt_sweep_waits(const struct kvt_store *store)
{
    bool waits = store->joining != NULL;

    for (uint32_t i = 0; i < store->disk_count; i++)
        waits = waits || kvt_l2_may_return(store->disks[i].l2);
    return waits;
}

void kvt_join_close(struct kvt_store *store)
{
    if (!store->joining)
        return;
    list_free(store->joining);
    free(store->joining);
    store->joining = NULL;
}
