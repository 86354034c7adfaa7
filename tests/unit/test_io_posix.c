/* The backends over a directory where they meet the system (C29, C49, C76): directories, modes,
 * locks, forks, descriptors, direct and buffered mode.
 *
 * Goal:   a root that must be refused is refused with its own code and nothing is changed; nothing
 *         leaks; one owner at a time, whatever forks or dies.
 * Method: real directories under the current one, children by fork; every test once over posix and
 *         once over uring, where that is to be had.
 * What the machine cannot do (tmpfs, mounts, other users) is skipped and said so. The seam's
 *         contract itself is in test_io.c.
 */
#include "io/io_posix.h"

#include "support/store_help.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checked.h"
#include "io/io_common.h"
#include "kvtier/error.h"

#define PAGE ((int64_t)KVT_IO_ALIGN)
#define SKIPPED 77

/* ---- helpers ---- */

static char top[64]; /* a fresh directory per test */
static int backend = KVT_IO_POSIX;

static int setup(void **state)
{
    (void)state;
    snprintf(top, sizeof top, "posix-test-XXXXXX");
    return mkdtemp(top) ? 0 : -1;
}

/* Remove a directory with what is in it, one level of directories deep. */
static void remove_tree(const char *path)
{
    struct dirent *entry;
    DIR *dir = opendir(path);
    char name[400];

    while (dir && (entry = readdir(dir))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        if (unlink(name) < 0 && errno == EISDIR)
            remove_tree(name);
    }
    if (dir)
        closedir(dir);
    rmdir(path);
}

static int teardown(void **state)
{
    (void)state;
    remove_tree(top);
    return access(top, F_OK) ? 0 : -1;
}

static const char *in_top(const char *name)
{
    static char path[4][160];
    static int turn;

    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/%s", top, name);
    return path[turn];
}

static int open_root(const char *path, int direct, int read_only, struct kvt_io **io)
{
    struct kvt_io_posix_params params = {
        .path = path, .threads = 2, .direct = direct, .read_only = read_only, .backend = backend};

    return kvt_io_files_new(&params, io);
}

static struct kvt_io *must_open(const char *path)
{
    struct kvt_io *io = NULL;

    assert_int_equal(open_root(path, -1, 0, &io), 0);
    return io;
}

static int mode_of(const char *path)
{
    struct stat st;

    assert_int_equal(lstat(path, &st), 0);
    return (int)(st.st_mode & 07777);
}

static int count_entries(const char *path)
{
    struct dirent *entry;
    DIR *dir = opendir(path);
    int count = -2; /* "." and ".." */

    assert_non_null(dir);
    while ((entry = readdir(dir)))
        count++;
    closedir(dir);
    return count;
}

static int count_fds(void)
{
    return count_entries("/proc/self/fd");
}

/* Wait for a child; its exit code, or 128 + signal. */
static int reap_child(pid_t pid)
{
    int status;

    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static uint8_t *pages(size_t count, int byte)
{
    uint8_t *bytes = aligned_alloc(KVT_IO_ALIGN, count * KVT_IO_ALIGN);

    if (bytes)
        memset(bytes, byte, count * KVT_IO_ALIGN);
    return bytes;
}

/* ---- the root directory ---- */

/* C76 on disk; shared memory has its own. */
static void test_c76_modes(void **state)
{
    static const mode_t umasks[] = {000, 022, 077, 0777};

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(umasks); i++) {
        mode_t old = umask(umasks[i]);
        struct kvt_io *io = NULL;
        int rc = open_root(in_top("root"), -1, 0, &io);

        assert_int_equal(rc, 0);
        assert_true(io->ops->open(io, "seg-00000000", KVT_IO_OPEN_CREATE) >= 0);
        assert_true(io->ops->open(io, "x", KVT_IO_OPEN_CREATE | KVT_IO_OPEN_EXCLUSIVE) >= 0);
        assert_int_equal(io->ops->lock(io, NULL), 0);
        umask(old);
        assert_int_equal(mode_of(in_top("root")), 0700);
        assert_int_equal(mode_of(in_top("root/seg-00000000")), 0600);
        assert_int_equal(mode_of(in_top("root/x")), 0600);
        assert_int_equal(mode_of(in_top("root/lock")), 0600);
        assert_int_equal(count_entries(in_top("root")), 3); /* the probe left nothing */
        io->ops->destroy(io);
        remove_tree(in_top("root"));
    }
}

/* What exists keeps its mode: it may be the user's choice. */
static void test_existing_modes_stay(void **state)
{
    struct kvt_io *io;
    int fd;

    (void)state;
    assert_int_equal(mkdir(in_top("root"), 0750), 0);
    fd = open(in_top("root/f"), O_CREAT | O_WRONLY, 0640);
    assert_true(fd >= 0);
    close(fd);
    io = must_open(in_top("root"));
    assert_true(io->ops->open(io, "f", KVT_IO_OPEN_CREATE) >= 0);
    assert_int_equal(mode_of(in_top("root")), 0750);
    assert_int_equal(mode_of(in_top("root/f")), 0640);
    io->ops->destroy(io);
}

