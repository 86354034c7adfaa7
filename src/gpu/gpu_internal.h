/* Shared by the files of this folder; see gpu.h. */
#ifndef KVT_GPU_INTERNAL_H
#define KVT_GPU_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "gpu/cuda_abi.h"
#include "gpu/gpu.h"
#include "gpu/kernel_abi.h"

/* ---- kernel images (images.c, or images_none.c in a build without nvcc) ---- */

struct kvt_gpu_image {
    const char *kernel;    /* name of the function in it */
    const void *bytes;     /* fatbin */
    uint32_t shared_bytes; /* dynamic shared memory of a CTA */
    uint32_t warps;        /* of a CTA */
};
extern const struct kvt_gpu_image kvt_gpu_images[];
extern const int kvt_gpu_images_built;

enum kvt_gpu_kernel { /* order of kvt_gpu_images */
                      KVT_GPU_DECODE,
                      KVT_GPU_ENCODE_DENSE_C4,
                      KVT_GPU_ENCODE_DENSE_C5,
                      KVT_GPU_ENCODE_C4,
                      KVT_GPU_ENCODE_C5,
                      KVT_GPU_ENCODE_UNIFORM,
                      KVT_GPU_RAW_GATHER,
                      KVT_GPU_RAW_SCATTER,
                      KVT_GPU_PAGES,
                      KVT_GPU_KERNELS
};

/* ---- device ---- */

#define KVT_GPU_REGIONS_MAX 4096u

struct kvt_gpu_region { /* pinned host memory */
    char *host;
    size_t bytes;
    kvt_cu_ptr device;
};

struct kvt_gpu {
    struct kvt_cuda cuda;
    struct kvt_gpu_info info;
    int ordinal;
    kvt_cu_device device;
    kvt_cu_context context;        /* the primary one, retained */
    _Atomic int context_gone;      /* relaxed: it was reset, and all that was in it with it */
    unsigned long long context_id; /* of that context: after a reset its successor has another */
    int least_priority;
    kvt_cu_module modules[KVT_GPU_KERNELS];
    kvt_cu_function kernels[KVT_GPU_KERNELS];
    atomic_int offline;    /* the first sticky kvt_cu_result; 0: fine. relaxed: a flag, no data */
    const char *grid_base; /* pinned in pieces from here on; NULL: no such memory */
    size_t grid_bytes;
    pthread_rwlock_t queueing;    /* read: while a job is queued; write: to see that none is */
    struct kvt_gpu_stage *stages; /* all of the device; under lock */
    pthread_mutex_t pinning;      /* held by whoever changes regions; taken before lock */
    pthread_mutex_t lock;         /* of the regions, which are in order of their addresses */
    struct kvt_gpu_region regions[KVT_GPU_REGIONS_MAX];
    size_t region_count;
};

/* Make our context current, and give the caller's back. enter: 0 or KVT_E_DEVICE, after which no
 * leave is due. */
KVT_GPU_RESULT int kvt_gpu_enter(struct kvt_gpu *gpu);
/* The same for giving things back, which is attempted on a lost device as well: the driver refuses
 * what it must. */
KVT_GPU_RESULT int kvt_gpu_enter_to_release(struct kvt_gpu *gpu);
void kvt_gpu_leave(struct kvt_gpu *gpu);

/* Turn a result into a status; one that says the context is lost puts the device offline. */
int kvt_gpu_check(struct kvt_gpu *gpu, kvt_cu_result result);

/* Device address of pinned host memory; 0 when it is not (wholly) pinned. */
kvt_cu_ptr kvt_gpu_pinned(struct kvt_gpu *gpu, const void *memory, size_t bytes);

/* ---- stage ---- */

#define KVT_GPU_DEPTH_MAX 8u
#define KVT_GPU_JOBS_MAX 16u

#define KVT_GPU_TURN_WORDS 2u /* behind the status words of a wave: of the two dense encoders */

struct kvt_gpu_wave {   /* one wave of the staging ring */
    kvt_cu_ptr staging; /* its records */
    kvt_cu_ptr status, counters, page_hashes;
    kvt_cu_event ready, checked, empty; /* first step, page kernel, last step done */
};

struct kvt_gpu_job {
    struct kvt_gpu_stage *stage;
    struct kvt_gpu_plan *plan; /* while busy */
    int busy;
    int evict;
    enum kvt_gpu_path path;
    uint32_t ctas, move_ctas;
    uint32_t check_ctas; /* of the page kernel; 0: it runs on the code stream, with all */
    int error;           /* of queueing, or of the device */
    int done;
    size_t count;
    kvt_cu_event event;
    uint32_t range_count;                          /* 0: the job is not by layers */
    kvt_cu_event range_events[KVT_GPU_RANGES_MAX]; /* of a job by layers */
    kvt_cu_ptr counters, page_hashes;              /* its own; else those of the waves */
    struct kvt_gpu_result *results;                /* pinned, records_max */
    kvt_cu_ptr results_device;
    uint8_t *headers; /* pinned, 128 bytes a record */
    kvt_cu_ptr headers_device;
    struct kvt_gpu_item *items;
};

