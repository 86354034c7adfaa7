/* Calls that a program gets wrong: what they return, what the log says, what stays as it was.
 *
 * Goal:   each refusal names the argument and what it may be; a request freed twice costs nothing;
 *         a cache that had to do without its disk says so to a caller without a log callback.
 * Method: support/rig.h over memory; a table of mistakes, one argument wrong at a time, each
 *         followed by the same call done right.
 */
#include "support/rig.h"

#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "kvtier/codec.h"
#include "kvtier/session.h"

static struct rig rig;

static int set_up(void **state)
{
    const struct rig_shape shape = rig_shape_small(64);
    (void)state;
    rig_init(&rig, &shape, "dram=4MiB,level=raw", NULL);
    rig_open(&rig);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    return 0;
}

static void said(const char *call, const char *words)
{
    if (strstr(rig.last, call) == NULL || strstr(rig.last, words) == NULL)
        fail_msg("\"%s\" lacks \"%s\" and \"%s\"", rig.last, call, words);
    rig.last[0] = '\0';
}

/* ---- namespaces and pools ------------------------------------------------------------------ */

struct setup {
    struct kvt_identity identity;
    struct kvt_layout layout;
    struct kvt_part parts[2];
    struct kvt_part_place places[2];
    struct kvt_pool_desc desc;
};

static struct setup good(void)
{
    struct setup s = {.identity = rig.identity, .layout = rig.layout, .desc = rig.desc};
    memcpy(s.parts, rig.parts, sizeof(s.parts));
    memcpy(s.places, rig.places, sizeof(s.places));
    return s;
}

static int open_ns(struct setup *s)
{
    struct kvt_ns *ns = NULL;
    s->layout.parts = s->layout.parts != NULL ? s->parts : NULL;
    int rc = kvt_ns_open(rig.cache, &s->identity, &s->layout, &ns);
    assert_true((rc == 0) == (ns != NULL));
    kvt_ns_close(ns);
    return rc;
}

static int add_pool(struct setup *s)
{
    struct kvt_pool *pool = NULL;
    s->layout.parts = s->layout.parts != NULL ? s->parts : NULL;
    s->desc.places = s->desc.places != NULL ? s->places : NULL;
    int rc = kvt_pool_register(rig.cache, &s->layout, &s->desc, &pool);
    assert_true((rc == 0) == (pool != NULL));
    kvt_pool_unregister(pool);
    return rc;
}

#define NS(change, code, words)                \
    do {                                       \
        struct setup s = good();               \
        change;                                \
        assert_int_equal(open_ns(&s), code);   \
        said("kvt_ns_open: refused: ", words); \
    } while (0)
#define POOL(change, code, words)                    \
    do {                                             \
        struct setup s = good();                     \
        change;                                      \
        assert_int_equal(add_pool(&s), code);        \
        said("kvt_pool_register: refused: ", words); \
    } while (0)

static void namespaces_say_which_argument(void **state)
{
    (void)state;
    NS(s.layout.struct_size = 0, KVT_E_VERSION, "layout.struct_size is 0");
    NS(s.layout.block_tokens = 24, KVT_E_INVAL, "block_tokens is 24; a multiple of 16");
    NS(s.layout.block_tokens = 8192, KVT_E_LIMIT, "block_tokens is 8192");
    NS(s.layout.part_count = 0, KVT_E_INVAL, "0 parts");
    NS(s.layout.parts = NULL, KVT_E_INVAL, "2 parts at NULL");
    NS(s.parts[1].kind = 9, KVT_E_INVAL, "part 1: kind 9");
    NS(s.parts[1].dtype = 0, KVT_E_INVAL, "part 1: dtype 0");
    NS(s.parts[0].heads = 0, KVT_E_INVAL, "part 0: 0 heads");
    NS(s.parts[0].head_dim = 40, KVT_E_INVAL, "part 0: head_dim 40; a multiple of 16");
    NS(s.parts[0].kind = KVT_PART_MLA, KVT_E_INVAL, "one head, not 2");
    NS(s.identity.struct_size = 4, KVT_E_VERSION, "kvt_identity_init()");
    NS(s.identity.salt_len = 4, KVT_E_INVAL, "salt is NULL");
    NS(s.identity.tp_size = 0, KVT_E_INVAL, "tp_size");
    NS(s.identity.pp_rank = 3, KVT_E_INVAL, "pp_rank is 3 of 1");
    struct setup s = good();
    assert_int_equal(open_ns(&s), 0);
    assert_string_equal(rig.last, "");
}

