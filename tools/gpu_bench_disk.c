/* `kvtier bench gpu --dir DIR`: from a drive into GPU memory, against what the same drive gives to
 * reads with O_DIRECT alone, in one run.
 *
 * The pool's blocks are stored through a cache with a root under DIR, flushed, and loaded by a
 * cache that has just been opened, so that nothing is in DRAM; a figure is the whole kvt_load(). In
 * turns with it the segment files are read by threads with O_DIRECT, in pieces of 1 MiB; of several
 * numbers of threads the fastest counts. Both are bytes of records, or of files, over seconds.
 * What is in DIR/kvtier-bench-gpu is removed before and after. Threads: the caller, and the
 * readers.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "client/client.h"
#include "gpu_bench.h"
#include "kvtier/kvtier.h"

#define PIECE_BYTES (1u << 20)
#define STORE_BLOCKS 128u /* between flushes: nothing is dropped because the drive is slow */
#define FILES_MAX 512u
#define THREADS_MAX 32u

struct disk_run {
    struct gpu_bench *b;
    char root[PATH_MAX];
    struct gpu_bench_target target;
    struct kvt_key *keys;
    uint32_t *ids;
    uint64_t record_bytes; /* of all blocks */
    uint64_t direct_blocks;
};

/* ---- a directory of our own ---- */

static int empty_root(struct disk_run *run)
{
    char path[PATH_MAX + 300];
    const struct dirent *entry;
    DIR *dir = opendir(run->root);
    if (dir == NULL)
        return errno == ENOENT ? 0 : -errno;
    while ((entry = readdir(dir)) != NULL) {
        snprintf(path, sizeof(path), "%s/%s", run->root, entry->d_name);
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            (void)unlink(path);
    }
    closedir(dir);
    return rmdir(run->root) == 0 ? 0 : -errno;
}

/* ---- through the cache ---- */

static int open_cache(struct disk_run *run)
{
    struct gpu_bench *b = run->b;
    struct kvt_config *config;
    char disk[PATH_MAX + 32];
    int rc = kvt_config_new(&config);
    if (rc != 0)
        return gpu_bench_fail(b, rc, "configuration");
    snprintf(disk, sizeof(disk), "%s:%zuMiB", run->root, (b->pool_bytes >> 20) + 1024);
    rc = kvt_config_set_all(config, "dram=1GiB,gpu_store_ctas=64");
    if (rc == 0)
        rc = kvt_config_set(config, "disk", disk);
    if (rc == 0 && b->config != NULL)
        rc = kvt_config_set_all(config, b->config);
    rc = rc == 0 ? gpu_bench_target_open(b, config, &run->target)
                 : gpu_bench_fail(b, rc, "configuration");
    kvt_config_free(config);
    return rc;
}

static int store_all(struct disk_run *run)
{
    struct gpu_bench *b = run->b;
    struct kvt_req_report report = {0};
    int rc = open_cache(run);
    for (int64_t at = 0; at < b->blocks && rc == 0; at += STORE_BLOCKS) {
        size_t n = (size_t)KVT_MIN(b->blocks - at, (int64_t)STORE_BLOCKS);
        struct kvt_store_opts opts = {.struct_size = sizeof(opts),
                                      .first_pos = (uint32_t)at * 16,
                                      .parent = at > 0 ? &run->keys[at - 1] : NULL};
        struct kvt_req *req;
        rc = kvt_store(run->target.ns, run->target.pool, run->keys + at, run->ids + at, n, &opts,
                       &req);
        if (rc == 0)
            rc = gpu_bench_finish(req, n, &report);
        if (rc == 0)
            rc = kvt_flush(run->target.cache);
        run->record_bytes += report.bytes_moved;
    }
    gpu_bench_target_close(&run->target);
    return gpu_bench_fail(b, rc, "storing to the drive");
}

