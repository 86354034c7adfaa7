/* kvtierd: one store for many processes. Its DRAM stays warm when they restart.
 *
 * The main thread serves the socket; the owner thread of the store and the I/O threads do the rest;
 * one thread waits for signals:
 *   SIGTERM, SIGINT   clients are told, what is queued is written, files close, exit 0
 *   SIGHUP            the configuration is read again; what can change changes, the rest is named
 * Messages go to standard error, one line each, as systemd wants them. Exit codes: 0 ok, 1 it could
 * not start or work, 2 wrong usage.
 */
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/clock.h"
#include "client/options.h"
#include "client/pin.h"
#include "daemon/conf.h"
#include "daemon/log_out.h"
#include "daemon/metrics.h"
#include "daemon/notify.h"
#include "daemon/report.h"
#include "daemon/server.h"
#include "daemon/standard.h"
#include "kvtier/error.h"
#include "kvtier/version.h"
#include "kvtierd_check.h"
#include "kvtierd_help.h"
#include "kvtierd_reload.h"

enum { EXIT_GOOD = 0, EXIT_PROBLEM = 1, EXIT_USAGE = 2 };

static struct kvt_log_out out; /* standard error */
static const struct kvt_log to_stderr = {kvt_log_out_line, &out, KVT_LOG_DEBUG};

__attribute__((format(printf, 1, 2))) static void complain(const char *format, ...)
{
    char text[1024] = "kvtierd: ";
    const size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text + used, sizeof(text) - used, format, args);
    va_end(args);
    kvt_log_out_text(&out, text);
}

/* A start that failed for want of something, and nobody has said of what. */
static void complain_code(int rc)
{
    struct rlimit limit = {0};
    if (rc == -EMFILE || rc == -ENFILE) {
        (void)getrlimit(RLIMIT_NOFILE, &limit);
        complain("no descriptors are left (the limit is %llu): raise it (LimitNOFILE= of the unit, "
                 "ulimit -Hn), or give it fewer disk roots",
                 (unsigned long long)limit.rlim_cur);
    } else if (rc == -ENOMEM) {
        complain("out of memory: lower dram, or raise what limits this process (ulimit -v, the "
                 "control group)");
    } else {
        complain("it could not start: %s", kvt_strerror(rc));
    }
}

/* ---- command line -------------------------------------------------------------------------- */

/* "--key value", "--key=value", "--some-key": the key, and its value; NULL: there is none. Returns
 * the words taken; 0: it is no option, which was said. */
static int option_split(const struct kvt_daemon_args *args, int at, char *key, size_t len,
                        const char **value)
{
    const char *word = args->argv[at];
    const char *equals = strchr(word, '=');
    size_t n = equals ? (size_t)(equals - word) : strlen(word);
    if (strncmp(word, "--", 2) != 0 || n - 2 >= len) {
        complain("'%s' is no option; see 'kvtierd --help'", word);
        return 0;
    }
    (void)snprintf(key, len, "%.*s", (int)(n - 2), word + 2);
    for (char *c = key; *c; c++)
        *c = (char)(*c == '-' ? '_' : *c);
    *value = equals ? equals + 1 : at + 1 < args->argc ? args->argv[at + 1] : NULL;
    return equals ? 1 : 2;
}

static int option_set(struct kvt_conf *conf, const char *key, const char *value, const char *word)
{
    const bool config = strcmp(key, "config") == 0;
    int rc = config ? 0 : kvt_conf_known(conf, key);
    if (rc != 0)
        return rc;
    if (value == NULL) {
        complain("%s needs a value", word);
        return EXIT_USAGE;
    }
    return config ? 0 : kvt_conf_set(conf, key, value);
}

/* Words that are no key of the configuration, and take no value. */
static bool is_flag(const char *word)
{
    return word != NULL && (strcmp(word, "--check") == 0 || strcmp(word, "--offline") == 0);
}