#define GROUP(change, code, words)                                                \
    do {                                                                          \
        struct setup s = good();                                                  \
        struct kvt_group g[2] = {{.group = 0}, {.group = 1, .block_tokens = 32}}; \
        s.parts[1].group = 1;                                                     \
        s.layout.groups = g;                                                      \
        s.layout.group_count = 2;                                                 \
        change;                                                                   \
        assert_int_equal(open_ns(&s), code);                                      \
        if ((code) != 0)                                                          \
            said("kvt_ns_open: refused: ", words);                                \
    } while (0)

/* As many as a store takes, all open: one more says so, closing one makes room, and the first goes
 * on. A namespace that is opened twice is closed once both are. */
static void more_namespaces_than_a_store_takes_are_told(void **state)
{
    struct kvt_ns **all = calloc(5000, sizeof(struct kvt_ns *)), *twice = NULL;
    char revision[16];
    int rc = 0;
    unsigned opened = 1; /* the rig's */

    (void)state;
    assert_non_null(all);
    for (; rc == 0 && opened < 5000; opened += rc == 0) {
        struct setup s = good();
        snprintf(revision, sizeof(revision), "r%u", opened);
        s.identity.revision = revision;
        s.layout.parts = s.parts;
        rc = kvt_ns_open(rig.cache, &s.identity, &s.layout, &all[opened]);
    }
    assert_int_equal(rc, KVT_E_LIMIT);
    assert_int_equal(opened, 4096);
    said("kvt_ns_open: refused: ", "close those that are not used");
    struct setup s = good();
    s.identity.revision = "r77";
    s.layout.parts = s.parts;
    assert_int_equal(kvt_ns_open(rig.cache, &s.identity, &s.layout, &twice), 0);
    kvt_ns_close(all[77]);
    s.identity.revision = "another";
    assert_int_equal(open_ns(&s), KVT_E_LIMIT);
    kvt_ns_close(twice);
    for (unsigned i = 0; i < 20; i++) { /* opened and closed, one after the other */
        snprintf(revision, sizeof(revision), "n%u", i);
        s.identity.revision = revision;
        assert_int_equal(open_ns(&s), 0);
    }
    for (unsigned i = 1; i < opened; i++)
        if (i != 77)
            kvt_ns_close(all[i]);
    free(all);
    assert_int_equal(rig_store(&rig, 1, 4, 0, NULL), 4);
}

/* What fits neither into DRAM nor on a root is told with its length. */
static void records_that_fit_nowhere_are_told(void **state)
{
    struct setup s = good();

    (void)state;
    s.layout.block_tokens = 4096; /* of a store of a few MiB */
    for (size_t i = 0; i < 2; i++) {
        s.parts[i].heads = 64;
        s.parts[i].head_dim = 128;
    }
    assert_int_equal(open_ns(&s), KVT_E_TOO_SMALL);
    said("kvt_ns_open: refused: ", "give dram more");
}

static void groups_say_which_argument(void **state)
{
    (void)state;
    GROUP((void)g, 0, "");
    GROUP(g[1].kind = 7, KVT_E_INVAL, "groups[1]: kind 7");
    GROUP(g[1].group = 5, KVT_E_INVAL, "groups[1]: no part is of group 5");
    GROUP(g[1].group = 0, KVT_E_INVAL, "groups[1]: group 0 is listed twice");
    GROUP(g[0].window_tokens = 5, KVT_E_INVAL, "groups[0]: window_tokens is 5");
    GROUP(g[1].kind = KVT_GROUP_WINDOW, KVT_E_INVAL, "groups[1]: window_tokens is 0; more than 0");
    GROUP(g[1].block_tokens = 4, KVT_E_INVAL, "groups[1]: block_tokens is 4; a multiple of 16");
    GROUP(g[1].block_tokens = 4112, KVT_E_LIMIT, "groups[1]: block_tokens is 4112; at most");
    GROUP(g[1].reserved = 1, KVT_E_INVAL, "groups[1]: reserved");
    GROUP(s.layout.groups = NULL, KVT_E_INVAL, "2 groups at NULL");
    GROUP(s.layout.group_count = 17, KVT_E_LIMIT, "17 groups");
}

