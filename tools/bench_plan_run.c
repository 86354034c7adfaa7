/* kvtier bench plan: what is measured. See cmd_bench_plan.c for what it is about.
 *
 * A cache without DRAM (everything is read from the drive each time) over a drive that is slowed
 * down. Each prompt is computed and stored. Then, at each rate, after some requests that the plan
 * learns from: computed, loaded whole (the plan switched off meanwhile), and as the plan says, in
 * turns, since machines become slower and faster over minutes. Every other turn goes the other way
 * round, and regret is the median of the turns' ratios, so that a drift within a turn cancels, too.
 * Threads: one, and those of llama.cpp and the cache.
 */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "bench_plan.h"
#include "cli.h"
#include "client/client.h"

#define COMMAND "bench plan"
#define BLOCK 16u
#define WARM_LOADS 8 /* two more than what makes a change certain */
#define WARM_REQUESTS 32u
/* Loads expected to take that many times as long as computing are left out. */
#define HOPELESS 2.5
#define COLLAPSE 20.0
#define COLLAPSE_LOADS 20 /* within which the plan must have noticed */
#define COLLAPSE_REQUESTS 100
#define CAP "4GiB"

static int interrupted(void)
{
    return kvt_cli_interrupted() ? -1 : 0;
}

static int cache_open(struct bench_plan *b)
{
    struct kvt_config *config = NULL;
    struct kvt_llama_opts opts;
    char error[512] = "", disk[PATH_MAX + 16];
    static struct demo_paths paths;
    int rc = kvt_config_new(&config);
    if (rc == 0) {
        snprintf(disk, sizeof(disk), "%s:" CAP, b->root);
        const char *const set[][2] = {{"dram", "0"},
                                      {"staging", "64MiB"},
                                      {"disk", disk},
                                      {"plan", "on"},
                                      {"disk_required", "yes"},
                                      {"scrub", "off"},
                                      {"write_queue", "1GiB"},
                                      {"env", "no"}};
        for (size_t i = 0; i < KVT_ARRAY_LEN(set) && rc == 0; i++)
            rc = kvt_config_set(config, set[i][0], set[i][1]);
        if (rc != 0)
            snprintf(error, sizeof(error), "%s", kvt_config_error(config));
    }
    if (rc == 0) {
        config->settings.io_wrap = kvt_slow_io_new;
        config->settings.io_wrap_arg = &b->speed;
        rc = kvt_open(config, &b->cache, error, sizeof(error));
    }
    kvt_config_free(config);
    if (rc == 0) {
        kvt_llama_opts_init(&opts);
        opts.context_params = &b->engine.params;
        opts.model_path = b->model;
        opts.level = KVT_LEVEL_RAW;
        opts.block_tokens = BLOCK;
        opts.digest_dir = demo_cache_paths(&paths) == 0 ? paths.digests : NULL;
        rc = kvt_llama_new(b->cache, b->engine.ctx, &opts, &b->llama, error, sizeof(error));
    }
    if (rc != 0)
        kvt_cli_error(COMMAND, "%s", error[0] != '\0' ? error : kvt_strerror(rc));
    return rc == 0 ? 0 : -1;
}

static void cache_close(struct bench_plan *b)
{
    kvt_llama_free(b->llama);
    kvt_close(b->cache);
    b->llama = NULL;
    b->cache = NULL;
}

static void set_rate(struct bench_plan *b, double bytes_s)
{
    atomic_store(&b->speed.bytes_per_s, (uint64_t)bytes_s);
}

/* Everything is loaded, whatever it costs; loads are learnt from all the same. */
static void load_always(struct bench_plan *b, bool always)
{
    pthread_mutex_lock(&b->cache->lock);
    b->cache->config->settings.plan = always ? KVT_PLAN_SET_OFF : KVT_PLAN_SET_ON;
    pthread_mutex_unlock(&b->cache->lock);
}

/* From having the tokens to having the logits of the last one. */
static int first_token(struct bench_plan *b, uint32_t length, bool restore, double *seconds,
                       struct kvt_llama_report *report, long *restored)
{
    llama_memory_clear(llama_get_memory(b->engine.ctx), true);
    *report = (struct kvt_llama_report){.struct_size = sizeof(*report)};
    *restored = 0;
    int64_t start = demo_now_ns();
    if (restore)
        *restored = kvt_llama_restore(b->llama, 0, b->prompts[length], b->lengths[length], report);
    int rc = *restored < 0 ? (int)*restored
                           : kvt_llama_compute(b->llama, 0, b->prompts[length], (size_t)*restored,
                                               b->lengths[length]);
    *seconds = (double)(demo_now_ns() - start) * 1e-9;
    if (rc != 0 && !kvt_cli_interrupted())
        kvt_cli_error(COMMAND, "%s", kvt_llama_error(b->llama));
    return rc == 0 ? interrupted() : -1;
}

struct sample {
    double seconds;
    struct kvt_llama_report report;
    long restored;
};

