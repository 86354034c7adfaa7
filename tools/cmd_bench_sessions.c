/* kvtier bench sessions: conversations on one GPU, more of them than its memory holds.
 *
 * Real pages, kernels, records, DRAM and disk, through the session manager; attention is not
 * computed. What computing would take comes from a model, C(n) = a n + b n^2, printed first.
 * First every session prefills its tokens and goes idle; then sessions come back in random order,
 * each with a short new prompt. Time to the first token is measured from kvt_session_resume() to
 * the end of the load, plus the model's time for what is left to compute.
 * Time that an engine would compute in passes only while the store has something to do in it: once
 * nothing is left to encode or to write, waiting longer would change nothing.
 * Threads: one; the memory is touched by several before. Exit 1: no GPU, or a step failed.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "bench_sessions.h"
#include "cli.h"
#include "client/client.h"
#include "commands.h"
#include "kvtier/kvtier.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#define COMMAND "bench sessions"
#define TOUCH_BYTES (UINT64_C(64) << 20)
#define TOUCH_THREADS 8
#define QUIET_S 0.5 /* the store writes nothing for so long: a batch to a slow drive has ended */

/* Seconds that the model takes to compute n tokens from the start on. */
double bench_sessions_computing(const struct bench_talks *t, double n)
{
    return 1e-6 * (double)t->us_linear * n + 1e-12 * (double)t->ps_square * n * n;
}

static int fail(struct bench_talks *t, int rc, const char *what)
{
    return gpu_bench_fail(&t->gpu, rc, what);
}

/* ---- open ---- */

static int set_size(struct kvt_config *config, const char *key, const char *dir, uint64_t bytes)
{
    char text[4200];
    int n = dir != NULL ? snprintf(text, sizeof(text), "%s:%llu", dir, (unsigned long long)bytes)
                        : snprintf(text, sizeof(text), "%llu", (unsigned long long)bytes);
    return n < (int)sizeof(text) ? kvt_config_set(config, key, text) : KVT_E_LIMIT;
}

static int open_cache(struct bench_talks *t)
{
    static const char *const fixed[][2] = {{"level", "kv4"}, {"gpu_store_ctas", "96"},
                                           {"write", NULL},  {"request_blocks_max", "262144"},
                                           {"plan", "off"}, /* what loads take is measured */
                                           {"env", "no"}};
    struct kvt_config *config;
    char error[256] = "";
    int rc = kvt_config_new(&config);
    if (rc != 0)
        return fail(t, rc, "configuration");
    for (size_t i = 0; i < KVT_ARRAY_LEN(fixed) && rc == 0; i++)
        rc = kvt_config_set(config, fixed[i][0], fixed[i][1] != NULL ? fixed[i][1] : t->write);
    if (rc == 0)
        rc = set_size(config, "dram", NULL, t->dram);
    if (rc == 0 && t->dir != NULL)
        rc = set_size(config, "disk", t->dir, t->disk);
    if (rc == 0)
        rc = kvt_open(config, &t->cache, error, sizeof(error));
    kvt_config_free(config);
    if (error[0] != '\0')
        kvt_cli_error(COMMAND, "%s", error);
    if (rc == 0)
        t->cache->gpu_library = t->gpu.driver;
    return fail(t, rc, "cache");
}

static int open_sessions(struct bench_talks *t)
{
    struct gpu_bench *b = &t->gpu;
    struct kvt_identity identity;
    uint32_t longest = (uint32_t)(t->tokens + t->prompt * (t->turns + 1));
    struct kvt_session_mgr_opts opts = {.struct_size = sizeof(opts),
                                        .sessions_max = (uint32_t)t->sessions,
                                        .tokens_max = longest,
                                        .blocks_max =
                                            (uint32_t)t->sessions * (longest / 16 + 1) + 65536u};
    kvt_identity_init(&identity);
    identity.engine = COMMAND;
    identity.model = b->geometry->name;
    int rc = kvt_ns_open(t->cache, &identity, &b->layout, &t->ns);
    if (rc == 0)
        rc = kvt_pool_register(t->cache, &b->layout, &b->pool, &t->pool);
    if (rc == 0)
        rc = kvt_session_mgr_open(t->ns, t->pool, &opts, &t->mgr);
    for (int64_t i = 0; i < t->sessions && rc == 0; i++)
        rc = kvt_session_open(t->mgr, NULL, 0, &t->ids[i]);
    t->text = calloc(longest, sizeof(*t->text));
    return fail(t, rc == 0 && t->text == NULL ? -ENOMEM : rc, "sessions");
}

/* ---- memory ---- */

struct touching {
    uint8_t *base;
    uint64_t bytes;
    _Atomic uint64_t next; /* relaxed: pieces are handed out, nothing else */
};

