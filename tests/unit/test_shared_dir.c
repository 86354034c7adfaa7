/* A directory as the shared tier.
 *
 * Goal:   what one process has put another one reads, byte for byte, or not at all, whoever writes,
 *         replaces and removes meanwhile; what is damaged, torn, a link or somebody else's is a
 *         miss; a directory that cannot be used says why.
 * Method: a directory below TMPDIR; several backends in this process, and processes that are
 *         killed while they write (they only write: their parent is the one that asserts).
 */
#include "support/rig.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/rng.h"
#include "kvtier/error.h"
#include "remote/remote_seal.h"
#include "support/remote_help.h"

#define PAGES 3u
#define NS 0x77
#define KEYS 40u

static char dir[128], where[160];
static struct remote_help help, other;

static int begin(void **state)
{
    (void)state;
    rig_dir_make(dir, sizeof(dir));
    snprintf(where, sizeof(where), "dir:%s", dir);
    return 0;
}

/* Files in it, whatever they are. */
static unsigned files(void)
{
    unsigned count = 0;

    (void)rig_dir_bytes(dir, &count);
    return count;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *where_at)
{
    (void)st;
    (void)kind;
    (void)where_at;
    return remove(path);
}

/* rig_dir_remove() knows of no directories below. */
static void remove_tree(const char *path)
{
    assert_int_equal(nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS), 0);
}

static int tear_down(void **state)
{
    (void)state;
    remote_help_close(&help);
    remote_help_close(&other);
    remove_tree(dir);
    return 0;
}

static void path_of(uint64_t number, char *out, size_t len)
{
    struct kvt_full_key key = remote_help_key(NS, number);
    char name[KVT_REMOTE_NAME_BYTES];

    (void)kvt_remote_name(&key, name);
    for (char *at = name + 38; *at; at++)
        *at = *at == ':' ? '.' : *at;
    snprintf(out, len, "%s/kvt0/%.32s/%.2s/%s", dir, name + 5, name + 38, name + 38);
}

static void test_put_get_probe_drop(void **state)
{
    uint64_t removed;
    struct stat st;
    char path[400];
    int status;

    (void)state;
    remote_help_open(&help, where, NULL, NULL, NULL);
    remote_help_open(&other, where, NULL, NULL, NULL);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), KVT_E_MISS);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    assert_int_equal(remote_help_put_many(&other, NS, 1, KEYS, PAGES, &status), 0);
    assert_int_equal(status, KVT_E_EXISTS);
    assert_int_equal(remote_help_get_many(&other, NS, 1, KEYS, PAGES, NULL), KEYS);
    assert_int_equal(remote_help_probe(&other, NS, 21, 1000, NULL), KEYS - 20);
    path_of(1, path, sizeof(path));
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(st.st_size, PAGES * KVT_PAGE_BYTES);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES + 1), KVT_E_STALE);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES + 1, true), 0);
    assert_int_equal(remote_help_get(&other, NS, 1, PAGES + 1), 0);
    assert_int_equal(remote_help_drop(&help, NS, 1, 10, &removed), 0);
    assert_int_equal(removed, 10);
    assert_int_equal(remote_help_put_many(&help, NS + 1, 1, 5, PAGES, NULL), 5);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), 0);
    assert_int_equal(removed, KEYS - 10);
    assert_int_equal(files(), 5);
    assert_int_equal(remote_help_get_many(&other, NS + 1, 1, 5, PAGES, NULL), 5);
    assert_int_equal(remote_help_put(&other, NS, 1, PAGES, false), 0); /* its directory had gone */
}

/* The same record many times at a time, by all threads of a backend: one has stored it, and all
 * others find that somebody was faster, also those that were half way when it appeared. */
