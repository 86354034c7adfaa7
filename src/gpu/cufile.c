/* cuFile by dlopen: see cufile.h.
 *
 * Invariants: nothing is called before the version is known to be one whose interface we declare;
 * the driver is closed as often as it was opened. The library itself stays loaded: it has threads
 * and exit handlers of its own.
 * Not done here: deciding whether a path is direct (gds.c). Threads: starting is one at a time.
 */
#include "gpu/cufile.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fd.h"

/* The only way that keeps the log out of the current directory: 1.15 and 1.20 take the parameter
 * for it (cuFileSetParameterString), and write there all the same. */
#define LOG_VARIABLE "CUFILE_LOGFILE_PATH"

static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

struct wanted {
    const char *name;
    size_t at; /* in the table */
};

static const struct wanted functions[] = {
#define KVT_X(member, result, name, arguments) {name, offsetof(struct kvt_cufile_table, member)},
    KVT_CUFILE_FUNCTIONS(KVT_X)
#undef KVT_X
};

const char *kvt_cufile_error(int code)
{
    static const struct {
        int code;
        const char *text;
    } errors[] = {
        {KVT_CF_DRIVER_NOT_LOADED, "nvidia-fs is not loaded, and compat mode is not allowed"},
        {KVT_CF_DRIVER_MISMATCH, "nvidia-fs is of another version"},
        {KVT_CF_PLATFORM, "this platform is not supported"},
        {KVT_CF_FILE, "this file cannot be read directly"},
        {KVT_CF_DEVICE, "this GPU is not supported"},
        {KVT_CF_CUDA, "the CUDA driver failed"},
        {KVT_CF_FILE_TYPE, "this kind of file or file system is not supported"},
        {KVT_CF_PERMISSION, "no permission for the driver or the file"},
        {KVT_CF_HANDLE, "the file cannot be registered: its file system is not supported, or its "
                        "device is not known to udev"},
        {KVT_CF_INTERNAL, "an internal error"},
        {KVT_CF_NVFS_SETUP, "nvidia-fs does not start"},
        {KVT_CF_FILE_DISABLED, "cufile.json disables it for this file"},
        {KVT_CF_PINNING, "no pinned GPU memory"},
    };
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
        if (errors[i].code == code)
            return errors[i].text;
    return code > KVT_CF_BASE ? "an error of cuFile" : kvt_strerror(-code);
}

/* ---- open and close ------------------------------------------------------------------------ */

static int find_functions(struct kvt_cufile *cufile, char *reason, size_t len)
{
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
        void *address = dlsym(cufile->library, functions[i].name);
        if (address == NULL) {
            snprintf(reason, len,
                     "libcufile has no %s: 1.15 (CUDA 13.0) or newer is needed to prove its path",
                     functions[i].name);
            return KVT_E_UNSUPPORTED;
        }
        memcpy((char *)&cufile->table + functions[i].at, &address, sizeof(address));
    }
    struct kvt_cf_error error = cufile->table.version(&cufile->version);
    if (error.code != KVT_CF_OK || cufile->version < KVT_CUFILE_VERSION_MIN) {
        snprintf(
            reason, len,
            "libcufile is version %d.%d: 1.15 (CUDA 13.0) or newer is needed to prove its path",
            cufile->version / 1000, cufile->version % 1000 / 10);
        return KVT_E_UNSUPPORTED;
    }
    return 0;
}

static int start(struct kvt_cufile *cufile, const char *log, char *reason, size_t len)
{
    pthread_mutex_lock(&starting);
    int placed = getenv(LOG_VARIABLE) == NULL;
    if (placed)
        placed = setenv(LOG_VARIABLE, log != NULL ? log : "/dev/null", 0) == 0;
    int held[KVT_FD_LEAST];
    kvt_fd_hold(held);
    struct kvt_cf_error error = cufile->table.driver_open();
    kvt_fd_release(held);
    if (placed)
        (void)unsetenv(LOG_VARIABLE); /* read when the driver opens; children need not see it */
    pthread_mutex_unlock(&starting);
    cufile->last_code = error.code;
    if (error.code == KVT_CF_OK)
        return 0;
    snprintf(reason, len, "libcufile %d.%d refuses to start: %s (error %d, CUDA %d)",
             cufile->version / 1000, cufile->version % 1000 / 10, kvt_cufile_error(error.code),
             error.code, error.cuda);
    return KVT_E_UNSUPPORTED;
}