static void test_refused_roots(void **state)
{
    struct kvt_io *io = NULL;
    int fds = count_fds(), fd;

    (void)state;
    assert_int_equal(mkdir(in_top("real"), 0700), 0);
    assert_int_equal(symlink("real", in_top("link")), 0);
    assert_int_equal(symlink("nowhere", in_top("dangling")), 0);
    fd = open(in_top("file"), O_CREAT | O_WRONLY, 0600);
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(mkfifo(in_top("fifo"), 0600), 0);
    for (int read_only = 0; read_only < 2; read_only++) {
        assert_int_equal(open_root(in_top("link"), -1, read_only, &io), KVT_E_SYMLINK); /* C76 */
        assert_int_equal(open_root(in_top("link/"), -1, read_only, &io), KVT_E_SYMLINK);
        assert_int_equal(open_root(in_top("link//"), -1, read_only, &io), KVT_E_SYMLINK);
        assert_int_equal(open_root(in_top("dangling"), -1, read_only, &io), KVT_E_SYMLINK);
        assert_int_equal(open_root(in_top("file"), -1, read_only, &io), -ENOTDIR);
        assert_int_equal(open_root(in_top("fifo"), -1, read_only, &io), -ENOTDIR);
        assert_int_equal(open_root(in_top("no/such"), -1, read_only, &io), -ENOENT);
        assert_int_equal(open_root("", -1, read_only, &io), -ENOENT);
        assert_int_equal(open_root(NULL, -1, read_only, &io), -ENOENT);
    }
    assert_int_equal(open_root(in_top("new"), -1, 1, &io), -ENOENT); /* nothing is made */
    assert_null(io);
    assert_int_equal(count_entries(top), 5);
    assert_int_equal(count_entries(in_top("real")), 0);
    assert_int_equal(count_fds(), fds);
}

static void test_bad_parameters(void **state)
{
    struct kvt_io_posix_params good = {.path = top, .threads = 1, .direct = 0}, params;
    struct kvt_io *io = NULL;

    (void)state;
    params = good;
    params.threads = 0;
    assert_int_equal(kvt_io_posix_new(&params, &io), KVT_E_INVAL);
    params.threads = KVT_POSIX_THREADS_MAX + 1;
    assert_int_equal(kvt_io_posix_new(&params, &io), KVT_E_INVAL);
    params = good;
    params.direct = 2;
    assert_int_equal(kvt_io_posix_new(&params, &io), KVT_E_INVAL);
    params = good;
    params.backend = KVT_IO_AUTO + 1;
    assert_int_equal(kvt_io_files_new(&params, &io), KVT_E_INVAL);
    params.backend = -1;
    assert_int_equal(kvt_io_files_new(&params, &io), KVT_E_INVAL);
    assert_null(io);
}

/* As another user, who may not write: in a child, whose verdict is its exit code. */
static int as_nobody(void)
{
    struct kvt_io *io = NULL;
    int rc;

    if (setresgid(65534, 65534, 65534) < 0 || setresuid(65534, 65534, 65534) < 0)
        return SKIPPED;
    rc = open_root("closed", -1, 0, &io);
    if (rc != KVT_E_READ_ONLY)
        return 1;
    rc = open_root("closed/new", -1, 0, &io); /* cannot be made */
    if (rc != KVT_E_READ_ONLY)
        return 2;
    rc = open_root("closed", -1, 1, &io);
    if (rc)
        return 3;
    io->ops->destroy(io);
    return 0;
}

static void test_read_only_directory(void **state)
{
    pid_t pid;
    int code;

    (void)state;
    assert_int_equal(mkdir(in_top("closed"), 0555), 0);
    assert_int_equal(chmod(top, 0755), 0);
    fflush(NULL);
    pid = fork();
    if (!pid)
        _exit(chdir(top) ? 9 : as_nobody());
    code = reap_child(pid);
    if (code == SKIPPED) {
        print_message("[   SKIP   ] cannot become another user\n");
        skip();
    }
    assert_int_equal(code, 0);
    assert_int_equal(count_entries(in_top("closed")), 0);
}

static int ignore_name(void *arg, const char *name)
{
    (void)arg;
    (void)name;
    return 0;
}

