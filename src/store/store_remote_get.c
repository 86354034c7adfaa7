/* Loads from the shared tier: ACQUIRE of a key known to be there -> slot READING -> GET -> VALID,
 * granted; and from there on a block like one that was stored here.
 *
 * A read that does not come back in time is given up and its load misses; its slot stays pinned
 * until it has come back. A record from there gets a sequence of this store (and its id of a mixed
 * map), so that purges and recovery order it as one of ours.
 * Threads: the store's owner. Allocates nothing.
 */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_remote.h"

#define LINK_STEPS 256u

bool kvt_l3_has(struct kvt_store *store, const struct kvt_load *load,
                const struct kvt_full_key *full, uint32_t *bytes)
{
    uint32_t entry;
    const struct kvt_known *k;

    if (!store->remote || kvt_namespace_at(&store->spaces, load->ns)->purging ||
        kvt_l3_dropping(store, full))
        return false;
    entry = kvt_entry_find(store, full);
    if (entry != KVT_INDEX_NONE) {
        const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);

        if (kvt_index_present(e) || e->filling)
            return false;
    }
    k = kvt_l3_known_find(store, kvt_index_fingerprint(&store->index, full));
    if (!k || k->state != KVT_KNOWN_PRESENT || kvt_map_id_level(k->map) < load->min_level)
        return false;
    *bytes = (uint32_t)k->pages * KVT_PAGE_BYTES;
    return *bytes == kvt_namespace_record_bytes(&store->spaces, load->ns, k->map);
}

static void get_free(struct kvt_store *store, struct kvt_remote_get *get)
{
    get->busy = false;
    get->next = store->remote->get_free;
    store->remote->get_free = get;
    store->prefetch_going -= get->prefetch;
    store->reads_going--;
}

enum kvt_started kvt_l3_read(struct kvt_store *store, const struct kvt_load *load,
                             const struct kvt_full_key *full, bool may_read, uint32_t *out)
{
    enum kvt_room room = load->prefetch ? KVT_ROOM_PREFETCH : KVT_ROOM_LOAD;
    struct kvt_remote_get *get = store->remote->get_free;
    struct kvt_fp fp = kvt_index_fingerprint(&store->index, full);
    const struct kvt_known *k = kvt_l3_known_find(store, fp); /* there: kvt_l3_has() said so */
    uint32_t bytes, entry, slot;
    struct kvt_slot *s;
    uint8_t map;

    if (!may_read || !get || !k || load->ahead >= KVT_STORE_READ_AHEAD ||
        (load->prefetch && store->prefetch_going >= KVT_STORE_PREFETCH_READS))
        return KVT_WAITS_FOR_READ;
    map = k->map;
    bytes = (uint32_t)k->pages * KVT_PAGE_BYTES;
    if (!kvt_quota_room(store, load->ns, bytes, KVT_INDEX_NONE)) {
        store->counts.quota_refused++;
        return KVT_NOT_THERE;
    }
    slot = kvt_room_slot(store, bytes, room);
    if (slot == KVT_SLOT_NONE)
        return KVT_WAITS_FOR_SLOT;
    entry = kvt_entry_get(store, load->ns, full);
    if (entry == KVT_INDEX_NONE) {
        kvt_slot_free(store, slot);
        return KVT_NOT_THERE;
    }
    s = kvt_slot_at(&store->slots, slot);
    s->key = *full;
    s->map = map;
    kvt_entry_set_map(store, entry, map);
    kvt_entry_attach(store, entry, slot);
    kvt_slot_pin(&store->slots, slot);
    get->key = *full;
    get->req = (struct kvt_remote_req){.op = KVT_REMOTE_GET,
                                       .count = 1,
                                       .keys = &get->key,
                                       .record = kvt_slot_bytes(store, slot),
                                       .record_bytes = bytes,
                                       .sequence = store->sequence_next++,
                                       .map = map,
                                       .ttl_ns = kvt_l3_ttl(store, load->ns),
                                       .user = get};
    if (!kvt_l3_submit(store, &get->req, store->params.remote_deadline_ns)) {
        store->counts.remote_busy++;
        kvt_slot_unpin(&store->slots, slot);
        kvt_entry_drop_slot(store, entry, false);
        kvt_entry_settle(store, entry);
        return KVT_NOT_THERE;
    }
    store->remote->get_free = get->next;
    get->slot = slot;
    get->busy = true;
    get->given_up = false;
    get->prefetch = load->prefetch;
    store->prefetch_going += get->prefetch;
    store->reads_going++;
    *out = slot;
    return KVT_STARTED;
}

