/* The I/O seam's contract, run over every backend.
 *
 * Goal:   whatever a backend is made of, files, requests and completions behave as io.h says.
 * Method: one table of backends (mem; posix direct if possible, buffered, with one thread; uring
 * direct if possible, buffered, with registered memory; the fault wrapper without rules over them)
 * times one table of cases. Where io_uring is not to be had its rows are skipped, and say so. Data
 * is pseudo-random from a printed seed. The seam wants 4 KiB-aligned addresses, offsets and sizes;
 * that misaligned ones (C43) are refused, not mangled, is a case here. Callers with other
 * alignments are served by the client's staging, which has its own tests.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <errno.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "io/io_common.h"
#include "support/fault_io.h"

#define PAGE KVT_IO_ALIGN
#define CAPACITY (64u << 20)

static uint64_t seed = 20261129;

struct backend {
    const char *name;
    int posix, threads, direct, fault;
    int choice; /* enum kvt_io_backend */
    int fixed;  /* register pool[] with the ring */
};

static const struct backend backends[] = {
    {"mem", 0, 0, 0, 0, KVT_IO_POSIX, 0},
    {"posix auto", 1, 4, -1, 0, KVT_IO_POSIX, 0},
    {"posix buffered", 1, 4, 0, 0, KVT_IO_POSIX, 0},
    {"posix one thread", 1, 1, -1, 0, KVT_IO_POSIX, 0},
    {"fault over mem", 0, 0, 0, 1, KVT_IO_POSIX, 0},
    {"fault over posix", 1, 2, -1, 1, KVT_IO_POSIX, 0},
    {"uring auto", 1, 1, -1, 0, KVT_IO_URING, 0},
    {"uring buffered", 1, 1, 0, 0, KVT_IO_URING, 0},
    {"uring fixed", 1, 1, -1, 0, KVT_IO_URING, 1},
    {"fault over uring", 1, 1, -1, 1, KVT_IO_URING, 0},
    {"the faster one", 1, 4, -1, 0, KVT_IO_AUTO, 0},
};

struct fixture {
    const struct backend *backend;
    struct kvt_io *io;
    char dir[64];
};

/* ---- helpers ---- */

#define POOL_PAGES 1024u
static _Alignas(PAGE) uint8_t pool[POOL_PAGES * PAGE]; /* registered by "uring fixed" */

static uint8_t *pages(size_t count)
{
    uint8_t *bytes = aligned_alloc(PAGE, count * PAGE);

    assert_non_null(bytes);
    return bytes;
}

static void fill(uint8_t *bytes, size_t len, uint64_t salt)
{
    struct kvt_rng rng = {seed ^ salt * 0x9e3779b97f4a7c15u};

    for (size_t i = 0; i < len; i += 8) {
        uint64_t word = kvt_rng_next(&rng);
        memcpy(bytes + i, &word, 8);
    }
}

static struct kvt_io *open_backend(struct fixture *f)
{
    struct kvt_io_posix_params params = {.path = f->dir,
                                         .threads = f->backend->threads,
                                         .direct = f->backend->direct,
                                         .backend = f->backend->choice,
                                         .fixed = f->backend->fixed ? pool : NULL,
                                         .fixed_bytes = f->backend->fixed ? sizeof pool : 0};
    struct kvt_io *io = NULL;

    if (f->backend->posix)
        assert_int_equal(kvt_io_files_new(&params, &io), 0);
    else
        assert_int_equal(kvt_io_mem_new(CAPACITY, &io), 0);
    return f->backend->fault ? fault_io_new(io, seed) : io;
}

static int create(struct kvt_io *io, const char *name)
{
    int file = io->ops->open(io, name, KVT_IO_OPEN_CREATE);

    assert_true(file >= 0);
    return file;
}

static int count_name(void *arg, const char *name)
{
    (void)name;
    ++*(int *)arg;
    return 0;
}

static int files_in(struct kvt_io *io)
{
    int count = 0;

    assert_int_equal(io->ops->list(io, count_name, &count), 0);
    return count;
}

static struct kvt_io_req *reap_one(struct kvt_io *io)
{
    struct kvt_io_req *req = NULL;

    while (!io->ops->reap(io, &req, 1)) {
        struct pollfd wait = {.fd = io->ops->event_fd(io), .events = POLLIN};
        assert_true(wait.fd >= 0); /* mem completes inside reap() */
        assert_int_equal(poll(&wait, 1, 10000), 1);
    }
    return req;
}

/* ---- cases ---- */

