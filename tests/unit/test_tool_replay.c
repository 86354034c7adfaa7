/* Goal: `kvtier replay` finds in an unlimited store exactly the prefixes that a trace has in
 * common, loses some of them with finite sizes, never more than least recently used would in DRAM,
 * and gains them back with a drive; times, GPU seconds and the answer follow; sweeps and curves
 * have a row for each case; value under a budget finds more than random admission of as many bytes;
 * a trace that is malformed is an error with its line, a number that is none, one with its option;
 * engines that fall behind, times out of order and an interrupt are named.
 * Method: made traces; the ideal is computed here by a plain set; the store itself and the built
 * binary. The seed is printed. KVT_TRACE_DIR names a directory with traces of others: without it
 * the test of these is skipped.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "replay_lru.h"
#include "replay_store.h"
#include "replay_trace.h"
#include "support/rig.h"
#include "support/run_tool.h"

static struct tool_run run;
static char dir[128];

/* An open hash set of ids: another way than the store's. */
struct set {
    uint64_t *slots;
    size_t mask;
};

static int set_add(struct set *set, uint64_t id, int add)
{
    size_t at = (size_t)((id + 1) * 0x9e3779b97f4a7c15u >> 20) & set->mask;
    for (; set->slots[at] != 0; at = (at + 1) & set->mask)
        if (set->slots[at] == id + 1)
            return 1;
    if (add)
        set->slots[at] = id + 1;
    return 0;
}

/* Blocks of leading runs that an earlier request had. */
static uint64_t ideal(const struct replay_trace *trace)
{
    struct set set = {.mask = ((size_t)1 << 20) - 1};
    uint64_t hits = 0;
    set.slots = calloc(set.mask + 1, sizeof(*set.slots));
    assert_non_null(set.slots);
    for (size_t i = 0; i < trace->count; i++) {
        const struct replay_request *request = &trace->requests[i];
        uint32_t run_length = 0;
        while (run_length < request->count && set_add(&set, request->ids[run_length], 0))
            run_length++;
        hits += run_length;
        for (uint32_t j = 0; j < request->count; j++)
            set_add(&set, request->ids[j], 1);
    }
    free(set.slots);
    return hits;
}

struct totals {
    uint64_t dram, disk, written;
};

static struct totals through_the_store(const struct replay_trace *trace, uint64_t dram,
                                       uint64_t disk)
{
    struct replay_store *store;
    struct totals totals = {0, 0, 0};
    assert_int_equal(replay_store_open(dram, disk, NULL, &store), 0);
    for (size_t i = 0; i < trace->count; i++) {
        const struct replay_request *request = &trace->requests[i];
        struct replay_hits hits;
        assert_int_equal(
            replay_store_prompt(store, request->at_ms, request->ids, request->count, &hits), 0);
        assert_true(hits.dram + hits.disk <= request->count);
        totals.dram += hits.dram;
        totals.disk += hits.disk;
    }
    totals.written = replay_store_written(store);
    replay_store_close(store);
    return totals;
}

static void unlimited_finds_all_there_is(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 3; seed++) {
        struct replay_trace trace;
        assert_int_equal(replay_trace_make(&trace, seed, 1500), 0);
        struct totals got = through_the_store(&trace, trace.distinct + 4096, 0);
        uint64_t want = ideal(&trace);
        print_message("           seed %d: %.1f %% of %llu blocks\n", (int)seed,
                      100.0 * (double)want / (double)trace.blocks,
                      (unsigned long long)trace.blocks);
        assert_true(want > trace.blocks / 4 && want < trace.blocks);
        assert_int_equal(got.dram, want);
        assert_int_equal(got.disk, 0);
        assert_int_equal(got.written, 0);
        replay_trace_free(&trace);
    }
}

static void finite_sizes_lose_and_a_drive_helps(void **state)
{
    (void)state;
    struct replay_trace trace;
    assert_int_equal(replay_trace_make(&trace, 7, 1500), 0);
    uint64_t want = ideal(&trace);
    struct totals small = through_the_store(&trace, 1000, 0);
    struct totals more = through_the_store(&trace, 3000, 0);
    struct totals drive = through_the_store(&trace, 1000, 60000);
    assert_true(small.dram < more.dram && more.dram <= want);
    assert_true(drive.disk > 0 && drive.written > 0);
    assert_true(drive.dram + drive.disk > more.dram);
    assert_true(drive.dram + drive.disk <= want);
    /* the same trace and sizes: the same answer */
    struct totals again = through_the_store(&trace, 1000, 60000);
    assert_memory_equal(&drive, &again, sizeof(drive));
    replay_trace_free(&trace);
}

