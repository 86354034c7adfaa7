/* The shared tier over links that are slow, and that go down without a word.
 *
 * Goal:   where packets are lost in silence, a request ends by its deadline, as a miss; the keys of
 *         other nodes are read all the while; when the link is back it is used again; over a link
 *         too slow for what is asked, what comes in time is right, and the rest are misses.
 * Method: a cluster of three, each in a network namespace of its own (support/net_rig.h); skipped
 *         where there are none. The bounds are a loaded machine's: a TCP that waits for such a
 *         link takes 15 minutes.
 */
#include "support/rig.h"

#include <errno.h>
#include <string.h>

#include "kvtier/error.h"
#include "remote/remote_seal.h"
#include "remote/resp.h"
#include "support/net_rig.h"
#include "support/redis_chaos.h"
#include "support/redis_rig.h"
#include "support/remote_help.h"

#define NS 0x71
#define KEYS 60u
#define PAGES 16u
#define SOON_NS INT64_C(20000000000)

static struct net_rig net;
static struct redis_rig redis;
static struct remote_help help;
static char url[512];
static bool able;

static int start(void **state)
{
    (void)state;
    able = redis_rig_able() && net_rig_start(&net, 3);
    if (!able)
        return 0;
    redis_rig_far(&redis, &net, "--cluster-require-full-coverage no");
    redis_rig_url(&redis, url, sizeof(url));
    return 0;
}

static int stop(void **state)
{
    (void)state;
    if (able) {
        redis_rig_stop(&redis);
        net_rig_stop(&net);
    }
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    remote_help_close(&help);
    return 0;
}

/* How many of the keys are the first master's: it has slots 0 to 5460. */
static uint32_t keys_of_first(void)
{
    char name[KVT_REMOTE_NAME_BYTES];
    uint32_t count = 0;

    for (uint64_t number = 1; number <= KEYS; number++) {
        struct kvt_full_key key = remote_help_key(NS, number);

        count += kvt_resp_slot(name, kvt_remote_name(&key, name)) <= 5460;
    }
    return count;
}

static void get_all(void)
{
    uint32_t got = 0;

    for (int i = 0; i < 2400 && got < KEYS; i++) {
        got = remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL);
        if (got < KEYS)
            rig_sleep_ms(50);
    }
    assert_int_equal(got, KEYS);
}

static struct kvt_remote_stats stats(void)
{
    struct kvt_remote_stats s;

    help.remote->ops->stats(help.remote, &s);
    return s;
}

static void test_records_cross(void **state)
{
    (void)state;
    if (!able)
        skip();
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    assert_int_equal(remote_help_probe(&help, NS, 1, 1000, NULL), KEYS);
    assert_int_equal(redis_rig_number(&redis, 0, "DBSIZE"), keys_of_first());
    assert_true(keys_of_first() > 0 && keys_of_first() < KEYS);
}

/* Under load a link goes down: those who wait are told by their deadline, later ones at once, and
 * the other nodes' keys are all read. It comes back, and nobody has to be told. */
static void test_a_link_goes_down_in_mid_load(void **state)
{
    struct redis_load_counts counts;
    struct redis_load *load;
    uint32_t got = 0;
    int other = 0;

    (void)state;
    if (!able)
        skip();
    remote_help_open(&help, url, NULL, NULL, NULL);
    get_all();
    load = redis_load_start(url, rig_seed());
    rig_sleep_ms(300);
    net_rig_link(&net, 0, false);
    help.deadline_ns = 300000000;
    assert_true(remote_help_get_many(&help, NS, 1, KEYS, PAGES, &other) <= KEYS - keys_of_first());
    assert_true(other == KVT_E_DEADLINE || other == -EHOSTDOWN);
    assert_true(help.took_ns < SOON_NS);
    help.deadline_ns = REMOTE_HELP_DEADLINE_NS;
    /* at once, but where the machine is so busy that others seemed to be silent, too */
    for (int i = 0; i < 600 && got < KEYS - keys_of_first(); i++) {
        got = remote_help_get_many(&help, NS, 1, KEYS, PAGES, &other);
        if (got < KEYS - keys_of_first())
            rig_sleep_ms(50);
    }
    assert_int_equal(got, KEYS - keys_of_first());
    assert_int_equal(other, -EHOSTDOWN);
    assert_int_equal(stats().nodes_down, 1);
    assert_true(stats().losses > 0);
    rig_sleep_ms(700);
    net_rig_link(&net, 0, true);
    get_all();
    assert_int_equal(stats().nodes_down, 0);
    counts = redis_load_stop(load);
    print_message("           %llu reads, %llu misses, %llu puts, %llu failures; %.0f ms after its "
                  "deadline at most\n",
                  (unsigned long long)counts.got, (unsigned long long)counts.missed,
                  (unsigned long long)counts.put, (unsigned long long)counts.failed,
                  (double)counts.late_ns * 1e-6);
    assert_int_equal(counts.wrong, 0);
    assert_int_equal(counts.touched, 0);
    assert_true(counts.put > 0 && counts.failed > 0);
    assert_true(counts.late_ns < SOON_NS);
}

