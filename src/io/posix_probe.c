/* Does O_DIRECT really work in this directory? Asked of the kernel (statx), then tried: write two
 * pages, read the second back into another buffer, compare, and see that the page cache does not
 * hold them. Reads of holes succeed even where reads of data fail, so written data it must be.
 *
 * Leaves nothing behind: the file has no name (O_TMPFILE), or loses it before it is used. Threads:
 * the owner, at open.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/rng.h"
#include "io/io_posix.h"

#define PAGE KVT_IO_ALIGN
#define PROBE_BYTES (2 * PAGE)

/* <linux/magic.h> */
#define MAGIC_TMPFS 0x01021994
#define MAGIC_RAMFS 0x858458f6

int kvt_posix_scratch(int dir_fd)
{
    char name[KVT_IO_NAME_MAX];
    int fd = kvt_fd_high(openat(dir_fd, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));

    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL && errno != ENOENT))
        return fd < 0 ? -errno : fd;
    snprintf(name, sizeof name, ".kvtier-probe-%016llx", (unsigned long long)kvt_rng_seed_os());
    fd =
        kvt_fd_high(openat(dir_fd, name, O_CREAT | O_EXCL | O_RDWR | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (fd < 0)
        return -errno;
    (void)unlinkat(dir_fd, name, 0);
    return fd;
}

/* 1 when the kernel states an alignment that 4 KiB satisfies or states nothing, 0 when it says no.
 */
static int statx_allows(int fd, char *why, size_t why_len)
{
#ifdef STATX_DIOALIGN
    struct statx stx;

    if (!statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &stx) && (stx.stx_mask & STATX_DIOALIGN)) {
        if (!stx.stx_dio_mem_align || !stx.stx_dio_offset_align) {
            snprintf(why, why_len, "buffered: the file system says it has no O_DIRECT");
            return 0;
        }
        if (PAGE % stx.stx_dio_mem_align || PAGE % stx.stx_dio_offset_align) {
            snprintf(why, why_len, "buffered: O_DIRECT here wants %u-byte alignment",
                     stx.stx_dio_offset_align);
            return 0;
        }
    }
#else
    (void)fd;
    (void)why;
    (void)why_len;
#endif
    return 1;
}

/* Whether the page cache holds any of the probe's bytes. */
static int in_page_cache(int fd)
{
    unsigned char resident[PROBE_BYTES / PAGE] = {0};
    void *map = mmap(NULL, PROBE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    size_t vector =
        (PROBE_BYTES + (size_t)sysconf(_SC_PAGESIZE) - 1) / (size_t)sysconf(_SC_PAGESIZE);
    int held = 0;

    if (map == MAP_FAILED)
        return 0;
    if (vector <= sizeof resident && !mincore(map, PROBE_BYTES, resident))
        for (size_t i = 0; i < vector; i++)
            held |= resident[i] & 1;
    munmap(map, PROBE_BYTES);
    return held;
}

static int write_and_read(int fd, uint8_t *buffer, char *why, size_t why_len)
{
    struct kvt_rng rng = {kvt_rng_seed_os()};
    uint8_t *back = buffer + PROBE_BYTES;

    for (size_t i = 0; i < PROBE_BYTES; i += sizeof(uint64_t)) {
        uint64_t word = kvt_rng_next(&rng);
        memcpy(buffer + i, &word, sizeof word);
    }
    if (pwrite(fd, buffer, PROBE_BYTES, 0) != (ssize_t)PROBE_BYTES) {
        snprintf(why, why_len, "buffered: an O_DIRECT write failed (%s)", strerrordesc_np(errno));
        return 0;
    }
    if (pread(fd, back, PAGE, PAGE) != (ssize_t)PAGE) {
        snprintf(why, why_len, "buffered: an O_DIRECT read failed (%s)", strerrordesc_np(errno));
        return 0;
    }
    if (memcmp(back, buffer + PAGE, PAGE)) {
        snprintf(why, why_len, "buffered: an O_DIRECT read gave other bytes than were written");
        return 0;
    }
    if (in_page_cache(fd)) {
        snprintf(why, why_len, "buffered: O_DIRECT is accepted, but goes through the page cache");
        return 0;
    }
    snprintf(why, why_len, "direct: O_DIRECT proved by writing and reading back");
    return 1;
}

int kvt_posix_probe_direct(int dir_fd, char *why, size_t why_len)
{
    struct statfs fs;
    uint8_t *buffer;
    int fd, rc;

    if (!fstatfs(dir_fd, &fs) &&
        ((uint32_t)fs.f_type == MAGIC_TMPFS || (uint32_t)fs.f_type == MAGIC_RAMFS)) {
        snprintf(why, why_len, "buffered: the file system is memory (tmpfs)");
        return 0;
    }
    fd = kvt_posix_scratch(dir_fd);
    if (fd == -EACCES || fd == -EPERM || fd == -EROFS)
        return fd;
    if (fd < 0) {
        snprintf(why, why_len, "buffered: no probe file (%s)", strerrordesc_np(-fd));
        return 0;
    }
    buffer = aligned_alloc(PAGE, 2 * PROBE_BYTES);
    if (!buffer) {
        close(fd);
        return -ENOMEM;
    }
    rc = statx_allows(fd, why, why_len);
    if (rc && fcntl(fd, F_SETFL, O_RDWR | O_DIRECT) < 0) {
        snprintf(why, why_len, "buffered: O_DIRECT is refused (%s)", strerrordesc_np(errno));
        rc = 0;
    }
    if (rc)
        rc = write_and_read(fd, buffer, why, why_len);
    free(buffer);
    close(fd);
    return rc;
}
