/* kvtier top: what a running cache is doing: what was loaded and looked up, rates, queues, drops by
 * reason.
 *
 * It reads the file "stats" that the store writes into its first root every two seconds while
 * something happens: the process itself is not asked, and not slowed. Rates are differences of two
 * snapshots over the time between them; a counter that falls means that the process has started
 * anew, and gives no rate.
 * Threads: one. The terminal is top_screen.c's.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/clock.h"
#include "cli.h"
#include "commands.h"
#include "stats_file.h"
#include "store_dir.h"
#include "top_screen.h"

#define COMMAND "top"
#define OTHERS_MAX 8u /* counters that move and have no row */

struct top {
    const char *path;
    int64_t interval_s;
    int64_t owner;
    json_t *now, *before; /* snapshots */
    double age_s;
    double now_s, before_s; /* when they were read */
    double period_s;        /* between them; 0: no rates */
};

/* ---- samples ------------------------------------------------------------------------------- */

static double clock_s(void)
{
    struct kvt_clock clock = kvt_clock_system();

    return (double)kvt_clock_now(&clock) * 1e-9;
}

/* Read a snapshot. When the file has not changed since the last one, that one's rates would be
 * wrong: a snapshot counts from when it was written. 0; -1 there is none. */
static int sample(struct top *top)
{
    double age;
    json_t *counters = kvt_stats_read(top->path, &age);
    double written = clock_s() - age;

    if (kvt_stats_is_daemon(top->path))
        top->owner = counters ? (int64_t)kvt_stats_value(counters, "writer.pid") : 0;
    else
        top->owner = kvt_dir_owner(top->path);
    if (!counters)
        return top->now ? 0 : -1;
    top->age_s = age;
    if (top->now && written - top->now_s < 0.05) { /* the same one: nothing happened since */
        json_decref(counters);
        if (age > (double)top->interval_s + 3) { /* the owner writes every 2 s when it works */
            json_decref(top->before);
            top->before = json_incref(top->now);
            top->period_s = (double)top->interval_s;
        }
        return 0;
    }
    json_decref(top->before);
    top->before = top->now;
    top->before_s = top->now_s;
    top->now = counters;
    top->now_s = written;
    top->period_s = top->before ? top->now_s - top->before_s : 0;
    return 0;
}

static uint64_t value(const struct top *top, const char *name)
{
    return kvt_stats_value(top->now, name);
}

/* How much a counter rose between the snapshots; 0 when it fell, or there is only one. */
static uint64_t rise(const struct top *top, const char *name)
{
    uint64_t now = value(top, name), before = kvt_stats_value(top->before, name);

    return top->period_s > 0 && now > before ? now - before : 0;
}

static double per_second(const struct top *top, const char *name)
{
    return top->period_s > 0 ? (double)rise(top, name) / top->period_s : 0;
}

/* ---- the view ------------------------------------------------------------------------------ */

__attribute__((format(printf, 3, 4))) static void add(struct kvt_top_view *view, int strong,
                                                      const char *format, ...)
{
    va_list args;

    if (view->count == KVT_TOP_LINES_MAX)
        return;
    view->strong[view->count] = (unsigned char)strong;
    va_start(args, format);
    vsnprintf(view->line[view->count++], KVT_TOP_COLUMNS_MAX, format, args);
    va_end(args);
}

/* A counter with its rate. bytes: shown in units. */
static void add_count(struct kvt_top_view *view, const struct top *top, const char *label,
                      const char *name, int bytes)
{
    char total[32], rate[32];

    if (bytes)
        kvt_human_bytes(value(top, name), total);
    else
        snprintf(total, sizeof(total), "%" PRIu64, value(top, name));
    if (top->period_s <= 0)
        snprintf(rate, sizeof(rate), "-");
    else if (bytes)
        kvt_human_bytes((uint64_t)per_second(top, name), rate);
    else
        snprintf(rate, sizeof(rate), "%.1f", per_second(top, name));
    add(view, 0, "  %-22s %14s %14s", label, total, rate);
}

/* The same, where a count is bad news: left out while it is zero. */
static void add_trouble(struct kvt_top_view *view, const struct top *top, const char *label,
                        const char *name)
{
    if (!value(top, name))
        return;
    add_count(view, top, label, name, 0);
    view->strong[view->count - 1] = rise(top, name) > 0;
}

/* A share with that of the last period. */
static void add_share(struct kvt_top_view *view, const char *label, uint64_t part, uint64_t all,
                      uint64_t part_recent, uint64_t all_recent)
{
    char now[32] = "-";

    if (all_recent)
        snprintf(now, sizeof(now), "%.1f %%", kvt_stats_percent(part_recent, all_recent));
    add(view, 0, "  %-22s %12.1f %% %14s", label, kvt_stats_percent(part, all), now);
}

