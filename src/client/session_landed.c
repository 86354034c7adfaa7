/* The end of a restore: which of the blocks that were asked for came, how far the session is there
 * with them, and whose the other pages are.
 *
 * Each group has one load (a session that meets has pieces: session_meet.c). When the last one has
 * ended, the longest prefix of which every group has what it needs becomes nodes like any others;
 * blocks behind it are the engine's. Where a group had shared pages there, or none, it gets pages
 * now; where there are none to be had the session goes idle again, with what it has.
 * Threads: under the manager's lock.
 */
#include <errno.h>

#include "base/checked.h"
#include "client/session_internal.h"

struct kvt_sjob *kvt_session_a_load(struct kvt_session_mgr *mgr, const struct kvt_session *s)
{
    uint32_t g = 0;
    while (s->restore_job[g] == KVT_NONE)
        g++;
    return &mgr->jobs[s->restore_job[g]];
}

void kvt_session_activate(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t end,
                          uint32_t loaded)
{
    uint32_t unit = mgr->block_tokens, blocks = kvt_session_blocks_of(mgr, s->tokens);
    bool all = end == s->load_to;
    while (s->blocks > end)
        kvt_session_detach_last(mgr, s);
    for (uint32_t g = 0; g < mgr->group_count; g++) /* the engine's now */
        kvt_session_reset_origin(mgr, g, kvt_session_page(mgr, s, g, end), blocks - end);
    s->filled = all && s->tail_filled > end * unit ? s->tail_filled : end * unit;
    s->state = KVT_SESSION_ACTIVE;
    s->chunk_count = 0;
    s->plan.recompute = s->tokens - s->filled;
    mgr->stats.resumed++;
    mgr->stats.blocks_loaded += loaded;
    kvt_session_set_window(mgr, s, s->tokens);
    kvt_session_set_needs(mgr, s);
    for (uint32_t i = 0; i < s->blocks; i++)
        kvt_session_want_cool_all(mgr, s->node[i]);
    kvt_session_cool(mgr, false);
}

/* ---- what came ----------------------------------------------------------------------------- */

static bool has_landed(const struct kvt_session_mgr *mgr, const struct kvt_session *s,
                       uint32_t node, uint32_t g, uint32_t i)
{
    uint8_t got = *kvt_session_got(mgr, s, g, i);
    if (got == KVT_SGOT_SHARED || got == KVT_SGOT_LOADED)
        return true;
    return got == KVT_SGOT_OWN && !mgr->groups[g].full && kvt_session_has_page(mgr, s, node, g, i);
}

/* Block i is there in every group that needs it: a node, with the pages that were loaded. false: no
 * node is left. */
static bool adopt(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t i)
{
    if (i < s->blocks)
        return true;
    uint32_t at = kvt_snode_find(mgr, s->hash[i]);
    if (at == KVT_NONE)
        at = kvt_snode_add(mgr, s->hash[i], i ? s->node[i - 1] : KVT_NONE, i, KVT_NONE);
    if (at == KVT_NONE)
        return false;
    kvt_session_attach(mgr, s, i, at);
    return true;
}

static void adopt_page(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t g, uint32_t i)
{
    uint32_t at = kvt_scell_of(mgr, s->node[i], g), *page = kvt_session_page(mgr, s, g, i);
    struct kvt_scell *cell = &mgr->cells[at];
    bool loaded = *kvt_session_got(mgr, s, g, i) == KVT_SGOT_LOADED;
    if (cell->page != KVT_NONE || !loaded) { /* shared; or another session was faster */
        if (*page != KVT_NONE && *page != cell->page)
            kvt_spage_put(&mgr->groups[g], *page);
        *page = cell->page;
        mgr->stats.shared += loaded;
        return;
    }
    cell->record = kvt_session_record_of(mgr, g, i, *page);
    kvt_scell_set_page(mgr, at, *page);
}

/* How far the session is there; all of that is in nodes. Adds to *loaded the blocks that came. */
static uint32_t take_in(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t *loaded)
{
    uint32_t end = kvt_session_reach(mgr, s, s->load_to, has_landed), i = 0;
    while (i < end && adopt(mgr, s, i))
        i++;
    if (i < end) /* no node for it, and so not for what is behind it */
        end = kvt_session_reach(mgr, s, i, has_landed);
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        for (i = kvt_session_needs(mgr, g, end); i < end; i++) {
            *loaded += *kvt_session_got(mgr, s, g, i) == KVT_SGOT_LOADED;
            adopt_page(mgr, s, g, i);
        }
    }
    return end;
}

