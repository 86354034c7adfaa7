/* Goal:   a session over several groups keeps of each what it needs and no more, stores that, comes
 *         back to the longest prefix of which every group has what it needs, and gives each group
 *         the pages of its own; what makes no sense is refused by name.
 * Method: an engine of three layers (support/session_rig.h): full attention, a window of 64 tokens,
 *         states; every page that is handed over is compared with what it must be. Cases by hand;
 *         random histories over the same layouts are in tests/model/test_session_model.c.
 */
#include "support/session_rig.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "client/session_internal.h"

#define UNIT 16u
#define WINDOW 64u

static const struct srig_layout two_full = {
    .count = 2,
    .groups = {{.group = 0}, {.group = 7}},
    .of_layer = {0, 1, 1}}; /* pages of one and of two layers */
static const struct srig_layout windowed = {
    .count = 2,
    .groups = {{.group = 0}, {.group = 5, .kind = KVT_GROUP_WINDOW, .window_tokens = WINDOW}},
    .of_layer = {0, 1, 1}};
static const struct srig_layout with_states = {
    .count = 3,
    .groups = {{.group = 0},
               {.group = 5, .kind = KVT_GROUP_WINDOW, .window_tokens = WINDOW},
               {.group = 9, .kind = KVT_GROUP_STATE}},
    .of_layer = {0, 1, 2}};
static const struct srig_layout no_full = {
    .count = 2,
    .groups = {{.group = 5, .kind = KVT_GROUP_WINDOW, .window_tokens = WINDOW},
               {.group = 9, .kind = KVT_GROUP_STATE}},
    .of_layer = {0, 1, 1}};

static struct srig s;
static struct srig_session a, b, c;

static int tear_down(void **state)
{
    (void)state;
    srig_session_free(&a);
    srig_session_free(&b);
    srig_session_free(&c);
    if (s.mgr != NULL)
        srig_free(&s);
    memset(&s, 0, sizeof(s));
    return 0;
}

static void open_with(const struct srig_layout *layout, uint32_t pages, uint32_t window,
                      const char *disk)
{
    struct rig_shape shape = rig_shape_small(pages);
    struct kvt_session_mgr_opts opts = {.window_tokens = window, .tokens_max = 2048};
    shape.layers = 3;
    srig_open_groups(&s, layout, &shape, "dram=16MiB,level=kv4", disk, &opts);
}

/* The window group has few pages of its own. */
static void begin_narrow(uint32_t pages, uint32_t window_pages)
{
    const struct kvt_session_group groups[] = {{.group = 5, .page_count = window_pages}};
    struct rig_shape shape = rig_shape_small(pages);
    struct kvt_session_mgr_opts opts = {
        .window_tokens = 4096, .tokens_max = 2048, .groups = groups, .group_count = 1};
    shape.layers = 3;
    srig_open_groups(&s, &windowed, &shape, "dram=16MiB,level=kv4", NULL, &opts);
}

static void start(struct srig_session *x, uint32_t first, uint32_t n)
{
    srig_session_open(&s, x, 1024, 0);
    srig_tokens(x, first, n);
    srig_turn(&s, x, NULL);
    srig_check(&s);
}

static void go_idle(struct srig_session *x)
{
    assert_int_equal(kvt_session_idle(s.mgr, x->id), 0);
    srig_settle(&s);
}

/* L0 forgets everything, and every record is in the store. */
static void forget_l0(void)
{
    kvt_session_mgr_close(s.mgr);
    srig_mgr_open(&s);
}

/* The same conversation, as a new process would open it. */
static void again(struct srig_session *x, uint32_t first, uint32_t n)
{
    srig_session_free(x);
    srig_session_open(&s, x, 1024, 0);
    srig_tokens(x, first, n);
}

static uint32_t resident(const struct srig_session *x, uint32_t g)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < srig_info(&s, x).blocks; i++)
        count += srig_group_block(&s, x, g, i).page != KVT_SESSION_NO_PAGE;
    return count;
}

/* How many of the session's blocks the store has in a group, whatever is before them. */
static uint32_t stored(const struct srig_session *x, uint32_t g, uint32_t *first)
{
    uint32_t count = 0;
    for (uint32_t i = srig_info(&s, x).blocks; i-- > 0;)
        if (srig_group_block(&s, x, g, i).tier == KVT_TIER_DRAM) {
            *first = i;
            count++;
        }
    return count;
}

