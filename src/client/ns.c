/* Namespaces: an identity over a shape, known to the store by a handle for each group, with the
 * level maps that its blocks are coded with. Threads: any. Allocates; blocks for round trips.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "client/misuse.h"
#include "kvtier/codec.h"
#include "kvtier/key.h"

#define REFUSAL_BYTES 320u /* of a sentence */

bool kvt_keys_ok(const struct kvt_ns *ns, const struct kvt_key *keys, size_t n, bool one_group)
{
    for (size_t i = 0; i < n; i++) {
        if (keys[i].hash_len == 0 || keys[i].hash_len > KVT_HASH_BYTES_MAX || keys[i].reserved != 0)
            return false;
        bool same = i > 0 && keys[i].group == keys[i - 1].group;
        if (!same && ((one_group && i > 0) || kvt_shape_group_of(ns->shape, keys[i].group) == NULL))
            return false;
    }
    return true;
}

uint8_t kvt_ns_group_index(const struct kvt_ns *ns, uint16_t group)
{
    const struct kvt_shape_group *found = kvt_shape_group_of(ns->shape, group);
    return found == NULL ? 0 : (uint8_t)(found - ns->shape->groups);
}

const struct kvt_map *kvt_ns_map(const struct kvt_req *req, int level, bool lossy)
{
    const struct kvt_shape_group *shape = kvt_req_group(req);
    /* A lossy page gains nothing from better levels here and there, and must not look exact. */
    if (lossy)
        return shape->uniform[level];
    const struct kvt_map_set *set =
        atomic_load_explicit(&req->ns->groups[req->group].maps, memory_order_acquire);
    return set->at[level];
}

/* What people see of the model's name: printable ASCII, cut. It never enters a path or a key. */
static void make_label(const char *model, char *label, size_t len)
{
    size_t used = 0;
    for (; model != NULL && *model != '\0' && used + 1 < len; model++)
        label[used++] = *model >= ' ' && *model <= '~' ? *model : '?';
    label[used] = '\0';
}

static bool is_empty(const char *text)
{
    return text == NULL || *text == '\0';
}

/* The maps that the settings ask for. */
static int maps_make(struct kvt_ns *ns)
{
    for (uint32_t i = 0; i < ns->shape->group_count; i++) {
        const struct kvt_shape_group *group = &ns->shape->groups[i];
        uint8_t *bounds = calloc(1, group->entries / 2 + 1);
        if (bounds == NULL)
            return -ENOMEM;
        kvt_map_bounds(group, ns->cache->settings, bounds);
        struct kvt_map_set *set = kvt_map_set_new(group, bounds);
        atomic_store_explicit(&ns->groups[i].maps, set, memory_order_release);
        if (!kvt_choice_init(ns, i, bounds) || set == NULL)
            return -ENOMEM;
    }
    return 0;
}

void kvt_ns_message(const struct kvt_ns *ns, uint32_t i, struct kvt_msg_ns_open *msg)
{
    const struct kvt_shape_group *group = &ns->shape->groups[i];
    memset(msg, 0, sizeof(*msg));
    memcpy(msg->id, ns->id, sizeof(msg->id));
    memcpy(msg->label, ns->label, sizeof(msg->label));
    msg->block_tokens = group->block_tokens;
    msg->group = group->group;
    msg->loose = group->kind != KVT_GROUP_FULL;
    msg->quota_bytes = ns->quota_bytes;
    msg->ttl_ns = ns->ttl_ns;
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_RAW; level++)
        msg->record_bytes[level] =
            group->uniform[level] != NULL ? group->uniform[level]->record_bytes : 0;
}

/* Why a group was refused, for people; "" where the code says enough. */
static void refusal(const struct kvt_ns *ns, uint32_t i, int rc, char why[REFUSAL_BYTES])
{
    const struct kvt_shape_group *group = &ns->shape->groups[i];
    if (group->uniform[KVT_LEVEL_RAW] == NULL)
        (void)snprintf(why, REFUSAL_BYTES,
                       "a block of group %u, raw, is longer than any record may be: fewer "
                       "block_tokens",
                       (unsigned)group->group);
    else if (rc == KVT_E_TOO_SMALL)
        (void)snprintf(
            why, REFUSAL_BYTES,
            "records of %" PRIu32 " bytes (group %u, raw) fit neither into DRAM nor "
            "into the staging memory and a segment of a root: give dram more, or staging "
            "and disk (a segment is a 64th of a root's cap)",
            group->uniform[KVT_LEVEL_RAW]->record_bytes, (unsigned)group->group);
    else if (rc == KVT_E_LIMIT)
        (void)snprintf(why, REFUSAL_BYTES,
                       "4,096 namespaces (of models, layouts, groups and salts) are the most, and "
                       "each is open or holds blocks: close those that are not used "
                       "(kvt_ns_close()), or purge some (kvt_purge(), kvtier purge)");
}

