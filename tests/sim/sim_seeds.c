/* Runs seeds in child processes, a batch in each, so that one that crashes is a result as well. See
 * sim.h. The run goes on until five have failed. */
#include <errno.h>
#include <inttypes.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checked.h"
#include "sim/sim_net.h"
#include "support/practice.h"

#define SEED_FIRST 20261129u
#define FAILURES_MAX 5
#define BATCH 100u

/* What a child says of each seed that passed. */
struct result {
    uint64_t hash;
    struct sim_counts counts;
};

static struct sim machines[SIM_MACHINES]; /* the first one is in every seed */
static struct sim_counts total;

uint64_t sim_number(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);

    return text ? strtoull(text, NULL, 0) : otherwise;
}

#define ADD(field) to->field += counts->field

static void add_counts(struct sim_counts *to, const struct sim_counts *counts)
{
    ADD(commits), ADD(good), ADD(missed), ADD(damaged), ADD(flushes), ADD(purges), ADD(lives);
    ADD(losses), ADD(durable), ADD(evicted), ADD(unsynced), ADD(refused), ADD(deaths), ADD(faults);
    ADD(sticky), ADD(quotas), ADD(given_up), ADD(expired), ADD(joined), ADD(unread);
    ADD(shared), ADD(put), ADD(fetched), ADD(reached), ADD(direct), ADD(rude);
    for (uint32_t i = 0; i < SIM_KINDS; i++)
        ADD(struck[i]);
    for (uint32_t i = 0; i < NET_KINDS; i++)
        ADD(net[i]);
}

/* Seeds with more: one in four each, or as the environment says. Returns how many machines. */
static uint32_t choose_more(const struct sim_run *run, struct sim *sim)
{
    uint32_t shared = sim_more(sim, 4), reads = sim_more(sim, 4), many = 2 + sim_more(sim, 2);
    struct kvt_rng own = {sim->seed ^ 0x4c0de};

    if (!run->more)
        return 1;
    sim->reads = sim_number("KVT_SIM_READS", !reads);
    sim->rude = sim_number("KVT_SIM_RUDE", !kvt_rng_below(&own, 4));
    return sim_number("KVT_SIM_SHARED", !shared) ? many : 1;
}

static uint64_t run_seed(const struct sim_run *run, uint64_t seed, uint8_t *arenas[])
{
    uint64_t hash = 0;
    uint32_t count;

    sim_start(&machines[0], seed, arenas[0], NULL);
    count = choose_more(run, &machines[0]);
    machines[0].program = run->program;
    if (count > 1)
        sim_net_start(machines, count, seed, arenas);
    run->one(&machines[0]);
    for (uint32_t i = 0; i < count; i++) {
        sim_stop(&machines[i]);
        hash = hash * 3 + machines[i].hash;
    }
    sim_net_stop(&machines[0]);
    for (uint32_t i = 1; i < count; i++)
        add_counts(&machines[0].counts, &machines[i].counts);
    return hash;
}

/* A child: seeds [from, to) of the run, each result down the pipe. */
static int child(const struct sim_run *run, uint64_t first, uint64_t from, uint64_t to, int pipe_fd)
{
    uint8_t *arenas[SIM_MACHINES];

    for (uint32_t i = 0; i < SIM_MACHINES; i++) {
        arenas[i] = aligned_alloc(KVT_PAGE_BYTES, SIM_ARENA_MAX);
        if (!arenas[i])
            return 1;
    }
    for (uint64_t i = from; i < to; i++) {
        struct result result;

        (void)alarm(300); /* a seed takes milliseconds */
        result.hash = run_seed(run, first + i, arenas);
        result.counts = machines[0].counts;
        if (i < run->repeated && run_seed(run, first + i, arenas) != result.hash)
            sim_fail(&machines[0], "it does not repeat itself");
        if (write(pipe_fd, &result, sizeof result) != sizeof result)
            return 1;
    }
    for (uint32_t i = 0; i < SIM_MACHINES; i++)
        free(arenas[i]);
    return 0;
}

