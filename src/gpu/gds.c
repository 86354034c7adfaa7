/* The probe of the direct path: see gds.h.
 *
 *   start cuFile -> scratch file -> register file and buffer -> count, one read, count -> compare
 *   the bytes -> time reads by cuFile and by O_DIRECT with a copy -> verdict
 *
 * Invariants: the verdict is DIRECT only when the counters were understood and every read between
 * them went by P2PDMA or nvidia-fs; bytes that differ from those written end in ABSENT. The scratch
 * file, the statistics' level and the device's memory are as before afterwards.
 */
#include "gpu/gds.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/fd.h"
#include "base/rng.h"
#include "gpu/gpu_internal.h"

#define STATS_LEVEL 3 /* the first that counts by GPU and path */

struct probe {
    struct kvt_gpu *gpu;
    const struct kvt_gds_opts *opts;
    struct kvt_gds_report *report;
    struct kvt_cufile cufile;
    char path[PATH_MAX];
    int fd;
    uint8_t *written; /* one read's worth, in front of the file */
    void *pinned;     /* as much, for the ordinary path and for comparing */
    kvt_cu_ptr device;
    kvt_cu_stream stream;
    void *file; /* cuFile's */
    int registered;
};

const char *kvt_gds_name(enum kvt_gds_verdict verdict)
{
    return verdict == KVT_GDS_DIRECT ? "direct" : verdict == KVT_GDS_COMPAT ? "compat" : "absent";
}

/* A verdict, or that there is none, in a sentence. */
__attribute__((format(printf, 3, 4))) static int verdict(struct probe *p, enum kvt_gds_verdict is,
                                                         const char *format, ...)
{
    va_list args;
    va_start(args, format);
    p->report->verdict = is;
    (void)vsnprintf(p->report->reason, sizeof(p->report->reason), format, args);
    va_end(args);
    return 0;
}

/* ---- what is needed ------------------------------------------------------------------------ */

static int write_all(int fd, const uint8_t *from, uint64_t bytes)
{
    for (uint64_t at = 0; at < bytes; at += KVT_GDS_READ_BYTES) {
        ssize_t put = pwrite(fd, from, KVT_GDS_READ_BYTES, (off_t)at);
        if (put != (ssize_t)KVT_GDS_READ_BYTES)
            return put < 0 ? -errno : -ENOSPC;
    }
    return fdatasync(fd) != 0 ? -errno : 0;
}

/* Named while it is in use: cuFile looks at where a file lies. */
static int make_file(struct probe *p)
{
    struct kvt_rng rng = {.state = 1};
    if (snprintf(p->path, sizeof(p->path), "%s/.kvtier-gds-XXXXXX", p->opts->dir) >=
        (int)sizeof(p->path)) {
        p->path[0] = '\0';
        return -ENAMETOOLONG;
    }
    p->fd = kvt_fd_high(mkostemp(p->path, O_CLOEXEC | O_DIRECT));
    if (p->fd < 0) {
        int error = errno;
        p->path[0] = '\0';
        (void)verdict(p, KVT_GDS_ABSENT, "no file with O_DIRECT can be made in %s: %s",
                      p->opts->dir, kvt_strerror(-error));
        return -error;
    }
    for (size_t at = 0; at < KVT_GDS_READ_BYTES; at += 8) {
        uint64_t word = kvt_rng_next(&rng); /* incompressible: some drives would cheat */
        memcpy(p->written + at, &word, 8);
    }
    int status = write_all(p->fd, p->written, p->opts->bytes);
    if (status != 0)
        (void)verdict(p, KVT_GDS_ABSENT, "%s cannot be written: %s", p->path, kvt_strerror(status));
    return status;
}

