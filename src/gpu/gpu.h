/* Blocks between pinned host records and a paged pool in GPU memory, coded and decoded by the GPU.
 *
 *   kvt_gpu        one device: driver, shared primary context, kernels, pinned host memory
 *   kvt_gpu_stage  streams, staging memory and jobs, all allocated at creation
 *   kvt_gpu_plan   one (layout, group, map, pool): tables; plans share a stage, or have their own
 *   kvt_gpu_job    one batch of blocks in flight: asynchronous, ends with an event
 *
 * Records are whole records of format/record.h: header, payload, padding. The bytes are those of
 * the scalar codec, the checksum that of kvt_record_checksum(). The engine's context stays current
 * as it was; nothing here synchronises the device.
 * Threads: kvt_gpu from any thread, plans are made and freed by any; a stage, and jobs of its
 * plans, by one thread at a time. Errors:  kvtier/error.h. KVT_E_DEVICE puts the device offline for
 * good (kvt_gpu_offline()): every later call returns it, running jobs report it; the process and
 * the store live on.
 */
#ifndef KVT_GPU_GPU_H
#define KVT_GPU_GPU_H

#include <stddef.h>
#include <stdint.h>

#include "kvtier/error.h"
#include "kvtier/layout.h"

#define KVT_GPU_RESULT __attribute__((warn_unused_result))

struct kvt_gpu;
struct kvt_gpu_stage;
struct kvt_gpu_plan;
struct kvt_gpu_job;

/* ---- device ---- */

struct kvt_gpu_opts {
    int device;          /* CUDA ordinal */
    const char *library; /* of the driver; NULL: "libcuda.so.1" */
};

/* Open a device. reason (optional): one sentence why not.
 * 0; KVT_E_UNSUPPORTED no driver, too old, no such device, compute capability below 8.0, no GPU
 * kernels in this build; -ENOMEM; KVT_E_DEVICE. Blocks. Owned until kvt_gpu_close(). */
KVT_GPU_RESULT int kvt_gpu_open(const struct kvt_gpu_opts *opts, struct kvt_gpu **out, char *reason,
                                size_t reason_len);
void kvt_gpu_close(struct kvt_gpu *gpu); /* plans must be gone; NULL is allowed */

/* 1 when this build has kernels in it; 0: "no GPU kernels in this build". */
int kvt_gpu_kernels_built(void);

struct kvt_gpu_info {
    char name[96];
    int driver_version; /* 13000: CUDA 13.0 */
    int capability;     /* 90: 9.0 */
    int multiprocessors;
    int copy_engines;
};
void kvt_gpu_info(const struct kvt_gpu *gpu, struct kvt_gpu_info *info);

int kvt_gpu_offline(const struct kvt_gpu *gpu);
/* Name of the driver error that put it offline, "" when it is not. Borrowed. */
const char *kvt_gpu_offline_reason(const struct kvt_gpu *gpu);

/* Pin host memory for direct access by the device. Page-aligned; a region is pinned as a whole and
 * must be unpinned before it is freed. At most 4,096 regions. Blocks (about 0.4 s a GiB).
 * 0; KVT_E_INVAL; KVT_E_LIMIT; -ENOMEM; KVT_E_DEVICE. */
KVT_GPU_RESULT int kvt_gpu_pin(struct kvt_gpu *gpu, void *memory, size_t bytes);
void kvt_gpu_unpin(struct kvt_gpu *gpu, void *memory);
/* Say that memory from base on will be pinned in pieces of so many bytes (the last may be shorter)
 * while jobs run on it: no copy then crosses a seam, since the driver refuses one that is pinned in
 * part. Once, before the first job. */
void kvt_gpu_pin_grid(struct kvt_gpu *gpu, const void *base, size_t piece_bytes);

/* Events of our own for other people's streams: record one where an engine's work stands, and let a
 * stage wait for it. 0; -ENOMEM; KVT_E_DEVICE. */
KVT_GPU_RESULT int kvt_gpu_event_new(struct kvt_gpu *gpu, void **event);
void kvt_gpu_event_free(struct kvt_gpu *gpu, void *event); /* NULL is allowed */
KVT_GPU_RESULT int kvt_gpu_event_record(struct kvt_gpu *gpu, void *event, void *stream);

