/* See redis_rig.h. */
#include "support/redis_rig.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "support/rig.h"

#define PATIENCE_S 60

extern char **environ;

/* Start a program with these words (split at blanks), its output into `out` (-1: nowhere). Returns
 * its pid; 0: it is not there. */
static pid_t spawn(char *words, int out)
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

static int end_of(pid_t pid)
{
    int status = 0;

    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool redis_rig_able(void)
{
    char server[] = "redis-server --version", cli[] = "redis-cli --version";
    pid_t pid = spawn(server, -1);
    bool able = pid && end_of(pid) == 0;

    pid = able ? spawn(cli, -1) : 0;
    able = pid && end_of(pid) == 0;
    if (!able)
        printf("           skipped: no redis-server here (scripts/setup.sh test installs it)\n");
    return able;
}

static bool may_bind(int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)port),
                             .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    bool free_now = fd >= 0 && bind(fd, (struct sockaddr *)&at, sizeof(at)) == 0;

    if (fd >= 0)
        close(fd);
    return free_now;
}

/* A port that is free, and the one of the cluster's bus, 10,000 above it, too. Each process looks
 * at another place, below what the kernel gives to clients: tests run side by side, and between
 * this and the server's own bind() nobody else is to take it. */
static int free_port(void)
{
    static int next;

    for (int tries = 0; tries < 1000; tries++) {
        int port = 10000 + ((int)getpid() * 16 + next++) % 12000;

        if (may_bind(port) && may_bind(port + 10000))
            return port;
    }
    fail_msg("no free ports");
    return 0;
}

int redis_rig_cli(const struct redis_rig *rig, unsigned node, const char *words, char *out,
                  size_t len)
{
    char command[1024], auth[192] = "";
    size_t used = 0;
    ssize_t got = 0;
    int ends[2];
    pid_t pid;

    if (rig->password[0])
        snprintf(auth, sizeof(auth), "--no-auth-warning -a %s", rig->password);
    if (rig->tls)
        snprintf(auth, sizeof(auth), "--tls --cacert %s/cert.pem", rig->dir);
    snprintf(command, sizeof(command), "timeout 60 redis-cli %s -p %d %s", auth, rig->ports[node],
             words);
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    pid = spawn(command, ends[1]);
    assert_true(pid > 0);
    close(ends[1]);
    while (used < len - 1 && (got = read(ends[0], out + used, len - 1 - used)) > 0)
        used += (size_t)got;
    close(ends[0]);
    out[used] = '\0';
    while (used && out[used - 1] == '\n')
        out[--used] = '\0';
    return end_of(pid);
}

long redis_rig_number(const struct redis_rig *rig, unsigned node, const char *words)
{
    char text[4096], *end;
    long number;

    if (redis_rig_cli(rig, node, words, text, sizeof(text)) != 0)
        return -1;
    number = strtol(text, &end, 10);
    return end == text ? -1 : number;
}

void redis_rig_wait(const struct redis_rig *rig, unsigned node, const char *words, const char *want)
{
    char text[8192] = "";

    for (int i = 0; i < PATIENCE_S * 20; i++) {
        if (redis_rig_cli(rig, node, words, text, sizeof(text)) == 0 && strstr(text, want))
            return;
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    }
    fail_msg("node %u: \"%s\" never said \"%s\": %s", node, words, want, text);
}

void redis_rig_run(struct redis_rig *rig, unsigned node)
{
    char command[2048];

    snprintf(command, sizeof(command),
             "setpriv --pdeathsig KILL redis-server --%s %d --bind 127.0.0.1 --dir %s "
             "--appendonly no --daemonize no "
             "--protected-mode no --logfile %s/log.%u --dbfilename dump.%u.rdb --save %s %s",
             rig->tls ? "tls-port" : "port", rig->ports[node], rig->dir, rig->dir, node, node,
             "3600 1000000", rig->options);
    if (rig->cluster)
        snprintf(command + strlen(command), sizeof(command) - strlen(command),
                 " --cluster-enabled yes --cluster-node-timeout 60000 --cluster-config-file "
                 "nodes.%u.conf",
                 node);
    rig->pids[node] = spawn(command, -1);
    assert_true(rig->pids[node] > 0);
    redis_rig_wait(rig, node, "PING", "O"); /* PONG, or NOAUTH */
}