/* The loads that wait for a slot miss; it goes as soon as nobody writes to it any more. */
static void get_lost(struct kvt_store *store, uint32_t slot)
{
    uint32_t entry = kvt_slot_at(&store->slots, slot)->entry;

    kvt_reads_wake(store, slot, false);
    if (kvt_slot_at(&store->slots, slot)->state == KVT_SLOT_DOOMED)
        return;
    kvt_entry_drop_slot(store, entry, false);
    kvt_entry_settle(store, entry);
}

static void count_get(struct kvt_store *store, int status, uint32_t bytes)
{
    struct kvt_store_stats *counts = &store->counts;

    if (!status) {
        counts->remote_got++;
        counts->remote_got_bytes += bytes;
    } else if (status == KVT_E_MISS || status == KVT_E_STALE) {
        counts->remote_get_gone++;
    } else if (status == KVT_E_CORRUPT) {
        counts->remote_get_bad++;
    } else if (status == KVT_E_DEADLINE) {
        counts->remote_get_deadline++;
    } else {
        counts->remote_get_fail++;
    }
}

/* The parent comes from the header, as the client that stored it wrote it; it orders eviction. */
static void link_parent(struct kvt_store *store, uint32_t slot, uint32_t entry)
{
    const struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
    struct kvt_record_header header;
    struct kvt_full_key parent_key = s->key;
    uint32_t parent;

    memcpy(&header, kvt_slot_bytes(store, slot), sizeof(header));
    if (!header.parent_len || !kvt_parent_ok(header.parent, header.parent_len) ||
        kvt_index_at(&store->index, entry)->parent != KVT_INDEX_NONE ||
        kvt_namespace_at(&store->spaces, kvt_index_at(&store->index, entry)->ns)->loose)
        return;
    memcpy(parent_key.hash, header.parent, sizeof(parent_key.hash));
    parent_key.hash_len = header.parent_len;
    parent = kvt_entry_find(store, &parent_key);
    if (parent == KVT_INDEX_NONE || !kvt_index_link(&store->index, entry, parent, LINK_STEPS))
        return;
    if (kvt_index_at(&store->index, parent)->slot != KVT_INDEX_NONE)
        kvt_slot_settle(store, kvt_index_at(&store->index, parent)->slot);
}

/* A verified record in a slot: a block of this store from now on. */
static void arrived(struct kvt_store *store, uint32_t slot)
{
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);

    kvt_slot_move(&store->slots, slot, KVT_SLOT_VALID);
    link_parent(store, slot, s->entry);
    s->policy = (store->params.write ? (unsigned)store->params.write : KVT_WRITE_THROUGH) & 15u;
    if (kvt_slot_region(&store->slots, slot) == KVT_REGION_CACHE)
        kvt_policy_enter(&store->policy, slot);
    if (store->disk_count)
        kvt_writes_commit(store, slot);
    kvt_reads_wake(store, slot, true);
}

void kvt_l3_got(struct kvt_store *store, struct kvt_remote_get *get)
{
    uint32_t slot = get->slot;
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
    int status = get->req.status;

    if (!status && s->state == KVT_SLOT_READING)
        status = kvt_reads_accept(store, slot);
    if (!get->given_up)
        count_get(store, status, s->record_bytes);
    if (status) /* whatever it is, do not ask for it again at once */
        kvt_l3_known_set(store, kvt_index_fingerprint(&store->index, &get->key),
                         status == KVT_E_CORRUPT ? KVT_KNOWN_DAMAGED : KVT_KNOWN_ABSENT, 0, 0);
    if (status || s->state != KVT_SLOT_READING)
        get_lost(store, slot);
    else
        arrived(store, slot);
    get_free(store, get);
    kvt_slot_unpin(&store->slots, slot);
    kvt_slot_settle(store, slot);
}

int64_t kvt_l3_gets_run(struct kvt_store *store, int64_t now)
{
    int64_t next_run = INT64_MAX;

    for (uint32_t i = 0; i < KVT_REMOTE_GETS && store->reads_going; i++) {
        struct kvt_remote_get *get = &store->remote->gets[i];

        if (!get->busy || get->given_up)
            continue;
        if (now < get->req.deadline_ns + KVT_REMOTE_GRACE_NS) {
            next_run = KVT_MIN(next_run, get->req.deadline_ns + KVT_REMOTE_GRACE_NS);
            continue;
        }
        get->given_up = true;
        kvt_l3_given_up(store);
        get_lost(store, get->slot); /* doomed: the pin of the read holds it */
    }
    return next_run;
}
