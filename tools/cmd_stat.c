/* kvtier stat: what a store directory holds, who owns it, its last counters, every option; or what
 * a running kvtierd does, and for whom (stat_daemon.c).
 *
 * Read-only: recovers the log without taking its lock, so it works beside a running owner; what the
 * owner writes meanwhile may or may not be counted.
 * Threads: one.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "cli.h"
#include "cli_config.h"
#include "client/host.h"
#include "commands.h"
#include "kvtier/kvtier.h"
#include "stat_daemon.h"
#include "stat_verdict.h"
#include "stats_file.h"
#include "store_dir.h"

/* Records are sorted by key, and a key starts with its namespace: one pass makes the list. Bytes of
 * all, records without the one before them, and the length of a block in tokens (0: the namespaces
 * differ, or none has two blocks in a row) go to facts. */
static json_t *list_namespaces(const struct kvt_dir *dir, struct kvt_stat_facts *facts)
{
    uint8_t *cut = calloc(dir->record_count + 1, 1);
    json_t *list = json_array();
    bool first = true;

    for (size_t i = 0; i < dir->record_count;) {
        const uint8_t *ns = dir->records[i].key.ns;
        uint64_t bytes = 0, records = 0;
        uint32_t block_tokens = 0;
        char id[2 * KVT_NS_BYTES + 1];
        for (; i < dir->record_count && !memcmp(dir->records[i].key.ns, ns, KVT_NS_BYTES); i++) {
            const struct kvt_dir_record *record = &dir->records[i];
            size_t parent = kvt_dir_parent(dir, record);
            bytes += (uint64_t)record->pages * KVT_PAGE_BYTES;
            records++;
            if (!block_tokens && parent != SIZE_MAX)
                block_tokens = record->first_pos - dir->records[parent].first_pos;
        }
        kvt_dir_ns_text(ns, id);
        json_array_append_new(list, json_pack("{s:s, s:I, s:I, s:I}", "id", id, "records",
                                              (json_int_t)records, "bytes", (json_int_t)bytes,
                                              "block_tokens", (json_int_t)block_tokens));
        facts->bytes += bytes;
        facts->block_tokens = first || facts->block_tokens == block_tokens ? block_tokens : 0;
        first = false;
    }
    size_t unreachable = cut ? kvt_dir_cut(dir, cut) : SIZE_MAX;
    facts->unreachable = unreachable == SIZE_MAX ? 0 : unreachable;
    free(cut);
    return list;
}

/* Counters that are not zero (all: every one), each with what it counts. */
static void print_counters(const json_t *counters, int all)
{
    const char *name;
    json_t *value;
    size_t zeros = 0;

    if (!counters)
        return;
    printf("numbers\n");
    json_object_foreach((json_t *)counters, name, value)
    {
        const char *help = kvt_stat_help(name);
        if (!all && json_is_integer(value) && !json_integer_value(value)) {
            zeros++;
            continue;
        }
        if (json_is_string(value))
            printf("  %-26s %s\n", name, json_string_value(value));
        else
            printf("  %-26s %14" JSON_INTEGER_FORMAT "  %s\n", name, json_integer_value(value),
                   help ? help : "");
    }
    if (zeros)
        printf("  and %zu that are zero: --all\n", zeros);
}

static uint64_t number(const json_t *store, const char *name)
{
    return (uint64_t)json_integer_value(json_object_get(store, name));
}

/* Who wrote the numbers, when, and whether it is still there. */
static void print_writer(const json_t *store)
{
    const json_t *counters = json_object_get(store, "counters");
    int64_t pid = (int64_t)kvt_stats_value(counters, "writer.pid");
    int64_t owner = (int64_t)number(store, "owner_pid");

    if (!counters)
        return;
    printf("  numbers     written %.0f s ago", json_real_value(json_object_get(store, "age_s")));
    if (pid)
        printf(" by process %" PRId64 ", which %s", pid,
               pid == owner ? "owns the directory" : "no longer owns it");
    putchar('\n');
}

static void print_store(const char *path, const json_t *store, int all)
{
    char used[32], max[32], held[32];
    json_t *list = json_object_get(store, "namespaces"), *ns;
    size_t i;

    printf("%s\n  owner       ", path);
    if (number(store, "owner_pid"))
        printf("process %" PRIu64 "\n", number(store, "owner_pid"));
    else
        printf("nobody\n");
    print_writer(store);
    printf("  segments    %" PRIu64 "\n  records     %" PRIu64 ", %s\n", number(store, "segments"),
           number(store, "records"), kvt_human_bytes(number(store, "bytes"), held));
    printf("  files       %s of %s", kvt_human_bytes(number(store, "bytes_used"), used),
           kvt_human_bytes(number(store, "bytes_max"), max));
    if (json_object_get(store, "free_bytes"))
        printf("; %s free on the file system", kvt_human_bytes(number(store, "free_bytes"), held));
    putchar('\n');
    json_array_foreach(list, i, ns)
    {
        printf("  namespace   %s  %" PRIu64 " records, %s",
               json_string_value(json_object_get(ns, "id")), number(ns, "records"),
               kvt_human_bytes(number(ns, "bytes"), held));
        if (number(ns, "block_tokens"))
            printf(", blocks of %" PRIu64 " tokens", number(ns, "block_tokens"));
        putchar('\n');
    }
    kvt_stat_verdicts_print(json_object_get(store, "verdicts"));
    print_counters(json_object_get(store, "counters"), all);
}

