/* The cleaner of a shared directory.
 *
 *   every period: ROOT/kvt0/cleaner is ours?      yes: its time is renewed, and a pass is made
 *                 it is not there                 it is made ours by link()
 *                 not renewed for six periods     it is put aside, and made ours (where its time
 * lies ahead: it has not changed for six of ours)
 *
 * A pass removes what is older than the time to live (the option's, or the one that its namespace's
 * programs have said, shared_path.h: the shorter), by the time it was written, and adds up the
 * rest, namespace by namespace: blocks that the file system gives it, not lengths. Where one is
 * more than its cap, and where all of them are more than theirs, those files go that were not used
 * for longest, down to nine tenths of it. A file's use is the later of its two times; readers set
 * it once an hour (shared_files.c), so it does not matter how the file system is mounted. Times are
 * the file server's throughout: "now" is the time of a file just made; one that lies ahead counts
 * for as long ago. What has no name of ours is left alone, and told; links are not followed.
 *
 * Passes take a tenth of the time at most: one that took long is not followed by the next at once.
 * The lease is renewed meanwhile, and within a pass.
 *
 * Two cleaners for a moment (who was stopped for a minute finds out before his next pass) remove
 * what has to go anyway: the lease saves work, nothing depends on it. Threads: its own. Allocates
 * nothing itself; readdir() does.
 */
#include "remote/shared_clean.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"

#define LEASE "cleaner"
#define PERIOD_NS INT64_C(10000000000)
#define LEASE_PERIODS 6
#define BUCKETS 1024u
#define TMP_AGE_NS INT64_C(3600000000000) /* nobody writes a record for an hour */

#define REST 9 /* times as long as a pass took */

struct pass {
    struct kvt_shared_clean *clean;
    int64_t now_ns, oldest_ns, width_ns, ttl_ns, renewed_ns;
    uint64_t bytes, to_go, freed;
    uint32_t limit; /* buckets above it go whole, itself as far as needed */
    bool lost;      /* the lease, in mid-pass */
    const char *ns, *below;
    uint64_t ages[BUCKETS];
    void (*each)(struct pass *pass, int dir, const char *name, const struct stat *st);
};

static uint64_t bytes_of(const struct stat *st)
{
    return (uint64_t)st->st_blocks * 512;
}

static int64_t unused_ns(const struct pass *pass, const struct stat *st)
{
    int64_t read = kvt_shared_time_ns(st->st_atim), written = kvt_shared_time_ns(st->st_mtim);

    return kvt_shared_age_ns(pass->now_ns, read > written ? read : written);
}

static bool stopping(struct kvt_shared_clean *clean)
{
    bool stop;

    pthread_mutex_lock(&clean->lock);
    stop = clean->stopping;
    pthread_mutex_unlock(&clean->lock);
    return stop;
}

static bool lease_ours(const struct kvt_shared_clean *clean);

/* Whether the pass is to end: the program does, or somebody else has the lease. */
static bool over(struct pass *pass)
{
    int64_t now_ns = kvt_clock_now(&pass->clean->files->clock);

    if (now_ns - pass->renewed_ns > pass->clean->period_ns) {
        pass->lost = pass->lost || !lease_ours(pass->clean);
        pass->renewed_ns = now_ns;
    }
    return pass->lost || stopping(pass->clean);
}

/* ---- the walk ------------------------------------------------------------------------------ */

