/* Loads by layers behind the public API, against the fake driver.
 *
 * Goal:   the layers that kvt_req_wait_layer() says are there are there, of every block, while
 * later ones are not announced before they are; the last one comes with the verdict only: a damaged
 *         record ends as corrupt and no wait for all layers returns before that is known; blocks on
 *         disk, cancelled requests, failures of the device and pools in host memory end as ever.
 * Method: api_rig.h over the fake driver, whose streams run as late as they may and in random
 * order; a host pool of the same cache loads the same records and is the judge.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/client.h"
#include "gpu/api_rig.h"
#include "gpu/fake_cuda.h"
#include "gpu/gpu.h"
#include "support/rig.h"

#define PAGES 5u
#define LAYERS 24u

/* Records of 384 KiB: three ranges; the first block, raw, has more. */
static const struct api_shape large = {"layers", LAYERS,         8,       128,  16,
                                       PAGES,    KVT_DTYPE_BF16, API_NHD, false};

static void start(struct api *api, const char *config, bool disk)
{
    if (!kvt_gpu_kernels_built())
        skip();
    assert_true(api_init(api, KVT_FAKE_CUDA, &large, config, disk));
    api_open(api);
    for (uint32_t i = 0; i < PAGES; i++)
        api_fill(api, i, 40 + i, API_SMOOTH);
    api_upload(api);
}

static void finish(struct api *api)
{
    assert_int_equal(api_stat(api, "client.bad_move"), 0);
    api_free(api);
    assert_int_equal(fake->memory, 0);
    assert_int_equal(fake->events, 0);
    assert_int_equal(fake->context_depth, 0);
}

static struct kvt_req *load(struct api *api, struct kvt_pool *pool, uint64_t first, uint32_t n,
                            int layers)
{
    struct kvt_load_opts opts = {.struct_size = sizeof(opts), .layers = layers};
    struct kvt_key keys[PAGES];
    uint32_t ids[PAGES];
    struct kvt_req *req;
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = api_key(first + i);
        ids[i] = i;
    }
    assert_int_equal(kvt_load(api->ns, pool, keys, ids, n, &opts, &req), 0);
    return req;
}

/* What a load of all pages must give, in the mirror. The device's pool is poisoned. */
static void expect(struct api *api, uint64_t first)
{
    struct kvt_pool *host;
    assert_int_equal(kvt_pool_register(api->cache, &api->layout, &api->host_desc, &host), 0);
    api_poison(api);
    struct kvt_req *req = load(api, host, first, PAGES, 1); /* as good as without */
    assert_int_equal(kvt_req_wait_layer(req, 0, -1), 1);
    assert_int_equal(kvt_req_wait(req, 0), 1);
    kvt_req_free(req);
    kvt_pool_unregister(host);
}

/* Layers below `next` of all pages on the device, against the mirror. */
static void assert_layers(struct api *api, uint32_t next)
{
    bool all = api_same(api); /* fetches api->back */
    assert_true(next < LAYERS || all);
    for (uint32_t i = 0; i < api->layout.part_count; i++) {
        const struct kvt_part_place *at = &api->host[i];
        size_t bytes = (size_t)at->stride_block * PAGES;
        size_t offset = (size_t)((uint8_t *)at->base - api->mirror);
        if (api->parts[i].layer < next)
            assert_memory_equal(api->back + offset, api->mirror + offset, bytes);
    }
}

static void test_layers_come_first(void **state)
{
    struct api api;
    (void)state;
    for (int round = 0; round < 3; round++) {
        api_fake_reset(NULL);
        fake->seed += (uint64_t)round;
        start(&api, "dram=64MiB,threads=1", false);
        assert_int_equal(api_store(&api, 10, PAGES, 0, 0, NULL), PAGES);
        expect(&api, 10);
        struct kvt_req *req = load(&api, api.pool, 10, PAGES, 1);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            assert_int_equal(kvt_req_wait_layer(req, layer, -1), 1);
            if (layer % 5 == 0 || layer + 1 == LAYERS)
                assert_layers(&api, layer + 1);
        }
        assert_int_equal(kvt_req_wait(req, 0), 1); /* the last layer was the end */
        for (uint32_t i = 0; i < PAGES; i++)
            assert_int_equal(kvt_req_status(req, NULL)[i], 0);
        kvt_req_free(req);
        assert_true(api_stat(&api, "gpu.layers") >= 2);
        /* Once more without, and with the engine's stream first. */
        api_poison(&api);
        expect(&api, 10);
        assert_int_equal(api_load(&api, 10, PAGES, 0, NULL), PAGES);
        assert_true(api_same(&api));
        finish(&api);
    }
}

