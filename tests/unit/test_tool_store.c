/* Goal: `kvtier stat` counts what is there and changes nothing; `kvtier purge` removes exactly what
 * it was told, for good, in the index of a later process and in the bytes on disk; both refuse what
 * is not a store, and purge a store that somebody owns. Method: a store of two namespaces (two
 * salts) is made by the library in this process, exact level, payloads that carry a marker; then
 * the built binary is run on it, and the library opens it again. Seed: none, the data is a counter.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvtier/kvtier.h"
#include "store_dir.h"
#include "support/run_tool.h"

/* Two namespaces of 160 records of 4 KiB fill more than one segment of 1 MiB: the first is
 * sealed, and recovery believes its footer without reading the records. */
enum { PAGES = 160, TOKENS = 16, DIM = 64, BLOCKS = 160 };
#define MARKER 0x5a17u /* a finite bf16 that occurs in no structure by chance, eight in a row */

static uint16_t k[PAGES][TOKENS][DIM];
static struct tool_run run;
static char base[256], dir[300];
static uint8_t ids[2][KVT_NS_BYTES];

static const struct kvt_part parts[] = {
    {.kind = KVT_PART_K, .dtype = KVT_DTYPE_BF16, .heads = 1, .head_dim = DIM}};

struct session {
    struct kvt_cache *cache;
    struct kvt_ns *ns[2];
    struct kvt_pool *pool;
    struct kvt_key keys[2][BLOCKS];
};

static void session_open(struct session *s)
{
    const struct kvt_part_place place = {k, sizeof(k[0]), sizeof(k[0]), sizeof(k[0][0]), 2};
    const struct kvt_layout layout = {sizeof(layout), TOKENS, 1, parts};
    const struct kvt_pool_desc desc = {sizeof(desc), KVT_DEVICE_HOST, PAGES, 1, &place};
    struct kvt_config *config;
    char disk[400], error[256];
    uint32_t tokens[BLOCKS * TOKENS];
    uint8_t root[32];

    memset(s, 0, sizeof(*s));
    assert_int_equal(kvt_config_new(&config), 0);
    assert_int_equal(kvt_config_set(config, "dram", "16MiB"), 0);
    snprintf(disk, sizeof(disk), "%s:64MiB", dir);
    assert_int_equal(kvt_config_set(config, "disk", disk), 0);
    assert_int_equal(kvt_config_set(config, "disk_required", "yes"), 0);
    if (kvt_open(config, &s->cache, error, sizeof(error)))
        fail_msg("%s", error);
    kvt_config_free(config);
    assert_int_equal(kvt_pool_register(s->cache, &layout, &desc, &s->pool), 0);
    for (int i = 0; i < 2; i++) {
        struct kvt_identity who;
        kvt_identity_init(&who);
        who.engine = "test";
        who.key_scheme = KVT_KEY_SCHEME;
        who.model = "none";
        who.salt = i ? "b" : "a";
        who.salt_len = 1;
        assert_int_equal(kvt_ns_open(s->cache, &who, &layout, &s->ns[i]), 0);
        memcpy(ids[i], kvt_ns_id(s->ns[i]), KVT_NS_BYTES);
        for (uint32_t t = 0; t < BLOCKS * TOKENS; t++)
            tokens[t] = t + 1;
        assert_int_equal(kvt_key_root(who.salt, 1, root), 0);
        assert_int_equal(
            kvt_key_chain(root, tokens, BLOCKS * TOKENS, TOKENS, NULL, 0, 0, 0, s->keys[i], BLOCKS),
            BLOCKS);
    }
}

static void session_close(struct session *s)
{
    kvt_pool_unregister(s->pool);
    kvt_ns_close(s->ns[0]);
    kvt_ns_close(s->ns[1]);
    kvt_close(s->cache);
}

