/* Unix sockets that keep message borders (SOCK_SEQPACKET) and carry descriptors. Calls return 0 or
 * bytes, or a negative error; none raises SIGPIPE. Descriptors are close-on-exec. Threads: any.
 */
#ifndef KVT_BASE_SOCK_H
#define KVT_BASE_SOCK_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

#define KVT_SOCK_FDS_MAX 8u

/* The address of a path. KVT_E_LIMIT: longer than the system takes (107 bytes). */
__attribute__((warn_unused_result)) int kvt_sock_address(const char *path, struct sockaddr_un *out);

/* Connect; what is sent and received after may take timeout_ms each. 0, -errno (-ECONNREFUSED,
 * -ENOENT, -EAGAIN, ...), KVT_E_LIMIT. *fd is the caller's. */
__attribute__((warn_unused_result)) int kvt_sock_connect(const char *path, int timeout_ms, int *fd);

/* One message, with `count` descriptors (they stay the caller's). 0, -errno. */
__attribute__((warn_unused_result)) int kvt_sock_send(int fd, const void *data, size_t bytes,
                                                      const int *fds, size_t count);

/* The next message: its bytes, 0 when the peer has closed, -errno, KVT_E_LIMIT when it is longer
 * than room. Descriptors beyond fds_max are closed; those taken are the caller's. */
__attribute__((warn_unused_result)) int kvt_sock_recv(int fd, void *data, size_t room, int *fds,
                                                      size_t fds_max, size_t *fds_count);

#endif
