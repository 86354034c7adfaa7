/* Records as files: see shared_files.h, and shared_dir.c for the rules. Blocks. Allocates nothing
 * itself; readdir() does.
 */
#include "remote/shared_files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "kvtier/error.h"

#define NOTE_S 3600
#define PATH_ROOM 256u /* below the root */
#define READ_MODE (O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)

static bool gone(int err)
{
    return err == ENOENT || err == ESTALE || err == ENOTDIR;
}

/* Directory of a record, and its path below the root. */
static void path_of(const struct kvt_full_key *key, char dir[PATH_ROOM], char path[PATH_ROOM])
{
    char name[KVT_REMOTE_NAME_BYTES];
    const char *hash = name + 5 + 2 * KVT_NS_BYTES + 1;
    int below;

    (void)kvt_remote_name(key, name);
    below = snprintf(dir, PATH_ROOM, "%.32s/%.2s", name + 5, hash);
    (void)snprintf(path, PATH_ROOM, "%.35s/%.128s", dir, hash);
    for (char *at = path + below; *at; at++)
        if (*at == ':')
            *at = '.';
}

/* Older than it may be, by the clock of this machine. */
static bool expired(const struct kvt_shared_files *shared, const struct kvt_remote_req *req,
                    const struct stat *st)
{
    int64_t ttl_ns = kvt_remote_ttl(shared->ttl_ns, req->ttl_ns);
    int64_t age_s, ttl_s = ttl_ns / 1000000000; /* no sum of times can overflow */
    struct timespec now;

    if (!ttl_ns)
        return false;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    age_s = now.tv_sec - st->st_mtim.tv_sec;
    return age_s > ttl_s ||
           (age_s == ttl_s && now.tv_nsec - st->st_mtim.tv_nsec > ttl_ns % 1000000000);
}

static int open_record(const struct kvt_shared_files *shared, const struct kvt_full_key *key,
                       int *fd)
{
    char dir[PATH_ROOM], path[PATH_ROOM];

    path_of(key, dir, path);
    *fd = openat(shared->root, path, READ_MODE);
    if (*fd >= 0)
        return 0;
    if (errno == ELOOP || errno == ENXIO) /* a link, a socket */
        return KVT_E_CORRUPT;
    return gone(errno) ? KVT_E_MISS : -errno;
}

/* What lies at a record's name. 0; KVT_E_MISS; KVT_E_CORRUPT it is no file; -errno. */
static int look(const struct kvt_shared_files *shared, const struct kvt_remote_req *req, int fd,
                struct stat *st)
{
    if (fstat(fd, st) != 0)
        return gone(errno) ? KVT_E_MISS : -errno;
    if (!S_ISREG(st->st_mode))
        return KVT_E_CORRUPT;
    return expired(shared, req, st) ? KVT_E_MISS : 0;
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
        return gone(errno) ? KVT_E_MISS : -errno;
    return got == (ssize_t)sizeof(*header) ? 0 : KVT_E_CORRUPT;
}

static int probe_one(const struct kvt_shared_files *shared, const struct kvt_remote_req *req,
                     uint32_t i)
{
    struct kvt_record_header *header = &req->found[i].header;
    int fd, rc = open_record(shared, &req->keys[i], &fd);
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
    int status = 0;

    for (uint32_t i = 0; i < req->count; i++) {
        bool late = kvt_clock_now(&shared->clock) >= req->deadline_ns;
        int rc = late ? KVT_E_DEADLINE : probe_one(shared, req, i);

        req->found[i].status = rc;
        if (rc && rc != KVT_E_MISS && rc != KVT_E_CORRUPT && !status)
            status = rc;
    }
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
            return gone(errno) ? KVT_E_MISS : -errno;
        if (got == 0)
            return KVT_E_CORRUPT; /* shorter than it was a moment ago */
        at += (size_t)got;
    }
    return 0;
}

/* For the cleaner: when it was read last, to the hour, however the file system is mounted. */
static void note_use(int fd, const struct stat *st)
{
    const struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_nsec = UTIME_OMIT}};
    struct timespec now;

    (void)clock_gettime(CLOCK_REALTIME, &now);
    if (now.tv_sec - st->st_atim.tv_sec > NOTE_S && now.tv_sec - st->st_mtim.tv_sec > NOTE_S &&
        futimens(fd, times) != 0)
        return; /* somebody else's file: its age is what it is */
}

