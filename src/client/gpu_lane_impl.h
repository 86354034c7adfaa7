/* Shared by gpu_lane.c, gpu_layers.c, gpu_gds.c, gpu_pool.c and gpu_plans.c. */
#ifndef KVT_CLIENT_GPU_LANE_IMPL_H
#define KVT_CLIENT_GPU_LANE_IMPL_H

#include "client/coding.h"
#include "client/gpu_lane.h"
#include "gpu/gpu.h"
#include "gpu/tune.h"

#define KVT_LANE_FLIGHTS 4u
#define KVT_LANE_RECORDS_MAX 1024u    /* of one job */
#define KVT_LANE_LAYER_RECORDS 8192u  /* of a load by layers: 128 Ki tokens in blocks of 16 */
#define KVT_LANE_LAYER_PAGES 1572864u /* of their records: 6 GiB; 12 MiB on the device */
#define KVT_LANE_MIXED_MAX 64u        /* mixed maps of one pool */
/* Of direct loads: device memory that they are read into (64 MiB: as much as one job takes), and
 * host memory for what is compared: a header and its table of levels. */
#define KVT_GDS_CHUNK_BYTES 65536u
#define KVT_GDS_CHUNKS 1024u
#define KVT_GDS_HEAD_BYTES 2048u

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
    uint8_t *table; /* likewise: room for that of a map that is looked for */
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

/* READY blocks by kind, and those of loads that are in the device's memory already. */
enum { KVT_LANE_STAGED = 2, KVT_LANE_QUEUES };

struct kvt_lane_gds; /* gpu_gds.c */

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
    struct kvt_lane_gds *gds;      /* NULL: no direct loads; set while the lane opens */
    struct kvt_gpu_tuned tuned;    /* constant once the lane is open */

    /* under the cache's lock */
    bool stop;
    bool offline; /* seen and counted */
    pthread_cond_t work;
    struct kvt_block_queue ready[KVT_LANE_QUEUES];
    uint32_t load_streak;
    int64_t next_ns;                /* no job starts before; pacing */
    struct kvt_block_queue layered; /* READY, of loads by layers */
    int64_t layered_ns;             /* when the last one came */

    /* the lane's thread alone */
    struct kvt_lane_stage *stage; /* of the jobs in flight */
    struct kvt_lane_flight flights[KVT_LANE_FLIGHTS];
    uint32_t flight_first, flight_count;
    struct kvt_gpu_item items[KVT_LANE_LAYER_RECORDS];
    struct kvt_outcome outcomes[KVT_LANE_LAYER_RECORDS];
};

#define KVT_LANE_EVENTS_MAX 32u /* that one job waits for */

struct kvt_lane_batch {
    struct kvt_block_queue blocks; /* in state CODING, linked */
    int kind;
    bool staged; /* of direct loads */
    struct kvt_lane_code code;
    struct kvt_gpu_plan *plan;
    uint32_t payload_bytes;
    int rc;                                       /* of finding the plan */
    struct kvt_req *waiting[KVT_LANE_EVENTS_MAX]; /* requests whose event comes first */
    size_t waiting_count;
    uint64_t bytes;
};

/* gpu_lane.c. Begin with a batch: its plan, its engines' events, and what of it goes to the device:
 * items, linked in flight->blocks; the others in `ended`, their outcomes from outcomes[] on. Not
 * locked. */
void kvt_lane_begin(struct kvt_lane *lane, struct kvt_lane_batch *batch,
                    struct kvt_lane_flight *flight, struct kvt_gpu_item *items,
                    struct kvt_block_queue *ended, struct kvt_outcome *outcomes);
/* Whether the batch can wait for the engine's event of this request; it then will. Locked. */
bool kvt_lane_take_event(struct kvt_req *req, struct kvt_lane_batch *batch);
/* Wait for a flight's job and end its blocks. Locked; lets go of the lock meanwhile. */
void kvt_lane_finish(struct kvt_lane *lane, struct kvt_lane_flight *flight);
/* End all blocks of a queue alike. Locked. */
void kvt_lane_end_all(struct kvt_cache *cache, int kind, struct kvt_block_queue *blocks,
                      int status);
/* Blocks ended since the device failed: counted, and its loss is told once. Locked; lets go of the
 * lock meanwhile. */
void kvt_lane_count_errors(struct kvt_lane *lane, uint64_t blocks);

/* gpu_layers.c. Locked. A READY block of a load by layers. */
void kvt_layers_push(struct kvt_lane *lane, struct kvt_block *block);
/* Whether such a load may start once nothing is in flight; else *until: when to ask again. */
bool kvt_layers_due(struct kvt_lane *lane, int64_t *until);
/* Run it to its end. Lets go of the lock meanwhile. */
void kvt_layers_run(struct kvt_lane *lane);

void *kvt_lane_main(void *lane);

/* gpu_paths.c. Measure which path small jobs take, or remember it: lane->tuned. Not locked; blocks.
 * 0; KVT_E_DEVICE. */
int kvt_paths_open(struct kvt_lane *lane);

/* gpu_gds.c. Find out whether the drives of all roots are to be read directly into this device, and
 * start the threads that do; lane->gds stays NULL where they are not. Not locked; blocks for the
 * probe. 0; KVT_E_UNSUPPORTED gds=required, and they are not: reason. */
int kvt_gds_open(struct kvt_lane *lane, char *reason, size_t len);
void kvt_gds_close(struct kvt_lane *lane); /* nothing is in flight */
/* Whether a root with that report is to be read directly. Pure. */
struct kvt_gds_report;
bool kvt_gds_wanted(int setting, const struct kvt_gds_report *report);
/* A READY block that was granted where it lies on disk. Locked. */
void kvt_gds_push(struct kvt_lane *lane, struct kvt_block *block);
/* Of a block in the queue KVT_LANE_STAGED: the first KVT_GDS_HEAD_BYTES of its record in host
 * memory, and where the record is on the device. Any thread. */
uint8_t *kvt_lane_head(const struct kvt_lane *lane, const struct kvt_block *block);
uint64_t kvt_lane_address(const struct kvt_lane *lane, const struct kvt_block *block);
/* Such a block was verified, or had other bytes. Locked; lets go of the lock meanwhile. */
void kvt_lane_judged(struct kvt_lane *lane, const struct kvt_block *block, bool good);

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