struct kvt_gpu_stage {
    struct kvt_gpu_stage *next; /* of the device */
    struct kvt_gpu *gpu;
    struct kvt_gpu_stage_opts opts;          /* defaults filled in */
    uint32_t pages;                          /* of a wave */
    kvt_cu_stream move_stream, code_stream;  /* over the link; kernels that code */
    kvt_cu_stream check_stream;              /* the page kernel, where it has CTAs of its own */
    kvt_cu_event entry;                      /* the engine's stream at the time of the call */
    kvt_cu_ptr layer_counters, layer_hashes; /* of jobs by layers: records of all, layer_pages */
    struct kvt_gpu_wave waves[KVT_GPU_DEPTH_MAX];
    uint32_t next_wave;
    void *pinned; /* results and headers of all jobs */
    kvt_cu_ptr device_memory;
    struct kvt_gpu_item *items;
    struct kvt_gpu_job jobs[KVT_GPU_JOBS_MAX];
};

/* Wait until nothing of the stage runs any more. Our context is current. */
void kvt_gpu_stage_sync(struct kvt_gpu_stage *stage);
/* The same, and hashes of records that were loaded in part are forgotten. */
void kvt_gpu_stage_reset_layers(struct kvt_gpu_stage *stage);

/* ---- plan ---- */

/* Encode and raw take one class a launch, decode all but the raw one at once. Dense: rows of 128
 * bf16 elements that can be read 16 bytes at a time; each unit has an entry, keys come first. */
enum kvt_gpu_class {
    KVT_GPU_CLASS_DENSE_C4,
    KVT_GPU_CLASS_DENSE_C5,
    KVT_GPU_CLASS_C4,
    KVT_GPU_CLASS_C5,
    KVT_GPU_CLASS_UNIFORM,
    KVT_GPU_CLASS_RAW,
    KVT_GPU_CLASSES
};

struct kvt_gpu_span { /* consecutive parts of the table */
    uint32_t first_part, part_count;
    uint32_t first_unit, unit_count;
    uint32_t units_per_part; /* 0: they differ */
    uint32_t key_units;      /* so many units, all of keys, come first */
};

struct kvt_gpu_spans { /* what the launches over (some parts of) a record cover */
    struct kvt_gpu_span gather[KVT_GPU_CLASSES]; /* the lead of a mixed payload is a raw one */
    struct kvt_gpu_span coded, scatter;
    uint32_t end_unit;
};

/* A run of layers of a record, or all of it: what is copied, hashed and decoded together. The page
 * where one range ends and the next begins is copied with both, and hashed with the first. */
struct kvt_gpu_range {
    struct kvt_gpu_spans spans;
    uint32_t from_page, copy_pages;
    uint32_t hash_page, hash_pages;
    uint32_t next_layer; /* the first that is not in the ranges up to this one */
    uint32_t wave;       /* records of one launch */
};

struct kvt_gpu_plan {
    struct kvt_gpu *gpu;
    struct kvt_gpu_stage *stage;
    int own_stage;
    uint32_t block_count;
    uint32_t used_bytes; /* header and what is coded; the rest of a record is zero */
    uint32_t record_bytes, pages;
    kvt_cu_ptr parts; /* struct kvt_gpu_part[], and the lead behind them */
    struct kvt_gpu_range whole;
    uint32_t range_count; /* 1: whole */
    struct kvt_gpu_range ranges[KVT_GPU_RANGES_MAX];
};

/* ---- a job's waves ---- */

struct kvt_gpu_batch { /* what one wave works on */
    struct kvt_gpu_job *job;
    struct kvt_gpu_wave *wave;
    const struct kvt_gpu_range *range; /* of each record */
    size_t first;
    uint32_t count;
    kvt_cu_ptr slots[KVT_GPU_RECORDS_MAX]; /* device addresses; 0: not pinned */
};

static inline kvt_cu_ptr kvt_gpu_staging_of(const struct kvt_gpu_batch *batch, uint32_t i)
{
    return batch->wave->staging + (kvt_cu_ptr)i * batch->range->copy_pages * KVT_GPU_PAGE_BYTES;
}

/* Queue the copies between slots and staging on the move stream (job_copy.c). */
KVT_GPU_RESULT int kvt_gpu_run_copies(const struct kvt_gpu_batch *batch);

struct kvt_gpu_source { /* of a table */
    const struct kvt_layout *layout;
    const struct kvt_gpu_map *map;
    const struct kvt_pool_desc *pool;
    kvt_cu_ptr lead;                 /* where the map's lead lies on the device */
    uint32_t first_part, part_count; /* of the layout; entries of other parts are left out */
    uint16_t group;
};

/* Entries of a group's table (plan_table.c), written from parts[first_entry] on, with units counted
 * from first_unit. parts: NULL to count them only. Returns how many. Pure. */
uint32_t kvt_gpu_table(const struct kvt_gpu_source *source, struct kvt_gpu_part *parts,
                       uint32_t first_entry, uint32_t first_unit, struct kvt_gpu_spans *spans);

/* Bytes of the payload that a part of the layout takes; 0: it is of another group. *entry: of the
 * map, moved on (plan_table.c). */
uint32_t kvt_gpu_part_bytes(const struct kvt_gpu_source *source, uint32_t part, uint32_t *entry);

#endif
