/* A shared directory in which others have been busy.
 *
 * Goal:   a symbolic link below kvt0 is followed by nobody: look-ups, loads, puts, purges and the
 *         cleaner agree, and it is told once, with the remedy, which works; what is none of ours is
 *         neither counted nor removed, and takes nothing of ours along; leases and times that
 *         cannot be right keep nobody from cleaning; the file server's clock may be hours off; a
 *         file system that is full or read-only costs puts, not reads.
 * Method: a directory below TMPDIR, things put into it by hand, mounts in a mount namespace of this
 *         process's own (skipped where there are none). That a pass was made is seen by a file of
 *         a dead writer that it removes.
 */
#include "support/rig.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <sched.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kvtier/error.h"
#include "remote/remote_seal.h"
#include "remote/shared_files.h"
#include "support/remote_help.h"

#define PAGES 3u
#define NS 0x77
#define KEYS 40u
#define HOUR_S 3600L
#define HOUR_NS INT64_C(3600000000000)
#define RECORD_BYTES ((uint64_t)PAGES * KVT_PAGE_BYTES)
#define PERIOD_NS INT64_C(50000000)

static char dir[128], where[160], aside[160];
static struct remote_help help, other;

static struct log_lines {
    _Atomic uint32_t links, foreign, leases, full;
    char link[512]; /* the last one; written before its count, by one thread at a time here */
} lines;

static void take_line(void *arg, int level, const char *message)
{
    (void)arg;
    (void)level;
    if (strstr(message, "is a symbolic link")) {
        snprintf(lines.link, sizeof(lines.link), "%s", message);
        lines.links++;
    }
    lines.foreign += strstr(message, "is none of ours") != NULL;
    lines.full += strstr(message, "no room, or a quota") != NULL;
    lines.leases += strstr(message, "nobody cleans until") != NULL;
}

static void open_with(struct remote_help *one, struct kvt_remote_params params)
{
    char error[512] = "";

    memset(one, 0, sizeof(*one));
    one->deadline_ns = REMOTE_HELP_DEADLINE_NS;
    one->params = params;
    one->params.where = where;
    one->params.clean_period_ns = PERIOD_NS;
    one->params.log = (struct kvt_log){.fn = take_line, .level_max = KVT_LOG_WARN};
    if (kvt_remote_tier_open(&one->params, &one->remote, error, sizeof(error)) != 0)
        fail_msg("%s", error);
}

static void open_cap(struct remote_help *one, uint64_t records)
{
    open_with(one, (struct kvt_remote_params){.cap_bytes = records * RECORD_BYTES});
}

static int begin(void **state)
{
    (void)state;
    rig_dir_make(dir, sizeof(dir));
    snprintf(where, sizeof(where), "dir:%s", dir);
    snprintf(aside, sizeof(aside), "%s/aside", dir);
    memset(&lines, 0, sizeof(lines));
    return 0;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *where_at)
{
    (void)st;
    (void)kind;
    (void)where_at;
    return remove(path);
}

static int tear_down(void **state)
{
    (void)state;
    remote_help_close(&help);
    remote_help_close(&other);
    assert_int_equal(nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS), 0);
    return 0;
}

/* ---- names --------------------------------------------------------------------------------- */

static void ns_path(uint8_t ns, char *out, size_t len)
{
    struct kvt_full_key key = remote_help_key(ns, 1);
    struct kvt_shared_name name;

    kvt_shared_name(&key, &name);
    snprintf(out, len, "%s/kvt0/%s", dir, name.ns);
}

static void below_path(uint64_t number, char *out, size_t len)
{
    struct kvt_full_key key = remote_help_key(NS, number);
    struct kvt_shared_name name;

    kvt_shared_name(&key, &name);
    snprintf(out, len, "%s/kvt0/%s/%s", dir, name.ns, name.below);
}

static void record_path(uint64_t number, char *out, size_t len)
{
    struct kvt_full_key key = remote_help_key(NS, number);
    struct kvt_shared_name name;

    kvt_shared_name(&key, &name);
    snprintf(out, len, "%s/kvt0/%s/%s/%s", dir, name.ns, name.below, name.file);
}

