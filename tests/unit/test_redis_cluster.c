/* A Redis cluster of six as the shared tier.
 *
 * Goal:   keys are found wherever their slot is, also while it moves; a master that dies or hangs
 *         costs misses of its own slots until its replica has taken over, and no request more than
 *         its deadline; no byte is ever another one.
 * Method: three masters with a replica each on loopback (support/redis_rig.h), one cluster for all
 *         tests, in their order; every record read is compared whole (support/remote_help.h).
 */
#include "support/rig.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "remote/remote_seal.h"
#include "remote/resp.h"
#include "support/redis_chaos.h"
#include "support/redis_rig.h"
#include "support/remote_help.h"
#include "support/tally.h"

#define PAGES 2u
#define KEYS 300u
#define NS 0x33

static struct redis_rig redis;
static struct remote_help help;
static char url[512];
static bool able;

static int start(void **state)
{
    (void)state;
    able = redis_rig_able();
    if (!able)
        return 0;
    redis_rig_cluster(&redis, "");
    redis_rig_url(&redis, url, sizeof(url));
    return 0;
}

static int stop(void **state)
{
    (void)state;
    redis_rig_stop(&redis);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    remote_help_close(&help);
    return 0;
}

static uint16_t slot_of(uint64_t number, char name[KVT_REMOTE_NAME_BYTES])
{
    struct kvt_full_key key = remote_help_key(NS, number);
    size_t len = kvt_remote_name(&key, name);

    return kvt_resp_slot(name, len);
}

static void id_of(unsigned node, char id[64])
{
    assert_int_equal(redis_rig_cli(&redis, node, "CLUSTER MYID", id, 64), 0);
    assert_int_equal(strlen(id), 40);
}

/* The node that serves a key now; REDIS_RIG_NODES: none. */
static unsigned owner_of(const char *name)
{
    char words[256], out[512];

    for (unsigned i = 0; i < redis.count; i++) {
        if (!redis.pids[i])
            continue;
        snprintf(words, sizeof(words), "GETRANGE %s 0 3", name);
        if (redis_rig_cli(&redis, i, words, out, sizeof(out)) == 0 && !strstr(out, "MOVED"))
            return i;
    }
    return REDIS_RIG_NODES;
}

/* Ask until all of them are there again. */
static void wait_all(uint32_t want)
{
    uint32_t got = 0;
    int status = 0;

    for (int i = 0; i < 2400; i++) {
        got = remote_help_probe(&help, NS, 1, KEYS, &status);
        if (got == want && status == 0)
            return;
        rig_sleep_ms(50);
    }
    fail_msg("%u of %u are there, status %d", got, want, status);
}

/* Every master's replica has what it has. From here on a node that is silent for three seconds is
 * replaced; before, on a machine that is busy, none is. */
static void wait_replicas(void)
{
    long keys = 0;
    char out[256];

    for (unsigned node = 0; node < redis.count; node++)
        (void)redis_rig_cli(&redis, node, "CONFIG SET cluster-node-timeout 3000", out, sizeof(out));
    for (int i = 0; i < 600 && keys < 2L * KEYS; i++) {
        keys = 0;
        for (unsigned node = 0; node < redis.count; node++)
            keys += redis_rig_number(&redis, node, "DBSIZE");
        if (keys < 2L * KEYS)
            rig_sleep_ms(50);
    }
    assert_true(keys >= 2L * KEYS);
}

/* ---- the tests ----------------------------------------------------------------------------- */

static void test_keys_are_spread(void **state)
{
    struct kvt_remote_stats stats;
    int other;

    (void)state;
    if (!able)
        return;
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_probe(&help, NS, 1, KEYS, NULL), 0);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, &other), 0);
    assert_int_equal(other, KVT_E_EXISTS);
    for (unsigned node = 0; node < 3; node++)
        assert_true(redis_rig_number(&redis, node, "DBSIZE") > (long)KEYS / 6);
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    assert_int_equal(remote_help_probe(&help, NS, 1, 1000, NULL), KEYS);
    help.remote->ops->stats(help.remote, &stats);
    assert_int_equal(stats.redirects, 0); /* the map was asked for first */
}

