/* `kvtier bench l2 --roots N`: a whole cache over N roots on one drive, beside the same over one.
 *
 * Every pass has a cache of its own in fresh directories: raw blocks are stored as fast as the
 * write queue takes them and flushed, then loaded in the same order, as many requests in flight as
 * the shape says. So batches are cut, striped and merged by the store as in any other cache; DRAM
 * is small beside what is moved. Opening and closing is not timed. Loads are verified by the
 * client. Threads: the caller's, beside those of the cache.
 */
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/rng.h"
#include "bench_l2.h"
#include "kvtier/error.h"
#include "kvtier/kvtier.h"

#define CHAIN_MAX 64u
#define REQUESTS_MAX 64u
#define TRIES_MAX 10000u /* of a millisecond */
#define TOKENS 16u
#define DIM 128u
#define HEAD_BYTES (2u * TOKENS * DIM * 2u) /* K and V of a head of a block, bf16 */
#define ROOT_CAP_MIN (16ull << 30)          /* segments of 256 MiB, as any real drive has */
#define DRAM_MIN (16ull << 20)

struct pass {
    const struct kvt_bench_l2_shape *shape;
    struct kvt_clock clock;
    uint32_t blocks, chain; /* of the pass; of a request */
    unsigned depth;
    uint64_t queue_bytes; /* what may wait for the drive */
    struct kvt_part parts[2];
    struct kvt_part_place places[2];
    struct kvt_layout layout;
    struct kvt_pool_desc desc;
    uint8_t *memory;
    uint64_t memory_bytes;
    struct kvt_cache *cache;
    struct kvt_ns *ns;
    struct kvt_pool *pool;
    struct kvt_req *reqs[REQUESTS_MAX];
    uint32_t firsts[REQUESTS_MAX], sizes[REQUESTS_MAX]; /* blocks of each */
};

static int make_pool(struct pass *pass)
{
    uint32_t heads = (uint32_t)KVT_MAX(pass->shape->record / HEAD_BYTES, UINT64_C(2)) - 1;
    uint64_t page = (uint64_t)heads * HEAD_BYTES / 2;
    struct kvt_rng rng = {kvt_rng_seed_os()};
    uint32_t pages = pass->depth * pass->chain;

    pass->memory_bytes = 2 * page * pages;
    pass->memory =
        mmap(NULL, pass->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pass->memory == MAP_FAILED) {
        pass->memory = NULL;
        return -ENOMEM;
    }
    for (uint64_t at = 0; at < pass->memory_bytes; at += sizeof(uint64_t)) {
        uint64_t word = kvt_rng_next(&rng); /* some drives would cheat on anything simpler */
        memcpy(pass->memory + at, &word, sizeof(word));
    }
    for (int i = 0; i < 2; i++) {
        pass->parts[i] = (struct kvt_part){.kind = i ? KVT_PART_V : KVT_PART_K,
                                           .dtype = KVT_DTYPE_BF16,
                                           .heads = heads,
                                           .head_dim = DIM};
        pass->places[i] = (struct kvt_part_place){.base = pass->memory + page * pages * (unsigned)i,
                                                  .stride_block = (int64_t)page,
                                                  .stride_head = TOKENS * DIM * 2,
                                                  .stride_token = DIM * 2,
                                                  .stride_elem = 2};
    }
    pass->layout = (struct kvt_layout){.struct_size = sizeof(pass->layout),
                                       .block_tokens = TOKENS,
                                       .part_count = 2,
                                       .parts = pass->parts};
    pass->desc = (struct kvt_pool_desc){.struct_size = sizeof(pass->desc),
                                        .device = KVT_DEVICE_HOST,
                                        .block_count = pages,
                                        .place_count = 2,
                                        .places = pass->places};
    return 0;
}

static void root_path(const char *dir, unsigned root, char *path, size_t len)
{
    snprintf(path, len, "%s/root%u", dir, root);
}

