/* Plans over several roots.
 *
 * Goal:   a lookup says which root has a block; each root's speed is learnt apart: one that becomes
 *         20 times slower is planned by within 20 loads, while prompts on the other one are loaded
 *         as ever, and a prompt on both as far as the fast one has it; what was learnt of each root
 *         is kept across restarts, also in a file of one's own; a load over both tells of each; the
 *         shared tier is none of them.
 * Method: a real cache over two directories, each behind a drive of a speed that the test sets;
 *         blocks are flushed chain by chain, so that each chain lies on one root. How busy a root
 *         was is also checked with answers of the store made by hand.
 */
#include "support/rig.h"

#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "client/client.h"
#include "slow_io.h"

#define N 16u /* blocks of a chain */
#define FAST (2u << 20)

static struct rig rig;
static struct kvt_slow_speed speeds[2];
static unsigned wrapped;
static char other_dir[128];

struct chain {
    uint64_t seed;
    struct kvt_key keys[N];
    enum kvt_tier tiers[N];
    uint8_t roots[N];
};
static struct chain chains[2]; /* on different roots: chains[i].roots[0] */

static struct kvt_io *slow_in_turn(void *arg, struct kvt_io *inner)
{
    (void)arg;
    return kvt_slow_io_new(&speeds[wrapped++ % 2], inner);
}

static void two_drives(struct kvt_config *config)
{
    wrapped = 0;
    config->settings.io_wrap = slow_in_turn;
}

static int tear_down(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++)
        atomic_store(&speeds[i].bytes_per_s, 0);
    rig_free(&rig);
    rig_dir_remove(other_dir);
    return 0;
}

static void config_is(const char *options)
{
    (void)snprintf(rig.config, sizeof(rig.config), "%s,io=posix,level=raw,disk=%s:64MiB", options,
                   other_dir);
}

static void find(struct chain *chain)
{
    const struct kvt_lookup_opts opts = {.struct_size = sizeof(opts), .roots = chain->roots};
    for (uint32_t i = 0; i < N; i++)
        chain->keys[i] = rig_key(chain->seed + i);
    memset(chain->roots, 0xee, sizeof(chain->roots));
    assert_int_equal(kvt_lookup(rig.ns, chain->keys, N, &opts, chain->tiers), N);
}

/* Two chains, each on a root of its own; nothing in DRAM. */
static void open_two(const char *options)
{
    struct rig_shape shape = rig_shape_small(2 * N);
    rig_dir_make(other_dir, sizeof(other_dir));
    rig_init(&rig, &shape, "", "64MiB");
    config_is("dram=16MiB,write=idle");
    rig_open(&rig);
    for (uint32_t c = 0; c < 2; c++) {
        chains[c].seed = 1 + 1000 * c;
        assert_int_equal(rig_store(&rig, chains[c].seed, N, 0, NULL), N);
        assert_int_equal(kvt_flush(rig.cache), 0);
        find(&chains[c]);
        for (uint32_t i = 0; i < N; i++) {
            assert_int_equal(chains[c].tiers[i], KVT_TIER_DRAM);
            assert_int_equal(chains[c].roots[i], 0);
        }
    }
    config_is(options);
    rig.tweak = two_drives;
    for (int i = 0; i < 2; i++)
        atomic_store(&speeds[i].bytes_per_s, FAST);
    rig_reopen(&rig);
    for (uint32_t c = 0; c < 2; c++) {
        find(&chains[c]);
        for (uint32_t i = 0; i < N; i++) {
            assert_int_equal(chains[c].tiers[i], KVT_TIER_DISK);
            assert_int_equal(chains[c].roots[i], chains[c].roots[0]);
        }
    }
    assert_int_equal(chains[0].roots[0] + chains[1].roots[0], 1);
}

