/* Goal: the sentences of `kvtier stat`: each trouble that the library counts is told, once, with a
 *       remedy, under the right question; without trouble nothing is warned of; sums and ratios are
 *       those of the numbers; a live cache's own numbers reach them through the file "stats".
 * Method: numbers made by hand; then a real cache in this process and the built binary beside it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "stat_verdict.h"
#include "support/run_tool.h"
#include "support/small_store.h"

static struct tool_run run;

#define GIB (1ull << 30)

/* Numbers of a cache that works: 800 of 1,000 keys were hits, and were loaded. */
static json_t *healthy(void)
{
    return json_pack("{s:i, s:i, s:i, s:i, s:i, s:I, s:I, s:i, s:i, s:s, s:i, s:i, s:s}",
                     "lookup.keys", 1000, "lookup.hits_dram", 700, "lookup.hits_disk", 100,
                     "load.granted_dram", 700, "load.granted_disk", 100, "client.store_bytes",
                     (json_int_t)(GIB / 4), "client.store_logical_bytes", (json_int_t)GIB,
                     "client.store_blocks", 1000, "disk.direct", 1, "cache.state", "on",
                     "store.committed", 230, "store.replaced", 30, "codec.level", "kv4");
}

static struct kvt_stat_facts facts_of(const json_t *counters)
{
    return (struct kvt_stat_facts){.path = "/somewhere",
                                   .counters = counters,
                                   .owner_pid = 4711,
                                   .records = 1000,
                                   .bytes = GIB / 4,
                                   .bytes_used = GIB,
                                   .bytes_max = 2 * GIB,
                                   .block_tokens = 16};
}

/* How many verdicts have the state ("" any) and the text in text or remedy. */
static int count(const json_t *verdicts, const char *question, const char *state, const char *text)
{
    json_t *verdict;
    size_t i;
    int n = 0;

    json_array_foreach((json_t *)verdicts, i, verdict)
    {
        const char *remedy = json_string_value(json_object_get(verdict, "remedy"));
        const char *has = json_string_value(json_object_get(verdict, "text"));
        if (strcmp(json_string_value(json_object_get(verdict, "question")), question) ||
            (state[0] && strcmp(json_string_value(json_object_get(verdict, "state")), state)))
            continue;
        n += strstr(has, text) != NULL || (remedy && strstr(remedy, text));
    }
    return n;
}

static int warnings(const json_t *verdicts)
{
    return count(verdicts, "working", "warn", "") + count(verdicts, "paying", "warn", "") +
           count(verdicts, "safe", "warn", "");
}

static void test_healthy(void **state)
{
    json_t *counters = healthy();
    struct kvt_stat_facts facts = facts_of(counters);
    json_t *verdicts = kvt_stat_verdicts(&facts);

    (void)state;
    assert_int_equal(warnings(verdicts), 0);
    assert_int_equal(count(verdicts, "working", "note", ""), 0);
    assert_int_equal(count(verdicts, "working", "ok", "process 4711 owns it; the cache is on"), 1);
    assert_int_equal(count(verdicts, "paying", "ok", "800 of 1000 keys looked up were there"), 1);
    assert_int_equal(count(verdicts, "paying", "ok",
                           "200 computed and stored: 80.0 % loaded; 700 from DRAM, 100 from disk"),
                     1);
    assert_int_equal(count(verdicts, "paying", "ok", "800 blocks (12800 tokens)"), 1);
    assert_int_equal(count(verdicts, "paying", "ok",
                           "1.0 GiB of the engine's cache were stored as "
                           "256.0 MiB: 0.25"),
                     1);
    assert_int_equal(count(verdicts, "safe", "ok", "no record failed to verify"), 1);
    json_decref(verdicts);
    facts.block_tokens = 0; /* not known: no tokens are made up */
    verdicts = kvt_stat_verdicts(&facts);
    assert_int_equal(count(verdicts, "paying", "", "tokens"), 0);
    json_decref(verdicts);
    json_decref(counters);
}

