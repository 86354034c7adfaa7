/* kvtier bench remote, the side that is not ours: a redis-server on loopback, redis-benchmark, and
 * the keys that this one leaves. See bench_remote.h. Threads: the caller's.
 */
#include "bench_remote.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <netdb.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checked.h"
#include "cli.h"

#define BATCH 512            /* keys removed in one go */
#define THEIRS_MAX 100000000 /* commands: no server carries out so many in a millisecond */
#define ANSWER_S 30

extern char **environ;

/* ---- the server ---------------------------------------------------------------------------- */

/* A port that is free at this moment; 0: none. */
static int free_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    socklen_t len = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), port = 0;

    if (fd >= 0 && bind(fd, (const struct sockaddr *)&at, sizeof(at)) == 0 &&
        getsockname(fd, (struct sockaddr *)&at, &len) == 0)
        port = ntohs(at.sin_port);
    if (fd >= 0)
        (void)close(fd);
    return port;
}

pid_t kvt_bench_server_start(struct kvt_bench_remote *plan)
{
    int port = free_port();
    pid_t pid;

    (void)snprintf(plan->at.host, sizeof(plan->at.host), "127.0.0.1");
    (void)snprintf(plan->at.port, sizeof(plan->at.port), "%d", port);
    pid = port > 0 ? fork() : -1;
    if (pid < 0) {
        kvt_cli_error(KVT_BENCH_REMOTE, "cannot start a process: %m");
        return -1;
    }
    if (pid == 0) {
        int null = open("/dev/null", O_RDWR);

        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)dup2(null, 0);
        (void)dup2(null, 1);
        execlp("redis-server", "redis-server", "--port", plan->at.port, "--bind", "127.0.0.1",
               "--save", "", "--appendonly", "no", (char *)NULL);
        kvt_cli_error(KVT_BENCH_REMOTE,
                      "redis-server cannot be started: %m (install it, or give --url)");
        _exit(KVT_EXIT_PROBLEM);
    }
    return pid;
}

void kvt_bench_server_end(pid_t pid)
{
    if (pid <= 0)
        return;
    (void)kill(pid, SIGTERM);
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        ;
}

/* ---- redis-benchmark ----------------------------------------------------------------------- */

/* What it prints; false: it failed (said). */
static bool run_benchmark(const char *const words[], char *out, size_t len)
{
    posix_spawn_file_actions_t actions;
    size_t used = 0;
    ssize_t got = 0;
    int ends[2], status = -1;
    pid_t pid;
    int rc;

    if (pipe2(ends, O_CLOEXEC) != 0)
        return false;
    (void)posix_spawn_file_actions_init(&actions);
    (void)posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    rc = posix_spawnp(&pid, words[0], &actions, NULL, (char *const *)(uintptr_t)words, environ);
    (void)posix_spawn_file_actions_destroy(&actions);
    (void)close(ends[1]);
    while (rc == 0 && used < len - 1 && (got = read(ends[0], out + used, len - 1 - used)) > 0)
        used += (size_t)got;
    out[used] = '\0';
    (void)close(ends[0]);
    if (rc != 0) {
        kvt_cli_error(KVT_BENCH_REMOTE,
                      "redis-benchmark cannot be started: %s (package redis-tools)", strerror(rc));
        return false;
    }
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    if (kvt_cli_interrupted()) /* it was as well, from a terminal; what it printed is a part */
        return false;
    if (status != 0 && WIFSIGNALED(status))
        kvt_cli_error(KVT_BENCH_REMOTE, "redis-benchmark was ended by signal %d", WTERMSIG(status));
    else if (status != 0)
        kvt_cli_error(KVT_BENCH_REMOTE, "redis-benchmark failed with exit code %d%s%.200s",
                      WEXITSTATUS(status), out[0] ? ": " : "", out);
    return status == 0;
}

/* Commands a second; 0: it failed (said). It sends whole pipelines in any case, and where it was
 * told another number it may give up when it has done more, a quarter of a second after its
 * beginning. */
