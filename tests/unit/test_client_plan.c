/* kvt_plan() and kvt_observe_prefill() of a whole cache.
 *
 * Goal:   a plan follows what the engine told and what loads took; the options do what they say;
 *         loads under way count as a queue, and are gone from it however they end; statistics show
 *         both models; calls that make no sense are refused and counted.
 * Method: a real cache in DRAM, and one on a drive; its numbers are read back by name.
 */
#include "support/rig.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

#include "base/checked.h"
#include "client/client.h"
#include "slow_io.h"

#define N 32u
#define LOADS 500u

static struct rig rig;
static enum kvt_tier tiers[N];

static void open_rig(const char *config, const char *disk)
{
    struct rig_shape shape = rig_shape_small(N);
    rig_init(&rig, &shape, config, disk);
    rig_open(&rig);
    for (uint32_t i = 0; i < N; i++)
        tiers[i] = KVT_TIER_DRAM;
}

static struct kvt_plan_query query(void)
{
    return (struct kvt_plan_query){
        .struct_size = sizeof(struct kvt_plan_query), .tiers = tiers, .n = N};
}

static struct kvt_plan ask(const struct kvt_plan_query *q)
{
    struct kvt_plan plan = {.struct_size = sizeof(plan)};
    assert_int_equal(kvt_plan(rig.ns, q, &plan), 0);
    return plan;
}

/* Prefill that takes `us` microseconds a token. */
static void tell(double us)
{
    for (uint64_t i = 0; i < 40; i++)
        assert_int_equal(kvt_observe_prefill(rig.ns, 500 + 100 * (i % 7), 0,
                                             (double)(500 + 100 * (i % 7)) * us * 1e-6),
                         0);
}

static uint64_t queued_bytes(void)
{
    pthread_mutex_lock(&rig.cache->lock);
    uint64_t bytes = rig.cache->planning.queued_bytes;
    pthread_mutex_unlock(&rig.cache->lock);
    return bytes;
}

static void a_plan_follows_what_the_engine_told(void **state)
{
    (void)state;
    open_rig("dram=16MiB", NULL);
    struct kvt_plan_query q = query();
    tell(1000);
    struct kvt_plan plan = ask(&q);
    assert_int_equal(plan.reason, KVT_PLAN_LOAD);
    assert_int_equal(plan.count, N);
    assert_true(plan.ttft_s == plan.load_all_s && plan.ttft_s < plan.recompute_s);
    assert_true(fabs(plan.recompute_s - 0.001 * 16 * N) < 0.02 * plan.recompute_s);
    tell(0.0001);
    plan = ask(&q);
    assert_int_equal(plan.reason, KVT_PLAN_RECOMPUTE);
    assert_int_equal(plan.count, 0);
    assert_int_equal(rig_stat(&rig, "plan.load"), 1);
    assert_int_equal(rig_stat(&rig, "plan.recompute"), 1);
    assert_int_equal(rig_stat(&rig, "plan.prefills"), 80);
    rig_free(&rig);
}

static void loads_are_observed_by_tier(void **state)
{
    (void)state;
    open_rig("dram=16MiB,level=raw", "64MiB");
    assert_int_equal(rig_store(&rig, 1, N, 0, NULL), N);
    assert_int_equal(kvt_flush(rig.cache), 0);
    /* each at once, also while a worker is learning from it */
    for (uint64_t i = 0; i < LOADS; i++) {
        assert_int_equal(rig_load(&rig, 1, N, NULL), N);
        assert_int_equal(rig_stat(&rig, "plan.dram_loads"), i + 1);
    }
    assert_int_equal(rig_stat(&rig, "plan.disk_loads"), 0);
    rig_reopen(&rig);
    assert_int_equal(rig_load(&rig, 1, N, NULL), N);
    assert_int_equal(rig_stat(&rig, "plan.disk_loads"), 1);
    assert_true(rig_stat(&rig, "plan.disk_bytes_per_s") > 0);
    assert_int_equal(queued_bytes(), 0);
    rig_free(&rig);
}

/* What is absent, cancelled or off ends too: the queue comes back to nothing each time. */
static void the_queue_comes_back_to_nothing(void **state)
{
    (void)state;
    open_rig("dram=16MiB", "64MiB");
    assert_int_equal(rig_store(&rig, 1, N / 2, 0, NULL), N / 2);
    struct kvt_key keys[N];
    uint32_t ids[N];
    for (uint32_t i = 0; i < N; i++) {
        keys[i] = rig_key(1 + i);
        ids[i] = i;
    }
    for (int i = 0; i < 200; i++) {
        struct kvt_load_opts opts = {.struct_size = sizeof(opts), .deadline_ns = i % 4 ? 0 : 1};
        struct kvt_req *req;
        kvt_enable(rig.cache, i % 5 != 4);
        assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, (size_t)(i % (int)N), &opts, &req),
                         0);
        if (i % 3 == 0)
            kvt_req_cancel(req);
        kvt_req_free(req);
        assert_int_equal(queued_bytes(), 0);
    }
    /* Misses tell nothing of a tier; whole loads and those past a deadline do. */
    assert_true(rig_stat(&rig, "plan.dram_loads") > 0);
    assert_true(rig_stat(&rig, "plan.dram_loads") < 100);
    rig_free(&rig);
}

