/* The fault injector itself: a test tool that lies about lying would hide everything.
 *
 * Goal:   each rule fires at the operation that it names, as often as it says, and does exactly
 * that. Method: over the memory backend, and over posix where threads and event fds matter.
 */
#include "support/fault_io.h"

#include "support/store_help.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"

#define PAGE ((int64_t)KVT_IO_ALIGN)
#define PAGES 16

struct bench {
    struct kvt_io *io;
    int file;
    uint8_t *out, *in;
};

static uint8_t *pages(size_t count)
{
    uint8_t *bytes = aligned_alloc(PAGE, count * PAGE);

    assert_non_null(bytes);
    return bytes;
}

static void setup(struct bench *b, uint64_t capacity)
{
    struct kvt_rng rng = {20261129};
    struct kvt_io *mem;

    assert_int_equal(kvt_io_mem_new(capacity, &mem), 0);
    b->io = fault_io_new(mem, 7);
    b->file = b->io->ops->open(b->io, "seg-00000000", KVT_IO_OPEN_CREATE);
    assert_true(b->file >= 0);
    b->out = pages(PAGES);
    b->in = pages(PAGES);
    for (size_t i = 0; i < PAGES * PAGE; i++)
        b->out[i] = (uint8_t)(1 + kvt_rng_below(&rng, 255)); /* no zeros: torn tails show */
}

static void teardown(struct bench *b)
{
    b->io->ops->destroy(b->io);
    free(b->out);
    free(b->in);
}

static int64_t put(struct bench *b, uint64_t page, size_t count)
{
    return kvt_io_write_now(b->io, b->file, page * PAGE, b->out, count * PAGE);
}

static int64_t get(struct bench *b, uint64_t page, size_t count)
{
    return kvt_io_read_now(b->io, b->file, page * PAGE, b->in, count * PAGE);
}

static void test_nth_operation_once(void **state)
{
    struct bench b;
    int rule;

    (void)state;
    setup(&b, 1 << 20);
    rule = fault_io_rule(
        b.io, &(struct fault_rule){
                  .ops = FAULT_WRITE, .skip = 6, .times = 1, .action = FAULT_FAIL, .error = EIO});
    for (int i = 0; i < 20; i++) /* C5's shape */
        assert_int_equal(put(&b, (uint64_t)i, 1), i == 6 ? -EIO : PAGE);
    assert_int_equal(fault_io_rule_state(b.io, rule)->seen, 20);
    assert_int_equal(fault_io_rule_state(b.io, rule)->fired, 1);
    assert_int_equal(fault_io_count(b.io, FAULT_WRITE), 20);
    assert_int_equal(fault_io_count(b.io, FAULT_DATA), 20);
    assert_int_equal(get(&b, 6, 1), PAGE);
    assert_int_equal(b.in[0], 0); /* a failed write was not made */
    teardown(&b);
}

static void test_sticky_and_clear(void **state)
{
    struct bench b;

    (void)state;
    setup(&b, 1 << 20);
    fault_io_rule(b.io, &(struct fault_rule){.ops = FAULT_WRITE | FAULT_ALLOCATE,
                                             .skip = 1,
                                             .action = FAULT_FAIL,
                                             .error = ENOSPC});
    assert_int_equal(put(&b, 0, 1), PAGE);
    for (int i = 0; i < 5; i++)
        assert_int_equal(put(&b, 1, 1), -ENOSPC);
    assert_int_equal(b.io->ops->allocate(b.io, b.file, PAGE), -ENOSPC);
    assert_int_equal(get(&b, 0, 1), PAGE); /* reads are not meant */
    fault_io_clear(b.io);
    assert_int_equal(put(&b, 1, 1), PAGE);
    teardown(&b);
}

