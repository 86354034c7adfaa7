/* The cleaner of a shared directory.
 *
 *   every period: ROOT/kvt0/cleaner is ours?      yes: its time is renewed, and a pass is made
 *                 it is not there                 it is made ours by link()
 *                 not renewed for six periods     it is put aside, and made ours
 *
 * A pass removes what is older than the time to live, by the time it was written, and adds up the
 * rest, namespace by namespace. Where one is more than its cap, and where all of them are more than
 * theirs, those files go that were not used for longest, down to nine tenths of it. A file's use is
 * the later of its two times; readers set it once an hour (shared_files.c), so it does not matter
 * how the file system is mounted. Times are the file server's throughout: "now" is the time of a
 * file just made.
 *
 * Two cleaners for a moment (who was stopped for a minute finds out before his next pass) remove
 * what has to go anyway: the lease saves work, nothing depends on it. Threads: its own. Allocates
 * nothing itself; readdir() does.
 */
#include "remote/shared_clean.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LEASE "cleaner"
#define PERIOD_NS INT64_C(10000000000)
#define LEASE_PERIODS 6
#define BUCKETS 1024u
#define TMP_AGE_NS INT64_C(3600000000000) /* nobody writes a record for an hour */

struct pass {
    struct kvt_shared_clean *clean;
    int64_t now_ns, oldest_ns, width_ns;
    uint64_t bytes, to_go, freed;
    uint32_t limit; /* buckets above it go whole, itself as far as needed */
    uint64_t ages[BUCKETS];
    void (*each)(struct pass *pass, int dir, const char *name, const struct stat *st);
};

