/* See late_proxy.h. One thread, poll(); the lock is over everything but its own descriptors. */
#include "support/late_proxy.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "support/rig.h"

#define PAIRS 64u
#define KEPT_MAX (1u << 20)

struct pair {
    int client, server; /* -1: closed */
    bool held;
    char *kept;
    size_t kept_len;
};

struct late_proxy {
    int listener, server_port;
    struct pair pairs[PAIRS];
    unsigned count;
    bool stop;
    pthread_mutex_t lock;
    pthread_t thread;
};

static struct sockaddr_in loopback(int port)
{
    return (struct sockaddr_in){.sin_family = AF_INET,
                                .sin_port = htons((uint16_t)port),
                                .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
}

static void shut(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* false: it has gone. */
static bool send_whole(int fd, const char *bytes, size_t len)
{
    while (len) {
        ssize_t sent = send(fd, bytes, len, MSG_NOSIGNAL);

        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            return false;
        bytes += sent;
        len -= (size_t)sent;
    }
    return true;
}

static void take_client(struct late_proxy *proxy)
{
    struct sockaddr_in at = loopback(proxy->server_port);
    int client = accept(proxy->listener, NULL, NULL), server;

    if (client < 0)
        return;
    server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (server < 0 || proxy->count == PAIRS ||
        connect(server, (const struct sockaddr *)&at, sizeof(at)) != 0) {
        shut(&server);
        close(client);
        return;
    }
    proxy->pairs[proxy->count++] = (struct pair){.client = client, .server = server};
}

static void from_client(struct pair *pair)
{
    char bytes[65536];
    ssize_t got = recv(pair->client, bytes, sizeof(bytes), 0);

    if (got <= 0) { /* what is kept stays, and the server does not hear of it */
        shut(&pair->client);
        if (!pair->held)
            shut(&pair->server);
    } else if (!pair->held) {
        if (!send_whole(pair->server, bytes, (size_t)got))
            shut(&pair->server);
    } else if (pair->kept_len + (size_t)got <= KEPT_MAX) {
        memcpy(pair->kept + pair->kept_len, bytes, (size_t)got);
        pair->kept_len += (size_t)got;
    }
}

static void from_server(struct pair *pair)
{
    char bytes[65536];
    ssize_t got = recv(pair->server, bytes, sizeof(bytes), 0);

    if (got <= 0) {
        shut(&pair->server);
        shut(&pair->client);
    } else if (pair->client >= 0 && !send_whole(pair->client, bytes, (size_t)got)) {
        shut(&pair->client);
    }
}

static void *proxy_thread(void *arg)
{
    struct late_proxy *proxy = arg;
    bool stop = false;

    while (!stop) {
        struct pollfd fds[1 + 2 * PAIRS];
        unsigned count;

        pthread_mutex_lock(&proxy->lock);
        count = proxy->count;
        fds[0] = (struct pollfd){.fd = proxy->listener, .events = POLLIN};
        for (unsigned i = 0; i < count; i++) {
            fds[1 + 2 * i] = (struct pollfd){.fd = proxy->pairs[i].client, .events = POLLIN};
            fds[2 + 2 * i] = (struct pollfd){.fd = proxy->pairs[i].server, .events = POLLIN};
        }
        pthread_mutex_unlock(&proxy->lock);
        (void)poll(fds, 1 + 2 * count, 10);
        pthread_mutex_lock(&proxy->lock);
        for (unsigned i = 0; i < count; i++) {
            if (fds[1 + 2 * i].revents && proxy->pairs[i].client == fds[1 + 2 * i].fd)
                from_client(&proxy->pairs[i]);
            if (fds[2 + 2 * i].revents && proxy->pairs[i].server == fds[2 + 2 * i].fd &&
                proxy->pairs[i].server >= 0)
                from_server(&proxy->pairs[i]);
        }
        if (fds[0].revents)
            take_client(proxy);
        stop = proxy->stop;
        pthread_mutex_unlock(&proxy->lock);
    }
    return NULL;
}

struct late_proxy *late_proxy_start(int server, int *port)
{
    struct late_proxy *proxy = calloc(1, sizeof(*proxy));
    struct sockaddr_in at = loopback(0);
    socklen_t len = sizeof(at);

    assert_non_null(proxy);
    proxy->server_port = server;
    proxy->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(proxy->listener, (const struct sockaddr *)&at, sizeof(at)), 0);
    assert_int_equal(listen(proxy->listener, 16), 0);
    assert_int_equal(getsockname(proxy->listener, (struct sockaddr *)&at, &len), 0);
    *port = ntohs(at.sin_port);
    pthread_mutex_init(&proxy->lock, NULL);
    assert_int_equal(pthread_create(&proxy->thread, NULL, proxy_thread, proxy), 0);
    return proxy;
}

void late_proxy_hold(struct late_proxy *proxy)
{
    pthread_mutex_lock(&proxy->lock);
    for (unsigned i = 0; i < proxy->count; i++) {
        proxy->pairs[i].held = proxy->pairs[i].client >= 0;
        if (proxy->pairs[i].held)
            proxy->pairs[i].kept = malloc(KEPT_MAX);
    }
    pthread_mutex_unlock(&proxy->lock);
}

size_t late_proxy_kept(struct late_proxy *proxy)
{
    size_t sum = 0;

    pthread_mutex_lock(&proxy->lock);
    for (unsigned i = 0; i < proxy->count; i++)
        sum += proxy->pairs[i].kept_len;
    pthread_mutex_unlock(&proxy->lock);
    return sum;
}

unsigned late_proxy_release(struct late_proxy *proxy)
{
    unsigned gone = 0;

    pthread_mutex_lock(&proxy->lock);
    for (unsigned i = 0; i < proxy->count; i++) {
        struct pair *pair = &proxy->pairs[i];

        if (!pair->held)
            continue;
        gone += pair->server < 0;
        if (pair->server >= 0 && !send_whole(pair->server, pair->kept, pair->kept_len))
            shut(&pair->server);
        pair->held = false;
        pair->kept_len = 0;
    }
    pthread_mutex_unlock(&proxy->lock);
    return gone;
}

void late_proxy_stop(struct late_proxy *proxy)
{
    pthread_mutex_lock(&proxy->lock);
    proxy->stop = true;
    pthread_mutex_unlock(&proxy->lock);
    assert_int_equal(pthread_join(proxy->thread, NULL), 0);
    for (unsigned i = 0; i < proxy->count; i++) {
        shut(&proxy->pairs[i].client);
        shut(&proxy->pairs[i].server);
        free(proxy->pairs[i].kept);
    }
    close(proxy->listener);
    pthread_mutex_destroy(&proxy->lock);
    free(proxy);
}