/* Every group has a handle of its own. */
static int groups_open(struct kvt_ns *ns, char why[REFUSAL_BYTES])
{
    int rc = 0;
    for (uint32_t i = 0; i < ns->shape->group_count && rc == 0; i++) {
        struct kvt_msg_ns_open msg;
        kvt_ns_message(ns, i, &msg);
        rc = ns->shape->groups[i].uniform[KVT_LEVEL_RAW] == NULL
                 ? KVT_E_LIMIT /* a raw record would be larger than any record may be */
                 : kvt_call_ns_open(ns->cache, &msg, &ns->groups[i].handle);
        if (rc != 0)
            refusal(ns, i, rc, why);
    }
    return rc;
}

static bool opened_twice(const struct kvt_ns *ns)
{
    const struct kvt_ns *other;
    TAILQ_FOREACH(other, &ns->cache->namespaces, list)
    {
        if (other != ns && memcmp(other->id, ns->id, sizeof(ns->id)) == 0)
            return true;
    }
    return false;
}

/* The store may use the handles for others. Lock held, released while there is no room; ns is on no
 * list. Whoever opens the same namespace meanwhile is on the list before it asks. */
static void groups_close(const struct kvt_ns *ns)
{
    struct kvt_cache *cache = ns->cache;
    const uint32_t life = cache->link_lives;
    for (uint32_t i = 0; i < ns->shape->group_count;) {
        struct kvt_msg *msg = NULL;
        if (cache->broken || life != cache->link_lives || opened_twice(ns))
            return; /* a store that has gone knows of no handle; another one uses these */
        if (ns->groups[i].handle != 0 &&
            (msg = kvt_msg_reserve(cache, sizeof(*msg), KVT_OP_NS_CLOSE, 0, ns->groups[i].handle,
                                   0)) == NULL) {
            kvt_call_wait_room(cache);
            continue;
        }
        if (msg != NULL)
            kvt_msg_push(cache, msg);
        i++;
    }
}

void kvt_ns_free(struct kvt_ns *ns)
{
    kvt_choice_memo_free(ns);
    for (uint32_t i = 0; i < ns->shape->group_count; i++) {
        kvt_choice_free(ns, i);
        kvt_map_set_free(atomic_load_explicit(&ns->groups[i].maps, memory_order_relaxed));
    }
    free(ns);
}

static int ns_register(struct kvt_cache *cache, const struct kvt_layout *layout,
                       const struct kvt_msg_ns_open *msg, struct kvt_ns **out,
                       char why[REFUSAL_BYTES])
{
    int rc = kvt_cache_enter(cache);
    if (rc != 0)
        return rc;
    cache->callers++;
    const struct kvt_shape *shape = kvt_shape_intern(cache, layout);
    struct kvt_ns *ns = NULL;
    if (shape != NULL)
        ns = calloc(1, sizeof(*ns) + shape->group_count * sizeof(ns->groups[0]));
    rc = ns == NULL ? -ENOMEM : 0;
    if (rc == 0) {
        ns->cache = cache;
        ns->shape = shape;
        memcpy(ns->id, msg->id, sizeof(ns->id));
        memcpy(ns->label, msg->label, sizeof(ns->label));
        kvt_planning_ns(ns);
        rc = maps_make(ns);
    }
    if (rc == 0) {
        /* On the list before it is open: a connection that comes meanwhile opens it too. */
        TAILQ_INSERT_TAIL(&cache->namespaces, ns, list);
        rc = groups_open(ns, why);
        if (rc != 0) {
            TAILQ_REMOVE(&cache->namespaces, ns, list);
            groups_close(ns);
        }
    }
    if (rc != 0 && ns != NULL)
        kvt_ns_free(ns);
    cache->callers--;
    pthread_cond_broadcast(&cache->idle);
    pthread_mutex_unlock(&cache->lock);
    *out = rc == 0 ? ns : NULL;
    return rc;
}

