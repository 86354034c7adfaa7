/* The tier that machines share, seen from the store: what it is known to have, look-ups that go
 * there, loads from it, and which blocks are put there.
 *
 *   LOOKUP  keys that are not here, nor known -> PROBE -> the answer waits for it, at most
 *           remote_deadline; then as any look-up
 *   ACQUIRE of a key known to be there -> slot READING -> GET -> VALID, granted; and from there on
 *           a block like one that was stored here
 *   used a second time (or committed, by option) -> queue of slots -> PUT
 *   PURGE   -> DROP, after the puts of these keys that are on their way
 *
 * Rules
 *  1. Nothing here waits: a request that does not come back in time is given up, its load misses,
 *     its look-up is answered by what is here. Its slot stays pinned until it has come back.
 *  2. What is known is a hint with an end: records that are there for a minute, absent ones for a
 *     second. A table of fixed size; a place that is taken gives way.
 *  3. A record from there gets a sequence of this store (and its id of a mixed map), so that purges
 *     and recovery order it as one of ours. Verified before it is seen: remote.h.
 *  4. A block is put when it is used again, and never twice while it is known to be there. Queued
 *     blocks are not pinned: one that has left DRAM meanwhile is passed over.
 * Threads: the store's owner. Allocates at open only.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_remote.h"

#define KNOWN_WAYS 4u
#define PRESENT_NS INT64_C(60000000000)
#define ABSENT_NS INT64_C(1000000000)
#define LINK_STEPS 256u
#define GALLOP 32u /* keys asked for at first: most chains that miss do so at once */
#define REAP 64u
#define GRACE_NS INT64_C(100000000) /* beyond a request's deadline, before it is given up here */
#define PAUSE_NS INT64_C(1000000000)
#define PURGE_NS INT64_C(30000000000)
#define PUT_DEADLINE_NS INT64_C(5000000000)

/* ---- what is known ------------------------------------------------------------------------- */

static struct kvt_known *known_at(struct kvt_store_remote *remote, struct kvt_fp fp, uint32_t way)
{
    return &remote->known[(fp.word[0] + way) & (KVT_REMOTE_KNOWN - 1)];
}

static struct kvt_known *known_find(struct kvt_store *store, struct kvt_fp fp)
{
    int64_t now = kvt_store_now(store);

    for (uint32_t way = 0; way < KNOWN_WAYS; way++) {
        struct kvt_known *k = known_at(store->remote, fp, way);

        if (k->state != KVT_KNOWN_NOTHING && k->fp.word[0] == fp.word[0] &&
            k->fp.word[1] == fp.word[1])
            return k->until_ns > now ? k : NULL;
    }
    return NULL;
}

static void known_set(struct kvt_store *store, struct kvt_fp fp, enum kvt_known_state state,
                      uint8_t map, uint32_t pages)
{
    struct kvt_known *best = known_at(store->remote, fp, 0);
    int64_t lives = state == KVT_KNOWN_ABSENT ? ABSENT_NS : PRESENT_NS;

    for (uint32_t way = 0; way < KNOWN_WAYS; way++) {
        struct kvt_known *k = known_at(store->remote, fp, way);

        if (k->fp.word[0] == fp.word[0] && k->fp.word[1] == fp.word[1]) {
            best = k;
            break;
        }
        if (k->until_ns < best->until_ns)
            best = k;
    }
    *best = (struct kvt_known){.fp = fp,
                               .until_ns = kvt_store_now(store) + lives,
                               .pages = (uint16_t)pages,
                               .map = map,
                               .state = (uint8_t)state};
}

static void known_forget(struct kvt_store *store, struct kvt_fp fp)
{
    struct kvt_known *k = known_find(store, fp);

    if (k)
        memset(k, 0, sizeof(*k));
}

static void known_forget_all(struct kvt_store_remote *remote)
{
    memset(remote->known, 0, KVT_REMOTE_KNOWN * sizeof(*remote->known));
}

/* The map id that a record of a given length has here; 0: it cannot be had here. Ids of mixed maps
 * are each store's own, with one length each. */
static uint8_t map_here(struct kvt_store *store, uint32_t ns, uint8_t map, uint32_t record_bytes)
{
    if (map >= KVT_MAP_MIXED_FIRST)
        return kvt_namespaces_mixed(&store->spaces, ns, kvt_map_id_level(map), record_bytes);
    return kvt_namespace_record_bytes(&store->spaces, ns, map) == record_bytes ? map : 0;
}

