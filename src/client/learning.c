/* What loads tell the models that kvt_plan() goes by: each root's, and DRAM's.
 *
 *   load completes --saw--> seen[] --learn--> models[] --publish--> tiers[] (what plans look at)
 *      cache's lock                fit_lock                cache's lock
 *
 * A fit takes tens of microseconds, so none is made under the cache's lock: workers learn after
 * their jobs, and whoever asks for a plan does what is left, so that a plan knows every load that
 * completed before it. Threads: any. Allocates: never. Does not measure: planning.c does.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "client/client.h"
#include "format/hash.h"

#define KEPT_CLASS 1u /* of sizes: 1 to 16 MiB, as most loads are */

void kvt_planning_saw(struct kvt_cache *cache, uint32_t tier, double bytes, double queued,
                      double seconds)
{
    struct kvt_planning *planning = &cache->planning;
    if (planning->seen_count == KVT_SEEN_MAX) { /* nobody plans: the oldest tells the least */
        memmove(&planning->seen[0], &planning->seen[1],
                (KVT_SEEN_MAX - 1) * sizeof(planning->seen[0]));
        planning->seen_count--;
    }
    planning->seen[planning->seen_count++] = (struct kvt_seen_load){
        .tier = tier, .bytes = (uint64_t)bytes, .queued = (uint64_t)queued, .seconds = seconds};
}

/* What plans look at; what they note there themselves stays. */
static void publish(struct kvt_tier_model *shown, const struct kvt_tier_model *model)
{
    memcpy(shown->line, model->line, sizeof(shown->line));
    shown->taken = model->taken;
    shown->refused = model->refused;
    shown->waking = model->waking;
}

/* fit_lock and the cache's lock are held; the latter is let go while it fits. */
static void learn(struct kvt_cache *cache)
{
    struct kvt_planning *planning = &cache->planning;
    struct kvt_seen_load seen[KVT_SEEN_MAX];
    uint32_t count = planning->seen_count;
    memcpy(seen, planning->seen, count * sizeof(seen[0]));
    planning->seen_count = 0;
    planning->learning = true;
    pthread_mutex_unlock(&cache->lock);
    for (uint32_t i = 0; i < count; i++) {
        /* refused observations are counted by the model */
        int rc = kvt_tier_observe(&planning->models[seen[i].tier], seen[i].bytes, seen[i].queued,
                                  seen[i].seconds);
        (void)rc;
    }
    pthread_mutex_lock(&cache->lock);
    for (uint32_t i = 0; i < count; i++)
        publish(&planning->tiers[seen[i].tier], &planning->models[seen[i].tier]);
    planning->learning = false;
}

void kvt_planning_learn(struct kvt_cache *cache)
{
    struct kvt_planning *planning = &cache->planning;
    if (planning->seen_count == 0 && !planning->learning)
        return;
    cache->callers++;
    pthread_mutex_unlock(&cache->lock);
    pthread_mutex_lock(&planning->fit_lock);
    pthread_mutex_lock(&cache->lock);
    learn(cache);
    pthread_mutex_unlock(&planning->fit_lock);
    cache->callers--;
    pthread_cond_broadcast(&cache->idle);
}

/* ---- across restarts ----------------------------------------------------------------------- */

/* What a root is known by: its path; a daemon's by its number. False: it is not in use. */
static bool root_key(struct kvt_cache *cache, uint32_t number, uint64_t *key)
{
    char name[32];
    bool found = cache->remote;
    if (cache->remote) {
        int n = snprintf(name, sizeof(name), "root %" PRIu32, number);
        *key = kvt_hash64(name, (size_t)n);
        return true;
    }
    if (number == KVT_PLAN_ROOT_REMOTE) {
        const char *where = cache->settings->remote;
        *key = kvt_hash64(where, strlen(where));
        return where[0] != '\0';
    }
    pthread_mutex_lock(&cache->host.lock);
    for (uint32_t i = 0; i < cache->settings->disk_count && !found; i++) {
        const struct kvt_root_state *root = &cache->host.roots[i];
        found = root->io != NULL && root->number == (int)number;
        if (found)
            *key = kvt_hash64(root->path, strlen(root->path));
    }
    pthread_mutex_unlock(&cache->host.lock);
    return found;
}

