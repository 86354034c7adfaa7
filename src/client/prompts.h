/* What lookups tell: each prompt that an engine asks about goes to the recorder (option "trace"),
 * and in shadow mode (option "shadow") to an account of what loading it would have saved.
 * Internal to the client. */
#ifndef KVT_CLIENT_PROMPTS_H
#define KVT_CLIENT_PROMPTS_H

#include "client/client.h"
#include "client/recent.h"

struct kvt_prompts {
    struct kvt_recent recent;
};

/* What the options ask for. 0, or a negative error with a sentence. Before threads are there. */
int kvt_prompts_open(struct kvt_cache *cache, char *error, size_t error_len)
    __attribute__((warn_unused_result));
void kvt_prompts_close(struct kvt_cache *cache);

/* Write the prompt to the trace, where there is one. Lock held, and let go meanwhile. */
void kvt_prompts_record(struct kvt_ns *ns, const struct kvt_key *keys, size_t n,
                        uint64_t prompt_tokens);

/* Shadow mode, instead of kvt_call_lookup(): looks, counts what loading would have saved, touches
 * what it would have loaded, and finds nothing: 0 or a negative error. Lock held. */
long kvt_shadow_lookup(struct kvt_ns *ns, const struct kvt_key *keys, size_t n,
                       const struct kvt_lookup_opts *opts);
/* The same for a hit of `tokens` that kvt_lookup_groups() has found; chain: of full attention. */
void kvt_shadow_groups(struct kvt_ns *ns, const struct kvt_group_chain *chain, uint64_t tokens,
                       uint64_t prompt_tokens);

#endif
