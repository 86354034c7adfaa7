/* Messages that ask and mark: NS_OPEN, LOOKUP, TOUCH, PIN, UNPIN.
 * Threads: the store's owner. NS_OPEN may allocate (tables grow); the others do not.
 */
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"
#include "store/store_recycle.h"

/* What the tables must hold so that records of this size fill every cap. */
static int grow_for(struct kvt_store *store, uint32_t record_bytes)
{
    uint64_t pages = store->params.arena_bytes / KVT_PAGE_BYTES;
    uint64_t runs = pages / (record_bytes / KVT_PAGE_BYTES);
    uint64_t blocks = runs;
    int err;

    for (uint32_t i = 0; i < store->disk_count; i++)
        blocks += store->disks[i].cap_bytes / record_bytes;
    blocks = KVT_MAX(blocks, (uint64_t)store->index.used); /* recovered ones may be smaller */
    blocks += blocks / 16 + 1024;                          /* ghosts and blocks being filled */
    if (store->params.blocks_max)
        blocks = store->params.blocks_max;
    /* A free run lies between taken ones: twice as many names as runs. */
    err = kvt_slots_grow(&store->slots,
                         (uint32_t)KVT_MIN(2 * runs + 2 * KVT_REGIONS, KVT_SLOT_NONE - 1ull));
    if (err)
        return err;
    err = kvt_index_grow(&store->index, (uint32_t)KVT_MIN(blocks, KVT_INDEX_CAPACITY_MAX));
    if (!err)
        err = kvt_ttl_grow(store);
    return err ? err : kvt_quota_grow(store);
}

int kvt_tables_grow(struct kvt_store *store)
{
    return store->record_bytes_min == UINT32_MAX ? 0 : grow_for(store, store->record_bytes_min);
}

/* The smallest and the largest record of a namespace; every one must have a place to go. */
static int sizes_check(const struct kvt_store *store, const struct kvt_msg_ns_open *open,
                       uint32_t *smallest, uint32_t *largest)
{
    uint64_t room = 0;

    *smallest = UINT32_MAX;
    *largest = 0;
    for (unsigned map = 1; map <= 6; map++) {
        if (!open->record_bytes[map])
            continue;
        *smallest = KVT_MIN(*smallest, open->record_bytes[map]);
        *largest = KVT_MAX(*largest, open->record_bytes[map]);
    }
    for (int i = 0; i < KVT_REGIONS; i++)
        room = KVT_MAX(room, (uint64_t)store->slots.arena.regions[i].pages * KVT_PAGE_BYTES);
    if (*largest > room)
        return KVT_E_TOO_SMALL;
    for (uint32_t i = 0; i < store->disk_count; i++)
        if (*largest > kvt_l2_record_bytes_max(store->disks[i].l2) ||
            *largest > store->params.staging_bytes)
            return KVT_E_TOO_SMALL;
    return 0;
}

void kvt_handle_ns_open(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    const struct kvt_msg_ns_open *open = (const struct kvt_msg_ns_open *)msg;
    struct kvt_msg *reply;
    uint32_t smallest, largest;
    long number = sizes_check(store, open, &smallest, &largest);

    if (!number) {
        number = kvt_namespaces_open(&store->spaces, open);
        if (number == KVT_E_LIMIT && !store->said_namespaces) {
            store->said_namespaces = 1;
            kvt_log(&store->params.log, KVT_LOG_WARN,
                    "%u namespaces (of models, layouts, groups and salts) have been opened since "
                    "the store was: no more can be. Opening the store anew, or a restart of its "
                    "kvtierd, makes room",
                    KVT_NAMESPACES_MAX);
        }
    }
    if (number >= 0 && smallest < store->record_bytes_min) {
        int err = grow_for(store, smallest);

        if (err)
            number = err;
        else
            store->record_bytes_min = smallest;
    }
    if (number >= 0) {
        int err = kvt_drains_grow(store, largest);

        if (!err)
            err = kvt_scrub_grow(store, largest);
        if (!err)
            err = kvt_ttl_of(store, (uint32_t)number, open->ttl_ns);
        if (!err)
            err = kvt_quota_of(store, (uint32_t)number, open->quota_bytes);
        if (!err && store->params.ns_rule_count)
            err = kvt_rules_apply(store, (uint32_t)number);
        number = err ? err : number;
    }
    reply = kvt_reply_begin(store, msg, sizeof(*reply));
    reply->status = number < 0 ? (int32_t)number : 0;
    reply->ns = number < 0 ? 0 : (uint32_t)number + 1;
    kvt_reply_send(store, client, reply);
}

void kvt_find_keys(struct kvt_store *store, uint32_t ns, const struct kvt_msg_key *keys,
                   uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        struct kvt_full_key full;

        kvt_key_full(store, ns, &keys[i], &full);
        store->fps[i] = kvt_index_fingerprint(&store->index, &full);
    }
    kvt_index_find_batch(&store->index, store->fps, count, store->found);
    if (!store->ttl.stamps)
        return;
    uint64_t before = store->counts.ttl_expired;
    for (uint32_t i = 0; i < count; i++)
        if (store->counts.ttl_expired == before) /* what follows may be gone with it */
            (void)kvt_ttl_alive(store, store->found[i]);
        else
            (void)kvt_ttl_alive(store, kvt_index_find(&store->index, store->fps[i]));
    if (store->counts.ttl_expired != before)
        kvt_index_find_batch(&store->index, store->fps, count, store->found);
}

/* A key that is not here. */
static bool lookup_remote(struct kvt_store *store, const struct kvt_msg_keys *request, uint32_t i,
                          struct kvt_lookup_entry *out)
{
    if (!kvt_l3_known(store, store->fps[i], request->min_level, &out->map)) {
        store->counts.lookup_miss_absent++;
        return false;
    }
    out->level = (uint8_t)kvt_map_id_level(out->map);
    out->tier = KVT_TIER_REMOTE;
    store->counts.lookup_hits_remote++;
    return true;
}

