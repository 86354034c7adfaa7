/* What is put to the shared tier, and removed there: used a second time (or committed, by option)
 * -> queue of slots -> PUT; PURGE -> DROP, after the puts of these keys that are on their way.
 *
 * A block is put when it is used again, and never twice while it is known to be there. What was
 * found damaged there is replaced as soon as it has been computed: that it was asked for is its
 * second use, and nobody has any of it before. Queued
 * blocks are not pinned: one that has left DRAM meanwhile is passed over.
 *
 * From a PURGE on until its DROP has ended, what it names is neither asked for nor read there: it
 * would be a block of this store again, above the purge's bound, when the answer says it is gone.
 * Threads: the store's owner. Allocates nothing.
 */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_remote.h"

#define PURGE_NS INT64_C(600000000000)      /* of a namespace, as long as something is removed */
#define PURGE_STILL_NS INT64_C(10000000000) /* without anything removed there it is given up */
#define PUT_DEADLINE_NS INT64_C(5000000000)

void kvt_l3_offer(struct kvt_store *store, uint32_t slot, bool first)
{
    struct kvt_store_remote *remote = store->remote;
    const struct kvt_slot *s;
    const struct kvt_known *k;
    struct kvt_fp fp;
    bool replace;

    if (!remote || store->params.remote_write == KVT_REMOTE_WRITE_OFF)
        return;
    s = kvt_slot_at(&store->slots, slot);
    if (s->state != KVT_SLOT_VALID)
        return;
    fp = kvt_index_at(&store->index, s->entry)->fp;
    k = kvt_l3_known_find(store, fp);
    replace = k && (k->state == KVT_KNOWN_PRESENT || k->state == KVT_KNOWN_DAMAGED);
    if (first && store->params.remote_write != KVT_REMOTE_WRITE_ALL &&
        !(k && k->state == KVT_KNOWN_DAMAGED))
        return;
    if (k &&
        (k->state == KVT_KNOWN_EXISTS || k->state == KVT_KNOWN_QUEUED ||
         (k->state == KVT_KNOWN_PRESENT && kvt_map_id_level(k->map) >= kvt_map_id_level(s->map))))
        return;
    if (remote->queued == KVT_REMOTE_QUEUE) {
        store->counts.remote_put_dropped++;
        return;
    }
    remote->queue[(remote->queue_at + remote->queued++) % KVT_REMOTE_QUEUE] =
        (struct kvt_remote_queued){.slot = slot, .generation = s->generation, .replace = replace};
    kvt_l3_known_set(store, fp, KVT_KNOWN_QUEUED, s->map, s->record_bytes / KVT_PAGE_BYTES);
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
    put->req = (struct kvt_remote_req){
        .op = KVT_REMOTE_PUT,
        .count = 1,
        .keys = &put->key,
        .record = kvt_slot_bytes(store, queued->slot),
        .record_bytes = s->record_bytes,
        .replace = queued->replace,
        .ttl_ns = kvt_l3_ttl(store, kvt_index_at(&store->index, s->entry)->ns),
        .user = put};
    if (!kvt_l3_submit(store, &put->req, PUT_DEADLINE_NS))
        return false;
    remote->put_free = put->next;
    put->busy = true;
    remote->puts_going++;
    remote->put_bytes += s->record_bytes;
    kvt_slot_pin(&store->slots, queued->slot);
    kvt_slot_settle(store, queued->slot);
    return true;
}

int64_t kvt_l3_puts_run(struct kvt_store *store, int64_t now)
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