static void test_read_only_instance(void **state)
{
    struct kvt_io *io = must_open(in_top("root")), *reader = NULL;
    int file = io->ops->open(io, "f", KVT_IO_OPEN_CREATE);
    uint8_t *buf = pages(1, 0x31);
    struct kvt_io_info info;

    (void)state;
    assert_int_equal(kvt_io_write_now(io, file, 0, buf, PAGE), PAGE);
    io->ops->destroy(io);
    assert_int_equal(open_root(in_top("root"), -1, 1, &reader), 0);
    assert_int_equal(reader->ops->lock(reader, NULL), 0); /* nobody has ever owned it */
    assert_int_equal(reader->ops->open(reader, "g", KVT_IO_OPEN_CREATE), -EROFS);
    assert_int_equal(reader->ops->open(reader, "f", 0), -EROFS);
    assert_int_equal(reader->ops->unlink(reader, "f"), -EROFS);
    assert_int_equal(reader->ops->rename(reader, "f", "g"), -EROFS);
    assert_int_equal(reader->ops->sync_dir(reader), 0);
    file = reader->ops->open(reader, "f", KVT_IO_OPEN_READ_ONLY);
    memset(buf, 0, PAGE);
    assert_int_equal(kvt_io_read_now(reader, file, 0, buf, PAGE), PAGE);
    assert_int_equal(buf[PAGE - 1], 0x31);
    assert_int_equal(kvt_io_write_now(reader, file, 0, buf, PAGE), -EBADF);
    assert_int_equal(reader->ops->truncate(reader, file, 0), -EBADF);
    assert_int_equal(reader->ops->list(reader, ignore_name, NULL), 0);
    reader->ops->info(reader, &info);
    assert_int_equal(info.direct, 0);
    reader->ops->destroy(reader);
    assert_int_equal(count_entries(in_top("root")), 1);
    free(buf);
}

/* What others plant under our names: refused, and no open hangs. */
static void test_planted_names(void **state)
{
    struct kvt_io *io = must_open(in_top("root")), *buffered = NULL;

    (void)state;
    assert_int_equal(symlink("/etc/passwd", in_top("root/seg-00000000")), 0);
    assert_int_equal(symlink("target", in_top("root/seg-00000001")), 0);
    assert_int_equal(mkfifo(in_top("root/seg-00000002"), 0600), 0);
    assert_int_equal(mkdir(in_top("root/seg-00000003"), 0700), 0);
    for (int create = 0; create < 2; create++) {
        int flags = create ? KVT_IO_OPEN_CREATE : 0;

        assert_int_equal(io->ops->open(io, "seg-00000000", flags), -ELOOP);
        assert_int_equal(io->ops->open(io, "seg-00000001", flags), -ELOOP);
        assert_true(io->ops->open(io, "seg-00000002", flags) < 0);
        assert_true(io->ops->open(io, "seg-00000003", flags) < 0);
    }
    assert_true(io->ops->open(io, "seg-00000002", KVT_IO_OPEN_READ_ONLY) < 0);
    assert_int_equal(open_root(in_top("root"), 0, 0, &buffered),
                     0); /* O_DIRECT refuses by itself */
    assert_int_equal(buffered->ops->open(buffered, "seg-00000002", 0), -EINVAL);
    assert_int_equal(buffered->ops->open(buffered, "seg-00000002", KVT_IO_OPEN_READ_ONLY), -EINVAL);
    buffered->ops->destroy(buffered);
    assert_int_equal(access(in_top("root/target"), F_OK), -1);
    assert_int_equal(symlink("elsewhere", in_top("root/lock")), 0);
    assert_int_equal(io->ops->lock(io, NULL), KVT_E_SYMLINK);
    io->ops->destroy(io);
}

/* ---- the lock ---- */

static void test_second_instance(void **state)
{
    struct kvt_io *first = must_open(in_top("root")), *second, *reader = NULL;
    int64_t pid = 0;

    (void)state;
    assert_int_equal(first->ops->lock(first, &pid), 0);
    second = must_open(in_top("root")); /* opening is allowed, owning is not */
    assert_int_equal(second->ops->lock(second, &pid), KVT_E_LOCKED);
    assert_int_equal(pid, getpid());
    assert_int_equal(open_root(in_top("root"), -1, 1, &reader), 0);
    assert_int_equal(reader->ops->lock(reader, &pid), KVT_E_LOCKED);
    second->ops->destroy(second); /* closing another description does not unlock */
    second = must_open(in_top("root"));
    assert_int_equal(second->ops->lock(second, NULL), KVT_E_LOCKED);
    first->ops->destroy(first);
    assert_int_equal(second->ops->lock(second, NULL), 0);
    second->ops->destroy(second);
    /* readers share, and keep an owner out */
    assert_int_equal(reader->ops->lock(reader, NULL), 0);
    second = must_open(in_top("root"));
    assert_int_equal(second->ops->lock(second, &pid), KVT_E_LOCKED);
    assert_int_equal(pid, 0); /* the pid in the file is an earlier owner's */
    reader->ops->destroy(reader);
    assert_int_equal(second->ops->lock(second, NULL), 0);
    second->ops->destroy(second);
}

