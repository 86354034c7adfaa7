/* Goal: a session that is cut back has the tokens before the cut, filled but for less than a block,
 *       and goes on from there; what others hold stays theirs; a refused cut changes nothing.
 * Method: small caches whose "engine" makes KV from tokens (support/session_rig.h): every page that
 *         is called filled is compared, and the manager checks itself after each step. The random
 *         form of it is an operation of tests/model/test_session_model.c.
 */
#include "support/session_rig.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "client/session_internal.h"

#define UNIT 16u

static struct srig s;
static struct srig_session a, b;

static int tear_down(void **state)
{
    (void)state;
    srig_session_free(&a);
    srig_session_free(&b);
    if (s.mgr != NULL)
        srig_free(&s);
    return 0;
}

static void open_with(uint32_t pages)
{
    struct rig_shape shape = rig_shape_small(pages);
    struct kvt_session_mgr_opts opts = {.window_tokens = 64, .tokens_max = 2048};
    srig_open(&s, &shape, "dram=8MiB,level=kv4", NULL, &opts);
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
    srig_check(&s);
}

/* Cut, and look at what is left. Returns how many tokens count as filled. */
static uint32_t cut(struct srig_session *x, uint32_t tokens)
{
    assert_int_equal(kvt_session_truncate(s.mgr, x->id, tokens), 0);
    srig_check(&s);
    x->tokens = tokens;
    struct kvt_session_info info = srig_info(&s, x);
    assert_int_equal(info.tokens, tokens);
    assert_true(info.filled <= tokens);
    if (info.state == KVT_SESSION_ACTIVE)
        (void)srig_verify(&s, x, info.filled, NULL);
    return info.filled;
}

static void at_every_token_of_an_active_session(void **state)
{
    (void)state;
    open_with(32);
    for (uint32_t tokens = 0; tokens <= 100; tokens++) {
        start(&a, 1, 100); /* six full blocks and four tokens */
        uint32_t filled = cut(&a, tokens);
        /* inside the partial block, or the last full one, nothing is lost; else less than a block
         */
        if (tokens % UNIT == 0 || tokens > 80)
            assert_int_equal(filled, tokens);
        else
            assert_int_equal(filled, tokens / UNIT * UNIT);
        srig_fill(&s, &a, filled, tokens);
        srig_tokens(&a, 5000, 30); /* another way on */
        assert_int_equal(srig_append(&s, &a), 0);
        (void)srig_verify(&s, &a, tokens + 30, NULL);
        go_idle(&a);
        assert_int_equal(kvt_session_close(s.mgr, a.id), 0);
        srig_session_free(&a);
        srig_settle(&s);
        srig_check(&s);
    }
    assert_int_equal(rig_stat(&s.rig, "session.truncated_tokens"), 101 * 50);
}

/* What a cut leaves of an idle session is what a resume finds; the rest is to be computed. */
static void at_every_token_of_an_idle_session(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    open_with(32);
    for (uint32_t tokens = 0; tokens <= 100; tokens++) {
        start(&a, 1, 100);
        go_idle(&a);
        (void)cut(&a, tokens);
        srig_tokens(&a, 7000 + tokens, 20);
        assert_int_equal(srig_resume(&s, &a, &plan), 0);
        assert_int_equal(plan.tokens, tokens + 20);
        assert_true(plan.recompute >= 20 && plan.recompute < 20 + UNIT);
        if (tokens > 96) /* the partial block was still there */
            assert_int_equal(plan.recompute, 20);
        srig_fill(&s, &a, tokens + 20 - plan.recompute, tokens + 20);
        (void)srig_verify(&s, &a, tokens + 20, NULL);
        go_idle(&a);
        assert_int_equal(kvt_session_close(s.mgr, a.id), 0);
        srig_session_free(&a);
    }
}

/* Two sessions with one prefix: one is cut back and takes another way, the other one's pages hold
 * what they held. */
static void others_keep_their_blocks(void **state)
{
    (void)state;
    open_with(64);
    start(&a, 1, 100);
    start(&b, 1, 100);
    assert_int_equal(srig_info(&s, &b).blocks, 6);
    uint32_t page[2];
    assert_int_equal(kvt_session_pages(s.mgr, b.id, 5, &page[0], 1), 1);
    assert_int_equal(cut(&a, 90), 80); /* the sixth block is b's too */
    assert_int_equal(kvt_session_pages(s.mgr, a.id, 5, &page[1], 1), 1);
    assert_int_not_equal(page[0], page[1]);
    srig_tokens(&a, 900, 10);
    srig_fill(&s, &a, 80, 90);
    assert_int_equal(srig_append(&s, &a), 0);
    (void)srig_verify(&s, &a, 100, NULL);
    (void)srig_verify(&s, &b, 100, NULL);
    srig_check(&s);
    /* the same way again: the blocks are shared again */
    assert_int_equal(cut(&a, 64), 64);
    srig_tokens(&a, 1 + 64, 36);
    assert_int_equal(srig_append(&s, &a), 0);
    assert_int_equal(srig_block(&s, &a, 5).sessions, 2);
    (void)srig_verify(&s, &a, 100, NULL);
    go_idle(&a);
    go_idle(&b);
}