static void purge(const struct srig_session *x, uint32_t g, uint32_t block)
{
    struct kvt_key keys[64];
    uint8_t root[32];
    assert_int_equal(kvt_key_root(NULL, 0, root), 0);
    assert_true(kvt_key_chain(root, x->token, x->tokens, UNIT, NULL, 0, s.layout->groups[g].group,
                              0, keys, KVT_ARRAY_LEN(keys)) > block);
    assert_int_equal(kvt_purge(s.rig.ns, &keys[block], 1), 1);
}

/* ---- full attention in several groups ------------------------------------------------------ */

static void full_groups_of_different_pages(void **state)
{
    struct kvt_session_plan plan;
    uint8_t kinds[2][16];
    uint32_t first = 0;
    (void)state;
    open_with(&two_full, 40, 64, NULL);
    start(&a, 1, 200);
    assert_int_equal(srig_verify(&s, &a, 200, NULL), SRIG_EXACT);
    go_idle(&a);
    assert_int_equal(stored(&a, 0, &first), 12);
    assert_int_equal(stored(&a, 1, &first), 12);
    srig_tokens(&a, 500, 10);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.in_l0, 200); /* the partial block, too */
    assert_int_equal(plan.recompute, 10);
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, 200), 0);
    a.tokens = 200;
    go_idle(&a);
    forget_l0();
    again(&a, 1, 200);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.from_dram, 192);
    assert_int_equal(plan.recompute, 8);
    for (uint32_t g = 0; g < 2; g++) {
        (void)srig_verify_group(&s, &a, g, 192, kinds[g]);
        for (uint32_t i = 0; i < 12; i++) /* each at its level, in both */
            assert_int_equal(kinds[g][i], i == 0 ? SRIG_EXACT : i < 8 ? SRIG_KV4 : SRIG_KV8);
    }
    /* what one group lacks is nobody's */
    go_idle(&a);
    forget_l0();
    again(&a, 1, 200);
    purge(&a, 1, 5);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.from_dram, 80);
    srig_fill(&s, &a, 80, 200);
    go_idle(&a);
    assert_int_equal(srig_stats(&s).store_failed, 0);
}

/* ---- windows ------------------------------------------------------------------------------- */

static void a_window_keeps_and_stores_its_last_blocks(void **state)
{
    struct kvt_session_plan plan;
    uint32_t first = 0;
    (void)state;
    open_with(&windowed, 40, 4096, NULL);
    start(&a, 1, 200);
    /* 192 is the last place to come back to: it needs the blocks from 128 on, of the window */
    for (uint32_t i = 0; i < 13; i++) {
        assert_int_not_equal(srig_page(&s, &a, 0, i), KVT_SESSION_NO_PAGE);
        assert_int_equal(srig_page(&s, &a, 1, i) != KVT_SESSION_NO_PAGE, i >= 8);
    }
    go_idle(&a);
    assert_int_equal(stored(&a, 0, &first), 12);
    assert_int_equal(stored(&a, 1, &first), 4);
    assert_int_equal(first, 8);
    forget_l0();
    again(&a, 1, 200);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.from_dram, 192);
    assert_int_equal(plan.recompute, 8);
    assert_int_equal(srig_stats(&s).blocks_loaded, 12 + 4);
    assert_int_equal(resident(&a, 0), 12);
    assert_int_equal(resident(&a, 1), 4);
    srig_fill(&s, &a, 192, 200);
    /* decoding moves the window on */
    for (uint32_t i = 0; i < 40; i++) {
        srig_tokens(&a, 700 + i, 1);
        assert_int_equal(srig_append(&s, &a), 0);
        srig_check(&s);
    }
    (void)srig_verify(&s, &a, 240, NULL);
    assert_int_equal(srig_page(&s, &a, 1, 9), KVT_SESSION_NO_PAGE);
    assert_int_not_equal(srig_page(&s, &a, 1, 10), KVT_SESSION_NO_PAGE);
    go_idle(&a);
    assert_int_equal(srig_stats(&s).store_failed, 0);
}

/* A sequence that ends with a block comes back to the block before, when it is asked for anew. */
static void a_whole_number_of_blocks_comes_back_too(void **state)
{
    static const struct srig_layout *const layouts[] = {&windowed, &with_states, &no_full};
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(layouts); i++) {
        struct kvt_session_plan plan;
        open_with(layouts[i], 40, 4096, NULL);
        start(&a, 1, 192);
        go_idle(&a);
        assert_int_equal(srig_resume(&s, &a, &plan), 0); /* no new tokens: nothing to compute */
        assert_int_equal(plan.in_l0, 192);
        go_idle(&a);
        forget_l0();
        again(&a, 1, 192);
        assert_int_equal(srig_resume(&s, &a, &plan), 0);
        assert_int_equal(plan.from_dram, 176);
        assert_int_equal(plan.recompute, 16);
        srig_fill(&s, &a, 176, 192);
        go_idle(&a);
        tear_down(state);
    }
}

