/* See late_proxy.h. One thread, poll(); the lock is over everything but its own descriptors. */
#include "support/late_proxy.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "support/loopback.h"
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

static void shut(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void take_client(struct late_proxy *proxy)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)proxy->server_port),
                             .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
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
        if (!loopback_send(pair->server, bytes, (size_t)got))
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
    } else if (pair->client >= 0 && !loopback_send(pair->client, bytes, (size_t)got)) {
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

    assert_non_null(proxy);
    proxy->server_port = server;
    proxy->listener = loopback_bind(port);
    assert_int_equal(listen(proxy->listener, 16), 0);
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
        if (pair->server >= 0 && !loopback_send(pair->server, pair->kept, pair->kept_len))
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
