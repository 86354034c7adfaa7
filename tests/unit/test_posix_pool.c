/* The posix backend's threads: who runs when.
 *
 * Goal:   reads are not stuck behind writes, writes are not starved by reads, stopping runs what
 * was accepted, and the event fd tells the truth. Method: system calls that note their order and
 * wait at a gate that the test opens.
 */
#include "io/io_posix.h"

#include "support/store_help.h"

#include <errno.h>
#include <poll.h>
#include <semaphore.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "io/io_common.h"

#define REQS 64

static sem_t gate;              /* one post lets one call through */
static _Atomic int at_gate;     /* calls that arrived */
static _Atomic int order_count; /* calls that went through */
static char order[REQS + 1];

static ssize_t pass(char kind, const struct iovec *iov, int count)
{
    ssize_t bytes = 0;

    at_gate++;
    while (sem_wait(&gate) < 0)
        ;
    order[order_count++] = kind;
    for (int i = 0; i < count; i++)
        bytes += (ssize_t)iov[i].iov_len;
    return bytes;
}

static ssize_t gated_preadv(int fd, const struct iovec *iov, int count, off_t offset)
{
    (void)fd;
    (void)offset;
    return pass('r', iov, count);
}

static ssize_t gated_pwritev(int fd, const struct iovec *iov, int count, off_t offset)
{
    (void)fd;
    (void)offset;
    return pass('w', iov, count);
}

static int gated_fdatasync(int fd)
{
    (void)fd;
    return (int)pass('s', NULL, 0);
}

static const struct kvt_posix_sys sys = {
    .preadv = gated_preadv,
    .pwritev = gated_pwritev,
    .fdatasync = gated_fdatasync,
};

struct bench {
    struct kvt_posix_pool pool;
    struct kvt_io_req reqs[REQS];
    unsigned count;
    uint8_t *page;
};

static void setup(struct bench *b, int threads)
{
    memset(b, 0, sizeof *b);
    assert_int_equal(sem_init(&gate, 0, 0), 0);
    at_gate = order_count = 0;
    memset(order, 0, sizeof order);
    b->page = aligned_alloc(KVT_IO_ALIGN, KVT_IO_ALIGN);
    assert_non_null(b->page);
    assert_int_equal(kvt_posix_pool_start(&b->pool, &sys, true, threads), 0);
}

static void submit(struct bench *b, int kind)
{
    struct kvt_io_req *req = &b->reqs[b->count++];

    *req = (struct kvt_io_req){.kind = kind, .iov_count = kind == KVT_IO_SYNC ? 0 : 1};
    req->iov[0] = (struct iovec){b->page, KVT_IO_ALIGN};
    assert_int_equal(
        kvt_posix_pool_submit(&b->pool, req, 0, kind == KVT_IO_SYNC ? 0 : KVT_IO_ALIGN), 0);
}

static void open_gate(int calls)
{
    while (calls--)
        sem_post(&gate);
}

/* Until `calls` wait at the gate, or have passed it; fails after ten seconds. */
static void await(_Atomic int *value, int calls)
{
    for (int i = 0; *value < calls; i++) {
        assert_true(i < 10000);
        usleep(1000);
    }
}

static unsigned reap_all(struct bench *b)
{
    struct kvt_io_req *got[REQS];
    unsigned done = 0;

    while (done < b->count) {
        struct pollfd wait = {.fd = b->pool.event_fd, .events = POLLIN};

        assert_int_equal(poll(&wait, 1, 10000), 1);
        unsigned n = kvt_posix_pool_reap(&b->pool, got, REQS);
        for (unsigned i = 0; i < n; i++)
            assert_true(got[i]->result >= 0 && got[i]->elapsed_ns >= 0);
        done += n;
    }
    return done;
}

static void teardown(struct bench *b)
{
    kvt_posix_pool_stop(&b->pool);
    free(b->page);
    sem_destroy(&gate);
}

/* Many writes and syncs stand at the gate: a read still finds a thread. */
static void test_writes_leave_a_thread(void **state)
{
    struct bench b;

    (void)state;
    for (int threads = 2; threads <= 4; threads++) {
        setup(&b, threads);
        for (int i = 0; i < 10; i++)
            submit(&b, i % 3 == 2 ? KVT_IO_SYNC : KVT_IO_WRITE);
        await(&at_gate, threads - 1);
        usleep(20000);
        assert_int_equal(at_gate, threads - 1); /* no more of them, though a thread is free */
        submit(&b, KVT_IO_READ);
        await(&at_gate, threads);
        open_gate(11);
        assert_int_equal(reap_all(&b), 11);
        assert_int_equal(order_count, 11);
        teardown(&b);
    }
}

