/* Pools in GPU memory behind the public API, against the fake driver.
 *
 * Goal:   what the ordinary client promises holds for pools of a device: blocks come back as the
 *         scalar codec says, from DRAM and after a restart from disk; guard and NaN go up the
 *         ladder; corrupt records are not taken; an engine's event comes first; memory is pinned in
 *         the background, in part or not at all; every failure of the device is a status and a
 *         counter, and the cache lives on.
 * Method: api_rig.h over fake_cuda.c, whose streams run in random order with the scalar codec in
 *         place of the kernels and which fails any call on demand.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "client/client.h"
#include "gpu/api_rig.h"
#include "gpu/fake_cuda.h"
#include "gpu/gpu.h"
#include "support/rig.h"

static const struct api_shape small = {"small", 2, 2, 64, 16, 48, KVT_DTYPE_BF16, API_NHD, false};

/* These tests need kernels in the build: the fake driver runs them by name. */
static void start(struct api *api, const struct api_shape *shape, const char *config, bool disk)
{
    if (!kvt_gpu_kernels_built())
        skip();
    assert_true(api_init(api, KVT_FAKE_CUDA, shape, config, disk));
}

static void fill(struct api *api, uint32_t n, uint64_t seed, enum api_values values)
{
    for (uint32_t i = 0; i < n; i++)
        api_fill(api, i, seed + i, values);
    api_upload(api);
}

/* The mirror becomes what loads of pages 0 to n - 1 must give; page 0 was the first of a chain. */
static void expect_coded(struct api *api, uint32_t n, uint64_t seed, enum api_values values)
{
    api_poison(api);
    for (uint32_t i = 0; i < n; i++) {
        api_fill(api, i, seed + i, values);
        (void)api_coded(api, i, i == 0 ? KVT_LEVEL_RAW : KVT_LEVEL_KV4);
    }
}

static void wait_pinned(struct api *api, uint64_t bytes)
{
    for (int i = 0; i < 1000 && api_stat(api, "dram.pinned_bytes") < bytes; i++)
        rig_sleep_ms(5);
    assert_int_equal(api_stat(api, "dram.pinned_bytes"), bytes);
}

/* ---- round trips ---- */

static void round_trip(const struct api_shape *shape, enum api_values values)
{
    struct api api;
    uint32_t n = shape->pages;
    int32_t status[API_PAGES_MAX];
    start(&api, shape, "dram=64MiB,threads=1", true);
    api_open(&api);
    fill(&api, n, 100, values);
    assert_int_equal(api_store(&api, 1000, n, 0, 0, NULL), n);
    assert_true(api_same(&api)); /* a store changes no page */
    api_poison(&api);
    assert_int_equal(api_load(&api, 1000, n, 0, status), n);
    expect_coded(&api, n, 100, values);
    /* expect_coded() has poisoned the device too: load again. */
    assert_int_equal(api_load(&api, 1000, n, 0, NULL), n);
    assert_true(api_same(&api));
    assert_int_equal(api_load(&api, 5000, 4, 0, status), 0);
    assert_int_equal(status[0], KVT_E_MISS);
    assert_true(api_same(&api)); /* a miss touches no page */
    assert_int_equal(kvt_flush(api.cache), 0);
    api_close(&api);

    api_poison(&api); /* a restart: from disk */
    api_open(&api);
    expect_coded(&api, n, 100, values);
    assert_int_equal(api_load(&api, 1000, n, 0, NULL), n);
    assert_true(api_same(&api));
    assert_true(api_stat(&api, "gpu.jobs") > 0);
    assert_int_equal(api_stat(&api, "client.bad_move"), 0);
    assert_int_equal(api_stat(&api, "gpu.failed_blocks"), 0);
    api_free(&api);
    api_fake_nothing_left();
}

