/* Coupling of the three places where a block is known: its index entry, its slot in DRAM, its place
 * on disk. Everything that changes one of them goes through here, so the rules of store_impl.h and
 * the counts (children, pins, lists of segments, bytes) hold after every function.
 * Threads: the store's owner. Does not decide what goes; never calls the log.
 */
#include <string.h>

#include "store/store_impl.h"
#include "store/store_recycle.h"

uint32_t kvt_entry_find(const struct kvt_store *store, const struct kvt_full_key *key)
{
    return kvt_index_find(&store->index, kvt_index_fingerprint(&store->index, key));
}

uint32_t kvt_entry_get(struct kvt_store *store, uint32_t ns, const struct kvt_full_key *key)
{
    return kvt_entry_get_fp(store, ns, kvt_index_fingerprint(&store->index, key), kvt_rank_of(key));
}

uint32_t kvt_entry_get_fp(struct kvt_store *store, uint32_t ns, struct kvt_fp fp, uint8_t rank)
{
    uint32_t entry = kvt_index_find(&store->index, fp);

    if (entry != KVT_INDEX_NONE)
        return entry;
    entry = kvt_index_insert(&store->index, fp);
    if (entry == KVT_INDEX_NONE && kvt_room_entry(store))
        entry = kvt_index_insert(&store->index, fp);
    if (entry == KVT_INDEX_NONE)
        return entry;
    kvt_index_at(&store->index, entry)->ns = ns & 0xfffu;
    store->index.ranks[entry] = rank;
    kvt_namespace_at(&store->spaces, ns)->blocks++;
    kvt_ttl_touch(store, entry);
    kvt_quota_enter(store, entry);
    return entry;
}

bool kvt_entry_is(const struct kvt_store *store, uint32_t entry, const struct kvt_full_key *key)
{
    uint32_t slot = kvt_index_at(&store->index, entry)->slot;

    return slot == KVT_INDEX_NONE ||
           memcmp(&kvt_slot_at(&store->slots, slot)->key, key, sizeof(*key)) == 0;
}

/* What of it counts towards its namespace. */
static void count_bytes(struct kvt_store *store, uint32_t entry, bool before)
{
    const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    struct kvt_namespace *ns = kvt_namespace_at(&store->spaces, e->ns);
    bool now = kvt_index_present(e);

    if (now && !before)
        ns->bytes += kvt_entry_bytes(store, entry);
    else if (before && !now)
        ns->bytes -= kvt_entry_bytes(store, entry);
}

void kvt_entry_set_map(struct kvt_store *store, uint32_t entry, unsigned map)
{
    struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    struct kvt_namespace *ns = kvt_namespace_at(&store->spaces, e->ns);
    uint32_t before = kvt_entry_bytes(store, entry);

    e->map = map & 0xfu;
    if (kvt_index_present(e)) {
        ns->bytes -= before;
        ns->bytes += kvt_entry_bytes(store, entry);
    }
}

uint32_t kvt_entry_bytes(const struct kvt_store *store, uint32_t entry)
{
    const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);

    return kvt_namespace_record_bytes(&store->spaces, e->ns, e->map);
}

void kvt_entry_settle(struct kvt_store *store, uint32_t entry)
{
    while (entry != KVT_INDEX_NONE) {
        struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
        uint32_t parent = e->parent;

        if (!kvt_index_present(e) && e->pinned) {
            kvt_entry_set_pinned(store, entry, false);
            kvt_pins_drop(&store->pins, entry);
        }
        if (kvt_index_present(e) || e->filling || e->children)
            return;
        kvt_namespace_at(&store->spaces, e->ns)->blocks--;
        kvt_quota_leave(store, entry);
        kvt_index_remove(&store->index, entry);
        entry = parent;
    }
}

/* The number of a parent's DRAM children has changed. */
static void parent_settle(struct kvt_store *store, uint32_t entry, bool at_tail)
{
    uint32_t parent = kvt_index_at(&store->index, entry)->parent;

    if (parent == KVT_INDEX_NONE || kvt_index_at(&store->index, parent)->slot == KVT_INDEX_NONE)
        return;
    kvt_policy_settle(&store->policy, kvt_index_at(&store->index, parent)->slot, at_tail);
}

/* The copy on disk is one too many for now: DRAM has the block, and is not about to give it up. */
static void count_spare(struct kvt_store *store, uint32_t entry, bool on)
{
    const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);

    if (e->on_disk && e->slot != KVT_INDEX_NONE && !kvt_slot_at(&store->slots, e->slot)->leaving)
        store->disks[e->root].uses[e->segment].spare += on ? 1 : -1u;
}

