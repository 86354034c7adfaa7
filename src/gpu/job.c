/* Jobs: batches of records over the link, in waves. See gpu.h.
 *
 * A wave is the records of one launch and one stage of the staging ring. Three streams: the move
 * stream carries bytes over the link (copy engine, or the page kernel on pinned slots), the code
 * stream runs the coders, the check stream the page kernel (on few CTAs it shares the code stream).
 * Events in brackets are waited for, those after an arrow recorded:
 *
 *             move stream                check stream                  code stream
 *   restore   [empty] slots -> staging   [ready] checksums -> checked  [ready] decode, scatter
 *             -> ready                                                 [checked] -> empty
 *   evict     [checked] staging ->       [ready] header, padding,      [empty] gather, encode
 *             slots -> empty             checksums -> checked          -> ready
 *
 * So waves overlap in all three, and the ring is the only coupling. Path SM has no check of its
 * own: the move does it. Path STAGED moves nothing, and uses the records where they are. Everything
 * here only queues; nothing waits but kvt_gpu_job_poll(wait), kvt_gpu_job_free() and a call that
 * failed half-way.
 */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "format/record.h"
#include "gpu/gpu_internal.h"

/* What the link waits for: the first wave of an eviction (one of 4 records takes as long as one of
 * 8), and the last of a restore. */
#define FIRST_EVICT_WAVE 8u
#define LAST_RESTORE_WAVE 4u
#define CHECK_CTAS_MAX 4u /* the page kernel hashes about 25 GB/s with one CTA of an H200 */
#define CHECK_CTAS_MANY \
    8u /* of 48 and more in all, and a sixth of many more: as long as the coder */
#define CHECK_CTAS_PART 6u
#define CHECK_CTAS_EVICT 11u /* an eleventh: the encoder takes ten times as long */

static int launch(struct kvt_gpu *gpu, enum kvt_gpu_kernel kernel, uint32_t ctas, uint64_t warps,
                  void *parameter, kvt_cu_stream stream)
{
    void *parameters[1] = {parameter};
    const struct kvt_gpu_image *image = &kvt_gpu_images[kernel];
    uint64_t needed = (warps + image->warps - 1) / image->warps;
    return kvt_gpu_check(gpu, gpu->cuda.launch(gpu->kernels[kernel],
                                               (unsigned)KVT_MIN((uint64_t)ctas, needed), 1, 1,
                                               image->warps * 32, 1, 1, image->shared_bytes, stream,
                                               parameters, NULL));
}

/* Whether the decoder reads the records where they are, and not in the wave's staging memory. */
static int in_place(const struct kvt_gpu_job *job)
{
    return job->path == KVT_GPU_PATH_DIRECT || job->path == KVT_GPU_PATH_STAGED;
}

/* Whether the page kernel runs by itself, beside the coders. */
static int checks(const struct kvt_gpu_job *job)
{
    return job->path == KVT_GPU_PATH_COPY || job->path == KVT_GPU_PATH_STAGED;
}

/* ---- kernels of a wave ---- */

static int run_coding(const struct kvt_gpu_batch *batch, enum kvt_gpu_kernel kernel,
                      const struct kvt_gpu_span *span, int guard)
{
    struct kvt_gpu_plan *plan = batch->job->plan;
    struct kvt_gpu_stage *stage = plan->stage;
    int direct = in_place(batch->job);
    if (span->part_count == 0)
        return 0;
    struct kvt_gpu_coding coding = {
        .parts = plan->parts + span->first_part * sizeof(struct kvt_gpu_part),
        .status = batch->wave->status,
        .part_count = span->part_count,
        .first_unit = span->first_unit,
        .unit_count = span->unit_count,
        .units_per_part = span->units_per_part,
        .records = batch->count,
        .guard = (uint32_t)guard,
        .key_units = span->key_units,
        /* behind the status words, which are all ones at the start as well */
        .turns = batch->wave->status +
                 (batch->count + (kernel == KVT_GPU_ENCODE_DENSE_C5)) * sizeof(uint32_t),
    };
    kvt_cu_ptr skipped = (kvt_cu_ptr)batch->range->from_page * KVT_GPU_PAGE_BYTES;
    for (uint32_t i = 0; i < batch->count; i++) {
        kvt_cu_ptr record = direct ? batch->slots[i] : kvt_gpu_staging_of(batch, i) - skipped;
        coding.payload[i] = record + KVT_GPU_HEADER_BYTES;
        coding.block[i] = batch->job->items[batch->first + i].block;
    }
    const struct kvt_gpu_job *job = batch->job;
    uint32_t ctas = job->ctas; /* less those of the page kernel beside us */
    if (job->path == KVT_GPU_PATH_SM)
        ctas = KVT_MAX(ctas - job->move_ctas, 1u);
    else if (checks(job))
        ctas -= job->check_ctas;
    return launch(plan->gpu, kernel, ctas, (uint64_t)span->unit_count * batch->count, &coding,
                  stage->code_stream);
}

