/* cuFile (GPUDirect Storage) by dlopen: files, device buffers, reads, and the library's own counts
 * of which path its reads took.
 *
 * One cuFile driver serves the whole process, and others in it may use it too: it is opened by
 * count, and its settings are left alone but for the place of its log. It must not be started
 * without a CUDA driver (1.20 then spins for ever), so a device must be open.
 * Threads: any; one instance is used by one thread at a time. Everything here blocks.
 */
#ifndef KVT_GPU_CUFILE_H
#define KVT_GPU_CUFILE_H

#include <stdint.h>
#include <sys/types.h>

#include "gpu/cufile_abi.h"
#include "gpu/gpu.h"

#define KVT_CUFILE_VERSION_MIN 1150 /* 1.15: the first that counts reads by their path */

struct kvt_cufile {
    void *library;
    struct kvt_cufile_table table;
    int version;   /* 1150: 1.15 */
    int last_code; /* of the last call that failed: 5001 .., or an errno */
};

struct kvt_cufile_opts {
    const char *library; /* NULL: "libcufile.so.0" */
    const char *log;     /* file for cuFile's own log; NULL: none. CUFILE_LOGFILE_PATH in the
                            environment goes before */
};

/* Load it and open its driver. gpu: any open device of the process.
 * 0; KVT_E_UNSUPPORTED absent, too old, or it refuses to start: reason says which, in a sentence.
 * After a failure there is nothing to close. */
KVT_GPU_RESULT int kvt_cufile_open(struct kvt_cufile *cufile, const struct kvt_gpu *gpu,
                                   const struct kvt_cufile_opts *opts, char *reason, size_t len);
void kvt_cufile_close(struct kvt_cufile *cufile); /* also one that is zero */

/* Register a file that is open with O_DIRECT. 0, or -EIO; last_code has more. */
KVT_GPU_RESULT int kvt_cufile_file(struct kvt_cufile *cufile, int fd, void **file);
void kvt_cufile_file_end(struct kvt_cufile *cufile, void *file); /* NULL is allowed */

/* Read into device memory: bytes read, fewer at the end of the file; -errno; -EIO for an error of
 * cuFile. last_code has more. Offsets and bytes are multiples of 4,096. */
KVT_GPU_RESULT int64_t kvt_cufile_read(struct kvt_cufile *cufile, void *file, kvt_cu_ptr base,
                                       uint64_t base_offset, uint64_t bytes, uint64_t file_offset);

/* What last_code says: an error of cuFile, or an errno. Borrowed until the thread asks again. */
const char *kvt_cufile_error(int code);

/* ---- counters ---- */

struct kvt_cufile_paths { /* reads of the process, over all GPUs */
    uint64_t reads, bytes;
    uint64_t p2p;   /* PCI P2PDMA: direct */
    uint64_t nvfs;  /* nvidia-fs: direct */
    uint64_t posix; /* through the CPU's memory */
};

struct kvt_cufile_stats { /* as the library gives them */
    uint64_t words[KVT_CF_STATS_BYTES / 8];
};

/* 0; KVT_E_UNSUPPORTED the library does not give them. */
KVT_GPU_RESULT int kvt_cufile_stats(struct kvt_cufile *cufile, struct kvt_cufile_stats *stats);

/* Which layout the statistics have is proved, not assumed: it is the one under which exactly
 * `bytes` were read between the two. false: under none. Pure. */
KVT_GPU_RESULT int kvt_cufile_understand(const struct kvt_cufile_stats *before,
                                         const struct kvt_cufile_stats *after, uint64_t bytes,
                                         struct kvt_cufile_paths *from,
                                         struct kvt_cufile_paths *to);

#endif
