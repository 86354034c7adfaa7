/* The door: a message is checked here (sizes, counts, handle, keys) before any other file sees it,
 * and replies are made and sent here.
 *
 * Trust: a client may send any bytes. What is malformed is answered with KVT_E_INVAL when its
 * header can be read; a message whose own length lies is refused to the transport. Threads: the
 * store's owner.
 */
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"

struct handler {
    void (*handle)(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg);
    uint16_t fixed_bytes; /* before the entries */
    uint16_t entry_bytes; /* of each of msg.count entries; 0: count is not looked at */
    uint8_t takes_ns;
    uint8_t keys; /* the entries are keys */
};

static const struct handler handlers[] = {
    [KVT_OP_NS_OPEN] = {kvt_handle_ns_open, sizeof(struct kvt_msg_ns_open), 0, 0, 0},
    [KVT_OP_LOOKUP] = {kvt_handle_lookup, sizeof(struct kvt_msg_keys), 40, 1, 1},
    [KVT_OP_ALLOC] = {kvt_handle_alloc, sizeof(struct kvt_msg_alloc), 40, 1, 1},
    [KVT_OP_COMMIT] = {kvt_handle_commit, sizeof(struct kvt_msg_slots), 24, 0, 0},
    [KVT_OP_ABORT] = {kvt_handle_abort, sizeof(struct kvt_msg_slots), 24, 0, 0},
    [KVT_OP_ACQUIRE] = {kvt_handle_acquire, sizeof(struct kvt_msg_acquire), 40, 1, 1},
    [KVT_OP_CANCEL] = {kvt_handle_cancel, sizeof(struct kvt_msg_cancel), 0, 0, 0},
    [KVT_OP_RELEASE] = {kvt_handle_release, sizeof(struct kvt_msg_slots), 24, 0, 0},
    [KVT_OP_TOUCH] = {kvt_handle_touch, sizeof(struct kvt_msg_keys), 40, 1, 1},
    [KVT_OP_PREFETCH] = {kvt_handle_prefetch, sizeof(struct kvt_msg_keys), 40, 1, 1},
    [KVT_OP_PIN] = {kvt_handle_pin, sizeof(struct kvt_msg_keys), 40, 1, 1},
    [KVT_OP_UNPIN] = {kvt_handle_pin, sizeof(struct kvt_msg_keys), 40, 1, 1},
    [KVT_OP_PURGE] = {kvt_handle_purge, sizeof(struct kvt_msg_keys), 40, 1, 1},
    [KVT_OP_FLUSH] = {kvt_handle_flush, sizeof(struct kvt_msg), 0, 0, 0},
    [KVT_OP_USAGE] = {kvt_handle_usage, sizeof(struct kvt_msg_usage), 0, 0, 0},
    [KVT_OP_STAT] = {kvt_handle_stat, sizeof(struct kvt_msg), 0, 0, 0},
    [KVT_OP_PURGE_NS] = {kvt_handle_purge_ns, sizeof(struct kvt_msg_purge_ns), 0, 0, 0},
    [KVT_OP_HIST] = {kvt_handle_hist, sizeof(struct kvt_msg), 0, 0, 0},
    [KVT_OP_NS_CLOSE] = {kvt_handle_ns_close, sizeof(struct kvt_msg), 0, 1, 0},
};

static_assert(sizeof(struct kvt_slot_ref) == 24, "wire slot reference");

struct kvt_msg *kvt_reply_begin(struct kvt_store *store, const struct kvt_msg *msg, size_t bytes)
{
    struct kvt_msg *reply = (struct kvt_msg *)store->reply;

    bytes = kvt_round_up(bytes, 8);
    memset(reply, 0, bytes);
    reply->bytes = (uint32_t)bytes;
    reply->op = KVT_OP_REPLY;
    reply->reply_to = msg->op;
    reply->cookie = msg->cookie;
    reply->ns = msg->ns;
    return reply;
}

