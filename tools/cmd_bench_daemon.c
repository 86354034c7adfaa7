/* kvtier bench daemon: what the way to a kvtierd costs, beside the same cache in this process.
 *
 * Round trips of lookups (64 keys, and a chain of 8,192), by callers that sleep and by ones that
 * spin; loads from DRAM and from disk, raw; and as many client processes as processors at a time,
 * beside one process with a store of its own. Everything is measured in pairs, one side right after
 * the other and each first in turn, so that a busy machine spoils both alike: medians are told, and
 * ratios are medians of the pairs' ratios. Processes: this one, a kvtierd, and clients by fork().
 */
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "bench_daemon.h"
#include "cli.h"
#include "commands.h"
#include "daemon_child.h"

#define COMMAND "bench daemon"
#define CHAIN 8192u
#define LOOKUPS 64u /* of a pair, one side: the median of them counts */
#define ROW 16      /* loads one after the other */
#define PAIRS_MAX 1000

enum { PROCESS, DAEMON, SIDES };

struct pairs { /* of one measure */
    double value[SIDES][PAIRS_MAX];
    uint32_t count;
};

struct figures {
    double value[SIDES], ratio; /* ratio: daemon / process */
};

struct results {
    struct figures sleep, late, spin, chain, dram, row, disk, clients;
};

static int order(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *values, uint32_t count)
{
    qsort(values, count, sizeof(values[0]), order);
    return count > 0 ? values[count / 2] : 0;
}

static struct figures pairs_end(struct pairs *pairs)
{
    static double ratios[PAIRS_MAX];
    struct figures out = {.ratio = 0};

    for (uint32_t i = 0; i < pairs->count; i++)
        ratios[i] =
            pairs->value[PROCESS][i] > 0 ? pairs->value[DAEMON][i] / pairs->value[PROCESS][i] : 0;
    out.ratio = median(ratios, pairs->count);
    for (int side = 0; side < SIDES; side++)
        out.value[side] = median(pairs->value[side], pairs->count);
    return out;
}

/* ---- one side once ------------------------------------------------------------------------- */

/* Median of some lookups in microseconds; *late: the longest of them. */
static double lookups(struct kvt_bench_side *side, double *late)
{
    double took[LOOKUPS];

    for (uint32_t i = 0; i < LOOKUPS; i++)
        took[i] = 1e6 * kvt_bench_lookup(side, 64);
    double middle = median(took, LOOKUPS);
    *late = took[LOOKUPS - 1];
    return middle;
}

static double chain_ms(struct kvt_bench_side *side)
{
    return 1e3 * kvt_bench_lookup(side, CHAIN);
}

static double load_gbs(struct kvt_bench_side *side)
{
    double seconds;

    return kvt_bench_move(side, 0, &seconds) == KVT_BENCH_BLOCKS ? KVT_BENCH_BYTES * 1e-9 / seconds
                                                                 : 0;
}

/* Loads one after the other, as an engine at work has them: threads are awake and in their places,
 * where a single load after a pause also measures how soon a scheduler gives them some. */
static double row_gbs(struct kvt_bench_side *side)
{
    double seconds, sum = 0;

    for (int i = 0; i < ROW; i++) {
        if (kvt_bench_move(side, 0, &seconds) != KVT_BENCH_BLOCKS)
            return 0;
        sum += seconds;
    }
    return ROW * KVT_BENCH_BYTES * 1e-9 / sum;
}

/* ---- pairs --------------------------------------------------------------------------------- */

static struct figures measure(struct kvt_bench_side sides[SIDES], uint32_t pairs,
                              double (*once)(struct kvt_bench_side *))
{
    static struct pairs all;

    all.count = 0;
    for (uint32_t i = 0; i < pairs && !kvt_cli_interrupted(); i++, all.count++)
        for (uint32_t turn = 0; turn < SIDES; turn++) {
            uint32_t side = (i + turn) % SIDES;
            all.value[side][i] = once(&sides[side]);
        }
    return pairs_end(&all);
}

static void measure_lookups(struct kvt_bench_side sides[SIDES], uint32_t pairs, struct figures *out,
                            struct figures *out_late)
{
    static struct pairs all, late;

    all.count = late.count = 0;
    for (uint32_t i = 0; i < pairs && !kvt_cli_interrupted(); i++, all.count++, late.count++)
        for (uint32_t turn = 0; turn < SIDES; turn++) {
            uint32_t side = (i + turn) % SIDES;
            all.value[side][i] = lookups(&sides[side], &late.value[side][i]);
        }
    *out = pairs_end(&all);
    if (out_late != NULL)
        *out_late = pairs_end(&late);
}

static void close_both(struct kvt_bench_side sides[SIDES])
{
    for (int i = 0; i < SIDES; i++)
        kvt_bench_close(&sides[i]);
}

