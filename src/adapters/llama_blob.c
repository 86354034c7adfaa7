/* Parse, compose and check sequence-state blobs; the format is in llama_blob.h.
 *
 * Invariants: no byte past `len` is read whatever the bytes are; a blob that passes
 * kvt_blob_parse() has kvt_blob_bytes() bytes and rows at kvt_blob_rows_offset(). Threads: any, no
 * state. It does not know llama.cpp: no call, no header of it.
 */
#include "llama_blob.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <kvtier/error.h>

#define BLOB_MAGIC 0xaf143cd8u
#define HEAD_BYTES 16u     /* magic, seq, streams, cells */
#define CELL_BYTES 12u     /* pos, seqs, seq */
#define SECTION_BYTES 8u   /* v_transposed, layers */
#define ROW_HEAD_BYTES 12u /* type, row bytes */

struct reader {
    const uint8_t *at;
    size_t left;
};

static int take(struct reader *reader, void *out, size_t bytes)
{
    if (reader->left < bytes)
        return 0;
    memcpy(out, reader->at, bytes);
    reader->at += bytes;
    reader->left -= bytes;
    return 1;
}

static int skip(struct reader *reader, size_t bytes)
{
    if (reader->left < bytes)
        return 0;
    reader->at += bytes;
    reader->left -= bytes;
    return 1;
}

static uint8_t *put(uint8_t *at, const void *value, size_t bytes)
{
    memcpy(at, value, bytes);
    return at + bytes;
}

/* Magic to cell count; why is set on failure. */
static int take_head(struct reader *reader, int32_t seq, uint32_t cells, const char **why)
{
    uint32_t magic, streams, count;
    int32_t got_seq;

    if (!take(reader, &magic, 4) || !take(reader, &got_seq, 4) || !take(reader, &streams, 4)) {
        *why = "the state is shorter than its header";
        return KVT_E_ENGINE;
    }
    if (magic != BLOB_MAGIC) {
        *why = "the state has another magic number: this llama.cpp uses another format";
        return KVT_E_ENGINE;
    }
    if (streams != 1) {
        *why = "the cache has one stream per sequence: set kv_unified = true";
        return KVT_E_UNSUPPORTED;
    }
    if (!take(reader, &count, 4) || got_seq != seq || count != cells) {
        *why = "the state holds another sequence or another number of cells than asked for";
        return KVT_E_ENGINE;
    }
    return 0;
}

/* One cell's metadata; its position goes to *pos. */
static int take_cell(struct reader *reader, int32_t seq, int32_t *pos, const char **why)
{
    uint32_t seqs;
    int32_t got_seq;

    if (!take(reader, pos, 4) || !take(reader, &seqs, 4) || !take(reader, &got_seq, 4)) {
        *why = "the state ends within its cells";
        return KVT_E_ENGINE;
    }
    if (seqs != 1 || got_seq != seq) {
        *why = "the cells carry more than one position or sequence (M-RoPE, n-gram embeddings)";
        return KVT_E_UNSUPPORTED;
    }
    return 0;
}

static int take_section(struct reader *reader, uint32_t *layers, const char **why)
{
    uint32_t transposed;

    if (!take(reader, &transposed, 4) || !take(reader, layers, 4)) {
        *why = "the state ends before its layers";
        return KVT_E_ENGINE;
    }
    if (transposed != 0) {
        *why = "the V cache is transposed: enable flash attention";
        return KVT_E_UNSUPPORTED;
    }
    if (*layers == 0 || *layers > KVT_BLOB_LAYERS_MAX) {
        *why = "the state has no layers, or too many";
        return KVT_E_UNSUPPORTED;
    }
    return 0;
}

static int take_row_head(struct reader *reader, struct kvt_blob_row *row, const char **why)
{
    uint64_t bytes;

    if (!take(reader, &row->type, 4) || !take(reader, &bytes, 8)) {
        *why = "the state ends within its layers";
        return KVT_E_ENGINE;
    }
    if (bytes == 0 || bytes > KVT_BLOB_ROW_BYTES_MAX) {
        *why = "a row of the cache is empty or too long";
        return KVT_E_UNSUPPORTED;
    }
    row->bytes = (uint32_t)bytes;
    return 0;
}

