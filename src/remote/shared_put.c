/* Records put into a shared directory: written under a name of ours, then linked to their own. And
 * what a namespace says of how long its records live, for whoever cleans: its file "ttl". See
 * shared_files.h, and shared_path.h for the names. Threads: any, at a time. Blocks. Allocates
 * nothing.
 *
 * A namespace may be a mount (on another drive): then nothing can be linked there from kvt0/tmp
 * (EXDEV), and its records are written beside their place.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/fd.h"
#include "kvtier/error.h"
#include "remote/shared_files.h"

#define CLOCK_SLACK_NS INT64_C(2000000000) /* file systems' times are coarse */
#define TMP_ROOM 160u

static int failed(int err)
{
    return err == ENOSPC || err == EDQUOT ? KVT_E_NO_SPACE : -err;
}

/* ---- files that are being written ----------------------------------------------------------- */

int64_t kvt_shared_skew_ns(int64_t before_ns, int64_t got_ns, int64_t after_ns)
{
    if (got_ns < before_ns - CLOCK_SLACK_NS)
        return got_ns - before_ns;
    return got_ns > after_ns + CLOCK_SLACK_NS ? got_ns - after_ns : 0;
}

static int64_t own_ns(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_REALTIME, &now);
    return kvt_shared_time_ns(now);
}