/* A child that owns the root until it is told to go; returns its pid, *tell is its stop. */
static pid_t start_owner(int *tell)
{
    int stop[2], ready[2];
    char word = 0;
    pid_t pid;

    assert_int_equal(pipe2(stop, O_CLOEXEC), 0);
    assert_int_equal(pipe2(ready, O_CLOEXEC), 0);
    fflush(NULL);
    pid = fork();
    assert_true(pid >= 0);
    if (!pid) {
        struct kvt_io *io = NULL;

        close(stop[1]);
        if (open_root(in_top("root"), -1, 0, &io) || io->ops->lock(io, NULL))
            _exit(1);
        if (write(ready[1], "r", 1) != 1 || read(stop[0], &word, 1) < 0)
            _exit(2);
        _exit(0); /* without closing anything */
    }
    close(stop[0]);
    close(ready[1]);
    assert_int_equal(read(ready[0], &word, 1), 1);
    close(ready[0]);
    *tell = stop[1];
    return pid;
}

static void test_locked_by_another_process(void **state)
{
    int64_t owner = 0;
    struct kvt_io *io;
    pid_t pid;
    int tell;

    (void)state;
    pid = start_owner(&tell);
    io = must_open(in_top("root"));
    assert_int_equal(io->ops->lock(io, &owner), KVT_E_LOCKED);
    assert_int_equal(owner, pid);
    assert_int_equal(io->ops->lock(io, NULL), KVT_E_LOCKED);
    close(tell);
    assert_int_equal(reap_child(pid), 0);
    assert_int_equal(io->ops->lock(io, &owner), 0); /* the same instance may try again */
    io->ops->destroy(io);
    /* killed, not ended: the lock goes all the same (C56's basis) */
    pid = start_owner(&tell);
    io = must_open(in_top("root"));
    assert_int_equal(io->ops->lock(io, NULL), KVT_E_LOCKED);
    kill(pid, SIGKILL);
    assert_int_equal(reap_child(pid), 128 + SIGKILL);
    assert_int_equal(io->ops->lock(io, NULL), 0);
    close(tell);
    io->ops->destroy(io);
}

/* ---- forks ---- */

static struct kvt_io_req *wait_one(struct kvt_io *io)
{
    struct kvt_io_req *req = NULL;

    while (!io->ops->reap(io, &req, 1)) {
        struct pollfd wait = {.fd = io->ops->event_fd(io), .events = POLLIN};
        assert_int_equal(poll(&wait, 1, 20000), 1);
    }
    return req;
}

static void fork_children(struct kvt_io *io)
{
    for (int kind = 0; kind < 3; kind++) {
        pid_t pid;

        fflush(NULL);
        pid = fork();
        assert_true(pid >= 0);
        if (!pid) {
            struct kvt_io_req req = {.kind = KVT_IO_SYNC}, *got[4];

            if (kind == 0)
                _exit(0);
            if (io->ops->submit(io, &req) != -EIO || io->ops->reap(io, got, 4))
                _exit(1);
            if (kind == 2)
                io->ops->destroy(io); /* as an exit handler of the host might */
            _exit(0);
        }
        assert_int_equal(reap_child(pid), 0);
    }
}

/* C49: children come and go while requests are in flight; the parent does not notice. */
static void test_c49_fork_in_flight(void **state)
{
    enum { COUNT = 200 };
    struct kvt_io *io = must_open(in_top("root")), *other;
    int file = io->ops->open(io, "f", KVT_IO_OPEN_CREATE);
    uint8_t *buf = pages(COUNT, 0x42), *in = pages(1, 0);
    struct kvt_io_req *reqs = calloc(COUNT, sizeof *reqs);

    (void)state;
    assert_non_null(reqs);
    assert_int_equal(io->ops->lock(io, NULL), 0);
    for (uint32_t i = 0; i < COUNT; i++) {
        buf[i * PAGE] = (uint8_t)i;
        reqs[i] = (struct kvt_io_req){.kind = KVT_IO_WRITE, .file = file, .iov_count = 1};
        reqs[i].offset = (uint64_t)i * KVT_IO_ALIGN;
        reqs[i].iov[0] = (struct iovec){buf + i * PAGE, KVT_IO_ALIGN};
        assert_int_equal(io->ops->submit(io, &reqs[i]), 0);
        if (i % 50 == 49)
            fork_children(io);
    }
    for (uint32_t i = 0; i < COUNT; i++)
        assert_int_equal(wait_one(io)->result, PAGE);
    for (uint32_t i = 0; i < COUNT; i++) {
        assert_int_equal(kvt_io_read_now(io, file, (uint64_t)i * KVT_IO_ALIGN, in, PAGE), PAGE);
        assert_memory_equal(in, buf + i * PAGE, PAGE);
    }
    other = must_open(in_top("root"));
    assert_int_equal(other->ops->lock(other, NULL), KVT_E_LOCKED); /* still ours */
    other->ops->destroy(other);
    io->ops->destroy(io);
    free(reqs);
    free(buf);
    free(in);
}

