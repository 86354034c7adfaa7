/* Reads by cuFile into a registered buffer: see gds_read.h.
 *
 * Invariants: a head is copied after its read has returned, on the caller's stream, and waited for;
 * cuFile's driver is open as long as the reader lives. Not done here: which chunk is free, and what
 * the bytes mean; nothing is verified.
 */
#include "gpu/gds_read.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/fd.h"
#include "gpu/gpu_internal.h"

struct kvt_gds_reader {
    struct kvt_gpu *gpu;
    struct kvt_cufile cufile; /* threads take a copy: it holds the code of the last error */
    _Atomic int last_code;    /* relaxed: any of the last ones, for people */
    uint32_t chunk_bytes, head_bytes;
    kvt_cu_ptr device;
    int registered;
    uint8_t *heads; /* pinned */
};

uint64_t kvt_gds_address(const struct kvt_gds_reader *reader, uint32_t chunk)
{
    return reader->device + (uint64_t)chunk * reader->chunk_bytes;
}

uint8_t *kvt_gds_head(const struct kvt_gds_reader *reader, uint32_t chunk)
{
    return reader->heads + (size_t)chunk * reader->head_bytes;
}

static void note(struct kvt_gds_reader *reader, const struct kvt_cufile *cufile)
{
    atomic_store_explicit(&reader->last_code, cufile->last_code, memory_order_relaxed);
}

int kvt_gds_last_code(const struct kvt_gds_reader *reader)
{
    return atomic_load_explicit(&reader->last_code, memory_order_relaxed);
}

/* Our context is current. */
static int take_memory(struct kvt_gds_reader *reader, uint64_t bytes)
{
    const struct kvt_cuda *cuda = &reader->gpu->cuda;
    size_t heads = (size_t)(bytes / reader->chunk_bytes) * reader->head_bytes;
    void *memory = NULL;
    kvt_cu_result result = cuda->memory_alloc(&reader->device, bytes);
    if (result != KVT_CU_OK)
        reader->device = 0;
    if (result == KVT_CU_OK) {
        result = cuda->host_alloc(&memory, heads, KVT_CU_HOST_PORTABLE);
        reader->heads = result == KVT_CU_OK ? memory : NULL;
    }
    return kvt_gpu_check(reader->gpu, result);
}

static int start(struct kvt_gds_reader *reader, const struct kvt_gds_reader_opts *opts,
                 char *reason, size_t len)
{
    struct kvt_cufile_opts how = {.library = opts->library};
    int status = kvt_gpu_enter(reader->gpu);
    if (status != 0)
        return status;
    status = take_memory(reader, opts->bytes);
    if (status == 0)
        status = kvt_cufile_open(&reader->cufile, reader->gpu, &how, reason, len);
    if (status == 0) {
        struct kvt_cf_error error = reader->cufile.table.buffer_register(
            (const void *)(uintptr_t)reader->device, opts->bytes, 0);
        reader->registered = error.code == KVT_CF_OK;
        if (!reader->registered) {
            (void)snprintf(reason, len, "libcufile refuses to register GPU memory: %s (error %d)",
                           kvt_cufile_error(error.code), error.code);
            status = KVT_E_UNSUPPORTED;
        }
    }
    kvt_gpu_leave(reader->gpu);
    return status;
}

int kvt_gds_reader_new(struct kvt_gpu *gpu, const struct kvt_gds_reader_opts *opts,
                       struct kvt_gds_reader **out, char *reason, size_t len)
{
    struct kvt_gds_reader *reader = calloc(1, sizeof(*reader));
    (void)snprintf(reason, len, "no memory for its buffers");
    if (reader == NULL)
        return -ENOMEM;
    reader->gpu = gpu;
    reader->chunk_bytes = opts->chunk_bytes;
    reader->head_bytes = opts->head_bytes;
    int status = start(reader, opts, reason, len);
    if (status != 0) {
        kvt_gds_reader_free(reader);
        return status;
    }
    *out = reader;
    return 0;
}

