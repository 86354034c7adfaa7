/* What the shared tier is made of, piece by piece: addresses, the protocol's bytes, names, MACs.
 *
 * Goal:   every address that is allowed is read and every other one refused with a sentence; no
 *         bytes of a server, cut anywhere or random, are read beyond their end or taken for
 *         something they are not; a key goes to the slot that Redis says; names of different keys
 *         differ; a record that was changed anywhere is not let in.
 * Method: tables; every prefix of good replies, and random damage with a printed seed, in memory of
 *         exactly their length, so that the address sanitizer sees one byte too many.
 */
#include "support/rig.h"

#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/rng.h"
#include "kvtier/error.h"
#include "remote/remote_seal.h"
#include "remote/remote_url.h"
#include "remote/resp.h"
#include "support/remote_help.h"

/* ---- addresses ----------------------------------------------------------------------------- */

static void test_addresses_that_are_read(void **state)
{
    static const struct {
        const char *where, *host, *port;
        uint32_t seeds;
        bool tls;
    } cases[] = {
        {"redis://a", "a", "6379", 1, false},
        {"redis://a/", "a", "6379", 1, false},
        {"redis://a:1", "a", "1", 1, false},
        {"redis://10.0.0.1:65535,b:2", "10.0.0.1", "65535", 2, false},
        {"redis://a:1+b+c:3", "a", "1", 3, false},
        {"rediss://host.example:7000", "host.example", "7000", 1, true},
        {"redis://[::1]:7000", "::1", "7000", 1, false},
        {"redis://[fe80::1]", "fe80::1", "6379", 1, false},
        {"redis+unix:/run/s", "/run/s", "", 1, false},
        {"redis+unix:///run/s", "/run/s", "", 1, false},
    };
    char error[512];

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kvt_remote_url url;

        if (kvt_remote_url_parse(cases[i].where, &url, error, sizeof(error)) != 0)
            fail_msg("%s: %s", cases[i].where, error);
        assert_int_equal(url.kind, KVT_REMOTE_REDIS);
        assert_int_equal(url.seed_count, cases[i].seeds);
        assert_string_equal(url.seeds[0].host, cases[i].host);
        assert_string_equal(url.seeds[0].port, cases[i].port);
        assert_int_equal(url.tls, cases[i].tls);
    }
}

static void test_replicas_are_an_option(void **state)
{
    struct kvt_remote_url url;
    char error[512];

    (void)state;
    assert_int_equal(kvt_remote_url_parse("redis://a:1+b/?replicas=yes", &url, error, 512), 0);
    assert_true(url.replicas);
    assert_int_equal(url.seed_count, 2);
    assert_string_equal(url.seeds[1].host, "b");
    assert_int_equal(kvt_remote_url_parse("rediss://a?replicas=no", &url, error, 512), 0);
    assert_false(url.replicas);
    assert_int_equal(kvt_remote_url_parse("redis://a", &url, error, 512), 0);
    assert_false(url.replicas);
}

static void test_a_directory_is_read(void **state)
{
    struct kvt_remote_url url;
    char error[512];

    (void)state;
    assert_int_equal(kvt_remote_url_parse("dir:/mnt/a,b+c", &url, error, sizeof(error)), 0);
    assert_int_equal(url.kind, KVT_REMOTE_DIR);
    assert_string_equal(url.path, "/mnt/a,b+c");
    assert_int_equal(url.seed_count, 0);
}

