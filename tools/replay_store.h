/* The production store under a simulated clock and a drive in memory, for `kvtier replay`. */
#ifndef KVT_TOOLS_REPLAY_STORE_H
#define KVT_TOOLS_REPLAY_STORE_H

#include <stdint.h>

#include "plan/admission.h"
#include "store/store.h"

struct replay_store;

struct replay_hits {
    uint32_t dram, disk; /* blocks of the leading run, by tier */
    uint32_t front;      /* of them, those in DRAM before the first one on disk */
};

/* Which blocks go to disk, and when; all zero: all of them, at once. */
struct replay_admission {
    int policy;              /* enum kvt_admit */
    int write;               /* enum kvt_write; 0: through */
    double share;            /* RANDOM: of the blocks, 0 to 1 */
    uint64_t blocks_per_day; /* write budget; 0: none */
    double token_s, block_s; /* VALUE: to compute a token, to load a block */
};

/* Room for that many blocks; disk 0: no drive. admission NULL: all. 0 or an error. */
int replay_store_open(uint64_t dram_blocks, uint64_t disk_blocks,
                      const struct replay_admission *admission, struct replay_store **out);
void replay_store_close(struct replay_store *store);
/* A prompt comes at that time: what is there of it is loaded, the rest is stored. 0 or an error. */
int replay_store_prompt(struct replay_store *store, int64_t at_ms, const uint64_t *ids,
                        uint32_t count, struct replay_hits *hits);
/* Blocks on the drive now. */
uint64_t replay_store_on_disk(const struct replay_store *store);
/* Blocks written to the drive so far, those that were moved included. */
uint64_t replay_store_written(const struct replay_store *store);

#endif