void kvt_slot_leaving(struct kvt_store *store, uint32_t slot, bool leaving)
{
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);

    if (s->leaving == leaving || s->state != KVT_SLOT_VALID)
        return;
    count_spare(store, s->entry, false);
    s->leaving = leaving;
    count_spare(store, s->entry, true);
}

void kvt_entry_used(struct kvt_store *store, uint32_t entry)
{
    struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    bool before = e->hit;

    kvt_policy_hit(&store->policy, entry);
    if (e->hit && !before)
        e->hit = kvt_recycle_late(&store->disks[e->root], e->segment);
    if (e->slot != KVT_INDEX_NONE)
        kvt_slot_leaving(store, e->slot, false);
}

void kvt_entry_attach(struct kvt_store *store, uint32_t entry, uint32_t slot)
{
    bool before = kvt_index_present(kvt_index_at(&store->index, entry));

    kvt_slot_at(&store->slots, slot)->entry = entry;
    kvt_index_set_slot(&store->index, entry, slot);
    count_spare(store, entry, true);
    count_bytes(store, entry, before);
    parent_settle(store, entry, false);
}

/* The record on disk, of another map than the one that went, is what the entry has. */
static void older_is_back(struct kvt_store *store, uint32_t entry, unsigned map)
{
    struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    bool pinned = e->pinned;

    kvt_entry_set_pinned(store, entry, false); /* counted by the record's length */
    e->older = 0;
    kvt_entry_set_map(store, entry, map);
    if (!pinned)
        return;
    if (store->pinned_bytes + kvt_entry_bytes(store, entry) <= store->params.pin_bytes_max) {
        kvt_entry_set_pinned(store, entry, true);
        return;
    }
    store->counts.pin_refused++;
    kvt_pins_drop(&store->pins, entry);
}

void kvt_entry_drop_slot(struct kvt_store *store, uint32_t entry, bool evicting)
{
    uint32_t slot = kvt_index_at(&store->index, entry)->slot;
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
    unsigned older_map = s->older_map;

    count_spare(store, entry, false);
    if (s->write == KVT_SLOT_WRITE_QUEUED)
        kvt_writes_unqueue(store, slot);
    else if (s->write != KVT_SLOT_WRITE_GOING)
        kvt_write_move(store, slot, KVT_SLOT_WRITE_CLEAN);
    kvt_policy_leave(&store->policy, slot);
    kvt_index_set_slot(&store->index, entry, KVT_INDEX_NONE);
    s->entry = KVT_NO_NUMBER;
    if (s->pins)
        kvt_slot_move(&store->slots, slot, KVT_SLOT_DOOMED);
    else
        kvt_slot_free(store, slot);
    if (kvt_index_at(&store->index, entry)->older)
        older_is_back(store, entry, older_map);
    count_bytes(store, entry, true);
    parent_settle(store, entry, evicting);
}

void kvt_entry_lose_slot(struct kvt_store *store, uint32_t entry, bool evicting)
{
    store->counts.older_back += kvt_index_at(&store->index, entry)->older;
    kvt_entry_drop_slot(store, entry, evicting);
}

bool kvt_entry_set_disk(struct kvt_store *store, uint32_t entry, uint32_t root,
                        struct kvt_l2_where where)
{
    struct kvt_store_disk *disk = &store->disks[root];
    struct kvt_index_entry *e = kvt_index_at(&store->index, entry);

    bool before;

    kvt_entry_clear_disk(store, entry);
    if (where.segment >= disk->segments || where.page > KVT_INDEX_PAGE_MAX)
        return false;
    before = kvt_index_present(e);
    e->on_disk = 1;
    count_bytes(store, entry, before);
    e->hit = 0;
    e->root = root & 0xfu;
    e->segment = where.segment & KVT_INDEX_SEGMENT_MAX;
    e->page = where.page & KVT_INDEX_PAGE_MAX;
    e->next = disk->heads[where.segment] & KVT_INDEX_NONE;
    disk->heads[where.segment] = entry;
    disk->pinned[where.segment] += e->pinned;
    if (!disk->uses[where.segment].put++) {
        disk->lives++;
        disk->filled++;
        disk->uses[where.segment].born = kvt_recycle_tick(disk);
    }
    disk->uses[where.segment].live++;
    count_spare(store, entry, true);
    store->disk_blocks++;
    return true;
}