/* The NUMA node that a CUDA device hangs on, as the system says under `sys` ("/sys"); -1: there is
 * no such device, or nobody knows. library: of the driver; NULL: "libcuda.so.1". Blocks: the driver
 * is started (node.c). */
int kvt_gpu_node(const char *library, int device, const char *sys);

/* ---- stage ---- */

struct kvt_gpu_stage_opts {
    uint32_t ctas;         /* most CTAs at work at a time; 0: 16 */
    uint32_t move_ctas;    /* of these, for moves over the link by the SMs; 0: a quarter */
    uint32_t wave;         /* most records of one launch, at most 160; 0: as the bytes allow */
    uint32_t depth;        /* waves of staging memory; 0: 3 */
    uint32_t records_max;  /* of one job; 0: 1,024 */
    uint32_t jobs_max;     /* in flight; 0: 2 */
    uint32_t wave_bytes;   /* staging of one wave; 0: 11 MiB; at least record_bytes */
    uint32_t record_bytes; /* the largest record that its plans will have */
    uint32_t layer_pages; /* 4 KiB pages of all records that are loaded by layers at a time; 0: none
                             are; costs 8 bytes each */
};

/* 0; KVT_E_INVAL; KVT_E_LIMIT; -ENOMEM (also of the device); KVT_E_DEVICE. Blocks. */
KVT_GPU_RESULT int kvt_gpu_stage_new(struct kvt_gpu *gpu, const struct kvt_gpu_stage_opts *opts,
                                     struct kvt_gpu_stage **out);
void kvt_gpu_stage_free(struct kvt_gpu_stage *stage); /* plans must be gone; NULL is allowed */
/* Work queued from now on waits for an event (of anybody, of this device). 0; KVT_E_DEVICE. */
KVT_GPU_RESULT int kvt_gpu_stage_await(struct kvt_gpu_stage *stage, void *event);

/* ---- plan ---- */

/* How the heads of a group are coded. All is copied. */
struct kvt_gpu_map {
    int level;              /* of all heads; not read when levels is set */
    const uint8_t *levels;  /* of each (part, head), packed as for kvt_map_get(); NULL: uniform */
    const void *lead;       /* first bytes of every payload, before the heads (levels set) */
    uint32_t lead_bytes;    /* a multiple of 16 */
    uint32_t payload_bytes; /* with levels: lead, heads, and zeros; else it follows */
    uint32_t range_bytes;   /* loads by layers: least bytes of a record in one range; 0: not used */
};

#define KVT_GPU_RANGES_MAX 16u /* of layers, in which a record can be loaded */

/* Prepare a pool for one group and map. pool: device addresses; layout and pool are copied.
 * 0; KVT_E_VERSION, KVT_E_INVAL, KVT_E_LAYOUT, KVT_E_LIMIT from the checks of layout and pool;
 * KVT_E_INVAL pool memory is not of this device; KVT_E_LIMIT the record does not fit the stage;
 * -ENOMEM; KVT_E_DEVICE. Blocks. */
KVT_GPU_RESULT int kvt_gpu_plan_on(struct kvt_gpu_stage *stage, const struct kvt_layout *layout,
                                   uint16_t group, const struct kvt_gpu_map *map,
                                   const struct kvt_pool_desc *pool, struct kvt_gpu_plan **out);
/* The same for a uniform map, with a stage of its own. opts: NULL for defaults; record_bytes is
 * filled in. */
KVT_GPU_RESULT int kvt_gpu_plan_new(struct kvt_gpu *gpu, const struct kvt_layout *layout,
                                    uint16_t group, int level, const struct kvt_pool_desc *pool,
                                    const struct kvt_gpu_stage_opts *opts,
                                    struct kvt_gpu_plan **out);
void kvt_gpu_plan_free(struct kvt_gpu_plan *plan); /* waits for its jobs; NULL is allowed */

/* Bytes of one record of the plan. */
uint32_t kvt_gpu_plan_record_bytes(const struct kvt_gpu_plan *plan);

/* ---- jobs ---- */

