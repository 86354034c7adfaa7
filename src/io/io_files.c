/* A root directory as files: the part that the posix and uring backends share. Files, names,
 * space, the lock and the instance's life are here; what moves data is an engine behind it:
 * posix_pool.c (threads) or io_uring.c (a ring). posix_root.c guards the directory, posix_probe.c
 * decides on O_DIRECT, io_choose.c on the engine.
 *
 * Invariants: files are numbers of a table of at most KVT_IO_FILES_MAX; every name is checked
 * before it reaches the system; nothing in a read-only instance changes the directory. Threads: the
 * owner calls everything. A forked child has no engine and no lock (base/fork.h): its submits and
 * changes fail with -EIO, its destroy frees memory and descriptors and leaves the parent's lock and
 * files alone. It does not cache, order or merge anything.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/fd.h"
#include "base/fork.h"
#include "io/io_common.h"
#include "io/io_engine.h"
#include "io/io_posix.h"
#include "kvtier/error.h"

#define WHY_BYTES 160u

struct file {
    int fd; /* -1: free */
    bool read_only;
};

struct files_io {
    struct kvt_io io;
    const struct kvt_posix_sys *sys;
    pid_t pid;
    int dir_fd, lock_fd; /* lock_fd -1: not locked, or in a child */
    struct kvt_fork_fd alone;
    char *path; /* absolute; NULL: not watched */
    struct kvt_log log;
    bool left; /* said so */
    bool direct, read_only;
    char why[WHY_BYTES], engine_why[WHY_BYTES];
    struct file *table; /* by number */
    int table_count;
    struct kvt_io_engine *engine;
};

static struct files_io *files_of(struct kvt_io *io)
{
    return (struct files_io *)io;
}

static bool forked(const struct files_io *files)
{
    return getpid() != files->pid;
}

/* ---- the root's place ---- */

/* 0; -EIO: a forked child, who has no lock. -ESTALE: the directory is at its path no more, or
 * somebody else may own it. Looked at before every change (microseconds), so that nobody is told
 * that something is on disk which a restart would not find. It may come back. */
static int in_place(struct files_io *files)
{
    if (forked(files))
        return -EIO;
    bool left = files->path && files->lock_fd >= 0 &&
                kvt_posix_root_left(files->path, files->dir_fd, files->lock_fd);

    if (left != files->left)
        kvt_log(&files->log, left ? KVT_LOG_ERROR : KVT_LOG_WARN, "%s: %s", files->path,
                left
                    ? "the directory that was opened, or its lock, is not there any more (removed, "
                      "moved or mounted over): nothing is written to it until it is back; what "
                      "was in it may be lost; restart to use what is there now"
                    : "the directory is back: it is written to again");
    files->left = left;
    return left ? -ESTALE : 0;
}

static void watch_end(struct files_io *files)
{
    free(files->path);
    files->path = NULL;
}

/* A file that has no name any more is nobody's after a restart. */
static int named(struct files_io *files, int fd)
{
    struct stat st;
    int rc = in_place(files);

    return rc ? rc : files->lock_fd >= 0 && !fstat(fd, &st) && !st.st_nlink ? -ESTALE : 0;
}

/* ---- files ---- */

static struct file *file_of(struct files_io *files, int file)
{
    if (file < 0 || file >= files->table_count || files->table[file].fd < 0)
        return NULL;
    return &files->table[file];
}

/* A free place in the table, which doubles up to its bound. */
static int free_place(struct files_io *files)
{
    struct file *table;
    int old = files->table_count, count = KVT_MIN(old ? old * 2 : 64, KVT_IO_FILES_MAX);

    for (int i = 0; i < old; i++)
        if (files->table[i].fd < 0)
            return i;
    if (old == count)
        return -ENFILE;
    table = realloc(files->table, (size_t)count * sizeof *table);
    if (!table)
        return -ENOMEM;
    for (int i = old; i < count; i++)
        table[i].fd = -1;
    files->table = table;
    files->table_count = count;
    return old;
}

