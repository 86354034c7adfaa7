/* One machine's way to the server that machines share: what the store takes for its backend
 * (remote/remote.h). See sim_net.h.
 *
 * A request acts on the server some time after it was sent, and is done some time later. As
 * remote.h says, it is done at its deadline at the latest; but for a backend that hangs. Memory of
 * a request is scribbled over while it is under way, so that a record that is seen too early is no
 * record. */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "sim/sim_net.h"
#include "store/store_remote.h"

#define HEAL_NS 1000000000
#define LATE_NS 25000000 /* of the scheduler: sim_advance() */

static struct sim_link *of(struct kvt_remote *remote)
{
    return (struct sim_link *)(void *)remote;
}

/* Whether a fault of this kind can strike a request of that sort. */
static bool strikes(uint32_t kind, const struct kvt_remote_req *req)
{
    bool answer = req->op == KVT_REMOTE_GET || req->op == KVT_REMOTE_PROBE;

    switch (kind) {
    case NET_FULL:
        return req->op == KVT_REMOTE_PUT;
    case NET_FLIP:
    case NET_CUT:
    case NET_FOREIGN:
    case NET_STALE:
        return answer;
    case NET_HEADER:
    case NET_UNKNOWN:
        return req->op == KVT_REMOTE_PROBE;
    default:
        return true;
    }
}

static uint32_t kind_for(struct sim_link *link, const struct kvt_remote_req *req)
{
    uint32_t kind = link->kind;

    if (kind == NET_KINDS || !strikes(kind, req) ||
        (link->times && kind != NET_DOWN && !sim_net_roll(link->sim->net, 3)))
        return NET_KINDS;
    if (link->times && !--link->times)
        link->kind = NET_KINDS;
    link->sim->counts.net[kind]++;
    return kind;
}

static void send_out(struct sim_link *link, struct sim_flight *flight)
{
    struct sim_net *net = link->sim->net;
    struct kvt_remote_req *req = flight->req;
    int64_t now = link->sim->now_ns, span = req->deadline_ns - now;
    int64_t way = net->latency_ns + (int64_t)sim_net_roll(net, (uint32_t)net->latency_ns + 1);

    if (flight->kind == NET_SLOW)
        way = KVT_MIN(span, 2000000000) / 2 +
              (int64_t)sim_net_roll(net, (uint32_t)KVT_MIN(span, 2000000000));
    flight->acts_ns = now + way / 2;
    flight->due_ns = KVT_MIN(now + way, req->deadline_ns);
    if (flight->kind == NET_DEADLINE)
        flight->due_ns = req->deadline_ns;
    if (flight->kind == NET_HANG)
        flight->acts_ns = flight->due_ns = req->deadline_ns + KVT_REMOTE_GRACE_NS - 50000000 +
                                           (int64_t)sim_net_roll(net, 1000000000);
    if (flight->kind == NET_NEVER)
        flight->acts_ns = flight->due_ns = INT64_MAX;
    if (link->quiet)
        flight->acts_ns = flight->due_ns = now;
}

