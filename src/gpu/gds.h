/* Is there a direct path from this directory's drive into this GPU's memory? Proved by what
 * cuFile's own counters say of a read, never by a flag or a version.
 * Threads: any, one probe at a time. Blocks for as long as the disk takes. */
#ifndef KVT_GPU_GDS_H
#define KVT_GPU_GDS_H

#include "gpu/cufile.h"

enum kvt_gds_verdict {
    KVT_GDS_ABSENT = 0, /* cuFile cannot be used here; reason */
    KVT_GDS_COMPAT,     /* it works, but a direct path is not proved; reason */
    KVT_GDS_DIRECT      /* every read went past the CPU's memory */
};

struct kvt_gds_opts {
    const char *dir;     /* on the drive; a scratch file is made there, and removed */
    const char *library; /* NULL: "libcufile.so.0" */
    const char *log;     /* cuFile's own; NULL: none */
    uint64_t bytes;      /* read for the figures; multiple of KVT_GDS_READ_BYTES */
};

#define KVT_GDS_READ_BYTES (1u << 20) /* of one read, the one that is proof included */

struct kvt_gds_report {
    enum kvt_gds_verdict verdict;
    int version;                           /* of cuFile: 1150 is 1.15; 0: it did not start */
    char reason[256];                      /* of the verdict, a sentence */
    char remedy[256];                      /* "" when there is none */
    int has_proof;                         /* the counters were understood */
    struct kvt_cufile_paths before, after; /* one read of KVT_GDS_READ_BYTES between them */
    double read_gbps, ordinary_gbps; /* by cuFile; O_DIRECT and a copy; 10^9 bytes; 0: not known */
};

const char *kvt_gds_name(enum kvt_gds_verdict verdict); /* "direct", "compat", "absent" */

/* 0 a verdict was reached, also ABSENT; KVT_E_INVAL; -ENOMEM; -errno the scratch file; KVT_E_DEVICE
 * the GPU failed. reason is set in any case. */
KVT_GPU_RESULT int kvt_gds_probe(struct kvt_gpu *gpu, const struct kvt_gds_opts *opts,
                                 struct kvt_gds_report *report);

#endif
