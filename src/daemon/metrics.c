/* HTTP as far as a scraper needs it: GET or HEAD /metrics, an answer, the end of the connection.
 * A peer that is slow or says something else costs its own connection and nobody's time: several
 * are served side by side, for two seconds each at most.
 * Threads: one of its own; start and stop from the main one.
 */
#include "daemon/metrics.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/checked.h"
#include "client/host.h"
#include "client/link.h"
#include "kvtier/error.h"

#define REQUEST_MAX 65536u /* bytes of a request, of which the first line is kept */
#define LINE_MAX 256u
#define PATIENCE_NS INT64_C(2000000000)
#define CONNS 32
#define DEAF_MS 100

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
    if (rc == 0 && (bind(*fd, found->ai_addr, found->ai_addrlen) != 0 || listen(*fd, 128) != 0))
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

/* ---- one connection ------------------------------------------------------------------------ */

enum { FREE, READING, ANSWERING, DRAINING };

struct conn {
    int fd, state;
    int64_t end_ns;      /* of the peer's patience with us, and ours with it */
    char line[LINE_MAX]; /* the first of the request, as far as it fits */
    size_t line_len, read;
    bool line_done, newline; /* newline: the last byte was one */
    char *out;
    size_t out_len, sent;
};

static void conn_end(struct conn *conn)
{
    (void)close(conn->fd);
    free(conn->out);
    *conn = (struct conn){.fd = -1};
}

static void respond(struct conn *conn, const char *status, const char *body, bool head_only)
{
    static const char head[] =
        "HTTP/1.1 %s\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        "Content-Length: %zu\r\nConnection: close\r\n\r\n%s";
    const size_t room = sizeof(head) + strlen(status) + 20 + strlen(body);
    conn->out = malloc(room);
    if (conn->out == NULL) {
        conn_end(conn);
        return;
    }
    conn->out_len =
        (size_t)snprintf(conn->out, room, head, status, strlen(body), head_only ? "" : body);
    conn->state = ANSWERING;
    conn->end_ns = now_ns() + PATIENCE_NS;
}

/* ---- descriptors ---------------------------------------------------------------------------- */

static void spares_keep(struct kvt_metrics *metrics)
{
    for (size_t i = 0; i < KVT_ARRAY_LEN(metrics->spares); i++)
        if (metrics->spares[i] < 0)
            metrics->spares[i] = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

static bool spare_give(struct kvt_metrics *metrics)
{
    for (size_t i = 0; i < KVT_ARRAY_LEN(metrics->spares); i++) {
        if (metrics->spares[i] < 0)
            continue;
        (void)close(metrics->spares[i]);
        metrics->spares[i] = -1;
        return true;
    }
    return false;
}

static int numbers_ask(struct kvt_metrics *metrics, char **body)
{
    char why[512];
    int rc = kvt_link_ask(metrics->socket, "metrics", body, why, sizeof(why));
    /* more than once: the server takes back those that it lacks, too */
    while ((rc == -EMFILE || rc == -ENFILE) && spare_give(metrics))
        rc = kvt_link_ask(metrics->socket, "metrics", body, why, sizeof(why));
    return rc;
}

static void answer(struct kvt_metrics *metrics, struct conn *conn)
{
    char *body = NULL;
    const bool head = strncmp(conn->line, "HEAD ", 5) == 0;
    const char *path = conn->line + (head ? 5 : 4);
    if (!head && strncmp(conn->line, "GET ", 4) != 0)
        respond(conn, "405 Method Not Allowed", "only GET and HEAD\n", false);
    else if (strncmp(path, "/metrics ", 9) != 0 && strncmp(path, "/metrics?", 9) != 0)
        respond(conn, "404 Not Found", "the numbers are at /metrics\n", head);
    else if (numbers_ask(metrics, &body) != 0)
        respond(conn, "503 Service Unavailable", "the daemon does not answer\n", head);
    else
        respond(conn, "200 OK", body, head);
    free(body);
}

/* The bytes of a request: the first line is kept, headers are passed over. True: it is whole. */
static bool request_take(struct conn *conn, const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        if (text[i] == '\n' && conn->newline)
            return true;
        if (text[i] == '\n')
            conn->line_done = true;
        else if (!conn->line_done && text[i] != '\0' && conn->line_len + 1 < sizeof(conn->line))
            conn->line[conn->line_len++] = text[i];
        if (text[i] != '\r')
            conn->newline = text[i] == '\n';
    }
    conn->read += len;
    return false;
}