static void test_name_filter(void **state)
{
    struct bench b;
    int journal;

    (void)state;
    setup(&b, 1 << 20);
    journal = b.io->ops->open(b.io, "journal", KVT_IO_OPEN_CREATE);
    fault_io_rule(b.io, &(struct fault_rule){
                            .ops = FAULT_ALL, .name = "jou", .action = FAULT_FAIL, .error = EIO});
    assert_int_equal(kvt_io_write_now(b.io, journal, 0, b.out, PAGE), -EIO);
    assert_int_equal(kvt_io_sync_now(b.io, journal), -EIO);
    assert_int_equal(b.io->ops->open(b.io, "journal", 0), -EIO);
    assert_int_equal(b.io->ops->truncate(b.io, journal, 0), -EIO);
    assert_int_equal(b.io->ops->punch(b.io, journal, 0, PAGE), -EIO);
    assert_int_equal(b.io->ops->rename(b.io, "journal", "x"), -EIO);
    assert_int_equal(b.io->ops->unlink(b.io, "journal"), -EIO);
    assert_int_equal(put(&b, 0, 1), PAGE);
    assert_int_equal(b.io->ops->sync_dir(b.io), 0);
    teardown(&b);
}

static void test_flip(void **state)
{
    struct bench b;
    unsigned differing = 0;

    (void)state;
    setup(&b, 1 << 20);
    assert_int_equal(put(&b, 0, 2), 2 * PAGE);
    fault_io_rule(
        b.io, &(struct fault_rule){
                  .ops = FAULT_READ, .times = 1, .action = FAULT_FLIP, .arg = (PAGE + 5) * 8 + 3});
    fault_io_rule(
        b.io,
        &(struct fault_rule){
            .ops = FAULT_READ, .skip = 1, .times = 1, .action = FAULT_FLIP, .arg = FAULT_RANDOM});
    assert_int_equal(get(&b, 0, 2), 2 * PAGE);
    assert_int_equal(b.in[PAGE + 5], b.out[PAGE + 5] ^ 8);
    b.in[PAGE + 5] ^= 8;
    assert_memory_equal(b.in, b.out, 2 * PAGE);
    assert_int_equal(get(&b, 0, 2), 2 * PAGE);
    for (size_t i = 0; i < 2 * PAGE; i++)
        differing += (unsigned)__builtin_popcount(b.in[i] ^ b.out[i]);
    assert_int_equal(differing, 1);
    assert_int_equal(get(&b, 0, 2), 2 * PAGE); /* the stored bytes are unharmed */
    assert_memory_equal(b.in, b.out, 2 * PAGE);
    teardown(&b);
}

static void test_short_read(void **state)
{
    struct bench b;

    (void)state;
    setup(&b, 1 << 20);
    assert_int_equal(put(&b, 0, 4), 4 * PAGE);
    fault_io_rule(
        b.io, &(struct fault_rule){.ops = FAULT_READ, .times = 1, .action = FAULT_SHORT, .arg = 3});
    assert_int_equal(get(&b, 0, 4), PAGE);
    assert_int_equal(get(&b, 0, 4), 4 * PAGE);
    teardown(&b);
}

static void test_lost_write_and_sync(void **state)
{
    struct bench b;

    (void)state;
    setup(&b, 1 << 20);
    assert_int_equal(put(&b, 0, 1), PAGE);
    fault_io_rule(b.io, &(struct fault_rule){
                            .ops = FAULT_WRITE | FAULT_SYNC, .times = 2, .action = FAULT_LOST});
    assert_int_equal(kvt_io_write_now(b.io, b.file, 0, b.out + PAGE, 2 * PAGE), 2 * PAGE);
    assert_int_equal(kvt_io_sync_now(b.io, b.file), 0);
    assert_int_equal(b.io->ops->size(b.io, b.file), PAGE);
    assert_int_equal(get(&b, 0, 1), PAGE);
    assert_memory_equal(b.in, b.out, PAGE); /* the old bytes */
    teardown(&b);
}