static const char *const loads[] = {"load.granted_dram", "load.granted_disk",
                                    "load.granted_remote"};

/* Without those that took the place of a record at another level. */
static uint64_t first_stored(uint64_t committed, uint64_t replaced)
{
    return committed - KVT_MIN(replaced, committed);
}

/* What pays, and of what: blocks that were loaded, beside those that were computed and stored. */
static void add_loads(struct kvt_top_view *view, const struct top *top)
{
    uint64_t loaded = 0, recent = 0, computed, computed_recent;

    for (size_t i = 0; i < KVT_ARRAY_LEN(loads); i++) {
        loaded += value(top, loads[i]);
        recent += rise(top, loads[i]);
    }
    computed = first_stored(value(top, "store.committed"), value(top, "store.replaced"));
    computed_recent = first_stored(rise(top, "store.committed"), rise(top, "store.replaced"));
    add(view, 1, "%-24s %14s %14s", "loaded, not computed", "total", "per second");
    add_count(view, top, "blocks from dram", loads[0], 0);
    add_count(view, top, "blocks from disk", loads[1], 0);
    if (value(top, "remote.nodes"))
        add_count(view, top, "blocks from shared tier", loads[2], 0);
    add_share(view, "of loaded and stored", loaded, loaded + computed, recent,
              recent + computed_recent);
    add_count(view, top, "bytes from disk", "disk.read_bytes", 1);
    add_trouble(view, top, "absent", "load.miss");
    add_trouble(view, top, "being stored", "load.miss_pending");
    add_trouble(view, top, "below minimum level", "load.miss_level");
    add_trouble(view, top, "too late", "load.deadline");
    add_trouble(view, top, "cancelled", "load.canceled");
    add_trouble(view, top, "no staging slot", "load.no_slot");
    add_trouble(view, top, "bad checksum or key", "verify.checksum_fail");
    add_trouble(view, top, "read failed", "disk.read_fail");
    add_trouble(view, top, "scrub found damaged", "scrub.bad");
}

/* Questions: a prompt is looked up several times, also what the engine has itself; an answer saves
 * nothing before it is loaded. */
static void add_lookups(struct kvt_top_view *view, const struct top *top)
{
    uint64_t keys = value(top, "lookup.keys"), recent = rise(top, "lookup.keys");
    static const char *const hits[][2] = {{"  were in dram", "lookup.hits_dram"},
                                          {"  were on disk", "lookup.hits_disk"},
                                          {"  were in shared tier", "lookup.hits_remote"}};
    const size_t tiers = KVT_ARRAY_LEN(hits) - !value(top, "remote.nodes");

    add(view, 1, "looked up (questions: what was there is saved only when it is loaded)");
    add_count(view, top, "keys, each time asked", "lookup.keys", 0);
    for (size_t i = 0; i < tiers; i++)
        add_share(view, hits[i][0], value(top, hits[i][1]), keys, rise(top, hits[i][1]), recent);
    add_count(view, top, "runs ended: absent", "lookup.miss_absent", 0);
    add_trouble(view, top, "runs ended: pending", "lookup.miss_pending");
    add_trouble(view, top, "runs ended: level", "lookup.miss_level");
}

static void add_stores(struct kvt_top_view *view, const struct top *top)
{
    char queued[32];

    add(view, 1, "stores");
    add_count(view, top, "blocks committed", "store.committed", 0);
    add_count(view, top, "there already", "store.exists", 0);
    add_count(view, top, "blocks to disk", "disk.written_blocks", 0);
    add_count(view, top, "bytes to disk", "disk.written_bytes", 1);
    add(view, 0, "  %-22s %14" PRIu64 "    %s", "write queue, blocks",
        value(top, "disk.queue_blocks"), kvt_human_bytes(value(top, "disk.queue_bytes"), queued));
    add_trouble(view, top, "dropped: no dram", "store.dropped_dram");
    add_trouble(view, top, "dropped: gap before", "store.dropped_chain");
    add_trouble(view, top, "dropped: index full", "store.dropped_index");
    add_trouble(view, top, "dropped: being purged", "store.dropped_purge");
    add_trouble(view, top, "not to disk: queue", "disk.dropped_queue");
    add_trouble(view, top, "not to disk: no room", "disk.dropped_space");
    add_trouble(view, top, "not to disk: error", "disk.dropped_error");
    add_trouble(view, top, "lost: no dram, no disk", "store.lost");
    add_trouble(view, top, "not to disk: no room", "disk.dropped_space");
    add_trouble(view, top, "disk full", "disk.enospc");
    add_trouble(view, top, "roots failing now", "disk.roots_failing");
    add_trouble(view, top, "write failed", "disk.write_fail");
}

