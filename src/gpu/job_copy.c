/* Copies of a wave by the copy engine, between slots and the wave's staging memory. See job.c.
 *
 * Threads: the stage's. Queues only. Does not know what records hold.
 */
#include "base/checked.h"
#include "gpu/gpu_internal.h"

/* Records that are neighbours in host memory (and so in staging) go as one piece; a piece never
 * crosses a seam of memory that is pinned in pieces. */
#define PIECES_MAX 128u

struct pieces {
    size_t count;
    kvt_cu_ptr staging[PIECES_MAX], host[PIECES_MAX];
    size_t bytes[PIECES_MAX];
    int pinned; /* all records of the wave */
};

/* Bytes from `host` to the next seam. */
static size_t to_seam(const struct kvt_gpu *gpu, kvt_cu_ptr host)
{
    kvt_cu_ptr base = (uintptr_t)gpu->grid_base;
    if (base == 0 || host < base)
        return SIZE_MAX;
    return gpu->grid_bytes - (host - base) % gpu->grid_bytes;
}

/* One call for all pieces where the driver can: between separate copies the engine idles for some
 * 3 us, as long as half a record takes. */
static int send_pieces(const struct kvt_gpu_batch *batch, struct pieces *pieces)
{
    struct kvt_gpu_stage *stage = batch->job->stage;
    const struct kvt_cuda *cuda = &stage->gpu->cuda;
    int evict = batch->job->evict, status = 0;
    size_t count = pieces->count;
    pieces->count = 0;
    if (cuda->copy_batch != NULL && pieces->pinned && count > 1) {
        struct kvt_cu_copy_attributes attributes = {.source_order = 1, .flags = 1};
        size_t start = 0, failed = 0;
        return kvt_gpu_check(stage->gpu, cuda->copy_batch(evict ? pieces->host : pieces->staging,
                                                          evict ? pieces->staging : pieces->host,
                                                          pieces->bytes, count, &attributes, &start,
                                                          1, &failed, stage->move_stream));
    }
    for (size_t i = 0; i < count && status == 0; i++) {
        void *host = (void *)(uintptr_t)pieces->host[i];
        kvt_cu_result result =
            evict ? cuda->copy_to_host_async(host, pieces->staging[i], pieces->bytes[i],
                                             stage->move_stream)
                  : cuda->copy_to_device_async(pieces->staging[i], host, pieces->bytes[i],
                                               stage->move_stream);
        status = kvt_gpu_check(stage->gpu, result);
    }
    return status;
}

/* Add [host, host + bytes), which does not cross a seam. */
static int add_piece(const struct kvt_gpu_batch *batch, struct pieces *pieces, kvt_cu_ptr host,
                     kvt_cu_ptr staging, size_t bytes)
{
    size_t last = pieces->count - 1; /* not used when there is none */
    int status = 0;
    if (pieces->count > 0 && host == pieces->host[last] + pieces->bytes[last] &&
        to_seam(batch->job->stage->gpu, pieces->host[last]) > pieces->bytes[last]) {
        pieces->bytes[last] += bytes;
        return 0;
    }
    if (pieces->count == PIECES_MAX)
        status = send_pieces(batch, pieces);
    pieces->host[pieces->count] = host;
    pieces->staging[pieces->count] = staging;
    pieces->bytes[pieces->count++] = bytes;
    return status;
}

int kvt_gpu_run_copies(const struct kvt_gpu_batch *batch)
{
    const struct kvt_gpu_item *items = batch->job->items + batch->first;
    struct pieces pieces;
    pieces.count = 0;
    pieces.pinned = 1;
    for (uint32_t i = 0; i < batch->count; i++)
        pieces.pinned &= batch->slots[i] != 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        kvt_cu_ptr staging = kvt_gpu_staging_of(batch, i);
        kvt_cu_ptr host =
            (uintptr_t)items[i].record + (size_t)batch->range->from_page * KVT_GPU_PAGE_BYTES;
        size_t left = (size_t)batch->range->copy_pages * KVT_GPU_PAGE_BYTES;
        while (left > 0) {
            size_t bytes = KVT_MIN(left, to_seam(batch->job->stage->gpu, host));
            int status = add_piece(batch, &pieces, host, staging, bytes);
            if (status != 0)
                return status;
            host += bytes;
            staging += bytes;
            left -= bytes;
        }
    }
    return send_pieces(batch, &pieces);
}
