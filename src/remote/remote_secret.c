/* Files that options name. See remote_secret.h. Blocks: as the file system does, never for a FIFO's
 * other end. */
#include "remote/remote_secret.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"

/* Why a name is not one of a file; 0: it is. */
static int kind_of(const struct stat *st)
{
    if (S_ISDIR(st->st_mode))
        return -EISDIR;
    return S_ISREG(st->st_mode) ? 0 : -EINVAL;
}

static void say(int rc, const char *option, const char *path, char *error, size_t error_len)
{
    if (rc == -EISDIR)
        (void)snprintf(error, error_len, "%s: %.200s is a directory: name a file", option, path);
    else if (rc == -EINVAL)
        (void)snprintf(error, error_len, "%s: %.200s is a FIFO, a socket or a device: name a file",
                       option, path);
    else
        (void)snprintf(error, error_len, "%s: %.200s: %s", option, path, strerror(-rc));
}

ssize_t kvt_remote_secret_read(const char *option, const char *path, void *out, size_t room,
                               char *error, size_t error_len)
{
    struct stat st;
    ssize_t got = 0;
    bool open_to_others = false;
    int rc, fd = kvt_fd_high(open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK));

    rc = fd < 0 || fstat(fd, &st) != 0 ? -errno : kind_of(&st);
    if (rc == -ENXIO)
        rc = -EINVAL; /* a socket, or a device that nobody drives */
    if (rc == 0)
        open_to_others = (st.st_mode & 077) != 0;
    if (rc == 0 && !open_to_others)
        got = read(fd, out, room);
    if (got < 0)
        rc = -errno;
    if (fd >= 0)
        (void)close(fd);
    if (open_to_others) {
        (void)snprintf(error, error_len, "%s: others may read %.200s: chmod 600 %.200s", option,
                       path, path);
        return -EACCES;
    }
    if (rc == 0)
        return got;
    say(rc, option, path, error, error_len);
    return rc;
}

int kvt_remote_file_check(const char *option, const char *path, char *error, size_t error_len)
{
    struct stat st;
    int rc = stat(path, &st) != 0 ? -errno : kind_of(&st);

    if (rc != 0)
        say(rc, option, path, error, error_len);
    return rc;
}