static int get(const struct kvt_shared_files *shared, struct kvt_remote_req *req)
{
    size_t mac_len = shared->mac.on ? KVT_REMOTE_MAC_BYTES : 0;
    uint8_t mac[KVT_REMOTE_MAC_BYTES];
    struct kvt_record_header other;
    struct stat st;
    int fd, rc = open_record(shared, req->keys, &fd);

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
        note_use(fd, &st);
    (void)close(fd);
    return rc ? rc : kvt_remote_unseal(&shared->mac, req, mac);
}

static int write_whole(int fd, const void *bytes, size_t len)
{
    const uint8_t *at = bytes;

    while (len) {
        ssize_t put = write(fd, at, len);

        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return errno == ENOSPC || errno == EDQUOT ? KVT_E_NO_SPACE : -errno;
        at += put;
        len -= (size_t)put;
    }
    return 0;
}

static int make_dirs(const struct kvt_shared_files *shared, char *dir)
{
    char *slash = strchr(dir, '/');

    *slash = '\0';
    if (mkdirat(shared->root, dir, 0700) != 0 && errno != EEXIST)
        return errno == ENOSPC || errno == EDQUOT ? KVT_E_NO_SPACE : -errno;
    *slash = '/';
    if (mkdirat(shared->root, dir, 0700) != 0 && errno != EEXIST)
        return errno == ENOSPC || errno == EDQUOT ? KVT_E_NO_SPACE : -errno;
    return 0;
}

/* Give a file that is whole its name. */
static int publish(const struct kvt_shared_files *shared, const char *tmp, const char *path,
                   const char *dir, bool replace)
{
    for (int tries = 0; tries < 2; tries++) {
        char copy[PATH_ROOM];
        int rc;

        if (replace ? renameat(shared->root, tmp, shared->root, path) == 0
                    : linkat(shared->root, tmp, shared->root, path, 0) == 0)
            return 0;
        if (errno == EISDIR && unlinkat(shared->root, path, AT_REMOVEDIR) == 0)
            continue; /* an empty one goes; one that holds something is left alone */
        if (errno == EEXIST || errno == ENOTEMPTY)
            return KVT_E_EXISTS;
        if (errno != ENOENT)
            return errno == ENOSPC || errno == EDQUOT ? KVT_E_NO_SPACE : -errno;
        memcpy(copy, dir, PATH_ROOM);
        rc = make_dirs(shared, copy);
        if (rc)
            return rc;
    }
    return -ENOENT; /* somebody removes directories as fast as we make them */
}

