/* Dialling a kvtierd: see link.h and format/handshake.h.
 *
 * What the daemon sends is checked before it is mapped: sizes as announced, and seals, so that no
 * page can vanish under us. Threads: one at a time.
 */
#include "client/link.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/fd.h"
#include "base/sock.h"
#include "format/handshake.h"
#include "format/message.h"
#include "kvtier/error.h"
#include "kvtier/version.h"

#define RING_BYTES (1u << 20) /* = KVT_CLIENT_RING_BYTES: the credits are made for it */
#define TIMEOUT_MS 2000
#define CLOCK_NS_MAX (INT64_MAX / 4) /* 73 years since a machine's start: nonsense beyond */
#define PURGE_MS 900000          /* more than a daemon gives its shared tier (store_remote_put.c) */
#define ANSWER_CHUNK (48u << 10) /* more than the longest packet of an answer */

void kvt_link_init(struct kvt_link *link, const char *path)
{
    memset(link, 0, sizeof(*link));
    link->path = path;
    link->sock = link->rings.fd = link->memory.fd = -1;
    link->wire.request_fd = link->wire.reply_fd = link->wire.broken_fd = -1;
}

/* The name of this program, as people know it. */
static void program_name(char *name, size_t len)
{
    int fd = kvt_fd_high(open("/proc/self/comm", O_RDONLY | O_CLOEXEC));
    ssize_t n = fd < 0 ? 0 : read(fd, name, len - 1);
    if (fd >= 0)
        (void)close(fd);
    name[n > 0 ? n : 0] = '\0';
    name[strcspn(name, "\n")] = '\0';
}

static void hello_make(struct kvt_hello *hello, uint32_t kind)
{
    *hello = (struct kvt_hello){.magic = KVT_HANDSHAKE_MAGIC,
                                .bytes = sizeof(*hello),
                                .handshake = KVT_HANDSHAKE_VERSION,
                                .proto = KVT_PROTO_VERSION,
                                .record = KVT_RECORD_VERSION,
                                .kind = kind,
                                .ring_bytes = RING_BYTES,
                                .pid = (uint32_t)getpid(),
                                .stats = KVT_STORE_STAT_COUNT};
    (void)snprintf(hello->version, sizeof(hello->version), "%s", kvt_version());
    program_name(hello->name, sizeof(hello->name));
}

/* Why there is no connection, for people. engine: its store could be elsewhere. */
static void describe(const char *path, int code, bool engine, char *text, size_t len)
{
    if (code == -ENOENT || code == -ECONNREFUSED)
        (void)snprintf(text, len, "no kvtierd at %s: start one (kvtierd --socket %s)%s", path, path,
                       engine ? ", or set store=process" : "");
    else if (code == -EACCES || code == -EPERM)
        (void)snprintf(text, len,
                       "this user may not connect to %s: see socket_mode and allow_uid of the "
                       "kvtierd there",
                       path);
    else if (code == -EPROTOTYPE || code == KVT_E_CORRUPT)
        (void)snprintf(text, len, "what listens at %s is not a kvtierd: name its socket", path);
    else if (code == -EAGAIN || code == -ETIMEDOUT)
        (void)snprintf(text, len,
                       "the kvtierd at %s does not answer within %d s: is it stopped or busy?",
                       path, TIMEOUT_MS / 1000);
    else
        (void)snprintf(text, len, "no connection to the kvtierd at %s: %s", path,
                       kvt_strerror(code));
}

int64_t kvt_link_shift(int64_t sent_ns, int64_t theirs_ns, int64_t received_ns)
{
    if (theirs_ns <= 0 || theirs_ns > CLOCK_NS_MAX ||
        (sent_ns <= theirs_ns && theirs_ns <= received_ns))
        return 0;
    return theirs_ns - (sent_ns + (received_ns - sent_ns) / 2);
}

/* Send HELLO, take WELCOME and, an engine, its descriptors. */
static int greet(struct kvt_link *link, uint32_t kind, struct kvt_welcome *welcome,
                 int fds[KVT_WELCOME_FDS], size_t *count, char *text, size_t len)
{
    struct kvt_hello hello;
    const struct kvt_clock clock = kvt_clock_system();
    hello_make(&hello, kind);
    const int64_t sent_ns = kvt_clock_now(&clock);
    int rc = kvt_sock_send(link->sock, &hello, sizeof(hello), NULL, 0);
    if (rc != 0)
        return rc;
    int bytes = kvt_sock_recv(link->sock, welcome, sizeof(*welcome), fds, KVT_WELCOME_FDS, count);
    const int64_t received_ns = kvt_clock_now(&clock);
    if (bytes <= 0)
        return bytes == 0 ? KVT_E_CORRUPT : bytes;
    if (bytes != (int)sizeof(*welcome) || welcome->magic != KVT_HANDSHAKE_MAGIC ||
        welcome->bytes != sizeof(*welcome))
        return KVT_E_CORRUPT;
    welcome->text[sizeof(welcome->text) - 1] = '\0';
    link->clock_shift_ns = kvt_link_shift(sent_ns, welcome->now_ns, received_ns);
    if (welcome->status != 0) {
        (void)snprintf(text, len, "the kvtierd at %.100s refuses: %s", link->path, welcome->text);
        return welcome->status < 0 ? welcome->status : KVT_E_CORRUPT;
    }
    return *count == (kind == KVT_HELLO_ENGINE ? KVT_WELCOME_FDS : 0) ? 0 : KVT_E_CORRUPT;
}

