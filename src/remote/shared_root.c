/* ROOT/kvt0 of a shared directory: opened, and opened again when somebody has removed it or put it
 * aside.
 *
 *   removed what is in it        ENOENT for a put      tmp is made again
 *   removed itself, or ROOT      ENOENT for a put      made again, the descriptor is the new one's
 *   another one has its name     seen once a second    the descriptor is the new one's
 *   nothing has its name         seen once a second    nothing is there; a put makes it again
 *   ROOT was a mount, is none    stays an error: the drive below it is not to be filled
 *
 * The new descriptor takes the old one's number (dup3()): whoever is half way goes on in the one or
 * the other, and finds nothing, or puts once more. Threads: any. Blocks as the file system does.
 * Allocates nothing.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "kvtier/error.h"
#include "remote/shared_files.h"

#define LOOK_NS INT64_C(1000000000)

/* What there is now, made where it is not. A descriptor; -errno, and in *below what it is about. */
static int root_open(const struct kvt_shared_files *shared, bool *mounted, const char **below)
{
    struct stat st, up;
    int top = kvt_fd_high(open(shared->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)), root = -1,
        rc = 0;

    *below = "";
    if (top < 0)
        return -errno;
    *mounted = fstat(top, &st) == 0 && fstatat(top, "..", &up, 0) == 0 && st.st_dev != up.st_dev;
    if (shared->mounted && !*mounted)
        rc = -ENODEV;
    else if (mkdirat(top, "kvt0", 0700) != 0 && errno != EEXIST)
        rc = -errno;
    if (!rc) {
        *below = "/kvt0";
        root = kvt_fd_high(openat(top, "kvt0", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
        rc = root < 0 ? -errno : 0;
    }
    if (!rc) {
        *below = "/kvt0/tmp";
        if ((mkdirat(root, "tmp", 0700) != 0 && errno != EEXIST) ||
            fstatat(root, "tmp", &st, AT_SYMLINK_NOFOLLOW) != 0)
            rc = -errno;
        else if (!S_ISDIR(st.st_mode))
            rc = -ENOTDIR;
    }
    (void)close(top);
    if (!rc)
        return root;
    if (root >= 0)
        (void)close(root);
    return rc;
}

int kvt_shared_root_open(struct kvt_shared_files *shared, const char *path, char *error,
                         size_t error_len)
{
    const char *below;
    bool mounted;
    int fd;

    shared->root = -1;
    if (strlen(path) >= sizeof(shared->path)) {
        (void)snprintf(error, error_len, "remote: a path of at most %zu bytes",
                       sizeof(shared->path) - 1);
        return -ENAMETOOLONG;
    }
    memcpy(shared->path, path, strlen(path) + 1);
    fd = root_open(shared, &mounted, &below);
    if (fd < 0) {
        (void)snprintf(error, error_len,
                       "remote: the directory %.200s%s cannot be used: %s (it must be there, a "
                       "directory and no link, and be writable by this user)",
                       path, below, strerror(-fd));
        return fd;
    }
    shared->mounted = mounted;
    shared->root = fd;
    atomic_init(&shared->look_ns, kvt_clock_now(&shared->clock) + LOOK_NS);
    return 0;
}

static bool same(int a, int b)
{
    struct stat one, other;

    return fstat(a, &one) == 0 && fstat(b, &other) == 0 && one.st_dev == other.st_dev &&
           one.st_ino == other.st_ino;
}

int kvt_shared_root_again(struct kvt_shared_files *shared)
{
    const char *below;
    bool mounted;
    int fd, rc = 0;

    pthread_mutex_lock(&shared->root_lock);
    fd = root_open(shared, &mounted, &below);
    if (fd < 0) {
        rc = fd;
    } else if (!same(fd, shared->root) && dup3(fd, shared->root, O_CLOEXEC) < 0) {
        rc = -errno;
    } else if (!shared->again_told) {
        kvt_log(&shared->log, KVT_LOG_WARN,
                "remote: %s/kvt0, or what was in it, was removed by somebody: it goes on with what "
                "is there now",
                shared->path);
        shared->again_told = true;
    }
    if (fd >= 0)
        (void)close(fd);
    pthread_mutex_unlock(&shared->root_lock);
    return rc;
}

/* Whether it is time, for one of all that ask. While it has gone it always is. */
static bool look_due(struct kvt_shared_files *shared, enum kvt_remote_op op)
{
    int64_t now_ns = kvt_clock_now(&shared->clock);
    int64_t due_ns = atomic_load_explicit(&shared->look_ns, memory_order_relaxed);

    if (op == KVT_REMOTE_DROP || op == KVT_REMOTE_DROP_NS ||
        atomic_load_explicit(&shared->away, memory_order_relaxed))
        return true;
    return now_ns >= due_ns &&
           atomic_compare_exchange_strong_explicit(&shared->look_ns, &due_ns, now_ns + LOOK_NS,
                                                   memory_order_relaxed, memory_order_relaxed);
}

/* Nothing has the name. 0 nothing is there, then; -ENODEV it was a mount, and is none. */
static int missing(const struct kvt_shared_files *shared)
{
    char up[sizeof(shared->path) + 8];
    struct stat here, above;

    (void)snprintf(up, sizeof(up), "%s/..", shared->path);
    return shared->mounted && stat(shared->path, &here) == 0 && stat(up, &above) == 0 &&
                   here.st_dev == above.st_dev
               ? -ENODEV
               : KVT_E_MISS;
}

int kvt_shared_root_look(struct kvt_shared_files *shared, enum kvt_remote_op op)
{
    char name[sizeof(shared->path) + 8];
    struct stat there, ours;
    int rc = 0, err;

    if (!look_due(shared, op))
        return 0;
    (void)snprintf(name, sizeof(name), "%s/kvt0", shared->path);
    err = lstat(name, &there) == 0 ? 0 : errno;
    if (err && err != ENOENT)
        return 0; /* the request will say why */
    if (err && op != KVT_REMOTE_PUT)
        rc = missing(shared);
    else if (err || fstat(shared->root, &ours) != 0 || there.st_dev != ours.st_dev ||
             there.st_ino != ours.st_ino)
        rc = kvt_shared_root_again(shared);
    atomic_store_explicit(&shared->away, rc != 0, memory_order_relaxed);
    return rc;
}
