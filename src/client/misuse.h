/* Why a call was refused, as one sentence for the log: code says what kind of mistake, this says
 * which argument. Called only after a refusal, never on the data path's good way. */
#ifndef KVT_CLIENT_MISUSE_H
#define KVT_CLIENT_MISUSE_H

#include "client/client.h"

/* Log "CALL: refused: SENTENCE". code: what the call returns. layout, desc, identity: what was
 * given, or NULL where the call has no such argument. */
void kvt_misuse_setup(const struct kvt_cache *cache, const char *call, int code,
                      const struct kvt_identity *identity, const struct kvt_layout *layout,
                      const struct kvt_pool_desc *desc);

struct kvt_misuse_request {
    const char *call;
    const struct kvt_ns *ns;
    const struct kvt_pool *pool;
    const struct kvt_key *keys;
    const uint32_t *ids;
    size_t n;
    const struct kvt_store_opts *store; /* as read, or NULL */
    const struct kvt_load_opts *load;
};
void kvt_misuse_request(const struct kvt_misuse_request *ask, int code);

/* "CALL: refused: ..." for what only the caller can tell apart. level: enum kvt_log_level. */
__attribute__((format(printf, 4, 5))) void
kvt_misuse_say(const struct kvt_cache *cache, int level, const char *call, const char *format, ...);

/* For the calls that take keys alone. */
void kvt_misuse_keys(const char *call, const struct kvt_ns *ns, const struct kvt_key *keys,
                     size_t n, int code);

#endif
