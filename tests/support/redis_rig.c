/* See redis_rig.h. */
#include "support/redis_rig.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "remote/resp.h"
#include "support/rig.h"
#include "support/words.h"

#define PATIENCE_S 60

/* The server to test with: another one that speaks like Redis, or another version. */
static const char *server_program(void)
{
    const char *program = getenv("KVT_TEST_REDIS_SERVER");

    return program && program[0] ? program : "redis-server";
}

bool redis_rig_able(void)
{
    bool able =
        words_run("%s --version", server_program()) == 0 && words_run("redis-cli --version") == 0;

    if (!able)
        printf("           skipped: no %s here (scripts/setup.sh test installs redis-server)\n",
               server_program());
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

/* A name of the kernel's that one process at a time can have. Tests run side by side, and until the
 * server has bound its port another one would find it free, and then talk with this one's server. A
 * descriptor; -1: somebody has it. */
static int claim(int port)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int len = snprintf(at.sun_path + 1, sizeof(at.sun_path) - 1, "kvtier-test-port-%d", port);

    assert_true(fd >= 0);
    if (bind(fd, (struct sockaddr *)&at,
             (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)len)) == 0)
        return fd;
    close(fd);
    return -1;
}

static void unclaim(struct redis_rig *rig, unsigned node)
{
    for (int i = 0; i < 2; i++)
        if (rig->claims[node][i] > 0)
            close(rig->claims[node][i]);
    memset(rig->claims[node], 0, sizeof(rig->claims[node]));
}

/* A port that is free, and the one of the cluster's bus, 10,000 above it, too; both are the node's
 * until it is stopped. Below what the kernel gives to clients; each process begins elsewhere. */
static void take_port(struct redis_rig *rig, unsigned node)
{
    static int next;

    for (int tries = 0; tries < 12000; tries++) {
        int port = 10000 + (int)((getpid() * 16L + next++) % 12000);

        rig->claims[node][0] = claim(port);
        rig->claims[node][1] = claim(port + 10000);
        if (rig->claims[node][0] > 0 && rig->claims[node][1] > 0 && may_bind(port) &&
            may_bind(port + 10000)) {
            rig->ports[node] = port;
            return;
        }
        unclaim(rig, node);
    }
    fail_msg("no free ports");
}

static const char *host_of(const struct redis_rig *rig, unsigned node)
{
    return rig->net ? rig->net->hosts[node] : "127.0.0.1";
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
    snprintf(command, sizeof(command), "timeout 60 redis-cli %s -h %s -p %d %s", auth,
             host_of(rig, node), rig->ports[node], words);
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    pid = words_start(command, ends[1]);
    assert_true(pid > 0);
    close(ends[1]);
    while (used < len - 1 && (got = read(ends[0], out + used, len - 1 - used)) > 0)
        used += (size_t)got;
    close(ends[0]);
    out[used] = '\0';
    while (used && out[used - 1] == '\n')
        out[--used] = '\0';
    return words_end(pid);
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
    char command[2048], space[64] = "";

    if (rig->net)
        snprintf(space, sizeof(space), "nsenter --net=/proc/%d/ns/net", (int)rig->net->pids[node]);
    snprintf(command, sizeof(command),
             "%s setpriv --pdeathsig KILL %s --%s %d --bind %s --dir %s "
             "--appendonly no --daemonize no "
             "--protected-mode no --logfile %s/log.%u --dbfilename dump.%u.rdb --save %s %s",
             space, server_program(), rig->tls ? "tls-port" : "port", rig->ports[node],
             host_of(rig, node), rig->dir, rig->dir, node, node, "3600 1000000", rig->options);
    if (rig->cluster)
        snprintf(command + strlen(command), sizeof(command) - strlen(command),
                 " --cluster-enabled yes --cluster-node-timeout 60000 --cluster-config-file "
                 "nodes.%u.conf",
                 node);
    rig->pids[node] = words_start(command, -1);
    assert_true(rig->pids[node] > 0);
    redis_rig_wait(rig, node, "PING", "O"); /* PONG, or NOAUTH */
}

static void start(struct redis_rig *rig, unsigned count, const char *options,
                  const struct net_rig *net)
{
    memset(rig, 0, sizeof(*rig));
    rig->net = net;
    rig->count = count;
    rig->cluster = count > 1;
    snprintf(rig->options, sizeof(rig->options), "%s", options);
    rig_dir_make(rig->dir, sizeof(rig->dir));
    for (unsigned i = 0; i < count; i++) {
        take_port(rig, i);
        redis_rig_run(rig, i);
    }
}

