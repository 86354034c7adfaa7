/* kvtier bench l2: how fast our log reads and writes a directory, beside fio on the same drive.
 *
 * Every pair is one pass of ours and one of fio in turns, the order changing from pair to pair;
 * what is reported is the median of each, and of the ratios within the pairs, because a drive that
 * others use as well is not as fast now as it was a minute ago. Ours makes and verifies checksums.
 * With --roots, pairs of a cache over one root and a cache over several follow in the same way.
 * The kernel is asked how many bytes really came from the drive: when that is none, the lower tier
 * was never read, and the command fails.
 * Threads: one, and those of the backend. Works in a directory of its own inside --dir.
 */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "bench_l2.h"
#include "cli.h"
#include "commands.h"
#include "kvtier/kvtier.h"

#define COMMAND "bench l2"
#define PAIRS_MAX 31
#define ROOTS_MAX 16 /* of a cache */
enum { OURS, FIO, SIDES };
enum { READ, WRITE, WAYS };
enum { ONE_ROOT, ALL_ROOTS, ROOT_SIDES };

struct bench {
    struct kvt_bench_l2_shape shape;
    const char *dir;
    int fio, json;
    int64_t pairs, roots;
    char scratch[PATH_MAX - 16], fio_file[PATH_MAX];
    struct kvt_bench_log *log;
    int direct;
    double gbps[SIDES][WAYS][PAIRS_MAX];
    uint64_t moved, from_drive; /* by our reads */
    double roots_gbps[ROOT_SIDES][WAYS][PAIRS_MAX];
    double roots_disk_share[ROOT_SIDES]; /* the least of all passes */
};

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(const double *values, int64_t n)
{
    double sorted[PAIRS_MAX];

    memcpy(sorted, values, (size_t)n * sizeof(*values));
    qsort(sorted, (size_t)n, sizeof(*sorted), by_value);
    return n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

static double median_ratio(const double *ours, const double *theirs, int64_t pairs)
{
    double ratios[PAIRS_MAX] = {0};

    for (int64_t i = 0; i < pairs; i++)
        ratios[i] = ours[i] / theirs[i];
    return median(ratios, pairs);
}

static double fio_ratio(const struct bench *b, int way)
{
    return median_ratio(b->gbps[OURS][way], b->gbps[FIO][way], b->pairs);
}

static double roots_ratio(const struct bench *b, int way)
{
    return median_ratio(b->roots_gbps[ALL_ROOTS][way], b->roots_gbps[ONE_ROOT][way], b->pairs);
}

/* Bytes that this process made the drive read, as the kernel counts them; 0 when it does not say.
 */
static uint64_t bytes_from_drive(void)
{
    static const char name[] = "read_bytes: ";
    uint64_t bytes = 0;
    FILE *f = fopen("/proc/self/io", "re");
    char line[128];

    while (f && fgets(line, sizeof(line), f))
        if (!strncmp(line, name, sizeof(name) - 1))
            bytes = strtoull(line + sizeof(name) - 1, NULL, 10);
    if (f)
        fclose(f);
    return bytes;
}

/* ---- passes ---- */

static int our_pass(struct bench *b, int way, int64_t pair)
{
    uint64_t before = bytes_from_drive();
    int64_t ns = 0;
    int rc = way == READ ? kvt_bench_log_read(b->log, &ns) : kvt_bench_log_write(b->log, &ns);

    if (rc) {
        kvt_cli_error(COMMAND, "%s: %s", way == READ ? "reading" : "writing", kvt_strerror(rc));
        return rc;
    }
    b->gbps[OURS][way][pair] = (double)b->shape.bytes / (double)KVT_MAX(ns, 1);
    if (way == READ) {
        b->moved += b->shape.bytes;
        b->from_drive += bytes_from_drive() - before;
    }
    return 0;
}

static int fio_pass(struct bench *b, int way, double *gbps)
{
    char why[512];
    int rc = kvt_bench_fio(b->fio_file, &b->shape, way == WRITE, b->direct, gbps, why, sizeof(why));

    if (rc)
        kvt_cli_error(COMMAND, "%s", why);
    return rc;
}

static int run_pairs(struct bench *b)
{
    struct kvt_progress progress;
    int rc = 0;

    kvt_progress_start(&progress, "measuring");
    for (int64_t pair = 0; pair < b->pairs && !rc; pair++) {
        for (int half = 0; half < 2 * WAYS && !rc; half++) {
            int way = half / 2 ? READ : WRITE;
            int side = (half + (int)pair) % 2 ? FIO : OURS;

            if (kvt_cli_interrupted())
                rc = -EINTR;
            else if (side == OURS)
                rc = our_pass(b, way, pair);
            else if (b->fio)
                rc = fio_pass(b, way, &b->gbps[FIO][way][pair]);
        }
        kvt_progress_update(&progress, (uint64_t)pair + 1, (uint64_t)b->pairs);
    }
    kvt_progress_done(&progress);
    return rc;
}

static int roots_pass(struct bench *b, int side, int64_t pair)
{
    unsigned roots = side == ONE_ROOT ? 1 : (unsigned)b->roots;
    struct kvt_bench_roots result;
    char why[512];
    int rc = kvt_bench_roots(b->scratch, &b->shape, roots, &result, why, sizeof(why));

    if (rc) {
        kvt_cli_error(COMMAND, "a cache over %u roots: %s", roots, why);
        return rc;
    }
    b->roots_gbps[side][READ][pair] = result.read_gbps;
    b->roots_gbps[side][WRITE][pair] = result.write_gbps;
    if (!pair || result.disk_share < b->roots_disk_share[side])
        b->roots_disk_share[side] = result.disk_share;
    return 0;
}

static int run_roots(struct bench *b)
{
    struct kvt_progress progress;
    int rc = 0;

    kvt_progress_start(&progress, "measuring roots");
    for (int64_t half = 0; half < 2 * b->pairs && !rc; half++) {
        int64_t pair = half / 2;

        rc = kvt_cli_interrupted() ? -EINTR : roots_pass(b, (int)((half + pair) % 2), pair);
        kvt_progress_update(&progress, (uint64_t)half + 1, 2 * (uint64_t)b->pairs);
    }
    kvt_progress_done(&progress);
    return rc;
}

/* ---- report ---- */

static json_t *sizes_json(const struct kvt_io_counts *counts)
{
    json_t *sizes = json_object();
    char name[32];

    for (unsigned i = 0; i < KVT_IO_COUNT_SIZES; i++) {
        if (!counts->requests[i])
            continue;
        snprintf(name, sizeof(name), "%" PRIu64, kvt_io_count_size(i));
        json_object_set_new(sizes, name, json_integer((json_int_t)counts->requests[i]));
    }
    return sizes;
}

static double cached_share(const struct bench *b)
{
    return b->moved ? 1.0 - (double)KVT_MIN(b->from_drive, b->moved) / (double)b->moved : 1.0;
}

static json_t *roots_json(const struct bench *b)
{
    json_t *sides = json_array();

    for (int side = 0; side < ROOT_SIDES; side++) {
        json_t *one = json_pack(
            "{s:I, s:f, s:f, s:f}", "roots", side == ONE_ROOT ? (json_int_t)1 : b->roots,
            "read_gbps", median(b->roots_gbps[side][READ], b->pairs), "write_gbps",
            median(b->roots_gbps[side][WRITE], b->pairs), "disk_share", b->roots_disk_share[side]);

        if (side == ALL_ROOTS) {
            json_object_set_new(one, "read_ratio", json_real(roots_ratio(b, READ)));
            json_object_set_new(one, "write_ratio", json_real(roots_ratio(b, WRITE)));
        }
        json_array_append_new(sides, one);
    }
    return sides;
}

static int print_json(const struct bench *b, const struct kvt_io_info *info)
{
    json_t *out = json_pack(
        "{s:s, s:s, s:f, s:f, s:b, s:s, s:I, s:I, s:I, s:I, s:I, s:f, s:I, s:o, s:o}", "backend",
        info->backend, "backend_why", info->backend_why ? info->backend_why : "", "read_gbps",
        median(b->gbps[OURS][READ], b->pairs), "write_gbps", median(b->gbps[OURS][WRITE], b->pairs),
        "direct_io", info->direct, "why", info->why, "bytes", (json_int_t)b->shape.bytes,
        "block_bytes", (json_int_t)b->shape.block, "record_bytes", (json_int_t)b->shape.record,
        "depth", (json_int_t)b->shape.depth, "pairs", (json_int_t)b->pairs, "page_cache_share",
        cached_share(b), "bytes_from_drive", (json_int_t)b->from_drive, "read_sizes",
        sizes_json(kvt_bench_log_counts(b->log, KVT_IO_READ)), "write_sizes",
        sizes_json(kvt_bench_log_counts(b->log, KVT_IO_WRITE)));

    if (b->fio) {
        json_object_set_new(out, "fio_read_gbps", json_real(median(b->gbps[FIO][READ], b->pairs)));
        json_object_set_new(out, "fio_write_gbps",
                            json_real(median(b->gbps[FIO][WRITE], b->pairs)));
        json_object_set_new(out, "read_ratio", json_real(fio_ratio(b, READ)));
        json_object_set_new(out, "write_ratio", json_real(fio_ratio(b, WRITE)));
        json_t *all = json_array();
        for (int64_t i = 0; i < b->pairs; i++)
            json_array_append_new(
                all, json_pack("{s:f, s:f, s:f, s:f}", "read", b->gbps[OURS][READ][i], "fio_read",
                               b->gbps[FIO][READ][i], "write", b->gbps[OURS][WRITE][i], "fio_write",
                               b->gbps[FIO][WRITE][i]));
        json_object_set_new(out, "each_pair", all);
    }
    if (b->roots)
        json_object_set_new(out, "roots", roots_json(b));
    return kvt_cli_json(out);
}

static void print_sizes(const char *what, const struct kvt_io_counts *counts)
{
    char size[32];

    printf("%-12s", what);
    for (unsigned i = 0; i < KVT_IO_COUNT_SIZES; i++)
        if (counts->requests[i])
            printf("  %s%s: %" PRIu64, i ? "to " : "", kvt_human_bytes(kvt_io_count_size(i), size),
                   counts->requests[i]);
    printf("\n");
}

static void print_text(const struct bench *b, const struct kvt_io_info *info)
{
    static const char *const ways[] = {"read", "write"};
    char a[32], c[32], d[32];

    printf("backend       %s (%s); %s\n", info->backend, info->backend_why ? info->backend_why : "",
           info->why);
    printf("shape         %s in requests of %s, records of %s, %u reads in flight, %" PRId64
           " passes\n",
           kvt_human_bytes(b->shape.bytes, a), kvt_human_bytes(b->shape.block, c),
           kvt_human_bytes(b->shape.record, d), b->shape.depth, b->pairs);
    for (int way = 0; way < WAYS; way++) {
        printf("%-12s  %.2f GB/s", ways[way], median(b->gbps[OURS][way], b->pairs));
        if (b->fio)
            printf("   fio %.2f GB/s   %.3f of it", median(b->gbps[FIO][way], b->pairs),
                   fio_ratio(b, way));
        printf("\n");
    }
    for (int way = 0; way < WAYS && b->roots; way++)
        printf("%-5s store   one root %.2f GB/s   %" PRId64 " roots %.2f GB/s   %.3f of it\n",
               ways[way], median(b->roots_gbps[ONE_ROOT][way], b->pairs), b->roots,
               median(b->roots_gbps[ALL_ROOTS][way], b->pairs), roots_ratio(b, way));
    print_sizes("read sizes", kvt_bench_log_counts(b->log, KVT_IO_READ));
    print_sizes("write sizes", kvt_bench_log_counts(b->log, KVT_IO_WRITE));
    printf("page cache    %.0f %% of the bytes read came from it\n", 100 * cached_share(b));
}

static int report(const struct bench *b)
{
    struct kvt_io_info info;
    int rc = KVT_EXIT_OK;

    kvt_bench_log_info(b->log, &info);
    if (b->json)
        rc = print_json(b, &info);
    else
        print_text(b, &info);
    if (!b->from_drive ||
        (b->roots && (b->roots_disk_share[ONE_ROOT] <= 0 || b->roots_disk_share[ALL_ROOTS] <= 0))) {
        kvt_cli_error(COMMAND, "the lower tier was never read: all bytes came from memory");
        rc = KVT_EXIT_PROBLEM;
    }
    return rc;
}

/* ---- the command ---- */

static int run(struct bench *b)
{
    struct kvt_io_info info;
    char why[512];
    double ignored;
    int rc;

    if (snprintf(b->scratch, sizeof(b->scratch), "%s/kvtier-bench-XXXXXX", b->dir) >=
            (int)sizeof(b->scratch) ||
        !mkdtemp(b->scratch)) {
        kvt_cli_error(COMMAND, "%s: %s", b->dir, strerror(errno));
        return KVT_EXIT_PROBLEM;
    }
    snprintf(b->fio_file, sizeof(b->fio_file), "%s/fio", b->scratch);
    rc = kvt_bench_log_open(b->scratch, &b->shape, &b->log, why, sizeof(why));
    if (rc) {
        kvt_cli_error(COMMAND, "%s: %s", b->dir, why);
        (void)rmdir(b->scratch);
        return KVT_EXIT_PROBLEM;
    }
    kvt_bench_log_info(b->log, &info);
    b->direct = info.direct;
    if (b->fio) /* its file, written once like ours */
        rc = fio_pass(b, WRITE, &ignored);
    if (!rc)
        rc = run_pairs(b);
    if (!rc && b->roots)
        rc = run_roots(b);
    rc = rc ? KVT_EXIT_PROBLEM : report(b);
    kvt_bench_log_close(b->log);
    (void)unlink(b->fio_file);
    if (rmdir(b->scratch))
        kvt_cli_error(COMMAND, "%s is left: %s", b->scratch, strerror(errno));
    return rc;
}

/* Sizes that fit each other. 0, or an exit code after a sentence. */
static int check_shape(struct bench *b)
{
    struct kvt_bench_l2_shape *s = &b->shape;

    if (!s->record)
        s->record = KVT_MAX(s->block / 8 / KVT_IO_ALIGN * KVT_IO_ALIGN, (uint64_t)KVT_IO_ALIGN);
    if (s->block % KVT_IO_ALIGN || s->record % KVT_IO_ALIGN || s->block % s->record)
        kvt_cli_error(COMMAND, "--block is a multiple of --record, and that of 4KiB");
    else if (s->block / s->record > 64)
        kvt_cli_error(COMMAND, "--block holds at most 64 records");
    else if (s->bytes / s->block < 4)
        kvt_cli_error(COMMAND, "--size is at least four times --block");
    else {
        s->bytes -= s->bytes % s->block;
        return 0;
    }
    return KVT_EXIT_USAGE;
}

int kvt_cmd_bench_l2(int argc, char **argv)
{
    static struct bench b; /* the figures of all pairs: not for the stack */
    const char *backend = "auto";
    int64_t depth = 8;
    int buffered = 0;

    b = (struct bench){.shape = {.bytes = UINT64_C(2) << 30, .block = 4 << 20}, .pairs = 5};
    const struct kvt_cli_option options[] = {
        {.name = "dir", .metavar = "DIR", .help = "directory on the drive", .text = &b.dir},
        {.name = "size",
         .metavar = "SIZE",
         .help = "bytes of one pass (2GiB)",
         .size = &b.shape.bytes,
         .min = 1 << 20,
         .max = INT64_C(1) << 40},
        {.name = "block",
         .metavar = "SIZE",
         .help = "bytes of one request (4MiB)",
         .size = &b.shape.block,
         .min = 4096,
         .max = 4 << 20},
        {.name = "record",
         .metavar = "SIZE",
         .help = "bytes of one record (block / 8)",
         .size = &b.shape.record,
         .min = 4096,
         .max = 4 << 20},
        {.name = "depth",
         .metavar = "N",
         .help = "requests in flight when reading (8)",
         .number = &depth,
         .min = 1,
         .max = 64},
        {.name = "pairs",
         .metavar = "N",
         .help = "passes, or pairs of them with --fio (5)",
         .number = &b.pairs,
         .min = 1,
         .max = PAIRS_MAX},
        {.name = "roots",
         .metavar = "N",
         .help = "also a cache over N roots on this drive, beside one over one",
         .number = &b.roots,
         .min = 2,
         .max = ROOTS_MAX},
        {.name = "io", .metavar = "NAME", .help = "auto, posix or uring (auto)", .text = &backend},
        {.name = "register", .help = "register memory with io_uring", .flag = &b.shape.fixed},
        {.name = "buffered", .help = "without O_DIRECT", .flag = &buffered},
        {.name = "fio",
         .help = "beside fio: io_uring, same block, depth and bytes",
         .flag = &b.fio},
        {.name = "json", .help = "one JSON object", .flag = &b.json},
    };
    int rc = kvt_cli_parse(COMMAND, "--dir DIR [--fio] [--roots N] [--size SIZE] [--json]", options,
                           KVT_ARRAY_LEN(options), NULL, 0, 0, NULL, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    b.shape.depth = (unsigned)depth;
    b.shape.direct = buffered ? 0 : -1;
    b.shape.backend = !strcmp(backend, "posix")   ? KVT_IO_POSIX
                      : !strcmp(backend, "uring") ? KVT_IO_URING
                      : !strcmp(backend, "auto")  ? KVT_IO_AUTO
                                                  : -1;
    if (!b.dir)
        kvt_cli_error(COMMAND, "--dir DIR says which drive to measure");
    else if (b.shape.backend < 0)
        kvt_cli_error(COMMAND, "--io: '%s' is none of auto, posix, uring", backend);
    if (!b.dir || b.shape.backend < 0)
        return KVT_EXIT_USAGE;
    rc = check_shape(&b);
    if (rc)
        return rc;
    kvt_cli_catch_interrupt();
    return run(&b);
}
