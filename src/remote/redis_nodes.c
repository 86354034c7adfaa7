/* Nodes of a server or a cluster: which one has a key, which one is down, and what follows from
 * answers that say "elsewhere".
 *
 *   mode UNKNOWN -- CLUSTER SLOTS answered --> CLUSTER      ops wait until it is known which
 *                `- refused ----------------> SINGLE -- MOVED seen --> CLUSTER
 *
 * A node is down from the loss of a connection on until one of its connections has logged in again;
 * meanwhile its ops fail at once. The map of a cluster is asked for again after every loss and
 * redirection, from whichever node answers. Threads: the backend's.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "remote/redis_impl.h"

#define RETRY_NS INT64_C(10000000)

static const enum redis_lane lane_of[] = {
    [REDIS_PROBE] = LANE_ASK,   [REDIS_GET] = LANE_READ,    [REDIS_EXISTS] = LANE_ASK,
    [REDIS_SET] = LANE_WRITE,   [REDIS_DEL] = LANE_WRITE,   [REDIS_SCAN] = LANE_WRITE,
    [REDIS_IDLE] = LANE_WRITE,  [REDIS_USAGE] = LANE_WRITE, [REDIS_HOLDER] = LANE_WRITE,
    [REDIS_LEASE] = LANE_WRITE, [REDIS_KEEP] = LANE_WRITE,  [REDIS_SLOTS] = LANE_ASK};

static struct redis_conn *conn_of(struct redis *redis, struct redis_node *node,
                                  enum redis_lane lane)
{
    struct redis_conn *conn = node->conns[lane];

    if (!conn) {
        conn = calloc(1, sizeof(*conn));
        if (!conn)
            return NULL;
        conn->node = node;
        conn->lane = lane;
        conn->fd = -1;
        node->conns[lane] = conn;
    }
    if (conn->state == CONN_CLOSED && redis->now_ns >= node->down_until_ns)
        redis_conn_start(redis, conn);
    return conn;
}

void redis_give(struct redis *redis, struct redis_node *node, struct redis_op *op)
{
    struct redis_conn *conn = conn_of(redis, node, lane_of[op->kind]);

    /* A node that was never lost may take its time to connect; one that was must prove itself. */
    if (!conn || conn->state == CONN_CLOSED || (node->fails && conn->state != CONN_READY)) {
        if (!redis_to_master(redis, op))
            redis_op_end(redis, op, -EHOSTDOWN);
        return;
    }
    redis_push(&conn->queue, op);
}

bool redis_to_master(struct redis *redis, struct redis_op *op)
{
    if (!op->replica || !op->req || (op->deadline_ns && op->deadline_ns <= redis->now_ns))
        return false;
    op->replica = false;
    op->no_replica = true;
    redis_route(redis, op);
    return true;
}

static bool may_read(const struct redis_node *node, uint32_t master)
{
    return node->used && node->master == master && !node->fails && !node->no_reads;
}

/* A replica of `master` (node + 1) that may be asked for what is in the slot: the same one for all
 * questions as long as they are the same replicas, so that what a look-up finds a load finds. The
 * master, when there is none. */
static uint32_t replica_of(const struct redis *redis, uint32_t master, uint32_t slot)
{
    uint32_t count = 0, skip;

    for (uint32_t i = 0; i < REDIS_NODES; i++)
        count += may_read(&redis->nodes[i], master);
    skip = count ? slot % count : 0;
    for (uint32_t i = 0; i < REDIS_NODES; i++)
        if (may_read(&redis->nodes[i], master) && skip-- == 0)
            return i + 1;
    return master;
}

static bool is_read(const struct redis_op *op)
{
    return op->kind == REDIS_PROBE || op->kind == REDIS_GET;
}

/* Nobody is left who could say what kind of server this is. */
bool redis_all_down(const struct redis *redis)
{
    for (uint32_t i = 0; i < REDIS_NODES; i++)
        if (redis->nodes[i].used && !redis->nodes[i].fails)
            return false;
    return true;
}

