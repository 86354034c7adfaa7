/* Plans: checks and tables of one (layout, group, map, pool). See gpu.h.
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
static int check_pool_memory(struct kvt_gpu *gpu, const struct kvt_gpu_source *source)
{
    for (uint32_t i = 0; i < source->layout->part_count; i++) {
        int ordinal = -1;
        unsigned type = 0;
        kvt_cu_ptr base = (uintptr_t)source->pool->places[i].base;
        if (source->layout->parts[i].group != source->group)
            continue;
        if (gpu->cuda.pointer_attribute(&type, KVT_CU_POINTER_MEMORY_TYPE, base) != KVT_CU_OK ||
            type != KVT_CU_MEMORY_TYPE_DEVICE ||
            gpu->cuda.pointer_attribute(&ordinal, KVT_CU_POINTER_DEVICE_ORDINAL, base) !=
                KVT_CU_OK ||
            ordinal != gpu->ordinal)
            return KVT_E_INVAL;
    }
    return 0;
}

/* Table and lead go there by a stream of their own, which is waited for: nothing else is
 * disturbed. The bytes are borrowed until then. */
static int upload(struct kvt_gpu_plan *plan, const void *bytes, size_t count)
{
    struct kvt_gpu *gpu = plan->gpu;
    kvt_cu_stream stream;
    kvt_cu_result result =
        gpu->cuda.stream_create(&stream, KVT_CU_STREAM_NON_BLOCKING, gpu->least_priority);
    if (result != KVT_CU_OK)
        return kvt_gpu_check(gpu, result);
    result = gpu->cuda.copy_to_device_async(plan->parts, bytes, count, stream);
    kvt_cu_result end = gpu->cuda.stream_sync(stream);
    (void)gpu->cuda.stream_destroy(stream);
    return kvt_gpu_check(gpu, result != KVT_CU_OK ? result : end);
}

static int allocate(struct kvt_gpu_plan *plan, size_t bytes)
{
    kvt_cu_result result = plan->gpu->cuda.memory_alloc(&plan->parts, bytes);
    if (result != KVT_CU_OK)
        plan->parts = 0;
    return kvt_gpu_check(plan->gpu, result);
}

/* ---- ranges of layers ---- */

static uint32_t page_of(uint32_t byte)
{
    return byte / KVT_GPU_PAGE_BYTES;
}

/* Bytes [from, to) of the records. `hashed`: pages that the ranges before have hashed. */
static void place_range(const struct kvt_gpu_plan *plan, struct kvt_gpu_range *range, uint32_t from,
                        uint32_t to, uint32_t hashed)
{
    const struct kvt_gpu_stage *stage = plan->stage;
    uint32_t end = page_of(to + KVT_GPU_PAGE_BYTES - 1);
    range->from_page = page_of(from);
    range->copy_pages = end - range->from_page;
    range->hash_page = hashed;
    range->hash_pages = end - hashed;
    range->wave = KVT_MIN(stage->pages / range->copy_pages, stage->opts.wave);
}

/* The lowest layer among the group's parts from `part` on. */
static uint32_t layer_from(const struct kvt_gpu_source *source, uint32_t part)
{
    uint32_t lowest = UINT32_MAX;
    for (uint32_t i = part; i < source->layout->part_count; i++)
        if (source->layout->parts[i].group == source->group)
            lowest = KVT_MIN(lowest, source->layout->parts[i].layer);
    return lowest;
}

/* The part of the group that follows; part_count: none. */
static uint32_t part_after(const struct kvt_gpu_source *source, uint32_t part)
{
    const struct kvt_layout *layout = source->layout;
    do {
        part++;
    } while (part < layout->part_count && layout->parts[part].group != source->group);
    return part;
}

/* Cut the records into ranges of nearly equal length between layers. first[]: the first part of
 * each range, and after the last. */
static void cut_ranges(struct kvt_gpu_plan *plan, const struct kvt_gpu_source *source,
                       uint32_t first[KVT_GPU_RANGES_MAX + 1])
{
    const struct kvt_part *parts = source->layout->parts;
    uint32_t least = source->map->range_bytes, entry = 0, from = 0, hashed = 0;
    uint32_t at = KVT_GPU_HEADER_BYTES + source->map->lead_bytes, count = 0;
    uint32_t wanted = least == 0 ? 1 : KVT_MIN(plan->record_bytes / least, KVT_GPU_RANGES_MAX);
    first[0] = 0;
    for (uint32_t i = 0; i < source->layout->part_count; i++) {
        at += kvt_gpu_part_bytes(source, i, &entry);
        uint32_t next = part_after(source, i), end = page_of(at + KVT_GPU_PAGE_BYTES - 1);
        if (parts[i].group != source->group || next == source->layout->part_count ||
            parts[next].layer == parts[i].layer || count + 1 >= wanted)
            continue;
        if (at < (count + 1) * (uint64_t)plan->record_bytes / wanted || end <= hashed ||
            end >= plan->pages) /* each range has a page that no other hashes */
            continue;
        struct kvt_gpu_range *range = &plan->ranges[count++];
        place_range(plan, range, from, at, hashed);
        hashed = range->hash_page + range->hash_pages;
        from = at;
        first[count] = i + 1;
        range->next_layer = layer_from(source, i + 1);
    }
    place_range(plan, &plan->ranges[count], from, plan->record_bytes, hashed);
    plan->ranges[count].next_layer = UINT32_MAX;
    plan->range_count = count + 1;
    first[plan->range_count] = source->layout->part_count;
}