static void session_store(struct session *s, int i)
{
    const struct kvt_store_opts exact = {.struct_size = sizeof(exact), .exact = 1};
    uint32_t pages[BLOCKS];
    struct kvt_req *req;

    for (uint32_t b = 0; b < BLOCKS; b++) {
        pages[b] = b;
        for (uint32_t e = 0; e < TOKENS * DIM; e++)
            k[b][e / DIM][e % DIM] = (uint16_t)(e % 16 < 8 ? MARKER : 0x3c00 + b * 2 + (uint32_t)i);
    }
    assert_int_equal(kvt_store(s->ns[i], s->pool, s->keys[i], pages, BLOCKS, &exact, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    kvt_req_free(req);
    assert_int_equal(kvt_flush(s->cache), 0);
}

static void make_store(void)
{
    struct session s;

    session_open(&s);
    session_store(&s, 0);
    session_store(&s, 1);
    session_close(&s);
}

/* Pages of 4 KiB in all files of the store that hold the marker. */
static size_t pages_with_marker(void)
{
    uint16_t page[2048], marker[8];
    struct dirent *entry;
    size_t found = 0;
    DIR *d = opendir(dir);

    for (int i = 0; i < 8; i++)
        marker[i] = MARKER;
    assert_non_null(d);
    while ((entry = readdir(d))) {
        char name[600];
        snprintf(name, sizeof(name), "%s/%s", dir, entry->d_name);
        FILE *f = entry->d_name[0] == '.' ? NULL : fopen(name, "r");
        while (f && fread(page, 1, sizeof(page), f) == sizeof(page))
            found += memmem(page, sizeof(page), marker, sizeof(marker)) != NULL;
        if (f)
            fclose(f);
    }
    closedir(d);
    return found;
}

/* Names, sizes and times of change of the files: stat may change none of them. */
static void fingerprint(char *out, size_t size)
{
    struct dirent **list;
    size_t used = 0;
    int n = scandir(dir, &list, NULL, alphasort);

    assert_true(n > 2);
    for (int i = 0; i < n; i++) {
        char name[600];
        struct stat st;
        snprintf(name, sizeof(name), "%s/%s", dir, list[i]->d_name);
        if (list[i]->d_name[0] != '.' && !stat(name, &st) && used < size)
            used += (size_t)snprintf(out + used, size - used, "%s %lld %lld.%09ld\n",
                                     list[i]->d_name, (long long)st.st_size,
                                     (long long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
        free(list[i]);
    }
    free(list);
    assert_true(used > 0 && used < size);
}

static void tool(const char *const argv[])
{
    tool_run(&run, KVT_TOOL, argv, NULL, NULL);
}
#define TOOL(...) tool((const char *const[]){"kvtier", __VA_ARGS__, NULL})

static json_t *json_of(void)
{
    json_error_t error;
    json_t *value = json_loads(run.out, 0, &error);

    if (!value)
        fail_msg("no JSON (%s): %s%s", error.text, run.out, run.err);
    return value;
}

static int64_t number(const json_t *object, const char *key)
{
    json_t *value = json_object_get(object, key);

    if (!json_is_integer(value))
        fail_msg("%s is no number in %s", key, run.out);
    return json_integer_value(value);
}

static int64_t stat_records(void)
{
    TOOL("stat", dir, "--json");
    assert_int_equal(run.code, 0);
    json_t *report = json_of();
    int64_t n = number(report, "records");
    json_decref(report);
    return n;
}

static void test_stat(void **state)
{
    char before[4096], after[4096], id[33];
    json_t *ns;
    size_t i, seen = 0;

    (void)state;
    make_store();
    fingerprint(before, sizeof(before));
    TOOL("stat", dir, "--json");
    assert_int_equal(run.code, 0);
    json_t *report = json_of();
    assert_int_equal(number(report, "records"), 2 * BLOCKS);
    assert_true(number(report, "segments") >= 1);
    assert_int_equal(number(report, "bytes_max"), 64 << 20);
    assert_true(number(report, "bytes_used") >= number(report, "bytes"));
    assert_true(number(report, "bytes_used") <= 64 << 20);
    assert_true(json_is_null(json_object_get(report, "owner_pid")));
    assert_int_equal(number(report, "recovered_bad"), 0);
    json_array_foreach(json_object_get(report, "namespaces"), i, ns)
    {
        for (int n = 0; n < 2; n++) {
            kvt_dir_ns_text(ids[n], id);
            seen += !strcmp(json_string_value(json_object_get(ns, "id")), id);
        }
        assert_int_equal(number(ns, "records"), BLOCKS);
        assert_int_equal(number(ns, "bytes") * 2, number(report, "bytes"));
    }
    assert_int_equal(i, 2);
    assert_int_equal(seen, 2);
    json_decref(report);
    TOOL("stat", dir);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, id));
    assert_non_null(strstr(run.out, "nobody"));
    fingerprint(after, sizeof(after));
    assert_string_equal(before, after);
}

static void test_stat_beside_an_owner(void **state)
{
    struct session s;
    char pid[32];

    (void)state;
    make_store();
    session_open(&s);
    TOOL("stat", dir, "--json");
    assert_int_equal(run.code, 0);
    json_t *report = json_of();
    assert_int_equal(number(report, "owner_pid"), getpid());
    assert_int_equal(number(report, "records"), 2 * BLOCKS);
    json_decref(report);
    TOOL("purge", dir, "--all", "--yes");
    assert_int_equal(run.code, 1);
    snprintf(pid, sizeof(pid), "%d", (int)getpid());
    assert_non_null(strstr(run.err, pid)); /* who to ask */
    assert_int_equal(kvt_lookup(s.ns[0], s.keys[0], BLOCKS, NULL, NULL), BLOCKS);
    session_close(&s);
}

static void test_counters_of_last_snapshot(void **state)
{
    char name[400];

    (void)state;
    make_store();
    snprintf(name, sizeof(name), "%s/stats", dir);
    FILE *f = fopen(name, "w");
    assert_non_null(f);
    fputs("lookup.keys 12\ndisk.state ok, direct\nnonsense\nlarge 18446744073709551615\n", f);
    fwrite("\0\0\0\0", 1, 4, f); /* padding of an aligned write */
    fclose(f);
    TOOL("stat", dir, "--json");
    assert_int_equal(run.code, 0);
    json_t *report = json_of(), *counters = json_object_get(report, "counters");
    assert_int_equal(number(counters, "lookup.keys"), 12);
    assert_string_equal(json_string_value(json_object_get(counters, "disk.state")), "ok, direct");
    json_decref(report);
    assert_int_equal(unlink(name), 0);
    assert_int_equal(symlink("/etc/passwd", name), 0); /* never followed */
    TOOL("stat", dir, "--json");
    assert_null(strstr(run.out, "root:"));
}

/* A FIFO in the place of the counters is not waited for. */
static void test_counters_that_are_no_file(void **state)
{
    char name[400];

    (void)state;
    make_store();
    snprintf(name, sizeof(name), "%s/stats", dir);
    (void)unlink(name);
    assert_int_equal(mkfifo(name, 0600), 0);
    TOOL("stat", dir);
    assert_int_equal(run.code, 0);
}

/* CASES C82: every option is listed with its value; a wrong one is named. */
static void test_c82_effective(void **state)
{
    static const char *const keys[] = {"dram", "disk", "level", "threads", "direct"};
    json_t *option;
    size_t i, seen = 0;

    (void)state;
    TOOL("stat", "--effective", "--json", "--config", "dram=3GiB,level=kv8");
    assert_int_equal(run.code, 0);
    json_t *report = json_of();
    json_array_foreach(json_object_get(report, "config"), i, option)
    {
        const char *key = json_string_value(json_object_get(option, "key"));
        const char *value = json_string_value(json_object_get(option, "value"));
        for (size_t n = 0; n < sizeof(keys) / sizeof(keys[0]); n++)
            seen += !strcmp(key, keys[n]);
        if (!strcmp(key, "dram"))
            assert_string_equal(value, "3GiB");
        if (!strcmp(key, "level"))
            assert_string_equal(value, "kv8");
    }
    assert_int_equal(seen, sizeof(keys) / sizeof(keys[0]));
    json_decref(report);
    TOOL("stat", "--effective");
    assert_int_equal(run.code, 0);
    for (size_t n = 0; n < sizeof(keys) / sizeof(keys[0]); n++)
        assert_non_null(strstr(run.out, keys[n]));
    TOOL("stat", "--effective", "--config", "dram=3gb");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "dram"));
    TOOL("stat", "--effective", "--config", "enabled=5GiB");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "enabled"));
    TOOL("stat");
    assert_int_equal(run.code, 2);
}