static void case_names(struct fixture *f)
{
    static const char *const bad[] = {
        "",     ".",
        "..",   "a/b",
        "/",    "/etc/passwd",
        "../x", "x/",
        NULL,   "0123456789012345678901234567890123456789012345678901234567890123", /* 64 bytes */
    };
    struct kvt_io *io = f->io;
    int file = create(io, "good");

    for (size_t i = 0; i < KVT_ARRAY_LEN(bad); i++) {
        assert_int_equal(io->ops->open(io, bad[i], KVT_IO_OPEN_CREATE), -EINVAL);
        assert_int_equal(io->ops->unlink(io, bad[i]), -EINVAL);
        assert_int_equal(io->ops->rename(io, "good", bad[i]), -EINVAL);
        assert_int_equal(io->ops->rename(io, bad[i], "good"), -EINVAL);
    }
    /* 63 bytes are the most */
    assert_true(create(io, "012345678901234567890123456789012345678901234567890123456789012") >= 0);
    /* C17: hostile but legal bytes are just a name */
    assert_true(create(io, "a\nb \xc3\xa9 ;$(x)") >= 0);
    assert_int_equal(files_in(io), 3);
    io->ops->close(io, file);
}

static void case_open_flags(struct fixture *f)
{
    struct kvt_io *io = f->io;
    uint8_t *buf = pages(1);
    int file, reader;

    assert_int_equal(io->ops->open(io, "a", 0), -ENOENT);
    file = io->ops->open(io, "a", KVT_IO_OPEN_CREATE | KVT_IO_OPEN_EXCLUSIVE);
    assert_true(file >= 0);
    assert_int_equal(io->ops->open(io, "a", KVT_IO_OPEN_CREATE | KVT_IO_OPEN_EXCLUSIVE), -EEXIST);
    reader = io->ops->open(io, "a", KVT_IO_OPEN_READ_ONLY);
    assert_true(reader >= 0 && reader != file);
    fill(buf, PAGE, 1);
    assert_int_equal(kvt_io_write_now(io, file, 0, buf, PAGE), PAGE);
    assert_int_equal(kvt_io_write_now(io, reader, 0, buf, PAGE), -EBADF);
    assert_int_equal(io->ops->truncate(io, reader, 0), -EBADF);
    assert_int_equal(io->ops->allocate(io, reader, PAGE), -EBADF);
    assert_int_equal(io->ops->punch(io, reader, 0, PAGE), -EBADF);
    assert_int_equal(io->ops->size(io, reader), PAGE);
    io->ops->close(io, reader);
    io->ops->close(io, reader); /* twice is harmless */
    assert_int_equal(io->ops->size(io, reader), -EBADF);
    assert_int_equal(kvt_io_read_now(io, reader, 0, buf, PAGE), -EBADF);
    assert_int_equal(kvt_io_read_now(io, -1, 0, buf, PAGE), -EBADF);
    assert_int_equal(kvt_io_read_now(io, 1 << 20, 0, buf, PAGE), -EBADF);
    /* the number is given out again */
    assert_int_equal(io->ops->open(io, "a", 0), reader);
    free(buf);
}

static void case_write_read(struct fixture *f)
{
    struct kvt_io *io = f->io;
    int file = create(io, "data");
    uint8_t *out = pages(800), *in = pages(800);
    static const size_t sizes[] = {1,  2,   3,   7,
                                   16, 255, 256, 757}; /* pages; 757 = 3,100,672 B: C43 */

    for (size_t i = 0; i < KVT_ARRAY_LEN(sizes); i++) {
        size_t len = sizes[i] * PAGE;
        uint64_t offset = i * 800 * PAGE;

        fill(out, len, i);
        memset(in, 0xa5, len);
        assert_int_equal(kvt_io_write_now(io, file, offset, out, len), len);
        assert_int_equal(kvt_io_read_now(io, file, offset, in, len), len);
        assert_memory_equal(in, out, len);
    }
    assert_int_equal(kvt_io_sync_now(io, file), 0);
    assert_int_equal(io->ops->size(io, file), (7 * 800 + 757) * PAGE);
    free(out);
    free(in);
}