void redis_rig_start(struct redis_rig *rig, const char *options)
{
    start(rig, 1, options, NULL);
}

bool redis_rig_tls(struct redis_rig *rig, const char *options)
{
    char words[1024];

    memset(rig, 0, sizeof(*rig));
    rig->count = 1;
    rig->tls = true;
    rig_dir_make(rig->dir, sizeof(rig->dir));
    snprintf(words, sizeof(words),
             "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=kvtier -addext "
             "subjectAltName=IP:127.0.0.1 -keyout %s/key.pem -out %s/cert.pem",
             rig->dir, rig->dir);
    if (words_run("%s", words) != 0)
        return false;
    snprintf(rig->options, sizeof(rig->options),
             "--port 0 --tls-cert-file %s/cert.pem --tls-key-file %s/key.pem "
             "--tls-ca-cert-file %s/cert.pem --tls-auth-clients no %s",
             rig->dir, rig->dir, rig->dir, options);
    take_port(rig, 0);
    redis_rig_run(rig, 0);
    return true;
}

static void make_cluster(struct redis_rig *rig)
{
    char words[512] = "--cluster create", out[8192];

    for (unsigned i = 0; i < rig->count; i++)
        snprintf(words + strlen(words), sizeof(words) - strlen(words), " %s:%d", host_of(rig, i),
                 rig->ports[i]);
    snprintf(words + strlen(words), sizeof(words) - strlen(words),
             " --cluster-replicas 1 --cluster-yes");
    if (redis_rig_cli(rig, 0, words, out, sizeof(out)) != 0)
        fail_msg("no cluster: %s", out);
    for (unsigned i = 0; i < rig->count; i++)
        redis_rig_wait(rig, i, "CLUSTER INFO", "cluster_state:ok");
}

void redis_rig_cluster(struct redis_rig *rig, const char *options)
{
    start(rig, REDIS_RIG_NODES, options, NULL);
    make_cluster(rig);
}

/* Masters alone: without the seconds that redis-cli waits between its looks. The same slots. */
static void make_masters(struct redis_rig *rig)
{
    char words[128], out[512];

    for (unsigned i = 0; i < rig->count; i++) {
        unsigned first = (KVT_RESP_SLOTS * i + rig->count / 2) / rig->count;
        unsigned end = (KVT_RESP_SLOTS * (i + 1) + rig->count / 2) / rig->count;

        snprintf(words, sizeof(words), "CLUSTER SET-CONFIG-EPOCH %u", i + 1);
        (void)redis_rig_cli(rig, i, words, out, sizeof(out));
        assert_string_equal(out, "OK");
        snprintf(words, sizeof(words), "CLUSTER ADDSLOTSRANGE %u %u", first, end - 1);
        (void)redis_rig_cli(rig, i, words, out, sizeof(out));
        assert_string_equal(out, "OK");
        snprintf(words, sizeof(words), "CLUSTER MEET %s %d", host_of(rig, i), rig->ports[i]);
        (void)redis_rig_cli(rig, 0, words, out, sizeof(out));
        assert_string_equal(out, "OK");
    }
    for (unsigned i = 0; i < rig->count; i++) {
        redis_rig_wait(rig, i, "CLUSTER INFO", "cluster_slots_assigned:16384");
        redis_rig_wait(rig, i, "CLUSTER INFO", "cluster_state:ok");
    }
}

void redis_rig_far(struct redis_rig *rig, const struct net_rig *net, const char *options)
{
    start(rig, net->count, options, net);
    if (rig->cluster)
        make_masters(rig);
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
    for (unsigned i = 0; i < rig->count; i++) {
        redis_rig_kill(rig, i);
        unclaim(rig, i);
    }
    if (rig->dir[0])
        rig_dir_remove(rig->dir);
    memset(rig, 0, sizeof(*rig));
}

void redis_rig_url(const struct redis_rig *rig, char *out, size_t len)
{
    snprintf(out, len, "%s", rig->tls ? "rediss://" : "redis://");
    for (unsigned i = 0; i < rig->count; i++)
        snprintf(out + strlen(out), len - strlen(out), "%s%s:%d", i ? "+" : "", host_of(rig, i),
                 rig->ports[i]);
}