static void refused(const char *path, const char *sentence)
{
    static const char *const commands[] = {"stat", "purge"};

    for (int i = 0; i < 2; i++) {
        tool((const char *const[]){"kvtier", commands[i], path, i ? "--all" : NULL, "--yes", NULL});
        if (run.code != 1 || !strstr(run.err, sentence) || !strstr(run.err, path) || run.out[0])
            fail_msg("%s %s: %d %s%s", commands[i], path, run.code, run.out, run.err);
    }
}

static void test_directories_refused(void **state)
{
    char name[400];

    (void)state;
    snprintf(name, sizeof(name), "%s/absent", base);
    refused(name, "No such file");
    assert_int_equal(access(name, F_OK), -1); /* a question makes no directory */
    assert_int_equal(mkdir(name, 0700), 0);
    refused(name, "not a kvtier store");
    assert_int_equal(rmdir(name), 0); /* still empty */
    make_store();
    assert_int_equal(symlink(dir, name), 0);
    refused(name, "symbolic link");
    assert_int_equal(unlink(name), 0);
    assert_int_equal(stat_records(), 2 * BLOCKS);
    refused("/etc/passwd", "Not a directory");
}

static void test_purge_one(void **state)
{
    struct session s;
    char id[33];

    (void)state;
    make_store();
    size_t marked = pages_with_marker();
    assert_true(marked >= 2 * BLOCKS);
    kvt_dir_ns_text(ids[0], id);
    TOOL("purge", dir, "--namespace", id, "--yes", "--json");
    assert_int_equal(run.code, 0);
    json_t *report = json_of();
    assert_int_equal(number(report, "records"), BLOCKS);
    assert_true(number(report, "bytes") > 0);
    json_decref(report);
    assert_int_equal(stat_records(), BLOCKS);
    assert_int_equal(pages_with_marker(), marked / 2); /* the bytes are gone, not just the index */

    session_open(&s);
    assert_int_equal(kvt_lookup(s.ns[0], s.keys[0], BLOCKS, NULL, NULL), 0);
    assert_int_equal(kvt_lookup(s.ns[1], s.keys[1], BLOCKS, NULL, NULL), BLOCKS);
    session_store(&s, 0); /* a purge is no ban: the namespace can be used again */
    session_close(&s);
    session_open(&s);
    assert_int_equal(kvt_lookup(s.ns[0], s.keys[0], BLOCKS, NULL, NULL), BLOCKS);
    session_close(&s);
    assert_int_equal(stat_records(), 2 * BLOCKS);
}