static void test_one_of_many_publishes(void **state)
{
    enum { MANY = 16, LONG_PAGES = 64 };
    static _Alignas(4096) uint8_t record[LONG_PAGES * KVT_PAGE_BYTES];
    struct kvt_remote_req reqs[MANY];

    (void)state;
    remote_help_open(&help, where, NULL, NULL, NULL);
    for (uint64_t number = 1; number <= 8; number++) {
        struct kvt_full_key key = remote_help_key(NS, number);
        uint32_t stored = 0;

        remote_help_record(NS, number, LONG_PAGES, record);
        for (uint32_t i = 0; i < MANY; i++)
            reqs[i] = (struct kvt_remote_req){.op = KVT_REMOTE_PUT,
                                              .count = 1,
                                              .keys = &key,
                                              .record = record,
                                              .record_bytes = sizeof(record)};
        remote_help_do(&help, reqs, MANY);
        for (uint32_t i = 0; i < MANY; i++) {
            assert_true(reqs[i].status == 0 || reqs[i].status == KVT_E_EXISTS);
            stored += reqs[i].status == 0;
        }
        assert_int_equal(stored, 1);
        assert_int_equal(remote_help_get(&help, NS, number, LONG_PAGES), 0);
    }
    assert_int_equal(files(), 8);
}

/* Damaged, cut off, longer, empty, a link, a directory, a FIFO: damage, all of it, but no trouble
 * of the directory's. */
static void test_what_is_not_a_record(void **state)
{
    struct kvt_remote_stats stats;
    char path[400], target[400];
    uint64_t removed;
    int fd;

    (void)state;
    remote_help_open(&help, where, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, 10, PAGES, NULL), 10);
    path_of(1, path, sizeof(path));
    fd = open(path, O_WRONLY);
    assert_int_equal(pwrite(fd, "x", 1, 5000), 1);
    close(fd);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), KVT_E_CORRUPT);
    path_of(2, path, sizeof(path));
    assert_int_equal(truncate(path, 5000), 0);
    assert_int_equal(remote_help_get(&help, NS, 2, PAGES), KVT_E_CORRUPT);
    assert_int_equal(remote_help_found(&help, NS, 2), KVT_E_CORRUPT);
    path_of(3, path, sizeof(path));
    assert_int_equal(truncate(path, 0), 0);
    assert_int_equal(remote_help_get(&help, NS, 3, PAGES), KVT_E_CORRUPT);
    assert_int_equal(remote_help_found(&help, NS, 3), KVT_E_CORRUPT);
    path_of(4, target, sizeof(target));
    path_of(5, path, sizeof(path));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(symlink(target, path), 0);
    assert_int_equal(remote_help_get(&help, NS, 5, PAGES), KVT_E_CORRUPT);
    path_of(6, path, sizeof(path));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(remote_help_get(&help, NS, 6, PAGES), KVT_E_CORRUPT);
    assert_int_equal(remote_help_found(&help, NS, 6), KVT_E_CORRUPT);
    path_of(7, path, sizeof(path)); /* another key's record */
    assert_int_equal(unlink(path), 0);
    assert_int_equal(link(target, path), 0);
    assert_int_equal(remote_help_get(&help, NS, 7, PAGES), KVT_E_CORRUPT);
    path_of(9, path, sizeof(path));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(remote_help_get(&help, NS, 9, PAGES), KVT_E_CORRUPT);
    assert_int_equal(remote_help_found(&help, NS, 9), KVT_E_CORRUPT);
    path_of(10, path, sizeof(path));
    assert_int_equal(truncate(path, (off_t)(PAGES + 1) * KVT_PAGE_BYTES), 0);
    assert_int_equal(remote_help_get(&help, NS, 10, PAGES), KVT_E_CORRUPT);
    assert_int_equal(remote_help_found(&help, NS, 10), KVT_E_CORRUPT);
    assert_int_equal(remote_help_get(&help, NS, 8, PAGES), 0);
    help.remote->ops->stats(help.remote, &stats);
    assert_int_equal(stats.nodes_down, 0); /* the directory itself is well */
    /* each of them is replaced, whatever it is, when it is put for that */
    for (uint64_t number = 1; number <= 10; number++) {
        int exists = remote_help_put(&help, NS, number, PAGES, false);

        assert_int_equal(exists, KVT_E_EXISTS);
        assert_int_equal(remote_help_put(&help, NS, number, PAGES, true), 0);
    }
    assert_int_equal(remote_help_get_many(&help, NS, 1, 10, PAGES, NULL), 10);
    /* a purge takes records, and says nothing of a directory among them */
    path_of(4, path, sizeof(path));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(remote_help_drop(&help, NS, 1, 5, &removed), 0);
    assert_int_equal(removed, 4);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), 0);
    assert_int_equal(removed, 5);
}

