/* Mixed level maps and groups in GPU memory, against the fake driver.
 *
 * Goal:   a pool in GPU memory codes as one in host memory does: layers that are excluded come back
 *         as they were, maps that the namespace chose are read, each group of a layout has its own
 *         block tokens; a record whose map was damaged is not believed.
 * Method: both kinds of pool over one cache, with the same pages: what one stores the other loads,
 *         in both directions, and the bytes of the two pools are compared whole.
 */
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

#define PAGES 40u

/* A device pool, a host pool over the mirror, and what the pages were. */
struct pair {
    struct api api;
    struct kvt_pool *host;
    uint8_t *was;
};

static void pair_open(struct pair *p)
{
    struct api *api = &p->api;
    api_open(api);
    assert_int_equal(kvt_pool_register(api->cache, &api->layout, &api->host_desc, &p->host), 0);
    p->was = malloc(api->bytes);
    assert_non_null(p->was);
}

static void pair_close(struct pair *p)
{
    assert_int_equal(api_stat(&p->api, "client.bad_move"), 0);
    assert_int_equal(api_stat(&p->api, "gpu.failed_blocks"), 0);
    kvt_pool_unregister(p->host);
    api_free(&p->api);
    free(p->was);
    assert_int_equal(fake->memory, 0);
    assert_int_equal(fake->context_depth, 0);
}

static void fill(struct pair *p, enum api_values values)
{
    for (uint32_t i = 0; i < PAGES; i++)
        api_fill(&p->api, i, 7 + i, values);
    memcpy(p->was, p->api.mirror, p->api.bytes);
    api_upload(&p->api);
}

static size_t move(struct pair *p, struct kvt_pool *pool, uint64_t first, uint32_t n,
                   uint16_t group, bool store, int32_t *status)
{
    struct kvt_key keys[PAGES];
    uint32_t ids[PAGES];
    struct kvt_req *req;
    size_t good = 0;
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = api_key(first + i);
        keys[i].group = group;
        ids[i] = i;
    }
    assert_int_equal(store ? kvt_store(p->api.ns, pool, keys, ids, n, NULL, &req)
                           : kvt_load(p->api.ns, pool, keys, ids, n, NULL, &req),
                     0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    for (uint32_t i = 0; i < n; i++) {
        if (status != NULL)
            status[i] = kvt_req_status(req, NULL)[i];
        good += kvt_req_status(req, NULL)[i] == 0;
    }
    kvt_req_free(req);
    return good;
}

/* Load n blocks into both pools, poisoned, and compare them. The mirror then holds the result. */
static void load_both(struct pair *p, uint64_t first, uint32_t n, uint16_t group)
{
    api_poison(&p->api);
    assert_int_equal(move(p, p->api.pool, first, n, group, false, NULL), n);
    assert_int_equal(move(p, p->host, first, n, group, false, NULL), n);
    assert_true(api_same(&p->api));
}

/* Whether a layer of a page is bit for bit what it was. */
static bool layer_same(const struct pair *p, uint32_t layer, uint32_t page)
{
    const struct api *api = &p->api;
    size_t row = api->shape.dim * (api->shape.dtype == KVT_DTYPE_F32 ? 4u : 2u);
    for (uint32_t i = 0; i < api->layout.part_count; i++) {
        const struct kvt_part_place *place = &api->host[i];
        if (api->parts[i].layer != layer)
            continue;
        for (uint32_t h = 0; h < api->shape.heads; h++)
            for (uint32_t t = 0; t < api->shape.tokens; t++) {
                const uint8_t *at = (const uint8_t *)place->base + place->stride_block * page +
                                    place->stride_head * h + place->stride_token * t;
                if (memcmp(at, p->was + (at - api->mirror), row) != 0)
                    return false;
            }
    }
    return true;
}

static bool start(struct pair *p, const struct api_shape *shape, const char *config, bool disk)
{
    memset(p, 0, sizeof(*p));
    if (!kvt_gpu_kernels_built())
        skip();
    return api_init(&p->api, KVT_FAKE_CUDA, shape, config, disk);
}

/* ---- excluded layers ---- */