void redis_route(struct redis *redis, struct redis_op *op)
{
    char name[KVT_REMOTE_NAME_BYTES];
    size_t len;
    uint32_t node, reader, slot = 0;

    op->replica = false;
    if (redis->mode == MODE_UNKNOWN) {
        if (redis_all_down(redis))
            redis_op_end(redis, op, -EHOSTDOWN);
        else
            redis_push(&redis->waiting, op);
        return;
    }
    if (op->name)
        node = redis->slots[kvt_resp_slot(op->name, op->name_len)];
    else if (redis->mode == MODE_SINGLE)
        node = redis->slots[0];
    else {
        len = kvt_remote_name(&op->req->keys[op->index], name);
        slot = kvt_resp_slot(name, len);
        node = redis->slots[slot];
    }
    if (!node) {
        redis->want_map = true;
        redis_op_end(redis, op, -EHOSTDOWN);
        return;
    }
    reader = node;
    if (redis->url.replicas && is_read(op) && !op->no_replica)
        reader = replica_of(redis, node, slot);
    op->replica = reader != node;
    redis_give(redis, &redis->nodes[reader - 1], op);
}

const char *redis_node_name(const struct redis_node *node, char out[REDIS_NODE_NAME])
{
    (void)snprintf(out, REDIS_NODE_NAME, "%s%s%s", node->at.host, node->at.port[0] ? ":" : "",
                   node->at.port);
    return out;
}

void redis_node_failed(struct redis *redis, struct redis_node *node, const char *why)
{
    char name[REDIS_NODE_NAME];
    int64_t pause = REDIS_BACKOFF_MIN_NS << KVT_MIN(node->fails, 6u);

    if (node->fails < 1000)
        node->fails++;
    node->down_until_ns = redis->now_ns + KVT_MIN(pause, REDIS_BACKOFF_MAX_NS);
    redis->want_map = redis->mode != MODE_SINGLE;
    if (redis->down_told || !why || redis->now_ns < redis->down_tell_ns)
        return;
    kvt_log(&redis->log, KVT_LOG_WARN,
            "remote: %s %s (trying again; its blocks are misses meanwhile)",
            redis_node_name(node, name), why);
    redis->down_told = true;
    redis->down_tell_ns = redis->now_ns + REDIS_DOWN_TELL_NS;
}

bool redis_node_serves(const struct redis *redis, uint32_t node)
{
    if (!redis->nodes[node].used)
        return false;
    for (uint32_t slot = 0; slot < KVT_RESP_SLOTS; slot++)
        if (redis->slots[slot] == node + 1)
            return true;
    return false;
}

static bool same_place(const struct redis_node *node, const struct kvt_remote_seed *at)
{
    return strcmp(node->at.host, at->host) == 0 && strcmp(node->at.port, at->port) == 0;
}

/* A lost connection of ours may still have puts there. */
static bool owes(const struct redis_node *node)
{
    return node->fence_id || node->unfenced;
}

/* The node of an address, known or new. NULL: there is no room. One that was forgotten and is back
 * still owes what it did (rule 5): its place is taken by another one only where no other is free.
 */
static struct redis_node *node_at(struct redis *redis, const struct kvt_remote_seed *at)
{
    struct redis_node *spare = NULL;

    for (uint32_t i = 0; i < REDIS_NODES; i++) {
        struct redis_node *node = &redis->nodes[i];

        if (same_place(node, at)) {
            spare = node;
            break;
        }
        if (!node->used && (!spare || (owes(spare) && !owes(node))))
            spare = node;
    }
    if (!spare || spare->used)
        return spare;
    if (!same_place(spare, at)) {
        spare->at = *at;
        spare->fence_id = 0;
        spare->unfenced = false;
    }
    spare->used = true;
    spare->listed = false;
    spare->fails = 0;
    spare->down_until_ns = 0;
    spare->master = 0;
    spare->no_reads = false;
    return spare;
}

/* ---- the map ------------------------------------------------------------------------------- */

/* A single server, or one that does not let us ask. */
static void all_to(struct redis *redis, const struct redis_node *node)
{
    uint16_t number = (uint16_t)(node - redis->nodes + 1);
    char name[REDIS_NODE_NAME];

    for (uint32_t slot = 0; slot < KVT_RESP_SLOTS; slot++)
        redis->slots[slot] = number;
    if (redis->url.replicas)
        kvt_log(&redis->log, KVT_LOG_WARN,
                "remote: ?replicas=yes has no effect: %s is no cluster, or does not let us ask for "
                "its map (CLUSTER SLOTS)",
                redis_node_name(node, name));
}

struct map_fill {
    struct redis *redis;
    const struct redis_node *asked;
    bool replicas; /* the second time: no replica takes the place of a master */
    uint32_t slots;
    uint16_t master; /* of the range; 0: there was no room for it */
};

