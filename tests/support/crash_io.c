/* See crash_io.h. Files are numbered (inodes): handles and names map to a number; the durable bytes
 * of a number are kept in a plain array, changes since its last sync in a list. */
#include "support/crash_io.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define INODES 256u
#define HANDLES 128u
#define SECTOR 512u

struct change {
    struct change *next;
    uint64_t offset, bytes;
    uint8_t *data; /* NULL: size change to `bytes` (hole: zeros of `bytes`) */
    bool resize;
};

struct inode {
    uint8_t *durable;
    uint64_t durable_bytes;
    struct change *changes, **end;
};

struct name_op {
    char name[KVT_IO_NAME_MAX];
    int inode; /* -1: the name is gone */
};

struct crash_io {
    struct kvt_io io;
    struct kvt_io *inner;
    uint64_t capacity;
    struct inode inodes[INODES];
    int inode_count;
    int handles[HANDLES];                          /* inode by handle of inner */
    struct name_op names[INODES], durable[INODES]; /* live and durable directory */
    int name_count, durable_count;
    struct name_op *log; /* changes of names since the last sync of the directory */
    int log_count, log_capacity;
    void (*hook)(void *ctx);
    void *hook_ctx;
    bool in_hook;
};

static struct crash_io *crash_of(struct kvt_io *io)
{
    return (struct crash_io *)io;
}

static void changed(struct crash_io *crash)
{
    if (!crash->hook || crash->in_hook)
        return;
    crash->in_hook = true;
    crash->hook(crash->hook_ctx);
    crash->in_hook = false;
}

static void set_name(struct name_op *names, int *count, const char *name, int inode)
{
    int i = 0;

    while (i < *count && strcmp(names[i].name, name))
        i++;
    if (inode < 0) {
        if (i < *count)
            names[i] = names[--*count];
        return;
    }
    if (i == *count)
        memcpy(names[(*count)++].name, name, strlen(name) + 1);
    names[i].inode = inode;
}

static int find_name(const struct crash_io *crash, const char *name)
{
    for (int i = 0; i < crash->name_count; i++)
        if (!strcmp(crash->names[i].name, name))
            return crash->names[i].inode;
    return -1;
}

static void log_name(struct crash_io *crash, const char *name, int inode)
{
    set_name(crash->names, &crash->name_count, name, inode);
    if (crash->log_count == crash->log_capacity) {
        crash->log_capacity = crash->log_capacity * 2 + 16;
        crash->log = realloc(crash->log, (size_t)crash->log_capacity * sizeof *crash->log);
    }
    memcpy(crash->log[crash->log_count].name, name, strlen(name) + 1);
    crash->log[crash->log_count++].inode = inode;
}

static struct change *add_change(struct crash_io *crash, int file, uint64_t offset, uint64_t bytes)
{
    struct inode *inode = &crash->inodes[crash->handles[file]];
    struct change *change = calloc(1, sizeof *change);

    change->offset = offset;
    change->bytes = bytes;
    *inode->end = change;
    inode->end = &change->next;
    return change;
}

/* Apply one change to an array of bytes that grows as needed. keep: per sector, NULL for all. */
static void apply(uint8_t **bytes, uint64_t *size, const struct change *change, const bool *keep)
{
    uint64_t end = change->resize ? change->bytes : change->offset + change->bytes;

    if (change->resize ? end != *size : end > *size) {
        *bytes = realloc(*bytes, end + 1);
        if (end > *size)
            memset(*bytes + *size, 0, end - *size);
        *size = end;
    }
    if (change->resize)
        return;
    for (uint64_t at = 0; at < change->bytes; at += SECTOR) {
        if (keep && !keep[at / SECTOR])
            continue;
        if (change->data)
            memcpy(*bytes + change->offset + at, change->data + at, SECTOR);
        else
            memset(*bytes + change->offset + at, 0, SECTOR);
    }
}

static void drop_changes(struct inode *inode)
{
    while (inode->changes) {
        struct change *change = inode->changes;

        inode->changes = change->next;
        free(change->data);
        free(change);
    }
    inode->end = &inode->changes;
}

static void make_durable(struct inode *inode)
{
    for (const struct change *change = inode->changes; change; change = change->next)
        apply(&inode->durable, &inode->durable_bytes, change, NULL);
    drop_changes(inode);
}

static void crash_destroy(struct kvt_io *io)
{
    struct crash_io *crash = crash_of(io);

    crash->inner->ops->destroy(crash->inner);
    for (int i = 0; i < crash->inode_count; i++) {
        drop_changes(&crash->inodes[i]);
        free(crash->inodes[i].durable);
    }
    free(crash->log);
    free(crash);
}

