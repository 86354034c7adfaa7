/* Power that goes at a random moment, as many times as there are seeds.
 *
 * Goal: what is left opens, fsck finds no damage, what a flush acknowledged is there, nothing else
 * comes back than what was put, and the next recovery finds the same. Method: the simulator (sim.h)
 * without faults but this one: a few dozen operations, then each change that no sync has covered is
 * kept, dropped, reordered, torn at sectors or pages, or leaves garbage. KVT_SIM_SEEDS (2,500; 100
 * under a sanitizer), KVT_SIM_SEED, KVT_SOAK_SECONDS as in test_sim. */
#include "sim/sim.h"

static void one(struct sim *sim)
{
    uint32_t until = 5 + sim_roll(sim, 120);
    enum power_loss loss = POWER_DROPS + sim_roll(sim, POWER_LOSSES - POWER_DROPS);

    sim->shape.faults = SIM_SOUND;
    if (!sim->shape.disks) {
        sim_new_disk(sim, 0);
        sim->shape.disks = 1;
    }
    if (sim_open(sim))
        sim_fail(sim, "a new root does not open");
    while (sim->op < until) {
        sim->op++;
        sim_operation(sim);
        if (sim_roll(sim, 2))
            sim_advance(sim, (int64_t)sim_roll(sim, 100000));
    }
    sim_die(sim, loss);
    sim_check_recovery(sim, loss);
    sim_close(sim);
}

int main(void)
{
    const struct sim_run run = {.practice = "power_loss",
                                .program = "test_power_loss",
                                .seeds = SIM_SANITIZED ? 100 : 2500,
                                .repeated = 20,
                                .one = one};

    return sim_run(&run);
}