/* exit() with requests in flight and without close: no crash, no hang. */
static void test_c49_exit_in_flight(void **state)
{
    pid_t pid;

    (void)state;
    fflush(NULL);
    pid = fork();
    assert_true(pid >= 0);
    if (!pid) {
        static struct kvt_io_req reqs[100];
        uint8_t *buf = pages(100, 1);
        struct kvt_io *io = NULL;
        int file;

        if (!buf || open_root(in_top("root"), -1, 0, &io))
            _exit(1);
        file = io->ops->open(io, "f", KVT_IO_OPEN_CREATE);
        for (uint32_t i = 0; i < 100; i++) {
            reqs[i] = (struct kvt_io_req){.kind = KVT_IO_WRITE, .file = file, .iov_count = 1};
            reqs[i].offset = (uint64_t)i * KVT_IO_ALIGN;
            reqs[i].iov[0] = (struct iovec){buf + i * PAGE, KVT_IO_ALIGN};
            if (io->ops->submit(io, &reqs[i]))
                _exit(2);
        }
        alarm(20);
        quick_exit(0); /* as exit(), but not the sanitizers' leak check: nothing was freed */
    }
    assert_int_equal(reap_child(pid), 0);
}

/* ---- descriptors ---- */

static void test_close_on_exec_and_no_leaks(void **state)
{
    int before = count_fds(), want = backend == KVT_IO_URING ? 5 : 4;
    struct kvt_io *io = must_open(in_top("root"));
    struct dirent *entry;
    int ours = 0;
    DIR *dir;

    (void)state;
    assert_true(io->ops->open(io, "f", KVT_IO_OPEN_CREATE) >= 0);
    assert_int_equal(io->ops->lock(io, NULL), 0);
    dir = opendir("/proc/self/fd");
    assert_non_null(dir);
    while ((entry = readdir(dir))) {
        char link[64], target[256];
        ssize_t len;

        snprintf(link, sizeof link, "/proc/self/fd/%.20s", entry->d_name);
        len = readlink(link, target, sizeof target - 1);
        if (len <= 0)
            continue;
        target[len] = 0;
        if (strstr(target, top) || strstr(target, "eventfd") || strstr(target, "io_uring")) {
            assert_true(fcntl((int)strtol(entry->d_name, NULL, 10), F_GETFD) & FD_CLOEXEC);
            ours++;
        }
    }
    closedir(dir);
    assert_int_equal(ours, want);    /* directory, file, lock, event fd, ring */
    for (int i = 0; i < 1000; i++) { /* C29: failures leave nothing open */
        struct kvt_io *none = NULL;

        assert_int_equal(io->ops->open(io, "absent", 0), -ENOENT);
        assert_int_equal(io->ops->open(io, "a/b", KVT_IO_OPEN_CREATE), -EINVAL);
        if (i % 100 == 0)
            assert_int_equal(open_root(in_top("root/f"), -1, 0, &none), -ENOTDIR);
    }
    assert_int_equal(count_fds(), before + want);
    io->ops->destroy(io);
    assert_int_equal(count_fds(), before);
}

/* C29 at the seam: out of descriptors: an error, then all is well again. Threads and gets are for
 * the client's tests. */
static void test_c29_out_of_descriptors(void **state)
{
    struct rlimit old, low;
    struct kvt_io *io = must_open(in_top("root")), *none = NULL;
    int files[64], count = 0, fds = count_fds();
    uint8_t *buf = pages(1, 3);
    char name[16];

    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    low = old;
    low.rlim_cur = (rlim_t)fds + 8;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    for (; count < 64; count++) {
        snprintf(name, sizeof name, "f%d", count);
        files[count] = io->ops->open(io, name, KVT_IO_OPEN_CREATE);
        if (files[count] < 0)
            break;
    }
    assert_in_range(count, 1, 10);
    assert_int_equal(files[count], -EMFILE);
    assert_int_equal(io->ops->list(io, ignore_name, NULL), -EMFILE);
    assert_true(open_root(in_top("root"), -1, 0, &none) < 0);
    assert_int_equal(kvt_io_write_now(io, files[0], 0, buf, PAGE), PAGE); /* data goes on */
    while (count)
        io->ops->close(io, files[--count]);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
    assert_true(io->ops->open(io, "again", KVT_IO_OPEN_CREATE) >= 0);
    io->ops->destroy(io);
    free(buf);
}

