/* Several machines over one shared tier: which seeds have them, their time, their turns and their
 * ends. See sim_net.h. All clocks are one; while a machine is opened or closed its clock runs
 * ahead, and the others catch up in a leap, as if they had not been scheduled. */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "sim/sim_net.h"
#include "store/store_remote.h"

static struct sim_net the_net;

bool sim_net_others(const struct sim *sim, uint32_t first)
{
    return sim->net && first / SIM_DEPTH % sim->net->count != sim->number;
}

uint32_t sim_net_roll(struct sim_net *net, uint32_t bound)
{
    return (uint32_t)kvt_rng_below(&net->rng, bound);
}

const char *sim_net_kind_name(uint32_t kind)
{
    static const char *const names[NET_KINDS] = {
        "slow",        "deadline",     "hang",    "never",     "lost",       "down",
        "denied",      "busy",         "full",    "flip",      "cut",        "foreign",
        "stale",       "header",       "unknown", "bit there", "cut there",  "foreign there",
        "newer there", "forged there", "gone",    "all gone",  "back again",
    };

    return names[kind];
}

static void choose(struct sim_net *net)
{
    static const int64_t deadlines[] = {2000000, 20000000, 250000000};

    net->deadline_ns = deadlines[sim_net_roll(net, KVT_ARRAY_LEN(deadlines))];
    net->latency_ns = net->deadline_ns / (4 << sim_net_roll(net, 5));
    net->replicas = !sim_net_roll(net, 4);
    net->may_kill = sim_net_roll(net, 3) != 0;
    net->mac.on = !sim_net_roll(net, 3);
    net->mac.key_len = 32;
    memset(net->mac.key, 0x4b, net->mac.key_len);
    for (uint32_t i = 0; i < net->count; i++) {
        net->links[i].write = (int)sim_net_roll(net, 8);
        if (net->links[i].write > KVT_REMOTE_WRITE_ALL)
            net->links[i].write = KVT_REMOTE_WRITE_ALL;
        net->links[i].queue_bytes = UINT64_C(65536) << 2 * sim_net_roll(net, 3);
    }
}

void sim_net_start(struct sim *machines, uint32_t count, uint64_t seed, uint8_t *arenas[])
{
    struct sim_net *net = &the_net;

    memset(net, 0, sizeof *net);
    net->rng.state = seed * 0x9e3779b97f4a7c15u + 1;
    net->count = count;
    for (uint32_t i = 0; i < count; i++) {
        struct sim *sim = &machines[i];

        if (i)
            sim_start(sim, seed + i * UINT64_C(0x100000000), arenas[i], &machines[0]);
        sim->seed = seed;
        sim->program = machines[0].program;
        sim->reads = machines[0].reads;
        sim->rude = machines[0].rude;
        sim->number = i;
        sim->net = net;
        net->machines[i] = sim;
    }
    choose(net);
    sim_tier_start(net);
    machines[0].counts.shared++;
}

void sim_net_stop(struct sim *sim)
{
    if (sim->net && !sim->number)
        sim_tier_stop(sim->net);
}

void sim_net_params(struct sim *sim, struct kvt_store_params *params)
{
    struct sim_net *net = sim->net;

    if (!net)
        return;
    sim_link_start(net, sim->number);
    params->remote = &net->links[sim->number].remote;
    params->remote_deadline_ns = net->deadline_ns;
    params->remote_queue_bytes = net->links[sim->number].queue_bytes;
    params->remote_write = net->links[sim->number].write;
}

void sim_net_quiet(struct sim *sim, bool quiet)
{
    if (sim->net)
        sim->net->links[sim->number].quiet = quiet;
}

void sim_net_cut(struct sim *sim)
{
    if (sim->net)
        sim->net->links[sim->number].cut = true;
}

bool sim_net_waits(const struct sim *sim)
{
    return sim->net && (sim->net->links[sim->number].count || !kvt_l3_idle(sim->store));
}

void sim_net_heal(struct sim *sim)
{
    if (sim->net)
        sim_link_heal(&sim->net->links[sim->number]);
}

int64_t sim_net_next(const struct sim *sim)
{
    return sim->net ? sim_link_next(&sim->net->links[sim->number]) : INT64_MAX;
}

int64_t sim_net_answer_by(const struct sim *sim)
{
    return sim->net ? sim->now_ns + sim->net->deadline_ns + KVT_REMOTE_GRACE_NS : INT64_MAX;
}

/* ---- time */

/* Who was not scheduled, is. Loads and look-ups that were waiting may be late by that. */
static void leap(struct sim *sim, int64_t now_ns)
{
    int64_t by = now_ns - sim->now_ns;

    sim->now_ns = now_ns;
    sim->jumped_ns += by;
    for (uint32_t i = 0; i < sim->load_count; i++)
        if (sim->loads[i].end_ns != INT64_MAX)
            sim->loads[i].end_ns += by;
    for (uint32_t i = 0; i < SIM_ASKED; i++)
        sim->asked[i].end_ns += by;
}