void kvt_l3_was_put(struct kvt_store *store, struct kvt_remote_put *put)
{
    struct kvt_store_remote *remote = store->remote;
    uint32_t slot = put->slot;
    uint32_t bytes = put->req.record_bytes;
    int status = put->req.status;

    if (!status) {
        store->counts.remote_put++;
        store->counts.remote_put_bytes += bytes;
        kvt_l3_known_set(store, put->fp, KVT_KNOWN_PRESENT, put->map, bytes / KVT_PAGE_BYTES);
    } else if (status == KVT_E_EXISTS) {
        store->counts.remote_put_exists++;
        kvt_l3_known_set(store, put->fp, KVT_KNOWN_EXISTS, 0, 0);
    } else {
        if (status == KVT_E_NO_SPACE)
            store->counts.remote_put_full++;
        else
            store->counts.remote_put_fail++;
        kvt_l3_known_forget(store, put->fp);
        remote->put_pause_ns = kvt_store_now(store) + KVT_REMOTE_PAUSE_NS;
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
    drop->until_ns = kvt_store_now(store) + PURGE_STILL_NS;
    if (drop->busy) { /* the one before in this place was given up on, and is still under way */
        drop->state = KVT_DROP_DONE;
        drop->refused = -EAGAIN;
        return;
    }
    drop->state = KVT_DROP_WAITS;
    drop->refused = 0;
    drop->seen = 0;
    drop->req = (struct kvt_remote_req){
        .op = purge->items[0].kind == KVT_JOURNAL_PURGE_NS ? KVT_REMOTE_DROP_NS : KVT_REMOTE_DROP,
        .keys = drop->keys,
        .user = drop};
    for (uint32_t i = 0; i < purge->count; i++)
        drop->keys[drop->req.count++] = purge->items[i].key;
    kvt_l3_known_forget_all(store->remote);
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

static bool same_key(const struct kvt_full_key *a, const struct kvt_full_key *b)
{
    return memcmp(a->hash, b->hash, sizeof(a->hash)) == 0 && memcmp(a, b, sizeof(*a)) == 0;
}

bool kvt_l3_dropping(const struct kvt_store *store, const struct kvt_full_key *key)
{
    for (uint32_t i = 0; i < KVT_STORE_PURGES; i++) {
        const struct kvt_remote_purge *drop = &store->remote->purges[i];

        if (drop->state != KVT_DROP_WAITS && drop->state != KVT_DROP_GOES)
            continue;
        if (drop->req.op == KVT_REMOTE_DROP_NS &&
            memcmp(key->ns, drop->keys[0].ns, KVT_NS_BYTES) == 0)
            return true;
        for (uint32_t k = 0; drop->req.op == KVT_REMOTE_DROP && k < drop->req.count; k++)
            if (same_key(key, &drop->keys[k]))
                return true;
    }
    return false;
}

/* Whether it goes on: the backend has it, and removes something. */
static bool drop_goes_on(const struct kvt_store *store, struct kvt_remote_purge *drop)
{
    uint64_t removed = atomic_load_explicit(&drop->req.removed, memory_order_relaxed);
    int64_t now = kvt_store_now(store);

    if (removed != drop->seen)
        drop->until_ns = KVT_MIN(now + PURGE_STILL_NS, drop->req.deadline_ns + KVT_REMOTE_GRACE_NS);
    drop->seen = removed;
    return drop->busy && now < drop->until_ns;
}

static int drop_status(const struct kvt_remote_purge *drop)
{
    return drop->refused ? drop->refused : drop->req.status;
}

bool kvt_l3_purged(struct kvt_store *store, struct kvt_store_purge *purge)
{
    struct kvt_remote_purge *drop;

    if (!store->remote || purge->silent)
        return true;
    drop = &store->remote->purges[purge - store->purges];
    switch (drop->state) {
    case KVT_DROP_WAITS:
        if (put_meant(store, drop) && kvt_store_now(store) < drop->until_ns)
            return false;
        drop->state = KVT_DROP_DONE;
        if (put_meant(store, drop)) { /* it hangs: what it puts may come after all */
            kvt_l3_given_up(store);
            drop->refused = KVT_E_DEADLINE;
        } else {
            drop->busy = kvt_l3_submit(
                store, &drop->req, drop->req.op == KVT_REMOTE_DROP_NS ? PURGE_NS : PURGE_STILL_NS);
            if (drop->busy)
                drop->state = KVT_DROP_GOES;
            else
                drop->refused = -EAGAIN;
        }
        return kvt_l3_purged(store, purge);
    case KVT_DROP_GOES:
        if (drop_goes_on(store, drop))
            return false;
        if (drop->busy) {
            kvt_l3_given_up(store);
            drop->refused = KVT_E_DEADLINE;
        }
        break;
    case KVT_DROP_DONE:
        break;
    case KVT_DROP_NONE:
        return true;
    }
    drop->state = KVT_DROP_NONE;
    if (drop->refused != -EAGAIN) /* else it is another purge's */
        purge->remote_removed = atomic_load_explicit(&drop->req.removed, memory_order_relaxed);
    kvt_l3_known_forget_all(store->remote); /* look-ups may have met what was about to go */
    if (drop_status(drop)) {
        store->counts.remote_purge_fail++;
        kvt_log(&store->params.log, KVT_LOG_WARN,
                "purge: the shared tier was not reached, or not all of it (%s): what was purged is "
                "gone here, and may still be there; repeat it",
                kvt_strerror(drop_status(drop)));
        if (!purge->status)
            purge->status = drop_status(drop);
    } else {
        store->counts.remote_purged += drop->req.removed;
    }
    return true;
}