/* A block that is being stored is not written to. */
static void a_block_in_use_is_left_alone(void **state)
{
    (void)state;
    open_with(64);
    start(&a, 1, 96);
    srig_settle(&s);
    uint32_t node = KVT_NONE;
    for (uint32_t i = 0; i < s.mgr->nodes_used; i++)
        if (s.mgr->nodes[i].depth == 5 && s.mgr->nodes[i].refs == 1)
            node = i;
    assert_int_not_equal(node, KVT_NONE);
    struct kvt_scell *cell = kvt_scell_at(s.mgr, node, 0);
    uint32_t page = cell->page;
    cell->busy = true; /* as while a store reads it */
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, 90), 0);
    a.tokens = 90;
    assert_int_equal(srig_info(&s, &a).filled, 80);
    assert_int_equal(cell->page, page);
    cell->busy = false;
    kvt_snode_settle(s.mgr, node);
    srig_fill(&s, &a, 80, 90);
    srig_check(&s);
    (void)srig_verify(&s, &a, 90, NULL);
    go_idle(&a);
}

/* A page that came from a coarse record is not written to: no block is half coarse, half exact. */
static void a_coarse_page_is_not_gone_on_with(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    open_with(32);
    start(&a, 1, 200);
    go_idle(&a);
    assert_int_equal(kvt_session_close(s.mgr, a.id), 0);
    srig_session_free(&a);
    kvt_session_mgr_close(s.mgr); /* L0 forgets */
    srig_mgr_open(&s);
    srig_session_open(&s, &a, 1024, 0);
    srig_tokens(&a, 1, 100);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    srig_fill(&s, &a, 100 - plan.recompute, 100);
    assert_int_equal(plan.from_dram, 96);
    assert_int_equal(cut(&a, 90), 80);
    srig_fill(&s, &a, 80, 90);
    assert_int_equal(cut(&a, 85), 85); /* that one is exact */
    srig_tokens(&a, 333, 20);
    assert_int_equal(srig_append(&s, &a), 0);
    (void)srig_verify(&s, &a, 105, NULL);
    go_idle(&a);
    assert_int_equal(rig_stat(&s.rig, "session.store_failed"), 0);
}

static void wrong_calls(void **state)
{
    kvt_session_id none = UINT64_C(5) << 32 | 7;
    (void)state;
    open_with(8); /* six pages for blocks, and a scratch page */
    assert_int_equal(kvt_session_truncate(NULL, 1, 0), KVT_E_INVAL);
    assert_int_equal(kvt_session_truncate(s.mgr, none, 0), KVT_E_NO_SESSION);
    start(&a, 1, 96);
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, 97), KVT_E_INVAL);
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, UINT32_MAX), KVT_E_INVAL);
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, 96), 0);
    srig_session_open(&s, &b, 1024, 5);
    srig_tokens(&b, 1, UINT32_C(16));
    srig_turn(&s, &b, NULL); /* the last page */
    struct kvt_session_info before = srig_info(&s, &a), after;
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, 20), KVT_E_LIMIT);
    after = srig_info(&s, &a);
    assert_memory_equal(&before, &after, sizeof(before));
    srig_check(&s);
    (void)srig_verify(&s, &a, 96, NULL);
    assert_int_equal(kvt_session_close(s.mgr, b.id), 0);
    srig_settle(&s);
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, 20), 0);
    a.tokens = 20;
    srig_check(&s);
    assert_int_equal(kvt_session_truncate(s.mgr, a.id, 0), 0);
    a.tokens = 0;
    srig_check(&s);
    assert_int_equal(srig_info(&s, &a).filled, 0);
    assert_int_equal(srig_info(&s, &a).blocks, 0);
    go_idle(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(at_every_token_of_an_active_session, tear_down),
        cmocka_unit_test_teardown(at_every_token_of_an_idle_session, tear_down),
        cmocka_unit_test_teardown(others_keep_their_blocks, tear_down),
        cmocka_unit_test_teardown(a_block_in_use_is_left_alone, tear_down),
        cmocka_unit_test_teardown(a_coarse_page_is_not_gone_on_with, tear_down),
        cmocka_unit_test_teardown(wrong_calls, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
