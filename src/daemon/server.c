/* The server's loop: one poll() over the socket, the clients' sockets and the ends of their
 * processes. Sleeps when nothing happens. See server.h, and server_impl.h for a client's states.
 */
#include "daemon/server_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/checked.h"
#include "kvtier/error.h"

#define DRAIN_NS INT64_C(1000000000) /* clients that are told to go have that long to say BYE */
#define SEND_BUFFER (1 << 20)

/* Open those that are missing, as far as there are descriptors. Whether all are there. */
static bool spares_keep(struct kvt_server *server)
{
    bool all = true;
    for (uint32_t i = 0; i < KVT_SPARE_FDS; i++) {
        if (server->spares[i] < 0)
            server->spares[i] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        all = all && server->spares[i] >= 0;
    }
    return all;
}

/* Let one of them go, for an accept(). */
static bool spare_give(struct kvt_server *server)
{
    for (uint32_t i = 0; i < KVT_SPARE_FDS; i++) {
        if (server->spares[i] < 0)
            continue;
        (void)close(server->spares[i]);
        server->spares[i] = -1;
        return true;
    }
    return false;
}

int kvt_server_new(const struct kvt_server_params *params, struct kvt_server **out, char *error,
                   size_t error_len)
{
    struct kvt_server *server = calloc(1, sizeof(*server));
    *out = NULL;
    if (server == NULL)
        return -ENOMEM;
    server->params = *params;
    server->listener = (struct kvt_listen){.fd = -1, .lock_fd = -1};
    server->listen_fd = params->listen_fd;
    for (uint32_t i = 0; i < KVT_SPARE_FDS; i++)
        server->spares[i] = -1;
    pthread_mutex_init(&server->lock, NULL);
    server->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    server->broken_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = server->wake_fd < 0 || server->broken_fd < 0 || !spares_keep(server) ? -errno : 0;
    if (rc == 0 && server->listen_fd < 0) {
        rc = kvt_listen_open(&server->listener, params->path, params->mode, error, error_len);
        server->listen_fd = server->listener.fd;
    }
    if (rc == -EMFILE || rc == -ENFILE)
        (void)snprintf(error, error_len,
                       "no descriptors are left to serve anybody with: raise the limit "
                       "(LimitNOFILE= of the unit, ulimit -Hn)");
    if (rc != 0) {
        kvt_server_free(server);
        return rc;
    }
    *out = server;
    return 0;
}

void kvt_server_free(struct kvt_server *server)
{
    if (server == NULL)
        return;
    if (server->listener.fd < 0 && server->listen_fd >= 0)
        (void)close(server->listen_fd); /* systemd's: its name stays */
    kvt_listen_close(&server->listener);
    if (server->wake_fd >= 0)
        (void)close(server->wake_fd);
    if (server->broken_fd >= 0)
        (void)close(server->broken_fd);
    while (spare_give(server))
        ;
    pthread_mutex_destroy(&server->lock);
    free(server);
}

static void wake(struct kvt_server *server)
{
    uint64_t one = 1;
    ssize_t n = write(server->wake_fd, &one, sizeof(one));
    (void)n; /* full: it is awake already */
}

void kvt_server_allow(struct kvt_server *server, const uid_t *uids, size_t count)
{
    pthread_mutex_lock(&server->lock);
    server->uid_count = KVT_MIN(count, (size_t)KVT_SERVER_UIDS_MAX);
    if (server->uid_count > 0)
        memcpy(server->uids, uids, server->uid_count * sizeof(*uids));
    pthread_mutex_unlock(&server->lock);
    atomic_store_explicit(&server->allowed_others, 1, memory_order_relaxed); /* the lock orders */
    wake(server);
}

void kvt_server_stop(struct kvt_server *server)
{
    atomic_store_explicit(&server->stopping, 1, memory_order_relaxed); /* the write orders it */
    wake(server);
}

size_t kvt_server_clients(const struct kvt_server *server, struct kvt_server_client *out,
                          size_t max)
{
    size_t count = 0;
    for (uint32_t i = 0; i < KVT_PEERS_MAX; i++) {
        const struct kvt_peer *peer = &server->peers[i];
        if (peer->state != KVT_PEER_ENGINE && peer->state != KVT_PEER_BROKEN)
            continue;
        if (count < max) {
            out[count] = (struct kvt_server_client){.number = peer->number,
                                                    .pid = peer->pid,
                                                    .uid = peer->uid,
                                                    .leaving = peer->state == KVT_PEER_BROKEN};
            memcpy(out[count].name, peer->name, sizeof(out[count].name));
        }
        count++;
    }
    return count;
}

