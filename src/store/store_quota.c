/* What one namespace may hold, in DRAM and on disk together, all its groups: when it is full,
 * blocks of its own make room for its new ones, so that a tenant that floods the cache floods
 * itself. The store's quota holds for each namespace; the operator may give one a smaller one
 * (ns_limit), and so may the programs that use it.
 *
 * The entries of a namespace are in a ring, in the order in which they came. A hand goes round it:
 * what was used since it last came by is passed once for each use, a leaf that nobody holds and
 * that is not on its way to the disk goes (one that waits for it does: the newest are wanted more),
 * and after it its parent, when that is a leaf now: a chain goes from its end. So what is looked at
 * is the namespace's own, however large the index is. A bounded number of them is looked at for
 * each record; when none may go the store is refused and counted, and the next look goes on where
 * this one ended. The rings are there as soon as there is any quota: 8 bytes an entry. Threads: the
 * store's owner. Allocates at open, when the index grows, and when a quota is said. On disk, bytes
 * are free when their segment is recycled: the cap of a root is not a quota's business.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"

#define LOOK_MAX 16384u /* entries looked at for one record */
#define NOBODY UINT32_MAX

/* ---- rings ---------------------------------------------------------------------------------- */

void kvt_quota_enter(struct kvt_store *store, uint32_t entry)
{
    struct kvt_quota_link *links = store->quota.links;
    struct kvt_namespace *lead;

    if (entry >= store->quota.capacity)
        return;
    lead = kvt_namespace_lead(&store->spaces, kvt_index_at(&store->index, entry)->ns);
    lead->quota_listed++;
    if (lead->quota_hand == NOBODY) {
        lead->quota_hand = entry;
        links[entry] = (struct kvt_quota_link){entry, entry};
        return;
    }
    /* behind the hand: looked at last */
    links[entry] = (struct kvt_quota_link){lead->quota_hand, links[lead->quota_hand].before};
    links[links[entry].before].after = entry;
    links[lead->quota_hand].before = entry;
}

void kvt_quota_leave(struct kvt_store *store, uint32_t entry)
{
    struct kvt_quota_link *links = store->quota.links;
    struct kvt_namespace *lead;

    if (entry >= store->quota.capacity)
        return;
    lead = kvt_namespace_lead(&store->spaces, kvt_index_at(&store->index, entry)->ns);
    lead->quota_listed--;
    if (lead->quota_climb == entry)
        lead->quota_climb = NOBODY;
    if (lead->quota_hand == entry)
        lead->quota_hand = links[entry].after == entry ? NOBODY : links[entry].after;
    links[links[entry].before].after = links[entry].after;
    links[links[entry].after].before = links[entry].before;
}

/* Whether anything that is said needs the rings. */
static bool any_quota(const struct kvt_store *store)
{
    return store->params.ns_bytes_max || store->quota.said;
}

int kvt_quota_grow(struct kvt_store *store)
{
    struct kvt_store_quota *quota = &store->quota;
    uint32_t before = quota->capacity;
    struct kvt_quota_link *links;

    if (!any_quota(store) || before >= store->index.capacity)
        return 0;
    links = realloc(quota->links, (size_t)store->index.capacity * sizeof(*links));
    if (!links)
        return -ENOMEM;
    quota->links = links;
    quota->capacity = store->index.capacity;
    for (uint32_t i = before; i < store->index.touched; i++)
        if (kvt_index_at(&store->index, i)->used)
            kvt_quota_enter(store, i);
    return 0;
}

void kvt_quota_destroy(struct kvt_store *store)
{
    free(store->quota.links);
    memset(&store->quota, 0, sizeof(store->quota));
}

/* The entry that the hand is at; the hand goes on. */
static uint32_t look(const struct kvt_store *store, struct kvt_namespace *lead)
{
    uint32_t entry = lead->quota_climb;

    lead->quota_climb = NOBODY;
    if (entry != NOBODY)
        return entry;
    entry = lead->quota_hand;
    if (entry != NOBODY)
        lead->quota_hand = store->quota.links[entry].after;
    return entry;
}

/* ---- room ----------------------------------------------------------------------------------- */

static bool may_go(const struct kvt_store *store, const struct kvt_index_entry *e)
{
    const struct kvt_slot *s;

    if (e->children || e->filling || e->pinned || !kvt_index_present(e))
        return false;
    if (e->slot == KVT_INDEX_NONE)
        return true;
    s = kvt_slot_at(&store->slots, e->slot);
    return s->state == KVT_SLOT_VALID && !s->pins && s->write != KVT_SLOT_WRITE_GOING;
}

static void give_up(struct kvt_store *store, uint32_t entry)
{
    struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    struct kvt_namespace *lead = kvt_namespace_lead(&store->spaces, e->ns);

    store->counts.quota_evicted++;
    if (e->parent != KVT_INDEX_NONE &&
        kvt_namespaces_same(&store->spaces, e->ns, kvt_index_at(&store->index, e->parent)->ns))
        lead->quota_climb = e->parent;
    if (e->slot != KVT_INDEX_NONE)
        kvt_entry_drop_slot(store, entry, true);
    if (e->on_disk) /* its bytes stay: after a restart the record may be found again */
        kvt_entry_clear_disk(store, entry);
    kvt_entry_settle(store, entry);
}