int kvt_ns_open(struct kvt_cache *cache, const struct kvt_identity *identity,
                const struct kvt_layout *layout, struct kvt_ns **out)
{
    if (cache == NULL || identity == NULL || layout == NULL || out == NULL)
        return KVT_E_INVAL;
    struct kvt_msg_ns_open msg = {0};
    int rc = kvt_shape_check(layout);
    if (rc == 0)
        rc = kvt_namespace_id(identity, layout, msg.id);
    if (rc == 0 && is_empty(identity->model) && is_empty(identity->revision))
        rc = KVT_E_INVAL;
    if (rc != 0) {
        kvt_misuse_setup(cache, "kvt_ns_open", rc, identity, layout, NULL);
        return rc;
    }
    make_label(identity->model, msg.label, sizeof(msg.label));
    char why[REFUSAL_BYTES] = "";
    rc = ns_register(cache, layout, &msg, out, why);
    if (why[0] != '\0')
        kvt_misuse_say(cache, KVT_LOG_WARN, "kvt_ns_open", "%s", why);
    if (rc == 0)
        kvt_choice_recall(*out);
    return rc;
}

void kvt_ns_close(struct kvt_ns *ns)
{
    if (ns == NULL || kvt_cache_forked(ns->cache))
        return;
    kvt_choice_memo_close(ns);
    if (kvt_cache_enter(ns->cache) != 0)
        return;
    struct kvt_cache *cache = ns->cache;
    cache->callers++;
    while (ns->refs > 0)
        pthread_cond_wait(&cache->idle, &cache->lock);
    TAILQ_REMOVE(&cache->namespaces, ns, list);
    groups_close(ns);
    kvt_planning_keep(ns);
    cache->callers--;
    pthread_cond_broadcast(&cache->idle);
    pthread_mutex_unlock(&cache->lock);
    kvt_ns_free(ns);
}

/* Every group of it, by its number: it is open already. */
static int limits_say(struct kvt_ns *ns)
{
    int rc = 0;
    for (uint32_t i = 0; i < ns->shape->group_count && rc == 0; i++) {
        struct kvt_msg_ns_open msg;
        uint32_t handle;
        kvt_ns_message(ns, i, &msg);
        rc = kvt_call_ns_open(ns->cache, &msg, &handle);
    }
    return rc;
}

int kvt_ns_limit(struct kvt_ns *ns, const struct kvt_ns_limits *limits)
{
    if (ns == NULL || limits == NULL)
        return KVT_E_INVAL;
    if (limits->struct_size != sizeof(*limits))
        return KVT_E_VERSION;
    if ((limits->quota_bytes != 0 && limits->quota_bytes < KVT_QUOTA_MIN) ||
        (limits->ttl_ns != 0 && limits->ttl_ns < KVT_TTL_MIN_NS)) {
        kvt_misuse_say(ns->cache, KVT_LOG_WARN, "kvt_ns_limit",
                       "a quota of %" PRIu64 " bytes, %" PRId64
                       " ns to live: 0 says nothing; else 64 KiB and a second at least",
                       limits->quota_bytes, limits->ttl_ns);
        return KVT_E_INVAL;
    }
    int rc = kvt_cache_enter(ns->cache);
    if (rc != 0)
        return rc;
    struct kvt_cache *cache = ns->cache;
    cache->callers++;
    ns->refs++;
    while (ns->limiting) /* one after the other: else one that fails would undo another's */
        pthread_cond_wait(&cache->idle, &cache->lock);
    ns->limiting = true;
    const uint64_t quota_before = ns->quota_bytes;
    const int64_t ttl_before = ns->ttl_ns;
    if (limits->quota_bytes != 0)
        ns->quota_bytes = limits->quota_bytes;
    if (limits->ttl_ns != 0)
        ns->ttl_ns = limits->ttl_ns;
    rc = limits_say(ns);
    if (rc != 0) {
        ns->quota_bytes = quota_before;
        ns->ttl_ns = ttl_before;
    }
    ns->limiting = false;
    ns->refs--;
    cache->callers--;
    pthread_cond_broadcast(&cache->idle);
    pthread_mutex_unlock(&cache->lock);
    return rc;
}

const uint8_t *kvt_ns_id(const struct kvt_ns *ns)
{
    return ns->id;
}

size_t kvt_ns_record_bytes(const struct kvt_ns *ns, uint16_t group, int level)
{
    if (level == KVT_LEVEL_DEFAULT)
        level = ns->cache->settings->level;
    const struct kvt_shape_group *shape = kvt_shape_group_of(ns->shape, group);
    if (shape == NULL || level < 0 || level > KVT_LEVEL_RAW || shape->uniform[level] == NULL)
        return 0;
    const struct kvt_map_set *set =
        atomic_load_explicit(&ns->groups[shape - ns->shape->groups].maps, memory_order_acquire);
    return set->at[level]->record_bytes;
}
