/* One data request on one descriptor, to its end: EINTR retried, short transfers continued.
 *
 * Direct transfers must stay aligned: after a short one that ends inside a page the page is
 * transferred again, unless the file ends there. Buffered transfers tell the kernel to drop the
 * pages, so that DRAM is not used twice and a later read measures the drive.
 * Threads: the pool's; no state.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/checked.h"
#include "io/io_common.h"
#include "io/io_posix.h"

/* A transfer that stands still this often gives up: a drive that never moves must not hang us. */
#define STALLS_MAX 8u

/* Bytes of one fallback write of zeros. */
#define ZEROS_BYTES (64u << 10)

const struct kvt_posix_sys kvt_posix_sys_real = {
    .preadv = preadv,
    .pwritev = pwritev,
    .fdatasync = fdatasync,
    .fallocate = fallocate,
};

/* Whether the file ends at `end`: then a short read is the whole answer. */
static bool ends_at(int fd, uint64_t end)
{
    struct stat st;

    return !fstat(fd, &st) && (uint64_t)st.st_size <= end;
}

static ssize_t move_some(const struct kvt_posix_sys *sys, int fd, const struct kvt_io_req *req,
                         uint64_t from)
{
    struct iovec iov[KVT_IO_IOV_MAX];
    int count = (int)kvt_io_iov_from(req, from, iov);
    off_t offset = (off_t)(req->offset + from);
    ssize_t moved;

    do
        moved = req->kind == KVT_IO_READ ? sys->preadv(fd, iov, count, offset)
                                         : sys->pwritev(fd, iov, count, offset);
    while (moved < 0 && errno == EINTR);
    return moved < 0 ? -errno : moved;
}

bool kvt_posix_moved(int fd, bool direct, const struct kvt_io_req *req, uint64_t bytes,
                     int64_t moved, struct kvt_posix_progress *progress, int64_t *result)
{
    uint64_t from = progress->from, reached, next;

    if (moved < 0 || (!moved && req->kind == KVT_IO_READ)) {
        *result = moved < 0 ? moved : (int64_t)KVT_MAX(from, progress->reached);
        return true;
    }
    progress->reached = reached = from + (uint64_t)moved;
    if (reached >= bytes) {
        *result = (int64_t)bytes;
        return true;
    }
    if (req->kind == KVT_IO_READ && reached % KVT_IO_ALIGN && ends_at(fd, req->offset + reached)) {
        *result = (int64_t)reached;
        return true;
    }
    next = direct ? reached & ~(uint64_t)(KVT_IO_ALIGN - 1) : reached;
    if (next > from) {
        progress->stalls = 0;
    } else if (++progress->stalls == STALLS_MAX) {
        *result = -EIO;
        return true;
    }
    progress->from = next;
    return false;
}

static int64_t move_all(const struct kvt_posix_sys *sys, int fd, bool direct,
                        const struct kvt_io_req *req, uint64_t bytes)
{
    struct kvt_posix_progress progress = {0};
    int64_t result, moved;

    do
        moved = move_some(sys, fd, req, progress.from);
    while (!kvt_posix_moved(fd, direct, req, bytes, moved, &progress, &result));
    return result;
}

static int sync_file(const struct kvt_posix_sys *sys, int fd)
{
    int rc;

    do
        rc = sys->fdatasync(fd);
    while (rc < 0 && errno == EINTR);
    return rc < 0 ? -errno : 0;
}

int64_t kvt_posix_transfer(const struct kvt_posix_sys *sys, int fd, bool direct,
                           const struct kvt_io_req *req, uint64_t bytes)
{
    int64_t result;

    if (req->kind == KVT_IO_SYNC)
        return sync_file(sys, fd);
    if (req->kind == KVT_IO_PUNCH)
        return kvt_posix_zero(sys, fd, req->offset, bytes);
    result = move_all(sys, fd, direct, req, bytes);
    if (!direct && result > 0) {
        /* Dirty pages cannot be dropped: start their write-back now, the next read drops them. */
        if (req->kind == KVT_IO_WRITE)
            (void)sync_file_range(fd, (off_t)req->offset, result, SYNC_FILE_RANGE_WRITE);
        (void)posix_fadvise(fd, (off_t)req->offset, result, POSIX_FADV_DONTNEED);
    }
    return result;
}

static int write_zeros(const struct kvt_posix_sys *sys, int fd, uint64_t offset, uint64_t bytes)
{
    static _Alignas(KVT_IO_ALIGN) uint8_t zeros[ZEROS_BYTES]; /* never written */
    struct kvt_io_req req = {.kind = KVT_IO_WRITE, .iov_count = 1};

    while (bytes) {
        size_t part = KVT_MIN(bytes, (uint64_t)ZEROS_BYTES);
        int64_t done;

        req.offset = offset;
        req.iov[0] = (struct iovec){zeros, part};
        done = move_all(sys, fd, true, &req, part);
        if (done < 0)
            return (int)done;
        offset += part;
        bytes -= part;
    }
    return 0;
}

int kvt_posix_zero(const struct kvt_posix_sys *sys, int fd, uint64_t offset, uint64_t bytes)
{
    struct stat st;
    uint64_t end;
    int rc;

    do
        rc = sys->fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
                            (off_t)bytes);
    while (rc < 0 && errno == EINTR);
    if (!rc)
        return 0;
    if (errno != EOPNOTSUPP && errno != ENOSYS)
        return -errno;
    if (fstat(fd, &st) < 0)
        return -errno;
    /* not beyond the end: holes do not grow files either; our files end on whole pages */
    end = KVT_MIN(offset + bytes, (uint64_t)st.st_size & ~(uint64_t)(KVT_IO_ALIGN - 1));
    return end > offset ? write_zeros(sys, fd, offset, end - offset) : 0;
}
