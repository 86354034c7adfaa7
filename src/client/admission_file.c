/* What admission knows, kept across restarts: the file "admission" in each root.
 *
 * A state_file.h: what was left in the root's bucket (options write_budget, write_dwpd) and when,
 * and, with admission=value, how often blocks of each class were wanted again.
 *
 *   kvtier-admission 1
 *   left <bytes> <seconds since 1970>
 *   chance <uses> <place> <blocks of the class> <of them, wanted again>
 *   end <hash>
 *
 * Invariants: a budget holds across restarts. Once the root is in use the file is replaced by one
 * that says that nothing is left and no time passes: so a process that ends without closing leaves
 * an empty bucket, not the one that it found. What is damaged, or makes no sense, counts as never
 * written, and is said. There is a file only where a root has a budget, or admission is by value.
 * Does not keep how often single blocks were used (docs/decisions/0025).
 * Threads: the one that opens or closes the host; a root that is taken over later is read by the
 * thread that does so. Blocks on the file system.
 */
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "client/host.h"
#include "client/state_file.h"
#include "kvtier/error.h"

#define VERSION_LINE "kvtier-admission 1\n"
#define FILE_NAME "admission" /* the log knows it: KVT_L2_NAME_ADMISSION */
#define DAY_S 86400.0
#define LEFT_MAX 0x1p62

struct kept {
    double left, at; /* at 0: no time passes */
    bool chances_there;
    struct kvt_admission_chances chances;
};

static bool path_of(const struct kvt_host *host, uint32_t disk, char path[PATH_MAX])
{
    const struct kvt_settings *settings = host->settings;
    if (settings->admission != KVT_ADMIT_VALUE &&
        kvt_settings_root_writes(settings, host->roots[disk].cap_bytes) == 0)
        return false;
    return kvt_state_in_root(settings->disks[disk].path, FILE_NAME, path);
}

/* The next number of a line. false: there is none, or it is not finite. */
static bool take_number(const char **at, double *out)
{
    char *end;
    if (**at != ' ' || (*at)[1] == ' ')
        return false;
    *out = strtod(*at + 1, &end);
    if (end == *at + 1 || !isfinite(*out))
        return false;
    *at = end;
    return true;
}

static bool take_chance(struct kept *kept, const char *at)
{
    double uses, place, used, again;
    if (!take_number(&at, &uses) || !take_number(&at, &place) || !take_number(&at, &used) ||
        !take_number(&at, &again) || *at != '\0' || !(uses >= 0 && uses < KVT_ADMISSION_USES) ||
        !(place >= 0 && place < KVT_ADMISSION_PLACES))
        return false;
    kept->chances.used[(uint32_t)uses][(uint32_t)place] = used;
    kept->chances.again[(uint32_t)uses][(uint32_t)place] = again;
    kept->chances_there = true;
    return true;
}

static bool take_lines(struct kept *kept, char *lines)
{
    bool left = false;
    for (const char *line; (line = kvt_state_next(&lines)) != NULL;) {
        if (strncmp(line, "left", 4) == 0) {
            const char *at = line + 4;
            if (left || !take_number(&at, &kept->left) || !take_number(&at, &kept->at) ||
                *at != '\0' || fabs(kept->left) > LEFT_MAX || kept->at < 0)
                return false;
            left = true;
        } else if (strncmp(line, "chance", 6) != 0 || !take_chance(kept, line + 6)) {
            return false;
        }
    }
    return left;
}

/* false: there is no file; *bad: there is one, and it is of no use. */
static bool file_read(const char *path, struct kept *kept, bool *bad)
{
    struct kvt_state_text text;
    char *lines;
    *kept = (struct kept){.left = 0};
    int rc = kvt_state_read(path, VERSION_LINE, &text, &lines);
    *bad = false;
    if (rc == -ENOENT || rc == -ENOTDIR)
        return false;
    *bad = rc != 0 || !take_lines(kept, lines);
    return !*bad;
}

static void file_write(const struct kvt_host *host, const char *path, const struct kept *kept)
{
    struct kvt_state_text text;
    kvt_state_begin(&text, VERSION_LINE);
    kvt_state_add(&text, "left %a %.0f\n", kept->left, kept->at);
    for (uint32_t u = 0; kept->chances_there && u < KVT_ADMISSION_USES; u++)
        for (uint32_t p = 0; p < KVT_ADMISSION_PLACES; p++)
            if (kept->chances.used[u][p] > 0)
                kvt_state_add(&text, "chance %u %u %a %a\n", (unsigned)u, (unsigned)p,
                              kept->chances.used[u][p], kept->chances.again[u][p]);
    int rc = kvt_state_write(path, &text);
    if (rc != 0)
        kvt_log(&host->log, KVT_LOG_WARN,
                "%s was not written: %s; the write budget begins anew next time", path,
                kvt_strerror(rc));
}

void kvt_admission_file_read(struct kvt_host *host, uint32_t disk, struct kvt_root_state *root)
{
    char path[PATH_MAX];
    struct kept kept;
    bool bad;
    if (!path_of(host, disk, path))
        return;
    if (file_read(path, &kept, &bad)) {
        double day = (double)kvt_settings_root_writes(host->settings, root->cap_bytes);
        double since = kept.at > 0 ? (double)time(NULL) - kept.at : 0;
        root->write_left = kept.left + KVT_MAX(since, 0.0) / DAY_S * day;
        root->write_left_known = true;
    } else if (bad) {
        kvt_log(&host->log, KVT_LOG_WARN,
                "%s is damaged, or of another version: what was left of the write budget, and what "
                "admission had learnt, is forgotten",
                path);
    }
    pthread_mutex_lock(&host->lock);
    if (kept.chances_there && !bad && !host->chances_known) {
        host->chances = kept.chances;
        host->chances_known = true;
    }
    pthread_mutex_unlock(&host->lock);
}

void kvt_admission_file_mark(struct kvt_host *host, uint32_t disk)
{
    struct kept kept = {.left = 0};
    char path[PATH_MAX];
    if (!path_of(host, disk, path))
        return;
    pthread_mutex_lock(&host->lock);
    kept.chances_there = host->chances_known;
    kept.chances = host->chances;
    pthread_mutex_unlock(&host->lock);
    file_write(host, path, &kept);
}

void kvt_admission_kept(void *ctx, const struct kvt_admission *admission)
{
    struct kvt_host *host = ctx;
    for (uint32_t i = 0; i < KVT_DISKS_MAX; i++)
        host->kept_left[i] = kvt_admission_left_in(admission, i);
    kvt_admission_chances_get(admission, &host->chances);
    host->kept = true;
}

void kvt_admission_files_write(struct kvt_host *host)
{
    for (uint32_t i = 0; host->kept && i < host->settings->disk_count; i++) {
        struct kept kept = {.at = (double)time(NULL),
                            .chances_there = host->settings->admission == KVT_ADMIT_VALUE,
                            .chances = host->chances};
        int number = host->roots[i].number;
        char path[PATH_MAX];
        if (host->roots[i].io == NULL || number < 0 || number >= (int)KVT_DISKS_MAX ||
            !path_of(host, i, path))
            continue;
        kept.left = host->kept_left[number];
        file_write(host, path, &kept);
    }
}