/* Our context is current. */
static int make_memory(struct probe *p)
{
    const struct kvt_cuda *cuda = &p->gpu->cuda;
    p->written = aligned_alloc(4096, KVT_GDS_READ_BYTES);
    if (p->written == NULL)
        return -ENOMEM;
    kvt_cu_result result = cuda->host_alloc(&p->pinned, KVT_GDS_READ_BYTES, KVT_CU_HOST_PORTABLE);
    if (result != KVT_CU_OK)
        p->pinned = NULL;
    if (result == KVT_CU_OK) {
        /* cuFile wants 64 KiB pages of its own: an allocation of this size has them. */
        result = cuda->memory_alloc(&p->device, KVT_GDS_READ_BYTES);
        if (result != KVT_CU_OK)
            p->device = 0;
    }
    if (result == KVT_CU_OK) {
        result =
            cuda->stream_create(&p->stream, KVT_CU_STREAM_NON_BLOCKING, p->gpu->least_priority);
        if (result != KVT_CU_OK)
            p->stream = NULL;
    }
    if (result != KVT_CU_OK)
        snprintf(p->report->reason, sizeof(p->report->reason), "no memory for the probe: %s",
                 kvt_gpu_offline(p->gpu) ? kvt_gpu_offline_reason(p->gpu) : "the GPU refuses");
    return kvt_gpu_check(p->gpu, result);
}

static void give_back(struct probe *p)
{
    const struct kvt_cuda *cuda = &p->gpu->cuda;
    if (p->registered)
        (void)p->cufile.table.buffer_deregister((const void *)(uintptr_t)p->device);
    kvt_cufile_file_end(&p->cufile, p->file);
    kvt_cufile_close(&p->cufile);
    if (p->stream != NULL)
        (void)cuda->stream_destroy(p->stream);
    if (p->device != 0)
        (void)cuda->memory_free(p->device);
    if (p->pinned != NULL)
        (void)cuda->host_free(p->pinned);
    free(p->written);
    if (p->fd >= 0)
        (void)close(p->fd);
    if (p->path[0] != '\0')
        (void)unlink(p->path);
}

/* ---- verdicts ------------------------------------------------------------------------------ */

static void remedy(struct probe *p, const char *text)
{
    (void)snprintf(p->report->remedy, sizeof(p->report->remedy), "%s", text);
}

static int refused(struct probe *p, const char *what)
{
    int code = p->cufile.last_code;
    if (code == KVT_CF_HANDLE || code == KVT_CF_FILE_TYPE)
        remedy(p, "use a directory on ext4 or xfs of a local NVMe drive; the drive must be known "
                  "to udev");
    else if (code == KVT_CF_DRIVER_NOT_LOADED)
        remedy(p, "load nvidia-fs (package nvidia-gds), or use the open driver 565 or newer on "
                  "Linux 6.2 or newer");
    return verdict(p, KVT_GDS_ABSENT, "libcufile %d.%d refuses %s: %s (error %d)",
                   p->cufile.version / 1000, p->cufile.version % 1000 / 10, what,
                   kvt_cufile_error(code), code);
}

/* Why the library takes its POSIX path, as far as it can be seen from outside. */
static const char *compat_cause(struct probe *p)
{
    struct kvt_cf_properties have;
    const char *forced = getenv("CUFILE_FORCE_COMPAT_MODE");
    memset(&have, 0, sizeof(have));
    if (forced != NULL && strcmp(forced, "true") == 0) {
        remedy(p, "unset CUFILE_FORCE_COMPAT_MODE");
        return "CUFILE_FORCE_COMPAT_MODE=true asks for it";
    }
    if (p->cufile.table.properties(&have).code != KVT_CF_OK)
        return "the library does not tell why";
    if (have.nvfs_major != 0 || have.nvfs_minor != 0) {
        remedy(p, "use a directory on ext4 or xfs of a local NVMe drive without md-RAID; "
                  "'gdscheck -p' of CUDA names what is supported");
        return "nvidia-fs is there, but does not serve this file system, drive or GPU";
    }
    remedy(p, "load nvidia-fs (package nvidia-gds), or use the open driver 565 or newer on Linux "
              "6.2 or newer with a data-centre GPU, a local NVMe drive without md-RAID, and the "
              "IOMMU off");
    return (have.features & KVT_CF_FEATURE_P2P) != 0
               ? "nvidia-fs is not loaded, and PCI P2PDMA does not serve this drive or GPU"
               : "nvidia-fs is not loaded, and there is no PCI P2PDMA";
}

