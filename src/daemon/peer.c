/* One connection: greeting, rings, and how it ends. See server_impl.h for its states.
 *
 * Slots that a client was filling are taken back only when no thread of it can write any more:
 * after its BYE, or when its process has ended, which a pidfd tells (a socket alone does not: it
 * may live on in a forked child, and it is closed before the last device of a dying process is).
 * Threads: the server's.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/sock.h"
#include "daemon/server_impl.h"
#include "format/message.h"
#include "kvtier/error.h"
#include "kvtier/version.h"

#define RING_BYTES (1u << 20) /* what clients' credits are made for */
#define ANSWER_CHUNK (32u << 10)
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

static int64_t now_of(const struct kvt_server *server)
{
    return kvt_clock_now(&server->params.host->clock);
}

/* ---- who it is ----------------------------------------------------------------------------- */

/* A descriptor that becomes readable when the process behind the socket has ended; -1: not to be
 * had. 0, -EMFILE, -ENFILE: it could be had, and there is none left. */
static int pidfd_of(int sock, pid_t pid, int *fd)
{
    socklen_t len = sizeof(*fd);
    *fd = -1;
    if (getsockopt(sock, SOL_SOCKET, SO_PEERPIDFD, fd, &len) == 0 && *fd >= 0)
        return 0;
    int rc = errno == EMFILE || errno == ENFILE ? -errno : 0;
    *fd = -1;
#ifdef SYS_pidfd_open
    if (rc == 0 && pid > 0)
        *fd = (int)syscall(SYS_pidfd_open, pid, 0u);
    if (rc == 0 && *fd < 0 && (errno == EMFILE || errno == ENFILE))
        rc = -errno;
#endif
    return rc;
}

static bool uid_allowed(struct kvt_server *server, uid_t uid)
{
    bool allowed = uid == 0 || uid == geteuid();
    pthread_mutex_lock(&server->lock);
    for (size_t i = 0; i < server->uid_count; i++)
        allowed = allowed || uid == server->uids[i];
    pthread_mutex_unlock(&server->lock);
    return allowed;
}

static void welcome_make(const struct kvt_server *server, struct kvt_welcome *welcome, int status)
{
    *welcome =
        (struct kvt_welcome){.magic = KVT_HANDSHAKE_MAGIC,
                             .bytes = sizeof(*welcome),
                             .handshake = KVT_HANDSHAKE_VERSION,
                             .proto = KVT_PROTO_VERSION,
                             .record = KVT_RECORD_VERSION,
                             .status = status,
                             .arena_bytes = server->params.host->memory.arena_bytes,
                             .ring_bytes = RING_BYTES,
                             .pid = (uint32_t)getpid(),
                             .now_ns = now_of(server),
                             .flags = server->params.host->memory.huge ? KVT_WELCOME_HUGE : 0};
    (void)snprintf(welcome->version, sizeof(welcome->version), "%s", kvt_version());
}

/* Whether the same process was refused for the same reason lately; else it is noted. */
static bool refused_lately(struct kvt_server *server, const struct kvt_peer *peer, int status)
{
    const int64_t now = now_of(server);
    for (uint32_t i = 0; i < KVT_REFUSALS; i++) {
        const struct kvt_refusal *refusal = &server->refusals[i];
        if (refusal->status == status && refusal->pid == peer->pid && refusal->uid == peer->uid &&
            now - refusal->at_ns < KVT_REFUSAL_NS)
            return true;
    }
    server->refusals[server->refusal_next++ % KVT_REFUSALS] =
        (struct kvt_refusal){peer->pid, peer->uid, status, now};
    return false;
}

