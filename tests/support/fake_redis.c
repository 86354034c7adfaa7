/* See fake_redis.h. One thread, poll(); commands without records, so they are short. */
#include "support/fake_redis.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "remote/resp.h"
#include "support/loopback.h"
#include "support/rig.h"

#define PEERS 32u
#define ROOM 65536u

struct peer {
    int fd; /* -1: closed */
    unsigned at;
    size_t len;
    char in[ROOM];
};

struct fake_redis {
    int listeners[FAKE_REDIS_PORTS], ports[FAKE_REDIS_PORTS];
    unsigned count, peer_count;
    struct peer peers[PEERS];
    char words[1024], out[ROOM]; /* of the command that is answered */
    fake_redis_answer *answer;
    void *ctx;
    _Atomic bool stop;
    pthread_t thread;
};

int fake_redis_closed_port(int *fd)
{
    int port;

    *fd = loopback_bind(&port);
    return port;
}

/* An array of strings as words with a space between. */
static void words_of(const char *bytes, size_t len, char *out, size_t room)
{
    struct kvt_resp_head head;
    long used = kvt_resp_head(bytes, len, &head);
    size_t at = used > 0 ? (size_t)used : len, out_len = 0;

    out[0] = '\0';
    for (int64_t i = 0; used > 0 && head.type == '*' && i < head.number; i++) {
        const char *text;
        size_t text_len;

        used = kvt_resp_string(bytes + at, len - at, &text, &text_len);
        if (used <= 0 || out_len + text_len + 2 > room)
            return;
        if (i)
            out[out_len++] = ' ';
        memcpy(out + out_len, text, text_len);
        out_len += text_len;
        out[out_len] = '\0';
        at += (size_t)used;
    }
}

static void peer_turn(struct fake_redis *fake, struct peer *peer)
{
    ssize_t got = recv(peer->fd, peer->in + peer->len, ROOM - peer->len, 0);
    bool good = got > 0;
    long whole;

    peer->len += good ? (size_t)got : 0;
    while (good && (whole = kvt_resp_whole(peer->in, peer->len)) != 0) {
        good = whole > 0;
        if (!good)
            break;
        words_of(peer->in, (size_t)whole, fake->words, sizeof(fake->words));
        fake->answer(fake->ctx, peer->at, fake->words, fake->out, sizeof(fake->out));
        good = loopback_send(peer->fd, fake->out, strlen(fake->out));
        memmove(peer->in, peer->in + whole, peer->len - (size_t)whole);
        peer->len -= (size_t)whole;
    }
    if (!good || peer->len == ROOM) {
        close(peer->fd);
        peer->fd = -1;
    }
}

static void take_client(struct fake_redis *fake, unsigned at)
{
    int fd = accept(fake->listeners[at], NULL, NULL);
    struct peer *peer = NULL;

    for (unsigned i = 0; i < PEERS && !peer; i++)
        if (i == fake->peer_count || fake->peers[i].fd < 0)
            peer = &fake->peers[i];
    if (fd < 0 || !peer) {
        if (fd >= 0)
            close(fd);
        return;
    }
    fake->peer_count += peer == &fake->peers[fake->peer_count];
    peer->fd = fd;
    peer->at = at;
    peer->len = 0;
}

static void *fake_thread(void *arg)
{
    struct fake_redis *fake = arg;

    while (!atomic_load_explicit(&fake->stop, memory_order_relaxed)) {
        struct pollfd fds[FAKE_REDIS_PORTS + PEERS];
        unsigned peers = fake->peer_count;

        for (unsigned i = 0; i < fake->count; i++)
            fds[i] = (struct pollfd){.fd = fake->listeners[i], .events = POLLIN};
        for (unsigned i = 0; i < peers; i++)
            fds[fake->count + i] = (struct pollfd){.fd = fake->peers[i].fd, .events = POLLIN};
        if (poll(fds, fake->count + peers, 10) <= 0)
            continue;
        for (unsigned i = 0; i < peers; i++)
            if (fds[fake->count + i].revents && fake->peers[i].fd >= 0)
                peer_turn(fake, &fake->peers[i]);
        for (unsigned i = 0; i < fake->count; i++)
            if (fds[i].revents)
                take_client(fake, i);
    }
    return NULL;
}

struct fake_redis *fake_redis_start(unsigned ports, fake_redis_answer *answer, void *ctx)
{
    struct fake_redis *fake = calloc(1, sizeof(*fake));

    assert_non_null(fake);
    assert_in_range(ports, 1, FAKE_REDIS_PORTS);
    fake->count = ports;
    fake->answer = answer;
    fake->ctx = ctx;
    for (unsigned i = 0; i < ports; i++) {
        fake->listeners[i] = loopback_bind(&fake->ports[i]);
        assert_int_equal(listen(fake->listeners[i], 16), 0);
    }
    assert_int_equal(pthread_create(&fake->thread, NULL, fake_thread, fake), 0);
    return fake;
}

int fake_redis_port(const struct fake_redis *fake, unsigned at)
{
    return fake->ports[at];
}

void fake_redis_stop(struct fake_redis *fake)
{
    atomic_store_explicit(&fake->stop, true, memory_order_relaxed);
    assert_int_equal(pthread_join(fake->thread, NULL), 0);
    for (unsigned i = 0; i < fake->peer_count; i++)
        if (fake->peers[i].fd >= 0)
            close(fake->peers[i].fd);
    for (unsigned i = 0; i < fake->count; i++)
        close(fake->listeners[i]);
    free(fake);
}