static void conn_read(struct kvt_metrics *metrics, struct conn *conn)
{
    char text[2048];
    const ssize_t n = recv(conn->fd, text, sizeof(text), MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return;
    if (n <= 0)
        conn_end(conn);
    else if (conn->state == DRAINING)
        return; /* what is left unread at close would take the answer with it */
    else if (request_take(conn, text, (size_t)n))
        answer(metrics, conn);
    else if (conn->read > REQUEST_MAX)
        respond(conn, "431 Request Header Fields Too Large", "shorter headers, please\n", false);
}

static void conn_write(struct conn *conn)
{
    const ssize_t n = send(conn->fd, conn->out + conn->sent, conn->out_len - conn->sent,
                           MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return;
    if (n < 0) {
        conn_end(conn);
        return;
    }
    conn->sent += (size_t)n;
    if (conn->sent == conn->out_len) {
        (void)shutdown(conn->fd, SHUT_WR);
        conn->state = DRAINING;
    }
}

/* ---- all of them --------------------------------------------------------------------------- */

/* A new connection; when all places are taken the one that has been there longest goes. */
static void conn_begin(struct kvt_metrics *metrics, struct conn conns[CONNS])
{
    struct conn *place = &conns[0];
    int fd = accept4(metrics->listen_fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE) && spare_give(metrics))
        fd = accept4(metrics->listen_fd, NULL, NULL, SOCK_CLOEXEC);
    /* asking again at once would be a loop: the listening socket stays readable */
    metrics->deaf =
        fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS);
    if (fd < 0)
        return;
    for (size_t i = 0; i < CONNS && place->state != FREE; i++)
        if (conns[i].state == FREE || conns[i].end_ns < place->end_ns)
            place = &conns[i];
    if (place->state != FREE)
        conn_end(place);
    *place = (struct conn){.fd = fd, .state = READING, .end_ns = now_ns() + PATIENCE_NS};
}

/* Those whose time is over go. Returns how long the others have, in ms; -1: there are none. */
static int conns_expire(struct conn conns[CONNS])
{
    const int64_t now = now_ns();
    int64_t next = INT64_MAX;
    for (size_t i = 0; i < CONNS; i++) {
        if (conns[i].state != FREE && conns[i].end_ns <= now)
            conn_end(&conns[i]);
        else if (conns[i].state != FREE)
            next = KVT_MIN(next, conns[i].end_ns);
    }
    return next == INT64_MAX ? -1 : (int)((next - now) / 1000000 + 1);
}

static void *metrics_main(void *arg)
{
    struct kvt_metrics *metrics = arg;
    struct conn conns[CONNS];
    struct pollfd fds[2 + CONNS];
    for (size_t i = 0; i < CONNS; i++)
        conns[i] = (struct conn){.fd = -1};
    for (;;) {
        int patience = conns_expire(conns);
        spares_keep(metrics);
        if (metrics->deaf)
            patience = patience < 0 ? DEAF_MS : KVT_MIN(patience, DEAF_MS);
        fds[0] = (struct pollfd){.fd = metrics->wake_fd, .events = POLLIN};
        fds[1] = (struct pollfd){.fd = metrics->deaf ? -1 : metrics->listen_fd, .events = POLLIN};
        metrics->deaf = false;
        for (size_t i = 0; i < CONNS; i++)
            fds[2 + i] = (struct pollfd){.fd = conns[i].fd,
                                         .events = conns[i].state == ANSWERING ? POLLOUT : POLLIN};
        if (poll(fds, 2 + CONNS, patience) < 0)
            continue;
        if (fds[0].revents != 0)
            break;
        for (size_t i = 0; i < CONNS; i++) {
            if (fds[2 + i].revents == 0)
                continue;
            if (conns[i].state == ANSWERING)
                conn_write(&conns[i]);
            else
                conn_read(metrics, &conns[i]);
        }
        if (fds[1].revents != 0)
            conn_begin(metrics, conns);
    }
    for (size_t i = 0; i < CONNS; i++)
        if (conns[i].state != FREE)
            conn_end(&conns[i]);
    while (spare_give(metrics))
        ;
    return NULL;
}

static void describe(const char *address, int code, char *error, size_t error_len)
{
    (void)snprintf(error, error_len, "metrics: cannot listen at %s: %s", address,
                   code == KVT_E_INVAL ? "not a numeric address" : kvt_strerror(code));
}

int kvt_metrics_check(const char *address, char *error, size_t error_len)
{
    int fd = -1, rc = listen_at(address, &fd);
    if (fd >= 0)
        (void)close(fd);
    if (rc != 0)
        describe(address, rc, error, error_len);
    return rc;
}

int kvt_metrics_start(struct kvt_metrics *metrics, const char *address, const char *socket,
                      const struct kvt_log *log, char *error, size_t error_len)
{
    *metrics =
        (struct kvt_metrics){.listen_fd = -1, .wake_fd = -1, .spares = {-1, -1, -1, -1, -1, -1}};
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
    describe(address, rc, error, error_len);
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