static int link_submit(struct kvt_remote *self, struct kvt_remote_req *req)
{
    struct sim_link *link = of(self);
    struct sim *sim = link->sim;
    struct sim_flight *flight = &link->flights[link->count];
    uint32_t kind;

    if (link->cut || (link->quiet && req->op != KVT_REMOTE_PUT))
        return -EAGAIN;
    SIM_CHECK(sim, link->count < SIM_FLIGHTS && req->count && req->deadline_ns > sim->now_ns);
    kind = link->quiet ? NET_DOWN : kind_for(link, req);
    if (kind == NET_BUSY)
        return -EAGAIN;
    *flight = (struct sim_flight){.req = req,
                                  .name = sim_tier_find(sim->net, &req->keys[0]),
                                  .sent_ns = sim->now_ns,
                                  .jumped_ns = sim->jumped_ns,
                                  .op = sim->op,
                                  .kind = kind};
    for (uint32_t i = 0; i < SIM_NAMES && req->op == KVT_REMOTE_DROP_NS; i += SIM_BLOCKS)
        if (sim_tier_meant(req, &sim->net->names[i]))
            flight->name = &sim->net->names[i];
    SIM_CHECK(sim, flight->name);
    link->count++;
    link->sent[req->op]++;
    if (req->op == KVT_REMOTE_PROBE) {
        link->asked += req->count;
        memset(req->found, 0xee, req->count * sizeof req->found[0]);
    } else if (req->op == KVT_REMOTE_GET) {
        memset(req->record, 0x5a, req->record_bytes);
    } else if (req->op == KVT_REMOTE_PUT) {
        const struct kvt_record_header *header = req->record;
        const struct sim_block *block = &sim->blocks[flight->name->ns][flight->name->index];
        uint32_t map = sim_map_index(header->map);

        if (map > 2 || !(block->may >> map & 1))
            sim_fail(sim, "namespace %u, block %u is put to the shared tier, and has been purged",
                     flight->name->ns, flight->name->index);
        flight->origin = block->committed[map];
    }
    send_out(link, flight);
    sim_log(sim, 130 + (uint64_t)req->op, (uint64_t)req->count << 8 | kind);
    sim_tell(sim, "to the shared tier: %u, namespace %u, block %u, %u keys, fault %u", req->op,
             flight->name->ns, flight->name->index, req->count, kind);
    return 0;
}

static void all_found(const struct kvt_remote_req *req, int32_t status)
{
    for (uint32_t i = 0; req->op == KVT_REMOTE_PROBE && i < req->count; i++)
        req->found[i].status = status;
}

/* It does what it was sent for. */
static void carry_out(struct sim_link *link, struct sim_flight *flight)
{
    struct kvt_remote_req *req = flight->req;

    req->status = 0;
    switch (req->op) {
    case KVT_REMOTE_PROBE:
        sim_tier_probe(link, flight);
        break;
    case KVT_REMOTE_GET:
        req->status = sim_tier_get(link, flight);
        break;
    case KVT_REMOTE_PUT:
        req->status = sim_tier_put(link, flight, false);
        break;
    case KVT_REMOTE_DROP:
    case KVT_REMOTE_DROP_NS:
        req->status = sim_tier_drop(link, flight);
        break;
    }
}

/* It may have got there, or be there later. */
static void perhaps(struct sim_link *link, struct sim_flight *flight)
{
    uint32_t dice = sim_net_roll(link->sim->net, 3);

    if (flight->req->op == KVT_REMOTE_PUT && dice)
        (void)sim_tier_put(link, flight, dice == 2);
    else if (flight->req->op >= KVT_REMOTE_DROP && dice)
        (void)sim_tier_drop(link, flight);
}

static void act(struct sim_link *link, struct sim_flight *flight)
{
    static const int32_t answers[NET_KINDS + 1] = {[NET_LOST] = -EIO,
                                                   [NET_DOWN] = -EHOSTDOWN,
                                                   [NET_DENIED] = -EACCES,
                                                   [NET_FULL] = KVT_E_NO_SPACE,
                                                   [NET_DEADLINE] = KVT_E_DEADLINE};
    struct kvt_remote_req *req = flight->req;
    int32_t status = answers[flight->kind];

    flight->acted = true;
    if (!status && flight->acts_ns > req->deadline_ns && flight->kind != NET_HANG)
        status = KVT_E_DEADLINE;
    if (!status) {
        carry_out(link, flight);
        return;
    }
    if (status == -EIO || status == KVT_E_DEADLINE)
        perhaps(link, flight);
    req->status = status;
    all_found(req, status);
}

