/* systemd's two small protocols, without its library: sockets that it made for us, and telling it
 * how we are. Nothing happens where there is no systemd. */
#ifndef KVT_DAEMON_NOTIFY_H
#define KVT_DAEMON_NOTIFY_H

#include <stddef.h>

/* Take the descriptor that kvt_notify() needs, where $NOTIFY_SOCKET is set: programs may have taken
 * all others when there is something to tell. For the life of the process; before its threads. */
void kvt_notify_hold(void);
/* "READY=1", "STOPPING=1", "RELOADING=1", ... to $NOTIFY_SOCKET. Best effort. Any thread. */
void kvt_notify(const char *state);

/* The one socket that was passed to us ($LISTEN_FDS), or -1: none; KVT_E_INVAL: not one, or not a
 * listening SOCK_SEQPACKET socket of the file system. */
int kvt_passed_socket(void);
/* Where it is in the file system. 0, KVT_E_INVAL. */
__attribute__((warn_unused_result)) int kvt_passed_path(int fd, char *path, size_t len);

#endif
