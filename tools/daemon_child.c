/* A kvtierd of a command's own: see daemon_child.h. Threads: one. */
#include "daemon_child.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cli.h"
#include "client/link.h"

#define READY_TRIES 500 /* of 20 ms: recovery of a large directory takes its time */
#define WORDS_MAX 24

static void exec_daemon(const char *command, const char *program, const char *socket,
                        const char *const words[])
{
    const char *all[WORDS_MAX + 6] = {"kvtierd", "--socket", socket, "--log-level", "error"};
    size_t count = 5;

    for (size_t i = 0; i < WORDS_MAX && words[i] != NULL; i++)
        all[count++] = words[i];
    (void)prctl(PR_SET_PDEATHSIG, SIGTERM);
    execv(program, (char **)(uintptr_t)all);
    kvt_cli_error(command, "%s cannot be started: %m", program);
    _exit(KVT_EXIT_PROBLEM);
}

/* Beside our own binary. */
static int program_path(char *path, size_t len)
{
    const ssize_t n = readlink("/proc/self/exe", path, len - sizeof("/kvtierd"));
    char *slash;

    if (n <= 0)
        return -1;
    path[n] = '\0';
    slash = strrchr(path, '/');
    if (slash == NULL)
        return -1;
    memcpy(slash, "/kvtierd", sizeof("/kvtierd"));
    return 0;
}

/* Until it answers. -1: it has ended (and said why), or says nothing. */
static int wait_ready(const char *command, pid_t pid, const char *socket)
{
    char why[512] = "", *text = NULL;

    for (int i = 0; i < READY_TRIES && !kvt_cli_interrupted(); i++) {
        if (kvt_link_ask(socket, "stat", &text, why, sizeof(why)) == 0) {
            free(text);
            return 0;
        }
        if (waitpid(pid, NULL, WNOHANG) == pid)
            return -1;
        nanosleep(&(const struct timespec){0, 20000000}, NULL);
    }
    if (!kvt_cli_interrupted())
        kvt_cli_error(command, "kvtierd does not answer: %s", why);
    kvt_daemon_child_end(pid);
    return -1;
}

int kvt_daemon_child(const char *command, const char *const words[], char *socket, pid_t *pid)
{
    char program[PATH_MAX];
    const char *runtime = getenv("XDG_RUNTIME_DIR"), *tmp = getenv("TMPDIR");
    const char *base = runtime != NULL && runtime[0] ? runtime
                       : tmp != NULL && tmp[0]       ? tmp
                                                     : "/tmp";

    if (snprintf(socket, KVT_DAEMON_SOCKET_ROOM, "%s/kvtier-%d.sock", base, (int)getpid()) >=
            KVT_DAEMON_SOCKET_ROOM - 8 ||
        program_path(program, sizeof(program)) != 0) {
        kvt_cli_error(command, "no place for a socket below %s: set TMPDIR", base);
        return -1;
    }
    if (kvt_cli_interrupted())
        return -1;
    sigset_t all, before; /* a signal to end before the program runs must not meet our handlers */
    sigfillset(&all);
    (void)sigprocmask(SIG_BLOCK, &all, &before);
    *pid = fork();
    if (*pid == 0) {
        (void)signal(SIGTERM, SIG_DFL);
        (void)signal(SIGINT, SIG_DFL);
        (void)sigprocmask(SIG_SETMASK, &before, NULL);
        exec_daemon(command, program, socket, words);
    }
    (void)sigprocmask(SIG_SETMASK, &before, NULL);
    if (*pid < 0) {
        kvt_cli_error(command, "cannot start a process: %m");
        return -1;
    }
    return wait_ready(command, *pid, socket);
}

void kvt_daemon_child_end(pid_t pid)
{
    (void)kill(pid, SIGTERM);
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        ;
}
