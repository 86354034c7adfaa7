/* kvtier verify: would every block of a store come back as it was put?
 *
 * fsck looks at the directory as a structure, and wants it at rest. verify looks at it as a loader
 * does, also beside a running owner: it lists what a restart would find (the newest record of each
 * key, purged ones left out), reads each of them whole and checks key, lengths and checksum as a
 * load does; that records of one kind have one length; and that the chain of each record leads to
 * the start of its sequence, since a lookup never reaches a block behind a gap.
 *
 * Beside an owner the log moves on: what fails is looked up again in a second recovery, and counts
 * only if it is still listed and still bad.
 * Reads only, at a set rate. Threads: one, and one of the I/O backend.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/clock.h"
#include "cli.h"
#include "commands.h"
#include "kvtier/codec.h"
#include "kvtier/error.h"
#include "store_dir.h"

#define COMMAND "verify"
#define PROBLEMS_MAX 1000u /* listed; the rest is counted */

struct verify {
    const char *path;
    const uint8_t *ns; /* NULL: all */
    uint64_t rate;     /* bytes a second, 0: as fast as it goes */
    int json;
    struct kvt_dir dir;
    int64_t owner;
    size_t *order; /* records by place on disk */
    size_t count;
    size_t *bad; /* of order: failed in the first pass */
    int *bad_rc;
    size_t bad_count;
    json_t *problems;
    uint64_t problem_count;
    uint64_t bytes, changed, unreachable, chains, chain_max;
    int64_t start_ns;
    double seconds;
};

static void problem(struct verify *v, const struct kvt_dir_record *record, const char *what)
{
    char text[256], hash[2 * 8 + 1];

    for (unsigned i = 0; i < 8; i++)
        snprintf(hash + 2 * i, 3, "%02x", record->key.hash[i]);
    snprintf(text, sizeof(text), "seg-%08x page %u, key %s...: %s", record->where.segment,
             record->where.page, hash, what);
    if (!v->json)
        printf("problem: %s\n", text);
    if (v->problem_count++ < PROBLEMS_MAX)
        json_array_append_new(v->problems, json_string(text));
}

static int64_t now_ns(void)
{
    struct kvt_clock clock = kvt_clock_system();

    return kvt_clock_now(&clock);
}

/* Sleep until `bytes` are due at the rate. An interrupt ends the sleep. */
static void keep_rate(const struct verify *v, uint64_t bytes)
{
    if (!v->rate)
        return;
    double due = (double)bytes / (double)v->rate, past = (double)(now_ns() - v->start_ns) * 1e-9;
    if (due <= past)
        return;
    double wait = due - past;
    struct timespec ts = {.tv_sec = (time_t)wait,
                          .tv_nsec = (long)((wait - (double)(time_t)wait) * 1e9)};
    nanosleep(&ts, NULL);
}

static const struct kvt_dir *order_dir; /* qsort has no argument of its own */

static int by_place(const void *a, const void *b)
{
    const struct kvt_l2_where *x = &order_dir->records[*(const size_t *)a].where;
    const struct kvt_l2_where *y = &order_dir->records[*(const size_t *)b].where;

    if (x->segment != y->segment)
        return x->segment < y->segment ? -1 : 1;
    return (x->page > y->page) - (x->page < y->page);
}

static int make_order(struct verify *v)
{
    v->order = calloc(v->dir.record_count + 1, sizeof(*v->order));
    v->bad = calloc(v->dir.record_count + 1, sizeof(*v->bad));
    v->bad_rc = calloc(v->dir.record_count + 1, sizeof(*v->bad_rc));
    if (!v->order || !v->bad || !v->bad_rc)
        return -ENOMEM;
    for (size_t i = 0; i < v->dir.record_count; i++)
        if (!v->ns || !memcmp(v->dir.records[i].key.ns, v->ns, KVT_NS_BYTES))
            v->order[v->count++] = i;
    order_dir = &v->dir;
    if (v->count)
        qsort(v->order, v->count, sizeof(*v->order), by_place);
    return 0;
}

