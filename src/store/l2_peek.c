/* A backend over a part of one segment in memory, for a scan that may not block: what is not there
 * is -EAGAIN, and remembered as wanted (the first of what is asked for); whoever runs the scan
 * fetches it. Reads only. Threads: the owner's. Allocates nothing. */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "store/l2_internal.h"

static int peek_submit(struct kvt_io *io, struct kvt_io_req *req)
{
    struct kvt_l2_peek *peek = (struct kvt_l2_peek *)io;
    uint64_t page = req->offset / KVT_PAGE_BYTES, pages = req->iov[0].iov_len / KVT_PAGE_BYTES;
    uint64_t from, bytes;

    peek->done = req;
    if (page < peek->page || page + pages > (uint64_t)peek->page + peek->pages) {
        if (!peek->wanting) {
            peek->want_page = (uint32_t)page;
            peek->want_pages = (uint32_t)pages;
        }
        peek->wanting = true;
        req->result = -EAGAIN;
        return 0;
    }
    if (peek->status) {
        req->result = peek->status;
        return 0;
    }
    from = (page - peek->page) * KVT_PAGE_BYTES;
    bytes = from < peek->got ? KVT_MIN(pages * KVT_PAGE_BYTES, peek->got - from) : 0;
    if (bytes)
        memcpy(req->iov[0].iov_base, peek->bytes + from, bytes);
    req->result = (int64_t)bytes;
    return 0;
}

static unsigned peek_reap(struct kvt_io *io, struct kvt_io_req **out, unsigned max)
{
    struct kvt_l2_peek *peek = (struct kvt_l2_peek *)io;

    if (!max || !peek->done)
        return 0;
    out[0] = peek->done;
    peek->done = NULL;
    return 1;
}

static int peek_event_fd(struct kvt_io *io)
{
    (void)io;
    return -1;
}

static const struct kvt_io_ops peek_ops = {
    .name = "peek", .submit = peek_submit, .reap = peek_reap, .event_fd = peek_event_fd};

void kvt_l2_peek_forget(struct kvt_l2_peek *peek)
{
    peek->pages = 0;
    peek->status = 0;
    peek->wanting = false;
}

void kvt_l2_peek_init(struct kvt_l2_peek *peek)
{
    memset(peek, 0, sizeof *peek);
    peek->io.ops = &peek_ops;
}
