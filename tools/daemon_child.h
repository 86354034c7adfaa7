/* A kvtierd of a command's own, for as long as the command runs. Tools only. */
#ifndef KVT_TOOLS_DAEMON_CHILD_H
#define KVT_TOOLS_DAEMON_CHILD_H

#include <sys/types.h>

#define KVT_DAEMON_SOCKET_ROOM 108

/* Start the kvtierd beside our own binary with words ("--dram", "1GiB", ..., NULL) and wait until
 * it answers; the path of its socket goes to socket[KVT_DAEMON_SOCKET_ROOM]. It ends with us.
 * command: in messages. 0, or -1 (said). */
int kvt_daemon_child(const char *command, const char *const words[], char *socket, pid_t *pid);
/* End it in order. */
void kvt_daemon_child_end(pid_t pid);

#endif
