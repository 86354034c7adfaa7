/* Options of a session manager: defaults, limits, and what they make of each group of the layout:
 * its pages and its levels. Every refusal says in the log which option it was.
 * Threads: any; touches nothing but the manager that is being made.
 */
#include <inttypes.h>
#include <string.h>

#include "base/checked.h"
#include "client/misuse.h"
#include "client/session_internal.h"

#define WINDOW_TOKENS 4096u
#define SESSIONS 256u
#define SESSIONS_LIMIT 65536u
#define TOKENS 131072u
#define TOKENS_LIMIT (1u << 30)
#define BLOCKS_MIN 65536u
#define BLOCKS_LIMIT (1u << 28) /* cells: blocks of all groups */
#define PAGES_LIMIT (1u << 26)
#define SCRATCH_MANY 4u
#define SCRATCH_MANY_FROM 64u /* pages */

static int refuse(const struct kvt_ns *ns, const char *what)
{
    kvt_misuse_say(ns->cache, KVT_LOG_WARN, "kvt_session_mgr_open", "%s", what);
    return KVT_E_INVAL;
}

/* ---- the layout ---------------------------------------------------------------------------- */

static int groups_init(struct kvt_session_mgr *mgr)
{
    const struct kvt_shape *shape = mgr->ns->shape;
    bool found = false;
    mgr->group_count = shape->group_count;
    mgr->block_tokens = shape->groups[0].block_tokens;
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        const struct kvt_shape_group *group = &shape->groups[g];
        mgr->groups[g].shape = group;
        mgr->groups[g].full = group->kind == KVT_GROUP_FULL;
        mgr->states = mgr->states || group->kind == KVT_GROUP_STATE;
        if (mgr->groups[g].full && !found) {
            mgr->main_group = g;
            found = true;
        }
        if (group->block_tokens == mgr->block_tokens)
            continue;
        kvt_misuse_say(mgr->ns->cache, KVT_LOG_WARN, "kvt_session_mgr_open",
                       "blocks of group %u have %" PRIu32 " tokens, and those of group %u %" PRIu32
                       ": sessions need blocks of one length",
                       (unsigned)group->group, group->block_tokens,
                       (unsigned)shape->groups[0].group, mgr->block_tokens);
        return KVT_E_UNSUPPORTED;
    }
    return 0;
}

/* ---- pages --------------------------------------------------------------------------------- */

static int pages_check(const struct kvt_session_mgr *mgr, struct kvt_sgroup *group)
{
    uint32_t have = mgr->pool->desc.block_count;
    if (group->first_page >= have || group->page_count > have - group->first_page)
        return refuse(mgr->ns, "first_page and page_count reach beyond the pool's blocks");
    if (group->page_count == 0)
        group->page_count = have - group->first_page;
    if (group->page_count > PAGES_LIMIT)
        return refuse(mgr->ns, "page_count is above its limit of 2^26");
    if (group->scratch_pages == 0)
        group->scratch_pages = group->page_count >= SCRATCH_MANY_FROM ? SCRATCH_MANY : 1;
    if (group->scratch_pages > KVT_SESSION_SCRATCH_MAX || group->scratch_pages >= group->page_count)
        return refuse(mgr->ns, "scratch_pages is above its limit, or leaves no page");
    return 0;
}

/* Whether one session can go on at all in a group that is not full attention. */
static int enough(const struct kvt_session_mgr *mgr, const struct kvt_sgroup *group)
{
    uint32_t window = KVT_MIN(group->shape->window_tokens, mgr->opts.tokens_max);
    uint32_t least = group->full ? 1 : window / mgr->block_tokens + 3; /* states: window is 0 */
    if (group->page_count - group->scratch_pages >= least)
        return 0;
    kvt_misuse_say(mgr->ns->cache, KVT_LOG_WARN, "kvt_session_mgr_open",
                   "group %u has %" PRIu32
                   " pages without the scratch pages, and a session needs %" PRIu32
                   " to go on: raise its page_count",
                   (unsigned)group->shape->group, group->page_count - group->scratch_pages, least);
    return KVT_E_INVAL;
}

/* What the list says of one group, else what the options say of all. */
static int pages_read(struct kvt_session_mgr *mgr)
{
    const struct kvt_session_mgr_opts *opts = &mgr->opts;
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        mgr->groups[g].first_page = opts->first_page;
        mgr->groups[g].page_count = opts->page_count;
        mgr->groups[g].scratch_pages = opts->scratch_pages;
    }
    if (opts->reserved != 0 || (opts->group_count > 0 && opts->groups == NULL))
        return refuse(mgr->ns, "groups is NULL and group_count is not 0, or reserved is not 0");
    for (uint32_t i = 0; i < opts->group_count; i++) {
        const struct kvt_session_group *from = &opts->groups[i];
        uint32_t g = 0;
        while (g < mgr->group_count && mgr->groups[g].shape->group != from->group)
            g++;
        if (g == mgr->group_count || from->reserved != 0)
            return refuse(mgr->ns, "groups names a group that the layout has not");
        for (uint32_t j = 0; j < i; j++)
            if (opts->groups[j].group == from->group)
                return refuse(mgr->ns, "a group stands twice in groups");
        mgr->groups[g].first_page = from->first_page;
        mgr->groups[g].page_count = from->page_count;
        mgr->groups[g].scratch_pages = from->scratch_pages;
    }
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        int rc = pages_check(mgr, &mgr->groups[g]);
        if (rc == 0)
            rc = enough(mgr, &mgr->groups[g]);
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* ---- levels -------------------------------------------------------------------------------- */

