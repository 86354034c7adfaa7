/* Commands as text, and what each reply means. See redis_impl.h. Threads: the backend's. Allocates
 * nothing. What a server sends is not trusted: lengths are checked before a byte is taken, and what
 * no command asked for ends the connection.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "remote/redis_impl.h"

#define TEXT_MAX 512u /* of a command without its record */

/* ---- out ----------------------------------------------------------------------------------- */

static int text_of(const struct redis *redis, const struct redis_op *op, const char *name,
                   size_t len, char *out, size_t room)
{
    if (op->clean && op->kind != REDIS_DEL)
        return redis_clean_text(redis, op, out, room);
    switch (op->kind) {
    case REDIS_PROBE: /* a record's header tells all, and is as cheap as to ask whether it is there
                       */
        return snprintf(out, room, "*4\r\n$8\r\nGETRANGE\r\n$%zu\r\n%s\r\n$1\r\n0\r\n$3\r\n127\r\n",
                        len, name);
    case REDIS_GET:
        return snprintf(out, room, "*2\r\n$3\r\nGET\r\n$%zu\r\n%s\r\n", len, name);
    case REDIS_EXISTS:
        return snprintf(out, room, "*2\r\n$6\r\nEXISTS\r\n$%zu\r\n%s\r\n", len, name);
    case REDIS_DEL:
        return snprintf(out, room, "*2\r\n$6\r\nUNLINK\r\n$%zu\r\n%.*s\r\n", len, (int)len, name);
    case REDIS_SCAN:
        return snprintf(out, room,
                        "*6\r\n$4\r\nSCAN\r\n$%zu\r\n%s\r\n$5\r\nMATCH\r\n$%zu\r\n%s\r\n$5\r\n"
                        "COUNT\r\n$3\r\n512\r\n",
                        strlen(redis->purge.cursor), redis->purge.cursor,
                        strlen(redis->purge.pattern), redis->purge.pattern);
    case REDIS_SLOTS:
        return snprintf(out, room, "*2\r\n$7\r\nCLUSTER\r\n$5\r\nSLOTS\r\n");
    default:
        return -1;
    }
}

/* SET key record [NX] [PX ms]: what is before the record, and in the tail what is behind it. */
static int set_text(struct redis *redis, struct redis_conn *conn, const struct redis_op *op,
                    const char *name, size_t len, char *out, size_t room)
{
    const struct kvt_remote_req *req = op->req;
    size_t mac_len = redis->mac.on ? KVT_REMOTE_MAC_BYTES : 0;
    int64_t ttl_ns = kvt_remote_ttl(redis->ttl_ns, req->ttl_ns);
    char px[32];
    size_t at = 0;

    if (mac_len &&
        !kvt_remote_mac(&redis->mac, req->record, req->record_bytes, (uint8_t *)conn->tail))
        return -1;
    at = mac_len;
    at += (size_t)snprintf(conn->tail + at, sizeof(conn->tail) - at, "\r\n%s",
                           req->replace ? "" : "$2\r\nNX\r\n");
    if (ttl_ns) {
        int digits = snprintf(px, sizeof(px), "%" PRId64, KVT_MAX(ttl_ns / 1000000, INT64_C(1)));

        at += (size_t)snprintf(conn->tail + at, sizeof(conn->tail) - at,
                               "$2\r\nPX\r\n$%d\r\n%s\r\n", digits, px);
    }
    conn->tail_at = 0;
    conn->tail_len = at;
    conn->body = req->record;
    conn->body_left = req->record_bytes;
    conn->body_op = op;
    return snprintf(out, room, "*%d\r\n$3\r\nSET\r\n$%zu\r\n%s\r\n$%zu\r\n",
                    3 + !req->replace + (ttl_ns ? 2 : 0), len, name, req->record_bytes + mac_len);
}

bool redis_encode(struct redis *redis, struct redis_conn *conn, struct redis_op *op)
{
    char name[KVT_REMOTE_NAME_BYTES] = "";
    const char *named = name;
    char *out = conn->out + conn->out_len;
    size_t room = sizeof(conn->out) - conn->out_len, len = 0;
    int text = 0;

    if (room < TEXT_MAX)
        return false;
    if (op->asking) {
        struct redis_op *asking = redis_op_new(redis, REDIS_ASKING);

        if (!asking)
            return false;
        text = snprintf(out, room, "*1\r\n$6\r\nASKING\r\n");
        asking->sent_ns = redis->now_ns;
        redis_push(&conn->sent, asking);
        conn->out_len += (size_t)text;
        out += text;
        room -= (size_t)text;
        op->asking = 0;
    }
    if (op->name) {
        named = op->name;
        len = op->name_len;
    } else if (op->req) {
        len = kvt_remote_name(&op->req->keys[op->index], name);
    }
    if (op->kind == REDIS_SET)
        text = set_text(redis, conn, op, name, len, out, room);
    else
        text = text_of(redis, op, named, len, out, room);
    if (text < 0 || (size_t)text >= room)
        return false;
    conn->out_len += (size_t)text;
    return true;
}

