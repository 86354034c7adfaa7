/* Lines of a kvtierd's log, and nobody waits for who reads them.
 *
 * Goal:   a descriptor that takes nothing loses lines, counts them and says so later; the open file
 *         of whoever made it stays as it was; a line is taken whole, or not at all.
 * Method: pipes of one page, sockets and files; a write that waited would be the test's time-out.
 *         Each way of writing is tried, also that of a pipe which cannot be opened anew.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/log_out.h"

enum { LINES = 4000, THREADS = 4 };

static char text[1 << 20];

/* What can be read now, ended. */
static size_t drain(int fd)
{
    size_t used = 0;
    int flags = fcntl(fd, F_GETFL);

    assert_int_equal(fcntl(fd, F_SETFL, flags | O_NONBLOCK), 0);
    for (ssize_t n; (n = read(fd, text + used, sizeof(text) - 1 - used)) > 0;)
        used += (size_t)n;
    assert_int_equal(fcntl(fd, F_SETFL, flags), 0);
    text[used] = '\0';
    return used;
}

static unsigned lines_in(const char *what)
{
    unsigned count = 0;

    for (const char *at = text; (at = strstr(at, what)) != NULL; at++)
        count++;
    return count;
}

static unsigned lost_said(void)
{
    const char *at = strstr(text, " lines of this log were lost");
    unsigned count = 0;

    if (at == NULL)
        return 0;
    while (at > text && at[-1] >= '0' && at[-1] <= '9')
        at--;
    (void)sscanf(at, "%u", &count);
    return count;
}

/* Fill it, read it, and write on: every line is there or counted, and the count is said. */
static void lose_and_say(struct kvt_log_out *out, int reader)
{
    char message[100];

    for (int i = 0; i < LINES; i++) {
        snprintf(message, sizeof(message), "line %d of many, and some words more", i);
        kvt_log_out_line(out, KVT_LOG_INFO, message);
    }
    const uint64_t lost = atomic_load(&out->lost);
    assert_true(lost > 0 && lost < LINES);
    drain(reader);
    assert_int_equal(lines_in(" of many, and some words more\n"), LINES - lost);
    assert_int_equal(lost_said(), 0);
    kvt_log_out_line(out, KVT_LOG_INFO, "afterwards");
    drain(reader);
    assert_int_equal(lost_said(), lost);
    assert_true(strstr(text, "lines of this log were lost") < strstr(text, "afterwards\n"));
    kvt_log_out_line(out, KVT_LOG_INFO, "the next one");
    drain(reader);
    assert_int_equal(lost_said(), 0); /* once */
    assert_non_null(strstr(text, "the next one\n"));
    assert_int_equal(atomic_load(&out->lost), lost);
}

static void a_full_pipe_loses_lines_and_says_so(void **state)
{
    struct kvt_log_out out;
    int fds[2];

    (void)state;
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    kvt_log_out_init(&out, fds[1]);
    assert_int_equal(out.way, KVT_LOG_REOPEN);
    assert_int_equal(fcntl(fds[1], F_GETFL) & O_NONBLOCK, 0); /* of others, too */
    lose_and_say(&out, fds[0]);
    assert_int_equal(fcntl(fds[1], F_GETFL) & O_NONBLOCK, 0);
    kvt_log_out_free(&out);
    close(fds[0]);
    close(fds[1]);
}

/* Where /proc is not there, or the pipe is another user's. */
static void a_pipe_that_cannot_be_opened_anew_is_asked_first(void **state)
{
    struct kvt_log_out out;
    int fds[2];

    (void)state;
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    kvt_log_out_init(&out, fds[1]);
    close(out.own);
    out.own = -1;
    out.way = KVT_LOG_POLLED;
    lose_and_say(&out, fds[0]);
    kvt_log_out_free(&out);
    close(fds[0]);
    close(fds[1]);
}

static void a_full_socket_loses_lines_and_says_so(void **state)
{
    struct kvt_log_out out;
    int fds[2];

    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    kvt_log_out_init(&out, fds[1]);
    assert_int_equal(out.way, KVT_LOG_SOCKET);
    lose_and_say(&out, fds[0]);
    kvt_log_out_free(&out);
    close(fds[0]);
    close(fds[1]);
}

/* Nobody is there to read at all: no signal, and everything is counted. */
static void who_reads_may_go(void **state)
{
    struct kvt_log_out out;
    int fds[2];

    (void)state;
    (void)signal(SIGPIPE, SIG_IGN); /* as kvtierd blocks it */
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    kvt_log_out_init(&out, fds[1]);
    close(fds[0]);
    kvt_log_out_line(&out, KVT_LOG_ERROR, "to nobody");
    assert_int_equal(atomic_load(&out.lost), 1);
    kvt_log_out_free(&out);
    kvt_log_out_init(&out, fds[1]); /* from the start */
    kvt_log_out_line(&out, KVT_LOG_ERROR, "to nobody");
    assert_int_equal(atomic_load(&out.lost), 1);
    kvt_log_out_free(&out);
    close(fds[1]);
    kvt_log_out_init(&out, fds[1]); /* it is not even open */
    kvt_log_out_line(&out, KVT_LOG_ERROR, "to nobody");
    assert_int_equal(atomic_load(&out.lost), 1);
    kvt_log_out_free(&out);
}