static void *touch_pieces(void *arg)
{
    struct touching *touching = arg;
    uint64_t at;
    while ((at = atomic_fetch_add_explicit(&touching->next, TOUCH_BYTES, memory_order_relaxed)) <
               touching->bytes &&
           !kvt_cli_interrupted())
        /* a kernel that does not know it leaves the touching to whoever pins */
        (void)madvise(touching->base + at, KVT_MIN(TOUCH_BYTES, touching->bytes - at),
                      MADV_POPULATE_WRITE);
    return NULL;
}

/* What pins DRAM does so with one thread, and so does what the machine gives memory by: several
 * threads first. */
static void touch(struct bench_talks *t)
{
    struct touching touching = {.base = t->cache->arena, .bytes = t->cache->arena_bytes};
    pthread_t threads[TOUCH_THREADS];
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    int started = 0, wanted = (int)KVT_MAX(1L, KVT_MIN(cpus, (long)TOUCH_THREADS));
    double start = gpu_bench_now();
    while (started < wanted &&
           pthread_create(&threads[started], NULL, touch_pieces, &touching) == 0)
        started++;
    for (int i = 0; i < started; i++)
        (void)pthread_join(threads[i], NULL);
    t->touch_seconds = gpu_bench_now() - start;
}

/* Whether to stop here, and print what has been seen. */
static int over(const struct bench_talks *t)
{
    return kvt_cli_interrupted() || (t->deadline > 0 && gpu_bench_now() >= t->deadline);
}

static void wait_pinned(struct bench_talks *t)
{
    struct timespec pause = {.tv_nsec = 20000000};
    double start = gpu_bench_now();
    while (kvt_pin_state(&t->cache->pin) == KVT_PIN_PINNING && !over(t))
        nanosleep(&pause, NULL);
    t->pin_seconds = gpu_bench_now() - start;
}

static void close_all(struct bench_talks *t)
{
    kvt_session_mgr_close(t->mgr);
    kvt_pool_unregister(t->pool);
    kvt_ns_close(t->ns);
    kvt_close(t->cache);
    gpu_bench_close(&t->gpu);
    free(t->text);
}

/* ---- turns ---- */

/* The words of a session: its own from the first on. */
static const uint32_t *words(struct bench_talks *t, int64_t session, uint32_t from, size_t n)
{
    for (size_t i = 0; i < n; i++)
        t->text[i] = (uint32_t)(session * 1000003 + (from + (uint32_t)i) * 7) & 0x7fffffffu;
    return t->text;
}

static enum bench_source source_of(const struct kvt_session_plan *plan, int64_t prompt)
{
    if (plan->recompute > prompt + 16) /* a partial block may have gone with its page */
        return FROM_NOWHERE;
    if (plan->from_disk > 0)
        return plan->from_disk < plan->from_dram ? FROM_BOTH : FROM_DISK;
    return plan->from_dram > 0 ? FROM_DRAM : FROM_L0;
}

static void note(struct bench_talks *t, const struct kvt_session_plan *plan, int64_t prompt,
                 double seconds)
{
    enum bench_source source = source_of(plan, prompt);
    double n = plan->tokens, left = plan->recompute;
    double ttft = seconds + bench_sessions_computing(t, n) - bench_sessions_computing(t, n - left);
    size_t i = t->counts[source];
    if (i == BENCH_TURNS_MAX)
        return;
    t->noted++;
    t->counts[source]++;
    t->from_dram[source] += plan->from_dram;
    t->from_disk[source] += plan->from_disk;
    t->recomputed[source] += plan->recompute;
    t->ttft[source][i] = ttft;
    t->load[source][i] = seconds;
    t->cold[source][i] = bench_sessions_computing(t, n);
    t->fit += source != FROM_NOWHERE;
    t->slower += ttft > bench_sessions_computing(t, n);
}

/* One turn: n new tokens. *seconds: until the pages are there. */
static int turn(struct bench_talks *t, int64_t session, int64_t n, struct kvt_session_plan *plan,
                double *seconds)
{
    kvt_session_id id = t->ids[session];
    const uint32_t *text = words(t, session, t->lengths[session], (size_t)n);
    double start = gpu_bench_now();
    int rc;
    plan->struct_size = sizeof(*plan);
    while ((rc = kvt_session_resume(t->mgr, id, text, (size_t)n, NULL, NULL)) == -EAGAIN) {
        long left = kvt_session_mgr_work(t->mgr, -1); /* pages of others are being stored */
        if (left < 0)
            return fail(t, (int)left, "work");
    }
    if (rc == 0)
        rc = kvt_session_wait(t->mgr, id, -1) < 0 ? KVT_E_STATE : 0;
    *seconds = gpu_bench_now() - start;
    if (rc == 0)
        rc = kvt_session_get_plan(t->mgr, id, plan);
    if (rc == 0)
        rc = kvt_session_filled(t->mgr, id, plan->tokens);
    if (rc == 0)
        rc = kvt_session_idle(t->mgr, id);
    t->lengths[session] += (uint32_t)n;
    return fail(t, rc, "a turn");
}

