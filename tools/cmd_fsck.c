/* kvtier fsck: check a store directory without changing it.
 *
 * Takes the lock (shared) while it reads, so that no cache writes meanwhile; a directory that a
 * process owns is refused, unless --force: then what is being written may look unfinished.
 * Exit: 0 no problem, 1 problems, or the directory cannot be checked. Threads: one.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli.h"
#include "commands.h"
#include "kvtier/error.h"
#include "stats_file.h"
#include "store/fsck.h"
#include "store_dir.h"

#define FINDINGS_MAX 1000u /* of each kind; more are counted only */

struct check {
    json_t *problems, *notes;
    struct kvt_progress progress;
};

static void take_finding(void *ctx, bool problem, const char *text)
{
    struct check *check = ctx;
    json_t *list = problem ? check->problems : check->notes;

    if (json_array_size(list) < FINDINGS_MAX)
        json_array_append_new(list, json_string(text));
}

static int show_progress(void *ctx, uint64_t done, uint64_t total)
{
    struct check *check = ctx;

    kvt_progress_update(&check->progress, done, total);
    return kvt_cli_interrupted();
}

static void print_warning(void *arg, int level, const char *message)
{
    (void)arg;
    (void)level;
    kvt_cli_error("fsck", "%s", message);
}

/* Open and lock the directory for reading. 0, or after a message KVT_EXIT_PROBLEM. */
static int open_dir(const char *path, int force, struct kvt_io **io)
{
    struct kvt_io_posix_params params = {.path = path,
                                         .threads = 4,
                                         .direct = 0,
                                         .read_only = 1,
                                         .log = {print_warning, NULL, KVT_LOG_ERROR}};
    char error[512];
    int64_t pid = 0;
    int rc;

    if (kvt_stats_is_daemon(path)) {
        kvt_dir_not_daemon(path, error, sizeof(error));
        kvt_cli_error("fsck", "%s", error);
        return KVT_EXIT_PROBLEM;
    }
    rc = kvt_io_posix_new(&params, io);
    if (rc) {
        kvt_cli_error("fsck", "%s: %s", path, kvt_strerror(rc));
        return KVT_EXIT_PROBLEM;
    }
    rc = (*io)->ops->lock(*io, &pid);
    if (rc != KVT_E_LOCKED)
        return 0; /* held, or there is no lock file: then nobody has ever opened it */
    if (force) {
        kvt_cli_error("fsck", "%s: process %" PRId64 " is writing; unfinished parts may show", path,
                      pid);
        return 0;
    }
    kvt_cli_error("fsck", "%s: process %" PRId64 " owns this directory; stop it, or add --force",
                  path, pid);
    (*io)->ops->destroy(*io);
    return KVT_EXIT_PROBLEM;
}

static void print_list(const char *kind, const json_t *list, uint64_t count)
{
    for (size_t i = 0; i < json_array_size(list); i++)
        printf("%s: %s\n", kind, json_string_value(json_array_get(list, i)));
    if (count > json_array_size(list))
        printf("%s: ... and %" PRIu64 " more\n", kind, count - json_array_size(list));
}

static void print_report(const char *path, const struct check *check,
                         const struct kvt_fsck_report *report, int quick)
{
    char records[32], files[32], cap[32];

    print_list("note", check->notes, report->notes);
    print_list("problem", check->problems, report->problems);
    printf("%s: %" PRIu64 " segment%s, %" PRIu64 " record%s (%s)%s, %" PRIu64
           " superseded, %" PRIu64 " purged\n",
           path, report->segments, report->segments == 1 ? "" : "s", report->records,
           report->records == 1 ? "" : "s", kvt_human_bytes(report->bytes, records),
           quick ? " not read" : " verified", report->superseded, report->purged);
    printf("files: %s of %s\n", kvt_human_bytes(report->file_bytes, files),
           report->cap_bytes ? kvt_human_bytes(report->cap_bytes, cap) : "an unknown cap");
    if (report->problems)
        printf("%" PRIu64 " problem%s\nremedy: none is needed. What is damaged is a miss, and what "
               "is computed again is stored again in its place; if damage comes back, look at the "
               "drive\n",
               report->problems, report->problems == 1 ? "" : "s");
    else
        printf("no problems\n");
}