/* Prefill of 2 ms a token: a chain takes 0.5 s, and 0.1 s to load. */
static void tell(void)
{
    for (uint64_t i = 0; i < 40; i++)
        assert_int_equal(kvt_observe_prefill(rig.ns, 500 + 100 * (i % 7), 0,
                                             (double)(500 + 100 * (i % 7)) * 2e-3),
                         0);
}

static struct kvt_plan ask(const struct chain *chain, size_t n, bool say_roots)
{
    struct kvt_plan plan = {.struct_size = sizeof(plan)};
    const struct kvt_plan_query query = {.struct_size = sizeof(query),
                                         .tiers = chain->tiers,
                                         .n = n,
                                         .roots = say_roots ? chain->roots : NULL};
    assert_int_equal(kvt_plan(rig.ns, &query, &plan), 0);
    return plan;
}

static void load(const struct chain *chain, const struct kvt_plan *plan)
{
    const struct kvt_load_opts opts = {.struct_size = sizeof(opts),
                                       .deadline_ns = (int64_t)(plan->deadline_s * 1e9) + 1};
    uint32_t ids[N];
    struct kvt_req *req;
    for (uint32_t i = 0; i < N; i++)
        ids[i] = i;
    assert_int_equal(
        kvt_load(rig.ns, rig.pool, &chain->keys[plan->first], ids, plan->count, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    kvt_req_free(req);
}

/* One prompt, as an engine has it. Returns the plan's reason. */
static int prompt(const struct chain *chain)
{
    struct kvt_plan plan = ask(chain, N, true);
    if (plan.count > 0)
        load(chain, &plan);
    return plan.reason;
}

/* Prompts of both chains in turn until those of `changing` are loaded whole, or are not. Those of
 * the other one are loaded whole all the time. Returns loads of it. */
static int loads_until(const struct chain *changing, const struct chain *other, bool whole)
{
    int loads = 0;
    for (int i = 0; i < 4000 && loads <= 20; i++) {
        int reason = prompt(changing);
        if ((reason == KVT_PLAN_LOAD) == whole)
            return loads;
        loads += reason != KVT_PLAN_RECOMPUTE;
        if (i % 16 == 0)
            assert_int_equal(prompt(other), KVT_PLAN_LOAD);
    }
    return -1;
}

static void set_rate(const struct chain *chain, uint64_t bytes_per_s)
{
    atomic_store(&speeds[chain->roots[0]].bytes_per_s, bytes_per_s);
}

static void a_slow_root_is_told_from_a_fast_one(void **state)
{
    (void)state;
    open_two("dram=0,staging=4MiB");
    struct chain both = chains[0];
    tell();
    for (int i = 0; i < 8; i++)
        for (int c = 0; c < 2; c++)
            (void)prompt(&chains[c]);
    assert_int_equal(prompt(&chains[0]), KVT_PLAN_LOAD);
    set_rate(&chains[1], FAST / 20);
    int down = loads_until(&chains[1], &chains[0], false);
    assert_true(down > 0);
    assert_int_equal(prompt(&chains[0]), KVT_PLAN_LOAD);
    /* a prompt that begins on the fast one */
    memcpy(&both.roots[N / 2], chains[1].roots, N / 2);
    struct kvt_plan plan = ask(&both, N, true);
    assert_int_equal(plan.first, 0);
    assert_true(plan.count >= N / 2 && plan.count < N); /* and a probe, perhaps */
    /* who does not say which root has what gets a plan, too */
    plan = ask(&chains[0], N, false);
    assert_true(plan.load_all_s > ask(&chains[0], N, true).load_all_s);
    assert_true(rig_stat(&rig, "plan.root0_loads") > 8 && rig_stat(&rig, "plan.root1_loads") > 8);
    set_rate(&chains[1], FAST);
    int up = loads_until(&chains[1], &chains[0], true);
    printf("a root 20 times slower is planned by after %d loads, its recovery after %d\n", down,
           up);
    assert_true(up >= 0);
}

static void what_each_root_does_is_kept(void **state)
{
    (void)state;
    char file[200];
    struct stat st;
    open_two("dram=0,staging=4MiB");
    tell();
    set_rate(&chains[1], FAST / 20);
    for (int i = 0; i < 8; i++)
        (void)prompt(&chains[0]);
    assert_true(loads_until(&chains[1], &chains[0], false) >= 0);
    double slow = ask(&chains[1], N, true).load_all_s, fast = ask(&chains[0], N, true).load_all_s;
    assert_true(slow > 2 * fast);
    rig_reopen(&rig);
    assert_int_equal(rig_stat(&rig, "plan.file_read"), 1);
    assert_true(ask(&chains[1], N, true).load_all_s > 2 * ask(&chains[0], N, true).load_all_s);
    rig_close(&rig);
    /* in a file of one's own: the one in the root is not looked at */
    (void)snprintf(file, sizeof(file), "%s/mine", other_dir);
    char options[300];
    (void)snprintf(options, sizeof(options), "dram=0,staging=4MiB,plan_file=%s", file);
    config_is(options);
    rig_open(&rig);
    assert_int_equal(rig_stat(&rig, "plan.file_read"), 0);
    tell();
    assert_int_not_equal(stat(file, &st), 0);
    rig_reopen(&rig);
    assert_int_equal(stat(file, &st), 0);
    assert_int_equal(rig_stat(&rig, "plan.file_read"), 1);
    rig_close(&rig);
    assert_int_equal(unlink(file), 0); /* or the directory would not go */
    config_is("dram=0,staging=4MiB");
    rig_open(&rig);
}

/* One load from both, which differ by a factor of four: both are learnt from it. */
static void a_load_over_both_tells_of_each(void **state)
{
    (void)state;
    open_two("dram=0,staging=4MiB");
    struct kvt_key keys[2 * N];
    uint32_t ids[2 * N];
    tell();
    set_rate(&chains[0], FAST * 2);
    set_rate(&chains[1], FAST / 2);
    for (uint32_t i = 0; i < 2 * N; i++) {
        keys[i] = chains[i % 2].keys[i / 2];
        ids[i] = i;
    }
    for (int i = 0; i < 12; i++) {
        const struct kvt_load_opts opts = {.struct_size = sizeof(opts), .deadline_ns = -1};
        struct kvt_req *req;
        assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, 2 * N, &opts, &req), 0);
        assert_int_equal(kvt_req_wait(req, -1), 1);
        kvt_req_free(req);
    }
    double fast = ask(&chains[0], N, true).load_all_s, slow = ask(&chains[1], N, true).load_all_s;
    printf("expected of the same bytes: %.3f s and %.3f s\n", fast, slow);
    assert_int_equal(rig_stat(&rig, "plan.root0_loads"), 12);
    assert_int_equal(rig_stat(&rig, "plan.root1_loads"), 12);
    assert_true(slow > 1.5 * fast);
}

