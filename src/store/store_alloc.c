/* The store path: ALLOC gives slots to fill, COMMIT makes them blocks, ABORT gives them back.
 *
 * Rules
 *  1. A key that is being filled by somebody is granted again: the first COMMIT wins, the loser's
 *     slot is freed. So nobody waits for a client that may have died.
 *  2. A block of a lower level is replaced at COMMIT of a higher one, in one step: the old slot is
 *     freed at its last unpin, the old place on disk leaves the index. A block that cools goes the
 *     other way, and only where ALLOC said so; until its COMMIT the better record stays.
 *     Not so while a slot is outstanding that was allocated before the last COMMIT of its key: it
 *     has the older sequence, and after a restart the higher sequence would win. It has lost.
 *  3. When a block of a chain can be neither found nor given a slot, or the parent that a request
 *     names is not there, the blocks after it are dropped too: no lookup would reach them.
 *     Nor is a block evicted to make room for its own descendant, when it is only in DRAM.
 *  4. What a client has written is believed in nothing that matters: the header in the slot must
 *     repeat what was granted, and the checksum is verified by every reader.
 * Threads: the store's owner. Allocates nothing.
 */
#include <string.h>

#include "kvtier/error.h"
#include "store/store_impl.h"

/* A late link may walk that many ancestors to make sure that it closes no cycle. */
#define LINK_STEPS 256u

struct chain { /* an ALLOC in progress */
    struct kvt_store *store;
    const struct kvt_msg_alloc *request;
    uint32_t client;
    uint32_t ns;
    uint8_t map;                /* of all its records */
    bool loose;                 /* a group whose blocks need no predecessors */
    struct kvt_full_key parent; /* of the next key */
    bool has_parent;
    bool broken; /* rule 3 */
};

static void link_parent(struct chain *chain, uint32_t entry)
{
    struct kvt_store *store = chain->store;
    uint32_t parent;

    if (!chain->has_parent || kvt_index_at(&store->index, entry)->parent != KVT_INDEX_NONE)
        return;
    parent = kvt_entry_find(store, &chain->parent);
    if (parent == KVT_INDEX_NONE || !kvt_index_link(&store->index, entry, parent, LINK_STEPS))
        return;
    kvt_admit_continued(store, parent);
    if (kvt_index_at(&store->index, parent)->slot != KVT_INDEX_NONE)
        kvt_slot_settle(store, kvt_index_at(&store->index, parent)->slot);
}

/* The nearest ancestor in DRAM is a leaf until this block has its slot, so it would be next to go:
 * when it is nowhere else, storing its descendant would cut the chain under its own feet. So would
 * the record that this one is to replace: nothing is gained if it goes before the new one is there.
 * Pin it while room is made. Returns its slot, or NONE. */
static uint32_t pin_needed(const struct chain *chain, uint32_t entry)
{
    struct kvt_store *store = chain->store;
    uint32_t at = entry;

    for (uint32_t steps = 0; at != KVT_INDEX_NONE && steps < LINK_STEPS; steps++) {
        const struct kvt_index_entry *e = kvt_index_at(&store->index, at);

        if (e->slot != KVT_INDEX_NONE) {
            if (e->on_disk && !e->older)
                return KVT_SLOT_NONE;
            kvt_slot_pin(&store->slots, e->slot);
            kvt_slot_settle(store, e->slot);
            return e->slot;
        }
        if (at == entry && e->parent == KVT_INDEX_NONE && chain->has_parent)
            at = kvt_entry_find(store, &chain->parent); /* not linked yet */
        else
            at = e->parent;
    }
    return KVT_SLOT_NONE;
}

static uint32_t make_room(const struct chain *chain, uint32_t entry, uint32_t bytes)
{
    struct kvt_store *store = chain->store;
    uint32_t needed = pin_needed(chain, entry);
    uint32_t slot = kvt_room_slot(store, bytes, KVT_ROOM_STORE);

    if (needed != KVT_SLOT_NONE) {
        kvt_slot_unpin(&store->slots, needed);
        kvt_slot_settle(store, needed);
    }
    return slot;
}

