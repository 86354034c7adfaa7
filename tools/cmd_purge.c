/* kvtier purge: remove a namespace, or everything, from a store directory for good, and from a tier
 * that machines share where that is named: the directory first, then there.
 *
 * Order: the journal first (synced: from then on no restart finds the records), then the bytes are
 * overwritten or punched. A directory that a process owns is refused: its index would still know
 * the records; that process can purge by kvt_purge(). A running kvtierd does it itself when it is
 * asked (purge_daemon.c).
 * Threads: one. It asks on a terminal, unless --yes.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "cli.h"
#include "commands.h"
#include "kvtier/error.h"
#include "purge_daemon.h"
#include "remote/remote.h"
#include "remote_tool.h"
#include "stats_file.h"
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

struct job {
    const char *path;  /* of the store; NULL: only the shared tier is purged */
    const uint8_t *ns; /* NULL: everything */
    struct kvt_remote_where remote;
    uint64_t records, bytes, remote_records;
    uint8_t (*names)[KVT_NS_BYTES]; /* what is purged there */
    size_t name_count;
};

/* Ask on a terminal; elsewhere nobody can answer, so a call without --yes is a wrong one. An exit
 * code; KVT_EXIT_OK: go on. */
static int confirmed(const struct job *job, const char *what)
{
    const char *path = job->path ? job->path : job->remote.url;
    const char *also = job->path && job->remote.url ? " and from the shared tier" : "";
    char answer[16] = "";

    if (!isatty(STDIN_FILENO)) {
        kvt_cli_error("purge", "not a terminal: add --yes to remove %s from %s", what, path);
        return KVT_EXIT_USAGE;
    }
    fprintf(stderr, "Remove %s from %s%s for good? Type yes: ", what, path, also);
    if (!fgets(answer, sizeof(answer), stdin) || strcmp(answer, "yes\n") != 0) {
        kvt_cli_error("purge", "nothing was removed");
        return KVT_EXIT_PROBLEM;
    }
    return KVT_EXIT_OK;
}

/* Namespaces whose records the directory holds, before they go: one after the other, sorted. */
static int names_take(struct job *job, const struct kvt_dir *dir)
{
    const uint8_t *last = NULL;

    if (!job->remote.url || job->ns)
        return 0;
    job->names = calloc(dir->record_count + 1, KVT_NS_BYTES);
    if (!job->names)
        return -ENOMEM;
    for (size_t i = 0; i < dir->record_count; i++) {
        const uint8_t *ns = dir->records[i].key.ns;

        if (!last || memcmp(last, ns, KVT_NS_BYTES) != 0)
            memcpy(job->names[job->name_count++], ns, KVT_NS_BYTES);
        last = ns;
    }
    return 0;
}

static int purge_here(struct job *job)
{
    struct kvt_dir dir;
    char error[512];
    int rc = kvt_dir_open(job->path, 1, &dir, error, sizeof(error));

    if (rc) {
        kvt_cli_error(
            "purge", "%s%s", error,
            rc == KVT_E_LOCKED
                ? "; stop it, or let it purge: kvt_purge(), Namespace.purge() in Python, 'kvtier "
                  "purge unix:SOCKET' for a kvtierd"
                : "");
        return KVT_EXIT_PROBLEM;
    }
    /* what is not here any more may be there */
    if (job->ns && !job->remote.url &&
        !kvt_dir_knows_ns(&dir, job->ns, "purge", job->path, ", nothing was removed")) {
        kvt_dir_close(&dir);
        return KVT_EXIT_PROBLEM;
    }
    rc = names_take(job, &dir);
    if (!rc)
        rc = journal(&dir, job->ns);
    if (!rc)
        rc = erase(&dir, job->ns, &job->records, &job->bytes);
    if (!rc && job->records == dir.record_count)
        rc = kvt_dir_drop_segments(&dir);
    kvt_dir_close(&dir);
    if (!rc)
        return KVT_EXIT_OK;
    kvt_cli_error("purge", "%s: %s", job->path, kvt_strerror(rc));
    return KVT_EXIT_PROBLEM;
}

static int purge_there(struct job *job)
{
    char error[1200], text[2 * KVT_NS_BYTES + 1];
    const uint8_t(*names)[KVT_NS_BYTES] = (const uint8_t(*)[KVT_NS_BYTES])job->names;
    size_t count = job->name_count;

    if (job->ns) {
        names = (const uint8_t(*)[KVT_NS_BYTES])job->ns;
        count = 1;
    }
    if (kvt_remote_purge(&job->remote, names, count, &job->remote_records, error, sizeof(error))) {
        kvt_cli_error("purge", "%s%s; repeat it", error,
                      job->path ? " (what the directory held is gone)" : "");
        for (size_t i = 0; job->path && !job->ns && i < count; i++) {
            kvt_dir_ns_text(names[i], text);
            kvt_cli_error("purge", "by --remote %s --namespace %s", job->remote.url, text);
        }
        return KVT_EXIT_PROBLEM;
    }
    return KVT_EXIT_OK;
}

/* The last owner used a shared tier, and this purge does not go there. */
static void say_what_stays(const struct job *job)
{
    json_t *counters = job->remote.url ? NULL : kvt_stats_read(job->path, NULL);

    if (counters && kvt_stats_value(counters, "remote.nodes"))
        kvt_cli_error("purge",
                      "the shared tier (remote=...) keeps what it holds: add --remote URL");
    json_decref(counters);
}