static void test_addresses_that_are_refused(void **state)
{
    static const char *const cases[][2] = {
        {"", "redis://HOST"},
        {"a:6379", "redis://HOST"},
        {"http://a", "redis://HOST"},
        {"redis://", "no server"},
        {"redis://a,", "missing at the end"},
        {"redis://,a", "not of the form"},
        {"redis://a:6379/0", "databases"},
        {"redis://a/0,b", "databases"},
        {"redis://a:0", "not of the form"},
        {"redis://a?replica=yes", "?replicas=yes"},
        {"redis://a?replicas=", "?replicas=yes"},
        {"redis://?replicas=yes", "no server"},
        {"redis://a:65536", "not of the form"},
        {"redis://a:12x", "not of the form"},
        {"redis://:1", "not of the form"},
        {"redis://[::1", "not of the form"},
        {"redis://[::1]x", "not of the form"},
        {"redis://user:secret@a", "remote_auth"},
        {"redis://user:a?secret@a", "remote_auth"},
        {"redis+unix:run/s", "absolute"},
        {"dir:", "absolute"},
        {"dir:mnt", "absolute"},
        {"redis+unix:/", "absolute"},
        {"dir:/mnt/kv?replicas=yes", "cluster"},
        {"redis+unix:/run/s?replicas=yes", "cluster"},
        {"redis://a+a+a+a+a+a+a+a+a+a+a+a+a+a+a+a+a", "at most 16"},
    };
    char error[512], longest[2048];
    struct kvt_remote_url url;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        error[0] = '\0';
        assert_int_equal(kvt_remote_url_parse(cases[i][0], &url, error, sizeof(error)),
                         KVT_E_CONFIG_VALUE);
        if (!strstr(error, cases[i][1]) || strstr(error, "secret"))
            fail_msg("%s: %s", cases[i][0], error);
    }
    memset(longest, 'x', sizeof(longest));
    memcpy(longest, "redis+unix:/", 12);
    longest[sizeof(longest) - 1] = '\0';
    assert_int_equal(kvt_remote_url_parse(longest, &url, error, sizeof(error)), KVT_E_CONFIG_VALUE);
    memcpy(longest, "redis://xxxx", 12);
    assert_int_equal(kvt_remote_url_parse(longest, &url, error, sizeof(error)), KVT_E_CONFIG_VALUE);
}

static void test_hosts_of_redirections(void **state)
{
    struct kvt_remote_seed seed;

    (void)state;
    assert_true(kvt_remote_host_parse("10.0.0.1:7001", 13, "x", &seed));
    assert_string_equal(seed.host, "10.0.0.1");
    assert_string_equal(seed.port, "7001");
    assert_true(kvt_remote_host_parse("::1:7001", 8, "x", &seed));
    assert_string_equal(seed.host, "::1");
    assert_true(kvt_remote_host_parse(":7001", 5, "same", &seed));
    assert_string_equal(seed.host, "same");
    assert_false(kvt_remote_host_parse("7001", 4, "x", &seed));
    assert_false(kvt_remote_host_parse("a:", 2, "x", &seed));
    assert_false(kvt_remote_host_parse("", 0, "x", &seed));
}

/* ---- the protocol -------------------------------------------------------------------------- */

/* In memory of its own, of exactly that length. */
static long whole(const char *bytes, size_t len)
{
    char *copy = malloc(len ? len : 1);
    long used;

    assert_non_null(copy);
    memcpy(copy, bytes, len);
    used = kvt_resp_whole(copy, len);
    free(copy);
    return used;
}

static void test_whole_values(void **state)
{
    static const char *const good[] = {
        "+OK\r\n",
        "-ERR no\r\n",
        ":12\r\n",
        ":-1\r\n",
        "$-1\r\n",
        "$0\r\n\r\n",
        "$5\r\na\r\nbc\r\n",
        "*0\r\n",
        "*-1\r\n",
        "*2\r\n$1\r\n0\r\n*3\r\n$1\r\na\r\n:1\r\n*1\r\n+x\r\n",
        "*3\r\n*0\r\n*1\r\n*0\r\n$2\r\nab\r\n",
    };
    static const char *const bad[] = {
        "x\r\n",           "+OK\n",         "\n",      ":1a\r\n", ":\r\n",   "$-2\r\n",
        "$9999999999\r\n", "*99999999\r\n", "*-5\r\n", "$ 1\r\n", ":--1\r\n"};

    (void)state;
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        size_t len = strlen(good[i]);

        assert_int_equal(whole(good[i], len), (long)len);
        for (size_t cut = 0; cut < len; cut++)
            assert_int_equal(whole(good[i], cut), 0);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        if (whole(bad[i], strlen(bad[i])) != -1)
            fail_msg("taken: %s", bad[i]);
    assert_int_equal(whole("*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n", 40), -1);
}

