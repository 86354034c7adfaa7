/* The uring engine (C7, C41, C49), and the choice between it and posix.
 *
 * Goal:   EINTR, EAGAIN, short transfers and failures are handled as posix does; the event fd never
 *         keeps a completion back; nothing is lost at the end; where the kernel has no ring for us,
 *         posix runs, says why, and gives the same bytes.
 * Method: a real ring whose outcomes a script falsifies; engines that count and wait; real seccomp
 *         filters in a child. The seam's contract over this engine is in test_io.c, directories and
 *         forks in test_io_posix.c. ThreadSanitizer sees nothing of what the kernel does, so a
 * clean run under it says nothing about the ring.
 */
#include "io/io_engine.h"

#include "support/no_ring.h"
#include "support/store_help.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "io/io_common.h"
#include "kvtier/error.h"

#define PAGE ((int64_t)KVT_IO_ALIGN)
#define PAGES 16
#define SKIPPED 77

/* ---- a scripted kernel ---- */

/* What the next outcomes are: at most so many bytes, or -errno; 0 at the end: the truth. */
static int32_t script[64];
static size_t step;
static unsigned outcomes;

static int32_t scripted(const struct kvt_io_req *req, int32_t result)
{
    int32_t what = script[step];

    (void)req;
    outcomes++;
    if (!what)
        return result;
    step++;
    return what < 0 ? what : KVT_MIN(what, result);
}
static const struct kvt_uring_sys sys = {.outcome = scripted};

static void play(const int32_t *steps, size_t count)
{
    memset(script, 0, sizeof script);
    memcpy(script, steps, count * sizeof *steps);
    step = outcomes = 0;
}
#define PLAY(...) \
    play((const int32_t[]){__VA_ARGS__}, KVT_ARRAY_LEN(((const int32_t[]){__VA_ARGS__})))

struct bench {
    struct kvt_io_engine *engine;
    int fd;
    uint8_t *out, *in;
    struct kvt_io_req req;
};

/* `direct` is what the engine is told; the file itself is buffered: the logic is what is tested. */
static void setup(struct bench *b, int direct)
{
    char name[] = "uring-test-XXXXXX", why[160];

    memset(b, 0, sizeof *b);
    if (kvt_uring_engine_new(direct, &sys, &b->engine, why, sizeof why)) {
        print_message("[   SKIP   ] %s\n", why);
        skip();
    }
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
}

static void teardown(struct bench *b)
{
    b->engine->ops->stop(b->engine);
    close(b->fd);
    free(b->out);
    free(b->in);
}

static struct kvt_io_req *reap_one(struct bench *b)
{
    struct kvt_io_req *req = NULL;

    while (!b->engine->ops->reap(b->engine, &req, 1)) {
        struct pollfd wait = {.fd = b->engine->event_fd, .events = POLLIN};

        assert_int_equal(poll(&wait, 1, 10000), 1);
    }
    return req;
}

/* Pieces of 1, 3, 4 and 8 pages. */
static int64_t transfer(struct bench *b, int kind)
{
    static const size_t pieces[] = {1, 3, 4, 8};
    uint8_t *at = kind == KVT_IO_READ ? b->in : b->out;

    b->req = (struct kvt_io_req){.kind = kind, .iov_count = KVT_ARRAY_LEN(pieces)};
    for (size_t i = 0; i < KVT_ARRAY_LEN(pieces); i++) {
        b->req.iov[i] = (struct iovec){at, pieces[i] * (size_t)PAGE};
        at += pieces[i] * (size_t)PAGE;
    }
    assert_int_equal(b->engine->ops->submit(b->engine, &b->req, b->fd, PAGES * PAGE), 0);
    assert_ptr_equal(reap_one(b), &b->req);
    return b->req.result;
}

