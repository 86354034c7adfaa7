/* Records as files: see shared_files.h, and shared_dir.c for the rules. Blocks. Allocates nothing
 * itself; readdir() does.
 */
#include "remote/shared_files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "base/fd.h"
#include "kvtier/error.h"

#define NOTE_NS INT64_C(3600000000000)
#define TELL_NS INT64_C(600000000000) /* one warning in ten minutes */
#define READ_MODE (O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)

/* ---- times --------------------------------------------------------------------------------- */

int64_t kvt_shared_time_ns(struct timespec time)
{
    static const int64_t last_s = INT64_MAX / 1000000000 - 1; /* the year 2262; ext4 knows 2446 */
    int64_t s = time.tv_sec;

    s = s < 0 ? 0 : s > last_s ? last_s : s;
    return s * 1000000000 + time.tv_nsec;
}

static int64_t own_now_ns(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_REALTIME, &now);
    return kvt_shared_time_ns(now);
}

int64_t kvt_shared_now_ns(const struct kvt_shared_files *shared)
{
    return own_now_ns() + atomic_load_explicit(&shared->skew_ns, memory_order_relaxed);
}

int64_t kvt_shared_age_ns(int64_t now_ns, int64_t time_ns)
{
    return now_ns > time_ns ? now_ns - time_ns : time_ns - now_ns;
}

bool kvt_shared_expired(const struct kvt_shared_files *shared, const struct kvt_remote_req *req,
                        const struct stat *st)
{
    int64_t ttl_ns = kvt_remote_ttl(shared->ttl_ns, req->ttl_ns);

    return ttl_ns &&
           kvt_shared_age_ns(kvt_shared_now_ns(shared), kvt_shared_time_ns(st->st_mtim)) > ttl_ns;
}

/* ---- what is told --------------------------------------------------------------------------- */

/* Whether it is time, for one of all that ask. */
static bool tell_due(const struct kvt_shared_files *shared, _Atomic int64_t *tell_ns)
{
    int64_t now_ns = kvt_clock_now(&shared->clock);
    int64_t due_ns = atomic_load_explicit(tell_ns, memory_order_relaxed);

    return now_ns >= due_ns &&
           atomic_compare_exchange_strong_explicit(tell_ns, &due_ns, now_ns + TELL_NS,
                                                   memory_order_relaxed, memory_order_relaxed);
}

void kvt_shared_link_met(struct kvt_shared_files *shared, const char *ns, const char *below)
{
    if (tell_due(shared, &shared->link_tell_ns))
        kvt_log(&shared->log, KVT_LOG_WARN,
                "remote: %s/kvt0/%s%s%s is a symbolic link: links are not followed there, so "
                "nothing behind it is read, put, purged or counted (to have a namespace on another "
                "drive, mount that at its name: mount --bind)",
                shared->path, ns, below ? "/" : "", below ? below : "");
}

void kvt_shared_foreign_met(struct kvt_shared_files *shared, const char *ns, const char *below,
                            const char *name)
{
    if (tell_due(shared, &shared->foreign_tell_ns))
        kvt_log(&shared->log, KVT_LOG_WARN,
                "remote: %s/kvt0/%s%s%s%s%.100s is none of ours: such things are neither counted "
                "nor removed there",
                shared->path, ns, below ? "/" : "", below ? below : "", name ? "/" : "",
                name ? name : "");
}

/* ---- look-ups and loads --------------------------------------------------------------------- */

/* The way to a record; a link on it is told. */
static int way_to(struct kvt_shared_files *shared, struct kvt_shared_way *way,
                  const struct kvt_full_key *key)
{
    int rc = kvt_shared_way_to(way, shared->root, key);

    if (rc == -ELOOP)
        kvt_shared_link_met(shared, way->name.ns, way->ns >= 0 ? way->name.below : NULL);
    return rc;
}

static int open_record(struct kvt_shared_files *shared, struct kvt_shared_way *way,
                       const struct kvt_full_key *key, int *fd)
{
    int rc = way_to(shared, way, key);

    if (rc)
        return rc;
    *fd = kvt_fd_high(openat(way->below, way->name.file, READ_MODE));
    if (*fd >= 0)
        return 0;
    if (errno == ELOOP || errno == ENXIO) /* a link, a socket */
        return KVT_E_CORRUPT;
    return kvt_shared_gone(errno) ? KVT_E_MISS : -errno;
}

