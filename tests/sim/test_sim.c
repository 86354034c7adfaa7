/* The simulator's seeds: see sim.h.
 *
 * Goal: whatever several clients do over bad drives, with deaths and power losses at any moment,
 * nobody ever gets other bytes, what a flush or a purge acknowledged holds, space adds up, a second
 * recovery changes nothing, and nothing stays pinned. Method: KVT_SIM_SEEDS seeds (5,000; a
 * hundredth of that under a sanitizer) from KVT_SIM_SEED on, 1,000 operations each
 * (KVT_SIM_OPERATIONS), some of them twice for the hash. KVT_SOAK_SECONDS=n: goes on with further
 * seeds until n seconds have passed. KVT_SIM_LOG=1: every event. A seed that fails is printed with
 * its operation; the run goes on until five have. */
#include <inttypes.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "sim/sim.h"
#include "support/practice.h"

#define SEED_FIRST 20261129u
#define FAILURES_MAX 5
#define REPEATED 20 /* seeds that run twice */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SEEDS 50u
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SEEDS 50u
#endif
#endif
#ifndef SEEDS
#define SEEDS 5000u
#endif

static uint8_t *arena;
static volatile uint64_t seed_now;
static struct sim_counts total;

static uint64_t number(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);

    return text ? strtoull(text, NULL, 0) : otherwise;
}

/* Which seed it was that ended the program. */
static void at_crash(int signal_number)
{
    char line[64];
    int bytes = snprintf(line, sizeof line, "\ntest_sim: signal %d in seed %" PRIu64 "\n",
                         signal_number, (uint64_t)seed_now);

    (void)!write(STDOUT_FILENO, line, (size_t)bytes);
    (void)signal(signal_number, SIG_DFL);
    (void)raise(signal_number);
}

static void life(struct sim *sim)
{
    uint32_t until = 20 + sim_roll(sim, 400);
    uint64_t operations = number("KVT_SIM_OPERATIONS", 1000);
    enum power_loss loss;

    for (uint32_t i = 0; i < until && sim->op < operations; i++) {
        sim->op++;
        sim_operation(sim);
        if (sim_roll(sim, 3))
            sim_advance(sim, (int64_t)sim_roll(sim, 300000));
        if (sim->op % 32 == 0)
            sim_check_store(sim);
    }
    if (sim_roll(sim, 4) == 0) {
        sim_everybody_leaves(sim);
        sim_close(sim);
        loss = POWER_KEEPS;
    } else {
        loss = (enum power_loss)sim_roll(sim, POWER_LOSSES);
        sim_die(sim, loss);
    }
    sim_check_recovery(sim, loss);
}

#define ADD(field) total.field += sim->counts.field

static void add_counts(const struct sim *sim)
{
    ADD(commits), ADD(good), ADD(missed), ADD(damaged), ADD(flushes), ADD(purges), ADD(lives);
    ADD(losses), ADD(durable), ADD(evicted), ADD(unsynced), ADD(refused), ADD(deaths), ADD(faults);
}

/* True: it passed. */
static bool run_seed(uint64_t seed, uint64_t *hash)
{
    static struct sim sim;
    jmp_buf failed;

    seed_now = seed;
    sim.failed = &failed;
    if (setjmp(failed)) {
        printf("seed %" PRIu64 ", operation %" PRIu64 ": %s\n    again: KVT_SIM_SEED=%" PRIu64
               " KVT_SIM_SEEDS=1 KVT_SIM_LOG=1 test_sim\n",
               seed, sim.op, sim.why, seed);
        return false;
    }
    sim_start(&sim, seed, arena);
    if (sim_open(&sim))
        sim_fail(&sim, "a new root does not open");
    while (sim.op < number("KVT_SIM_OPERATIONS", 1000))
        life(&sim);
    sim_everybody_leaves(&sim);
    sim_settle(&sim);
    sim_close(&sim);
    sim_stop(&sim);
    add_counts(&sim);
    *hash = sim.hash;
    return true;
}

static void print_counts(void)
{
    printf("%" PRIu64 " commits, %" PRIu64 " exact loads, %" PRIu64 " misses, %" PRIu64
           " damaged, %" PRIu64 " flushes, %" PRIu64 " purges\n",
           total.commits, total.good, total.missed, total.damaged, total.flushes, total.purges);
    printf("%" PRIu64 " lives, %" PRIu64 " power losses with %" PRIu64 " changes unsynced, %" PRIu64
           " client deaths, %" PRIu64 " faults, %" PRIu64 " roots refused\n",
           total.lives, total.losses, total.unsynced, total.deaths, total.faults, total.refused);
    printf("%" PRIu64 " blocks that had to be there were, %" PRIu64 " had been evicted\n",
           total.durable, total.evicted);
}

int main(void)
{
    uint64_t first = number("KVT_SIM_SEED", number("KVT_TEST_SEED", SEED_FIRST));
    uint64_t seeds = number("KVT_SIM_SEEDS", SEEDS), failures = 0, all = 0;

    (void)mallopt(M_MMAP_THRESHOLD, 1 << 30);
    (void)mallopt(M_TRIM_THRESHOLD, 1 << 30);
    (void)mallopt(M_TOP_PAD, 16 << 20);
    (void)setvbuf(stdout, NULL, _IOLBF, 0);
    printf("seeds from %" PRIu64 ", %" PRIu64 " of them\n", first, seeds);
    practice_begin("simulation");
    (void)signal(SIGSEGV, at_crash);
    (void)signal(SIGALRM, at_crash);
    arena = aligned_alloc(KVT_PAGE_BYTES, SIM_ARENA_MAX);
    if (!arena)
        return 1;
    for (uint64_t i = 0; i < seeds || practice_goes_on(); i++) {
        uint64_t hash = 0, again = 0;
        bool good;

        (void)alarm(300); /* a seed takes milliseconds */
        practice_point();
        good = run_seed(first + i, &hash);
        if (good && i < REPEATED) {
            good = run_seed(first + i, &again) && hash == again;
            if (hash != again)
                printf("seed %" PRIu64 " does not repeat itself\n", first + i);
        }
        all ^= hash * (2 * i + 1);
        if (good)
            practice_passed();
        else if (++failures == FAILURES_MAX)
            break;
    }
    (void)alarm(0);
    printf("hash over all logs %016" PRIx64 "\n", all);
    print_counts();
    if (!failures && seeds >= 50 && (!total.durable || !total.good || !total.evicted)) {
        printf("nothing was demanded: the test is blind\n");
        return 1;
    }
    free(arena);
    return failures != 0;
}