/* What a GET has brought, and the store is about to take: seen from now on. */
static void brought(struct sim_link *link, const struct sim_flight *flight)
{
    const struct kvt_remote_get *get = flight->req->user;
    const struct kvt_slot *slot = kvt_slot_at(&link->sim->store->slots, get->slot);

    if (!flight->good)
        sim_fail(link->sim, "namespace %u, block %u: not as it was put, and taken; fault %u",
                 flight->name->ns, flight->name->index, flight->kind);
    if (slot->state == KVT_SLOT_READING)
        sim_fetched(link->sim, flight->name->ns, flight->name->index,
                    sim_map_index(flight->req->map), flight->origin, flight->op, flight->sent_ns);
}

/* Counted as the store has to. */
static void count(struct sim_link *link, const struct sim_flight *flight)
{
    const struct kvt_remote_req *req = flight->req;

    if (req->op == KVT_REMOTE_PUT) {
        link->put += !req->status;
        link->put_bytes += req->status ? 0 : req->record_bytes;
        link->exists += req->status == KVT_E_EXISTS;
        link->full += req->status == KVT_E_NO_SPACE;
        link->put_failed +=
            req->status && req->status != KVT_E_EXISTS && req->status != KVT_E_NO_SPACE;
    } else if (req->op == KVT_REMOTE_GET) {
        const struct kvt_remote_get *get = req->user;

        if (get->given_up) {
            link->given_up++;
            return;
        }
        link->got += !req->status;
        link->got_bytes += req->status ? 0 : req->record_bytes;
        link->gone += req->status == KVT_E_MISS || req->status == KVT_E_STALE;
        link->bad += req->status == KVT_E_CORRUPT;
        link->late += req->status == KVT_E_DEADLINE;
        link->failed += req->status == -EIO || req->status == -EHOSTDOWN || req->status == -EACCES;
    }
}

static uint32_t link_reap(struct kvt_remote *self, struct kvt_remote_req **done, uint32_t max)
{
    struct sim_link *link = of(self);
    int64_t now = link->sim->now_ns;
    uint32_t n = 0;

    if (link->cut)
        return 0;
    sim_tier_tick(link->sim->net, now);
    for (uint32_t i = 0; i < link->count; i++)
        if (!link->flights[i].acted &&
            (link->flights[i].acts_ns <= now || link->flights[i].due_ns <= now))
            act(link, &link->flights[i]);
    for (uint32_t i = 0; i < link->count && n < max;) {
        struct sim_flight *flight = &link->flights[i];

        if (flight->due_ns > now) {
            i++;
            continue;
        }
        if (flight->req->op == KVT_REMOTE_GET && !flight->req->status)
            brought(link, flight);
        count(link, flight);
        sim_log(link->sim, 140 + (uint64_t)flight->req->op, (uint64_t)(int64_t)flight->req->status);
        sim_tell(link->sim, "the shared tier to %u, namespace %u, block %u: %d", flight->req->op,
                 flight->name->ns, flight->name->index, flight->req->status);
        done[n++] = flight->req;
        *flight = link->flights[--link->count];
    }
    return n;
}

static int link_event_fd(struct kvt_remote *self)
{
    (void)self;
    return -1;
}

static void link_stats(struct kvt_remote *self, struct kvt_remote_stats *stats)
{
    (void)self;
    *stats = (struct kvt_remote_stats){.nodes = 1};
}

/* The memory is the store's again. What had been sent may have got there, or get there. */
static void link_stop(struct kvt_remote *self)
{
    struct sim_link *link = of(self);

    for (uint32_t i = 0; i < link->count; i++)
        if (!link->flights[i].acted)
            perhaps(link, &link->flights[i]);
    link->count = 0;
    sim_tier_orphan(link->sim->net, link->sim->number);
}

static const struct kvt_remote_ops link_ops = {.name = "sim",
                                               .submit = link_submit,
                                               .reap = link_reap,
                                               .event_fd = link_event_fd,
                                               .stats = link_stats,
                                               .stop = link_stop,
                                               .destroy = link_stop};