static double run_theirs(const struct kvt_bench_remote *plan, int way, int64_t count)
{
    const int64_t whole = (count + plan->pipeline - 1) / plan->pipeline * plan->pipeline;
    const char *name = way == PUT ? "set" : "get", *mark = way == PUT ? "\"SET\",\"" : "\"GET\",\"";
    char numbers[4][24], text[4096], *at;
    const char *const words[] = {"redis-benchmark",
                                 "-h",
                                 plan->at.host,
                                 "-p",
                                 plan->at.port,
                                 "-t",
                                 name,
                                 "-c",
                                 "1",
                                 "-d",
                                 numbers[0],
                                 "-n",
                                 numbers[1],
                                 "-r",
                                 numbers[2],
                                 "-P",
                                 numbers[3],
                                 "--csv",
                                 NULL};
    double rate;

    (void)snprintf(numbers[0], sizeof(numbers[0]), "%" PRIu64, plan->size);
    (void)snprintf(numbers[1], sizeof(numbers[1]), "%" PRId64, whole);
    (void)snprintf(numbers[2], sizeof(numbers[2]), "%" PRId64, plan->records);
    (void)snprintf(numbers[3], sizeof(numbers[3]), "%" PRId64, plan->pipeline);
    if (!run_benchmark(words, text, sizeof(text)))
        return 0;
    at = strstr(text, mark);
    rate = at ? strtod(at + strlen(mark), NULL) : 0;
    if (rate <= 0)
        kvt_cli_error(KVT_BENCH_REMOTE, "redis-benchmark said something else than a rate: %.200s",
                      text);
    return rate;
}

/* It counts milliseconds: what takes less than one goes infinitely fast, and it is given more to
 * do. */
double kvt_bench_theirs(const struct kvt_bench_remote *plan, int way, int64_t count)
{
    double rate = run_theirs(plan, way, count);

    while (isinf(rate) && count < THEIRS_MAX && !kvt_cli_interrupted()) {
        count *= 10;
        rate = run_theirs(plan, way, count);
    }
    return isinf(rate) ? 0 : rate * (double)plan->size;
}

/* ---- what redis-benchmark leaves ----------------------------------------------------------- */

/* A connection that gives up on a server that is silent; -1: none. */
static int connect_to(const struct kvt_remote_seed *at)
{
    const struct timeval patience = {.tv_sec = ANSWER_S};
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    int fd;

    if (getaddrinfo(at->host, at->port, &hints, &found) != 0)
        return -1;
    fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)) != 0 ||
                    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)) != 0 ||
                    connect(fd, found->ai_addr, found->ai_addrlen) != 0)) {
        (void)close(fd);
        fd = -1;
    }
    freeaddrinfo(found);
    return fd;
}

/* Remove keys first to last - 1, each by a command of its own; every answer must be a number. */
static bool remove_keys(int fd, int64_t first, int64_t last)
{
    char text[BATCH * 32], answers[BATCH * 8];
    size_t len = 0, at = 0;
    int64_t left = last - first;

    for (int64_t i = first; i < last; i++)
        len += (size_t)snprintf(text + len, sizeof(text) - len, "UNLINK key:%012" PRId64 "\r\n", i);
    while (at < len) {
        ssize_t sent = send(fd, text + at, len - at, MSG_NOSIGNAL);

        if (sent <= 0)
            return false;
        at += (size_t)sent;
    }
    while (left > 0) {
        ssize_t got = recv(fd, answers, sizeof(answers), 0);

        if (got <= 0 || memchr(answers, '-', (size_t)got) != NULL)
            return false;
        for (ssize_t i = 0; i < got; i++)
            left -= answers[i] == '\n';
    }
    return true;
}

bool kvt_bench_theirs_remove(const struct kvt_bench_remote *plan)
{
    int fd = connect_to(&plan->at);
    bool good = fd >= 0;

    for (int64_t i = 0; good && i < plan->records; i += BATCH)
        good = remove_keys(fd, i, KVT_MIN(i + BATCH, plan->records));
    if (fd >= 0)
        (void)close(fd);
    return good;
}