static void test_torn_write(void **state)
{
    static const uint64_t sectors[] = {0, 1, 7, 8, 9, 17, 24, 31, 32, 100};
    struct bench b;

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(sectors); i++) {
        size_t kept = KVT_MIN(sectors[i] * 512, (uint64_t)4 * PAGE);
        struct kvt_io_req req = {.kind = KVT_IO_WRITE, .iov_count = 2}, *got = NULL;

        setup(&b, 1 << 20);
        fault_io_rule(b.io, &(struct fault_rule){.ops = FAULT_WRITE,
                                                 .times = 1,
                                                 .action = FAULT_TORN,
                                                 .error = i % 2 ? EIO : 0,
                                                 .arg = sectors[i]});
        req.file = b.file;
        req.iov[0] = (struct iovec){b.out, PAGE};
        req.iov[1] = (struct iovec){b.out + PAGE, 3 * PAGE};
        assert_int_equal(b.io->ops->submit(b.io, &req), 0);
        assert_int_equal(b.io->ops->reap(b.io, &got, 1), 1);
        assert_ptr_equal(got, &req);
        assert_int_equal(req.result, i % 2 ? -EIO : 4 * PAGE);
        assert_ptr_equal(req.iov[1].iov_base, b.out + PAGE); /* the request itself is untouched */
        memset(b.in, 0, PAGES * PAGE);
        assert_int_equal(get(&b, 0, 4), kvt_round_up(kept, PAGE));
        assert_memory_equal(b.in, b.out, kept);
        for (size_t at = kept; at < 4 * PAGE; at++)
            assert_int_equal(b.in[at], 0);
        teardown(&b);
    }
}

static void test_misdirected_write(void **state)
{
    struct bench b;

    (void)state;
    setup(&b, 1 << 20);
    fault_io_rule(b.io, &(struct fault_rule){
                            .ops = FAULT_WRITE, .times = 1, .action = FAULT_MISDIRECT, .arg = 5});
    assert_int_equal(put(&b, 0, 1), PAGE);
    assert_int_equal(get(&b, 5, 1), PAGE);
    assert_memory_equal(b.in, b.out, PAGE);
    assert_int_equal(get(&b, 0, 1), PAGE);
    assert_int_equal(b.in[0], 0);
    teardown(&b);
}

static void test_plug(void **state)
{
    struct kvt_io *after;
    struct bench b;

    (void)state;
    setup(&b, 1 << 20);
    assert_int_equal(put(&b, 0, 1), PAGE);
    fault_io_pull_the_plug(b.io);
    assert_int_equal(put(&b, 1, 1), -EIO);
    assert_int_equal(get(&b, 0, 1), -EIO);
    assert_int_equal(kvt_io_sync_now(b.io, b.file), -EIO);
    assert_int_equal(b.io->ops->open(b.io, "x", KVT_IO_OPEN_CREATE), -EIO);
    assert_int_equal(b.io->ops->allocate(b.io, b.file, PAGE), -EIO);
    assert_int_equal(kvt_io_mem_clone(fault_io_inner(b.io), &after), 0);
    int file = after->ops->open(after, "seg-00000000", 0);
    assert_int_equal(after->ops->size(after, file), PAGE);
    assert_int_equal(kvt_io_read_now(after, file, 0, b.in, PAGE), PAGE);
    assert_memory_equal(b.in, b.out, PAGE);
    after->ops->destroy(after);
    teardown(&b);
}

static void test_corrupt_at_rest(void **state)
{
    struct bench b;

    (void)state;
    setup(&b, 1 << 20);
    assert_int_equal(put(&b, 0, 2), 2 * PAGE);
    assert_int_equal(fault_io_corrupt(b.io, "seg-00000000", PAGE + 1000, 2), 0);
    assert_int_equal(get(&b, 0, 2), 2 * PAGE);
    assert_int_equal(b.in[PAGE + 1000], b.out[PAGE + 1000] ^ 4);
    b.in[PAGE + 1000] ^= 4;
    assert_memory_equal(b.in, b.out, 2 * PAGE);
    assert_int_equal(fault_io_corrupt(b.io, "seg-00000000", 2 * PAGE, 0), -ERANGE);
    assert_int_equal(fault_io_corrupt(b.io, "none", 0, 0), -ENOENT);
    teardown(&b);
}

