/* Ranks of one engine over one daemon, and who holds how much.
 *
 * Goal:   a prefix counts as there when every rank's part of it is; a process without a pool can
 * ask; blocks that all ranks hold alike are stored once; caps are totals, shown per namespace and
 *         rank.
 * Method: ranks are rigs of this process with keys of their own shard; what the tool prints is read
 *         as JSON.
 */
#include "support/rig.h"

#include <jansson.h>
#include <string.h>
#include <unistd.h>

#include "support/daemon_rig.h"
#include "support/run_tool.h"

enum { RANKS = 4, BLOCKS = 10, LARGE = 40 };

static struct daemon server;
static struct rig ranks[RANKS], scheduler;

static int tear_down(void **state)
{
    (void)state;
    for (int i = 0; i <= RANKS; i++) {
        struct rig *rig = i < RANKS ? &ranks[i] : &scheduler;

        rig_close(rig);
        rig_free(rig);
        memset(rig, 0, sizeof(*rig));
    }
    daemon_free(&server);
    return 0;
}

static void begin(const char *options, const struct rig_shape *shape)
{
    daemon_init(&server, options);
    daemon_start(&server);
    for (int i = 0; i < RANKS; i++) {
        rig_init(&ranks[i], shape, server.config, NULL);
        ranks[i].identity.tp_size = RANKS;
        rig_open(&ranks[i]);
    }
    /* A process without any pool. */
    rig_init(&scheduler, shape, server.config, NULL);
    scheduler.identity.tp_size = RANKS;
    assert_int_equal(rig_try_open(&scheduler), 0);
    assert_int_equal(
        kvt_ns_open(scheduler.cache, &scheduler.identity, &scheduler.layout, &scheduler.ns), 0);
}

static struct kvt_key key_of(uint64_t seed, uint32_t shard)
{
    struct kvt_key key = rig_key(seed);

    key.shard = shard;
    return key;
}

/* Store or load blocks seed, seed + 1, ... of a rank; the number of those that are there then. */
static size_t move(struct rig *rig, bool store, uint64_t seed, uint32_t n, uint32_t shard)
{
    struct kvt_store_opts opts = {.struct_size = sizeof(opts), .exact = 1};
    struct kvt_req_report report = {.struct_size = sizeof(report)};
    struct kvt_key keys[LARGE];
    uint32_t ids[LARGE];
    struct kvt_req *req;

    assert_true(n <= LARGE);
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = key_of(seed + i, shard);
        ids[i] = i;
        if (store)
            rig_fill(rig, i, 1000 * shard + seed + i);
        else
            rig_poison(rig, i, 0xa5);
    }
    if (store)
        assert_int_equal(kvt_pool_reset_origin(rig->pool, ids, n), 0);
    assert_int_equal(store ? kvt_store(rig->ns, rig->pool, keys, ids, n, &opts, &req)
                           : kvt_load(rig->ns, rig->pool, keys, ids, n, NULL, &req),
                     0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    assert_int_equal(kvt_req_report(req, &report), 0);
    for (uint32_t i = 0; !store && i < n; i++) {
        if (kvt_req_status(req, NULL)[i] == 0)
            assert_true(rig_same(rig, i, 1000 * shard + seed + i));
        else
            assert_true(rig_poisoned(rig, i, 0xa5));
    }
    kvt_req_free(req);
    return report.blocks_ok;
}

static long ask_all(struct rig *rig, uint64_t seed, uint32_t n, uint32_t shards,
                    enum kvt_tier *tiers)
{
    const struct kvt_lookup_opts opts = {.struct_size = sizeof(opts), .shards = shards};
    struct kvt_key *keys = calloc(n, sizeof(*keys));
    long found;

    assert_non_null(keys);
    for (uint32_t i = 0; i < n; i++)
        keys[i] = key_of(seed + i, 0);
    found = kvt_lookup(rig->ns, keys, n, &opts, tiers);
    free(keys);
    return found;
}

