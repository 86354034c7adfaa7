/* See fake_kernels.h. Walks the part table as the kernels do: record, unit, pieces. */
#include "gpu/fake_kernels.h"

#include <string.h>

#include "codec/guard.h"
#include "codec/half.h"
#include "codec/kernel.h"
#include "format/hash.h"
#include "format/record.h"
#include "gpu/kernel_abi.h"
#include "kvtier/codec.h"

#define TOKENS KVT_TILE_TOKENS

size_t fake_kernel_parameter_bytes(const char *kernel)
{
    return strcmp(kernel, "kvt_gpu_pages") == 0 ? sizeof(struct kvt_gpu_paging)
                                                : sizeof(struct kvt_gpu_coding);
}

struct unit {
    const struct kvt_gpu_part *part;
    uint8_t *payload;
    char *rows;
    uint32_t order;
};

static struct unit unit_of(const struct kvt_gpu_coding *job, uint32_t record, uint32_t index)
{
    const struct kvt_gpu_part *part = (const struct kvt_gpu_part *)(uintptr_t)job->parts;
    uint32_t last = job->part_count - 1;
    if (job->units_per_part != 0)
        part += index / job->units_per_part;
    else
        for (uint32_t i = 0; i < last && part[1].first_unit - job->first_unit <= index; i++)
            part++;
    uint32_t local = index - (part->first_unit - job->first_unit);
    return (struct unit){
        .part = part,
        .payload = (uint8_t *)(uintptr_t)job->payload[record] + part->payload_at +
                   (size_t)local * part->unit_bytes,
        .rows = (char *)(uintptr_t)part->base + part->stride_block * job->block[record] +
                part->stride_head * (local / part->tiles) +
                part->stride_token * (local % part->tiles) * TOKENS,
        .order = part->order_at + local,
    };
}

/* Elements [first, first + count) of 16 rows, between the pool and dense rows. */
static void move_rows(const struct unit *unit, uint32_t first, uint32_t count, void *dense,
                      int to_pool)
{
    const struct kvt_gpu_part *part = unit->part;
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t i = 0; i < count; i++) {
            char *pool = unit->rows + part->stride_token * t + part->stride_elem * (first + i);
            char *own = (char *)dense + ((size_t)t * count + i) * part->element_bytes;
            memcpy(to_pool ? pool : own, to_pool ? own : pool, part->element_bytes);
        }
}

static int level_of(const struct kvt_gpu_part *part)
{
    if (part->coder == KVT_CODER_PLAIN)
        return KVT_LEVEL_INT4;
    if (part->coder == KVT_CODER_GAUSS)
        return part->bits == 4 ? KVT_LEVEL_KV4 : KVT_LEVEL_KV5;
    return part->bits == 6 ? KVT_LEVEL_KV6 : KVT_LEVEL_KV8;
}

static void decode_unit(const struct unit *unit)
{
    const uint8_t *in = unit->payload;
    for (uint32_t at = 0, dim; at < unit->part->head_dim; at += dim) {
        char dense[TOKENS * KVT_PIECE_DIM_MAX * 4];
        struct kvt_piece piece;
        dim = kvt_piece_next_dim(unit->part->head_dim - at);
        kvt_piece_init(&piece, level_of(unit->part), unit->part->dtype, unit->part->key, dim);
        kvt_codec_scalar.decode(&piece, in, dense, (size_t)dim * unit->part->element_bytes);
        move_rows(unit, at, dim, dense, 1);
        in += piece.bytes;
    }
}

/* As measure_rows() of codec/block.c. */
static void measure_rows(const struct unit *unit, float *centred, float *squares)
{
    const struct kvt_gpu_part *part = unit->part;
    for (uint32_t at = 0, dim; at < part->head_dim; at += dim) {
        char dense[TOKENS * KVT_PIECE_DIM_MAX * 4];
        float x[KVT_PIECE_DIM_MAX], around[TOKENS];
        struct kvt_piece piece;
        dim = kvt_piece_next_dim(part->head_dim - at);
        kvt_piece_init(&piece, level_of(part), part->dtype, part->key, dim);
        move_rows(unit, at, dim, dense, 0);
        kvt_codec_scalar.centred(&piece, dense, (size_t)dim * part->element_bytes, around);
        for (uint32_t t = 0; t < TOKENS; t++) {
            kvt_half_to_floats(part->dtype, dense + (size_t)t * dim * part->element_bytes, dim, x);
            for (uint32_t i = 0; i < dim; i++)
                x[i] *= x[i];
            for (uint32_t half = dim / 2; half > 0; half /= 2)
                for (uint32_t i = 0; i < half; i++)
                    x[i] += x[i + half];
            centred[t] = at == 0 ? around[t] : centred[t] + around[t];
            squares[t] = at == 0 ? x[0] : squares[t] + x[0];
        }
    }
}

