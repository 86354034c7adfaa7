/* Level maps through the public API: excluded layers (the rest of C73), minimum levels, replacing,
 * origin of pages, other settings after a restart, ids that run out.
 *
 * Method: pages of Gaussian K and V over three layers; after a load the parts of excluded layers
 * must be the bytes that were stored and the others must not be (they were coded).
 */
#include "support/rig.h"

#include <fcntl.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checked.h"
#include "client/client.h"

#define LAYERS 4u
#define BLOCKS 6u

static struct rig rig;

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

static void start(const char *config, const char *disk_cap)
{
    struct rig_shape shape = {.layers = LAYERS,
                              .heads = 2,
                              .dim = 64,
                              .tokens = 32,
                              .pages = 4 * BLOCKS,
                              .dtype = KVT_DTYPE_BF16};
    rig_init(&rig, &shape, config, disk_cap);
    rig_open(&rig);
}

/* Store blocks seed, ... out of pages 0.. at a level, as the middle of a sequence whose first block
 * is seed - 1 (raw, page 3 * BLOCKS). */
static void store(uint64_t seed, int level, int32_t *status)
{
    struct kvt_key keys[BLOCKS], first = rig_key(seed - 1);
    uint32_t ids[BLOCKS], first_page = 3 * BLOCKS;
    struct kvt_req *req;
    for (uint32_t i = 0; i < BLOCKS; i++) {
        keys[i] = rig_key(seed + i);
        ids[i] = i;
        rig_fill_smooth(&rig, i, seed + i);
    }
    rig_fill_smooth(&rig, first_page, seed - 1);
    assert_int_equal(kvt_pool_reset_origin(rig.pool, ids, BLOCKS), 0);
    assert_int_equal(kvt_store(rig.ns, rig.pool, &first, &first_page, 1, NULL, &req), 0);
    kvt_req_free(req);
    struct kvt_store_opts opts = {.struct_size = sizeof(opts),
                                  .parent = &first,
                                  .first_pos = rig.shape.tokens,
                                  .level = level};
    assert_int_equal(kvt_store(rig.ns, rig.pool, keys, ids, BLOCKS, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    for (uint32_t i = 0; i < BLOCKS; i++)
        status[i] = kvt_req_status(req, NULL)[i];
    kvt_req_free(req);
}

static size_t load(uint64_t seed, uint32_t page, int min_level, int32_t *status)
{
    struct kvt_key keys[BLOCKS];
    uint32_t ids[BLOCKS];
    struct kvt_req *req;
    size_t good = 0;
    for (uint32_t i = 0; i < BLOCKS; i++) {
        keys[i] = rig_key(seed + i);
        ids[i] = page + i;
        rig_poison(&rig, ids[i], 0xcd);
    }
    struct kvt_load_opts opts = {.struct_size = sizeof(opts), .min_level = min_level};
    assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, BLOCKS, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        good += kvt_req_status(req, NULL)[i] == 0;
        if (status != NULL)
            status[i] = kvt_req_status(req, NULL)[i];
    }
    kvt_req_free(req);
    return good;
}

static long lookup(uint64_t seed, int min_level)
{
    struct kvt_key keys[BLOCKS];
    struct kvt_lookup_opts opts = {.struct_size = sizeof(opts), .min_level = min_level};
    for (uint32_t i = 0; i < BLOCKS; i++)
        keys[i] = rig_key(seed + i);
    return kvt_lookup(rig.ns, keys, BLOCKS, &opts, NULL);
}

static bool part_same(uint32_t part, uint32_t page_a, uint32_t page_b)
{
    const struct kvt_part_place *place = &rig.places[part];
    const uint8_t *base = place->base;
    return memcmp(base + place->stride_block * page_a, base + place->stride_block * page_b,
                  (size_t)place->stride_block) == 0;
}

/* Pages 0.. were stored; pages BLOCKS.. were loaded. exact[layer]: what must be equal. */
static void check_layers(const bool exact[LAYERS])
{
    for (uint32_t i = 0; i < BLOCKS; i++)
        for (uint32_t part = 0; part < 2 * LAYERS; part++)
            assert_int_equal(part_same(part, i, BLOCKS + i), exact[rig.parts[part].layer]);
}

static void all_good(const int32_t *status)
{
    for (uint32_t i = 0; i < BLOCKS; i++)
        assert_int_equal(status[i], 0);
}

static void test_c73_layers_0_and_last_are_exact(void **state)
{
    static const bool exact[LAYERS] = {true, false, false, true};
    static const bool none[LAYERS] = {false, false, false, false};
    int32_t status[BLOCKS];
    (void)state;
    start("dram=8MiB,exclude_layers=0+last", NULL);
    store(100, KVT_LEVEL_DEFAULT, status);
    all_good(status);
    assert_int_equal(load(100, BLOCKS, 0, NULL), BLOCKS);
    check_layers(exact);
    /* Ten times from record to page and back changes nothing: pages of lossy origin stay away. */
    uint8_t *before = malloc(rig_block_bytes(&rig)), *after = malloc(rig_block_bytes(&rig));
    rig_page_bytes(&rig, BLOCKS, before);
    for (int round = 0; round < 10; round++) {
        assert_int_equal(load(100, BLOCKS, 0, NULL), BLOCKS);
        rig_page_bytes(&rig, BLOCKS, after);
        assert_memory_equal(before, after, rig_block_bytes(&rig));
    }
    free(before);
    free(after);
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    /* The test can fail: without the option nothing is exact. */
    start("dram=8MiB", NULL);
    store(100, KVT_LEVEL_DEFAULT, status);
    assert_int_equal(load(100, BLOCKS, 0, NULL), BLOCKS);
    check_layers(none);
}

static void ranges_count_and_all_layers_make_raw(void **state)
{
    static const bool some[LAYERS] = {false, true, true, false};
    static const bool all[LAYERS] = {true, true, true, true};
    int32_t status[BLOCKS];
    (void)state;
    start("dram=8MiB,exclude_layers=1-2", NULL);
    size_t uniform = rig.cache != NULL ? kvt_ns_record_bytes(rig.ns, 0, KVT_LEVEL_RAW) : 0;
    assert_true(kvt_ns_record_bytes(rig.ns, 0, KVT_LEVEL_KV4) < uniform);
    store(100, KVT_LEVEL_KV6, status);
    all_good(status);
    assert_int_equal(load(100, BLOCKS, 0, NULL), BLOCKS);
    check_layers(some);
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    start("dram=8MiB,exclude_layers=0-last", NULL);
    assert_int_equal(kvt_ns_record_bytes(rig.ns, 0, KVT_LEVEL_KV4), uniform);
    store(100, KVT_LEVEL_KV4, status);
    all_good(status);
    assert_int_equal(load(100, BLOCKS, KVT_LEVEL_RAW, NULL), BLOCKS); /* exact, and known to be */
    check_layers(all);
}

static void minimum_levels_hold_over_maps(void **state)
{
    int32_t status[BLOCKS];
    (void)state;
    start("dram=8MiB,exclude_layers=0", NULL);
    store(100, KVT_LEVEL_KV4, status);
    all_good(status);
    /* The level of a map is its lowest, however good the rest is. */
    assert_int_equal(lookup(100, KVT_LEVEL_KV4), BLOCKS);
    assert_int_equal(lookup(100, KVT_LEVEL_KV5), 0);
    uint64_t level_misses = rig_stat(&rig, "lookup.miss_level");
    assert_int_equal(lookup(100, KVT_LEVEL_KV6), 0);
    assert_int_equal(rig_stat(&rig, "lookup.miss_level"), level_misses + 1);
    assert_int_equal(load(100, BLOCKS, KVT_LEVEL_KV6, status), 0);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        assert_int_equal(status[i], KVT_E_MISS);
        assert_true(rig_poisoned(&rig, BLOCKS + i, 0xcd));
    }
    /* Stored again at the same level: there already. Higher: replaced. */
    store(100, KVT_LEVEL_KV4, status);
    for (uint32_t i = 0; i < BLOCKS; i++)
        assert_int_equal(status[i], KVT_E_EXISTS);
    store(100, KVT_LEVEL_KV8, status);
    all_good(status);
    assert_int_equal(lookup(100, KVT_LEVEL_KV8), BLOCKS);
    assert_int_equal(lookup(100, KVT_LEVEL_RAW), 0);
    store(100, KVT_LEVEL_KV4, status); /* never lowered by a store */
    for (uint32_t i = 0; i < BLOCKS; i++)
        assert_int_equal(status[i], KVT_E_EXISTS);
    assert_int_equal(load(100, BLOCKS, KVT_LEVEL_KV8, NULL), BLOCKS);
    store(100, KVT_LEVEL_RAW, status);
    all_good(status);
    assert_int_equal(load(100, BLOCKS, KVT_LEVEL_RAW, NULL), BLOCKS);
}