static int level_check(const struct kvt_session_mgr *mgr, int level)
{
    if (level < KVT_LEVEL_DEFAULT || level > KVT_LEVEL_RAW)
        return KVT_E_INVAL;
    for (uint32_t g = 0; g < mgr->group_count && level != KVT_LEVEL_DEFAULT; g++)
        if (mgr->groups[g].shape->uniform[level] == NULL)
            return KVT_E_UNSUPPORTED;
    return 0;
}

/* Whether a block is stored twice: at the window's level, then at a coarser one. (Of a group of MLA
 * rows kv4 comes to kv8, of states to raw.) */
static bool two_steps(const struct kvt_session_mgr *mgr, const struct kvt_sgroup *group)
{
    const struct kvt_session_mgr_opts *opts = &mgr->opts;
    int level = opts->level != KVT_LEVEL_DEFAULT ? opts->level : mgr->ns->cache->settings->level;
    const struct kvt_map *map = group->shape->uniform[level];
    return map != NULL && map->level < opts->window_level;
}

static int levels_read(struct kvt_session_mgr *mgr)
{
    struct kvt_session_mgr_opts *opts = &mgr->opts;
    int rc = level_check(mgr, opts->level);
    if (rc != 0)
        return rc;
    if (opts->window_level == KVT_LEVEL_DEFAULT)
        opts->window_level = level_check(mgr, KVT_LEVEL_KV8) == 0 ? KVT_LEVEL_KV8 : KVT_LEVEL_RAW;
    if (opts->window_level != KVT_LEVEL_KV8 && opts->window_level != KVT_LEVEL_RAW)
        return refuse(mgr->ns, "window_level is neither kv8 nor raw");
    for (uint32_t g = 0; g < mgr->group_count; g++)
        mgr->groups[g].two_steps = two_steps(mgr, &mgr->groups[g]);
    return level_check(mgr, opts->window_level);
}

/* ---- all of it ----------------------------------------------------------------------------- */

static uint32_t most_pages(const struct kvt_session_mgr *mgr)
{
    uint32_t most = 0;
    for (uint32_t g = 0; g < mgr->group_count; g++)
        most = KVT_MAX(most, mgr->groups[g].page_count);
    return most;
}

static int sizes_read(struct kvt_session_mgr *mgr)
{
    struct kvt_session_mgr_opts *opts = &mgr->opts;
    uint32_t limit = BLOCKS_LIMIT / mgr->group_count;
    if (opts->sessions_max == 0)
        opts->sessions_max = SESSIONS;
    if (opts->blocks_max == 0)
        opts->blocks_max = KVT_MAX(BLOCKS_MIN, KVT_MIN(most_pages(mgr), limit / 16) * 16);
    if (opts->sessions_max > SESSIONS_LIMIT || opts->tokens_max > TOKENS_LIMIT ||
        opts->blocks_max > limit)
        return refuse(mgr->ns, "sessions_max, tokens_max or blocks_max is above its limit");
    mgr->session_blocks = (opts->tokens_max + mgr->block_tokens - 1) / mgr->block_tokens;
    mgr->node_max = opts->blocks_max;
    mgr->node_free = KVT_NONE;
    return 0;
}

static int opts_copy(const struct kvt_session_mgr_opts *from, struct kvt_session_mgr_opts *opts)
{
    if (from != NULL && from->struct_size != sizeof(*from) &&
        from->struct_size != KVT_SESSION_MGR_OPTS_SIZE_0)
        return KVT_E_VERSION;
    if (from != NULL)
        memcpy(opts, from, from->struct_size);
    opts->struct_size = sizeof(*opts);
    if (opts->window_tokens == 0)
        opts->window_tokens = WINDOW_TOKENS;
    if (opts->tokens_max == 0)
        opts->tokens_max = TOKENS;
    return 0;
}

int kvt_session_opts_read(const struct kvt_session_mgr_opts *from, const struct kvt_ns *ns,
                          const struct kvt_pool *pool, struct kvt_session_mgr *mgr)
{
    if (ns->cache != pool->cache)
        return KVT_E_INVAL;
    if (ns->shape != pool->shape)
        return KVT_E_LAYOUT;
    int rc = opts_copy(from, &mgr->opts);
    if (rc == 0)
        rc = groups_init(mgr);
    if (rc == 0)
        rc = pages_read(mgr);
    if (rc == 0)
        rc = levels_read(mgr);
    if (rc == 0)
        rc = sizes_read(mgr);
    mgr->opts.groups = NULL; /* the caller's; what it said is in the groups */
    mgr->opts.group_count = 0;
    return rc;
}