/* At no size of DRAM does the store find noticeably less than the baseline, although sessions of a
 * made trace come back at random, which nothing foresees; together it finds as much. */
static void no_worse_than_least_recently_used(void **state)
{
    (void)state;
    static const double shares[] = {0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1};
    uint64_t ours = 0, lru = 0;
    for (uint64_t seed = 11; seed <= 13; seed++) {
        struct replay_trace trace;
        assert_int_equal(replay_trace_make(&trace, seed, 2500), 0);
        for (size_t i = 0; i < sizeof(shares) / sizeof(shares[0]); i++) {
            uint64_t blocks = (uint64_t)(shares[i] * (double)trace.distinct);
            uint64_t got = through_the_store(&trace, blocks, 0).dram;
            int64_t base = replay_lru(&trace, blocks, 0, NULL);
            print_message(
                "           seed %d, %3.0f %% of the blocks: %.2f %%, least recently used "
                "%.2f %%\n",
                (int)seed, 100 * shares[i], 100.0 * (double)got / (double)trace.blocks,
                100.0 * (double)base / (double)trace.blocks);
            assert_true(base > 0 && 100 * got >= 98 * (uint64_t)base);
            ours += got;
            lru += (uint64_t)base;
        }
        replay_trace_free(&trace);
    }
    print_message("           together %.4f of it\n", (double)ours / (double)lru);
    assert_true(100 * ours >= 99 * lru);
}

static void write_trace(const struct replay_trace *trace, const char *path)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    for (size_t i = 0; i < trace->count; i++) {
        const struct replay_request *request = &trace->requests[i];
        fprintf(file, "{\"timestamp\": %lld, \"input_length\": %u, \"hash_ids\": [",
                (long long)request->at_ms, request->tokens);
        for (uint32_t j = 0; j < request->count; j++)
            fprintf(file, "%s%llu", j ? ", " : "", (unsigned long long)request->ids[j]);
        fprintf(file, "]}\n");
    }
    assert_int_equal(fclose(file), 0);
}

static double number(const json_t *document, const char *object, const char *key)
{
    const json_t *value = json_object_get(json_object_get(document, object), key);
    assert_true(json_is_number(value));
    return json_number_value(value);
}

static json_t *replay(const char *trace, const char *dram, const char *disk)
{
    const char *argv[] = {"kvtier", "replay", "--trace", trace,
                          "--dram", dram,     "--json",  disk ? "--disk" : NULL,
                          disk,     NULL};
    tool_run(&run, KVT_TOOL, argv, NULL, NULL);
    if (run.code != 0)
        fail_msg("%s", run.err);
    json_t *document = json_loads(run.out, 0, NULL);
    assert_non_null(document);
    return document;
}

static double ttft(const json_t *document, const char *way)
{
    return number(json_object_get(document, "ttft_ms"), way, "mean");
}

static void the_tool_says_the_same(void **state)
{
    (void)state;
    char path[256];
    struct replay_trace trace, back;
    (void)snprintf(path, sizeof(path), "%s/trace.jsonl", dir);
    assert_int_equal(replay_trace_make(&trace, 5, 800), 0);
    write_trace(&trace, path);
    assert_int_equal(replay_trace_read(&back, path, dir, 0), 0);
    assert_int_equal(back.count, trace.count);
    assert_int_equal(back.distinct, trace.distinct);
    json_t *document = replay(path, "unlimited", NULL);
    assert_int_equal(json_integer_value(json_object_get(document, "requests")), 800);
    assert_true(fabs(number(document, "hit_ratio", "total") -
                     (double)ideal(&trace) / (double)trace.blocks) < 1e-8); /* as it is printed */
    assert_true(ttft(document, "kvtier") < ttft(document, "recompute"));
    assert_true(ttft(document, "kvtier") <= ttft(document, "always_load"));
    assert_true(json_number_value(json_object_get(document, "gpu_seconds_saved")) > 0);
    json_decref(document);
    document = replay(path, "40GB", "4TB");
    assert_true(number(document, "hit_ratio", "disk") > 0);
    assert_true(json_number_value(json_object_get(document, "bytes_written")) > 0);
    assert_true(json_number_value(json_object_get(document, "dwpd")) > 0);
    json_decref(document);
    replay_trace_free(&trace);
    replay_trace_free(&back);
}

