/* A backend of the shared tier, spoken to directly: records made of numbers, requests one by one or
 * many at a time, waited for. Every helper asserts what must not fail, and that each request comes
 * back exactly once. */
#ifndef KVT_TESTS_REMOTE_HELP_H
#define KVT_TESTS_REMOTE_HELP_H

#include <stdbool.h>

#include "remote/remote.h"

#define REMOTE_HELP_BATCH 64u
#define REMOTE_HELP_DEADLINE_NS INT64_C(20000000000) /* a loaded machine's, not a promise */

/* Where backends log to that are opened from then on; fn NULL: nowhere. */
extern struct kvt_log remote_help_log;

struct remote_help {
    struct kvt_remote *remote;
    struct kvt_remote_params params;
    int64_t deadline_ns; /* of the requests that follow, and how long they say that blocks live */
    int64_t ttl_ns;
    int64_t took_ns; /* the last batch */
};

/* Open it; fails the test where that fails. auth, mac, ca: optional files. */
void remote_help_open(struct remote_help *help, const char *where, const char *auth,
                      const char *mac, const char *ca);
void remote_help_close(struct remote_help *help);

/* Key number i of namespace `ns`, and its record: `pages` pages of bytes that follow from both. */
struct kvt_full_key remote_help_key(uint8_t ns, uint64_t number);
void remote_help_record(uint8_t ns, uint64_t number, uint32_t pages, void *out);

/* Submit `count` requests and wait for all of them. */
void remote_help_do(struct remote_help *help, struct kvt_remote_req *reqs, uint32_t count);
/* One block; the status. get: the bytes are compared with what was put; 0 with others fails the
 * test. The record gets sequence 7 there. */
int remote_help_put(struct remote_help *help, uint8_t ns, uint64_t number, uint32_t pages,
                    bool replace);
int remote_help_get(struct remote_help *help, uint8_t ns, uint64_t number, uint32_t pages);
/* Numbers first.., all at a time: how many ended with 0, and the last other status (optional). */
uint32_t remote_help_put_many(struct remote_help *help, uint8_t ns, uint64_t first, uint32_t count,
                              uint32_t pages, int *other);
uint32_t remote_help_get_many(struct remote_help *help, uint8_t ns, uint64_t first, uint32_t count,
                              uint32_t pages, int *other);
/* How many of them are there, by one PROBE; its status in *status (optional). */
uint32_t remote_help_probe(struct remote_help *help, uint8_t ns, uint64_t first, uint32_t count,
                           int *status);
/* What a PROBE says of one key, or its own status where that is not 0. */
int remote_help_found(struct remote_help *help, uint8_t ns, uint64_t number);
/* Remove keys, or with count 0 the namespace; the status, and how many were there. */
int remote_help_drop(struct remote_help *help, uint8_t ns, uint64_t first, uint32_t count,
                     uint64_t *removed);

#endif