/* Hits that nobody loaded have saved nothing: no success is claimed, whatever the look-ups say. */
static void test_hits_alone_pay_nothing(void **state)
{
    json_t *counters = healthy();
    struct kvt_stat_facts facts = facts_of(counters);

    (void)state;
    json_object_set_new(counters, "load.granted_dram", json_integer(0));
    json_object_set_new(counters, "load.granted_disk", json_integer(0));
    json_object_del(counters, "client.store_bytes");
    json_t *verdicts = kvt_stat_verdicts(&facts);
    assert_int_equal(count(verdicts, "paying", "ok", ""), 0);
    assert_int_equal(count(verdicts, "paying", "note", "800 of 1000 keys looked up were there"), 1);
    assert_int_equal(count(verdicts, "paying", "note", "in its own cache"), 1);
    json_decref(verdicts);
    json_object_set_new(counters, "lookup.hits_dram", json_integer(0));
    json_object_set_new(counters, "lookup.hits_disk", json_integer(0));
    verdicts = kvt_stat_verdicts(&facts);
    assert_int_equal(count(verdicts, "paying", "ok", ""), 0);
    assert_int_equal(count(verdicts, "paying", "note", "none of 1000 keys"), 1);
    json_decref(verdicts);
    json_decref(counters);
}

/* A quota is told as one, and what it cuts off is not called the program's fault. */
static void test_a_quota_is_named(void **state)
{
    json_t *counters = healthy();
    struct kvt_stat_facts facts = facts_of(counters);

    (void)state;
    json_object_set_new(counters, "store.dropped_chain", json_integer(17));
    json_t *verdicts = kvt_stat_verdicts(&facts);
    assert_int_equal(count(verdicts, "paying", "note", "store a chain from its first block"), 1);
    json_decref(verdicts);
    json_object_set_new(counters, "quota.refused", json_integer(1));
    verdicts = kvt_stat_verdicts(&facts);
    assert_int_equal(count(verdicts, "paying", "warn", "raise ns_quota"), 1);
    assert_int_equal(count(verdicts, "paying", "", "store a chain from its first block"), 0);
    assert_int_equal(count(verdicts, "paying", "note", "17 more blocks were not stored"), 1);
    json_decref(verdicts);
    json_decref(counters);
}

/* Most of it at kv8 or raw though kv4 was asked for: the window. Not when that is the level. */
static void test_a_long_window_is_told(void **state)
{
    json_t *counters = healthy();
    struct kvt_stat_facts facts = facts_of(counters);
    json_t *verdicts = kvt_stat_verdicts(&facts);

    (void)state;
    assert_int_equal(count(verdicts, "paying", "", "window"), 0);
    json_decref(verdicts);
    json_object_set_new(counters, "client.store_bytes", json_integer((json_int_t)(GIB / 9 * 5)));
    verdicts = kvt_stat_verdicts(&facts);
    assert_int_equal(count(verdicts, "paying", "note", "--window-tokens"), 1);
    json_decref(verdicts);
    json_object_set_new(counters, "codec.level", json_string("kv8"));
    verdicts = kvt_stat_verdicts(&facts);
    assert_int_equal(count(verdicts, "paying", "", "window"), 0);
    json_decref(verdicts);
    json_decref(counters);
}

/* A kvtierd is told by what it serves. */
static void test_a_daemon_is_told(void **state)
{
    json_t *counters = healthy();
    struct kvt_stat_facts facts = facts_of(counters);

    (void)state;
    facts.daemon = 1;
    json_t *verdicts = kvt_stat_verdicts(&facts);
    assert_int_equal(count(verdicts, "working", "note", "serves nobody"), 1);
    json_decref(verdicts);
    facts.clients = 3;
    json_object_set_new(counters, "disk.direct", json_integer(0)); /* it has no disk */
    verdicts = kvt_stat_verdicts(&facts);
    assert_int_equal(count(verdicts, "working", "ok", "kvtierd, process 4711, serves 3"), 1);
    assert_int_equal(count(verdicts, "working", "note", ""), 0);
    json_decref(verdicts);
    json_decref(counters);
}

/* What comes from the tier that machines share counts, and that it answers is said; without one
 * nothing is. */
static void test_a_shared_tier(void **state)
{
    json_t *counters = healthy();
    struct kvt_stat_facts facts = facts_of(counters);
    json_t *verdicts = kvt_stat_verdicts(&facts);

    (void)state;
    assert_int_equal(count(verdicts, "working", "", "shared tier"), 0);
    assert_int_equal(count(verdicts, "paying", "", "shared tier"), 0);
    json_decref(verdicts);
    json_object_set_new(counters, "remote.nodes", json_integer(3));
    json_object_set_new(counters, "lookup.hits_remote", json_integer(50));
    json_object_set_new(counters, "load.granted_remote", json_integer(40));
    json_object_set_new(counters, "remote.gone", json_integer(5));
    verdicts = kvt_stat_verdicts(&facts);
    assert_int_equal(warnings(verdicts), 0);
    assert_int_equal(count(verdicts, "working", "ok", "the shared tier answers, 3 nodes"), 1);
    assert_int_equal(count(verdicts, "paying", "ok", "850 of 1000 keys looked up were there"), 1);
    assert_int_equal(count(verdicts, "paying", "ok", "840 blocks"), 1);
    assert_int_equal(count(verdicts, "paying", "ok", "40 from the shared tier"), 1);
    assert_int_equal(count(verdicts, "paying", "note", "more room"), 1);
    json_decref(verdicts);
    json_object_set_new(counters, "lookup.hits_dram", json_integer(0));
    json_object_set_new(counters, "lookup.hits_disk", json_integer(0));
    json_object_set_new(counters, "remote.nodes_down", json_integer(1));
    verdicts = kvt_stat_verdicts(&facts);
    assert_int_equal(count(verdicts, "working", "ok", "answers"), 0);
    assert_int_equal(count(verdicts, "paying", "note", "same prompts"), 0); /* they came again */
    json_decref(verdicts);
    json_decref(counters);
}