static json_t *json_of(const char *const *argv)
{
    tool_run(&run, KVT_TOOL, argv, NULL, NULL);
    if (run.code != 0)
        fail_msg("%s", run.err);
    json_t *document = json_loads(run.out, 0, NULL);
    assert_non_null(document);
    return document;
}

static double row_number(const json_t *rows, size_t i, const char *object, const char *key)
{
    const json_t *row = json_array_get(rows, i);
    const json_t *value = json_object_get(object ? json_object_get(row, object) : row, key);
    assert_true(json_is_number(value));
    return json_number_value(value);
}

/* Every pair of sizes has its row; more room, more hits; the answer names a row, or none. */
static void sweeps_have_a_row_for_each_size(void **state)
{
    (void)state;
    const char *lists[] = {"kvtier",     "replay", "--generate",   "1200",   "--dram",
                           "50GB,400GB", "--disk", "none,1TB,6TB", "--json", NULL};
    json_t *document = json_of(lists);
    const json_t *rows = json_object_get(document, "rows");
    assert_int_equal(json_array_size(rows), 6);
    for (size_t i = 0; i < 6; i++) {
        double total = row_number(rows, i, "hit_ratio", "total");
        assert_true(row_number(rows, i, "hit_ratio", "lru") > 0);
        assert_true(i % 3 == 0 || total >= row_number(rows, i - 1, "hit_ratio", "total"));
        assert_true((i % 3 == 0) == (row_number(rows, i, NULL, "bytes_written") == 0));
    }
    const json_t *answer = json_object_get(document, "answer");
    assert_true(json_is_true(json_object_get(answer, "pays")));
    assert_true(json_integer_value(json_object_get(answer, "row")) < 6);
    assert_non_null(strstr(json_string_value(json_object_get(answer, "text")), "would have paid"));
    json_decref(document);
    const char *sweep[] = {"kvtier", "replay", "--generate", "700", "--sweep", NULL};
    tool_run(&run, KVT_TOOL, sweep, NULL, NULL);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "It would have paid"));
    /* a drive that is slower than computing, and an engine for nothing: it would not have */
    const char *never[] = {"kvtier",        "replay",      "--generate", "300",    "--dram",
                           "1GB",           "--disk-rate", "1MB",        "--disk", "2TB",
                           "--engine-hour", "0.001",       "--json",     NULL};
    document = json_of(never);
    answer = json_object_get(document, "answer");
    assert_false(json_is_true(json_object_get(answer, "pays")));
    assert_true(json_is_null(json_object_get(answer, "row")));
    json_decref(document);
}

/* The same trace, sizes and options: the same output, to the byte. A disk that holds all there is
 * finds all there is, whatever admission leaves out once it is full. */
static void it_is_deterministic_and_what_fits_is_found(void **state)
{
    (void)state;
    static char before[sizeof(run.out)];
    struct replay_trace trace;
    char all[32];
    assert_int_equal(replay_trace_make(&trace, 20261129, 700), 0); /* as --generate does */
    (void)snprintf(all, sizeof(all), "%llu", (unsigned long long)trace.distinct * 44040192u);
    const char *argv[] = {
        "kvtier", "replay", "--generate", "700",         "--dram",
        "20GB",   "--disk", "500GB",      "--admission", "all,continued,value,random",
        "--json", NULL};
    json_decref(json_of(argv));
    memcpy(before, run.out, sizeof(before));
    json_decref(json_of(argv));
    assert_string_equal(run.out, before);
    const char *fits[] = {"kvtier", "replay", "--generate",  "700",           "--dram", "20GB",
                          "--disk", all,      "--admission", "all,continued", "--json", NULL};
    json_t *document = json_of(fits);
    const json_t *rows = json_object_get(document, "rows");
    double want = (double)ideal(&trace) / (double)trace.blocks;
    assert_int_equal(json_array_size(rows), 2);
    for (size_t i = 0; i < 2; i++) {
        assert_true(fabs(row_number(rows, i, "hit_ratio", "total") - want) < 1e-8);
        assert_true(fabs(row_number(rows, i, "hit_ratio", "lru") - want) < 1e-8);
    }
    json_decref(document);
    replay_trace_free(&trace);
}

