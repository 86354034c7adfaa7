/* Counting wrapper of an I/O backend: see io_count.h. Passes everything on unchanged; a request is
 * counted when it has been accepted. */
#include "io_count.h"

#include <stdlib.h>
#include <string.h>

struct count_io {
    struct kvt_io io;
    struct kvt_io *inner;
    struct kvt_io_counts counts[4]; /* by enum kvt_io_kind */
};

static struct kvt_io *inner_of(struct kvt_io *io)
{
    return ((struct count_io *)io)->inner;
}

static void count_destroy(struct kvt_io *io)
{
    inner_of(io)->ops->destroy(inner_of(io));
    free(io);
}

static int count_open(struct kvt_io *io, const char *name, int flags)
{
    return inner_of(io)->ops->open(inner_of(io), name, flags);
}

static void count_close(struct kvt_io *io, int file)
{
    inner_of(io)->ops->close(inner_of(io), file);
}

static int64_t count_size(struct kvt_io *io, int file)
{
    return inner_of(io)->ops->size(inner_of(io), file);
}

static int count_truncate(struct kvt_io *io, int file, uint64_t bytes)
{
    return inner_of(io)->ops->truncate(inner_of(io), file, bytes);
}

static int count_allocate(struct kvt_io *io, int file, uint64_t bytes)
{
    return inner_of(io)->ops->allocate(inner_of(io), file, bytes);
}

static int count_punch(struct kvt_io *io, int file, uint64_t offset, uint64_t bytes)
{
    return inner_of(io)->ops->punch(inner_of(io), file, offset, bytes);
}

static int count_unlink(struct kvt_io *io, const char *name)
{
    return inner_of(io)->ops->unlink(inner_of(io), name);
}

static int count_rename(struct kvt_io *io, const char *from, const char *to)
{
    return inner_of(io)->ops->rename(inner_of(io), from, to);
}

static int count_sync_dir(struct kvt_io *io)
{
    return inner_of(io)->ops->sync_dir(inner_of(io));
}

static int count_list(struct kvt_io *io, int (*fn)(void *arg, const char *name), void *arg)
{
    return inner_of(io)->ops->list(inner_of(io), fn, arg);
}

static int count_lock(struct kvt_io *io, int64_t *owner_pid)
{
    return inner_of(io)->ops->lock(inner_of(io), owner_pid);
}

static void count_info(struct kvt_io *io, struct kvt_io_info *info)
{
    inner_of(io)->ops->info(inner_of(io), info);
}

static unsigned size_class(uint64_t bytes)
{
    unsigned size = 0;

    while (size + 1 < KVT_IO_COUNT_SIZES && bytes > kvt_io_count_size(size))
        size++;
    return size;
}

static int count_submit(struct kvt_io *io, struct kvt_io_req *req)
{
    struct count_io *count = (struct count_io *)io;
    uint64_t bytes = 0;
    int kind = req->kind, rc;

    for (uint32_t i = 0; i < req->iov_count && kind != KVT_IO_PUNCH; i++)
        bytes += req->iov[i].iov_len;
    rc = count->inner->ops->submit(count->inner, req);
    if (!rc && kind >= KVT_IO_READ && kind <= KVT_IO_SYNC) {
        count->counts[kind].requests[size_class(bytes)]++;
        count->counts[kind].total++;
        count->counts[kind].bytes += bytes;
    }
    return rc;
}

static unsigned count_reap(struct kvt_io *io, struct kvt_io_req **out, unsigned max)
{
    return inner_of(io)->ops->reap(inner_of(io), out, max);
}

static int count_event_fd(struct kvt_io *io)
{
    return inner_of(io)->ops->event_fd(inner_of(io));
}

static const struct kvt_io_ops count_ops = {
    .name = "count",
    .destroy = count_destroy,
    .open = count_open,
    .close = count_close,
    .size = count_size,
    .truncate = count_truncate,
    .allocate = count_allocate,
    .punch = count_punch,
    .unlink = count_unlink,
    .rename = count_rename,
    .sync_dir = count_sync_dir,
    .list = count_list,
    .lock = count_lock,
    .info = count_info,
    .submit = count_submit,
    .reap = count_reap,
    .event_fd = count_event_fd,
};

struct kvt_io *kvt_io_count_new(struct kvt_io *inner)
{
    struct count_io *count = calloc(1, sizeof(*count));

    if (!count)
        return NULL;
    count->io.ops = &count_ops;
    count->inner = inner;
    return &count->io;
}

const struct kvt_io_counts *kvt_io_count_of(const struct kvt_io *io, int kind)
{
    return &((const struct count_io *)io)->counts[kind];
}

void kvt_io_count_reset(struct kvt_io *io)
{
    struct count_io *count = (struct count_io *)io;

    memset(count->counts, 0, sizeof(count->counts));
}

uint64_t kvt_io_count_size(unsigned size)
{
    return UINT64_C(4096) << size;
}