static uint32_t same_below(uint64_t number)
{
    struct kvt_full_key key = remote_help_key(NS, number), each;
    uint32_t count = 0;

    for (uint64_t i = 1; i <= KEYS; i++) {
        each = remote_help_key(NS, i);
        count += each.hash[0] == key.hash[0];
    }
    return count;
}

static void make_file(const char *path, const char *text, off_t len)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    if (len)
        assert_int_equal(ftruncate(fd, len), 0);
    assert_int_equal(close(fd), 0);
}

/* Its times, so many seconds ago. */
static void age_path(const char *path, long seconds)
{
    struct timespec times[2];

    assert_int_equal(clock_gettime(CLOCK_REALTIME, &times[0]), 0);
    times[0].tv_sec -= seconds;
    times[1] = times[0];
    assert_int_equal(utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW), 0);
}

static void age(uint64_t number, long seconds)
{
    char path[400];

    record_path(number, path, sizeof(path));
    age_path(path, seconds);
}

/* Whole passes of somebody who cleans. */
static void wait_for_passes(int count)
{
    char path[200];

    snprintf(path, sizeof(path), "%s/kvt0/tmp/left", dir);
    for (int pass = 0; pass < count; pass++) {
        make_file(path, "", 0);
        age_path(path, 2 * HOUR_S);
        for (int i = 0; i < 1200 && access(path, F_OK) == 0; i++)
            rig_sleep_ms(25);
        assert_int_not_equal(access(path, F_OK), 0);
    }
}

static void test_names(void **state)
{
    static const struct {
        const char *name;
        bool record;
    } cases[] = {
        {"ab12.0.0", true},   {"ab12.65535.4294967295", true},
        {"ab.1.2", true},     {"ab1.0.0", false},
        {"ac12.0.0", false},  {"AB12.0.0", false},
        {"ab12.0", false},    {"ab12.0.0.bak", false},
        {"ab12..0", false},   {"ab12.0.", false},
        {"ab12", false},      {"notes", false},
        {"ab12.0x.1", false}, {".ab12.0.0", false},
        {"", false},
    };
    struct kvt_full_key key = remote_help_key(NS, 1);
    struct kvt_shared_name name;
    char longer[96];

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        if (kvt_shared_is_record(cases[i].name, "ab") != cases[i].record)
            fail_msg("\"%s\"", cases[i].name);
    kvt_shared_name(&key, &name);
    assert_true(kvt_shared_is_record(name.file, name.below));
    assert_true(kvt_shared_is_ns(name.ns));
    assert_false(kvt_shared_is_ns("cleaner"));
    assert_false(kvt_shared_is_ns(name.ns + 1));
    name.ns[3] = 'G';
    assert_false(kvt_shared_is_ns(name.ns));
    memset(longer, 'a', sizeof(longer));
    snprintf(longer + 66, sizeof(longer) - 66, ".0.0"); /* a hash has 32 bytes at most */
    assert_false(kvt_shared_is_record(longer, "aa"));
    assert_true(kvt_shared_is_record(longer + 2, "aa"));
}

/* ---- links --------------------------------------------------------------------------------- */

static void move_and_link(const char *path)
{
    assert_int_equal(rename(path, aside), 0);
    assert_int_equal(symlink(aside, path), 0);
}

/* All agree that there is nothing, and that they cannot know. */
static void expect_unreachable(uint64_t number)
{
    struct kvt_remote_stats stats;

    assert_int_equal(remote_help_found(&help, NS, number), -ELOOP);
    assert_int_equal(remote_help_get(&help, NS, number, PAGES), -ELOOP);
    assert_int_equal(remote_help_put(&help, NS, number, PAGES, false), -ELOOP);
    assert_int_equal(remote_help_put(&help, NS, number, PAGES, true), -ELOOP);
    assert_int_equal(remote_help_drop(&help, NS, number, 1, NULL), -ELOOP);
    help.remote->ops->stats(help.remote, &stats);
    assert_int_equal(stats.nodes_down, 0); /* one namespace's trouble */
}

