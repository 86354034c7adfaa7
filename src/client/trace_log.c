/* Lines of JSON into a file of bounded size: see trace_log.h.
 *
 * A line is built in memory of its own and written with one write(2) to a file opened for
 * appending, so lines of a crash are whole or absent, but for the last. What was cut short is cut
 * off.
 */
#include "client/trace_log.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/fd.h"
#include "base/rng.h"
#include "client/recent.h"
#include "format/digest.h"
#include "kvtier/error.h"
#include "kvtier/layout.h"

#define IDS_MAX 16384u /* of a line: 8 Mi tokens; what is beyond is not said */
#define ID_CHARS 18u   /* "9007199254740991, " */
#define LINE_BYTES (IDS_MAX * ID_CHARS + 256u)
#define ID_MASK ((UINT64_C(1) << 53) - 1) /* every reader of JSON has these exactly */
#define PATH_BYTES 1100u

struct kvt_trace_log {
    pthread_mutex_t lock;
    struct kvt_clock clock;
    struct kvt_log log;
    int fd;         /* -1: given up */
    uint64_t bytes; /* of FILE */
    uint64_t bytes_max;
    int64_t start_ns;
    uint64_t salt[4];
    struct kvt_digest digest;
    struct kvt_recent recent;
    char path[PATH_BYTES], older[PATH_BYTES + 2];
    char line[LINE_BYTES];
};