static void test_round_trips(void **state)
{
    static const struct api_shape shapes[] = {
        {"nhd", 2, 2, 64, 16, 48, KVT_DTYPE_BF16, API_NHD, false},
        {"hnd f16", 1, 3, 128, 32, 20, KVT_DTYPE_F16, API_HND, false},
        {"packed f32", 2, 1, 80, 16, 16, KVT_DTYPE_F32, API_PACKED, false},
        {"mla", 2, 1, 576, 16, 12, KVT_DTYPE_BF16, API_NHD, true},
    };
    (void)state;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        round_trip(&shapes[i], API_SMOOTH);
}

/* Blocks that fail the guard go up, NaN goes to raw, the others stay: as on the CPU. */
static void test_ladder(void **state)
{
    struct api api;
    int32_t status[48];
    (void)state;
    round_trip(&small, API_ROUGH);
    round_trip(&small, API_NAN);
    start(&api, &small, "dram=16MiB,threads=1", false);
    api_open(&api);
    fill(&api, 48, 100, API_ROUGH);
    assert_int_equal(api_store(&api, 1, 48, 0, 0, status), 48);
    assert_true(api_stat(&api, "store.escalated") > 0);
    fill(&api, 48, 100, API_NAN);
    assert_int_equal(api_store(&api, 101, 48, 0, 0, status), 48);
    assert_true(api_stat(&api, "store.nonfinite") > 0);
    api_free(&api);
    api_fake_nothing_left();
}