/* What lies at a record's name. 0; KVT_E_MISS; KVT_E_CORRUPT it is no file; -errno. */
static int look(const struct kvt_shared_files *shared, const struct kvt_remote_req *req, int fd,
                struct stat *st)
{
    if (fstat(fd, st) != 0)
        return kvt_shared_gone(errno) ? KVT_E_MISS : -errno;
    if (!S_ISREG(st->st_mode))
        return KVT_E_CORRUPT;
    return kvt_shared_expired(shared, req, st) ? KVT_E_MISS : 0;
}

/* Whether a file of that length is a record of this one, with the MAC that it has to have; who has
 * no key does not look at MACs. */
static bool length_fits(const struct kvt_shared_files *shared, uint64_t len, uint32_t record_bytes)
{
    return len == (uint64_t)record_bytes + KVT_REMOTE_MAC_BYTES ||
           (!shared->mac.on && len == record_bytes);
}

/* KVT_E_CORRUPT: the file is shorter. */
static int header_of(int fd, struct kvt_record_header *header)
{
    ssize_t got = pread(fd, header, sizeof(*header), 0);

    if (got < 0)
        return kvt_shared_gone(errno) ? KVT_E_MISS : -errno;
    return got == (ssize_t)sizeof(*header) ? 0 : KVT_E_CORRUPT;
}

static int probe_one(struct kvt_shared_files *shared, struct kvt_shared_way *way,
                     const struct kvt_remote_req *req, uint32_t i)
{
    struct kvt_record_header *header = &req->found[i].header;
    int fd, rc = open_record(shared, way, &req->keys[i], &fd);
    struct stat st;

    if (rc)
        return rc;
    rc = look(shared, req, fd, &st);
    if (!rc)
        rc = header_of(fd, header);
    (void)close(fd);
    /* what is cut off, or has no MAC, is known before anybody waits for it */
    if (!rc && kvt_record_header_check(header) == 0 &&
        !length_fits(shared, (uint64_t)st.st_size, header->record_bytes))
        rc = KVT_E_CORRUPT;
    return rc;
}

static int probe(struct kvt_shared_files *shared, struct kvt_remote_req *req)
{
    struct kvt_shared_way way;
    int status = 0;

    kvt_shared_way_init(&way);
    for (uint32_t i = 0; i < req->count; i++) {
        bool late = kvt_clock_now(&shared->clock) >= req->deadline_ns;
        int rc = late ? KVT_E_DEADLINE : probe_one(shared, &way, req, i);

        req->found[i].status = rc;
        if (rc && rc != KVT_E_MISS && rc != KVT_E_CORRUPT && !status)
            status = rc;
    }
    kvt_shared_way_close(&way);
    return status;
}

/* All of it, and the MAC behind it where there is one. */
static int read_whole(int fd, struct kvt_remote_req *req, uint8_t *mac, size_t mac_len)
{
    uint8_t *record = req->record;
    size_t at = 0;

    while (at < req->record_bytes + mac_len) {
        size_t into = at < req->record_bytes ? req->record_bytes - at : 0;
        size_t mac_at = at > req->record_bytes ? at - req->record_bytes : 0;
        struct iovec iov[2] = {{.iov_base = record + at, .iov_len = into},
                               {.iov_base = mac + mac_at, .iov_len = mac_len - mac_at}};
        ssize_t got = into ? preadv(fd, iov, mac_len ? 2 : 1, (off_t)at)
                           : pread(fd, mac + mac_at, mac_len - mac_at, (off_t)at);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return kvt_shared_gone(errno) ? KVT_E_MISS : -errno;
        if (got == 0)
            return KVT_E_CORRUPT; /* shorter than it was a moment ago */
        at += (size_t)got;
    }
    return 0;
}

