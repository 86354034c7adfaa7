/* What `kvtier bench index` measures on: a root of many small records, and the keys in it. */
#ifndef KVT_TOOLS_BENCH_INDEX_H
#define KVT_TOOLS_BENCH_INDEX_H

#include <stdint.h>

#include "kvtier/kvtier.h"

struct kvt_bench_root {
    const char *path;
    uint64_t blocks;
    uint64_t chain; /* blocks of one chain; block i continues i - 1 unless i is a multiple */
};

/* The cap that the root is made and opened with: its blocks, and a twentieth to spare. */
uint64_t kvt_bench_root_cap(const struct kvt_bench_root *root);

/* Identity and layout of the one namespace: a record at kv4 is one page. */
void kvt_bench_root_space(struct kvt_identity *identity, struct kvt_layout *layout);

/* Key of block i; from `blocks` on they are absent. */
void kvt_bench_root_key(uint64_t i, struct kvt_key *key);

/* Make the root: the library makes an empty one, then sealed segments are written into it: header,
 * footer, trailer; the records themselves are holes, since opening reads none of them. path must be
 * empty or absent. 0; -ECANCELED interrupted; -errno or KVT_E_*. Blocks. */
int kvt_bench_root_make(const struct kvt_bench_root *root);

/* Drop the page cache of the root's files. Returns the bytes of them that are still cached, or
 * -errno. */
int64_t kvt_bench_root_drop_cache(const struct kvt_bench_root *root);

/* Remove the files of the root and the directory. Best effort. */
void kvt_bench_root_remove(const char *path);

#endif