/* A device pool and a host pool of one layout share records in both directions. */
static void test_pools_mix(void **state)
{
    struct api api;
    struct kvt_pool *host;
    struct kvt_key keys[8];
    uint32_t ids[8];
    struct kvt_req *req;
    (void)state;
    start(&api, &small, "dram=16MiB,threads=1", false);
    api_open(&api);
    fill(&api, 8, 7, API_SMOOTH);
    assert_int_equal(api_store(&api, 1, 8, 0, 0, NULL), 8);
    assert_int_equal(kvt_pool_register(api.cache, &api.layout, &api.host_desc, &host), 0);
    memset(api.mirror, 0, api.bytes);
    for (uint32_t i = 0; i < 8; i++) {
        keys[i] = api_key(1 + i);
        ids[i] = i;
    }
    assert_int_equal(kvt_load(api.ns, host, keys, ids, 8, NULL, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    kvt_req_free(req);
    memcpy(api.back, api.mirror, api.bytes);
    uint8_t *loaded = malloc(api.bytes);
    assert_non_null(loaded);
    memcpy(loaded, api.mirror, api.bytes);
    memset(api.mirror, 0, api.bytes);
    api_upload(&api);
    assert_int_equal(api_load(&api, 1, 8, 0, NULL), 8);
    memcpy(api.mirror, loaded, api.bytes);
    assert_true(api_same(&api));
    free(loaded);
    kvt_pool_unregister(host);
    api_free(&api);
    api_fake_nothing_left();
}

/* More blocks than DRAM holds, on disk: loads stage through a few slots. */
static void test_small_dram(void **state)
{
    struct api api;
    (void)state;
    start(&api, &small, "dram=256KiB,staging=128KiB,threads=1", true);
    api_open(&api);
    fill(&api, 48, 3, API_SMOOTH);
    for (uint32_t at = 0; at < 48; at += 4) {
        assert_int_equal(api_store(&api, 500 + at, 4, at, at * 16, NULL), 4);
        assert_int_equal(kvt_flush(api.cache), 0);
    }
    expect_coded(&api, 48, 3, API_SMOOTH);
    assert_int_equal(api_load(&api, 500, 48, 0, NULL), 48);
    assert_true(api_same(&api));
    api_free(&api);
    api_fake_nothing_left();
}

/* ---- pinning ---- */

static void test_pinned(void **state)
{
    struct api api;
    (void)state;
    start(&api, &small, "dram=2560MiB,threads=1", false);
    api_open(&api);
    wait_pinned(&api, UINT64_C(2560) << 20);
    assert_int_equal(fake->registered, 3); /* pieces of 1 GiB */
    fill(&api, 16, 5, API_SMOOTH);
    for (uint32_t i = 0; i < 8; i++) { /* two chains, their records by turns */
        assert_int_equal(api_store(&api, 1 + i, 1, i, 16 * i, NULL), 1);
        assert_int_equal(api_store(&api, 101 + i, 1, i, 16 * i, NULL), 1);
    }
    assert_int_equal(api_load(&api, 1, 8, 0, NULL), 8);
    assert_true(fake->batches > 0); /* pinned records go in batches */
    api_free(&api);
    api_fake_nothing_left();
}

static void test_c37_pinning_fails(void **state)
{
    static const int results[] = {KVT_CU_OUT_OF_MEMORY, 304 /* the system */,
                                  801 /* unsupported */};
    (void)state;
    for (size_t i = 0; i < sizeof(results) / sizeof(results[0]); i++) {
        struct api api;
        api_fake_reset(NULL);
        start(&api, &small, "dram=64MiB,threads=1", false);
        fake->fail = "cuMemHostRegister";
        fake->fail_result = results[i];
        api_open(&api);
        char text[160] = "";
        for (int t = 0; t < 1000 && strncmp(text, "failed", 6) != 0; t++) {
            rig_sleep_ms(5);
            api_stat_text(&api, "dram.pin_state", text, sizeof(text));
        }
        assert_true(strncmp(text, "failed", 6) == 0);
        assert_int_equal(api_stat(&api, "dram.pinned_bytes"), 0);
        fill(&api, 8, 9, API_SMOOTH);
        assert_int_equal(api_store(&api, 1, 8, 0, 0, NULL), 8);
        expect_coded(&api, 8, 9, API_SMOOTH);
        assert_int_equal(api_load(&api, 1, 8, 0, NULL), 8);
        assert_true(api_same(&api));
        api_close(&api); /* the thread that warned is gone */
        const char *warning = strstr(api.log, "the CUDA driver");
        assert_non_null(warning);
        assert_null(strstr(warning + 1, "the CUDA driver"));
        api_free(&api);
        api_fake_nothing_left();
    }
}

/* ---- bad input and failures ---- */

static void test_refused_pools(void **state)
{
    struct api api;
    char text[256];
    (void)state;
    start(&api, &small, "dram=16MiB,threads=1", false);
    api.device_desc.device = -2;
    assert_int_equal(api_try_register(&api), KVT_E_INVAL);
    api.device_desc.device = 3;
    assert_int_equal(kvt_pool_register(api.cache, &api.layout, &api.device_desc, &api.pool),
                     KVT_E_UNSUPPORTED);
    api_stat_text(&api, "gpu.state", text, sizeof(text));
    assert_non_null(strstr(text, "no CUDA device 3"));
    api.device_desc.device = 0;
    fake->pointer_ordinal = 1; /* memory of another device */
    assert_int_equal(kvt_pool_register(api.cache, &api.layout, &api.device_desc, &api.pool),
                     KVT_E_INVAL);
    api_stat_text(&api, "gpu.state", text, sizeof(text));
    assert_non_null(strstr(text, "not memory of CUDA device 0"));
    fake->pointer_ordinal = 0;
    fake->fail = "cuMemAlloc";
    fake->fail_result = KVT_CU_OUT_OF_MEMORY;
    assert_int_equal(kvt_pool_register(api.cache, &api.layout, &api.device_desc, &api.pool),
                     -ENOMEM);
    fake->fail = NULL;
    assert_int_equal(api_stat(&api, "gpu.refused"), 3);
    assert_int_equal(kvt_pool_register(api.cache, &api.layout, &api.device_desc, &api.pool), 0);
    api_stat_text(&api, "gpu.state", text, sizeof(text));
    assert_non_null(strstr(text, "ok: device 0, Fake GPU"));
    fill(&api, 4, 1, API_SMOOTH);
    assert_int_equal(api_store(&api, 1, 4, 0, 0, NULL), 4);
    uint32_t id = 48; /* out of range */
    struct kvt_key key = api_key(77);
    struct kvt_req *req;
    assert_int_equal(kvt_store(api.ns, api.pool, &key, &id, 1, NULL, &req), KVT_E_INVAL);
    assert_int_equal(kvt_load(api.ns, api.pool, &key, &id, 1, NULL, &req), KVT_E_INVAL);
    api_free(&api);
    api_fake_nothing_left();
}

static void test_no_driver(void **state)
{
    struct api api;
    char text[256];
    (void)state;
    start(&api, &small, "dram=16MiB,threads=1", false);
    api.library = "libcuda-that-is-not-there.so";
    assert_int_equal(api_try_register(&api), KVT_E_UNSUPPORTED);
    api_stat_text(&api, "gpu.state", text, sizeof(text));
    assert_non_null(strstr(text, "no NVIDIA driver"));
    assert_non_null(strstr(api.log, "refused"));
    api_close(&api);
    api.library = KVT_FAKE_CUDA_OLD;
    assert_int_equal(api_try_register(&api), KVT_E_UNSUPPORTED);
    api_stat_text(&api, "gpu.state", text, sizeof(text));
    assert_non_null(strstr(text, "older than CUDA 12.0"));
    api_free(&api);
    api_fake_nothing_left();
}

/* The device is lost in the middle: statuses, counters, one warning; host pools live on, and so
 * does what DRAM holds. */
static void lose_device(const char *call, int after, int result)
{
    struct api api;
    struct kvt_pool *host;
    struct kvt_key keys[8];
    uint32_t ids[8];
    struct kvt_req *req;
    int32_t status[48];
    api_fake_reset(NULL);
    start(&api, &small, "dram=16MiB,threads=1", false);
    api_open(&api);
    wait_pinned(&api, 16 << 20); /* from here on the driver has no other caller */
    fill(&api, 48, 1, API_SMOOTH);
    assert_int_equal(api_store(&api, 1, 8, 0, 0, NULL), 8);
    fake->fail = call;
    fake->fail_after = after;
    fake->fail_result = result;
    size_t stored = api_store(&api, 101, 32, 8, 0, status);
    assert_true(stored < 32);
    for (uint32_t i = 0; i < 32; i++)
        assert_true(status[i] == 0 || status[i] == KVT_E_DEVICE);
    assert_int_equal(api_load(&api, 1, 8, 0, status), 0);
    assert_int_equal(status[0], KVT_E_DEVICE);
    assert_int_equal(status[7], KVT_E_DEVICE);
    assert_true(api_stat(&api, "gpu.failed_blocks") >= 8);
    assert_int_equal(api_stat(&api, "gpu.lost"), 1);
    assert_non_null(strstr(api.log, "is lost"));
    assert_int_equal(kvt_pool_register(api.cache, &api.layout, &api.host_desc, &host), 0);
    for (uint32_t i = 0; i < 8; i++) {
        keys[i] = api_key(1 + i);
        ids[i] = i;
    }
    assert_int_equal(kvt_load(api.ns, host, keys, ids, 8, NULL, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    assert_int_equal(kvt_req_status(req, NULL)[7], 0);
    kvt_req_free(req);
    kvt_pool_unregister(host);
    assert_int_equal(api_stat(&api, "client.bad_move"), 0);
    fake->fail = NULL;
    api_free(&api);
}

static void test_device_lost(void **state)
{
    (void)state;
    lose_device("cuEventSynchronize", 0, 700); /* a kernel fault */
    lose_device("cuLaunchKernel", 3, 719);
    lose_device("cuCtxPushCurrent", 0, 709);  /* the context was destroyed */
    lose_device("cuStreamWaitEvent", 2, 201); /* or reset */
    lose_device("cuMemcpyDtoHAsync", 1, 214); /* memory errors */
}

/* A call that fails without the device being lost: these blocks end with it, later ones go. */
static void test_passing_failures(void **state)
{
    static const char *const calls[] = {"cuLaunchKernel", "cuEventRecord", "cuMemsetD32Async"};
    (void)state;
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        struct api api;
        int32_t status[16];
        api_fake_reset(NULL);
        start(&api, &small, "dram=16MiB,threads=1", false);
        api_open(&api);
        wait_pinned(&api, 16 << 20);
        fill(&api, 16, 1, API_SMOOTH);
        fake->fail = calls[i];
        fake->fail_result = KVT_CU_OUT_OF_MEMORY;
        assert_int_equal(api_store(&api, 1, 16, 0, 0, status), 0);
        assert_int_equal(status[0], -ENOMEM);
        fake->fail = NULL;
        assert_int_equal(api_stat(&api, "gpu.lost"), 0);
        assert_int_equal(api_store(&api, 1, 16, 0, 0, status), 16);
        api_free(&api);
        api_fake_nothing_left();
    }
}

/* A record that changed in DRAM: the GPU's checksum finds it, the block is dropped, others load. */
static void test_corrupt_record(void **state)
{
    struct api api;
    int32_t status[8];
    (void)state;
    start(&api, &small, "dram=16MiB,threads=1", false);
    api_open(&api);
    fill(&api, 8, 1, API_SMOOTH);
    assert_int_equal(api_store(&api, 1, 8, 0, 0, NULL), 8);
    size_t record = kvt_ns_record_bytes(api.ns, 0, KVT_LEVEL_KV4);
    bool flipped = false;
    for (size_t at = 0; at + record <= api.cache->arena_bytes && !flipped; at += 4096) {
        struct kvt_record_header *header = (void *)(api.cache->arena + at);
        struct kvt_key want = api_key(4);
        if (header->magic == KVT_RECORD_MAGIC && header->map == KVT_LEVEL_KV4 &&
            memcmp(header->key.hash, want.hash, sizeof(want.hash)) == 0) {
            api.cache->arena[at + 700] ^= 4;
            flipped = true;
        }
    }
    assert_true(flipped);
    assert_int_equal(api_load(&api, 1, 8, 0, status), 7);
    assert_int_equal(status[3], KVT_E_CORRUPT);
    assert_int_equal(api_stat(&api, "client.load_corrupt"), 1);
    assert_int_equal(api_load(&api, 1, 8, 0, status), 3); /* gone for good: a chain ends there */
    assert_int_equal(status[3], KVT_E_MISS);
    api_free(&api);
    api_fake_nothing_left();
}

/* ---- requests ---- */

static void test_cancel_and_close(void **state)
{
    struct api api;
    struct kvt_key keys[40];
    uint32_t ids[40];
    struct kvt_req *reqs[6];
    (void)state;
    start(&api, &small, "dram=16MiB,threads=1", false);
    api_open(&api);
    fill(&api, 48, 1, API_SMOOTH);
    for (int round = 0; round < 10; round++) {
        for (size_t r = 0; r < 6; r++) {
            for (uint32_t i = 0; i < 40; i++) {
                keys[i] = api_key(1000 * r + i);
                ids[i] = i;
            }
            int rc = (r + (size_t)round) % 2
                         ? kvt_store(api.ns, api.pool, keys, ids, 40, NULL, &reqs[r])
                         : kvt_load(api.ns, api.pool, keys, ids, 40, NULL, &reqs[r]);
            assert_int_equal(rc, 0);
        }
        for (size_t r = 0; r < 6; r += 2)
            kvt_req_cancel(reqs[r]);
        for (size_t r = 0; r < 6; r++) {
            assert_int_equal(kvt_req_wait(reqs[r], -1), 1);
            kvt_req_free(reqs[r]);
        }
    }
    assert_int_equal(api_stat(&api, "client.bad_move"), 0);
    assert_int_equal(api_stat(&api, "client.bad_reply"), 0);
    /* Closed with a store in flight. */
    for (uint32_t i = 0; i < 40; i++)
        keys[i] = api_key(90000 + i);
    assert_int_equal(kvt_store(api.ns, api.pool, keys, ids, 40, NULL, &reqs[0]), 0);
    kvt_close(api.cache);
    api.cache = NULL;
    api_free(&api);
    api_fake_nothing_left();
}

/* The engine writes its pages late, on its own stream: a store that waits for the stream, or for an
 * event of it, has them; a load that waits comes after the engine's last use of the page. */
static void test_engine_order(void **state)
{
    struct api api;
    struct kvt_key keys[8];
    uint32_t ids[8];
    struct kvt_req *req;
    kvt_cu_event event;
    (void)state;
    start(&api, &small, "dram=16MiB,threads=1", false);
    api_open(&api);
    for (int round = 0; round < 20; round++) {
        struct kvt_store_opts store = {.struct_size = sizeof(store)};
        struct kvt_load_opts load = {.struct_size = sizeof(load)};
        uint64_t seed = 100 * (uint64_t)(round + 1);
        api_poison(&api);
        for (uint32_t i = 0; i < 8; i++) {
            api_fill(&api, i, seed + i, API_SMOOTH);
            keys[i] = api_key(seed + i);
            ids[i] = i;
        }
        memcpy(api.back, api.mirror, api.bytes);
        api_enter(&api);
        assert_int_equal(api.cuda.copy_to_device_async(api.memory, api.back, api.bytes, api.stream),
                         0);
        assert_int_equal(api.cuda.event_create(&event, 0), 0);
        assert_int_equal(api.cuda.event_record(event, api.stream), 0);
        api_leave(&api);
        assert_int_equal(kvt_pool_reset_origin(api.pool, ids, 8), 0);
        store.wait = round % 2 ? KVT_WAIT_FOR_STREAM : KVT_WAIT_FOR_EVENT;
        store.wait_for = round % 2 ? api.stream : event;
        assert_int_equal(kvt_store(api.ns, api.pool, keys, ids, 8, &store, &req), 0);
        assert_int_equal(kvt_req_wait(req, -1), 1);
        for (uint32_t i = 0; i < 8; i++)
            assert_int_equal(kvt_req_status(req, NULL)[i], 0);
        kvt_req_free(req);
        /* The load waits for what overwrites its pages. */
        uint8_t *poison = malloc(api.bytes);
        assert_non_null(poison);
        memset(poison, 0x77, api.bytes);
        api_enter(&api);
        assert_int_equal(api.cuda.copy_to_device_async(api.memory, poison, api.bytes, api.stream),
                         0);
        api_leave(&api);
        load.wait = KVT_WAIT_FOR_STREAM;
        load.wait_for = api.stream;
        assert_int_equal(kvt_load(api.ns, api.pool, keys, ids, 8, &load, &req), 0);
        assert_int_equal(kvt_req_wait(req, -1), 1);
        kvt_req_free(req);
        memset(api.mirror, 0x77, api.bytes);
        for (uint32_t i = 0; i < 8; i++) {
            api_fill(&api, i, seed + i, API_SMOOTH);
            (void)api_coded(&api, i, i == 0 ? KVT_LEVEL_RAW : KVT_LEVEL_KV4);
        }
        assert_true(api_same(&api));
        free(poison);
        api_enter(&api);
        assert_int_equal(api.cuda.event_destroy(event), 0);
        api_leave(&api);
    }
    api_free(&api);
    api_fake_nothing_left();
}

static void test_wait_refusals(void **state)
{
    struct api api;
    struct kvt_pool *host;
    struct kvt_key key = api_key(5);
    uint32_t id = 0;
    struct kvt_req *req;
    struct kvt_store_opts store = {.struct_size = sizeof(store), .wait = 3};
    struct kvt_load_opts load = {.struct_size = sizeof(load), .wait = -1};
    (void)state;
    start(&api, &small, "dram=16MiB,threads=1", false);
    api_open(&api);
    assert_int_equal(kvt_store(api.ns, api.pool, &key, &id, 1, &store, &req), KVT_E_INVAL);
    assert_int_equal(kvt_load(api.ns, api.pool, &key, &id, 1, &load, &req), KVT_E_INVAL);
    assert_int_equal(kvt_pool_register(api.cache, &api.layout, &api.host_desc, &host), 0);
    store.wait = load.wait = KVT_WAIT_FOR_STREAM;
    assert_int_equal(kvt_store(api.ns, host, &key, &id, 1, &store, &req), KVT_E_INVAL);
    assert_int_equal(kvt_load(api.ns, host, &key, &id, 1, &load, &req), KVT_E_INVAL);
    kvt_pool_unregister(host);
    store.wait_for = load.wait_for = api.stream;
    fake->fail = "cuEventRecord";
    fake->fail_result = 400; /* an invalid handle */
    assert_int_equal(kvt_store(api.ns, api.pool, &key, &id, 1, &store, &req), KVT_E_DEVICE);
    assert_int_equal(kvt_load(api.ns, api.pool, &key, &id, 1, &load, &req), KVT_E_DEVICE);
    fake->fail = NULL;
    assert_int_equal(api_stat(&api, "client.requests_held"), 0);
    /* An event that is refused later: the request's blocks end, nobody stores what is not there. */
    fill(&api, 1, 5, API_SMOOTH);
    fake->fail = "cuStreamWaitEvent";
    fake->fail_result = 400;
    assert_int_equal(kvt_store(api.ns, api.pool, &key, &id, 1, &store, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    assert_int_equal(kvt_req_status(req, NULL)[0], KVT_E_DEVICE);
    kvt_req_free(req);
    fake->fail = NULL;
    /* Callers of the version before have shorter options. */
    load.struct_size = KVT_LOAD_OPTS_SIZE_0;
    load.wait = 99;
    assert_int_equal(kvt_load(api.ns, api.pool, &key, &id, 1, &load, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    assert_int_equal(kvt_req_status(req, NULL)[0], KVT_E_MISS);
    kvt_req_free(req);
    api_free(&api);
    api_fake_nothing_left();
}

/* A pace holds: 40 blocks of 8 KiB a record at 1 MiB/s take some 0.2 s and more. */
static void test_pace(void **state)
{
    struct api api;
    (void)state;
    start(&api, &small, "dram=16MiB,threads=1,gpu_pace=1MiB", false);
    api_open(&api);
    fill(&api, 48, 1, API_SMOOTH);
    int64_t before = rig_now_ns();
    assert_int_equal(api_store(&api, 1, 48, 0, 0, NULL), 48);
    double bytes = (double)(47 * kvt_ns_record_bytes(api.ns, 0, KVT_LEVEL_KV4));
    double seconds = (double)(rig_now_ns() - before) * 1e-9;
    assert_true(seconds > 0.8 * bytes / (1 << 20));
    api_free(&api);
    api_fake_nothing_left();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_round_trips, api_fake_reset),
        cmocka_unit_test_setup(test_ladder, api_fake_reset),
        cmocka_unit_test_setup(test_pools_mix, api_fake_reset),
        cmocka_unit_test_setup(test_small_dram, api_fake_reset),
        cmocka_unit_test_setup(test_pinned, api_fake_reset),
        cmocka_unit_test_setup(test_c37_pinning_fails, api_fake_reset),
        cmocka_unit_test_setup(test_refused_pools, api_fake_reset),
        cmocka_unit_test_setup(test_no_driver, api_fake_reset),
        cmocka_unit_test_setup(test_device_lost, api_fake_reset),
        cmocka_unit_test_setup(test_passing_failures, api_fake_reset),
        cmocka_unit_test_setup(test_corrupt_record, api_fake_reset),
        cmocka_unit_test_setup(test_cancel_and_close, api_fake_reset),
        cmocka_unit_test_setup(test_engine_order, api_fake_reset),
        cmocka_unit_test_setup(test_wait_refusals, api_fake_reset),
        cmocka_unit_test_setup(test_pace, api_fake_reset),
    };
    return cmocka_run_group_tests(tests, api_fake_load, NULL);
}
