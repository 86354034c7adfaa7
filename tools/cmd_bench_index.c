/* kvtier bench index: how fast a root of very many small records opens, what a block costs in
 * memory, how fast the index answers.
 *
 * Two halves: one process makes the root (bench_index_root.c) and drops the page cache of its
 * files; a new process opens it through kvt_open(), looks chains up through kvt_lookup(), and then,
 * with the store opened directly, measures its index as a LOOKUP message uses it: fingerprints of
 * up to 1,024 keys, then one batched search; half of the keys are absent. Every answer is checked.
 * Lookups count the thread's own processor time, everything else the time on the wall.
 * Threads: one, and those of the cache.
 */
#include <errno.h>
#include <inttypes.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "bench_index.h"
#include "cli.h"
#include "commands.h"
#include "store/store_impl.h"

#define COMMAND "bench index"
#define QUERIES                                                                      \
    (1u << 18) /* keys of one round, 14 MiB of them: read in order, not from a cache \
                */
#define ROUNDS_MAX 99
#define DRAM_BYTES (16u << 20) /* of the cache: nothing is loaded */

extern char **environ;

struct bench {
    int64_t blocks, chain, rounds;
    const char *dir;
    int json, only_make, only_measure;
    const char *path; /* of the root */
};

struct figures {
    uint64_t blocks, index_bytes, resident_bytes;
    double open_s, ns_open_s;
    double lookups_per_s, searches_per_s, fingerprints_per_s;
    double chain_first_ms, chain_ms;
    uint64_t direct;
};

static double seconds_since(int64_t start)
{
    struct kvt_clock clock = kvt_clock_system();

    return (double)(kvt_clock_now(&clock) - start) * 1e-9;
}

static int64_t now(void)
{
    struct kvt_clock clock = kvt_clock_system();

    return kvt_clock_now(&clock);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *values, size_t n)
{
    qsort(values, n, sizeof(*values), by_value);
    return values[n / 2];
}