/* ---- in ------------------------------------------------------------------------------------ */

static bool says(const struct kvt_resp_head *head, const char *word)
{
    return head->text_len >= strlen(word) && memcmp(head->text, word, strlen(word)) == 0;
}

static int status_of(const struct kvt_resp_head *head)
{
    if (says(head, "OOM"))
        return KVT_E_NO_SPACE;
    if (says(head, "NOPERM"))
        return -EACCES;
    if (says(head, "WRONGTYPE"))
        return KVT_E_CORRUPT; /* a list, a set: no record */
    if (says(head, "CLUSTERDOWN") || says(head, "LOADING") || says(head, "MASTERDOWN") ||
        says(head, "NOAUTH"))
        return -EHOSTDOWN;
    return -EIO;
}

#define TELL_NS INT64_C(600000000000) /* one warning in ten minutes */
#define SHOWN 201

/* What a server says, as it can go into a log: one line, no escapes. */
static const char *plain(const struct kvt_resp_head *head, char out[SHOWN])
{
    size_t len = KVT_MIN(head->text_len, (size_t)SHOWN - 1);

    for (size_t i = 0; i < len; i++)
        out[i] = head->text[i] < ' ' || head->text[i] > '~' ? '?' : head->text[i];
    out[len] = '\0';
    return out;
}

/* An error that no rule knows an answer to: told with the server's words, so that what is missing
 * there (a right, memory, a master) can be seen. */
static void tell_error(struct redis *redis, const struct redis_conn *conn,
                       const struct kvt_resp_head *head)
{
    char name[REDIS_NODE_NAME], text[SHOWN];

    if (redis->now_ns < redis->error_tell_ns)
        return;
    redis->error_tell_ns = redis->now_ns + TELL_NS;
    kvt_log(&redis->log, KVT_LOG_WARN, "remote: %s answers: %s (%s)",
            redis_node_name(conn->node, name), plain(head, text),
            says(head, "NOPERM") ? "give this user the commands that docs/remote.md lists"
                                 : "trying again; blocks are not found, put or purged meanwhile");
}

static void refused(struct redis *redis, struct redis_conn *conn, const struct kvt_resp_head *head)
{
    char name[REDIS_NODE_NAME], text[SHOWN];

    (void)atomic_fetch_add_explicit(&redis->auth_fails, 1, memory_order_relaxed);
    if (!redis->auth_told)
        kvt_log(&redis->log, KVT_LOG_WARN,
                "remote: %s refuses us: %s (set remote_auth=FILE, or correct that file; trying "
                "again)",
                redis_node_name(conn->node, name), plain(head, text));
    redis->auth_told = true;
    conn->told = true;
}

void redis_unfenced(struct redis *redis, struct redis_node *node)
{
    char name[REDIS_NODE_NAME];

    node->unfenced = true;
    if (!redis->fence_told)
        kvt_log(&redis->log, KVT_LOG_WARN,
                "remote: %s does not let us end a lost connection of ours, so purges cannot be "
                "sure of puts that were under way (allow client|id and client|kill)",
                redis_node_name(node, name));
    redis->fence_told = true;
}

/* The answer to CLIENT KILL: the connection that was lost is gone, or we may not ask for that; any
 * other one leaves the fence where it is, and PING does not make the connection READY. */
static void fence_reply(struct redis *redis, const struct redis_conn *conn,
                        const struct kvt_resp_head *head)
{
    if (head->type == '-' && !says(head, "ERR No such client")) {
        if (!says(head, "NOPERM") && !says(head, "ERR"))
            return;
        redis_unfenced(redis, conn->node);
    }
    conn->node->fence_id = 0;
}

/* AUTH to PING. false: not let in. */
static bool login_reply(struct redis *redis, struct redis_conn *conn, const struct redis_op *op,
                        const struct kvt_resp_head *head)
{
    if (op->kind == REDIS_READONLY) { /* where it is refused, reads are answered with MOVED */
        conn->node->no_reads = conn->node->no_reads && head->type != '+';
        return true;
    }
    if (op->kind == REDIS_INFO) /* this user may not ask */
        return true;
    if (op->kind == REDIS_ID) {
        conn->id = head->type == ':' && head->number > 0 ? (uint64_t)head->number : 0;
        return true;
    }
    if (op->kind == REDIS_FENCE) {
        fence_reply(redis, conn, head);
        return true;
    }
    if (head->type == '-' && !says(head, "LOADING") && !says(head, "MASTERDOWN")) {
        refused(redis, conn, head);
        return false;
    }
    if (head->type != '+')
        return false;
    if (op->kind == REDIS_AUTH)
        return true;
    if (conn->lane == LANE_WRITE && conn->node->fence_id)
        return false;
    conn->state = CONN_READY;
    conn->node->fails = 0;
    redis->auth_told = false;
    return true;
}