void kvt_gds_reader_free(struct kvt_gds_reader *reader)
{
    if (reader == NULL)
        return;
    const struct kvt_cuda *cuda = &reader->gpu->cuda;
    if (kvt_gpu_enter_to_release(reader->gpu) == 0) {
        if (reader->registered)
            (void)reader->cufile.table.buffer_deregister((const void *)(uintptr_t)reader->device);
        kvt_cufile_close(&reader->cufile);
        if (reader->device != 0)
            (void)cuda->memory_free(reader->device);
        if (reader->heads != NULL)
            (void)cuda->host_free(reader->heads);
        kvt_gpu_leave(reader->gpu);
    }
    free(reader);
}

int kvt_gds_stream_new(struct kvt_gds_reader *reader, void **stream)
{
    struct kvt_gpu *gpu = reader->gpu;
    *stream = NULL;
    int status = kvt_gpu_enter(gpu);
    if (status != 0)
        return status;
    kvt_cu_result result =
        gpu->cuda.stream_create(stream, KVT_CU_STREAM_NON_BLOCKING, gpu->least_priority);
    if (result != KVT_CU_OK)
        *stream = NULL;
    kvt_gpu_leave(gpu);
    return kvt_gpu_check(gpu, result);
}

void kvt_gds_stream_free(struct kvt_gds_reader *reader, void *stream)
{
    if (stream == NULL || kvt_gpu_enter_to_release(reader->gpu) != 0)
        return;
    (void)reader->gpu->cuda.stream_destroy(stream);
    kvt_gpu_leave(reader->gpu);
}

int kvt_gds_file_open(struct kvt_gds_reader *reader, const char *path, struct kvt_gds_file *file)
{
    struct kvt_cufile own = reader->cufile;
    struct stat there, opened;
    file->handle = NULL;
    file->fd = kvt_fd_high(open(path, O_RDONLY | O_DIRECT | O_CLOEXEC | O_NONBLOCK));
    if (file->fd < 0)
        return -errno;
    /* Not by O_NOFOLLOW: it stays among the descriptor's flags, and cuFile refuses it (5019). */
    int status = lstat(path, &there) != 0 || fstat(file->fd, &opened) != 0 ? -errno : 0;
    if (status == 0 &&
        (!S_ISREG(there.st_mode) || there.st_dev != opened.st_dev || there.st_ino != opened.st_ino))
        status = -ELOOP;
    if (status == 0 && fcntl(file->fd, F_SETFL, O_DIRECT) != 0)
        status = -errno;
    if (status != 0) {
        (void)close(file->fd);
        return status;
    }
    status = kvt_gpu_enter(reader->gpu);
    if (status == 0) {
        status = kvt_cufile_file(&own, file->fd, &file->handle);
        kvt_gpu_leave(reader->gpu);
    }
    if (status != 0) {
        note(reader, &own);
        (void)close(file->fd);
        file->handle = NULL;
    }
    return status;
}

void kvt_gds_file_close(struct kvt_gds_reader *reader, struct kvt_gds_file *file)
{
    struct kvt_cufile own = reader->cufile;
    if (file->handle == NULL)
        return;
    if (kvt_gpu_enter_to_release(reader->gpu) == 0) {
        kvt_cufile_file_end(&own, file->handle);
        kvt_gpu_leave(reader->gpu);
    }
    (void)close(file->fd);
    file->handle = NULL;
}

int kvt_gds_read(struct kvt_gds_reader *reader, void *stream, const struct kvt_gds_file *file,
                 uint64_t offset, uint32_t bytes, uint32_t chunk)
{
    const struct kvt_cuda *cuda = &reader->gpu->cuda;
    struct kvt_cufile own = reader->cufile;
    uint64_t at = (uint64_t)chunk * reader->chunk_bytes;
    int status = kvt_gpu_enter(reader->gpu);
    if (status != 0)
        return status;
    int64_t got = kvt_cufile_read(&own, file->handle, reader->device, at, bytes, offset);
    if (got == bytes) {
        size_t head = KVT_MIN(bytes, reader->head_bytes);
        kvt_cu_result result = cuda->copy_to_host_async(kvt_gds_head(reader, chunk),
                                                        reader->device + at, head, stream);
        kvt_cu_result end = cuda->stream_sync(stream);
        status = kvt_gpu_check(reader->gpu, result != KVT_CU_OK ? result : end);
    } else {
        note(reader, &own);
        status = got < 0 ? (int)got : -ENODATA;
    }
    kvt_gpu_leave(reader->gpu);
    return status;
}
