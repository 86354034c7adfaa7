/* The Redis backend's own structure, shared by its files (redis*.c) and by nobody else.
 *
 *   redis.c        the backend: thread, submit and reap, deadlines, completion
 *   redis_nodes.c  nodes, where a key goes, redirections, the map of a cluster
 *   redis_conn.c   a connection: connect, TLS, bytes out and in
 *   redis_login.c  what it says first
 *   redis_about.c  what the server says that it is
 *   redis_reply.c  commands as text, and what each reply means
 *   redis_purge.c  removal of a namespace: walks over all nodes
 *   redis_clean.c  each namespace within a size: walks over all nodes, by one of all clients
 *
 *   submit -> taken by the thread -> ops (one command each) -> node by slot -> connection by kind
 *     queue -> text in `out` -> sent (in the order of their replies) -> reply -> op ends
 *     the last op of a request ends -> done list -> reap
 *
 * Rules
 *  1. One thread owns nodes, connections and ops. Shared with callers: the lists of submitted and
 *     of done requests, under the lock, and the numbers of `stats`, which are atomic.
 *  2. A request that is over (deadline) leaves its op with req == NULL: the reply, when it comes,
 * is read into nothing. One whose record is being sent cannot leave: its connection is closed.
 *  3. A connection whose server has not answered by a deadline is closed; its node is down, and
 *     what goes there fails at once, until a connection has answered PING again.
 *  4. A record is received straight into its slot, and sent straight from it.
 *  5. No command of a connection that was lost with SETs unanswered is carried out after one of the
 *     connection that writes to the same node after it: the fence. The new one ends the old one by
 *     its number (CLIENT KILL ID) before it is READY. So a purge is not overtaken by a put that a
 *     frozen server, or the network, has kept. Where that is refused, purges say that they may be.
 */
#ifndef KVT_REMOTE_REDIS_IMPL_H
#define KVT_REMOTE_REDIS_IMPL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/clock.h"
#include "remote/redis_clean.h"
#include "remote/remote.h"
#include "remote/remote_seal.h"
#include "remote/remote_url.h"
#include "remote/resp.h"

#define REDIS_NODES 64u
#define REDIS_NODE_NAME (KVT_REMOTE_HOST_BYTES + 8)
#define REDIS_OPS 32768u
#define REDIS_HOPS 5u /* redirections of one command */
#define REDIS_OUT 16384u
#define REDIS_IN 65536u
#define REDIS_ABOUT 4096u    /* of INFO server, which has about 1,000 */
#define REDIS_AGG (1u << 20) /* longest reply that is kept whole: SCAN, CLUSTER SLOTS */
#define REDIS_TICK_NS INT64_C(5000000)
#define REDIS_CONNECT_NS INT64_C(2000000000)
#define REDIS_BACKOFF_MIN_NS INT64_C(100000000)
#define REDIS_BACKOFF_MAX_NS INT64_C(5000000000)
#define REDIS_DOWN_TELL_NS INT64_C(60000000000) /* a node that comes and goes */
#define REDIS_REFRESH_NS INT64_C(200000000)     /* between two looks at the map of a cluster */
#define REDIS_REPLICAS_NS INT64_C(10000000000)  /* the same, for replicas that are new */

/* Each node has a connection for each: small questions do not stand behind records. */
enum redis_lane { LANE_ASK, LANE_READ, LANE_WRITE, LANES };

enum redis_kind {
    REDIS_PROBE,
    REDIS_GET,
    REDIS_EXISTS,
    REDIS_SET,
    REDIS_DEL,
    REDIS_SCAN,
    REDIS_IDLE, /* the cleaner's, to REDIS_KEEP */
    REDIS_USAGE,
    REDIS_HOLDER,
    REDIS_LEASE,
    REDIS_KEEP,
    REDIS_SLOTS,
    REDIS_ASKING,
    REDIS_AUTH,
    REDIS_READONLY,
    REDIS_ID,
    REDIS_FENCE,
    REDIS_INFO,
    REDIS_PING
};

struct redis_op { /* one command */
    struct redis_op *next;
    struct kvt_remote_req *req;      /* NULL: nobody waits for it (rule 2), or it is ours */
    struct kvt_remote_req *purge_of; /* REDIS_DEL, REDIS_SCAN of a purge */
    uint32_t index;                  /* of the request's keys */
    uint32_t record_bytes;           /* REDIS_GET: what is expected */
    uint8_t kind, hops, asking;
    bool clean;      /* the cleaner's */
    bool replica;    /* given to one, in place of its master */
    bool no_replica; /* one has failed it: the master's from now on */
    int64_t not_before_ns;
    int64_t deadline_ns;
    int64_t sent_ns;
    const char *name; /* of a purge, of the cleaner */
    uint32_t name_len;
};

