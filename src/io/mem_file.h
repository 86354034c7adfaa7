/* Files in memory, for io_mem.c: names, sizes and 4 KiB pages under one capacity. Private to
 * src/io. Thread: the owner of the disk. */
#ifndef KVT_IO_MEM_FILE_H
#define KVT_IO_MEM_FILE_H

#include "io/io_common.h"

#define KVT_MEM_RESULT __attribute__((warn_unused_result))

struct kvt_mem_file {
    char name[KVT_IO_NAME_MAX]; /* "" when unlinked */
    uint64_t size_bytes;
    uint8_t **pages;   /* NULL: a hole; see mem_file.c for reserved ones */
    size_t page_count; /* entries of pages */
    unsigned handles;  /* open ones: an unlinked file goes with its last */
    struct kvt_mem_file *next;
};

struct kvt_mem_disk {
    uint64_t capacity_pages;
    uint64_t used_pages; /* written or reserved, of all files */
    struct kvt_mem_file *files;
};

/* The named file, or NULL. */
struct kvt_mem_file *kvt_mem_find(const struct kvt_mem_disk *disk, const char *name);
/* A new empty file (name checked, not there yet), or NULL without memory. */
struct kvt_mem_file *kvt_mem_create(struct kvt_mem_disk *disk, const char *name);
/* Take the name away, and the file with it when nobody has it open. */
void kvt_mem_forget(struct kvt_mem_disk *disk, struct kvt_mem_file *file);
/* Close one handle. */
void kvt_mem_put(struct kvt_mem_disk *disk, struct kvt_mem_file *file);
void kvt_mem_free_all(struct kvt_mem_disk *disk);

/* Reserve pages [from, to): 0, -ENOSPC, -EFBIG, -ENOMEM; all or nothing but for memory. */
KVT_MEM_RESULT int kvt_mem_reserve(struct kvt_mem_disk *disk, struct kvt_mem_file *file,
                                   uint64_t from, uint64_t to);
/* Make holes of pages [from, to). */
void kvt_mem_drop(struct kvt_mem_disk *disk, struct kvt_mem_file *file, uint64_t from, uint64_t to);
void kvt_mem_truncate(struct kvt_mem_disk *disk, struct kvt_mem_file *file, uint64_t bytes);

/* Run a checked request of `bytes`: bytes moved, or -errno (then nothing was written). */
int64_t kvt_mem_read(const struct kvt_mem_file *file, const struct kvt_io_req *req);
int64_t kvt_mem_write(struct kvt_mem_disk *disk, struct kvt_mem_file *file,
                      const struct kvt_io_req *req, uint64_t bytes);

/* Copy a file (not its handles) to another disk. */
KVT_MEM_RESULT int kvt_mem_copy(struct kvt_mem_disk *disk, const struct kvt_mem_file *from);

#endif