/* A cache over the roots. 0, or a code with a sentence in why. */
static int open_cache(struct pass *pass, const char *dir, unsigned roots, char *why, size_t why_len)
{
    uint64_t dram = KVT_MAX(4 * pass->depth * pass->shape->block, DRAM_MIN);
    uint64_t cap = KVT_MAX(2 * pass->shape->bytes, ROOT_CAP_MIN);
    char text[PATH_MAX + 64], path[PATH_MAX];
    struct kvt_identity identity;
    struct kvt_config *config;
    int rc = kvt_config_new(&config);

    if (rc)
        return rc;
    pass->queue_bytes = dram / 2;
    snprintf(text, sizeof(text), "env=no,disk_required=yes,guard=no,scrub=off,dram=%" PRIu64, dram);
    rc = kvt_config_set_all(config, text);
    if (!rc && pass->shape->backend != KVT_IO_AUTO)
        rc = kvt_config_set(config, "io", pass->shape->backend == KVT_IO_URING ? "uring" : "posix");
    for (unsigned root = 0; root < roots && !rc; root++) {
        root_path(dir, root, path, sizeof(path));
        snprintf(text, sizeof(text), "%s:%" PRIu64, path, cap);
        rc = kvt_config_set(config, "disk", text);
    }
    if (rc)
        snprintf(why, why_len, "%s", kvt_config_error(config));
    else
        rc = kvt_open(config, &pass->cache, why, why_len);
    kvt_config_free(config);
    if (rc)
        return rc;
    kvt_identity_init(&identity);
    identity.engine = "bench";
    identity.key_scheme = "bench";
    identity.model = "bench";
    rc = kvt_ns_open(pass->cache, &identity, &pass->layout, &pass->ns);
    if (!rc)
        rc = kvt_pool_register(pass->cache, &pass->layout, &pass->desc, &pass->pool);
    return rc;
}

static uint64_t stat_of(const struct pass *pass, const char *name)
{
    uint64_t value = 0;

    return kvt_stats_get(pass->cache, name, &value) ? 0 : value;
}

/* A cache that is full of what waits for the drive drops what comes: wait instead. */
static void wait_for_queue(const struct pass *pass)
{
    struct timespec nap = {.tv_nsec = 200000};

    while (stat_of(pass, "disk.queue_bytes") > pass->queue_bytes / 2)
        (void)nanosleep(&nap, NULL);
}

static int one_request(struct pass *pass, bool store, uint32_t first, unsigned at)
{
    const struct kvt_store_opts opts = {.struct_size = sizeof(opts), .exact = 1};
    uint32_t n = KVT_MIN(pass->chain, pass->blocks - first);
    struct kvt_key keys[CHAIN_MAX];
    uint32_t ids[CHAIN_MAX];

    memset(keys, 0, sizeof(keys));
    for (uint32_t i = 0; i < n; i++) {
        uint32_t number = first + i;

        memcpy(keys[i].hash, &number, sizeof(number));
        keys[i].hash_len = 16;
        ids[i] = at * pass->chain + i;
    }
    pass->firsts[at] = first;
    pass->sizes[at] = n;
    return store ? kvt_store(pass->ns, pass->pool, keys, ids, n, &opts, &pass->reqs[at])
                 : kvt_load(pass->ns, pass->pool, keys, ids, n, NULL, &pass->reqs[at]);
}

/* Wait for the request in a place, if there is one. 0 when all its blocks are as they should;
 * KVT_E_DROPPED some of them found no room. */
static int end_request(struct pass *pass, unsigned at)
{
    struct kvt_req *req = pass->reqs[at];
    int rc = 0;

    if (!req)
        return 0;
    pass->reqs[at] = NULL;
    if (kvt_req_wait(req, -1) != 1)
        rc = -EIO;
    for (uint32_t i = 0; i < pass->sizes[at] && !rc; i++) {
        rc = kvt_req_status(req, NULL)[i];
        if (rc == KVT_E_EXISTS) /* stored at the first try */
            rc = 0;
    }
    kvt_req_free(req);
    return rc == KVT_E_ORPHAN ? KVT_E_DROPPED : rc;
}