/* One thread, busy; a write and many reads wait: 16 reads pass, then the write, then the rest. */
static void test_reads_pass_within_a_bound(void **state)
{
    struct bench b;

    (void)state;
    setup(&b, 1);
    submit(&b, KVT_IO_READ);
    await(&at_gate, 1);
    submit(&b, KVT_IO_WRITE);
    for (int i = 0; i < 30; i++)
        submit(&b, KVT_IO_READ);
    open_gate(32);
    reap_all(&b);
    assert_string_equal(order, "rrrrrrrrrrrrrrrrrwrrrrrrrrrrrrrr"); /* 1 + 16, the write, 14 */
    teardown(&b);
}

static void test_read_overtakes_queued_writes(void **state)
{
    struct bench b;

    (void)state;
    setup(&b, 1);
    submit(&b, KVT_IO_WRITE);
    await(&at_gate, 1);
    for (int i = 0; i < 5; i++)
        submit(&b, i % 2 ? KVT_IO_SYNC : KVT_IO_WRITE);
    submit(&b, KVT_IO_READ);
    open_gate(7);
    reap_all(&b);
    assert_string_equal(order, "wrwswsw"); /* writes and syncs keep their order among themselves */
    teardown(&b);
}

/* Stop runs everything that was accepted, with any number of threads. */
static void test_stop_runs_the_queue(void **state)
{
    struct bench b;

    (void)state;
    for (int threads = 1; threads <= 4; threads++) {
        setup(&b, threads);
        for (int i = 0; i < 40; i++)
            submit(&b, 1 + i % 3);
        open_gate(40);
        kvt_posix_pool_stop(&b.pool);
        assert_int_equal(order_count, 40);
        free(b.page);
        sem_destroy(&gate);
    }
}

static void test_event_fd(void **state)
{
    struct kvt_io_req *got[2];
    struct pollfd fd;
    struct bench b;

    (void)state;
    setup(&b, 1);
    fd = (struct pollfd){.fd = b.pool.event_fd, .events = POLLIN};
    assert_int_equal(poll(&fd, 1, 0), 0);
    for (int i = 0; i < 3; i++)
        submit(&b, KVT_IO_READ);
    assert_int_equal(poll(&fd, 1, 0), 0);
    open_gate(3);
    await(&order_count, 3);
    for (unsigned done = 0; done < 3;) { /* level: readable as long as something is left */
        assert_int_equal(poll(&fd, 1, 10000), 1);
        done += kvt_posix_pool_reap(&b.pool, got, 1);
    }
    assert_int_equal(poll(&fd, 1, 0), 0);
    assert_int_equal(kvt_posix_pool_reap(&b.pool, got, 2), 0);
    teardown(&b);
}

/* The bound counts from acceptance to reaping, errors included. */
static void test_flight_bound(void **state)
{
    static struct kvt_io_req reqs[KVT_IO_FLIGHT_MAX + 1];
    struct kvt_io_req *got[1];
    struct bench b;

    (void)state;
    setup(&b, 1);
    for (unsigned i = 0; i < KVT_IO_FLIGHT_MAX; i++)
        assert_int_equal(kvt_posix_pool_submit(&b.pool, &reqs[i], -1, -EBADF), 0);
    assert_int_equal(kvt_posix_pool_submit(&b.pool, &reqs[KVT_IO_FLIGHT_MAX], -1, -EBADF), -EAGAIN);
    assert_int_equal(kvt_posix_pool_reap(&b.pool, got, 1), 1);
    assert_int_equal(got[0]->result, -EBADF);
    assert_int_equal(kvt_posix_pool_submit(&b.pool, &reqs[KVT_IO_FLIGHT_MAX], -1, -EBADF), 0);
    assert_int_equal(order_count, 0);
    teardown(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_writes_leave_a_thread),
        cmocka_unit_test(test_reads_pass_within_a_bound),
        cmocka_unit_test(test_read_overtakes_queued_writes),
        cmocka_unit_test(test_stop_runs_the_queue),
        cmocka_unit_test(test_event_fd),
        cmocka_unit_test(test_flight_bound),
    };

    return cmocka_run_group_tests_name("posix_pool", tests, NULL, NULL);
}
