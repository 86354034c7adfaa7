/* I/O backend in memory: for tests and the simulator.
 *
 * Requests run inside reap(), in the order of submission: a clone taken between submit() and reap()
 * does not see them. Capacity counts what is written or reserved, as a file system does; a write
 * that does not fit writes nothing. Threads: the owner only. It does not model crashes between
 * write and sync: tests wrap it for that.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "io/mem_file.h"

#define PAGE KVT_IO_ALIGN

struct mem_handle {
    struct kvt_mem_file *file; /* NULL: free */
    bool read_only;
};

struct mem_io {
    struct kvt_io io;
    struct kvt_mem_disk disk;
    struct mem_handle *handles;
    int handle_count;
    struct kvt_io_req *queue, **queue_end;
    unsigned queued;
};

static struct mem_io *mem_of(struct kvt_io *io)
{
    return (struct mem_io *)io;
}

static struct mem_handle *handle_of(struct mem_io *mem, int file)
{
    if (file < 0 || file >= mem->handle_count || !mem->handles[file].file)
        return NULL;
    return &mem->handles[file];
}

/* A free place in the table, which doubles up to its bound. */
static int free_handle(struct mem_io *mem)
{
    int old = mem->handle_count, count = KVT_MIN(old ? old * 2 : 16, KVT_IO_FILES_MAX);
    struct mem_handle *handles;

    for (int i = 0; i < old; i++)
        if (!mem->handles[i].file)
            return i;
    if (old == count)
        return -ENFILE;
    handles = realloc(mem->handles, (size_t)count * sizeof *handles);
    if (!handles)
        return -ENOMEM;
    memset(handles + old, 0, (size_t)(count - old) * sizeof *handles);
    mem->handles = handles;
    mem->handle_count = count;
    return old;
}

static int mem_open(struct kvt_io *io, const char *name, int flags)
{
    struct mem_io *mem = mem_of(io);
    struct kvt_mem_file *file;
    int handle;

    if (kvt_io_name_check(name))
        return -EINVAL;
    handle = free_handle(mem);
    if (handle < 0)
        return handle;
    file = kvt_mem_find(&mem->disk, name);
    if (file && (flags & KVT_IO_OPEN_EXCLUSIVE))
        return -EEXIST;
    if (!file && !(flags & KVT_IO_OPEN_CREATE))
        return -ENOENT;
    if (!file)
        file = kvt_mem_create(&mem->disk, name);
    if (!file)
        return -ENOMEM;
    file->handles++;
    mem->handles[handle] =
        (struct mem_handle){.file = file, .read_only = flags & KVT_IO_OPEN_READ_ONLY};
    return handle;
}

static void mem_close(struct kvt_io *io, int number)
{
    struct mem_handle *handle = handle_of(mem_of(io), number);

    if (!handle)
        return;
    kvt_mem_put(&mem_of(io)->disk, handle->file);
    handle->file = NULL;
}

static int64_t mem_size(struct kvt_io *io, int number)
{
    struct mem_handle *handle = handle_of(mem_of(io), number);

    return handle ? (int64_t)handle->file->size_bytes : -EBADF;
}

/* The file of a handle that may be written, or NULL. */
static struct kvt_mem_file *writable(struct kvt_io *io, int number)
{
    struct mem_handle *handle = handle_of(mem_of(io), number);

    return handle && !handle->read_only ? handle->file : NULL;
}

static int mem_truncate(struct kvt_io *io, int number, uint64_t bytes)
{
    struct kvt_mem_file *file = writable(io, number);

    if (!file)
        return -EBADF;
    if (bytes > INT64_MAX)
        return -EINVAL;
    kvt_mem_truncate(&mem_of(io)->disk, file, bytes);
    return 0;
}

static int mem_allocate(struct kvt_io *io, int number, uint64_t bytes)
{
    struct kvt_mem_file *file = writable(io, number);
    int rc;

    if (!file)
        return -EBADF;
    if (!bytes || bytes > INT64_MAX)
        return -EINVAL;
    rc = kvt_mem_reserve(&mem_of(io)->disk, file, 0, kvt_round_up(bytes, PAGE) / PAGE);
    if (!rc)
        file->size_bytes = KVT_MAX(file->size_bytes, bytes);
    return rc;
}

static int mem_punch(struct kvt_io *io, int number, uint64_t offset, uint64_t bytes)
{
    struct kvt_mem_file *file = writable(io, number);
    uint64_t end;

    if (!file)
        return -EBADF;
    if (offset % PAGE || bytes % PAGE || !bytes || !kvt_add_ok(offset, bytes, &end) ||
        end > INT64_MAX)
        return -EINVAL;
    kvt_mem_drop(&mem_of(io)->disk, file, offset / PAGE, end / PAGE);
    return 0;
}

static int mem_unlink(struct kvt_io *io, const char *name)
{
    struct kvt_mem_file *file;

    if (kvt_io_name_check(name))
        return -EINVAL;
    file = kvt_mem_find(&mem_of(io)->disk, name);
    if (!file)
        return -ENOENT;
    kvt_mem_forget(&mem_of(io)->disk, file);
    return 0;
}

static int mem_rename(struct kvt_io *io, const char *from, const char *to)
{
    struct kvt_mem_file *file, *old;

    if (kvt_io_name_check(from) || kvt_io_name_check(to))
        return -EINVAL;
    file = kvt_mem_find(&mem_of(io)->disk, from);
    if (!file)
        return -ENOENT;
    old = kvt_mem_find(&mem_of(io)->disk, to);
    if (old == file)
        return 0;
    if (old)
        kvt_mem_forget(&mem_of(io)->disk, old);
    memcpy(file->name, to, strlen(to) + 1);
    return 0;
}

