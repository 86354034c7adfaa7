/* kvtier demo: a real model answers over a long document, cold, from DRAM, and from disk in a new
 * process.
 *
 * This file reads the command line and runs the two phases as processes of its own binary
 * ("kvtier demo --child REQUEST FD"); each sends one JSON document through a pipe. Phase two is a
 * process that has never seen the prompt: what it knows comes from the directory.
 * An interrupt reaches the child, which stops between two steps and closes the store in order.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/parse.h"
#include "cli.h"
#include "daemon_child.h"
#include "demo.h"
#include "demo_dirs.h"
#include "kvtier/error.h"
#include "root_check.h"

#define LEFT_S INT64_C(3600) /* a directory of a killed demo is removed when it is as old */
#define MODEL_FILE "SmolLM2-135M-Instruct.Q4_1.gguf"
#define THREADS_MAX 8
#define WAIT_FIRST_NS INT64_C(3000000000) /* shorter silences worry nobody */
#define WAIT_AGAIN_NS INT64_C(60000000000)
#define RESULT_BYTES_MAX ((size_t)4 << 20)

int kvt_cmd_demo(int argc, char **argv);

int demo_cache_paths(struct demo_paths *paths)
{
    const char *own = getenv("KVTIER_CACHE_DIR"), *xdg = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    int n = -1;

    if (own != NULL && own[0] != '\0')
        n = snprintf(paths->cache, sizeof(paths->cache), "%s", own);
    else if (xdg != NULL && xdg[0] != '\0')
        n = snprintf(paths->cache, sizeof(paths->cache), "%s/kvtier", xdg);
    else if (home != NULL && home[0] != '\0')
        n = snprintf(paths->cache, sizeof(paths->cache), "%s/.cache/kvtier", home);
    if (n < 0 || (size_t)n >= sizeof(paths->cache))
        return -1;
    snprintf(paths->model, sizeof(paths->model), "%s/models/" MODEL_FILE, paths->cache);
    snprintf(paths->digests, sizeof(paths->digests), "%s/digests", paths->cache);
    return 0;
}

int64_t demo_default_threads(void)
{
    cpu_set_t set;

    if (sched_getaffinity(0, sizeof(set), &set) != 0)
        return 1;
    const int count = CPU_COUNT(&set);
    return count < THREADS_MAX ? count : THREADS_MAX;
}

static void add_text(json_t *object, const char *key, const char *text)
{
    if (text != NULL)
        json_object_set_new(object, key, json_string(text));
}

static json_t *make_request(const struct demo_config *config, const char *phase,
                            const json_t *first)
{
    json_t *request = json_pack("{s:s, s:I, s:I, s:I, s:I, s:I}", "phase", phase, "block",
                                (json_int_t)config->block, "level", (json_int_t)config->level,
                                "tokens", (json_int_t)config->tokens, "threads",
                                (json_int_t)config->threads, "window", (json_int_t)config->window);

    add_text(request, "model", config->model);
    add_text(request, "dir", config->dir);
    add_text(request, "prompt_file", config->prompt_file);
    add_text(request, "digest_dir", config->digest_dir);
    add_text(request, "socket", config->socket);
    add_text(request, "remote", config->remote);
    if (first != NULL) {
        json_object_set(request, "expect", json_object_get(first, "expect"));
        json_object_set(request, "expect_logits", json_object_get(first, "expect_logits"));
    }
    return request;
}

static void exec_child(const char *request, int fd)
{
    char fd_text[16];

    (void)prctl(PR_SET_PDEATHSIG, SIGTERM);
    (void)setenv("GGML_NO_BACKTRACE", "1", 0); /* it would start a debugger, and use our stdout */
    snprintf(fd_text, sizeof(fd_text), "%d", fd);
    execl("/proc/self/exe", "kvtier", "demo", "--child", request, fd_text, (char *)NULL);
    kvt_cli_error("demo", "cannot start the second process: %m");
    _exit(KVT_EXIT_PROBLEM);
}

/* What a phase does, for somebody who waits: at once on a terminal, elsewhere when it has taken
 * some seconds, and then again every minute. */
struct waiting {
    char what[160];
    int64_t start_ns;
    int64_t next_ns; /* the next line */
    int said;
    long threads; /* of llama.cpp; 0: nothing is to be said of them any more */
};