static void test_a_namespace_that_is_a_link(void **state)
{
    uint64_t removed;
    char path[300];

    (void)state;
    open_cap(&help, 1000);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    assert_int_equal(remote_help_put_many(&help, NS + 1, 1, 5, PAGES, NULL), 5);
    ns_path(NS, path, sizeof(path));
    move_and_link(path);
    expect_unreachable(1);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), -ELOOP);
    assert_int_equal(removed, 0);
    wait_for_passes(2);
    assert_int_equal(lines.links, 1);
    assert_non_null(strstr(lines.link, path));
    assert_non_null(strstr(lines.link, "mount --bind"));
    assert_int_equal(remote_help_get_many(&help, NS + 1, 1, 5, PAGES, NULL), 5);
    assert_int_equal(unlink(path), 0); /* it is moved back: nothing was touched */
    assert_int_equal(rename(aside, path), 0);
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), 0);
    assert_int_equal(removed, KEYS);
}

/* A purge removes what it can reach, and says that this was not all. */
static void test_a_directory_of_records_that_is_a_link(void **state)
{
    uint64_t removed;
    char path[300];

    (void)state;
    open_with(&help, (struct kvt_remote_params){0});
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    below_path(1, path, sizeof(path));
    move_and_link(path);
    expect_unreachable(1);
    assert_int_equal(lines.links, 1);
    assert_non_null(strstr(lines.link, path));
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), -ELOOP);
    assert_int_equal(removed, KEYS - same_below(1));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rename(aside, path), 0);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), 0);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), 0);
    assert_int_equal(removed, same_below(1));
}

/* Where records are written before they have their name, too. */
static void test_the_place_for_writing_is_a_link(void **state)
{
    char path[200];

    (void)state;
    open_with(&help, (struct kvt_remote_params){0});
    snprintf(path, sizeof(path), "%s/kvt0/tmp", dir);
    move_and_link(path);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), -ELOOP);
    assert_int_equal(rmdir(aside), 0); /* nothing was written there */
    assert_int_equal(unlink(path), 0);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), 0);
}

/* ---- mounts -------------------------------------------------------------------------------- */

static bool able_to_mount;

/* Before there are threads: each of them would stay in the namespace that it was born in. */
static int own_mounts(void **state)
{
    (void)state;
    able_to_mount =
        unshare(CLONE_NEWNS) == 0 && mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
    return 0;
}

static bool mount_at(const char *path, const char *options)
{
    return able_to_mount && mount("kvt", path, "tmpfs", MS_NOSUID | MS_NODEV, options) == 0;
}

/* The remedy: the namespace is a mount, so nothing can be linked into it from beside it. */
static void test_a_namespace_that_is_a_mount(void **state)
{
    uint64_t removed;
    char path[300];

    (void)state;
    open_cap(&help, 1000);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), 0);
    assert_int_equal(remote_help_drop(&help, NS, 1, 1, NULL), 0);
    ns_path(NS, path, sizeof(path));
    if (!mount_at(path, "size=64m"))
        skip();
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), KVT_E_EXISTS);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES + 1, true), 0);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES + 1), 0);
    assert_int_equal(remote_help_get_many(&help, NS, 2, KEYS - 1, PAGES, NULL), KEYS - 1);
    wait_for_passes(1);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), 0);
    assert_int_equal(removed, KEYS); /* and nothing that was being written was left there */
    assert_int_equal(lines.foreign, 0);
    assert_int_equal(umount2(path, MNT_DETACH), 0);
}

/* Full, then read-only: what is there is read all the while; room is used as soon as there is. */
static void test_full_and_read_only(void **state)
{
    struct kvt_remote_stats stats;
    uint32_t stored;
    uint64_t removed;
    int status;

    (void)state;
    if (!mount_at(dir, "size=256k"))
        skip();
    open_with(&help, (struct kvt_remote_params){0});
    stored = remote_help_put_many(&help, NS, 1, KEYS, PAGES, &status);
    assert_int_equal(status, KVT_E_NO_SPACE);
    assert_true(stored > 0 && stored < KEYS);
    assert_int_equal(lines.full, 1);
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, &status), stored);
    assert_int_equal(status, KVT_E_MISS);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), 0);
    assert_int_equal(removed, stored);
    assert_int_equal(remote_help_put_many(&help, NS, 1, 5, PAGES, NULL), 5);
    assert_int_equal(mount("kvt", dir, NULL, MS_REMOUNT | MS_RDONLY, NULL), 0);
    assert_int_equal(remote_help_put(&help, NS, 6, PAGES, false), -EROFS);
    help.remote->ops->stats(help.remote, &stats);
    assert_int_equal(stats.nodes_down, 1);
    assert_int_equal(remote_help_get_many(&help, NS, 1, 5, PAGES, NULL), 5);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, NULL), -EROFS); /* it does not say "gone" */
    assert_int_equal(mount("kvt", dir, NULL, MS_REMOUNT, NULL), 0);
    assert_int_equal(remote_help_put(&help, NS, 6, PAGES, false), 0);
    /* unmounted under it: what is below is not filled, and nothing is found any more */
    assert_int_equal(umount2(dir, MNT_DETACH), 0);
    for (int i = 0; i < 200 && status != -ENODEV; i++) {
        status = remote_help_get(&help, NS, 6, PAGES);
        rig_sleep_ms(25);
    }
    assert_int_equal(status, -ENODEV);
    assert_int_equal(remote_help_put(&help, NS, 6, PAGES, false), -ENODEV);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, NULL), -ENODEV);
    help.remote->ops->stats(help.remote, &stats);
    assert_int_equal(stats.nodes_down, 1);
}

