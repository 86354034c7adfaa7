/* Memory that runs out in the middle of a whole life: open, store, flush, load, evict, purge,
 * close.
 *
 * Goal: whichever allocation fails, from the configuration to the end of kvt_close(), nothing
 * crashes or hangs, loads are exact or misses, and with memory again the root opens: what a flush
 * has acknowledged is there, exact. Method: a root with blocks is opened by configurations that
 * take different ways (engines, write policies, two roots, a new root, a small DRAM, scrubbing);
 * the N-th allocation fails, once or from then on, for N = 1, 2, ... until a life passes untouched
 * (support/alloc_fail.h; KVT_ALLOC_STEP=n: every n-th). Every 8th root is opened and read
 * afterwards. */
#include <stdbool.h>
#include <string.h>

#include "support/store_help.h"

#include "kvtier/error.h"
#include "support/alloc_fail.h"
#include "support/practice.h"
#include "support/small_store.h"

#define BLOCKS 24u
#define N_MAX 5000
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define STEP 5 /* every life takes ten times as long: the long form is KVT_ALLOC_STEP=1 */
#else
#define STEP 1
#endif

struct variant {
    const char *name;
    const char *options[4]; /* key=value */
    bool second_root, new_root;
    bool limits; /* the namespace says its own */
};

static const struct variant variants[] = {
    {"posix", {"io=posix"}, false, false},
    {"uring", {"io=uring"}, false, false},
    {"a new root", {"io=posix"}, false, true},
    {"two roots", {"io=posix"}, true, false},
    {"writes put off", {"io=posix", "write=evict"}, false, false},
    {"writes put off, two roots", {"io=posix", "write=evict"}, true, false},
    {"idle writes, scrub", {"io=posix", "write=idle", "scrub=64MiB"}, false, false},
    {"few descriptors", {"io=posix", "fds_max=64"}, false, false},
    {"more threads", {"io=posix", "threads=3"}, false, false},
    {"choice of an engine", {"io=auto"}, false, false},
    {"limits", {"io=posix", "ttl=1h", "ns_quota=8MiB"}, false, false, true},
};

static uint16_t pages[BLOCKS][SMALL_TOKENS][SMALL_DIM], before[BLOCKS][SMALL_TOKENS][SMALL_DIM];
static uint64_t lives, refused, acknowledged;

struct life {
    struct kvt_config *config;
    struct kvt_cache *cache;
    struct kvt_pool *pool;
    struct kvt_ns *ns;
    bool flushed;
};

static int configure(struct life *life, const struct small_store *store, const struct variant *v)
{
    char disk[400], option[64];
    int rc = kvt_config_new(&life->config);

    for (int i = 0; i < (v->second_root ? 2 : 1) && !rc; i++) {
        snprintf(disk, sizeof disk, "%s%s:64MiB", store->dir,
                 v->new_root ? "-new"
                 : i         ? "-second"
                             : "");
        rc = kvt_config_set(life->config, "disk", disk);
    }
    if (!rc)
        rc = kvt_config_set(life->config, "dram", "16MiB");
    if (!rc)
        rc = kvt_config_set(life->config, "disk_required", "yes");
    for (uint32_t i = 0; i < 4 && v->options[i] && !rc; i++) {
        char *value;

        snprintf(option, sizeof option, "%s", v->options[i]);
        value = strchr(option, '=');
        assert_non_null(value);
        *value++ = '\0';
        rc = kvt_config_set(life->config, option, value);
        assert_true(rc != KVT_E_CONFIG_KEY && rc != KVT_E_CONFIG_VALUE);
    }
    return rc;
}

static int begin(struct life *life, const struct small_store *store, const struct variant *v)
{
    static const struct kvt_part parts[] = {
        {.kind = KVT_PART_K, .dtype = KVT_DTYPE_BF16, .heads = 1, .head_dim = SMALL_DIM}};
    const struct kvt_part_place place = {pages, sizeof pages[0], sizeof pages[0],
                                         sizeof pages[0][0], 2};
    const struct kvt_layout layout = {sizeof layout, SMALL_TOKENS, 1, parts};
    const struct kvt_pool_desc desc = {sizeof desc, KVT_DEVICE_HOST, BLOCKS, 1, &place};
    const struct kvt_ns_limits limits = {sizeof limits, 4u << 20, INT64_C(600000000000)};
    struct kvt_identity who;
    char error[256];
    int rc = configure(life, store, v);

    kvt_identity_init(&who);
    who.engine = "test";
    who.key_scheme = KVT_KEY_SCHEME;
    who.model = "flow";
    if (!rc)
        rc = kvt_open(life->config, &life->cache, error, sizeof error);
    if (!rc)
        rc = kvt_pool_register(life->cache, &layout, &desc, &life->pool);
    if (!rc)
        rc = kvt_ns_open(life->cache, &who, &layout, &life->ns);
    if (!rc && v->limits)
        rc = kvt_ns_limit(life->ns, &limits);
    return rc;
}

static void fill_pages(void)
{
    for (uint32_t b = 0; b < BLOCKS; b++)
        for (uint32_t e = 0; e < SMALL_TOKENS * SMALL_DIM; e++)
            pages[b][e / SMALL_DIM][e % SMALL_DIM] = (uint16_t)(0x3c00 + (e * 37 + b * 11) % 512);
    memcpy(before, pages, sizeof pages);
}

