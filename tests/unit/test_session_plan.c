/* Goal: a session that comes back loads what pays; from both ends where the engine can; what is
 * late is cut off, and no byte of it lands in a page that has another use by then. Method: the
 * engine of session_rig, whose every page can be checked; start values and plan=deterministic make
 * decisions certain, a wrapper makes the drive slow. Random rounds print their seed.
 */
#include "support/rig.h"
#include "support/session_rig.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "client/session_internal.h"
#include "slow_io.h"

#define UNIT 16u
#define CUT "plan=deterministic,plan_prefill=2000,plan_dram=1MiB,plan_disk=1MiB"

static struct srig s;
static struct srig_session a, b;
static struct kvt_slow_speed speed;

static void slow_drive(struct kvt_config *config)
{
    config->settings.io_wrap = kvt_slow_io_new;
    config->settings.io_wrap_arg = &speed;
}

static void set_rate(uint64_t bytes_per_s)
{
    atomic_store(&speed.bytes_per_s, bytes_per_s);
}

static int tear_down(void **state)
{
    (void)state;
    set_rate(0);
    srig_session_free(&a);
    srig_session_free(&b);
    if (s.mgr != NULL)
        srig_free(&s);
    memset(&s, 0, sizeof(s));
    return 0;
}

/* disk: blocks have to come from it, since there is no DRAM. */
static void open_with(uint32_t pages, const char *plan, bool disk)
{
    struct rig_shape shape = rig_shape_small(pages);
    struct kvt_session_mgr_opts opts = {.window_tokens = 64, .tokens_max = 4096};
    char config[300];
    snprintf(config, sizeof(config), "%s,%s", disk ? "dram=0,staging=4MiB" : "dram=16MiB", plan);
    srig_open(&s, &shape, config, disk ? "64MiB" : NULL, &opts);
    if (disk) {
        kvt_session_mgr_close(s.mgr);
        s.rig.tweak = slow_drive;
        rig_reopen(&s.rig);
        srig_mgr_open(&s);
    }
}

static void learn(struct srig_session *x, uint32_t first, uint32_t n)
{
    struct kvt_session_plan plan;
    srig_session_open(&s, x, 4096, 0);
    srig_tokens(x, first, n);
    srig_turn(&s, x, &plan);
    assert_int_equal(kvt_session_idle(s.mgr, x->id), 0);
    srig_settle(&s);
}

/* L0 is empty, the records are there; the session is opened anew. */
static void forget_l0(struct srig_session *x)
{
    assert_int_equal(kvt_session_mgr_flush(s.mgr), 0);
    kvt_session_mgr_close(s.mgr);
    srig_mgr_open(&s);
    assert_int_equal(kvt_session_open(s.mgr, NULL, 0, &x->id), 0);
}

static struct kvt_session_resume_opts overlap(void)
{
    return (struct kvt_session_resume_opts){.struct_size = sizeof(struct kvt_session_resume_opts),
                                            .cut = KVT_PLAN_CUT_OVERLAP};
}

static struct kvt_session_plan resume(struct srig_session *x,
                                      const struct kvt_session_resume_opts *opts)
{
    struct kvt_session_plan plan = {.struct_size = sizeof(plan)};
    int rc;
    while ((rc = kvt_session_resume(s.mgr, x->id, x->token, x->tokens, opts, &plan)) == -EAGAIN)
        assert_true(kvt_session_mgr_work(s.mgr, 1000000000) >= 0);
    assert_int_equal(rc, 0);
    assert_int_equal(plan.in_l0 + plan.head + plan.from_dram + plan.from_disk + plan.recompute,
                     plan.tokens);
    return plan;
}

static struct kvt_session_plan plan_of(const struct srig_session *x)
{
    struct kvt_session_plan plan = {.struct_size = sizeof(plan)};
    assert_int_equal(kvt_session_get_plan(s.mgr, x->id, &plan), 0);
    return plan;
}

/* The engine's side of a meeting, `step` tokens at a time (0: all it is given), each taking us
 * microseconds a token. Returns the tokens that it computed. */
