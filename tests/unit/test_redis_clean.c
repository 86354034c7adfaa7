/* A size for each namespace on a server.
 *
 * Goal:   a namespace that takes more than its cap loses what was not used for longest, down to a
 *         bit below it, and others lose nothing; one client of all cleans; to look at records is no
 *         use of them; where the server does not tell ages or sizes it is done without; what is
 *         none of ours stays.
 * Method: a real redis-server (skipped without one); for servers that know less one of the test's
 *         own (support/fake_redis.h). What is there is asked for in a way that is no use either.
 */
#include "support/rig.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "kvtier/error.h"
#include "remote/redis_clean.h"
#include "remote/remote_seal.h"
#include "support/fake_redis.h"
#include "support/redis_rig.h"
#include "support/remote_help.h"

#define PAGES 8u
#define NS 0x5C
#define KEYS 40u
#define PERIOD_NS INT64_C(50000000)
#define ROOM UINT64_C(41200) /* of a record on a server: 40 KiB for 32, and its names */

static struct redis_rig redis;
static struct fake_redis *fake;
static struct remote_help help, other;
static char url[96];
static _Atomic unsigned told;

static void take_line(void *arg, int level, const char *message)
{
    (void)arg;
    (void)level;
    told += strncmp(message, "remote_ns_cap: ", 15) == 0;
}

static int tear_down(void **state)
{
    (void)state;
    remote_help_close(&help);
    remote_help_close(&other);
    if (fake)
        fake_redis_stop(fake);
    fake = NULL;
    redis_rig_stop(&redis);
    told = 0;
    return 0;
}

static bool begin(void)
{
    if (!redis_rig_able())
        return false;
    redis_rig_start(&redis, "");
    redis_rig_url(&redis, url, sizeof(url));
    return true;
}

static void open_cap(struct remote_help *one, uint64_t cap_bytes)
{
    char error[512] = "";

    memset(one, 0, sizeof(*one));
    one->deadline_ns = REMOTE_HELP_DEADLINE_NS;
    one->params = (struct kvt_remote_params){.where = url,
                                             .ns_cap_bytes = cap_bytes,
                                             .clean_period_ns = PERIOD_NS,
                                             .log = {.fn = take_line, .level_max = KVT_LOG_WARN}};
    if (kvt_remote_tier_open(&one->params, &one->remote, error, sizeof(error)) != 0)
        fail_msg("%s", error);
}

/* EXISTS is no use of a key. Eight at a time. */
static uint32_t there(uint8_t ns, uint64_t first, uint32_t count)
{
    uint32_t found = 0;

    for (uint32_t i = 0; i < count; i += 8) {
        char words[8 * KVT_REMOTE_NAME_BYTES + 16] = "EXISTS";
        long number;

        for (uint32_t k = i; k < i + 8 && k < count; k++) {
            struct kvt_full_key key = remote_help_key(ns, first + k);
            size_t at = strlen(words);

            words[at++] = ' ';
            (void)kvt_remote_name(&key, words + at);
        }
        number = redis_rig_number(&redis, 0, words);
        assert_true(number >= 0);
        found += (uint32_t)number;
    }
    return found;
}

static void wait_for(long keys)
{
    for (int i = 0; i < 1200 && redis_rig_number(&redis, 0, "DBSIZE") > keys; i++)
        rig_sleep_ms(50);
    assert_true(redis_rig_number(&redis, 0, "DBSIZE") <= keys);
}

static void test_ages(void **state)
{
    uint32_t last = 0;

    (void)state;
    assert_int_equal(redis_clean_age(-1), 0);
    for (int64_t idle = 0; idle < 5000000; idle += idle / 50 + 1) {
        uint32_t age = redis_clean_age(idle);

        assert_true(age >= last && age <= last + 1 && age < REDIS_CLEAN_AGES);
        last = age;
    }
    assert_int_equal(redis_clean_age(3), 3);
    assert_int_equal(redis_clean_age(4), 4);
    assert_int_equal(redis_clean_age(7), 7);
    assert_int_equal(redis_clean_age(8), 8);
    assert_int_equal(redis_clean_age(9), 8);
    assert_int_equal(redis_clean_age(INT64_MAX), REDIS_CLEAN_AGES - 1);
}