static int by_seconds(const void *a, const void *b)
{
    double x = ((const struct sample *)a)->seconds, y = ((const struct sample *)b)->seconds;
    return (x > y) - (x < y);
}

static int run(struct bench_plan *b, uint32_t length, bool restore, struct sample *out)
{
    return first_token(b, length, restore, &out->seconds, &out->report, &out->restored);
}

static const struct sample *median_of(struct sample *samples, int64_t n)
{
    qsort(samples, (size_t)n, sizeof(samples[0]), by_seconds);
    return &samples[n / 2];
}

/* Compute each prompt, store it, and learn what a token takes on disk. */
static int compute_all(struct bench_plan *b)
{
    struct sample sample;
    for (uint32_t i = 0; i < b->length_count; i++) {
        if (run(b, i, false, &sample) != 0)
            return -1;
        b->recompute_s[i] = sample.seconds;
        if (kvt_llama_save(b->llama, 0, b->prompts[i], b->lengths[i]) < 0 ||
            kvt_llama_sync(b->llama) != 0 || kvt_flush(b->cache) != 0) {
            kvt_cli_error(COMMAND, "cannot store: %s", kvt_llama_error(b->llama));
            return -1;
        }
    }
    uint32_t middle = b->length_count / 2;
    b->token_bytes = (double)kvt_ns_record_bytes(kvt_llama_ns(b->llama), 0, KVT_LEVEL_RAW) / BLOCK;
    b->break_even_bytes_s = b->token_bytes * (double)b->lengths[middle] / b->recompute_s[middle];
    return 0;
}

/* Short prompts until the cache has seen enough loads at this speed, or has had its chance. */
static int warm_up(struct bench_plan *b)
{
    int loads = 0;
    for (uint32_t i = 0; i < WARM_REQUESTS && loads < WARM_LOADS; i++) {
        struct sample sample;
        if (run(b, i % (b->length_count - 1), true, &sample) != 0)
            return -1;
        loads += sample.report.tokens_planned > 0;
    }
    return 0;
}

/* The three ways of one turn. */
enum way { WAY_COMPUTE, WAY_LOAD, WAY_PLAN, WAYS };

