/* A client that reads records where they lie on disk (store_direct.c), as a GPU that reads a drive
 * by itself does: it is granted a place, reads there when it comes to it, perhaps twice, compares
 * key and checksum, gives the place back late, or dies before.
 *
 * As long as it holds the place, and nobody has purged the block, on a drive that has not lied, its
 * bytes are there. Else they may be others, which it has to see. It reads on when the store that
 * granted it is gone: then nothing is promised, but that other bytes do not pass for the block's.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier/error.h"
#include "sim/sim.h"
#include "store/store_impl.h"

void sim_direct_granted(struct sim *sim, uint32_t client, const struct sim_load *load,
                        const struct kvt_msg_grant *grant, uint32_t map)
{
    uint32_t index = load->index[grant->index];
    struct sim_direct *direct = &sim->directs[sim->direct_count];

    SIM_CHECK(sim, sim->direct_count < SIM_DIRECTS);
    SIM_CHECK(sim, grant->tier == KVT_TIER_DISK && grant->root < sim->shape.disks);
    *direct = (struct sim_direct){.client = client,
                                  .ns = load->ns,
                                  .index = index,
                                  .map = map,
                                  .slot = grant->slot,
                                  .generation = grant->generation,
                                  .root = grant->root,
                                  .segment = grant->segment,
                                  .offset = grant->arena_offset,
                                  .bytes = grant->record_bytes,
                                  .purges = sim->blocks[load->ns][index].purges};
    sim->direct_count++;
    sim->counts.direct++;
    sim_used(sim, load->ns, index);
    sim_seen(sim, load->ns, index, map, load->min);
}

/* What is promised of it: see above. */
static bool promised(const struct sim *sim, const struct sim_direct *direct)
{
    const struct sim_block *block = &sim->blocks[direct->ns][direct->index];

    return !direct->orphan && !sim->lied && !sim->garbled && block->purges == direct->purges;
}

static void read_one(struct sim *sim, struct sim_direct *direct)
{
    static uint8_t *record;
    struct kvt_io *io = sim_medium(sim, direct->root);
    const struct kvt_record_header *header;
    int64_t got = -1;
    char name[32];
    int file;

    if (!record)
        record = aligned_alloc(KVT_PAGE_BYTES, SIM_RECORD_PAGES_MAX * KVT_PAGE_BYTES);
    SIM_CHECK(sim, record && direct->bytes <= SIM_RECORD_PAGES_MAX * KVT_PAGE_BYTES);
    memset(record, 0, direct->bytes);
    (void)snprintf(name, sizeof name, "seg-%08x", (unsigned)direct->segment);
    file = io->ops->open(io, name, KVT_IO_OPEN_READ_ONLY);
    if (file >= 0) {
        got = kvt_io_read_now(io, file, direct->offset, record, direct->bytes);
        io->ops->close(io, file);
    }
    header = (const struct kvt_record_header *)(void *)record;
    direct->status = KVT_E_CORRUPT;
    if (got == direct->bytes)
        direct->status = sim_judge(sim, direct->ns, direct->index, direct->map, record,
                                   direct->bytes, header->checksum);
    sim_log(sim, 150, (uint64_t)(int64_t)direct->status);
    if (direct->status && promised(sim, direct))
        sim_fail(sim,
                 "namespace %u, block %u is read by its client, and is not there any more: root "
                 "%u, segment %u, offset %llu",
                 direct->ns, direct->index, direct->root, direct->segment,
                 (unsigned long long)direct->offset);
}

static void let_go(struct sim *sim, uint32_t i)
{
    struct sim_direct direct = sim->directs[i];

    sim->directs[i] = sim->directs[--sim->direct_count];
    if (!direct.orphan)
        sim_give_back(sim, direct.client,
                      &(struct kvt_slot_ref){.slot = direct.slot,
                                             .generation = direct.generation,
                                             .status = direct.status,
                                             .direct = 1});
}

void sim_direct_step(struct sim *sim)
{
    uint32_t steps = sim->direct_count > SIM_DIRECTS / 2 ? 16 : 1;

    while (sim->direct_count && steps--) {
        uint32_t i = sim_more(sim, sim->direct_count), dice = sim_more(sim, 4);

        if (!dice)
            continue;
        read_one(sim, &sim->directs[i]);
        if (dice == 1 || sim->direct_count > SIM_DIRECTS / 2)
            let_go(sim, i);
    }
}

void sim_direct_died(struct sim *sim, uint32_t client)
{
    for (uint32_t i = sim->direct_count; i-- > 0;)
        if (sim->directs[i].client == client && !sim->directs[i].orphan)
            sim->directs[i] = sim->directs[--sim->direct_count];
}

void sim_direct_life(struct sim *sim)
{
    for (uint32_t i = sim->direct_count; i-- > 0;) {
        sim->directs[i].orphan = true;
        if (i >= 8)
            sim->directs[i] = sim->directs[--sim->direct_count];
    }
}