static void test_names(void **state)
{
    struct kvt_full_key key = remote_help_key(NS, 1);
    char name[KVT_REMOTE_NAME_BYTES], bad[KVT_REMOTE_NAME_BYTES];
    uint32_t len = (uint32_t)kvt_remote_name(&key, name);

    (void)state;
    assert_true(redis_clean_is_record(name, len));
    for (uint32_t cut = 0; cut < len; cut++) { /* each beginning but those of the last number */
        bool digits = strspn(name + cut, "0123456789") == len - cut && name[cut - 1] != ':';

        if (redis_clean_is_record(name, cut) != digits)
            fail_msg("\"%.*s\"", (int)cut, name);
    }
    for (uint32_t at = 0; at < len; at++) {
        memcpy(bad, name, sizeof(bad));
        bad[at] = 'x';
        assert_false(redis_clean_is_record(bad, len));
    }
    assert_false(redis_clean_is_record(REDIS_CLEAN_LEASE, sizeof(REDIS_CLEAN_LEASE) - 1));
}

/* One namespace is too large, another one is not, and something else is none of ours. */
static void test_a_cap_for_each_namespace(void **state)
{
    char out[64];

    (void)state;
    if (!begin())
        skip();
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    assert_int_equal(remote_help_put_many(&help, NS + 1, 1, 18, PAGES, NULL), 18);
    redis_rig_cli(&redis, 0, "SET kvt0:mine hands-off", out, sizeof(out));
    redis_rig_cli(&redis, 0, "SET mine hands-off", out, sizeof(out));
    rig_sleep_ms(2100); /* the server counts seconds */
    assert_int_equal(remote_help_get_many(&help, NS, 1, 8, PAGES, NULL), 8);
    open_cap(&other, 20 * ROOM);
    wait_for(20 + 18 + 2 + 1); /* and the lease */
    rig_sleep_ms(300);         /* nothing more goes */
    assert_true(there(NS, 1, KEYS) >= 16 && there(NS, 1, KEYS) <= 20);
    assert_int_equal(there(NS, 1, 8), 8); /* what was used stays */
    assert_int_equal(there(NS + 1, 1, 18), 18);
    assert_int_equal(redis_rig_number(&redis, 0, "EXISTS mine kvt0:mine"), 2);
    assert_int_equal(told, 0);
    assert_int_equal(remote_help_get_many(&help, NS, 1, 8, PAGES, NULL), 8);
}

/* Whoever does not have the lease removes nothing; who leaves loses it, and the next one takes it.
 */
static void test_one_cleans(void **state)
{
    char out[128];

    (void)state;
    if (!begin())
        skip();
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    redis_rig_cli(&redis, 0, "SET kvt0:cleaner somebody PX 100000", out, sizeof(out));
    open_cap(&other, 20 * ROOM);
    rig_sleep_ms(500); /* ten periods */
    assert_int_equal(there(NS, 1, KEYS), KEYS);
    redis_rig_cli(&redis, 0, "DEL kvt0:cleaner", out, sizeof(out));
    wait_for(21);
    rig_sleep_ms(700); /* it is renewed: twice as long as it lasts */
    redis_rig_cli(&redis, 0, "GET kvt0:cleaner", out, sizeof(out));
    for (int i = 0; i < 120 && strlen(out) <= 4; i++) { /* but on a machine that stood still */
        rig_sleep_ms(500);
        redis_rig_cli(&redis, 0, "GET kvt0:cleaner", out, sizeof(out));
    }
    assert_true(strlen(out) > 4 && strcmp(out, "somebody") != 0);
    remote_help_close(&other);
    open_cap(&other, 5 * ROOM);
    wait_for(6);
}

/* Least frequently used: the server knows no ages, and says so. What goes is left to chance. */
static void test_a_server_without_ages(void **state)
{
    char out[64];

    (void)state;
    if (!begin())
        skip();
    redis_rig_cli(&redis, 0, "CONFIG SET maxmemory-policy allkeys-lfu", out, sizeof(out));
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    open_cap(&other, 20 * ROOM);
    wait_for(21);
    rig_sleep_ms(300);
    assert_true(there(NS, 1, KEYS) >= 14);
    assert_int_equal(told, 1);
}

/* ---- servers that know less ------------------------------------------------------------------ */

static struct small { /* a server of a few names, all of one length */
    _Atomic bool gone[KEYS];
    char lease[128];
    _Atomic bool forbids; /* to be walked */
    _Atomic unsigned strlens, scans;
} small;