/* Tier, level and map of one key; false when it ends the run, counted by reason. */
static bool lookup_one(struct kvt_store *store, const struct kvt_msg_keys *request, uint32_t ns,
                       uint32_t i, struct kvt_lookup_entry *out)
{
    uint32_t entry = store->found[i];
    const struct kvt_index_entry *e;
    struct kvt_full_key full;

    if (kvt_namespace_at(&store->spaces, ns)->purging) {
        store->counts.lookup_miss_absent++;
        return false;
    }
    if (entry == KVT_INDEX_NONE)
        return lookup_remote(store, request, i, out);
    e = kvt_index_at(&store->index, entry);
    kvt_key_full(store, ns, &request->keys[i], &full);
    if (!kvt_index_present(e) && !e->filling)
        return lookup_remote(store, request, i, out);
    if (!kvt_index_present(e) || !kvt_entry_is(store, entry, &full)) {
        out->tier = e->filling ? KVT_TIER_PENDING : KVT_TIER_MISS;
        if (e->filling)
            store->counts.lookup_miss_pending++;
        else
            store->counts.lookup_miss_absent++;
        return false;
    }
    if (kvt_map_id_level(e->map) < request->min_level) {
        store->counts.lookup_miss_level++;
        return false;
    }
    out->map = e->map;
    out->level = (uint8_t)kvt_map_id_level(e->map);
    /* A READING slot still costs a read: it is on disk for whoever plans. */
    if (e->slot != KVT_INDEX_NONE && kvt_slot_at(&store->slots, e->slot)->state == KVT_SLOT_VALID) {
        out->tier = KVT_TIER_DRAM;
        store->counts.lookup_hits_dram++;
    } else if (e->on_disk) {
        out->tier = KVT_TIER_DISK;
        out->root = e->root;
        store->counts.lookup_hits_disk++;
    } else {
        out->tier = KVT_TIER_REMOTE;
        store->counts.lookup_hits_remote++;
    }
    return true;
}

void kvt_handle_lookup(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    if (!kvt_l3_lookup(store, client, msg))
        kvt_lookup_answer(store, client, msg);
}

void kvt_lookup_answer(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    const struct kvt_msg_keys *request = (const struct kvt_msg_keys *)msg;
    struct kvt_msg_lookup_reply *reply;
    uint32_t run = 0;

    reply = (struct kvt_msg_lookup_reply *)kvt_reply_begin(
        store, msg, sizeof(*reply) + msg->count * sizeof(reply->entries[0]));
    reply->msg.count = msg->count;
    store->counts.lookup_keys += msg->count;
    if (store->enabled) {
        kvt_find_keys(store, msg->ns - 1, request->keys, msg->count);
        for (uint32_t i = 0; i < msg->count; i++) {
            bool hit = lookup_one(store, request, msg->ns - 1, i, &reply->entries[i]);

            run += hit;
            if (!hit && !request->each)
                break;
        }
    } else {
        store->counts.off_requests++;
    }
    reply->msg.status = (int32_t)run;
    kvt_reply_send(store, client, &reply->msg);
    kvt_hist_time(&store->hists[KVT_HIST_LOOKUP_TIME], store->last_message_ns,
                  kvt_store_now(store));
}

void kvt_handle_touch(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    const struct kvt_msg_keys *request = (const struct kvt_msg_keys *)msg;
    int32_t touched = 0;

    kvt_find_keys(store, msg->ns - 1, request->keys, msg->count);
    for (uint32_t i = 0; i < msg->count; i++) {
        if (store->found[i] == KVT_INDEX_NONE ||
            !kvt_index_present(kvt_index_at(&store->index, store->found[i])))
            continue;
        kvt_entry_used(store, store->found[i]);
        kvt_admit_use(store, store->found[i]);
        touched++;
    }
    if (msg->cookie)
        kvt_reply_status(store, client, msg->op, msg->cookie, touched);
}

static bool pin_one(struct kvt_store *store, uint32_t client, uint32_t entry)
{
    const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);

    if (!kvt_index_present(e))
        return false;
    if ((!e->pinned &&
         store->pinned_bytes + kvt_entry_bytes(store, entry) > store->params.pin_bytes_max) ||
        !kvt_pins_add(&store->pins, entry, client)) {
        store->counts.pin_refused++;
        return false;
    }
    kvt_entry_set_pinned(store, entry, true);
    return true;
}

static bool unpin_one(struct kvt_store *store, uint32_t client, uint32_t entry)
{
    if (!kvt_pins_remove(&store->pins, entry, client))
        return false;
    if (!kvt_pins_any(&store->pins, entry))
        kvt_entry_set_pinned(store, entry, false);
    return true;
}

void kvt_pins_client_gone(struct kvt_store *store, uint32_t client)
{
    uint32_t cursor = 0, entry;

    while (kvt_pins_pop(&store->pins, client, &cursor, &entry))
        if (!kvt_pins_any(&store->pins, entry))
            kvt_entry_set_pinned(store, entry, false);
}

void kvt_handle_pin(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    const struct kvt_msg_keys *request = (const struct kvt_msg_keys *)msg;
    int32_t count = 0;

    kvt_find_keys(store, msg->ns - 1, request->keys, msg->count);
    for (uint32_t i = 0; i < msg->count; i++)
        if (store->found[i] != KVT_INDEX_NONE)
            count += msg->op == KVT_OP_PIN ? pin_one(store, client, store->found[i])
                                           : unpin_one(store, client, store->found[i]);
    kvt_reply_status(store, client, msg->op, msg->cookie, count);
}