int kvt_daemon_conf(const struct kvt_daemon_args *args, struct kvt_conf *conf, char *why,
                    size_t len)
{
    int rc = args->config ? kvt_conf_read(conf, args->config) : 0;
    unsigned remotes = 0;
    for (int i = 1, used = 1; rc == 0 && i < args->argc; i += used) {
        const char *value = NULL;
        char key[64];
        used = 1;
        if (is_flag(args->argv[i]))
            continue;
        used = option_split(args, i, key, sizeof(key), &value);
        if (used == 0)
            return EXIT_USAGE;
        if (strcmp(key, "remote") == 0 && remotes++ > 0) {
            (void)snprintf(why, len,
                           "--remote is given twice: there is one shared tier; several "
                           "servers of a cluster are joined by \"+\"");
            return KVT_E_CONFIG_VALUE;
        }
        rc = option_set(conf, key, value, args->argv[i]);
    }
    if (rc == EXIT_USAGE)
        return rc;
    if (rc == 0)
        rc = kvt_settings_resolve(conf->options);
    if (rc != 0)
        (void)snprintf(why, len, "%s",
                       conf->error[0] ? conf->error : kvt_config_error(conf->options));
    return rc;
}

/* What is about us and not about the store. Returns -1 to go on, or an exit code. */
static int arguments_read(struct kvt_daemon_args *args, const struct kvt_conf *conf)
{
    for (int i = 1; i < args->argc; i++) {
        const char *word = args->argv[i];
        if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
            kvt_daemon_usage(conf);
            return EXIT_GOOD;
        }
        if (strcmp(word, "--man") == 0) {
            kvt_daemon_man(conf);
            return EXIT_GOOD;
        }
        if (strcmp(word, "--version") == 0) {
            printf("kvtierd %s\n", kvt_build_info());
            return EXIT_GOOD;
        }
        if (strcmp(word, "--check") == 0)
            args->check = 1;
        else if (strcmp(word, "--offline") == 0)
            args->offline = 1;
        else if (strncmp(word, "--config=", 9) == 0)
            args->config = word + 9;
        else if (strcmp(word, "--config") == 0 && i + 1 < args->argc)
            args->config = args->argv[++i];
        else if (strncmp(word, "--", 2) == 0 && strchr(word, '=') == NULL)
            i++; /* its value is no option */
    }
    return -1;
}

/* ---- the daemon ---------------------------------------------------------------------------- */

/* Permissions of the socket that do not fit who may connect. passed: the socket is not made by us.
 */
static void warn_mode(const struct kvt_conf *conf, bool passed)
{
    const char *key = passed ? "SocketMode= of the socket's unit" : "socket_mode";
    struct stat st;
    mode_t mode = conf->socket_mode;
    if (passed && stat(conf->socket, &st) == 0)
        mode = st.st_mode & 0777;
    if (passed && kvt_conf_given(conf, "socket_mode") && mode != conf->socket_mode)
        kvt_log(&to_stderr, KVT_LOG_WARN,
                "socket_mode has no effect on a socket that was passed to us: %s is %04o", key,
                (unsigned)mode);
    if (conf->uid_count > 0 && (mode & 0066) != 0066 && (mode & 0060) != 0060)
        kvt_log(&to_stderr, KVT_LOG_WARN,
                "allow_uid names other users, but %s %04o keeps them from the socket: set it to "
                "0666 (users are still checked), or 0660 and a group",
                key, (unsigned)mode);
    if (conf->uid_count == 0 && (mode & 0022) != 0)
        kvt_log(&to_stderr, KVT_LOG_WARN,
                "%s %04o lets others reach the socket, but allow_uid names nobody: only this user "
                "and root are served",
                key, (unsigned)mode);
}

