/* Commands that reach a tier that machines share.
 *
 * Goal:   doctor tries it and leaves nothing there; `kvtier purge --remote` removes there what it
 *         was told, after the directory's, and no more; without it, it says what stays; a tier that
 *         cannot be reached is a failure that names the reason and what is left to do.
 * Method: the built binary over a store and a shared directory that the library has filled, and
 *         over a real redis-server where there is one.
 */
#include "support/rig.h"

#include <ftw.h>
#include <jansson.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/redis_rig.h"
#include "support/run_tool.h"

#define BLOCKS 12u

static struct tool_run run;
static struct rig rig;
static char shared[128], url[160], ns[40];

#define TOOL(...) \
    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", __VA_ARGS__, NULL}, NULL, NULL)

static unsigned count;

static int count_one(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)at;
    count += kind == FTW_F && st->st_size > 0 && strstr(path, "/tmp/") == NULL;
    return 0;
}

/* Records below the shared directory; what is being written does not count. */
static unsigned records_there(void)
{
    char below[200];

    count = 0;
    snprintf(below, sizeof(below), "%s/kvt0", shared);
    assert_int_equal(chdir(below), 0);
    (void)nftw(".", count_one, 16, FTW_PHYS);
    return count;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st;
    (void)kind;
    (void)at;
    return remove(path);
}

static void fill(const char *where)
{
    const struct rig_shape shape = rig_shape_small(64);
    const uint8_t *id;
    char config[400];

    snprintf(config, sizeof(config), "dram=4MiB,remote=%s,remote_write=all", where);
    rig_init(&rig, &shape, config, "64MiB");
    rig_open(&rig);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(kvt_flush(rig.cache), 0);
    id = kvt_ns_id(rig.ns);
    for (unsigned i = 0; i < KVT_NS_BYTES; i++)
        snprintf(ns + 2 * i, 3, "%02x", id[i]);
    for (int i = 0; i < 600 && rig_stat(&rig, "remote.put") < BLOCKS; i++)
        rig_sleep_ms(50);
    assert_int_equal(rig_stat(&rig, "remote.put"), BLOCKS);
}

static int begin(void **state)
{
    (void)state;
    if (getenv("KVT_RIG_DAEMON"))
        return 0;
    rig_dir_make(shared, sizeof(shared));
    snprintf(url, sizeof(url), "dir:%s", shared);
    fill(url);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    if (getenv("KVT_RIG_DAEMON"))
        return 0;
    if (rig.cache)
        rig_close(&rig);
    rig_free(&rig);
    assert_int_equal(chdir("/"), 0);
    return nftw(shared, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static json_int_t number(const char *name)
{
    json_t *out = json_loads(run.out, 0, NULL);
    json_int_t value;

    if (run.code != 0 || out == NULL)
        fail_msg("exit %d: %s%s", run.code, run.out, run.err);
    value = json_integer_value(json_object_get(out, name));
    json_decref(out);
    return value;
}

static void test_what_stays_is_said(void **state)
{
    (void)state;
    if (getenv("KVT_RIG_DAEMON"))
        return;
    rig_close(&rig);
    TOOL("purge", rig.dir, "--all", "--yes");
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.err, "add --remote"));
    assert_int_equal(records_there(), BLOCKS);
    TOOL("purge", rig.dir, "--namespace", ns, "--remote", url, "--yes", "--json");
    assert_int_equal(number("remote_records"), BLOCKS); /* it is not here any more, but there */
    assert_int_equal(number("records"), 0);
    assert_int_equal(records_there(), 0);
    TOOL("purge", rig.dir, "--namespace", ns, "--remote", url, "--yes");
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "nothing was removed"));
}

