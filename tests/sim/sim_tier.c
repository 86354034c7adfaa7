/* What is on the server that machines share: see sim_net.h. Objects are bytes, as on a real one; a
 * model beside each says what it was, who put it and when. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "sim/sim_net.h"

static void object_free(struct sim_object *object)
{
    free(object->bytes);
    memset(object, 0, sizeof *object);
}

/* What was there is remembered: it may come back. */
static void leave(struct sim_name *name)
{
    if (!name->now.bytes)
        return;
    object_free(&name->before);
    name->before = name->now;
    memset(&name->now, 0, sizeof name->now);
}

static void object_copy(struct sim *sim, struct sim_object *to, const struct sim_object *from)
{
    object_free(to);
    *to = *from;
    to->bytes = malloc(from->len);
    SIM_CHECK(sim, to->bytes);
    memcpy(to->bytes, from->bytes, from->len);
}

void sim_tier_start(struct sim_net *net)
{
    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        for (uint32_t i = 0; i < SIM_BLOCKS; i++) {
            struct sim_name *name = &net->names[ns * SIM_BLOCKS + i];
            struct kvt_full_key key;

            sim_full_key(ns, i, &key);
            name->ns = ns;
            name->index = i;
            (void)kvt_remote_name(&key, name->text);
        }
}

void sim_tier_stop(struct sim_net *net)
{
    for (uint32_t i = 0; i < SIM_NAMES; i++) {
        object_free(&net->names[i].now);
        object_free(&net->names[i].before);
    }
    while (net->ghost_count)
        object_free(&net->ghosts[--net->ghost_count].object);
}

struct sim_name *sim_tier_find(struct sim_net *net, const struct kvt_full_key *key)
{
    char text[KVT_REMOTE_NAME_BYTES];
    size_t len = kvt_remote_name(key, text);

    for (uint32_t i = 0; i < SIM_NAMES; i++)
        if (memcmp(net->names[i].text, text, len + 1) == 0)
            return &net->names[i];
    return NULL;
}

static void land(struct sim_net *net, struct sim_ghost *ghost)
{
    struct sim_name *name = ghost->name;

    if (name->now.bytes && !ghost->replace) {
        object_free(&ghost->object);
        return;
    }
    leave(name);
    name->now = ghost->object;
    name->now.landed = net->op;
}

void sim_tier_tick(struct sim_net *net, int64_t now_ns)
{
    for (uint32_t i = net->ghost_count; i-- > 0;) {
        if (net->ghosts[i].land_ns > now_ns)
            continue;
        land(net, &net->ghosts[i]);
        net->ghosts[i] = net->ghosts[--net->ghost_count];
    }
}

/* What a server has that evicts by itself. */
static struct sim_object *there(struct sim *sim, struct sim_name *name)
{
    if (name->now.bytes && name->now.until_ns <= sim->now_ns)
        leave(name);
    return name->now.bytes ? &name->now : NULL;
}

/* The object that answers for a name, as it goes wrong on the way; its bytes are the caller's.
 * false: none. */
static bool answer_of(struct sim_link *link, const struct sim_flight *flight, struct sim_name *name,
                      struct sim_object *out)
{
    struct sim_net *net = link->sim->net;
    struct sim_object *object = there(link->sim, name);

    memset(out, 0, sizeof *out);
    if (flight->kind == NET_STALE && name->before.bytes) {
        object = &name->before;
        object->landed = net->op; /* it is there, for whoever asks */
        object->machine = SIM_NOBODY;
    }
    if (flight->kind == NET_FOREIGN) {
        struct sim_name *other = &net->names[sim_net_roll(net, SIM_NAMES)];

        if (other != name && there(link->sim, other))
            object = &other->now;
    }
    if (!object)
        return false;
    object_copy(link->sim, out, object);
    if (flight->kind == NET_FLIP) {
        uint32_t bit = sim_net_roll(net, (sim_net_roll(net, 2) ? out->len : 128u) * 8u);

        out->bytes[bit / 8 % out->len] ^= (uint8_t)(1u << bit % 8);
        out->good = false;
    }
    if (flight->kind == NET_CUT) {
        out->len = sim_net_roll(net, out->len);
        out->good = false;
    }
    return true;
}

/* As the backends do it: redis_reply.c. */
static int32_t take(const struct sim_net *net, const struct kvt_remote_req *req,
                    const struct sim_object *object)
{
    uint32_t mac_bytes = net->mac.on ? KVT_REMOTE_MAC_BYTES : 0;
    struct kvt_record_header header;

    if (object->len == req->record_bytes + mac_bytes ||
        (!mac_bytes && object->len == req->record_bytes + KVT_REMOTE_MAC_BYTES)) {
        memcpy(req->record, object->bytes, req->record_bytes);
        return kvt_remote_unseal(&net->mac, req, object->bytes + req->record_bytes);
    }
    if (object->len < sizeof header)
        return KVT_E_CORRUPT;
    memcpy(&header, object->bytes, sizeof header);
    return kvt_remote_other(&net->mac, req->keys, &header, object->len);
}

