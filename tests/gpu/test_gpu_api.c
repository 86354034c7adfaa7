/* Pools in GPU memory behind the public API, on a real GPU; skipped where there is none.
 *
 * Goal:   what test_gpu_lane.c proves against the fake driver holds on the device: stores and loads
 *         of several geometries, from DRAM and from disk after a restart, under eviction, with
 *         blocks that fail the guard and blocks with NaN, and beside an engine's stream; every byte
 *         of the pool is compared with the scalar codec.
 * Method: api_rig.h over the system's driver.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/client.h"
#include "gpu/api_rig.h"
#include "gpu/gpu.h"
#include "support/rig.h"

#define SKIPPED 77

static void fill(struct api *api, uint32_t n, uint64_t seed, enum api_values values)
{
    for (uint32_t i = 0; i < n; i++)
        api_fill(api, i, seed + i, values);
    api_upload(api);
}

static void expect_coded(struct api *api, uint32_t n, uint64_t seed, enum api_values values)
{
    api_poison(api);
    for (uint32_t i = 0; i < n; i++) {
        api_fill(api, i, seed + i, values);
        (void)api_coded(api, i, i == 0 ? KVT_LEVEL_RAW : KVT_LEVEL_KV4);
    }
}

/* Stored, loaded from DRAM, and after a restart from disk: half of the time before the arena is
 * pinned, since nobody waits for that. */
static void round_trip(const struct api_shape *shape, enum api_values values)
{
    struct api api;
    uint32_t n = shape->pages;
    print_message("%s, values %d\n", shape->name, (int)values);
    assert_true(api_init(&api, NULL, shape, "dram=512MiB,threads=1", true));
    api_open(&api);
    fill(&api, n, 100, values);
    assert_int_equal(api_store(&api, 1000, n, 0, 0, NULL), n);
    assert_true(api_same(&api));
    expect_coded(&api, n, 100, values);
    assert_int_equal(api_load(&api, 1000, n, 0, NULL), n);
    assert_true(api_same(&api));
    assert_int_equal(kvt_flush(api.cache), 0);
    api_close(&api);
    api_open(&api);
    expect_coded(&api, n, 100, values);
    assert_int_equal(api_load(&api, 1000, n, 0, NULL), n);
    assert_true(api_same(&api));
    assert_int_equal(api_stat(&api, "gpu.failed_blocks"), 0);
    assert_int_equal(api_stat(&api, "client.bad_move"), 0);
    api_free(&api);
}

static void test_geometries(void **state)
{
    static const struct api_shape shapes[] = {
        {"small NHD", 2, 2, 64, 16, 64, KVT_DTYPE_BF16, API_NHD, false},
        {"8B NHD", 32, 8, 128, 16, 24, KVT_DTYPE_BF16, API_NHD, false},
        {"70B TP4 packed", 80, 2, 128, 16, 24, KVT_DTYPE_BF16, API_PACKED, false},
        {"HND f16, 32 tokens", 4, 4, 128, 32, 32, KVT_DTYPE_F16, API_HND, false},
        {"packed f32", 3, 2, 80, 16, 32, KVT_DTYPE_F32, API_PACKED, false},
        {"MLA", 4, 1, 576, 16, 32, KVT_DTYPE_BF16, API_NHD, true},
    };
    (void)state;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        round_trip(&shapes[i], API_SMOOTH);
}

static void test_ladder(void **state)
{
    static const struct api_shape shape = {"ladder",       4,       2,    128, 16, 48,
                                           KVT_DTYPE_BF16, API_NHD, false};
    (void)state;
    round_trip(&shape, API_ROUGH);
    round_trip(&shape, API_NAN);
}