/* A line is cut where a pipe would no longer take it whole; a file gets what it is given. */
static void lines_are_what_was_asked_for(void **state)
{
    struct kvt_log_out out;
    static char longer[3 * PIPE_BUF];
    char name[] = "/tmp/kvt-log-XXXXXX";
    int fd = mkstemp(name);

    (void)state;
    assert_true(fd >= 0);
    unlink(name);
    memset(longer, 'x', sizeof(longer) - 1);
    kvt_log_out_init(&out, fd);
    assert_int_equal(out.way, KVT_LOG_PLAIN);
    kvt_log_out_line(&out, KVT_LOG_DEBUG, "too much detail");
    atomic_store(&out.level, KVT_LOG_DEBUG);
    kvt_log_out_line(&out, KVT_LOG_DEBUG, "detail");
    kvt_log_out_line(&out, KVT_LOG_WARN, longer);
    kvt_log_out_text(&out, "kvtierd: as it is");
    assert_int_equal(lseek(fd, 0, SEEK_SET), 0);
    const size_t used = drain(fd);
    assert_null(strstr(text, "too much"));
    assert_non_null(strstr(text, " debug: detail\n"));
    assert_non_null(strstr(text, " warning: xxx"));
    assert_non_null(strstr(text, "xx\nkvtierd: as it is\n"));
    assert_in_range(used, PIPE_BUF, PIPE_BUF + 200);
    assert_int_equal(atomic_load(&out.lost), 0);
    kvt_log_out_free(&out);
    close(fd);
}

/* The variable names a stream: it may be that of who started us, and ours be another. */
static void journald_gets_priorities_and_others_times(void **state)
{
    struct kvt_log_out out;
    struct stat st;
    char stream[64];
    int fds[2];

    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    assert_int_equal(fstat(fds[1], &st), 0);
    snprintf(stream, sizeof(stream), "%llu:%llu", (unsigned long long)st.st_dev,
             (unsigned long long)st.st_ino);
    assert_int_equal(setenv("JOURNAL_STREAM", stream, 1), 0);
    kvt_log_out_init(&out, fds[1]);
    kvt_log_out_line(&out, KVT_LOG_ERROR, "bad");
    kvt_log_out_line(&out, KVT_LOG_INFO, "good");
    drain(fds[0]);
    assert_string_equal(text, "<3>bad\n<6>good\n");
    kvt_log_out_free(&out);
    assert_int_equal(setenv("JOURNAL_STREAM", "1:2", 1), 0);
    kvt_log_out_init(&out, fds[1]);
    kvt_log_out_line(&out, KVT_LOG_ERROR, "bad");
    drain(fds[0]);
    assert_non_null(strstr(text, " error: bad\n"));
    assert_int_equal(text[0], '2');
    kvt_log_out_free(&out);
    assert_int_equal(unsetenv("JOURNAL_STREAM"), 0);
    close(fds[0]);
    close(fds[1]);
}

/* What a terminal or a stream took in part is ended before anything else is written. */
static void a_torn_line_does_not_spoil_the_next(void **state)
{
    struct kvt_log_out out;
    int fds[2];

    (void)state;
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    kvt_log_out_init(&out, fds[1]);
    out.torn = true;
    kvt_log_out_text(&out, "whole");
    drain(fds[0]);
    assert_string_equal(text, "\nwhole\n");
    kvt_log_out_free(&out);
    close(fds[0]);
    close(fds[1]);
}

static void *write_many(void *arg)
{
    for (int i = 0; i < LINES / THREADS; i++)
        kvt_log_out_line(arg, KVT_LOG_INFO, "one of several writers, all of them at once");
    return NULL;
}

/* Lines of threads do not mix, and each is there or counted. */
static void threads_write_whole_lines(void **state)
{
    struct kvt_log_out out;
    pthread_t threads[THREADS];
    int fds[2];

    (void)state;
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    kvt_log_out_init(&out, fds[1]);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, write_many, &out), 0);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    drain(fds[0]);
    assert_int_equal(lines_in(" info: one of several writers, all of them at once\n") +
                         atomic_load(&out.lost),
                     LINES);
    kvt_log_out_free(&out);
    close(fds[0]);
    close(fds[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_full_pipe_loses_lines_and_says_so),
        cmocka_unit_test(a_pipe_that_cannot_be_opened_anew_is_asked_first),
        cmocka_unit_test(a_full_socket_loses_lines_and_says_so),
        cmocka_unit_test(who_reads_may_go),
        cmocka_unit_test(lines_are_what_was_asked_for),
        cmocka_unit_test(journald_gets_priorities_and_others_times),
        cmocka_unit_test(a_torn_line_does_not_spoil_the_next),
        cmocka_unit_test(threads_write_whole_lines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