static void file_with(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs(text, file);
    fclose(file);
    assert_int_equal(chmod(path, 0600), 0);
}

static void test_mac(void **state)
{
    char key[160];

    (void)state;
    snprintf(key, sizeof(key), "%s/key", dir);
    file_with(key, "0123456789abcdef0123456789abcdef");
    remote_help_open(&help, where, NULL, key, NULL);
    remote_help_open(&other, where, NULL, NULL, NULL);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), 0);
    assert_int_equal(remote_help_put(&other, NS, 2, PAGES, false), 0);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), 0);
    assert_int_equal(remote_help_get(&other, NS, 1, PAGES), 0);
    assert_int_equal(remote_help_get(&help, NS, 2, PAGES), KVT_E_CORRUPT);
    assert_int_equal(remote_help_found(&help, NS, 1), 0);
    assert_int_equal(remote_help_found(&help, NS, 2),
                     KVT_E_CORRUPT); /* it has none: a look-up knows */
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES + 1), KVT_E_STALE);
    remote_help_close(&other);
    file_with(key, "another key of thirty-two bytes..");
    remote_help_open(&other, where, NULL, key, NULL);
    assert_int_equal(remote_help_get(&other, NS, 1, PAGES), KVT_E_CORRUPT);
}

static void test_directories_that_cannot_be_used(void **state)
{
    const struct kvt_remote_params bad = {.where = "dir:/nonexistent/x"};
    const struct kvt_remote_params file = {.where = "dir:/dev/null"};
    char error[512] = "";

    (void)state;
    assert_int_equal(kvt_remote_tier_open(&bad, &help.remote, error, sizeof(error)), -ENOENT);
    assert_non_null(strstr(error, "/nonexistent/x"));
    assert_null(help.remote);
    assert_int_equal(kvt_remote_tier_open(&file, &help.remote, error, sizeof(error)), -ENOTDIR);
    assert_null(help.remote);
    for (int i = 0; i < 3; i++) { /* a file, a link, and a file where tmp should be */
        static const char *const names[] = {"kvt0", "kvt0", "kvt0/tmp"};
        const struct kvt_remote_params params = {.where = where};
        char name[400];

        snprintf(name, sizeof(name), "%s/kvt0", dir);
        if (i == 1)
            assert_int_equal(symlink("/tmp", name), 0);
        if (i == 2) {
            assert_int_equal(mkdir(name, 0700), 0);
            snprintf(name, sizeof(name), "%s/kvt0/tmp", dir);
        }
        if (i != 1)
            file_with(name, "");
        assert_int_equal(kvt_remote_tier_open(&params, &help.remote, error, sizeof(error)),
                         -ENOTDIR);
        snprintf(name, sizeof(name), "%s/%s", dir, names[i]);
        assert_non_null(strstr(error, name));
        assert_int_equal(remove(name), 0);
    }
}

/* ---- somebody removes all of it ------------------------------------------------------------ */

static struct log_lines {
    _Atomic uint32_t count;
    char last[512]; /* written before count, by one thread at a time here */
} lines;

static void take_line(void *arg, int level, const char *message)
{
    (void)arg;
    (void)level;
    snprintf(lines.last, sizeof(lines.last), "%s", message);
    lines.count++;
}

