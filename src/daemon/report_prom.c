/* The daemon's numbers in Prometheus' text format.
 *
 * Counters of `stat` that say how something ended are one family each, told apart by tier, outcome
 * and reason; where a family counts every end, its sum is the denominator, else the help names it.
 * The other counters and gauges keep their own names. Times and sizes are histograms by operation
 * and tier. Invariants: each family is announced once and stands in one piece; buckets are
 * cumulative and end with +Inf. Threads: the server's.
 */
#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "daemon/report_impl.h"
#include "kvtier/error.h"
#include "kvtier/version.h"

#define NAME_MAX_BYTES 96u

/* ---- families of counters ------------------------------------------------------------------ */

struct part { /* one line of a family; family NULL: the same as the line before */
    const char *family, *help, *labels;
    size_t at;
};

#define AT(field) offsetof(struct kvt_store_stats, field)

static const struct part parts[] = {
    {"lookup_hits", "keys found, of kvtier_lookup_keys_total", "tier=\"dram\"",
     AT(lookup_hits_dram)},
    {NULL, NULL, "tier=\"disk\"", AT(lookup_hits_disk)},
    {"lookup_runs_ended", "lookups that ended before their last key", "reason=\"absent\"",
     AT(lookup_miss_absent)},
    {NULL, NULL, "reason=\"level\"", AT(lookup_miss_level)},
    {NULL, NULL, "reason=\"pending\"", AT(lookup_miss_pending)},
    {"load_blocks", "blocks asked for by loads: all of them", "tier=\"dram\",outcome=\"granted\"",
     AT(load_granted_dram)},
    {NULL, NULL, "tier=\"disk\",outcome=\"granted\"", AT(load_granted_disk)},
    {NULL, NULL, "tier=\"disk\",outcome=\"direct\"", AT(load_granted_direct)},
    {NULL, NULL, "tier=\"none\",outcome=\"miss\"", AT(load_miss)},
    {NULL, NULL, "tier=\"none\",outcome=\"deadline\"", AT(load_deadline)},
    {NULL, NULL, "tier=\"none\",outcome=\"canceled\"", AT(load_canceled)},
    {NULL, NULL, "tier=\"none\",outcome=\"no_slot\"", AT(load_no_slot)},
    {"load_runs_ended", "loads that ended at a block that is there, but not for them",
     "reason=\"pending\"", AT(load_miss_pending)},
    {NULL, NULL, "reason=\"level\"", AT(load_miss_level)},
    {"store_blocks", "blocks that stores asked a slot for: all of them", "outcome=\"granted\"",
     AT(alloc_granted)},
    {NULL, NULL, "outcome=\"exists\"", AT(alloc_exists)},
    {NULL, NULL, "outcome=\"dropped_dram\"", AT(alloc_dropped_dram)},
    {NULL, NULL, "outcome=\"dropped_chain\"", AT(alloc_dropped_chain)},
    {NULL, NULL, "outcome=\"dropped_index\"", AT(alloc_dropped_index)},
    {NULL, NULL, "outcome=\"dropped_purge\"", AT(alloc_purging)},
    {"commits", "slots that were given to stores and have come back", "outcome=\"ok\"",
     AT(commit_ok)},
    {NULL, NULL, "outcome=\"lost_race\"", AT(commit_lost)},
    {NULL, NULL, "outcome=\"bad_header\"", AT(commit_bad)},
    {NULL, NULL, "outcome=\"stale\"", AT(commit_stale)},
    {NULL, NULL, "outcome=\"aborted\"", AT(commit_aborted)},
    {"disk_dropped", "blocks not written to disk, beside kvtier_disk_written_blocks_total",
     "reason=\"queue\"", AT(disk_dropped_queue)},
    {NULL, NULL, "reason=\"space\"", AT(disk_dropped_space)},
    {NULL, NULL, "reason=\"error\"", AT(disk_dropped_error)},
    {"disk_lost", "blocks gone before they were written", "reason=\"deferred\"", AT(lost_deferred)},
    {NULL, NULL, "reason=\"queue\"", AT(lost_queue)},
    {NULL, NULL, "reason=\"error\"", AT(lost_error)},
    {"admission", "blocks that admission to disk was asked about: all of them", "outcome=\"taken\"",
     AT(admit_yes)},
    {NULL, NULL, "outcome=\"first_use\"", AT(admit_first)},
    {NULL, NULL, "outcome=\"low_value\"", AT(admit_value)},
    {NULL, NULL, "outcome=\"budget\"", AT(admit_budget)},
    {NULL, NULL, "outcome=\"random\"", AT(admit_random)},
    {NULL, NULL, "outcome=\"chain\"", AT(admit_chain)},
    {NULL, NULL, "outcome=\"last_block\"", AT(admit_last)},
    {"evicted_blocks", "blocks given up, by tier and reason", "tier=\"dram\",reason=\"room\"",
     AT(evict_dram_blocks)},
    {NULL, NULL, "tier=\"disk\",reason=\"segment\"", AT(evict_disk_blocks)},
    {NULL, NULL, "tier=\"disk\",reason=\"index\"", AT(evict_index_blocks)},
    {NULL, NULL, "tier=\"disk\",reason=\"orphan\"", AT(orphan_dropped)},
    {NULL, NULL, "tier=\"all\",reason=\"ttl\"", AT(ttl_expired)},
    {NULL, NULL, "tier=\"all\",reason=\"quota\"", AT(quota_evicted)},
    {NULL, NULL, "tier=\"all\",reason=\"purge\"", AT(purged_blocks)},
};

