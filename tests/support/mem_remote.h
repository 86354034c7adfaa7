/* A shared tier in memory, for tests of the store half: one map that several stores may use at a
 * time, completions that the test can hold back, and answers that it can make wrong. No threads:
 * a request is carried out when it is reaped. */
#ifndef KVT_TESTS_MEM_REMOTE_H
#define KVT_TESTS_MEM_REMOTE_H

#include <stdbool.h>

#include "remote/remote.h"

#define MEM_REMOTE_OBJECTS 4096u

struct mem_object {
    struct kvt_full_key key;
    uint8_t *record;
    uint32_t record_bytes;
};

struct mem_tier { /* what several machines share */
    struct mem_object objects[MEM_REMOTE_OBJECTS];
    uint32_t count;
    uint32_t room; /* objects that it takes; 0: as many as there are */
};

struct mem_remote { /* one machine's way to it */
    struct kvt_remote remote;
    struct mem_tier *tier;
    struct kvt_remote_req *queue, *last;
    bool hold;       /* nothing completes */
    bool hold_drops; /* none of these does */
    bool refuse;     /* submit says -EAGAIN */
    int fail;        /* every request ends with this */
    uint32_t flips;  /* bytes of the next GETs that are wrong: one each */
    uint32_t probes, probed, gets, puts, drops; /* requests carried out; keys probed */
    int64_t ttl_ns[KVT_REMOTE_PUT + 1];         /* by operation: what the last one said */
    bool stopped;
};

void mem_remote_init(struct mem_remote *remote, struct mem_tier *tier);
struct mem_object *mem_tier_find(struct mem_tier *tier, const struct kvt_full_key *key);
void mem_tier_free(struct mem_tier *tier);

#endif