/* Page kernel: move when from and to differ, complete the record when make is set. */
static int run_paging(const struct kvt_gpu_batch *batch, int make, int from_slots, int to_slots,
                      uint32_t ctas, kvt_cu_stream stream)
{
    struct kvt_gpu_job *job = batch->job;
    struct kvt_gpu_plan *plan = job->plan;
    const struct kvt_gpu_range *range = batch->range;
    kvt_cu_ptr skipped = (kvt_cu_ptr)(range->hash_page - range->from_page) * KVT_GPU_PAGE_BYTES;
    struct kvt_gpu_paging paging = {
        .counters = batch->wave->counters,
        .page_hashes = batch->wave->page_hashes,
        .status = make ? batch->wave->status : 0,
        .results = job->results_device + batch->first * sizeof(struct kvt_gpu_result),
        .records = batch->count,
        .pages = range->hash_pages,
        .first_page = range->hash_page,
        .total_pages = plan->pages,
        .used_bytes = plan->used_bytes,
        .make = (uint32_t)make,
    };
    if (job->range_count > 0) { /* hashes of a record come together over several waves */
        paging.counters = job->counters + batch->first * sizeof(uint32_t);
        paging.page_hashes = job->page_hashes + batch->first * plan->pages * sizeof(uint64_t);
    }
    for (uint32_t i = 0; i < batch->count; i++) {
        paging.from[i] = from_slots ? batch->slots[i] : kvt_gpu_staging_of(batch, i) + skipped;
        paging.to[i] = to_slots ? batch->slots[i] : kvt_gpu_staging_of(batch, i) + skipped;
        paging.header[i] = job->headers_device + (batch->first + i) * KVT_GPU_HEADER_BYTES;
    }
    return launch(plan->gpu, KVT_GPU_PAGES, ctas, (uint64_t)range->hash_pages * batch->count,
                  &paging, stream);
}

/* ---- waves ---- */

static int record(struct kvt_gpu *gpu, kvt_cu_event event, kvt_cu_stream stream)
{
    return kvt_gpu_check(gpu, gpu->cuda.event_record(event, stream));
}

static int await(struct kvt_gpu *gpu, kvt_cu_stream stream, kvt_cu_event event)
{
    return kvt_gpu_check(gpu, gpu->cuda.stream_wait(stream, event, 0));
}

/* The page kernel between two events, in place. */
static int check_wave(const struct kvt_gpu_batch *batch, int make)
{
    const struct kvt_gpu_job *job = batch->job;
    struct kvt_gpu_plan *plan = job->plan;
    struct kvt_gpu_stage *stage = plan->stage;
    struct kvt_gpu *gpu = plan->gpu;
    kvt_cu_stream stream = job->check_ctas > 0 ? stage->check_stream : stage->code_stream;
    uint32_t ctas = job->check_ctas > 0 ? job->check_ctas : job->ctas;
    int status = await(gpu, stream, batch->wave->ready), there = in_place(job);
    if (status == 0)
        status = run_paging(batch, make, there, there, ctas, stream);
    return status == 0 ? record(gpu, batch->wave->checked, stream) : status;
}