void kvt_server_stats(const struct kvt_server *server, struct kvt_server_stats *out)
{
    *out = server->stats;
}

/* ---- the loop ------------------------------------------------------------------------------ */

static int64_t now_of(const struct kvt_server *server)
{
    return kvt_clock_now(&server->params.host->clock);
}

struct turn { /* what is polled, and whose it is */
    struct pollfd fds[3 + 2 * KVT_PEERS_MAX];
    struct kvt_peer *whose[3 + 2 * KVT_PEERS_MAX];
    nfds_t count;
};

enum { AT_WAKE, AT_BROKEN, AT_LISTEN, AT_PEERS };

static void turn_add(struct turn *turn, int fd, short events, struct kvt_peer *whose)
{
    turn->fds[turn->count] = (struct pollfd){.fd = fd, .events = events};
    turn->whose[turn->count++] = whose;
}

/* Fill in what to wait for; returns for how long at most, in milliseconds. */
static int turn_make(struct kvt_server *server, struct turn *turn, bool listening)
{
    int64_t until = INT64_MAX, now = now_of(server);
    turn->count = 0;
    if (listening && server->deaf_until_ns > now) {
        until = server->deaf_until_ns;
        listening = false;
    }
    turn_add(turn, server->wake_fd, POLLIN, NULL);
    turn_add(turn, server->broken_fd, POLLIN, NULL);
    turn_add(turn, listening ? server->listen_fd : -1, POLLIN, NULL);
    for (uint32_t i = 0; i < KVT_PEERS_MAX; i++) {
        struct kvt_peer *peer = &server->peers[i];
        if (peer->state == KVT_PEER_FREE)
            continue;
        if (peer->ticket != 0)
            until = KVT_MIN(until, now + KVT_LATER_NS);
        if (peer->sock >= 0)
            turn_add(turn, peer->sock, peer->answer != NULL ? POLLOUT : POLLIN, peer);
        if (peer->pidfd >= 0)
            turn_add(turn, peer->pidfd, POLLIN, peer);
        until = KVT_MIN(until, peer->until_ns);
    }
    if (until == INT64_MAX)
        return -1;
    return until <= now ? 0 : (int)((until - now) / 1000000) + 1;
}

/* There are no descriptors for a client that wants in: said once, until there are again. */
static void scarce_say(struct kvt_server *server)
{
    struct rlimit limit = {0};
    if (server->scarce)
        return;
    server->scarce = true;
    (void)getrlimit(RLIMIT_NOFILE, &limit);
    kvt_log(&server->params.log, KVT_LOG_WARN,
            "no descriptors are left (the limit is %llu): programs that connect are refused until "
            "there are; raise it (LimitNOFILE= of the unit, ulimit -Hn), or lower fds_max",
            (unsigned long long)limit.rlim_cur);
}

/* -1: nobody more, or nobody now. */
static int accept_one(struct kvt_server *server, bool *spare)
{
    const int flags = SOCK_CLOEXEC | SOCK_NONBLOCK;
    int sock = accept4(server->listen_fd, NULL, NULL, flags);
    *spare = sock < 0 && (errno == EMFILE || errno == ENFILE);
    if (!*spare) {
        server->scarce = server->scarce && sock < 0;
        if (sock < 0 && (errno == ENOMEM || errno == ENOBUFS))
            server->deaf_until_ns = now_of(server) + KVT_DEAF_NS;
        return sock;
    }
    scarce_say(server);
    if (spare_give(server))
        sock = accept4(server->listen_fd, NULL, NULL, flags);
    server->deaf_scarce = sock < 0;
    if (sock < 0) /* they are taken, by others who are told; a socket that stays readable would
                     have us ask again and again */
        server->deaf_until_ns = now_of(server) + KVT_DEAF_NS;
    return sock;
}