/* Completions held back, then released newest first; the event fd agrees. */
static void hold_over(struct kvt_io *inner, struct bench *b)
{
    struct kvt_io_req reqs[4], *got[4];
    struct pollfd fd;

    b->io = fault_io_new(inner, 7);
    b->file = b->io->ops->open(b->io, "f", KVT_IO_OPEN_CREATE);
    b->out = pages(4);
    b->in = pages(4);
    memset(b->out, 0x5a, 4 * PAGE);
    fd = (struct pollfd){.fd = b->io->ops->event_fd(b->io), .events = POLLIN};
    fault_io_hold(b->io, 1);
    for (uint32_t i = 0; i < 4; i++) {
        reqs[i] = (struct kvt_io_req){.kind = KVT_IO_WRITE, .file = b->file, .iov_count = 1};
        reqs[i].offset = (uint64_t)i * PAGE;
        reqs[i].iov[0] = (struct iovec){b->out + (size_t)i * PAGE, PAGE};
        assert_int_equal(b->io->ops->submit(b->io, &reqs[i]), 0);
        while (fault_io_held(b->io) <= i)
            usleep(1000); /* each has ended before the next: their order is known */
        assert_true(b->io->ops->size(b->io, b->file) >= (int64_t)(i + 1) * PAGE);
        assert_int_equal(b->io->ops->reap(b->io, got, 4), 0);
    }
    assert_int_equal(b->io->ops->reap(b->io, got, 4), 0);
    if (fd.fd >= 0)
        assert_int_equal(poll(&fd, 1, 0), 0);
    assert_int_equal(fault_io_release(b->io, 1, 1), 1);
    if (fd.fd >= 0)
        assert_int_equal(poll(&fd, 1, 0), 1);
    assert_int_equal(b->io->ops->reap(b->io, got, 4), 1);
    assert_ptr_equal(got[0], &reqs[3]);
    fault_io_hold(b->io, 0);
    assert_int_equal(b->io->ops->reap(b->io, got, 2), 2);
    assert_ptr_equal(got[0], &reqs[0]);
    assert_ptr_equal(got[1], &reqs[1]);
    assert_int_equal(b->io->ops->reap(b->io, got, 4), 1);
    assert_ptr_equal(got[0], &reqs[2]);
    assert_int_equal(reqs[2].result, PAGE);
    if (fd.fd >= 0)
        assert_int_equal(poll(&fd, 1, 0), 0);
    teardown(b);
}

static void test_hold_mem(void **state)
{
    struct kvt_io *inner;
    struct bench b;

    (void)state;
    assert_int_equal(kvt_io_mem_new(1 << 20, &inner), 0);
    hold_over(inner, &b);
}

static void test_hold_posix(void **state)
{
    char dir[] = "fault-test-XXXXXX", file[64];
    struct kvt_io_posix_params params = {.path = dir, .threads = 2, .direct = -1};
    struct kvt_io *inner;
    struct bench b;

    (void)state;
    assert_non_null(mkdtemp(dir));
    assert_int_equal(kvt_io_posix_new(&params, &inner), 0);
    hold_over(inner, &b);
    snprintf(file, sizeof file, "%s/f", dir);
    assert_int_equal(unlink(file), 0);
    assert_int_equal(rmdir(dir), 0);
}

static void test_rules_are_bounded(void **state)
{
    struct fault_rule rule = {.ops = FAULT_READ, .times = 1, .action = FAULT_FAIL, .error = EIO};
    struct bench b;

    (void)state;
    setup(&b, 1 << 20);
    for (int i = 0; i < FAULT_RULES_MAX; i++)
        assert_int_equal(fault_io_rule(b.io, &rule), i);
    assert_int_equal(fault_io_rule(b.io, &rule), -1);
    for (int i = 0; i < FAULT_RULES_MAX; i++) /* one fires at a time, in their order */
        assert_int_equal(get(&b, 0, 1), -EIO);
    assert_int_equal(get(&b, 0, 1), 0);
    assert_int_equal(fault_io_rule_state(b.io, 15)->fired, 1);
    teardown(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nth_operation_once),
        cmocka_unit_test(test_sticky_and_clear),
        cmocka_unit_test(test_name_filter),
        cmocka_unit_test(test_flip),
        cmocka_unit_test(test_short_read),
        cmocka_unit_test(test_lost_write_and_sync),
        cmocka_unit_test(test_torn_write),
        cmocka_unit_test(test_misdirected_write),
        cmocka_unit_test(test_plug),
        cmocka_unit_test(test_corrupt_at_rest),
        cmocka_unit_test(test_hold_mem),
        cmocka_unit_test(test_hold_posix),
        cmocka_unit_test(test_rules_are_bounded),
    };

    return cmocka_run_group_tests_name("fault_io", tests, NULL, NULL);
}