static int mem_sync_dir(struct kvt_io *io)
{
    (void)io;
    return 0;
}

/* Names are copied first: fn may open, rename and unlink. */
static int mem_list(struct kvt_io *io, int (*fn)(void *arg, const char *name), void *arg)
{
    struct mem_io *mem = mem_of(io);
    char(*names)[KVT_IO_NAME_MAX];
    size_t count = 0, i = 0;
    int rc = 0;

    for (struct kvt_mem_file *file = mem->disk.files; file; file = file->next)
        count += file->name[0] != 0;
    if (!count)
        return 0;
    names = malloc(count * sizeof *names);
    if (!names)
        return -ENOMEM;
    for (struct kvt_mem_file *file = mem->disk.files; file; file = file->next)
        if (file->name[0])
            memcpy(names[i++], file->name, sizeof *names);
    for (i = 0; i < count && !rc; i++)
        rc = fn(arg, names[i]);
    free(names);
    return rc;
}

static int mem_lock(struct kvt_io *io, int64_t *owner_pid)
{
    (void)io; /* nobody else can reach the files of this instance */
    if (owner_pid)
        *owner_pid = 0;
    return 0;
}

static void mem_info(struct kvt_io *io, struct kvt_io_info *info)
{
    const struct kvt_mem_disk *disk = &mem_of(io)->disk;

    *info = (struct kvt_io_info){
        .backend = "mem",
        .why = "files in memory, for tests",
        .direct = 0,
        .free_bytes =
            (disk->capacity_pages - KVT_MIN(disk->used_pages, disk->capacity_pages)) * PAGE,
        .total_bytes = disk->capacity_pages * PAGE,
    };
}

static int64_t run_req(struct mem_io *mem, const struct kvt_io_req *req)
{
    struct mem_handle *handle = handle_of(mem, req->file);
    int64_t bytes = kvt_io_req_bytes(req);

    if (bytes < 0)
        return bytes;
    if (!handle)
        return -EBADF;
    if (req->kind == KVT_IO_SYNC)
        return 0;
    if (req->kind == KVT_IO_READ)
        return kvt_mem_read(handle->file, req);
    if (handle->read_only)
        return -EBADF;
    if (req->kind == KVT_IO_PUNCH) {
        kvt_mem_drop(&mem->disk, handle->file, req->offset / PAGE,
                     (req->offset + (uint64_t)bytes) / PAGE);
        return 0;
    }
    return kvt_mem_write(&mem->disk, handle->file, req, (uint64_t)bytes);
}

static int mem_submit(struct kvt_io *io, struct kvt_io_req *req)
{
    struct mem_io *mem = mem_of(io);

    if (mem->queued >= KVT_IO_FLIGHT_MAX)
        return -EAGAIN;
    req->next = NULL;
    *mem->queue_end = req;
    mem->queue_end = &req->next;
    mem->queued++;
    return 0;
}

static unsigned mem_reap(struct kvt_io *io, struct kvt_io_req **out, unsigned max)
{
    struct mem_io *mem = mem_of(io);
    unsigned count = 0;

    while (count < max && mem->queue) {
        struct kvt_io_req *req = mem->queue;

        mem->queue = req->next;
        if (!mem->queue)
            mem->queue_end = &mem->queue;
        mem->queued--;
        req->elapsed_ns = 0;
        req->result = run_req(mem, req);
        out[count++] = req;
    }
    return count;
}

static int mem_event_fd(struct kvt_io *io)
{
    (void)io;
    return -1;
}

static void mem_destroy(struct kvt_io *io)
{
    struct mem_io *mem = mem_of(io);

    kvt_mem_free_all(&mem->disk);
    free(mem->handles);
    free(mem);
}

static const struct kvt_io_ops mem_ops = {
    .name = "mem",
    .destroy = mem_destroy,
    .open = mem_open,
    .close = mem_close,
    .size = mem_size,
    .truncate = mem_truncate,
    .allocate = mem_allocate,
    .punch = mem_punch,
    .unlink = mem_unlink,
    .rename = mem_rename,
    .sync_dir = mem_sync_dir,
    .list = mem_list,
    .lock = mem_lock,
    .info = mem_info,
    .submit = mem_submit,
    .reap = mem_reap,
    .event_fd = mem_event_fd,
};

int kvt_io_mem_new(uint64_t capacity_bytes, struct kvt_io **out)
{
    struct mem_io *mem = calloc(1, sizeof *mem);

    if (!mem)
        return -ENOMEM;
    mem->io.ops = &mem_ops;
    mem->disk.capacity_pages = capacity_bytes / PAGE;
    mem->queue_end = &mem->queue;
    *out = &mem->io;
    return 0;
}

int kvt_io_mem_clone(const struct kvt_io *from, struct kvt_io **out)
{
    const struct mem_io *old = (const struct mem_io *)from;
    struct kvt_io *io;
    int rc;

    if (from->ops != &mem_ops)
        return -EINVAL;
    rc = kvt_io_mem_new(old->disk.capacity_pages * PAGE, &io);
    if (rc)
        return rc;
    for (const struct kvt_mem_file *file = old->disk.files; file && !rc; file = file->next)
        if (file->name[0])
            rc = kvt_mem_copy(&mem_of(io)->disk, file);
    if (rc)
        mem_destroy(io);
    else
        *out = io;
    return rc;
}
