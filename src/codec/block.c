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

/* Rows of one piece as the kernels want them. */
struct piece_rows {
    struct kvt_piece piece;
    char *at;
    size_t stride_bytes;
    uint32_t element; /* first of the row's that belongs to the piece */
    int in_dense;     /* gathered, or to be scattered */
};

static struct piece_rows piece_rows_of(const struct tile_job *job, uint32_t element, char *dense)
{
    const struct rows *rows = &job->rows;
    struct piece_rows result = {.element = element};
    uint32_t dim = kvt_piece_next_dim(rows->head_dim - element);
    kvt_piece_init(&result.piece, job->level, job->part->dtype, kvt_part_is_key(job->part), dim);
    result.in_dense = !is_contiguous(rows);
    result.at = result.in_dense ? dense
                                : rows->base + rows->stride_token * (job->tile * (int64_t)TOKENS) +
                                      rows->stride_elem * element;
    result.stride_bytes =
        result.in_dense ? (size_t)dim * rows->element_bytes : (size_t)rows->stride_token;
    return result;
}

static void fetch_rows(const struct tile_job *job, const struct piece_rows *rows)
{
    if (rows->in_dense)
        gather(&job->rows, job->tile * TOKENS, TOKENS, rows->element, rows->piece.dim, rows->at);
}

static void add_energy(struct kvt_tile_energy *sum, const struct kvt_tile_energy *piece, int first)
{
    if (first) {
        *sum = *piece;
        return;
    }
    for (uint32_t t = 0; t < TOKENS; t++) {
        sum->rows[t] = sum->rows[t] + piece->rows[t];
        sum->noise[t] = sum->noise[t] + piece->noise[t];
    }
    sum->residue = sum->residue + piece->residue;
}

static int encode_tile(const struct tile_job *job, uint8_t *out, struct kvt_tile_energy *energy)
{
    char dense[TOKENS * KVT_PIECE_DIM_MAX * 4];
    for (uint32_t at = 0; at < job->rows.head_dim;) {
        struct piece_rows rows = piece_rows_of(job, at, dense);
        struct kvt_tile_energy piece_energy;
        fetch_rows(job, &rows);
        int status = job->kernels->encode(&rows.piece, rows.at, rows.stride_bytes, out,
                                          energy ? &piece_energy : NULL);
        if (status != 0)
            return status;
        if (energy != NULL)
            add_energy(energy, &piece_energy, at == 0);
        out += rows.piece.bytes;
        at += rows.piece.dim;
    }
    return 0;
}

static void decode_tile(const struct tile_job *job, const uint8_t *in)
{
    char dense[TOKENS * KVT_PIECE_DIM_MAX * 4];
    for (uint32_t at = 0; at < job->rows.head_dim;) {
        struct piece_rows rows = piece_rows_of(job, at, dense);
        job->kernels->decode(&rows.piece, in, rows.at, rows.stride_bytes);
        if (rows.in_dense)
            scatter(&job->rows, job->tile * TOKENS, TOKENS, at, rows.piece.dim, dense);
        in += rows.piece.bytes;
        at += rows.piece.dim;
    }
}

/* ---- guard ---- */

/* What only doubtful tiles need: energy of each row, around the tile's mean and around zero; per
 * piece a tree, pieces in order. */
static void measure_rows(const struct tile_job *job, float *centred, float *square_sums)
{
    char dense[TOKENS * KVT_PIECE_DIM_MAX * 4];
    for (uint32_t at = 0; at < job->rows.head_dim;) {
        struct piece_rows rows = piece_rows_of(job, at, dense);
        uint32_t dim = rows.piece.dim;
        float piece_centred[TOKENS], x[KVT_PIECE_DIM_MAX];
        fetch_rows(job, &rows);
        job->kernels->centred(&rows.piece, rows.at, rows.stride_bytes, piece_centred);
        for (uint32_t t = 0; t < TOKENS; t++) {
            kvt_half_to_floats(job->part->dtype, rows.at + rows.stride_bytes * t, dim, x);
            for (uint32_t i = 0; i < dim; i++)
                x[i] = x[i] * x[i];
            for (uint32_t half = dim / 2; half > 0; half /= 2)
                for (uint32_t i = 0; i < half; i++)
                    x[i] = x[i] + x[i + half];
            centred[t] = at == 0 ? piece_centred[t] : centred[t] + piece_centred[t];
            square_sums[t] = at == 0 ? x[0] : square_sums[t] + x[0];
        }
        at += dim;
    }
}

static int apply_guard(const struct tile_job *job, const struct kvt_tile_energy *energy,
                       uint32_t part, uint32_t head, struct kvt_encode_report *report)
{
    struct kvt_guard_verdict verdict = kvt_guard_judge(job->level, energy);
    int pass = verdict.pass;
    if (!pass) {
        float centred[TOKENS], square_sums[TOKENS];
        measure_rows(job, centred, square_sums);
        pass = kvt_guard_appeal(job->level, job->part->dtype, energy, centred, square_sums);
    }
    /* a ratio until kvt_encode_block_by() ends; excused tiles say nothing about quality */
    float ratio = verdict.noise > 0.0f ? verdict.signal / verdict.noise : INFINITY;
    int excused = pass && ratio < kvt_guard_ratio(job->level);
    if (!excused && ratio < report->sqnr_db_min) {
        report->sqnr_db_min = ratio;
        report->part = part;
        report->head = head;
        report->tile = job->tile;
    }
    return pass;
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
    own.sqnr_db_min = 10.0f * log10f(own.sqnr_db_min);
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
