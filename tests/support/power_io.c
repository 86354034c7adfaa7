/* See power_io.h.
 *
 * A file is an inode here: a number with its changes since the last sync, oldest first, each with
 * the bytes that it covered (an undo log). A name that is taken away is only hidden
 * (".gone-..."), until the directory is synced. At a loss all changes of an inode are undone,
 * newest first; what each had written is picked up on the way; then those that stay are done again.
 * Names are undone from the newest back to where chance says. */
#include "support/power_io.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

#define INODES 512
#define HANDLES 1024
#define SECTOR 512u
#define HIDDEN ".gone-"

enum kind { CHANGE_WRITE, CHANGE_PUNCH, CHANGE_SIZE };

struct change {
    struct change *older, *newer;
    enum kind kind;
    uint64_t offset, bytes; /* WRITE, PUNCH */
    uint64_t size_before, size_after;
    uint64_t reported; /* when; UINT64_MAX: not yet */
    uint8_t *before;   /* `bytes` of them; SIZE: those that were cut off */
    uint64_t before_bytes;
    uint8_t *after; /* picked up at a loss */
    struct kvt_io_req *req;
};

struct inode {
    char name[KVT_IO_NAME_MAX]; /* in inner; "": gone for good */
    struct change *oldest, *newest;
};

enum name_kind { NAME_CREATED, NAME_HIDDEN, NAME_MOVED };

struct name_op {
    enum name_kind kind;
    int inode;
    bool pair; /* with the next one: both, or none */
    char from[KVT_IO_NAME_MAX], to[KVT_IO_NAME_MAX];
};

struct power_io {
    struct kvt_io io;
    struct kvt_io *inner;
    struct inode inodes[INODES];
    int inode_count;
    int handles[HANDLES]; /* inode by file */
    struct name_op *names;
    int name_count, name_room;
    struct kvt_io_req *queue, **queue_end;
    uint64_t clock; /* counts submits and reports */
    uint32_t unsynced, hidden;
};

static struct power_io *power_of(struct kvt_io *io)
{
    return (struct power_io *)io;
}

static void *must(void *memory)
{
    if (!memory)
        abort(); /* running out of memory in a test is not a case to handle */
    return memory;
}

#define must_be(good) must_be_at(good, #good, __LINE__)
static void must_be_at(bool good, const char *what, int line)
{
    if (!good) {
        fprintf(stderr, "power_io: line %d: %s\n", line, what);
        abort();
    }
}

static void *pages_of(uint64_t bytes)
{
    return must(aligned_alloc(KVT_IO_ALIGN, KVT_MAX(bytes, (uint64_t)KVT_IO_ALIGN)));
}

/* ---- changes */

static struct change *change_new(struct power_io *power, int number, enum kind kind)
{
    struct change *change = must(calloc(1, sizeof *change));
    struct inode *inode = &power->inodes[number];

    change->kind = kind;
    change->older = inode->newest;
    if (inode->newest)
        inode->newest->newer = change;
    else
        inode->oldest = change;
    inode->newest = change;
    power->unsynced++;
    return change;
}

static void change_free(struct power_io *power, struct inode *inode, struct change *change)
{
    *(change->older ? &change->older->newer : &inode->oldest) = change->newer;
    *(change->newer ? &change->newer->older : &inode->newest) = change->older;
    free(change->before);
    free(change->after);
    free(change);
    power->unsynced--;
}

static void forget_changes(struct power_io *power, int number, uint64_t reported)
{
    struct inode *inode = &power->inodes[number];
    struct change *next;

    for (struct change *change = inode->oldest; change; change = next) {
        next = change->newer;
        if (change->reported <= reported)
            change_free(power, inode, change);
    }
}

/* What is in [offset, offset + bytes) now; zeros past the end. */
static uint8_t *pick_up(struct power_io *power, int file, uint64_t offset, uint64_t bytes)
{
    uint8_t *data = pages_of(bytes);
    int64_t got = kvt_io_read_now(power->inner, file, offset, data, bytes);

    must_be(got >= 0);
    memset(data + got, 0, bytes - (uint64_t)got);
    return data;
}

static uint64_t size_of(struct power_io *power, int file)
{
    int64_t size = power->inner->ops->size(power->inner, file);

    must_be(size >= 0);
    return (uint64_t)size;
}

