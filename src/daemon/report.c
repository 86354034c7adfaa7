/* The daemon's numbers, asked of the owner by a client of our own: see report.h. */
#include "daemon/report.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "kvtier/version.h"

#define RING_BYTES (1u << 17)
#define ANSWER_MS 2000
#define TEXT_BYTES (256u << 10)
#define CLIENTS_SHOWN 64u
#define ROOT_VALUES (sizeof(struct kvt_store_root_state) / sizeof(uint64_t))

int kvt_report_open(struct kvt_report *report, struct kvt_host *host,
                    const struct kvt_server *server)
{
    *report = (struct kvt_report){
        .host = host, .server = server, .start_ns = kvt_clock_now(&host->clock)};
    return kvt_owner_connect(host->owner, RING_BYTES, &report->channel);
}

void kvt_report_close(struct kvt_report *report)
{
    if (report->host != NULL)
        kvt_owner_disconnect(report->host->owner, &report->channel);
}

/* Ask STAT and wait for the answer. Returns how many values there are, or an error. */
static int stat_ask(struct kvt_report *report, uint64_t *values, uint32_t values_max)
{
    struct kvt_ring *requests = &report->channel.requests, *replies = &report->channel.replies;
    struct kvt_msg *msg = kvt_ring_reserve(requests, sizeof(*msg));
    const void *frame;
    int bytes;
    if (msg == NULL)
        return -EAGAIN;
    *msg = (struct kvt_msg){.bytes = sizeof(*msg), .op = KVT_OP_STAT, .cookie = 1};
    kvt_ring_push(requests, sizeof(*msg));
    for (int tries = 0; (bytes = kvt_ring_peek(replies, &frame)) == 0; tries++) {
        struct pollfd fd = {.fd = replies->event_fd, .events = POLLIN};
        uint64_t rung;
        if (tries == 2)
            return -ETIMEDOUT;
        if (!kvt_ring_sleep(replies))
            continue;
        int n = poll(&fd, 1, ANSWER_MS);
        kvt_ring_awake(replies);
        if (n > 0 && read(fd.fd, &rung, sizeof(rung)) < 0)
            continue;
    }
    if (bytes < (int)sizeof(*msg))
        return KVT_E_CORRUPT;
    const struct kvt_msg_stat_reply *reply = frame;
    uint32_t count = KVT_MIN(reply->msg.count, values_max);
    count = KVT_MIN(count, (uint32_t)(((uint32_t)bytes - sizeof(*msg)) / sizeof(uint64_t)));
    memcpy(values, reply->values, count * sizeof(uint64_t));
    kvt_ring_pop(replies);
    return (int)count;
}

struct text {
    char *bytes;
    size_t used;
};

__attribute__((format(printf, 2, 3))) static void say(struct text *text, const char *format, ...)
{
    va_list args;
    if (text->used >= TEXT_BYTES)
        return;
    va_start(args, format);
    int n = vsnprintf(text->bytes + text->used, TEXT_BYTES - text->used, format, args);
    va_end(args);
    text->used = n < 0 ? TEXT_BYTES : KVT_MIN(text->used + (size_t)n, (size_t)TEXT_BYTES);
}

static void say_roots(struct text *text, struct kvt_host *host, const uint64_t *values,
                      uint32_t known)
{
    uint32_t count = host->settings->disk_count;
    pthread_mutex_lock(&host->lock);
    for (uint32_t i = 0; i < count; i++) {
        const struct kvt_root_state *root = &host->roots[i];
        struct kvt_store_root_state state = {0};
        if (root->io != NULL && root->number >= 0 && (uint32_t)root->number < known)
            memcpy(&state, &values[(uint32_t)root->number * ROOT_VALUES], sizeof(state));
        say(text, "disk.%" PRIu32 ".path %s\n", i, root->path);
        if (state.failing != 0)
            say(text, "disk.%" PRIu32 ".state writing fails: %s (%d)\n", i,
                kvt_strerror(state.failing), (int)state.failing);
        else
            say(text, "disk.%" PRIu32 ".state %s\n", i, root->state);
        say(text, "disk.%" PRIu32 ".backend %s\n", i, root->backend[0] ? root->backend : "none");
        say(text, "disk.%" PRIu32 ".cap_bytes %" PRIu64 "\n", i, root->cap_bytes);
        say(text, "disk.%" PRIu32 ".bytes_used %" PRIu64 "\n", i, state.bytes_used);
        say(text, "disk.%" PRIu32 ".read_fail %" PRIu64 "\n", i, state.read_fails);
    }
    pthread_mutex_unlock(&host->lock);
}