static unsigned write_policy(const struct kvt_store *store, const struct kvt_msg_alloc *request)
{
    if (request->write != KVT_WRITE_DEFAULT)
        return request->write;
    return store->params.write ? (unsigned)store->params.write : KVT_WRITE_THROUGH;
}

/* A slot for one key, in state FILLING and held by the client. */
static int32_t grant(struct chain *chain, uint32_t entry, const struct kvt_full_key *full,
                     struct kvt_alloc_entry *out)
{
    struct kvt_store *store = chain->store;
    uint32_t bytes = kvt_namespace_record_bytes(&store->spaces, chain->ns, chain->map);
    uint32_t slot = make_room(chain, entry, bytes);
    struct kvt_slot *s;

    if (slot == KVT_SLOT_NONE)
        return KVT_E_DROPPED;
    s = kvt_slot_at(&store->slots, slot);
    s->filler = 1;
    if (!kvt_slot_hold(&store->slots, slot, chain->client)) {
        kvt_slot_free(store, slot);
        return KVT_E_DROPPED;
    }
    s->key = *full;
    s->entry = entry;
    s->map = chain->map;
    s->policy = write_policy(store, chain->request) & 15u;
    s->since_us = (uint32_t)(store->last_message_ns / 1000);
    s->replace = chain->request->replace;
    s->sequence = store->sequence_next++;
    kvt_namespace_at(&store->spaces, chain->ns)->filling_bytes += bytes;
    out->slot = slot;
    out->generation = s->generation;
    out->record_bytes = bytes;
    out->arena_offset = kvt_slot_offset(&store->slots, slot);
    out->sequence = s->sequence;
    return 0;
}

/* Whether a record of map `map` would take the place of the entry's, which is present. */
static bool would_replace(const struct kvt_index_entry *e, unsigned map, uint8_t replace)
{
    int present = kvt_map_id_level(e->map), wanted = kvt_map_id_level(map);

    return replace == KVT_REPLACE_COOL ? present > wanted : present < wanted;
}

/* Whether the present copy is good enough for this request. */
static bool serves(const struct chain *chain, const struct kvt_index_entry *e)
{
    uint8_t replace = chain->request->replace;

    return kvt_index_present(e) &&
           (replace == KVT_REPLACE_NEW || !would_replace(e, chain->map, replace));
}

static int32_t alloc_key(struct chain *chain, const struct kvt_full_key *full,
                         struct kvt_alloc_entry *out)
{
    struct kvt_store *store = chain->store;
    uint32_t entry = kvt_ttl_find(store, full);
    struct kvt_index_entry *e;
    int32_t status;

    if (entry != KVT_INDEX_NONE && !kvt_entry_is(store, entry, full)) {
        store->counts.index_collision++;
        return KVT_E_DROPPED;
    }
    if (entry != KVT_INDEX_NONE && serves(chain, kvt_index_at(&store->index, entry))) {
        kvt_entry_used(store, entry);
        kvt_admit_use(store, entry);
        link_parent(chain, entry);
        store->counts.alloc_exists++;
        return KVT_E_EXISTS;
    }
    if (chain->broken) {
        store->counts.alloc_dropped_chain++;
        return KVT_E_ORPHAN;
    }
    if (!kvt_quota_room(
            store, chain->ns, kvt_namespace_record_bytes(&store->spaces, chain->ns, chain->map),
            chain->has_parent ? kvt_entry_find(store, &chain->parent) : KVT_INDEX_NONE)) {
        store->counts.quota_refused++;
        return KVT_E_DROPPED;
    }
    entry = kvt_entry_get(store, chain->ns, full);
    if (entry == KVT_INDEX_NONE) {
        store->counts.alloc_dropped_index++;
        return KVT_E_DROPPED;
    }
    e = kvt_index_at(&store->index, entry);
    if (e->filling == KVT_INDEX_FILLING_MAX) {
        store->counts.alloc_dropped_dram++;
        return KVT_E_DROPPED;
    }
    if (kvt_client_fills(store, chain->client,
                         kvt_namespace_record_bytes(&store->spaces, chain->ns, chain->map))) {
        store->counts.alloc_dropped_dram++;
        kvt_entry_settle(store, entry);
        return KVT_E_DROPPED;
    }
    kvt_entry_fill_begin(store, entry); /* from here on making room cannot remove the entry */
    status = grant(chain, entry, full, out);
    /* Linked last: a parent that is on disk as well may leave DRAM to make room for its child. */
    if (!status) {
        link_parent(chain, entry);
        store->counts.alloc_granted++;
        return 0;
    }
    store->counts.alloc_dropped_dram++;
    kvt_entry_fill_end(store, entry);
    kvt_entry_settle(store, entry);
    return status;
}