/* Describe the store as JSON: the one source of both outputs. NULL: error holds the sentence. */
static json_t *describe(const char *path, char *error, size_t error_len)
{
    struct kvt_dir dir;
    struct kvt_l2_stats stats;
    struct kvt_stat_facts facts = {.path = path, .owner_pid = kvt_dir_owner(path)};
    struct kvt_root_room room;
    double age_s = 0;

    if (kvt_dir_open(path, 0, &dir, error, error_len))
        return NULL;
    kvt_l2_stats(dir.l2, &stats);
    json_t *namespaces = list_namespaces(&dir, &facts);
    json_t *counters = kvt_stats_read(path, &age_s);
    facts.counters = counters;
    facts.records = dir.record_count;
    facts.bytes_used = stats.bytes_used;
    facts.bytes_max = dir.superblock.cap_bytes;
    facts.recovered_bad = stats.recovered_bad;
    json_t *store = json_pack(
        "{s:s, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o}", "dir", path, "owner_pid",
        facts.owner_pid ? json_integer(facts.owner_pid) : json_null(), "segments",
        (json_int_t)stats.segments_live, "records", (json_int_t)dir.record_count, "bytes",
        (json_int_t)facts.bytes, "bytes_used", (json_int_t)stats.bytes_used, "bytes_max",
        (json_int_t)dir.superblock.cap_bytes, "recovered_bad", (json_int_t)stats.recovered_bad,
        "namespaces", namespaces, "verdicts", kvt_stat_verdicts(&facts));
    if (!kvt_root_room(path, facts.bytes_max, &room))
        json_object_set_new(store, "free_bytes", json_integer((json_int_t)room.free_bytes));
    if (counters) {
        json_object_set_new(store, "age_s", json_real(age_s));
        json_object_set_new(store, "counters", counters);
    }
    kvt_dir_close(&dir);
    return store;
}

int kvt_cmd_stat(int argc, char **argv)
{
    int json = 0, effective = 0, all = 0;
    const char *config_text = NULL, *path = NULL, *named = NULL;
    char error[512];
    size_t words = 0;
    const struct kvt_cli_option options[] = {
        {.name = "all", .help = "list the numbers that are zero, too", .flag = &all},
        {.name = "effective", .help = "list every option with its value", .flag = &effective},
        {.name = "config",
         .metavar = "K=V,...",
         .help = "options to set before listing them",
         .text = &config_text},
        {.name = "dir", .metavar = "DIR", .help = "the same as DIR", .text = &named},
        {.name = "json", .help = "one JSON object", .flag = &json},
    };
    int rc = kvt_cli_parse(
        "stat", "DIR|unix:SOCKET [--all] [--effective] [--config K=V,...] [--json]", options,
        sizeof(options) / sizeof(options[0]), &path, 0, 1, &words, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    if (named && words) {
        kvt_cli_error("stat", "give DIR, or --dir DIR, not both");
        return KVT_EXIT_USAGE;
    }
    if (named) {
        path = named;
        words = 1;
    }
    if (!words && !effective) {
        kvt_cli_error("stat", "name a store directory, or ask for --effective");
        return KVT_EXIT_USAGE;
    }
    struct kvt_config *config = NULL;
    json_t *out = NULL;
    rc = kvt_cli_config("stat", config_text, &config);
    if (rc)
        goto out;
    const int daemon = words && kvt_stats_is_daemon(path);
    if (daemon)
        out = kvt_stat_daemon(path, error, sizeof(error));
    else
        out = words ? describe(path, error, sizeof(error)) : json_object();
    if (!out) {
        kvt_cli_error("stat", "%s", error);
        rc = KVT_EXIT_PROBLEM;
        goto out;
    }
    if (!json && daemon) {
        kvt_stat_daemon_print(out);
        kvt_stat_verdicts_print(json_object_get(out, "verdicts"));
        print_counters(json_object_get(out, "counters"), all);
    } else if (!json && words) {
        print_store(path, out, all);
    }
    if (!json && effective)
        kvt_cli_config_print(config);
    if (json) {
        if (effective)
            json_object_set_new(out, "config", kvt_cli_config_json(config));
        rc = kvt_cli_json(json_incref(out));
    }
out:
    json_decref(out);
    kvt_config_free(config);
    return rc;
}