static void test_lines_have_a_longest(void **state)
{
    char line[KVT_RESP_LINE_MAX + 16];
    struct kvt_resp_head head;

    (void)state;
    memset(line, 'e', sizeof(line));
    line[0] = '-';
    assert_int_equal(kvt_resp_head(line, KVT_RESP_LINE_MAX - 1, &head), 0);
    assert_int_equal(kvt_resp_head(line, KVT_RESP_LINE_MAX, &head), -1);
    memcpy(line + KVT_RESP_LINE_MAX - 2, "\r\n", 2);
    assert_int_equal(kvt_resp_head(line, sizeof(line), &head), KVT_RESP_LINE_MAX);
    assert_int_equal(head.text_len, KVT_RESP_LINE_MAX - 3);
}

/* As the documentation of clusters, and CLUSTER KEYSLOT, have them. */
static void test_slots_of_keys(void **state)
{
    (void)state;
    assert_int_equal(kvt_resp_slot("123456789", 9), 0x31C3);
    assert_int_equal(kvt_resp_slot("foo", 3), 12182);
    assert_int_equal(kvt_resp_slot("bar", 3), 5061);
    assert_int_equal(kvt_resp_slot("", 0), 0);
}

struct ranges {
    uint32_t count, slots, ports, replicas, replica_ports;
    char hosts[256];
};

static void take_range(void *ctx, uint32_t first, uint32_t last, uint32_t place, const char *host,
                       size_t host_len, uint32_t port)
{
    struct ranges *ranges = ctx;

    if (place) {
        ranges->replicas++;
        ranges->replica_ports += port;
        return;
    }
    ranges->count++;
    ranges->slots += last - first + 1;
    ranges->ports += port;
    snprintf(ranges->hosts + strlen(ranges->hosts), sizeof(ranges->hosts) - strlen(ranges->hosts),
             "%.*s;", (int)host_len, host);
}

static const char map_reply[] =
    "*3\r\n"
    "*4\r\n:0\r\n:5460\r\n*4\r\n$9\r\n127.0.0.1\r\n:7000\r\n$2\r\nid\r\n*0\r\n"
    "*3\r\n$9\r\n127.0.0.1\r\n:7003\r\n$2\r\nid\r\n"
    "*3\r\n:5461\r\n:10922\r\n*3\r\n$0\r\n\r\n:7001\r\n$2\r\nid\r\n"
    "*3\r\n:10923\r\n:16383\r\n*2\r\n$-1\r\n:7002\r\n";

static void test_maps_of_clusters(void **state)
{
    struct ranges ranges = {0};
    size_t len = sizeof(map_reply) - 1;
    uint64_t seed = rig_seed();
    struct kvt_rng rng = {seed};

    (void)state;
    assert_int_equal(whole(map_reply, len), (long)len);
    assert_true(kvt_resp_slots(map_reply, len, take_range, &ranges));
    assert_int_equal(ranges.count, 3);
    assert_int_equal(ranges.slots, KVT_RESP_SLOTS);
    assert_int_equal(ranges.ports, 21003);
    assert_string_equal(ranges.hosts, "127.0.0.1;;;");
    assert_int_equal(ranges.replicas, 1);
    assert_int_equal(ranges.replica_ports, 7003);
    for (size_t cut = 0; cut < len; cut++) {
        char *copy = malloc(cut ? cut : 1);

        memcpy(copy, map_reply, cut);
        memset(&ranges, 0, sizeof(ranges));
        assert_false(kvt_resp_slots(copy, cut, take_range, &ranges));
        free(copy);
    }
    for (int i = 0; i < 20000; i++) {
        char *copy = malloc(len);

        memcpy(copy, map_reply, len);
        for (int flips = 0; flips < 3; flips++)
            copy[kvt_rng_next(&rng) % len] = (char)kvt_rng_next(&rng);
        memset(&ranges, 0, sizeof(ranges));
        if (kvt_resp_slots(copy, len, take_range, &ranges)) {
            assert_true(kvt_resp_whole(copy, len) > 0);
            assert_true(ranges.count <= 3);
        }
        free(copy);
    }
}

/* ---- names, MACs --------------------------------------------------------------------------- */