static void case_vectors(struct fixture *f)
{
    struct kvt_io *io = f->io;
    int file = create(io, "vec");
    uint8_t *out = pages(KVT_IO_IOV_MAX * 3), *in = pages(KVT_IO_IOV_MAX * 3);
    struct kvt_io_req req = {.kind = KVT_IO_WRITE, .file = file, .offset = 5 * PAGE};
    size_t len = 0;

    fill(out, KVT_IO_IOV_MAX * 3 * PAGE, 2);
    /* pieces of 1, 2, 3 pages, taken from the back of the buffer to the front */
    for (uint32_t i = 0; i < KVT_IO_IOV_MAX; i++) {
        size_t n = i % 3 + 1;
        req.iov[i] = (struct iovec){out + (KVT_IO_IOV_MAX - 1 - i) * 3 * PAGE, n * PAGE};
        len += n * PAGE;
    }
    req.iov_count = KVT_IO_IOV_MAX;
    assert_int_equal(io->ops->submit(io, &req), 0);
    assert_ptr_equal(reap_one(io), &req);
    assert_int_equal(req.result, len);
    assert_int_equal(kvt_io_read_now(io, file, 5 * PAGE, in, len), len);
    for (uint32_t i = 0, at = 0; i < KVT_IO_IOV_MAX; i++) {
        assert_memory_equal(in + at, req.iov[i].iov_base, req.iov[i].iov_len);
        at += (uint32_t)req.iov[i].iov_len;
    }
    /* scattered back by a vector read */
    memset(in, 0, KVT_IO_IOV_MAX * 3 * PAGE);
    req.kind = KVT_IO_READ;
    for (uint32_t i = 0; i < KVT_IO_IOV_MAX; i++)
        req.iov[i].iov_base = in + ((uint8_t *)req.iov[i].iov_base - out);
    assert_int_equal(io->ops->submit(io, &req), 0);
    assert_ptr_equal(reap_one(io), &req);
    assert_int_equal(req.result, len);
    for (uint32_t i = 0; i < KVT_IO_IOV_MAX; i++) {
        uint8_t *piece = req.iov[i].iov_base;
        assert_memory_equal(piece, out + (piece - in), req.iov[i].iov_len);
    }
    free(out);
    free(in);
}

static void case_end_of_file(struct fixture *f)
{
    struct kvt_io *io = f->io;
    int file = create(io, "eof");
    uint8_t *out = pages(4), *in = pages(8);
    static const uint32_t cuts[] = {0, 1, 511, 512, 4095, 4096, 4097, 12288, 16383};

    fill(out, 4 * PAGE, 3);
    assert_int_equal(kvt_io_read_now(io, file, 0, in, PAGE), 0);
    assert_int_equal(kvt_io_read_now(io, file, 100 * PAGE, in, PAGE), 0);
    for (size_t i = 0; i < KVT_ARRAY_LEN(cuts); i++) { /* C4's shapes */
        assert_int_equal(kvt_io_write_now(io, file, 0, out, 4 * PAGE), 4 * PAGE);
        assert_int_equal(io->ops->truncate(io, file, cuts[i]), 0);
        assert_int_equal(io->ops->size(io, file), cuts[i]);
        memset(in, 0xa5, 8 * PAGE);
        assert_int_equal(kvt_io_read_now(io, file, 0, in, 8 * PAGE), cuts[i]);
        assert_memory_equal(in, out, cuts[i]);
        assert_int_equal(kvt_io_read_now(io, file, 2 * PAGE, in, 2 * PAGE),
                         cuts[i] > 2 * PAGE ? cuts[i] - 2 * PAGE : 0);
    }
    /* growing again shows zeros, not what was cut off */
    assert_int_equal(io->ops->truncate(io, file, 1), 0);
    assert_int_equal(io->ops->truncate(io, file, 4 * PAGE), 0);
    assert_int_equal(kvt_io_read_now(io, file, 0, in, 8 * PAGE), 4 * PAGE);
    assert_int_equal(in[0], out[0]);
    for (size_t i = 1; i < 4 * PAGE; i++)
        assert_int_equal(in[i], 0);
    free(out);
    free(in);
}

static void case_holes(struct fixture *f)
{
    struct kvt_io *io = f->io;
    int file = create(io, "holes");
    uint8_t *out = pages(8), *in = pages(8), zero[PAGE] = {0};

    fill(out, 8 * PAGE, 4);
    assert_int_equal(kvt_io_write_now(io, file, 16 * PAGE, out, PAGE), PAGE);
    assert_int_equal(io->ops->size(io, file), 17 * PAGE);
    assert_int_equal(kvt_io_read_now(io, file, 8 * PAGE, in, 2 * PAGE), 2 * PAGE);
    assert_memory_equal(in, zero, PAGE);
    assert_int_equal(kvt_io_write_now(io, file, 0, out, 8 * PAGE), 8 * PAGE);
    assert_int_equal(io->ops->punch(io, file, 2 * PAGE, 3 * PAGE), 0);
    assert_int_equal(io->ops->size(io, file), 17 * PAGE);
    assert_int_equal(kvt_io_read_now(io, file, 0, in, 8 * PAGE), 8 * PAGE);
    assert_memory_equal(in, out, 2 * PAGE);
    for (size_t i = 2; i < 5; i++)
        assert_memory_equal(in + i * PAGE, zero, PAGE);
    assert_memory_equal(in + 5 * PAGE, out + 5 * PAGE, 3 * PAGE);
    /* beyond the end: no growth */
    assert_int_equal(io->ops->punch(io, file, 16 * PAGE, 100 * PAGE), 0);
    assert_int_equal(io->ops->size(io, file), 17 * PAGE);
    assert_int_equal(io->ops->punch(io, file, 1, PAGE), -EINVAL);
    assert_int_equal(io->ops->punch(io, file, 0, 100), -EINVAL);
    assert_int_equal(io->ops->punch(io, file, 0, 0), -EINVAL);
    assert_int_equal(io->ops->punch(io, file, UINT64_MAX - PAGE + 1, PAGE), -EINVAL);
    free(out);
    free(in);
}