static int crash_open(struct kvt_io *io, const char *name, int flags)
{
    struct crash_io *crash = crash_of(io);
    int inode = find_name(crash, name);
    int file = crash->inner->ops->open(crash->inner, name, flags);

    if (file < 0)
        return file;
    if (file >= (int)HANDLES || (inode < 0 && crash->inode_count == (int)INODES)) {
        crash->inner->ops->close(crash->inner, file);
        return -ENFILE;
    }
    if (inode < 0) {
        inode = crash->inode_count++;
        crash->inodes[inode].end = &crash->inodes[inode].changes;
        log_name(crash, name, inode);
        crash->handles[file] = inode;
        changed(crash);
    }
    crash->handles[file] = inode;
    return file;
}

static void crash_close(struct kvt_io *io, int file)
{
    struct kvt_io *inner = crash_of(io)->inner;

    inner->ops->close(inner, file);
}

static int64_t crash_size(struct kvt_io *io, int file)
{
    struct kvt_io *inner = crash_of(io)->inner;

    return inner->ops->size(inner, file);
}

static int crash_truncate(struct kvt_io *io, int file, uint64_t bytes)
{
    struct crash_io *crash = crash_of(io);
    int rc = crash->inner->ops->truncate(crash->inner, file, bytes);

    if (rc)
        return rc;
    add_change(crash, file, 0, bytes)->resize = true;
    changed(crash);
    return 0;
}

static int crash_allocate(struct kvt_io *io, int file, uint64_t bytes)
{
    struct crash_io *crash = crash_of(io);
    int64_t before = crash->inner->ops->size(crash->inner, file);
    int rc = crash->inner->ops->allocate(crash->inner, file, bytes);

    if (rc)
        return rc;
    if ((int64_t)bytes > before)
        add_change(crash, file, 0, bytes)->resize = true;
    changed(crash);
    return 0;
}

static int crash_punch(struct kvt_io *io, int file, uint64_t offset, uint64_t bytes)
{
    struct crash_io *crash = crash_of(io);
    int rc = crash->inner->ops->punch(crash->inner, file, offset, bytes);

    if (rc)
        return rc;
    (void)add_change(crash, file, offset, bytes);
    changed(crash);
    return 0;
}

static int crash_unlink(struct kvt_io *io, const char *name)
{
    struct crash_io *crash = crash_of(io);
    int rc = crash->inner->ops->unlink(crash->inner, name);

    if (rc)
        return rc;
    log_name(crash, name, -1);
    changed(crash);
    return 0;
}

static int crash_rename(struct kvt_io *io, const char *from, const char *to)
{
    struct crash_io *crash = crash_of(io);
    int inode = find_name(crash, from);
    int rc = crash->inner->ops->rename(crash->inner, from, to);

    if (rc)
        return rc;
    /* one step: `to` gets the file and `from` is gone; a crash between them is modelled as both */
    log_name(crash, to, inode);
    log_name(crash, from, -1);
    changed(crash);
    return 0;
}

static int crash_sync_dir(struct kvt_io *io)
{
    struct crash_io *crash = crash_of(io);

    memcpy(crash->durable, crash->names, sizeof crash->names);
    crash->durable_count = crash->name_count;
    crash->log_count = 0;
    changed(crash);
    return 0;
}

static int crash_list(struct kvt_io *io, int (*fn)(void *arg, const char *name), void *arg)
{
    struct kvt_io *inner = crash_of(io)->inner;

    return inner->ops->list(inner, fn, arg);
}

static int crash_lock(struct kvt_io *io, int64_t *owner_pid)
{
    struct kvt_io *inner = crash_of(io)->inner;

    return inner->ops->lock(inner, owner_pid);
}

static void crash_info(struct kvt_io *io, struct kvt_io_info *info)
{
    struct kvt_io *inner = crash_of(io)->inner;

    inner->ops->info(inner, info);
}

static int crash_submit(struct kvt_io *io, struct kvt_io_req *req)
{
    struct kvt_io *inner = crash_of(io)->inner;

    return inner->ops->submit(inner, req);
}

static void note_done(struct crash_io *crash, const struct kvt_io_req *req)
{
    struct change *change;
    uint64_t at = 0;

    if (req->result < 0 || req->kind == KVT_IO_READ)
        return;
    if (req->kind == KVT_IO_SYNC) {
        make_durable(&crash->inodes[crash->handles[req->file]]);
        changed(crash);
        return;
    }
    if (req->kind == KVT_IO_PUNCH) {
        (void)add_change(crash, req->file, req->offset, req->iov[0].iov_len);
        changed(crash);
        return;
    }
    change = add_change(crash, req->file, req->offset, (uint64_t)req->result);
    change->data = malloc((size_t)req->result + 1);
    for (uint32_t i = 0; i < req->iov_count; i++) {
        memcpy(change->data + at, req->iov[i].iov_base, req->iov[i].iov_len);
        at += req->iov[i].iov_len;
    }
    changed(crash);
}

