/* One connection to a node: connect, TLS, log in, send what is queued, receive.
 *
 *   CLOSED -> CONNECTING -> TLS (rediss://) -> LOGIN: AUTH .. PING -> READY
 *      ^           |          |                  |                   |
 *      `-----------+----------+------------------+-------------------'  error, end of file,
 * deadline
 *
 * Everything is non-blocking, but the look-up of a host's name, which may take as long as the
 * resolver does: give addresses where that matters. The password is read from its file at each
 * connect, so a new one needs no restart. Threads: the backend's.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <openssl/err.h>
#include <openssl/ssl.h>

#include "base/checked.h"
#include "base/fd.h"
#include "base/sock.h"
#include "kvtier/error.h"
#include "remote/redis_impl.h"
#include "remote/remote_secret.h"

#define BLOCKED (-2L)
#define FAILED (-1L)

__attribute__((format(printf, 2, 3))) static void say(struct redis_conn *conn, const char *format,
                                                      ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(conn->why, sizeof(conn->why), format, args);
    va_end(args);
}

/* ---- TLS ----------------------------------------------------------------------------------- */

int redis_tls_init(struct redis *redis, char *error, size_t error_len)
{
    SSL_CTX *ctx;
    int ok, rc;

    if (redis->ca_file[0]) {
        rc = kvt_remote_file_check("remote_ca", redis->ca_file, error, error_len);
        if (rc)
            return rc;
    }
    ctx = SSL_CTX_new(TLS_client_method());
    ok = ctx != NULL;
    redis->tls = ctx;
    if (ok) {
        (void)SSL_CTX_set_min_proto_version(ctx, TLS1_2_VERSION);
        SSL_CTX_set_verify(ctx, SSL_VERIFY_PEER, NULL);
        (void)SSL_CTX_set_mode(ctx,
                               SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
        ok = redis->ca_file[0] ? SSL_CTX_load_verify_locations(ctx, redis->ca_file, NULL)
                               : SSL_CTX_set_default_verify_paths(ctx);
    }
    ERR_clear_error();
    if (ok)
        return 0;
    (void)snprintf(error, error_len, "remote_ca: %.300s holds no certificates that can be read",
                   redis->ca_file[0] ? redis->ca_file : "the system's store");
    return KVT_E_CONFIG_VALUE;
}

void redis_tls_free(struct redis *redis)
{
    SSL_CTX_free(redis->tls);
    redis->tls = NULL;
}

/* Why TLS has failed, for people: OpenSSL knows, and what to do about it we do. */
static void tls_why(struct redis_conn *conn)
{
    long verdict = SSL_get_verify_result(conn->tls);
    const char *reason = ERR_reason_error_string(ERR_peek_error());

    if (verdict == X509_V_ERR_HOSTNAME_MISMATCH || verdict == X509_V_ERR_IP_ADDRESS_MISMATCH)
        say(conn, "has a certificate for another name (give the one that is in it)");
    else if (verdict != X509_V_OK)
        say(conn, "has a certificate that is not trusted: %s (set remote_ca=FILE to its authority)",
            X509_verify_cert_error_string(verdict));
    else if (conn->state == CONN_TLS)
        say(conn, "does not speak TLS with us: %s (without TLS it is redis://)",
            reason ? reason : "it closed the connection");
    else if (reason)
        say(conn, "ends the connection: %s", reason);
}

/* What a TLS call that did not succeed means; what it waits for is noted. */
static long tls_result(struct redis_conn *conn, int rc)
{
    int why = SSL_get_error(conn->tls, rc);

    if (why != SSL_ERROR_WANT_READ && why != SSL_ERROR_WANT_WRITE)
        tls_why(conn);
    ERR_clear_error();
    conn->wants = why == SSL_ERROR_WANT_READ ? POLLIN : why == SSL_ERROR_WANT_WRITE ? POLLOUT : 0;
    return conn->wants ? BLOCKED : FAILED;
}

/* The name that the certificate must be for. */
static bool tls_start(struct redis *redis, struct redis_conn *conn)
{
    const char *host = conn->node->at.host;
    struct in6_addr address;
    SSL *ssl = SSL_new(redis->tls);
    bool numeric =
        inet_pton(AF_INET, host, &address) == 1 || inet_pton(AF_INET6, host, &address) == 1;

    conn->tls = ssl;
    conn->state = CONN_TLS;
    if (ssl == NULL || SSL_set_fd(ssl, conn->fd) != 1)
        return false;
    if (numeric)
        return X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), host) == 1;
    return SSL_set1_host(ssl, host) == 1 && SSL_set_tlsext_host_name(ssl, host) == 1;
}

