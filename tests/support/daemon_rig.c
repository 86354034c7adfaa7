/* See daemon_rig.h. The binary is KVT_DAEMON of the environment, else kvtierd beside the test, else
 * the one beside the test's directory: a copy of both runs anywhere.
 */
#include "support/daemon_rig.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/sock.h"
#include "format/handshake.h"
#include "format/message.h"
#include "store/counters.h"
#include "support/rig.h"

#define READY_MS 20000
#define WORDS_MAX 64

static void program_path(char *path, size_t len)
{
    char self[512];
    const char *given = getenv("KVT_DAEMON");
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);

    assert_true(n > 0);
    self[n] = '\0';
    *strrchr(self, '/') = '\0'; /* build/tests */
    snprintf(path, len, "%s/kvtierd", self);
    if (!given && access(path, X_OK) == 0)
        return;
    *strrchr(self, '/') = '\0';
    snprintf(path, len, "%s%s", given ? given : self, given ? "" : "/kvtierd");
}

void daemon_init(struct daemon *daemon, const char *options)
{
    memset(daemon, 0, sizeof(*daemon));
    rig_dir_make(daemon->dir, sizeof(daemon->dir));
    snprintf(daemon->socket, sizeof(daemon->socket), "%s/s", daemon->dir);
    snprintf(daemon->store, sizeof(daemon->store), "%s/root", daemon->dir);
    snprintf(daemon->log, sizeof(daemon->log), "%s/log", daemon->dir);
    snprintf(daemon->config, sizeof(daemon->config), "store=unix:%s", daemon->socket);
    for (size_t used = 0; *options; options++) {
        const char *piece = strncmp(options, "{store}", 7) == 0 ? daemon->store : NULL;
        used += (size_t)snprintf(daemon->options + used, sizeof(daemon->options) - used,
                                 piece ? "%s" : "%.1s", piece ? piece : options);
        assert_true(used < sizeof(daemon->options));
        options += piece ? 6 : 0;
    }
}

/* Where the daemon's readiness message goes. */
static int notify_socket(const struct daemon *daemon, char *path, size_t len)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

    snprintf(path, len, "%s/notify", daemon->dir);
    snprintf(address.sun_path, sizeof(address.sun_path), "%.100s", path);
    (void)unlink(path);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    return fd;
}

static void child(const struct daemon *daemon, const char *notify)
{
    char program[600], options[1024], *words[WORDS_MAX + 1], *rest;
    size_t count = 0;
    int fd = open(daemon->log, O_WRONLY | O_CREAT | O_APPEND, 0600);

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)dup2(fd, 1);
    (void)dup2(daemon->log_fd > 0 ? daemon->log_fd : fd, 2);
    (void)setenv("NOTIFY_SOCKET", notify, 1);
    if (daemon->fsize)
        (void)setrlimit(RLIMIT_FSIZE, &(struct rlimit){daemon->fsize, daemon->fsize});
    if (daemon->files)
        (void)setrlimit(RLIMIT_NOFILE, &(struct rlimit){daemon->files, daemon->files});
    program_path(program, sizeof(program));
    words[count++] = (char *)(uintptr_t) "kvtierd";
    words[count++] = (char *)(uintptr_t) "--socket";
    words[count++] = (char *)(uintptr_t)daemon->socket;
    snprintf(options, sizeof(options), "%s", daemon->options);
    for (char *word = strtok_r(options, " ", &rest); word && count < WORDS_MAX;
         word = strtok_r(NULL, " ", &rest))
        words[count++] = word;
    words[count] = NULL;
    if (daemon->passed_fd > 0) {
        char pid[16];

        snprintf(pid, sizeof(pid), "%d", (int)getpid());
        (void)setenv("LISTEN_PID", pid, 1);
        (void)setenv("LISTEN_FDS", "1", 1);
        (void)dup2(daemon->passed_fd, 3);
        (void)fcntl(3, F_SETFD, 0); /* where it was 3 already, it is closed on exec still */
    }
    execv(program, words);
    _exit(127);
}

static int wait_for(pid_t pid)
{
    int status = 0;

    while (waitpid(pid, &status, 0) < 0)
        assert_int_equal(errno, EINTR);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int daemon_try(struct daemon *daemon)
{
    char notify[160], text[512];
    int fd = notify_socket(daemon, notify, sizeof(notify));
    struct pollfd ready = {.fd = fd, .events = POLLIN};

    assert_int_equal(daemon->pid, 0);
    daemon->pid = fork();
    assert_true(daemon->pid >= 0);
    if (daemon->pid == 0)
        child(daemon, notify);
    for (int ms = 0; ms < READY_MS; ms += 10) {
        int status;

        if (poll(&ready, 1, 10) == 1) {
            ssize_t n = recv(fd, text, sizeof(text) - 1, 0);

            assert_true(n > 0);
            text[n] = '\0';
            if (strstr(text, "READY=1") != NULL) {
                close(fd);
                return -1;
            }
        }
        if (waitpid(daemon->pid, &status, WNOHANG) == daemon->pid) {
            daemon->pid = 0;
            close(fd);
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        }
    }
    close(fd);
    fail_msg("kvtierd is not ready after %d s", READY_MS / 1000);
    return 0;
}

static void show_log(const struct daemon *daemon)
{
    char text[4096];
    int fd = open(daemon->log, O_RDONLY);
    ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof(text) - 1);

    if (n > 0)
        fprintf(stderr, "--- %s\n%.*s---\n", daemon->log, (int)n, text);
    if (fd >= 0)
        close(fd);
}

