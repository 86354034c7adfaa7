/* See words.h. */
#include "support/words.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

#include "support/rig.h"

extern char **environ;

pid_t words_start(char *words, int out)
{
    posix_spawn_file_actions_t actions;
    char *argv[64], *rest = NULL;
    int count = 0;
    pid_t pid = 0;

    for (char *word = strtok_r(words, " ", &rest); word && count < 63;
         word = strtok_r(NULL, " ", &rest))
        argv[count++] = word;
    argv[count] = NULL;
    assert_int_equal(posix_spawn_file_actions_init(&actions), 0);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    if (out < 0) {
        posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
        posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
    } else {
        posix_spawn_file_actions_adddup2(&actions, out, 1);
        posix_spawn_file_actions_adddup2(&actions, out, 2);
    }
    if (posix_spawnp(&pid, argv[0], &actions, NULL, argv, environ) != 0)
        pid = 0;
    posix_spawn_file_actions_destroy(&actions);
    return pid;
}

int words_end(pid_t pid)
{
    int status = 0;

    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int words_run(const char *format, ...)
{
    char words[1024];
    va_list args;
    pid_t pid;

    va_start(args, format);
    (void)vsnprintf(words, sizeof(words), format, args);
    va_end(args);
    pid = words_start(words, -1);
    return pid ? words_end(pid) : -1;
}
