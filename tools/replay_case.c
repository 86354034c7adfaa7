/* See replay_case.h. What a request finds is decided in the order of arrival by the store; when
 * its first token comes is computed afterwards, from what it found. Threads: one.
 */
#include "replay_case.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "cli.h"
#include "kvtier/error.h"
#include "replay_lru.h"

#define DAY_MS 86400000.0
#define DAY_HOURS 24.0
#define YEAR_DAYS 365.0
#define OVERLOAD_SPAN_S 60 /* a shorter trace is a burst, whatever the engines do */
#define ROOM_OFF 0.005     /* as much more or less may be on disk than the case is about */

uint64_t replay_case_blocks(const struct replay_base *base, uint64_t bytes)
{
    uint64_t distinct = base->trace->distinct;

    /* some more than needed: what is unlimited must not be evicted for want of a free page */
    if (bytes == REPLAY_UNLIMITED)
        return distinct + distinct / 16 + 4096;
    return (uint64_t)((double)bytes / base->world.block_bytes);
}

double replay_span_s(const struct replay_trace *trace)
{
    return (double)(trace->requests[trace->count - 1].at_ms - trace->requests[0].at_ms) * 1e-3;
}

double replay_days(const struct replay_trace *trace)
{
    return KVT_MAX(replay_span_s(trace), 1) * 1e3 / DAY_MS;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Of sorted values; between two of them in proportion, so that p50 of two is their mean. */
static double percentile(const double *sorted, size_t n, double share)
{
    double at = share * (double)(n - 1);
    size_t below = (size_t)at;
    double above = sorted[KVT_MIN(below + 1, n - 1)];

    return sorted[below] + (at - (double)below) * (above - sorted[below]);
}

static struct replay_spread spread_ms(double *seconds, size_t n)
{
    struct replay_spread out = {0, 0, 0};

    qsort(seconds, n, sizeof(*seconds), by_value);
    for (size_t i = 0; i < n; i++)
        out.mean += seconds[i] * 1e3 / (double)n;
    out.p50 = percentile(seconds, n, 0.5) * 1e3;
    out.p99 = percentile(seconds, n, 0.99) * 1e3;
    return out;
}

/* The trace through a store whose root is made for `room` blocks; held: on disk, on average, once
 * the log had begun to turn over; 0: it did not. */
static int run_once(const struct replay_base *base, const struct replay_case *of, uint64_t room,
                    struct replay_hits *hits, struct replay_result *out, double *held)
{
    const struct replay_trace *trace = base->trace;
    struct replay_store *store;
    const struct replay_world *world = &base->world;
    struct replay_admission admission = of->admission;
    struct kvt_progress progress;
    uint64_t sum = 0, samples = 0;
    /* the store counts blocks of REPLAY_BLOCK_TOKENS, whatever the trace's are */
    admission.token_s = world->prefill_a * trace->block_tokens / REPLAY_BLOCK_TOKENS;
    admission.block_s = world->block_bytes / world->rate[KVT_TIER_DISK];
    int rc = replay_store_open(replay_case_blocks(base, of->dram_bytes), room, &admission, &store);

    out->hit_dram = out->hit_disk = 0;
    kvt_progress_start(&progress, "replaying");
    for (size_t i = 0; i < trace->count && !rc; i++) {
        const struct replay_request *request = &trace->requests[i];
        rc = replay_store_prompt(store, request->at_ms - trace->requests[0].at_ms, request->ids,
                                 request->count, &hits[i]);
        out->hit_dram += hits[i].dram;
        out->hit_disk += hits[i].disk;
        if (!rc && kvt_cli_interrupted())
            rc = KVT_E_CANCELED;
        if (!rc && room && replay_store_written(store) > room) {
            sum += replay_store_on_disk(store);
            samples++;
        }
        kvt_progress_update(&progress, i, trace->count);
    }
    kvt_progress_done(&progress);
    *held = samples ? (double)sum / (double)samples : 0;
    if (!rc)
        out->written = replay_store_written(store);
    replay_store_close(store);
    return rc;
}

/* How much of a root goes into headers of so short records depends on the trace. Where it held more
 * or less than the blocks that the case is about, once more with a root that is as much smaller or
 * larger. One that holds all there is gets room for that, as what is unlimited does. */
static int run_store(const struct replay_base *base, const struct replay_case *of,
                     struct replay_hits *hits, struct replay_result *out)
{
    uint64_t disk = of->disk_bytes ? replay_case_blocks(base, of->disk_bytes) : 0;
    bool all = disk >= base->trace->distinct;
    double held = 0;
    int rc = run_once(base, of, all ? replay_case_blocks(base, REPLAY_UNLIMITED) : disk, hits, out,
                      &held);

    if (!rc && held > 0 && !all && fabs(held / (double)disk - 1) > ROOM_OFF)
        rc = run_once(base, of, (uint64_t)((double)disk * (double)disk / held), hits, out, &held);
    if (disk)
        out->dwpd = (double)out->written / (double)disk / replay_days(base->trace);
    return rc;
}

static void price(const struct replay_base *base, const struct replay_case *of,
                  struct replay_result *out)
{
    const struct replay_prices *prices = &base->prices;
    double days = replay_days(base->trace), write_off = prices->years * YEAR_DAYS;
    double saved_s = out->engine_s[REPLAY_RECOMPUTE] - out->engine_s[REPLAY_KVTIER];
    uint64_t dram = of->dram_bytes == REPLAY_UNLIMITED
                        ? (uint64_t)((double)base->trace->distinct * base->world.block_bytes)
                        : of->dram_bytes;
    double disk_days = write_off;

    if (out->dwpd > 0 && prices->disk_dwpd > 0)
        disk_days =
            KVT_MIN(write_off, prices->disk_dwpd * prices->disk_years * YEAR_DAYS / out->dwpd);
    out->usd_saved = saved_s / 3600 * prices->engine_hour / days;
    out->usd_cost = (double)dram * 1e-9 * prices->dram_gb / write_off +
                    (double)of->disk_bytes * 1e-9 * prices->disk_gb / disk_days;
}

/* One way of going about it. Computing everything is the same whatever the sizes. */
static int run_way(const struct replay_base *base, const struct replay_hits *hits,
                   enum replay_way way, struct replay_common *common, struct replay_result *out)
{
    struct replay_outcome outcome;
    int rc = 0;

    if (way == REPLAY_RECOMPUTE && common->recompute) {
        out->ttft[way] = common->ttft;
        out->engine_s[way] = common->engine_s;
        return 0;
    }
    rc = replay_sim(base->trace, hits, way, &base->world, &base->planner, &outcome);
    if (!rc) {
        out->ttft[way] = spread_ms(outcome.ttft_s, base->trace->count);
        out->engine_s[way] = outcome.engine_s;
    }
    if (!rc && way == REPLAY_RECOMPUTE) {
        common->recompute = 1;
        common->ttft = out->ttft[way];
        common->engine_s = outcome.engine_s;
    }
    if (way == REPLAY_KVTIER) {
        memcpy(out->reasons, outcome.reasons, sizeof(out->reasons));
        out->pending = outcome.pending;
        out->late = outcome.late;
    }
    replay_outcome_free(&outcome);
    return rc;
}

static int run_lru(const struct replay_base *base, const struct replay_case *of,
                   struct replay_common *common, struct replay_result *out)
{
    if (!common->lru || common->dram_bytes != of->dram_bytes ||
        common->disk_bytes != of->disk_bytes) {
        uint64_t dram = replay_case_blocks(base, of->dram_bytes);
        uint64_t disk = of->disk_bytes ? replay_case_blocks(base, of->disk_bytes) : 0;
        int64_t hit = replay_lru(base->trace, dram, disk, NULL);
        int64_t sum = disk ? replay_lru(base->trace, dram + disk, 0, NULL) : hit;
        if (hit < 0 || sum < 0)
            return -1;
        common->lru = 1;
        common->dram_bytes = of->dram_bytes;
        common->disk_bytes = of->disk_bytes;
        common->hit_lru = (uint64_t)hit;
        common->hit_lru_sum = (uint64_t)sum;
    }
    out->hit_lru = common->hit_lru;
    out->hit_lru_sum = common->hit_lru_sum;
    return 0;
}

int replay_case_run(const struct replay_base *base, const struct replay_case *of,
                    struct replay_common *common, struct replay_result *out)
{
    struct replay_hits *hits = calloc(base->trace->count + 1, sizeof(*hits));
    int rc = hits ? 0 : -1;

    memset(out, 0, sizeof(*out));
    if (!rc)
        rc = run_store(base, of, hits, out);
    for (int way = 0; way < REPLAY_WAYS && !rc; way++)
        rc = run_way(base, hits, (enum replay_way)way, common, out);
    if (!rc)
        rc = run_lru(base, of, common, out);
    if (!rc)
        price(base, of, out);
    free(hits);
    return rc;
}

int replay_overloaded(const struct replay_base *base, const struct replay_result *result)
{
    double span = replay_span_s(base->trace);

    return span >= OVERLOAD_SPAN_S && result->engine_s[REPLAY_KVTIER] > span * base->world.engines;
}

int replay_pays(const struct replay_result *result)
{
    return result->ttft[REPLAY_KVTIER].mean < result->ttft[REPLAY_RECOMPUTE].mean &&
           result->usd_saved > result->usd_cost;
}

size_t replay_best(const struct replay_result *results, size_t count)
{
    size_t best = count;

    for (size_t i = 0; i < count; i++) {
        if (!replay_pays(&results[i]))
            continue;
        if (best == count || results[i].usd_saved - results[i].usd_cost >
                                 results[best].usd_saved - results[best].usd_cost)
            best = i;
    }
    return best;
}
