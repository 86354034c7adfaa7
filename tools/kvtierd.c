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
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/clock.h"
#include "client/pin.h"
#include "daemon/conf.h"
#include "daemon/metrics.h"
#include "daemon/notify.h"
#include "daemon/report.h"
#include "daemon/server.h"
#include "kvtier/error.h"
#include "kvtier/version.h"
#include "kvtierd_help.h"

enum { EXIT_GOOD = 0, EXIT_PROBLEM = 1, EXIT_USAGE = 2 };

static _Atomic int log_level = KVT_LOG_INFO;

static void log_line(void *arg, int level, const char *message)
{
    static const char *const names[] = {"error", "warning", "info", "debug"};
    static const int priorities[] = {3, 4, 6, 7}; /* of syslog, for journald */
    struct timespec now;
    struct tm tm;
    char at[32] = "";
    (void)arg;
    if (level > atomic_load_explicit(&log_level, memory_order_relaxed))
        return;
    if (getenv("JOURNAL_STREAM") != NULL) {
        fprintf(stderr, "<%d>%s\n", priorities[level], message);
        return;
    }
    clock_gettime(CLOCK_REALTIME, &now);
    if (localtime_r(&now.tv_sec, &tm) != NULL)
        (void)strftime(at, sizeof(at), "%F %T", &tm);
    fprintf(stderr, "%s.%03ld %s: %s\n", at, now.tv_nsec / 1000000, names[level], message);
}

static const struct kvt_log to_stderr = {log_line, NULL, KVT_LOG_DEBUG};

__attribute__((format(printf, 1, 2))) static void complain(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("kvtierd: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
}

/* ---- command line -------------------------------------------------------------------------- */

struct arguments {
    int argc;
    char **argv;
    const char *config; /* file */
    int check;
};

/* "--key value", "--key=value", "--some-key". Fills `key`; *used: words taken. NULL: said. */
static const char *option_value(const struct arguments *args, int at, char *key, size_t len,
                                int *used)
{
    const char *word = args->argv[at];
    const char *equals = strchr(word, '=');
    size_t n = equals ? (size_t)(equals - word) : strlen(word);
    if (strncmp(word, "--", 2) != 0 || n - 2 >= len) {
        complain("'%s' is no option; see 'kvtierd --help'", word);
        return NULL;
    }
    (void)snprintf(key, len, "%.*s", (int)(n - 2), word + 2);
    for (char *c = key; *c; c++)
        *c = (char)(*c == '-' ? '_' : *c);
    *used = equals ? 1 : 2;
    if (equals)
        return equals + 1;
    if (at + 1 >= args->argc) {
        complain("%s needs a value", word);
        return NULL;
    }
    return args->argv[at + 1];
}

/* The file, then the command line over it. 0 or an exit code (said). */
static int conf_load(const struct arguments *args, struct kvt_conf *conf, char *why, size_t len)
{
    int rc = args->config ? kvt_conf_read(conf, args->config) : 0;
    unsigned remotes = 0;
    for (int i = 1, used = 1; rc == 0 && i < args->argc; i += used) {
        char key[64];
        used = 1;
        if (strcmp(args->argv[i], "--check") == 0)
            continue;
        const char *value = option_value(args, i, key, sizeof(key), &used);
        if (value == NULL)
            return EXIT_USAGE;
        if (strcmp(key, "remote") == 0 && remotes++ > 0) {
            (void)snprintf(why, len,
                           "--remote is given twice: there is one shared tier; several "
                           "servers of a cluster are joined by \"+\"");
            return KVT_E_CONFIG_VALUE;
        }
        if (strcmp(key, "config") != 0)
            rc = kvt_conf_set(conf, key, value);
    }
    if (rc == 0)
        rc = kvt_settings_resolve(conf->options);
    if (rc != 0)
        (void)snprintf(why, len, "%s",
                       conf->error[0] ? conf->error : kvt_config_error(conf->options));
    return rc;
}

/* What is about us and not about the store. Returns -1 to go on, or an exit code. */
static int arguments_read(struct arguments *args, const struct kvt_conf *conf)
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
        else if (strncmp(word, "--config=", 9) == 0)
            args->config = word + 9;
        else if (strcmp(word, "--config") == 0 && i + 1 < args->argc)
            args->config = args->argv[++i];
        else if (strncmp(word, "--", 2) == 0 && strchr(word, '=') == NULL)
            i++; /* its value is no option */
    }
    return -1;
}