static void open_logged(struct remote_help *one)
{
    char error[512] = "";

    memset(one, 0, sizeof(*one));
    lines.count = 0;
    one->deadline_ns = REMOTE_HELP_DEADLINE_NS;
    one->params = (struct kvt_remote_params){.where = where,
                                             .log = {.fn = take_line, .level_max = KVT_LOG_WARN}};
    if (kvt_remote_tier_open(&one->params, &one->remote, error, sizeof(error)) != 0)
        fail_msg("%s", error);
}

static uint64_t nodes_down(void)
{
    struct kvt_remote_stats stats;

    help.remote->ops->stats(help.remote, &stats);
    return stats.nodes_down;
}

static void remove_below(const char *path, bool itself)
{
    char name[400];

    snprintf(name, sizeof(name), "%s/kvt0", path);
    remove_tree(name);
    if (itself)
        assert_int_equal(rmdir(path), 0);
}

/* What is in it, itself, the directory above: the next put goes on, and so does everybody who had
 * it open; one warning. */
static void test_all_of_it_is_removed(void **state)
{
    char name[400];

    (void)state;
    open_logged(&help);
    remote_help_open(&other, where, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    snprintf(name, sizeof(name), "%s/kvt0", dir);
    remove_tree(name);
    assert_int_equal(mkdir(name, 0700), 0); /* as after rm -rf kvt0/..., without tmp */
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), KVT_E_MISS);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    assert_int_equal(lines.count, 1);
    assert_non_null(strstr(lines.last, "removed"));
    for (int itself = 0; itself < 2; itself++) {
        remove_below(dir, itself != 0);
        if (itself) {
            assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), -ENOENT);
            assert_int_equal(nodes_down(), 1);
            assert_int_equal(mkdir(dir, 0700), 0);
        }
        assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
        assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
        assert_int_equal(nodes_down(), 0);
        /* who only reads sees it a second later; who purges, at once */
        for (int i = 0; i < 600 && remote_help_get(&other, NS, 1, PAGES); i++)
            rig_sleep_ms(50);
        assert_int_equal(remote_help_get_many(&other, NS, 1, KEYS, PAGES, NULL), KEYS);
    }
    assert_int_equal(lines.count, 2); /* one of what was removed, one of ROOT that was not there */
}

/* Put aside, and another one made: readers, writers and purges are in the new one. */
static void test_another_directory_has_its_name(void **state)
{
    char name[400], aside[400];
    uint64_t removed;

    (void)state;
    open_logged(&help);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    snprintf(name, sizeof(name), "%s/kvt0", dir);
    snprintf(aside, sizeof(aside), "%s/aside", dir);
    assert_int_equal(rename(name, aside), 0);
    remote_help_open(&other, where, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&other, NS, 1, 3, PAGES, NULL), 3);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), 0);
    assert_int_equal(removed, 3);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), KVT_E_MISS);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    assert_int_equal(remote_help_get_many(&other, NS, 1, KEYS, PAGES, NULL), KEYS);
    assert_int_equal(lines.count, 1);
}

/* What has been put aside is not read from any more, nor put to, though it is open: who purges by
 * the name does not reach it. */
static void test_it_is_put_aside(void **state)
{
    char name[200], aside[200], path[300];
    uint64_t removed;
    int status = 0;

    (void)state;
    open_logged(&help);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    snprintf(name, sizeof(name), "%s/kvt0", dir);
    snprintf(aside, sizeof(aside), "%s/aside", dir);
    assert_int_equal(rename(name, aside), 0);
    for (int i = 0; i < 200 && status != KVT_E_MISS; i++) { /* seen once a second */
        status = remote_help_get(&help, NS, 1, PAGES);
        rig_sleep_ms(25);
    }
    assert_int_equal(status, KVT_E_MISS);
    assert_int_equal(remote_help_probe(&help, NS, 1, KEYS, &status), 0);
    assert_int_equal(status, 0);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), 0);
    assert_int_equal(removed, 0);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), 0); /* makes it again */
    snprintf(path, sizeof(path), "%s/tmp", name);
    assert_int_equal(access(path, F_OK), 0);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), 0);
    assert_int_equal(remote_help_get(&help, NS, 2, PAGES), KVT_E_MISS);
}

