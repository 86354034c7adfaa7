/* The production store under a simulated clock and a drive in memory, for `kvtier replay`. */
#ifndef KVT_TOOLS_REPLAY_STORE_H
#define KVT_TOOLS_REPLAY_STORE_H

#include <stdint.h>

#include "store/store.h"

struct replay_store;

struct replay_hits {
    uint32_t dram, disk; /* blocks of the leading run, by tier */
};

/* Room for that many blocks; disk 0: no drive. 0 or an error. */
int replay_store_open(uint64_t dram_blocks, uint64_t disk_blocks, struct replay_store **out);
void replay_store_close(struct replay_store *store);
/* A prompt comes at that time: what is there of it is loaded, the rest is stored. 0 or an error. */
int replay_store_prompt(struct replay_store *store, int64_t at_ms, const uint64_t *ids,
                        uint32_t count, struct replay_hits *hits);
/* Blocks written to the drive so far. */
uint64_t replay_store_written(const struct replay_store *store);

#endif