/* What a live cache would be asked for: without the block that a prompt's tokens do not fill. */
static void whole_blocks_leave_unfinished_ones_out(void **state)
{
    (void)state;
    struct replay_trace trace;
    assert_int_equal(replay_trace_make(&trace, 5, 400), 0);
    uint64_t blocks = trace.blocks;
    uint32_t last = trace.requests[3].count;
    assert_int_equal(replay_trace_whole_blocks(&trace), 0);
    assert_int_equal(trace.blocks, blocks - 400); /* made prompts end 100 tokens early */
    assert_int_equal(trace.requests[3].count, last - 1);
    assert_int_equal(replay_trace_whole_blocks(&trace), 0);
    assert_int_equal(trace.blocks, blocks - 400);
    replay_trace_free(&trace);
}

/* Time passes for the store between two prompts: what waits for a quiet moment, or for half a
 * minute, is written although nothing more is asked of it. */
static void the_store_works_between_prompts(void **state)
{
    static const int policies[] = {KVT_WRITE_EVICT, KVT_WRITE_IDLE};
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        struct replay_admission admission = {.write = policies[i]};
        struct replay_store *store;
        struct replay_hits hits;
        uint64_t ids[] = {1, 2, 3, 4};
        assert_int_equal(replay_store_open(4096, 60000, &admission, &store), 0);
        assert_int_equal(replay_store_prompt(store, 0, ids, 4, &hits), 0);
        assert_int_equal(replay_store_written(store), 0);
        ids[0] = 5;
        assert_int_equal(replay_store_prompt(store, 3000, ids, 1, &hits), 0);
        assert_int_equal(replay_store_written(store), policies[i] == KVT_WRITE_IDLE ? 4 : 0);
        replay_store_close(store);
    }
}

static void value_beats_random_of_as_many_bytes(void **state)
{
    (void)state;
    const char *argv[] = {"kvtier", "replay", "--generate", "5000",   "--dram", "20GB",
                          "--disk", "6TB",    "--curve",    "--json", NULL};
    json_t *document = json_of(argv);
    const json_t *rows = json_object_get(document, "rows");
    double all = row_number(rows, 0, NULL, "bytes_written"), half = 0, hits = 0, random = 0;
    size_t last = json_array_size(rows) - 1;
    assert_string_equal(json_string_value(json_object_get(json_array_get(rows, last), "admission")),
                        "continued");
    /* of as many bytes as second uses take, value finds no less than they do */
    assert_string_equal(json_string_value(json_object_get(json_array_get(rows, 1), "admission")),
                        "second_use");
    assert_string_equal(json_string_value(json_object_get(json_array_get(rows, 2), "admission")),
                        "value");
    assert_true(row_number(rows, 2, NULL, "bytes_written") <=
                1.03 * row_number(rows, 1, NULL, "bytes_written"));
    assert_true(row_number(rows, 2, "hit_ratio", "total") >=
                row_number(rows, 1, "hit_ratio", "total") - 0.001);
    for (size_t i = 1; i < json_array_size(rows); i++) {
        const char *name = json_string_value(json_object_get(json_array_get(rows, i), "admission"));
        double written = row_number(rows, i, NULL, "bytes_written");
        assert_true(written <= 1.1 * all);
        if (!strcmp(name, "value") && written <= 0.55 * all && written > half) {
            half = written;
            hits = row_number(rows, i, "hit_ratio", "total");
        }
    }
    for (size_t i = 1; i < json_array_size(rows); i++) {
        const char *name = json_string_value(json_object_get(json_array_get(rows, i), "admission"));
        double found = row_number(rows, i, "hit_ratio", "total");
        if (!strcmp(name, "random") && row_number(rows, i, NULL, "bytes_written") <= half &&
            found > random)
            random = found;
    }
    print_message("           half of the bytes: %.1f %% by value, %.1f %% at random\n", 100 * hits,
                  100 * random);
    assert_true(half > 0 && hits > random);
    json_decref(document);
}