/* The tier that machines share, where there is one. */
static void add_shared(struct kvt_top_view *view, const struct top *top)
{
    uint64_t nodes = value(top, "remote.nodes"), down = value(top, "remote.nodes_down");

    if (!nodes)
        return;
    add(view, 1, "shared tier");
    add(view, down > 0, "  %-22s %14" PRIu64 "    %" PRIu64 " down", "nodes", nodes, down);
    add_count(view, top, "keys asked for", "remote.asked", 0);
    add_count(view, top, "bytes from there", "remote.got_bytes", 1);
    add_count(view, top, "bytes put there", "remote.put_bytes", 1);
    add_trouble(view, top, "no answer", "remote.unknown");
    add_trouble(view, top, "too late", "remote.deadline");
    add_trouble(view, top, "read failed", "remote.get_fail");
    add_trouble(view, top, "gone when read", "remote.gone");
    add_trouble(view, top, "damaged", "remote.bad");
    add_trouble(view, top, "no record of ours", "remote.refused");
    add_trouble(view, top, "not put: no room", "remote.put_full");
    add_trouble(view, top, "not put: failed", "remote.put_fail");
    add_trouble(view, top, "not put: queue", "remote.put_dropped");
    add_trouble(view, top, "log-in refused", "remote.auth_fails");
    add_trouble(view, top, "purges not complete", "remote.purge_fail");
}

static void add_space(struct kvt_top_view *view, const struct top *top)
{
    static const char *const tiers[][3] = {{"dram", "dram.bytes_used", "dram.bytes_max"},
                                           {"disk", "disk.bytes_used", "disk.bytes_max"}};
    char used[32], max[32], name[32];

    add(view, 1, "space");
    for (size_t i = 0; i < KVT_ARRAY_LEN(tiers); i++) {
        snprintf(name, sizeof(name), "%s.blocks", tiers[i][0]);
        add(view, 0, "  %-6s %10s of %-10s %10" PRIu64 " blocks", tiers[i][0],
            kvt_human_bytes(value(top, tiers[i][1]), used),
            kvt_human_bytes(value(top, tiers[i][2]), max), value(top, name));
    }
    add_count(view, top, "evicted from dram", "dram.evicted", 0);
    add_trouble(view, top, "  not on disk: gone", "dram.evicted_lost");
    add_count(view, top, "evicted from disk", "disk.evicted", 0);
}

/* Counters that moved and stand nowhere above: a newer store may have more than we know. */
static void add_others(struct kvt_top_view *view, const struct top *top)
{
    static const char *const shown[] = {"lookup.", "load.",  "store.",  "disk.",
                                        "dram.",   "index.", "writer.", "remote."};
    const char *name;
    json_t *number;
    unsigned n = 0;

    json_object_foreach(top->now, name, number)
    {
        size_t i = 0;
        while (i < KVT_ARRAY_LEN(shown) && strncmp(name, shown[i], strlen(shown[i])) != 0)
            i++;
        if (i < KVT_ARRAY_LEN(shown) || !json_is_integer(number) || !rise(top, name) ||
            n == OTHERS_MAX)
            continue;
        if (!n++)
            add(view, 1, "others that moved");
        add_count(view, top, name, name, 0);
    }
}

static void make_view(const struct top *top, struct kvt_top_view *view)
{
    view->count = 0;
    if (top->owner)
        add(view, 1, "%s: process %" PRId64 ", numbers of %.0f s ago", top->path, top->owner,
            top->age_s);
    else
        add(view, 1, "%s: no process; the last numbers, of %.0f s ago", top->path, top->age_s);
    add_loads(view, top);
    add_lookups(view, top);
    add_stores(view, top);
    add_shared(view, top);
    add_space(view, top);
    add_others(view, top);
}

/* ---- outputs ------------------------------------------------------------------------------- */

static int print_json(const struct top *top)
{
    uint64_t keys = value(top, "lookup.keys"), dram = value(top, "lookup.hits_dram"),
             disk = value(top, "lookup.hits_disk"), shared = value(top, "lookup.hits_remote"),
             stored = first_stored(value(top, "store.committed"), value(top, "store.replaced")),
             loaded = 0;
    json_t *rates = json_null(), *number;
    const char *name;

    for (size_t i = 0; i < KVT_ARRAY_LEN(loads); i++)
        loaded += value(top, loads[i]);
    if (top->period_s > 0) {
        rates = json_object();
        json_object_foreach(top->now, name, number) if (json_is_integer(number))
            json_object_set_new(rates, name, json_real(per_second(top, name)));
    }
    return kvt_cli_json(json_pack(
        "{s:s, s:o, s:f, s:f, s:f, s:{s:f, s:f, s:f, s:f}, s:O, s:o}", "dir", top->path,
        "owner_pid", top->owner ? json_integer(top->owner) : json_null(), "age_s", top->age_s,
        "period_s", top->period_s, "loaded_ratio", kvt_stats_percent(loaded, loaded + stored) / 100,
        "hit_ratio", "dram", kvt_stats_percent(dram, keys) / 100, "disk",
        kvt_stats_percent(disk, keys) / 100, "remote", kvt_stats_percent(shared, keys) / 100,
        "total", kvt_stats_percent(dram + disk + shared, keys) / 100, "counters", top->now,
        "per_second", rates));
}