static void alloc_chain(struct chain *chain, struct kvt_alloc_entry *entries)
{
    const struct kvt_msg_alloc *request = chain->request;
    struct kvt_store *store = chain->store;

    for (uint32_t i = 0; i < request->msg.count; i++) {
        struct kvt_full_key full;
        uint32_t entry;

        kvt_key_full(store, chain->ns, &request->keys[i], &full);
        entries[i].status = alloc_key(chain, &full, &entries[i]);
        if (chain->loose)
            continue;
        if (entries[i].status == KVT_E_DROPPED) {
            entry = kvt_entry_find(store, &full);
            if (entry == KVT_INDEX_NONE || !kvt_index_present(kvt_index_at(&store->index, entry)))
                chain->broken = true;
        }
        chain->parent = full;
        chain->has_parent = true;
    }
}

/* A block that is there, or is being stored by somebody. */
static bool reachable(const struct kvt_store *store, const struct kvt_full_key *key)
{
    uint32_t entry = kvt_entry_find(store, key);
    const struct kvt_index_entry *e;

    if (entry == KVT_INDEX_NONE)
        return false;
    e = kvt_index_at(&store->index, entry);
    return kvt_index_present(e) || e->filling;
}

static bool alloc_valid(const struct kvt_store *store, const struct kvt_msg_alloc *request,
                        uint32_t ns)
{
    if (!request->map && (request->level < KVT_LEVEL_INT4 || request->level > KVT_LEVEL_KV8))
        return false;
    return request->map <= KVT_LEVEL_RAW && request->replace <= KVT_REPLACE_COOL &&
           request->write <= KVT_WRITE_AUTO && request->parent_len <= KVT_HASH_BYTES_MAX &&
           (!request->map || kvt_namespace_record_bytes(&store->spaces, ns, request->map) != 0);
}