/* The same; a store for which there was no room is asked for again: this is a bench, it can wait.
 */
static int end_surely(struct pass *pass, bool store, unsigned at)
{
    struct timespec nap = {.tv_nsec = 1000000};
    int rc = end_request(pass, at);

    for (unsigned tries = 0; store && rc == KVT_E_DROPPED && tries < TRIES_MAX; tries++) {
        (void)nanosleep(&nap, NULL);
        rc = one_request(pass, true, pass->firsts[at], at);
        if (!rc)
            rc = end_request(pass, at);
    }
    return rc;
}

/* All blocks once. *gbps: by the bytes of the records. */
static int move_all(struct pass *pass, bool store, double *gbps)
{
    uint64_t bytes = (uint64_t)pass->blocks * kvt_ns_record_bytes(pass->ns, 0, KVT_LEVEL_RAW);
    int64_t start = kvt_clock_now(&pass->clock);
    unsigned at = 0;
    int rc = 0;

    for (uint32_t first = 0; first < pass->blocks && !rc; first += pass->chain) {
        rc = end_surely(pass, store, at);
        if (!rc && store)
            wait_for_queue(pass);
        if (!rc)
            rc = one_request(pass, store, first, at);
        at = (at + 1) % pass->depth;
    }
    for (unsigned i = 0; i < pass->depth; i++) {
        int bad = end_surely(pass, store && !rc, i);
        rc = rc ? rc : bad;
    }
    if (!rc && store)
        rc = kvt_flush(pass->cache);
    *gbps = (double)bytes / (double)KVT_MAX(kvt_clock_now(&pass->clock) - start, INT64_C(1));
    return rc;
}

/* A root is a directory of files. */
static void remove_root(const char *path)
{
    struct dirent *entry;
    DIR *dir = opendir(path);

    while (dir && (entry = readdir(dir)))
        (void)unlinkat(dirfd(dir), entry->d_name, 0);
    if (dir)
        closedir(dir);
    (void)rmdir(path); /* one that is left is seen by the caller, whose directory stays */
}

static void close_cache(struct pass *pass, const char *dir, unsigned roots)
{
    char path[PATH_MAX];

    if (pass->pool)
        kvt_pool_unregister(pass->pool);
    if (pass->ns)
        kvt_ns_close(pass->ns);
    kvt_close(pass->cache);
    for (unsigned root = 0; root < roots; root++) {
        root_path(dir, root, path, sizeof(path));
        remove_root(path);
    }
    if (pass->memory)
        (void)munmap(pass->memory, pass->memory_bytes);
}

int kvt_bench_roots(const char *dir, const struct kvt_bench_l2_shape *shape, unsigned roots,
                    struct kvt_bench_roots *result, char *why, size_t why_len)
{
    struct pass pass = {.shape = shape,
                        .clock = kvt_clock_system(),
                        .blocks = (uint32_t)(shape->bytes / shape->record),
                        .chain = (uint32_t)(shape->block / shape->record),
                        .depth = KVT_MIN(shape->depth, REQUESTS_MAX)};
    int rc = make_pool(&pass);

    why[0] = '\0';
    if (!rc)
        rc = open_cache(&pass, dir, roots, why, why_len);
    if (!rc)
        rc = move_all(&pass, true, &result->write_gbps);
    if (!rc)
        rc = move_all(&pass, false, &result->read_gbps);
    if (!rc)
        result->disk_share = (double)stat_of(&pass, "load.granted_disk") / (double)pass.blocks;
    if (rc && !why[0])
        snprintf(why, why_len, "%s", kvt_strerror(rc));
    close_cache(&pass, dir, roots);
    return rc;
}
