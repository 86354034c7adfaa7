/* kvtierd --check: what of a configuration would not come into force here and now. */
#ifndef KVT_TOOLS_KVTIERD_CHECK_H
#define KVT_TOOLS_KVTIERD_CHECK_H

#include "daemon/conf.h"

/* tell: a sentence; problem: the start would be refused, or go on without that; else it is only
 * worth knowing. Returns how many problems there are. Nothing is made, changed or kept. A server
 * of the shared tier is asked, unless offline: blocks for 3 s at most, or for remote_deadline. */
typedef void (*kvt_daemon_tell_fn)(bool problem, const char *sentence);
unsigned kvt_daemon_check(const struct kvt_conf *conf, const struct kvt_log *log, bool offline,
                          kvt_daemon_tell_fn tell);

/* Whether as many programs as there can be have descriptors, beside those that the roots may take:
 * false: a sentence. *programs: how many have. Also for the start. */
bool kvt_daemon_descriptors(const struct kvt_settings *settings, uint64_t *programs, char *text,
                            size_t len);

#endif
