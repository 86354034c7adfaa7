/* After every recovery. See sim.h.
 *
 *   the medium    fsck finds no damage where drives were honest, before and after
 *   the store     its own invariants; the bytes of its files are what it counts, within the cap;
 *                 as many blocks as fsck counts
 *   blocks        what is seen is exact and may be seen; what must be there is
 *   again         a second recovery finds the same
 *   nothing held  no pins, no slots, when nobody is there */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "kvtier/error.h"
#include "sim/sim.h"
#include "store/fsck.h"
#include "store/l2_internal.h"
#include "store/store_impl.h"
#include "support/fault_io.h"

static void note_problem(void *ctx, bool problem, const char *text)
{
    struct sim *sim = ctx;

    sim_tell(sim, "fsck %s: %s", problem ? "problem" : "note", text);
    if (problem && !sim->why[0])
        snprintf(sim->why, sizeof sim->why, "fsck: %s", text);
}

static uint64_t fsck_records(struct sim *sim, bool strict)
{
    uint64_t records = 0;

    for (uint32_t i = 0; i < sim->shape.disks; i++) {
        struct kvt_fsck_params params = {
            .io = sim_medium(sim, i), .found = note_problem, .ctx = sim};
        struct kvt_fsck_report report;
        int rc;

        sim->why[0] = '\0';
        rc = kvt_fsck(&params, &report);
        sim_log(sim, 110, report.records << 16 ^ report.problems);
        if (strict && (rc < 0 || report.problems)) {
            char why[512];

            memcpy(why, sim->why, sizeof why);
            sim_fail(sim, "rc %d, %s", rc, why);
        }
        records += report.records;
    }
    return records;
}

void sim_check_medium(struct sim *sim, bool strict)
{
    (void)fsck_records(sim, strict);
}

struct sizes {
    struct kvt_io *io;
    uint64_t segments, all;
};

static int add_size(void *arg, const char *name)
{
    struct sizes *sizes = arg;
    int file = sizes->io->ops->open(sizes->io, name, KVT_IO_OPEN_READ_ONLY);
    uint32_t number;
    int64_t bytes = 0;

    if (file >= 0) {
        bytes = sizes->io->ops->size(sizes->io, file);
        sizes->io->ops->close(sizes->io, file);
    }
    sizes->all += (uint64_t)bytes;
    if (kvt_l2_name_kind(name, &number) == KVT_L2_NAME_IS_SEGMENT)
        sizes->segments += (uint64_t)bytes;
    return 0;
}

static void check_space(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->store->disk_count; i++) {
        struct sizes sizes = {.io = sim_medium(sim, i)};
        struct kvt_l2_stats stats;

        SIM_CHECK(sim, sizes.io->ops->list(sizes.io, add_size, &sizes) == 0);
        kvt_l2_stats(sim->store->disks[i].l2, &stats);
        if (sizes.all > sim->shape.cap_bytes)
            sim_fail(sim, "files of %llu bytes, the cap is %llu", (unsigned long long)sizes.all,
                     (unsigned long long)sim->shape.cap_bytes);
        if (sizes.segments != stats.bytes_used && !stats.segments_unread)
            sim_fail(sim, "segments of %llu bytes, %llu counted",
                     (unsigned long long)sizes.segments, (unsigned long long)stats.bytes_used);
    }
}

struct view {
    uint8_t tier[SIM_NS][SIM_BLOCKS], map[SIM_NS][SIM_BLOCKS];
};

/* With KVT_SIM_LOG: what a recovery made of each segment. */
static void tell_segments(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->store->disk_count && sim->verbose; i++) {
        const struct kvt_l2 *l2 = sim->store->disks[i].l2;

        for (uint32_t s = 0; s < l2->limit; s++)
            if (l2->segments[s].state)
                sim_tell(sim,
                         "root %u, segment %u: generation %llu, state %u, %llu bytes, from %llu", i,
                         s, (unsigned long long)l2->segments[s].generation, l2->segments[s].state,
                         (unsigned long long)l2->segments[s].bytes,
                         (unsigned long long)l2->segments[s].min_sequence);
    }
}