static uint64_t value_at(const struct kvt_store_stats *stats, size_t at)
{
    uint64_t value;
    memcpy(&value, (const char *)stats + at, sizeof(value));
    return value;
}

static bool in_family(size_t at)
{
    for (size_t i = 0; i < KVT_ARRAY_LEN(parts); i++)
        if (parts[i].at == at)
            return true;
    return false;
}

static void announce(struct kvt_text *text, const char *name, const char *kind, const char *help)
{
    kvt_say(text, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind);
}

static void say_families(struct kvt_text *text, const struct kvt_store_stats *stats)
{
    char name[NAME_MAX_BYTES] = "";
    for (size_t i = 0; i < KVT_ARRAY_LEN(parts); i++) {
        if (parts[i].family != NULL) {
            (void)snprintf(name, sizeof(name), "kvtier_%s_total", parts[i].family);
            announce(text, name, "counter", parts[i].help);
        }
        kvt_say(text, "%s{%s} %" PRIu64 "\n", name, parts[i].labels, value_at(stats, parts[i].at));
    }
}

/* "disk.read_bytes" -> "kvtier_disk_read_bytes"; counters end in _total. */
static void say_metric(struct kvt_text *text, const char *name, bool counter, const char *help,
                       uint64_t value)
{
    char metric[NAME_MAX_BYTES];
    size_t used =
        (size_t)snprintf(metric, sizeof(metric), "kvtier_%s%s", name, counter ? "_total" : "");
    for (size_t i = 0; i < used && i < sizeof(metric); i++)
        if (metric[i] == '.')
            metric[i] = '_';
    announce(text, metric, counter ? "counter" : "gauge", help);
    kvt_say(text, "%s %" PRIu64 "\n", metric, value);
}

static void say_store(struct kvt_text *text, const struct kvt_store_stats *stats)
{
    say_families(text, stats);
#define KVT_X(field, name, help) \
    if (!in_family(AT(field)))   \
        say_metric(text, name, true, help, stats->field);
    KVT_STORE_COUNTERS(KVT_X)
#undef KVT_X
#define KVT_X(field, name, help) say_metric(text, name, false, help, stats->field);
    KVT_STORE_GAUGES(KVT_X)
#undef KVT_X
}

/* ---- times and sizes ----------------------------------------------------------------------- */

struct kind {
    const char *op, *tier, *help;
    enum kvt_hist_unit unit;
};