int32_t sim_tier_get(struct sim_link *link, struct sim_flight *flight)
{
    struct kvt_remote_req *req = flight->req;
    struct sim_object object;
    int32_t status;

    if (!flight->name || !answer_of(link, flight, flight->name, &object))
        return KVT_E_MISS;
    status = take(link->sim->net, req, &object);
    flight->good = object.good && object.owner == flight->name && sim_maps[object.map] == req->map;
    flight->origin = object.machine == link->sim->number ? object.stored : object.landed;
    free(object.bytes);
    return status;
}

static void other_header(struct sim_link *link, struct kvt_record_header *header, uint32_t ns)
{
    uint32_t map = sim_net_roll(link->sim->net, 3);

    if (!sim_net_roll(link->sim->net, 3))
        header->key.hash[0] ^= 1;
    header->map = sim_maps[map];
    header->record_bytes = link->sim->shape.pages[ns][map] * KVT_PAGE_BYTES;
    header->payload_bytes = header->record_bytes - (uint32_t)sizeof *header;
}

void sim_tier_probe(struct sim_link *link, struct sim_flight *flight)
{
    struct kvt_remote_req *req = flight->req;

    for (uint32_t i = 0; i < req->count; i++) {
        struct sim_name *name = sim_tier_find(link->sim->net, &req->keys[i]);
        struct kvt_remote_found *found = &req->found[i];
        struct sim_object object;

        SIM_CHECK(link->sim, name);
        if (flight->kind == NET_UNKNOWN && sim_net_roll(link->sim->net, 2)) {
            found->status = req->status = -EIO;
            continue;
        }
        found->status = KVT_E_MISS;
        if (!answer_of(link, flight, name, &object))
            continue;
        found->status = object.len < sizeof found->header ? KVT_E_CORRUPT : 0;
        if (!object.len)
            found->status = KVT_E_MISS;
        if (!found->status)
            memcpy(&found->header, object.bytes, sizeof found->header);
        if (!found->status && flight->kind == NET_HEADER)
            other_header(link, &found->header, name->ns);
        free(object.bytes);
    }
}

/* What a PUT would leave there. What a machine puts has to be exact, and its own to give away. */
static void made_of(struct sim_link *link, struct sim_flight *flight, struct sim_object *object)
{
    struct sim *sim = link->sim;
    const struct kvt_remote_req *req = flight->req;
    const struct kvt_record_header *header = req->record;
    uint32_t map = sim_map_index(header->map);
    uint8_t *bytes = malloc(req->record_bytes + KVT_REMOTE_MAC_BYTES);
    bool good;

    SIM_CHECK(sim, bytes && map < 3);
    good = sim_judge(sim, flight->name->ns, flight->name->index, map, req->record,
                     req->record_bytes, header->checksum) == 0;
    if (!good && !sim->lied) /* what was read from a drive is verified by whoever loads it */
        sim_fail(sim, "a damaged record is put to the shared tier");
    memcpy(bytes, req->record, req->record_bytes);
    if (sim->net->mac.on)
        SIM_CHECK(sim, kvt_remote_mac(&sim->net->mac, req->record, req->record_bytes,
                                      bytes + req->record_bytes));
    *object = (struct sim_object){.bytes = bytes,
                                  .len = req->record_bytes +
                                         (sim->net->mac.on ? KVT_REMOTE_MAC_BYTES : 0),
                                  .map = map,
                                  .machine = sim->number,
                                  .owner = flight->name,
                                  .good = good,
                                  .stored = flight->origin,
                                  .until_ns = req->ttl_ns ? sim->now_ns + req->ttl_ns : INT64_MAX};
}

/* later: it has been sent, and nobody knows. */
int32_t sim_tier_put(struct sim_link *link, struct sim_flight *flight, bool later)
{
    struct sim_net *net = link->sim->net;
    struct sim_ghost ghost = {.name = flight->name, .replace = flight->req->replace};

    if (!later && there(link->sim, ghost.name) && !ghost.replace)
        return KVT_E_EXISTS;
    if (later && net->ghost_count == SIM_GHOSTS)
        return 0;
    made_of(link, flight, &ghost.object);
    ghost.land_ns = link->sim->now_ns + (int64_t)sim_net_roll(net, 2000000000);
    if (later)
        net->ghosts[net->ghost_count++] = ghost;
    else
        land(net, &ghost);
    link->sim->counts.put++;
    return 0;
}

bool sim_tier_meant(const struct kvt_remote_req *req, const struct sim_name *name)
{
    char text[KVT_REMOTE_NAME_BYTES];

    if (req->op == KVT_REMOTE_DROP_NS)
        return memcmp(name->text, text, kvt_remote_ns_prefix(&req->keys[0], text)) == 0;
    for (uint32_t i = 0; i < req->count; i++)
        if (memcmp(name->text, text, kvt_remote_name(&req->keys[i], text) + 1) == 0)
            return true;
    return false;
}