/* The user's signals are the user's threads' business. */
static void test_threads_block_signals(void **state)
{
    struct kvt_io *io = must_open(in_top("root"));
    struct dirent *entry;
    int seen = 0;
    DIR *dir;

    (void)state;
    if (backend == KVT_IO_URING) { /* it has none */
        io->ops->destroy(io);
        skip();
    }
    usleep(300000); /* a thread that has not begun blocks everything in any case */
    dir = opendir("/proc/self/task");
    assert_non_null(dir);
    while ((entry = readdir(dir))) {
        char path[64], line[256], comm[32] = "";
        unsigned long long blocked = 0;
        FILE *file;

        snprintf(path, sizeof path, "/proc/self/task/%.20s/status", entry->d_name);
        file = fopen(path, "r");
        while (file && fgets(line, sizeof line, file)) {
            (void)sscanf(line, "Name: %31s", comm);
            (void)sscanf(line, "SigBlk: %llx", &blocked);
        }
        if (file)
            fclose(file);
        if (!strncmp(comm, "kvt-io-", 7)) {
            seen++;
            assert_true(blocked >> (SIGTERM - 1) & 1 && blocked >> (SIGUSR1 - 1) & 1);
        }
    }
    closedir(dir);
    assert_int_equal(seen, 2);
    io->ops->destroy(io);
}

/* ---- direct and buffered ---- */

static unsigned warnings;
static char last_warning[256];

static void count_warning(void *arg, int level, const char *message)
{
    (void)arg;
    if (level <= 1) {
        warnings++;
        snprintf(last_warning, sizeof last_warning, "%s", message);
    }
}

static struct kvt_io *open_logged(const char *path, int direct, int want)
{
    struct kvt_io_posix_params params = {
        .path = path, .threads = 1, .direct = direct, .backend = backend};
    struct kvt_io *io = NULL;

    params.log = (struct kvt_log){.fn = count_warning, .level_max = 3};
    warnings = 0;
    assert_int_equal(kvt_io_files_new(&params, &io), want);
    return io;
}

static void test_tmpfs_is_not_direct(void **state)
{
    char dir[] = "/dev/shm/posix-test-XXXXXX";
    struct kvt_io_info info;
    struct kvt_io *io;

    (void)state;
    if (!mkdtemp(dir)) {
        print_message("[   SKIP   ] no tmpfs on /dev/shm\n");
        skip();
    }
    io = open_logged(dir, -1, 0);
    io->ops->info(io, &info);
    assert_int_equal(info.direct, 0);
    assert_non_null(strstr(info.why, "tmpfs"));
    assert_int_equal(warnings, 1); /* once, and it names the directory */
    assert_non_null(strstr(last_warning, dir));
    io->ops->destroy(io);
    io = open_logged(dir, 0, 0); /* asked for: nothing to warn of */
    assert_int_equal(warnings, 0);
    io->ops->destroy(io);
    io = open_logged(dir, 1, KVT_E_UNSUPPORTED);
    assert_int_equal(warnings, 1);
    assert_null(io);
    assert_int_equal(rmdir(dir), 0); /* nothing was left in it */
}

/* Whether any page of the file is in the page cache; -1 when it cannot be told. */
static int cached(const char *path, size_t bytes)
{
    unsigned char resident[256] = {0};
    int fd = open(path, O_RDONLY | O_CLOEXEC), any = 0;
    void *map = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);

    close(fd);
    if (map == MAP_FAILED || mincore(map, bytes, resident))
        return -1;
    for (size_t i = 0; i < bytes / (size_t)sysconf(_SC_PAGESIZE); i++)
        any |= resident[i] & 1;
    munmap(map, bytes);
    return any;
}

/* After a read in either mode the page cache does not hold the file: the next read is a real one.
 */
static void test_reads_leave_no_cache(void **state)
{
    uint8_t *buf = pages(64, 0x66);

    (void)state;
    for (int direct = 0; direct >= -1; direct--) {
        struct kvt_io *io = open_logged(in_top("root"), direct, 0);
        int file = io->ops->open(io, "f", KVT_IO_OPEN_CREATE);
        struct kvt_io_info info;

        io->ops->info(io, &info);
        assert_int_equal(kvt_io_write_now(io, file, 0, buf, 64 * PAGE), 64 * PAGE);
        assert_int_equal(kvt_io_sync_now(io, file), 0);
        assert_int_equal(kvt_io_read_now(io, file, 0, buf, 64 * PAGE), 64 * PAGE);
        if (info.direct || !direct)
            assert_int_equal(cached(in_top("root/f"), 64 * (size_t)PAGE), 0);
        else
            print_message("             not direct here: %s\n", info.why);
        io->ops->destroy(io);
    }
    free(buf);
}

