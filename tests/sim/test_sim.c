/* The simulator's seeds: see sim.h.
 *
 * Goal: whatever several clients do over bad drives, with deaths and power losses at any moment,
 * nobody ever gets other bytes, what a flush or a purge acknowledged holds, space adds up, a second
 * recovery changes nothing, and nothing stays pinned. Method: KVT_SIM_SEEDS seeds (5,000; a
 * hundredth of that under a sanitizer) from KVT_SIM_SEED on, 1,000 operations each
 * (KVT_SIM_OPERATIONS), some of them twice for the hash. KVT_SOAK_SECONDS=n: goes on with further
 * seeds until n seconds have passed. KVT_SIM_LOG=1: every event. A seed that fails is printed with
 * its operation. */
#include "sim/sim.h"

static void life_ends(struct sim *sim)
{
    enum power_loss loss;

    if (sim_roll(sim, 4) == 0) {
        if (sim->net || sim->reads)
            sim_settled(sim);
        else
            sim_everybody_leaves(sim);
        sim_close(sim);
        loss = POWER_KEEPS;
    } else {
        loss = (enum power_loss)sim_roll(sim, POWER_LOSSES);
        sim_die(sim, loss);
    }
    sim_check_recovery(sim, loss);
}

static void life(struct sim *sim, uint64_t operations)
{
    uint32_t until = 20 + sim_roll(sim, 400);

    for (uint32_t i = 0; i < until && sim->op < operations; i++) {
        sim->op++;
        sim_operation(sim);
        if (sim_roll(sim, 3))
            sim_advance(sim, (int64_t)sim_roll(sim, 300000));
        if (sim->op % 32 == 0)
            sim_check_store(sim);
    }
    life_ends(sim);
}

static void one(struct sim *sim)
{
    uint64_t operations = sim_number("KVT_SIM_OPERATIONS", 1000);

    if (sim_open(sim))
        sim_fail(sim, "a new root does not open");
    if (sim->net)
        sim_net_live(sim, operations, life_ends);
    while (!sim->net && sim->op < operations)
        life(sim, operations);
    sim_settled(sim);
    sim_close(sim);
}

int main(void)
{
    const struct sim_run run = {.practice = "simulation",
                                .program = "test_sim",
                                .all_faults = true,
                                .more = true,
                                .seeds = SIM_SANITIZED ? 50 : 5000,
                                .repeated = 50,
                                .one = one};

    return sim_run(&run);
}
