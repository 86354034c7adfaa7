/* The server's own structures, shared by server.c and peer.c and by nobody else.
 *
 *               HELLO control          answered
 *   GREETING ------------------> CONTROL -------> FREE
 *      |  HELLO engine
 *      v                 BYE
 *   ENGINE --------------------------------------> FREE
 *      |  \  broke the protocol     BYE, or the     ^
 *      |   `-----------> BROKEN --- process ended --'
 *      |                             ^
 *      `-- the socket ended ---------'   (its slots being filled wait for the process)
 *   GREETING -> FREE: refused, or silent for HELLO_NS
 */
#ifndef KVT_DAEMON_SERVER_IMPL_H
#define KVT_DAEMON_SERVER_IMPL_H

#include <pthread.h>
#include <stdatomic.h>

#include "daemon/listen.h"
#include "daemon/server.h"
#include "format/handshake.h"

#define KVT_PEERS_MAX 256u /* more than the owner has places: some greet, or wait for their end */
/* Connections of one process that ended without BYE while it lives on. Each may hold what it was
 * filling: an eighth of DRAM, 256 MiB at most (kvt_store_params.client_fill_max). */
#define KVT_PARTED_MAX 2u
#define KVT_PARTED_HIDDEN_MAX 8u /* the same where processes cannot be told apart */
#define KVT_HELLO_NS INT64_C(2000000000)
/* A process whose end the kernel does not tell us: its threads are taken to be gone by then. */
#define KVT_DYING_NS INT64_C(1500000000)

/* Answers that are put off: looked for so often, waited for so long. */
#define KVT_LATER_NS INT64_C(20000000)
#define KVT_LATER_MAX_NS INT64_C(900000000000)

enum kvt_peer_state {
    KVT_PEER_FREE = 0,
    KVT_PEER_GREETING,
    KVT_PEER_CONTROL,
    KVT_PEER_ENGINE,
    KVT_PEER_BROKEN
};

struct kvt_peer {
    int state;   /* enum kvt_peer_state */
    int sock;    /* -1: it has ended */
    int pidfd;   /* readable when the process has ended; -1: not to be had */
    bool denied; /* this user may not connect */
    bool spare;  /* its socket has a descriptor that was kept: there are none for an engine */
    pid_t pid;   /* 0: in another pid namespace */
    uid_t uid;
    int64_t until_ns; /* GREETING, CONTROL, BROKEN without pidfd: not longer than that; BROKEN
                         with it: looked at then */
    bool lives_on;    /* BROKEN: it was said that it does */
    uint32_t number;  /* ENGINE: the owner's; BROKEN: of what is to be reclaimed */
    struct kvt_wire wire;
    struct kvt_arena_map rings;
    char name[48];
    uint64_t ticket; /* CONTROL: its answer was put off; 0: not */
    char *answer;    /* CONTROL: what is being sent; NULL: nothing */
    size_t answer_at;
};

/* Descriptors that are kept: out of others, so many clients at a time are still answered. */
#define KVT_SPARE_FDS 4u
#define KVT_DEAF_NS INT64_C(100000000) /* nobody can be accepted: looked at again after that */

#define KVT_REFUSALS 16u
/* Who is refused comes again each second: it is said once in this time. */
#define KVT_REFUSAL_NS INT64_C(60000000000)

struct kvt_refusal {
    pid_t pid;
    uid_t uid;
    int status; /* 0: none */
    int64_t at_ns;
};

struct kvt_server {
    struct kvt_server_params params;
    struct kvt_listen listener;
    int listen_fd;
    int wake_fd;   /* stop */
    int broken_fd; /* a client broke the protocol */
    _Atomic int stopping;
    _Atomic int allowed_others; /* who is connected is to be looked at again */
    pthread_mutex_t lock;       /* uids */
    uid_t uids[KVT_SERVER_UIDS_MAX];
    size_t uid_count;
    struct kvt_server_stats stats;
    uint64_t tickets;                          /* given so far */
    struct kvt_refusal refusals[KVT_REFUSALS]; /* the last ones that were logged */
    uint32_t refusal_next;
    int spares[KVT_SPARE_FDS]; /* open on nothing; -1: given to somebody */
    bool scarce;               /* the last one was accepted by one of them: it was said */
    int64_t deaf_until_ns;     /* the listening socket is not looked at; 0: it is */
    bool deaf_scarce;          /* ... or until one of them is back */
    struct kvt_peer peers[KVT_PEERS_MAX];
};

/* peer.c; all on the server's thread. */
/* Somebody has connected: sock is ours from now on. spare: by a descriptor that was kept for it. */
void kvt_peer_new(struct kvt_server *server, int sock, bool spare);
/* CONTROL: the answer that it waited for, which is its own from now on. */
void kvt_peer_answer(struct kvt_server *server, struct kvt_peer *peer, char *text);
/* CONTROL: the socket takes more of the answer. */
void kvt_peer_write(struct kvt_server *server, struct kvt_peer *peer);
/* Its socket has something, or has ended. */
void kvt_peer_read(struct kvt_server *server, struct kvt_peer *peer);
/* Its process has ended. */
void kvt_peer_died(struct kvt_server *server, struct kvt_peer *peer);
/* until_ns has passed. */
void kvt_peer_late(struct kvt_server *server, struct kvt_peer *peer);
/* The owner has found that it breaks the protocol. */
void kvt_peer_broke(struct kvt_server *server, struct kvt_peer *peer);
/* Who may connect has changed: one who may not any more is disconnected. */
void kvt_peer_check(struct kvt_server *server, struct kvt_peer *peer);
/* Everything is taken back; the place is free. */
void kvt_peer_end(struct kvt_server *server, struct kvt_peer *peer);

#endif
