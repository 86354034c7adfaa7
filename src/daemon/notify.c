/* systemd: see notify.h. sd_notify(3) and sd_listen_fds(3) describe the protocols. */
#include "daemon/notify.h"

#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "kvtier/error.h"

#define FIRST_FD 3

static int notify_fd = -1; /* set before there are threads */

/* $NOTIFY_SOCKET, or NULL: nobody wants to know. */
static const char *notify_path(void)
{
    const char *path = getenv("NOTIFY_SOCKET");
    const size_t room = sizeof(((struct sockaddr_un *)NULL)->sun_path);
    return path && (path[0] == '/' || path[0] == '@') && strlen(path) < room ? path : NULL;
}

void kvt_notify_hold(void)
{
    const struct timeval patience = {.tv_sec = 1}; /* with who does not take its messages */
    if (notify_path() == NULL)
        return;
    notify_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (notify_fd >= 0)
        (void)setsockopt(notify_fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
}

void kvt_notify(const char *state)
{
    const char *path = notify_path();
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char text[256];
    struct timespec now;
    if (path == NULL || notify_fd < 0)
        return;
    memcpy(address.sun_path, path, strlen(path));
    if (path[0] == '@')
        address.sun_path[0] = '\0'; /* an abstract name */
    clock_gettime(CLOCK_MONOTONIC, &now);
    (void)snprintf(text, sizeof(text), "%s\nMONOTONIC_USEC=%lld\nMAINPID=%d", state,
                   (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000, (int)getpid());
    ssize_t n =
        sendto(notify_fd, text, strlen(text), MSG_NOSIGNAL, (const struct sockaddr *)&address,
               (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path)));
    (void)n; /* nobody can be told that nobody could be told */
}

int kvt_passed_socket(void)
{
    const char *pid = getenv("LISTEN_PID"), *count = getenv("LISTEN_FDS");
    int type = 0, listens = 0;
    socklen_t len = sizeof(type);
    if (pid == NULL || count == NULL || strtol(pid, NULL, 10) != (long)getpid())
        return -1;
    long fds = strtol(count, NULL, 10);
    (void)unsetenv("LISTEN_PID");
    (void)unsetenv("LISTEN_FDS");
    if (fds != 1 || getsockopt(FIRST_FD, SOL_SOCKET, SO_TYPE, &type, &len) != 0 ||
        type != SOCK_SEQPACKET ||
        getsockopt(FIRST_FD, SOL_SOCKET, SO_ACCEPTCONN, &listens, &len) != 0 || !listens)
        return KVT_E_INVAL;
    (void)fcntl(FIRST_FD, F_SETFD, FD_CLOEXEC);
    (void)fcntl(FIRST_FD, F_SETFL, fcntl(FIRST_FD, F_GETFL) | O_NONBLOCK);
    return FIRST_FD;
}

int kvt_passed_path(int fd, char *path, size_t len)
{
    struct sockaddr_un address = {.sun_family = AF_UNSPEC};
    socklen_t bytes = sizeof(address);
    if (getsockname(fd, (struct sockaddr *)&address, &bytes) != 0 ||
        address.sun_family != AF_UNIX || bytes <= offsetof(struct sockaddr_un, sun_path) ||
        address.sun_path[0] != '/')
        return KVT_E_INVAL;
    size_t n = strnlen(address.sun_path, bytes - offsetof(struct sockaddr_un, sun_path));
    if (n >= len)
        return KVT_E_INVAL;
    memcpy(path, address.sun_path, n);
    path[n] = '\0';
    return 0;
}
