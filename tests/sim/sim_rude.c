/* Clients that break off in the middle of things, and messages that are not whole.
 *
 * One that breaks off is disconnected (kvt_store_client_stop) and lives on: it still writes into
 * what it was filling, until it is gone for good (kvt_store_client_gone). Nobody is ever granted
 * these bytes, and nobody else's change: every record is judged when it is granted and when it is
 * given back. A message that is cut off, or says more than it has, changes nothing. */
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "sim/sim.h"

static void break_off(struct sim *sim, uint32_t i)
{
    uint32_t client = sim->clients[i];

    sim_log(sim, 160, client);
    for (uint32_t f = 0; f < sim->fill_count && sim->parted_count < SIM_FILLS; f++)
        if (sim->fills[f].client == client)
            sim->parted[sim->parted_count++] = sim->fills[f];
    sim_forget_client(sim, client);
    kvt_store_client_stop(sim->store, client);
    if (sim->gone_count < SIM_FILLS)
        sim->gone[sim->gone_count++] = client;
    else
        kvt_store_client_gone(sim->store, client);
    sim->clients[i] = ++sim->next_client;
    sim->counts.rude++;
}

static void gone(struct sim *sim, uint32_t g)
{
    uint32_t client = sim->gone[g];

    sim->gone[g] = sim->gone[--sim->gone_count];
    for (uint32_t f = sim->parted_count; f-- > 0;)
        if (sim->parted[f].client == client)
            sim->parted[f] = sim->parted[--sim->parted_count];
    sim_log(sim, 161, client);
    kvt_store_client_gone(sim->store, client);
}

static void scribble(struct sim *sim)
{
    for (uint32_t f = 0; f < sim->parted_count; f++) {
        const struct kvt_alloc_entry *entry = &sim->parted[f].entry;
        uint32_t at = sim_more(sim, entry->record_bytes - 64);

        memset(sim->arena + entry->arena_offset + at, 0x77, 64);
    }
}

void sim_rude_step(struct sim *sim)
{
    uint32_t dice;

    if (!sim->rude)
        return;
    dice = sim_more(sim, 40);
    if (dice == 0)
        break_off(sim, sim_more(sim, SIM_CLIENTS));
    else if (dice == 1 && sim->gone_count)
        gone(sim, sim_more(sim, sim->gone_count));
    else if (dice == 2 && sim_send_cut(sim) == KVT_E_INVAL) /* whoever sends that is disconnected */
        break_off(sim, sim_more(sim, SIM_CLIENTS));
    else if (dice < 20)
        scribble(sim);
}

void sim_rude_all(struct sim *sim)
{
    while (sim->gone_count)
        gone(sim, 0);
}