/* ---- what is none of ours ------------------------------------------------------------------- */

/* Long and empty, by a foreign name and by one of ours; a directory, a link: the cleaner counts
 * what takes room, and removes only what is ours. */
static void test_foreign_things_among_records(void **state)
{
    char below[300], path[400], link[400];
    uint64_t removed;

    (void)state;
    open_with(&help, (struct kvt_remote_params){0});
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    below_path(1, below, sizeof(below));
    snprintf(path, sizeof(path), "%s/notes", below);
    make_file(path, "mine", (off_t)1 << 40);
    age_path(path, 1000 * HOUR_S);
    snprintf(link, sizeof(link), "%s/link", below);
    assert_int_equal(symlink("/dev/null", link), 0);
    record_path(KEYS + 1, path, sizeof(path)); /* a name of ours, and nothing in it */
    below_path(KEYS + 1, below, sizeof(below));
    (void)mkdir(below, 0700);
    make_file(path, "", (off_t)1 << 40);
    snprintf(path, sizeof(path), "%s/kvt0/README", dir);
    make_file(path, "hands off", 0);
    open_cap(&other, KEYS + 5);
    wait_for_passes(3);
    assert_int_equal(remote_help_probe(&help, NS, 1, KEYS, NULL), KEYS);
    assert_int_equal(lines.foreign, 1);
    assert_int_equal(access(path, F_OK), 0);
    remote_help_close(&other);
    open_cap(&other, 20); /* too many: records go, the rest stays */
    for (int i = 0; i < 1200 && remote_help_probe(&help, NS, 1, KEYS, NULL) > 20; i++)
        rig_sleep_ms(25);
    assert_true(remote_help_probe(&help, NS, 1, KEYS, NULL) <= 20);
    remote_help_close(&other);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), 0);
    assert_int_equal(remote_help_probe(&help, NS, 1, KEYS, NULL), 0);
    below_path(1, below, sizeof(below));
    snprintf(path, sizeof(path), "%s/notes", below);
    assert_int_equal(access(path, F_OK), 0);
    assert_int_equal(access(link, F_OK), 0);
}

/* What a dead writer has left beside records goes after an hour, and so do empty directories. */
static void test_what_is_left_goes(void **state)
{
    char below[300], path[400];

    (void)state;
    open_cap(&help, 1000);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), 0);
    below_path(1, below, sizeof(below));
    snprintf(path, sizeof(path), "%s/put.dead.1.1", below);
    make_file(path, "half", 0);
    wait_for_passes(2);
    assert_int_equal(access(path, F_OK), 0); /* it may be being written */
    age_path(path, 2 * HOUR_S);
    wait_for_passes(2);
    assert_int_not_equal(access(path, F_OK), 0);
    assert_int_equal(remote_help_drop(&help, NS, 1, 1, NULL), 0);
    wait_for_passes(2);
    assert_int_equal(access(below, F_OK), 0);
    age_path(below, 2 * HOUR_S);
    wait_for_passes(2);
    assert_int_not_equal(access(below, F_OK), 0);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), 0);
    assert_int_equal(lines.foreign, 0);
}

/* ---- leases and times ------------------------------------------------------------------------ */

static void lease_path(char *out, size_t len)
{
    snprintf(out, len, "%s/kvt0/cleaner", dir);
}