static void test_c7_interrupted_and_short(void **state)
{
    struct bench b;

    (void)state;
    for (int direct = 0; direct < 2; direct++) {
        setup(&b, direct);
        PLAY(-EINTR, -EINTR, 4096, 1, 5000, -EAGAIN, 4095, 20000, 3);
        assert_int_equal(transfer(&b, KVT_IO_WRITE), PAGES * PAGE);
        assert_int_equal(step, 9);
        assert_int_equal(lseek(b.fd, 0, SEEK_END), PAGES * PAGE);
        PLAY(-EINTR, 512, -EINTR, 4096, 1, 5000, -EAGAIN, 4095, 20000, 3);
        assert_int_equal(transfer(&b, KVT_IO_READ), PAGES * PAGE);
        assert_int_equal(step, 10);
        assert_memory_equal(b.in, b.out, PAGES * PAGE);
        teardown(&b);
    }
}

static void test_c7_errors_come_through(void **state)
{
    static const int errors[] = {EIO, ENOSPC, EDQUOT, EFBIG, ENXIO};
    struct bench b;

    (void)state;
    for (int direct = 0; direct < 2; direct++) {
        setup(&b, direct);
        for (size_t i = 0; i < KVT_ARRAY_LEN(errors); i++) {
            PLAY(-errors[i]);
            assert_int_equal(transfer(&b, KVT_IO_WRITE), -errors[i]);
            PLAY(4096, 100, -EINTR, -errors[i]); /* after a part: still a failure */
            assert_int_equal(transfer(&b, KVT_IO_WRITE), -errors[i]);
            PLAY(0);
            assert_int_equal(transfer(&b, KVT_IO_WRITE), PAGES * PAGE);
            PLAY(8192, -errors[i]);
            assert_int_equal(transfer(&b, KVT_IO_READ), -errors[i]);
        }
        /* C7: a hundred later operations on the same queue succeed */
        for (int i = 0; i < 100; i++) {
            PLAY(0);
            memset(b.in, 0, PAGES * PAGE);
            assert_int_equal(transfer(&b, KVT_IO_READ), PAGES * PAGE);
            assert_memory_equal(b.in, b.out, PAGES * PAGE);
        }
        teardown(&b);
    }
}

/* A device that never gets on: an error, not a hang. */
static void test_stalls_end(void **state)
{
    struct bench b;

    (void)state;
    setup(&b, 1);
    assert_int_equal(transfer(&b, KVT_IO_WRITE), PAGES * PAGE);
    for (size_t i = 0; i < 60; i++)
        script[i] = 512;
    step = 0;
    assert_int_equal(transfer(&b, KVT_IO_READ), -EIO);
    for (size_t i = 0; i < 60; i++)
        script[i] = -EAGAIN;
    step = 0;
    assert_int_equal(transfer(&b, KVT_IO_READ), -EAGAIN);
    teardown(&b);
}

/* Random scripts against a copy. */
static void test_random_scripts(void **state)
{
    struct kvt_rng rng = {20261129};
    struct bench b;

    (void)state;
    print_message("seed 20261129\n");
    setup(&b, 0);
    for (int round = 0; round < 300; round++) {
        int32_t steps[40] = {0};

        for (size_t i = 0; i < 40; i++) {
            uint64_t what = kvt_rng_next(&rng);

            steps[i] = what % 5 == 0 ? -EINTR : 1 + (int32_t)(what >> 32) % 9000;
            steps[i] = steps[i] > 0 || steps[i] == -EINTR ? steps[i] : 1 - steps[i];
        }
        for (size_t i = 0; i < PAGES * PAGE; i += 512)
            b.out[i] = (uint8_t)kvt_rng_next(&rng);
        play(steps, 40);
        assert_int_equal(transfer(&b, KVT_IO_WRITE), PAGES * PAGE);
        play(steps, 40);
        memset(b.in, 0, PAGES * PAGE);
        assert_int_equal(transfer(&b, KVT_IO_READ), PAGES * PAGE);
        assert_memory_equal(b.in, b.out, PAGES * PAGE);
    }
    teardown(&b);
}

