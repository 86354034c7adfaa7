/* A put that comes late, and a purge.
 *
 * Goal:   what was sent before a connection was lost is not carried out after a purge that has said
 *         that it is done; where the server does not let us make sure of that, the purge says so;
 *         a node that a cluster's map leaves out for a while is no exception.
 * Method: a real redis-server behind a proxy of the test (support/late_proxy.h) that keeps what it
 * is given until the test lets it go, as a server does that is frozen; skipped without one.
 */
#include "support/rig.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "kvtier/error.h"
#include "remote/remote_seal.h"
#include "remote/resp.h"
#include "support/fake_redis.h"
#include "support/late_proxy.h"
#include "support/redis_rig.h"
#include "support/remote_help.h"

#define PAGES 3u
#define NS 0x6B
#define LATE 5u /* the record whose put is kept */

static struct redis_rig redis;
static struct remote_help help;
static struct late_proxy *proxy;

static int tear_down(void **state)
{
    (void)state;
    remote_help_close(&help);
    if (proxy)
        late_proxy_stop(proxy);
    proxy = NULL;
    redis_rig_stop(&redis);
    return 0;
}

/* A put of LATE is kept on its way, and its connection is lost. words: what the server is told
 * before. false: there is no server here, or it does not know them. */
static bool begin(const char *words)
{
    char where[64], out[256];
    int port, status;

    if (!redis_rig_able())
        return false;
    redis_rig_start(&redis, "");
    if (redis_rig_cli(&redis, 0, words, out, sizeof(out)) != 0 || strcmp(out, "OK") != 0) {
        printf("           skipped: this server does not know \"%s\"\n", words);
        return false;
    }
    proxy = late_proxy_start(redis.ports[0], &port);
    snprintf(where, sizeof(where), "redis://127.0.0.1:%d", port);
    remote_help_open(&help, where, NULL, NULL, NULL);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), 0);
    late_proxy_hold(proxy);
    help.deadline_ns = 3000000000; /* to send it takes its time, where the machine is busy */
    status = remote_help_put(&help, NS, LATE, PAGES, true); /* no EXISTS before it */
    assert_true(status == KVT_E_DEADLINE || status == -EHOSTDOWN);
    assert_true(late_proxy_kept(proxy) >= PAGES * KVT_PAGE_BYTES);
    help.deadline_ns = REMOTE_HELP_DEADLINE_NS;
    return true;
}

/* It is down for a moment, and says so. */
static int drop(uint32_t count)
{
    int status = -EHOSTDOWN;

    for (int i = 0; i < 600 && status == -EHOSTDOWN; i++) {
        status = remote_help_drop(&help, NS, count ? LATE : 0, count, NULL);
        if (status == -EHOSTDOWN)
            rig_sleep_ms(50);
    }
    return status;
}

static long there(void)
{
    struct kvt_full_key key = remote_help_key(NS, LATE);
    char words[200] = "EXISTS ";

    (void)kvt_remote_name(&key, words + strlen(words));
    return redis_rig_number(&redis, 0, words);
}

/* What was kept comes now: nobody is there any more who would carry it out. */
static void late_ones_are_lost(void)
{
    assert_true(late_proxy_release(proxy) >= 1);
    rig_sleep_ms(200);
    assert_int_equal(there(), 0);
    assert_int_equal(remote_help_get(&help, NS, LATE, PAGES), KVT_E_MISS);
    assert_int_equal(remote_help_put(&help, NS, LATE, PAGES, false), 0);
    assert_int_equal(remote_help_get(&help, NS, LATE, PAGES), 0);
}

static void test_a_purge_of_a_block(void **state)
{
    (void)state;
    if (!begin("CONFIG SET maxmemory 0"))
        return;
    assert_int_equal(drop(1), 0);
    late_ones_are_lost();
}

static void test_a_purge_of_a_namespace(void **state)
{
    (void)state;
    if (!begin("CONFIG SET maxmemory 0"))
        return;
    assert_int_equal(drop(0), 0);
    late_ones_are_lost();
}

static _Atomic unsigned told; /* warnings that name the two rights */

static void take_line(void *arg, int level, const char *message)
{
    (void)arg;
    (void)level;
    told += strstr(message, "client|id and client|kill") != NULL;
}

/* Without the right to know our number, or to end the lost connection: told, once. */
static void test_what_the_server_forbids_is_told(void **state)
{
    static const char *const rights[] = {"client|id", "client|kill"};
    char words[80];

    for (size_t i = 0; i < sizeof(rights) / sizeof(rights[0]); i++) {
        bool able;

        remote_help_log = (struct kvt_log){.fn = take_line, .level_max = KVT_LOG_WARN};
        told = 0;
        snprintf(words, sizeof(words), "ACL SETUSER default -%s", rights[i]);
        able = begin(words);
        remote_help_log = (struct kvt_log){0};
        if (able) {
            assert_int_equal(drop(1), -EPERM);
            assert_int_equal(drop(0), -EPERM);
            assert_int_equal(told, 1);
        }
        tear_down(state);
    }
}

