/* Where a flushed block lies, and whether its place has been taken back since: what "legally
 * evicted" means to a test. The place is what the store says when it acknowledges; that it is gone
 * is what the medium says (the segment's header has another generation), not the store. */
#ifndef KVT_TESTS_PLACE_H
#define KVT_TESTS_PLACE_H

#include <stdbool.h>

#include "store/store.h"

struct place {
    bool known;
    uint32_t root, segment;
    uint64_t generation;
};

/* ns: the handle; known is false when the block is on no disk. */
struct place place_of(const struct kvt_store *store, uint32_t ns, const struct kvt_msg_key *key);
/* medium: of place->root; a sound one. */
bool place_recycled(struct kvt_io *medium, const struct place *place);

#endif