/* Serve until a signal ends it. */
static int serve(const struct kvt_daemon_args *args, struct kvt_conf *conf, struct kvt_host *host,
                 int listen_fd)
{
    static struct kvt_report report;
    struct kvt_metrics metrics = {.listen_fd = -1, .wake_fd = -1};
    struct kvt_server_params params = {.host = host,
                                       .log = to_stderr,
                                       .path = conf->socket, /* also of a passed one */
                                       .listen_fd = listen_fd,
                                       .mode = conf->socket_mode,
                                       .answer = kvt_report_answer,
                                       .later = kvt_report_later,
                                       .answer_ctx = &report};
    struct kvt_server *server = NULL;
    char error[512] = "", size[32];
    uint64_t programs;
    pthread_t thread;
    int rc = kvt_server_new(&params, &server, error, sizeof(error));
    if (rc == 0)
        rc = kvt_report_open(&report, host, server);
    if (rc != 0) {
        if (error[0] != '\0')
            complain("%s", error);
        else
            complain_code(rc);
        kvt_server_free(server);
        return EXIT_PROBLEM;
    }
    report.out = &out;
    kvt_server_allow(server, conf->uids, conf->uid_count);
    struct kvt_daemon_signals signals = {
        .args = args, .server = server, .conf = conf, .out = &out, .log = to_stderr};
    if (pthread_create(&thread, NULL, kvt_daemon_signals, &signals) != 0) {
        complain("cannot start a thread: raise the limit of processes (ulimit -u)");
        kvt_report_close(&report);
        kvt_server_free(server);
        return EXIT_PROBLEM;
    }
    kvt_log(&to_stderr, KVT_LOG_INFO, "kvtierd %s: %s of DRAM, %u of %u disk roots, at %s%s",
            kvt_version(), kvt_size_text(host->memory.arena_bytes, size, sizeof(size)),
            (unsigned)host->roots_used, (unsigned)host->settings->disk_count, conf->socket,
            listen_fd >= 0 ? " (passed to us)" : "");
    if (conf->metrics[0] != '\0' && kvt_metrics_start(&metrics, conf->metrics, conf->socket,
                                                      &to_stderr, error, sizeof(error)) != 0)
        kvt_log(&to_stderr, KVT_LOG_WARN, "%s (going on without it)", error);
    if (args->argc == 1)
        kvt_log(&to_stderr, KVT_LOG_INFO,
                "started without options ('kvtierd --help' lists them); programs use it by "
                "KVTIER_CONFIG=unix:%s",
                conf->socket);
    if (!kvt_daemon_descriptors(host->settings, &programs, error, sizeof(error)))
        kvt_log(&to_stderr, KVT_LOG_WARN, "%s", error);
    kvt_notify("READY=1\nSTATUS=serving");
    kvt_server_run(server);
    kvt_metrics_stop(&metrics);
    atomic_store(&signals.over, 1);
    pthread_kill(thread, SIGUSR2);
    pthread_join(thread, NULL);
    kvt_report_close(&report);
    kvt_server_free(server);
    return EXIT_GOOD;
}

/* pin=required: DRAM in physical memory, or no daemon. */
static int pin_memory(struct kvt_host *host, struct kvt_pin *pin)
{
    char why[400];
    kvt_pin_init(pin, host->memory.arena, host->memory.arena_bytes, (uint64_t)sysconf(_SC_PAGESIZE),
                 &host->log);
    if (host->settings->pin != KVT_PIN_SET_REQUIRED)
        return 0;
    int rc = kvt_pin_now(pin, kvt_pin_host_ops());
    if (rc != 0) {
        kvt_pin_describe(kvt_pin_host_ops()->name, host->memory.arena_bytes, rc, why, sizeof(why));
        complain("pin=required: %s; or set pin=auto", why);
    }
    return rc;
}