static void test_sync(void **state)
{
    struct bench b;

    (void)state;
    setup(&b, 1);
    for (int i = 0; i < 3; i++) {
        static const int32_t said[] = {-EINTR, -EIO, -ENOSPC};

        PLAY(said[i]);
        b.req = (struct kvt_io_req){.kind = KVT_IO_SYNC};
        assert_int_equal(b.engine->ops->submit(b.engine, &b.req, b.fd, 0), 0);
        assert_ptr_equal(reap_one(&b), &b.req);
        assert_int_equal(b.req.result, i ? said[i] : 0);
    }
    teardown(&b);
}

/* The end of the file inside a page, inside a piece, and at once. */
static void test_end_of_file(void **state)
{
    static const int64_t sizes[] = {0, 1, 4095, 4096, 4097, 20000, PAGES * 4096 - 1};
    struct bench b;

    (void)state;
    for (int direct = 0; direct < 2; direct++) {
        setup(&b, direct);
        for (size_t i = 0; i < KVT_ARRAY_LEN(sizes); i++) {
            PLAY(0);
            assert_int_equal(transfer(&b, KVT_IO_WRITE), PAGES * PAGE);
            assert_int_equal(ftruncate(b.fd, sizes[i]), 0);
            memset(b.in, 0xa5, PAGES * PAGE);
            assert_int_equal(transfer(&b, KVT_IO_READ), sizes[i]);
            assert_memory_equal(b.in, b.out, (size_t)sizes[i]);
            assert_int_equal(b.in[PAGES * PAGE - 1], 0xa5);
        }
        teardown(&b);
    }
}

/* ---- the queue ---- */

/* Never more than four writes and syncs with the kernel: a read that comes behind a hundred of them
 * is not the last one back. */
static void test_reads_pass_writes(void **state)
{
    enum { WRITES = 100 };
    static struct kvt_io_req writes[WRITES];
    struct kvt_io_req read = {.kind = KVT_IO_READ, .iov_count = 1}, *got[1];
    unsigned before = 0, read_at = WRITES;
    struct bench b;

    (void)state;
    setup(&b, 1);
    assert_int_equal(transfer(&b, KVT_IO_WRITE), PAGES * PAGE);
    for (int i = 0; i < WRITES; i++) {
        writes[i] = (struct kvt_io_req){.kind = KVT_IO_WRITE, .iov_count = 1};
        writes[i].iov[0] = (struct iovec){b.out, PAGES * PAGE};
        assert_int_equal(b.engine->ops->submit(b.engine, &writes[i], b.fd, PAGES * PAGE), 0);
    }
    read.iov[0] = (struct iovec){b.in, PAGE};
    assert_int_equal(b.engine->ops->submit(b.engine, &read, b.fd, PAGE), 0);
    while (before < WRITES + 1) {
        struct pollfd wait = {.fd = b.engine->event_fd, .events = POLLIN};

        if (!b.engine->ops->reap(b.engine, got, 1)) {
            assert_int_equal(poll(&wait, 1, 10000), 1);
            continue;
        }
        if (got[0] == &read)
            read_at = before;
        before++;
    }
    assert_in_range(read_at, 0, 8); /* those that were there, and some that ended meanwhile */
    assert_int_equal(read.result, PAGE);
    teardown(&b);
}