static void map_range(void *ctx, uint32_t first, uint32_t last, uint32_t place, const char *host,
                      size_t host_len, uint32_t port)
{
    struct map_fill *fill = ctx;
    struct kvt_remote_seed at;
    struct redis_node *node;

    if (!place)
        fill->master = 0;
    if (host_len >= sizeof(at.host) || (place && (!fill->replicas || !fill->master)))
        return;
    memset(&at, 0, sizeof(at));
    memcpy(at.host, host_len ? host : fill->asked->at.host,
           host_len ? host_len : strlen(fill->asked->at.host));
    (void)snprintf(at.port, sizeof(at.port), "%u", port);
    node = node_at(fill->redis, &at);
    if (!node)
        return;
    node->listed = true;
    if (place) {
        node->no_reads = node->no_reads && node->master == fill->master;
        node->master = fill->master;
        return;
    }
    node->master = 0;
    fill->master = (uint16_t)(node - fill->redis->nodes + 1);
    for (uint32_t slot = first; slot <= last && slot < KVT_RESP_SLOTS; slot++)
        fill->redis->slots[slot] = fill->master;
    fill->slots += last - first + 1;
}

/* false: it makes no sense, or nobody has a slot. */
static bool map_take(struct redis *redis, const struct redis_node *asked, const char *bytes,
                     size_t len)
{
    struct map_fill fill = {.redis = redis, .asked = asked};

    for (uint32_t i = 0; i < REDIS_NODES; i++)
        redis->nodes[i].listed = false;
    memset(redis->slots, 0, sizeof(redis->slots));
    if (!kvt_resp_slots(bytes, len, map_range, &fill) || !fill.slots)
        return false;
    fill.replicas = redis->url.replicas;
    if (fill.replicas && !kvt_resp_slots(bytes, len, map_range, &fill))
        return false;
    for (uint32_t i = 0; i < REDIS_NODES; i++)
        if (!redis->nodes[i].listed)
            redis->nodes[i].master = 0; /* a seed that has left the cluster */
    return true;
}

static void waiting_go(struct redis *redis)
{
    struct redis_list list = redis->waiting;
    struct redis_op *op;

    redis->waiting = (struct redis_list){NULL, NULL};
    while ((op = redis_pop(&list)) != NULL) {
        if (op->not_before_ns > redis->now_ns)
            redis_push(&redis->waiting, op);
        else
            redis_route(redis, op);
    }
}

/* Nodes that the map does not name any more, and that are no seeds. */
static void forget_nodes(struct redis *redis)
{
    for (uint32_t i = redis->url.seed_count; i < REDIS_NODES; i++) {
        struct redis_node *node = &redis->nodes[i];

        if (!node->used || node->listed)
            continue;
        for (int lane = 0; lane < LANES; lane++) {
            if (node->conns[lane])
                redis_conn_close(redis, node->conns[lane], -EHOSTDOWN, false);
            free(node->conns[lane]);
            node->conns[lane] = NULL;
        }
        node->used = false;
    }
}

void redis_map_reply(struct redis *redis, struct redis_conn *conn, const char *bytes, size_t len)
{
    redis->asking_map = false;
    redis->map_next_ns = redis->now_ns + REDIS_REFRESH_NS;
    if (len && bytes[0] == '-') { /* no cluster, or we may not ask */
        redis->want_map = false;
        if (redis->mode == MODE_UNKNOWN) {
            redis->mode = MODE_SINGLE;
            all_to(redis, conn->node);
        }
        return;
    }
    if (!map_take(redis, conn->node, bytes, len)) {
        redis->map_next_ns = redis->now_ns + REDIS_BACKOFF_MIN_NS; /* it is only being made */
        return;
    }
    redis->mode = MODE_CLUSTER;
    redis->want_map = false;
    for (uint32_t i = 0; i < REDIS_NODES; i++)
        if (redis->nodes[i].used && redis->nodes[i].fails && redis_node_serves(redis, i))
            redis->want_map = true; /* somebody will take its place */
}

void redis_map_failed(struct redis *redis)
{
    redis->asking_map = false;
    redis->map_next_ns = redis->now_ns + REDIS_BACKOFF_MIN_NS;
}