/* ---- what did not -------------------------------------------------------------------------- */

/* Behind `end` a page is the engine's, or it goes: a cell's is not the session's any more, and a
 * state that would not be kept needs none. What is lacking then is counted. */
static void sort_pages(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t end,
                       uint32_t *need)
{
    uint32_t blocks = kvt_session_blocks_of(mgr, s->tokens);
    bool tail = end == s->load_to && s->tail_filled > end * mgr->block_tokens;
    for (uint32_t g = 0; g < mgr->group_count; g++) {
        need[g] = 0;
        for (uint32_t i = end; i < blocks; i++) {
            uint32_t *page = kvt_session_page(mgr, s, g, i);
            bool gives = kvt_session_gives(mgr, g, i, s->tokens) || (tail && i == end);
            if (*kvt_session_got(mgr, s, g, i) == KVT_SGOT_SHARED)
                *page = KVT_NONE;
            if (*page != KVT_NONE && !gives) {
                kvt_spage_put(&mgr->groups[g], *page);
                *page = KVT_NONE;
            }
            *kvt_session_got(mgr, s, g, i) = KVT_SGOT_OWN;
            need[g] += *page == KVT_NONE && gives;
        }
    }
}

static void fill_gaps(struct kvt_session_mgr *mgr, struct kvt_session *s, uint32_t end)
{
    uint32_t blocks = kvt_session_blocks_of(mgr, s->tokens);
    for (uint32_t g = 0; g < mgr->group_count; g++)
        for (uint32_t i = end; i < blocks; i++)
            if (*kvt_session_page(mgr, s, g, i) == KVT_NONE &&
                kvt_session_gives(mgr, g, i, s->tokens))
                *kvt_session_page(mgr, s, g, i) = kvt_session_fresh_page(mgr, g);
}

void kvt_session_landed(struct kvt_session_mgr *mgr, struct kvt_session *s)
{
    uint32_t need[KVT_GROUPS_MAX], loaded = 0, unit = mgr->block_tokens;
    uint32_t end = take_in(mgr, s, &loaded);
    mgr->stats.load_short += s->load_to - end;
    s->plan.from_disk = KVT_MIN(s->got_disk, end - s->load_from) * unit;
    s->plan.from_dram = (end - s->load_from) * unit - s->plan.from_disk;
    sort_pages(mgr, s, end, need);
    while (s->blocks > end)
        kvt_session_detach_last(mgr, s);
    int rc = kvt_session_make_room(mgr, need);
    if (rc == 0)
        fill_gaps(mgr, s, end);
    kvt_session_activate(mgr, s, end, loaded);
    if (rc == 0)
        return;
    if (s->plan.reason == 0)
        s->plan.reason = rc;
    kvt_session_go_idle(mgr, s);
}

void kvt_session_restore_done(struct kvt_session_mgr *mgr, struct kvt_sjob *job,
                              const int32_t *status)
{
    struct kvt_session *s = &mgr->sessions[job->session];
    struct kvt_req_report report = {.struct_size = sizeof(report)};
    uint32_t g = job->group, n = 0, run = 0;
    for (uint32_t i = s->from[g]; i < s->load_to; i++) {
        uint8_t *got = kvt_session_got(mgr, s, g, i);
        if (*got != KVT_SGOT_WANTED)
            continue;
        uint32_t at = kvt_snode_find(mgr, s->hash[i]);
        *got = status[n] == 0 ? KVT_SGOT_LOADED : KVT_SGOT_OWN;
        run += status[n] == 0 && run == n;
        if (status[n] != 0 && s->plan.reason == 0)
            s->plan.reason = status[n];
        if (status[n] == KVT_E_MISS && at != KVT_NONE && !kvt_scell_at(mgr, at, g)->busy)
            kvt_scell_at(mgr, at, g)->record = KVT_SESSION_RECORD_NONE;
        n++;
    }
    if (kvt_req_report(job->req, &report) == 0)
        s->got_disk = KVT_MAX(s->got_disk, run - KVT_MIN((uint32_t)report.blocks_dram, run));
    s->restore_job[g] = KVT_NONE;
    if (--s->loads == 0)
        kvt_session_landed(mgr, s);
}
