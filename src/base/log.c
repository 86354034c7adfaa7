/* One formatted line to the user's log callback. Threads: any; no state. Lines are cut at 511
 * bytes. */
#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>

void kvt_log(const struct kvt_log *log, int level, const char *format, ...)
{
    char line[512];
    va_list args;

    if (!log || !log->fn || level > log->level_max)
        return;
    va_start(args, format);
    if (vsnprintf(line, sizeof line, format, args) < 0)
        line[0] = 0;
    va_end(args);
    log->fn(log->arg, level, line);
}