/* A wait that times out says so, and one for a layer that no part has is one for the end. */
static void test_waits(void **state)
{
    struct api api;
    (void)state;
    start(&api, "dram=64MiB,threads=1", false);
    struct kvt_key key = api_key(5);
    uint32_t id = 0;
    struct kvt_req *req;
    struct kvt_load_opts opts = {.struct_size = sizeof(opts), .layers = 2};
    assert_int_equal(kvt_load(api.ns, api.pool, &key, &id, 1, &opts, &req), KVT_E_INVAL);
    opts.layers = 1;
    opts.reserved = 1;
    assert_int_equal(kvt_load(api.ns, api.pool, &key, &id, 1, &opts, &req), KVT_E_INVAL);
    opts.struct_size = KVT_LOAD_OPTS_SIZE_1; /* who does not know it */
    assert_int_equal(kvt_load(api.ns, api.pool, &key, &id, 1, &opts, &req), 0);
    assert_int_equal(kvt_req_wait_layer(req, 3, -1), 1);
    assert_int_equal(kvt_req_status(req, NULL)[0], KVT_E_MISS);
    kvt_req_free(req);
    assert_int_equal(kvt_req_wait_layer(NULL, 0, 0), KVT_E_INVAL);
    assert_int_equal(api_store(&api, 10, PAGES, 0, 0, NULL), PAGES);
    expect(&api, 10);
    req = load(&api, api.pool, 10, PAGES, 1);
    int early = kvt_req_wait_layer(req, 0, 0);
    assert_true(early == 0 || early == 1);
    assert_int_equal(kvt_req_wait_layer(req, 1000, -1), 1);
    assert_int_equal(kvt_req_wait(req, 0), 1);
    kvt_req_free(req);
    assert_layers(&api, LAYERS);
    finish(&api);
}

static void flip(struct api *api, uint64_t key, size_t byte)
{
    struct kvt_key want = api_key(key);
    for (size_t at = 0; at + 4096 <= api->cache->arena_bytes; at += 4096) {
        struct kvt_record_header *header = (void *)(api->cache->arena + at);
        if (header->magic == KVT_RECORD_MAGIC &&
            memcmp(header->key.hash, want.hash, sizeof(want.hash)) == 0) {
            ((uint8_t *)header)[byte] ^= 16;
            return;
        }
    }
    fail_msg("no record");
}

/* A bit in the first layers, in the last, in the padding: whoever waited for every layer knows. */
static void test_damage_is_known_before_the_last_layer(void **state)
{
    static const size_t bytes[] = {200, 5000, 150000, 300000};
    struct api api;
    (void)state;
    start(&api, "dram=64MiB,threads=1", false);
    for (size_t i = 0; i < sizeof(bytes) / sizeof(bytes[0]); i++) {
        uint64_t first = 100 * (i + 1);
        uint32_t ids[PAGES] = {0, 1, 2, 3, 4};
        assert_int_equal(kvt_pool_reset_origin(api.pool, ids, PAGES), 0);
        assert_int_equal(api_store(&api, first, PAGES, 0, 0, NULL), PAGES);
        expect(&api, first);
        flip(&api, first + 3, bytes[i]);
        struct kvt_req *req = load(&api, api.pool, first, PAGES, 1);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            assert_int_equal(kvt_req_wait_layer(req, layer, -1), 1);
        for (uint32_t b = 0; b < PAGES; b++)
            assert_int_equal(kvt_req_status(req, NULL)[b], b == 3 ? KVT_E_CORRUPT : 0);
        kvt_req_free(req);
    }
    finish(&api);
}

/* From disk through a few slots, in turns: no layer early, everything in the end. */
static void test_from_disk(void **state)
{
    struct api api;
    (void)state;
    start(&api, "dram=24MiB,staging=4MiB,threads=1", true);
    assert_int_equal(api_store(&api, 10, PAGES, 0, 0, NULL), PAGES);
    assert_int_equal(kvt_flush(api.cache), 0);
    api_close(&api);
    api_open(&api);
    expect(&api, 10);
    kvt_flush(api.cache);
    api_close(&api);
    api_open(&api);
    struct kvt_req *req = load(&api, api.pool, 10, PAGES, 1);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        assert_int_equal(kvt_req_wait_layer(req, layer, -1), 1);
    for (uint32_t b = 0; b < PAGES; b++)
        assert_int_equal(kvt_req_status(req, NULL)[b], 0);
    kvt_req_free(req);
    assert_layers(&api, LAYERS);
    finish(&api);
}

