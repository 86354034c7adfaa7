/* Goal: the recorder writes what `kvtier replay` reads: one line a prompt, an id for each 512
 * tokens that stands for all before it, equal where prompts begin alike and nowhere else; nothing
 * of a key is in the file; it stays within its bytes, in whole lines; a prompt that is asked about
 * again within a second is not written again; what cannot be written is said once, and costs
 * nothing else. Method: the recorder alone with a clock of the test's, and a live cache (option
 * "trace") whose file goes through the replay's reader and its baseline. Bad places: a directory, a
 * link, a full device.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/trace_log.h"
#include "kvtier/error.h"
#include "replay_lru.h"
#include "replay_trace.h"
#include "support/rig.h"

#define SECOND INT64_C(1000000000)
#define KEYS 512

static char dir[128], path[256], older[260];
static int64_t clock_ns;
static unsigned warnings;
static const uint8_t ns_a[KVT_NS_BYTES] = {1, 2, 3}, ns_b[KVT_NS_BYTES] = {1, 2, 4};

static int64_t now(void *ctx)
{
    (void)ctx;
    return clock_ns;
}

static void count_warning(void *arg, int level, const char *message)
{
    (void)arg;
    (void)message;
    warnings += level <= KVT_LOG_WARN;
}

static struct kvt_trace_log *begin(uint64_t bytes_max)
{
    static const struct kvt_clock clock = {now, NULL};
    static const struct kvt_log log = {count_warning, NULL, KVT_LOG_DEBUG};
    struct kvt_trace_log *trace;
    char error[512] = "";
    clock_ns = 77 * SECOND;
    warnings = 0;
    if (kvt_trace_open(path, bytes_max, &clock, &log, &trace, error, sizeof(error)) != 0)
        fail_msg("%s", error);
    return trace;
}

/* Keys of a chain whose first `common` blocks are those of every other chain. */
static void make_keys(struct kvt_key *keys, size_t n, uint64_t chain, size_t common)
{
    memset(keys, 0, n * sizeof(*keys));
    for (size_t i = 0; i < n; i++) {
        uint64_t word = (i < common ? 7 : chain) * 1000003 + i;
        keys[i].hash_len = 16;
        memcpy(keys[i].hash, &word, sizeof(word));
        memcpy(keys[i].hash + 8, "SECRETS!", 8);
    }
}

static enum kvt_trace_noted note(struct kvt_trace_log *trace, const uint8_t *ns,
                                 const struct kvt_key *keys, size_t n, uint32_t block,
                                 uint64_t tokens)
{
    const struct kvt_trace_prompt prompt = {ns, keys, n, block, tokens};
    return kvt_trace_note(trace, &prompt);
}

static void read_back(struct replay_trace *trace, const char *file)
{
    char error[512];
    if (replay_trace_read(trace, file, error, sizeof(error)) != 0)
        fail_msg("%s", error);
}

static void ids_stand_for_what_is_before_them(void **state)
{
    (void)state;
    struct kvt_key a[KEYS], b[KEYS];
    struct replay_trace back;
    make_keys(a, KEYS, 1, 100);
    make_keys(b, KEYS, 2, 100);
    struct kvt_trace_log *trace = begin(1 << 20);
    assert_int_equal(note(trace, ns_a, a, 70, 16, 1127), KVT_TRACE_WRITTEN);
    clock_ns += 1500000000;
    assert_int_equal(note(trace, ns_a, b, 128, 16, 0), KVT_TRACE_WRITTEN);
    assert_int_equal(note(trace, ns_b, a, 70, 16, 1127), KVT_TRACE_WRITTEN);
    assert_int_equal(note(trace, ns_a, a, 0, 16, 0), KVT_TRACE_REPEATED); /* no prompt */
    kvt_trace_close(trace);
    read_back(&back, path);
    assert_int_equal(back.count, 3);
    assert_int_equal(back.block_tokens, 512);
    const struct replay_request *r = back.requests;
    /* 70 blocks of 16: two of 512 and what is left */
    assert_int_equal(r[0].count, 3);
    assert_int_equal(r[0].tokens, 1127);
    assert_int_equal(r[0].at_ms, 0);
    assert_int_equal(r[1].count, 4);
    assert_int_equal(r[1].tokens, 2048);
    assert_int_equal(r[1].at_ms, 1500);
    assert_true(r[0].ids[0] == r[1].ids[0] && r[0].ids[1] == r[1].ids[1]);
    assert_true(r[0].ids[2] != r[1].ids[2]); /* block 69 here, block 95 there: both common */
    for (size_t i = 0; i < 3; i++)           /* another namespace: nothing in common */
        for (size_t j = 0; j < 3; j++)
            assert_true(r[2].ids[i] != r[0].ids[j]);
    for (size_t i = 0; i < 4; i++)
        assert_true(r[1].ids[i] < UINT64_C(1) << 53);
    replay_trace_free(&back);
}