/* One seed is enough, also one that is a replica. */
static void test_any_seed_will_do(void **state)
{
    char one[64];

    (void)state;
    if (!able)
        return;
    snprintf(one, sizeof(one), "redis://127.0.0.1:%d", redis.ports[5]);
    remote_help_open(&help, one, NULL, NULL, NULL);
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
}

/* A slot half way from one master to another: keys that have gone, those that have not, and new
 * ones; then all the way. */
static void test_a_slot_moves(void **state)
{
    char name[KVT_REMOTE_NAME_BYTES], from_id[64], to_id[64], words[512], out[512];
    struct kvt_remote_stats before, after;
    unsigned from, to;
    uint16_t slot;

    (void)state;
    if (!able)
        return;
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    slot = slot_of(1, name);
    from = owner_of(name);
    to = (from + 1) % 3;
    id_of(from, from_id);
    id_of(to, to_id);
    snprintf(words, sizeof(words), "CLUSTER SETSLOT %u IMPORTING %s", slot, from_id);
    assert_int_equal(redis_rig_cli(&redis, to, words, out, sizeof(out)), 0);
    assert_string_equal(out, "OK");
    snprintf(words, sizeof(words), "CLUSTER SETSLOT %u MIGRATING %s", slot, to_id);
    assert_int_equal(redis_rig_cli(&redis, from, words, out, sizeof(out)), 0);
    assert_string_equal(out, "OK");
    help.remote->ops->stats(help.remote, &before);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), 0); /* still there */
    snprintf(words, sizeof(words), "MIGRATE 127.0.0.1 %d %s 0 20000", redis.ports[to], name);
    assert_int_equal(redis_rig_cli(&redis, from, words, out, sizeof(out)), 0);
    assert_string_equal(out, "OK");
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), 0); /* ASK */
    assert_int_equal(remote_help_drop(&help, NS, 1, 1, NULL), 0);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), KVT_E_MISS);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), 0);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), 0);
    help.remote->ops->stats(help.remote, &after);
    assert_true(after.redirects > before.redirects);
    for (unsigned node = 0; node < 3; node++) {
        snprintf(words, sizeof(words), "CLUSTER SETSLOT %u NODE %s", slot, to_id);
        assert_int_equal(redis_rig_cli(&redis, (to + node) % 3, words, out, sizeof(out)), 0);
    }
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), 0); /* MOVED */
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
}

/* Slots move while records are read and written. */
static void test_slots_move_under_load(void **state)
{
    char name[KVT_REMOTE_NAME_BYTES], from_id[64], to_id[64], words[512], out[512];

    (void)state;
    if (!able)
        return;
    remote_help_open(&help, url, NULL, NULL, NULL);
    for (uint64_t number = 2; number < 5; number++) {
        uint16_t slot = slot_of(number, name);
        unsigned from = owner_of(name), to = (from + 2) % 3;

        id_of(from, from_id);
        id_of(to, to_id);
        snprintf(words, sizeof(words), "CLUSTER SETSLOT %u IMPORTING %s", slot, from_id);
        (void)redis_rig_cli(&redis, to, words, out, sizeof(out));
        snprintf(words, sizeof(words), "CLUSTER SETSLOT %u MIGRATING %s", slot, to_id);
        (void)redis_rig_cli(&redis, from, words, out, sizeof(out));
        assert_int_equal(remote_help_get_many(&help, NS, 1, 40, PAGES, NULL), 40);
        snprintf(words, sizeof(words), "MIGRATE 127.0.0.1 %d %s 0 20000", redis.ports[to], name);
        (void)redis_rig_cli(&redis, from, words, out, sizeof(out));
        assert_int_equal(remote_help_get_many(&help, NS, 1, 40, PAGES, NULL), 40);
        for (unsigned node = 0; node < 3; node++) {
            snprintf(words, sizeof(words), "CLUSTER SETSLOT %u NODE %s", slot, to_id);
            (void)redis_rig_cli(&redis, (to + node) % 3, words, out, sizeof(out));
        }
        assert_int_equal(remote_help_get_many(&help, NS, 1, 40, PAGES, NULL), 40);
    }
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
}

