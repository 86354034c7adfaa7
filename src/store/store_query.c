/* Messages that ask and mark: LOOKUP, TOUCH, PIN, UNPIN.
 * Threads: the store's owner. Allocates nothing.
 */
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"

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
    if (kvt_entry_too_long(store, e, kvt_entry_bytes(store, entry))) {
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
        kvt_find_keys(store, kvt_handle_number(msg->ns), request->keys, msg->count);
        for (uint32_t i = 0; i < msg->count; i++) {
            bool hit =
                lookup_one(store, request, kvt_handle_number(msg->ns), i, &reply->entries[i]);

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

    kvt_find_keys(store, kvt_handle_number(msg->ns), request->keys, msg->count);
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

    kvt_find_keys(store, kvt_handle_number(msg->ns), request->keys, msg->count);
    for (uint32_t i = 0; i < msg->count; i++)
        if (store->found[i] != KVT_INDEX_NONE)
            count += msg->op == KVT_OP_PIN ? pin_one(store, client, store->found[i])
                                           : unpin_one(store, client, store->found[i]);
    kvt_reply_status(store, client, msg->op, msg->cookie, count);
}
