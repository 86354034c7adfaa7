/* Servers that will not, and servers that lie.
 *
 * Goal:   what a server says that it cannot do, or does not let this user do, is an error of those
 *         requests alone, told once with its words and nothing in them that a log could trip over;
 *         an answer of a wrong kind is never a record; a purge of one that says nothing is over
 *         soon, and one that stops in its middle says that it did; all of it is used again as soon
 *         as the server does.
 * Method: a server of the test's own (support/fake_redis.h) that answers as a table says; a real
 *         redis-server as a replica of nobody, and with rights taken away (skipped without one).
 */
#include "support/rig.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "kvtier/error.h"
#include "remote/remote_seal.h"
#include "support/fake_redis.h"
#include "support/redis_rig.h"
#include "support/remote_help.h"

#define PAGES 2u
#define NS 0x4D

static struct fake_redis *fake;
static struct redis_rig redis;
static struct remote_help help;
static char url[96];

static struct log_lines {
    _Atomic unsigned count; /* "remote: HOST answers: ..." */
    _Atomic unsigned lost;  /* ... says what no Redis does: a connection is given up */
    char last[512];         /* written before count */
} lines;

static void take_line(void *arg, int level, const char *message)
{
    (void)arg;
    (void)level;
    lines.lost += strstr(message, "says what no Redis does") != NULL;
    if (!strstr(message, " answers: "))
        return;
    snprintf(lines.last, sizeof(lines.last), "%s", message);
    lines.count++;
}

static int begin(void **state)
{
    (void)state;
    memset(&lines, 0, sizeof(lines));
    remote_help_log = (struct kvt_log){.fn = take_line, .level_max = KVT_LOG_WARN};
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    remote_help_log = (struct kvt_log){0};
    remote_help_close(&help);
    if (fake)
        fake_redis_stop(fake);
    fake = NULL;
    redis_rig_stop(&redis);
    return 0;
}

/* ---- a server of the test's own -------------------------------------------------------------- */

static struct script {
    const char *get, *getrange, *exists, *set, *unlink, *scan; /* NULL: as one that has nothing */
    _Atomic bool silent;                                       /* from the next command on */
    _Atomic unsigned scans_until; /* silent after so many pages of names; 0: never */
    _Atomic unsigned scans;
} script;

static void answer(void *ctx, unsigned at, const char *words, char *out, size_t len)
{
    static const struct {
        const char *word;
        size_t offset;
        const char *otherwise;
    } cases[] = {{"GETRANGE ", offsetof(struct script, getrange), "$0\r\n\r\n"},
                 {"GET ", offsetof(struct script, get), "$-1\r\n"},
                 {"EXISTS ", offsetof(struct script, exists), ":0\r\n"},
                 {"SET ", offsetof(struct script, set), "+OK\r\n"},
                 {"UNLINK ", offsetof(struct script, unlink), ":1\r\n"},
                 {"SCAN ", offsetof(struct script, scan), "*2\r\n$1\r\n0\r\n*0\r\n"},
                 {"PING", sizeof(struct script), "+PONG\r\n"}};

    (void)ctx;
    (void)at;
    snprintf(out, len, "-ERR unknown command\r\n");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char *says = NULL;

        if (strncmp(words, cases[i].word, strlen(cases[i].word)) != 0)
            continue;
        if (cases[i].offset < sizeof(struct script))
            memcpy(&says, (const char *)&script + cases[i].offset, sizeof(says));
        snprintf(out, len, "%s", says ? says : cases[i].otherwise);
        break;
    }
    if (strncmp(words, "SCAN ", 5) == 0 && script.scans_until &&
        ++script.scans >= script.scans_until)
        script.silent = true;
    if (script.silent)
        out[0] = '\0';
}

/* The table is read by the server's thread: it is set before there is one. */
static void serve(const struct script *now)
{
    remote_help_close(&help);
    if (fake)
        fake_redis_stop(fake);
    script.get = now->get;
    script.getrange = now->getrange;
    script.exists = now->exists;
    script.set = now->set;
    script.unlink = now->unlink;
    script.scan = now->scan;
    script.silent = now->silent;
    script.scans_until = now->scans_until;
    script.scans = 0;
    fake = fake_redis_start(1, answer, NULL);
    snprintf(url, sizeof(url), "redis://127.0.0.1:%d", fake_redis_port(fake, 0));
    remote_help_open(&help, url, NULL, NULL, NULL);
}