/* ---- bytes --------------------------------------------------------------------------------- */

#define PIECES 3u /* what lies ready at a time: text, a record, what is behind it */

/* One call for all of them, so that a server is not woken for each. TLS: the first one. */
static long conn_send(struct redis_conn *conn, struct iovec iov[PIECES])
{
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = PIECES};
    ssize_t sent;

    if (conn->tls) {
        while (!iov->iov_len)
            iov++;
        sent = SSL_write(conn->tls, iov->iov_base, (int)KVT_MIN(iov->iov_len, (size_t)1 << 20));
        return sent > 0 ? sent : tls_result(conn, (int)sent);
    }
    sent = sendmsg(conn->fd, &message, MSG_NOSIGNAL);
    if (sent >= 0)
        return sent;
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? BLOCKED : FAILED;
}

/* Into two places, one after the other. */
static long conn_recv(struct redis_conn *conn, void *first, size_t first_len, void *second,
                      size_t second_len)
{
    struct iovec iov[2] = {{.iov_base = first, .iov_len = first_len},
                           {.iov_base = second, .iov_len = second_len}};
    ssize_t got;

    if (conn->tls) {
        int rc = first_len ? SSL_read(conn->tls, first, (int)KVT_MIN(first_len, (size_t)1 << 20))
                           : SSL_read(conn->tls, second, (int)KVT_MIN(second_len, (size_t)1 << 20));

        return rc > 0 ? rc : tls_result(conn, rc);
    }
    got = first_len ? readv(conn->fd, iov, 2) : recv(conn->fd, second, second_len, 0);
    if (got > 0)
        return got;
    return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) ? BLOCKED
                                                                                  : FAILED;
}

/* ---- connect and close --------------------------------------------------------------------- */

static void say_errno(struct redis_conn *conn, int err)
{
    say(conn, "cannot be connected to: %s", strerror(err));
}

