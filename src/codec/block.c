/* One block: walks part, head, tile and piece of a group, in payload order, and hands each piece to
 * the instruction set in force.
 *
 * Invariants: layout and pool have passed their checks, so no offset here can overflow; the payload
 * length is compared with kvt_payload_bytes() before the first byte moves, and the walk consumes
 * exactly that many. Memory: one piece on the stack, for pools whose elements are not contiguous.
 * Threads: any; no state. It does not choose levels: KVT_E_GUARD tells the caller to.
 */
#include <math.h>
#include <string.h>

#include "codec/block.h"
#include "codec/fpmode.h"
#include "codec/guard.h"
#include "codec/half.h"
#include "codec/piece.h"

#define TOKENS KVT_TILE_TOKENS

/* Where one (part, head) of a page lies. */
struct rows {
    char *base; /* token 0, element 0 */
    int64_t stride_token;
    int64_t stride_elem;
    uint32_t element_bytes;
    uint32_t head_dim;
};

static struct rows rows_of(const struct kvt_part *part, const struct kvt_part_place *place,
                           uint32_t block, uint32_t head)
{
    return (struct rows){
        .base = (char *)place->base + place->stride_block * block + place->stride_head * head,
        .stride_token = place->stride_token,
        .stride_elem = place->stride_elem,
        .element_bytes = kvt_dtype_bytes(part->dtype),
        .head_dim = part->head_dim,
    };
}

static int is_contiguous(const struct rows *rows)
{
    return rows->stride_elem == (int64_t)rows->element_bytes;
}

/* ---- moving elements between a pool of any strides and dense rows ---- */

#define COPY_ELEMENTS(type)                  \
    for (uint32_t t = 0; t < tokens; t++)    \
        for (uint32_t i = 0; i < count; i++) \
    memcpy(to + t * to_token + i * to_elem, from + t * from_token + i * from_elem, sizeof(type))

static void copy_elements(char *to, int64_t to_token, int64_t to_elem, const char *from,
                          int64_t from_token, int64_t from_elem, uint32_t tokens, uint32_t count,
                          uint32_t element_bytes)
{
    if (element_bytes == 2)
        COPY_ELEMENTS(uint16_t);
    else if (element_bytes == 4)
        COPY_ELEMENTS(uint32_t);
    else
        COPY_ELEMENTS(uint8_t);
}

static void gather(const struct rows *rows, uint32_t token, uint32_t tokens, uint32_t element,
                   uint32_t count, void *dense)
{
    int64_t size = rows->element_bytes;
    copy_elements(dense, size * count, size,
                  rows->base + rows->stride_token * token + rows->stride_elem * element,
                  rows->stride_token, rows->stride_elem, tokens, count, rows->element_bytes);
}

static void scatter(const struct rows *rows, uint32_t token, uint32_t tokens, uint32_t element,
                    uint32_t count, const void *dense)
{
    int64_t size = rows->element_bytes;
    copy_elements(rows->base + rows->stride_token * token + rows->stride_elem * element,
                  rows->stride_token, rows->stride_elem, dense, size * count, size, tokens, count,
                  rows->element_bytes);
}

/* ---- raw ---- */

static size_t copy_raw(const struct rows *rows, uint32_t tokens, void *payload, int to_payload)
{
    size_t row_bytes = (size_t)rows->head_dim * rows->element_bytes;
    for (uint32_t t = 0; t < tokens; t++) {
        char *dense = (char *)payload + t * row_bytes;
        char *row = rows->base + rows->stride_token * t;
        if (!is_contiguous(rows) && to_payload)
            gather(rows, t, 1, 0, rows->head_dim, dense);
        else if (!is_contiguous(rows))
            scatter(rows, t, 1, 0, rows->head_dim, dense);
        else if (to_payload)
            memcpy(dense, row, row_bytes);
        else
            memcpy(row, dense, row_bytes);
    }
    return tokens * row_bytes;
}

/* ---- coded tiles ---- */

struct tile_job {
    const struct kvt_codec_kernels *kernels;
    const struct kvt_part *part;
    struct rows rows;
    int level;
    uint32_t tile;
};