static int learn_rows(struct reader *reader, struct kvt_blob_shape *shape, const char **why)
{
    for (uint32_t p = 0; p < 2 * shape->layers; p++) {
        if (p == shape->layers && reader->left == 0) {
            *why = "the cache holds latent rows (MLA) instead of keys and values";
            return KVT_E_UNSUPPORTED;
        }
        int rc = take_row_head(reader, &shape->rows[p], why);
        if (rc != 0)
            return rc;
        if (!skip(reader, shape->rows[p].bytes)) {
            *why = "the state ends within its rows";
            return KVT_E_ENGINE;
        }
        shape->token_bytes += shape->rows[p].bytes;
    }
    if (reader->left != 0) {
        *why = "the cache has more than one part (sliding window, recurrent or indexer state)";
        return KVT_E_UNSUPPORTED;
    }
    return 0;
}

int kvt_blob_learn(const void *blob, size_t len, int32_t seq, int32_t pos,
                   struct kvt_blob_shape *shape, const char **why)
{
    struct reader reader = {blob, len};
    int32_t got_pos = -1;

    memset(shape, 0, sizeof(*shape));
    int rc = take_head(&reader, seq, 1, why);
    if (rc == 0)
        rc = take_cell(&reader, seq, &got_pos, why);
    if (rc == 0 && got_pos != pos) {
        *why = "the state holds another position than asked for";
        rc = KVT_E_ENGINE;
    }
    if (rc == 0)
        rc = take_section(&reader, &shape->layers, why);
    if (rc != 0)
        return rc;
    shape->rows = calloc(2 * (size_t)shape->layers, sizeof(*shape->rows));
    if (shape->rows == NULL) {
        *why = "out of memory";
        return -ENOMEM;
    }
    rc = learn_rows(&reader, shape, why);
    if (rc != 0)
        kvt_blob_shape_free(shape);
    return rc;
}

void kvt_blob_shape_free(struct kvt_blob_shape *shape)
{
    free(shape->rows);
    memset(shape, 0, sizeof(*shape));
}

size_t kvt_blob_bytes(const struct kvt_blob_shape *shape, uint32_t cells)
{
    size_t per_cell = shape->token_bytes + CELL_BYTES, bytes;

    if (__builtin_mul_overflow(per_cell, (size_t)cells, &bytes) ||
        __builtin_add_overflow(
            bytes, HEAD_BYTES + SECTION_BYTES + 2 * (size_t)shape->layers * ROW_HEAD_BYTES, &bytes))
        return 0;
    return bytes;
}

size_t kvt_blob_rows_offset(const struct kvt_blob_shape *shape, uint32_t part, uint32_t cells)
{
    size_t offset = HEAD_BYTES + (size_t)cells * CELL_BYTES + SECTION_BYTES;

    for (uint32_t p = 0; p < part; p++)
        offset += ROW_HEAD_BYTES + (size_t)cells * shape->rows[p].bytes;
    return offset + ROW_HEAD_BYTES;
}

void kvt_blob_write_headers(const struct kvt_blob_shape *shape, int32_t seq, int32_t first_pos,
                            uint32_t cells, void *blob)
{
    const uint32_t magic = BLOB_MAGIC, one = 1, zero = 0;
    uint8_t *at = blob;

    at = put(at, &magic, 4);
    at = put(at, &seq, 4);
    at = put(at, &one, 4);
    at = put(at, &cells, 4);
    for (uint32_t i = 0; i < cells; i++) {
        int32_t pos = first_pos + (int32_t)i;
        at = put(at, &pos, 4);
        at = put(at, &one, 4);
        at = put(at, &seq, 4);
    }
    at = put(at, &zero, 4);
    at = put(at, &shape->layers, 4);
    for (uint32_t p = 0; p < 2 * shape->layers; p++) {
        const uint64_t row_bytes = shape->rows[p].bytes;
        at = put(at, &shape->rows[p].type, 4);
        at = put(at, &row_bytes, 8);
        at += (size_t)cells * row_bytes;
    }
}