/* Store all blocks, by and by where DRAM does not hold them. 0, -1. */
static int store_all(struct kvt_bench_side *side)
{
    double seconds;
    size_t there = 0;

    for (int tries = 0; tries < 50 && there != KVT_BENCH_BLOCKS; tries++) {
        there = kvt_bench_move(side, 1, &seconds);
        if (kvt_flush(side->cache) != 0 && there == KVT_BENCH_BLOCKS)
            return -1;
    }
    return there == KVT_BENCH_BLOCKS ? 0 : -1;
}

/* Open both, with the blocks stored. 0, -1 (said). */
static int open_both(struct kvt_bench_side sides[SIDES], const char *const options[SIDES])
{
    memset(sides, 0, SIDES * sizeof(sides[0]));
    for (int i = 0; i < SIDES; i++) {
        if (kvt_bench_open(&sides[i], options[i]) == 0 && store_all(&sides[i]) == 0)
            continue;
        kvt_cli_error(COMMAND, "the blocks to measure by could not be stored: %s", options[i]);
        return -1;
    }
    return 0;
}

struct plan {
    int64_t rounds, seconds;
    const char *dir;
    unsigned processes;
};

static uint32_t pairs_of(const struct plan *plan, uint32_t share)
{
    return (uint32_t)KVT_MIN(KVT_MAX(plan->rounds / share, INT64_C(11)), (int64_t)PAIRS_MAX);
}

/* As many processes as processors, beside one alone. */
static struct figures measure_clients(const struct plan *plan, const char *const options[SIDES])
{
    static struct pairs all;

    all.count = 0;
    for (uint32_t i = 0; i < 5 && !kvt_cli_interrupted(); i++, all.count++)
        for (uint32_t turn = 0; turn < SIDES; turn++) {
            uint32_t side = (i + turn) % SIDES;
            all.value[side][i] =
                1e-9 * kvt_bench_clients(options[side], side == DAEMON ? plan->processes : 1,
                                         plan->seconds);
        }
    return pairs_end(&all);
}

/* Everything that needs DRAM alone, and nobody spins. */
static int measure_dram(const struct plan *plan, struct results *out)
{
    static const char *const words[] = {"--dram", "512MiB", NULL};
    char socket[KVT_DAEMON_SOCKET_ROOM], plain[160];
    const char *const options[SIDES] = {"env=no,dram=512MiB", plain};
    struct kvt_bench_side sides[SIDES];
    pid_t pid;

    if (kvt_daemon_child(COMMAND, words, socket, &pid) != 0)
        return -1;
    snprintf(plain, sizeof(plain), "env=no,unix:%s", socket);
    int rc = open_both(sides, options);
    if (rc == 0) {
        measure_lookups(sides, pairs_of(plan, LOOKUPS), &out->sleep, &out->late);
        out->chain = measure(sides, pairs_of(plan, 20), chain_ms);
        (void)measure(sides, 2, load_gbs); /* pages are touched */
        out->dram = measure(sides, pairs_of(plan, 50), load_gbs);
        out->row = measure(sides, pairs_of(plan, 100), row_gbs);
    }
    close_both(sides);
    if (rc == 0)
        out->clients = measure_clients(plan, options);
    kvt_daemon_child_end(pid);
    return rc;
}

/* Lookups where callers and kvtierd spin. A daemon that spins beside two workers takes a processor
 * from them, so loads are not measured by this one. */
static int measure_spin(const struct plan *plan, struct results *out)
{
    static const char *const words[] = {"--dram", "512MiB", "--spin", "50us", NULL};
    char socket[KVT_DAEMON_SOCKET_ROOM], spin[180];
    const char *const options[SIDES] = {"env=no,dram=512MiB,spin=200us", spin};
    struct kvt_bench_side sides[SIDES];
    pid_t pid;

    if (kvt_daemon_child(COMMAND, words, socket, &pid) != 0)
        return -1;
    snprintf(spin, sizeof(spin), "env=no,unix:%s,spin=200us", socket);
    int rc = open_both(sides, options);
    if (rc == 0)
        measure_lookups(sides, pairs_of(plan, LOOKUPS), &out->spin, NULL);
    close_both(sides);
    kvt_daemon_child_end(pid);
    return rc;
}

/* A root of our own making: files only. */
static void root_remove(const char *path)
{
    struct dirent *entry;
    DIR *dir = opendir(path);

    while (dir != NULL && (entry = readdir(dir)) != NULL)
        (void)unlinkat(dirfd(dir), entry->d_name, 0); /* "." and ".." are none */
    if (dir != NULL)
        (void)closedir(dir);
    if (rmdir(path) != 0)
        kvt_cli_error(COMMAND, "%s is left behind: %m", path);
}