static int run_turn(struct bench_plan *b, uint32_t i, bool load, bool backwards,
                    struct sample *const turn[WAYS])
{
    int rc = 0;
    for (int at = 0; at < WAYS && rc == 0; at++) {
        int way = backwards ? WAYS - 1 - at : at;
        if (way == WAY_LOAD && !load)
            continue;
        load_always(b, way == WAY_LOAD);
        rc = run(b, i, way != WAY_COMPUTE, turn[way]);
        load_always(b, false);
    }
    return rc;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of pairs that ran next to each other. */
static double median_ratio(const struct sample *of, const struct sample *to, int64_t n)
{
    double ratios[BENCH_PLAN_REPS_MAX] = {0};
    for (int64_t i = 0; i < n; i++)
        ratios[i] = of[i].seconds / to[i].seconds;
    qsort(ratios, (size_t)n, sizeof(ratios[0]), by_value);
    return ratios[n / 2];
}

static int measure_cell(struct bench_plan *b, uint32_t r, uint32_t i)
{
    struct sample computed[BENCH_PLAN_REPS_MAX] = {0}, loaded[BENCH_PLAN_REPS_MAX] = {0},
                  planned[BENCH_PLAN_REPS_MAX] = {0};
    struct bench_plan_cell *cell = &b->cells[r][i];
    double expected = b->rates[r] > 0 ? b->token_bytes * (double)b->lengths[i] / b->rates[r] : 0;
    bool load = expected <= HOPELESS * b->recompute_s[i];
    for (int64_t rep = 0; rep < b->reps; rep++) {
        struct sample *const turn[WAYS] = {&computed[rep], &loaded[rep], &planned[rep]};
        if (run_turn(b, i, load, rep % 2 != 0, turn) != 0)
            return -1;
    }
    cell->regret = median_ratio(planned, computed, b->reps);
    if (load)
        cell->regret = KVT_MAX(cell->regret, median_ratio(planned, loaded, b->reps));
    const struct sample *plan = median_of(planned, b->reps);
    cell->recompute_s = median_of(computed, b->reps)->seconds;
    cell->load_all_s = load ? median_of(loaded, b->reps)->seconds : -1;
    cell->plan_s = plan->seconds;
    cell->report = plan->report;
    cell->restored = plan->restored;
    cell->same_work = plan->restored == 0 && (!load || cell->recompute_s <= cell->load_all_s);
    return 0;
}

static int measure_all(struct bench_plan *b)
{
    for (uint32_t r = 0; r < b->rate_count; r++) {
        set_rate(b, b->rates[r]);
        if (warm_up(b) != 0)
            return -1;
        for (uint32_t i = 0; i < b->length_count; i++)
            if (measure_cell(b, r, i) != 0)
                return -1;
    }
    return 0;
}

/* Loads until plans for a prompt of the middle length load more than half of it, or less; -1: not
 * within COLLAPSE_LOADS, or COLLAPSE_REQUESTS, of which most do not load; -2: interrupted or
 * failed. */
static int loads_until(struct bench_plan *b, double bytes_s, bool load)
{
    int loads = 0;
    set_rate(b, bytes_s);
    for (int i = 0; i < COLLAPSE_REQUESTS && loads <= COLLAPSE_LOADS; i++) {
        struct sample sample;
        if (run(b, b->length_count / 2, true, &sample) != 0)
            return -2;
        if ((2 * sample.report.tokens_planned > sample.report.tokens_usable) == load)
            return loads;
        loads += sample.report.tokens_planned > 0;
    }
    return -1;
}

/* 8 times what would pay, then 0.4 times, and back. */
static int collapse(struct bench_plan *b)
{
    double fast = 8 * b->break_even_bytes_s;
    set_rate(b, fast);
    if (warm_up(b) != 0)
        return -1;
    b->loads_down = loads_until(b, fast / COLLAPSE, false);
    if (b->loads_down == -2 || warm_up(b) != 0)
        return -1;
    b->loads_up = loads_until(b, fast, true);
    return b->loads_up == -2 ? -1 : 0;
}

static int make_prompts(struct bench_plan *b)
{
    int32_t words = llama_vocab_n_tokens(b->engine.vocab);
    b->length_count = 0;
    for (uint32_t i = 0; i < BENCH_PLAN_LENGTHS; i++) {
        size_t whole = (size_t)b->tokens >> (2 * (BENCH_PLAN_LENGTHS - 1 - i));
        whole = KVT_MAX(whole / BLOCK * BLOCK, 4 * BLOCK);
        uint32_t at = b->length_count++;
        b->lengths[at] = whole + BENCH_PLAN_FINISH;
        b->prompts[at] = calloc(b->lengths[at], sizeof(int32_t));
        if (b->prompts[at] == NULL)
            return -1;
        for (size_t t = 0; t < b->lengths[at]; t++) /* no two begin alike */
            b->prompts[at][t] = (int32_t)((t * 7919 + i * 104729 + 17) % (size_t)words);
    }
    return 0;
}

/* From a quarter of what would pay to four times that, and the drive as it is. */
static void choose_rates(struct bench_plan *b)
{
    static const double shares[] = {0.25, 0.7, 1.4, 4};
    b->rate_count = 0;
    for (size_t i = 0; i < KVT_ARRAY_LEN(shares); i++)
        b->rates[b->rate_count++] = shares[i] * b->break_even_bytes_s;
    b->rates[b->rate_count++] = 0;
}

static int prepare(struct bench_plan *b)
{
    snprintf(b->root, sizeof(b->root), "%s/kvtier-bench-plan-XXXXXX", b->dir);
    if (mkdtemp(b->root) == NULL) {
        kvt_cli_error(COMMAND, "--dir: no directory can be made in %s: %s", b->dir,
                      strerror(errno));
        b->root[0] = '\0';
        return -1;
    }
    if (demo_engine_open(&b->engine, COMMAND, b->model) != 0)
        return -1;
    if (make_prompts(b) != 0) {
        kvt_cli_error(COMMAND, "out of memory");
        return -1;
    }
    uint32_t need = (uint32_t)b->lengths[b->length_count - 1] + BLOCK;
    return demo_engine_context(&b->engine, b->threads, need);
}

int bench_plan_run(struct bench_plan *b)
{
    int rc = prepare(b);
    if (rc == 0)
        rc = cache_open(b);
    if (rc == 0)
        rc = compute_all(b);
    if (rc == 0) {
        choose_rates(b);
        llama_memory_clear(llama_get_memory(b->engine.ctx), true);
        if (kvt_llama_calibrate(b->llama, b->lengths[b->length_count - 1]) != 0) {
            kvt_cli_error(COMMAND, "%s", kvt_llama_error(b->llama));
            rc = -1;
        }
    }
    if (rc == 0)
        rc = measure_all(b);
    if (rc == 0)
        rc = collapse(b);
    set_rate(b, 0);
    cache_close(b);
    return rc;
}

void bench_plan_close(struct bench_plan *b)
{
    char path[PATH_MAX + 300];
    DIR *list = b->root[0] != '\0' ? opendir(b->root) : NULL;
    demo_engine_close(&b->engine);
    for (uint32_t i = 0; i < BENCH_PLAN_LENGTHS; i++)
        free(b->prompts[i]);
    if (list == NULL)
        return;
    for (struct dirent *entry; (entry = readdir(list)) != NULL;)
        if (entry->d_name[0] != '.' &&
            snprintf(path, sizeof(path), "%s/%s", b->root, entry->d_name) < (int)sizeof(path))
            (void)unlink(path);
    snprintf(path, sizeof(path), "%s/.lock", b->root);
    (void)unlink(path);
    closedir(list);
    (void)rmdir(b->root);
}