static struct kvt_kept_root *kept_root(struct kvt_planning *planning, uint64_t key)
{
    for (uint32_t i = 0; i < planning->kept_roots_count; i++)
        if (planning->kept_roots[i].key == key)
            return &planning->kept_roots[i];
    return NULL;
}

void kvt_planning_roots(struct kvt_cache *cache)
{
    struct kvt_planning *planning = &cache->planning;
    uint64_t key;
    pthread_mutex_lock(&planning->fit_lock);
    for (uint32_t root = 0; root < KVT_PLAN_ROOTS && planning->kept_roots_count > 0; root++) {
        const struct kvt_kept_root *kept = NULL;
        if (root_key(cache, root, &key))
            kept = kept_root(planning, key);
        if (kept == NULL)
            continue;
        struct kvt_tier_model *model = &planning->models[KVT_TIER_DISK + root];
        bool fixed = model->fixed;
        (void)kvt_tier_init(model, kept->line.p, 1 / kept->line.q); /* what was read has limits */
        model->fixed = fixed;
        pthread_mutex_lock(&cache->lock);
        planning->tiers[KVT_TIER_DISK + root] = *model;
        pthread_mutex_unlock(&cache->lock);
    }
    pthread_mutex_unlock(&planning->fit_lock);
}

static void keep_root(struct kvt_planning *planning, uint64_t key, const struct kvt_fit_line *line)
{
    struct kvt_kept_root *kept = kept_root(planning, key);
    if (kept == NULL && planning->kept_roots_count == KVT_KEPT_ROOTS_MAX) { /* the oldest goes */
        memmove(&planning->kept_roots[0], &planning->kept_roots[1],
                (KVT_KEPT_ROOTS_MAX - 1) * sizeof(planning->kept_roots[0]));
        planning->kept_roots_count--;
    }
    if (kept == NULL)
        kept = &planning->kept_roots[planning->kept_roots_count++];
    kept->key = key;
    kept->line = *line;
}

static void keep_tiers(struct kvt_cache *cache)
{
    struct kvt_planning *planning = &cache->planning;
    uint64_t most = 0, key;
    for (uint32_t tier = KVT_TIER_DRAM; tier < KVT_PLAN_TIERS; tier++) {
        const struct kvt_tier_model *model = &planning->models[tier];
        if (model->fit.count == 0)
            continue;
        planning->learnt = true;
        struct kvt_fit_line line = model->line[KEPT_CLASS];
        line.q = KVT_MAX(line.q, KVT_KEPT_PER_BYTE_MIN); /* loads of one size look like latency */
        if (tier == KVT_TIER_DRAM) {
            planning->kept_tier[KVT_TIER_DRAM] = line;
            continue;
        }
        const bool shared = tier == KVT_TIER_DISK + KVT_PLAN_ROOT_REMOTE;
        if (model->taken > most && !shared) /* what a root that is new then begins with */
            planning->kept_tier[KVT_TIER_DISK] = line;
        most = KVT_MAX(most, model->taken);
        if (root_key(cache, tier - KVT_TIER_DISK, &key))
            keep_root(planning, key, &line);
    }
}

bool kvt_planning_keep_all(struct kvt_cache *cache)
{
    struct kvt_planning *planning = &cache->planning;
    const struct kvt_ns *ns;
    pthread_mutex_lock(&planning->fit_lock);
    pthread_mutex_lock(&cache->lock);
    learn(cache);
    TAILQ_FOREACH(ns, &cache->namespaces, list)
    kvt_planning_keep(ns);
    pthread_mutex_unlock(&cache->lock);
    keep_tiers(cache);
    pthread_mutex_unlock(&planning->fit_lock);
    return planning->learnt;
}
