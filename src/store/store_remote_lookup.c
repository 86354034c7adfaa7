/* Look-ups that ask the shared tier first: LOOKUP -> keys that are not here, nor known -> PROBE ->
 * the answer waits for it, at most remote_deadline; then as any look-up.
 *
 * A PROBE is one round trip to each node that it touches. A message makes two of them at most: a
 * few keys, then all others; one where the client says `whole`, as it does for all messages of a
 * call but the first. Nothing here depends on what was looked up before, so a look-up of 2,048 keys
 * makes three at most whatever went before it, or goes on beside it.
 * Threads: the store's owner. Allocates nothing. Does not load: store_remote_get.c does.
 */
#include <string.h>

#include "base/checked.h"
#include "store/store_remote.h"

#define GALLOP 32u /* keys asked for at first: most chains that miss do so at once */

/* Whether key i, which is not known there, is to be asked for. *more: the run may go on. */
static bool wants_asking(struct kvt_store *store, const struct kvt_msg_keys *request, uint32_t ns,
                         uint32_t i, bool *more)
{
    uint32_t entry = store->found[i];
    const struct kvt_known *k;
    struct kvt_full_key full;

    *more = true;
    if (entry != KVT_INDEX_NONE) {
        const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);

        if (kvt_index_present(e) || e->filling) {
            *more = kvt_index_present(e) && kvt_map_id_level(e->map) >= request->min_level;
            return false;
        }
    }
    kvt_key_full(store, ns, &request->keys[i], &full);
    if (kvt_namespace_at(&store->spaces, ns)->purging || kvt_l3_dropping(store, &full)) {
        *more = false;
        return false;
    }
    k = kvt_l3_known_find(store, store->fps[i]);
    if (!k || k->state == KVT_KNOWN_EXISTS || k->state == KVT_KNOWN_QUEUED)
        return true;
    if (k->state == KVT_KNOWN_ABSENT || k->state == KVT_KNOWN_DAMAGED)
        store->counts.remote_negative++;
    *more = k->state == KVT_KNOWN_PRESENT && kvt_map_id_level(k->map) >= request->min_level;
    return false;
}

/* Ask for what is not known of a request's keys. false: nothing, or not now. */
static bool lookup_ask(struct kvt_store *store, struct kvt_remote_lookup *lookup)
{
    const struct kvt_msg_keys *request = (const struct kvt_msg_keys *)lookup->message;
    uint32_t ns = kvt_handle_number(request->msg.ns);
    uint32_t limit = lookup->round || request->whole || request->each ? KVT_MSG_KEYS_MAX : GALLOP;
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
    lookup->req.ttl_ns = kvt_l3_ttl(store, ns);
    lookup->req.user = lookup;
    if (!kvt_l3_submit(store, &lookup->req, store->params.remote_deadline_ns))
        return false;
    lookup->round++;
    store->counts.remote_rounds++;
    lookup->busy = true;
    store->counts.remote_asked += lookup->req.count;
    return true;
}

bool kvt_l3_lookup(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    struct kvt_store_remote *remote = store->remote;
    struct kvt_remote_lookup *lookup = NULL;

    if (!remote || !store->enabled || store->closing || !msg->count || kvt_l3_paused(store))
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

bool kvt_l3_looking(const struct kvt_store *store, uint32_t ns)
{
    for (uint32_t i = 0; store->remote && i < KVT_REMOTE_LOOKUPS; i++) {
        const struct kvt_remote_lookup *lookup = &store->remote->lookups[i];

        if (lookup->busy && kvt_handle_number(((const struct kvt_msg *)lookup->message)->ns) == ns)
            return true;
    }
    return false;
}

void kvt_l3_lookup_answer(struct kvt_store *store, struct kvt_remote_lookup *lookup)
{
    lookup->answered = true;
    kvt_lookup_answer(store, lookup->client, (const struct kvt_msg *)lookup->message);
}

void kvt_l3_probed(struct kvt_store *store, struct kvt_remote_lookup *lookup)
{
    const struct kvt_msg_keys *request = (const struct kvt_msg_keys *)lookup->message;
    bool all = true;

    for (uint32_t i = 0; i < lookup->req.count; i++) {
        kvt_l3_learn(store, kvt_handle_number(request->msg.ns), &lookup->keys[i],
                     &lookup->found[i]);
        all = all && lookup->found[i].status == 0;
    }
    lookup->busy = false;
    if (lookup->answered)
        return;
    store->counts.remote_lookup_fail += lookup->req.status != 0;
    if (all && lookup->round == 1 && !store->closing && kvt_store_now(store) < lookup->end_ns &&
        lookup_ask(store, lookup))
        return;
    kvt_l3_lookup_answer(store, lookup);
}

int64_t kvt_l3_lookups_run(struct kvt_store *store, int64_t now)
{
    int64_t next_run = INT64_MAX;

    for (uint32_t i = 0; i < KVT_REMOTE_LOOKUPS; i++) {
        struct kvt_remote_lookup *lookup = &store->remote->lookups[i];
        int64_t late_ns = lookup->end_ns + KVT_REMOTE_GRACE_NS;

        if (!lookup->busy || lookup->answered)
            continue;
        if (now < late_ns) {
            next_run = KVT_MIN(next_run, late_ns);
            continue;
        }
        kvt_l3_given_up(store);
        kvt_l3_lookup_answer(store, lookup);
    }
    return next_run;
}