static void error_reply(struct redis *redis, struct redis_conn *conn, struct redis_op *op,
                        const struct kvt_resp_head *head)
{
    int status;

    if ((op->req || op->purge_of || op->clean) &&
        redis_redirected(redis, conn, op, head->text, head->text_len))
        return;
    if (redis_to_master(redis, op))
        return;
    status = status_of(head);
    if ((op->req || op->purge_of) && status != KVT_E_CORRUPT && status != -EHOSTDOWN)
        tell_error(redis, conn, head);
    redis_op_end(redis, op, status);
}

/* +, : and nil. */
static void simple_reply(struct redis *redis, struct redis_conn *conn, struct redis_op *op,
                         const struct kvt_resp_head *head)
{
    if (op->clean) {
        redis_clean_op_end(redis, op, head->type != '$' ? 0 : KVT_E_MISS, head->number);
        op->clean = false;
        redis_op_end(redis, op, 0);
        return;
    }
    switch (op->kind) {
    case REDIS_EXISTS:
        if (!op->req || head->type != ':') {
            redis_op_end(redis, op, -EIO);
        } else if (head->number) {
            redis_op_end(redis, op, KVT_E_EXISTS);
        } else {
            op->kind = REDIS_SET; /* over the connection that writes: rule 5 */
            redis_give(redis, conn->node, op);
        }
        return;
    case REDIS_SET:
        redis_op_end(redis, op, head->type == '+' ? 0 : KVT_E_EXISTS);
        return;
    case REDIS_DEL:
        if (op->req)
            kvt_remote_removed(op->req, (uint64_t)KVT_MAX(head->number, INT64_C(0)));
        if (op->purge_of)
            redis_purge_op_end(redis, op, 0, (uint64_t)KVT_MAX(head->number, INT64_C(0)));
        op->purge_of = NULL;
        redis_op_end(redis, op, head->type != ':' ? -EIO : conn->node->unfenced ? -EPERM : 0);
        return;
    case REDIS_PROBE:
    case REDIS_GET:
        redis_op_end(redis, op, KVT_E_MISS);
        return;
    default:
        redis_op_end(redis, op, 0);
        return;
    }
}

/* A body of `len` bytes follows: where to. */
static void body_begin(struct redis *redis, struct redis_conn *conn, const struct redis_op *op,
                       size_t len)
{
    size_t mac_len = redis->mac.on ? KVT_REMOTE_MAC_BYTES : 0;

    conn->in_body = true;
    conn->into = NULL;
    conn->into_left = 0;
    conn->mac_left = 0;
    conn->body_good = false;
    conn->body_len = len;
    conn->skip_left = len + 2;
    if (op->kind == REDIS_HOLDER && op->clean && len < sizeof(redis->clean.holder)) {
        memset(redis->clean.holder, 0, sizeof(redis->clean.holder));
        conn->into = (uint8_t *)redis->clean.holder;
        conn->into_left = len;
        conn->skip_left = 2;
        conn->body_good = true;
    }
    if (op->kind == REDIS_INFO && !redis->about_taken) {
        redis->about_taken = true;
        conn->into = (uint8_t *)redis->about;
        conn->into_left = KVT_MIN(len, sizeof(redis->about) - 1);
        conn->skip_left = len - conn->into_left + 2;
        conn->body_good = true;
    }
    if (!op->req)
        return;
    if (op->kind == REDIS_PROBE && len == sizeof(struct kvt_record_header)) {
        conn->into = (uint8_t *)&op->req->found[op->index].header;
        conn->into_left = len;
        conn->skip_left = 2;
        conn->body_good = true;
    } else if (op->kind == REDIS_GET &&
               (len == op->record_bytes + mac_len ||
                (!mac_len && len == op->record_bytes + KVT_REMOTE_MAC_BYTES))) {
        conn->into = op->req->record;
        conn->into_left = op->record_bytes;
        conn->mac_left = mac_len;
        conn->skip_left = len - op->record_bytes - mac_len + 2;
        conn->body_good = true;
    } else if (op->kind == REDIS_GET && len >= sizeof(conn->other)) { /* what is it then? */
        conn->into = (uint8_t *)&conn->other;
        conn->into_left = sizeof(conn->other);
        conn->skip_left = len - sizeof(conn->other) + 2;
    }
}

