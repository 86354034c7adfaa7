/* What a cache's numbers mean to who runs it: is it working, is it paying, is the data safe. Tools
 * only. */
#ifndef KVT_TOOLS_STAT_VERDICT_H
#define KVT_TOOLS_STAT_VERDICT_H

#include <jansson.h>
#include <stdint.h>

struct kvt_stat_facts {
    const char *path;
    const json_t *counters; /* kvt_stats_read(), NULL: none */
    int64_t owner_pid;      /* 0: nobody */
    int daemon;             /* a kvtierd answered, which serves `clients` programs */
    uint64_t clients;
    uint64_t records, bytes, bytes_used, bytes_max, unreachable, recovered_bad;
    uint32_t block_tokens; /* of every namespace; 0: not known, or not the same */
};

/* An array of {question: "working" | "paying" | "safe", state: "ok" | "note" | "warn", text,
 * remedy (where there is one)}. */
json_t *kvt_stat_verdicts(const struct kvt_stat_facts *facts);

void kvt_stat_verdicts_print(const json_t *verdicts);

/* What a counter counts, as the library says it; NULL: not known here. */
const char *kvt_stat_help(const char *name);

#endif
