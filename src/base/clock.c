/* The system's clocks as a struct kvt_clock. Threads: any; no state. */
#include "base/clock.h"

#include <stddef.h>
#include <time.h>

static int64_t monotonic_now_ns(void *ctx)
{
    struct timespec ts;

    (void)ctx;
    clock_gettime(CLOCK_MONOTONIC, &ts); /* cannot fail for this clock */
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

struct kvt_clock kvt_clock_system(void)
{
    return (struct kvt_clock){.now_ns = monotonic_now_ns, .ctx = NULL};
}

static int64_t wall_now_ns(void *ctx)
{
    struct timespec ts;

    (void)ctx;
    clock_gettime(CLOCK_REALTIME, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

struct kvt_clock kvt_clock_wall(void)
{
    return (struct kvt_clock){.now_ns = wall_now_ns, .ctx = NULL};
}
