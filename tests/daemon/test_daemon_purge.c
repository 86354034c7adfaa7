/* A namespace of a running kvtierd is removed by whoever runs it.
 *
 * Goal:   by its digits or its model's name, or with all others, it goes from DRAM, disk and the
 * tier that machines share, for good, with counts; others stay; only root and the daemon's user
 * may; nobody waits meanwhile, also when the shared tier says nothing. Method: real daemons, the C
 * call and `kvtier purge`; a shared directory; a server that accepts and says nothing is a socket
 * of our own.
 */
#include "support/rig.h"

#include <netinet/in.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/link.h"
#include "support/daemon_rig.h"
#include "support/run_tool.h"

enum { BLOCKS = 24 };

static struct daemon server;
static struct rig one, two;
static struct tool_run run;

static int tear_down(void **state)
{
    (void)state;
    rig_close(&one);
    rig_close(&two);
    rig_free(&one);
    rig_free(&two);
    memset(&one, 0, sizeof(one));
    memset(&two, 0, sizeof(two));
    daemon_free(&server);
    return 0;
}

static void engine_open(struct rig *rig, const char *model)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);

    rig_init(rig, &shape, server.config, NULL);
    rig->identity.model = model;
    rig_open(rig);
}

/* Two models, with blocks of each. */
static void begin(const char *options)
{
    daemon_init(&server, options);
    daemon_start(&server);
    engine_open(&one, "one");
    engine_open(&two, "two");
    assert_int_equal(rig_store(&one, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(rig_store(&two, 1, BLOCKS, 0, NULL), BLOCKS);
}

/* The digits of a model's namespace, as `kvtier stat` shows them. */
static void digits(const char *model, char hex[2 * KVT_NS_BYTES + 1])
{
    char *answer = NULL, why[512], *rest, label[64];

    hex[0] = '\0';
    assert_int_equal(kvt_link_ask(server.socket, "stat", &answer, why, sizeof(why)), 0);
    for (char *line = strtok_r(answer, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char id[40];

        if (sscanf(line, "namespace.%39s %63s", id, label) == 2 && strcmp(label, model) == 0) {
            assert_int_equal(strlen(id), 2 * KVT_NS_BYTES);
            memcpy(hex, id, 2 * KVT_NS_BYTES + 1);
        }
    }
    free(answer);
    assert_int_equal(strlen(hex), 2 * KVT_NS_BYTES);
}

static void id_of(const char *model, uint8_t id[KVT_NS_BYTES])
{
    char hex[2 * KVT_NS_BYTES + 1];

    digits(model, hex);
    for (unsigned i = 0, byte; i < KVT_NS_BYTES; i++) {
        assert_int_equal(sscanf(hex + 2 * i, "%2x", &byte), 1);
        id[i] = (uint8_t)byte;
    }
}

static void a_namespace_goes_for_good(void **state)
{
    struct kvt_link_purged purged;
    uint8_t id[KVT_NS_BYTES], unknown[KVT_NS_BYTES] = {1};
    char why[600];

    (void)state;
    begin("--dram 16MiB --disk {store}:64MiB");
    assert_int_equal(kvt_flush(one.cache), 0);
    id_of("one", id);
    if (kvt_link_purge(server.socket, id, &purged, why, sizeof(why)) != 0)
        fail_msg("%s", why);
    assert_int_equal(purged.blocks, BLOCKS);
    assert_int_equal(purged.bytes, BLOCKS * 12288);
    assert_int_equal(purged.groups, 1);
    assert_int_equal(purged.remote_records, 0);
    assert_int_equal(rig_lookup(&one, 1, BLOCKS), 0);
    assert_int_equal(rig_load(&two, 1, BLOCKS, NULL), BLOCKS);
    assert_int_equal(daemon_stat(&server, "purge.blocks"), BLOCKS);
    assert_int_equal(kvt_link_purge(server.socket, unknown, &purged, why, sizeof(why)), 0);
    assert_int_equal(purged.groups, 0);
    assert_int_equal(purged.blocks, 0);
    assert_int_equal(rig_store(&one, 100, BLOCKS, 0, NULL), BLOCKS); /* it goes on */
    assert_true(daemon_said(&server, "asked for by process"));
    rig_close(&one);
    rig_close(&two);
    daemon_kill(&server);
    daemon_start(&server);
    rig_open(&one);
    rig_open(&two);
    assert_int_equal(rig_lookup(&one, 1, BLOCKS), 0);
    assert_int_equal(rig_load(&two, 1, BLOCKS, NULL), BLOCKS);
}

static void tool(const char *ns, const char *first, const char *more)
{
    char where[200];

    snprintf(where, sizeof(where), "unix:%s", server.socket);
    tool_run(&run, KVT_TOOL,
             (const char *const[]){"kvtier", "purge", where, first ? first : "--json",
                                   ns ? "--namespace" : more, ns ? ns : NULL, ns ? more : NULL,
                                   NULL},
             NULL, NULL);
}

static void the_command_purges_by_digits_and_by_name(void **state)
{
    char hex[2 * KVT_NS_BYTES + 1];

    (void)state;
    begin("--dram 16MiB");
    digits("one", hex);
    tool(hex, NULL, NULL); /* nobody can be asked */
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "add --yes to remove namespace "));
    tool(hex, "--all", "--yes");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "give either --namespace HEX"));
    tool(NULL, "--yes", "--json");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "or --all"));
    tool("three", "--yes", NULL);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "'three' is not 32 hexadecimal digits, nor"));
    tool("00112233445566778899aabbccddeeff", "--yes", NULL);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "no record of namespace 0011"));
    assert_int_equal(rig_lookup(&one, 1, BLOCKS), BLOCKS);
    tool(hex, "--yes", "--json");
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, hex));
    assert_non_null(strstr(run.out, "\"records\":"));
    assert_int_equal(rig_lookup(&one, 1, BLOCKS), 0);
    assert_int_equal(rig_lookup(&two, 1, BLOCKS), BLOCKS);
    tool("two", "--yes", NULL);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "removed 24 records, "));
    assert_int_equal(rig_lookup(&two, 1, BLOCKS), 0);
    assert_int_equal(daemon_stop(&server), 0);
    tool("two", "--yes", NULL);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "no kvtierd at "));
    assert_null(strstr(run.err, "store=process"));
}