/* ---- signals ------------------------------------------------------------------------------- */

struct signals {
    const struct arguments *args;
    struct kvt_server *server;
    struct kvt_conf *conf;
    _Atomic int over;
};

struct differ {       /* keys of a new configuration whose values are other ones */
    char *values[64]; /* in the order of the keys */
    size_t count, at;
};

static void keep_value(void *arg, const char *key, const char *value, const char *fallback,
                       const char *help, int reload)
{
    struct differ *differ = arg;
    (void)key;
    (void)fallback;
    (void)help;
    (void)reload;
    if (differ->count == KVT_ARRAY_LEN(differ->values))
        return;
    differ->values[differ->count++] = strdup(value);
}

static void compare_value(void *arg, const char *key, const char *value, const char *fallback,
                          const char *help, int reload)
{
    struct differ *differ = arg;
    size_t i = differ->at++;
    (void)fallback;
    (void)help;
    if (i >= differ->count || differ->values[i] == NULL || strcmp(differ->values[i], value) == 0)
        return;
    if (reload)
        kvt_log(&to_stderr, KVT_LOG_INFO, "reload: %s is now %s", key, value);
    else
        kvt_log(&to_stderr, KVT_LOG_WARN,
                "reload: %s = %s takes a restart; %s stays in force until then", key, value,
                differ->values[i]);
}

static void reload(struct signals *signals)
{
    struct differ differ = {.count = 0};
    struct kvt_conf fresh;
    char why[512] = "";
    kvt_notify("RELOADING=1");
    if (kvt_conf_new(&fresh) != 0) {
        kvt_notify("READY=1");
        return;
    }
    if (conf_load(signals->args, &fresh, why, sizeof(why)) != 0) {
        kvt_log(&to_stderr, KVT_LOG_ERROR, "reload: %s (nothing was changed)", why);
    } else {
        kvt_conf_each(signals->conf, keep_value, &differ);
        kvt_conf_each(&fresh, compare_value, &differ);
        atomic_store_explicit(&log_level, fresh.log_level, memory_order_relaxed);
        kvt_server_allow(signals->server, fresh.uids, fresh.uid_count);
        signals->conf->log_level = fresh.log_level;
        memcpy(signals->conf->uids, fresh.uids, sizeof(fresh.uids));
        signals->conf->uid_count = fresh.uid_count;
        kvt_log(&to_stderr, KVT_LOG_INFO, "reload: done");
    }
    for (size_t i = 0; i < differ.count; i++)
        free(differ.values[i]);
    kvt_conf_free(&fresh);
    kvt_notify("READY=1");
}

static void *signals_main(void *arg)
{
    struct signals *signals = arg;
    sigset_t set;
    int number;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    sigaddset(&set, SIGUSR2); /* our own: the main thread is done */
    while (sigwait(&set, &number) == 0 && !atomic_load(&signals->over)) {
        if (number == SIGHUP) {
            reload(signals);
        } else if (number != SIGUSR2) {
            kvt_log(&to_stderr, KVT_LOG_INFO, "signal %d: closing", number);
            kvt_notify("STOPPING=1");
            kvt_server_stop(signals->server);
        }
    }
    return NULL;
}

/* ---- the daemon ---------------------------------------------------------------------------- */