static void test_c57_all_ranks_get_what_the_shortest_has(void **state)
{
    static const uint32_t lengths[RANKS] = {10, 10, 7, 10};
    const struct rig_shape shape = rig_shape_small(LARGE);
    enum kvt_tier tiers[BLOCKS];

    (void)state;
    begin("--dram 16MiB", &shape);
    assert_int_equal(ask_all(&scheduler, 1, BLOCKS, RANKS, tiers), 0);
    for (uint32_t i = 0; i < RANKS; i++)
        assert_int_equal(move(&ranks[i], true, 1, lengths[i], i), lengths[i]);
    assert_int_equal(ask_all(&scheduler, 1, BLOCKS, RANKS, tiers), 7);
    for (int i = 0; i < BLOCKS; i++)
        assert_int_equal(tiers[i], i < 7 ? KVT_TIER_DRAM : KVT_TIER_MISS);
    for (uint32_t i = 0; i < RANKS; i++) {
        assert_int_equal(ask_all(&ranks[i], 1, BLOCKS, RANKS, NULL), 7);
        assert_int_equal(move(&ranks[i], false, 1, 7, i), 7);
    }
    /* Each rank alone still has what it has; three of four ranks have ten. */
    assert_int_equal(ask_all(&scheduler, 1, BLOCKS, 2, NULL), 10);
    assert_int_equal(ask_all(&scheduler, 1, BLOCKS, 0, NULL), 10);
    assert_int_equal(move(&ranks[2], true, 1, 10, 2), 10);
    assert_int_equal(ask_all(&scheduler, 1, BLOCKS, RANKS, tiers), 10);
}

/* Chains that take several messages, and one rank that ends at a border of messages. */
static void long_prefixes_over_many_ranks(void **state)
{
    const struct rig_shape shape = rig_shape_small(LARGE);
    enum kvt_tier tiers[LARGE];

    (void)state;
    begin("--dram 64MiB", &shape);
    for (uint32_t rank = 0; rank < 64; rank++)
        assert_int_equal(move(&ranks[rank % RANKS], true, 1, rank == 9 ? 32 : LARGE, rank),
                         rank == 9 ? 32 : LARGE);
    for (uint32_t n = 1; n <= LARGE; n++) /* 16 blocks of 64 ranks to a message */
        assert_int_equal(ask_all(&scheduler, 1, n, 64, tiers), n < 32 ? n : 32);
    assert_int_equal(ask_all(&scheduler, 1, LARGE, 65, NULL), 0);
    assert_int_equal(ask_all(&scheduler, 1, LARGE, 257, NULL), KVT_E_INVAL);
    struct kvt_key key = key_of(1, 3); /* names a part, not the block */
    const struct kvt_lookup_opts opts = {.struct_size = sizeof(opts), .shards = RANKS};
    assert_int_equal(kvt_lookup(scheduler.ns, &key, 1, &opts, NULL), KVT_E_INVAL);
}

static void the_slowest_part_is_the_tier_of_a_block(void **state)
{
    const struct rig_shape shape = rig_shape_small(LARGE);
    enum kvt_tier tiers[BLOCKS];

    (void)state;
    begin("--dram 16MiB --disk {store}:64MiB", &shape);
    assert_int_equal(move(&ranks[0], true, 1, BLOCKS, 0), BLOCKS);
    assert_int_equal(kvt_flush(ranks[0].cache), 0);
    for (int i = 0; i < RANKS; i++)
        rig_close(&ranks[i]);
    rig_close(&scheduler);
    assert_int_equal(daemon_stop(&server), 0);
    daemon_start(&server);
    for (int i = 0; i < RANKS; i++)
        rig_open(&ranks[i]);
    for (uint32_t i = 1; i < RANKS; i++)
        assert_int_equal(move(&ranks[i], true, 1, BLOCKS, i), BLOCKS);
    assert_int_equal(ask_all(&ranks[0], 1, BLOCKS, RANKS, tiers), BLOCKS);
    for (int i = 0; i < BLOCKS; i++)
        assert_int_equal(tiers[i], KVT_TIER_DISK); /* rank 0's part */
}