/* Nothing can be put: said once, with the reason, and counted. */
static void test_trouble_is_told_once(void **state)
{
    char name[400];

    (void)state;
    open_logged(&help);
    snprintf(name, sizeof(name), "%s/kvt0/tmp", dir);
    assert_int_equal(rmdir(name), 0);
    file_with(name, "no directory");
    for (int i = 0; i < 5; i++)
        assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), -ENOTDIR);
    assert_int_equal(nodes_down(), 1);
    assert_int_equal(lines.count, 1);
    assert_non_null(strstr(lines.last, dir));
    assert_non_null(strstr(lines.last, "put"));
    assert_non_null(strstr(lines.last, "Not a directory"));
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), KVT_E_MISS);
    assert_int_equal(nodes_down(), 0);
}

/* A deadline that is over before a request's turn. */
static void test_over_before_it_began(void **state)
{
    int status;

    (void)state;
    remote_help_open(&help, where, NULL, NULL, NULL);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), 0);
    help.deadline_ns = -1;
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), KVT_E_DEADLINE);
    assert_int_equal(remote_help_probe(&help, NS, 1, 100, &status), 0);
    assert_int_equal(status, KVT_E_DEADLINE);
    help.deadline_ns = REMOTE_HELP_DEADLINE_NS;
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), 0);
}

/* A process that puts, replaces and removes the same keys for ever. */
static void writer(uint64_t seed)
{
    struct kvt_remote_params params = {.where = where};
    static _Alignas(4096) uint8_t record[PAGES * KVT_PAGE_BYTES];
    struct kvt_remote *remote;
    struct kvt_rng rng = {seed};
    char error[512];

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (kvt_remote_tier_open(&params, &remote, error, sizeof(error)) != 0)
        _exit(1);
    for (;;) {
        uint64_t number = 1 + kvt_rng_next(&rng) % KEYS;
        struct kvt_full_key key = remote_help_key(NS, number);
        struct kvt_remote_req req = {.op =
                                         kvt_rng_next(&rng) % 4 ? KVT_REMOTE_PUT : KVT_REMOTE_DROP,
                                     .count = 1,
                                     .keys = &key,
                                     .record = record,
                                     .record_bytes = sizeof(record),
                                     .replace = kvt_rng_next(&rng) % 2,
                                     .deadline_ns = INT64_MAX};
        struct kvt_remote_req *done;

        remote_help_record(NS, number, PAGES, record);
        if (remote->ops->submit(remote, &req) != 0)
            _exit(1);
        while (!remote->ops->reap(remote, &done, 1))
            usleep(100);
    }
}

/* Writers that are killed in the middle of it; readers see whole records or none, all the while. */
static void test_writers_that_are_killed(void **state)
{
    uint64_t seed = rig_seed();
    uint32_t got = 0;
    int status;

    (void)state;
    remote_help_open(&help, where, NULL, NULL, NULL);
    remote_help_close(&help); /* the directories are there: children fork from a single thread */
    for (uint64_t round = 0; round < 12; round++) {
        pid_t pids[3];

        for (uint64_t i = 0; i < 3; i++) {
            pids[i] = fork();
            assert_true(pids[i] >= 0);
            if (pids[i] == 0)
                writer(seed + round * 3 + i);
        }
        remote_help_open(&help, where, NULL, NULL, NULL);
        for (int reads = 0; reads < 5; reads++) {
            got += remote_help_get_many(&help, NS, 1, KEYS, PAGES, &status);
            assert_true(status == 0 || status == KVT_E_MISS);
        }
        remote_help_close(&help);
        for (int i = 0; i < 3; i++) {
            assert_int_equal(kill(pids[i], SIGKILL), 0);
            assert_int_equal(waitpid(pids[i], NULL, 0), pids[i]);
        }
    }
    print_message("           %u records read beside the writers\n", got);
    remote_help_open(&help, where, NULL, NULL, NULL);
    got = remote_help_get_many(&help, NS, 1, KEYS, PAGES, &status);
    assert_true(status == 0 || status == KVT_E_MISS);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS - got);
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
}

