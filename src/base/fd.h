/* Descriptors that are not the program's standard ones.
 *
 * A program that has closed 0, 1 or 2 would give us their numbers: what it prints would go into a
 * file of a root, what it reads would be taken from a socket of ours. So whatever the library opens
 * goes through kvt_fd_high() at once; scripts/lint/banned.py finds what does not. kvtierd and the
 * tool hold the three numbers instead (daemon/standard.h).
 *
 * Not covered: descriptors that other libraries open for themselves (the resolver, OpenSSL's
 * files); around the start of a ring, the CUDA driver and cuFile the numbers are held. Threads:
 * any; between the two calls the low number is in use for a moment.
 */
#ifndef KVT_BASE_FD_H
#define KVT_BASE_FD_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#define KVT_FD_LEAST 3 /* above standard error */

/* What an open() or the like has returned, or the same file under a number of at least
 * KVT_FD_LEAST, close-on-exec; fd is closed then. -1 and errno: fd was -1, or there is no number
 * left (EMFILE). */
__attribute__((warn_unused_result)) static inline int kvt_fd_high(int fd)
{
    if (fd < 0 || fd >= KVT_FD_LEAST)
        return fd;
    int high = fcntl(fd, F_DUPFD_CLOEXEC, KVT_FD_LEAST), error = errno;
    (void)close(fd);
    errno = error;
    return high;
}

/* A file to be read, as of fopen(path, "re"). */
__attribute__((warn_unused_result)) static inline FILE *kvt_fd_fopen(const char *path)
{
    int fd = kvt_fd_high(open(path, O_RDONLY | O_CLOEXEC));
    FILE *file = fd < 0 ? NULL : fdopen(fd, "re");
    if (fd >= 0 && file == NULL)
        (void)close(fd);
    return file;
}

/* A directory to be listed, as of opendir(). */
__attribute__((warn_unused_result)) static inline DIR *kvt_fd_opendir(const char *path)
{
    int fd = kvt_fd_high(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK));
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (fd >= 0 && dir == NULL)
        (void)close(fd);
    return dir;
}

/* Take those of the standard numbers that are free, so that what another library opens for itself
 * gets none of them; by descriptors that nobody can read or write. They are given back by
 * kvt_fd_release(). */
static inline void kvt_fd_hold(int held[KVT_FD_LEAST])
{
    int fd = 0, count = 0;
    while (count < KVT_FD_LEAST && (fd = open("/dev/null", O_PATH | O_CLOEXEC)) >= 0 &&
           fd < KVT_FD_LEAST)
        held[count++] = fd;
    if (fd >= KVT_FD_LEAST)
        (void)close(fd);
    while (count < KVT_FD_LEAST)
        held[count++] = -1;
}

static inline void kvt_fd_release(const int held[KVT_FD_LEAST])
{
    for (int i = 0; i < KVT_FD_LEAST; i++)
        if (held[i] >= 0)
            (void)close(held[i]);
}

#endif