/* Say why not, and end. */
__attribute__((format(printf, 4, 5))) static void
refuse(struct kvt_server *server, struct kvt_peer *peer, int status, const char *format, ...)
{
    struct kvt_welcome welcome;
    va_list args;
    welcome_make(server, &welcome, status);
    va_start(args, format);
    (void)vsnprintf(welcome.text, sizeof(welcome.text), format, args);
    va_end(args);
    kvt_log(&server->params.log,
            refused_lately(server, peer, status) ? KVT_LOG_DEBUG : KVT_LOG_WARN,
            "a client (process %d, uid %u) was refused: %s", (int)peer->pid, (unsigned)peer->uid,
            welcome.text);
    int rc = kvt_sock_send(peer->sock, &welcome, sizeof(welcome), NULL, 0);
    (void)rc; /* who does not listen is refused all the same */
    kvt_peer_end(server, peer);
}

static void refuse_scarce(struct kvt_server *server, struct kvt_peer *peer)
{
    server->stats.refused_full++;
    refuse(server, peer, KVT_E_LIMIT,
           "the kvtierd has no descriptors left: raise its limit (LimitNOFILE= of the unit, ulimit "
           "-Hn), or end some of its programs");
}

void kvt_peer_new(struct kvt_server *server, int sock, bool spare)
{
    struct kvt_peer *peer = NULL;
    struct ucred cred = {0};
    socklen_t len = sizeof(cred);
    for (uint32_t i = 0; i < KVT_PEERS_MAX && peer == NULL; i++)
        if (server->peers[i].state == KVT_PEER_FREE)
            peer = &server->peers[i];
    if (peer == NULL) { /* not even a place to say so in */
        server->stats.refused_full++;
        (void)close(sock);
        return;
    }
    *peer = (struct kvt_peer){.state = KVT_PEER_GREETING,
                              .sock = sock,
                              .spare = spare,
                              .pidfd = -1,
                              .wire = {.request_fd = -1, .reply_fd = -1, .broken_fd = -1},
                              .rings = {.fd = -1},
                              .until_ns = now_of(server) + KVT_HELLO_NS};
    bool known = getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &cred, &len) == 0;
    peer->pid = cred.pid;
    peer->uid = cred.uid;
    peer->denied = !known || !uid_allowed(server, cred.uid); /* told so when it has greeted */
    server->stats.accepted += !peer->denied;
    server->stats.refused_peer += peer->denied;
}

/* ---- engines ------------------------------------------------------------------------------- */

static int rings_make(struct kvt_peer *peer)
{
    struct kvt_arena_map *rings = &peer->rings;
    const uint64_t bytes = kvt_round_up(kvt_wire_bytes(RING_BYTES), KVT_PAGE_BYTES);
    rings->fd = memfd_create("kvtier-rings", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (rings->fd < 0 || ftruncate(rings->fd, (off_t)bytes) != 0 ||
        fcntl(rings->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return -errno;
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, rings->fd, 0);
    if (map == MAP_FAILED)
        return -errno;
    rings->map = rings->arena = map;
    rings->map_bytes = rings->arena_bytes = bytes;
    peer->wire.memory = map;
    peer->wire.ring_bytes = RING_BYTES;
    peer->wire.request_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    peer->wire.reply_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return peer->wire.request_fd < 0 || peer->wire.reply_fd < 0 ? -errno : 0;
}

/* Whether the process has connections behind it that still hold something, and may have no more. */
static bool parted_often(const struct kvt_server *server, const struct kvt_peer *peer)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < KVT_PEERS_MAX; i++)
        count += server->peers[i].state == KVT_PEER_BROKEN && server->peers[i].pid == peer->pid &&
                 server->peers[i].uid == peer->uid;
    return count >= (peer->pid > 0 ? KVT_PARTED_MAX : KVT_PARTED_HIDDEN_MAX);
}

