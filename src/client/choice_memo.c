/* What was chosen is remembered: a record beside the namespace's own says which heads are above the
 * level, so that the first blocks after a restart are coded as the last ones before it.
 *
 *   kvt_ns_open()  looks for the newest such record of each group, and puts its maps in force
 *   a head raised  is news; the next kvt_store(), kvt_flush() or close of the namespace stores it
 *
 * The record is a block like any other, of a namespace of our own: one opaque part, stored raw. Its
 * key is the id of the namespace that it speaks of, the group and the number of the choice. So it
 * is verified, evicted, purged and recovered by the same code, and a doubt is a miss: then the
 * first blocks are looked at again. It is as long as the namespace's shortest record or longer,
 * since the store makes its tables for the shortest one that it knows of. Only with a disk: without
 * one nothing outlives the process. Threads: callers of the public functions, without the cache's
 * lock. Allocates when a namespace is opened. Failures are not told: nothing is lost but time.
 */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "client/client.h"
#include "kvtier/key.h"

#define MAGIC 0x6d6d766bu /* "kvmm" */
#define VERSION 1u
#define BYTES_MIN (16u << 10)
#define LOAD_NS INT64_C(500000000) /* kvt_ns_open() waits no longer */

struct remembered { /* little-endian; the rest of the record is zero */
    uint32_t magic;
    uint32_t version;
    uint32_t entries;   /* heads of all parts of the group */
    uint8_t configured; /* the level that the choice was made under */
    uint8_t level;      /* that most heads are at */
    uint8_t choices;
    uint8_t reserved;
    uint8_t bounds[]; /* entries / 2 + 1 bytes, packed: heads that are above it */
};

struct kvt_choice_memo {
    pthread_mutex_t lock; /* of saving */
    struct kvt_ns *side;
    struct kvt_pool *pool; /* a page for each group */
    struct kvt_req *req;   /* the last save */
    uint8_t *pages;
    uint64_t page_bytes;
};

static struct kvt_key key_of(const struct kvt_ns *ns, uint32_t group, uint8_t choices)
{
    struct kvt_key key = {.hash_len = KVT_NS_BYTES + 3};
    memcpy(key.hash, ns->id, KVT_NS_BYTES);
    key.hash[KVT_NS_BYTES] = (uint8_t)group;
    key.hash[KVT_NS_BYTES + 1] = (uint8_t)(group >> 8);
    key.hash[KVT_NS_BYTES + 2] = choices;
    return key;
}

static struct remembered *page_of(const struct kvt_choice_memo *memo, uint32_t group)
{
    return (struct remembered *)(void *)(memo->pages + group * memo->page_bytes);
}

/* A power of two, so that few namespaces of ours are made. 0: not to be remembered. */
static uint64_t bytes_for(const struct kvt_ns *ns)
{
    uint64_t bytes = BYTES_MIN, need = 0;
    for (uint32_t i = 0; i < ns->shape->group_count; i++) {
        const struct kvt_shape_group *group = &ns->shape->groups[i];
        uint64_t shortest = UINT64_MAX;
        for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_RAW; level++)
            if (group->uniform[level] != NULL)
                shortest = KVT_MIN(shortest, (uint64_t)group->uniform[level]->record_bytes);
        need = KVT_MAX(need, sizeof(struct remembered) + group->entries / 2 + 1);
        need = KVT_MAX(need, shortest);
    }
    while (bytes < need && bytes < KVT_RECORD_BYTES_MAX)
        bytes *= 2;
    return bytes < need || bytes > KVT_RECORD_BYTES_MAX / 2 ? 0 : bytes;
}

static int side_open(struct kvt_ns *ns, struct kvt_choice_memo *memo)
{
    uint64_t bytes = memo->page_bytes;
    uint32_t tokens = bytes > (16u << 20) ? (uint32_t)(bytes >> 20) : KVT_TILE_TOKENS;
    uint32_t heads = (uint32_t)(bytes / tokens / KVT_HEAD_DIM_MAX);
    const struct kvt_part part = {.kind = KVT_PART_OPAQUE,
                                  .dtype = KVT_DTYPE_BYTE,
                                  .heads = heads,
                                  .head_dim = KVT_HEAD_DIM_MAX};
    const struct kvt_layout layout = {
        .struct_size = sizeof(layout), .block_tokens = tokens, .part_count = 1, .parts = &part};
    const struct kvt_part_place place = {.base = memo->pages,
                                         .stride_block = (int64_t)bytes,
                                         .stride_head = KVT_HEAD_DIM_MAX,
                                         .stride_token = (int64_t)heads * KVT_HEAD_DIM_MAX,
                                         .stride_elem = 1};
    const struct kvt_pool_desc desc = {.struct_size = sizeof(desc),
                                       .device = KVT_DEVICE_HOST,
                                       .block_count = ns->shape->group_count,
                                       .place_count = 1,
                                       .places = &place};
    struct kvt_identity identity;
    kvt_identity_init(&identity);
    identity.engine = "kvtier";
    identity.key_scheme = "kvtier-level-maps-v1";
    identity.model = "level maps of other namespaces";
    int rc = kvt_ns_open(ns->cache, &identity, &layout, &memo->side);
    return rc != 0 ? rc : kvt_pool_register(ns->cache, &layout, &desc, &memo->pool);
}

