/* kvtier purge: remove a namespace, or everything, from a store directory for good.
 *
 * Order: the journal first (synced: from then on no restart finds the records), then the bytes are
 * overwritten or punched. A directory that a process owns is refused: its index would still know
 * the records; that process can purge by kvt_purge().
 * Threads: one. It asks on a terminal, unless --yes.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "cli.h"
#include "commands.h"
#include "kvtier/error.h"
#include "store_dir.h"

#define ERASES_MAX 256u /* ranges queued at a time; the log takes more */

struct outcome {
    int done;
    int status;
};

static void record_outcome(void *ctx, int status)
{
    struct outcome *outcome = ctx;

    outcome->done = 1;
    outcome->status = status;
}

/* Let the log work, then sleep until it has more to do, a tenth of a second at most. */
static void work(struct kvt_dir *dir)
{
    struct pollfd ready = {.fd = dir->io->ops->event_fd(dir->io), .events = POLLIN};

    if (kvt_l2_run(dir->l2) == INT64_MAX)
        poll(&ready, 1, 100);
}

static int wait_for(struct kvt_dir *dir, const struct outcome *outcome)
{
    while (!outcome->done)
        work(dir);
    return outcome->status;
}

/* One item says it all; synced when this returns 0. ns NULL: everything. */
static int journal(struct kvt_dir *dir, const uint8_t *ns)
{
    struct kvt_journal_item item = {.kind = ns ? KVT_JOURNAL_PURGE_NS : KVT_JOURNAL_PURGE_ALL,
                                    .value = dir->next_sequence};
    struct outcome outcome = {0};

    if (ns)
        memcpy(item.key.ns, ns, KVT_NS_BYTES);
    int rc = kvt_l2_journal(dir->l2, &item, 1, record_outcome, &outcome);
    return rc ? rc : wait_for(dir, &outcome);
}

static uint64_t erases_queued(const struct kvt_dir *dir)
{
    struct kvt_l2_stats stats;

    kvt_l2_stats(dir->l2, &stats);
    return stats.erases_queued;
}

static int erase(struct kvt_dir *dir, const uint8_t *ns, uint64_t *records, uint64_t *bytes)
{
    struct outcome outcome = {0};
    struct kvt_progress progress;

    kvt_progress_start(&progress, "erasing");
    *records = *bytes = 0;
    for (size_t i = 0; i < dir->record_count; i++) {
        const struct kvt_dir_record *record = &dir->records[i];
        if (ns && memcmp(record->key.ns, ns, KVT_NS_BYTES) != 0)
            continue;
        while (erases_queued(dir) >= ERASES_MAX) /* an overflow would leave bytes behind */
            work(dir);
        kvt_l2_erase(dir->l2, record->where, record->pages);
        ++*records;
        *bytes += (uint64_t)record->pages * KVT_PAGE_BYTES;
        kvt_progress_update(&progress, i, dir->record_count);
    }
    while (erases_queued(dir))
        work(dir);
    kvt_progress_done(&progress);
    int rc = kvt_l2_flush(dir->l2, record_outcome, &outcome);
    return rc ? rc : wait_for(dir, &outcome);
}

/* Ask on a terminal; elsewhere nobody can answer, so a call without --yes is a wrong one. An exit
 * code; KVT_EXIT_OK: go on. */
static int confirmed(const char *path, const char *what)
{
    char answer[16] = "";

    if (!isatty(STDIN_FILENO)) {
        kvt_cli_error("purge", "not a terminal: add --yes to remove %s from %s", what, path);
        return KVT_EXIT_USAGE;
    }
    fprintf(stderr, "Remove %s from %s for good? Type yes: ", what, path);
    if (!fgets(answer, sizeof(answer), stdin) || strcmp(answer, "yes\n") != 0) {
        kvt_cli_error("purge", "nothing was removed");
        return KVT_EXIT_PROBLEM;
    }
    return KVT_EXIT_OK;
}

static int purge(const char *path, const uint8_t *ns, int json)
{
    struct kvt_dir dir;
    char error[512], size[32];
    uint64_t records = 0, bytes = 0;

    if (kvt_dir_open(path, 1, &dir, error, sizeof(error))) {
        kvt_cli_error("purge", "%s", error);
        return KVT_EXIT_PROBLEM;
    }
    if (ns && !kvt_dir_knows_ns(&dir, ns, "purge", path, ", nothing was removed")) {
        kvt_dir_close(&dir);
        return KVT_EXIT_PROBLEM;
    }
    int rc = journal(&dir, ns);
    if (!rc)
        rc = erase(&dir, ns, &records, &bytes);
    kvt_dir_close(&dir);
    if (rc) {
        kvt_cli_error("purge", "%s: %s", path, kvt_strerror(rc));
        return KVT_EXIT_PROBLEM;
    }
    if (json)
        return kvt_cli_json(json_pack("{s:s, s:I, s:I}", "dir", path, "records",
                                      (json_int_t)records, "bytes", (json_int_t)bytes));
    printf("%s: removed %" PRIu64 " records, %s\n", path, records, kvt_human_bytes(bytes, size));
    return KVT_EXIT_OK;
}

int kvt_cmd_purge(int argc, char **argv)
{
    int json = 0, all = 0, yes = 0;
    const char *ns_text = NULL, *path = NULL;
    uint8_t ns[KVT_NS_BYTES];
    char what[64];
    size_t words = 0;
    const struct kvt_cli_option options[] = {
        {.name = "namespace",
         .metavar = "HEX",
         .help = "the namespace to remove, see 'kvtier stat'",
         .text = &ns_text},
        {.name = "all", .help = "remove every namespace", .flag = &all},
        {.name = "yes", .help = "do not ask", .flag = &yes},
        {.name = "json", .help = "one JSON object", .flag = &json},
    };
    int rc = kvt_cli_parse("purge", "DIR --namespace HEX | --all [--yes] [--json]", options,
                           sizeof(options) / sizeof(options[0]), &path, 1, 1, &words, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    if (!ns_text == !all) {
        kvt_cli_error("purge", "give either --namespace HEX or --all");
        return KVT_EXIT_USAGE;
    }
    if (ns_text && kvt_dir_ns_parse(ns_text, ns)) {
        kvt_cli_error("purge", "--namespace: '%s' is not 32 hexadecimal digits", ns_text);
        return KVT_EXIT_USAGE;
    }
    snprintf(what, sizeof(what), all ? "every namespace%s" : "namespace %s", all ? "" : ns_text);
    rc = yes ? KVT_EXIT_OK : confirmed(path, what);
    return rc ? rc : purge(path, all ? NULL : ns, json);
}