static int segments_left(void)
{
    DIR *list = opendir(dir);
    int count = 0;

    assert_non_null(list);
    for (struct dirent *entry; (entry = readdir(list)) != NULL;)
        count += strncmp(entry->d_name, "seg-", 4) == 0;
    closedir(list);
    return count;
}

static void test_purge_all(void **state)
{
    struct session s;

    (void)state;
    make_store();
    TOOL("purge", dir, "--all", "--yes");
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "removed 320 records"));
    assert_int_equal(stat_records(), 0);
    assert_int_equal(pages_with_marker(), 0);
    assert_int_equal(segments_left(), 0); /* so that the next open divides its cap anew */
    TOOL("fsck", dir);
    assert_int_equal(run.code, 0);
    session_open(&s);
    assert_int_equal(kvt_lookup(s.ns[0], s.keys[0], BLOCKS, NULL, NULL), 0);
    assert_int_equal(kvt_lookup(s.ns[1], s.keys[1], BLOCKS, NULL, NULL), 0);
    session_close(&s);
    TOOL("purge", dir, "--all", "--yes"); /* nothing left is fine */
    assert_int_equal(run.code, 0);
}

static void test_purge_of_nothing(void **state)
{
    (void)state;
    make_store();
    TOOL("purge", dir, "--namespace", "00000000000000000000000000000000", "--yes");
    assert_int_equal(run.code, 1);
    assert_string_equal(run.out, "");
    assert_non_null(strstr(run.err, "no such namespace, nothing was removed"));
    assert_int_equal(stat_records(), 2 * BLOCKS);
    static const char *const others[] = {"verify", "inspect"};
    for (unsigned i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        TOOL(others[i], dir, "--namespace", "00000000000000000000000000000000");
        assert_int_equal(run.code, 1);
        assert_string_equal(run.out, "");
        assert_non_null(strstr(run.err, "no such namespace"));
    }
}

