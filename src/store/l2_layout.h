/* How a root's cap is divided: a little for superblock, journal, lock and stats, the rest in
 * segments. Pure functions. */
#ifndef KVT_STORE_L2_LAYOUT_H
#define KVT_STORE_L2_LAYOUT_H

#include <stdint.h>

struct kvt_l2_layout {
    uint32_t segment_bytes;
    uint32_t segment_count;     /* files that may exist */
    uint32_t journal_pages_max; /* of the journal; a rewrite beside it takes half of that */
};

/* segment_bytes: 0 to choose it by the cap, else kept. A count below KVT_L2_SEGMENTS_MIN means that
 * the cap is too small for segments of that size. */
struct kvt_l2_layout kvt_l2_layout_for(uint64_t cap_bytes, uint32_t segment_bytes);

#endif