static void start(struct redis_rig *rig, unsigned count, const char *options)
{
    memset(rig, 0, sizeof(*rig));
    rig->count = count;
    rig->cluster = count > 1;
    snprintf(rig->options, sizeof(rig->options), "%s", options);
    rig_dir_make(rig->dir, sizeof(rig->dir));
    for (unsigned i = 0; i < count; i++) {
        rig->ports[i] = free_port();
        redis_rig_run(rig, i);
    }
}

void redis_rig_start(struct redis_rig *rig, const char *options)
{
    start(rig, 1, options);
}

bool redis_rig_tls(struct redis_rig *rig, const char *options)
{
    char words[1024];
    pid_t pid;

    memset(rig, 0, sizeof(*rig));
    rig->count = 1;
    rig->tls = true;
    rig_dir_make(rig->dir, sizeof(rig->dir));
    snprintf(words, sizeof(words),
             "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=kvtier -addext "
             "subjectAltName=IP:127.0.0.1 -keyout %s/key.pem -out %s/cert.pem",
             rig->dir, rig->dir);
    pid = spawn(words, -1);
    if (!pid || end_of(pid) != 0)
        return false;
    snprintf(rig->options, sizeof(rig->options),
             "--port 0 --tls-cert-file %s/cert.pem --tls-key-file %s/key.pem "
             "--tls-ca-cert-file %s/cert.pem --tls-auth-clients no %s",
             rig->dir, rig->dir, rig->dir, options);
    rig->ports[0] = free_port();
    redis_rig_run(rig, 0);
    return true;
}

void redis_rig_cluster(struct redis_rig *rig, const char *options)
{
    char words[512] = "--cluster create", out[8192];

    start(rig, REDIS_RIG_NODES, options);
    for (unsigned i = 0; i < rig->count; i++)
        snprintf(words + strlen(words), sizeof(words) - strlen(words), " 127.0.0.1:%d",
                 rig->ports[i]);
    snprintf(words + strlen(words), sizeof(words) - strlen(words),
             " --cluster-replicas 1 --cluster-yes");
    if (redis_rig_cli(rig, 0, words, out, sizeof(out)) != 0)
        fail_msg("no cluster: %s", out);
    for (unsigned i = 0; i < rig->count; i++)
        redis_rig_wait(rig, i, "CLUSTER INFO", "cluster_state:ok");
}

void redis_rig_kill(struct redis_rig *rig, unsigned node)
{
    if (!rig->pids[node])
        return;
    (void)kill(rig->pids[node], SIGKILL);
    (void)waitpid(rig->pids[node], NULL, 0);
    rig->pids[node] = 0;
}

void redis_rig_freeze(struct redis_rig *rig, unsigned node, bool on)
{
    assert_int_equal(kill(rig->pids[node], on ? SIGSTOP : SIGCONT), 0);
}

void redis_rig_stop(struct redis_rig *rig)
{
    for (unsigned i = 0; i < rig->count; i++)
        redis_rig_kill(rig, i);
    if (rig->dir[0])
        rig_dir_remove(rig->dir);
    memset(rig, 0, sizeof(*rig));
}

void redis_rig_url(const struct redis_rig *rig, char *out, size_t len)
{
    snprintf(out, len, "%s", rig->tls ? "rediss://" : "redis://");
    for (unsigned i = 0; i < rig->count; i++)
        snprintf(out + strlen(out), len - strlen(out), "%s127.0.0.1:%d", i ? "+" : "",
                 rig->ports[i]);
}
