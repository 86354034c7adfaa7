/* What a namespace may hold and how long its blocks live: see sim.h.
 *
 *   quota  after every ALLOC that was granted something the namespace holds no more than its quota,
 *          in a life that begins with more than that, too; but for blocks that left DRAM for it and
 *          are a larger record on disk again
 *   time   a block that nobody has asked for in so long is not found and not granted; in no later
 *          life either, when the store was closed in order over drives that never failed
 *
 * The model is mild where the store may have used a block by itself: any message that names a block
 * counts as a use, one that was prefetched or pinned is left out until the next life, and a time is
 * over only three ticks late; what a late root brings lives anew. Of a block that may have expired,
 * or been given up for its namespace's quota, nothing is demanded. */
#include "sim/sim.h"

#include "base/checked.h"
#include "store/store_impl.h"

/* Times are long against what clients wait for (milliseconds) and short against a seed's (half a
 * minute); quotas a few records. */
void sim_limits_choose(struct sim *sim, uint32_t record_bytes)
{
    static const int64_t seconds[] = {0, 2, 2, 8};
    struct sim_shape *shape = &sim->shape;

    if (sim_roll(sim, 10) >= 4)
        return;
    for (uint32_t ns = 0; ns < SIM_NS; ns++) {
        shape->ttl_ns[ns] = seconds[sim_roll(sim, KVT_ARRAY_LEN(seconds))] * 1000000000;
        if (sim_roll(sim, 2)) {
            uint64_t bytes = (uint64_t)(4 + sim_roll(sim, 24)) * record_bytes;

            shape->quota_bytes[ns] = KVT_MAX(bytes, KVT_QUOTA_MIN);
        }
    }
    if (!sim_roll(sim, 4))
        shape->store_ttl_ns = INT64_C(5000000000);
    if (!sim_roll(sim, 4))
        shape->store_quota_bytes = (uint64_t)(8 + sim_roll(sim, 24)) * record_bytes;
}

static int64_t ttl_of(const struct sim *sim, uint32_t ns)
{
    int64_t own = sim->shape.ttl_ns[ns], all = sim->shape.store_ttl_ns;

    return own && all ? KVT_MIN(own, all) : own + all;
}

static uint64_t quota_of(const struct sim *sim, uint32_t ns)
{
    uint64_t own = sim->shape.quota_bytes[ns], all = sim->shape.store_quota_bytes;

    return own && all ? KVT_MIN(own, all) : own + all;
}

static int64_t ticks(int64_t ttl_ns, int64_t count)
{
    return ttl_ns / KVT_TTL_TICKS * count;
}

void sim_used(struct sim *sim, uint32_t ns, uint32_t index)
{
    sim->blocks[ns][index].used_ns = sim->now_ns;
}

void sim_kept(struct sim *sim, uint32_t ns, uint32_t index)
{
    sim->blocks[ns][index].kept = true;
}

bool sim_expired(const struct sim *sim, uint32_t ns, uint32_t index)
{
    const struct sim_block *block = &sim->blocks[ns][index];
    int64_t ttl_ns = ttl_of(sim, ns), used_ns = KVT_MAX(block->used_ns, sim->anew_ns);

    return ttl_ns && !block->kept && sim->now_ns - used_ns > ttl_ns + ticks(ttl_ns, 3);
}

void sim_check_quota(struct sim *sim, uint32_t ns, uint64_t older_back)
{
    uint64_t most = quota_of(sim, ns), held;

    if (!most || sim->store->counts.older_back != older_back)
        return;
    held = kvt_namespaces_held(&sim->store->spaces, sim->ns[ns] - 1);
    if (held > most)
        sim_fail(sim, "namespace %u holds %llu bytes, its quota is %llu", ns,
                 (unsigned long long)held, (unsigned long long)most);
    sim->counts.quotas++;
}

void sim_limits_begin(struct sim *sim)
{
    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        for (uint32_t i = 0; i < SIM_BLOCKS; i++) {
            sim->blocks[ns][i].used_ns = sim->now_ns;
            sim->blocks[ns][i].kept = false;
        }
}

/* What was stored so long ago may be journaled as gone, also when it is still used. */
static bool may_be_old(const struct sim *sim, uint32_t ns, const struct sim_block *block)
{
    int64_t ttl_ns = ttl_of(sim, ns);

    return ttl_ns && sim->now_ns - block->first_ns > ttl_ns - ticks(ttl_ns, 3);
}

void sim_limits_end(struct sim *sim, bool orderly)
{
    bool sure = orderly && sim->shape.faults == SIM_SOUND && !sim->shape.late &&
                sim->shape.medium_bytes >= SIM_MEDIUM_LARGE && !sim->garbled;
    struct kvt_store_stats stats;

    kvt_store_stats(sim->store, &stats);
    sim->counts.expired += stats.ttl_expired;
    sim->counts.given_up += stats.quota_evicted;
    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        for (uint32_t i = 0; i < SIM_BLOCKS; i++) {
            struct sim_block *block = &sim->blocks[ns][i];

            if ((quota_of(sim, ns) && stats.quota_evicted) || may_be_old(sim, ns, block))
                block->durable = 0;
            block->gone = block->gone || (sure && block->may && sim_expired(sim, ns, i));
        }
}