/* Bytes written in one mode are read in the other. */
static void test_modes_agree(void **state)
{
    uint8_t *out = pages(5, 0), *in = pages(5, 0xa5);

    (void)state;
    for (size_t i = 0; i < (size_t)(5 * PAGE); i++)
        out[i] = (uint8_t)(i * 31 + i / 4096);
    for (int writer = -1; writer < 1; writer++) {
        struct kvt_io *w = open_logged(in_top("root"), writer, 0);
        struct kvt_io *r = open_logged(in_top("root"), -1 - writer, 0);
        int wf = w->ops->open(w, "f", KVT_IO_OPEN_CREATE), rf = r->ops->open(r, "f", 0);

        assert_int_equal(kvt_io_write_now(w, wf, 0, out, 5 * PAGE), 5 * PAGE);
        assert_int_equal(kvt_io_read_now(r, rf, 0, in, 5 * PAGE), 5 * PAGE);
        assert_memory_equal(in, out, 5 * PAGE);
        for (int64_t i = 0; i < 5 * PAGE; i++)
            out[i] ^= 0xff;
        r->ops->destroy(r);
        w->ops->destroy(w);
    }
    free(out);
    free(in);
}

static int64_t run_req(struct kvt_io *io, int kind, int file, void *base, size_t len)
{
    struct kvt_io_req req = {.kind = kind, .file = file, .iov_count = 1};

    req.iov[0] = (struct iovec){base, len};
    assert_int_equal(io->ops->submit(io, &req), 0);
    assert_ptr_equal(wait_one(io), &req);
    return req.result;
}

/* C43 at the seam, in both modes. The seam wants 4 KiB multiples: a buffer at 64 mod 4096, or an
 * odd size, is refused and moves nothing; what a caller stages into whole pages is exact, with a
 * stride of 3,100,672 for 3,098,112 bytes. Callers' own buffers are the client half's business. */
static void test_c43_shapes_at_the_seam(void **state)
{
    static const size_t sizes[] = {1, 63, 64, 511, 512, 4095, 4096, 4097, 8192, 8193, 3098112};
    uint8_t *out = pages(758, 0), *in = pages(758, 0);

    (void)state;
    for (size_t i = 0; i < (size_t)(758 * PAGE); i++)
        out[i] = (uint8_t)(i * 13 + i / 4096);
    assert_int_equal(kvt_round_up(3098112, KVT_IO_ALIGN), 3100672);
    for (int direct = -1; direct < 1; direct++) {
        struct kvt_io *io = open_logged(in_top("root"), direct, 0);
        int file = io->ops->open(io, "f", KVT_IO_OPEN_CREATE);

        for (size_t i = 0; i < KVT_ARRAY_LEN(sizes); i++) {
            size_t stride = (size_t)kvt_round_up(sizes[i], KVT_IO_ALIGN);

            assert_int_equal(io->ops->truncate(io, file, 0), 0);
            assert_int_equal(run_req(io, KVT_IO_WRITE, file, out + 64, stride), -EINVAL);
            if (sizes[i] != stride)
                assert_int_equal(run_req(io, KVT_IO_WRITE, file, out, sizes[i]), -EINVAL);
            assert_int_equal(io->ops->size(io, file), 0);
            assert_int_equal(run_req(io, KVT_IO_WRITE, file, out, stride), stride);
            memset(in, 0xa5, stride);
            assert_int_equal(run_req(io, KVT_IO_READ, file, in + 64, stride), -EINVAL);
            assert_int_equal(in[64], 0xa5);
            assert_int_equal(run_req(io, KVT_IO_READ, file, in, stride), stride);
            assert_memory_equal(in, out, sizes[i]);
        }
        io->ops->destroy(io);
    }
    free(out);
    free(in);
}

/* ---- a full file system ---- */

/* In a child with a mount namespace of its own: a tmpfs of 1 MiB. */
static int fill_small_tmpfs(const char *dir)
{
    uint8_t *buf = pages(16, 0x77), *in = pages(16, 0);
    struct kvt_io *io = NULL;
    int file, filler, written = 0;

    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
        mount("tmpfs", dir, "tmpfs", 0, "size=1m") < 0)
        return SKIPPED;
    if (open_root(dir, -1, 0, &io))
        return 1;
    file = io->ops->open(io, "f", KVT_IO_OPEN_CREATE);
    filler = io->ops->open(io, "filler", KVT_IO_OPEN_CREATE);
    if (kvt_io_write_now(io, file, 0, buf, 16 * PAGE) != 16 * PAGE)
        return 2;
    if (io->ops->allocate(io, file, 8 << 20) != -ENOSPC)
        return 3;
    if (io->ops->size(io, file) != 16 * PAGE) /* a failed reservation changes nothing */
        return 4;
    while (written < 64 && kvt_io_write_now(io, filler, (uint64_t)written * 16 * KVT_IO_ALIGN, buf,
                                            16 * PAGE) == 16 * PAGE)
        written++;
    if (written < 8 || written > 15)
        return 5;
    if (kvt_io_write_now(io, file, 64 * KVT_IO_ALIGN, buf, 16 * PAGE) != -ENOSPC)
        return 6;
    if (kvt_io_read_now(io, file, 0, in, 16 * PAGE) != 16 * PAGE || memcmp(in, buf, 16 * PAGE) != 0)
        return 7;
    io->ops->close(io, filler);
    if (io->ops->unlink(io, "filler"))
        return 8;
    if (kvt_io_write_now(io, file, 64 * KVT_IO_ALIGN, buf, 16 * PAGE) != 16 * PAGE) /* C27 */
        return 9;
    io->ops->destroy(io);
    free(buf);
    free(in);
    return 0;
}