/* For the cleaner: when it was read last, to the hour, however the file system is mounted. */
static void note_use(const struct kvt_shared_files *shared, int fd, const struct stat *st)
{
    const struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_nsec = UTIME_OMIT}};
    int64_t now_ns = kvt_shared_now_ns(shared);

    if (kvt_shared_age_ns(now_ns, kvt_shared_time_ns(st->st_atim)) > NOTE_NS &&
        kvt_shared_age_ns(now_ns, kvt_shared_time_ns(st->st_mtim)) > NOTE_NS &&
        futimens(fd, times) != 0)
        return; /* somebody else's file: its age is what it is */
}

static int get(struct kvt_shared_files *shared, struct kvt_remote_req *req)
{
    struct kvt_shared_way way;
    size_t mac_len = shared->mac.on ? KVT_REMOTE_MAC_BYTES : 0;
    uint8_t mac[KVT_REMOTE_MAC_BYTES];
    struct kvt_record_header other;
    struct stat st;
    int fd, rc;

    kvt_shared_way_init(&way);
    rc = open_record(shared, &way, req->keys, &fd);
    kvt_shared_way_close(&way);
    if (rc)
        return rc;
    rc = look(shared, req, fd, &st);
    if (!rc && !length_fits(shared, (uint64_t)st.st_size, req->record_bytes)) {
        rc = header_of(fd, &other);
        if (!rc)
            rc = kvt_remote_other(&shared->mac, req->keys, &other, (uint64_t)st.st_size);
    } else if (!rc) {
        rc = read_whole(fd, req, mac, mac_len);
    }
    if (!rc)
        note_use(shared, fd, &st);
    (void)close(fd);
    return rc ? rc : kvt_remote_unseal(&shared->mac, req, mac);
}

/* The same for all keys. */
static int end_all(struct kvt_remote_req *req, int status)
{
    for (uint32_t i = 0; req->op == KVT_REMOTE_PROBE && i < req->count; i++)
        req->found[i].status = status;
    return status == KVT_E_MISS && req->op != KVT_REMOTE_GET ? 0 : status;
}

int kvt_shared_files_do(struct kvt_shared_files *shared, struct kvt_remote_req *req)
{
    int rc;

    req->removed = 0;
    if (kvt_clock_now(&shared->clock) >= req->deadline_ns)
        return end_all(req, KVT_E_DEADLINE);
    rc = kvt_shared_root_look(shared, req->op);
    if (rc)
        return end_all(req, rc);
    switch (req->op) {
    case KVT_REMOTE_PROBE:
        return probe(shared, req);
    case KVT_REMOTE_GET:
        return get(shared, req);
    case KVT_REMOTE_PUT:
        return kvt_shared_put(shared, req);
    case KVT_REMOTE_DROP:
        return kvt_shared_drop(shared, req);
    case KVT_REMOTE_DROP_NS:
        return kvt_shared_drop_ns(shared, req);
    }
    return -EINVAL;
}

/* A file for a moment, for its time. */
static void look_at_clock(struct kvt_shared_files *shared)
{
    char name[160];
    int fd, dir = kvt_shared_dir_at(shared->root, "tmp");

    (void)snprintf(name, sizeof(name), "%.64s.%ld.clock", shared->node, (long)getpid());
    fd = dir >= 0 ? kvt_shared_create(shared, dir, name) : -1;
    if (fd >= 0) {
        (void)close(fd);
        (void)unlinkat(dir, name, 0);
    }
    if (dir >= 0)
        (void)close(dir);
}

int kvt_shared_files_open(struct kvt_shared_files *shared, const char *path, char *error,
                          size_t error_len)
{
    int rc;

    shared->clock = kvt_clock_system();
    if (gethostname(shared->node, sizeof(shared->node) - 1) != 0)
        shared->node[0] = '\0';
    for (char *at = shared->node; *at; at++)
        if (*at == '/')
            *at = '_';
    atomic_init(&shared->number, (uint64_t)kvt_clock_now(&shared->clock));
    rc = kvt_shared_root_open(shared, path, error, error_len);
    if (!rc)
        look_at_clock(shared);
    return rc;
}

void kvt_shared_files_close(struct kvt_shared_files *shared)
{
    if (shared->root >= 0)
        (void)close(shared->root);
    shared->root = -1;
    (void)pthread_mutex_destroy(&shared->root_lock);
    (void)pthread_mutex_destroy(&shared->notes_lock);
}
