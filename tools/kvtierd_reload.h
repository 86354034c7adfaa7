/* What signals do to a running kvtierd: SIGHUP reads the configuration again, SIGTERM and SIGINT
 * end it. */
#ifndef KVT_TOOLS_KVTIERD_RELOAD_H
#define KVT_TOOLS_KVTIERD_RELOAD_H

#include <stdatomic.h>

#include "daemon/conf.h"
#include "daemon/log_out.h"
#include "daemon/server.h"

struct kvt_daemon_args {
    int argc;
    char **argv;
    const char *config; /* file */
    int check, offline;
};

/* kvtierd.c: the file, then the command line over it. 0, or an exit code or an error: why says it,
 * unless it is empty: it was said. */
__attribute__((warn_unused_result)) int
kvt_daemon_conf(const struct kvt_daemon_args *args, struct kvt_conf *conf, char *why, size_t len);

struct kvt_daemon_signals {
    const struct kvt_daemon_args *args;
    struct kvt_server *server;
    struct kvt_conf *conf;
    struct kvt_log_out *out;
    struct kvt_log log;
    _Atomic int over; /* set before SIGUSR2: the thread ends */
};

/* A thread that waits for signals, which are blocked everywhere. arg: struct kvt_daemon_signals. */
void *kvt_daemon_signals(void *arg);

#endif
