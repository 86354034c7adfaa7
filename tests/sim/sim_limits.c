/* What a namespace may hold and how long its blocks live: see sim.h.
 *
 *   quota  after every ALLOC that was granted something the namespace holds no more than its quota,
 *          in a life that begins with more than that, too; but for blocks that left DRAM for it and
 *          are a larger record on disk again
 *   time   a block that nobody has asked for in so long is not found and not granted; in no later
 *          life either, when the store was closed in order over drives that never failed
 *   age    in a new life a block's age goes on from when it was last stored, over such drives,
 *          whatever ended the life before; and nothing expires earlier than the marks explain
 *
 * The model is mild where the store may have used a block by itself: any message that names a block
 * counts as a use, one that was prefetched or pinned is left out until the next life, and a time is
 * over only three ticks late; what a late root brings lives anew. Of a block that may have expired,
 * or been given up for its namespace's quota, nothing is demanded. */
#include "sim/sim.h"

#include "base/checked.h"
#include "store/store_impl.h"

#define PASS_TICKS (KVT_TTL_TICKS / 16)
#define MARK_NS 50000000     /* a mark is written, and durable, that long after it was due */
#define AGE_UNIT_NS 62500000 /* of an age that a restart found */

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

bool sim_has_ttl(const struct sim *sim)
{
    bool ttl = sim->shape.store_ttl_ns > 0;

    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        ttl = ttl || sim->shape.ttl_ns[ns] > 0;
    return ttl;
}

/* The store passes over its index by the shortest time, and takes marks with that. */
static int64_t shortest_ttl(const struct sim *sim)
{
    int64_t shortest = INT64_MAX;

    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        if (ttl_of(sim, ns))
            shortest = KVT_MIN(shortest, ttl_of(sim, ns));
    if (sim->shape.store_ttl_ns)
        shortest = KVT_MIN(shortest, sim->shape.store_ttl_ns);
    return shortest;
}

/* Nothing was ever written wrongly, or not at all. */
static bool sure(const struct sim *sim)
{
    return sim->shape.faults == SIM_SOUND && !sim->shape.late &&
           sim->shape.medium_bytes >= SIM_MEDIUM_LARGE;
}

void sim_limits_begin(struct sim *sim)
{
    sim->life_ns = sim->now_ns;
    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        for (uint32_t i = 0; i < SIM_BLOCKS; i++) {
            struct sim_block *block = &sim->blocks[ns][i];

            block->used_ns = sure(sim) ? block->stored_ns : sim->now_ns;
            block->kept = false;
        }
}

/* Before its sequence there is a mark of a pass before it at most, a tick late, once that is
 * written; and one of the beginning of the life. What is found later goes by the earliest. */
static void note_age(const struct sim *sim, struct sim_block *block, bool orderly)
{
    int64_t shortest = shortest_ttl(sim), from = block->first_ns;

    if (block->age_ns || !block->first_ns || shortest == INT64_MAX)
        return;
    if (!sure(sim) || (!orderly && sim->now_ns - from < MARK_NS))
        from = 0;
    else
        from -= ticks(shortest, PASS_TICKS + 1);
    block->age_ns = KVT_MAX(from, KVT_MIN(block->first_ns, sim->life_ns));
}

/* What was stored so long ago may be journaled as gone, also when it is still used; and in a later
 * life it has that age until it is used. */
static bool may_be_old(const struct sim *sim, uint32_t ns, const struct sim_block *block)
{
    int64_t ttl_ns = ttl_of(sim, ns), from = block->age_ns ? block->age_ns : block->first_ns,
            age = sim->now_ns - from;

    if (sim->thinned)
        age += age / 6;
    return ttl_ns && age > ttl_ns - ticks(ttl_ns, 3) - AGE_UNIT_NS;
}

bool sim_may_be_old(const struct sim *sim, uint32_t ns, uint32_t index)
{
    for (; index != UINT32_MAX; index = sim_parent(index))
        if (may_be_old(sim, ns, &sim->blocks[ns][index]))
            return true;
    return false;
}

void sim_limits_end(struct sim *sim, bool orderly)
{
    bool good = orderly && sure(sim) && !sim->garbled;
    struct kvt_store_stats stats;

    kvt_store_stats(sim->store, &stats);
    sim->counts.expired += stats.ttl_expired;
    sim->counts.given_up += stats.quota_evicted;
    for (uint32_t i = 0; i < sim->store->disk_count; i++)
        sim->thinned = sim->thinned || sim->store->disks[i].marks.count == KVT_TTL_FILE_MARKS;
    for (uint32_t ns = 0; ns < SIM_NS; ns++)
        for (uint32_t i = 0; i < SIM_BLOCKS; i++) {
            struct sim_block *block = &sim->blocks[ns][i];

            note_age(sim, block, orderly);
            if ((quota_of(sim, ns) && stats.quota_evicted) || may_be_old(sim, ns, block))
                block->durable = 0;
            block->gone = block->gone || (good && block->may && sim_expired(sim, ns, i));
        }
}