/* One error for everything: the status of each request, and what is told of it. */
static void test_errors_of_all_kinds(void **state)
{
    static const struct {
        const char *says;
        int status;
        const char *told; /* NULL: it has an answer of its own, or counters */
    } cases[] = {
        {"-NOPERM this user has no permissions\r\n", -EACCES, "docs/remote.md"},
        {"-READONLY You can't write against a read only replica.\r\n", -EIO, "READONLY You can't"},
        {"-MISCONF Redis is configured to save RDB snapshots\r\n", -EIO, "MISCONF Redis"},
        {"-OOM command not allowed\r\n", KVT_E_NO_SPACE, "OOM command"},
        {"-BUSY Redis is busy running a script\r\n", -EIO, "BUSY Redis"},
        {"-ERR max number of clients reached\r\n", -EIO, "max number"},
        {"-ERR a\x1b[2Jb\x7f\xff\r\n", -EIO, "ERR a?[2Jb??"},
        {"-\r\n", -EIO, " answers:  ("},
        {"-LOADING Redis is loading the dataset in memory\r\n", -EHOSTDOWN, NULL},
        {"-MASTERDOWN Link with MASTER is down\r\n", -EHOSTDOWN, NULL},
        {"-CLUSTERDOWN The cluster is down\r\n", -EHOSTDOWN, NULL},
        {"-NOAUTH Authentication required.\r\n", -EHOSTDOWN, NULL},
        {"-WRONGTYPE Operation against a key\r\n", KVT_E_CORRUPT, NULL},
    };
    uint64_t removed;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char *e = cases[i].says;

        memset(&lines, 0, sizeof(lines));
        serve(&(struct script){.get = e, .getrange = e, .set = e, .unlink = e, .scan = e});
        assert_int_equal(remote_help_found(&help, NS, 1), cases[i].status);
        assert_int_equal(remote_help_get(&help, NS, 1, PAGES), cases[i].status);
        assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), cases[i].status);
        assert_int_equal(remote_help_put(&help, NS, 1, PAGES, true), cases[i].status);
        assert_int_equal(remote_help_drop(&help, NS, 1, 1, &removed), cases[i].status);
        assert_int_equal(removed, 0);
        assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), cases[i].status);
        assert_int_equal(removed, 0);
        assert_int_equal(lines.count, cases[i].told != NULL);
        if (cases[i].told && !strstr(lines.last, cases[i].told))
            fail_msg("\"%s\" is not in \"%s\"", cases[i].told, lines.last);
        for (const char *at = lines.last; *at; at++)
            assert_true(*at >= ' ' && *at <= '~');
    }
}

/* Answers of a kind that the command does not have: no record, nothing stored, nothing removed. */
static void test_answers_of_a_wrong_kind(void **state)
{
    static const char *const wrong[] = {
        "+OK\r\n",
        ":1\r\n",
        ":-9223372036854775808\r\n",
        "$3\r\nabc\r\n",
        "*0\r\n",
        "*1\r\n$3\r\nabc\r\n",
        "*-1\r\n",
        "$99999999999\r\n",
        "$-7\r\n",
        "*99999999\r\n",
        "%1\r\n+a\r\n+b\r\n",
        "_\r\n",
        "HTTP/1.1 400 Bad Request\r\n\r\n",
        "\r\n",
        "-ERR\nforged\r\n",
        ":12x\r\n",
        "$128\r\nshort\r\n",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        const char *w = wrong[i];
        uint64_t removed;

        serve(&(struct script){.get = w, .getrange = w});
        help.deadline_ns = 250000000;
        assert_int_not_equal(remote_help_found(&help, NS, 1), 0);
        assert_int_not_equal(remote_help_get(&help, NS, 1, PAGES), 0);
        serve(&(struct script){.exists = w, .unlink = w, .scan = w});
        help.deadline_ns = 250000000;
        if (w[0] != ':') /* a number is a number */
            assert_int_not_equal(remote_help_put(&help, NS, 1, PAGES, false), 0);
        if (w[0] != ':')
            assert_int_not_equal(remote_help_drop(&help, NS, 1, 1, &removed), 0);
        assert_int_not_equal(remote_help_drop(&help, NS, 0, 0, &removed), 0);
    }
}

/* Nonsense again and again, with sense between: told once, though it is lost each time. */
static void test_one_that_comes_and_goes(void **state)
{
    (void)state;
    serve(&(struct script){.get = "HTTP/1.1 400 Bad Request\r\n\r\n"});
    for (int i = 0; i < 8; i++) {
        int status = remote_help_get(&help, NS, 1, PAGES);

        assert_int_not_equal(status, 0);
        for (int k = 0; k < 600 && remote_help_found(&help, NS, 1) != KVT_E_MISS; k++)
            rig_sleep_ms(10);
        assert_int_equal(remote_help_found(&help, NS, 1), KVT_E_MISS);
    }
    assert_int_equal(lines.lost, 1);
}

/* ---- purges of one that says nothing ----------------------------------------------------------
 */

/* It takes connections and says nothing: over long before the request's own end. */
static void test_a_purge_of_one_that_says_nothing(void **state)
{
    (void)state;
    serve(&(struct script){.silent = true});
    help.deadline_ns = INT64_C(100000000000);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, NULL), -EHOSTDOWN);
    assert_int_not_equal(remote_help_drop(&help, NS, 1, 1, NULL), 0);
}

