/* Starts a program with its three streams on temporary files: no pipe can fill up and block. */
#include "support/run_tool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static FILE *stream(const char *text)
{
    FILE *f = tmpfile();

    assert_non_null(f);
    if (text)
        assert_int_equal(fwrite(text, 1, strlen(text), f), strlen(text));
    assert_int_equal(fflush(f), 0);
    rewind(f);
    return f;
}

static void take(FILE *f, char *text, size_t size)
{
    rewind(f);
    text[fread(text, 1, size - 1, f)] = '\0';
    fclose(f);
}

void tool_run(struct tool_run *run, const char *program, const char *const argv[],
              const char *input, const char *env)
{
    FILE *in = stream(input), *out = stream(NULL), *err = stream(NULL);
    posix_spawn_file_actions_t actions;
    char **variables = environ;
    size_t count = 0;
    pid_t pid;
    int status;

    if (env) {
        while (environ[count])
            count++;
        variables = calloc(count + 2, sizeof(*variables));
        assert_non_null(variables);
        memcpy(variables + 1, environ, count * sizeof(*variables)); /* the first of equals counts */
        variables[0] = (char *)env;
    }
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fileno(in), STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, fileno(out), STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, fileno(err), STDERR_FILENO);
    assert_int_equal(posix_spawn(&pid, program, &actions, NULL, (char *const *)argv, variables), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    run->code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    posix_spawn_file_actions_destroy(&actions);
    if (env)
        free(variables);
    fclose(in);
    take(out, run->out, sizeof(run->out));
    take(err, run->err, sizeof(run->err));
}
