/* A cuFile on a machine without one, over the fake CUDA driver, whose device memory is memory.
 *
 * Reads are pread(); what it counts, and how calls fail, is the test's to say (fake_cufile.h).
 * Registrations are counted, and reads of what is not registered fail. Threads: any; the counters
 * are under a lock.
 */
#include "gpu/fake_cufile.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "gpu/cufile_abi.h"

/* What it exports is declared by cuFile's own header alone, which is not ours. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"

#define EXPORT __attribute__((visibility("default")))
#define HANDLES 64

EXPORT struct fake_cufile fake_cufile = {.version = 1200}; /* as a program finds it: compat */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int files[HANDLES]; /* descriptor + 1 */
static uint64_t statistics[639];

static struct kvt_cf_error result(int code)
{
    return (struct kvt_cf_error){.code = code};
}

EXPORT struct kvt_cf_error cuFileGetVersion(int *version)
{
    *version = fake_cufile.version;
    return result(0);
}

EXPORT struct kvt_cf_error cuFileDriverOpen(void)
{
    const char *path = getenv("CUFILE_LOGFILE_PATH");
    pthread_mutex_lock(&lock);
    memset(fake_cufile.log_path, 0, sizeof(fake_cufile.log_path));
    if (path != NULL)
        memcpy(fake_cufile.log_path, path, strnlen(path, sizeof(fake_cufile.log_path) - 1));
    fake_cufile.opened += fake_cufile.open_code == 0;
    pthread_mutex_unlock(&lock);
    return result(fake_cufile.open_code);
}

#ifndef FAKE_CUFILE_OLD
EXPORT struct kvt_cf_error cuFileDriverClose_v2(void)
{
    fake_cufile.opened--;
    return result(0);
}
#endif

EXPORT struct kvt_cf_error cuFileDriverGetProperties(struct kvt_cf_properties *properties)
{
    properties->nvfs_major = fake_cufile.nvfs_version;
    properties->control = KVT_CF_COMPAT_ALLOWED;
    properties->features = fake_cufile.features;
    return result(0);
}

EXPORT struct kvt_cf_error cuFileHandleRegister(void **handle, struct kvt_cf_descriptor *descriptor)
{
    int code = fake_cufile.handle_code != 0 ? fake_cufile.handle_code : KVT_CF_INTERNAL;
    /* As 1.15 does on an H200: O_DIRECT it wants, and any flag that it does not know it refuses. */
    if ((fcntl(descriptor->handle.fd, F_GETFL) & (O_NOFOLLOW | O_NONBLOCK)) != 0)
        return result(5019);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < HANDLES && fake_cufile.handle_code == 0; i++) {
        if (files[i] != 0)
            continue;
        files[i] = descriptor->handle.fd + 1;
        *handle = &files[i];
        fake_cufile.handles++;
        code = descriptor->type == 1 ? 0 : KVT_CF_FILE_TYPE;
        break;
    }
    pthread_mutex_unlock(&lock);
    return result(code);
}

EXPORT void cuFileHandleDeregister(void *handle)
{
    pthread_mutex_lock(&lock);
    *(int *)handle = 0;
    fake_cufile.handles--;
    pthread_mutex_unlock(&lock);
}

EXPORT struct kvt_cf_error cuFileBufRegister(const void *base, size_t bytes, int flags)
{
    (void)flags;
    if (fake_cufile.buffer_code != 0 || base == NULL || bytes == 0)
        return result(fake_cufile.buffer_code != 0 ? fake_cufile.buffer_code : KVT_CF_INTERNAL);
    pthread_mutex_lock(&lock);
    fake_cufile.buffers++;
    pthread_mutex_unlock(&lock);
    return result(0);
}

EXPORT struct kvt_cf_error cuFileBufDeregister(const void *base)
{
    (void)base;
    pthread_mutex_lock(&lock);
    fake_cufile.buffers--;
    pthread_mutex_unlock(&lock);
    return result(0);
}

static void count(uint64_t bytes)
{
    uint64_t *gpu = &statistics[(fake_cufile.old_statistics ? 129 : 143) +
                                (size_t)fake_cufile.gpu * KVT_CF_GPU_WORDS];
    int path = fake_cufile.path, mixed = path == FAKE_MIXED; /* cut in two by the library */
    if (path == FAKE_SILENT || fake_cufile.level < 3 || !fake_cufile.started)
        return;
    gpu[KVT_CF_READ_BYTES] += bytes;
    gpu[KVT_CF_READS] += mixed ? 2 : 1;
    gpu[KVT_CF_POSIX_READS] += path == FAKE_POSIX || mixed;
    gpu[KVT_CF_P2P_READS] += path == FAKE_P2P || mixed;
    gpu[KVT_CF_NVFS_READS] += path == FAKE_NVFS;
}

static void wait_while_held(void)
{
    static const struct timespec a_while = {.tv_nsec = 1000000};
    if (atomic_load(&fake_cufile.hold) == 0)
        return;
    atomic_fetch_add(&fake_cufile.held, 1);
    while (atomic_load(&fake_cufile.hold) != 0)
        (void)nanosleep(&a_while, NULL);
}

EXPORT ssize_t cuFileRead(void *handle, void *base, size_t bytes, off_t file_offset,
                          off_t base_offset)
{
    wait_while_held();
    pthread_mutex_lock(&lock);
    int fd = *(int *)handle - 1, number = fake_cufile.reads++;
    char *to = (char *)base + base_offset;
    if (((uint64_t)file_offset | bytes | (uintptr_t)to) % 4096 != 0)
        fake_cufile.misaligned++;
    ssize_t got = (ssize_t)bytes;
    if (fake_cufile.read_code != 0 && number >= fake_cufile.reads_good) {
        got = fake_cufile.read_code > KVT_CF_BASE ? -fake_cufile.read_code : -1;
        errno = fake_cufile.read_code > KVT_CF_BASE ? 0 : fake_cufile.read_code;
    } else if (!fake_cufile.does_nothing) {
        got = pread(fd, to, bytes, file_offset);
        if (got > 0 && fake_cufile.wrong)
            to[got / 2] ^= 1;
    }
    if (got > 0)
        got -= fake_cufile.short_by;
    if (got > 0)
        count((uint64_t)got);
    int error = errno;
    pthread_mutex_unlock(&lock);
    errno = error;
    return got;
}

EXPORT struct kvt_cf_error cuFileSetStatsLevel(int level)
{
    fake_cufile.level = level;
    return result(0);
}

EXPORT struct kvt_cf_error cuFileGetStatsLevel(int *level)
{
    *level = fake_cufile.level;
    return result(0);
}

EXPORT struct kvt_cf_error cuFileStatsStart(void)
{
    fake_cufile.started = 1;
    return result(0);
}

EXPORT struct kvt_cf_error cuFileStatsStop(void)
{
    fake_cufile.started = 0;
    return result(0);
}

EXPORT struct kvt_cf_error cuFileGetStatsL3(void *out)
{
    if (fake_cufile.stats_code != 0)
        return result(fake_cufile.stats_code);
    pthread_mutex_lock(&lock);
    memcpy(out, statistics, fake_cufile.old_statistics ? 5000 : 5112);
    pthread_mutex_unlock(&lock);
    return result(0);
}
