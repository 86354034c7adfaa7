/* See mem_remote.h. */
#include "support/mem_remote.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier/error.h"
#include "remote/remote_seal.h"

static struct mem_remote *of(struct kvt_remote *remote)
{
    return (struct mem_remote *)(void *)remote;
}

struct mem_object *mem_tier_find(struct mem_tier *tier, const struct kvt_full_key *key)
{
    for (uint32_t i = 0; i < tier->count; i++)
        if (memcmp(&tier->objects[i].key, key, sizeof(*key)) == 0)
            return &tier->objects[i];
    return NULL;
}

static void remove_at(struct mem_tier *tier, uint32_t i)
{
    free(tier->objects[i].record);
    tier->objects[i] = tier->objects[--tier->count];
}

void mem_tier_free(struct mem_tier *tier)
{
    while (tier->count)
        remove_at(tier, tier->count - 1);
}

static int probe(struct mem_remote *remote, struct kvt_remote_req *req)
{
    remote->probes++;
    remote->probed += req->count;
    for (uint32_t i = 0; i < req->count; i++) {
        const struct mem_object *object = mem_tier_find(remote->tier, &req->keys[i]);

        req->found[i].status = object ? 0 : KVT_E_MISS;
        if (object)
            memcpy(&req->found[i].header, object->record, sizeof(req->found[i].header));
    }
    return 0;
}

static int get(struct mem_remote *remote, struct kvt_remote_req *req)
{
    static const struct kvt_remote_mac no_mac;
    const struct mem_object *object = mem_tier_find(remote->tier, req->keys);

    remote->gets++;
    if (!object)
        return KVT_E_MISS;
    if (object->record_bytes != req->record_bytes)
        return KVT_E_STALE;
    memcpy(req->record, object->record, object->record_bytes);
    if (remote->flips) {
        remote->flips--;
        ((uint8_t *)req->record)[req->record_bytes / 2] ^= 1;
    }
    return kvt_remote_unseal(&no_mac, req, NULL);
}

static int put(struct mem_remote *remote, struct kvt_remote_req *req)
{
    struct mem_tier *tier = remote->tier;
    struct mem_object *object = mem_tier_find(tier, req->keys);

    remote->puts++;
    if (object && !req->replace)
        return KVT_E_EXISTS;
    if (!object && tier->count == (tier->room ? tier->room : MEM_REMOTE_OBJECTS))
        return KVT_E_NO_SPACE;
    if (!object)
        object = &tier->objects[tier->count++];
    else
        free(object->record);
    object->key = req->keys[0];
    object->record_bytes = req->record_bytes;
    object->record = malloc(req->record_bytes);
    memcpy(object->record, req->record, req->record_bytes);
    return 0;
}

static int drop(struct mem_remote *remote, struct kvt_remote_req *req)
{
    struct mem_tier *tier = remote->tier;

    req->removed = 0;
    for (uint32_t i = tier->count; i-- > 0;) {
        bool meant = req->op == KVT_REMOTE_DROP_NS &&
                     memcmp(tier->objects[i].key.ns, req->keys[0].ns, KVT_NS_BYTES) == 0;

        for (uint32_t k = 0; req->op == KVT_REMOTE_DROP && k < req->count && !meant; k++)
            meant = memcmp(&tier->objects[i].key, &req->keys[k], sizeof(req->keys[k])) == 0;
        if (!meant)
            continue;
        remove_at(tier, i);
        kvt_remote_removed(req, 1);
    }
    return 0;
}

static int mem_submit(struct kvt_remote *self, struct kvt_remote_req *req)
{
    struct mem_remote *remote = of(self);

    if (remote->refuse || remote->stopped)
        return -EAGAIN;
    if (req->op == KVT_REMOTE_DROP || req->op == KVT_REMOTE_DROP_NS) {
        req->next = remote->queue; /* nothing promises an order: these overtake all others */
        remote->queue = req;
    } else {
        struct kvt_remote_req **link = &remote->queue;

        while (*link)
            link = &(*link)->next;
        req->next = NULL;
        *link = req;
    }
    return 0;
}

static void carry_out(struct mem_remote *remote, struct kvt_remote_req *req)
{
    req->status = remote->fail;
    for (uint32_t i = 0; remote->fail && req->op == KVT_REMOTE_PROBE && i < req->count; i++)
        req->found[i].status = remote->fail;
    if (remote->fail)
        return;
    if (req->op <= KVT_REMOTE_PUT)
        remote->ttl_ns[req->op] = req->ttl_ns;
    switch (req->op) {
    case KVT_REMOTE_PROBE:
        req->status = probe(remote, req);
        break;
    case KVT_REMOTE_GET:
        req->status = get(remote, req);
        break;
    case KVT_REMOTE_PUT:
        req->status = put(remote, req);
        break;
    case KVT_REMOTE_DROP:
    case KVT_REMOTE_DROP_NS:
        req->status = drop(remote, req);
        break;
    }
}

static uint32_t mem_reap(struct kvt_remote *self, struct kvt_remote_req **done, uint32_t max)
{
    struct mem_remote *remote = of(self);
    struct kvt_remote_req **link = &remote->queue;
    uint32_t count = 0;

    while (*link && count < max && !remote->hold) {
        struct kvt_remote_req *req = *link;

        if (remote->hold_drops && req->op >= KVT_REMOTE_DROP) {
            link = &req->next;
            continue;
        }
        *link = req->next;
        carry_out(remote, req);
        done[count++] = req;
    }
    return count;
}

static int mem_event_fd(struct kvt_remote *self)
{
    (void)self;
    return -1;
}

static void mem_stats(struct kvt_remote *self, struct kvt_remote_stats *stats)
{
    *stats = (struct kvt_remote_stats){.nodes = 1, .nodes_down = of(self)->fail != 0};
}

static void mem_stop(struct kvt_remote *self)
{
    of(self)->stopped = true;
    of(self)->queue = NULL;
}

static const struct kvt_remote_ops mem_ops = {.name = "mem",
                                              .submit = mem_submit,
                                              .reap = mem_reap,
                                              .event_fd = mem_event_fd,
                                              .stats = mem_stats,
                                              .stop = mem_stop,
                                              .destroy = mem_stop};

void mem_remote_init(struct mem_remote *remote, struct mem_tier *tier)
{
    memset(remote, 0, sizeof(*remote));
    remote->remote.ops = &mem_ops;
    remote->tier = tier;
}
