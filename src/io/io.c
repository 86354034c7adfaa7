/* What all backends share: argument checks, and the synchronous helpers over submit() and reap().
 * Threads: the owner of the instance. Nothing is allocated. */
#include "io/io.h"

#include <errno.h>
#include <poll.h>
#include <string.h>

#include "base/checked.h"
#include "io/io_common.h"

int kvt_io_name_check(const char *name)
{
    size_t len = name ? strnlen(name, KVT_IO_NAME_MAX) : 0;

    if (!len || len >= KVT_IO_NAME_MAX || strchr(name, '/') || !strcmp(name, ".") ||
        !strcmp(name, ".."))
        return -EINVAL;
    return 0;
}

int64_t kvt_io_req_bytes(const struct kvt_io_req *req)
{
    uint64_t bytes = 0, end;

    if (req->kind == KVT_IO_SYNC)
        return 0;
    if (req->kind == KVT_IO_PUNCH) {
        bytes = req->iov_count == 1 ? req->iov[0].iov_len : 0;
        if (!bytes || bytes % KVT_IO_ALIGN || req->offset % KVT_IO_ALIGN ||
            !kvt_add_ok(req->offset, bytes, &end) || end > INT64_MAX)
            return -EINVAL;
        return (int64_t)bytes;
    }
    if ((req->kind != KVT_IO_READ && req->kind != KVT_IO_WRITE) || !req->iov_count ||
        req->iov_count > KVT_IO_IOV_MAX || req->offset % KVT_IO_ALIGN)
        return -EINVAL;
    for (uint32_t i = 0; i < req->iov_count; i++) {
        const struct iovec *piece = &req->iov[i];

        if (!piece->iov_base || !piece->iov_len || (uintptr_t)piece->iov_base % KVT_IO_ALIGN ||
            piece->iov_len % KVT_IO_ALIGN || !kvt_add_ok(bytes, (uint64_t)piece->iov_len, &bytes))
            return -EINVAL;
    }
    if (!kvt_add_ok(req->offset, bytes, &end) || end > INT64_MAX)
        return -EINVAL;
    return (int64_t)bytes;
}

unsigned kvt_io_iov_from(const struct kvt_io_req *req, uint64_t skip,
                         struct iovec out[KVT_IO_IOV_MAX])
{
    unsigned count = 0;

    for (uint32_t i = 0; i < req->iov_count; i++) {
        const struct iovec *piece = &req->iov[i];

        if (skip >= piece->iov_len) {
            skip -= piece->iov_len;
            continue;
        }
        out[count++] = (struct iovec){(uint8_t *)piece->iov_base + skip, piece->iov_len - skip};
        skip = 0;
    }
    return count;
}

/* Reap until `req` is back. Others should not be in flight; if one is, its done() gets it, as with
 * any reaper. */
static void wait_for(struct kvt_io *io, const struct kvt_io_req *req)
{
    for (;;) {
        struct kvt_io_req *got[1];

        if (io->ops->reap(io, got, 1)) {
            if (got[0] == req)
                return;
            if (got[0]->done)
                got[0]->done(got[0]);
            continue;
        }
        int fd = io->ops->event_fd(io);

        if (fd >= 0) {
            struct pollfd wait = {.fd = fd, .events = POLLIN};
            (void)poll(&wait, 1, -1); /* EINTR: reap() decides */
        }
    }
}

static int64_t do_now(struct kvt_io *io, struct kvt_io_req *req)
{
    int rc = io->ops->submit(io, req);

    if (rc)
        return rc;
    wait_for(io, req);
    return req->result;
}

int64_t kvt_io_read_now(struct kvt_io *io, int file, uint64_t offset, void *buf, size_t len)
{
    struct kvt_io_req req = {.kind = KVT_IO_READ, .file = file, .offset = offset, .iov_count = 1};

    req.iov[0] = (struct iovec){buf, len};
    return do_now(io, &req);
}

int64_t kvt_io_write_now(struct kvt_io *io, int file, uint64_t offset, const void *buf, size_t len)
{
    struct kvt_io_req req = {.kind = KVT_IO_WRITE, .file = file, .offset = offset, .iov_count = 1};

    req.iov[0] = (struct iovec){(void *)(uintptr_t)buf, len};
    return do_now(io, &req);
}

int kvt_io_sync_now(struct kvt_io *io, int file)
{
    struct kvt_io_req req = {.kind = KVT_IO_SYNC, .file = file};

    return (int)do_now(io, &req);
}
