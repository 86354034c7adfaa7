/* Option parsing, JSON output, progress and signals for the subcommands of `kvtier`.
 *
 * Invariants: an option is set exactly as often as it is given (the last one wins); nothing is
 * allocated; a refused word is always named, with the nearest valid one.
 * Threads: one; the interrupt flag alone is written by a signal handler.
 * It does not know the commands: kvtier.c does.
 */
#include "cli.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/parse.h"
#include "kvtier/error.h"

#define OPTIONS_MAX 64 /* options of one command: bounds the list of names for "nearest" */
#define PIPE_PERIOD_NS INT64_C(60000000000) /* a log stays short, and shows that it goes on */
#define PROGRESS_PERIOD_NS                                                 \
    100000000 /* 10 redraws a second: smooth for an eye, free for the work \
               */

#define INTERRUPT_AGAIN_NS INT64_C(1000000000)

static volatile sig_atomic_t interrupt_signal;
static int64_t interrupt_ns; /* of the first; read and written by the handler alone */

static int said; /* an error */
static char said_text[1024];
static int json_written;

void kvt_cli_error(const char *command, const char *format, ...)
{
    va_list args;

    if (!said) { /* the first says what it is about */
        va_start(args, format);
        vsnprintf(said_text, sizeof(said_text), format, args);
        va_end(args);
    }
    said = 1;
    fflush(stdout);
    fprintf(stderr, "kvtier%s%s: ", command[0] ? " " : "", command);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
}

static const struct kvt_cli_option *find_option(const struct kvt_cli_option *options, size_t count,
                                                const char *name, size_t name_len)
{
    for (size_t i = 0; i < count; i++)
        if (strlen(options[i].name) == name_len && !memcmp(options[i].name, name, name_len))
            return &options[i];
    return NULL;
}

static int unknown_option(const char *command, const struct kvt_cli_option *options, size_t count,
                          const char *word, size_t word_len)
{
    const char *names[OPTIONS_MAX + 1];
    char name[128];
    size_t n = 0;

    for (; n < count && n < OPTIONS_MAX; n++)
        names[n] = options[n].name;
    names[n++] = "help";
    snprintf(name, sizeof(name), "%.*s", (int)word_len, word);
    const char *near = kvt_nearest(name, names, n);
    if (near)
        kvt_cli_error(command, "unknown option '--%s'; did you mean '--%s'?", name, near);
    else
        kvt_cli_error(command, "unknown option '--%s'; see 'kvtier %s --help'", name, command);
    return KVT_EXIT_USAGE;
}

static int set_number(const char *command, const struct kvt_cli_option *option, const char *value)
{
    int64_t low = INT64_MIN, high = INT64_MAX;

    if (option->min || option->max) {
        low = option->min;
        high = option->max;
    }
    int rc = kvt_parse_int(value, low, high, option->number);
    if (rc == KVT_E_LIMIT)
        kvt_cli_error(command, "--%s: %s is outside %" PRId64 "..%" PRId64, option->name, value,
                      low, high);
    else if (rc)
        kvt_cli_error(command, "--%s: '%s' is not a whole number", option->name, value);
    return rc ? KVT_EXIT_USAGE : 0;
}

static int set_size(const char *command, const struct kvt_cli_option *option, const char *value)
{
    uint64_t bytes = 0;
    char low[32], high[32];
    const char *unit;
    int rc = kvt_parse_size(value, &bytes);

    if (rc == 0 && (option->min || option->max) &&
        (bytes < (uint64_t)option->min || bytes > (uint64_t)option->max))
        rc = KVT_E_LIMIT;
    if (rc == 0) {
        *option->size = bytes;
        return 0;
    }
    if (rc == KVT_E_LIMIT)
        kvt_cli_error(command, "--%s: %s is outside %s..%s", option->name, value,
                      kvt_human_bytes((uint64_t)option->min, low),
                      kvt_human_bytes(option->max ? (uint64_t)option->max : UINT64_MAX, high));
    else if (value[0] == '-')
        kvt_cli_error(command, "--%s: '%s' is not a size: it is negative", option->name, value);
    else if ((unit = kvt_nearest_size_unit(value)))
        kvt_cli_error(command, "--%s: '%s' is not a size; did you mean the unit '%s'?",
                      option->name, value, unit);
    else
        kvt_cli_error(command, "--%s: '%s' is not a size; write it like 64MiB", option->name,
                      value);
    return KVT_EXIT_USAGE;
}