/* A namespace is removed from all nodes, and nothing else. */
static void test_a_namespace_goes_from_all_nodes(void **state)
{
    uint64_t removed;

    (void)state;
    if (!able)
        return;
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS + 1, 1, KEYS, 1, NULL), KEYS);
    assert_int_equal(remote_help_drop(&help, NS + 1, 0, 0, &removed), 0);
    assert_int_equal(removed, KEYS);
    assert_int_equal(remote_help_probe(&help, NS + 1, 1, KEYS, NULL), 0);
    assert_int_equal(remote_help_probe(&help, NS, 1, KEYS, NULL), KEYS);
}

/* A cap for each namespace: what all nodes hold of it counts, and the oldest go from all of them;
 * one that is within it loses nothing. */
static void test_a_namespace_is_kept_at_its_cap(void **state)
{
    enum { MANY = 64, LONG_PAGES = 32 }; /* 160 KiB each as a server counts, 10 MiB together */
    char error[256];
    uint32_t there = MANY;

    (void)state;
    if (!able)
        return;
    memset(&help, 0, sizeof(help));
    help.deadline_ns = REMOTE_HELP_DEADLINE_NS;
    help.params = (struct kvt_remote_params){
        .where = url, .ns_cap_bytes = 5 << 20, .clean_period_ns = 50000000};
    assert_int_equal(kvt_remote_tier_open(&help.params, &help.remote, error, sizeof(error)), 0);
    assert_int_equal(remote_help_put_many(&help, NS + 1, 1, MANY, LONG_PAGES, NULL), MANY);
    for (int i = 0; i < 600 && there > 33; i++) {
        rig_sleep_ms(100);
        there = remote_help_probe(&help, NS + 1, 1, MANY, NULL);
    }
    assert_true(there <= 33 && there > 16);
    assert_int_equal(remote_help_probe(&help, NS, 1, KEYS, NULL), KEYS);
    assert_int_equal(remote_help_drop(&help, NS + 1, 0, 0, NULL), 0);
}

/* GETs that a node has carried out. */
static long gets_of(unsigned node)
{
    char out[16384];
    const char *at;

    if (redis_rig_cli(&redis, node, "INFO commandstats", out, sizeof(out)) != 0)
        return 0;
    at = strstr(out, "cmdstat_get:calls=");
    return at ? strtol(at + strlen("cmdstat_get:calls="), NULL, 10) : 0;
}

static bool is_master(unsigned node)
{
    char out[4096];

    return redis_rig_cli(&redis, node, "ROLE", out, sizeof(out)) == 0 && strstr(out, "master");
}

static long gets_of_masters(void)
{
    long sum = 0;

    for (unsigned node = 0; node < redis.count; node++)
        sum += is_master(node) ? gets_of(node) : 0;
    return sum;
}

static long gets_of_all(void)
{
    long sum = 0;

    for (unsigned node = 0; node < redis.count; node++)
        sum += gets_of(node);
    return sum;
}

/* By option replicas answer reads, and masters do when they do not: READONLY refused, killed, or
 * frozen, which costs what is under way its deadline and nothing else. What is removed from the
 * master is gone from the replica a moment later. */