static void learn(struct kvt_store *store, uint32_t ns, const struct kvt_full_key *key,
                  const struct kvt_remote_found *found)
{
    struct kvt_fp fp = kvt_index_fingerprint(&store->index, key);
    const struct kvt_record_header *header = &found->header;
    uint8_t map = 0;

    if (found->status == KVT_E_MISS) {
        known_set(store, fp, KVT_KNOWN_ABSENT, 0, 0);
        return;
    }
    if (found->status) {
        store->counts.remote_unknown++;
        return;
    }
    if (kvt_record_header_check(header) == 0 && memcmp(&header->key, key, sizeof(*key)) == 0)
        map = map_here(store, ns, header->map, header->record_bytes);
    if (!map) { /* damaged, of another version, or of a length that this namespace has not */
        store->counts.remote_refused++;
        known_set(store, fp, KVT_KNOWN_ABSENT, 0, 0);
        return;
    }
    store->counts.remote_found++;
    known_set(store, fp, KVT_KNOWN_PRESENT, map, header->record_bytes / KVT_PAGE_BYTES);
}

bool kvt_l3_known(struct kvt_store *store, struct kvt_fp fp, uint8_t min_level, uint8_t *map)
{
    const struct kvt_known *k = store->remote ? known_find(store, fp) : NULL;

    if (!k || k->state != KVT_KNOWN_PRESENT || kvt_map_id_level(k->map) < min_level)
        return false;
    *map = k->map;
    return true;
}

/* ---- requests ------------------------------------------------------------------------------ */

static bool paused(struct kvt_store *store)
{
    return kvt_store_now(store) < store->remote->pause_ns;
}

/* The backend itself does not answer in time: it hangs. Leave it alone for a while. */
static void given_up(struct kvt_store *store)
{
    store->counts.remote_late++;
    store->remote->pause_ns = kvt_store_now(store) + PAUSE_NS;
}

static bool submit(struct kvt_store *store, struct kvt_remote_req *req, int64_t deadline_ns)
{
    struct kvt_remote *backend = store->params.remote;

    req->deadline_ns = kvt_store_now(store) + deadline_ns;
    req->status = 0;
    return backend->ops->submit(backend, req) == 0;
}

/* ---- LOOKUP -------------------------------------------------------------------------------- */

/* Whether key i, which is not known there, is to be asked for. *more: the run may go on. */
static bool wants_asking(struct kvt_store *store, const struct kvt_msg_keys *request, uint32_t ns,
                         uint32_t i, bool *more)
{
    uint32_t entry = store->found[i];
    const struct kvt_known *k;

    *more = true;
    if (entry != KVT_INDEX_NONE) {
        const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);

        if (kvt_index_present(e) || e->filling) {
            *more = kvt_index_present(e) && kvt_map_id_level(e->map) >= request->min_level;
            return false;
        }
    }
    if (kvt_namespace_at(&store->spaces, ns)->purging) {
        *more = false;
        return false;
    }
    k = known_find(store, store->fps[i]);
    if (!k || k->state == KVT_KNOWN_EXISTS || k->state == KVT_KNOWN_QUEUED)
        return true;
    if (k->state == KVT_KNOWN_ABSENT)
        store->counts.remote_negative++;
    *more = k->state == KVT_KNOWN_PRESENT && kvt_map_id_level(k->map) >= request->min_level;
    return false;
}

/* Ask for what is not known of a request's keys. false: nothing, or not now. */
static bool lookup_ask(struct kvt_store *store, struct kvt_remote_lookup *lookup)
{
    const struct kvt_msg_keys *request = (const struct kvt_msg_keys *)lookup->message;
    uint32_t ns = request->msg.ns - 1;
    uint32_t limit =
        lookup->round || store->remote->streak || request->each ? KVT_MSG_KEYS_MAX : GALLOP;
    bool more = true;

    kvt_find_keys(store, ns, request->keys, request->msg.count);
    lookup->req.count = 0;
    for (uint32_t i = 0; i < request->msg.count && lookup->req.count < limit; i++) {
        if (wants_asking(store, request, ns, i, &more))
            kvt_key_full(store, ns, &request->keys[i], &lookup->keys[lookup->req.count++]);
        else if (!more && !request->each)
            break;
    }
    if (!lookup->req.count)
        return false;
    lookup->req.op = KVT_REMOTE_PROBE;
    lookup->req.keys = lookup->keys;
    lookup->req.found = lookup->found;
    lookup->req.user = lookup;
    if (!submit(store, &lookup->req, store->params.remote_deadline_ns))
        return false;
    lookup->round++;
    lookup->busy = true;
    store->counts.remote_asked += lookup->req.count;
    return true;
}

