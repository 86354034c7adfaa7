/* Goal: `kvtier inspect` shows what is there, `kvtier verify` proves that it can be had, both
 * beside a running owner and without changing a byte; damage of every kind that a load would meet
 *       is found and named; what an owner recycles or purges meanwhile is no problem.
 * Method: a store of two namespaces by the library in this process (open, or closed before), then
 *         the built binary; damage is written into the files at places that inspect itself names.
 *         Seed: none, the data is a counter.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "format/disk.h"
#include "support/run_tool.h"
#include "support/small_store.h"

static struct small_store store;
static struct tool_run run;

static void tool(const char *const argv[])
{
    tool_run(&run, KVT_TOOL, argv, NULL, NULL);
}
#define TOOL(...) tool((const char *const[]){"kvtier", __VA_ARGS__, NULL})

static json_t *json_of(void)
{
    json_t *value = json_loads(run.out, 0, NULL);

    if (!value)
        fail_msg("no JSON: %s%s", run.out, run.err);
    return value;
}

static int64_t number(const json_t *object, const char *key)
{
    json_t *value = json_object_get(object, key);

    if (!json_is_integer(value))
        fail_msg("%s is no number in %s", key, run.out);
    return json_integer_value(value);
}

static const char *text(const json_t *object, const char *key)
{
    const char *value = json_string_value(json_object_get(object, key));

    if (!value)
        fail_msg("%s is no text in %s", key, run.out);
    return value;
}

static int setup(void **state)
{
    (void)state;
    small_store_init(&store);
    small_store_open(&store);
    small_store_put(&store, 0, SMALL_BLOCKS, 0);
    small_store_put(&store, 1, 40, 1);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    small_store_done(&store);
    return 0;
}

/* Place of block b of namespace i: its segment file and offset. */
static void place_of(int i, int b, char path[400], uint64_t *offset)
{
    char hash[2 * KVT_HASH_BYTES_MAX + 1];

    small_store_hex(&store.keys[i][b], hash);
    TOOL("inspect", store.dir, hash, "--namespace", store.ids[i], "--json");
    json_t *record = json_of();
    unsigned segment;
    unsigned long long page;
    assert_int_equal(sscanf(text(record, "place"), "%8x:%llu", &segment, &page), 2);
    snprintf(path, 400, "%s/seg-%08x", store.dir, segment);
    *offset = page * KVT_PAGE_BYTES;
    json_decref(record);
}

static void flip(int i, int b, uint64_t at)
{
    char path[400];
    uint64_t offset;
    uint8_t byte;

    place_of(i, b, path, &offset);
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, (off_t)(offset + at)), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)(offset + at)), 1);
    close(fd);
}

/* ---- inspect ------------------------------------------------------------------------------- */

static void check_root(const json_t *root)
{
    const json_t *spaces = json_object_get(root, "namespaces"), *segments;
    int64_t records = 0, sealed = 0;

    assert_int_equal(number(root, "records"), SMALL_BLOCKS + 40);
    assert_int_equal(number(root, "cap_bytes"), 64 << 20);
    assert_int_equal(number(root, "segment_bytes"), 1 << 20);
    assert_int_equal(json_array_size(spaces), 2);
    for (int i = 0; i < 2; i++) {
        const json_t *space = json_array_get(spaces, (size_t)i);
        int which = strcmp(text(space, "id"), store.ids[0]) != 0;
        assert_string_equal(text(space, "id"), store.ids[which]);
        assert_int_equal(number(space, "records"), which ? 40 : SMALL_BLOCKS);
        assert_int_equal(number(space, "starts"), 1);
        assert_int_equal(number(space, "unreachable"), 0);
        assert_int_equal(number(space, "last_position"),
                         ((which ? 40 : SMALL_BLOCKS) - 1) * SMALL_TOKENS);
        const json_t *maps = json_object_get(space, "maps");
        const json_t *last = json_array_get(maps, json_array_size(maps) - 1);
        assert_string_equal(text(last, "level"), "raw"); /* at least the first block */
        assert_int_equal(number(last, "records") >= (which ? 40 : 1), 1);
    }
    segments = json_object_get(root, "segments");
    for (size_t i = 0; i < json_array_size(segments); i++) {
        const json_t *segment = json_array_get(segments, i);
        records += number(segment, "records");
        sealed += !strcmp(text(segment, "state"), "sealed");
        assert_memory_equal(text(segment, "name"), "seg-", 4);
    }
    assert_int_equal(records, SMALL_BLOCKS + 40);
    assert_true(json_array_size(segments) >= 1 && sealed >= 0);
}

