/* I/O backend over POSIX calls and a pool of threads: first-class, because io_uring is often
 * forbidden in containers. This file: the instance, its files and control calls; posix_pool.c runs
 * the data requests, posix_root.c guards the directory, posix_probe.c decides on O_DIRECT.
 *
 * Invariants: files are numbers of a table of at most KVT_IO_FILES_MAX; every name is checked
 * before it reaches the system; nothing in a read-only instance changes the directory. Threads: the
 * owner calls everything. A forked child has no pool: its submits fail with -EIO, its destroy frees
 * memory and descriptors and leaves the parent's lock and files alone. A child that lives on
 * without exec keeps the root locked as long as it lives. It does not cache, order or merge
 * anything.
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
#include "io/io_common.h"
#include "io/io_posix.h"
#include "kvtier/error.h"

#define WHY_BYTES 160u

struct posix_file {
    int fd; /* -1: free */
    bool read_only;
};

struct posix_io {
    struct kvt_io io;
    const struct kvt_posix_sys *sys;
    pid_t pid;
    int dir_fd, lock_fd;
    bool direct, read_only;
    char why[WHY_BYTES];
    struct posix_file *files;
    int file_count;
    bool pool_started;
    struct kvt_posix_pool pool;
};

static struct posix_io *posix_of(struct kvt_io *io)
{
    return (struct posix_io *)io;
}

static bool forked(const struct posix_io *posix)
{
    return getpid() != posix->pid;
}

/* ---- files ---- */

static struct posix_file *file_of(struct posix_io *posix, int file)
{
    if (file < 0 || file >= posix->file_count || posix->files[file].fd < 0)
        return NULL;
    return &posix->files[file];
}

/* A free place in the table, which doubles up to its bound. */
static int free_place(struct posix_io *posix)
{
    struct posix_file *files;
    int old = posix->file_count, count = KVT_MIN(old ? old * 2 : 64, KVT_IO_FILES_MAX);

    for (int i = 0; i < old; i++)
        if (posix->files[i].fd < 0)
            return i;
    if (old == count)
        return -ENFILE;
    files = realloc(posix->files, (size_t)count * sizeof *files);
    if (!files)
        return -ENOMEM;
    for (int i = old; i < count; i++)
        files[i].fd = -1;
    posix->files = files;
    posix->file_count = count;
    return old;
}

static int posix_open(struct kvt_io *io, const char *name, int flags)
{
    struct posix_io *posix = posix_of(io);
    int place, fd;

    if (posix->read_only &&
        (flags & (KVT_IO_OPEN_CREATE | KVT_IO_OPEN_READ_ONLY)) != KVT_IO_OPEN_READ_ONLY)
        return -EROFS;
    place = free_place(posix);
    if (place < 0)
        return place;
    fd = kvt_posix_file_open(posix->dir_fd, name, flags, posix->direct);
    if (fd < 0)
        return fd;
    posix->files[place] = (struct posix_file){.fd = fd, .read_only = flags & KVT_IO_OPEN_READ_ONLY};
    return place;
}

static void posix_close(struct kvt_io *io, int number)
{
    struct posix_file *file = file_of(posix_of(io), number);

    if (!file)
        return;
    close(file->fd);
    file->fd = -1;
}

static int64_t posix_size(struct kvt_io *io, int number)
{
    struct posix_file *file = file_of(posix_of(io), number);
    struct stat st;

    if (!file)
        return -EBADF;
    return fstat(file->fd, &st) < 0 ? -errno : (int64_t)st.st_size;
}

/* Descriptor of a file that may be written, or -EBADF. */
static int writable_fd(struct kvt_io *io, int number)
{
    struct posix_file *file = file_of(posix_of(io), number);

    return file && !file->read_only ? file->fd : -EBADF;
}

static int posix_truncate(struct kvt_io *io, int number, uint64_t bytes)
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

