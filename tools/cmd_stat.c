/* kvtier stat: what a store directory holds, who owns it, its last counters, every option.
 *
 * Read-only: recovers the log without taking its lock, so it works beside a running owner; what the
 * owner writes meanwhile may or may not be counted.
 * Threads: one.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cli.h"
#include "cli_config.h"
#include "commands.h"
#include "kvtier/kvtier.h"
#include "stats_file.h"
#include "store_dir.h"

/* Records are sorted by key, and a key starts with its namespace: one pass makes the list. */
static json_t *list_namespaces(const struct kvt_dir *dir, uint64_t *bytes_total)
{
    json_t *list = json_array();

    *bytes_total = 0;
    for (size_t i = 0; i < dir->record_count;) {
        const uint8_t *ns = dir->records[i].key.ns;
        uint64_t bytes = 0, records = 0;
        char id[2 * KVT_NS_BYTES + 1];
        for (; i < dir->record_count && !memcmp(dir->records[i].key.ns, ns, KVT_NS_BYTES); i++) {
            bytes += (uint64_t)dir->records[i].pages * KVT_PAGE_BYTES;
            records++;
        }
        kvt_dir_ns_text(ns, id);
        json_array_append_new(list, json_pack("{s:s, s:I, s:I}", "id", id, "records",
                                              (json_int_t)records, "bytes", (json_int_t)bytes));
        *bytes_total += bytes;
    }
    return list;
}

static void print_counters(const json_t *counters)
{
    const char *name;
    json_t *value;

    if (!counters) {
        printf("no counters: no owner has written a snapshot yet\n");
        return;
    }
    printf("counters of the last snapshot\n");
    json_object_foreach((json_t *)counters, name, value)
    {
        if (json_is_string(value))
            printf("  %-26s %s\n", name, json_string_value(value));
        else
            printf("  %-26s %" JSON_INTEGER_FORMAT "\n", name, json_integer_value(value));
    }
}

static void print_store(const char *path, const json_t *store)
{
    char used[32], max[32], held[32];
    int64_t pid = json_integer_value(json_object_get(store, "owner_pid"));
    json_t *list = json_object_get(store, "namespaces"), *ns;
    size_t i;

#define NUMBER(name) ((uint64_t)json_integer_value(json_object_get(store, name)))
    printf("%s\n  owner       ", path);
    if (pid)
        printf("process %" PRId64 "\n", pid);
    else
        printf("nobody\n");
    printf("  segments    %" PRIu64 "\n  records     %" PRIu64 ", %s\n", NUMBER("segments"),
           NUMBER("records"), kvt_human_bytes(NUMBER("bytes"), held));
    printf("  files       %s of %s\n", kvt_human_bytes(NUMBER("bytes_used"), used),
           kvt_human_bytes(NUMBER("bytes_max"), max));
    if (NUMBER("recovered_bad"))
        printf("  refused     %" PRIu64 " segments, batches or entries: see 'kvtier fsck %s'\n",
               NUMBER("recovered_bad"), path);
#undef NUMBER
    json_array_foreach(list, i, ns)
    {
        printf("  namespace   %s  %" JSON_INTEGER_FORMAT " records, %s\n",
               json_string_value(json_object_get(ns, "id")),
               json_integer_value(json_object_get(ns, "records")),
               kvt_human_bytes((uint64_t)json_integer_value(json_object_get(ns, "bytes")), held));
    }
    print_counters(json_object_get(store, "counters"));
}

/* Describe the store as JSON: the one source of both outputs. NULL: error holds the sentence. */
static json_t *describe(const char *path, char *error, size_t error_len)
{
    struct kvt_dir dir;
    struct kvt_l2_stats stats;
    uint64_t bytes;
    int64_t pid = kvt_dir_owner(path);

    if (kvt_dir_open(path, 0, &dir, error, error_len))
        return NULL;
    kvt_l2_stats(dir.l2, &stats);
    json_t *namespaces = list_namespaces(&dir, &bytes);
    json_t *store = json_pack(
        "{s:s, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:o}", "dir", path, "owner_pid",
        pid ? json_integer(pid) : json_null(), "segments", (json_int_t)stats.segments_live,
        "records", (json_int_t)dir.record_count, "bytes", (json_int_t)bytes, "bytes_used",
        (json_int_t)stats.bytes_used, "bytes_max", (json_int_t)dir.superblock.cap_bytes,
        "recovered_bad", (json_int_t)stats.recovered_bad, "namespaces", namespaces);
    json_t *counters = kvt_stats_read(path, NULL);
    if (counters)
        json_object_set_new(store, "counters", counters);
    kvt_dir_close(&dir);
    return store;
}

int kvt_cmd_stat(int argc, char **argv)
{
    int json = 0, effective = 0;
    const char *config_text = NULL, *path = NULL;
    char error[512];
    size_t words = 0;
    const struct kvt_cli_option options[] = {
        {.name = "effective", .help = "list every option with its value", .flag = &effective},
        {.name = "config",
         .metavar = "K=V,...",
         .help = "options to set before listing them",
         .text = &config_text},
        {.name = "json", .help = "one JSON object", .flag = &json},
    };
    int rc = kvt_cli_parse("stat", "DIR [--effective] [--config K=V,...] [--json]", options,
                           sizeof(options) / sizeof(options[0]), &path, 0, 1, &words, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    if (!words && !effective) {
        kvt_cli_error("stat", "name a store directory, or ask for --effective");
        return KVT_EXIT_USAGE;
    }
    struct kvt_config *config = NULL;
    json_t *out = NULL;
    rc = kvt_cli_config("stat", config_text, &config);
    if (rc)
        goto out;
    out = words ? describe(path, error, sizeof(error)) : json_object();
    if (!out) {
        kvt_cli_error("stat", "%s", error);
        rc = KVT_EXIT_PROBLEM;
        goto out;
    }
    if (!json && words)
        print_store(path, out);
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