/* "Hits over groups": a block missing of the window moves the hit to a shorter prefix that has all;
 * here to none, since only one window was ever stored. Two turns store two. */
static void the_longest_prefix_that_every_group_can_serve(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    open_with(&windowed, 64, 4096, NULL);
    start(&a, 1, 200);
    go_idle(&a);
    srig_tokens(&a, 600, 200);
    srig_turn(&s, &a, NULL);
    go_idle(&a);
    forget_l0();
    again(&a, 1, 200);
    srig_tokens(&a, 600, 200);
    purge(&a, 1, 22);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.from_dram, 192); /* where the first turn ended */
    assert_int_equal(resident(&a, 1), 4);
    go_idle(&a);
    forget_l0();
    again(&a, 1, 200);
    srig_tokens(&a, 600, 200);
    purge(&a, 1, 9);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.from_dram, 0);
    assert_int_equal(plan.recompute, 400);
    srig_fill(&s, &a, 0, 400);
    go_idle(&a);
}

/* Part of what a prefix needs is in L0, part is not: only that is loaded. */
static void a_window_alone_is_loaded(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    begin_narrow(64, 16);
    start(&a, 1, 200);
    go_idle(&a);
    start(&b, 5000, 208); /* needs 13 of the window group's 15 */
    go_idle(&b);
    assert_int_equal(resident(&a, 0), 12);
    assert_true(resident(&a, 1) < 4);
    uint64_t before = srig_stats(&s).blocks_loaded;
    srig_tokens(&a, 800, 20);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.in_l0 + plan.from_dram, 192);
    assert_in_range(srig_stats(&s).blocks_loaded - before, 1, 4);
    assert_in_range(plan.recompute, 28, 28);
    srig_fill(&s, &a, 192, 220);
    (void)srig_verify(&s, &a, 220, NULL);
    go_idle(&a);
    assert_int_equal(srig_stats(&s).evicted_unsaved, 0);
}

/* The manager's window is inside the group's: what is between them cools. */
static void a_long_window_cools_at_its_far_end(void **state)
{
    static const struct srig_layout wide = {
        .count = 2,
        .groups = {{.group = 0}, {.group = 5, .kind = KVT_GROUP_WINDOW, .window_tokens = 128}},
        .of_layer = {0, 1, 1}};
    uint8_t kinds[16];
    (void)state;
    open_with(&wide, 40, 64, NULL);
    start(&a, 1, 200); /* the group's window begins at block 4, the manager's at 8 */
    go_idle(&a);
    forget_l0();
    again(&a, 1, 200);
    assert_int_equal(srig_resume(&s, &a, NULL), 0);
    (void)srig_verify_group(&s, &a, 1, 192, kinds);
    for (uint32_t i = 0; i < 12; i++)
        assert_int_equal(kinds[i], i < 4 ? SRIG_OTHER : i < 8 ? SRIG_KV4 : SRIG_KV8);
    go_idle(&a);
}

/* ---- states -------------------------------------------------------------------------------- */

static void states_are_kept_where_a_sequence_can_come_back(void **state)
{
    struct kvt_session_plan plan;
    uint32_t first = 0;
    (void)state;
    open_with(&with_states, 40, 4096, NULL);
    start(&a, 1, 200);
    for (uint32_t i = 0; i < 13; i++) /* 192, and where it ends */
        assert_int_equal(srig_page(&s, &a, 2, i) != KVT_SESSION_NO_PAGE, i >= 11);
    go_idle(&a);
    assert_int_equal(stored(&a, 2, &first), 1);
    assert_int_equal(first, 11);
    srig_tokens(&a, 700, 3);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.in_l0, 200); /* goes on from the state after 200 */
    srig_fill(&s, &a, 200, 203);
    go_idle(&a);
    forget_l0();
    again(&a, 1, 200);
    srig_tokens(&a, 700, 3);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.from_dram, 192);
    assert_int_equal(srig_stats(&s).blocks_loaded, 12 + 4 + 1);
    srig_fill(&s, &a, 192, 203);
    for (uint32_t i = 0; i < 40; i++) { /* each block's end gets a state; two are held */
        srig_tokens(&a, 800 + i, 1);
        assert_int_equal(srig_append(&s, &a), 0);
        srig_check(&s);
        (void)srig_verify(&s, &a, a.tokens, NULL);
    }
    go_idle(&a);
    assert_int_equal(srig_stats(&s).store_failed, 0);
}

