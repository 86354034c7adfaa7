/* The daemon's numbers, asked of the owner by a client of our own: see report.h. */
#include "daemon/report_impl.h"

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
#include "format/handshake.h"
#include "kvtier/error.h"
#include "kvtier/version.h"

#define RING_BYTES (1u << 19) /* a quarter of it is the longest message and more */
#define ANSWER_MS 2000
#define CLIENTS_SHOWN 64u

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
    free(report->purge.text);
    report->purge.text = NULL;
}

void kvt_report_look(struct kvt_report *report)
{
    const void *frame;
    int bytes;
    while ((bytes = kvt_ring_peek(&report->channel.replies, &frame)) > 0) {
        kvt_report_purge_take(report, frame, bytes);
        kvt_ring_pop(&report->channel.replies);
    }
}

/* Wait for one message. Its bytes, borrowed until kvt_ring_pop(); -ETIMEDOUT. */
static int wait_one(struct kvt_report *report, const void **frame)
{
    struct kvt_ring *replies = &report->channel.replies;
    int bytes;
    for (int tries = 0; (bytes = kvt_ring_peek(replies, frame)) == 0; tries++) {
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
    return bytes;
}

/* Ask the owner and wait for the answer, which is borrowed until kvt_ring_pop(). Its bytes or an
 * error; late answers to earlier questions are passed over. */
static int ask(struct kvt_report *report, struct kvt_msg *question, const struct kvt_msg **out)
{
    struct kvt_ring *requests = &report->channel.requests;
    const void *frame;
    struct kvt_msg *msg = kvt_ring_reserve(requests, question->bytes);
    if (msg == NULL)
        return -EAGAIN;
    kvt_report_look(report);
    question->cookie = ++report->asked;
    memcpy(msg, question, question->bytes);
    kvt_ring_push(requests, question->bytes);
    for (;;) {
        int bytes = wait_one(report, &frame);
        if (bytes < 0)
            return bytes;
        *out = frame;
        if (bytes < (int)sizeof(**out))
            return KVT_E_CORRUPT;
        if ((*out)->cookie == question->cookie)
            return bytes;
        kvt_report_purge_take(report, frame, bytes);
        kvt_ring_pop(&report->channel.replies);
    }
}

/* A reply of plain values. Returns how many there are, or an error. */
static int values_ask(struct kvt_report *report, uint16_t op, uint64_t *values, uint32_t values_max)
{
    struct kvt_msg question = {.bytes = sizeof(question), .op = op};
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

int kvt_report_numbers(struct kvt_report *report, struct kvt_numbers *out)
{
    static const size_t stat_count = KVT_STORE_STAT_COUNT;
    uint64_t values[KVT_STORE_STAT_COUNT + KVT_DISKS_MAX * KVT_ROOT_VALUES] = {0};
    int count = values_ask(report, KVT_OP_STAT, values, KVT_ARRAY_LEN(values));
    if (count < (int)stat_count)
        return count < 0 ? count : KVT_E_CORRUPT;
    memcpy(&out->stats, values, sizeof(out->stats));
    out->roots_known = (uint32_t)(((size_t)count - stat_count) / KVT_ROOT_VALUES);
    memcpy(out->roots, values + stat_count, out->roots_known * sizeof(out->roots[0]));
    return 0;
}

int kvt_report_hists(struct kvt_report *report, struct kvt_hist hists[KVT_HIST_KINDS])
{
    uint64_t values[KVT_HIST_KINDS * sizeof(struct kvt_hist) / sizeof(uint64_t)];
    int count = values_ask(report, KVT_OP_HIST, values, KVT_ARRAY_LEN(values));
    if (count < (int)KVT_ARRAY_LEN(values))
        return count < 0 ? count : KVT_E_CORRUPT;
    memcpy(hists, values, sizeof(values));
    return 0;
}

/* ---- who holds how much -------------------------------------------------------------------- */

static void add_row(struct kvt_usage_row *rows, uint32_t *count, const struct kvt_usage_row *row)
{
    uint32_t i = 0;
    while (i < *count && (memcmp(rows[i].ns, row->ns, sizeof(row->ns)) != 0 ||
                          rows[i].group != row->group || rows[i].rank != row->rank))
        i++;
    if (i == KVT_USAGE_MAX)
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

int kvt_report_usage(struct kvt_report *report, struct kvt_usage_row rows[KVT_USAGE_MAX])
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

__attribute__((format(printf, 2, 3))) void kvt_say(struct kvt_text *text, const char *format, ...)
{
    va_list args;
    if (text->used >= KVT_TEXT_BYTES)
        return;
    va_start(args, format);
    int n = vsnprintf(text->bytes + text->used, KVT_TEXT_BYTES - text->used, format, args);
    va_end(args);
    if (n >= 0 && (size_t)n < KVT_TEXT_BYTES - text->used) {
        text->used += (size_t)n;
    } else { /* no half lines */
        text->bytes[text->used] = '\0';
        text->used = KVT_TEXT_BYTES;
    }
}

static void say_roots(struct kvt_text *text, struct kvt_host *host,
                      const struct kvt_numbers *numbers)
{
    uint32_t count = host->settings->disk_count;
    pthread_mutex_lock(&host->lock);
    for (uint32_t i = 0; i < count; i++) {
        const struct kvt_root_state *root = &host->roots[i];
        struct kvt_store_root_state state = {0};
        if (root->io != NULL && root->number >= 0 && (uint32_t)root->number < numbers->roots_known)
            state = numbers->roots[root->number];
        kvt_say(text, "disk.%" PRIu32 ".path %s\n", i, root->path);
        if (state.failing != 0)
            kvt_say(text, "disk.%" PRIu32 ".state writing fails: %s (%d)\n", i,
                    kvt_strerror(state.failing), (int)state.failing);
        else
            kvt_say(text, "disk.%" PRIu32 ".state %s\n", i, root->state);
        kvt_say(text, "disk.%" PRIu32 ".backend %s\n", i,
                root->backend[0] ? root->backend : "none");
        kvt_say(text, "disk.%" PRIu32 ".backend_why %s\n", i, root->backend_why);
        kvt_say(text, "disk.%" PRIu32 ".why %s\n", i, root->why);
        kvt_say(text, "disk.%" PRIu32 ".cap_bytes %" PRIu64 "\n", i, root->cap_bytes);
        kvt_say(text, "disk.%" PRIu32 ".bytes_used %" PRIu64 "\n", i, state.bytes_used);
        kvt_say(text, "disk.%" PRIu32 ".read_fail %" PRIu64 "\n", i, state.read_fails);
    }
    pthread_mutex_unlock(&host->lock);
}

static void say_clients(struct kvt_text *text, const struct kvt_report *report)
{
    struct kvt_server_client clients[CLIENTS_SHOWN];
    struct kvt_server_stats stats;
    size_t count = kvt_server_clients(report->server, clients, CLIENTS_SHOWN);
    kvt_server_stats(report->server, &stats);
    kvt_say(text, "daemon.clients %zu\n", count);
    kvt_say(text, "daemon.accepted %" PRIu64 "\n", stats.accepted);
    kvt_say(text, "daemon.refused_peer %" PRIu64 "\n", stats.refused_peer);
    kvt_say(text, "daemon.refused_version %" PRIu64 "\n", stats.refused_version);
    kvt_say(text, "daemon.refused_full %" PRIu64 "\n", stats.refused_full);
    kvt_say(text, "daemon.bad_hello %" PRIu64 "\n", stats.bad_hello);
    kvt_say(text, "daemon.clients_left %" PRIu64 "\n", stats.left);
    kvt_say(text, "daemon.clients_died %" PRIu64 "\n", stats.died);
    kvt_say(text, "daemon.clients_broken %" PRIu64 "\n", stats.broken);
    for (size_t i = 0; i < KVT_MIN(count, (size_t)CLIENTS_SHOWN); i++)
        kvt_say(text, "client.%" PRIu32 " %s process %d uid %u%s\n", clients[i].number,
                clients[i].name[0] ? clients[i].name : "?", (int)clients[i].pid,
                (unsigned)clients[i].uid, clients[i].leaving ? " disconnected" : "");
}

/* "usage.NAMESPACE.GROUP.RANK.what" */
static void say_usage(struct kvt_text *text, struct kvt_report *report)
{
    struct kvt_usage_row *rows = calloc(KVT_USAGE_MAX, sizeof(*rows));
    int count = rows == NULL ? 0 : kvt_report_usage(report, rows);
    for (int i = 0; i < count; i++) {
        const struct kvt_usage_row *row = &rows[i];
        char name[64];
        int used = 0;
        for (size_t j = 0; j < sizeof(row->ns); j++)
            used += snprintf(name + used, sizeof(name) - (size_t)used, "%02x", row->ns[j]);
        (void)snprintf(name + used, sizeof(name) - (size_t)used, ".%u.%u", row->group, row->rank);
        if (i == 0 || memcmp(rows[i - 1].ns, row->ns, sizeof(row->ns)) != 0)
            kvt_say(text, "namespace.%.32s %.64s\n", name, row->label[0] ? row->label : "?");
        kvt_say(text, "usage.%s.block_tokens %" PRIu32 "\n", name, row->block_tokens);
        kvt_say(text, "usage.%s.dram_blocks %" PRIu64 "\n", name, row->dram_blocks);
        kvt_say(text, "usage.%s.dram_bytes %" PRIu64 "\n", name, row->dram_bytes);
        kvt_say(text, "usage.%s.disk_blocks %" PRIu64 "\n", name, row->disk_blocks);
        kvt_say(text, "usage.%s.disk_bytes %" PRIu64 "\n", name, row->disk_bytes);
    }
    free(rows);
}

static int stat_text(struct kvt_report *report, char **out)
{
    struct kvt_text text = {malloc(KVT_TEXT_BYTES), 0};
    struct kvt_numbers numbers;
    struct timespec now;
    if (text.bytes == NULL)
        return -ENOMEM;
    int rc = kvt_report_numbers(report, &numbers);
    if (rc != 0) {
        free(text.bytes);
        return rc;
    }
#define KVT_X(field, name, help) kvt_say(&text, "%s %" PRIu64 "\n", name, numbers.stats.field);
    KVT_STORE_COUNTERS(KVT_X)
    KVT_STORE_GAUGES(KVT_X)
#undef KVT_X
    clock_gettime(CLOCK_REALTIME, &now);
    kvt_say(&text, "control.version %u\n", KVT_CONTROL_VERSION);
    kvt_say(&text, "writer.pid %d\nwriter.time_s %lld\n", (int)getpid(), (long long)now.tv_sec);
    kvt_say(&text, "daemon.version %s\ndaemon.uptime_s %" PRId64 "\n", kvt_version(),
            (kvt_clock_now(&report->host->clock) - report->start_ns) / 1000000000);
    kvt_say(&text, "dram.huge_bytes %" PRIu64 "\n",
            atomic_load_explicit(&report->host->huge_bytes, memory_order_relaxed));
    if (report->out != NULL)
        kvt_say(&text, "daemon.log_lost %" PRIu64 "\n",
                atomic_load_explicit(&report->out->lost, memory_order_relaxed));
    say_clients(&text, report);
    say_roots(&text, report->host, &numbers);
    say_usage(&text, report);
    *out = text.bytes;
    return 0;
}

/* The roots alone: what a client shows of a store that is not its own. */
static int roots_text(struct kvt_report *report, char **out)
{
    struct kvt_text text = {malloc(KVT_TEXT_BYTES), 0};
    struct kvt_numbers numbers;
    if (text.bytes == NULL)
        return -ENOMEM;
    int rc = kvt_report_numbers(report, &numbers);
    if (rc != 0) {
        free(text.bytes);
        return rc;
    }
    kvt_say(&text, "disk.configured %" PRIu32 "\n", report->host->settings->disk_count);
    say_roots(&text, report->host, &numbers);
    *out = text.bytes;
    return 0;
}

int kvt_report_answer(void *ctx, const struct kvt_asker *asker, const char *question, char **out)
{
    *out = NULL;
    if (strcmp(question, "stat") == 0)
        return stat_text(ctx, out);
    if (strcmp(question, "metrics") == 0)
        return kvt_report_metrics(ctx, out);
    if (strcmp(question, "roots") == 0)
        return roots_text(ctx, out);
    if (strncmp(question, "purge ", strlen("purge ")) == 0)
        return kvt_report_purge(ctx, asker, question + strlen("purge "), out);
    *out = strdup("error: unknown question; known: stat, roots, metrics, purge HEX\n");
    return *out == NULL ? -ENOMEM : 0;
}
