/* XXH3-64: see hash.h. xxhash is compiled in here (XXH_INLINE_ALL): the size of its stream state is
 * not part of the shared library's ABI, and the state must live on our callers' stacks because the
 * data path allocates nothing. */
#include "format/hash.h"

#include <assert.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

static_assert(sizeof(XXH3_state_t) <= sizeof(struct kvt_hash_stream), "stream holds the state");
static_assert(_Alignof(XXH3_state_t) <= _Alignof(struct kvt_hash_stream), "and its alignment");

uint64_t kvt_hash64(const void *bytes, size_t len)
{
    return XXH3_64bits(bytes, len);
}

void kvt_hash_start(struct kvt_hash_stream *stream)
{
    XXH3_64bits_reset((XXH3_state_t *)(void *)stream->state);
}

void kvt_hash_more(struct kvt_hash_stream *stream, const void *bytes, size_t len)
{
    XXH3_64bits_update((XXH3_state_t *)(void *)stream->state, bytes, len);
}

uint64_t kvt_hash_end(const struct kvt_hash_stream *stream)
{
    return XXH3_64bits_digest((const XXH3_state_t *)(const void *)stream->state);
}
