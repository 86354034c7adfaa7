/* Goal: sessions while something is in flight: loads that two want, waits by several threads,
 *       requests that run out, flush and close in the middle, several managers on one cache.
 * Method: the cache's workers are stopped, so that whatever is begun stays in flight until the test
 *         lets it go on; every page is compared as in test_session.
 */
#include "support/rig.h"
#include "support/session_rig.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "base/checked.h"
#include "client/session_internal.h"

#define UNIT 16u

static struct srig s;
static struct srig_session a, b, c;

static void stop(void)
{
    kvt_workers_stop(s.rig.cache);
}

static void go_on(void)
{
    s.rig.cache->stop_workers = false;
    assert_int_equal(kvt_workers_start(s.rig.cache), 0);
}

static int tear_down(void **state)
{
    (void)state;
    if (s.mgr != NULL && s.rig.cache->worker_count == 0)
        go_on(); /* the test has failed */
    srig_session_free(&a);
    srig_session_free(&b);
    srig_session_free(&c);
    if (s.mgr != NULL)
        srig_free(&s);
    return 0;
}

static void open_with(uint32_t pages, const char *config, const char *disk)
{
    struct rig_shape shape = rig_shape_small(pages);
    struct kvt_session_mgr_opts opts = {.window_tokens = 64, .tokens_max = 2048};
    srig_open(&s, &shape, config, disk, &opts);
}

static void start(struct srig_session *x, uint32_t first, uint32_t n, uint64_t salt)
{
    srig_session_open(&s, x, 2048, salt);
    srig_tokens(x, first, n);
    srig_turn(&s, x, NULL);
}

static void go_idle(struct srig_session *x)
{
    assert_int_equal(kvt_session_idle(s.mgr, x->id), 0);
    srig_check(&s);
}

static int state_of(const struct srig_session *x)
{
    struct kvt_session_info info = {.struct_size = sizeof(info)};
    assert_int_equal(kvt_session_get_info(s.mgr, x->id, &info), 0);
    return info.state;
}

/* L0 is empty, the records are there: a new manager. */
static void forget_l0(void)
{
    srig_settle(&s);
    kvt_session_mgr_close(s.mgr);
    srig_mgr_open(&s);
}

/* A session of the same tokens in the new manager. */
static void again(struct srig_session *x)
{
    assert_int_equal(
        kvt_session_open(s.mgr, x->salt ? &x->salt : NULL, x->salt ? sizeof(x->salt) : 0, &x->id),
        0);
}

static int begin(struct srig_session *x, struct kvt_session_plan *plan)
{
    return kvt_session_resume(s.mgr, x->id, x->token, x->tokens, NULL, plan);
}

/* ---- loads that two want ------------------------------------------------------------------- */

static void two_restore_the_same_blocks_at_once(void **state)
{
    (void)state;
    open_with(64, "dram=8MiB,level=kv4", NULL);
    start(&a, 1, 200, 0);
    go_idle(&a);
    forget_l0();
    again(&a);
    srig_session_open(&s, &b, 2048, 0);
    srig_tokens(&b, 1, 160); /* ten of the twelve blocks, nine of which can be loaded */
    stop();
    assert_int_equal(begin(&a, NULL), 0);
    assert_int_equal(begin(&b, NULL), 0);
    assert_int_equal(state_of(&a), KVT_SESSION_RESTORING);
    assert_int_equal(state_of(&b), KVT_SESSION_RESTORING);
    srig_check(&s);
    go_on();
    assert_int_equal(kvt_session_wait(s.mgr, a.id, -1), 1);
    assert_int_equal(kvt_session_wait(s.mgr, b.id, -1), 1);
    srig_check(&s);
    (void)srig_verify(&s, &a, 192, NULL);
    (void)srig_verify(&s, &b, 144, NULL);
    for (uint32_t i = 0; i < 9; i++) { /* one page each in the end */
        uint32_t pages[2];
        assert_int_equal(kvt_session_pages(s.mgr, a.id, i, &pages[0], 1), 1);
        assert_int_equal(kvt_session_pages(s.mgr, b.id, i, &pages[1], 1), 1);
        assert_int_equal(pages[0], pages[1]);
    }
    assert_int_equal(srig_stats(&s).shared, 9);
    srig_fill(&s, &a, 192, 200);
    srig_fill(&s, &b, 144, 160); /* a has that block, too: two pages until one of them is idle */
    assert_int_equal(srig_stats(&s).duplicates, 1);
    go_idle(&b);
    go_idle(&a);
    assert_int_equal(srig_stats(&s).pages - srig_stats(&s).pages_free, 13);
}

