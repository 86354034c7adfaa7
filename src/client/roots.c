/* Roots: opening and locking the disk directories of a cache, and the sentences that say why one
 * cannot be used and what to do about it. Nothing is deleted here, ever.
 *
 * A root that another process holds is tried again every half second, by a thread of its own, and
 * used from the moment on when its owner has let go of it or died.
 *
 * Threads: kvt_host_open() and kvt_host_close(), and the retry thread in between: it changes states
 * under the host's lock. The log inside a root is opened by the store.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "client/host.h"
#include "kvtier/error.h"

#define RETRY_NS INT64_C(500000000)

/* The first thing in a directory, itself not a link, that is no regular file. */
static bool odd_file(const char *path, char *name, size_t len)
{
    struct stat st;
    DIR *dir = lstat(path, &st) == 0 && S_ISDIR(st.st_mode) ? kvt_fd_opendir(path) : NULL;
    bool found = false;
    if (dir == NULL)
        return false;
    for (struct dirent *entry; !found && (entry = readdir(dir)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0 ||
            fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0)
            continue;
        found = !S_ISREG(st.st_mode);
        if (found)
            (void)snprintf(name, len, "%.60s", entry->d_name);
    }
    (void)closedir(dir);
    return found;
}

/* The directory that `path` lies in. */
static void parent_of(const char *path, char parent[PATH_MAX])
{
    size_t len = strlen(path);
    while (len > 1 && path[len - 1] == '/')
        len--;
    while (len > 0 && path[len - 1] != '/')
        len--;
    (void)snprintf(parent, PATH_MAX, "%.*s.", (int)len, path);
}

static void describe_unwritable(const char *path, char *text, size_t len)
{
    char parent[PATH_MAX];
    struct stat st;
    bool absent = lstat(path, &st) != 0 && errno == ENOENT;
    parent_of(path, parent);
    if (faccessat(AT_FDCWD, absent ? parent : path, W_OK, AT_EACCESS) != 0 && errno == EROFS)
        (void)snprintf(text, len,
                       "disk root %.250s cannot be written: its file system is mounted read-only: "
                       "mount it writable, or use another one",
                       path);
    else if (absent)
        (void)snprintf(text, len,
                       "disk root %.250s does not exist, and this user may not make it: "
                       "sudo install -d -m 700 -o $USER %.120s",
                       path, path);
    else
        (void)snprintf(text, len,
                       "disk root %.250s cannot be written by this user: change its owner (sudo "
                       "chown -R $USER %.100s) or its permissions",
                       path, path);
}

static void describe_absent(const char *path, char *text, size_t len)
{
    char parent[PATH_MAX];
    struct stat st;
    parent_of(path, parent);
    if (stat(parent, &st) == 0)
        (void)snprintf(text, len,
                       "disk root %.250s does not exist and cannot be made: its file system takes "
                       "no new directories; use another place",
                       path);
    else
        (void)snprintf(text, len,
                       "disk root %.200s: its parent directory does not exist: create it first "
                       "(mkdir -p -m 700 %.150s)",
                       path, path);
}

static bool about_a_file(int code)
{
    return code == KVT_E_SYMLINK || code == -ELOOP || code == -EISDIR || code == -EINVAL ||
           code == -ENXIO || code == KVT_E_INVAL || code == -ENOTDIR;
}

void kvt_root_describe(const char *path, uint64_t cap_bytes, int code, int64_t owner_pid,
                       char *text, size_t len)
{
    char owner[48] = "another process";
    char odd[64];
    if (owner_pid > 0)
        (void)snprintf(owner, sizeof(owner), "process %" PRId64, owner_pid);
#define SAY(...) (void)snprintf(text, len, __VA_ARGS__)
    if (about_a_file(code) && odd_file(path, odd, sizeof(odd))) {
        SAY("disk root %.250s: \"%s\" in it is not a regular file: remove it", path, odd);
        return;
    }
    switch (code) {
    case KVT_E_NOT_OURS:
        SAY("disk root %.250s holds files that are not a kvtier store; nothing was touched: give "
            "it an empty or new directory",
            path);
        break;
    case KVT_E_LOCKED:
        if (owner_pid == getpid()) {
            SAY("disk root %.250s is in use by %s, which is this one: another cache has it open, "
                "or the same directory was given twice under two names: name it once",
                path, owner);
            break;
        }
        SAY("disk root %.250s is in use by %s: stop it, or give this process a directory of its "
            "own",
            path, owner);
        break;
    case KVT_E_NEWER:
        SAY("disk root %.250s was written by a newer kvtier; nothing was touched: upgrade kvtier, "
            "or use another directory",
            path);
        break;
    case KVT_E_READ_ONLY:
    case -EROFS:
    case -EACCES:
    case -EPERM:
        describe_unwritable(path, text, len);
        break;
    case KVT_E_SYMLINK:
    case -ELOOP:
        SAY("disk root %.250s is a symbolic link, which is refused: name the directory itself",
            path);
        break;
    case KVT_E_NO_SPACE:
    case -ENOSPC:
    case -EDQUOT:
        SAY("disk root %.250s: its file system is full: free space there, or use another drive",
            path);
        break;
    case KVT_E_TOO_SMALL:
        SAY("disk root %.250s: a cap of %" PRIu64 " %s is too small: give it 8MiB or more", path,
            cap_bytes >= 1u << 20 ? cap_bytes >> 20 : cap_bytes,
            cap_bytes >= 1u << 20 ? "MiB" : "bytes");
        break;
    case -ENOENT:
        describe_absent(path, text, len);
        break;
    case -ENOTDIR:
        SAY("disk root %.250s is not a directory: name a directory, or remove what is there", path);
        break;
    case KVT_E_UNSUPPORTED:
    case -EOPNOTSUPP:
        SAY("disk root %.250s: its file system cannot do O_DIRECT, which direct=on requires: set "
            "direct=auto",
            path);
        break;
    default:
        SAY("disk root %.250s cannot be used: %s (%d)", path, kvt_strerror(code), code);
    }
#undef SAY
}