static void numbers_that_are_none_are_errors(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"--dram", "much"},        {"--dram", "-5GB"},      {"--dram", "0"},
        {"--dram", "1GB,,2GB"},    {"--disk", "nan"},       {"--disk", "unlimited"},
        {"--prefill", "0"},        {"--prefill", "-3"},     {"--prefill", "nan"},
        {"--dram-rate", "0"},      {"--disk-rate", "NaN"},  {"--priors", "0"},
        {"--priors", "nan"},       {"--priors", "-4"},      {"--priors", "inf"},
        {"--budget", "0"},         {"--budget", "1e999"},   {"--share", "101"},
        {"--engine-hour", "-1"},   {"--years", ""},         {"--engines", "0"},
        {"--jitter", "100"},       {"--admission", "some"}, {"--generate", "0"},
        {"--model", "lama-3-70b"}, {"--dram", "1"}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        const char *argv[] = {"kvtier", "replay", "--generate", "10", bad[i][0], bad[i][1], NULL};
        tool_run(&run, KVT_TOOL, argv, NULL, NULL);
        if (run.code != 1 && run.code != 2)
            fail_msg("%s %s: code %d", bad[i][0], bad[i][1], run.code);
        if (!strstr(run.err, bad[i][0] + 2))
            fail_msg("%s %s: '%s'", bad[i][0], bad[i][1], run.err);
    }
    const char *near[] = {"kvtier", "replay", "--generate", "10", "--admission", "valu", NULL};
    tool_run(&run, KVT_TOOL, near, NULL, NULL);
    assert_non_null(strstr(run.err, "did you mean 'value'"));
    const char *tiny[] = {"kvtier", "replay", "--generate", "10", "--disk", "1MB", NULL};
    tool_run(&run, KVT_TOOL, tiny, NULL, NULL);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "--disk"));
    const char *curve[] = {"kvtier", "replay", "--generate", "10", "--curve", NULL};
    tool_run(&run, KVT_TOOL, curve, NULL, NULL);
    assert_int_equal(run.code, 2);
}

static void bad_traces_are_errors(void **state)
{
    (void)state;
    static const char good[] = "{\"timestamp\": 5, \"input_length\": 600, \"hash_ids\": [1, 2]}\n";
    static const char *const bad[] = {
        "{\"timestamp\": 6, \"input_length\": 600, \"hash_ids\": [1, 2}\n",
        "[]\n",
        "{\"input_length\": 600, \"hash_ids\": [1]}\n",
        "{\"timestamp\": -6, \"input_length\": 600, \"hash_ids\": [1]}\n",
        "{\"timestamp\": 9223372036854775807, \"input_length\": 600, \"hash_ids\": [1]}\n",
        "{\"timestamp\": 6, \"input_length\": 0, \"hash_ids\": [1]}\n",
        "{\"timestamp\": 6, \"input_length\": 4611686018427387904, \"hash_ids\": [1]}\n",
        "{\"timestamp\": 6, \"input_length\": 600, \"hash_ids\": 7}\n",
        "{\"timestamp\": 6, \"input_length\": 600, \"hash_ids\": [\"x\"]}\n",
        "{\"timestamp\": 6, \"input_length\": 600, \"hash_ids\": [1], \"block_tokens\": 0}\n",
        "{\"timestamp\": 6, \"input_length\": 600, \"hash_ids\": [1], \"block_tokens\": 256}\n",
    };
    char path[256], error[512];
    struct replay_trace trace;
    (void)snprintf(path, sizeof(path), "%s/bad.jsonl", dir);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        FILE *file = fopen(path, "w");
        assert_non_null(file);
        fprintf(file, "%s\n%s", good, bad[i]);
        assert_int_equal(fclose(file), 0);
        assert_int_equal(replay_trace_read(&trace, path, error, sizeof(error)), -1);
        assert_non_null(strstr(error, "line 3"));
    }
    assert_int_equal(replay_trace_read(&trace, "/nowhere", error, sizeof(error)), -1);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    for (int i = 0; i < 3 << 20; i++)
        fputc('7', file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(replay_trace_read(&trace, path, error, sizeof(error)), -1);
    /* out of order: taken at once, and told */
    file = fopen(path, "w");
    assert_non_null(file);
    fprintf(file, "%s{\"timestamp\": 1, \"input_length\": 600, \"hash_ids\": [1, 2]}\n", good);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(replay_trace_read(&trace, path, error, sizeof(error)), 0);
    assert_int_equal(trace.reordered, 1);
    assert_int_equal(trace.requests[1].at_ms, 5);
    replay_trace_free(&trace);
}