static uint64_t resident_bytes(void)
{
    char line[128] = "", *end = line;
    FILE *f = fopen("/proc/self/statm", "re");

    if (f && !fgets(line, sizeof(line), f))
        line[0] = '\0';
    if (f)
        fclose(f);
    (void)strtoull(line, &end, 10); /* the address space; the resident part follows */
    return strtoull(end, NULL, 10) * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* ---- through the public API ---------------------------------------------------------------- */

/* Chains in turn, so that none is in the processor's cache from the round before. */
static int measure_chains(const struct bench *bench, struct kvt_ns *ns, struct figures *out)
{
    double ms[ROUNDS_MAX];
    uint64_t chains = (uint64_t)(bench->blocks / bench->chain);
    struct kvt_key *keys = calloc((size_t)bench->chain, sizeof(*keys));
    int rc = keys ? 0 : -ENOMEM;

    for (int64_t round = 0; round < bench->rounds && !rc; round++) {
        uint64_t first = (uint64_t)round % chains * (uint64_t)bench->chain;
        for (uint64_t i = 0; i < (uint64_t)bench->chain; i++)
            kvt_bench_root_key(first + i, &keys[i]);
        int64_t start = now();
        long run = kvt_lookup(ns, keys, (size_t)bench->chain, NULL, NULL);
        ms[round] = seconds_since(start) * 1e3;
        if (run != bench->chain) {
            kvt_cli_error(COMMAND, "a chain of %" PRId64 " was found to be %ld", bench->chain, run);
            rc = KVT_E_CORRUPT;
        }
    }
    free(keys);
    if (rc)
        return rc;
    out->chain_first_ms = ms[0];
    out->chain_ms = median(ms, (size_t)bench->rounds);
    return 0;
}

static int make_config(const struct kvt_bench_root *root, struct kvt_config **config)
{
    char disk[4200];
    int rc = kvt_config_new(config);

    if (rc)
        return rc;
    snprintf(disk, sizeof(disk), "%s:%" PRIu64, root->path, kvt_bench_root_cap(root));
    rc = kvt_config_set(*config, "disk", disk);
    snprintf(disk, sizeof(disk), "%u", DRAM_BYTES);
    if (!rc)
        rc = kvt_config_set(*config, "dram", disk);
    if (!rc)
        rc = kvt_config_set(*config, "disk_required", "yes");
    if (!rc)
        rc = kvt_config_set(*config, "env", "no"); /* a measurement is not the user's cache */
    return rc;
}

static int measure_cache(const struct bench *bench, const struct kvt_bench_root *root,
                         struct figures *out)
{
    struct kvt_config *config = NULL;
    struct kvt_cache *cache = NULL;
    struct kvt_identity identity;
    struct kvt_layout layout;
    struct kvt_ns *ns = NULL;
    char error[512] = "";
    uint64_t before = resident_bytes();
    int rc = make_config(root, &config);

    kvt_bench_root_space(&identity, &layout);
    int64_t start = now();
    if (!rc)
        rc = kvt_open(config, &cache, error, sizeof(error));
    out->open_s = seconds_since(start);
    start = now();
    if (!rc)
        rc = kvt_ns_open(cache, &identity, &layout, &ns);
    out->ns_open_s = seconds_since(start);
    out->resident_bytes = resident_bytes() - before;
    if (!rc)
        rc = kvt_stats_get(cache, "index.blocks", &out->blocks);
    if (!rc)
        rc = kvt_stats_get(cache, "index.bytes", &out->index_bytes);
    if (!rc)
        rc = kvt_stats_get(cache, "disk.direct", &out->direct);
    if (!rc && out->blocks != root->blocks) {
        snprintf(error, sizeof(error), "%" PRIu64 " of %" PRIu64 " blocks were found", out->blocks,
                 root->blocks);
        rc = KVT_E_CORRUPT;
    }
    if (!rc)
        rc = measure_chains(bench, ns, out);
    else
        kvt_cli_error(COMMAND, "%s: %s", root->path, error[0] ? error : kvt_strerror(rc));
    kvt_ns_close(ns);
    kvt_close(cache);
    kvt_config_free(config);
    return rc;
}

/* ---- the store's index --------------------------------------------------------------------- */

/* A present or an absent block in turn, in no order. */
static void make_queries(const struct kvt_bench_root *root, const uint8_t ns[KVT_NS_BYTES],
                         struct kvt_full_key *keys, uint64_t seed)
{
    struct kvt_rng rng = {seed};
    struct kvt_key key;

    for (uint32_t i = 0; i < QUERIES; i++) {
        uint64_t block = kvt_rng_below(&rng, root->blocks);
        kvt_bench_root_key(i % 2 ? root->blocks + block : block, &key);
        kvt_full_key_make(&keys[i], ns, &key);
    }
}

/* Time of this thread on a processor: what others take away from it is not the index's. */
static double own_seconds(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

/* One round over all queries. Returns how many answers were right. */
static uint32_t search(const struct kvt_index *index, const struct kvt_full_key *keys,
                       double *fingerprint_s, double *find_s)
{
    struct kvt_fp fps[KVT_MSG_KEYS_MAX];
    uint32_t found[KVT_MSG_KEYS_MAX], hits = 0;

    *fingerprint_s = *find_s = 0;
    for (uint32_t at = 0; at < QUERIES; at += KVT_MSG_KEYS_MAX) {
        double start = own_seconds();
        for (uint32_t i = 0; i < KVT_MSG_KEYS_MAX; i++)
            fps[i] = kvt_index_fingerprint(index, &keys[at + i]);
        double middle = own_seconds();
        kvt_index_find_batch(index, fps, KVT_MSG_KEYS_MAX, found);
        *find_s += own_seconds() - middle;
        *fingerprint_s += middle - start;
        for (uint32_t i = 0; i < KVT_MSG_KEYS_MAX; i++)
            hits += (found[i] != KVT_INDEX_NONE) == (i % 2 == 0);
    }
    return hits;
}

static int measure_search(const struct bench *bench, const struct kvt_bench_root *root,
                          const uint8_t ns[KVT_NS_BYTES], const struct kvt_index *index,
                          struct figures *out)
{
    double both[ROUNDS_MAX], fingerprints[ROUNDS_MAX], searches[ROUNDS_MAX];
    struct kvt_full_key *keys = calloc(QUERIES, sizeof(*keys));
    int rc = keys ? 0 : -ENOMEM;

    for (int64_t round = 0; round < bench->rounds && !rc; round++) {
        make_queries(root, ns, keys, (uint64_t)round + 1);
        if (search(index, keys, &fingerprints[round], &searches[round]) != QUERIES)
            rc = KVT_E_CORRUPT;
        both[round] = fingerprints[round] + searches[round];
    }
    free(keys);
    if (rc)
        return rc;
    size_t n = (size_t)bench->rounds;
    out->lookups_per_s = QUERIES / median(both, n);
    out->searches_per_s = QUERIES / median(searches, n);
    out->fingerprints_per_s = QUERIES / median(fingerprints, n);
    return 0;
}

static void ignore_reply(void *ctx, uint32_t client, const struct kvt_msg *msg)
{
    (void)ctx;
    (void)client;
    (void)msg;
}

/* The store without its thread: the same recovery, and an index that can be called. */
static int measure_index(const struct bench *bench, const struct kvt_bench_root *root,
                         struct figures *out)
{
    struct kvt_io_posix_params io_params = {.path = root->path, .threads = 4, .direct = -1};
    struct kvt_store_params params = {.seed = kvt_rng_seed_os(),
                                      .clock = kvt_clock_system(),
                                      .reply = ignore_reply,
                                      .root_count = 1};
    struct kvt_identity identity;
    struct kvt_layout layout;
    struct kvt_store *store = NULL;
    uint8_t ns[KVT_NS_BYTES];
    int64_t pid;

    kvt_bench_root_space(&identity, &layout);
    int rc = kvt_namespace_id(&identity, &layout, ns);
    if (!rc)
        rc = kvt_io_posix_new(&io_params, &params.roots[0].io);
    if (rc)
        return rc;
    params.roots[0].cap_bytes = kvt_bench_root_cap(root);
    rc = params.roots[0].io->ops->lock(params.roots[0].io, &pid);
    if (!rc)
        rc = kvt_store_open(&params, &store, NULL);
    if (!rc)
        rc = measure_search(bench, root, ns, &store->index, out);
    if (store)
        kvt_store_close(store, 0);
    params.roots[0].io->ops->destroy(params.roots[0].io);
    return rc;
}

/* ---- report -------------------------------------------------------------------------------- */

static void print_table(const struct figures *f, const struct bench *bench, int64_t cached)
{
    printf("%" PRIu64 " blocks, %s, %" PRId64 " bytes of the root in the page cache before\n",
           f->blocks, f->direct ? "direct I/O" : "buffered I/O", cached);
    printf("open          %8.3f s        then the namespace %.3f s\n", f->open_s, f->ns_open_s);
    printf("memory        %8.1f B/block  index; resident after open %.1f B/block\n",
           (double)f->index_bytes / (double)f->blocks,
           (double)f->resident_bytes / (double)f->blocks);
    printf("lookups       %8.2f M/s      one core, half misses; searches %.2f, fingerprints %.2f\n",
           f->lookups_per_s * 1e-6, f->searches_per_s * 1e-6, f->fingerprints_per_s * 1e-6);
    printf("chain lookup  %8.3f ms       %" PRId64 " keys by kvt_lookup(); the first one %.3f\n",
           f->chain_ms, bench->chain, f->chain_first_ms);
}

static int print_json(const struct figures *f, const struct bench *bench, int64_t cached)
{
    return kvt_cli_json(json_pack(
        "{s:I, s:f, s:f, s:f, s:f, s:f, s:I, s:f, s:f, s:f, s:f, s:b, s:I}", "blocks",
        (json_int_t)f->blocks, "bytes_per_block", (double)f->index_bytes / (double)f->blocks,
        "lookups_per_s", f->lookups_per_s, "chain_lookup_ms", f->chain_ms, "open_s", f->open_s,
        "ns_open_s", f->ns_open_s, "chain_blocks", (json_int_t)bench->chain,
        "chain_lookup_first_ms", f->chain_first_ms, "searches_per_s", f->searches_per_s,
        "fingerprints_per_s", f->fingerprints_per_s, "resident_bytes_per_block",
        (double)f->resident_bytes / (double)f->blocks, "direct_io", (int)f->direct, "cached_bytes",
        (json_int_t)cached));
}

static int measure(const struct bench *bench)
{
    const struct kvt_bench_root root = {bench->path, (uint64_t)bench->blocks,
                                        (uint64_t)bench->chain};
    struct figures figures = {0};
    int64_t cached = kvt_bench_root_drop_cache(&root);

    if (cached < 0) {
        kvt_cli_error(COMMAND, "%s: %s", root.path, kvt_strerror((int)cached));
        return KVT_EXIT_PROBLEM;
    }
    if (measure_cache(bench, &root, &figures))
        return KVT_EXIT_PROBLEM;
    int rc = measure_index(bench, &root, &figures);
    if (rc) {
        kvt_cli_error(COMMAND, "%s: %s", root.path, kvt_strerror(rc));
        return KVT_EXIT_PROBLEM;
    }
    if (bench->json)
        return print_json(&figures, bench, cached);
    print_table(&figures, bench, cached);
    return KVT_EXIT_OK;
}

/* Run this binary anew with --only-measure. Its output is ours. */
static int measure_in_new_process(const struct bench *bench)
{
    char blocks[32], chain[32], rounds[32];
    const char *argv[] = {"kvtier",
                          "bench",
                          "index",
                          "--only-measure",
                          "--dir",
                          bench->path,
                          "--blocks",
                          blocks,
                          "--chain",
                          chain,
                          "--rounds",
                          rounds,
                          bench->json ? "--json" : NULL,
                          NULL};
    pid_t pid;
    int status;

    snprintf(blocks, sizeof(blocks), "%" PRId64, bench->blocks);
    snprintf(chain, sizeof(chain), "%" PRId64, bench->chain);
    snprintf(rounds, sizeof(rounds), "%" PRId64, bench->rounds);
    int rc =
        posix_spawn(&pid, "/proc/self/exe", NULL, NULL, (char *const *)(uintptr_t)argv, environ);
    if (rc) {
        kvt_cli_error(COMMAND, "cannot start a new process: %s", strerror(rc));
        return KVT_EXIT_PROBLEM;
    }
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return KVT_EXIT_PROBLEM;
    return WIFEXITED(status) ? WEXITSTATUS(status) : KVT_EXIT_PROBLEM;
}

static int make_root(const struct bench *bench)
{
    const struct kvt_bench_root root = {bench->path, (uint64_t)bench->blocks,
                                        (uint64_t)bench->chain};
    int rc = kvt_bench_root_make(&root);

    if (rc == -EEXIST)
        kvt_cli_error(COMMAND, "%s: holds a store already; name an empty directory", bench->path);
    else if (rc && rc != -ECANCELED)
        kvt_cli_error(COMMAND, "%s: %s", bench->path, kvt_strerror(rc));
    return rc ? KVT_EXIT_PROBLEM : KVT_EXIT_OK;
}

/* Make a temporary root, measure it, remove it. */
static int run(struct bench *bench)
{
    const char *base = bench->dir;
    char path[4096];

    if (!base)
        base = getenv("TMPDIR") ? getenv("TMPDIR") : "/var/tmp";
    if (snprintf(path, sizeof(path), "%s/kvtier-index-XXXXXX", base) >= (int)sizeof(path) ||
        !mkdtemp(path)) {
        kvt_cli_error(COMMAND, "%s: cannot make a directory there: %s", base, strerror(errno));
        return KVT_EXIT_PROBLEM;
    }
    bench->path = path;
    int rc = make_root(bench);
    if (rc == KVT_EXIT_OK && !kvt_cli_interrupted())
        rc = measure_in_new_process(bench);
    kvt_bench_root_remove(path);
    return rc;
}

int kvt_cmd_bench_index(int argc, char **argv)
{
    struct bench bench = {.blocks = 1000000, .chain = 8192, .rounds = 15};
    const struct kvt_cli_option options[] = {
        {.name = "blocks",
         .metavar = "N",
         .help = "records of the root; 1000000 by default",
         .number = &bench.blocks,
         .min = 1024,
         .max = 64000000},
        {.name = "chain",
         .metavar = "N",
         .help = "blocks of a chain; 8192 by default",
         .number = &bench.chain,
         .min = 1,
         .max = 1 << 20},
        {.name = "dir",
         .metavar = "DIR",
         .help = "make the root below DIR, and remove it; TMPDIR or /var/tmp by default",
         .text = &bench.dir},
        {.name = "rounds",
         .metavar = "N",
         .help = "measurements; the median counts",
         .number = &bench.rounds,
         .min = 1,
         .max = ROUNDS_MAX},
        {.name = "only-make",
         .help = "make the root in DIR and leave it",
         .flag = &bench.only_make},
        {.name = "only-measure",
         .help = "measure the root that --only-make left in DIR",
         .flag = &bench.only_measure},
        {.name = "json", .help = "one JSON object", .flag = &bench.json},
    };
    size_t words = 0;
    int rc = kvt_cli_parse(COMMAND, "[OPTION...]", options, KVT_ARRAY_LEN(options), NULL, 0, 0,
                           &words, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    if ((bench.only_make || bench.only_measure) &&
        (!bench.dir || bench.only_make + bench.only_measure == 2)) {
        kvt_cli_error(COMMAND, "--only-make and --only-measure: one of them, with --dir");
        return KVT_EXIT_USAGE;
    }
    if (bench.chain > bench.blocks) {
        kvt_cli_error(COMMAND, "--chain %" PRId64 ": more than --blocks %" PRId64, bench.chain,
                      bench.blocks);
        return KVT_EXIT_USAGE;
    }
    kvt_cli_catch_interrupt();
    bench.path = bench.dir;
    if (bench.only_make)
        return make_root(&bench);
    return bench.only_measure ? measure(&bench) : run(&bench);
}