static void deterministic_plans_do_not_move(void **state)
{
    (void)state;
    open_rig("dram=16MiB,plan=deterministic,plan_prefill=1000000,plan_dram=1GiB", NULL);
    struct kvt_plan_query q = query();
    struct kvt_plan first = ask(&q);
    tell(1000);
    assert_int_equal(rig_store(&rig, 1, N, 0, NULL), N);
    for (int i = 0; i < 20; i++)
        assert_int_equal(rig_load(&rig, 1, N, NULL), N);
    for (int i = 0; i < 100; i++) {
        struct kvt_plan plan = ask(&q);
        assert_memory_equal(&plan, &first, sizeof(plan));
    }
    rig_free(&rig);
}

static void switched_off_everything_is_loaded(void **state)
{
    (void)state;
    open_rig("dram=16MiB,plan=off", NULL);
    struct kvt_plan_query q = query();
    tell(0.0001);
    tiers[20] = KVT_TIER_PENDING;
    struct kvt_plan plan = ask(&q);
    assert_int_equal(plan.reason, KVT_PLAN_OFF);
    assert_int_equal(plan.first, 0);
    assert_int_equal(plan.count, 20);
    assert_int_equal(rig_stat(&rig, "plan.off"), 1);
    rig_free(&rig);
}

/* lambda: 200 us a token of a drive at 60 MB/s; loading is slower, and frees the GPU. */
static void a_busy_gpu_counts_as_configured(void **state)
{
    (void)state;
    static const char *const configs[] = {"dram=16MiB,plan_lambda=0", "dram=16MiB,plan_lambda=100"};
    for (size_t i = 0; i < KVT_ARRAY_LEN(configs); i++) {
        char config[128];
        (void)snprintf(config, sizeof(config), "%s,plan_disk=2MiB,plan_prefill=10000", configs[i]);
        open_rig(config, NULL);
        for (uint32_t j = 0; j < N; j++)
            tiers[j] = KVT_TIER_DISK;
        struct kvt_plan_query q = query();
        double bytes = (double)kvt_ns_record_bytes(rig.ns, 0, KVT_LEVEL_DEFAULT) * N;
        tell(0.8e6 * bytes / (2 << 20) / (16 * N));
        assert_int_equal(ask(&q).reason, KVT_PLAN_RECOMPUTE);
        q.gpu_busy = 1;
        assert_int_equal(ask(&q).reason, i == 0 ? KVT_PLAN_RECOMPUTE : KVT_PLAN_LOAD);
        rig_free(&rig);
    }
}

static void refuse(struct kvt_plan_query q, int code)
{
    struct kvt_plan plan = {.struct_size = sizeof(plan), .count = 9};
    assert_int_equal(kvt_plan(rig.ns, &q, &plan), code);
    if (code != KVT_E_VERSION)
        assert_int_equal(plan.count, 0);
}

static void nonsense_is_refused_and_counted(void **state)
{
    (void)state;
    open_rig("dram=16MiB", NULL);
    static const double bad[] = {-0.1, 1.1, NAN, INFINITY};
    for (size_t i = 0; i < KVT_ARRAY_LEN(bad); i++) {
        struct kvt_plan_query q = query();
        q.gpu_busy = bad[i];
        refuse(q, KVT_E_INVAL);
    }
    struct kvt_plan_query q = query();
    q.prompt_tokens = 16 * N - 1;
    refuse(q, KVT_E_INVAL);
    q = query();
    q.group = 3;
    refuse(q, KVT_E_INVAL);
    q = query();
    q.cut = 9;
    refuse(q, KVT_E_INVAL);
    q = query();
    q.tiers = NULL;
    refuse(q, KVT_E_INVAL);
    q = query();
    q.first_tokens = UINT64_MAX;
    refuse(q, KVT_E_LIMIT);
    q = query();
    q.struct_size--;
    refuse(q, KVT_E_VERSION);
    assert_int_equal(kvt_plan(NULL, &q, NULL), KVT_E_INVAL);
    assert_int_equal(rig_stat(&rig, "plan.refused"), 9);
    assert_int_equal(kvt_observe_prefill(rig.ns, 10, 0, NAN), KVT_E_INVAL);
    assert_int_equal(kvt_observe_prefill(rig.ns, 0, 0, 1), KVT_E_INVAL);
    assert_int_equal(kvt_observe_prefill(NULL, 1, 0, 1), KVT_E_INVAL);
    assert_int_equal(rig_stat(&rig, "plan.prefills_refused"), 2);
    rig_free(&rig);
}