static void write_text(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

/* What a line says is true of it: not only that it is refused. */
static void what_is_wrong_is_said_truly(void **state)
{
    (void)state;
    static const struct {
        const char *line, *says;
    } bad[] = {{"{\"timestamp\": 6, \"input_length\": 600, \"hash_ids\": [9223372036854775808]}",
                "beyond 2^63 - 1; a hash_id of 64 bits"},
               {"{\"timestamp\": 12.5, \"input_length\": 600, \"hash_ids\": [1]}",
                "whole number of milliseconds from 0 to"},
               {"{\"timestamp\": 1000000000000000000, \"input_length\": 600, \"hash_ids\": [1]}",
                "whole number of milliseconds from 0 to 4611686018427"},
               {"{\"input_length\": 600, \"hash_ids\": [1]}", "has no timestamp"},
               {"{\"timestamp\": 6, \"input_length\": 512, \"hash_ids\": [1, 2]}",
                "more hash_ids than its input_length has blocks"},
               {"[]", "is no JSON object"}};
    char path[256], error[512];
    struct replay_trace trace;
    (void)snprintf(path, sizeof(path), "%s/said.jsonl", dir);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        write_text(path, bad[i].line);
        assert_int_equal(replay_trace_read(&trace, path, error, sizeof(error)), -1);
        if (!strstr(error, bad[i].says))
            fail_msg("%s: %s", bad[i].line, error);
    }
    /* a mark of an editor; a prompt that was asked about in part; the greatest id */
    write_text(path, "\xef\xbb\xbf{\"timestamp\": 6, \"input_length\": 600, \"hash_ids\": [1, 2]}\n"
                     "{\"timestamp\": 7, \"input_length\": 5000, \"hash_ids\": [1, "
                     "9223372036854775807]}\n");
    assert_int_equal(replay_trace_read(&trace, path, error, sizeof(error)), 0);
    assert_int_equal(trace.count, 2);
    assert_int_equal(trace.short_chains, 1);
    replay_trace_free(&trace);
    const char *small[] = {"kvtier", "replay", "--generate", "10", "--dram", "1", NULL};
    tool_run(&run, KVT_TOOL, small, NULL, NULL);
    assert_non_null(strstr(run.err, "--dram: too small"));
    assert_null(strstr(run.err, "--disk"));
    const char *model[] = {"kvtier", "replay", "--generate", "10", "--model", "nosuch", NULL};
    tool_run(&run, KVT_TOOL, model, NULL, NULL);
    assert_non_null(strstr(run.err, "'kvtier plan --config FILE'"));
}

/* Equal prompts of 50 blocks, `step_ms` apart; the last one `back_ms` earlier. */
static void write_equal(const char *path, size_t count, int64_t step_ms, int64_t back_ms)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    for (size_t i = 0; i < count; i++) {
        int64_t at = (int64_t)i * step_ms - (i == count - 1 ? back_ms : 0);
        fprintf(file, "{\"timestamp\": %lld, \"input_length\": 25600, \"hash_ids\": [",
                (long long)at);
        for (int j = 0; j < 50; j++)
            fprintf(file, "%s%d", j ? ", " : "", j + 1);
        fprintf(file, "]}\n");
    }
    assert_int_equal(fclose(file), 0);
}

static json_t *one_row(const char *path, const char *engines)
{
    const char *argv[] = {"kvtier",   "replay", "--trace",   path,    "--dram", "50GB",
                          "--jitter", "0",      "--engines", engines, "--json", NULL};
    return json_of(argv);
}

