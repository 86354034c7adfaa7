/* kvtier bench daemon: what the way to a kvtierd costs, beside the same cache in this process.
 *
 * Round trips of lookups (64 keys, and a chain of 8,192), by a client that sleeps and by one that
 * spins; rates of loads from DRAM, raw, in this process and through the daemon; and as many client
 * processes as processors at a time. Both stores are measured in turns, so that a busy machine
 * spoils both alike; medians are told. Processes: this one, a kvtierd, and clients by fork().
 */
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "cli.h"
#include "commands.h"
#include "daemon_child.h"
#include "kvtier/kvtier.h"

#define COMMAND "bench daemon"

enum { HEADS = 8, TOKENS = 16, DIM = 128, BLOCKS = 1024, CHAIN = 8192, PROCESSES_MAX = 64 };
#define BLOCK_BYTES (2ull * HEADS * TOKENS * DIM * 2)

struct side { /* one way to a store */
    struct kvt_cache *cache;
    struct kvt_ns *ns;
    struct kvt_pool *pool;
    uint16_t *memory;
};

struct figures {
    double sleep_us, spin_us, chain_ms, sleep_us_p99;
    double load_gbs, all_gbs;
};

static int64_t now_ns(void)
{
    struct timespec at;

    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

static void key_make(struct kvt_key *key, uint64_t number)
{
    memset(key, 0, sizeof(*key));
    memcpy(key->hash, &number, sizeof(number));
    key->hash_len = 16;
}

/* options: of the cache, "key=value,..." */
static int side_open(struct side *side, const char *options)
{
    static const struct kvt_part parts[] = {
        {.kind = KVT_PART_K, .dtype = KVT_DTYPE_BF16, .heads = HEADS, .head_dim = DIM},
        {.kind = KVT_PART_V, .dtype = KVT_DTYPE_BF16, .heads = HEADS, .head_dim = DIM}};
    const struct kvt_layout layout = {
        .struct_size = sizeof(layout), .block_tokens = TOKENS, .part_count = 2, .parts = parts};
    const int64_t block = (int64_t)BLOCK_BYTES / 2, head = block / HEADS, token = head / TOKENS;
    struct kvt_config *config = NULL;
    struct kvt_identity who;
    char error[512] = "";

    memset(side, 0, sizeof(*side));
    side->memory = calloc(BLOCKS, BLOCK_BYTES);
    if (side->memory == NULL || kvt_config_new(&config) != 0)
        return -1;
    for (size_t i = 0; i < BLOCKS * BLOCK_BYTES / 2; i += 7)
        side->memory[i] = (uint16_t)(i * 2654435761u >> 17 & 0x3fffu);
    const struct kvt_part_place places[] = {
        {side->memory, block, head, token, 2},
        {side->memory + BLOCKS * BLOCK_BYTES / 4, block, head, token, 2}};
    const struct kvt_pool_desc desc = {sizeof(desc), KVT_DEVICE_HOST, BLOCKS, 2, places};
    int rc = kvt_config_set_all(config, options);
    if (rc == 0)
        rc = kvt_open(config, &side->cache, error, sizeof(error));
    if (rc != 0 || error[0])
        kvt_cli_error(COMMAND, "%s%s", kvt_config_error(config), error);
    kvt_config_free(config);
    kvt_identity_init(&who);
    who.engine = "bench";
    who.model = "none";
    if (rc == 0)
        rc = kvt_ns_open(side->cache, &who, &layout, &side->ns);
    if (rc == 0)
        rc = kvt_pool_register(side->cache, &layout, &desc, &side->pool);
    return rc == 0 && error[0] == '\0' ? 0 : -1;
}

static void side_close(struct side *side)
{
    kvt_pool_unregister(side->pool);
    kvt_ns_close(side->ns);
    kvt_close(side->cache);
    free(side->memory);
    memset(side, 0, sizeof(*side));
}

/* Store or load all pages, raw; blocks that are there then, seconds taken. */
static size_t move(struct side *side, int store, double *seconds)
{
    struct kvt_store_opts opts = {.struct_size = sizeof(opts), .exact = 1};
    struct kvt_req_report report = {.struct_size = sizeof(report)};
    static struct kvt_key keys[BLOCKS];
    static uint32_t ids[BLOCKS];
    struct kvt_req *req = NULL;

    for (uint32_t i = 0; i < BLOCKS; i++) {
        key_make(&keys[i], i + 1);
        ids[i] = i;
    }
    const int64_t start = now_ns();
    int rc = store ? kvt_store(side->ns, side->pool, keys, ids, BLOCKS, &opts, &req)
                   : kvt_load(side->ns, side->pool, keys, ids, BLOCKS, NULL, &req);
    if (rc != 0 || kvt_req_wait(req, -1) != 1 || kvt_req_report(req, &report) != 0)
        return 0;
    *seconds = (double)(now_ns() - start) * 1e-9;
    kvt_req_free(req);
    return report.blocks_ok;
}

static int order(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Lookups of n keys, each timed; median in seconds, the 99th of a hundred in *late. */
static double lookups(struct side *side, uint32_t n, uint32_t times, double *late)
{
    struct kvt_key *keys = calloc(n, sizeof(*keys));
    double *took = calloc(times, sizeof(*took)), median = 0;

    for (uint32_t i = 0; keys != NULL && i < n; i++)
        key_make(&keys[i], i % BLOCKS + 1);
    for (uint32_t i = 0; keys != NULL && took != NULL && i < times && !kvt_cli_interrupted(); i++) {
        const int64_t start = now_ns();
        if (kvt_lookup(side->ns, keys, n, NULL, NULL) != (long)n)
            took[i] = 1e9; /* shows as an absurd figure: something is not there */
        else
            took[i] = (double)(now_ns() - start) * 1e-9;
    }
    if (keys != NULL && took != NULL) {
        qsort(took, times, sizeof(*took), order);
        median = took[times / 2];
        if (late != NULL)
            *late = took[times - 1 - times / 100];
    }
    free(keys);
    free(took);
    return median;
}

/* Median of some loads of everything, bytes of pages a second. */
static double load_rate(struct side *side, uint32_t times)
{
    double took[16] = {0}, seconds = 0;

    times = KVT_MIN(times, (uint32_t)KVT_ARRAY_LEN(took));
    for (uint32_t i = 0; i < times && !kvt_cli_interrupted(); i++)
        took[i] = move(side, 0, &seconds) == BLOCKS ? seconds : 1e9;
    qsort(took, times, sizeof(took[0]), order);
    return took[times / 2] > 0 ? BLOCKS * BLOCK_BYTES / took[times / 2] : 0;
}

/* One process of several: says how many bytes it loaded within the time. */
static int client(const char *options, int fd, int64_t seconds)
{
    struct side side;
    uint64_t bytes = 0;
    double took;

    if (side_open(&side, options) != 0)
        return KVT_EXIT_PROBLEM;
    (void)move(&side, 0, &took); /* pages are touched */
    for (const int64_t start = now_ns(); now_ns() - start < seconds * 1000000000;)
        bytes += move(&side, 0, &took) * BLOCK_BYTES;
    side_close(&side);
    return write(fd, &bytes, sizeof(bytes)) == sizeof(bytes) ? KVT_EXIT_OK : KVT_EXIT_PROBLEM;
}

/* `count` processes load at a time; bytes a second of all together, 0 when one failed. */
static double clients_rate(const char *options, unsigned count, int64_t seconds)
{
    pid_t pids[PROCESSES_MAX];
    uint64_t bytes, sum = 0;
    int fds[2], status, failed = 0;

    if (pipe(fds) != 0)
        return 0;
    fflush(stdout);
    for (unsigned i = 0; i < count; i++) {
        pids[i] = fork();
        if (pids[i] == 0)
            _exit(client(options, fds[1], seconds));
    }
    close(fds[1]);
    for (unsigned i = 0; i < count; i++) {
        failed |= pids[i] < 0 || waitpid(pids[i], &status, 0) < 0 || status != 0;
        if (!failed && read(fds[0], &bytes, sizeof(bytes)) == sizeof(bytes))
            sum += bytes;
    }
    close(fds[0]);
    return failed ? 0 : (double)sum / (double)seconds;
}

static unsigned processors(void)
{
    cpu_set_t set;

    return sched_getaffinity(0, sizeof(set), &set) == 0
               ? KVT_MIN((unsigned)CPU_COUNT(&set), (unsigned)PROCESSES_MAX)
               : 1;
}

/* Everything of one way. options: of the cache; spin: the same, spinning. */
static int measure(const char *options, const char *spin, uint32_t rounds, struct figures *out)
{
    struct side side;
    double seconds, late = 0;

    if (side_open(&side, options) != 0 || move(&side, 1, &seconds) != BLOCKS) {
        kvt_cli_error(COMMAND, "the blocks to measure by could not be stored");
        side_close(&side);
        return -1;
    }
    out->sleep_us = 1e6 * lookups(&side, 64, rounds, &late);
    out->sleep_us_p99 = 1e6 * late;
    out->chain_ms = 1e3 * lookups(&side, CHAIN, KVT_MAX(rounds / 20, 11u), NULL);
    out->load_gbs = 1e-9 * load_rate(&side, 11);
    side_close(&side);
    if (side_open(&side, spin) != 0) {
        side_close(&side);
        return -1;
    }
    if (strstr(spin, "store=") == NULL) /* a store of its own: empty so far */
        (void)move(&side, 1, &seconds);
    out->spin_us = 1e6 * lookups(&side, 64, rounds, NULL);
    side_close(&side);
    return 0;
}

static json_t *figures_json(const struct figures *f)
{
    return json_pack("{s:f, s:f, s:f, s:f, s:f}", "lookup64_us", f->sleep_us, "lookup64_p99_us",
                     f->sleep_us_p99, "lookup64_spin_us", f->spin_us, "lookup8192_ms", f->chain_ms,
                     "load_gb_per_s", f->load_gbs);
}

static void print_row(const char *what, double process, double daemon, const char *unit)
{
    printf("  %-34s %10.2f %-5s %10.2f %-5s\n", what, process, unit, daemon, unit);
}

static void print_figures(const struct figures *in, const struct figures *d, unsigned count)
{
    printf("  %-34s %10s       %10s\n", "", "process", "kvtierd");
    print_row("lookup of 64 keys, sleeping", in->sleep_us, d->sleep_us, "us");
    print_row("  99 of 100 within", in->sleep_us_p99, d->sleep_us_p99, "us");
    print_row("lookup of 64 keys, spinning", in->spin_us, d->spin_us, "us");
    print_row("lookup of a chain of 8192", in->chain_ms, d->chain_ms, "ms");
    print_row("load from DRAM, raw", in->load_gbs, d->load_gbs, "GB/s");
    printf("  %u client processes at a time: %.2f GB/s, %.2f of one process alone\n", count,
           d->all_gbs, in->load_gbs > 0 ? d->all_gbs / in->load_gbs : 0);
    printf("  load through the daemon: %.2f of in-process\n",
           in->load_gbs > 0 ? d->load_gbs / in->load_gbs : 0);
}

int kvt_cmd_bench_daemon(int argc, char **argv)
{
    static const char *const words[] = {"--dram", "512MiB", "--spin", "50us", NULL};
    int64_t rounds = 2000, seconds = 2;
    struct figures in = {0}, through = {0};
    char socket[KVT_DAEMON_SOCKET_ROOM], plain[160], spin[180];
    int json = 0;
    pid_t pid;
    const struct kvt_cli_option options[] = {
        {.name = "rounds",
         .metavar = "N",
         .help = "lookups that are timed (default 2000)",
         .number = &rounds,
         .min = 10,
         .max = 10000000},
        {.name = "seconds",
         .metavar = "N",
         .help = "that many processes load at a time for (default 2)",
         .number = &seconds,
         .min = 1,
         .max = 600},
        {.name = "json", .help = "one JSON object", .flag = &json},
    };
    int rc = kvt_cli_parse(COMMAND, "[--rounds N] [--seconds N] [--json]", options,
                           KVT_ARRAY_LEN(options), NULL, 0, 0, NULL, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    kvt_cli_catch_interrupt();
    if (kvt_daemon_child(COMMAND, words, socket, &pid) != 0)
        return KVT_EXIT_PROBLEM;
    snprintf(plain, sizeof(plain), "env=no,store=unix:%s", socket);
    snprintf(spin, sizeof(spin), "%s,spin=200us", plain);
    rc = measure("env=no,dram=512MiB", "env=no,dram=512MiB,spin=200us", (uint32_t)rounds, &in);
    if (rc == 0)
        rc = measure(plain, spin, (uint32_t)rounds, &through);
    const unsigned count = processors();
    if (rc == 0)
        through.all_gbs = 1e-9 * clients_rate(plain, count, seconds);
    kvt_daemon_child_end(pid);
    if (rc != 0 || kvt_cli_interrupted())
        return KVT_EXIT_PROBLEM;
    if (!json) {
        print_figures(&in, &through, count);
        return KVT_EXIT_OK;
    }
    json_t *out =
        json_pack("{s:i, s:o, s:o, s:f, s:i}", "clients", (int)count, "process", figures_json(&in),
                  "daemon", figures_json(&through), "all_clients_gb_per_s", through.all_gbs,
                  "block_bytes", (int)BLOCK_BYTES);
    return kvt_cli_json(out);
}