void kvt_entry_clear_disk(struct kvt_store *store, uint32_t entry)
{
    struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    struct kvt_store_disk *disk = &store->disks[e->root];
    uint32_t at;

    if (!e->on_disk)
        return;
    count_spare(store, entry, false);
    disk->uses[e->segment].live--;
    at = disk->heads[e->segment];
    if (at == entry) {
        disk->heads[e->segment] = e->next;
    } else {
        while (kvt_index_at(&store->index, at)->next != entry)
            at = kvt_index_at(&store->index, at)->next;
        kvt_index_at(&store->index, at)->next = e->next;
    }
    e->next = KVT_INDEX_NONE;
    e->on_disk = 0;
    e->older = 0;
    count_bytes(store, entry, true);
    disk->pinned[e->segment] -= e->pinned;
    store->disk_blocks--;
}

void kvt_entry_give_up(struct kvt_store *store, uint32_t entry)
{
    uint32_t slot = kvt_index_at(&store->index, entry)->slot;

    kvt_entry_clear_disk(store, entry);
    if (slot != KVT_INDEX_NONE)
        kvt_write_again(store, slot);
}

void kvt_entries_give_up(struct kvt_store_disk *disk, uint32_t segment,
                         bool (*may)(const struct kvt_store *store, uint32_t entry))
{
    struct kvt_store *store = disk->store;
    uint32_t at = disk->heads[segment];

    disk->heads[segment] = KVT_INDEX_NONE;
    while (at != KVT_INDEX_NONE) {
        struct kvt_index_entry *e = kvt_index_at(&store->index, at);
        uint32_t entry = at;

        at = e->next;
        e->next = disk->heads[segment] & KVT_INDEX_NONE;
        disk->heads[segment] = entry;
        if (may(store, entry))
            kvt_entry_give_up(store, entry); /* the head: nothing is searched */
    }
}

void kvt_entry_set_pinned(struct kvt_store *store, uint32_t entry, bool pinned)
{
    struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    uint32_t bytes = kvt_entry_bytes(store, entry);

    if (e->pinned == pinned)
        return;
    e->pinned = pinned;
    if (!pinned)
        kvt_ttl_touch(store, entry); /* it begins anew */
    store->pinned_bytes += pinned ? bytes : -(uint64_t)bytes;
    store->pinned_blocks += pinned ? 1 : -(uint64_t)1;
    if (e->on_disk)
        store->disks[e->root].pinned[e->segment] += pinned ? 1 : -1u;
    if (e->slot != KVT_INDEX_NONE)
        kvt_policy_settle(&store->policy, e->slot, false);
}

void kvt_slot_free(struct kvt_store *store, uint32_t slot)
{
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);

    if (s->staged)
        store->staged_bytes -= s->record_bytes;
    kvt_slot_move(&store->slots, slot, KVT_SLOT_FREE);
}

void kvt_slot_settle(struct kvt_store *store, uint32_t slot)
{
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);

    if (s->pins || s->state == KVT_SLOT_FILLING || s->state == KVT_SLOT_READING) {
        kvt_policy_settle(&store->policy, slot, false);
        return;
    }
    if (s->state == KVT_SLOT_DOOMED) {
        kvt_slot_free(store, slot);
        return;
    }
    if (kvt_slot_region(&store->slots, slot) == KVT_REGION_STAGING) {
        uint32_t entry = s->entry;

        if (s->write == KVT_SLOT_WRITE_QUEUED || s->write == KVT_SLOT_WRITE_GOING)
            return;
        if (kvt_write_unsaved(store, slot)) { /* no place to stay */
            store->counts.lost_no_dram++;
            kvt_writes_lost(store, slot);
        }
        kvt_entry_lose_slot(store, entry, false);
        kvt_entry_settle(store, entry);
        return;
    }
    kvt_policy_settle(&store->policy, slot, s->at_end);
}

void kvt_entry_fill_begin(struct kvt_store *store, uint32_t entry)
{
    kvt_index_set_filling(&store->index, entry, kvt_index_at(&store->index, entry)->filling + 1u);
    parent_settle(store, entry, false);
}

void kvt_entry_fill_end(struct kvt_store *store, uint32_t entry)
{
    struct kvt_index_entry *e = kvt_index_at(&store->index, entry);

    kvt_index_set_filling(&store->index, entry, e->filling - 1u);
    if (!e->filling)
        e->raced = 0;
    parent_settle(store, entry, false);
}

void kvt_slot_abandon(struct kvt_store *store, uint32_t slot)
{
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
    uint32_t entry = s->entry;

    uint32_t bytes = s->record_bytes;

    s->entry = KVT_NO_NUMBER;
    if (s->pins)
        kvt_slot_move(&store->slots, slot, KVT_SLOT_DOOMED);
    else
        kvt_slot_free(store, slot);
    if (entry == KVT_NO_NUMBER)
        return;
    kvt_namespace_at(&store->spaces, kvt_index_at(&store->index, entry)->ns)->filling_bytes -=
        bytes;
    kvt_entry_fill_end(store, entry);
    kvt_entry_settle(store, entry);
}