static unsigned crash_reap(struct kvt_io *io, struct kvt_io_req **out, unsigned max)
{
    struct crash_io *crash = crash_of(io);
    unsigned n = crash->inner->ops->reap(crash->inner, out, max ? 1 : 0); /* one at a time: crashes
                                                                             fall between them */
    if (n)
        note_done(crash, out[0]);
    return n;
}

static int crash_event_fd(struct kvt_io *io)
{
    (void)io;
    return -1;
}

static const struct kvt_io_ops crash_ops = {
    .name = "crash",
    .destroy = crash_destroy,
    .open = crash_open,
    .close = crash_close,
    .size = crash_size,
    .truncate = crash_truncate,
    .allocate = crash_allocate,
    .punch = crash_punch,
    .unlink = crash_unlink,
    .rename = crash_rename,
    .sync_dir = crash_sync_dir,
    .list = crash_list,
    .lock = crash_lock,
    .info = crash_info,
    .submit = crash_submit,
    .reap = crash_reap,
    .event_fd = crash_event_fd,
};

struct kvt_io *crash_io_new(uint64_t capacity_bytes)
{
    struct crash_io *crash = calloc(1, sizeof *crash);

    crash->io.ops = &crash_ops;
    crash->capacity = capacity_bytes;
    if (kvt_io_mem_new(capacity_bytes, &crash->inner)) {
        free(crash);
        return NULL;
    }
    return &crash->io;
}

void crash_io_hook(struct kvt_io *io, void (*fn)(void *ctx), void *ctx)
{
    crash_of(io)->hook = fn;
    crash_of(io)->hook_ctx = ctx;
}

/* Write one file of the image: the durable bytes, and what chance kept of the rest. */
static void write_file(struct kvt_io *image, const char *name, const struct inode *inode,
                       struct kvt_rng *rng, bool any)
{
    uint64_t size = inode->durable_bytes, padded;
    uint8_t *bytes = malloc(size + 1), *aligned;
    int file = image->ops->open(image, name, KVT_IO_OPEN_CREATE);

    if (size)
        memcpy(bytes, inode->durable, size);
    for (const struct change *change = inode->changes; change && any; change = change->next) {
        uint64_t sectors = change->bytes / SECTOR, kind = kvt_rng_below(rng, 4);
        bool *keep;

        if (kind == 0)
            continue; /* lost */
        if (kind < 3 || change->resize) {
            apply(&bytes, &size, change, NULL);
            continue;
        }
        keep = malloc(sectors + 1);
        for (uint64_t i = 0; i < sectors; i++)
            keep[i] = kvt_rng_below(rng, 2);
        apply(&bytes, &size, change, keep);
        free(keep);
    }
    padded = (size + KVT_IO_ALIGN - 1) / KVT_IO_ALIGN * KVT_IO_ALIGN;
    aligned = aligned_alloc(KVT_IO_ALIGN, padded + KVT_IO_ALIGN);
    memset(aligned, 0, padded + KVT_IO_ALIGN);
    memcpy(aligned, bytes, size);
    if (padded && kvt_io_write_now(image, file, 0, aligned, padded) != (int64_t)padded)
        abort();
    image->ops->close(image, file);
    free(aligned);
    free(bytes);
}

struct kvt_io *crash_io_image(struct kvt_io *io, enum crash_mode mode, struct kvt_rng *rng)
{
    struct crash_io *crash = crash_of(io);
    struct name_op names[INODES];
    int count = crash->durable_count, kept = 0;
    struct kvt_io *image = NULL;

    if (mode == CRASH_PROCESS)
        return kvt_io_mem_clone(crash->inner, &image) ? NULL : image;
    if (kvt_io_mem_new(crash->capacity, &image))
        return NULL;
    memcpy(names, crash->durable, sizeof names);
    if (mode == CRASH_RANDOM && crash->log_count)
        kept = (int)kvt_rng_below(rng, (uint64_t)crash->log_count + 1);
    for (int i = 0; i < kept; i++)
        set_name(names, &count, crash->log[i].name, crash->log[i].inode);
    for (int i = 0; i < count; i++)
        write_file(image, names[i].name, &crash->inodes[names[i].inode], rng, mode == CRASH_RANDOM);
    return image;
}
