/* A kvtierd's server: the socket, who may connect, and the life of each client.
 *
 * One thread runs it (kvt_server_run()). It hands each client its rings and the arena, and takes
 * everything back when the client says BYE or its process has gone. What goes through the rings is
 * the owner thread's.
 * Lifetime: the host outlives it. Threads: _run() on one; _stop() and _allow() from any.
 */
#ifndef KVT_DAEMON_SERVER_H
#define KVT_DAEMON_SERVER_H

#include <sys/types.h>

#include "client/host.h"

#define KVT_SERVER_UIDS_MAX 32u

struct kvt_server;

struct kvt_asker { /* a CONTROL client with a question */
    uint64_t ticket;
    pid_t pid;
    uid_t uid;
};

#define KVT_ANSWER_LATER 1

struct kvt_server_params {
    struct kvt_host *host; /* open */
    struct kvt_log log;
    const char *path; /* of the socket */
    int listen_fd;    /* one that listens already (systemd); -1: make one at path */
    mode_t mode;      /* of the socket */
    /* Answers a CONTROL client's question: text in *out (malloc'd). 0; KVT_ANSWER_LATER: _later()
     * will have it; or a negative error. On the server's thread. */
    int (*answer)(void *ctx, const struct kvt_asker *asker, const char *question, char **out);
    /* The text of an answer that was put off, and whose it is (who may have gone): 0, or -EAGAIN:
     * there is none yet. Asked again and again while somebody waits. */
    int (*later)(void *ctx, uint64_t *ticket, char **out);
    void *answer_ctx; /* of both */
};

/* Make the socket (a stale one at the path is replaced, a live one refused) and listen. 0, or an
 * error with a sentence. */
__attribute__((warn_unused_result)) int kvt_server_new(const struct kvt_server_params *params,
                                                       struct kvt_server **out, char *error,
                                                       size_t error_len);
/* Serve until kvt_server_stop(). Clients that are left then are told and let go. */
void kvt_server_run(struct kvt_server *server);
void kvt_server_stop(struct kvt_server *server); /* also from a signal handler */
/* Closes and removes the socket. */
void kvt_server_free(struct kvt_server *server);

/* Who may connect besides our own user and root: count user ids. Any thread. */
void kvt_server_allow(struct kvt_server *server, const uid_t *uids, size_t count);

struct kvt_server_client { /* for people */
    uint32_t number;
    pid_t pid;
    uid_t uid;
    int leaving; /* its connection has ended, its process has not */
    char name[48];
};
/* The clients now, at most max; returns how many there are. On the server's thread. */
size_t kvt_server_clients(const struct kvt_server *server, struct kvt_server_client *out,
                          size_t max);

struct kvt_server_stats {
    uint64_t accepted, refused_peer, refused_version, refused_full, bad_hello;
    uint64_t left;   /* said BYE */
    uint64_t died;   /* did not */
    uint64_t broken; /* broke the protocol of the rings */
};
void kvt_server_stats(const struct kvt_server *server, struct kvt_server_stats *out);

#endif
