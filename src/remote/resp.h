/* RESP, the protocol of Redis and its kin, version 2: pure functions over bytes in memory. What a
 * server sends is not trusted: every length is bounded, nesting is. Threads: any. */
#ifndef KVT_REMOTE_RESP_H
#define KVT_REMOTE_RESP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVT_RESP_LINE_MAX 1024u /* of a header line, CRLF included; errors can be long */

struct kvt_resp_head {
    char type;        /* one of + - : $ * */
    int64_t number;   /* : the integer; $ bytes of the body, * elements; -1: nil */
    const char *text; /* of the line, behind the type; not terminated */
    size_t text_len;
};

/* The line that begins a value: bytes that it takes; 0 more are needed; -1 it is malformed. */
__attribute__((warn_unused_result)) long kvt_resp_head(const char *bytes, size_t len,
                                                       struct kvt_resp_head *out);

/* Bytes of the whole value that begins here, elements and all; 0; -1. */
__attribute__((warn_unused_result)) long kvt_resp_whole(const char *bytes, size_t len);

/* One string, out of a whole value: $ or + gives its bytes, : its digits. Bytes taken, or -1. */
__attribute__((warn_unused_result)) long kvt_resp_string(const char *bytes, size_t len,
                                                         const char **text, size_t *text_len);

/* CRC16 of a key, as it places keys in a cluster: 0 to 16383. Braces in keys are not looked at:
 * ours have none. */
#define KVT_RESP_SLOTS 16384u
uint16_t kvt_resp_slot(const char *name, size_t len);

/* The answer to CLUSTER SLOTS, range by range: `each` gets first and last slot, then host and port
 * of the master (place 0) and of each of its replicas (1 and up). false: it is malformed; some
 * ranges may have been given. */
__attribute__((warn_unused_result)) bool
kvt_resp_slots(const char *bytes, size_t len,
               void (*each)(void *ctx, uint32_t first, uint32_t last, uint32_t place,
                            const char *host, size_t host_len, uint32_t port),
               void *ctx);

#endif
