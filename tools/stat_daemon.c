/* kvtier stat unix:SOCKET: the daemon's lines (src/daemon/report.c) sorted into clients, usage by
 * namespace and rank with its sums, disks, and counters. Threads: one.
 */
#include "stat_daemon.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "stat_verdict.h"
#include "stats_file.h"

static uint64_t number(const json_t *object, const char *name)
{
    return (uint64_t)json_integer_value(json_object_get(object, name));
}

/* The row of "usage.NS.GROUP.RANK", made when it is not there. */
static json_t *usage_row(json_t *rows, const char *ns, unsigned group, unsigned rank)
{
    json_t *row;
    size_t i;

    json_array_foreach(rows, i, row)
    {
        if (!strcmp(json_string_value(json_object_get(row, "namespace")), ns) &&
            number(row, "group") == group && number(row, "rank") == rank)
            return row;
    }
    row = json_pack("{s:s, s:i, s:i}", "namespace", ns, "group", (int)group, "rank", (int)rank);
    json_array_append_new(rows, row);
    return row;
}

/* "usage.NS.GROUP.RANK.what" */
static void sort_usage(json_t *daemon, const char *name, json_t *value)
{
    char text[128], *rest, *ns, *group, *rank, *what;
    json_t *total = json_object_get(daemon, "total");

    snprintf(text, sizeof(text), "%s", name);
    (void)strtok_r(text, ".", &rest);
    ns = strtok_r(NULL, ".", &rest);
    group = strtok_r(NULL, ".", &rest);
    rank = strtok_r(NULL, ".", &rest);
    what = strtok_r(NULL, ".", &rest);
    if (!ns || !group || !rank || !what)
        return;
    json_object_set(usage_row(json_object_get(daemon, "usage"), ns,
                              (unsigned)strtoul(group, NULL, 10),
                              (unsigned)strtoul(rank, NULL, 10)),
                    what, value);
    if (strcmp(what, "block_tokens") == 0) /* nothing to be added up */
        return;
    json_object_set_new(total, what,
                        json_integer((json_int_t)number(total, what) + json_integer_value(value)));
}

static void sort_line(json_t *daemon, const char *name, json_t *value)
{
    if (strncmp(name, "usage.", 6) == 0)
        sort_usage(daemon, name, value);
    else if (strncmp(name, "namespace.", 10) == 0)
        json_object_set(json_object_get(daemon, "models"), name + 10, value);
    else if (strncmp(name, "client.", 7) == 0 && json_is_string(value))
        json_array_append_new(json_object_get(daemon, "clients"),
                              json_pack("{s:I, s:O}", "number",
                                        (json_int_t)strtoul(name + 7, NULL, 10), "is", value));
    else
        json_object_set(json_object_get(daemon, "counters"), name, value);
}

/* Of one length: that. 0: they differ, or nobody knows. */
static uint32_t block_tokens(const json_t *usage)
{
    uint64_t tokens = 0;
    json_t *row;
    size_t i;

    json_array_foreach((json_t *)usage, i, row)
    {
        if (i && tokens != number(row, "block_tokens"))
            return 0;
        tokens = number(row, "block_tokens");
    }
    return (uint32_t)tokens;
}

static json_t *verdicts_of(const char *path, const json_t *daemon)
{
    const json_t *counters = json_object_get(daemon, "counters");
    const json_t *total = json_object_get(daemon, "total");
    struct kvt_stat_facts facts = {.path = path,
                                   .counters = counters,
                                   .owner_pid = (int64_t)number(counters, "writer.pid"),
                                   .daemon = 1,
                                   .clients = json_array_size(json_object_get(daemon, "clients")),
                                   .records = number(counters, "index.blocks"),
                                   .bytes =
                                       number(total, "dram_bytes") + number(total, "disk_bytes"),
                                   .bytes_used = number(counters, "disk.bytes_used"),
                                   .bytes_max = number(counters, "disk.bytes_max"),
                                   .block_tokens = block_tokens(json_object_get(daemon, "usage"))};

    return kvt_stat_verdicts(&facts);
}

json_t *kvt_stat_daemon(const char *path, char *error, size_t error_len)
{
    json_t *lines = kvt_stats_read(path, NULL), *value;
    const char *name;

    if (!lines) {
        snprintf(error, error_len, "%s", kvt_stats_why());
        return NULL;
    }
    json_t *daemon = json_pack("{s:s, s:[], s:[], s:{}, s:{}, s:{}}", "daemon", path, "clients",
                               "usage", "total", "models", "counters");
    json_object_foreach(lines, name, value) sort_line(daemon, name, value);
    json_decref(lines);
    json_object_set_new(daemon, "verdicts", verdicts_of(path, daemon));
    return daemon;
}

static void print_usage(const json_t *daemon)
{
    const json_t *total = json_object_get(daemon, "total"), *counters;
    const char *model, *before = "";
    char dram[32], disk[32], dram_max[32], disk_max[32];
    json_t *row;
    size_t i;

    counters = json_object_get(daemon, "counters");
    printf("  dram        %s in records of %s\n",
           kvt_human_bytes(number(total, "dram_bytes"), dram),
           kvt_human_bytes(number(counters, "dram.bytes_max"), dram_max));
    printf("  disk        %s in records, %s of %s in files\n",
           kvt_human_bytes(number(total, "disk_bytes"), dram),
           kvt_human_bytes(number(counters, "disk.bytes_used"), disk),
           kvt_human_bytes(number(counters, "disk.bytes_max"), disk_max));
    json_array_foreach(json_object_get(daemon, "usage"), i, row)
    {
        const char *ns = json_string_value(json_object_get(row, "namespace"));
        model = json_string_value(json_object_get(json_object_get(daemon, "models"), ns));
        if (strcmp(ns, before) != 0)
            printf("  namespace   %s  %s\n", ns, model ? model : "?");
        before = ns;
        printf("    group %-3" PRIu64 " rank %-3" PRIu64 " %8" PRIu64
               " blocks, %s in DRAM; %8" PRIu64 " blocks, %s on disk\n",
               number(row, "group"), number(row, "rank"), number(row, "dram_blocks"),
               kvt_human_bytes(number(row, "dram_bytes"), dram), number(row, "disk_blocks"),
               kvt_human_bytes(number(row, "disk_bytes"), disk));
    }
}

void kvt_stat_daemon_print(const json_t *daemon)
{
    const json_t *counters = json_object_get(daemon, "counters");
    json_t *client;
    size_t i;

    printf("%s\n  process     %" PRIu64 ", kvtierd %s, up %" PRIu64 " s\n",
           json_string_value(json_object_get(daemon, "daemon")), number(counters, "writer.pid"),
           json_string_value(json_object_get(counters, "daemon.version")),
           number(counters, "daemon.uptime_s"));
    printf("  clients     %zu\n", json_array_size(json_object_get(daemon, "clients")));
    json_array_foreach(json_object_get(daemon, "clients"), i, client)
        printf("    %-6" PRIu64 " %s\n", number(client, "number"),
               json_string_value(json_object_get(client, "is")));
    print_usage(daemon);
}
