/* The event loop of replay_sim.h: arrivals, loads that are there, prompts that are computed.
 *
 * Events of one time go in the order computed, loaded, arrived, so that what has become free is
 * there for who comes. Waiting prompts are taken in the order of their arrival; one whose load is
 * not there yet lets others pass. Draws depend on the request alone, so the three ways meet the
 * same luck. Threads: one.
 */
#include "replay_sim.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
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
    uint32_t dram, disk;           /* blocks loaded */
    double came_s;                 /* when it arrived */
    double took[KVT_PLAN_TIERS];   /* seconds of its load, as seen by who asked */
    double queued[KVT_PLAN_TIERS]; /* bytes before it when it asked */
    double computing_s;
};

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

/* Stand in a tier's queue. Returns when the bytes are there. */
static double stand_in(struct sim *sim, uint32_t request, double now, uint32_t tier,
                       uint32_t blocks, double rate, double *free_s)
{
    struct prompt *prompt = &sim->prompts[request];
    double begin = KVT_MAX(now, *free_s);
    double bytes = blocks * sim->world->block_bytes;

    prompt->queued[tier] = (begin - now) * rate;
    *free_s = begin + bytes / rate * luck(sim, request, tier);
    prompt->took[tier] = *free_s + sim->world->latency_s[tier] - now;
    return now + prompt->took[tier];
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

/* Blocks to load, from the front on. */
static int plan_blocks(struct sim *sim, uint32_t request, double now, uint32_t front, uint32_t dram,
                       uint32_t disk, uint32_t *count)
{
    const struct replay_world *world = sim->world;
    double link_free = sim->link_free_s[nearest_link(sim)];
    struct kvt_plan plan = {.struct_size = sizeof(plan)};
    struct kvt_decide query = {.block_tokens = sim->trace->block_tokens,
                               .prompt_tokens = sim->trace->requests[request].tokens,
                               .block_bytes = world->block_bytes,
                               .cut = KVT_PLAN_CUT_NONE};

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
    int rc = kvt_decide(&query, &sim->models, &plan);
    *count = (uint32_t)plan.count;
    sim->out->reasons[plan.reason]++;
    return rc;
}

static int arrive(struct sim *sim, uint32_t request, double now)
{
    const struct replay_hits *hits = &sim->hits[request];
    struct prompt *prompt = &sim->prompts[request];
    uint32_t usable = (sim->trace->requests[request].tokens - 1) / sim->trace->block_tokens;
    uint32_t front = KVT_MIN(hits->front, usable), count = 0;
    uint32_t all = KVT_MIN(hits->dram + hits->disk, usable);
    /* where the run is cut short, its end is: on disk as often as the rest of it */
    uint32_t behind = hits->dram + hits->disk - hits->front;
    uint32_t disk = behind ? (uint32_t)((uint64_t)(all - front) * hits->disk / behind) : 0;
    int rc = 0;

    prompt->came_s = now;
    if (sim->way == REPLAY_ALWAYS_LOAD)
        count = all;
    else if (sim->way == REPLAY_KVTIER)
        rc = plan_blocks(sim, request, now, front, all - disk, disk, &count);
    uint32_t mixed = all > front ? all - front : 0;
    if (count > front && mixed > 0)
        prompt->disk = (uint32_t)((uint64_t)(count - front) * disk / mixed);
    prompt->dram = count - prompt->disk;
    double there = now;
    if (prompt->dram)
        there = stand_in(sim, request, now, KVT_TIER_DRAM, prompt->dram,
                         sim->world->rate[KVT_TIER_DRAM], &sim->link_free_s[nearest_link(sim)]);
    if (prompt->disk) {
        double then = stand_in(sim, request, now, KVT_TIER_DISK, prompt->disk,
                               drive_rate(sim->world, now), &sim->disk_free_s);
        there = KVT_MAX(there, then);
    }
    sim->out->loaded_dram += prompt->dram;
    sim->out->loaded_disk += prompt->disk;
    sim->out->from_disk[request] = prompt->disk;
    heap_push(&sim->events, (struct event){there, request, EVENT_LOADED});
    return rc;
}

/* What the load took is told to the models. Observations are refused where they are none. */
static void loaded(struct sim *sim, uint32_t request)
{
    const struct prompt *prompt = &sim->prompts[request];
    const uint32_t blocks[KVT_PLAN_TIERS] = {
        [KVT_TIER_DRAM] = prompt->dram, [KVT_TIER_DISK] = prompt->disk};

    for (uint32_t tier = KVT_TIER_DRAM; tier <= KVT_TIER_DISK; tier++) {
        if (!blocks[tier])
            continue;
        int rc =
            kvt_tier_observe(&sim->tiers[tier], (uint64_t)(blocks[tier] * sim->world->block_bytes),
                             (uint64_t)prompt->queued[tier], prompt->took[tier]);
        (void)rc;
    }
    heap_push(&sim->waiting, (struct event){prompt->came_s, request, 0});
}

static void start_engines(struct sim *sim, double now)
{
    while (sim->idle > 0 && sim->waiting.count > 0) {
        uint32_t request = heap_pop(&sim->waiting).request;
        struct prompt *prompt = &sim->prompts[request];
        double cached = (double)(prompt->dram + prompt->disk) * sim->trace->block_tokens;
        double tokens = sim->trace->requests[request].tokens - cached;

        prompt->computing_s = compute_seconds(sim->world, tokens, cached) * luck(sim, request, 7);
        sim->out->engine_s += prompt->computing_s;
        sim->idle--;
        heap_push(&sim->events, (struct event){now + prompt->computing_s, request, EVENT_COMPUTED});
    }
}

static void computed(struct sim *sim, uint32_t request, double now)
{
    const struct prompt *prompt = &sim->prompts[request];
    uint64_t cached = (uint64_t)(prompt->dram + prompt->disk) * sim->trace->block_tokens;
    int rc = kvt_prefill_observe(&sim->prefill, sim->trace->requests[request].tokens - cached,
                                 cached, prompt->computing_s);

    (void)rc;
    sim->idle++;
    sim->out->ttft_s[request] = now - prompt->came_s;
    sim->out->end_s = KVT_MAX(sim->out->end_s, now);
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
        start_engines(sim, event.at);
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
        out->ttft_s = calloc(trace->count + 1, sizeof(double));
        out->from_disk = calloc(trace->count + 1, sizeof(*out->from_disk));
        if (!sim->events.events || !sim->waiting.events || !sim->prompts || !sim->link_free_s ||
            !out->ttft_s || !out->from_disk)
            rc = -1;
    }
    if (!rc)
        rc = run_events(sim);
    free(sim->events.events);
    free(sim->waiting.events);
    free(sim->prompts);
    free(sim->link_free_s);
    free(sim);
    return rc;
}

void replay_outcome_free(struct replay_outcome *outcome)
{
    free(outcome->ttft_s);
    free(outcome->from_disk);
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