static void test_inspect_root(void **state)
{
    (void)state;
    for (int closed = 0; closed < 2; closed++) { /* beside the owner, and at rest */
        TOOL("inspect", store.dir, "--json");
        assert_int_equal(run.code, 0);
        json_t *root = json_of();
        check_root(root);
        json_decref(root);
        TOOL("inspect", store.dir);
        assert_int_equal(run.code, 0);
        assert_non_null(strstr(run.out, store.ids[0]));
        assert_non_null(strstr(run.out, "seg-00000000"));
        assert_non_null(strstr(run.out, "raw"));
        small_store_close(&store);
    }
}

static void test_inspect_record(void **state)
{
    char hash[2 * KVT_HASH_BYTES_MAX + 1], parent[2 * KVT_HASH_BYTES_MAX + 1], word[80];

    (void)state;
    small_store_hex(&store.keys[0][30], hash);
    small_store_hex(&store.keys[0][29], parent);
    snprintf(word, sizeof(word), "%.12s", hash);
    TOOL("inspect", store.dir, word, "--json");
    assert_int_equal(run.code, 0);
    json_t *record = json_of();
    assert_string_equal(text(record, "hash"), hash);
    assert_string_equal(text(record, "parent"), parent);
    assert_string_equal(text(record, "namespace"), store.ids[0]);
    assert_int_equal(number(record, "first_pos"), 30 * SMALL_TOKENS);
    assert_string_equal(text(record, "verify"), "ok");
    assert_string_equal(text(record, "chain_end"), "start");
    assert_int_equal(number(record, "record_bytes"),
                     128 + number(record, "payload_bytes") + number(record, "padding_bytes"));
    json_t *chain = json_object_get(record, "chain");
    assert_int_equal(json_array_size(chain), 31);
    for (size_t i = 0; i < 31; i++) {
        small_store_hex(&store.keys[0][30 - i], hash);
        assert_string_equal(text(json_array_get(chain, i), "hash"), hash);
    }
    snprintf(word, sizeof(word), "%s", text(record, "place"));
    json_decref(record);

    TOOL("inspect", store.dir, word, "--json"); /* by place: the same one */
    record = json_of();
    assert_string_equal(text(record, "parent"), parent);
    json_decref(record);
    char named[90];
    snprintf(named, sizeof(named), "seg-%s", word);
    TOOL("inspect", store.dir, named);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "31 blocks to the start"));
    assert_non_null(strstr(run.out, "verified"));
    assert_non_null(strstr(run.out, "... 19 more"));
}

static void test_inspect_refusals(void **state)
{
    (void)state;
    TOOL("inspect", store.dir, "");
    assert_int_equal(run.code, 2);
    TOOL("inspect", store.dir, "xyz");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "names no record"));
    TOOL("inspect", store.dir, "0:1:2");
    assert_int_equal(run.code, 2);
    TOOL("inspect", store.dir, "ffffffff:1");
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "no record"));
    /* a prefix of many: listed, and not an answer. One digit of 200 hashes names several. */
    char digit[2] = {0};
    char hash[2 * KVT_HASH_BYTES_MAX + 1];
    small_store_hex(&store.keys[0][0], hash);
    digit[0] = hash[0];
    TOOL("inspect", store.dir, digit, "--json");
    assert_int_equal(run.code, 1);
    json_t *list = json_of();
    assert_true(number(list, "match_count") > 1);
    json_decref(list);
    TOOL("inspect", store.dir, digit);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "records match"));
    TOOL("inspect", store.dir, hash, "--namespace", store.ids[1]);
    assert_int_equal(run.code, 1); /* it is the other namespace's */
    TOOL("inspect", store.dir, hash, "--namespace", "12");
    assert_int_equal(run.code, 2);
    TOOL("inspect", store.base);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "not a kvtier store"));
}