static void case_allocate(struct fixture *f)
{
    struct kvt_io *io = f->io;
    int file = create(io, "alloc"), rc;
    uint8_t *in = pages(1), zero[PAGE] = {0};

    rc = io->ops->allocate(io, file, 1u << 20);
    if (rc == -EOPNOTSUPP) {
        assert_int_equal(io->ops->size(io, file), 0);
        print_message("[   SKIP   ] no fallocate in %s\n", f->dir);
    } else {
        assert_int_equal(rc, 0);
        assert_int_equal(io->ops->size(io, file), 1u << 20);
        assert_int_equal(kvt_io_read_now(io, file, 512 * 1024, in, PAGE), PAGE);
        assert_memory_equal(in, zero, PAGE);
        /* never shrinks */
        assert_int_equal(io->ops->allocate(io, file, PAGE), 0);
        assert_int_equal(io->ops->size(io, file), 1u << 20);
    }
    assert_int_equal(io->ops->allocate(io, file, 0), -EINVAL);
    assert_int_equal(io->ops->allocate(io, -1, PAGE), -EBADF);
    free(in);
}

static int64_t punch_queued(struct kvt_io *io, int file, uint64_t offset, size_t bytes)
{
    struct kvt_io_req req = {.kind = KVT_IO_PUNCH, .file = file, .offset = offset, .iov_count = 1};

    req.iov[0].iov_len = bytes;
    assert_int_equal(io->ops->submit(io, &req), 0);
    assert_ptr_equal(reap_one(io), &req);
    return req.result;
}

/* A hole that is asked for like a write. */
static void case_holes_queued(struct fixture *f)
{
    struct kvt_io *io = f->io;
    int file = create(io, "holes"), reader;
    uint8_t *out = pages(8), *in = pages(8), zero[PAGE] = {0};

    fill(out, 8 * PAGE, 4);
    assert_int_equal(kvt_io_write_now(io, file, 0, out, 8 * PAGE), 8 * PAGE);
    assert_int_equal(punch_queued(io, file, 2 * PAGE, 3 * PAGE), 0);
    assert_int_equal(kvt_io_read_now(io, file, 0, in, 8 * PAGE), 8 * PAGE);
    assert_memory_equal(in, out, 2 * PAGE);
    for (size_t i = 2; i < 5; i++)
        assert_memory_equal(in + i * PAGE, zero, PAGE);
    assert_memory_equal(in + 5 * PAGE, out + 5 * PAGE, 3 * PAGE);
    assert_int_equal(punch_queued(io, file, 7 * PAGE, 100 * PAGE), 0);
    assert_int_equal(io->ops->size(io, file), 8 * PAGE);
    reader = io->ops->open(io, "holes", KVT_IO_OPEN_READ_ONLY);
    assert_true(reader >= 0);
    assert_int_equal(punch_queued(io, reader, 0, PAGE), -EBADF);
    assert_int_equal(kvt_io_read_now(io, file, 0, in, PAGE), PAGE);
    assert_memory_equal(in, out, PAGE);
    free(out);
    free(in);
}

