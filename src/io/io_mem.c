/* I/O backend in memory: for tests and the simulator.
 *
 * Files are tables of 4 KiB pages; a page that was never written, or was punched, is not there and
 * reads as zeros. Capacity counts the pages that are there, and those that allocate() promised.
 * Requests run inside reap(), in the order of submission: a clone taken between submit() and reap()
 * does not see them. An unlinked file lives until its last close, as on a real file system.
 * Threads: the owner only. It does not model crashes between write and sync: fault does.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "io/io_common.h"
#include "kvtier/error.h"

#define PAGE KVT_IO_ALIGN

struct mem_file {
    char name[KVT_IO_NAME_MAX]; /* "" when unlinked */
    uint64_t size_bytes;
    uint8_t **pages;
    size_t page_count;       /* entries of pages */
    uint64_t pages_present;  /* not NULL */
    uint64_t pages_promised; /* by allocate(): pages [0, promised) are charged, present or not */
    unsigned handles;
    struct mem_file *next;
};

struct mem_handle {
    struct mem_file *file; /* NULL: free */
    bool read_only;
};

struct mem_io {
    struct kvt_io io;
    uint64_t capacity_bytes;
    struct mem_file *files;
    struct mem_handle *handles;
    int handle_count;
    struct kvt_io_req *queue, **queue_end;
    unsigned queued;
};

static struct mem_io *mem_of(struct kvt_io *io)
{
    return (struct mem_io *)io;
}

static uint64_t pages_of(uint64_t bytes)
{
    return bytes / PAGE + (bytes % PAGE != 0);
}

/* Pages that a file is charged for. */
static uint64_t pages_charged(const struct mem_file *file)
{
    uint64_t beyond = 0;

    if (file->pages_promised >= file->page_count)
        return file->pages_promised;
    for (size_t i = (size_t)file->pages_promised; i < file->page_count; i++)
        beyond += file->pages[i] != NULL;
    return file->pages_promised + beyond;
}

static uint64_t used_bytes(const struct mem_io *mem)
{
    uint64_t pages = 0;

    for (const struct mem_file *file = mem->files; file; file = file->next)
        pages += file->pages_promised ? pages_charged(file) : file->pages_present;
    return pages * PAGE;
}

static bool has_room(const struct mem_io *mem, uint64_t more_pages)
{
    return more_pages <=
           (mem->capacity_bytes - KVT_MIN(used_bytes(mem), mem->capacity_bytes)) / PAGE;
}

static struct mem_file *find_file(struct mem_io *mem, const char *name)
{
    for (struct mem_file *file = mem->files; file; file = file->next)
        if (!strcmp(file->name, name))
            return file;
    return NULL;
}

static void drop_pages(struct mem_file *file, uint64_t from, uint64_t to)
{
    for (uint64_t i = from; i < to && i < file->page_count; i++) {
        file->pages_present -= file->pages[i] != NULL;
        free(file->pages[i]);
        file->pages[i] = NULL;
    }
}

static void free_file(struct mem_io *mem, struct mem_file *file)
{
    struct mem_file **link = &mem->files;

    while (*link != file)
        link = &(*link)->next;
    *link = file->next;
    drop_pages(file, 0, file->page_count);
    free(file->pages);
    free(file);
}

static int grow_table(struct mem_file *file, uint64_t page_count)
{
    uint8_t **pages;
    size_t want;

    if (page_count <= file->page_count)
        return 0;
    if (page_count > SIZE_MAX / sizeof *pages / 2)
        return -EFBIG;
    want = KVT_MAX((size_t)page_count, file->page_count * 2);
    pages = realloc(file->pages, want * sizeof *pages);
    if (!pages)
        return -ENOMEM;
    memset(pages + file->page_count, 0, (want - file->page_count) * sizeof *pages);
    file->pages = pages;
    file->page_count = want;
    return 0;
}

static struct mem_handle *handle_of(struct mem_io *mem, int file)
{
    if (file < 0 || file >= mem->handle_count || !mem->handles[file].file)
        return NULL;
    return &mem->handles[file];
}

static int free_handle(struct mem_io *mem)
{
    struct mem_handle *handles;
    int count;

    for (int i = 0; i < mem->handle_count; i++)
        if (!mem->handles[i].file)
            return i;
    if (mem->handle_count >= KVT_IO_FILES_MAX)
        return -ENFILE;
    count = mem->handle_count ? mem->handle_count * 2 : 16;
    handles = realloc(mem->handles, (size_t)count * sizeof *handles);
    if (!handles)
        return -ENOMEM;
    memset(handles + mem->handle_count, 0, (size_t)(count - mem->handle_count) * sizeof *handles);
    mem->handles = handles;
    mem->handle_count = count;
    return count == 16 ? 0 : count / 2;
}

