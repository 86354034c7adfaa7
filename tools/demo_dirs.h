/* Directories that `kvtier demo` makes for itself, and those that a killed one has left. */
#ifndef KVT_TOOLS_DEMO_DIRS_H
#define KVT_TOOLS_DEMO_DIRS_H

#include <stddef.h>
#include <stdint.h>

/* Make "BELOW/demo-XXXXXX" and lock it for as long as this process, or a child of it, lives; its
 * name goes to path. 0, -errno. */
int kvt_demo_dir_make(const char *below, char *path, size_t room);

/* Remove those of this user below a directory whose makers have ended, unless they were written to
 * within the last `young_s` seconds. Returns how many. */
unsigned kvt_demo_dirs_clean(const char *below, int64_t young_s);

/* Every file in a directory, and the directory. */
void kvt_demo_dir_remove(const char *path);

#endif