/* A put that the link swallows, and a purge: what was on its way does not come after it. */
static void test_what_a_link_swallowed_does_not_come_after_a_purge(void **state)
{
    uint64_t number = 0;
    char name[KVT_REMOTE_NAME_BYTES];
    int status;

    (void)state;
    if (!able)
        skip();
    do {
        struct kvt_full_key key = remote_help_key(NS + 1, ++number);

        status = kvt_resp_slot(name, kvt_remote_name(&key, name));
    } while (status > 5460);
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_put(&help, NS + 1, number, PAGES, false), 0);
    net_rig_link(&net, 0, false);
    help.deadline_ns = 300000000;
    status = remote_help_put(&help, NS + 1, number, PAGES, true);
    assert_true(status == KVT_E_DEADLINE || status == -EHOSTDOWN);
    help.deadline_ns = REMOTE_HELP_DEADLINE_NS;
    assert_int_equal(remote_help_drop(&help, NS + 1, number, 1, NULL), -EHOSTDOWN);
    net_rig_link(&net, 0, true);
    status = -EHOSTDOWN;
    for (int i = 0; i < 2400 && status == -EHOSTDOWN; i++) {
        status = remote_help_drop(&help, NS + 1, number, 1, NULL);
        if (status)
            rig_sleep_ms(50);
    }
    assert_int_equal(status, 0);
    rig_sleep_ms(500);
    assert_int_equal(remote_help_get(&help, NS + 1, number, PAGES), KVT_E_MISS);
}

/* 60 records of 64 KiB over links of 4 Mbit/s are 2.6 s of each: in 0.4 s they cannot all come. */
static void test_a_slow_link(void **state)
{
    uint32_t got;
    int other = 0;

    (void)state;
    if (!able)
        skip();
    remote_help_open(&help, url, NULL, NULL, NULL);
    get_all();
    for (unsigned far = 0; far < 3; far++)
        if (!net_rig_rate(&net, far, 4)) {
            print_message("           skipped: tc knows no tbf here\n");
            skip();
        }
    help.deadline_ns = 400000000;
    got = remote_help_get_many(&help, NS, 1, KEYS, PAGES, &other);
    print_message("           %u of %u came in time\n", got, KEYS);
    assert_true(got < KEYS);
    assert_true(other == KVT_E_DEADLINE || other == -EHOSTDOWN);
    assert_true(help.took_ns < SOON_NS);
    for (unsigned far = 0; far < 3; far++)
        assert_true(net_rig_rate(&net, far, 100));
    help.deadline_ns = REMOTE_HELP_DEADLINE_NS;
    get_all();
    for (unsigned far = 0; far < 3; far++)
        assert_true(net_rig_rate(&net, far, 0));
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_records_cross, tear_down),
        cmocka_unit_test_teardown(test_a_link_goes_down_in_mid_load, tear_down),
        cmocka_unit_test_teardown(test_what_a_link_swallowed_does_not_come_after_a_purge,
                                  tear_down),
        cmocka_unit_test_teardown(test_a_slow_link, tear_down),
    };

    return cmocka_run_group_tests(tests, start, stop);
}
