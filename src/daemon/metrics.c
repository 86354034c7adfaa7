/* HTTP as far as a scraper needs it: one connection at a time, GET /metrics, an answer, the end.
 * A peer that is slow or says something else costs its own connection and two seconds at most.
 * Threads: one of its own; start and stop from the main one.
 */
#include "daemon/metrics.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "client/host.h"
#include "client/link.h"
#include "kvtier/error.h"

#define REQUEST_MAX 4096u
#define PATIENCE_S 2

/* Cut "ADDRESS:PORT" in two; brackets around an IPv6 address go. */
static int address_split(const char *text, char *host, size_t len, const char **port)
{
    const char *colon = strrchr(text, ':');
    size_t n = colon == NULL ? 0 : (size_t)(colon - text);
    if (n > 1 && text[0] == '[' && text[n - 1] == ']') {
        text++;
        n -= 2;
    }
    if (n == 0 || n >= len)
        return KVT_E_INVAL;
    memcpy(host, text, n);
    host[n] = '\0';
    *port = colon + 1;
    return 0;
}

static int listen_at(const char *address, int *fd)
{
    const struct addrinfo hints = {.ai_family = AF_UNSPEC,
                                   .ai_socktype = SOCK_STREAM,
                                   .ai_flags = AI_PASSIVE | AI_NUMERICHOST | AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    char host[64];
    const char *port;
    int on = 1;
    if (address_split(address, host, sizeof(host), &port) != 0 ||
        getaddrinfo(host, port, &hints, &found) != 0)
        return KVT_E_INVAL;
    *fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int rc = *fd < 0 ? -errno : 0;
    if (rc == 0)
        (void)setsockopt(*fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (rc == 0 && (bind(*fd, found->ai_addr, found->ai_addrlen) != 0 || listen(*fd, 16) != 0))
        rc = -errno;
    freeaddrinfo(found);
    return rc;
}

static int port_of(int fd)
{
    struct sockaddr_storage at;
    socklen_t len = sizeof(at);
    if (getsockname(fd, (struct sockaddr *)&at, &len) != 0)
        return 0;
    return at.ss_family == AF_INET6 ? ntohs(((struct sockaddr_in6 *)&at)->sin6_port)
                                    : ntohs(((struct sockaddr_in *)&at)->sin_port);
}

static bool on_loopback(int fd)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } at;
    socklen_t len = sizeof(at);
    memset(&at, 0, sizeof(at));
    if (getsockname(fd, &at.any, &len) != 0)
        return false;
    if (at.any.sa_family == AF_INET6)
        return IN6_IS_ADDR_LOOPBACK(&at.v6.sin6_addr);
    return ntohl(at.v4.sin_addr.s_addr) >> 24 == 127;
}

static int64_t now_ns(void)
{
    const struct kvt_clock clock = kvt_clock_system();
    return kvt_clock_now(&clock);
}

/* All of it, unless the peer takes longer than our patience (the limit of the socket is for one
 * call). */
static void send_all(int fd, const char *text, size_t len)
{
    const int64_t end = now_ns() + PATIENCE_S * INT64_C(1000000000);
    while (len > 0 && now_ns() < end) {
        ssize_t n = send(fd, text, len, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return;
        text += n;
        len -= (size_t)n;
    }
}

static void respond(int fd, const char *status, const char *body)
{
    char head[256];
    int n = snprintf(head, sizeof(head),
                     "HTTP/1.1 %s\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                     "Content-Length: %zu\r\nConnection: close\r\n\r\n",
                     status, strlen(body));
    send_all(fd, head, (size_t)n);
    send_all(fd, body, strlen(body));
}

/* The first line and its headers, until the empty line; false: too long, too slow, or gone. */
static bool request_read(int fd, char *text, size_t room)
{
    const int64_t end = now_ns() + PATIENCE_S * INT64_C(1000000000);
    size_t used = 0;
    while (used + 1 < room && now_ns() < end) {
        ssize_t n = recv(fd, text + used, room - used - 1, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        used += (size_t)n;
        text[used] = '\0';
        if (strstr(text, "\r\n\r\n") != NULL || strstr(text, "\n\n") != NULL)
            return true;
    }
    return false;
}

static void serve(struct kvt_metrics *metrics, int fd)
{
    const struct timeval limit = {.tv_sec = PATIENCE_S};
    char request[REQUEST_MAX], why[512], *body = NULL;
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    if (!request_read(fd, request, sizeof(request)))
        return;
    if (strncmp(request, "GET ", 4) != 0) {
        respond(fd, "405 Method Not Allowed", "only GET\n");
    } else if (strncmp(request + 4, "/metrics ", 9) != 0 &&
               strncmp(request + 4, "/metrics?", 9) != 0) {
        respond(fd, "404 Not Found", "the numbers are at /metrics\n");
    } else if (kvt_link_ask(metrics->socket, "metrics", &body, why, sizeof(why)) != 0) {
        respond(fd, "503 Service Unavailable", "the daemon does not answer\n");
    } else {
        respond(fd, "200 OK", body);
    }
    free(body);
}

static void *metrics_main(void *arg)
{
    struct kvt_metrics *metrics = arg;
    struct pollfd fds[2] = {{.fd = metrics->wake_fd, .events = POLLIN},
                            {.fd = metrics->listen_fd, .events = POLLIN}};
    for (;;) {
        if (poll(fds, 2, -1) < 0)
            continue;
        if (fds[0].revents != 0)
            return NULL;
        int fd = accept4(metrics->listen_fd, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0)
            continue;
        serve(metrics, fd);
        (void)close(fd);
    }
}

int kvt_metrics_start(struct kvt_metrics *metrics, const char *address, const char *socket,
                      const struct kvt_log *log, char *error, size_t error_len)
{
    *metrics = (struct kvt_metrics){.listen_fd = -1, .wake_fd = -1};
    (void)snprintf(metrics->socket, sizeof(metrics->socket), "%s", socket);
    metrics->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = metrics->wake_fd < 0 ? -errno : listen_at(address, &metrics->listen_fd);
    if (rc == 0) {
        metrics->port = port_of(metrics->listen_fd);
        rc = kvt_thread_start(&metrics->thread, "kvt-metrics", metrics_main, metrics);
    }
    metrics->running = rc == 0;
    if (rc == 0) {
        kvt_log(log, KVT_LOG_INFO, "metrics: port %d of %s", metrics->port, address);
        if (!on_loopback(metrics->listen_fd))
            kvt_log(log, KVT_LOG_WARN,
                    "metrics: %s is open to other machines, and nobody is asked who he is: use "
                    "127.0.0.1, or a firewall",
                    address);
        return 0;
    }
    (void)snprintf(error, error_len, "metrics: cannot listen at %s: %s", address,
                   rc == KVT_E_INVAL ? "not a numeric address" : kvt_strerror(rc));
    kvt_metrics_stop(metrics);
    return rc;
}

void kvt_metrics_stop(struct kvt_metrics *metrics)
{
    uint64_t one = 1;
    if (metrics->running && write(metrics->wake_fd, &one, sizeof(one)) == sizeof(one))
        pthread_join(metrics->thread, NULL);
    if (metrics->listen_fd >= 0)
        (void)close(metrics->listen_fd);
    if (metrics->wake_fd >= 0)
        (void)close(metrics->wake_fd);
    metrics->running = false;
    metrics->listen_fd = metrics->wake_fd = -1;
}
