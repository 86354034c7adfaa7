/* XXH3-64 behind two calls and a stream, so that one file knows how xxhash is built. Pure, any
 * thread, no allocation. */
#ifndef KVT_FORMAT_HASH_H
#define KVT_FORMAT_HASH_H

#include <stddef.h>
#include <stdint.h>

uint64_t kvt_hash64(const void *bytes, size_t len);

struct kvt_hash_stream { /* holds an XXH3_state_t; copyable only by the functions below */
    _Alignas(64) uint8_t state[640];
};

void kvt_hash_start(struct kvt_hash_stream *stream);
void kvt_hash_more(struct kvt_hash_stream *stream, const void *bytes, size_t len);
uint64_t kvt_hash_end(const struct kvt_hash_stream *stream);

#endif