int kvt_cufile_open(struct kvt_cufile *cufile, const struct kvt_gpu *gpu,
                    const struct kvt_cufile_opts *opts, char *reason, size_t len)
{
    memset(cufile, 0, sizeof(*cufile));
    if (gpu == NULL)
        return KVT_E_INVAL;
    const char *name = opts->library != NULL ? opts->library : "libcufile.so.0";
    cufile->library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (cufile->library == NULL) {
        snprintf(reason, len, "no libcufile on this machine (%s)", dlerror());
        return KVT_E_UNSUPPORTED;
    }
    int status = find_functions(cufile, reason, len);
    if (status == 0)
        status = start(cufile, opts->log, reason, len);
    if (status != 0) {
        dlclose(cufile->library);
        cufile->library = NULL;
    }
    return status;
}

void kvt_cufile_close(struct kvt_cufile *cufile)
{
    if (cufile->library == NULL)
        return;
    pthread_mutex_lock(&starting);
    (void)cufile->table.driver_close();
    pthread_mutex_unlock(&starting);
    dlclose(cufile->library);
    cufile->library = NULL;
}

/* ---- files and reads ----------------------------------------------------------------------- */

int kvt_cufile_file(struct kvt_cufile *cufile, int fd, void **file)
{
    struct kvt_cf_descriptor descriptor = {.type = 1, .handle.fd = fd};
    struct kvt_cf_error error = cufile->table.handle_register(file, &descriptor);
    if (error.code == KVT_CF_OK)
        return 0;
    *file = NULL;
    cufile->last_code = error.code;
    return -EIO;
}

void kvt_cufile_file_end(struct kvt_cufile *cufile, void *file)
{
    if (file != NULL)
        cufile->table.handle_deregister(file);
}

int64_t kvt_cufile_read(struct kvt_cufile *cufile, void *file, kvt_cu_ptr base,
                        uint64_t base_offset, uint64_t bytes, uint64_t file_offset)
{
    errno = 0;
    ssize_t got = cufile->table.read(file, (void *)(uintptr_t)base, bytes, (off_t)file_offset,
                                     (off_t)base_offset);
    if (got >= 0 && (uint64_t)got <= bytes)
        return got;
    if (got == -1 && errno != 0) {
        cufile->last_code = errno;
        return -errno;
    }
    cufile->last_code = got < -KVT_CF_BASE ? (int)-got : EIO;
    return -EIO;
}

/* ---- counters ------------------------------------------------------------------------------ */

int kvt_cufile_stats(struct kvt_cufile *cufile, struct kvt_cufile_stats *stats)
{
    memset(stats, 0, sizeof(*stats));
    struct kvt_cf_error error = cufile->table.stats_level3(stats->words);
    if (error.code == KVT_CF_OK)
        return 0;
    cufile->last_code = error.code;
    return KVT_E_UNSUPPORTED;
}

static void sum(const struct kvt_cufile_stats *stats, size_t first, struct kvt_cufile_paths *paths)
{
    memset(paths, 0, sizeof(*paths));
    for (size_t i = 0; i < KVT_CF_GPUS; i++) {
        const uint64_t *gpu = &stats->words[first + i * KVT_CF_GPU_WORDS];
        paths->reads += gpu[KVT_CF_READS];
        paths->bytes += gpu[KVT_CF_READ_BYTES];
        paths->p2p += gpu[KVT_CF_P2P_READS];
        paths->nvfs += gpu[KVT_CF_NVFS_READS];
        paths->posix += gpu[KVT_CF_POSIX_READS];
    }
}

int kvt_cufile_understand(const struct kvt_cufile_stats *before,
                          const struct kvt_cufile_stats *after, uint64_t bytes,
                          struct kvt_cufile_paths *from, struct kvt_cufile_paths *to)
{
    static const size_t layouts[] = KVT_CF_STATS_LAYOUTS;
    int found = 0;
    for (size_t i = 0; i < sizeof(layouts) / sizeof(layouts[0]); i++) {
        struct kvt_cufile_paths a, b;
        sum(before, layouts[i], &a);
        sum(after, layouts[i], &b);
        uint64_t reads = b.reads - a.reads; /* a large one may be cut by the library */
        uint64_t by_path = (b.p2p - a.p2p) + (b.nvfs - a.nvfs) + (b.posix - a.posix);
        if (b.bytes - a.bytes != bytes || reads == 0 || reads > bytes / 4096 || by_path != reads)
            continue;
        *from = a;
        *to = b;
        found++;
    }
    return found == 1;
}
