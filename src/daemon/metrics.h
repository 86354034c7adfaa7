/* The Prometheus endpoint: a thread that answers GET /metrics with what the daemon says of itself.
 * Off unless configured. It asks the daemon through its socket, as any control client does, so it
 * shares nothing with the server's thread.
 */
#ifndef KVT_DAEMON_METRICS_H
#define KVT_DAEMON_METRICS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/log.h"

struct kvt_metrics {
    char socket[108]; /* of the daemon */
    int listen_fd, wake_fd;
    int port;      /* that it listens on */
    int spares[6]; /* kept for when there are no descriptors left; the thread's */
    bool deaf;     /* ... and these are taken, too: nobody is accepted for a moment */
    pthread_t thread;
    bool running;
};

/* Listen at "ADDRESS:PORT" ("[::1]:9464" too; numbers only) and start the thread. 0, or an error
 * with a sentence. */
__attribute__((warn_unused_result)) int kvt_metrics_start(struct kvt_metrics *metrics,
                                                          const char *address, const char *socket,
                                                          const struct kvt_log *log, char *error,
                                                          size_t error_len);
/* Whether one could listen there now; nobody does afterwards. 0, or an error with the same
 * sentence.
 */
__attribute__((warn_unused_result)) int kvt_metrics_check(const char *address, char *error,
                                                          size_t error_len);
void kvt_metrics_stop(struct kvt_metrics *metrics);

#endif
