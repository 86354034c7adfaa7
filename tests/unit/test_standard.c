/* Standard descriptors that were closed are nobody's.
 *
 * Goal:   after the call nothing that is opened gets 0, 1 or 2; those that were open stay what they
 *         were, and those that were closed are still refused to readers and writers.
 * Method: a child for each set of closed descriptors; and the command, which opens a store's files.
 */
#include "support/rig.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/standard.h"
#include "support/run_tool.h"

/* In a child; an exit code: 0 all is well. */
static int try_without(int closed)
{
    struct stat before[3], after;
    char byte = 'x';

    for (int fd = 0; fd < 3; fd++)
        if (fstat(fd, &before[fd]) != 0)
            return 10 + fd;
    for (int fd = 0; fd < 3; fd++)
        if (closed & 1 << fd)
            close(fd);
    if (!kvt_standard_hold())
        return 1;
    int fresh = open("/dev/zero", O_RDONLY);
    if (fresh < 3)
        return 2;
    for (int fd = 0; fd < 3; fd++) {
        if (fstat(fd, &after) != 0)
            return 20 + fd;
        if (!(closed & 1 << fd)) {
            if (after.st_ino != before[fd].st_ino || after.st_dev != before[fd].st_dev)
                return 30 + fd;
            continue;
        }
        errno = 0;
        if ((fd == 0 ? read(fd, &byte, 1) : write(fd, &byte, 1)) >= 0 || errno != EBADF)
            return 40 + fd;
    }
    return kvt_standard_hold() ? 0 : 3; /* twice is once */
}

static void closed_descriptors_are_taken_and_of_no_use(void **state)
{
    (void)state;
    for (int closed = 0; closed < 8; closed++) {
        int status;
        pid_t pid = fork();

        assert_true(pid >= 0);
        if (pid == 0)
            _exit(try_without(closed));
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            fail_msg("closed %d: status %d", closed, status);
    }
}

/* What the command says never goes into a file that it opens; that nobody hears it is an error. */
static void the_command_writes_into_no_file_of_a_store(void **state)
{
    static struct tool_run run;
    char dir[128], config[200];
    struct rig_shape shape = rig_shape_small(8);
    struct rig rig;

    (void)state;
    rig_dir_make(dir, sizeof(dir));
    snprintf(config, sizeof(config), "dram=16MiB,disk=%s:64MiB", dir);
    rig_init(&rig, &shape, config, NULL);
    rig_open(&rig);
    assert_int_equal(rig_store(&rig, 1, 8, 0, NULL), 8);
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig_close(&rig);
    tool_run(&run, "/bin/sh",
             (const char *const[]){"sh", "-c",
                                   "before=$(cat \"$2\"/* 2>/dev/null | md5sum); "
                                   "\"$1\" fsck \"$2\" <&- >&- 2>&-; code=$?; "
                                   "\"$1\" purge \"$2\" --namespace 00 --yes <&- >&- 2>&-; "
                                   "\"$1\" inspect \"$2\" nothing <&- >&- 2>&-; "
                                   "[ \"$before\" = \"$(cat \"$2\"/* 2>/dev/null | md5sum)\" ] "
                                   "&& echo same; exit $code",
                                   "sh", KVT_TOOL, dir, NULL},
             NULL, NULL);
    assert_string_equal(run.out, "same\n");
    assert_int_equal(run.code, 1); /* nobody could read what it found */
    rig_open(&rig);
    assert_int_equal(rig_load(&rig, 1, 8, NULL), 8);
    rig_close(&rig);
    rig_free(&rig);
    rig_dir_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(closed_descriptors_are_taken_and_of_no_use),
        cmocka_unit_test(the_command_writes_into_no_file_of_a_store),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
