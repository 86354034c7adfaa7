/* Drives, the store over them, time. See sim.h.
 *
 * The scheduler: the store says when it wants to run, drives say when their next completion is due,
 * clients act when the operation before is over. Time jumps to the earliest of them. While the
 * store is opened or closed it waits for its drives itself: then reading the clock moves it. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "sim/sim.h"
#include "store/store_impl.h"
#include "support/fault_io.h"

#define SPINS 64 /* runs of the store at one moment */
#define SPINS_MORE 3
#define HURRY_NS 20000
#define TOGETHER_NS 1000000
#define IDLE_NS 20000000 /* waiting for what never comes */

void sim_fail(struct sim *sim, const char *format, ...)
{
    va_list args;

    printf("seed %" PRIu64 ", operation %" PRIu64 ": ", sim->seed, sim->op);
    if (sim->net)
        printf("machine %u: ", sim->number);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n    again: KVT_SIM_SEED=%" PRIu64 " KVT_SIM_SEEDS=1 KVT_SIM_LOG=1 %s\n", sim->seed,
           sim->program);
    (void)fflush(stdout);
    _exit(1);
}

void sim_log(struct sim *sim, uint64_t what, uint64_t value)
{
    uint64_t word = sim->hash ^ (what * 0x9e3779b97f4a7c15u) ^ value;

    word ^= (uint64_t)sim->now_ns << 20;
    sim->hash = (word << 23 | word >> 41) * 0xd6e8feb86659fd93u;
    sim->events++;
}

void sim_tell(struct sim *sim, const char *format, ...)
{
    va_list args;

    if (!sim->verbose)
        return;
    printf("%" PRIu64 ", op %" PRIu64 ", %.6f s: ", sim->events, sim->op,
           (double)sim->now_ns / 1e9);
    if (sim->net)
        printf("machine %u: ", sim->number);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
}

uint32_t sim_roll(struct sim *sim, uint32_t bound)
{
    return (uint32_t)kvt_rng_below(&sim->rng, bound);
}

uint32_t sim_more(struct sim *sim, uint32_t bound)
{
    return (uint32_t)kvt_rng_below(&sim->more, bound);
}

static int64_t sim_clock(void *ctx)
{
    struct sim *sim = ctx;

    if (sim->hurry) {
        sim->now_ns += HURRY_NS;
        sim->jumped_ns += HURRY_NS;
    }
    return sim->now_ns;
}

/* KVT_SIM_LOG: what the store says. */
static void say(void *ctx, int level, const char *message)
{
    struct sim *sim = ctx;

    if (strstr(message, "bug:"))
        sim_fail(sim, "%s", message);
    sim_tell(sim, "log %d: %s", level, message);
}

struct kvt_io *sim_medium(struct sim *sim, uint32_t i)
{
    return fault_io_inner(sim->disks[i]);
}

void sim_new_disk(struct sim *sim, uint32_t i)
{
    struct kvt_io *io = NULL;
    int file;

    SIM_CHECK(sim, kvt_io_mem_new(sim->shape.medium_bytes, &io) == 0);
    sim->disks[i] = fault_io_new(power_io_new(io), sim->seed + i);
    sim->faults[i] = (struct sim_fault){.on = false};
    fault_io_clock(sim->disks[i], (struct kvt_clock){sim_clock, sim});
    file = io->ops->open(io, "lock", KVT_IO_OPEN_CREATE); /* whoever opens a root has locked it */
    io->ops->close(io, file);
}

static uint64_t pick(struct sim *sim, const uint64_t *from, uint32_t n)
{
    return from[sim_roll(sim, n)];
}

