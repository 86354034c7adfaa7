/* What an operator says of single namespaces (option ns_limit), for struct kvt_store_params.
 * Threads: immutable while a store uses it.
 */
#ifndef KVT_FORMAT_NS_RULES_H
#define KVT_FORMAT_NS_RULES_H

#include <stdbool.h>
#include <stdint.h>

#include "kvtier/layout.h"

#define KVT_NS_RULES_MAX 64u
#define KVT_NS_LABEL_BYTES 64u /* of a model's name, as namespaces carry it */

struct kvt_ns_rule {
    bool by_id;               /* else by label: every namespace of that model */
    uint8_t id[KVT_NS_BYTES]; /* known from the first record on that recovery finds; a label is
                                 known once a program has opened the namespace */
    char label[KVT_NS_LABEL_BYTES];
    uint64_t quota_bytes; /* of records, all groups together; 0: nothing is said */
    int64_t ttl_ns;       /* 0: nothing is said */
};

#endif