/* The engine stops where there is no page for the state: the session comes back to the one before.
 */
static void a_state_that_is_in_no_page_is_not_come_back_to(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    open_with(&with_states, 40, 4096, NULL);
    start(&a, 1, 100);
    go_idle(&a);
    srig_tokens(&a, 600, 100);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.in_l0, 100);
    srig_fill(&s, &a, 100, 150); /* of 200: blocks 11 and 12 have pages */
    srig_check(&s);
    go_idle(&a);
    a.tokens = 150;
    assert_int_equal(srig_info(&s, &a).tokens, 150);
    srig_tokens(&a, 900, 10);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    /* block 6 was partial, had a page, and was filled to its end */
    assert_int_equal(plan.in_l0, 112);
    assert_int_equal(plan.recompute, 48);
    srig_fill(&s, &a, 112, 160);
    go_idle(&a);
}

/* ---- cutting back -------------------------------------------------------------------------- */

static void cutting_back_needs_what_is_there(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    open_with(&windowed, 40, 4096, NULL);
    start(&a, 1, 200);
    /* inside the window's reach: 192 needs from block 8 on, and so does nothing shorter */
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, 195), 0);
    a.tokens = 195;
    srig_check(&s);
    assert_int_equal(srig_info(&s, &a).filled, 195);
    go_idle(&a);
    /* blocks before the window have left L0: its cells were passed, and are the first to go */
    start(&b, 5000, 512);
    go_idle(&b);
    srig_tokens(&a, 1000, 1);
    assert_int_equal(srig_resume(&s, &a, NULL), 0);
    struct kvt_session_info before = srig_info(&s, &a), after;
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, 100), KVT_E_STATE);
    after = srig_info(&s, &a);
    assert_memory_equal(&before, &after, sizeof(before));
    srig_check(&s);
    a.tokens = before.filled;
    go_idle(&a);
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, 100), 0);
    srig_check(&s);
    a.tokens = 100;
    srig_tokens(&a, 2000, 30);
    assert_int_equal(srig_resume(&s, &a, &plan), 0); /* all of it is computed again, and right */
    srig_fill(&s, &a, a.tokens - plan.recompute, a.tokens);
    (void)srig_verify(&s, &a, 130, NULL);
    go_idle(&a);
}

static void a_state_cannot_be_taken_back(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    open_with(&with_states, 40, 4096, NULL);
    start(&a, 1, 200);
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, 195), 0);
    a.tokens = 195;
    assert_int_equal(srig_info(&s, &a).filled,
                     192); /* the state after 192 is there, after 195 not */
    srig_check(&s);
    srig_fill(&s, &a, 192, 195);
    (void)srig_verify(&s, &a, 195, NULL);
    go_idle(&a);
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, 193), 0);
    a.tokens = 193;
    srig_check(&s);
    srig_tokens(&a, 900, 4);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.in_l0, 192);
    srig_fill(&s, &a, 192, 197);
    go_idle(&a);
    /* tokens that were not filled: their state needs a page where there was none */
    srig_tokens(&a, 3000, 200);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, 300), 0);
    a.tokens = 300;
    srig_check(&s);
    srig_fill(&s, &a, srig_info(&s, &a).filled, 300);
    (void)srig_verify(&s, &a, 300, NULL);
    go_idle(&a);
}

/* A session of 200 tokens, filled to `filled`, and cut to `cut` behind that. */
static void filled_and_cut(uint32_t filled, uint32_t cut)
{
    open_with(&with_states, 40, 4096, NULL);
    srig_session_open(&s, &a, 1024, 0);
    srig_tokens(&a, 1, 200);
    assert_int_equal(srig_resume(&s, &a, NULL), 0);
    if (filled > 0)
        srig_fill(&s, &a, 0, filled);
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, cut), 0);
    a.tokens = cut;
    srig_check(&s);
    assert_int_equal(srig_info(&s, &a).filled, filled);
    (void)srig_verify(&s, &a, filled, NULL);
}

/* The cut ends inside a block that is filled in part, whose state was in no page: it gets one,
 * which does not hold that state. A session that goes idle now does not come back to it. */
static void a_cut_makes_no_state(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    filled_and_cut(150, 155);
    assert_int_not_equal(srig_page(&s, &a, 2, 9), KVT_SESSION_NO_PAGE);
    go_idle(&a);
    a.tokens = 150;
    srig_tokens(&a, 800, 3);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.in_l0, 0); /* no state at all had a page */
    srig_fill(&s, &a, srig_info(&s, &a).filled, 153);
    (void)srig_verify(&s, &a, 153, NULL);
    go_idle(&a);
}

