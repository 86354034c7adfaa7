/* What workers and GPU lanes share: what becomes of a block that was coded (coding.c).
 * Threads: whoever codes the block; kvt_coding_end() under the cache's lock.
 */
#ifndef KVT_CLIENT_CODING_H
#define KVT_CLIENT_CODING_H

#include <stdbool.h>
#include <stdint.h>

#include "client/choice.h"
#include "format/record.h"

struct kvt_block;
struct kvt_cache;
struct kvt_req;

enum kvt_outcome_kind { KVT_OUT_COMMIT, KVT_OUT_END, KVT_OUT_RETRY };

struct kvt_outcome {
    enum kvt_outcome_kind kind;
    int32_t status;         /* KVT_OUT_END: the block's */
    int32_t release_status; /* loads */
    bool nonfinite;
    bool reorigin_dropped;
    bool late;
    struct kvt_chosen chosen;
};

/* Whether the block may be coded now: *out is all zero but its kind. false: *out says why not
 * (cancelled, past the deadline). */
bool kvt_coding_begin(const struct kvt_cache *cache, const struct kvt_req *req,
                      struct kvt_outcome *out);
/* The header of a block about to be stored; its checksum is 0. */
void kvt_coding_header(const struct kvt_cache *cache, const struct kvt_req *req,
                       const struct kvt_block *block, struct kvt_record_header *header);
/* Choose the map of a block that is asked for at `level`. One that cools from a page of kv8 origin
 * and finds no map below kv8 becomes lossy: it stays as it is, or is stored again at kv8. */
void kvt_coding_map(const struct kvt_req *req, struct kvt_block *block, int level);
/* What to do about a block that its level cannot hold (KVT_E_GUARD, KVT_E_NONFINITE). */
struct kvt_outcome kvt_coding_escalate(const struct kvt_req *req, struct kvt_block *block,
                                       int code);
/* Remember what a page was loaded from. */
void kvt_coding_origin(const struct kvt_req *req, const struct kvt_block *block);
/* Hand a coded block on; lock held. kvt_pump() is due after it. */
void kvt_coding_end(struct kvt_cache *cache, int kind, struct kvt_block *block,
                    const struct kvt_outcome *out);

#endif
