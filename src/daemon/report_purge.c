/* The question "purge HEX": a namespace of a running daemon goes, from DRAM, the roots and the tier
 * that machines share, by whoever runs the daemon.
 *
 * It may take minutes, where the shared tier holds much of it, and the server waits for nobody: so
 * the owner is asked, and its reply taken when it has come.
 * Threads: the server's.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/report_impl.h"
#include "format/handshake.h"
#include "kvtier/error.h"

__attribute__((format(printf, 2, 3))) static int answer(char **out, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vasprintf(out, format, args);
    va_end(args);
    if (n >= 0)
        return 0;
    *out = NULL;
    return -ENOMEM;
}

static int digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 'a' ^ 'A';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool id_parse(const char *hex, uint8_t id[KVT_NS_BYTES])
{
    if (strlen(hex) != 2 * KVT_NS_BYTES)
        return false;
    for (size_t i = 0; i < KVT_NS_BYTES; i++) {
        int high = digit(hex[2 * i]), low = digit(hex[2 * i + 1]);
        if (high < 0 || low < 0)
            return false;
        id[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

static void id_text(const uint8_t id[KVT_NS_BYTES], char text[2 * KVT_NS_BYTES + 1])
{
    for (size_t i = 0; i < KVT_NS_BYTES; i++)
        (void)snprintf(text + 2 * i, 3, "%02x", id[i]);
}

int kvt_report_purge(struct kvt_report *report, const struct kvt_asker *asker, const char *hex,
                     char **out)
{
    struct kvt_ring *requests = &report->channel.requests;
    uint8_t id[KVT_NS_BYTES];
    if (asker->uid != 0 && asker->uid != geteuid())
        return answer(out, "error: only root and the user of the kvtierd (%u) may purge, not %u\n",
                      (unsigned)geteuid(), (unsigned)asker->uid);
    if (!id_parse(hex, id))
        return answer(out, "error: \"%.64s\" are not the 32 hexadecimal digits of a namespace\n",
                      hex);
    kvt_report_look(report); /* the one before may have ended, and nobody waited for it */
    if (report->purge.cookie != 0)
        return answer(out, "error: another purge is under way: ask again when it has ended\n");
    free(report->purge.text);
    report->purge.text = NULL;
    struct kvt_msg_purge_ns *msg = kvt_ring_reserve(requests, sizeof(*msg));
    if (msg == NULL)
        return answer(out, "error: the kvtierd is busy: ask again\n");
    *msg = (struct kvt_msg_purge_ns){
        .msg = {.bytes = sizeof(*msg), .op = KVT_OP_PURGE_NS, .cookie = ++report->asked}};
    memcpy(msg->id, id, sizeof(id));
    memcpy(report->purge.id, id, sizeof(id));
    report->purge.cookie = report->asked;
    report->purge.ticket = asker->ticket;
    kvt_ring_push(requests, sizeof(*msg));
    kvt_log(&report->host->log, KVT_LOG_INFO,
            "purge of namespace %s, asked for by process %d (uid %u)", hex, (int)asker->pid,
            (unsigned)asker->uid);
    return KVT_ANSWER_LATER;
}

void kvt_report_purge_take(struct kvt_report *report, const struct kvt_msg *msg, int bytes)
{
    const struct kvt_msg_purge_ns_reply *reply =
        (const struct kvt_msg_purge_ns_reply *)(const void *)msg;
    struct kvt_msg_purge_ns_reply none = {.msg = {.status = KVT_E_CORRUPT}};
    char id[2 * KVT_NS_BYTES + 1];
    if (bytes < (int)sizeof(*msg) || report->purge.cookie == 0 ||
        msg->cookie != report->purge.cookie)
        return;
    if (bytes < (int)sizeof(*reply)) { /* refused before it began */
        none.msg.status = msg->status != 0 ? msg->status : KVT_E_CORRUPT;
        reply = &none;
    }
    id_text(report->purge.id, id);
    report->purge.cookie = 0;
    int rc = answer(&report->purge.text,
                    "control.version %u\npurge.namespace %s\npurge.status %d\npurge.groups %" PRIu32
                    "\npurge.blocks %" PRIu64 "\npurge.bytes %" PRIu64
                    "\npurge.remote_records %" PRIu64 "\n",
                    KVT_CONTROL_VERSION, id, (int)reply->msg.status, reply->msg.count,
                    reply->blocks, reply->bytes, reply->remote_records);
    kvt_log(&report->host->log, reply->msg.status == 0 && rc == 0 ? KVT_LOG_INFO : KVT_LOG_WARN,
            "purge of namespace %s: %" PRIu64 " blocks removed, %" PRIu64
            " records of the shared tier%s%s",
            id, reply->blocks, reply->remote_records, reply->msg.status == 0 ? "" : "; then: ",
            reply->msg.status == 0 ? "" : kvt_strerror(reply->msg.status));
}

int kvt_report_later(void *ctx, uint64_t *ticket, char **out)
{
    struct kvt_report *report = ctx;
    kvt_report_look(report);
    if (report->purge.text == NULL)
        return -EAGAIN;
    *ticket = report->purge.ticket;
    *out = report->purge.text;
    report->purge.text = NULL;
    return 0;
}