/* Whatever is filled and wherever the cut is: the last block has a page in each group, the engine
 * goes on into it, and the session comes back to where it went idle, if the state at the last
 * block's beginning was in a page too (it was when the cut is there, or behind the next block). */
static void behind_what_is_filled_the_last_block_has_a_page(void **state)
{
    static const uint32_t cases[][3] = {{1, 2, 2},    {1, 20, 20},   {17, 40, 40},   {0, 5, 5},
                                        {16, 20, 0},  {5, 16, 16},   {1, 16, 16},    {15, 16, 16},
                                        {33, 47, 0},  {64, 65, 0},   {70, 71, 0},    {70, 80, 80},
                                        {79, 96, 96}, {150, 155, 0}, {190, 199, 199}};
    struct kvt_session_plan plan;
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(cases); i++) {
        uint32_t filled = cases[i][0], cut = cases[i][1], back = cases[i][2];
        filled_and_cut(filled, cut);
        for (uint32_t g = 0; g < 3; g++)
            if (srig_page(&s, &a, g, (cut - 1) / UNIT) == KVT_SESSION_NO_PAGE)
                fail_msg("filled %u, cut to %u: group %u has no page", filled, cut, g);
        srig_fill(&s, &a, filled, cut);
        srig_check(&s);
        (void)srig_verify(&s, &a, cut, NULL);
        go_idle(&a);
        srig_tokens(&a, 800, 3);
        assert_int_equal(srig_resume(&s, &a, &plan), 0);
        if (plan.in_l0 != back)
            fail_msg("filled %u, cut to %u: comes back to %u", filled, cut, plan.in_l0);
        srig_fill(&s, &a, back, cut + 3);
        (void)srig_verify(&s, &a, cut + 3, NULL);
        go_idle(&a);
        (void)tear_down(NULL);
    }
}

/* Between the cut and the next words of the engine: more tokens, another cut, and the end. */
static void a_page_that_was_given_is_not_taken_for_written(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    filled_and_cut(150, 155);
    srig_tokens(&a, 300, 40);
    assert_int_equal(kvt_session_append(s.mgr, a.id, a.token + 155, 40), 0);
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, 152), 0);
    a.tokens = 152;
    srig_check(&s);
    (void)srig_verify(&s, &a, 150, NULL);
    go_idle(&a);
    assert_int_equal(srig_info(&s, &a).filled, 144);
    a.tokens = srig_info(&s, &a).tokens;
    srig_tokens(&a, 800, 3);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.in_l0, 0);
    srig_fill(&s, &a, 0, a.tokens); /* and the next time it is whole */
    go_idle(&a);
    srig_tokens(&a, 900, 3);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.in_l0, a.tokens - 3);
    srig_fill(&s, &a, a.tokens - 3, a.tokens);
    assert_int_equal(kvt_session_close(s.mgr, a.id), 0);
}

/* A block that an active session had passed, and that has left L0, is computed by another one: a
 * cut that needs it again finds it. */
static void a_page_that_came_from_somebody_else(void **state)
{
    (void)state;
    begin_narrow(100, 30);
    start(&a, 1, 200);
    start(&c, 5000, 352);
    go_idle(&c);
    assert_int_equal(srig_group_block(&s, &a, 1, 7).page, KVT_SESSION_NO_PAGE);
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, 192), 0);
    a.tokens = 192;
    assert_int_equal(srig_page(&s, &a, 1, 7), KVT_SESSION_NO_PAGE);
    start(&b, 1, 130);
    assert_int_not_equal(srig_group_block(&s, &a, 1, 7).page, KVT_SESSION_NO_PAGE);
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, 176), 0);
    a.tokens = 176;
    srig_check(&s);
    (void)srig_verify(&s, &a, 176, NULL);
    go_idle(&a);
    go_idle(&b);
}

/* ---- pressure ------------------------------------------------------------------------------ */

/* Passed blocks of a window go first, unstored and uncounted as lost; groups have pages apart. */
static void what_was_passed_goes_first(void **state)
{
    uint32_t first = 0;
    (void)state;
    open_with(&windowed, 33, 4096, NULL);
    start(&a, 1, 160);
    go_idle(&a);
    start(&b, 5000, 240); /* its window passes ten blocks */
    srig_tokens(&b, 6000, 192);
    assert_int_equal(srig_append(&s, &b), 0);
    assert_true(resident(&a, 0) < 10);
    for (uint32_t i = 5; i < 10; i++) /* what a needs stays, although it is idle and older */
        assert_int_not_equal(srig_group_block(&s, &a, 1, i).page, KVT_SESSION_NO_PAGE);
    go_idle(&b);
    assert_int_equal(stored(&b, 1, &first), 5);
    assert_int_equal(srig_stats(&s).evicted_unsaved, 0);
}

