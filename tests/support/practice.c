/* See practice.h. An abort (a sanitizer's too) prints the line as well; so does SIGTERM, from
 * whoever has no more time: then the point under way is nobody's failure. */
#include "support/practice.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static const char *practice;
static uint64_t tried, passed, bad;
static time_t began;

static void print_line(void)
{
    char line[160];
    int bytes =
        snprintf(line, sizeof line, "{\"%s\": {\"tried\": %" PRIu64 ", \"failed\": %" PRIu64 "}}\n",
                 practice, tried, bad + tried - passed);

    (void)fflush(stdout);
    if (write(STDOUT_FILENO, line, (size_t)bytes) < 0)
        return;
    practice = NULL;
}

static void at_exit(void)
{
    if (practice)
        print_line();
}

static void at_signal(int number)
{
    if (number == SIGTERM && tried > passed)
        tried--;
    if (practice)
        print_line();
    (void)signal(number, SIG_DFL);
    (void)raise(number);
}

void practice_begin(const char *name)
{
    practice = name;
    began = time(NULL);
    (void)signal(SIGABRT, at_signal);
    (void)signal(SIGTERM, at_signal);
    if (atexit(at_exit))
        abort();
}

void practice_point(void)
{
    tried++;
}

void practice_passed(void)
{
    passed++;
}

void practice_add(uint64_t points, uint64_t failed)
{
    tried += points;
    passed += points;
    bad += failed;
}

void practice_forget(void)
{
    practice = NULL;
}

int practice_goes_on(void)
{
    const char *seconds = getenv("KVT_SOAK_SECONDS");

    return seconds && time(NULL) - began < (time_t)strtoll(seconds, NULL, 10);
}