/* Cells: positions [first_pos, first_pos + cells), each once, in any order. */
static int parse_cells(struct reader *reader, int32_t seq, int32_t first_pos, uint32_t cells,
                       uint32_t *order, int *sorted, const char **why)
{
    *sorted = 1;
    for (uint32_t i = 0; i < cells; i++)
        order[i] = UINT32_MAX;
    for (uint32_t i = 0; i < cells; i++) {
        int32_t pos;
        int rc = take_cell(reader, seq, &pos, why);
        if (rc != 0)
            return rc;
        int64_t at = (int64_t)pos - first_pos;
        if (at < 0 || at >= cells || order[at] != UINT32_MAX) {
            *why = "the state's positions are not those asked for, each once";
            return KVT_E_ENGINE;
        }
        order[at] = i;
        if (at != i)
            *sorted = 0;
    }
    return 0;
}

int kvt_blob_parse(const struct kvt_blob_shape *shape, int32_t seq, int32_t first_pos,
                   uint32_t cells, const void *blob, size_t len, uint32_t *order, int *sorted,
                   const char **why)
{
    struct reader reader = {blob, len};
    uint32_t layers = 0;

    if (cells == 0 || len != kvt_blob_bytes(shape, cells)) {
        *why = "the state has another size than its cells and layers need";
        return KVT_E_ENGINE;
    }
    int rc = take_head(&reader, seq, cells, why);
    if (rc == 0)
        rc = parse_cells(&reader, seq, first_pos, cells, order, sorted, why);
    if (rc == 0)
        rc = take_section(&reader, &layers, why);
    if (rc == 0 && layers != shape->layers) {
        *why = "the state has another number of layers than the context had";
        rc = KVT_E_ENGINE;
    }
    for (uint32_t p = 0; rc == 0 && p < 2 * shape->layers; p++) {
        struct kvt_blob_row row;
        rc = take_row_head(&reader, &row, why);
        if (rc != 0)
            break;
        if (row.type != shape->rows[p].type || row.bytes != shape->rows[p].bytes ||
            !skip(&reader, (size_t)cells * row.bytes)) {
            *why = "a layer of the state has another type or row size than the context had";
            rc = KVT_E_ENGINE;
        }
    }
    if (rc == 0 && reader.left != 0) {
        *why = "the state is longer than its layers";
        rc = KVT_E_ENGINE;
    }
    return rc == KVT_E_UNSUPPORTED ? KVT_E_ENGINE : rc;
}

void kvt_blob_sort_rows(const struct kvt_blob_shape *shape, uint32_t cells, const uint32_t *order,
                        const void *from, void *to)
{
    size_t offset = kvt_blob_rows_offset(shape, 0, cells);

    for (uint32_t p = 0; p < 2 * shape->layers; p++) {
        const size_t bytes = shape->rows[p].bytes;
        for (uint32_t i = 0; i < cells; i++)
            memcpy((uint8_t *)to + offset + i * bytes,
                   (const uint8_t *)from + offset + order[i] * bytes, bytes);
        offset += cells * bytes + ROW_HEAD_BYTES;
    }
}

size_t kvt_blob_shrink(const struct kvt_blob_shape *shape, int32_t seq, int32_t first_pos,
                       uint32_t cells, uint32_t keep, void *blob)
{
    uint8_t *base = blob;
    size_t from = kvt_blob_rows_offset(shape, 0, cells);
    size_t to = kvt_blob_rows_offset(shape, 0, keep);

    /* Every target lies at or before its source, parts in ascending order: no row is overwritten
     * before it has moved. */
    for (uint32_t p = 0; p < 2 * shape->layers; p++) {
        const size_t bytes = shape->rows[p].bytes;
        memmove(base + to, base + from, keep * bytes);
        from += cells * bytes + ROW_HEAD_BYTES;
        to += keep * bytes + ROW_HEAD_BYTES;
    }
    kvt_blob_write_headers(shape, seq, first_pos, keep, blob);
    return kvt_blob_bytes(shape, keep);
}