static int put_once(struct kvt_shared_files *shared, const struct kvt_remote_req *req)
{
    char dir[PATH_ROOM], path[PATH_ROOM], tmp[PATH_ROOM];
    uint8_t mac[KVT_REMOTE_MAC_BYTES];
    struct stat st;
    int fd, rc;

    path_of(req->keys, dir, path);
    if (!req->replace && fstatat(shared->root, path, &st, AT_SYMLINK_NOFOLLOW) == 0) {
        if (!expired(shared, req, &st))
            return KVT_E_EXISTS;
        (void)unlinkat(shared->root, path, 0); /* the cleaner's work, done now */
    }
    if (shared->mac.on && !kvt_remote_mac(&shared->mac, req->record, req->record_bytes, mac))
        return -EIO;
    (void)snprintf(
        tmp, sizeof(tmp), "tmp/%.64s.%ld.%llu", shared->node, (long)getpid(),
        (unsigned long long)atomic_fetch_add_explicit(&shared->number, 1, memory_order_relaxed));
    fd = openat(shared->root, tmp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return errno == ENOSPC || errno == EDQUOT ? KVT_E_NO_SPACE : -errno;
    rc = write_whole(fd, req->record, req->record_bytes);
    if (!rc && shared->mac.on)
        rc = write_whole(fd, mac, sizeof(mac));
    if (close(fd) != 0 && !rc) /* network file systems tell here that there was no room */
        rc = errno == ENOSPC || errno == EDQUOT ? KVT_E_NO_SPACE : -errno;
    if (!rc)
        rc = publish(shared, tmp, path, dir, req->replace);
    (void)unlinkat(shared->root, tmp, 0);
    return rc;
}

/* Directories that are not there: somebody has removed them under us. */
static int put(struct kvt_shared_files *shared, const struct kvt_remote_req *req)
{
    int rc = put_once(shared, req);

    if (rc != -ENOENT && rc != -ESTALE)
        return rc;
    rc = kvt_shared_root_again(shared);
    return rc ? rc : put_once(shared, req);
}

static int drop(const struct kvt_shared_files *shared, struct kvt_remote_req *req)
{
    char dir[PATH_ROOM], path[PATH_ROOM];
    int status = 0;

    for (uint32_t i = 0; i < req->count; i++) {
        path_of(&req->keys[i], dir, path);
        if (unlinkat(shared->root, path, 0) == 0)
            req->removed++;
        else if (!gone(errno) && errno != EISDIR && !status) /* a directory is no record */
            status = -errno;
    }
    return status;
}

/* Every file of a directory, not of those below. */
static int drop_files(int parent, const char *name, uint64_t *removed)
{
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW), status = 0;
    DIR *list = fd >= 0 ? fdopendir(fd) : NULL;
    const struct dirent *entry;

    if (!list) {
        status = gone(errno) ? 0 : -errno;
        if (fd >= 0)
            (void)close(fd);
        return status;
    }
    while ((entry = readdir(list)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        if (unlinkat(fd, entry->d_name, 0) == 0)
            ++*removed;
        else if (!gone(errno) && errno != EISDIR && !status) /* a directory is no record */
            status = -errno;
    }
    (void)closedir(list);
    (void)unlinkat(parent, name, AT_REMOVEDIR);
    return status;
}

static int drop_ns(const struct kvt_shared_files *shared, struct kvt_remote_req *req)
{
    char dir[PATH_ROOM], path[PATH_ROOM];
    int ns, status = 0;

    path_of(req->keys, dir, path);
    *strchr(dir, '/') = '\0';
    ns = openat(shared->root, dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (ns < 0)
        return gone(errno) ? 0 : -errno;
    for (unsigned byte = 0; byte < 256; byte++) {
        char name[4];
        int rc;

        (void)snprintf(name, sizeof(name), "%02x", byte);
        rc = drop_files(ns, name, &req->removed);
        if (rc && !status)
            status = rc;
    }
    (void)close(ns);
    (void)unlinkat(shared->root, dir, AT_REMOVEDIR);
    return status;
}

int kvt_shared_files_do(struct kvt_shared_files *shared, struct kvt_remote_req *req)
{
    req->removed = 0;
    if (kvt_clock_now(&shared->clock) >= req->deadline_ns) {
        for (uint32_t i = 0; req->op == KVT_REMOTE_PROBE && i < req->count; i++)
            req->found[i].status = KVT_E_DEADLINE;
        return KVT_E_DEADLINE;
    }
    kvt_shared_root_look(shared, req->op);
    switch (req->op) {
    case KVT_REMOTE_PROBE:
        return probe(shared, req);
    case KVT_REMOTE_GET:
        return get(shared, req);
    case KVT_REMOTE_PUT:
        return put(shared, req);
    case KVT_REMOTE_DROP:
        return drop(shared, req);
    case KVT_REMOTE_DROP_NS:
        return drop_ns(shared, req);
    }
    return -EINVAL;
}

int kvt_shared_files_open(struct kvt_shared_files *shared, const char *path, char *error,
                          size_t error_len)
{
    shared->clock = kvt_clock_system();
    if (gethostname(shared->node, sizeof(shared->node) - 1) != 0)
        shared->node[0] = '\0';
    for (char *at = shared->node; *at; at++)
        if (*at == '/')
            *at = '_';
    atomic_init(&shared->number, (uint64_t)kvt_clock_now(&shared->clock));
    return kvt_shared_root_open(shared, path, error, error_len);
}

void kvt_shared_files_close(struct kvt_shared_files *shared)
{
    if (shared->root >= 0)
        (void)close(shared->root);
    shared->root = -1;
    (void)pthread_mutex_destroy(&shared->root_lock);
}