/* Ask the next node that may answer. */
static void ask_map(struct redis *redis)
{
    struct redis_op *op;

    for (uint32_t tries = 0; tries < REDIS_NODES; tries++) {
        struct redis_node *node = &redis->nodes[redis->map_node++ % REDIS_NODES];

        if (!node->used ||
            (node->fails && (!node->conns[LANE_ASK] || node->conns[LANE_ASK]->state != CONN_READY)))
            continue;
        op = redis_op_new(redis, REDIS_SLOTS);
        if (!op)
            return;
        op->deadline_ns = redis->now_ns + REDIS_CONNECT_NS;
        redis->asking_map = true;
        redis_give(redis, node, op);
        return;
    }
}

void redis_nodes_turn(struct redis *redis)
{
    bool down = false;

    for (uint32_t i = 0; i < REDIS_NODES; i++) {
        struct redis_node *node = &redis->nodes[i];

        if (!node->used || !node->fails)
            continue;
        down = true;
        (void)conn_of(redis, node, LANE_ASK); /* it has to answer before it is asked for more */
    }
    if (!down)
        redis->down_told = false;
    if (redis->url.replicas && redis->mode == MODE_CLUSTER &&
        redis->now_ns - redis->map_next_ns > REDIS_REPLICAS_NS)
        redis->want_map = true;
    if (redis->want_map && !redis->asking_map && redis->now_ns >= redis->map_next_ns)
        ask_map(redis);
    if (redis->mode == MODE_CLUSTER && !redis->asking_map)
        forget_nodes(redis);
    if (redis->waiting.head && (redis->mode != MODE_UNKNOWN || redis_all_down(redis)))
        waiting_go(redis);
}

/* ---- redirections -------------------------------------------------------------------------- */

static void later(struct redis *redis, struct redis_op *op)
{
    op->hops++;
    op->not_before_ns = redis->now_ns + RETRY_NS;
    redis_push(&redis->waiting, op);
}

/* "MOVED 3999 127.0.0.1:6381": the node, and the slot's place from now on. */
static struct redis_node *node_named(struct redis *redis, const struct redis_conn *conn,
                                     const char *text, size_t len, bool moved)
{
    const char *at = memchr(text, ' ', len);
    struct kvt_remote_seed seed;
    struct redis_node *node;
    unsigned long slot;
    char *end;
    char copy[512];

    if (!at || len >= sizeof(copy))
        return NULL;
    memcpy(copy, text, len);
    copy[len] = '\0';
    slot = strtoul(copy + (at - text) + 1, &end, 10);
    if (*end != ' ' || slot >= KVT_RESP_SLOTS ||
        !kvt_remote_host_parse(end + 1, strlen(end + 1), conn->node->at.host, &seed))
        return NULL;
    node = node_at(redis, &seed);
    if (!node)
        return NULL;
    node->listed = true;
    if (moved && conn->node->master && redis->slots[slot] == (uint16_t)(node - redis->nodes + 1)) {
        conn->node->no_reads = true; /* we knew: it does not answer reads itself */
    } else if (moved) {
        redis->slots[slot] = (uint16_t)(node - redis->nodes + 1);
        redis->mode = MODE_CLUSTER;
        redis->want_map = true;
    }
    return node;
}

static bool says(const char *text, size_t len, const char *word)
{
    return len >= strlen(word) && memcmp(text, word, strlen(word)) == 0;
}

bool redis_redirected(struct redis *redis, struct redis_conn *conn, struct redis_op *op,
                      const char *text, size_t len)
{
    bool moved = says(text, len, "MOVED "), ask = says(text, len, "ASK ");
    struct redis_node *node;

    if (op->kind == REDIS_SLOTS || op->kind == REDIS_SCAN || op->hops >= REDIS_HOPS)
        return false;
    op->asking = 0;
    if (moved || ask) {
        node = node_named(redis, conn, text, len, moved);
        if (!node)
            return false;
        (void)atomic_fetch_add_explicit(&redis->redirects, 1, memory_order_relaxed);
        op->hops++;
        op->asking = ask;
        op->replica = false; /* by the server's word, whatever the map says that it is */
        op->no_replica = true;
        redis_give(redis, node, op);
        return true;
    }
    if (says(text, len, "TRYAGAIN") || says(text, len, "READONLY")) {
        redis->want_map = true;
        later(redis, op);
        return true;
    }
    if (says(text, len, "CLUSTERDOWN") || says(text, len, "MASTERDOWN"))
        redis->want_map = true;
    return false;
}