static struct kvt_choice_memo *memo_make(struct kvt_ns *ns)
{
    struct kvt_choice_memo *memo = calloc(1, sizeof(*memo));
    if (memo == NULL)
        return NULL;
    memo->page_bytes = bytes_for(ns);
    if (memo->page_bytes != 0)
        memo->pages = calloc(ns->shape->group_count, memo->page_bytes);
    if (memo->pages == NULL || pthread_mutex_init(&memo->lock, NULL) != 0) {
        free(memo->pages);
        free(memo);
        return NULL;
    }
    return memo;
}

void kvt_choice_memo_free(struct kvt_ns *ns)
{
    if (ns->memo == NULL)
        return;
    pthread_mutex_destroy(&ns->memo->lock);
    free(ns->memo->pages);
    free(ns->memo);
    ns->memo = NULL;
}

/* ---- finding ------------------------------------------------------------------------------- */

/* The number of the newest choice that the store has of a group; 0: none. By TOUCH, which is no
 * lookup of the user's to count, and keeps the record among those that are in use. */
static uint8_t newest(struct kvt_ns *ns, uint32_t group)
{
    struct kvt_key keys[KVT_CHOICES_MAX];
    uint8_t found = 0;
    for (uint8_t i = 0; i < KVT_CHOICES_MAX; i++)
        keys[i] = key_of(ns, group, (uint8_t)(i + 1));
    if (kvt_call_touch(ns->memo->side, keys, KVT_CHOICES_MAX) <= 0)
        return 0;
    for (uint8_t i = KVT_CHOICES_MAX; i > 0 && found == 0; i--)
        if (kvt_call_touch(ns->memo->side, &keys[i - 1], 1) == 1)
            found = i;
    return found;
}

static bool load(struct kvt_ns *ns, uint32_t group, uint8_t choices)
{
    struct kvt_load_opts opts = {.struct_size = sizeof(opts), .deadline_ns = LOAD_NS};
    struct kvt_key key = key_of(ns, group, choices);
    struct kvt_req *req;
    if (kvt_load(ns->memo->side, ns->memo->pool, &key, &group, 1, &opts, &req) != 0)
        return false;
    bool good = kvt_req_wait(req, -1) == 1 && kvt_req_status(req, NULL)[0] == 0;
    kvt_req_free(req);
    return good;
}

static bool plausible(const struct remembered *r, const struct kvt_ns *ns, uint32_t group,
                      uint8_t choices)
{
    const struct kvt_shape_group *shape = &ns->shape->groups[group];
    if (r->magic != MAGIC || r->version != VERSION || r->entries != shape->entries ||
        r->configured != ns->cache->settings->level || r->level < r->configured ||
        r->level > KVT_LEVEL_RAW || r->choices != choices)
        return false;
    for (uint32_t i = 0; i < r->entries; i++)
        if (kvt_map_get(r->bounds, i) > KVT_LEVEL_RAW)
            return false;
    return true;
}

static bool wanted(const struct kvt_ns *ns)
{
    bool watched = false;
    for (uint32_t i = 0; i < ns->shape->group_count; i++)
        watched = watched || ns->groups[i].choice.watched;
    if (!watched || kvt_cache_enter(ns->cache) != 0)
        return false;
    pthread_mutex_unlock(&ns->cache->lock);
    return ns->cache->remote || ns->cache->host.settings->disk_count > 0;
}

void kvt_choice_recall(struct kvt_ns *ns)
{
    if (!wanted(ns))
        return;
    ns->memo = memo_make(ns);
    if (ns->memo == NULL)
        return;
    if (side_open(ns, ns->memo) != 0) {
        kvt_pool_unregister(ns->memo->pool);
        kvt_ns_close(ns->memo->side);
        kvt_choice_memo_free(ns);
        return;
    }
    for (uint32_t i = 0; i < ns->shape->group_count; i++) {
        uint8_t choices = ns->groups[i].choice.watched ? newest(ns, i) : 0;
        const struct remembered *r = page_of(ns->memo, i);
        if (choices != 0 && load(ns, i, choices) && plausible(r, ns, i, choices))
            kvt_choice_adopt(ns, i, r->level, r->choices, r->bounds);
    }
}