static struct mem_file *new_file(struct mem_io *mem, const char *name)
{
    struct mem_file *file = calloc(1, sizeof *file);

    if (file) {
        memcpy(file->name, name, strlen(name) + 1);
        file->next = mem->files;
        mem->files = file;
    }
    return file;
}

static int mem_open(struct kvt_io *io, const char *name, int flags)
{
    struct mem_io *mem = mem_of(io);
    struct mem_file *file;
    int handle;

    if (kvt_io_name_check(name))
        return -EINVAL;
    handle = free_handle(mem);
    if (handle < 0)
        return handle;
    file = find_file(mem, name);
    if (file && (flags & KVT_IO_OPEN_EXCLUSIVE))
        return -EEXIST;
    if (!file && !(flags & KVT_IO_OPEN_CREATE))
        return -ENOENT;
    if (!file)
        file = new_file(mem, name);
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
    if (!--handle->file->handles && !handle->file->name[0])
        free_file(mem_of(io), handle->file);
    handle->file = NULL;
}

static int64_t mem_size(struct kvt_io *io, int number)
{
    struct mem_handle *handle = handle_of(mem_of(io), number);

    return handle ? (int64_t)handle->file->size_bytes : -EBADF;
}

/* The file of a handle that may be written, or NULL. */
static struct mem_file *writable(struct kvt_io *io, int number)
{
    struct mem_handle *handle = handle_of(mem_of(io), number);

    return handle && !handle->read_only ? handle->file : NULL;
}

static int mem_truncate(struct kvt_io *io, int number, uint64_t bytes)
{
    struct mem_file *file = writable(io, number);
    uint64_t pages = pages_of(bytes);

    if (!file)
        return -EBADF;
    if (bytes > INT64_MAX)
        return -EINVAL;
    if (bytes < file->size_bytes) {
        drop_pages(file, pages, file->page_count);
        if (bytes % PAGE && pages <= file->page_count && file->pages[pages - 1])
            memset(file->pages[pages - 1] + bytes % PAGE, 0, PAGE - bytes % PAGE);
        file->pages_promised = KVT_MIN(file->pages_promised, pages);
    }
    file->size_bytes = bytes;
    return 0;
}

static int mem_allocate(struct kvt_io *io, int number, uint64_t bytes)
{
    struct mem_file *file = writable(io, number);
    uint64_t before, promised, pages = pages_of(bytes);

    if (!file)
        return -EBADF;
    if (!bytes || bytes > INT64_MAX)
        return -EINVAL;
    before = pages_charged(file);
    promised = file->pages_promised;
    file->pages_promised = KVT_MAX(promised, pages);
    if (used_bytes(mem_of(io)) > mem_of(io)->capacity_bytes && pages_charged(file) > before) {
        file->pages_promised = promised;
        return -ENOSPC;
    }
    file->size_bytes = KVT_MAX(file->size_bytes, bytes);
    return 0;
}

static int mem_punch(struct kvt_io *io, int number, uint64_t offset, uint64_t bytes)
{
    struct mem_file *file = writable(io, number);
    uint64_t end;

    if (!file)
        return -EBADF;
    if (offset % PAGE || bytes % PAGE || !bytes || !kvt_add_ok(offset, bytes, &end))
        return -EINVAL;
    drop_pages(file, offset / PAGE, end / PAGE);
    if (offset / PAGE < file->pages_promised)
        file->pages_promised = offset / PAGE; /* a punched reservation is given back */
    return 0;
}

static void forget_name(struct mem_io *mem, struct mem_file *file)
{
    file->name[0] = 0;
    if (!file->handles)
        free_file(mem, file);
}

static int mem_unlink(struct kvt_io *io, const char *name)
{
    struct mem_file *file;

    if (kvt_io_name_check(name))
        return -EINVAL;
    file = find_file(mem_of(io), name);
    if (!file)
        return -ENOENT;
    forget_name(mem_of(io), file);
    return 0;
}