static void look_at_all(struct sim *sim, struct view *view)
{
    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        for (uint32_t i = 0; i < SIM_BLOCKS; i++) {
            view->tier[ns][i] = sim_look(sim, ns, i, &view->map[ns][i]);
            if (view->tier[ns][i] != KVT_TIER_MISS && !sim->blocks[ns][i].may)
                sim_fail(sim, "namespace %u, block %u is back", ns, i);
        }
}

static void read_all(struct sim *sim, const struct view *view, bool must[SIM_NS][SIM_BLOCKS])
{
    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        for (uint32_t i = 0; i < SIM_BLOCKS; i++) {
            int32_t status = KVT_E_MISS;

            if (view->tier[ns][i] != KVT_TIER_MISS)
                status = sim_get(sim, ns, i);
            if (status && must[ns][i] && !sim_may_be_old(sim, ns, i))
                sim_fail(sim,
                         "namespace %u, block %u was flushed and is %d; root %u, segment %u of "
                         "generation %llu",
                         ns, i, status, sim->blocks[ns][i].place.root,
                         sim->blocks[ns][i].place.segment,
                         (unsigned long long)sim->blocks[ns][i].place.generation);
            if (status && view->tier[ns][i] != KVT_TIER_MISS && !sim->lied &&
                !sim_may_be_old(sim, ns, i)) /* to be seen is no use */
                sim_fail(sim, "namespace %u, block %u was seen and is %d", ns, i, status);
        }
}

void sim_nothing_held(struct sim *sim)
{
    struct kvt_store_stats stats;

    sim_settle(sim);
    sim_check_store(sim);
    kvt_store_stats(sim->store, &stats);
    if (stats.dram_pins || sim->store->reads_going || sim->store->items_used ||
        sim->store->direct_used)
        sim_fail(sim, "pins %llu, reads %u, load items %u, direct pins %u are left",
                 (unsigned long long)stats.dram_pins, sim->store->reads_going,
                 sim->store->items_used, sim->store->direct_used);
    sim_net_settled(sim);
}

static uint64_t unread(const struct sim *sim)
{
    struct kvt_store_stats stats;

    kvt_store_stats(sim->store, &stats);
    return stats.disk_unread;
}

/* Where times pass, blocks that are waited for expire; behind a root that comes later they are
 * swept as orphans. */
static bool may_wait(const struct sim *sim)
{
    return !sim_has_ttl(sim) && !sim->shape.late;
}

/* One recovery of three is over drives whose segments cannot be read for a while. back: until all
 * have been read again, and nothing may be missing then; else they come while clients are at work.
 */
static int open_unread(struct sim *sim, bool back)
{
    uint64_t before;
    int rc;

    if (!sim->shape.disks || sim->lied || !may_wait(sim) || sim_roll(sim, 3))
        return sim_open(sim);
    for (uint32_t i = 0; i < sim->shape.disks; i++) {
        const struct fault_rule rule = {.ops = FAULT_READ,
                                        .name = "seg-",
                                        .skip = sim_roll(sim, 12),
                                        .times = sim_roll(sim, 3) ? 1 + sim_roll(sim, 12) : 0,
                                        .action = FAULT_FAIL,
                                        .error = EIO};

        SIM_CHECK(sim, fault_io_rule(sim->disks[i], &rule) == 0);
    }
    rc = sim_open(sim);
    if (!rc && !sim->shape.scrub_bytes && sim_roll(sim, 2))
        sim_advance(sim, 1500000000); /* a look at the bad drive; scrub would give blocks up */
    for (uint32_t i = 0; i < sim->shape.disks; i++)
        fault_io_clear(sim->disks[i]);
    if (rc)
        return rc;
    before = unread(sim);
    sim->counts.unread += before;
    sim_tell(sim, "%llu segments cannot be read", (unsigned long long)before);
    for (uint32_t turns = 0; back && unread(sim) && turns < 64; turns++)
        sim_advance(sim, 1000000000);
    if (back && unread(sim))
        sim_fail(sim, "%llu of %llu segments do not come back", (unsigned long long)unread(sim),
                 (unsigned long long)before);
    return 0;
}

