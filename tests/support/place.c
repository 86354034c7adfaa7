/* See place.h. */
#include "support/place.h"

#include <stdlib.h>
#include <string.h>

#include "store/l2_internal.h"
#include "store/store_impl.h"

struct place place_of(const struct kvt_store *store, uint32_t ns, const struct kvt_msg_key *key)
{
    struct place place = {.known = false};
    const struct kvt_index_entry *e;
    struct kvt_full_key full;
    uint32_t entry;

    kvt_key_full(store, ns - 1, key, &full);
    entry = kvt_entry_find(store, &full);
    if (entry == KVT_INDEX_NONE)
        return place;
    e = kvt_index_at(&store->index, entry);
    if (!e->on_disk)
        return place;
    place.known = true;
    place.root = e->root;
    place.segment = e->segment;
    place.generation = store->disks[e->root].l2->segments[e->segment].generation;
    return place;
}

bool place_recycled(struct kvt_io *medium, const struct place *place)
{
    struct kvt_segment_header *header = aligned_alloc(KVT_PAGE_BYTES, KVT_PAGE_BYTES);
    char name[KVT_IO_NAME_MAX];
    bool there = false;
    int file;

    if (!header)
        abort();
    kvt_l2_segment_name(place->segment, name);
    file = medium->ops->open(medium, name, KVT_IO_OPEN_READ_ONLY);
    if (file >= 0) {
        memset(header, 0, sizeof *header);
        there = kvt_io_read_now(medium, file, 0, header, KVT_PAGE_BYTES) == KVT_PAGE_BYTES &&
                !kvt_segment_header_check(header, place->segment, header->root_id) &&
                header->generation == place->generation;
        medium->ops->close(medium, file);
    }
    free(header);
    return !there;
}