static int restore_wave(const struct kvt_gpu_batch *batch)
{
    struct kvt_gpu_plan *plan = batch->job->plan;
    struct kvt_gpu_stage *stage = plan->stage;
    struct kvt_gpu *gpu = plan->gpu;
    struct kvt_gpu_wave *wave = batch->wave;
    enum kvt_gpu_path path = batch->job->path;
    int status = await(gpu, stage->move_stream, wave->empty);
    if (status == 0 && path == KVT_GPU_PATH_COPY)
        status = kvt_gpu_run_copies(batch);
    else if (status == 0 && path == KVT_GPU_PATH_SM)
        status = run_paging(batch, 0, 1, 0, batch->job->move_ctas, stage->move_stream);
    if (status == 0)
        status = record(gpu, wave->ready, stage->move_stream);
    if (status == 0 && checks(batch->job))
        status = check_wave(batch, 0);
    if (status == 0)
        status = await(gpu, stage->code_stream, wave->ready);
    if (status == 0)
        status = run_coding(batch, KVT_GPU_DECODE, &batch->range->spans.coded, 0);
    if (status == 0)
        status = run_coding(batch, KVT_GPU_RAW_SCATTER, &batch->range->spans.scatter, 0);
    if (status == 0)
        status = await(gpu, stage->code_stream, wave->checked);
    return status == 0 ? record(gpu, wave->empty, stage->code_stream) : status;
}

static int encode_classes(const struct kvt_gpu_batch *batch, int guard)
{
    static const enum kvt_gpu_kernel kernels[KVT_GPU_CLASSES] = {
        [KVT_GPU_CLASS_DENSE_C4] = KVT_GPU_ENCODE_DENSE_C4,
        [KVT_GPU_CLASS_DENSE_C5] = KVT_GPU_ENCODE_DENSE_C5,
        [KVT_GPU_CLASS_C4] = KVT_GPU_ENCODE_C4,
        [KVT_GPU_CLASS_C5] = KVT_GPU_ENCODE_C5,
        [KVT_GPU_CLASS_UNIFORM] = KVT_GPU_ENCODE_UNIFORM,
        [KVT_GPU_CLASS_RAW] = KVT_GPU_RAW_GATHER,
    };
    int status = 0;
    for (int i = 0; i < KVT_GPU_CLASSES && status == 0; i++)
        status = run_coding(batch, kernels[i], &batch->range->spans.gather[i], guard);
    return status;
}

static int evict_wave(const struct kvt_gpu_batch *batch, int guard)
{
    struct kvt_gpu_plan *plan = batch->job->plan;
    struct kvt_gpu_stage *stage = plan->stage;
    struct kvt_gpu *gpu = plan->gpu;
    struct kvt_gpu_wave *wave = batch->wave;
    int by_sm = batch->job->path == KVT_GPU_PATH_SM;
    int status = await(gpu, stage->code_stream, wave->empty);
    if (status == 0)
        status = kvt_gpu_check(gpu, gpu->cuda.fill_words_async(wave->status, KVT_GPU_STATUS_OK,
                                                               batch->count + KVT_GPU_TURN_WORDS,
                                                               stage->code_stream));
    if (status == 0)
        status = encode_classes(batch, guard);
    if (status == 0)
        status = record(gpu, wave->ready, stage->code_stream);
    if (status == 0 && by_sm) {
        status = await(gpu, stage->move_stream, wave->ready);
        if (status == 0)
            status = run_paging(batch, 1, 0, 1, batch->job->move_ctas, stage->move_stream);
    } else if (status == 0) {
        status = check_wave(batch, 1);
        if (status == 0)
            status = await(gpu, stage->move_stream, wave->checked);
        if (status == 0)
            status = kvt_gpu_run_copies(batch);
    }
    return status == 0 ? record(gpu, wave->empty, stage->move_stream) : status;
}

/* ---- jobs ---- */

static int prepare(struct kvt_gpu_job *job, const struct kvt_gpu_item *items, size_t n,
                   const struct kvt_gpu_order *order, int evict)
{
    struct kvt_gpu_plan *plan = job->plan;
    int pinned = 1, staged = order->path == KVT_GPU_PATH_STAGED;
    if (order->path < KVT_GPU_PATH_COPY || order->path > KVT_GPU_PATH_STAGED)
        return KVT_E_INVAL;
    for (size_t i = 0; i < n; i++)
        if (items[i].record == NULL || (uintptr_t)items[i].record % 16 != 0 ||
            items[i].block >= plan->block_count ||
            (staged && (items[i].staged == 0 || items[i].staged % KVT_GPU_PAGE_BYTES != 0)))
            return KVT_E_INVAL;
    for (size_t i = 0; i < n && order->path != KVT_GPU_PATH_COPY && !staged; i++)
        pinned &= kvt_gpu_pinned(plan->gpu, items[i].record, plan->record_bytes) != 0;
    job->path = order->path;
    if ((job->path == KVT_GPU_PATH_DIRECT && !pinned) || (in_place(job) && evict))
        return KVT_E_INVAL;
    if (!pinned)
        job->path = KVT_GPU_PATH_COPY;
    job->evict = evict;
    job->ctas = order->ctas > 0 ? order->ctas : plan->stage->opts.ctas;
    job->move_ctas = order->ctas > 0 ? KVT_MAX(order->ctas / 4, 1u) : plan->stage->opts.move_ctas;
    job->check_ctas = job->ctas < 8     ? 0
                      : evict           ? (job->ctas + CHECK_CTAS_EVICT - 1) / CHECK_CTAS_EVICT
                      : job->ctas >= 48 ? KVT_MAX(CHECK_CTAS_MANY, job->ctas / CHECK_CTAS_PART)
                                        : KVT_MIN((3 * job->ctas + 8) / 16, CHECK_CTAS_MAX);
    job->count = n;
    job->range_count = 0;
    job->error = 0;
    job->done = 0;
    memcpy(job->items, items, n * sizeof(*items));
    memset(job->results, 0, n * sizeof(*job->results));
    return 0;
}