static int load_once(struct disk_run *run, double *seconds)
{
    struct gpu_bench *b = run->b;
    struct kvt_req_report report = {0};
    struct kvt_req *req;
    int rc = open_cache(run);
    if (rc == 0) {
        double start = gpu_bench_now();
        rc = kvt_load(run->target.ns, run->target.pool, run->keys, run->ids, (size_t)b->blocks,
                      NULL, &req);
        if (rc == 0)
            rc = gpu_bench_finish(req, (size_t)b->blocks, &report);
        *seconds = gpu_bench_now() - start;
    }
    if (rc == 0 && report.blocks_disk != (uint64_t)b->blocks)
        rc = KVT_E_STATE; /* some came from DRAM: not what is measured here */
    if (rc == 0)
        rc = kvt_stats_get(run->target.cache, "gpu.gds.reads", &run->direct_blocks);
    gpu_bench_target_close(&run->target);
    return gpu_bench_fail(b, rc, "loading from the drive");
}

/* ---- O_DIRECT alone ---- */

struct reads {
    int fds[FILES_MAX];
    uint32_t first[FILES_MAX + 1]; /* piece that a file begins with */
    uint32_t files;
    _Atomic uint32_t next; /* relaxed: pieces are handed out, nothing else */
    _Atomic int error;     /* relaxed: read after the join */
};

static void *read_pieces(void *arg)
{
    struct reads *reads = arg;
    void *buffer = aligned_alloc(4096, PIECE_BYTES);
    uint32_t piece, file = 0;
    if (buffer == NULL)
        atomic_store_explicit(&reads->error, -ENOMEM, memory_order_relaxed);
    while (buffer != NULL &&
           (piece = atomic_fetch_add_explicit(&reads->next, 1, memory_order_relaxed)) <
               reads->first[reads->files]) {
        while (piece >= reads->first[file + 1])
            file++;
        off_t at = (off_t)(piece - reads->first[file]) * PIECE_BYTES;
        if (pread(reads->fds[file], buffer, PIECE_BYTES, at) != PIECE_BYTES)
            atomic_store_explicit(&reads->error, -EIO, memory_order_relaxed);
    }
    free(buffer);
    return NULL;
}

static int open_files(struct disk_run *run, struct reads *reads)
{
    char path[PATH_MAX + 300];
    const struct dirent *entry;
    DIR *dir = opendir(run->root);
    if (dir == NULL)
        return -errno;
    while ((entry = readdir(dir)) != NULL && reads->files < FILES_MAX) {
        if (strncmp(entry->d_name, "seg-", 4) != 0)
            continue;
        snprintf(path, sizeof(path), "%s/%s", run->root, entry->d_name);
        int fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
        off_t bytes = fd >= 0 ? lseek(fd, 0, SEEK_END) : 0;
        uint32_t pieces = (uint32_t)(bytes / PIECE_BYTES);
        /* not more than was loaded: a last file that is not full is read as far as it goes */
        pieces = (uint32_t)KVT_MIN((uint64_t)pieces,
                                   run->record_bytes / PIECE_BYTES - reads->first[reads->files]);
        if (fd < 0)
            continue;
        reads->fds[reads->files++] = fd;
        reads->first[reads->files] = reads->first[reads->files - 1] + pieces;
    }
    closedir(dir);
    return reads->first[reads->files] > 0 ? 0 : -ENOENT;
}

static int read_once(struct disk_run *run, uint32_t threads, double *gbps)
{
    struct reads *reads = calloc(1, sizeof(*reads));
    pthread_t ids[THREADS_MAX];
    uint32_t started = 0;
    if (reads == NULL)
        return gpu_bench_fail(run->b, -ENOMEM, "host memory");
    int rc = open_files(run, reads);
    double start = gpu_bench_now();
    while (rc == 0 && started < threads) {
        rc = -pthread_create(&ids[started], NULL, read_pieces, reads);
        started += rc == 0;
    }
    for (uint32_t i = 0; i < started; i++)
        pthread_join(ids[i], NULL);
    double seconds = gpu_bench_now() - start;
    if (rc == 0)
        rc = atomic_load_explicit(&reads->error, memory_order_relaxed);
    *gbps = 1e-9 * PIECE_BYTES * reads->first[reads->files] / seconds;
    for (uint32_t i = 0; i < reads->files; i++)
        (void)close(reads->fds[i]);
    free(reads);
    return gpu_bench_fail(run->b, rc, "reading with O_DIRECT");
}

