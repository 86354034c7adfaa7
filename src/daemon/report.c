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

#define RING_BYTES (1u << 19) /* a quarter of it is the longest message and more */
#define ANSWER_MS 2000
#define TEXT_BYTES (256u << 10)
#define CLIENTS_SHOWN 64u
#define USAGE_MAX 1024u /* namespaces times ranks that are shown */
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

/* Ask the owner and wait for the answer, which is borrowed until kvt_ring_pop(). Its bytes or an
 * error; a late answer to an earlier question is skipped. */
static int ask(struct kvt_report *report, struct kvt_msg *question, const struct kvt_msg **out)
{
    struct kvt_ring *requests = &report->channel.requests, *replies = &report->channel.replies;
    struct kvt_msg *msg = kvt_ring_reserve(requests, question->bytes);
    const void *frame;
    int bytes;
    if (msg == NULL)
        return -EAGAIN;
    while (kvt_ring_peek(replies, &frame) > 0) /* late answers to earlier questions */
        kvt_ring_pop(replies);
    question->cookie = ++report->asked;
    memcpy(msg, question, question->bytes);
    kvt_ring_push(requests, question->bytes);
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
    *out = frame;
    if ((*out)->cookie == question->cookie)
        return bytes;
    kvt_ring_pop(replies);
    return -EAGAIN;
}

/* The store's numbers. Returns how many values there are, or an error. */
static int stat_ask(struct kvt_report *report, uint64_t *values, uint32_t values_max)
{
    struct kvt_msg question = {.bytes = sizeof(question), .op = KVT_OP_STAT};
    const struct kvt_msg *msg;
    int bytes = ask(report, &question, &msg);
    if (bytes < 0)
        return bytes;
    const struct kvt_msg_stat_reply *reply = (const struct kvt_msg_stat_reply *)(const void *)msg;
    uint32_t count = KVT_MIN(reply->msg.count, values_max);
    count = KVT_MIN(count, (uint32_t)(((uint32_t)bytes - sizeof(*msg)) / sizeof(uint64_t)));
    memcpy(values, reply->values, count * sizeof(uint64_t));
    kvt_ring_pop(&report->channel.replies);
    return (int)count;
}

/* ---- who holds how much -------------------------------------------------------------------- */

static void add_row(struct kvt_usage_row *rows, uint32_t *count, const struct kvt_usage_row *row)
{
    uint32_t i = 0;
    while (i < *count && (memcmp(rows[i].ns, row->ns, sizeof(row->ns)) != 0 ||
                          rows[i].group != row->group || rows[i].rank != row->rank))
        i++;
    if (i == USAGE_MAX)
        return;
    if (i == *count) {
        rows[(*count)++] = *row;
        return;
    }
    rows[i].dram_blocks += row->dram_blocks;
    rows[i].dram_bytes += row->dram_bytes;
    rows[i].disk_blocks += row->disk_blocks;
    rows[i].disk_bytes += row->disk_bytes;
}

static int usage_order(const void *a, const void *b)
{
    const struct kvt_usage_row *x = a, *y = b;
    int order = memcmp(x->ns, y->ns, sizeof(x->ns));
    if (order == 0)
        order = (int)x->group - (int)y->group;
    return order != 0 ? order : (int)x->rank - (int)y->rank;
}