static void root_off(struct kvt_root_state *root, int code, int64_t owner_pid)
{
    if (root->io != NULL)
        root->io->ops->destroy(root->io);
    root->io = NULL;
    root->error = code;
    root->number = -1;
    kvt_root_describe(root->path, root->cap_bytes, code, owner_pid, root->state,
                      sizeof(root->state));
}

void kvt_roots_drop(struct kvt_host *host, uint32_t number, int code, int64_t owner_pid)
{
    root_off(&host->roots[number], code, owner_pid);
}

static void note_info(struct kvt_root_state *root)
{
    struct kvt_io_info info;
    memset(&info, 0, sizeof(info));
    root->io->ops->info(root->io, &info);
    (void)snprintf(root->backend, sizeof(root->backend), "%s", info.backend ? info.backend : "");
    (void)snprintf(root->backend_why, sizeof(root->backend_why), "%s",
                   info.backend_why ? info.backend_why : "");
    (void)snprintf(root->why, sizeof(root->why), "%s", info.why ? info.why : "");
    root->direct = info.direct;
}

static void tell_room(const struct kvt_host *host, const struct kvt_root_state *root)
{
    struct kvt_root_room room;
    char text[640];
    if (kvt_root_room(root->path, root->cap_bytes, &room) == 0 &&
        kvt_root_room_short(&room, root->path, text, sizeof(text)))
        kvt_log(&host->log, KVT_LOG_WARN, "%s", text);
}

static int wrap(const struct kvt_settings *settings, struct kvt_root_state *root)
{
    struct kvt_io *outer = settings->io_wrap(settings->io_wrap_arg, root->io);
    if (outer == NULL) {
        root->io->ops->destroy(root->io);
        return -ENOMEM;
    }
    root->io = outer;
    return 0;
}

static int open_one(const struct kvt_host *host, struct kvt_root_state *root)
{
    const struct kvt_settings *settings = host->settings;
    struct kvt_io_posix_params params = {.path = root->path,
                                         .threads = (int)settings->io_threads,
                                         .direct = settings->direct,
                                         .backend = settings->io,
                                         .cap_bytes = root->cap_bytes,
                                         .log = host->log};
    int64_t owner_pid = 0;
    if (settings->io_register) {
        params.fixed = host->memory.arena;
        params.fixed_bytes = host->memory.arena_bytes;
    }
    int rc = kvt_io_files_new(&params, &root->io);
    if (rc == 0 && settings->io_wrap != NULL)
        rc = wrap(settings, root);
    if (rc != 0) {
        root->io = NULL;
    } else {
        rc = kvt_store_root_probe(root->io); /* a directory of others gets not even a lock file */
        if (rc >= 0)
            rc = root->io->ops->lock(root->io, &owner_pid);
    }
    if (rc != 0) {
        root_off(root, rc, owner_pid);
        return rc;
    }
    (void)snprintf(root->state, sizeof(root->state), "ok");
    note_info(root);
    tell_room(host, root);
    return 0;
}

int kvt_roots_open(struct kvt_host *host, char *error, size_t error_len)
{
    const struct kvt_settings *settings = host->settings;
    char why[200];
    /* asked for by name: not the same as a drive that is missing */
    if (settings->io == KVT_IO_URING && settings->disk_count > 0 &&
        kvt_io_uring_probe(why, sizeof(why)) != 0) {
        (void)snprintf(error, error_len, "io=uring cannot be had: %s; set io=auto", why);
        return KVT_E_UNSUPPORTED;
    }
    for (uint32_t i = 0; i < settings->disk_count; i++) {
        struct kvt_root_state *root = &host->roots[i];
        root->path = settings->disks[i].path;
        root->cap_bytes = settings->disks[i].cap_bytes;
        root->number = -1;
        int rc = open_one(host, root);
        root->waiting = rc == KVT_E_LOCKED;
        if (rc == 0)
            continue;
        if (settings->disk_required) {
            (void)snprintf(error, error_len, "%s", root->state);
            return rc;
        }
        kvt_log(&host->log, KVT_LOG_WARN, "%s (going on without it%s)", root->state,
                root->waiting ? ", and trying again" : "");
    }
    return 0;
}

