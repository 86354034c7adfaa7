/* What commands do in a tier that machines share: remove namespaces, and try whether it works.
 * Tools only. */
#ifndef KVT_TOOLS_REMOTE_TOOL_H
#define KVT_TOOLS_REMOTE_TOOL_H

#include <stddef.h>
#include <stdint.h>

#include "kvtier/layout.h"

struct kvt_remote_where { /* as the options of these names; NULL: none */
    const char *url, *auth_file, *mac_file, *ca_file;
};

/* Remove namespaces there. *removed: records that went, also where it fails. 0; a negative code,
 * and error holds one sentence that names the address. Blocks: a minute for each at most. */
__attribute__((warn_unused_result)) int kvt_remote_purge(const struct kvt_remote_where *where,
                                                         const uint8_t (*ns)[KVT_NS_BYTES],
                                                         size_t count, uint64_t *removed,
                                                         char *error, size_t error_len);

/* How long a first answer is waited for: the look-ups' deadline, and never less than connecting may
 * take: a cache connects in the background. */
static inline int64_t kvt_remote_patience(int64_t deadline_ns)
{
    const int64_t connect_ns = INT64_C(2000000000);

    return deadline_ns > connect_ns ? deadline_ns : connect_ns;
}

struct kvt_remote_trial {
    char about[160]; /* what answers: "Redis 7.0.15, one server"; "": a directory, or not told */
    uint64_t bytes;  /* of the record that goes there and back */
    double answer_s, put_s, get_s;
};

/* Put a record of a namespace that nobody else has, read it, compare it, remove it: what a cache
 * needs. write 0: only ask for one. answer_ns: how long the first answer may take, connecting
 * included. 0; a negative code with a sentence. Blocks: so long and a second, and with write for
 * some seconds more; also where a resolver or a file server hangs: a thread is left to it then, and
 * what it has is never given back. */
__attribute__((warn_unused_result)) int kvt_remote_try(const struct kvt_remote_where *where,
                                                       int write, int64_t answer_ns,
                                                       struct kvt_remote_trial *out, char *error,
                                                       size_t error_len);

#endif