int kvt_shared_create(struct kvt_shared_files *shared, int dir, const char *name)
{
    int64_t before_ns = own_ns();
    int fd =
        kvt_fd_high(openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
    struct stat st;

    if (fd < 0)
        return failed(errno);
    if (fstat(fd, &st) == 0)
        atomic_store_explicit(
            &shared->skew_ns,
            kvt_shared_skew_ns(before_ns, kvt_shared_time_ns(st.st_mtim), own_ns()),
            memory_order_relaxed);
    return fd;
}

static int write_whole(int fd, const void *bytes, size_t len)
{
    const uint8_t *at = bytes;

    while (len) {
        ssize_t put = write(fd, at, len);

        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return failed(put ? errno : EIO);
        at += put;
        len -= (size_t)put;
    }
    return 0;
}

static void tmp_name(struct kvt_shared_files *shared, const char *prefix, char out[TMP_ROOM])
{
    (void)snprintf(
        out, TMP_ROOM, "%s%.64s.%ld.%llu", prefix, shared->node, (long)getpid(),
        (unsigned long long)atomic_fetch_add_explicit(&shared->number, 1, memory_order_relaxed));
}

/* ---- what is known of namespaces ------------------------------------------------------------ */

/* Its place, taken from another one where that has it. Under the lock. */
static struct kvt_shared_note *note_of(struct kvt_shared_files *shared, const char *ns)
{
    uint32_t sum = 0;
    struct kvt_shared_note *note;

    for (int i = 0; i < 8; i++)
        sum = sum * 31 + (uint8_t)ns[i];
    note = &shared->notes[sum % KVT_SHARED_NOTES];
    if (strcmp(note->ns, ns) != 0) {
        memset(note, 0, sizeof(*note));
        (void)snprintf(note->ns, sizeof(note->ns), "%s", ns);
    }
    return note;
}

void kvt_shared_forget(struct kvt_shared_files *shared, const char *ns)
{
    pthread_mutex_lock(&shared->notes_lock);
    note_of(shared, ns)->said = false;
    pthread_mutex_unlock(&shared->notes_lock);
}

static bool is_far(struct kvt_shared_files *shared, const char *ns, bool found)
{
    bool far;

    pthread_mutex_lock(&shared->notes_lock);
    far = note_of(shared, ns)->far = note_of(shared, ns)->far || found;
    pthread_mutex_unlock(&shared->notes_lock);
    return far;
}

/* Whether this namespace's time to live has to be said; it is taken as said. */
static bool to_be_said(struct kvt_shared_files *shared, const char *ns, int64_t ttl_ns)
{
    struct kvt_shared_note *note;
    bool due;

    pthread_mutex_lock(&shared->notes_lock);
    note = note_of(shared, ns);
    due = !note->said || note->ttl_ns != ttl_ns;
    note->said = true;
    note->ttl_ns = ttl_ns;
    pthread_mutex_unlock(&shared->notes_lock);
    return due;
}

/* Who said it last is believed; where nothing is said there is no file. Nothing depends on it but
 * how long what is expired takes room, so a failure is no put's. Written in place: who reads it
 * takes a number with its line's end only. */
static void say_ttl(struct kvt_shared_files *shared, int ns, const char *name, int64_t ttl_ns)
{
    char text[32];
    int fd, len;

    if (!to_be_said(shared, name, ttl_ns))
        return;
    if (!ttl_ns) {
        (void)unlinkat(ns, "ttl", 0);
        return;
    }
    atomic_store_explicit(&shared->ttl_said, true, memory_order_relaxed);
    fd = kvt_fd_high(openat(
        ns, "ttl", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    if (fd < 0)
        return;
    len = snprintf(text, sizeof(text), "%" PRId64 "\n", (ttl_ns + 999999) / 1000000);
    if (write_whole(fd, text, (size_t)len) != 0)
        (void)unlinkat(ns, "ttl", 0);
    (void)close(fd);
}

/* ---- a put ---------------------------------------------------------------------------------- */

/* The way to a record, made where it is not there. */
static int way_made(struct kvt_shared_files *shared, struct kvt_shared_way *way,
                    const struct kvt_full_key *key)
{
    int rc = KVT_E_MISS;

    for (int tries = 0; tries < 3; tries++) {
        rc = kvt_shared_way_to(way, shared->root, key);
        if (rc != KVT_E_MISS)
            break;
        if (way->ns < 0 && mkdirat(shared->root, way->name.ns, 0700) == 0)
            kvt_shared_forget(shared, way->name.ns);
        else if (way->ns < 0 && errno != EEXIST)
            return failed(errno);
        if (way->ns >= 0 && mkdirat(way->ns, way->name.below, 0700) != 0 && errno != EEXIST)
            return failed(errno);
    }
    if (rc == -ELOOP)
        kvt_shared_link_met(shared, way->name.ns, way->ns >= 0 ? way->name.below : NULL);
    /* a file has the name of a directory; or somebody removes them as fast as we make them */
    return rc == KVT_E_MISS ? -ENOTDIR : rc;
}

/* Give a file that is whole its name. */
static int publish(int dir, const char *tmp, const struct kvt_shared_way *way, bool replace)
{
    const char *file = way->name.file;

    for (int tries = 0; tries < 2; tries++) {
        if (replace ? renameat(dir, tmp, way->below, file) == 0
                    : linkat(dir, tmp, way->below, file, 0) == 0)
            return 0;
        if (errno == EISDIR && unlinkat(way->below, file, AT_REMOVEDIR) == 0)
            continue; /* an empty one goes; one that holds something is left alone */
        if (errno == EEXIST || errno == ENOTEMPTY || errno == EISDIR)
            return KVT_E_EXISTS;
        return failed(errno);
    }
    return KVT_E_EXISTS; /* somebody makes directories there as fast as we remove them */
}

static int put_way(struct kvt_shared_files *shared, const struct kvt_remote_req *req,
                   const struct kvt_shared_way *way, bool far)
{
    int dir = far ? way->below : kvt_shared_dir_at(shared->root, "tmp");
    uint8_t mac[KVT_REMOTE_MAC_BYTES];
    char tmp[TMP_ROOM];
    int fd, rc;

    if (dir < 0)
        return dir;
    tmp_name(shared, far ? KVT_SHARED_PUT : "", tmp);
    fd = kvt_shared_create(shared, dir, tmp);
    rc = fd < 0 ? fd : write_whole(fd, req->record, req->record_bytes);
    if (!rc && shared->mac.on)
        rc = kvt_remote_mac(&shared->mac, req->record, req->record_bytes, mac)
                 ? write_whole(fd, mac, sizeof(mac))
                 : -EIO;
    if (fd >= 0 && close(fd) != 0 &&
        !rc) /* network file systems tell here that there was no room */
        rc = failed(errno);
    if (!rc)
        rc = publish(dir, tmp, way, req->replace);
    if (fd >= 0)
        (void)unlinkat(dir, tmp, 0);
    if (!far)
        (void)close(dir);
    return rc;
}

static int put_once(struct kvt_shared_files *shared, const struct kvt_remote_req *req)
{
    struct kvt_shared_way way;
    struct stat st;
    int rc;

    kvt_shared_way_init(&way);
    rc = way_made(shared, &way, req->keys);
    if (!rc && !req->replace && fstatat(way.below, way.name.file, &st, AT_SYMLINK_NOFOLLOW) == 0) {
        if (!kvt_shared_expired(shared, req, &st))
            rc = KVT_E_EXISTS;
        else
            (void)unlinkat(way.below, way.name.file, 0); /* the cleaner's work, done now */
    }
    if (!rc)
        rc = put_way(shared, req, &way, is_far(shared, way.name.ns, false));
    if (rc == -EXDEV && is_far(shared, way.name.ns, true))
        rc = put_way(shared, req, &way, true);
    if (!rc)
        say_ttl(shared, way.ns, way.name.ns, req->ttl_ns);
    kvt_shared_way_close(&way);
    return rc;
}

/* Directories that are not there: somebody has removed them under us. */
int kvt_shared_put(struct kvt_shared_files *shared, const struct kvt_remote_req *req)
{
    int rc = put_once(shared, req);

    if (rc == -ENOENT) /* a purge, or a cleaner of directories */
        rc = put_once(shared, req);
    if (rc != -ENOENT && rc != -ESTALE)
        return rc;
    rc = kvt_shared_root_again(shared);
    return rc ? rc : put_once(shared, req);
}
