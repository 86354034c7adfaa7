/* Unix sockets with message borders and descriptors: see sock.h. */
#include "base/sock.h"
#include "base/fd.h"

#include <errno.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include "kvtier/error.h"

int kvt_sock_address(const char *path, struct sockaddr_un *out)
{
    size_t len = strlen(path);

    memset(out, 0, sizeof(*out));
    out->sun_family = AF_UNIX;
    if (len == 0 || len >= sizeof(out->sun_path))
        return KVT_E_LIMIT;
    memcpy(out->sun_path, path, len);
    return 0;
}

int kvt_sock_connect(const char *path, int timeout_ms, int *fd)
{
    struct timeval limit = {timeout_ms / 1000, (timeout_ms % 1000) * 1000L};
    struct sockaddr_un address;
    int err = kvt_sock_address(path, &address);

    *fd = -1;
    if (err)
        return err;
    *fd = kvt_fd_high(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (*fd < 0)
        return -errno;
    (void)setsockopt(*fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    (void)setsockopt(*fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    if (connect(*fd, (const struct sockaddr *)&address, sizeof(address)) == 0)
        return 0;
    err = -errno;
    (void)close(*fd);
    *fd = -1;
    return err;
}

int kvt_sock_send(int fd, const void *data, size_t bytes, const int *fds, size_t count)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(KVT_SOCK_FDS_MAX * sizeof(int))];
    } control;
    struct iovec piece = {(void *)data, bytes};
    struct msghdr msg = {.msg_iov = &piece, .msg_iovlen = 1};
    ssize_t sent;

    if (count > KVT_SOCK_FDS_MAX)
        return KVT_E_INVAL;
    if (count > 0) {
        memset(&control, 0, sizeof(control));
        msg.msg_control = control.bytes;
        msg.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&msg);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(header), fds, count * sizeof(int));
    }
    do
        sent = sendmsg(fd, &msg, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -errno : 0;
}

/* Take the descriptors of a message; those without a place are closed. */
static size_t take_fds(struct msghdr *msg, int *fds, size_t fds_max)
{
    size_t taken = 0;

    for (struct cmsghdr *header = CMSG_FIRSTHDR(msg); header != NULL;
         header = CMSG_NXTHDR(msg, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
            fd = kvt_fd_high(fd);
            if (fd < 0)
                continue; /* there are too few for the caller then, who looks */
            if (taken < fds_max)
                fds[taken++] = fd;
            else
                (void)close(fd);
        }
    }
    return taken;
}

int kvt_sock_recv(int fd, void *data, size_t room, int *fds, size_t fds_max, size_t *fds_count)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(KVT_SOCK_FDS_MAX * sizeof(int))];
    } control;
    struct iovec piece = {data, room};
    struct msghdr msg = {.msg_iov = &piece,
                         .msg_iovlen = 1,
                         .msg_control = control.bytes,
                         .msg_controllen = sizeof(control.bytes)};
    ssize_t got;

    if (fds_count)
        *fds_count = 0;
    do
        got = recvmsg(fd, &msg, MSG_CMSG_CLOEXEC);
    while (got < 0 && errno == EINTR);
    if (got < 0)
        return -errno;
    size_t taken = take_fds(&msg, fds, fds_max);
    if (fds_count)
        *fds_count = taken;
    if (!(msg.msg_flags & MSG_TRUNC))
        return (int)got;
    for (size_t i = 0; i < taken; i++)
        (void)close(fds[i]);
    if (fds_count)
        *fds_count = 0;
    return KVT_E_LIMIT;
}
