/* What kvtierd says of itself: its usage, and the same as a man page. One source: the tables in
 * kvtierd_help.c and the table of keys (daemon/conf.h). Threads: one. */
#ifndef KVT_TOOLS_KVTIERD_HELP_H
#define KVT_TOOLS_KVTIERD_HELP_H

#include "daemon/conf.h"

void kvt_daemon_usage(const struct kvt_conf *conf);
/* kvtierd(8), as troff. */
void kvt_daemon_man(const struct kvt_conf *conf);

#endif
