/* One request to its end (C7, C43, C44): the posix backend over system calls that misbehave.
 *
 * Goal:   EINTR, short transfers and missing fallocate never change bytes; errors come out as they
 *         are; nothing hangs.
 * Method: a table of system calls whose answers follow a script, over a real file; then random
 *         scripts against a copy.
 */
#include "io/io_posix.h"

#include "support/store_help.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"

#define PAGE ((int64_t)KVT_IO_ALIGN)
#define PAGES 16

/* What the next calls do: move at most so many bytes, or fail with -errno; 0 at the end: normal. */
static int64_t script[64];
static size_t step;
static unsigned calls;
static int fallocate_error;
static unsigned interrupts; /* EINTRs that fdatasync and fallocate give first */

static ssize_t scripted(int fd, const struct iovec *iov, int count, off_t offset, int writing)
{
    int64_t what = script[step];
    struct iovec cut[KVT_IO_IOV_MAX];
    int64_t left;

    calls++;
    assert_in_range(count, 1, KVT_IO_IOV_MAX);
    if (!what)
        return writing ? pwritev(fd, iov, count, offset) : preadv(fd, iov, count, offset);
    step++;
    if (what < 0) {
        errno = (int)-what;
        return -1;
    }
    left = what;
    for (int i = 0; i < count; i++) { /* only so much of it */
        cut[i] = iov[i];
        cut[i].iov_len = KVT_MIN(iov[i].iov_len, (size_t)left);
        left -= (int64_t)cut[i].iov_len;
    }
    return writing ? pwritev(fd, cut, count, offset) : preadv(fd, cut, count, offset);
}

static ssize_t scripted_preadv(int fd, const struct iovec *iov, int count, off_t offset)
{
    return scripted(fd, iov, count, offset, 0);
}

static ssize_t scripted_pwritev(int fd, const struct iovec *iov, int count, off_t offset)
{
    return scripted(fd, iov, count, offset, 1);
}

static int interrupted(void)
{
    if (!interrupts)
        return 0;
    interrupts--;
    errno = EINTR;
    return -1;
}

static int scripted_fdatasync(int fd)
{
    if (interrupted())
        return -1;
    if (script[0] < 0) {
        errno = (int)-script[0];
        return -1;
    }
    return fdatasync(fd);
}

static int scripted_fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    if (interrupted())
        return -1;
    if (fallocate_error) {
        errno = fallocate_error;
        return -1;
    }
    return fallocate(fd, mode, offset, bytes);
}

static const struct kvt_posix_sys sys = {
    .preadv = scripted_preadv,
    .pwritev = scripted_pwritev,
    .fdatasync = scripted_fdatasync,
    .fallocate = scripted_fallocate,
};

static void play(const int64_t *steps, size_t count)
{
    memset(script, 0, sizeof script);
    memcpy(script, steps, count * sizeof *steps);
    step = calls = 0;
}
#define PLAY(...) \
    play((const int64_t[]){__VA_ARGS__}, KVT_ARRAY_LEN(((const int64_t[]){__VA_ARGS__})))

struct bench {
    int fd;
    uint8_t *out, *in;
    struct kvt_io_req req;
};

/* A file without a name, its descriptor buffered: the alignment logic is what is tested. */
static void setup(struct bench *b)
{
    char name[] = "transfer-test-XXXXXX";

    memset(b, 0, sizeof *b);
    b->fd = mkstemp(name);
    assert_true(b->fd >= 0);
    assert_int_equal(unlink(name), 0);
    b->out = aligned_alloc(PAGE, PAGES * PAGE);
    b->in = aligned_alloc(PAGE, PAGES * PAGE);
    assert_non_null(b->out);
    assert_non_null(b->in);
    for (size_t i = 0; i < PAGES * PAGE; i++)
        b->out[i] = (uint8_t)(i * 7 + i / 4096 + 1);
    memset(b->in, 0xa5, PAGES * PAGE);
    PLAY(0);
    fallocate_error = 0;
    interrupts = 0;
}

static void teardown(struct bench *b)
{
    close(b->fd);
    free(b->out);
    free(b->in);
}

/* Pieces of 1, 3, 4 and 8 pages. */
static int64_t transfer(struct bench *b, int kind, int direct)
{
    static const size_t pieces[] = {1, 3, 4, 8};
    uint8_t *at = kind == KVT_IO_READ ? b->in : b->out;

    b->req = (struct kvt_io_req){.kind = kind, .iov_count = KVT_ARRAY_LEN(pieces)};
    for (size_t i = 0; i < KVT_ARRAY_LEN(pieces); i++) {
        b->req.iov[i] = (struct iovec){at, pieces[i] * (size_t)PAGE};
        at += pieces[i] * (size_t)PAGE;
    }
    return kvt_posix_transfer(&sys, b->fd, direct, &b->req, PAGES * PAGE);
}