static void engine_begin(struct kvt_server *server, struct kvt_peer *peer)
{
    struct kvt_host *host = server->params.host;
    struct kvt_welcome welcome;
    if (parted_often(server, peer)) {
        server->stats.refused_full++;
        refuse(server, peer, KVT_E_LIMIT,
               "earlier connections of this process were broken off and may still write to what "
               "they hold: end the process, and start it again");
        return;
    }
    int rc = peer->spare ? -EMFILE : pidfd_of(peer->sock, peer->pid, &peer->pidfd);
    if (rc == 0)
        rc = rings_make(peer);
    if (rc == 0) {
        peer->wire.broken_fd = server->broken_fd;
        rc = kvt_owner_attach(host->owner, &peer->wire, &peer->number);
    }
    if (rc == KVT_E_LIMIT)
        server->stats.refused_full++;
    if (rc != 0) {
        if (rc == KVT_E_LIMIT)
            refuse(server, peer, rc, "%u clients are connected already: the most there can be",
                   KVT_OWNER_CLIENTS_MAX - 1); /* one is the daemon's own */
        else if (rc == -EMFILE || rc == -ENFILE)
            refuse_scarce(server, peer);
        else
            refuse(server, peer, rc, "%s", kvt_strerror(rc));
        return;
    }
    peer->state = KVT_PEER_ENGINE;
    peer->until_ns = INT64_MAX;
    welcome_make(server, &welcome, 0);
    welcome.client = peer->number;
    welcome.rings_bytes = peer->rings.map_bytes;
    const int fds[KVT_WELCOME_FDS] = {[KVT_FD_ARENA] = host->memory.fd,
                                      [KVT_FD_RINGS] = peer->rings.fd,
                                      [KVT_FD_REQUEST] = peer->wire.request_fd,
                                      [KVT_FD_REPLY] = peer->wire.reply_fd};
    if (kvt_sock_send(peer->sock, &welcome, sizeof(welcome), fds, KVT_WELCOME_FDS) != 0) {
        kvt_peer_end(server, peer); /* it has gone already, and never saw the arena */
        return;
    }
    kvt_log(&server->params.log, KVT_LOG_INFO, "client %u: %s (process %d, uid %u)", peer->number,
            peer->name, (int)peer->pid, (unsigned)peer->uid);
}

/* ---- greeting ------------------------------------------------------------------------------ */

/* A text of a peer's, for logs: printable, and ended. */
static void text_keep(char *out, const char *text, size_t room)
{
    size_t used = 0;
    for (; used + 1 < room && text[used] != '\0'; used++)
        out[used] = text[used] >= ' ' && text[used] <= '~' ? text[used] : '?';
    out[used] = '\0';
}

static void greet(struct kvt_server *server, struct kvt_peer *peer, struct kvt_hello *hello)
{
    struct kvt_welcome welcome;
    char version[sizeof(hello->version)];
    text_keep(peer->name, hello->name, KVT_MIN(sizeof(peer->name), sizeof(hello->name)));
    text_keep(version, hello->version, sizeof(version));
    if (hello->handshake != KVT_HANDSHAKE_VERSION || hello->proto != KVT_PROTO_VERSION ||
        hello->record != KVT_RECORD_VERSION || hello->stats != KVT_STORE_STAT_COUNT) {
        server->stats.refused_version++;
        refuse(server, peer, KVT_E_VERSION,
               "the program (kvtier %.31s) speaks handshake %u, protocol %u, records %u, %u "
               "numbers; the kvtierd (%s) speaks %u, %u, %u, %u: run the same version of both",
               version, hello->handshake, hello->proto, hello->record, hello->stats, kvt_version(),
               KVT_HANDSHAKE_VERSION, KVT_PROTO_VERSION, KVT_RECORD_VERSION,
               (unsigned)KVT_STORE_STAT_COUNT);
        return;
    }
    if (hello->kind == KVT_HELLO_ENGINE) {
        engine_begin(server, peer);
        return;
    }
    if (hello->kind != KVT_HELLO_CONTROL) {
        server->stats.bad_hello++;
        refuse(server, peer, KVT_E_INVAL, "an unknown kind of client");
        return;
    }
    peer->state = KVT_PEER_CONTROL;
    welcome_make(server, &welcome, 0);
    if (kvt_sock_send(peer->sock, &welcome, sizeof(welcome), NULL, 0) != 0)
        kvt_peer_end(server, peer);
}