static void *planner(void *arg)
{
    (void)arg;
    for (int i = 0; i < 300; i++) {
        struct kvt_plan_query q = query();
        (void)ask(&q);
        assert_int_equal(kvt_observe_prefill(rig.ns, 600, 0, 0.01), 0);
    }
    return NULL;
}

static void any_thread_may_ask(void **state)
{
    (void)state;
    pthread_t threads[3];
    open_rig("dram=16MiB", NULL);
    assert_int_equal(rig_store(&rig, 1, N, 0, NULL), N);
    for (size_t i = 0; i < KVT_ARRAY_LEN(threads); i++)
        assert_int_equal(pthread_create(&threads[i], NULL, planner, NULL), 0);
    for (int i = 0; i < 20; i++) {
        assert_int_equal(rig_load(&rig, 1, N, NULL), N);
        (void)rig_stat(&rig, "plan.load");
    }
    for (size_t i = 0; i < KVT_ARRAY_LEN(threads); i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    assert_int_equal(rig_stat(&rig, "plan.prefills"), 900);
    rig_free(&rig);
}

/* ---- a drive that collapses ---------------------------------------------------------------- */

static struct kvt_slow_speed speed;

static void slow_drive(struct kvt_config *config)
{
    config->settings.io_wrap = kvt_slow_io_new;
    config->settings.io_wrap_arg = &speed;
}

/* One prompt as an engine has it: what pays is loaded, within the plan's deadline. Returns whether
 * anything was. */
static bool prompt(int *reason)
{
    struct kvt_plan_query q = query();
    struct kvt_plan plan = ask(&q);
    struct kvt_load_opts opts = {.struct_size = sizeof(opts),
                                 .deadline_ns = (int64_t)(plan.deadline_s * 1e9) + 1};
    struct kvt_key keys[N];
    uint32_t ids[N];
    struct kvt_req *req;
    *reason = plan.reason;
    if (plan.count == 0)
        return false;
    for (uint32_t i = 0; i < N; i++) {
        keys[i] = rig_key(1 + i);
        ids[i] = i;
    }
    assert_int_equal(kvt_load(rig.ns, rig.pool, &keys[plan.first], ids, plan.count, &opts, &req),
                     0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    kvt_req_free(req);
    return true;
}

/* Loads until prompts are all loaded (or are not); -1: not within `most`. */
static int loads_until(bool load, int most)
{
    int loads = 0, reason = 0;
    for (int prompts = 0; prompts < 4000 && loads <= most; prompts++) {
        loads += prompt(&reason);
        if ((reason == KVT_PLAN_LOAD) == load)
            return loads;
    }
    return -1;
}

/* 20 times slower in the middle of work: new prompts are planned by that within 20 loads; and back.
 */
static void a_collapse_is_noticed_and_so_is_recovery(void **state)
{
    (void)state;
    open_rig("dram=0,staging=4MiB,level=raw", "64MiB");
    assert_int_equal(rig_store(&rig, 1, N, 0, NULL), N);
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig.tweak = slow_drive;
    atomic_store(&speed.bytes_per_s, 2u << 20); /* 0.19 s for all of it */
    rig_reopen(&rig);
    for (uint32_t i = 0; i < N; i++)
        tiers[i] = KVT_TIER_DISK;
    tell(2000); /* 1.02 s to compute it */
    int reason = 0;
    for (int i = 0; i < 10; i++)
        (void)prompt(&reason);
    assert_int_equal(reason, KVT_PLAN_LOAD);
    atomic_store(&speed.bytes_per_s, (2u << 20) / 20); /* 3.75 s */
    int down = loads_until(false, 20);
    atomic_store(&speed.bytes_per_s, 2u << 20);
    int up = loads_until(true, 20);
    printf("a drive 20 times slower is planned by after %d loads, its recovery after %d\n", down,
           up);
    assert_true(down > 0 && up >= 0);
    atomic_store(&speed.bytes_per_s, 0);
    rig_free(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plan_follows_what_the_engine_told),
        cmocka_unit_test(loads_are_observed_by_tier),
        cmocka_unit_test(the_queue_comes_back_to_nothing),
        cmocka_unit_test(deterministic_plans_do_not_move),
        cmocka_unit_test(switched_off_everything_is_loaded),
        cmocka_unit_test(a_busy_gpu_counts_as_configured),
        cmocka_unit_test(nonsense_is_refused_and_counted),
        cmocka_unit_test(any_thread_may_ask),
        cmocka_unit_test(a_collapse_is_noticed_and_so_is_recovery),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