static int mem_rename(struct kvt_io *io, const char *from, const char *to)
{
    struct mem_file *file, *old;

    if (kvt_io_name_check(from) || kvt_io_name_check(to))
        return -EINVAL;
    file = find_file(mem_of(io), from);
    if (!file)
        return -ENOENT;
    old = find_file(mem_of(io), to);
    if (old && old != file)
        forget_name(mem_of(io), old);
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

    for (struct mem_file *file = mem->files; file; file = file->next)
        count += file->name[0] != 0;
    if (!count)
        return 0;
    names = malloc(count * sizeof *names);
    if (!names)
        return -ENOMEM;
    for (struct mem_file *file = mem->files; file; file = file->next)
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
    const struct mem_io *mem = mem_of(io);
    uint64_t used = used_bytes(mem);

    *info = (struct kvt_io_info){
        .backend = "mem",
        .why = "files in memory, for tests",
        .direct = 0,
        .free_bytes = mem->capacity_bytes - KVT_MIN(used, mem->capacity_bytes),
        .total_bytes = mem->capacity_bytes,
    };
}

static int64_t read_pages(const struct mem_file *file, const struct kvt_io_req *req)
{
    uint64_t offset = req->offset, moved = 0;

    for (uint32_t i = 0; i < req->iov_count; i++) {
        uint8_t *dst = req->iov[i].iov_base;

        for (size_t at = 0; at < req->iov[i].iov_len; at += PAGE, offset += PAGE) {
            uint64_t left, part, page = offset / PAGE;

            if (offset >= file->size_bytes)
                return (int64_t)moved;
            left = file->size_bytes - offset;
            part = KVT_MIN(left, (uint64_t)PAGE);
            if (page < file->page_count && file->pages[page])
                memcpy(dst + at, file->pages[page], part);
            else
                memset(dst + at, 0, part);
            moved += part;
        }
    }
    return (int64_t)moved;
}

/* Make pages [from, to) present, zeroed; all or nothing. */
static int make_pages(struct mem_io *mem, struct mem_file *file, uint64_t from, uint64_t to)
{
    uint64_t more = 0;
    int rc = grow_table(file, to);

    if (rc)
        return rc;
    for (uint64_t i = from; i < to; i++)
        more += !file->pages[i] && i >= file->pages_promised;
    if (more && !has_room(mem, more))
        return -ENOSPC;
    for (uint64_t i = from; i < to; i++) {
        if (file->pages[i])
            continue;
        file->pages[i] = calloc(1, PAGE);
        if (!file->pages[i])
            return -ENOMEM;
        file->pages_present++;
    }
    return 0;
}

static int64_t write_pages(struct mem_io *mem, struct mem_file *file, const struct kvt_io_req *req,
                           uint64_t bytes)
{
    uint64_t page = req->offset / PAGE;
    int rc = make_pages(mem, file, page, page + bytes / PAGE);

    if (rc)
        return rc;
    for (uint32_t i = 0; i < req->iov_count; i++)
        for (size_t at = 0; at < req->iov[i].iov_len; at += PAGE)
            memcpy(file->pages[page++], (uint8_t *)req->iov[i].iov_base + at, PAGE);
    file->size_bytes = KVT_MAX(file->size_bytes, req->offset + bytes);
    return (int64_t)bytes;
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
        return read_pages(handle->file, req);
    return handle->read_only ? -EBADF : write_pages(mem, handle->file, req, (uint64_t)bytes);
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

    while (mem->files)
        free_file(mem, mem->files);
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
    mem->capacity_bytes = capacity_bytes;
    mem->queue_end = &mem->queue;
    *out = &mem->io;
    return 0;
}

static int copy_file(struct mem_io *mem, const struct mem_file *from)
{
    struct mem_file *file = new_file(mem, from->name);
    int rc;

    if (!file)
        return -ENOMEM;
    rc = grow_table(file, from->page_count);
    for (size_t i = 0; i < from->page_count && !rc; i++) {
        if (!from->pages[i])
            continue;
        file->pages[i] = malloc(PAGE);
        if (!file->pages[i])
            return -ENOMEM;
        memcpy(file->pages[i], from->pages[i], PAGE);
        file->pages_present++;
    }
    file->size_bytes = from->size_bytes;
    file->pages_promised = from->pages_promised;
    return rc;
}

int kvt_io_mem_clone(const struct kvt_io *from, struct kvt_io **out)
{
    const struct mem_io *old = (const struct mem_io *)from;
    struct kvt_io *io;
    int rc;

    if (from->ops != &mem_ops)
        return -EINVAL;
    rc = kvt_io_mem_new(old->capacity_bytes, &io);
    if (rc)
        return rc;
    for (const struct mem_file *file = old->files; file && !rc; file = file->next)
        if (file->name[0])
            rc = copy_file(mem_of(io), file);
    if (rc)
        mem_destroy(io);
    else
        *out = io;
    return rc;
}
