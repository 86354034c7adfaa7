/* Every invariant that spans files, for tests and fsck. Slow: walks everything.
 * Threads: the store's owner. Allocates (index check). Changes nothing.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier/error.h"
#include "store/store_impl.h"

#define BAD(...) (snprintf(why, why_len, __VA_ARGS__), KVT_E_CORRUPT)

struct sums {
    uint64_t pinned_bytes, pinned_blocks, disk_blocks, staged_bytes;
    uint64_t going;  /* slots with a write in flight */
    uint64_t queued; /* for the disk */
    uint64_t unsaved;
    uint64_t auto_waiting, auto_bytes;
};

static int check_slot(const struct kvt_store *store, uint32_t slot, struct sums *sums, char *why,
                      size_t why_len)
{
    const struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
    bool coupled = s->state == KVT_SLOT_VALID || s->state == KVT_SLOT_READING;
    const struct kvt_index_entry *e;

    sums->staged_bytes += s->staged ? s->record_bytes : 0;
    sums->going += s->write == KVT_SLOT_WRITE_GOING;
    sums->queued += s->write == KVT_SLOT_WRITE_QUEUED;
    sums->unsaved += kvt_write_unsaved(store, slot);
    if (s->write == KVT_SLOT_WRITE_LATER && s->policy == KVT_WRITE_AUTO) {
        sums->auto_waiting++;
        sums->auto_bytes += s->record_bytes;
    }
    if (s->state == KVT_SLOT_DOOMED)
        return s->pins && s->entry == KVT_NO_NUMBER ? 0 : BAD("doomed slot %u lingers", slot);
    if (s->entry >= store->index.touched || !kvt_index_at(&store->index, s->entry)->used)
        return BAD("slot %u names no entry", slot);
    e = kvt_index_at(&store->index, s->entry);
    if (coupled &&
        (e->slot != slot || e->map != s->map || kvt_entry_find(store, &s->key) != s->entry))
        return BAD("slot %u and entry %u do not name each other", slot, s->entry);
    if (s->state == KVT_SLOT_FILLING && (!s->filler || !s->pins))
        return BAD("slot %u is being filled by nobody", slot);
    if ((s->write == KVT_SLOT_WRITE_QUEUED) != (s->queue == KVT_QUEUE_WRITE))
        return BAD("slot %u: write state and queue disagree", slot);
    if (s->state == KVT_SLOT_VALID && store->disk_count && s->write == KVT_SLOT_WRITE_QUEUED &&
        e->on_disk && !e->older)
        return BAD("slot %u waits for a disk it is on", slot);
    if (s->state == KVT_SLOT_VALID && s->cached && store->disk_count && !e->on_disk &&
        s->write == KVT_SLOT_WRITE_CLEAN)
        return BAD("slot %u counts as written, and is on no disk", slot);
    if (coupled && e->older && s->write == KVT_SLOT_WRITE_CLEAN)
        return BAD("slot %u is on disk and an older record of it, too", slot);
    if (s->state == KVT_SLOT_VALID && !s->pins && s->write != KVT_SLOT_WRITE_QUEUED &&
        s->write != KVT_SLOT_WRITE_GOING &&
        kvt_slot_region(&store->slots, slot) == KVT_REGION_STAGING)
        return BAD("slot %u stays in the staging region for nothing", slot);
    return 0;
}

static int check_entry(const struct kvt_store *store, uint32_t entry, const uint32_t *filling,
                       struct sums *sums, char *why, size_t why_len)
{
    const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);

    sums->disk_blocks += e->on_disk;
    sums->pinned_blocks += e->pinned;
    sums->pinned_bytes += e->pinned ? kvt_entry_bytes(store, entry) : 0;
    if (e->filling != filling[entry])
        return BAD("entry %u counts %u fills, there are %u", entry, (unsigned)e->filling,
                   filling[entry]);
    if (!kvt_index_present(e) && !e->filling && !e->children)
        return BAD("entry %u is there for nothing", entry);
    if (!kvt_index_present(e) && e->pinned)
        return BAD("entry %u is pinned and absent", entry);
    if (e->pinned != kvt_pins_any(&store->pins, entry))
        return BAD("entry %u is pinned by nobody, or not although somebody did", entry);
    if (e->slot != KVT_INDEX_NONE && (e->slot >= store->slots.arena.touched ||
                                      kvt_slot_at(&store->slots, e->slot)->entry != entry))
        return BAD("entry %u and slot %u do not name each other", entry, (unsigned)e->slot);
    if (e->on_disk &&
        (e->root >= store->disk_count || e->segment >= store->disks[e->root].segments))
        return BAD("entry %u is nowhere on disk", entry);
    if (e->older && (!e->on_disk || e->slot == KVT_INDEX_NONE ||
                     kvt_slot_at(&store->slots, e->slot)->state != KVT_SLOT_VALID ||
                     !kvt_namespace_record_bytes(&store->spaces, e->ns,
                                                 kvt_slot_at(&store->slots, e->slot)->older_map)))
        return BAD("entry %u has an older record beside nothing newer", entry);
    if (!kvt_namespace_at(&store->spaces, e->ns)->used)
        return BAD("entry %u has no namespace", entry);
    return 0;
}