/* A prompt longer than the window's pages is handed over in pieces. */
static void a_long_prompt_in_pieces(void **state)
{
    const struct kvt_session_group groups[] = {{.group = 5, .page_count = 13, .first_page = 3}};
    struct rig_shape shape = rig_shape_small(64);
    struct kvt_session_mgr_opts opts = {
        .window_tokens = 4096, .tokens_max = 2048, .groups = groups, .group_count = 1};
    (void)state;
    shape.layers = 3;
    srig_open_groups(&s, &windowed, &shape, "dram=16MiB,level=kv4", NULL, &opts);
    srig_session_open(&s, &a, 1024, 0);
    srig_tokens(&a, 1, 640);
    assert_int_equal(kvt_session_resume(s.mgr, a.id, a.token, 640, NULL, NULL), KVT_E_LIMIT);
    assert_int_equal(srig_info(&s, &a).tokens, 0);
    a.tokens = 0;
    srig_tokens(&a, 1, 96);
    srig_turn(&s, &a, NULL);
    for (uint32_t t = 96; t < 640; t += 64) {
        srig_tokens(&a, 1 + t, KVT_MIN(64, 640 - t));
        assert_int_equal(srig_append(&s, &a), 0);
        srig_check(&s);
    }
    (void)srig_verify(&s, &a, 640, NULL);
    go_idle(&a);
    assert_int_equal(srig_stats(&s).evicted_unsaved, 0);
}

/* Prefixes are shared in every group: what is in L0 of the window serves another session. */
static void a_prefix_is_shared_in_every_group(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    open_with(&with_states, 64, 4096, NULL);
    start(&a, 1, 101);
    go_idle(&a);
    srig_session_open(&s, &b, 1024, 0);
    srig_tokens(&b, 1, 101);
    srig_tokens(&b, 700, 40);
    srig_turn(&s, &b, &plan);
    assert_int_equal(plan.in_l0, 96);
    for (uint32_t g = 0; g < 3; g++)
        assert_int_equal(srig_group_block(&s, &b, g, 5).page, srig_group_block(&s, &a, g, 5).page);
    go_idle(&b);
    /* a marked session's are not stored; its window is like any other in L0 */
    srig_session_open(&s, &c, 1024, 3);
    assert_int_equal(kvt_session_no_store(s.mgr, c.id), 0);
    srig_tokens(&c, 1, 120);
    srig_turn(&s, &c, NULL);
    go_idle(&c);
    for (uint32_t g = 0; g < 3; g++)
        for (uint32_t i = 0; i < 7; i++)
            assert_int_equal(srig_group_block(&s, &c, g, i).tier, KVT_TIER_MISS);
}

static void from_disk_after_a_restart(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    open_with(&with_states, 40, 64, "64MiB");
    start(&a, 1, 200);
    go_idle(&a);
    assert_int_equal(kvt_session_mgr_flush(s.mgr), 0);
    kvt_session_mgr_close(s.mgr);
    rig_reopen(&s.rig);
    srig_mgr_open(&s);
    again(&a, 1, 200);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.from_disk, 192);
    assert_int_equal(plan.recompute, 8);
    srig_fill(&s, &a, 192, 200);
    go_idle(&a);
}

/* What a session has of the window group leaves L0, and the partial last block with it. */
static void forget_window(const struct srig_session *x)
{
    struct kvt_session *session = &s.mgr->sessions[(x->id & UINT32_MAX) - 1];
    kvt_session_drop_tail(s.mgr, session, true);
    for (uint32_t i = 0; i < session->blocks; i++) {
        uint32_t at = kvt_scell_of(s.mgr, session->node[i], 1);
        if (s.mgr->cells[at].page != KVT_NONE)
            kvt_spage_put(&s.mgr->groups[1], kvt_scell_take_page(s.mgr, at));
    }
    srig_check(&s);
}

/* The window's load comes to nothing when it is too late to plan anew, and all pages of the group
 * of full attention that would be needed to compute are in use: the session is idle again, and its
 * next resume is an ordinary one. */