static int encode_tile(const struct tile_job *job, uint8_t *out, struct kvt_tile_energy *energy)
{
    int key = kvt_part_is_key(job->part), status = 0;
    char dense[TOKENS * KVT_PIECE_DIM_MAX * 4];
    const struct rows *rows = &job->rows;
    for (uint32_t at = 0, dim; at < rows->head_dim && status == 0; at += dim) {
        struct kvt_piece piece;
        struct kvt_tile_energy part_energy;
        const char *source = rows->base + rows->stride_token * (job->tile * (int64_t)TOKENS) +
                             rows->stride_elem * at;
        size_t stride = (size_t)rows->stride_token;
        dim = kvt_piece_next_dim(rows->head_dim - at);
        kvt_piece_init(&piece, job->level, job->part->dtype, key, dim);
        if (!is_contiguous(rows)) {
            gather(rows, job->tile * TOKENS, TOKENS, at, dim, dense);
            source = dense;
            stride = (size_t)dim * rows->element_bytes;
        }
        status = job->kernels->encode(&piece, source, stride, out, energy ? &part_energy : NULL);
        out += piece.bytes;
        for (uint32_t t = 0; energy != NULL && status == 0 && t < TOKENS; t++) {
            energy->signal[t] =
                at == 0 ? part_energy.signal[t] : energy->signal[t] + part_energy.signal[t];
            energy->noise[t] =
                at == 0 ? part_energy.noise[t] : energy->noise[t] + part_energy.noise[t];
        }
    }
    return status;
}

static void decode_tile(const struct tile_job *job, const uint8_t *in)
{
    int key = kvt_part_is_key(job->part);
    char dense[TOKENS * KVT_PIECE_DIM_MAX * 4];
    const struct rows *rows = &job->rows;
    for (uint32_t at = 0, dim; at < rows->head_dim; at += dim) {
        struct kvt_piece piece;
        dim = kvt_piece_next_dim(rows->head_dim - at);
        kvt_piece_init(&piece, job->level, job->part->dtype, key, dim);
        if (is_contiguous(rows)) {
            char *target = rows->base + rows->stride_token * (job->tile * (int64_t)TOKENS) +
                           rows->stride_elem * at;
            job->kernels->decode(&piece, in, target, (size_t)rows->stride_token);
        } else {
            job->kernels->decode(&piece, in, dense, (size_t)dim * rows->element_bytes);
            scatter(rows, job->tile * TOKENS, TOKENS, at, dim, dense);
        }
        in += piece.bytes;
    }
}

/* ---- guard ---- */

/* Sum of x*x of each row of the tile: per piece a tree, pieces in order. Slow path only. */
static void row_square_sums(const struct tile_job *job, float *sums)
{
    const struct rows *rows = &job->rows;
    for (uint32_t t = 0; t < TOKENS; t++) {
        sums[t] = 0.0f;
        for (uint32_t at = 0, dim; at < rows->head_dim; at += dim) {
            char dense[KVT_PIECE_DIM_MAX * 4];
            float squares[KVT_PIECE_DIM_MAX];
            dim = kvt_piece_next_dim(rows->head_dim - at);
            gather(rows, job->tile * TOKENS + t, 1, at, dim, dense);
            kvt_half_to_floats(job->part->dtype, dense, dim, squares);
            for (uint32_t i = 0; i < dim; i++)
                squares[i] = squares[i] * squares[i];
            for (uint32_t half = dim / 2; half > 0; half /= 2)
                for (uint32_t i = 0; i < half; i++)
                    squares[i] = squares[i] + squares[i + half];
            sums[t] = sums[t] + squares[0];
        }
    }
}

static int apply_guard(const struct tile_job *job, const struct kvt_tile_energy *energy,
                       uint32_t part, uint32_t head, struct kvt_encode_report *report)
{
    struct kvt_guard_verdict verdict = kvt_guard_judge(job->level, energy);
    if (!verdict.pass) {
        float sums[TOKENS];
        row_square_sums(job, sums);
        if (kvt_guard_excused(job->level, job->part->dtype, energy, sums))
            return 1;
    }
    float ratio_db =
        verdict.noise > 0.0f ? 10.0f * log10f(verdict.signal / verdict.noise) : INFINITY;
    if (ratio_db < report->sqnr_db_min) {
        report->sqnr_db_min = ratio_db;
        report->part = part;
        report->head = head;
        report->tile = job->tile;
    }
    return verdict.pass;
}

/* ---- block ---- */

struct block_job {
    const struct kvt_layout *layout;
    const struct kvt_pool_desc *pool;
    const struct kvt_codec_kernels *kernels;
    uint32_t block;
    int level;
    int guard;       /* a bad tile is an error */
    int want_energy; /* guard or report */
};