static void accept_all(struct kvt_server *server)
{
    for (int i = 0; i < 16; i++) { /* then the others get their turn */
        int size = SEND_BUFFER;
        bool spare;
        int sock = accept_one(server, &spare);
        if (sock < 0)
            return;
        (void)setsockopt(sock, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
        kvt_peer_new(server, sock, spare);
    }
}

static void broken_turn(struct kvt_server *server)
{
    uint64_t rung;
    if (read(server->broken_fd, &rung, sizeof(rung)) < 0)
        return;
    for (uint32_t i = 0; i < KVT_PEERS_MAX; i++) {
        struct kvt_peer *peer = &server->peers[i];
        if (peer->state == KVT_PEER_ENGINE &&
            kvt_owner_broken(server->params.host->owner, peer->number))
            kvt_peer_broke(server, peer);
    }
}

/* Ends of processes first: a pidfd that is readable goes before the socket's last words. */
static void peers_turn(struct kvt_server *server, struct turn *turn)
{
    for (nfds_t i = AT_PEERS; i < turn->count; i++) {
        struct kvt_peer *peer = turn->whose[i];
        if (turn->fds[i].revents == 0 || peer->state == KVT_PEER_FREE)
            continue;
        if (turn->fds[i].fd == peer->pidfd)
            kvt_peer_died(server, peer);
        else if (turn->fds[i].fd == peer->sock && peer->answer != NULL)
            kvt_peer_write(server, peer);
        else if (turn->fds[i].fd == peer->sock)
            kvt_peer_read(server, peer);
    }
    int64_t now = now_of(server);
    for (uint32_t i = 0; i < KVT_PEERS_MAX; i++)
        if (server->peers[i].state != KVT_PEER_FREE && now >= server->peers[i].until_ns)
            kvt_peer_late(server, &server->peers[i]);
}

/* Answers that were put off, to who still waits for them. */
static void later_turn(struct kvt_server *server)
{
    uint64_t ticket;
    char *text;
    bool waiting = false;
    for (uint32_t i = 0; i < KVT_PEERS_MAX; i++)
        waiting = waiting || (server->peers[i].state != KVT_PEER_FREE && server->peers[i].ticket);
    if (!waiting || server->params.later(server->params.answer_ctx, &ticket, &text) != 0)
        return;
    for (uint32_t i = 0; i < KVT_PEERS_MAX; i++) {
        struct kvt_peer *peer = &server->peers[i];
        if (peer->state == KVT_PEER_FREE || peer->ticket != ticket)
            continue;
        kvt_peer_answer(server, peer, text);
        return;
    }
    free(text);
}

static void wake_turn(struct kvt_server *server)
{
    uint64_t rung;
    if (read(server->wake_fd, &rung, sizeof(rung)) < 0 ||
        !atomic_exchange_explicit(&server->allowed_others, 0, memory_order_relaxed))
        return;
    for (uint32_t i = 0; i < KVT_PEERS_MAX; i++)
        if (server->peers[i].state != KVT_PEER_FREE)
            kvt_peer_check(server, &server->peers[i]);
}

static void one_turn(struct kvt_server *server, bool listening, int limit_ms)
{
    struct turn turn;
    int ms = turn_make(server, &turn, listening);
    if (limit_ms >= 0 && (ms < 0 || ms > limit_ms))
        ms = limit_ms;
    if (poll(turn.fds, turn.count, ms) < 0)
        return; /* EINTR: look at everything again */
    if (turn.fds[AT_WAKE].revents != 0)
        wake_turn(server);
    if (turn.fds[AT_BROKEN].revents != 0)
        broken_turn(server);
    peers_turn(server, &turn);
    later_turn(server);
    if (spares_keep(server) && server->deaf_scarce) { /* who went has left some */
        server->deaf_scarce = false;
        server->deaf_until_ns = 0;
    }
    if (listening && turn.fds[AT_LISTEN].revents != 0)
        accept_all(server);
}

/* Tell everybody, wait a moment for those who say BYE, and take everything back. */
static void drain(struct kvt_server *server)
{
    const int64_t end = now_of(server) + DRAIN_NS;
    int64_t left = DRAIN_NS;
    for (uint32_t i = 0; i < KVT_PEERS_MAX; i++)
        if (server->peers[i].state == KVT_PEER_ENGINE)
            kvt_owner_expel(server->params.host->owner, server->peers[i].number);
    while (kvt_server_clients(server, NULL, 0) > 0 && left > 0) {
        one_turn(server, false, (int)(left / 1000000) + 1);
        left = end - now_of(server);
    }
    for (uint32_t i = 0; i < KVT_PEERS_MAX; i++)
        if (server->peers[i].state != KVT_PEER_FREE)
            kvt_peer_end(server, &server->peers[i]);
}

void kvt_server_run(struct kvt_server *server)
{
    while (!atomic_load_explicit(&server->stopping, memory_order_relaxed))
        one_turn(server, true, -1);
    drain(server);
}