static void a_load_that_came_short_without_pages(void **state)
{
    struct kvt_session_resume_opts late = {.struct_size = sizeof(late), .deadline_ns = 1};
    struct kvt_session_plan plan = {.struct_size = sizeof(plan)};
    (void)state;
    begin_narrow(21, 16);
    start(&a, 1, 200);
    go_idle(&a);
    start(&b, 5000, 112); /* active: 7 of 20 pages, and 7 of 15 */
    assert_int_equal(resident(&a, 0), 12);
    forget_window(&a); /* the rest stays */
    int rc = kvt_session_resume(s.mgr, a.id, NULL, 0, &late, &plan);
    assert_int_equal(rc, 0);
    assert_int_equal(plan.from_dram, 192);
    assert_int_equal(kvt_session_wait(s.mgr, a.id, -1), 1);
    srig_check(&s);
    assert_int_equal(kvt_session_get_plan(s.mgr, a.id, &plan), 0);
    assert_int_equal(plan.reason, KVT_E_DEADLINE);
    assert_int_equal(srig_info(&s, &a).state, KVT_SESSION_IDLE);
    assert_int_equal(srig_info(&s, &a).tokens, 0);
    assert_int_equal(kvt_session_close(s.mgr, b.id), 0);
    srig_settle(&s);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.in_l0 + plan.from_dram, 192);
    srig_fill(&s, &a, 192, 200);
    go_idle(&a);
}

/* The window has gone for good, the pages of full attention are there, and computing needs as many:
 * those of the session itself are taken. */
static void what_is_of_no_use_makes_room(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    begin_narrow(21, 18);
    srig_session_open(&s, &a, 1024, 0);
    assert_int_equal(kvt_session_no_store(s.mgr, a.id), 0);
    srig_tokens(&a, 1, 200);
    srig_turn(&s, &a, NULL);
    go_idle(&a);
    forget_window(&a);
    assert_int_equal(resident(&a, 0), 12); /* of 20 */
    srig_tokens(&a, 700, 4);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.recompute, 204);
    assert_int_equal(srig_stats(&s).refused_limit, 0);
    srig_check(&s);
    srig_fill(&s, &a, 0, 204);
    (void)srig_verify(&s, &a, 204, NULL);
    go_idle(&a);
    /* where that does not help either, the call is refused, and the tokens are still there */
    forget_window(&a);
    start(&b, 5000, 240); /* active: 15 of 20 pages, and 15 of 17 */
    srig_tokens(&a, 800, 1);
    assert_int_equal(kvt_session_resume(s.mgr, a.id, a.token + 204, 1, NULL, NULL), KVT_E_LIMIT);
    assert_int_equal(srig_stats(&s).refused_limit, 1);
    assert_int_equal(srig_info(&s, &a).tokens, 204);
    srig_check(&s);
    go_idle(&b);
    assert_int_equal(srig_resume(&s, &a, NULL), 0);
    srig_fill(&s, &a, srig_info(&s, &a).filled, 205);
    go_idle(&a);
}

/* ---- refusals ------------------------------------------------------------------------------ */

