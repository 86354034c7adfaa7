/* The Redis backend: its thread, the requests that come in and go out, deadlines. See
 * redis_impl.h for the picture and the rules. Threads: callers' and its own. Allocates at open, and
 * for a connection at its first use (its own thread's business).
 */
#include "remote/redis.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/fd.h"
#include "kvtier/error.h"
#include "remote/redis_impl.h"

/* ---- ops and requests ---------------------------------------------------------------------- */

struct redis_op *redis_op_new(struct redis *redis, enum redis_kind kind)
{
    struct redis_op *op = redis->op_free;

    if (!op)
        return NULL;
    redis->op_free = op->next;
    memset(op, 0, sizeof(*op));
    op->kind = (uint8_t)kind;
    return op;
}

void redis_op_free(struct redis *redis, struct redis_op *op)
{
    if (op < redis->ops || op >= redis->ops + REDIS_OPS)
        return; /* of a connection's log in */
    op->next = redis->op_free;
    redis->op_free = op;
}

void redis_req_end(struct redis *redis, struct kvt_remote_req *req, int status)
{
    req->status = status;
    req->next = NULL;
    if (redis->ended)
        redis->ended_last->next = req;
    else
        redis->ended = req;
    redis->ended_last = req;
}

static void part_end(struct redis *redis, struct kvt_remote_req *req, int status)
{
    if (status && !req->status)
        req->status = status;
    if (--req->left == 0)
        redis_req_end(redis, req, req->status);
}

void redis_op_end(struct redis *redis, struct redis_op *op, int status)
{
    struct kvt_remote_req *req = op->req;

    if (op->kind == REDIS_SLOTS && status)
        redis_map_failed(redis);
    if (op->purge_of)
        redis_purge_op_end(redis, op, status, 0);
    if (op->clean)
        redis_clean_op_end(redis, op, status, 0);
    if (req && req->op == KVT_REMOTE_PROBE) {
        req->found[op->index].status = status;
        part_end(redis, req, status == KVT_E_MISS || status == KVT_E_CORRUPT ? 0 : status);
    } else if (req) {
        part_end(redis, req, status);
    }
    redis_op_free(redis, op);
}

/* Commands of a request. false: there are too many under way. */
static bool begin(struct redis *redis, struct kvt_remote_req *req)
{
    static const enum redis_kind kinds[] = {[KVT_REMOTE_PROBE] = REDIS_PROBE,
                                            [KVT_REMOTE_GET] = REDIS_GET,
                                            [KVT_REMOTE_PUT] = REDIS_EXISTS,
                                            [KVT_REMOTE_DROP] = REDIS_DEL};
    struct redis_list ops = {NULL, NULL};
    struct redis_op *op;

    req->left = 0;
    req->removed = 0;
    for (uint32_t i = 0; i < req->count; i++) {
        op = redis_op_new(redis, kinds[req->op]);
        if (!op)
            break;
        if (req->op == KVT_REMOTE_PUT && req->replace)
            op->kind = REDIS_SET;
        op->req = req;
        op->index = i;
        op->record_bytes = req->record_bytes;
        op->deadline_ns = req->deadline_ns;
        redis_push(&ops, op);
        req->left++;
    }
    if (req->left < req->count || !req->count) {
        while ((op = redis_pop(&ops)) != NULL)
            redis_op_free(redis, op);
        return false;
    }
    while ((op = redis_pop(&ops)) != NULL)
        redis_route(redis, op);
    return true;
}

static void take_submitted(struct redis *redis)
{
    struct kvt_remote_req *req;

    pthread_mutex_lock(&redis->lock);
    req = redis->submitted;
    redis->submitted = NULL;
    pthread_mutex_unlock(&redis->lock);
    while (req) {
        struct kvt_remote_req *next = req->next;

        req->next = NULL;
        if (req->op == KVT_REMOTE_DROP_NS) {
            struct kvt_remote_req **link = &redis->purges;

            while (*link)
                link = &(*link)->next;
            *link = req;
            req->removed = 0;
        } else if (!begin(redis, req)) {
            for (uint32_t i = 0; req->op == KVT_REMOTE_PROBE && i < req->count; i++)
                req->found[i].status = -EAGAIN;
            redis_req_end(redis, req, -EAGAIN);
        }
        req = next;
    }
}

static void ring(int fd)
{
    uint64_t one = 1;

    if (write(fd, &one, sizeof(one)) < 0)
        return; /* it is readable already */
}

static void unring(int fd)
{
    uint64_t rung;

    if (read(fd, &rung, sizeof(rung)) < 0)
        return; /* nobody has rung */
}

