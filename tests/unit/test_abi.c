/* Goal: C83: a program built against headers of another version is refused with a message, never
 *       misread; the library says which version it is, and exports nothing of C++.
 * Method: every options struct of the public interface is handed over with a struct_size of another
 *         version; the built libkvtier.so is loaded and asked, every name of the map is looked up.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "kvtier/kvtier.h"

enum { PAGES = 4, TOKENS = 16, DIM = 64 };

static uint16_t k[PAGES][TOKENS][DIM];
static const struct kvt_part parts[] = {
    {.kind = KVT_PART_K, .dtype = KVT_DTYPE_BF16, .heads = 1, .head_dim = DIM}};
static const struct kvt_part_place place = {k, sizeof(k[0]), sizeof(k[0]), sizeof(k[0][0]), 2};
static struct kvt_layout layout = {sizeof(layout), TOKENS, 1, parts};
static struct kvt_pool_desc desc = {sizeof(desc), KVT_DEVICE_HOST, PAGES, 1, &place};

static struct kvt_cache *cache;
static struct kvt_ns *ns;
static struct kvt_pool *pool;
static struct kvt_key keys[1];
static const uint32_t ids[1] = {0};

static int open_cache(void **state)
{
    struct kvt_config *config;
    struct kvt_identity who;
    uint32_t tokens[TOKENS] = {1};
    uint8_t root[32];

    (void)state;
    kvt_identity_init(&who);
    who.engine = "test";
    who.model = "none";
    if (kvt_config_new(&config) || kvt_config_set(config, "dram", "8MiB") ||
        kvt_open(config, &cache, NULL, 0) || kvt_ns_open(cache, &who, &layout, &ns) ||
        kvt_pool_register(cache, &layout, &desc, &pool) || kvt_key_root(NULL, 0, root))
        return -1;
    kvt_config_free(config);
    return kvt_key_chain(root, tokens, TOKENS, TOKENS, NULL, 0, 0, 0, keys, 1) == 1 ? 0 : -1;
}

static int close_cache(void **state)
{
    (void)state;
    kvt_pool_unregister(pool);
    kvt_ns_close(ns);
    kvt_close(cache);
    return 0;
}

/* Sizes that a struct of that size could have in another version. */
/* no size that a struct ever had: those of earlier versions are accepted */
static const int other[] = {-4, +4, 1000};
#define OTHER_COUNT (sizeof(other) / sizeof(other[0]))

static void test_c83_layout_and_pool(void **state)
{
    struct kvt_layout layout2 = layout;
    struct kvt_pool_desc desc2 = desc;
    struct kvt_pool *pool2 = NULL;
    struct kvt_ns *ns2 = NULL;
    struct kvt_identity who;

    (void)state;
    kvt_identity_init(&who);
    for (size_t i = 0; i < OTHER_COUNT; i++) {
        layout2.struct_size = sizeof(layout) + (size_t)other[i];
        desc2.struct_size = sizeof(desc) + (size_t)other[i];
        assert_int_equal(kvt_layout_check(&layout2), KVT_E_VERSION);
        assert_int_equal(kvt_pool_check(&layout, &desc2), KVT_E_VERSION);
        assert_int_equal(kvt_ns_open(cache, &who, &layout2, &ns2), KVT_E_VERSION);
        assert_int_equal(kvt_pool_register(cache, &layout2, &desc, &pool2), KVT_E_VERSION);
        assert_int_equal(kvt_pool_register(cache, &layout, &desc2, &pool2), KVT_E_VERSION);
        assert_null(ns2);
        assert_null(pool2);
    }
}

static void test_c83_identity(void **state)
{
    struct kvt_identity who;
    uint8_t id[KVT_NS_BYTES];
    struct kvt_ns *ns2 = NULL;

    (void)state;
    for (size_t i = 0; i < OTHER_COUNT; i++) {
        kvt_identity_init(&who);
        assert_int_equal(who.struct_size, sizeof(who));
        who.struct_size += (size_t)other[i];
        assert_int_equal(kvt_namespace_id(&who, &layout, id), KVT_E_VERSION);
        assert_int_equal(kvt_ns_open(cache, &who, &layout, &ns2), KVT_E_VERSION);
        assert_null(ns2);
    }
}

static void test_c83_requests(void **state)
{
    struct kvt_store_opts store = {.struct_size = 0};
    struct kvt_load_opts load = {.struct_size = 0};
    struct kvt_lookup_opts lookup = {.struct_size = 0};
    struct kvt_req_report report = {.struct_size = 0};
    struct kvt_req *req = NULL;

    (void)state;
    for (size_t i = 0; i < OTHER_COUNT; i++) {
        store.struct_size = sizeof(store) + (size_t)other[i];
        load.struct_size = sizeof(load) + (size_t)other[i];
        lookup.struct_size = sizeof(lookup) + (size_t)other[i];
        assert_int_equal(kvt_store(ns, pool, keys, ids, 1, &store, &req), KVT_E_VERSION);
        assert_int_equal(kvt_load(ns, pool, keys, ids, 1, &load, &req), KVT_E_VERSION);
        assert_int_equal(kvt_prefetch(ns, keys, 1, &load), KVT_E_VERSION);
        assert_int_equal(kvt_lookup(ns, keys, 1, &lookup, NULL), KVT_E_VERSION);
        assert_null(req);
    }
    assert_int_equal(kvt_store(ns, pool, keys, ids, 1, NULL, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    for (size_t i = 0; i < OTHER_COUNT; i++) {
        report.struct_size = sizeof(report) + (size_t)other[i];
        assert_int_equal(kvt_req_report(req, &report), KVT_E_VERSION);
    }
    report.struct_size = sizeof(report);
    assert_int_equal(kvt_req_report(req, &report), 0);
    assert_int_equal(report.blocks_ok, 1);
    kvt_req_free(req);
}

static void test_c83_message(void **state)
{
    (void)state;
    assert_non_null(strstr(kvt_strerror(KVT_E_VERSION), "version"));
    assert_string_equal(kvt_error_name(KVT_E_VERSION), "KVT_E_VERSION");
}

static void test_c83_library(void **state)
{
    char line[256], name[64];
    void *library = dlopen(KVT_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    int names = 0;

    (void)state;
    if (!library)
        fail_msg("%s", dlerror());
    const char *(*version)(void) = (const char *(*)(void))dlsym(library, "kvt_version");
    assert_non_null(version);
    assert_string_equal(version(), KVT_VERSION_STRING);
    FILE *map = fopen(KVT_MAP, "r");
    assert_non_null(map);
    while (fgets(line, sizeof(line), map)) {
        const char *at = line;
        while ((at = strstr(at, "kvt_"))) {
            size_t len = strcspn(at, ";");
            snprintf(name, sizeof(name), "%.*s", (int)len, at);
            if (!dlsym(library, name))
                fail_msg("%s is in the map, not in the library", name);
            at += len;
            names++;
        }
    }
    fclose(map);
    assert_true(names > 40);
    assert_null(dlsym(library, "kvt_l2_open")); /* inner names stay inside */
    assert_null(dlsym(library, "kvt_codec_kernels"));
    dlclose(library);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_c83_layout_and_pool), cmocka_unit_test(test_c83_identity),
        cmocka_unit_test(test_c83_requests),        cmocka_unit_test(test_c83_message),
        cmocka_unit_test(test_c83_library),
    };
    return cmocka_run_group_tests(tests, open_cache, close_cache);
}