static int wait_for(struct kvt_req *req)
{
    int rc = kvt_req_wait(req, -1);

    kvt_req_free(req);
    return rc < 0 ? rc : 0;
}

/* Load everything; what came is exact. Returns how many came. */
static uint32_t load_all(struct life *life, const struct small_store *store, int *rc)
{
    struct kvt_req_report report = {.struct_size = sizeof report};
    uint32_t ids[BLOCKS];
    struct kvt_req *req;

    for (uint32_t b = 0; b < BLOCKS; b++)
        ids[b] = b;
    memset(pages, 0xee, sizeof pages);
    *rc = kvt_load(life->ns, life->pool, store->keys[0], ids, BLOCKS, NULL, &req);
    if (*rc)
        return 0;
    (void)kvt_req_wait(req, -1);
    (void)kvt_req_report(req, &report);
    kvt_req_free(req);
    if (memcmp(pages, before, report.blocks_run_ok * sizeof pages[0]))
        fail_msg("other bytes were loaded");
    return (uint32_t)report.blocks_run_ok;
}

static int live(struct life *life, const struct small_store *store)
{
    const struct kvt_store_opts opts = {.struct_size = sizeof opts, .exact = 1};
    uint32_t ids[BLOCKS];
    struct kvt_req *req;
    int rc;

    for (uint32_t b = 0; b < BLOCKS; b++)
        ids[b] = b;
    fill_pages();
    rc = kvt_pool_reset_origin(life->pool, ids, BLOCKS);
    if (!rc)
        rc = kvt_store(life->ns, life->pool, store->keys[0], ids, BLOCKS, &opts, &req);
    if (!rc)
        rc = wait_for(req);
    if (!rc) {
        rc = kvt_flush(life->cache);
        life->flushed = rc == 0;
    }
    if (!rc)
        (void)load_all(life, store, &rc);
    if (!rc) {
        long purged = kvt_purge(life->ns, store->keys[0] + BLOCKS - 2, 2);

        rc = purged < 0 ? (int)purged : 0;
    }
    return rc;
}

static void end(struct life *life)
{
    if (life->pool)
        kvt_pool_unregister(life->pool);
    if (life->ns)
        kvt_ns_close(life->ns);
    if (life->cache)
        kvt_close(life->cache);
    kvt_config_free(life->config);
}

/* With memory: the root opens, and what was flushed is there, but for the last two. */
static void look_again(const struct small_store *store, const struct variant *v, bool flushed)
{
    struct life life = {0};
    uint32_t there;
    int rc;

    assert_int_equal(begin(&life, store, v), 0);
    there = load_all(&life, store, &rc);
    assert_int_equal(rc, 0);
    if (flushed && there < BLOCKS - 2)
        fail_msg("%s: %u of %u flushed blocks are left", v->name, there, BLOCKS - 2);
    acknowledged += flushed;
    end(&life);
}

static void forget_new_roots(const struct small_store *store)
{
    char path[320];

    snprintf(path, sizeof path, "%s-new", store->dir);
    small_store_remove(path);
}

static void every_allocation(const struct small_store *store, const struct variant *v, int sticky)
{
    const char *text = getenv("KVT_ALLOC_STEP");
    long step = text ? strtol(text, NULL, 10) : STEP;

    for (long n = 1;; n += step > 0 ? step : 1) {
        struct life life = {0};
        int rc, failed;

        assert_true(n < N_MAX);
        practice_point();
        alloc_fail_arm(n, sticky);
        rc = begin(&life, store, v);
        if (!rc)
            rc = live(&life, store);
        end(&life);
        failed = alloc_fail_disarm();
        lives++;
        refused += rc != 0;
        assert_true(failed || rc == 0);
        if (lives % 8 == 0 || !failed)
            look_again(store, v, life.flushed);
        if (v->new_root)
            forget_new_roots(store);
        practice_passed();
        if (!failed)
            return;
    }
}

static void test_every_allocation_of_a_life(void **state)
{
    struct small_store store;
    char path[320];

    (void)state;
    small_store_init(&store);
    small_store_open(&store);
    small_store_put(&store, 0, 40, 1);
    small_store_close(&store);
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        uint64_t lives_before = lives;

        every_allocation(&store, &variants[i], 0);
        every_allocation(&store, &variants[i], 1);
        print_message("           %s: %llu lives\n", variants[i].name,
                      (unsigned long long)(lives - lives_before));
    }
    snprintf(path, sizeof path, "%s-second", store.dir);
    small_store_remove(path);
    small_store_open(&store);
    assert_int_equal(small_store_get(&store, 0, 40), 40);
    small_store_done(&store);
    print_message("           %llu refused, %llu flushes acknowledged and looked at\n",
                  (unsigned long long)refused, (unsigned long long)acknowledged);
    assert_true(getenv("KVT_ALLOC_STEP") || lives >= 2000 / STEP);
    assert_true(getenv("KVT_ALLOC_STEP") || (refused >= 500 / STEP && acknowledged >= 20));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_allocation_of_a_life),
    };

    practice_begin("alloc_fail");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