/* Without the right to end the lost connection: records are put and read as ever, but a purge
 * cannot be sure, and the put is indeed carried out after it. */
static void test_a_server_that_forbids_it(void **state)
{
    (void)state;
    if (!begin("ACL SETUSER default -client|kill"))
        return;
    assert_int_equal(drop(1), -EPERM);
    assert_int_equal(there(), 0);
    assert_int_equal(drop(0), -EPERM);
    assert_int_equal(late_proxy_release(proxy), 0);
    for (int i = 0; i < 600 && there() == 0; i++)
        rig_sleep_ms(50);
    assert_int_equal(there(), 1); /* it was right to doubt */
    assert_int_equal(remote_help_get(&help, NS, LATE, PAGES), 0);
    assert_int_equal(remote_help_put(&help, NS, LATE + 1, PAGES, false), 0);
}

/* ---- a node that leaves the map of its cluster ---------------------------------------------- */

static struct {
    int ports[2];
    _Atomic unsigned owner;        /* whose all slots are */
    _Atomic bool swallow;          /* puts to the second one are taken and not answered */
    _Atomic unsigned sets, killed; /* of the second one */
} says;

/* Two servers of a cluster, of which the first one is the seed. The number of every connection is
 * 77; what ends it is counted. */
static void answer(void *ctx, unsigned at, const char *words, char *out, size_t len)
{
    unsigned owner = atomic_load(&says.owner);
    bool set = strncmp(words, "SET ", 4) == 0;

    (void)ctx;
    if (strcmp(words, "CLUSTER SLOTS") == 0) {
        snprintf(out, len, "*1\r\n*3\r\n:0\r\n:%u\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n",
                 KVT_RESP_SLOTS - 1, says.ports[owner]);
    } else if (strcmp(words, "CLIENT ID") == 0) {
        snprintf(out, len, ":77\r\n");
    } else if (strcmp(words, "CLIENT KILL ID 77") == 0) {
        atomic_fetch_add(&says.killed, at);
        snprintf(out, len, ":1\r\n");
    } else if ((set || strncmp(words, "GETRANGE ", 9) == 0) && owner != at) {
        words += set ? 4 : 9;

        snprintf(out, len, "-MOVED %u 127.0.0.1:%d\r\n", kvt_resp_slot(words, strcspn(words, " ")),
                 says.ports[owner]);
    } else if (set && at && atomic_load(&says.swallow)) {
        out[0] = '\0';
    } else {
        atomic_fetch_add(&says.sets, set && at);
        snprintf(out, len, "+OK\r\n");
    }
}

/* To the second one. */
static void put_until_it_comes(void)
{
    unsigned before = atomic_load(&says.sets);

    atomic_store(&says.owner, 1);
    for (int i = 0; i < 600 && atomic_load(&says.sets) == before; i++)
        if (remote_help_put(&help, NS, LATE, 1, true) != 0)
            rig_sleep_ms(50);
    assert_true(atomic_load(&says.sets) > before);
}

/* It has taken a put that it did not answer; the map leaves it out, and names it again: it has to
 * end that connection all the same before it is written to. */
static void test_a_node_that_is_back_in_the_map(void **state)
{
    struct kvt_remote_stats stats = {0};
    struct fake_redis *fake;
    char where[64];
    int status;

    (void)state;
    memset(&says, 0, sizeof(says));
    fake = fake_redis_start(2, answer, NULL);
    for (unsigned i = 0; i < 2; i++)
        says.ports[i] = fake_redis_port(fake, i);
    atomic_store(&says.owner, 1);
    snprintf(where, sizeof(where), "redis://127.0.0.1:%d", says.ports[0]);
    remote_help_open(&help, where, NULL, NULL, NULL);
    put_until_it_comes();
    assert_int_equal(atomic_load(&says.killed), 0);
    atomic_store(&says.swallow, true);
    help.deadline_ns = 300000000;
    status = remote_help_put(&help, NS, LATE, 1, true);
    assert_true(status == KVT_E_DEADLINE || status == -EHOSTDOWN);
    help.deadline_ns = REMOTE_HELP_DEADLINE_NS;
    atomic_store(&says.owner, 0);
    for (int i = 0; i < 600; i++) { /* until it is forgotten; nothing is put meanwhile */
        (void)remote_help_probe(&help, NS, LATE, 1, NULL);
        help.remote->ops->stats(help.remote, &stats);
        if (stats.nodes == 1)
            break;
        rig_sleep_ms(50);
    }
    assert_int_equal(stats.nodes, 1);
    assert_int_equal(atomic_load(&says.killed), 0);
    atomic_store(&says.swallow, false);
    put_until_it_comes();
    assert_true(atomic_load(&says.killed) > 0);
    remote_help_close(&help);
    fake_redis_stop(fake);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_a_purge_of_a_block, tear_down),
        cmocka_unit_test_teardown(test_a_purge_of_a_namespace, tear_down),
        cmocka_unit_test_teardown(test_what_the_server_forbids_is_told, tear_down),
        cmocka_unit_test_teardown(test_a_server_that_forbids_it, tear_down),
        cmocka_unit_test_teardown(test_a_node_that_is_back_in_the_map, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
