/* A clock as a parameter, so that the simulator can own time. */
#ifndef KVT_BASE_CLOCK_H
#define KVT_BASE_CLOCK_H

#include <stdint.h>

struct kvt_clock {
    int64_t (*now_ns)(void *ctx); /* monotonic, nanoseconds */
    void *ctx;
};

static inline int64_t kvt_clock_now(const struct kvt_clock *clock)
{
    return clock->now_ns(clock->ctx);
}

/* CLOCK_REALTIME, nanoseconds since 1970: it goes back, and jumps. */
struct kvt_clock kvt_clock_wall(void);

/* CLOCK_MONOTONIC. */
struct kvt_clock kvt_clock_system(void);

#endif
