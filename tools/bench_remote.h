/* What the two files of kvtier bench remote share: cmd_bench_remote.c (our side, rounds, figures)
 * and bench_remote_server.c (a redis-server, redis-benchmark). Threads: one.
 */
#ifndef KVT_TOOLS_BENCH_REMOTE_H
#define KVT_TOOLS_BENCH_REMOTE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "remote/remote_url.h"

#define KVT_BENCH_REMOTE "bench remote"

enum { PUT, GET, WAYS };

struct kvt_bench_remote { /* what is measured, and where */
    const char *url;
    uint64_t size;
    int64_t records, pipeline, rounds;
    struct kvt_remote_seed at;
};

/* A redis-server on a free port of loopback, whose address is noted. Its process; -1 (said). */
pid_t kvt_bench_server_start(struct kvt_bench_remote *plan);
void kvt_bench_server_end(pid_t pid);
/* Bytes a second of `count` commands of redis-benchmark, or of more where those take no time that
 * it can count; 0: it failed (said). */
double kvt_bench_theirs(const struct kvt_bench_remote *plan, int way, int64_t count);
/* Remove the keys that it has written. */
bool kvt_bench_theirs_remove(const struct kvt_bench_remote *plan);

#endif
