/* FLUSH: what was committed before it is on the drive when it is answered with 0.
 *
 *   asked -> blocks that are not on disk, for whatever reason, are queued
 *         -> every ticket up to the newest one has ended (a failure becomes the answer)
 *         -> every root has synced -> answer
 * Threads: the store's owner. Allocates nothing.
 */
#include <errno.h>

#include "kvtier/error.h"
#include "store/store_impl.h"

enum { FLUSH_FREE, FLUSH_WRITING, FLUSH_SYNCING };

/* Tickets wrap; fewer than 2^31 are alive. */
static bool ticket_before(uint32_t a, uint32_t b)
{
    return (int32_t)(a - b) < 0;
}

static void sync_root_done(void *ctx, int status)
{
    struct kvt_store_flush *flush = ctx;

    flush->store->again = 1;
    flush->syncs--;
    if (status && !flush->status)
        flush->status = status;
}

bool kvt_flushes_waiting(const struct kvt_store *store)
{
    for (uint32_t i = 0; i < KVT_STORE_FLUSHES; i++)
        if (store->flushes[i].state == FLUSH_WRITING)
            return true;
    return false;
}

void kvt_flushes_note(struct kvt_store *store, uint32_t ticket, int status)
{
    if (!status)
        return;
    for (uint32_t i = 0; i < KVT_STORE_FLUSHES; i++) {
        struct kvt_store_flush *flush = &store->flushes[i];

        if (flush->state == FLUSH_WRITING && ticket_before(ticket, flush->ticket) && !flush->status)
            flush->status = status;
    }
}

void kvt_handle_flush(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    struct kvt_store_flush *flush = store->flushes;

    if (!store->disk_count && store->params.no_root_status) {
        kvt_reply_status(store, client, msg->op, msg->cookie, store->params.no_root_status);
        return;
    }
    while (flush < store->flushes + KVT_STORE_FLUSHES && flush->state != FLUSH_FREE)
        flush++;
    if (flush == store->flushes + KVT_STORE_FLUSHES) {
        kvt_reply_status(store, client, msg->op, msg->cookie, KVT_E_LIMIT);
        return;
    }
    if (store->disk_count)
        kvt_writes_queue_unsaved(store);
    *flush = (struct kvt_store_flush){.store = store,
                                      .cookie = msg->cookie,
                                      .client = client,
                                      .ticket = store->ticket_next,
                                      .status = store->lost_since_flush ? KVT_E_DROPPED : 0,
                                      .state = FLUSH_WRITING};
    store->lost_since_flush = 0;
}

static bool writes_ended(const struct kvt_store *store, uint32_t ticket)
{
    uint32_t oldest = store->write_queue.tail;

    if (oldest != KVT_SLOT_NONE &&
        ticket_before(kvt_slot_at(&store->slots, oldest)->ticket, ticket))
        return false;
    for (uint32_t root = 0; store->writes_going && root < store->disk_count; root++) {
        const struct kvt_store_write *writes = store->disks[root].writes;

        for (uint32_t i = 0; i < KVT_STORE_ROOT_WRITES; i++)
            if (writes[i].busy && ticket_before(writes[i].ticket, ticket))
                return false;
    }
    return true;
}

static void sync_roots(struct kvt_store *store, struct kvt_store_flush *flush)
{
    bool all = true;

    for (uint32_t i = 0; i < store->disk_count; i++) {
        int err;

        if (flush->asked[i])
            continue;
        flush->syncs++;
        err = kvt_l2_flush(store->disks[i].l2, sync_root_done, flush);
        if (err == -EAGAIN) { /* the root syncs for somebody else: again on the next run */
            flush->syncs--;
            all = false;
            continue;
        }
        flush->asked[i] = 1;
        if (err)
            sync_root_done(flush, err);
    }
    if (!all || flush->syncs)
        return;
    flush->state = FLUSH_FREE;
    store->counts.flushes++;
    kvt_reply_status(store, flush->client, KVT_OP_FLUSH, flush->cookie, flush->status);
}

void kvt_flushes_run(struct kvt_store *store)
{
    for (uint32_t i = 0; i < KVT_STORE_FLUSHES; i++) {
        struct kvt_store_flush *flush = &store->flushes[i];

        if (flush->state == FLUSH_WRITING && writes_ended(store, flush->ticket))
            flush->state = FLUSH_SYNCING;
        if (flush->state == FLUSH_SYNCING)
            sync_roots(store, flush);
    }
}

void kvt_flushes_end_all(struct kvt_store *store, int status)
{
    for (uint32_t i = 0; i < KVT_STORE_FLUSHES; i++) {
        struct kvt_store_flush *flush = &store->flushes[i];

        if (flush->state != FLUSH_FREE)
            kvt_reply_status(store, flush->client, KVT_OP_FLUSH, flush->cookie, status);
        flush->state = FLUSH_FREE;
    }
}