struct redis_agg { /* a reply that is kept whole */
    char *bytes;   /* REDIS_AGG */
    size_t len;
};

struct redis_list {
    struct redis_op *head, *tail;
};

enum redis_state { CONN_CLOSED, CONN_CONNECTING, CONN_TLS, CONN_LOGIN, CONN_READY };

struct redis_conn {
    struct redis_node *node;
    enum redis_lane lane;
    enum redis_state state;
    int fd;
    void *tls; /* SSL */
    int wants; /* poll events that TLS waits for instead */
    int64_t since_ns, received_ns;
    char why[256]; /* it fails, as far as is known: what follows its node's name in a sentence */
    bool told;     /* that it failed, and why */
    struct redis_list queue, sent;
    struct redis_op login[6];
    uint64_t id; /* the server's number for it; 0: not told. LANE_WRITE only */

    char out[REDIS_OUT];
    size_t out_at, out_len;
    const uint8_t *body; /* a record behind what is in out ... */
    size_t body_left;
    const struct redis_op *body_op;
    char tail[96]; /* ... and what is behind that */
    size_t tail_at, tail_len;

    char in[REDIS_IN];
    size_t in_at, in_len;
    bool in_body;               /* of the first op of `sent` */
    uint8_t *into;              /* NULL: read into nothing */
    size_t into_left;           /* of the part that goes there */
    size_t mac_left, skip_left; /* then the MAC, then what nobody wants */
    bool body_good;             /* of the length that was expected */
    size_t body_len;
    struct kvt_record_header other; /* of a body that is not */
    uint8_t mac[KVT_REMOTE_MAC_BYTES];
    struct redis_agg *agg; /* the reply is kept whole there; NULL: it is not */
};

struct redis_node {
    struct kvt_remote_seed at;
    bool used, listed; /* listed: in the last map, or named by an answer since */
    uint32_t fails;    /* connections lost in a row; 0: not down */
    int64_t down_until_ns;
    uint64_t fence_id; /* of the connection that has to be ended before anything is written */
    bool unfenced;     /* there was one, and it could not be */
    uint16_t master;   /* of a replica, its node + 1; 0: it is none, or replicas are not read */
    bool no_reads; /* it answers reads with MOVED: READONLY was refused, or it has another master */
    struct redis_conn *conns[LANES]; /* made at first use */
};

enum redis_mode { MODE_UNKNOWN, MODE_SINGLE, MODE_CLUSTER };

struct redis_purge { /* one at a time */
    struct kvt_remote_req *req;
    uint32_t node;
    bool scanning;
    uint32_t left; /* DELs under way */
    char cursor[REDIS_CURSOR];
    char pattern[KVT_REMOTE_NAME_BYTES];
    char *names; /* a copy of the last reply to SCAN, that the DELs point into */
};

struct redis {
    struct kvt_remote remote;
    struct kvt_remote_url url;
    struct kvt_remote_mac mac;
    struct kvt_log log;
    struct kvt_clock clock;
    int64_t ttl_ns;
    char auth_file[1024], ca_file[1024];
    void *tls; /* SSL_CTX */

    pthread_t thread;
    bool running;
    pthread_mutex_t lock;
    struct kvt_remote_req *submitted, *submitted_last; /* under the lock */
    struct kvt_remote_req *done, *done_last;           /* under the lock */
    bool stopping;                                     /* under the lock */
    int wake_fd, done_fd;

    /* the thread's */
    int64_t now_ns, tick_ns;
    enum redis_mode mode;
    struct redis_node nodes[REDIS_NODES];
    uint16_t slots[KVT_RESP_SLOTS]; /* node + 1; 0: nobody's */
    bool want_map;
    bool asking_map; /* under way */
    uint32_t map_node;
    int64_t map_next_ns;
    struct redis_op *ops, *op_free;
    struct redis_list waiting; /* for the map, or for their time */
    struct redis_purge purge;
    struct kvt_remote_req *purges;             /* not begun yet */
    struct kvt_remote_req *ended, *ended_last; /* this turn */
    struct redis_agg map_agg, scan_agg, clean_agg;
    struct redis_clean clean;
    bool auth_told, down_told, fence_told;
    bool about_wanted, about_taken; /* the one answer to INFO that is kept, whoever gives it */
    char about[REDIS_ABOUT];        /* read by others once about_ready is set */
    _Atomic bool about_ready;
    int64_t error_tell_ns, down_tell_ns; /* no warning of an error, of a node, before */

    _Atomic uint64_t connects, losses, redirects, auth_fails, node_count, nodes_down;
};

/* ---- lists */
static inline void redis_push(struct redis_list *list, struct redis_op *op)
{
    op->next = NULL;
    if (list->tail)
        list->tail->next = op;
    else
        list->head = op;
    list->tail = op;
}