static void test_excluded_layers(void **state)
{
    static const struct api_shape shapes[] = {
        {"nhd", 3, 2, 64, 16, PAGES, KVT_DTYPE_BF16, API_NHD, false},
        {"hnd f32", 4, 3, 96, 32, PAGES, KVT_DTYPE_F32, API_HND, false},
        {"packed f16", 3, 1, 128, 16, PAGES, KVT_DTYPE_F16, API_PACKED, false},
    };
    (void)state;
    for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++)
        for (int by_host = 0; by_host < 2; by_host++) {
            struct pair p;
            api_fake_reset(NULL);
            assert_true(start(&p, &shapes[s], "dram=64MiB,threads=1,exclude_layers=0+last", false));
            pair_open(&p);
            fill(&p, API_SMOOTH);
            assert_int_equal(move(&p, by_host ? p.host : p.api.pool, 50, PAGES, 0, true, NULL),
                             PAGES);
            load_both(&p, 50, PAGES, 0);
            for (uint32_t page = 0; page < PAGES; page++) {
                assert_true(layer_same(&p, 0, page));
                assert_true(layer_same(&p, shapes[s].layers - 1, page));
                assert_int_equal(layer_same(&p, 1, page), page == 0); /* the first is raw */
            }
            pair_close(&p);
        }
}

/* From disk, by another life of the cache, with blocks that went up the ladder among them. */
static void test_excluded_after_restart(void **state)
{
    static const struct api_shape shape = {"restart",      3,       2,    64, 16, PAGES,
                                           KVT_DTYPE_BF16, API_NHD, false};
    struct pair p;
    (void)state;
    assert_true(start(&p, &shape, "dram=16MiB,threads=1,exclude_layers=1", true));
    pair_open(&p);
    fill(&p, API_ROUGH);
    assert_int_equal(move(&p, p.api.pool, 9, PAGES, 0, true, NULL), PAGES);
    assert_true(api_stat(&p.api, "store.escalated") > 0);
    assert_int_equal(kvt_flush(p.api.cache), 0);
    kvt_pool_unregister(p.host);
    api_close(&p.api);
    api_open(&p.api);
    assert_int_equal(kvt_pool_register(p.api.cache, &p.api.layout, &p.api.host_desc, &p.host), 0);
    load_both(&p, 9, PAGES, 0);
    for (uint32_t page = 0; page < PAGES; page++)
        assert_true(layer_same(&p, 1, page));
    pair_close(&p);
}

/* ---- maps that a namespace chose ---- */

/* Host pages with hard heads: the namespace raises some of them alone, and device pools of the same
 * namespace read such records and, from then on, write them. */
static void test_chosen_maps(void **state)
{
    static const struct api_shape shape = {"chosen",       2,       8,    64, 16, PAGES,
                                           KVT_DTYPE_BF16, API_NHD, false};
    struct pair p;
    (void)state;
    assert_true(start(&p, &shape, "dram=32MiB,threads=1", false));
    pair_open(&p);
    fill(&p, API_SMOOTH);
    /* One key head of every page is too rough for kv4. */
    struct api *api = &p.api;
    for (uint32_t page = 0; page < PAGES; page++) {
        const struct kvt_part_place *k = &api->host[0];
        for (uint32_t t = 0; t < 16; t++)
            for (uint32_t e = 0; e < 64; e++) {
                uint16_t *at = (uint16_t *)(void *)((uint8_t *)k->base + k->stride_block * page +
                                                    k->stride_head * 3 + k->stride_token * t +
                                                    k->stride_elem * e);
                *at = (uint16_t)((0x4000u + e * 24u) | (e % 3 ? 0u : 0x8000u));
                *at = (uint16_t)(*at + (t * 7 + e * 13 + page) % 5);
            }
    }
    memcpy(p.was, api->mirror, api->bytes);
    api_upload(api);
    assert_int_equal(move(&p, p.host, 1, PAGES, 0, true, NULL), PAGES);
    assert_true(api_stat(api, "store.judged") > 0);
    assert_true(api_stat(api, "store.heads_raised") > 0);
    load_both(&p, 1, PAGES, 0);
    memcpy(api->mirror, p.was, api->bytes);
    api_upload(api);
    uint32_t ids[PAGES];
    for (uint32_t i = 0; i < PAGES; i++)
        ids[i] = i;
    assert_int_equal(kvt_pool_reset_origin(api->pool, ids, PAGES), 0);
    uint64_t escalated = api_stat(api, "store.escalated");
    assert_int_equal(move(&p, api->pool, 501, PAGES, 0, true, NULL), PAGES);
    assert_int_equal(api_stat(api, "store.escalated"), escalated); /* its map held at once */
    load_both(&p, 501, PAGES, 0);
    pair_close(&p);
}

/* ---- damage ---- */