static void test_replicas_answer_reads(void **state)
{
    char where[600], out[256];
    struct kvt_remote_stats before, after;
    long masters = 0, all = 0;
    unsigned replica = 0;
    int other;

    (void)state;
    if (!able)
        return;
    wait_replicas();
    snprintf(where, sizeof(where), "%s?replicas=yes", url);
    remote_help_open(&help, where, NULL, NULL, NULL);
    for (int i = 0; i < 600;
         i++) { /* every node has heard of slots that have moved, and of others */
        help.remote->ops->stats(help.remote, &before);
        masters = gets_of_masters();
        all = gets_of_all();
        assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
        help.remote->ops->stats(help.remote, &after);
        if (i && after.redirects == before.redirects && gets_of_masters() == masters)
            break;
        rig_sleep_ms(50);
    }
    assert_int_equal(gets_of_masters(), masters);
    assert_int_equal(gets_of_all(), all + KEYS);
    assert_int_equal(remote_help_probe(&help, NS, 1, KEYS, NULL), KEYS);
    remote_help_close(&help);

    while (is_master(replica))
        replica++;
    assert_int_equal(redis_rig_cli(&redis, replica, "ACL SETUSER default -readonly", out, 256), 0);
    remote_help_open(&help, where, NULL, NULL, NULL);
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    help.remote->ops->stats(help.remote, &before);
    assert_true(before.redirects > 0);
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    help.remote->ops->stats(help.remote, &after);
    assert_int_equal(after.redirects, before.redirects); /* it is not asked again */
    assert_int_equal(redis_rig_cli(&redis, replica, "ACL SETUSER default +@all", out, 256), 0);
    remote_help_close(&help);

    remote_help_open(&help, where, NULL, NULL, NULL);
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    redis_rig_freeze(&redis, replica, true);
    help.deadline_ns = 300000000;
    assert_true(remote_help_get_many(&help, NS, 1, KEYS, PAGES, &other) < KEYS);
    assert_true(other == KVT_E_DEADLINE || other == -EHOSTDOWN);
    help.deadline_ns = REMOTE_HELP_DEADLINE_NS;
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS); /* masters */
    redis_rig_freeze(&redis, replica, false);
    redis_rig_kill(&redis, replica);
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    assert_int_equal(remote_help_put_many(&help, NS + 2, 1, 40, PAGES, NULL), 40);
    redis_rig_run(&redis, replica);
    assert_int_equal(remote_help_drop(&help, NS + 2, 1, 40, NULL), 0);
    /* until it has all of its master's contents it may not know of the removal */
    redis_rig_wait(&redis, replica, "INFO replication", "master_link_status:up");
    for (int i = 0; i < 1200 && remote_help_probe(&help, NS + 2, 1, 40, NULL) > 0; i++)
        rig_sleep_ms(50);
    assert_int_equal(remote_help_get_many(&help, NS + 2, 1, 40, PAGES, NULL), 0);
    wait_all(KEYS); /* one that has been started again is empty at first: misses */
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
}

/* A master hangs: the keys of others are read all the while; its own are misses by the deadline,
 * until its replica has been promoted. It comes back as a replica. */
static void test_a_master_hangs(void **state)
{
    char name[KVT_REMOTE_NAME_BYTES];
    unsigned owner;
    uint32_t got;
    int other;

    (void)state;
    if (!able)
        return;
    wait_replicas();
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    (void)slot_of(1, name);
    owner = owner_of(name);
    redis_rig_freeze(&redis, owner, true);
    help.deadline_ns = 300000000;
    got = remote_help_get_many(&help, NS, 1, KEYS, PAGES, &other);
    assert_true(got < KEYS);
    assert_true(other == KVT_E_DEADLINE || other == -EHOSTDOWN);
    help.deadline_ns = REMOTE_HELP_DEADLINE_NS;
    wait_all(KEYS); /* the replica has taken over */
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    redis_rig_freeze(&redis, owner, false);
    redis_rig_wait(&redis, owner, "ROLE", "slave");
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
}

/* A master is killed: the same; started again it is a replica. */
static void test_a_master_is_killed(void **state)
{
    char name[KVT_REMOTE_NAME_BYTES];
    unsigned owner;

    (void)state;
    if (!able)
        return;
    for (unsigned i = 0; i < redis.count; i++)
        redis_rig_wait(&redis, i, "CLUSTER INFO", "cluster_state:ok");
    wait_replicas();
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    (void)slot_of(2, name);
    owner = owner_of(name);
    redis_rig_kill(&redis, owner);
    assert_true(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL) < KEYS);
    wait_all(KEYS);
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    assert_int_equal(remote_help_put_many(&help, NS, KEYS + 1, 50, PAGES, NULL), 50);
    redis_rig_run(&redis, owner);
    redis_rig_wait(&redis, owner, "ROLE", "slave");
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS + 50, PAGES, NULL), KEYS + 50);
}

