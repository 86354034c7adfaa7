/* The client half through its public functions, over the real store in DRAM (no disk): requests,
 * outcomes, refusals, levels, origin, cancel, events, the off switch, a forked child.
 *
 * Method: blocks whose bytes and keys follow from a number (support/rig.h); every load checks exact
 * bytes, and that pages of failed blocks were not touched. What the codec must have done is checked
 * by coding the same page with the codec alone.
 */
#include "support/rig.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"

static struct rig rig;

static void open_small(const char *config, uint32_t pages)
{
    struct rig_shape shape = rig_shape_small(pages);
    rig_init(&rig, &shape, config, NULL);
    rig_open(&rig);
}

static int tear_down(void **state)
{
    (void)state;
    if (rig.cache != NULL)
        assert_int_equal(rig_stat(&rig, "client.bad_move"), 0);
    if (rig.cache != NULL)
        assert_int_equal(rig_stat(&rig, "client.bad_reply"), 0);
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

static void open_close_leaves_nothing(void **state)
{
    (void)state;
    unsigned fds = rig_open_fds();
    for (int i = 0; i < 5; i++) {
        open_small("dram=4MiB,threads=2", 4);
        assert_int_equal(rig_stat(&rig, "client.threads"), 2);
        assert_int_equal(rig_stat(&rig, "client.arena_bytes"), 4 << 20);
        assert_int_equal(rig_stat(&rig, "client.requests_held"), 0);
        tear_down(NULL);
    }
    assert_int_equal(rig_open_fds(), fds);
    kvt_close(NULL);
    kvt_ns_close(NULL);
    kvt_pool_unregister(NULL);
    kvt_req_free(NULL);
}

static void stored_blocks_come_back_exact(void **state)
{
    int32_t status[20];
    (void)state;
    open_small("dram=8MiB,threads=2", 20);
    assert_int_equal(rig_lookup(&rig, 100, 20), 0);
    assert_int_equal(rig_load(&rig, 100, 20, status), 0);
    for (int i = 0; i < 20; i++)
        assert_int_equal(status[i], KVT_E_MISS);
    assert_int_equal(rig_store(&rig, 100, 20, 0, status), 20);
    for (int i = 0; i < 20; i++)
        assert_int_equal(status[i], 0);
    assert_int_equal(rig_lookup(&rig, 100, 20), 20);
    assert_int_equal(rig_load(&rig, 100, 20, NULL), 20);
    assert_int_equal(rig_store(&rig, 100, 20, 0, status), 20);
    for (int i = 0; i < 20; i++)
        assert_int_equal(status[i], KVT_E_EXISTS);
    assert_int_equal(rig_stat(&rig, "client.load_blocks"), 20);
    assert_int_equal(rig_stat(&rig, "client.load_miss"), 20);
    assert_int_equal(rig_stat(&rig, "client.store_blocks"), 20);
    assert_int_equal(rig_stat(&rig, "client.store_exists"), 20);
    assert_int_equal(rig_stat(&rig, "dram.pins"), 0);
}

static void reports_say_what_happened(void **state)
{
    struct kvt_key keys[6];
    uint32_t ids[6] = {0, 1, 2, 3, 4, 5};
    struct kvt_req *req;
    struct kvt_req_report report = {.struct_size = sizeof(report)};
    struct kvt_key gap = rig_key(12);
    (void)state;
    open_small("dram=8MiB", 6);
    assert_int_equal(rig_store(&rig, 10, 5, 0, NULL), 5);
    assert_int_equal(kvt_purge(rig.ns, &gap, 1), 1); /* 12 is missing */
    for (uint64_t i = 0; i < 6; i++)
        keys[i] = rig_key(10 + i);
    assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, 6, NULL, &req), 0);
    report.struct_size = 3;
    assert_int_equal(kvt_req_report(req, &report), KVT_E_VERSION);
    report.struct_size = sizeof(report);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    assert_int_equal(kvt_req_wait(req, 0), 1);
    assert_int_equal(kvt_req_report(req, &report), 0);
    assert_int_equal(report.blocks_run_ok, 2);
    assert_in_range(report.blocks_ok, 2, 4);
    assert_int_equal(report.blocks_dram, report.blocks_ok);
    assert_int_equal(report.blocks_disk, 0);
    assert_int_equal(report.blocks_remote, 0);
    assert_int_equal(report.bytes_moved,
                     report.blocks_ok * kvt_ns_record_bytes(rig.ns, 0, KVT_LEVEL_RAW));
    assert_true(report.elapsed_ns > 0);
    kvt_req_free(req);
}