/* Records of the next wave. The link idles while the first wave of an eviction is encoded, and
 * while the last of a restore is decoded: those are small, and their neighbours half as large again
 * or twice as large. Not beside other jobs, which keep the link busy. */
static uint32_t next_wave(const struct kvt_gpu_job *job, const struct kvt_gpu_range *range,
                          size_t first, uint32_t before, int alone)
{
    uint32_t full = range->wave;
    size_t left = job->count - first;
    uint32_t size = full;
    if (alone && job->evict)
        size = before == 0 ? FIRST_EVICT_WAVE : before + (before + 1) / 2;
    else if (alone && left > LAST_RESTORE_WAVE)
        size = (uint32_t)KVT_MIN((left + 1) / 2, (size_t)full);
    return (uint32_t)KVT_MIN(KVT_MIN((size_t)size, left), (size_t)full);
}

/* What the kernels need of the records of a wave. Looking at records is slow (each is a cache
 * miss), so it is done while the device works on the waves before. */
static void prepare_wave(struct kvt_gpu_batch *batch)
{
    struct kvt_gpu_job *job = batch->job;
    for (uint32_t i = 0; i < batch->count; i++) {
        const void *record = job->items[batch->first + i].record;
        batch->slots[i] = job->path == KVT_GPU_PATH_STAGED
                              ? job->items[batch->first + i].staged
                              : kvt_gpu_pinned(job->plan->gpu, record, job->plan->record_bytes);
        if (job->evict)
            memcpy(job->headers + (batch->first + i) * KVT_GPU_HEADER_BYTES, record,
                   KVT_GPU_HEADER_BYTES);
    }
}

static int await_order(struct kvt_gpu_stage *stage, const struct kvt_gpu_order *order)
{
    struct kvt_gpu *gpu = stage->gpu;
    if (!order->has_stream)
        return 0;
    int status = record(gpu, stage->entry, order->stream);
    if (status == 0)
        status = await(gpu, stage->code_stream, stage->entry);
    if (status == 0)
        status = await(gpu, stage->move_stream, stage->entry);
    return status;
}

/* One range of all records of a job. */
static int queue_range(struct kvt_gpu_job *job, const struct kvt_gpu_range *range, int guard,
                       int alone)
{
    struct kvt_gpu_stage *stage = job->plan->stage;
    uint32_t count = 0;
    int status = 0;
    for (size_t first = 0; first < job->count && status == 0; first += count) {
        count = next_wave(job, range, first, count, alone);
        struct kvt_gpu_batch batch = {
            .job = job,
            .wave = &stage->waves[stage->next_wave],
            .range = range,
            .first = first,
            .count = count,
        };
        prepare_wave(&batch);
        stage->next_wave = (stage->next_wave + 1) % stage->opts.depth;
        status = job->evict ? evict_wave(&batch, guard) : restore_wave(&batch);
    }
    return status;
}

static int queue_waves(struct kvt_gpu_job *job, const struct kvt_gpu_order *order)
{
    struct kvt_gpu_plan *plan = job->plan;
    struct kvt_gpu_stage *stage = plan->stage;
    struct kvt_gpu *gpu = plan->gpu;
    int alone = 1, status = await_order(stage, order);
    for (uint32_t i = 0; i < stage->opts.jobs_max; i++)
        alone &= !stage->jobs[i].busy;
    if (status == 0)
        status = queue_range(job, &plan->whole, order->guard, alone);
    kvt_cu_stream last = job->evict ? stage->move_stream : stage->code_stream;
    return status == 0 ? record(gpu, job->event, last) : status;
}