void kvt_handle_alloc(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    const struct kvt_msg_alloc *request = (const struct kvt_msg_alloc *)msg;
    struct chain chain = {
        .store = store, .request = request, .client = client, .ns = kvt_handle_number(msg->ns)};
    struct kvt_msg_alloc_reply *reply;
    int32_t refusal = 0;

    if (!alloc_valid(store, request, chain.ns)) {
        kvt_reply_status(store, client, msg->op, msg->cookie, KVT_E_INVAL);
        return;
    }
    chain.map = request->map;
    if (!chain.map)
        chain.map =
            kvt_namespaces_mixed(&store->spaces, chain.ns, request->level, request->record_bytes);
    if (!chain.map) {
        kvt_reply_status(store, client, msg->op, msg->cookie, KVT_E_LIMIT);
        return;
    }
    chain.loose = kvt_namespace_at(&store->spaces, chain.ns)->loose != 0;
    reply = (struct kvt_msg_alloc_reply *)kvt_reply_begin(
        store, msg, sizeof(*reply) + msg->count * sizeof(reply->entries[0]));
    reply->msg.count = msg->count;
    reply->map = chain.map;
    if (!store->enabled)
        refusal = KVT_E_MISS;
    else if (store->closing)
        refusal = KVT_E_DROPPED;
    else if (kvt_namespace_at(&store->spaces, chain.ns)->purging)
        refusal = KVT_E_CANCELED;
    if (refusal) {
        store->counts.off_requests += !store->enabled;
        store->counts.alloc_purging += refusal == KVT_E_CANCELED ? msg->count : 0;
        for (uint32_t i = 0; i < msg->count; i++)
            reply->entries[i].status = refusal;
    } else {
        if (request->parent_len && msg->count && !chain.loose) {
            struct kvt_msg_key parent = request->keys[0];

            memcpy(parent.hash, request->parent, sizeof(parent.hash));
            parent.hash_len = request->parent_len;
            kvt_key_full(store, chain.ns, &parent, &chain.parent);
            chain.has_parent = true;
            chain.broken = !reachable(store, &chain.parent);
        }
        alloc_chain(&chain, reply->entries);
        kvt_later_burst(store, (uint64_t)msg->count *
                                   kvt_namespace_record_bytes(&store->spaces, chain.ns, chain.map));
    }
    kvt_reply_send(store, client, &reply->msg);
}

/* The header in the slot must say what was granted; a copy is checked, the client may still write.
 */
static int header_check(const struct kvt_store *store, uint32_t slot, uint64_t checksum)
{
    const struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
    struct kvt_record_header header;
    int err;

    memcpy(&header, kvt_slot_bytes(store, slot), sizeof(header));
    err = kvt_record_header_check(&header);
    if (err)
        return err;
    if (memcmp(&header.key, &s->key, sizeof(s->key)) != 0 || header.map != s->map ||
        header.record_bytes != s->record_bytes || header.sequence != s->sequence ||
        header.checksum != checksum || checksum == 0)
        return KVT_E_CORRUPT;
    return 0;
}

/* The record that takes the place of a pinned one does not fit the pin budget. */
static void pin_lost(struct kvt_store *store, uint32_t entry)
{
    kvt_pins_drop(&store->pins, entry);
    store->counts.pin_refused++;
}

/* Make the slot the block of its entry, in place of the one that is there. What is on disk of that
 * one stays the entry's to fall back on, until the slot's own write has ended. */
static void publish(struct kvt_store *store, uint32_t slot, uint32_t entry)
{
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
    struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    bool pinned = e->pinned, present = kvt_index_present(e);

    if (present) {
        store->counts.commit_replaced++;
        store->counts.commit_cooled += kvt_map_id_level(e->map) > kvt_map_id_level(s->map);
        kvt_entry_set_pinned(store, entry, false);
        if (e->older) /* it was not written either: the same one stays */
            kvt_entry_set_map(store, entry, kvt_slot_at(&store->slots, e->slot)->older_map);
        e->older = 0;
        if (e->slot != KVT_INDEX_NONE)
            kvt_entry_drop_slot(store, entry, false);
        e->older = e->on_disk;
        s->older_map = e->map & 0xfu;
    }
    kvt_namespace_at(&store->spaces, e->ns)->filling_bytes -= s->record_bytes;
    kvt_entry_set_map(store, entry, s->map);
    kvt_slot_move(&store->slots, slot, KVT_SLOT_VALID);
    kvt_entry_attach(store, entry, slot);
    kvt_entry_fill_end(store, entry);
    e->raced = e->filling > 0;
    if (kvt_slot_region(&store->slots, slot) == KVT_REGION_CACHE)
        kvt_policy_enter(&store->policy, slot);
    if (pinned) {
        if (store->pinned_bytes + s->record_bytes <= store->params.pin_bytes_max)
            kvt_entry_set_pinned(store, entry, true);
        else
            pin_lost(store, entry);
    }
    if (!present)
        kvt_admit_first(store, slot);
    if (store->disk_count)
        kvt_writes_commit(store, slot);
    kvt_l3_offer(store, slot, true);
    store->counts.commit_ok++;
}

