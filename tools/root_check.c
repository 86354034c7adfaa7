/* Asks whether a directory could be a disk root, by the steps of kvt_open() in reading only.
 *
 * Invariants: nothing is made, written or changed; no lock outlives the call; the sentences are
 * the library's own (kvt_root_describe). Threads: one. It says nothing about speed or free space,
 * and promises nothing: another process may come first.
 */
#include "root_check.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/client.h"
#include "io/io.h"
#include "store/l2.h"

int kvt_root_parent(const char *dir, char *parent, size_t room)
{
    size_t len = strlen(dir);

    while (len > 1 && dir[len - 1] == '/')
        len--;
    while (len > 0 && dir[len - 1] != '/')
        len--;
    int n = snprintf(parent, room, "%.*s.", (int)len, dir);
    return n < 0 || (size_t)n >= room ? -ENAMETOOLONG : 0;
}

/* Whether this user may make files in path. */
static int check_writable(const char *path)
{
    if (faccessat(AT_FDCWD, path, W_OK | X_OK, AT_EACCESS) == 0)
        return 0;
    return errno == EACCES || errno == EPERM || errno == EROFS ? KVT_E_READ_ONLY : -errno;
}

static int check_parent(const char *dir)
{
    char parent[PATH_MAX];
    int rc = kvt_root_parent(dir, parent, sizeof(parent));

    if (rc == 0)
        rc = check_writable(parent);
    return rc == 0 ? 1 : rc;
}

static int check_existing(struct kvt_io *io, const char *dir, int64_t *pid)
{
    int rc = check_writable(dir);

    if (rc == 0)
        rc = io->ops->lock(io, pid);
    if (rc == 0)
        rc = kvt_l2_probe(io);
    return rc == 1 ? 0 : rc; /* 1: empty */
}

int kvt_root_check(const char *dir, char why[KVT_ROOT_WHY_MAX])
{
    struct kvt_io_posix_params params = {.path = dir, .threads = 1, .direct = 0, .read_only = 1};
    struct kvt_io *io = NULL;
    int64_t pid = 0;

    why[0] = '\0';
    int rc = kvt_io_posix_new(&params, &io);
    if (rc == 0) {
        rc = check_existing(io, dir, &pid);
        io->ops->destroy(io);
    } else if (rc == -ENOENT) {
        rc = check_parent(dir);
    }
    if (rc < 0)
        kvt_root_describe(dir, 0, rc, pid, why, KVT_ROOT_WHY_MAX);
    return rc;
}

void kvt_root_why(const char *dir, int code, char why[KVT_ROOT_WHY_MAX])
{
    kvt_root_describe(dir, 0, code, 0, why, KVT_ROOT_WHY_MAX);
}
