/* kvtier bench remote: records to and from a Redis server, beside redis-benchmark on the same one.
 *
 * Both move values of the same size over one connection with the same number of commands under way.
 * Ours are what the store does: EXISTS and SET NX out of slots, GET into slots, and every record
 * that comes back is verified. redis-benchmark writes one buffer and looks at nothing. Rounds of
 * both, one right after the other and each first in turn, so that a busy machine spoils both alike:
 * medians are told, and ratios are medians of the rounds' ratios. Without --url a redis-server of
 * its own is started on loopback, without persistence, and ended. Processes: this one, those two.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/clock.h"
#include "cli.h"
#include "commands.h"
#include "remote/remote.h"
#include "remote/remote_url.h"

#define COMMAND "bench remote"
#define ROUNDS_MAX 1000
#define DEADLINE_NS INT64_C(60000000000)
#define NS_BYTE 0xBE
#define WARM 8 /* times as many values as keys: all keys are there then, but for one in 3,000 */

extern char **environ;

enum { THEIRS, OURS, SIDES };
enum { PUT, GET, WAYS };

struct plan {
    const char *url;
    uint64_t size;
    int64_t records, pipeline, rounds;
    struct kvt_remote_seed at;
};

struct bench {
    struct kvt_remote *remote;
    struct kvt_full_key *keys;
    struct kvt_remote_req *reqs;
    /* One that is no measurement. Here, as it may still be under way when an interrupt has ended
     * the wait for it. */
    struct kvt_remote_req one;
    struct kvt_remote_found found;
    uint8_t *memory; /* records */
    pid_t server;    /* 0: not ours */
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

/* ---- the server ---------------------------------------------------------------------------- */

/* A port that is free at this moment; 0: none. */
static int free_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    socklen_t len = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), port = 0;

    if (fd >= 0 && bind(fd, (const struct sockaddr *)&at, sizeof(at)) == 0 &&
        getsockname(fd, (struct sockaddr *)&at, &len) == 0)
        port = ntohs(at.sin_port);
    if (fd >= 0)
        (void)close(fd);
    return port;
}

/* Its process; -1 (said). */
static pid_t server_start(struct plan *plan)
{
    int port = free_port();
    pid_t pid;

    (void)snprintf(plan->at.host, sizeof(plan->at.host), "127.0.0.1");
    (void)snprintf(plan->at.port, sizeof(plan->at.port), "%d", port);
    pid = port > 0 ? fork() : -1;
    if (pid < 0) {
        kvt_cli_error(COMMAND, "cannot start a process: %m");
        return -1;
    }
    if (pid == 0) {
        int null = open("/dev/null", O_RDWR);

        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)dup2(null, 0);
        (void)dup2(null, 1);
        execlp("redis-server", "redis-server", "--port", plan->at.port, "--bind", "127.0.0.1",
               "--save", "", "--appendonly", "no", (char *)NULL);
        kvt_cli_error(COMMAND, "redis-server cannot be started: %m (install it, or give --url)");
        _exit(KVT_EXIT_PROBLEM);
    }
    return pid;
}

/* Ours could not be started, or has died. */
static bool server_ended(struct bench *bench)
{
    if (bench->server <= 0 || waitpid(bench->server, NULL, WNOHANG) != bench->server)
        return bench->server < 0;
    bench->server = -1;
    return true;
}