static void test_c7_interrupted_and_short(void **state)
{
    struct bench b;

    (void)state;
    for (int direct = 0; direct < 2; direct++) {
        setup(&b);
        PLAY(-EINTR, -EINTR, 4096, 1, 5000, -EINTR, 4095, 20000, 3);
        assert_int_equal(transfer(&b, KVT_IO_WRITE, direct), PAGES * PAGE);
        assert_int_equal(lseek(b.fd, 0, SEEK_END), PAGES * PAGE);
        PLAY(-EINTR, 512, -EINTR, 4096, 1, 5000, -EINTR, 4095, 20000, 3);
        assert_int_equal(transfer(&b, KVT_IO_READ, direct), PAGES * PAGE);
        assert_memory_equal(b.in, b.out, PAGES * PAGE);
        teardown(&b);
    }
}

static void test_c7_errors_come_through(void **state)
{
    static const int errors[] = {EIO, ENOSPC, EDQUOT, EFBIG, ENXIO};
    struct bench b;

    (void)state;
    setup(&b);
    for (size_t i = 0; i < KVT_ARRAY_LEN(errors); i++) {
        PLAY(-errors[i]);
        assert_int_equal(transfer(&b, KVT_IO_WRITE, 0), -errors[i]);
        PLAY(4096, 100, -EINTR, -errors[i]); /* after a part: still a failure */
        assert_int_equal(transfer(&b, KVT_IO_WRITE, 1), -errors[i]);
        PLAY(0);
        assert_int_equal(transfer(&b, KVT_IO_WRITE, 1), PAGES * PAGE); /* and then it works */
        PLAY(8192, -errors[i]);
        assert_int_equal(transfer(&b, KVT_IO_READ, 0), -errors[i]);
        PLAY(0);
        assert_int_equal(transfer(&b, KVT_IO_READ, 0), PAGES * PAGE);
        assert_memory_equal(b.in, b.out, PAGES * PAGE);
    }
    teardown(&b);
}

/* A device that moves a few bytes of a page for ever: an error, not a hang. */
static void test_standing_still(void **state)
{
    struct bench b;
    int64_t steps[60];

    (void)state;
    setup(&b);
    assert_int_equal(transfer(&b, KVT_IO_WRITE, 0), PAGES * PAGE);
    for (size_t i = 0; i < KVT_ARRAY_LEN(steps); i++)
        steps[i] = 512;
    play(steps, KVT_ARRAY_LEN(steps));
    assert_int_equal(transfer(&b, KVT_IO_READ, 1), -EIO);
    assert_true(calls < 20);
    play(steps, KVT_ARRAY_LEN(steps));
    assert_int_equal(transfer(&b, KVT_IO_WRITE, 1), -EIO);
    assert_true(calls < 20);
    /* buffered transfers may go on from any byte: 60 steps of 512, then the rest */
    play(steps, KVT_ARRAY_LEN(steps));
    assert_int_equal(transfer(&b, KVT_IO_READ, 0), PAGES * PAGE);
    assert_memory_equal(b.in, b.out, PAGES * PAGE);
    teardown(&b);
}

/* C4's file lengths: a read ends where the file does, in few calls, however it got there. */
static void test_end_of_file(void **state)
{
    static const int64_t sizes[] = {0, 1, 511, 4095, 4096, 4097, 20481, 65535, 65536};
    struct bench b;

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(sizes); i++) {
        for (int direct = 0; direct < 2; direct++) {
            setup(&b);
            assert_int_equal(transfer(&b, KVT_IO_WRITE, 0), PAGES * PAGE);
            assert_int_equal(ftruncate(b.fd, sizes[i]), 0);
            PLAY(0);
            assert_int_equal(transfer(&b, KVT_IO_READ, direct), sizes[i]);
            assert_memory_equal(b.in, b.out, (size_t)sizes[i]);
            assert_true(calls <= 2);
            for (int64_t at = sizes[i]; at < PAGES * PAGE; at++)
                assert_int_equal(b.in[at], 0xa5); /* nothing beyond the end is touched */
            PLAY(4096, 100);                      /* short on the way, too */
            assert_int_equal(transfer(&b, KVT_IO_READ, direct), sizes[i]);
            teardown(&b);
        }
    }
}