int64_t sim_net_run(struct sim *sim, int64_t (*run_due)(struct sim *sim))
{
    struct sim_net *net = sim->net;
    int64_t now = sim->now_ns, next = INT64_MAX;

    for (uint32_t i = 0; net && i < net->count; i++)
        now = KVT_MAX(now, net->machines[i]->now_ns);
    for (uint32_t i = 0; net && i < net->count; i++) {
        struct sim *machine = net->machines[i];

        if (machine->now_ns < now)
            leap(machine, now);
        if (machine != sim && machine->store) {
            int64_t wants = run_due(machine);

            next = KVT_MIN(next, wants);
        }
    }
    return next;
}

void sim_net_now(struct sim *sim, int64_t now_ns)
{
    sim->now_ns = KVT_MAX(sim->now_ns, now_ns);
    for (uint32_t i = 0; sim->net && i < sim->net->count; i++)
        sim->net->machines[i]->now_ns = KVT_MAX(sim->net->machines[i]->now_ns, now_ns);
}

/* ---- what goes wrong */

static void fault(struct sim *sim)
{
    struct sim_net *net = sim->net;
    struct sim_link *link = &net->links[sim->number];
    uint32_t kind = sim_net_roll(net, NET_KINDS);

    if (link->kind != NET_KINDS && !link->times) { /* it is well again */
        link->kind = NET_KINDS;
        return;
    }
    if ((!net->replicas && (kind == NET_STALE || kind == REST_BACK)) ||
        (kind == REST_ALL_GONE && sim_net_roll(net, 4)))
        return;
    sim_tell(sim, "fault of the shared tier: %u", kind);
    if (kind >= REST_FLIP) {
        sim_tier_fault(net, sim, kind);
        return;
    }
    link->kind = kind;
    link->times = sim_net_roll(net, 6) ? 1 + sim_net_roll(net, 6) : 0;
}

void sim_net_check(struct sim *sim)
{
    if (sim->net)
        sim_link_check(&sim->net->links[sim->number]);
}

bool sim_net_failed(const struct sim *sim, int32_t status)
{
    return sim->net && (status == -EHOSTDOWN || status == -EACCES || status == -EPERM ||
                        status == KVT_E_DEADLINE);
}

void sim_net_settled(struct sim *sim)
{
    const struct kvt_store_remote *remote = sim->store->remote;
    struct kvt_store_stats stats;
    uint32_t busy = 0;

    kvt_store_stats(sim->store, &stats);
    SIM_CHECK(sim, stats.load_granted_dram + stats.load_granted_disk + stats.load_granted_remote +
                           stats.load_granted_direct ==
                       sim->grants);
    if (!sim->net)
        return;
    for (uint32_t i = 0; i < KVT_REMOTE_LOOKUPS; i++)
        busy += remote->lookups[i].busy;
    for (uint32_t i = 0; i < KVT_REMOTE_GETS; i++)
        busy += remote->gets[i].busy;
    for (uint32_t i = 0; i < KVT_STORE_PURGES; i++)
        busy += remote->purges[i].busy;
    if (busy || remote->puts_going || remote->put_bytes || sim->store->prefetch_going)
        sim_fail(sim,
                 "%u requests to the shared tier, %u puts of %llu bytes, %u prefetches are left",
                 busy, remote->puts_going, (unsigned long long)remote->put_bytes,
                 sim->store->prefetch_going);
}

/* ---- turns */

static void turn(struct sim *sim, void (*life_ends)(struct sim *sim))
{
    struct sim_net *net = sim->net;

    if (!sim->left--) {
        sim->left = 20 + sim_roll(sim, 400 / net->count);
        life_ends(sim);
        return;
    }
    sim_operation(sim);
    if (!sim_net_roll(net, 25))
        fault(sim);
    if (sim_roll(sim, 3))
        sim_advance(sim, (int64_t)sim_roll(sim, 300000));
    if (net->op % 32 == 0)
        sim_check_store(sim);
}

void sim_net_live(struct sim *sim, uint64_t operations, void (*life_ends)(struct sim *sim))
{
    struct sim_net *net = sim->net;

    for (uint32_t i = 0; i < net->count; i++) {
        struct sim *machine = net->machines[i];

        if (i && sim_open(machine))
            sim_fail(machine, "a new root does not open");
        machine->left = 20 + sim_roll(machine, 400 / net->count);
    }
    while (net->op < operations) {
        struct sim *machine = net->machines[sim_net_roll(net, net->count)];

        machine->op = ++net->op;
        turn(machine, life_ends);
    }
    for (uint32_t i = 1; i < net->count; i++) {
        sim_settled(net->machines[i]);
        sim_close(net->machines[i]);
    }
}