static uint64_t stat_of(struct bench_talks *t, const char *name)
{
    uint64_t value = 0;
    return kvt_stats_get(t->cache, name, &value) == 0 ? value : 0;
}

/* The engine computes for so long, and the manager works; less where nothing is left to do. */
static int compute(struct bench_talks *t, double seconds)
{
    double now = gpu_bench_now(), until = now + seconds, quiet = now;
    uint64_t written = stat_of(t, "disk.written_bytes");
    struct timespec pause = {.tv_nsec = 1000000};
    long left = 0;
    while ((now = gpu_bench_now()) < until && left >= 0 && !over(t)) {
        left = kvt_session_mgr_work(t->mgr, 0);
        const uint64_t before = written;
        written = stat_of(t, "disk.written_bytes");
        if (left > 0 || written != before || stat_of(t, "disk.queue_bytes") > 0)
            quiet = now;
        if (now - quiet > QUIET_S)
            break;
        nanosleep(&pause, NULL);
    }
    return fail(t, left < 0 ? (int)left : 0, "work");
}

/* Until nothing is left to encode. */
static int settle(struct bench_talks *t)
{
    long left;
    while ((left = kvt_session_mgr_work(t->mgr, -1)) > 0 && !over(t)) {
    }
    return fail(t, left < 0 ? (int)left : 0, "work");
}

static uint64_t pages_used(struct bench_talks *t)
{
    struct kvt_session_stats stats = {.struct_size = sizeof(stats)};
    return kvt_session_mgr_stats(t->mgr, &stats) == 0 ? stats.pages - stats.pages_free : 0;
}

/* Every session once, from nothing. */
static int fill(struct bench_talks *t)
{
    struct kvt_session_plan plan;
    double seconds, start = gpu_bench_now();
    double prefill = bench_sessions_computing(t, (double)t->tokens) * (double)t->percent / 100;
    int rc = 0;
    t->pool_used_before = pages_used(t);
    for (int64_t i = 0; i < t->sessions && rc == 0 && !over(t); i++) {
        rc = turn(t, i, t->tokens, &plan, &seconds);
        t->filled += rc == 0;
        if (rc == 0)
            rc = compute(t, prefill);
        if (rc == 0 && (i + 1) % 8 == 0)
            fprintf(stderr, "%lld sessions filled after %.1f s\n", (long long)i + 1,
                    gpu_bench_now() - start);
    }
    if (rc == 0)
        rc = settle(t);
    t->pool_used_after = pages_used(t);
    t->fill_seconds = gpu_bench_now() - start;
    return rc;
}

static int run_turns(struct bench_talks *t)
{
    struct kvt_session_plan plan;
    uint32_t order[BENCH_SESSIONS_MAX];
    double seconds;
    int rc = fill(t);
    double start = gpu_bench_now();
    for (int64_t round = 0; round < t->turns && rc == 0 && !over(t); round++) {
        for (int64_t i = 0; i < t->sessions; i++) {
            int64_t j = (int64_t)kvt_rng_below(&t->gpu.rng, (uint64_t)i + 1);
            order[i] = order[j];
            order[j] = (uint32_t)i;
        }
        for (int64_t i = 0; i < t->sessions && rc == 0 && !over(t); i++) {
            rc = turn(t, order[i], t->prompt, &plan, &seconds);
            if (rc == 0)
                note(t, &plan, t->prompt, seconds);
            if (rc == 0)
                rc = settle(t);
            if (rc == 0) /* the answer is generated here */
                rc = compute(t, 1e-3 * (double)t->gap_ms);
        }
        fprintf(stderr, "round %lld ends after %.1f s: %zu of %zu turns held\n",
                (long long)round + 1, gpu_bench_now() - start, t->fit, t->noted);
    }
    t->turn_seconds = gpu_bench_now() - start;
    return rc;
}