/* Of callers from before roots, and of nonsense. */
static void structs_of_older_callers(void **state)
{
    (void)state;
    open_two("dram=0,staging=4MiB");
    struct kvt_plan plan = {.struct_size = sizeof(plan)};
    struct kvt_plan_query query = {.struct_size = KVT_PLAN_QUERY_SIZE_0,
                                   .tiers = chains[0].tiers,
                                   .n = N,
                                   .roots = (const uint8_t *)1}; /* not looked at */
    assert_int_equal(kvt_plan(rig.ns, &query, &plan), 0);
    assert_true(plan.load_all_s > 0);
    struct kvt_lookup_opts opts = {.struct_size = KVT_LOOKUP_OPTS_SIZE_1, .roots = (uint8_t *)1};
    assert_int_equal(kvt_lookup(rig.ns, chains[0].keys, N, &opts, NULL), N);
    uint8_t nonsense[N];
    memset(nonsense, 200, sizeof(nonsense)); /* no root has that number: cannot be loaded */
    query = (struct kvt_plan_query){
        .struct_size = sizeof(query), .tiers = chains[0].tiers, .n = N, .roots = nonsense};
    assert_int_equal(kvt_plan(rig.ns, &query, &plan), 0);
    assert_int_equal(plan.reason, KVT_PLAN_NO_BLOCKS);
}