void kvt_reply_send(struct kvt_store *store, uint32_t client, struct kvt_msg *reply)
{
    store->params.reply(store->params.reply_ctx, client, reply);
}

void kvt_reply_status(struct kvt_store *store, uint32_t client, uint16_t op, uint64_t cookie,
                      int32_t status)
{
    struct kvt_msg request = {.op = op, .cookie = cookie};
    struct kvt_msg *reply = kvt_reply_begin(store, &request, sizeof(*reply));

    reply->status = status;
    kvt_reply_send(store, client, reply);
}

void kvt_key_full(const struct kvt_store *store, uint32_t ns, const struct kvt_msg_key *key,
                  struct kvt_full_key *out)
{
    memset(out, 0, sizeof(*out));
    memcpy(out->ns, kvt_namespace_at(&store->spaces, ns)->id, KVT_NS_BYTES);
    memcpy(out->hash, key->hash, key->hash_len);
    out->hash_len = key->hash_len;
    out->group = key->group;
    out->shard = key->shard;
}

static bool keys_valid(const struct kvt_msg_key *keys, uint32_t count, uint16_t group)
{
    for (uint32_t i = 0; i < count; i++)
        if (!keys[i].hash_len || keys[i].hash_len > KVT_HASH_BYTES_MAX || keys[i].group != group)
            return false;
    return true;
}

/* ops that are answered only when the client gave a cookie */
static bool is_silent(uint16_t op)
{
    return op == KVT_OP_COMMIT || op == KVT_OP_ABORT || op == KVT_OP_RELEASE ||
           op == KVT_OP_TOUCH || op == KVT_OP_CANCEL || op == KVT_OP_NS_CLOSE;
}

/* A refused ACQUIRE is owed one GRANT per key, which its count says. */
static void refuse(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    store->counts.bad_messages++;
    if (msg->op == KVT_OP_ACQUIRE) {
        for (uint32_t i = 0; i < KVT_MIN(msg->count, KVT_MSG_KEYS_MAX); i++) {
            struct kvt_msg_grant *grant =
                (struct kvt_msg_grant *)kvt_reply_begin(store, msg, sizeof(*grant));

            grant->msg.op = KVT_OP_GRANT;
            grant->msg.status = KVT_E_INVAL;
            grant->index = i;
            kvt_reply_send(store, client, &grant->msg);
        }
    } else if (msg->cookie || !is_silent(msg->op)) {
        kvt_reply_status(store, client, msg->op, msg->cookie, KVT_E_INVAL);
    }
}

int kvt_store_handle(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    const struct handler *handler;
    uint64_t bytes;

    store->activity++;
    kvt_ttl_tick(store);
    if (msg->bytes < sizeof(*msg) || msg->bytes % 8 || msg->bytes > KVT_MSG_BYTES_MAX) {
        store->counts.bad_messages++;
        return KVT_E_INVAL;
    }
    /* Who only watches does not keep the store from being idle. */
    if (msg->op != KVT_OP_STAT && msg->op != KVT_OP_USAGE && msg->op != KVT_OP_HIST)
        store->last_message_ns = kvt_store_now(store);
    handler = msg->op < KVT_ARRAY_LEN(handlers) ? &handlers[msg->op] : NULL;
    if (!handler || !handler->handle || msg->count > KVT_MSG_KEYS_MAX) {
        refuse(store, client, msg);
        return 1;
    }
    bytes = handler->fixed_bytes + (uint64_t)handler->entry_bytes * msg->count;
    if (msg->bytes != kvt_round_up(bytes, 8) ||
        (handler->takes_ns && !kvt_namespaces_valid(&store->spaces, msg->ns)) ||
        (handler->keys &&
         !keys_valid((const struct kvt_msg_key *)((const uint8_t *)msg + handler->fixed_bytes),
                     msg->count,
                     kvt_namespace_at(&store->spaces, kvt_handle_number(msg->ns))->group))) {
        refuse(store, client, msg);
        return 1;
    }
    handler->handle(store, client, msg);
    return 0;
}