/* MLA: every rank holds the same latent, with shard 0. */
static void what_all_ranks_hold_alike_is_stored_once(void **state)
{
    const struct rig_shape shape = rig_shape_small(LARGE);

    (void)state;
    begin("--dram 16MiB --disk {store}:64MiB", &shape);
    for (uint32_t i = 0; i < RANKS; i++)
        assert_int_equal(move(&ranks[i], true, 1, BLOCKS, 0), BLOCKS);
    assert_int_equal(daemon_stat(&server, "store.committed"), BLOCKS);
    assert_int_equal(daemon_stat(&server, "index.blocks"), BLOCKS);
    assert_int_equal(kvt_flush(ranks[0].cache), 0);
    assert_int_equal(daemon_stat(&server, "disk.written_blocks"), BLOCKS);
    for (uint32_t i = 0; i < RANKS; i++)
        assert_int_equal(move(&ranks[i], false, 1, BLOCKS, 0), BLOCKS);
}

/* Store a whole chain; what finds DRAM full of blocks on their way to disk is tried again. */
static void fill(struct rig *rig, uint64_t seed, uint32_t shard)
{
    for (int tries = 0; tries < 50 && move(rig, true, seed, LARGE, shard) < LARGE; tries++)
        (void)kvt_flush(rig->cache);
}

static json_int_t number(const json_t *object, const char *name)
{
    return json_integer_value(json_object_get(object, name));
}

static void test_c30_caps_are_totals_and_shown_per_rank(void **state)
{
    const struct rig_shape shape = rig_shape_large(LARGE);
    static struct tool_run run;
    char socket[200];
    json_int_t dram = 0, disk = 0;
    json_t *row;
    size_t i;

    (void)state;
    begin("--dram 24MiB --disk {store}:76MiB", &shape);
    for (uint64_t chain = 0; chain < 4; chain++)
        for (uint32_t rank = 0; rank < RANKS; rank++)
            fill(&ranks[rank], 1 + 100 * chain, rank);
    snprintf(socket, sizeof(socket), "unix:%s", server.socket);
    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", "stat", socket, "--json", NULL}, NULL,
             NULL);
    assert_int_equal(run.code, 0);
    json_t *out = json_loads(run.out, 0, NULL);
    assert_non_null(out);
    if (json_array_size(json_object_get(out, "usage")) != RANKS)
        fail_msg("%s", run.out);
    json_array_foreach(json_object_get(out, "usage"), i, row)
    {
        assert_int_equal(number(row, "rank"), i);
        assert_true(number(row, "dram_bytes") + number(row, "disk_bytes") > 0);
        dram += number(row, "dram_bytes");
        disk += number(row, "disk_bytes");
    }
    const json_t *total = json_object_get(out, "total"), *counters;
    counters = json_object_get(out, "counters");
    assert_int_equal(number(total, "dram_bytes"), dram);
    assert_int_equal(number(total, "disk_bytes"), disk);
    assert_true(dram <= 24 << 20 && disk <= 76 << 20);
    assert_true(number(counters, "disk.bytes_used") <= 76 << 20);
    assert_int_equal(json_array_size(json_object_get(out, "clients")), RANKS + 1);
    json_decref(out);

    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", "stat", socket, NULL}, NULL, NULL);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "rank 3"));
    assert_non_null(strstr(run.out, "in records of 24.0 MiB"));
    assert_non_null(strstr(run.out, "is it working?\n  ok    kvtierd, process "));
    assert_non_null(strstr(run.out, "is it paying?\n  note  no key has been looked up yet"));
    assert_non_null(strstr(run.out, "is the data safe?\n  ok    no record failed to verify"));
    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", "top", socket, "--once", NULL}, NULL,
             NULL);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "looked up (questions: "));
    assert_int_equal(daemon_stop(&server), 0);
    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", "stat", socket, NULL}, NULL, NULL);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "no kvtierd at"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_c57_all_ranks_get_what_the_shortest_has, tear_down),
        cmocka_unit_test_teardown(long_prefixes_over_many_ranks, tear_down),
        cmocka_unit_test_teardown(the_slowest_part_is_the_tier_of_a_block, tear_down),
        cmocka_unit_test_teardown(what_all_ranks_hold_alike_is_stored_once, tear_down),
        cmocka_unit_test_teardown(test_c30_caps_are_totals_and_shown_per_rank, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
