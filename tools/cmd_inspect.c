/* kvtier inspect: what lies in a store directory: the root, its namespaces, its segments; or one
 * record, by key or by place, with its chain. Payload is never shown.
 *
 * Read-only, also beside a running owner (what it writes meanwhile may be missing).
 * Threads: one. What is shown is made in inspect.c.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "cli.h"
#include "commands.h"
#include "inspect.h"

#define COMMAND "inspect"
#define MATCHES_MAX 20u /* listed when a prefix names several */
#define CHAIN_SHOWN 12u /* lines of a chain, on a terminal */

static const char *text(const json_t *object, const char *name)
{
    const char *value = json_string_value(json_object_get(object, name));

    return value ? value : "?";
}

static uint64_t number(const json_t *object, const char *name)
{
    return (uint64_t)json_integer_value(json_object_get(object, name));
}

static void print_space(const json_t *space)
{
    char size[32];
    json_t *map;
    size_t i;

    printf("namespace %s\n  %" PRIu64 " records, %s; %" PRIu64 " sequences start here; last "
           "position %" PRIu64 "\n",
           text(space, "id"), number(space, "records"),
           kvt_human_bytes(number(space, "bytes"), size), number(space, "starts"),
           number(space, "last_position"));
    if (number(space, "unreachable"))
        printf("  %" PRIu64 " records cannot be reached: a block before them is gone\n",
               number(space, "unreachable"));
    json_array_foreach(json_object_get(space, "maps"), i, map)
    {
        printf("  map %" PRIu64 " (%s)  %" PRIu64 " records of %s\n", number(map, "map"),
               text(map, "level"), number(map, "records"),
               kvt_human_bytes(number(map, "record_bytes"), size));
    }
}

static void print_root(const char *path, const json_t *root)
{
    char cap[32], size[32];
    json_t *item;
    size_t i;

    if (json_is_true(json_object_get(root, "superblock")))
        printf("%s\n  root %s, disk format %" PRIu64 ", cap %s, segments of %s, at most %" PRIu64
               "\n  next generation %" PRIu64 ", next sequence %" PRIu64 ", %" PRIu64
               " journal pages\n",
               path, text(root, "root_id"), number(root, "disk_version"),
               kvt_human_bytes(number(root, "cap_bytes"), cap),
               kvt_human_bytes(number(root, "segment_bytes"), size), number(root, "segments_max"),
               number(root, "next_generation"), number(root, "next_sequence"),
               number(root, "journal_pages"));
    else
        printf("%s\n  no good superblock: the next open makes one\n", path);
    json_array_foreach(json_object_get(root, "namespaces"), i, item) print_space(item);
    printf("segments\n");
    json_array_foreach(json_object_get(root, "segments"), i, item)
    {
        printf("  %s  %-10s  generation %-8" PRIu64 " %7" PRIu64 " records, %s\n",
               text(item, "name"), text(item, "state"), number(item, "generation"),
               number(item, "records"), kvt_human_bytes(number(item, "bytes"), size));
    }
}

static void print_brief(const json_t *record)
{
    printf("  %.16s...  position %-8" PRIu64 " %-4s  %s\n", text(record, "hash"),
           number(record, "first_pos"), text(record, "level"), text(record, "place"));
}

static void print_record(const json_t *record)
{
    const json_t *chain = json_object_get(record, "chain");
    size_t n = json_array_size(chain);

    printf("namespace   %s\nhash        %s\ngroup       %" PRIu64 ", shard %" PRIu64 "\n",
           text(record, "namespace"), text(record, "hash"), number(record, "group"),
           number(record, "shard"));
    printf("parent      %s\n",
           text(record, "parent")[0] ? text(record, "parent") : "none: starts its sequence");
    printf("position    %" PRIu64 "\nlevel       %s (map %" PRIu64 ")\n",
           number(record, "first_pos"), text(record, "level"), number(record, "map"));
    printf("place       seg-%s, generation %" PRIu64 ", sequence %" PRIu64 "\n",
           text(record, "place"), number(record, "generation"), number(record, "sequence"));
    printf("size        %" PRIu64 " bytes", number(record, "record_bytes"));
    if (json_object_get(record, "payload_bytes"))
        printf(": header 128, payload %" PRIu64 ", padding %" PRIu64,
               number(record, "payload_bytes"), number(record, "padding_bytes"));
    printf("\nchecksum    %s, %s\n", text(record, "checksum"),
           strcmp(text(record, "verify"), "ok") ? text(record, "verify") : "verified");
    printf("chain       %zu blocks to the %s\n", n,
           strcmp(text(record, "chain_end"), "start") ? "gap" : "start of the sequence");
    for (size_t i = 0; i < n; i++) {
        if (n > CHAIN_SHOWN && i == CHAIN_SHOWN / 2) {
            printf("  ... %zu more\n", n - CHAIN_SHOWN);
            i = n - CHAIN_SHOWN / 2;
        }
        print_brief(json_array_get(chain, i));
    }
    if (strcmp(text(record, "chain_end"), "start") != 0)
        printf("  %s\n", text(record, "chain_end"));
}

