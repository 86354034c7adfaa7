/* The connection to a kvtierd: socket, mapped arena, rings. Mechanics only; what a lost connection
 * means for requests is remote.c's.
 *
 * Threads: one at a time (kvt_open(), then the reply thread, then kvt_close()).
 */
#ifndef KVT_CLIENT_LINK_H
#define KVT_CLIENT_LINK_H

#include "base/fork.h"
#include "client/host.h"

struct kvt_link {
    const char *path; /* of the socket; the settings' */
    int sock;         /* -1: not connected, or in a forked child, whose life is not ours */
    struct kvt_fork_fd alone;
    struct kvt_wire wire;
    struct kvt_arena_map rings, memory; /* what is mapped; their fd is closed */
    uint32_t client;                    /* the daemon's number for us */
    int64_t clock_shift_ns; /* what the daemon's clock is ahead of ours; 0: it is the same one */
};

void kvt_link_init(struct kvt_link *link, const char *path);

/* Connect, agree on versions, map. Blocks for 2 s at most where the daemon does not answer. 0, or
 * why not, with a sentence in text: -ENOENT, -ECONNREFUSED (no daemon), KVT_E_VERSION, -EACCES,
 * KVT_E_LIMIT, KVT_E_CORRUPT, ... Nothing is left behind then. */
__attribute__((warn_unused_result)) int kvt_link_dial(struct kvt_link *link, char *text,
                                                      size_t len);

/* How far a clock that said `theirs` between two readings of ours is ahead of it: 0 for the same
 * clock, exactly; else (another time namespace) to half of what lay between. theirs 0: not said;
 * 0 as well for what no clock says. */
int64_t kvt_link_shift(int64_t sent_ns, int64_t theirs_ns, int64_t received_ns);

/* Ask a kvtierd something as a control client ("stat"): the whole answer, malloc'd. 0, or an error
 * with a sentence in why. Blocks for some seconds at most. */
__attribute__((warn_unused_result)) int kvt_link_ask(const char *path, const char *question,
                                                     char **out, char *why, size_t len);

struct kvt_link_purged {     /* what a purge took */
    uint64_t blocks, bytes;  /* of the daemon's DRAM and disks */
    uint64_t remote_records; /* of the tier that machines share */
    uint32_t groups;         /* of the namespace that the daemon knew; 0: none */
};

/* Remove a namespace, by its id, from a running kvtierd and the tier that it shares, for good: for
 * root and the user that it runs as. Blocks for as long as that takes (minutes, where a shared tier
 * holds much of it). 0, or an error with a sentence in why; *out says what went in
 * either case. KVT_E_UNSUPPORTED: the kvtierd is of a version that knows no such question. */
__attribute__((warn_unused_result)) int kvt_link_purge(const char *path,
                                                       const uint8_t id[KVT_NS_BYTES],
                                                       struct kvt_link_purged *out, char *why,
                                                       size_t len);

/* Nothing of ours will touch the arena any more: say so, close, unmap. Idempotent. */
void kvt_link_hang_up(struct kvt_link *link);

#endif