/* A body of another length than was expected. */
static int other_body(const struct redis *redis, const struct redis_conn *conn,
                      const struct redis_op *op)
{
    if (op->kind == REDIS_PROBE) /* GETRANGE of nothing is the empty string */
        return conn->body_len ? KVT_E_CORRUPT : KVT_E_MISS;
    if (conn->body_len < sizeof(conn->other))
        return KVT_E_CORRUPT;
    return kvt_remote_other(&redis->mac, &op->req->keys[op->index], &conn->other, conn->body_len);
}

void redis_body_end(struct redis *redis, struct redis_conn *conn)
{
    struct redis_op *op = redis_pop(&conn->sent);
    bool good = conn->body_good;

    conn->in_body = false;
    conn->into = NULL;
    if (op->kind == REDIS_INFO) {
        if (good) /* redis_about() looks at the text behind it */
            atomic_store_explicit(&redis->about_ready, true, memory_order_release);
        return;
    }
    if (!op->req) /* who holds the lease; or nobody wants it any more */
        redis_op_end(redis, op, good || !op->clean ? 0 : KVT_E_MISS);
    else if (!good)
        redis_op_end(redis, op, other_body(redis, conn, op));
    else if (op->kind == REDIS_PROBE)
        redis_op_end(redis, op, 0);
    else
        redis_op_end(redis, op, kvt_remote_unseal(&redis->mac, op->req, conn->mac));
}

/* A reply that is kept whole: take what there is of it. false: it makes no sense. */
static bool gather(struct redis *redis, struct redis_conn *conn, bool *more)
{
    struct redis_agg *agg = conn->agg;
    size_t before = agg->len, have = conn->in_len - conn->in_at;
    size_t part = KVT_MIN(have, REDIS_AGG - before);
    struct redis_op *op = conn->sent.head;
    long whole;

    memcpy(agg->bytes + before, conn->in + conn->in_at, part);
    agg->len += part;
    whole = kvt_resp_whole(agg->bytes, agg->len);
    if (whole < 0 || (whole == 0 && agg->len == REDIS_AGG))
        return false;
    conn->in_at += whole ? (size_t)whole - before : part;
    *more = whole != 0;
    if (!whole)
        return true;
    conn->agg = NULL;
    (void)redis_pop(&conn->sent);
    if (op->kind == REDIS_SLOTS)
        redis_map_reply(redis, conn, agg->bytes, (size_t)whole);
    else if (op->purge_of)
        redis_scan_reply(redis, agg->bytes, (size_t)whole);
    else if (op->clean)
        redis_clean_scan_reply(redis, agg->bytes, (size_t)whole);
    redis_op_end(redis, op, 0);
    return true;
}

/* One reply, or the beginning of one. false: nonsense. *more: there may be another one. */
static bool one_reply(struct redis *redis, struct redis_conn *conn, bool *more)
{
    struct redis_op *op = conn->sent.head;
    struct kvt_resp_head head;
    long used;

    *more = false;
    if (conn->agg)
        return gather(redis, conn, more);
    used = kvt_resp_head(conn->in + conn->in_at, conn->in_len - conn->in_at, &head);
    if (used <= 0)
        return used == 0;
    if (!op || op == conn->body_op)
        return false; /* nobody asked; or before it has all of the record: what follows in the slot
                         would be somebody else's soon */
    if (op->kind == REDIS_SCAN && !op->purge_of && !op->clean)
        return false; /* too late: its place is another one's by now */
    *more = true;
    if (op->kind == REDIS_SLOTS || op->kind == REDIS_SCAN) {
        conn->agg = op->kind == REDIS_SLOTS ? &redis->map_agg
                    : op->clean             ? &redis->clean_agg
                                            : &redis->scan_agg;
        if (head.type != '-' || op->kind == REDIS_SLOTS) {
            conn->agg->len = 0;
            return true; /* gather() takes it from its start */
        }
        conn->agg = NULL;
    }
    conn->in_at += (size_t)used;
    if (head.type == '$' && head.number >= 0) {
        body_begin(redis, conn, op, (size_t)head.number);
        *more = false;
        return true;
    }
    if (head.type == '*')
        return false;
    (void)redis_pop(&conn->sent);
    if (op->kind >= REDIS_AUTH)
        return login_reply(redis, conn, op, &head);
    if (head.type == '-')
        error_reply(redis, conn, op, &head);
    else
        simple_reply(redis, conn, op, &head);
    return true;
}

bool redis_replies(struct redis *redis, struct redis_conn *conn)
{
    bool more = true;

    while (more && conn->in_at < conn->in_len) {
        if (!one_reply(redis, conn, &more))
            return false;
        if (conn->state == CONN_CLOSED)
            return true;
    }
    return true;
}