/* A record that is bad is shown as such, without the bytes that lie there. */
static void test_inspect_damaged(void **state)
{
    char hash[2 * KVT_HASH_BYTES_MAX + 1];

    (void)state;
    small_store_close(&store);
    small_store_hex(&store.keys[1][7], hash);
    flip(1, 7, 600);
    TOOL("inspect", store.dir, hash, "--json");
    assert_int_equal(run.code, 1);
    json_t *record = json_of();
    assert_string_not_equal(text(record, "verify"), "ok");
    assert_null(json_object_get(record, "payload_bytes"));
    assert_int_equal(json_array_size(json_object_get(record, "chain")), 8);
    json_decref(record);
}

/* ---- verify -------------------------------------------------------------------------------- */

static void verify(int code, int64_t records, int64_t problems, int64_t unreachable)
{
    TOOL("verify", store.dir, "--json");
    if (run.code != code)
        fail_msg("%d instead of %d: %s%s", run.code, code, run.out, run.err);
    json_t *report = json_of();
    assert_int_equal(number(report, "records"), records);
    assert_int_equal(number(report, "problem_count"), problems);
    assert_int_equal(json_array_size(json_object_get(report, "problems")), problems);
    assert_int_equal(number(report, "unreachable"), unreachable);
    json_decref(report);
}

static void test_verify_clean(void **state)
{
    (void)state;
    verify(0, SMALL_BLOCKS + 40, 0, 0); /* beside the owner */
    json_t *report = json_of();
    assert_int_equal(number(report, "owner_pid"), getpid());
    assert_int_equal(number(report, "sequences"), 2);
    assert_int_equal(number(report, "sequence_blocks_max"), SMALL_BLOCKS);
    json_decref(report);
    assert_int_equal(small_store_get(&store, 0, SMALL_BLOCKS), SMALL_BLOCKS);
    small_store_close(&store);
    verify(0, SMALL_BLOCKS + 40, 0, 0);
    report = json_of();
    assert_true(json_is_null(json_object_get(report, "owner_pid")));
    json_decref(report);
    TOOL("verify", store.dir, "--namespace", store.ids[1]);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "40 records"));
    assert_non_null(strstr(run.out, "no problems"));
    /* 40 records of two pages at 1 MB/s take a third of a second */
    TOOL("verify", store.dir, "--namespace", store.ids[1], "--rate", "1MB", "--json");
    report = json_of();
    assert_true(json_real_value(json_object_get(report, "seconds")) > 0.15);
    json_decref(report);
}

/* A bit anywhere in a record: header, payload, padding; a load would miss, so verify says so. */
static void test_verify_damage(void **state)
{
    static const uint64_t places[] = {0, 8, 70, 100, 112, 120, 128, 700, 4095, 8191};

    (void)state;
    small_store_close(&store);
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        flip(1, (int)i + 3, places[i]);
        verify(1, SMALL_BLOCKS + 40, 1, 0);
        flip(1, (int)i + 3, places[i]);
    }
    verify(0, SMALL_BLOCKS + 40, 0, 0);
    flip(0, 5, 200);
    flip(1, 5, 200);
    TOOL("verify", store.dir);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.out, "2 problems"));
    TOOL("verify", store.dir, "--namespace", store.ids[0]);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.out, "1 problems"));
    /* what verify calls a problem is a miss for a load: the two agree */
    small_store_open(&store);
    assert_int_equal(small_store_get(&store, 0, SMALL_BLOCKS), 5);
}

/* A block in the middle is purged: those behind it are there, and no lookup reaches them. */
static void test_verify_gap(void **state)
{
    (void)state;
    assert_int_equal(kvt_purge(store.ns[1], &store.keys[1][10], 1), 1);
    verify(0, SMALL_BLOCKS + 39, 0, 29);
    TOOL("verify", store.dir);
    assert_non_null(strstr(run.out, "29 records cannot be reached"));
    TOOL("inspect", store.dir, "--json");
    json_t *root = json_of();
    int64_t missing = 0;
    for (size_t i = 0; i < 2; i++)
        missing += number(json_array_get(json_object_get(root, "namespaces"), i), "unreachable");
    assert_int_equal(missing, 29); /* whoever counts says the same */
    json_decref(root);
    TOOL("stat", store.dir);
    assert_non_null(strstr(run.out, "29 records cannot be reached"));
    TOOL("stat", "--dir", store.dir); /* the same directory, in other words */
    assert_non_null(strstr(run.out, "29 records cannot be reached"));
    TOOL("fsck", store.dir, "--force");
    assert_non_null(strstr(run.out, "29 records cannot be reached"));
}

