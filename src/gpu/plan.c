/* Plans: checks and tables of one (layout, group, level, pool). See gpu.h.
 *
 * A plan is immutable; its table lies in device memory of its own. Threads: any.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "format/record.h"
#include "gpu/gpu_internal.h"
#include "kvtier/codec.h"

uint32_t kvt_gpu_plan_record_bytes(const struct kvt_gpu_plan *plan)
{
    return plan->record_bytes;
}

/* Every part of the group lies in memory of our device. */
static int check_pool_memory(struct kvt_gpu *gpu, const struct kvt_gpu_part *parts, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        int ordinal = -1;
        unsigned type = 0;
        if (gpu->cuda.pointer_attribute(&type, KVT_CU_POINTER_MEMORY_TYPE, parts[i].base) !=
                KVT_CU_OK ||
            type != KVT_CU_MEMORY_TYPE_DEVICE ||
            gpu->cuda.pointer_attribute(&ordinal, KVT_CU_POINTER_DEVICE_ORDINAL, parts[i].base) !=
                KVT_CU_OK ||
            ordinal != gpu->ordinal)
            return KVT_E_INVAL;
    }
    return 0;
}

/* The table goes there by a stream of its own, which is waited for: nothing else is disturbed. */
static int upload(struct kvt_gpu_plan *plan, const struct kvt_gpu_part *parts, uint32_t count)
{
    struct kvt_gpu *gpu = plan->gpu;
    kvt_cu_stream stream;
    kvt_cu_result result = gpu->cuda.memory_alloc(&plan->parts, count * sizeof(*parts));
    if (result != KVT_CU_OK) {
        plan->parts = 0;
        return kvt_gpu_check(gpu, result);
    }
    result = gpu->cuda.stream_create(&stream, KVT_CU_STREAM_NON_BLOCKING, gpu->least_priority);
    if (result != KVT_CU_OK)
        return kvt_gpu_check(gpu, result);
    result = gpu->cuda.copy_to_device_async(plan->parts, parts, count * sizeof(*parts), stream);
    kvt_cu_result end = gpu->cuda.stream_sync(stream); /* parts is borrowed until here */
    (void)gpu->cuda.stream_destroy(stream);
    return kvt_gpu_check(gpu, result != KVT_CU_OK ? result : end);
}

static int build(struct kvt_gpu_plan *plan, const struct kvt_layout *layout, uint16_t group,
                 int level, const struct kvt_pool_desc *pool)
{
    struct kvt_gpu_part *parts = calloc(layout->part_count, sizeof(*parts));
    if (parts == NULL)
        return -ENOMEM;
    uint32_t count = kvt_gpu_table(layout, group, level, pool, parts, plan->classes, &plan->coded);
    int status = kvt_gpu_enter(plan->gpu);
    if (status == 0) {
        status = check_pool_memory(plan->gpu, parts, count);
        if (status == 0)
            status = upload(plan, parts, count);
        kvt_gpu_leave(plan->gpu);
    }
    free(parts);
    return status;
}

/* What can be refused without the device. */
static int check(const struct kvt_gpu *gpu, const struct kvt_layout *layout, uint16_t group,
                 int level, const struct kvt_pool_desc *pool)
{
    int status = kvt_layout_check(layout);
    if (status == 0)
        status = kvt_pool_check(layout, pool);
    if (status != 0)
        return status;
    size_t payload = kvt_payload_bytes(layout, group, level);
    return payload == 0 || kvt_record_bytes(payload) == 0 || pool->device != gpu->ordinal
               ? KVT_E_INVAL
               : 0;
}

int kvt_gpu_plan_on(struct kvt_gpu_stage *stage, const struct kvt_layout *layout, uint16_t group,
                    int level, const struct kvt_pool_desc *pool, struct kvt_gpu_plan **out)
{
    int status = check(stage->gpu, layout, group, level, pool);
    if (status != 0)
        return status;
    struct kvt_gpu_plan *plan = calloc(1, sizeof(*plan));
    if (plan == NULL)
        return -ENOMEM;
    size_t payload = kvt_payload_bytes(layout, group, level);
    plan->gpu = stage->gpu;
    plan->stage = stage;
    plan->block_count = pool->block_count;
    plan->payload_bytes = (uint32_t)payload;
    plan->record_bytes = kvt_record_bytes(payload);
    plan->pages = plan->record_bytes / KVT_PAGE_BYTES;
    plan->wave = KVT_MIN(stage->pages / plan->pages, stage->opts.wave);
    status = plan->wave == 0 ? KVT_E_LIMIT : build(plan, layout, group, level, pool);
    if (status != 0) {
        kvt_gpu_plan_free(plan);
        return status;
    }
    *out = plan;
    return 0;
}

int kvt_gpu_plan_new(struct kvt_gpu *gpu, const struct kvt_layout *layout, uint16_t group,
                     int level, const struct kvt_pool_desc *pool,
                     const struct kvt_gpu_stage_opts *opts, struct kvt_gpu_plan **out)
{
    struct kvt_gpu_stage_opts own = {0};
    struct kvt_gpu_stage *stage;
    int status = check(gpu, layout, group, level, pool);
    if (status != 0)
        return status;
    if (opts != NULL)
        own = *opts;
    own.record_bytes = kvt_record_bytes(kvt_payload_bytes(layout, group, level));
    status = kvt_gpu_stage_new(gpu, &own, &stage);
    if (status != 0)
        return status;
    status = kvt_gpu_plan_on(stage, layout, group, level, pool, out);
    if (status == 0)
        (*out)->own_stage = 1;
    else
        kvt_gpu_stage_free(stage);
    return status;
}

void kvt_gpu_plan_free(struct kvt_gpu_plan *plan)
{
    if (plan == NULL)
        return;
    struct kvt_gpu *gpu = plan->gpu;
    if (kvt_gpu_enter_to_release(gpu) == 0) {
        kvt_gpu_stage_sync(plan->stage);
        if (plan->parts != 0)
            (void)gpu->cuda.memory_free(plan->parts);
        kvt_gpu_leave(gpu);
    }
    if (plan->own_stage)
        kvt_gpu_stage_free(plan->stage);
    free(plan);
}