/* ---- the cleaner --------------------------------------------------------------------------- */

#define PERIOD_NS INT64_C(50000000)

static void open_clean(struct remote_help *one, uint64_t records)
{
    char error[512] = "";

    memset(one, 0, sizeof(*one));
    one->deadline_ns = REMOTE_HELP_DEADLINE_NS;
    one->params = (struct kvt_remote_params){.where = where,
                                             .cap_bytes = records * PAGES * KVT_PAGE_BYTES,
                                             .clean_period_ns = PERIOD_NS};
    if (kvt_remote_tier_open(&one->params, &one->remote, error, sizeof(error)) != 0)
        fail_msg("%s", error);
}

static bool lease(char *text, size_t len)
{
    char path[200];
    FILE *file;
    size_t got = 0;

    snprintf(path, sizeof(path), "%s/kvt0/cleaner", dir);
    file = fopen(path, "r");
    if (file) {
        got = fread(text, 1, len - 1, file);
        fclose(file);
    }
    text[got] = '\0';
    return got > 0;
}

/* A record that was used so many seconds ago. */
static void age(uint64_t number, long seconds)
{
    struct timespec times[2];
    char path[400];

    assert_int_equal(clock_gettime(CLOCK_REALTIME, &times[0]), 0);
    times[0].tv_sec -= seconds;
    times[1] = times[0];
    path_of(number, path, sizeof(path));
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

/* Down to the cap and a bit below, the longest unused first; what was read is used; what is not a
 * record, and what is being written, stays; what a dead writer has left goes. */
static void test_the_cleaner_keeps_the_cap(void **state)
{
    char path[200], left[200];
    uint32_t there;
    FILE *file;

    (void)state;
    remote_help_open(&help, where, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    for (uint64_t number = 1; number <= KEYS; number++)
        age(number, (long)(100000 - 1000 * number));
    assert_int_equal(remote_help_get_many(&help, NS, 1, 5, PAGES, NULL), 5); /* the oldest five */
    snprintf(path, sizeof(path), "%s/kvt0/tmp/new", dir);
    snprintf(left, sizeof(left), "%s/kvt0/tmp/old", dir);
    for (int i = 0; i < 2; i++) {
        file = fopen(i ? left : path, "w");
        assert_non_null(file);
        fclose(file);
    }
    assert_int_equal(
        utimensat(AT_FDCWD, left, (const struct timespec[2]){{.tv_sec = 1}, {.tv_sec = 1}}, 0), 0);
    open_clean(&other, 20);
    /* counted without being read: that would be a use. Besides: the lease, "new", a file for a
     * moment */
    for (int i = 0; i < 600 && files() > 23; i++)
        rig_sleep_ms(50);
    rig_sleep_ms(300); /* a pass under way ends */
    there = remote_help_probe(&help, NS, 1, KEYS, NULL);
    assert_true(there >= 17 && there <= 20);
    assert_int_equal(remote_help_get_many(&help, NS, 1, 5, PAGES, NULL), 5);
    assert_int_equal(remote_help_probe(&help, NS, 6, 10, NULL), 0);
    assert_int_equal(remote_help_get_many(&help, NS, KEYS - 11, 12, PAGES, NULL), 12);
    assert_int_equal(access(path, F_OK), 0);
    assert_int_not_equal(access(left, F_OK), 0);
}

/* One at a time; who leaves gives the lease back, who dies loses it. */
static void test_one_cleaner_at_a_time(void **state)
{
    char mine[160] = "", now[160] = "", dead[160] = "";
    pid_t pid;

    (void)state;
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        open_clean(&help, 1000);
        for (;;)
            pause();
    }
    for (int i = 0; i < 600 && !lease(dead, sizeof(dead)); i++)
        rig_sleep_ms(50);
    assert_true(dead[0]);
    open_clean(&help, 1000);
    open_clean(&other, 1000);
    rig_sleep_ms(300); /* alive it renews its lease: usually nobody takes it, and somebody has it */
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    for (int i = 0; i < 600; i++) {
        if (lease(mine, sizeof(mine)) && strcmp(mine, dead) != 0)
            break;
        rig_sleep_ms(50);
    }
    assert_string_not_equal(mine, dead);
    remote_help_close(&help);
    remote_help_close(&other);
    assert_false(lease(now, sizeof(now)));
}

static void open_with(struct remote_help *one, const struct kvt_remote_params *params)
{
    char error[512] = "";

    memset(one, 0, sizeof(*one));
    one->deadline_ns = REMOTE_HELP_DEADLINE_NS;
    one->params = *params;
    one->params.where = where;
    if (kvt_remote_tier_open(&one->params, &one->remote, error, sizeof(error)) != 0)
        fail_msg("%s", error);
}

/* What is older than the time to live is not there, whoever has not cleaned yet, and may be put
 * again; the cleaner removes it. Reading does not make it younger. */
static void test_time_to_live(void **state)
{
    const struct kvt_remote_params lives = {.ttl_ns = INT64_C(3600000000000)};
    const struct kvt_remote_params cleans = {.ttl_ns = INT64_C(3600000000000),
                                             .clean_period_ns = PERIOD_NS};
    char path[200];
    int status;

    (void)state;
    remote_help_open(&help, where, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    for (uint64_t number = 1; number <= 10; number++)
        age(number, 3700);
    age(11, 3500);
    snprintf(path, sizeof(path), "%s/kvt0/cleaner", dir);
    file_with(path, "somebody else"); /* who does not clean, for six periods of ten seconds */
    open_with(&other, &lives);
    other.ttl_ns = INT64_C(7200000000000); /* the option's is shorter */
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS); /* no limit */
    help.ttl_ns = INT64_C(3600000000000); /* one of the namespace alone */
    assert_int_equal(remote_help_probe(&help, NS, 1, KEYS, NULL), KEYS - 10);
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, &status), KEYS - 10);
    assert_int_equal(status, KVT_E_MISS);
    help.ttl_ns = 0;
    assert_int_equal(remote_help_probe(&other, NS, 1, KEYS, NULL), KEYS - 10);
    assert_int_equal(remote_help_get_many(&other, NS, 1, KEYS, PAGES, &status), KEYS - 10);
    assert_int_equal(status, KVT_E_MISS);
    assert_int_equal(remote_help_put(&other, NS, 1, PAGES, false), 0);
    assert_int_equal(remote_help_put(&other, NS, 1, PAGES, false), KVT_E_EXISTS);
    assert_int_equal(remote_help_put(&other, NS, 11, PAGES, false), KVT_E_EXISTS);
    assert_int_equal(remote_help_get(&other, NS, 1, PAGES), 0);
    remote_help_close(&other);
    assert_int_equal(unlink(path), 0);
    open_with(&other, &cleans);
    for (int i = 0; i < 600 && remote_help_probe(&help, NS, 1, KEYS, NULL) > KEYS - 9; i++)
        rig_sleep_ms(50);
    assert_int_equal(remote_help_probe(&help, NS, 2, 9, NULL), 0);
    assert_int_equal(remote_help_get_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS - 9);
}

