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

struct kvt_remote_trial {
    uint64_t bytes; /* of the record that goes there and back */
    double put_s, get_s;
};

/* Put a record of a namespace that nobody else has, read it, compare it, remove it: what a cache
 * needs. write 0: only ask for one. 0; a negative code with a sentence. Blocks: seconds. */
__attribute__((warn_unused_result)) int kvt_remote_try(const struct kvt_remote_where *where,
                                                       int write, struct kvt_remote_trial *out,
                                                       char *error, size_t error_len);

#endif