#define PICK(sim, ...)                         \
    pick(sim, (const uint64_t[]){__VA_ARGS__}, \
         (uint32_t)(sizeof((const uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t)))

static void choose_shape(struct sim *sim, const struct sim *like)
{
    struct sim_shape *shape = &sim->shape;
    uint32_t largest = 0, scale = (uint32_t)PICK(sim, 1, 1, 1, 2, 4, 12);
    uint32_t dice = sim_roll(sim, 10);

    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        for (uint32_t map = 0; map < 3; map++) {
            shape->pages[ns][map] = (uint8_t)(scale * (1 + map + sim_roll(sim, 2)));
            largest = KVT_MAX(largest, shape->pages[ns][map]);
        }
    for (uint32_t i = 0; like && i < SIM_NS * 3; i++) {
        shape->pages[i / 3][i % 3] = like->shape.pages[i / 3][i % 3];
        largest = KVT_MAX(i ? largest : 0, shape->pages[i / 3][i % 3]);
    }
    SIM_CHECK(sim, largest <= SIM_RECORD_PAGES_MAX);
    shape->cache_bytes = PICK(sim, 0, 128u << 10, 256u << 10, 512u << 10, 1u << 20);
    shape->staging_bytes = PICK(sim, 64u << 10, 128u << 10, 256u << 10);
    shape->staging_bytes = KVT_MAX(shape->staging_bytes, 2ull * largest * KVT_PAGE_BYTES);
    shape->cap_bytes = PICK(sim, 8u << 20, 8u << 20, 10u << 20, 16u << 20);
    shape->medium_bytes =
        PICK(sim, SIM_MEDIUM_LARGE, SIM_MEDIUM_LARGE, SIM_MEDIUM_LARGE, 7u << 20, 3u << 20);
    shape->queue_bytes = PICK(sim, 64u << 10, 256u << 10, 1u << 20);
    shape->pin_bytes = PICK(sim, 32u << 10, 128u << 10);
    shape->scrub_bytes = PICK(sim, 0, 0, 1u << 20, 64u << 20);
    shape->latency_min = (int64_t)PICK(sim, 0, 10000, 100000);
    shape->latency_max = shape->latency_min + (int64_t)PICK(sim, 0, 50000, 2000000);
    shape->disks = (uint32_t)PICK(sim, 1, 1, 1, 1, 1, 1, 2, 2, 2, 0);
    if (!shape->disks) /* a namespace whose records fit nowhere is refused */
        shape->cache_bytes = KVT_MAX(shape->cache_bytes, (uint64_t)largest * KVT_PAGE_BYTES);
    shape->write = (int)sim_roll(sim, 5);
    shape->faults = dice < 4 ? SIM_SOUND : dice < 8 ? SIM_HONEST : SIM_LYING;
    shape->late = shape->disks == SIM_DISKS && sim_roll(sim, 2);
    sim_limits_choose(sim, largest * KVT_PAGE_BYTES);
}

void sim_start(struct sim *sim, uint64_t seed, uint8_t *arena, const struct sim *like)
{
    memset(sim, 0, sizeof *sim);
    sim->verbose = getenv("KVT_SIM_LOG") != NULL;
    sim->seed = sim->rng.state = seed;
    sim->arena = arena;
    sim->more.state = seed ^ 0x5eed0f5eed;
    sim->now_ns = 1000000000;
    choose_shape(sim, like);
    for (uint32_t i = 0; i < sim->shape.disks; i++)
        sim_new_disk(sim, i);
}

void sim_stop(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->shape.disks; i++)
        sim->disks[i]->ops->destroy(sim->disks[i]);
}

void sim_set_latency(struct sim *sim, bool on)
{
    for (uint32_t i = 0; i < sim->shape.disks; i++)
        fault_io_latency(sim->disks[i], on ? sim->shape.latency_min : 0,
                         on ? sim->shape.latency_max : 0);
}

int sim_open(struct sim *sim)
{
    const struct sim_shape *shape = &sim->shape;
    struct kvt_store_params params = {
        .arena = sim->arena,
        .arena_bytes = shape->cache_bytes + shape->staging_bytes,
        .staging_bytes = shape->staging_bytes,
        .write_queue_bytes = shape->queue_bytes,
        .pin_bytes_max = shape->pin_bytes,
        .scrub_bytes_per_s = shape->scrub_bytes,
        .write = shape->write,
        .ttl_ns = shape->store_ttl_ns,
        .ns_bytes_max = shape->store_quota_bytes,
        .root_count = shape->disks - shape->late,
        .roots_pending = shape->late,
        .seed = sim->seed,
        .clock = {.now_ns = sim_clock, .ctx = sim},
        .wall = {.now_ns = sim_has_ttl(sim) ? sim_clock : NULL, .ctx = sim},
        .log = {say, sim, KVT_LOG_DEBUG},
        .reply = sim_reply,
        .reply_ctx = sim,
    };
    int rc;

    SIM_CHECK(sim, params.arena_bytes <= SIM_ARENA_MAX);
    memset(sim->arena, 0xa5, params.arena_bytes);
    sim_net_params(sim, &params);
    for (uint32_t i = 0; i < params.root_count; i++) {
        params.roots[i].io = sim->disks[i];
        params.roots[i].cap_bytes = shape->cap_bytes;
    }
    sim->hurry = true;
    rc = kvt_store_open(&params, &sim->store, NULL);
    sim->hurry = false;
    sim_log(sim, 100, (uint64_t)(int64_t)rc);
    sim_tell(sim, "opened: %d", rc);
    if (rc) {
        sim->store = NULL;
        return rc;
    }
    sim->counts.lives++;
    sim->life_op = sim->op;
    sim->grants = 0;
    sim_purges_forgotten(sim);
    sim_late_begin(sim);
    sim_limits_begin(sim);
    sim_clients_start(sim);
    sim_set_latency(sim, true);
    return 0;
}