/* One at a time, however many are done: the event fd stays readable until the last one is taken. */
static void test_event_fd(void **state)
{
    static struct kvt_io_req reqs[10];
    struct kvt_io_req *got[1];
    struct pollfd fd;
    struct bench b;

    (void)state;
    setup(&b, 1);
    fd = (struct pollfd){.fd = b.engine->event_fd, .events = POLLIN};
    assert_int_equal(poll(&fd, 1, 0), 0);
    for (int i = 0; i < 10; i++) {
        reqs[i] = (struct kvt_io_req){.kind = KVT_IO_SYNC};
        assert_int_equal(
            b.engine->ops->submit(b.engine, &reqs[i], i % 2 ? b.fd : -1, i % 2 ? 0 : -EBADF), 0);
    }
    usleep(50000);
    for (int done = 0; done < 10;) {
        assert_int_equal(poll(&fd, 1, 10000), 1);
        done += (int)b.engine->ops->reap(b.engine, got, 1);
    }
    assert_int_equal(b.engine->ops->reap(b.engine, got, 1), 0);
    assert_int_equal(poll(&fd, 1, 0), 0);
    teardown(&b);
}

static void test_flight_bound(void **state)
{
    static struct kvt_io_req reqs[KVT_IO_FLIGHT_MAX + 1];
    struct kvt_io_req *got[1];
    struct bench b;

    (void)state;
    setup(&b, 1);
    for (unsigned i = 0; i <= KVT_IO_FLIGHT_MAX; i++) {
        int want = i == KVT_IO_FLIGHT_MAX ? -EAGAIN : 0;

        reqs[i] = (struct kvt_io_req){.kind = KVT_IO_READ, .iov_count = 1};
        reqs[i].iov[0] = (struct iovec){b.in, PAGE};
        assert_int_equal(b.engine->ops->submit(b.engine, &reqs[i], b.fd, i % 2 ? PAGE : -EBADF),
                         want);
    }
    (void)reap_one(&b);
    assert_int_equal(b.engine->ops->submit(b.engine, &reqs[KVT_IO_FLIGHT_MAX], b.fd, PAGE), 0);
    for (unsigned i = 0; i < KVT_IO_FLIGHT_MAX; i++)
        (void)reap_one(&b);
    assert_int_equal(b.engine->ops->reap(b.engine, got, 1), 0);
    teardown(&b);
}

/* Stopping waits for what the kernel has and for what it has not got yet: all is in the file. */
static void test_stop_runs_the_queue(void **state)
{
    enum { COUNT = 600 };
    static struct kvt_io_req reqs[COUNT];
    uint8_t *page = aligned_alloc(PAGE, PAGE);
    struct bench b;

    (void)state;
    assert_non_null(page);
    setup(&b, 0);
    for (uint64_t i = 0; i < COUNT; i++) {
        reqs[i] = (struct kvt_io_req){.kind = KVT_IO_WRITE, .iov_count = 1};
        reqs[i].offset = i * KVT_IO_ALIGN;
        reqs[i].iov[0] = (struct iovec){b.out + i % PAGES * KVT_IO_ALIGN, PAGE};
        assert_int_equal(b.engine->ops->submit(b.engine, &reqs[i], b.fd, PAGE), 0);
    }
    b.engine->ops->stop(b.engine);
    for (uint64_t i = 0; i < COUNT; i++) {
        assert_int_equal(pread(b.fd, page, PAGE, (off_t)(i * KVT_IO_ALIGN)), PAGE);
        assert_memory_equal(page, b.out + i % PAGES * KVT_IO_ALIGN, PAGE);
    }
    close(b.fd);
    free(b.out);
    free(b.in);
    free(page);
}

/* The thread that submitted ends while its requests are with the kernel, as an owner's thread does
 * before the store is closed: the kernel takes them back, and they are done all the same. */
static unsigned taken_back;

static int32_t count_taken_back(const struct kvt_io_req *req, int32_t result)
{
    (void)req;
    taken_back += result == -ECANCELED || result == -EFAULT;
    return result;
}

#define ORPHANS 64
struct orphans {
    struct bench *bench;
    struct kvt_io_req reqs[ORPHANS];
};