/* ---- keeping ------------------------------------------------------------------------------- */

/* Store the news of one group. The memo's lock is held, its page is free. */
static void save_group(struct kvt_ns *ns, uint32_t group)
{
    struct kvt_choice_memo *memo = ns->memo;
    struct kvt_store_opts opts = {
        .struct_size = sizeof(opts), .level = KVT_LEVEL_RAW, .write = KVT_WRITE_THROUGH};
    struct remembered *r = page_of(memo, group);
    memset(r, 0, memo->page_bytes);
    r->magic = MAGIC;
    r->version = VERSION;
    r->entries = ns->shape->groups[group].entries;
    r->configured = (uint8_t)ns->cache->settings->level;
    kvt_choice_read(ns, group, &r->level, &r->choices, r->bounds);
    struct kvt_key key = key_of(ns, group, r->choices);
    if (kvt_store(memo->side, memo->pool, &key, &group, 1, &opts, &memo->req) != 0)
        memo->req = NULL;
}

/* wait: for what is on its way. false: it still is, try again. */
static bool save(struct kvt_ns *ns, bool wait)
{
    struct kvt_choice_memo *memo = ns->memo;
    for (uint32_t i = 0; i < ns->shape->group_count; i++) {
        if (memo->req != NULL && kvt_req_wait(memo->req, wait ? -1 : 0) != 1)
            return false;
        kvt_req_free(memo->req);
        memo->req = NULL;
        if (memo->side != NULL && kvt_choice_news(ns, i))
            save_group(ns, i);
    }
    if (wait && memo->req != NULL) {
        (void)kvt_req_wait(memo->req, -1);
        kvt_req_free(memo->req);
        memo->req = NULL;
    }
    return true;
}

void kvt_choice_save(struct kvt_ns *ns, bool wait)
{
    if (ns->memo == NULL || !atomic_exchange_explicit(&ns->news, 0, memory_order_acq_rel))
        return;
    bool done = false;
    if (wait)
        pthread_mutex_lock(&ns->memo->lock);
    if (wait || pthread_mutex_trylock(&ns->memo->lock) == 0) {
        done = save(ns, wait);
        pthread_mutex_unlock(&ns->memo->lock);
    }
    if (!done) /* somebody else is at it, or the last one is on its way: the next call's */
        atomic_store_explicit(&ns->news, 1, memory_order_release);
}

void kvt_choices_save(struct kvt_cache *cache)
{
    if (kvt_cache_enter(cache) != 0)
        return;
    struct kvt_ns *ns = TAILQ_FIRST(&cache->namespaces);
    while (ns != NULL) {
        ns->refs++;
        pthread_mutex_unlock(&cache->lock);
        kvt_choice_save(ns, true);
        pthread_mutex_lock(&cache->lock);
        ns->refs--;
        pthread_cond_broadcast(&cache->idle);
        ns = TAILQ_NEXT(ns, list);
    }
    pthread_mutex_unlock(&cache->lock);
}

void kvt_choice_forget(struct kvt_ns *ns)
{
    struct kvt_key keys[KVT_CHOICES_MAX];
    for (uint32_t i = 0; ns->memo != NULL && i < ns->shape->group_count; i++) {
        for (uint8_t k = 0; k < KVT_CHOICES_MAX; k++)
            keys[k] = key_of(ns, i, (uint8_t)(k + 1));
        (void)kvt_purge(ns->memo->side, keys, KVT_CHOICES_MAX);
    }
}

void kvt_choice_memo_close(struct kvt_ns *ns)
{
    if (ns->memo == NULL)
        return;
    kvt_choice_save(ns, true);
    pthread_mutex_lock(&ns->memo->lock);
    if (ns->memo->req != NULL)
        (void)kvt_req_wait(ns->memo->req, -1);
    kvt_req_free(ns->memo->req);
    ns->memo->req = NULL;
    struct kvt_pool *pool = ns->memo->pool;
    struct kvt_ns *side = ns->memo->side;
    ns->memo->pool = NULL; /* a flush that comes late finds nothing to save to */
    ns->memo->side = NULL;
    pthread_mutex_unlock(&ns->memo->lock);
    kvt_pool_unregister(pool);
    kvt_ns_close(side);
}