/* FILE becomes FILE.1, and a new one is begun. 0 or -errno. */
static int begin_file(struct kvt_trace_log *trace)
{
    struct stat st;
    if (trace->fd >= 0)
        (void)close(trace->fd);
    trace->fd = -1;
    if (lstat(trace->path, &st) == 0 && st.st_size > 0 &&
        (!S_ISREG(st.st_mode) || rename(trace->path, trace->older) != 0))
        return S_ISREG(st.st_mode) ? -errno : -EEXIST;
    trace->fd = kvt_fd_high(open(
        trace->path, O_WRONLY | O_APPEND | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
    trace->bytes = 0;
    return trace->fd >= 0 ? 0 : -errno;
}

/* Why a file cannot be begun at the path, where what is there says it better than the code does. */
static const char *reason(const char *path, int rc)
{
    struct stat st;
    if (lstat(path, &st) != 0 || S_ISREG(st.st_mode))
        return kvt_strerror(rc);
    return S_ISDIR(st.st_mode)   ? "it is a directory"
           : S_ISLNK(st.st_mode) ? "it is a symbolic link, and none is followed"
                                 : "it is no regular file";
}

int kvt_trace_open(const char *path, uint64_t bytes_max, const struct kvt_clock *clock,
                   const struct kvt_log *log, struct kvt_trace_log **out, char *error,
                   size_t error_len)
{
    struct kvt_trace_log *trace = calloc(1, sizeof(*trace));
    if (trace == NULL)
        return -ENOMEM;
    trace->clock = *clock;
    trace->log = *log;
    trace->fd = -1;
    trace->bytes_max = bytes_max;
    trace->start_ns = kvt_clock_now(clock);
    (void)snprintf(trace->path, sizeof(trace->path), "%s", path);
    (void)snprintf(trace->older, sizeof(trace->older), "%s.1", trace->path);
    for (size_t i = 0; i < KVT_ARRAY_LEN(trace->salt); i++)
        trace->salt[i] = kvt_rng_seed_os();
    kvt_digest_open(&trace->digest);
    int rc = begin_file(trace);
    if (rc == 0)
        rc = -pthread_mutex_init(&trace->lock, NULL);
    if (rc != 0) {
        (void)snprintf(error, error_len,
                       "trace: %.400s cannot be written: %s; name a file in a directory that this "
                       "process may write to, or set trace=none",
                       path, reason(path, rc));
        if (trace->fd >= 0)
            (void)close(trace->fd);
        kvt_digest_close(&trace->digest);
        free(trace);
        return rc;
    }
    *out = trace;
    return 0;
}

void kvt_trace_close(struct kvt_trace_log *trace)
{
    if (trace == NULL)
        return;
    if (trace->fd >= 0)
        (void)close(trace->fd);
    kvt_digest_close(&trace->digest);
    pthread_mutex_destroy(&trace->lock);
    memset(trace->salt, 0, sizeof(trace->salt));
    free(trace);
}

/* What stands for a block and all before it; 0: no digest could be made. */
static uint64_t id_of(struct kvt_trace_log *trace, const uint8_t *ns_id, const struct kvt_key *key)
{
    uint8_t out[KVT_DIGEST_BYTES];
    uint64_t id;
    kvt_digest_start(&trace->digest);
    kvt_digest_bytes(&trace->digest, trace->salt, sizeof(trace->salt));
    kvt_digest_bytes(&trace->digest, ns_id, KVT_NS_BYTES);
    kvt_digest_string(&trace->digest, key->hash, key->hash_len);
    kvt_digest_u32(&trace->digest, key->group);
    if (kvt_digest_final(&trace->digest, out) != 0)
        return 0;
    memcpy(&id, out, sizeof(id));
    return id & ID_MASK;
}

/* The line in trace->line; 0: none could be made. */
static size_t make_line(struct kvt_trace_log *trace, const struct kvt_trace_prompt *prompt,
                        int64_t now)
{
    size_t step = (KVT_TRACE_BLOCK_TOKENS + prompt->block_tokens - 1) / prompt->block_tokens;
    size_t used, ids = 0;
    uint64_t tokens = prompt->tokens ? prompt->tokens : prompt->n * prompt->block_tokens;
    used = (size_t)snprintf(trace->line, LINE_BYTES,
                            "{\"timestamp\": %" PRId64 ", \"input_length\": %" PRIu64
                            ", \"output_length\": 0, ",
                            (now - trace->start_ns) / 1000000, tokens);
    if (step * prompt->block_tokens != KVT_TRACE_BLOCK_TOKENS)
        used += (size_t)snprintf(trace->line + used, LINE_BYTES - used, "\"block_tokens\": %zu, ",
                                 step * prompt->block_tokens);
    used += (size_t)snprintf(trace->line + used, LINE_BYTES - used, "\"hash_ids\": [");
    for (size_t i = step - 1; i < prompt->n + step - 1 && ids < IDS_MAX; i += step, ids++) {
        uint64_t id = id_of(trace, prompt->ns_id, &prompt->keys[KVT_MIN(i, prompt->n - 1)]);
        if (id == 0)
            return 0;
        used += (size_t)snprintf(trace->line + used, LINE_BYTES - used, "%s%" PRIu64,
                                 ids ? ", " : "", id);
    }
    used += (size_t)snprintf(trace->line + used, LINE_BYTES - used, "]}\n");
    return used;
}

static enum kvt_trace_noted write_line(struct kvt_trace_log *trace, size_t bytes)
{
    int rc = 0;
    if (trace->bytes > 0 && trace->bytes + bytes > trace->bytes_max / 2)
        rc = begin_file(trace);
    if (rc == 0) {
        ssize_t done = write(trace->fd, trace->line, bytes);
        if (done == (ssize_t)bytes) {
            trace->bytes += bytes;
            return KVT_TRACE_WRITTEN;
        }
        rc = done < 0 ? -errno : -ENOSPC;
        if (done > 0 && ftruncate(trace->fd, (off_t)trace->bytes) != 0)
            rc = -errno;
    }
    if (trace->fd >= 0)
        (void)close(trace->fd);
    trace->fd = -1;
    kvt_log(&trace->log, KVT_LOG_WARN, "trace: %.400s: recording has ended: %s", trace->path,
            kvt_strerror(rc));
    return KVT_TRACE_DROPPED;
}

enum kvt_trace_noted kvt_trace_note(struct kvt_trace_log *trace,
                                    const struct kvt_trace_prompt *prompt)
{
    enum kvt_trace_noted noted = KVT_TRACE_DROPPED;
    if (prompt->n == 0 || prompt->block_tokens == 0)
        return KVT_TRACE_REPEATED;
    pthread_mutex_lock(&trace->lock);
    int64_t now = kvt_clock_now(&trace->clock);
    uint64_t last = id_of(trace, prompt->ns_id, &prompt->keys[prompt->n - 1]);
    if (trace->fd >= 0 && last != 0) {
        if (kvt_recent_again(&trace->recent, last, now)) {
            noted = KVT_TRACE_REPEATED;
        } else {
            size_t bytes = make_line(trace, prompt, now);
            if (bytes > 0)
                noted = write_line(trace, bytes);
        }
    }
    pthread_mutex_unlock(&trace->lock);
    return noted;
}