/* A batch. Returns how many of it passed before one did not. */
static uint64_t batch(const struct sim_run *run, uint64_t first, uint64_t from, uint64_t to,
                      uint64_t *hash)
{
    struct result result;
    uint64_t passed = 0;
    int ends[2], status = 0;
    pid_t pid;

    (void)fflush(stdout);
    if (pipe(ends) || (pid = fork()) < 0)
        return 0;
    if (!pid) {
        practice_forget();
        close(ends[0]);
        exit(child(run, first, from, to, ends[1]));
    }
    close(ends[1]);
    while (read(ends[0], &result, sizeof result) == sizeof result) {
        add_counts(&total, &result.counts);
        *hash ^= result.hash * (2 * (from + passed) + 1);
        passed++;
        practice_add(1, 0);
    }
    close(ends[0]);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    if (WIFSIGNALED(status))
        printf("seed %" PRIu64 ": ended by signal %d\n", first + from + passed, WTERMSIG(status));
    if (passed == to - from && status) { /* a leak, perhaps */
        printf("seeds from %" PRIu64 ": the process ended with %d\n", first + from, status);
        practice_add(0, 1);
    }
    return passed;
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
    printf("quotas looked at %" PRIu64 " times, %" PRIu64 " blocks given up, %" PRIu64
           " expired; %" PRIu64 " roots that came later; %" PRIu64
           " segments could not be read at open\n",
           total.quotas, total.given_up, total.expired, total.joined, total.unread);
    printf("%" PRIu64 " seeds of several machines: %" PRIu64
           " records put to the shared tier, %" PRIu64 " taken from it, %" PRIu64
           " blocks purged there; %" PRIu64
           " loads by clients that read drives themselves; %" PRIu64 " clients broke off\n",
           total.shared, total.put, total.fetched, total.reached, total.direct, total.rude);
}

/* How often each kind of fault struck. Returns how many kinds never did. */
static uint32_t print_faults(void)
{
    uint32_t unseen = 0;

    printf("operations that went wrong:");
    for (uint32_t i = 0; i < SIM_KINDS; i++) {
        printf("%s %" PRIu64 " %s", i ? "," : "", total.struck[i], sim_kind_name(i));
        unseen += !total.struck[i];
    }
    printf("; %" PRIu64 " faults that stayed\nof the shared tier:", total.sticky);
    for (uint32_t i = 0; i < NET_KINDS; i++) {
        printf("%s %" PRIu64 " %s", i ? "," : "", total.net[i], sim_net_kind_name(i));
        unseen += !total.net[i];
    }
    printf("\n");
    return unseen + !total.sticky;
}

int sim_run(const struct sim_run *run)
{
    uint64_t first = sim_number("KVT_SIM_SEED", sim_number("KVT_TEST_SEED", SEED_FIRST));
    bool soak = getenv("KVT_SOAK_SECONDS") != NULL; /* by time alone */
    uint64_t seeds = sim_number("KVT_SIM_SEEDS", soak ? 0 : run->seeds), failures = 0, hash = 0,
             i = 0;

    (void)mallopt(M_MMAP_THRESHOLD, 1 << 30);
    (void)mallopt(M_TRIM_THRESHOLD, 1 << 30);
    (void)mallopt(M_TOP_PAD, 16 << 20);
    printf("seeds from %" PRIu64 ", %" PRIu64 " of them\n", first, seeds);
    practice_begin(run->practice);
    while (failures < FAILURES_MAX && (i < seeds || practice_goes_on())) {
        uint64_t to = i < seeds ? KVT_MIN(i + BATCH, seeds) : i + BATCH;

        i += batch(run, first, i, to, &hash);
        if (i < to) {
            practice_add(1, 1);
            failures++;
            i++;
        }
    }
    printf("hash over all logs %016" PRIx64 "\n", hash);
    print_counts();
    if (run->all_faults && print_faults() && !failures && seeds >= 1000) {
        printf("a kind of fault has not happened: the test is blind to it\n");
        return 1;
    }
    if (!failures && seeds >= 50 &&
        (!total.durable || !total.good || !total.expired || !total.given_up || !total.joined ||
         !total.unread ||
         (run->more && (!total.fetched || !total.reached || !total.direct || !total.rude)))) {
        printf("nothing was demanded: the test is blind\n");
        return 1;
    }
    return failures != 0;
}
