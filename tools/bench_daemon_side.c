/* A side of kvtier bench daemon: see bench_daemon.h. Processes: kvt_bench_clients() forks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "bench_daemon.h"
#include "cli.h"

#define COMMAND "bench daemon"
#define KEYS_MAX 8192u
#define PROCESSES_MAX 64u

int64_t kvt_bench_now_ns(void)
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

int kvt_bench_open(struct kvt_bench_side *side, const char *options)
{
    static const struct kvt_part parts[] = {{.kind = KVT_PART_K,
                                             .dtype = KVT_DTYPE_BF16,
                                             .heads = KVT_BENCH_HEADS,
                                             .head_dim = KVT_BENCH_DIM},
                                            {.kind = KVT_PART_V,
                                             .dtype = KVT_DTYPE_BF16,
                                             .heads = KVT_BENCH_HEADS,
                                             .head_dim = KVT_BENCH_DIM}};
    const struct kvt_layout layout = {.struct_size = sizeof(layout),
                                      .block_tokens = KVT_BENCH_TOKENS,
                                      .part_count = 2,
                                      .parts = parts};
    const int64_t block = (int64_t)KVT_BENCH_BLOCK_BYTES / 2, head = block / KVT_BENCH_HEADS,
                  token = head / KVT_BENCH_TOKENS;
    struct kvt_identity who;
    char error[512] = "";

    memset(side, 0, sizeof(*side));
    side->memory = calloc(KVT_BENCH_BLOCKS, KVT_BENCH_BLOCK_BYTES);
    if (side->memory == NULL)
        return -1;
    for (size_t i = 0; i < KVT_BENCH_BYTES / 2; i += 7)
        side->memory[i] = (uint16_t)(i * 2654435761u >> 17 & 0x3fffu);
    const struct kvt_part_place places[] = {
        {side->memory, block, head, token, 2},
        {side->memory + KVT_BENCH_BYTES / 4, block, head, token, 2}};
    const struct kvt_pool_desc desc = {sizeof(desc), KVT_DEVICE_HOST, KVT_BENCH_BLOCKS, 2, places};
    int rc = kvt_open_at(options, &side->cache, error, sizeof(error));
    if (rc != 0 || error[0])
        kvt_cli_error(COMMAND, "%s", error);
    kvt_identity_init(&who);
    who.engine = "bench";
    who.model = "none";
    if (rc == 0)
        rc = kvt_ns_open(side->cache, &who, &layout, &side->ns);
    if (rc == 0)
        rc = kvt_pool_register(side->cache, &layout, &desc, &side->pool);
    return rc == 0 && error[0] == '\0' ? 0 : -1;
}

void kvt_bench_close(struct kvt_bench_side *side)
{
    kvt_pool_unregister(side->pool);
    kvt_ns_close(side->ns);
    kvt_close(side->cache);
    free(side->memory);
    memset(side, 0, sizeof(*side));
}

size_t kvt_bench_move(struct kvt_bench_side *side, int store, double *seconds)
{
    struct kvt_store_opts opts = {.struct_size = sizeof(opts), .exact = 1};
    struct kvt_req_report report = {.struct_size = sizeof(report)};
    static struct kvt_key keys[KVT_BENCH_BLOCKS];
    static uint32_t ids[KVT_BENCH_BLOCKS];
    struct kvt_req *req = NULL;

    for (uint32_t i = 0; i < KVT_BENCH_BLOCKS; i++) {
        key_make(&keys[i], i + 1);
        ids[i] = i;
    }
    const int64_t start = kvt_bench_now_ns();
    int rc = store ? kvt_store(side->ns, side->pool, keys, ids, KVT_BENCH_BLOCKS, &opts, &req)
                   : kvt_load(side->ns, side->pool, keys, ids, KVT_BENCH_BLOCKS, NULL, &req);
    if (rc != 0 || kvt_req_wait(req, -1) != 1 || kvt_req_report(req, &report) != 0)
        return 0;
    *seconds = (double)(kvt_bench_now_ns() - start) * 1e-9;
    kvt_req_free(req);
    return report.blocks_ok;
}

double kvt_bench_lookup(struct kvt_bench_side *side, uint32_t n)
{
    static struct kvt_key keys[KEYS_MAX];

    n = KVT_MIN(n, KEYS_MAX);
    for (uint32_t i = 0; i < n; i++)
        key_make(&keys[i], i % KVT_BENCH_BLOCKS + 1);
    const int64_t start = kvt_bench_now_ns();
    if (kvt_lookup(side->ns, keys, n, NULL, NULL) != (long)n)
        return 1e9;
    return (double)(kvt_bench_now_ns() - start) * 1e-9;
}

/* One process of several: says how many bytes it loaded within the time. */
static int client(const char *options, int fd, int64_t seconds)
{
    struct kvt_bench_side side;
    uint64_t bytes = 0;
    double took;

    if (kvt_bench_open(&side, options) != 0)
        return KVT_EXIT_PROBLEM;
    (void)kvt_bench_move(&side, 1, &took); /* there already, but for a store of its own */
    (void)kvt_bench_move(&side, 0, &took); /* pages are touched */
    const int64_t start = kvt_bench_now_ns();
    while (kvt_bench_now_ns() - start < seconds * 1000000000)
        bytes += kvt_bench_move(&side, 0, &took) * KVT_BENCH_BLOCK_BYTES;
    double rate = (double)bytes * 1e9 / (double)(kvt_bench_now_ns() - start);
    kvt_bench_close(&side);
    return write(fd, &rate, sizeof(rate)) == sizeof(rate) ? KVT_EXIT_OK : KVT_EXIT_PROBLEM;
}

double kvt_bench_clients(const char *options, unsigned count, int64_t seconds)
{
    pid_t pids[PROCESSES_MAX];
    double rate, sum = 0;
    int fds[2], status, failed = 0;

    count = KVT_MIN(count, PROCESSES_MAX);
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
        if (!failed && read(fds[0], &rate, sizeof(rate)) == sizeof(rate))
            sum += rate;
    }
    close(fds[0]);
    return failed ? 0 : sum;
}