/* It stops in the middle: what is gone is told, and that it is not all. Its cursors are names, as
 * Kvrocks may have them. */
static void test_a_purge_that_is_cut_off(void **state)
{
    struct kvt_full_key key = remote_help_key(NS, 1);
    char name[KVT_REMOTE_NAME_BYTES], page[400];
    size_t len = kvt_remote_name(&key, name);
    uint64_t removed;
    int status;

    (void)state;
    snprintf(page, sizeof(page), "*2\r\n$%zu\r\n_%s\r\n*1\r\n$%zu\r\n%s\r\n", len + 1, name, len,
             name);
    serve(&(struct script){.scan = page, .scans_until = 3});
    help.deadline_ns = INT64_C(100000000000);
    status = remote_help_drop(&help, NS, 0, 0, &removed);
    assert_true(status == KVT_E_DEADLINE || status == -EHOSTDOWN);
    assert_int_equal(removed, 2);
    script.silent = false; /* it is back, and so are we */
    script.scans_until = 0;
    for (int i = 0; i < 600 && remote_help_put(&help, NS, 1, PAGES, true) != 0; i++)
        rig_sleep_ms(50);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, true), 0);
}

/* ---- a real one ------------------------------------------------------------------------------ */

static void tell(const char *words)
{
    char out[256];

    redis_rig_cli(&redis, 0, words, out, sizeof(out));
    assert_string_equal(out, "OK");
}

/* A replica: it is read from, and takes nothing; one that may not answer with old data is down. It
 * is made a master, and nobody has to be told. */
static void test_a_replica_that_is_written_to(void **state)
{
    uint64_t removed;

    (void)state;
    if (!redis_rig_able())
        return;
    redis_rig_start(&redis, "");
    redis_rig_url(&redis, url, sizeof(url));
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, 8, PAGES, NULL), 8);
    tell("REPLICAOF 127.0.0.1 1"); /* nobody is there */
    assert_int_equal(remote_help_get_many(&help, NS, 1, 8, PAGES, NULL), 8);
    assert_int_equal(remote_help_put(&help, NS, 9, PAGES, false), -EIO);
    assert_int_equal(remote_help_drop(&help, NS, 1, 2, NULL), -EIO);
    assert_int_not_equal(remote_help_drop(&help, NS, 0, 0, &removed), 0);
    assert_int_equal(removed, 0);
    assert_int_equal(lines.count, 1);
    assert_non_null(strstr(lines.last, "READONLY"));
    tell("CONFIG SET replica-serve-stale-data no");
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), -EHOSTDOWN);
    tell("REPLICAOF NO ONE");
    assert_int_equal(remote_help_get_many(&help, NS, 1, 8, PAGES, NULL), 8);
    assert_int_equal(remote_help_put(&help, NS, 9, PAGES, false), 0);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), 0);
    assert_int_equal(removed, 9);
}

/* Rights that are taken away in mid-run: what needs them fails and says so, the rest works. */
static void test_rights_taken_away(void **state)
{
    uint64_t removed;

    (void)state;
    if (!redis_rig_able())
        return;
    redis_rig_start(&redis, "");
    redis_rig_url(&redis, url, sizeof(url));
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, 8, PAGES, NULL), 8);
    tell("ACL SETUSER default -scan");
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, NULL), -EACCES);
    assert_int_equal(lines.count, 1);
    assert_non_null(strstr(lines.last, "docs/remote.md"));
    assert_int_equal(remote_help_drop(&help, NS, 1, 1, &removed), 0); /* keys have names */
    assert_int_equal(removed, 1);
    tell("ACL SETUSER default +scan -unlink");
    assert_int_equal(remote_help_drop(&help, NS, 2, 1, NULL), -EACCES);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), -EACCES);
    assert_int_equal(removed, 0);
    assert_int_equal(remote_help_get_many(&help, NS, 2, 7, PAGES, NULL), 7);
    tell("ACL SETUSER default +unlink -getrange -get");
    assert_int_equal(remote_help_found(&help, NS, 2), -EACCES);
    assert_int_equal(remote_help_get(&help, NS, 2, PAGES), -EACCES);
    assert_int_equal(remote_help_put(&help, NS, 9, PAGES, false), 0);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), 0);
    assert_int_equal(removed, 8);
}

#define EACH(name) cmocka_unit_test_setup_teardown(name, begin, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        EACH(test_errors_of_all_kinds),     EACH(test_answers_of_a_wrong_kind),
        EACH(test_one_that_comes_and_goes), EACH(test_a_purge_of_one_that_says_nothing),
        EACH(test_a_purge_that_is_cut_off), EACH(test_a_replica_that_is_written_to),
        EACH(test_rights_taken_away),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
