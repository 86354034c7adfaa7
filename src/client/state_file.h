/* Small texts that outlive the process: what was measured or learnt, one file each.
 *
 *   <line of version>
 *   <lines>
 *   end <XXH3-64 of everything before this line>
 *
 * A file is taken whole or not at all: what is damaged, of another version, or no file is refused.
 * It is written beside the old one (".tmp"), synced, and renamed over it, so that a crash leaves
 * the old one or the new one. Links are not followed, and nothing here waits for a pipe's other
 * end. What was there and is not ours (a device, a pipe, a link, somebody's file) stays. What the
 * lines say is the caller's.
 * Threads: any, one at a time for a path. Blocks on the file system; allocates nothing.
 */
#ifndef KVT_CLIENT_STATE_FILE_H
#define KVT_CLIENT_STATE_FILE_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

#define KVT_STATE_BYTES_MAX 16384u
#define KVT_STATE_END_BYTES 21u /* of the last line */

struct kvt_state_text {
    char bytes[KVT_STATE_BYTES_MAX + 1];
    size_t len;
    bool full; /* a line did not fit: it is not to be written */
};

/* A new text of this version (a line with its line feed). */
void kvt_state_begin(struct kvt_state_text *text, const char *version);
__attribute__((format(printf, 2, 3))) void kvt_state_add(struct kvt_state_text *text,
                                                         const char *format, ...);
/* Whether so many bytes more can be added. */
bool kvt_state_room(const struct kvt_state_text *text, size_t bytes);
/* The path of a file in a root. false: it is too long, or there is no lock file in that directory:
 * no root, or one that was taken away and has another directory in its place. */
bool kvt_state_in_root(const char *root, const char *name, char path[PATH_MAX]);
/* Whether a file can be put there: 0; KVT_E_NOT_OURS: what is there, or at the path with ".tmp", is
 * no file of this kind (the first word of a version is "kvtier-..."); -errno: the directory is
 * missing or may not be written to. */
__attribute__((warn_unused_result)) int kvt_state_place(const char *path);
/* End the text and put it in the place of the file. 0; -ENOSPC: the text is full; as
 * kvt_state_place(): the old file stays. */
__attribute__((warn_unused_result)) int kvt_state_write(const char *path,
                                                        struct kvt_state_text *text);

/* Read a file of this version. 0: *lines are those between the first and the last one, to be taken
 * by kvt_state_next(); KVT_E_CORRUPT: damaged, empty, or of another version; -errno. */
__attribute__((warn_unused_result)) int kvt_state_read(const char *path, const char *version,
                                                       struct kvt_state_text *text, char **lines);
/* The next line, without its line feed; NULL: there is none. It is cut out of the text. */
char *kvt_state_next(char **lines);

#endif