static const struct kind kinds[KVT_HIST_KINDS] = {
#define KVT_X(name, op_, tier_, unit_, help_) \
    [KVT_HIST_##name] = {.op = (op_), .tier = (tier_), .help = (help_), .unit = KVT_HIST_##unit_},
    KVT_STORE_HISTS(KVT_X)
#undef KVT_X
};

/* Bounds and sums of times are told in seconds. */
static double told(enum kvt_hist_unit unit, uint64_t value)
{
    return unit == KVT_HIST_TIME ? (double)value * 1e-9 : (double)value;
}

static void say_hist(struct kvt_text *text, const char *family, const struct kind *kind,
                     const struct kvt_hist *hist)
{
    /* sizes end at 64 MiB: no record or batch is larger */
    const uint32_t bounds = kind->unit == KVT_HIST_TIME ? KVT_HIST_BOUNDS : 15;
    uint64_t count = 0, all = 0;
    for (uint32_t i = 0; i <= KVT_HIST_BOUNDS; i++)
        all += hist->buckets[i];
    for (uint32_t i = 0; i < bounds; i++) {
        count += hist->buckets[i];
        kvt_say(text, "%s_bucket{op=\"%s\",tier=\"%s\",le=\"%.12g\"} %" PRIu64 "\n", family,
                kind->op, kind->tier, told(kind->unit, kvt_hist_bound(kind->unit, i)), count);
    }
    kvt_say(text, "%s_bucket{op=\"%s\",tier=\"%s\",le=\"+Inf\"} %" PRIu64 "\n", family, kind->op,
            kind->tier, all);
    kvt_say(text, "%s_sum{op=\"%s\",tier=\"%s\"} %.17g\n", family, kind->op, kind->tier,
            told(kind->unit, hist->sum));
    kvt_say(text, "%s_count{op=\"%s\",tier=\"%s\"} %" PRIu64 "\n", family, kind->op, kind->tier,
            all);
}

static void say_hists(struct kvt_text *text, struct kvt_report *report)
{
    static const char *const families[] = {
        [KVT_HIST_TIME] = "kvtier_op_seconds", [KVT_HIST_SIZE] = "kvtier_op_bytes"};
    struct kvt_hist hists[KVT_HIST_KINDS];
    if (kvt_report_hists(report, hists) != 0)
        return;
    for (int unit = KVT_HIST_TIME; unit <= KVT_HIST_SIZE; unit++) {
        char help[512] = "";
        size_t used = 0;
        for (size_t i = 0; i < KVT_HIST_KINDS; i++)
            if ((int)kinds[i].unit == unit && kinds[i].help[0] != '\0')
                used += (size_t)snprintf(help + used, sizeof(help) - used, "%s%s: %s",
                                         used > 0 ? "; " : "", kinds[i].op, kinds[i].help);
        announce(text, families[unit], "histogram", help);
        for (size_t i = 0; i < KVT_HIST_KINDS; i++)
            if ((int)kinds[i].unit == unit)
                say_hist(text, families[unit], &kinds[i], &hists[i]);
    }
}

/* ---- who and where ------------------------------------------------------------------------- */

/* The value of a label: backslash, quote and newline are escaped. */
static void label_make(const char *value, char *out, size_t room)
{
    size_t used = 0;
    for (; *value != '\0' && used + 3 < room; value++) {
        if (*value == '\\' || *value == '"' || *value == '\n')
            out[used++] = '\\';
        out[used++] = *value == '\n' ? 'n' : *value;
    }
    out[used] = '\0';
}

static void say_usage(struct kvt_text *text, struct kvt_report *report)
{
    struct kvt_usage_row *rows = calloc(KVT_USAGE_MAX, sizeof(*rows));
    int count = rows == NULL ? 0 : kvt_report_usage(report, rows);
    announce(text, "kvtier_held_bytes", "gauge", "record bytes by namespace, rank and tier");
    for (int i = 0; i < count; i++) {
        char ns[2 * KVT_NS_BYTES + 1], model[2 * sizeof(rows->label) + 1];
        for (size_t j = 0; j < KVT_NS_BYTES; j++)
            (void)snprintf(ns + 2 * j, 3, "%02x", rows[i].ns[j]);
        rows[i].label[sizeof(rows[i].label) - 1] = '\0';
        label_make(rows[i].label, model, sizeof(model));
        for (int disk = 0; disk < 2; disk++)
            kvt_say(text,
                    "kvtier_held_bytes{namespace=\"%s\",model=\"%s\",group=\"%u\",rank=\"%u\","
                    "tier=\"%s\"} %" PRIu64 "\n",
                    ns, model, rows[i].group, rows[i].rank, disk ? "disk" : "dram",
                    disk ? rows[i].disk_bytes : rows[i].dram_bytes);
    }
    free(rows);
}

/* 1 where a root is in use and its writes do not fail. */
static void say_roots(struct kvt_text *text, struct kvt_host *host,
                      const struct kvt_numbers *numbers)
{
    announce(text, "kvtier_root_up", "gauge", "1: this disk root is in use, and writing works");
    pthread_mutex_lock(&host->lock);
    for (uint32_t i = 0; i < host->settings->disk_count; i++) {
        const struct kvt_root_state *root = &host->roots[i];
        char path[512];
        bool up = root->io != NULL && root->error == 0;
        if (up && root->number >= 0 && (uint32_t)root->number < numbers->roots_known)
            up = numbers->roots[root->number].failing == 0;
        label_make(root->path, path, sizeof(path));
        kvt_say(text, "kvtier_root_up{root=\"%" PRIu32 "\",path=\"%s\"} %d\n", i, path, up);
    }
    pthread_mutex_unlock(&host->lock);
}

static void say_server(struct kvt_text *text, const struct kvt_report *report)
{
    static const char refused[] = "kvtier_daemon_refused_total",
                      ended[] = "kvtier_daemon_clients_ended_total",
                      lost[] = "kvtier_daemon_log_lines_lost_total";
    struct kvt_server_stats stats;
    kvt_server_stats(report->server, &stats);
    say_metric(text, "daemon.clients", false, "programs connected",
               kvt_server_clients(report->server, NULL, 0));
    say_metric(text, "daemon.accepted", true, "connections of users that may connect",
               stats.accepted);
    if (report->out != NULL) {
        announce(text, lost, "counter", "lines of the log that nobody read in time");
        kvt_say(text, "%s %" PRIu64 "\n", lost,
                atomic_load_explicit(&report->out->lost, memory_order_relaxed));
    }
    announce(text, refused, "counter", "connections refused");
    kvt_say(text, "%s{reason=\"user\"} %" PRIu64 "\n", refused, stats.refused_peer);
    kvt_say(text, "%s{reason=\"version\"} %" PRIu64 "\n", refused, stats.refused_version);
    kvt_say(text, "%s{reason=\"full\"} %" PRIu64 "\n", refused, stats.refused_full);
    kvt_say(text, "%s{reason=\"greeting\"} %" PRIu64 "\n", refused, stats.bad_hello);
    announce(text, ended, "counter", "programs that have gone, or were disconnected");
    kvt_say(text, "%s{reason=\"left\"} %" PRIu64 "\n", ended, stats.left);
    kvt_say(text, "%s{reason=\"died\"} %" PRIu64 "\n", ended, stats.died);
    kvt_say(text, "%s{reason=\"broken\"} %" PRIu64 "\n", ended, stats.broken);
}

int kvt_report_metrics(struct kvt_report *report, char **out)
{
    struct kvt_text text = {malloc(KVT_TEXT_BYTES), 0};
    struct kvt_numbers numbers;
    if (text.bytes == NULL)
        return -ENOMEM;
    text.bytes[0] = '\0';
    int rc = kvt_report_numbers(report, &numbers);
    if (rc != 0) {
        free(text.bytes);
        return rc;
    }
    say_store(&text, &numbers.stats);
    say_hists(&text, report);
    say_metric(&text, "dram.huge_bytes", false, "bytes of DRAM that have huge pages",
               atomic_load_explicit(&report->host->huge_bytes, memory_order_relaxed));
    say_server(&text, report);
    say_roots(&text, report->host, &numbers);
    announce(&text, "kvtier_build_info", "gauge", "version of the kvtierd");
    kvt_say(&text, "kvtier_build_info{version=\"%s\"} 1\n", kvt_version());
    say_usage(&text, report); /* last: it is what a full text is cut short by */
    *out = text.bytes;
    return 0;
}