/* A time that lies ahead is nobody's who renews it. */
static void test_a_lease_of_the_future(void **state)
{
    char path[200];

    (void)state;
    open_with(&help, (struct kvt_remote_params){0});
    lease_path(path, sizeof(path));
    make_file(path, "somebody else", 0);
    age_path(path, -70L * 365 * 24 * HOUR_S);
    open_cap(&other, 1000);
    wait_for_passes(1);
}

/* An empty directory in the way goes, a full one stays and is told, a link goes. */
static void test_no_lease_at_all(void **state)
{
    char path[200], inside[220];

    (void)state;
    open_with(&help, (struct kvt_remote_params){0});
    lease_path(path, sizeof(path));
    assert_int_equal(mkdir(path, 0700), 0);
    open_cap(&other, 1000);
    wait_for_passes(1);
    remote_help_close(&other);
    assert_int_equal(symlink("/nonexistent", path), 0);
    open_cap(&other, 1000);
    wait_for_passes(1);
    remote_help_close(&other);
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(inside, sizeof(inside), "%s/x", path);
    make_file(inside, "", 0);
    open_cap(&other, 1000);
    for (int i = 0; i < 1200 && !lines.leases; i++)
        rig_sleep_ms(25);
    rig_sleep_ms(200);
    assert_int_equal(lines.leases, 1);
    assert_int_equal(access(inside, F_OK), 0);
    assert_int_equal(unlink(inside), 0); /* the operator does as he was told */
    wait_for_passes(1);
}

/* Times beyond what 64 bits of nanoseconds hold, and ahead by a day: nobody's who has used it just
 * now, so these go first. */
static void test_times_of_the_future(void **state)
{
    const struct timespec late[2] = {{.tv_sec = INT64_C(13600000000)},
                                     {.tv_sec = INT64_C(13600000000)}};
    char path[400];

    (void)state;
    open_with(&help, (struct kvt_remote_params){0});
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    record_path(1, path, sizeof(path));
    assert_int_equal(utimensat(AT_FDCWD, path, late, 0), 0);
    for (uint64_t number = 2; number <= KEYS - 20; number++)
        age(number, -24 * HOUR_S);
    open_cap(&other, 22);
    for (int i = 0; i < 1200 && remote_help_probe(&help, NS, 1, KEYS, NULL) > 22; i++)
        rig_sleep_ms(25);
    wait_for_passes(1);
    assert_int_equal(remote_help_probe(&help, NS, 1, 1, NULL), 0);
    assert_true(remote_help_probe(&help, NS, KEYS - 19, 20, NULL) >= 19);
    assert_true(remote_help_probe(&help, NS, 1, KEYS, NULL) <= 22);
}

static void test_skew(void **state)
{
    const int64_t s = INT64_C(1000000000), now = 1000000 * s;

    (void)state;
    assert_int_equal(kvt_shared_skew_ns(now, now, now), 0);
    assert_int_equal(kvt_shared_skew_ns(now, now - s, now + s), 0);         /* coarse times */
    assert_int_equal(kvt_shared_skew_ns(now, now + 5 * s, now + 9 * s), 0); /* it took long */
    assert_int_equal(kvt_shared_skew_ns(now, now - 3600 * s, now + s), -3600 * s);
    assert_int_equal(kvt_shared_skew_ns(now, now + 3600 * s, now + s), 3599 * s);
    assert_int_equal(kvt_shared_age_ns(now, now - 5), 5);
    assert_int_equal(kvt_shared_age_ns(now, now + 5), 5);
    assert_int_equal(kvt_shared_time_ns((struct timespec){.tv_sec = -5}), 0);
    assert_true(kvt_shared_time_ns((struct timespec){.tv_sec = INT64_MAX}) > INT64_MAX - 3 * s);
    assert_int_equal(kvt_shared_time_ns((struct timespec){.tv_sec = 7, .tv_nsec = 9}), 7 * s + 9);
}

/* Records get the file server's time. One that is hours behind would make all of them too old at
 * once, one that is ahead would let them live for hours: what counts is its own clock. */
