/* Files that options name and that hold a secret: a password, a key, and the certificates that are
 * trusted. Opened so that nothing but a file is read, whatever the name is: a FIFO or a device
 * would be waited for without end. Threads: any. Allocates nothing. */
#ifndef KVT_REMOTE_SECRET_H
#define KVT_REMOTE_SECRET_H

#include <stddef.h>
#include <sys/types.h>

/* Up to `room` bytes of a file that only its owner can read. How many; -errno with a sentence that
 * names the option, the file and the remedy: -EACCES others may read it, -EISDIR, -EINVAL it is
 * neither a file nor a directory. */
__attribute__((warn_unused_result)) ssize_t kvt_remote_secret_read(const char *option,
                                                                   const char *path, void *out,
                                                                   size_t room, char *error,
                                                                   size_t error_len);

/* Whether a name is one of a file that somebody else will open and read. 0; -errno with a sentence.
 */
__attribute__((warn_unused_result)) int kvt_remote_file_check(const char *option, const char *path,
                                                              char *error, size_t error_len);

#endif
