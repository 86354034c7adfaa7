/* The sides of `kvtier bench l2`: our log, fio, and a cache over several roots. Tools only. */
#ifndef KVT_TOOLS_BENCH_L2_H
#define KVT_TOOLS_BENCH_L2_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "io_count.h"

struct kvt_bench_l2_shape {
    uint64_t bytes;  /* moved by one pass; a multiple of block */
    uint64_t block;  /* of one request; a multiple of record */
    uint64_t record; /* one record; a multiple of 4 KiB */
    unsigned depth;  /* read requests in flight */
    int backend;     /* enum kvt_io_backend */
    int fixed;       /* register the memory with the ring */
    int direct;      /* -1, 0, 1 as in kvt_io_posix_params */
};

/* A log in a directory that is made here: one that has been filled, so that every further write
 * goes into recycled segments. All calls block. Codes: 0 or negative, and a sentence in why. */
struct kvt_bench_log;
int kvt_bench_log_open(const char *dir, const struct kvt_bench_l2_shape *shape,
                       struct kvt_bench_log **out, char *why, size_t why_len);
/* Append records until shape->bytes are written: their checksums are made meanwhile. *ns: from the
 * first append to the last report. */
int kvt_bench_log_write(struct kvt_bench_log *log, int64_t *ns);
/* Read what the last pass wrote, in the same order, and verify every record. */
int kvt_bench_log_read(struct kvt_bench_log *log, int64_t *ns);
void kvt_bench_log_info(const struct kvt_bench_log *log, struct kvt_io_info *info);
const struct kvt_io_counts *kvt_bench_log_counts(const struct kvt_bench_log *log, int kind);
/* Close, and remove its files. */
void kvt_bench_log_close(struct kvt_bench_log *log);

/* One pass of a whole cache over so many roots in `dir`: blocks of about shape->record bytes
 * stored, flushed, and loaded in requests of shape->block. Blocks; leaves nothing behind. 0, or a
 * code and a sentence in why. */
struct kvt_bench_roots {
    double write_gbps, read_gbps;
    double disk_share; /* of the blocks loaded: not from DRAM */
};
int kvt_bench_roots(const char *dir, const struct kvt_bench_l2_shape *shape, unsigned roots,
                    struct kvt_bench_roots *result, char *why, size_t why_len);

/* One pass of fio over `file` with the same size of block, depth and bytes; *gbps: its own figure.
 * 0; -ENOENT fio is not installed; a negative code with a sentence in why. */
int kvt_bench_fio(const char *file, const struct kvt_bench_l2_shape *shape, bool write, bool direct,
                  double *gbps, char *why, size_t why_len);

#endif
