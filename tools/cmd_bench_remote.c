/* kvtier bench remote: records to and from a Redis server, beside redis-benchmark on the same one.
 *
 * Both move values of the same size over one connection with the same number of commands under way.
 * Ours are what the store does: EXISTS and SET NX out of slots, GET into slots, and every record
 * that comes back is verified. redis-benchmark writes one buffer and looks at nothing. Ours removes
 * a record for each that it puts, redis-benchmark writes over its own: both find memory that the
 * server has already. Rounds of
 * both, one right after the other and each first in turn, so that a busy machine spoils both alike:
 * medians are told, and ratios are medians of the rounds' ratios. Without --url a redis-server of
 * its own is started on loopback, without persistence, and ended. Processes: this one, those two.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/clock.h"
#include "bench_remote.h"
#include "cli.h"
#include "commands.h"
#include "remote/remote.h"
#include "remote/remote_url.h"

#define ROUNDS_MAX 1000
#define DEADLINE_NS INT64_C(60000000000)
#define NS_BYTE 0xBE
#define WARM 8 /* times as many values as keys: all keys are there then, but for one in 3,000 */

enum { THEIRS, OURS, SIDES };

struct bench {
    struct kvt_remote *remote;
    struct kvt_full_key *keys; /* twice as many as records: of this round, and the one before */
    struct kvt_remote_req *reqs;
    /* One that is no measurement. Here, as it may still be under way when an interrupt has ended
     * the wait for it. */
    struct kvt_remote_req one;
    struct kvt_remote_found found;
    uint8_t *memory; /* records */
    pid_t server;    /* 0: not ours */
    bool odd;        /* which half of the keys the last round has put */
    bool wrote;      /* there is something to remove */
};

struct figures {
    double rate[WAYS][SIDES][ROUNDS_MAX]; /* bytes a second */
    uint32_t rounds;
};

static int64_t now_ns(void)
{
    struct kvt_clock clock = kvt_clock_system();

    return kvt_clock_now(&clock);
}