static int report(const struct job *job, int json)
{
    char size[32];

    if (json) {
        json_t *out = json_object();

        if (job->path) {
            json_object_set_new(out, "dir", json_string(job->path));
            json_object_set_new(out, "records", json_integer((json_int_t)job->records));
            json_object_set_new(out, "bytes", json_integer((json_int_t)job->bytes));
        }
        if (job->remote.url) {
            json_object_set_new(out, "remote", json_string(job->remote.url));
            json_object_set_new(out, "remote_records",
                                json_integer((json_int_t)job->remote_records));
        }
        return kvt_cli_json(out);
    }
    if (job->path)
        printf("%s: removed %" PRIu64 " records, %s\n", job->path, job->records,
               kvt_human_bytes(job->bytes, size));
    if (job->remote.url)
        printf("%s: removed %" PRIu64 " records\n", job->remote.url, job->remote_records);
    return KVT_EXIT_OK;
}

static int purge(struct job *job, int json)
{
    char text[2 * KVT_NS_BYTES + 1];
    int rc = job->path ? purge_here(job) : KVT_EXIT_OK;

    if (!rc && job->path)
        say_what_stays(job);
    if (!rc && job->remote.url)
        rc = purge_there(job);
    free(job->names);
    if (rc)
        return rc;
    if (job->ns && job->remote.url && !job->records && !job->remote_records) {
        kvt_dir_ns_text(job->ns, text); /* a typing error must not look like success */
        kvt_cli_error("purge", "no record of namespace %s is there, nothing was removed", text);
        return KVT_EXIT_PROBLEM;
    }
    return report(job, json);
}

/* What the words say. An exit code; KVT_EXIT_OK: it makes sense. */
static int check_words(const struct job *job, const char *ns_text, int all,
                       uint8_t ns[KVT_NS_BYTES])
{
    char error[512];

    if (!job->path && !job->remote.url) {
        kvt_cli_error("purge", "give DIR, or --remote URL, or both");
        return KVT_EXIT_USAGE;
    }
    if (!ns_text == !all) {
        kvt_cli_error("purge", "give either --namespace HEX or --all");
        return KVT_EXIT_USAGE;
    }
    if (all && !job->path) {
        kvt_cli_error("purge", "--all with --remote needs DIR: what it holds is removed there too; "
                               "else name one with --namespace HEX");
        return KVT_EXIT_USAGE;
    }
    if (ns_text && kvt_dir_ns_parse(ns_text, ns)) {
        kvt_cli_error("purge", "--namespace: '%s' is not 32 hexadecimal digits", ns_text);
        return KVT_EXIT_USAGE;
    }
    if (job->remote.url && kvt_remote_where_check(job->remote.url, error, sizeof(error))) {
        kvt_cli_error("purge", "%s", error);
        return KVT_EXIT_USAGE;
    }
    if (!job->remote.url && (job->remote.auth_file || job->remote.ca_file)) {
        kvt_cli_error("purge", "--remote-auth and --remote-ca are of no use without --remote URL");
        return KVT_EXIT_USAGE;
    }
    return KVT_EXIT_OK;
}

int kvt_cmd_purge(int argc, char **argv)
{
    int json = 0, all = 0, yes = 0;
    const char *ns_text = NULL;
    struct job job = {0};
    uint8_t ns[KVT_NS_BYTES];
    char what[64];
    size_t words = 0;
    const struct kvt_cli_option options[] = {
        {.name = "namespace",
         .metavar = "HEX",
         .help = "the namespace to remove, see 'kvtier stat'; of a kvtierd also a model's name",
         .text = &ns_text},
        {.name = "all", .help = "remove every namespace", .flag = &all},
        {.name = "remote",
         .metavar = "URL",
         .help = "remove it from the tier that machines share too (all: what DIR holds of it)",
         .text = &job.remote.url},
        {.name = "remote-auth",
         .metavar = "FILE",
         .help = "its password, as the option remote_auth",
         .text = &job.remote.auth_file},
        {.name = "remote-ca",
         .metavar = "FILE",
         .help = "its authority, as the option remote_ca",
         .text = &job.remote.ca_file},
        {.name = "yes", .help = "do not ask", .flag = &yes},
        {.name = "json", .help = "one JSON object", .flag = &json},
    };
    int rc = kvt_cli_parse(
        "purge", "[DIR|unix:SOCKET] --namespace HEX | --all [--remote URL] [--yes] [--json]",
        options, sizeof(options) / sizeof(options[0]), &job.path, 0, 1, &words, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    if (!words)
        job.path = NULL;
    if (job.path && kvt_stats_is_daemon(job.path))
        return kvt_purge_daemon(
            &(struct kvt_purge_words){job.path, ns_text, all, yes, json, job.remote.url});
    rc = check_words(&job, ns_text, all, ns);
    if (rc)
        return rc;
    job.ns = all ? NULL : ns;
    snprintf(what, sizeof(what), all ? "every namespace%s" : "namespace %s", all ? "" : ns_text);
    rc = yes ? KVT_EXIT_OK : confirmed(&job, what);
    return rc ? rc : purge(&job, json);
}
