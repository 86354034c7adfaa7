/* The bytes that llama_state_seq_get_data() gives and llama_state_seq_set_data() takes, for a plain
 * unified attention cache: another project's format, so every field is checked and nothing assumed.
 *
 * In host byte order, without alignment:
 *   u32 magic 0xaf143cd8, i32 seq, u32 streams = 1, u32 cells,
 *   cells x { i32 pos, u32 seqs = 1, i32 seq }      in cell order, which need not be position order
 *   u32 v_transposed = 0, u32 layers,
 *   layers x { i32 type, u64 row bytes, cells x row }                 K of every layer
 *   layers x { i32 type, u64 row bytes, cells x row }                 V of every layer
 * Pure functions: no llama.cpp call, no state; kvt_blob_learn() alone allocates. Thread: any.
 */
#ifndef KVT_ADAPTERS_LLAMA_BLOB_H
#define KVT_ADAPTERS_LLAMA_BLOB_H

#include <stddef.h>
#include <stdint.h>

#define KVT_BLOB_LAYERS_MAX 2048u      /* two parts a layer: KVT_PARTS_MAX */
#define KVT_BLOB_ROW_BYTES_MAX 4194304 /* 1,024 heads of 1,024 elements of 4 B */

struct kvt_blob_row {
    int32_t type; /* enum ggml_type */
    uint32_t bytes;
};

/* What the rows of a context look like; constant for its life. */
struct kvt_blob_shape {
    uint32_t layers;
    size_t token_bytes;        /* all rows of one token */
    struct kvt_blob_row *rows; /* 2 * layers: K of every layer, then V of every layer; owned */
};

/* Learn the shape from the blob of exactly one cell at position `pos` of sequence `seq`.
 * 0: shape is owned by the caller (kvt_blob_shape_free()); KVT_E_UNSUPPORTED a cache kind that we
 * do not take, KVT_E_ENGINE bytes that we do not understand: *why says so; -ENOMEM. */
__attribute__((warn_unused_result)) int kvt_blob_learn(const void *blob, size_t len, int32_t seq,
                                                       int32_t pos, struct kvt_blob_shape *shape,
                                                       const char **why);
void kvt_blob_shape_free(struct kvt_blob_shape *shape);

/* Bytes of a blob of that many cells; 0 on overflow. */
size_t kvt_blob_bytes(const struct kvt_blob_shape *shape, uint32_t cells);

/* Offset of the rows of part p (the order of shape->rows) in a blob of that many cells. */
size_t kvt_blob_rows_offset(const struct kvt_blob_shape *shape, uint32_t part, uint32_t cells);

/* Write everything but the rows, for cells at positions [first_pos, first_pos + cells). The blob
 * has kvt_blob_bytes() bytes. */
void kvt_blob_write_headers(const struct kvt_blob_shape *shape, int32_t seq, int32_t first_pos,
                            uint32_t cells, void *blob);

/* Check a blob against the shape and against exactly the positions [first_pos, first_pos + cells)
 * of sequence seq, each once.
 * order: cells entries; order[i] = which row of the blob holds position first_pos + i.
 * sorted: 1 when the rows stand in position order already.
 * 0 or KVT_E_ENGINE with *why. */
__attribute__((warn_unused_result)) int
kvt_blob_parse(const struct kvt_blob_shape *shape, int32_t seq, int32_t first_pos, uint32_t cells,
               const void *blob, size_t len, uint32_t *order, int *sorted, const char **why);

/* Copy the rows of a parsed blob into position order; headers of `to` are not written. */
void kvt_blob_sort_rows(const struct kvt_blob_shape *shape, uint32_t cells, const uint32_t *order,
                        const void *from, void *to);

/* Keep the first `keep` of `cells` cells of a blob in position order, in place; rewrites the
 * headers. Returns the new length. */
size_t kvt_blob_shrink(const struct kvt_blob_shape *shape, int32_t seq, int32_t first_pos,
                       uint32_t cells, uint32_t keep, void *blob);

#endif