static int64_t ns_of(struct timespec time)
{
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int64_t used_ns(const struct stat *st)
{
    int64_t read = ns_of(st->st_atim), written = ns_of(st->st_mtim);

    return read > written ? read : written;
}

static bool stopping(struct kvt_shared_clean *clean)
{
    bool stop;

    pthread_mutex_lock(&clean->lock);
    stop = clean->stopping;
    pthread_mutex_unlock(&clean->lock);
    return stop;
}

/* ---- the walk ------------------------------------------------------------------------------ */

/* Every file in a directory. */
static void walk_files(struct pass *pass, int parent, const char *name)
{
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    DIR *list = fd >= 0 ? fdopendir(fd) : NULL;
    const struct dirent *entry;
    struct stat st;

    if (!list) {
        if (fd >= 0)
            (void)close(fd);
        return; /* it has gone, or is none */
    }
    while ((entry = readdir(list)) != NULL && !stopping(pass->clean))
        if (entry->d_name[0] != '.' && fstatat(fd, entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
            S_ISREG(st.st_mode))
            pass->each(pass, fd, entry->d_name, &st);
    (void)closedir(list);
}

/* Every record of a namespace. */
static void walk_ns(struct pass *pass, const char *name)
{
    int ns =
        openat(pass->clean->files->root, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);

    for (unsigned byte = 0; ns >= 0 && byte < 256; byte++) {
        char below[4];

        (void)snprintf(below, sizeof(below), "%02x", byte);
        walk_files(pass, ns, below);
    }
    if (ns >= 0)
        (void)close(ns);
}

/* Every namespace. */
static void walk(struct pass *pass, void (*each)(struct pass *pass, const char *name))
{
    int root = openat(pass->clean->files->root, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = root >= 0 ? fdopendir(root) : NULL;
    const struct dirent *entry;

    if (!list) {
        if (root >= 0)
            (void)close(root);
        return;
    }
    while ((entry = readdir(list)) != NULL && !stopping(pass->clean))
        if (strlen(entry->d_name) == (size_t)2 * KVT_NS_BYTES) /* a namespace */
            each(pass, entry->d_name);
    (void)closedir(list);
}

static uint32_t bucket_of(const struct pass *pass, const struct stat *st)
{
    int64_t age = pass->now_ns - used_ns(st);
    uint64_t bucket = age > 0 ? (uint64_t)(age / pass->width_ns) : 0;

    return bucket < BUCKETS ? (uint32_t)bucket : BUCKETS - 1;
}

static void add_up(struct pass *pass, int dir, const char *name, const struct stat *st)
{
    int64_t age = pass->now_ns - used_ns(st), ttl_ns = pass->clean->files->ttl_ns;

    if (ttl_ns && pass->now_ns - ns_of(st->st_mtim) > ttl_ns) {
        if (unlinkat(dir, name, 0) == 0)
            (void)atomic_fetch_add_explicit(&pass->clean->removed, 1, memory_order_relaxed);
        return;
    }
    pass->bytes += (uint64_t)st->st_size;
    if (age > pass->oldest_ns)
        pass->oldest_ns = age;
}

static void sort_in(struct pass *pass, int dir, const char *name, const struct stat *st)
{
    (void)dir;
    (void)name;
    pass->ages[bucket_of(pass, st)] += (uint64_t)st->st_size;
}

static void remove_old(struct pass *pass, int dir, const char *name, const struct stat *st)
{
    uint32_t bucket = bucket_of(pass, st);

    if (bucket < pass->limit || (bucket == pass->limit && !pass->to_go))
        return;
    if (unlinkat(dir, name, 0) != 0)
        return; /* somebody was faster */
    (void)atomic_fetch_add_explicit(&pass->clean->removed, 1, memory_order_relaxed);
    pass->freed += (uint64_t)st->st_size;
    if (bucket == pass->limit)
        pass->to_go -= (uint64_t)st->st_size < pass->to_go ? (uint64_t)st->st_size : pass->to_go;
}

static void remove_left(struct pass *pass, int dir, const char *name, const struct stat *st)
{
    if (pass->now_ns - ns_of(st->st_mtim) > TMP_AGE_NS)
        (void)unlinkat(dir, name, 0);
}

/* Of what has been added up, in one namespace or (NULL) in all of them: down to the cap. */
static void shrink(struct pass *pass, uint64_t cap_bytes, const char *name)
{
    pass->freed = 0;
    if (!cap_bytes || pass->bytes <= cap_bytes || stopping(pass->clean))
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

/* One namespace is added up, and brought down to its cap; sums of all of them go on. */
static void clean_ns(struct pass *pass, const char *name)
{
    uint64_t before = pass->bytes;
    int64_t oldest_ns = pass->oldest_ns;

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
    pass->each = remove_left;
    walk_files(pass, clean->files->root, "tmp");
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
    int fd = openat(clean->files->root, LEASE, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
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
    int fd = openat(clean->files->root, name,
                    O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    bool good = fd >= 0 &&
                write(fd, clean->token, strlen(clean->token)) == (ssize_t)strlen(clean->token) &&
                fstat(fd, &st) == 0;

    if (good)
        *now_ns = ns_of(st.st_mtim);
    if (fd >= 0)
        (void)close(fd);
    return good;
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
        *now_ns - ns_of(st.st_mtim) > LEASE_PERIODS * clean->period_ns) {
        (void)renameat(root, LEASE, root, aside);
        (void)unlinkat(root, aside, 0);
    }
    won = linkat(root, mine, root, LEASE, 0) == 0;
    (void)unlinkat(root, mine, 0);
    return won;
}

/* ---- the thread ---------------------------------------------------------------------------- */

static void *clean_thread(void *arg)
{
    struct kvt_shared_clean *clean = arg;

    while (!stopping(clean)) {
        struct timespec until;
        int64_t at_ns, now_ns;

        if (elected(clean, &now_ns))
            make_pass(clean, now_ns);
        at_ns = kvt_clock_now(&clean->files->clock) + clean->period_ns;
        until = (struct timespec){.tv_sec = at_ns / 1000000000, .tv_nsec = at_ns % 1000000000};
        pthread_mutex_lock(&clean->lock);
        if (!clean->stopping)
            (void)pthread_cond_timedwait(&clean->again, &clean->lock, &until);
        pthread_mutex_unlock(&clean->lock);
    }
    if (lease_ours(clean))
        (void)unlinkat(clean->files->root, LEASE, 0);
    return NULL;
}

int kvt_shared_clean_start(struct kvt_shared_clean *clean, struct kvt_shared_files *files,
                           const struct kvt_remote_params *params)
{
    pthread_condattr_t attr;
    sigset_t all, before;
    int err;

    if (!params->cap_bytes && !params->ns_cap_bytes && !params->ttl_ns)
        return 0;
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
