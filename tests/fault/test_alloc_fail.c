/* Memory that runs out: at every single allocation of opening and closing a cache.
 *
 * Goal: configuration, kvt_open() with a root, kvt_ns_open(), kvt_ns_limit(), kvt_pool_register(),
 * kvt_session_mgr_open(), kvt_session_open(), kvt_session_resume(), of one group and of three (full
 * attention, a window, states): whichever allocation fails, the call says so (or goes
 * on without what it wanted the memory for), nothing crashes, nothing leaks (the address
 * sanitizer's build looks), and the next attempt with memory works and finds the exact bytes of
 * before. Method: the linker puts the functions below before malloc() and the others; the N-th call
 * from the start of an attempt on fails, once or from then on, for N = 1, 2, ... until an attempt
 * passes untouched. What OpenSSL and the C library take for themselves is not counted. */
#include <errno.h>
#include <string.h>

#include "support/store_help.h"

#include "support/alloc_fail.h"
#include "support/practice.h"
#include "support/small_store.h"

enum { GROUPS = 3, PAGES = 12 };
static uint16_t pages[GROUPS][PAGES][16][64];
static int failed_once;

static int sessions(struct kvt_ns *ns, struct kvt_pool *pool, struct kvt_session_mgr **mgr)
{
    struct kvt_session_mgr_opts opts = {
        .struct_size = sizeof opts, .sessions_max = 4, .tokens_max = 64, .blocks_max = 64};
    uint32_t tokens[40];
    kvt_session_id session;
    int rc = kvt_session_mgr_open(ns, pool, &opts, mgr);

    for (uint32_t i = 0; i < 40; i++)
        tokens[i] = i;
    if (!rc)
        rc = kvt_session_open(*mgr, "salt", 4, &session);
    return rc ? rc : kvt_session_resume(*mgr, session, tokens, 40, NULL, NULL);
}

/* All of it, giving up at the first error. 0, or the error. groups: 1, or GROUPS. */
static int attempt(const char *dir, uint32_t groups)
{
    static const struct kvt_part parts[GROUPS] = {
        {.kind = KVT_PART_K, .dtype = KVT_DTYPE_BF16, .heads = 1, .head_dim = 64},
        {.kind = KVT_PART_K, .dtype = KVT_DTYPE_BF16, .heads = 1, .head_dim = 64, .group = 5},
        {.kind = KVT_PART_OPAQUE, .dtype = KVT_DTYPE_BF16, .heads = 1, .head_dim = 64, .group = 9}};
    static const struct kvt_group kinds[GROUPS] = {
        {.group = 0},
        {.group = 5, .kind = KVT_GROUP_WINDOW, .window_tokens = 32},
        {.group = 9, .kind = KVT_GROUP_STATE}};
    const struct kvt_ns_limits limits = {sizeof limits, 4u << 20, INT64_C(600000000000)};
    struct kvt_part_place places[GROUPS];
    const struct kvt_layout layout = {sizeof layout,           16,   groups, parts,
                                      groups > 1 ? groups : 0, kinds};
    const struct kvt_pool_desc desc = {sizeof desc, KVT_DEVICE_HOST, PAGES, groups, places};
    struct kvt_config *config = NULL;
    struct kvt_cache *cache = NULL;
    struct kvt_ns *ns = NULL;
    struct kvt_pool *pool = NULL;
    struct kvt_session_mgr *mgr = NULL;
    struct kvt_identity who;
    char disk[400], error[256] = "";
    int rc = kvt_config_new(&config);

    for (uint32_t i = 0; i < groups; i++)
        places[i] = (struct kvt_part_place){pages[i], sizeof pages[0][0], sizeof pages[0][0],
                                            sizeof pages[0][0][0], 2};
    snprintf(disk, sizeof disk, "%s:64MiB", dir);
    kvt_identity_init(&who);
    who.engine = "test";
    who.key_scheme = KVT_KEY_SCHEME;
    who.model = "other";
    if (!rc)
        rc = kvt_config_set(config, "dram", "16MiB");
    if (!rc)
        rc = kvt_config_set(config, "disk", disk);
    if (!rc)
        rc = kvt_config_set(config, "disk_required", "yes");
    if (!rc)
        rc = kvt_config_set(config, "io", "posix");
    if (!rc)
        rc = kvt_open(config, &cache, error, sizeof error);
    if (!rc)
        rc = kvt_pool_register(cache, &layout, &desc, &pool);
    if (!rc)
        rc = kvt_ns_open(cache, &who, &layout, &ns);
    if (!rc)
        rc = kvt_ns_limit(ns, &limits);
    if (!rc)
        rc = sessions(ns, pool, &mgr);
    failed_once =
        alloc_fail_disarm(); /* closing is not asked to do without: test_alloc_fail_flows */
    if (mgr)
        kvt_session_mgr_close(mgr);
    if (pool)
        kvt_pool_unregister(pool);
    if (ns)
        kvt_ns_close(ns);
    if (cache)
        kvt_close(cache);
    kvt_config_free(config);
    return rc;
}

static uint64_t tried, refused;

static void every_allocation(struct small_store *store, uint32_t groups, int from_then_on)
{
    for (long n = 1;; n++) {
        int rc;

        assert_true(n < 5000);
        alloc_fail_arm(n, from_then_on);
        rc = attempt(store->dir, groups);
        if (!failed_once) {
            assert_int_equal(rc, 0);
            return;
        }
        tried++;
        practice_add(1, 0);
        refused += rc != 0;
        assert_true(rc <= 0);
        if (n % 16 == 0) { /* with memory again: all is there */
            small_store_open(store);
            assert_int_equal(small_store_get(store, 0, 40), 40);
            small_store_close(store);
        }
    }
}

static void test_every_allocation_of_an_open(void **state)
{
    struct small_store store;

    (void)state;
    small_store_init(&store);
    small_store_open(&store);
    small_store_put(&store, 0, 40, 1);
    small_store_close(&store);
    every_allocation(&store, 1, 0);
    every_allocation(&store, 1, 1);
    every_allocation(&store, GROUPS, 0);
    small_store_open(&store);
    assert_int_equal(small_store_get(&store, 0, 40), 40);
    small_store_done(&store);
    assert_true(tried >= 50 && refused >= 40);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_allocation_of_an_open),
    };

    practice_begin("alloc_fail");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