void daemon_start(struct daemon *daemon)
{
    int code = daemon_try(daemon);

    if (code >= 0)
        show_log(daemon);
    assert_int_equal(code, -1);
}

int daemon_stop(struct daemon *daemon)
{
    pid_t pid = daemon->pid;

    assert_true(pid > 0);
    daemon->pid = 0;
    assert_int_equal(kill(pid, SIGTERM), 0);
    int code = wait_for(pid);
    if (code != 0)
        show_log(daemon);
    return code;
}

void daemon_kill(struct daemon *daemon)
{
    assert_true(daemon->pid > 0);
    assert_int_equal(kill(daemon->pid, SIGKILL), 0);
    (void)wait_for(daemon->pid);
    daemon->pid = 0;
}

void daemon_freeze(struct daemon *daemon)
{
    int status;

    assert_int_equal(kill(daemon->pid, SIGSTOP), 0);
    assert_int_equal(waitpid(daemon->pid, &status, WUNTRACED), daemon->pid);
    assert_true(WIFSTOPPED(status));
}

void daemon_free(struct daemon *daemon)
{
    if (daemon->pid > 0) {
        (void)kill(daemon->pid, SIGCONT);
        daemon_kill(daemon);
    }
    if (daemon->store[0])
        rig_dir_remove(daemon->store);
    if (daemon->dir[0])
        rig_dir_remove(daemon->dir);
    memset(daemon, 0, sizeof(*daemon));
}

/* The whole text of "stat"; the caller frees it. NULL: no answer. */
static char *stat_text(const struct daemon *daemon)
{
    struct kvt_hello hello = {.magic = KVT_HANDSHAKE_MAGIC,
                              .bytes = sizeof(hello),
                              .handshake = KVT_HANDSHAKE_VERSION,
                              .proto = KVT_PROTO_VERSION,
                              .record = KVT_RECORD_VERSION,
                              .stats = KVT_STORE_STAT_COUNT,
                              .kind = KVT_HELLO_CONTROL};
    struct kvt_welcome welcome;
    char *text = calloc(1, 1 << 20);
    size_t used = 0;
    int fd, n;

    assert_non_null(text);
    if (kvt_sock_connect(daemon->socket, 5000, &fd) != 0) {
        free(text);
        return NULL;
    }
    if (kvt_sock_send(fd, &hello, sizeof(hello), NULL, 0) == 0 &&
        kvt_sock_recv(fd, &welcome, sizeof(welcome), NULL, 0, NULL) == (int)sizeof(welcome) &&
        kvt_sock_send(fd, "stat", 4, NULL, 0) == 0)
        while ((n = kvt_sock_recv(fd, text + used, (1 << 20) - 1 - used, NULL, 0, NULL)) > 0)
            used += (size_t)n;
    close(fd);
    return text;
}

void daemon_stat_text(const struct daemon *daemon, const char *name, char *out, size_t len)
{
    char *text = stat_text(daemon), *at = text;
    size_t name_len = strlen(name);

    out[0] = '\0';
    while (at != NULL && *at) {
        size_t n = strcspn(at, "\n");

        if (n > name_len && strncmp(at, name, name_len) == 0 && at[name_len] == ' ') {
            snprintf(out, len, "%.*s", (int)(n - name_len - 1), at + name_len + 1);
            break;
        }
        at += n + (at[n] == '\n');
    }
    free(text);
}

uint64_t daemon_stat(const struct daemon *daemon, const char *name)
{
    char text[64];

    daemon_stat_text(daemon, name, text, sizeof(text));
    return text[0] ? strtoull(text, NULL, 10) : UINT64_MAX;
}

void daemon_wait_stat(const struct daemon *daemon, const char *name, uint64_t value, unsigned ms)
{
    const int64_t end = rig_now_ns() + ms * INT64_C(1000000);
    uint64_t now;

    while ((now = daemon_stat(daemon, name)) != value) {
        if (rig_now_ns() > end) {
            show_log(daemon);
            fail_msg("%s is %llu, not %llu, after %u ms", name, (unsigned long long)now,
                     (unsigned long long)value, ms);
        }
        rig_sleep_ms(5);
    }
}

bool daemon_said(const struct daemon *daemon, const char *what)
{
    FILE *file = fopen(daemon->log, "re");
    char line[1024];
    bool found = false;

    while (file != NULL && !found && fgets(line, sizeof(line), file) != NULL)
        found = strstr(line, what) != NULL;
    if (file != NULL)
        (void)fclose(file);
    return found;
}

int daemon_scraper(const struct daemon *daemon)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    char line[1024];
    FILE *log = fopen(daemon->log, "re");
    unsigned port = 0;

    assert_non_null(log);
    while (fgets(line, sizeof(line), log) != NULL)
        if (strstr(line, "metrics: port ") != NULL)
            (void)sscanf(strstr(line, "metrics: port "), "metrics: port %u", &port);
    (void)fclose(log);
    assert_true(port > 0);
    at.sin_port = htons((uint16_t)port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&at, sizeof(at)), 0);
    return fd;
}