static int order(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(const double *values, uint32_t count)
{
    static double sorted[ROUNDS_MAX];

    memcpy(sorted, values, count * sizeof(sorted[0]));
    qsort(sorted, count, sizeof(sorted[0]), order);
    return count > 0 ? sorted[count / 2] : 0;
}

static double ratio(const struct figures *f, int way)
{
    static double ratios[ROUNDS_MAX];

    for (uint32_t i = 0; i < f->rounds; i++)
        ratios[i] =
            f->rate[way][THEIRS][i] > 0 ? f->rate[way][OURS][i] / f->rate[way][THEIRS][i] : 0;
    return median(ratios, f->rounds);
}

/* ---- our side ------------------------------------------------------------------------------ */

static struct kvt_full_key key_of(uint64_t number)
{
    struct kvt_full_key key;

    memset(&key, 0, sizeof(key));
    memset(key.ns, NS_BYTE, sizeof(key.ns));
    memcpy(key.hash, &number, sizeof(number));
    key.hash_len = 16;
    return key;
}

static void record_make(const struct kvt_bench_remote *plan, const struct kvt_full_key *key,
                        uint8_t *out)
{
    struct kvt_record_header *header = (struct kvt_record_header *)out;

    memset(out, key->hash[0] * 31, plan->size);
    memset(header, 0, sizeof(*header));
    header->magic = KVT_RECORD_MAGIC;
    header->version = KVT_RECORD_VERSION;
    header->map = KVT_LEVEL_KV4;
    header->key = *key;
    header->record_bytes = (uint32_t)plan->size;
    header->payload_bytes = (uint32_t)(plan->size - sizeof(*header));
    header->sequence = 1;
    header->checksum = kvt_record_checksum(header, header->record_bytes);
}

/* Submit `count` requests, `pipeline` at a time, and wait for all. Seconds; 0: one failed, and
 * others may still be under way. */
static double carry_out(const struct bench *bench, struct kvt_remote_req *reqs, uint32_t count,
                        uint32_t pipeline)
{
    const struct kvt_remote_ops *ops = bench->remote->ops;
    int64_t start = now_ns();
    uint32_t sent = 0, done = 0;
    bool good = true;

    while (done < count && good) {
        struct pollfd fd = {.fd = ops->event_fd(bench->remote), .events = POLLIN};
        struct kvt_remote_req *back[64];
        uint32_t got;

        while (sent < count && sent - done < pipeline) {
            reqs[sent].deadline_ns = now_ns() + DEADLINE_NS;
            if (ops->submit(bench->remote, &reqs[sent]) != 0)
                break;
            sent++;
        }
        (void)poll(&fd, 1, 1000);
        got = ops->reap(bench->remote, back, KVT_ARRAY_LEN(back));
        for (uint32_t i = 0; i < got; i++)
            good = good && back[i]->status == 0;
        done += got;
        good = good && !kvt_cli_interrupted();
    }
    return good ? (double)(now_ns() - start) * 1e-9 : 0;
}

/* For each record that is put one of the round before is removed, as on a server that is full: it
 * gives the new one its memory. A server that has to fetch its memory from the kernel is half as
 * fast, whoever writes to it (redis-benchmark, too, but that writes over its own values). */
static uint32_t put_requests(const struct kvt_bench_remote *plan, struct bench *bench)
{
    const struct kvt_full_key *old = bench->keys + (bench->odd ? plan->records : 0);
    const struct kvt_full_key *new = bench->keys + (bench->odd ? 0 : plan->records);

    bench->odd = !bench->odd;
    for (int64_t i = 0; i < plan->records; i++) {
        uint8_t *record = bench->memory + (size_t)i * plan->size;

        record_make(plan, &new[i], record);
        bench->reqs[2 * i] =
            (struct kvt_remote_req){.op = KVT_REMOTE_DROP, .count = 1, .keys = &old[i]};
        bench->reqs[2 * i + 1] = (struct kvt_remote_req){.op = KVT_REMOTE_PUT,
                                                         .count = 1,
                                                         .keys = &new[i],
                                                         .record = record,
                                                         .record_bytes = (uint32_t)plan->size};
    }
    return (uint32_t)plan->records * 2;
}

/* What the last round has put. */
static uint32_t get_requests(const struct kvt_bench_remote *plan, struct bench *bench)
{
    const struct kvt_full_key *keys = bench->keys + (bench->odd ? plan->records : 0);

    for (int64_t i = 0; i < plan->records; i++)
        bench->reqs[i] = (struct kvt_remote_req){.op = KVT_REMOTE_GET,
                                                 .count = 1,
                                                 .keys = &keys[i],
                                                 .record = bench->memory + (size_t)i * plan->size,
                                                 .record_bytes = (uint32_t)plan->size};
    return (uint32_t)plan->records;
}

static double ours(const struct kvt_bench_remote *plan, struct bench *bench, int way)
{
    uint32_t count = way == PUT ? put_requests(plan, bench) : get_requests(plan, bench);
    uint32_t pipeline = (uint32_t)plan->pipeline * (way == PUT ? 2 : 1);
    double seconds = carry_out(bench, bench->reqs, count, pipeline);

    return seconds > 0 ? (double)plan->records * (double)plan->size / seconds : 0;
}

/* Records of both rounds, or nothing at all. */
static bool remove_ours(struct bench *bench)
{
    bench->one = (struct kvt_remote_req){.op = KVT_REMOTE_DROP_NS, .count = 1, .keys = bench->keys};
    return carry_out(bench, &bench->one, 1, 1) > 0;
}

/* The server is ours, and could not be started or has died. */
static bool server_ended(struct bench *bench)
{
    if (bench->server <= 0 || waitpid(bench->server, NULL, WNOHANG) != bench->server)
        return bench->server < 0;
    bench->server = -1;
    return true;
}

/* A server that has just been started answers by and by. */
static bool wait_ready(struct bench *bench, int tries)
{
    for (int i = 0; i < tries && !kvt_cli_interrupted() && !server_ended(bench); i++) {
        bench->one = (struct kvt_remote_req){
            .op = KVT_REMOTE_PROBE, .count = 1, .keys = bench->keys, .found = &bench->found};
        if (carry_out(bench, &bench->one, 1, 1) > 0)
            return true;
        nanosleep(&(const struct timespec){0, 100000000}, NULL);
    }
    return false;
}

/* ---- rounds -------------------------------------------------------------------------------- */

/* Nothing of ours, nor of redis-benchmark's, is left on a server that is somebody's. rc: of the
 * measurement; when it has failed, requests may still be under way. */
static int leave_nothing(const struct kvt_bench_remote *plan, struct bench *bench, int rc)
{
    if (plan->url == NULL || !bench->wrote)
        return rc;
    if (rc == 0 && remove_ours(bench) && kvt_bench_theirs_remove(plan))
        return 0;
    kvt_cli_error(KVT_BENCH_REMOTE, "%skeys kvt0:bebebe* and key:0* may be left on %s:%s",
                  kvt_cli_interrupted() ? "interrupted: " : "", plan->at.host, plan->at.port);
    return -1;
}

static int measure(const struct kvt_bench_remote *plan, struct bench *bench, struct figures *out)
{
    if (!wait_ready(bench, plan->url ? 10 : 300)) {
        if (kvt_cli_interrupted())
            return -1;
        if (bench->server < 0)
            kvt_cli_error(KVT_BENCH_REMOTE, "the redis-server of the benchmark has ended");
        else
            kvt_cli_error(KVT_BENCH_REMOTE, "%s:%s does not answer", plan->at.host, plan->at.port);
        return -1;
    }
    bench->wrote = true;
    if (kvt_bench_theirs(plan, PUT, WARM * plan->records) <= 0)
        return -1;
    if (!remove_ours(bench) || ours(plan, bench, PUT) <= 0) {
        if (!kvt_cli_interrupted())
            kvt_cli_error(KVT_BENCH_REMOTE, "a record could not be put: has the server memory?");
        return -1;
    }
    for (int64_t round = 0; round < plan->rounds && !kvt_cli_interrupted(); round++) {
        for (int way = PUT; way < WAYS; way++)
            for (int turn = 0; turn < SIDES; turn++) {
                int side = (int)((round + turn) % SIDES);
                double rate = side == OURS ? ours(plan, bench, way)
                                           : kvt_bench_theirs(plan, way, plan->records);

                if (rate <= 0) {
                    if (!kvt_cli_interrupted())
                        kvt_cli_error(KVT_BENCH_REMOTE,
                                      "a record could not be moved: has the server memory?");
                    return -1;
                }
                out->rate[way][side][round] = rate;
            }
        out->rounds++;
    }
    return 0;
}

static int bench_open(const struct kvt_bench_remote *plan, struct bench *bench)
{
    char where[sizeof(plan->at.host) + 32], error[512] = "";
    struct kvt_remote_params params = {.where = where};

    (void)snprintf(where, sizeof(where), "redis://%s:%s", plan->at.host, plan->at.port);
    bench->keys = calloc((size_t)plan->records * 2, sizeof(*bench->keys));
    bench->reqs = calloc((size_t)plan->records * 2, sizeof(*bench->reqs));
    bench->memory = aligned_alloc(KVT_PAGE_BYTES, (size_t)plan->records * plan->size);
    if (!bench->keys || !bench->reqs || !bench->memory) {
        kvt_cli_error(KVT_BENCH_REMOTE, "not enough memory for %" PRId64 " records: --records",
                      plan->records);
        return -1;
    }
    for (int64_t i = 0; i < plan->records * 2; i++)
        bench->keys[i] = key_of((uint64_t)i);
    if (kvt_remote_tier_open(&params, &bench->remote, error, sizeof(error)) == 0)
        return 0;
    kvt_cli_error(KVT_BENCH_REMOTE, "%s", error);
    return -1;
}

static void bench_close(struct bench *bench)
{
    if (bench->remote != NULL) {
        bench->remote->ops->stop(bench->remote);
        bench->remote->ops->destroy(bench->remote);
    }
    free(bench->keys);
    free(bench->reqs);
    free(bench->memory);
}

/* ---- telling ------------------------------------------------------------------------------- */

static void print_row(const char *name, const struct figures *f, int way)
{
    printf("  %-8s %14.0f %14.0f %8.2f\n", name, median(f->rate[way][OURS], f->rounds) * 1e-6,
           median(f->rate[way][THEIRS], f->rounds) * 1e-6, ratio(f, way));
}

static json_t *way_json(const struct figures *f, int way)
{
    return json_pack("{s:f, s:f, s:f}", "kvtier_mb_per_s",
                     median(f->rate[way][OURS], f->rounds) * 1e-6, "redis_benchmark_mb_per_s",
                     median(f->rate[way][THEIRS], f->rounds) * 1e-6, "ratio", ratio(f, way));
}

static int tell(const struct kvt_bench_remote *plan, const struct figures *f, int json)
{
    if (json)
        return kvt_cli_json(
            json_pack("{s:I, s:I, s:I, s:i, s:o, s:o}", "value_bytes", (json_int_t)plan->size,
                      "records", (json_int_t)plan->records, "pipeline", (json_int_t)plan->pipeline,
                      "rounds", (int)f->rounds, "put", way_json(f, PUT), "get", way_json(f, GET)));
    printf("values of %" PRIu64 " bytes, one connection, %" PRId64
           " commands under way; medians of "
           "%u rounds of %" PRId64 "\n",
           plan->size, plan->pipeline, f->rounds, plan->records);
    printf("  %-8s %14s %14s %8s\n", "MB/s", "kvtier", "redis-benchm.", "ratio");
    print_row("put", f, PUT);
    print_row("get", f, GET);
    printf("  ratio: kvtier to redis-benchmark, the median of the rounds'\n");
    return KVT_EXIT_OK;
}

static int plan_check(struct kvt_bench_remote *plan)
{
    static struct kvt_remote_url url;
    char error[512];

    plan->size = (plan->size + KVT_PAGE_BYTES - 1) / KVT_PAGE_BYTES * KVT_PAGE_BYTES;
    if (plan->url == NULL)
        return 0;
    if (kvt_remote_url_parse(plan->url, &url, error, sizeof(error)) != 0) {
        kvt_cli_error(KVT_BENCH_REMOTE, "%s", error);
        return -1;
    }
    if (url.kind != KVT_REMOTE_REDIS || url.tls || url.seed_count != 1 || !url.seeds[0].port[0]) {
        kvt_cli_error(KVT_BENCH_REMOTE,
                      "--url redis://HOST:PORT: one server, as redis-benchmark reaches it");
        return -1;
    }
    plan->at = url.seeds[0];
    return 0;
}

int kvt_cmd_bench_remote(int argc, char **argv)
{
    static struct figures figures;
    struct kvt_bench_remote plan = {.size = 344064, .records = 512, .pipeline = 16, .rounds = 11};
    struct bench bench = {.remote = NULL};
    int json = 0;
    const struct kvt_cli_option options[] = {
        {.name = "url",
         .metavar = "URL",
         .help =
             "redis://HOST:PORT of a server without a password; keys kvt0:bebebe* and key:0* are "
             "written, and removed at the end (default: a redis-server of its own)",
         .text = &plan.url},
        {.name = "size",
         .metavar = "SIZE",
         .help = "of a value, rounded up to 4 KiB (default 336KiB)",
         .size = &plan.size,
         .min = 4096,
         .max = 64 << 20},
        {.name = "records",
         .metavar = "N",
         .help = "moved in each round, each way, by each (default 512)",
         .number = &plan.records,
         .min = 1,
         .max = 100000},
        {.name = "pipeline",
         .metavar = "N",
         .help = "commands under way at a time (default 16)",
         .number = &plan.pipeline,
         .min = 1,
         .max = 64},
        {.name = "rounds",
         .metavar = "N",
         .help = "of which the medians are told (default 11)",
         .number = &plan.rounds,
         .min = 1,
         .max = ROUNDS_MAX},
        {.name = "json", .help = "one JSON object", .flag = &json},
    };
    int rc = kvt_cli_parse(KVT_BENCH_REMOTE,
                           "[--url URL] [--size SIZE] [--records N] [--pipeline N] [--rounds N] "
                           "[--json]",
                           options, KVT_ARRAY_LEN(options), NULL, 0, 0, NULL, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    if (plan_check(&plan) != 0)
        return KVT_EXIT_USAGE;
    kvt_cli_catch_interrupt();
    if (plan.url == NULL)
        bench.server = kvt_bench_server_start(&plan);
    rc = bench.server < 0 ? -1 : bench_open(&plan, &bench);
    if (rc == 0)
        rc = measure(&plan, &bench, &figures);
    rc = leave_nothing(&plan, &bench, rc);
    bench_close(&bench);
    kvt_bench_server_end(bench.server);
    if (rc != 0 || kvt_cli_interrupted())
        return KVT_EXIT_PROBLEM;
    return tell(&plan, &figures, json);
}