static int encode_head(const struct block_job *block, uint32_t part_index, uint32_t head,
                       uint8_t **cursor, struct kvt_encode_report *report)
{
    const struct kvt_part *part = &block->layout->parts[part_index];
    struct tile_job job = {
        .kernels = block->kernels,
        .part = part,
        .rows = rows_of(part, &block->pool->places[part_index], block->block, head),
        .level = kvt_level_for_part(block->level, part),
    };
    if (job.level == KVT_LEVEL_RAW) {
        *cursor += copy_raw(&job.rows, block->layout->block_tokens, *cursor, 1);
        return 0;
    }
    int judged = block->want_energy && kvt_part_is_key(part) && kvt_guard_ratio(job.level) > 0.0f;
    uint32_t tile_bytes = kvt_tile_bytes(job.level, part);
    for (; job.tile < block->layout->block_tokens / TOKENS; job.tile++) {
        struct kvt_tile_energy energy;
        int status = encode_tile(&job, *cursor, judged ? &energy : NULL);
        if (status != 0)
            return status;
        if (judged && !apply_guard(&job, &energy, part_index, head, report) && block->guard)
            return KVT_E_GUARD;
        *cursor += tile_bytes;
    }
    return 0;
}

int kvt_encode_block_by(const struct kvt_codec_kernels *kernels, const struct kvt_layout *layout,
                        uint16_t group, int level, const struct kvt_pool_desc *pool, uint32_t block,
                        void *payload, size_t payload_len, int guard,
                        struct kvt_encode_report *report)
{
    struct kvt_encode_report own = {.sqnr_db_min = INFINITY};
    struct block_job job = {layout, pool, kernels, block, level, guard, guard || report != NULL};
    size_t bytes = kvt_payload_bytes(layout, group, level);
    if (bytes == 0 || payload_len < bytes || block >= pool->block_count ||
        pool->device != KVT_DEVICE_HOST)
        return KVT_E_INVAL;
    kvt_fpmode saved = kvt_fpmode_enter();
    uint8_t *cursor = payload;
    int status = 0;
    for (uint32_t i = 0; i < layout->part_count && status == 0; i++) {
        if (layout->parts[i].group != group)
            continue;
        for (uint32_t head = 0; head < layout->parts[i].heads && status == 0; head++)
            status = encode_head(&job, i, head, &cursor, &own);
    }
    kvt_fpmode_leave(saved);
    if (report != NULL)
        *report = own;
    return status;
}

static void decode_head(const struct block_job *block, uint32_t part_index, uint32_t head,
                        uint8_t **cursor)
{
    const struct kvt_part *part = &block->layout->parts[part_index];
    struct tile_job job = {
        .kernels = block->kernels,
        .part = part,
        .rows = rows_of(part, &block->pool->places[part_index], block->block, head),
        .level = kvt_level_for_part(block->level, part),
    };
    if (job.level == KVT_LEVEL_RAW) {
        *cursor += copy_raw(&job.rows, block->layout->block_tokens, *cursor, 0);
        return;
    }
    uint32_t tile_bytes = kvt_tile_bytes(job.level, part);
    for (; job.tile < block->layout->block_tokens / TOKENS; job.tile++) {
        decode_tile(&job, *cursor);
        *cursor += tile_bytes;
    }
}

int kvt_decode_block_by(const struct kvt_codec_kernels *kernels, const struct kvt_layout *layout,
                        uint16_t group, int level, const void *payload, size_t payload_len,
                        const struct kvt_pool_desc *pool, uint32_t block)
{
    struct block_job job = {layout, pool, kernels, block, level, 0, 0};
    size_t bytes = kvt_payload_bytes(layout, group, level);
    if (bytes == 0 || payload_len != bytes || block >= pool->block_count ||
        pool->device != KVT_DEVICE_HOST)
        return KVT_E_INVAL;
    kvt_fpmode saved = kvt_fpmode_enter();
    uint8_t *cursor = (uint8_t *)(uintptr_t)payload; /* only read from here on */
    for (uint32_t i = 0; i < layout->part_count; i++) {
        if (layout->parts[i].group != group)
            continue;
        for (uint32_t head = 0; head < layout->parts[i].heads; head++)
            decode_head(&job, i, head, &cursor);
    }
    kvt_fpmode_leave(saved);
    return 0;
}

int kvt_encode_block(const struct kvt_layout *layout, uint16_t group, int level,
                     const struct kvt_pool_desc *pool, uint32_t block, void *payload,
                     size_t payload_len, int guard, struct kvt_encode_report *report)
{
    return kvt_encode_block_by(kvt_codec_kernels(), layout, group, level, pool, block, payload,
                               payload_len, guard, report);
}

int kvt_decode_block(const struct kvt_layout *layout, uint16_t group, int level,
                     const void *payload, size_t payload_len, const struct kvt_pool_desc *pool,
                     uint32_t block)
{
    return kvt_decode_block_by(kvt_codec_kernels(), layout, group, level, payload, payload_len,
                               pool, block);
}