static uint32_t meet(struct srig_session *x, uint32_t step, unsigned us)
{
    uint32_t computed = 0, from, until, at = 0;
    int rc;
    while ((rc = kvt_session_meet(s.mgr, x->id, at, &from, &until)) == 0) {
        assert_true(from < until && from % UNIT == 0 && until % UNIT == 0);
        at = step > 0 ? KVT_MIN(from + step, until) : until;
        srig_compute(&s, x, from, at);
        if (us > 0)
            usleep((at - from) * us);
        computed += at - from;
        srig_check(&s);
    }
    assert_int_equal(rc, 1);
    assert_int_equal(srig_info(&s, x).state, KVT_SESSION_ACTIVE);
    srig_check(&s);
    return computed;
}

/* Everything that the session says is there is right; then it is finished, and right. */
static void finish(struct srig_session *x)
{
    struct kvt_session_plan plan = plan_of(x);
    assert_int_equal(srig_info(&s, x).filled, x->tokens - plan.recompute);
    (void)srig_verify(&s, x, x->tokens - plan.recompute, NULL);
    srig_fill(&s, x, x->tokens - plan.recompute, x->tokens);
    (void)srig_verify(&s, x, x->tokens, NULL);
    srig_check(&s);
}

/* ---- what pays ----------------------------------------------------------------------------- */

static void what_does_not_pay_is_not_loaded(void **state)
{
    (void)state;
    open_with(96, "plan=deterministic,plan_prefill=100000000", false);
    learn(&a, 1, 600);
    forget_l0(&a);
    struct kvt_session_plan plan = resume(&a, NULL);
    assert_int_equal(plan.decision, KVT_PLAN_RECOMPUTE);
    assert_int_equal(plan.recompute, 600);
    assert_int_equal(plan.from_dram + plan.head, 0);
    assert_int_equal(rig_stat(&s.rig, "plan.recompute"), 1);
    assert_int_equal(srig_info(&s, &a).state, KVT_SESSION_ACTIVE);
    finish(&a);
}

static void what_pays_is_loaded(void **state)
{
    (void)state;
    open_with(96, "plan=deterministic,plan_prefill=100", false);
    learn(&a, 1, 600);
    forget_l0(&a);
    struct kvt_session_resume_opts opts = overlap();
    struct kvt_session_plan plan = resume(&a, &opts);
    uint32_t from, until;
    assert_int_equal(plan.decision, KVT_PLAN_LOAD);
    assert_int_equal(plan.from_dram, 592);
    assert_int_equal(plan.head, 0);
    assert_int_equal(kvt_session_meet(s.mgr, a.id, 0, &from, &until), KVT_E_STATE);
    assert_int_equal(kvt_session_wait(s.mgr, a.id, -1), 1);
    finish(&a);
}

/* The engine tells what its prefills take; sessions go by it. */
static void sessions_go_by_what_is_observed(void **state)
{
    (void)state;
    open_with(96, "plan=on", false);
    learn(&a, 1, 600);
    for (int i = 0; i < 50; i++)
        assert_int_equal(kvt_observe_prefill(s.rig.ns, 600, 0, 600 * 1e-2), 0);
    forget_l0(&a);
    assert_int_equal(resume(&a, NULL).decision, KVT_PLAN_LOAD);
    assert_int_equal(kvt_session_wait(s.mgr, a.id, -1), 1);
    finish(&a);
    assert_int_equal(kvt_session_idle(s.mgr, a.id), 0);
    for (int i = 0; i < 100; i++)
        assert_int_equal(kvt_observe_prefill(s.rig.ns, 600, 0, 600 * 1e-9), 0);
    forget_l0(&a);
    assert_int_equal(resume(&a, NULL).decision, KVT_PLAN_RECOMPUTE);
    finish(&a);
}

/* ---- from both ends ------------------------------------------------------------------------ */