static void waiting_start(struct waiting *waiting, const struct demo_config *config,
                          const char *phase)
{
    memset(waiting, 0, sizeof(*waiting));
    waiting->threads = (long)config->threads;
    if (strcmp(phase, "first") == 0)
        snprintf(waiting->what, sizeof(waiting->what),
                 "phase 1 of 3: computing up to %lld tokens, cold; then storing and loading them",
                 (long long)config->tokens);
    else
        snprintf(waiting->what, sizeof(waiting->what), "%s",
                 strcmp(phase, "restart") == 0
                     ? config->remote != NULL
                           ? "phase 2 of 3: another process answers from the shared tier"
                       : config->socket != NULL
                           ? "phase 2 of 3: a new process answers from the daemon's DRAM"
                           : "phase 2 of 3: a new process answers from disk"
                     : "phase 3 of 3: another one reads ahead while it tokenises");
    waiting->start_ns = demo_now_ns();
    waiting->next_ns = waiting->start_ns + (isatty(STDERR_FILENO) ? 0 : WAIT_FIRST_NS);
}

/* ggml's threads spin while they wait for each other: beside other work fewer are faster. Said
 * once, when a phase takes long and more wants to run than the threads and one more. */
static void waiting_advise(struct waiting *waiting)
{
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    double load = 0;

    if (waiting->threads < 2 || getloadavg(&load, 1) != 1 || load < (double)processors + 1)
        return;
    fprintf(stderr,
            "%.12s: the machine is busy (load %.0f on %ld processors), and llama.cpp's %ld threads "
            "wait for each other there: --threads 1 may be many times faster\n",
            waiting->what, load, processors, waiting->threads);
    waiting->threads = 0;
}

/* Say it when it is time; how long to sleep at most, in milliseconds. */
static int waiting_tell(struct waiting *waiting)
{
    const int64_t now = demo_now_ns();

    if (now >= waiting->next_ns) {
        if (!waiting->said++)
            fprintf(stderr, "%s\n", waiting->what);
        else {
            if (!isatty(STDERR_FILENO)) /* there the child shows how far it is all the time */
                fprintf(stderr, "%.12s: still at it after %lld s\n", waiting->what,
                        (long long)((now - waiting->start_ns) / 1000000000));
            waiting_advise(waiting);
        }
        waiting->next_ns = now + WAIT_AGAIN_NS;
    }
    return (int)((waiting->next_ns - now) / 1000000) + 1;
}

/* Everything the child writes; NULL when it is no JSON document. A signal that only we got is
 * passed on once. */
static json_t *read_result(int fd, pid_t child, struct waiting *waiting)
{
    char *text = malloc(RESULT_BYTES_MAX);
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    size_t len = 0;
    int told = 0;

    while (text != NULL && len < RESULT_BYTES_MAX) {
        const int some = poll(&ready, 1, waiting_tell(waiting));
        if (some == 0)
            continue;
        ssize_t got = some > 0 ? read(fd, text + len, RESULT_BYTES_MAX - len) : -1;
        if (got < 0 && errno == EINTR) {
            if (kvt_cli_interrupted() && !told++)
                kill(child, SIGTERM);
            continue;
        }
        if (got <= 0)
            break;
        len += (size_t)got;
    }
    json_t *result = text != NULL ? json_loadb(text, len, 0, NULL) : NULL;
    free(text);
    return result;
}

/* Run one phase in a process of its own. NULL when it failed (it has said why). */
static json_t *run_phase(const struct demo_config *config, const char *phase, const json_t *first)
{
    json_t *request = make_request(config, phase, first), *result = NULL;
    char *text = request != NULL ? json_dumps(request, JSON_COMPACT) : NULL;
    int fds[2] = {-1, -1}, status = 0;

    json_decref(request);
    if (text == NULL || pipe(fds) != 0) {
        kvt_cli_error("demo", "cannot start a process: %m");
        free(text);
        return NULL;
    }
    pid_t child = fork();
    if (child == 0) {
        close(fds[0]);
        exec_child(text, fds[1]);
    }
    close(fds[1]);
    if (child > 0) {
        struct waiting waiting;
        waiting_start(&waiting, config, phase);
        result = read_result(fds[0], child, &waiting);
        while (waitpid(child, &status, 0) < 0 && errno == EINTR)
            ;
    }
    close(fds[0]);
    free(text);
    if (child < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        const int died = child > 0 && WIFSIGNALED(status) && !kvt_cli_interrupted();
        if (died && WTERMSIG(status) == SIGABRT)
            kvt_cli_error("demo",
                          "llama.cpp aborted on %s (its reason is above): the file is "
                          "damaged, or of a kind that it cannot run",
                          config->model);
        else if (died)
            kvt_cli_error("demo", "the process of a phase died of signal %d", WTERMSIG(status));
        json_decref(result);
        return NULL;
    }
    return result;
}

/* Take the files of the store out of the page cache, so that the next process reads the drive even
 * where O_DIRECT is not to be had. */