static void case_unlink_rename(struct fixture *f)
{
    struct kvt_io *io = f->io;
    uint8_t *out = pages(2), *in = pages(1);
    int a = create(io, "a"), b = create(io, "b");

    fill(out, 2 * PAGE, 5);
    assert_int_equal(kvt_io_write_now(io, a, 0, out, PAGE), PAGE);
    assert_int_equal(kvt_io_write_now(io, b, 0, out + PAGE, PAGE), PAGE);
    assert_int_equal(io->ops->rename(io, "none", "x"), -ENOENT);
    assert_int_equal(io->ops->unlink(io, "none"), -ENOENT);
    assert_int_equal(io->ops->rename(io, "a", "b"), 0); /* over an open file */
    assert_int_equal(files_in(io), 1);
    assert_int_equal(io->ops->open(io, "a", 0), -ENOENT);
    assert_int_equal(kvt_io_read_now(io, b, 0, in, PAGE), PAGE); /* the old b lives while open */
    assert_memory_equal(in, out + PAGE, PAGE);
    io->ops->close(io, b);
    b = io->ops->open(io, "b", 0);
    assert_int_equal(kvt_io_read_now(io, b, 0, in, PAGE), PAGE);
    assert_memory_equal(in, out, PAGE);
    assert_int_equal(io->ops->rename(io, "b", "b"), 0);
    assert_int_equal(io->ops->unlink(io, "b"), 0);
    assert_int_equal(files_in(io), 0);
    assert_int_equal(kvt_io_read_now(io, a, 0, in, PAGE), PAGE);
    assert_memory_equal(in, out, PAGE);
    assert_int_equal(io->ops->sync_dir(io), 0);
    io->ops->close(io, a);
    io->ops->close(io, b);
    if (!f->backend->posix) { /* the last close gives the space back; other users of a disk, too */
        struct kvt_io_info info;

        io->ops->info(io, &info);
        assert_int_equal(info.free_bytes, info.total_bytes);
    }
    free(out);
    free(in);
}

/* A memory disk that is full: nothing is written, reads go on, space comes back (C27's shape). */
static void case_full(struct fixture *f)
{
    struct kvt_io *io = f->io;
    uint8_t *buf = pages(256), *in = pages(256);
    int file, filler, written = 0;

    if (f->backend->posix) /* a small tmpfs in test_io_posix.c */
        goto out;
    file = create(io, "file");
    filler = create(io, "filler");
    fill(buf, 256 * PAGE, 9);
    assert_int_equal(kvt_io_write_now(io, file, 0, buf, 256 * PAGE), 256 * PAGE);
    assert_int_equal(io->ops->allocate(io, filler, CAPACITY), -ENOSPC);
    assert_int_equal(io->ops->size(io, filler), 0);
    while (kvt_io_write_now(io, filler, (uint64_t)written * 256 * PAGE, buf, 256 * PAGE) ==
           256 * PAGE)
        written++;
    assert_int_equal(written, CAPACITY / (256 * PAGE) - 1);
    assert_int_equal(kvt_io_write_now(io, file, 256 * PAGE, buf, PAGE), -ENOSPC);
    assert_int_equal(io->ops->size(io, file), 256 * PAGE);
    assert_int_equal(kvt_io_write_now(io, file, 0, buf, 256 * PAGE), 256 * PAGE); /* in place */
    assert_int_equal(kvt_io_read_now(io, file, 0, in, 256 * PAGE), 256 * PAGE);
    assert_memory_equal(in, buf, 256 * PAGE);
    assert_int_equal(io->ops->punch(io, filler, 0, 10 * PAGE), 0);
    assert_int_equal(kvt_io_write_now(io, file, 256 * PAGE, buf, 11 * PAGE), -ENOSPC);
    assert_int_equal(kvt_io_write_now(io, file, 256 * PAGE, buf, 10 * PAGE), 10 * PAGE);
    assert_int_equal(io->ops->truncate(io, filler, 0), 0);
    assert_int_equal(io->ops->allocate(io, filler, 1u << 20),
                     0); /* reserved is as good as written */
    assert_int_equal(io->ops->truncate(io, filler, 0), 0);
    assert_int_equal(io->ops->allocate(io, filler, CAPACITY - 266 * PAGE), 0);
    assert_int_equal(kvt_io_write_now(io, file, 300 * PAGE, buf, PAGE), -ENOSPC);
    assert_int_equal(kvt_io_write_now(io, filler, 77 * PAGE, buf, PAGE), PAGE);
    assert_int_equal(kvt_io_read_now(io, filler, 76 * PAGE, in, 2 * PAGE), 2 * PAGE);
    for (size_t i = 0; i < PAGE; i++)
        assert_int_equal(in[i], 0);
    assert_memory_equal(in + PAGE, buf, PAGE);
out:
    free(buf);
    free(in);
}

static int stop_at_second(void *arg, const char *name)
{
    (void)name;
    return ++*(int *)arg == 2 ? 77 : 0;
}

static void case_list(struct fixture *f)
{
    struct kvt_io *io = f->io;
    char name[16];
    int seen = 0;

    assert_int_equal(files_in(io), 0);
    for (int i = 0; i < 200; i++) {
        snprintf(name, sizeof name, "seg-%08x", (unsigned)i);
        io->ops->close(io, create(io, name));
    }
    assert_int_equal(files_in(io), 200);
    assert_int_equal(io->ops->list(io, stop_at_second, &seen), 77);
    assert_int_equal(seen, 2);
}

