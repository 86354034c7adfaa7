/* One way to a store, for kvtier bench daemon: a cache, its namespace, a pool of blocks. Tools
 * only. */
#ifndef KVT_TOOLS_BENCH_DAEMON_H
#define KVT_TOOLS_BENCH_DAEMON_H

#include <stddef.h>
#include <stdint.h>

#include "kvtier/kvtier.h"

enum { KVT_BENCH_HEADS = 8, KVT_BENCH_TOKENS = 16, KVT_BENCH_DIM = 128, KVT_BENCH_BLOCKS = 1024 };
#define KVT_BENCH_BLOCK_BYTES (2ull * KVT_BENCH_HEADS * KVT_BENCH_TOKENS * KVT_BENCH_DIM * 2)
#define KVT_BENCH_BYTES (KVT_BENCH_BLOCKS * KVT_BENCH_BLOCK_BYTES)

struct kvt_bench_side {
    struct kvt_cache *cache;
    struct kvt_ns *ns;
    struct kvt_pool *pool;
    uint16_t *memory;
};

int64_t kvt_bench_now_ns(void);
/* options: of the cache, "key=value,...". 0, -1 (said); _close is due in any case. */
int kvt_bench_open(struct kvt_bench_side *side, const char *options);
void kvt_bench_close(struct kvt_bench_side *side);

/* Store or load all blocks, raw; blocks that are there then, seconds taken. */
size_t kvt_bench_move(struct kvt_bench_side *side, int store, double *seconds);
/* Seconds of a lookup of n keys that are all there; absurdly many when one is not. */
double kvt_bench_lookup(struct kvt_bench_side *side, uint32_t n);

/* `count` processes of this program load for `seconds` at a time, each over a cache of its own;
 * bytes a second of all together, 0 when one failed. */
double kvt_bench_clients(const char *options, unsigned count, int64_t seconds);

#endif
