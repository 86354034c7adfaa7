/* The file "stats" in a root: the owner's last numbers, as `stat` and `top` read them. Tools only.
 */
#ifndef KVT_TOOLS_STATS_FILE_H
#define KVT_TOOLS_STATS_FILE_H

#include <jansson.h>
#include <stdint.h>

/* An object of name to number (or text). age_s: optional, seconds since it was written. NULL: there
 * is no such file, or it is none that an owner wrote (a FIFO, a link). Never blocks. dir may be
 * "unix:PATH", a running kvtierd: asked, within seconds. */
json_t *kvt_stats_read(const char *dir, double *age_s);

/* Whether "dir" names a running kvtierd ("unix:PATH"), and why the last one gave no numbers. */
int kvt_stats_is_daemon(const char *dir);
const char *kvt_stats_why(void);

/* A counter's value, 0 when it is not there. */
uint64_t kvt_stats_value(const json_t *counters, const char *name);

/* part of whole in percent, 0 of 0. */
double kvt_stats_percent(uint64_t part, uint64_t whole);

#endif