static void test_random_scripts(void **state)
{
    struct kvt_rng rng = {test_seed()};
    struct bench b;

    (void)state;
    setup(&b);
    for (int round = 0; round < 2000; round++) {
        int64_t steps[30];
        int direct = (int)kvt_rng_below(&rng, 2);

        for (size_t i = 0; i < KVT_ARRAY_LEN(steps); i++) {
            steps[i] = kvt_rng_below(&rng, 3) ? 1 + (int64_t)kvt_rng_below(&rng, 12000) : -EINTR;
            if (direct && steps[i] > 0) /* every call moves a page, so that none stands still */
                steps[i] += PAGE;
        }
        for (size_t i = 0; i < PAGES * PAGE; i++)
            b.out[i] ^= (uint8_t)round;
        play(steps, KVT_ARRAY_LEN(steps));
        assert_int_equal(transfer(&b, KVT_IO_WRITE, direct), PAGES * PAGE);
        play(steps, KVT_ARRAY_LEN(steps));
        memset(b.in, 0xa5, PAGES * PAGE);
        assert_int_equal(transfer(&b, KVT_IO_READ, direct), PAGES * PAGE);
        assert_memory_equal(b.in, b.out, PAGES * PAGE);
    }
    teardown(&b);
}

static void test_sync(void **state)
{
    struct bench b;

    (void)state;
    setup(&b);
    b.req = (struct kvt_io_req){.kind = KVT_IO_SYNC};
    interrupts = 3;
    assert_int_equal(kvt_posix_transfer(&sys, b.fd, 1, &b.req, 0), 0);
    assert_int_equal(interrupts, 0);
    PLAY(-EIO);
    assert_int_equal(kvt_posix_transfer(&sys, b.fd, 1, &b.req, 0), -EIO);
    PLAY(-ENOSPC);
    assert_int_equal(kvt_posix_transfer(&sys, b.fd, 1, &b.req, 0), -ENOSPC);
    teardown(&b);
}

/* C44: no holes here: zeros are written instead, and the file does not grow. */
static void test_c44_zero_without_holes(void **state)
{
    static const int missing[] = {EOPNOTSUPP, ENOSYS, 0};
    struct bench b;

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(missing); i++) {
        setup(&b);
        assert_int_equal(transfer(&b, KVT_IO_WRITE, 0), PAGES * PAGE);
        fallocate_error = missing[i];
        interrupts = 2;
        PLAY(-EINTR, 4096 + 100);
        assert_int_equal(kvt_posix_zero(&sys, b.fd, 3 * PAGE, 5 * PAGE), 0);
        assert_int_equal(kvt_posix_zero(&sys, b.fd, 14 * PAGE, 1000 * PAGE), 0);
        assert_int_equal(kvt_posix_zero(&sys, b.fd, 100 * PAGE, PAGE), 0);
        assert_int_equal(lseek(b.fd, 0, SEEK_END), PAGES * PAGE);
        PLAY(0);
        assert_int_equal(transfer(&b, KVT_IO_READ, 0), PAGES * PAGE);
        memset(b.out + 3 * PAGE, 0, 5 * PAGE);
        memset(b.out + 14 * PAGE, 0, 2 * PAGE);
        assert_memory_equal(b.in, b.out, PAGES * PAGE);
        teardown(&b);
    }
    setup(&b);
    fallocate_error = EIO;
    assert_int_equal(kvt_posix_zero(&sys, b.fd, 0, PAGE), -EIO);
    teardown(&b);
}

/* More than one fallback buffer of zeros. */
static void test_zero_large(void **state)
{
    size_t len = (size_t)100 * PAGE;
    uint8_t *bytes = malloc(len);
    struct bench b;

    (void)state;
    setup(&b);
    assert_non_null(bytes);
    memset(bytes, 0x77, len);
    assert_int_equal(pwrite(b.fd, bytes, len, 0), len);
    fallocate_error = EOPNOTSUPP;
    assert_int_equal(kvt_posix_zero(&sys, b.fd, PAGE, 98 * PAGE), 0);
    assert_int_equal(pread(b.fd, bytes, len, 0), len);
    for (size_t i = 0; i < len; i++)
        assert_int_equal(bytes[i], i < (size_t)PAGE || i >= (size_t)(99 * PAGE) ? 0x77 : 0);
    free(bytes);
    teardown(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_c7_interrupted_and_short),
        cmocka_unit_test(test_c7_errors_come_through),
        cmocka_unit_test(test_standing_still),
        cmocka_unit_test(test_end_of_file),
        cmocka_unit_test(test_random_scripts),
        cmocka_unit_test(test_sync),
        cmocka_unit_test(test_c44_zero_without_holes),
        cmocka_unit_test(test_zero_large),
    };

    return cmocka_run_group_tests_name("posix_transfer", tests, NULL, NULL);
}
