/* What a kvtierd says about itself: lines "name value", as the file "stats" of a root has them.
 * Threads: the server's. */
#ifndef KVT_DAEMON_REPORT_H
#define KVT_DAEMON_REPORT_H

#include "daemon/log_out.h"
#include "daemon/server.h"

struct kvt_report {
    struct kvt_host *host;
    const struct kvt_server *server;
    struct kvt_channel channel;    /* our own client of the owner */
    const struct kvt_log_out *out; /* NULL, as _open() leaves it: the log is somebody else's */
    int64_t start_ns;
    uint64_t asked;      /* questions so far: cookies */
    struct {             /* one at a time */
        uint64_t cookie; /* 0: none is under way */
        uint64_t ticket;
        char *text; /* the answer: it is done */
        uint8_t id[KVT_NS_BYTES];
    } purge;
};

/* Attach to the owner. 0 or an error. */
__attribute__((warn_unused_result)) int
kvt_report_open(struct kvt_report *report, struct kvt_host *host, const struct kvt_server *server);
void kvt_report_close(struct kvt_report *report);

/* kvt_server_params.answer and .later: questions as handshake.h lists them. */
int kvt_report_answer(void *report, const struct kvt_asker *asker, const char *question,
                      char **out);
int kvt_report_later(void *report, uint64_t *ticket, char **out);

#endif