static void other_blocks_are_told(void **state)
{
    (void)state;
    static const struct {
        uint32_t block, expect, ids;
    } cases[] = {{16, 512, 2}, {48, 528, 5}, {256, 512, 25}, {512, 512, 50}, {1024, 1024, 50}};
    struct kvt_key keys[KEYS];
    struct replay_trace back;
    make_keys(keys, KEYS, 3, 0);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kvt_trace_log *trace = begin(1 << 20);
        assert_int_equal(note(trace, ns_a, keys, 50, cases[i].block, 0), KVT_TRACE_WRITTEN);
        kvt_trace_close(trace);
        read_back(&back, path);
        assert_int_equal(back.block_tokens, cases[i].expect);
        assert_int_equal(back.requests[0].count, cases[i].ids);
        assert_int_equal(back.requests[0].tokens, 50 * cases[i].block);
        replay_trace_free(&back);
    }
}

static size_t file_bytes(const char *file, char *text, size_t room)
{
    FILE *in = fopen(file, "r");
    if (in == NULL)
        return 0;
    size_t n = fread(text, 1, room, in);
    (void)fclose(in);
    return n;
}

static void nothing_of_a_key_is_in_the_file(void **state)
{
    (void)state;
    static char text[1 << 16];
    struct kvt_key keys[KEYS];
    struct replay_trace first, second;
    struct stat st;
    make_keys(keys, KEYS, 4, 0);
    for (int run = 0; run < 2; run++) {
        struct kvt_trace_log *trace = begin(1 << 20);
        assert_int_equal(note(trace, ns_a, keys, KEYS, 16, 0), KVT_TRACE_WRITTEN);
        kvt_trace_close(trace);
        size_t n = file_bytes(path, text, sizeof(text));
        assert_true(n > 100);
        assert_null(memmem(text, n, "SECRETS", 7));
        for (size_t i = 0; i < n; i++) /* letters of the names alone */
            assert_true((unsigned char)text[i] < 127);
        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(st.st_mode & 0777, 0600);
        read_back(run ? &second : &first, path);
    }
    /* the same keys, another salt: no id is the same */
    for (uint32_t i = 0; i < first.requests[0].count; i++)
        assert_true(first.requests[0].ids[i] != second.requests[0].ids[i]);
    replay_trace_free(&first);
    replay_trace_free(&second);
}

static void asked_again_is_not_written_again(void **state)
{
    (void)state;
    struct kvt_key a[64], b[64];
    struct replay_trace back;
    make_keys(a, 64, 5, 0);
    make_keys(b, 64, 6, 0);
    struct kvt_trace_log *trace = begin(1 << 20);
    for (int i = 0; i < 10; i++) {
        assert_int_equal(note(trace, ns_a, a, 64, 16, 0) == KVT_TRACE_WRITTEN, i == 0);
        clock_ns += SECOND / 2; /* the engine keeps asking: one request */
    }
    assert_int_equal(note(trace, ns_a, b, 64, 16, 0), KVT_TRACE_WRITTEN);
    assert_int_equal(note(trace, ns_a, a, 63, 16, 0), KVT_TRACE_WRITTEN);
    clock_ns += SECOND;
    assert_int_equal(note(trace, ns_a, a, 64, 16, 0), KVT_TRACE_WRITTEN);
    kvt_trace_close(trace);
    read_back(&back, path);
    assert_int_equal(back.count, 4);
    replay_trace_free(&back);
}

/* Never more than its bytes, together; what is there is whole, and the newest is there. */
static void the_file_is_bounded(void **state)
{
    (void)state;
    static char text[1 << 16];
    struct kvt_key keys[KEYS];
    struct replay_trace back, before;
    struct stat st;
    struct kvt_trace_log *trace = begin(1 << 15);
    for (uint64_t i = 0; i < 2000; i++) {
        make_keys(keys, KEYS, 100 + i, 0);
        clock_ns += SECOND / 100;
        assert_int_equal(note(trace, ns_a, keys, 64 + i % 400, 16, 0), KVT_TRACE_WRITTEN);
        uint64_t bytes = 0;
        if (stat(path, &st) == 0)
            bytes += (uint64_t)st.st_size;
        if (stat(older, &st) == 0)
            bytes += (uint64_t)st.st_size;
        assert_true(bytes <= 1 << 15);
    }
    kvt_trace_close(trace);
    size_t n = file_bytes(path, text, sizeof(text));
    assert_true(n > 0 && text[n - 1] == '\n');
    read_back(&back, path);
    read_back(&before, older);
    assert_true(back.requests[back.count - 1].at_ms == 20000);
    assert_true(before.requests[before.count - 1].at_ms < back.requests[0].at_ms);
    replay_trace_free(&back);
    replay_trace_free(&before);
    /* a new recording puts the last one aside */
    trace = begin(1 << 15);
    assert_int_equal(note(trace, ns_a, keys, 64, 16, 0), KVT_TRACE_WRITTEN);
    kvt_trace_close(trace);
    read_back(&back, path);
    assert_int_equal(back.count, 1);
    replay_trace_free(&back);
    read_back(&back, older);
    assert_true(back.count > 1);
    replay_trace_free(&back);
}