/* The tables of the whole and of each range, one behind the other. parts: NULL to count. */
static uint32_t build_tables(struct kvt_gpu_plan *plan, const struct kvt_gpu_source *whole,
                             const uint32_t *first, struct kvt_gpu_part *parts)
{
    struct kvt_gpu_source source = *whole;
    struct kvt_gpu_spans *spans = &plan->whole.spans;
    uint32_t count = kvt_gpu_table(&source, parts, 0, 0, spans);
    for (uint32_t r = 0; r < plan->range_count && plan->range_count > 1; r++) {
        uint32_t unit = spans->end_unit;
        source.first_part = first[r];
        source.part_count = first[r + 1] - first[r];
        spans = &plan->ranges[r].spans;
        count += kvt_gpu_table(&source, parts, count, unit, spans);
    }
    if (plan->range_count == 1)
        plan->ranges[0] = plan->whole;
    return count;
}

/* The image of the device's memory: entries, then the lead. Our context is current. */
static int build(struct kvt_gpu_plan *plan, struct kvt_gpu_source *source)
{
    const struct kvt_gpu_map *map = source->map;
    uint32_t first[KVT_GPU_RANGES_MAX + 1];
    cut_ranges(plan, source, first);
    size_t count = build_tables(plan, source, first, NULL);
    size_t entries = (size_t)kvt_round_up(count * sizeof(struct kvt_gpu_part), 256);
    size_t bytes = entries + map->lead_bytes;
    uint8_t *image = calloc(1, bytes);
    if (image == NULL)
        return -ENOMEM;
    int status = check_pool_memory(plan->gpu, source);
    if (status == 0)
        status = allocate(plan, bytes);
    if (status == 0) {
        source->lead = plan->parts + entries;
        (void)build_tables(plan, source, first, (struct kvt_gpu_part *)(void *)image);
        if (map->lead_bytes > 0)
            memcpy(image + entries, map->lead, map->lead_bytes);
        status = upload(plan, image, bytes);
    }
    free(image);
    return status;
}

/* What can be refused without the device. *used: of a payload, the rest is zero; *payload: all. */
static int check(const struct kvt_gpu *gpu, const struct kvt_gpu_source *source, size_t *used,
                 size_t *payload)
{
    const struct kvt_gpu_map *map = source->map;
    int status = kvt_layout_check(source->layout);
    if (status == 0)
        status = kvt_pool_check(source->layout, source->pool);
    if (status != 0)
        return status;
    size_t coded = map->levels != NULL
                       ? kvt_map_payload_bytes(source->layout, source->group, map->levels, NULL)
                       : kvt_payload_bytes(source->layout, source->group, map->level);
    *used = coded + map->lead_bytes;
    *payload = map->levels != NULL ? map->payload_bytes : coded;
    if (coded == 0 || *used > *payload || map->lead_bytes % 16 != 0 ||
        (map->levels == NULL && map->lead_bytes > 0))
        return KVT_E_INVAL;
    return kvt_record_bytes(*payload) == 0 || source->pool->device != gpu->ordinal ? KVT_E_INVAL
                                                                                   : 0;
}

int kvt_gpu_plan_on(struct kvt_gpu_stage *stage, const struct kvt_layout *layout, uint16_t group,
                    const struct kvt_gpu_map *map, const struct kvt_pool_desc *pool,
                    struct kvt_gpu_plan **out)
{
    struct kvt_gpu_source source = {.layout = layout,
                                    .map = map,
                                    .pool = pool,
                                    .group = group,
                                    .part_count = layout->part_count};
    size_t used, payload;
    int status = check(stage->gpu, &source, &used, &payload);
    if (status != 0)
        return status;
    struct kvt_gpu_plan *plan = calloc(1, sizeof(*plan));
    if (plan == NULL)
        return -ENOMEM;
    plan->gpu = stage->gpu;
    plan->stage = stage;
    plan->block_count = pool->block_count;
    plan->used_bytes = KVT_GPU_HEADER_BYTES + (uint32_t)used;
    plan->record_bytes = kvt_record_bytes(payload);
    plan->pages = plan->record_bytes / KVT_PAGE_BYTES;
    place_range(plan, &plan->whole, 0, plan->record_bytes, 0);
    plan->whole.next_layer = UINT32_MAX;
    status = plan->whole.wave == 0 ? KVT_E_LIMIT : kvt_gpu_enter(plan->gpu);
    if (status == 0) {
        status = build(plan, &source);
        kvt_gpu_leave(plan->gpu);
    }
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
    struct kvt_gpu_map map = {.level = level};
    struct kvt_gpu_source source = {.layout = layout, .map = &map, .pool = pool, .group = group};
    struct kvt_gpu_stage_opts own = {0};
    struct kvt_gpu_stage *stage;
    size_t used, payload;
    int status = check(gpu, &source, &used, &payload);
    if (status != 0)
        return status;
    if (opts != NULL)
        own = *opts;
    own.record_bytes = kvt_record_bytes(payload);
    status = kvt_gpu_stage_new(gpu, &own, &stage);
    if (status != 0)
        return status;
    status = kvt_gpu_plan_on(stage, layout, group, &map, pool, out);
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