/* ---- both ---- */

static int measure(struct disk_run *run)
{
    static const uint32_t threads[] = {4, 8, 16, 32};
    struct gpu_bench *b = run->b;
    double loads[GPU_BENCH_REPS_MAX], reads[KVT_ARRAY_LEN(threads)][GPU_BENCH_REPS_MAX], best = 0;
    uint32_t best_threads = 0;
    int rc = 0;
    for (int64_t i = 0; i < b->reps && rc == 0; i++) {
        for (size_t t = 0; t < KVT_ARRAY_LEN(threads) && rc == 0; t++)
            rc = read_once(run, threads[t], &reads[t][i]);
        if (rc == 0)
            rc = load_once(run, &loads[i]);
    }
    if (rc != 0)
        return rc;
    for (size_t t = 0; t < KVT_ARRAY_LEN(threads); t++) {
        double median = gpu_bench_median(reads[t], (size_t)b->reps);
        if (median > best)
            best = median, best_threads = threads[t];
    }
    double seconds = gpu_bench_median(loads, (size_t)b->reps);
    double gbps = 1e-9 * (double)run->record_bytes / seconds;
    json_array_append_new(b->disks,
                          json_pack("{s:s, s:s, s:s, s:I, s:I, s:f, s:f, s:f, s:f, s:i, s:f}",
                                    "geometry", b->geometry->name, "level", "kv4", "path",
                                    run->direct_blocks > 0 ? "gds" : "dram", "blocks",
                                    (json_int_t)b->blocks, "bytes", (json_int_t)run->record_bytes,
                                    "seconds", seconds, "encoded_gbps", gbps, "equiv_gbps",
                                    1e-9 * (double)b->pool_bytes / seconds, "odirect_gbps", best,
                                    "odirect_threads", (int)best_threads, "ratio", gbps / best));
    if (!b->json)
        printf("%-7s  from the drive%s %6.2f GB/s encoded %8.2f bf16; O_DIRECT %6.2f (%u threads): "
               "%.3f\n",
               b->geometry->name, run->direct_blocks > 0 ? ", direct" : "", gbps,
               1e-9 * (double)b->pool_bytes / seconds, best, best_threads, gbps / best);
    return 0;
}

int gpu_bench_disk(struct gpu_bench *b)
{
    struct disk_run run = {.b = b};
    if (snprintf(run.root, sizeof(run.root), "%s/kvtier-bench-gpu", b->dir) >=
        (int)sizeof(run.root))
        return gpu_bench_fail(b, -ENAMETOOLONG, b->dir);
    run.keys = calloc((size_t)b->blocks, sizeof(*run.keys));
    run.ids = calloc((size_t)b->blocks, sizeof(*run.ids));
    int rc = run.keys != NULL && run.ids != NULL ? 0 : -ENOMEM;
    for (int64_t i = 0; i < b->blocks && rc == 0; i++) {
        memcpy(run.keys[i].hash, "disk", 4);
        memcpy(run.keys[i].hash + 8, &i, sizeof(i));
        run.keys[i].hash_len = 16;
        run.ids[i] = (uint32_t)i;
    }
    if (rc == 0)
        rc = empty_root(&run);
    rc = gpu_bench_fail(b, rc, run.root);
    if (rc == 0)
        rc = store_all(&run);
    if (rc == 0)
        rc = measure(&run);
    (void)empty_root(&run);
    free(run.keys);
    free(run.ids);
    return rc;
}
