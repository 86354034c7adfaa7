/* Reads the file "stats" of a root: lines "name value", padded with newlines, written in place by
 * the owner every two seconds while something happens. A reader may see a mixture of two states.
 * "unix:PATH" names a kvtierd instead, which is asked for the same lines.
 * Threads: one.
 */
#include "stats_file.h"

#include "client/link.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static char daemon_why[512];

int kvt_stats_is_daemon(const char *dir)
{
    return strncmp(dir, "unix:", strlen("unix:")) == 0;
}

static void add_line(json_t *counters, char *line)
{
    char *space = strchr(line, ' '), *end;

    if (!space)
        return;
    *space = '\0';
    errno = 0;
    unsigned long long value = strtoull(space + 1, &end, 10);
    if (space[1] >= '0' && space[1] <= '9' && !*end && !errno)
        json_object_set_new(counters, line, json_integer((json_int_t)value));
    else
        json_object_set_new(counters, line, json_string(space + 1));
}

/* The same lines, from a daemon at work. NULL: why holds a sentence. */
static json_t *read_daemon(const char *path)
{
    char why[512], *text = NULL, *rest;

    if (kvt_link_ask(path, "stat", &text, why, sizeof(why)) != 0) {
        snprintf(daemon_why, sizeof(daemon_why), "%s", why);
        return NULL;
    }
    json_t *counters = json_object();
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        add_line(counters, line);
    free(text);
    return counters;
}

const char *kvt_stats_why(void)
{
    return daemon_why;
}

json_t *kvt_stats_read(const char *dir, double *age_s)
{
    char name[PATH_MAX], line[256];
    struct timespec now;
    struct stat st;

    if (kvt_stats_is_daemon(dir)) {
        if (age_s)
            *age_s = 0;
        return read_daemon(dir + strlen("unix:"));
    }
    if (snprintf(name, sizeof(name), "%s/stats", dir) >= (int)sizeof(name))
        return NULL;
    /* Not blocking: a FIFO of that name has no reader to wait for, and is not what we wrote. */
    int fd = open(name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    FILE *f = fd < 0 || fstat(fd, &st) || !S_ISREG(st.st_mode) ? NULL : fdopen(fd, "r");
    if (!f) {
        if (fd >= 0)
            close(fd);
        return NULL;
    }
    json_t *counters = json_object();
    while (fgets(line, sizeof(line), f)) {
        line[strcspn(line, "\n")] = '\0';
        add_line(counters, line);
    }
    fclose(f);
    if (age_s) {
        clock_gettime(CLOCK_REALTIME, &now);
        *age_s = (double)(now.tv_sec - st.st_mtim.tv_sec) +
                 (double)(now.tv_nsec - st.st_mtim.tv_nsec) * 1e-9;
    }
    return counters;
}

uint64_t kvt_stats_value(const json_t *counters, const char *name)
{
    return (uint64_t)json_integer_value(json_object_get(counters, name));
}

double kvt_stats_percent(uint64_t part, uint64_t whole)
{
    return whole ? 100.0 * (double)part / (double)whole : 0;
}
