/* Two caches with DRAM of their own and one server between them, through the public API.
 *
 * Goal:   what one has stored, the other finds and loads exact, and says where it came from; with
 *         a disk as well; a server that goes away costs misses; purge reaches it; close is quick
 *         with a server that hangs.
 * Method: a real redis-server (support/redis_rig.h), two rigs in this process; skipped without.
 */
#include "support/rig.h"

#include <string.h>

#include "support/redis_rig.h"

#define BLOCKS 24u

static struct redis_rig redis;
static struct rig one, two;

static int tear_down(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct rig *rig = i ? &two : &one;

        if (rig->cache)
            rig_close(rig);
        if (rig->memory[0])
            rig_free(rig);
        memset(rig, 0, sizeof(*rig));
    }
    redis_rig_stop(&redis);
    return 0;
}

static void open_with(struct rig *rig, const char *more, const char *cap, const char *salt)
{
    struct rig_shape shape = rig_shape_small(64);
    char config[400], url[200];

    redis_rig_url(&redis, url, sizeof(url));
    snprintf(config, sizeof(config), "dram=4MiB,remote=%s,remote_deadline=20s%s%s", url,
             more[0] ? "," : "", more);
    rig_init(rig, &shape, config, cap);
    rig->identity.salt = salt;
    rig->identity.salt_len = salt ? strlen(salt) : 0;
    rig_open(rig);
}

static void open_one(struct rig *rig, const char *more, const char *cap)
{
    open_with(rig, more, cap, NULL);
}

static void wait_stat(struct rig *rig, const char *name, uint64_t want)
{
    for (int i = 0; i < 1200 && rig_stat(rig, name) != want; i++)
        rig_sleep_ms(50);
    assert_int_equal(rig_stat(rig, name), want);
}

static bool begin(void)
{
    if (getenv("KVT_RIG_DAEMON") || !redis_rig_able())
        return false;
    redis_rig_start(&redis, "");
    return true;
}

static void test_the_second_cache_loads_what_the_first_stored(void **state)
{
    (void)state;
    if (!begin())
        return;
    open_one(&one, "remote_write=all", NULL);
    open_one(&two, "", NULL);
    assert_int_equal(rig_store(&one, 1, BLOCKS, 0, NULL), BLOCKS);
    wait_stat(&one, "remote.put", BLOCKS);
    assert_int_equal(redis_rig_number(&redis, 0, "DBSIZE"), BLOCKS);
    assert_int_equal(rig_lookup(&two, 1, BLOCKS + 4), BLOCKS);
    assert_int_equal(rig_load(&two, 1, BLOCKS, NULL), BLOCKS);
    assert_int_equal(rig_stat(&two, "load.granted_remote"), BLOCKS);
    assert_int_equal(rig_stat(&two, "lookup.hits_remote"), BLOCKS);
    assert_int_equal(rig_load(&two, 1, BLOCKS, NULL), BLOCKS);
    assert_int_equal(rig_stat(&two, "load.granted_dram"), BLOCKS);
    assert_int_equal(rig_stat(&two, "remote.put"), 0);
}

/* The first has long gone; the second has a disk, and keeps what it got over a restart without the
 * server. */
static void test_over_a_restart_with_a_disk(void **state)
{
    (void)state;
    if (!begin())
        return;
    open_one(&one, "remote_write=all", NULL);
    assert_int_equal(rig_store(&one, 1, BLOCKS, 0, NULL), BLOCKS);
    rig_close(&one); /* puts what waits */
    assert_int_equal(redis_rig_number(&redis, 0, "DBSIZE"), BLOCKS);
    open_one(&two, "", "64MiB");
    assert_int_equal(rig_lookup(&two, 1, BLOCKS), BLOCKS);
    assert_int_equal(rig_load(&two, 1, BLOCKS, NULL), BLOCKS);
    assert_int_equal(kvt_flush(two.cache), 0);
    redis_rig_kill(&redis, 0);
    rig_reopen(&two);
    assert_int_equal(rig_lookup(&two, 1, BLOCKS), BLOCKS);
    assert_int_equal(rig_load(&two, 1, BLOCKS, NULL), BLOCKS);
    assert_int_equal(rig_stat(&two, "load.granted_disk"), BLOCKS);
}

/* The report of a load tells the shared tier's blocks apart; to a caller of before there was a
 * place for them they are blocks from disk. */
