/* Shared by gpu_lane.c, gpu_pool.c and gpu_plans.c. */
#ifndef KVT_CLIENT_GPU_LANE_IMPL_H
#define KVT_CLIENT_GPU_LANE_IMPL_H

#include "client/gpu_lane.h"
#include "gpu/gpu.h"

#define KVT_LANE_FLIGHTS 4u
#define KVT_LANE_RECORDS_MAX 1024u
#define KVT_LANE_MIXED_MAX 64u /* mixed maps of one pool */

struct kvt_lane_stage { /* shared by pools whose records fit */
    struct kvt_lane_stage *next;
    struct kvt_gpu_stage *stage;
    uint32_t record_bytes; /* the largest that fits */
    uint32_t refs;         /* pools */
};

/* The plan of a mixed map: made by the lane when it meets the first block of it, kept as long as
 * the pool. */
struct kvt_lane_mixed {
    struct kvt_lane_mixed *next;
    struct kvt_gpu_plan *plan;
    const struct kvt_shape_group *group;
    uint32_t payload_bytes;
    uint8_t table[]; /* what its payloads begin with */
};

struct kvt_lane_pool {
    struct kvt_lane *lane;
    struct kvt_lane_stage *stage;
    const struct kvt_pool *pool;
    /* By group and level; NULL: the group has no such records. */
    struct kvt_gpu_plan *uniform[KVT_GROUPS_MAX][KVT_LEVELS];
    struct kvt_lane_mixed *mixed; /* the lane's thread alone */
    uint32_t mixed_count;
};

/* What blocks have in common that can go into one job. */
struct kvt_lane_code {
    struct kvt_lane_pool *pool;
    const struct kvt_shape_group *group;
    const struct kvt_map *map; /* stores: to encode with */
    const uint8_t *table;      /* loads of mixed records: where theirs begins; else NULL */
    uint32_t record_bytes;
    uint8_t group_index, level, map_id;
};

struct kvt_lane_flight {
    struct kvt_gpu_job *job;
    int kind;
    struct kvt_block_queue blocks; /* in the order of the job's items */
};

struct kvt_lane {
    struct kvt_lane *next;
    struct kvt_cache *cache;
    struct kvt_gpu *gpu;
    int device;
    pthread_t thread;
    bool thread_runs;
    void **events;                 /* one per request, for streams that it waits for */
    struct kvt_lane_stage *stages; /* under cache->gpu_lock */

    /* under the cache's lock */
    bool stop;
    bool offline; /* seen and counted */
    pthread_cond_t work;
    struct kvt_block_queue ready[2]; /* by kind */
    uint32_t load_streak;
    int64_t next_ns; /* no job starts before; pacing */

    /* the lane's thread alone */
    struct kvt_lane_stage *stage; /* of the jobs in flight */
    struct kvt_lane_flight flights[KVT_LANE_FLIGHTS];
    uint32_t flight_first, flight_count;
    struct kvt_gpu_item items[KVT_LANE_RECORDS_MAX];
    struct kvt_outcome outcomes[KVT_LANE_RECORDS_MAX];
};

void *kvt_lane_main(void *lane);

/* gpu_plans.c. Plans of all uniform maps of a pool, on its stage; undone by _free(), also after an
 * error. Not locked. */
int kvt_lane_plans_make(struct kvt_lane_pool *own);
void kvt_lane_plans_free(struct kvt_lane_pool *own);
/* The largest record that its plans may have. */
uint32_t kvt_lane_record_max(const struct kvt_shape *shape);
/* How a READY block is, or will be, coded. */
struct kvt_lane_code kvt_lane_code_of(struct kvt_cache *cache, int kind,
                                      const struct kvt_block *block);
bool kvt_lane_code_same(const struct kvt_lane_code *a, const struct kvt_lane_code *b);
/* The plan for it, made if need be, and the payload bytes of its records. The lane's thread, not
 * locked; allocates for a map that is new. 0; KVT_E_CORRUPT not a map of the group (loads);
 * KVT_E_UNSUPPORTED too many maps; -ENOMEM; KVT_E_DEVICE. */
int kvt_lane_plan_of(const struct kvt_lane_code *code, struct kvt_gpu_plan **plan,
                     uint32_t *payload_bytes);

#endif
