/* What goes wrong with drives: one fault at a time on each, of a kind and at an operation that the
 * seed chooses, once, a few times, or until the next one. See sim.h; the budget: fault_io.h.
 *
 * Every kind must have happened in a run of many seeds: sim_seeds.c prints how often each did, and
 * fails a run that was blind to one. A stale read counts where the bytes it brought were others. */
#include <errno.h>

#include "base/checked.h"
#include "sim/sim.h"
#include "support/fault_io.h"

#define ANY FAULT_ALL
#define HONEST_KINDS 10u /* those up to there; the others are lies */

static const struct {
    const char *name;
    unsigned ops;
    int action, error;
} kinds[SIM_KINDS] = {
    {"EIO", ANY, FAULT_FAIL, EIO},
    {"ENOSPC", ANY, FAULT_FAIL, ENOSPC},
    {"EINTR", ANY, FAULT_FAIL, EINTR},
    {"EAGAIN", ANY, FAULT_FAIL, EAGAIN},
    {"EDQUOT", ANY, FAULT_FAIL, EDQUOT},
    {"queue full", FAULT_DATA, FAULT_BUSY, 0},
    {"short", FAULT_READ, FAULT_SHORT, 0},
    {"late", FAULT_DATA, FAULT_LATE, 0},
    {"stalled", FAULT_DATA, FAULT_STALL, 0},
    {"never", FAULT_DATA, FAULT_NEVER, 0},
    {"lost write", FAULT_WRITE, FAULT_LOST, 0},
    {"lost sync", FAULT_SYNC, FAULT_LOST, 0},
    {"torn at 512 B", FAULT_WRITE, FAULT_TORN, 0},
    {"torn at 4 KiB", FAULT_WRITE, FAULT_TORN, 0},
    {"misdirected write", FAULT_WRITE, FAULT_MISDIRECT, 0},
    {"misdirected read", FAULT_READ, FAULT_MISDIRECT, 0},
    {"bit in a write", FAULT_WRITE, FAULT_FLIP, 0},
    {"bit in a read", FAULT_READ, FAULT_FLIP, 0},
    {"stale read", FAULT_READ, FAULT_STALE, 0},
};
enum { SHORT = 6, LATE, STALLED, TORN_512 = 12, TORN_4096 };

const char *sim_kind_name(uint32_t kind)
{
    return kinds[kind].name;
}

static uint64_t argument(struct sim *sim, uint32_t kind)
{
    switch (kind) {
    case LATE:
        return 1000000 + sim_roll(sim, 100000000);
    case STALLED:
        return 1000000 + sim_roll(sim, 400000000);
    case TORN_512:
        return sim_roll(sim, 20) * 8 + 1 + sim_roll(sim, 7); /* inside of a page */
    case TORN_4096:
        return sim_roll(sim, 20) * 8;
    default:
        return kinds[kind].action == FAULT_FLIP ? FAULT_RANDOM : 1 + sim_roll(sim, 3);
    }
}

/* The fault on drive i is over: how often it struck. */
static void end(struct sim *sim, uint32_t i)
{
    struct sim_fault *fault = &sim->faults[i];
    const struct fault_rule *rule = fault_io_rule_state(sim->disks[i], 0);
    uint64_t stale = fault_io_stale_reads(sim->disks[i]);

    if (fault->on) {
        sim->counts.sticky += !rule->times && rule->fired > 1;
        sim->counts.struck[fault->kind] +=
            rule->action == FAULT_STALE ? stale - fault->stale_before : rule->fired;
    }
    fault->on = false;
    fault->stale_before = stale;
    fault_io_clear(sim->disks[i]);
}

void sim_faults_end(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->shape.disks; i++)
        end(sim, i);
}

/* Where the failing operations are: any, or of some kinds only. */
static unsigned some_ops(struct sim *sim)
{
    static const unsigned ops[] = {
        FAULT_READ, FAULT_WRITE, FAULT_SYNC,   FAULT_OPEN,     FAULT_ALLOCATE,          FAULT_PUNCH,
        FAULT_ALL,  FAULT_ALL,   FAULT_RENAME, FAULT_SYNC_DIR, FAULT_WRITE | FAULT_SYNC};

    return ops[sim_roll(sim, KVT_ARRAY_LEN(ops))];
}

void sim_fault(struct sim *sim)
{
    uint32_t i = sim_roll(sim, SIM_DISKS), kind = sim_roll(sim, HONEST_KINDS);
    struct fault_rule rule = {.skip = sim_roll(sim, 20),
                              .times = sim_roll(sim, 8) ? 1 + sim_roll(sim, 4) : 0};
    bool lie = sim->shape.faults == SIM_LYING && sim_roll(sim, 2);

    if (!sim->shape.disks || sim->shape.faults == SIM_SOUND)
        return;
    i %= sim->shape.disks;
    end(sim, i);
    if (lie) {
        kind = HONEST_KINDS + sim_roll(sim, SIM_KINDS - HONEST_KINDS);
        rule.times = 1 + sim_roll(sim, 2);
        sim->lied = true;
        sim_forget_durable(sim);
    }
    if (kind == STALLED)
        rule.times = 1;
    rule.ops = kinds[kind].ops == ANY ? some_ops(sim) : kinds[kind].ops;
    rule.action = kinds[kind].action;
    rule.error = kinds[kind].error;
    rule.arg = argument(sim, kind);
    if (rule.action == FAULT_STALE)
        rule.times = 8;
    if (lie && (rule.action == FAULT_STALE || !sim_roll(sim, 4)) && !sim->faults[i].pictured) {
        fault_io_remember(sim->disks[i], power_io_inner(sim_medium(sim, i)));
        sim->faults[i].pictured = true;
    } else if (lie && !sim_roll(sim, 4)) {
        sim->faults[i].pictured = false; /* a new one next time */
    }
    sim->counts.faults++;
    sim->faults[i].on = true;
    sim->faults[i].kind = kind;
    sim_tell(sim, "fault: %s, operations %x, skip %llu, times %llu, arg %llu", kinds[kind].name,
             rule.ops, (unsigned long long)rule.skip, (unsigned long long)rule.times,
             (unsigned long long)rule.arg);
    SIM_CHECK(sim, fault_io_rule(sim->disks[i], &rule) == 0);
}