static int judge(struct probe *p)
{
    const struct kvt_cufile_paths *a = &p->report->before, *b = &p->report->after;
    if (!p->report->has_proof)
        return verdict(p, KVT_GDS_COMPAT,
                       "libcufile %d.%d reads, but its counters do not tell how: direct is not "
                       "proved",
                       p->cufile.version / 1000, p->cufile.version % 1000 / 10);
    uint64_t reads = b->reads - a->reads;
    uint64_t direct = (b->p2p - a->p2p) + (b->nvfs - a->nvfs);
    if (direct == reads && b->posix == a->posix)
        return verdict(p, KVT_GDS_DIRECT, "every read went by %s",
                       b->p2p != a->p2p ? "PCI P2PDMA" : "nvidia-fs");
    return verdict(p, KVT_GDS_COMPAT, "libcufile %d.%d reads through the CPU's memory (posix): %s",
                   p->cufile.version / 1000, p->cufile.version % 1000 / 10, compat_cause(p));
}

/* ---- reads --------------------------------------------------------------------------------- */

static int read_back(struct probe *p)
{
    const struct kvt_cuda *cuda = &p->gpu->cuda;
    memset(p->pinned, 0, KVT_GDS_READ_BYTES);
    kvt_cu_result result =
        cuda->copy_to_host_async(p->pinned, p->device, KVT_GDS_READ_BYTES, p->stream);
    kvt_cu_result end = cuda->stream_sync(p->stream);
    return kvt_gpu_check(p->gpu, result != KVT_CU_OK ? result : end);
}

/* Device memory holds something else first, so that a read that does nothing is seen. */
static int spoil(struct probe *p)
{
    const struct kvt_cuda *cuda = &p->gpu->cuda;
    kvt_cu_result result =
        cuda->fill_words_async(p->device, 0x5a5a5a5au, KVT_GDS_READ_BYTES / 4, p->stream);
    kvt_cu_result end = cuda->stream_sync(p->stream);
    return kvt_gpu_check(p->gpu, result != KVT_CU_OK ? result : end);
}

/* One read between two counts. 0: compared and equal. 1: a verdict was reached. */
static int prove(struct probe *p)
{
    struct kvt_cufile_stats before, after;
    int status = spoil(p);
    if (status != 0)
        return status;
    int counted = kvt_cufile_stats(&p->cufile, &before) == 0;
    int64_t got = kvt_cufile_read(&p->cufile, p->file, p->device, 0, KVT_GDS_READ_BYTES, 0);
    counted = counted && kvt_cufile_stats(&p->cufile, &after) == 0;
    if (got < 0)
        return refused(p, "to read") + 1;
    if (got != KVT_GDS_READ_BYTES)
        return verdict(p, KVT_GDS_ABSENT, "libcufile read %lld of %u bytes of a whole file",
                       (long long)got, KVT_GDS_READ_BYTES) +
               1;
    p->report->has_proof = counted && kvt_cufile_understand(&before, &after, KVT_GDS_READ_BYTES,
                                                            &p->report->before, &p->report->after);
    status = read_back(p);
    if (status != 0)
        return status;
    if (memcmp(p->pinned, p->written, KVT_GDS_READ_BYTES) != 0)
        return verdict(p, KVT_GDS_ABSENT, "libcufile read other bytes than were written") + 1;
    return 0;
}

/* Seconds for the whole file by one path, one read at a time; 0 when one failed. */
static double time_reads(struct probe *p, int by_cufile)
{
    struct kvt_clock clock = kvt_clock_system();
    const struct kvt_cuda *cuda = &p->gpu->cuda;
    int64_t start = kvt_clock_now(&clock);
    for (uint64_t at = 0; at < p->opts->bytes; at += KVT_GDS_READ_BYTES) {
        int64_t got =
            by_cufile ? kvt_cufile_read(&p->cufile, p->file, p->device, 0, KVT_GDS_READ_BYTES, at)
                      : pread(p->fd, p->pinned, KVT_GDS_READ_BYTES, (off_t)at);
        if (got != KVT_GDS_READ_BYTES)
            return 0;
        if (!by_cufile && (cuda->copy_to_device_async(p->device, p->pinned, KVT_GDS_READ_BYTES,
                                                      p->stream) != KVT_CU_OK ||
                           cuda->stream_sync(p->stream) != KVT_CU_OK))
            return 0;
    }
    return (double)(kvt_clock_now(&clock) - start) / 1e9;
}

