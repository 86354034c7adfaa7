/* The store: open, run, close, client gone. See store_impl.h for who does the rest.
 *
 * run() is the loop's body: the log's completions, reads, loads, writes, flushes, purges,
 * background steps; each bounded. It is called after messages and whenever its last answer says so.
 * Threads: one owner for everything. Blocks in open and close only.
 */
#include "store/store.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "remote/remote.h"
#include "store/store_impl.h"
#include "store/store_recycle.h"

#define CLOSE_POLL_MS 5
#define CLOSE_STEPS_MAX 1000000u /* a clock that stands still must not keep close() for ever */

static int params_check(const struct kvt_store_params *params)
{
    if (params->root_count > KVT_STORE_ROOTS_MAX || !params->reply || !params->clock.now_ns ||
        params->staging_bytes > params->arena_bytes || params->ttl_ns < 0 ||
        params->write < KVT_WRITE_DEFAULT || params->write > KVT_WRITE_AUTO ||
        (params->arena_bytes && ((uintptr_t)params->arena % KVT_PAGE_BYTES || !params->arena)) ||
        params->arena_bytes / KVT_PAGE_BYTES >= UINT32_MAX)
        return KVT_E_INVAL;
    return 0;
}

static void destroy(struct kvt_store *store)
{
    for (uint32_t i = 0; i < KVT_STORE_ROOTS_MAX; i++) {
        free(store->disks[i].heads);
        free(store->disks[i].pinned);
        free(store->disks[i].uses);
        free(store->disks[i].writes);
        kvt_ttl_marks_close(store, &store->disks[i].marks, false);
        kvt_drain_destroy(&store->disks[i]);
    }
    kvt_join_close(store);
    kvt_l3_destroy(store);
    kvt_scrub_destroy(store);
    kvt_purges_destroy(store);
    kvt_loads_destroy(store);
    kvt_namespaces_destroy(&store->spaces);
    kvt_pins_destroy(&store->pins);
    kvt_policy_destroy(&store->policy);
    kvt_admission_destroy(&store->admission);
    kvt_ttl_destroy(store);
    kvt_quota_destroy(store);
    kvt_slots_destroy(&store->slots);
    kvt_index_destroy(&store->index);
    free(store);
}

static int tables_init(struct kvt_store *store)
{
    const struct kvt_store_params *params = &store->params;
    uint64_t staging = params->staging_bytes / KVT_PAGE_BYTES;
    uint64_t cache = params->arena_bytes / KVT_PAGE_BYTES - staging;
    int err = kvt_index_init(&store->index, 0, params->seed, params->test_collide);

    if (!err)
        err = kvt_slots_init(&store->slots, (uint32_t)cache, (uint32_t)staging, 2 * KVT_REGIONS,
                             KVT_STORE_HOLDS); /* grows as namespaces open */
    if (!err)
        err = kvt_policy_init(&store->policy, &store->slots, &store->index, cache * KVT_PAGE_BYTES);
    if (!err)
        err = kvt_admit_init(store);
    if (!err)
        err = kvt_namespaces_init(&store->spaces);
    if (!err)
        kvt_ns_init(store);
    if (!err)
        err = kvt_pins_init(&store->pins);
    if (!err)
        err = kvt_loads_init(store);
    if (!err)
        err = kvt_purges_init(store);
    if (!err)
        err = kvt_l3_init(store);
    kvt_slot_list_init(&store->write_queue);
    kvt_reads_init(store);
    return err;
}

static void close_roots(struct kvt_store *store)
{
    for (uint32_t i = 0; i < store->disk_count; i++) {
        if (store->disks[i].l2)
            kvt_l2_close(store->disks[i].l2);
        store->disks[i].l2 = NULL;
    }
}

int kvt_store_root_probe(struct kvt_io *io)
{
    return kvt_l2_probe(io);
}

int kvt_store_open(const struct kvt_store_params *params, struct kvt_store **out,
                   uint32_t *bad_root)
{
    struct kvt_store *store;
    int err = params_check(params);

    *out = NULL;
    if (bad_root)
        *bad_root = UINT32_MAX;
    if (err)
        return err;
    store = calloc(1, sizeof(*store));
    if (!store)
        return -ENOMEM;
    store->params = *params;
    store->enabled = 1;
    store->record_bytes_min = UINT32_MAX;
    err = tables_init(store);
    if (!err)
        err = kvt_recover(store, bad_root);
    if (!err)
        err = kvt_ttl_init(store);
    if (!err)
        err = kvt_quota_grow(store);
    if (!err)
        err = kvt_rules_apply_all(store);
    if (!err)
        err = kvt_statfile_open(store);
    if (err) {
        close_roots(store);
        kvt_statfile_close(store);
        destroy(store);
        return err;
    }
    *out = store;
    return 0;
}

/* Keep the promise of the superblocks well ahead of what ALLOC gives out. */
static void reserve_sequence(struct kvt_store *store)
{
    if (store->sequence_next + KVT_STORE_SEQUENCE_AHEAD / 2 < store->sequence_reserved)
        return;
    store->sequence_reserved = store->sequence_next + KVT_STORE_SEQUENCE_AHEAD;
    for (uint32_t i = 0; i < store->disk_count; i++)
        kvt_l2_reserve_sequence(store->disks[i].l2, store->sequence_reserved);
}

