/* Shared by gpu_lane.c and gpu_pool.c. */
#ifndef KVT_CLIENT_GPU_LANE_IMPL_H
#define KVT_CLIENT_GPU_LANE_IMPL_H

#include "client/gpu_lane.h"
#include "gpu/gpu.h"

#define KVT_LANE_FLIGHTS 4u
#define KVT_LANE_RECORDS_MAX 1024u
#define KVT_LANE_LEVELS KVT_LEVELS

struct kvt_lane_stage { /* shared by pools whose records fit */
    struct kvt_lane_stage *next;
    struct kvt_gpu_stage *stage;
    uint32_t record_bytes; /* the largest that fits */
    uint32_t refs;         /* pools */
};

struct kvt_lane_pool {
    struct kvt_lane *lane;
    struct kvt_lane_stage *stage;
    struct kvt_gpu_plan *plans[KVT_LANE_LEVELS]; /* by level; NULL: the shape has no such records */
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

#endif