/* Two models under one empty name would share blocks. */
static void an_identity_names_something(void **state)
{
    (void)state;
    NS(s.identity.model = NULL, KVT_E_INVAL, "neither a model nor a revision");
    NS(s.identity.model = "", KVT_E_INVAL, "neither a model nor a revision");
    struct setup s = good();
    s.identity.model = NULL;
    s.identity.revision = "0123abcd"; /* a digest is name enough */
    assert_int_equal(open_ns(&s), 0);
}

static void pools_say_which_argument(void **state)
{
    (void)state;
    POOL(s.desc.struct_size = 1, KVT_E_VERSION, "desc.struct_size is 1");
    POOL(s.layout.block_tokens = 0, KVT_E_INVAL, "block_tokens is 0");
    POOL(s.desc.block_count = 0, KVT_E_INVAL, "0 blocks");
    POOL(s.desc.places = NULL, KVT_E_INVAL, "places are not given");
    POOL(s.desc.place_count = 3, KVT_E_LAYOUT, "place_count is 3, but the layout has 2 parts");
    POOL(s.desc.device = -2, KVT_E_INVAL, "desc.device is -2");
    POOL(s.places[1].base = NULL, KVT_E_INVAL, "place 1: base is NULL");
    POOL(s.places[1].stride_token = -2, KVT_E_INVAL, "place 1: stride_token is -2");
    POOL(s.places[0].stride_block++, KVT_E_INVAL, "stride_block is 4097; in bytes, a multiple");
    POOL(s.places[0].stride_token = 2, KVT_E_INVAL, "two elements share a byte");
    struct setup s = good();
    assert_int_equal(add_pool(&s), 0);
    assert_string_equal(rig.last, "");
}

/* ---- stores and loads ---------------------------------------------------------------------- */

struct call {
    struct kvt_key keys[2], parent;
    uint32_t ids[2];
    const struct kvt_key *keys_at;
    size_t n;
    struct kvt_pool *pool;
    struct kvt_store_opts store;
    struct kvt_load_opts load;
};

static struct call fine(void)
{
    struct call c = {.keys = {rig_key(7), rig_key(8)},
                     .parent = rig_key(6),
                     .ids = {0, 1},
                     .n = 2,
                     .pool = rig.pool,
                     .store = {.struct_size = sizeof(c.store)},
                     .load = {.struct_size = sizeof(c.load)}};
    c.keys_at = (const struct kvt_key *)1; /* stands for c.keys, which moves with c */
    return c;
}

static int issue(struct call *c, bool store)
{
    const struct kvt_key *keys = c->keys_at != NULL ? c->keys : NULL;
    struct kvt_req *req = NULL;
    int rc = store ? kvt_store(rig.ns, c->pool, keys, c->ids, c->n, &c->store, &req)
                   : kvt_load(rig.ns, c->pool, keys, c->ids, c->n, &c->load, &req);
    assert_true((rc == 0) == (req != NULL));
    kvt_req_free(req);
    return rc;
}

#define BOTH(change, code, words)                              \
    do {                                                       \
        for (int store = 0; store < 2; store++) {              \
            struct call c = fine();                            \
            change;                                            \
            assert_int_equal(issue(&c, store), code);          \
            said(store ? "kvt_store: " : "kvt_load: ", words); \
        }                                                      \
    } while (0)
#define STORE(change, code, words)               \
    do {                                         \
        struct call c = fine();                  \
        change;                                  \
        assert_int_equal(issue(&c, true), code); \
        said("kvt_store: ", words);              \
    } while (0)