static void test_both_at_once(void **state)
{
    char other[400];

    (void)state;
    if (getenv("KVT_RIG_DAEMON"))
        return;
    rig_close(&rig);
    /* somebody else's namespace, that the store does not hold */
    snprintf(other, sizeof(other), "%s/kvt0/%032d", shared, 7);
    assert_int_equal(mkdir(other, 0700), 0);
    snprintf(other, sizeof(other), "%s/kvt0/%032d/00", shared, 7);
    assert_int_equal(mkdir(other, 0700), 0);
    snprintf(other, sizeof(other), "%s/kvt0/%032d/00/00.0.0", shared, 7);
    FILE *file = fopen(other, "w");
    assert_non_null(file);
    fputs("record", file);
    fclose(file);
    TOOL("purge", rig.dir, "--all", "--remote", url, "--yes");
    assert_int_equal(run.code, 0);
    assert_string_equal(run.err, "");
    assert_non_null(strstr(run.out, url));
    assert_int_equal(records_there(), 1);
    rig_open(&rig);
    assert_int_equal(rig_lookup(&rig, 1, BLOCKS), 0);
}

/* The directory is somebody's: that is said with what to do, and there it can be purged anyway. */
static void test_while_it_runs(void **state)
{
    (void)state;
    if (getenv("KVT_RIG_DAEMON"))
        return;
    TOOL("purge", rig.dir, "--all", "--remote", url, "--yes");
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "owns this directory; stop it, or let it purge"));
    assert_int_equal(records_there(), BLOCKS);
    TOOL("purge", "--namespace", ns, "--remote", url, "--yes", "--json");
    assert_int_equal(number("remote_records"), BLOCKS);
    assert_int_equal(records_there(), 0);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS); /* it keeps its own */
}

static void test_what_cannot_be_reached(void **state)
{
    (void)state;
    if (getenv("KVT_RIG_DAEMON"))
        return;
    rig_close(&rig);
    TOOL("purge", rig.dir, "--all", "--remote", "redis://127.0.0.1:1", "--yes");
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "redis://127.0.0.1:1"));
    assert_non_null(strstr(run.err, "refused"));
    assert_non_null(strstr(run.err, "what the directory held is gone"));
    assert_non_null(strstr(run.err, ns)); /* which is not known from the directory any more */
    TOOL("purge", "--namespace", ns, "--remote", "dir:/nonexistent/kv", "--yes");
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "/nonexistent/kv"));
    TOOL("purge", "--namespace", ns, "--remote", url, "--yes", "--json");
    assert_int_equal(number("remote_records"), BLOCKS);
}

/* doctor --config remote=...: a record there and back, or why not. */
static int doctor(const char *config, const char *says)
{
    TOOL("doctor", "--config", config, "--json");
    if (!strstr(run.out, says))
        fail_msg("%s: \"%s\" is not in %s%s", config, says, run.out, run.err);
    return run.code;
}

static void test_doctor_tries_it(void **state)
{
    char config[400], file[200];

    (void)state;
    if (getenv("KVT_RIG_DAEMON"))
        return;
    rig_close(&rig);
    snprintf(config, sizeof(config), "remote=%s", url);
    assert_int_equal(doctor(config, "there in"), 0);
    assert_int_equal(records_there(), BLOCKS); /* nothing is left */
    snprintf(config, sizeof(config), "remote=%s,remote_write=off", url);
    assert_int_equal(doctor(config, "nothing was put"), 0);
    assert_int_equal(doctor("remote=redis://127.0.0.1:1", "Connection refused"), 1);
    assert_int_equal(doctor("remote=dir:/nonexistent/kv", "/nonexistent/kv"), 1);
    assert_int_equal(doctor("remote=redis://127.0.0.1:1,remote_auth=/dev/null", "device"), 1);
    assert_int_equal(doctor("dram=16MiB", "tries a tier that machines share"), 0);
    snprintf(config, sizeof(config), "remote=%s,remote_mac=%s/short", url, shared);
    snprintf(file, sizeof(file), "%s/short", shared);
    FILE *key = fopen(file, "w");
    assert_non_null(key);
    fclose(key);
    assert_int_equal(chmod(file, 0600), 0);
    assert_int_equal(doctor(config, "fewer than 32 bytes"), 1);
}

