/* Small texts that outlive the process: see state_file.h. */
#include "client/state_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "format/hash.h"
#include "kvtier/error.h"

#define TEMP_SUFFIX ".tmp" /* the next open of a root removes it */
#define FAMILY "kvtier-"   /* every version begins so */

void kvt_state_begin(struct kvt_state_text *text, const char *version)
{
    text->len = 0;
    text->full = false;
    kvt_state_add(text, "%s", version);
}

bool kvt_state_room(const struct kvt_state_text *text, size_t bytes)
{
    return text->len + bytes + KVT_STATE_END_BYTES <= KVT_STATE_BYTES_MAX;
}

void kvt_state_add(struct kvt_state_text *text, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text->bytes + text->len, sizeof(text->bytes) - text->len, format, args);
    va_end(args);
    if (n < 0 || !kvt_state_room(text, (size_t)n))
        text->full = true;
    else
        text->len += (size_t)n;
}

/* The last line of a text whose others end at `body`. */
static void end_line(const struct kvt_state_text *text, size_t body, char line[32])
{
    (void)snprintf(line, 32, "end %016" PRIx64 "\n", kvt_hash64(text->bytes, body));
}

static int put_all(const char *path, const struct kvt_state_text *text)
{
    int file = kvt_fd_high(
        open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    int rc = file < 0 ? -errno : 0;
    for (size_t at = 0; rc == 0 && at < text->len;) {
        ssize_t n = write(file, text->bytes + at, text->len - at);
        if (n < 0 && errno != EINTR)
            rc = -errno;
        at += n > 0 ? (size_t)n : 0;
    }
    if (rc == 0 && fsync(file) != 0)
        rc = -errno;
    if (file >= 0 && close(file) != 0 && rc == 0)
        rc = -errno;
    return rc;
}

/* Nothing is there, or a file that we wrote, however damaged behind its first word. */
static int ours(const char *path)
{
    char word[sizeof(FAMILY)] = "";
    struct stat st;
    if (lstat(path, &st) != 0)
        return errno == ENOENT ? 0 : -errno;
    if (!S_ISREG(st.st_mode))
        return S_ISDIR(st.st_mode) ? -EISDIR : KVT_E_NOT_OURS;
    if (st.st_size == 0)
        return 0;
    int file = kvt_fd_high(open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (file < 0)
        return -errno;
    ssize_t n = read(file, word, sizeof(FAMILY) - 1);
    (void)close(file);
    return n > 0 && strcmp(word, FAMILY) == 0 ? 0 : KVT_E_NOT_OURS;
}

int kvt_state_place(const char *path)
{
    char temp[PATH_MAX];
    if (snprintf(temp, sizeof(temp), "%s" TEMP_SUFFIX, path) >= (int)sizeof(temp))
        return -ENAMETOOLONG;
    int rc = ours(path);
    if (rc == 0)
        rc = ours(temp);
    char *slash = strrchr(temp, '/');
    if (slash != NULL)
        slash[slash == temp] = '\0';
    if (rc == 0 && access(slash != NULL ? temp : ".", W_OK | X_OK) != 0)
        rc = -errno;
    return rc;
}

bool kvt_state_in_root(const char *root, const char *name, char path[PATH_MAX])
{
    struct stat st;
    if (snprintf(path, PATH_MAX, "%s/lock", root) >= PATH_MAX || lstat(path, &st) != 0)
        return false;
    return snprintf(path, PATH_MAX, "%s/%s", root, name) < PATH_MAX;
}

int kvt_state_write(const char *path, struct kvt_state_text *text)
{
    char temp[PATH_MAX], line[32];
    if (text->full)
        return -ENOSPC;
    if (snprintf(temp, sizeof(temp), "%s" TEMP_SUFFIX, path) >= (int)sizeof(temp))
        return -ENAMETOOLONG;
    end_line(text, text->len, line); /* kvt_state_room() has kept its place */
    memcpy(text->bytes + text->len, line, KVT_STATE_END_BYTES);
    text->len += KVT_STATE_END_BYTES;
    int rc = kvt_state_place(path);
    if (rc != 0)
        return rc;
    rc = put_all(temp, text);
    if (rc == 0 && rename(temp, path) != 0)
        rc = -errno;
    if (rc != 0)
        (void)unlink(temp);
    return rc;
}

static int read_all(const char *path, struct kvt_state_text *text)
{
    ssize_t n = 0;
    int rc = 0;
    text->len = 0;
    int file = kvt_fd_high(open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (file < 0)
        return -errno;
    do {
        n = read(file, text->bytes + text->len, sizeof(text->bytes) - text->len);
        text->len += n > 0 ? (size_t)n : 0;
    } while ((n > 0 && text->len < sizeof(text->bytes)) || (n < 0 && errno == EINTR));
    if (n < 0)
        rc = -errno;
    else if (text->len > KVT_STATE_BYTES_MAX) /* longer than any of ours */
        rc = KVT_E_CORRUPT;
    (void)close(file);
    text->bytes[rc == 0 ? text->len : 0] = '\0';
    return rc;
}

/* Whether the text is as kvt_state_write() made it; it ends before its last line then. */
static bool whole(struct kvt_state_text *text, const char *version)
{
    char line[32];
    if (text->len == 0 || text->bytes[text->len - 1] != '\n' ||
        memchr(text->bytes, '\0', text->len) != NULL)
        return false;
    size_t body = text->len - 1;
    while (body > 0 && text->bytes[body - 1] != '\n')
        body--;
    end_line(text, body, line);
    if (strcmp(text->bytes + body, line) != 0 ||
        strncmp(text->bytes, version, strlen(version)) != 0)
        return false;
    text->bytes[text->len = body] = '\0';
    return true;
}

int kvt_state_read(const char *path, const char *version, struct kvt_state_text *text, char **lines)
{
    *lines = NULL;
    int rc = read_all(path, text);
    if (rc == 0 && !whole(text, version))
        rc = KVT_E_CORRUPT;
    if (rc == 0)
        *lines = text->bytes + strlen(version);
    return rc;
}

char *kvt_state_next(char **lines)
{
    char *line = *lines, *end = strchr(line, '\n');
    if (end == NULL)
        return NULL;
    *end = '\0';
    *lines = end + 1;
    return line;
}