/* ---- names */

static int find_inode(struct power_io *power, const char *name)
{
    for (int i = 0; i < power->inode_count; i++)
        if (!strcmp(power->inodes[i].name, name))
            return i;
    return -1;
}

static int inode_new(struct power_io *power, const char *name)
{
    int number = find_inode(power, "");

    if (number < 0 && power->inode_count < INODES)
        number = power->inode_count++;
    must_be(number >= 0);
    memset(&power->inodes[number], 0, sizeof power->inodes[number]);
    memcpy(power->inodes[number].name, name, strlen(name) + 1);
    return number;
}

static void note_name(struct power_io *power, enum name_kind kind, int inode, const char *from,
                      const char *to)
{
    struct name_op *op;

    if (power->name_count == power->name_room) {
        power->name_room = power->name_room * 2 + 16;
        power->names = must(realloc(power->names, (size_t)power->name_room * sizeof *power->names));
    }
    op = &power->names[power->name_count++];
    memset(op, 0, sizeof *op);
    op->kind = kind;
    op->inode = inode;
    memcpy(op->from, from, strlen(from) + 1);
    memcpy(op->to, to, strlen(to) + 1);
}

static int power_open(struct kvt_io *io, const char *name, int flags)
{
    struct power_io *power = power_of(io);
    int number = find_inode(power, name);
    int known = number >= 0 ? 0 : power->inner->ops->open(power->inner, name, 0);
    int file = power->inner->ops->open(power->inner, name, flags);

    if (known > 0 || (known == 0 && number < 0))
        power->inner->ops->close(power->inner, known);
    if (file < 0)
        return file;
    must_be(file < HANDLES);
    if (number < 0) {
        number = inode_new(power, name);
        if (known < 0)
            note_name(power, NAME_CREATED, number, name, "");
    }
    power->handles[file] = number;
    return file;
}

static void power_close(struct kvt_io *io, int file)
{
    power_of(io)->inner->ops->close(power_of(io)->inner, file);
}

static int64_t power_size(struct kvt_io *io, int file)
{
    return power_of(io)->inner->ops->size(power_of(io)->inner, file);
}

static int change_size(struct power_io *power, int file, uint64_t bytes,
                       int (*fn)(struct kvt_io *io, int file, uint64_t bytes))
{
    uint64_t before = size_of(power, file);
    uint8_t *cut = NULL;
    uint64_t from = bytes / KVT_IO_ALIGN * KVT_IO_ALIGN;
    struct change *change;
    int rc;

    if (from < before)
        cut = pick_up(power, file, from, kvt_round_up(before - from, KVT_IO_ALIGN));
    rc = fn(power->inner, file, bytes);
    if (rc || size_of(power, file) == before) {
        free(cut);
        return rc;
    }
    change = change_new(power, power->handles[file], CHANGE_SIZE);
    change->size_before = before;
    change->size_after = size_of(power, file);
    change->offset = from;
    change->before = cut;
    change->before_bytes = cut ? kvt_round_up(before - from, KVT_IO_ALIGN) : 0;
    change->reported = power->clock;
    return 0;
}

static int power_truncate(struct kvt_io *io, int file, uint64_t bytes)
{
    return change_size(power_of(io), file, bytes, power_of(io)->inner->ops->truncate);
}

static int power_allocate(struct kvt_io *io, int file, uint64_t bytes)
{
    return change_size(power_of(io), file, bytes, power_of(io)->inner->ops->allocate);
}

static int power_punch(struct kvt_io *io, int file, uint64_t offset, uint64_t bytes)
{
    struct power_io *power = power_of(io);
    uint8_t *before = pick_up(power, file, offset, bytes);
    int rc = power->inner->ops->punch(power->inner, file, offset, bytes);
    struct change *change;

    if (rc) {
        free(before);
        return rc;
    }
    change = change_new(power, power->handles[file], CHANGE_PUNCH);
    change->offset = offset;
    change->bytes = change->before_bytes = bytes;
    change->before = before;
    change->size_before = change->size_after = size_of(power, file);
    change->reported = power->clock;
    return 0;
}

