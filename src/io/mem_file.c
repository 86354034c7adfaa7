/* Files in memory: see mem_file.h.
 *
 * A page is a hole (NULL: reads as zeros, costs nothing), reserved (the shared zero page: reads as
 * zeros, is charged) or written (its own 4 KiB). Reserving is what fallocate() does: the space is
 * taken, the memory is not. Invariant: used_pages counts the entries that are not NULL. */
#include "io/mem_file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

#define PAGE KVT_IO_ALIGN

static uint8_t reserved_page[PAGE]; /* never written */

struct kvt_mem_file *kvt_mem_find(const struct kvt_mem_disk *disk, const char *name)
{
    for (struct kvt_mem_file *file = disk->files; file; file = file->next)
        if (!strcmp(file->name, name))
            return file;
    return NULL;
}

struct kvt_mem_file *kvt_mem_create(struct kvt_mem_disk *disk, const char *name)
{
    struct kvt_mem_file *file = calloc(1, sizeof *file);

    if (file) {
        memcpy(file->name, name, strlen(name) + 1);
        file->next = disk->files;
        disk->files = file;
    }
    return file;
}

void kvt_mem_drop(struct kvt_mem_disk *disk, struct kvt_mem_file *file, uint64_t from, uint64_t to)
{
    for (uint64_t i = from; i < to && i < file->page_count; i++) {
        disk->used_pages -= file->pages[i] != NULL;
        if (file->pages[i] != reserved_page)
            free(file->pages[i]);
        file->pages[i] = NULL;
    }
}

static void free_file(struct kvt_mem_disk *disk, struct kvt_mem_file *file)
{
    struct kvt_mem_file **link = &disk->files;

    while (*link != file)
        link = &(*link)->next;
    *link = file->next;
    kvt_mem_drop(disk, file, 0, file->page_count);
    free(file->pages);
    free(file);
}

void kvt_mem_forget(struct kvt_mem_disk *disk, struct kvt_mem_file *file)
{
    file->name[0] = 0;
    if (!file->handles)
        free_file(disk, file);
}

void kvt_mem_put(struct kvt_mem_disk *disk, struct kvt_mem_file *file)
{
    if (!--file->handles && !file->name[0])
        free_file(disk, file);
}

void kvt_mem_free_all(struct kvt_mem_disk *disk)
{
    while (disk->files)
        free_file(disk, disk->files);
}

static int grow_table(struct kvt_mem_file *file, uint64_t page_count)
{
    uint8_t **pages;
    size_t want;

    if (page_count <= file->page_count)
        return 0;
    if (page_count > SIZE_MAX / sizeof *pages / 2)
        return -EFBIG;
    want = KVT_MAX((size_t)page_count, file->page_count * 2);
    pages = realloc(file->pages, want * sizeof *pages);
    if (!pages)
        return -ENOMEM;
    memset(pages + file->page_count, 0, (want - file->page_count) * sizeof *pages);
    file->pages = pages;
    file->page_count = want;
    return 0;
}

int kvt_mem_reserve(struct kvt_mem_disk *disk, struct kvt_mem_file *file, uint64_t from,
                    uint64_t to)
{
    uint64_t more = 0;
    int rc;

    if (to - from > disk->capacity_pages)
        return -ENOSPC; /* before a table of that size is made */
    rc = grow_table(file, to);
    if (rc)
        return rc;
    for (uint64_t i = from; i < to; i++)
        more += !file->pages[i];
    if (more &&
        (disk->used_pages > disk->capacity_pages || more > disk->capacity_pages - disk->used_pages))
        return -ENOSPC;
    for (uint64_t i = from; i < to; i++)
        if (!file->pages[i])
            file->pages[i] = reserved_page;
    disk->used_pages += more;
    return 0;
}

void kvt_mem_truncate(struct kvt_mem_disk *disk, struct kvt_mem_file *file, uint64_t bytes)
{
    uint64_t pages = bytes / PAGE;
    size_t rest = bytes % PAGE;

    if (bytes < file->size_bytes) {
        kvt_mem_drop(disk, file, pages + (rest != 0), file->page_count);
        /* what is cut off must not come back when the file grows again */
        if (rest && pages < file->page_count && file->pages[pages] &&
            file->pages[pages] != reserved_page)
            memset(file->pages[pages] + rest, 0, PAGE - rest);
    }
    file->size_bytes = bytes;
}

int64_t kvt_mem_read(const struct kvt_mem_file *file, const struct kvt_io_req *req)
{
    uint64_t offset = req->offset, moved = 0;

    for (uint32_t i = 0; i < req->iov_count; i++) {
        uint8_t *dst = req->iov[i].iov_base;

        for (size_t at = 0; at < req->iov[i].iov_len; at += PAGE, offset += PAGE) {
            uint64_t part, page = offset / PAGE;

            if (offset >= file->size_bytes)
                return (int64_t)moved;
            part = KVT_MIN(file->size_bytes - offset, (uint64_t)PAGE);
            if (page < file->page_count && file->pages[page])
                memcpy(dst + at, file->pages[page], part);
            else
                memset(dst + at, 0, part);
            moved += part;
        }
    }
    return (int64_t)moved;
}

/* Give the page memory of its own. */
static int own_page(uint8_t **page)
{
    uint8_t *own;

    if (*page != reserved_page)
        return 0;
    own = calloc(1, PAGE);
    if (!own)
        return -ENOMEM;
    *page = own;
    return 0;
}

int64_t kvt_mem_write(struct kvt_mem_disk *disk, struct kvt_mem_file *file,
                      const struct kvt_io_req *req, uint64_t bytes)
{
    uint64_t first = req->offset / PAGE, page = first;
    int rc = kvt_mem_reserve(disk, file, first, first + bytes / PAGE);

    for (uint64_t i = first; i < first + bytes / PAGE && !rc; i++)
        rc = own_page(&file->pages[i]);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < req->iov_count; i++)
        for (size_t at = 0; at < req->iov[i].iov_len; at += PAGE)
            memcpy(file->pages[page++], (const uint8_t *)req->iov[i].iov_base + at, PAGE);
    file->size_bytes = KVT_MAX(file->size_bytes, req->offset + bytes);
    return (int64_t)bytes;
}

int kvt_mem_copy(struct kvt_mem_disk *disk, const struct kvt_mem_file *from)
{
    struct kvt_mem_file *file = kvt_mem_create(disk, from->name);
    int rc;

    if (!file)
        return -ENOMEM;
    rc = grow_table(file, from->page_count);
    for (size_t i = 0; i < from->page_count && !rc; i++) {
        if (!from->pages[i])
            continue;
        file->pages[i] = reserved_page;
        disk->used_pages++;
        if (from->pages[i] == reserved_page)
            continue;
        rc = own_page(&file->pages[i]);
        if (!rc)
            memcpy(file->pages[i], from->pages[i], PAGE);
    }
    file->size_bytes = from->size_bytes;
    return rc;
}