bool kvt_l3_lookup(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    struct kvt_store_remote *remote = store->remote;
    struct kvt_remote_lookup *lookup = NULL;

    if (!remote || !store->enabled || store->closing || !msg->count || paused(store))
        return false;
    for (uint32_t i = 0; i < KVT_REMOTE_LOOKUPS && !lookup; i++)
        if (!remote->lookups[i].busy)
            lookup = &remote->lookups[i];
    if (!lookup) {
        store->counts.remote_busy++;
        return false;
    }
    memcpy(lookup->message, msg, msg->bytes);
    lookup->client = client;
    lookup->round = 0;
    lookup->end_ns = kvt_store_now(store) + store->params.remote_deadline_ns;
    lookup->answered = false;
    return lookup_ask(store, lookup);
}

static void lookup_answer(struct kvt_store *store, struct kvt_remote_lookup *lookup)
{
    lookup->answered = true;
    kvt_lookup_answer(store, lookup->client, (const struct kvt_msg *)lookup->message);
}

static void probed(struct kvt_store *store, struct kvt_remote_lookup *lookup)
{
    const struct kvt_msg_keys *request = (const struct kvt_msg_keys *)lookup->message;
    bool all = true;

    for (uint32_t i = 0; i < lookup->req.count; i++) {
        learn(store, request->msg.ns - 1, &lookup->keys[i], &lookup->found[i]);
        all = all && lookup->found[i].status == 0;
    }
    lookup->busy = false;
    if (lookup->answered)
        return;
    store->counts.remote_lookup_fail += lookup->req.status != 0;
    if (all && lookup->round == 1 && !store->closing && kvt_store_now(store) < lookup->end_ns &&
        lookup_ask(store, lookup))
        return;
    store->remote->streak = all;
    lookup_answer(store, lookup);
}

static int64_t lookups_run(struct kvt_store *store, int64_t now)
{
    int64_t next_run = INT64_MAX;

    for (uint32_t i = 0; i < KVT_REMOTE_LOOKUPS; i++) {
        struct kvt_remote_lookup *lookup = &store->remote->lookups[i];
        int64_t late_ns = lookup->end_ns + GRACE_NS;

        if (!lookup->busy || lookup->answered)
            continue;
        if (now < late_ns) {
            next_run = KVT_MIN(next_run, late_ns);
            continue;
        }
        given_up(store);
        lookup_answer(store, lookup);
    }
    return next_run;
}

/* ---- loads --------------------------------------------------------------------------------- */

bool kvt_l3_has(struct kvt_store *store, const struct kvt_load *load,
                const struct kvt_full_key *full, uint32_t *bytes)
{
    uint32_t entry;
    const struct kvt_known *k;

    if (!store->remote || kvt_namespace_at(&store->spaces, load->ns)->purging)
        return false;
    entry = kvt_entry_find(store, full);
    if (entry != KVT_INDEX_NONE) {
        const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);

        if (kvt_index_present(e) || e->filling)
            return false;
    }
    k = known_find(store, kvt_index_fingerprint(&store->index, full));
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
    const struct kvt_known *k = known_find(store, fp); /* there: kvt_l3_has() said so */
    uint32_t bytes, entry, slot;
    struct kvt_slot *s;
    uint8_t map;

    if (!may_read || !get || !k || load->ahead >= KVT_STORE_READ_AHEAD ||
        (load->prefetch && store->prefetch_going >= KVT_STORE_PREFETCH_READS))
        return KVT_WAITS_FOR_READ;
    map = k->map;
    bytes = (uint32_t)k->pages * KVT_PAGE_BYTES;
    if (store->params.ns_bytes_max && !kvt_quota_room(store, load->ns, bytes, KVT_INDEX_NONE)) {
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
                                       .user = get};
    if (!submit(store, &get->req, store->params.remote_deadline_ns)) {
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
    s->policy = (store->params.write ? (unsigned)store->params.write : KVT_WRITE_THROUGH) & 3u;
    if (kvt_slot_region(&store->slots, slot) == KVT_REGION_CACHE)
        kvt_policy_enter(&store->policy, slot);
    if (store->disk_count)
        kvt_writes_commit(store, slot);
    kvt_reads_wake(store, slot, true);
}

