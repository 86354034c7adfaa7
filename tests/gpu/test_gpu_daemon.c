/* A pool in GPU memory whose store is a kvtierd's.
 *
 * Goal:   the client pins the shared arena itself, lets go of it when the daemon is gone, and pins
 *         the next daemon's; blocks come back as the scalar codec says, before, and after from the
 *         daemon's disk; without a daemon there is nothing but misses, and no page is touched.
 * Method: api_rig.h over the fake driver, or, with KVT_TEST_DRIVER=system, over a real one; a
 * kvtierd as a process of its own (daemon_rig.h), stopped, killed and started again.
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
#include "support/daemon_rig.h"
#include "support/rig.h"

#define BLOCKS 48u
#define FIRST 1000u
#define WAIT_MS 60000u

static const struct api_shape shape = {"daemon",       4,       2,    128, 16, BLOCKS,
                                       KVT_DTYPE_BF16, API_NHD, false};

static int prepare(void **state)
{
    const char *driver = getenv("KVT_TEST_DRIVER");
    bool real = driver != NULL && strcmp(driver, "system") == 0;
    return real ? 0 : api_fake_load(state);
}

static int reset(void **state)
{
    return fake == NULL ? 0 : api_fake_reset(state); /* NULL: a real driver */
}

/* Until a number is, or, below: is less than, a value. */
static void wait_stat(struct api *api, const char *name, bool below, uint64_t value)
{
    for (unsigned ms = 0; ms < WAIT_MS; ms += 5) {
        uint64_t now = api_stat(api, name);
        if (below ? now < value : now >= value)
            return;
        rig_sleep_ms(5);
    }
    fail_msg("%s is %llu", name, (unsigned long long)api_stat(api, name));
}

static void wait_connected(struct api *api)
{
    char text[512] = "";
    for (unsigned ms = 0; ms < WAIT_MS && strncmp(text, "connected", 9) != 0; ms += 5) {
        rig_sleep_ms(5);
        api_stat_text(api, "daemon.state", text, sizeof(text));
    }
    if (strncmp(text, "connected", 9) != 0)
        fail_msg("%s", text);
}

static void wait_pinned(struct api *api)
{
    uint64_t arena = api_stat(api, "client.arena_bytes");
    assert_true(arena > 0);
    wait_stat(api, "dram.pinned_bytes", false, arena);
}

static void fill(struct api *api)
{
    for (uint32_t i = 0; i < BLOCKS; i++)
        api_fill(api, i, FIRST + i, API_SMOOTH);
    api_upload(api);
}

static void expect(struct api *api)
{
    api_poison(api);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        api_fill(api, i, FIRST + i, API_SMOOTH);
        (void)api_coded(api, i, i == 0 ? KVT_LEVEL_RAW : KVT_LEVEL_KV4);
    }
}

static void load_all(struct api *api, uint64_t first)
{
    expect(api);
    assert_int_equal(api_load(api, first, BLOCKS, 0, NULL), BLOCKS);
    assert_true(api_same(api));
}

static void store_all(struct api *api, uint64_t first)
{
    for (uint32_t i = 0; i < BLOCKS; i++)
        assert_int_equal(kvt_pool_reset_origin(api->pool, &i, 1), 0);
    fill(api);
    assert_int_equal(api_store(api, first, BLOCKS, 0, 0, NULL), BLOCKS);
}

static void all_miss(struct api *api, uint64_t first)
{
    int32_t status[BLOCKS];
    assert_int_equal(api_load(api, first, BLOCKS, 0, status), 0);
    for (uint32_t i = 0; i < BLOCKS; i++)
        assert_int_equal(status[i], KVT_E_MISS);
    assert_true(api_same(api));
}

static void test_pool_over_a_daemon(void **state)
{
    struct daemon daemon;
    struct api api;
    char config[300];
    (void)state;
    daemon_init(&daemon, "--dram 64MiB --disk {store}:256MiB");
    daemon_start(&daemon);
    snprintf(config, sizeof(config), "%s,threads=1", daemon.config);
    assert_true(api_init(&api, fake != NULL ? KVT_FAKE_CUDA : NULL, &shape, config, false));
    api_open(&api);
    wait_pinned(&api);
    store_all(&api, FIRST);
    load_all(&api, FIRST);
    assert_int_equal(kvt_flush(api.cache), 0);

    assert_int_equal(daemon_stop(&daemon), 0); /* its arena goes, and with it what was pinned */
    wait_stat(&api, "dram.pinned_bytes", true, 1);
    all_miss(&api, FIRST);
    daemon_start(&daemon);
    wait_connected(&api);
    wait_pinned(&api);
    load_all(&api, FIRST); /* from its disk */
    store_all(&api, 2 * FIRST);
    load_all(&api, 2 * FIRST);

    daemon_kill(&daemon);
    wait_stat(&api, "dram.pinned_bytes", true, 1);
    daemon_start(&daemon);
    wait_connected(&api);
    wait_pinned(&api);
    store_all(&api, 3 * FIRST);
    load_all(&api, 3 * FIRST);
    assert_int_equal(api_stat(&api, "daemon.reconnects"), 2);
    assert_int_equal(api_stat(&api, "gpu.failed_blocks"), 0);
    assert_int_equal(api_stat(&api, "client.bad_move"), 0);
    api_free(&api);
    daemon_free(&daemon);
    if (fake != NULL) {
        assert_int_equal(fake->registered, 0);
        assert_int_equal(fake->memory, 0);
        assert_int_equal(fake->retained, 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_pool_over_a_daemon, reset),
    };
    if (!kvt_gpu_kernels_built()) {
        print_message("skipped: no GPU kernels in this build, so no device opens\n");
        return 77;
    }
    return cmocka_run_group_tests(tests, prepare, NULL);
}