static int files_open(struct kvt_io *io, const char *name, int flags)
{
    struct files_io *files = files_of(io);
    int place, fd;

    if (files->read_only &&
        (flags & (KVT_IO_OPEN_CREATE | KVT_IO_OPEN_READ_ONLY)) != KVT_IO_OPEN_READ_ONLY)
        return -EROFS;
    if (flags & KVT_IO_OPEN_CREATE && (fd = in_place(files)) < 0)
        return fd;
    place = free_place(files);
    if (place < 0)
        return place;
    fd = kvt_posix_file_open(files->dir_fd, name, flags, files->direct);
    if (fd < 0)
        return fd;
    files->table[place] = (struct file){.fd = fd, .read_only = flags & KVT_IO_OPEN_READ_ONLY};
    return place;
}

static void files_close(struct kvt_io *io, int number)
{
    struct file *file = file_of(files_of(io), number);

    if (!file)
        return;
    close(file->fd);
    file->fd = -1;
}

static int64_t files_size(struct kvt_io *io, int number)
{
    struct file *file = file_of(files_of(io), number);
    struct stat st;

    if (!file)
        return -EBADF;
    return fstat(file->fd, &st) < 0 ? -errno : (int64_t)st.st_size;
}

/* Descriptor of a file that may be written, or -EBADF, -ESTALE. */
static int writable_fd(struct kvt_io *io, int number)
{
    struct file *file = file_of(files_of(io), number);
    int rc = file && !file->read_only ? named(files_of(io), file->fd) : -EBADF;

    return rc ? rc : file->fd;
}

static int files_truncate(struct kvt_io *io, int number, uint64_t bytes)
{
    int fd = writable_fd(io, number), rc;

    if (fd < 0)
        return fd;
    if (bytes > INT64_MAX)
        return -EINVAL;
    do
        rc = ftruncate(fd, (off_t)bytes);
    while (rc < 0 && errno == EINTR);
    return rc < 0 ? -errno : 0;
}

static int files_allocate(struct kvt_io *io, int number, uint64_t bytes)
{
    struct files_io *files = files_of(io);
    int fd = writable_fd(io, number), rc;
    struct stat before;

    if (fd < 0)
        return fd;
    if (!bytes || bytes > INT64_MAX)
        return -EINVAL;
    if (fstat(fd, &before) < 0)
        return -errno;
    do
        rc = files->sys->fallocate(fd, 0, 0, (off_t)bytes);
    while (rc < 0 && errno == EINTR);
    if (!rc)
        return 0;
    rc = errno == ENOSYS ? -EOPNOTSUPP : -errno;
    /* a failed reservation may have got part of the way: give that back */
    if ((uint64_t)before.st_size < bytes && ftruncate(fd, before.st_size) < 0)
        return -errno;
    return rc;
}

static int files_punch(struct kvt_io *io, int number, uint64_t offset, uint64_t bytes)
{
    int fd = writable_fd(io, number);
    uint64_t end;

    if (fd < 0)
        return fd;
    if (offset % KVT_IO_ALIGN || bytes % KVT_IO_ALIGN || !bytes ||
        !kvt_add_ok(offset, bytes, &end) || end > INT64_MAX)
        return -EINVAL;
    return kvt_posix_zero(files_of(io)->sys, fd, offset, bytes);
}

static int files_unlink(struct kvt_io *io, const char *name)
{
    int rc;

    if (kvt_io_name_check(name))
        return -EINVAL;
    if (files_of(io)->read_only)
        return -EROFS;
    rc = in_place(files_of(io));
    if (rc)
        return rc;
    if (unlinkat(files_of(io)->dir_fd, name, 0) < 0)
        return -errno;
    if (!strcmp(name, KVT_POSIX_LOCK_NAME))
        watch_end(files_of(io)); /* the owner itself takes the root apart */
    return 0;
}