static int connect_to(struct redis_conn *conn)
{
    const struct kvt_remote_seed *at = &conn->node->at;
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    struct sockaddr_un local;
    int one = 1, fd, rc;

    if (!at->port[0]) {
        if (kvt_sock_address(at->host, &local)) {
            say_errno(conn, ENAMETOOLONG);
            return -1;
        }
        fd = kvt_fd_high(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (fd >= 0 && connect(fd, (const struct sockaddr *)&local, sizeof(local)) == 0)
            return fd;
        say_errno(conn, errno);
    } else {
        rc = getaddrinfo(at->host, at->port, &hints, &found);
        if (rc != 0) {
            say(conn, "is a name that nobody knows: %s", gai_strerror(rc));
            return -1;
        }
        fd = kvt_fd_high(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (fd >= 0)
            (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
        if (fd >= 0 &&
            (connect(fd, found->ai_addr, found->ai_addrlen) == 0 || errno == EINPROGRESS)) {
            freeaddrinfo(found);
            return fd;
        }
        say_errno(conn, errno);
        freeaddrinfo(found);
    }
    if (fd >= 0)
        (void)close(fd);
    return -1;
}

void redis_conn_start(struct redis *redis, struct redis_conn *conn)
{
    conn->since_ns = conn->received_ns = redis->now_ns;
    conn->why[0] = '\0';
    conn->told = false;
    conn->fd = connect_to(conn);
    if (conn->fd < 0) {
        (void)atomic_fetch_add_explicit(&redis->losses, 1, memory_order_relaxed);
        redis_node_failed(redis, conn->node, conn->why);
        return;
    }
    conn->state = CONN_CONNECTING;
}

/* SETs that may have reached the server, and may be carried out at any time from now on. */
static void note_fence(struct redis *redis, const struct redis_conn *conn)
{
    const struct redis_op *op = conn->sent.head;

    while (op && op->kind != REDIS_SET)
        op = op->next;
    if (op && conn->id)
        conn->node->fence_id = conn->id;
    else if (op)
        redis_unfenced(redis, conn->node); /* CLIENT ID was refused */
}

/* An operation whose connection is lost. */
static void lost(struct redis *redis, struct redis_op *op, int status)
{
    if (status == KVT_E_CLOSED || !redis_to_master(redis, op))
        redis_op_end(redis, op, status);
}

void redis_conn_close(struct redis *redis, struct redis_conn *conn, int status, bool failed)
{
    struct redis_list queue = conn->queue, sent = conn->sent;
    struct redis_op *op;

    note_fence(redis, conn);
    if (!conn->why[0] && conn->state == CONN_TLS)
        say(conn, "says nothing in TLS (without TLS it is redis://)");
    conn->id = 0;
    SSL_free(conn->tls);
    if (conn->fd >= 0)
        (void)close(conn->fd);
    conn->fd = -1;
    conn->tls = NULL;
    conn->state = CONN_CLOSED;
    conn->wants = 0;
    conn->queue = conn->sent = (struct redis_list){NULL, NULL};
    conn->out_at = conn->out_len = conn->in_at = conn->in_len = 0;
    conn->tail_at = conn->tail_len = 0;
    conn->body_left = 0;
    conn->body_op = NULL;
    conn->in_body = false;
    conn->agg = NULL;
    if (failed) {
        (void)atomic_fetch_add_explicit(&redis->losses, 1, memory_order_relaxed);
        redis_node_failed(redis, conn->node,
                          conn->told     ? NULL
                          : conn->why[0] ? conn->why
                                         : "does not answer");
        for (int lane = 0; lane < LANES; lane++) /* they would find out one by one */
            if (conn->node->conns[lane] && conn->node->conns[lane]->state != CONN_CLOSED)
                redis_conn_close(redis, conn->node->conns[lane], -EHOSTDOWN, false);
    }
    while ((op = redis_pop(&sent)) != NULL)
        lost(redis, op,
             op->deadline_ns && op->deadline_ns <= redis->now_ns ? KVT_E_DEADLINE : status);
    while ((op = redis_pop(&queue)) != NULL)
        lost(redis, op, status == KVT_E_DEADLINE ? -EHOSTDOWN : status);
}

/* ---- turns --------------------------------------------------------------------------------- */

short redis_conn_events(const struct redis_conn *conn)
{
    bool more = conn->out_len > conn->out_at || conn->body_left || conn->tail_len > conn->tail_at ||
                (conn->state == CONN_READY && conn->queue.head);

    if (conn->state == CONN_CONNECTING)
        return POLLOUT;
    if (conn->state == CONN_TLS)
        return (short)(conn->wants ? conn->wants : POLLOUT);
    return (short)(POLLIN | (more ? POLLOUT : 0) | conn->wants);
}

/* Queued commands become text. */
static void encode_queue(struct redis *redis, struct redis_conn *conn)
{
    /* a record follows its command: nothing is added behind it before it is out */
    while (conn->state == CONN_READY && !conn->body_op && conn->queue.head) {
        struct redis_op *op = conn->queue.head;

        if (!redis_encode(redis, conn, op)) {
            if (conn->out_len) /* it was full */
                break;
            redis_op_end(redis, redis_pop(&conn->queue), -EIO);
            continue;
        }
        (void)redis_pop(&conn->queue);
        op->sent_ns = redis->now_ns;
        redis_push(&conn->sent, op);
    }
}

/* What of the pieces has not been sent yet. */
static size_t pieces(struct redis_conn *conn, struct iovec iov[PIECES])
{
    iov[0] = (struct iovec){conn->out + conn->out_at, conn->out_len - conn->out_at};
    iov[1] = (struct iovec){(void *)(uintptr_t)conn->body, conn->body_left};
    iov[2] = (struct iovec){conn->tail + conn->tail_at, conn->tail_len - conn->tail_at};
    return iov[0].iov_len + iov[1].iov_len + iov[2].iov_len;
}

static void sent_of_pieces(struct redis_conn *conn, size_t sent)
{
    size_t part = KVT_MIN(sent, conn->out_len - conn->out_at);

    conn->out_at += part;
    sent -= part;
    part = KVT_MIN(sent, conn->body_left);
    if (part)
        conn->body += part;
    conn->body_left -= part;
    conn->tail_at += sent - part;
}

/* Send what there is, and turn queued commands into text. false: the connection is lost. */
static bool send_all(struct redis *redis, struct redis_conn *conn)
{
    for (;;) {
        struct iovec iov[PIECES];
        long sent;

        encode_queue(redis, conn);
        if (pieces(conn, iov) == 0) {
            conn->out_at = conn->out_len = conn->tail_at = conn->tail_len = 0;
            conn->body_op = NULL;
            if (!conn->queue.head || conn->state != CONN_READY)
                return true;
            continue;
        }
        sent = conn_send(conn, iov);
        if (sent == BLOCKED)
            return true;
        if (sent < 0)
            return false;
        sent_of_pieces(conn, (size_t)sent);
    }
}

/* Of what has just come in: the part of a body that lies in `in`. */
static void take_body(struct redis_conn *conn)
{
    size_t have = conn->in_len - conn->in_at;
    size_t part = KVT_MIN(have, conn->into_left);

    if (conn->into && part) {
        memcpy(conn->into, conn->in + conn->in_at, part);
        conn->into += part;
    }
    conn->into_left -= part;
    conn->in_at += part;
    have -= part;
    part = KVT_MIN(have, conn->mac_left);
    if (part)
        memcpy(conn->mac + sizeof(conn->mac) - conn->mac_left, conn->in + conn->in_at, part);
    conn->mac_left -= part;
    conn->in_at += part;
    have -= part;
    part = KVT_MIN(have, conn->skip_left);
    conn->skip_left -= part;
    conn->in_at += part;
}

/* One receive: straight into a record as far as one is expected. BLOCKED, FAILED, or bytes. *last:
 * there is no more at present. */
static long receive(struct redis_conn *conn, bool *last)
{
    size_t direct = conn->in_body && conn->into ? conn->into_left : 0;
    long got;

    if (conn->in_at == conn->in_len)
        conn->in_at = conn->in_len = 0;
    if (conn->in_at && conn->in_len == sizeof(conn->in)) {
        memmove(conn->in, conn->in + conn->in_at, conn->in_len - conn->in_at);
        conn->in_len -= conn->in_at;
        conn->in_at = 0;
    }
    if (conn->in_len == sizeof(conn->in))
        return FAILED; /* a line or a reply that is too long */
    got = conn_recv(conn, conn->into, direct, conn->in + conn->in_len,
                    sizeof(conn->in) - conn->in_len);
    if (got <= 0)
        return got;
    /* a record is still coming, and is asked for until there is nothing: that saves a poll() */
    *last = !conn->tls && !direct && (size_t)got < sizeof(conn->in) - conn->in_len;
    if (direct) {
        size_t part = KVT_MIN((size_t)got, direct);

        conn->into += part;
        conn->into_left -= part;
        conn->in_len += (size_t)got - part;
    } else {
        conn->in_len += (size_t)got;
    }
    return got;
}

/* Everything that lies in `in`. false: nonsense. */
static bool take_all(struct redis *redis, struct redis_conn *conn)
{
    while (conn->state != CONN_CLOSED) {
        if (conn->in_body) {
            take_body(conn);
            if (conn->into_left || conn->mac_left || conn->skip_left)
                return true;
            redis_body_end(redis, conn);
        }
        if (!redis_replies(redis, conn))
            return false;
        if (!conn->in_body)
            return true;
    }
    return true;
}

static bool receive_all(struct redis *redis, struct redis_conn *conn)
{
    bool last = false;

    /* others have their turn too; what TLS holds decoded, poll() does not see */
    for (int i = 0; i < (conn->tls ? 4096 : 64) && conn->state != CONN_CLOSED && !last; i++) {
        long got = receive(conn, &last);

        if (got == BLOCKED)
            return true;
        if (got < 0)
            return false;
        conn->received_ns = redis->now_ns;
        if (!take_all(redis, conn))
            return false;
    }
    return true;
}

/* The way to READY. false: it failed. */
static bool go_on(struct redis *redis, struct redis_conn *conn)
{
    int err = 0;
    socklen_t len = sizeof(err);

    if (conn->state == CONN_CONNECTING) {
        if (getsockopt(conn->fd, SOL_SOCKET, SO_ERROR, &err, &len) != 0 || err) {
            say_errno(conn, err ? err : errno);
            return false;
        }
        (void)atomic_fetch_add_explicit(&redis->connects, 1, memory_order_relaxed);
        if (redis->tls) {
            if (!tls_start(redis, conn))
                return false;
        } else {
            return redis_log_in(redis, conn);
        }
    }
    if (conn->state == CONN_TLS) {
        int rc = SSL_connect(conn->tls);

        if (rc != 1)
            return tls_result(conn, rc) == BLOCKED;
        conn->wants = 0;
        return redis_log_in(redis, conn);
    }
    return true;
}

void redis_conn_turn(struct redis *redis, struct redis_conn *conn, short revents)
{
    bool good = true;

    if (conn->state == CONN_CONNECTING || conn->state == CONN_TLS) {
        if (!revents)
            return;
        good = go_on(redis, conn);
        if (!good || conn->state == CONN_TLS) {
            if (!good)
                redis_conn_close(redis, conn, -EHOSTDOWN, true);
            return;
        }
    }
    conn->wants = 0;
    if (revents || conn->tls)
        good = receive_all(redis, conn);
    if (!good && conn->state == CONN_READY && !conn->why[0])
        say(conn, "has closed the connection, or says what no Redis does");
    if (!good && conn->state == CONN_LOGIN && !conn->why[0] && !conn->tls)
        say(conn, "closes the connection at once, or says what no Redis does (with TLS it is "
                  "rediss://)");
    if (good && conn->state != CONN_CLOSED)
        good = send_all(redis, conn);
    if (!good)
        redis_conn_close(redis, conn, -EHOSTDOWN, true);
}