static void empty_requests_complete(void **state)
{
    struct kvt_req *req;
    size_t n = 7;
    (void)state;
    open_small("dram=4MiB", 2);
    assert_int_equal(kvt_store(rig.ns, rig.pool, NULL, NULL, 0, NULL, &req), 0);
    assert_int_equal(kvt_req_wait(req, 0), 1);
    (void)kvt_req_status(req, &n);
    assert_int_equal(n, 0);
    kvt_req_free(req);
    assert_int_equal(kvt_load(rig.ns, rig.pool, NULL, NULL, 0, NULL, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    kvt_req_free(req);
    assert_int_equal(kvt_lookup(rig.ns, NULL, 0, NULL, NULL), 0);
    assert_int_equal(kvt_pin(rig.ns, NULL, 0), 0);
    assert_int_equal(kvt_prefetch(rig.ns, NULL, 0, NULL), 0);
}

static void bad_arguments_are_refused(void **state)
{
    struct kvt_key key = rig_key(1), bad = key;
    uint32_t id = 0, far = 2;
    struct kvt_req *req = NULL;
    struct kvt_store_opts store = {.struct_size = sizeof(store)};
    struct kvt_load_opts load = {.struct_size = sizeof(load)};
    struct kvt_lookup_opts lookup = {.struct_size = 1};
    (void)state;
    open_small("dram=4MiB,request_blocks_max=64", 2);
    struct kvt_ns *ns = rig.ns;
    struct kvt_pool *pool = rig.pool;
    assert_int_equal(kvt_store(NULL, pool, &key, &id, 1, NULL, &req), KVT_E_INVAL);
    assert_int_equal(kvt_store(ns, NULL, &key, &id, 1, NULL, &req), KVT_E_INVAL);
    assert_int_equal(kvt_store(ns, pool, NULL, &id, 1, NULL, &req), KVT_E_INVAL);
    assert_int_equal(kvt_store(ns, pool, &key, NULL, 1, NULL, &req), KVT_E_INVAL);
    assert_int_equal(kvt_store(ns, pool, &key, &id, 1, NULL, NULL), KVT_E_INVAL);
    assert_int_equal(kvt_store(ns, pool, &key, &far, 1, NULL, &req), KVT_E_INVAL);
    assert_int_equal(kvt_store(ns, pool, &key, &id, 65, NULL, &req), KVT_E_LIMIT);
    bad.hash_len = 0;
    assert_int_equal(kvt_store(ns, pool, &bad, &id, 1, NULL, &req), KVT_E_INVAL);
    bad.hash_len = 33;
    assert_int_equal(kvt_load(ns, pool, &bad, &id, 1, NULL, &req), KVT_E_INVAL);
    bad = key;
    bad.group = 1;
    assert_int_equal(kvt_load(ns, pool, &bad, &id, 1, NULL, &req), KVT_E_INVAL);
    assert_int_equal(kvt_lookup(ns, &bad, 1, NULL, NULL), KVT_E_INVAL);
    bad = key;
    bad.reserved = 1;
    assert_int_equal(kvt_load(ns, pool, &bad, &id, 1, NULL, &req), KVT_E_INVAL);
    store.struct_size = 4;
    assert_int_equal(kvt_store(ns, pool, &key, &id, 1, &store, &req), KVT_E_VERSION);
    store.struct_size = sizeof(store);
    store.level = 7;
    assert_int_equal(kvt_store(ns, pool, &key, &id, 1, &store, &req), KVT_E_INVAL);
    store.level = 0;
    store.first_pos = UINT32_MAX - 8;
    assert_int_equal(kvt_store(ns, pool, &key, &id, 1, &store, &req), KVT_E_INVAL);
    load.min_level = -1;
    assert_int_equal(kvt_load(ns, pool, &key, &id, 1, &load, &req), KVT_E_INVAL);
    load.struct_size = 0;
    assert_int_equal(kvt_load(ns, pool, &key, &id, 1, &load, &req), KVT_E_VERSION);
    assert_int_equal(kvt_lookup(ns, &key, 1, &lookup, NULL), KVT_E_VERSION);
    assert_int_equal(kvt_pool_reset_origin(pool, &far, 1), KVT_E_INVAL);
    assert_null(req);
    assert_int_equal(rig_stat(&rig, "client.completed"), 0);
    assert_int_equal(rig_stat(&rig, "client.requests_held"), 0);
    assert_true(rig_stat(&rig, "client.refused_invalid") >= 9);
}

static void shapes_that_do_not_match_are_refused(void **state)
{
    struct kvt_part parts[RIG_PARTS_MAX];
    struct kvt_layout layout;
    struct kvt_pool *pool = NULL;
    struct kvt_ns *ns = NULL;
    struct kvt_req *req;
    struct kvt_key key = rig_key(1);
    uint32_t id = 0;
    (void)state;
    open_small("dram=4MiB", 2);
    memcpy(parts, rig.parts, sizeof(parts));
    layout = rig.layout;
    layout.parts = parts;
    parts[0].heads = 1; /* the places still fit: only the shape differs */
    assert_int_equal(kvt_pool_register(rig.cache, &layout, &rig.desc, &pool), 0);
    assert_int_equal(kvt_load(rig.ns, pool, &key, &id, 1, NULL, &req), KVT_E_LAYOUT);
    assert_int_equal(kvt_store(rig.ns, pool, &key, &id, 1, NULL, &req), KVT_E_LAYOUT);
    kvt_pool_unregister(pool);
    parts[0].heads = 2; /* an equal layout at another address is the same */
    assert_int_equal(kvt_pool_register(rig.cache, &layout, &rig.desc, &pool), 0);
    assert_int_equal(kvt_load(rig.ns, pool, &key, &id, 1, NULL, &req), 0);
    kvt_req_free(req);
    kvt_pool_unregister(pool);
    struct kvt_pool_desc desc = rig.desc;
    desc.place_count = 1;
    assert_int_equal(kvt_pool_register(rig.cache, &rig.layout, &desc, &pool), KVT_E_LAYOUT);
    desc = rig.desc;
    desc.device = 0;
    assert_int_equal(kvt_pool_register(rig.cache, &rig.layout, &desc, &pool), KVT_E_UNSUPPORTED);
    parts[1].group = 1; /* a group of its own */
    assert_int_equal(kvt_ns_open(rig.cache, &rig.identity, &layout, &ns), 0);
    assert_true(kvt_ns_record_bytes(ns, 1, KVT_LEVEL_RAW) > 0);
    assert_int_equal(kvt_ns_record_bytes(ns, 2, KVT_LEVEL_RAW), 0);
    assert_int_equal(kvt_load(ns, rig.pool, &key, &id, 1, NULL, &req), KVT_E_LAYOUT);
    key.group = 1;
    assert_int_equal(kvt_load(rig.ns, rig.pool, &key, &id, 1, NULL, &req), KVT_E_INVAL);
    key.group = 0;
    kvt_ns_close(ns);
    layout.struct_size = 1;
    assert_int_equal(kvt_ns_open(rig.cache, &rig.identity, &layout, &ns), KVT_E_VERSION);
}

static void refused_when_nothing_is_left_and_fine_afterwards(void **state)
{
    struct kvt_req *reqs[5] = {0}, *more = NULL;
    struct kvt_key keys[48];
    uint32_t ids[48];
    (void)state;
    open_small("dram=4MiB,requests_max=4,request_blocks_max=64", 48);
    for (uint32_t i = 0; i < 48; i++) {
        keys[i] = rig_key(i);
        ids[i] = i;
    }
    for (int i = 0; i < 4; i++)
        assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, 1, NULL, &reqs[i]), 0);
    assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, 1, NULL, &more), -EAGAIN);
    kvt_req_free(reqs[0]);
    assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, 1, NULL, &reqs[0]), 0);
    for (int i = 0; i < 4; i++)
        kvt_req_free(reqs[i]);
    assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, 48, NULL, &reqs[0]), 0);
    assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, 17, NULL, &more), -EAGAIN);
    assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, 16, NULL, &reqs[1]), 0);
    kvt_req_free(reqs[0]);
    assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, 33, NULL, &reqs[0]), 0);
    kvt_req_free(reqs[0]);
    kvt_req_free(reqs[1]);
    assert_int_equal(rig_stat(&rig, "client.refused_busy"), 2);
    assert_int_equal(rig_stat(&rig, "client.blocks_held"), 0);
    assert_int_equal(rig_stat(&rig, "client.completed"), 8);
}

