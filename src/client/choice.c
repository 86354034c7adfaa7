/* Choice of level maps: heads that the configured level cannot hold are raised, for good, after the
 * first blocks of a namespace have been looked at.
 *
 *   JUDGING --- CHOICE_BLOCKS looked at ---> CHOSEN --- most blocks fail all the same ---> JUDGING
 *
 * Judging finds for each head of the keys the lowest level that passes the guard in all of the
 * blocks. Heads above the level are raised alone; when more than a quarter of them would be, the
 * whole level rises instead. What was chosen is a new set of maps, each at least as good as the one
 * before. Blocks that fail a map go a level up by themselves, as ever.
 * The only place on the data path that allocates: KVT_CHOICES_MAX times for a group at most;
 * without memory nothing is chosen. What was chosen is remembered across restarts (choice_memo.c).
 * Threads: workers. The lock is the group's own, is never waited for, and is held over codec calls.
 */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "client/client.h"

#define CHOICE_BLOCKS 8u
#define WATCH_BLOCKS 64u /* blocks coded between two looks at how many failed */

bool kvt_choice_init(struct kvt_ns *ns, uint32_t index, uint8_t *bounds)
{
    const struct kvt_settings *settings = ns->cache->settings;
    const struct kvt_shape_group *shape = &ns->shape->groups[index];
    struct kvt_choice *choice = &ns->groups[index].choice;
    int level = settings->level;
    if (pthread_mutex_init(&choice->lock, NULL) != 0) {
        free(bounds);
        return false;
    }
    choice->bounds = bounds;
    choice->level = (uint8_t)level;
    /* Nothing to choose without a guard, or where nothing is coded at that level. */
    bool coded = shape->uniform[level] != NULL && shape->uniform[level]->level == level;
    bool guarded = settings->guard && level >= KVT_LEVEL_KV4 && level < KVT_LEVEL_RAW;
    atomic_store_explicit(&choice->judging, coded && guarded, memory_order_relaxed);
    choice->watched = coded && guarded;
    if (!choice->watched)
        return true;
    choice->fits = malloc(shape->entries / 2 + 1);
    return choice->fits != NULL;
}

void kvt_choice_free(struct kvt_ns *ns, uint32_t index)
{
    struct kvt_choice *choice = &ns->groups[index].choice;
    if (choice->bounds == NULL) /* never made */
        return;
    pthread_mutex_destroy(&choice->lock);
    free(choice->bounds);
    free(choice->fits);
}

/* Where judging starts: each head at the level, or its bound. */
static void start_fits(const struct kvt_shape_group *shape, struct kvt_choice *choice)
{
    uint32_t entry = 0;
    for (uint32_t i = 0; i < shape->layout->part_count; i++) {
        const struct kvt_part *part = &shape->layout->parts[i];
        for (uint32_t head = 0; part->group == shape->group && head < part->heads; head++) {
            int own = kvt_level_for_part(choice->level, part);
            int bound = kvt_map_get(choice->bounds, entry);
            kvt_map_set(choice->fits, entry++, KVT_MAX(own, bound));
        }
    }
}

/* Heads above a level, and heads that count: keys that are not excluded. (MLA is never below kv8.)
 */
static uint32_t above(const struct kvt_shape_group *shape, const struct kvt_choice *choice,
                      int level, uint32_t *keys)
{
    uint32_t entry = 0, count = 0;
    *keys = 0;
    for (uint32_t i = 0; i < shape->layout->part_count; i++) {
        const struct kvt_part *part = &shape->layout->parts[i];
        for (uint32_t head = 0; part->group == shape->group && head < part->heads;
             head++, entry++) {
            if (part->kind != KVT_PART_K || kvt_map_get(choice->bounds, entry) == KVT_LEVEL_RAW)
                continue;
            (*keys)++;
            count += kvt_map_get(choice->fits, entry) > level;
        }
    }
    return count;
}

/* The lowest level at which a quarter of the keys at most must be raised alone. */
static int level_for_most(const struct kvt_shape_group *shape, const struct kvt_choice *choice)
{
    uint32_t keys;
    int level = choice->level;
    while (level < KVT_LEVEL_RAW && above(shape, choice, level, &keys) * 4 > keys)
        level++;
    return level;
}

/* The bounds, and a level for all, from now on. false: no memory. */
static bool put_in_force(struct kvt_ns_group *group, const struct kvt_shape_group *shape, int level)
{
    struct kvt_choice *choice = &group->choice;
    struct kvt_map_set *old = atomic_load_explicit(&group->maps, memory_order_relaxed);
    struct kvt_map_set *set = kvt_map_set_new(shape, choice->bounds);
    if (set == NULL)
        return false;
    for (int l = 0; l < level; l++)
        set->at[l] = l < choice->level ? old->at[l] : set->at[level];
    set->next = old;
    choice->level = (uint8_t)level;
    atomic_store_explicit(&group->maps, set, memory_order_release);
    return true;
}