/* Loads that all come from disk: there is no DRAM but what they stage through. */
static int measure_disk(const struct plan *plan, struct results *out)
{
    char own[300], theirs[300], socket[KVT_DAEMON_SOCKET_ROOM], process[400], plain[160];
    const char *const words[] = {"--dram", "0", "--disk", theirs, NULL};
    const char *const options[SIDES] = {process, plain};
    struct kvt_bench_side sides[SIDES];
    pid_t pid;

    snprintf(own, sizeof(own), "%s/kvtier-bench-%d-process:1GiB", plan->dir, (int)getpid());
    snprintf(theirs, sizeof(theirs), "%s/kvtier-bench-%d-daemon:1GiB", plan->dir, (int)getpid());
    if (kvt_daemon_child(COMMAND, words, socket, &pid) != 0)
        return -1;
    snprintf(process, sizeof(process), "env=no,dram=0,disk=%s", own);
    snprintf(plain, sizeof(plain), "env=no,unix:%s", socket);
    int rc = open_both(sides, options);
    if (rc == 0)
        out->disk = measure(sides, pairs_of(plan, 100), load_gbs);
    close_both(sides);
    kvt_daemon_child_end(pid);
    *strrchr(own, ':') = '\0';
    *strrchr(theirs, ':') = '\0';
    root_remove(own);
    root_remove(theirs);
    return rc;
}

/* ---- telling ------------------------------------------------------------------------------- */

static unsigned processors(void)
{
    cpu_set_t set;

    return sched_getaffinity(0, sizeof(set), &set) == 0 ? (unsigned)CPU_COUNT(&set) : 1;
}

static void print_row(const char *what, const struct figures *f, const char *unit)
{
    printf("  %-34s %10.2f %-5s %10.2f %-5s %6.2f\n", what, f->value[PROCESS], unit,
           f->value[DAEMON], unit, f->ratio);
}

static void print_results(const struct results *r, const struct plan *plan)
{
    char name[40];

    printf("  %-34s %10s       %10s       %6s\n", "", "process", "kvtierd", "ratio");
    print_row("lookup of 64 keys, sleeping", &r->sleep, "us");
    print_row("  the longest of 64", &r->late, "us");
    print_row("lookup of 64 keys, spinning", &r->spin, "us");
    print_row("lookup of a chain of 8192", &r->chain, "ms");
    print_row("load from DRAM, raw", &r->dram, "GB/s");
    print_row("  16 of them in a row", &r->row, "GB/s");
    if (plan->dir != NULL)
        print_row("load from disk, raw", &r->disk, "GB/s");
    snprintf(name, sizeof(name), "%u processes, beside one alone", plan->processes);
    print_row(name, &r->clients, "GB/s");
    printf("  ratio: kvtierd to process, the median of pairs\n");
}

static json_t *figures_json(const struct figures *f)
{
    return json_pack("{s:f, s:f, s:f}", "process", f->value[PROCESS], "daemon", f->value[DAEMON],
                     "ratio", f->ratio);
}

static int print_json(const struct results *r, const struct plan *plan)
{
    json_t *out = json_pack("{s:i, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:i}", "clients",
                            (int)plan->processes, "lookup64_us", figures_json(&r->sleep),
                            "lookup64_late_us", figures_json(&r->late), "lookup64_spin_us",
                            figures_json(&r->spin), "lookup8192_ms", figures_json(&r->chain),
                            "load_dram_gb_per_s", figures_json(&r->dram), "loads_dram_gb_per_s",
                            figures_json(&r->row), "all_clients_gb_per_s",
                            figures_json(&r->clients), "block_bytes", (int)KVT_BENCH_BLOCK_BYTES);

    if (out != NULL && plan->dir != NULL)
        json_object_set_new(out, "load_disk_gb_per_s", figures_json(&r->disk));
    return kvt_cli_json(out);
}

int kvt_cmd_bench_daemon(int argc, char **argv)
{
    struct plan plan = {.rounds = 2000, .seconds = 2, .processes = processors()};
    struct results results = {.sleep = {.ratio = 0}};
    int json = 0;
    const struct kvt_cli_option options[] = {
        {.name = "rounds",
         .metavar = "N",
         .help =
             "lookups that are timed, on each side; other measures in proportion (default 2000)",
         .number = &plan.rounds,
         .min = 10,
         .max = 100000},
        {.name = "seconds",
         .metavar = "N",
         .help = "that many processes load at a time for, five times (default 2)",
         .number = &plan.seconds,
         .min = 1,
         .max = 600},
        {.name = "dir",
         .metavar = "DIR",
         .help = "also loads from disk: two roots of 1 GiB are made in it, and removed",
         .text = &plan.dir},
        {.name = "json", .help = "one JSON object", .flag = &json},
    };
    int rc = kvt_cli_parse(COMMAND, "[--rounds N] [--seconds N] [--dir DIR] [--json]", options,
                           KVT_ARRAY_LEN(options), NULL, 0, 0, NULL, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    kvt_cli_catch_interrupt();
    rc = measure_dram(&plan, &results);
    if (rc == 0)
        rc = measure_spin(&plan, &results);
    if (rc == 0 && plan.dir != NULL)
        rc = measure_disk(&plan, &results);
    if (rc != 0 || kvt_cli_interrupted())
        return KVT_EXIT_PROBLEM;
    if (json)
        return print_json(&results, &plan);
    print_results(&results, &plan);
    return KVT_EXIT_OK;
}