static void *submit_and_end(void *arg)
{
    struct orphans *orphans = arg;
    struct bench *b = orphans->bench;

    for (uint64_t i = 0; i < ORPHANS; i++) {
        struct kvt_io_req *req = &orphans->reqs[i];
        int kind = i % 3 == 0 ? KVT_IO_SYNC : i % 3 == 1 ? KVT_IO_WRITE : KVT_IO_READ;

        *req = (struct kvt_io_req){.kind = kind, .iov_count = kind == KVT_IO_SYNC ? 0 : 1};
        req->iov[0] = (struct iovec){kind == KVT_IO_READ ? b->in : b->out, PAGES * PAGE};
        req->offset = kind == KVT_IO_WRITE ? (1 + i) * PAGES * KVT_IO_ALIGN : 0;
        if (b->engine->ops->submit(b->engine, req, b->fd, kind == KVT_IO_SYNC ? 0 : PAGES * PAGE))
            return orphans;
    }
    return NULL;
}

static void test_the_submitting_thread_ends(void **state)
{
    static const struct kvt_uring_sys counting = {.outcome = count_taken_back};
    static struct orphans orphans;
    struct bench b;
    char why[160];

    (void)state;
    setup(&b, 0);
    b.engine->ops->stop(b.engine);
    assert_int_equal(kvt_uring_engine_new(0, &counting, &b.engine, why, sizeof why), 0);
    assert_int_equal(transfer(&b, KVT_IO_WRITE), PAGES * PAGE);
    taken_back = 0;
    for (int round = 0; round < 40; round++) {
        pthread_t thread;
        void *failed;

        orphans.bench = &b;
        assert_int_equal(pthread_create(&thread, NULL, submit_and_end, &orphans), 0);
        assert_int_equal(pthread_join(thread, &failed), 0);
        assert_null(failed);
        for (int i = 0; i < ORPHANS; i++) {
            struct kvt_io_req *req = reap_one(&b);

            assert_int_equal(req->result, req->kind == KVT_IO_SYNC ? 0 : PAGES * PAGE);
        }
        assert_memory_equal(b.in, b.out, PAGES * PAGE);
    }
    print_message("             %u trips were taken back\n", taken_back);
    teardown(&b);
}

/* ---- the choice ---- */

/* An engine that does its requests when they are reaped, and each of them takes a while. */
struct slow_engine {
    struct kvt_io_engine engine;
    struct kvt_io_req *queue[64];
    int fds[64];
    unsigned count, passes;
    useconds_t pause, write_pause;
    int error;
};

static int slow_submit(struct kvt_io_engine *engine, struct kvt_io_req *req, int fd, int64_t bytes)
{
    struct slow_engine *slow = (struct slow_engine *)engine;

    (void)bytes;
    slow->fds[slow->count] = fd;
    slow->queue[slow->count++] = req;
    return 0;
}

static unsigned slow_reap(struct kvt_io_engine *engine, struct kvt_io_req **out, unsigned max)
{
    struct slow_engine *slow = (struct slow_engine *)engine;
    unsigned count = slow->count;

    assert_true(count <= max);
    usleep(count && slow->queue[0]->kind == KVT_IO_WRITE ? slow->write_pause : slow->pause);
    for (unsigned i = 0; i < count; i++) {
        struct kvt_io_req *req = slow->queue[i];

        req->result = req->kind == KVT_IO_READ
                          ? preadv(slow->fds[i], req->iov, 1, (off_t)req->offset)
                          : pwritev(slow->fds[i], req->iov, 1, (off_t)req->offset);
        if (slow->error)
            req->result = slow->error;
        out[i] = req;
    }
    slow->passes++;
    slow->count = 0;
    return count;
}
static const struct kvt_io_engine_ops slow_ops = {
    .name = "slow", .submit = slow_submit, .reap = slow_reap};