static int files_rename(struct kvt_io *io, const char *from, const char *to)
{
    int dir_fd = files_of(io)->dir_fd, rc;

    if (kvt_io_name_check(from) || kvt_io_name_check(to))
        return -EINVAL;
    if (files_of(io)->read_only)
        return -EROFS;
    rc = in_place(files_of(io));
    return rc ? rc : renameat(dir_fd, from, dir_fd, to) < 0 ? -errno : 0;
}

static int files_sync_dir(struct kvt_io *io)
{
    int rc;

    if (files_of(io)->read_only)
        return 0;
    rc = in_place(files_of(io));
    if (rc)
        return rc;
    do
        rc = fsync(files_of(io)->dir_fd);
    while (rc < 0 && errno == EINTR);
    if (rc < 0 && errno == EINVAL)
        return 0; /* file systems without it have nothing to sync */
    return rc < 0 ? -errno : 0;
}

static int files_list(struct kvt_io *io, int (*fn)(void *arg, const char *name), void *arg)
{
    /* a description of its own: the offset of dir_fd is nobody's */
    int fd = kvt_fd_high(openat(files_of(io)->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    struct dirent *entry;
    int rc = 0;
    DIR *dir;

    if (fd < 0)
        return -errno;
    dir = fdopendir(fd);
    if (!dir) {
        rc = -errno;
        close(fd);
        return rc;
    }
    while (!rc) {
        errno = 0;
        entry = readdir(dir);
        if (!entry) {
            rc = -errno;
            break;
        }
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            rc = fn(arg, entry->d_name);
    }
    closedir(dir);
    return rc;
}

static int files_lock(struct kvt_io *io, int64_t *owner_pid)
{
    struct files_io *files = files_of(io);
    int fd;

    if (forked(files))
        return -EIO;
    if (files->lock_fd >= 0)
        return 0;
    kvt_fork_hold();
    fd = kvt_posix_lock(files->dir_fd, files->read_only, owner_pid);
    if (fd >= 0) {
        files->lock_fd = fd;
        kvt_fork_add(&files->alone, &files->lock_fd);
    }
    kvt_fork_let();
    if (fd == -ENOENT && files->read_only)
        return 0; /* never opened by an owner: nobody to keep out */
    if (fd < 0)
        return fd;
    if (files->path && kvt_posix_root_left(files->path, files->dir_fd, fd))
        watch_end(files); /* a file system whose numbers do not stay */
    return 0;
}

static void files_info(struct kvt_io *io, struct kvt_io_info *info)
{
    struct files_io *files = files_of(io);
    struct statvfs fs;

    *info = (struct kvt_io_info){.backend = files->engine->ops->name,
                                 .why = files->why,
                                 .backend_why = files->engine_why,
                                 .direct = files->direct};
    if (!fstatvfs(files->dir_fd, &fs)) {
        info->free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
        info->total_bytes = (uint64_t)fs.f_blocks * fs.f_frsize;
    }
}

/* ---- data ---- */

static int files_submit(struct kvt_io *io, struct kvt_io_req *req)
{
    struct files_io *files = files_of(io);
    struct file *file = file_of(files, req->file);
    int64_t bytes = kvt_io_req_bytes(req);

    if (forked(files))
        return -EIO;
    if (bytes >= 0 &&
        (!file || (file->read_only && (req->kind == KVT_IO_WRITE || req->kind == KVT_IO_PUNCH))))
        bytes = -EBADF;
    if (bytes >= 0 && req->kind != KVT_IO_READ && !file->read_only) {
        int rc = named(files, file->fd);
        bytes = rc ? rc : bytes;
    }
    return files->engine->ops->submit(files->engine, req, file ? file->fd : -1, bytes);
}

static unsigned files_reap(struct kvt_io *io, struct kvt_io_req **out, unsigned max)
{
    struct files_io *files = files_of(io);

    return forked(files) ? 0 : files->engine->ops->reap(files->engine, out, max);
}

static int files_event_fd(struct kvt_io *io)
{
    return files_of(io)->engine->event_fd;
}

/* ---- life ---- */

static void close_fd(int fd)
{
    if (fd >= 0)
        close(fd);
}

static void files_destroy(struct kvt_io *io)
{
    struct files_io *files = files_of(io);

    if (files->engine && !forked(files))
        files->engine->ops->stop(files->engine);
    else if (files->engine)
        files->engine->ops->abandon(files->engine);
    for (int i = 0; i < files->table_count; i++)
        close_fd(files->table[i].fd);
    kvt_fork_drop(&files->alone);
    close_fd(files->lock_fd); /* the last copy of it unlocks: no explicit unlock, a child would
                                 take the parent's lock away */
    close_fd(files->dir_fd);
    free(files->path);
    free(files->table);
    free(files);
}

static const struct kvt_io_ops files_ops = {
    .name = "posix", /* of files; info() names the backend */
    .destroy = files_destroy,
    .open = files_open,
    .close = files_close,
    .size = files_size,
    .truncate = files_truncate,
    .allocate = files_allocate,
    .punch = files_punch,
    .unlink = files_unlink,
    .rename = files_rename,
    .sync_dir = files_sync_dir,
    .list = files_list,
    .lock = files_lock,
    .info = files_info,
    .submit = files_submit,
    .reap = files_reap,
    .event_fd = files_event_fd,
};

/* Decide between direct and buffered, and say why. */
static int choose_mode(struct files_io *files, const struct kvt_io_posix_params *params)
{
    int rc = 0;

    if (params->read_only)
        snprintf(files->why, sizeof files->why, "buffered: opened for reading only, not probed");
    else if (!params->direct)
        snprintf(files->why, sizeof files->why, "buffered: asked for");
    else
        rc = kvt_posix_probe_direct(files->dir_fd, files->why, sizeof files->why);
    if (rc < 0)
        return rc == -ENOMEM ? rc : KVT_E_READ_ONLY;
    files->direct = rc;
    if (params->direct == 1 && !files->direct && !params->read_only) {
        kvt_log(&params->log, KVT_LOG_ERROR, "%s: direct I/O is required, but %s", params->path,
                files->why);
        return KVT_E_UNSUPPORTED;
    }
    if (params->direct && !files->direct && !params->read_only)
        kvt_log(&params->log, KVT_LOG_WARN, "%s: %s", params->path, files->why);
    return 0;
}

int kvt_io_files_new_sys(const struct kvt_io_posix_params *params, const struct kvt_posix_sys *sys,
                         struct kvt_io **out)
{
    struct files_io *files;
    int rc;

    if (params->threads < 1 || params->threads > KVT_POSIX_THREADS_MAX || params->direct < -1 ||
        params->direct > 1 || params->backend < KVT_IO_POSIX || params->backend > KVT_IO_AUTO)
        return KVT_E_INVAL;
    files = calloc(1, sizeof *files);
    if (!files)
        return -ENOMEM;
    files->io.ops = &files_ops;
    files->sys = sys;
    files->pid = getpid();
    files->lock_fd = -1;
    files->read_only = params->read_only;
    files->log = params->log;
    rc = files->dir_fd = kvt_posix_root_open(params->path, params->read_only, &params->log);
    if (rc >= 0)
        rc = choose_mode(files, params);
    if (rc >= 0)
        rc = kvt_io_choose(params, sys, files->dir_fd, files->direct, &files->engine,
                           files->engine_why, sizeof files->engine_why);
    if (rc >= 0 && !params->read_only)
        files->path = kvt_posix_root_path(params->path);
    if (rc < 0) {
        files_destroy(&files->io);
        return rc;
    }
    *out = &files->io;
    return 0;
}

int kvt_io_files_new(const struct kvt_io_posix_params *params, struct kvt_io **out)
{
    return kvt_io_files_new_sys(params, &kvt_posix_sys_real, out);
}

int kvt_io_posix_new(const struct kvt_io_posix_params *params, struct kvt_io **out)
{
    struct kvt_io_posix_params posix = *params;

    posix.backend = KVT_IO_POSIX;
    return kvt_io_files_new(&posix, out);
}