static void requests_say_which_argument(void **state)
{
    uint64_t before = rig_stat(&rig, "client.refused_invalid");
    (void)state;
    BOTH(c.pool = NULL, KVT_E_INVAL, "pool is NULL");
    BOTH(c.keys_at = NULL, KVT_E_INVAL, "keys is NULL and n is 2");
    BOTH(c.ids[1] = 64, KVT_E_INVAL, "ids[1] is 64, and the pool has 64 blocks");
    BOTH(c.keys[1].hash_len = 0, KVT_E_INVAL, "keys[1]: hash_len is 0");
    BOTH(c.n = 1000000, KVT_E_LIMIT, "more than request_blocks_max");
    BOTH((c.store.struct_size = 0, c.load.struct_size = 0), KVT_E_VERSION,
         "opts.struct_size is not set");
    STORE(c.store.level = 77, KVT_E_INVAL, "opts.level 77");
    STORE(c.store.first_pos = 8, KVT_E_INVAL, "first_pos is 8, and blocks of 16 tokens");
    STORE(c.store.first_pos = UINT32_MAX - 15, KVT_E_INVAL, "beyond 2^32");
    STORE(c.store.parent = &c.parent, KVT_E_INVAL, "first_pos is 0");
    STORE((c.store.first_pos = 16, c.parent.hash_len = 0, c.store.parent = &c.parent), KVT_E_INVAL,
          "opts.parent is not a key");
    struct call c = fine();
    c.load.min_level = -3;
    assert_int_equal(issue(&c, false), KVT_E_INVAL);
    said("kvt_load: ", "opts.min_level -3");
    assert_int_equal(rig_stat(&rig, "client.refused_invalid") - before, 18);
    assert_int_equal(rig.warnings, 0); /* a loop of them must not flood a log */
    c = fine();
    assert_int_equal(issue(&c, true), 0);
}

/* The calls that take keys alone. */
static void calls_say_which_argument(void **state)
{
    struct kvt_key keys[2] = {rig_key(7), rig_key(8)};
    const struct kvt_lookup_opts level = {.struct_size = sizeof(level), .min_level = 9},
                                 size = {.struct_size = 3};
    struct kvt_load_opts load = {.struct_size = 3};
    (void)state;
    assert_int_equal(kvt_lookup(rig.ns, NULL, 2, NULL, NULL), KVT_E_INVAL);
    said("kvt_lookup: refused", "keys is NULL and n is 2");
    assert_int_equal(kvt_lookup(rig.ns, keys, 2, &level, NULL), KVT_E_INVAL);
    said("kvt_lookup: refused", "min_level");
    assert_int_equal(kvt_lookup(rig.ns, keys, 2, &size, NULL), KVT_E_VERSION);
    said("kvt_lookup: refused", "struct_size is not set");
    assert_int_equal(kvt_prefetch(rig.ns, keys, 2, &load), KVT_E_VERSION);
    said("kvt_prefetch: refused", "struct_size is not set");
    load.struct_size = KVT_LOAD_OPTS_SIZE_0; /* of an earlier version, as kvt_load() takes it */
    assert_true(kvt_prefetch(rig.ns, keys, 2, &load) >= 0);
    keys[1].hash_len = 33;
    assert_int_equal(kvt_pin(rig.ns, keys, 2), KVT_E_INVAL);
    said("kvt_pin: refused", "keys[1]: hash_len is 33 (1 to 32)");
    assert_int_equal(kvt_unpin(rig.ns, keys, 2), KVT_E_INVAL);
    said("kvt_unpin: refused", "keys[1]");
    assert_int_equal(kvt_purge(rig.ns, keys, 2), KVT_E_INVAL);
    said("kvt_purge: refused", "keys[1]");
    keys[1] = rig_key(8);
    keys[1].group = 5;
    assert_int_equal(kvt_lookup(rig.ns, keys, 2, NULL, NULL), KVT_E_INVAL);
    said("kvt_lookup: refused", "group 5");
    assert_int_equal(rig.warnings, 0);
}

static void sessions(struct kvt_session_mgr_opts opts, const char *words)
{
    struct kvt_session_mgr *mgr = NULL;
    opts.struct_size = sizeof(opts);
    assert_int_equal(kvt_session_mgr_open(rig.ns, rig.pool, &opts, &mgr), KVT_E_INVAL);
    assert_null(mgr);
    said("kvt_session_mgr_open: refused", words);
}