static int print_plain(const struct top *top)
{
    struct kvt_top_view view;

    make_view(top, &view);
    errno = 0;
    for (unsigned i = 0; i < view.count; i++)
        printf("%s\n", view.line[i]);
    if (fflush(stdout) == 0 && !ferror(stdout))
        return KVT_EXIT_OK;
    if (errno != EINTR || !kvt_cli_interrupted())
        return KVT_EXIT_PROBLEM;
    clearerr(stdout); /* Ctrl-C in the middle of a line is the end that was asked for */
    return KVT_EXIT_OK;
}

static int wait_plain(int64_t seconds)
{
    for (int64_t i = 0; i < seconds * 10 && !kvt_cli_interrupted(); i++)
        (void)poll(NULL, 0, 100);
    return kvt_cli_interrupted();
}

/* A block of lines, or a JSON line, each interval, until a signal. */
static int run_plain(struct top *top, int json, int once)
{
    int rc;

    do {
        rc = json ? print_json(top) : print_plain(top);
        if (rc || once || wait_plain(top->interval_s))
            break;
        if (!json)
            putchar('\n');
        (void)sample(top); /* there was one: it stays when the file goes */
    } while (!kvt_cli_interrupted());
    return rc;
}

static void run_screen(struct top *top)
{
    struct kvt_top_view view;
    enum kvt_screen_event event;

    do {
        make_view(top, &view);
        kvt_screen_show(&view);
        event = kvt_screen_wait((int)top->interval_s * 1000);
        if (event == KVT_SCREEN_TIME)
            (void)sample(top);
    } while (event != KVT_SCREEN_QUIT);
}

/* Whether the words name something that may have numbers; else it is said what they name. */
static bool is_source(const char *path)
{
    struct stat st;

    if (kvt_stats_is_daemon(path))
        return true;
    if (stat(path, &st) != 0)
        kvt_cli_error(COMMAND, "%s: %s", path, strerror(errno));
    else if (S_ISSOCK(st.st_mode))
        kvt_cli_error(COMMAND, "%s is a socket; of a kvtierd behind it: kvtier top unix:%s", path,
                      path);
    else if (!S_ISDIR(st.st_mode))
        kvt_cli_error(COMMAND,
                      "%s is neither a store directory nor a socket; give the directory of the "
                      "first root, or unix:SOCKET of a kvtierd",
                      path);
    else if (access(path, R_OK | X_OK) != 0)
        kvt_cli_error(COMMAND, "%s: %s; ask as the user of the cache", path, strerror(errno));
    else
        return true;
    return false;
}

int kvt_cmd_top(int argc, char **argv)
{
    struct top top = {.interval_s = 2};
    int json = 0, once = 0;
    size_t words = 0;
    const struct kvt_cli_option options[] = {
        {.name = "once", .help = "print the numbers once, and end", .flag = &once},
        {.name = "interval",
         .metavar = "N",
         .help = "seconds between two looks; 2 by default",
         .number = &top.interval_s,
         .min = 1,
         .max = 3600},
        {.name = "json", .help = "one JSON object a look, each on a line", .flag = &json},
    };
    int rc = kvt_cli_parse(COMMAND, "DIR|unix:SOCKET [--once] [--interval N] [--json]", options,
                           KVT_ARRAY_LEN(options), &top.path, 1, 1, &words, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    if (!is_source(top.path))
        return KVT_EXIT_PROBLEM;
    if (sample(&top) && kvt_stats_is_daemon(top.path)) {
        kvt_cli_error(COMMAND, "%s", kvt_stats_why());
        return KVT_EXIT_PROBLEM;
    }
    if (!top.now) {
        kvt_cli_error(COMMAND,
                      "%s: no statistics there: no cache has written any (it does so in its first "
                      "root, after its first request)",
                      top.path);
        return KVT_EXIT_PROBLEM;
    }
    kvt_cli_catch_interrupt();
    int screen = !once && !json && isatty(STDOUT_FILENO) && isatty(STDIN_FILENO);
    if (screen && kvt_screen_open() == 0) {
        run_screen(&top);
        kvt_screen_close();
    } else {
        rc = run_plain(&top, json, once);
    }
    kvt_cli_interrupt_forget();
    json_decref(top.now);
    json_decref(top.before);
    return rc;
}
