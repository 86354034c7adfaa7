/* The socket's name. Whoever holds the lock file "PATH.lock" owns the name, so two daemons that
 * start at the same time cannot both find a stale socket and replace each other's. The lock is the
 * kernel's (flock) and ends with its process, however that ends. The lock file goes with the
 * socket, by its owner only.
 * Threads: one.
 */
#include "daemon/listen.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/sock.h"
#include "kvtier/error.h"

#define BACKLOG 128

static int lock_name(const char *path, char *name, size_t len)
{
    return snprintf(name, len, "%s.lock", path) < (int)len ? 0 : KVT_E_LIMIT;
}

/* One of ours is empty and this user's; what else has that name is left alone. */
static bool is_lock(const struct stat *st)
{
    return S_ISREG(st->st_mode) && st->st_size == 0 && st->st_uid == geteuid();
}

/* Lock the lock file. One that its owner removes between our open and our lock does not count:
 * another one is made. 0, KVT_E_LOCKED, KVT_E_SYMLINK (what is there is no lock of ours), -errno.
 */
static int lock_take(const char *name, int *fd)
{
    for (;;) {
        struct stat ours, there;
        *fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
        if (*fd < 0)
            return errno == ELOOP || errno == EISDIR || errno == ENXIO ? KVT_E_SYMLINK : -errno;
        if (fstat(*fd, &ours) != 0 || !is_lock(&ours)) {
            (void)close(*fd);
            *fd = -1;
            return KVT_E_SYMLINK;
        }
        if (flock(*fd, LOCK_EX | LOCK_NB) != 0) {
            int rc = errno == EWOULDBLOCK ? KVT_E_LOCKED : -errno;
            (void)close(*fd);
            *fd = -1;
            return rc;
        }
        if (stat(name, &there) == 0 && ours.st_ino == there.st_ino && ours.st_dev == there.st_dev)
            return 0;
        (void)close(*fd);
    }
}

/* What is at the path: nothing (-ENOENT), or a socket that nobody listens on (0), is ours to take.
 */
static int path_look(const char *path)
{
    struct stat st;
    int fd = -1;
    if (lstat(path, &st) != 0)
        return -errno;
    if (!S_ISSOCK(st.st_mode))
        return KVT_E_NOT_OURS;
    int rc = kvt_sock_connect(path, 1000, &fd);
    if (fd >= 0)
        (void)close(fd);
    if (rc != -ECONNREFUSED) /* somebody listens, also somebody who is no kvtierd */
        return rc == -EACCES ? -EACCES : KVT_E_LOCKED;
    return 0;
}

static int path_free(const char *path)
{
    int rc = path_look(path);
    if (rc != 0)
        return rc == -ENOENT ? 0 : rc;
    return unlink(path) == 0 || errno == ENOENT ? 0 : -errno;
}

static int make_socket(struct kvt_listen *listener, mode_t mode)
{
    struct sockaddr_un address;
    struct stat st;
    int rc = kvt_sock_address(listener->path, &address);
    if (rc != 0)
        return rc;
    listener->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener->fd < 0)
        return -errno;
    /* Linux: the mode of the file is that of the descriptor, so nobody gets in before chmod(). */
    (void)fchmod(listener->fd, 0600);
    if (bind(listener->fd, (const struct sockaddr *)&address, sizeof(address)) != 0 ||
        chmod(listener->path, mode) != 0 || lstat(listener->path, &st) != 0 ||
        listen(listener->fd, BACKLOG) != 0)
        return -errno;
    listener->device = st.st_dev;
    listener->inode = st.st_ino;
    return 0;
}

static void describe(const char *path, int code, char *error, size_t len)
{
    if (code == KVT_E_LOCKED)
        (void)snprintf(error, len,
                       "another kvtierd, or another program, listens at %s: stop it, or give this "
                       "one a socket of its "
                       "own (--socket)",
                       path);
    else if (code == KVT_E_SYMLINK)
        (void)snprintf(error, len,
                       "%s.lock is there and is no lock of kvtierd's (an empty file of this user): "
                       "nothing was touched; remove it, or give the socket another path (--socket)",
                       path);
    else if (code == KVT_E_NOT_OURS)
        (void)snprintf(error, len,
                       "%s is there and is no socket: nothing was touched; give the "
                       "socket another path (--socket)",
                       path);
    else if (code == KVT_E_LIMIT)
        (void)snprintf(error, len,
                       "the path of a socket has at most 107 bytes (102 for kvtierd), \"%.60s...\" "
                       "has %zu: use a shorter one (--socket)",
                       path, strlen(path));
    else if (code == -ENOENT)
        (void)snprintf(error, len,
                       "the directory of %s does not exist: create it first (mkdir -m 700)", path);
    else if (code == -EACCES || code == -EPERM || code == -EROFS)
        (void)snprintf(
            error, len,
            "cannot listen at %s: this user may not write to its directory: change that, "
            "or give the socket another path (--socket)",
            path);
    else
        (void)snprintf(error, len, "cannot listen at %s: %s", path, kvt_strerror(code));
}

int kvt_listen_open(struct kvt_listen *listener, const char *path, mode_t mode, char *error,
                    size_t error_len)
{
    char lock[128];
    *listener = (struct kvt_listen){.fd = -1, .lock_fd = -1};
    int rc = strlen(path) + 5 < sizeof(listener->path) ? lock_name(path, lock, sizeof(lock))
                                                       : KVT_E_LIMIT;
    if (rc == 0) {
        (void)snprintf(listener->path, sizeof(listener->path), "%s", path);
        rc = lock_take(lock, &listener->lock_fd);
    }
    if (rc == 0)
        rc = path_free(path);
    if (rc == 0)
        rc = make_socket(listener, mode);
    if (rc == 0)
        return 0;
    describe(path, rc, error, error_len);
    kvt_listen_close(listener);
    return rc;
}

/* Whether this user may make names in the directory of the path. */
static int directory_look(const char *path)
{
    char directory[sizeof(((struct sockaddr_un *)0)->sun_path)] = ".";
    const char *slash = strrchr(path, '/');
    if (slash != NULL)
        (void)snprintf(directory, sizeof(directory), "%.*s", (int)(slash - path + 1), path);
    return faccessat(AT_FDCWD, directory, W_OK | X_OK, AT_EACCESS) == 0 ? 0 : -errno;
}

int kvt_listen_check(const char *path, char *error, size_t error_len)
{
    char lock[128];
    struct stat st;
    int rc = strlen(path) + 5 < sizeof(((struct kvt_listen *)0)->path)
                 ? lock_name(path, lock, sizeof(lock))
                 : KVT_E_LIMIT;
    if (rc == 0)
        rc = path_look(path);
    if (rc == -ENOENT)
        rc = 0;
    if (rc == 0)
        rc = directory_look(path);
    if (rc == 0 && lstat(lock, &st) == 0 && !is_lock(&st))
        rc = KVT_E_SYMLINK;
    if (rc != 0)
        describe(path, rc, error, error_len);
    return rc;
}

void kvt_listen_close(struct kvt_listen *listener)
{
    char lock[128];
    struct stat st;
    if (listener->fd >= 0)
        (void)close(listener->fd);
    if (listener->lock_fd >= 0) {
        if (listener->inode != 0 && lstat(listener->path, &st) == 0 &&
            st.st_ino == listener->inode && st.st_dev == listener->device)
            (void)unlink(listener->path);
        if (lock_name(listener->path, lock, sizeof(lock)) == 0)
            (void)unlink(lock);
        (void)close(listener->lock_fd);
    }
    listener->fd = listener->lock_fd = -1;
}
