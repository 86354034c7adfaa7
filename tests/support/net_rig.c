/* See net_rig.h. */
#include "support/net_rig.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "support/rig.h"
#include "support/words.h"

static bool write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool good = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);

    if (fd >= 0)
        close(fd);
    return good;
}

/* Into a namespace of our own; who is not root becomes it in a user namespace. */
static bool leave(void)
{
    char uids[64], gids[64];

    if (geteuid() == 0)
        return unshare(CLONE_NEWNET) == 0;
    snprintf(uids, sizeof(uids), "0 %u 1", geteuid());
    snprintf(gids, sizeof(gids), "0 %u 1", getegid());
    return unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0 &&
           write_file("/proc/self/setgroups", "deny") && write_file("/proc/self/uid_map", uids) &&
           write_file("/proc/self/gid_map", gids);
}

/* The network namespace that a process is in. */
static bool space_of(pid_t pid, char out[64])
{
    char path[64];
    ssize_t len;

    snprintf(path, sizeof(path), "/proc/%d/ns/net", (int)pid);
    len = readlink(path, out, 63);
    out[len > 0 ? len : 0] = '\0';
    return len > 0;
}

/* A process that does nothing but be in another namespace. */
static pid_t hold(void)
{
    char words[] = "setpriv --pdeathsig KILL unshare --net sleep 3600", ours[64], its[64];
    pid_t pid = words_start(words, -1);

    for (int i = 0; pid && i < 1200; i++) {
        if (space_of((pid_t)gettid(), ours) && space_of(pid, its) && strcmp(ours, its) != 0)
            return pid;
        rig_sleep_ms(50);
    }
    return 0;
}

/* The namespace number `far`: address 10.117.0.(far + 2), its link is kvt<far> on our side. */
static bool add(struct net_rig *net, unsigned far)
{
    int pid = (int)hold();

    net->pids[far] = pid;
    snprintf(net->hosts[far], sizeof(net->hosts[far]), "10.117.0.%u", far + 2);
    return pid && words_run("ip link add name kvt%u type veth peer name up0", far) == 0 &&
           words_run("ip link set dev up0 netns %d", pid) == 0 &&
           words_run("ip link set dev kvt%u master kvtbr", far) == 0 &&
           words_run("ip link set dev kvt%u up", far) == 0 &&
           words_run("nsenter --net=/proc/%d/ns/net ip address add %s/24 dev up0", pid,
                     net->hosts[far]) == 0 &&
           words_run("nsenter --net=/proc/%d/ns/net ip link set dev lo up", pid) == 0 &&
           words_run("nsenter --net=/proc/%d/ns/net ip link set dev up0 up", pid) == 0;
}

bool net_rig_start(struct net_rig *net, unsigned count)
{
    bool able;

    memset(net, 0, sizeof(*net));
    assert_true(count <= NET_RIG_FAR);
    able = leave() && words_run("ip link set dev lo up") == 0 &&
           words_run("ip link add name kvtbr type bridge") == 0 &&
           words_run("ip address add 10.117.0.1/24 dev kvtbr") == 0 &&
           words_run("ip link set dev kvtbr up") == 0;
    for (; able && net->count < count; net->count++)
        able = add(net, net->count);
    if (!able) {
        printf("           skipped: no network namespaces here (root or user namespaces, a bridge, "
               "iproute2)\n");
        net->count = count;
        net_rig_stop(net);
    }
    return able;
}

void net_rig_stop(struct net_rig *net)
{
    for (unsigned i = 0; i < net->count; i++) {
        if (!net->pids[i])
            continue;
        (void)kill(net->pids[i], SIGKILL);
        (void)words_end(net->pids[i]);
    }
    memset(net, 0, sizeof(*net));
}

void net_rig_link(const struct net_rig *net, unsigned far, bool up)
{
    assert_true(far < net->count);
    assert_int_equal(words_run("ip link set dev kvt%u %s", far, up ? "up" : "down"), 0);
}

bool net_rig_rate(const struct net_rig *net, unsigned far, unsigned megabits)
{
    int pid = (int)net->pids[far];

    assert_true(far < net->count);
    if (!megabits)
        return words_run("tc qdisc delete dev kvt%u root", far) == 0 &&
               words_run("nsenter --net=/proc/%d/ns/net tc qdisc delete dev up0 root", pid) == 0;
    return words_run("tc qdisc replace dev kvt%u root tbf rate %umbit burst 64kb latency 1s", far,
                     megabits) == 0 &&
           words_run("nsenter --net=/proc/%d/ns/net tc qdisc replace dev up0 root tbf rate %umbit "
                     "burst 64kb latency 1s",
                     pid, megabits) == 0;
}