/* Each malformed request is taken and completes with -EINVAL: nothing is written or read. */
static void case_malformed(struct fixture *f)
{
    struct kvt_io *io = f->io;
    int file = create(io, "x");
    uint8_t *buf = pages(4);
    struct kvt_io_req good = {.kind = KVT_IO_READ, .file = file, .iov_count = 1};
    struct kvt_io_req bad[17];
    size_t count = 0;

    fill(buf, 4 * PAGE, 6);
    assert_int_equal(kvt_io_write_now(io, file, 0, buf, 4 * PAGE), 4 * PAGE);
    good.iov[0] = (struct iovec){buf, PAGE};
    for (size_t i = 0; i < KVT_ARRAY_LEN(bad); i++)
        bad[i] = good;
    bad[count++].kind = 0;
    bad[count++].kind = 5;
    bad[count++].offset = 1;
    bad[count++].offset = 512; /* C43: the seam's alignment is 4 KiB, whatever the drive's is */
    bad[count++].offset = UINT64_MAX - PAGE + 1;
    bad[count++].offset = (uint64_t)INT64_MAX - PAGE + 1;
    bad[count++].iov_count = 0;
    bad[count++].iov_count = KVT_IO_IOV_MAX + 1;
    bad[count++].iov[0].iov_base = buf + 64; /* C43 */
    bad[count++].iov[0].iov_len = 100;
    bad[count++].iov[0].iov_len = 0;
    bad[count++].iov[0].iov_base = NULL;
    for (size_t i = count; i < KVT_ARRAY_LEN(bad); i++)
        bad[i].kind = KVT_IO_PUNCH;
    bad[count++].offset = 512;
    bad[count++].offset = UINT64_MAX - PAGE + 1;
    bad[count++].iov_count = 2;
    bad[count++].iov[0].iov_len = 100;
    bad[count++].iov[0].iov_len = 0;
    assert_int_equal(count, KVT_ARRAY_LEN(bad));
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(io->ops->submit(io, &bad[i]), 0);
        assert_ptr_equal(reap_one(io), &bad[i]);
        assert_int_equal(bad[i].result, -EINVAL);
    }
    assert_int_equal(kvt_io_read_now(io, file, 0, buf, PAGE), PAGE);
    free(buf);
}

/* Exactly one completion per accepted request; a full queue refuses and recovers. */
static void case_queue(struct fixture *f)
{
    enum { COUNT = KVT_IO_FLIGHT_MAX };
    struct kvt_io *io = f->io;
    int file = create(io, "q");
    struct kvt_io_req *reqs = calloc(COUNT, sizeof *reqs), extra = {.kind = KVT_IO_SYNC};
    struct kvt_io_req *got[7];
    uint8_t *buf = pages(COUNT);
    unsigned done = 0, n;

    assert_non_null(reqs);
    extra.file = file;
    fill(buf, COUNT * PAGE, 7);
    for (uint32_t i = 0; i < COUNT; i++) {
        reqs[i].kind = KVT_IO_WRITE;
        reqs[i].file = file;
        reqs[i].offset = (uint64_t)i * PAGE;
        reqs[i].iov_count = 1;
        reqs[i].iov[0] = (struct iovec){buf + (size_t)i * PAGE, PAGE};
        reqs[i].user = &reqs[i];
        assert_int_equal(io->ops->submit(io, &reqs[i]), 0);
    }
    assert_int_equal(io->ops->submit(io, &extra), -EAGAIN); /* nothing was reaped yet */
    while (done < COUNT) {
        n = io->ops->reap(io, got, KVT_ARRAY_LEN(got));
        if (!n && io->ops->event_fd(io) >= 0) {
            struct pollfd wait = {.fd = io->ops->event_fd(io), .events = POLLIN};
            assert_int_equal(poll(&wait, 1, 10000), 1);
        }
        for (unsigned i = 0; i < n; i++) {
            assert_ptr_equal(got[i]->user, got[i]);
            assert_int_equal(got[i]->result, PAGE);
            got[i]->user = NULL; /* a second completion would show */
        }
        done += n;
    }
    assert_int_equal(io->ops->reap(io, got, KVT_ARRAY_LEN(got)), 0);
    if (io->ops->event_fd(io) >= 0) {
        struct pollfd quiet = {.fd = io->ops->event_fd(io), .events = POLLIN};
        assert_int_equal(poll(&quiet, 1, 0), 0);
    }
    assert_int_equal(io->ops->submit(io, &extra), 0);
    assert_ptr_equal(reap_one(io), &extra);
    assert_int_equal(extra.result, 0);
    for (uint32_t i = 0; i < COUNT; i += 97) {
        uint8_t *in = pages(1);
        assert_int_equal(kvt_io_read_now(io, file, (uint64_t)i * PAGE, in, PAGE), PAGE);
        assert_memory_equal(in, buf + (size_t)i * PAGE, PAGE);
        free(in);
    }
    free(reqs);
    free(buf);
}

