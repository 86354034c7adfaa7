/* Reads from replicas, and maps of clusters that change or make no sense.
 *
 * Goal:   whatever a cluster says of its nodes, a read ends, in time, and finds its way once the
 *         map is right again: a slot given to a replica that is down, one that has left the
 * cluster, more nodes than there is room for. Method: a server of the test's own that answers by
 * the test's words (support/fake_redis.h). A real cluster with replicas: test_redis_cluster.
 */
#include "support/rig.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "kvtier/error.h"
#include "remote/remote_seal.h"
#include "remote/resp.h"
#include "support/fake_redis.h"
#include "support/remote_help.h"

#define NS 0x2C
#define MANY 40u /* masters, each with a replica: more than there is room for */

static struct remote_help help;
static struct fake_redis *fake;
static int closed = -1;

/* What the servers say. Written by the test, read by their thread. */
static struct {
    int ports[3];           /* of the first and the second server; of nobody */
    _Atomic int map;        /* which of the maps below */
    _Atomic bool redirects; /* reads are redirected to where nobody is */
    _Atomic unsigned reads[2];
} says;

enum { ONE_AND_NOBODY, ONE_AND_TWO, ONE_ALONE, A_CROWD };

static int tear_down(void **state)
{
    (void)state;
    remote_help_close(&help);
    if (fake)
        fake_redis_stop(fake);
    fake = NULL;
    if (closed >= 0)
        close(closed);
    closed = -1;
    return 0;
}

static size_t node_text(char *out, size_t len, const char *host, int port)
{
    return (size_t)snprintf(out, len, "*2\r\n$%zu\r\n%s\r\n:%d\r\n", strlen(host), host, port);
}

/* Masters of 200 slots, each with a replica, and the second server with all other slots. */
static void crowd_text(char *out, size_t len)
{
    size_t at = (size_t)snprintf(out, len, "*%u\r\n", MANY + 1);
    char host[32];

    for (unsigned i = 0; i < MANY; i++) {
        at += (size_t)snprintf(out + at, len - at, "*4\r\n:%u\r\n:%u\r\n", 200 * i, 200 * i + 199);
        for (unsigned place = 0; place < 2; place++) {
            snprintf(host, sizeof(host), "127.1.%u.%u", place, i + 1); /* nobody is there */
            at += node_text(out + at, len - at, host, says.ports[2]);
        }
    }
    at += (size_t)snprintf(out + at, len - at, "*3\r\n:%u\r\n:%u\r\n", 200 * MANY,
                           KVT_RESP_SLOTS - 1);
    (void)node_text(out + at, len - at, "127.0.0.1", says.ports[1]);
}

static void map_text(char *out, size_t len)
{
    int map = atomic_load(&says.map);
    size_t at;

    if (map == A_CROWD) {
        crowd_text(out, len);
        return;
    }
    at = (size_t)snprintf(out, len, "*1\r\n*%d\r\n:0\r\n:%u\r\n", map == ONE_ALONE ? 3 : 4,
                          KVT_RESP_SLOTS - 1);
    at += node_text(out + at, len - at, "127.0.0.1", says.ports[0]);
    if (map != ONE_ALONE)
        (void)node_text(out + at, len - at, "127.0.0.1", says.ports[map == ONE_AND_TWO ? 1 : 2]);
}

static void answer(void *ctx, unsigned at, const char *words, char *out, size_t len)
{
    (void)ctx;
    if (strcmp(words, "CLUSTER SLOTS") == 0) {
        map_text(out, len);
    } else if (strncmp(words, "GETRANGE ", 9) == 0) {
        const char *name = words + 9;

        atomic_fetch_add(&says.reads[at], 1);
        if (atomic_load(&says.redirects))
            snprintf(out, len, "-MOVED %u 127.0.0.1:%d\r\n",
                     kvt_resp_slot(name, strcspn(name, " ")), says.ports[2]);
        else if (at == 1 && atomic_load(&says.map) == ONE_ALONE)
            snprintf(out, len, "-CLUSTERDOWN Hash slot not served\r\n");
        else
            snprintf(out, len, "$0\r\n\r\n"); /* GETRANGE of what is not there */
    } else {
        snprintf(out, len, "+OK\r\n");
    }
}

