/* The root directory of a posix instance: creation, refusals, files and the lock.
 *
 * Invariants: every descriptor is O_CLOEXEC; nothing follows a symbolic link; directories that we
 * make are 0700 and files 0600 whatever the umask; nothing that exists is deleted or has its mode
 * changed; a file of another user is not opened. Threads: the owner. It does not look into files.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "io/io_common.h"
#include "io/io_posix.h"
#include "kvtier/error.h"

/* "The directory cannot be written" has several errnos. */
static int root_error(int error)
{
    if (error == EACCES || error == EPERM || error == EROFS)
        return KVT_E_READ_ONLY;
    return -error;
}

/* Make the new directory's entry in its parent durable; best effort. */
static void sync_parent(int dir_fd)
{
    int parent = kvt_fd_high(openat(dir_fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC));

    if (parent >= 0) {
        (void)fsync(parent);
        close(parent);
    }
}

static int refuse_kind(const char *path)
{
    struct stat st;

    if (lstat(path, &st) < 0)
        return -errno;
    if (S_ISLNK(st.st_mode))
        return KVT_E_SYMLINK;
    return S_ISDIR(st.st_mode) ? 0 : -ENOTDIR;
}

/* Open path, made if need be. No trailing slash is left: "link/" would follow the link. */
static int open_dir(const char *path, int read_only)
{
    int created = 0, dir_fd, rc;

    rc = refuse_kind(path);
    if (rc == -ENOENT && !read_only) {
        if (mkdir(path, 0700) < 0 && errno != EEXIST)
            return root_error(errno);
        created = 1;
        rc = refuse_kind(path);
    }
    if (rc)
        return rc;
    dir_fd = kvt_fd_high(open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (dir_fd < 0 && created && errno == EACCES && !chmod(path, 0700)) /* umask 0777 */
        dir_fd = kvt_fd_high(open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (dir_fd < 0) {
        rc = -errno;
        return rc == -ELOOP ? KVT_E_SYMLINK : rc; /* swapped for a link since lstat() */
    }
    if (created) {
        (void)fchmod(dir_fd, 0700);
        sync_parent(dir_fd);
    }
    return dir_fd;
}

int kvt_posix_root_open(const char *path, int read_only, const struct kvt_log *log)
{
    size_t len = path ? strlen(path) : 0;
    struct stat st;
    char *plain;
    int dir_fd;

    if (!len)
        return -ENOENT;
    plain = strdup(path);
    if (!plain)
        return -ENOMEM;
    while (len > 1 && plain[len - 1] == '/')
        plain[--len] = 0;
    dir_fd = open_dir(plain, read_only);
    free(plain);
    if (dir_fd < 0)
        return dir_fd;
    if (!read_only && faccessat(dir_fd, ".", W_OK | X_OK, AT_EACCESS) < 0) {
        int rc = root_error(errno);
        close(dir_fd);
        return rc;
    }
    if (!fstat(dir_fd, &st) && (st.st_mode & S_IWOTH) && !(st.st_mode & S_ISVTX))
        kvt_log(log, KVT_LOG_WARN, "the directory %s can be written by every user", path);
    return dir_fd;
}

char *kvt_posix_root_path(const char *path)
{
    char *here = path[0] == '/' ? NULL : getcwd(NULL, 0), *whole = NULL;

    if (path[0] == '/')
        return strdup(path);
    if (here && asprintf(&whole, "%s/%s", here, path) < 0)
        whole = NULL;
    free(here);
    return whole;
}

static bool same_file(const struct stat *one, const struct stat *other)
{
    return one->st_dev == other->st_dev && one->st_ino == other->st_ino;
}

static bool is_absent(int error)
{
    return error == ENOENT || error == ENOTDIR;
}

bool kvt_posix_root_left(const char *path, int dir_fd, int lock_fd)
{
    struct stat ours, there;

    if (fstat(dir_fd, &ours))
        return false;
    if (stat(path, &there) ? is_absent(errno) : !same_file(&ours, &there))
        return true;
    if (fstat(lock_fd, &ours))
        return false;
    return fstatat(dir_fd, KVT_POSIX_LOCK_NAME, &there, AT_SYMLINK_NOFOLLOW)
               ? is_absent(errno)
               : !same_file(&ours, &there);
}

/* Whoever may write the directory may have put a file under one of our names; what we write into
 * it would be theirs to read. Ours, or the directory's owner's (a tool run by
 * root), nobody else's. */
static int refuse_owner(int dir_fd, const struct stat *st)
{
    struct stat dir;

    if (st->st_uid == geteuid())
        return 0;
    if (fstat(dir_fd, &dir) < 0)
        return -errno;
    return dir.st_uid == st->st_uid ? 0 : -EPERM;
}

int kvt_posix_file_open(int dir_fd, const char *name, int flags, bool direct)
{
    /* O_NONBLOCK: a FIFO planted under one of our names must not hang the open */
    int mode = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | (direct ? O_DIRECT : 0) |
               (flags & KVT_IO_OPEN_READ_ONLY ? O_RDONLY : O_RDWR);
    struct stat st;
    int fd = -1, created = 0, rc;

    if (kvt_io_name_check(name))
        return -EINVAL;
    if (flags & KVT_IO_OPEN_CREATE) {
        fd = kvt_fd_high(openat(dir_fd, name, mode | O_CREAT | O_EXCL, 0600));
        created = fd >= 0;
        if (fd < 0 && (errno != EEXIST || (flags & KVT_IO_OPEN_EXCLUSIVE)))
            return -errno;
    }
    if (fd < 0)
        fd = kvt_fd_high(openat(dir_fd, name, mode));
    if (fd < 0)
        return -errno;
    rc = fstat(fd, &st) < 0 ? -errno : S_ISREG(st.st_mode) ? 0 : -EINVAL;
    if (!rc && !created && (flags & KVT_IO_OPEN_EXCLUSIVE))
        rc = -EEXIST;
    if (!rc && !created)
        rc = refuse_owner(dir_fd, &st);
    if (!rc && created && (st.st_mode & 07777) != 0600 && fchmod(fd, 0600) < 0)
        rc = -errno;
    if (rc) {
        close(fd);
        return rc;
    }
    return fd;
}

/* The owner's pid, as the lock file says; 0 when it is not known, or when readers hold the lock. */
static int64_t read_pid(int fd)
{
    struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    char text[32];
    ssize_t len;

    if (!fcntl(fd, F_OFD_GETLK, &range) && range.l_type == F_RDLCK)
        return 0;
    len = pread(fd, text, sizeof text - 1, 0);
    if (len <= 0)
        return 0;
    text[len] = 0;
    return strtoll(text, NULL, 10);
}

static int write_pid(int fd)
{
    char text[32];
    int len = snprintf(text, sizeof text, "%lld\n", (long long)getpid());

    if (ftruncate(fd, 0) < 0 || pwrite(fd, text, (size_t)len, 0) != len)
        return -errno;
    return 0;
}

/* Open file description locks belong to the descriptor, so they also keep out a second instance in
 * this process, and a forked child that exits does not drop them. Where the kernel or the file
 * system has none, flock() has the same two properties. */
static int take_lock(int fd, int read_only)
{
    struct flock range = {.l_type = read_only ? F_RDLCK : F_WRLCK, .l_whence = SEEK_SET};

    if (!fcntl(fd, F_OFD_SETLK, &range))
        return 0;
    if (errno == EINVAL || errno == ENOSYS || errno == ENOLCK) {
        if (!flock(fd, (read_only ? LOCK_SH : LOCK_EX) | LOCK_NB))
            return 0;
    }
    return errno == EAGAIN || errno == EACCES || errno == EWOULDBLOCK ? KVT_E_LOCKED : -errno;
}

int kvt_io_posix_held(const char *path)
{
    struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    int dir_fd = kvt_fd_high(open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    int rc = 0, fd;

    if (dir_fd < 0)
        return -errno;
    fd = kvt_fd_high(
        openat(dir_fd, KVT_POSIX_LOCK_NAME, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    close(dir_fd);
    if (fd < 0)
        return errno == ENOENT ? 0 : -errno;
    if (!fcntl(fd, F_OFD_GETLK, &range))
        rc = range.l_type != F_UNLCK;
    else if (flock(fd, LOCK_SH | LOCK_NB)) /* where the system has no such locks: see take_lock() */
        rc = errno == EWOULDBLOCK ? 1 : -errno;
    close(fd);
    return rc;
}

int kvt_posix_lock(int dir_fd, int read_only, int64_t *owner_pid)
{
    int flags = read_only ? KVT_IO_OPEN_READ_ONLY : KVT_IO_OPEN_CREATE;
    int fd = kvt_posix_file_open(dir_fd, KVT_POSIX_LOCK_NAME, flags, false);
    int rc;

    if (owner_pid)
        *owner_pid = 0;
    if (fd < 0)
        return fd == -ELOOP ? KVT_E_SYMLINK : fd;
    rc = take_lock(fd, read_only);
    if (rc == KVT_E_LOCKED && owner_pid)
        *owner_pid = read_pid(fd);
    if (!rc && !read_only)
        (void)write_pid(fd); /* for people only: a full disk must not keep the store closed */
    if (rc) {
        close(fd);
        return rc;
    }
    return fd;
}