static void both_ends_meet(void **state)
{
    (void)state;
    open_with(160, CUT, false);
    learn(&a, 1, 2008);
    for (uint32_t step = 0; step <= 48; step += 24) {
        forget_l0(&a);
        struct kvt_session_resume_opts opts = overlap();
        struct kvt_session_plan plan = resume(&a, &opts);
        assert_int_equal(plan.decision, KVT_PLAN_CUT);
        assert_true(plan.head > 0 && plan.from_dram > 0);
        assert_int_equal(plan.recompute, 2008 % UNIT);
        assert_int_equal(srig_info(&s, &a).state, KVT_SESSION_RESTORING);
        uint32_t computed = meet(&a, step / UNIT * UNIT, 0);
        plan = plan_of(&a);
        assert_int_equal(plan.head, computed);
        assert_int_equal(plan.in_l0 + plan.head + plan.from_dram + plan.recompute, 2008);
        printf("steps of %u: %u tokens computed, %u loaded\n", step / UNIT * UNIT, computed,
               plan.from_dram);
        finish(&a);
        assert_int_equal(kvt_session_idle(s.mgr, a.id), 0);
    }
    assert_int_equal(srig_stats(&s).met, 1); /* of the last manager */
    assert_true(rig_stat(&s.rig, "session.met") == 3);
    assert_true(rig_stat(&s.rig, "session.blocks_beside") > 0);
}

/* A drive on which nothing comes: the engine takes over chunk by chunk, and computes all. What was
 * called off lands later, and in no page. */
static void a_drive_that_stands_still(void **state)
{
    (void)state;
    open_with(160, CUT, true);
    learn(&a, 1, 1000);
    forget_l0(&a);
    set_rate(100000); /* the last byte is there after five seconds */
    struct kvt_session_resume_opts opts = overlap();
    opts.deadline_ns = -1;
    struct kvt_session_plan plan = resume(&a, &opts);
    assert_int_equal(plan.decision, KVT_PLAN_CUT);
    int64_t start = rig_now_ns();
    uint32_t computed = meet(&a, 0, 0);
    printf("%u of 992 tokens computed beside a drive that stands still, in %.3f s\n", computed,
           (double)(rig_now_ns() - start) * 1e-9);
    assert_int_equal(computed, 992);
    finish(&a);
    set_rate(0);
    rig_sleep_ms(300); /* what was called off comes now, or never */
    (void)srig_verify(&s, &a, a.tokens, NULL);
}

/* While no worker runs: flip a bit of the record that a block is to be loaded from, once it has
 * been granted. */
static void damage_granted(const struct kvt_key *key)
{
    struct kvt_cache *cache = s.rig.cache;
    bool done = false;
    for (int wait = 0; !done && wait < 20000; wait++) {
        pthread_mutex_lock(&cache->lock);
        for (uint32_t i = 0; i < cache->granule_count * KVT_GRANULE && !done; i++) {
            struct kvt_block *block = &cache->blocks[i];
            done = block->state == KVT_B_READY && memcmp(block->key.hash, key->hash, 32) == 0;
            if (done)
                cache->arena[block->arena_offset + block->record_bytes / 2] ^= 1;
        }
        pthread_mutex_unlock(&cache->lock);
        usleep(1000);
    }
    assert_true(done);
}

/* Every block that is wrong or gone is the engine's; those behind it stay of use. */
static void a_hole_is_computed(void **state)
{
    (void)state;
    open_with(160, CUT, false);
    learn(&a, 1, 2008);
    forget_l0(&a);
    struct kvt_session_resume_opts opts = overlap();
    struct kvt_session_plan plan;
    kvt_workers_stop(s.rig.cache);
    plan = resume(&a, &opts);
    uint32_t middle = (plan.in_l0 + plan.head) / UNIT + plan.from_dram / UNIT / 2;
    struct kvt_key key = kvt_session_key(s.mgr, 0, s.mgr->sessions[0].hash[middle]);
    damage_granted(&key);
    s.rig.cache->stop_workers = false;
    assert_int_equal(kvt_workers_start(s.rig.cache), 0);
    uint32_t computed = meet(&a, 0, 0);
    assert_int_equal(rig_stat(&s.rig, "client.load_corrupt"), 1);
    assert_int_equal(plan_of(&a).reason, KVT_E_CORRUPT);
    assert_true(computed > plan.head);                /* the hole, too, or all up to it */
    assert_int_equal(srig_info(&s, &a).filled, 2000); /* no shorter for that */
    finish(&a);
}