/* First pass: every record in the order of the disk. */
static int read_all(struct verify *v)
{
    struct kvt_dir_reader reader;
    struct kvt_progress progress;
    uint64_t total = 0;
    int rc = 0;

    for (size_t i = 0; i < v->count; i++)
        total += (uint64_t)v->dir.records[v->order[i]].pages * KVT_PAGE_BYTES;
    kvt_dir_reader_open(&reader, &v->dir);
    kvt_progress_start(&progress, "verifying");
    v->start_ns = now_ns();
    for (size_t i = 0; i < v->count && !rc; i++) {
        const struct kvt_dir_record *record = &v->dir.records[v->order[i]];
        int status = kvt_dir_read(&reader, record);

        if (status == -ENOMEM)
            rc = status;
        if (status) {
            v->bad[v->bad_count] = v->order[i];
            v->bad_rc[v->bad_count++] = status;
        }
        v->bytes += (uint64_t)record->pages * KVT_PAGE_BYTES;
        kvt_progress_update(&progress, v->bytes, total);
        keep_rate(v, v->bytes);
        if (kvt_cli_interrupted())
            rc = KVT_E_CANCELED;
    }
    v->seconds = (double)(now_ns() - v->start_ns) * 1e-9;
    kvt_progress_done(&progress);
    kvt_dir_reader_close(&reader);
    return rc;
}

/* Is the record still listed at its place, and still bad? Without an owner nothing can have
 * changed. 1: yes. */
static int still_bad(const struct kvt_dir *later, struct kvt_dir_reader *reader,
                     const struct kvt_dir_record *record)
{
    size_t at = kvt_dir_find(later, &record->key);

    if (at == SIZE_MAX || later->records[at].sequence != record->sequence ||
        later->records[at].generation != record->generation)
        return 0;
    return kvt_dir_read(reader, &later->records[at]) != 0;
}

static int judge(struct verify *v)
{
    struct kvt_dir later = {0};
    struct kvt_dir_reader reader;
    char error[512];

    if (v->bad_count && v->owner) {
        if (kvt_dir_open(v->path, 0, &later, error, sizeof(error))) {
            kvt_cli_error(COMMAND, "%s", error);
            return KVT_E_CORRUPT;
        }
        kvt_dir_reader_open(&reader, &later);
    }
    for (size_t i = 0; i < v->bad_count; i++) {
        const struct kvt_dir_record *record = &v->dir.records[v->bad[i]];
        if (v->owner && !still_bad(&later, &reader, record))
            v->changed++;
        else
            problem(v, record, kvt_strerror(v->bad_rc[i]));
    }
    if (v->bad_count && v->owner) {
        kvt_dir_reader_close(&reader);
        kvt_dir_close(&later);
    }
    return 0;
}

#define GROUPS_MAX 16u /* of a namespace; a record of a higher group is not compared */

/* Records of one namespace, group and level have one length. The list is sorted by namespace. */
static void check_lengths(struct verify *v)
{
    const struct kvt_dir_record *seen[GROUPS_MAX][16] = {{NULL}};

    for (size_t i = 0; i < v->dir.record_count; i++) {
        const struct kvt_dir_record *r = &v->dir.records[i];
        if ((v->ns && memcmp(r->key.ns, v->ns, KVT_NS_BYTES) != 0) || r->key.group >= GROUPS_MAX)
            continue;
        const struct kvt_dir_record **first = &seen[r->key.group][r->map % 16];
        if (!*first || memcmp((*first)->key.ns, r->key.ns, KVT_NS_BYTES) != 0)
            *first = r;
        else if ((*first)->pages != r->pages)
            problem(v, r, "its length differs from that of its namespace and level");
    }
}

enum { UNKNOWN = 0, ON_PATH, REACHED, CUT };

/* Walk from record i to the start of its sequence, or to one that is known already. */
static void walk(struct verify *v, size_t i, uint8_t *state, uint32_t *depth, size_t *path)
{
    size_t at = i, steps = 0;
    uint8_t end = UNKNOWN;

    while (at != SIZE_MAX && state[at] == UNKNOWN) {
        const struct kvt_dir_record *record = &v->dir.records[at];
        size_t parent = kvt_dir_parent(&v->dir, record);

        state[at] = ON_PATH;
        path[steps++] = at;
        if (!record->parent_len) {
            v->chains++;
            end = REACHED;
        } else if (parent == SIZE_MAX) {
            end = CUT;
        } else if (v->dir.records[parent].first_pos >= record->first_pos) {
            problem(v, record, "stands before its parent in the sequence");
            end = CUT;
        }
        at = end ? SIZE_MAX : parent;
    }
    /* positions rise along a chain, so a path never meets itself */
    uint32_t length = at == SIZE_MAX ? 0 : depth[at];
    end = end ? end : state[at];
    while (steps--) {
        state[path[steps]] = end;
        depth[path[steps]] = ++length;
        v->unreachable += end == CUT;
        if (end == REACHED && length > v->chain_max)
            v->chain_max = length;
    }
}