static void drop_pages(const char *dir)
{
    DIR *list = opendir(dir);
    struct dirent *entry;

    if (list == NULL)
        return;
    while ((entry = readdir(list)) != NULL) {
        if (entry->d_name[0] == '.' && strspn(entry->d_name, ".") == strlen(entry->d_name))
            continue;
        int fd = openat(dirfd(list), entry->d_name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
        if (fd < 0)
            continue;
        (void)fdatasync(fd);
        (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
    closedir(list);
}

/* A directory of our own below the cache, for a run without --dir. */
static int make_dir(struct demo_paths *paths)
{
    (void)mkdir(paths->cache, 0777);
    (void)kvt_demo_dirs_clean(paths->cache, LEFT_S);
    const int rc = kvt_demo_dir_make(paths->cache, paths->dir, sizeof(paths->dir));
    if (rc != 0) {
        kvt_cli_error("demo", "cannot make a directory below %s: %s; give one with --dir",
                      paths->cache, kvt_strerror(rc));
        return -1;
    }
    return 0;
}

/* What the first process stored, the second must have found. */
static int check_loaded(const struct demo_config *config, const json_t *report)
{
    const json_t *loaded = json_object_get(report, "loaded_tokens");
    const json_int_t stored = json_integer_value(json_object_get(loaded, "dram"));

    if (stored == 0 || json_integer_value(json_object_get(loaded, "disk")) > 0)
        return KVT_EXIT_OK;
    if (config->remote != NULL) {
        kvt_cli_error("demo",
                      "the other process loaded nothing from %s, although %lld tokens were stored: "
                      "is it up, and has it memory? 'kvtier help' and docs/remote.md",
                      config->remote, (long long)stored);
        return KVT_EXIT_PROBLEM;
    }
    kvt_cli_error("demo",
                  "the new process loaded nothing from %s, although %lld tokens were stored: "
                  "'kvtier fsck %s' checks the directory",
                  config->dir, (long long)stored, config->dir);
    return KVT_EXIT_PROBLEM;
}

static int run_demo(const struct demo_config *config, int as_json)
{
    int rc = KVT_EXIT_PROBLEM;
    json_t *report = NULL, *restart = NULL, *prefetch = NULL;
    json_t *first = run_phase(config, "first", NULL);

    if (first != NULL) {
        drop_pages(config->dir);
        if (!kvt_cli_interrupted())
            restart = run_phase(config, "restart", first);
    }
    if (restart != NULL && !kvt_cli_interrupted()) {
        drop_pages(config->dir);
        prefetch = run_phase(config, "prefetch", first);
    }
    if (prefetch != NULL)
        report = demo_report(config, first, restart, prefetch);
    if (report != NULL) {
        const int loaded = check_loaded(config, report);
        int shown = KVT_EXIT_OK;
        if (as_json)
            shown = kvt_cli_json(json_incref(report));
        else
            demo_print(report);
        rc = shown != KVT_EXIT_OK ? shown : loaded;
    } else if (kvt_cli_interrupted()) {
        kvt_cli_error("demo", "interrupted; the store is in order");
    }
    json_decref(report);
    json_decref(prefetch);
    json_decref(restart);
    json_decref(first);
    return rc;
}

static int run_with_daemon(struct demo_config *config, int as_json)
{
    const unsigned long long pages = (unsigned long long)sysconf(_SC_PHYS_PAGES);
    const unsigned long long half = pages * (unsigned long long)sysconf(_SC_PAGESIZE) / 2;
    char socket[KVT_DAEMON_SOCKET_ROOM], dram[32], disk[PATH_MAX + 32];
    const char *const words[] = {"--dram", dram, "--disk", disk, NULL};
    pid_t pid;

    snprintf(dram, sizeof(dram), "%lluMiB", (half < 4ull << 30 ? half : 4ull << 30) >> 20);
    snprintf(disk, sizeof(disk), "%s:16GiB", config->dir);
    if (kvt_daemon_child("demo", words, socket, &pid) != 0)
        return KVT_EXIT_PROBLEM;
    config->socket = socket;
    const int rc = run_demo(config, as_json);
    config->socket = NULL;
    kvt_daemon_child_end(pid);
    return rc;
}

static int parse_level(const char *name, int *level)
{
    if (name == NULL)
        return 0;
    *level = kvt_level_parse(name);
    if (*level > 0 && kvt_level_supported(*level))
        return 0;
    kvt_cli_error("demo", "--level: '%s' is not a level of this build; one of:", name);
    for (int i = KVT_LEVEL_INT4; i <= KVT_LEVEL_RAW; i++)
        if (kvt_level_supported(i))
            fprintf(stderr, "  %s\n", kvt_level_name(i));
    return -1;
}

static int words_fit(const struct demo_config *config, int daemon)
{
    if (config->block % KVT_TILE_TOKENS != 0)
        kvt_cli_error("demo", "--block: %lld is not a multiple of %u", (long long)config->block,
                      KVT_TILE_TOKENS);
    else if (daemon && config->remote != NULL)
        kvt_cli_error("demo", "--daemon and --remote: one of the two");
    else
        return 1;
    return 0;
}

/* path: where the scripts put it; NULL: there is no HOME. */
static int default_model(struct demo_config *config, const char *path)
{
    config->model = path;
    if (path != NULL && access(path, R_OK) == 0)
        return 0;
    kvt_cli_error("demo",
                  "there is no model at %s; scripts/fetch-model.sh downloads it, or give one with "
                  "--model",
                  path != NULL ? path : "(no HOME)");
    return -1;
}

int kvt_cmd_demo(int argc, char **argv)
{
    static struct demo_paths paths;
    struct demo_config config = {.level = KVT_LEVEL_KV4,
                                 .tokens = DEMO_TOKENS,
                                 .window = 256,
                                 .block = 16,
                                 .threads = demo_default_threads()};
    const char *level = NULL;
    int as_json = 0, keep = 0, daemon = 0;
    const struct kvt_cli_option options[] = {
        {.name = "model",
         .metavar = "FILE",
         .help = "GGUF file (default: the downloaded SmolLM2)",
         .text = &config.model},
        {.name = "dir",
         .metavar = "DIR",
         .help = "directory of the store, kept (default: a new "
                 "one, removed at the end)",
         .text = &config.dir},
        {.name = "level",
         .metavar = "LEVEL",
         .help = "raw, kv8, kv6, kv5, kv4 (default), int4",
         .text = &level},
        {.name = "tokens",
         .metavar = "N",
         .help = "length of the prompt (default 2000)",
         .number = &config.tokens,
         .min = 64,
         .max = 1 << 20},
        {.name = "prompt-file",
         .metavar = "FILE",
         .help = "text to ask about (default: a shipped one)",
         .text = &config.prompt_file},
        {.name = "threads",
         .metavar = "N",
         .help = "threads of llama.cpp (default: the "
                 "processors, at most 8)",
         .number = &config.threads,
         .min = 1,
         .max = 512},
        {.name = "window",
         .metavar = "N",
         .help = "most recent tokens stored at kv8 (default 256)",
         .number = &config.window,
         .min = 0,
         .max = 1 << 20},
        {.name = "block",
         .metavar = "N",
         .help = "tokens of a block, a multiple of 16 (default 16)",
         .number = &config.block,
         .min = 16,
         .max = 512},
        {.name = "daemon",
         .help = "a kvtierd holds the store: the new process finds DRAM warm",
         .flag = &daemon},
        {.name = "remote",
         .metavar = "URL",
         .help = "no disk, and a server between two processes that share nothing else: "
                 "redis://host:port",
         .text = &config.remote},
        {.name = "keep", .help = "keep the directory, and say which it is", .flag = &keep},
        {.name = "json", .help = "one JSON document instead of the table", .flag = &as_json},
    };

    int64_t fd = 0;
    if (argc == 4 && strcmp(argv[1], "--child") == 0 &&
        kvt_parse_int(argv[3], 3, INT32_MAX, &fd) == 0)
        return demo_child(argv[2], (int)fd);
    int rc = kvt_cli_parse("demo", "[OPTION...]", options, sizeof(options) / sizeof(options[0]),
                           NULL, 0, 0, NULL, argc, argv);
    if (rc != 0)
        return rc == 1 ? KVT_EXIT_OK : KVT_EXIT_USAGE;
    if (parse_level(level, &config.level) != 0 || !words_fit(&config, daemon))
        return KVT_EXIT_USAGE;
    const int have_cache = demo_cache_paths(&paths) == 0;
    if (config.model == NULL && default_model(&config, have_cache ? paths.model : NULL) != 0)
        return KVT_EXIT_PROBLEM;
    config.digest_dir = have_cache ? paths.digests : NULL;
    const int own_dir = config.dir == NULL;
    char why[KVT_ROOT_WHY_MAX];
    if (!own_dir && kvt_root_check(config.dir, why) < 0) { /* before minutes of work */
        kvt_cli_error("demo", "--dir: %s", why);
        return KVT_EXIT_PROBLEM;
    }
    if (own_dir && make_dir(&paths) != 0)
        return KVT_EXIT_PROBLEM;
    if (own_dir)
        config.dir = paths.dir;
    kvt_cli_catch_interrupt();
    rc = daemon ? run_with_daemon(&config, as_json) : run_demo(&config, as_json);
    if (own_dir && !keep)
        kvt_demo_dir_remove(config.dir);
    else if (keep && !as_json)
        printf("\nthe store is kept in %s\n", config.dir);
    return rc;
}