static void test_no_space(void **state)
{
    pid_t pid;
    int code;

    (void)state;
    assert_int_equal(mkdir(in_top("small"), 0700), 0);
    fflush(NULL);
    pid = fork();
    assert_true(pid >= 0);
    if (!pid)
        _exit(fill_small_tmpfs(in_top("small")));
    code = reap_child(pid);
    if (code == SKIPPED) {
        print_message("[   SKIP   ] no tmpfs of our own can be mounted here\n");
        skip();
    }
    assert_int_equal(code, 0);
}

/* C44 through the instance: no fallocate, and the caller is told. */
static int no_fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    (void)fd;
    (void)mode;
    (void)offset;
    (void)bytes;
    errno = EOPNOTSUPP;
    return -1;
}

static void test_c44_no_fallocate(void **state)
{
    struct kvt_io_posix_params params = {
        .path = in_top("root"), .threads = 1, .direct = -1, .backend = backend};
    struct kvt_posix_sys sys = kvt_posix_sys_real;
    uint8_t *buf = pages(4, 0x55);
    struct kvt_io *io = NULL;
    int file;

    (void)state;
    sys.fallocate = no_fallocate;
    assert_int_equal(kvt_io_files_new_sys(&params, &sys, &io), 0);
    file = io->ops->open(io, "f", KVT_IO_OPEN_CREATE);
    assert_int_equal(io->ops->allocate(io, file, 1 << 20), -EOPNOTSUPP);
    assert_int_equal(io->ops->size(io, file), 0);
    assert_int_equal(kvt_io_write_now(io, file, 0, buf, 4 * PAGE), 4 * PAGE);
    assert_int_equal(io->ops->punch(io, file, KVT_IO_ALIGN, 2 * KVT_IO_ALIGN), 0);
    assert_int_equal(kvt_io_read_now(io, file, 0, buf, 4 * PAGE), 4 * PAGE);
    for (int64_t i = 0; i < 4 * PAGE; i++)
        assert_int_equal(buf[i], i < PAGE || i >= 3 * PAGE ? 0x55 : 0);
    io->ops->destroy(io);
    free(buf);
}

/* A reservation that fails half-way, as some file systems' do. */
static int half_fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    (void)mode;
    if (ftruncate(fd, offset + bytes / 2) == 0)
        errno = ENOSPC;
    return -1;
}

static void test_failed_reservation_is_undone(void **state)
{
    struct kvt_io_posix_params params = {
        .path = in_top("root"), .threads = 1, .direct = -1, .backend = backend};
    struct kvt_posix_sys sys = kvt_posix_sys_real;
    uint8_t *buf = pages(1, 0x55);
    struct kvt_io *io = NULL;
    int file;

    (void)state;
    sys.fallocate = half_fallocate;
    assert_int_equal(kvt_io_files_new_sys(&params, &sys, &io), 0);
    file = io->ops->open(io, "f", KVT_IO_OPEN_CREATE);
    assert_int_equal(kvt_io_write_now(io, file, 0, buf, PAGE), PAGE);
    assert_int_equal(io->ops->allocate(io, file, 1 << 20), -ENOSPC);
    assert_int_equal(io->ops->size(io, file), PAGE);
    io->ops->destroy(io);
    free(buf);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_c76_modes),
        T(test_existing_modes_stay),
        T(test_refused_roots),
        T(test_bad_parameters),
        T(test_read_only_directory),
        T(test_read_only_instance),
        T(test_planted_names),
        T(test_second_instance),
        T(test_locked_by_another_process),
        T(test_c49_fork_in_flight),
        T(test_c49_exit_in_flight),
        T(test_close_on_exec_and_no_leaks),
        T(test_c29_out_of_descriptors),
        T(test_threads_block_signals),
        T(test_tmpfs_is_not_direct),
        T(test_reads_leave_no_cache),
        T(test_modes_agree),
        T(test_c43_shapes_at_the_seam),
        T(test_no_space),
        T(test_c44_no_fallocate),
        T(test_failed_reservation_is_undone),
    };
#undef T

    int failed = cmocka_run_group_tests_name("io_posix", tests, NULL, NULL);
    char why[160];

    backend = KVT_IO_URING;
    if (kvt_io_uring_probe(why, sizeof why)) {
        print_message("not run over uring: %s\n", why);
        return failed;
    }
    return failed + cmocka_run_group_tests_name("io_posix over uring", tests, NULL, NULL);
}