static void calls_that_make_no_sense(void **state)
{
    (void)state;
    open_with(160, CUT, true);
    learn(&a, 1, 1000);
    forget_l0(&a);
    uint32_t from = 7, until = 7;
    struct kvt_session_resume_opts opts = overlap();
    assert_int_equal(kvt_session_meet(s.mgr, a.id, 0, &from, &until), KVT_E_STATE);
    opts.cut = KVT_PLAN_CUT_SERIAL;
    assert_int_equal(kvt_session_resume(s.mgr, a.id, a.token, 1000, &opts, NULL), KVT_E_INVAL);
    opts = overlap();
    opts.gpu_busy = 2;
    assert_int_equal(kvt_session_resume(s.mgr, a.id, a.token, 1000, &opts, NULL), KVT_E_INVAL);
    opts = overlap();
    set_rate(100000);
    struct kvt_session_plan plan = resume(&a, &opts);
    assert_int_equal(kvt_session_meet(s.mgr, a.id, 0, NULL, &until), KVT_E_INVAL);
    assert_int_equal(kvt_session_meet(s.mgr, a.id, 5, &from, &until), KVT_E_INVAL);
    assert_int_equal(kvt_session_meet(s.mgr, a.id, plan.head + UNIT, &from, &until), KVT_E_INVAL);
    assert_int_equal(kvt_session_meet(s.mgr, a.id + 1, 0, &from, &until), KVT_E_NO_SESSION);
    assert_int_equal(from, 7);
    assert_int_equal(kvt_session_idle(s.mgr, a.id), KVT_E_STATE);
    assert_int_equal(kvt_session_filled(s.mgr, a.id, UNIT), KVT_E_STATE);
    assert_int_equal(kvt_session_meet(s.mgr, a.id, 0, &from, &until), 0);
    assert_true(from == 0 && until == plan.head);
    assert_int_equal(kvt_session_wait(s.mgr, a.id, 0), 0);
    set_rate(0);
    int rc;
    while ((rc = kvt_session_wait(s.mgr, a.id, 1000000000)) == 0) /* the loads end, */
        ;
    assert_int_equal(rc, KVT_E_STATE);                   /* and it is the engine's turn */
    assert_int_equal(kvt_session_close(s.mgr, a.id), 0); /* it may give up */
    srig_check(&s);
    set_rate(100000); /* in the middle of it, too */
    assert_int_equal(kvt_session_open(s.mgr, NULL, 0, &a.id), 0);
    (void)resume(&a, &opts);
    assert_int_equal(kvt_session_meet(s.mgr, a.id, 0, &from, &until), 0);
    srig_compute(&s, &a, from, from + UNIT);
    assert_int_equal(kvt_session_meet(s.mgr, a.id, from + UNIT, &from, &until), 0);
    assert_int_equal(from, UNIT);
    assert_int_equal(kvt_session_close(s.mgr, a.id), 0);
    srig_check(&s);
    set_rate(0);
}

/* ---- late ---------------------------------------------------------------------------------- */

/* A load that falls behind its plan ends by itself; its pages are used for something else at once,
 * and nothing of it lands there when the drive comes back. */
static void no_late_byte_lands_in_a_reused_page(void **state)
{
    (void)state;
    open_with(72, "plan=deterministic,plan_prefill=5000,plan_disk=1GiB", true);
    learn(&a, 1, 1000);
    forget_l0(&a);
    set_rate(150000);
    int64_t start = rig_now_ns();
    struct kvt_session_plan plan = resume(&a, NULL);
    assert_int_equal(plan.decision, KVT_PLAN_LOAD);
    assert_int_equal(kvt_session_wait(s.mgr, a.id, -1), 1);
    double seconds = (double)(rig_now_ns() - start) * 1e-9;
    plan = plan_of(&a);
    printf("cut off after %.3f s (recompute 0.2 s), %u tokens had come\n", seconds, plan.from_disk);
    assert_int_equal(plan.reason, KVT_E_DEADLINE);
    assert_true(seconds < 1.0);
    assert_true(plan.recompute > 8);
    srig_fill(&s, &a, 1000 - plan.recompute, 1000);
    /* the pages behind what came are another session's now */
    assert_int_equal(kvt_session_idle(s.mgr, a.id), 0);
    assert_int_equal(kvt_session_close(s.mgr, a.id), 0);
    srig_session_open(&s, &b, 4096, 99);
    srig_tokens(&b, 5000, 1000);
    srig_turn(&s, &b, NULL);
    set_rate(0);
    rig_sleep_ms(400);
    (void)srig_verify(&s, &b, 1000, NULL);
    srig_check(&s);
}

/* ---- anything ------------------------------------------------------------------------------ */