/* Take a name away, so that it can come back. */
static int hide(struct power_io *power, int number, const char *name)
{
    char hidden[KVT_IO_NAME_MAX];
    int rc;

    snprintf(hidden, sizeof hidden, HIDDEN "%u", power->hidden++);
    rc = power->inner->ops->rename(power->inner, name, hidden);
    if (rc)
        return rc;
    memcpy(power->inodes[number].name, hidden, sizeof hidden);
    note_name(power, NAME_HIDDEN, number, name, hidden);
    return 0;
}

static int number_of(struct power_io *power, const char *name)
{
    int number = find_inode(power, name);

    return number >= 0 ? number : inode_new(power, name); /* there before we were */
}

static int power_unlink(struct kvt_io *io, const char *name)
{
    struct power_io *power = power_of(io);
    int file = power->inner->ops->open(power->inner, name, KVT_IO_OPEN_READ_ONLY);

    if (file < 0)
        return file;
    power->inner->ops->close(power->inner, file);
    return hide(power, number_of(power, name), name);
}

static int power_rename(struct kvt_io *io, const char *from, const char *to)
{
    struct power_io *power = power_of(io);
    int old = power->inner->ops->open(power->inner, to, KVT_IO_OPEN_READ_ONLY), number, rc;

    if (old >= 0) {
        power->inner->ops->close(power->inner, old);
        rc = hide(power, number_of(power, to), to);
        if (rc)
            return rc;
    }
    rc = power->inner->ops->rename(power->inner, from, to);
    if (rc)
        return rc;
    if (old >= 0) /* there is always one file of that name: the old, or the new */
        power->names[power->name_count - 1].pair = true;
    number = number_of(power, from);
    memcpy(power->inodes[number].name, to, strlen(to) + 1);
    note_name(power, NAME_MOVED, number, from, to);
    return 0;
}

static void gone_for_good(struct power_io *power, const struct name_op *op)
{
    forget_changes(power, op->inode, UINT64_MAX);
    must_be(!power->inner->ops->unlink(power->inner, op->to));
    power->inodes[op->inode].name[0] = '\0';
}

static int power_sync_dir(struct kvt_io *io)
{
    struct power_io *power = power_of(io);

    for (int i = 0; i < power->name_count; i++)
        if (power->names[i].kind == NAME_HIDDEN)
            gone_for_good(power, &power->names[i]);
    power->name_count = 0;
    return power->inner->ops->sync_dir(power->inner);
}

struct shown {
    int (*fn)(void *arg, const char *name);
    void *arg;
};

static int show_name(void *arg, const char *name)
{
    const struct shown *shown = arg;

    return strncmp(name, HIDDEN, strlen(HIDDEN)) ? shown->fn(shown->arg, name) : 0;
}

static int power_list(struct kvt_io *io, int (*fn)(void *arg, const char *name), void *arg)
{
    struct shown shown = {fn, arg};

    return power_of(io)->inner->ops->list(power_of(io)->inner, show_name, &shown);
}

static int power_lock(struct kvt_io *io, int64_t *owner_pid)
{
    return power_of(io)->inner->ops->lock(power_of(io)->inner, owner_pid);
}

static void power_info(struct kvt_io *io, struct kvt_io_info *info)
{
    power_of(io)->inner->ops->info(power_of(io)->inner, info);
}

/* ---- data */

static int power_submit(struct kvt_io *io, struct kvt_io_req *req)
{
    struct power_io *power = power_of(io);

    req->next = NULL;
    req->backend_word[0] = ++power->clock;
    *power->queue_end = req;
    power->queue_end = &req->next;
    return 0;
}

/* Let inner do it, alone. */
static int64_t inner_does(struct power_io *power, const struct kvt_io_req *req)
{
    static struct kvt_io_req own; /* large; nothing else is in flight there */
    struct kvt_io_req *got[1];
    int rc;

    own.kind = req->kind;
    own.file = req->file;
    own.offset = req->offset;
    own.iov_count = req->iov_count;
    memcpy(own.iov, req->iov,
           KVT_MIN(req->iov_count, (uint32_t)KVT_IO_IOV_MAX) * sizeof own.iov[0]);
    own.done = NULL;
    rc = power->inner->ops->submit(power->inner, &own);
    if (rc)
        return rc;
    while (!power->inner->ops->reap(power->inner, got, 1))
        ;
    return own.result;
}

