/* Namespaces come and go: NS_OPEN, NS_CLOSE, and whether a number may be another namespace's.
 *
 * A namespace that all its clients have closed keeps its number for as long as anything is left of
 * it. Blocks, pins and what is being filled or written are counted in the table (namespaces.c);
 * here is asked for what else names a number: loads, purges, look-ups of the shared tier, and a
 * time to live that the disks have yet to hear of.
 * Threads: the store's owner. NS_OPEN may allocate (tables grow).
 */
#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"
#include "store/store_recycle.h"

#define SAID_ROOTS_MAX 16u /* lines of the log, in a store's life; the counter goes on */

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

bool kvt_root_holds(const struct kvt_store *store, uint32_t root, uint32_t record_bytes)
{
    return record_bytes <= store->params.staging_bytes &&
           record_bytes <= kvt_l2_record_bytes_max(store->disks[root].l2);
}

bool kvt_roots_hold(const struct kvt_store *store, uint32_t record_bytes)
{
    for (uint32_t i = 0; i < store->disk_count; i++)
        if (kvt_root_holds(store, i, record_bytes))
            return true;
    return false;
}

/* One line for each root, the first time; staging is the same for all of them. */
static void say_root(struct kvt_store *store, const struct kvt_namespace *ns, uint32_t root,
                     uint32_t record_bytes)
{
    const struct kvt_store_disk *disk = &store->disks[root];
    const char *name = kvt_l2_name(disk->l2);
    uint64_t cap = kvt_l2_cap_for(record_bytes);

    if (record_bytes > store->params.staging_bytes)
        kvt_log(
            &store->params.log, KVT_LOG_WARN,
            "namespace '%s' goes without disk root %s: its longest records are of %u bytes, and "
            "the staging memory holds %llu: give staging %u or more",
            ns->label, name, record_bytes, (unsigned long long)store->params.staging_bytes,
            record_bytes);
    else if (!cap)
        kvt_log(
            &store->params.log, KVT_LOG_WARN,
            "namespace '%s' goes without disk root %s: its longest records are of %u bytes, and "
            "no segment holds four of them: fewer block_tokens would do",
            ns->label, name, record_bytes);
    else
        kvt_log(
            &store->params.log, KVT_LOG_WARN,
            "namespace '%s' goes without disk root %s: its longest records are of %u bytes, and "
            "its segments hold records of %u at most: a cap of %llu MiB or more would do (a "
            "root that holds blocks keeps its segments, unless its cap is three times what it "
            "was; `kvtier purge DIR --all` empties it)",
            ns->label, name, record_bytes, kvt_l2_record_bytes_max(disk->l2),
            (unsigned long long)((cap + (1u << 20) - 1) >> 20));
}

/* Roots that cannot hold a namespace's longest records are no use to it: the first block of each
 * prompt is one of those. */
static void say_roots(struct kvt_store *store, uint32_t number)
{
    struct kvt_namespace *ns = kvt_namespace_at(&store->spaces, number);
    uint32_t largest = 0;

    for (unsigned map = 1; map <= 6; map++)
        largest = KVT_MAX(largest, ns->record_pages[map] * KVT_PAGE_BYTES);
    for (uint32_t i = 0; i < store->disk_count; i++) {
        if (kvt_root_holds(store, i, largest) || ns->without_roots & 1u << i)
            continue;
        ns->without_roots |= (uint16_t)(1u << i);
        store->counts.ns_without_root++;
        if (store->said_roots++ < SAID_ROOTS_MAX)
            say_root(store, ns, i, largest);
    }
}

void kvt_ns_root_joined(struct kvt_store *store)
{
    for (uint32_t i = 0; i < store->spaces.touched; i++)
        if (kvt_namespace_at(&store->spaces, i)->used &&
            kvt_namespace_at(&store->spaces, i)->opened)
            say_roots(store, i);
}

/* The smallest and the largest record of a namespace; every one must have a place to go. */
static int sizes_check(const struct kvt_store *store, const struct kvt_msg_ns_open *open,
                       uint32_t *smallest, uint32_t *largest)
{
    uint64_t room;

    *smallest = UINT32_MAX;
    *largest = 0;
    for (unsigned map = 1; map <= 6; map++) {
        if (!open->record_bytes[map])
            continue;
        *smallest = KVT_MIN(*smallest, open->record_bytes[map]);
        *largest = KVT_MAX(*largest, open->record_bytes[map]);
    }
    room = (uint64_t)store->slots.arena.regions[KVT_REGION_CACHE].pages * KVT_PAGE_BYTES;
    return *largest <= room || kvt_roots_hold(store, *largest) ? 0 : KVT_E_TOO_SMALL;
}

static void no_room(struct kvt_store *store)
{
    store->counts.ns_refused++;
    if (store->said_namespaces)
        return;
    store->said_namespaces = 1;
    kvt_log(
        &store->params.log, KVT_LOG_WARN,
        "a namespace was refused: %u (of models, layouts, groups and salts) are the most, and "
        "each is open or holds blocks. Close those that are not used (kvt_ns_close()), or purge "
        "some (kvt_purge(), `kvtier purge DIR --namespace NS`)",
        KVT_NAMESPACES_MAX);
}

void kvt_handle_ns_open(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    const struct kvt_msg_ns_open *open = (const struct kvt_msg_ns_open *)msg;
    struct kvt_msg *reply;
    uint32_t smallest, largest;
    long number = sizes_check(store, open, &smallest, &largest);

    if (!number) {
        number = kvt_namespaces_open(&store->spaces, open);
        if (number == KVT_E_LIMIT)
            no_room(store);
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
    if (number >= 0) {
        kvt_namespaces_enter(&store->spaces, (uint32_t)number, client);
        store->record_bytes_max = KVT_MAX(store->record_bytes_max, largest);
        say_roots(store, (uint32_t)number);
    }
    reply = kvt_reply_begin(store, msg, sizeof(*reply));
    reply->status = number < 0 ? (int32_t)number : 0;
    reply->ns = number < 0 ? 0 : kvt_namespaces_handle(&store->spaces, (uint32_t)number);
    kvt_reply_send(store, client, reply);
}

void kvt_handle_ns_close(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    kvt_namespaces_leave(&store->spaces, kvt_handle_number(msg->ns), client);
    if (msg->cookie)
        kvt_reply_status(store, client, msg->op, msg->cookie, 0);
}

static bool in_list(const struct kvt_store *store, const struct kvt_load_list *list, uint32_t ns)
{
    for (uint32_t at = list->head; at != KVT_NO_NUMBER; at = store->loads[at].next)
        if (store->loads[at].ns == ns)
            return true;
    return false;
}

static bool busy(void *ctx, uint32_t ns)
{
    const struct kvt_store *store = ctx;

    for (uint32_t i = 0; i < KVT_STORE_PURGES; i++)
        if (store->purges[i].used && store->purges[i].ns == ns)
            return true;
    return in_list(store, &store->acquires, ns) || in_list(store, &store->prefetches, ns) ||
           kvt_l3_looking(store, ns) || kvt_ttl_waits(store, ns);
}

static void forget(void *ctx, uint32_t ns)
{
    kvt_ttl_forget(ctx, ns);
}

void kvt_ns_init(struct kvt_store *store)
{
    store->spaces.user = (struct kvt_namespaces_user){.busy = busy, .forget = forget, .ctx = store};
}
