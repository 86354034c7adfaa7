/* Lines of the log: see log_out.h.
 *
 * A pipe that nobody reads takes 64 KiB, and then write() waits: with it would wait the thread that
 * serves the socket, or the one that serves the store. O_NONBLOCK belongs to the open file, which
 * we share with whoever started us; so a pipe is opened once more by its name in /proc, and gets a
 * flag of its own. A line is no longer than PIPE_BUF: a pipe takes it whole, or not at all.
 */
#include "daemon/log_out.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"

#define LINE_BYTES ((size_t)PIPE_BUF)

/* Whether the descriptor is the stream to journald that the variable names: "DEVICE:INODE". */
static bool is_journal(const struct stat *st)
{
    const char *text = getenv("JOURNAL_STREAM");
    char ours[64];
    (void)snprintf(ours, sizeof(ours), "%llu:%llu", (unsigned long long)st->st_dev,
                   (unsigned long long)st->st_ino);
    return text != NULL && strcmp(text, ours) == 0;
}

void kvt_log_out_init(struct kvt_log_out *out, int fd)
{
    struct stat st;
    char name[32];
    *out = (struct kvt_log_out){.fd = fd, .own = -1, .way = KVT_LOG_PLAIN};
    atomic_init(&out->level, KVT_LOG_INFO);
    pthread_mutex_init(&out->lock, NULL);
    if (fstat(fd, &st) != 0)
        return;
    out->journal = is_journal(&st);
    if (S_ISSOCK(st.st_mode)) {
        out->way = KVT_LOG_SOCKET;
    } else if (S_ISFIFO(st.st_mode) || S_ISCHR(st.st_mode)) {
        (void)snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
        out->own = open(name, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        out->way = out->own >= 0 ? KVT_LOG_REOPEN : KVT_LOG_POLLED;
    }
}

void kvt_log_out_free(struct kvt_log_out *out)
{
    if (out->own >= 0)
        (void)close(out->own);
    out->own = -1;
    pthread_mutex_destroy(&out->lock);
}

/* Bytes that were taken; less than 0: none. */
static ssize_t put(const struct kvt_log_out *out, const char *text, size_t bytes)
{
    struct pollfd ready = {.fd = out->fd, .events = POLLOUT};
    switch (out->way) {
    case KVT_LOG_SOCKET:
        return send(out->fd, text, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    case KVT_LOG_REOPEN:
        return write(out->own, text, bytes);
    case KVT_LOG_POLLED:
        if (poll(&ready, 1, 0) != 1 || !(ready.revents & POLLOUT))
            return -1;
        return write(out->fd, text, bytes);
    default:
        return write(out->fd, text, bytes);
    }
}

/* A line, ended. False: lost. */
static bool put_line(struct kvt_log_out *out, const char *line, size_t bytes)
{
    if (out->torn && put(out, "\n", 1) != 1)
        return false;
    out->torn = false;
    const ssize_t n = put(out, line, bytes);
    out->torn = n > 0 && (size_t)n < bytes;
    return n == (ssize_t)bytes;
}

/* "when level: " or what journald takes for it. Returns its bytes. */
static size_t head(const struct kvt_log_out *out, int level, char *text, size_t room)
{
    static const char *const names[] = {"error", "warning", "info", "debug"};
    static const int priorities[] = {3, 4, 6, 7}; /* of syslog, for journald */
    struct timespec now;
    struct tm tm;
    char at[32] = "";
    int n;
    if (out->journal) {
        n = snprintf(text, room, "<%d>", priorities[level]);
    } else {
        clock_gettime(CLOCK_REALTIME, &now);
        if (localtime_r(&now.tv_sec, &tm) != NULL)
            (void)strftime(at, sizeof(at), "%F %T", &tm);
        n = snprintf(text, room, "%s.%03ld %s: ", at, now.tv_nsec / 1000000, names[level]);
    }
    return n < 0 ? 0 : KVT_MIN((size_t)n, room - 1);
}

/* What did not reach anybody is said before what does. On the lock. */
static void write_line(struct kvt_log_out *out, const char *line, size_t bytes)
{
    char text[160];
    if (out->untold > 0) {
        size_t used = head(out, KVT_LOG_WARN, text, sizeof(text));
        int n = snprintf(text + used, sizeof(text) - used,
                         "%" PRIu64 " lines of this log were lost: nobody read them in time\n",
                         out->untold);
        if (n > 0 && put_line(out, text, used + (size_t)n))
            out->untold = 0;
    }
    if (out->untold == 0 && put_line(out, line, bytes))
        return;
    out->untold++;
    atomic_fetch_add_explicit(&out->lost, 1, memory_order_relaxed);
}

/* One line out of a head and a message, cut where it is longer than a pipe takes whole. */
static void write_message(struct kvt_log_out *out, char line[LINE_BYTES], size_t used,
                          const char *message)
{
    const size_t room = LINE_BYTES - used;
    int n = snprintf(line + used, room, "%s", message);
    const size_t len = n < 0 ? 0 : KVT_MIN((size_t)n, room - 1);
    line[used + len] = '\n'; /* in the place of the zero */
    pthread_mutex_lock(&out->lock);
    write_line(out, line, used + len + 1);
    pthread_mutex_unlock(&out->lock);
}

void kvt_log_out_line(void *arg, int level, const char *message)
{
    struct kvt_log_out *out = arg;
    char line[LINE_BYTES];
    if (level > atomic_load_explicit(&out->level, memory_order_relaxed))
        return;
    write_message(out, line, head(out, level, line, sizeof(line)), message);
}

void kvt_log_out_text(struct kvt_log_out *out, const char *text)
{
    char line[LINE_BYTES];
    write_message(out, line, 0, text);
}