enum kvt_gpu_path {
    KVT_GPU_PATH_COPY = 1,   /* copy engine between slots and staging in device memory */
    KVT_GPU_PATH_SM = 2,     /* the SMs move the pages; slots must be pinned, else COPY is taken */
    KVT_GPU_PATH_DIRECT = 3, /* restore: the decoder reads the slots; no checksum; pinned slots */
    KVT_GPU_PATH_STAGED = 4, /* restore: the records are in memory of the device already */
};

struct kvt_gpu_item {
    void *record;    /* host, kvt_gpu_plan_record_bytes() bytes, 16-byte aligned; STAGED: its
                        header alone */
    uint32_t block;  /* page of the pool */
    uint64_t staged; /* STAGED: device address of the record, a multiple of 4,096; else not read */
};

struct kvt_gpu_order {
    enum kvt_gpu_path path;
    int guard;     /* evict: judge keys */
    uint32_t ctas; /* most CTAs at work; 0: the stage's */
    void *stream;  /* CUstream of the engine whose earlier work comes first; with has_stream */
    int has_stream;
};

/* Queue pool pages <- records, or records <- pool pages. Records of an eviction come with their
 * header in place (its checksum field may hold anything); header, payload, padding and checksum are
 * complete when the job is done.
 * items: copied. Records and pages are borrowed until the job is done.
 * 0, *out is owned until kvt_gpu_job_free(); -EAGAIN all jobs are in flight; KVT_E_INVAL n is 0 or
 * too large, a block out of range, DIRECT without pinned slots; KVT_E_DEVICE. Never blocks. */
KVT_GPU_RESULT int kvt_gpu_restore(struct kvt_gpu_plan *plan, const struct kvt_gpu_item *items,
                                   size_t n, const struct kvt_gpu_order *order,
                                   struct kvt_gpu_job **out);
KVT_GPU_RESULT int kvt_gpu_evict(struct kvt_gpu_plan *plan, const struct kvt_gpu_item *items,
                                 size_t n, const struct kvt_gpu_order *order,
                                 struct kvt_gpu_job **out);

/* A load of several plans' records by layers: the first layers of all records come first, so that
 * an engine can begin with them. A record is verified when all of it has come: until the job is
 * done and its result 0, what the pages hold is provisional. */
struct kvt_gpu_load {
    struct kvt_gpu_plan *plan; /* all of one stage */
    const struct kvt_gpu_item *items;
    size_t n;
    struct kvt_gpu_job *job; /* out */
};
/* As kvt_gpu_restore() by the path COPY; all or none are queued. KVT_E_LIMIT also: more than
 * layer_pages. No other load by layers is in flight on the stage. */
KVT_GPU_RESULT int kvt_gpu_restore_layers(struct kvt_gpu_load *loads, size_t count,
                                          const struct kvt_gpu_order *order);
/* Ranges of layers of a job by layers, at least 1. */
uint32_t kvt_gpu_job_ranges(const struct kvt_gpu_job *job);
/* Wait for the ranges 0 to `range`. 0, and *next_layer: layers before it are in the pages
 * (UINT32_MAX: all); KVT_E_DEVICE. Blocks. */
KVT_GPU_RESULT int kvt_gpu_job_await_range(struct kvt_gpu_job *job, uint32_t range,
                                           uint32_t *next_layer);

/* 1 done, 0 not yet, KVT_E_DEVICE. wait: 1 sleeps until it is done. */
KVT_GPU_RESULT int kvt_gpu_job_poll(struct kvt_gpu_job *job, int wait);
/* Later work on the engine's stream waits for the job, without the CPU. 0, KVT_E_DEVICE. */
KVT_GPU_RESULT int kvt_gpu_job_join(struct kvt_gpu_job *job, void *stream);

/* Outcome of one record of a job that is done. checksum (optional): what the device computed.
 * 0; KVT_E_CORRUPT (restore: it is not the header's: the page holds garbage); KVT_E_GUARD,
 * KVT_E_NONFINITE (evict: the payload is undefined, take the next level); KVT_E_DEVICE.
 * A DIRECT restore has no checksum: 0, *checksum = 0; the caller verifies the record itself. */
KVT_GPU_RESULT int kvt_gpu_job_result(const struct kvt_gpu_job *job, size_t index,
                                      uint64_t *checksum);
void kvt_gpu_job_free(struct kvt_gpu_job *job); /* waits; NULL is allowed */

#endif
