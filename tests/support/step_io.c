/* See step_io.h. Failures of the machine itself (no room below TMPDIR) end the test. */
#include "support/step_io.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "support/store_help.h"

#include "support/l2_help.h"

#define PIECE (1u << 20)

struct step_io {
    struct kvt_io io;
    struct kvt_io *inner;
    struct kvt_io_req *first, **end; /* done, not reaped */
    char path[256];
};

static struct step_io *step_of(struct kvt_io *io)
{
    return (struct step_io *)io;
}

static struct kvt_io *inner_of(struct kvt_io *io)
{
    return step_of(io)->inner;
}

static void step_destroy(struct kvt_io *io)
{
    struct step_io *step = step_of(io);

    step->inner->ops->destroy(step->inner);
    l2_dir_remove(step->path);
    free(step);
}

static int step_open(struct kvt_io *io, const char *name, int flags)
{
    return inner_of(io)->ops->open(inner_of(io), name, flags);
}

static void step_close(struct kvt_io *io, int file)
{
    inner_of(io)->ops->close(inner_of(io), file);
}

static int64_t step_size(struct kvt_io *io, int file)
{
    return inner_of(io)->ops->size(inner_of(io), file);
}

static int step_truncate(struct kvt_io *io, int file, uint64_t bytes)
{
    return inner_of(io)->ops->truncate(inner_of(io), file, bytes);
}

static int step_allocate(struct kvt_io *io, int file, uint64_t bytes)
{
    return inner_of(io)->ops->allocate(inner_of(io), file, bytes);
}

static int step_punch(struct kvt_io *io, int file, uint64_t offset, uint64_t bytes)
{
    return inner_of(io)->ops->punch(inner_of(io), file, offset, bytes);
}

static int step_unlink(struct kvt_io *io, const char *name)
{
    return inner_of(io)->ops->unlink(inner_of(io), name);
}

static int step_rename(struct kvt_io *io, const char *from, const char *to)
{
    return inner_of(io)->ops->rename(inner_of(io), from, to);
}

static int step_sync_dir(struct kvt_io *io)
{
    return inner_of(io)->ops->sync_dir(inner_of(io));
}

static int step_list(struct kvt_io *io, int (*fn)(void *arg, const char *name), void *arg)
{
    return inner_of(io)->ops->list(inner_of(io), fn, arg);
}

static int step_lock(struct kvt_io *io, int64_t *owner_pid)
{
    return inner_of(io)->ops->lock(inner_of(io), owner_pid);
}

static void step_info(struct kvt_io *io, struct kvt_io_info *info)
{
    inner_of(io)->ops->info(inner_of(io), info);
}

static int step_submit(struct kvt_io *io, struct kvt_io_req *req)
{
    struct step_io *step = step_of(io);
    const struct kvt_io_ops *ops = step->inner->ops;
    struct pollfd wait = {.fd = ops->event_fd(step->inner), .events = POLLIN};
    struct kvt_io_req *got[1];
    int rc = ops->submit(step->inner, req);

    if (rc)
        return rc;
    while (!ops->reap(step->inner, got, 1))
        (void)poll(&wait, 1, 1000);
    assert_ptr_equal(got[0], req);
    req->next = NULL;
    *step->end = req;
    step->end = &req->next;
    return 0;
}

static unsigned step_reap(struct kvt_io *io, struct kvt_io_req **out, unsigned max)
{
    struct step_io *step = step_of(io);
    unsigned count = 0;

    while (count < max && step->first) {
        out[count++] = step->first;
        step->first = step->first->next;
    }
    if (!step->first)
        step->end = &step->first;
    return count;
}

static int step_event_fd(struct kvt_io *io)
{
    (void)io;
    return -1;
}

static const struct kvt_io_ops step_ops = {
    .name = "step",
    .destroy = step_destroy,
    .open = step_open,
    .close = step_close,
    .size = step_size,
    .truncate = step_truncate,
    .allocate = step_allocate,
    .punch = step_punch,
    .unlink = step_unlink,
    .rename = step_rename,
    .sync_dir = step_sync_dir,
    .list = step_list,
    .lock = step_lock,
    .info = step_info,
    .submit = step_submit,
    .reap = step_reap,
    .event_fd = step_event_fd,
};

struct kvt_io *step_io_new(int backend, int *rc)
{
    struct step_io *step = calloc(1, sizeof *step);
    struct kvt_io_posix_params params = {.threads = 1, .direct = 0, .backend = backend};

    assert_non_null(step);
    params.path = step->path;
    step->io.ops = &step_ops;
    step->end = &step->first;
    l2_dir_make(step->path);
    *rc = kvt_io_files_new(&params, &step->inner);
    if (!*rc)
        return &step->io;
    l2_dir_remove(step->path);
    free(step);
    return NULL;
}

struct copy {
    struct kvt_io *from, *to;
    uint8_t *buffer;
};

static bool all_zero(const uint8_t *bytes, size_t count)
{
    return !bytes[0] && !memcmp(bytes, bytes + 1, count - 1);
}

static int copy_file(void *arg, const char *name)
{
    const struct copy *copy = arg;
    struct kvt_io *from = copy->from, *to = copy->to;
    int in = from->ops->open(from, name, KVT_IO_OPEN_READ_ONLY);
    int out = to->ops->open(to, name, KVT_IO_OPEN_CREATE);
    int64_t size;

    assert_true(in >= 0 && out >= 0);
    size = from->ops->size(from, in);
    for (int64_t at = 0; at < size; at += PIECE) {
        int64_t got = kvt_io_read_now(from, in, (uint64_t)at, copy->buffer, PIECE);
        size_t whole;

        assert_true(got > 0);
        whole = kvt_round_up((uint64_t)got, KVT_IO_ALIGN);
        memset(copy->buffer + got, 0, whole - (size_t)got);
        if (!all_zero(copy->buffer, whole))
            assert_int_equal(kvt_io_write_now(to, out, (uint64_t)at, copy->buffer, whole), whole);
    }
    assert_int_equal(to->ops->truncate(to, out, (uint64_t)size), 0);
    from->ops->close(from, in);
    to->ops->close(to, out);
    return 0;
}

struct kvt_io *step_io_copy(const struct kvt_io *from, int backend)
{
    int rc;
    struct copy copy = {(struct kvt_io *)(uintptr_t)from, step_io_new(backend, &rc),
                        aligned_alloc(KVT_IO_ALIGN, PIECE)};

    assert_true(copy.to && copy.buffer);
    assert_int_equal(copy.from->ops->list(copy.from, copy_file, &copy), 0);
    free(copy.buffer);
    return copy.to;
}
