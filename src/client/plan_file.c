/* What kvt_plan() has learnt, kept across restarts: the file "plan" in the first root, or the one
 * that the option "plan_file" names.
 *
 * A state_file.h of one state: a line for each tier, each root and each namespace. It is written at
 * close and read at open; what is damaged, of another version, or holds a number that makes no
 * sense is ignored as a whole, counted, and replaced at the next close. It is a start value and no
 * more: what is measured then goes first.
 *
 *   kvtier-plan 1
 *   tier <enum kvt_tier> <latency, s> <seconds a byte>       (DISK: roots that are not named)
 *   root <hash of its path> <latency, s> <seconds a byte>    (of a kvtierd: of its number)
 *   prefill <namespace> <seconds a token> <seconds a token squared>
 *   end <hash>
 *
 * Threads: the one that opens, or closes, the cache. Not with plan=deterministic, which goes by the
 * options; nor with a store in another process, unless the option names a file.
 */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/checked.h"
#include "client/client.h"
#include "client/state_file.h"
#include "kvtier/error.h"

#define VERSION_LINE "kvtier-plan 1\n"
#define LATENCY_MAX 60.0 /* seconds; beyond, and outside the next two, it is nonsense */
#define PER_BYTE_MAX 1e-2
#define TOKEN_MIN 1e-9
#define TOKEN_MAX 100.0

static bool path_of(const struct kvt_cache *cache, char path[PATH_MAX])
{
    const struct kvt_settings *settings = cache->settings;
    if (settings->plan == KVT_PLAN_SET_DETERMINISTIC)
        return false;
    if (settings->plan_file[0] != '\0')
        return snprintf(path, PATH_MAX, "%s", settings->plan_file) < PATH_MAX;
    if (cache->remote || settings->disk_count == 0)
        return false;
    return kvt_state_in_root(settings->disks[0].path, "plan", path);
}

/* ---- reading ------------------------------------------------------------------------------- */

static bool within(double value, double low, double high)
{
    return value >= low && value <= high; /* false for what is no number */
}

/* Two numbers, a space before each, and the end of the line. */
static bool take_pair(const char *at, double *a, double *b)
{
    char *end;
    if (at[0] != ' ' || at[1] == ' ')
        return false;
    *a = strtod(at + 1, &end);
    if (end == at + 1 || end[0] != ' ' || end[1] == ' ')
        return false;
    at = end + 1;
    *b = strtod(at, &end);
    return end != at && *end == '\0';
}

static bool take_hex(const char *at, uint8_t *id, size_t bytes)
{
    for (size_t i = 0; i < 2 * bytes; i++) {
        const char *digit = at[i] != '\0' ? strchr("0123456789abcdef", at[i]) : NULL;
        if (digit == NULL)
            return false;
        size_t value = (size_t)(digit - "0123456789abcdef");
        id[i / 2] = (uint8_t)(i % 2 ? id[i / 2] | value : value << 4);
    }
    return true;
}

static bool sensible(const struct kvt_fit_line *line)
{
    return within(line->p, 0, LATENCY_MAX) && within(line->q, KVT_KEPT_PER_BYTE_MIN, PER_BYTE_MAX);
}

/* Latency and seconds a byte. */
static bool take_rate(const char *at, struct kvt_fit_line *line)
{
    return take_pair(at, &line->p, &line->q) && sensible(line);
}

static bool take_root(struct kvt_planning *planning, const char *line)
{
    uint8_t key[sizeof(uint64_t)];
    if (planning->kept_roots_count == KVT_KEPT_ROOTS_MAX)
        return false;
    struct kvt_kept_root *kept = &planning->kept_roots[planning->kept_roots_count];
    if (!take_hex(line, key, sizeof(key)) || !take_rate(line + 2 * sizeof(key), &kept->line))
        return false;
    kept->key = 0;
    for (size_t i = 0; i < sizeof(key); i++)
        kept->key = kept->key << 8 | key[i];
    planning->kept_roots_count++;
    return true;
}

static bool take_line(struct kvt_planning *planning, const char *line)
{
    double a, b;
    if (strncmp(line, "tier ", 5) == 0) {
        int tier = line[5] - '0';
        struct kvt_fit_line rate = {.p = 0};
        if ((tier != KVT_TIER_DRAM && tier != KVT_TIER_DISK) || !take_rate(line + 6, &rate))
            return false;
        planning->kept_tier[tier] = rate;
        return true;
    }
    if (strncmp(line, "root ", 5) == 0)
        return take_root(planning, line + 5);
    if (strncmp(line, "prefill ", 8) != 0 || planning->kept_count == KVT_KEPT_MAX)
        return false;
    struct kvt_kept *kept = &planning->kept[planning->kept_count];
    if (!take_hex(line + 8, kept->id, sizeof(kept->id)) ||
        !take_pair(line + 8 + 2 * KVT_NS_BYTES, &a, &b) || !within(a, TOKEN_MIN, TOKEN_MAX) ||
        !within(b, 0, TOKEN_MAX))
        return false;
    kept->a = a;
    kept->b = b;
    planning->kept_count++;
    return true;
}