static void server_end(pid_t pid)
{
    if (pid <= 0)
        return;
    (void)kill(pid, SIGTERM);
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        ;
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

static void record_make(const struct plan *plan, uint64_t number, uint8_t *out)
{
    struct kvt_record_header *header = (struct kvt_record_header *)out;

    memset(out, (int)(number * 31), plan->size);
    memset(header, 0, sizeof(*header));
    header->magic = KVT_RECORD_MAGIC;
    header->version = KVT_RECORD_VERSION;
    header->map = KVT_LEVEL_KV4;
    header->key = key_of(number);
    header->record_bytes = (uint32_t)plan->size;
    header->payload_bytes = (uint32_t)(plan->size - sizeof(*header));
    header->sequence = number + 1;
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

static double ours(const struct plan *plan, struct bench *bench, int way)
{
    double seconds;

    for (int64_t i = 0; i < plan->records; i++)
        bench->reqs[i] = (struct kvt_remote_req){.op = way == PUT ? KVT_REMOTE_PUT : KVT_REMOTE_GET,
                                                 .count = 1,
                                                 .keys = &bench->keys[i],
                                                 .record = bench->memory + (size_t)i * plan->size,
                                                 .record_bytes = (uint32_t)plan->size};
    if (way == PUT) { /* what is there is not put again: away with it first */
        bench->one =
            (struct kvt_remote_req){.op = KVT_REMOTE_DROP_NS, .count = 1, .keys = bench->keys};
        if (carry_out(bench, &bench->one, 1, 1) <= 0)
            return 0;
        nanosleep(&(const struct timespec){0, 200000000}, NULL); /* a thread of its frees them */
    }
    seconds = carry_out(bench, bench->reqs, (uint32_t)plan->records, (uint32_t)plan->pipeline);
    return seconds > 0 ? (double)plan->records * (double)plan->size / seconds : 0;
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

/* ---- redis-benchmark ----------------------------------------------------------------------- */

/* What it prints; false: it failed (said). */
static bool run_benchmark(const char *const words[], char *out, size_t len)
{
    posix_spawn_file_actions_t actions;
    size_t used = 0;
    ssize_t got = 0;
    int ends[2], status = -1;
    pid_t pid;
    int rc;

    if (pipe2(ends, O_CLOEXEC) != 0)
        return false;
    (void)posix_spawn_file_actions_init(&actions);
    (void)posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    rc = posix_spawnp(&pid, words[0], &actions, NULL, (char *const *)(uintptr_t)words, environ);
    (void)posix_spawn_file_actions_destroy(&actions);
    (void)close(ends[1]);
    while (rc == 0 && used < len - 1 && (got = read(ends[0], out + used, len - 1 - used)) > 0)
        used += (size_t)got;
    out[used] = '\0';
    (void)close(ends[0]);
    if (rc != 0) {
        kvt_cli_error(COMMAND, "redis-benchmark cannot be started: %s (package redis-tools)",
                      strerror(rc));
        return false;
    }
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    if (status != 0 && WIFSIGNALED(status))
        kvt_cli_error(COMMAND, "redis-benchmark was ended by signal %d", WTERMSIG(status));
    else if (status != 0)
        kvt_cli_error(COMMAND, "redis-benchmark failed with exit code %d%s%.200s",
                      WEXITSTATUS(status), out[0] ? ": " : "", out);
    return status == 0;
}

/* Bytes a second of `count` commands; 0: it failed (said). */
static double theirs(const struct plan *plan, int way, int64_t count)
{
    const char *name = way == PUT ? "set" : "get", *mark = way == PUT ? "\"SET\",\"" : "\"GET\",\"";
    char numbers[4][24], text[4096], *at;
    const char *const words[] = {"redis-benchmark",
                                 "-h",
                                 plan->at.host,
                                 "-p",
                                 plan->at.port,
                                 "-t",
                                 name,
                                 "-c",
                                 "1",
                                 "-d",
                                 numbers[0],
                                 "-n",
                                 numbers[1],
                                 "-r",
                                 numbers[2],
                                 "-P",
                                 numbers[3],
                                 "--csv",
                                 NULL};
    double rate;

    (void)snprintf(numbers[0], sizeof(numbers[0]), "%" PRIu64, plan->size);
    (void)snprintf(numbers[1], sizeof(numbers[1]), "%" PRId64, count);
    (void)snprintf(numbers[2], sizeof(numbers[2]), "%" PRId64, plan->records);
    (void)snprintf(numbers[3], sizeof(numbers[3]), "%" PRId64, plan->pipeline);
    if (!run_benchmark(words, text, sizeof(text)))
        return 0;
    at = strstr(text, mark);
    rate = at ? strtod(at + strlen(mark), NULL) : 0;
    if (rate <= 0)
        kvt_cli_error(COMMAND, "redis-benchmark said something else than a rate: %.200s", text);
    return rate * (double)plan->size;
}

/* ---- rounds -------------------------------------------------------------------------------- */

static int measure(const struct plan *plan, struct bench *bench, struct figures *out)
{
    if (!wait_ready(bench, plan->url ? 10 : 300)) {
        if (bench->server < 0)
            kvt_cli_error(COMMAND, "the redis-server of the benchmark has ended");
        else
            kvt_cli_error(COMMAND, "%s:%s does not answer", plan->at.host, plan->at.port);
        return -1;
    }
    if (theirs(plan, PUT, WARM * plan->records) <= 0)
        return -1;
    for (int64_t round = 0; round < plan->rounds && !kvt_cli_interrupted(); round++) {
        for (int way = PUT; way < WAYS; way++)
            for (int turn = 0; turn < SIDES; turn++) {
                int side = (int)((round + turn) % SIDES);
                double rate =
                    side == OURS ? ours(plan, bench, way) : theirs(plan, way, plan->records);

                if (rate <= 0) {
                    kvt_cli_error(COMMAND, "a record could not be moved: has the server memory?");
                    return -1;
                }
                out->rate[way][side][round] = rate;
            }
        out->rounds++;
    }
    return 0;
}

static int bench_open(const struct plan *plan, struct bench *bench)
{
    char where[sizeof(plan->at.host) + 32], error[512] = "";
    struct kvt_remote_params params = {.where = where};

    (void)snprintf(where, sizeof(where), "redis://%s:%s", plan->at.host, plan->at.port);
    bench->keys = calloc((size_t)plan->records, sizeof(*bench->keys));
    bench->reqs = calloc((size_t)plan->records, sizeof(*bench->reqs));
    bench->memory = aligned_alloc(KVT_PAGE_BYTES, (size_t)plan->records * plan->size);
    if (!bench->keys || !bench->reqs || !bench->memory) {
        kvt_cli_error(COMMAND, "not enough memory for %" PRId64 " records: --records",
                      plan->records);
        return -1;
    }
    for (int64_t i = 0; i < plan->records; i++) {
        bench->keys[i] = key_of((uint64_t)i);
        record_make(plan, (uint64_t)i, bench->memory + (size_t)i * plan->size);
    }
    if (kvt_remote_tier_open(&params, &bench->remote, error, sizeof(error)) == 0)
        return 0;
    kvt_cli_error(COMMAND, "%s", error);
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

static int tell(const struct plan *plan, const struct figures *f, int json)
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

static int plan_check(struct plan *plan)
{
    static struct kvt_remote_url url;
    char error[512];

    plan->size = (plan->size + KVT_PAGE_BYTES - 1) / KVT_PAGE_BYTES * KVT_PAGE_BYTES;
    if (plan->url == NULL)
        return 0;
    if (kvt_remote_url_parse(plan->url, &url, error, sizeof(error)) != 0) {
        kvt_cli_error(COMMAND, "%s", error);
        return -1;
    }
    if (url.kind != KVT_REMOTE_REDIS || url.tls || url.seed_count != 1 || !url.seeds[0].port[0]) {
        kvt_cli_error(COMMAND,
                      "--url redis://HOST:PORT: one server, as redis-benchmark reaches it");
        return -1;
    }
    plan->at = url.seeds[0];
    return 0;
}

int kvt_cmd_bench_remote(int argc, char **argv)
{
    static struct figures figures;
    struct plan plan = {.size = 344064, .records = 512, .pipeline = 16, .rounds = 11};
    struct bench bench = {.remote = NULL};
    int json = 0;
    const struct kvt_cli_option options[] = {
        {.name = "url",
         .metavar = "URL",
         .help = "redis://HOST:PORT of a server without a password; its keys kvt0:* and key:* are "
                 "written (default: a redis-server of its own)",
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
    int rc = kvt_cli_parse(COMMAND,
                           "[--url URL] [--size SIZE] [--records N] [--pipeline N] [--rounds N] "
                           "[--json]",
                           options, KVT_ARRAY_LEN(options), NULL, 0, 0, NULL, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    if (plan_check(&plan) != 0)
        return KVT_EXIT_USAGE;
    kvt_cli_catch_interrupt();
    if (plan.url == NULL)
        bench.server = server_start(&plan);
    rc = bench.server < 0 ? -1 : bench_open(&plan, &bench);
    if (rc == 0)
        rc = measure(&plan, &bench, &figures);
    bench_close(&bench);
    server_end(bench.server);
    if (rc != 0 || kvt_cli_interrupted())
        return KVT_EXIT_PROBLEM;
    return tell(&plan, &figures, json);
}