static int check_segments(const struct kvt_store *store, uint64_t disk_blocks, char *why,
                          size_t why_len)
{
    uint64_t listed = 0;

    for (uint32_t root = 0; root < store->disk_count; root++) {
        const struct kvt_store_disk *disk = &store->disks[root];

        for (uint32_t segment = 0; segment < disk->segments; segment++) {
            const struct kvt_store_segment *uses = &disk->uses[segment];
            uint32_t pinned = 0, live = 0, spare = 0;

            for (uint32_t i = disk->heads[segment]; i != KVT_INDEX_NONE;
                 i = kvt_index_at(&store->index, i)->next) {
                const struct kvt_index_entry *e = kvt_index_at(&store->index, i);

                if (!e->used || !e->on_disk || e->root != root || e->segment != segment ||
                    listed++ > disk_blocks)
                    return BAD("the list of segment %u breaks at entry %u", segment, i);
                pinned += e->pinned;
                live++;
                spare += e->slot != KVT_INDEX_NONE && !kvt_slot_at(&store->slots, e->slot)->leaving;
            }
            if (live != uses->live || spare != uses->spare || live > uses->put)
                return BAD("segment %u counts %u records, %u of them spare: there are %u, %u",
                           segment, uses->live, uses->spare, live, spare);
            if (pinned != disk->pinned[segment])
                return BAD("segment %u counts %u pinned, there are %u", segment,
                           disk->pinned[segment], pinned);
        }
    }
    return listed == disk_blocks ? 0 : BAD("entries on disk are in no segment's list");
}

static int check_loads(const struct kvt_store *store, char *why, size_t why_len)
{
    uint32_t used = 0;

    for (int i = 0; i < 2; i++) {
        const struct kvt_load_list *list = i ? &store->prefetches : &store->acquires;

        for (uint32_t at = list->head; at != KVT_NO_NUMBER; at = store->loads[at].next)
            for (uint32_t item = store->loads[at].first; item != KVT_NO_NUMBER;
                 item = store->items[item].next)
                used++;
    }
    return used == store->items_used
               ? 0
               : BAD("%u load items are used, %u counted", used, store->items_used);
}

static int check_sums(const struct kvt_store *store, const struct sums *sums, char *why,
                      size_t why_len)
{
    if (sums->pinned_bytes != store->pinned_bytes || sums->pinned_blocks != store->pinned_blocks ||
        sums->pinned_bytes > store->params.pin_bytes_max)
        return BAD("pinned bytes or blocks do not agree");
    if (sums->disk_blocks != store->disk_blocks)
        return BAD("%" PRIu64 " blocks on disk counted, there are %" PRIu64, store->disk_blocks,
                   sums->disk_blocks);
    if (sums->staged_bytes != store->staged_bytes)
        return BAD("bytes staged by stores do not agree");
    if (sums->auto_waiting != store->auto_waiting || sums->auto_bytes != store->auto_bytes)
        return BAD("blocks that AUTO has deferred do not agree");
    if (sums->unsaved != store->unsaved)
        return BAD("unsaved blocks do not agree");
    if (sums->queued != store->write_queue.count || sums->going != store->writes_going)
        return BAD("writes queued or in flight do not agree");
    return 0;
}

static int check_slots(const struct kvt_store *store, uint32_t *filling, struct sums *sums,
                       char *why, size_t why_len)
{
    int err = 0;

    for (uint32_t i = 0; i < store->slots.arena.touched && !err; i++) {
        const struct kvt_slot *s = kvt_slot_at(&store->slots, i);

        if (s->state == KVT_SLOT_FREE)
            continue;
        err = check_slot(store, i, sums, why, why_len);
        if (!err && s->state == KVT_SLOT_FILLING)
            filling[s->entry]++;
    }
    return err;
}

/* Bytes of each namespace, added up again. */
static int check_bytes(const struct kvt_store *store, char *why, size_t why_len)
{
    uint64_t *bytes = calloc((size_t)store->spaces.touched + 1, sizeof(*bytes));
    int err = bytes ? 0 : -ENOMEM;

    for (uint32_t i = 0; i < store->index.touched && !err; i++) {
        const struct kvt_index_entry *e = kvt_index_at(&store->index, i);

        if (e->used && kvt_index_present(e))
            bytes[e->ns] += kvt_entry_bytes(store, i);
    }
    for (uint32_t i = 0; i < store->slots.arena.touched && !err; i++) {
        const struct kvt_slot *s = kvt_slot_at(&store->slots, i);

        if (s->state == KVT_SLOT_FILLING)
            bytes[kvt_index_at(&store->index, s->entry)->ns] += s->record_bytes;
    }
    for (uint32_t ns = 0; ns < store->spaces.touched && !err; ns++)
        if (bytes[ns] != kvt_namespace_at(&store->spaces, ns)->bytes +
                             kvt_namespace_at(&store->spaces, ns)->filling_bytes)
            err = BAD("bytes of namespace %u do not agree", ns);
    free(bytes);
    return err;
}

int kvt_store_check(const struct kvt_store *store, char *why, size_t why_len)
{
    struct sums sums = {0};
    uint32_t *filling = calloc((size_t)store->index.touched + 1, sizeof(*filling));
    int err;

    if (!filling)
        return -ENOMEM;
    err = kvt_index_check(&store->index, why, why_len);
    if (!err)
        err = kvt_slots_check(&store->slots, why, why_len);
    if (!err)
        err = kvt_policy_check(&store->policy, why, why_len);
    if (!err)
        err =
            kvt_slot_list_check(&store->slots, &store->write_queue, KVT_QUEUE_WRITE, why, why_len);
    if (!err)
        err = check_slots(store, filling, &sums, why, why_len);
    for (uint32_t i = 0; i < store->index.touched && !err; i++)
        if (kvt_index_at(&store->index, i)->used)
            err = check_entry(store, i, filling, &sums, why, why_len);
    if (!err)
        err = check_segments(store, sums.disk_blocks, why, why_len);
    if (!err)
        err = check_bytes(store, why, why_len);
    if (!err)
        err = kvt_quota_check(store, why, why_len);
    if (!err)
        err = check_loads(store, why, why_len);
    if (!err)
        err = check_sums(store, &sums, why, why_len);
    free(filling);
    return err;
}