static void test_race(void **state)
{
    struct slow_engine a = {.engine = {&slow_ops, -1}, .pause = 1000}, b = a;
    struct kvt_io_race race = {.engines = {&a.engine, &b.engine}};
    int dir = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    (void)state;
    b.pause = 60000;
    assert_int_equal(kvt_io_race(&race, dir, false, 4 << 20, 10000000000ll), 0);
    assert_true(race.best_ns[0] < race.best_ns[1]);
    assert_true(race.best_ns[1] >= 60000000);
    assert_int_equal(a.passes, 5); /* one writes */
    assert_int_equal(b.passes, 4);
    assert_int_equal(race.write_ns[0], 0); /* reads have told */
    assert_int_equal(kvt_io_race_winner(&race), 0);
    /* the budget ends it: one pass of the slow one, and none of it when even that is too late */
    a.passes = b.passes = 0;
    assert_int_equal(kvt_io_race(&race, dir, false, 4 << 20, 55000000), 0);
    assert_int_equal(b.passes, 1);
    assert_int_equal(kvt_io_race(&race, dir, false, 4 << 20, 0), -ETIME);
    b.error = -EIO;
    assert_int_equal(kvt_io_race(&race, dir, false, 4 << 20, 10000000000ll), -EIO);
    assert_int_equal(kvt_io_race(&race, dir, false, 4096, 1), KVT_E_INVAL);
    assert_int_equal(kvt_io_race(&race, dir, false, 1 << 30, 1), KVT_E_INVAL);
    assert_int_equal(kvt_io_race(&race, -1, false, 4 << 20, 1), -EBADF);
    close(dir);
}

/* Where reads tie, writes decide; where those tie too, the first one wins. */
static void test_race_of_writes(void **state)
{
    static const struct {
        useconds_t read[2], write[2];
        unsigned winner;
        bool compared;
    } cases[] = {{{40000, 40000}, {0, 30000}, 0, true},
                 {{40000, 40000}, {30000, 0}, 1, true},
                 {{40000, 0}, {0, 30000}, 1, false}, /* reads come first */
                 {{0, 40000}, {30000, 0}, 0, false}};
    int dir = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(cases); i++) {
        struct slow_engine a = {.engine = {&slow_ops, -1}}, b = a;
        struct kvt_io_race race = {.engines = {&a.engine, &b.engine}};
        int tries = 0;

        a.pause = cases[i].read[0];
        b.pause = cases[i].read[1];
        a.write_pause = cases[i].write[0];
        b.write_pause = cases[i].write[1];
        do /* on a busy machine a tie may not look like one */
            assert_int_equal(kvt_io_race(&race, dir, false, 1 << 20, 10000000000ll), 0);
        while (cases[i].compared && !race.write_ns[0] && ++tries < 20);
        assert_int_equal(race.write_ns[0] != 0, cases[i].compared);
        assert_int_equal(kvt_io_race_winner(&race), cases[i].winner);
    }
    close(dir);
    for (int tie = 0; tie < 2; tie++) {
        struct kvt_io_race race = {.best_ns = {100, 101}, .write_ns = {tie ? 102 : 0, 100}};

        assert_int_equal(kvt_io_race_winner(&race), 0);
    }
}

static int open_root(const char *path, int backend, uint64_t cap, struct kvt_io **io,
                     struct kvt_io_info *info)
{
    struct kvt_io_posix_params params = {
        .path = path, .threads = 2, .direct = -1, .backend = backend, .cap_bytes = cap};
    int rc = kvt_io_files_new(&params, io);

    if (!rc)
        (*io)->ops->info(*io, info);
    return rc;
}

