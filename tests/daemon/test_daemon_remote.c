/* Two kvtierd, as on two machines, and one server between them.
 *
 * Goal:   what an engine stores through one daemon, another engine loads through the other one,
 *         exact; the daemons' numbers say where it came from.
 * Method: real kvtierd and redis-server processes; skipped without the latter.
 */
#include "support/rig.h"

#include <string.h>

#include "support/daemon_rig.h"
#include "support/redis_rig.h"

enum { BLOCKS = 24 };

static struct redis_rig redis;
static struct daemon first, second;
static struct rig one, two;

static int tear_down(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct rig *rig = i ? &two : &one;

        if (rig->memory[0]) {
            rig_close(rig);
            rig_free(rig);
        }
        if (i ? second.dir[0] : first.dir[0])
            daemon_free(i ? &second : &first);
        memset(rig, 0, sizeof(*rig));
    }
    redis_rig_stop(&redis);
    return 0;
}

static void start(struct daemon *daemon, struct rig *rig, const char *options)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);

    daemon_init(daemon, options);
    daemon_start(daemon);
    rig_init(rig, &shape, daemon->config, NULL);
    rig_open(rig);
}

static void test_two_daemons_and_a_server(void **state)
{
    char options[512], url[128];
    size_t loaded = 0;

    (void)state;
    if (!redis_rig_able())
        return;
    redis_rig_start(&redis, "");
    redis_rig_url(&redis, url, sizeof(url));
    snprintf(options, sizeof(options), "--dram 4MiB --remote-write all --remote %s", url);
    start(&first, &one, options);
    assert_int_equal(rig_store(&one, 1, BLOCKS, 0, NULL), BLOCKS);
    daemon_wait_stat(&first, "remote.put", BLOCKS, 60000);
    snprintf(options, sizeof(options), "--dram 4MiB --remote-deadline 20s --remote %s", url);
    start(&second, &two, options);
    /* a daemon waits a second at most: a busy machine may need more than one try */
    for (int i = 0; i < 100 && loaded < BLOCKS; i++) {
        (void)rig_lookup(&two, 1, BLOCKS + 8);
        loaded = rig_load(&two, 1, BLOCKS, NULL);
        if (loaded < BLOCKS)
            rig_sleep_ms(200);
    }
    assert_int_equal(loaded, BLOCKS);
    assert_true(daemon_stat(&second, "load.granted_remote") > 0);
    assert_int_equal(daemon_stat(&second, "remote.got"), BLOCKS);
    assert_int_equal(daemon_stat(&second, "remote.put"), 0);
    assert_int_equal(rig_load(&two, 1, BLOCKS, NULL), BLOCKS);
    assert_true(daemon_stat(&second, "load.granted_dram") >= BLOCKS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_two_daemons_and_a_server, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
