/* The event loop of replay_sim.h: arrivals, loads that are there, prompts that are computed.
 *
 * Events of one time go in the order computed, loaded, arrived, so that what has become free is
 * there for who comes. Waiting prompts are taken in the order of their arrival; one whose load is
 * not there yet lets others pass, unless its engine has something to compute meanwhile. One that
 * needs blocks which are still being computed is planned when an engine is free for it: by then
 * they may be there. Draws depend on the request alone, so the three ways meet the same luck.
 * Threads: one.
 */
#include "replay_sim.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "cli.h"
#include "kvtier/error.h"

#define LINKS_MAX 4096u

enum event_kind { EVENT_COMPUTED, EVENT_LOADED, EVENT_ARRIVED };

struct event {
    double at;
    uint32_t request;
    uint8_t kind;
};

/* A binary heap; before() is its order. */
struct heap {
    struct event *events;
    size_t count;
};

struct prompt {
    uint32_t first;         /* blocks before it are computed while those behind are loaded */
    uint32_t dram, disk;    /* blocks loaded */
    uint32_t asked[2];      /* of DRAM and disk, before a deadline cut it */
    double came_s, there_s; /* when it arrived; when its load ended */
    double took[2];         /* seconds of its load from each, as seen by who asked */
    double queued[2];       /* bytes before it when it asked */
    double head_s, tail_s;  /* computing what is before, and behind, what was loaded */
    int unplanned;          /* waits for an engine before it is planned */
};

/* When a block has been computed; INFINITY: not yet. The store is asked in the order of arrival: a
 * request that it did not have the block for computes it again. One that came earlier, and begins
 * later, goes by what was before. */
struct ready {
    double since_s, before_s;
    uint32_t by; /* the request that found it gone */
};

/* Index in asked, took, queued. */
static unsigned of_tier(unsigned tier)
{
    return tier - KVT_TIER_DRAM;
}

struct sim {
    const struct replay_trace *trace;
    const struct replay_hits *hits;
    const struct replay_world *world;
    const struct replay_planner *planner;
    enum replay_way way;
    struct replay_outcome *out;
    struct heap events, waiting;
    struct prompt *prompts;
    double disk_free_s;
    double *link_free_s; /* of each engine's link to DRAM */
    struct ready *ready; /* of each block of the trace */
    uint32_t idle;
    struct kvt_prefill prefill;
    struct kvt_tier_model tiers[KVT_PLAN_TIERS];
    struct kvt_plan_models models;
};

/* ---- the heap ------------------------------------------------------------------------------- */

static int before(const struct event *a, const struct event *b)
{
    if (a->at != b->at)
        return a->at < b->at;
    if (a->kind != b->kind)
        return a->kind < b->kind;
    return a->request < b->request;
}