/* Map a sealed memfd of at least `bytes`. */
static int map_fd(int fd, uint64_t bytes, struct kvt_arena_map *out)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (fstat(fd, &st) != 0 || seals < 0 || !(seals & F_SEAL_SHRINK) || st.st_size < 0 ||
        (uint64_t)st.st_size < bytes || bytes == 0)
        return KVT_E_CORRUPT;
    int rc = kvt_arena_map_fd(fd, bytes, out);
    if (rc != 0)
        return rc;
    /* a child owns nothing, and keeps nothing alive */
    (void)madvise(out->arena, bytes, MADV_DONTFORK);
    (void)madvise(out->arena, bytes, MADV_DONTDUMP);
    return 0;
}

static int map_all(struct kvt_link *link, const struct kvt_welcome *welcome,
                   const int fds[KVT_WELCOME_FDS])
{
    struct kvt_wire *wire = &link->wire;
    if (welcome->ring_bytes != RING_BYTES || welcome->rings_bytes < kvt_wire_bytes(RING_BYTES) ||
        welcome->arena_bytes % KVT_PAGE_BYTES != 0)
        return KVT_E_CORRUPT;
    int rc = map_fd(fds[KVT_FD_RINGS], welcome->rings_bytes, &link->rings);
    if (rc == 0)
        rc = map_fd(fds[KVT_FD_ARENA], welcome->arena_bytes, &link->memory);
    if (rc != 0)
        return rc;
    link->memory.huge = (welcome->flags & KVT_WELCOME_HUGE) != 0;
    wire->memory = link->rings.map;
    wire->ring_bytes = welcome->ring_bytes;
    wire->request_fd = fds[KVT_FD_REQUEST];
    wire->reply_fd = fds[KVT_FD_REPLY];
    link->client = welcome->client;
    return 0;
}

int kvt_link_dial(struct kvt_link *link, char *text, size_t len)
{
    struct kvt_welcome welcome;
    int fds[KVT_WELCOME_FDS];
    size_t count = 0;
    text[0] = '\0';
    int rc = kvt_sock_connect(link->path, TIMEOUT_MS, &link->sock);
    if (rc == 0)
        rc = greet(link, KVT_HELLO_ENGINE, &welcome, fds, &count, text, len);
    if (rc == 0)
        rc = map_all(link, &welcome, fds);
    for (size_t i = 0; i < count; i++)
        if (rc != 0 || i == KVT_FD_ARENA || i == KVT_FD_RINGS)
            (void)close(fds[i]);
    if (rc == 0) {
        kvt_fork_hold();
        kvt_fork_add(&link->alone, &link->sock);
        kvt_fork_let();
        return 0;
    }
    if (text[0] == '\0')
        describe(link->path, rc, true, text, len);
    link->wire.request_fd = link->wire.reply_fd = -1; /* closed */
    kvt_link_hang_up(link);
    return rc;
}

/* All packets of an answer. 0, -ENOMEM, -errno. */
static int answer_take(int sock, char **out)
{
    size_t used = 0, room = 64u << 10;
    char *text = malloc(room);
    int bytes;
    if (text == NULL)
        return -ENOMEM;
    while ((bytes = kvt_sock_recv(sock, text + used, room - used - 1, NULL, 0, NULL)) > 0) {
        used += (size_t)bytes;
        char *more = room - used > ANSWER_CHUNK ? text : realloc(text, 2 * room);
        if (more == NULL) {
            bytes = -ENOMEM;
            break;
        }
        room = more == text && room - used > ANSWER_CHUNK ? room : 2 * room;
        text = more;
    }
    text[used] = '\0';
    if (bytes < 0)
        free(text);
    else
        *out = text;
    return bytes;
}