/* Take the option in argv[*at]; *at moves over its value. */
static int take_option(const char *command, const struct kvt_cli_option *options, size_t count,
                       int argc, char **argv, int *at)
{
    const char *word = argv[*at] + 2;
    const char *equals = strchr(word, '=');
    size_t word_len = equals ? (size_t)(equals - word) : strlen(word);
    const struct kvt_cli_option *option = find_option(options, count, word, word_len);

    if (!option)
        return unknown_option(command, options, count, word, word_len);
    if (option->flag) {
        if (equals) {
            kvt_cli_error(command, "--%s takes no value", option->name);
            return KVT_EXIT_USAGE;
        }
        *option->flag = 1;
        return 0;
    }
    const char *value = equals ? equals + 1 : NULL;
    if (!value) {
        if (*at + 1 >= argc) {
            kvt_cli_error(command, "--%s needs a value: --%s %s", option->name, option->name,
                          option->metavar ? option->metavar : "VALUE");
            return KVT_EXIT_USAGE;
        }
        value = argv[++*at];
    }
    if (option->text) {
        if (!value[0] && option->metavar &&
            (!strcmp(option->metavar, "DIR") || !strcmp(option->metavar, "FILE"))) {
            kvt_cli_error(command, "--%s needs a path, and '' is none", option->name);
            return KVT_EXIT_USAGE;
        }
        *option->text = value;
        return 0;
    }
    return option->number ? set_number(command, option, value) : set_size(command, option, value);
}

int kvt_cli_parse(const char *command, const char *usage, const struct kvt_cli_option *options,
                  size_t option_count, const char **positional, size_t positional_min,
                  size_t positional_max, size_t *count, int argc, char **argv)
{
    size_t words = 0;
    bool only_words = false;

    for (int i = 1; i < argc; i++) {
        if (!only_words && !strcmp(argv[i], "--")) {
            only_words = true;
            continue;
        }
        if (!only_words && (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h"))) {
            kvt_cli_print_help(command, usage, options, option_count);
            return 1;
        }
        if (!only_words && !strncmp(argv[i], "--", 2)) {
            int rc = take_option(command, options, option_count, argc, argv, &i);
            if (rc)
                return rc;
            continue;
        }
        if (!only_words && argv[i][0] == '-' && argv[i][1]) {
            kvt_cli_error(command, "unknown option '%s'; options are written '--name'", argv[i]);
            return KVT_EXIT_USAGE;
        }
        if (words == positional_max) {
            kvt_cli_error(command, "unexpected word '%s'; usage: kvtier %s %s", argv[i], command,
                          usage);
            return KVT_EXIT_USAGE;
        }
        if (!argv[i][0]) {
            kvt_cli_error(command, "an empty word ''; usage: kvtier %s %s", command, usage);
            return KVT_EXIT_USAGE;
        }
        positional[words++] = argv[i];
    }
    if (words < positional_min) {
        kvt_cli_error(command, "too few words; usage: kvtier %s %s", command, usage);
        return KVT_EXIT_USAGE;
    }
    if (count)
        *count = words;
    return 0;
}

int kvt_cli_json(json_t *document)
{
    int rc = KVT_EXIT_OK;

    json_written = 1;
    if (!document || json_dumpf(document, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9)) ||
        fputc('\n', stdout) == EOF || fflush(stdout)) {
        kvt_cli_error("", "cannot write JSON to standard output: %s", strerror(errno));
        rc = KVT_EXIT_PROBLEM;
    }
    json_decref(document);
    return rc;
}

static int64_t now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return ts.tv_sec * INT64_C(1000000000) + ts.tv_nsec;
}

void kvt_progress_start(struct kvt_progress *progress, const char *what)
{
    progress->what = what;
    progress->on = isatty(STDERR_FILENO);
    progress->last_ns = progress->on ? 0 : now_ns();
}