static void begin(int map, bool redirects)
{
    char where[128];

    atomic_store(&says.map, map);
    atomic_store(&says.redirects, redirects);
    atomic_store(&says.reads[0], 0);
    atomic_store(&says.reads[1], 0);
    says.ports[2] = fake_redis_closed_port(&closed);
    fake = fake_redis_start(2, answer, NULL);
    says.ports[0] = fake_redis_port(fake, 0);
    says.ports[1] = fake_redis_port(fake, 1);
    if (map == A_CROWD) /* the second one is found by the map alone */
        snprintf(where, sizeof(where), "redis://127.0.0.1:%d?replicas=yes", says.ports[0]);
    else
        snprintf(where, sizeof(where), "redis://127.0.0.1:%d,127.0.0.1:%d?replicas=yes",
                 says.ports[0], says.ports[1]);
    remote_help_open(&help, where, NULL, NULL, NULL);
}

static int ask(uint64_t number)
{
    int status = -1;

    assert_int_equal(remote_help_probe(&help, NS, number, 1, &status), 0);
    return status;
}

/* Ask until the servers are found, which takes a map. */
static void ask_until_known(uint64_t number)
{
    int status = -1;

    for (int i = 0; i < 1200 && status; i++) {
        status = ask(number);
        if (status)
            rig_sleep_ms(50);
    }
    assert_int_equal(status, 0);
}

/* The map calls it a replica, and its master says that the slot is there: it is down, and there is
 * nobody else to ask. */
static void test_a_slot_moves_to_a_replica_that_is_down(void **state)
{
    struct kvt_remote_stats stats;

    (void)state;
    begin(ONE_AND_NOBODY, true);
    for (int i = 0; i < 5; i++)
        assert_int_equal(ask(1), -EHOSTDOWN);
    help.remote->ops->stats(help.remote, &stats);
    assert_true(stats.redirects > 0 && stats.nodes_down > 0);
    atomic_store(&says.redirects, false);
    ask_until_known(1);
}

/* A seed that was a replica, and is none any more, is not asked again once that is known. */
static void test_a_replica_leaves_the_cluster(void **state)
{
    unsigned before = 0;

    (void)state;
    begin(ONE_AND_TWO, false);
    for (int i = 0; i < 1200 && !atomic_load(&says.reads[1]); i++) { /* it is read from */
        (void)ask(1);
        rig_sleep_ms(50);
    }
    assert_true(atomic_load(&says.reads[1]) > 0);
    atomic_store(&says.map, ONE_ALONE);
    for (int i = 0; i < 1200; i++) {
        before = atomic_load(&says.reads[1]);
        assert_int_equal(ask(1), 0);
        if (atomic_load(&says.reads[1]) == before)
            break;
        rig_sleep_ms(50);
    }
    for (int i = 0; i < 10; i++)
        assert_int_equal(ask(1), 0);
    assert_int_equal(atomic_load(&says.reads[1]), before);
}

/* Of a cluster with more nodes than there is room for, replicas are left out, and no master. */
static void test_more_nodes_than_there_is_room_for(void **state)
{
    char name[KVT_REMOTE_NAME_BYTES];
    uint64_t number = 0;
    uint16_t slot = 0;

    (void)state;
    while (slot < 200 * MANY) { /* of the master that is named last */
        struct kvt_full_key key = remote_help_key(NS, ++number);

        slot = kvt_resp_slot(name, kvt_remote_name(&key, name));
    }
    begin(A_CROWD, false);
    ask_until_known(number);
    assert_int_equal(atomic_load(&says.reads[0]), 0);
    assert_true(atomic_load(&says.reads[1]) > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_a_slot_moves_to_a_replica_that_is_down, tear_down),
        cmocka_unit_test_teardown(test_a_replica_leaves_the_cluster, tear_down),
        cmocka_unit_test_teardown(test_more_nodes_than_there_is_room_for, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
