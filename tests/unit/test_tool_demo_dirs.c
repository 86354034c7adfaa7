/* Directories of demos that were killed.
 *
 * Goal:   the next demo removes them, and nothing else: none whose maker, or a child of it, lives,
 *         none that is young, no other name, no symbolic link.
 * Method: directories made by this process and by children that are killed; times set back.
 */
#include "demo_dirs.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define HOUR INT64_C(3600)

static char below[64];

static int setup(void **state)
{
    (void)state;
    snprintf(below, sizeof(below), "/tmp/kvt-demo-dirs-XXXXXX");
    return mkdtemp(below) == NULL;
}

static int teardown(void **state)
{
    DIR *list = opendir(below);
    char path[400];

    (void)state;
    if (!list)
        return -1;
    for (struct dirent *entry; (entry = readdir(list)) != NULL;) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof(path), "%s/%s", below, entry->d_name);
        if (unlink(path) != 0)
            kvt_demo_dir_remove(path);
    }
    closedir(list);
    return rmdir(below);
}

static void put_file(const char *dir, const char *name)
{
    char path[300];
    int fd;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    fd = open(path, O_CREAT | O_WRONLY, 0600);
    assert_true(fd >= 0);
    close(fd);
}

static void make_old(const char *path)
{
    const struct timespec old[2] = {{.tv_sec = 1000000000}, {.tv_sec = 1000000000}};

    assert_int_equal(utimensat(AT_FDCWD, path, old, AT_SYMLINK_NOFOLLOW), 0);
}

static int is_there(const char *path)
{
    struct stat st;

    return lstat(path, &st) == 0;
}

/* A demo that is killed in the middle: its directory. grandchild: a process of it lives on, and
 * ends when `ends` is closed here. */
static void killed_demo(char *path, size_t room, int grandchild, int *ends)
{
    int named[2], life[2];

    assert_int_equal(pipe(named), 0);
    assert_int_equal(pipe(life), 0);
    pid_t pid = fork();
    if (pid == 0) {
        char mine[200];
        char byte;
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that fails leaves nobody behind */
        close(life[1]);
        if (kvt_demo_dir_make(below, mine, sizeof(mine)) != 0)
            _exit(1);
        put_file(mine, "superblock");
        if (grandchild && fork() == 0) {
            alarm(120);
            close(named[1]);
            (void)!read(life[0], &byte, 1);
            _exit(0);
        }
        if (write(named[1], mine, sizeof(mine)) != (ssize_t)sizeof(mine))
            _exit(1);
        pause();
        _exit(0);
    }
    assert_true(pid > 0);
    close(life[0]);
    close(named[1]);
    char got[200] = "";
    assert_int_equal(read(named[0], got, sizeof(got)), sizeof(got));
    close(named[0]);
    snprintf(path, room, "%s", got);
    make_old(path);
    assert_int_equal(kvt_demo_dirs_clean(below, HOUR), 0); /* it lives */
    assert_true(is_there(path));
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    *ends = life[1];
}

static void those_of_the_dead_go(void **state)
{
    char path[200];
    int ends;

    (void)state;
    killed_demo(path, sizeof(path), 0, &ends);
    close(ends);
    assert_int_equal(kvt_demo_dirs_clean(below, HOUR), 1);
    assert_false(is_there(path));
    assert_int_equal(kvt_demo_dirs_clean(below, HOUR), 0);
}

static void a_child_that_lives_keeps_it(void **state)
{
    char path[200];
    unsigned count = 0;
    int ends;

    (void)state;
    killed_demo(path, sizeof(path), 1, &ends);
    assert_int_equal(kvt_demo_dirs_clean(below, HOUR), 0);
    assert_true(is_there(path));
    close(ends); /* it ends now, as fast as this machine lets it */
    for (int i = 0; i < 6000 && count == 0; i++) {
        count = kvt_demo_dirs_clean(below, HOUR);
        usleep(10000);
    }
    assert_int_equal(count, 1);
}

static void others_stay(void **state)
{
    static const char *const names[] = {"models", "demo-abc", "demo-abcdefg", "Demo-abcdef"};
    char path[200], target[200], link[200];

    (void)state;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        snprintf(path, sizeof(path), "%s/%s", below, names[i]);
        assert_int_equal(mkdir(path, 0700), 0);
        put_file(path, "something");
        make_old(path);
    }
    snprintf(target, sizeof(target), "%s/models", below);
    snprintf(link, sizeof(link), "%s/demo-linked", below);
    assert_int_equal(symlink(target, link), 0);
    make_old(link);
    snprintf(path, sizeof(path), "%s/demo-young1", below);
    assert_int_equal(mkdir(path, 0700), 0);
    put_file(below, "demo-afile1");
    assert_int_equal(kvt_demo_dirs_clean(below, HOUR), 0);
    assert_true(is_there(path) && is_there(link));
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        snprintf(path, sizeof(path), "%s/%s/something", below, names[i]);
        assert_true(is_there(path));
    }
    assert_int_equal(kvt_demo_dirs_clean("/no/such/place", 0), 0);
}

static void its_own_goes_at_the_end(void **state)
{
    char path[200], small[8];

    (void)state;
    assert_int_equal(kvt_demo_dir_make(below, path, sizeof(path)), 0);
    put_file(path, "seg-00000000");
    make_old(path);
    assert_int_equal(kvt_demo_dirs_clean(below, HOUR), 0);
    kvt_demo_dir_remove(path);
    assert_false(is_there(path));
    kvt_demo_dir_remove(path); /* once more: nothing */
    assert_true(kvt_demo_dir_make(below, small, sizeof(small)) < 0);
    assert_true(kvt_demo_dir_make("/no/such/place", path, sizeof(path)) < 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(those_of_the_dead_go, setup, teardown),
        cmocka_unit_test_setup_teardown(a_child_that_lives_keeps_it, setup, teardown),
        cmocka_unit_test_setup_teardown(others_stay, setup, teardown),
        cmocka_unit_test_setup_teardown(its_own_goes_at_the_end, setup, teardown),
    };

    return cmocka_run_group_tests_name("tool_demo_dirs", tests, NULL, NULL);
}