static bool take_lines(struct kvt_planning *planning, char *lines)
{
    for (const char *line; (line = kvt_state_next(&lines)) != NULL;)
        if (!take_line(planning, line))
            return false;
    return true;
}

int kvt_plan_file_check(const char *path, char *error, size_t error_len)
{
    struct stat st;
    if (path[0] == '\0' || stat(path, &st) != 0 || !S_ISDIR(st.st_mode))
        return 0;
    (void)snprintf(error, error_len, "plan_file: %.400s is a directory; name a file in it", path);
    return KVT_E_CONFIG_VALUE;
}

void kvt_plan_file_read(struct kvt_cache *cache)
{
    struct kvt_planning *planning = &cache->planning;
    char path[PATH_MAX], *lines;
    struct kvt_state_text text;
    if (!path_of(cache, path))
        return;
    int place = cache->settings->plan_file[0] != '\0' ? kvt_state_place(path) : 0;
    if (place != 0) {
        kvt_log(&cache->log, KVT_LOG_WARN,
                "plan_file: %s: %s: it is left alone, and what plans learn is not kept", path,
                place == KVT_E_NOT_OURS ? "what is there (or at this path with .tmp) is no file of "
                                          "plans"
                                        : kvt_strerror(place));
        return;
    }
    int rc = kvt_state_read(path, VERSION_LINE, &text, &lines);
    if (rc == -ENOENT || rc == -ENOTDIR) /* a root that is no directory is said elsewhere */
        return;
    if (rc == 0 && take_lines(planning, lines)) {
        cache->counters.plan_file_read++;
        return;
    }
    memset(planning->kept_tier, 0, sizeof(planning->kept_tier));
    planning->kept_count = planning->kept_roots_count = 0;
    cache->counters.plan_file_bad++;
    kvt_log(&cache->log, KVT_LOG_WARN,
            "%s is damaged, or of another version: what plans had learnt is forgotten", path);
}

/* ---- writing ------------------------------------------------------------------------------- */

static void compose(const struct kvt_planning *planning, struct kvt_state_text *text)
{
    kvt_state_begin(text, VERSION_LINE);
    for (int tier = KVT_TIER_DRAM; tier <= KVT_TIER_DISK; tier++) {
        const struct kvt_fit_line *line = &planning->kept_tier[tier];
        if (sensible(line))
            kvt_state_add(text, "tier %d %a %a\n", tier, line->p, line->q);
    }
    for (uint32_t i = 0; i < planning->kept_roots_count; i++) {
        const struct kvt_kept_root *kept = &planning->kept_roots[i];
        if (sensible(&kept->line))
            kvt_state_add(text, "root %016" PRIx64 " %a %a\n", kept->key, kept->line.p,
                          kept->line.q);
    }
    for (uint32_t i = 0; i < planning->kept_count; i++) {
        const struct kvt_kept *kept = &planning->kept[i];
        if (!within(kept->a, TOKEN_MIN, TOKEN_MAX) || !within(kept->b, 0, TOKEN_MAX))
            continue;
        kvt_state_add(text, "prefill ");
        for (size_t byte = 0; byte < KVT_NS_BYTES; byte++)
            kvt_state_add(text, "%02x", kept->id[byte]);
        kvt_state_add(text, " %a %a\n", kept->a, kept->b);
    }
}

/* The first root is another process's, or out of order: so is its file. */
static bool first_root_is_ours(struct kvt_cache *cache)
{
    if (cache->settings->plan_file[0] != '\0')
        return true;
    pthread_mutex_lock(&cache->host.lock);
    bool ours = cache->host.roots[0].number >= 0 && cache->host.roots[0].io != NULL;
    pthread_mutex_unlock(&cache->host.lock);
    return ours;
}

void kvt_plan_file_write(struct kvt_cache *cache)
{
    char path[PATH_MAX];
    struct kvt_state_text text;
    if (!path_of(cache, path) || !first_root_is_ours(cache) || !kvt_planning_keep_all(cache))
        return;
    compose(&cache->planning, &text);
    int rc = kvt_state_write(path, &text);
    if (rc != 0)
        kvt_log(&cache->log, KVT_LOG_WARN, "%s was not written: %s; plans begin anew next time",
                path, kvt_strerror(rc));
}
