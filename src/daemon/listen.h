/* The name of a daemon's socket in the file system: taken by one daemon at a time. */
#ifndef KVT_DAEMON_LISTEN_H
#define KVT_DAEMON_LISTEN_H

#include <stddef.h>
#include <sys/types.h>

struct kvt_listen {
    int fd;      /* listens; -1: no */
    int lock_fd; /* of "PATH.lock"; -1: the socket is not ours to remove */
    char path[108];
    dev_t device; /* of the socket as we made it */
    ino_t inode;
};

/* Take the name and listen. A socket that nobody listens on is replaced; one of a live daemon is
 * refused (KVT_E_LOCKED), anything else at the path too (KVT_E_NOT_OURS). error: a sentence. */
__attribute__((warn_unused_result)) int kvt_listen_open(struct kvt_listen *listen, const char *path,
                                                        mode_t mode, char *error, size_t error_len);
/* Stop listening and remove what we made, if it is still there. */
/* Whether a socket could be made at the path; nothing is made or removed. 0; KVT_E_LOCKED: somebody
 * listens there; else an error. With the sentence of _open() in either case. */
__attribute__((warn_unused_result)) int kvt_listen_check(const char *path, char *error,
                                                         size_t error_len);
void kvt_listen_close(struct kvt_listen *listen);

#endif
