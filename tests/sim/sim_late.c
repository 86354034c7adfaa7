/* A root that somebody else holds when the store opens, and that comes later. See sim.h.
 *
 * It is the last one. What it holds is found when it has come; what was purged meanwhile is not,
 * though it may be again in a life after one in which the root never came: nobody could journal
 * that there. What the store has already stays what it is. */
#include <errno.h>

#include "sim/sim.h"
#include "store/store_impl.h"

#define PATIENCE 200u

int sim_late_comes(struct sim *sim)
{
    struct kvt_store_root root = {.cap_bytes = sim->shape.cap_bytes};
    struct kvt_store_joining *joining = NULL;
    int rc;

    root.io = sim->disks[sim->shape.disks - 1];
    sim_faults_end(sim);
    sim_set_latency(sim, false);
    sim->hurry = true;
    rc = kvt_store_root_open(sim->store, &root, &joining);
    sim->hurry = false;
    sim_set_latency(sim, true);
    sim_log(sim, 120, (uint64_t)(int64_t)rc);
    if (rc)
        return rc;
    rc = kvt_store_root_join(sim->store, joining);
    for (uint32_t turns = 0; rc == -EAGAIN && turns < PATIENCE; turns++) {
        sim_advance(sim, 1000000);
        rc = kvt_store_root_join(sim->store, joining);
    }
    sim_tell(sim, "the late root comes: %d", rc);
    if (rc) {
        kvt_store_root_discard(joining);
        return rc;
    }
    sim->out = false;
    sim->anew_ns = sim->now_ns;
    sim->counts.joined++;
    return 0;
}

void sim_late_purged(struct sim *sim, struct sim_block *block, uint8_t before)
{
    if (sim->out)
        block->absent |= before;
    else
        block->absent = 0;
}

/* The root has been here long enough to have all purges in its journal, and its drive is sound. */
void sim_late_end(struct sim *sim)
{
    bool sure = !sim->out && !kvt_store_root_joining(sim->store) &&
                sim->shape.faults == SIM_SOUND && sim->shape.medium_bytes >= SIM_MEDIUM_LARGE;

    for (uint32_t i = 0; i < KVT_STORE_PURGES; i++)
        sure = sure && !sim->store->purges[i].used;
    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        for (uint32_t i = 0; i < SIM_BLOCKS; i++) {
            struct sim_block *block = &sim->blocks[ns][i];

            if (sure)
                block->absent = 0;
        }
}

void sim_late_begin(struct sim *sim)
{
    sim->out = sim->shape.late;
    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        for (uint32_t i = 0; i < SIM_BLOCKS; i++)
            sim->blocks[ns][i].may |= sim->blocks[ns][i].absent;
}