static int show_root(const char *path, struct kvt_dir *dir, int json)
{
    json_t *root = kvt_inspect_root(dir);

    if (!root) {
        kvt_cli_error(COMMAND, "%s: cannot be listed", path);
        return KVT_EXIT_PROBLEM;
    }
    json_object_set_new(root, "dir", json_string(path));
    if (json)
        return kvt_cli_json(root);
    print_root(path, root);
    json_decref(root);
    return KVT_EXIT_OK;
}

/* One record whole; several as a list. */
static int show_records(const char *path, struct kvt_dir *dir, const char *word, const uint8_t *ns,
                        int json)
{
    size_t found[MATCHES_MAX];
    long n = kvt_inspect_find(dir, word, ns, found, MATCHES_MAX);

    if (n < 0) {
        kvt_cli_error(COMMAND,
                      "'%s' names no record: give SEGMENT:PAGE, or the first hexadecimal digits of "
                      "a key",
                      word);
        return KVT_EXIT_USAGE;
    }
    if (n == 1) {
        json_t *record = kvt_inspect_record(dir, found[0]);
        int bad = strcmp(text(record, "verify"), "ok") != 0;
        if (!json)
            print_record(record);
        int rc = json ? kvt_cli_json(json_incref(record)) : KVT_EXIT_OK;
        json_decref(record);
        return rc ? rc : bad ? KVT_EXIT_PROBLEM : KVT_EXIT_OK;
    }
    if (!n)
        kvt_cli_error(COMMAND, "%s: no record %s", path, word);
    else
        kvt_cli_error(COMMAND, "%s: %ld records match %s%s", path, n, word,
                      n > (long)MATCHES_MAX ? "; the first 20 are listed" : "");
    json_t *matches = json_array();
    for (size_t i = 0; i < KVT_MIN((size_t)n, (size_t)MATCHES_MAX); i++)
        json_array_append_new(matches, kvt_inspect_brief(&dir->records[found[i]]));
    json_t *match;
    size_t i;
    if (!json)
        json_array_foreach(matches, i, match) print_brief(match);
    if (json)
        (void)kvt_cli_json(json_pack("{s:s, s:I, s:O}", "dir", path, "match_count", (json_int_t)n,
                                     "matches", matches));
    json_decref(matches);
    return KVT_EXIT_PROBLEM;
}

int kvt_cmd_inspect(int argc, char **argv)
{
    int json = 0;
    const char *ns_text = NULL, *given[2] = {NULL, NULL};
    uint8_t ns[KVT_NS_BYTES];
    struct kvt_dir dir;
    char error[512];
    size_t words = 0;
    const struct kvt_cli_option options[] = {
        {.name = "namespace",
         .metavar = "HEX",
         .help = "look for the record in this one only",
         .text = &ns_text},
        {.name = "json", .help = "one JSON object", .flag = &json},
    };
    int rc = kvt_cli_parse(COMMAND, "DIR [KEY | SEGMENT:PAGE] [--namespace HEX] [--json]", options,
                           KVT_ARRAY_LEN(options), given, 1, 2, &words, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    if (ns_text && kvt_dir_ns_parse(ns_text, ns)) {
        kvt_cli_error(COMMAND, "--namespace: '%s' is not 32 hexadecimal digits", ns_text);
        return KVT_EXIT_USAGE;
    }
    if (kvt_dir_open(given[0], 0, &dir, error, sizeof(error))) {
        kvt_cli_error(COMMAND, "%s", error);
        return KVT_EXIT_PROBLEM;
    }
    if (ns_text && !kvt_dir_knows_ns(&dir, ns, COMMAND, given[0], "")) {
        rc = KVT_EXIT_PROBLEM;
    } else if (words == 2) {
        rc = show_records(given[0], &dir, given[1], ns_text ? ns : NULL, json);
    } else {
        rc = show_root(given[0], &dir, json);
    }
    kvt_dir_close(&dir);
    return rc;
}
