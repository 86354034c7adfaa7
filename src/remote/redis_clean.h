/* Keeping each namespace on a server within a size: what the cleaner knows. See redis_clean.c.
 * Internal to redis*.c. */
#ifndef KVT_REMOTE_REDIS_CLEAN_H
#define KVT_REMOTE_REDIS_CLEAN_H

#include <stdbool.h>
#include <stdint.h>

#include "format/record.h"

#define REDIS_CURSOR 192u       /* a number; of Kvrocks, by option, a sign and a name */
#define REDIS_CLEAN_NAMES 4096u /* of one reply to SCAN */
#define REDIS_CLEAN_SPACES 1024u
#define REDIS_CLEAN_AGES 96u
#define REDIS_CLEAN_LEASE "kvt0:cleaner"

struct redis_clean_name {
    uint32_t at, len; /* in `text` */
    uint32_t space;
    int64_t idle_s, bytes; /* -1: not known */
};

struct redis_clean_space { /* a namespace */
    char ns[2 * KVT_NS_BYTES + 1];
    uint64_t bytes, ages[REDIS_CLEAN_AGES]; /* of this walk */
    uint64_t to_go;                         /* as the last one has found */
    uint32_t limit;                         /* what is younger stays */
};

enum redis_clean_state {
    CLEAN_REST,
    CLEAN_ELECT, /* whose lease is it? */
    CLEAN_SCAN,  /* names are asked for */
    CLEAN_ASK,   /* how long unused, how long */
    CLEAN_DROP
};

struct redis_clean {
    uint64_t cap_bytes; /* of each namespace; 0: nobody cleans, and the rest is not there */
    int64_t period_ns;
    enum redis_clean_state state;
    bool ours;               /* the lease */
    bool walking;            /* a walk is under way */
    bool no_idle, no_memory; /* the server does not tell */
    bool by_length;          /* so the sizes of this page were asked for */
    bool told, full_told;
    uint32_t left; /* commands under way */
    uint32_t node; /* being walked */
    uint32_t salt; /* of what stands for ages where there are none */
    int64_t next_ns, renewed_ns, pace_ns, began_ns, walk_ns;
    char token[96], holder[96];
    char cursor[REDIS_CURSOR];
    char *text; /* a copy of the last reply to SCAN */
    struct redis_clean_name *names;
    uint32_t name_count;
    struct redis_clean_space *spaces;
    uint32_t space_count;
};

/* How long unused, as a place in a histogram: four to a doubling. Pure. */
uint32_t redis_clean_age(int64_t idle_s);
/* "kvt0:<namespace>:<hash>:<group>:<shard>". Pure. */
bool redis_clean_is_record(const char *name, uint32_t len);

#endif