static void say_clients(struct text *text, const struct kvt_report *report)
{
    struct kvt_server_client clients[CLIENTS_SHOWN];
    struct kvt_server_stats stats;
    size_t count = kvt_server_clients(report->server, clients, CLIENTS_SHOWN);
    kvt_server_stats(report->server, &stats);
    say(text, "daemon.clients %zu\n", count);
    say(text, "daemon.accepted %" PRIu64 "\n", stats.accepted);
    say(text, "daemon.refused_peer %" PRIu64 "\n", stats.refused_peer);
    say(text, "daemon.refused_version %" PRIu64 "\n", stats.refused_version);
    say(text, "daemon.refused_full %" PRIu64 "\n", stats.refused_full);
    say(text, "daemon.bad_hello %" PRIu64 "\n", stats.bad_hello);
    say(text, "daemon.clients_left %" PRIu64 "\n", stats.left);
    say(text, "daemon.clients_died %" PRIu64 "\n", stats.died);
    say(text, "daemon.clients_broken %" PRIu64 "\n", stats.broken);
    for (size_t i = 0; i < KVT_MIN(count, (size_t)CLIENTS_SHOWN); i++)
        say(text, "client.%" PRIu32 " %s process %d uid %u%s\n", clients[i].number,
            clients[i].name[0] ? clients[i].name : "?", (int)clients[i].pid,
            (unsigned)clients[i].uid, clients[i].leaving ? " disconnected" : "");
}

static int stat_text(struct kvt_report *report, char **out)
{
    static const size_t stat_count = KVT_STORE_STAT_COUNT;
    uint64_t values[KVT_STORE_STAT_COUNT + KVT_DISKS_MAX * ROOT_VALUES] = {0};
    struct text text = {malloc(TEXT_BYTES), 0};
    struct kvt_store_stats stats;
    struct timespec now;
    if (text.bytes == NULL)
        return -ENOMEM;
    int count = stat_ask(report, values, KVT_ARRAY_LEN(values));
    if (count < (int)stat_count) {
        free(text.bytes);
        return count < 0 ? count : KVT_E_CORRUPT;
    }
    memcpy(&stats, values, sizeof(stats));
#define KVT_X(field, name, help) say(&text, "%s %" PRIu64 "\n", name, stats.field);
    KVT_STORE_COUNTERS(KVT_X)
    KVT_STORE_GAUGES(KVT_X)
#undef KVT_X
    clock_gettime(CLOCK_REALTIME, &now);
    say(&text, "writer.pid %d\nwriter.time_s %lld\n", (int)getpid(), (long long)now.tv_sec);
    say(&text, "daemon.version %s\ndaemon.uptime_s %" PRId64 "\n", kvt_version(),
        (kvt_clock_now(&report->host->clock) - report->start_ns) / 1000000000);
    say_clients(&text, report);
    say_roots(&text, report->host, values + stat_count,
              (uint32_t)((uint32_t)count - stat_count) / (uint32_t)ROOT_VALUES);
    *out = text.bytes;
    return 0;
}

int kvt_report_answer(void *ctx, const char *question, char **out)
{
    *out = NULL;
    if (strcmp(question, "stat") == 0)
        return stat_text(ctx, out);
    *out = strdup("error: unknown question; known: stat\n");
    return *out == NULL ? -ENOMEM : 0;
}