int kvt_roots_missing(struct kvt_host *host)
{
    int missing = 0;
    pthread_mutex_lock(&host->lock);
    for (uint32_t i = 0; host->roots_used == 0 && i < host->settings->disk_count && !missing; i++)
        missing = host->roots[i].error;
    pthread_mutex_unlock(&host->lock);
    return missing;
}

/* For callers that have no log callback. */
void kvt_roots_tell_missing(struct kvt_host *host, char *text, size_t len)
{
    size_t used = 0;
    pthread_mutex_lock(&host->lock);
    for (uint32_t i = 0; i < host->settings->disk_count && used < len; i++) {
        if (host->roots[i].io != NULL)
            continue;
        int n = snprintf(text + used, len - used, "%s%s (going on without it)", used ? "; " : "",
                         host->roots[i].state);
        used += n > 0 ? (size_t)n : 0;
    }
    pthread_mutex_unlock(&host->lock);
}

void kvt_roots_close(struct kvt_host *host)
{
    for (uint32_t i = 0; i < KVT_DISKS_MAX; i++) {
        if (host->roots[i].io != NULL)
            host->roots[i].io->ops->destroy(host->roots[i].io);
        host->roots[i].io = NULL;
    }
}

/* Nobody holds root i any more: open it and hand it to the running store. */
static void take_over(struct kvt_host *host, uint32_t i)
{
    struct kvt_root_state root = {.path = host->roots[i].path,
                                  .cap_bytes = host->roots[i].cap_bytes};
    int rc = open_one(host, &root);
    if (rc == 0) {
        kvt_admission_file_read(host, i, &root);
        const struct kvt_store_root add = {
            .io = root.io,
            .cap_bytes = root.cap_bytes,
            .name = root.path,
            .files_max = kvt_settings_files(host->settings),
            .write_bytes_day = kvt_settings_root_writes(host->settings, root.cap_bytes),
            .write_left_known = root.write_left_known,
            .write_left = root.write_left};
        rc = kvt_owner_root_add(host->owner, &add);
        if (rc != 0)
            root_off(&root, rc, 0);
        else
            kvt_admission_file_mark(host, i);
    }
    root.waiting = rc == KVT_E_LOCKED || rc == -EAGAIN;
    if (rc == 0)
        kvt_log(&host->log, KVT_LOG_INFO, "disk root %.250s is free: in use from now on",
                root.path);
    else if (!root.waiting)
        kvt_log(&host->log, KVT_LOG_WARN, "%s (going on without it)", root.state);
    pthread_mutex_lock(&host->lock);
    if (rc == 0)
        root.number = (int)host->roots_used++;
    host->roots[i] = root;
    pthread_mutex_unlock(&host->lock);
}

static void *retry_main(void *arg)
{
    struct kvt_host *host = arg;
    pthread_mutex_lock(&host->lock);
    for (bool any = true; any && !host->stop_retry;) {
        int64_t at = kvt_clock_now(&host->clock) + RETRY_NS;
        struct timespec until = {.tv_sec = at / 1000000000, .tv_nsec = at % 1000000000};
        (void)pthread_cond_timedwait(&host->again, &host->lock, &until);
        any = false;
        for (uint32_t i = 0; i < host->settings->disk_count && !host->stop_retry; i++) {
            if (!host->roots[i].waiting)
                continue;
            pthread_mutex_unlock(&host->lock);
            if (kvt_io_posix_held(host->settings->disks[i].path) == 0)
                take_over(host, i);
            pthread_mutex_lock(&host->lock);
            any = any || host->roots[i].waiting;
        }
    }
    pthread_mutex_unlock(&host->lock);
    return NULL;
}

int kvt_roots_retry_start(struct kvt_host *host)
{
    bool any = false;
    for (uint32_t i = 0; i < host->settings->disk_count; i++)
        any = any || host->roots[i].waiting;
    if (!any)
        return 0;
    int rc = kvt_thread_start(&host->retry_thread, "kvt-roots", retry_main, host);
    host->retry_running = rc == 0;
    return rc;
}

void kvt_roots_retry_stop(struct kvt_host *host)
{
    if (!host->retry_running)
        return;
    pthread_mutex_lock(&host->lock);
    host->stop_retry = true;
    pthread_cond_broadcast(&host->again);
    pthread_mutex_unlock(&host->lock);
    pthread_join(host->retry_thread, NULL);
    host->retry_running = false;
}