static void test_doctor_tries_a_server(void **state)
{
    static struct redis_rig redis;
    char where[128], config[200], out[64];

    (void)state;
    if (!redis_rig_able())
        return;
    redis_rig_start(&redis, "");
    redis_rig_url(&redis, where, sizeof(where));
    snprintf(config, sizeof(config), "remote=%s", where);
    assert_int_equal(doctor(config, "there in"), 0);
    json_t *report = json_loads(run.out, 0, NULL), *shared_check = NULL, *each;
    size_t at;
    json_array_foreach(json_object_get(report, "checks"), at, each)
    {
        if (strcmp(json_string_value(json_object_get(each, "name")), "shared") == 0)
            shared_check = each;
    }
    const char *server = json_string_value(json_object_get(shared_check, "server"));
    assert_non_null(server);
    assert_memory_equal(server, "Redis ", 6);
    assert_non_null(strstr(server, ", one server"));
    json_decref(report);
    assert_int_equal(redis_rig_number(&redis, 0, "DBSIZE"), 0);
    TOOL("doctor", "--config", config, "--offline");
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "not looked at: --offline"));
    redis_rig_cli(&redis, 0, "CONFIG SET maxmemory 1", out, sizeof(out));
    assert_int_equal(doctor(config, where), 1); /* it answers, and takes nothing */
    redis_rig_cli(&redis, 0, "CONFIG SET requirepass first", out, sizeof(out));
    assert_int_equal(doctor(config, "NOAUTH"), 1);
    redis_rig_stop(&redis);
}

static void test_doctor_tries_a_cluster(void **state)
{
    static struct redis_rig redis;
    char where[300], config[340];

    (void)state;
    if (!redis_rig_able())
        return;
    redis_rig_cluster(&redis, "");
    redis_rig_url(&redis, where, sizeof(where));
    snprintf(config, sizeof(config), "remote=%s,remote_write=off", where);
    assert_int_equal(doctor(config, ", a cluster of "), 0);
    redis_rig_stop(&redis);
}

static void test_usage(void **state)
{
    static const struct {
        const char *line[6], *says;
    } wrong[] = {
        {{"--all", "--yes"}, "give DIR, or --remote"},
        {{"--all", "--yes", "--remote", "redis://a"}, "needs DIR"},
        {{"--namespace", "00", "--yes", "--remote", "redis://a"}, "hexadecimal"},
        {{"--all", "--yes", "--remote", "http://a", "/tmp"}, "none of redis://"},
        {{"--all", "--yes", "/tmp", "--remote-auth", "/f"}, "without --remote"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        const char *argv[10] = {"kvtier", "purge"};

        memcpy(argv + 2, wrong[i].line, sizeof(wrong[i].line));
        tool_run(&run, KVT_TOOL, argv, NULL, NULL);
        if (run.code != 2 || !strstr(run.err, wrong[i].says))
            fail_msg("%zu: %d %s", i, run.code, run.err);
    }
}

static void test_a_server_with_a_password(void **state)
{
    static struct redis_rig redis;
    char where[128], auth[200];

    (void)state;
    if (getenv("KVT_RIG_DAEMON") || !redis_rig_able())
        return;
    redis_rig_start(&redis, "");
    redis_rig_url(&redis, where, sizeof(where));
    fill(where);
    rig_close(&rig);
    assert_int_equal(redis_rig_number(&redis, 0, "DBSIZE"), BLOCKS);
    redis_rig_cli(&redis, 0, "CONFIG SET requirepass first", auth, sizeof(auth));
    snprintf(redis.password, sizeof(redis.password), "first");
    snprintf(auth, sizeof(auth), "%s/auth", redis.dir);
    FILE *file = fopen(auth, "w");
    assert_non_null(file);
    fputs("first\n", file);
    fclose(file);
    assert_int_equal(chmod(auth, 0600), 0);
    TOOL("purge", "--namespace", ns, "--remote", where, "--yes");
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "NOAUTH"));
    TOOL("purge", rig.dir, "--all", "--remote", where, "--remote-auth", auth, "--yes", "--json");
    assert_int_equal(number("remote_records"), BLOCKS);
    assert_int_equal(number("records"), BLOCKS);
    assert_int_equal(redis_rig_number(&redis, 0, "DBSIZE"), 0);
    rig_free(&rig);
    redis_rig_stop(&redis);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_what_stays_is_said, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_both_at_once, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_while_it_runs, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_what_cannot_be_reached, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_doctor_tries_it, begin, tear_down),
        cmocka_unit_test(test_doctor_tries_a_server),
        cmocka_unit_test(test_doctor_tries_a_cluster),
        cmocka_unit_test(test_usage),
        cmocka_unit_test(test_a_server_with_a_password),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