static void test_purge_asks(void **state)
{
    (void)state;
    make_store();
    TOOL("purge", dir, "--all"); /* standard input is no terminal: nobody can answer */
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "--yes"));
    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", "purge", dir, "--all", NULL}, "yes\n",
             NULL);
    assert_int_equal(run.code, 2); /* a pipe is no answer either */
    assert_int_equal(stat_records(), 2 * BLOCKS);
}

static void test_purge_usage(void **state)
{
    static const struct {
        const char *line[5];
        const char *sentence;
    } wrong[] = {
        {{"--yes"}, "either --namespace HEX or --all"},
        {{"--yes", "--all", "--namespace", "00"}, "either --namespace HEX or --all"},
        {{"--namespace", "00"}, "'00' is not 32 hexadecimal digits"},
        {{"--namespace", "zz000000000000000000000000000000"}, "is not 32 hexadecimal digits"},
        {{"--namespace", "000000000000000000000000000000000"}, "is not 32 hexadecimal digits"},
    };

    (void)state;
    make_store();
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        const char *argv[8] = {"kvtier", "purge", dir};
        memcpy(argv + 3, wrong[i].line, 4 * sizeof(argv[0]));
        tool(argv);
        if (run.code != 2 || !strstr(run.err, wrong[i].sentence))
            fail_msg("%zu: %d %s", i, run.code, run.err);
    }
    TOOL("purge", "--all", "--yes");
    assert_int_equal(run.code, 2);
    assert_int_equal(stat_records(), 2 * BLOCKS);
}

static void test_namespace_text(void **state)
{
    uint8_t ns[KVT_NS_BYTES];
    char text[33];

    (void)state;
    assert_int_equal(kvt_dir_ns_parse("00112233445566778899aabbccddeeFF", ns), 0);
    assert_int_equal(ns[0], 0);
    assert_int_equal(ns[1], 0x11);
    assert_int_equal(ns[15], 0xff);
    kvt_dir_ns_text(ns, text);
    assert_string_equal(text, "00112233445566778899aabbccddeeff");
    assert_int_equal(kvt_dir_ns_parse("00112233445566778899aabbccddee", ns), KVT_E_INVAL);
    assert_int_equal(kvt_dir_ns_parse("", ns), KVT_E_INVAL);
}

static void empty_dir(const char *path)
{
    struct dirent *entry;
    DIR *d = opendir(path);

    while (d && (entry = readdir(d)))
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            unlinkat(dirfd(d), entry->d_name, 0);
    if (d)
        closedir(d);
}

static int make_base(void **state)
{
    (void)state;
    snprintf(base, sizeof(base), "%s/kvtier-tool-XXXXXX",
             getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    if (!mkdtemp(base))
        return -1;
    snprintf(dir, sizeof(dir), "%s/store", base);
    return 0;
}

static int fresh(void **state)
{
    (void)state;
    empty_dir(dir);
    rmdir(dir);
    return 0;
}

static int remove_base(void **state)
{
    fresh(state);
    return rmdir(base);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_stat, fresh),
        cmocka_unit_test_setup(test_stat_beside_an_owner, fresh),
        cmocka_unit_test_setup(test_counters_of_last_snapshot, fresh),
        cmocka_unit_test_setup(test_counters_that_are_no_file, fresh),
        cmocka_unit_test_setup(test_c82_effective, fresh),
        cmocka_unit_test_setup(test_directories_refused, fresh),
        cmocka_unit_test_setup(test_purge_one, fresh),
        cmocka_unit_test_setup(test_purge_all, fresh),
        cmocka_unit_test_setup(test_purge_of_nothing, fresh),
        cmocka_unit_test_setup(test_purge_asks, fresh),
        cmocka_unit_test_setup(test_purge_usage, fresh),
        cmocka_unit_test(test_namespace_text),
    };
    return cmocka_run_group_tests(tests, make_base, remove_base);
}