/* Until the process sleeps by its rate: it has listed the records then, and read the first. Where
 * the kernel does not say what a process waits for, a while does. */
static void wait_until_paced(pid_t pid)
{
    char path[64], where[64];

    snprintf(path, sizeof(path), "/proc/%d/wchan", (int)pid);
    for (int ms = 0; ms < 60000; ms++) {
        FILE *file = fopen(path, "re");
        size_t n = file ? fread(where, 1, sizeof(where) - 1, file) : 0;

        if (file)
            fclose(file);
        where[n] = '\0';
        if (strstr(where, "nanosleep") || (ms >= 700 && strcmp(where, "0") == 0))
            return;
        usleep(1000);
    }
    fail_msg("it does not come to its first pause: %s", where);
}

/* While verify reads slowly beside its owner, the owner purges everything: what was read before was
 * good, what is read later is gone. That is no problem of the store's. Verify is stopped meanwhile:
 * else it might have read all, where the machine is busy. */
static void test_verify_while_it_changes(void **state)
{
    char report[4096];
    int ends[2], status;
    size_t used = 0;
    ssize_t n;

    (void)state;
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(ends[1], STDOUT_FILENO);
        execl(KVT_TOOL, "kvtier", "verify", store.dir, "--rate", "300kB", "--json", (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    wait_until_paced(pid);
    assert_int_equal(kill(pid, SIGSTOP), 0);
    assert_int_equal(kvt_purge(store.ns[0], NULL, 0), SMALL_BLOCKS);
    assert_int_equal(kvt_purge(store.ns[1], NULL, 0), 40);
    assert_int_equal(kill(pid, SIGCONT), 0);
    while ((n = read(ends[0], report + used, sizeof(report) - 1 - used)) > 0)
        used += (size_t)n;
    report[used] = '\0';
    close(ends[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    json_t *json = json_loads(report, 0, NULL);
    if (!WIFEXITED(status) || WEXITSTATUS(status) || !json)
        fail_msg("%x %s", (unsigned)status, report);
    assert_int_equal(number(json, "problem_count"), 0);
    assert_true(number(json, "changed") > 0); /* the bytes were overwritten under it */
    json_decref(json);
    verify(0, 0, 0, 0);
}

/* Names, sizes and times of the files. */
static void snapshot(char *out, size_t room)
{
    tool_run(&run, "/bin/sh",
             (const char *const[]){"sh", "-c", "stat -c '%n %s %y' \"$0\"/*", store.dir, NULL},
             NULL, NULL);
    assert_true(strlen(run.out) < room);
    memcpy(out, run.out, strlen(run.out) + 1);
}

static void test_nothing_changes(void **state)
{
    static char before[8192], after[8192];

    (void)state;
    small_store_close(&store);
    snapshot(before, sizeof(before));
    TOOL("verify", store.dir);
    TOOL("inspect", store.dir);
    TOOL("inspect", store.dir, "0:1");
    snapshot(after, sizeof(after));
    assert_true(strlen(before) > 100);
    assert_string_equal(before, after);
}

static void test_verify_refusals(void **state)
{
    (void)state;
    TOOL("verify", store.base);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "not a kvtier store"));
    TOOL("verify", "/nonexistent/anywhere");
    assert_int_equal(run.code, 1);
    TOOL("verify", store.dir, "--rate", "12");
    assert_int_equal(run.code, 2);
    TOOL("verify", store.dir, "--namespace", "xy");
    assert_int_equal(run.code, 2);
    TOOL("verify");
    assert_int_equal(run.code, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_inspect_root, setup, teardown),
        cmocka_unit_test_setup_teardown(test_inspect_record, setup, teardown),
        cmocka_unit_test_setup_teardown(test_inspect_refusals, setup, teardown),
        cmocka_unit_test_setup_teardown(test_inspect_damaged, setup, teardown),
        cmocka_unit_test_setup_teardown(test_verify_clean, setup, teardown),
        cmocka_unit_test_setup_teardown(test_verify_damage, setup, teardown),
        cmocka_unit_test_setup_teardown(test_verify_gap, setup, teardown),
        cmocka_unit_test_setup_teardown(test_verify_while_it_changes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_nothing_changes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_verify_refusals, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