/* Each namespace has a cap of its own: one that holds more loses what it did not use for longest,
 * the others nothing. */
static void test_a_cap_for_each_namespace(void **state)
{
    const struct kvt_remote_params params = {.ns_cap_bytes = UINT64_C(20) * PAGES * KVT_PAGE_BYTES,
                                             .clean_period_ns = PERIOD_NS};
    uint32_t there = KEYS;

    (void)state;
    remote_help_open(&help, where, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    for (uint32_t i = 1; i <= 4; i++)
        assert_int_equal(remote_help_put_many(&help, (uint8_t)(NS + i), 1, 18, PAGES, NULL), 18);
    for (uint64_t number = 1; number <= KEYS; number++)
        age(number, (long)(100000 - 1000 * number));
    open_with(&other, &params);
    for (int i = 0; i < 600 && there > 20; i++) {
        rig_sleep_ms(50);
        there = remote_help_probe(&help, NS, 1, KEYS, NULL);
    }
    rig_sleep_ms(300); /* a pass under way ends */
    there = remote_help_probe(&help, NS, 1, KEYS, NULL);
    assert_true(there >= 17 && there <= 20);
    assert_int_equal(remote_help_probe(&help, NS, 1, KEYS - 20, NULL), 0); /* the oldest went */
    for (uint32_t i = 1; i <= 4; i++)
        assert_int_equal(remote_help_probe(&help, (uint8_t)(NS + i), 1, 18, NULL), 18);
}

/* Whoever does not have the lease removes nothing, however much there is, until it is his. */
static void test_who_has_no_lease_removes_nothing(void **state)
{
    const struct kvt_remote_params params = {.cap_bytes = UINT64_C(20) * PAGES * KVT_PAGE_BYTES};
    char path[200];

    (void)state;
    remote_help_open(&help, where, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, KEYS, PAGES, NULL), KEYS);
    snprintf(path, sizeof(path), "%s/kvt0/cleaner", dir);
    file_with(path, "somebody else"); /* renewed a moment ago: it is good for a minute */
    open_with(&other, &params);
    rig_sleep_ms(300); /* his first look is over */
    assert_int_equal(remote_help_probe(&help, NS, 1, KEYS, NULL), KEYS);
    remote_help_close(&other);
    assert_int_equal(unlink(path), 0);
    open_with(&other, &params);
    for (int i = 0; i < 600 && remote_help_probe(&help, NS, 1, KEYS, NULL) > 20; i++)
        rig_sleep_ms(50);
    assert_true(remote_help_probe(&help, NS, 1, KEYS, NULL) <= 20);
}