static struct kvt_record_header *record_of(struct api *api, uint64_t key)
{
    struct kvt_key want = api_key(key);
    for (size_t at = 0; at + 4096 <= api->cache->arena_bytes; at += 4096) {
        struct kvt_record_header *header = (void *)(api->cache->arena + at);
        if (header->magic == KVT_RECORD_MAGIC && header->map >= KVT_MAP_MIXED_FIRST &&
            memcmp(header->key.hash, want.hash, sizeof(want.hash)) == 0)
            return header;
    }
    return NULL;
}

/* Any byte of header and map may be another one: the block ends as corrupt, its neighbours load. */
static void test_damaged_maps(void **state)
{
    static const struct api_shape shape = {"damage",       3,       2,    64, 16, PAGES,
                                           KVT_DTYPE_BF16, API_NHD, false};
    struct pair p;
    (void)state;
    assert_true(start(&p, &shape, "dram=32MiB,threads=1,exclude_layers=0", false));
    pair_open(&p);
    fill(&p, API_SMOOTH);
    for (uint32_t round = 0; round < 24; round++) {
        int32_t status[8];
        uint64_t first = 1000 + 10 * round;
        assert_int_equal(move(&p, p.api.pool, first, 8, 0, true, NULL), 8);
        struct kvt_record_header *header = record_of(&p.api, first + 3);
        assert_non_null(header);
        uint32_t at = round < 8 ? 100 + round : 128 + 2 * (round - 8); /* of header, of the map */
        ((uint8_t *)header)[at] ^= (uint8_t)(1u << round % 8);
        assert_int_equal(move(&p, p.api.pool, first, 8, 0, false, status), 7);
        for (uint32_t i = 0; i < 8; i++)
            assert_int_equal(status[i], i == 3 ? KVT_E_CORRUPT : 0);
    }
    pair_close(&p);
}

/* ---- groups ---- */

/* Full attention, a window with blocks of half the tokens, a state of one row, one of three. */
static void test_groups(void **state)
{
    static const struct api_shape shape = {"groups",       4,       2,    64, 32, PAGES,
                                           KVT_DTYPE_BF16, API_NHD, false};
    static const struct kvt_group groups[] = {
        {.group = 1, .kind = KVT_GROUP_WINDOW, .block_tokens = 16, .window_tokens = 64},
        {.group = 2, .kind = KVT_GROUP_STATE, .block_tokens = 1},
        {.group = 3, .kind = KVT_GROUP_STATE, .block_tokens = 3},
    };
    struct pair p;
    (void)state;
    assert_true(start(&p, &shape, "dram=64MiB,threads=1", true));
    struct api *api = &p.api;
    for (uint32_t i = 2; i < api->layout.part_count; i++) {
        api->parts[i].group = (uint16_t)(i / 2);
        if (i >= 4)
            api->parts[i].kind = KVT_PART_OPAQUE;
        if (i == 5)
            api->parts[i].dtype = KVT_DTYPE_BYTE;
    }
    api->layout.group_count = 3;
    api->layout.groups = groups;
    pair_open(&p);
    for (int by_host = 0; by_host < 2; by_host++)
        for (uint16_t group = 0; group < 4; group++) {
            uint64_t first = 1000u * (group + 1u) + 100u * (unsigned)by_host;
            uint32_t ids[PAGES];
            for (uint32_t i = 0; i < PAGES; i++)
                ids[i] = i;
            assert_int_equal(kvt_pool_reset_origin(api->pool, ids, PAGES), 0);
            assert_int_equal(kvt_pool_reset_origin(p.host, ids, PAGES), 0);
            fill(&p, API_SMOOTH);
            size_t stored = move(&p, by_host ? p.host : api->pool, first, 12, group, true, NULL);
            assert_int_equal(stored, 12);
            load_both(&p, first, 12, group);
            if (group >= 2) /* states are exact */
                for (uint32_t t = 0; t < groups[group - 1].block_tokens; t++) {
                    const struct kvt_part_place *at = &api->host[2u * group];
                    size_t byte =
                        (size_t)((uint8_t *)at->base - api->mirror) +
                        (size_t)(at->stride_block * 5 + at->stride_head + at->stride_token * t);
                    assert_memory_equal(api->mirror + byte, p.was + byte, 128);
                }
        }
    pair_close(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_excluded_layers, api_fake_reset),
        cmocka_unit_test_setup(test_excluded_after_restart, api_fake_reset),
        cmocka_unit_test_setup(test_chosen_maps, api_fake_reset),
        cmocka_unit_test_setup(test_damaged_maps, api_fake_reset),
        cmocka_unit_test_setup(test_groups, api_fake_reset),
    };
    return cmocka_run_group_tests(tests, api_fake_load, NULL);
}
