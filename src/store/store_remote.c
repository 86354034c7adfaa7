/* The tier that machines share, seen from the store: its loop, its requests, its beginning and end.
 *
 *   store_remote_known.c   what it is known to have
 *   store_remote_lookup.c  look-ups that ask there first
 *   store_remote_get.c     loads from it
 *   store_remote_put.c     which blocks are put there, and purges
 *
 * Rules
 *  1. Nothing here waits: a request that does not come back in time is given up, its load misses,
 *     its look-up is answered by what is here. Its slot stays pinned until it has come back.
 *  2. What is known is a hint with an end. Verified before it is seen: remote.h.
 *  3. A backend that itself does not answer in time hangs, and is left alone for a while.
 * Threads: the store's owner. Allocates at open only.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/checked.h"
#include "store/store_remote.h"

#define REAP 64u

/* ---- requests ------------------------------------------------------------------------------ */

bool kvt_l3_paused(struct kvt_store *store)
{
    return kvt_store_now(store) < store->remote->pause_ns;
}

void kvt_l3_given_up(struct kvt_store *store)
{
    store->counts.remote_late++;
    store->remote->pause_ns = kvt_store_now(store) + KVT_REMOTE_PAUSE_NS;
}

bool kvt_l3_submit(struct kvt_store *store, struct kvt_remote_req *req, int64_t deadline_ns)
{
    struct kvt_remote *backend = store->params.remote;

    req->deadline_ns = kvt_store_now(store) + deadline_ns;
    req->status = 0;
    return backend->ops->submit(backend, req) == 0;
}

int64_t kvt_l3_ttl(const struct kvt_store *store, uint32_t ns)
{
    const struct kvt_ttl_clock *own = kvt_namespace_at(&store->spaces, ns)->ttl;

    return own ? own->ttl_ns : 0;
}

/* ---- the loop ------------------------------------------------------------------------------ */

static void completed(struct kvt_store *store, struct kvt_remote_req *req)
{
    switch (req->op) {
    case KVT_REMOTE_PROBE:
        kvt_l3_probed(store, req->user);
        break;
    case KVT_REMOTE_GET:
        kvt_l3_got(store, req->user);
        break;
    case KVT_REMOTE_PUT:
        kvt_l3_was_put(store, req->user);
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
    next_run = kvt_l3_lookups_run(store, now);
    next_run = KVT_MIN(next_run, kvt_l3_gets_run(store, now));
    next_run = KVT_MIN(next_run, kvt_l3_puts_run(store, now));
    for (uint32_t i = 0; i < KVT_STORE_PURGES; i++)
        if (store->remote->purges[i].state != KVT_DROP_NONE)
            next_run = KVT_MIN(next_run, store->remote->purges[i].until_ns);
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
            kvt_l3_lookup_answer(store, &remote->lookups[i]);
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