/* One counter at a time: told under its question, with something to do. */
static void test_each_trouble(void **state)
{
    static const char *const troubles[][3] = {
        {"verify.checksum_fail", "safe", "kvtier verify"},
        {"client.load_corrupt", "safe", "kvtier verify"},
        {"disk.read_fail", "safe", "smartctl"},
        {"disk.write_fail", "safe", "smartctl"},
        {"disk.enospc", "safe", "lower the cap"},
        {"index.collision", "safe", "report"},
        {"client.bad_move", "safe", "report"},
        {"client.refused_busy", "working", "requests_max"},
        {"client.refused_invalid", "working", "log says which"},
        {"client.freed_twice", "working", "defect of the program"},
        {"gpu.lost", "working", "gpu.state"},
        {"recover.no_room", "working", "46 bytes a block"},
        {"client.load_late", "paying", "load_deadline"},
        {"disk.roots_failing", "safe", "dmesg"},
        {"scrub.bad", "safe", "smartctl"},
        {"scrub.read_fail", "safe", "dmesg"},
        {"load.deadline", "paying", "load_deadline"},
        {"load.no_slot", "paying", "raise staging"},
        {"store.dropped_dram", "paying", "raise dram"},
        {"store.dropped_index", "paying", "raise dram"},
        {"disk.dropped_queue", "paying", "write_queue"},
        {"store.lost", "paying", "raise dram"},
        {"remote.nodes_down", "working", "kvtier doctor --config remote="},
        {"remote.auth_fails", "working", "remote_auth"},
        {"remote.deadline", "paying", "remote_deadline"},
        {"remote.put_full", "paying", "maxmemory"},
        {"remote.put_fail", "paying", "log has the reason"},
        {"remote.bad", "safe", "remote_mac"},
        {"remote.refused", "safe", "one version"},
        {"remote.purge_fail", "safe", "kvtier purge"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(troubles) / sizeof(troubles[0]); i++) {
        json_t *counters = healthy();
        struct kvt_stat_facts facts = facts_of(counters);
        json_object_set_new(counters, troubles[i][0], json_integer(77));
        json_t *verdicts = kvt_stat_verdicts(&facts);
        if (warnings(verdicts) != 1 || count(verdicts, troubles[i][1], "warn", "77 ") != 1 ||
            count(verdicts, troubles[i][1], "warn", troubles[i][2]) != 1)
            fail_msg("%s: %s", troubles[i][0], json_dumps(verdicts, 0));
        if (!strcmp(troubles[i][1], "safe"))
            assert_int_equal(count(verdicts, "safe", "ok", "no record failed"), 0);
        if (!kvt_stat_help(troubles[i][0]))
            fail_msg("%s is no counter of the library", troubles[i][0]);
        json_decref(verdicts);
        json_decref(counters);
    }
    assert_null(kvt_stat_help("no.such.counter"));
}

static void test_odd_states(void **state)
{
    json_t *counters = healthy();
    struct kvt_stat_facts facts = facts_of(NULL);
    json_t *verdicts = kvt_stat_verdicts(&facts); /* no numbers at all */

    (void)state;
    assert_int_equal(count(verdicts, "paying", "note", "nothing can be said"), 1);
    assert_int_equal(count(verdicts, "safe", "ok", ""), 0); /* silence is no proof */
    json_decref(verdicts);
    facts = facts_of(counters);
    json_object_set_new(counters, "disk.unsaved_blocks", json_integer(9));
    verdicts = kvt_stat_verdicts(&facts);
    assert_int_equal(count(verdicts, "safe", "note", "9 blocks are in DRAM only"), 1);
    json_decref(verdicts);
    facts.owner_pid = 0;
    facts.unreachable = 5;
    facts.recovered_bad = 2;
    json_object_set_new(counters, "disk.direct", json_integer(0));
    json_object_set_new(counters, "store.escalated", json_integer(600));
    json_object_set_new(counters, "lookup.hits_dram", json_integer(0));
    json_object_set_new(counters, "lookup.hits_disk", json_integer(0));
    json_object_set_new(counters, "load.granted_dram", json_integer(0));
    json_object_set_new(counters, "load.granted_disk", json_integer(0));
    verdicts = kvt_stat_verdicts(&facts);
    assert_int_equal(count(verdicts, "working", "note", "no process owns it"), 1);
    assert_int_equal(count(verdicts, "working", "note", "page cache"), 1);
    assert_int_equal(count(verdicts, "paying", "note", "none of 1000 keys"), 1);
    assert_int_equal(count(verdicts, "paying", "warn", "600 of 1000 stored blocks were refused"),
                     1);
    assert_int_equal(count(verdicts, "safe", "note", "5 records cannot be reached"), 1);
    assert_int_equal(count(verdicts, "safe", "", "blocks are in DRAM only"),
                     0); /* nobody is there */
    assert_int_equal(count(verdicts, "safe", "note", "2 segments, batches or entries"), 1);
    json_decref(verdicts);
    json_object_set_new(counters, "lookup.keys", json_integer(0));
    verdicts = kvt_stat_verdicts(&facts);
    assert_int_equal(count(verdicts, "paying", "note", "no key has been looked up"), 1);
    json_decref(verdicts);
    json_decref(counters);
}

/* From a real cache: the client half's numbers are in the file, and the tokens are right. */
static void test_live(void **state)
{
    static struct small_store store;
    char text[128];

    (void)state;
    small_store_init(&store);
    small_store_open(&store);
    small_store_put(&store, 0, 50, 0);
    assert_int_equal(small_store_get(&store, 0, 50), 50);
    small_store_wait_stats(&store, "load.granted_dram 50\n");
    assert_int_equal(kvt_lookup(store.ns[0], store.keys[0], 50, NULL, NULL), 50);
    small_store_wait_stats(&store, "lookup.keys 50\n");
    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", "stat", store.dir, NULL}, NULL, NULL);
    assert_int_equal(run.code, 0);
    snprintf(text, sizeof(text), "by process %d, which owns the directory", (int)getpid());
    assert_non_null(strstr(run.out, text));
    assert_non_null(strstr(run.out, "blocks of 16 tokens"));
    assert_non_null(strstr(run.out, "50 blocks (800 tokens) were loaded"));
    assert_non_null(strstr(run.out, "50 of 50 keys looked up were there"));
    assert_non_null(strstr(run.out, "of the engine's cache were stored as"));
    assert_non_null(strstr(run.out, "blocks encoded and committed")); /* what a number counts */
    assert_null(strstr(run.out, "index.collision"));
    assert_non_null(strstr(run.out, "that are zero: --all"));
    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", "stat", store.dir, "--all", NULL},
             NULL, NULL);
    assert_non_null(strstr(run.out, "index.collision"));

    small_store_close(&store); /* the last numbers are written at close */
    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", "stat", store.dir, NULL}, NULL, NULL);
    snprintf(text, sizeof(text), "by process %d, which no longer owns it", (int)getpid());
    assert_non_null(strstr(run.out, text));
    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", "stat", store.dir, "--json", NULL},
             NULL, NULL);
    json_t *report = json_loads(run.out, 0, NULL);
    assert_non_null(report);
    const json_t *counters = json_object_get(report, "counters");
    assert_int_equal(json_integer_value(json_object_get(counters, "client.load_blocks")), 50);
    assert_int_equal(json_integer_value(json_object_get(counters, "client.store_blocks")), 50);
    assert_int_equal(json_integer_value(json_object_get(counters, "writer.pid")), getpid());
    assert_string_equal(json_string_value(json_object_get(counters, "codec.level")), "kv4");
    assert_int_equal(
        count(json_object_get(report, "verdicts"), "working", "note", "no process owns it now"), 1);
    json_decref(report);
    small_store_done(&store);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hits_alone_pay_nothing),
        cmocka_unit_test(test_a_quota_is_named),
        cmocka_unit_test(test_a_long_window_is_told),
        cmocka_unit_test(test_a_daemon_is_told),
        cmocka_unit_test(test_healthy),
        cmocka_unit_test(test_a_shared_tier),
        cmocka_unit_test(test_each_trouble),
        cmocka_unit_test(test_odd_states),
        cmocka_unit_test(test_live),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