static void got(struct kvt_store *store, struct kvt_remote_get *get)
{
    uint32_t slot = get->slot;
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
    int status = get->req.status;

    if (!status && s->state == KVT_SLOT_READING)
        status = kvt_reads_accept(store, slot);
    if (!get->given_up)
        count_get(store, status, s->record_bytes);
    if (status) /* whatever it is, do not ask for it again at once */
        known_set(store, kvt_index_fingerprint(&store->index, &get->key), KVT_KNOWN_ABSENT, 0, 0);
    if (status || s->state != KVT_SLOT_READING)
        get_lost(store, slot);
    else
        arrived(store, slot);
    get_free(store, get);
    kvt_slot_unpin(&store->slots, slot);
    kvt_slot_settle(store, slot);
}

static int64_t gets_run(struct kvt_store *store, int64_t now)
{
    int64_t next_run = INT64_MAX;

    for (uint32_t i = 0; i < KVT_REMOTE_GETS && store->reads_going; i++) {
        struct kvt_remote_get *get = &store->remote->gets[i];

        if (!get->busy || get->given_up)
            continue;
        if (now < get->req.deadline_ns + GRACE_NS) {
            next_run = KVT_MIN(next_run, get->req.deadline_ns + GRACE_NS);
            continue;
        }
        get->given_up = true;
        given_up(store);
        get_lost(store, get->slot); /* doomed: the pin of the read holds it */
    }
    return next_run;
}

/* ---- puts ---------------------------------------------------------------------------------- */

void kvt_l3_offer(struct kvt_store *store, uint32_t slot, bool first)
{
    struct kvt_store_remote *remote = store->remote;
    const struct kvt_slot *s;
    const struct kvt_known *k;
    struct kvt_fp fp;

    if (!remote || store->params.remote_write == KVT_REMOTE_WRITE_OFF ||
        (first && store->params.remote_write != KVT_REMOTE_WRITE_ALL))
        return;
    s = kvt_slot_at(&store->slots, slot);
    if (s->state != KVT_SLOT_VALID)
        return;
    fp = kvt_index_at(&store->index, s->entry)->fp;
    k = known_find(store, fp);
    if (k &&
        (k->state == KVT_KNOWN_EXISTS || k->state == KVT_KNOWN_QUEUED ||
         (k->state == KVT_KNOWN_PRESENT && kvt_map_id_level(k->map) >= kvt_map_id_level(s->map))))
        return;
    if (remote->queued == KVT_REMOTE_QUEUE) {
        store->counts.remote_put_dropped++;
        return;
    }
    remote->queue[(remote->queue_at + remote->queued++) % KVT_REMOTE_QUEUE] =
        (struct kvt_remote_queued){.slot = slot,
                                   .generation = s->generation,
                                   .replace = k && k->state == KVT_KNOWN_PRESENT};
    known_set(store, fp, KVT_KNOWN_QUEUED, s->map, s->record_bytes / KVT_PAGE_BYTES);
    store->again = 1;
}

/* Start the put of one queued block. false: not now. */
static bool put_start(struct kvt_store *store, const struct kvt_remote_queued *queued)
{
    struct kvt_store_remote *remote = store->remote;
    struct kvt_remote_put *put = remote->put_free;
    struct kvt_slot *s = kvt_slot_at(&store->slots, queued->slot);

    put->key = s->key;
    put->fp = kvt_index_at(&store->index, s->entry)->fp;
    put->map = s->map;
    put->slot = queued->slot;
    put->req = (struct kvt_remote_req){.op = KVT_REMOTE_PUT,
                                       .count = 1,
                                       .keys = &put->key,
                                       .record = kvt_slot_bytes(store, queued->slot),
                                       .record_bytes = s->record_bytes,
                                       .replace = queued->replace,
                                       .user = put};
    if (!submit(store, &put->req, PUT_DEADLINE_NS))
        return false;
    remote->put_free = put->next;
    put->busy = true;
    remote->puts_going++;
    remote->put_bytes += s->record_bytes;
    kvt_slot_pin(&store->slots, queued->slot);
    kvt_slot_settle(store, queued->slot);
    return true;
}