static int submit(struct kvt_gpu_plan *plan, const struct kvt_gpu_item *items, size_t n,
                  const struct kvt_gpu_order *order, int evict, struct kvt_gpu_job **out)
{
    struct kvt_gpu_stage *stage = plan->stage;
    struct kvt_gpu_job *job = NULL;
    if (n == 0 || n > stage->opts.records_max)
        return KVT_E_INVAL;
    for (uint32_t i = 0; i < stage->opts.jobs_max && job == NULL; i++)
        if (!stage->jobs[i].busy)
            job = &stage->jobs[i];
    if (job == NULL)
        return -EAGAIN;
    job->plan = plan;
    int status = kvt_gpu_enter(plan->gpu);
    if (status != 0)
        return status;
    pthread_rwlock_rdlock(&plan->gpu->queueing); /* what is pinned stays so */
    status = prepare(job, items, n, order, evict);
    if (status == 0) {
        status = queue_waves(job, order);
        if (status != 0) /* what is queued must be over before slots and pages are free */
            kvt_gpu_stage_sync(stage);
    }
    pthread_rwlock_unlock(&plan->gpu->queueing);
    kvt_gpu_leave(plan->gpu);
    if (status != 0)
        return status;
    job->busy = 1;
    *out = job;
    return 0;
}

int kvt_gpu_restore(struct kvt_gpu_plan *plan, const struct kvt_gpu_item *items, size_t n,
                    const struct kvt_gpu_order *order, struct kvt_gpu_job **out)
{
    return submit(plan, items, n, order, 0, out);
}

int kvt_gpu_evict(struct kvt_gpu_plan *plan, const struct kvt_gpu_item *items, size_t n,
                  const struct kvt_gpu_order *order, struct kvt_gpu_job **out)
{
    return submit(plan, items, n, order, 1, out);
}

/* ---- loads by layers ---- */

/* Jobs for all loads, with hashes of their own. Undone by clearing busy. */
static int prepare_loads(struct kvt_gpu_load *loads, size_t count,
                         const struct kvt_gpu_order *order)
{
    struct kvt_gpu_stage *stage = loads[0].plan->stage;
    uint64_t records = 0, pages = 0;
    for (size_t i = 0; i < count; i++) {
        struct kvt_gpu_job *job = NULL;
        for (uint32_t j = 0; j < stage->opts.jobs_max && job == NULL; j++)
            if (!stage->jobs[j].busy)
                job = &stage->jobs[j];
        if (job == NULL)
            return -EAGAIN;
        loads[i].job = job;
        job->plan = loads[i].plan;
        if (loads[i].n == 0 || loads[i].n > stage->opts.records_max || job->plan->stage != stage)
            return KVT_E_INVAL;
        int status = prepare(job, loads[i].items, loads[i].n, order, 0);
        if (status != 0)
            return status;
        job->busy = 1;
        job->range_count = job->plan->range_count;
        job->counters = stage->layer_counters + records * sizeof(uint32_t);
        job->page_hashes = stage->layer_hashes + pages * sizeof(uint64_t);
        records += loads[i].n;
        pages += (uint64_t)loads[i].n * job->plan->pages;
        if (pages > stage->opts.layer_pages)
            return KVT_E_LIMIT;
    }
    return 0;
}

/* Range by range, the jobs in turn. */
static int queue_loads(struct kvt_gpu_load *loads, size_t count, const struct kvt_gpu_order *order)
{
    struct kvt_gpu_stage *stage = loads[0].plan->stage;
    int status = await_order(stage, order);
    for (uint32_t range = 0; range < KVT_GPU_RANGES_MAX && status == 0; range++)
        for (size_t i = 0; i < count && status == 0; i++) {
            struct kvt_gpu_job *job = loads[i].job;
            if (range >= job->range_count)
                continue;
            status = queue_range(job, &job->plan->ranges[range], 0, 0);
            if (status == 0)
                status = record(stage->gpu, job->range_events[range], stage->code_stream);
            if (status == 0 && range + 1 == job->range_count)
                status = record(stage->gpu, job->event, stage->code_stream);
        }
    return status;
}

