/* kvtier demo --daemon: a kvtierd of its own for the time of the demo, so that the second process
 * finds DRAM warm. The binary is the one beside ours. Threads: one.
 */
#include <errno.h>
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
#include "demo.h"

#define SOCKET_ROOM 108
#define READY_TRIES 500 /* of 20 ms: recovery of a large directory takes its time */

static void exec_daemon(const char *program, const char *socket, const char *dir)
{
    char dram[32], disk[PATH_MAX + 32];
    const unsigned long long pages = (unsigned long long)sysconf(_SC_PHYS_PAGES);
    const unsigned long long half = pages * (unsigned long long)sysconf(_SC_PAGESIZE) / 2;

    (void)prctl(PR_SET_PDEATHSIG, SIGTERM);
    snprintf(dram, sizeof(dram), "%lluMiB", (half < 4ull << 30 ? half : 4ull << 30) >> 20);
    snprintf(disk, sizeof(disk), "%s:16GiB", dir);
    execl(program, "kvtierd", "--socket", socket, "--dram", dram, "--disk", disk, "--log-level",
          "error", (char *)NULL);
    kvt_cli_error("demo", "--daemon: %s cannot be started: %m", program);
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
static int wait_ready(pid_t pid, const char *socket)
{
    char why[512], *text = NULL;

    for (int i = 0; i < READY_TRIES && !kvt_cli_interrupted(); i++) {
        if (kvt_link_ask(socket, "stat", &text, why, sizeof(why)) == 0) {
            free(text);
            return 0;
        }
        if (waitpid(pid, NULL, WNOHANG) == pid)
            return -1;
        nanosleep(&(const struct timespec){0, 20000000}, NULL);
    }
    kvt_cli_error("demo", "--daemon: kvtierd does not answer: %s", why);
    (void)kill(pid, SIGTERM);
    (void)waitpid(pid, NULL, 0);
    return -1;
}

int demo_daemon_start(const char *dir, char *socket, pid_t *pid)
{
    char program[PATH_MAX];
    const char *runtime = getenv("XDG_RUNTIME_DIR"), *tmp = getenv("TMPDIR");
    const char *base = runtime != NULL && runtime[0] ? runtime
                       : tmp != NULL && tmp[0]       ? tmp
                                                     : "/tmp";

    /* Not in the directory: a store's directory holds nothing else, and its path may be long. */
    if (snprintf(socket, SOCKET_ROOM, "%s/kvtier-demo-%d.sock", base, (int)getpid()) >=
            SOCKET_ROOM - 8 ||
        program_path(program, sizeof(program)) != 0) {
        kvt_cli_error("demo", "--daemon: no place for a socket below %s: set TMPDIR", base);
        return -1;
    }
    *pid = fork();
    if (*pid == 0)
        exec_daemon(program, socket, dir);
    if (*pid < 0) {
        kvt_cli_error("demo", "--daemon: cannot start a process: %m");
        return -1;
    }
    return wait_ready(*pid, socket);
}

void demo_daemon_stop(pid_t pid)
{
    (void)kill(pid, SIGTERM);
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        ;
}