static void groups(struct kvt_group_chain chain, size_t count, const char *words)
{
    assert_int_equal(kvt_lookup_groups(rig.ns, &chain, count, 64, NULL), KVT_E_INVAL);
    said("kvt_lookup_groups: refused", words);
}

static void sessions_groups_and_origins_say_it_too(void **state)
{
    struct kvt_key key = rig_key(7);
    enum kvt_tier tier;
    const uint32_t far = 64;
    (void)state;
    sessions((struct kvt_session_mgr_opts){.first_page = 64}, "beyond the pool's blocks");
    sessions((struct kvt_session_mgr_opts){.scratch_pages = 64}, "scratch_pages");
    sessions((struct kvt_session_mgr_opts){.window_level = KVT_LEVEL_KV4}, "neither kv8 nor raw");
    sessions((struct kvt_session_mgr_opts){.sessions_max = UINT32_MAX}, "above its limit");
    groups((struct kvt_group_chain){.keys = &key, .n = 1}, 1, "keys or tiers is NULL");
    groups((struct kvt_group_chain){.group = 3}, 1, "chains[0], group 3: the layout has no such");
    groups((struct kvt_group_chain){0}, 0, "0 chains, and the layout has 1 groups");
    key.hash_len = 0;
    groups((struct kvt_group_chain){.keys = &key, .tiers = &tier, .n = 1}, 1, "malformed");
    assert_int_equal(kvt_pool_reset_origin(rig.pool, &far, 1), KVT_E_INVAL);
    said("kvt_pool_reset_origin: refused", "ids[0] is 64, and the pool has 64 blocks");
}

static void codes_have_texts_that_help(void **state)
{
    (void)state;
    assert_non_null(strstr(kvt_strerror(KVT_E_VERSION), "struct_size is not set"));
    assert_non_null(strstr(kvt_strerror(KVT_E_ORPHAN), "the block before it"));
    assert_string_equal(kvt_error_name(KVT_E_ORPHAN), "KVT_E_ORPHAN");
}

/* ---- chains -------------------------------------------------------------------------------- */