/* Put the set that the fits ask for in force. */
static void choose(const struct kvt_req *req, struct kvt_choice *choice, struct kvt_chosen *out)
{
    const struct kvt_shape_group *shape = kvt_req_group(req);
    struct kvt_ns_group *group = &req->ns->groups[req->group];
    uint32_t keys, entries = shape->entries;
    int level = level_for_most(shape, choice);
    uint32_t heads = above(shape, choice, level, &keys);
    choice->choices++;
    if (heads == 0 && level == choice->level)
        return;
    for (uint32_t entry = 0; entry < entries; entry++) {
        int fit = kvt_map_get(choice->fits, entry);
        if (fit > level && fit > kvt_map_get(choice->bounds, entry))
            kvt_map_set(choice->bounds, entry, fit);
    }
    int before = choice->level;
    if (!put_in_force(group, shape, level)) /* no memory: blocks go on escalating one by one */
        return;
    out->level = (uint8_t)(level > before ? level : 0);
    out->heads = heads;
}

void kvt_choice_adopt(struct kvt_ns *ns, uint32_t index, uint8_t level, uint8_t choices,
                      const uint8_t *bounds)
{
    struct kvt_ns_group *group = &ns->groups[index];
    struct kvt_choice *choice = &group->choice;
    const struct kvt_shape_group *shape = &ns->shape->groups[index];
    bool any = level > choice->level;
    pthread_mutex_lock(&choice->lock);
    for (uint32_t entry = 0; entry < shape->entries; entry++) {
        int own = kvt_map_get(choice->bounds, entry), bound = kvt_map_get(bounds, entry);
        any = any || bound > own;
        kvt_map_set(choice->bounds, entry, KVT_MAX(own, bound));
    }
    if (!any || put_in_force(group, shape, level)) {
        choice->choices = choices;
        atomic_store_explicit(&choice->judging, 0, memory_order_relaxed);
    }
    pthread_mutex_unlock(&choice->lock);
}

bool kvt_choice_news(struct kvt_ns *ns, uint32_t index)
{
    struct kvt_choice *choice = &ns->groups[index].choice;
    pthread_mutex_lock(&choice->lock);
    bool news = choice->news;
    choice->news = false;
    pthread_mutex_unlock(&choice->lock);
    return news;
}

void kvt_choice_read(struct kvt_ns *ns, uint32_t index, uint8_t *level, uint8_t *choices,
                     uint8_t *bounds)
{
    struct kvt_choice *choice = &ns->groups[index].choice;
    pthread_mutex_lock(&choice->lock);
    *level = choice->level;
    *choices = (uint8_t)choice->choices;
    memcpy(bounds, choice->bounds, ns->shape->groups[index].entries / 2 + 1);
    pthread_mutex_unlock(&choice->lock);
}

void kvt_choice_judge(const struct kvt_req *req, const struct kvt_block *block,
                      struct kvt_chosen *out)
{
    struct kvt_choice *choice = &req->ns->groups[req->group].choice;
    const struct kvt_shape_group *shape = kvt_req_group(req);
    memset(out, 0, sizeof(*out));
    if (!atomic_load_explicit(&choice->judging, memory_order_relaxed) || block->lossy ||
        block->recode || pthread_mutex_trylock(&choice->lock) != 0)
        return;
    /* Looked at once more under the lock; levels asked for beside the configured one do not count.
     */
    if (atomic_load_explicit(&choice->judging, memory_order_relaxed) &&
        block->level == choice->level) {
        if (choice->judged == 0)
            start_fits(shape, choice);
        out->judged = kvt_map_fit(shape->layout, shape->group, choice->fits, &req->pool->desc,
                                  block->page) >= 0;
        choice->judged += out->judged;
        if (choice->judged == CHOICE_BLOCKS) {
            choose(req, choice, out);
            choice->judged = choice->coded = choice->failed = 0;
            atomic_store_explicit(&choice->judging, 0, memory_order_relaxed);
            if (out->heads > 0 || out->level != 0) { /* nothing: the next life looks again */
                choice->news = true;
                /* release: pairs with the acquire of kvt_choice_save() */
                atomic_store_explicit(&req->ns->news, 1, memory_order_release);
            }
        }
    }
    pthread_mutex_unlock(&choice->lock);
    if (out->heads > 0 || out->level != 0)
        kvt_log(&req->cache->log, KVT_LOG_INFO,
                "group %u of a namespace: key heads raised alone: %u; level for all: %s",
                shape->group, out->heads,
                out->level != 0 ? kvt_level_name(out->level) : "as configured");
}

void kvt_choice_watch(const struct kvt_req *req, bool failed)
{
    struct kvt_choice *choice = &req->ns->groups[req->group].choice;
    if (!choice->watched || atomic_load_explicit(&choice->judging, memory_order_relaxed) ||
        pthread_mutex_trylock(&choice->lock) != 0)
        return;
    choice->coded++;
    choice->failed += failed;
    if (choice->coded == WATCH_BLOCKS) {
        bool again = choice->failed > WATCH_BLOCKS / 2 && choice->choices < KVT_CHOICES_MAX;
        choice->coded = choice->failed = 0;
        atomic_store_explicit(&choice->judging, again, memory_order_relaxed);
    }
    pthread_mutex_unlock(&choice->lock);
}