static int posix_allocate(struct kvt_io *io, int number, uint64_t bytes)
{
    struct posix_io *posix = posix_of(io);
    int fd = writable_fd(io, number), rc;
    struct stat before;

    if (fd < 0)
        return fd;
    if (!bytes || bytes > INT64_MAX)
        return -EINVAL;
    if (fstat(fd, &before) < 0)
        return -errno;
    do
        rc = posix->sys->fallocate(fd, 0, 0, (off_t)bytes);
    while (rc < 0 && errno == EINTR);
    if (!rc)
        return 0;
    rc = errno == ENOSYS ? -EOPNOTSUPP : -errno;
    /* a failed reservation may have got part of the way: give that back */
    if ((uint64_t)before.st_size < bytes && ftruncate(fd, before.st_size) < 0)
        return -errno;
    return rc;
}

static int posix_punch(struct kvt_io *io, int number, uint64_t offset, uint64_t bytes)
{
    int fd = writable_fd(io, number);
    uint64_t end;

    if (fd < 0)
        return fd;
    if (offset % KVT_IO_ALIGN || bytes % KVT_IO_ALIGN || !bytes ||
        !kvt_add_ok(offset, bytes, &end) || end > INT64_MAX)
        return -EINVAL;
    return kvt_posix_zero(posix_of(io)->sys, fd, offset, bytes);
}

static int posix_unlink(struct kvt_io *io, const char *name)
{
    if (kvt_io_name_check(name))
        return -EINVAL;
    if (posix_of(io)->read_only)
        return -EROFS;
    return unlinkat(posix_of(io)->dir_fd, name, 0) < 0 ? -errno : 0;
}

static int posix_rename(struct kvt_io *io, const char *from, const char *to)
{
    int dir_fd = posix_of(io)->dir_fd;

    if (kvt_io_name_check(from) || kvt_io_name_check(to))
        return -EINVAL;
    if (posix_of(io)->read_only)
        return -EROFS;
    return renameat(dir_fd, from, dir_fd, to) < 0 ? -errno : 0;
}

static int posix_sync_dir(struct kvt_io *io)
{
    int rc;

    if (posix_of(io)->read_only)
        return 0;
    do
        rc = fsync(posix_of(io)->dir_fd);
    while (rc < 0 && errno == EINTR);
    if (rc < 0 && errno == EINVAL)
        return 0; /* file systems without it have nothing to sync */
    return rc < 0 ? -errno : 0;
}