/* Two caches over one directory, through the public API. */
static void test_two_caches(void **state)
{
    static struct rig one, two;
    struct rig_shape shape = rig_shape_small(64);
    char config[300];

    (void)state;
    if (getenv("KVT_RIG_DAEMON"))
        return;
    snprintf(config, sizeof(config), "dram=4MiB,remote_write=all,remote_deadline=20s,remote=%s",
             where);
    rig_init(&one, &shape, config, NULL);
    rig_init(&two, &shape, config, NULL);
    rig_open(&one);
    rig_open(&two);
    assert_int_equal(rig_store(&one, 1, 24, 0, NULL), 24);
    for (int i = 0; i < 1200 && rig_stat(&one, "remote.put") < 24; i++)
        rig_sleep_ms(50);
    assert_int_equal(rig_lookup(&two, 1, 30), 24);
    assert_int_equal(rig_load(&two, 1, 24, NULL), 24);
    assert_int_equal(rig_stat(&two, "load.granted_remote"), 24);
    assert_int_equal(kvt_purge(one.ns, NULL, 0), 24);
    assert_int_equal(files(), 0);
    rig_close(&one);
    rig_close(&two);
    rig_free(&one);
    rig_free(&two);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_put_get_probe_drop, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_one_of_many_publishes, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_what_is_not_a_record, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_mac, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_directories_that_cannot_be_used, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_trouble_is_told_once, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_another_directory_has_its_name, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_all_of_it_is_removed, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_it_is_put_aside, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_over_before_it_began, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_writers_that_are_killed, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_the_cleaner_keeps_the_cap, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_time_to_live, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_a_cap_for_each_namespace, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_one_cleaner_at_a_time, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_who_has_no_lease_removes_nothing, begin, tear_down),
        cmocka_unit_test_setup_teardown(test_two_caches, begin, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