/* destroy() with requests in flight: no leak, no write after free (sanitizers watch). */
static void case_destroy_in_flight(struct fixture *f)
{
    struct kvt_io *io = f->io;
    int file = create(io, "d");
    struct kvt_io_req *reqs = calloc(64, sizeof *reqs);
    uint8_t *buf = pages(64);

    assert_non_null(reqs);
    fill(buf, 64 * PAGE, 8);
    for (uint32_t i = 0; i < 64; i++) {
        reqs[i] = (struct kvt_io_req){.kind = i % 2 ? KVT_IO_WRITE : KVT_IO_READ, .file = file};
        reqs[i].offset = (uint64_t)i * PAGE;
        reqs[i].iov_count = 1;
        reqs[i].iov[0] = (struct iovec){buf + (size_t)i * PAGE, PAGE};
        assert_int_equal(io->ops->submit(io, &reqs[i]), 0);
    }
    io->ops->destroy(io);
    free(reqs);
    free(buf);
    f->io = open_backend(f);
}

static void case_many_files(struct fixture *f)
{
    struct kvt_io *io = f->io;
    int files[300];
    char name[16];

    for (int i = 0; i < 300; i++) {
        snprintf(name, sizeof name, "f%d", i);
        files[i] = create(io, name);
        for (int j = 0; j < i; j++)
            assert_true(files[i] != files[j]);
    }
    for (int i = 0; i < 300; i++)
        assert_int_equal(io->ops->size(io, files[i]), 0);
    for (int i = 0; i < 300; i++)
        io->ops->close(io, files[i]);
}

static void case_lock_info(struct fixture *f)
{
    struct kvt_io *io = f->io;
    struct kvt_io_info info = {0};
    int64_t pid = -1;

    assert_int_equal(io->ops->lock(io, &pid), 0);
    assert_int_equal(io->ops->lock(io, NULL), 0); /* held already */
    io->ops->info(io, &info);
    assert_non_null(info.backend);
    if (!f->backend->posix)
        assert_string_equal(info.backend, "mem");
    else if (f->backend->choice != KVT_IO_AUTO)
        assert_string_equal(info.backend, f->backend->choice ? "uring" : "posix");
    if (f->backend->posix)
        assert_true(info.backend_why && strlen(info.backend_why) > 5);
    if (f->backend->fixed) /* in the limit of 8 MiB of locked memory, or root's none */
        assert_non_null(strstr(info.backend_why, "MiB registered"));
    assert_true(info.why && strlen(info.why) > 5);
    assert_true(info.direct == 0 || info.direct == 1);
    assert_true(info.free_bytes <= info.total_bytes && info.total_bytes >= CAPACITY);
    if (f->backend->posix && !f->backend->direct)
        assert_int_equal(info.direct, 0);
    print_message("             %s: %s; %s: %s\n", f->backend->name, info.why, info.backend,
                  info.backend_why ? info.backend_why : "no choice");
}

/* Requests in one piece and in many, of memory that may be registered with the backend, beside it,
 * and across its end: the same bytes. */
static void case_registered(struct fixture *f)
{
    struct kvt_io *io = f->io;
    int file = create(io, "fixed");
    uint8_t *plain = pages(64);

    fill(pool, sizeof pool, 11);
    assert_int_equal(kvt_io_write_now(io, file, 0, pool, sizeof pool), sizeof pool);
    for (size_t i = 0; i < POOL_PAGES; i += 64) {
        struct kvt_io_req req = {.kind = KVT_IO_READ, .file = file, .iov_count = 2};

        assert_int_equal(kvt_io_read_now(io, file, i * PAGE, plain, (size_t)64 * PAGE), 64 * PAGE);
        assert_memory_equal(plain, pool + i * PAGE, (size_t)64 * PAGE);
        memset(pool + i * PAGE, 0, (size_t)64 * PAGE);
        if (i % 128) {
            assert_int_equal(kvt_io_read_now(io, file, i * PAGE, pool + i * PAGE, 64 * PAGE),
                             64 * PAGE);
        } else {
            req.offset = i * PAGE;
            req.iov[0] = (struct iovec){pool + i * PAGE, PAGE};
            req.iov[1] = (struct iovec){pool + (i + 1) * PAGE, (size_t)63 * PAGE};
            assert_int_equal(io->ops->submit(io, &req), 0);
            assert_ptr_equal(reap_one(io), &req);
            assert_int_equal(req.result, 64 * PAGE);
        }
        assert_memory_equal(plain, pool + i * PAGE, (size_t)64 * PAGE);
    }
    free(plain);
}