static void hand_out(struct redis *redis)
{
    if (!redis->ended)
        return;
    pthread_mutex_lock(&redis->lock);
    if (redis->done)
        redis->done_last->next = redis->ended;
    else
        redis->done = redis->ended;
    redis->done_last = redis->ended_last;
    pthread_mutex_unlock(&redis->lock);
    redis->ended = redis->ended_last = NULL;
    ring(redis->done_fd);
}

/* ---- deadlines ----------------------------------------------------------------------------- */

/* Ops of a list that are over end here. keep: they stay in it, for their reply. Returns when the
 * oldest one of those was sent, 1 where none stays, 0: none is over. */
static int64_t expire_list(struct redis *redis, struct redis_list *list, bool keep)
{
    struct redis_list rest = {NULL, NULL};
    struct redis_op *op;
    int64_t sent_ns = 0;

    while ((op = redis_pop(list)) != NULL) {
        bool over = op->deadline_ns && op->deadline_ns <= redis->now_ns;

        if (over && !keep) {
            sent_ns = 1;
            redis_op_end(redis, op, KVT_E_DEADLINE);
            continue;
        }
        if (over && (!sent_ns || op->sent_ns < sent_ns))
            sent_ns = op->sent_ns;
        redis_push(&rest, op);
    }
    *list = rest;
    return sent_ns;
}

/* What waits for a reply and is over: its request ends, its op stays to take the reply. */
static void detach_late(struct redis *redis, struct redis_conn *conn)
{
    for (struct redis_op *op = conn->sent.head; op; op = op->next) {
        struct kvt_remote_req *req = op->req;

        if (!op->deadline_ns || op->deadline_ns > redis->now_ns)
            continue;
        op->deadline_ns = 0;
        if (op == conn->sent.head && conn->in_body)
            conn->into = NULL;
        if (op->purge_of)
            redis_purge_op_end(redis, op, KVT_E_DEADLINE, 0);
        if (op->clean)
            redis_clean_op_end(redis, op, KVT_E_DEADLINE, 0);
        op->clean = false;
        op->purge_of = NULL;
        op->req = NULL;
        if (req && req->op == KVT_REMOTE_PROBE)
            req->found[op->index].status = KVT_E_DEADLINE;
        if (req)
            part_end(redis, req, KVT_E_DEADLINE);
    }
}

static void conn_tick(struct redis *redis, struct redis_conn *conn)
{
    int64_t sent_ns;

    if (conn->state != CONN_CLOSED && conn->state != CONN_READY &&
        redis->now_ns - conn->since_ns > REDIS_CONNECT_NS) {
        redis_conn_close(redis, conn, -EHOSTDOWN, true);
        return;
    }
    if (expire_list(redis, &conn->queue, false) && conn->state != CONN_READY &&
        redis->now_ns - conn->since_ns > REDIS_BACKOFF_MIN_NS) {
        redis_conn_close(redis, conn, KVT_E_DEADLINE, true); /* it is not even let in */
        return;
    }
    sent_ns = expire_list(redis, &conn->sent, true);
    if (!sent_ns)
        return;
    if (conn->received_ns <= sent_ns || (conn->body_op && conn->body_op->deadline_ns &&
                                         conn->body_op->deadline_ns <= redis->now_ns)) {
        redis_conn_close(redis, conn, KVT_E_DEADLINE, true);
        return;
    }
    detach_late(redis, conn);
}

static void tick(struct redis *redis)
{
    struct kvt_remote_req *req = redis->purges, *rest = NULL;

    if (redis->now_ns < redis->tick_ns)
        return;
    redis->tick_ns = redis->now_ns + REDIS_TICK_NS;
    for (uint32_t i = 0; i < REDIS_NODES; i++)
        for (int lane = 0; redis->nodes[i].used && lane < LANES; lane++)
            if (redis->nodes[i].conns[lane])
                conn_tick(redis, redis->nodes[i].conns[lane]);
    (void)expire_list(redis, &redis->waiting, false);
    while (req) {
        struct kvt_remote_req *next = req->next;

        if (req->deadline_ns <= redis->now_ns) {
            redis_req_end(redis, req, KVT_E_DEADLINE);
        } else {
            req->next = rest;
            rest = req;
        }
        req = next;
    }
    redis->purges = rest;
}

/* ---- the thread ---------------------------------------------------------------------------- */