static void test_names(void **state)
{
    struct kvt_full_key key;
    char name[KVT_REMOTE_NAME_BYTES], prefix[KVT_REMOTE_NAME_BYTES];
    size_t len;

    (void)state;
    memset(&key, 0, sizeof(key));
    memset(key.ns, 0xAB, sizeof(key.ns));
    key.hash[0] = 0x12;
    key.hash_len = 2;
    len = kvt_remote_name(&key, name);
    assert_int_equal(len, strlen(name));
    assert_string_equal(name, "kvt0:abababababababababababababababab:1200:0:0");
    len = kvt_remote_ns_prefix(&key, prefix);
    assert_int_equal(len, strlen(prefix));
    assert_memory_equal(name, prefix, strlen(prefix));
    memset(key.hash, 0xFF, sizeof(key.hash)); /* the longest one */
    key.hash_len = KVT_HASH_BYTES_MAX;
    key.group = UINT16_MAX;
    key.shard = UINT32_MAX;
    len = kvt_remote_name(&key, name);
    assert_int_equal(len, strlen(name));
    assert_true(strlen(name) < KVT_REMOTE_NAME_BYTES - 1);
    assert_non_null(strstr(name, ":65535:4294967295"));
}

#define PAGES 3u
static _Alignas(4096) uint8_t record[PAGES * 4096], wanted[PAGES * 4096];

static int unseal(const struct kvt_remote_mac *mac, const uint8_t *found, uint64_t sequence,
                  uint8_t map)
{
    struct kvt_full_key key = remote_help_key(1, 5);
    struct kvt_remote_req req = {.op = KVT_REMOTE_GET,
                                 .count = 1,
                                 .keys = &key,
                                 .record = record,
                                 .record_bytes = sizeof(record),
                                 .sequence = sequence,
                                 .map = map};

    return kvt_remote_unseal(mac, &req, found);
}

static void test_a_record_changed_anywhere_is_refused(void **state)
{
    static const struct kvt_remote_mac none;
    uint64_t seed = rig_seed();
    struct kvt_rng rng = {seed};

    (void)state;
    remote_help_record(1, 5, PAGES, wanted);
    for (int i = 0; i < 3000; i++) {
        size_t at = i < 128 ? (size_t)i : kvt_rng_next(&rng) % sizeof(record);

        memcpy(record, wanted, sizeof(record));
        record[at] ^= (uint8_t)(1u << (kvt_rng_next(&rng) % 8));
        assert_int_equal(unseal(&none, NULL, 9, KVT_LEVEL_KV4), KVT_E_CORRUPT);
    }
    memcpy(record, wanted, sizeof(record));
    assert_int_equal(unseal(&none, NULL, 0, KVT_LEVEL_KV4), 0);
    assert_memory_equal(record, wanted, sizeof(record));
    assert_int_equal(unseal(&none, NULL, 9, KVT_LEVEL_KV8), KVT_E_CORRUPT);
    assert_int_equal(unseal(&none, NULL, 9, 8), KVT_E_CORRUPT); /* a mixed map of its level */
    assert_int_equal(unseal(&none, NULL, 9, KVT_LEVEL_KV4), 0);
    assert_int_equal(((struct kvt_record_header *)record)->sequence, 9);
    assert_int_equal(kvt_record_verify(record, sizeof(record), NULL, 0), 0);
    remote_help_record(1, 6, PAGES, record); /* a good one of another key */
    assert_int_equal(unseal(&none, NULL, 9, KVT_LEVEL_KV4), KVT_E_CORRUPT);
}

static void write_file(const char *path, const char *text, mode_t mode)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs(text, file);
    fclose(file);
    assert_int_equal(chmod(path, mode), 0);
}