/* Nodes die and slots move while everything goes on: no byte is wrong, and no memory is written to
 * that has been given back. A few in `make test`; a hundred nodes and twenty slots in so many
 * seconds (KVT_SOAK_SECONDS, as in `make soak`), or as many as these allow, one node at least. */
static void test_kills_and_moves_under_load(void **state)
{
    const char *seconds = getenv("KVT_SOAK_SECONDS");
    int64_t end_ns = seconds ? rig_now_ns() + strtoll(seconds, NULL, 10) * 1000000000 : INT64_MAX;
    bool soak = seconds != NULL;
    uint32_t kills = soak ? 100 : 2, moves = soak ? 20 : 2, killed = 0, moved = 0, lost = 0;
    struct redis_load_counts counts, of_reader;
    struct redis_load *load, *reader; /* of masters, and of replicas */
    struct kvt_rng rng;
    char where[600];

    (void)state;
    if (!able)
        return;
    rng.state = rig_seed();
    redis_chaos_ready(&redis);
    snprintf(where, sizeof(where), "%s?replicas=yes", url);
    load = redis_load_start(url, kvt_rng_next(&rng));
    reader = redis_load_start(where, kvt_rng_next(&rng));
    while ((killed < kills || moved < moves) && (rig_now_ns() < end_ns || !killed)) {
        if (moved < moves && rig_now_ns() < end_ns &&
            (killed == kills || kvt_rng_below(&rng, kills + moves) < moves)) {
            if (redis_chaos_move(&redis, &rng))
                moved++;
            else if (++lost > 100)
                break; /* said below */
            continue;
        }
        if (killed == kills)
            continue;
        redis_chaos_kill(&redis, &rng, soak ? kvt_rng_below(&rng, 3) : killed == 0,
                         soak ? kvt_rng_below(&rng, 3) == 0 : killed != 0);
        killed++;
    }
    counts = redis_load_stop(load);
    of_reader = redis_load_stop(reader);
    counts.got += of_reader.got;
    counts.missed += of_reader.missed;
    counts.put += of_reader.put;
    counts.found += of_reader.found;
    counts.dropped += of_reader.dropped;
    counts.failed += of_reader.failed;
    counts.wrong += of_reader.wrong;
    counts.touched += of_reader.touched;
    counts.late_ns = KVT_MAX(counts.late_ns, of_reader.late_ns);
    print_message(
        "           %u nodes killed, %u slots moved (%u more not to the end) beside %llu "
        "reads, %llu misses, %llu puts, %llu headers, %llu removed, %llu failures; %.0f ms "
        "after its deadline at most; %llu wrong, %llu written to later\n",
        killed, moved, lost, (unsigned long long)counts.got, (unsigned long long)counts.missed,
        (unsigned long long)counts.put, (unsigned long long)counts.found,
        (unsigned long long)counts.dropped, (unsigned long long)counts.failed,
        (double)counts.late_ns * 1e-6, (unsigned long long)counts.wrong,
        (unsigned long long)counts.touched);
    tally_print("remote", killed + moved, counts.wrong + counts.touched);
    assert_int_equal(counts.wrong, 0);
    assert_int_equal(counts.touched, 0);
    assert_true(moved == moves || soak);
    assert_true(killed == kills || (soak && killed));
    assert_true(counts.got > 0 && counts.put > 0 && counts.found > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_keys_are_spread, tear_down),
        cmocka_unit_test_teardown(test_any_seed_will_do, tear_down),
        cmocka_unit_test_teardown(test_a_slot_moves, tear_down),
        cmocka_unit_test_teardown(test_slots_move_under_load, tear_down),
        cmocka_unit_test_teardown(test_a_namespace_goes_from_all_nodes, tear_down),
        cmocka_unit_test_teardown(test_a_namespace_is_kept_at_its_cap, tear_down),
        cmocka_unit_test_teardown(test_replicas_answer_reads, tear_down),
        cmocka_unit_test_teardown(test_a_master_hangs, tear_down),
        cmocka_unit_test_teardown(test_a_master_is_killed, tear_down),
        cmocka_unit_test_teardown(test_kills_and_moves_under_load, tear_down),
    };

    return cmocka_run_group_tests(tests, start, stop);
}