static void bad_places_are_named(void **state)
{
    (void)state;
    static const struct kvt_clock clock = {now, NULL};
    static const struct kvt_log log = {count_warning, NULL, KVT_LOG_DEBUG};
    struct kvt_trace_log *trace;
    char error[512], bad[256], link[256];
    (void)snprintf(bad, sizeof(bad), "%s/none/trace", dir);
    assert_true(kvt_trace_open(bad, 1 << 20, &clock, &log, &trace, error, sizeof(error)) < 0);
    assert_non_null(strstr(error, bad));
    assert_true(kvt_trace_open(dir, 1 << 20, &clock, &log, &trace, error, sizeof(error)) < 0);
    assert_non_null(strstr(error, "cannot be written: it is a directory; "));
    (void)snprintf(link, sizeof(link), "%s/link", dir);
    assert_int_equal(symlink("/etc/hostname", link), 0);
    assert_true(kvt_trace_open(link, 1 << 20, &clock, &log, &trace, error, sizeof(error)) < 0);
    assert_non_null(strstr(error, "cannot be written: it is a symbolic link"));
    assert_int_equal(unlink(link), 0);
    /* a device that is full: one warning, and the prompts after it are counted as dropped */
    struct kvt_key keys[64];
    make_keys(keys, 64, 9, 0);
    warnings = 0;
    assert_int_equal(
        kvt_trace_open("/dev/full", 1 << 20, &clock, &log, &trace, error, sizeof(error)), 0);
    for (int i = 0; i < 5; i++) {
        clock_ns += 2 * SECOND;
        assert_int_equal(note(trace, ns_a, keys, 64, 16, 0), KVT_TRACE_DROPPED);
    }
    assert_int_equal(warnings, 1);
    kvt_trace_close(trace);
}

/* A live cache: what it found while it ran is what the replay of its trace finds. */
static void a_live_cache_round_trip(void **state)
{
    (void)state;
    struct rig rig;
    struct rig_shape shape = rig_shape_small(256);
    char config[512];
    struct replay_trace back;
    const uint32_t lengths[] = {64, 128, 96, 192, 32, 160};
    uint64_t found = 0;
    (void)snprintf(config, sizeof(config), "dram=64MiB,trace=%s,trace_max=1MiB", path);
    rig_init(&rig, &shape, config, NULL);
    rig_open(&rig);
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        uint64_t seed = i % 2 ? 1 : 5000; /* two conversations in turns */
        uint32_t step = 512 / shape.tokens;
        long run = rig_lookup(&rig, seed, lengths[i]);
        found += (uint64_t)run / step;
        assert_int_equal(rig_store(&rig, seed, lengths[i], 0, NULL), lengths[i]);
    }
    assert_int_equal(rig_stat(&rig, "trace.written"), 6);
    assert_int_equal(rig_stat(&rig, "trace.dropped"), 0);
    rig_close(&rig);
    read_back(&back, path);
    assert_int_equal(back.count, 6);
    assert_int_equal(replay_lru(&back, back.distinct, 0, NULL), found);
    assert_true(found > 0);
    replay_trace_free(&back);
    rig_free(&rig);
    /* what cannot be recorded is not opened */
    rig_init(&rig, &shape, "dram=16MiB,trace=/nowhere/at/all", NULL);
    assert_true(rig_try_open(&rig) < 0);
    assert_non_null(strstr(rig.error, "/nowhere/at/all"));
    rig_free(&rig);
}

static int make_dir(void **state)
{
    (void)state;
    rig_dir_make(dir, sizeof(dir));
    (void)snprintf(path, sizeof(path), "%s/trace.jsonl", dir);
    (void)snprintf(older, sizeof(older), "%s.1", path);
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    rig_dir_remove(dir);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ids_stand_for_what_is_before_them),
        cmocka_unit_test(other_blocks_are_told),
        cmocka_unit_test(nothing_of_a_key_is_in_the_file),
        cmocka_unit_test(asked_again_is_not_written_again),
        cmocka_unit_test(the_file_is_bounded),
        cmocka_unit_test(bad_places_are_named),
        cmocka_unit_test(a_live_cache_round_trip),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