static void pages_remember_the_lowest_level_of_their_map(void **state)
{
    int32_t status[BLOCKS];
    struct kvt_req *req;
    struct kvt_key key = rig_key(100);
    uint32_t page = BLOCKS;
    (void)state;
    start("dram=8MiB,exclude_layers=0-2", NULL);
    store(100, KVT_LEVEL_KV4, status);
    assert_int_equal(load(100, BLOCKS, 0, NULL), BLOCKS);
    assert_true(kvt_purge(rig.ns, &key, 1) == 1);
    struct kvt_key first = rig_key(99);
    struct kvt_store_opts opts = {
        .struct_size = sizeof(opts), .parent = &first, .first_pos = 32, .exact = 1};
    assert_int_equal(kvt_store(rig.ns, rig.pool, &key, &page, 1, &opts, &req), 0);
    kvt_req_free(req);
    assert_int_equal(rig_stat(&rig, "store.reorigin"), 1);
    struct kvt_lookup_opts exact = {.struct_size = sizeof(exact), .min_level = KVT_LEVEL_RAW};
    assert_int_equal(kvt_lookup(rig.ns, &key, 1, &exact, NULL), 0);
    exact.min_level = KVT_LEVEL_KV8;
    assert_int_equal(kvt_lookup(rig.ns, &key, 1, &exact, NULL), 1);
}