static int64_t puts_run(struct kvt_store *store, int64_t now)
{
    struct kvt_store_remote *remote = store->remote;

    if (!remote->queued)
        return INT64_MAX;
    if (now < remote->put_pause_ns)
        return remote->put_pause_ns;
    while (remote->queued && remote->put_free) {
        const struct kvt_remote_queued *queued = &remote->queue[remote->queue_at];
        const struct kvt_slot *s = kvt_slot_at(&store->slots, queued->slot);

        if (kvt_slots_alive(&store->slots, queued->slot, queued->generation) &&
            s->state == KVT_SLOT_VALID) {
            if (remote->puts_going &&
                remote->put_bytes + s->record_bytes > store->params.remote_queue_bytes)
                return INT64_MAX; /* the next completion */
            if (!put_start(store, queued))
                return INT64_MAX;
        } else {
            store->counts.remote_put_gone++;
        }
        remote->queue_at = (remote->queue_at + 1) % KVT_REMOTE_QUEUE;
        remote->queued--;
    }
    return INT64_MAX;
}

static void was_put(struct kvt_store *store, struct kvt_remote_put *put)
{
    struct kvt_store_remote *remote = store->remote;
    uint32_t slot = put->slot;
    uint32_t bytes = put->req.record_bytes;
    int status = put->req.status;

    if (!status) {
        store->counts.remote_put++;
        store->counts.remote_put_bytes += bytes;
        known_set(store, put->fp, KVT_KNOWN_PRESENT, put->map, bytes / KVT_PAGE_BYTES);
    } else if (status == KVT_E_EXISTS) {
        store->counts.remote_put_exists++;
        known_set(store, put->fp, KVT_KNOWN_EXISTS, 0, 0);
    } else {
        if (status == KVT_E_NO_SPACE)
            store->counts.remote_put_full++;
        else
            store->counts.remote_put_fail++;
        known_forget(store, put->fp);
        remote->put_pause_ns = kvt_store_now(store) + PAUSE_NS;
    }
    remote->puts_going--;
    remote->put_bytes -= bytes;
    put->busy = false;
    put->next = remote->put_free;
    remote->put_free = put;
    kvt_slot_unpin(&store->slots, slot);
    kvt_slot_settle(store, slot);
}

/* ---- PURGE --------------------------------------------------------------------------------- */

void kvt_l3_purge(struct kvt_store *store, const struct kvt_store_purge *purge)
{
    struct kvt_remote_purge *drop;

    if (!store->remote || purge->silent)
        return;
    drop = &store->remote->purges[purge - store->purges];
    if (drop->busy) { /* the one before in this place was given up on, and is still under way */
        store->counts.remote_purge_fail++;
        return;
    }
    drop->state = KVT_DROP_WAITS;
    drop->req = (struct kvt_remote_req){.op = purge->whole ? KVT_REMOTE_DROP_NS : KVT_REMOTE_DROP,
                                        .keys = drop->keys,
                                        .user = drop};
    for (uint32_t i = 0; i < purge->count; i++)
        drop->keys[drop->req.count++] = purge->items[i].key;
    known_forget_all(store->remote);
}

/* A put of what is purged is on its way: it would land after the DROP. */
static bool put_meant(const struct kvt_store *store, const struct kvt_remote_purge *drop)
{
    for (uint32_t i = 0; i < KVT_REMOTE_PUTS; i++) {
        const struct kvt_remote_put *put = &store->remote->puts[i];

        if (!put->busy)
            continue;
        if (drop->req.op == KVT_REMOTE_DROP_NS &&
            memcmp(put->key.ns, drop->keys[0].ns, KVT_NS_BYTES) == 0)
            return true;
        for (uint32_t k = 0; drop->req.op == KVT_REMOTE_DROP && k < drop->req.count; k++)
            if (memcmp(&put->key, &drop->keys[k], sizeof(put->key)) == 0)
                return true;
    }
    return false;
}

bool kvt_l3_purged(struct kvt_store *store, struct kvt_store_purge *purge)
{
    struct kvt_remote_purge *drop;

    if (!store->remote || purge->silent)
        return true;
    drop = &store->remote->purges[purge - store->purges];
    switch (drop->state) {
    case KVT_DROP_WAITS:
        if (put_meant(store, drop))
            return false;
        drop->busy = submit(store, &drop->req, PURGE_NS);
        drop->state = drop->busy ? KVT_DROP_GOES : KVT_DROP_DONE;
        if (!drop->busy)
            drop->req.status = -EAGAIN;
        return kvt_l3_purged(store, purge);
    case KVT_DROP_GOES:
        if (drop->busy && kvt_store_now(store) < drop->req.deadline_ns + GRACE_NS)
            return false;
        if (drop->busy) {
            given_up(store);
            drop->req.status = KVT_E_DEADLINE;
        }
        break;
    case KVT_DROP_DONE:
        break;
    case KVT_DROP_NONE:
        return true;
    }
    drop->state = KVT_DROP_NONE;
    known_forget_all(store->remote); /* look-ups may have met what was about to go */
    if (drop->req.status) {
        store->counts.remote_purge_fail++;
        if (!purge->status)
            purge->status = drop->req.status;
    } else {
        store->counts.remote_purged += drop->req.removed;
    }
    return true;
}

