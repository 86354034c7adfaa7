/* One block: walks part, head, tile and piece of a group, in payload order, and hands each piece to
 * the instruction set in force.
 *
 * Invariants: layout and pool have passed their checks, so no offset here can overflow; the payload
 * length is compared with the map's before the first byte moves, and the walk consumes
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
#include "codec/rows.h"

#define TOKENS KVT_TILE_TOKENS

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
    const uint8_t *map; /* NULL: uniform */
    int level;          /* of a uniform map */
    uint32_t block;
    uint16_t group;
    int guard;       /* a bad tile is an error */
    int want_energy; /* guard or report */
    uint32_t tokens; /* of a block */
    uint32_t entry;  /* of the map: (part, head) that is next */
};

static struct tile_job head_job(struct block_job *block, uint32_t part_index, uint32_t head)
{
    const struct kvt_part *part = &block->layout->parts[part_index];
    uint32_t entry = block->entry++;
    return (struct tile_job){
        .kernels = block->kernels,
        .part = part,
        .rows = rows_of(part, &block->pool->places[part_index], block->block, head),
        .level = block->map != NULL ? kvt_map_get(block->map, entry)
                                    : kvt_level_for_part(block->level, part),
    };
}

static int encode_head(struct block_job *block, uint32_t part_index, uint32_t head,
                       uint8_t **cursor, struct kvt_encode_report *report)
{
    struct tile_job job = head_job(block, part_index, head);
    if (job.level == KVT_LEVEL_RAW) {
        *cursor += copy_raw(&job.rows, block->tokens, *cursor, 1);
        return 0;
    }
    int judged =
        block->want_energy && kvt_part_is_key(job.part) && kvt_guard_ratio(job.level) > 0.0f;
    uint32_t tile_bytes = kvt_tile_bytes(job.level, job.part);
    for (; job.tile < block->tokens / TOKENS; job.tile++) {
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

static size_t job_payload_bytes(const struct block_job *job)
{
    return job->map != NULL ? kvt_map_payload_bytes(job->layout, job->group, job->map, NULL)
                            : kvt_payload_bytes(job->layout, job->group, job->level);
}

static int encode_job(struct block_job *job, void *payload, size_t payload_len,
                      struct kvt_encode_report *report)
{
    struct kvt_encode_report own = {.sqnr_db_min = INFINITY};
    const struct kvt_layout *layout = job->layout;
    size_t bytes = job_payload_bytes(job);
    if (bytes == 0 || payload_len < bytes || job->block >= job->pool->block_count ||
        job->pool->device != KVT_DEVICE_HOST)
        return KVT_E_INVAL;
    job->want_energy = job->guard || report != NULL;
    job->tokens = kvt_group_tokens(layout, job->group);
    kvt_fpmode saved = kvt_fpmode_enter();
    uint8_t *cursor = payload;
    int status = 0;
    for (uint32_t i = 0; i < layout->part_count && status == 0; i++) {
        if (layout->parts[i].group != job->group)
            continue;
        for (uint32_t head = 0; head < layout->parts[i].heads && status == 0; head++)
            status = encode_head(job, i, head, &cursor, &own);
    }
    own.sqnr_db_min = 10.0f * log10f(own.sqnr_db_min);
    kvt_fpmode_leave(saved);
    if (report != NULL)
        *report = own;
    return status;
}

static void decode_head(struct block_job *block, uint32_t part_index, uint32_t head,
                        uint8_t **cursor)
{
    struct tile_job job = head_job(block, part_index, head);
    if (job.level == KVT_LEVEL_RAW) {
        *cursor += copy_raw(&job.rows, block->tokens, *cursor, 0);
        return;
    }
    uint32_t tile_bytes = kvt_tile_bytes(job.level, job.part);
    for (; job.tile < block->tokens / TOKENS; job.tile++) {
        decode_tile(&job, *cursor);
        *cursor += tile_bytes;
    }
}

static int decode_job(struct block_job *job, const void *payload, size_t payload_len)
{
    const struct kvt_layout *layout = job->layout;
    size_t bytes = job_payload_bytes(job);
    if (bytes == 0 || payload_len != bytes || job->block >= job->pool->block_count ||
        job->pool->device != KVT_DEVICE_HOST)
        return KVT_E_INVAL;
    job->tokens = kvt_group_tokens(layout, job->group);
    kvt_fpmode saved = kvt_fpmode_enter();
    uint8_t *cursor = (uint8_t *)(uintptr_t)payload; /* only read from here on */
    for (uint32_t i = 0; i < layout->part_count; i++) {
        if (layout->parts[i].group != job->group)
            continue;
        for (uint32_t head = 0; head < layout->parts[i].heads; head++)
            decode_head(job, i, head, &cursor);
    }
    kvt_fpmode_leave(saved);
    return 0;
}

/* ---- fitting a map ---- */

/* The lowest level from job->level on at which every tile of the head passes; 0: not finite. */
static int fit_head(struct tile_job *job, uint32_t tokens)
{
    _Alignas(32) uint8_t scratch[KVT_HEAD_DIM_MAX / KVT_PIECE_DIM_MAX * KVT_PIECE_BYTES_MAX];
    struct kvt_encode_report ignored = {.sqnr_db_min = INFINITY};
    for (job->tile = 0; job->tile < tokens / TOKENS;) {
        struct kvt_tile_energy energy;
        if (job->level == KVT_LEVEL_RAW || kvt_guard_ratio(job->level) == 0.0f)
            return job->level;
        if (encode_tile(job, scratch, &energy) != 0)
            return 0;
        if (apply_guard(job, &energy, 0, 0, &ignored))
            job->tile++;
        else
            job->level++;
    }
    return job->level;
}

long kvt_map_fit_by(const struct kvt_codec_kernels *kernels, const struct kvt_layout *layout,
                    uint16_t group, uint8_t *map, const struct kvt_pool_desc *pool, uint32_t block)
{
    struct block_job job = {.layout = layout,
                            .pool = pool,
                            .kernels = kernels,
                            .map = map,
                            .block = block,
                            .group = group,
                            .tokens = kvt_group_tokens(layout, group)};
    long raised = 0;
    if (job_payload_bytes(&job) == 0 || block >= pool->block_count ||
        pool->device != KVT_DEVICE_HOST)
        return KVT_E_INVAL;
    kvt_fpmode saved = kvt_fpmode_enter();
    for (uint32_t i = 0; i < layout->part_count; i++) {
        if (layout->parts[i].group != group)
            continue;
        for (uint32_t head = 0; head < layout->parts[i].heads; head++) {
            uint32_t entry = job.entry;
            struct tile_job tiles = head_job(&job, i, head);
            int before = tiles.level;
            int level = kvt_part_is_key(tiles.part) ? fit_head(&tiles, job.tokens) : before;
            if (level > before) {
                kvt_map_set(map, entry, level);
                raised++;
            }
        }
    }
    kvt_fpmode_leave(saved);
    return raised;
}

/* ---- entry points ---- */

int kvt_encode_block_by(const struct kvt_codec_kernels *kernels, const struct kvt_layout *layout,
                        uint16_t group, int level, const struct kvt_pool_desc *pool, uint32_t block,
                        void *payload, size_t payload_len, int guard,
                        struct kvt_encode_report *report)
{
    struct block_job job = {.layout = layout,
                            .pool = pool,
                            .kernels = kernels,
                            .level = level,
                            .block = block,
                            .group = group,
                            .guard = guard};
    return encode_job(&job, payload, payload_len, report);
}

int kvt_encode_map_by(const struct kvt_codec_kernels *kernels, const struct kvt_layout *layout,
                      uint16_t group, const uint8_t *map, const struct kvt_pool_desc *pool,
                      uint32_t block, void *payload, size_t payload_len, int guard,
                      struct kvt_encode_report *report)
{
    struct block_job job = {.layout = layout,
                            .pool = pool,
                            .kernels = kernels,
                            .map = map,
                            .block = block,
                            .group = group,
                            .guard = guard};
    return encode_job(&job, payload, payload_len, report);
}

int kvt_decode_block_by(const struct kvt_codec_kernels *kernels, const struct kvt_layout *layout,
                        uint16_t group, int level, const void *payload, size_t payload_len,
                        const struct kvt_pool_desc *pool, uint32_t block)
{
    struct block_job job = {.layout = layout,
                            .pool = pool,
                            .kernels = kernels,
                            .level = level,
                            .block = block,
                            .group = group};
    return decode_job(&job, payload, payload_len);
}

int kvt_decode_map_by(const struct kvt_codec_kernels *kernels, const struct kvt_layout *layout,
                      uint16_t group, const uint8_t *map, const void *payload, size_t payload_len,
                      const struct kvt_pool_desc *pool, uint32_t block)
{
    struct block_job job = {.layout = layout,
                            .pool = pool,
                            .kernels = kernels,
                            .map = map,
                            .block = block,
                            .group = group};
    return decode_job(&job, payload, payload_len);
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

int kvt_encode_map(const struct kvt_layout *layout, uint16_t group, const uint8_t *map,
                   const struct kvt_pool_desc *pool, uint32_t block, void *payload,
                   size_t payload_len, int guard, struct kvt_encode_report *report)
{
    return kvt_encode_map_by(kvt_codec_kernels(), layout, group, map, pool, block, payload,
                             payload_len, guard, report);
}

int kvt_decode_map(const struct kvt_layout *layout, uint16_t group, const uint8_t *map,
                   const void *payload, size_t payload_len, const struct kvt_pool_desc *pool,
                   uint32_t block)
{
    return kvt_decode_map_by(kvt_codec_kernels(), layout, group, map, payload, payload_len, pool,
                             block);
}

long kvt_map_fit(const struct kvt_layout *layout, uint16_t group, uint8_t *map,
                 const struct kvt_pool_desc *pool, uint32_t block)
{
    return kvt_map_fit_by(kvt_codec_kernels(), layout, group, map, pool, block);
}