static int32_t store_after(const struct kvt_key *parent, uint64_t seed, int32_t *second)
{
    const struct kvt_key keys[2] = {rig_key(seed), rig_key(seed + 1)};
    const uint32_t ids[2] = {3, 4};
    const struct kvt_store_opts opts = {
        .struct_size = sizeof(opts), .parent = parent, .first_pos = 32};
    struct kvt_req *req = NULL;
    assert_int_equal(kvt_store(rig.ns, rig.pool, keys, ids, 2, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    int32_t first = kvt_req_status(req, NULL)[0];
    *second = kvt_req_status(req, NULL)[1];
    kvt_req_free(req);
    return first;
}

/* A parent that nobody stored is no lack of room: its own code, its own counters. */
static void a_missing_parent_has_its_own_code(void **state)
{
    const struct kvt_key parent = rig_key(900);
    int32_t second;
    (void)state;
    assert_int_equal(store_after(&parent, 901, &second), KVT_E_ORPHAN);
    assert_int_equal(second, KVT_E_ORPHAN);
    assert_int_equal(rig_stat(&rig, "client.store_orphans"), 2);
    assert_int_equal(rig_stat(&rig, "store.dropped_chain"), 2);
    assert_int_equal(rig_stat(&rig, "client.store_dropped"), 0);
    assert_int_equal(rig_lookup(&rig, 901, 2), 0);
    /* without a parent the blocks stand for themselves, wherever they begin */
    assert_int_equal(store_after(NULL, 901, &second), 0);
    assert_int_equal(rig_lookup(&rig, 901, 2), 2);
    assert_int_equal(rig_store(&rig, 900, 1, 0, NULL), 1);
    assert_int_equal(store_after(&parent, 911, &second), 0);
}

/* ---- requests ------------------------------------------------------------------------------ */

static void a_request_freed_twice_is_told(void **state)
{
    struct call c = fine();
    struct kvt_req *req = NULL, *next = NULL;
    (void)state;
    assert_int_equal(kvt_store(rig.ns, rig.pool, c.keys, c.ids, 2, &c.store, &req), 0);
    kvt_req_free(req);
    kvt_req_free(req); /* must come back */
    said("kvt_req_free", "freed already");
    assert_int_equal(kvt_req_wait(req, -1), KVT_E_INVAL);
    assert_int_equal(kvt_req_wait(req, 0), KVT_E_INVAL);
    kvt_req_cancel(req);
    assert_int_equal(rig_stat(&rig, "client.freed_twice"), 1);
    assert_int_equal(rig_stat(&rig, "client.requests_held"), 0);
    /* the entry is not the next one given out, so that the mistake is still seen after other calls
     */
    assert_int_equal(kvt_load(rig.ns, rig.pool, c.keys, c.ids, 2, &c.load, &next), 0);
    assert_ptr_not_equal(req, next);
    kvt_req_free(req);
    assert_int_equal(rig_stat(&rig, "client.freed_twice"), 2);
    assert_int_equal(kvt_req_wait(next, -1), 1);
    kvt_req_free(next);
    for (int i = 0; i < 1000; i++) { /* and every entry still serves */
        c = fine();
        assert_int_equal(issue(&c, i % 2), 0);
    }
}

/* ---- opening ------------------------------------------------------------------------------- */

/* kvt_open() without a log callback, over one or two roots that cannot be used. */
static void an_unusable_disk_is_told_by_the_open(void **state)
{
    struct kvt_config *config = NULL;
    struct kvt_cache *cache = NULL;
    char dir[128], value[512], error[1024] = "old", small[24];
    struct stat st;
    (void)state;
    rig_dir_make(dir, sizeof(dir));
    snprintf(value, sizeof(value), "dram=1MiB,direct=off,disk=%s/ok:16MiB", dir);
    assert_int_equal(kvt_config_new(&config), 0);
    assert_int_equal(kvt_config_set_all(config, value), 0);
    assert_int_equal(kvt_open(config, &cache, error, sizeof(error)), 0);
    assert_string_equal(error, ""); /* nothing is missing */
    kvt_close(cache);
    snprintf(value, sizeof(value), "disk=%s/a/b:16MiB,disk=/proc/kvtier:16MiB", dir);
    assert_int_equal(kvt_config_set_all(config, value), 0);
    assert_int_equal(kvt_open(config, &cache, error, sizeof(error)), 0);
    if (!strstr(error, "parent directory does not exist") || !strstr(error, "mkdir -p") ||
        !strstr(error, "disk root /proc/kvtier does not exist and cannot be made") ||
        !strstr(error, "going on without it"))
        fail_msg("%s", error);
    kvt_close(cache);
    assert_int_equal(kvt_open(config, &cache, small, sizeof(small)), 0);
    assert_int_equal(strlen(small), sizeof(small) - 1); /* cut, not overrun */
    kvt_close(cache);
    assert_int_equal(kvt_open(config, &cache, NULL, 0), 0);
    kvt_close(cache);
    kvt_config_free(config);
    snprintf(value, sizeof(value), "%s/a", dir);
    assert_int_not_equal(stat(value, &st), 0); /* nothing was made */
    rig_dir_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(namespaces_say_which_argument, set_up, tear_down),
        cmocka_unit_test_setup_teardown(more_namespaces_than_a_store_takes_are_told, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(records_that_fit_nowhere_are_told, set_up, tear_down),
        cmocka_unit_test_setup_teardown(groups_say_which_argument, set_up, tear_down),
        cmocka_unit_test_setup_teardown(an_identity_names_something, set_up, tear_down),
        cmocka_unit_test_setup_teardown(pools_say_which_argument, set_up, tear_down),
        cmocka_unit_test_setup_teardown(requests_say_which_argument, set_up, tear_down),
        cmocka_unit_test_setup_teardown(calls_say_which_argument, set_up, tear_down),
        cmocka_unit_test_setup_teardown(sessions_groups_and_origins_say_it_too, set_up, tear_down),
        cmocka_unit_test(codes_have_texts_that_help),
        cmocka_unit_test_setup_teardown(a_missing_parent_has_its_own_code, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_request_freed_twice_is_told, set_up, tear_down),
        cmocka_unit_test(an_unusable_disk_is_told_by_the_open),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