static void test_a_report_tells_where_from(void **state)
{
    struct kvt_req_report report = {.struct_size = sizeof(report)};
    struct kvt_key keys[BLOCKS];
    uint32_t ids[BLOCKS];
    struct kvt_req *req;

    (void)state;
    if (!begin())
        return;
    open_one(&one, "remote_write=all", NULL);
    open_one(&two, "", NULL);
    assert_int_equal(rig_store(&one, 1, BLOCKS, 0, NULL), BLOCKS);
    wait_stat(&one, "remote.put", BLOCKS);
    assert_int_equal(rig_lookup(&two, 1, BLOCKS), BLOCKS);
    assert_int_equal(rig_load(&two, 1, 10, NULL), 10); /* from now on in DRAM */
    for (uint32_t i = 0; i < BLOCKS; i++) {
        keys[i] = rig_key(1 + i);
        ids[i] = i;
    }
    assert_int_equal(kvt_load(two.ns, two.pool, keys, ids, BLOCKS, NULL, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    assert_int_equal(kvt_req_report(req, &report), 0);
    assert_int_equal(report.blocks_ok, BLOCKS);
    assert_int_equal(report.blocks_dram, 10);
    assert_int_equal(report.blocks_disk, 0);
    assert_int_equal(report.blocks_remote, BLOCKS - 10);
    report = (struct kvt_req_report){.struct_size = KVT_REQ_REPORT_SIZE_0, .blocks_remote = 77};
    assert_int_equal(kvt_req_report(req, &report), 0);
    assert_int_equal(report.struct_size, KVT_REQ_REPORT_SIZE_0);
    assert_int_equal(report.blocks_disk, BLOCKS - 10);
    assert_int_equal(report.blocks_remote, 77); /* not theirs to write */
    kvt_req_free(req);
}

/* 2,048 keys by one call, after a miss: three round trips to the node; a long one that misses asks
 * for a few keys only. */
static void test_2048_keys_in_three_rounds(void **state)
{
    uint64_t before;

    (void)state;
    if (!begin())
        return;
    open_one(&one, "remote_write=all,dram=64MiB", NULL);
    for (uint64_t at = 0; at < 2048; at += 64)
        assert_int_equal(rig_store(&one, 1 + at, 64, (uint32_t)at * 16, NULL), 64);
    wait_stat(&one, "remote.put", 2048);
    open_one(&two, "", NULL);
    assert_int_equal(rig_lookup(&two, 1000000, 2048), 0);
    assert_int_equal(rig_stat(&two, "remote.rounds"), 1);
    assert_true(rig_stat(&two, "remote.asked") < 64);
    before = rig_stat(&two, "remote.rounds");
    assert_int_equal(rig_lookup(&two, 1, 2048), 2048);
    assert_int_equal(rig_stat(&two, "remote.rounds") - before, 3);
    assert_int_equal(rig_lookup(&two, 1, 2048), 2048); /* they are known now */
    assert_int_equal(rig_stat(&two, "remote.rounds") - before, 3);
}

/* What is used twice is put, and only that. */
static void test_second_use(void **state)
{
    (void)state;
    if (!begin())
        return;
    open_one(&one, "", NULL);
    assert_int_equal(rig_store(&one, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(rig_load(&one, 1, 10, NULL), 10);
    wait_stat(&one, "remote.put", 10);
    assert_int_equal(redis_rig_number(&redis, 0, "DBSIZE"), 10);
    open_one(&two, "", NULL);
    assert_int_equal(rig_lookup(&two, 1, BLOCKS), 10);
    assert_int_equal(rig_load(&two, 1, BLOCKS, NULL), 10);
}

/* Gone from both: here and there. */
static void test_purge_reaches_the_server(void **state)
{
    (void)state;
    if (!begin())
        return;
    open_one(&one, "remote_write=all", NULL);
    assert_int_equal(rig_store(&one, 1, BLOCKS, 0, NULL), BLOCKS);
    wait_stat(&one, "remote.put", BLOCKS);
    assert_int_equal(kvt_purge(one.ns, NULL, 0), BLOCKS);
    assert_int_equal(redis_rig_number(&redis, 0, "DBSIZE"), 0);
    assert_int_equal(rig_lookup(&one, 1, BLOCKS), 0);
}

/* Blocks by name, also those that only another machine has put, and more than go into a message. */
static void test_a_purge_of_blocks_reaches_the_server(void **state)
{
    enum { MANY = 1500 };
    static struct kvt_key keys[MANY];

    (void)state;
    if (!begin())
        return;
    open_one(&one, "remote_write=all", NULL);
    open_one(&two, "remote_write=off", NULL);
    assert_int_equal(rig_store(&one, 1, BLOCKS, 0, NULL), BLOCKS);
    wait_stat(&one, "remote.put", BLOCKS);
    for (uint64_t i = 0; i < MANY; i++)
        keys[i] = rig_key(i < MANY - 4 ? 100000 + i : i - (MANY - 4) + 3);
    assert_int_equal(kvt_purge(two.ns, keys, MANY), 0); /* none was here */
    assert_int_equal(redis_rig_number(&redis, 0, "DBSIZE"), BLOCKS - 4);
    assert_int_equal(rig_stat(&two, "remote.purged"), 4);
    assert_int_equal(rig_lookup(&two, 1, BLOCKS), 2);
    assert_int_equal(rig_lookup(&one, 1, BLOCKS), BLOCKS); /* its own, until it is purged there */
    assert_int_equal(kvt_purge(one.ns, keys, MANY), 4);
    assert_int_equal(rig_lookup(&one, 1, BLOCKS), 2);
}

/* The same prompts of two tenants: neither finds what the other has put, and a purge of one leaves
 * the other's. */
static void test_two_tenants(void **state)
{
    (void)state;
    if (!begin())
        return;
    open_with(&one, "remote_write=all", NULL, "one");
    open_with(&two, "remote_write=all", NULL, "two");
    assert_int_equal(rig_store(&one, 1, BLOCKS, 0, NULL), BLOCKS);
    wait_stat(&one, "remote.put", BLOCKS);
    assert_int_equal(rig_lookup(&two, 1, BLOCKS), 0);
    assert_int_equal(rig_load(&two, 1, BLOCKS, NULL), 0);
    assert_int_equal(rig_store(&two, 1, BLOCKS, 0, NULL), BLOCKS);
    wait_stat(&two, "remote.put", BLOCKS);
    assert_int_equal(redis_rig_number(&redis, 0, "DBSIZE"), 2 * BLOCKS);
    assert_int_equal(kvt_purge(one.ns, NULL, 0), BLOCKS);
    assert_int_equal(redis_rig_number(&redis, 0, "DBSIZE"), BLOCKS);
    assert_int_equal(rig_load(&two, 1, BLOCKS, NULL), BLOCKS);
}

/* A purge that does not get there says what it has done and what is left to do. */
static void test_a_purge_that_does_not_get_there(void **state)
{
    (void)state;
    if (!begin())
        return;
    open_one(&one, "remote_write=all", NULL);
    assert_int_equal(rig_store(&one, 1, BLOCKS, 0, NULL), BLOCKS);
    wait_stat(&one, "remote.put", BLOCKS);
    redis_rig_kill(&redis, 0);
    assert_true(kvt_purge(one.ns, NULL, 0) < 0);
    assert_int_equal(rig_lookup(&one, 1, BLOCKS), 0);
    assert_int_equal(rig_stat(&one, "remote.purge_fail"), 1);
    rig_close(&one); /* nobody writes to the log any more */
    assert_non_null(strstr(one.log, "gone here, and may still be there; repeat it"));
}

/* Without the server everything works as without a shared tier; back again, it is used again. */
static void test_without_the_server(void **state)
{
    (void)state;
    if (!begin())
        return;
    open_one(&one, "remote_write=all", NULL);
    redis_rig_kill(&redis, 0);
    assert_int_equal(rig_store(&one, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(rig_lookup(&one, 1, BLOCKS + 8), BLOCKS);
    assert_int_equal(rig_load(&one, 1, BLOCKS, NULL), BLOCKS);
    assert_true(rig_stat(&one, "remote.nodes_down") == 1 || rig_stat(&one, "remote.losses") > 0);
    redis_rig_run(&redis, 0);
    for (int i = 0; i < 1200 && redis_rig_number(&redis, 0, "DBSIZE") < (long)BLOCKS; i++) {
        assert_int_equal(rig_load(&one, 1, BLOCKS, NULL), BLOCKS);
        rig_sleep_ms(50);
    }
    assert_int_equal(redis_rig_number(&redis, 0, "DBSIZE"), BLOCKS);
}

/* A server that hangs holds up neither look-ups for long nor the close. */
static void test_a_server_that_hangs(void **state)
{
    (void)state;
    if (!begin())
        return;
    open_one(&one, "remote_deadline=100ms,remote_write=all", NULL);
    assert_int_equal(rig_store(&one, 1, BLOCKS, 0, NULL), BLOCKS);
    wait_stat(&one, "remote.put", BLOCKS);
    redis_rig_freeze(&redis, 0, true);
    for (uint64_t i = 0; i < 50; i++)
        assert_int_equal(rig_lookup(&one, 1000 + 100 * i, 8), 0);
    assert_int_equal(rig_store(&one, 100, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(rig_load(&one, 100, BLOCKS, NULL), BLOCKS);
    rig_close(&one);
    redis_rig_freeze(&redis, 0, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_the_second_cache_loads_what_the_first_stored, tear_down),
        cmocka_unit_test_teardown(test_over_a_restart_with_a_disk, tear_down),
        cmocka_unit_test_teardown(test_a_report_tells_where_from, tear_down),
        cmocka_unit_test_teardown(test_2048_keys_in_three_rounds, tear_down),
        cmocka_unit_test_teardown(test_second_use, tear_down),
        cmocka_unit_test_teardown(test_purge_reaches_the_server, tear_down),
        cmocka_unit_test_teardown(test_a_purge_of_blocks_reaches_the_server, tear_down),
        cmocka_unit_test_teardown(test_two_tenants, tear_down),
        cmocka_unit_test_teardown(test_without_the_server, tear_down),
        cmocka_unit_test_teardown(test_a_purge_that_does_not_get_there, tear_down),
        cmocka_unit_test_teardown(test_a_server_that_hangs, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