static void small_answer(void *ctx, unsigned at, const char *words, char *out, size_t len)
{
    char name[KVT_REMOTE_NAME_BYTES];
    size_t used;
    unsigned left = 0;

    (void)ctx;
    (void)at;
    snprintf(out, len, "-ERR unknown command\r\n");
    if (strncmp(words, "PING", 4) == 0)
        snprintf(out, len, "+PONG\r\n");
    if (strncmp(words, "SET kvt0:cleaner ", 17) == 0) {
        snprintf(small.lease, sizeof(small.lease), "%.*s", (int)strcspn(words + 17, " "),
                 words + 17);
        snprintf(out, len, "+OK\r\n");
    }
    if (strncmp(words, "GET kvt0:cleaner", 16) == 0)
        snprintf(out, len, "$%zu\r\n%s\r\n", strlen(small.lease), small.lease);
    if (strncmp(words, "STRLEN", 6) == 0) {
        small.strlens++;
        snprintf(out, len, ":%u\r\n", PAGES * KVT_PAGE_BYTES);
    }
    if (strncmp(words, "SCAN", 4) == 0 && small.forbids) {
        small.scans++;
        snprintf(out, len, "-NOPERM this user has no permissions to run 'scan'\r\n");
    } else if (strncmp(words, "SCAN", 4) == 0) {
        for (unsigned i = 0; i < KEYS; i++)
            left += !small.gone[i];
        used = (size_t)snprintf(out, len, "*2\r\n$1\r\n0\r\n*%u\r\n", left);
        for (unsigned i = 0; i < KEYS; i++) {
            struct kvt_full_key key = remote_help_key(NS, i + 1);
            size_t name_len = kvt_remote_name(&key, name);

            if (!small.gone[i])
                used += (size_t)snprintf(out + used, len - used, "$%zu\r\n%s\r\n", name_len, name);
        }
    }
    if (strncmp(words, "UNLINK", 6) == 0) {
        for (unsigned i = 0; i < KEYS; i++) {
            struct kvt_full_key key = remote_help_key(NS, i + 1);

            (void)kvt_remote_name(&key, name);
            if (strcmp(words + 7, name) == 0)
                small.gone[i] = true;
        }
        snprintf(out, len, ":1\r\n");
    }
}

static unsigned small_left(void)
{
    unsigned left = 0;

    for (unsigned i = 0; i < KEYS; i++)
        left += !small.gone[i];
    return left;
}

/* Neither OBJECT IDLETIME nor MEMORY USAGE: lengths and chance do. */
static void test_a_server_that_knows_neither(void **state)
{
    (void)state;
    memset(&small, 0, sizeof(small));
    fake = fake_redis_start(1, small_answer, NULL);
    snprintf(url, sizeof(url), "redis://127.0.0.1:%d", fake_redis_port(fake, 0));
    open_cap(&help, UINT64_C(20) * PAGES * KVT_PAGE_BYTES);
    for (int i = 0; i < 1200 && small_left() > 20; i++)
        rig_sleep_ms(50);
    rig_sleep_ms(300);
    assert_true(small_left() <= 20 && small_left() >= 15);
    assert_true(small.strlens >= KEYS);
    assert_int_equal(told, 1);
}

/* One that may not be walked: told once, and asked again now and then. */
static void test_a_server_that_forbids_it(void **state)
{
    (void)state;
    memset(&small, 0, sizeof(small));
    small.forbids = true;
    fake = fake_redis_start(1, small_answer, NULL);
    snprintf(url, sizeof(url), "redis://127.0.0.1:%d", fake_redis_port(fake, 0));
    open_cap(&help, UINT64_C(20) * PAGES * KVT_PAGE_BYTES);
    for (int i = 0; i < 1200 && small.scans < 3; i++)
        rig_sleep_ms(50);
    assert_true(small.scans >= 3);
    assert_int_equal(told, 1);
    assert_int_equal(small_left(), KEYS);
    small.forbids = false; /* the operator gives the right */
    for (int i = 0; i < 1200 && small_left() > 20; i++)
        rig_sleep_ms(50);
    assert_true(small_left() <= 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ages),
        cmocka_unit_test(test_names),
        cmocka_unit_test_teardown(test_a_cap_for_each_namespace, tear_down),
        cmocka_unit_test_teardown(test_one_cleans, tear_down),
        cmocka_unit_test_teardown(test_a_server_without_ages, tear_down),
        cmocka_unit_test_teardown(test_a_server_that_knows_neither, tear_down),
        cmocka_unit_test_teardown(test_a_server_that_forbids_it, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
