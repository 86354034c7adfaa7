/* Redis servers of a test's own, on loopback or each in a network namespace (net_rig.h): started in
 * a fresh directory, waited for, ended in every way. Single ones or a cluster of three masters with
 * a replica each. KVT_TEST_REDIS_SERVER names the program, redis-server is the default. Every
 * helper asserts what must not fail; without the program and redis-cli there are none:
 * redis_rig_able().
 */
#ifndef KVT_TESTS_REDIS_RIG_H
#define KVT_TESTS_REDIS_RIG_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "support/net_rig.h"

#define REDIS_RIG_NODES 6u

struct redis_rig {
    char dir[128];
    unsigned count;
    int ports[REDIS_RIG_NODES];
    int claims[REDIS_RIG_NODES][2]; /* descriptors: no other test takes these ports */
    pid_t pids[REDIS_RIG_NODES];    /* 0: does not run */
    char options[1024];             /* of each server, besides port and directory */
    bool cluster, tls;
    const struct net_rig *net; /* NULL: on loopback */
    char password[64];         /* that redis_rig_cli() logs in with; "": none */
};

/* Whether the programs are there; says why a test is skipped where they are not. */
bool redis_rig_able(void);
/* options: "--maxmemory 10mb ..." */
void redis_rig_start(struct redis_rig *rig, const char *options);
void redis_rig_cluster(struct redis_rig *rig, const char *options);
/* One in each namespace of `net`: a single one, or masters of a cluster without replicas. */
void redis_rig_far(struct redis_rig *rig, const struct net_rig *net, const char *options);
/* A single one that speaks TLS only, with a certificate for 127.0.0.1 that is its own authority:
 * dir/cert.pem. false: there is no openssl to make one. */
bool redis_rig_tls(struct redis_rig *rig, const char *options);
void redis_rig_stop(struct redis_rig *rig);

void redis_rig_kill(struct redis_rig *rig, unsigned node); /* SIGKILL, and wait */
void redis_rig_run(struct redis_rig *rig, unsigned node);  /* start it again */
void redis_rig_freeze(struct redis_rig *rig, unsigned node, bool on);

/* Run redis-cli on a node with these words; what it prints, without the last newline. Returns its
 * exit code. */
int redis_rig_cli(const struct redis_rig *rig, unsigned node, const char *words, char *out,
                  size_t len);
/* The same for a number; -1: it printed none. */
long redis_rig_number(const struct redis_rig *rig, unsigned node, const char *words);
/* Wait until `words` prints something that has `want` in it; fails the test after a minute. */
void redis_rig_wait(const struct redis_rig *rig, unsigned node, const char *words,
                    const char *want);
/* "redis://127.0.0.1:p+..." of all nodes. */
void redis_rig_url(const struct redis_rig *rig, char *out, size_t len);

#endif