/* Bytes by namespace and rank, all of the index. Returns rows, or an error. */
static int usage_ask(struct kvt_report *report, struct kvt_usage_row rows[USAGE_MAX])
{
    uint32_t from = 0, count = 0;
    do {
        struct kvt_msg_usage question = {.msg = {.bytes = sizeof(question), .op = KVT_OP_USAGE},
                                         .from = from};
        const struct kvt_msg *msg;
        int bytes = ask(report, &question.msg, &msg);
        if (bytes < 0)
            return bytes;
        const struct kvt_msg_usage_reply *reply =
            (const struct kvt_msg_usage_reply *)(const void *)msg;
        for (uint32_t i = 0; i < reply->msg.count; i++)
            add_row(rows, &count, &reply->rows[i]);
        from = reply->next;
        kvt_ring_pop(&report->channel.replies);
    } while (from != 0);
    qsort(rows, count, sizeof(rows[0]), usage_order);
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
    if (n >= 0 && (size_t)n < TEXT_BYTES - text->used) {
        text->used += (size_t)n;
    } else { /* no half lines */
        text->bytes[text->used] = '\0';
        text->used = TEXT_BYTES;
    }
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

/* "usage.NAMESPACE.GROUP.RANK.what": namespaces by the first bytes of their id. */
static void say_usage(struct text *text, struct kvt_report *report)
{
    struct kvt_usage_row *rows = calloc(USAGE_MAX, sizeof(*rows));
    int count = rows == NULL ? 0 : usage_ask(report, rows);
    for (int i = 0; i < count; i++) {
        const struct kvt_usage_row *row = &rows[i];
        char name[64];
        int used = 0;
        for (int j = 0; j < 6; j++)
            used += snprintf(name + used, sizeof(name) - (size_t)used, "%02x", row->ns[j]);
        (void)snprintf(name + used, sizeof(name) - (size_t)used, ".%u.%u", row->group, row->rank);
        if (i == 0 || memcmp(rows[i - 1].ns, row->ns, sizeof(row->ns)) != 0)
            say(text, "namespace.%.12s %.64s\n", name, row->label[0] ? row->label : "?");
        say(text, "usage.%s.dram_blocks %" PRIu64 "\n", name, row->dram_blocks);
        say(text, "usage.%s.dram_bytes %" PRIu64 "\n", name, row->dram_bytes);
        say(text, "usage.%s.disk_blocks %" PRIu64 "\n", name, row->disk_blocks);
        say(text, "usage.%s.disk_bytes %" PRIu64 "\n", name, row->disk_bytes);
    }
    free(rows);
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
    say_usage(&text, report);
    *out = text.bytes;
    return 0;
}

/* ---- Prometheus ---------------------------------------------------------------------------- */

/* "lookup.hits_dram" -> "kvtier_lookup_hits_dram"; counters end in _total. */
static void say_metric(struct text *text, const char *name, bool counter, const char *help,
                       uint64_t value)
{
    char metric[96];
    size_t used =
        (size_t)snprintf(metric, sizeof(metric), "kvtier_%s%s", name, counter ? "_total" : "");
    for (size_t i = 0; i < used && i < sizeof(metric); i++)
        if (metric[i] == '.')
            metric[i] = '_';
    say(text, "# HELP %s %s\n# TYPE %s %s\n%s %" PRIu64 "\n", metric, help, metric,
        counter ? "counter" : "gauge", metric, value);
}

static void say_usage_metrics(struct text *text, struct kvt_report *report)
{
    struct kvt_usage_row *rows = calloc(USAGE_MAX, sizeof(*rows));
    int count = rows == NULL ? 0 : usage_ask(report, rows);
    say(text, "# HELP kvtier_held_bytes record bytes by namespace, rank and tier\n"
              "# TYPE kvtier_held_bytes gauge\n");
    for (int i = 0; i < count; i++) {
        char ns[2 * KVT_NS_BYTES + 1];
        for (size_t j = 0; j < KVT_NS_BYTES; j++)
            (void)snprintf(ns + 2 * j, 3, "%02x", rows[i].ns[j]);
        for (int disk = 0; disk < 2; disk++)
            say(text,
                "kvtier_held_bytes{namespace=\"%s\",group=\"%u\",rank=\"%u\",tier=\"%s\"} %" PRIu64
                "\n",
                ns, rows[i].group, rows[i].rank, disk ? "disk" : "dram",
                disk ? rows[i].disk_bytes : rows[i].dram_bytes);
    }
    free(rows);
}

static void say_server_metrics(struct text *text, const struct kvt_report *report)
{
    struct kvt_server_stats stats;
    kvt_server_stats(report->server, &stats);
    say_metric(text, "daemon.clients", false, "programs connected",
               kvt_server_clients(report->server, NULL, 0));
    say_metric(text, "daemon.accepted", true, "connections of users that may connect",
               stats.accepted);
    say_metric(text, "daemon.refused_peer", true, "connections of other users", stats.refused_peer);
    say_metric(text, "daemon.refused_version", true, "programs of another version",
               stats.refused_version);
    say_metric(text, "daemon.refused_full", true, "connections beyond the limit",
               stats.refused_full);
    say_metric(text, "daemon.clients_left", true, "programs that left in order", stats.left);
    say_metric(text, "daemon.clients_died", true, "programs that ended otherwise", stats.died);
    say_metric(text, "daemon.clients_broken", true, "programs disconnected for nonsense",
               stats.broken);
}

static int metrics_text(struct kvt_report *report, char **out)
{
    uint64_t values[KVT_STORE_STAT_COUNT + KVT_DISKS_MAX * ROOT_VALUES] = {0};
    struct text text = {malloc(TEXT_BYTES), 0};
    struct kvt_store_stats stats;
    if (text.bytes == NULL)
        return -ENOMEM;
    text.bytes[0] = '\0';
    int count = stat_ask(report, values, KVT_ARRAY_LEN(values));
    if (count < (int)KVT_STORE_STAT_COUNT) {
        free(text.bytes);
        return count < 0 ? count : KVT_E_CORRUPT;
    }
    memcpy(&stats, values, sizeof(stats));
#define KVT_X(field, name, help) say_metric(&text, name, true, help, stats.field);
    KVT_STORE_COUNTERS(KVT_X)
#undef KVT_X
#define KVT_X(field, name, help) say_metric(&text, name, false, help, stats.field);
    KVT_STORE_GAUGES(KVT_X)
#undef KVT_X
    say_server_metrics(&text, report);
    say_usage_metrics(&text, report);
    say(&text,
        "# HELP kvtier_build_info version of the kvtierd\n# TYPE kvtier_build_info gauge\n"
        "kvtier_build_info{version=\"%s\"} 1\n",
        kvt_version());
    *out = text.bytes;
    return 0;
}

int kvt_report_answer(void *ctx, const char *question, char **out)
{
    *out = NULL;
    if (strcmp(question, "stat") == 0)
        return stat_text(ctx, out);
    if (strcmp(question, "metrics") == 0)
        return metrics_text(ctx, out);
    *out = strdup("error: unknown question; known: stat, metrics\n");
    return *out == NULL ? -ENOMEM : 0;
}