void kvt_peer_write(struct kvt_server *server, struct kvt_peer *peer)
{
    const size_t len = strlen(peer->answer);
    while (peer->answer_at < len) {
        size_t bytes = KVT_MIN(len - peer->answer_at, (size_t)ANSWER_CHUNK);
        int rc = kvt_sock_send(peer->sock, peer->answer + peer->answer_at, bytes, NULL, 0);
        if (rc == -EAGAIN)
            return; /* when it has read some; not longer than until_ns */
        if (rc != 0)
            break;
        peer->answer_at += bytes;
    }
    kvt_peer_end(server, peer);
}

void kvt_peer_answer(struct kvt_server *server, struct kvt_peer *peer, char *text)
{
    if (text == NULL) {
        kvt_peer_end(server, peer);
        return;
    }
    peer->ticket = 0;
    peer->answer = text;
    peer->answer_at = 0;
    peer->until_ns = now_of(server) + KVT_HELLO_NS;
    kvt_peer_write(server, peer);
}

static void answer(struct kvt_server *server, struct kvt_peer *peer, const char *question)
{
    const struct kvt_asker asker = {
        .ticket = ++server->tickets, .pid = peer->pid, .uid = peer->uid};
    char *text = NULL;
    int rc = server->params.answer == NULL
                 ? KVT_E_UNSUPPORTED
                 : server->params.answer(server->params.answer_ctx, &asker, question, &text);
    if (rc == KVT_ANSWER_LATER) {
        peer->ticket = asker.ticket;
        peer->until_ns = now_of(server) + KVT_LATER_MAX_NS;
        return;
    }
    kvt_peer_answer(server, peer, rc == 0 ? text : NULL);
}

/* More than a packet of ours takes: what it was is gone, but not its sender. */
static void too_long(struct kvt_server *server, struct kvt_peer *peer)
{
    if (peer->state != KVT_PEER_CONTROL) {
        server->stats.bad_hello++;
        refuse(server, peer, KVT_E_VERSION,
               "the first message is longer than any that kvtierd %s knows: run the same version "
               "of both",
               kvt_version());
        return;
    }
    kvt_peer_answer(server, peer, strdup("error: questions have at most 511 bytes\n"));
}

/* ---- ends ---------------------------------------------------------------------------------- */

static void wire_close(struct kvt_peer *peer)
{
    if (peer->wire.request_fd >= 0)
        (void)close(peer->wire.request_fd);
    if (peer->wire.reply_fd >= 0)
        (void)close(peer->wire.reply_fd);
    peer->wire.request_fd = peer->wire.reply_fd = -1;
    kvt_arena_unmap(&peer->rings);
}

/* The socket of an engine has ended without BYE, or it broke the protocol: it gets nothing more,
 * its place is for others, and what it is filling stays its own until its process has ended. */
static void expel(struct kvt_server *server, struct kvt_peer *peer)
{
    if (peer->state == KVT_PEER_ENGINE) {
        kvt_owner_part(server->params.host->owner, peer->number);
        wire_close(peer);
    }
    peer->state = KVT_PEER_BROKEN;
    peer->until_ns = now_of(server) + KVT_DYING_NS;
}

static void sock_ended(struct kvt_server *server, struct kvt_peer *peer)
{
    (void)close(peer->sock);
    peer->sock = -1;
    if (peer->state == KVT_PEER_GREETING || peer->state == KVT_PEER_CONTROL) {
        kvt_peer_end(server, peer);
        return;
    }
    expel(server, peer);
}