static uint64_t events(int fd)
{
    uint64_t value = 0;
    if (read(fd, &value, sizeof(value)) != (ssize_t)sizeof(value))
        return 0;
    return value;
}

static void the_event_fd_counts_completions(void **state)
{
    (void)state;
    open_small("dram=8MiB", 8);
    int fd = kvt_event_fd(rig.cache);
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    assert_true(fd >= 0);
    assert_int_equal(poll(&poll_fd, 1, 0), 0);
    assert_int_equal(rig_store(&rig, 1, 8, 0, NULL), 8);
    assert_int_equal(poll(&poll_fd, 1, 1000), 1);
    assert_int_equal(events(fd), 1);
    for (int i = 0; i < 3; i++)
        assert_int_equal(rig_load(&rig, 1, 8, NULL), 8);
    assert_int_equal(events(fd), 3);
    assert_int_equal(events(fd), 0);
}

static void the_off_switch_makes_everything_a_miss(void **state)
{
    int32_t status[8];
    enum kvt_tier tiers[8];
    struct kvt_key keys[8];
    (void)state;
    open_small("dram=8MiB", 8);
    for (uint64_t i = 0; i < 8; i++)
        keys[i] = rig_key(1 + i);
    assert_int_equal(rig_store(&rig, 1, 4, 0, NULL), 4);
    kvt_enable(rig.cache, 0);
    memset(tiers, 0x7f, sizeof(tiers));
    assert_int_equal(kvt_lookup(rig.ns, keys, 8, NULL, tiers), 0);
    for (int i = 0; i < 8; i++)
        assert_int_equal(tiers[i], KVT_TIER_MISS);
    assert_int_equal(rig_load(&rig, 1, 4, status), 0);
    assert_int_equal(status[3], KVT_E_MISS);
    assert_int_equal(rig_store(&rig, 5, 4, 64, status), 0);
    assert_int_equal(status[0], KVT_E_MISS);
    assert_int_equal(kvt_prefetch(rig.ns, keys, 8, NULL), 0);
    kvt_enable(rig.cache, 1);
    assert_int_equal(rig_lookup(&rig, 1, 8), 4);
    assert_int_equal(rig_load(&rig, 1, 4, NULL), 4);
    assert_int_equal(rig_stat(&rig, "off.lookup_keys"), 8);
    assert_int_equal(rig_stat(&rig, "off.load_blocks"), 4);
    assert_int_equal(rig_stat(&rig, "off.store_blocks"), 4);
}

static void opened_off_stays_off_until_enabled(void **state)
{
    char text[64];
    (void)state;
    open_small("dram=8MiB,enabled=no", 4);
    rig_stat_text(&rig, "cache.state", text, sizeof(text));
    assert_string_equal(text, "off");
    assert_int_equal(rig_store(&rig, 1, 4, 0, NULL), 0);
    kvt_enable(rig.cache, 1);
    assert_int_equal(rig_store(&rig, 1, 4, 0, NULL), 4);
    assert_int_equal(rig_lookup(&rig, 1, 4), 4);
}

/* A store of n smooth blocks at a level; the leading run that satisfies each minimum level. */
static void store_level(uint64_t seed, uint32_t n, uint32_t first_pos, int level, int exact)
{
    struct kvt_key keys[16];
    uint32_t ids[16];
    struct kvt_store_opts opts = {
        .struct_size = sizeof(opts), .first_pos = first_pos, .level = level, .exact = exact};
    struct kvt_req *req;
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = rig_key(seed + i);
        ids[i] = i;
    }
    assert_int_equal(kvt_store(rig.ns, rig.pool, keys, ids, n, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(kvt_req_status(req, NULL)[i], 0);
    kvt_req_free(req);
}

static long run_at(uint64_t seed, uint32_t n, int min_level)
{
    struct kvt_key keys[16];
    struct kvt_lookup_opts opts = {.struct_size = sizeof(opts), .min_level = min_level};
    for (uint32_t i = 0; i < n; i++)
        keys[i] = rig_key(seed + i);
    return kvt_lookup(rig.ns, keys, n, &opts, NULL);
}

static size_t load_at(uint64_t seed, uint32_t n, int min_level)
{
    struct kvt_key keys[16];
    uint32_t ids[16];
    struct kvt_load_opts opts = {.struct_size = sizeof(opts), .min_level = min_level};
    struct kvt_req_report report = {.struct_size = sizeof(report)};
    struct kvt_req *req;
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = rig_key(seed + i);
        ids[i] = i;
    }
    assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, n, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    assert_int_equal(kvt_req_report(req, &report), 0);
    kvt_req_free(req);
    return report.blocks_ok;
}

