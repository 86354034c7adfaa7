/* The part of cuFile's binary interface that we use, declared by ourselves: the library builds
 * without it, and loads libcufile.so.0 at run time. Compared with the headers of 1.15 and 1.20.
 *
 * Only what has kept its shape since 1.15 is used. The statistics have not: their first level has
 * grown, and everything behind it moved. cufile.c therefore reads them as words, at the offsets of
 * every layout that is known, and believes none that does not tell of a read just made.
 */
#ifndef KVT_GPU_CUFILE_ABI_H
#define KVT_GPU_CUFILE_ABI_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "gpu/cuda_abi.h"

struct kvt_cf_error { /* CUfileError_t, by value */
    int code;         /* 0, or 5001 .. */
    kvt_cu_result cuda;
};

enum { /* the codes that we tell apart */
       KVT_CF_OK = 0,
       KVT_CF_BASE = 5000,
       KVT_CF_DRIVER_NOT_LOADED = 5001,
       KVT_CF_DRIVER_MISMATCH = 5004,
       KVT_CF_PLATFORM = 5007,
       KVT_CF_FILE = 5008,
       KVT_CF_DEVICE = 5009,
       KVT_CF_CUDA = 5011,
       KVT_CF_FILE_TYPE = 5018,
       KVT_CF_PERMISSION = 5025,
       KVT_CF_ALREADY_OPEN = 5026,
       KVT_CF_HANDLE = 5027,
       KVT_CF_INTERNAL = 5030,
       KVT_CF_NVFS_SETUP = 5033,
       KVT_CF_FILE_DISABLED = 5034,
       KVT_CF_PINNING = 5036
};

struct kvt_cf_descriptor { /* CUfileDescr_t */
    int type;              /* 1: a file descriptor */
    union {
        int fd;
        void *pointer;
    } handle;
    const void *fs_ops;
};
static_assert(sizeof(struct kvt_cf_descriptor) == 24, "CUfileDescr_t");

struct kvt_cf_properties { /* CUfileDrvProps_t, with room for what a newer one may write */
    unsigned nvfs_major, nvfs_minor;
    size_t poll_bytes, direct_bytes_max;
    unsigned supported; /* bits: kinds of storage */
    unsigned control;   /* bits: KVT_CF_COMPAT_ALLOWED */
    unsigned features;  /* bits: KVT_CF_FEATURE_P2P */
    unsigned room[121];
};
static_assert(offsetof(struct kvt_cf_properties, features) == 32, "CUfileDrvProps_t");
#define KVT_CF_COMPAT_ALLOWED (1u << 1)
#define KVT_CF_FEATURE_P2P (1u << 4)

/* Level 3 statistics: 16 GPUs of 31 words each, behind a first part that differs. Words of one: */
enum {
    KVT_CF_STATS_BYTES = 16384, /* 5,112 in 1.20; the rest is for later ones */
    KVT_CF_GPUS = 16,
    KVT_CF_GPU_WORDS = 31,
    KVT_CF_READ_BYTES = 2,
    KVT_CF_READS = 6,
    KVT_CF_P2P_READS = 7,
    KVT_CF_NVFS_READS = 8,
    KVT_CF_POSIX_READS = 9
};
/* Words before the first GPU: 1.15; 1.20, which counts vectored reads. */
#define KVT_CF_STATS_LAYOUTS \
    {                        \
        129, 143             \
    }

#define KVT_CUFILE_FUNCTIONS(X)                                                          \
    X(version, struct kvt_cf_error, "cuFileGetVersion", (int *version))                  \
    X(driver_open, struct kvt_cf_error, "cuFileDriverOpen", (void))                      \
    X(driver_close, struct kvt_cf_error, "cuFileDriverClose_v2", (void))                 \
    X(properties, struct kvt_cf_error, "cuFileDriverGetProperties",                      \
      (struct kvt_cf_properties * properties))                                           \
    X(handle_register, struct kvt_cf_error, "cuFileHandleRegister",                      \
      (void **handle, struct kvt_cf_descriptor *descriptor))                             \
    X(handle_deregister, void, "cuFileHandleDeregister", (void *handle))                 \
    X(buffer_register, struct kvt_cf_error, "cuFileBufRegister",                         \
      (const void *base, size_t bytes, int flags))                                       \
    X(buffer_deregister, struct kvt_cf_error, "cuFileBufDeregister", (const void *base)) \
    X(read, ssize_t, "cuFileRead",                                                       \
      (void *handle, void *base, size_t bytes, off_t file_offset, off_t base_offset))    \
    X(stats_set_level, struct kvt_cf_error, "cuFileSetStatsLevel", (int level))          \
    X(stats_get_level, struct kvt_cf_error, "cuFileGetStatsLevel", (int *level))         \
    X(stats_start, struct kvt_cf_error, "cuFileStatsStart", (void))                      \
    X(stats_stop, struct kvt_cf_error, "cuFileStatsStop", (void))                        \
    X(stats_level3, struct kvt_cf_error, "cuFileGetStatsL3", (void *stats))

struct kvt_cufile_table {
/* NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration */
#define KVT_X(member, result, name, arguments) result(*member) arguments;
    KVT_CUFILE_FUNCTIONS(KVT_X)
#undef KVT_X
};

#endif