static inline struct redis_op *redis_pop(struct redis_list *list)
{
    struct redis_op *op = list->head;

    if (op) {
        list->head = op->next;
        if (!list->head)
            list->tail = NULL;
    }
    return op;
}

/* ---- redis.c */
/* One command has ended; the request does with its last one. status as remote.h. */
void redis_op_end(struct redis *redis, struct redis_op *op, int status);
struct redis_op *redis_op_new(struct redis *redis, enum redis_kind kind);
void redis_op_free(struct redis *redis, struct redis_op *op);
/* A request of which nothing is under way any more. */
void redis_req_end(struct redis *redis, struct kvt_remote_req *req, int status);

/* ---- redis_nodes.c */
void redis_route(struct redis *redis, struct redis_op *op);
/* A replica has failed a read: on to the master. false: it was none, or it is over. */
bool redis_to_master(struct redis *redis, struct redis_op *op);
/* Put it on a node's connection, or end it. */
void redis_give(struct redis *redis, struct redis_node *node, struct redis_op *op);
/* why: for one warning, NULL: it has been told. */
void redis_node_failed(struct redis *redis, struct redis_node *node, const char *why);
/* "host:port" or a path, for sentences. */
const char *redis_node_name(const struct redis_node *node, char out[REDIS_NODE_NAME]);
/* A reply that says "elsewhere" or "not now". true: the op goes on, false: it is another error. */
bool redis_redirected(struct redis *redis, struct redis_conn *conn, struct redis_op *op,
                      const char *text, size_t len);
void redis_map_reply(struct redis *redis, struct redis_conn *conn, const char *bytes, size_t len);
void redis_map_failed(struct redis *redis);
/* Ask for the map where that is due, connect to nodes that were down, route what waits. */
void redis_nodes_turn(struct redis *redis);
/* Nobody is left who could be asked. */
bool redis_all_down(const struct redis *redis);
/* Whether the node is one that holds keys. */
bool redis_node_serves(const struct redis *redis, uint32_t node);

/* ---- redis_conn.c */
__attribute__((warn_unused_result)) int redis_tls_init(struct redis *redis, char *error,
                                                       size_t error_len);
void redis_tls_free(struct redis *redis);
void redis_conn_start(struct redis *redis, struct redis_conn *conn);
/* Close it; what was under way ends with status. failed: the node is to blame. */
void redis_conn_close(struct redis *redis, struct redis_conn *conn, int status, bool failed);
short redis_conn_events(const struct redis_conn *conn);
/* poll() has found something, or there is something to send. */
void redis_conn_turn(struct redis *redis, struct redis_conn *conn, short revents);

/* ---- redis_login.c */
/* Whether the file of the password can be used now. 0, KVT_E_CONFIG_VALUE with a sentence. */
__attribute__((warn_unused_result)) int redis_auth_check(const struct redis *redis, char *error,
                                                         size_t error_len);
/* The connection is made: say who we are. false: the file of the password cannot be used. */
bool redis_log_in(struct redis *redis, struct redis_conn *conn);

/* ---- redis_reply.c */
/* A lost connection of ours that wrote to the node cannot be ended: told once. */
void redis_unfenced(struct redis *redis, struct redis_node *node);
/* Append the text of a command to `out`. false: no room now. */
bool redis_encode(struct redis *redis, struct redis_conn *conn, struct redis_op *op);
/* Read what has come in. false: the server talks nonsense. */
bool redis_replies(struct redis *redis, struct redis_conn *conn);
/* The body of a reply is complete. */
void redis_body_end(struct redis *redis, struct redis_conn *conn);

/* ---- redis_about.c: ops->about */
void redis_about(struct kvt_remote *remote, char *text, size_t len);

/* ---- redis_purge.c */
void redis_purge_turn(struct redis *redis);
void redis_scan_reply(struct redis *redis, const char *bytes, size_t len);
void redis_purge_op_end(struct redis *redis, const struct redis_op *op, int status,
                        uint64_t removed);

/* ---- redis_clean.c */
__attribute__((warn_unused_result)) int redis_clean_init(struct redis *redis, uint64_t cap_bytes,
                                                         int64_t period_ns);
void redis_clean_free(struct redis *redis);
void redis_clean_turn(struct redis *redis);
/* The text of a command of the cleaner's; as snprintf(). */
int redis_clean_text(const struct redis *redis, const struct redis_op *op, char *out, size_t room);
void redis_clean_scan_reply(struct redis *redis, const char *bytes, size_t len);
/* number: of a reply that is one. KVT_E_MISS: nil. */
void redis_clean_op_end(struct redis *redis, const struct redis_op *op, int status, int64_t number);

#endif