static void test_auto_says_why(void **state)
{
    char dir[] = "uring-dir-XXXXXX", why[160];
    struct kvt_io_info info;
    struct kvt_io *io;

    (void)state;
    assert_non_null(mkdtemp(dir));
    assert_int_equal(open_root(dir, KVT_IO_AUTO, 1 << 20, &io, &info), 0);
    assert_string_equal(info.backend, "posix");
    if (!kvt_io_uring_probe(why, sizeof why) && info.direct)
        assert_non_null(strstr(info.backend_why, "too small"));
    io->ops->destroy(io);
    assert_int_equal(open_root(dir, KVT_IO_AUTO, 1ull << 40, &io, &info), 0);
    print_message("             %s: %s\n", info.backend, info.backend_why);
    if (!kvt_io_uring_probe(why, sizeof why) && info.direct)
        assert_true(strstr(info.backend_why, "measured") || strstr(info.backend_why, "too"));
    io->ops->destroy(io);
    assert_int_equal(rmdir(dir), 0); /* the race left nothing */
}

/* ---- C41 ---- */

/* In a child: its verdict is the exit code. */
static int without_ring(const char *dir, int error)
{
    static _Alignas(4096) uint8_t out[16 * 4096], in[16 * 4096];
    struct kvt_io_info info;
    struct kvt_io *io = NULL;
    char why[160];
    int file;

    if (no_ring(error))
        return SKIPPED;
    if (kvt_io_uring_probe(why, sizeof why) == 0)
        return 1;
    if (open_root(dir, KVT_IO_AUTO, 1ull << 40, &io, &info))
        return 2;
    if (strcmp(info.backend, "posix") != 0)
        return 3;
    if (!strstr(info.backend_why, strerrordesc_np(error)) && !strstr(info.backend_why, "liburing"))
        return 4;
    memset(out, 0x5b, sizeof out);
    file = io->ops->open(io, "f", KVT_IO_OPEN_CREATE);
    if (kvt_io_write_now(io, file, 0, out, sizeof out) != (int64_t)sizeof out ||
        kvt_io_read_now(io, file, 0, in, sizeof in) != (int64_t)sizeof in ||
        memcmp(in, out, sizeof in) != 0)
        return 5;
    io->ops->close(io, file);
    if (io->ops->unlink(io, "f"))
        return 6;
    io->ops->destroy(io);
    if (open_root(dir, KVT_IO_URING, 1ull << 40, &io, &info) != KVT_E_UNSUPPORTED) /* forced */
        return 7;
    return 0;
}

/* EPERM as by a container's profile; then the other refusals, by the same filter. */
static void test_c41_no_ring_to_be_had(void **state)
{
    static const int errors[] = {EPERM, ENOMEM, ENOSYS, EINVAL};
    char dir[] = "uring-dir-XXXXXX";

    (void)state;
    assert_non_null(mkdtemp(dir));
    for (size_t i = 0; i < KVT_ARRAY_LEN(errors); i++) {
        int status;
        pid_t pid;

        fflush(NULL);
        pid = fork();
        assert_true(pid >= 0);
        if (!pid)
            _exit(without_ring(dir, errors[i]));
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status));
        if (WEXITSTATUS(status) == SKIPPED) {
            print_message("[   SKIP   ] no seccomp filter can be installed here\n");
            skip();
        }
        assert_int_equal(WEXITSTATUS(status), 0);
    }
    assert_int_equal(rmdir(dir), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_c7_interrupted_and_short),
        cmocka_unit_test(test_c7_errors_come_through),
        cmocka_unit_test(test_stalls_end),
        cmocka_unit_test(test_random_scripts),
        cmocka_unit_test(test_sync),
        cmocka_unit_test(test_end_of_file),
        cmocka_unit_test(test_reads_pass_writes),
        cmocka_unit_test(test_event_fd),
        cmocka_unit_test(test_flight_bound),
        cmocka_unit_test(test_stop_runs_the_queue),
        cmocka_unit_test(test_the_submitting_thread_ends),
        cmocka_unit_test(test_race),
        cmocka_unit_test(test_race_of_writes),
        cmocka_unit_test(test_auto_says_why),
        cmocka_unit_test(test_c41_no_ring_to_be_had),
    };

    return cmocka_run_group_tests_name("uring", tests, NULL, NULL);
}