static void count_nodes(struct redis *redis)
{
    uint64_t nodes = 0, down = 0;

    for (uint32_t i = 0; i < REDIS_NODES; i++) {
        nodes += redis->nodes[i].used;
        down += redis->nodes[i].used && redis->nodes[i].fails > 0;
    }
    atomic_store_explicit(&redis->node_count, nodes, memory_order_relaxed);
    atomic_store_explicit(&redis->nodes_down, down, memory_order_relaxed);
}

static void turn(struct redis *redis)
{
    struct pollfd fds[1 + REDIS_NODES * LANES];
    struct redis_conn *conns[1 + REDIS_NODES * LANES];
    nfds_t count = 1;
    int timeout_ms;

    fds[0] = (struct pollfd){.fd = redis->wake_fd, .events = POLLIN};
    timeout_ms = redis->purge.req || redis->waiting.head ? 1 : 50;
    for (uint32_t i = 0; i < REDIS_NODES; i++) {
        for (int lane = 0; redis->nodes[i].used && lane < LANES; lane++) {
            struct redis_conn *conn = redis->nodes[i].conns[lane];

            if (!conn)
                continue;
            if (conn->queue.head || conn->sent.head)
                timeout_ms = KVT_MIN(timeout_ms, 5);
            if (conn->state == CONN_CLOSED)
                continue;
            conns[count] = conn;
            fds[count++] = (struct pollfd){.fd = conn->fd, .events = redis_conn_events(conn)};
        }
    }
    if (poll(fds, count, timeout_ms) < 0)
        count = 0; /* EINTR: as if nothing had come */
    redis->now_ns = kvt_clock_now(&redis->clock);
    if (count && fds[0].revents)
        unring(redis->wake_fd);
    take_submitted(redis);
    for (nfds_t i = 1; i < count; i++)
        if (conns[i]->state != CONN_CLOSED)
            redis_conn_turn(redis, conns[i], fds[i].revents);
    tick(redis);
    redis_nodes_turn(redis);
    redis_purge_turn(redis);
    redis_clean_turn(redis);
    count_nodes(redis);
    hand_out(redis);
}

static bool stopping(struct redis *redis)
{
    bool stop;

    pthread_mutex_lock(&redis->lock);
    stop = redis->stopping;
    pthread_mutex_unlock(&redis->lock);
    return stop;
}

static void *redis_thread(void *arg)
{
    struct redis *redis = arg;

    redis->now_ns = kvt_clock_now(&redis->clock);
    while (!stopping(redis))
        turn(redis);
    for (uint32_t i = 0; i < REDIS_NODES; i++)
        for (int lane = 0; lane < LANES; lane++)
            if (redis->nodes[i].conns[lane])
                redis_conn_close(redis, redis->nodes[i].conns[lane], KVT_E_CLOSED, false);
    return NULL;
}

/* ---- the vtable ---------------------------------------------------------------------------- */

static struct redis *of(struct kvt_remote *remote)
{
    return (struct redis *)(void *)remote;
}

static int redis_submit(struct kvt_remote *remote, struct kvt_remote_req *req)
{
    struct redis *redis = of(remote);
    bool first;

    req->next = NULL;
    pthread_mutex_lock(&redis->lock);
    first = redis->submitted == NULL;
    if (first)
        redis->submitted = req;
    else
        redis->submitted_last->next = req;
    redis->submitted_last = req;
    pthread_mutex_unlock(&redis->lock);
    if (first)
        ring(redis->wake_fd);
    return 0;
}

static uint32_t redis_reap(struct kvt_remote *remote, struct kvt_remote_req **done, uint32_t max)
{
    struct redis *redis = of(remote);
    uint32_t count = 0;

    pthread_mutex_lock(&redis->lock);
    while (count < max && redis->done) {
        done[count++] = redis->done;
        redis->done = redis->done->next;
    }
    if (!redis->done)
        unring(redis->done_fd);
    pthread_mutex_unlock(&redis->lock);
    return count;
}

static int redis_event_fd(struct kvt_remote *remote)
{
    return of(remote)->done_fd;
}

static void redis_stats(struct kvt_remote *remote, struct kvt_remote_stats *stats)
{
    struct redis *redis = of(remote);

    *stats = (struct kvt_remote_stats){
        .connects = atomic_load_explicit(&redis->connects, memory_order_relaxed),
        .losses = atomic_load_explicit(&redis->losses, memory_order_relaxed),
        .redirects = atomic_load_explicit(&redis->redirects, memory_order_relaxed),
        .auth_fails = atomic_load_explicit(&redis->auth_fails, memory_order_relaxed),
        .nodes = atomic_load_explicit(&redis->node_count, memory_order_relaxed),
        .nodes_down = atomic_load_explicit(&redis->nodes_down, memory_order_relaxed)};
}