/* Far more on disk than DRAM holds. */
static void test_eviction(void **state)
{
    static const struct api_shape shape = {"eviction",     4,       4,    128, 16, 128,
                                           KVT_DTYPE_BF16, API_NHD, false};
    struct api api;
    (void)state;
    assert_true(api_init(&api, NULL, &shape, "dram=4MiB,staging=2MiB,threads=1", true));
    api_open(&api);
    fill(&api, 128, 3, API_SMOOTH);
    for (uint32_t at = 0; at < 128; at += 8) {
        assert_int_equal(api_store(&api, 500 + at, 8, at, at * 16, NULL), 8);
        assert_int_equal(kvt_flush(api.cache), 0);
    }
    expect_coded(&api, 128, 3, API_SMOOTH);
    assert_int_equal(api_load(&api, 500, 128, 0, NULL), 128);
    assert_true(api_same(&api));
    assert_true(api_stat(&api, "dram.evicted") > 0);
    api_free(&api);
}

/* Direct loads, by whatever path cuFile takes here; where it takes none, its reason is printed. */
static void test_direct(void **state)
{
    static const struct api_shape shape = {"direct",       32,      8,    128, 16, 64,
                                           KVT_DTYPE_BF16, API_NHD, false};
    struct api api;
    char text[512];
    (void)state;
    assert_true(api_init(&api, NULL, &shape, "dram=512MiB,threads=1,gds=auto", true));
    api.gds_any = true;
    api_open(&api);
    fill(&api, 64, 5, API_SMOOTH);
    assert_int_equal(api_store(&api, 1000, 64, 0, 0, NULL), 64);
    assert_int_equal(kvt_flush(api.cache), 0);
    api_close(&api);
    api_open(&api);
    api_stat_text(&api, "gpu.gds.state", text, sizeof(text));
    print_message("%s\n", text);
    expect_coded(&api, 64, 5, API_SMOOTH);
    assert_int_equal(api_load(&api, 1000, 64, 0, NULL), 64);
    assert_true(api_same(&api));
    if (strncmp(text, "off: ", 5) != 0 && api_stat(&api, "gpu.gds.reads") != 64) {
        api_stat_text(&api, "gpu.gds.state", text, sizeof(text));
        fail_msg("%llu reads; %s", (unsigned long long)api_stat(&api, "gpu.gds.reads"), text);
    }
    api_free(&api);
}

/* All of the arena pinned: the same again. */
static void test_pinned(void **state)
{
    static const struct api_shape shape = {"pinned",       8,       4,    128, 16, 96,
                                           KVT_DTYPE_BF16, API_NHD, false};
    struct api api;
    (void)state;
    assert_true(api_init(&api, NULL, &shape, "dram=1536MiB,threads=1", false));
    api_open(&api);
    for (int i = 0; i < 6000 && kvt_pin_state(&api.cache->pin) == KVT_PIN_PINNING; i++)
        rig_sleep_ms(5);
    assert_int_equal(api_stat(&api, "dram.pinned_bytes"), UINT64_C(1536) << 20);
    fill(&api, 96, 9, API_SMOOTH);
    for (uint64_t chain = 0; chain < 12; chain++)
        assert_int_equal(api_store(&api, 1000 * (chain + 1), 96, 0, 0, NULL), 96);
    for (uint64_t chain = 0; chain < 12; chain++) {
        expect_coded(&api, 96, 9, API_SMOOTH);
        assert_int_equal(api_load(&api, 1000 * (chain + 1), 96, 0, NULL), 96);
        assert_true(api_same(&api));
    }
    api_free(&api);
}

int main(void)
{
    struct kvt_gpu_opts opts = {0};
    struct kvt_gpu *gpu;
    char reason[256];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_geometries), cmocka_unit_test(test_ladder),
        cmocka_unit_test(test_eviction),   cmocka_unit_test(test_direct),
        cmocka_unit_test(test_pinned),
    };
    if (kvt_gpu_open(&opts, &gpu, reason, sizeof(reason)) != 0) {
        printf("skipped: %s\n", reason);
        return SKIPPED;
    }
    kvt_gpu_close(gpu);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
