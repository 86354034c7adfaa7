/* What one namespace may hold, in DRAM and on disk together, all its groups: when it is full,
 * blocks of its own make room for its new ones, so that a tenant that floods the cache floods
 * itself. The store's quota holds for each namespace; one may have a smaller one of its own.
 *
 * The blocks given up are found by a clock over the index: leaves of this namespace that were not
 * used since the last time round, and that nothing is being done with. A bounded number of entries
 * is looked at for each record; when none of them may go the store is refused and counted. Threads:
 * the store's owner. Allocates nothing. On disk, bytes are free when their segment is recycled: the
 * cap of a root is not a quota's business.
 */
#include "base/checked.h"
#include "store/store_impl.h"
#include "store/store_recycle.h"

#define LOOK_MAX 8192u /* entries looked at for one record */

static bool may_go(const struct kvt_store *store, const struct kvt_index_entry *e)
{
    const struct kvt_slot *s;

    if (e->children || e->filling || e->pinned || !kvt_index_present(e))
        return false;
    if (e->slot == KVT_INDEX_NONE)
        return true;
    s = kvt_slot_at(&store->slots, e->slot);
    return s->state == KVT_SLOT_VALID && !s->pins && s->write != KVT_SLOT_WRITE_QUEUED &&
           s->write != KVT_SLOT_WRITE_GOING;
}

static void give_up(struct kvt_store *store, uint32_t entry)
{
    struct kvt_index_entry *e = kvt_index_at(&store->index, entry);

    store->counts.quota_evicted++;
    if (e->slot != KVT_INDEX_NONE)
        kvt_entry_drop_slot(store, entry, true);
    if (e->on_disk) {
        struct kvt_l2_where where = {.segment = e->segment, .page = e->page};

        kvt_drain_purged(&store->disks[e->root], where);
        kvt_entry_clear_disk(store, entry);
    }
    kvt_entry_settle(store, entry);
}

/* 0: any. */
static uint64_t quota(const struct kvt_store *store, uint32_t ns)
{
    uint64_t own = kvt_namespace_at(&store->spaces, ns)->quota_bytes;
    uint64_t all = store->params.ns_bytes_max;

    return own && all ? KVT_MIN(own, all) : own + all;
}

void kvt_quota_of(struct kvt_store *store, uint32_t ns, uint64_t bytes)
{
    uint32_t at = ns;

    if (!bytes)
        return;
    do {
        struct kvt_namespace *group = kvt_namespace_at(&store->spaces, at);

        group->quota_bytes = bytes >= INT64_MAX ? 0 : bytes;
        at = group->next_group;
    } while (at != ns);
}

bool kvt_quota_room(struct kvt_store *store, uint32_t ns, uint32_t bytes, uint32_t keep)
{
    struct kvt_namespace *space = kvt_namespace_at(&store->spaces, ns);
    uint64_t most = quota(store, ns), held;
    uint32_t looked = 0;

    if (!most)
        return true;
    held = kvt_namespaces_held(&store->spaces, ns);
    while (held + bytes > most && looked++ < LOOK_MAX && store->index.touched) {
        uint32_t entry = space->quota_cursor++ % store->index.touched;
        struct kvt_index_entry *e = kvt_index_at(&store->index, entry);

        if (!e->used || entry == keep || !kvt_namespaces_same(&store->spaces, e->ns, ns) ||
            !may_go(store, e))
            continue;
        if (e->freq) {
            e->freq--;
        } else {
            give_up(store, entry);
            held = kvt_namespaces_held(&store->spaces, ns);
        }
    }
    return held + bytes <= most;
}