static bool is_dot(const char *name)
{
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

static bool is_left(const char *name)
{
    return strncmp(name, KVT_SHARED_PUT, strlen(KVT_SHARED_PUT)) == 0;
}

/* What a dead writer has left. */
static void remove_left(struct pass *pass, int dir, const char *name, const struct stat *st)
{
    if (kvt_shared_age_ns(pass->now_ns, kvt_shared_time_ns(st->st_mtim)) > TMP_AGE_NS)
        (void)unlinkat(dir, name, 0);
}

/* Every record in a directory. An empty one that nobody has touched for an hour goes. */
static void walk_below(struct pass *pass, int ns)
{
    struct kvt_shared_files *files = pass->clean->files;
    const struct dirent *entry;
    struct stat st;
    bool any = false;
    int rc;
    DIR *list = kvt_shared_list_at(ns, pass->below, &rc);

    if (rc == -ELOOP)
        kvt_shared_link_met(files, pass->ns, pass->below);
    if (!list)
        return; /* it has gone, or is none */
    while ((entry = readdir(list)) != NULL && !over(pass)) {
        const char *name = entry->d_name;

        if (is_dot(name))
            continue;
        any = true;
        if (fstatat(dirfd(list), name, &st, AT_SYMLINK_NOFOLLOW) != 0)
            continue;
        if (S_ISREG(st.st_mode) && kvt_shared_is_record(name, pass->below))
            pass->each(pass, dirfd(list), name, &st);
        else if (S_ISREG(st.st_mode) && is_left(name))
            remove_left(pass, dirfd(list), name, &st);
        else
            kvt_shared_foreign_met(files, pass->ns, pass->below, name);
    }
    if (!any && fstat(dirfd(list), &st) == 0 &&
        kvt_shared_age_ns(pass->now_ns, kvt_shared_time_ns(st.st_mtim)) > TMP_AGE_NS)
        (void)unlinkat(ns, pass->below, AT_REMOVEDIR);
    (void)closedir(list);
}

/* Every record of a namespace. */
static void walk_ns(struct pass *pass, const char *name)
{
    int ns = kvt_shared_dir_at(pass->clean->files->root, name);

    pass->ns = name;
    if (ns == -ELOOP)
        kvt_shared_link_met(pass->clean->files, name, NULL);
    for (unsigned byte = 0; ns >= 0 && byte < 256 && !over(pass); byte++) {
        char below[4];

        (void)snprintf(below, sizeof(below), "%02x", byte);
        pass->below = below;
        walk_below(pass, ns);
    }
    pass->below = NULL;
    if (ns >= 0)
        (void)close(ns);
}

/* Every namespace. */
static void walk(struct pass *pass, void (*each)(struct pass *pass, const char *name))
{
    const struct dirent *entry;
    int rc;
    DIR *list = kvt_shared_list_at(pass->clean->files->root, ".", &rc);

    if (!list)
        return;
    while ((entry = readdir(list)) != NULL && !over(pass)) {
        const char *name = entry->d_name;

        if (kvt_shared_is_ns(name))
            each(pass, name);
        else if (!is_dot(name) && strcmp(name, "tmp") != 0 && strcmp(name, LEASE) != 0)
            kvt_shared_foreign_met(pass->clean->files, name, NULL, NULL);
    }
    (void)closedir(list);
}

static void walk_tmp(struct pass *pass)
{
    const struct dirent *entry;
    struct stat st;
    int rc;
    DIR *list = kvt_shared_list_at(pass->clean->files->root, "tmp", &rc);

    while (list && (entry = readdir(list)) != NULL && !over(pass))
        if (fstatat(dirfd(list), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
            S_ISREG(st.st_mode))
            remove_left(pass, dirfd(list), entry->d_name, &st);
    if (list)
        (void)closedir(list);
}

static uint32_t bucket_of(const struct pass *pass, const struct stat *st)
{
    uint64_t bucket = (uint64_t)(unused_ns(pass, st) / pass->width_ns);

    return bucket < BUCKETS ? (uint32_t)bucket : BUCKETS - 1;
}

static bool remove_one(struct pass *pass, int dir, const char *name)
{
    if (unlinkat(dir, name, 0) != 0)
        return false; /* somebody was faster */
    (void)atomic_fetch_add_explicit(&pass->clean->removed, 1, memory_order_relaxed);
    return true;
}

static void add_up(struct pass *pass, int dir, const char *name, const struct stat *st)
{
    int64_t unused = unused_ns(pass, st);

    if (pass->ttl_ns &&
        kvt_shared_age_ns(pass->now_ns, kvt_shared_time_ns(st->st_mtim)) > pass->ttl_ns) {
        (void)remove_one(pass, dir, name);
        return;
    }
    pass->bytes += bytes_of(st);
    if (unused > pass->oldest_ns)
        pass->oldest_ns = unused;
}

static void sort_in(struct pass *pass, int dir, const char *name, const struct stat *st)
{
    (void)dir;
    (void)name;
    pass->ages[bucket_of(pass, st)] += bytes_of(st);
}

static void remove_old(struct pass *pass, int dir, const char *name, const struct stat *st)
{
    uint32_t bucket = bucket_of(pass, st);
    uint64_t bytes = bytes_of(st);

    if (bucket < pass->limit || (bucket == pass->limit && !pass->to_go) ||
        !remove_one(pass, dir, name))
        return;
    pass->freed += bytes;
    if (bucket == pass->limit)
        pass->to_go -= bytes < pass->to_go ? bytes : pass->to_go;
}

/* Of what has been added up, in one namespace or (NULL) in all of them: down to the cap. */
static void shrink(struct pass *pass, uint64_t cap_bytes, const char *name)
{
    pass->freed = 0;
    if (!cap_bytes || pass->bytes <= cap_bytes || over(pass))
        return;
    memset(pass->ages, 0, sizeof(pass->ages));
    pass->width_ns = pass->oldest_ns / BUCKETS + 1;
    pass->each = sort_in;
    if (name)
        walk_ns(pass, name);
    else
        walk(pass, walk_ns);
    pass->to_go = pass->bytes - cap_bytes / 10 * 9;
    pass->limit = BUCKETS - 1;
    while (pass->limit > 0 && pass->ages[pass->limit] < pass->to_go)
        pass->to_go -= pass->ages[pass->limit--];
    pass->each = remove_old;
    if (name)
        walk_ns(pass, name);
    else
        walk(pass, walk_ns);
}

/* What programs have said last of how long records live in a namespace; 0: nothing, or nonsense. */
static int64_t said_ttl(const struct pass *pass, const char *name)
{
    int ns = kvt_shared_dir_at(pass->clean->files->root, name);
    int fd = ns >= 0
                 ? kvt_fd_high(openat(ns, "ttl", O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK))
                 : -1;
    char text[32] = "", *end;
    long long ms;

    if (fd >= 0 && pread(fd, text, sizeof(text) - 1, 0) < 0)
        text[0] = '\0';
    if (fd >= 0)
        (void)close(fd);
    if (ns >= 0)
        (void)close(ns);
    errno = 0;
    ms = strtoll(text, &end, 10);
    return end == text || *end != '\n' || errno || ms <= 0 || ms > INT64_MAX / 1000000
               ? 0
               : ms * 1000000;
}

/* One namespace is added up, and brought down to its cap; sums of all of them go on. */
static void clean_ns(struct pass *pass, const char *name)
{
    uint64_t before = pass->bytes;
    int64_t oldest_ns = pass->oldest_ns;

    pass->ttl_ns = kvt_remote_ttl(pass->clean->files->ttl_ns, said_ttl(pass, name));
    if (!pass->ttl_ns && !pass->clean->cap_bytes && !pass->clean->ns_cap_bytes)
        return; /* nothing to be done there */
    pass->bytes = 0;
    pass->oldest_ns = 0;
    pass->each = add_up;
    walk_ns(pass, name);
    shrink(pass, pass->clean->ns_cap_bytes, name);
    pass->bytes = before + pass->bytes - (pass->freed < pass->bytes ? pass->freed : pass->bytes);
    if (oldest_ns > pass->oldest_ns)
        pass->oldest_ns = oldest_ns;
}

static void make_pass(struct kvt_shared_clean *clean, int64_t now_ns)
{
    struct pass *pass = calloc(1, sizeof(*pass));

    if (!pass)
        return; /* the next period */
    pass->clean = clean;
    pass->now_ns = now_ns;
    pass->renewed_ns = kvt_clock_now(&clean->files->clock);
    walk_tmp(pass);
    walk(pass, clean_ns);
    shrink(pass, clean->cap_bytes, NULL);
    (void)atomic_fetch_add_explicit(&clean->passes, 1, memory_order_relaxed);
    free(pass);
}

/* ---- the lease ----------------------------------------------------------------------------- */

/* Whether the lease has our token; renewed where it has. */
static bool lease_ours(const struct kvt_shared_clean *clean)
{
    char text[sizeof(clean->token)] = "";
    int fd = kvt_fd_high(
        openat(clean->files->root, LEASE, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    bool ours;

    if (fd < 0)
        return false;
    ours = pread(fd, text, sizeof(text) - 1, 0) == (ssize_t)strlen(clean->token) &&
           strcmp(text, clean->token) == 0 && futimens(fd, NULL) == 0;
    (void)close(fd);
    return ours;
}

/* A file of ours, and what time the file server says it is. */
static bool own_file(const struct kvt_shared_clean *clean, const char *name, int64_t *now_ns)
{
    struct stat st;
    int fd = kvt_fd_high(openat(clean->files->root, name,
                                O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK,
                                0600));
    bool good = fd >= 0 &&
                write(fd, clean->token, strlen(clean->token)) == (ssize_t)strlen(clean->token) &&
                fstat(fd, &st) == 0;

    if (good)
        *now_ns = kvt_shared_time_ns(st.st_mtim);
    if (fd >= 0)
        (void)close(fd);
    return good;
}

/* Whether somebody's lease has run out. What it says of a time ahead is not believed: the file
 * server's clock was set back; then it has run out when it has not changed for as long here. */
static bool run_out(struct kvt_shared_clean *clean, const struct stat *st, int64_t now_ns)
{
    int64_t at_ns = kvt_shared_time_ns(st->st_mtim), long_ns = LEASE_PERIODS * clean->period_ns;
    int64_t here_ns = kvt_clock_now(&clean->files->clock);

    if (at_ns != clean->seen_ns || st->st_ino != clean->seen_ino) {
        clean->seen_ns = at_ns;
        clean->seen_ino = st->st_ino;
        clean->since_ns = here_ns;
    }
    return now_ns - at_ns > long_ns || (at_ns > now_ns && here_ns - clean->since_ns > long_ns);
}

/* It is put aside. What is no file never was a lease: a link goes, a directory when it is empty. */
static void put_aside(struct kvt_shared_clean *clean, const struct stat *st, const char *aside)
{
    int root = clean->files->root;

    if (S_ISDIR(st->st_mode)) {
        if (unlinkat(root, LEASE, AT_REMOVEDIR) != 0 && !clean->told)
            kvt_log(&clean->files->log, KVT_LOG_WARN,
                    "remote: %s/kvt0/" LEASE " is a directory, and not an empty one: nobody cleans "
                    "until it is removed",
                    clean->files->path);
        clean->told = true;
        return;
    }
    (void)renameat(root, LEASE, root, aside);
    (void)unlinkat(root, aside, 0);
}

/* Whether we are the cleaner from now on, or still. */
static bool elected(struct kvt_shared_clean *clean, int64_t *now_ns)
{
    int root = clean->files->root;
    char mine[192], aside[200];
    struct stat st;
    bool won;

    (void)snprintf(mine, sizeof(mine), "tmp/lease.%s", clean->token);
    (void)snprintf(aside, sizeof(aside), "%s.old", mine);
    if (!own_file(clean, mine, now_ns))
        return false;
    if (lease_ours(clean)) {
        (void)unlinkat(root, mine, 0);
        return true;
    }
    if (fstatat(root, LEASE, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
        (!S_ISREG(st.st_mode) || run_out(clean, &st, *now_ns)))
        put_aside(clean, &st, aside);
    won = linkat(root, mine, root, LEASE, 0) == 0;
    (void)unlinkat(root, mine, 0);
    return won;
}

/* ---- the thread ---------------------------------------------------------------------------- */

/* Without caps and a time to live nobody cleans; a namespace's own may be told later. */
static bool has_work(const struct kvt_shared_clean *clean)
{
    return clean->cap_bytes || clean->ns_cap_bytes || clean->files->ttl_ns ||
           atomic_load_explicit(&clean->files->ttl_said, memory_order_relaxed);
}

static void *clean_thread(void *arg)
{
    struct kvt_shared_clean *clean = arg;
    int64_t due_ns = 0;

    while (!stopping(clean)) {
        int64_t at_ns = kvt_clock_now(&clean->files->clock), now_ns;
        struct timespec until;

        if (has_work(clean) && kvt_shared_root_look(clean->files, KVT_REMOTE_GET) == 0 &&
            elected(clean, &now_ns) && at_ns >= due_ns) {
            make_pass(clean, now_ns);
            due_ns = kvt_clock_now(&clean->files->clock);
            due_ns += REST * (due_ns - at_ns);
        }
        at_ns = kvt_clock_now(&clean->files->clock) + clean->period_ns;
        until = (struct timespec){.tv_sec = at_ns / 1000000000, .tv_nsec = at_ns % 1000000000};
        pthread_mutex_lock(&clean->lock);
        if (!clean->stopping)
            (void)pthread_cond_timedwait(&clean->again, &clean->lock, &until);
        pthread_mutex_unlock(&clean->lock);
    }
    if (has_work(clean) && lease_ours(clean))
        (void)unlinkat(clean->files->root, LEASE, 0);
    return NULL;
}

int kvt_shared_clean_start(struct kvt_shared_clean *clean, struct kvt_shared_files *files,
                           const struct kvt_remote_params *params)
{
    pthread_condattr_t attr;
    sigset_t all, before;
    int err;

    clean->files = files;
    clean->cap_bytes = params->cap_bytes;
    clean->ns_cap_bytes = params->ns_cap_bytes;
    clean->period_ns = params->clean_period_ns ? params->clean_period_ns : PERIOD_NS;
    (void)snprintf(clean->token, sizeof(clean->token), "%.64s.%ld.%llx", files->node,
                   (long)getpid(), (unsigned long long)kvt_clock_now(&files->clock));
    /* none of them can fail with these arguments */
    (void)pthread_mutex_init(&clean->lock, NULL);
    (void)pthread_condattr_init(&attr);
    (void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&clean->again, &attr);
    (void)pthread_condattr_destroy(&attr);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    err = pthread_create(&clean->thread, NULL, clean_thread, clean);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    clean->running = err == 0;
    if (err)
        return -err;
    pthread_setname_np(clean->thread, "kvt-clean");
    return 0;
}

void kvt_shared_clean_stop(struct kvt_shared_clean *clean)
{
    if (!clean->running)
        return;
    pthread_mutex_lock(&clean->lock);
    clean->stopping = true;
    pthread_cond_signal(&clean->again);
    pthread_mutex_unlock(&clean->lock);
    (void)pthread_join(clean->thread, NULL);
    clean->running = false;
    (void)pthread_cond_destroy(&clean->again);
    (void)pthread_mutex_destroy(&clean->lock);
}