static void redis_stop(struct kvt_remote *remote)
{
    struct redis *redis = of(remote);

    if (!redis->running)
        return;
    pthread_mutex_lock(&redis->lock);
    redis->stopping = true;
    pthread_mutex_unlock(&redis->lock);
    ring(redis->wake_fd);
    (void)pthread_join(redis->thread, NULL);
    redis->running = false;
}

static void redis_destroy(struct kvt_remote *remote)
{
    struct redis *redis = of(remote);

    redis_stop(remote);
    for (uint32_t i = 0; i < REDIS_NODES; i++)
        for (int lane = 0; lane < LANES; lane++)
            free(redis->nodes[i].conns[lane]);
    redis_tls_free(redis);
    if (redis->wake_fd >= 0)
        (void)close(redis->wake_fd);
    if (redis->done_fd >= 0)
        (void)close(redis->done_fd);
    (void)pthread_mutex_destroy(&redis->lock);
    free(redis->ops);
    free(redis->map_agg.bytes);
    free(redis->scan_agg.bytes);
    free(redis->purge.names);
    redis_clean_free(redis);
    free(redis);
}

static const struct kvt_remote_ops redis_ops = {.name = "redis",
                                                .submit = redis_submit,
                                                .reap = redis_reap,
                                                .event_fd = redis_event_fd,
                                                .stats = redis_stats,
                                                .about = redis_about,
                                                .stop = redis_stop,
                                                .destroy = redis_destroy};

static int start(struct redis *redis)
{
    sigset_t all, before;
    int err;

    redis->ops = calloc(REDIS_OPS, sizeof(*redis->ops));
    redis->map_agg.bytes = malloc(REDIS_AGG);
    redis->scan_agg.bytes = malloc(REDIS_AGG);
    redis->purge.names = malloc(REDIS_AGG);
    if (!redis->ops || !redis->map_agg.bytes || !redis->scan_agg.bytes || !redis->purge.names)
        return -ENOMEM;
    for (uint32_t i = 0; i < REDIS_OPS; i++) {
        redis->ops[i].next = redis->op_free;
        redis->op_free = &redis->ops[i];
    }
    redis->wake_fd = kvt_fd_high(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    redis->done_fd = kvt_fd_high(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (redis->wake_fd < 0 || redis->done_fd < 0)
        return -errno;
    for (uint32_t i = 0; i < redis->url.seed_count; i++) {
        redis->nodes[i].at = redis->url.seeds[i];
        redis->nodes[i].used = redis->nodes[i].listed = true;
    }
    redis->want_map = true;
    /* The program's signals are for the program's threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    err = pthread_create(&redis->thread, NULL, redis_thread, redis);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (err)
        return -err;
    pthread_setname_np(redis->thread, "kvt-remote");
    redis->running = true;
    return 0;
}

int kvt_redis_open(const struct kvt_remote_params *params, const struct kvt_remote_url *url,
                   struct kvt_remote **out, char *error, size_t error_len)
{
    struct redis *redis = calloc(1, sizeof(*redis));
    int rc;

    *out = NULL;
    if (!redis)
        return -ENOMEM;
    redis->remote.ops = &redis_ops;
    redis->url = *url;
    redis->log = params->log;
    redis->clock = kvt_clock_system();
    redis->ttl_ns = params->ttl_ns;
    redis->about_wanted = params->about;
    redis->wake_fd = redis->done_fd = -1;
    (void)snprintf(redis->auth_file, sizeof(redis->auth_file), "%s",
                   params->auth_file ? params->auth_file : "");
    (void)snprintf(redis->ca_file, sizeof(redis->ca_file), "%s",
                   params->ca_file ? params->ca_file : "");
    rc = -pthread_mutex_init(&redis->lock, NULL);
    if (rc) {
        free(redis);
        return rc;
    }
    rc = kvt_remote_mac_read(params->mac_file, &redis->mac, error, error_len);
    if (!rc)
        rc = redis_auth_check(redis, error, error_len);
    if (!rc && url->tls)
        rc = redis_tls_init(redis, error, error_len);
    if (!rc)
        rc = redis_clean_init(redis, params->ns_cap_bytes, params->clean_period_ns);
    if (!rc && !params->look)
        rc = start(redis);
    if (rc || params->look) {
        redis_destroy(&redis->remote);
        return rc;
    }
    *out = &redis->remote;
    return 0;
}
