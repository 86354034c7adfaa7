/* Which blocks this context got from a lossy record: they must never be stored as if they had been
 * computed. A set of block keys, bounded; when it is full the older half is forgotten.
 * Thread: one at a time. It stores 16 bytes per key and no token.
 */
#ifndef KVT_ADAPTERS_LLAMA_ORIGIN_H
#define KVT_ADAPTERS_LLAMA_ORIGIN_H

#include <kvtier/layout.h>
#include <stddef.h>
#include <stdint.h>

#define KVT_ORIGIN_MAX ((size_t)1 << 20) /* keys: 16.7 M restored tokens at 16 a block */

struct kvt_origin_entry {
    uint64_t tag; /* first 8 bytes of the key's hash; 0: free */
    uint64_t age; /* the value of `clock` when it was last added */
};

struct kvt_origin {
    struct kvt_origin_entry *entries;
    size_t slots; /* power of two */
    size_t used;
    uint64_t clock; /* additions so far */
    uint64_t forgotten;
};

void kvt_origin_init(struct kvt_origin *origin);
void kvt_origin_free(struct kvt_origin *origin);

/* Room for `more` further keys. 0 or -ENOMEM: then nothing changes and the caller must not load. */
__attribute__((warn_unused_result)) int kvt_origin_reserve(struct kvt_origin *origin, size_t more);

/* Add a key; room was reserved. */
void kvt_origin_add(struct kvt_origin *origin, const struct kvt_key *key);

/* 1 when the key was added and not forgotten. */
int kvt_origin_has(const struct kvt_origin *origin, const struct kvt_key *key);

#endif