static void heap_push(struct heap *heap, struct event event)
{
    size_t i = heap->count++;

    while (i > 0 && before(&event, &heap->events[(i - 1) / 2])) {
        heap->events[i] = heap->events[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap->events[i] = event;
}

static struct event heap_pop(struct heap *heap)
{
    struct event first = heap->events[0], last = heap->events[--heap->count];
    size_t i = 0;

    for (size_t child = 1; child < heap->count; child = 2 * i + 1) {
        if (child + 1 < heap->count && before(&heap->events[child + 1], &heap->events[child]))
            child++;
        if (!before(&heap->events[child], &last))
            break;
        heap->events[i] = heap->events[child];
        i = child;
    }
    heap->events[i] = last;
    return first;
}

/* ---- the world ------------------------------------------------------------------------------ */

static double compute_seconds(const struct replay_world *world, double tokens, double cached)
{
    return world->prefill_a * tokens + world->prefill_b * (tokens * tokens + 2 * cached * tokens);
}

/* 1 - jitter .. 1 + jitter; the same for a request and a purpose, whatever happened before. */
static double luck(const struct sim *sim, uint32_t request, uint64_t purpose)
{
    struct kvt_rng rng = {sim->world->seed ^ (purpose << 32 | request) * 0x9e3779b97f4a7c15u};
    double unit = (double)(kvt_rng_next(&rng) >> 11) * 0x1p-53;

    return 1 + sim->world->jitter * (2 * unit - 1);
}

static double drive_rate(const struct replay_world *world, double now)
{
    int slow = world->slow > 0 && now >= world->slow_from_s && now < world->slow_to_s;

    return world->rate[KVT_TIER_DISK] / (slow ? world->slow : 1);
}

/* Stand in a tier's queue, until `deadline` at most. *blocks: how many come by then. Returns when
 * the last of them is there, or when time is up. */
static double stand_in(struct sim *sim, uint32_t request, double now, double deadline,
                       uint32_t tier, uint32_t *blocks, double rate, double *free_s)
{
    struct prompt *prompt = &sim->prompts[request];
    double begin = KVT_MAX(now, *free_s), latency = sim->world->latency_s[tier];
    double each = sim->world->block_bytes / rate * luck(sim, request, tier);
    double end = begin + *blocks * each, until = KVT_MAX(deadline - latency, begin);

    prompt->asked[of_tier(tier)] = *blocks;
    prompt->queued[of_tier(tier)] = (begin - now) * rate;
    if (end > until) {
        *blocks = (uint32_t)((until - begin) / each);
        end = until;
    }
    *free_s = end; /* the drive is not held up by what nobody waits for */
    double there = KVT_MIN(end + latency, KVT_MAX(deadline, now));
    prompt->took[of_tier(tier)] = there - now;
    return there;
}

static uint32_t nearest_link(const struct sim *sim)
{
    uint32_t best = 0, links = KVT_MIN(sim->world->engines, LINKS_MAX);

    for (uint32_t i = 1; i < links; i++)
        if (sim->link_free_s[i] < sim->link_free_s[best])
            best = i;
    return best;
}

/* ---- the plan ------------------------------------------------------------------------------- */

/* Which blocks to load. */
static int plan_blocks(struct sim *sim, uint32_t request, double now, uint32_t front, uint32_t dram,
                       uint32_t disk, struct kvt_plan *plan)
{
    const struct replay_world *world = sim->world;
    double link_free = sim->link_free_s[nearest_link(sim)];
    struct kvt_decide query = {.block_tokens = sim->trace->block_tokens,
                               .prompt_tokens = sim->trace->requests[request].tokens,
                               .block_bytes = world->block_bytes,
                               .cut = sim->planner->cut};

    if (front > 0)
        query.runs[query.run_count++] =
            (struct kvt_plan_run){.blocks = front, .by_tier = {[KVT_TIER_DRAM] = front}};
    if (dram + disk > front)
        query.runs[query.run_count++] = (struct kvt_plan_run){
            .blocks = dram + disk - front,
            .by_tier = {[KVT_TIER_DRAM] = dram - front, [KVT_TIER_DISK] = disk}};
    query.queued[KVT_TIER_DRAM] = KVT_MAX(link_free - now, 0) * world->rate[KVT_TIER_DRAM];
    query.queued[KVT_TIER_DISK] = KVT_MAX(sim->disk_free_s - now, 0) * drive_rate(world, now);
    double busy = sim->waiting.count > 0 ? 1 : 1 - (double)sim->idle / world->engines;
    query.lambda = sim->planner->lambda * busy;
    int rc = kvt_decide(&query, &sim->models, plan);
    sim->out->reasons[plan->reason]++;
    return rc;
}

/* How many of the first `run` blocks have been computed by now. */
static uint32_t ready_run(const struct sim *sim, uint32_t request, double now, uint32_t run)
{
    const struct replay_request *r = &sim->trace->requests[request];
    uint32_t ready = 0, known = KVT_MIN(run, r->count);

    for (; ready < known; ready++) {
        const struct ready *block = &sim->ready[r->ranks[ready]];
        if ((request < block->by ? block->before_s : block->since_s) > now)
            return ready;
    }
    return run;
}

/* The blocks behind its hits, which the store has not, are computed by this request. */
static void claim_rest(struct sim *sim, uint32_t request, uint32_t run)
{
    const struct replay_request *r = &sim->trace->requests[request];

    for (uint32_t i = run; i < r->count; i++) {
        struct ready *block = &sim->ready[r->ranks[i]];
        *block = (struct ready){INFINITY, block->since_s, request};
    }
}

/* Blocks [from, to): those before `front` are in DRAM, and `disk` of the ones up to `all`, evenly
 * spread, on disk. Returns how many are on disk. */
static uint32_t on_disk(uint32_t from, uint32_t to, uint32_t front, uint32_t all, uint32_t disk)
{
    uint64_t within = KVT_MAX(to, front) - KVT_MAX(from, front);

    return all > front ? (uint32_t)(within * disk / (all - front)) : 0;
}

/* Its load begins. Returns when it is there, or cut off. */
static double begin_load(struct sim *sim, uint32_t request, double now, double deadline)
{
    struct prompt *prompt = &sim->prompts[request];
    uint32_t dram = prompt->dram, disk = prompt->disk;
    double there = now, then;

    if (prompt->dram)
        there = stand_in(sim, request, now, deadline, KVT_TIER_DRAM, &prompt->dram,
                         sim->world->rate[KVT_TIER_DRAM], &sim->link_free_s[nearest_link(sim)]);
    if (prompt->disk) {
        then = stand_in(sim, request, now, deadline, KVT_TIER_DISK, &prompt->disk,
                        drive_rate(sim->world, now), &sim->disk_free_s);
        there = KVT_MAX(there, then);
    }
    /* A block is of use when all before it have come: what is in DRAM stands in front, about. */
    if (prompt->dram < dram)
        prompt->disk = 0;
    sim->out->late += prompt->dram < dram || prompt->disk < disk;
    return there;
}

/* What the load took is told to the models, as the library does it: of one that was cut off, what
 * came of it; when that is nothing, all of it in twice the time. Refused where it is none. */
static void loaded(struct sim *sim, uint32_t request)
{
    const struct prompt *prompt = &sim->prompts[request];
    const uint32_t blocks[2] = {prompt->dram, prompt->disk};

    for (uint32_t tier = KVT_TIER_DRAM; tier <= KVT_TIER_DISK; tier++) {
        uint32_t i = of_tier(tier), came = blocks[i] ? blocks[i] : prompt->asked[i];
        if (!came)
            continue;
        int rc =
            kvt_tier_observe(&sim->tiers[tier], (uint64_t)(came * sim->world->block_bytes),
                             (uint64_t)prompt->queued[i], prompt->took[i] * (blocks[i] ? 1 : 2));
        (void)rc;
    }
    if (prompt->first == 0)
        heap_push(&sim->waiting, (struct event){prompt->came_s, request, 0});
}

/* Which blocks are loaded; the load begins. */
static int begin(struct sim *sim, uint32_t request, double now)
{
    const struct replay_hits *hits = &sim->hits[request];
    const struct replay_request *r = &sim->trace->requests[request];
    struct prompt *prompt = &sim->prompts[request];
    uint32_t usable = (r->tokens - 1) / sim->trace->block_tokens;
    uint32_t found = hits->dram + hits->disk, run = ready_run(sim, request, now, found);
    uint32_t all = KVT_MIN(run, usable), front = KVT_MIN(hits->front, all);
    /* where the run is cut short, its end is: on disk as often as the rest of it */
    uint32_t disk = on_disk(front, all, hits->front, found, hits->disk);
    struct kvt_plan plan = {.struct_size = sizeof(plan)};
    int rc = 0;

    prompt->unplanned = 0;
    sim->out->pending += run < found ? KVT_MIN(found, r->count) - run : 0;
    if (sim->way == REPLAY_ALWAYS_LOAD)
        plan.count = all;
    else if (sim->way == REPLAY_KVTIER)
        rc = plan_blocks(sim, request, now, front, all - disk, disk, &plan);
    uint32_t to = (uint32_t)(plan.first + plan.count);
    prompt->first = (uint32_t)plan.first;
    prompt->disk = on_disk(prompt->first, to, front, all, disk);
    prompt->dram = (uint32_t)plan.count - prompt->disk;
    prompt->there_s =
        begin_load(sim, request, now, plan.deadline_s > 0 ? now + plan.deadline_s : INFINITY);
    sim->out->loaded_dram += prompt->dram;
    sim->out->loaded_disk += prompt->disk;
    sim->out->from_disk[request] = prompt->disk;
    sim->out->asked_disk[request] = prompt->asked[of_tier(KVT_TIER_DISK)];
    if (prompt->there_s > now)
        heap_push(&sim->events, (struct event){prompt->there_s, request, EVENT_LOADED});
    else
        loaded(sim, request);
    if (prompt->first > 0)
        heap_push(&sim->waiting, (struct event){prompt->came_s, request, 0});
    return rc;
}

static int arrive(struct sim *sim, uint32_t request, double now)
{
    struct prompt *prompt = &sim->prompts[request];
    uint32_t found = sim->hits[request].dram + sim->hits[request].disk;

    prompt->came_s = now;
    claim_rest(sim, request, found);
    if (sim->way == REPLAY_RECOMPUTE || ready_run(sim, request, now, found) == found)
        return begin(sim, request, now);
    prompt->unplanned = 1;
    heap_push(&sim->waiting, (struct event){now, request, 0});
    return 0;
}

/* An engine takes the prompt: for how long? One that computes beside the load goes on from both
 * ends until they meet; that is no later than when it would have computed all of it. */
static double computing(struct sim *sim, uint32_t request, double now)
{
    struct prompt *prompt = &sim->prompts[request];
    double unit = sim->trace->block_tokens, by = luck(sim, request, 7);
    double head = prompt->first * unit, behind = head + (prompt->dram + prompt->disk) * unit;
    double tokens = sim->trace->requests[request].tokens;

    prompt->head_s = compute_seconds(sim->world, head, 0) * by;
    prompt->tail_s = compute_seconds(sim->world, tokens - behind, behind) * by;
    if (prompt->first == 0)
        return prompt->tail_s;
    return KVT_MIN(KVT_MAX(prompt->head_s, prompt->there_s - now) + prompt->tail_s,
                   compute_seconds(sim->world, tokens, 0) * by);
}

static int start_engines(struct sim *sim, double now)
{
    int rc = 0;

    while (!rc && sim->idle > 0 && sim->waiting.count > 0) {
        uint32_t request = heap_pop(&sim->waiting).request;
        if (sim->prompts[request].unplanned) {
            rc = begin(sim, request, now); /* it waits again, or is back once its load is there */
            continue;
        }
        double seconds = computing(sim, request, now);
        sim->out->engine_s += seconds;
        sim->idle--;
        heap_push(&sim->events, (struct event){now + seconds, request, EVENT_COMPUTED});
    }
    return rc;
}

static void computed(struct sim *sim, uint32_t request, double now)
{
    const struct prompt *prompt = &sim->prompts[request];
    const struct replay_request *r = &sim->trace->requests[request];
    uint64_t head = (uint64_t)prompt->first * sim->trace->block_tokens;
    uint64_t behind = head + (uint64_t)(prompt->dram + prompt->disk) * sim->trace->block_tokens;
    int rc = 0;

    if (head)
        rc = kvt_prefill_observe(&sim->prefill, head, 0, prompt->head_s);
    if (!rc)
        rc = kvt_prefill_observe(&sim->prefill, r->tokens - behind, behind, prompt->tail_s);
    (void)rc;
    for (uint32_t i = 0; i < r->count; i++) {
        struct ready *block = &sim->ready[r->ranks[i]];
        block->since_s = KVT_MIN(block->since_s, now);
        if (request < block->by)
            block->before_s = KVT_MIN(block->before_s, now);
    }
    sim->idle++;
    sim->out->ttft_s[request] = now - prompt->came_s;
}

/* ---- beginning and end ----------------------------------------------------------------------- */

static int models_init(struct sim *sim)
{
    const struct replay_world *world = sim->world;
    double priors = sim->planner->priors;

    if (!(priors > 0) || !isfinite(priors) || !(world->block_bytes > 0) || world->engines == 0 ||
        !(world->jitter >= 0 && world->jitter < 1) || world->engines > LINKS_MAX ||
        !kvt_prefill_init(&sim->prefill, world->prefill_a * priors, world->prefill_b * priors))
        return KVT_E_INVAL;
    sim->models.prefill = &sim->prefill;
    for (uint32_t tier = KVT_TIER_DRAM; tier <= KVT_TIER_DISK; tier++) {
        if (!kvt_tier_init(&sim->tiers[tier], world->latency_s[tier] / priors,
                           world->rate[tier] * priors))
            return KVT_E_INVAL;
        sim->models.tiers[tier] = &sim->tiers[tier];
    }
    return 0;
}

static int run_events(struct sim *sim)
{
    size_t next = 0, count = sim->trace->count;
    int rc = 0;

    while (!rc && (next < count || sim->events.count > 0)) {
        struct event event = {.at = INFINITY, .kind = EVENT_ARRIVED};
        if (next < count) {
            event.at =
                (double)(sim->trace->requests[next].at_ms - sim->trace->requests[0].at_ms) * 1e-3;
            event.request = (uint32_t)next;
        }
        if (sim->events.count > 0 && before(&sim->events.events[0], &event))
            event = heap_pop(&sim->events);
        else
            next++;
        if (event.kind == EVENT_ARRIVED)
            rc = arrive(sim, event.request, event.at);
        else if (event.kind == EVENT_LOADED)
            loaded(sim, event.request);
        else
            computed(sim, event.request, event.at);
        if (!rc)
            rc = kvt_cli_interrupted() ? KVT_E_CANCELED : start_engines(sim, event.at);
    }
    return rc;
}

int replay_sim(const struct replay_trace *trace, const struct replay_hits *hits,
               enum replay_way way, const struct replay_world *world,
               const struct replay_planner *planner, struct replay_outcome *out)
{
    struct sim *sim = calloc(1, sizeof(*sim));
    int rc;

    memset(out, 0, sizeof(*out));
    if (!sim)
        return -1;
    sim->trace = trace;
    sim->hits = hits;
    sim->world = world;
    sim->planner = planner;
    sim->way = way;
    sim->out = out;
    sim->idle = world->engines;
    rc = models_init(sim);
    if (!rc) {
        sim->events.events = calloc(trace->count + 1, sizeof(struct event));
        sim->waiting.events = calloc(trace->count + 1, sizeof(struct event));
        sim->prompts = calloc(trace->count + 1, sizeof(*sim->prompts));
        sim->link_free_s = calloc(world->engines, sizeof(double));
        sim->ready = calloc(trace->distinct + 1, sizeof(*sim->ready));
        out->ttft_s = calloc(trace->count + 1, sizeof(double));
        out->from_disk = calloc(trace->count + 1, sizeof(*out->from_disk));
        out->asked_disk = calloc(trace->count + 1, sizeof(*out->asked_disk));
        if (!sim->events.events || !sim->waiting.events || !sim->prompts || !sim->link_free_s ||
            !sim->ready || !out->ttft_s || !out->from_disk || !out->asked_disk)
            rc = -1;
    }
    for (uint64_t i = 0; !rc && i < trace->distinct; i++)
        sim->ready[i] = (struct ready){INFINITY, INFINITY, 0};
    if (!rc)
        rc = run_events(sim);
    free(sim->events.events);
    free(sim->waiting.events);
    free(sim->prompts);
    free(sim->link_free_s);
    free(sim->ready);
    free(sim);
    return rc;
}

void replay_outcome_free(struct replay_outcome *outcome)
{
    free(outcome->ttft_s);
    free(outcome->from_disk);
    free(outcome->asked_disk);
    memset(outcome, 0, sizeof(*outcome));
}

uint32_t replay_engines(const struct replay_trace *trace, const struct replay_world *world,
                        double busy)
{
    double span = 1, work = 0;

    if (trace->count > 0)
        span = (double)(trace->requests[trace->count - 1].at_ms - trace->requests[0].at_ms) * 1e-3;
    for (size_t i = 0; i < trace->count; i++)
        work += compute_seconds(world, trace->requests[i].tokens, 0);
    double engines = span > 0 ? ceil(work / span / busy) : 1;
    return engines < 1 ? 1 : engines > LINKS_MAX ? LINKS_MAX : (uint32_t)engines;
}