static int check_chains(struct verify *v)
{
    size_t n = v->dir.record_count + 1;
    uint8_t *state = calloc(n, sizeof(*state));
    uint32_t *depth = calloc(n, sizeof(*depth));
    size_t *path = calloc(n, sizeof(*path));
    int rc = state && depth && path ? 0 : -ENOMEM;

    for (size_t i = 0; i < v->count && !rc; i++)
        walk(v, v->order[i], state, depth, path);
    free(state);
    free(depth);
    free(path);
    return rc;
}

static void print_report(const struct verify *v)
{
    char bytes[32];

    printf("%s: %zu records, %s read in %.1f s\n", v->path, v->count,
           kvt_human_bytes(v->bytes, bytes), v->seconds);
    printf("%" PRIu64 " sequences, the longest of %" PRIu64 " blocks\n", v->chains, v->chain_max);
    if (v->unreachable)
        printf("%" PRIu64 " records cannot be reached: a block before them is gone (the owner "
               "drops them by and by)\n",
               v->unreachable);
    if (v->changed)
        printf("%" PRIu64 " records were recycled or purged by process %" PRId64 " meanwhile\n",
               v->changed, v->owner);
    if (v->problem_count)
        printf("%" PRIu64 " problems\n", v->problem_count);
    else
        printf(
            "no problems in what a restart would find; whether files are missing or damaged as a "
            "whole: kvtier fsck\n");
}

static int print_json(const struct verify *v)
{
    return kvt_cli_json(json_pack(
        "{s:s, s:o, s:I, s:I, s:f, s:I, s:I, s:I, s:I, s:I, s:O}", "dir", v->path, "owner_pid",
        v->owner ? json_integer(v->owner) : json_null(), "records", (json_int_t)v->count, "bytes",
        (json_int_t)v->bytes, "seconds", v->seconds, "sequences", (json_int_t)v->chains,
        "sequence_blocks_max", (json_int_t)v->chain_max, "unreachable", (json_int_t)v->unreachable,
        "changed", (json_int_t)v->changed, "problem_count", (json_int_t)v->problem_count,
        "problems", v->problems));
}

static int verify(struct verify *v)
{
    char error[512];
    int exit_code = KVT_EXIT_PROBLEM;

    v->owner = kvt_dir_owner(v->path);
    if (kvt_dir_open(v->path, 0, &v->dir, error, sizeof(error))) {
        kvt_cli_error(COMMAND, "%s", error);
        return KVT_EXIT_PROBLEM;
    }
    if (v->ns && !kvt_dir_knows_ns(&v->dir, v->ns, COMMAND, v->path, "")) {
        kvt_dir_close(&v->dir);
        return KVT_EXIT_PROBLEM;
    }
    v->problems = json_array();
    int rc = make_order(v);
    if (!rc)
        rc = read_all(v);
    if (!rc)
        rc = judge(v);
    if (!rc) {
        check_lengths(v);
        rc = check_chains(v);
    }
    if (rc == KVT_E_CANCELED)
        kvt_cli_error(COMMAND, "%s: interrupted, nothing can be said", v->path);
    else if (rc)
        kvt_cli_error(COMMAND, "%s: %s", v->path, kvt_strerror(rc));
    else
        exit_code = v->problem_count ? KVT_EXIT_PROBLEM : KVT_EXIT_OK;
    if (!rc && v->json)
        exit_code |= print_json(v);
    else if (!rc)
        print_report(v);
    free(v->order);
    free(v->bad);
    free(v->bad_rc);
    json_decref(v->problems);
    kvt_dir_close(&v->dir);
    return exit_code;
}

int kvt_cmd_verify(int argc, char **argv)
{
    struct verify v = {0};
    const char *ns_text = NULL;
    uint8_t ns[KVT_NS_BYTES];
    size_t words = 0;
    const struct kvt_cli_option options[] = {
        {.name = "rate",
         .metavar = "SIZE",
         .help = "read at most this much a second, so that others get the drive",
         .size = &v.rate,
         .min = 4096,
         .max = INT64_MAX},
        {.name = "namespace", .metavar = "HEX", .help = "this one only", .text = &ns_text},
        {.name = "json", .help = "one JSON object", .flag = &v.json},
    };
    int rc = kvt_cli_parse(COMMAND, "DIR [--rate SIZE] [--namespace HEX] [--json]", options,
                           KVT_ARRAY_LEN(options), &v.path, 1, 1, &words, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    if (ns_text && kvt_dir_ns_parse(ns_text, ns)) {
        kvt_cli_error(COMMAND, "--namespace: '%s' is not 32 hexadecimal digits", ns_text);
        return KVT_EXIT_USAGE;
    }
    v.ns = ns_text ? ns : NULL;
    kvt_cli_catch_interrupt();
    return verify(&v);
}