static int run(struct bench_talks *t)
{
    static struct gpu_bench_geometry geometry = {"8b", 32, 8, 128};
    struct gpu_bench *b = &t->gpu;
    geometry.layers = (uint32_t)t->layers;
    b->blocks = 1; /* of the bench's own slots, which are not used */
    int rc = gpu_bench_open(b);
    b->blocks = (int64_t)(t->pool_bytes / ((uint64_t)t->layers * 2 * 16 * 8 * 128 * 2));
    if (rc == 0)
        rc = gpu_bench_pool(b, &geometry);
    if (rc == 0)
        rc = open_cache(t);
    if (rc == 0)
        touch(t);
    if (rc == 0)
        rc = open_sessions(t);
    if (rc == 0) {
        wait_pinned(t);
        rc = run_turns(t);
    }
    if (rc != 0)
        kvt_cli_error(COMMAND, "%s", b->error[0] != '\0' ? b->error : kvt_strerror(rc));
    if (rc == 0 || t->filled > 0) {
        json_t *all = bench_sessions_results(t);
        if (b->json) {
            int written = kvt_cli_json(all);
            rc = rc != 0 ? rc : written;
        } else {
            bench_sessions_print(all), json_decref(all);
        }
    }
    if (rc == 0 && kvt_cli_interrupted())
        rc = -1;
    close_all(t);
    return rc == 0 ? KVT_EXIT_OK : KVT_EXIT_PROBLEM;
}

int kvt_cmd_bench_sessions(int argc, char **argv)
{
    static struct bench_talks talks = {.sessions = 64,
                                       .tokens = 65536,
                                       .turns = 2,
                                       .prompt = 128,
                                       .layers = 32,
                                       .us_linear = 23,
                                       .ps_square = 430,
                                       .percent = 100,
                                       .gap_ms = 1000,
                                       .write = "evict",
                                       .pool_bytes = UINT64_C(56000000000),
                                       .dram = UINT64_C(96) << 30,
                                       .disk = UINT64_C(40000000000)};
    struct bench_talks *t = &talks;
    const struct kvt_cli_option options[] = {
        {"sessions", "N", "sessions (64)", .number = &t->sessions, .min = 1,
         .max = BENCH_SESSIONS_MAX},
        {"tokens", "N", "tokens of a session (65536)", .number = &t->tokens, .min = 32,
         .max = 1 << 20},
        {"turns", "N", "times that every session comes back (2)", .number = &t->turns, .min = 1,
         .max = 64},
        {"prompt", "N", "new tokens of a turn (128)", .number = &t->prompt, .min = 1, .max = 65536},
        {"layers", "N", "layers of 8 KV heads of 128 (32: an 8B model)", .number = &t->layers,
         .min = 1, .max = 120},
        {"pool", "SIZE", "pages in GPU memory (56GB)", .size = &t->pool_bytes},
        {"dram", "SIZE", "DRAM (96GiB)", .size = &t->dram},
        {"dir", "DIR", "directory on a drive; without it there is no disk tier", .text = &t->dir},
        {"disk", "SIZE", "of the drive (40GB)", .size = &t->disk},
        {"write", "WHEN", "blocks go to the drive: through, evict, idle (evict)",
         .text = &t->write},
        {"us-linear", "N", "a of the computing model, microseconds a token (23)",
         .number = &t->us_linear, .min = 0, .max = 1000000},
        {"ps-square", "N", "b of the computing model, picoseconds a token squared (430)",
         .number = &t->ps_square, .min = 0, .max = 1000000000},
        {"percent", "N", "how much of the time of a prefill may pass in real time (100)",
         .number = &t->percent, .min = 0, .max = 100},
        {"gap-ms", "N", "time of an engine after a turn, to generate its answer, at most (1000)",
         .number = &t->gap_ms, .min = 0, .max = 600000},
        {"seconds", "N", "stop after so many seconds, and print what was seen (0: never)",
         .number = &t->seconds, .min = 0, .max = 86400},
        {"device", "N", "CUDA device (0)", .number = &t->gpu.device, .min = 0, .max = 63},
        {"driver", "FILE", "the CUDA driver's library", .text = &t->gpu.driver},
        {"json", NULL, "one JSON document", .flag = &t->gpu.json},
    };
    int rc = kvt_cli_parse(COMMAND, "[options]", options, KVT_ARRAY_LEN(options), NULL, 0, 0, NULL,
                           argc, argv);
    if (rc != 0)
        return rc == 1 ? KVT_EXIT_OK : KVT_EXIT_USAGE;
    kvt_cli_catch_interrupt();
    t->gpu.rng.state = 42;
    fprintf(t->gpu.json ? stderr : stdout,
            "computing n tokens is taken to be C(n) = %lld us n + %.3f ns n^2: C(%lld) = %.3f s\n",
            (long long)t->us_linear, 1e-3 * (double)t->ps_square, (long long)t->tokens,
            bench_sessions_computing(t, (double)t->tokens));
    t->start = gpu_bench_now();
    t->deadline = t->seconds > 0 ? t->start + (double)t->seconds : 0;
    return run(t);
}