/* A page of lossy origin may not pass for exact because the settings say raw everywhere. */
static void a_lossy_page_stays_lossy_where_all_is_raw(void **state)
{
    int32_t status[BLOCKS];
    struct kvt_req *req;
    struct kvt_key key = rig_key(100), first = rig_key(99);
    uint32_t page = BLOCKS;
    (void)state;
    start("dram=8MiB,exclude_layers=none", "64MiB");
    store(100, KVT_LEVEL_KV4, status);
    assert_int_equal(kvt_flush(rig.cache), 0);
    snprintf(rig.config, sizeof(rig.config), "dram=8MiB,exclude_layers=0-last");
    rig_reopen(&rig);
    assert_int_equal(load(100, BLOCKS, 0, NULL), BLOCKS);
    assert_true(kvt_purge(rig.ns, &key, 1) == 1);
    struct kvt_store_opts opts = {.struct_size = sizeof(opts), .parent = &first, .first_pos = 32};
    assert_int_equal(kvt_store(rig.ns, rig.pool, &key, &page, 1, &opts, &req), 0);
    kvt_req_free(req);
    struct kvt_lookup_opts exact = {.struct_size = sizeof(exact), .min_level = KVT_LEVEL_RAW};
    assert_int_equal(kvt_lookup(rig.ns, &key, 1, &exact, NULL), 0);
    assert_int_equal(kvt_lookup(rig.ns, &key, 1, NULL, NULL), 1);
}

/* Nor does a page of kv8 origin that is to cool, where the map of kv4 has come to raw. */
static void a_page_that_cools_does_not_become_raw(void **state)
{
    int32_t status[BLOCKS];
    struct kvt_req *req;
    struct kvt_key key = rig_key(100), first = rig_key(99);
    uint32_t page = BLOCKS;
    (void)state;
    start("dram=8MiB,exclude_layers=none", "64MiB");
    store(100, KVT_LEVEL_KV8, status);
    assert_int_equal(kvt_flush(rig.cache), 0);
    snprintf(rig.config, sizeof(rig.config), "dram=8MiB,exclude_layers=0-last");
    rig_reopen(&rig);
    assert_int_equal(load(100, BLOCKS, KVT_LEVEL_KV8, NULL), BLOCKS);
    assert_true(kvt_purge(rig.ns, &key, 1) == 1);
    struct kvt_store_opts opts = {.struct_size = sizeof(opts),
                                  .parent = &first,
                                  .first_pos = 32,
                                  .level = KVT_LEVEL_KV4,
                                  .cool = 1};
    assert_int_equal(kvt_store(rig.ns, rig.pool, &key, &page, 1, &opts, &req), 0);
    kvt_req_free(req);
    struct kvt_lookup_opts least = {.struct_size = sizeof(least), .min_level = KVT_LEVEL_RAW};
    assert_int_equal(kvt_lookup(rig.ns, &key, 1, &least, NULL), 0);
    least.min_level = KVT_LEVEL_KV8;
    assert_int_equal(kvt_lookup(rig.ns, &key, 1, &least, NULL), 1);
    assert_int_equal(rig_stat(&rig, "store.reorigin"), 1);
}

/* Records under other settings stay readable; ids are found again after a restart; when they run
 * out, blocks are stored raw: the layers asked for are exact, and it is counted. */