static void one_of_two_is_closed_meanwhile(void **state)
{
    (void)state;
    open_with(64, "dram=8MiB,level=kv4", NULL);
    start(&a, 1, 200, 0);
    go_idle(&a);
    forget_l0();
    again(&a);
    srig_session_open(&s, &b, 2048, 0);
    srig_tokens(&b, 1, 160);
    stop();
    assert_int_equal(begin(&a, NULL), 0);
    assert_int_equal(begin(&b, NULL), 0);
    go_on();
    assert_int_equal(kvt_session_close(s.mgr, a.id), 0);
    assert_int_equal(kvt_session_wait(s.mgr, b.id, -1), 1);
    (void)srig_verify(&s, &b, 144, NULL);
    srig_settle(&s);
    assert_int_equal(srig_stats(&s).sessions, 1);
}

/* What a session that is being restored allows, and what not. */
static void calls_on_a_restoring_session(void **state)
{
    struct kvt_session_plan plan = {.struct_size = sizeof(plan)}, again_plan = plan;
    uint32_t page, token = 7;
    (void)state;
    open_with(64, "dram=8MiB,level=kv4", NULL);
    start(&a, 1, 200, 0);
    go_idle(&a);
    forget_l0();
    again(&a);
    stop();
    assert_int_equal(begin(&a, &plan), 0);
    assert_int_equal(plan.from_dram, 192);
    assert_int_equal(plan.recompute, 8);
    assert_int_equal(kvt_session_append(s.mgr, a.id, &token, 1), KVT_E_STATE);
    assert_int_equal(kvt_session_filled(s.mgr, a.id, 10), KVT_E_STATE);
    assert_int_equal(kvt_session_idle(s.mgr, a.id), KVT_E_STATE);
    assert_int_equal(kvt_session_pages(s.mgr, a.id, 0, &page, 1), KVT_E_STATE);
    assert_int_equal(kvt_session_resume(s.mgr, a.id, NULL, 0, NULL, NULL), KVT_E_STATE);
    assert_int_equal(kvt_session_wait(s.mgr, a.id, 0), 0);
    assert_int_equal(kvt_session_wait(s.mgr, a.id, 2000000), 0);
    assert_int_equal(kvt_session_mgr_work(s.mgr, 2000000), 1);
    assert_int_equal(kvt_session_get_plan(s.mgr, a.id, &again_plan), 0);
    assert_memory_equal(&plan, &again_plan, sizeof(plan));
    go_on();
    assert_int_equal(kvt_session_wait(s.mgr, a.id, 60000000000), 1);
    assert_int_equal(kvt_session_wait(s.mgr, a.id, 0), 1);
    (void)srig_verify(&s, &a, 192, NULL);
}

/* ---- threads ------------------------------------------------------------------------------- */

static void *wait_main(void *arg)
{
    int *rc = arg;
    *rc = kvt_session_wait(s.mgr, a.id, -1);
    return NULL;
}

static void *work_main(void *arg)
{
    int *rc = arg;
    long left = 1;
    while (left > 0)
        left = kvt_session_mgr_work(s.mgr, -1);
    *rc = left == 0;
    return NULL;
}

/* Several wait for one load, others drive the manager, and nobody frees it under another's feet. */
static void several_wait_for_one_load(void **state)
{
    pthread_t threads[6];
    int rc[6];
    (void)state;
    open_with(64, "dram=8MiB,level=kv4", "64MiB");
    start(&a, 1, 300, 0);
    go_idle(&a);
    for (int round = 0; round < 8; round++) {
        forget_l0();
        again(&a);
        stop();
        assert_int_equal(begin(&a, NULL), 0);
        for (int i = 0; i < 6; i++)
            assert_int_equal(
                pthread_create(&threads[i], NULL, i < 4 ? wait_main : work_main, &rc[i]), 0);
        if (round % 2)
            rig_sleep_ms(2);
        go_on();
        for (int i = 0; i < 6; i++) {
            assert_int_equal(pthread_join(threads[i], NULL), 0);
            assert_int_equal(rc[i], 1);
        }
        (void)srig_verify(&s, &a, 288, NULL);
        srig_fill(&s, &a, 288, 300);
        go_idle(&a);
    }
}

static void *close_main(void *arg)
{
    int *rc = arg;
    *rc = kvt_session_close(s.mgr, a.id);
    return NULL;
}