static int posix_list(struct kvt_io *io, int (*fn)(void *arg, const char *name), void *arg)
{
    /* a description of its own: the offset of dir_fd is nobody's */
    int fd = openat(posix_of(io)->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
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

static int posix_lock(struct kvt_io *io, int64_t *owner_pid)
{
    struct posix_io *posix = posix_of(io);
    int fd;

    if (posix->lock_fd >= 0)
        return 0;
    fd = kvt_posix_lock(posix->dir_fd, posix->read_only, owner_pid);
    if (fd == -ENOENT && posix->read_only)
        return 0; /* never opened by an owner: nobody to keep out */
    if (fd < 0)
        return fd;
    posix->lock_fd = fd;
    return 0;
}

static void posix_info(struct kvt_io *io, struct kvt_io_info *info)
{
    struct posix_io *posix = posix_of(io);
    struct statvfs fs;

    *info = (struct kvt_io_info){.backend = "posix", .why = posix->why, .direct = posix->direct};
    if (!fstatvfs(posix->dir_fd, &fs)) {
        info->free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
        info->total_bytes = (uint64_t)fs.f_blocks * fs.f_frsize;
    }
}

/* ---- data ---- */

static int posix_submit(struct kvt_io *io, struct kvt_io_req *req)
{
    struct posix_io *posix = posix_of(io);
    struct posix_file *file = file_of(posix, req->file);
    int64_t bytes = kvt_io_req_bytes(req);

    if (forked(posix))
        return -EIO;
    if (bytes >= 0 && (!file || (file->read_only && req->kind == KVT_IO_WRITE)))
        bytes = -EBADF;
    return kvt_posix_pool_submit(&posix->pool, req, file ? file->fd : -1, bytes);
}

static unsigned posix_reap(struct kvt_io *io, struct kvt_io_req **out, unsigned max)
{
    struct posix_io *posix = posix_of(io);

    return forked(posix) ? 0 : kvt_posix_pool_reap(&posix->pool, out, max);
}

static int posix_event_fd(struct kvt_io *io)
{
    return posix_of(io)->pool.event_fd;
}

/* ---- life ---- */

static void close_fd(int fd)
{
    if (fd >= 0)
        close(fd);
}

static void posix_destroy(struct kvt_io *io)
{
    struct posix_io *posix = posix_of(io);

    /* the child has no threads, and its copy of the mutex may be locked for ever */
    if (posix->pool_started && !forked(posix))
        kvt_posix_pool_stop(&posix->pool);
    else if (posix->pool_started)
        close_fd(posix->pool.event_fd);
    for (int i = 0; i < posix->file_count; i++)
        close_fd(posix->files[i].fd);
    close_fd(posix->lock_fd); /* the last copy of it unlocks: no explicit unlock, a child would
                                 take the parent's lock away */
    close_fd(posix->dir_fd);
    free(posix->files);
    free(posix);
}

static const struct kvt_io_ops posix_ops = {
    .name = "posix",
    .destroy = posix_destroy,
    .open = posix_open,
    .close = posix_close,
    .size = posix_size,
    .truncate = posix_truncate,
    .allocate = posix_allocate,
    .punch = posix_punch,
    .unlink = posix_unlink,
    .rename = posix_rename,
    .sync_dir = posix_sync_dir,
    .list = posix_list,
    .lock = posix_lock,
    .info = posix_info,
    .submit = posix_submit,
    .reap = posix_reap,
    .event_fd = posix_event_fd,
};

/* Decide between direct and buffered, and say why. */
static int choose_mode(struct posix_io *posix, const struct kvt_io_posix_params *params)
{
    int rc = 0;

    if (params->read_only)
        snprintf(posix->why, sizeof posix->why, "buffered: opened for reading only, not probed");
    else if (!params->direct)
        snprintf(posix->why, sizeof posix->why, "buffered: asked for");
    else
        rc = kvt_posix_probe_direct(posix->dir_fd, posix->why, sizeof posix->why);
    if (rc < 0)
        return rc == -ENOMEM ? rc : KVT_E_READ_ONLY;
    posix->direct = rc;
    if (params->direct == 1 && !posix->direct && !params->read_only) {
        kvt_log(&params->log, KVT_LOG_ERROR, "%s: direct I/O is required, but %s", params->path,
                posix->why);
        return KVT_E_UNSUPPORTED;
    }
    if (params->direct && !posix->direct && !params->read_only)
        kvt_log(&params->log, KVT_LOG_WARN, "%s: %s", params->path, posix->why);
    return 0;
}

int kvt_io_posix_new_sys(const struct kvt_io_posix_params *params, const struct kvt_posix_sys *sys,
                         struct kvt_io **out)
{
    struct posix_io *posix;
    int rc;

    if (params->threads < 1 || params->threads > KVT_POSIX_THREADS_MAX || params->direct < -1 ||
        params->direct > 1)
        return KVT_E_INVAL;
    posix = calloc(1, sizeof *posix);
    if (!posix)
        return -ENOMEM;
    posix->io.ops = &posix_ops;
    posix->sys = sys;
    posix->pid = getpid();
    posix->lock_fd = -1;
    posix->read_only = params->read_only;
    rc = posix->dir_fd = kvt_posix_root_open(params->path, params->read_only, &params->log);
    if (rc >= 0)
        rc = choose_mode(posix, params);
    if (rc >= 0)
        rc = kvt_posix_pool_start(&posix->pool, sys, posix->direct, params->threads);
    posix->pool_started = !rc;
    if (rc < 0) {
        posix_destroy(&posix->io);
        return rc;
    }
    *out = &posix->io;
    return 0;
}

int kvt_io_posix_new(const struct kvt_io_posix_params *params, struct kvt_io **out)
{
    return kvt_io_posix_new_sys(params, &kvt_posix_sys_real, out);
}