/* Two tenants of one model: a name is not enough. */
static void a_name_that_two_namespaces_have_is_refused(void **state)
{
    (void)state;
    begin("--dram 16MiB");
    rig_close(&two);
    two.identity.model = "one";
    two.identity.salt = "a tenant's";
    two.identity.salt_len = 10;
    rig_open(&two);
    assert_int_equal(rig_store(&two, 1, BLOCKS, 0, NULL), BLOCKS);
    tool("one", "--yes", NULL);
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "2 namespaces are called 'one'"));
    assert_int_equal(rig_lookup(&two, 1, BLOCKS), BLOCKS);
    assert_int_equal(rig_lookup(&one, 1, BLOCKS), BLOCKS);
}

/* What was put into a shared directory goes, too, and is counted. */
static void the_shared_tier_is_purged_too(void **state)
{
    struct kvt_link_purged purged;
    uint8_t id[KVT_NS_BYTES];
    char shared[128], options[400], why[600];

    (void)state;
    rig_dir_make(shared, sizeof(shared));
    snprintf(options, sizeof(options), "--dram 16MiB --remote-write all --remote dir:%s", shared);
    begin(options);
    daemon_wait_stat(&server, "remote.put", 2 * BLOCKS, 60000);
    id_of("one", id);
    if (kvt_link_purge(server.socket, id, &purged, why, sizeof(why)) != 0)
        fail_msg("%s", why);
    assert_int_equal(purged.blocks, BLOCKS);
    assert_int_equal(purged.remote_records, BLOCKS);
    assert_int_equal(rig_lookup(&one, 1, BLOCKS), 0);
    assert_int_equal(rig_load(&two, 1, BLOCKS, NULL), BLOCKS);
    id_of("two", id);
    rig_close(&one);
    rig_close(&two);
    assert_int_equal(daemon_stop(&server), 0);
    daemon_start(&server); /* knows nothing of it: only the directory does */
    if (kvt_link_purge(server.socket, id, &purged, why, sizeof(why)) != 0)
        fail_msg("%s", why);
    assert_int_equal(purged.groups, 0);
    assert_int_equal(purged.remote_records, BLOCKS);
    assert_int_equal(daemon_stop(&server), 0);
    rig_dir_remove(shared);
}

