/* Division of the cap: see l2_layout.h. The fixed part is 1 MiB (4 MiB from 1 GiB on): superblock
 * 2 pages, lock 1, stats and ttl at most 16, journal, half a journal while it is rewritten. */
#include "store/l2_layout.h"

#include "base/checked.h"
#include "format/disk.h"
#include "store/l2_internal.h"

#define SMALL_FIXED_BYTES (1ull << 20)
#define LARGE_FIXED_BYTES (4ull << 20)
#define LARGE_FROM_BYTES (1ull << 30)
#define OTHER_PAGES 19u

struct kvt_l2_layout kvt_l2_layout_for(uint64_t cap_bytes, uint32_t segment_bytes)
{
    uint64_t fixed = cap_bytes >= LARGE_FROM_BYTES ? LARGE_FIXED_BYTES : SMALL_FIXED_BYTES;
    struct kvt_l2_layout layout = {
        .segment_bytes = segment_bytes ? segment_bytes : kvt_segment_bytes_for(cap_bytes),
        .journal_pages_max = (uint32_t)(fixed / KVT_PAGE_BYTES - OTHER_PAGES) / 3 * 2,
    };
    uint64_t count = cap_bytes > fixed ? (cap_bytes - fixed) / layout.segment_bytes : 0;

    layout.segment_count = (uint32_t)KVT_MIN(count, (uint64_t)KVT_L2_SEGMENT_NUMBERS);
    return layout;
}