static int print_json(const char *path, struct check *check, const struct kvt_fsck_report *report,
                      int quick)
{
    return kvt_cli_json(json_pack(
        "{s:s, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:O, s:O}", "dir", path, "quick", quick,
        "segments", (json_int_t)report->segments, "records", (json_int_t)report->records, "bytes",
        (json_int_t)report->bytes, "superseded", (json_int_t)report->superseded, "purged",
        (json_int_t)report->purged, "file_bytes", (json_int_t)report->file_bytes, "cap_bytes",
        (json_int_t)report->cap_bytes, "problem_count", (json_int_t)report->problems, "problems",
        check->problems, "notes", check->notes));
}

/* Nothing in the log counts its segments, but the last owner did when it closed. What a later purge
 * emptied still counts as a segment here; a store over several drives counts them together. */
static void note_vanished(const char *path, struct check *check, struct kvt_fsck_report *report)
{
    json_t *counters = kvt_stats_read(path, NULL);
    uint64_t counted = kvt_stats_value(counters, "disk.segments");
    char text[200];

    if (kvt_stats_value(counters, "disk.roots") == 1 && counted > report->segments) {
        snprintf(text, sizeof(text),
                 "the last owner counted %" PRIu64 " segments with records, %" PRIu64
                 " are here: files may have been removed; their records are misses",
                 counted, report->segments);
        take_finding(check, false, text);
        report->notes++;
    }
    json_decref(counters);
}

/* As 'kvtier verify' and 'kvtier stat' count them. */
static void note_unreachable(const char *path, struct check *check, struct kvt_fsck_report *report)
{
    char text[200], error[512];
    struct kvt_dir dir;
    uint8_t *cut;
    size_t count;

    if (report->problems || kvt_dir_open(path, 0, &dir, error, sizeof(error)))
        return; /* what is damaged has been told */
    cut = calloc(dir.record_count + 1, 1);
    count = cut ? kvt_dir_cut(&dir, cut) : 0;
    free(cut);
    kvt_dir_close(&dir);
    if (!count || count == SIZE_MAX)
        return;
    snprintf(text, sizeof(text), "%zu records cannot be reached: a block before them is gone",
             count);
    take_finding(check, false, text);
    report->notes++;
}

static int fsck(const char *path, struct kvt_io *io, int quick, int json)
{
    struct check check = {.problems = json_array(), .notes = json_array()};
    const struct kvt_fsck_params params = {
        .io = io,
        .quick = quick,
        .found = take_finding,
        .progress = show_progress,
        .ctx = &check,
    };
    struct kvt_fsck_report report;
    int rc, exit_code = KVT_EXIT_PROBLEM;

    kvt_progress_start(&check.progress, "checking");
    rc = kvt_fsck(&params, &report);
    kvt_progress_done(&check.progress);
    if (rc == 1 || rc == KVT_E_NOT_OURS) {
        kvt_cli_error("fsck", "%s: not a kvtier store%s", path, rc == 1 ? ": it is empty" : "");
    } else if (rc == KVT_E_CANCELED) {
        kvt_cli_error("fsck", "%s: interrupted, nothing can be said", path);
    } else if (rc) {
        kvt_cli_error("fsck", "%s: %s", path, kvt_strerror(rc));
    } else {
        note_vanished(path, &check, &report);
        note_unreachable(path, &check, &report);
        exit_code = report.problems ? KVT_EXIT_PROBLEM : KVT_EXIT_OK;
        if (json)
            exit_code |= print_json(path, &check, &report, quick);
        else
            print_report(path, &check, &report, quick);
    }
    json_decref(check.problems);
    json_decref(check.notes);
    return exit_code;
}

int kvt_cmd_fsck(int argc, char **argv)
{
    int json = 0, quick = 0, force = 0;
    const char *path = NULL;
    struct kvt_io *io;
    size_t words = 0;
    const struct kvt_cli_option options[] = {
        {.name = "quick", .help = "structures only, records are not read", .flag = &quick},
        {.name = "force", .help = "check although a process owns the directory", .flag = &force},
        {.name = "json", .help = "one JSON object", .flag = &json},
    };
    int rc = kvt_cli_parse("fsck", "DIR [--quick] [--force] [--json]", options,
                           sizeof(options) / sizeof(options[0]), &path, 1, 1, &words, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    kvt_cli_catch_interrupt();
    rc = open_dir(path, force, &io);
    if (rc)
        return rc;
    rc = fsck(path, io, quick, json);
    io->ops->destroy(io);
    return rc;
}
