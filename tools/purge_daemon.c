/* kvtier purge unix:SOCKET --namespace HEX|MODEL: asks the kvtierd there to remove a namespace,
 * which it does in DRAM, on its disks and in the tier that it shares with other machines.
 *
 * --all: every namespace that it has blocks of, one after the other, until it shows none that was
 * not removed yet. Programs go on meanwhile: what they store after their namespace's turn stays.
 *
 * A model's name stands for its namespace where the kvtierd shows one of that name only: two are
 * two layouts, or two salts (tenants), and which of them is meant only the digits say.
 * Threads: one.
 */
#include "purge_daemon.h"

#include <errno.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
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
    if (words->remote) {
        kvt_cli_error("purge", "--remote is of no use with a kvtierd: it purges the tier that it "
                               "shares itself");
        return KVT_EXIT_USAGE;
    }
    if (!words->namespace == !words->all) {
        kvt_cli_error("purge", "give either --namespace HEX, see 'kvtier stat %s', or --all",
                      words->where);
        return KVT_EXIT_USAGE;
    }
    return 0;
}

/* what: "namespace 0011..." */
static int confirmed(const struct kvt_purge_words *words, const char *what)
{
    char answer[16] = "";

    if (words->yes)
        return 0;
    if (!isatty(STDIN_FILENO)) {
        kvt_cli_error("purge", "not a terminal: add --yes to remove %s from %s", what,
                      words->where);
        return KVT_EXIT_USAGE;
    }
    fprintf(stderr, "Remove %s from %s and what it shares for good? Type yes: ", what,
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

/* ---- all of them ---------------------------------------------------------------------------- */

struct every {
    uint8_t (*ids)[KVT_NS_BYTES]; /* that were asked for */
    size_t count, done;
    struct kvt_link_purged sum;
};

static int add_id(struct every *every, const uint8_t id[KVT_NS_BYTES])
{
    for (size_t i = 0; i < every->count; i++)
        if (memcmp(every->ids[i], id, KVT_NS_BYTES) == 0)
            return 0;
    void *more = realloc(every->ids, (every->count + 1) * sizeof(*every->ids));
    if (!more)
        return -ENOMEM;
    every->ids = more;
    memcpy(every->ids[every->count++], id, KVT_NS_BYTES);
    return 0;
}

/* Namespaces that it shows now, and that were not asked for yet. An exit code. */
static int list_ids(const char *where, struct every *every)
{
    json_t *lines = kvt_stats_read(where, NULL), *value;
    const char *name;
    int rc = 0;

    if (!lines) {
        kvt_cli_error("purge", "%s", kvt_stats_why());
        return KVT_EXIT_PROBLEM;
    }
    json_object_foreach(lines, name, value)
    {
        uint8_t id[KVT_NS_BYTES];

        if (!rc && !strncmp(name, "namespace.", strlen("namespace.")) &&
            !kvt_dir_ns_parse(name + strlen("namespace."), id))
            rc = add_id(every, id);
    }
    json_decref(lines);
    if (rc)
        kvt_cli_error("purge", "out of memory");
    return rc ? KVT_EXIT_PROBLEM : 0;
}

static int purge_ids(const struct kvt_purge_words *words, struct every *every)
{
    const char *path = words->where + strlen("unix:");
    char hex[2 * KVT_NS_BYTES + 1], why[600];

    for (; every->done < every->count; every->done++) {
        struct kvt_link_purged purged;
        int rc = kvt_link_purge(path, every->ids[every->done], &purged, why, sizeof(why));

        every->sum.blocks += purged.blocks;
        every->sum.bytes += purged.bytes;
        every->sum.remote_records += purged.remote_records;
        if (!rc)
            continue;
        kvt_dir_ns_text(every->ids[every->done], hex);
        kvt_cli_error("purge",
                      "namespace %s: %s (%zu of %zu namespaces are gone, %" PRIu64 " records)", hex,
                      why, every->done, every->count, every->sum.blocks);
        return KVT_EXIT_PROBLEM;
    }
    return 0;
}

static int report_all(const struct kvt_purge_words *words, const struct every *every)
{
    char size[32];

    if (words->json)
        return kvt_cli_json(json_pack(
            "{s:s, s:I, s:I, s:I, s:I}", "daemon", words->where, "namespaces",
            (json_int_t)every->done, "records", (json_int_t)every->sum.blocks, "bytes",
            (json_int_t)every->sum.bytes, "remote_records", (json_int_t)every->sum.remote_records));
    printf("%s: removed %zu namespaces, %" PRIu64 " records, %s", words->where, every->done,
           every->sum.blocks, kvt_human_bytes(every->sum.bytes, size));
    if (every->sum.remote_records)
        printf(", and %" PRIu64 " records of the tier that it shares", every->sum.remote_records);
    putchar('\n');
    return KVT_EXIT_OK;
}

static int purge_all(const struct kvt_purge_words *words)
{
    struct every every = {0};
    char what[64];
    int rc = list_ids(words->where, &every);

    snprintf(what, sizeof(what), "every namespace (%zu of them now)", every.count);
    if (!rc)
        rc = confirmed(words, what);
    for (size_t before = SIZE_MAX; !rc && every.count != before;) { /* it shows so many at a time */
        before = every.count;
        rc = purge_ids(words, &every);
        if (!rc)
            rc = list_ids(words->where, &every);
    }
    if (!rc)
        rc = report_all(words, &every);
    free(every.ids);
    return rc;
}

int kvt_purge_daemon(const struct kvt_purge_words *words)
{
    const char *path = words->where + strlen("unix:");
    struct kvt_link_purged purged;
    char hex[2 * KVT_NS_BYTES + 1], what[64], why[600];
    uint8_t id[KVT_NS_BYTES];
    int rc = check(words);

    if (rc)
        return rc;
    if (words->all)
        return purge_all(words);
    if (kvt_dir_ns_parse(words->namespace, id)) {
        rc = find_model(words->where, words->namespace, hex);
        if (rc)
            return rc;
        if (kvt_dir_ns_parse(hex, id))
            return KVT_EXIT_PROBLEM;
    }
    kvt_dir_ns_text(id, hex);
    snprintf(what, sizeof(what), "namespace %s", hex);
    rc = confirmed(words, what);
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