/* Random writes, reads, truncates and punches against a plain array. */
static void case_model(struct fixture *f)
{
    enum { PAGES = 64, STEPS = 2000 };
    struct kvt_io *io = f->io;
    struct kvt_rng rng = {seed};
    int file = create(io, "model");
    uint8_t *model = calloc(PAGES, PAGE), *buf = pages(PAGES);
    uint64_t size = 0;

    assert_non_null(model);
    for (int step = 0; step < STEPS; step++) {
        uint64_t first = kvt_rng_below(&rng, PAGES), offset = first * PAGE;
        uint64_t len = (1 + kvt_rng_below(&rng, KVT_MIN(PAGES - first, (uint64_t)8))) * PAGE;
        uint64_t want = size > offset ? KVT_MIN(size - offset, len) : 0;

        switch (kvt_rng_below(&rng, 8)) {
        case 0:
            assert_int_equal(io->ops->punch(io, file, offset, len), 0);
            memset(model + offset, 0, len);
            break;
        case 1:
            size = kvt_rng_below(&rng, PAGES * PAGE + 1);
            assert_int_equal(io->ops->truncate(io, file, size), 0);
            memset(model + size, 0, PAGES * PAGE - size);
            break;
        case 2:
        case 3:
        case 4:
            fill(buf, len, (uint64_t)step + 100);
            assert_int_equal(kvt_io_write_now(io, file, offset, buf, len), len);
            memcpy(model + offset, buf, len);
            size = KVT_MAX(size, offset + len);
            break;
        default:
            memset(buf, 0x5a, len);
            assert_int_equal(kvt_io_read_now(io, file, offset, buf, len), want);
            assert_memory_equal(buf, model + offset, want);
        }
        assert_int_equal(io->ops->size(io, file), size);
    }
    free(model);
    free(buf);
}

struct io_case {
    const char *name;
    void (*run)(struct fixture *f);
};

static const struct io_case cases[] = {
    {"names", case_names},
    {"open flags", case_open_flags},
    {"write and read", case_write_read},
    {"vectors", case_vectors},
    {"end of file", case_end_of_file},
    {"holes", case_holes},
    {"holes queued", case_holes_queued},
    {"allocate", case_allocate},
    {"unlink and rename", case_unlink_rename},
    {"full", case_full},
    {"list", case_list},
    {"malformed requests", case_malformed},
    {"queue", case_queue},
    {"destroy in flight", case_destroy_in_flight},
    {"many files", case_many_files},
    {"lock and info", case_lock_info},
    {"registered memory", case_registered},
    {"model", case_model},
};

/* ---- the product of the two tables ---- */

static int remove_name(void *arg, const char *name)
{
    struct kvt_io *io = arg;

    return io->ops->unlink(io, name);
}

static void run_pair(void **state)
{
    const void *const *pair = *state;
    const struct io_case *io_case = pair[1];
    struct fixture f = {.backend = pair[0]};
    char why[160];

    if (f.backend->choice == KVT_IO_URING && kvt_io_uring_probe(why, sizeof why)) {
        print_message("[   SKIP   ] %s\n", why);
        skip();
    }
    if (f.backend->posix) {
        snprintf(f.dir, sizeof f.dir, "io-test-XXXXXX");
        assert_non_null(mkdtemp(f.dir));
    }
    f.io = open_backend(&f);
    io_case->run(&f);
    assert_int_equal(f.io->ops->list(f.io, remove_name, f.io), 0);
    f.io->ops->destroy(f.io);
    if (f.backend->posix)
        assert_int_equal(rmdir(f.dir), 0);
}

int main(void)
{
    enum { COUNT = KVT_ARRAY_LEN(backends) * KVT_ARRAY_LEN(cases) };
    static const void *pairs[COUNT][2];
    static char names[COUNT][64];
    struct CMUnitTest tests[COUNT];
    size_t n = 0;

    print_message("seed %llu\n", (unsigned long long)seed);
    for (size_t b = 0; b < KVT_ARRAY_LEN(backends); b++) {
        for (size_t c = 0; c < KVT_ARRAY_LEN(cases); c++, n++) {
            pairs[n][0] = &backends[b];
            pairs[n][1] = &cases[c];
            snprintf(names[n], sizeof names[n], "%s: %s", backends[b].name, cases[c].name);
            tests[n] = (struct CMUnitTest){
                .name = names[n], .test_func = run_pair, .initial_state = pairs[n]};
        }
    }
    return cmocka_run_group_tests_name("io", tests, NULL, NULL);
}