/* A third model that only the disk knows of, and what other machines see. */
static void all_of_them_go_at_once(void **state)
{
    char shared[128], options[400];

    (void)state;
    rig_dir_make(shared, sizeof(shared));
    snprintf(options, sizeof(options),
             "--dram 16MiB --disk {store}:64MiB --remote-write all --remote dir:%s", shared);
    begin(options);
    rig_close(&two);
    rig_free(&two);
    engine_open(&two, "three");
    assert_int_equal(rig_store(&two, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(kvt_flush(two.cache), 0);
    rig_close(&one);
    rig_close(&two);
    daemon_wait_stat(&server, "remote.put", 3 * BLOCKS, 60000);
    assert_int_equal(daemon_stop(&server), 0);
    daemon_start(&server); /* two of the three are not opened again */
    rig_open(&one);
    assert_int_equal(rig_load(&one, 1, BLOCKS, NULL), BLOCKS);
    tool(NULL, "--all", NULL); /* nobody can be asked */
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "add --yes to remove every namespace (3 of them now) from "));
    assert_int_equal(rig_load(&one, 1, BLOCKS, NULL), BLOCKS);
    tool(NULL, "--all", "--yes");
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "removed 3 namespaces, 72 records, "));
    assert_non_null(strstr(run.out, "and 72 records of the tier that it shares"));
    assert_int_equal(daemon_stat(&server, "index.blocks"), 0);
    assert_int_equal(rig_lookup(&one, 1, BLOCKS), 0);
    assert_int_equal(rig_store(&one, 100, BLOCKS, 0, NULL), BLOCKS); /* it goes on */
    tool(NULL, "--all", "--yes");
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "removed 1 namespaces, 24 records, "));
    tool(NULL, "--all", "--yes"); /* nothing is there: nothing was meant but that */
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "removed 0 namespaces, 0 records, "));
    rig_close(&one);
    daemon_kill(&server);
    daemon_start(&server);
    assert_int_equal(daemon_stat(&server, "index.blocks"), 0);
    assert_int_equal(daemon_stop(&server), 0);
    rig_dir_remove(shared);
}

/* A server that takes connections, and that is all. */
static int mute_server(char *url, size_t len)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t at_len = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof(at)), 0);
    assert_int_equal(listen(fd, 64), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&at, &at_len), 0);
    snprintf(url, len, "redis://127.0.0.1:%u", ntohs(at.sin_port));
    return fd;
}

/* What cannot be purged is named, with how far it came. */
static void all_of_them_where_the_shared_tier_says_nothing(void **state)
{
    char options[256], url[64];

    (void)state;
    int fd = mute_server(url, sizeof(url));
    snprintf(options, sizeof(options), "--dram 16MiB --remote %s", url);
    begin(options);
    close(fd); /* refused from now on */
    tool(NULL, "--all", "--yes");
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "(0 of 2 namespaces are gone"));
    assert_non_null(strstr(run.err, "repeat it"));
}

