/* A forked child that lives on without exec, as of Python's multiprocessing.
 *
 * Goal:   it keeps nothing of its parent's: when the parent is killed, the next process has the
 *         root, and a kvtierd takes the parent for gone; while the parent lives, the root is its.
 * Method: a process that opens a cache and forks a child that sleeps; SIGKILL; a cache over the
 *         same root, at once. Over each backend. And a child that uses what it inherited.
 * Checked to fail: without kvt_fork_add() in io_files.c, and with in_child() closing nothing, the
 *         root stays locked.
 */
#include "support/rig.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fork.h"
#include "io/io.h"
#include "support/daemon_rig.h"

#define BLOCKS 8u

static const char *backend = "posix";
static struct rig rig;
static struct daemon server;
static pid_t sleeper;

static int tear_down(void **state)
{
    (void)state;
    if (sleeper > 0)
        (void)kill(sleeper, SIGKILL);
    sleeper = 0;
    rig_free(&rig);
    if (server.dir[0] != '\0')
        daemon_free(&server);
    memset(&rig, 0, sizeof(rig));
    memset(&server, 0, sizeof(server));
    return 0;
}

/* In a process of its own: stores, forks the sleeper, says its number, and lives on. */
_Noreturn static void engine(int say)
{
    rig_open(&rig);
    if (rig_store(&rig, 1, BLOCKS, 0, NULL) != BLOCKS || kvt_flush(rig.cache) != 0)
        _exit(1);
    pid_t child = fork();
    if (child == 0) {
        (void)close(say);
        for (;;)
            pause();
    }
    if (write(say, &child, sizeof(child)) != sizeof(child))
        _exit(2);
    for (;;)
        pause();
}

/* The engine, once its child sleeps. */
static pid_t start_engine(void)
{
    int ends[2];

    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)close(ends[0]);
        engine(ends[1]);
    }
    (void)close(ends[1]);
    assert_int_equal(read(ends[0], &sleeper, sizeof(sleeper)), sizeof(sleeper));
    (void)close(ends[0]);
    return pid;
}

static void end_engine(pid_t pid)
{
    int status;

    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status));
}

static void the_root_of_a_killed_parent_is_free(void **state)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);
    char config[100];

    (void)state;
    (void)snprintf(config, sizeof(config), "dram=4MiB,io=%s,disk_required=yes", backend);
    rig_init(&rig, &shape, config, "16MiB");
    pid_t pid = start_engine();
    assert_int_equal(kvt_io_posix_held(rig.dir), 1); /* the child has unlocked nothing */
    assert_int_equal(rig_try_open(&rig), KVT_E_LOCKED);
    end_engine(pid);
    assert_int_equal(kill(sleeper, 0), 0);
    assert_int_equal(kvt_io_posix_held(rig.dir), 0);
    rig_open(&rig);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
}

static void a_kvtierd_lets_a_killed_parent_go(void **state)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);

    (void)state;
    daemon_init(&server, "--dram 16MiB --disk {store}:64MiB");
    daemon_start(&server);
    rig_init(&rig, &shape, server.config, NULL);
    pid_t pid = start_engine();
    assert_int_equal(daemon_stat(&server, "daemon.clients"), 1);
    end_engine(pid);
    daemon_wait_stat(&server, "daemon.clients", 0, 20000);
    assert_int_equal(kill(sleeper, 0), 0);
}

/* It may close the cache that it inherited, and open one of its own. */
static void a_child_changes_nothing_of_its_parents(void **state)
{
    struct kvt_io_posix_params params = {.direct = -1, .threads = 1, .backend = KVT_IO_POSIX};
    struct kvt_io *io = NULL;
    char dir[128];
    int status;

    (void)state;
    rig_dir_make(dir, sizeof(dir));
    params.path = dir;
    params.backend = strcmp(backend, "uring") == 0 ? KVT_IO_URING : KVT_IO_POSIX;
    assert_int_equal(kvt_io_files_new(&params, &io), 0);
    assert_int_equal(io->ops->lock(io, NULL), 0);
    int file = io->ops->open(io, "f", KVT_IO_OPEN_CREATE);
    assert_true(file >= 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        int wrong = io->ops->lock(io, NULL) != -EIO;
        wrong += io->ops->unlink(io, "f") != -EIO;
        wrong += io->ops->truncate(io, file, 4096) != -EIO;
        wrong += io->ops->open(io, "g", KVT_IO_OPEN_CREATE) != -EIO;
        io->ops->destroy(io);
        _exit(wrong);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_int_equal(kvt_io_posix_held(dir), 1);
    assert_int_equal(io->ops->truncate(io, file, 4096), 0);
    io->ops->destroy(io);
    assert_int_equal(kvt_io_posix_held(dir), 0);
    rig_dir_remove(dir);
}

/* Entries in any order of coming and going. */
static void the_list_keeps_what_is_in_it(void **state)
{
    struct kvt_fork_fd entries[3] = {0};
    int fds[3], status;

    (void)state;
    for (unsigned gone = 0; gone < 8; gone++) {
        kvt_fork_hold();
        for (int i = 0; i < 3; i++) {
            fds[i] = dup(STDOUT_FILENO);
            kvt_fork_add(&entries[i], &fds[i]);
        }
        kvt_fork_let();
        for (int i = 0; i < 3; i++)
            if (gone & 1u << i)
                kvt_fork_drop(&entries[i]);
        fflush(NULL);
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            for (int i = 0; i < 3; i++)
                if ((fds[i] < 0) != !(gone & 1u << i))
                    _exit(1);
            _exit(0);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        for (int i = 0; i < 3; i++) {
            kvt_fork_drop(&entries[i]); /* twice is once */
            assert_int_equal(close(fds[i]), 0);
        }
    }
}

int main(void)
{
    char why[160];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(the_list_keeps_what_is_in_it, tear_down),
        cmocka_unit_test_teardown(a_child_changes_nothing_of_its_parents, tear_down),
        cmocka_unit_test_teardown(the_root_of_a_killed_parent_is_free, tear_down),
        cmocka_unit_test_teardown(a_kvtierd_lets_a_killed_parent_go, tear_down),
    };
    int failed = cmocka_run_group_tests_name("posix", tests, NULL, NULL);

    if (kvt_io_uring_probe(why, sizeof(why)) != 0) {
        printf("no ring: %s\n", why);
        return failed;
    }
    backend = "uring";
    return failed + cmocka_run_group_tests_name("uring", tests, NULL, NULL);
}
