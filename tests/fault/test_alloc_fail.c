/* Memory that runs out: at every single allocation of opening and closing a cache.
 *
 * Goal: configuration, kvt_open() with a root, kvt_ns_open(), kvt_pool_register(),
 * kvt_session_mgr_open(), kvt_session_open(): whichever allocation fails, the call says so (or goes
 * on without what it wanted the memory for), nothing crashes, nothing leaks (the address
 * sanitizer's build looks), and the next attempt with memory works and finds the exact bytes of
 * before. Method: the linker puts the functions below before malloc() and the others; the N-th call
 * from the start of an attempt on fails, once or from then on, for N = 1, 2, ... until an attempt
 * passes untouched. What OpenSSL and the C library take for themselves is not counted. */
#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "support/store_help.h"

#include "support/small_store.h"

static atomic_long countdown; /* allocations until it fails; 0 and less: see sticky */
static atomic_int armed, sticky, failed_once;

static int fails(void)
{
    long left;

    if (!atomic_load_explicit(&armed, memory_order_relaxed))
        return 0;
    left = atomic_fetch_sub_explicit(&countdown, 1, memory_order_relaxed);
    if (left > 1 || (left < 1 && !atomic_load_explicit(&sticky, memory_order_relaxed)))
        return 0;
    atomic_store_explicit(&failed_once, 1, memory_order_relaxed);
    errno = ENOMEM;
    return 1;
}

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *old, size_t bytes);
void *__real_aligned_alloc(size_t align, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *old, size_t bytes);
void *__wrap_aligned_alloc(size_t align, size_t bytes);
char *__wrap_strdup(const char *text);

void *__wrap_malloc(size_t bytes)
{
    return fails() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return fails() ? NULL : __real_calloc(count, bytes);
}

void *__wrap_realloc(void *old, size_t bytes)
{
    return fails() ? NULL : __real_realloc(old, bytes);
}

void *__wrap_aligned_alloc(size_t align, size_t bytes)
{
    return fails() ? NULL : __real_aligned_alloc(align, bytes);
}

char *__wrap_strdup(const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = fails() ? NULL : __real_malloc(bytes);

    return copy ? memcpy(copy, text, bytes) : NULL;
}

static uint16_t pages[4][16][64];

/* All of it, giving up at the first error. 0, or the error. */
static int attempt(const char *dir)
{
    static const struct kvt_part parts[1] = {
        {.kind = KVT_PART_K, .dtype = KVT_DTYPE_BF16, .heads = 1, .head_dim = 64}};
    const struct kvt_part_place place = {pages, sizeof pages[0], sizeof pages[0],
                                         sizeof pages[0][0], 2};
    const struct kvt_layout layout = {sizeof layout, 16, 1, parts};
    const struct kvt_pool_desc desc = {sizeof desc, KVT_DEVICE_HOST, 4, 1, &place};
    struct kvt_session_mgr_opts opts = {
        .struct_size = sizeof opts, .sessions_max = 4, .tokens_max = 64, .blocks_max = 64};
    struct kvt_config *config = NULL;
    struct kvt_cache *cache = NULL;
    struct kvt_ns *ns = NULL;
    struct kvt_pool *pool = NULL;
    struct kvt_session_mgr *mgr = NULL;
    struct kvt_identity who;
    kvt_session_id session;
    char disk[400], error[256] = "";
    int rc = kvt_config_new(&config);

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
        rc = kvt_session_mgr_open(ns, pool, &opts, &mgr);
    if (!rc)
        rc = kvt_session_open(mgr, "salt", 4, &session);
    atomic_store(&armed, 0); /* closing is not asked to do without */
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

static void every_allocation(struct small_store *store, int from_then_on)
{
    for (long n = 1;; n++) {
        int rc;

        assert_true(n < 5000);
        atomic_store(&countdown, n);
        atomic_store(&sticky, from_then_on);
        atomic_store(&failed_once, 0);
        atomic_store(&armed, 1);
        rc = attempt(store->dir);
        assert_int_equal(atomic_load(&armed), 0);
        if (!atomic_load(&failed_once)) {
            assert_int_equal(rc, 0);
            return;
        }
        tried++;
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
    every_allocation(&store, 0);
    every_allocation(&store, 1);
    small_store_open(&store);
    assert_int_equal(small_store_get(&store, 0, 40), 40);
    small_store_done(&store);
    printf("{\"alloc_fail\": {\"tried\": %llu, \"failed\": 0}, \"refused\": %llu}\n",
           (unsigned long long)tried, (unsigned long long)refused);
    assert_true(tried >= 50 && refused >= 40);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_allocation_of_an_open),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
