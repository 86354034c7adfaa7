/* Removal of a namespace: every node that holds keys is walked with SCAN, and what a walk names is
 * removed with UNLINK, key by key. One purge at a time. A node that is down fails the purge, after
 * the others have been walked: what it holds stays, and the caller is told.
 * Threads: the backend's. Allocates nothing.
 */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "remote/redis_impl.h"

#define STEP_NS INT64_C(2000000000)

static void end(struct redis *redis)
{
    struct kvt_remote_req *req = redis->purge.req;

    redis->purge.req = NULL;
    redis_req_end(redis, req, req->status);
}

static void begin(struct redis *redis)
{
    struct redis_purge *purge = &redis->purge;
    size_t len;

    purge->req = redis->purges;
    redis->purges = purge->req->next;
    purge->req->next = NULL;
    purge->req->status = 0;
    purge->node = 0;
    purge->left = 0;
    purge->scanning = false;
    memcpy(purge->cursor, "0", 2);
    len = kvt_remote_ns_prefix(purge->req->keys, purge->pattern);
    memcpy(purge->pattern + len, "*", 2);
}

/* A server that says nothing for so long fails the purge: it may go on for as long as it is
 * answered. */
static int64_t step_end(const struct redis *redis)
{
    return KVT_MIN(redis->purge.req->deadline_ns, redis->now_ns + STEP_NS);
}

static void scan(struct redis *redis, struct redis_node *node)
{
    struct redis_op *op = redis_op_new(redis, REDIS_SCAN);

    if (!op)
        return; /* the next turn */
    if (node->unfenced && !redis->purge.req->status)
        redis->purge.req->status = -EPERM; /* a put of ours may still land there */
    op->deadline_ns = step_end(redis);
    op->purge_of = redis->purge.req;
    redis->purge.scanning = true;
    redis_give(redis, node, op);
}

void redis_purge_turn(struct redis *redis)
{
    struct redis_purge *purge = &redis->purge;

    if (!purge->req && redis->purges && (redis->mode != MODE_UNKNOWN || redis_all_down(redis)))
        begin(redis);
    if (!purge->req || purge->scanning || purge->left)
        return;
    if (redis->now_ns >= purge->req->deadline_ns) {
        if (!purge->req->status)
            purge->req->status = KVT_E_DEADLINE;
        end(redis);
        return;
    }
    if (redis->mode == MODE_UNKNOWN) { /* nobody is there who could say what there is */
        purge->req->status = -EHOSTDOWN;
        end(redis);
        return;
    }
    while (purge->node < REDIS_NODES && !redis_node_serves(redis, purge->node))
        purge->node++;
    if (purge->node == REDIS_NODES)
        end(redis);
    else
        scan(redis, &redis->nodes[purge->node]);
}

/* The walk of this node is over. */
static void next_node(struct redis_purge *purge)
{
    purge->node++;
    memcpy(purge->cursor, "0", 2);
}

void redis_purge_op_end(struct redis *redis, const struct redis_op *op, int status,
                        uint64_t removed)
{
    struct redis_purge *purge = &redis->purge;

    if (!purge->req || op->purge_of != purge->req)
        return;
    kvt_remote_removed(purge->req, removed);
    if (status && !purge->req->status)
        purge->req->status = status;
    if (op->kind == REDIS_DEL) {
        purge->left--;
        return;
    }
    purge->scanning = false;
    if (status)
        next_node(purge);
}

/* Keys are removed where the map says that they are: during a migration that is asked along. */
void redis_scan_reply(struct redis *redis, const char *bytes, size_t len)
{
    struct redis_purge *purge = &redis->purge;
    struct kvt_resp_head head;
    const char *text;
    size_t text_len, at;
    long used = kvt_resp_head(bytes, len, &head);
    int64_t names;

    if (!purge->req)
        return;
    if (used <= 0 || head.type != '*' || head.number != 2)
        goto bad;
    at = (size_t)used;
    used = kvt_resp_string(bytes + at, len - at, &text, &text_len);
    if (used <= 0 || text_len >= sizeof(purge->cursor))
        goto bad;
    memcpy(purge->cursor, text, text_len);
    purge->cursor[text_len] = '\0';
    at += (size_t)used;
    used = kvt_resp_head(bytes + at, len - at, &head);
    if (used <= 0 || head.type != '*')
        goto bad;
    at += (size_t)used;
    names = head.number;
    memcpy(purge->names, bytes, len);
    if (strcmp(purge->cursor, "0") == 0)
        next_node(purge);
    for (int64_t i = 0; i < names; i++) {
        struct redis_op *op;

        used = kvt_resp_string(purge->names + at, len - at, &text, &text_len);
        op = used > 0 ? redis_op_new(redis, REDIS_DEL) : NULL;
        if (!op)
            goto bad;
        at += (size_t)used;
        op->name = text;
        op->name_len = (uint32_t)text_len;
        op->purge_of = purge->req;
        op->deadline_ns = step_end(redis);
        purge->left++;
        redis_route(redis, op);
    }
    return;
bad:
    if (!purge->req->status)
        purge->req->status = -EIO;
}