int32_t sim_tier_drop(struct sim_link *link, struct sim_flight *flight)
{
    struct sim_net *net = link->sim->net;
    int32_t status = 0;

    for (uint32_t i = net->ghost_count; i-- > 0;) { /* as redis_login.c: CLIENT KILL */
        struct sim_ghost *ghost = &net->ghosts[i];

        if (ghost->object.machine != link->sim->number)
            continue;
        if (!net->may_kill) {
            status = -EPERM;
            continue;
        }
        object_free(&ghost->object);
        *ghost = net->ghosts[--net->ghost_count];
    }
    for (uint32_t i = 0; i < SIM_NAMES; i++)
        if (sim_tier_meant(flight->req, &net->names[i]) && there(link->sim, &net->names[i])) {
            leave(&net->names[i]);
            kvt_remote_removed(flight->req, 1);
        }
    return status;
}

void sim_tier_orphan(struct sim_net *net, uint32_t machine)
{
    for (uint32_t i = 0; i < net->ghost_count; i++)
        if (net->ghosts[i].object.machine == machine)
            net->ghosts[i].object.machine = SIM_NOBODY;
}

void sim_tier_purged(struct sim *sim, uint64_t sent, uint32_t ns, uint32_t index)
{
    const struct sim_name *name;
    uint64_t origin;

    if (!sim->net)
        return;
    name = &sim->net->names[ns * SIM_BLOCKS + index];
    origin = name->now.machine == sim->number ? name->now.stored : name->now.landed;

    sim->counts.reached++;
    if (name->now.bytes && origin < sent)
        sim_fail(sim,
                 "namespace %u, block %u is in the shared tier after its purge: of operation %llu, "
                 "purged in %llu",
                 ns, index, (unsigned long long)origin, (unsigned long long)sent);
}

/* ---- what happens to it at rest */

static void forge(struct sim_object *object, uint32_t at)
{
    struct kvt_record_header *header = (struct kvt_record_header *)(void *)object->bytes;

    object->bytes[sizeof *header + at % 64] ^= 0x55;
    header->checksum = kvt_record_checksum(object->bytes, header->record_bytes);
}

static bool spoil(struct sim_net *net, struct sim *sim, struct sim_name *name, uint32_t kind)
{
    struct sim_object *object = &name->now;
    struct kvt_record_header *header = (struct kvt_record_header *)(void *)object->bytes;
    const struct sim_name *other = &net->names[sim_net_roll(net, SIM_NAMES)];
    struct sim_object was = *object;

    if ((kind == REST_FORGED || kind == REST_NEWER) &&
        (!object->good || (kind == REST_FORGED && !net->mac.on)))
        return false;
    object->good = false;
    if (kind == REST_FLIP) {
        object->bytes[sim_net_roll(net, object->len)] ^= (uint8_t)(1u << sim_net_roll(net, 8));
    } else if (kind == REST_CUT) {
        object->len = sim_net_roll(net, object->len - 1) + 1;
    } else if (kind == REST_FOREIGN && other != name && other->now.bytes) {
        object->bytes = NULL;
        object_copy(sim, object, &other->now);
        free(was.bytes);
        object->machine = was.machine; /* it has been under this name for as long as before */
        object->stored = was.stored;
        object->landed = was.landed;
    } else if (kind == REST_NEWER) {
        header->version++;
        header->checksum = kvt_record_checksum(object->bytes, header->record_bytes);
    } else if (kind == REST_FORGED) {
        forge(object, sim_net_roll(net, 64));
    } else {
        object->good = was.good;
        return false;
    }
    return true;
}

void sim_tier_fault(struct sim_net *net, struct sim *sim, uint32_t kind)
{
    uint32_t start = sim_net_roll(net, SIM_NAMES), done = 0;
    uint32_t most = kind == REST_ALL_GONE ? SIM_NAMES : 1 + sim_net_roll(net, 6);

    for (uint32_t i = 0; i < SIM_NAMES && done < most; i++) {
        struct sim_name *name = &net->names[(start + i) % SIM_NAMES];

        if (kind == REST_BACK && net->replicas && name->before.bytes) {
            struct sim_object object = name->before;

            name->before = name->now;
            name->now = object;
            name->now.machine = SIM_NOBODY;
            name->now.landed = net->op;
            done++;
        } else if (kind == REST_GONE || kind == REST_ALL_GONE) {
            done += name->now.bytes != NULL;
            leave(name);
        } else if (name->now.bytes && name->now.len > sizeof(struct kvt_record_header)) {
            done += spoil(net, sim, name, kind);
        }
    }
    sim_tell(sim, "%u records from %u on", done, start);
    sim->counts.net[kind] += done;
}