void kvt_progress_update(struct kvt_progress *progress, uint64_t done, uint64_t total)
{
    int64_t now = now_ns();
    if (!progress->on) {
        if (now - progress->last_ns < PIPE_PERIOD_NS)
            return;
        progress->last_ns = now;
        if (total)
            fprintf(stderr, "%s: %" PRIu64 " of %" PRIu64 "\n", progress->what, done, total);
        else
            fprintf(stderr, "%s: %" PRIu64 "\n", progress->what, done);
        return;
    }
    if (progress->last_ns && now - progress->last_ns < PROGRESS_PERIOD_NS && done != total)
        return;
    progress->last_ns = now;
    if (total)
        fprintf(stderr, "\r\033[K%s %3.0f%%", progress->what, 100.0 * (double)done / (double)total);
    else
        fprintf(stderr, "\r\033[K%s %" PRIu64, progress->what, done);
    fflush(stderr);
}

void kvt_progress_done(struct kvt_progress *progress)
{
    if (progress->on && progress->last_ns) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
    }
    progress->on = 0;
}

/* One Ctrl-C may come twice: `timeout` signals the process and then its whole group. So a signal
 * within a second of the first is the same wish; a later one is somebody who does not want to wait.
 */
static void on_interrupt(int signal_number)
{
    int64_t now = now_ns();

    if (interrupt_signal && now - interrupt_ns > INTERRUPT_AGAIN_NS && signal_number != SIGPIPE) {
        signal(signal_number, SIG_DFL);
        raise(signal_number); /* delivered when this handler returns */
        return;
    }
    if (!interrupt_signal)
        interrupt_ns = now;
    interrupt_signal = signal_number;
}

void kvt_cli_catch_interrupt(void)
{
    struct sigaction action = {.sa_handler = on_interrupt}; /* no SA_RESTART: waits end early */

    sigfillset(&action.sa_mask); /* handlers do not interrupt each other */
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGHUP, &action, NULL);  /* the terminal was closed */
    sigaction(SIGPIPE, &action, NULL); /* nobody reads on */
}

int kvt_cli_interrupted(void)
{
    return interrupt_signal;
}

void kvt_cli_interrupt_forget(void)
{
    interrupt_signal = 0;
}

int kvt_cli_end(int rc)
{
    if (interrupt_signal && interrupt_signal != SIGPIPE && !said)
        kvt_cli_error("", "interrupted");
    return interrupt_signal && rc == KVT_EXIT_OK ? KVT_EXIT_PROBLEM : rc;
}

/* What follows a semicolon is what to do about it. */
int kvt_cli_json_error(int argc, char **argv, int rc)
{
    const char *text = said                   ? said_text
                       : rc == KVT_EXIT_USAGE ? "wrong usage; see 'kvtier --help'"
                                              : "it did not succeed";
    const char *remedy = strstr(text, "; ");
    bool wanted = false;

    for (int i = 1; i < argc && strcmp(argv[i], "--"); i++)
        wanted = wanted || !strcmp(argv[i], "--json");
    if (!wanted || rc == KVT_EXIT_OK || json_written)
        return rc;
    json_t *error = json_pack("{s:s#, s:i}", "text", text,
                              remedy ? (int)(remedy - text) : (int)strlen(text), "exit_code", rc);
    if (!error) /* bytes that are no text */
        error = json_pack("{s:s, s:i}", "text", "see standard error", "exit_code", rc);
    else if (remedy)
        json_object_set_new(error, "remedy", json_string(remedy + 2));
    (void)kvt_cli_json(json_pack("{s:o}", "error", error));
    return rc;
}

const char *kvt_human_bytes(uint64_t bytes, char *buffer)
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double v = (double)bytes;
    size_t u = 0;

    while (v >= 1024.0 && u + 1 < sizeof(unit) / sizeof(unit[0])) {
        v /= 1024.0;
        u++;
    }
    if (u == 0)
        snprintf(buffer, 32, "%" PRIu64 " B", bytes);
    else
        snprintf(buffer, 32, "%.1f %s", v, unit[u]);
    return buffer;
}