/* The answer to a question, waited for so long. */
static int ask(const char *path, const char *question, int timeout_ms, char **out, char *why,
               size_t len)
{
    const struct timeval limit = {timeout_ms / 1000, (timeout_ms % 1000) * 1000L};
    struct kvt_welcome welcome;
    struct kvt_link link;
    int fds[KVT_WELCOME_FDS];
    size_t count = 0;
    *out = NULL;
    why[0] = '\0';
    kvt_link_init(&link, path);
    int rc = kvt_sock_connect(path, TIMEOUT_MS, &link.sock);
    if (rc == 0)
        rc = greet(&link, KVT_HELLO_CONTROL, &welcome, fds, &count, why, len);
    for (size_t i = 0; i < count; i++)
        (void)close(fds[i]);
    if (rc == 0)
        rc = kvt_sock_send(link.sock, question, strlen(question), NULL, 0);
    if (rc == 0)
        (void)setsockopt(link.sock, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    if (rc == 0)
        rc = answer_take(link.sock, out);
    if (rc == 0 && (*out)[0] == '\0') { /* it closed without a word */
        free(*out);
        *out = NULL;
        rc = -ETIMEDOUT;
    }
    if (link.sock >= 0)
        (void)close(link.sock);
    if (rc != 0 && why[0] == '\0')
        describe(path, rc, false, why, len);
    return rc;
}

int kvt_link_ask(const char *path, const char *question, char **out, char *why, size_t len)
{
    return ask(path, question, TIMEOUT_MS, out, why, len);
}

/* A number of an answer; 0: it is not there. */
static int64_t number_in(const char *text, const char *name)
{
    char line[64];
    (void)snprintf(line, sizeof(line), "\n%s ", name);
    const char *at = strstr(text, line);
    return at == NULL ? 0 : strtoll(at + strlen(line), NULL, 10);
}

static int purge_read(const char *path, const char *text, struct kvt_link_purged *out, char *why,
                      size_t len)
{
    if (strncmp(text, "error: unknown question", strlen("error: unknown question")) == 0) {
        (void)snprintf(why, len,
                       "the kvtierd at %s is of a version that cannot be asked to purge: run the "
                       "same version of both",
                       path);
        return KVT_E_UNSUPPORTED;
    }
    if (strncmp(text, "error: ", strlen("error: ")) == 0) {
        (void)snprintf(why, len, "the kvtierd at %s: %.*s", path,
                       (int)strcspn(text + strlen("error: "), "\n"), text + strlen("error: "));
        return KVT_E_INVAL;
    }
    out->blocks = (uint64_t)number_in(text, "purge.blocks");
    out->bytes = (uint64_t)number_in(text, "purge.bytes");
    out->remote_records = (uint64_t)number_in(text, "purge.remote_records");
    out->groups = (uint32_t)number_in(text, "purge.groups");
    int rc = (int)number_in(text, "purge.status");
    if (rc == 0 && strstr(text, "\npurge.status 0\n") == NULL)
        rc = KVT_E_CORRUPT;
    if (rc != 0)
        (void)snprintf(why, len,
                       "the kvtierd at %s could not purge all of it (%s): its log says where it "
                       "may still be; repeat it",
                       path, kvt_strerror(rc));
    return rc < 0 ? rc : rc == 0 ? 0 : KVT_E_CORRUPT;
}

int kvt_link_purge(const char *path, const uint8_t id[KVT_NS_BYTES], struct kvt_link_purged *out,
                   char *why, size_t len)
{
    char question[sizeof("purge ") + 2 * KVT_NS_BYTES] = "purge ", *text = NULL;
    *out = (struct kvt_link_purged){0};
    for (size_t i = 0, at = strlen(question); i < KVT_NS_BYTES; i++, at += 2)
        (void)snprintf(question + at, 3, "%02x", id[i]);
    int rc = ask(path, question, PURGE_MS, &text, why, len);
    if (rc == -ETIMEDOUT || rc == -EAGAIN || rc == -ECONNRESET)
        (void)snprintf(why, len,
                       "the kvtierd at %s ended, or said nothing, before it had purged: repeat it",
                       path);
    if (rc == 0)
        rc = purge_read(path, text, out, why, len);
    free(text);
    return rc;
}

void kvt_link_hang_up(struct kvt_link *link)
{
    kvt_fork_drop(&link->alone);
    if (link->sock >= 0) {
        struct kvt_hello bye;
        hello_make(&bye, KVT_HELLO_BYE);
        int rc = kvt_sock_send(link->sock, &bye, sizeof(bye), NULL, 0);
        (void)rc; /* a daemon that is gone needs none */
        (void)close(link->sock);
    }
    if (link->wire.request_fd >= 0)
        (void)close(link->wire.request_fd);
    if (link->wire.reply_fd >= 0)
        (void)close(link->wire.reply_fd);
    kvt_arena_unmap(&link->rings);
    kvt_arena_unmap(&link->memory);
    kvt_link_init(link, link->path);
}
