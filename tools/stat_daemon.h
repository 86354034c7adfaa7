/* kvtier stat on a running kvtierd: who is connected, what each namespace and rank holds. */
#ifndef KVT_TOOLS_STAT_DAEMON_H
#define KVT_TOOLS_STAT_DAEMON_H

#include <jansson.h>
#include <stddef.h>

/* path: "unix:SOCKET". NULL: error holds a sentence. */
json_t *kvt_stat_daemon(const char *path, char *error, size_t error_len);
/* For people; the counters are left to the caller. */
void kvt_stat_daemon_print(const json_t *daemon);

#endif