static const char *answer_of(const json_t *document)
{
    const char *text =
        json_string_value(json_object_get(json_object_get(document, "answer"), "text"));
    assert_non_null(text);
    return text;
}

/* One engine begins the second of two equal prompts when the first has been computed. Of two times
 * p50 is their mean. */
static void one_engine_finds_what_it_has_computed(void **state)
{
    (void)state;
    char path[256];
    (void)snprintf(path, sizeof(path), "%s/two.jsonl", dir);
    write_equal(path, 2, 1, 0);
    json_t *document = one_row(path, "1");
    assert_true(number(document, "gpu_seconds", "kvtier") <
                0.6 * number(document, "gpu_seconds", "recompute"));
    assert_true(json_number_value(json_object_get(document, "still_computed")) == 0);
    assert_non_null(strstr(answer_of(document), "It would have paid"));
    assert_null(strstr(answer_of(document), "fall behind")); /* two prompts are no load */
    const json_t *ttft = json_object_get(document, "ttft_ms");
    assert_true(fabs(number(ttft, "kvtier", "p50") - number(ttft, "kvtier", "mean")) < 1e-6);
    json_decref(document);
    document = one_row(path, "2");
    assert_true(json_number_value(json_object_get(document, "still_computed")) == 0.5);
    json_decref(document);
}

static void what_makes_an_answer_worthless_is_named(void **state)
{
    (void)state;
    char path[256];
    (void)snprintf(path, sizeof(path), "%s/load.jsonl", dir);
    write_equal(path, 400, 10000, 0);
    json_t *document = one_row(path, "1");
    assert_null(strstr(answer_of(document), "fall behind"));
    assert_false(json_is_true(json_object_get(json_object_get(document, "answer"), "overloaded")));
    json_decref(document);
    /* different ones, of which one engine has 2 s of work every 300 ms */
    const char *argv[] = {"kvtier",    "replay", "--generate", "700", "--dram", "50GB",
                          "--prefill", "1000",   "--engines",  "1",   "--json", NULL};
    document = json_of(argv);
    assert_non_null(strstr(answer_of(document), "The engines fall behind"));
    assert_non_null(strstr(answer_of(document), "--engines"));
    assert_true(json_is_true(json_object_get(json_object_get(document, "answer"), "overloaded")));
    json_decref(document);
    write_equal(path, 20, 10000, 50000);
    document = one_row(path, "1");
    assert_non_null(strstr(answer_of(document), "out of order"));
    json_decref(document);
    const char *text[] = {"kvtier", "replay", "--trace", path, NULL};
    tool_run(&run, KVT_TOOL, text, NULL, NULL);
    assert_non_null(strstr(run.out, "note: 1 requests have a timestamp before"));
}

/* Beside two lists of both sizes there is one of their sum; rows of one policy are told apart. */
static void both_baselines_are_there(void **state)
{
    (void)state;
    struct replay_trace trace;
    const char *argv[] = {"kvtier", "replay", "--generate", "1200",   "--dram",
                          "60GB",   "--disk", "80GB",       "--json", NULL};
    const uint64_t block = 44040192, dram = 60000000000 / block, disk = 80000000000 / block;
    assert_int_equal(replay_trace_make(&trace, 20261129, 1200), 0); /* as --generate does */
    json_t *document = json_of(argv);
    double larger = (double)replay_lru(&trace, 0, disk, NULL) / (double)trace.blocks;
    double sum = (double)replay_lru(&trace, 0, dram + disk, NULL) / (double)trace.blocks;
    assert_true(fabs(number(document, "hit_ratio", "lru") - larger) < 1e-8);
    assert_true(fabs(number(document, "hit_ratio", "lru_sum") - sum) < 1e-8);
    assert_true(sum > larger);
    json_decref(document);
    replay_trace_free(&trace);
    const char *curve[] = {"kvtier", "replay", "--generate", "700",     "--dram",
                           "20GB",   "--disk", "500GB",      "--curve", NULL};
    tool_run(&run, KVT_TOOL, curve, NULL, NULL);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "B/day"));
    assert_non_null(strstr(run.out, "sum: hits of one list"));
}