/* Blocks in the shared tier are on none of the roots: who says nothing of roots gets the same plan
 * for them, wherever loads came from lately. */
static void the_shared_tier_is_no_root(void **state)
{
    (void)state;
    static const uint32_t lately[] = {KVT_TIER_DISK, KVT_TIER_DISK + KVT_PLAN_ROOT_REMOTE};
    open_two("dram=0,staging=4MiB");
    struct chain shared = chains[0];
    tell();
    for (uint32_t i = N / 2; i < N; i++)
        shared.tiers[i] = KVT_TIER_REMOTE;
    memset(shared.roots, 0, sizeof(shared.roots));
    for (size_t i = 0; i < KVT_ARRAY_LEN(lately); i++) {
        struct kvt_planning *planning = &rig.cache->planning;
        pthread_mutex_lock(&rig.cache->lock);
        memset(planning->share, 0, sizeof(planning->share));
        planning->share[lately[i]] = 1;
        planning->tiers[KVT_TIER_DISK + KVT_PLAN_ROOT_REMOTE].line[0].p = 7; /* seconds */
        pthread_mutex_unlock(&rig.cache->lock);
        double said = ask(&shared, N, true).load_all_s;
        assert_true(said > 7);
        assert_true(fabs(ask(&shared, N, false).load_all_s - said) < 1e-9);
    }
}

static void granted(struct kvt_req *req, uint8_t root, int status, uint32_t began, uint32_t ended)
{
    const struct kvt_msg_grant grant = {.msg.status = status,
                                        .record_bytes = 4096,
                                        .tier = KVT_TIER_DISK,
                                        .root = root,
                                        .began_us = began,
                                        .ended_us = ended};
    kvt_planning_grant(req, &grant);
}

/* Time is counted once however many reads are under way, and the clock may turn over. */
static void busy_is_while_a_read_is_under_way(void **state)
{
    (void)state;
    static struct kvt_req req;
    granted(&req, 3, 0, 100, 200);
    granted(&req, 3, 0, 110, 220); /* 20 more */
    granted(&req, 3, 0, 120, 180); /* none */
    granted(&req, 3, 0, 300, 350);
    assert_int_equal(req.roots[3].busy_us, 170);
    assert_int_equal(req.roots[3].blocks, 4);
    assert_int_equal(req.roots[3].bytes, 4 * 4096);
    granted(&req, 5, 0, UINT32_MAX - 9, 10);
    granted(&req, 5, 0, UINT32_MAX - 4, 30);
    assert_int_equal(req.roots[5].busy_us, 40);
    granted(&req, 5, KVT_E_DEADLINE, 0, 0);
    granted(&req, 5, KVT_E_MISS, 0, 0);
    assert_int_equal(req.roots[5].late, 1);
    assert_int_equal(req.roots[5].blocks, 2);
    granted(&req, KVT_PLAN_ROOTS, 0, 0, 1); /* a store that makes no sense */
    granted(&req, 255, 0, 0, 1);
    for (uint32_t i = 0; i < KVT_PLAN_ROOTS; i++)
        assert_true(i == 3 || i == 5 || req.roots[i].blocks == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_slow_root_is_told_from_a_fast_one, tear_down),
        cmocka_unit_test_teardown(what_each_root_does_is_kept, tear_down),
        cmocka_unit_test_teardown(a_load_over_both_tells_of_each, tear_down),
        cmocka_unit_test_teardown(structs_of_older_callers, tear_down),
        cmocka_unit_test_teardown(the_shared_tier_is_no_root, tear_down),
        cmocka_unit_test(busy_is_while_a_read_is_under_way),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