/* Of several that close one session during its load, one does. Who waits for it is told. */
static void several_close_one_session(void **state)
{
    pthread_t threads[5];
    int rc[5];
    (void)state;
    open_with(64, "dram=8MiB,level=kv4", NULL);
    start(&a, 1, 300, 0);
    go_idle(&a);
    for (int round = 0; round < 8; round++) {
        int closed = 0;
        forget_l0();
        again(&a);
        stop();
        assert_int_equal(begin(&a, NULL), 0);
        for (int i = 0; i < 5; i++)
            assert_int_equal(pthread_create(&threads[i], NULL, i ? close_main : wait_main, &rc[i]),
                             0);
        go_on();
        for (int i = 0; i < 5; i++) {
            assert_int_equal(pthread_join(threads[i], NULL), 0);
            assert_true(rc[i] == KVT_E_NO_SESSION || rc[i] == 0 || (i == 0 && rc[i] == 1));
            closed += i > 0 && rc[i] == 0;
        }
        assert_int_equal(closed, 1);
        srig_settle(&s);
        assert_int_equal(srig_stats(&s).sessions, 0);
    }
}

/* ---- requests run out ---------------------------------------------------------------------- */

/* Somebody else holds every request of the cache: a resume says so, and changes nothing; pages that
 * are wanted go without a record. */
static void no_request_is_left(void **state)
{
    struct kvt_session_plan plan;
    struct kvt_req *held[2];
    struct kvt_key key = rig_key(1);
    uint32_t page = 0;
    (void)state;
    open_with(33, "dram=8MiB,level=kv4,requests_max=2", NULL);
    start(&a, 1, 192, 0);
    go_idle(&a);
    forget_l0();
    again(&a);
    for (int i = 0; i < 2; i++)
        assert_int_equal(kvt_load(s.rig.ns, s.rig.pool, &key, &page, 1, NULL, &held[i]), 0);
    assert_int_equal(begin(&a, NULL), -EAGAIN);
    assert_int_equal(state_of(&a), KVT_SESSION_IDLE);
    assert_int_equal(srig_stats(&s).refused_busy, 1);
    assert_int_equal(srig_stats(&s).pages_free, 32);
    srig_check(&s);
    start(&b, 5000, 256, 0);
    go_idle(&b); /* nothing can be stored */
    srig_session_open(&s, &c, 2048, 0);
    srig_tokens(&c, 9000, 300);
    srig_turn(&s, &c, NULL);
    assert_true(srig_stats(&s).evicted_unsaved > 0);
    go_idle(&c);
    for (int i = 0; i < 2; i++)
        kvt_req_free(held[i]);
    srig_settle(&s);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.recompute, 16); /* a prompt leaves a token to compute: its last block */
    assert_int_equal(plan.from_dram, 176);
}

/* More is to be stored than the manager has requests for: nothing is lost, it takes longer. */
static void the_managers_requests_run_out(void **state)
{
    static struct srig_session many[40];
    struct kvt_session_plan plan;
    (void)state;
    open_with(600, "dram=16MiB,level=kv4", NULL);
    stop();
    for (uint32_t i = 0; i < 40; i++)
        start(&many[i], i * 10000, 160, 0);
    for (uint32_t i = 0; i < 40; i++)
        go_idle(&many[i]); /* what has left the window, and the window: two requests each */
    assert_int_equal(srig_stats(&s).in_flight, KVT_SESSION_JOBS);
    start(&a, 900000, 2048, 0);
    srig_session_open(&s, &b, 2048, 0);
    srig_tokens(&b, 700000, 2048);
    assert_int_equal(begin(&b, NULL), -EAGAIN);
    srig_check(&s);
    go_on();
    srig_turn(&s, &b, NULL);
    srig_settle(&s);
    assert_int_equal(srig_stats(&s).evicted_unsaved, 0);
    assert_int_equal(srig_stats(&s).store_failed, 0);
    go_idle(&a);
    for (uint32_t i = 0; i < 40; i++) {
        assert_int_equal(srig_resume(&s, &many[i], &plan), 0);
        assert_int_equal(plan.recompute, 0);
        go_idle(&many[i]);
        srig_session_free(&many[i]);
    }
}

/* ---- flush and close ----------------------------------------------------------------------- */