static int64_t roots_run(struct kvt_store *store)
{
    int64_t next_run = INT64_MAX;

    for (uint32_t i = 0; i < store->disk_count; i++)
        next_run = KVT_MIN(next_run, kvt_l2_run(store->disks[i].l2));
    return next_run;
}

int64_t kvt_store_run(struct kvt_store *store)
{
    int64_t next_run, ttl_run, remote_run;
    bool again;

    kvt_ttl_tick(store); /* before anything is numbered */
    reserve_sequence(store);
    roots_run(store);
    kvt_reads_run(store);
    kvt_admit_run(store);
    ttl_run = kvt_ttl_run(store);
    remote_run = kvt_l3_run(store);
    next_run = KVT_MIN(remote_run, kvt_loads_run(store));
    kvt_drains_run(store);
    next_run = KVT_MIN(next_run, kvt_later_run(store));
    next_run = KVT_MIN(next_run, kvt_writes_run(store));
    kvt_flushes_run(store);
    next_run = KVT_MIN(next_run, ttl_run);
    next_run = KVT_MIN(next_run, kvt_scrub_run(store));
    again = kvt_join_run(store);
    kvt_room_sweep(store);
    if (kvt_purges_run(store) || again || (store->sweep_on && !kvt_sweep_waits(store)))
        next_run = kvt_store_now(store);
    next_run = KVT_MIN(next_run, kvt_statfile_run(store));
    /* Last: what has just been submitted starts here, and a backend that completes inside reap()
     * leaves work at once. */
    store->again = 0;
    next_run = KVT_MIN(next_run, roots_run(store));
    return store->again ? kvt_store_now(store) : next_run;
}

/* Take back what a client holds; fills: also the slots that it was filling, which else count as
 * nobody's from now on: others get its place. */
static void holds_end(struct kvt_store *store, uint32_t client, bool fills)
{
    for (uint32_t slot = 0; slot < store->slots.arena.touched; slot++) {
        struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
        uint32_t held = 0;

        if (s->state == KVT_SLOT_FREE)
            continue;
        if (s->filler && !fills) {
            (void)kvt_slot_part(&store->slots, slot, client);
            continue;
        }
        while (kvt_slot_unhold(&store->slots, slot, client))
            held++;
        if (!held)
            continue;
        s->filler = s->parted = 0;
        if (s->state == KVT_SLOT_FILLING)
            kvt_slot_abandon(store, slot);
        else
            kvt_slot_settle(store, slot);
    }
}

static void client_ends(struct kvt_store *store, uint32_t client, bool fills)
{
    store->activity++;
    kvt_loads_client_gone(store, client);
    kvt_directs_client_gone(store, client);
    kvt_pins_client_gone(store, client);
    kvt_namespaces_client_gone(&store->spaces, client);
    holds_end(store, client, fills);
}

void kvt_store_client_stop(struct kvt_store *store, uint32_t client)
{
    client_ends(store, client, false);
}

void kvt_store_client_gone(struct kvt_store *store, uint32_t client)
{
    client_ends(store, client, true);
}

void kvt_store_enable(struct kvt_store *store, int on)
{
    store->enabled = on;
}

static bool idle(const struct kvt_store *store)
{
    bool waiting = kvt_flushes_waiting(store) || kvt_ttl_owes(store);

    for (uint32_t i = 0; i < KVT_STORE_PURGES; i++)
        waiting = waiting || store->purges[i].used;
    return !waiting && !store->write_queue.count && !store->writes_going && !store->reads_going &&
           kvt_l3_idle(store);
}

/* Nothing to wait on tells that there is progress: sleep until a root may have some. */
static void close_wait(const struct kvt_store *store)
{
    struct pollfd fds[KVT_STORE_ROOTS_MAX + 1];
    nfds_t count = 0;

    for (uint32_t i = 0; i < store->disk_count; i++) {
        int fd = store->disks[i].io->ops->event_fd(store->disks[i].io);

        if (fd >= 0)
            fds[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
    }
    if (store->params.remote) {
        int fd = store->params.remote->ops->event_fd(store->params.remote);

        if (fd >= 0)
            fds[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
    }
    if (count)
        (void)poll(fds, count, CLOSE_POLL_MS);
}

void kvt_store_close(struct kvt_store *store, int64_t timeout_ns)
{
    int64_t start = kvt_store_now(store);

    store->closing = 1;
    kvt_loads_end_all(store, KVT_E_CLOSED);
    if (store->disk_count)
        kvt_writes_queue_unsaved(store);
    for (uint32_t step = 0; step < CLOSE_STEPS_MAX; step++) {
        kvt_store_run(store);
        if (idle(store) || kvt_store_now(store) - start >= timeout_ns)
            break;
        close_wait(store);
    }
    kvt_l3_close(store);
    kvt_flushes_end_all(store, KVT_E_CLOSED);
    kvt_purges_end_all(store, KVT_E_CLOSED);
    kvt_writes_lost_all(store);
    kvt_store_stats(store, &store->at_close);
    kvt_admit_keep(store);
    close_roots(store);
    for (uint32_t i = 0; i < store->disk_count; i++)
        kvt_ttl_marks_wait(&store->disks[i].marks);
    kvt_statfile_close(store);
    for (uint32_t i = 0; i < store->disk_count; i++)
        kvt_ttl_marks_close(store, &store->disks[i].marks, true);
    destroy(store);
}