static void levels_first_block_raw_and_minimum(void **state)
{
    (void)state;
    open_small("dram=8MiB,level=kv4", 4);
    for (uint32_t i = 0; i < 4; i++)
        rig_fill_smooth(&rig, i, i);
    store_level(1, 4, 0, KVT_LEVEL_DEFAULT, 0);
    assert_int_equal(run_at(1, 4, KVT_LEVEL_DEFAULT), 4);
    assert_int_equal(run_at(1, 4, KVT_LEVEL_KV4), 4);
    assert_int_equal(run_at(1, 4, KVT_LEVEL_KV8), 1); /* the sink is raw, the rest kv4 */
    assert_int_equal(run_at(1, 4, KVT_LEVEL_RAW), 1);
    assert_int_equal(load_at(1, 4, KVT_LEVEL_RAW), 1);
    assert_int_equal(load_at(1, 4, KVT_LEVEL_KV4), 4);
    /* asking for better replaces; asking for worse does not */
    for (uint32_t i = 0; i < 4; i++)
        rig_fill_smooth(&rig, i, i);
    assert_int_equal(kvt_pool_reset_origin(rig.pool, (uint32_t[]){0, 1, 2, 3}, 4), 0);
    store_level(2, 3, 16, KVT_LEVEL_KV8, 0);
    assert_int_equal(run_at(1, 4, KVT_LEVEL_KV8), 4);
    struct kvt_key key = rig_key(2);
    struct kvt_req *req;
    struct kvt_store_opts opts = {
        .struct_size = sizeof(opts), .first_pos = 16, .level = KVT_LEVEL_KV4};
    assert_int_equal(kvt_store(rig.ns, rig.pool, &key, (uint32_t[]){0}, 1, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    assert_int_equal(kvt_req_status(req, NULL)[0], KVT_E_EXISTS);
    kvt_req_free(req);
    assert_int_equal(run_at(1, 4, KVT_LEVEL_KV8), 4);
}

/* What a load puts into a page is what the codec alone makes of it, at every level. */
static void loaded_pages_are_what_the_codec_makes(void **state)
{
    (void)state;
    open_small("dram=8MiB,guard=off", 4);
    size_t bytes = rig_block_bytes(&rig);
    uint8_t *want = malloc(bytes), *got = malloc(bytes);
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_RAW; level++) {
        size_t payload_bytes = kvt_payload_bytes(&rig.layout, 0, level);
        if (payload_bytes == 0)
            continue;
        uint8_t *payload = aligned_alloc(64, (payload_bytes + 63) / 64 * 64);
        uint64_t seed = 100 + (uint64_t)level;
        rig_fill_smooth(&rig, 0, seed);
        assert_int_equal(
            kvt_encode_block(&rig.layout, 0, level, &rig.desc, 0, payload, payload_bytes, 0, NULL),
            0);
        assert_int_equal(
            kvt_decode_block(&rig.layout, 0, level, payload, payload_bytes, &rig.desc, 3), 0);
        rig_page_bytes(&rig, 3, want);
        assert_int_equal(kvt_pool_reset_origin(rig.pool, (uint32_t[]){0}, 1), 0);
        store_level(seed, 1, 64, level, 0);
        rig_poison(&rig, 0, 0xa5);
        assert_int_equal(load_at(seed, 1, level), 1);
        rig_page_bytes(&rig, 0, got);
        assert_memory_equal(got, want, bytes);
        free(payload);
    }
    free(want);
    free(got);
}

/* Every row of K shifted by the same amount in half of the channels: more offsets than the codec
 * takes out, so its error drowns what tells the tokens apart. */
static void shift_keys(uint32_t page, float shift)
{
    const struct kvt_part_place *place = &rig.places[0];
    for (uint32_t head = 0; head < rig.shape.heads; head++) {
        for (uint32_t token = 0; token < rig.shape.tokens; token++) {
            uint16_t *row =
                (uint16_t *)(void *)((uint8_t *)place->base + page * place->stride_block +
                                     head * place->stride_head + token * place->stride_token);
            for (uint32_t i = 0; i < rig.shape.dim / 2; i++) {
                uint32_t bits = (uint32_t)row[i] << 16;
                float x;
                memcpy(&x, &bits, sizeof(x));
                x += shift;
                memcpy(&bits, &x, sizeof(bits));
                row[i] = (uint16_t)(bits >> 16);
            }
        }
    }
}

static void a_failed_guard_goes_up_and_is_counted(void **state)
{
    (void)state;
    open_small("dram=8MiB,level=kv4", 4);
    for (uint32_t i = 0; i < 4; i++)
        rig_fill_smooth(&rig, i, i);
    shift_keys(1, 8);   /* too much for kv4, kv5 and kv6, not for kv8 */
    shift_keys(2, 600); /* too much for all of them */
    store_level(1, 4, 16, KVT_LEVEL_DEFAULT, 0);
    assert_int_equal(run_at(1, 4, KVT_LEVEL_KV4), 4);
    assert_int_equal(run_at(1, 1, KVT_LEVEL_KV5), 0);
    assert_int_equal(run_at(2, 1, KVT_LEVEL_KV8), 1);
    assert_int_equal(run_at(2, 1, KVT_LEVEL_RAW), 0);
    assert_int_equal(run_at(3, 1, KVT_LEVEL_RAW), 1);
    assert_int_equal(run_at(4, 1, KVT_LEVEL_KV5), 0);
    assert_true(rig_stat(&rig, "store.escalated") >= 2);
    assert_int_equal(rig_stat(&rig, "store.escalated_raw"), 1);
    assert_int_equal(rig_stat(&rig, "store.aborted"), rig_stat(&rig, "store.escalated"));
    assert_int_equal(load_at(1, 4, KVT_LEVEL_KV4), 4);
}

static void without_the_guard_nothing_goes_up(void **state)
{
    (void)state;
    open_small("dram=8MiB,level=kv4,guard=off", 1);
    rig_fill_smooth(&rig, 0, 1);
    shift_keys(0, 600);
    store_level(1, 1, 16, KVT_LEVEL_DEFAULT, 0);
    assert_int_equal(run_at(1, 1, KVT_LEVEL_KV5), 0);
    assert_int_equal(rig_stat(&rig, "store.escalated"), 0);
}

static void nan_is_stored_raw(void **state)
{
    (void)state;
    open_small("dram=8MiB,level=kv4", 3);
    for (uint32_t i = 0; i < 3; i++)
        rig_fill_smooth(&rig, i, i);
    ((uint16_t *)(void *)((uint8_t *)rig.places[1].base + rig.places[1].stride_block))[5] = 0x7fc1;
    size_t bytes = rig_block_bytes(&rig);
    uint8_t *want = malloc(bytes), *got = malloc(bytes);
    rig_page_bytes(&rig, 1, want);
    store_level(1, 3, 16, KVT_LEVEL_DEFAULT, 0);
    assert_int_equal(run_at(2, 1, KVT_LEVEL_RAW), 1);
    assert_int_equal(run_at(1, 1, KVT_LEVEL_KV8), 0);
    assert_int_equal(rig_stat(&rig, "store.nonfinite"), 1);
    rig_poison(&rig, 1, 0);
    assert_int_equal(load_at(1, 3, KVT_LEVEL_KV4), 3);
    rig_page_bytes(&rig, 1, got);
    assert_memory_equal(got, want, bytes);
    free(want);
    free(got);
}

static int32_t store_cool(uint64_t seed, uint32_t page, int level)
{
    struct kvt_key key = rig_key(seed);
    struct kvt_store_opts opts = {
        .struct_size = sizeof(opts), .first_pos = 16, .level = level, .cool = 1};
    struct kvt_req *req;
    assert_int_equal(kvt_store(rig.ns, rig.pool, &key, &page, 1, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    int32_t status = kvt_req_status(req, NULL)[0];
    kvt_req_free(req);
    return status;
}

/* Cooling from a page: one that is exact or of kv8 origin may be coded, a coarser one not. */
static void cooling_takes_the_place_of_a_better_record(void **state)
{
    const uint32_t pages[2] = {0, 1};
    (void)state;
    open_small("dram=8MiB,level=kv4", 4);
    for (uint32_t i = 0; i < 2; i++)
        rig_fill_smooth(&rig, i, i);
    store_level(1, 2, 16, KVT_LEVEL_KV8, 0);
    assert_int_equal(store_cool(1, 0, KVT_LEVEL_KV4), 0); /* from the exact page */
    assert_int_equal(run_at(1, 1, KVT_LEVEL_KV8), 0);
    assert_int_equal(run_at(1, 1, KVT_LEVEL_KV4), 1);
    assert_int_equal(store_cool(1, 0, KVT_LEVEL_KV4), KVT_E_EXISTS);
    struct kvt_key key = rig_key(2);
    struct kvt_req *req; /* from the kv8 record */
    assert_int_equal(kvt_load(rig.ns, rig.pool, &key, &pages[1], 1, NULL, &req), 0);
    kvt_req_free(req);
    assert_int_equal(store_cool(2, 1, KVT_LEVEL_KV8), KVT_E_EXISTS);
    assert_int_equal(store_cool(2, 1, KVT_LEVEL_RAW), KVT_E_EXISTS);
    assert_int_equal(run_at(2, 1, KVT_LEVEL_KV8), 1);
    assert_int_equal(store_cool(2, 1, KVT_LEVEL_KV4), 0);
    assert_int_equal(run_at(2, 1, KVT_LEVEL_KV8), 0);
    /* a page of kv4 origin is not coded again: kv6 in DRAM stays although int4 is asked for */
    assert_int_equal(kvt_load(rig.ns, rig.pool, &key, &pages[1], 1, NULL, &req), 0);
    kvt_req_free(req);
    assert_int_equal(store_cool(2, 1, KVT_LEVEL_INT4), KVT_E_EXISTS);
    assert_int_equal(run_at(2, 1, KVT_LEVEL_KV4), 1);
    assert_int_equal(rig_stat(&rig, "store.cooled"), 2);
    assert_int_equal(rig_stat(&rig, "store.reorigin"), 0);
}

/* A block of kv8 origin that the guard does not let go lower stays at kv8. */
static void a_block_that_cannot_cool_stays(void **state)
{
    const uint32_t page = 0;
    struct kvt_key key = rig_key(1);
    struct kvt_req *req;
    (void)state;
    open_small("dram=8MiB,level=kv4", 4);
    rig_fill_smooth(&rig, 0, 1);
    shift_keys(0, 8); /* too much for kv4, kv5 and kv6, not for kv8 */
    store_level(1, 1, 16, KVT_LEVEL_KV8, 0);
    assert_int_equal(kvt_load(rig.ns, rig.pool, &key, &page, 1, NULL, &req), 0);
    kvt_req_free(req);
    assert_int_equal(store_cool(1, 0, KVT_LEVEL_KV4), KVT_E_EXISTS);
    assert_int_equal(run_at(1, 1, KVT_LEVEL_KV8), 1);
    assert_int_equal(rig_stat(&rig, "store.cooled"), 0);
    assert_int_equal(rig_stat(&rig, "store.escalated"), 3);
}

/* Callers of the first version end before `cool`: what lies behind their struct is not read. */
static void a_shorter_options_struct_is_accepted(void **state)
{
    struct kvt_key key = rig_key(1);
    uint32_t page = 0;
    struct kvt_req *req;
    struct kvt_store_opts opts = {.first_pos = 16, .level = KVT_LEVEL_KV8};
    (void)state;
    open_small("dram=8MiB,level=kv4", 4);
    rig_fill_smooth(&rig, 0, 1);
    store_level(1, 1, 16, KVT_LEVEL_KV8, 0);
    opts.struct_size = KVT_STORE_OPTS_SIZE_0;
    opts.cool = 1;
    opts.level = KVT_LEVEL_KV4;
    assert_int_equal(kvt_store(rig.ns, rig.pool, &key, &page, 1, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    assert_int_equal(kvt_req_status(req, NULL)[0], KVT_E_EXISTS);
    kvt_req_free(req);
    assert_int_equal(run_at(1, 1, KVT_LEVEL_KV8), 1);
}

/* Promise 5: a page of lossy origin is never stored as exact. */
static void lossy_origin_is_never_stored_as_exact(void **state)
{
    struct kvt_key keys[2] = {rig_key(1), rig_key(2)};
    uint32_t ids[2] = {0, 1};
    (void)state;
    open_small("dram=8MiB,level=kv4", 4);
    rig_fill_smooth(&rig, 0, 1);
    rig_fill_smooth(&rig, 1, 2);
    store_level(1, 2, 16, KVT_LEVEL_KV4, 0);
    assert_int_equal(load_at(1, 2, 0), 2);
    /* the record is still there: nothing is written, nothing replaced, whatever is asked */
    struct kvt_store_opts opts = {.struct_size = sizeof(opts), .first_pos = 16, .exact = 1};
    struct kvt_req *req;
    assert_int_equal(kvt_store(rig.ns, rig.pool, keys, ids, 2, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    assert_int_equal(kvt_req_status(req, NULL)[0], KVT_E_EXISTS);
    kvt_req_free(req);
    assert_int_equal(rig_stat(&rig, "store.reorigin"), 0);
    assert_int_equal(kvt_purge(rig.ns, keys, 2), 2);
    store_level(1, 2, 16, KVT_LEVEL_KV4, 1);
    assert_int_equal(rig_stat(&rig, "store.reorigin"), 2);
    assert_int_equal(run_at(1, 2, KVT_LEVEL_KV8), 2);
    assert_int_equal(run_at(1, 2, KVT_LEVEL_RAW), 0);
    /* the engine computed page 0 anew: exact again */
    assert_int_equal(kvt_purge(rig.ns, keys, 2), 2);
    assert_int_equal(kvt_pool_reset_origin(rig.pool, ids, 1), 0);
    store_level(1, 2, 16, KVT_LEVEL_KV4, 1);
    assert_int_equal(run_at(1, 1, KVT_LEVEL_RAW), 1);
    assert_int_equal(run_at(2, 1, KVT_LEVEL_RAW), 0);
    /* a raw load makes a page exact */
    assert_int_equal(kvt_load(rig.ns, rig.pool, keys, (uint32_t[]){1}, 1, NULL, &req), 0);
    kvt_req_free(req);
    assert_int_equal(kvt_purge(rig.ns, keys, 2), 2);
    opts.exact = 1;
    assert_int_equal(kvt_store(rig.ns, rig.pool, keys, (uint32_t[]){1}, 1, &opts, &req), 0);
    kvt_req_free(req);
    assert_int_equal(run_at(1, 1, KVT_LEVEL_RAW), 1);
}

static void a_deadline_in_the_past_touches_no_page(void **state)
{
    struct kvt_key keys[8];
    uint32_t ids[8];
    struct kvt_load_opts opts = {.struct_size = sizeof(opts), .deadline_ns = 1};
    struct kvt_req *req;
    (void)state;
    open_small("dram=8MiB", 8);
    assert_int_equal(rig_store(&rig, 1, 8, 0, NULL), 8);
    for (uint32_t i = 0; i < 8; i++) {
        keys[i] = rig_key(1 + i);
        ids[i] = i;
        rig_poison(&rig, i, 0xa5);
    }
    assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, 8, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(kvt_req_status(req, NULL)[i], KVT_E_DEADLINE);
        assert_true(rig_poisoned(&rig, i, 0xa5));
    }
    kvt_req_free(req);
    assert_int_equal(rig_stat(&rig, "client.load_deadline"), 8);
    assert_int_equal(rig_stat(&rig, "dram.pins"), 0);
    opts.deadline_ns = INT64_MAX; /* does not overflow */
    assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, 8, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, INT64_MAX), 1);
    assert_int_equal(kvt_req_status(req, NULL)[7], 0);
    kvt_req_free(req);
}

static void the_configured_deadline_applies(void **state)
{
    int32_t status[4];
    (void)state;
    open_small("dram=8MiB,load_deadline=1ns", 4);
    assert_int_equal(rig_store(&rig, 1, 4, 0, NULL), 4);
    assert_int_equal(rig_load(&rig, 1, 4, status), 0);
    assert_int_equal(status[0], KVT_E_DEADLINE);
    struct kvt_key key = rig_key(1);
    struct kvt_load_opts opts = {.struct_size = sizeof(opts), .deadline_ns = -1};
    struct kvt_req *req;
    assert_int_equal(kvt_load(rig.ns, rig.pool, &key, (uint32_t[]){0}, 1, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    assert_int_equal(kvt_req_status(req, NULL)[0], 0);
    kvt_req_free(req);
}

/* Chains longer than a message, than the credits and than the slot window. */
static void long_chains_are_split(void **state)
{
    struct rig_shape shape = {
        .layers = 1, .heads = 1, .dim = 16, .tokens = 16, .pages = 9000, .dtype = KVT_DTYPE_BF16};
    (void)state;
    rig_init(&rig, &shape, "dram=64MiB,threads=3", NULL);
    rig_open(&rig);
    int32_t *status = calloc(9000, sizeof(*status));
    assert_int_equal(rig_store(&rig, 1000, 9000, 0, status), 9000);
    assert_int_equal(rig_lookup(&rig, 1000, 9000), 9000);
    assert_int_equal(rig_load(&rig, 1000, 9000, NULL), 9000);
    assert_int_equal(rig_lookup(&rig, 900, 9000), 0);
    struct kvt_key *keys = calloc(9000, sizeof(*keys));
    for (uint64_t i = 0; i < 9000; i++)
        keys[i] = rig_key(1000 + i);
    enum kvt_tier *tiers = calloc(9000, sizeof(*tiers));
    assert_int_equal(kvt_purge(rig.ns, keys + 3000, 1), 1);
    assert_int_equal(kvt_lookup(rig.ns, keys, 9000, NULL, tiers), 3000);
    for (int i = 0; i < 9000; i++)
        assert_int_equal(tiers[i], i < 3000 ? KVT_TIER_DRAM : KVT_TIER_MISS);
    assert_int_equal(kvt_purge(rig.ns, keys, 9000), 8999);
    assert_int_equal(rig_lookup(&rig, 1000, 9000), 0);
    free(tiers);
    free(keys);
    free(status);
}

/* More than fits: what is dropped is said and counted, the chain behind it is not tried, and what
 * was stored comes back. One thread: blocks are committed in order, so that no parent looks like a
 * leaf while its child is still being encoded. */
static void a_full_cache_drops_and_says_so(void **state)
{
    int32_t status[512];
    (void)state;
    open_small("dram=1MiB,staging=64KiB", 512);
    size_t ok = rig_store(&rig, 1, 512, 0, status);
    size_t dropped = 0;
    for (int i = 0; i < 512; i++)
        dropped += status[i] == KVT_E_DROPPED || status[i] == KVT_E_ORPHAN;
    assert_int_equal(ok + dropped, 512);
    size_t loaded = rig_load(&rig, 1, 512, NULL);
    printf("           %zu stored, %zu dropped, %zu loaded\n", ok, dropped, loaded);
    assert_true(loaded > 0);
    assert_int_equal(rig_lookup(&rig, 1, 512), loaded); /* the chain's start: what can be used */
    assert_true(rig_stat(&rig, "dram.bytes_used") <= 1 << 20);
    assert_int_equal(rig_stat(&rig, "dram.pins"), 0);
    assert_int_equal(rig_store(&rig, 10000, 4, 0, NULL), 4); /* still serving */
    assert_int_equal(rig_load(&rig, 10000, 4, NULL), 4);
}

/* The store learns parents from the client, also across requests and messages: a parent is not
 * evicted before its child. */
static void chains_are_linked_across_requests(void **state)
{
    unsigned gone = 0;
    (void)state;
    open_small("dram=1MiB,staging=64KiB", 40);
    for (uint32_t i = 0; i < 40; i++) { /* one request each: the parent is in another message */
        assert_int_equal(rig_store(&rig, 100 + i, 1, i * 16, NULL), 1);
    }
    for (uint64_t seed = 10000; seed < 10200; seed++) {
        assert_int_equal(rig_store(&rig, seed, 1, 0, NULL), 1);
        bool parent = true;
        for (uint32_t i = 0; i < 40; i++) {
            bool here = rig_lookup(&rig, 100 + i, 1) == 1;
            assert_false(here && !parent);
            parent = here;
        }
        gone += !parent;
    }
    assert_true(gone > 0); /* something was evicted */
}

static void pins_count_and_unpin(void **state)
{
    struct kvt_key keys[6];
    (void)state;
    open_small("dram=8MiB", 6);
    assert_int_equal(rig_store(&rig, 1, 4, 0, NULL), 4);
    for (uint64_t i = 0; i < 6; i++)
        keys[i] = rig_key(1 + i);
    assert_int_equal(kvt_pin(rig.ns, keys, 6), 4);
    assert_int_equal(rig_stat(&rig, "pin.blocks"), 4);
    assert_int_equal(kvt_unpin(rig.ns, keys, 6), 4);
    assert_int_equal(rig_stat(&rig, "pin.blocks"), 0);
    assert_int_equal(kvt_flush(rig.cache), 0);
    assert_int_equal(kvt_purge(rig.ns, NULL, 0), 4);
    assert_int_equal(rig_lookup(&rig, 1, 4), 0);
}

static void a_forked_child_is_refused_and_disturbs_nothing(void **state)
{
    (void)state;
    open_small("dram=8MiB", 8);
    assert_int_equal(rig_store(&rig, 1, 8, 0, NULL), 8);
    struct kvt_key key = rig_key(1);
    struct kvt_req *held;
    assert_int_equal(kvt_load(rig.ns, rig.pool, &key, (uint32_t[]){0}, 1, NULL, &held), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct kvt_req *req = NULL;
        uint32_t id = 0;
        uint64_t value;
        int bad = 0;
        bad += kvt_lookup(rig.ns, &key, 1, NULL, NULL) != KVT_E_CLOSED;
        bad += kvt_load(rig.ns, rig.pool, &key, &id, 1, NULL, &req) != KVT_E_CLOSED;
        bad += kvt_store(rig.ns, rig.pool, &key, &id, 1, NULL, &req) != KVT_E_CLOSED;
        bad += kvt_flush(rig.cache) != KVT_E_CLOSED;
        bad += kvt_stats_get(rig.cache, "dram.pins", &value) != KVT_E_CLOSED;
        bad += kvt_req_wait(held, -1) != KVT_E_CLOSED;
        kvt_req_cancel(held);
        kvt_req_free(held);
        kvt_enable(rig.cache, 0);
        kvt_pool_unregister(rig.pool);
        kvt_ns_close(rig.ns);
        kvt_close(rig.cache);
        _exit(bad);
    }
    int wait_status = 0;
    assert_int_equal(waitpid(pid, &wait_status, 0), pid);
    assert_true(WIFEXITED(wait_status));
    assert_int_equal(WEXITSTATUS(wait_status), 0);
    kvt_req_free(held);
    assert_int_equal(rig_load(&rig, 1, 8, NULL), 8);
    assert_int_equal(rig_store(&rig, 9, 8, 128, NULL), 8);
}

/* Close with requests in flight and handles not given back: nothing leaks (the address sanitizer
 * watches), nothing hangs. */
static void close_cancels_what_is_left(void **state)
{
    struct kvt_key keys[256];
    uint32_t ids[5 * 256]; /* pages belong to one load at a time: each has its own */
    struct kvt_req *req;
    (void)state;
    for (int round = 0; round < 20; round++) {
        open_small("dram=16MiB", 5 * 256);
        for (uint32_t i = 0; i < 5 * 256; i++)
            ids[i] = i;
        for (uint32_t i = 0; i < 256; i++)
            keys[i] = rig_key(i);
        for (int i = 0; i < 4; i++) {
            uint32_t *own = ids + (i + 1) * 256;

            assert_int_equal(kvt_store(rig.ns, rig.pool, keys, ids, 256, NULL, &req), 0);
            assert_int_equal(kvt_load(rig.ns, rig.pool, keys, own, 256, NULL, &req), 0);
        }
        rig_sleep_ms((unsigned)round % 3);
        kvt_close(rig.cache);
        rig.cache = NULL;
        rig.ns = NULL;
        rig.pool = NULL;
        tear_down(NULL);
    }
}

static int64_t cpu_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static void nobody_spins_when_idle(void **state)
{
    (void)state;
    open_small("dram=8MiB,threads=4", 8);
    assert_int_equal(rig_store(&rig, 1, 8, 0, NULL), 8);
    assert_int_equal(rig_load(&rig, 1, 8, NULL), 8);
    rig_sleep_ms(50); /* what follows a request may still run */
    int64_t before = cpu_ns();
    rig_sleep_ms(400);
    int64_t used = cpu_ns() - before;
    printf("           %lld us of CPU in 400 ms\n", (long long)used / 1000);
    assert_true(used < 20000000);
}

struct name_list {
    char names[512][48];
    unsigned count;
};

static void add_name(void *arg, const char *name, uint64_t value, const char *text,
                     const char *help)
{
    struct name_list *list = arg;
    (void)value;
    (void)text;
    assert_true(help != NULL && help[0] != '\0');
    assert_true(strlen(name) < sizeof(list->names[0]));
    for (unsigned i = 0; i < list->count; i++)
        if (strcmp(list->names[i], name) == 0)
            fail_msg("%s is listed twice", name);
    assert_true(list->count < KVT_ARRAY_LEN(list->names));
    snprintf(list->names[list->count++], sizeof(list->names[0]), "%s", name);
}

static void statistics_name_everything_once(void **state)
{
    static struct name_list list;
    char text[256];
    uint64_t value;
    (void)state;
    open_small("dram=8MiB", 4);
    rig_stat_text(&rig, "codec.isa", text, sizeof(text));
    assert_string_equal(text, kvt_codec_isa());
    rig_stat_text(&rig, "version", text, sizeof(text));
    assert_string_equal(text, kvt_version());
    rig_stat_text(&rig, "disk.state", text, sizeof(text));
    assert_string_equal(text, "none");
    rig_stat_text(&rig, "config.dram", text, sizeof(text));
    assert_string_equal(text, "8MiB");
    rig_stat_text(&rig, "config.staging", text, sizeof(text)); /* effective, not "auto" */
    assert_string_equal(text, "1MiB");
    list.count = 0;
    assert_int_equal(kvt_stats_each(rig.cache, add_name, &list), 0);
    assert_true(list.count > 80);
    assert_int_equal(kvt_stats_get(rig.cache, "no.such.name", &value), KVT_E_INVAL);
    assert_int_equal(kvt_stats_get(rig.cache, "codec.isa", &value), KVT_E_INVAL); /* a text */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(open_close_leaves_nothing, tear_down),
        cmocka_unit_test_teardown(stored_blocks_come_back_exact, tear_down),
        cmocka_unit_test_teardown(reports_say_what_happened, tear_down),
        cmocka_unit_test_teardown(empty_requests_complete, tear_down),
        cmocka_unit_test_teardown(bad_arguments_are_refused, tear_down),
        cmocka_unit_test_teardown(shapes_that_do_not_match_are_refused, tear_down),
        cmocka_unit_test_teardown(refused_when_nothing_is_left_and_fine_afterwards, tear_down),
        cmocka_unit_test_teardown(the_event_fd_counts_completions, tear_down),
        cmocka_unit_test_teardown(the_off_switch_makes_everything_a_miss, tear_down),
        cmocka_unit_test_teardown(opened_off_stays_off_until_enabled, tear_down),
        cmocka_unit_test_teardown(levels_first_block_raw_and_minimum, tear_down),
        cmocka_unit_test_teardown(loaded_pages_are_what_the_codec_makes, tear_down),
        cmocka_unit_test_teardown(a_failed_guard_goes_up_and_is_counted, tear_down),
        cmocka_unit_test_teardown(without_the_guard_nothing_goes_up, tear_down),
        cmocka_unit_test_teardown(nan_is_stored_raw, tear_down),
        cmocka_unit_test_teardown(cooling_takes_the_place_of_a_better_record, tear_down),
        cmocka_unit_test_teardown(a_block_that_cannot_cool_stays, tear_down),
        cmocka_unit_test_teardown(a_shorter_options_struct_is_accepted, tear_down),
        cmocka_unit_test_teardown(lossy_origin_is_never_stored_as_exact, tear_down),
        cmocka_unit_test_teardown(a_deadline_in_the_past_touches_no_page, tear_down),
        cmocka_unit_test_teardown(the_configured_deadline_applies, tear_down),
        cmocka_unit_test_teardown(long_chains_are_split, tear_down),
        cmocka_unit_test_teardown(a_full_cache_drops_and_says_so, tear_down),
        cmocka_unit_test_teardown(chains_are_linked_across_requests, tear_down),
        cmocka_unit_test_teardown(pins_count_and_unpin, tear_down),
        cmocka_unit_test_teardown(a_forked_child_is_refused_and_disturbs_nothing, tear_down),
        cmocka_unit_test_teardown(close_cancels_what_is_left, tear_down),
        cmocka_unit_test_teardown(nobody_spins_when_idle, tear_down),
        cmocka_unit_test_teardown(statistics_name_everything_once, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
