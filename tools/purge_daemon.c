/* kvtier purge unix:SOCKET --namespace HEX|MODEL: asks the kvtierd there to remove a namespace,
 * which it does in DRAM, on its disks and in the tier that it shares with other machines.
 *
 * A model's name stands for its namespace where the kvtierd shows one of that name only: two are
 * two layouts, or two salts (tenants), and which of them is meant only the digits say.
 * Threads: one.
 */
#include "purge_daemon.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "client/link.h"
#include "stats_file.h"
#include "store_dir.h"

/* The digits of the one namespace with the label; else it says why not. 0, or an exit code. */
static int find_model(const char *where, const char *model, char hex[2 * KVT_NS_BYTES + 1])
{
    json_t *lines = kvt_stats_read(where, NULL), *value;
    const char *name;
    unsigned found = 0;

    if (!lines) {
        kvt_cli_error("purge", "%s", kvt_stats_why());
        return KVT_EXIT_PROBLEM;
    }
    json_object_foreach(lines, name, value)
    {
        const char *id = name + strlen("namespace.");
        char label[32];

        if (strncmp(name, "namespace.", strlen("namespace.")) || strlen(id) != 2 * KVT_NS_BYTES)
            continue;
        if (json_is_integer(value)) /* a model that is named by a number */
            snprintf(label, sizeof(label), "%" JSON_INTEGER_FORMAT, json_integer_value(value));
        if (strcmp(json_is_integer(value) ? label : json_string_value(value), model))
            continue;
        memcpy(hex, id, 2 * KVT_NS_BYTES + 1);
        if (found++)
            kvt_cli_error("purge", "--namespace %s, or", hex);
    }
    json_decref(lines);
    if (found == 1)
        return 0;
    if (found)
        kvt_cli_error("purge",
                      "... others: %u namespaces are called '%s': give the digits, see "
                      "'kvtier stat %s'",
                      found, model, where);
    else
        kvt_cli_error("purge",
                      "--namespace: '%s' is not 32 hexadecimal digits, nor does a namespace there "
                      "have that name: see 'kvtier stat %s'",
                      model, where);
    return found ? KVT_EXIT_USAGE : KVT_EXIT_PROBLEM;
}

/* What makes no sense for a daemon. */
static int check(const struct kvt_purge_words *words)
{
    if (words->all) {
        kvt_cli_error("purge",
                      "a running kvtierd is purged one namespace at a time (--namespace, see "
                      "'kvtier stat %s'): to remove all, stop it and purge its directories",
                      words->where);
        return KVT_EXIT_USAGE;
    }
    if (words->remote) {
        kvt_cli_error("purge", "--remote is of no use with a kvtierd: it purges the tier that it "
                               "shares itself");
        return KVT_EXIT_USAGE;
    }
    if (!words->namespace) {
        kvt_cli_error("purge", "give --namespace HEX, see 'kvtier stat %s'", words->where);
        return KVT_EXIT_USAGE;
    }
    return 0;
}

static int confirmed(const struct kvt_purge_words *words, const char *hex)
{
    char answer[16] = "";

    if (words->yes)
        return 0;
    if (!isatty(STDIN_FILENO)) {
        kvt_cli_error("purge", "not a terminal: add --yes to remove namespace %s from %s", hex,
                      words->where);
        return KVT_EXIT_USAGE;
    }
    fprintf(stderr, "Remove namespace %s from %s and what it shares for good? Type yes: ", hex,
            words->where);
    if (fgets(answer, sizeof(answer), stdin) && strcmp(answer, "yes\n") == 0)
        return 0;
    kvt_cli_error("purge", "nothing was removed");
    return KVT_EXIT_PROBLEM;
}

static int report(const struct kvt_purge_words *words, const char *hex,
                  const struct kvt_link_purged *purged)
{
    char size[32];

    if (words->json)
        return kvt_cli_json(json_pack("{s:s, s:s, s:I, s:I, s:I}", "daemon", words->where,
                                      "namespace", hex, "records", (json_int_t)purged->blocks,
                                      "bytes", (json_int_t)purged->bytes, "remote_records",
                                      (json_int_t)purged->remote_records));
    printf("%s: removed %" PRIu64 " records, %s", words->where, purged->blocks,
           kvt_human_bytes(purged->bytes, size));
    if (purged->remote_records)
        printf(", and %" PRIu64 " records of the tier that it shares", purged->remote_records);
    putchar('\n');
    return KVT_EXIT_OK;
}

int kvt_purge_daemon(const struct kvt_purge_words *words)
{
    const char *path = words->where + strlen("unix:");
    struct kvt_link_purged purged;
    char hex[2 * KVT_NS_BYTES + 1], why[600];
    uint8_t id[KVT_NS_BYTES];
    int rc = check(words);

    if (rc)
        return rc;
    if (kvt_dir_ns_parse(words->namespace, id)) {
        rc = find_model(words->where, words->namespace, hex);
        if (rc)
            return rc;
        if (kvt_dir_ns_parse(hex, id))
            return KVT_EXIT_PROBLEM;
    }
    kvt_dir_ns_text(id, hex);
    rc = confirmed(words, hex);
    if (rc)
        return rc;
    if (kvt_link_purge(path, id, &purged, why, sizeof(why))) {
        kvt_cli_error("purge", "%s%s", why, purged.blocks ? " (a part of it is gone)" : "");
        return KVT_EXIT_PROBLEM;
    }
    if (!purged.groups && !purged.remote_records) {
        /* a typing error must not look like success */
        kvt_cli_error("purge", "no record of namespace %s is there, nothing was removed", hex);
        return KVT_EXIT_PROBLEM;
    }
    return report(words, hex, &purged);
}