static void warn_mode(const struct kvt_conf *conf)
{
    if (conf->uid_count > 0 && (conf->socket_mode & 0066) != 0066 &&
        (conf->socket_mode & 0060) != 0060)
        kvt_log(&to_stderr, KVT_LOG_WARN,
                "allow_uid names other users, but socket_mode %04o keeps them from the socket: set "
                "socket_mode = 0666 (users are still checked), or 0660 and a group",
                (unsigned)conf->socket_mode);
}

/* Serve until a signal ends it. */
static int serve(const struct arguments *args, struct kvt_conf *conf, struct kvt_host *host,
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
                                       .answer_ctx = &report};
    struct kvt_server *server = NULL;
    char error[512] = "";
    pthread_t thread;
    int rc = kvt_server_new(&params, &server, error, sizeof(error));
    if (rc == 0)
        rc = kvt_report_open(&report, host, server);
    if (rc != 0) {
        complain("%s", error[0] ? error : kvt_strerror(rc));
        kvt_server_free(server);
        return EXIT_PROBLEM;
    }
    kvt_server_allow(server, conf->uids, conf->uid_count);
    struct signals signals = {.args = args, .server = server, .conf = conf};
    if (pthread_create(&thread, NULL, signals_main, &signals) != 0) {
        complain("cannot start a thread: raise the limit of processes (ulimit -u)");
        kvt_report_close(&report);
        kvt_server_free(server);
        return EXIT_PROBLEM;
    }
    kvt_log(&to_stderr, KVT_LOG_INFO, "kvtierd %s: %llu MiB of DRAM, %u of %u disk roots, at %s%s",
            kvt_version(), (unsigned long long)(host->memory.arena_bytes >> 20),
            (unsigned)host->roots_used, (unsigned)host->settings->disk_count, conf->socket,
            listen_fd >= 0 ? " (passed to us)" : "");
    if (conf->metrics[0] != '\0' && kvt_metrics_start(&metrics, conf->metrics, conf->socket,
                                                      &to_stderr, error, sizeof(error)) != 0)
        complain("%s (going on without it)", error);
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

static int run(const struct arguments *args, struct kvt_conf *conf)
{
    struct kvt_host host = {.settings = &conf->options->settings,
                            .log = to_stderr,
                            .clock = kvt_clock_system(),
                            .shared = true};
    struct kvt_pin pin;
    char error[512] = "";
    int code = EXIT_PROBLEM, listen_fd = kvt_passed_socket();
    if (listen_fd == KVT_E_INVAL ||
        (listen_fd >= 0 && kvt_passed_path(listen_fd, conf->socket, sizeof(conf->socket)) != 0)) {
        complain("the socket that was passed to us is not one of ListenSequentialPacket=/PATH, or "
                 "not the only one");
        return EXIT_PROBLEM;
    }
    warn_mode(conf);
    int rc = kvt_host_init(&host, error, sizeof(error));
    if (rc == 0 && pin_memory(&host, &pin) != 0)
        rc = KVT_E_LIMIT;
    else if (rc == 0)
        rc = kvt_host_open(&host, error, sizeof(error));
    if (rc == 0 && conf->options->settings.spin != KVT_AUTO)
        kvt_owner_spin(host.owner, (int64_t)conf->options->settings.spin);
    if (rc == 0)
        code = serve(args, conf, &host, listen_fd);
    else
        complain("%s", error[0] ? error : kvt_strerror(rc));
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

static int start(const struct arguments *args, struct kvt_conf *conf)
{
    char why[512] = "";
    if (conf_load(args, conf, why, sizeof(why)) != 0) {
        if (why[0] != '\0')
            complain("%s", why);
        return EXIT_USAGE;
    }
    if (args->check) {
        printf("the configuration is good\n");
        return EXIT_GOOD;
    }
    atomic_store(&log_level, conf->log_level);
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
    struct arguments args = {.argc = argc, .argv = argv};
    struct kvt_conf conf;
    (void)umask(0077);
    descriptors_raise();
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