static void test_a_file_server_with_a_clock_of_its_own(void **state)
{
    static struct kvt_shared_files files;
    struct kvt_full_key key = remote_help_key(NS, 1);
    struct kvt_remote_found found;
    struct kvt_remote_req req = {.op = KVT_REMOTE_PROBE,
                                 .count = 1,
                                 .keys = &key,
                                 .found = &found,
                                 .deadline_ns = INT64_MAX};
    char error[200];

    (void)state;
    memset(&files, 0, sizeof(files));
    assert_int_equal(pthread_mutex_init(&files.root_lock, NULL), 0);
    assert_int_equal(pthread_mutex_init(&files.notes_lock, NULL), 0);
    open_with(&help, (struct kvt_remote_params){0});
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), 0);
    assert_int_equal(kvt_shared_files_open(&files, dir, error, sizeof(error)), 0);
    assert_int_equal(files.skew_ns, 0); /* this machine's own */
    files.ttl_ns = HOUR_NS;
    for (int sign = -1; sign <= 1; sign += 2) {
        age(1, -5L * sign * HOUR_S); /* as a server has it that is five hours behind, or ahead */
        files.skew_ns = 0;
        assert_int_equal(kvt_shared_files_do(&files, &req), 0);
        assert_int_equal(found.status, KVT_E_MISS);
        files.skew_ns = 5 * sign * HOUR_NS;
        assert_int_equal(kvt_shared_files_do(&files, &req), 0);
        assert_int_equal(found.status, 0);
    }
    kvt_shared_files_close(&files);
}

/* ---- a namespace's own time to live -----------------------------------------------------------
 */

/* Programs say it with what they put, and whoever cleans removes by it, also where no option asks
 * for cleaning. Another namespace is none of its business. */
static void test_a_namespace_says_how_long(void **state)
{
    char path[300], file[320];

    (void)state;
    open_with(&help, (struct kvt_remote_params){0});
    open_with(&other, (struct kvt_remote_params){0});
    assert_int_equal(remote_help_put_many(&other, NS + 1, 1, 5, PAGES, NULL), 5);
    help.ttl_ns = HOUR_NS;
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    ns_path(NS, path, sizeof(path));
    snprintf(file, sizeof(file), "%s/ttl", path);
    assert_int_equal(access(file, F_OK), 0);
    for (uint64_t number = 1; number <= 10; number++)
        age(number, 2 * HOUR_S);
    age(11, HOUR_S / 2);
    wait_for_passes(2);
    assert_int_equal(remote_help_probe(&other, NS, 1, KEYS, NULL), KEYS - 10);
    assert_int_equal(remote_help_probe(&other, NS + 1, 1, 5, NULL), 5);
    /* nonsense there is nothing: a number without its line's end */
    assert_int_equal(truncate(file, 3), 0);
    wait_for_passes(1); /* one under way knows what was said before */
    age(11, 2 * HOUR_S);
    wait_for_passes(2);
    assert_int_equal(remote_help_probe(&other, NS, 1, KEYS, NULL), KEYS - 10);
    /* who puts and says nothing takes it back */
    assert_int_equal(remote_help_put(&other, NS, 1, PAGES, false), 0);
    assert_int_not_equal(access(file, F_OK), 0);
    help.ttl_ns = 2 * HOUR_NS;
    assert_int_equal(remote_help_put(&help, NS, 2, PAGES, false), 0);
    assert_int_equal(access(file, F_OK), 0);
    assert_int_equal(remote_help_drop(&other, NS, 0, 0, NULL), 0);
    assert_int_not_equal(access(path, F_OK), 0); /* whole */
    assert_int_equal(remote_help_put(&help, NS, 2, PAGES, false), 0);
    assert_int_equal(access(file, F_OK), 0); /* said anew */
}

#define EACH(name) cmocka_unit_test_setup_teardown(name, begin, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        EACH(test_a_namespace_that_is_a_link),
        EACH(test_a_directory_of_records_that_is_a_link),
        EACH(test_the_place_for_writing_is_a_link),
        EACH(test_a_namespace_that_is_a_mount),
        EACH(test_full_and_read_only),
        EACH(test_foreign_things_among_records),
        EACH(test_what_is_left_goes),
        EACH(test_a_lease_of_the_future),
        EACH(test_no_lease_at_all),
        EACH(test_times_of_the_future),
        cmocka_unit_test(test_skew),
        EACH(test_a_file_server_with_a_clock_of_its_own),
        EACH(test_a_namespace_says_how_long),
    };

    return cmocka_run_group_tests(tests, own_mounts, NULL);
}