static void test_macs(void **state)
{
    struct kvt_remote_mac mac, other;
    uint8_t found[KVT_REMOTE_MAC_BYTES], found_other[KVT_REMOTE_MAC_BYTES];
    char dir[128], path[160], error[512] = "";

    (void)state;
    rig_dir_make(dir, sizeof(dir));
    snprintf(path, sizeof(path), "%s/key", dir);
    assert_int_not_equal(kvt_remote_mac_read(path, &mac, error, sizeof(error)), 0);
    assert_non_null(strstr(error, path));
    write_file(path, "short", 0600);
    assert_int_equal(kvt_remote_mac_read(path, &mac, error, sizeof(error)), KVT_E_CONFIG_VALUE);
    assert_non_null(strstr(error, "urandom"));
    write_file(path, "0123456789abcdef0123456789abcdef", 0644);
    assert_int_not_equal(kvt_remote_mac_read(path, &mac, error, sizeof(error)), 0);
    assert_non_null(strstr(error, "chmod 600"));
    assert_int_equal(chmod(path, 0600), 0);
    assert_int_equal(kvt_remote_mac_read(path, &mac, error, sizeof(error)), 0);
    assert_int_equal(kvt_remote_mac_read(NULL, &other, error, sizeof(error)), 0);
    assert_false(other.on);
    other = mac;
    other.key[3] ^= 1;
    remote_help_record(1, 5, PAGES, record);
    assert_true(kvt_remote_mac(&mac, record, sizeof(record), found));
    assert_true(kvt_remote_mac(&other, record, sizeof(record), found_other));
    assert_memory_not_equal(found, found_other, sizeof(found));
    assert_int_equal(unseal(&mac, found_other, 9, KVT_LEVEL_KV4), KVT_E_CORRUPT);
    assert_int_equal(unseal(&mac, found, 9, KVT_LEVEL_KV4), 0);
    rig_dir_remove(dir);
}

/* A backend that cannot be opened, and what it says. */
static void refused(const struct kvt_remote_params *params, const char *name, const char *says)
{
    struct kvt_remote *remote = NULL;
    char error[512] = "";

    assert_int_not_equal(kvt_remote_tier_open(params, &remote, error, sizeof(error)), 0);
    assert_null(remote);
    if (!strstr(error, name) || !strstr(error, says))
        fail_msg("\"%s\" does not say \"%s\" or \"%s\"", error, name, says);
}

/* A name that is none of a file is refused at once, whatever it is: nobody writes into the FIFO,
 * and a test that waits for it never ends. Each reason has its own words. */
static void test_files_that_options_name(void **state)
{
    static const struct {
        const char *name, *says;
    } cases[] = {{"nothing", "No such file"}, {"fifo", "FIFO"},      {"directory", "directory"},
                 {"open", "chmod 600"},       {"empty", "is empty"}, {"blank", "is empty"},
                 {"long", "more than"}};
    char dir[128], path[192], line[1024];

    (void)state;
    rig_dir_make(dir, sizeof(dir));
    snprintf(path, sizeof(path), "%s/fifo", dir);
    assert_int_equal(mkfifo(path, 0600), 0);
    snprintf(path, sizeof(path), "%s/directory", dir);
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(path, sizeof(path), "%s/open", dir);
    write_file(path, "0123456789abcdef0123456789abcdef", 0640);
    snprintf(path, sizeof(path), "%s/empty", dir);
    write_file(path, "", 0600);
    snprintf(path, sizeof(path), "%s/blank", dir);
    write_file(path, "\nsecret\n", 0600);
    snprintf(path, sizeof(path), "%s/long", dir);
    memset(line, 'x', sizeof(line) - 1);
    line[sizeof(line) - 1] = '\0';
    write_file(path, line, 0600);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kvt_remote_params auth = {.where = "redis://127.0.0.1:1", .auth_file = path};
        struct kvt_remote_params mac = {.where = "redis://127.0.0.1:1", .mac_file = path};
        struct kvt_remote_params ca = {.where = "rediss://127.0.0.1:1", .ca_file = path};

        snprintf(path, sizeof(path), "%s/%s", dir, cases[i].name);
        refused(&auth, "remote_auth", cases[i].says);
        if (i < 4)
            refused(&mac, "remote_mac", cases[i].says);
        refused(&ca, "remote_ca", i < 3 ? cases[i].says : "certificates");
    }
    snprintf(path, sizeof(path), "%s/directory", dir);
    assert_int_equal(rmdir(path), 0);
    rig_dir_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_addresses_that_are_read),
        cmocka_unit_test(test_a_directory_is_read),
        cmocka_unit_test(test_replicas_are_an_option),
        cmocka_unit_test(test_addresses_that_are_refused),
        cmocka_unit_test(test_hosts_of_redirections),
        cmocka_unit_test(test_whole_values),
        cmocka_unit_test(test_lines_have_a_longest),
        cmocka_unit_test(test_slots_of_keys),
        cmocka_unit_test(test_maps_of_clusters),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_a_record_changed_anywhere_is_refused),
        cmocka_unit_test(test_macs),
        cmocka_unit_test(test_files_that_options_name),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