void kvt_peer_read(struct kvt_server *server, struct kvt_peer *peer)
{
    union {
        struct kvt_hello hello;
        char text[512];
    } in;
    int bytes = kvt_sock_recv(peer->sock, &in, sizeof(in) - 1, NULL, 0, NULL);
    if (bytes == -EAGAIN || bytes == -EWOULDBLOCK)
        return;
    if (bytes == KVT_E_LIMIT && !peer->denied &&
        (peer->state == KVT_PEER_CONTROL || peer->state == KVT_PEER_GREETING)) {
        too_long(server, peer);
        return;
    }
    if (bytes <= 0) {
        sock_ended(server, peer);
        return;
    }
    if (peer->denied) {
        refuse(server, peer, -EACCES, "user %u is not allowed: add it to allow_uid of the kvtierd",
               (unsigned)peer->uid);
    } else if (peer->ticket != 0) {
        return; /* one question at a time; it waits for the answer */
    } else if (peer->state == KVT_PEER_CONTROL) {
        in.text[bytes] = '\0';
        answer(server, peer, in.text);
    } else if (!kvt_hello_ok(&in.hello, bytes)) {
        server->stats.bad_hello++;
        if (peer->state == KVT_PEER_GREETING)
            refuse(server, peer, KVT_E_VERSION,
                   "the first message is none that kvtierd %s knows: run the same version of both",
                   kvt_version());
        else
            expel(server, peer);
    } else if (peer->state == KVT_PEER_GREETING) {
        greet(server, peer, &in.hello);
    } else if (in.hello.kind == KVT_HELLO_BYE) {
        server->stats.left++;
        kvt_log(&server->params.log, KVT_LOG_INFO, "client %u: gone", peer->number);
        kvt_peer_end(server, peer);
    }
}

void kvt_peer_died(struct kvt_server *server, struct kvt_peer *peer)
{
    struct kvt_hello bye = {0};
    /* It may have said BYE just before. */
    int bytes = peer->sock < 0 ? 0 : kvt_sock_recv(peer->sock, &bye, sizeof(bye), NULL, 0, NULL);
    bool said = kvt_hello_ok(&bye, bytes) && bye.kind == KVT_HELLO_BYE;
    server->stats.left += said;
    server->stats.died += !said;
    kvt_log(&server->params.log, KVT_LOG_INFO, "client %u: %s", peer->number,
            said ? "gone" : "its process has ended");
    kvt_peer_end(server, peer);
}

void kvt_peer_late(struct kvt_server *server, struct kvt_peer *peer)
{
    if (peer->state == KVT_PEER_BROKEN && (peer->pidfd >= 0 || peer->sock >= 0)) {
        kvt_log(&server->params.log, peer->lives_on ? KVT_LOG_DEBUG : KVT_LOG_WARN,
                "client %u: %s (process %d) was disconnected and lives on: memory that it was "
                "filling, if any (dram.parted_bytes), stays its own until it ends",
                peer->number, peer->name, (int)peer->pid);
        peer->lives_on = true;
        peer->until_ns = INT64_MAX;
        return;
    }
    server->stats.died += peer->state == KVT_PEER_BROKEN;
    kvt_peer_end(server, peer);
}

void kvt_peer_broke(struct kvt_server *server, struct kvt_peer *peer)
{
    server->stats.broken++;
    expel(server, peer);
}

void kvt_peer_check(struct kvt_server *server, struct kvt_peer *peer)
{
    if (uid_allowed(server, peer->uid))
        return;
    if (peer->state == KVT_PEER_GREETING)
        peer->denied = true;
    if (peer->state != KVT_PEER_ENGINE)
        return;
    server->stats.refused_peer++;
    kvt_log(&server->params.log, KVT_LOG_WARN,
            "client %u: user %u is not allowed any more: %s (process %d) is disconnected",
            peer->number, (unsigned)peer->uid, peer->name, (int)peer->pid);
    expel(server, peer);
}

void kvt_peer_end(struct kvt_server *server, struct kvt_peer *peer)
{
    if (peer->state == KVT_PEER_ENGINE)
        kvt_owner_detach(server->params.host->owner, peer->number);
    else if (peer->state == KVT_PEER_BROKEN)
        kvt_owner_reclaim(server->params.host->owner, peer->number);
    if (peer->sock >= 0)
        (void)close(peer->sock);
    if (peer->pidfd >= 0)
        (void)close(peer->pidfd);
    wire_close(peer);
    free(peer->answer);
    peer->answer = NULL;
    peer->state = KVT_PEER_FREE;
    peer->sock = peer->pidfd = -1;
}