static int encode_unit(const struct unit *unit, int guard)
{
    uint8_t *out = unit->payload;
    int level = level_of(unit->part), judge = guard && unit->part->guard_ratio > 0.0f;
    struct kvt_tile_energy sum = {0}, energy;
    for (uint32_t at = 0, dim; at < unit->part->head_dim; at += dim) {
        char dense[TOKENS * KVT_PIECE_DIM_MAX * 4];
        struct kvt_piece piece;
        dim = kvt_piece_next_dim(unit->part->head_dim - at);
        kvt_piece_init(&piece, level, unit->part->dtype, unit->part->key, dim);
        move_rows(unit, at, dim, dense, 0);
        if (kvt_codec_scalar.encode(&piece, dense, (size_t)dim * unit->part->element_bytes, out,
                                    judge ? &energy : NULL) != 0)
            return KVT_E_NONFINITE;
        out += piece.bytes;
        if (judge)
            sum.residue = at == 0 ? energy.residue : sum.residue + energy.residue;
        for (uint32_t t = 0; judge && t < TOKENS; t++) {
            sum.rows[t] = at == 0 ? energy.rows[t] : sum.rows[t] + energy.rows[t];
            sum.noise[t] = at == 0 ? energy.noise[t] : sum.noise[t] + energy.noise[t];
        }
    }
    if (!judge || kvt_guard_judge(level, &sum).pass)
        return 0;
    float centred[TOKENS], squares[TOKENS];
    measure_rows(unit, centred, squares);
    return kvt_guard_appeal(level, unit->part->dtype, &sum, centred, squares) ? 0 : KVT_E_GUARD;
}

static int run_coding(const char *kernel, const struct kvt_gpu_coding *job)
{
    for (uint32_t r = 0; r < job->records; r++)
        for (uint32_t u = 0; u < job->unit_count; u++) {
            struct unit unit = unit_of(job, r, u);
            uint32_t *status = (uint32_t *)(uintptr_t)job->status + r;
            if (strcmp(kernel, "kvt_gpu_decode") == 0) {
                decode_unit(&unit);
            } else if (strncmp(kernel, "kvt_gpu_raw_", 12) == 0) {
                move_rows(&unit, 0, unit.part->head_dim, unit.payload,
                          strcmp(kernel, "kvt_gpu_raw_scatter") == 0);
            } else if (strncmp(kernel, "kvt_gpu_encode_", 15) == 0) {
                int rc = encode_unit(&unit, (int)job->guard);
                uint32_t word = unit.order * 2 + (rc == KVT_E_NONFINITE);
                if (rc != 0 && word < *status)
                    *status = word;
            } else {
                return -1;
            }
        }
    return 0;
}

/* Some pages of a record that comes in pieces. */
static void hash_some(const struct kvt_gpu_paging *job, uint32_t record)
{
    const uint8_t *from = (const uint8_t *)(uintptr_t)job->from[record];
    uint64_t *hashes = (uint64_t *)(uintptr_t)job->page_hashes + (size_t)record * job->total_pages;
    uint32_t *counter = (uint32_t *)(uintptr_t)job->counters + record;
    for (uint32_t page = 0; page < job->pages; page++) {
        uint8_t copy[KVT_GPU_PAGE_BYTES];
        memcpy(copy, from + (size_t)page * KVT_GPU_PAGE_BYTES, sizeof(copy));
        if (job->first_page + page == 0)
            memset(copy + KVT_GPU_CHECKSUM_AT, 0, 8);
        hashes[job->first_page + page] = kvt_hash64(copy, sizeof(copy));
    }
    *counter += job->pages;
    if (*counter != job->total_pages)
        return;
    *counter = 0;
    struct kvt_gpu_result *result = (struct kvt_gpu_result *)(uintptr_t)job->results + record;
    *result = (struct kvt_gpu_result){
        .checksum = kvt_hash64(hashes, job->total_pages * sizeof(*hashes)),
        .status = KVT_GPU_STATUS_OK,
        .done = 1,
    };
}

static void run_paging(const struct kvt_gpu_paging *job)
{
    uint32_t bytes = job->pages * KVT_GPU_PAGE_BYTES;
    for (uint32_t r = 0; r < job->records; r++) {
        if (job->pages != job->total_pages) {
            hash_some(job, r);
            continue;
        }
        uint8_t *to = (uint8_t *)(uintptr_t)job->to[r];
        if (job->to[r] != job->from[r])
            memcpy(to, (const void *)(uintptr_t)job->from[r], bytes);
        if (job->make) {
            memcpy(to, (const void *)(uintptr_t)job->header[r], KVT_GPU_HEADER_BYTES);
            memset(to + job->used_bytes, 0, bytes - job->used_bytes);
        }
        struct kvt_gpu_result *result = (struct kvt_gpu_result *)(uintptr_t)job->results + r;
        result->checksum = kvt_record_checksum(to, bytes);
        result->status =
            job->status == 0 ? KVT_GPU_STATUS_OK : ((uint32_t *)(uintptr_t)job->status)[r];
        result->done = 1;
        if (job->make)
            memcpy(to + KVT_GPU_CHECKSUM_AT, &result->checksum, sizeof(result->checksum));
    }
}

int fake_kernel_run(const struct fake_launch *launch)
{
    if (strcmp(launch->kernel, "kvt_gpu_pages") == 0) {
        run_paging(launch->parameter);
        return 0;
    }
    return run_coding(launch->kernel, launch->parameter);
}
