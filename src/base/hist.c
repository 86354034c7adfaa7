/* Buckets whose bounds double: see hist.h. Threads: one at a time. */
#include "base/hist.h"

#include "base/checked.h"

static const uint64_t first_bound[] = {[KVT_HIST_TIME] = 1000, [KVT_HIST_SIZE] = 4096};

uint64_t kvt_hist_bound(enum kvt_hist_unit unit, uint32_t i)
{
    return first_bound[unit] << i;
}

void kvt_hist_add(struct kvt_hist *hist, enum kvt_hist_unit unit, uint64_t value)
{
    /* how many first bounds it takes, and of them the next power of two */
    uint64_t units = value / first_bound[unit] + (value % first_bound[unit] != 0);
    uint32_t i = units <= 1 ? 0 : 64 - (uint32_t)__builtin_clzll(units - 1);

    hist->buckets[KVT_MIN(i, KVT_HIST_BOUNDS)]++;
    hist->sum += value;
}

void kvt_hist_time(struct kvt_hist *hist, int64_t from_ns, int64_t to_ns)
{
    kvt_hist_add(hist, KVT_HIST_TIME, to_ns > from_ns ? (uint64_t)(to_ns - from_ns) : 0);
}