static void refused(struct kvt_session_mgr_opts opts, int want, const char *words)
{
    struct kvt_session_mgr *mgr = NULL;
    opts.struct_size = sizeof(opts);
    assert_int_equal(kvt_session_mgr_open(s.rig.ns, s.rig.pool, &opts, &mgr), want);
    assert_null(mgr);
    if (strstr(s.rig.last, words) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", s.rig.last, words);
}

static void what_makes_no_sense_is_refused_by_name(void **state)
{
    static const struct srig_layout lengths = {
        .count = 2, .groups = {{.group = 0}, {.group = 5, .block_tokens = 32}}, .of_layer = {0, 1}};
    const struct kvt_session_group unknown[] = {{.group = 6, .page_count = 20}};
    const struct kvt_session_group twice[] = {{.group = 5, .page_count = 9},
                                              {.group = 5, .page_count = 9}};
    const struct kvt_session_group few[] = {{.group = 5, .page_count = 7}};
    struct kvt_session_block block = {.struct_size = sizeof(block)};
    uint32_t page;
    (void)state;
    open_with(&windowed, 40, 64, NULL);
    refused((struct kvt_session_mgr_opts){.groups = unknown, .group_count = 1}, KVT_E_INVAL,
            "the layout has not");
    refused((struct kvt_session_mgr_opts){.groups = twice, .group_count = 2}, KVT_E_INVAL,
            "stands twice");
    refused((struct kvt_session_mgr_opts){.groups = few, .group_count = 1}, KVT_E_INVAL,
            "group 5 has 6 pages without the scratch pages, and a session needs 7");
    refused((struct kvt_session_mgr_opts){.group_count = 1}, KVT_E_INVAL, "groups is NULL");
    refused((struct kvt_session_mgr_opts){.first_page = 39}, KVT_E_INVAL, "leaves no page");
    refused((struct kvt_session_mgr_opts){0}, KVT_E_INVAL, "(group 0) belong to another");
    start(&a, 1, 40);
    assert_int_equal(kvt_session_group_pages(s.mgr, a.id, 6, 0, &page, 1), KVT_E_INVAL);
    assert_int_equal(kvt_session_group_pages(NULL, a.id, 5, 0, &page, 1), KVT_E_INVAL);
    assert_int_equal(kvt_session_group_pages(s.mgr, a.id, 5, 9, &page, 1), 0);
    assert_int_equal(kvt_session_get_group_block(s.mgr, a.id, 6, 0, &block), KVT_E_INVAL);
    assert_int_equal(kvt_session_get_group_block(s.mgr, a.id, 5, 2, &block), KVT_E_INVAL);
    go_idle(&a);
    assert_int_equal(kvt_session_group_pages(s.mgr, a.id, 5, 0, &page, 1), KVT_E_STATE);
    tear_down(state);

    struct rig_shape shape = rig_shape_small(8);
    shape.layers = 2;
    shape.tokens = 32;
    rig_init(&s.rig, &shape, "dram=8MiB", NULL);
    s.rig.parts[2].group = s.rig.parts[3].group = 5;
    s.rig.layout.block_tokens = 16;
    s.rig.layout.groups = lengths.groups;
    s.rig.layout.group_count = 2;
    rig_open(&s.rig);
    refused((struct kvt_session_mgr_opts){0}, KVT_E_UNSUPPORTED,
            "blocks of group 5 have 32 tokens, and those of group 0 16");
    rig_free(&s.rig);
}

/* A caller whose struct ends before `groups`. */
static void options_of_an_older_caller(void **state)
{
    struct kvt_session_mgr_opts opts = {.struct_size = KVT_SESSION_MGR_OPTS_SIZE_0,
                                        .window_tokens = 64,
                                        .group_count = 77,
                                        .reserved = 5};
    struct kvt_session_mgr *mgr = NULL;
    (void)state;
    open_with(&windowed, 40, 64, NULL);
    kvt_session_mgr_close(s.mgr);
    assert_int_equal(kvt_session_mgr_open(s.rig.ns, s.rig.pool, &opts, &mgr), 0);
    kvt_session_mgr_close(mgr);
    opts.struct_size = KVT_SESSION_MGR_OPTS_SIZE_0 - 8;
    assert_int_equal(kvt_session_mgr_open(s.rig.ns, s.rig.pool, &opts, &mgr), KVT_E_VERSION);
    srig_mgr_open(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(full_groups_of_different_pages, tear_down),
        cmocka_unit_test_teardown(a_window_keeps_and_stores_its_last_blocks, tear_down),
        cmocka_unit_test_teardown(a_whole_number_of_blocks_comes_back_too, tear_down),
        cmocka_unit_test_teardown(the_longest_prefix_that_every_group_can_serve, tear_down),
        cmocka_unit_test_teardown(a_window_alone_is_loaded, tear_down),
        cmocka_unit_test_teardown(a_long_window_cools_at_its_far_end, tear_down),
        cmocka_unit_test_teardown(states_are_kept_where_a_sequence_can_come_back, tear_down),
        cmocka_unit_test_teardown(a_state_that_is_in_no_page_is_not_come_back_to, tear_down),
        cmocka_unit_test_teardown(cutting_back_needs_what_is_there, tear_down),
        cmocka_unit_test_teardown(a_state_cannot_be_taken_back, tear_down),
        cmocka_unit_test_teardown(a_cut_makes_no_state, tear_down),
        cmocka_unit_test_teardown(behind_what_is_filled_the_last_block_has_a_page, tear_down),
        cmocka_unit_test_teardown(a_page_that_was_given_is_not_taken_for_written, tear_down),
        cmocka_unit_test_teardown(a_page_that_came_from_somebody_else, tear_down),
        cmocka_unit_test_teardown(what_was_passed_goes_first, tear_down),
        cmocka_unit_test_teardown(a_long_prompt_in_pieces, tear_down),
        cmocka_unit_test_teardown(a_prefix_is_shared_in_every_group, tear_down),
        cmocka_unit_test_teardown(from_disk_after_a_restart, tear_down),
        cmocka_unit_test_teardown(a_load_that_came_short_without_pages, tear_down),
        cmocka_unit_test_teardown(what_is_of_no_use_makes_room, tear_down),
        cmocka_unit_test_teardown(what_makes_no_sense_is_refused_by_name, tear_down),
        cmocka_unit_test_teardown(options_of_an_older_caller, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