/* Several at a time, among ordinary loads and stores, some cancelled. */
static void test_many(void **state)
{
    struct api api;
    struct kvt_req *reqs[12];
    (void)state;
    start(&api, "dram=96MiB,threads=1", false);
    assert_int_equal(api_store(&api, 10, PAGES, 0, 0, NULL), PAGES);
    expect(&api, 10);
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < 12; i++)
            reqs[i] = load(&api, api.pool, 10, PAGES, i % 3 != 0);
        for (size_t i = 0; i < 12; i += 4)
            kvt_req_cancel(reqs[i]);
        for (size_t i = 0; i < 12; i++) {
            assert_int_equal(kvt_req_wait_layer(reqs[i], LAYERS - 1, -1), 1);
            for (uint32_t b = 0; b < PAGES && i % 4 != 0; b++)
                assert_int_equal(kvt_req_status(reqs[i], NULL)[b], 0);
            kvt_req_free(reqs[i]);
        }
    }
    assert_layers(&api, LAYERS);
    reqs[0] = load(&api, api.pool, 10, PAGES, 1); /* closed with one in flight */
    kvt_close(api.cache);
    api.cache = NULL;
    api_free(&api);
    assert_int_equal(fake->memory, 0);
}

/* A call that fails while ranges are queued: all blocks end with it, and what was hashed of them
 * does not count in the next load. */
static void test_failures(void **state)
{
    static const char *const calls[] = {"cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent"};
    struct api api;
    (void)state;
    start(&api, "dram=64MiB,threads=1", false);
    assert_int_equal(api_store(&api, 10, PAGES, 0, 0, NULL), PAGES);
    expect(&api, 10);
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++)
        for (int after = 0; after < 12; after += 3) {
            fake->fail = calls[i];
            fake->fail_after = after;
            fake->fail_result = KVT_CU_OUT_OF_MEMORY;
            struct kvt_req *req = load(&api, api.pool, 10, PAGES, 1);
            assert_int_equal(kvt_req_wait_layer(req, LAYERS - 1, -1), 1);
            int32_t status = kvt_req_status(req, NULL)[0];
            assert_true(status == -ENOMEM || (status == 0 && after > 0));
            kvt_req_free(req);
            fake->fail = NULL;
            assert_int_equal(api_stat(&api, "gpu.lost"), 0);
            req = load(&api, api.pool, 10, PAGES, 1);
            assert_int_equal(kvt_req_wait(req, -1), 1);
            for (uint32_t b = 0; b < PAGES; b++)
                assert_int_equal(kvt_req_status(req, NULL)[b], 0);
            kvt_req_free(req);
        }
    assert_layers(&api, LAYERS);
    finish(&api);
}

/* The device goes in the middle: the waits end, with the truth. */
static void test_device_lost(void **state)
{
    struct api api;
    (void)state;
    for (int after = 0; after < 4; after++) {
        api_fake_reset(NULL);
        start(&api, "dram=64MiB,threads=1", false);
        assert_int_equal(api_store(&api, 10, PAGES, 0, 0, NULL), PAGES);
        fake->fail = "cuEventSynchronize";
        fake->fail_after = after;
        fake->fail_result = 700;
        struct kvt_req *req = load(&api, api.pool, 10, PAGES, 1);
        assert_int_equal(kvt_req_wait_layer(req, LAYERS - 1, -1), 1);
        assert_int_equal(kvt_req_wait(req, 0), 1);
        int lost = 0;
        for (uint32_t b = 0; b < PAGES; b++)
            lost += kvt_req_status(req, NULL)[b] == KVT_E_DEVICE;
        kvt_req_free(req);
        if (lost > 0)
            assert_int_equal(api_stat(&api, "gpu.lost"), 1);
        assert_true(lost > 0 || after > 0);
        fake->fail = NULL;
        api_free(&api);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_layers_come_first, api_fake_reset),
        cmocka_unit_test_setup(test_waits, api_fake_reset),
        cmocka_unit_test_setup(test_damage_is_known_before_the_last_layer, api_fake_reset),
        cmocka_unit_test_setup(test_from_disk, api_fake_reset),
        cmocka_unit_test_setup(test_many, api_fake_reset),
        cmocka_unit_test_setup(test_failures, api_fake_reset),
        cmocka_unit_test_setup(test_device_lost, api_fake_reset),
    };
    return cmocka_run_group_tests(tests, api_fake_load, NULL);
}