/* Within any of its parts; 130: before it began. How long it takes is nobody's promise here. */
static void an_interrupt_is_an_interrupt(void **state)
{
    (void)state;
    static const char *const after[] = {"0.5", "2", "2"};
    static const char *const requests[] = {"1000000", "1000000", "20000"};
    for (size_t i = 0; i < 3; i++) {
        const char *argv[] = {"sh",
                              "-c",
                              "timeout --preserve-status -s INT $1 \"$0\" replay "
                              "--generate $2 --sweep >/dev/null; echo code $?",
                              KVT_TOOL,
                              after[i],
                              requests[i],
                              NULL};
        tool_run(&run, "/bin/sh", argv, NULL, NULL);
        if (!strcmp(run.out, "code 130\n"))
            continue;
        assert_string_equal(run.out, "code 1\n");
        assert_non_null(strstr(run.err, "interrupted"));
        assert_null(strstr(run.err, "the request was cancelled"));
        assert_null(strstr(run.err, "memory"));
    }
}

/* Sizes of the sweep, as shares of the trace's different blocks. */
static void sweep_published(const struct replay_trace *trace)
{
    static const double shares[] = {0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1};
    for (size_t i = 0; i < sizeof(shares) / sizeof(shares[0]); i++) {
        uint64_t blocks = (uint64_t)(shares[i] * (double)trace->distinct);
        uint64_t got = through_the_store(trace, blocks, 0).dram;
        int64_t base = replay_lru(trace, blocks, 0, NULL);
        print_message("           %3.0f %%: %.2f %%, least recently used %.2f %%\n",
                      100 * shares[i], 100.0 * (double)got / (double)trace->blocks,
                      100.0 * (double)base / (double)trace->blocks);
        assert_true(base >= 0 && got >= (uint64_t)base);
    }
}

/* Published traces, where somebody has them. */
static void published_traces(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        double ratio;
    } traces[] = {{"mooncake_conversation", 0.366}, {"mooncake_synthetic", 0.640}};
    const char *from = getenv("KVT_TRACE_DIR");
    char path[512], error[512];
    for (size_t i = 0; from != NULL && i < 2; i++) {
        struct replay_trace trace;
        (void)snprintf(path, sizeof(path), "%s/%s.jsonl", from, traces[i].name);
        int64_t start = rig_now_ns();
        json_t *document = replay(path, "unlimited", NULL);
        double took = (double)(rig_now_ns() - start) * 1e-9;
        double total = number(document, "hit_ratio", "total");
        json_decref(document);
        assert_int_equal(replay_trace_read(&trace, path, error, sizeof(error)), 0);
        print_message("           %s: %.4f in %.1f s\n", traces[i].name, total, took);
        assert_true(fabs(total - traces[i].ratio) < 0.0006);
        assert_true(fabs(total - (double)ideal(&trace) / (double)trace.blocks) < 1e-8);
        assert_true(took < 20);
        sweep_published(&trace);
        replay_trace_free(&trace);
    }
    if (from == NULL) {
        print_message("           KVT_TRACE_DIR names no directory of published traces\n");
        skip();
    }
}

static int make_dir(void **state)
{
    (void)state;
    rig_dir_make(dir, sizeof(dir));
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
        cmocka_unit_test(unlimited_finds_all_there_is),
        cmocka_unit_test(finite_sizes_lose_and_a_drive_helps),
        cmocka_unit_test(no_worse_than_least_recently_used),
        cmocka_unit_test(the_tool_says_the_same),
        cmocka_unit_test(sweeps_have_a_row_for_each_size),
        cmocka_unit_test(it_is_deterministic_and_what_fits_is_found),
        cmocka_unit_test(whole_blocks_leave_unfinished_ones_out),
        cmocka_unit_test(the_store_works_between_prompts),
        cmocka_unit_test(value_beats_random_of_as_many_bytes),
        cmocka_unit_test(numbers_that_are_none_are_errors),
        cmocka_unit_test(bad_traces_are_errors),
        cmocka_unit_test(what_is_wrong_is_said_truly),
        cmocka_unit_test(one_engine_finds_what_it_has_computed),
        cmocka_unit_test(what_makes_an_answer_worthless_is_named),
        cmocka_unit_test(both_baselines_are_there),
        cmocka_unit_test(an_interrupt_is_an_interrupt),
        cmocka_unit_test(published_traces),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