static void random_rounds(void **state)
{
    (void)state;
    struct kvt_rng rng = {rig_seed()};
    uint32_t hybrids = 0;
    open_with(160, CUT, true);
    learn(&a, 1, 1000);
    for (int round = 0; round < 24; round++) {
        static const uint64_t rates[] = {0, 200000, 600000, 2000000, 20000000};
        forget_l0(&a);
        uint64_t rate = rates[kvt_rng_below(&rng, 5)];
        set_rate(rate);
        struct kvt_session_resume_opts opts = overlap();
        opts.deadline_ns = kvt_rng_below(&rng, 3) ? 0 : 1 + (int64_t)kvt_rng_below(&rng, 50000000);
        opts.cut = kvt_rng_below(&rng, 4) ? KVT_PLAN_CUT_OVERLAP : KVT_PLAN_CUT_NONE;
        struct kvt_session_plan plan = resume(&a, &opts);
        if (plan.head > 0) {
            hybrids++;
            (void)meet(&a, UNIT * (uint32_t)kvt_rng_below(&rng, 6),
                       (unsigned)kvt_rng_below(&rng, 100));
        } else {
            assert_int_equal(kvt_session_wait(s.mgr, a.id, -1), 1);
        }
        finish(&a);
        set_rate(0);
        rig_sleep_ms((unsigned)kvt_rng_below(&rng, 20));
        (void)srig_verify(&s, &a, a.tokens, NULL);
        assert_int_equal(kvt_session_idle(s.mgr, a.id), 0);
        srig_settle(&s);
    }
    assert_true(hybrids > 5);
}

/* Three groups, so three times the bytes that the plan is asked about: the load is not cut off
 * before it can have come. */
static void the_deadline_is_of_all_groups(void **state)
{
    static const struct srig_layout three = {
        .count = 3, .groups = {{.group = 0}, {.group = 1}, {.group = 2}}, .of_layer = {0, 1, 2}};
    struct rig_shape shape = rig_shape_small(64);
    struct kvt_session_mgr_opts opts = {.window_tokens = 64, .tokens_max = 4096};
    (void)state;
    shape.layers = 3;
    srig_open_groups(&s, &three, &shape,
                     "dram=16MiB,level=kv4,plan=deterministic,plan_prefill=1200,plan_dram=1MiB",
                     NULL, &opts);
    learn(&a, 1, 200);
    forget_l0(&a);
    struct kvt_session *session = &s.mgr->sessions[(a.id & UINT32_MAX) - 1];
    struct kvt_resume r = {.mgr = s.mgr, .s = session, .total = 200, .blocks = 13};
    pthread_mutex_lock(&s.mgr->lock);
    assert_int_equal(kvt_session_put_tokens(s.mgr, session, a.token, 200), 0);
    kvt_resume_find(&r, 12, NULL);
    pthread_mutex_unlock(&s.mgr->lock);
    assert_int_equal(r.b, 12);
    assert_int_equal(r.plan.reason, KVT_PLAN_LOAD);
    assert_true(3 * r.plan.load_s < r.plan.recompute_s);     /* it pays, ... */
    assert_true(2 * r.plan.load_s > r.plan.recompute_s / 2); /* ... and one would get twice */
    assert_true(r.plan.deadline_s > 3 * r.plan.load_s);
    struct kvt_session_plan plan = resume(&a, NULL);
    assert_int_equal(plan.from_dram, 192);
    assert_int_equal(kvt_session_wait(s.mgr, a.id, -1), 1);
    finish(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(what_does_not_pay_is_not_loaded, tear_down),
        cmocka_unit_test_teardown(what_pays_is_loaded, tear_down),
        cmocka_unit_test_teardown(sessions_go_by_what_is_observed, tear_down),
        cmocka_unit_test_teardown(both_ends_meet, tear_down),
        cmocka_unit_test_teardown(a_drive_that_stands_still, tear_down),
        cmocka_unit_test_teardown(a_hole_is_computed, tear_down),
        cmocka_unit_test_teardown(calls_that_make_no_sense, tear_down),
        cmocka_unit_test_teardown(no_late_byte_lands_in_a_reused_page, tear_down),
        cmocka_unit_test_teardown(random_rounds, tear_down),
        cmocka_unit_test_teardown(the_deadline_is_of_all_groups, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