/* In turns, the better of two each: neither gets the cold drive alone. */
static void measure(struct probe *p)
{
    double best[2] = {0, 0};
    for (int round = 0; round < 4; round++) {
        double seconds = time_reads(p, round % 2);
        double *at = &best[round % 2];
        if (seconds > 0 && (*at == 0 || seconds < *at))
            *at = seconds;
    }
    p->report->ordinary_gbps = best[0] > 0 ? (double)p->opts->bytes / best[0] / 1e9 : 0;
    p->report->read_gbps = best[1] > 0 ? (double)p->opts->bytes / best[1] / 1e9 : 0;
}

static int counted_read(struct probe *p)
{
    int level = 0, had_level = p->cufile.table.stats_get_level(&level).code == KVT_CF_OK;
    int set = p->cufile.table.stats_set_level(STATS_LEVEL).code == KVT_CF_OK &&
              p->cufile.table.stats_start().code == KVT_CF_OK;
    int status = prove(p);
    if (set && level == 0)
        (void)p->cufile.table.stats_stop();
    if (set && had_level)
        (void)p->cufile.table.stats_set_level(level);
    return status;
}

static int run(struct probe *p)
{
    struct kvt_cufile_opts opts = {.library = p->opts->library, .log = p->opts->log};
    int status = make_memory(p);
    if (status == 0)
        status = make_file(p);
    if (status != 0)
        return status;
    if (kvt_cufile_open(&p->cufile, p->gpu, &opts, p->report->reason, sizeof(p->report->reason)) !=
        0) {
        p->report->version = p->cufile.version;
        remedy(p, "install libcufile of CUDA 13.0 or newer (package libcufile-13-0, or PyPI "
                  "nvidia-cufile with its folder in LD_LIBRARY_PATH)");
        return 0;
    }
    p->report->version = p->cufile.version;
    if (kvt_cufile_file(&p->cufile, p->fd, &p->file) != 0)
        return refused(p, "to register a file");
    struct kvt_cf_error error =
        p->cufile.table.buffer_register((const void *)(uintptr_t)p->device, KVT_GDS_READ_BYTES, 0);
    p->registered = error.code == KVT_CF_OK;
    p->cufile.last_code = error.code;
    if (!p->registered)
        return refused(p, "to register GPU memory");
    status = counted_read(p);
    if (status != 0)
        return status == 1 ? 0 : status;
    measure(p);
    return judge(p);
}

int kvt_gds_probe(struct kvt_gpu *gpu, const struct kvt_gds_opts *opts,
                  struct kvt_gds_report *report)
{
    memset(report, 0, sizeof(*report));
    if (opts->dir == NULL || opts->bytes == 0 || opts->bytes % KVT_GDS_READ_BYTES != 0) {
        (void)snprintf(report->reason, sizeof(report->reason), "nothing to probe");
        return KVT_E_INVAL;
    }
    struct probe *p = calloc(1, sizeof(*p));
    if (p == NULL)
        return -ENOMEM;
    p->gpu = gpu;
    p->opts = opts;
    p->report = report;
    p->fd = -1;
    int status = kvt_gpu_enter(gpu);
    if (status == 0) {
        status = run(p);
        kvt_gpu_leave(gpu);
    }
    if (kvt_gpu_enter_to_release(gpu) == 0) {
        give_back(p);
        kvt_gpu_leave(gpu);
    }
    if (status != 0 && report->reason[0] == '\0')
        (void)snprintf(report->reason, sizeof(report->reason), "%s", kvt_strerror(status));
    free(p);
    return status;
}