int kvt_gpu_restore_layers(struct kvt_gpu_load *loads, size_t count,
                           const struct kvt_gpu_order *order)
{
    if (count == 0 || order->path != KVT_GPU_PATH_COPY)
        return KVT_E_INVAL;
    for (size_t i = 0; i < count; i++)
        loads[i].job = NULL;
    struct kvt_gpu_stage *stage = loads[0].plan->stage;
    struct kvt_gpu *gpu = stage->gpu;
    int status = kvt_gpu_enter(gpu);
    if (status != 0)
        return status;
    pthread_rwlock_rdlock(&gpu->queueing);
    status = prepare_loads(loads, count, order);
    if (status == 0) {
        status = queue_loads(loads, count, order);
        if (status != 0) /* hashes of records that did not end are counted from zero again */
            kvt_gpu_stage_reset_layers(stage);
    }
    pthread_rwlock_unlock(&gpu->queueing);
    kvt_gpu_leave(gpu);
    for (size_t i = 0; i < count && status != 0; i++)
        if (loads[i].job != NULL)
            loads[i].job->busy = 0;
    return status;
}

uint32_t kvt_gpu_job_ranges(const struct kvt_gpu_job *job)
{
    return KVT_MAX(job->range_count, 1u);
}

int kvt_gpu_job_await_range(struct kvt_gpu_job *job, uint32_t range, uint32_t *next_layer)
{
    struct kvt_gpu *gpu = job->stage->gpu;
    if (job->error != 0)
        return job->error;
    range = KVT_MIN(range, job->range_count - 1);
    int status = kvt_gpu_enter(gpu);
    if (status == 0) {
        kvt_cu_result result;
        do {
            result = gpu->cuda.event_sync(job->range_events[range]);
        } while (result == KVT_CU_NOT_READY);
        status = kvt_gpu_check(gpu, result);
        kvt_gpu_leave(gpu);
    }
    *next_layer = job->plan->ranges[range].next_layer;
    return status == 0 ? 0 : KVT_E_DEVICE;
}

int kvt_gpu_job_poll(struct kvt_gpu_job *job, int wait)
{
    struct kvt_gpu *gpu = job->stage->gpu;
    if (job->error != 0)
        return job->error;
    if (job->done)
        return 1;
    int status = kvt_gpu_enter(gpu);
    if (status == 0) {
        kvt_cu_result result =
            wait ? gpu->cuda.event_sync(job->event) : gpu->cuda.event_query(job->event);
        if (result == KVT_CU_NOT_READY) {
            kvt_gpu_leave(gpu);
            return 0;
        }
        status = kvt_gpu_check(gpu, result) == 0 ? 0 : KVT_E_DEVICE;
        kvt_gpu_leave(gpu);
    }
    job->error = status;
    job->done = status == 0;
    return status == 0 ? 1 : status;
}

int kvt_gpu_job_join(struct kvt_gpu_job *job, void *stream)
{
    struct kvt_gpu *gpu = job->stage->gpu;
    int status = kvt_gpu_enter(gpu);
    if (status == 0) {
        status = await(gpu, stream, job->event);
        kvt_gpu_leave(gpu);
    }
    return status == 0 ? 0 : KVT_E_DEVICE;
}

int kvt_gpu_job_result(const struct kvt_gpu_job *job, size_t index, uint64_t *checksum)
{
    if (checksum != NULL)
        *checksum = 0;
    if (job->error != 0)
        return job->error;
    if (!job->done || index >= job->count)
        return KVT_E_INVAL;
    if (job->path == KVT_GPU_PATH_DIRECT)
        return 0;
    const struct kvt_gpu_result *result = &job->results[index];
    if (result->done != 1) /* the kernel never got there */
        return KVT_E_DEVICE;
    if (checksum != NULL)
        *checksum = result->checksum;
    if (result->status != KVT_GPU_STATUS_OK)
        return (result->status & 1u) == KVT_GPU_STATUS_NONFINITE ? KVT_E_NONFINITE : KVT_E_GUARD;
    if (job->evict)
        return 0;
    const struct kvt_record_header *header = job->items[index].record;
    return result->checksum == header->checksum ? 0 : KVT_E_CORRUPT;
}

void kvt_gpu_job_free(struct kvt_gpu_job *job)
{
    if (job == NULL)
        return;
    while (kvt_gpu_job_poll(job, 1) == 0) { /* event_sync returned early: ask again */
    }
    job->busy = 0;
}