static void flush_stores_active_sessions_too(void **state)
{
    (void)state;
    open_with(64, "dram=8MiB,level=kv4", "64MiB");
    start(&a, 1, 200, 0);
    start(&b, 5000, 100, 0);
    go_idle(&b);
    for (uint32_t i = 8; i < 12; i++)
        assert_int_equal(srig_block(&s, &a, i).record, KVT_SESSION_RECORD_NONE);
    assert_int_equal(kvt_session_mgr_flush(s.mgr), 0);
    for (uint32_t i = 0; i < 12; i++) {
        struct kvt_session_block block = srig_block(&s, &a, i);
        assert_int_equal(block.record,
                         i < 8 ? KVT_SESSION_RECORD_FINAL : KVT_SESSION_RECORD_WINDOW);
        assert_true(block.tier != KVT_TIER_MISS);
    }
    assert_true(rig_stat(&s.rig, "disk.blocks") >= 18);
    assert_int_equal(rig_stat(&s.rig, "disk.queue_blocks"), 0);
    assert_int_equal(state_of(&a), KVT_SESSION_ACTIVE);
    assert_int_equal(srig_verify(&s, &a, 200, NULL), SRIG_EXACT);
    kvt_enable(s.rig.cache, 0); /* a store that takes nothing */
    start(&c, 9000, 100, 0);
    assert_int_equal(kvt_session_mgr_flush(s.mgr), KVT_E_DROPPED);
    kvt_enable(s.rig.cache, 1);
}

static void close_with_everything_in_flight(void **state)
{
    (void)state;
    open_with(128, "dram=8MiB,level=kv4", NULL);
    start(&a, 1, 300, 0);
    go_idle(&a);
    forget_l0();
    again(&a);
    start(&b, 5000, 300, 0);
    start(&c, 9000, 300, 0);
    stop();
    assert_int_equal(begin(&a, NULL), 0);
    go_idle(&b);
    assert_true(srig_stats(&s).in_flight >= 2);
    go_on();
    kvt_session_mgr_close(s.mgr); /* restoring, idle and being stored, active */
    srig_mgr_open(&s);
    again(&c);
    struct kvt_session_plan plan;
    assert_int_equal(srig_resume(&s, &c, &plan), 0); /* it was stored before it was closed */
    assert_int_equal(plan.from_dram, 288);
}

/* ---- several managers, other pools --------------------------------------------------------- */

static void two_managers_share_a_store(void **state)
{
    struct kvt_session_mgr_opts opts = {
        .struct_size = sizeof(opts), .page_count = 30, .window_tokens = 64, .tokens_max = 2048};
    struct kvt_session_mgr *first, *second, *other = NULL;
    struct kvt_session_plan plan;
    (void)state;
    open_with(90, "dram=8MiB,level=kv4", NULL);
    kvt_session_mgr_close(s.mgr);
    s.opts = opts;
    srig_mgr_open(&s);
    first = s.mgr;
    start(&a, 1, 200, 0);
    go_idle(&a);
    srig_settle(&s);
    s.opts.first_page = 30;
    srig_mgr_open(&s);
    second = s.mgr;
    again(&a);
    assert_int_equal(srig_resume(&s, &a, &plan), 0); /* through the store: the pages are apart */
    assert_int_equal(plan.from_dram, 192);
    s.opts.first_page = 60;
    s.opts.shard = 1; /* other keys */
    srig_mgr_open(&s);
    other = s.mgr;
    again(&a);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.recompute, 200);
    kvt_session_mgr_close(first);
    kvt_session_mgr_close(second);
    s.mgr = other;
}

/* Pages have one manager at a time. */
static void managers_do_not_share_pages(void **state)
{
    static const struct {
        uint32_t first, count;
        int want;
    } tries[] = {
        {0, 0, KVT_E_INVAL},  {0, 64, KVT_E_INVAL}, {20, 10, KVT_E_INVAL}, {10, 11, KVT_E_INVAL},
        {29, 8, KVT_E_INVAL}, {25, 2, KVT_E_INVAL}, {10, 10, 0},           {30, 8, 0}};
    (void)state;
    open_with(64, "dram=8MiB,level=kv4", NULL);
    kvt_session_mgr_close(s.mgr);
    s.opts.first_page = 20;
    s.opts.page_count = 10;
    srig_mgr_open(&s);
    for (size_t i = 0; i < KVT_ARRAY_LEN(tries); i++) {
        struct kvt_session_mgr_opts opts = s.opts;
        struct kvt_session_mgr *mgr = NULL;
        opts.first_page = tries[i].first;
        opts.page_count = tries[i].count;
        assert_int_equal(kvt_session_mgr_open(s.rig.ns, s.rig.pool, &opts, &mgr), tries[i].want);
        assert_int_equal(mgr != NULL, tries[i].want == 0);
        kvt_session_mgr_close(mgr);
    }
    /* what was refused left nothing behind; a closed one gives its pages up */
    kvt_session_mgr_close(s.mgr);
    s.opts.first_page = 25;
    srig_mgr_open(&s);
    start(&a, 1, 40, 0);
    go_idle(&a);
}

