/* What kvt_open() would make of a directory as a disk root, found out without opening it. */
#ifndef KVT_TOOLS_ROOT_CHECK_H
#define KVT_TOOLS_ROOT_CHECK_H

#include <stddef.h>

#define KVT_ROOT_WHY_MAX 512

/* 0 it can be used; 1 it would be made: its parent is there; a negative code it would be refused,
 * and why holds the sentence that kvt_open() would give. Changes nothing; a lock is held for an
 * instant only. Blocks. */
int kvt_root_check(const char *dir, char why[KVT_ROOT_WHY_MAX]);

/* What kvt_open() would say of a root that fails with `code`. */
void kvt_root_why(const char *dir, int code, char why[KVT_ROOT_WHY_MAX]);

/* The parent of dir as a path that names a directory even through a symbolic link ("/a/."). 0, or
 * -ENAMETOOLONG. */
int kvt_root_parent(const char *dir, char *parent, size_t room);

#endif