static int64_t run_write(struct power_io *power, struct kvt_io_req *req)
{
    uint64_t bytes = 0, size = size_of(power, req->file);
    struct change *change;
    uint8_t *before;
    int64_t result;

    for (uint32_t i = 0; i < req->iov_count; i++)
        bytes += req->iov[i].iov_len;
    before = pick_up(power, req->file, req->offset, bytes);
    result = inner_does(power, req);
    if (result < 0) {
        free(before);
        return result;
    }
    change = change_new(power, power->handles[req->file], CHANGE_WRITE);
    change->offset = req->offset;
    change->bytes = change->before_bytes = bytes;
    change->before = before;
    change->size_before = size;
    change->size_after = size_of(power, req->file);
    change->reported = ++power->clock;
    return result;
}

static int64_t run(struct power_io *power, struct kvt_io_req *req)
{
    int64_t result;

    if (req->kind == KVT_IO_WRITE)
        return run_write(power, req);
    if (req->kind == KVT_IO_PUNCH) {
        power->clock++; /* a sync that was asked for before does not cover it */
        return power_punch(&power->io, req->file, req->offset, req->iov[0].iov_len);
    }
    result = inner_does(power, req);
    if (req->kind == KVT_IO_SYNC && !result)
        forget_changes(power, power->handles[req->file], req->backend_word[0]);
    return result;
}

static struct kvt_io_req *take(struct power_io *power)
{
    struct kvt_io_req *req = power->queue;

    if (!req)
        return NULL;
    power->queue = req->next;
    if (!power->queue)
        power->queue_end = &power->queue;
    return req;
}

static unsigned power_reap(struct kvt_io *io, struct kvt_io_req **out, unsigned max)
{
    struct power_io *power = power_of(io);
    unsigned count = 0;

    while (count < max && (out[count] = take(power))) {
        out[count]->elapsed_ns = 0;
        out[count]->result = run(power, out[count]);
        count++;
    }
    return count;
}

static int power_event_fd(struct kvt_io *io)
{
    (void)io;
    return -1;
}

static void power_destroy(struct kvt_io *io)
{
    struct power_io *power = power_of(io);

    for (int i = 0; i < power->inode_count; i++)
        forget_changes(power, i, UINT64_MAX);
    power->inner->ops->destroy(power->inner);
    free(power->names);
    free(power);
}

static const struct kvt_io_ops power_ops = {
    .name = "power",
    .destroy = power_destroy,
    .open = power_open,
    .close = power_close,
    .size = power_size,
    .truncate = power_truncate,
    .allocate = power_allocate,
    .punch = power_punch,
    .unlink = power_unlink,
    .rename = power_rename,
    .sync_dir = power_sync_dir,
    .list = power_list,
    .lock = power_lock,
    .info = power_info,
    .submit = power_submit,
    .reap = power_reap,
    .event_fd = power_event_fd,
};

struct kvt_io *power_io_new(struct kvt_io *inner)
{
    struct power_io *power = must(calloc(1, sizeof *power));

    power->io.ops = &power_ops;
    power->inner = inner;
    power->queue_end = &power->queue;
    return &power->io;
}

struct kvt_io *power_io_inner(struct kvt_io *io)
{
    return power_of(io)->inner;
}

/* ---- the loss */

/* Where inner is full (what a hole had freed is in use elsewhere), the change stays. */
static void put_back(struct power_io *power, int file, uint64_t offset, const uint8_t *data,
                     uint64_t bytes)
{
    int64_t got = bytes ? kvt_io_write_now(power->inner, file, offset, data, bytes) : 0;

    must_be(got == (int64_t)bytes || got == -ENOSPC);
}

static void set_size(struct power_io *power, int file, uint64_t bytes)
{
    must_be(!power->inner->ops->truncate(power->inner, file, bytes));
}

/* Undo all changes of a file, newest first, and keep what each had left. */
static void undo_all(struct power_io *power, struct inode *inode, int file)
{
    for (struct change *change = inode->newest; change; change = change->older) {
        if (change->kind != CHANGE_SIZE)
            change->after = pick_up(power, file, change->offset, change->bytes);
        if (change->kind == CHANGE_SIZE && change->size_after < change->size_before)
            set_size(power, file, change->size_before);
        put_back(power, file, change->offset, change->before, change->before_bytes);
        set_size(power, file, change->size_before);
    }
}

