/* Prompts of the last second, so that one that is asked about again (schedulers ask at every step)
 * counts once. What is forgotten too early counts twice, and no more than that. Threads: the
 * owner's. Internal to the client. */
#ifndef KVT_CLIENT_RECENT_H
#define KVT_CLIENT_RECENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVT_RECENT_PROMPTS 64u
#define KVT_RECENT_NS INT64_C(1000000000)

struct kvt_recent {
    struct {
        uint64_t id;
        int64_t at_ns;
    } last[KVT_RECENT_PROMPTS];
};

/* Whether the prompt of that id (not 0, evenly spread) was asked about within the last second.
 * Remembers that it is now. */
static inline bool kvt_recent_again(struct kvt_recent *recent, uint64_t id, int64_t now_ns)
{
    size_t at = id % KVT_RECENT_PROMPTS;
    bool again = recent->last[at].id == id && now_ns - recent->last[at].at_ns < KVT_RECENT_NS;
    recent->last[at].id = id;
    recent->last[at].at_ns = now_ns;
    return again;
}

#endif