static bool replaces(const struct kvt_store *store, uint32_t entry, const struct kvt_slot *s)
{
    return kvt_entry_is(store, entry, &s->key) &&
           would_replace(kvt_index_at(&store->index, entry), s->map, s->replace);
}

static int32_t commit_one(struct kvt_store *store, uint32_t client, const struct kvt_slot_ref *ref)
{
    struct kvt_slot *s;
    uint32_t entry;
    const struct kvt_index_entry *e;
    int32_t status = 0;

    if (!kvt_slots_alive(&store->slots, ref->slot, ref->generation) ||
        !kvt_slot_at(&store->slots, ref->slot)->filler ||
        !kvt_slot_unhold(&store->slots, ref->slot, client)) {
        store->counts.commit_stale++;
        return KVT_E_STALE;
    }
    s = kvt_slot_at(&store->slots, ref->slot);
    s->filler = 0;
    entry = s->entry;
    if (s->state == KVT_SLOT_DOOMED) { /* purged while it was being filled */
        kvt_slot_settle(store, ref->slot);
        return KVT_E_CANCELED;
    }
    e = kvt_index_at(&store->index, entry);
    status = header_check(store, ref->slot, ref->checksum);
    if (status) {
        store->counts.commit_bad++;
    } else if (e->raced || (kvt_index_present(e) && !replaces(store, entry, s))) {
        store->counts.commit_lost++;
        status = kvt_index_present(e) ? KVT_E_EXISTS : KVT_E_STALE;
    }
    if (status) {
        kvt_slot_abandon(store, ref->slot);
        return status;
    }
    s->checksum = ref->checksum;
    /* microseconds, modulo 2^32: over an hour for one block does not happen */
    kvt_hist_add(&store->hists[KVT_HIST_STORE_TIME], KVT_HIST_TIME,
                 (uint64_t)((uint32_t)(store->last_message_ns / 1000) - s->since_us) * 1000);
    kvt_hist_add(&store->hists[KVT_HIST_STORE_SIZE], KVT_HIST_SIZE, s->record_bytes);
    publish(store, ref->slot, entry);
    kvt_slot_settle(store, ref->slot);
    return 0;
}

void kvt_handle_commit(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    const struct kvt_msg_slots *request = (const struct kvt_msg_slots *)msg;
    struct kvt_msg_slots *reply = (struct kvt_msg_slots *)kvt_reply_begin(store, msg, msg->bytes);

    reply->msg.count = msg->count;
    for (uint32_t i = 0; i < msg->count; i++) {
        reply->slots[i] = request->slots[i];
        reply->slots[i].status = commit_one(store, client, &request->slots[i]);
    }
    if (msg->cookie)
        kvt_reply_send(store, client, &reply->msg);
}

void kvt_handle_abort(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    const struct kvt_msg_slots *request = (const struct kvt_msg_slots *)msg;

    for (uint32_t i = 0; i < msg->count; i++) {
        const struct kvt_slot_ref *ref = &request->slots[i];
        struct kvt_slot *s;

        if (!kvt_slots_alive(&store->slots, ref->slot, ref->generation) ||
            !kvt_slot_at(&store->slots, ref->slot)->filler ||
            !kvt_slot_unhold(&store->slots, ref->slot, client)) {
            store->counts.commit_stale++;
            continue;
        }
        s = kvt_slot_at(&store->slots, ref->slot);
        s->filler = 0;
        store->counts.commit_aborted++;
        if (s->state == KVT_SLOT_DOOMED)
            kvt_slot_settle(store, ref->slot);
        else
            kvt_slot_abandon(store, ref->slot);
    }
    if (msg->cookie)
        kvt_reply_status(store, client, msg->op, msg->cookie, 0);
}
