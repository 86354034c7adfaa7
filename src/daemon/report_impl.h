/* Shared by report.c and report_prom.c, and by nobody else: asking the owner, and growing a text.
 * Threads: the server's.
 */
#ifndef KVT_DAEMON_REPORT_IMPL_H
#define KVT_DAEMON_REPORT_IMPL_H

#include "daemon/report.h"
#include "format/message.h"

#define KVT_TEXT_BYTES (1u << 20)
#define KVT_USAGE_MAX 1024u /* namespaces times ranks that are shown */
#define KVT_ROOT_VALUES (sizeof(struct kvt_store_root_state) / sizeof(uint64_t))

struct kvt_text {
    char *bytes; /* KVT_TEXT_BYTES */
    size_t used;
};

/* Append; what does not fit is left out, as whole pieces. */
__attribute__((format(printf, 2, 3))) void kvt_say(struct kvt_text *text, const char *format, ...);

struct kvt_numbers { /* what the store says of itself */
    struct kvt_store_stats stats;
    struct kvt_store_root_state roots[KVT_DISKS_MAX]; /* by the store's number */
    uint32_t roots_known;
};
/* 0, or an error. */
int kvt_report_numbers(struct kvt_report *report, struct kvt_numbers *out);
int kvt_report_hists(struct kvt_report *report, struct kvt_hist hists[KVT_HIST_KINDS]);
/* Bytes by namespace and rank, all of the index. Returns rows, or an error. */
int kvt_report_usage(struct kvt_report *report, struct kvt_usage_row rows[KVT_USAGE_MAX]);

/* report_purge.c: begin it, or say why not: as kvt_report_answer(). */
int kvt_report_purge(struct kvt_report *report, const struct kvt_asker *asker, const char *hex,
                     char **out);
/* A message of the owner's that nobody waits for here: it may be the end of a purge. */
void kvt_report_purge_take(struct kvt_report *report, const struct kvt_msg *msg, int bytes);
/* Messages that have come. */
void kvt_report_look(struct kvt_report *report);

/* report_prom.c: everything as Prometheus' text format, version 0.0.4. As kvt_report_answer(). */
int kvt_report_metrics(struct kvt_report *report, char **out);

#endif