/* Part of a change: sectors by chance, those that do not stay are what they were or garbage. */
static void redo_torn(struct power_io *power, int file, struct change *change, bool garbage,
                      struct kvt_rng *rng)
{
    bool by_pages = kvt_rng_below(rng, 2);
    uint64_t unit = by_pages ? KVT_IO_ALIGN : SECTOR;
    uint8_t *now = pick_up(power, file, change->offset, change->bytes);

    for (uint64_t at = 0; at < change->bytes; at += unit) {
        uint64_t dice = kvt_rng_below(rng, garbage ? 4 : 2);

        if (dice == 0)
            memcpy(now + at, change->after + at, unit);
        for (uint64_t i = 0; dice == 3 && i < unit; i += sizeof dice) {
            uint64_t word = kvt_rng_next(rng);

            memcpy(now + at + i, &word, sizeof word);
        }
    }
    put_back(power, file, change->offset, now, change->bytes);
    free(now);
}

static void redo(struct power_io *power, int file, struct change *change, enum power_loss loss,
                 struct kvt_rng *rng)
{
    uint64_t size = size_of(power, file), dice = kvt_rng_below(rng, 4);

    if (dice == 0)
        return;
    if (change->kind == CHANGE_SIZE) {
        if (change->size_after < change->size_before ? size > change->size_after
                                                     : size < change->size_after)
            set_size(power, file, change->size_after);
        return;
    }
    if (dice < 3)
        put_back(power, file, change->offset, change->after, change->bytes);
    else
        redo_torn(power, file, change, loss == POWER_GARBLES, rng);
    if (change->kind == CHANGE_WRITE) /* put_back() writes whole pages and may have grown it */
        set_size(power, file, KVT_MAX(size, change->size_after));
    else
        set_size(power, file, size);
}

/* In their order, but each may change places with its neighbour. */
static void redo_some(struct power_io *power, struct inode *inode, int file, enum power_loss loss,
                      struct kvt_rng *rng)
{
    struct change *later = NULL;

    for (struct change *change = inode->oldest; change; change = change->newer) {
        if (!later && change->newer && kvt_rng_below(rng, 4) == 0) {
            later = change;
            continue;
        }
        redo(power, file, change, loss, rng);
        if (later)
            redo(power, file, later, loss, rng);
        later = NULL;
    }
}

static void undo_name(struct power_io *power, const struct name_op *op)
{
    const struct kvt_io_ops *ops = power->inner->ops;

    if (op->kind == NAME_CREATED) {
        must_be(!ops->unlink(power->inner, op->from));
        power->inodes[op->inode].name[0] = '\0';
        return;
    }
    must_be(!ops->rename(power->inner, op->to, op->from));
    memcpy(power->inodes[op->inode].name, op->from, sizeof op->from);
}

uint32_t power_io_loss(struct kvt_io *io, enum power_loss loss, struct kvt_rng *rng)
{
    struct power_io *power = power_of(io);
    struct kvt_io_req *req;
    uint32_t unsynced;
    int keep = power->name_count;

    while ((req = take(power))) /* on its way: it may have been done, and is not durable */
        if (req->kind == KVT_IO_WRITE && kvt_rng_below(rng, 2))
            (void)run(power, req);
    unsynced = power->unsynced + (uint32_t)power->name_count;
    if (loss == POWER_KEEPS)
        return unsynced; /* still to be lost, by the next one */
    for (int i = 0; i < power->inode_count; i++) {
        struct inode *inode = &power->inodes[i];
        int file;

        if (!inode->oldest)
            continue;
        file = power->inner->ops->open(power->inner, inode->name, 0);
        must_be(file >= 0);
        undo_all(power, inode, file);
        if (loss != POWER_DROPS)
            redo_some(power, inode, file, loss, rng);
        power->inner->ops->close(power->inner, file);
    }
    for (int i = 0; i < power->inode_count; i++)
        forget_changes(power, i, UINT64_MAX);
    if (loss == POWER_DROPS)
        keep = 0;
    else
        keep = (int)kvt_rng_below(rng, (uint64_t)power->name_count + 1);
    if (keep && power->names[keep - 1].pair)
        keep--;
    while (power->name_count > keep)
        undo_name(power, &power->names[--power->name_count]);
    (void)power_sync_dir(io);
    return unsynced;
}
