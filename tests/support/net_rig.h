/* Networks of a test's own: the test's thread goes into a network namespace of its own, and behind
 * a bridge there are others, each with an address, for servers. Their links go down as a pulled
 * cable does, without a word to anybody, and have a rate. Needs root, or user namespaces; iproute2.
 */
#ifndef KVT_TESTS_NET_RIG_H
#define KVT_TESTS_NET_RIG_H

#include <stdbool.h>
#include <sys/types.h>

#define NET_RIG_FAR 3u

struct net_rig {
    unsigned count;
    pid_t pids[NET_RIG_FAR]; /* a process in each */
    char hosts[NET_RIG_FAR][32];
};

/* Once a process, before it has other threads: what the calling thread starts from then on is in
 * there. false: not here, which is said. */
bool net_rig_start(struct net_rig *net, unsigned count);
void net_rig_stop(struct net_rig *net);
void net_rig_link(const struct net_rig *net, unsigned far, bool up);
/* Megabits a second, each way; 0: any. false: this kernel has no such thing (tbf). */
bool net_rig_rate(const struct net_rig *net, unsigned far, unsigned megabits);

#endif