static void open_again(struct sim *sim)
{
    int rc = open_unread(sim, true);

    if (!rc && sim->out)
        rc = sim_late_comes(sim);
    if (rc && !sim->lied)
        sim_fail(sim, "does not open any more: %d", rc);
    if (!rc)
        return;
    if (sim->store)
        sim_die(sim, POWER_KEEPS);
    /* a drive that lied has left what nobody takes for a root */
    for (uint32_t i = 0; i < sim->shape.disks; i++) {
        sim->disks[i]->ops->destroy(sim->disks[i]);
        sim_new_disk(sim, i);
    }
    sim->lied = false;
    memset(sim->blocks, 0, sizeof sim->blocks);
    sim->counts.refused++;
    SIM_CHECK(sim, sim_open(sim) == 0);
    SIM_CHECK(sim, !sim->out || sim_late_comes(sim) == 0);
}

static void check_recovery(struct sim *sim, enum power_loss loss)
{
    bool must[SIM_NS][SIM_BLOCKS], strict;
    static struct view first, second;
    struct kvt_store_stats stats;
    uint64_t records;

    sim->garbled = sim->garbled || loss == POWER_GARBLES; /* for good: a blank segment keeps it */
    strict = !sim->lied && !sim->garbled;
    sim_expect(sim, must);
    records = fsck_records(sim, strict);
    open_again(sim);
    tell_segments(sim);
    sim_check_store(sim);
    check_space(sim);
    kvt_store_stats(sim->store, &stats);
    if (strict && sim->shape.disks == 1 && !stats.orphan_dropped && stats.disk_blocks != records)
        sim_fail(sim, "fsck counts %llu records, the store %llu blocks",
                 (unsigned long long)records, (unsigned long long)stats.disk_blocks);
    sim_settle(sim); /* orphans are swept */
    look_at_all(sim, &first);
    read_all(sim, &first, must);
    sim_nothing_held(sim);
    if (!sim->shape.disks) {
        memset(sim->blocks, 0, sizeof sim->blocks);
        return;
    }
    loss =
        sim_roll(sim, 2) ? POWER_KEEPS : POWER_DROPS; /* what is not durable yet may go with it */
    sim_die(sim, loss);
    open_again(sim);
    tell_segments(sim);
    sim_check_store(sim);
    sim_settle(sim);
    look_at_all(sim, &second);
    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        for (uint32_t i = 0; i < SIM_BLOCKS; i++)
            if (must[ns][i] && second.tier[ns][i] == KVT_TIER_MISS && !sim_may_be_old(sim, ns, i))
                sim_fail(sim, "a second recovery: namespace %u, block %u was flushed and is gone",
                         ns, i);
    if (!sim->lied && loss == POWER_KEEPS && memcmp(&first.tier, &second.tier, sizeof first.tier))
        for (uint32_t ns = 0; ns < SIM_NS; ns++)
            for (uint32_t i = 0; i < SIM_BLOCKS; i++)
                if (first.tier[ns][i] != second.tier[ns][i] && !sim_may_be_old(sim, ns, i))
                    sim_fail(sim,
                             "a second recovery: namespace %u, block %u was %u, is %u; the one "
                             "before it was %u, is %u",
                             ns, i, first.tier[ns][i], second.tier[ns][i],
                             sim_parent(i) == UINT32_MAX ? 9 : first.tier[ns][sim_parent(i)],
                             sim_parent(i) == UINT32_MAX ? 9 : second.tier[ns][sim_parent(i)]);
    sim_check_medium(sim, strict);
    sim_places_again(sim);
    if (!sim->shape.late && sim_roll(sim, 4))
        return;
    sim_everybody_leaves(sim); /* the next life begins without the late root, or with bad reads */
    sim_close(sim);
    SIM_CHECK(sim, (sim->shape.late ? sim_open(sim) : open_unread(sim, false)) == 0);
}

/* What is asked of a store that has just recovered is asked of what is on its drives. */
void sim_check_recovery(struct sim *sim, enum power_loss loss)
{
    sim_net_quiet(sim, true);
    check_recovery(sim, loss);
    sim_net_quiet(sim, false);
}