/* ---- the loop ------------------------------------------------------------------------------ */

static void completed(struct kvt_store *store, struct kvt_remote_req *req)
{
    switch (req->op) {
    case KVT_REMOTE_PROBE:
        probed(store, req->user);
        break;
    case KVT_REMOTE_GET:
        got(store, req->user);
        break;
    case KVT_REMOTE_PUT:
        was_put(store, req->user);
        break;
    case KVT_REMOTE_DROP:
    case KVT_REMOTE_DROP_NS:
        ((struct kvt_remote_purge *)req->user)->busy = false;
        break;
    }
}

int64_t kvt_l3_run(struct kvt_store *store)
{
    struct kvt_remote *backend = store->params.remote;
    struct kvt_remote_req *done[REAP];
    int64_t now, next_run;
    uint32_t count;

    if (!store->remote)
        return INT64_MAX;
    while ((count = backend->ops->reap(backend, done, REAP)) != 0) {
        store->activity++;
        for (uint32_t i = 0; i < count; i++)
            completed(store, done[i]);
    }
    now = kvt_store_now(store);
    next_run = lookups_run(store, now);
    next_run = KVT_MIN(next_run, gets_run(store, now));
    next_run = KVT_MIN(next_run, puts_run(store, now));
    for (uint32_t i = 0; i < KVT_STORE_PURGES; i++)
        if (store->remote->purges[i].busy)
            next_run = KVT_MIN(next_run, store->remote->purges[i].req.deadline_ns + GRACE_NS);
    return next_run;
}

bool kvt_l3_idle(const struct kvt_store *store)
{
    const struct kvt_store_remote *remote = store->remote;

    /* what waits for a server that takes nothing waits for nothing */
    return !remote || (!remote->puts_going &&
                       (!remote->queued || kvt_store_now(store) < remote->put_pause_ns));
}

void kvt_l3_stats(const struct kvt_store *store, struct kvt_store_stats *stats)
{
    struct kvt_remote_stats backend = {0};

    if (!store->remote)
        return;
    store->params.remote->ops->stats(store->params.remote, &backend);
    stats->remote_nodes = backend.nodes;
    stats->remote_nodes_down = backend.nodes_down;
    stats->remote_connects = backend.connects;
    stats->remote_losses = backend.losses;
    stats->remote_redirects = backend.redirects;
    stats->remote_auth_fails = backend.auth_fails;
    stats->remote_queue = store->remote->queued + store->remote->puts_going;
}

/* ---- open and close ------------------------------------------------------------------------ */

int kvt_l3_init(struct kvt_store *store)
{
    struct kvt_store_remote *remote;

    if (!store->params.remote)
        return 0;
    remote = calloc(1, sizeof(*remote));
    if (!remote)
        return -ENOMEM;
    store->remote = remote;
    remote->known = calloc(KVT_REMOTE_KNOWN, sizeof(*remote->known));
    remote->lookups = calloc(KVT_REMOTE_LOOKUPS, sizeof(*remote->lookups));
    remote->purges = calloc(KVT_STORE_PURGES, sizeof(*remote->purges));
    if (!remote->known || !remote->lookups || !remote->purges)
        return -ENOMEM;
    for (uint32_t i = 0; i < KVT_REMOTE_GETS; i++) {
        remote->gets[i].next = remote->get_free;
        remote->get_free = &remote->gets[i];
    }
    for (uint32_t i = 0; i < KVT_REMOTE_PUTS; i++) {
        remote->puts[i].next = remote->put_free;
        remote->put_free = &remote->puts[i];
    }
    return 0;
}

void kvt_l3_close(struct kvt_store *store)
{
    struct kvt_store_remote *remote = store->remote;

    if (!remote)
        return;
    for (uint32_t i = 0; remote->lookups && i < KVT_REMOTE_LOOKUPS; i++)
        if (remote->lookups[i].busy && !remote->lookups[i].answered)
            lookup_answer(store, &remote->lookups[i]);
    store->params.remote->ops->stop(store->params.remote);
}

void kvt_l3_destroy(struct kvt_store *store)
{
    if (!store->remote)
        return;
    free(store->remote->known);
    free(store->remote->lookups);
    free(store->remote->purges);
    free(store->remote);
    store->remote = NULL;
}