/* 0: any. */
static uint64_t quota_of(const struct kvt_store *store, uint32_t ns)
{
    const struct kvt_namespace *space = kvt_namespace_at(&store->spaces, ns);
    uint64_t most = UINT64_MAX;

    most = space->quota_bytes ? KVT_MIN(most, space->quota_bytes) : most;
    most = space->rule_quota_bytes ? KVT_MIN(most, space->rule_quota_bytes) : most;
    most = store->params.ns_bytes_max ? KVT_MIN(most, store->params.ns_bytes_max) : most;
    return most == UINT64_MAX ? 0 : most;
}

bool kvt_quota_room(struct kvt_store *store, uint32_t ns, uint32_t bytes, uint32_t keep)
{
    struct kvt_namespace *lead = kvt_namespace_lead(&store->spaces, ns);
    uint64_t most = quota_of(store, ns), held;

    if (!most)
        return true;
    held = kvt_namespaces_held(&store->spaces, ns);
    for (uint32_t looked = 0; held + bytes > most && looked < LOOK_MAX; looked++) {
        uint32_t entry = look(store, lead);
        struct kvt_index_entry *e;

        /* round as often as uses are remembered, and nothing was found */
        if (entry == NOBODY || looked / (KVT_INDEX_FREQ_MAX + 2) > lead->quota_listed)
            break;
        e = kvt_index_at(&store->index, entry);
        if (entry == keep || !may_go(store, e))
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

/* ---- what is said --------------------------------------------------------------------------- */

int kvt_quota_of(struct kvt_store *store, uint32_t ns, uint64_t bytes)
{
    uint32_t at = ns;
    int err;

    if (!bytes)
        return 0;
    store->quota.said |= bytes < INT64_MAX;
    err = kvt_quota_grow(store);
    if (err)
        return err;
    do {
        struct kvt_namespace *group = kvt_namespace_at(&store->spaces, at);

        group->quota_bytes = bytes >= INT64_MAX ? 0 : bytes;
        at = group->next_group;
    } while (at != ns);
    return 0;
}

static bool names(const struct kvt_ns_rule *rule, const struct kvt_namespace *space)
{
    return rule->by_id ? memcmp(rule->id, space->id, sizeof(rule->id)) == 0
                       : space->opened && strcmp(rule->label, space->label) == 0;
}

int kvt_rules_apply(struct kvt_store *store, uint32_t ns)
{
    const struct kvt_namespace *space = kvt_namespace_at(&store->spaces, ns);
    uint64_t quota = space->rule_quota_bytes;
    int64_t ttl = space->rule_ttl_ns;
    uint32_t at = ns;
    int err;

    for (uint32_t i = 0; i < store->params.ns_rule_count; i++) {
        const struct kvt_ns_rule *rule = &store->params.ns_rules[i];

        if (!names(rule, space))
            continue;
        if (rule->quota_bytes)
            quota = quota ? KVT_MIN(quota, rule->quota_bytes) : rule->quota_bytes;
        if (rule->ttl_ns)
            ttl = ttl ? KVT_MIN(ttl, rule->ttl_ns) : rule->ttl_ns;
    }
    store->quota.said |= quota != 0;
    err = kvt_quota_grow(store);
    if (err)
        return err;
    do {
        struct kvt_namespace *group = kvt_namespace_at(&store->spaces, at);

        group->rule_quota_bytes = quota;
        group->rule_ttl_ns = ttl;
        at = group->next_group;
    } while (at != ns);
    return kvt_ttl_apply(store, ns);
}

int kvt_rules_apply_all(struct kvt_store *store)
{
    int err = 0;

    for (uint32_t ns = 0; ns < store->spaces.touched && !err; ns++)
        if (kvt_namespace_at(&store->spaces, ns)->used && store->params.ns_rule_count)
            err = kvt_rules_apply(store, ns);
    return err;
}

/* ---- check ---------------------------------------------------------------------------------- */

int kvt_quota_check(const struct kvt_store *store, char *why, size_t why_len)
{
    uint32_t listed = 0;

    if (!store->quota.links)
        return 0;
    for (uint32_t ns = 0; ns < store->spaces.touched; ns++) {
        const struct kvt_namespace *space = kvt_namespace_at(&store->spaces, ns);
        uint32_t at = space->quota_hand, count = 0;

        if (!space->used || space->leader != ns || at == NOBODY)
            continue;
        do {
            const struct kvt_index_entry *e = kvt_index_at(&store->index, at);

            if (!e->used || !kvt_namespaces_same(&store->spaces, e->ns, ns) ||
                count++ > space->quota_listed)
                break;
            at = store->quota.links[at].after;
        } while (at != space->quota_hand);
        listed += count;
        if (at != space->quota_hand || count != space->quota_listed) {
            snprintf(why, why_len, "the ring of namespace %u breaks at entry %u", ns, at);
            return KVT_E_CORRUPT;
        }
    }
    if (listed == store->index.used)
        return 0;
    snprintf(why, why_len, "%u entries are in rings, there are %u", listed, store->index.used);
    return KVT_E_CORRUPT;
}
