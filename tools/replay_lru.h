/* The baseline of `kvtier replay`: what least recently used would have found. Two lists of blocks,
 * DRAM and disk, each with a hard size; a block that comes is written to both; one that is used is
 * the newest in both, so that they find what one list as large as the larger of them finds. With
 * the sum of both as dram_blocks, and no disk: one list in which a block stands once. Of a request
 * the last block is used first, so that chains go from their end. Nothing else: no frequencies, no
 * chains, no segments. Tools only. */
#ifndef KVT_TOOLS_REPLAY_LRU_H
#define KVT_TOOLS_REPLAY_LRU_H

#include "replay_store.h"
#include "replay_trace.h"

/* Blocks hit, all requests together; each in hits, when that is not NULL. -1 no memory, or
 * interrupted.
 */
int64_t replay_lru(const struct replay_trace *trace, uint64_t dram_blocks, uint64_t disk_blocks,
                   struct replay_hits *hits);

#endif