static void settings_may_change_between_runs(void **state)
{
    static const char *const lists[] = {"none", "0", "0+1", "0-2"};
    static const uint32_t exact_layers[] = {0, 1, 2, 3};
    int32_t status[BLOCKS];
    (void)state;
    start("dram=8MiB", "64MiB");
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < KVT_ARRAY_LEN(lists); i++) {
            rig_close(&rig);
            snprintf(rig.config, sizeof(rig.config), "dram=8MiB,exclude_layers=%s", lists[i]);
            rig_open(&rig);
            uint64_t seed = 1000 * (i + 1) + 100 * (uint64_t)round;
            store(seed, KVT_LEVEL_KV4, status);
            all_good(status);
            assert_int_equal(rig_stat(&rig, "store.map_full"), 0);
            assert_int_equal(kvt_flush(rig.cache), 0);
            for (uint32_t j = 0; j <= i; j++) { /* those of earlier runs as well */
                uint64_t other = 1000 * (j + 1) + 100 * (uint64_t)round;
                for (uint32_t b = 0; b < BLOCKS; b++)
                    rig_fill_smooth(&rig, b, other + b);
                assert_int_equal(load(other, BLOCKS, 0, NULL), BLOCKS);
                bool exact[LAYERS];
                for (uint32_t layer = 0; layer < LAYERS; layer++)
                    exact[layer] = layer < exact_layers[j];
                check_layers(exact);
            }
        }
    }
    rig_close(&rig); /* one layer is as long as another: no new id */
    snprintf(rig.config, sizeof(rig.config), "dram=8MiB,exclude_layers=last");
    rig_open(&rig);
    store(9000, KVT_LEVEL_KV4, status);
    all_good(status);
    assert_int_equal(rig_stat(&rig, "store.map_full"), 0);
}

/* Three lengths at kv4, two at kv5. */
static void ids_run_out_and_blocks_go_raw(void **state)
{
    static const char *const lists[] = {"0", "1", "2", "0+1", "3"};
    int32_t status[BLOCKS];
    uint64_t full = 0;
    (void)state;
    struct rig_shape shape = {.layers = LAYERS,
                              .heads = 2,
                              .dim = 64,
                              .tokens = 256,
                              .pages = 4 * BLOCKS,
                              .dtype = KVT_DTYPE_BF16};
    rig_init(&rig, &shape, "dram=64MiB", "256MiB");
    rig_open(&rig);
    for (uint32_t i = 0; i < KVT_ARRAY_LEN(lists); i++) {
        rig_close(&rig);
        snprintf(rig.config, sizeof(rig.config), "dram=64MiB,exclude_layers=%s", lists[i]);
        rig_open(&rig);
        store(1000 * (i + 1), KVT_LEVEL_KV4, status);
        all_good(status);
        store(1000 * (i + 1) + 100, KVT_LEVEL_KV5, status);
        all_good(status);
        full += rig_stat(&rig, "store.map_full");
        assert_int_equal(kvt_flush(rig.cache), 0);
    }
    assert_int_equal(full, 0); /* one and two layers: two lengths */
    rig_close(&rig);
    snprintf(rig.config, sizeof(rig.config), "dram=64MiB,exclude_layers=0-2");
    rig_open(&rig);
    store(7000, KVT_LEVEL_KV4, status); /* the third at kv4 */
    all_good(status);
    assert_int_equal(rig_stat(&rig, "store.map_full"), 0);
    store(7100, KVT_LEVEL_KV5, status); /* kv5 has two */
    all_good(status);
    assert_int_equal(rig_stat(&rig, "store.map_full"), BLOCKS);
    assert_int_equal(lookup(7100, KVT_LEVEL_RAW), BLOCKS);
    assert_int_equal(rig_stat(&rig, "client.bad_move"), 0);
}

/* golden/read_store.py, which shares no code with the library, takes every record. */
static void records_are_what_the_format_says(void **state)
{
    int32_t status[BLOCKS];
    int rc;
    (void)state;
    start("dram=8MiB,exclude_layers=1", "64MiB");
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_RAW; level++) {
        store(1000 * (uint64_t)level, level, status);
        all_good(status);
    }
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig_close(&rig);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        int null = open("/dev/null", O_WRONLY);
        const char *const argv[] = {"python3", KVT_GOLDEN_DIR "/read_store.py", rig.dir, NULL};
        dup2(null, 1);
        unsetenv("LD_PRELOAD");
        execvp(argv[0], (char *const *)(uintptr_t)argv);
        _exit(77);
    }
    assert_int_equal(waitpid(child, &rc, 0), child);
    assert_true(WIFEXITED(rc));
    if (WEXITSTATUS(rc) == 77)
        skip();
    assert_int_equal(WEXITSTATUS(rc), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_c73_layers_0_and_last_are_exact, tear_down),
        cmocka_unit_test_teardown(ranges_count_and_all_layers_make_raw, tear_down),
        cmocka_unit_test_teardown(minimum_levels_hold_over_maps, tear_down),
        cmocka_unit_test_teardown(pages_remember_the_lowest_level_of_their_map, tear_down),
        cmocka_unit_test_teardown(a_lossy_page_stays_lossy_where_all_is_raw, tear_down),
        cmocka_unit_test_teardown(a_page_that_cools_does_not_become_raw, tear_down),
        cmocka_unit_test_teardown(settings_may_change_between_runs, tear_down),
        cmocka_unit_test_teardown(ids_run_out_and_blocks_go_raw, tear_down),
        cmocka_unit_test_teardown(records_are_what_the_format_says, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