static void store_ends(struct sim *sim, int64_t timeout_ns)
{
    sim_late_end(sim);
    sim_limits_end(sim, timeout_ns > 0);
    sim->hurry = sim->closing = true;
    kvt_store_close(sim->store, timeout_ns);
    sim->hurry = sim->closing = false;
    sim->store = NULL;
    sim_direct_life(sim);
}

void sim_close(struct sim *sim)
{
    sim_faults_end(sim);
    sim_set_latency(sim, false);
    store_ends(sim, 1000000000);
    sim_clients_die(sim);
    sim_log(sim, 101, 0);
    sim_tell(sim, "closed");
}

/* A life of one machine alone ends without it, as ever. */
void sim_settled(struct sim *sim)
{
    bool more = sim->net || sim->reads;

    sim_everybody_leaves(sim);
    sim_net_heal(sim);
    if (more)
        sim_faults_end(sim);
    sim_settle(sim);
    if (more)
        sim_nothing_held(sim);
}

void sim_die(struct sim *sim, enum power_loss loss)
{
    if (sim->store)
        sim_note_places(sim);
    sim_net_cut(sim);
    sim_faults_end(sim);
    for (uint32_t i = 0; i < sim->shape.disks; i++)
        fault_io_pull_the_plug(sim->disks[i]);
    sim_set_latency(sim, false);
    if (sim->store)
        store_ends(sim, 0);
    sim_clients_die(sim);
    for (uint32_t i = 0; i < sim->shape.disks; i++) {
        sim->counts.unsynced += power_io_loss(sim_medium(sim, i), loss, &sim->rng);
        fault_io_plug_in(sim->disks[i]);
    }
    sim->counts.losses += loss != POWER_KEEPS;
    sim_log(sim, 102, (uint64_t)loss);
    sim_tell(sim, "died, power loss %d", loss);
}

static int64_t next_completion(struct sim *sim)
{
    int64_t next = sim_net_next(sim);

    for (uint32_t i = 0; i < sim->shape.disks; i++)
        next = KVT_MIN(next, fault_io_next(sim->disks[i]));
    return next;
}

/* What is due at one machine. Returns when it wants to run again. */
static int64_t run_due(struct sim *sim)
{
    for (uint32_t spins = 0;;) {
        int64_t next = kvt_store_run(sim->store), drive = next_completion(sim);

        if (drive <= sim->now_ns && spins++ < SPINS)
            continue;
        if (next <= sim->now_ns) { /* more to do at once, or it believes so: drives are at work */
            if (spins++ < SPINS_MORE)
                continue;
            next = drive < INT64_MAX ? drive : sim->now_ns + IDLE_NS;
            if (sim->net) /* others' clocks go on */
                next = KVT_MIN(next, sim->now_ns + TOGETHER_NS);
        }
        return KVT_MAX(KVT_MIN(next, drive), sim->now_ns + 1);
    }
}

void sim_advance(struct sim *sim, int64_t ns)
{
    int64_t end = sim->now_ns + ns;

    for (;;) {
        int64_t others = sim_net_run(sim, run_due), next = run_due(sim);

        next = KVT_MIN(next, others);
        if (next > end) {
            sim_net_now(sim, end);
            return;
        }
        sim_net_now(sim, next);
    }
}

void sim_settle(struct sim *sim)
{
    for (uint32_t turns = 0;; turns++) {
        uint32_t waiting = sim->load_count;

        sim_advance(sim, 1000000);
        for (uint32_t i = 0; i < SIM_WAITS; i++)
            waiting += sim->waits[i].op != 0;
        for (uint32_t i = 0; i < SIM_ASKED; i++)
            waiting += sim->asked[i].cookie != 0;
        if (sim->net || sim->reads)
            waiting += sim_net_waits(sim) + sim->store->writes_going;
        if (!waiting && next_completion(sim) == INT64_MAX && !sim->store->sweep_on &&
            !kvt_store_root_joining(sim->store))
            return;
        if (turns > 200)
            sim_advance(sim, 1000000000);
        if (turns > 400)
            sim_fail(sim, "the store does not settle: %u requests wait", waiting);
    }
}

void sim_check_store(struct sim *sim)
{
    char why[256] = "";

    if (kvt_store_check(sim->store, why, sizeof why))
        sim_fail(sim, "%s", why);
    sim_net_check(sim);
}