/* A life begins. */
void sim_link_start(struct sim_net *net, uint32_t machine)
{
    struct sim_link *link = &net->links[machine];
    const struct sim_link kept = *link;

    memset(link, 0, sizeof *link);
    link->remote.ops = &link_ops;
    link->sim = net->machines[machine];
    link->quiet = kept.quiet;
    link->write = kept.write;
    link->queue_bytes = kept.queue_bytes;
    link->kind = NET_KINDS;
}

void sim_link_heal(struct sim_link *link)
{
    link->kind = NET_KINDS;
    for (uint32_t i = 0; i < link->count; i++)
        if (link->flights[i].due_ns > link->sim->now_ns + HEAL_NS)
            link->flights[i].acts_ns = link->flights[i].due_ns = link->sim->now_ns;
}

int64_t sim_link_next(const struct sim_link *link)
{
    int64_t next = INT64_MAX;

    for (uint32_t i = 0; i < link->count && !link->cut; i++) {
        const struct sim_flight *flight = &link->flights[i];

        next = KVT_MIN(next, flight->due_ns);
        if (!flight->acted)
            next = KVT_MIN(next, flight->acts_ns);
    }
    return next;
}

/* No load waits for the tier beyond its deadline: what the store still waits for is younger. */
static void check_waits(struct sim_link *link)
{
    for (uint32_t i = 0; i < link->count; i++) {
        const struct sim_flight *flight = &link->flights[i];
        const struct kvt_remote_get *get = flight->req->user;

        if (flight->req->op == KVT_REMOTE_GET && !get->given_up &&
            link->sim->now_ns > flight->sent_ns + link->sim->net->deadline_ns +
                                    KVT_REMOTE_GRACE_NS + LATE_NS + link->sim->jumped_ns -
                                    flight->jumped_ns)
            sim_fail(link->sim, "namespace %u, block %u is read from the shared tier for too long",
                     flight->name->ns, flight->name->index);
    }
}

void sim_link_check(struct sim_link *link)
{
    const struct kvt_store_remote *remote = link->sim->store->remote;
    struct kvt_store_stats stats;
    uint64_t put_bytes = 0;
    uint32_t puts = 0, gets = 0;

    check_waits(link);
    for (uint32_t i = 0; i < link->count; i++) {
        puts += link->flights[i].req->op == KVT_REMOTE_PUT;
        gets += link->flights[i].req->op == KVT_REMOTE_GET;
        put_bytes +=
            link->flights[i].req->op == KVT_REMOTE_PUT ? link->flights[i].req->record_bytes : 0;
    }
    SIM_CHECK(link->sim, remote->puts_going == puts && remote->put_bytes == put_bytes);
    kvt_store_stats(link->sim->store, &stats);
    SIM_CHECK(link->sim, stats.remote_rounds == link->sent[KVT_REMOTE_PROBE]);
    SIM_CHECK(link->sim, stats.remote_asked == link->asked);
    SIM_CHECK(link->sim,
              stats.remote_got == link->got && stats.remote_got_bytes == link->got_bytes);
    SIM_CHECK(link->sim, stats.remote_get_gone == link->gone && stats.remote_get_bad == link->bad);
    SIM_CHECK(link->sim, stats.remote_get_deadline == link->late);
    SIM_CHECK(link->sim, stats.remote_get_fail == link->failed);
    SIM_CHECK(link->sim,
              stats.remote_put == link->put && stats.remote_put_bytes == link->put_bytes);
    SIM_CHECK(link->sim, stats.remote_put_exists == link->exists);
    SIM_CHECK(link->sim, stats.remote_put_full == link->full);
    SIM_CHECK(link->sim, stats.remote_put_fail == link->put_failed);
    SIM_CHECK(link->sim, link->sent[KVT_REMOTE_GET] == link->got + link->gone + link->bad +
                                                           link->late + link->failed +
                                                           link->given_up + gets);
}
