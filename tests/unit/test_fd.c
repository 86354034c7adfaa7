/* What the library opens is none of the program's standard descriptors.
 *
 * Goal:   a program that has closed 0, 1 and 2 finds them free after every step of a cache's life,
 *         and what it prints reaches no file, ring, socket or event of the library.
 * Method: the three are closed around each test, and looked for after each step; over each
 *         backend, a shared directory, a server, a kvtierd, and with files for traces and plans.
 * Checked to fail: without kvt_fd_high() in cache.c every test of a cache, without it in
 *         kvt_sock_recv() that of the messages, without kvt_fd_hold() in io_uring.c that of the
 * ring.
 */
#include "support/rig.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/sock.h"
#include "io/io.h"
#include "support/daemon_rig.h"
#include "support/loopback.h"

#define BLOCKS 8u

static struct rig rig;
static struct daemon server;
static int saved[KVT_FD_LEAST];
static char other_dir[128];

/* Nothing is printed from here on until restore(). */
static void close_standard(void)
{
    fflush(NULL);
    for (int fd = 0; fd < KVT_FD_LEAST; fd++) {
        saved[fd] = fcntl(fd, F_DUPFD_CLOEXEC, 100);
        assert_true(saved[fd] >= 100);
    }
    for (int fd = 0; fd < KVT_FD_LEAST; fd++)
        (void)close(fd);
}

static void restore_standard(void)
{
    for (int fd = 0; fd < KVT_FD_LEAST; fd++) {
        if (saved[fd] < 100)
            continue;
        (void)dup2(saved[fd], fd);
        (void)close(saved[fd]);
        saved[fd] = 0;
    }
}

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig); /* before: what wrongly stands there is the library's to close */
    restore_standard();
    if (server.dir[0] != '\0')
        daemon_free(&server);
    if (other_dir[0] != '\0')
        rig_dir_remove(other_dir);
    memset(&rig, 0, sizeof(rig));
    memset(&server, 0, sizeof(server));
    other_dir[0] = '\0';
    return 0;
}

/* None stays there. Threads that open a file have a low number for the moment that it takes to
 * move it up (docs/known-gaps.md): that one is over at the next look, or soon. */
static void assert_free(void)
{
    for (int fd = 0; fd < KVT_FD_LEAST; fd++) {
        int looks = 0;
        while (fcntl(fd, F_GETFD) >= 0 && looks++ < 5000)
            rig_sleep_ms(1);
        assert_true(looks < 5000);
    }
}

/* A whole life of a cache, twice. */
static void live(const char *config, const char *cap)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);

    rig_init(&rig, &shape, config, cap);
    close_standard();
    for (unsigned life = 0; life < 2; life++) {
        rig_open(&rig);
        assert_free();
        assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
        assert_free();
        assert_int_equal(kvt_flush(rig.cache), 0);
        assert_free();
        assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
        assert_free();
        rig_close(&rig);
        assert_free();
    }
    restore_standard();
}

static void roots_over_threads(void **state)
{
    (void)state;
    live("dram=4MiB,io=posix,disk_required=yes", "16MiB");
}

static void roots_over_a_ring(void **state)
{
    char why[160];

    (void)state;
    if (kvt_io_uring_probe(why, sizeof(why)) != 0) {
        print_message("           skipped: %s\n", why);
        skip();
    }
    live("dram=4MiB,io=uring,disk_required=yes", "16MiB");
}

static void a_shared_directory_traces_and_plans(void **state)
{
    char config[480];

    (void)state;
    rig_dir_make(other_dir, sizeof(other_dir));
    (void)snprintf(config, sizeof(config),
                   "dram=4MiB,remote=dir:%s,remote_write=all,remote_cap=1GiB,trace=%s/trace,"
                   "plan_file=%s/plan",
                   other_dir, other_dir, other_dir);
    live(config, "16MiB");
}

/* A server that takes connections and says nothing: what is dialled stays open. */
static void a_server(void **state)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);
    char config[200];
    int port, listener = loopback_bind(&port);

    (void)state;
    assert_int_equal(listen(listener, 16), 0);
    (void)snprintf(config, sizeof(config), "dram=4MiB,remote=redis://127.0.0.1:%d", port);
    rig_init(&rig, &shape, config, NULL);
    close_standard();
    rig_open(&rig);
    for (int i = 0; i < 20; i++) {
        assert_free();
        assert_int_equal(rig_lookup(&rig, 1, BLOCKS), 0);
        rig_sleep_ms(10);
    }
    rig_close(&rig);
    restore_standard();
    (void)close(listener);
}

static void a_kvtierd(void **state)
{
    char config[300];

    (void)state;
    daemon_init(&server, "--dram 16MiB --disk {store}:64MiB");
    daemon_start(&server);
    (void)snprintf(config, sizeof(config), "%s", server.config);
    live(config, NULL);
}

static void descriptors_of_messages(void **state)
{
    int pair[2], event = eventfd(0, EFD_CLOEXEC), got[2] = {-1, -1};
    size_t count = 0;
    char byte = 'x';

    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    close_standard();
    assert_int_equal(kvt_sock_send(pair[0], &byte, 1, (int[]){event, event}, 2), 0);
    assert_int_equal(kvt_sock_recv(pair[1], &byte, 1, got, 2, &count), 1);
    assert_free();
    assert_int_equal(count, 2);
    restore_standard();
    for (int i = 0; i < 2; i++) {
        assert_true(got[i] >= KVT_FD_LEAST && (fcntl(got[i], F_GETFD) & FD_CLOEXEC));
        (void)close(got[i]);
        (void)close(pair[i]);
    }
    (void)close(event);
}

static void a_high_number_stays_and_an_error_keeps_its_reason(void **state)
{
    int fd = eventfd(0, EFD_CLOEXEC), held[KVT_FD_LEAST];

    (void)state;
    assert_int_equal(kvt_fd_high(fd), fd);
    (void)close(fd);
    errno = ENOTDIR;
    assert_int_equal(kvt_fd_high(-1), -1);
    assert_int_equal(errno, ENOTDIR);
    close_standard();
    kvt_fd_hold(held);
    fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    kvt_fd_release(held);
    assert_free();
    assert_true(fd >= KVT_FD_LEAST);
    restore_standard();
    (void)close(fd);
    kvt_fd_hold(held); /* nothing is free */
    for (int i = 0; i < KVT_FD_LEAST; i++)
        assert_int_equal(held[i], -1);
    kvt_fd_release(held);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_high_number_stays_and_an_error_keeps_its_reason, tear_down),
        cmocka_unit_test_teardown(descriptors_of_messages, tear_down),
        cmocka_unit_test_teardown(roots_over_threads, tear_down),
        cmocka_unit_test_teardown(roots_over_a_ring, tear_down),
        cmocka_unit_test_teardown(a_shared_directory_traces_and_plans, tear_down),
        cmocka_unit_test_teardown(a_server, tear_down),
        cmocka_unit_test_teardown(a_kvtierd, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