/* The cache's counters are the sums of its managers'. */
static void counters_are_summed(void **state)
{
    struct kvt_session_mgr *first;
    struct kvt_session_stats one, two;
    (void)state;
    open_with(64, "dram=8MiB,level=kv4", NULL);
    kvt_session_mgr_close(s.mgr);
    s.opts.page_count = 30;
    srig_mgr_open(&s);
    first = s.mgr;
    start(&a, 1, 200, 0);
    go_idle(&a);
    srig_settle(&s);
    s.opts.first_page = 30;
    srig_mgr_open(&s);
    start(&b, 1, 200, 0);
    go_idle(&b);
    srig_settle(&s);
    two = srig_stats(&s);
    struct kvt_session_mgr *second = s.mgr;
    s.mgr = first;
    one = srig_stats(&s);
    assert_int_equal(one.resumed, 1);
    assert_int_equal(two.blocks_loaded, 12); /* what the first one stored */
    assert_int_equal(rig_stat(&s.rig, "session.resumed"), 2);
    assert_int_equal(rig_stat(&s.rig, "session.blocks_loaded"), 12);
    assert_int_equal(rig_stat(&s.rig, "session.stored_final"), one.stored_final + two.stored_final);
    assert_int_equal(rig_stat(&s.rig, "session.stored_window"),
                     one.stored_window + two.stored_window);
    assert_int_equal(kvt_session_idle(first, a.id), KVT_E_STATE);
    kvt_session_mgr_close(second);
    assert_int_equal(rig_stat(&s.rig, "session.resumed"), 2); /* they stay */
}

static void pools_that_do_not_fit_are_refused(void **state)
{
    struct kvt_session_mgr *mgr = NULL;
    struct kvt_pool *pool = NULL;
    struct kvt_part parts[RIG_PARTS_MAX];
    struct kvt_layout layout;
    (void)state;
    open_with(16, "dram=8MiB", NULL);
    memcpy(parts, s.rig.parts, sizeof(parts));
    layout = s.rig.layout;
    layout.parts = parts;
    parts[0].layer = 17;
    assert_int_equal(kvt_pool_register(s.rig.cache, &layout, &s.rig.desc, &pool), 0);
    assert_int_equal(kvt_session_mgr_open(s.rig.ns, pool, NULL, &mgr), KVT_E_LAYOUT);
    kvt_pool_unregister(pool);
    parts[0].layer = 0;
    assert_null(mgr);
}

/* Half floats, blocks of 64, several layers: nothing in the manager depends on them. */
static void another_shape(void **state)
{
    struct rig_shape shape = {.layers = 3,
                              .heads = 2,
                              .dim = 128,
                              .tokens = 64,
                              .pages = 40,
                              .dtype = KVT_DTYPE_F16,
                              .row_gap = 32};
    struct kvt_session_mgr_opts opts = {.window_tokens = 256, .tokens_max = 4096};
    struct kvt_session_plan plan;
    uint8_t kinds[32];
    (void)state;
    srig_open(&s, &shape, "dram=32MiB,level=kv4", "256MiB", &opts);
    srig_session_open(&s, &a, 4096, 0);
    srig_tokens(&a, 1, 1000);
    srig_turn(&s, &a, NULL);
    go_idle(&a);
    forget_l0();
    again(&a);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.from_dram + plan.from_disk, 960);
    (void)srig_verify(&s, &a, 960, kinds);
    for (uint32_t i = 0; i < 15; i++)
        assert_int_equal(kinds[i], i == 0 ? SRIG_EXACT : i < 11 ? SRIG_KV4 : SRIG_KV8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(two_restore_the_same_blocks_at_once, tear_down),
        cmocka_unit_test_teardown(one_of_two_is_closed_meanwhile, tear_down),
        cmocka_unit_test_teardown(calls_on_a_restoring_session, tear_down),
        cmocka_unit_test_teardown(several_wait_for_one_load, tear_down),
        cmocka_unit_test_teardown(several_close_one_session, tear_down),
        cmocka_unit_test_teardown(no_request_is_left, tear_down),
        cmocka_unit_test_teardown(the_managers_requests_run_out, tear_down),
        cmocka_unit_test_teardown(flush_stores_active_sessions_too, tear_down),
        cmocka_unit_test_teardown(close_with_everything_in_flight, tear_down),
        cmocka_unit_test_teardown(two_managers_share_a_store, tear_down),
        cmocka_unit_test_teardown(managers_do_not_share_pages, tear_down),
        cmocka_unit_test_teardown(counters_are_summed, tear_down),
        cmocka_unit_test_teardown(pools_that_do_not_fit_are_refused, tear_down),
        cmocka_unit_test_teardown(another_shape, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