/* Others may look, by allow_uid, and not remove. */
static void other_users_may_not_purge(void **state)
{
    struct kvt_link_purged purged;
    uint8_t id[KVT_NS_BYTES];
    char why[600];
    int status;

    (void)state;
    if (geteuid() != 0) {
        print_message("not root: other users cannot be played\n");
        skip();
    }
    begin("--dram 16MiB --socket-mode 0666 --allow-uid 65534");
    assert_int_equal(chmod(server.dir, 0755), 0);
    id_of("one", id);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        char *text = NULL;
        int bad = setgid(65534) != 0 || setuid(65534) != 0;

        bad = bad || kvt_link_ask(server.socket, "stat", &text, why, sizeof(why)) != 0;
        bad = bad || kvt_link_purge(server.socket, id, &purged, why, sizeof(why)) == 0;
        _exit(bad || strstr(why, "only root and the user of the kvtierd (0) may purge") == NULL);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_int_equal(rig_lookup(&one, 1, BLOCKS), BLOCKS);
}

/* ---- a shared tier that says nothing --------------------------------------------------------- */

static uint8_t purge_id[KVT_NS_BYTES];
static struct kvt_link_purged purge_out;
static char purge_why[600];
static int purge_rc;

static void *purge_main(void *arg)
{
    purge_rc = kvt_link_purge(arg, purge_id, &purge_out, purge_why, sizeof(purge_why));
    return NULL;
}

/* Numbers are told, blocks are stored and loaded, and the daemon ends when it is told to; who waits
 * for the purge learns how it ended. */
static void nobody_waits_for_a_purge(void **state)
{
    char options[256], url[64];
    pthread_t thread;

    (void)state;
    int fd = mute_server(url, sizeof(url));
    snprintf(options, sizeof(options), "--dram 16MiB --remote %s", url);
    begin(options);
    id_of("one", purge_id);
    assert_int_equal(pthread_create(&thread, NULL, purge_main, server.socket), 0);
    daemon_wait_stat(&server, "purge.blocks", BLOCKS, 20000); /* gone here; not there */
    for (int i = 0; i < 20; i++) {
        assert_int_equal(daemon_stat(&server, "daemon.clients"), 2);
        assert_int_equal(rig_load(&two, 1, BLOCKS, NULL), BLOCKS);
    }
    rig_close(&one);
    rig_close(&two);
    assert_int_equal(daemon_stop(&server), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    print_message("           %d: %s\n", purge_rc, purge_why);
    assert_true(purge_rc < 0); /* it did not reach all of it */
    assert_non_null(strstr(purge_why, "repeat it"));
    close(fd);
}

/* Questions that make no sense are answered in words. */
static void questions_are_answered_in_words(void **state)
{
    static const char *const cases[][2] = {
        {"purge ", "are not the 32 hexadecimal digits"},
        {"purge 0011", "are not the 32 hexadecimal digits"},
        {"purge 0011223344556677 8899aabbccddeef", "are not the 32 hexadecimal digits"},
        {"purge 00112233445566778899AABBCCDDEEFF", "\npurge.groups 0\n"},
        {"purge", "unknown question"},
        {"stat", "\ncontrol.version 1\n"},
    };

    (void)state;
    daemon_init(&server, "--dram 4MiB");
    daemon_start(&server);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char *answer = NULL, why[512];

        assert_int_equal(kvt_link_ask(server.socket, cases[i][0], &answer, why, sizeof(why)), 0);
        if (strstr(answer, cases[i][1]) == NULL)
            fail_msg("%s: %s", cases[i][0], answer);
        free(answer);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_namespace_goes_for_good, tear_down),
        cmocka_unit_test_teardown(the_command_purges_by_digits_and_by_name, tear_down),
        cmocka_unit_test_teardown(a_name_that_two_namespaces_have_is_refused, tear_down),
        cmocka_unit_test_teardown(the_shared_tier_is_purged_too, tear_down),
        cmocka_unit_test_teardown(all_of_them_go_at_once, tear_down),
        cmocka_unit_test_teardown(all_of_them_where_the_shared_tier_says_nothing, tear_down),
        cmocka_unit_test_teardown(other_users_may_not_purge, tear_down),
        cmocka_unit_test_teardown(nobody_waits_for_a_purge, tear_down),
        cmocka_unit_test_teardown(questions_are_answered_in_words, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