static int run(const struct kvt_daemon_args *args, struct kvt_conf *conf)
{
    struct kvt_host host = {.settings = &conf->options->settings,
                            .log = to_stderr,
                            .clock = kvt_clock_system(),
                            .shared = true};
    struct kvt_pin pin = {.running = false}; /* stopped also where memory was refused */
    char error[512] = "";
    int code = EXIT_PROBLEM, listen_fd = kvt_passed_socket();
    if (listen_fd == KVT_E_INVAL ||
        (listen_fd >= 0 && kvt_passed_path(listen_fd, conf->socket, sizeof(conf->socket)) != 0)) {
        complain("the socket that was passed to us is not one of ListenSequentialPacket=/PATH, or "
                 "not the only one");
        return EXIT_PROBLEM;
    }
    warn_mode(conf, listen_fd >= 0);
    kvt_notify_hold();
    int rc = kvt_host_init(&host, error, sizeof(error));
    if (rc == 0 && pin_memory(&host, &pin) != 0)
        rc = KVT_E_LIMIT;
    else if (rc == 0)
        rc = kvt_host_open(&host, error, sizeof(error));
    if (rc == 0 && conf->options->settings.spin != KVT_AUTO)
        kvt_owner_spin(host.owner, (int64_t)conf->options->settings.spin);
    if (rc == 0)
        code = serve(args, conf, &host, listen_fd);
    else if (error[0] != '\0')
        complain("%s", error);
    else
        complain_code(rc);
    kvt_host_close(&host);
    if (host.ready)
        kvt_pin_stop(&pin);
    kvt_host_free(&host);
    if (code == EXIT_GOOD)
        kvt_log(&to_stderr, KVT_LOG_INFO, "closed");
    return code;
}

/* Signals are the signal thread's alone; a limit on file size is an error of the write. */
static void signals_block(void)
{
    sigset_t set;
    sigfillset(&set);
    sigdelset(&set, SIGSEGV);
    sigdelset(&set, SIGBUS);
    sigdelset(&set, SIGFPE);
    sigdelset(&set, SIGILL);
    sigdelset(&set, SIGABRT);
    sigprocmask(SIG_SETMASK, &set, NULL);
}

static void check_tell(bool problem, const char *sentence)
{
    if (problem)
        complain("%s", sentence);
    else
        printf("note: %s\n", sentence);
}

static int check(const struct kvt_conf *conf, bool offline)
{
    const unsigned problems = kvt_daemon_check(conf, &to_stderr, offline, check_tell);
    warn_mode(conf, false);
    if (problems == 0)
        printf("the configuration is good\n");
    else
        complain("every key is good, and %u %s would not work here and now, as this user", problems,
                 problems == 1 ? "thing" : "things");
    return problems == 0 ? EXIT_GOOD : EXIT_PROBLEM;
}

static int start(const struct kvt_daemon_args *args, struct kvt_conf *conf)
{
    char why[512] = "";
    if (kvt_daemon_conf(args, conf, why, sizeof(why)) != 0) {
        if (why[0] != '\0')
            complain("%s", why);
        return EXIT_USAGE;
    }
    if (args->offline && !args->check) {
        complain("--offline is for --check");
        return EXIT_USAGE;
    }
    if (args->check)
        return check(conf, args->offline);
    atomic_store(&out.level, conf->log_level);
    signals_block();
    return run(args, conf);
}

/* As many descriptors as we may have: five for each program, and the roots'. */
static void descriptors_raise(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max)
        return;
    limit.rlim_cur = limit.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &limit);
}

int main(int argc, char **argv)
{
    struct kvt_daemon_args args = {.argc = argc, .argv = argv};
    struct kvt_conf conf;
    (void)umask(0077);
    if (!kvt_standard_hold())
        return EXIT_PROBLEM;
    descriptors_raise();
    kvt_log_out_init(&out, STDERR_FILENO);
    if (kvt_conf_new(&conf) != 0) {
        complain("out of memory");
        return EXIT_PROBLEM;
    }
    int code = arguments_read(&args, &conf);
    if (code < 0)
        code = start(&args, &conf);
    kvt_conf_free(&conf);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        complain("cannot write to standard output: %s", kvt_strerror(-errno));
        return code != 0 ? code : EXIT_PROBLEM;
    }
    return code;
}
